"""A machine with simulated GPUs: the process that holds the device memory of all others.

``python machine.py FOLDER`` serves what ``FOLDER/machine.json`` describes on ``FOLDER/nvidiactl``.
A connection stands for the device files of one process: what it allocated goes with it. README.md
has the format of the description; `simgpu.py` starts machines from tests.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import socket
import socketserver
import struct
import sys
import threading
import time
import uuid
import zlib
from pathlib import Path
from typing import Any

# What driver and NVML return; NVML has the GPU's loss as a code of its own.
SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
DEVICE_UNAVAILABLE = 46
NOT_SUPPORTED = 801

#: The socket that stands for the device files.
DEVICE = "nvidiactl"
#: While this file is there, no ``spin()`` ends.
BUSY = "busy"
#: Seconds after which it is looked again whether it is.
LOOK = 0.05

(
    HELLO,
    CONTEXT,
    ALLOC,
    FREE,
    WRITE,
    READ,
    COPY,
    SET,
    LAUNCH,
    REMAINING,
    MEMORY,
    PROCESSES,
    EVENTS,
    INJECT,
    SHARE,
    MAP,
    RELEASE,
) = range(1, 18)

REQUEST = struct.Struct("<II16sQQQQ")
REPLY = struct.Struct("<iIQQ")
MACHINE = struct.Struct("<IIII32s")
GPU = struct.Struct("<16s64s32sQIIIIIIII")
PROCESS = struct.Struct("<IIQ")
EVENT = struct.Struct("<16sQQ")

FLAGS = {
    "sticky_restore_oom": 1,
    "ipc_checkpoint": 2,
    "managed_checkpoint": 4,
    "children_keep_devices": 8,
}


class Gpu:
    """One GPU: who it is and how much of its memory is taken."""

    def __init__(self, index: int, description: dict[str, Any]) -> None:
        self.index = index
        self.uuid = uuid.UUID(description["uuid"].removeprefix("GPU-")).bytes
        self.name = str(description.get("name", "NVIDIA Simulated GPU"))
        self.chip = str(description.get("chip", "SIM100"))
        self.total = int(description.get("memory", 1 << 30))
        self.mig = bool(description.get("mig", False))
        self.persistence = bool(description.get("persistence", False))
        self.mps = bool(description.get("mps", False))
        self.nvlinks = int(description.get("nvlinks", 0))
        self.capability = tuple(description.get("capability", (9, 0)))
        self.used = 0
        self.lost = False

    def describe(self) -> bytes:
        return GPU.pack(
            self.uuid,
            self.name.encode(),
            self.chip.encode(),
            self.total,
            self.mig,
            self.persistence,
            *self.capability,
            self.index + 1,
            self.lost,
            self.mps,
            self.nvlinks,
        )


class Memory:
    """Allocated device memory."""

    def __init__(self, gpu: Gpu, address: int, size: int) -> None:
        self.gpu = gpu
        self.address = address
        self.size = size
        self.data = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)

    def piece(self, offset: int, length: int) -> list[memoryview]:
        return [memoryview(self.data)[offset : offset + length]]


class View:
    """The memory of another process on one GPU, seen in one piece."""

    def __init__(self, gpu: Gpu, address: int, parts: list[Memory]) -> None:
        self.gpu = gpu
        self.address = address
        self.parts = parts
        self.size = sum(part.size for part in parts)

    def piece(self, offset: int, length: int) -> list[memoryview]:
        pieces = []
        for part in self.parts:
            if offset < part.size and length > 0:
                taken = min(length, part.size - offset)
                pieces.append(memoryview(part.data)[offset : offset + taken])
                length -= taken
                offset = part.size
            offset -= part.size
        return pieces


class Machine(socketserver.ThreadingUnixStreamServer):
    """Serves the processes of one machine, each in a thread of its own."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path) -> None:
        description = json.loads((folder / "machine.json").read_text())
        self.driver = str(description.get("driver", "580.95.05"))
        self.cuda = int(description.get("cuda", 13000))
        self.flags = sum(
            bit
            for name, bit in FLAGS.items()
            if description.get(name, name == "sticky_restore_oom")
        )
        self.context_bytes = int(description.get("context_bytes", 0))
        self.gpus = [Gpu(i, one) for i, one in enumerate(description["gpus"])]
        self.lock = threading.Lock()
        self.happened = threading.Condition(self.lock)
        self.events: list[tuple[bytes, int]] = []
        self.processes: set[Process] = set()
        self.shared: dict[int, Process] = {}
        device = folder / DEVICE
        device.unlink(missing_ok=True)
        os.chdir(folder)  # the whole path may be too long for a socket
        super().__init__(DEVICE, Process)
        device.chmod(0o666)

    def gpu(self, name: bytes) -> Gpu | None:
        return next((gpu for gpu in self.gpus if gpu.uuid == name), None)


class Process(socketserver.BaseRequestHandler):
    """A connection: what one process has on the GPUs."""

    server: Machine
    request: socket.socket

    def setup(self) -> None:
        credentials = self.request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.pid = struct.unpack("iII", credentials)[0]
        self.memory: dict[int, Memory | View] = {}
        self.contexts: dict[int, int] = {}
        self.queue: list[tuple[float, bytes, tuple[int, ...]]] = []
        with self.server.lock:
            self.server.processes.add(self)

    def handle(self) -> None:
        while header := self.receive(REQUEST.size):
            op, _, name, a, b, c, length = REQUEST.unpack(header)
            gpu = self.server.gpu(name)
            if op == WRITE:
                status, value, payload = self.write(gpu, a, length)
            else:
                data = bytes(self.receive(length)) if length else b""
                if op == EVENTS:
                    status, value, payload = self.wait_events(a, b)
                else:
                    with self.server.lock:
                        self.settle()
                        status, value, payload = self.answer(op, gpu, a, b, c, data)
            self.request.sendall(REPLY.pack(status, 0, value, sum(map(len, payload))))
            for piece in payload:
                self.request.sendall(piece)

    def finish(self) -> None:
        with self.server.lock:
            self.release()
            self.server.processes.discard(self)

    def release(self) -> None:
        """Free all that the process has on the GPUs."""
        for address in list(self.memory):
            self.free(address)
        for index, count in self.contexts.items():
            self.server.gpus[index].used -= count * self.server.context_bytes
        self.contexts = {}
        for token in [t for t, who in self.server.shared.items() if who is self]:
            del self.server.shared[token]

    def receive(self, length: int) -> bytearray:
        """That many bytes, or none at the end of the connection."""
        data = bytearray(length)
        return data if self.receive_into(memoryview(data)) else bytearray()

    def receive_into(self, view: memoryview) -> bool:
        at = 0
        while at < len(view):
            try:
                got = self.request.recv_into(view[at:])
            except ConnectionResetError:
                return False
            if got == 0:
                return False
            at += got
        return True

    def find(self, address: int, length: int) -> list[memoryview] | None:
        for one in self.memory.values():
            if one.address <= address and address + length <= one.address + one.size:
                return one.piece(address - one.address, length)
        return None

    def write(self, gpu: Gpu | None, address: int, length: int) -> tuple[int, int, list[Any]]:
        with self.server.lock:
            self.settle()
            pieces = self.find(address, length)
        if pieces is None or gpu is None or gpu.lost:
            self.receive(length)
            return INVALID_VALUE if pieces is None else DEVICE_UNAVAILABLE, 0, []
        for piece in pieces:
            self.receive_into(piece)
        return SUCCESS, 0, []

    def wait_events(self, serial: int, timeout_ms: int) -> tuple[int, int, list[Any]]:
        """The event number `serial`, or none when the time is over; and the next one's number."""
        machine = self.server
        with machine.happened:
            if serial == 2**64 - 1:  # only how many there are
                return SUCCESS, len(machine.events), []
            machine.happened.wait_for(lambda: len(machine.events) > serial, timeout_ms / 1000)
            new = machine.events[serial : serial + 1]
        payload = [EVENT.pack(name, code, 0) for name, code in new]
        return SUCCESS, serial + len(new), payload

    def settle(self) -> None:
        """Carry out the launches whose time has come."""
        if any(name == b"spin" for _, name, _ in self.queue) and os.path.exists(BUSY):
            first = next(i for i, one in enumerate(self.queue) if one[1] == b"spin")
            later = max(0.0, time.monotonic() + LOOK - self.queue[first][0])
            for at in range(first, len(self.queue)):
                end, name, arguments = self.queue[at]
                self.queue[at] = end + later, name, arguments
        while self.queue and self.queue[0][0] <= time.monotonic():
            _, name, arguments = self.queue.pop(0)
            self.run(name, arguments)

    def run(self, name: bytes, arguments: tuple[int, ...]) -> None:
        if name == b"spin":
            return
        size = 8 if name == b"add" else arguments[1]
        pieces = self.find(arguments[0], size)
        if pieces is None:
            return  # a real GPU would end the context; nobody here launches such a thing
        if name == b"checksum":
            value = 0
            for piece in pieces:
                value = zlib.crc32(piece, value)
            target = self.find(arguments[2], 8)
            if target:
                target[0][:] = value.to_bytes(8, "little")
        elif name == b"fill":
            content = random.Random(arguments[2]).randbytes(size)
            pieces[0][:] = content
        elif name == b"add":
            value = int.from_bytes(pieces[0], "little") + arguments[1]
            pieces[0][:] = (value % 2**64).to_bytes(8, "little")

    def free(self, address: int) -> bool:
        one = self.memory.pop(address, None)
        if isinstance(one, Memory):
            one.gpu.used -= one.size
        return one is not None

    def answer(
        self, op: int, gpu: Gpu | None, a: int, b: int, c: int, data: bytes
    ) -> tuple[int, int, list[Any]]:
        machine = self.server
        if op == HELLO:
            head = MACHINE.pack(
                machine.cuda, len(machine.gpus), machine.flags, 0, machine.driver.encode()
            )
            return SUCCESS, 0, [head, *(one.describe() for one in machine.gpus)]
        if op == REMAINING:
            left = self.queue[-1][0] - time.monotonic() if self.queue else 0
            if any(machine.gpus[index].lost for index in self.contexts):
                return DEVICE_UNAVAILABLE, 0, []
            return SUCCESS, max(int(left * 1e9), 0) + 1 if self.queue else 0, []
        if op == RELEASE:
            self.release()
            return SUCCESS, 0, []
        if op == SHARE:
            machine.shared[a] = self
            return SUCCESS, 0, []
        if gpu is None:
            return INVALID_VALUE, 0, []
        if op == INJECT:
            gpu.lost = gpu.lost or bool(b)
            machine.events.append((gpu.uuid, a))
            machine.happened.notify_all()
            return SUCCESS, 0, []
        if op == PROCESSES:
            return SUCCESS, 0, self.list_processes(gpu)
        if op == MEMORY:
            return SUCCESS, 0, [struct.pack("<QQ", gpu.total - gpu.used, gpu.total)]
        if gpu.lost:
            return DEVICE_UNAVAILABLE, 0, []
        if op == CONTEXT:
            return self.change_context(gpu, bool(a)), 0, []
        if op == ALLOC:
            return self.allocate(gpu, a, b), 0, []
        if op == FREE:
            return SUCCESS if self.free(a) else INVALID_VALUE, 0, []
        if op == READ:
            pieces = self.find(a, b)
            return (SUCCESS, 0, pieces) if pieces is not None else (INVALID_VALUE, 0, [])
        if op == COPY:
            return self.copy(a, b, c), 0, []
        if op == SET:
            return self.set(a, b, c), 0, []
        if op == LAUNCH:
            name, *arguments, duration = struct.unpack("<16s4Q", data)
            start = max(time.monotonic(), self.queue[-1][0] if self.queue else 0)
            self.queue.append((start + duration / 1000, name.rstrip(b"\0"), tuple(arguments)))
            self.settle()
            return SUCCESS, 0, []
        if op == MAP:
            return SUCCESS, self.map(gpu, a, b), []
        return NOT_SUPPORTED, 0, []

    def list_processes(self, gpu: Gpu) -> list[bytes]:
        found = []
        for one in self.server.processes:
            if one.contexts.get(gpu.index):
                used = one.contexts[gpu.index] * self.server.context_bytes
                for memory in one.memory.values():
                    if isinstance(memory, Memory) and memory.gpu is gpu:
                        used += memory.size
                found.append(PROCESS.pack(one.pid, 0, used))
        return found

    def change_context(self, gpu: Gpu, more: bool) -> int:
        size = self.server.context_bytes
        if more and gpu.used + size > gpu.total:
            return OUT_OF_MEMORY
        gpu.used += size if more else -size
        count = self.contexts.get(gpu.index, 0) + (1 if more else -1)
        self.contexts[gpu.index] = count
        return SUCCESS

    def allocate(self, gpu: Gpu, address: int, size: int) -> int:
        if gpu.used + size > gpu.total:
            return OUT_OF_MEMORY
        self.memory[address] = Memory(gpu, address, size)
        gpu.used += size
        return SUCCESS

    def copy(self, to: int, source: int, length: int) -> int:
        pieces, target = self.find(source, length), self.find(to, length)
        if pieces is None or target is None:
            return INVALID_VALUE
        content = b"".join(pieces)
        for piece in target:
            piece[:], content = content[: len(piece)], content[len(piece) :]
        return SUCCESS

    def set(self, address: int, count: int, packed: int) -> int:
        width, value = packed >> 32, packed & 0xFFFFFFFF
        pieces = self.find(address, count * width)
        if pieces is None:
            return INVALID_VALUE
        content = (value & (2 ** (8 * width) - 1)).to_bytes(width, "little")
        for piece in pieces:
            piece[:] = content * (len(piece) // width)
        return SUCCESS

    def map(self, gpu: Gpu, token: int, address: int) -> int:
        """Show the memory of the process that shared it; returns how much it is, in bytes."""
        owner = self.server.shared.get(token)
        parts = [] if owner is None else [m for m in owner.memory.values() if m.gpu is gpu]
        memory = sorted((m for m in parts if isinstance(m, Memory)), key=lambda m: m.address)
        if not memory:
            return 0
        self.memory[address] = View(gpu, address, memory)
        return self.memory[address].size


def main() -> None:
    with Machine(Path(sys.argv[1])) as machine:
        # Ends with whoever started it: its end of this pipe is closed then.
        threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(0)), daemon=True).start()
        print("ready", flush=True)
        machine.serve_forever()


if __name__ == "__main__":
    main()
