"""What the NVIDIA driver says of this node, as one JSON object on stdout.

Run as a program of its own, which a driver that hangs may keep (:mod:`.asking`): its arguments
are the folders in which modules are found. It imports nothing of this package, and the server
does not import it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def main(path: list[str]) -> None:
    """Print the driver's answer, or an ``error`` where there is no driver that works."""
    # In place of the one that holds this file; what the server can import can be imported here.
    sys.path[:] = path
    import pynvml as nv

    try:
        nv.nvmlInit()
        found = {
            "driver": nv.nvmlSystemGetDriverVersion(),
            "cuda": nv.nvmlSystemGetCudaDriverVersion(),
            "gpus": [],
            "broken": [],
        }
        for index in range(nv.nvmlDeviceGetCount()):
            try:
                found["gpus"].append(_gpu(nv, index))
            except nv.NVMLError as error:
                found["broken"].append(f"GPU {index}: {error}")
    except (nv.NVMLError_LibraryNotFound, nv.NVMLError_DriverNotLoaded):
        found = {}
    except nv.NVMLError as error:
        found = {"error": str(error)}
    print(json.dumps(found))


def _gpu(nv: Any, index: int) -> dict[str, Any]:
    def optional(ask: Callable[[Any], Any]) -> Any:
        """What GPUs of some kinds do not tell."""
        try:
            return ask(handle)
        except (nv.NVMLError_NotSupported, nv.NVMLError_FunctionNotFound):
            return None

    handle = nv.nvmlDeviceGetHandleByIndex(index)
    memory = nv.nvmlDeviceGetMemoryInfo(handle)
    processes = optional(nv.nvmlDeviceGetComputeRunningProcesses)
    mig = optional(nv.nvmlDeviceGetMigMode)
    return {
        "index": index,
        "name": nv.nvmlDeviceGetName(handle),
        "uuid": nv.nvmlDeviceGetUUID(handle),
        "memory": memory.total,
        "used": memory.used,
        "mig": mig is not None and mig[0] == 1,
        "persistence": optional(nv.nvmlDeviceGetPersistenceMode) == 1,
        "processes": [{"pid": one.pid, "memory": one.usedGpuMemory} for one in processes or []],
    }


if __name__ == "__main__":
    main(sys.argv[1:])
