"""How many tokens an answer may have when the user did not say."""

from __future__ import annotations

import re

from bagent.types import Failure

MOST = 4096
LEAST = 16
STEP = 128
"""Budgets are multiples of it where they are large: rows of one budget may share a request."""

MARGIN_TOKENS = 64
"""Room for what the chat template adds around a conversation."""

FIRST_RATIO = 1 / 2.5
"""Tokens per byte of JSON payload before any answer told: on the safe side for English."""

_CONTEXT = re.compile(r"(?:context (?:length|window|size)[^0-9]{0,40}?|\(n_ctx = ?)(\d{2,8})", re.I)
_PROMPT = re.compile(
    r"(?:prompt contains (?:at least )?|request \(|\()(\d{1,8}) (?:input )?tokens?\b"
    r"|(\d{1,8}) in the messages",
    re.I,
)


class TokenBudget:
    """``max_tokens`` for rows of a job that names none: what the context leaves, at most 4096.

    The tokens of a prompt are estimated from its bytes by the largest ratio among recent answers,
    so the estimate errs towards a smaller budget, never towards a refused request.

    Args:
        context: the model's context length in tokens; None if the endpoint does not tell.

    ``fixed`` are the bytes of what every request has besides, such as the descriptions of tools.
    """

    def __init__(self, context: int | None) -> None:
        self.context = context
        self.fixed = 0
        self._ratio = FIRST_RATIO
        self._seen = 0

    def for_payload(self, size: int) -> int | None:
        """Tokens for the answer to a prompt of ``size`` bytes; None: leave it to the server."""
        if self.context is None:
            return MOST
        left = self.context - self.whole(size) - MARGIN_TOKENS
        if left > 2 * STEP:
            left -= left % STEP
        return max(LEAST, min(MOST, left))

    def tokens(self, size: int) -> int:
        """About how many tokens ``size`` bytes of a prompt are, rather more than less."""
        return int(size * self._ratio)

    def whole(self, size: int) -> int:
        """About how many tokens a request with a prompt of ``size`` bytes has in all."""
        return self.tokens(size + self.fixed)

    def learn(self, size: int, prompt_tokens: int) -> None:
        """A prompt of ``size`` bytes had ``prompt_tokens`` tokens."""
        if size <= 0:
            return
        ratio = prompt_tokens / (size + self.fixed) * 1.1
        self._seen += 1
        self._ratio = ratio if self._seen == 1 else max(ratio, self._ratio * 0.98 + ratio * 0.02)

    def after_overflow(self, failure: Failure, asked: int) -> int | None:
        """A smaller number to ask for after a refusal, by the numbers in the server's words.

        None if the prompt alone does not fit, or nothing can be told.
        """
        context = _CONTEXT.search(failure.message)
        prompt = _PROMPT.search(failure.message)
        if context and self.context is None:
            self.context = int(context.group(1))
        if context and prompt:
            left = int(context.group(1)) - int(prompt.group(1) or prompt.group(2))
            return left if LEAST <= left < asked else None
        return asked // 4 if context and asked // 4 >= LEAST else None
