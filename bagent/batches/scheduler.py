"""What to do next with the batches of a run: a pure state machine with a clock from outside.

::

    sealed ──▶ sending ──▶ waiting ──▶ ended ──▶ done
      ▲           │           │
      └───────────┴───────────┘   refused for want of quota

Batches are sent in the order in which they were sealed, as far as the quota and the budget have
room; those with the provider are looked at now and then; what has ended is read at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from bagent.batches.record import OUT, BatchRecord

FIRST_WAIT = 60.0
MAX_WAIT = 900.0
"""Seconds until a refused batch is tried again although nothing of ours ended meanwhile."""

MAX_LONE_REFUSALS = 3
"""So often a batch is refused while nothing else of ours is there before it is halved."""

QUOTA_SHARE = 0.95
"""Of a quota that was told, what our own estimates may use: they are not exact."""

_QUOTA = re.compile(
    r"token_limit_exceeded|enqueued[ _]token|request_limit_exceeded|service\W?quota\W?exceeded"
    r"|too many (active |in.progress )?(batch|job)|(batch|job)\w* (queue )?(limit|quota)"
    r"|quota.{0,60}(batch|job|record)s?\b",
    re.IGNORECASE,
)
_LIMIT = re.compile(r"limit:?\s*([\d,]{3,})\s*(enqueued|tokens)", re.IGNORECASE)


def is_quota_refusal(message: str) -> bool:
    """Whether a refusal says that too much is with the provider already: waiting is the cure."""
    return bool(_QUOTA.search(message))


class EnqueuedTokenQuota:
    """The quota of one model, in tokens of prompts.

    ``cap`` is what may be with the provider at once, None where nothing is known of it.
    """

    def __init__(self) -> None:
        self.cap: int | None = None
        self._told = False
        self._out_then = 0
        self._again_at = 0.0
        self._wait = FIRST_WAIT
        self._alone = 0

    def admits(self, tokens: int, out: int, now: float) -> bool:
        """Whether a batch may be sent while ``out`` tokens of ours are with the provider."""
        if self._told and self.cap is not None and out and out + tokens > self.cap:
            return False
        if now >= self._again_at:
            return True
        return out < self._out_then and (self.cap is None or out + tokens <= self.cap)

    def too_large(self, tokens: int) -> bool:
        """Whether a batch of so many tokens can never be taken."""
        return (
            self.cap is not None
            and tokens > self.cap
            and (self._told or self._alone >= MAX_LONE_REFUSALS)
        )

    def refused(self, message: str, tokens: int, out: int, now: float) -> None:
        """A batch was refused while ``out`` other tokens of ours were with the provider."""
        self._out_then = out
        self._again_at = now + self._wait
        self._wait = min(MAX_WAIT, 2 * self._wait)
        limit = _LIMIT.search(message)
        if limit is not None:
            self._told, self.cap = True, max(1, int(int(limit[1].replace(",", "")) * QUOTA_SHARE))
        elif out:
            self.cap = max(self.cap or 0, out)
        else:
            self._alone += 1
            if self._alone >= MAX_LONE_REFUSALS:
                self.cap = max(1, tokens // 2)

    def taken(self) -> None:
        """A batch was accepted."""
        self._wait = FIRST_WAIT
        self._again_at = 0.0
        self._alone = 0

    @property
    def again_at(self) -> float:
        """When a refused batch is tried again at the latest."""
        return self._again_at


MIN_POLL_INTERVAL = 2.0
MAX_POLL_INTERVAL = 60.0
POLL_SHARE = 0.05
"""A batch is looked at again after this part of its age, within the bounds, in seconds."""

FIRST_PAUSE = 2.0
MAX_PAUSE = 300.0
"""Bounds of the growing waits after failures of the network or the server, in seconds."""

Kind = Literal["read", "send", "split", "look", "seal", "wait", "broke", "over"]


class Action(msgspec.Struct, frozen=True):
    """The next thing to do; ``until`` (Unix seconds) is when waiting is over, None: at an event.

    ``broke``: the budget has no room for the next batch, and nothing is out that may cost less.
    """

    kind: Kind
    record: BatchRecord | None = None
    until: float | None = None


class InputState(msgspec.Struct, frozen=True):
    """Whether all rows have been put into batches, and whether some stand in an open one."""

    over: bool
    open: bool


class ProviderBatchScheduler:
    """Decides; who asks does what it says and tells it what came of it.

    Args:
        budget: dollars that all batches of the run may cost, None for no limit.
    """

    def __init__(self, budget: float | None = None) -> None:
        self._budget = budget
        self._quotas: dict[str, EnqueuedTokenQuota] = {}
        self._due: dict[str, float] = {}
        self._pauses: dict[str, float] = {}

    def quota(self, group: str) -> EnqueuedTokenQuota:
        """What is known of the quota of a group's model."""
        model = group.partition(" ")[2]
        return self._quotas.setdefault(model, EnqueuedTokenQuota())

    def next(
        self, records: Sequence[BatchRecord], feed: InputState, spent: float, now: float
    ) -> Action:
        """The next step with ``records``, those that are not done, by number.

        Args:
            spent: dollars that the batches that are done have cost.
            now: Unix seconds.
        """
        for record in records:
            if record.state == "ended" and self._is_due(record, now):
                return Action("read", record)
        step = self._send(records, spent, now)
        if step.kind != "wait":
            return step
        for record in records:
            if record.state == "waiting" and self._is_due(record, now):
                return Action("look", record)
        if feed.over and feed.open and all(record.state != "ended" for record in records):
            return Action("seal")
        if not records and feed.over:
            return Action("over")
        dues = [self._due.get(record.label, now) for record in records if record.state != "sealed"]
        dues += [] if step.until is None else [step.until]
        return Action("wait", until=min(dues, default=None))

    def _send(self, records: Sequence[BatchRecord], spent: float, now: float) -> Action:
        until: float | None = None
        broke = False
        blocked_models: set[str] = set()
        for record in records:
            if record.state not in ("sealed", "sending"):
                continue
            if not self._is_due(record, now):
                until = _sooner(until, self._due[record.label])
                continue
            if record.state == "sending":
                return Action("send", record)
            if record.model in blocked_models:
                continue
            quota, out = self.quota(record.group), self.out(records, record)
            if quota.too_large(record.tokens) and record.rows > 1:
                return Action("split", record)
            if not quota.admits(record.tokens, out, now):
                blocked_models.add(record.model)
                if quota.again_at > now:
                    until = _sooner(until, quota.again_at)
            elif not self.affords(records, record.most_usd or 0.0, spent):
                broke = True
            else:
                return Action("send", record)
        out_now = any(record.state in (*OUT, "ended") for record in records)
        return Action("broke" if broke and not out_now and until is None else "wait", until=until)

    def affords(self, records: Sequence[BatchRecord], most: float, spent: float) -> bool:
        """Whether the budget has room for ``most`` dollars beside what is spent and out."""
        if self._budget is None:
            return True
        reserved = sum(r.most_usd or 0.0 for r in records if r.state in (*OUT, "ended"))
        return spent + reserved + most <= self._budget

    @staticmethod
    def out(records: Sequence[BatchRecord], but: BatchRecord) -> int:
        """Tokens of the same model that are with the provider, but for those of one batch."""
        return sum(
            record.tokens
            for record in records
            if record is not but and record.model == but.model and record.state in OUT
        )

    # --- what came of it --------------------------------------------------------------------------

    def went_well(self, record: BatchRecord, now: float) -> None:
        """A step with ``record`` was done; if it is with the provider, when to look again."""
        self._pauses.pop(record.label, None)
        if record.state != "waiting":
            self._due.pop(record.label, None)
            return
        age = 0.0 if record.sent_at is None else now - record.sent_at
        self._due[record.label] = now + min(
            MAX_POLL_INTERVAL, max(MIN_POLL_INTERVAL, POLL_SHARE * age)
        )

    def went_wrong(
        self, record: BatchRecord, now: float, retry_after: float | None = None
    ) -> float:
        """A step failed for a passing reason: how many seconds it is put off.

        Args:
            told: how long the server wants to be left alone, None where it did not say.
        """
        pause = self._pauses.get(record.label, FIRST_PAUSE)
        self._pauses[record.label] = min(MAX_PAUSE, 2 * pause)
        wait = pause if retry_after is None else max(retry_after, 0.1)
        self._due[record.label] = now + wait
        return wait

    def refused(self, record: BatchRecord, message: str, out: int, now: float) -> None:
        """A batch was refused for want of quota: it waits."""
        self.quota(record.group).refused(message, record.tokens, out, now)
        self._due.pop(record.label, None)

    def _is_due(self, record: BatchRecord, now: float) -> bool:
        return now >= self._due.get(record.label, now)


def _sooner(first: float | None, second: float) -> float:
    return second if first is None else min(first, second)
