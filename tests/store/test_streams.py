"""One file of a state as a stream: in order, in bounded memory, verified."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.store import StateReader, StateStore
from jupyter_gpu_ckpt.store.ahead import Ahead
from jupyter_gpu_ckpt.store.codec import Scratch

from .conftest import Save, noise, pack_files, snapshot

MIB = 1 << 20


def content(reader: StateReader, path: bytes) -> bytes:
    """Put pieces together while the one before the last is still looked at, as a pipe would."""
    found, last = bytearray(), memoryview(b"")
    with reader.stream(path) as pieces:
        for piece in pieces:
            found += last
            last = piece
        found += last
    return bytes(found)


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """An image directory with files of every kind and of many blocks."""
    folder = tmp_path / "big"
    folder.mkdir()
    (folder / "pages-1.img").write_bytes(noise(9 * MIB + 4096) + bytes(3 * MIB) + noise(77, seed=3))
    (folder / "pages-2.img").write_bytes(b"much the same " * MIB)
    (folder / "empty.img").touch()
    (folder / "small.img").write_bytes(b"x")
    with open(folder / "holes.img", "wb") as file:
        os.ftruncate(file.fileno(), 40 * MIB)
        os.pwrite(file.fileno(), b"data", 33 * MIB + 4096)
    return folder


def test_every_file_comes_as_it_was(store: StateStore, save: Save, big: Path) -> None:
    with store.open(save(big).id) as reader:
        files = dict(reader.files())
        assert files == {os.fsencode(p.name): p.stat().st_size for p in big.iterdir()}
        for path in files:
            assert content(reader, path) == (big / os.fsdecode(path)).read_bytes()


def test_many_at_once(store: StateStore, save: Save, big: Path) -> None:
    with store.open(save(big).id) as reader, ThreadPoolExecutor(12) as threads:
        for found in threads.map(lambda _: content(reader, b"pages-1.img"), range(12)):
            assert found == (big / "pages-1.img").read_bytes()


def test_nobody_reads_further_than_asked_for() -> None:
    """What is read ahead stays within the buffers, and pieces in use are not written over."""
    begun: list[int] = []

    def read(number: int, scratch: Scratch) -> memoryview:
        begun.append(number)
        view = memoryview(scratch.plain)[:8]
        view[:] = number.to_bytes(8, "big")
        return view

    with Ahead(read, 1000, workers=3, level=1, cancel=None) as pieces:
        last = None
        for number, piece in enumerate(pieces):
            assert len(begun) <= number + 8
            for kept, value in ((last, number - 1), (piece, number)):
                assert kept is None or int.from_bytes(kept, "big") == value
            last = piece
    assert sorted(begun) == list(range(1000))


def test_a_stream_that_is_left_early_ends_its_threads(
    store: StateStore, save: Save, big: Path
) -> None:
    before = threading.active_count()
    with store.open(save(big).id) as reader, reader.stream(b"pages-1.img") as pieces:
        next(pieces)
    assert threading.active_count() == before


def test_a_damaged_block_is_told_where_it_is(store: StateStore, save: Save, big: Path) -> None:
    (big / "pages-1.img").write_bytes(noise(5 * MIB))
    record = save(big)
    for victim in pack_files(store.root):
        data = bytearray(victim.read_bytes())
        data[data.index((big / "pages-1.img").read_bytes()[3 * MIB : 3 * MIB + 64]) + 1000] ^= 1
        victim.write_bytes(data)
    with store.open(record.id) as reader:
        with pytest.raises(CkptError, match=f"pages-1.img at byte {3 * MIB}") as caught:
            content(reader, b"pages-1.img")
        assert caught.value.reason == "state_damaged"
        with pytest.raises(CkptError, match=r"pages-1\.img"):
            reader.verify(lambda path: path.startswith(b"pages-"))
        reader.verify(lambda path: path == b"pages-2.img")
        assert content(reader, b"small.img") == b"x"


def test_cancel(store: StateStore, save: Save, big: Path) -> None:
    cancel = threading.Event()
    with (
        store.open(save(big).id) as reader,
        reader.stream(b"pages-1.img", cancel=cancel) as pieces,
        pytest.raises(CkptError) as caught,
    ):
        next(pieces)
        cancel.set()
        list(pieces)
    assert caught.value.reason == "cancelled"


def test_unknown_file(store: StateStore, save: Save, image: Path) -> None:
    with (
        store.open(save(image).id) as reader,
        pytest.raises(KeyError),
        reader.stream(b"pages-9.img"),
    ):
        pass


def test_files_can_be_left_out(store: StateStore, save: Save, big: Path, tmp_path: Path) -> None:
    with store.open(save(big).id) as reader:
        reader.extract(tmp_path / "back", skip=lambda path: path.startswith(b"pages-"))
    expected = {k: v for k, v in snapshot(big).items() if not k.startswith(b"pages-")}
    assert snapshot(tmp_path / "back") == expected
