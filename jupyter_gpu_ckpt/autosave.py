"""When kernels are saved without anybody asking: what an administrator sets and a user may change.

The traits of ``c.AutoSave`` are the defaults. A user changes them for all kernels, a notebook or
kernelspec in its metadata for itself, and a kernel's user for that kernel; the nearer wins, within
the administrator's limits.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec
from traitlets import Bool, Enum, Float, Integer, List, TraitError, Unicode, validate

from .errors import CkptError
from .limits import Limited
from .models import AutoSaveChoice, AutoSaveLimits, AutoSavePolicy, AutoSaves

#: What users may change: the fields of a policy.
FIELDS: Final = AutoSavePolicy.__struct_fields__
#: Those of them that are seconds, 0 for off.
SECONDS: Final = ("idle", "interval", "long_cell", "hibernate", "park")

#: Where a kernelspec's or a notebook's metadata say how it is saved.
METADATA: Final = "gpu_ckpt"

_WEEK: Final = 7 * 24 * 3600.0


class AutoSave(Limited):
    """When kernels are saved automatically; the configuration section is ``AutoSave``."""

    enabled = Bool(
        True,
        config=True,
        help="Whether kernels are saved automatically at all; what leaves a kernel alone.",
    )
    idle = Float(
        600.0,
        min=0.0,
        max=_WEEK,
        config=True,
        help="Seconds without execution after which a kernel is saved, once per change: one that "
        "did nothing since its last save is not saved again. Default 600; 0: never.",
    )
    interval = Float(
        1800.0,
        min=0.0,
        max=_WEEK,
        config=True,
        help="Seconds of work after which a kernel is saved that was not saved meanwhile, also in "
        "the middle of a cell. Default 1800; 0: never.",
    )
    long_cell = Float(
        300.0,
        min=0.0,
        max=_WEEK,
        config=True,
        help="A cell that ran longer than so many seconds is saved when it ends. Default 300; "
        "0: never.",
    )
    hibernate = Float(
        0.0,
        min=0.0,
        max=_WEEK,
        config=True,
        help="Seconds without execution after which a kernel is saved and its process ended, which "
        "frees its memory; it stays listed and wakes by itself when a cell is run or its notebook "
        "opened. Default 0: never.",
    )
    park = Float(
        0.0,
        min=0.0,
        max=_WEEK,
        config=True,
        help="Seconds without execution after which a kernel that uses a GPU is saved, where it "
        "did something since its last save, and parked: its GPU memory moves to host memory, and "
        "comes back when a cell is run. Default 0: never.",
    )
    before_shutdown = Bool(
        True,
        config=True,
        help="Whether a server that is stopped (SIGTERM, Ctrl-C) saves its kernels first, and the "
        "next server offers them.",
    )
    before_preemption = Bool(
        True,
        config=True,
        help="Whether a kernel is saved when somebody says beforehand that its server ends "
        "(notice_sources, 'jupyter gpu-ckpt save --all --deadline').",
    )
    before_cull = Bool(
        True,
        config=True,
        help="Whether a kernel that the server's culler ends is saved first, and can be brought "
        "back. The culler waits for the save.",
    )
    cull_action = Enum(
        ["hibernate", "end"],
        "hibernate",
        config=True,
        help="What becomes of a kernel that the server's culler would end and that was saved. "
        "hibernate: it stays listed without a process, and wakes by itself when a cell is run or "
        "its notebook opened. end: it is ended, and offered among the lost kernels.",
    )
    max_cost = Float(
        0.02,
        min=0.0001,
        max=1.0,
        config=True,
        help="Largest part of the time that the saves of busy kernels (interval, long_cell) may "
        "freeze them: the time between two saves grows with the freeze that was measured. "
        "Default 0.02, that is 2 %.",
    )
    shutdown_deadline = Float(
        20.0,
        min=0.0,
        max=_WEEK,
        config=True,
        help="Seconds that the saves before a shutdown may take in all; default 20. What stops "
        "the server must wait that long, and somewhat longer, before it kills it.",
    )
    shutdown_parallel = Integer(
        4,
        min=1,
        config=True,
        help="How many kernels are saved at the same time before a shutdown, or after a notice of "
        "one; default 4.",
    )
    notice_sources = List(
        Unicode(),
        ["auto"],
        config=True,
        help="Who says beforehand that this server ends, so that kernels are saved in time: names "
        "of file, signal, slurm, aws, gcp, azure and what other packages bring. auto: those that "
        "find what they need on this machine. Empty: nobody.",
    )
    retry = Float(
        60.0,
        min=0.1,
        max=_WEEK,
        config=True,
        help="Seconds after an automatic save that failed before the next try; doubled with each "
        "failure, up to an hour. Default 60.",
    )
    hook_timeout = Float(
        10.0,
        min=0.1,
        max=600.0,
        config=True,
        help="Seconds that a kernel's own before_save callbacks may take; default 10. Then it is "
        "saved all the same.",
    )
    shortest = Float(
        60.0,
        min=0.0,
        max=_WEEK,
        config=True,
        help="Shortest idle, interval, long_cell, hibernate and park that users may choose, in "
        "seconds; default 60.",
    )
    locked = List(
        Unicode(),
        [],
        config=True,
        help="What users may not change: names of enabled, idle, interval, long_cell, hibernate, "
        "park, before_shutdown, before_preemption, before_cull.",
    )
    leave_alone = List(
        Unicode(),
        [],
        config=True,
        help="Patterns (* and ? as in file names) of kernelspec names that are never saved "
        "automatically: kernels that are cheap to redo, or unsafe to repeat.",
    )

    @validate("locked")
    def _check_locked(self, proposal: dict[str, Any]) -> list[str]:
        names: list[str] = proposal["value"]
        if unknown := sorted(set(names) - set(FIELDS)):
            raise TraitError(f"AutoSave.locked names what is not there: {', '.join(unknown)}.")
        return names

    def defaults(self) -> AutoSavePolicy:
        """The administrator's policy."""
        return AutoSavePolicy(**{name: getattr(self, name) for name in FIELDS})

    def limits(self) -> AutoSaveLimits:
        """What users may not do."""
        return AutoSaveLimits(shortest=self.shortest, locked=sorted(set(self.locked)))

    def is_left_alone(self, kernel_name: str) -> bool:
        """Whether kernels of this kernelspec are never saved automatically."""
        return any(fnmatch.fnmatchcase(kernel_name, pattern) for pattern in self.leave_alone)

    def policy(self, kernel_name: str, choices: Iterable[AutoSaveChoice]) -> AutoSavePolicy:
        """What counts for a kernel; ``choices``: from the most general to its own."""
        policy = self.defaults()
        for choice in choices:
            policy = msgspec.structs.replace(policy, **self._allowed(choice))
        if self.is_left_alone(kernel_name):
            policy = msgspec.structs.replace(policy, enabled=False)
        return policy

    def _allowed(self, choice: AutoSaveChoice) -> dict[str, Any]:
        """Those of the chosen values that count: limits may be newer than a choice."""
        return {
            name: max(value, self.shortest) if name in SECONDS and value > 0 else value
            for name, value in chosen(choice).items()
            if name not in self.locked
        }

    def check(self, choice: AutoSaveChoice) -> None:
        """Refuse what the administrator does not allow: ``bad_request``."""
        values = chosen(choice)
        if refused := sorted(set(values) & set(self.locked)):
            raise CkptError(
                "bad_request",
                f"The administrator does not let this be changed: {', '.join(refused)}.",
                hint="Leave it as it is, or ask the administrator.",
            )
        short = [name for name in SECONDS if 0 < values.get(name, 0) < self.shortest]
        if short:
            raise CkptError(
                "bad_request",
                f"{short[0]} is shorter than the administrator allows.",
                hint=f"The shortest is {self.shortest:g} seconds; 0 switches it off.",
            )

    def described(self, policy: AutoSavePolicy, own: AutoSaveChoice) -> AutoSaves:
        """A policy as clients see it."""
        return AutoSaves(policy=policy, own=own, limits=self.limits())


def chosen(choice: AutoSaveChoice) -> dict[str, Any]:
    """The values that a choice sets."""
    return {name: v for name in FIELDS if (v := getattr(choice, name)) is not None}


def merged(choice: AutoSaveChoice, change: AutoSaveChoice) -> AutoSaveChoice:
    """A choice with what a later one sets."""
    return msgspec.structs.replace(choice, **chosen(change))


def from_metadata(metadata: Any) -> AutoSaveChoice:
    """What a kernelspec's or a notebook's metadata choose.

    ``{"gpu_ckpt": {"autosave": false}}`` leaves the kernel alone; instead of ``false``, an object
    with fields of a policy changes these. What is not understood is ignored: somebody else may
    have written it.
    """
    section = metadata.get(METADATA) if isinstance(metadata, dict) else None
    said = section.get("autosave") if isinstance(section, dict) else None
    if isinstance(said, bool):
        return AutoSaveChoice(enabled=said)
    return understood(said)


def understood(said: Any) -> AutoSaveChoice:
    """A choice that was written down, perhaps by another version; an empty one if it is none."""
    try:
        return AutoSaveChoice() if said is None else msgspec.convert(said, AutoSaveChoice)
    except msgspec.ValidationError:
        return AutoSaveChoice()


class UserChoice:
    """The user's own choice for all kernels, in a file that outlives the server.

    Parameters
    ----------
    path
        The file; it need not be there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> AutoSaveChoice:
        """The choice; an empty one where there is none or the file is not understood."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=AutoSaveChoice)
        except (OSError, msgspec.DecodeError):
            return AutoSaveChoice()

    def write(self, choice: AutoSaveChoice) -> None:
        """Keep a choice.

        Raises
        ------
        CkptError
            ``store_unavailable``
        """
        hidden = self._path.with_name(f".{self._path.name}.new")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            hidden.write_bytes(msgspec.json.encode(chosen(choice)))
            hidden.replace(self._path)
        except OSError as error:
            raise CkptError(
                "store_unavailable",
                f"The choice cannot be kept: {self._path} cannot be written.",
                hint="Free disk space there, or correct the permissions.",
                details=str(error),
            ) from error
