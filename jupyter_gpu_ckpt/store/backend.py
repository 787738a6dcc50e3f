"""The connection to a system that fsspec reaches, with a deadline for every call."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import importlib
import os
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote

from ..errors import CkptError
from ..moments import read_moment

#: Packages that bring a backend, and this project's extra that installs it.
_EXTRAS: Final = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
    "abfs": ("adlfs", "azure"),
    "abfss": ("adlfs", "azure"),
    "az": ("adlfs", "azure"),
    "adl": ("adlfs", "azure"),
}
#: Calls that never wait for a network.
_LOCAL: Final = frozenset({"memory", "file", "local"})

#: Errors of the clients' libraries, by name: none of them need be installed.
_NO_CREDENTIALS: Final = frozenset(
    {
        "NoCredentialsError",
        "PartialCredentialsError",
        "DefaultCredentialsError",
        "RefreshError",
        "ClientAuthenticationError",
        "CredentialUnavailableError",
    }
)


class Backend:
    """Calls of an fsspec filesystem from any thread, also after a fork.

    Parameters
    ----------
    url
        Where objects are; what follows the bucket is their common prefix.
    options
        Storage options of fsspec.
    timeout
        Seconds without an answer after which a connection is given up.

    Attributes
    ----------
    whole
        An object has its new content at once or not at all.

    Raises
    ------
    CkptError
        The first use raises ``store_unavailable`` when the package for this kind of URL is missing,
        or refuses the options.
    """

    def __init__(self, url: str, options: Mapping[str, Any], timeout: float) -> None:
        self.url = url
        self.protocol = url.partition("://")[0].lower()
        self.whole = self.protocol in _EXTRAS or self.protocol == "memory"
        self.timeout = timeout
        self.closed = threading.Event()
        self._root = ""
        self._options = dict(options)
        self._lock = threading.Lock()
        self._fs: Any = None
        self._pid = 0
        self._inherited: list[Any] = []
        self._calls: set[concurrent.futures.Future[Any]] = set()

    @property
    def bucket(self) -> str:
        """What the system calls the place that must exist before an object can be written."""
        return "container" if _EXTRAS.get(self.protocol, ("",))[0] == "adlfs" else "bucket"

    def parts(self, size: int) -> dict[str, int]:
        """Arguments that have ``put_file`` write parts of `size` bytes, or several at a time."""
        package = _EXTRAS.get(self.protocol, ("",))[0]
        return {"s3fs": {"chunksize": size}, "adlfs": {"max_concurrency": 4}}.get(package, {})

    @property
    def root(self) -> str:
        """What full paths begin with, without a slash at the end."""
        self.filesystem()
        return self._root

    def close(self) -> None:
        """End what runs and refuse what comes: whoever waits gets ``cancelled`` at once."""
        self.closed.set()
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    def call(self, name: str, *args: Any, limit: float, **kwargs: Any) -> Any:
        """Call a method of the filesystem, which may take `limit` seconds.

        Raises
        ------
        CkptError
            ``cancelled``: it was closed.
        TimeoutError, concurrent.futures.TimeoutError
            No answer in time; the call has been ended.
        Exception
            What the backend raises.
        """
        if self.closed.is_set():
            raise cancelled()
        fs = self.filesystem()
        call: concurrent.futures.Future[Any]
        if fs.async_impl:
            work = asyncio.wait_for(getattr(fs, f"_{name}")(*args, **kwargs), limit)
            call = asyncio.run_coroutine_threadsafe(work, fs.loop)
        elif self.protocol in _LOCAL:
            return getattr(fs, name)(*args, **kwargs)
        else:
            call = _in_thread(lambda: getattr(fs, name)(*args, **kwargs))
        with self._lock:
            self._calls.add(call)
        try:
            return call.result(limit + 5.0)
        except concurrent.futures.CancelledError as error:
            raise cancelled() from error
        finally:
            call.cancel()
            with self._lock:
                self._calls.discard(call)

    def filesystem(self) -> Any:
        """The fsspec filesystem: one a process, because its thread does not survive a fork."""
        with self._lock:
            if self._fs is None or self._pid != os.getpid():
                if self._fs is not None:
                    # Its end would close connections that the parent still uses.
                    self._inherited.append(self._fs)
                self._calls = set()
                self._fs, self._root = self._connect()
                self._pid = os.getpid()
            return self._fs

    def _connect(self) -> tuple[Any, str]:
        package, extra = _EXTRAS.get(self.protocol, ("fsspec", ""))
        try:
            importlib.import_module(package)
            fs, root = self._opened()
        except ImportError as error:
            wanted = f"jupyter-gpu-ckpt[{extra}]" if extra else error.name or package
            raise CkptError(
                "store_unavailable",
                f"States cannot be kept on {self.protocol}:// here: the package "
                f"{error.name or package} is missing.",
                hint=f"Install it: pip install {wanted}",
            ) from error
        except Exception as error:
            raise CkptError(
                "store_unavailable",
                f"The state store {self.url} cannot be opened: {self.without_secrets(error)}",
                hint="Check GpuCkpt.store_url and GpuCkpt.store_options.",
            ) from error
        _try_once(fs)
        return fs, root.rstrip("/")

    def without_secrets(self, error: Exception) -> str:
        """What an error says, without the options: gcsfs sends a token that it takes for none."""
        said = str(error)
        for name, value in self._options.items():
            if name == "endpoint_url" and "@" not in str(value):
                continue  # whoever reads it needs to know where it went
            for text in (str(value), quote(str(value), safe="")):
                if isinstance(value, str) and len(text) > 3:
                    said = said.replace(text, "...")
        return said

    def _opened(self) -> tuple[Any, str]:
        options = {"skip_instance_cache": True, "use_listings_cache": False}
        options |= self._deadlines() | self._options
        if self.protocol in ("gs", "gcs"):
            # What gcsfs gives for this protocol asks first, over gRPC and for up to a minute, what
            # kind of bucket it is; the objects that a store has are the same in all.
            from gcsfs.core import GCSFileSystem

            return GCSFileSystem(**options), str(GCSFileSystem._strip_protocol(self.url))
        from fsspec.core import url_to_fs

        fs, root = url_to_fs(self.url, **options)
        return fs, str(root)

    def _deadlines(self) -> dict[str, Any]:
        """Options that have a connection given up when nothing comes, however much is under way."""
        connect = min(10.0, self.timeout)
        match _EXTRAS.get(self.protocol, ("",))[0]:
            case "s3fs":
                config = {
                    "connect_timeout": connect,
                    "read_timeout": self.timeout,
                    "retries": {"total_max_attempts": 1},
                }
                return {"config_kwargs": config}
            case "gcsfs":
                from aiohttp import ClientTimeout

                timeout = ClientTimeout(sock_connect=connect, sock_read=self.timeout)
                return {"requests_timeout": timeout}
            case "adlfs":
                return {"connection_timeout": connect, "read_timeout": self.timeout}
        return {}


def cancelled() -> CkptError:
    """The error of a transfer that was ended from here."""
    return CkptError("cancelled", "The transfer was cancelled.")


def _try_once(fs: Any) -> None:
    """Have a filesystem try nothing again: tries are counted by who calls, against a deadline."""
    if hasattr(fs, "retries"):  # s3fs
        fs.retries = 1
    inner = getattr(getattr(type(fs), "_request", None), "__wrapped__", None)
    if inner is not None:  # gcsfs
        fs._request = functools.partial(inner, fs)
    client = getattr(fs, "service_client", None)
    policy = getattr(getattr(client, "_config", None), "retry_policy", None)
    if policy is not None:  # adlfs
        policy.total_retries = 0


def is_denied(error: BaseException) -> bool:
    """Whether an error says that the credentials are missing, wrong, or not allowed to do it."""
    code = getattr(error, "status_code", None) or getattr(error, "code", None)
    return (
        isinstance(error, PermissionError)
        or code in (401, 403)
        or (isinstance(error, OSError) and str(error).startswith("Forbidden"))  # gcsfs
        or type(error).__name__ in _NO_CREDENTIALS
    )


def is_missing(error: BaseException) -> bool:
    """Whether an error says that there is no such object, bucket or container."""
    return isinstance(error, FileNotFoundError) or getattr(error, "status_code", None) == 404


def version_of(info: Mapping[str, Any]) -> str:
    """What changes when an object is written, from a listing's entry."""
    keys = ("generation", "ETag", "etag", "md5Hash", "created", "mtime")
    tag = next((info[key] for key in keys if info.get(key)), "")
    return f"{info.get('size')}-{tag}-{modified_of(info)}".replace('"', "")


def modified_of(info: Mapping[str, Any]) -> float:
    """When an object was written, Unix seconds by the system's clock; 0 if it does not say."""
    for key in ("LastModified", "last_modified", "updated", "mtime", "created"):
        value = info.get(key)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, str):
            return read_moment(value).timestamp()
    return 0.0


def _in_thread(work: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    """Run `work` in a thread that nothing waits for at the end of the process."""
    call: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            if not call.cancelled():
                call.set_exception(error)
        else:
            if not call.cancelled():
                call.set_result(result)

    threading.Thread(target=run, name="gpu-ckpt-remote", daemon=True).start()
    return call
