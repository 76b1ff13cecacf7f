"""Topologies by their short names as a user runs them, and boards that fail or write too much."""

from __future__ import annotations

from support.cli import run_bagent
from support.fake_server import FakeServer
from support.jobs import write_job
from support.replies import canned, echo, ok, ok_json, status
from support.stage_jobs import (
    NO_TABLES,
    RUN,
    outcomes,
    run_scripted,
    run_stages,
    texts,
    write_stages,
)


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


def board(*sections: str, rounds: int = 2) -> dict[str, object]:
    """A loop whose sections are told the round and the board; each row and section has a name."""
    prompt = "id={{ id }}-%s round {{ round }}\n{{ board }}"
    return {
        "kind": "loop",
        "name": "talk",
        "max_rounds": rounds,
        "sections": [{"name": name, "prompt": prompt % name} for name in sections],
    }


def test_what_a_section_wrote_stands_where_it_fails_later_and_nothing_is_no_board(tmp_path):
    script = {
        "r1-pro": [ok("I say yes"), status(400)],
        "r1-con": [ok("I say no"), echo()],
        "r2-pro": [status(400)],
        "r2-con": [status(400)],
    }
    server = run_scripted(tmp_path, 2, [board("pro", "con")], script=script, code=1)
    asked = [seen.prompts[0] for seen in server.requests]
    found = {line["id"]: line for line in outcomes(tmp_path, "talk")}
    assert found["r1"]["status"] == "ok"
    assert found["r1"]["output"]["pro"] == "I say yes"
    assert found["r1"]["output"]["con"].startswith("id=r1-con round 2")
    assert found["r2"]["status"] == "failed"
    assert found["r2"]["error"].startswith("round 1: no section came out ok; ")
    assert not any(prompt.startswith("id=r2") and "round 2" in prompt for prompt in asked)
    kept = [(line["id"], line["status"]) for line in outcomes(tmp_path, "talk.pro")]
    assert sorted(kept) == [("r1/1.pro", "ok"), ("r1/2.pro", "failed"), ("r2/1.pro", "failed")]


def test_a_board_fits_the_context_however_much_is_written(tmp_path):
    script = {"*": [ok("word " * 900), ok("x" * 9000), canned()]}
    options = {"max_model_len": 900, "flavour": "vllm"}
    talk = board("a", "b", "c", rounds=3)
    server = run_scripted(tmp_path, 1, [talk], script, options=options, batching={"mode": "single"})
    prompts = [prompt for seen in server.requests for prompt in seen.prompts]
    assert len(prompts) == 9
    assert all(len(prompt) * 0.4 + 64 <= 900 for prompt in prompts)
    assert any("characters left out]" in prompt for prompt in prompts)


def test_a_section_in_turns_sees_what_another_wrote_in_its_first_round(tmp_path):
    sections = [
        {"name": "pro", "prompt": "pro id={{ id }}"},
        {"name": "con", "prompt": "con id={{ id }} <{{ board.pro }}>"},
    ]
    loop = {"kind": "loop", "name": "talk", "max_rounds": 1, "sections": sections}
    with FakeServer({"*": [echo()]}) as server:
        done = run_stages(tmp_path, server.url, 1, [loop])
        assert not server.requests
        assert done.code == 2
        assert "con: in the first round pro has not written yet" in done.err
        done = run_stages(tmp_path, server.url, 1, [{**loop, "parallel": False}])
    assert done.code == 0, done.err
    assert texts(tmp_path, "talk.con") == {"r1/1.con": "con id=r1 <pro id=r1>"}


def test_what_a_section_says_goes_before_a_field_of_the_same_name(tmp_path):
    schema = {"type": "object", "properties": {"over": {"type": "boolean"}}}
    section = {"name": "chair", "prompt": "id={{ id }}", "output": {"schema": schema}}
    loop = {"kind": "loop", "name": "talk", "max_rounds": 2, "until": "over", "sections": [section]}
    rows = [{"id": "r1", "over": True}]
    run_scripted(tmp_path, rows, [loop], {"*": [ok_json({"over": False})]}, dedupe=False)
    assert len(outcomes(tmp_path, "talk.chair")) == 2
