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
    Shape,
    is_dated,
    quarter_hour,
    shape_of,
    shows_reasoning,
)
from bagent.backends.batching.wire import MAX_PROMPTS, GroupAnswer
from bagent.backends.endpoint import Endpoint
from bagent.backends.openai.chat import BodyWriter
from bagent.backends.profile import EndpointProfile, EndpointProfiles, LearnedRoute, Route
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


class GroupRoutes:
    """Decides which calls share a request and records what responses taught.

    Args:
        profiles: what is known of each endpoint.
        mode: ``auto``, ``single``, ``chat`` or ``completions``.
        clock: Unix seconds.
        notice: called with a line for people when rows must go alone although it was meant or
            seen otherwise.
    """

    def __init__(
        self,
        profiles: EndpointProfiles,
        mode: str,
        clock: Callable[[], float],
        notice: Callable[[str], None],
    ) -> None:
        self._profile = profiles.of
        self.mode = mode
        self._clock = clock
        self._notice = notice
        self._ways: dict[CallSettings, BatchRoutes] = {}
        self._noticed = False

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
        ways = self._ways.get(settings) or self.ways(settings)
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
        profile = self._profile(endpoint)
        if profile.engine is None:
            return self._ask_first(profile)
        if profile.engine in _ONE_BY_ONE:
            return 1
        ways = self.ways(request.settings)
        if request.prompt is not None:
            batched = ways.prompts and self.mode != "chat" and request.max_tokens is not None
            return MAX_PROMPTS if batched and not profile.lists.off else 1
        if profile.takes_all and not profile.lists.off:
            shape = self._shape(request, ways)
            if shape is not None:
                learned = profile.shapes.get((request.settings.model, shape))
                if learned is None or self._stale(learned):
                    return self._ask_first(profile)
                if learned.template is not None and not learned.off:
                    return MAX_PROMPTS if learned.sampled else 1
        else:
            self._unproven(profile.lists.off or f"{endpoint.name} tells no token ids")
        return MAX_CHATS if self._batches(profile, ways) else 1

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
        profile = self._profile(endpoint)
        shape = self._shape(request, self.ways(request.settings))
        if shape is None or profile.lists.off:
            return None
        learned = profile.shapes.get((request.settings.model, shape))
        if learned is None or learned.template is None or learned.off or self._stale(learned):
            return None
        return learned

    def _ask_first(self, profile: EndpointProfile) -> int | None:
        return None if self._clock() >= profile.not_before else 1

    def _stale(self, learned: LearnedRoute) -> bool:
        return (
            learned.quarter_hour is not None and quarter_hour(self._clock()) != learned.quarter_hour
        )

    def _batches(self, profile: EndpointProfile, ways: BatchRoutes) -> bool:
        """Return whether chats use the batch route, which saves CPU here and in the server."""
        if self.mode == "completions" or not ways.chats or profile.batch.off:
            return False
        return profile.takes_all or self.mode == "chat"

    def wants(self, endpoint: Endpoint, request: Request) -> Shape | None:
        """Return the shape to learn before ``request`` can join a group, None if none."""
        profile = self._profile(endpoint)
        if not endpoint.own or not profile.takes_all or profile.lists.off or request.stream:
            return None
        shape = self._shape(request, self.ways(request.settings))
        if shape is None or request.body is not None:
            return None
        learned = profile.shapes.get((request.settings.model, shape))
        return shape if learned is None or self._stale(learned) else None

    # --- what was learned ---------------------------------------------------------------------

    def later(self, endpoint: Endpoint) -> None:
        """Postpone learning: the endpoint could not be asked."""
        self._profile(endpoint).not_before = self._clock() + LEARN_AGAIN

    def learn(
        self, endpoint: Endpoint, request: Request, shape: Shape, learned: LearnedRoute
    ) -> None:
        """Record what was learned of the request's shape."""
        shapes = self._profile(endpoint).shapes
        key = (request.settings.model, shape)
        old = shapes.get(key)
        if learned.template is not None and is_dated(learned.template, self._clock()):
            learned.quarter_hour = quarter_hour(self._clock())
            if old is not None and old.template == learned.template:
                learned.sampled = old.sampled
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
        profile = self._profile(endpoint)
        return profile.batch if way == "chats" else profile.lists

    def _close(self, endpoint: Endpoint, way: BatchRoute, why: str) -> None:
        route = self._route(endpoint, way)
        if not route.off:
            route.off = why
            if way != "chats":
                self._notice(f"{endpoint.name} takes no lists of prompts; they go singly ({why})")
            elif self.mode == "chat":
                self._notice(f"{endpoint.name} takes no batches of chats; they go singly ({why})")

    def _unproven(self, why: str) -> None:
        if self.mode == "completions" and not self._noticed:
            self._noticed = True
            self._notice(f"chats cannot go as lists of prompts, they go singly: {why}")


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
    # The template contains the special tokens; the server would add them again.
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
