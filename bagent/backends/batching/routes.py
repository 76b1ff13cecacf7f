"""Which calls may share a request, and which such requests each endpoint accepts.

Raw prompts travel as a list to ``/completions``. Chats travel as such a list where the endpoint's
chat template is known and proven (``template_discovery``), else as a batch to
``/chat/completions/batch`` where that is served. All other calls travel alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from bagent.backends.batching.chat_template import (
    ChatTemplate,
    Shape,
    is_dated,
    quarter_hour,
    shape_of,
    shows_reasoning,
)
from bagent.backends.batching.wire import MAX_PROMPTS, GroupAnswer
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.openai.chat import BodyWriter
from bagent.backends.request import CallSettings, Request, encode_payload
from bagent.types import Failure, Reply

_BOTH = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
        "repetition_penalty", "logit_bias", "seed", "stop", "n", "user", "response_format",
        "structured_outputs", "priority", "cache_salt", "length_penalty",
        "include_stop_str_in_output",
    }
)  # fmt: skip
_LISTS = _BOTH | {
    "stop_token_ids", "min_tokens", "ignore_eos", "skip_special_tokens", "session_id",
    "spaces_between_special_tokens", "allowed_token_ids", "bad_words", "vllm_xargs",
}  # fmt: skip
"""Parameters that chat and text completions share (vLLM)."""

_CHATS = _BOTH | {"logprobs", "top_logprobs", "chat_template_kwargs", "include_reasoning"}
"""Parameters of a chat batch (vLLM's ``BatchChatCompletionRequest``; it ignores others)."""

_NOT_RAW = frozenset(
    {
        "best_of", "prompt", "messages", "stream", "stream_options", "max_tokens",
        "max_completion_tokens", "use_beam_search", "request_id",
    }
)  # fmt: skip


class BatchRoutes(msgspec.Struct, frozen=True):
    """The group routes that the settings of calls allow."""

    prompts: bool
    templated: bool
    chats: bool


def batch_routes(settings: CallSettings) -> BatchRoutes:
    """Return the routes that carry all of ``settings`` unchanged."""
    fields: Mapping[str, Any] = {**settings.sampling, **settings.extra}
    names = {name for name, value in fields.items() if value is not None}
    if settings.tools:
        return BatchRoutes(prompts=False, templated=False, chats=False)
    single = fields.get("n") in (None, 1)
    return BatchRoutes(
        prompts=single and not names & _NOT_RAW,
        templated=single and names <= _LISTS,
        chats=single and names <= _CHATS,
    )


MAX_CHATS = 128
"""Conversations in one chat batch. More save nothing, and the slowest delays all."""

LEARN_AGAIN = 30.0
"""Seconds until an endpoint that could not be asked is asked again."""

TOKEN_ID_ENGINES = frozenset({"vllm", "bagent-sim"})
"""Engines (as named by ``/models``) that report token ids and implement vLLM's protocol."""

_NO_MODEL = re.compile(r"\bmodel\b", re.IGNORECASE)
"""In a 404: the model is missing, not the route."""

_ONE_BY_ONE = frozenset({"llamacpp", "llama.cpp"})
"""llama.cpp counts only the first prompt of a list in its usage and ignores the schema there."""

BatchRoute = Literal["prompts", "templated", "chats"]

_NO_LISTS = re.compile(
    r"prompt\b.{0,80}\b(string|str|list|array|sequence)\b|(string|str|list|array)\b.{0,80}\bprompt"
    r"|(multiple|several|batch\w*|list of|array of) prompts|cannot unmarshal array",
    re.IGNORECASE | re.DOTALL,
)


class Route(msgspec.Struct):
    """One group route of an endpoint."""

    worked: bool = False
    """A group was answered."""
    strikes: int = 0
    """Refusals of groups."""
    off: str = ""
    """Why the route is not used, empty if it is."""


class LearnedRoute(msgspec.Struct):
    """The template of one shape of conversation, or why there is none."""

    template: ChatTemplate | None = None
    off: str = ""
    """Why there is no template."""
    sampled: bool = False
    """A chat answer confirmed the template."""
    sampling: bool = False
    """A request that may confirm it is in flight."""
    quarter_hour: int | None = None
    """When a template with a date was learned."""
    first_ids: tuple[int, ...] = ()
    """The token ids with which every prompt begins."""


class KnownRoutes(msgspec.Struct):
    """The group routes of one endpoint."""

    engine: str | None = None
    """Empty if the endpoint names none, None before a probe."""
    lists: Route = msgspec.field(default_factory=Route)
    batch: Route = msgspec.field(default_factory=Route)
    shapes: dict[tuple[str | None, Shape], LearnedRoute] = msgspec.field(default_factory=dict)
    not_before: float = 0.0

    @property
    def takes_all(self) -> bool:
        """Whether the engine implements vLLM's whole protocol."""
        return self.engine in TOKEN_ID_ENGINES


class GroupRoutes:
    """Decides which calls share a request and records what responses taught.

    ``awaiting`` counts the templates that wait for a chat answer to confirm them.

    Args:
        mode: ``auto``, ``single``, ``chat`` or ``completions``.
        clock: Unix seconds.
        notice: called with a line for people when rows must go alone although it was meant or
            seen otherwise.
    """

    def __init__(
        self, mode: str, clock: Callable[[], float], notice: Callable[[str], None]
    ) -> None:
        self.mode = mode
        self._clock = clock
        self._notice = notice
        self._known: dict[str, KnownRoutes] = {}
        self._ways: dict[CallSettings, BatchRoutes] = {}
        self._told = False
        self.awaiting = 0

    def known(self, endpoint: Endpoint) -> KnownRoutes:
        """Return the state of the endpoint, new if there is none."""
        state = self._known.get(endpoint.name)
        if state is None:
            state = self._known[endpoint.name] = KnownRoutes()
        return state

    def probed(self, endpoint: Endpoint, capabilities: Capabilities) -> None:
        """Record the result of a probe."""
        state = self.known(endpoint)
        state.engine = capabilities.engine or ""
        if capabilities.lists is False:
            state.lists.off = state.lists.off or "it takes no lists of prompts"
        if capabilities.chat_batch is False:
            state.batch.off = state.batch.off or "it serves no batches of chats"

    def forget(self, endpoint: Endpoint) -> None:
        """Discard all but the engine's name: the server may be another one."""
        if endpoint.name in self._known:
            old = self._known[endpoint.name]
            self.awaiting -= sum(_awaits(learned) for learned in old.shapes.values())
            self._known[endpoint.name] = KnownRoutes(engine=old.engine)

    # --- which calls -------------------------------------------------------------------------

    def ways(self, settings: CallSettings) -> BatchRoutes:
        """Return :func:`batch_routes` of the settings, cached."""
        routes = self._ways.get(settings)
        if routes is None:
            if len(self._ways) >= 256:
                self._ways.clear()
            routes = self._ways[settings] = batch_routes(settings)
        return routes

    def key(self, request: Request) -> Hashable | None:
        """See :meth:`bagent.backends.base.Backend.group_key`."""
        if self.mode == "single" or request.stream or request.body is not None:
            return None
        settings = request.settings
        ways = self.ways(settings)
        if request.prompt is not None:
            if not ways.prompts or self.mode == "chat" or request.max_tokens is None:
                return None
            return settings, request.max_tokens, request.seed
        shape = self._shape(request, ways)
        if shape is None and (not ways.chats or self.mode == "completions"):
            self._unproven("they use what a list of prompts cannot carry")
            return None
        return settings, request.max_tokens, request.seed, shape

    def _shape(self, request: Request, ways: BatchRoutes) -> Shape | None:
        """Return the shape that a chat needs for a list of prompts, None if it cannot be in one."""
        if (
            not ways.templated
            or self.mode == "chat"
            or request.max_tokens is None  # text completions would stop after 16 tokens
            or request.messages is None
        ):
            return None
        return shape_of(request.messages)

    # --- how many, and by which way -----------------------------------------------------------

    def limit(self, endpoint: Endpoint, request: Request) -> int | None:
        """See :meth:`bagent.backends.base.Backend.group_limit`."""
        if self.mode == "single" or request.stream or request.body is not None:
            return 1
        if not endpoint.own:
            if self.mode == "completions":
                self._unproven(f"{endpoint.name} is no engine of your own")
            return 1
        state = self.known(endpoint)
        if state.engine is None:
            return self._ask_first(state)
        if state.engine in _ONE_BY_ONE:
            return 1
        ways = self.ways(request.settings)
        if request.prompt is not None:
            batched = ways.prompts and self.mode != "chat" and request.max_tokens is not None
            return MAX_PROMPTS if batched and not state.lists.off else 1
        if state.takes_all and not state.lists.off:
            shape = self._shape(request, ways)
            if shape is not None:
                learned = state.shapes.get((request.settings.model, shape))
                if learned is None or self._stale(learned):
                    return self._ask_first(state)
                if learned.template is not None and not learned.off:
                    return MAX_PROMPTS if learned.sampled else 1
        else:
            self._unproven(state.lists.off or f"{endpoint.name} tells no token ids")
        return MAX_CHATS if self._batches(state, ways) else 1

    def way(self, endpoint: Endpoint, request: Request) -> BatchRoute | None:
        """Return how a group with ``request`` is sent now; None: each call alone."""
        limit = self.limit(endpoint, request)
        if limit is None or limit == 1:
            return None
        if request.prompt is not None:
            return "prompts"
        return "templated" if self.learned(endpoint, request) is not None else "chats"

    def learned(self, endpoint: Endpoint, request: Request) -> LearnedRoute | None:
        """Return the proven template for the request's shape, if it may be used."""
        state = self.known(endpoint)
        shape = self._shape(request, self.ways(request.settings))
        if shape is None or state.lists.off:
            return None
        learned = state.shapes.get((request.settings.model, shape))
        if learned is None or learned.template is None or learned.off or self._stale(learned):
            return None
        return learned

    def _ask_first(self, state: KnownRoutes) -> int | None:
        return None if self._clock() >= state.not_before else 1

    def _stale(self, learned: LearnedRoute) -> bool:
        return (
            learned.quarter_hour is not None and quarter_hour(self._clock()) != learned.quarter_hour
        )

    def _batches(self, state: KnownRoutes, ways: BatchRoutes) -> bool:
        """Return whether chats use the batch route, which saves CPU here and in the server."""
        if self.mode == "completions" or not ways.chats or state.batch.off:
            return False
        return state.takes_all or self.mode == "chat"

    def wants(self, endpoint: Endpoint, request: Request) -> Shape | None:
        """Return the shape to learn before ``request`` can join a group, None if none."""
        state = self.known(endpoint)
        if not endpoint.own or not state.takes_all or state.lists.off or request.stream:
            return None
        shape = self._shape(request, self.ways(request.settings))
        if shape is None or request.body is not None:
            return None
        learned = state.shapes.get((request.settings.model, shape))
        return shape if learned is None or self._stale(learned) else None

    # --- what was learned ---------------------------------------------------------------------

    def later(self, endpoint: Endpoint) -> None:
        """Postpone learning: the endpoint could not be asked."""
        self.known(endpoint).not_before = self._clock() + LEARN_AGAIN

    def learn(
        self, endpoint: Endpoint, request: Request, shape: Shape, learned: LearnedRoute
    ) -> None:
        """Record what was learned of the request's shape."""
        shapes = self.known(endpoint).shapes
        key = (request.settings.model, shape)
        old = shapes.get(key)
        if learned.template is not None and is_dated(learned.template, self._clock()):
            learned.quarter_hour = quarter_hour(self._clock())
            if old is not None and old.template == learned.template:
                learned.sampled = old.sampled
        self.awaiting += _awaits(learned) - (_awaits(old) if old is not None else 0)
        shapes[key] = learned
        if learned.off:
            self._unproven(f"{endpoint.name}: {learned.off}")

    def awaits_sample(self, endpoint: Endpoint, request: Request) -> LearnedRoute | None:
        """Return the template that a chat answer to ``request`` would confirm."""
        if not endpoint.own or request.stream or request.messages is None:
            return None
        learned = self.learned(endpoint, request)
        return None if learned is None or learned.sampled or learned.sampling else learned

    def sampled(self, endpoint: Endpoint, learned: LearnedRoute, why_not: str) -> None:
        """Record that a chat answer confirmed a template, or refuted it (``why_not``)."""
        self.awaiting -= _awaits(learned)
        learned.sampled = True
        learned.off = why_not
        if why_not:
            self._unproven(f"{endpoint.name}: {why_not}")

    def confirmed(self, endpoint: Endpoint, way: BatchRoute) -> None:
        """Record that a group was answered."""
        self._route(endpoint, way).worked = True

    def distrust(self, endpoint: Endpoint, request: Request, why: str) -> None:
        """Stop lists of this shape: one was answered differently than chats are."""
        learned = self.learned(endpoint, request)
        if learned is not None:
            learned.off = why
            self._notice(f"{endpoint.name}: chats go no longer as lists of prompts: {why}")

    def one_answer(self, endpoint: Endpoint, way: BatchRoute) -> None:
        """Stop groups on this route: several calls were answered as one."""
        self._close(endpoint, way, "it answered several calls as one")

    def refused(self, endpoint: Endpoint, way: BatchRoute, failure: Failure) -> bool:
        """Record a group's failure; return whether the endpoint refuses groups.

        Then its calls travel alone from now on. The first refusal that a single call might have met
        too is ignored: the group is halved, and a second refusal decides.
        """
        route, status = self._route(endpoint, way), failure.status
        if status is None or failure.kind in ("context_overflow", "auth", "budget"):
            return False
        if status in (404, 405, 501) and not _NO_MODEL.search(failure.message):
            self._close(endpoint, way, failure.message)
            return True
        if route.worked or failure.busy or status in (404, 408, 413, 429, 504):
            return False
        if route.off:
            return True
        route.strikes += 1
        if status >= 500 or _NO_LISTS.search(failure.message) or route.strikes > 1:
            self._close(endpoint, way, failure.message)
            return True
        return False

    def _route(self, endpoint: Endpoint, way: BatchRoute) -> Route:
        state = self.known(endpoint)
        return state.batch if way == "chats" else state.lists

    def _close(self, endpoint: Endpoint, way: BatchRoute, why: str) -> None:
        route = self._route(endpoint, way)
        if not route.off:
            route.off = why
            if way != "chats":
                self._notice(f"{endpoint.name} takes no lists of prompts; they go singly ({why})")
            elif self.mode == "chat":
                self._notice(f"{endpoint.name} takes no batches of chats; they go singly ({why})")

    def _unproven(self, why: str) -> None:
        if self.mode == "completions" and not self._told:
            self._told = True
            self._notice(f"chats cannot go as lists of prompts, they go singly: {why}")


def _awaits(learned: LearnedRoute) -> int:
    """Return 1 if the template waits for a chat answer to confirm it, else 0."""
    return int(learned.template is not None and not learned.off and not learned.sampled)


ROUTE_PATHS: dict[BatchRoute, str] = {
    "prompts": "/completions",
    "templated": "/completions",
    "chats": "/chat/completions/batch",
}
"""Paths below an endpoint's base address."""

_TOKEN_IDS = b',"return_token_ids":true'
_NO_SPECIAL = b',"add_special_tokens":false'


def group_body(
    writer: BodyWriter,
    way: BatchRoute,
    group: Sequence[Request],
    learned: LearnedRoute | None,
    token_ids: bool,
) -> bytes:
    """Return the JSON body of one request for ``group``.

    Args:
        learned: the template, for the way ``templated``.
        token_ids: whether to ask for token ids: they are the only counts by the call.
    """
    extra = _TOKEN_IDS if token_ids else b""
    if learned is None or learned.template is None:
        key = "messages" if way == "chats" else "prompt"
        return writer.group_body(group[0], key, [request.payload for request in group], extra)
    render = learned.template.render
    payloads = [encode_payload(render(request.messages or ())) for request in group]
    # The template writes the tokens at the beginning itself; the server would add them again.
    return writer.group_body(group[0], "prompt", payloads, _NO_SPECIAL + extra)


def group_results(
    groups: GroupRoutes, endpoint: Endpoint, way: BatchRoute, request: Request, answer: GroupAnswer
) -> tuple[list[Reply | Failure], bool]:
    """Return the results of a group, and whether to resend its calls alone at no cost.

    They are resent if the endpoint answered all calls as one, or differently than chats.
    """
    size = len(answer.results)
    if answer.answered <= 1:
        groups.one_answer(endpoint, way)
        return answer.results, True
    why = ""
    if way == "templated":
        if answer.strange_prompt:
            why = "the prompts did not begin as chats do"
        elif any(
            isinstance(result, Reply) and shows_reasoning(result.text) for result in answer.results
        ):
            why = "the model thinks before it answers"
    if why:
        groups.distrust(endpoint, request, why)
        failure = Failure("bad_response", f"not as chats are answered: {why}", True, 200)
        return [failure] * size, True
    groups.confirmed(endpoint, way)
    return answer.results, False
