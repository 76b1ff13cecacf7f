"""What the fleet knows of one endpoint while a run goes on."""

from __future__ import annotations

from bagent.backends.endpoint import Endpoint
from bagent.fleet.limiter import InFlightLimit

COOL_DOWN = 1.0
LONGEST_COOL_DOWN = 30.0


class EndpointState:
    """One endpoint's room and health; pure, times on the fleet's monotonic clock.

    Health is judged by the requests themselves. A failure to connect puts the endpoint under
    suspicion only if nothing it was sent since has been answered; a probe then decides, and until
    then (``doubted``) it is sent nothing more. While it is down it gets a probe after each
    cool-down, which doubles. ``probing`` says that a probe runs or is planned.
    """

    def __init__(self, endpoint: Endpoint, limit: InFlightLimit) -> None:
        self.endpoint = endpoint
        self.limit = limit
        self.in_flight = 0
        self.up = True
        self.probing = False
        self.doubted = False
        self.down_since: float | None = None
        self.last_good = float("-inf")
        self._cool_down = COOL_DOWN

    @property
    def room(self) -> int:
        """How many more rows it may be sent now."""
        if not self.up or self.doubted:
            return 0
        return max(0, self.limit.value - self.in_flight)

    @property
    def load(self) -> float:
        """The share of its limit that is in use."""
        return self.in_flight / self.limit.value

    def answered(self, now: float) -> None:
        """Some HTTP answer came, good or bad: somebody is there."""
        self.last_good = now
        self.up = True
        self.doubted = False
        self.down_since = None
        self._cool_down = COOL_DOWN

    def suspect(self, sent: float) -> bool:
        """Whether a request sent at ``sent`` that found no server puts the endpoint in doubt."""
        return self.last_good <= sent

    def went_down(self, now: float) -> float:
        """A probe failed: seconds to wait before the next one."""
        if self.down_since is None:
            self.down_since = now
        self.up = False
        wait = self._cool_down
        self._cool_down = min(LONGEST_COOL_DOWN, self._cool_down * 2)
        return wait
