"""The node's fingerprint and what differs between two nodes."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from pathlib import Path

import msgspec
import pytest

from jupyter_gpu_ckpt.capture.elf import build_id
from jupyter_gpu_ckpt.capture.images import MappedFile
from jupyter_gpu_ckpt.capture.node import NodeInfo, differences, node_id, node_info
from jupyter_gpu_ckpt.capture.protocol import Probe


@pytest.fixture
def here(probe: Probe) -> NodeInfo:
    return node_info(probe)


def test_fingerprint(here: NodeInfo, probe: Probe) -> None:
    assert here.hostname == socket.gethostname()
    assert here.kernel_release == platform.release()
    assert here.machine == platform.machine()
    assert here.cpu_model
    assert here.cpu_flags == sorted(here.cpu_flags)
    assert probe.criu is not None
    assert here.criu == probe.criu.version
    assert here.id == node_id()
    assert msgspec.convert(msgspec.to_builtins(here), NodeInfo) == here, "it goes to a manifest"


def test_the_pod_is_part_of_the_node(monkeypatch: pytest.MonkeyPatch, here: NodeInfo) -> None:
    monkeypatch.setenv("POD_UID", "6c6c4b2f-0000-4000-8000-000000000000")
    other = node_info()
    assert other.pod_uid == "6c6c4b2f-0000-4000-8000-000000000000"
    assert other.id != here.id


def test_the_same_node_differs_in_nothing(here: NodeInfo) -> None:
    assert differences(here, here, []) == []


def test_another_processor(here: NodeInfo) -> None:
    lesser = msgspec.structs.replace(here, cpu_flags=["fpu", "sse2"], cpu_model="Old One")
    richer = msgspec.structs.replace(lesser, cpu_flags=["avx", "avx512f", "fpu", "mba", "sse2"])
    (found,) = differences(richer, lesser, [])
    assert found.what == "cpu"
    assert found.blocking
    assert "avx, avx512f" in found.message
    assert "mba" not in found.message, "not an instruction set"
    assert differences(lesser, richer, []) == []
    other = msgspec.structs.replace(here, machine="aarch64")
    (found,) = differences(other, here, [])
    assert (found.blocking, found.saved, found.here) == (True, "aarch64", here.machine)


def test_another_machine_and_kernel_are_told_but_do_not_block(here: NodeInfo) -> None:
    other = msgspec.structs.replace(
        here, hostname="elsewhere", kernel_release="5.10.0", criu="4.3", cpu_model="Other"
    )
    found = differences(other, here, [])
    assert {d.what for d in found} == {"hostname", "kernel_release", "criu", "cpu_model"}
    assert not any(d.blocking for d in found)


def test_mapped_files(here: NodeInfo, tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    shutil.copy(next(Path("/lib").glob("*-linux-gnu/libz.so.1")), library)
    data = tmp_path / "data"
    data.write_bytes(b"12345")

    def mapped(path: Path) -> MappedFile:
        status = path.stat()
        return MappedFile(str(path), status.st_size, status.st_mtime_ns, build_id(str(path)))

    saved = [mapped(library), mapped(data)]
    assert differences(here, here, saved) == []
    os.utime(data)
    assert differences(here, here, saved) == [], "a new date alone does not matter"

    identifier = build_id(str(library))
    assert identifier is not None
    content = library.read_bytes()
    library.write_bytes(content.replace(bytes.fromhex(identifier), bytes(len(identifier) // 2)))
    data.write_bytes(b"123456")
    other, larger = differences(here, here, saved)
    assert str(library) in other.message
    assert other.saved == identifier
    assert str(data) in larger.message
    assert (larger.saved, larger.here) == ("5 bytes", "6 bytes")
    data.unlink()
    _, missing = differences(here, here, saved)
    assert "missing" in missing.message
    assert str(data) in missing.message
    assert missing.blocking
