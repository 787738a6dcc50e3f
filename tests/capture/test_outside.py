"""What a kernel had that is not in its state, told from a real dump."""

from __future__ import annotations

import socket
from pathlib import Path

from jupyter_client.connect import port_names

from jupyter_gpu_ckpt.capture import outside
from jupyter_gpu_ckpt.outside import Outside, OutsideConnection, OutsideFile

from .conftest import RunningKernel

SETUP = """
import mmap, os, socket

def connect(address, kind=socket.SOCK_STREAM, family=socket.AF_INET):
    one = socket.socket(family, kind)
    one.connect(address)
    return one

database = [connect(("127.0.0.1", {tcp})) for _ in range(2)]
over = connect(("127.0.0.1", {tcp}))
udp = connect(("127.0.0.1", {udp}), socket.SOCK_DGRAM)
log = connect({service!r}, socket.SOCK_DGRAM, socket.AF_UNIX)

dashboard = socket.create_server(("127.0.0.1", 0))
print(dashboard.getsockname()[1])

# All this is in the state.
inside = connect(dashboard.getsockname())
there = dashboard.accept()[0]
near, far = socket.socketpair()
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.bind(("0.0.0.0", 0))
sender = connect(("127.0.0.1", receiver.getsockname()[1]), socket.SOCK_DGRAM)
master, slave = os.openpty()
plain = [open(f"/dev/{{name}}", "rb", 0) for name in ("null", "zero", "full", "random", "urandom")]
deleted = open("deleted.txt", "w")
os.unlink("deleted.txt")
carried = open(f"/tmp/outside-{{os.getpid()}}.txt", "w")
os.unlink(carried.name)

messages = open("/dev/kmsg", "rb", 0)
appended = open("appended.log", "a")
written = open("written.txt", "w")
read = open("data.bin", "rb")
data = mmap.mmap(read.fileno(), 0, access=mmap.ACCESS_READ)
"""


def test_what_is_outside_of_a_state(kernel: RunningKernel, tmp_path: Path) -> None:
    service = str(tmp_path / "service")
    (kernel.folder / "data.bin").write_bytes(b"data")
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
    ):
        udp.bind(("127.0.0.1", 0))
        datagrams.bind(service)
        ports = {"tcp": tcp.getsockname()[1], "udp": udp.getsockname()[1]}
        served = int(kernel.run(SETUP.format(service=service, **ports)))
        accepted = [tcp.accept()[0] for _ in range(3)]
        accepted[2].close()
        kernel.run("print(over.recv(1))")  # the kernel's node knows that it is over
        with socket.create_connection(("127.0.0.1", served)):
            kernel.run("visitor = dashboard.accept(); waiting = connect(dashboard.getsockname())")
            devices = outside.devices(kernel.pid)
            images_dir, _ = kernel.dump()
        for one in accepted[:2]:
            one.close()

    found = outside.survey(
        images_dir,
        devices=devices,
        own_ports=[getattr(kernel.client, name) for name in port_names],
        exclude=["/dev/shm"],
        is_shared=lambda path: path == str(kernel.log),
    )

    assert found == Outside(
        connections=[
            OutsideConnection("tcp", "127.0.0.1", ports["tcp"], count=2),
            OutsideConnection("tcp", "127.0.0.1", served, incoming=True),
            OutsideConnection("udp", "127.0.0.1", ports["udp"]),
            OutsideConnection("unix", service),
        ],
        devices=["/dev/kmsg"],
        files=[
            OutsideFile(f"{kernel.folder}/appended.log", "append"),
            OutsideFile(f"{kernel.folder}/data.bin", "map"),
            OutsideFile(f"{kernel.folder}/written.txt", "write"),
        ],
    )
