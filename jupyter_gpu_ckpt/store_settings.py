"""What an administrator can set about saved states: their keys, and how long they are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from traitlets import Bool, Float, Integer, List, TraitError, Unicode

from .limits import Limited
from .store.keys import KeyCommand, KeyFile, KeyRing, KeySpec, KeyVariable
from .store.retention import Policy

_LONGEST_COMMAND: Final = 600.0


class StoreSettings(Limited):
    """Base of :class:`~jupyter_gpu_ckpt.settings.GpuCkpt`, and part of its section."""

    key_file = Unicode(
        None,
        allow_none=True,
        config=True,
        help="File with the key that new states are encrypted with; nobody else may be able to "
        "read it. `jupyter gpu-ckpt new-key FILE` makes one. None: no key from a file.",
    )
    key_env = Unicode(
        None,
        allow_none=True,
        config=True,
        help="Environment variable of the server with that key, instead of a file. Kernels do not "
        "inherit it. None: no key from the environment.",
    )
    key_command = List(
        Unicode(),
        config=True,
        help="Command that prints that key, such as a client of a key management service: the "
        "program and its arguments, without a shell. Run once, when the key is first needed. "
        "Empty: no key from a command.",
    )
    old_key_files = List(
        Unicode(), config=True, help="Files with keys that older states were encrypted with."
    )
    old_key_envs = List(
        Unicode(),
        config=True,
        help="Environment variables with keys that older states were encrypted with.",
    )
    old_key_commands = List(
        List(Unicode()),
        config=True,
        help="Commands that print keys that older states were encrypted with.",
    )
    key_command_timeout = Float(
        10.0,
        min=0.1,
        max=_LONGEST_COMMAND,
        config=True,
        help="Seconds that a key's command may take; default 10.",
    )
    read_unsealed = Bool(
        True,
        config=True,
        help="Whether states that were saved before there was a key can be restored once there is "
        "one. Others that are not encrypted never can then.",
    )
    keep_last = Integer(
        10,
        min=0,
        config=True,
        help="How many of its newest states are kept of each kernel; default 10. States that the "
        "user saved and automatic ones count apart. 0: none for that reason alone.",
    )
    keep_hourly = Integer(
        24,
        min=0,
        config=True,
        help="Of how many hours the newest state is kept besides; default 24. Hours without a "
        "state do not count.",
    )
    keep_daily = Integer(
        7,
        min=0,
        config=True,
        help="Of how many days (UTC) the newest state is kept besides; default 7.",
    )
    max_age = Float(
        None,
        allow_none=True,
        min=0.0,
        config=True,
        help="Seconds after which a state is removed whatever else would keep it, unless it is "
        "pinned. None: never.",
    )
    quota = Integer(
        None,
        allow_none=True,
        min=0,
        config=True,
        help="Bytes that an owner's states may take; the oldest ones that are not pinned go first. "
        "None: no limit.",
    )

    def key_ring(self) -> KeyRing | None:
        """Where keys come from; ``None`` where nothing is encrypted nor was.

        Raises
        ------
        TraitError
            More than one of ``key_file``, ``key_env`` and ``key_command`` is set.
        """
        current = _specs(self.key_file, self.key_env, self.key_command)
        if len(current) > 1:
            raise TraitError(
                "Only one of GpuCkpt.key_file, GpuCkpt.key_env and GpuCkpt.key_command can be set."
            )
        old: list[KeySpec] = [KeyFile(Path(path)) for path in self.old_key_files]
        old += [KeyVariable(name) for name in self.old_key_envs]
        old += [KeyCommand(tuple(argv)) for argv in self.old_key_commands if argv]
        if not current and not old:
            return None
        return KeyRing(
            current[0] if current else None,
            old,
            command_timeout=self.key_command_timeout,
            read_unsealed=self.read_unsealed,
        )

    def key_variables(self) -> list[str]:
        """Environment variables with keys, which no kernel may inherit."""
        return [*([self.key_env] if self.key_env else []), *self.old_key_envs]

    def retention(self) -> Policy:
        """Which states are kept."""
        return Policy(
            keep_last=self.keep_last,
            keep_hourly=self.keep_hourly,
            keep_daily=self.keep_daily,
            max_age=self.max_age,
            quota=self.quota,
        )


def _specs(file: str | None, env: str | None, command: list[str]) -> list[KeySpec]:
    specs: list[KeySpec] = []
    if file:
        specs.append(KeyFile(Path(file)))
    if env:
        specs.append(KeyVariable(env))
    if command:
        specs.append(KeyCommand(tuple(command)))
    return specs
