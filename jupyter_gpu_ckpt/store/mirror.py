"""Brings what is small from the remote tier to the local one: manifests, marks, kernel records.

A list of states is then read locally. It costs one request a thousand states, and one for
each object that changed since.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from ..errors import CkptError
from . import failures
from .clocks import uptime
from .damage import Damaged
from .layout import make_private_dir, store_error
from .local_files import delete_state
from .local_tier import LocalTier
from .objects import Found
from .owner import OwnerStore
from .remote import Listed, RemoteFiles, RemoteOwner

_PARALLEL: Final = 8
_KEY_RECORD: Final = re.compile(r"keys/([0-9a-f]{16}\.json)")
#: How old what is listed may be, and how long a remote tier that failed is left alone; seconds.
_FRESH: Final = 2.0
_FIRST_REST, _LONGEST_REST = 10.0, 60.0


class Mirror:
    """Keeps the local tier's small files as the remote tier has them.

    Parameters
    ----------
    remote, tier
        The two.
    unsent
        Gives the names of objects that are still to be written from here: they are left alone.

    Attributes
    ----------
    problem
        Why the remote tier could not be read, when it was last tried; ``None`` if it could.
    """

    def __init__(
        self, remote: RemoteOwner, tier: LocalTier, unsent: Callable[[], Iterable[str]]
    ) -> None:
        self.problem: CkptError | None = None
        self._remote = remote
        self._hasty = remote.hasty()
        self._tier = tier
        self._unsent = unsent
        self._lock = threading.Lock()
        self._seen: dict[str, str] = {}
        self._modified: dict[str, float] = {}
        self._keys_known = False
        self._clock = RemoteFiles(remote.hasty()).now
        self._refreshed = float("-inf")
        self._rest_until = float("-inf")
        self._rest = _FIRST_REST

    # -- the store's own file --------------------------------------------------------------

    def join(self, create: Callable[[], object] | None) -> bool:
        """Make sure that the local tier belongs to the remote one.

        Parameters
        ----------
        create
            Makes a new store in the local tier, should there be none in either; ``None``: don't.

        Returns
        -------
        bool
            False if there is no store yet.

        Raises
        ------
        CkptError
            ``store_unavailable``: the remote tier was never reached from here, and cannot be now;
            or it is another one than it was.
        """
        with self._lock:
            if self._tier.confirmed():
                return True
            if self.problem is not None and uptime() < self._rest_until:
                raise self.problem
            try:
                found = self._hasty.maybe("store.json")
                if found is None:
                    if create is None:
                        return False
                    create()
                    data = self._tier.store_file.read_bytes()
                    self._hasty.objects.put("store.json", data, create=True)
                    # Whoever was first has made the store.
                    found = self._hasty.maybe("store.json") or data
            except CkptError as error:
                failure = CkptError(
                    error.reason,
                    f"{error.message}. It was never reached from this node, so nothing can be "
                    "kept here either.",
                    hint=error.hint,
                    details=error.details,
                )
                self._failed(failure)
                raise failure from error
            self._tier.confirm(found)
            return True

    def keys(self, folder: Path) -> None:
        """Have the records of keys in both tiers; they are made once and never altered."""
        there = self._hasty.objects.list("keys")
        for name, found in there.items():
            # Whoever can write there can name an object as he likes.
            record = _KEY_RECORD.fullmatch(name)
            if record is None:
                continue
            path = folder / record[1]
            if not path.exists():
                data = self._hasty.maybe(name, found)
                if data is not None:
                    self._tier.write(path, data)
        if folder.is_dir():
            for path in folder.glob("*.json"):
                if f"keys/{path.name}" not in there:
                    self._hasty.objects.put(f"keys/{path.name}", path.read_bytes(), create=True)

    # -- refreshing ------------------------------------------------------------------------

    def refresh(self, owner: OwnerStore, *, now: bool = False) -> None:
        """Look what is new, unless that was done a moment ago (`now`: even then).

        Never raises for a remote tier that does not answer: see :attr:`problem`. One that
        failed is left alone for some seconds, so that not every list waits for it.
        """
        with self._lock:
            began = uptime()
            if began < self._rest_until or (not now and began - self._refreshed < _FRESH):
                return
            try:
                self._refresh(owner)
            except Damaged as error:
                self._failed(
                    CkptError(
                        "store_unavailable",
                        f"The remote state store answers nonsense: {error}",
                        hint="Check GpuCkpt.store_url, and what stands between here and there.",
                    )
                )
            except CkptError as error:
                self._failed(error)
            except OSError as error:
                # What is known here can be read all the same.
                self._failed(store_error(error, "keep the remote store's lists on this node"))
            else:
                self.problem = None
                self._rest = _FIRST_REST
                self._refreshed = uptime()

    def stale(self) -> float:
        """Seconds for which the remote tier could not be read; 0 if it can."""
        with self._lock:
            if self.problem is None:
                return 0.0
            return uptime() - self._refreshed

    def version(self, name: str) -> str | None:
        """What is known of a small object's version."""
        return self._seen.get(name)

    def age(self, name: str) -> float | None:
        """Seconds since a small object was written, if it was brought from the remote tier."""
        modified = self._modified.get(name)
        return None if modified is None else self._clock() - modified

    def _failed(self, error: CkptError) -> None:
        self.problem = error
        self._rest_until = uptime() + self._rest
        self._rest = min(2 * self._rest, _LONGEST_REST)

    def _refresh(self, owner: OwnerStore) -> None:
        durable = self._tier.durable()  # before the list: what is uploaded meanwhile is not in it
        listed = self._hasty.listed()
        self._forget_deleted(owner, durable - listed.states.keys())
        work: list[Callable[[], None]] = []
        for state, (kernel, found) in listed.states.items():
            path = owner.manifest(kernel, state)
            if state not in durable and not path.exists():
                work.append(_bound(self._bring_state, state, kernel, found, path))
        if work or not self._keys_known:
            self.keys(owner.keys)  # a new state may be the first with its key
            self._keys_known = True
        unsent = set(self._unsent())
        for name, path, found in self._changing(owner, listed):
            if name not in unsent and (self._seen.get(name) != found.version or not path.exists()):
                work.append(_bound(self._bring, name, path, found))
        self._forget_gone(owner, listed, unsent)
        if work:
            with ThreadPoolExecutor(min(_PARALLEL, len(work))) as pool:
                for done in [pool.submit(task) for task in work]:
                    done.result()

    def _changing(self, owner: OwnerStore, listed: Listed) -> Iterable[tuple[str, Path, Found]]:
        for kernel, found in listed.kernels.items():
            yield self._remote.kernel_name(kernel), owner.kernels / kernel / "kernel.json", found
        for kernel, found in listed.failures.items():
            yield self._remote.failure_name(kernel), owner.kernels / kernel / failures.NAME, found
        for state, (kernel, found) in listed.marks.items():
            path = owner.manifest(kernel, state).with_suffix(".marks.json")
            yield self._remote.marks_name(kernel, state), path, found

    def _bring_state(self, state: str, kernel: str, found: Found, path: Path) -> None:
        data = self._hasty.maybe(self._remote.manifest_name(kernel, state), found)
        if data is not None:
            make_private_dir(path.parent)
            # Durable first: or an upload might begin of what came from there.
            self._tier.set_durable(state)
            self._tier.write(path, data)
            self._tier.note_manifest(state, found.version, data)

    def _bring(self, name: str, path: Path, found: Found) -> None:
        data = self._hasty.maybe(name)
        if data is not None:
            make_private_dir(path.parent)
            # How old a record is says whether its kernel lives.
            self._tier.write(path, data, age=self._clock() - found.modified)
            self._seen[name] = found.version
            self._modified[name] = found.modified

    def _forget_deleted(self, owner: OwnerStore, gone: set[str]) -> None:
        """Forget states that were deleted from elsewhere."""
        if not gone:
            return
        if self._hasty.maybe("store.json") != self._tier.store_file.read_bytes():
            raise CkptError(
                "store_unavailable",
                "The remote state store is not the one that it was: its states are gone.",
                hint="Check GpuCkpt.store_url. The states that this node still holds are in "
                f"{owner.folder}.",
            )
        for path in list(owner.manifests()):
            if path.stem in gone:
                with suppress(FileNotFoundError):
                    delete_state(owner, path)
        for state in gone:
            self._tier.forget(state)

    def _forget_gone(self, owner: OwnerStore, listed: Listed, unsent: set[str]) -> None:
        """Forget kernel records, and failures, that were there and are not any more."""
        for name in list(self._seen):
            parts = name.split("/")
            if len(parts) != 3 or name in unsent:
                continue
            there = listed.failures if parts[2] == failures.NAME else listed.kernels
            if parts[1] not in there:
                (owner.kernels / parts[1] / parts[2]).unlink(missing_ok=True)
                del self._seen[name]
                self._modified.pop(name, None)


def _bound(work: Callable[..., None], *arguments: object) -> Callable[[], None]:
    return lambda: work(*arguments)
