"""Detection of outages: no endpoint serves the run any more."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bagent.errors import BagentError, NeedsPerson, StoppedEarly
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.retry import Blame, blame_of
from bagent.types import Failure


class OutagePatience(msgspec.Struct, frozen=True):
    """Seconds for which a run waits while no endpoint serves it."""

    passing: float = 120.0  # waiting may help, such as for a restart
    lasting: float = 30.0  # every endpoint now refuses the key or model that it accepted
    first: float = 10.0  # endpoints answer, but nothing has been served yet
    first_lasting: float = 3.0  # nor do they accept the key or model


class Outage:
    """Measures how long no endpoint has served; times are on the fleet's clock."""

    def __init__(self, patience: OutagePatience) -> None:
        self._patience = patience
        self._since: float | None = None

    def end(self) -> None:
        """Record that an endpoint works."""
        self._since = None

    def check(self, states: Sequence[EndpointState], now: float) -> BagentError | None:
        """Return the reason to stop, once all endpoints have been faulty for too long.

        Call it when an endpoint goes down or its circuit opens.
        """
        states = [state for state in states if not state.leaving]
        faults = [state.fault for state in states if state.fault is not None]
        if not faults or len(faults) < len(states):
            self._since = None
            return None
        if self._since is None:
            self._since = now
        # A request that was sent before may still be answered well.
        last_served = max(state.last_served for state in states)
        seconds = now - max(self._since, last_served)
        if seconds < self._seconds(faults, served=last_served > float("-inf")):
            return None
        return _reason(states, faults, seconds)

    def _seconds(self, faults: Sequence[Failure], *, served: bool) -> float:
        patience = self._patience
        if all(blame_of(fault) is Blame.ACCOUNT for fault in faults):
            return 0.0
        if not any(fault.passing for fault in faults):
            return patience.lasting if served else patience.first_lasting
        answers = all(fault.status is not None and not fault.busy for fault in faults)
        return patience.first if answers and not served else patience.passing


def _reason(
    states: Sequence[EndpointState], faults: Sequence[Failure], seconds: float
) -> BagentError:
    """Return the error to stop with: `StoppedEarly` if waiting may help, else `NeedsPerson`."""
    passing = next((fault for fault in faults if fault.passing), None)
    fault = passing or faults[0]
    single = len(states) == 1
    if fault.kind == "budget":
        return NeedsPerson(
            f"the account's quota or credit is spent: {fault.message}",
            hint="raise the quota or change the key",
        )
    if fault.status is None and fault.kind == "connect" and fault.passing:
        nobody = "the endpoint has not" if single else f"none of {len(states)} endpoints has"
        return StoppedEarly(f"{nobody} answered for {seconds:.0f} s: {fault.message}")
    which = "the endpoint has" if single else f"all {len(states)} endpoints have"
    message = f"{which} served nothing for {seconds:.0f} s: {fault.message}"
    if passing is not None:
        return StoppedEarly(message)
    hints = {
        "auth": "set a key that the server accepts, then give the same command",
        "connect": "check the address and the network, then give the same command",
    }
    other = "serve the model there again, or name another with --model"
    return NeedsPerson(message, hint=hints.get(fault.kind, other))
