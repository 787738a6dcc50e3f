"""What of a restored kernel's environment is made new: the tokens and places of this server."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from .observer import kept_from_kernels

if TYPE_CHECKING:
    from .keeper import Keeper

#: Name under which the environment in the kernel remembers what it was given, and its shell the
#: line to its server.
MARK: Final = "_jupyter_gpu_ckpt"

#: Code for the kernel's IPython shell, ``None`` where it has none; it imports nothing.
SHELL: Final = (
    "__import__('sys').modules['IPython'].get_ipython()"
    " if 'IPython' in __import__('sys').modules else None"
)

# Run in the kernel, which need not have this package. What the notebook itself has set stays: it
# differs from what the process was started with, and from what it was given at the last restore.
# (Where the process has overwritten its first environment, as a program that sets its title does,
# that cannot be told.)
_SET: Final = f"""
import os
try:
    with open("/proc/self/environ", "rb") as file:
        pairs = [entry.partition(b"=") for entry in file.read().split(b"\\0")]
except OSError:
    pairs = []
first = {{os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}}
given = getattr(os.environ, "{MARK}", {{}})
for name, value in new.items():
    ours = [first.get(name), *([given[name]] if name in given else [])]
    if "PATH" in first and os.environ.get(name) not in ours:
        continue
    os.environ[name] = given[name] = value
os.environ.{MARK} = given
"""

#: Call what the program wants called, now that the environment is new.
_CALL: Final = f"(lambda shell: hasattr(shell, '{MARK}') and shell.{MARK}.restored())({SHELL})"


def values_of_server(keeper: Keeper, km: Any) -> dict[str, str]:
    """What the environment of a restored kernel takes over from this server's."""
    return fresh_values(
        os.environ,
        keeper.refresh_environment,
        [*keeper.launching.scrub_environment, *kept_from_kernels(keeper.kernel_manager)],
        (km.kernel_spec.env or {}) if km.kernel_spec else (),
    )


def fresh_values(
    environ: Mapping[str, str],
    wanted: Iterable[str],
    secret: Collection[str],
    own: Collection[str] = (),
) -> dict[str, str]:
    """Variables of a server that its restored kernels are given.

    Parameters
    ----------
    environ
        The server's environment.
    wanted
        Patterns of names, ``*`` and ``?`` as in file names, case-sensitive.
    secret
        Patterns of names that no kernel gets.
    own
        Names whose values are the kernelspec's, not the server's.
    """
    found: set[str] = set()
    for pattern in wanted:
        found.update(name for name in environ if fnmatch.fnmatchcase(name, pattern))
    return {
        name: environ[name]
        for name in sorted(found - set(own))
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in secret)
    }


def python_code(values: Mapping[str, str]) -> str:
    """Code that gives a Python kernel these variables, then calls its ``after_restore`` callbacks.

    It leaves no name behind in the notebook.
    """
    lines = [f"exec({_SET!r}, {{'new': {dict(values)!r}}})"] if values else []
    return "\n".join([*lines, _CALL])
