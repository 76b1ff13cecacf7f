"""What the fleet knows of one endpoint while a run goes on."""

from __future__ import annotations

from bagent.backends.endpoint import Endpoint
from bagent.backends.request import Request
from bagent.fleet.call import Call, InFlightRequest
from bagent.fleet.limits.account import Account
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.fleet.limits.load_feedback import LoadFeedback
from bagent.types import Failure

COOL_DOWN = 1.0
LONGEST_COOL_DOWN = 30.0

REFUSALS = 3
"""So many refusals in a row of what others take (401, 403, 404) show a server set up wrongly."""

FAULTS = 8
"""So many failures in a row of any kind that is not the row's own show a sick server."""

MOST_TOLERANCE = 16
"""A server that is shown to work may refuse up to so many times as much before it is asked again:
what it refuses are then rows."""

REMAINS = 0.5
"""Seconds after a connection broke in which the answer to an older request may be what a server
had sent before it died."""

ALL_TOLD = 120.0
"""Seconds of a wait that a server asks for, where nobody set a cap."""


class EndpointState:
    """One endpoint's room and health; pure, times on the fleet's monotonic clock.

    Health is judged by the requests themselves. A connection that fails or breaks has a probe
    decide, and until then an engine of the user's own is ``doubted``: it is sent nothing more, or
    a server that was killed would get all that it had a second time. A hosted one is doubted only
    if nothing it was sent since has been answered. An answer ends the doubt, unless it may be what
    a dead server left behind. While it is down it gets a probe after each cool-down, which
    doubles. ``probing`` says that a probe runs or is planned.

    A server that failed calls is asked for a proof that it works, a request as small as there is
    (``checking``); one that failed several in a row is a ``suspect`` until then, and is sent
    nothing. Where that fails too its circuit is open: it is
    ``resting``, for the ``fault``, until such a request is answered; then it may be on ``trial``:
    one call at a time until one is answered well. ``works_since`` is when the latest request was
    sent that was answered well, ``sample`` one of those calls.
    ``stalled`` is one that takes requests
    and answers none; ``leaving`` one that was taken out of the hostfile; ``learning`` one that is
    being asked how it wants groups; ``exclusive`` one on which a row runs that others died with.
    ``cold`` is one whose cache knows nothing of the run yet, ``warming`` the call that went ahead
    to it while others wait.
    ``looked_at`` is when it was last asked why it is silent.
    ``context`` is its context length in tokens, None where it is not known; one that is ``strict``
    refuses what would be longer with all of ``max_tokens``.
    ``signal`` judges an engine whose limit finds its own height, else it is None.

    Args:
        account: what its rate limits are counted against; None for one of its own.
        weight: its share beside others; 1 is usual.
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
        self.account = account or Account(None, None, ALL_TOLD)
        self.weight = weight
        self.in_flight = 0
        self.carriers: dict[InFlightRequest, None] = {}  # the oldest first
        self.up = True
        self.probing = False
        self.doubted = False
        self.checking = False
        self.suspect = False
        self.resting = False
        self.fault: Failure | None = None
        self.trial = False
        self.stalled = False
        self.leaving = False
        self.learning = False
        self.exclusive = False
        self.cold = True
        self.context: int | None = None
        self.strict = False
        self.warming: Call | None = None
        self.down_since: float | None = None
        self.last_good = float("-inf")
        self.broke_at = float("-inf")
        self.last_served = float("-inf")
        self.works_since = float("-inf")
        self.sample: Request | None = None
        self.looked_at = float("-inf")
        self.faults = 0
        self.refusals = 0
        self.turns = 0.0
        self.signal: LoadFeedback | None = None
        self._cool_down = COOL_DOWN
        self._rest = COOL_DOWN
        self._tolerance = 1

    @property
    def usable(self) -> bool:
        """Whether it may be sent anything now."""
        return self.up and not (
            self.doubted
            or self.suspect
            or self.resting
            or self.stalled
            or self.leaving
            or self.learning
            or self.exclusive
        )

    @property
    def health(self) -> str:
        """One word for tables and people."""
        if self.leaving:
            return "leaving"
        if not self.up:
            return "down"
        for word in ("stalled", "resting", "suspect", "doubted", "trial"):
            if getattr(self, word):
                return word
        return "ok"

    @property
    def room(self) -> int:
        """How many more rows it may be sent now."""
        if not self.usable or self.warming is not None:
            return 0
        most = 1 if self.trial else self.limit.value
        return max(0, most - self.in_flight)

    @property
    def waits_since(self) -> float | None:
        """When the oldest request was sent of whose answer nothing came yet; None: there is none.

        Answers that are passed on piece by piece wait for who asked, too: they prove nothing.
        """
        return next((one.started for one in self.carriers if not one.begun), None)

    @property
    def burst(self) -> int:
        """Rows of the largest request in flight; 0 where each row goes alone."""
        largest = max((len(carrier.group) for carrier in self.carriers), default=0)
        return largest if largest > 1 else 0

    @property
    def load(self) -> float:
        """The share of its limit that is in use, by its weight."""
        return self.in_flight / (self.limit.value * self.weight)

    def answered(self, now: float, sent: float | None = None) -> None:
        """Some HTTP answer came, good or bad, to a request sent at ``sent``: somebody is there."""
        if sent is not None and sent <= self.broke_at and now < self.broke_at + REMAINS:
            return
        self.last_good = now
        self.up = True
        self.doubted = False
        self.stalled = False
        if self.down_since is not None and not self.resting:
            self.fault = None
        self.down_since = None
        self._cool_down = COOL_DOWN

    def served(self, now: float, sent: float) -> None:
        """Take that a call sent at ``sent`` was answered well."""
        self.last_served = now
        self.works_since = max(self.works_since, sent)
        self.faults = self.refusals = 0
        self.trial = False
        self._rest = COOL_DOWN

    def failed(self, *, refused: bool) -> bool:
        """Count a failure that may be the server's; returns whether it should be asked for a proof.

        ``refused`` marks answers that say the server is set up otherwise than the job thinks.
        """
        if refused:
            self.refusals += 1
        else:
            self.faults += 1
        return self.keeps_failing or self.trial or self.stalled

    @property
    def keeps_failing(self) -> bool:
        """Whether it failed several calls in a row."""
        enough = self._tolerance
        return self.refusals >= REFUSALS * enough or self.faults >= FAULTS * enough

    def open_circuit(self, fault: Failure | None) -> float:
        """Send it nothing; returns the seconds after which it should be tried."""
        self.resting = True
        self.trial = False
        self.fault = fault
        self._tolerance = 1
        seconds = self._rest
        self._rest = min(LONGEST_COOL_DOWN, self._rest * 2)
        return seconds

    def close_circuit(self, sent: float, *, trial: bool) -> None:
        """Take that a request sent at ``sent`` showed that it works; ``trial``: one call at a time
        may try it."""
        self.checking = self.suspect = self.resting = self.stalled = False
        self.fault = None
        self.trial = trial
        self.works_since = max(self.works_since, sent)
        self.faults = self.refusals = 0
        self._tolerance = min(MOST_TOLERANCE, self._tolerance * 2)

    def broke(self, sent: float, now: float) -> bool:
        """A connection failed or broke; whether nothing more may be sent until a probe is back.

        ``sent`` is when its request was.
        """
        self.broke_at = now
        return self.endpoint.own or self.last_good <= sent

    def went_down(self, now: float, fault: Failure) -> float:
        """Take that a probe failed with ``fault``; returns the seconds until the next one."""
        self.fault = fault
        if self.down_since is None:
            self.down_since = now
        self.up = False
        self.cold = True
        wait = self._cool_down
        self._cool_down = min(LONGEST_COOL_DOWN, self._cool_down * 2)
        return wait
