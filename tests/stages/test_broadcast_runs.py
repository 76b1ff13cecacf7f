"""Every row to every endpoint, and the answers brought together."""

from __future__ import annotations

from support.cli import run_bagent
from support.fake_server import FakeServer
from support.replies import echo, ok
from support.stage_jobs import RUN, outcomes, write_stages

ALL = {"kind": "broadcast", "name": "all", "prompt": "id={{ id }} {{ text }}"}
SUM = {"kind": "reduce", "name": "sum", "by": "id", "prompt": "sum {{ n }}: {{ responses }}"}


def test_each_endpoint_answers_each_row_and_a_dead_one_is_a_failed_answer(tmp_path):
    with FakeServer({"*": [echo()]}) as one, FakeServer({"*": [ok("two")]}) as two:
        with FakeServer() as dead:
            gone = dead.address
        (tmp_path / "hosts.txt").write_text(f"{one.address}\n{two.address}\n{gone}\n")
        write_stages(
            tmp_path,
            one.url,
            3,
            [ALL, SUM],
            backend=None,
            hostfile="hosts.txt",
            model="fake-model",
            limits={"retries": 0},
        )
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
