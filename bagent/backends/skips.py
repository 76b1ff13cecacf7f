"""What a backend's protocol has no word for, so that jobs do without it there.

Asked for all the same, a thing of the first list is an error before anything is sent or is left
out with a notice; one of the second is found by other means.
"""

from __future__ import annotations

import msgspec

from bagent.backends.anthropic_wire import LEFT_OUT as ANTHROPIC_LEFT_OUT
from bagent.backends.bedrock_wire import LEFT_OUT as BEDROCK_LEFT_OUT


class Skips(msgspec.Struct, frozen=True):
    """``lacks`` is what cannot be asked for, ``untold`` what the server does not tell."""

    lacks: tuple[str, ...] = ()
    untold: tuple[str, ...] = ()

    def words(self) -> str:
        """``no raw prompts, seed; not told: Retry-After``; empty where nothing is skipped."""
        parts = [f"no {', '.join(self.lacks)}"] if self.lacks else []
        if self.untold:
            parts.append(f"not told: {', '.join(self.untold)}")
        return "; ".join(parts)


RAW, LISTS, CHATS, EMBEDDINGS = "raw prompts", "lists of prompts", "batches of chats", "embeddings"
TEMPLATE, WAIT, LIMITS = "/tokenize", "Retry-After", "rate limits"

_NONE = Skips()
_SKIPS = {
    "openai": Skips((CHATS, TEMPLATE)),
    "anthropic": Skips((RAW, LISTS, CHATS, EMBEDDINGS, TEMPLATE, *sorted(ANTHROPIC_LEFT_OUT))),
    "bedrock": Skips(
        (RAW, LISTS, CHATS, EMBEDDINGS, TEMPLATE, *sorted(BEDROCK_LEFT_OUT)), (WAIT, LIMITS)
    ),
    "vllm": Skips((), (LIMITS,)),
    "sglang": Skips((CHATS,), (LIMITS,)),
    "dynamo": Skips((CHATS, TEMPLATE), (LIMITS,)),
    "llama.cpp": Skips((CHATS,), (LIMITS,)),
}


def skips_of(kind: str | None) -> Skips:
    """What a backend of this kind, or an engine of this name, does without."""
    return _SKIPS.get(kind or "", _NONE)
