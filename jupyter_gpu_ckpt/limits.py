"""What an administrator lets a server's own configuration set, and the values that count anyway.

JupyterHub hands it to each server (:mod:`jupyter_gpu_ckpt.hub`); on a machine without a hub it can
be a file. It is applied where the configuration is loaded, so that no file of the user's, option of
the command line or change while the server runs gets past it.
"""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec
from traitlets import TraitError, TraitType
from traitlets.config import Config, LoggingConfigurable

from .errors import CkptError

#: The environment variable that holds it, as JSON in base64: spawners fill in braces and quotes.
VARIABLE: Final = "JUPYTER_GPU_CKPT_LIMITS"
#: An administrator's file, which wins over the variable: users can set variables of servers that
#: they start by themselves.
FILE: Final = Path("/etc/jupyter-gpu-ckpt/limits.json")

#: Values that stand for no limit, or for never: nothing is more than they are.
ENDLESS: Final[dict[str, object]] = {
    "quota": None, "max_age": None, "upload_bandwidth": 0,
    "idle": 0, "interval": 0, "long_cell": 0, "hibernate": 0, "park": 0,
}  # fmt: skip


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one trait may be.

    ``fixed``: it is ``value``, or where that is unset the package's default, whatever else is
    configured. Otherwise ``value`` is the default, and ``least`` and ``most`` are the bounds of
    what is configured.
    """

    value: Any = msgspec.UNSET
    fixed: bool = False
    least: int | float | None = None
    most: int | float | None = None


def fixed(value: Any) -> Rule:
    """A trait is this, whatever else is configured."""
    return Rule(value=value, fixed=True)


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rules by configuration section and trait; ``denied`` says that, and why, nothing is saved."""

    rules: dict[str, dict[str, Rule]] = {}
    denied: str | None = None
    version: int = 1

    def encoded(self) -> str:
        """As :data:`VARIABLE` holds it."""
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode()


def current() -> Limits:
    """What counts for this process.

    Raises
    ------
    TraitError
        It is there and cannot be understood: then nothing may be saved.
    """
    found = _file()
    text = os.environ.get(VARIABLE) if found is None else None
    if text is not None:
        try:
            found = base64.urlsafe_b64decode(text)
        except ValueError as error:
            _refuse(f"the variable {VARIABLE}", error)
    if found is None:
        return Limits()
    where = str(FILE) if text is None else f"the variable {VARIABLE}"
    try:
        limits = msgspec.json.decode(found, type=Limits)
    except msgspec.DecodeError as error:
        _refuse(where, error)
    if limits.version != 1:
        _refuse(where, "it was written by a newer version; upgrade this package")
    return limits


def _file() -> bytes | None:
    try:
        with FILE.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != 0 or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                _refuse(str(FILE), "it must belong to root, and nobody else may write it")
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        _refuse(str(FILE), error)


def _refuse(where: str, why: object) -> NoReturn:
    raise TraitError(
        f"gpu-ckpt: the administrator's limits in {where} cannot be understood: {why}."
    )


def denial() -> CkptError | None:
    """Why this user's kernels are neither saved nor restored, ``cannot_capture``."""
    denied = current().denied
    hint = "Ask the administrator of this JupyterHub."
    return None if denied is None else CkptError("cannot_capture", denied, hint=hint)


class Limited(LoggingConfigurable):
    """A configurable whose values stay within the administrator's limits."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._hold(kwargs, kwargs)

    def _load_config(
        self,
        cfg: Config,
        section_names: list[str] | None = None,
        traits: dict[str, TraitType[Any, Any]] | None = None,
    ) -> None:
        """Load values, then hold them to the limits; traitlets calls it at every change."""
        super()._load_config(cfg, section_names=section_names, traits=traits)
        # Only what changes may be in `cfg`.
        chosen = {*self._find_my_config(cfg), *self._find_my_config(self.config)}
        self._hold(chosen, self.trait_names(config=True))

    def _hold(self, chosen: Collection[str], names: Collection[str]) -> None:
        """Hold the traits `names` to the limits; `chosen`: those that somebody has configured."""
        rules = current().rules
        for section in self.section_names():
            for name, rule in rules.get(section, {}).items():
                if name not in names:
                    continue
                have, default = getattr(self, name), self.trait_defaults(name)
                value = allowed(name, rule, have if name in chosen else msgspec.UNSET, default)
                if value != have:
                    setattr(self, name, value)
                    if name in chosen:
                        self.log.warning("%s", in_words(section, name, rule, have, value))


def allowed(name: str, rule: Rule, have: Any, default: Any) -> Any:
    """What counts of a trait.

    Parameters
    ----------
    name, rule
        Its name, and what it may be.
    have
        What is configured; :data:`msgspec.UNSET` for nothing.
    default
        The package's own default.
    """
    if rule.fixed or have is msgspec.UNSET:
        have = default if rule.value is msgspec.UNSET else rule.value
    if rule.fixed:
        return have
    endless = name in ENDLESS and have == ENDLESS[name]
    if rule.most is not None and (endless or have > rule.most):
        return rule.most if have is None else type(have)(rule.most)
    if rule.least is not None and not endless and have < rule.least:
        return type(have)(rule.least)
    return have


def in_words(section: str, name: str, rule: Rule, have: object, value: object) -> str:
    """Why a configured value does not count."""
    if rule.fixed:
        why = "The administrator has fixed it"
    elif rule.most is not None and value == rule.most:
        why = "The administrator allows no more than that"
    else:
        why = "The administrator allows no less than that"
    return f"gpu-ckpt: {section}.{name} is {value!r} and not {have!r}, as configured. {why}."


def plain(rules: Mapping[str, Mapping[str, Rule]]) -> dict[str, dict[str, Rule]]:
    """Rules without those that say nothing."""
    kept = {
        section: {name: rule for name, rule in named.items() if rule != Rule()}
        for section, named in rules.items()
    }
    return {section: named for section, named in kept.items() if named}
