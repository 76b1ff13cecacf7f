"""Retry policy: all rules by which a call is sent again. No other package retries.

=========================================  ===========  =====================  ====================
What happened                              Attempt      Next endpoint          When
=========================================  ===========  =====================  ====================
server answers with a passing failure [1]  counted      any, another first     backoff, Retry-After
429, or server busy [1]                    free [a]     any, another first     backoff, Retry-After
connection failed, server is down [2]      free [b]     any that is up         after the probe
connection failed, server is up [3]        counted      any, another first     probe, then backoff
server hangs, or dies with the call [2]    free [b]     any that is up         at once
refused with 401, 403, 404 ... [4]         free         another [c]            success or check
attempts used up, then the check fails     free         another                after the check [4]
account out of quota [3]                   free         any                    circuit closes
keep-alive connection was closed [3]       free, once   any                    at once
endpoint wants another parameter form [3]  free         any                    at once
stream switched off, but required [5]      free         any                    at once
prompt too long for the endpoint [6]       free         with a longer context  at once
group refused as a whole (400, 413) [3]    free         any, in two halves     at once
pinned or long call, no endpoint up [7]    counted      the same               backoff
late call at the end of a run [8]          free         another, as a copy     `FleetConfig.hedge`
=========================================  ===========  =====================  ====================

Decided in: [1] `decide`, [2] `Health.died_with`, [3] `ResultHandler`, [4] `ResultHandler.resume`,
[5] `stop_streaming`, [6] `ContextRouter.reroute`, [7] `TimeoutSweep`, [8] `Hedger`.

Limits: [a] while any call is served, else an outage after `RetryPolicy.quiet`; at most
`RetryPolicy.throttled`. [b] The second death sends it last, alone; the third ends it.
[c] `MAX_REFUSALS` endpoints that serve other calls.
"""

from __future__ import annotations

import re
from enum import Enum
from random import Random

import msgspec

from bagent.fleet.call import Call
from bagent.types import Failure

MAX_STALE_CONNECTIONS = 1
"""How often a call is sent again for free because its keep-alive connection was closed."""

MAX_DEATHS = 2
"""A call with which this many endpoints died runs last, alone, once."""

MIN_REFUSALS, MAX_REFUSALS = 2, 3
"""How many endpoints that serve other calls must refuse a call before it fails. A single endpoint
is asked `MIN_REFUSALS` times."""

STREAMED_ATTEMPTS = 4
"""Attempts at a busy server after which a call is no longer streamed."""

PAUSE_GROWTH = 2.0
"""A delay is at least this many times the pause before the attempt that failed. That pause may
also contain waits for a rate limit or a slot."""

MIN_QUIET_SECONDS = 15.0
"""Shortest time for which a busy server is waited for, however few retries are allowed."""


class RetryPolicy(msgspec.Struct, frozen=True):
    """Limits on retries; all times in seconds."""

    retries: int = 5  # counted attempts after the first
    base: float = 0.5  # first delay; each one doubles
    longest: float = 30.0  # longest delay
    longest_served: float = 5.0  # longest delay while other calls are served
    retry_after_max: float = 120.0  # cap on a server's Retry-After
    throttled: float = 1800.0  # how long one call may wait for a busy server

    def while_served(self) -> RetryPolicy:
        """Return the policy for calls that fail while others are served."""
        longest = min(self.longest, self.longest_served)
        return msgspec.structs.replace(self, longest=longest)

    @property
    def quiet(self) -> float:
        """Seconds without any answer after which a busy server counts as an outage.

        This is twenty times the delays of all counted attempts.
        """
        delays = self.base * (2.0 ** min(self.retries, 16) - 1)
        return min(self.throttled, max(MIN_QUIET_SECONDS, 20 * delays))


class Decision(msgspec.Struct, frozen=True):
    """Whether and when a call is retried."""

    delay: float | None  # seconds; None: give up
    reason: str = ""  # why it is not retried, appended to the failure's message
    late: bool = False  # the row's own time limit ends it
    outage: bool = False  # no call is served


def decide(
    policy: RetryPolicy,
    call: Call,
    failure: Failure,
    now: float,
    random: Random,
    served_at: float | None = None,
) -> Decision:
    """Return whether ``call`` is retried after ``failure``, and count the attempt.

    A busy server costs no attempt while calls are served; ``served_at`` is when one last was.
    Jitter is only added, so that no call returns before its Retry-After.
    """
    if not failure.passing:
        return Decision(None)
    if call.deadline is not None and now >= call.deadline:
        return Decision(None, "the row's time limit is over", late=True)
    retry_after = failure.retry_after
    if retry_after is not None:
        retry_after = min(retry_after, policy.retry_after_max)
    if failure.busy:
        decision = _give_up_busy(policy, call, now, served_at, retry_after)
        if decision is not None:
            return decision
        exponent = min(call.throttles - 1, 16)
    else:
        call.counted_attempts += 1
        attempts = call.counted_attempts
        if attempts > policy.retries:
            return Decision(None, f"{attempts} tries" if attempts > 1 else "")
        exponent = min(attempts - 1, 16)
    if retry_after is not None:
        delay = retry_after + random.uniform(0.0, max(0.2, 0.1 * retry_after))
    else:
        delay = min(policy.longest, policy.base * 2**exponent) * random.uniform(1.0, 1.5)
        if not failure.busy:
            delay = max(delay, PAUSE_GROWTH * min(policy.longest, call.pause))
    if call.deadline is not None and now + delay >= call.deadline:
        return Decision(None, "the row's time limit comes before the next try", late=True)
    return Decision(delay)


def _give_up_busy(
    policy: RetryPolicy,
    call: Call,
    now: float,
    served_at: float | None,
    retry_after: float | None,
) -> Decision | None:
    """Count the refusal; return the decision to stop waiting for a busy server, else None."""
    if call.throttled_at is None:
        call.throttled_at = now
    call.throttles += 1
    if now - call.throttled_at > policy.throttled:
        return Decision(None, f"refused for {policy.throttled:g} s")
    if served_at is not None and call.throttles > policy.retries:
        quiet = now - max(served_at, call.throttled_at)
        if quiet > max(policy.quiet, 4 * (retry_after or 0.0)):
            reason = f"refused {call.throttles} times, and nothing else got through"
            return Decision(None, reason, outage=True)
    return None


def record_pause(call: Call, failure: Failure, sent: float, done: float) -> None:
    """Record how long the call paused before this attempt, sent and failed at Unix seconds.

    Pauses that a server asked for do not count.
    """
    if call.failed_at is not None:
        call.pause = max(0.0, sent - call.failed_at)
    call.failed_at = None if failure.busy or failure.retry_after is not None else done


def stop_streaming(call: Call, failure: Failure) -> bool:
    """Stop streaming a call that a busy server keeps refusing, or undo it where it was rejected.

    An unstreamed answer cannot break off half way and costs a busy server less. Requests that
    were accepted and broke off stay as they are, so that a provider can recognise the repetition.
    Return True if the request must be sent again because of the undo.
    """
    streamed = call.request.stream
    if call.unstreamed is None and failure.busy and call.attempts >= STREAMED_ATTEMPTS and streamed:
        call.unstreamed, call.request = True, msgspec.structs.replace(call.request, stream=False)
    elif call.unstreamed and failure.kind == "rejected":
        call.unstreamed, call.request = False, msgspec.structs.replace(call.request, stream=True)
        return True
    return False


ROW_STATUS = frozenset({400, 413, 422})
"""HTTP statuses that blame the request, not the server."""

_SERVER_MESSAGE = re.compile(
    r"\bmodels?\b[^.\n]{0,160}?\b(not (be )?found|(does|do) not exist|not exist|unknown|no longer"
    r"|not (currently )?(available|served|loaded|supported|deployed)|isn't (available|served)"
    r"|is (invalid|unavailable)|has been (deprecated|removed|shut ?down|retired))\b"
    r"|\b(no such|unknown|invalid|unsupported|unrecognized|could not find( the)?) model\b"
    r"|\bmodel_?not_?found|\bapi[ _-]?key\b[^.\n]{0,40}\b(not valid|invalid|expired|missing)\b"
    r"|\b(invalid|incorrect|expired|missing|no) api[ _-]?key\b",
    re.IGNORECASE,
)
"""Messages of a 400 or 422 that blame the model or key after all. A message may quote the row, so
a check decides in the end."""


class Blame(Enum):
    """What a failure says is at fault."""

    ROW = "row"  # the request, wherever it is sent
    SERVER = "server"  # the endpoint: down, faulty, without the model, or refusing the key
    ACCOUNT = "account"  # money or quota is used up
    BUSY = "busy"  # no capacity now


def blame_of(failure: Failure) -> Blame:
    """Return what is at fault, by the kind, status and message of ``failure``."""
    if failure.kind == "budget":
        # Without a status it is the budget of the run itself.
        return Blame.ROW if failure.status is None else Blame.ACCOUNT
    if failure.busy or failure.kind == "rate_limited":
        return Blame.BUSY
    if failure.passing or failure.kind in ("auth", "connect"):
        return Blame.SERVER
    if failure.kind != "rejected":
        return Blame.ROW
    if failure.status in ROW_STATUS and not _SERVER_MESSAGE.search(failure.message):
        return Blame.ROW
    return Blame.SERVER
