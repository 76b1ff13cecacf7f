"""What agent programs are told by their environment."""

from __future__ import annotations

import json

from bagent.agents.external_agent import ProxyTarget, environment_for

URL = "http://127.0.0.1:7/v1"


def test_a_program_finds_the_proxy_and_the_model_under_the_names_that_it_knows():
    env = environment_for(ProxyTarget(URL, "org/big"))
    assert env["OPENAI_BASE_URL"] == URL and env["OPENAI_MODEL"] == "org/big"
    assert env["ANTHROPIC_BASE_URL"] == URL.removesuffix("/v1")
    assert {env[name] for name in env if name.startswith("ANTHROPIC_") and "MODEL" in name} == {
        "org/big"
    }


def test_opencode_is_told_one_provider_with_one_model():
    config = json.loads(
        environment_for(ProxyTarget(URL, "org/big", 8000))["OPENCODE_CONFIG_CONTENT"]
    )
    (name,) = config["provider"]
    provider = config["provider"][name]
    assert config["model"] == config["small_model"] == f"{name}/org/big"
    assert provider["options"]["baseURL"] == URL
    assert provider["models"]["org/big"]["limit"] == {"context": 8000, "output": 2000}


def test_limits_are_told_only_where_they_are_known():
    env = environment_for(ProxyTarget(URL, "m"))
    assert not {"CLAUDE_CODE_MAX_CONTEXT_TOKENS", "CLAUDE_CODE_MAX_OUTPUT_TOKENS"} & env.keys()
    assert "limit" not in env["OPENCODE_CONFIG_CONTENT"]
    env = environment_for(ProxyTarget(URL, "m", 8000, 500))
    assert env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "8000"
    assert env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "500"
    assert (
        environment_for(ProxyTarget(URL, "m", None, 500))["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "500"
    )
