"""An engine without a network, with any chat template, for what learns how to ask it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bagent.backends.base import Timeouts
from bagent.backends.batching.routes import GroupRoutes
from bagent.backends.batching.template_discovery import TemplateProber
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.profile import EndpointProfiles
from bagent.backends.request import CallSettings, Request, encode_payload
from bagent.types import Failure

OWN = Endpoint("here", "http://here/v1", own=True)
PLAIN = CallSettings(model="m", sampling={"temperature": 0}, extra={})
NOON = 1_795_867_200.0  # 2026-11-28 12:00 UTC
DOWN = Failure("connect", "cannot connect", passing=True)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
TRIMMED = (
    "<s>{% for m in messages %}[{{ m.role }}]\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "[assistant]\n"
)


def chat(*texts: str, settings: CallSettings = PLAIN, **fields: Any) -> Request:
    """A call whose texts are a system text, then user and assistant in turn."""
    roles = ["system", *["user", "assistant"] * len(texts)]
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    fields.setdefault("max_tokens", 16)
    return Request(settings, encode_payload(messages), messages=messages, **fields)


def raw_prompt(text: str, settings: CallSettings = PLAIN, **fields: Any) -> Request:
    """A call with raw text."""
    fields.setdefault("max_tokens", 16)
    return Request(settings, encode_payload(text), prompt=text, path="/completions", **fields)


@dataclass
class TinyEngine:
    """Answers ``/tokenize`` and ``/detokenize`` as vLLM does; a token is a character.

    ``escape`` keeps what looks like a special token inside a message from being one.
    """

    template: str = CHATML
    escape: bool = False
    engine: str | None = "vllm"
    answer: Callable[[str], tuple[int, bytes] | Failure | None] = lambda _: None
    asked: list[str] = field(default_factory=list)
    urls: set[str] = field(default_factory=set)
    probes: int = 0
    down: bool = False

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt of a conversation."""
        if self.escape:
            messages = [m | {"content": m["content"].replace("<|", "<\0|")} for m in messages]
        environment = ImmutableSandboxedEnvironment(keep_trailing_newline=True)
        return environment.from_string(self.template).render(messages=messages)

    async def ask(
        self, endpoint: Endpoint, path: str, body: bytes, timeouts: Timeouts
    ) -> tuple[int, bytes] | Failure:
        """One question."""
        assert timeouts.total is not None
        self.asked.append(path)
        self.urls.add(endpoint.url)
        given = self.answer(path)
        if self.down or given is not None:
            return given or DOWN
        asked = msgspec.json.decode(body)
        assert asked["model"] == "m"
        if path == "/detokenize":
            return 200, msgspec.json.encode({"prompt": "".join(map(chr, asked["tokens"]))})
        if "prompt" in asked:
            assert asked["add_special_tokens"] is False
            text = asked["prompt"]
        else:
            assert asked["add_generation_prompt"] is True
            text = self.render(asked["messages"])
        return 200, msgspec.json.encode({"tokens": list(map(ord, text)), "count": len(text)})

    async def probe(self, endpoint: Endpoint, seconds: float) -> Capabilities | Failure:
        """One probe."""
        self.probes += 1
        return DOWN if self.down else Capabilities(engine=self.engine)


@dataclass
class Setting:
    """A learner over a tiny engine, on a clock that the test sets."""

    engine: TinyEngine = field(default_factory=TinyEngine)
    mode: str = "auto"
    now: float = NOON
    notices: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.profiles = EndpointProfiles()
        self.groups = GroupRoutes(self.profiles, self.mode, lambda: self.now, self.notices.append)
        self.learner = TemplateProber(
            self.groups, self.profiles, self.engine.ask, self._probe, lambda _, r: "m"
        )

    async def _probe(self, endpoint: Endpoint, seconds: float) -> Capabilities | Failure:
        found = await self.engine.probe(endpoint, seconds)
        if isinstance(found, Capabilities):
            self.profiles.of(endpoint).update(found)
        return found

    async def learn(self, *samples: Request) -> None:
        """Learn from samples."""
        await self.learner.learn(OWN, samples, Timeouts())

    def limit(self, request: Request, endpoint: Endpoint = OWN) -> int | None:
        """How many calls such as this may go together."""
        return self.groups.limit(endpoint, request)

    def confirm(self, request: Request) -> None:
        """A chat answer to the request came, and nothing spoke against lists."""
        learned = self.groups.awaits_sample(OWN, request)
        assert learned is not None
        self.groups.sampled(OWN, learned, "")
