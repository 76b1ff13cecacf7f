"""Lines of an OpenAI batch file as the rows of a run, from the input to the output files."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from support.http_servers import in_thread
from support.jobs import sql, write_rows
from support.replies import echo, ok_tools, tool_call
from support.routes_server import models, routes_server
from support.run_outcomes import CUT, type_next

USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13,
         "prompt_tokens_details": {"cached_tokens": 8}}  # fmt: skip
CHAT = {
    "id": "chatcmpl-7", "object": "chat.completion", "created": 5, "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {
        "role": "assistant", "content": "42", "reasoning_content": "six times seven"}}],
    "usage": USAGE, "system_fingerprint": "fp",
}  # fmt: skip
FILTERED = {
    **CHAT,
    "choices": [{"index": 0, "finish_reason": "content_filter", "message": {"content": None}}],
}
COMPLETION = {
    "id": "cmpl-7", "object": "text_completion", "created": 5, "model": "m",
    "choices": [{"index": 0, "text": " upon a time", "finish_reason": "stop"}], "usage": USAGE,
}  # fmt: skip
EMBEDDINGS = {
    "object": "list", "model": "m", "usage": {"prompt_tokens": 2, "total_tokens": 2},
    "data": [{"object": "embedding", "index": 0, "embedding": [0.5, 1.0]},
             {"object": "embedding", "index": 1, "embedding": "AACAPwAAAEA="}],
}  # fmt: skip
RESPONSE = {
    "id": "resp_7", "object": "response", "status": "completed", "model": "m", "error": None,
    "output": [
        {"type": "reasoning", "id": "rs_7", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant",
         "content": [{"type": "output_text", "text": "4", "annotations": []},
                     {"type": "output_text", "text": "2", "annotations": []}]}],
    "usage": {"input_tokens": 9, "output_tokens": 4, "total_tokens": 13,
              "input_tokens_details": {"cached_tokens": 8},
              "output_tokens_details": {"reasoning_tokens": 2}},
}  # fmt: skip


def line(name: str | None, route: str, **more: Any) -> dict[str, Any]:
    body = {"model": "m", "input": ["a", "b"], "prompt": "a", "messages": []}
    entry = {"custom_id": name, "method": "POST", "url": f"/v1{route}", "body": body, **more}
    return entry if name is not None else {k: v for k, v in entry.items() if k != "custom_id"}


@pytest.fixture
def server():
    routes = {
        "GET /v1/models": models("m", "vllm"),
        "POST /v1/chat/completions": CHAT,
        "POST /v1/completions": COMPLETION,
        "POST /v1/embeddings": EMBEDDINGS,
        "POST /v1/responses": RESPONSE,
    }
    with in_thread(routes_server(routes)) as (url, asked):
        yield url, asked, routes


@pytest.fixture
def run_lines(server, job_dir, bagent):
    """Runs lines as ``b.jsonl``; gives the end, the lines of ``openai-batch`` and the rows."""

    def run(entries):
        write_rows(job_dir / "b.jsonl", entries)
        done = bagent(["run", "b.jsonl", "--backend", server[0], "--progress", "plain"])
        lines = bagent(["results", "b", "--format", "openai-batch"]).lines()
        return done, lines, bagent(["results", "b"]).lines()

    return run


def test_each_kind_of_line_comes_back_as_the_server_answered_it(run_lines):
    answers = {
        "/chat/completions": CHAT,
        "/completions": COMPLETION,
        "/embeddings": EMBEDDINGS,
        "/responses": RESPONSE,
    }
    done, lines, rows = run_lines([line(route, route) for route in answers])
    assert done.code == 0, done.err
    assert {one["custom_id"]: one["response"]["body"] for one in lines} == answers
    chat, completion, embeddings, response = rows
    assert (chat["text"], chat["reasoning"]) == ("42", "six times seven")
    assert completion["text"] == " upon a time"
    assert embeddings["output"] == [[0.5, 1.0], [1.0, 2.0]]
    assert (response["text"], response["reasoning"], response["reasoning_tokens"]) == (
        "42", "Hm.", 2)  # fmt: skip
    assert [row["cached_tokens"] for row in rows] == [8, 8, None, 8]


def test_vectors_of_a_batch_file_are_floats_in_the_answers(job_dir, run_lines):
    done, _, _ = run_lines([line("a", "/embeddings")])
    assert done.code == 0, done.err
    answers = job_dir / "runs/b/answers.parquet"
    [row] = sql(f"select value, typeof(value) as kind from read_parquet('{answers}')")
    assert row == {"value": [[0.5, 1.0], [1.0, 2.0]], "kind": "FLOAT[][]"}


def test_a_filtered_answer_keeps_its_response(server, run_lines):
    server[2]["POST /v1/chat/completions"] = FILTERED
    done, [entry], [row] = run_lines([line("a", "/chat/completions")])
    assert (done.code, row["status"]) == (1, "refused")
    assert (entry["response"]["body"], entry["error"]) == (FILTERED, None)


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
         "truncated", "42"),
        ({"status": "incomplete", "incomplete_details": {"reason": "content_filter"}},
         "refused", "42"),
        ({"output": [{"type": "message", "content": [{"type": "refusal", "refusal": "No."}]}]},
         "refused", None),
        ({"output": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]},
         "ok", None),
        ({"status": "queued", "output": []}, "failed", None),
    ],
)  # fmt: skip
def test_the_end_of_a_response_decides_the_status(server, run_lines, change, status, text):
    server[2]["POST /v1/responses"] = {**RESPONSE, **change}
    _, _, [row] = run_lines([line("a", "/responses")])
    assert (row["status"], row["text"]) == (status, text)


def test_a_response_that_was_cut_at_the_lines_own_limit_is_accepted(server, run_lines):
    cut = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    server[2]["POST /v1/responses"] = {**RESPONSE, **cut}
    body = {"model": "m", "input": "a", "max_output_tokens": 2}
    done, _, [row] = run_lines([line("a", "/responses", body=body)])
    assert (done.code, row["status"]) == (0, "truncated")


def test_a_line_that_is_no_request_is_bad_input_of_its_own(server, run_lines):
    bad = [
        line(None, "/embeddings"),
        line("get", "/embeddings", method="GET"),
        line("bodiless", "/embeddings", body=None),
        line("later", "/responses", body={"input": "a", "background": True}),
    ]
    good = [line("a", "/embeddings"), line("b", "/embeddings", body={"input": ["c", "d"]})]
    done, lines, rows = run_lines([bad[0], *good, *bad[1:]])
    assert done.code == 1
    assert [row["status"] for row in rows] == ["bad_input", "ok", "ok", *["bad_input"] * 3]
    assert "no custom_id" in lines[0]["error"]["message"]
    assert server[1].count("POST /v1/embeddings") == 2


def test_lines_of_other_routes_are_refused_in_one_message_before_the_run(server, run_lines):
    entries = [line(str(n), "/score" if n % 2 else "/embeddings") for n in range(14)]
    done, _, _ = run_lines([*entries, line("x", "/rerank")])
    assert (done.code, server[1]) == (2, [])
    assert (
        "b.jsonl:2: 8 lines cannot be sent: /v1/score (lines 2, 4, 6, 8, 10 and 2 more)" in done.err
    )
    assert "/v1/rerank (line 15)" in done.err


@pytest.mark.parametrize("job", [None, "job.yaml"])
def test_a_batch_file_may_be_piped(server, job_dir, bagent, job):
    (job_dir / "job.yaml").write_text("name: piped\n")
    write_rows(job_dir / "b.jsonl", [line("a", "/embeddings"), line("b", "/embeddings")])
    given = ["-"] if job is None else [job, "-i", "-"]
    command = ["run", *given, "--backend", server[0], "--progress", "plain"]
    done = bagent(command, stdin=(job_dir / "b.jsonl").read_bytes())
    assert done.code == 0, done.err
    run = "stdin" if job is None else "piped"
    lines = bagent(["results", run, "--format", "openai-batch"]).lines()
    assert [one["response"]["body"] for one in lines] == [EMBEDDINGS, EMBEDDINGS]
    refused = bagent([*command, "--name", "other"], stdin=b'{"id": 1, "text": "a"}\n')
    assert (refused.code, "no lines of a batch file" in refused.err) == (2, True)


@pytest.mark.parametrize("text", [b"\n \n"])
def test_an_empty_batch_file_is_a_run_of_no_rows(server, job_dir, bagent, text):
    (job_dir / "b.jsonl").write_bytes(text)
    done = bagent(["run", "b.jsonl", "--backend", server[0], "--progress", "plain"])
    assert (done.code, "no rows" in done.err) == (0, True)


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl.gz", "x.jsonl"])
def test_a_file_of_rows_in_place_of_a_job_is_called_what_it_is(job_dir, bagent, name):
    row = b'{"id": 1}\n'
    (job_dir / name).write_bytes(gzip.compress(row) if name.endswith(".gz") else row)
    done = bagent(["run", name])
    assert (done.code, f"{name} holds rows, not a job" in done.err) == (2, True)


def test_a_batch_file_with_a_misspelled_key_names_it(job_dir, bagent):
    line = {"customid": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}
    write_rows(job_dir / "b.jsonl", [line])
    done = bagent(["run", "b.jsonl"])
    assert "(its first line has customid: did you mean custom_id?)" in done.err
    assert "b.json: no such job file (did you mean b.jsonl?)" in bagent(["run", "b.json"]).err


def test_another_batch_file_of_the_same_name_is_refused(server, job_dir, bagent):
    for folder, name in (("a", "r1"), ("b", "r2")):
        (job_dir / folder).mkdir()
        write_rows(job_dir / folder / "batch.jsonl", [line(name, "/embeddings")])
    options = ["--backend", server[0]]
    assert bagent(["run", "a/batch.jsonl", *options]).code == 0
    refused = bagent(["run", "b/batch.jsonl", *options])
    assert refused.code == 2
    assert f"input changed since {job_dir / 'runs/batch'} was begun" in refused.err
    assert f"of {job_dir / 'a/batch.jsonl'}" in refused.err
    assert "--name NAME" in refused.err
    assert bagent(["check", "b/batch.jsonl", *options]).code == 2
    assert server[1].count("POST /v1/embeddings") == 1
    assert bagent(["run", "b/batch.jsonl", *options, "--name", "batch"]).code == 0
    assert bagent(["run", str(job_dir / "a/batch.jsonl"), *options]).code == 0
    assert server[1].count("POST /v1/embeddings") == 2


def test_a_pipe_without_a_name_or_rows_tells_of_the_rows_of_earlier_pipes(server, job_dir, bagent):
    def piped(name, *options):
        text = json.dumps(line(name, "/embeddings")) + "\n"
        return bagent(["run", "-", "--backend", server[0], *options], stdin=text.encode())

    assert "earlier pipes" not in piped("r1").err
    again = piped("r2").err
    assert "the run stdin has 1 row of earlier pipes, which count too; --name NAME" in again
    command = ["run", "-", "--backend", server[0], "--progress", "none"]
    empty = bagent(command, stdin=b"\n")
    assert empty.code == 0
    assert "warning     standard input had no rows; these are of earlier starts" in empty.err
    piped("r3", "--name", "own")
    assert "earlier pipes" not in piped("r4", "--name", "own").err


@pytest.mark.parametrize("key", ["sampling.max_tokens=5", "sampling.temperature=0", "prompt=Hi"])
def test_a_key_that_each_line_holds_itself_is_refused(server, job_dir, bagent, key):
    write_rows(job_dir / "b.jsonl", [line("a", "/embeddings")])
    command = ["run", "b.jsonl", "--backend", server[0]]
    done = bagent([*command, "--set", key])
    assert (done.code, server[1]) == (2, [])
    name = key.partition("=")[0]
    assert f"{name}: the lines of a batch file say this themselves" in done.err
    assert bagent([*command, "--sample", "1", "--set", "sampling.seed=3"]).code == 0


def test_an_object_that_a_line_asks_for_is_its_output(server, job_dir, run_lines, bagent):
    def chat(text):
        return {**CHAT, "choices": [{"index": 0, "finish_reason": "stop", "message": {
            "role": "assistant", "content": text}}]}  # fmt: skip

    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    wants = {**body, "response_format": {"type": "json_object"}}
    lines = [line("text", "/chat/completions", body=body),
             line("json", "/chat/completions", body=wants)]  # fmt: skip
    server[2]["POST /v1/chat/completions"] = chat('{"label": "a"}')
    done, _, rows = run_lines(lines)
    assert (done.code, [row["output"] for row in rows]) == (0, [None, {"label": "a"}])
    assert rows[1]["text"] == '{"label": "a"}'
    assert bagent(["compare", "b", "b", "--on", "label"]).code == 0
    server[2]["POST /v1/chat/completions"] = chat("no JSON")
    write_rows(job_dir / "c.jsonl", lines)
    assert bagent(["run", "c.jsonl", "--backend", server[0]]).code == 0
    assert [row["output"] for row in bagent(["results", "c"]).lines()] == [None, None]


# --- chats, on a scripted server


def chats(names, **body):
    """Lines of chats whose rows have these names; ``body`` goes into each body."""
    return [
        line(
            name,
            "/chat/completions",
            body={"messages": [{"role": "user", "content": f"id={name} hello"}], **body},
        )
        for name in names
    ]


def test_lines_with_their_own_max_tokens_accept_truncated_answers(fs, job_dir, bagent):
    fs.set_script({"*": [CUT]})
    write_rows(job_dir / "batch.jsonl", chats((f"r{n}" for n in range(60)), max_tokens=64))
    command = ["run", "batch.jsonl", "--backend", fs.url, "--progress", "plain"]
    done = bagent(command)
    assert done.code == 0, done.err
    assert bagent(command).code == 0
    assert len(fs.requests) == 60
    [first, *_] = bagent(["results", "batch", "--format", "openai-batch"]).lines()
    assert first["response"]["body"]["choices"][0]["finish_reason"] == "length"
    command += ["--name", "strict", "--limit", "4"]
    strict = bagent([*command, "--set", "output.truncated=fail"])
    assert strict.code == 1
    assert (type_next(bagent, strict).code, len(fs.requests)) == (0, 64)


def test_accepted_truncated_rows_that_left_the_input_stay_finished(fs, job_dir, bagent):
    fs.set_script({"*": [CUT]})
    command = ["run", "-i", "b.jsonl", "job.yaml", "--progress", "plain"]
    (job_dir / "job.yaml").write_text(f"backend: {fs.url}\n")
    for names in ("ab", "cd", "ab"):
        write_rows(job_dir / "b.jsonl", chats(names, max_tokens=64))
        assert bagent(command).code == 0
    assert len(fs.requests) == 4
    assert bagent(["status"]).out.split("\n")[2].split()[2:6] == ["0", "0", "4", "0"]


def test_a_line_keeps_the_model_and_the_tools_that_it_names(fs, job_dir, bagent):
    call = tool_call("weigh", '{"kg": 3}')
    fs.set_script({"plain": [echo()], "r1": [ok_tools(call)], "*": [ok_tools(call, text="Both.")]})
    tools = [{"type": "function", "function": {"name": "weigh"}}]
    lines = [*chats(["plain"], model="fine-tuned-7"), *chats(["r1", "r2"], tools=tools)]
    write_rows(job_dir / "batch.jsonl", [*lines, *chats(["r3"], n=2)])
    done = bagent(["run", "batch.jsonl", "--backend", fs.url, "--progress", "plain"])
    assert done.code == 1, done.err
    assert fs.of("plain")[0].body["model"] == "fine-tuned-7"
    assert fs.of("r1")[0].body["model"] == "fake-model"
    found = bagent(["results", "--format", "openai-batch"]).lines()
    found = {line["custom_id"]: line for line in found}
    for name, text in (("r1", None), ("r2", "Both.")):
        (choice,) = found[name]["response"]["body"]["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"] == {"role": "assistant", "content": text, "tool_calls": [call]}
    assert "one answer" in found["r3"]["error"]["message"]
    assert fs.count("r3") == 0
