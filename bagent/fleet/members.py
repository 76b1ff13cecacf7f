"""Endpoints that join a working fleet, and those that leave it once their work is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bagent.fleet.core import Core
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.health import Health


class Members:
    """Who belongs to a fleet now.

    Args:
        forgotten: called with an endpoint that left, once nothing is in flight there any more.
    """

    def __init__(
        self, core: Core, health: Health, forgotten: Callable[[EndpointState], None]
    ) -> None:
        self._core = core
        self._health = health
        self._forgotten = forgotten

    def join(self, states: Sequence[EndpointState]) -> None:
        """Take in endpoints; each gets work once a probe has found it."""
        self._core.endpoints.add(*states)
        for state in states:
            self._core.sample(state, "joined")
            self._health.doubt(state)

    def leave(self, names: Sequence[str]) -> None:
        """Send nothing more to these endpoints; what is in flight there ends as usual."""
        for name in names:
            state = self._core.endpoints.named(name)
            if state is not None and not state.leaving:
                state.leaving = True
                self._core.sample(state, "left the hostfile")
                self.ended(state)

    def ended(self, state: EndpointState) -> None:
        """A request at the endpoint is over: forget it if it left and this was the last one."""
        core = self._core
        if state.leaving and not state.carriers and state in core.endpoints.states:
            core.endpoints.remove(state)
            self._forgotten(state)
