"""What agent programs are told by their environment: whom to ask, which model, and nothing more.

Sources: the documentation of OpenAI's and Anthropic's SDKs (base address, key), of OpenCode 1.18
(``OPENCODE_CONFIG_CONTENT``: a configuration that is merged over all files) and of Claude Code 2.1
(models, limits, what to leave out).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from bagent.types import Json

KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
"""The variables by which programs are told the key."""

PROVIDER = "bagent"
"""What OpenCode calls the proxy: its models are named ``bagent/NAME``."""

QUIET: Mapping[str, str] = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DO_NOT_TRACK": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}
"""Compute nodes reach no internet: programs that look for updates there wait in vain."""

_CLAUDE_MODELS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
"""A server has one model: helpers and small questions go to it too."""

ANSWER_SHARE = 4
"""An answer may take a quarter of the context where the job names no ``max_tokens``."""


class Service(msgspec.Struct, frozen=True):
    """The service that a program is pointed at.

    ``base_url`` ends with ``/v1``. ``context`` is the model's context length in tokens, and
    ``max_tokens`` what an answer may take; None where that is not known.
    """

    base_url: str
    model: str
    context: int | None = None
    max_tokens: int | None = None

    @property
    def answer(self) -> int | None:
        """The tokens that an answer may take, None where nothing is known of them."""
        if self.max_tokens is not None or self.context is None:
            return self.max_tokens
        return max(1, self.context // ANSWER_SHARE)


def environment_for(service: Service) -> dict[str, str]:
    """The variables by which programs find ``service``, besides the key."""
    found = {
        **QUIET,
        "OPENAI_BASE_URL": service.base_url,
        "OPENAI_API_BASE": service.base_url,
        "OPENAI_MODEL": service.model,
        "ANTHROPIC_BASE_URL": service.base_url.removesuffix("/v1"),
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        "OPENCODE_CONFIG_CONTENT": msgspec.json.encode(opencode_config(service)).decode(),
    }
    found |= dict.fromkeys(_CLAUDE_MODELS, service.model)
    if service.context is not None:
        found["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(service.context)
    if service.answer is not None:
        found["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(service.answer)
    return found


def opencode_config(service: Service) -> dict[str, Json]:
    """OpenCode's configuration: the proxy as its one provider; the key comes from the environment.

    Without the limits OpenCode neither shortens long sessions nor asks for answers that fit.
    """
    model: dict[str, Json] = {"name": service.model}
    if service.context is not None:
        model["limit"] = {"context": service.context, "output": service.answer}
    name = f"{PROVIDER}/{service.model}"
    return {
        "model": name,
        "small_model": name,
        "autoupdate": False,
        "share": "disabled",
        "provider": {
            PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": service.base_url, "apiKey": "{env:OPENAI_API_KEY}"},
                "models": {service.model: model},
            }
        },
    }
