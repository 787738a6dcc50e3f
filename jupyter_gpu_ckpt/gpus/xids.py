"""Tells which GPUs report errors (NVIDIA's Xid): JSON objects, one a line, until stdin ends.

Run as a program of its own (:mod:`.faults`), which a driver that hangs may keep: its arguments are
the folders in which modules are found. It imports nothing of this package, and the server does not
import it. The first object is empty: errors are told from then on, earlier ones never.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from typing import Any

#: Milliseconds for which the driver is asked to wait at a time.
_WAIT = 60_000
#: "The GPU has fallen off the bus".
_LOST = 79


def main(path: list[str]) -> None:
    """Print each error of a GPU: its ``uuid`` and ``code``."""
    # In place of the one that holds this file; what the server can import can be imported here.
    sys.path[:] = path
    import pynvml as nv

    threading.Thread(target=_end_with_the_server, daemon=True).start()
    nv.nvmlInit()
    events = nv.nvmlEventSetCreate()
    handles: dict[int, Any] = {}
    uuids: dict[int, str] = {}
    for index in range(nv.nvmlDeviceGetCount()):
        try:
            handle = nv.nvmlDeviceGetHandleByIndex(index)
            uuid = nv.nvmlDeviceGetUUID(handle)
            nv.nvmlDeviceRegisterEvents(handle, nv.nvmlEventTypeXidCriticalError, events)
        except nv.NVMLError:  # lost already, or of a kind that tells nothing
            continue
        handles[_address(handle)], uuids[_address(handle)] = handle, uuid
    print("{}", flush=True)
    while handles:
        try:
            event = nv.nvmlEventSetWait(events, _WAIT)
        except nv.NVMLError_Timeout:
            continue
        except nv.NVMLError_GpuIsLost:
            # Some drivers say so of the whole set in place of the event.
            for address in [one for one, handle in handles.items() if _is_lost(nv, handle)]:
                del handles[address]
                _tell(uuids[address], _LOST)
            time.sleep(1)
            continue
        if (uuid := uuids.get(_address(event.device))) is not None:
            _tell(uuid, event.eventData)


def _tell(uuid: str, code: int) -> None:
    print(json.dumps({"uuid": uuid, "code": code}), flush=True)


def _address(handle: Any) -> int:
    """What tells one GPU's handle from another's, also when the GPU answers no more."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _is_lost(nv: Any, handle: Any) -> bool:
    try:
        nv.nvmlDeviceGetMemoryInfo(handle)
    except nv.NVMLError_GpuIsLost:
        return True
    except nv.NVMLError:
        return False
    return False


def _end_with_the_server() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
