"""Which settings leave calls free to share a request, and by which ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from bagent.backends.request import CallSettings

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
"""What chat and text completions both take, in the same form (vLLM)."""

_CHATS = _BOTH | {"logprobs", "top_logprobs", "chat_template_kwargs", "include_reasoning"}
"""What a chat batch takes (vLLM's ``BatchChatCompletionRequest``; it ignores the rest)."""

_NOT_RAW = frozenset(
    {
        "best_of", "prompt", "messages", "stream", "stream_options", "max_tokens",
        "max_completion_tokens", "use_beam_search", "request_id",
    }
)  # fmt: skip


class Ways(msgspec.Struct, frozen=True):
    """How calls with the same settings may travel together, as far as the settings say."""

    prompts: bool
    templated: bool
    chats: bool


def ways_of(settings: CallSettings) -> Ways:
    """What a request of several calls could carry of ``settings`` without changing it."""
    fields: Mapping[str, Any] = {**settings.sampling, **settings.extra}
    given = {name for name, value in fields.items() if value is not None}
    if settings.tools:
        return Ways(prompts=False, templated=False, chats=False)
    single = fields.get("n") in (None, 1)
    return Ways(
        prompts=single and not given & _NOT_RAW,
        templated=single and given <= _LISTS,
        chats=single and given <= _CHATS,
    )
