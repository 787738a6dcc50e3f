"""Node-local files are part of a state: collected in the window, put back before a restore."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from jupyter_gpu_ckpt.capture import files
from jupyter_gpu_ckpt.capture.images_proto import Image, write_image
from jupyter_gpu_ckpt.errors import CkptError

from .conftest import RunningKernel

_OPEN_EVERYTHING = """
import mmap, os, socket, tempfile
os.makedirs("sub/deep")
os.chmod("sub", 0o750)
data = open("data", "w+b"); data.write(b"data"); data.flush(); os.chmod("data", 0o640)
os.link("data", "same"); same = open("same", "rb")
sparse = open("sparse", "w+b"); sparse.truncate(40 << 20); sparse.seek(20 << 20)
sparse.write(b"middle"); sparse.flush()
with open("mapped", "w+b") as file:
    file.truncate(8192)
    mapped = mmap.mmap(file.fileno(), 8192)
mapped[:6] = b"mapped"
os.mkfifo("fifo"); fifo = os.open("fifo", os.O_RDWR)
service = socket.socket(socket.AF_UNIX); service.bind("sub/socket"); service.listen()
ghost = tempfile.TemporaryFile(dir="."); ghost.write(b"ghost"); ghost.flush()
renamed = open("first", "w+b"); renamed.write(b"renamed"); renamed.flush()
os.link("first", "second"); os.unlink("first")
os.chdir("sub/deep")
"""

_USE_EVERYTHING = """
folder = os.path.dirname(os.path.dirname(os.getcwd()))
at = lambda name: os.path.join(folder, name)
print(oct(os.stat(at("sub")).st_mode & 0o777), oct(os.stat(at("data")).st_mode & 0o777))
data.write(b"+"); data.flush(); print(same.read(), os.path.samefile(at("data"), at("same")))
sparse.seek(20 << 20)
print(sparse.read(6), os.stat(at("sparse")).st_size, os.stat(at("sparse")).st_blocks < 1000)
print(mapped[:6], open(at("mapped"), "rb").read(6))
os.write(fifo, b"fifo"); print(os.read(fifo, 4))
client = socket.socket(socket.AF_UNIX); client.connect(at("sub/socket")); service.accept()
ghost.seek(0); renamed.seek(0); print(ghost.read(), renamed.read())
print(sorted(name for name in os.listdir(folder)))
"""

_USED = """0o750 0o640
b'data+' True
b'middle' 41943040 True
b'mapped' b'mapped'
b'fifo'
b'ghost' b'renamed'
['data', 'fifo', 'mapped', 'same', 'second', 'sparse', 'sub']
"""


@pytest.fixture
def local(tmp_path: Path, kernel: RunningKernel) -> Path:
    """A node-local directory that is the kernel's working directory."""
    folder = tmp_path / "local"
    folder.mkdir()
    kernel.run(f"import os; os.chdir({str(folder)!r})")
    return folder


def test_everything_comes_back_on_a_node_that_never_had_it(
    kernel: RunningKernel, local: Path
) -> None:
    kernel.run(_OPEN_EVERYTHING)
    images_dir, entries = kernel.save([str(local)])
    assert not list(local.glob("link_remap.*")), "the next dump would stumble over it"
    for copy in (images_dir / "node-local").iterdir():
        assert copy.stat().st_mode & 0o777 == 0o600
    kernel.kill()
    shutil.rmtree(local)
    local.mkdir()

    assert files.put_back(images_dir, entries, dirs=[str(local)]) == []
    kernel.restore(images_dir)
    files.clean_up(images_dir, entries)
    assert kernel.run(_USE_EVERYTHING) == _USED
    # What was restored can be saved and restored again.
    images_dir, entries = kernel.save([str(local)])
    kernel.kill()
    files.put_back(images_dir, entries)
    kernel.restore(images_dir)


def test_on_the_same_node_nothing_is_lost(kernel: RunningKernel, local: Path) -> None:
    kernel.run("f = open('kept', 'w+'); f.write('saved'); f.flush(); g = open('same', 'w')")
    images_dir, entries = kernel.save([str(local)])
    kernel.run("f.write(' and more'); f.flush()")
    kernel.kill()
    (same,) = [local / "same"]
    inode = same.stat().st_ino
    (warning,) = files.put_back(images_dir, entries)
    assert "kept.before-restore-1" in warning
    assert (local / "kept.before-restore-1").read_text() == "saved and more"
    assert same.stat().st_ino == inode, "what has not changed is left alone"
    kernel.restore(images_dir)
    kernel.run("f.write('!'); f.flush()")
    assert (local / "kept").read_text() == "saved!"
    kernel.kill()
    files.put_back(images_dir, entries)
    assert (local / "kept.before-restore-2").read_text() == "saved!"


def rows(path: Path) -> list[int]:
    """What a database holds."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        return [x for (x,) in database.execute("select x from t order by x")]


def test_a_database_that_has_changed_can_be_written_on(kernel: RunningKernel, local: Path) -> None:
    """SQLite does not write where the name leads to another file than the one it opened."""
    kernel.run(
        "import sqlite3; db = sqlite3.connect('x.db', isolation_level=None)\n"
        "db.execute('create table t (x)'); db.execute('insert into t values (1)')"
    )
    images_dir, entries = kernel.save([str(local)])
    kernel.run("db.execute('insert into t values (2)'); db.execute('vacuum')")
    kernel.kill()
    (local / "x.db-journal").write_text("of the transaction in which it was killed")
    first, second = files.put_back(images_dir, entries)
    assert "what it held is now x.db.before-restore-1" in first
    assert "x.db-journal was in the way" in second
    kernel.restore(images_dir)
    kernel.run("db.execute('insert into t values (3)')")
    assert rows(local / "x.db") == [1, 3]
    assert rows(local / "x.db.before-restore-1") == [1, 2]
    kernel.kill()
    # What another program has open is not written over: that keeps its file.
    with contextlib.closing(sqlite3.connect(local / "x.db")) as other:
        other.execute("select x from t").fetchall()
        files.put_back(images_dir, entries)
        assert other.execute("select x from t order by x").fetchall() == [(1,), (3,)]
    assert rows(local / "x.db") == [1]


def test_what_others_write_to_as_well_is_left_as_it_is(kernel: RunningKernel, local: Path) -> None:
    kernel.run("f = open('shared', 'w+'); f.write('saved'); f.flush()")
    images_dir, _ = kernel.dump()
    entries = files.collect(
        kernel.pid, images_dir, [str(local)], limit=1 << 20, is_shared=lambda path: True
    )
    kernel.run("f.write(' and more'); f.flush()")
    inode = (local / "shared").stat().st_ino
    assert files.put_back(images_dir, entries) == []
    assert (local / "shared").read_text() == "saved and more"
    assert (local / "shared").stat().st_ino == inode
    (local / "shared").unlink()
    files.put_back(images_dir, entries)
    assert (local / "shared").read_text() == "saved"


def test_semaphores_and_shared_memory(kernel: RunningKernel) -> None:
    kernel.run(
        """
import multiprocessing
from multiprocessing import shared_memory
lock = multiprocessing.get_context("spawn").Lock()
memory = shared_memory.SharedMemory(create=True, size=4096)
memory.buf[:5] = b"saved"
"""
    )
    memory = Path("/dev/shm") / kernel.run("print(memory.name)").strip()
    semaphore = Path("/dev/shm") / ("sem." + kernel.run("print(lock._semlock.name[1:])").strip())
    try:
        images_dir, entries = kernel.save(["/dev/shm"])
        assert kernel.run("print(lock.acquire(False)); memory.buf[:5] = b'later'") == "True\n"
        kernel.save(["/dev/shm"])
        kernel.kill()
        assert memory.exists()
        assert files.put_back(images_dir, entries) == [], "old memory is no document"
        assert memory.read_bytes()[:5] == b"saved"
        kernel.restore(images_dir)
        assert not list(Path("/dev/shm").glob("*.before-restore-*"))
        assert kernel.run("print(bytes(memory.buf[:5]), lock.acquire(False))") == "b'saved' True\n"
        kernel.run("lock.release()")
        # By name, as a process that is spawned later finds it.
        script = (
            "context = multiprocessing.get_context('spawn')\n"
            "process = context.Process(target=type(lock).__enter__, args=(lock,))\n"
            "process.start(); process.join(20); print(process.exitcode, lock.acquire(False))"
        )
        assert kernel.run(script) == "0 False\n"
    finally:
        memory.unlink(missing_ok=True)
        semaphore.unlink(missing_ok=True)


def test_links_of_restores_at_the_same_moment(kernel: RunningKernel, local: Path) -> None:
    """States of kernels that are alike, or of one kernel, have links of the same names."""
    kernel.run(
        "import os; f = open('first', 'w+b'); os.link('first', 'second'); os.unlink('first')\n"
        "f.write(b'one'); f.flush()"
    )
    one, entries_of_one = kernel.save([str(local)])
    kernel.run("f.seek(0); f.write(b'two'); f.flush()")
    two, entries_of_two = kernel.save([str(local)])
    kernel.kill()
    (local / "second").unlink()
    assert files.put_back(one, entries_of_one) == []
    (local / "second").unlink()
    assert files.put_back(two, entries_of_two) == []
    (local / "second").unlink()
    kernel.restore(one)
    files.clean_up(one, entries_of_one)
    assert kernel.run("f.seek(0); print(f.read())") == "b'one'\n"
    kernel.kill()
    kernel.restore(two)
    files.clean_up(two, entries_of_two)
    assert kernel.run("f.seek(0); print(f.read())") == "b'two'\n"
    assert not list(local.glob("link_remap.*"))


def test_a_file_that_is_called_like_a_link_of_criu_stays(
    kernel: RunningKernel, local: Path
) -> None:
    kernel.run("mine = open('link_remap.7', 'w+'); mine.write('precious'); mine.flush()")
    kernel.run(
        "gone = open('first', 'w+'); gone.write('renamed'); gone.flush()\n"
        "os.link('first', 'second'); os.unlink('first')"
    )
    images_dir, entries = kernel.save([str(local)])
    assert (local / "link_remap.7").read_text() == "precious"
    assert sorted(os.listdir(local)) == ["link_remap.7", "second"]
    kernel.kill()
    assert files.put_back(images_dir, entries) == []
    kernel.restore(images_dir)
    files.clean_up(images_dir, entries)
    assert kernel.run("gone.seek(0); mine.seek(0); print(gone.read(), mine.read())").split() == [
        "renamed", "precious",
    ]  # fmt: skip
    assert sorted(os.listdir(local)) == ["link_remap.7", "second"]


def test_the_limit_names_the_largest_file(kernel: RunningKernel, local: Path) -> None:
    kernel.run("f = open('large', 'wb'); f.write(bytes(3 << 20)); f.flush()")
    kernel.run("os.link('large', 'other'); g = open('other')")
    images_dir, _ = kernel.dump()
    with pytest.raises(CkptError, match=r"3\.0 MiB") as caught:
        files.collect(kernel.pid, images_dir, [str(local)], limit=2 << 20)
    assert caught.value.reason == "not_savable"
    assert str(local / "large") in str(caught.value.hint)
    assert not (images_dir / "node-local").exists()
    assert files.collect(kernel.pid, images_dir, [str(local)], limit=4 << 20)


def test_only_what_is_open_below_the_directories(kernel: RunningKernel, local: Path) -> None:
    kernel.run("open('closed', 'w').close(); f = open('open', 'w'); os.symlink('open', 'link')")
    kernel.run("g = open('link'); child = __import__('subprocess').Popen(['sleep', '100'])")
    _, entries = kernel.save([str(local), "/no/such/folder"])
    assert [entry.path for entry in entries] == [str(local / "open")]


@pytest.fixture
def entry(tmp_path: Path) -> Iterator[tuple[Path, files.NodeLocalEntry]]:
    """An image directory with the copy of one file, and the file's entry."""
    images_dir = tmp_path / "images"
    (images_dir / "node-local").mkdir(parents=True)
    (images_dir / "node-local" / "0").write_text("saved")
    (tmp_path / "local").mkdir()
    yield (
        images_dir,
        files.NodeLocalEntry(
            path=str(tmp_path / "local" / "a" / "b"),
            base=str(tmp_path / "local"),
            kind="file",
            mode=0o600,
            uid=os.getuid(),
            gid=os.getgid(),
            size=5,
            source=0,
        ),
    )


def _changed(entry: files.NodeLocalEntry, **changes: object) -> files.NodeLocalEntry:
    return msgspec.structs.replace(entry, **changes)


def test_links_in_the_way_are_not_followed(
    entry: tuple[Path, files.NodeLocalEntry], tmp_path: Path
) -> None:
    images_dir, file = entry
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "b").write_text("precious")
    (tmp_path / "local" / "a").symlink_to(elsewhere)
    warnings = files.put_back(images_dir, [file])
    assert (elsewhere / "b").read_text() == "precious"
    assert (tmp_path / "local" / "a.before-restore-1").is_symlink()
    assert "a.before-restore-1" in warnings[0]
    assert Path(file.path).read_text() == "saved"

    Path(file.path).unlink()
    Path(file.path).symlink_to(elsewhere / "b")
    files.put_back(images_dir, [file])
    assert (elsewhere / "b").read_text() == "precious"
    assert not Path(file.path).is_symlink()


@pytest.mark.parametrize("in_the_way", ["directory", "fifo", "socket-like name"])
def test_other_things_in_the_way_are_moved(
    entry: tuple[Path, files.NodeLocalEntry], tmp_path: Path, in_the_way: str
) -> None:
    images_dir, file = entry
    path = Path(file.path)
    path.parent.mkdir()
    if in_the_way == "directory":
        path.mkdir()
        (path / "inside").write_text("precious")
    elif in_the_way == "fifo":
        os.mkfifo(path)
    else:
        path.parent.rmdir()
        path.parent.write_text("a file where a folder was")
    files.put_back(images_dir, [file])
    assert path.read_text() == "saved"
    moved = [*tmp_path.glob("local/*.before-restore-1"), *path.parent.glob("*.before-restore-1")]
    assert len(moved) == 1


_OTHER = 65534  # a user who is neither the kernel's nor root


@pytest.mark.root
@pytest.mark.parametrize("what", ["file", "folder", "fifo"])
def test_what_another_user_has_put_there_is_not_used(
    entry: tuple[Path, files.NodeLocalEntry], what: str
) -> None:
    """Even if it looks the same: its owner could change it afterwards."""
    images_dir, file = entry
    path = Path(file.path)
    path.parent.mkdir()
    place = path
    if what == "file":
        path.write_text("saved")
        path.chmod(file.mode)
    elif what == "folder":
        place, file = path.parent, _changed(file, path=str(path.parent), kind="dir", source=None)
    else:
        os.mkfifo(path)
        file = _changed(file, kind="fifo", source=None)
    os.chown(place, _OTHER, _OTHER)
    before = os.lstat(place).st_ino
    warnings = files.put_back(images_dir, [_changed(file, uid=0, gid=0)])
    assert os.lstat(place).st_uid == 0
    assert os.lstat(f"{place}.before-restore-1").st_ino == before
    assert "before-restore-1" in warnings[0]


@pytest.mark.root
@pytest.mark.parametrize("content", ["saved", "evil!", "other"])
def test_another_users_file_that_cannot_be_moved_stops_the_restore(content: str) -> None:
    """In a sticky folder an ordinary user cannot take others' files out of the way."""
    with tempfile.TemporaryDirectory() as folder:
        base, images_dir = Path(folder) / "tmp", Path(folder) / "images"
        (images_dir / "node-local").mkdir(parents=True)
        (images_dir / "node-local" / "0").write_text("saved")
        base.mkdir()
        base.chmod(0o1777)
        (base / "data").write_text(content)
        os.chown(base / "data", _OTHER, _OTHER)
        mine = files.NodeLocalEntry(str(base / "data"), str(base), "file", 0o644, 1, 1, source=0)
        for path in (Path(folder), images_dir, images_dir / "node-local", *images_dir.glob("*/*")):
            os.chown(path, 1, 1)
        try:
            os.seteuid(1)
            with pytest.raises(CkptError, match="cannot be put back") as caught:
                files.put_back(images_dir, [mine])
        finally:
            os.seteuid(0)
        assert caught.value.reason == "not_restorable"
        assert (base / "data").read_text() == content


@pytest.mark.parametrize(
    "changes",
    [
        {"path": "/etc/passwd"},
        {"path": "{base}/../escaped"},
        {"path": "{base}/a/../../escaped"},
        {"path": "{base}"},
        {"path": "{base}-beside/file"},
        {"path": "relative"},
        {"base": "/", "path": "/etc/passwd"},
        {"base": "/etc", "path": "/etc/passwd"},
        {"base": "/etc", "path": "/etc/passwd", "link_remap": True},
        {"same_as": "/etc/shadow", "source": None},
        {"source": None},
        {"source": 7},
    ],
)
def test_an_entry_that_points_elsewhere_is_refused(
    entry: tuple[Path, files.NodeLocalEntry], tmp_path: Path, changes: dict[str, object]
) -> None:
    images_dir, file = entry
    filled = {
        name: value.replace("{base}", file.base) if isinstance(value, str) else value
        for name, value in changes.items()
    }
    before = Path("/etc/passwd").read_bytes()
    with pytest.raises(CkptError) as caught:
        files.put_back(images_dir, [_changed(file, **filled)], dirs=[file.base])
    assert caught.value.reason == "state_damaged"
    assert Path("/etc/passwd").read_bytes() == before
    assert not (tmp_path / "escaped").exists()


def test_a_copy_that_is_a_link_is_not_read(entry: tuple[Path, files.NodeLocalEntry]) -> None:
    images_dir, file = entry
    copy = images_dir / "node-local" / "0"
    copy.unlink()
    copy.symlink_to("/etc/passwd")
    with pytest.raises(CkptError) as caught:
        files.put_back(images_dir, [file])
    assert caught.value.reason == "not_restorable"
    assert not Path(file.path).exists()


def test_a_missing_directory_is_one_clear_error(entry: tuple[Path, files.NodeLocalEntry]) -> None:
    images_dir, file = entry
    Path(file.base).rmdir()
    with pytest.raises(CkptError, match="cannot be put back") as caught:
        files.put_back(images_dir, [file])
    assert caught.value.reason == "not_restorable"
    assert caught.value.hint


def test_clean_up_removes_only_links_of_criu(
    entry: tuple[Path, files.NodeLocalEntry], tmp_path: Path
) -> None:
    images_dir, file = entry
    folder = Path(file.path).parent
    link = _changed(
        file,
        path=str(folder / "link_remap.7"),
        same_as=file.path,
        source=None,
        link_remap=True,
    )
    write_image(images_dir / "files.img", Image(bytes(8), []))
    files.put_back(images_dir, [file, link], dirs=[file.base])
    (made,) = folder.glob("link_remap.*")
    assert made.samefile(file.path)
    files.clean_up(images_dir, [file, link])
    assert [path.name for path in folder.iterdir()] == ["b"]
    files.clean_up(images_dir, [file, link])
