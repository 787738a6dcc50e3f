"""Whether a state's GPU memory fits onto the GPUs of a node, and which GPU stands for which."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from ..models import Difference
from .inventory import CudaGpu, CudaProcess, Gpu, GpuUse, Inventory, version

#: The first driver that gives GPU memory to be saved, and the first that restores it elsewhere.
FIRST_DRIVER: Final = (570,)
FIRST_DRIVER_TO_MOVE: Final = (580,)
#: The first CUDA whose driver takes GPU memory from files (custom storage).
FIRST_CUDA_TO_STORE: Final = 13040

_NONE: Final[Mapping[str, str]] = MappingProxyType({})


class Fit(msgspec.Struct, frozen=True):
    """How a state's GPU memory fits.

    ``pairs`` gives for **every** GPU that the driver knew at the save another one of this node, by
    UUID, as the driver demands it; it is empty where a difference is blocking.
    """

    pairs: dict[str, str] = {}
    differences: list[Difference] = []


def fit(
    use: GpuUse | None,
    here: Inventory,
    saved_driver: str | None = None,
    ending: Collection[int] = (),
    chosen: Mapping[str, str] = _NONE,
) -> Fit:
    """Find GPUs of this node for those of a state.

    Parameters
    ----------
    use
        What the state has of GPUs.
    here
        This node's.
    saved_driver
        The version of the driver that it was saved with.
    ending
        Processes that will have ended by then: their memory counts as free.
    chosen
        Pairs that somebody wants, by UUID; the others are found.
    """
    if use is None or not use.processes:
        return Fit()
    problem = (
        _no_gpu(use.memory, here) or _driver(use, here, saved_driver) or _choice(use, here, chosen)
    )
    if problem is not None:
        return Fit({}, [problem])
    lost = _lost(use, here)
    used = in_use(use) if lost else used_gpus(use.processes, use.gpus)
    by_uuid = {gpu.uuid: gpu for gpu in here.gpus}
    wanted = [gpu for gpu in use.gpus if gpu.uuid in used]
    told = all(gpu.released_bytes is not None for gpu in wanted)
    share = use.memory // max(1, len(wanted))
    needs = {gpu.uuid: gpu.released_bytes or 0 if told else share for gpu in wanted}
    placed = {old: by_uuid[new] for old, new in chosen.items() if old in used}
    free = [gpu for gpu in here.gpus if gpu.uuid not in chosen.values()]
    left = [gpu for gpu in wanted if gpu.uuid not in chosen]
    placed |= _place(left, free, needs, ending)
    problem = _unplaced(use, used, placed, here, len(lost))
    if problem is not None:
        return Fit({}, [problem])
    short = _room(needs, placed, ending, told)
    pairs = _with_unused(
        use.gpus,
        {**chosen, **{old: gpu.uuid for old, gpu in placed.items()}},
        [*here.gpus, *lost],
    )
    found = [*([short] if short else []), *_moved(use, used, pairs, here)]
    if saved_driver and here.driver and version(here.driver) > version(saved_driver):
        message = "The NVIDIA driver is newer than at the save."
        found.append(Difference("driver", message, False, saved_driver, here.driver))
    blocked = any(difference.blocking for difference in found)
    return Fit({} if blocked else pairs, found)


def choices(use: GpuUse | None, here: Inventory) -> dict[str, list[Gpu]]:
    """The GPUs of this node that can stand for each used one of a state, by UUID, full or not.

    Empty where the driver restores GPU memory onto the same GPU only.
    """
    if use is None or version(here.driver or "") < FIRST_DRIVER_TO_MOVE:
        return {}
    used = used_gpus(use.processes, use.gpus)
    return {
        old.uuid: [gpu for gpu in here.gpus if _suits(old, gpu)]
        for old in use.gpus
        if old.uuid in used
    }


def used_gpus(processes: Sequence[CudaProcess], gpus: Sequence[CudaGpu]) -> set[str]:
    """UUIDs of the GPUs that the processes may use: as CUDA reads ``CUDA_VISIBLE_DEVICES``."""
    return {uuid for process in processes for uuid in _visible(process.visible, gpus)}


def in_use(use: GpuUse) -> set[str]:
    """UUIDs of the GPUs that a state may have something on.

    Not those on which its save freed nothing, nor one of which the driver did not tell while it
    did of others: that one did not work any more.
    """
    used = used_gpus(use.processes, use.gpus)
    told = any(gpu.released_bytes is not None for gpu in use.gpus)
    return {gpu.uuid for gpu in use.gpus if gpu.uuid in used and (gpu.released_bytes or not told)}


def _lost(use: GpuUse, here: Inventory) -> list[Gpu]:
    """GPUs of the save which this same node still has, but which do not work any more.

    The driver counts them, so that one of them may stand for a GPU on which the state has nothing.
    """
    there = {gpu.uuid for gpu in here.gpus}
    missing = [gpu for gpu in use.gpus if gpu.uuid not in there]
    same_node = len(missing) < len(use.gpus)
    if not same_node or len(missing) > len(here.broken):
        return []
    return [Gpu(-1, gpu.name, gpu.uuid, gpu.memory_bytes) for gpu in missing]


def _visible(value: str | None, gpus: Sequence[CudaGpu]) -> list[str]:
    if value is None:
        return [gpu.uuid for gpu in gpus]
    found: list[str] = []
    for part in (word.strip() for word in value.split(",")):
        if part.isascii() and part.isdigit():
            named = [gpus[int(part)].uuid] if int(part) < len(gpus) else []
        elif part.startswith("GPU-"):
            named = [gpu.uuid for gpu in gpus if gpu.uuid.startswith(part)]
        else:
            named = []
        if len(named) != 1:
            break  # what comes after the first that is none does not count
        found += named
    return [] if len(set(found)) < len(found) else found


def _no_gpu(need: int, here: Inventory) -> Difference | None:
    if here.gpus:
        return None
    has = f"The kernel has {gigabytes(need)} of GPU memory" if need else "The kernel uses a GPU"
    if here.error is not None:
        message = f"{has}. {here.error}"
    elif here.broken:
        message = f"{has}, and no GPU of this node works: {'; '.join(here.broken)}."
    elif here.driver is not None:
        message = f"{has}, and this node has no GPU."
    else:
        message = f"{has}, and this node has no GPU, or no NVIDIA driver."
    return Difference("gpu", message, True)


def _driver(use: GpuUse, here: Inventory, saved: str | None) -> Difference | None:
    driver = here.driver or ""
    if version(driver) < FIRST_DRIVER:
        message = (
            f"The NVIDIA driver is too old to restore GPU memory: that takes {FIRST_DRIVER[0]}."
        )
    elif use.stored and here.cuda is not None and here.cuda < FIRST_CUDA_TO_STORE:
        message = (
            "The state's GPU memory was saved straight to the store, and only NVIDIA drivers that "
            "offer CUDA 13.4 or newer take it from there."
        )
    elif saved is not None and version(driver) < version(saved):
        message = "The NVIDIA driver is older than at the save."
    elif saved is None and here.cuda and use.cuda_version and here.cuda < use.cuda_version:
        message = "The NVIDIA driver offers an older CUDA than at the save."
    else:
        return None
    return Difference("driver", message, True, saved, driver)


def _choice(use: GpuUse, here: Inventory, chosen: Mapping[str, str]) -> Difference | None:
    """What is wrong with the pairs that somebody wants."""
    saved = {gpu.uuid: gpu for gpu in use.gpus}
    there = {gpu.uuid: gpu for gpu in here.gpus}
    for old, new in chosen.items():
        if old not in saved:
            message = f"There was no GPU {old} at the save, for which another one was chosen."
        elif new not in there:
            message = f"This node has no GPU {new}, which was chosen."
        elif list(chosen.values()).count(new) > 1:
            message = f"The GPU {new} was chosen for more than one."
        elif old in used_gpus(use.processes, use.gpus) and not _suits(saved[old], there[new]):
            message = (
                f"The GPU {new}, which was chosen, is of another kind, smaller, or has MIG on."
            )
        else:
            continue
        return Difference("gpu", message, True, _uuids(use.gpus), _uuids(here.gpus))
    return None


def _uuids(gpus: Sequence[CudaGpu] | Sequence[Gpu]) -> str:
    return ", ".join(f"{gpu.uuid} ({gpu.name})" for gpu in gpus)


def _place(
    used: Sequence[CudaGpu],
    gpus: Sequence[Gpu],
    needs: Mapping[str, int],
    ending: Collection[int],
) -> dict[str, Gpu]:
    """As many of the used GPUs as possible onto other ones (augmenting paths).

    First onto those with room for what they need; what is left then onto the others, which says
    best what is lacking. The same GPU as at the save is taken first, then one that none has yet,
    then that with most room.
    """
    holder: dict[str, CudaGpu] = {}
    by_uuid = {gpu.uuid: gpu for gpu in gpus}

    def find(old: CudaGpu, tried: set[str], roomy: bool) -> bool:
        def rank(gpu: Gpu) -> tuple[bool, bool, bool, int]:
            free = _free(gpu, ending)
            return free < needs[old.uuid], gpu.uuid != old.uuid, gpu.uuid in holder, -free

        for gpu in sorted((gpu for gpu in gpus if _suits(old, gpu)), key=rank):
            if gpu.uuid in tried or (roomy and _free(gpu, ending) < needs[old.uuid]):
                continue
            tried.add(gpu.uuid)
            if gpu.uuid not in holder or find(holder[gpu.uuid], tried, roomy):
                holder[gpu.uuid] = old
                return True
        return False

    for roomy in (True, False):
        placed = {old.uuid for old in holder.values()}
        for old in sorted(used, key=lambda one: one.uuid not in by_uuid):
            if old.uuid not in placed:
                find(old, set(), roomy)
    return {old.uuid: by_uuid[uuid] for uuid, old in holder.items()}


def _suits(old: CudaGpu, gpu: Gpu) -> bool:
    return gpu.name == old.name and gpu.memory >= old.memory_bytes and not gpu.mig


def _free(gpu: Gpu, ending: Collection[int]) -> int:
    ended = sum(one.memory or 0 for one in gpu.processes if one.pid in ending)
    return max(0, gpu.memory - gpu.used) + ended


def _unplaced(
    use: GpuUse, used: set[str], placed: dict[str, Gpu], here: Inventory, lost: int
) -> Difference | None:
    """Why not every GPU has one that stands for it."""
    saved, there = _names(use.gpus), _names(here.gpus)
    if len(here.gpus) + lost < len(use.gpus):
        broken = f" ({'; '.join(here.broken)})" if here.broken else ""
        message = (
            f"There were {len(use.gpus)} GPUs at the save, and here are {len(here.gpus)}{broken}: "
            "the driver wants one for each."
        )
        return Difference("gpu", message, True, saved, there)
    for old in use.gpus:
        if old.uuid not in used or old.uuid in placed:
            continue
        same = [gpu for gpu in here.gpus if gpu.name == old.name]
        if not same:
            message = f"The kernel uses a GPU {old.name}, and this node has none."
        elif all(gpu.mig for gpu in same):
            message = f"MIG is on at every GPU {old.name} here: nothing can be restored onto it."
        elif all(gpu.memory < old.memory_bytes for gpu in same):
            message = f"The GPUs {old.name} here have less memory than the one at the save."
        else:
            message = f"Too few GPUs {old.name} with enough memory and without MIG are here."
            if here.broken:
                message += f" {'; '.join(here.broken)}."
        return Difference("gpu", message, True, saved, there)
    return None


def _room(
    needs: Mapping[str, int], placed: Mapping[str, Gpu], ending: Collection[int], told: bool
) -> Difference | None:
    """Whether there is room on each GPU, or on all together where each one's need is not known."""
    parts = [([gpu], needs[old]) for old, gpu in placed.items()]
    if not told:
        parts = [(list(placed.values()), sum(needs.values()))]
    for gpus, need in parts:
        free = sum(_free(gpu, ending) for gpu in gpus)
        if free < need:
            break
    else:
        return None
    message = (
        f"The kernel needs {gigabytes(need)} of GPU memory, and {gigabytes(free)} are free here."
    )
    # The driver may know the processes by other numbers (containers): then theirs may be enough.
    known = {one.pid for gpu in gpus for one in gpu.processes}
    sure = not ending or bool(known & set(ending)) or sum(gpu.memory for gpu in gpus) < need
    return Difference("gpu_memory", message, sure, gigabytes(need), gigabytes(free))


def _with_unused(
    saved: Sequence[CudaGpu], placed: Mapping[str, str], gpus: Sequence[Gpu]
) -> dict[str, str]:
    """Every GPU of the save, the used ones and then the others: each gets one of its own."""
    pairs = dict(placed)
    left = [gpu for gpu in gpus if gpu.uuid not in pairs.values()]
    for likeness in (
        lambda old, gpu: gpu.uuid == old.uuid,
        lambda old, gpu: gpu.name == old.name,
        lambda old, gpu: True,
    ):
        for old in saved:
            new = next((gpu for gpu in left if likeness(old, gpu)), None)
            if old.uuid not in pairs and new is not None:
                pairs[old.uuid] = new.uuid
                left.remove(new)
    return {old.uuid: pairs[old.uuid] for old in saved}


def _moved(use: GpuUse, used: set[str], pairs: dict[str, str], here: Inventory) -> list[Difference]:
    if [old.uuid for old in use.gpus] == [gpu.uuid for gpu in here.gpus][: len(use.gpus)]:
        if all(old == new for old, new in pairs.items()):
            return []
    elif all(pairs[uuid] == uuid for uuid in used):
        return []
    old_uuids = ", ".join(sorted(used))
    new_uuids = ", ".join(pairs[uuid] for uuid in sorted(used))
    if version(here.driver or "") < FIRST_DRIVER_TO_MOVE:
        message = (
            "The kernel's GPUs are other ones here, and only NVIDIA drivers from "
            f"{FIRST_DRIVER_TO_MOVE[0]} on restore GPU memory onto another GPU."
        )
        return [Difference("driver", message, True, old_uuids, new_uuids)]
    return [Difference("gpu", "The GPU is another one of its kind.", False, old_uuids, new_uuids)]


def _names(gpus: Sequence[CudaGpu] | Sequence[Gpu]) -> str:
    return ", ".join(gpu.name for gpu in gpus) or "none"


def gigabytes(count: int) -> str:
    """Bytes in a reader's units."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.0f} MB"
