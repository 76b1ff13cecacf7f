"""What refusals teach, in the words of many servers."""

from __future__ import annotations

import json

import pytest

from bagent.backends.endpoint import Endpoint
from bagent.backends.openai.chat import BodyWriter
from bagent.backends.profile import EndpointForms, EndpointProfiles, Form
from bagent.backends.request import CallSettings, OutputFormat, Request
from bagent.types import Failure

HERE = Endpoint("here", "http://here/v1")
SAMPLING = {"temperature": 0, "top_p": 0.9, "top_k": 5, "seed": 1}


def taught(words: str) -> tuple[bool, Form, list[str]]:
    """Whether a refusal taught anything, the form after it, what people were told."""
    notices: list[str] = []
    forms = EndpointForms(EndpointProfiles(), "auto", notices.append)
    request = Request(CallSettings("m", SAMPLING, {}), b"[]")
    failure = Failure("rejected", f"HTTP 400: {words}", status=400)
    learned = forms.learn(HERE, request, failure, Form())
    return learned, forms.of(HERE, request), notices


@pytest.mark.parametrize(
    "words",
    [
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use"
        " 'max_completion_tokens' instead.",
        "Please use `max_completion_tokens` instead of `max_tokens` for this model",
    ],
)
def test_the_new_name_of_the_limit_is_taken_and_nobody_is_bothered(words: str) -> None:
    learned, form, notices = taught(words)
    assert (learned, form.completion_limit) == (True, "max_completion_tokens")
    assert notices == []


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("Unsupported value: 'temperature' does not support 0 with this model.", "temperature"),
        ("invalid temperature: only 1 is allowed for this model", "temperature"),
        ("`temperature` is deprecated for this model.", "temperature"),
        ("`temperature` may only be set to 1 when thinking is enabled.", "temperature"),
        ("temperature: Only the default (1) value can be used", "temperature"),
        ("This model doesn't support the temperature field.", "temperature"),
        ("This model does not accept temperature", "temperature"),
        ("`temperature` and `top_p` cannot both be specified for this model.", "top_p"),
        ("Malformed input request: extraneous key [top_k] is not permitted", "top_k"),
        ("Additional properties are not allowed ('top_k' was unexpected)", "top_k"),
        ("The topP parameter isn't supported", "top_p"),
        ("top_k: Extra inputs are not permitted", "top_k"),
        ("Unknown argument: seed", "seed"),
        ("Unrecognized request argument supplied: seed", "seed"),
    ],
)
def test_a_parameter_that_a_model_refuses_is_left_out_and_said(words: str, name: str) -> None:
    learned, form, (notice,) = taught(words)
    assert (learned, form.without) == (True, {name})
    assert f"refuses {name}; it is no longer sent" in notice


@pytest.mark.parametrize(
    "words",
    [
        "temperature must be between 0 and 2",
        "Invalid 'top_p': decimal above maximum value. Expected a value <= 1",
        "messages: at least one message is required",
        "Unsupported parameter: 'frequency_penalty'",  # which was not sent
    ],
)
def test_other_refusals_teach_nothing(words: str) -> None:
    learned, form, notices = taught(words)
    assert (learned, form, notices) == (False, Form(), [])


def test_a_refused_strict_schema_is_sent_without_strict_before_it_goes_to_the_prompt() -> None:
    notices: list[str] = []
    forms = EndpointForms(EndpointProfiles(), "auto", notices.append)
    output = OutputFormat("answer", b"{}", strict=True)
    request = Request(CallSettings("m", {}, {}, output=output), b"[]")
    words = "Invalid schema for response_format 'answer': schema must have a 'type' key."
    forms_used = []
    while forms.learn(
        HERE, request, Failure("rejected", words, status=400), forms.of(HERE, request)
    ):
        form = forms.of(HERE, request)
        forms_used.append((form.strict, form.native_schema))
    assert forms_used == [(False, True), (False, False)]
    assert len(notices) == 2


def test_a_refused_strict_tool_is_sent_without_strict() -> None:
    tool = {"type": "function", "function": {"name": "pick", "parameters": {}, "strict": True}}
    forms = EndpointForms(EndpointProfiles(), "auto", list[str]().append)
    request = Request(CallSettings("m", {}, {}, tools=[tool]), b"[]")
    words = "Invalid schema for function 'pick': In context=(), schema must have a 'type' key."
    assert forms.learn(HERE, request, Failure("rejected", words, status=400), Form())
    body = json.loads(BodyWriter("m", strict=forms.of(HERE, request).strict).body(request))
    assert "strict" not in body["tools"][0]["function"]
