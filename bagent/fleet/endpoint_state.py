"""What the fleet knows of one endpoint while a run goes on."""

from __future__ import annotations

from bagent.backends.endpoint import Endpoint
from bagent.fleet.account import Account
from bagent.fleet.call import Call, Carrier
from bagent.fleet.limiter import InFlightLimit
from bagent.fleet.load_signal import LoadSignal

COOL_DOWN = 1.0
LONGEST_COOL_DOWN = 30.0

REFUSALS = 3
"""So many refusals in a row of what others take (401, 403, 404) show a server set up wrongly."""

FAULTS = 8
"""So many failures in a row of any kind that is not the row's own show a sick server."""

FIRST_REST = 5.0
LONGEST_REST = 120.0
"""Seconds for which a sick server gets nothing, doubling: then one call tries it."""


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

    A server that answers, but badly and nothing else, is ``resting``; after that it is on
    ``trial``: one call at a time until one is answered well. ``stalled`` is one that takes requests
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
        self.carriers: dict[Carrier, None] = {}  # the oldest first
        self.up = True
        self.probing = False
        self.doubted = False
        self.resting = False
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
        self.looked_at = float("-inf")
        self.faults = 0
        self.refusals = 0
        self.turns = 0.0
        self.signal: LoadSignal | None = None
        self._cool_down = COOL_DOWN
        self._rest = FIRST_REST

    @property
    def usable(self) -> bool:
        """Whether it may be sent anything now."""
        return self.up and not (
            self.doubted
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
        for word in ("stalled", "resting", "doubted", "trial"):
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
        self.down_since = None
        self._cool_down = COOL_DOWN

    def served(self, now: float) -> None:
        """A call was answered well."""
        self.last_served = now
        self.faults = self.refusals = 0
        if self.trial:
            self.trial = False
            self._rest = FIRST_REST

    def failed(self, *, refused: bool) -> bool:
        """A call failed for no fault of its own; whether the endpoint should rest now.

        ``refused`` marks answers that say the server is set up otherwise than the job thinks.
        """
        if refused:
            self.refusals += 1
        else:
            self.faults += 1
        sick = self.refusals >= REFUSALS or self.faults >= FAULTS
        return sick or self.trial or self.stalled

    def rest(self) -> float:
        """Send it nothing for a while: returns the seconds; then :meth:`try_again`."""
        self.resting = True
        self.trial = False
        seconds = self._rest
        self._rest = min(LONGEST_REST, self._rest * 2)
        return seconds

    def try_again(self) -> None:
        """The rest is over: one call may try it."""
        self.resting = self.stalled = False
        self.trial = True
        self.faults = self.refusals = 0

    def broke(self, sent: float, now: float) -> bool:
        """A connection failed or broke; whether nothing more may be sent until a probe is back.

        ``sent`` is when its request was.
        """
        self.broke_at = now
        return self.endpoint.own or self.last_good <= sent

    def went_down(self, now: float) -> float:
        """A probe failed: seconds to wait before the next one."""
        if self.down_since is None:
            self.down_since = now
        self.up = False
        self.cold = True
        wait = self._cool_down
        self._cool_down = min(LONGEST_COOL_DOWN, self._cool_down * 2)
        return wait
