"""Callbacks of a program around the saves and restores of its kernel; used in the kernel.

::

    from jupyter_gpu_ckpt.hooks import after_restore, before_save

    @before_save
    def flush():
        results.flush()

    @after_restore
    def reconnect():
        global connection
        connection = connect()
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, Final, TypeVar

Callback = TypeVar("Callback", bound=Callable[[], Any])

_before_save: Final[list[Callable[[], Any]]] = []
_after_restore: Final[list[Callable[[], Any]]] = []
#: Called when the first callback is there, so that the server gets to know.
_listeners: Final[list[Callable[[], None]]] = []


def before_save(callback: Callback) -> Callback:
    """Have a function called, without arguments, before the kernel is saved; a decorator.

    It is called where the kernel is idle. A save in the middle of a cell does not wait for the
    cell's end, and goes without. The same function is called once however often it is given,
    so a cell may be run again.
    """
    _add(_before_save, callback)
    for listener in _listeners:
        listener()
    return callback


def after_restore(callback: Callback) -> Callback:
    """Have a function called, without arguments, when the kernel was restored; a decorator.

    It is called before the next cell is run; for a kernel that was restored in the middle of a
    cell, after the end of that one.
    """
    _add(_after_restore, callback)
    return callback


def _add(callbacks: list[Callable[[], Any]], callback: Callable[[], Any]) -> None:
    """Add a callback in the place of its earlier definition."""
    name = (getattr(callback, "__module__", None), getattr(callback, "__qualname__", None))
    if name[1] is not None and "<" not in name[1]:  # not a lambda or a local function
        callbacks[:] = [
            other
            for other in callbacks
            if (getattr(other, "__module__", None), getattr(other, "__qualname__", None)) != name
        ]
    if callback not in callbacks:
        callbacks.append(callback)


def has_before_save() -> bool:
    """Whether anything is to be called before a save."""
    return bool(_before_save)


def on_before_save_added(listener: Callable[[], None]) -> None:
    """Call ``listener`` when a :func:`before_save` callback was added."""
    _listeners.append(listener)


def run_before_save() -> list[str]:
    """Call the callbacks; returns the tracebacks of those that failed."""
    return _run(_before_save)


def run_after_restore() -> list[str]:
    """Call the callbacks; returns the tracebacks of those that failed."""
    return _run(_after_restore)


def _run(callbacks: list[Callable[[], Any]]) -> list[str]:
    failed = []
    for callback in list(callbacks):
        try:
            callback()
        except Exception:
            # One that fails must not keep the others, or the save, from their turn.
            failed.append(traceback.format_exc())
    return failed
