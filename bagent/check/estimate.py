"""Estimates for all rows from the sample: tokens, cost, and rows that do not fit.

The server's tokenizer counts tokens where it serves one. Routes: vLLM's and SGLang's ``/tokenize``
(``prompt`` or ``messages`` in, ``count`` and ``tokens`` out), and llama.cpp's server
(``/apply-template`` turns messages into text, ``/tokenize`` takes it as ``content`` and returns
only ``tokens``). None of these generates anything.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping, Sequence
from statistics import linear_regression, mean, median
from typing import Protocol

import msgspec

from bagent.agents.plan import LEAST_TOKENS
from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.http.client import NETWORK_ERRORS, Transport
from bagent.backends.request import encode_payload
from bagent.check.prefix_sharing import PACKED, PromptBytes
from bagent.check.report import CostReport, MaxTokens, RowReport, TokenReport
from bagent.check.sample import Sampled, count_repeats
from bagent.errors import UsageError
from bagent.money.prices import Price, StageUsage, mode_costs, sum_costs
from bagent.text.json import decode_json
from bagent.types import Json

MAX_COUNTED = 64
"""Rows whose prompts the server counts; the others are estimated by these."""

LONGEST_COUNTED = 16
"""How many of these are the longest prompts, which decide what fits the context."""

BYTES_PER_TOKEN = 4.0
"""Bytes of UTF-8 per token without a tokenizer: English prose has 4 to 4.5."""

_AT_ONCE = 8
_TIMEOUTS = Timeouts(connect=5.0, first_token=None, idle=None, total=30.0)
_NOT_SERVED = frozenset({404, 405, 501})

MILLION = 1_000_000


class Counted(msgspec.Struct, frozen=True):
    """Tokens of one prompt."""

    tokens: int
    packed: bytes | None = None
    """Token ids, four bytes each, where the server returns them."""


class Tokenizer(Protocol):
    """Counts the tokens of prompts."""

    name: str

    async def count(self, sampled: Sampled) -> Counted | None:
        """Return the tokens of one prompt; None where they are unknown."""
        ...


class SimTokenizer:
    """The simulated engine's tokenizer, without the engine."""

    name = "the simulated engine's tokenizer"

    async def count(self, sampled: Sampled) -> Counted | None:
        """Return the tokens of one prompt."""
        from bagent.sim import tokens

        messages = sampled.messages
        packed = tokens.pack(sampled.prompt or "" if messages is None else tokens.render(messages))
        return Counted(tokens.count(packed), packed)


class ServerTokenizer:
    """The tokenizer of an endpoint, detected at the first prompt.

    Args:
        model: the model to name; None leaves it to the server.
    """

    def __init__(self, transport: Transport, endpoint: Endpoint, model: str | None) -> None:
        self._transport = transport
        self._endpoint = msgspec.structs.replace(endpoint, url=endpoint.root)
        self._model = model
        self.name = f"/tokenize of {endpoint.name}"
        self.served = True
        self._llama = False

    async def count(self, sampled: Sampled) -> Counted | None:
        """Return the tokens that the server counts; after a missing route it is not asked again."""
        if not self.served:
            return None
        if not self._llama:
            counted = _counted(await self._post("/tokenize", self._payload(sampled)))
            if counted is not None or not self.served:
                return counted
        return await self._by_content(sampled)

    def _payload(self, sampled: Sampled) -> dict[str, Json]:
        named: dict[str, Json] = {"model": self._model} if self._model else {}
        messages = sampled.messages
        if messages is not None:
            return {**named, "messages": messages}
        return {**named, "prompt": sampled.prompt or ""}

    async def _by_content(self, sampled: Sampled) -> Counted | None:
        """Count the way of llama.cpp, which returns no ``count``."""
        text = sampled.prompt
        if text is None:
            applied = await self._post("/apply-template", {"messages": sampled.messages})
            text = applied.get("prompt") if isinstance(applied, dict) else None
        if not isinstance(text, str):
            return None
        payload = {"content": text, "add_special": True, "parse_special": True}
        answer = await self._post("/tokenize", payload)
        ids = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(ids, list) or (text and not ids):
            return None
        self._llama = True
        return Counted(len(ids), _packed(ids))

    async def _post(self, path: str, payload: Json) -> Json:
        try:
            async with self._transport.post(
                self._endpoint, path, encode_payload(payload), _TIMEOUTS
            ) as response:
                if response.status != 200:
                    self.served = self.served and response.status not in _NOT_SERVED
                    return None
                return decode_json(await response.read())
        except NETWORK_ERRORS:
            self.served = False
            return None


def _counted(answer: Json) -> Counted | None:
    if not isinstance(answer, dict):
        return None
    count, ids = answer.get("count"), answer.get("tokens")
    if isinstance(count, bool) or not isinstance(count, int):
        return None
    return Counted(count, _packed(ids) if isinstance(ids, list) else None)


def _packed(ids: list[Json]) -> bytes | None:
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error:
        return None


def choose_rows(
    sizes: Sequence[int], limit: int = MAX_COUNTED, longest: int = LONGEST_COUNTED
) -> list[int]:
    """Return the indexes of the rows that the server counts, ascending.

    These are all if few, else the longest and others spread evenly.

    Args:
        sizes: bytes of each prompt, in row order.
    """
    if len(sizes) <= limit:
        return list(range(len(sizes)))
    by_size = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    chosen = set(by_size[:longest])
    others = [index for index in range(len(sizes)) if index not in chosen]
    more = limit - longest
    chosen.update(others[number * len(others) // more] for number in range(more))
    return sorted(chosen)


async def count_sample(sample: Sequence[Sampled], tokenizer: Tokenizer) -> dict[int, Counted]:
    """Return the counts of the chosen rows of ``sample`` by index, a few at once.

    The first is counted alone: it shows whether there is a tokenizer at all.
    """
    indexes = [index for index, sampled in enumerate(sample) if sampled.is_one_text]
    chosen = [
        indexes[position] for position in choose_rows([sample[index].size for index in indexes])
    ]
    gate = asyncio.Semaphore(_AT_ONCE)

    async def ask(index: int) -> tuple[int, Counted | None]:
        async with gate:
            return index, await tokenizer.count(sample[index])

    results = [await ask(index) for index in chosen[:1]]
    results += await asyncio.gather(*(ask(index) for index in chosen[1:]))
    return {index: counted for index, counted in results if counted is not None}


class Sizes(msgspec.Struct, frozen=True):
    """Tokens of each prompt of a sample."""

    tokens: tuple[float | None, ...]
    """In the sample's order; None where there is no request."""
    counted: Mapping[int, Counted]
    """The server's own counts by index."""
    size_ratio: float
    """Bytes of :attr:`Sampled.size` per token."""
    text_ratio: float
    """Bytes of :attr:`Sampled.text` per token."""

    @property
    def of_requests(self) -> list[float]:
        """Return the tokens of the prompts that can be sent."""
        return [tokens for tokens in self.tokens if tokens is not None]


def estimate_sizes(sample: Sequence[Sampled], counted: Mapping[int, Counted]) -> Sizes:
    """Return the tokens of all prompts: counted, or estimated by the bytes of the counted ones.

    The definitions of tools, which no tokenizer is asked about, are estimated by their bytes.
    """
    total = sum(prompt.tokens for prompt in counted.values())
    size_ratio = text_ratio = BYTES_PER_TOKEN
    if total:
        size_ratio = max(0.1, sum(sample[index].size for index in counted) / total)
        counted_bytes = sum(len(_encoded(sample[index])) for index in counted)
        text_ratio = max(0.1, counted_bytes / total)
    tokens: list[float | None] = []
    for index, sampled in enumerate(sample):
        if sampled.request is None:
            tokens.append(None)
            continue
        if index in counted:
            prompt = float(counted[index].tokens)
        else:
            prompt = float(sampled.token_ids) or sampled.size / size_ratio
        tokens.append(prompt + sampled.tools_size / size_ratio)
    return Sizes(tuple(tokens), counted, size_ratio, text_ratio)


def prompts_as_bytes(sample: Sequence[Sampled], sizes: Sizes) -> tuple[list[PromptBytes], float]:
    """Return the prompts with their bytes per token, by token ids where these are known, else by
    text."""
    packed = [
        PromptBytes(prompt.packed, prompt.tokens)
        for prompt in sizes.counted.values()
        if prompt.packed
    ]
    if len(packed) >= 2 and len(packed) == len(sizes.counted):
        return packed, PACKED
    return text_bytes(sample, sizes.text_ratio), sizes.text_ratio


def text_bytes(sample: Sequence[Sampled], ratio: float) -> list[PromptBytes]:
    """Return the prompts as text; tokens are estimated by ``ratio`` bytes each."""
    texts = [_encoded(sampled) for sampled in sample if sampled.request is not None]
    return [PromptBytes(text, len(text) / ratio) for text in texts]


def max_tokens_range(sample: Sequence[Sampled], *, automatic: bool) -> MaxTokens:
    """Return the range of ``max_tokens`` over the sample."""
    limits = [sampled.max_tokens for sampled in sample if sampled.generates]
    explicit = [limit for limit in limits if limit is not None]
    without = len(limits) - len(explicit)
    if not explicit or without:
        return MaxTokens(None, None, automatic, without, len(limits))
    return MaxTokens(min(explicit), max(explicit), automatic, without, len(limits))


def mean_shift(characters: Sequence[int], sizes: Sizes, mean_characters: float) -> float:
    """Return by how many tokens the mean prompt of all rows exceeds that of the sample.

    Tokens are taken to grow with the characters of a row as they do in the sample, so that one
    long row of the sample does not stand for many.

    Args:
        characters: of the fields of each row of the sample.
        sizes: of the same rows.
        mean_characters: of all rows that were read.
    """
    pairs = [(x, y) for x, y in zip(characters, sizes.tokens, strict=True) if y is not None]
    lengths, tokens = [x for x, _ in pairs], [y for _, y in pairs]
    if len(set(lengths)) < 2:
        return 0.0
    slope = max(0.0, linear_regression(lengths, tokens).slope)
    return max(slope * (mean_characters - mean(lengths)), min(tokens) - mean(tokens))


def token_report(
    sample: Sequence[Sampled],
    sizes: Sizes,
    requests: float,
    how: tuple[str, str],
    *,
    most: float | None = None,
    shift: float = 0.0,
) -> TokenReport:
    """Return the report on tokens.

    Args:
        requests: requests of all rows.
        how: see :func:`bagent.check.facts.counting_method`.
        most: requests of all rows at most, where turns or rounds ask again; None: ``requests``.
        shift: tokens by which the mean prompt of all rows exceeds that of the sample.
    """
    most = requests if most is None else most
    prompt_tokens = sizes.of_requests
    share = len(prompt_tokens) / len(sample) if sample else 0.0
    limits = [sampled.max_tokens for sampled in sample if sampled.request is not None]
    answers = None
    if limits and None not in limits:
        answers = round(mean(limit or 0 for limit in limits) * share * most)
    return TokenReport(
        how=how[0],
        by=how[1],
        rows=len(sample),
        counted=len(sizes.counted),
        least=round(min(prompt_tokens)) if prompt_tokens else None,
        median=round(median(prompt_tokens)) if prompt_tokens else None,
        most=round(max(prompt_tokens)) if prompt_tokens else None,
        mean=round(mean(prompt_tokens), 1) if prompt_tokens else None,
        prompts=round((mean(prompt_tokens) + shift) * share * requests) if prompt_tokens else None,
        answers_at_most=answers,
        images=sum(sampled.images for sampled in sample),
        repeats=count_repeats(sample),
        grows=most > requests,
    )


def too_long_rows(sample: Sequence[Sampled], sizes: Sizes, context: int | None) -> list[RowReport]:
    """Return the rows whose prompt and answer exceed ``context`` tokens together.

    A server refuses a request whose prompt and ``max_tokens`` exceed the context. An automatic
    ``max_tokens`` shrinks to what remains, but not below a few tokens.
    """
    rows: list[RowReport] = []
    if context is None:
        return rows
    for index, (sampled, tokens) in enumerate(zip(sample, sizes.tokens, strict=True)):
        if sampled.request is None or tokens is None:
            continue
        explicit = (
            sampled.request.body is not None or sampled.request.settings.max_tokens is not None
        )
        answer = (sampled.max_tokens or LEAST_TOKENS) if explicit else LEAST_TOKENS
        answer = answer if sampled.generates else 0
        if tokens + answer > context:
            about = "" if index in sizes.counted else "about "
            message = f"{about}{round(tokens):,} prompt tokens and {answer:,} for the answer"
            message += f" are more than {context:,}"
            rows.append(RowReport(sampled.row.id, sampled.row.source, sampled.row.line, message))
    return rows


def read_price(text: str | None) -> tuple[float, float] | None:
    """Read ``IN,OUT``: dollars per million tokens of prompts and of answers.

    Raises:
        UsageError: it is something else.
    """
    if text is None:
        return None
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        first = second = -1.0
    if not (0 <= first < float("inf") and 0 <= second < float("inf")):
        raise UsageError(
            f"--price {text}: not a price", hint="dollars per million tokens: --price 0.15,0.60"
        )
    return first, second


def cost_report(
    price: Price | None, tokens: TokenReport, requests: int, shared: float
) -> CostReport:
    """Return the cost of all rows, with answers at their longest.

    Args:
        requests: requests of all rows.
        shared: tokens that all prompts begin with, cached from the second request on.
    """
    if price is None:
        return CostReport(None, None, None, None, None)
    prompts = None if tokens.prompts is None else tokens.prompts * price.input / MILLION
    answers = None
    if tokens.answers_at_most is not None:
        answers = tokens.answers_at_most * price.output / MILLION
    total = None
    if prompts is not None and answers is not None and not tokens.grows:
        total = prompts + answers
    cached = None if tokens.prompts is None else round(shared * max(0, requests - 1))
    spent = StageUsage(tokens.prompts, cached, tokens.answers_at_most)
    modes = sum_costs([mode_costs(price, spent)], requests)
    return CostReport(price.input, price.output, prompts, answers, total, tuple(modes))


def round_to_three_digits(number: int) -> int:
    """Round to three significant digits, the precision of an estimate."""
    step = int("1" + "0" * max(0, len(str(number)) - 3))
    return round(number / step) * step


def _encoded(sampled: Sampled) -> bytes:
    return sampled.text.encode("utf-8", "replace")
