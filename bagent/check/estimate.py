"""From the rows looked at to all rows: tokens, cost, what does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median

import msgspec

from bagent.agents.token_budget import LEAST
from bagent.check.prefix_sharing import PACKED, PromptBytes
from bagent.check.report import CostReport, MaxTokens, RowReport, TokenReport
from bagent.check.sample import Sampled, repeats
from bagent.check.tokens import BYTES_PER_TOKEN, Counted
from bagent.errors import UsageError
from bagent.money.prices import Price, StageUsage, mode_costs, sum_costs

MILLION = 1_000_000


class Sizes(msgspec.Struct, frozen=True):
    """Tokens of each prompt of a sample.

    ``tokens`` are in the sample's order, None where there is no request. ``counted`` are the
    server's own counts by place. ``size_ratio`` and ``text_ratio`` are bytes of
    :attr:`Sampled.size` and of :attr:`Sampled.text` in one token.
    """

    tokens: tuple[float | None, ...]
    counted: Mapping[int, Counted]
    size_ratio: float
    text_ratio: float

    @property
    def known(self) -> list[float]:
        """The tokens of those prompts that there are."""
        return [one for one in self.tokens if one is not None]


def sizes_of(sample: Sequence[Sampled], counted: Mapping[int, Counted]) -> Sizes:
    """Tokens of all prompts: counted where they were, else by the bytes of those that were."""
    total = sum(one.tokens for one in counted.values())
    size_ratio = text_ratio = BYTES_PER_TOKEN
    if total:
        size_ratio = max(0.1, sum(sample[place].size for place in counted) / total)
        said = sum(len(_encoded(sample[place])) for place in counted)
        text_ratio = max(0.1, said / total)
    tokens: list[float | None] = []
    for place, one in enumerate(sample):
        if one.request is None:
            tokens.append(None)
        elif place in counted:
            tokens.append(float(counted[place].tokens))
        else:
            tokens.append(one.size / size_ratio)
    return Sizes(tuple(tokens), counted, size_ratio, text_ratio)


def prompts_as_bytes(sample: Sequence[Sampled], sizes: Sizes) -> tuple[list[PromptBytes], float]:
    """What :func:`bagent.check.prefix_sharing.shares` takes: token ids where known, else text."""
    packed = [PromptBytes(one.packed, one.tokens) for one in sizes.counted.values() if one.packed]
    if len(packed) >= 2 and len(packed) == len(sizes.counted):
        return packed, PACKED
    return text_bytes(sample, sizes.text_ratio), sizes.text_ratio


def text_bytes(sample: Sequence[Sampled], ratio: float) -> list[PromptBytes]:
    """The prompts as text, whose tokens are estimated by ``ratio`` bytes a token."""
    texts = [_encoded(one) for one in sample if one.request is not None]
    return [PromptBytes(text, len(text) / ratio) for text in texts]


def max_tokens_of(sample: Sequence[Sampled], *, automatic: bool) -> MaxTokens:
    """The range of ``max_tokens`` over the sample."""
    limits = [one.max_tokens for one in sample if one.request is not None]
    known = [limit for limit in limits if limit is not None]
    if not known or len(known) < len(limits):
        return MaxTokens(None, None, automatic)
    return MaxTokens(min(known), max(known), automatic)


def token_report(
    sample: Sequence[Sampled], sizes: Sizes, requests: float, how: tuple[str, str]
) -> TokenReport:
    """The numbers for people; ``requests`` is how many requests all rows make."""
    known = sizes.known
    share = len(known) / len(sample) if sample else 0.0
    limits = [one.max_tokens for one in sample if one.request is not None]
    answers = None
    if limits and None not in limits:
        answers = round(mean(limit or 0 for limit in limits) * share * requests)
    return TokenReport(
        how=how[0],
        by=how[1],
        rows=len(sample),
        counted=len(sizes.counted),
        least=round(min(known)) if known else None,
        median=round(median(known)) if known else None,
        most=round(max(known)) if known else None,
        mean=round(mean(known), 1) if known else None,
        prompts=round(mean(known) * share * requests) if known else None,
        answers_at_most=answers,
        images=sum(one.images for one in sample),
        repeats=repeats(sample),
    )


def too_long(sample: Sequence[Sampled], sizes: Sizes, context: int | None) -> list[RowReport]:
    """Rows whose prompt and answer are more than ``context`` tokens together.

    A server refuses a request whose prompt and ``max_tokens`` exceed the context. Where
    ``max_tokens`` is automatic it shrinks with what is left, but not below a few tokens.
    """
    found: list[RowReport] = []
    if context is None:
        return found
    for place, (one, tokens) in enumerate(zip(sample, sizes.tokens, strict=True)):
        if one.request is None or tokens is None:
            continue
        explicit = one.request.body is not None or one.request.settings.max_tokens is not None
        answer = (one.max_tokens or LEAST) if explicit else LEAST
        if tokens + answer > context:
            about = "" if place in sizes.counted else "about "
            words = f"{about}{round(tokens):,} prompt tokens and {answer:,} for the answer"
            words += f" are more than {context:,}"
            found.append(RowReport(one.row.id, one.row.source, one.row.line, words))
    return found


def read_price(text: str | None) -> tuple[float, float] | None:
    """``IN,OUT`` as two numbers: dollars per million tokens of prompts and of answers.

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
    """What all rows cost: prompts by their tokens, answers at most.

    Args:
        requests: how many requests all rows make.
        shared: tokens with which all prompts begin, which a cache holds from the second one on.
    """
    if price is None:
        return CostReport(None, None, None, None, None)
    prompts = None if tokens.prompts is None else tokens.prompts * price.input / MILLION
    answers = None
    if tokens.answers_at_most is not None:
        answers = tokens.answers_at_most * price.output / MILLION
    total = None if prompts is None or answers is None else prompts + answers
    cached = None if tokens.prompts is None else round(shared * max(0, requests - 1))
    spent = StageUsage(tokens.prompts, cached, tokens.answers_at_most)
    modes = sum_costs([mode_costs(price, spent)], requests)
    return CostReport(price.input, price.output, prompts, answers, total, tuple(modes))


def _encoded(one: Sampled) -> bytes:
    return one.text.encode("utf-8", "replace")
