"""Vectors of rows and of answers, asked for in batches."""

from __future__ import annotations

import pytest
from pyarrow import parquet

from support.cli import run_bagent
from support.fake_server import FakeServer
from support.jobs import sql
from support.replies import echo, status
from support.stage_jobs import RUN, outcomes, run_scripted, run_stages

pytestmark = pytest.mark.tables

EMBED = {"kind": "embed", "name": "vector", "prompt": "{{ text }}"}


def batches(server):
    return [seen.body["input"] for seen in server.requests if seen.path.endswith("/embeddings")]


def test_rows_are_embedded_in_batches_and_come_as_floats(tmp_path):
    rows = [{"id": f"r{n}", "text": f"text {n}"} for n in range(150)]
    server = run_scripted(tmp_path, rows, [EMBED], results={"duckdb": False})
    sent = batches(server)
    assert sorted(text for batch in sent for text in batch) == sorted(r["text"] for r in rows)
    assert len(sent) < 15
    found = sql(f"select id, value from read_parquet('{tmp_path}/runs/job/answers.parquet')")
    assert len(found) == 150
    assert all(len(row["value"]) == 8 and isinstance(row["value"][0], float) for row in found)
    table = parquet.read_table(tmp_path / "runs/job/answers.parquet", columns=["value"])
    column = table["value"].combine_chunks()
    matrix = column.values.to_numpy(zero_copy_only=True).reshape(len(column), -1)
    assert (matrix.shape, matrix.dtype) == ((150, 8), "float32")


POISONED = {
    "text number 5": lambda body, place: {"error": {"message": "value: NaN", "code": 500}},
    "text number 23": lambda body, place: body["data"][place].update(embedding=[None] * 8),
    "text number 32": lambda body, place: body["data"][place].update(embedding=[]),
    "text number 41": lambda body, place: body["data"][place].update(embedding=[0.5]),
    "text number 50": lambda body, place: body["data"].pop(),
}


def test_a_text_that_spoils_the_answer_for_all_fails_alone(tmp_path):
    def edit(body, seen):
        texts = seen.body["input"]
        poison = next((text for text in texts if text in POISONED), None)
        return body if poison is None else POISONED[poison](body, texts.index(poison)) or body

    with FakeServer({"*": [echo()]}, allow_faults=True) as server:
        server.server.edit = edit
        server.server.check = lambda seen: (
            "too long" if "text number 9" in seen.body.get("input", []) else None
        )
        done = run_stages(tmp_path, server.url, 54, [EMBED], limits={"retries": 0})
    assert done.code == 1, done.err
    failed = {
        line["id"]: line["error"] for line in outcomes(tmp_path, "vector") if line["status"] != "ok"
    }
    assert set(failed) == {"r5", "r9", "r23", "r32", "r41", "r50"}
    assert "too long" in failed["r9"]


def test_a_failed_answer_has_no_vector_and_is_not_embedded_as_an_empty_text(tmp_path):
    ask = {"kind": "map", "name": "say", "prompt": "id={{ id }} {{ text }}"}
    stages = [ask, {"kind": "embed", "name": "vector"}]
    script = {"r2": [status(400)], "*": [echo()]}
    server = run_scripted(tmp_path, 3, stages, script=script, code=1)
    sent = [text for batch in batches(server) for text in batch]
    assert sorted(sent) == ["id=r1 text number 1", "id=r3 text number 3"]
    [failed] = [line for line in outcomes(tmp_path, "vector") if line["status"] != "ok"]
    assert (failed["id"], failed["error_kind"]) == ("r2", "bad_input")
    assert failed["error"].startswith("there is no answer to embed: say:r2:0: ")


def test_finished_vectors_are_not_asked_for_again(tmp_path):
    with FakeServer({"*": [echo()]}, allow_faults=True) as server:
        run_stages(tmp_path, server.url, 9, [EMBED])
        before = len(server.requests)
        assert run_bagent(RUN, tmp_path).code == 0
        assert len(server.requests) == before
