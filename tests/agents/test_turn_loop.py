"""Turns of an agent: what it is asked, what it is told, when it ends."""

from __future__ import annotations

import json
import threading

import pytest

from support.agent_jobs import agent_job, answers_in, calls, check_pairs, ran
from support.fake_server import FakeServer
from support.jobs import parquet, results_by_id
from support.replies import delta, gated, ok, stream, tool_call


def finished(bagent, job_dir, code=0):
    """Run the job; its rows by id."""
    done = bagent(["run", "job.yaml"])
    assert done.code == code, done.err
    return results_by_id(job_dir)


def test_calls_of_one_turn_run_and_their_answers_stand_behind_the_turn_that_asked(job_dir, bagent):
    script = {"*": [calls(("add", '{"a":1,"b":2}'), ("add", '{"a":3,"b":4}')), ok("3 and 7")]}
    with FakeServer(script) as fs:
        agent_job(job_dir, fs.url)
        row = finished(bagent, job_dir)["r1"]
        first, second = (seen.body for seen in fs.of("r1"))
    assert (row["status"], row["text"], row["turns"], row["attempts"]) == ("ok", "3 and 7", 2, 2)
    assert [tool["function"]["name"] for tool in first["tools"]] == ["add", "wait", "tell", "fail"]
    assert all(tool["function"]["strict"] for tool in first["tools"])
    assert second["messages"][:1] == first["messages"]
    assert second["messages"][1]["role"] == "assistant"
    assert [one["tool_call_id"] for one in second["messages"][2:]] == ["c0", "c1"]
    assert answers_in(second) == ["3", "7"]
    table = parquet(job_dir / "runs/job", "tool_calls")
    assert sorted((one["turn"], one["name"], one["arguments"]) for one in table) == [
        (1, "add", '{"a":1,"b":2}'),
        (1, "add", '{"a":3,"b":4}'),
    ]
    assert all(one["latency_ms"] >= 0 and one["error"] is None for one in table)


@pytest.mark.parametrize(
    ("given", "stream"),
    [({"a": 1, "b": 2}, False), (json.dumps('{"a":1,"b":2}'), True)],
    ids=["object", "text in text"],
)
def test_arguments_in_every_form_reach_the_tool_and_go_back_as_text_of_one_object(
    job_dir, bagent, given, stream
):
    with FakeServer({"*": [calls(("add", given)), ok("3")]}) as fs:
        agent_job(job_dir, fs.url, stream=stream)
        assert finished(bagent, job_dir)["r1"]["text"] == "3"
        body = fs.requests[-1].body
    (call,) = body["messages"][1]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    assert answers_in(body) == ["3"]


def test_what_is_wrong_with_a_call_goes_back_to_the_model_and_nothing_runs(job_dir, bagent):
    script = [
        calls(("nope", "{}")),
        calls(("add", '{"a":1,')),
        calls(("add", '"foo"')),
        calls(("add", '{"a":1}')),
        ok("I give up"),
    ]
    with FakeServer({"*": script}) as fs:
        agent_job(job_dir, fs.url)
        row = finished(bagent, job_dir)["r1"]
        bodies = [seen.body for seen in fs.of("r1")]
    assert (row["status"], row["text"]) == ("ok", "I give up")
    assert ran(job_dir) == []
    errors = answers_in(bodies[-1])
    assert len(errors) == 4 and all(text.startswith("error: ") for text in errors)
    assert "nope" in errors[0] and "add" in errors[0] and "b" in errors[3]
    for body in bodies:
        check_pairs(body)
        for message in body["messages"]:
            for call in message.get("tool_calls") or ():
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
    table = parquet(job_dir / "runs/job", "tool_calls")
    by_turn = sorted(table, key=lambda one: one["turn"])
    assert [one["error"].partition(": ")[0] for one in by_turn] == [
        "unknown_tool",
        "bad_arguments",
        "bad_arguments",
        "bad_arguments",
    ]


def test_a_row_whose_tools_only_ever_fail_ends_as_a_tool_failure(job_dir, bagent):
    bad = ("fail", '{"why":"no luck"}')
    with FakeServer(
        {"*": [*[calls(bad)] * 3, calls(bad, ("add", '{"a":1,"b":1}')), calls(bad)]}
    ) as fs:
        agent_job(job_dir, fs.url, agent={"max_turns": 50})
        row = finished(bagent, job_dir, code=1)["r1"]
        assert len(fs.requests) == 4 + 5, "one good call keeps it alive"
    assert (row["status"], row["error_kind"]) == ("failed", "tool")
    assert "5 turns" in row["error"] and "no luck" in row["error"]


def test_max_turns_ends_a_row_and_the_last_turn_s_tools_do_not_run(job_dir, bagent):
    turn = calls(("add", '{"a":1,"b":2}'), text="Three so far.")
    with FakeServer({"*": [turn]}) as fs:
        agent_job(job_dir, fs.url, agent={"max_turns": 3})
        row = finished(bagent, job_dir, code=1)["r1"]
        assert len(fs.requests) == 3
    assert row["text"] == "Three so far."
    assert (row["status"], row["error_kind"], row["turns"]) == ("failed", "max_turns", 3)
    assert ran(job_dir) == ["1+2", "1+2"]


def test_a_turn_that_was_cut_at_the_token_limit_runs_nothing(job_dir, bagent):
    reply = calls(("add", '{"a":1,"b":2'), finish_reason="length")
    with FakeServer({"*": [reply]}) as fs:
        agent_job(job_dir, fs.url)
        row = finished(bagent, job_dir, code=1)["r1"]
    assert (row["status"], row["error_kind"]) == ("truncated", "truncated")
    assert ran(job_dir) == []


@pytest.mark.parametrize(("stream", "field"), [(True, "reasoning"), (False, "reasoning_content")])
def test_text_and_thinking_of_a_turn_are_given_back_as_they_came(job_dir, bagent, stream, field):
    message = {"tool_calls": [tool_call("add", '{"a":1,"b":2}', "x")], field: "Let me add."}
    turn = ok("One moment.", finish_reason="tool_calls", message=message)
    with FakeServer({"*": [turn, ok("3")]}) as fs:
        agent_job(job_dir, fs.url, stream=stream)
        finished(bagent, job_dir)
        given_back = fs.requests[-1].body["messages"][1]
    assert given_back["content"] == "One moment."
    assert given_back[field] == "Let me add."
    assert len({"reasoning", "reasoning_content"} & given_back.keys()) == 1


def test_more_calls_than_a_turn_may_have_are_answered_and_not_run(job_dir, bagent):
    many = calls(*(("add", f'{{"a":{n},"b":0}}') for n in range(70)))
    with FakeServer({"*": [many, ok("done")]}) as fs:
        agent_job(job_dir, fs.url)
        finished(bagent, job_dir)
        texts = answers_in(fs.requests[-1].body)
    assert len(ran(job_dir)) == 64
    assert texts[:64] == [str(n) for n in range(64)]
    assert all("at most 64 calls" in text for text in texts[64:]) and len(texts) == 70


def test_the_first_turn_alone_has_to_call_a_tool_where_the_job_says_so(job_dir, bagent):
    named = {"type": "function", "function": {"name": "add"}}
    with FakeServer({"*": [calls(("add", '{"a":1,"b":2}'), finish_reason="stop"), ok("3")]}) as fs:
        for choice, sent in (("required", "required"), ("add", named)):
            before = len(fs.requests)
            agent_job(job_dir, fs.url, name=choice, agent={"tool_choice": choice})
            assert bagent(["run", "job.yaml"]).code == 0
            bodies = [seen.body for seen in fs.requests[before:]]
            assert bodies[0]["tool_choice"] == sent
            assert all("tool_choice" not in body for body in bodies[1:])
            fs.set_script({"*": [calls(("add", '{"a":1,"b":2}'), finish_reason="stop"), ok("3")]})
        agent_job(job_dir, fs.url, name="other", agent={"tool_choice": "nope"})
        done = bagent(["run", "job.yaml"])
        assert done.code == 2 and "there is no tool nope" in done.err


def test_equal_rows_share_an_answer_only_where_no_tool_has_side_effects(job_dir, bagent):
    rows = [{"id": "r1", "text": "x"}, {"id": "r1", "text": "x"}]
    (job_dir / "note.txt").write_text("hello")
    script = {"*": [calls(("read_file", '{"path":"note.txt"}')), ok("hello")]}
    with FakeServer(script) as fs:
        agent_job(job_dir, fs.url, rows, agent={"tools": [{"builtin": "read_file", "root": "."}]})
        assert bagent(["run", "job.yaml"]).code == 0
        assert len(fs.requests) == 2
        fs.set_script({"*": [calls(("add", '{"a":1,"b":2}'))] * 2 + [ok("3")]})
        agent_job(job_dir, fs.url, rows, name="other")
        assert bagent(["run", "job.yaml"]).code == 0
    assert ran(job_dir) == ["1+2", "1+2"]


def test_check_opens_the_tools_and_shows_what_the_model_is_told_of_them(job_dir, bagent):
    with FakeServer() as fs:
        agent_job(job_dir, fs.url)
        good = bagent(["check", "job.yaml", "--open"])
        agent_job(job_dir, fs.url, tools=("add", "nowhere"))
        bad = bagent(["check", "job.yaml", "--open"])
        assert fs.requests == []
    assert good.code == 0 and '"name":"add"' in good.out.replace(" ", ""), good.err
    assert bad.code == 2 and "nowhere" in bad.err


def test_calls_in_the_older_form_are_run_whole_or_streamed(job_dir, bagent):
    one, two = '{"a":1,"b":2}', '{"a":3,"b":4}'
    whole = {"function_call": {"name": "add", "arguments": one}}
    pieces = [
        delta(function_call={"name": "add", "arguments": ""}),
        *(delta(function_call={"arguments": piece}) for piece in two),
        delta(finish_reason="function_call"),
    ]
    script = [ok(None, finish_reason="function_call", message=whole), ok("3")]
    with FakeServer({"*": script}) as fs:
        for streamed in (False, True):
            agent_job(job_dir, fs.url, tools=("add",), name=f"streamed-{streamed}", stream=streamed)
            done = bagent(["run", "job.yaml"])
            assert done.code == 0, done.err
            fs.set_script({"*": [stream(pieces), ok("7")]})
        texts = [answers_in(fs.requests[n].body) for n in (1, 3)]
    assert texts == [["3"], ["7"]] and ran(job_dir) == ["1+2", "3+4"]


def test_returning_agents_have_priority_and_cached_tokens_are_recorded_by_turn(job_dir, bagent):
    usage = {"prompt_tokens": 90, "completion_tokens": 5}
    cached = {**usage, "prompt_tokens_details": {"cached_tokens": 64}}
    add, more = ("add", '{"a":1,"b":2}'), ("add", '{"a":3,"b":4}')
    script = [calls(add, usage=usage), calls(more, usage=cached), ok("done", usage=cached)]
    with FakeServer({"*": script}, flavour="vllm") as fs:
        agent_job(job_dir, fs.url)
        done = bagent(["run", "job.yaml"])
        assert done.code == 0, done.err
        told = [seen.body.get("priority") for seen in fs.requests]
    assert told == [None, -1, -2]
    attempts = parquet(job_dir / "runs/job", "attempts")
    found = {(one["turn"], one["cached_tokens"]) for one in attempts}
    assert found == {(1, None), (2, 64), (3, 64)}


def test_each_start_counts_the_tokens_and_the_cost_of_its_own_turns(job_dir, bagent):
    def spent(done):
        (event,) = (
            e for line in done.err.splitlines() if (e := json.loads(line))["event"] == "end"
        )
        tokens = event["tokens"]
        counts = tokens["prompt"]["total"], tokens["completion"]["total"]
        return *counts, round(event["cost_usd"], 9)

    one = calls(("add", '{"a":1,"b":2}'), usage={"prompt_tokens": 10, "completion_tokens": 2})
    last = ok("3", usage={"prompt_tokens": 30, "completion_tokens": 4})
    command = ["run", "job.yaml", "--progress", "json"]
    stop_file = job_dir / "runs" / "job" / "stop"
    with FakeServer({"*": [one, gated(ok("never"))]}) as fs:
        agent_job(job_dir, fs.url, prices={"input": 1, "output": 1}, agent={"max_turns": 3})
        stop = threading.Thread(target=lambda: (fs.wait_for(2), stop_file.touch()))
        stop.start()
        first = bagent(command)
        stop.join()
        fs.set_script({"*": [last]})
        second = bagent(command)
    assert (first.code, second.code) == (75, 0)
    assert spent(first) == (10, 2, 12e-6), "of a turn of a row that has not ended"
    assert spent(second) == (30, 4, 34e-6)
    row = results_by_id(job_dir)["r1"]
    assert (row["prompt_tokens"], row["completion_tokens"]) == (40, 6)
