"""Rows that are long for a context: counted before they are sent, and sent where they fit.

Most rows are short for any endpoint, which their bytes tell. One that may be too long is counted by
an endpoint of the fleet. It then waits for an endpoint whose context holds it, or ends as
``context_overflow`` without having been sent. Where nobody counts, it is sent and the server
decides; what one endpoint refuses as too long goes on to one with a longer context.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from bagent.backends.base import TOO_LONG
from bagent.backends.endpoint import Capabilities
from bagent.backends.request import Request
from bagent.fleet.call import Call
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.state import FleetState
from bagent.types import Failure

TEMPLATE_TOKENS = 128
"""Room for what a chat template puts around a prompt. Too little only means that a row which does
not fit is refused by the server."""

FIRST_RATIO = 1.0
"""Tokens per byte of a prompt before one was counted: none has more. Usual texts have a quarter of
it, which the first counts show."""

USUAL_ANSWER = 256
"""Tokens that an answer should find where the job asks for no number and a longer context is at
hand."""

MOST_ANSWER = 4096
STEP = 128
"""Bounds and steps of answers that the job gives no number for: rows with the same number may share
a request."""

COUNT_SECONDS = 5.0
SLOW_SECONDS, PAUSE_SECONDS = 2.0, 30.0
"""An endpoint that took so long and told nothing is not asked to count for a while."""

SLACK = 16
"""By so many tokens a chat's prompt may be shorter than ``/tokenize`` counts it: engines do not
render all models' chats there as they do for an answer."""

COUNTED_AT_ONCE = 16
ASKED = 2
"""So many endpoints are asked to count one prompt."""

NOT_TOLD = 1 << 60
"""Stands for the context of endpoints that tell none."""

STRICT = frozenset({"vllm", "bagent-sim"})
"""Engines that refuse a prompt which, with all of ``max_tokens``, would not fit."""


class ContextRouter:
    """Knows the contexts of a fleet, and which rows need a long one.

    Args:
        hand_over: takes a call that was counted, and whether it is urgent.
    """

    def __init__(self, core: FleetState, hand_over: Callable[[Call, bool], None]) -> None:
        self._core = core
        self._hand_over = hand_over
        self._ratio = FIRST_RATIO
        self._counted = 0
        self._by_context: dict[int, dict[EndpointState, None]] = {}
        self._models: Counter[str] = Counter()
        self._least: int | None = None
        self._turn = itertools.count()
        self._not_before: dict[str, float] = {}
        self._gate = asyncio.Semaphore(COUNTED_AT_ONCE)

    # --- what endpoints told ------------------------------------------------------------------

    def told(self, state: EndpointState, found: Capabilities) -> None:
        """Take what an endpoint told of itself."""
        if found.engine is not None:
            state.strict = found.engine in STRICT
        if found.context is not None:
            self._set(state, found.context)

    def left(self, state: EndpointState) -> None:
        """An endpoint is no longer one of the fleet's."""
        self._set(state, None)

    def _set(self, state: EndpointState, context: int | None) -> None:
        if state.context == context:
            return
        model = state.endpoint.tags.get("model", "")
        if state.context is not None:
            alike = self._by_context[state.context]
            del alike[state]
            if not alike:
                del self._by_context[state.context]
            self._models -= Counter([model])
        state.context = context
        if context is not None:
            self._by_context.setdefault(context, {})[state] = None
            self._models[model] += 1
        self._least = min(self._by_context, default=None)

    def _contexts(self) -> list[int]:
        """The different contexts of the fleet, at least one."""
        known = sum(map(len, self._by_context.values()))
        unknown = known < len(self._core.endpoints.states)
        return [*self._by_context, NOT_TOLD] if unknown else list(self._by_context)

    # --- calls ----------------------------------------------------------------------------------

    def may_be_too_long(self, call: Call) -> bool:
        """Whether a call has to be counted before it is sent."""
        least = self._least
        if least is None:
            return False
        request = call.request
        about = int(len(request.payload) * self._ratio) + TEMPLATE_TOKENS
        return about + (_asked(request) or 0) > least

    def count(self, call: Call, *, urgent: bool) -> None:
        """Have a call counted; then it is handed over, or ends."""
        core = self._core
        core.waiting.counted.add(call)
        core.spawn(self._count(call, urgent), core.probes)

    async def _count(self, call: Call, urgent: bool) -> None:
        core = self._core
        counted = None
        async with self._gate:
            if self.may_be_too_long(call):  # still, after what others have shown
                counted = await self._tokens(call.request)
        if core.closed:
            return
        core.waiting.counted.discard(call)
        failure = None if counted is None else self._place(call, *counted)
        if failure is not None:
            core.fail(call, failure, None)
            core.pump()
        else:
            self._hand_over(call, urgent)

    async def _tokens(self, request: Request) -> tuple[int, bool] | None:
        """The tokens of a prompt, and whether there are no more than these."""
        core = self._core
        for state in itertools.islice(self._counters(), ASKED):
            began = core.clock()
            found = await core.backend.count_tokens(state.endpoint, request, COUNT_SECONDS)
            if found == TOO_LONG:
                return (state.context or 0) + 1, False
            if found is not None:
                self._learn(len(request.payload), found)
                return found, True
            if core.clock() - began > SLOW_SECONDS:
                self._not_before[state.name] = core.clock() + PAUSE_SECONDS
        return None

    def _counters(self) -> Iterator[EndpointState]:
        """Endpoints to ask: those of the longest context first, by turns; none where they have
        different models, which count differently."""
        now = self._core.clock()
        if len(self._models) > 1:
            return
        for context in sorted(self._by_context, reverse=True):
            alike = list(self._by_context[context])
            first = next(self._turn) % len(alike)
            for state in (*alike[first:], *alike[:first]):
                rests = self._not_before.get(state.name, 0.0) > now
                if state.endpoint.own and state.up and not state.leaving and not rests:
                    yield state

    def _learn(self, size: int, tokens: int) -> None:
        ratio = 1.1 * tokens / max(1, size)
        self._counted += 1
        slow = 0.98 * self._ratio + 0.02 * ratio
        self._ratio = ratio if self._counted == 1 else max(ratio, slow)

    # --- where they may go ----------------------------------------------------------------------

    def _place(self, call: Call, tokens: int, exact: bool) -> Failure | None:
        """Say which endpoints may have a call whose prompt has ``tokens`` tokens (not ``exact``: or
        more), or that none."""
        contexts = self._contexts()
        if call.only is not None:
            state = self._core.endpoints.named(call.only)
            contexts = [(state.context if state else None) or NOT_TOLD]
        longest = max(contexts)
        asked = _asked(call.request)
        if asked is None:
            needed = tokens + max(1, min(USUAL_ANSWER, self._answer(call, tokens, contexts)))
        else:
            needed = tokens + (asked if self._all_strict() else 1)
        slack = SLACK if exact and call.request.messages is not None else 0
        if needed - slack > longest:
            words = f"the prompt contains {'' if exact else 'at least '}{tokens} tokens"
            if asked is not None and tokens < longest:
                words += f"; with max_tokens: {asked}"
            words += f" that is more than the context length of {longest}"
            return Failure("context_overflow", words)
        self._need(call, min((one for one in contexts if one >= needed), default=longest))
        return None

    def _all_strict(self) -> bool:
        return all(state.strict for alike in self._by_context.values() for state in alike)

    def _answer(self, call: Call, tokens: int, contexts: list[int]) -> int:
        """Set the ``max_tokens`` of a call whose job names none; returns it."""
        enough = [one for one in contexts if one >= tokens + USUAL_ANSWER]
        context = min(enough, default=max(contexts))
        left = USUAL_ANSWER if context == NOT_TOLD else context - tokens
        if left > 2 * STEP:
            left -= left % STEP
        most = max(1, min(max(MOST_ANSWER, call.request.max_tokens or 0), left))
        self._ask_for(call, most)
        return most

    def _ask_for(self, call: Call, most: int) -> None:
        call.request = msgspec.structs.replace(call.request, max_tokens=most)
        if call.group_key is not None:
            call.group_key = self._core.backend.group_key(call.request)

    def _need(self, call: Call, context: int) -> None:
        """Have a call wait for endpoints with that context, where not all have it."""
        if call.only is None and self._least is not None and context > self._least:
            call.least = context
            self._core.lengths.add(context)

    def elsewhere(self, call: Call, state: EndpointState) -> bool:
        """Whether a call that ``state`` refused as too long may go to a longer context."""
        context = state.context
        if context is None:
            return False
        size = max(1, len(call.request.payload))
        self._ratio = max(self._ratio, (context - (_asked(call.request) or 0)) / size)
        if call.only is not None:
            return False
        longer = min((one for one in self._contexts() if one > context), default=None)
        if longer is None:
            return False
        if call.request.settings.max_tokens is None and longer != NOT_TOLD:
            about = max(context, int(len(call.request.payload) * self._ratio))
            left = max(longer - about, longer // 4)
            self._ask_for(call, max(call.request.max_tokens or 0, min(MOST_ANSWER, left)))
        self._need(call, longer)
        return True

    def lost(self) -> list[Call]:
        """Hand out the ready calls for whose length no endpoint is up, while others are."""
        states, lengths = self._core.endpoints.states, self._core.lengths
        up = [state for state in states if state.up and not state.leaving] if lengths else []
        if not up:
            return []
        gone = {least for least in lengths if not any(fits(state, least) for state in up)}
        return self._core.waiting.remove(lambda call: call.least in gone) if gone else []


def _asked(request: Request) -> int | None:
    """The tokens that an answer must have room for; None where the job gives no number."""
    return None if request.settings.max_tokens is None else request.max_tokens


def fits(state: EndpointState, least: int) -> bool:
    """Whether the endpoint's context is ``least`` or longer, or not known."""
    return state.context is None or state.context >= least
