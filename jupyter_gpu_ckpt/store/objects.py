"""One owner's objects on a system that fsspec reaches: S3, Google Cloud, Azure, memory, folders.

All calls are synchronous, thread-safe and survive a fork. Each has a deadline, is repeated
with exponential backoff while it can still be met, and says in one error what is wrong.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import os
import random
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..errors import CkptError
from .backend import Backend, cancelled, is_denied, is_missing, modified_of, version_of
from .damage import Damaged

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
#: Bytes of one ranged read, and the size from which an upload goes in parts.
_PART = 8 << 20
_MULTIPART = 64 << 20
#: Bytes a second below which a connection counts as stuck.
_SLOWEST = 128 << 10


class Missing(Exception):
    """There is no such object."""


class Found(NamedTuple):
    """One object of a listing; `version` changes with its content, `modified` is Unix seconds."""

    size: int
    version: str
    modified: float


class Objects:
    """Objects below one URL, named by relative paths with ``/``.

    Parameters
    ----------
    url
        An fsspec URL; the part after the bucket becomes the objects' common prefix.
    options
        What fsspec takes as storage options: endpoint, credentials… Its own configuration files and
        environment variables count too.
    timeout
        Seconds that a call without much data may take in one try; data gets more, by its size.
    attempts
        Tries a call gets at most, within `timeout` times two.

    Raises
    ------
    CkptError
        Every method raises ``store_unavailable`` when the package for this kind of URL is not
        installed or does not take the options, or the system does not answer in time; and
        ``cancelled`` after :meth:`close`.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        timeout: float = 20.0,
        attempts: int = 5,
    ) -> None:
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._attempts = attempts
        self._backend = Backend(self.url, options or {}, timeout)
        self._s3 = self._backend.protocol in ("s3", "s3a")

    @property
    def one_clock(self) -> bool:
        """Whether the times of objects come from the system, and not from who writes them."""
        return self._backend.whole

    def within(self, timeout: float, attempts: int) -> Objects:
        """The same objects over the same connections, with other limits: for who cannot wait."""
        other = copy.copy(self)
        other._timeout, other._attempts = timeout, attempts
        return other

    def close(self) -> None:
        """End what runs and refuse what comes: whoever waits gets ``cancelled`` at once."""
        self._backend.close()

    # -- objects ---------------------------------------------------------------------------

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Read an object, or `length` bytes of it from `start` on.

        Raises
        ------
        Missing
            No such object.
        Damaged
            It is shorter than asked for, also when read again.
        """
        path = self._path(name)
        if length == 0:
            return b""

        def read() -> bytes:
            limits: dict[str, int] = {}
            if length is not None:
                limits = {"start": start, "end": start + length}
            elif self._s3:
                limits = {"start": 0}  # else s3fs asks for the size first
            data = self._call("cat_file", path, size=length or 0, **limits)
            if length is not None and len(data) != length:
                raise _WrongLength(f"{name}: {len(data)} bytes instead of {length}")
            return bytes(data)

        return self._retried(read, f"read {name}", length or 0)

    def put(
        self, name: str, data: bytes | memoryview, *, create: bool = False, check: bool = True
    ) -> bool:
        """Write an object, whole or not at all.

        Parameters
        ----------
        name, data
            The object.
        create
            Only if there is none; False is returned if there is. Systems that cannot promise it
            (some S3-compatible ones) may still replace an object made in the same instant.
        check
            Look afterwards how much arrived: a request more.

        Raises
        ------
        CkptError
            ``store_unavailable``; also when what arrived has another length, try after try.
        """
        path, content = self._path(name), bytes(data)
        if create and self.size(name) is not None:
            return False

        def write() -> bool:
            mode = {"mode": "create"} if create else {}
            try:
                self._write(path, content, mode)
            except OSError as error:
                if create and _is_taken(error):
                    return False
                raise
            if check and (arrived := self._size(path)) != len(content):
                raise _WrongLength(f"{name}: {arrived} of {len(content)} bytes arrived")
            return True

        return self._retried(write, f"write {name}", len(content))

    def put_file(self, name: str, file: Path) -> int:
        """Write a file's content as an object, large ones in parallel parts; returns its bytes."""
        size = file.stat().st_size
        if size < _MULTIPART or not self._backend.whole:
            self.put(name, file.read_bytes())
            return size
        path = self._path(name)

        def write() -> int:
            parts = self._backend.parts(_PART)
            self._call("put_file", os.fspath(file), path, size=size, **parts)
            if (arrived := self._size(path)) != size:
                raise _WrongLength(f"{name}: {arrived} of {size} bytes arrived")
            return size

        return self._retried(write, f"write {name}", size)

    def fetch(self, name: str, file: Path, *, parallel: int = 4) -> int:
        """Read an object into a new file, mode 0600, in parallel ranges; returns its bytes.

        Nothing stays behind on failure. The content is on disk when it returns.

        Raises
        ------
        Missing
            No such object.
        Damaged, OSError
            Cut short; the file cannot be written.
        """
        size = self.size(name)
        if size is None:
            raise Missing(name)
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            offsets = range(0, size, _PART)
            with concurrent.futures.ThreadPoolExecutor(max(1, min(parallel, len(offsets)))) as pool:

                def part(offset: int) -> None:
                    data = self.get(name, offset, min(_PART, size - offset))
                    done = 0
                    while done < len(data):
                        done += os.pwrite(fd, memoryview(data)[done:], offset + done)

                for ended in [pool.submit(part, offset) for offset in offsets]:
                    ended.result()
            os.fdatasync(fd)
        except BaseException:
            file.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        return size

    def list(self, prefix: str) -> dict[str, Found]:
        """All objects whose names begin with ``prefix/``, by name, in a request a thousand."""
        base = self._path(prefix)
        strip = len(self._backend.root) + 1

        def read() -> dict[str, Found]:
            try:
                found = self._call("find", base, detail=True)
            except FileNotFoundError:
                return {}
            return {
                name[strip:]: Found(int(info.get("size") or 0), version_of(info), modified_of(info))
                for name, info in found.items()
                if info.get("type") == "file" and name.startswith(base)
            }

        return self._retried(read, f"list {prefix}")

    def size(self, name: str) -> int | None:
        """Bytes of an object, ``None`` if there is none."""
        path = self._path(name)
        return self._retried(lambda: self._size(path), f"look at {name}")

    def delete(self, name: str) -> None:
        """Remove an object; it may be gone already."""
        path = self._path(name)

        def remove() -> None:
            try:
                self._call("rm_file", path)
            except FileNotFoundError:
                return

        self._retried(remove, f"remove {name}")

    # -- how -------------------------------------------------------------------------------

    def _call(self, method: str, *args: Any, size: int = 0, **kwargs: Any) -> Any:
        return self._backend.call(method, *args, limit=self._limit(size), **kwargs)

    def _limit(self, size: int) -> float:
        """Seconds that one try of a call which moves `size` bytes may take."""
        return self._timeout + size / _SLOWEST

    def _path(self, name: str) -> str:
        return f"{self._backend.root}/{name}"

    def _size(self, path: str) -> int | None:
        try:
            info = self._call("info", path)
            return int(info["size"]) if info["type"] == "file" else None
        except FileNotFoundError:
            return None

    def _write(self, path: str, content: bytes, mode: dict[str, str]) -> None:
        if self._backend.whole:
            self._call("pipe_file", path, content, size=len(content), **mode)
            return
        fs = self._backend.filesystem()
        aside = f"{path}.{secrets.token_hex(4)}.tmp"
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._call("pipe_file", aside, content, size=len(content))
        if mode and fs.exists(path):
            fs.rm_file(aside)
            raise FileExistsError(path)
        fs.mv(aside, path)

    def _retried(self, work: Callable[[], T], doing: str, size: int = 0) -> T:
        end = time.monotonic() + 2 * self._limit(size)
        pause = _FIRST_PAUSE
        for attempt in range(1, self._attempts + 1):
            try:
                return work()
            except CkptError:
                raise
            except Exception as error:
                if is_missing(error):
                    if doing.startswith("write"):
                        hint = f"Does the {self._backend.bucket} exist?"
                        raise self._unavailable(doing, error, hint) from error
                    raise Missing(doing) from error
                if is_denied(error):
                    what = "the credentials and what they may do in the " + self._backend.bucket
                    hint = f"Check {what}. They are in GpuCkpt.store_options or the environment."
                    raise self._unavailable(doing, error, hint) from error
                wait = pause * random.uniform(0.5, 1.5)
                if attempt == self._attempts or time.monotonic() + wait > end:
                    if isinstance(error, _WrongLength) and not doing.startswith("write"):
                        raise Damaged(str(error)) from error
                    hint = "Is the network up, and the address right? See GpuCkpt.store_url."
                    raise self._unavailable(doing, error, hint) from error
                if self._backend.closed.wait(wait):
                    raise cancelled() from error
                pause = min(2 * pause, _LONGEST_PAUSE)
        raise AssertionError("the last try returns or raises")

    def _unavailable(self, doing: str, error: Exception, hint: str) -> CkptError:
        said = self._backend.without_secrets(error)
        what = said.partition("\n")[0] or type(error).__name__
        if isinstance(error, TimeoutError | asyncio.TimeoutError | concurrent.futures.TimeoutError):
            what = f"no answer within {self._timeout:g} s"
        return CkptError(
            "store_unavailable",
            f"The state store {self.url} does not work: {what}",
            hint=hint,
            details=f"{doing}: {type(error).__name__}: {said}",
        )


class _WrongLength(Exception):
    """More or fewer bytes than there should be."""


def _is_taken(error: OSError) -> bool:
    """Whether an object was not made because there is one of this name."""
    answer = getattr(error.__cause__, "response", None) or {}
    code = str(answer.get("Error", {}).get("Code", ""))
    return isinstance(error, FileExistsError) or code in ("PreconditionFailed", "412")
