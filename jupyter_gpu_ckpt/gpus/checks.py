"""What ``doctor`` says of this node's GPUs."""

from __future__ import annotations

from ..models import DoctorCheck
from .fit import FIRST_DRIVER, FIRST_DRIVER_TO_MOVE, gigabytes
from .inventory import Gpu, Inventory, version


def checks(found: Inventory) -> list[DoctorCheck]:
    """The GPUs, and what they lack for saving what is on them; nothing where there is no driver."""
    if found.error is not None:
        hint = "See whether 'nvidia-smi' works; kernels without a GPU are saved as ever."
        return [DoctorCheck("NVIDIA driver", "warning", found.error, hint)]
    if found.driver is None:
        return []
    all_checks = [_driver(found)]
    all_checks += [
        DoctorCheck("GPU", "warning", f"Does not work: {why}.", "See 'nvidia-smi', 'dmesg'.")
        for why in found.broken
    ]
    for gpu in found.gpus:
        all_checks += _gpu(gpu)
    return all_checks


def _driver(found: Inventory) -> DoctorCheck:
    driver = found.driver or ""
    cuda = f", CUDA {found.cuda // 1000}.{found.cuda % 1000 // 10}" if found.cuda else ""
    name, said = "NVIDIA driver", f"Version {driver}{cuda}."
    if version(driver) < FIRST_DRIVER:
        said += " It cannot give GPU memory to be saved."
        hint = f"Ask your administrator for version {FIRST_DRIVER[0]} or newer."
        return DoctorCheck(name, "warning", said, hint)
    if version(driver) < FIRST_DRIVER_TO_MOVE:
        said += " It restores GPU memory onto the same GPU only."
        hint = f"Onto another GPU: version {FIRST_DRIVER_TO_MOVE[0]} or newer."
        return DoctorCheck(name, "warning", said, hint)
    return DoctorCheck(name, "ok", said)


def _gpu(gpu: Gpu) -> list[DoctorCheck]:
    name, count = f"GPU {gpu.index}", len(gpu.processes)
    by = f" by {count} {'process' if count == 1 else 'processes'}" if count else ""
    said = f"{gpu.name}, {gpu.uuid}: {gigabytes(gpu.used)} of {gigabytes(gpu.memory)} in use{by}."
    found = [DoctorCheck(name, "ok", said)]
    if gpu.mig:
        said = "MIG is on: the driver cannot give the memory of such a GPU to be saved."
        hint = f"To turn it off, as root: nvidia-smi -i {gpu.index} -mig 0"
        found.append(DoctorCheck(name, "warning", said, hint))
    if not gpu.persistence:
        said = (
            "Persistence mode is off: the driver forgets the GPU whenever nobody uses it, "
            "and a restore has to wait for it or fails."
        )
        hint = f"To turn it on, as root: nvidia-smi -i {gpu.index} -pm 1"
        found.append(DoctorCheck(name, "warning", said, hint))
    return found
