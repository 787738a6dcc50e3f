"""What goes into the store comes out of it, bit for bit."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jupyter_gpu_ckpt.store import Layout, StateStore, rebuilding
from jupyter_gpu_ckpt.store.codec import RAW, ZSTD, Scratch, encode
from jupyter_gpu_ckpt.store.keys import KeyFile, KeyRing, new_key_file

from .conftest import KERNEL, Save, extract, make_meta, noise, pack_files, snapshot

MIB = 1 << 20


def test_every_kind_of_file(store: StateStore, save: Save, image: Path, tmp_path: Path) -> None:
    os.utime(image / "one", ns=(1_000_000_007, 1_000_000_007))
    record = save(image)
    extract(store, record.id, tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(image)
    assert (tmp_path / "back" / "one").stat().st_mtime_ns == 1_000_000_007
    assert record.size == sum(p.stat().st_size for p in image.rglob("*") if p.is_file())
    # Of 8 MiB two are noise, three are zeros and the rest is one line repeated.
    assert 2 * MIB < record.stored_size < 2.2 * MIB


def test_into_an_empty_folder_but_never_into_a_full_one(
    store: StateStore, save: Save, image: Path, tmp_path: Path
) -> None:
    record = save(image)
    (tmp_path / "empty").mkdir()
    extract(store, record.id, tmp_path / "empty")
    assert snapshot(tmp_path / "empty") == snapshot(image)
    with pytest.raises(Exception, match="not empty"):
        extract(store, record.id, tmp_path / "empty")
    assert snapshot(tmp_path / "empty") == snapshot(image)


def test_huge_sparse_file_stays_sparse(store: StateStore, save: Save, tmp_path: Path) -> None:
    source = tmp_path / "image"
    source.mkdir()
    data = {0: b"first", 3 * 2**30 + 12_345: noise(5000), 5 * 2**30 - 3: b"end"}
    with open(source / "memfd", "wb") as file:
        for offset, content in data.items():
            file.seek(offset)
            file.write(content)
    record = save(source)
    back = tmp_path / "back"
    extract(store, record.id, back)
    found = (back / "memfd").stat()
    assert found.st_size == record.size == 5 * 2**30
    assert found.st_blocks <= (source / "memfd").stat().st_blocks
    with open(back / "memfd", "rb") as file:
        for offset, content in data.items():
            file.seek(offset)
            assert file.read(len(content)) == content
        assert os.lseek(file.fileno(), 64 * 1024, os.SEEK_DATA) > 3 * 2**30 - MIB


@pytest.fixture
def many_pieces(tmp_path: Path) -> Path:
    """An image with a file of 20 MiB and a bit: long pieces, short ones, holes."""
    source = tmp_path / "pieces"
    source.mkdir()
    with open(source / "pages-1.img", "wb") as file:
        file.write(noise(9 * MIB))
        file.seek(3 * MIB + 4096, os.SEEK_CUR)
        for number in range(200):
            file.write(noise(4096, seed=number))
            file.seek(8192, os.SEEK_CUR)
        file.seek(17 * MIB + 4096)
        file.write(noise(3 * MIB + 123))
    return source


def cached_pages(path: Path) -> int:
    """How many pages of a file are in memory."""
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as view,
    ):
        there = (ctypes.c_ubyte * -(-len(view) // mmap.PAGESIZE))()
        begin = ctypes.c_char.from_buffer(view)
        try:
            failed = ctypes.CDLL(None).mincore(
                ctypes.byref(begin), ctypes.c_size_t(len(view)), there
            )
        finally:
            del begin
    assert not failed
    return sum(page & 1 for page in there)


def test_large_files_leave_the_page_cache_to_others(
    store: StateStore, save: Save, many_pieces: Path, tmp_path: Path
) -> None:
    record = save(many_pieces)
    back = tmp_path / "back"
    extract(store, record.id, back)
    file = back / "pages-1.img"
    assert cached_pages(file) < 1024
    assert snapshot(back) == snapshot(many_pieces)
    assert file.stat().st_blocks <= (many_pieces / "pages-1.img").stat().st_blocks
    assert file.stat().st_mtime_ns == (many_pieces / "pages-1.img").stat().st_mtime_ns


@pytest.mark.parametrize("kind", ["ramfs", "tmpfs"])
def test_file_systems_that_only_write_through_the_cache(
    store: StateStore, save: Save, many_pieces: Path, tmp_path: Path, kind: str
) -> None:
    record = save(many_pieces)
    back = tmp_path / "back"
    back.mkdir()
    subprocess.run(["mount", "-t", kind, kind, str(back)], check=True)
    try:
        extract(store, record.id, back / "image")
        assert snapshot(back / "image") == snapshot(many_pieces)
    finally:
        subprocess.run(["umount", str(back)], check=True)


def test_a_slow_disk_is_left_to_the_page_cache(
    store: StateStore,
    save: Save,
    many_pieces: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = save(many_pieces)
    monkeypatch.setattr(rebuilding, "_TRIAL", 2 * MIB)
    monkeypatch.setattr(rebuilding, "_QUICK", 1e15)  # bytes a second: no disk is as quick
    written: list[int] = []
    write = rebuilding.Reading._write_directly

    def counted(reading: rebuilding.Reading, data: memoryview, offset: int) -> int:
        written.append(write(reading, data, offset))
        return written[-1]

    monkeypatch.setattr(rebuilding.Reading, "_write_directly", counted)
    extract(store, record.id, tmp_path / "back")
    assert 2 * MIB <= sum(written) < 8 * MIB
    assert snapshot(tmp_path / "back") == snapshot(many_pieces)


def test_names_that_are_not_text(
    store: StateStore, save: Save, image: Path, tmp_path: Path
) -> None:
    (Path(os.fsdecode(os.fsencode(image) + b"/caf\xe9 \n"))).write_bytes(b"x")
    extract(store, save(image).id, tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(image)


def test_an_image_may_be_used_up_while_it_is_stored(
    store: StateStore, image: Path, tmp_path: Path
) -> None:
    before = snapshot(image)
    with store.begin(KERNEL) as writer:
        writer.add_tree(image, consume=True)
        record = writer.commit(make_meta())
    assert (image / "pages-1.img").stat().st_blocks * 512 < MIB
    extract(store, record.id, tmp_path / "back")
    assert snapshot(tmp_path / "back") == before


def test_progress_goes_up_to_everything(store: StateStore, image: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with store.begin(KERNEL) as writer:
        writer.add_tree(image, progress=lambda done, total: seen.append((done, total)))
        record = writer.commit(make_meta())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 0
    seen.clear()
    extract(
        store, record.id, tmp_path / "back", progress=lambda done, total: seen.append((done, total))
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 0


SEGMENT = st.tuples(
    st.sampled_from(["hole", "zeros", "noise", "text"]),
    st.one_of(
        st.integers(0, 10_000),
        st.sampled_from([4096, 65_536, MIB - 1, MIB, MIB + 1, 2 * MIB]),
    ),
)
NAME = st.text("abcxyz.-_ü", min_size=1, max_size=6).filter(lambda name: name not in (".", ".."))


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@example(files={}, workers=1, level=1, sealed=False)
@example(files={((), "empty"): ([], 0o600)}, workers=1, level=1, sealed=True)
@example(files={((), "one"): ([("noise", 1)], 0o600)}, workers=1, level=1, sealed=True)
@example(files={((), "nil"): ([("zeros", 1)], 0o400)}, workers=1, level=1, sealed=False)
@example(files={((), "hole"): ([("hole", 1)], 0o600)}, workers=1, level=1, sealed=False)
@given(
    files=st.dictionaries(
        st.tuples(st.lists(NAME, max_size=2).map(tuple), NAME),
        st.tuples(st.lists(SEGMENT, max_size=5), st.sampled_from([0o600, 0o644, 0o755, 0o400])),
        max_size=4,
    ),
    workers=st.integers(1, 3),
    level=st.sampled_from([1, 3]),
    sealed=st.booleans(),
)
def test_any_layout(
    tmp_path: Path,
    files: dict[tuple[tuple[str, ...], str], tuple[list[tuple[str, int]], int]],
    workers: int,
    level: int,
    sealed: bool,
) -> None:
    """The store is shared by all examples, so later ones also reuse earlier blocks."""
    key = tmp_path / "key"
    if not key.exists():
        new_key_file(key)
    store = StateStore(
        tmp_path / ("sealed" if sealed else "plain"),
        "ada",
        compression_level=level,
        workers=workers,
        sealing=KeyRing(KeyFile(key)) if sealed else None,
    )
    scratch = Path(tempfile.mkdtemp(dir=tmp_path))
    source = scratch / "image"
    source.mkdir()
    for number, ((folders, name), (segments, mode)) in enumerate(files.items()):
        # Distinct prefixes: "a" cannot be both a file and a folder.
        folder = source.joinpath(*(f"d{part}" for part in folders))
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"f{name}", "wb") as file:
            for kind, size in segments:
                if kind == "hole":
                    file.truncate(file.tell() + size)
                    file.seek(0, os.SEEK_END)
                elif kind == "zeros":
                    file.write(bytes(size))
                elif kind == "noise":
                    file.write(noise(size, seed=number))
                else:
                    file.write((b"the same again " * (size // 15 + 1))[:size])
            os.fchmod(file.fileno(), mode)
    with store.begin(KERNEL) as writer:
        writer.add_tree(source)
        record = writer.commit(make_meta())
    extract(store, record.id, scratch / "back")
    assert snapshot(scratch / "back") == snapshot(source)
    shutil.rmtree(scratch)


def test_what_does_not_compress_is_stored_as_it_is(tmp_path: Path) -> None:
    """And what does is, as much as the level says."""
    source = tmp_path / "image"
    source.mkdir()
    (source / "noise").write_bytes(noise(MIB))
    words = [noise(5, seed=number).hex() for number in range(999)]
    text = " ".join(words[number * number % 999] for number in range(99_999)).encode()
    (source / "text").write_bytes(text)
    stored: list[bytes] = []
    for level in (1, 19):
        store = StateStore(tmp_path / f"store-{level}", "ada", compression_level=level)
        with store.begin(KERNEL) as writer:
            writer.add_tree(source)
            writer.commit(make_meta())
        stored.append(b"".join(path.read_bytes() for path in sorted(pack_files(store.root))))
    for packs in stored:
        assert noise(MIB)[4096:40960] in packs
        assert text[40960:41960] not in packs
        assert len(packs) < MIB + len(text) // 2
    assert len(stored[1]) < len(stored[0])
    # Not even in a frame, which could hold it as it is but would have to be opened.
    for plain, expected in ((noise(MIB), RAW), (text[:MIB], ZSTD)):
        assert encode(memoryview(plain), Scratch(level=1))[0] == expected


GIB = 1 << 30
AT = st.one_of(
    st.integers(0, 5 * GIB - 1),
    st.integers(0, 5 * GIB // 4096).map(lambda page: page * 4096),
    st.sampled_from([0, 1, 4095, 2**31 - 1, 2**32 - 1, 2**32, 5 * GIB - 1]),
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@example(pieces=[], size=5 * GIB)
@example(pieces=[(5 * GIB - 1, 1, b"x")], size=0)
@given(
    pieces=st.lists(
        st.tuples(AT, st.integers(1, 20_000), st.sampled_from([b"x", b"text ", b"\0\0\0y"])),
        max_size=6,
    ),
    size=st.integers(0, 5 * GIB),
)
def test_any_sparse_file(
    store: StateStore, tmp_path: Path, pieces: list[tuple[int, int, bytes]], size: int
) -> None:
    """Of up to 5 GiB, with data here and there: it comes back as it was, and as sparse."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    (folder / "image").mkdir()
    with open(folder / "image" / "memfd", "wb") as file:
        file.truncate(size)
        for at, length, text in pieces:
            file.seek(at)
            file.write((text * length)[:length])
    with store.begin(KERNEL) as writer:
        writer.add_tree(folder / "image")
        record = writer.commit(make_meta())
    extract(store, record.id, folder / "back")
    before, after = (folder / name / "memfd" for name in ("image", "back"))
    assert after.stat().st_size == before.stat().st_size == record.size
    assert after.stat().st_blocks <= before.stat().st_blocks
    with open(before, "rb") as one, open(after, "rb") as other:
        for begin, end in [*data_of(before), *data_of(after)]:
            assert os.pread(one.fileno(), end - begin, begin) == os.pread(
                other.fileno(), end - begin, begin
            )
    shutil.rmtree(folder)


def data_of(path: Path) -> list[tuple[int, int]]:
    """Ranges of a file that are no holes."""
    found: list[tuple[int, int]] = []
    with open(path, "rb") as file:
        end, size = 0, os.fstat(file.fileno()).st_size
        while end < size:
            try:
                begin = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError as error:
                assert error.errno == errno.ENXIO  # holes up to the end
                break
            end = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
            found.append((begin, end))
    return found


def test_memory_follows_its_bound(store: StateStore, tmp_path: Path) -> None:
    """Of a save, and of a read that needs many blobs at a time; the image is larger."""
    size, piece = 160 * MIB, MIB // 4
    content = bytearray()
    for number in range(size // MIB):
        content += noise(MIB // 2, seed=number) + b"text" * (MIB // 8)
    source = tmp_path / "image"
    source.mkdir()
    (source / "pages-1.img").write_bytes(content)
    # The same memory, saved in another order: so it is read from all over the packs.
    order = list(range(size // piece))
    for at in (order, random.Random(5).sample(order, len(order))):
        segments = [(n * piece, piece, place * piece) for n, place in enumerate(at)]
        with open(source / "pages-1.img", "wb") as file:
            for place in at:
                file.write(content[place * piece : (place + 1) * piece])
        with store.begin(KERNEL) as writer:
            layout = Layout("mm-1", segments)
            writer.add_tree(source, layout={b"pages-1.img": layout}.get)
            record = writer.commit(make_meta())
    assert record.stored_size < MIB

    def peak(what: str, root: Path, folder: Path, limit: int) -> float:
        """Of a process of its own, as a share of what it may take."""
        command = [sys.executable, "-c", _BOUNDED, what, root, folder, str(limit)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=100)
        return int(done.stdout) / limit

    peaks = {
        limit: [
            peak("save", tmp_path / f"store-{limit}", source, limit * MIB),
            peak("read", store.root, tmp_path / f"back-{limit}", limit * MIB),
        ]
        for limit in (64, 256)
    }
    assert all(share <= 1.1 for shares in peaks.values() for share in shares), peaks
    # And what may be taken is made use of.
    for small, large in zip(peaks[64], peaks[256], strict=True):
        assert 256 * large > 1.5 * 64 * small, peaks


#: A save or a read of all files; prints how much memory it takes.
_BOUNDED = """
import sys
from pathlib import Path
from jupyter_gpu_ckpt.store import StateStore
from tests.harness.memory import peak_memory
from tests.store.conftest import KERNEL, make_meta
what, root, folder, limit = sys.argv[1:]
store = StateStore(Path(root), "ada", workers=16, memory_limit=int(limit))
before = peak_memory()
if what == "save":
    with store.begin(KERNEL) as writer:
        writer.add_tree(Path(folder))
        writer.commit(make_meta())
else:
    with store.open(store.states()[0].id) as reader:
        reader.extract(Path(folder))
print(peak_memory() - before)
"""
