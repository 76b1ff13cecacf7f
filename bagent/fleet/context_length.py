"""Routing of long prompts to endpoints with a context long enough.

The bytes of most rows show that they fit anywhere. A row that may be too long has its tokens
counted by an endpoint. It then waits for an endpoint whose context is long enough, or ends as
``context_overflow`` without being sent. Where no endpoint counts, it is sent, and moves to a longer
context when it is refused.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec

from bagent.backends.base import TOO_LONG, Backend
from bagent.backends.endpoint import Capabilities
from bagent.backends.request import Request
from bagent.fleet.call import UNKNOWN_CONTEXT, Call
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.state import FleetState, FleetTasks
from bagent.types import Failure

TEMPLATE_TOKENS = 128
"""Allowance for a chat template. If it is too small, the server refuses a row that does not fit."""

FIRST_RATIO = 1.0
"""Upper bound on tokens per byte, used until a prompt was counted. Usual texts have a quarter."""

MIN_ANSWER = 256
"""Tokens reserved for an answer where the job sets no limit and a longer context exists."""

MAX_ANSWER = 4096
ANSWER_STEP = 128
"""Most tokens of such an answer, and their rounding: rows with equal limits may share a request."""

COUNT_SECONDS = 5.0
SLOW_SECONDS, PAUSE_SECONDS = 2.0, 30.0
"""An endpoint that failed to count and took this long is not asked for a while."""

CHAT_SLACK = 16
"""By so many tokens a chat's prompt may be shorter than ``/tokenize`` says: some engines render it
differently for an answer."""

MAX_COUNTING = 16
COUNT_ATTEMPTS = 2
"""How many prompts are counted at once, and how many endpoints are asked for each."""

STRICT_ENGINES = frozenset({"vllm", "bagent-sim"})
"""Engines that refuse a prompt which with all of ``max_tokens`` exceeds the context."""


class ContextRouter:
    """Knows the context lengths of a fleet, and which calls need a long one.

    Args:
        fleet: its endpoints and calls.
        backend: counts tokens.
        tasks: runs the counting.
        on_counted: receives a call whose tokens were counted, whether it is urgent, and the
            failure if no endpoint can serve it.
    """

    def __init__(
        self,
        fleet: FleetState,
        backend: Backend,
        tasks: FleetTasks,
        on_counted: Callable[[Call, bool, Failure | None], None],
    ) -> None:
        self._fleet = fleet
        self._backend = backend
        self._tasks = tasks
        self._on_counted = on_counted
        self._ratio = FIRST_RATIO  # tokens per byte
        self._counts = 0
        self._by_context: dict[int, dict[EndpointState, None]] = {}
        self._models: Counter[str] = Counter()
        self._shortest: int | None = None
        self._turn = itertools.count()
        self._gate = asyncio.Semaphore(MAX_COUNTING)

    # --- endpoints ------------------------------------------------------------------------------

    def set_capabilities(self, state: EndpointState, capabilities: Capabilities) -> None:
        """Set the context length that an endpoint reported."""
        if capabilities.engine is not None:
            state.strict_context = capabilities.engine in STRICT_ENGINES
        if capabilities.context is not None:
            self._set_context(state, capabilities.context)

    def remove(self, state: EndpointState) -> None:
        """Forget an endpoint that left."""
        self._set_context(state, None)

    def _set_context(self, state: EndpointState, context: int | None) -> None:
        if state.context == context:
            return
        model = state.endpoint.tags.get("model", "")
        if state.context is not None:
            peers = self._by_context[state.context]
            del peers[state]
            if not peers:
                del self._by_context[state.context]
            self._models -= Counter([model])
        state.context = context
        if context is not None:
            self._by_context.setdefault(context, {})[state] = None
            self._models[model] += 1
        self._shortest = min(self._by_context, default=None)

    def _contexts(self) -> list[int]:
        """Return the different context lengths, at least one."""
        reporting = sum(map(len, self._by_context.values()))
        unknown = reporting < len(self._fleet.endpoints.states)
        return [*self._by_context, UNKNOWN_CONTEXT] if unknown else list(self._by_context)

    # --- token counts ---------------------------------------------------------------------------

    def possibly_too_long(self, calls: Sequence[Call]) -> list[Call]:
        """Return the calls whose tokens must be counted before they are sent."""
        shortest, long = self._shortest, list[Call]()
        if shortest is None:
            return long
        for call in calls:
            request = call.request
            tokens = int(len(request.payload) * self._ratio) + TEMPLATE_TOKENS
            if request.settings.max_tokens is not None:
                tokens += request.max_tokens or 0
            if tokens > shortest:
                long.append(call)
        return long

    def count_tokens(self, call: Call, *, urgent: bool) -> None:
        """Count the tokens of a call, then enqueue or end it."""
        self._fleet.waiting.counting.add(call)
        self._tasks.spawn_probe(self._count(call, urgent))

    async def _count(self, call: Call, urgent: bool) -> None:
        fleet = self._fleet
        tokens = None
        async with self._gate:
            if self.possibly_too_long((call,)):  # by the ratio as other counts have corrected it
                tokens = await self._count_at_endpoints(call.request)
        if fleet.closed:
            return
        fleet.waiting.counting.discard(call)
        failure = None
        if tokens is not None:
            count, exact = tokens
            failure = self._route(call, count, exact=exact)
        self._on_counted(call, urgent, failure)

    async def _count_at_endpoints(self, request: Request) -> tuple[int, bool] | None:
        """Return the tokens of a prompt, and False if it may have more; None if unknown."""
        clock = self._fleet.clock
        for state in itertools.islice(self._counters(), COUNT_ATTEMPTS):
            began = clock()
            count = await self._backend.count_tokens(state.endpoint, request, COUNT_SECONDS)
            if count == TOO_LONG:
                return (state.context or 0) + 1, False
            if count is not None:
                self._update_ratio(len(request.payload), count)
                return count, True
            if clock() - began > SLOW_SECONDS:
                state.counts_after = clock() + PAUSE_SECONDS
        return None

    def _counters(self) -> Iterator[EndpointState]:
        """Yield the endpoints to ask, those with the longest context first, in turn.

        There are none if the endpoints have different models, which count differently.
        """
        now = self._fleet.clock()
        if len(self._models) > 1:
            return
        for context in sorted(self._by_context, reverse=True):
            states = list(self._by_context[context])
            first = next(self._turn) % len(states)
            for state in (*states[first:], *states[:first]):
                paused = state.counts_after > now
                if state.endpoint.own and state.up and not state.leaving and not paused:
                    yield state

    def _update_ratio(self, size: int, tokens: int) -> None:
        ratio = 1.1 * tokens / max(1, size)
        self._counts += 1
        decayed = 0.98 * self._ratio + 0.02 * ratio
        self._ratio = ratio if self._counts == 1 else max(ratio, decayed)

    # --- routing --------------------------------------------------------------------------------

    def _route(self, call: Call, tokens: int, *, exact: bool) -> Failure | None:
        """Set the context that a call needs; return the failure if no endpoint has it.

        ``tokens`` is the length of its prompt, at least so if not ``exact``.
        """
        contexts = self._contexts()
        if call.pinned_to is not None:
            state = self._fleet.endpoints.get(call.pinned_to)
            contexts = [(state.context if state else None) or UNKNOWN_CONTEXT]
        longest = max(contexts)
        limit = _answer_limit(call.request)
        if limit is None:
            needed = tokens + max(1, min(MIN_ANSWER, self._limit_answer(call, tokens, contexts)))
        else:
            needed = tokens + (limit if self._all_strict() else 1)
        slack = CHAT_SLACK if exact and call.request.messages is not None else 0
        if needed - slack > longest:
            message = f"the prompt contains {'' if exact else 'at least '}{tokens} tokens"
            if limit is not None and tokens < longest:
                message += f"; with max_tokens: {limit}"
            message += f" that is more than the context length of {longest}"
            return Failure("context_overflow", message)
        call.needed_context = needed - slack
        enough = [context for context in contexts if context >= needed]
        self.require(call, min(enough, default=longest))
        return None

    def _all_strict(self) -> bool:
        return all(state.strict_context for states in self._by_context.values() for state in states)

    def _limit_answer(self, call: Call, tokens: int, contexts: list[int]) -> int:
        """Set and return the ``max_tokens`` of a call whose job sets no limit."""
        enough = [context for context in contexts if context >= tokens + MIN_ANSWER]
        context = min(enough, default=max(contexts))
        free = MIN_ANSWER if context == UNKNOWN_CONTEXT else context - tokens
        if free > 2 * ANSWER_STEP:
            free -= free % ANSWER_STEP
        limit = max(1, min(max(MAX_ANSWER, call.request.max_tokens or 0), free))
        self._set_max_tokens(call, limit)
        return limit

    def _set_max_tokens(self, call: Call, limit: int) -> None:
        call.request = msgspec.structs.replace(call.request, max_tokens=limit)
        if call.group_key is not None:
            call.group_key = self._backend.group_key(call.request)

    def require(self, call: Call, context: int) -> None:
        """Have a call wait for endpoints with that context, unless all have it."""
        call.min_context = 0
        if call.pinned_to is None and self._shortest is not None and context > self._shortest:
            call.min_context = context
            self._fleet.contexts.add(context)

    def shortest_enough(self, call: Call) -> int | None:
        """Return the shortest context that may hold a call; None if no endpoint has one."""
        enough = (context for context in self._contexts() if context >= call.needed_context)
        return min(enough, default=None)

    def reroute(self, call: Call, state: EndpointState) -> bool:
        """Route a call that ``state`` refused as too long; return False if nothing is longer."""
        context = state.context
        if context is None:
            return False
        size = max(1, len(call.request.payload))
        refused = (context - (_answer_limit(call.request) or 0)) / size
        self._ratio = max(self._ratio, refused)
        if call.pinned_to is not None:
            return False
        call.needed_context = max(call.needed_context, context + 1)
        longer = self.shortest_enough(call)
        if longer is None:
            return False
        if call.request.settings.max_tokens is None and longer != UNKNOWN_CONTEXT:
            estimate = max(context, int(len(call.request.payload) * self._ratio))
            free = max(longer - estimate, longer // 4)
            self._set_max_tokens(call, max(call.request.max_tokens or 0, min(MAX_ANSWER, free)))
        self.require(call, longer)
        return True

    def take_stranded(self) -> list[Call]:
        """Remove and return the ready calls that only endpoints that serve nothing can hold."""
        states, contexts = self._fleet.endpoints.states, self._fleet.contexts
        up = [state for state in states if state.may_serve] if contexts else []
        if not up:
            return []
        missing = {context for context in contexts if not any(fits(state, context) for state in up)}
        if not missing:
            return []
        return self._fleet.waiting.remove(lambda call: call.min_context in missing)


def _answer_limit(request: Request) -> int | None:
    """Return the tokens that an answer must have room for; None if the job sets no limit."""
    return None if request.settings.max_tokens is None else request.max_tokens


def fits(state: EndpointState, context: int) -> bool:
    """Return whether the endpoint's context is at least ``context``, or unknown."""
    return state.context is None or state.context >= context
