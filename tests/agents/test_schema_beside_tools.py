"""A schema for the answer beside tools that may be called: what each endpoint makes of it."""

from __future__ import annotations

from support.agent_jobs import agent_job, calls, ran
from support.fake_server import FakeServer
from support.jobs import parquet, results_by_id
from support.replies import ok, tool_call

SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}
ADD = calls(("add", '{"a":1,"b":2}'))
BOUND = ok('{"sum": 0}')
"""What an engine says that binds every word to the schema: no call, whatever it should do."""


def run_on(url, job_dir, bagent, rows=1, **keys):
    """Run the job on an engine of the user's own; its rows by id."""
    agent_job(job_dir, url, rows, output={"schema": SCHEMA, **keys.pop("output", {})}, **keys)
    done = bagent(["run", "job.yaml"])
    assert done.code == 0, done.err
    return results_by_id(job_dir)


def own(fs):
    """The address of a server as an engine of the user's own."""
    return fs.url.replace("http://", "vllm://")


def test_an_engine_without_both_gets_the_schema_only_where_tools_are_off(job_dir, bagent):
    script = [BOUND, ADD, ok("the sum is three"), ok('{"sum": 3}')]
    with FakeServer({"*": script}) as fs:
        row = run_on(own(fs), job_dir, bagent)["r1"]
        tried, first_turn, second, again = (seen.body for seen in fs.of("r1"))
    assert tried["response_format"] and tried["tools"]
    assert tried["messages"] == first_turn["messages"]
    for body in (first_turn, second):
        assert "response_format" not in body and "tool_choice" not in body
        assert body["tools"]
    assert "JSON Schema" in first_turn["messages"][0]["content"]
    assert again["response_format"]["json_schema"]["schema"] == SCHEMA
    assert again["tool_choice"] == "none" and again["tools"]
    assert (row["output"], row["turns"], ran(job_dir)) == ({"sum": 3}, 3, ["1+2"])
    tries = sorted(parquet(job_dir / "runs/job", "attempts"), key=lambda one: one["sent"])
    assert [one["error_kind"] is None for one in tries] == [False, True, True, True]


def test_each_endpoint_is_tried_once_whatever_the_number_of_rows(job_dir, bagent):
    def binds(body, seen):
        choice, asked = body["choices"][0], seen.body
        told = any(message["role"] == "tool" for message in asked["messages"])
        if "response_format" not in asked and not told:
            call = tool_call("add", '{"a":1,"b":2}')
            choice["message"] = {"role": "assistant", "content": None, "tool_calls": [call]}
            choice["finish_reason"] = "tool_calls"
        return body

    script = {"*": [ok('{"sum": 3}')]}
    with FakeServer(script) as first, FakeServer(script) as second:
        hosts = job_dir / "hosts.txt"
        hosts.write_text(f"{first.address}\n{second.address}\n")
        for server in (first, second):
            server.server.edit = binds
        rows = run_on(None, job_dir, bagent, 12, backend=None, hostfile="hosts.txt")
        asked = [[seen.body for seen in server.requests] for server in (first, second)]
    assert {row["output"]["sum"] for row in rows.values()} == {3} and len(ran(job_dir)) == 12
    for bodies in asked:
        assert sum("response_format" in body for body in bodies) == 1
    assert sum(map(len, asked)) == 2 + 2 * 12


def test_a_server_that_the_job_says_combines_both_is_asked_for_both_at_once(job_dir, bagent):
    with FakeServer({"*": [ADD, ok('{"sum": 3}')]}) as fs:
        run_on(fs.url, job_dir, bagent, output={"enforce": "native"})
        assert all("response_format" in seen.body for seen in fs.requests)
        assert all(seen.body["tools"] for seen in fs.requests)


def test_an_answer_that_rambled_on_to_the_limit_is_asked_for_with_the_schema(job_dir, bagent):
    with FakeServer({"*": [BOUND, ADD, ok("well, well", "length"), ok('{"sum": 3}')]}) as fs:
        row = run_on(own(fs), job_dir, bagent)["r1"]
        last = fs.requests[-1].body
    assert last["tool_choice"] == "none" and "response_format" in last
    assert "cut off" in last["messages"][-1]["content"]
    assert row["output"] == {"sum": 3}
