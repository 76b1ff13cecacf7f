"""What each endpoint accepts, learned from its responses."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from bagent.backends.base import Exchange
from bagent.backends.batching.chat_template import ChatTemplate, Shape
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.request import Request
from bagent.types import Failure, Reply

_NO_SCHEMA = re.compile(
    r"response[_ ]format|json[_ ]schema|structured[_ ]output|guided[_ ](json|decoding)|grammar"
    r"|output_?(config|format)|text_?format",
    re.IGNORECASE,
)
_NOT_STRICT = re.compile(
    r"invalid[_ ](json[_ ])?schema|invalid_function_parameters|\bstrict\b", re.IGNORECASE
)
_NEW_LIMIT = re.compile(
    r"max_tokens\b.*\bmax_completion_tokens|max_completion_tokens\b.*\bmax_tokens",
    re.IGNORECASE | re.DOTALL,
)
_NOT_TAKEN = re.compile(
    r"unsupported|(not|n't) support|deprecated|cannot both|only be set|no longer"
    r"|(not|n't) (permitted|allowed|accepted|available|applicable)|(not|n't) (accept|take|allow)\b"
    r"|unrecogni[sz]ed|unknown (parameter|field|name|argument)|extra(neous| inputs)|unexpected"
    r"|only the default|only \S+ (is|are) (allowed|supported|accepted)",
    re.IGNORECASE,
)
_DROPPED = ("top_k", "top_p", "temperature", "seed", "presence_penalty", "frequency_penalty")
"""Sampling parameters that reasoning models may refuse. Of two exclusive ones the first is dropped.
"""

_NO_STREAM = re.compile(r"\bstream(_options|ing|ed)?\b", re.IGNORECASE)


FormScope = tuple[str | None, bytes | None, bool]
"""The model, the schema, and whether tools may be called."""

Feature = tuple[str, str | None]
"""``schema`` or ``hints``, and the model."""


class Form(msgspec.Struct, frozen=True):
    """The form of a request; see :class:`bagent.backends.openai.chat.BodyWriter`."""

    native_schema: bool = True
    completion_limit: str = "max_tokens"
    stream: bool = True
    without: frozenset[str] = frozenset()
    """Sampling parameters that are not sent."""
    hints: str = ""
    """How the priority of returning conversations is sent."""
    strict: bool = True
    """Whether to use the strict mode of schemas and tools."""


TOKEN_ID_ENGINES = frozenset({"vllm", "bagent-sim"})
"""Engines (as named by ``/models``) that report token ids and implement vLLM's protocol."""


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


class EndpointProfile(msgspec.Struct):
    """What was learned of one endpoint."""

    engine: str | None = None
    """As ``/models`` names it; empty if it names none, None before a probe."""
    model: str = ""
    """The first model that a probe found."""
    tokenizes: bool = True
    """``/tokenize`` reports counts, as far as is known."""
    sends_limits: bool = False
    """It sent rate limits with a 429, though it is an engine of the user's own."""
    lists: Route = msgspec.field(default_factory=Route)
    batch: Route = msgspec.field(default_factory=Route)
    shapes: dict[tuple[str | None, Shape], LearnedRoute] = msgspec.field(default_factory=dict)
    not_before: float = 0.0
    """When to try to learn again (Unix seconds)."""
    forms: dict[FormScope, Form] = msgspec.field(default_factory=dict)
    responses_models: set[str] = msgspec.field(default_factory=set)
    """Models that it serves by ``/responses`` only."""
    features: dict[Feature, bool | None] = msgspec.field(default_factory=dict)
    """Whether a feature works; None while a request tries it."""

    def update(self, capabilities: Capabilities) -> None:
        """Add the result of a probe."""
        self.engine = capabilities.engine or ""
        self.model = capabilities.models[0] if capabilities.models else self.model
        if capabilities.lists is False:
            self.lists.off = self.lists.off or "it takes no lists of prompts"
        if capabilities.chat_batch is False:
            self.batch.off = self.batch.off or "it serves no batches of chats"

    @property
    def takes_all(self) -> bool:
        """Whether the engine implements vLLM's whole protocol."""
        return self.engine in TOKEN_ID_ENGINES

    @property
    def awaits_sample(self) -> bool:
        """Whether a template waits for a chat answer to confirm it."""
        return bool(self.shapes) and any(
            route.template is not None and not route.off and not route.sampled
            for route in self.shapes.values()
        )


class EndpointProfiles:
    """The profiles of all endpoints of a backend."""

    def __init__(self) -> None:
        self._profiles: dict[str, EndpointProfile] = {}

    def of(self, endpoint: Endpoint) -> EndpointProfile:
        """Return the endpoint's profile, a new one if there is none."""
        profile = self._profiles.get(endpoint.name)
        if profile is None:
            profile = self._profiles[endpoint.name] = EndpointProfile()
        return profile

    def forget(self, endpoint: Endpoint) -> None:
        """Discard all but engine and model: the server may be another one."""
        old = self.of(endpoint)
        self._profiles[endpoint.name] = EndpointProfile(engine=old.engine, model=old.model)


class EndpointForms:
    """The request form that each endpoint accepts.

    Args:
        enforce: ``auto`` asks for the schema natively until the endpoint refuses it, ``native``
            always, ``prompt`` never.
        notice: called with a message when a lesson changes the form.
    """

    def __init__(
        self, profiles: EndpointProfiles, enforce: str, notice: Callable[[str], None]
    ) -> None:
        self._profile = profiles.of
        self._enforce = enforce
        self._default = Form(native_schema=enforce != "prompt")
        self._notice = notice

    def of(self, endpoint: Endpoint, request: Request) -> Form:
        """Return the form for such a request to the endpoint."""
        return self._profile(endpoint).forms.get(_form_scope(request), self._default)

    def learn(self, endpoint: Endpoint, request: Request, failure: Failure, used: Form) -> bool:
        """Adapt the form to a refusal; return whether a retry may succeed."""
        if failure.kind != "rejected" or failure.status not in (400, 415, 422, 501):
            return False
        message = failure.message
        change: dict[str, object]
        if used.strict and _asks_strictly(request, used) and _NOT_STRICT.search(message):
            change = {"strict": False}
            lesson = "refuses the schema in strict mode; it is sent without"
        elif (
            request.settings.output is not None
            and request.body is None
            and self._enforce == "auto"
            and used.native_schema
            and _NO_SCHEMA.search(message)
        ):
            change = {"native_schema": False}
            lesson = "refuses response_format; the schema is asked for in the prompt only"
        elif used.completion_limit == "max_tokens" and _NEW_LIMIT.search(message):
            change = {"completion_limit": "max_completion_tokens"}
            lesson = ""
        elif request.stream and used.stream and _NO_STREAM.search(message):
            change = {"stream": False}
            lesson = "refuses to stream; it is asked for whole answers"
        elif dropped := _refused_name(request, message, used):
            change = {"without": used.without | {dropped}}
            lesson = f"refuses {dropped}; it is no longer sent"
        else:
            return False
        forms, scope = self._profile(endpoint).forms, _form_scope(request)
        before = forms.get(scope, self._default)
        forms[scope] = after = msgspec.structs.replace(before, **change)
        if lesson and after != before:
            self._notice(f"{endpoint.name} {lesson} ({message})")
        return True


def _asks_strictly(request: Request, used: Form) -> bool:
    """Return whether the answer's schema, or a tool, was sent in strict mode."""
    settings = request.settings
    if request.body is not None:
        return False
    output = settings.output is not None and settings.output.strict and used.native_schema
    return output or any(tool["function"].get("strict") for tool in settings.tools)


def _refused_name(request: Request, message: str, used: Form) -> str | None:
    """Return the sampling parameter that the server refuses."""
    if request.body is not None or not _NOT_TAKEN.search(message):
        return None
    if "encrypted" in message.lower() and "include" not in used.without:
        return "include"
    sampling = request.settings.sampling
    for name in _DROPPED:
        camel = re.sub("_(.)", lambda match: match[1].upper(), name)
        if name in sampling and name not in used.without and (name in message or camel in message):
            return name
    return None


def _form_scope(request: Request) -> FormScope:
    """Return the scope of a lesson: an endpoint may refuse one schema, a schema beside callable
    tools, or one model's parameter."""
    output = request.settings.output
    calls = output is not None and bool(request.settings.tools) and request.tool_choice != "none"
    return request.settings.model, output.document if output else None, calls


Hints = dict[str, str]
BY_ENGINE: Hints = {"vllm": "lower", "bagent-sim": "lower", "nvidia": "nvext"}
"""How engines, as named by ``/models``, take a priority."""

BY_TAG: Hints = {"lower": "lower", "higher": "higher", "nvext": "nvext"}
"""Values of an endpoint's tag ``priority``, for other engines."""

REFUSED = frozenset({400, 415, 422, 501})
_OF_HINTS = re.compile(r"priorit|nvext|agent_hints", re.IGNORECASE)

NO_CALL = "it kept to the schema and could call no tool; it is asked again without the schema"


class OptionalFeatures:
    """Optional features of the endpoints of one backend, each tried by one request at a time."""

    def __init__(self, profiles: EndpointProfiles) -> None:
        self._profile = profiles.of

    def form(
        self, endpoint: Endpoint, request: Request, form: Form
    ) -> tuple[Form, tuple[Feature, ...]]:
        """Return ``form`` with the features to use, and those that this request tries."""
        settings = request.settings
        if not (request.returning or settings.schema_excludes_tools):
            return form, ()
        profile = self._profile(endpoint)
        tries: list[Feature] = []
        if settings.schema_excludes_tools and settings.tools and request.tool_choice != "none":
            can = _may(profile, ("schema", settings.model), tries, request.tool_choice)
            form = form if can else msgspec.structs.replace(form, native_schema=False)
        tag = endpoint.tags.get("priority")
        hints = BY_ENGINE.get(profile.engine or "", "") if tag is None else BY_TAG.get(tag, "")
        own = {"priority", "nvext"} & settings.extra.keys()
        if hints and request.returning and not own and _may(profile, _HINTS, tries, None):
            form = msgspec.structs.replace(form, hints=hints)
        return form, tuple(tries)

    def learn(
        self,
        endpoint: Endpoint,
        form: Form,
        tries: tuple[Feature, ...],
        result: Reply | Failure,
        exchange: Exchange,
    ) -> Reply | Failure:
        """Record the outcome of a request in ``form``; return the result for the call.

        Sets ``exchange.learned`` if the call should be resent in another form.
        """
        features = self._profile(endpoint).features
        refusal = result if isinstance(result, Failure) and result.status in REFUSED else None
        if refusal and form.hints and _OF_HINTS.search(refusal.message):
            features[_HINTS] = False
            exchange.learned = True
            return result
        for attempt in tries:
            if attempt[0] == "hints":
                if isinstance(result, Reply):
                    features[attempt] = True
            elif refusal:
                features[attempt] = False
                exchange.learned = True
            elif isinstance(result, Reply):
                features[attempt] = bool(result.tool_calls)
                if not result.tool_calls:
                    exchange.learned = True
                    return Failure("bad_response", NO_CALL, passing=True, status=200)
        return result

    def leave(self, endpoint: Endpoint, tries: tuple[Feature, ...]) -> None:
        """End the attempts of a request; what it left open may be tried again."""
        features = self._profile(endpoint).features
        for feature in tries:
            if features.get(feature, False) is None:
                del features[feature]


_HINTS: Feature = ("hints", None)


def _may(profile: EndpointProfile, feature: Feature, tries: list[Feature], forced: object) -> bool:
    """Return whether to use a feature: it works, or this request tries it.

    A turn that is forced to call a tool proves nothing for one that may.
    """
    if feature in profile.features:
        return bool(profile.features[feature])
    if forced is not None:
        return False
    profile.features[feature] = None
    tries.append(feature)
    return True
