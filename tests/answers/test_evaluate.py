import json
from pathlib import Path

import msgspec
import pytest

from bagent.answers.evaluate import AnswerResult, evaluate
from bagent.answers.schema.schema import OutputSchema
from bagent.types import Reply, ToolCall

LIST = OutputSchema.load(
    {
        "type": "object",
        "required": ["name", "items"],
        "properties": {
            "name": {"type": "string"},
            "items": {"type": "array", "items": {"type": "string"}},
        },
    },
    base=Path(),
)
ANYTHING = OutputSchema.load(True, base=Path())
GOOD = '{"name": "n", "items": ["a", "b"]}'
TOOL = (ToolCall(id="1", name="f", arguments="{}"),)


@pytest.mark.parametrize(
    "reason",
    ["stop", "tool_calls", "function_call", "end_turn", "stop_sequence", "eos", "tool_use", "STOP"],
)
def test_good_ends_are_ok(reason):
    value = {"name": "n", "items": ["a", "b"]}
    output = msgspec.Raw(b'{"name":"n","items":["a","b"]}')
    good = AnswerResult("ok", output=output, value=value, text=GOOD, how="plain")
    assert evaluate(Reply(GOOD, reason), LIST) == good
    assert evaluate(Reply("Paris.", reason), None) == AnswerResult("ok", text="Paris.")


@pytest.mark.parametrize(
    ("reason", "schema", "text"),
    [
        ("length", None, "Half a sent"),
        ("max_tokens", LIST, '{"name":"n","items":["a","b'),
        ("model_context_window_exceeded", LIST, GOOD),
        ("MAX_TOKENS", ANYTHING, "[]"),
        ("max_output_tokens", None, None),
        ("model_length", LIST, ""),
    ],
)
def test_a_cut_answer_is_truncated_whatever_its_text(reason, schema, text):
    verdict = evaluate(Reply(text, reason), schema)
    assert (verdict.status, verdict.error_kind) == ("truncated", "truncated")
    assert verdict.output is None and verdict.value is None
    assert verdict.text == (text or None)
    assert verdict.passing is False and reason in verdict.error


FILTERED = "content_filter refusal guardrail_intervened SAFETY content_filtered RECITATION"


@pytest.mark.parametrize("reason", FILTERED.split())
def test_filtered_answers_are_refused(reason):
    for schema in (None, LIST):
        verdict = evaluate(Reply(GOOD, reason), schema)
        assert (verdict.status, verdict.error_kind, verdict.output) == ("refused", "refused", None)
        assert verdict.passing is False and reason in verdict.error


@pytest.mark.parametrize(("text", "reason"), [(None, "stop"), ("", None), (GOOD, "banana")])
def test_refusal_text_is_a_refusal_at_any_end_but_a_cut(text, reason):
    verdict = evaluate(Reply(text, reason, refusal="I can't \ud800help\nwith that."), LIST)
    assert verdict.status == "refused"
    assert verdict.error == "refused: I can't \\ud800help with that."
    assert evaluate(Reply(text, "length", refusal="No."), LIST).status == "truncated"
    assert evaluate(Reply(GOOD, "stop", refusal=" \n"), LIST).status == "ok"


@pytest.mark.parametrize(
    ("reason", "schema", "text"),
    [
        ("abort", None, "text"),
        ("banana", ANYTHING, "[]"),
        (None, LIST, GOOD),
        ("a\ud800\n" * 500, None, "x"),
    ],
)
def test_other_ends_are_passing_failures_and_keep_the_reason(reason, schema, text):
    verdict = evaluate(Reply(text, reason), schema)
    assert (verdict.status, verdict.error_kind) == ("failed", "bad_response")
    assert verdict.passing is True and verdict.output is None
    assert verdict.text == (text or None), "partial text is kept for people"
    assert (reason or "finish_reason").split("\ud800")[0] in verdict.error
    assert len(verdict.error) < 200 and "\n" not in verdict.error
    verdict.error.encode()


@pytest.mark.parametrize("schema", [None, LIST])
def test_good_end_without_text_is_an_empty_failure(schema):
    for text in (None, "", " \n\t"):
        verdict = evaluate(Reply(text, "stop"), schema)
        assert (verdict.status, verdict.error_kind, verdict.passing) == ("failed", "empty", True)
        assert verdict.error == "the answer is empty" and verdict.text is None


@pytest.mark.parametrize("schema", [None, LIST])
@pytest.mark.parametrize(
    "reply",
    [
        Reply(None, "stop", reasoning="It is Paris."),
        Reply("<think>It is Paris.</think>\n", "stop"),
        Reply("It is Paris.\n</think>", "stop"),
    ],
)
def test_reasoning_alone_is_empty_and_kept(reply, schema):
    verdict = evaluate(reply, schema)
    assert (verdict.status, verdict.error_kind, verdict.passing) == ("failed", "empty", True)
    assert "only reasoning" in verdict.error
    assert verdict.reasoning == "It is Paris."


def test_unclosed_thinking_is_no_answer():
    reply = Reply(f"<think>so {GOOD}", "stop")
    plain = evaluate(reply, None)
    assert (plain.status, plain.error_kind) == ("failed", "empty")
    assert plain.reasoning == f"so {GOOD}" and plain.text is None
    asked = evaluate(reply, ANYTHING)
    assert (asked.status, asked.error_kind) == ("invalid", "schema")
    assert "thinking" in asked.error and asked.output is None


@pytest.mark.parametrize(
    ("reply", "schema", "result"),
    [
        (Reply("<think>\nhm\n</think>\n\nParis.", "stop"), None, ("ok", "hm", "Paris.")),
        (Reply(f"hm [\n</think>\n{GOOD}", "stop"), LIST, ("ok", "hm [", GOOD)),
        # what the server calls reasoning goes before tags
        (
            Reply("<think>a</think>Paris.", "stop", reasoning="b"),
            None,
            ("ok", "b", "<think>a</think>Paris."),
        ),
        (Reply("<think>a</think>Paris.", "stop", reasoning=" "), None, ("ok", "a", "Paris.")),
        (Reply("<think>hm</think>Par", "length"), None, ("truncated", "hm", "Par")),
        (Reply("<think>hm", "length"), LIST, ("truncated", "hm", None)),
    ],
)
def test_leading_thinking_becomes_reasoning(reply, schema, result):
    verdict = evaluate(reply, schema)
    assert (verdict.status, verdict.reasoning, verdict.text) == result


@pytest.mark.parametrize(
    "text",
    [
        "{'name': 'n', 'items': []}",
        '"name"',
        '{"name": "n"}',
        "```json\n{}\n```",
        '"{\\"name\\": \\"n\\", \\"items\\": []}"',
    ],
)
def test_what_does_not_fit_the_schema_is_invalid_with_words(text):
    verdict = evaluate(Reply(text, "stop"), LIST)
    assert (verdict.status, verdict.error_kind) == ("invalid", "schema")
    assert verdict.output is None and verdict.value is None and verdict.passing is False
    assert verdict.text == text
    assert 1 <= len(verdict.violations) <= 5 and verdict.violations[0] in verdict.error


@pytest.mark.parametrize(
    ("spec", "text", "value", "how"),
    [
        ({"type": "integer"}, "42", 42, "plain"),
        ({"type": "boolean"}, "```json\ntrue\n```", True, "fence"),
        ({"type": "null"}, "<think>x</think>null", None, "think"),
        ({"type": "array"}, "Here: [1, 2]", [1, 2], "prose"),
    ],
)
def test_schemas_for_other_than_objects(spec, text, value, how):
    verdict = evaluate(Reply(text, "stop"), OutputSchema.load(spec, base=Path()))
    assert (verdict.status, verdict.value, verdict.how) == ("ok", value, how)
    assert json.loads(bytes(verdict.output)) == value


@pytest.mark.parametrize("text", ['["x\ud800"]', '["x\\ud800"]', 'See ["x\ud800"]\udfff'])
def test_lone_surrogates_are_stored_as_visible_text(text):
    verdict = evaluate(Reply(text, "stop", reasoning="r\udc00"), ANYTHING)
    assert verdict.status == "ok"
    assert bytes(verdict.output).decode() == '["x\\\\ud800"]'
    assert verdict.value == ["x\\ud800"]
    assert verdict.reasoning == "r\\udc00"
    assert evaluate(Reply("x\ud800", "stop"), None).text == "x\\ud800"
    assert "\\ud800" in verdict.text
    msgspec.json.encode(verdict)


def test_numbers_that_json_does_not_have_are_text_and_then_judged():
    number = OutputSchema.load({"items": {"type": "number"}}, base=Path())
    assert evaluate(Reply("[1, NaN]", "stop"), number).status == "invalid"
    assert bytes(evaluate(Reply("[1, NaN, -1e999]", "stop"), ANYTHING).output) == (
        b'[1,"NaN","-Infinity"]'
    )


def test_tool_calls_are_an_answer_where_the_request_offers_tools():
    for text, kept in ((None, None), ("", None), ("Let me see.", "Let me see.")):
        verdict = evaluate(Reply(text, "tool_calls", tool_calls=TOOL), None, tools=True)
        assert (verdict.status, verdict.text) == ("ok", kept)
        assert verdict.value == msgspec.json.decode(verdict.output)
        (call,) = verdict.value["tool_calls"]
        assert call["function"] == {"name": TOOL[0].name, "arguments": TOOL[0].arguments}


def test_tool_calls_that_nobody_asked_for_are_no_answer():
    verdict = evaluate(Reply(" ", "tool_calls", tool_calls=TOOL), None)
    assert (verdict.status, verdict.error_kind) == ("failed", "bad_response")
    assert verdict.passing
    assert "a tool that was not offered (f)" in verdict.error
    beside = evaluate(Reply("It is 5.", "stop", tool_calls=TOOL), None)
    assert (beside.status, beside.text, beside.output) == ("ok", "It is 5.", None)


def test_tool_calls_do_not_fit_a_schema_and_do_not_mend_a_cut():
    asked = evaluate(Reply(None, "tool_calls", tool_calls=TOOL), ANYTHING)
    assert (asked.status, asked.error_kind) == ("invalid", "schema")
    assert "tool call" in asked.error
    assert evaluate(Reply(None, "length", tool_calls=TOOL), None).status == "truncated"
