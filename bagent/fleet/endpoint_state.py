"""Endpoints: health, capacity and circuit breaker of each, and the one for the next request."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from enum import Enum, IntEnum

from bagent.backends.endpoint import Endpoint
from bagent.backends.request import Request
from bagent.fleet.call import Call, InFlightRequest
from bagent.fleet.limits.account import Account
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.fleet.limits.load_feedback import LoadFeedback
from bagent.types import Failure

FIRST_COOL_DOWN = 1.0
MAX_COOL_DOWN = 30.0
MAX_OWN_COOL_DOWN = 5.0
"""The same between the probes of an own engine that does not answer: it may be started again at any
time, and a refused connection costs nothing."""

REFUSAL_THRESHOLD = 3
"""Consecutive refusals (401, 403, 404) after which a server is taken to be misconfigured."""

FAILURE_THRESHOLD = 8
"""Consecutive failures of other kinds after which a server is suspected."""

MAX_TOLERANCE = 16
"""Each passed check doubles the thresholds, up to this factor: the rows are then at fault."""

LATE_ANSWER_SECONDS = 0.5
"""For so long after a connection broke, an answer to an older request may come from a server that
has died since."""

SHORT_WAIT = 5.0
"""Seconds for which a call that failed elsewhere waits for the account of an endpoint, at most."""

DEFAULT_RETRY_AFTER_MAX = 120.0
"""Cap on a server's Retry-After in seconds, where no other is set."""

CHOICES = 8
"""How many endpoints with room are compared; the least loaded is selected."""


class EndpointStatus(IntEnum):
    """State of an endpoint, by severity, in the terms of a circuit breaker."""

    __hash__ = int.__hash__  # that of an enum's name takes longer

    UP = 0
    HALF_OPEN = 1
    """One call at a time until one is answered well."""
    SUSPECT = 2
    """Sent nothing until a check has shown whether it serves the model."""
    PROBING = 3
    """Sent nothing until a probe has shown whether it is reachable."""
    OPEN = 4
    """Sent nothing: it fails checks."""
    UNRESPONSIVE = 5
    """Accepts requests and answers none."""
    DOWN = 6
    """Answers no probe."""
    LEAVING = 7
    """Removed from the hostfile; its requests in flight finish."""


_DISPLAYED = {
    EndpointStatus.UP: "ok",
    EndpointStatus.HALF_OPEN: "half open",
    EndpointStatus.SUSPECT: "suspect",
    EndpointStatus.PROBING: "suspect",
    EndpointStatus.OPEN: "circuit open",
    EndpointStatus.UNRESPONSIVE: "unresponsive",
    EndpointStatus.DOWN: "down",
    EndpointStatus.LEAVING: "leaving",
}

_REACHABILITY = frozenset(
    {EndpointStatus.PROBING, EndpointStatus.UNRESPONSIVE, EndpointStatus.DOWN}
)
"""Conditions that any HTTP answer ends."""

_CIRCUIT = frozenset({EndpointStatus.HALF_OPEN, EndpointStatus.SUSPECT, EndpointStatus.OPEN})
"""Conditions that a check or a call that is answered well ends. At most one of them holds."""


class CheckResult(Enum):
    """Outcome for the calls that were suspended until an endpoint was checked."""

    WORKS = "works"
    RECOVERED = "recovered"  # it works again after several failures in a row
    BROKEN = "broken"


class EndpointState:
    """What the fleet knows about one endpoint; pure, times on the fleet's monotonic clock.

    Health is judged by the requests themselves:

    - A connection that fails or breaks starts a probe. Until the probe is back an engine of the
      user's own is sent nothing. A hosted endpoint is, if it has answered a later request.
    - An endpoint that does not answer the probe is down, and is probed after a doubling cool-down.
    - An endpoint that fails several calls in a row is suspected, and must pass a check, which is
      the smallest possible request. If it fails that too, its circuit opens until a check passes.

    Several conditions may hold at once, such as a server that is down while its circuit is open.
    Its status is the most severe of them.

    Args:
        account: counts its rate limits; None for an account of its own.
        weight: its share relative to others.
        feedback: adapts the limit of an own engine to its load.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        limit: InFlightLimit,
        account: Account | None = None,
        *,
        weight: float = 1.0,
        feedback: LoadFeedback | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.name = endpoint.name
        self.limit = limit
        self.account = account or Account(None, None, DEFAULT_RETRY_AFTER_MAX)
        self.weight = weight
        self.in_flight = 0
        self.requests: dict[InFlightRequest, None] = {}  # oldest first
        self._before_trial: frozenset[InFlightRequest] = frozenset()
        """Requests in flight when it became half open."""
        self.turns = 0.0  # rows sent so far, by weight

        self.status = EndpointStatus.UP  # the most severe of its conditions
        self._serves = True  # its status allows calls
        self._conditions = {EndpointStatus.UP}
        self.fault: Failure | None = None  # why it is down, or its circuit open

        self.detecting_batching = False  # is asked how it accepts lists of requests
        self.exclusive = False  # runs a row with which other endpoints died
        self.cold = True  # its prefix cache holds nothing of the run
        self.warming: Call | None = None  # fills the prefix cache while others wait
        self.context: int | None = None  # context length in tokens, if known
        self.counts_after = float("-inf")  # when it may be asked for token counts again
        self.strict_context = False  # refuses a prompt that with all of max_tokens exceeds it
        self.feedback = feedback

        self.down_since: float | None = None
        self.last_answer = float("-inf")
        self.last_served = float("-inf")
        self.works_since = float("-inf")  # start of the latest request that was answered well
        self.broke_at = float("-inf")
        self.silence_probed_at = float("-inf")
        self.sample: Request | None = None  # a request that it served, for checks
        self.failures = 0
        self.refusals = 0
        self.lost_attempts: Counter[Call] = Counter()
        """Counted attempts that calls to retry lost by its failures since the latest success."""
        self._probe_cool_down = FIRST_COOL_DOWN
        self._check_cool_down = FIRST_COOL_DOWN
        self._tolerance = 1

    def _set(self, condition: EndpointStatus) -> None:
        """Add a condition; one of the circuit replaces the one before."""
        if condition in _CIRCUIT:
            self._conditions -= _CIRCUIT
            self._before_trial = frozenset(self.requests)
        self._conditions.add(condition)
        self._update_status()

    def _clear(self, conditions: frozenset[EndpointStatus]) -> None:
        self._conditions -= conditions
        self._update_status()

    def _update_status(self) -> None:
        self.status = max(self._conditions)
        self._serves = self.status <= EndpointStatus.HALF_OPEN

    @property
    def health(self) -> str:
        """Its status as displayed."""
        first = self.status is EndpointStatus.PROBING and self.last_answer == float("-inf")
        return "starting" if first else _DISPLAYED[self.status]

    @property
    def up(self) -> bool:
        """Whether it answers probes, as far as is known."""
        return EndpointStatus.DOWN not in self._conditions

    @property
    def unresponsive(self) -> bool:
        """Whether it accepts requests and answers none."""
        return EndpointStatus.UNRESPONSIVE in self._conditions

    @property
    def leaving(self) -> bool:
        """Whether it was removed from the hostfile."""
        return EndpointStatus.LEAVING in self._conditions

    @property
    def circuit_open(self) -> bool:
        """Whether its circuit is open."""
        return EndpointStatus.OPEN in self._conditions

    @property
    def may_serve(self) -> bool:
        """Whether it serves calls now, or may do so soon."""
        return self.up and not self.circuit_open and not self.leaving

    @property
    def is_half_open(self) -> bool:
        """Whether it gets one call at a time."""
        return EndpointStatus.HALF_OPEN in self._conditions

    @property
    def is_suspect(self) -> bool:
        """Whether it gets nothing until a check has passed."""
        return EndpointStatus.SUSPECT in self._conditions

    @property
    def usable(self) -> bool:
        """Whether calls may be sent to it now."""
        return self._serves and not (self.detecting_batching or self.exclusive)

    @property
    def room(self) -> int:
        """How many more rows it may be sent now."""
        if not self._serves or self.detecting_batching or self.exclusive:
            return 0
        if self.warming is not None:
            return 0
        room = max(0, self.limit.value - self.in_flight)
        if self.status:  # half open: one call at a time, beside those that were sent before
            return min(room, int(self.requests.keys() <= self._before_trial))
        return room

    def has_room_soon(self, now: float) -> bool:
        """Return whether it is usable and its account lets it start a request soon."""
        return self.usable and self.account.wait(now, 0) <= SHORT_WAIT

    @property
    def oldest_wait(self) -> float | None:
        """When the oldest request without an answer was sent; None if there is none.

        Streams are left out: they also wait for the client that reads them.
        """
        return next((req.started for req in self.requests if not req.streaming), None)

    @property
    def largest_batch(self) -> int:
        """Rows of the largest request in flight; 0 if each row goes alone."""
        largest = max((len(request.calls) for request in self.requests), default=0)
        return largest if largest > 1 else 0

    @property
    def load(self) -> float:
        """The share of its limit in use, by weight."""
        return self.in_flight / (self.limit.value * self.weight)

    def on_answer(self, now: float, sent: float | None = None) -> None:
        """Record an HTTP answer, good or bad, to a request sent at ``sent``: it is reachable."""
        late = (
            sent is not None and sent <= self.broke_at and now < self.broke_at + LATE_ANSWER_SECONDS
        )
        if late:
            return
        self.last_answer = now
        if self.status and self.status >= EndpointStatus.PROBING:
            self._clear(_REACHABILITY)
        if self.down_since is not None and not self.circuit_open:
            self.fault = None
        self.down_since = None
        self._probe_cool_down = FIRST_COOL_DOWN

    def on_success(self, now: float, sent: float) -> None:
        """Record that a call sent at ``sent`` was answered well."""
        self.last_served = now
        self._works(sent)
        if self.status and self.is_half_open:
            self._clear(_CIRCUIT)
        self._check_cool_down = FIRST_COOL_DOWN

    def on_failure(self, *, refused: bool) -> bool:
        """Count a failure that may be the server's; return whether a check is due.

        ``refused``: the server contradicts the job's configuration (key, model, route).
        """
        if refused:
            self.refusals += 1
        else:
            self.failures += 1
        return self.keeps_failing or self.is_half_open or self.unresponsive

    def give_back_attempts(self) -> None:
        """Take back the attempts that its failures since the latest success cost calls."""
        for call, cost in self.lost_attempts.items():
            call.counted_attempts = max(0, call.counted_attempts - cost)
            call.failed_at = None
        self.lost_attempts.clear()

    @property
    def keeps_failing(self) -> bool:
        """Whether it failed several calls in a row."""
        return (
            self.refusals >= REFUSAL_THRESHOLD * self._tolerance
            or self.failures >= FAILURE_THRESHOLD * self._tolerance
        )

    def await_probe(self) -> None:
        """Send it nothing until it has answered a probe or a request."""
        self._set(EndpointStatus.PROBING)

    def suspect(self) -> None:
        """Send it nothing until a check has passed."""
        if not self.circuit_open:
            self._set(EndpointStatus.SUSPECT)

    def half_open(self) -> None:
        """Send it one call at a time, unless its circuit is open or a check is due."""
        if not self._conditions & _CIRCUIT:
            self._set(EndpointStatus.HALF_OPEN)

    def on_silence(self) -> None:
        """Record that it accepts requests and answers none."""
        self._set(EndpointStatus.UNRESPONSIVE)

    def end_silence(self) -> None:
        """Record that it is no longer merely unresponsive: it is dead."""
        self._clear(frozenset({EndpointStatus.UNRESPONSIVE}))

    def leave(self) -> None:
        """Send it nothing more."""
        self._set(EndpointStatus.LEAVING)

    def take_over(self, former: EndpointState) -> None:
        """Take the requests in flight of its former state: the server works on them still."""
        for request in former.requests:
            request.state = self
        self.requests, self.in_flight = former.requests, former.in_flight
        self.exclusive = former.exclusive
        former.requests, former.in_flight = {}, 0

    def open_circuit(self, fault: Failure | None) -> float:
        """Send it nothing; return the seconds until the next check."""
        self._set(EndpointStatus.OPEN)
        self.fault = fault
        self._tolerance = 1
        seconds = self._check_cool_down
        self._check_cool_down = min(MAX_COOL_DOWN, seconds * 2)
        return seconds

    def close_circuit(self, sent: float, *, half_open: bool) -> None:
        """Record that a check sent at ``sent`` passed; ``half_open``: one call goes first."""
        self._clear(_CIRCUIT | {EndpointStatus.UNRESPONSIVE})
        if half_open:
            self._set(EndpointStatus.HALF_OPEN)
        self.fault = None
        self._works(sent)
        self._tolerance = min(MAX_TOLERANCE, self._tolerance * 2)

    def _works(self, sent: float) -> None:
        self.works_since = max(self.works_since, sent)
        self.failures = self.refusals = 0
        self.lost_attempts.clear()

    def on_disconnect(self, sent: float, now: float) -> bool:
        """Record a failed or broken connection; return whether calls must wait for a probe.

        ``sent`` is when the request started.
        """
        self.broke_at = now
        return self.endpoint.own or self.last_answer <= sent

    def on_down(self, now: float, fault: Failure) -> float:
        """Record a failed probe; return the seconds until the next one."""
        self.fault = fault
        if self.down_since is None:
            self.down_since = now
        self._clear(frozenset({EndpointStatus.PROBING}))
        self._set(EndpointStatus.DOWN)
        self.cold = True
        seconds = self._probe_cool_down
        longest = MAX_OWN_COOL_DOWN if self.endpoint.own else MAX_COOL_DOWN
        self._probe_cool_down = min(longest, seconds * 2)
        return seconds


class EndpointPool:
    """All endpoints of a fleet, and a queue of those that may have room.

    It selects in constant time for any number of them.

    Plain round robin would let a slow endpoint collect all of a run's concurrency. So the least
    loaded of the next few is selected, and of equals the one with the fewest turns by weight.
    """

    def __init__(self, states: Sequence[EndpointState]) -> None:
        self.states: list[EndpointState] = []
        self.limit = 0  # rows that all endpoints together may have in flight
        self._limits: dict[EndpointState, int] = {}
        self._by_name: dict[str, EndpointState] = {}
        self._queue: deque[EndpointState] = deque()
        self._queued: set[EndpointState] = set()
        self._parked: dict[Account, list[EndpointState]] = {}
        self.add(*states)

    @property
    def up(self) -> int:
        """How many endpoints answer."""
        return sum(1 for state in self.states if state.up)

    @property
    def available(self) -> int:
        """How many endpoints may have room."""
        return len(self._queue)

    @property
    def parked(self) -> bool:
        """Whether endpoints wait for their account."""
        return bool(self._parked)

    def get(self, name: str) -> EndpointState | None:
        """Return the endpoint of that name."""
        return self._by_name.get(name)

    def add(self, *states: EndpointState) -> None:
        """Add endpoints, with as many turns as the one that had the fewest."""
        turns = min((other.turns for other in self.states), default=0.0)
        for state in states:
            state.turns = turns
            self.states.append(state)
            self._by_name[state.name] = state
            self._limits[state] = 0
            self.update(state)

    def remove(self, state: EndpointState) -> None:
        """Remove an endpoint that has nothing in flight."""
        self.states.remove(state)
        if self._by_name.get(state.name) is state:
            del self._by_name[state.name]
        self.limit -= self._limits.pop(state)
        if state in self._queued:
            self._queued.discard(state)
            self._queue.remove(state)
        for parked in self._parked.values():
            if state in parked:
                parked.remove(state)

    def update(self, state: EndpointState) -> None:
        """Queue an endpoint that may have room again, and follow its limit."""
        limit = self._limits.get(state)
        if limit is None:
            return
        self.limit += state.limit.value - limit
        self._limits[state] = state.limit.value
        if state not in self._queued:
            self._queued.add(state)
            self._queue.append(state)

    def has_alternative(self, state: EndpointState) -> bool:
        """Return whether another endpoint is usable."""
        return any(other is not state and other.usable for other in self.states)

    def unpark(self, now: float) -> float | None:
        """Queue the endpoints whose account allows requests; return the seconds until the next."""
        soonest: float | None = None
        for account in list(self._parked):
            wait = account.wait(now, 0)
            if wait > 0:
                soonest = wait if soonest is None else min(soonest, wait)
                continue
            for state in self._parked.pop(account):
                self.update(state)
        return soonest

    def select(self, now: float, other_than: EndpointState | None = None) -> EndpointState | None:
        """Return the endpoint for the next request, None if none has room.

        It is another one than ``other_than``. Those without room leave the queue until they are
        updated; those whose account has to wait are parked.
        """
        passed: list[EndpointState] = []
        best: EndpointState | None = None
        least = 0.0
        while self._queue and len(passed) < CHOICES - 1:
            state = self._queue.popleft()
            if state is other_than:
                passed.append(state)
                continue
            if state.room <= 0:
                self._queued.discard(state)
                continue
            if state.account.wait(now, 0) > 0:
                self._queued.discard(state)
                self._parked.setdefault(state.account, []).append(state)
                continue
            load = state.load
            if best is None:
                best, least = state, load
            elif load < least or (load == least and state.turns < best.turns):
                passed.append(best)
                best, least = state, load
            else:
                passed.append(state)
        self._queue.extend(passed)
        if best is not None:
            self._queue.append(best)  # behind the others, so that equals take turns
        return best

    def skip(self, state: EndpointState) -> None:
        """Drop the endpoint that was selected last from the queue until it is updated."""
        if self._queue and self._queue[-1] is state:
            self._queue.pop()
            self._queued.discard(state)
