"""Whole load tests against simulated engines of known speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pytest

from bagent.errors import UsageError
from support.fake_server import FakeServer
from support.replies import ok, slow
from support.simulated_fleets import Measure, addresses, simulated

pytestmark = pytest.mark.slow  # each test is a whole load


def verdicts(summary: dict[str, Any]) -> dict[str, str]:
    return {one["endpoint"]: one["verdict"] for one in summary["endpoints"]}


KNOWN = {
    "ttft_p50_ms": 1000,  # 100 tokens at 100/s
    "ttfot_p50_ms": 1000,
    "tpot_p50_ms": 50,  # 20 tokens/s
    "itl_p50_ms": 50,
    "e2e_p50_ms": 1500,
    "e2e_sent_p50_ms": 1500,
    "ntpot_p50_ms": 1500 / 11,
    "pace_p50_ms": 1500 / 11,
    "rps": 1 / 1.5,  # one after the other
    "calls_s": 1 / 1.5,
    "goodput_rps": 1 / 1.5,
    "output_tok_s": 11 / 1.5,
    "goodput_tok_s": 11 / 1.5,
    "input_tok_s": 100 / 1.5,
    "total_tok_s": 111 / 1.5,
    "input_tokens": 100,
    "good_share": 1.0,
    "in_flight_mean": 1.0,
}
"""The numbers of an engine of known speed."""


def test_every_metric_is_within_a_twentieth_on_a_machine_that_is_not_held_up(
    measure: Measure,
) -> None:
    for _ in range(5):  # a machine that is held up is late by chance, a wrong metric always
        # So slow that a machine's own milliseconds are few in a hundred.
        with simulated("prefill=100&decode=20&prefix_cache=false") as sim:
            lines, tokens = addresses(sim), {"input_tokens": 100, "output_tokens": 11}
            summary = measure(lines, concurrency=[1], requests=4, seconds=None, **tokens)
        (load,) = summary["loads"]
        expected = {name: pytest.approx(value, rel=0.05) for name, value in KNOWN.items()}
        wrong = {name: load[name] for name, value in expected.items() if load[name] != value}
        if not wrong:
            break
    assert not wrong
    assert summary["simulated"]
    assert load["output_tokens"] == 11
    assert load["ok_share"] == 1 and load["estimated"] == 0
    assert "icl_p50_ms" not in load


def test_a_stall_of_two_seconds_shows_in_the_scheduled_e2e_p99(measure: Measure) -> None:
    # What comes 40 times a second while a server stands still for 2 s waits for what is left.
    stall = [slow(2.0 - place / 40, ok()) for place in range(80)]
    replies = [*[ok()] * 25, *stall, ok()]
    with FakeServer({"*": replies}, flavour="vllm", allow_faults=True) as fs:
        summary = measure(
            [fs.address], rates=[40.0], arrival="constant", seconds=3.5, warmup=0, output_tokens=1
        )
    (load,) = summary["loads"]
    assert load["requests"] > 100 and load["ok_share"] == 1
    assert load["e2e_p99_ms"] > 1800
    assert load["e2e_p50_ms"] > 100


def test_an_endpoint_that_dies_on_the_way_is_dead_and_one_that_fails_is_failing(
    measure: Measure,
) -> None:
    with (
        simulated("replicas=2&decode=400") as good,
        simulated("decode=400&dead_after=12") as dying,
        simulated("decode=400&malformed_rate=80%&seed=1") as failing,
    ):
        lines = [*addresses(good), *addresses(dying), *addresses(failing)]
        summary = measure(lines, concurrency=[4], requests=120, seconds=None)
    assert list(verdicts(summary).values()) == ["ok", "ok", "dead", "failing"]
    kinds = {(one["endpoint"], one["kind"]) for one in summary["failures"]}
    assert (lines[2], "connect") in kinds and (lines[3], "bad_response") in kinds
    # A dead endpoint is not asked again and again.
    assert sum(one["n"] for one in summary["failures"] if one["endpoint"] == lines[2]) < 12


def test_calls_in_lists_and_batches_are_counted_as_calls(measure: Measure) -> None:
    with simulated("decode=400") as sim:
        summary = measure(
            addresses(sim),
            concurrency=[8],
            requests=12,
            seconds=None,
            list_size=4,
            ways=["chat", "completions", "list", "chat-batch"],
        )
    loads = {one["load"]: one for one in summary["loads"]}
    assert list(loads) == ["c=8 chat", "c=8 completions", "c=8 list", "c=8 chat-batch"]
    for name, load in loads.items():
        assert load["ok_share"] == 1, name
        assert load["output_tokens"] == 8 and load["input_tokens"] > 30
        assert load["requests"] == 12 and load["rps"] > 0
        many = name.endswith(("list", "batch"))
        assert load["calls_s"] == pytest.approx(load["rps"] * (4 if many else 1))
        assert (load["ttft_p50_ms"] is None) == many


@pytest.mark.slow
def test_a_sweep_finds_the_saturation_by_itself(measure: Measure) -> None:
    # Slow enough that the client's and the engine's own work weighs little; a machine that is
    # held up sees less, never more.
    with simulated("decode=20&max_num_seqs=4&max_num_batched_tokens=8192") as sim:
        summary = measure(addresses(sim), sweep=True, seconds=2.0, output_tokens=5, drain=2.0)
    # Four at a time, each 5 tokens at 1.03/20 s: about 15.5 calls a second.
    assert 8 < summary["saturation"]["best_rate"] < 18
    assert summary["saturation"]["concurrency"] in (4, 8)
    names = [one["load"] for one in summary["loads"]]
    assert names[:3] == ["c=1", "c=2", "c=4"] and names[-1].startswith("rate=")


def rows_of(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The raw rows of all workers, without those that warmed up."""
    paths = sorted(summary["folder"].glob("requests-*.jsonl"))
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [row for row in rows if not row.get("warmup")]


def test_more_than_can_be_sent_does_not_hold_up_what_comes_back(measure: Measure) -> None:
    with simulated("decode=4000&prefill=1000000") as sim:
        tiny = {"input_tokens": 30, "output_tokens": 1}
        whole = measure(addresses(sim), rates=[1e6], requests=600, seconds=None, **tiny)
        ended = measure(addresses(sim), rates=[1e6], seconds=0.05, **tiny)
    rows = rows_of(whole)
    assert len(rows) == 600
    assert min(row["done"] for row in rows) < max(row["sent"] for row in rows)
    # What could not be sent by a second after the end is not sent, and all of it is too late.
    assert 0 < len(rows_of(ended)) < 50_000
    assert "ms late" in " ".join(ended["client_limited"]["rate=1e+06"])


def test_a_load_that_fits_no_context_is_refused_and_one_that_fits_some_is_sent(
    measure: Measure,
) -> None:
    with simulated("max_model_len=100") as short, simulated("max_model_len=500") as long:
        with pytest.raises(UsageError, match="of 208 tokens do not fit 100 tokens of context"):
            measure(addresses(short), concurrency=[1], requests=2, input_tokens=200)
        told: list[str] = []
        lines = [*addresses(short), *addresses(long)]
        summary = measure(
            lines, concurrency=[1], requests=4, seconds=None, input_tokens=200, tell=told.append
        )
    assert any("do not fit the context of 1 endpoint: all requests fail" in words for words in told)
    assert list(verdicts(summary).values()) == ["dead", "ok"]


def test_processes_share_one_schedule(measure: Measure) -> None:
    with simulated("replicas=2&decode=2000") as sim:
        summary = measure(addresses(sim), rates=[40.0], arrival="constant", seconds=1.0, workers=2)
    sent = sorted((row["number"], row["worker"]) for row in rows_of(summary))
    assert sent == [(number, number % 2) for number in range(40)]
    assert {one["endpoint"]: one["requests"] for one in summary["endpoints"]} == dict.fromkeys(
        addresses(sim), 20
    )


def test_every_table_is_there_for_other_programs(measure: Measure) -> None:
    with simulated("decode=2000") as sim:
        summary = measure(addresses(sim), concurrency=[1], requests=4, seconds=None)
    folder: Path = summary["folder"]
    count = duckdb.connect().execute(
        f"select count(*) from '{folder}/requests.parquet' where not warmup"
    )
    assert count.fetchall() == [(4,)]
    with duckdb.connect(str(folder / "bench.duckdb"), read_only=True) as connection:
        assert connection.execute("select count(*) from timed").fetchall() == [(4,)]
    assert json.loads((folder / "summary.json").read_bytes())["schema_version"] == 1
    assert (folder / "endpoints.csv").read_text().startswith("endpoint,verdict,")
    assert (folder / "loads.csv").read_text().splitlines()[1].startswith("c=1,")
