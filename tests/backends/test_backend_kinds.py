"""One table has what distinguishes the kinds of backends."""

from __future__ import annotations

from typing import Any, cast, get_args

import pytest

from bagent.backend_kinds import TRAITS, BackendKind
from bagent.backends.bedrock.backend import BedrockConfig
from bagent.backends.http.client import Transport
from bagent.backends.registry import BackendConfig, make_backend, unsupported_settings
from bagent.errors import UsageError
from bagent.money.prices import known_prices


def test_every_kind_that_a_job_may_name_has_traits_and_a_backend():
    assert tuple(TRAITS) == get_args(BackendKind)
    config = BackendConfig(bedrock=BedrockConfig(1, region="us-east-1"))
    for kind in TRAITS:
        assert make_backend(kind, Transport(), config) is not None


def test_an_unknown_kind_is_refused_and_not_called_as_an_openai_server():
    with pytest.raises(UsageError, match="there is no backend gemini"):
        make_backend(cast("Any", "gemini"), Transport(), BackendConfig())
    assert unsupported_settings("gemini").text() == ""


def test_providers_with_prices_are_those_of_the_price_list():
    assert {traits.prices for traits in TRAITS.values() if traits.prices} == {
        price.provider for price in known_prices()
    }


def test_an_engine_is_known_by_the_name_that_it_reports():
    assert unsupported_settings("llama.cpp") == unsupported_settings("local")
    assert unsupported_settings("llama.cpp").unsupported == ("batches of chats",)
