"""A check of a saved state: whether all of it can be read back, and what is lost if not."""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from .capture.contents import Survey
from .capture.node_local import NodeLocalEntry
from .capture.pagemap import page_files
from .describe import gpu_use
from .errors import CkptError
from .models import CONTENTS_WORDS, ContentsItem, LostFile, LostPart, OperationResult, Verification
from .operations import Run, in_thread, now
from .store import LostRange, StateRecord

if TYPE_CHECKING:
    from .keeper import Keeper

#: So many ranges of one file are told.
_MOST_RANGES: Final = 16
_PAGES: Final = re.compile(rb"pages-[0-9]+\.img")


class Verify:
    """One check of one state; what it finds is noted with the state.

    Parameters
    ----------
    keeper
        Store and working folders.
    record
        The state.
    """

    def __init__(self, keeper: Keeper, record: StateRecord) -> None:
        self._keeper = keeper
        self._record = record

    async def run(self, run: Run) -> OperationResult:
        """Do it; called by :class:`~jupyter_gpu_ckpt.operations.Operations`."""
        began = time.monotonic()
        run.phase("verifying", 0.0)
        lost, found = await self._check(run, self._record, 0.9)
        if lost:
            async with self._keeper.spool.folder(run.model.id) as folder:
                found.items = await in_thread(self._explain, folder / "images", lost)
            await self._note(self._record, damage=_in_words(found))
            found.older = await self._older(run)
        return OperationResult(
            state_id=self._record.id,
            kernel_id=self._record.meta.kernel_id,
            seconds=time.monotonic() - began,
            size=self._record.size,
            verification=found,
        )

    async def _check(
        self, run: Run, record: StateRecord, end: float
    ) -> tuple[list[LostRange], Verification]:
        store = self._keeper.store
        begin = run.model.progress
        result = await in_thread(
            lambda: store.verify(record.id, run.span(begin, end), run.cancel_flag)
        )
        if not result.lost:
            await self._note(record, verified=now())
            return [], Verification(intact=True, size=result.bytes)
        lost = sum(found.length for found in result.lost)
        files = _by_file(result.lost)
        return result.lost, Verification(False, result.bytes, lost=lost, files=files)

    async def _note(
        self, record: StateRecord, *, verified: str | None = None, damage: str | None = None
    ) -> None:
        """Write down what was found; a store that cannot be written keeps no one from knowing."""
        try:
            await in_thread(
                lambda: self._keeper.store.mark(record.id, verified=verified, damage=damage)
            )
        except CkptError as error:
            self._keeper.log.warning("The check of state %s: %s", record.id, error.message)

    def _explain(self, folder: Path, lost: Sequence[LostRange]) -> list[ContentsItem]:
        """What the lost ranges were in the kernel; nothing where even that cannot be read."""
        bad = {found.path for found in lost}
        try:
            with self._keeper.store.open(self._record.id) as reader:
                reader.extract(folder, skip=lambda path: path in bad or _is_pages(path))
                for path, size in reader.files():
                    if path in bad or _is_pages(path):
                        _stand_in(folder / os.fsdecode(path), size)
            node_local = msgspec.convert(self._record.meta.node_local, list[NodeLocalEntry])
            use = gpu_use(self._record)
            on_gpu = {} if use is None else use.in_memory
            survey = Survey(folder, page_files(folder), node_local, on_gpu)
            return survey.touched((found.path, found.offset, found.length) for found in lost)
        except (CkptError, msgspec.ValidationError) as error:
            self._keeper.log.info("What is lost of state %s: %s", self._record.id, error)
            records = ContentsItem("other", "[records of the processes]")
            memory = ContentsItem("anon", "[memory, of which it cannot be told what it was]")
            for found in lost:
                (memory if _is_pages(found.path) else records).size += found.length
            return [item for item in (memory, records) if item.size]

    async def _older(self, run: Run) -> str | None:
        """The newest older state of the kernel that is whole."""
        kernel_id = self._record.meta.kernel_id
        for record in await in_thread(self._keeper.store.states, kernel_id):
            if record.created >= self._record.created:
                continue
            try:
                lost, found = await self._check(run, record, 1.0)
            except CkptError as error:
                if error.reason == "cancelled":
                    raise
                if error.reason == "state_damaged":
                    await self._note(record, damage=error.message)
                continue
            if not lost:
                return record.id
            await self._note(record, damage=_in_words(found))
        return None


def _in_words(found: Verification) -> str:
    """One line of what is lost."""
    words = sorted({CONTENTS_WORDS[item.kind] for item in found.items})
    what = f" ({', '.join(words)})" if words else ""
    return f"{found.lost / 1e6:,.1f} MB of it cannot be read back{what}."


def _by_file(lost: Sequence[LostRange]) -> list[LostFile]:
    files: dict[bytes, list[LostRange]] = defaultdict(list)
    for found in lost:
        files[found.path].append(found)
    return [
        LostFile(
            path=os.fsdecode(path),
            size=sum(found.length for found in ranges),
            ranges=[LostPart(found.offset, found.length) for found in ranges[:_MOST_RANGES]],
            why=ranges[0].why,
        )
        for path, ranges in sorted(files.items())
    ]


def _is_pages(path: bytes) -> bool:
    return _PAGES.fullmatch(path) is not None


def _stand_in(path: Path, size: int) -> None:
    """A file of zeros that takes no room, in the place of one that is not needed or is lost."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)
