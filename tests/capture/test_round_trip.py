"""A kernel is saved, killed and restored by the capture layer, with real CRIU."""

from __future__ import annotations

from jupyter_gpu_ckpt.capture import images

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


def test_children_that_have_ended_or_are_stopped_come_back_as_they_were(
    kernel: RunningKernel,
) -> None:
    kernel.run(
        "import signal, subprocess\n"
        "state = lambda p: open(f'/proc/{p.pid}/stat').read().rpartition(')')[2].split()[0]\n"
        "ended = [subprocess.Popen(['sh', '-c', f'exit {code}']) for code in (0, 3)]\n"
        "sleeping, stopped = (subprocess.Popen(['sleep', '100']) for _ in range(2))\n"
        "ended.append(subprocess.Popen(['sh', '-c', 'kill -9 $$']))\n"
        "stopped.send_signal(signal.SIGSTOP)\n"
        "while [*map(state, ended), state(stopped)] != [*'ZZZT']: pass"
    )
    children = kernel.run("print(*(p.pid for p in [*ended, sleeping, stopped]))").split()
    images_dir, _ = kernel.dump()
    tasks = {task.pid: task.tids for task in images.tasks(images_dir)}
    assert {pid: tids for pid, tids in tasks.items() if pid != kernel.pid} == {
        int(child): [int(child)] for child in children
    }
    kernel.kill()
    kernel.restore(images_dir)
    assert kernel.run("print(state(sleeping), state(stopped))") == "S T\n"
    assert kernel.run("print([p.wait(5) for p in ended])") == "[0, 3, -9]\n"
