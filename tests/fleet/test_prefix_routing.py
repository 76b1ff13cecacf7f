"""Rows that begin alike meet the same endpoint; a cold hosted cache is warmed. Engines are
simulated, with caches by blocks; the clock jumps, so all numbers are exact."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from bagent.fleet.batch_size import BatchSizeRule
from bagent.sim.config import EngineConfig
from support.cached_fleets import Case, run
from support.jumping_loop import run_jumping
from support.scripted_fleet import always, setup

ROOMY = EngineConfig(max_num_seqs=64, kv_tokens=131_072, prefill=20_000.0, decode=50.0)


def text(seed, size):
    return Random(seed).randbytes(size // 2).hex()


def asked(sizes, order="sorted", *, common=1600, document=4000):
    """Prompts: what all share, a document, a question; ``sizes`` are questions of each document."""
    begin = text(0, common)
    rows = [
        (number, place, begin + text(1000 + number, document) + text(number * 1000 + place, 200))
        for number, count in enumerate(sizes)
        for place in range(count)
    ]
    if order == "interleaved":
        rows.sort(key=lambda one: one[1])
    if order == "shuffled":
        Random(5).shuffle(rows)
    return [words for _, _, words in rows]


def modes(case):
    """The run without and with care for the caches."""
    return run(replace(case, mode="never")), run(case)


def test_documents_in_any_order_are_read_nearly_once():
    without, with_care = modes(Case(asked([8] * 100, "shuffled")))
    assert with_care.hits > 0.8 > 0.6 > without.hits
    assert with_care.seconds < 0.5 * without.seconds


def test_lists_of_prompts_hold_rows_that_begin_alike():
    rows = asked([16] * 20, "shuffled")
    case = Case(rows, group=BatchSizeRule(single=False), limit=64, config=ROOMY)
    without, with_care = modes(case)
    assert with_care.hits > without.hits + 0.05
    assert with_care.seconds < without.seconds


@pytest.mark.parametrize(
    "rows",
    [
        asked([300], "sorted"),
        asked([1] * 200),
        asked([200] + [10] * 10, "shuffled"),
    ],
    ids=["one document", "no document twice", "one large among small"],
)
def test_no_endpoint_starves_or_crowds_for_the_sake_of_a_cache(rows):
    without, with_care = modes(Case(rows))
    assert with_care.hits >= without.hits - 0.001
    assert with_care.seconds <= 1.02 * without.seconds
    shares = Counter(name for _, name, _ in with_care.backend.sent)
    assert min(shares.values()) > 0.8 * len(rows) / 4


LEARNERS = Case(
    asked([3] * 25, "interleaved"),
    engines=2,
    limit=64,
    group=BatchSizeRule(single=False, stream_every=50),
    config=replace(ROOMY, prefill=2000.0),
)


@pytest.mark.parametrize(
    ("learns", "limits"), [((0.1, 0.15), (64, 70)), ((0.1, 1.0), (96, 64)), ((0.3, 0.1), (32, 48))]
)
def test_documents_are_read_nearly_once_whoever_learned_or_grew_first(learns, limits):
    ran = run(replace(LEARNERS, rows=asked([6] * 25, "interleaved"), learns=learns, limits=limits))
    assert ran.hits > 0.78, "of five sixths and what all share"
    shares = Counter(name for _, name, _ in ran.backend.sent)
    assert min(shares.values()) > 150 / 3


def test_the_first_that_has_learned_waits_as_long_again_at_most():
    for first, begins in ((0.1, 0.2), (5.0, 6.0)):
        ran = run(replace(LEARNERS, learns=(first, 60.0)))
        at, name, _ = ran.backend.sent[0]
        assert (at - 1000.0, name) == (pytest.approx(begins), "e0")


def test_a_hosted_cache_is_read_instead_of_written_by_the_first_burst():
    case = Case(asked([1] * 100, common=8000, document=400), engines=1, limit=64, hosted=True)
    without, with_care = modes(case)
    assert without.backend.written > 5 * with_care.backend.written
    assert with_care.backend.streamed == 1
    assert with_care.seconds < without.seconds + 0.05


def test_few_rows_or_short_beginnings_are_not_waited_for():
    for rows, common in ((3, 8000), (100, 1200)):
        case = Case(asked([1] * rows, common=common, document=400), engines=1, hosted=True)
        without, with_care = modes(case)
        assert with_care.backend.streamed == 0
        assert with_care.seconds <= without.seconds + 0.021


def test_the_others_follow_at_the_first_token_and_wait_no_longer_than_the_bound():
    async def main(begins):
        s = setup({"e0": always(seconds=100.0)}, limit=16, group=BatchSizeRule(stream_every=50))
        s.backend.begins_after = begins
        s.fleet.expect(True)
        for row in range(40):
            call = s.call(row)
            call.request.payload = b"%04200d" % row
            s.request(call)
        s.fleet.expect(False)
        await s.fleet.wait_idle()
        return [round(at - s.backend.sent[0][0], 1) for at, _, _ in s.backend.sent[:17]]

    assert run_jumping(main(2.0)) == [0.0] + [2.0] * 15 + [100.0]
    assert run_jumping(main(None)) == [0.0] + [10.0] * 15 + [100.0]
