"""Reductions as a user runs them: groups, levels, failures, and going on."""

from __future__ import annotations

import json
import re

import pytest

from support.cli import run_bagent
from support.fake_server import FakeServer
from support.jobs import write_job
from support.replies import echo, ok, status
from support.stage_jobs import RUN, outcomes, run_scripted, run_stages, texts

LEAF = {"kind": "map", "name": "leaf", "prompt": "leaf id={{ id }} {{ text }}"}
REDUCE = {
    "kind": "reduce",
    "name": "sum",
    "prompt": "sum level {{ level }} of {{ n }}:\n{{ responses }}",
}


@pytest.mark.parametrize(("on_failure", "visible"), [("include", True), ("drop", False)])
def test_a_failed_leaf_is_counted_and_visible_to_the_reducer_unless_dropped(
    tmp_path, on_failure, visible
):
    script = {"r5": [status(400)], "*": [echo()]}
    reduce = {**REDUCE, "on_failure": on_failure}
    code = 0 if visible else 1
    server = run_scripted(tmp_path, 8, [LEAF, reduce], script=script, code=code)
    prompt = server.requests[-1].prompts[0]
    lines = [json.loads(line) for line in prompt.splitlines()[1:]]
    assert [line["id"] for line in lines if line["status"] == "failed"] == ["r5"] * visible
    assert len(lines) == 7 + visible
    assert lines[0] == {"id": "r1", "status": "ok", "text": "leaf id=r1 text number 1"}
    [final] = outcomes(tmp_path, "sum")
    assert final["parents_failed"] == 1
    assert ("leaf:r5:0" in final["parents"]) is visible


@pytest.mark.parametrize("on_failure", ["include", "drop"])
def test_a_reducer_is_never_asked_about_nothing(tmp_path, on_failure):
    script = {"*": [status(400)]}
    with FakeServer(script, allow_faults=True) as server:
        done = run_stages(tmp_path, server.url, 4, [LEAF, {**REDUCE, "on_failure": on_failure}])
        assert len(server.requests) == 4
    assert done.code == 1
    [final] = outcomes(tmp_path, "sum")
    assert final["status"] == "failed"
    assert "4 rows" in final["error"]


def test_a_failed_leaf_stops_the_run_where_the_stage_says_so(tmp_path):
    script = {"r2": [status(400)], "*": [echo()]}
    with FakeServer(script, allow_faults=True) as server:
        done = run_stages(tmp_path, server.url, 4, [LEAF, {**REDUCE, "on_failure": "stop"}])
    assert done.code == 76
    assert "stage sum stops at a row that failed before it: leaf:r2:0" in done.err


def test_groups_are_the_same_whatever_ends_first(tmp_path):
    def groups(folder, script):
        folder.mkdir()
        with FakeServer(script) as server:
            run_stages(folder, server.url, 20, [LEAF, {**REDUCE, "fanin": 4}])
        return sorted((node["key"], tuple(node["parents"])) for node in outcomes(folder, "sum"))

    slow = {f"r{n}": [echo(delay=0.3)] for n in (1, 6, 11)}
    assert groups(tmp_path / "a", {"*": [echo()]}) == groups(
        tmp_path / "b", {**slow, "*": [echo()]}
    )


def test_an_answer_longer_than_its_share_is_cut_and_says_so(tmp_path):
    script = {"r1": [ok("x" * 9000)], "*": [ok("short")]}
    options = {"max_model_len": 2000, "flavour": "vllm"}
    stages, single = [LEAF, REDUCE], {"mode": "single"}
    server = run_scripted(tmp_path, 3, stages, script, options=options, batching=single)
    prompt = next(p for s in server.requests for p in s.prompts if p.startswith("sum"))
    assert re.search(r"\[cut: \d+ of 9000 characters left out\]", prompt)


def test_a_reduction_may_end_with_several_rows(tmp_path):
    after = {"kind": "map", "name": "after", "prompt": "after {{ sum }}"}
    stages = [LEAF, {**REDUCE, "fanin": 2, "until": "2"}, after]
    run_scripted(tmp_path, 7, stages, script={"*": [ok("short")]})
    assert sorted(texts(tmp_path, "sum")) == [
        "sum:1.0", "sum:1.1", "sum:1.2", "sum:2.0", "sum:2.1",
    ]  # fmt: skip
    parents = [line["parents"] for line in outcomes(tmp_path, "after")]
    assert sorted(parents) == [["sum:sum:2.0:0"], ["sum:sum:2.1:0"]]


def test_a_failed_reducer_keeps_the_rows_and_only_it_is_asked_again(tmp_path):
    with FakeServer({"*": [echo()]}, allow_faults=True) as server:
        server.server.check = lambda seen: "no" if seen.prompts[0].startswith("sum") else None
        assert run_stages(tmp_path, server.url, 5, [LEAF, REDUCE]).code == 1
        server.server.check = None
        before = len(server.requests)
        again = run_bagent([*RUN, "--retry", "rejected"], tmp_path)
        assert again.code == 0, again.err
        asked = [seen.prompts[0] for seen in server.requests[before:]]
    assert len(asked) == 1
    assert asked[0].startswith("sum level 1 of 5")


def test_rows_that_a_stage_brings_together_are_not_divided(fs, tmp_path):
    topology = {"name": "map_reduce", "reduce": {"prompt": {"user": "{{ responses }}"}}}
    write_job(tmp_path, fs.url, 6, topology=topology)
    for option in (["--shard", "1/2"], ["--workers", "2"]):
        done = run_bagent(["run", "job.yaml", *option], tmp_path)
        assert done.code == 2, done.err
        assert "brings all rows together" in done.err
    assert fs.requests == []


CONTEXT = 2000
DNA = [{"id": f"r{n}", "text": "ACGT" * 90 + str(n)} for n in range(24)]
"""Texts whose tokens a count by bytes of prose misses: here every byte is a token."""


def too_long(seen) -> str | None:
    """The words of a server that refuses prompts beyond ``CONTEXT`` tokens of one byte."""
    tokens = len(seen.prompts[0])
    if tokens <= CONTEXT:
        return None
    return (
        f"This model's maximum context length is {CONTEXT} tokens. However, your messages"
        f" resulted in {tokens} tokens."
    )


def reduce_dna(folder, rows=DNA, **options):
    """Reduce ``rows`` at a server with a short context; returns the requests that it received."""
    reduce = {**REDUCE, "from": ["input"]}
    write = {"stages": [reduce], "batching": {"mode": "single"}, "sampling": {"max_tokens": 64}}
    with FakeServer({"*": [ok("short")]}, allow_faults=True, **options) as server:
        server.server.check = too_long
        url = server.url if "flavour" not in options else f"vllm://{server.address}"
        done = run_stages(folder, url, rows, **write)
        assert done.code == 0, done.err
        requests = list(server.requests)
        again = run_bagent(RUN, folder)
        assert again.code == 0, again.err
        assert len(server.requests) == len(requests), "a run that is done sends nothing"
    return requests


def check_tree(nodes, leaves) -> None:
    """Check that every node came out ok, and that all rows and all nodes but one were used."""
    assert {node["status"] for node in nodes} == {"ok"}
    parents = [ref for node in nodes for ref in node["parents"]]
    names = [f"input:{row['id']}:0" for row in leaves] + [f"sum:{n['id']}:0" for n in nodes]
    assert sorted([*parents, f"sum:{nodes[-1]['id']}:0"]) == sorted(names)


def test_groups_of_dense_text_are_divided_by_counted_tokens_and_never_sent_too_long(tmp_path):
    requests = reduce_dna(tmp_path, flavour="vllm", max_model_len=CONTEXT)
    assert all(len(seen.prompts[0]) + 64 <= CONTEXT for seen in requests)
    check_tree(outcomes(tmp_path, "sum"), DNA)


def test_a_group_that_a_hosted_model_refuses_as_too_long_is_divided(tmp_path):
    requests = reduce_dna(tmp_path)
    assert any(too_long(seen) for seen in requests)
    check_tree(outcomes(tmp_path, "sum"), DNA)


def test_two_rows_that_are_too_long_together_are_shortened(tmp_path):
    rows = [{"id": f"r{n}", "text": "ACGT" * 400 + str(n)} for n in range(2)]
    requests = reduce_dna(tmp_path, rows)
    check_tree(outcomes(tmp_path, "sum"), rows)
    assert "characters left out]" in requests[-1].prompts[0]
