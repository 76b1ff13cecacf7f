"""Conversations that come near the model's context, and answers that have to fit a schema."""

from __future__ import annotations

import json

import pytest

from support.agent_jobs import agent_job, answers_in, calls, check_pairs, ran
from support.fake_server import FakeServer
from support.jobs import parquet, results_by_id
from support.replies import context_overflow, ok

SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}


def tells(*sizes):
    return [calls(("tell", json.dumps({"size": size})), usage="absent") for size in sizes]


def compactions(job_dir):
    """What the table says of conversations made shorter, in order."""
    table = parquet(job_dir / "runs/job", "tool_calls")
    found = [one for one in table if one["name"] == "(compaction)"]
    return [json.loads(one["arguments"]) for one in sorted(found, key=lambda one: one["turn"])]


def test_old_answers_are_cut_before_the_context_is_full_and_no_pair_is_broken(job_dir, bagent):
    script = [*tells(1500, 1500, 1500, 1500), ok("the end")]
    with FakeServer({"*": script}, max_model_len=2000, flavour="vllm") as fs:
        agent_job(job_dir, fs.url, agent={"max_turns": 9})
        done = bagent(["run", "job.yaml"])
        assert done.code == 0, done.err
        bodies = [seen.body for seen in fs.of("r1")]
    for body in bodies:
        check_pairs(body)
        assert body["messages"][0] == bodies[0]["messages"][0]
    last = answers_in(bodies[-1])
    assert len(last) == 4
    assert len(last[0]) <= 200 and "left out" in last[0]
    assert len(last[-1]) > 200
    (told, *_) = compactions(job_dir)
    assert told["by"] == "cutting" and told["answers_cut"] >= 1
    assert told["after_tokens"] < told["before_tokens"]
    assert told["after_tokens"] <= 0.85 * 2000


def test_a_small_model_sums_up_the_older_turns(job_dir, bagent):
    rows = [{"id": "r1", "text": "text"}]
    with FakeServer(
        max_model_len=2000, flavour="vllm", row_pattern=r"\b(?:id=|)(r1|assistant)\b"
    ) as fs:
        end = ok("the end", usage={"prompt_tokens": 7, "completion_tokens": 3})
        summary = ok(
            "We heard a story of 1500.", usage={"prompt_tokens": 50, "completion_tokens": 20}
        )
        fs.set_script({"r1": [*tells(1500, 1500, 1500, 1500), end], "assistant": [summary]})
        agent_job(
            job_dir,
            fs.url,
            rows,
            agent={"max_turns": 9, "compact": {"model": "small-model"}},
            prices={"input": 10, "output": 100},
        )
        done = bagent(["run", "job.yaml"])
        assert done.code == 0, done.err
        summing = [seen.body for seen in fs.requests if seen.body["model"] == "small-model"]
        last = fs.requests[-1].body
    assert summing and "tools" not in summing[0]
    assert "tell" in summing[0]["messages"][-1]["content"]
    check_pairs(last)
    assert "We heard a story of 1500." in last["messages"][0]["content"]
    assert last["messages"][0]["role"] == "user" and last["messages"][1]["role"] == "assistant"
    assert len(answers_in(last)) < 4
    assert "small-model" in {one["by"] for one in compactions(job_dir)}
    row = results_by_id(job_dir)["r1"]
    assert row["text"] == "the end"
    prompt, completion = 7 + 50 * len(summing), 3 + 20 * len(summing)
    assert (row["prompt_tokens"], row["completion_tokens"]) == (prompt, completion)
    assert row["cost_usd"] == pytest.approx((prompt * 10 + completion * 100) / 1e6)


def test_a_conversation_that_the_server_finds_too_long_is_cut_once_and_asked_again(job_dir, bagent):
    script = [*tells(4000), context_overflow(900, 1000), ok("short enough")]
    with FakeServer({"*": script}, max_model_len=None) as fs:
        agent_job(job_dir, fs.url)
        done = bagent(["run", "job.yaml"])
        assert done.code == 0, done.err
        before, after = answers_in(fs.requests[1].body), answers_in(fs.requests[2].body)
    assert len(before[0]) == 4000 and len(after[0]) < 2500
    assert ran(job_dir) == ["told 4000"]


def test_calls_in_place_of_a_second_try_are_run_and_the_row_goes_on(job_dir, bagent):
    script = [
        calls(("add", '{"a":1,"b":2}')),
        ok("no JSON"),
        calls(("add", '{"a":3,"b":4}')),
        ok('{"sum": 7}'),
    ]
    with FakeServer({"*": script}) as fs:
        agent_job(job_dir, fs.url, output={"schema": SCHEMA, "enforce": "native"})
        done = bagent(["run", "job.yaml"])
        assert done.code == 0, done.err
        last = fs.requests[-1].body
    check_pairs(last)
    roles = [message["role"] for message in last["messages"]]
    first = ["user", "assistant", "tool"]
    assert roles == ["system", *first, "assistant", *first]
    assert ran(job_dir) == ["1+2", "3+4"]


def test_without_a_summary_old_answers_are_cut(job_dir, bagent):
    with FakeServer(
        max_model_len=2000, flavour="vllm", row_pattern=r"\b(?:id=|)(r1|assistant)\b"
    ) as fs:
        turns = [*tells(1500, 1500, 1500, 1500), ok("the end")]
        fs.set_script({"r1": turns, "assistant": [ok("")]})
        agent_job(job_dir, fs.url, agent={"max_turns": 9, "compact": {"model": "small-model"}})
        assert bagent(["run", "job.yaml"]).code == 0
        check_pairs(fs.requests[-1].body)
    assert compactions(job_dir)[0]["by"] == "cutting"
