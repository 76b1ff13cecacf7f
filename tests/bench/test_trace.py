"""A recorded load is read from what there is, and sent again at its times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bagent.bench.plan import expected_seconds, make_plan, plan_stages
from bagent.bench.schedule import LoadStage, Recorded, TraceInfo, read_trace, replay_times
from bagent.errors import UsageError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:04.5319600,396,109
2023-11-16 18:17:03.9319600,374,44
,12,3
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 6755, "output_length": 500, "hash_ids": [46]}
{"timestamp": 30482, "input_length": 7322, "output_length": 490, "hash_ids": [46]}
"""
RESULTS = """{"started_at": 1000.5, "prompt_tokens": 30, "completion_tokens": 4, "status": "ok"}
{"started_at": 1002.0, "prompt_tokens": null, "completion_tokens": null, "status": "failed"}
{"started_at": 1001.0, "prompt_tokens": 31, "completion_tokens": 5, "status": "ok"}
"""


@pytest.mark.parametrize(
    ("name", "text", "expected", "left_out"),
    [
        ("azure.csv", AZURE, [(0, 374, 44), (0.6, 396, 109)], 1),
        ("mooncake.jsonl", MOONCAKE, [(0, 6755, 500), (3.0, 7322, 490)], 0),
        ("results.jsonl", RESULTS, [(0, 30, 4), (0.5, 31, 5)], 1),
        ("own.json", '[{"time": 7, "input_tokens": 9, "output_tokens": 2}]', [(0, 9, 2)], 0),
    ],
)
def test_traces_of_others_are_understood(
    tmp_path: Path, name: str, text: str, expected: list[tuple[float, int, int]], left_out: int
) -> None:
    file = tmp_path / name
    file.write_text(text)
    found, info = read_trace(file)
    sizes = [(one.input_tokens, one.output_tokens) for one in found]
    assert sizes == [(asked, answered) for _, asked, answered in expected]
    assert [one.at for one in found] == pytest.approx([at for at, *_ in expected], abs=1e-4)
    assert (info.requests, info.left_out) == (len(expected), left_out)
    assert info.seconds == pytest.approx(expected[-1][0], abs=1e-4)


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_is_replayed_from_its_attempts_even_with_a_torn_line(tmp_path: Path) -> None:
    run = tmp_path / "run"
    good = {"stage": "main", "prompt_tokens": 20, "completion_tokens": 3}
    journal = run / "journal"
    lines(journal / "attempts-all-000001.jsonl", [{**good, "sent": 50.0}, {"sent": 50.5}])
    with (journal / "attempts-all-000001.jsonl").open("a") as file:
        file.write('{"sent": 51.0, "prompt_')
    lines(journal / "attempts-all-000002.jsonl", [{**good, "sent": 52.0}])
    (run / "run.json").write_text("{}")
    found, info = read_trace(run)
    assert found == [Recorded(0.0, 20, 3), Recorded(2.0, 20, 3)]
    assert info.left_out >= 1


def test_an_earlier_load_test_is_replayed_without_its_warm_up(tmp_path: Path) -> None:
    row = {"stage": 0, "prompt_tokens": 20, "completion_tokens": 3}
    lines(
        tmp_path / "requests-0.jsonl",
        [{**row, "scheduled": 1.0, "warmup": True}, {**row, "scheduled": 3.0}],
    )
    lines(tmp_path / "requests-1.jsonl", [{**row, "scheduled": 2.5}])
    found, _ = read_trace(tmp_path)
    assert [one.at for one in found] == [0.0, 0.5]


ODD_LINES = """{"timestamp": 1, "input_tokens": 50, "output_tokens": 3}
no JSON
[1, 2]

{"timestamp": "nan", "input_tokens": 5, "output_tokens": 5}
{"timestamp": 2, "input_tokens": -5, "output_tokens": 5}
{"TimeStamp": "1.5", "input_tokens": 60.0, "output_tokens": "4"}
{"timestamp": 3, "input_tok"""
ODD_TABLE = "timestamp,input_tokens,output_tokens\n1,50,3\n1.2,50\ninf,50,3\n1.5,60,4,more\n"


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", ODD_LINES), ("a.csv", ODD_TABLE)])
def test_lines_that_are_no_request_are_left_out_and_spoil_no_other(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    found, info = read_trace(tmp_path / name)
    assert found == [Recorded(0.0, 50, 3), Recorded(0.5, 60, 4)]
    assert info.requests == 2 and info.left_out > 0


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", "", "no row has a time, input tokens and output tokens"),
        ("a.txt", "x", "unknown kind of file"),
        ("a.csv", "a,b\n1,2\n", "no row has a time, input tokens and output tokens"),
        ("a.parquet", "no parquet", "cannot be read"),
        (None, "", "no such run"),
    ],
)
def test_what_is_no_trace_is_one_error(
    tmp_path: Path, name: str | None, text: str, words: str
) -> None:
    source = tmp_path / (name or "none")
    if name is not None:
        source.write_text(text)
    with pytest.raises(UsageError, match=words):
        read_trace(source)


TRACE = [Recorded(0.0, 10, 1), Recorded(1.0, 20, 2), Recorded(4.0, 30, 3)]
INFO = TraceInfo("t", 3, 4.0, 20.0, 2.0)


def test_times_are_as_recorded_or_faster_and_workers_share_them() -> None:
    spec = LoadStage(number=0, load="replay", rate=0.75, speed=2.0)
    assert list(replay_times(spec, TRACE)) == [(0, 0.0), (1, 0.5), (2, 2.0)]
    assert list(replay_times(spec, TRACE, 1, 2)) == [(1, 0.5)]
    short = LoadStage(number=0, load="replay", rate=0.75, speed=2.0, seconds=1.0)
    assert len(list(replay_times(short, TRACE))) == 2
    few = LoadStage(number=0, load="replay", rate=0.75, speed=1.0, requests=1)
    assert len(list(replay_times(few, TRACE))) == 1


def test_a_replay_replaces_other_loads_and_lasts_as_long_as_its_recording() -> None:
    plan = make_plan("quick", {"trace": INFO, "speeds": (1.0, 2.0)})
    assert [one.load for one in plan_stages(plan, ["a"])] == ["replay", "replay x2"]
    assert [one.rate for one in plan_stages(plan, ["a"])] == [0.75, 1.5]
    assert (plan.seconds, plan.input_tokens, plan.output_tokens) == (None, 20, 2)
    assert expected_seconds(plan, 1) == 4.0 + 2.0
    cut = make_plan(None, {"trace": INFO, "speeds": (1.0,), "seconds": 3.0})
    assert expected_seconds(cut, 1) == 3.0
