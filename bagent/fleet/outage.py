"""How long no endpoint at all has answered: a pure object."""

from __future__ import annotations

from collections.abc import Sequence

from bagent.errors import StoppedEarly
from bagent.fleet.endpoint_state import EndpointState
from bagent.types import Failure


class Outage:
    """Watches for the time when all endpoints are down; times are on the fleet's clock.

    Args:
        patience: seconds of it after which a run should stop.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._since: float | None = None

    def over(self) -> None:
        """Some endpoint answers."""
        self._since = None

    def went_down(
        self, states: Sequence[EndpointState], now: float, found: Failure
    ) -> StoppedEarly | None:
        """A probe failed with ``found``: the reason to stop, once all are down for too long."""
        if any(state.up for state in states):
            self._since = None
            return None
        if self._since is None:
            self._since = now
        seconds = now - self._since
        if seconds < self._patience:
            return None
        which = "the endpoint does" if len(states) == 1 else f"all {len(states)} endpoints do"
        return StoppedEarly(f"{which} not answer since {seconds:.0f} s: {found.message}")
