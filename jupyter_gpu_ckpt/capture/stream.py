"""Hands CRIU its images through a socket, so that pages need not be written to a disk first.

The protocol is that of ``criu restore --stream``: CRIU connects to a Unix socket in the image
directory and sends the name of each file that it wants. The answer is whether there is one; CRIU
then sends the write end of a pipe, and reads the file from the other end. Messages are protobufs
behind their length, four bytes. All processes of a restore share the one connection, and
read their pipes at the same time.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import re
import select
import socket
import stat
import struct
import termios
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Final

from ..errors import CkptError
from ..progress import Meter, Progress

logger = logging.getLogger(__name__)

#: The name is CRIU's.
SOCKET: Final = "streamer-serve.sock"

#: A file's content as pieces in order; each stays as it is until the next but one is taken.
Pieces = AbstractContextManager[Iterator[memoryview]]

_STREAMED: Final = re.compile(rb"(?:pages|ghost-file)-[0-9]+\.img")
#: Bytes that a pipe is made to hold, where the system lets it; files that fit into one as CRIU
#: makes it need no thread.
_PIPE: Final = 1 << 20
_SMALL: Final = 1 << 16
_F_SETPIPE_SZ: Final = 1031
_SPLICE_F_NONBLOCK: Final = 2
_LONGEST_REQUEST: Final = 129
_LENGTH: Final = struct.Struct("<I")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.vmsplice.restype = ctypes.c_ssize_t


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def is_streamed(path: bytes) -> bool:
    """Whether a file of an image directory holds contents that only CRIU looks at.

    Parameters
    ----------
    path
        Relative to the image directory.
    """
    return _STREAMED.fullmatch(path) is not None


def _unknown_request() -> CkptError:
    return CkptError(
        "restore_failed",
        "CRIU asked for the state in a way that this version does not know.",
        hint="Update jupyter-gpu-ckpt, or use the CRIU that it was tested with.",
    )


class ImageServer:
    """Serves one restore, from when it is made until :meth:`close`.

    Parameters
    ----------
    images_dir
        The image directory: mode 0700, the caller's own. Files in it are served as they are.
    sizes
        Name and size, bytes, of the files that come from `open_file` instead.
    open_file
        Called in a thread with the name of one of them, and an event that is set when the
        content is not wanted any more.
    progress
        Called from a thread with (bytes done, bytes in all), at most every 0.1 s.

    Raises
    ------
    CkptError
        ``store_unavailable`` where the folder can hold no socket.
    """

    def __init__(
        self,
        images_dir: Path,
        sizes: Mapping[bytes, int],
        open_file: Callable[[bytes, threading.Event], Pieces],
        *,
        progress: Progress | None = None,
    ) -> None:
        self._dir = images_dir
        self._sizes = sizes
        self._open_file = open_file
        self._meter = Meter(sum(sizes.values()), progress)
        self._lock = threading.Lock()
        self._failure: CkptError | None = None
        self._on_failure: Callable[[], None] | None = None
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        listener = _listen(images_dir)
        # Readable once all is over: every wait includes it.
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._start(self._serve, listener)

    def close(self) -> None:
        """End it, also in the middle of a file. Once; may take as long as one read of the store."""
        self._over.set()
        os.eventfd_write(self._end, 1)
        while self._threads:
            self._threads.pop().join()
        os.close(self._end)
        with suppress(FileNotFoundError):
            (self._dir / SOCKET).unlink()

    def when_failed(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, in a thread, when a file cannot be served whole.

        CRIU would find out by itself, but not in every case at once. When it has happened
        already `callback` is called now.
        """
        with self._lock:
            self._on_failure = callback
            failed = self._failure is not None
        if failed:
            callback()

    def check(self) -> None:
        """Raise what kept a file from being served whole, if anything did."""
        with self._lock:
            if self._failure is not None:
                raise self._failure

    # -- the connection ------------------------------------------------------------------

    def _start(self, target: Callable[..., None], *args: object) -> None:
        def run() -> None:
            try:
                target(*args)
            except CkptError as error:
                self._fail(error)
            except Exception as error:
                logger.exception("images could not be served")
                self._fail(CkptError("internal", "The state could not be handed on.",
                                     hint="Restore it again; the server's log says more.",
                                     details=type(error).__name__))  # fmt: skip

        thread = threading.Thread(target=run, name="gpu-ckpt-images", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _fail(self, error: CkptError) -> None:
        with self._lock:
            if self._over.is_set() or self._failure is not None:
                return
            self._failure = error
            callback = self._on_failure
        if callback is not None:
            callback()

    def _serve(self, listener: socket.socket) -> None:
        with listener:
            if not self._wait(listener.fileno(), select.POLLIN):
                return
            connection, _ = listener.accept()
        with connection:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if struct.unpack("3i", credentials)[1] != os.geteuid():
                raise CkptError(
                    "restore_failed",
                    "Another user's program asked for the state, and did not get it.",
                    hint="Set the folder (spool_dir) to one that only you can enter, then restore.",
                )
            # A CRIU that goes away, in the middle of a request too, says by itself why.
            with suppress(ConnectionError):
                while (name := self._request(connection)) is not None:
                    self._answer(connection, name)

    def _receive(self, connection: socket.socket, count: int) -> bytes | None:
        """So many bytes, or ``None`` when the other side has gone or all is over."""
        found = b""
        while len(found) < count:
            if not self._wait(connection.fileno(), select.POLLIN):
                return None
            more = connection.recv(count - len(found))
            if not more:
                return None
            found += more
        return found

    def _request(self, connection: socket.socket) -> bytes | None:
        head = self._receive(connection, _LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        message = self._receive(connection, length) if 3 <= length <= _LONGEST_REQUEST else b""
        if message is None:
            return None
        # One field, number 1, a string; shorter than 128 bytes it has one byte of length.
        if message[:2] != bytes([0x0A, max(0, len(message) - 2)]):
            raise _unknown_request()
        return message[2:]

    def _answer(self, connection: socket.socket, name: bytes) -> None:
        size = self._sizes.get(name)
        file = -1
        if size is None:
            file = self._open_local(name)
            if file < 0:
                connection.sendall(_LENGTH.pack(2) + b"\x08\x00")
                return
        with ExitStack() as stack:
            if file >= 0:
                stack.callback(os.close, file)
            connection.sendall(_LENGTH.pack(2) + b"\x08\x01")
            if not self._wait(connection.fileno(), select.POLLIN):
                return
            data, fds, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
            for fd in fds:
                stack.callback(os.close, fd)
            if not data:
                return
            if len(fds) != 1 or not stat.S_ISFIFO(os.fstat(fds[0]).st_mode):
                raise _unknown_request()
            os.set_blocking(fds[0], False)
            if file >= 0 and os.fstat(file).st_size <= _SMALL:
                self._copy(file, fds[0])
            else:
                rest = stack.pop_all()
                self._start(self._pump, rest, name, file, fds[0])

    def _open_local(self, name: bytes) -> int:
        """A file of the image directory, or -1 when there is none."""
        if name.startswith(b".") or b"/" in name or b"\0" in name:
            return -1
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            file = os.open(os.path.join(os.fsencode(self._dir), name), flags)
        except FileNotFoundError:
            return -1
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                return -1
            raise
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            return -1
        return file

    # -- the pipes -----------------------------------------------------------------------

    def _pump(self, held: ExitStack, name: bytes, file: int, pipe: int) -> None:
        with held:
            with suppress(OSError):
                fcntl.fcntl(pipe, _F_SETPIPE_SZ, _PIPE)
            if file >= 0:
                self._copy(file, pipe)
                return
            with self._open_file(name, self._over) as pieces:
                before = False  # whether a piece is on loan to the pipe beside this one
                for piece in pieces:
                    lent = self._push(pipe, piece)
                    if lent is None:
                        return
                    if before and not self._drained(pipe, len(piece)):
                        return
                    before = lent
                    self._meter.add(len(piece))
                self._drained(pipe, 0)

    def _copy(self, file: int, pipe: int) -> None:
        while data := os.read(file, _PIPE):
            if self._push(pipe, memoryview(data)) is None:
                return

    def _push(self, pipe: int, piece: memoryview) -> bool | None:
        """Put a piece into a pipe; whether the pipe refers to its memory from then on.

        ``None`` when nobody reads the pipe any more, or all is over.
        """
        lent = False
        while piece:
            try:
                if piece.readonly or len(piece) < _SMALL:
                    done = os.write(pipe, piece)
                else:
                    done = _lend(pipe, piece)
                    lent = True
            except InterruptedError:
                continue
            except BlockingIOError:
                if not self._wait(pipe, select.POLLOUT):
                    return None
                continue
            except BrokenPipeError:
                return None
            piece = piece[done:]
        return lent

    def _drained(self, pipe: int, but: int) -> bool:
        """Wait until all but so many bytes were read; false when they never will be."""
        unread = bytearray(4)
        while True:
            fcntl.ioctl(pipe, termios.FIONREAD, unread)
            if int.from_bytes(unread, "little") <= but:
                return True
            poll = select.poll()
            poll.register(pipe, 0)  # an error: nobody reads it
            poll.register(self._end, select.POLLIN)
            if poll.poll(1):
                return False

    def _wait(self, fd: int, event: int) -> bool:
        """Wait until a file is ready; false when all is over first."""
        poll = select.poll()
        poll.register(fd, event)
        poll.register(self._end, select.POLLIN)
        return self._end not in {ready for ready, _ in poll.poll()}


def _listen(folder: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The path may be longer than a socket's address can be.
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            listener.bind(f"/proc/self/fd/{fd}/{SOCKET}")
            os.chmod(f"/proc/self/fd/{fd}/{SOCKET}", 0o600)
        finally:
            os.close(fd)
        listener.listen(1)
    except OSError as error:
        listener.close()
        raise CkptError(
            "store_unavailable",
            "The working folder for saved states cannot hold a socket, which a restore needs.",
            hint="Set the folder (spool_dir) to one on a local disk.",
            details=f"{folder}: {error.strerror}",
        ) from error
    return listener


def _lend(pipe: int, piece: memoryview) -> int:
    """Have a pipe refer to memory instead of holding a copy; how many bytes fitted in."""
    memory = ctypes.addressof(ctypes.c_char.from_buffer(piece))
    vector = _IoVec(memory, len(piece))
    done: int = _libc.vmsplice(
        pipe, ctypes.byref(vector), ctypes.c_ulong(1), ctypes.c_uint(_SPLICE_F_NONBLOCK)
    )
    if done >= 0:
        return done
    error = ctypes.get_errno()
    if error in (errno.ENOSYS, errno.EPERM):
        return os.write(pipe, piece)
    raise OSError(error, os.strerror(error))
