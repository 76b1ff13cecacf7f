"""Conversations that stand in a column of the rows."""

from __future__ import annotations

import json

import pytest

from bagent.job.templates.prompt import ConversationFault, read_conversation
from support.jobs import results_by_id, write_job, write_rows
from support.replies import ok

USER = {"role": "user", "content": "id=r1 hi"}
PICTURE = {"role": "user", "content": [{"type": "text", "text": "What is this?"}]}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function"}]}
SHAREGPT = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "id=r2 hi"},
            {"from": "gpt", "value": "yes"}, {"from": "human", "value": "why"}]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([USER], [USER]),
        (json.dumps([USER]), [USER]),
        ([{**USER, "tool_calls": None, "name": None}], [USER]),
        ([PICTURE, CALL], [PICTURE, CALL]),
        (SHAREGPT[1:3], [{"role": "user", "content": "id=r2 hi"},
                         {"role": "assistant", "content": "yes"}]),
    ],
)  # fmt: skip
def test_both_forms_become_messages(value, expected):
    assert read_conversation(value) == expected


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("hello", "a text"),
        (None, "nothing, no list"),
        ({"role": "user"}, "no list"),
        ([], "without messages"),
        (["hi"], "message 1"),
        ([USER, {"role": "boss", "content": "x"}], "message 2 has the role"),
        ([{"role": "user", "content": None}], "has the content nothing"),
        ([{"role": "user", "content": [1]}], "has the content a list"),
        ([{"from": "observation", "value": "x"}], "turn 1 is from"),
        ([{"from": "human", "value": 1}], "has the value"),
    ],
)
def test_what_is_no_conversation_is_called_what_it_is(value, fault):
    with pytest.raises(ConversationFault, match=fault):
        read_conversation(value)


@pytest.fixture
def run_rows(fs, job_dir, bagent):
    def run(prompt, rows):
        fs.set_script({"*": [ok("fine")]})
        write_job(job_dir, fs.url, 0, prompt=prompt)
        write_rows(job_dir / "rows.jsonl", rows)
        return bagent(["run", "job.yaml", "--progress", "plain"])

    return run


def test_a_column_is_sent_as_the_conversation(fs, job_dir, run_rows):
    rows = [
        {"id": "r1", "turns": [USER]},
        {"id": "r2", "turns": SHAREGPT},
        {"id": "r3", "turns": 3},
    ]
    done = run_rows({"messages_from": "turns"}, rows)
    assert done.code == 1, done.err
    assert fs.of("r1")[0].body["messages"] == [USER]
    assert [one["role"] for one in fs.of("r2")[0].body["messages"]] == [
        "system", "user", "assistant", "user"]  # fmt: skip
    bad = results_by_id(job_dir)["r3"]
    assert (bad["status"], bad["error_kind"]) == ("bad_input", "bad_input")
    assert bad["error"] == "turns: 3, no list of messages"


@pytest.mark.parametrize(
    ("column", "expected"),
    [("turn", "did you mean turns?"), ("text", "text: a text, no list of messages")],
)
def test_a_column_without_any_conversation_is_refused_at_load(fs, run_rows, column, expected):
    done = run_rows({"messages_from": column}, [{"id": "r1", "turns": [USER], "text": "hi"}])
    assert (done.code, expected in done.err, fs.requests) == (2, True, [])


@pytest.mark.parametrize("prompt", ["{{ turns }}", "Answer: {{turns}}"])
def test_a_conversation_sent_as_text_is_a_warning(run_rows, prompt):
    done = run_rows(prompt, [{"id": "r1", "turns": [USER]}])
    assert done.code == 0, done.err
    assert "prompt: {messages_from: turns} sends it as the conversation" in done.err


@pytest.mark.parametrize(
    ("messages", "name"),
    [
        ("{{ chat }}", "chat"),
        ("{{- row.chat -}}", "chat"),
        ("{{ row['my chat'] }}", "my chat"),
        ("chat", "chat"),
    ],
)
def test_a_field_in_the_place_of_the_messages_gets_the_key_to_write(
    job_dir, bagent, messages, name
):
    write_job(job_dir, "sim", 1, model="auto", prompt={"messages": messages})
    done = bagent(["check", "job.yaml"])
    assert (done.code, f"(prompt: {{messages_from: {name}}} sends" in done.err) == (2, True)


def test_other_text_in_the_place_of_the_messages_gets_no_such_hint(job_dir, bagent):
    write_job(job_dir, "sim", 1, model="auto", prompt={"messages": "{{ a }} and {{ b }}"})
    done = bagent(["check", "job.yaml"])
    assert (done.code, "messages_from" in done.err) == (2, False)
