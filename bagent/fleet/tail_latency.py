"""Late calls at the end of a run, sent a second time elsewhere: the first answer counts."""

from __future__ import annotations

from bagent.fleet.call import InFlightRequest
from bagent.fleet.state import FleetState

AUTO_FACTOR = 3.0
"""A call is late when it takes so many times what nine of ten recent calls took."""

LEAST_SECONDS = 1.0
LOOK_SECONDS = 0.25
MOST_SHARE = 0.1
"""So large a share of what is in flight may be copies, one at least."""


class Hedger:
    """Finds late calls; nothing is hedged while rows wait for a slot."""

    def __init__(self, core: FleetState) -> None:
        self._core = core
        self._looked_at = core.clock()

    def late(self) -> list[InFlightRequest]:
        """Requests of one call each that should be sent again elsewhere; call it often."""
        core = self._core
        after = core.config.hedge
        now = core.clock()
        if (
            after is None
            or core.closed
            or core.waiting.ready
            or core.expecting
            or not core.in_flight
        ):
            return []
        if now - self._looked_at < LOOK_SECONDS:
            return []
        self._looked_at = now
        if not after:
            if len(core.latencies) < 10:
                return []
            usual = sorted(core.latencies)[len(core.latencies) * 9 // 10]
            after = max(LEAST_SECONDS, AUTO_FACTOR * usual)
        found, copies = [], 0
        for state in core.endpoints.states:
            for carrier in state.carriers:
                call = carrier.group[0]
                if len(carrier.group) != 1 or call.ended or call.only is not None:
                    continue
                if call.out > 1:
                    copies += 1
                elif now - carrier.started >= after:
                    found.append(carrier)
        free = max(1, int(core.in_flight * MOST_SHARE)) - copies // 2
        found.sort(key=lambda carrier: carrier.started)
        return found[: max(0, free)]
