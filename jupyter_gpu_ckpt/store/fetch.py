"""Reads packs from the local tier, and those that are not there from the remote one."""

from __future__ import annotations

import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Final

from ..errors import CkptError
from .damage import Damaged
from .layout import translated
from .local_tier import LocalTier
from .objects import Missing
from .packs import LocalPacks
from .remote import RemoteOwner

#: Packs fetched at the same time, and ranges of each: a range is 8 MiB.
_PACKS: Final = 3
_RANGES: Final = 2


class SharedPacks(LocalPacks):
    """The packs of the local tier alone, of which a new state may share pages.

    Another node can delete what is only in the remote tier, as long as nothing of the new state
    has arrived there.
    """

    def size(self, pack: str) -> int | None:
        """See :class:`~.packs.PackSource`; asked once for each footer."""
        with suppress(OSError):
            os.utime(self.path(pack))  # of use, so not to be evicted soon
        return super().size(pack)


class TierPacks:
    """The packs of both tiers; see :class:`~.packs.PackSource`.

    A pack that was asked for with :meth:`want` is brought into the local tier whole. Of others,
    ranges are read as they are needed: an index and footers need no more.
    """

    def __init__(
        self,
        local: LocalPacks,
        tier: LocalTier,
        remote: RemoteOwner,
        at_close: Callable[[], None] | None = None,
    ) -> None:
        self._at_close = at_close
        self._local = local
        self._tier = tier
        self._remote = remote
        self._lock = threading.Condition()
        self._wanted: OrderedDict[str, None] = OrderedDict()
        self._coming: set[str] = set()
        self._failed: dict[str, BaseException] = {}
        self._threads: list[threading.Thread] = []
        self._used: set[str] = set()
        self._pins = ExitStack()
        self._closed = False
        self._fetched = False

    def read_into(self, pack: str, offset: int, buffer: memoryview) -> None:
        """See :class:`~.packs.PackSource`."""
        self._used_now(pack)
        if not self._local.path(pack).exists():
            with self._lock:
                whole = pack in self._wanted or pack in self._coming or pack in self._failed
            if not whole:
                try:
                    name = self._remote.pack_name(pack)
                    buffer[:] = self._remote.objects.get(name, offset, len(buffer))
                except Missing as error:
                    raise Damaged(f"pack {pack} is missing") from error
                return
            self._bring(pack)
        self._local.read_into(pack, offset, buffer)

    def want(self, packs: Sequence[str]) -> None:
        """See :class:`~.packs.PackSource`."""
        missing = [pack for pack in packs if not self._local.path(pack).exists()]
        if not missing:
            return
        with suppress(CkptError):  # who reads is told
            # Whoever deletes the state: until close() its packs stay.
            self._pins.enter_context(self._remote.present(f"read-{secrets.token_hex(8)}", missing))
        with self._lock:
            if self._closed:
                return
            for pack in missing:
                self._wanted.setdefault(pack)
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            while len(self._threads) < min(_PACKS, len(self._wanted)):
                thread = threading.Thread(target=self._ahead, name="gpu-ckpt-fetch", daemon=True)
                self._threads.append(thread)
                thread.start()

    def size(self, pack: str) -> int | None:
        """See :class:`~.packs.PackSource`."""
        here = self._local.size(pack)
        return here if here is not None else self._remote.objects.size(self._remote.pack_name(pack))

    def discard(self, pack: str) -> bool:
        """See :class:`~.packs.PackSource`: the remote tier may have it as it was written."""
        path = self._local.path(pack)
        if path.exists():
            if self._remote.objects.size(self._remote.pack_name(pack)) is None:
                return False
            with translated("write to the local tier of the state store"):
                path.unlink(missing_ok=True)
        self._local.forget(pack)
        self.want([pack])
        return True

    def close(self) -> None:
        """See :class:`~.packs.PackSource`."""
        with self._lock:
            self._closed = True
            self._wanted.clear()
        for thread in self._threads:
            thread.join()
        self._pins.close()
        self._local.close()
        if self._at_close is not None and self._fetched:
            self._at_close()

    def _ahead(self) -> None:
        """Bring what is wanted, in order, until there is no more."""
        while True:
            with self._lock:
                if self._closed or not self._wanted:
                    return
                pack = next(iter(self._wanted))
            with suppress(BaseException):  # who reads it is told
                self._bring(pack)

    def _bring(self, pack: str) -> None:
        """Have a pack in the local tier; one thread fetches it, others wait for that."""
        with self._lock:
            while pack in self._coming:
                self._lock.wait()
            if pack in self._failed:
                raise self._failed[pack]
            if self._local.path(pack).exists():
                self._wanted.pop(pack, None)
                return
            self._coming.add(pack)
            self._wanted.pop(pack, None)
        try:
            self._fetch(pack)
            self._fetched = True
        except BaseException as error:
            with self._lock:
                self._failed[pack] = error
            raise
        finally:
            with self._lock:
                self._coming.discard(pack)
                self._lock.notify_all()

    def _fetch(self, pack: str) -> None:
        with (
            translated("write to the local tier of the state store"),
            self._tier.incoming(self._local.path(pack)) as temporary,
        ):
            try:
                name = self._remote.pack_name(pack)
                self._remote.objects.fetch(name, temporary, parallel=_RANGES)
            except Missing as error:
                raise Damaged(f"pack {pack} is missing") from error

    def _used_now(self, pack: str) -> None:
        """Note for eviction that a pack is of use."""
        if pack not in self._used:
            self._used.add(pack)
            with suppress(OSError):
                os.utime(self._local.path(pack))
