"""What runs on the GPU while it is checked: a training whose every step can be compared.

With PyTorch where it is installed; otherwise with the driver alone (``tests/simgpu/api.py``):
device memory and copies, nothing else. As a program: ``work.py info``, ``work.py hold BYTES``,
``work.py train BYTES [STEPS]``.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import random
import struct
import sys
import time
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.simgpu.api import Gpu

SAMPLE = 1 << 20


class Work(Protocol):
    """Something on the GPU."""

    kind: str

    def info(self) -> dict[str, Any]:
        """The GPU's name, and its ``free`` and ``total`` memory in bytes."""

    def hold(self, size: int) -> None:
        """Fill that many bytes of device memory at random."""

    def held(self) -> str:
        """What is in them: the same text for the same content."""

    def copy_speed(self, size: int) -> float:
        """Bytes a second from the device to host memory."""

    def step(self) -> tuple[str, str]:
        """Train one step: the loss, bit by bit, and a digest of weights, optimizer and RNG."""


class TorchWork:
    """A small network with dropout and Adam, on `device`."""

    def __init__(self, device: str = "cuda") -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        self.torch: Any = __import__("torch")
        torch = self.torch
        self.kind, self.device = f"PyTorch {torch.__version__}", device
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(256, 512),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(512, 16),
        ).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.ballast: Any = None

    def info(self) -> dict[str, Any]:
        free, total = self.torch.cuda.mem_get_info()
        return {"name": self.torch.cuda.get_device_name(), "free": free, "total": total}

    def hold(self, size: int) -> None:
        self.ballast = self.torch.empty(
            max(1, size // 8), dtype=self.torch.int64, device=self.device
        )
        # Not the generator of the training, which goes on alike whatever is held.
        generator = self.torch.Generator(device=self.device)
        generator.seed()
        self.ballast.random_(generator=generator)

    def held(self) -> str:
        # Whole numbers, so that the order of adding them does not matter.
        halves = self.ballast[::2].sum(), self.ballast[1::2].sum()
        return "-".join(str(int(one)) for one in halves)

    def copy_speed(self, size: int) -> float:
        torch = self.torch
        there = torch.zeros(size, dtype=torch.uint8, device=self.device)
        here = torch.empty(size, dtype=torch.uint8, pin_memory=self.device == "cuda")
        here.copy_(there)
        began = time.perf_counter()
        here.copy_(there)
        return float(size / (time.perf_counter() - began))

    def step(self) -> tuple[str, str]:
        torch = self.torch
        inputs = torch.randn(64, 256, device=self.device)
        labels = torch.randint(16, (64,), device=self.device)
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(inputs), labels)
        loss.backward()
        self.optimizer.step()
        digest = hashlib.sha256()
        for values in (self.model.state_dict(), *self.optimizer.state_dict()["state"].values()):
            for one in values.values():
                digest.update(one.detach().cpu().numpy().tobytes())
        digest.update(torch.get_rng_state().numpy().tobytes())
        if self.device == "cuda":
            digest.update(torch.cuda.get_rng_state().numpy().tobytes())
        return struct.pack(">f", loss.item()).hex(), digest.hexdigest()[:16]


class DriverWork:
    """The same in spirit, computed by the host from what is in device memory."""

    kind = "the driver alone: allocations and copies"

    def __init__(self) -> None:
        self.gpu = Gpu()
        self.random = random.Random(7)
        first = hashlib.shake_256(b"weights").digest(1 << 16)
        self.weights, self.moments = self.gpu.upload(first), self.gpu.upload(first[::-1])
        self.size, self.ballast = 0, 0

    def info(self) -> dict[str, Any]:
        free, total, name = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.create_string_buffer(96)
        self.gpu.driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        self.gpu.driver.cuDeviceGetName(name, 96, 0)
        return {"name": name.value.decode(), "free": free.value, "total": total.value}

    def _samples(self) -> list[tuple[int, int]]:
        """64 pieces of it at most, the first and the last among them."""
        length = min(SAMPLE, self.size)
        places = {(self.size - length) * number // 63 for number in range(64)}
        return [(self.ballast + place, length) for place in sorted(places)]

    def hold(self, size: int) -> None:
        self.size = max(1, size)
        self.ballast = self.gpu.allocate(self.size)
        for address, length in self._samples():
            self.gpu.write(address, os.urandom(length))

    def held(self) -> str:
        digest = hashlib.sha1()
        for address, length in self._samples():
            digest.update(self.gpu.read(address, length))
        return digest.hexdigest()

    def copy_speed(self, size: int) -> float:
        address = self.gpu.allocate(size)
        here = ctypes.c_void_p()
        self.gpu.driver.cuMemAllocHost_v2(ctypes.byref(here), ctypes.c_size_t(size))
        took = 0.0
        for _ in range(2):
            began = time.perf_counter()
            self.gpu.driver.cuMemcpyDtoH_v2(here, ctypes.c_uint64(address), ctypes.c_size_t(size))
            took = time.perf_counter() - began
        self.gpu.free(address)
        return size / took

    def step(self) -> tuple[str, str]:
        weights, moments = (self.gpu.read(one, 1 << 16) for one in (self.weights, self.moments))
        mixed = hashlib.shake_256(weights + moments + self.random.randbytes(64)).digest(1 << 16)
        self.gpu.write(self.moments, weights)
        self.gpu.write(self.weights, mixed)
        after = b"".join(self.gpu.read(one, 1 << 16) for one in (self.weights, self.moments))
        state = repr(self.random.getstate()).encode()
        return mixed[:4].hex(), hashlib.sha256(after + state).hexdigest()[:16]


def make() -> Work:
    """The work that can be done here (``GPU_CHECK_WORK=driver``: without PyTorch)."""
    if os.environ.get("GPU_CHECK_WORK") != "driver" and importlib.util.find_spec("torch"):
        torch: Any = __import__("torch")
        if torch.cuda.is_available():
            return TorchWork()
    return DriverWork()


class Training:
    """Steps of a work, each told in a line."""

    def __init__(self, work: Work) -> None:
        self.work, self.number = work, -1

    def step(self) -> str:
        """Train one step and tell of it."""
        self.number += 1
        loss, digest = self.work.step()
        return f"step {self.number} loss {loss} state {digest}"


def main(command: str, size: int = 0, count: int = 1 << 30) -> None:
    """Carry out one command."""

    def say(line: str) -> None:
        print(line, flush=True)

    work = make()
    if command == "info":
        found = work.info()
        room = int(min(1 << 30, found["free"] // 4))
        say(json.dumps({**found, "work": work.kind, "copy_speed": work.copy_speed(room)}))
        return
    work.hold(size)
    say(f"holds {work.held()}")
    training = Training(work)
    while command == "train" and training.number < count - 1:
        say(training.step())
        time.sleep(0.01)
    while command == "hold":
        say(f"sum {work.held()}")
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1], *(int(argument) for argument in sys.argv[2:]))
