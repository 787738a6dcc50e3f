"""What is on disk is what docs/format.md says, and what an older version wrote is still read."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import msgspec
import pytest
import xxhash
import zstandard
from blake3 import blake3

from jupyter_gpu_ckpt.store import StateStore

from . import format2
from .conftest import KERNEL, extract, make_meta

DATA = Path(__file__).parent / "data" / "format-2"
PAGE = 4096


@pytest.fixture(params=["by this version", "by the first version"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A store, just written or as it was kept."""
    root = tmp_path / "store"
    if request.param == "by this version":
        format2.write(root)
    else:
        shutil.copytree(DATA, root)
        root.chmod(0o700)
    return root


def unpack(codec: int, data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data) if codec else data


def numbers(size: int, column: bytes) -> list[int]:
    return [int.from_bytes(column[at : at + size], "little") for at in range(0, len(column), size)]


class Reader:
    """A reader of format 2 after docs/format.md; knows nothing of the product's code."""

    def __init__(self, owner: Path) -> None:
        self.owner = owner
        store = json.loads((owner / "store.json").read_bytes())
        assert store["format"] == 2
        self.key = bytes.fromhex(store["key"])
        check = self.derive("2026-12-01 key check v1")
        assert store["key_check"] == check[:8].hex()

    def derive(self, context: str) -> bytes:
        return blake3(self.key, derive_key_context=f"jupyter-gpu-ckpt {context}").digest()

    def pack(self, pack: str) -> bytes:
        folder = blake3(pack.encode()).digest()[:1].hex()
        return (self.owner / "packs" / folder / f"{pack}.pack").read_bytes()

    def manifest(self, path: Path) -> dict[str, object]:
        data = path.read_bytes()
        body = data[data.index(b'"body":') + 7 : data.rindex(b"}")]
        context = f"{path.parent.parent.name}/{path.stem}".encode()
        key = self.derive("2026-12-01 manifest checksums v1")
        envelope = json.loads(data)
        assert envelope["blake3"] == blake3(context + b"\0" + body, key=key).hexdigest()
        found: dict[str, object] = envelope["body"]
        return found

    def named(self, name: bytes, plain: bytes) -> bytes:
        assert blake3(plain, key=self.derive("2026-12-02 blob names v2")).digest() == name
        return plain

    def files(self, path: Path) -> dict[bytes, bytes]:
        body = self.manifest(path)
        place: dict[str, int] = body["index"]  # type: ignore[assignment]
        data = self.pack(str(place["pack"]))[place["offset"] :][: place["length"]]
        plain = unpack(place["codec"], data)
        assert len(plain) == place["size"]
        index = msgspec.msgpack.decode(self.named(bytes.fromhex(str(place["name"])), plain))
        format_, page_size, _dirs, files, packs, blobs, runs = index
        assert (format_, page_size) == (2, PAGE)
        assert {pack[0] for pack in packs} <= set(body["packs"])  # type: ignore[call-overload]
        where, _number, offset, length = (
            numbers(size, column) for size, column in zip((4, 4, 8, 4), blobs[:4], strict=True)
        )
        pages = numbers(2, blobs[5])
        plains = []
        for blob in range(len(where)):
            stored = self.pack(packs[where[blob]][0])[offset[blob] :][: length[blob]]
            name = blobs[6][32 * blob : 32 * blob + 32]
            plains.append(self.named(name, unpack(blobs[4][blob], stored)))
            assert len(plains[-1]) == pages[blob] * PAGE
        gaps, counts, of, first = (
            numbers(size, column) for size, column in zip((8, 2, 4, 1), runs, strict=True)
        )
        found = {}
        for name, _mode, _mtime, size, begin, count, _space, _segments in files:
            content = bytearray()
            for run in range(begin, begin + count):
                content += bytes(gaps[run] * PAGE)
                piece = plains[of[run]][first[run] * PAGE :]
                content += piece[: counts[run] * PAGE]
            content += bytes(max(0, size - len(content)))
            found[name] = bytes(content[:size])
        return found

    def check_footer(self, pack: str) -> None:
        data = self.pack(pack)
        magic, format_, length, size, salt, key_id = struct.unpack("<8sIIQ16s32s", data[-104:-32])
        assert (magic, format_, key_id) == (b"JGC pack", 2, bytes(32))
        assert len(salt) == 16
        footer = data[-104 - length : -104]
        key = self.derive("2026-12-02 footer checksums v2")
        assert blake3(pack.encode() + footer + data[-104:-32], key=key).digest() == data[-32:]
        plain = zstandard.ZstdDecompressor().decompress(footer)
        assert len(plain) == size
        lengths, codecs, pages, names, hashes = msgspec.msgpack.decode(plain)
        seed = int.from_bytes(self.derive("2026-12-02 page hashes v2")[:8], "little")
        at, expected = 0, b""
        for blob, stored in enumerate(numbers(4, lengths)):
            content = unpack(codecs[blob], data[at : at + stored])
            self.named(names[32 * blob : 32 * blob + 32], content)
            assert len(content) == PAGE * numbers(2, pages)[blob]
            for page in range(0, len(content), PAGE):
                expected += xxhash.xxh3_128_digest(content[page : page + PAGE], seed)
            at += stored
        assert hashes == expected


def test_it_is_as_documented(written: Path) -> None:
    reader = Reader(written / "ada")
    manifests = sorted(written.glob("ada/kernels/*/states/*.json"))
    created = [str(reader.manifest(path)["created"]) for path in manifests]
    in_order = [path for _, path in sorted(zip(created, manifests, strict=True))]
    for path, image in zip(in_order, format2.images(), strict=True):
        expected = {name.encode(): content for name, content in image.items()}
        expected[b"node-local/run.sh"] = b"#!/bin/sh\n"
        assert reader.files(path) == expected
    for pack in written.glob("ada/packs/*/*.pack"):
        reader.check_footer(pack.stem)


def test_it_is_read(written: Path, tmp_path: Path) -> None:
    store = StateStore(written, "ada")
    second, first = store.states()
    assert second.meta == make_meta()
    assert second.parent == first.id
    # Two pages, and the list.
    assert second.stored_size < 3 * PAGE
    for record, image in zip((first, second), format2.images(), strict=True):
        back = tmp_path / record.id
        extract(store, record.id, back)
        assert {path.name: path.read_bytes() for path in back.iterdir() if path.is_file()} == image
        assert (back / "one").stat().st_mtime_ns == 1_000_000_007
        assert (back / "node-local" / "run.sh").stat().st_mode & 0o777 == 0o755
        assert (back / "node-local").stat().st_mode & 0o777 == 0o750
        result = store.verify(record.id)
        assert (result.lost, result.footers) == ([], [])
    # And built on.
    with store.begin(KERNEL) as writer:
        writer.add_tree(tmp_path / second.id, layout=format2.layouts(format2.images()[1]).get)
        third = writer.commit(make_meta())
    assert third.parent == second.id
    assert third.stored_size < PAGE
