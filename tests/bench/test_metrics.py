"""Every definition against a case that is computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bagent.bench import metrics
from bagent.bench.load_generator import WorkerShare
from bagent.bench.plan import Slo
from bagent.bench.records import (
    BenchTables,
    ClientRow,
    LoadStageRow,
    RequestRow,
    RowFile,
    ServerRow,
)
from bagent.bench.routing import REFUSALS
from bagent.bench.runner import stage_row
from bagent.bench.schedule import LoadStage, arrival_times

Fill = Callable[..., BenchTables]


@pytest.fixture
def fill(tmp_path: Path) -> Fill:
    """Tables of one folder with these rows in it."""

    def make(
        requests: list[RequestRow],
        stages: list[LoadStageRow] | None = None,
        client: list[ClientRow] | None = None,
        servers: list[ServerRow] | None = None,
    ) -> BenchTables:
        files: dict[str, Sequence[msgspec.Struct]] = {
            "requests-0.jsonl": requests,
            "stages.jsonl": stages or [stage()],
            "client-0.jsonl": client or [],
            "servers.jsonl": servers or [],
        }
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, rows in files.items():
            file = RowFile(folder / name)
            for row in rows:
                file.write(row)
            file.close()
        return BenchTables(folder)

    return make


def stage(number: int = 0, **fields: Any) -> LoadStageRow:
    """A closed loop from 0 to 10 s."""
    known: dict[str, Any] = {"load": "c=1", "repeat": 0, "way": "chat", "routing": "balanced"}
    known |= {"began": 0, "feeding_ended": 10, "ended": 10, "window_from": 0, "window_to": 10}
    return LoadStageRow(stage=number, **{**known, "endpoints": 1, "concurrency": 1, **fields})


def request(number: int = 0, **fields: Any) -> RequestRow:
    """One that was to be sent at 1.0 s, was at 1.1 s, and gave 5 tokens from 1.3 to 1.7 s."""
    known: dict[str, Any] = {
        "stage": 0,
        "worker": 0,
        "endpoint": "a:1",
        "way": "chat",
        "scheduled": 1.0,
        "sent": 1.1,
        "first_byte": 1.2,
        "first_token": 1.3,
        "first_answer": 1.5,
        "last_token": 1.7,
        "done": 1.8,
        "status": "ok",
        "prompt_tokens": 30,
        "completion_tokens": 5,
    }
    return RequestRow(number=number, **{**known, **fields})


def one_load(tables: BenchTables, slo: Slo | None = None) -> dict[str, Any]:
    with tables:
        (load,) = metrics.load_numbers(tables, slo or Slo())
    return load


def test_times_of_one_request(fill: Fill) -> None:
    load = one_load(fill([request()], [stage(concurrency=None, rate=1.0)]))
    expected = {
        "ttft": 200,  # 1.3 - 1.1
        "ttfot": 400,  # 1.5 - 1.1
        "tpot": 100,  # (1.7 - 1.3) / 4
        "ntpot": 140,  # (1.8 - 1.1) / 5
        "e2e": 800,  # 1.8 - 1.0
        "e2e_sent": 700,  # 1.8 - 1.1
        "lag": 100,  # 1.1 - 1.0
    }
    for name, value in expected.items():
        assert load[f"{name}_p50_ms"] == pytest.approx(value), name
        assert load[f"{name}_mean_ms"] == pytest.approx(value), name
    assert load["input_tokens"] == 30 and load["output_tokens"] == 5


def test_tokens_that_came_all_at_once_have_no_tpot(fill: Fill) -> None:
    at_once = {"first_token": 1.6, "last_token": 1.6, "chunk_at": [500_000], "chunk_count": [5]}
    stepwise = request(1, chunk_at=[200_000, 600_000], chunk_count=[1, 4])
    more_pieces_than_tokens = request(2, chunk_at=[200_000, 600_000], chunk_count=[5, 5])
    load = one_load(fill([request(0, **at_once), stepwise, more_pieces_than_tokens]))
    assert (load["ok"], load["not_streamed"], load["usage_incomplete"]) == (3, 1, 1)
    assert load["lag_p50_ms"] is None  # a closed loop has none
    assert load["tpot_p50_ms"] == load["tpot_max_ms"] == pytest.approx(100)


def test_one_token_and_a_quick_error_do_not_count_as_zero(fill: Fill) -> None:
    one = request(0, completion_tokens=1, last_token=1.3)
    bad = request(1, status="failed", error_kind="overloaded", code=503, done=1.11)
    load = one_load(fill([one, bad, request(2)]))
    assert load["tpot_mean_ms"] == pytest.approx(100)
    assert load["e2e_p50_ms"] == pytest.approx(800) and load["failed"] == 1
    with fill([]) as nothing:
        (load,) = metrics.load_numbers(nothing, Slo())
        assert load["load"] == "c=1" and load["requests"] == load["ok"] == 0
        assert load["rps"] == 0 and load["ttft_p50_ms"] is None
        assert metrics.heatmap(nothing) == [] and metrics.client_states(nothing) == []


def test_percentiles_are_of_all_requests_and_never_of_percentiles(fill: Fill) -> None:
    rows = [request(i, endpoint="a:1", sent=0.0, first_token=0.1) for i in range(9)]
    rows.append(request(9, endpoint="b:1", sent=0.0, first_token=1.1))
    load = one_load(fill(rows))
    # Linear interpolation at rank 0.9 * 9 = 8.1 of 100 x 9, 1100; a mean of two would be 600.
    assert load["ttft_p90_ms"] == pytest.approx(100 + 0.1 * 1000)


@pytest.mark.parametrize(("count", "known"), [(99, False), (100, True)])
def test_a_p99_of_few_requests_is_hidden(fill: Fill, count: int, known: bool) -> None:
    load = one_load(fill([request(i) for i in range(count)]))
    assert (load["ttft_p99_ms"] is not None) == known
    assert load["ttft_p999_ms"] is None


def test_warmup_and_what_was_scheduled_outside_the_window_do_not_count(fill: Fill) -> None:
    rows = [
        request(0),
        request(1, scheduled=0.5, sent=0.5),
        request(2, warmup=True, stage=0),
        request(3, scheduled=9.5, sent=9.5, done=12),
    ]
    load = one_load(fill(rows, [stage(window_from=0.9, window_to=9.0)]))
    assert load["requests"] == 1


def test_throughput_is_of_what_ended_and_of_tokens_that_came_within_the_window(fill: Fill) -> None:
    # 10 tokens from 9 s to 11 s: half of them in a window that ends at 10 s.
    across = {"sent": 8.0, "scheduled": 8.0, "first_token": 9.0, "last_token": 11.0, "done": 11.0}
    load = one_load(fill([request(0), request(1, completion_tokens=10, **across)]))
    assert load["rps"] == pytest.approx(1 / 10)
    assert load["output_tok_s"] == pytest.approx((5 + 5) / 10)
    assert load["input_tok_s"] == pytest.approx((30 + 30) / 10)


def test_calls_in_one_request_are_counted(fill: Fill) -> None:
    load = one_load(fill([request(size=4, first_token=None, first_answer=None, last_token=None)]))
    assert load["calls_s"] == pytest.approx(0.4) and load["rps"] == pytest.approx(0.1)
    assert load["ttft_p50_ms"] is None and load["tpot_p50_ms"] is None
    assert load["output_tokens"] == 5 / 4


def test_timeouts_and_unfinished_requests_count_with_the_time_that_they_had(fill: Fill) -> None:
    nothing = {"first_token": None, "first_answer": None, "last_token": None, "sent": 1.0}
    rows = [
        request(0),
        request(1, status="failed", error_kind="timeout", done=6.0, **nothing),
        request(2, status="unfinished", done=9.0, **nothing),
    ]
    load = one_load(fill(rows))
    assert load["e2e_max_ms"] == pytest.approx(8000)
    assert load["e2e_p50_ms"] == pytest.approx(5000)
    assert load["ttft_max_ms"] == pytest.approx(8000)
    assert (
        load["censored"] == 2 and load["failed"] == 1 and load["ok_share"] == pytest.approx(1 / 3)
    )


def test_goodput_is_of_requests_that_keep_all_limits(fill: Fill) -> None:
    rows = [
        request(0),
        request(1, first_token=1.7, last_token=1.7),  # TTFT 600
        request(2, done=4.0),  # E2E 3000
        request(3, status="failed", error_kind="connect"),
    ]
    load = one_load(fill(rows), Slo(ttft=300, tpot=150, e2e=1000))
    assert load["good"] == 1
    assert load["goodput_rps"] == pytest.approx(0.1)
    assert load["goodput_tok_s"] == pytest.approx(0.5)
    assert load["good_share"] == pytest.approx(0.25)


def sent_at(shape: LoadStage) -> list[float]:
    """When requests of half a second are sent: at their times, or as their slots come free."""
    if shape.rate is not None:
        return [at for _, at in arrival_times(shape)]
    assert shape.requests is not None and shape.concurrency is not None
    return [0.5 * (number // shape.concurrency) for number in range(shape.requests)]


@pytest.mark.parametrize(
    ("shape", "rate"),
    [
        ({"concurrency": 4, "requests": 36}, 8),
        ({"concurrency": 4, "requests": 4}, 8),
        ({"rate": 4.0, "requests": 23}, 4),
        ({"rate": 4.0, "seconds": 10.0}, 4),
    ],
)
def test_rates_are_those_of_known_times_whatever_bounds_a_load(
    fill: Fill, shape: dict[str, Any], rate: float
) -> None:
    spec = LoadStage(number=0, load="known", arrival="constant", **shape)
    rows = []
    for number, at in enumerate(sent_at(spec)):
        first = at + (0.3 if number % 2 else 0.1)  # every other one is too late
        times = {"first_token": first, "last_token": at + 0.5, "done": at + 0.5}
        rows.append(request(number, scheduled=at, sent=at, completion_tokens=10, **times))
    fed = spec.seconds or math.nextafter(rows[-1].sent, math.inf)
    part = WorkerShare(0.0, fed, math.nextafter(rows[-1].done, math.inf), sent=len(rows))
    load = one_load(fill(rows, [stage_row(spec, [part], 1)]), Slo(ttft=200))
    assert load["rps"] == pytest.approx(rate, rel=0.01)
    # Of an odd number of requests in the window one half is the greater by one.
    assert load["goodput_rps"] == pytest.approx(rate / 2, abs=0.51 / load["seconds"])
    assert load["output_tok_s"] == pytest.approx(10 * rate, rel=0.03)
    assert load["goodput_tok_s"] == pytest.approx(5 * rate, abs=5.1 / load["seconds"])


def test_conversations_a_second_are_those_of_known_times(fill: Fill) -> None:
    # One after the other, each of two turns of 0.5 s with 0.5 s between them.
    rows = []
    for number in range(5):
        for turn, at in ((1, 1.5 * number), (2, 1.5 * number + 1.0)):
            times = {"scheduled": at, "sent": at, "done": at + 0.5}
            rows.append(request(number, turn=turn, **times))
    with fill(rows, [stage(window_to=math.nextafter(rows[-1].sent, math.inf))]) as tables:
        found = metrics.conversations(tables, 2)["c=1"]
    assert found["conversations"] == 5
    assert found["conversations_s"] == pytest.approx(1 / 1.5)
    assert found["conversation_p50_ms"] == pytest.approx(1500)


def test_itl_counts_tokens_that_come_together_as_gaps_of_zero(fill: Fill) -> None:
    # Reads after 100, 140 and 200 ms with 1, 2 and 3 tokens: gaps 40, 0 and 60, 0, 0.
    row = request(
        chunk_at=[100_000, 140_000, 200_000], chunk_count=[1, 1, 2], chunk_tokens=[1, 3, 6]
    )
    with fill([row]) as tables:
        gaps = metrics.gap_numbers(tables)["c=1"]
    assert gaps["itl_mean_ms"] == pytest.approx(100 / 5)
    assert gaps["itl_max_ms"] == pytest.approx(60)
    assert gaps["itl_p50_ms"] == 0
    assert "icl_p50_ms" not in gaps
    row.chunk_tokens = []  # how many tokens came in a piece is not known
    with fill([row]) as tables:
        gaps = metrics.gap_numbers(tables)["c=1"]
    assert gaps["icl_mean_ms"] == pytest.approx(100 / 3)
    assert "itl_p50_ms" not in gaps


def test_the_peak_is_the_best_second_over_all_endpoints(fill: Fill) -> None:
    # 4 tokens in the second from 1 on, 1 in the one from 2 on, at each of two endpoints.
    chunks = {"chunk_at": [0, 100_000, 200_000, 300_000, 1_100_000], "chunk_count": [1] * 5}
    with fill([request(i, endpoint=f"{i}:1", **chunks) for i in range(2)]) as tables:
        assert metrics.peak_tokens(tables) == {"c=1": pytest.approx(8)}


def test_an_endpoint_under_load_alone_is_measured_over_its_own_time(fill: Fill) -> None:
    rows = [request(0), request(1, stage=1, endpoint="b:1", scheduled=11, sent=11, done=12)]
    rows[1].first_token = rows[1].last_token = 11.5
    stages = [
        stage(0, only="a:1"),
        stage(1, only="b:1", began=10, window_from=10, window_to=20, feeding_ended=20, ended=20),
    ]
    with fill(rows, stages) as tables:
        first, second = metrics.load_numbers(tables, Slo(), "load, endpoint")
    assert first["seconds"] == second["seconds"] == 10
    assert first["output_tok_s"] == pytest.approx(0.5)


def test_repeats_are_one_load_over_all_their_time(fill: Fill) -> None:
    later = {"began": 20, "window_from": 20, "window_to": 30, "feeding_ended": 30, "ended": 30}
    moved = {
        name: getattr(request(), name) + 20
        for name in ("scheduled", "sent", "first_token", "last_token", "done")
    }
    rows = [request(0), request(1, stage=1, **moved)]
    with fill(rows, [stage(0), stage(1, repeat=1, **later)]) as tables:
        (load,) = metrics.load_numbers(tables, Slo())
        each = metrics.load_numbers(tables, Slo(), "load, repeat")
    assert load["requests"] == 2 and load["seconds"] == 20 and load["repeats"] == 2
    assert [one["repeat"] for one in each] == [0, 1]
    assert load["rps"] == pytest.approx(0.1) and each[1]["rps"] == pytest.approx(0.1)


def test_counters_are_told_as_deltas_and_a_restart_as_unknown(fill: Fill) -> None:
    def reading(at: float, endpoint: str, tokens: int, hits: int) -> ServerRow:
        return ServerRow(
            0, endpoint, at, 2, 1, 0.5, 0, hits, 100 * round(at), None, generation_tokens=tokens
        )

    servers = [
        reading(1, "a:1", 100, 10),
        reading(2, "a:1", 150, 60),
        reading(1, "b:1", 100, 0),
        reading(2, "b:1", 7, 0),
        # It was above where it began when the load ended, but not all the time.
        *(reading(at, "c:1", told, 0) for at, told in ((1, 100), (2, 150), (3, 10), (4, 160))),
    ]
    with fill([request()], servers=servers) as tables:
        first, second, third = metrics.server_numbers(tables)
    assert third["generation_tokens"] is None and third["cache_queries"] == 300
    assert first["generation_tokens"] == 50 and second["generation_tokens"] is None
    assert first["hit_rate"] == pytest.approx(0.5)
    assert (first["running_mean"], first["waiting_max"], first["kv_max"]) == (2, 1, 0.5)


def test_the_client_is_as_busy_as_its_busiest_worker(fill: Fill) -> None:
    client = [ClientRow(0, 0, 10, 1, [1000] * 99), ClientRow(0, 1, 10, 9, [50_000] * 101)]
    with fill([request()], client=client) as tables:
        (state,) = metrics.client_states(tables)
    assert state.cpu == pytest.approx(0.9)
    assert state.loop_lag_p99_ms == pytest.approx(50)
    assert state.lag_p99_ms is None


def test_failures_are_told_by_kind_and_place(fill: Fill) -> None:
    rows = [request(0), request(1, status="failed", error_kind="connect", error="refused")]
    rows.append(request(2, status="unfinished", done=9.0))
    with fill(rows) as tables:
        found = metrics.failures(tables)
    assert {(one["kind"], one["n"], one["example"]) for one in found} == {
        ("connect", 1, "refused"),
        ("unfinished", 1, "still going on when the load ended"),
    }


def test_how_much_paces_spread_is_told_by_endpoint(fill: Fill) -> None:
    rows = [request(number, done=1.1 + 5 * pace) for number, pace in enumerate((0.1, 0.1, 0.2))]
    silent = {"endpoint": "c:1", "completion_tokens": None, "first_token": None}
    rows += [request(4 + number, done=2.1 + number, **silent) for number in range(2)]
    rows.append(request(3, endpoint="b:1"))
    with fill(rows) as tables:
        found = metrics.pace_spreads(tables)
    assert found["c=1", "a:1"] == pytest.approx(math.log(2) / math.sqrt(3))
    assert found["c=1", "b:1"] is None
    assert found["c=1", "c:1"] == pytest.approx(math.log(2) / math.sqrt(2))


def test_an_endpoint_is_gone_when_its_last_requests_found_nobody(fill: Fill) -> None:
    lost = {"status": "failed", "error_kind": "connect", "error": "refused"}
    rows = [request(i) for i in range(5)]
    cut = {"status": "failed", "error_kind": "bad_response", "error": "broke off"}
    rows.append(request(9, sent=4.0, done=20.0, **cut))  # it ends last, but was sent before
    rows += [request(10 + i, sent=5.0 + i, done=5.1 + i, **lost) for i in range(REFUSALS)]
    rows += [request(20, endpoint="b:1", **lost), request(21, endpoint="b:1", sent=8.0, done=9.0)]
    with fill(rows) as tables:
        assert metrics.dead_endpoints(tables) == {"a:1": "refused"}


def test_the_heat_strip_holds_each_request_in_all_slices_that_it_went_on_in(fill: Fill) -> None:
    with fill([request(sent=0.0, done=5.0)]) as tables:
        found = metrics.heatmap(tables)
    assert [one["bin"] for one in found] == list(range(31))
    assert {round(one["pace_ms"], 6) for one in found} == {1000}
    assert sum(one["ok"] for one in found) == 1
