"""Conversations that stand in a column of the rows."""

from __future__ import annotations

import base64
import json

import duckdb
import pytest

from bagent.job.templates.conversations import ConversationFault, read_conversation
from support.jobs import results_by_id, write_job, write_rows
from support.replies import ok

USER = {"role": "user", "content": "id=r1 hi"}
PICTURE = {"role": "user", "content": [{"type": "text", "text": "What is this?"}]}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function"}]}


def called(arguments):
    """A message that calls a tool with these arguments."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


SHAREGPT = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "id=r2 hi"},
            {"from": "gpt", "value": "yes"}, {"from": "human", "value": "why"}]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([USER], [USER]),
        (json.dumps([USER]), [USER]),
        ([{**USER, "tool_calls": None, "name": None}], [USER]),
        ([PICTURE, CALL], [PICTURE, CALL]),
        ([called({"a": 1})], [called('{"a":1}')]),
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
        ([{"from": "human", "value": 1}], "has the value"),
        ([{"from": "narrator", "value": "x"}], "turn 1 is from"),
        ([{"from": "observation", "value": "x"}], "turn 1 is the result of a tool that no turn"),
        ([{"from": "function_call", "value": "x"}], "turn 1 is no JSON text of a call"),
        ([{**CALL, "tool_calls": ["x"]}], "message 1 has the tool_calls a list"),
        ([{"role": [], "content": "x"}], "message 1 has the role a list"),
        (
            [{**CALL, "tool_calls": [{"id": ["c"]}]}, {"from": "observation", "value": "x"}],
            "turn 2 is the result of a tool",
        ),
    ],
)
def test_what_is_no_conversation_is_called_what_it_is(value, fault):
    with pytest.raises(ConversationFault, match=fault):
        read_conversation(value)


def test_tool_turns_of_sharegpt_become_calls_and_their_results():
    turns = [
        {"from": "function_call", "value": '[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]'},
        {"from": "observation", "value": "one"},
        {"from": "tool", "value": "two"},
    ]
    asked, *results = read_conversation(turns)
    assert [call["function"] for call in asked["tool_calls"]] == [
        {"name": "f", "arguments": '{"a":1}'},
        {"name": "g", "arguments": "{}"},
    ]
    assert [(r["tool_call_id"], r["content"]) for r in results] == [
        (asked["tool_calls"][0]["id"], "one"), (asked["tool_calls"][1]["id"], "two")]  # fmt: skip


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
    assert "1 of the first 3 rows cannot be sent; row 3: turns: 3, no" in " ".join(done.err.split())
    assert fs.of("r1")[0].body["messages"] == [USER]
    assert [one["role"] for one in fs.of("r2")[0].body["messages"]] == [
        "system", "user", "assistant", "user"]  # fmt: skip
    bad = results_by_id(job_dir)["r3"]
    assert (bad["status"], bad["error_kind"]) == ("bad_input", "bad_input")
    assert bad["error"] == "turns: 3, no list of messages"


def sent(fs, run_rows, prompt, row):
    done = run_rows(prompt, [{"id": "r1", **row}])
    assert done.code == 0, done.err
    return fs.requests[-1].body["messages"]


def test_the_system_message_comes_before_and_the_template_after(fs, run_rows):
    prompt = {"system": "Judge.", "messages_from": "turns", "user": "Was {{ topic }} answered?"}
    after = {"role": "user", "content": "Was it answered?"}
    messages = sent(fs, run_rows, prompt, {"turns": [USER], "topic": "it"})
    assert messages == [{"role": "system", "content": "Judge."}, USER, after]
    first, *_ = sent(fs, run_rows, prompt, {"turns": SHAREGPT, "topic": "it"})
    assert first == {"role": "system", "content": "Judge.\n\nBe brief."}


PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(60)).decode()
URL = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "image_url", "image_url": "a.png"},
        {"type": "image", "image": "a.png"},
        {"type": "image", "image": {"bytes": PNG, "path": "a.png"}},
        {"type": "image", "url": URL["image_url"]["url"]},
    ],
)
def test_images_in_conversations_are_sent_as_urls(fs, job_dir, run_rows, part):
    (job_dir / "a.png").write_bytes(base64.b64decode(PNG))
    [message] = sent(
        fs, run_rows, {"messages_from": "turns"}, {"turns": [{**PICTURE, "content": [part]}]}
    )
    assert message["content"] == [URL]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("A<image> or<image>?", ["A", URL, " or", URL, "?"]),
        ("Which?", [URL, URL, "Which?"]),
    ],
)
def test_images_of_a_column_stand_where_the_text_has_them(fs, run_rows, value, expected):
    prompt = {"messages_from": "turns", "images_from": "images"}
    row = {"turns": [{"from": "human", "value": value}], "images": [PNG, {"bytes": PNG}]}
    [message] = sent(fs, run_rows, prompt, row)
    parts = [part if part["type"] != "text" else part["text"] for part in message["content"]]
    assert parts == expected


@pytest.mark.parametrize(
    ("images", "fault"),
    [
        ([PNG], "images: <image> stands 2 times, and the images are 1"),
        ([3, 4], "images: 3 is no image"),
        (["a.png", "b.png"], "turns: no such image: a.png"),
    ],
)
def test_images_that_do_not_fit_are_called_what_they_are(run_rows, images, fault):
    turns = [{"from": "human", "value": "<image><image>"}]
    row = {"turns": turns, "images": images}
    done = run_rows({"messages_from": "turns", "images_from": "images"}, [row])
    assert (done.code, f"row 1: {fault}" in " ".join(done.err.split())) == (2, True)


@pytest.mark.parametrize(
    ("column", "expected"),
    [("turn", "did you mean turns?"), ("text", "text: a text, no list of messages")],
)
def test_a_column_without_any_conversation_is_refused_at_load(fs, run_rows, column, expected):
    done = run_rows({"messages_from": column}, [{"id": "r1", "turns": [USER], "text": "hi"}])
    assert (done.code, expected in done.err, fs.requests) == (2, True, [])


def test_a_conversation_sent_as_text_is_a_warning(run_rows):
    done = run_rows("Answer: {{turns}}", [{"id": "r1", "turns": [USER]}])
    assert done.code == 0, done.err
    assert "prompt: {messages_from: turns} sends it as the conversation" in done.err


@pytest.mark.parametrize(
    ("messages", "name"),
    [
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


@pytest.mark.parametrize(
    "prompt",
    [
        {"messages": [{"role": "user", "content": [
            {"image": "{{ photo }}"}, {"image": "{{ scan.bytes }}"}, {"text": "id=r1"}]}]},
        {"messages_from": "turns", "images_from": "images"},
    ],
)  # fmt: skip
def test_images_in_columns_of_bytes_are_sent(fs, job_dir, bagent, prompt):
    fs.set_script({"*": [ok("fine")]})
    with duckdb.connect() as connection:
        connection.execute(
            "COPY (SELECT 'r1' AS id, $1::BLOB AS photo, {'bytes': $1::BLOB, 'path': 'a.jpg'} AS"
            " scan, [$1::BLOB, $1::BLOB] AS images, [{'from': 'human', 'value':"
            f" '<image><image>id=r1'}}] AS turns) TO '{job_dir}/rows.parquet'",
            [base64.b64decode(PNG)],
        )
    write_job(job_dir, fs.url, 0, prompt=prompt, input="rows.parquet")
    done = bagent(["run", "job.yaml", "--progress", "plain"])
    assert done.code == 0, done.err
    [message] = fs.of("r1")[0].body["messages"]
    assert message["content"] == [URL, URL, {"type": "text", "text": "id=r1"}]
