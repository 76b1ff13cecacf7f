"""The token budget of answers where the job sets no ``max_tokens``."""

from __future__ import annotations

import re

from bagent.types import Failure

MOST = 4096
LEAST = 16
STEP = 128
"""Large budgets are multiples of it: rows with equal budgets may share a request."""

MARGIN_TOKENS = 64
"""Tokens that the chat template may add around a conversation."""

FIRST_RATIO = 1 / 2.5
"""Tokens per byte of payload before any usage is reported: an upper estimate for English."""

_CONTEXT = re.compile(r"(?:context (?:length|window|size)[^0-9]{0,40}?|\(n_ctx = ?)(\d{2,8})", re.I)
_PROMPT = re.compile(
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
        self._ratio = FIRST_RATIO
        self._seen = 0

    def for_payload(self, size: int) -> int | None:
        """Return the tokens of an answer to ``size`` bytes of prompt; None: the server decides."""
        if self.context is None:
            return MOST
        available = self.context - self.request_tokens(size) - MARGIN_TOKENS
        if available > 2 * STEP:
            available -= available % STEP
        return max(LEAST, min(MOST, available))

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
        context = _CONTEXT.search(failure.message)
        prompt = _PROMPT.search(failure.message)
        if context and self.context is None:
            self.context = int(context.group(1))
        if context and prompt:
            available = int(context.group(1)) - int(prompt.group(1) or prompt.group(2))
            return available if LEAST <= available < limit else None
        return limit // 4 if context and limit // 4 >= LEAST else None
