"""Keys that states are encrypted with: where they come from, and which are there.

A key is 32 random bytes, written as 64 hex digits or base64 in one line. It is never logged,
and no error shows any of it.
"""

from __future__ import annotations

import base64
import os
import secrets
import stat
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from blake3 import blake3

from ..errors import CkptError

KEY_SIZE: Final = 32
_ID_CONTEXT: Final = "jupyter-gpu-ckpt 2026-12-02 key id v1"
_ID_BYTES: Final = 8
_LONGEST_TEXT: Final = 64 << 10
# A source that failed is not asked again for every state of a list.
_RETRY_SECONDS: Final = 5.0


@dataclass(frozen=True)
class Key:
    """A key and its id: 16 hex digits that tell which key it is and nothing else of it."""

    secret: bytes = field(repr=False)
    id: str = field(init=False)

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_SIZE:
            raise ValueError("a key has 32 bytes")
        digest = blake3(self.secret, derive_key_context=_ID_CONTEXT).hexdigest(length=_ID_BYTES)
        object.__setattr__(self, "id", digest)


@dataclass(frozen=True)
class KeyFile:
    """A key in a file that nobody else can read."""

    path: Path

    def __str__(self) -> str:
        return f"the file {self.path}"

    def text(self, timeout: float) -> str:
        """Read the file; raises ``CkptError("key_missing")``."""
        try:
            # Not O_NOFOLLOW: secrets mounted into a container are symbolic links.
            fd = os.open(self.path.expanduser(), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                _check_private(os.fstat(fd), self)
                return os.read(fd, _LONGEST_TEXT).decode("ascii", "replace")
            finally:
                os.close(fd)
        except OSError as error:
            raise _missing(self, error.strerror or str(error)) from error


@dataclass(frozen=True)
class KeyVariable:
    """A key in an environment variable of the server; kernels do not inherit it."""

    name: str

    def __str__(self) -> str:
        return f"the environment variable {self.name}"

    def text(self, timeout: float) -> str:
        """Get the variable; raises ``CkptError("key_missing")``."""
        value = os.environ.get(self.name)
        if value is None:
            raise _missing(self, "it is not set")
        return value


@dataclass(frozen=True)
class KeyCommand:
    """A key that a program prints, such as a client of a key management service."""

    argv: tuple[str, ...]

    def __str__(self) -> str:
        # Its arguments may be secret.
        return f"the command {self.argv[0]}"

    def text(self, timeout: float) -> str:
        """Run the command; raises ``CkptError("key_missing")``."""
        try:
            result = subprocess.run(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=timeout,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            # Not "from": the exception holds what the command has printed.
            raise _missing(self, f"no answer within {timeout:g} s") from None
        except OSError as error:
            raise _missing(self, error.strerror or str(error)) from error
        if result.returncode:
            raise _missing(self, f"it ended with status {result.returncode}")
        return result.stdout[:_LONGEST_TEXT].decode("ascii", "replace")


class KeySpec(Protocol):
    """Where a key comes from; can be hashed, and its text says so without any of the key."""

    def text(self, timeout: float) -> str:
        """Get the key's text within `timeout` seconds; raises ``CkptError("key_missing")``."""


class KeyRing:
    """The keys of one owner: one for new states, and older ones to read by.

    Keys are got when they are first needed and then kept. Thread-safe.

    Parameters
    ----------
    current
        Where the key of new states comes from; ``None`` to save without encryption.
    old
        Where further keys come from.
    command_timeout
        Most seconds that a command may take.
    read_unsealed
        Whether states that were saved before there was a key can be read.
    """

    def __init__(
        self,
        current: KeySpec | None,
        old: Sequence[KeySpec] = (),
        *,
        command_timeout: float = 10.0,
        read_unsealed: bool = True,
    ) -> None:
        self.read_unsealed = read_unsealed
        self._current = current
        self._all = [*([current] if current else []), *old]
        self._timeout = command_timeout
        self._got: dict[KeySpec, Key] = {}
        self._failed: dict[KeySpec, tuple[float, CkptError]] = {}
        self._lock = threading.Lock()

    @property
    def encrypts(self) -> bool:
        """Whether new states are to be encrypted."""
        return self._current is not None

    def current(self) -> Key | None:
        """Get the key for new states.

        Raises
        ------
        CkptError
            ``key_missing``: it cannot be had. ``wrong_key``: what is there is no key.
        """
        return self._get(self._current) if self._current else None

    def find(self, key_id: str) -> Key:
        """Get the key with this id.

        Raises
        ------
        CkptError
            ``wrong_key``: it is not among those that are set; ``key_missing``: it might be
            the one that cannot be had.
        """
        failure = None
        for spec in self._all:
            try:
                key = self._get(spec)
            except CkptError as error:
                failure = failure or error
                continue
            if key.id == key_id:
                return key
        if failure is not None:
            raise failure
        raise CkptError(
            "wrong_key",
            f"This is encrypted with a key that is not set here (key id {key_id}).",
            hint="Add the key it was saved with to c.GpuCkpt.old_key_files, "
            "old_key_envs or old_key_commands.",
        )

    def held(self) -> list[Key]:
        """All keys that can be had."""
        keys = []
        for spec in self._all:
            try:
                keys.append(self._get(spec))
            except CkptError:
                continue
        return keys

    def _get(self, spec: KeySpec) -> Key:
        with self._lock:
            if spec in self._got:
                return self._got[spec]
            if spec in self._failed:
                when, failure = self._failed[spec]
                if time.monotonic() - when < _RETRY_SECONDS:
                    raise failure.with_traceback(None)
            try:
                key = self._got[spec] = parse_key(spec.text(self._timeout), str(spec))
            except CkptError as error:
                self._failed[spec] = time.monotonic(), error
                raise
            return key


def parse_key(text: str, where: str) -> Key:
    """Read a key: its line, 64 hex digits or base64 of 32 bytes; lines with ``#`` are remarks.

    Raises
    ------
    CkptError
        ``wrong_key``; `where` is named in it, nothing of `text`.
    """
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if len(lines) == 1:
        secret = _decoded(lines[0])
        if secret is not None and len(secret) == KEY_SIZE:
            return Key(secret)
    raise CkptError(
        "wrong_key",
        f"What {where} holds is not a key.",
        hint="A key is one line: 32 bytes as 64 hex digits or base64. "
        "`jupyter gpu-ckpt new-key FILE` makes one.",
    )


def _decoded(line: str) -> bytes | None:
    try:
        if len(line) == 2 * KEY_SIZE:
            return bytes.fromhex(line)
        padded = line.rstrip("=") + "=" * (-len(line.rstrip("=")) % 4)
        return base64.b64decode(padded.replace("-", "+").replace("_", "/"), validate=True)
    except ValueError:
        return None


def new_key_file(path: Path) -> str:
    """Make a key in a new file that only its owner can read; returns the key's id.

    Raises
    ------
    CkptError
        ``bad_request``: there is a file already; ``store_unavailable``: it cannot be written.
    """
    key = Key(secrets.token_bytes(KEY_SIZE))
    text = (
        f"# Key of jupyter-gpu-ckpt, id {key.id}. Keep a copy in a safe place: states that are\n"
        "# encrypted with it cannot be read without it, and can be by whoever has it.\n"
        f"{key.secret.hex()}\n"
    )
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise CkptError(
            "bad_request",
            f"{path} exists already; a key is never overwritten.",
            hint="Choose another name for the new key.",
        ) from None
    except OSError as error:
        raise CkptError(
            "store_unavailable",
            f"The key cannot be written to {path}: {error.strerror}.",
            hint="Name a file in a folder that you may write to.",
        ) from error
    with open(fd, "w", encoding="ascii") as file:
        os.fchmod(fd, 0o600)
        file.write(text)
        file.flush()
        os.fsync(fd)
    return key.id


def _check_private(found: os.stat_result, spec: KeyFile) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise _missing(spec, "it is not a file")
    if found.st_uid not in (os.geteuid(), 0):
        raise _missing(spec, "it belongs to another user")
    # What a container gets as a secret is root's, and readable by a group of its own.
    readers = 0o027 if found.st_uid != os.geteuid() else 0o077
    if found.st_mode & readers:
        raise CkptError(
            "key_missing",
            f"Others can read or change {spec}, so it is not used as a key.",
            hint=f"Run: chmod 600 {spec.path}",
        )


def _missing(spec: KeySpec, why: str) -> CkptError:
    return CkptError(
        "key_missing",
        f"The key for saved states cannot be had from {spec}: {why}.",
        hint="Nothing is touched meanwhile. See c.GpuCkpt.key_file, key_env and key_command.",
    )
