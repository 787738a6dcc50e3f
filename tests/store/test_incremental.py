"""A state that shares pages with the ones before it is as whole as one that does not."""

from __future__ import annotations

import functools
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jupyter_gpu_ckpt.store import StateRecord, StateStore, incremental
from jupyter_gpu_ckpt.store.codec import Scratch
from jupyter_gpu_ckpt.store.packs import state_of_pack
from jupyter_gpu_ckpt.store.tree import Layout

from .conftest import KERNEL, extract, make_meta, noise, pack_files, snapshot

PAGE = 4096
MIB = 1 << 20

Segments = list[tuple[int, int, int]]


@functools.cache
def page_of(content: int) -> bytes:
    """A page by its number: 0 is zeros, even ones compress, odd ones do not."""
    if content == 0:
        return bytes(PAGE)
    if content % 2:
        return noise(PAGE, content)
    return (f"content {content} ".encode() * PAGE)[:PAGE]


class Memory:
    """The address spaces of some processes: for each, address (in pages) -> content."""

    def __init__(self, spaces: dict[str, dict[int, int]]) -> None:
        self.spaces = spaces

    def write(self, folder: Path, order: Sequence[str], names: Sequence[str]) -> None:
        """Write images as CRIU does: runs of pages one after the other; order and names vary."""
        folder.mkdir()
        self.layouts: dict[bytes, Layout] = {}
        for space, name in zip(order, names, strict=True):
            pages, at = self.spaces[space], 0
            segments: Segments = []
            with open(folder / name, "wb") as file:
                for address in sorted(pages):
                    file.write(page_of(pages[address]))
                    last = segments[-1] if segments else (0, 0, -1)
                    if last[2] + last[1] == address * PAGE:
                        segments[-1] = (last[0], last[1] + PAGE, last[2])
                    else:
                        segments.append((at, PAGE, address * PAGE))
                    at += PAGE
            self.layouts[name.encode()] = Layout(space, segments)
        (folder / "core.img").write_bytes(repr(sorted(self.spaces)).encode())


def save_memory(
    store: StateStore, memory: Memory, folder: Path, parent: str | None = None
) -> StateRecord:
    with store.begin(KERNEL, parent=parent) as writer:
        writer.add_tree(folder, layout=memory.layouts.get)
        return writer.commit(make_meta())


CONTENT = st.one_of(st.just(0), st.integers(1, 40))
EDIT = st.tuples(
    st.sampled_from(["write", "map", "unmap", "move", "spread"]),
    st.integers(0, 3),  # which space
    st.integers(0, 700),  # from which page
    st.integers(1, 400),  # how many
    CONTENT,
)


def edit(memory: Memory, change: tuple[str, int, int, int, int]) -> None:
    kind, which, page, count, content = change
    space = memory.spaces.setdefault(f"mm-{which}", {})
    span = range(page, page + count)
    if kind == "write":
        space.update({at: content for at in span if at in space})
    elif kind == "map":
        space.update({at: content + at % 3 for at in span})
    elif kind == "unmap":
        for at in span:
            space.pop(at, None)
    elif kind == "move":
        memory.spaces[f"mm-{which}"] = {at + count: value for at, value in space.items()}
    else:
        space.update({at: content + at for at in span if at % 7 == 0})


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    saves=st.lists(
        st.tuples(st.lists(EDIT, max_size=4), st.permutations(range(4)), st.permutations(range(4))),
        min_size=1,
        max_size=6,
    ),
    parents=st.lists(st.one_of(st.none(), st.integers(0, 5)), min_size=6, max_size=6),
    seed=st.integers(0, 1 << 30),
)
def test_any_chain_of_saves(
    tmp_path: Path,
    saves: list[tuple[list[tuple[str, int, int, int, int]], list[int], list[int]]],
    parents: list[int | None],
    seed: int,
) -> None:
    """Address spaces grow, shrink and move; images change their order and names."""
    folder = tmp_path / str(seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    store = StateStore(folder / "store", "ada", workers=2)
    memory = Memory({"mm-0": {at: at % 5 for at in range(600)}, "mm-1": {7: 3}})
    made: list[StateRecord] = []
    for number, (edits, order, names) in enumerate(saves):
        for change in edits:
            edit(memory, change)
        spaces = [f"mm-{n}" for n in order if f"mm-{n}" in memory.spaces]
        memory.write(folder / str(number), spaces, [f"pages-{n}.img" for n in names][: len(spaces)])
        wanted = parents[number]
        parent = made[wanted].id if wanted is not None and wanted < len(made) else None
        made.append(save_memory(store, memory, folder / str(number), parent))
    for number, record in enumerate(made):
        extract(store, record.id, folder / "back")
        assert snapshot(folder / "back") == snapshot(folder / str(number))
        shutil.rmtree(folder / "back")
        assert store.verify(record.id).lost == []
    shutil.rmtree(folder)


def scatter(path: Path, share: float, seed: int) -> None:
    """Change a byte in some of a file's pages, at random."""
    dice = random.Random(seed)
    pages = path.stat().st_size // PAGE
    with open(path, "r+b") as file:
        for page in dice.sample(range(pages), max(1, int(pages * share))):
            file.seek(page * PAGE + dice.randrange(PAGE))
            file.write(dice.randbytes(1))


def test_a_chain_of_thirty_is_read_back_in_little_memory(tmp_path: Path) -> None:
    """Each blob is decoded about once, though pages of thirty saves take turns."""
    store = StateStore(tmp_path / "store", "ada", memory_limit=128 * MIB)
    source = tmp_path / "image"
    source.mkdir()
    image = source / "pages-1.img"
    image.write_bytes(noise(8 * MIB) + b"text" * (4 * MIB))
    for number in range(30):
        scatter(image, 0.02, number)
        with store.begin(KERNEL) as writer:
            writer.add_tree(source)
            record = writer.commit(make_meta())
        if number:
            assert record.stored_size < 0.06 * 16 * MIB
    with store.open(record.id) as reader:
        assert len({state_of_pack(pack.id) for pack in reader.index.packs}) == 30
        loads: list[int] = []
        load = reader._cache._load

        def counted(blob: int, into: memoryview, scratch: Scratch) -> None:
            loads.append(blob)
            load(blob, into, scratch)

        reader._cache._load = counted
        reader.extract(tmp_path / "back")
        assert snapshot(tmp_path / "back") == snapshot(source)
        assert len(loads) == len(set(loads))
        with reader.stream(b"pages-1.img") as pieces:
            assert b"".join(bytes(piece) for piece in pieces) == image.read_bytes()


def test_a_state_never_counts_on_too_many_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incremental, "GENERATIONS", 12)
    store = StateStore(tmp_path / "store", "ada")
    source = tmp_path / "image"
    source.mkdir()
    image = source / "pages-1.img"
    image.write_bytes(noise(200 * PAGE))
    sizes: list[int] = []
    for number in range(20):
        with open(image, "r+b") as file:
            file.seek(number * PAGE)
            file.write(b"%d" % number)
        with store.begin(KERNEL) as writer:
            writer.add_tree(source)
            record = writer.commit(make_meta())
        sizes.append(record.stored_size)
        with store.open(record.id) as reader:
            saves = {state_of_pack(pack.id) for pack in reader.index.packs}
        assert len(saves) == min(number + 1, 12)
    # The smallest are stored anew, so that no save is a large one again.
    assert max(sizes[1:]) < 6 * PAGE
    extract(store, record.id, tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(source)


def test_a_pack_of_which_little_is_left_is_given_up(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "store", "ada")
    source = tmp_path / "image"
    source.mkdir()
    image = source / "pages-1.img"
    image.write_bytes(noise(400 * PAGE))
    shares: list[list[float]] = []
    first = ""
    for number in range(12):
        with open(image, "r+b") as file:
            file.seek(number * 40 * PAGE % (400 * PAGE))
            file.write(noise(40 * PAGE, number + 1))
        with store.begin(KERNEL) as writer:
            writer.add_tree(source)
            record = writer.commit(make_meta())
        with store.open(record.id) as reader:
            packs = reader.index.packs
            used = dict(zip([p.id for p in packs], reader.index.used(), strict=True))
            shares.append([used[p.id] / p.stored for p in packs if p.stored])
        first = first or record.id
    # Below a quarter of it is used: the next state has nothing of it any more.
    assert min(map(min, shares)) == pytest.approx(0.2, abs=0.01)
    assert not any(pack.startswith(first) for pack in used)
    extract(store, record.id, tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(source)


def test_equal_contents_are_stored_once(tmp_path: Path) -> None:
    """As the memory of forked processes is."""
    store = StateStore(tmp_path / "store", "ada")
    source = tmp_path / "image"
    source.mkdir()
    for number in range(5):
        (source / f"pages-{number}.img").write_bytes(noise(2 * MIB))
    with store.begin(KERNEL) as writer:
        writer.add_tree(source)
        record = writer.commit(make_meta())
    assert record.stored_size < 2.1 * MIB
    (source / "pages-9.img").write_bytes(noise(2 * MIB))
    with store.begin(KERNEL) as writer:
        writer.add_tree(source)
        record = writer.commit(make_meta())
    assert record.stored_size < 0.1 * MIB
    extract(store, record.id, tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(source)


def test_what_a_save_added(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "store", "ada")
    source = tmp_path / "image"
    source.mkdir()
    (source / "a").write_bytes(noise(300 * PAGE))
    (source / "b").write_bytes(noise(10 * PAGE, 1))
    with store.begin(KERNEL) as writer:
        writer.add_tree(source)
        assert writer.parent is None
        assert sum(length for _, _, length in writer.added()) == 310 * PAGE
        first = writer.commit(make_meta())
    with open(source / "a", "r+b") as file:
        file.seek(260 * PAGE)
        file.write(b"new" + bytes(2 * PAGE))
    with store.begin(KERNEL) as writer:
        writer.add_tree(source)
        assert writer.parent == first.id
        # A page became zeros, which takes nothing; of the next the beginning did.
        added = [(path, at // PAGE, length // PAGE) for path, at, length in writer.added()]
        assert sorted(added) in (
            [(b"a", 260, 1), (b"a", 262, 1)],
            [(b"a", 262, 1), (b"a", 260, 1)],
        )


def test_the_parent_may_be_a_state_of_another_kernel(tmp_path: Path) -> None:
    """As when a state was restored as a new kernel."""
    store = StateStore(tmp_path / "store", "ada")
    source = tmp_path / "image"
    source.mkdir()
    (source / "a").write_bytes(noise(300 * PAGE))
    with store.begin(KERNEL) as writer:
        writer.add_tree(source)
        first = writer.commit(make_meta())
    with store.begin("copy", parent=first.id) as writer:
        writer.add_tree(source)
        second = writer.commit(make_meta("copy"))
    assert second.parent == first.id
    assert second.stored_size < 2048
    with store.begin("third", parent="20261201T000000Z-00000000") as writer:
        writer.add_tree(source)
        assert writer.commit(make_meta("third")).parent is None
    # What it shares is its own as much as the other's.
    store.delete(first.id)
    store.gc(grace_seconds=0)
    extract(store, second.id, tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(source)


def test_a_parent_that_is_deleted_during_the_save(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "store", "ada")
    source = tmp_path / "image"
    source.mkdir()
    (source / "a").write_bytes(noise(300 * PAGE))
    with store.begin(KERNEL) as writer:
        writer.add_tree(source)
        first = writer.commit(make_meta())
    with store.begin(KERNEL) as writer:
        store.delete(first.id)
        store.gc(grace_seconds=0)
        writer.add_tree(source)
        store.gc(grace_seconds=0)
        second = writer.commit(make_meta())
    store.gc(grace_seconds=0)
    extract(store, second.id, tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(source)
    store.delete(second.id)
    store.gc(grace_seconds=0)
    assert pack_files(tmp_path / "store") == set()


@pytest.mark.parametrize(
    "segments",
    [
        [(0, PAGE, 1)],
        [(1, PAGE, 0)],
        [(0, 100, 0)],
        [(0, 2 * PAGE, 0), (PAGE, PAGE, 9 * PAGE)],
        [(PAGE, PAGE, 0), (0, PAGE, PAGE)],
    ],
)
def test_impossible_layouts(tmp_path: Path, segments: Segments) -> None:
    store = StateStore(tmp_path / "store", "ada")
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "a").write_bytes(noise(3 * PAGE))
    with pytest.raises(ValueError, match="segments"), store.begin(KERNEL) as writer:
        writer.add_tree(tmp_path / "image", layout=lambda path: Layout("mm", segments))
    assert os.listdir(tmp_path / "store" / "ada" / "writers") == []


def test_layouts_that_fit_badly(tmp_path: Path) -> None:
    """Addresses twice, and pages without one, cost space at most."""
    store = StateStore(tmp_path / "store", "ada")
    source = tmp_path / "image"
    source.mkdir()
    for number, segments in enumerate(
        (
            [(0, 2 * PAGE, 0), (2 * PAGE, 2 * PAGE, PAGE)],
            [(PAGE, PAGE, 0), (3 * PAGE, PAGE, 2 * PAGE), (9 * PAGE, 90 * PAGE, 0)],
            [(0, 5 * PAGE, PAGE)],
            [],
        )
    ):
        (source / "a").write_bytes(b"".join(page_of(n + number) for n in range(4)) + b"tail")
        with store.begin(KERNEL) as writer:
            writer.add_tree(source, layout=lambda path, s=segments: Layout("mm", s))  # type: ignore[misc]
            record = writer.commit(make_meta())
        extract(store, record.id, tmp_path / str(number))
        assert snapshot(tmp_path / str(number)) == snapshot(source)
