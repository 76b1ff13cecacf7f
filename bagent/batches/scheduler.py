"""Decision of the next step with the batches of a run; a pure state machine.

::

    sealed ──▶ sending ──▶ waiting ──▶ ended ──▶ done
      ▲           │           │
      └───────────┴───────────┘   refused for want of quota

Batches are sent in the order in which they were sealed, as far as the quota and the budget have
room. Batches at the provider are polled, those that have ended are read at once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Literal, Self

import msgspec

from bagent.batches.record import OUT, BatchRecord

FIRST_WAIT = 60.0
MAX_WAIT = 900.0
"""Seconds until a refused batch is retried although none of ours ended."""

MAX_LONE_REFUSALS = 3
"""Refusals without other batches of ours before a batch is halved."""

QUOTA_SHARE = 0.95
"""Part of a reported quota that is used, because our counts are estimates."""

_QUOTA = re.compile(
    r"token_limit_exceeded|enqueued[ _]token|request_limit_exceeded|service\W?quota\W?exceeded"
    r"|too many (active |in.progress )?(batch|job)|(batch|job)\w* (queue )?(limit|quota)"
    r"|quota.{0,60}(batch|job|record)s?\b",
    re.IGNORECASE,
)
_LIMIT = re.compile(r"limit:?\s*([\d,]{3,})\s*(enqueued|tokens)", re.IGNORECASE)


def is_quota_refusal(message: str) -> bool:
    """Return whether a refusal says that too much is enqueued, so that waiting helps."""
    return bool(_QUOTA.search(message))


class EnqueuedTokenQuota:
    """The quota of enqueued prompt tokens of one model.

    ``cap`` limits the tokens at the provider, None if unknown.
    """

    def __init__(self) -> None:
        self.cap: int | None = None
        self._told = False
        self._out_then = 0
        self._again_at = 0.0
        self._wait = FIRST_WAIT
        self._single_calls = 0

    def admits(self, tokens: int, out: int, now: float) -> bool:
        """Return whether a batch may be sent while ``out`` tokens are at the provider."""
        if self._told and self.cap is not None and out and out + tokens > self.cap:
            return False
        if now >= self._again_at:
            return True
        return out < self._out_then and (self.cap is None or out + tokens <= self.cap)

    def too_large(self, tokens: int) -> bool:
        """Return whether a batch of ``tokens`` can never be accepted."""
        return (
            self.cap is not None
            and tokens > self.cap
            and (self._told or self._single_calls >= MAX_LONE_REFUSALS)
        )

    def refused(self, message: str, tokens: int, out: int, now: float) -> None:
        """Record a refusal while ``out`` other tokens were at the provider."""
        self._out_then = out
        self._again_at = now + self._wait
        self._wait = min(MAX_WAIT, 2 * self._wait)
        limit = _LIMIT.search(message)
        if limit is not None:
            self._told, self.cap = True, max(1, int(int(limit[1].replace(",", "")) * QUOTA_SHARE))
        elif out:
            self.cap = max(self.cap or 0, out)
        else:
            self._single_calls += 1
            if self._single_calls >= MAX_LONE_REFUSALS:
                self.cap = max(1, tokens // 2)

    def taken(self) -> None:
        """Record an accepted batch."""
        self._wait = FIRST_WAIT
        self._again_at = 0.0
        self._single_calls = 0

    @property
    def again_at(self) -> float:
        """When a refused batch is retried at the latest."""
        return self._again_at


MIN_POLL_INTERVAL = 2.0
MAX_POLL_INTERVAL = 60.0
POLL_SHARE = 0.05
"""Interval between polls as a part of the batch's age, within the bounds."""

FIRST_PAUSE = 2.0
MAX_PAUSE = 300.0
"""Bounds of the growing waits after failures, in seconds."""

Kind = Literal[
    "read", "send", "split", "cancel", "singly", "poll", "seal", "wait", "over_budget", "over"
]

SINGLE_SHARE = 0.15
"""Share of the time for single calls, in a run with a time to end by."""

LEAST_SINGLE_TIME = 300.0
"""Seconds for single calls, at least."""


class SendingTimes(msgspec.Struct, frozen=True):
    """When a run that has to end by some time changes how it sends rows; Unix seconds."""

    late_at: float
    """From then on batches are cancelled, and their rows are sent as single calls."""
    tier_until: float
    """Until then single calls use the cheaper tier, where there is one."""
    end: float

    @classmethod
    def of(cls, start: float, end: float) -> Self:
        """Return the times of a run from ``start`` to ``end``."""
        late_at = max(start, end - max(LEAST_SINGLE_TIME, SINGLE_SHARE * (end - start)))
        return cls(late_at, (late_at + end) / 2, end)

    def describe(self, tier: str | None) -> str:
        """Return the plan for people, in local time."""
        steps = [f"batches until {_clock(self.late_at)}"]
        if tier:
            steps.append(f"single calls of the tier {tier} until {_clock(self.tier_until)}")
        return ", then ".join((*steps, f"single calls for what is late, by {_clock(self.end)}"))


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


class Action(msgspec.Struct, frozen=True):
    """The next step."""

    kind: Kind
    """``over_budget``: the budget does not cover the next batch, and none is out."""
    record: BatchRecord | None = None
    until: float | None = None
    """When to stop waiting (Unix seconds), None: at an event."""


class InputState(msgspec.Struct, frozen=True):
    """The state of the input."""

    over: bool
    """All rows are in batches."""
    open: bool
    """Some rows are in unsealed batches."""


class ProviderBatchScheduler:
    """Decides the next step; the caller performs it and reports the outcome.

    Args:
        budget: dollars that all batches of the run may cost, None for no limit.
        late_at: from this Unix time on batches are cancelled and their rows sent singly.
    """

    def __init__(self, budget: float | None = None, late_at: float | None = None) -> None:
        self._budget = budget
        self._late_at = late_at
        self._quotas: dict[str, EnqueuedTokenQuota] = {}
        self._due: dict[str, float] = {}
        self._pauses: dict[str, float] = {}

    def quota(self, group: str) -> EnqueuedTokenQuota:
        """Return the quota of a group's model."""
        model = group.partition(" ")[2]
        return self._quotas.setdefault(model, EnqueuedTokenQuota())

    def next(
        self, records: Sequence[BatchRecord], feed: InputState, spent: float, now: float
    ) -> Action:
        """Return the next step for ``records``, the unfinished batches by number.

        Args:
            spent: dollars that the batches that are done have cost.
            now: Unix seconds.
        """
        for record in records:
            if record.state == "ended" and self._is_due(record, now):
                return Action("read", record)
        step = self._late_step(records, now) or self._send(records, spent, now)
        if step.kind != "wait":
            return step
        for record in records:
            if record.state == "waiting" and self._is_due(record, now):
                return Action("poll", record)
        if feed.over and feed.open and all(record.state != "ended" for record in records):
            return Action("seal")
        if not records and feed.over:
            return Action("over")
        dues = [self._due.get(record.label, now) for record in records if record.state != "sealed"]
        dues += [] if step.until is None else [step.until]
        if records and self._late_at is not None and now < self._late_at:
            dues.append(self._late_at)
        return Action("wait", until=min(dues, default=None))

    def _late_step(self, records: Sequence[BatchRecord], now: float) -> Action | None:
        """Return the next step with a batch that is late: all are cancelled, then sent singly."""
        if self._late_at is None or now < self._late_at:
            return None
        for record in records:
            out = record.state == "waiting" and record.cancelled_at is None
            if out and self._is_due(record, now):
                return Action("cancel", record)
        for record in records:
            if record.state == "sealed":
                return Action("singly", record)
        return None

    def _send(self, records: Sequence[BatchRecord], spent: float, now: float) -> Action:
        until: float | None = None
        over_budget = False
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
                over_budget = True
            else:
                return Action("send", record)
        out_now = any(record.state in (*OUT, "ended") for record in records)
        return Action(
            "over_budget" if over_budget and not out_now and until is None else "wait", until=until
        )

    def affords(self, records: Sequence[BatchRecord], most: float, spent: float) -> bool:
        """Return whether the budget covers ``most`` dollars beside spent and reserved ones."""
        if self._budget is None:
            return True
        reserved = sum(r.most_usd or 0.0 for r in records if r.state in (*OUT, "ended"))
        return spent + reserved + most <= self._budget

    @staticmethod
    def out(records: Sequence[BatchRecord], but: BatchRecord) -> int:
        """Return the tokens at the provider for the model of ``but``, without that batch."""
        return sum(
            record.tokens
            for record in records
            if record is not but and record.model == but.model and record.state in OUT
        )

    # --- what came of it --------------------------------------------------------------------------

    def succeeded(self, record: BatchRecord, now: float) -> None:
        """Record a successful step and schedule the next poll."""
        self._pauses.pop(record.label, None)
        if record.state != "waiting":
            self._due.pop(record.label, None)
            return
        since = record.cancelled_at or record.sent_at
        age = 0.0 if since is None else now - since
        self._due[record.label] = now + min(
            MAX_POLL_INTERVAL, max(MIN_POLL_INTERVAL, POLL_SHARE * age)
        )

    def failed(self, record: BatchRecord, now: float, retry_after: float | None = None) -> float:
        """Record a passing failure; return the seconds to wait.

        Args:
            retry_after: seconds that the server asked for; None: it named none.
        """
        pause = self._pauses.get(record.label, FIRST_PAUSE)
        self._pauses[record.label] = min(MAX_PAUSE, 2 * pause)
        wait = pause if retry_after is None else max(retry_after, 0.1)
        self._due[record.label] = now + wait
        return wait

    def cancelled(self, record: BatchRecord) -> None:
        """Record a cancellation; the batch is polled at once."""
        self._pauses.pop(record.label, None)
        self._due.pop(record.label, None)

    def refused(self, record: BatchRecord, message: str, out: int, now: float) -> None:
        """Record that a batch was refused for want of quota."""
        self.quota(record.group).refused(message, record.tokens, out, now)
        self._due.pop(record.label, None)

    def _is_due(self, record: BatchRecord, now: float) -> bool:
        return now >= self._due.get(record.label, now)


def _sooner(first: float | None, second: float) -> float:
    return second if first is None else min(first, second)
