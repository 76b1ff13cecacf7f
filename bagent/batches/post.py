"""Sending batches and looking at them: every step noted before the next one begins."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bagent.batches.desk import Desk
from bagent.batches.quota import is_quota
from bagent.batches.record import BatchRecord, Look
from bagent.batches.service import BatchService
from bagent.batches.spool import Spool
from bagent.errors import NeedsPerson, StoppedEarly
from bagent.types import Failure

PATIENCE = 1800.0
"""Seconds without any word of the provider after which a run ends, to go on later."""

UNCERTAIN = 30.0
"""So long a batch of which no word came back may still appear before it is made again."""

_UNCLEAR = (408, 409, 425)
"""Answers to the making of a batch that do not say that it was not made."""

_AT_WORK = frozenset({"in_progress", "finalizing", "InProgress"})
"""Words for a batch that was accepted: its file is not needed any more."""

LOOK_HINT = "look at the batch in the provider's console, then give the same command again"

Shelter = Callable[[Coroutine[None, None, str | Failure]], Awaitable[str | Failure]]


@dataclass(frozen=True)
class PostTools:
    """What sending needs besides batches.

    ``shelter`` runs a request whose end a stop waits for; ``note`` shows how things stand,
    ``notice`` keeps a line too. ``clock`` is Unix seconds.
    """

    shelter: Shelter
    note: Callable[[str], None]
    notice: Callable[[str], None]
    clock: Callable[[], float] = time.time


class Post:
    """Makes batches of what is on disk, and follows them until they have ended."""

    def __init__(self, service: BatchService, spool: Spool, desk: Desk, tools: PostTools) -> None:
        self._service = service
        self._spool = spool
        self._desk = desk
        self._tools = tools
        self._heard = tools.clock()

    async def send(self, record: BatchRecord) -> None:
        """Make a batch of what is on disk: noted before, so that it is never made twice.

        Raises:
            NeedsPerson: the account cannot pay, or the key or the batch is refused.
            StoppedEarly: nothing was heard for long.
        """
        found: str | Failure | None = None
        if record.state == "sending" and record.file_id is not None:
            found = await self._service.find(record)
            if isinstance(found, Failure):
                self.trouble(record, found)
                return
            if found is None and self._may_appear(record):
                return
        if found is None:
            record.state, record.sent_at = "sending", round(self._tools.clock(), 3)
            self._spool.save(record)
            found = await self._make(record)
        elif isinstance(found, str):
            self._note_id(record, found)
        if isinstance(found, Failure):
            self._not_sent(record, found)
            return
        self._desk.quota(record.group).taken()
        self._desk.went_well(record, self._heard_now())
        self._tools.notice(f"batch {record.number} is {found}: {record.rows:,} rows")

    def _may_appear(self, record: BatchRecord) -> bool:
        """Whether a batch that was not found is too young to be made again; then it waits."""
        now = self._tools.clock()
        age = now - (record.sent_at or 0.0)
        if age >= UNCERTAIN:
            return False
        self._desk.went_wrong(record, now, min(UNCERTAIN, UNCERTAIN - age))
        return True

    async def _make(self, record: BatchRecord) -> str | Failure:
        requests = self._spool.files(record).requests
        if record.file_id is None:
            uploaded = await self._service.upload(record, requests)
            if isinstance(uploaded, Failure):
                # A file alone makes nothing and costs nothing.
                record.state = "sealed"
                return uploaded
            record.file_id = uploaded
            self._spool.save(record)
        return await self._tools.shelter(self._create(record, requests))

    async def _create(self, record: BatchRecord, requests: Path) -> str | Failure:
        """Make the batch and note its id, also where the run is stopped meanwhile."""
        found = await self._service.create(record, requests)
        if isinstance(found, str):
            self._note_id(record, found)
        return found

    def _note_id(self, record: BatchRecord, batch_id: str) -> None:
        record.state, record.batch_id, record.word = "waiting", batch_id, ""
        self._spool.save(record)

    def _not_sent(self, record: BatchRecord, failure: Failure) -> None:
        """A batch was not made, or nobody knows: then it is looked for before the next try."""
        status = failure.status or 0
        if 400 <= status < 500 and status not in _UNCLEAR:
            record.state = "sealed"
        self._spool.save(record)
        if is_quota(failure.message) and failure.kind != "budget":
            self._heard_now()
            record.state = "sealed"
            self._spool.save(record)
            self.wait_for_quota(record, failure.message)
            return
        self.trouble(record, failure)

    def wait_for_quota(self, record: BatchRecord, words: str) -> None:
        """A batch was refused since too much is with the provider: that is no error."""
        out = self._desk.out(self._spool.records, record)
        self._desk.refused(record, words, out, self._tools.clock())
        self._tools.notice(f"batch {record.number} waits: {words}")

    def trouble(self, record: BatchRecord, failure: Failure) -> None:
        """Put a step off, or end the run where waiting is no cure.

        Raises:
            NeedsPerson: nobody but a person can mend it.
            StoppedEarly: nothing was heard for long.
        """
        now = self._tools.clock()
        if not failure.passing:
            raise NeedsPerson(f"batch {record.number}: {failure.message}", hint=LOOK_HINT)
        if failure.status is not None:
            self._heard_now()
        elif now - self._heard > PATIENCE:
            raise StoppedEarly(
                f"no word of {self._service.name} for {PATIENCE / 60:.0f} minutes: "
                f"{failure.message}",
                hint="what is with the provider stays there; the same command goes on",
            )
        wait = self._desk.went_wrong(record, now, failure.retry_after)
        self._tools.note(f"batch {record.number}: {failure.message}; again in {wait:.0f} s")

    def _heard_now(self) -> float:
        self._heard = self._tools.clock()
        return self._heard

    async def look(self, record: BatchRecord) -> None:
        """See how a batch stands; raises as :meth:`trouble`."""
        found = await self._service.look(record)
        now = self._tools.clock()
        if isinstance(found, Failure):
            self.trouble(record, found)
            return
        self._heard_now()
        if record.batch_id in record.not_ours:
            record.state, record.batch_id = "sending", None
            self._spool.save(record)
            self._desk.went_well(record, now)
            return
        changed = (found.word, found.ended, found.failed) != (
            record.word,
            record.ended,
            record.failed,
        )
        news = found.word != record.word
        self._take_look(record, found, now)
        if changed or found.over:
            self._spool.save(record, sync=found.over)
        if news:  # told once it is noted: a run killed here knows what people were told
            self._tools.notice(f"batch {record.number} ({record.batch_id}) is {found.word}")
        self._desk.went_well(record, now)
        if found.word in _AT_WORK and not record.doubtful:
            with suppress(OSError):
                self._spool.files(record).requests.unlink()

    def _take_look(self, record: BatchRecord, found: Look, now: float) -> None:
        record.word, record.ended, record.failed = found.word, found.ended, found.failed
        record.looked_at = round(now, 3)
        if found.over:
            record.state, record.outputs, record.faults = "ended", found.outputs, found.faults
            record.ended_at = round(found.ended_at or now, 3)
