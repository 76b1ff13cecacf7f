"""The plan that all conversations of one stage share: settings, streamed turns, token budget."""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from bagent.answers.schema.schema import OutputSchema
from bagent.backends.request import CallSettings, Watch
from bagent.types import Failure, Json, Message, Row, ToolCall, Turn, Usage

if TYPE_CHECKING:
    from bagent.agents.external_agent import ProgramPlan
    from bagent.store.journal.journal import Journal
    from bagent.tools import ToolExecutor


FIRST = 8
"""Turns of each number that are streamed before their samples count."""

WORTH = 0.1
"""Share of a turn's time that early tool calls must save: streaming costs server and client more
than a complete response. A single call at the end of its turn saves less than half of this."""

SAMPLE_EVERY = 16
"""One turn in this many is streamed as a sample, although streaming saves too little."""

_KEPT = 32
_MOST = 8


class _Turns(msgspec.Struct):
    """All turns of one number: their count, and (seconds, seconds saved) of streamed ones."""

    count: int = 0
    samples: deque[tuple[float, float]] = msgspec.field(default_factory=lambda: deque(maxlen=_KEPT))


class StreamPolicy:
    """Streams turns while tools that start before the end of their turn save enough time.

    It samples each number of turn apart, up to the eighth: the last turn of an agent is its answer,
    where no tool starts. Not thread-safe.
    """

    def __init__(self) -> None:
        self._turns = [_Turns() for _ in range(_MOST)]

    def next(self, turn: int) -> bool:
        """Return whether to stream the next reply of turn number ``turn``, from 1."""
        samples = self._of(turn)
        samples.count += 1
        if samples.count <= FIRST or samples.count % SAMPLE_EVERY == 0:
            return True
        took = sum(each for each, _ in samples.samples)
        return bool(samples.samples) and sum(saved for _, saved in samples.samples) >= WORTH * took

    def note(self, turn: int, took: float, saved: float) -> None:
        """Note a streamed turn: its seconds, and those from its first complete call to its end."""
        self._of(turn).samples.append((took, saved))

    def _of(self, turn: int) -> _Turns:
        return self._turns[min(turn, _MOST) - 1]


class FirstToolCallTimer:
    """Notes when the first tool call of a streamed reply was complete, and passes calls on."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.at: float | None = None

    def watched(self, watch: Watch) -> Callable[[ToolCall], None]:
        """Return the handler for the tool calls of one reply, around the one of ``watch``."""
        pass_on = watch()
        self.at = None

        def on_call(call: ToolCall) -> None:
            if self.at is None:
                self.at = self._clock()
            pass_on(call)

        return on_call


class SpendingLog(Protocol):
    """Counts what conversations cost while they run; ``unit`` names one."""

    def resume_conversation(self, unit: int, usage: Usage, cost_usd: float | None) -> None:
        """Note what earlier starts spent on a conversation."""
        ...

    def spend(self, unit: int, usage: Usage, cost_usd: float | None) -> None:
        """Note what a conversation has cost so far, earlier starts included."""
        ...


def _nothing(unit: int) -> list[Turn]:
    return []


def _ignore(_: str) -> None:
    return


class AgentPlan(msgspec.Struct, eq=False):
    """The tools of one stage's agents and the rules for their turns."""

    tools: ToolExecutor
    log: Journal
    earlier: Callable[[int], list[Turn]] = _nothing
    """Returns the turns of a conversation that earlier starts wrote, by its unit."""
    max_turns: int = 6
    first_choice: Json = None
    """The ``tool_choice`` of the first turn."""
    compact_at: float = 0.85
    """The share of the context at which a conversation is compacted."""
    summary_settings: CallSettings | None = None
    """The settings of the model that summarizes; None: old answers of tools are cut."""
    summary_price: Callable[[str | None, Usage], float | None] | None = None
    """Returns the cost of summaries; None: it is not known."""
    shares: bool = False
    """Equal rows may share an answer: no tool has side effects."""
    log_text: Callable[[str], None] = _ignore
    """Writes text to the run's log."""
    fail_on_tool: bool = False
    """A failed tool ends its row."""
    spending: SpendingLog | None = None
    """Counts what each turn cost."""
    streaming: StreamPolicy | None = None
    """Says which turns are streamed; None: as the stage's plan says."""


MOST_TOKENS = 4096
LEAST_TOKENS = 16
TOKEN_STEP = 128
"""Large budgets are multiples of it: rows with equal budgets may share a request."""

MARGIN_TOKENS = 64
"""Tokens that the chat template may add around a conversation."""

FIRST_TOKENS_PER_BYTE = 1 / 2.5
"""Tokens per byte of payload before any usage is reported: an upper estimate for English."""

_CONTEXT_IN_MESSAGE = re.compile(
    r"(?:context (?:length|window|size)[^0-9]{0,40}?|\(n_ctx = ?)(\d{2,8})", re.I
)
_PROMPT_IN_MESSAGE = re.compile(
    r"(?:prompt contains (?:at least )?|request \(|\()(\d{1,8}) (?:input )?tokens?\b"
    r"|(\d{1,8}) in the messages",
    re.I,
)


class TokenBudget:
    """Chooses ``max_tokens`` where the job sets none: what the context leaves, at most 4096.

    The tokens of a prompt are estimated from its bytes by the largest ratio of recent replies, so
    that requests are not refused as too long.

    Args:
        context: the model's context length in tokens; None if the endpoint does not report it.
    """

    def __init__(self, context: int | None) -> None:
        self.context = context
        self.fixed = 0
        """Bytes that every request has beside its prompt, such as the descriptions of tools."""
        self._ratio = FIRST_TOKENS_PER_BYTE
        self._seen = 0

    def for_payload(self, size: int) -> int | None:
        """Return the tokens of an answer to ``size`` bytes of prompt; None: the server decides."""
        if self.context is None:
            return MOST_TOKENS
        available = self.context - self.request_tokens(size) - MARGIN_TOKENS
        if available > 2 * TOKEN_STEP:
            available -= available % TOKEN_STEP
        return max(LEAST_TOKENS, min(MOST_TOKENS, available))

    def tokens(self, size: int) -> int:
        """Estimate the tokens of ``size`` bytes of a prompt from above."""
        return int(size * self._ratio)

    def request_tokens(self, size: int) -> int:
        """Estimate the tokens of a request with a prompt of ``size`` bytes."""
        return self.tokens(size + self.fixed)

    def learn(self, size: int, prompt_tokens: int) -> None:
        """Learn that a prompt of ``size`` bytes had ``prompt_tokens`` tokens."""
        if size <= 0:
            return
        ratio = prompt_tokens / (size + self.fixed) * 1.1
        self._seen += 1
        self._ratio = ratio if self._seen == 1 else max(ratio, self._ratio * 0.98 + ratio * 0.02)

    def after_overflow(self, failure: Failure, limit: int) -> int | None:
        """Return fewer tokens to request after a refusal, by the numbers in the server's message.

        None if the prompt alone does not fit, or the message has no numbers.
        """
        context = _CONTEXT_IN_MESSAGE.search(failure.message)
        prompt = _PROMPT_IN_MESSAGE.search(failure.message)
        if context and self.context is None:
            self.context = int(context.group(1))
        if context and prompt:
            available = int(context.group(1)) - int(prompt.group(1) or prompt.group(2))
            return available if LEAST_TOKENS <= available < limit else None
        return limit // 4 if context and limit // 4 >= LEAST_TOKENS else None


STREAM_EVERY = 50
"""With ``stream: auto`` one call in this many is streamed, for its time to first token."""

MOST_HASHES = 256
"""Cached beginnings of request hashes, one for each token limit and seed."""


class Renderer(Protocol):
    """Renders a row's prompt: :class:`bagent.job.templates.prompt.Prompt` does."""

    raw: bool

    def render(
        self, data: Mapping[str, Json], extra: Mapping[str, Json] | None = None
    ) -> list[Message]:
        """Return the messages of one row, or raise TemplateFailure."""
        ...

    def render_raw(self, data: Mapping[str, Json], extra: Mapping[str, Json] | None = None) -> str:
        """Return the raw text of one row, or raise TemplateFailure."""
        ...


class ImageLoader(Protocol):
    """Reads images of rows from buckets ahead of their prompts."""

    def load_images(self, row: Row) -> list[str]:
        """Read the images that a row names, in any thread, and return their URLs."""
        ...

    def release_images(self, urls: Sequence[str]) -> None:
        """Drop images whose prompts were rendered."""
        ...


class StagePlan(msgspec.Struct, eq=False):
    """One stage's prompt, settings and rules for answers; the same for all its rows."""

    name: str
    prompt: Renderer
    settings: CallSettings
    schema: OutputSchema | None
    budget: TokenBudget
    describe: bool = False
    reasks: int = 2
    """How often an invalid answer is asked again."""
    grow: float = 1.0
    """Factor for ``max_tokens``, once, after a truncated answer."""
    truncated: str | None = None
    """The job's ``output.truncated``."""
    stream: bool | None = None
    answers: int = 1
    row_seconds: float | None = None
    """Time limit of a row, from its first call being ready."""
    own_bodies: bool = False
    """Rows are request bodies (an OpenAI batch file)."""
    own_bodies_keep_model: bool = True
    agent: AgentPlan | None = None
    program: ProgramPlan | None = None
    images: ImageLoader | None = None
    """Reads images from buckets; None: the prompt has none."""
    price: Callable[[str | None, Json], float | None] | None = None
    _count: int = 0
    _hash_prefixes: dict[tuple[int, int], Any] = {}

    def streamed(self) -> bool:
        """Return whether the next call is streamed."""
        if self.stream is not None:
            return self.stream
        self._count += 1
        return self._count % STREAM_EVERY == 1

    def request_hash(self, payload: bytes, max_tokens: int | None, seed: int | None) -> int:
        """Return a 64-bit hash of the exact request: settings, prompt, limit and seed."""
        limits = max_tokens or 0, -1 if seed is None else seed
        digest_start = self._hash_prefixes.get(limits)
        if digest_start is None:
            prefix = self.settings.fingerprint() + b"%d/%d/" % limits
            if len(self._hash_prefixes) >= MOST_HASHES:
                self._hash_prefixes.clear()
            digest_start = self._hash_prefixes[limits] = hashlib.blake2b(prefix, digest_size=8)
        digest = digest_start.copy()
        digest.update(payload)
        return int.from_bytes(digest.digest(), "big")
