"""Topologies by their short names, as a user runs them."""

from __future__ import annotations

from support.cli import run_bagent
from support.fake_server import FakeServer
from support.jobs import write_job
from support.replies import echo, ok, ok_json, status
from support.stage_jobs import NO_TABLES, RUN, outcomes, texts, write_stages


def run(folder, url, rows, topology, **keys):
    keys = {"prompt": "id={{ id }} {{ text }}", "results": NO_TABLES} | keys
    write_job(folder, url, rows, topology=topology, **keys)
    done = run_bagent(RUN, folder)
    assert "Traceback" not in done.err, done.err
    return done


def test_self_consistency_votes_and_tells_the_fraction(tmp_path):
    script = {
        "r1": [ok("yes"), ok("no"), ok("yes"), ok("yes")],
        "r2": [ok("no"), status(400), ok("no"), ok("yes")],
        "r3": [status(400)],
    }
    keys = {"answers": 4, "dedupe": False, "limits": {"concurrency": 1}}
    with FakeServer(script, allow_faults=True) as server:
        done = run(tmp_path, server.url, 3, "self_consistency", **keys)
    assert done.code == 1, done.err
    *votes, none = outcomes(tmp_path, "vote")
    assert [
        tuple(vote["output"][name] for name in ("winner", "votes", "failed", "fraction"))
        for vote in votes
    ] == [("yes", 3, 0, 0.75), ("no", 2, 1, 0.5)]
    assert votes[0]["parents"] == [f"sample:r1:{n}" for n in range(4)]
    assert (none["status"], none["error"]) == ("failed", "none of 4 answers can be counted")


def test_a_plan_becomes_work_and_the_work_one_answer_a_row(tmp_path):
    topology = {
        "name": "plan_map_reduce",
        "plan": {"prompt": "plan id={{ id }}"},
        "reduce": {"prompt": "all of {{ text }}, planned {{ plan }}: {{ responses }}"},
    }
    plan = ok_json({"items": ["x", "y", "z"]})
    with FakeServer({"r1": [plan], "r2": [plan], "*": [echo()]}) as server:
        done = run(tmp_path, server.url, 2, topology, prompt="work on {{ item }} for {{ text }}")
        prompt = server.requests[-1].prompts[0]
    assert done.code == 0, done.err
    assert sorted(texts(tmp_path, "work")) == [f"r{r}/{n}" for r in (1, 2) for n in range(3)]
    assert texts(tmp_path, "work")["r2/1"] == "work on y for text number 2"
    assert sorted(texts(tmp_path, "reduce")) == ["r1:1.0", "r2:1.0"]
    assert 'planned {"items":["x","y","z"]}' in prompt


def test_the_input_itself_can_be_reduced(tmp_path):
    with FakeServer({"*": [echo()]}) as server:
        done = run(tmp_path, server.url, 2, "reduce", prompt="of {{ n }}:\n{{ responses }}")
        assert len(server.requests) == 1
    assert done.code == 0, done.err
    told = texts(tmp_path, "reduce")["reduce:1.0"]
    assert '{"id":"r1","status":"ok","output":{"id":"r1","text":"text number 1"}}' in told


def test_a_board_goes_round_until_a_property_says_so(tmp_path):
    schema = {
        "type": "object",
        "properties": {"done": {"type": "boolean"}, "say": {"type": "string"}},
        "required": ["done", "say"],
    }
    topology = {
        "name": "blackboard",
        "until": "done",
        "max_rounds": 5,
        "sections": [
            {"name": "writer", "prompt": "id=writer round {{ round }} of {{ text }}\n{{ board }}"},
            {"name": "critic", "prompt": "id=critic {{ board }}", "output": {"schema": schema}},
        ],
    }
    script = {
        "writer": [echo()],
        "critic": [ok_json({"done": False, "say": "no"}), ok_json({"done": True, "say": "well"})],
    }
    with FakeServer(script) as server:
        done = run(tmp_path, server.url, 1, topology, prompt=None)
        assert server.count("writer") == 2
    assert done.code == 0, done.err
    [board] = outcomes(tmp_path, "blackboard")
    assert board["id"] == "r1"
    assert board["output"]["critic"] == {"done": True, "say": "well"}
    last = board["output"]["writer"].splitlines()
    assert last[0] == "id=writer round 2 of text number 1"
    assert '{"section":"critic","round":1,"output":{"done":false,"say":"no"}}' in last
    assert sorted(texts(tmp_path, "blackboard.writer")) == ["r1/1.writer", "r1/2.writer"]


def test_sections_in_order_see_what_was_just_written(tmp_path):
    sections = [
        {"name": "first", "prompt": "id=a round {{ round }}"},
        {"name": "second", "prompt": "id=b [{{ board.first }}]"},
    ]
    topology = {"name": "blackboard", "parallel": False, "max_rounds": 2, "sections": sections}
    with FakeServer({"*": [echo()]}) as server:
        done = run(tmp_path, server.url, 1, topology, prompt=None)
    assert done.code == 0, done.err
    assert texts(tmp_path, "blackboard.second") == {
        "r1/1.second": "id=b [id=a round 1]",
        "r1/2.second": "id=b [id=a round 2]",
    }


ALL = {"kind": "broadcast", "name": "all", "prompt": "id={{ id }} {{ text }}"}
SUM = {"kind": "reduce", "name": "sum", "by": "id", "prompt": "sum {{ n }}: {{ responses }}"}


def test_each_endpoint_answers_each_row_and_a_dead_one_is_a_failed_answer(tmp_path):
    with FakeServer({"*": [echo()]}) as one, FakeServer({"*": [ok("two")]}) as two:
        with FakeServer() as dead:
            gone = dead.address
        (tmp_path / "hosts.txt").write_text(f"{one.address}\n{two.address}\n{gone}\n")
        keys = {"hostfile": "hosts.txt", "model": "fake-model", "limits": {"retries": 0}}
        write_stages(tmp_path, one.url, 3, [ALL, SUM], backend=None, **keys)
        done = run_bagent([*RUN, "--wait-hosts", "2s"], tmp_path)
        assert "Traceback" not in done.err
        asked = [seen.prompts[0] for seen in (*one.requests, *two.requests)]
    assert done.code == 0, done.err
    found = {line["id"]: line["status"] for line in outcomes(tmp_path, "all")}
    assert len(found) == 9
    assert {name for name, status in found.items() if status != "ok"} == {
        f"r{n}@{gone}" for n in (1, 2, 3)
    }
    assert sum(prompt.startswith("id=r1 ") for prompt in asked) == 2
    sums = outcomes(tmp_path, "sum")
    assert [line["parents_failed"] for line in sums] == [1, 1, 1]
    assert all(len(line["parents"]) == 3 for line in sums)
