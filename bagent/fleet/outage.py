"""How long no endpoint at all has served the run: a pure object."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bagent.errors import BagentError, NeedsPerson, StoppedEarly
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.retry import Blame, blame_of
from bagent.types import Failure


class OutagePatience(msgspec.Struct, frozen=True):
    """Seconds for which a run waits while no endpoint serves it.

    Attributes:
        passing: where waiting may help, such as for a server that restarts.
        lasting: where every endpoint refuses what it took before: a key, a model.
        first: where servers answer, but none has served anything in this run yet.
        first_lasting: the same, where they refuse key or model.
    """

    passing: float = 120.0
    lasting: float = 30.0
    first: float = 10.0
    first_lasting: float = 3.0


class Outage:
    """Watches for the time when no endpoint serves; times are on the fleet's clock."""

    def __init__(self, patience: OutagePatience) -> None:
        self._patience = patience
        self._since: float | None = None

    def over(self) -> None:
        """Take that some endpoint works."""
        self._since = None

    def look(self, states: Sequence[EndpointState], now: float) -> BagentError | None:
        """Return the reason to stop once all endpoints are down or refuse for too long.

        To be called when an endpoint went down, or its circuit was opened.
        """
        states = [state for state in states if not state.leaving]
        faults = [state.fault for state in states if state.fault is not None]
        if not faults or len(faults) < len(states):
            self._since = None
            return None
        if self._since is None:
            self._since = now
        served = any(state.last_served > float("-inf") for state in states)
        if now - self._since < self._seconds(faults, served):
            return None
        return _reason(states, faults, now - self._since)

    def _seconds(self, faults: Sequence[Failure], served: bool) -> float:
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
    """Return why to stop, with the exit code that says whether a person is needed."""
    passing = next((fault for fault in faults if fault.passing), None)
    fault = passing or faults[0]
    one = len(states) == 1
    if fault.kind == "budget":
        return NeedsPerson(
            f"the account can not pay: {fault.message}", hint="raise the quota or change the key"
        )
    if fault.status is None and fault.kind == "connect" and fault.passing:
        which = "the endpoint does" if one else f"all {len(states)} endpoints do"
        return StoppedEarly(f"{which} not answer since {seconds:.0f} s: {fault.message}")
    which = "the endpoint has" if one else f"all {len(states)} endpoints have"
    words = f"{which} served nothing for {seconds:.0f} s: {fault.message}"
    if passing is not None:
        return StoppedEarly(words)
    return NeedsPerson(words, hint=_mending(fault))


def _mending(fault: Failure) -> str:
    """Return what a person can do about a lasting failure of a server."""
    if fault.kind == "auth":
        return "give a key that it takes; the same command then goes on"
    if fault.kind == "connect":
        return "mend the connection; the same command then goes on"
    return "serve the model there again, or name another with --model"
