from __future__ import annotations

import json
import random
from functools import partial
from itertools import chain

import msgspec
import pytest

from bagent.store import totals
from bagent.store.journal.codec import unit_of
from bagent.store.journal.reader import BLOCK_LINES, JournalReader, OutcomeLookup
from bagent.store.journal.supersession import superseded_lines
from bagent.store.results import (
    AnswerStore,
    ResultQuery,
    encode_result,
    iter_results,
    summary,
)
from bagent.store.tables.row_feed import InputRows
from bagent.store.totals import cache_share
from bagent.types import EndpointSample, Row


def ids(store, expected: ResultQuery | None = None) -> list[str]:
    return [r["id"] for r in iter_results(store.path, expected, report=store.reports.append)]


def test_results_of_earlier_starts_are_those_that_no_later_one_replaced(store, outcome, failure):
    store.write(outcome(0), failure(1, "timeout"), failure(2, "schema"))
    done = store.finished()
    first = {(index.segment.part, index.segment.number): len(index) for index in done.indexes}
    store.write(outcome(1), outcome(3))
    assert ids(store, ResultQuery(first=first)) == ["r0", "r2"]
    assert ids(store, ResultQuery(first=first, ordered=True)) == ["r0", "r2"]


def test_the_input_is_found_also_out_of_order(store, outcome):
    store.write(outcome(2), outcome(0), outcome(1))
    rows = [Row(n, int(outcome(n).key, 16), f"r{n}", {"t": n}, "in", n + 1) for n in range(3)]
    find = partial(InputRows, lambda: iter([rows]))
    results = iter_results(store.path, report=store.reports.append, find_input=find)
    assert [json.loads(encode_result(r))["input"]["t"] for r in results] == [2, 0, 1]


def test_a_line_that_breaks_while_results_are_read_is_left_out_alone(store, outcome):
    store.write(*map(outcome, range(3)))
    results = iter_results(store.path, report=store.reports.append)
    assert next(results)["id"] == "r0"
    path = store.segment()
    path.write_bytes(path.read_bytes().replace(b'"row":1', b'"row" 1'))
    assert [result["id"] for result in results] == ["r2"]
    assert any("broken line at byte" in message for message in store.reports)


def test_keys_of_a_stage_are_found_in_whichever_segment_it_began(store, outcome):
    store.write(outcome(0, stage="draft"), part="1-of-2")
    store.write(outcome(1, stage="judge"), part="2-of-2")
    done = store.finished()
    lookup = OutcomeLookup(store.path, done, store.reports.append)
    assert list(lookup.keys_of("judge")) == [int(outcome(1).key, 16)]
    lookup.close()


def test_answers_are_found_by_unit_and_by_request(store, outcome, failure):
    store.write(
        failure(0, request_hash="00000000000000aa"),
        outcome(1, request_hash="00000000000000bb", text="first"),
        part="1-of-2",
    )
    store.write(outcome(2, request_hash="00000000000000bb", text="second"), part="2-of-2")
    requests = AnswerStore(store.path, store.reports.append, by_request=True)
    assert requests.find(0xAA) is None
    assert requests.find(0xBB).text == "first"
    requests.close()
    units = AnswerStore(store.path, store.reports.append, by_request=False)
    assert units.find(unit_of(int(outcome(2).key, 16), "main", 0)).text == "second"
    assert len(units) == 2
    units.close()


def test_sums_count_every_line_and_say_how_many_had_none(store, outcome, failure):
    store.write(
        failure(0, prompt_tokens=5, completion_tokens=0),
        outcome(0, prompt_tokens=5, completion_tokens=3, cached_tokens=4, cost_usd=0.25),
        outcome(1, cost_usd=0.5),
        segment_bytes=300,
    )
    messages = summary(store.path, store.reports.append)
    assert (messages.prompt_tokens, messages.completion_tokens) == (10, 3)
    assert (messages.cached_tokens, messages.cost_usd) == (4, 0.75)
    assert (messages.without_tokens, messages.finished) == (1, 2)


def lines_of(lines: JournalReader) -> tuple[list[tuple[int, int]], list[bytes]]:
    """Rows with codes, and texts, of all blocks."""
    blocks = list(lines.blocks())
    assert all(len(b.rows) == len(b.codes) == len(b.texts) <= BLOCK_LINES for b in blocks)
    messages = [(row, code) for b in blocks for row, code in zip(b.rows, b.codes, strict=True)]
    return messages, list(chain.from_iterable(b.texts for b in blocks))


def shuffled(count: int, width: int, seed: int) -> list[int]:
    """Rows out of order by some ``width`` places."""
    dice = random.Random(seed)
    return sorted(range(count), key=lambda n: n + dice.random() * width)


@pytest.mark.parametrize("width", [0, 300, 5000])
def test_blocks_hold_the_lines_of_all_parts_and_stages_in_order(store, outcome, failure, width):
    """Segments overlap not at all, a little or wholly."""
    for part in range(2):
        rows = [n for n in shuffled(900, width, 1) if n % 2 == part]
        created = [failure(n) for n in rows if n % 5 == 0]
        created += [outcome(n) for n in rows]
        created += [outcome(n, answer=1) for n in rows if n % 50 < 2]
        created += [outcome(n, stage="two") for n in rows if n % 3 == 0]
        store.write(*created, part=f"{part + 1}-of-2", segment_bytes=40_000)
    with JournalReader(store.path, store.reports.append) as lines:
        places = list(lines.ordered())
        messages, texts = lines_of(lines)
        assert messages == [(location.row, location.code) for location in places]
        assert texts == [lines.read(location) + b"\n" for location in places]
    assert len(places) == 900 + 36 + 300


@pytest.mark.parametrize("most", [0, 40, 10_000])
def test_what_does_not_count_is_the_same_however_much_is_looked_at_once(
    store, outcome, failure, most
):
    dice = random.Random(3)
    created = [
        dice.choice([failure, outcome])(dice.randrange(300), answer=dice.randrange(2))
        for _ in range(900)
    ]
    store.write(*created, segment_bytes=20_000)
    current = {}
    for number, item in enumerate(created):
        unit = (item.row, item.answer)
        if unit not in current or created[current[unit]].status != "ok":
            current[unit] = number
    with JournalReader(store.path, store.reports.append) as lines:
        firsts = [0]
        for index in lines.indexes:
            firsts.append(firsts[-1] + len(index))
        result = {firsts[n >> 32] + (n & 0xFFFFFFFF) for n in superseded_lines(lines.indexes, most)}
    assert result == set(range(900)) - set(current.values())


def sample(endpoint, at, hits=None, queries=None):
    return EndpointSample(
        endpoint=endpoint,
        at=at,
        healthy=True,
        in_flight=1,
        limit=2,
        cache_hits=hits,
        cache_queries=queries,
    )


def write(run_dir, part, samples, rest=b""):
    (run_dir / "journal").mkdir(exist_ok=True)
    lines = b"".join(msgspec.json.encode(item) + b"\n" for item in samples)
    (run_dir / "journal" / f"endpoints-{part}-000001.jsonl").write_bytes(lines + rest)


def test_the_growth_of_all_endpoints_counts_not_what_was_before(tmp_path):
    write(tmp_path, "all", [sample("a", 1, 900, 1000), sample("b", 1, 0, 0), sample("a", 2)])
    assert cache_share(tmp_path) is None
    more = [sample("a", 3, 950, 1100), sample("b", 4, 30, 100)]
    write(tmp_path, "all", [sample("a", 1, 900, 1000), sample("b", 1, 0, 0), *more])
    assert cache_share(tmp_path) == pytest.approx(80 / 200)


def test_two_parts_that_look_at_one_engine_count_it_once(tmp_path):
    write(tmp_path, "1-of-2", [sample("a", 1, 0, 0), sample("a", 9, 50, 100)])
    write(tmp_path, "2-of-2", [sample("a", 2, 5, 10), sample("a", 8, 40, 90)])
    assert cache_share(tmp_path) == pytest.approx(0.5)


def test_a_restarted_engine_counts_from_its_restart(tmp_path):
    write(tmp_path, "all", [sample("a", 1, 900, 1000), sample("a", 2, 10, 40)])
    assert cache_share(tmp_path) == pytest.approx(0.25)


def test_only_the_ends_of_a_large_file_are_read_and_torn_lines_are_passed_over(tmp_path):
    many = [sample("b", 2 + n / 1e6, n, 2 * n) for n in range(60_000)]
    write(
        tmp_path, "all", [sample("a", 1, 0, 0), *many, sample("a", 3, 30, 40)], b'{"endpoint":"a"'
    )
    size = (tmp_path / "journal" / "endpoints-all-000001.jsonl").stat().st_size
    assert size > totals.HEAD + totals.TAIL
    assert cache_share(tmp_path) == pytest.approx((30 + 59_999) / (40 + 2 * 59_999), rel=0.01)
