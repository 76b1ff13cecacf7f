"""What the fleet does after a request, a probe or a check: actions as data.

`ResultHandler` and `RetryRules` decide, `Fleet` applies.
"""

from __future__ import annotations

import msgspec

from bagent.backends.request import Request
from bagent.errors import BagentError
from bagent.fleet.call import Call, Delivery, EndedCall
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.queue import SuspendedCall
from bagent.types import Failure


class Complete(msgspec.Struct, eq=False):
    """Calls of a request end with replies; copies of them that are in flight are cancelled."""

    ended: list[EndedCall]


class Fail(msgspec.Struct, eq=False):
    """A call ends with a failure."""

    call: Call
    failure: Failure
    delivery: Delivery | None  # None: it was not sent


class Retry(msgspec.Struct, eq=False):
    """A call is sent again from ``at`` on."""

    call: Call
    at: float  # on the fleet's clock; `LAST`: after all other calls, alone


LAST = float("inf")


class Split(msgspec.Struct, eq=False):
    """A refused group is sent again in two halves."""

    calls: list[Call]


class Suspend(msgspec.Struct, eq=False):
    """A call waits until the endpoint that failed it was probed, or checked."""

    state: EndpointState
    suspended: SuspendedCall


class ProbeEndpoint(msgspec.Struct, eq=False):
    """An endpoint is probed; with ``block`` it gets no calls until the probe is back."""

    state: EndpointState
    block: bool


class CheckEndpoint(msgspec.Struct, eq=False):
    """An endpoint is checked by a request like this; a suspect one gets no calls meanwhile."""

    state: EndpointState
    request: Request
    suspect: bool = False


class OpenCircuit(msgspec.Struct, eq=False):
    """An endpoint gets no more calls until a check passes."""

    state: EndpointState
    fault: Failure


class StopFleet(msgspec.Struct, eq=False):
    """The fleet cannot continue."""

    error: BagentError


EndpointAction = ProbeEndpoint | CheckEndpoint | OpenCircuit
Action = Complete | Fail | Retry | Split | Suspend | EndpointAction | StopFleet
