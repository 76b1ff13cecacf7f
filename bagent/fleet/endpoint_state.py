"""The health, capacity and circuit breaker of one endpoint."""

from __future__ import annotations

from enum import Enum

from bagent.backends.endpoint import Endpoint
from bagent.backends.request import Request
from bagent.fleet.call import Call, InFlightRequest
from bagent.fleet.limits.account import Account
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.fleet.limits.load_feedback import LoadFeedback
from bagent.types import Failure

FIRST_COOL_DOWN = 1.0
MAX_COOL_DOWN = 30.0

REFUSAL_THRESHOLD = 3
"""Consecutive refusals (401, 403, 404) after which a server is taken to be misconfigured."""

FAILURE_THRESHOLD = 8
"""Consecutive failures of other kinds after which a server is suspected."""

MAX_TOLERANCE = 16
"""Each passed check doubles the thresholds, up to this factor: the rows are then at fault."""

LATE_ANSWER_SECONDS = 0.5
"""For so long after a connection broke, an answer to an older request may come from a server that
has died since."""

DEFAULT_RETRY_AFTER_MAX = 120.0
"""Cap on a server's Retry-After in seconds, where no other is set."""


class EndpointStatus(Enum):
    """State of an endpoint; the circuit breaker's states are UP, SUSPECT, OPEN and HALF_OPEN."""

    STARTING = "starting"
    """Added and not probed yet."""
    UP = "ok"
    SUSPECT = "suspect"
    """Sent nothing until a probe or check has shown whether it works."""
    OPEN = "circuit open"
    """Sent nothing: it fails checks, or answers no probe."""
    HALF_OPEN = "half open"
    """One call at a time until one is answered well."""
    UNRESPONSIVE = "unresponsive"
    """Accepts requests and answers none."""
    LEAVING = "leaving"
    """Removed from the hostfile; its requests in flight finish."""


class EndpointState:
    """What the fleet knows about one endpoint; pure, times on the fleet's monotonic clock.

    Health is judged by the requests themselves:

    - A connection that fails or breaks starts a probe. Until the probe is back an engine of the
      user's own is sent nothing. A hosted endpoint is, if it has answered a later request.
    - An endpoint that does not answer the probe is down, and is probed after a doubling cool-down.
    - An endpoint that fails several calls in a row is suspected, and must pass a check, which is
      the smallest possible request. If it fails that too, its circuit opens until a check passes.

    Args:
        account: counts its rate limits; None for an account of its own.
        weight: its share relative to others.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        limit: InFlightLimit,
        account: Account | None = None,
        *,
        weight: float = 1.0,
    ) -> None:
        self.endpoint = endpoint
        self.name = endpoint.name
        self.limit = limit
        self.account = account or Account(None, None, DEFAULT_RETRY_AFTER_MAX)
        self.weight = weight
        self.in_flight = 0
        self.requests: dict[InFlightRequest, None] = {}  # oldest first
        self.turns = 0.0  # rows sent so far, by weight

        self.circuit = EndpointStatus.UP
        self.up = True  # answers probes
        self.unresponsive = False
        self.leaving = False
        self.awaiting_probe = False
        self.probe_scheduled = False
        self.check_running = False
        self.fault: Failure | None = None  # why it is down, or its circuit open

        self.detecting_batching = False  # is asked how it accepts lists of requests
        self.exclusive = False  # runs a row with which other endpoints died
        self.cold = True  # its prefix cache holds nothing of the run
        self.warming: Call | None = None  # fills the prefix cache while others wait
        self.context: int | None = None  # context length in tokens, if known
        self.strict_context = False  # refuses a prompt that with all of max_tokens exceeds it
        self.feedback: LoadFeedback | None = None  # adapts the limit of an own engine

        self.down_since: float | None = None
        self.last_answer = float("-inf")
        self.last_served = float("-inf")
        self.works_since = float("-inf")  # start of the latest request that was answered well
        self.broke_at = float("-inf")
        self.silence_probed_at = float("-inf")
        self.sample: Request | None = None  # a request that it served, for checks
        self.failures = 0
        self.refusals = 0
        self._probe_cool_down = FIRST_COOL_DOWN
        self._check_cool_down = FIRST_COOL_DOWN
        self._tolerance = 1

    @property
    def status(self) -> EndpointStatus:
        """Its most severe state."""
        if self.leaving:
            return EndpointStatus.LEAVING
        if not self.up:
            return EndpointStatus.OPEN
        if self.unresponsive:
            return EndpointStatus.UNRESPONSIVE
        if self.awaiting_probe and self.circuit is not EndpointStatus.OPEN:
            first = self.last_answer == float("-inf")
            return EndpointStatus.STARTING if first else EndpointStatus.SUSPECT
        return self.circuit

    @property
    def health(self) -> str:
        """Its status as displayed."""
        down = not self.up and not self.leaving
        return "down" if down else self.status.value

    @property
    def usable(self) -> bool:
        """Whether calls may be sent to it now."""
        circuit = self.circuit
        return (
            (circuit is EndpointStatus.UP or circuit is EndpointStatus.HALF_OPEN)
            and self.up
            and not (self.awaiting_probe or self.unresponsive or self.leaving)
            and not (self.detecting_batching or self.exclusive)
        )

    @property
    def circuit_open(self) -> bool:
        """Whether its circuit is open."""
        return self.circuit is EndpointStatus.OPEN

    @property
    def room(self) -> int:
        """How many more rows it may be sent now."""
        if not self.usable or self.warming is not None:
            return 0
        limit = 1 if self.circuit is EndpointStatus.HALF_OPEN else self.limit.value
        return max(0, limit - self.in_flight)

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
        self.up = True
        self.awaiting_probe = False
        self.unresponsive = False
        if self.down_since is not None and not self.circuit_open:
            self.fault = None
        self.down_since = None
        self._probe_cool_down = FIRST_COOL_DOWN

    def on_success(self, now: float, sent: float) -> None:
        """Record that a call sent at ``sent`` was answered well."""
        self.last_served = now
        self._works(sent)
        if self.circuit is EndpointStatus.HALF_OPEN:
            self.circuit = EndpointStatus.UP
        self._check_cool_down = FIRST_COOL_DOWN

    def on_failure(self, *, refused: bool) -> bool:
        """Count a failure that may be the server's; return whether a check is due.

        ``refused``: the server contradicts the job's configuration (key, model, route).
        """
        if refused:
            self.refusals += 1
        else:
            self.failures += 1
        half_open = self.circuit is EndpointStatus.HALF_OPEN
        return self.keeps_failing or half_open or self.unresponsive

    @property
    def keeps_failing(self) -> bool:
        """Whether it failed several calls in a row."""
        return (
            self.refusals >= REFUSAL_THRESHOLD * self._tolerance
            or self.failures >= FAILURE_THRESHOLD * self._tolerance
        )

    def suspect(self) -> None:
        """Send it nothing until a check has passed."""
        if not self.circuit_open:
            self.circuit = EndpointStatus.SUSPECT

    def half_open(self) -> None:
        """Send it one call at a time, unless its circuit is open or a check is due."""
        if self.circuit is EndpointStatus.UP:
            self.circuit = EndpointStatus.HALF_OPEN

    def open_circuit(self, fault: Failure | None) -> float:
        """Send it nothing; return the seconds until the next check."""
        self.circuit = EndpointStatus.OPEN
        self.fault = fault
        self._tolerance = 1
        seconds = self._check_cool_down
        self._check_cool_down = min(MAX_COOL_DOWN, seconds * 2)
        return seconds

    def close_circuit(self, sent: float, *, half_open: bool) -> None:
        """Record that a check sent at ``sent`` passed; ``half_open``: one call goes first."""
        self.circuit = EndpointStatus.HALF_OPEN if half_open else EndpointStatus.UP
        self.check_running = self.unresponsive = False
        self.fault = None
        self._works(sent)
        self._tolerance = min(MAX_TOLERANCE, self._tolerance * 2)

    def _works(self, sent: float) -> None:
        self.works_since = max(self.works_since, sent)
        self.failures = self.refusals = 0

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
        self.up = False
        self.cold = True
        seconds = self._probe_cool_down
        self._probe_cool_down = min(MAX_COOL_DOWN, seconds * 2)
        return seconds
