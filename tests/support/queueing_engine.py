"""An engine that queues, and a client that keeps its limit full: in steps of a clock of its own."""

from __future__ import annotations

from collections import deque
from random import Random

import msgspec

from bagent.backends.engines.metrics import EngineLoad
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.fleet.limits.load_feedback import POLL_SECONDS, LoadFeedback, apply_verdict

STEP = 0.05  # seconds
ALONE = 0.01  # seconds per token of a request that runs alone
CROWDED = 2.5  # times as long it takes in a full batch


class Job(msgspec.Struct):
    """One request: its tokens still to make, and when it was sent and began to answer."""

    left: float
    sent: float
    first_token: float | None = None


class Engine:
    """Runs ``capacity`` requests at once, first come first served; a fuller batch is slower."""

    def __init__(self, capacity: int, random: Random) -> None:
        self.capacity = capacity
        self.full = capacity
        self.running: list[Job] = []
        self.waiting: deque[Job] = deque()
        self.made = 0.0
        self._random = random

    def token_seconds(self, batch: int) -> float:
        """Seconds per token and request in a batch of ``batch``."""
        return ALONE * (1 + (CROWDED - 1) * batch / self.full)

    @property
    def best(self) -> float:
        """Tokens per second with every place in use."""
        return self.capacity / self.token_seconds(self.capacity)

    def send(self, now: float) -> None:
        """Take a request."""
        self.waiting.append(Job(self._random.randint(50, 300), now))

    def step(self, now: float) -> list[Job]:
        """Go on to ``now``; returns the requests that ended."""
        while self.waiting and len(self.running) < self.capacity:
            self.running.append(self.waiting.popleft())
        tokens = STEP / self.token_seconds(len(self.running))
        for job in self.running:
            if job.first_token is None:
                job.first_token = now
            self.made += min(tokens, job.left)
            job.left -= tokens
        ended = [job for job in self.running if job.left <= 0]
        self.running = [job for job in self.running if job.left > 0]
        return ended


class Client:
    """Keeps ``limit`` requests at an engine and looks at it every :data:`POLL_SECONDS`.

    Args:
        told: whether the engine tells what runs and waits.
    """

    def __init__(self, engine: Engine, limit: InFlightLimit, *, told: bool = True) -> None:
        self.engine = engine
        self.limit = limit
        self.feedback = LoadFeedback()
        self.in_flight = 0
        self.now = 0.0
        self.limits: list[tuple[float, int]] = []
        self._told = told
        self._poll_at = 0.0

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
                self.engine.send(self.now)
            for job in self.engine.step(self.now):
                self.limit.on_success(1, self.in_flight)
                self.in_flight -= 1
                first = (job.first_token or 0.0) - job.sent
                self.feedback.add_latency(job.sent, self.now - job.sent, first)
            self.limits.append((self.now, self.limit.value))

    def _load(self) -> EngineLoad | None:
        if not self._told:
            return None
        return EngineLoad(self.now, len(self.engine.running), len(self.engine.waiting))

    def between(self, start: float, end: float) -> list[int]:
        """The limits of that time."""
        return [value for at, value in self.limits if start < at <= end]
