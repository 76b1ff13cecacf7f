"""Estimates for all rows from the sample: tokens, cost, and rows that do not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median

import msgspec

from bagent.agents.token_budget import LEAST
from bagent.check.prefix_sharing import PACKED, PromptBytes
from bagent.check.report import CostReport, MaxTokens, RowReport, TokenReport
from bagent.check.sample import Sampled, count_repeats
from bagent.check.tokens import BYTES_PER_TOKEN, Counted
from bagent.errors import UsageError
from bagent.money.prices import Price, StageUsage, mode_costs, sum_costs

MILLION = 1_000_000


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


def token_report(
    sample: Sequence[Sampled],
    sizes: Sizes,
    requests: float,
    how: tuple[str, str],
    *,
    most: float | None = None,
) -> TokenReport:
    """Return the report on tokens.

    Args:
        requests: requests of all rows.
        how: see :func:`bagent.check.facts.counting_method`.
        most: requests of all rows at most, where turns or rounds ask again; None: ``requests``.
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
        prompts=round(mean(prompt_tokens) * share * requests) if prompt_tokens else None,
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
        answer = (sampled.max_tokens or LEAST) if explicit else LEAST
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
