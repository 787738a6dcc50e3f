"""A kernel is saved, killed and restored by the capture layer, with real CRIU."""

from __future__ import annotations

from .conftest import RunningKernel


def test_a_connected_client_goes_on_after_kill_and_restore(kernel: RunningKernel) -> None:
    kernel.run("x = 41")
    images_dir, result = kernel.dump()
    assert result.image_bytes > 1 << 20
    assert 0 < result.frozen_seconds <= result.dump_seconds
    assert kernel.run("print(x)") == "41\n", "the kernel runs on after a save"

    kernel.kill()
    kernel.restore(images_dir)
    # A new client on the same ports, and the old one whose sockets were connected.
    fresh = kernel.connect()
    fresh.stop_channels()
    assert kernel.run("x += 1; print(x)") == "42\n"


def test_a_state_can_be_restored_twice(kernel: RunningKernel) -> None:
    kernel.run("n = 1")
    images_dir, _ = kernel.dump()
    for _ in range(2):
        kernel.kill()
        kernel.restore(images_dir)
        assert kernel.run("n += 1; print(n)") == "2\n"
