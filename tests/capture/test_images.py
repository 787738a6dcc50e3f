"""Reading and editing real images."""

from __future__ import annotations

import os
import sqlite3
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.capture import images
from jupyter_gpu_ckpt.capture.elf import build_id
from jupyter_gpu_ckpt.capture.images_proto import COMMON_MAGIC, read_image, write_image
from jupyter_gpu_ckpt.errors import CkptError

from .conftest import RunningKernel


@pytest.fixture
def saved(kernel: RunningKernel) -> Path:
    kernel.run("import threading, time; threading.Thread(target=time.sleep, args=(100,)).start()")
    return kernel.dump()[0]


def test_what_is_read_is_written_back_byte_for_byte(kernel: RunningKernel, saved: Path) -> None:
    kinds = {"files": "file_entry", "pstree": "pstree_entry", "mm": "mm_entry", "fs": "fs_entry"}
    seen = set()
    for path in saved.glob("*.img"):
        kind = path.name.removesuffix(".img").partition("-")[0]
        if kind in kinds:
            seen.add(kind)
            image = read_image(path, kinds[kind])
            assert image.messages
            assert image.serialise() == path.read_bytes(), path.name
    assert seen == set(kinds)


def test_what_the_images_say_is_what_proc_says(kernel: RunningKernel, saved: Path) -> None:
    (task,) = images.tasks(saved)
    assert task.pid == kernel.pid
    threads = sorted(int(name) for name in os.listdir(f"/proc/{kernel.pid}/task"))
    assert threads == sorted(task.tids)
    others = [tid for tid in threads if tid != kernel.pid]
    assert images.all_pids(saved) == [kernel.pid, *others]
    assert str(kernel.log) in images.open_files(saved)
    client = kernel.client
    listeners = images.inet_listeners(saved)
    for port in (client.shell_port, client.iopub_port, client.hb_port):
        assert (client.ip, port) in listeners


def test_the_kernels_own_number_comes_before_lower_ones_of_threads(
    kernel: RunningKernel, saved: Path
) -> None:
    """Numbers begin anew at their end, and each kernel begins at a random one."""
    image = read_image(saved / "pstree.img", "pstree_entry")
    (entry,) = image.messages
    entry.threads[:] = [kernel.pid, 9, 3, 7]
    write_image(saved / "pstree.img", image)
    assert images.all_pids(saved) == [kernel.pid, 3, 7, 9]


def test_mapped_files_are_the_programs_and_libraries(kernel: RunningKernel, saved: Path) -> None:
    interpreter = os.path.realpath(sys.executable)
    found = {file.path: file for file in images.mapped_files(saved)}
    file = found[interpreter]
    assert file.size == os.stat(interpreter).st_size
    assert file.mtime_ns == os.stat(interpreter).st_mtime_ns
    assert file.build_id == build_id(interpreter)
    libc = next(path for path in found if "/libc.so" in path)
    assert found[libc].build_id is not None
    left = images.mapped_files(saved, exclude=[os.path.dirname(libc)])
    assert libc not in [file.path for file in left]
    assert interpreter in [file.path for file in left]


def test_preparing_twice_changes_nothing_more(saved: Path) -> None:
    images.prepare_for_restore(saved)
    once = (saved / "files.img").read_bytes()
    images.prepare_for_restore(saved)
    assert (saved / "files.img").read_bytes() == once
    assert (saved / "files.img").stat().st_mode & 0o777 == 0o600


def test_a_file_that_grew_since_the_save_stops_no_restore(
    start_kernel: Callable[..., RunningKernel],
) -> None:
    kernel = start_kernel(history=True)
    kernel.run("x = 41")
    images_dir = kernel.dump_between_transactions()
    kernel.run("y = 1")
    kernel.kill()
    (history,) = (kernel.folder / "ipython").rglob("history.sqlite")
    before = history.stat().st_size
    with sqlite3.connect(history) as database:
        database.execute("create table more (text)")
        database.execute("insert into more values (?)", ["x" * 100_000])
    assert history.stat().st_size > before
    kernel.restore(images_dir)
    assert kernel.run("print(x + 1)").startswith("42\n")


def test_a_truncated_image_is_one_clear_error(saved: Path) -> None:
    whole = (saved / "files.img").read_bytes()
    for keep in (0, 6, 10, len(whole) - 1):
        (saved / "files.img").write_bytes(whole[:keep])
        with pytest.raises(CkptError, match=r"damaged.*files\.img") as caught:
            images.prepare_for_restore(saved)
        assert caught.value.reason == "state_damaged"


def test_garbage_is_one_clear_error(tmp_path: Path) -> None:
    header = struct.pack("<II", COMMON_MAGIC, 1)
    path = tmp_path / "files.img"
    for body in (struct.pack("<I", 0xFFFFFFFF), struct.pack("<I", 4) + b"\xff\xff\xff\xff"):
        path.write_bytes(header + body)
        with pytest.raises(CkptError) as caught:
            read_image(path, "file_entry")
        assert caught.value.reason == "state_damaged"
    with pytest.raises(CkptError) as caught:
        read_image(tmp_path / "missing.img", "file_entry")
    assert caught.value.reason == "state_damaged"


def test_build_id_is_what_the_linker_wrote(tmp_path: Path) -> None:
    native = next(Path("/lib").glob("*-linux-gnu/libc.so.6"))
    found = build_id(str(native))
    assert found is not None
    assert bytes.fromhex(found) in native.read_bytes()
    text = tmp_path / "text"
    text.write_text("no program")
    assert build_id(str(text)) is None
    assert build_id(str(tmp_path / "missing")) is None
    broken = tmp_path / "broken"
    broken.write_bytes(native.read_bytes()[:100])
    assert build_id(str(broken)) is None
