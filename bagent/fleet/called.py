"""What came of calling one endpoint, in words for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import msgspec

from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.engine_metrics import EngineLoad
from bagent.backends.proof import Proof
from bagent.types import Failure

State = Literal["ready", "loading", "busy", "silent", "dead", "refuses", "broken", "unasked"]
"""``ready``: a real request was answered. ``loading``: the server is there, its model is not yet.
``busy``: it has no room. ``silent``: it accepts and does not answer in time. ``dead``: no
connection. ``refuses``: key, model or request are not accepted. ``broken``: it answers something
that is no answer. ``unasked``: there was no time, or this machine was out of something."""

STATES: tuple[State, ...] = get_args(State)

_LOADING = re.compile(r"loading|starting|warm(ing)?[ -]?up|not (yet )?ready|initiali[sz]", re.I)


class Called(msgspec.Struct, frozen=True):
    """One endpoint as it was found.

    ``model`` is what it was asked for, ``proof`` the real request that it answered; ``reason``
    says in a line why it is not ready, empty where it is.
    """

    endpoint: Endpoint
    state: State
    reason: str = ""
    model: str | None = None
    known: Capabilities | None = None
    load: EngineLoad | None = None
    proof: Proof | None = None

    @property
    def ready(self) -> bool:
        """Whether it answered a real request."""
        return self.state == "ready"


def state_of(failure: Failure) -> State:
    """The state of an endpoint whose request came to ``failure``."""
    status = failure.status
    if failure.kind == "connect":
        return "dead" if failure.passing else "broken"
    if failure.kind == "timeout":
        return "silent"
    if failure.kind in ("auth", "budget", "rejected", "context_overflow", "refused"):
        return "refuses"
    if failure.kind == "rate_limited":
        return "busy"
    if failure.kind == "overloaded":
        if status is None:
            return "unasked"
        if status == 503 and (not failure.busy or _LOADING.search(failure.message)):
            return "loading"
        return "busy" if failure.busy else "broken"
    return "broken"


def not_ready(endpoint: Endpoint, failure: Failure, known: Capabilities | None = None) -> Called:
    """The endpoint, whose request came to ``failure``."""
    return Called(endpoint, state_of(failure), failure.message, known=known)


class Group(msgspec.Struct, frozen=True):
    """Endpoints that are not ready for one and the same reason; ``first`` stands for them.

    ``key`` is the state and the reason less names and numbers.
    """

    key: tuple[State, str]
    count: int
    first: Called

    def words(self) -> str:
        """``80 dead, such as: cannot connect to node3:8000: Connection refused``."""
        name, reason = self.first.endpoint.name, self.first.reason
        told = reason if name in reason else f"{name}: {reason}"
        return f"{self.count} {self.key[0]}{', such as' if self.count > 1 else ''}: {told}"


def grouped(called: Iterable[Called]) -> list[Group]:
    """The endpoints that are not ready by reason, the largest groups first."""
    groups: dict[tuple[State, str], list[Called]] = {}
    for one in called:
        if not one.ready:
            reason = re.sub(r"[0-9][0-9.]*", "0", one.reason.replace(one.endpoint.name, ""))
            groups.setdefault((one.state, reason), []).append(one)
    found = [Group(key, len(members), members[0]) for key, members in groups.items()]
    return sorted(found, key=lambda group: -group.count)


def counts(called: Sequence[Called | None]) -> str:
    """``12 of 100 ready, 80 dead, 3 loading, 5 no answer yet``."""
    number = dict.fromkeys(STATES, 0)
    for one in called:
        if one is not None:
            number[one.state] += 1
    told = [f"{number['ready']} of {len(called)} ready"]
    told += [f"{number[state]} {state}" for state in STATES[1:] if number[state]]
    waiting = sum(1 for one in called if one is None)
    return ", ".join(told + ([f"{waiting} no answer yet"] if waiting else []))
