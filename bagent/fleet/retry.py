"""Whether a failed call is sent again, and when: the only retry layer there is."""

from __future__ import annotations

import re
from enum import Enum
from random import Random

import msgspec

from bagent.fleet.call import Call
from bagent.types import Failure

FREE_TRIES = 1
"""How often a call is sent again without cost since its kept-open connection was closed."""


TROUBLED_TRIES = 4
"""After so many failed tries a call that a full server refuses is no longer asked for a stream."""

LONGER = 2.0
"""A wait is so many times the pause that the failure before it was followed by, whatever that was
made of: a limit of the account, or a slot, may have been waited for besides, and a busy server
counts a pause until it gets to the request. It is at most so many times the longest wait."""

LEAST_QUIET = 15.0
"""Seconds for which a full server is waited for, however few tries are wanted."""


class RetryPolicy(msgspec.Struct, frozen=True):
    """How patient a run is.

    ``retries`` are tries after the first. ``base`` and ``longest`` bound the growing waits between
    counted tries; ``longest_served`` is the longest while others get through, since there are no
    better times to wait for. ``told_longest`` bounds a wait that a server asked for, and
    ``throttled`` the whole time for which one call may wait on a full server. All in seconds.
    """

    retries: int = 5
    base: float = 0.5
    longest: float = 30.0
    longest_served: float = 5.0
    told_longest: float = 120.0
    throttled: float = 1800.0

    def while_served(self) -> RetryPolicy:
        """The same with the waits of calls that fail while others get through."""
        longest = min(self.longest, self.longest_served)
        return msgspec.structs.replace(self, longest=longest)

    @property
    def quiet(self) -> float:
        """Seconds without any answer after which a full server is no longer waited for.

        Twenty times the waits of all counted tries, so that who wants few tries waits less.
        """
        waits = self.base * (2.0 ** min(self.retries, 16) - 1)
        return min(self.throttled, max(LEAST_QUIET, 20 * waits))


class Decision(msgspec.Struct, frozen=True):
    """Send again after ``delay`` seconds (None: give up, for the ``reason`` added to the words).

    ``late`` says that the row's own time limit ends it, ``outage`` that nothing gets through.
    """

    delay: float | None
    reason: str = ""
    late: bool = False
    outage: bool = False


def decide(
    policy: RetryPolicy,
    call: Call,
    failure: Failure,
    now: float,
    random: Random,
    served_at: float | None = None,
) -> Decision:
    """What becomes of ``call`` after ``failure``; counts the try on the call.

    ``served_at`` is when calls were last seen to get through, on the clock of ``now``; None where
    nobody looked. As long as others get through, a full server costs a call no try.
    The spread is only ever added, so nobody comes back earlier than told, and not all at once.
    """
    if not failure.passing:
        return Decision(None)
    if call.give_up_at is not None and now >= call.give_up_at:
        return Decision(None, "the row's time limit is over", late=True)
    told = None if failure.retry_after is None else min(failure.retry_after, policy.told_longest)
    if failure.busy:
        given_up = _full_too_long(policy, call, now, served_at, told)
        if given_up is not None:
            return given_up
        exponent = min(call.throttles - 1, 16)
    else:
        call.counted += 1
        if call.counted > policy.retries:
            tries = call.counted
            return Decision(None, f"{tries} tries" if tries > 1 else "")
        exponent = min(call.counted - 1, 16)
    if told is not None:
        delay = told + random.uniform(0.0, max(0.2, 0.1 * told))
    else:
        delay = min(policy.longest, policy.base * 2**exponent) * random.uniform(1.0, 1.5)
        if not failure.busy:
            delay = max(delay, LONGER * min(policy.longest, call.pause))
    if call.give_up_at is not None and now + delay >= call.give_up_at:
        return Decision(None, "the row's time limit comes before the next try", late=True)
    return Decision(delay)


def note_pause(call: Call, failure: Failure, sent: float, done: float) -> None:
    """Note how long ``call``, sent and failed at these Unix seconds, had paused after its failure
    before; a pause that a server asked for, or was full for, says nothing of the next."""
    if call.failed_at is not None:
        call.pause = max(0.0, sent - call.failed_at)
    call.failed_at = None if failure.busy or failure.retry_after is not None else done


def ask_whole(call: Call, failure: Failure) -> bool:
    """Ask for no stream any more where streaming has become a trouble; True where the request has
    to be sent again since the server will not have it so.

    A whole answer can not break off half way, to be paid for twice, and costs a full server less.
    A request that was accepted and then broke off is repeated as it was, so that a provider
    can know it again; one that was refused was never begun, and may be put differently.
    """
    if call.whole is None and failure.busy and call.tries >= TROUBLED_TRIES and call.request.stream:
        call.whole, call.request = True, msgspec.structs.replace(call.request, stream=False)
    elif call.whole and failure.kind == "rejected":
        call.whole, call.request = False, msgspec.structs.replace(call.request, stream=True)
        return True
    return False


def _full_too_long(
    policy: RetryPolicy, call: Call, now: float, served_at: float | None, told: float | None
) -> Decision | None:
    """Return why a call is no longer worth keeping for a full server, None if it is; counts the
    refusal.

    A server that named a time is given several of it.
    """
    if call.throttled_at is None:
        call.throttled_at = now
    call.throttles += 1
    if now - call.throttled_at > policy.throttled:
        return Decision(None, f"refused for {policy.throttled:g} s")
    if served_at is not None and call.throttles > policy.retries:
        quiet = now - max(served_at, call.throttled_at)
        if quiet > max(policy.quiet, 4 * (told or 0.0)):
            words = f"refused {call.throttles} times, and nothing else got through"
            return Decision(None, words, outage=True)
    return None


ROW_STATUS = frozenset({400, 413, 422})
"""HTTP answers to a request that speak of the request, not of the server."""

_SERVER_WORDS = re.compile(
    r"\bmodels?\b[^.\n]{0,160}?\b(not (be )?found|(does|do) not exist|not exist|unknown|no longer"
    r"|not (currently )?(available|served|loaded|supported|deployed)|isn't (available|served)"
    r"|is (invalid|unavailable)|has been (deprecated|removed|shut ?down|retired))\b"
    r"|\b(no such|unknown|invalid|unsupported|unrecognized|could not find( the)?) model\b"
    r"|\bmodel_?not_?found|\bapi[ _-]?key\b[^.\n]{0,40}\b(not valid|invalid|expired|missing)\b"
    r"|\b(invalid|incorrect|expired|missing|no) api[ _-]?key\b",
    re.IGNORECASE,
)
"""Words by which a refused request (400, 422) speaks of the model or the key after all. The message
may repeat the row's own text, so a request of our own decides in the end."""


class Blame(Enum):
    """Whom a failure speaks of.

    ``ROW``: the request itself, wherever it is sent. ``SERVER``: the endpoint, which is down, sick,
    without the model, or refuses the key. ``ACCOUNT``: money or quota is spent. ``BUSY``: there is
    no room now.
    """

    ROW = "row"
    SERVER = "server"
    ACCOUNT = "account"
    BUSY = "busy"


def blame_of(failure: Failure) -> Blame:
    """Return whom ``failure`` speaks of, by its kind, its status and its words."""
    if failure.kind == "budget":
        # Without a status it is the budget of the run itself.
        return Blame.ROW if failure.status is None else Blame.ACCOUNT
    if failure.busy or failure.kind == "rate_limited":
        return Blame.BUSY
    if failure.passing or failure.kind in ("auth", "connect"):
        return Blame.SERVER
    if failure.kind != "rejected":
        return Blame.ROW
    if failure.status in ROW_STATUS:
        return Blame.SERVER if _SERVER_WORDS.search(failure.message) else Blame.ROW
    return Blame.SERVER
