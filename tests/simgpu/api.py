"""The CUDA driver's interface through ctypes, for test programs and for tests.

Nothing here knows that the driver is simulated, so the programs are those that one would write for
a real one. Only the kernels' module is not: ``Gpu.launch`` loads the one that the simulation has.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import uuid
from collections.abc import Iterator
from typing import Any

SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
NO_DEVICE = 100
INVALID_CONTEXT = 201
OPERATING_SYSTEM = 304
ILLEGAL_STATE = 401
NOT_READY = 600
NOT_SUPPORTED = 801
DRIVER_MISMATCH = 803
UNKNOWN = 999

RUNNING, LOCKED, CHECKPOINTED, FAILED, CHECKPOINTING, RESTORING = range(6)


class CudaError(Exception):
    """A function of the driver returned `code`."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function}: error {code}")
        self.code = code


class LockArgs(ctypes.Structure):
    _fields_ = (
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    )


class GpuPair(ctypes.Structure):
    _fields_ = (("old", ctypes.c_ubyte * 16), ("new", ctypes.c_ubyte * 16))


class PerDevice(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("size", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
    )


class CustomStorage(ctypes.Structure):
    _fields_ = (
        ("handle", ctypes.c_void_p),
        ("devices", ctypes.POINTER(PerDevice)),
        ("count", ctypes.c_uint),
    )


class CheckpointArgs(ctypes.Structure):
    _fields_ = (
        ("custom_storage", ctypes.POINTER(ctypes.POINTER(CustomStorage))),
        ("reserved", ctypes.c_char * 56),
    )


class RestoreArgs(ctypes.Structure):
    _fields_ = (
        ("pairs", ctypes.POINTER(GpuPair)),
        ("count", ctypes.c_uint),
        ("padding", ctypes.c_uint),
        ("custom_storage", ctypes.POINTER(ctypes.POINTER(CustomStorage))),
        ("reserved", ctypes.c_char * 40),
    )


def uuid_bytes(name: str) -> bytes:
    """``GPU-...`` as the 16 bytes that the driver takes."""
    return uuid.UUID(name.removeprefix("GPU-")).bytes


class Driver:
    """The loaded library: its functions raise `CudaError` for what is not success."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self.library = ctypes.CDLL(library)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.library, name)

        def call(*arguments: Any) -> None:
            code = function(*arguments)
            if code != SUCCESS:
                raise CudaError(name, code)

        return call

    # What one process does to another.

    def state(self, pid: int) -> int:
        value = ctypes.c_int()
        self.cuCheckpointProcessGetState(pid, ctypes.byref(value))
        return value.value

    def restore_thread(self, pid: int) -> int:
        value = ctypes.c_int()
        self.cuCheckpointProcessGetRestoreThreadId(pid, ctypes.byref(value))
        return value.value

    def lock(self, pid: int, timeout_ms: int = 0) -> None:
        self.cuCheckpointProcessLock(pid, ctypes.byref(LockArgs(timeout_ms=timeout_ms)))

    def checkpoint(self, pid: int) -> None:
        self.cuCheckpointProcessCheckpoint(pid, None)

    def restore(self, pid: int, pairs: dict[str, str] | None = None) -> None:
        """Restore onto the same GPUs by index, or as `pairs` (old UUID -> new UUID) says."""
        array = (GpuPair * len(pairs or ()))()
        for entry, (old, new) in zip(array, (pairs or {}).items(), strict=True):
            entry.old[:] = uuid_bytes(old)
            entry.new[:] = uuid_bytes(new)
        arguments = RestoreArgs(count=len(array))
        arguments.pairs = ctypes.cast(array, ctypes.POINTER(GpuPair))
        self.cuCheckpointProcessRestore(pid, ctypes.byref(arguments))

    def unlock(self, pid: int) -> None:
        self.cuCheckpointProcessUnlock(pid, None)

    def custom_checkpoint(self, pid: int) -> CustomStorage:
        """Checkpoint with the memory mapped onto the own GPUs, until `complete`."""
        storage = ctypes.POINTER(CustomStorage)()
        arguments = CheckpointArgs(custom_storage=ctypes.pointer(storage))
        self.cuCheckpointProcessCheckpoint(pid, ctypes.byref(arguments))
        return storage.contents

    def custom_restore(self, pid: int) -> CustomStorage:
        storage = ctypes.POINTER(CustomStorage)()
        arguments = RestoreArgs(custom_storage=ctypes.pointer(storage))
        self.cuCheckpointProcessRestore(pid, ctypes.byref(arguments))
        return storage.contents

    def complete(self, storage: CustomStorage) -> None:
        self.cuCheckpointOperationComplete(ctypes.c_void_p(storage.handle))


class Gpu:
    """One GPU with its primary context, current in the thread that made this."""

    def __init__(self, ordinal: int = 0, library: str = "libcuda.so.1") -> None:
        self.driver = Driver(library)
        self.driver.cuInit(0)
        self.ordinal = ordinal
        context = ctypes.c_void_p()
        self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal)
        self.context = context
        self.use()
        self._module = ctypes.c_void_p()

    def use(self) -> None:
        """Make it current in this thread."""
        self.driver.cuCtxSetCurrent(self.context)

    @property
    def uuid(self) -> str:
        value = (ctypes.c_ubyte * 16)()
        self.driver.cuDeviceGetUuid_v2(value, self.ordinal)
        return f"GPU-{uuid.UUID(bytes=bytes(value))}"

    def allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        self.driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        self.driver.cuMemFree_v2(ctypes.c_uint64(address))

    def upload(self, data: bytes) -> int:
        address = self.allocate(len(data))
        self.write(address, data)
        return address

    def write(self, address: int, data: bytes) -> None:
        self.driver.cuMemcpyHtoD_v2(ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))

    def read(self, address: int, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        self.driver.cuMemcpyDtoH_v2(buffer, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return buffer.raw

    def launch(self, kernel: str, *arguments: int, ms: int = 0) -> None:
        """Start a kernel, which takes `ms`.

        They are ``checksum(data, size, out)``, ``fill(data, size, seed)``, ``add(data, n)`` and
        ``spin()``.
        """
        if not self._module.value:
            self.driver.cuModuleLoadData(ctypes.byref(self._module), b"simgpu")
        function = ctypes.c_void_p()
        self.driver.cuModuleGetFunction(ctypes.byref(function), self._module, kernel.encode())
        values: list[Any] = [ctypes.c_uint64(value) for value in arguments]
        values.append(ctypes.c_uint32(ms))
        parameters = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in values)
        )
        self.driver.cuLaunchKernel(function, *[1] * 6, 0, None, parameters, None)

    def synchronize(self) -> None:
        self.driver.cuCtxSynchronize()

    def checksum(self, address: int, size: int, ms: int = 0) -> int:
        """CRC-32 of device memory, computed where it lies."""
        with self.scratch(8) as out:
            self.launch("checksum", address, size, out, ms=ms)
            self.synchronize()
            return int.from_bytes(self.read(out, 8), "little")

    @contextlib.contextmanager
    def scratch(self, size: int) -> Iterator[int]:
        address = self.allocate(size)
        try:
            yield address
        finally:
            self.free(address)


def main() -> None:
    """Carry out ``[method of Driver, arguments]`` from each line of the input."""
    driver = Driver()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            print(json.dumps([SUCCESS, getattr(driver, name)(*arguments)]), flush=True)
        except CudaError as error:
            print(json.dumps([error.code, None]), flush=True)


if __name__ == "__main__":
    main()
