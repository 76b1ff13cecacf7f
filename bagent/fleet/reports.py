"""What a fleet reports: notices for people, and samples of its endpoints."""

from __future__ import annotations

from collections.abc import Callable

from bagent.backends.engines.metrics import EngineLoad
from bagent.clocks import unix
from bagent.fleet.endpoint_state import EndpointState
from bagent.types import EndpointSample

MAX_NOTICES = 12
"""Notices about endpoints that are shown in full; further ones are counted."""

NOTICE_SUMMARY_SECONDS = 30.0
"""How often the count is shown."""


class FleetReports:
    """Passes on notices and samples.

    Args:
        notice: receives messages for people.
        on_sample: receives an endpoint's state whenever it changes.
        clock: the fleet's clock.
    """

    def __init__(
        self,
        notice: Callable[[str], None],
        on_sample: Callable[[EndpointSample], None] | None,
        clock: Callable[[], float],
    ) -> None:
        self._notice = notice
        self._on_sample = on_sample
        self._clock = clock
        self._notices = 0
        self._suppressed = 0
        self._noticed_at = clock()

    def notify(self, message: str) -> None:
        """Show a notice about an endpoint, or count it if there were many."""
        self._notices += 1
        if self._notices <= MAX_NOTICES:
            self._notice(message)
            self._noticed_at = self._clock()
        else:
            self._suppressed += 1

    def summarize(self, down: int) -> None:
        """Show how many notices were counted, now and then; ``down`` is how many endpoints are."""
        now = self._clock()
        if self._suppressed and now - self._noticed_at > NOTICE_SUMMARY_SECONDS:
            self._notice(f"{self._suppressed} more notices of endpoints; {down} are down now")
            self._suppressed, self._noticed_at = 0, now

    def sample(
        self, state: EndpointState, reason: str | None = None, load: EngineLoad | None = None
    ) -> None:
        """Record an endpoint's state now, and the load that its engine reported."""
        if self._on_sample is None:
            return
        self._on_sample(
            EndpointSample(
                endpoint=state.name,
                at=round(unix(), 3),
                healthy=state.usable or state.detecting_batching,
                in_flight=state.in_flight,
                limit=state.limit.value,
                reason=reason or state.limit.reason,
                waiting=load.waiting if load else None,
                running=load.running if load else None,
                kv_usage=load.kv_usage if load else None,
                cache_hits=load.cache_hits if load else None,
                cache_queries=load.cache_queries if load else None,
            )
        )
