"""An engine that queues, and a client that keeps its limit full: in steps of a clock of its own."""

from __future__ import annotations

from collections import deque
from random import Random

import msgspec

from bagent.backends.engines.metrics import EngineLoad
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.fleet.limits.load_feedback import POLL_SECONDS, LoadFeedback, apply_verdict

STEP = 0.05  # seconds


class Job(msgspec.Struct):
    """One request: its tokens still to make, and when it was sent and began to answer."""

    owner: int
    left: float
    sent: float
    first_token: float | None = None


class Engine:
    """Runs ``capacity`` requests at once, first come first served; a fuller batch is slower.

    Args:
        capacity: its places.
        tokens: the fewest and the most tokens of an answer.
        alone: seconds per token of a request that runs alone; in a full batch it is
            ``crowded`` times as long.
    """

    def __init__(
        self,
        capacity: int,
        random: Random,
        *,
        tokens: tuple[int, int] = (50, 300),
        alone: float = 0.01,
        crowded: float = 2.5,
    ) -> None:
        self.capacity = capacity
        self.full = capacity
        self.running: list[Job] = []
        self.waiting: deque[Job] = deque()
        self.made = 0.0
        self._now = 0.0
        self._ended: dict[int, list[Job]] = {}
        self._random = random
        self._tokens = tokens
        self._alone = alone
        self._crowded = crowded

    def token_seconds(self, batch: float) -> float:
        """Seconds per token and request in a batch of ``batch``."""
        return self._alone * (1 + (self._crowded - 1) * batch / self.full)

    @property
    def best(self) -> float:
        """Tokens per second with every place in use."""
        return self.capacity / self.token_seconds(self.capacity)

    def send(self, owner: int, now: float) -> None:
        """Take a request of the client ``owner``."""
        self.waiting.append(Job(owner, self._random.randint(*self._tokens), now))

    def ended(self, owner: int, now: float) -> list[Job]:
        """The requests of ``owner`` that ended since it last asked; runs on to ``now``."""
        if now > self._now:
            self._now = now
            self._step(now)
        return self._ended.pop(owner, [])

    def _step(self, now: float) -> None:
        while self.waiting and len(self.running) < self.capacity:
            self.running.append(self.waiting.popleft())
        if not self.running:
            return
        tokens = STEP / self.token_seconds(len(self.running))
        for job in self.running:
            if job.first_token is None:
                job.first_token = now
            self.made += min(tokens, job.left)
            job.left -= tokens
            if job.left <= 0:
                self._ended.setdefault(job.owner, []).append(job)
        self.running = [job for job in self.running if job.left > 0]


class Client:
    """Keeps ``limit`` requests at an engine and looks at it every :data:`POLL_SECONDS`.

    Args:
        told: whether the engine tells what runs and waits.
        streamed: whether the client sees first tokens.
        owner: its number, where several clients share the engine.
        now: when it starts.
    """

    def __init__(
        self,
        engine: Engine,
        limit: InFlightLimit,
        *,
        told: bool = True,
        streamed: bool = True,
        owner: int = 0,
        now: float = 0.0,
    ) -> None:
        self.engine = engine
        self.limit = limit
        self.feedback = LoadFeedback()
        self.in_flight = 0
        self.now = now
        self.limits: list[tuple[float, int]] = []
        self._owner = owner
        self._told = told
        self._streamed = streamed
        self._poll_at = now

    def run(self, until: float) -> None:
        """Go on until the clock shows ``until`` seconds."""
        while self.now < until:
            self.now += STEP
            if self.now >= self._poll_at:
                self._poll_at += POLL_SECONDS
                verdict = self.feedback.judge(self.now, self._load(), self.in_flight)
                apply_verdict(self.limit, verdict, self.now)
            while self.in_flight < self.limit.value:
                self.in_flight += 1
                self.engine.send(self._owner, self.now)
            for job in self.engine.ended(self._owner, self.now):
                self.limit.on_success(1, self.in_flight)
                self.in_flight -= 1
                first = (job.first_token or 0.0) - job.sent if self._streamed else None
                self.feedback.add_latency(job.sent, self.now - job.sent, first)
            self.limits.append((self.now, self.limit.value))

    def _load(self) -> EngineLoad | None:
        if not self._told:
            return None
        return EngineLoad(
            at=self.now, running=len(self.engine.running), waiting=len(self.engine.waiting)
        )

    def between(self, start: float, end: float) -> list[int]:
        """The limits of that time."""
        return [value for at, value in self.limits if start < at <= end]
