"""The remote tier of one owner: the same layout as a local store, as objects."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from . import failures
from .clocks import uptime
from .layout import is_kernel_id, is_state_id
from .objects import Found, Missing, Objects
from .packs import is_pack_id, pack_key
from .sweep import PackSeen, Present

if TYPE_CHECKING:
    from .announcements import Announcements
    from .local_tier import LocalTier

_FRESH_SECONDS: Final = 3600.0
_BEAT_SECONDS: Final = 240.0


class _Presence(msgspec.Struct):
    packs: list[str]


class Listed(NamedTuple):
    """What there is of kernels: object names by (kernel id, state id), kernel id, and so on."""

    states: dict[str, tuple[str, Found]]
    kernels: dict[str, Found]
    marks: dict[str, tuple[str, Found]]
    failures: dict[str, Found]


class RemoteOwner:
    """One owner's objects.

    Attributes
    ----------
    objects
        With the patience of background work; see :meth:`Objects.within`.
    """

    def __init__(self, objects: Objects) -> None:
        self.objects = objects

    def hasty(self, timeout: float = 5.0, attempts: int = 2) -> RemoteOwner:
        """The same, for somebody who waits."""
        return RemoteOwner(self.objects.within(timeout, attempts))

    # -- names ---------------------------------------------------------------------------

    @staticmethod
    def manifest_name(kernel_id: str, state_id: str) -> str:
        """Name of a state's manifest."""
        return f"kernels/{kernel_id}/states/{state_id}.json"

    @staticmethod
    def marks_name(kernel_id: str, state_id: str) -> str:
        """Name of a state's marks."""
        return f"kernels/{kernel_id}/states/{state_id}.marks.json"

    @staticmethod
    def kernel_name(kernel_id: str) -> str:
        """Name of a kernel's record."""
        return f"kernels/{kernel_id}/kernel.json"

    @staticmethod
    def failure_name(kernel_id: str) -> str:
        """Name of what is noted of a kernel's last save that failed."""
        return f"kernels/{kernel_id}/{failures.NAME}"

    @staticmethod
    def pack_name(pack: str) -> str:
        """Name of a pack."""
        return f"packs/{pack_key(pack)}"

    # -- looking -------------------------------------------------------------------------

    def listed(self) -> Listed:
        """All states, kernel records and marks; names that are not ours are left out."""
        found = Listed({}, {}, {}, {})
        for name, entry in self.objects.list("kernels").items():
            match name.split("/"):
                case ["kernels", kernel, "kernel.json"] if is_kernel_id(kernel):
                    found.kernels[kernel] = entry
                case ["kernels", kernel, failures.NAME] if is_kernel_id(kernel):
                    found.failures[kernel] = entry
                case ["kernels", kernel, "states", file] if is_kernel_id(kernel):
                    state, _, rest = file.partition(".")
                    if is_state_id(state) and rest == "json":
                        found.states[state] = (kernel, entry)
                    elif is_state_id(state) and rest == "marks.json":
                        found.marks[state] = (kernel, entry)
        return found

    def packs(self) -> dict[str, Found]:
        """All packs by id, in a request a thousand."""
        found = {}
        for name, entry in self.objects.list("packs").items():
            pack = name.rpartition("/")[2].removesuffix(".pack")
            if is_pack_id(pack):
                found[pack] = entry
        return found

    def version(self, name: str) -> str | None:
        """Version of a small object as lists have it; ``None`` if there is none."""
        found = self.objects.list(name.rpartition("/")[0]).get(name)
        return None if found is None else found.version

    def maybe(self, name: str, found: Found | None = None) -> bytes | None:
        """Content of a small object; ``None`` if there is none (any more)."""
        try:
            return self.objects.get(name, 0, found.size if found is not None else None)
        except Missing:
            return None

    # -- being present -------------------------------------------------------------------

    @contextmanager
    def present(self, name: str, packs: Iterable[str]) -> Iterator[None]:
        """Be seen by collectors, which spare `packs`, and those of the state called `name`.

        What it counts on must be looked for afterwards. Its object is written anew every few
        minutes, by a thread.
        """
        path = f"writers/{name}.json"
        data = msgspec.json.encode(_Presence(sorted(packs)))
        self.objects.put(path, data)
        over = threading.Event()

        def beat() -> None:
            while not over.wait(_BEAT_SECONDS):
                try:
                    # Not again once it was taken away: who took it counts on that.
                    if self.objects.size(path) is not None:
                        self.objects.put(path, data)
                except Exception:  # the next beat may come through
                    continue

        thread = threading.Thread(target=beat, name="gpu-ckpt-presence", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            self.forget(path)

    def forget(self, name: str) -> bool:
        """Remove an object that only costs space, if that is possible; whether it was."""
        try:
            self.objects.delete(name)
        except Exception:  # a collector will do it
            return False
        return True

    # -- changing ------------------------------------------------------------------------

    def put_pack(self, pack: str, file: Path) -> int:
        """Upload a pack; returns its bytes."""
        return self.objects.put_file(self.pack_name(pack), file)

    def delete_state(self, kernel_id: str, state_id: str) -> None:
        """Delete a state: first a note of it for collections under way, then its manifest."""
        name = self.manifest_name(kernel_id, state_id)
        data = self.maybe(name)
        if data is not None:
            self.objects.put(f"deleted/{state_id}.json", data)
            self.objects.delete(name)
        self.objects.delete(self.marks_name(kernel_id, state_id))


class RemoteFiles:
    """The remote tier as a collection sees it; see :class:`~.sweep.StoreFiles`.

    Parameters
    ----------
    remote
        The owner's objects.
    announcements
        Needed to remove something.
    tier, path
        The local tier, where manifests cost no request to read, and where that of a kernel's
        state is.
    """

    def __init__(
        self,
        remote: RemoteOwner,
        announcements: Announcements | None = None,
        tier: LocalTier | None = None,
        path: Callable[[str, str], Path] | None = None,
    ) -> None:
        self._remote = remote
        self._announcements = announcements
        self._tier = tier
        self._path = path
        self._objects = remote.objects
        self._states: dict[str, tuple[str, Found]] = {}
        self._now: tuple[float, float] | None = None

    def now(self) -> float:
        """See :class:`~.sweep.StoreFiles`."""
        if self._now is None:
            name = f"now/{secrets.token_hex(8)}"
            self._objects.put(name, b"now", check=False)
            self._now = (self._objects.list("now")[name].modified, uptime())
            self._remote.forget(name)
        return self._now[0] + uptime() - self._now[1]

    def packs(self) -> Iterator[PackSeen]:
        """See :class:`~.sweep.StoreFiles`."""
        for pack, found in self._remote.packs().items():
            yield PackSeen(pack, found.size, found.modified)

    def manifests(self) -> Iterator[tuple[str, str]]:
        """See :class:`~.sweep.StoreFiles`."""
        self._states = self._remote.listed().states
        for state, (_, found) in self._states.items():
            yield state, found.version

    def manifest(self, state_id: str) -> bytes | None:
        """See :class:`~.sweep.StoreFiles`."""
        kernel, found = self._states[state_id]
        here: bytes | None = None
        if self._tier is not None and self._path is not None:
            with suppress(OSError):
                here = self._path(kernel, state_id).read_bytes()
                if self._tier.is_manifest(state_id, found.version, here):
                    return here
        data = self._remote.maybe(self._remote.manifest_name(kernel, state_id))
        if self._tier is not None and data is not None and data == here:
            self._tier.note_manifest(state_id, found.version, data)
        return data

    def deleted(self) -> Iterator[tuple[str, float]]:
        """See :class:`~.sweep.StoreFiles`."""
        for name, found in self._objects.list("deleted").items():
            state = name.removeprefix("deleted/").removesuffix(".json")
            if is_state_id(state):
                yield state, found.modified

    def deleted_manifest(self, state_id: str) -> bytes | None:
        """See :class:`~.sweep.StoreFiles`."""
        return self._remote.maybe(f"deleted/{state_id}.json")

    def present(self) -> Iterator[Present]:
        """See :class:`~.sweep.StoreFiles`."""
        for name, found in self._objects.list("writers").items():
            who = name.removeprefix("writers/").removesuffix(".json")
            data = self._remote.maybe(name)
            if data is None:
                continue  # it has ended
            try:
                packs = frozenset(msgspec.json.decode(data, type=_Presence).packs)
            except msgspec.DecodeError:
                packs = None
            alive = self.now() - found.modified < _FRESH_SECONDS
            yield Present(who, who if is_state_id(who) else None, alive, packs)

    def take_away(self, presence_id: str, *, dry_run: bool) -> int:
        """See :class:`~.sweep.StoreFiles`."""
        if not dry_run:
            self._objects.delete(f"writers/{presence_id}.json")
        return 0

    def announced(self, pack_ids: list[str]) -> AbstractContextManager[None]:
        """See :class:`~.sweep.StoreFiles`."""
        assert self._announcements is not None
        return self._announcements.made(pack_ids)

    def remove_pack(self, pack_id: str) -> None:
        """See :class:`~.sweep.StoreFiles`."""
        self._objects.delete(self._remote.pack_name(pack_id))

    def remove_note(self, state_id: str) -> None:
        """See :class:`~.sweep.StoreFiles`."""
        self._objects.delete(f"deleted/{state_id}.json")
