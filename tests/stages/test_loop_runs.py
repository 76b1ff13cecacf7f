"""Boards where sections fail, or write more than fits."""

from __future__ import annotations

from support.fake_server import FakeServer
from support.replies import canned, echo, ok, ok_json, status
from support.stage_jobs import outcomes, run_scripted, run_stages


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


def test_a_section_that_needs_what_nobody_can_have_written_yet_is_refused(tmp_path):
    sections = [
        {"name": "pro", "prompt": "pro id={{ id }} {{ board }}"},
        {"name": "con", "prompt": "con id={{ id }} {{ board.pro }}"},
    ]
    loop = {"kind": "loop", "name": "talk", "max_rounds": 1, "sections": sections}
    with FakeServer({"*": [echo()]}) as server:
        done = run_stages(tmp_path, server.url, 1, [loop])
        assert not server.requests
        assert done.code == 2
        assert "con: in the first round pro has not written yet" in done.err
        done = run_stages(tmp_path, server.url, 1, [{**loop, "parallel": False}])
    assert done.code == 0, done.err


def test_what_a_section_says_goes_before_a_field_of_the_same_name(tmp_path):
    schema = {"type": "object", "properties": {"over": {"type": "boolean"}}}
    section = {"name": "chair", "prompt": "id={{ id }}", "output": {"schema": schema}}
    loop = {"kind": "loop", "name": "talk", "max_rounds": 2, "until": "over", "sections": [section]}
    rows = [{"id": "r1", "over": True}]
    run_scripted(tmp_path, rows, [loop], {"*": [ok_json({"over": False})]}, dedupe=False)
    assert len(outcomes(tmp_path, "talk.chair")) == 2
