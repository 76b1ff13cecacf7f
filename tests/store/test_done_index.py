from __future__ import annotations

import random
from array import array

import pytest

from bagent.errors import JobError
from bagent.store.journal import segment_index
from bagent.store.journal.codec import ERROR_KINDS, OK_CODE, TOMBSTONE, code_of, unit_of
from bagent.store.journal.done_index import (
    ResumePolicy,
    SequentialLookup,
    UnitSet,
    done_index,
    load_index,
    units_of,
)
from bagent.store.journal.reader import JournalReader, Selection
from bagent.store.journal.segment_index import open_index
from bagent.store.journal.segments import Segment
from bagent.store.journal.supersession import OutcomeRanges
from bagent.types import EXTERNAL_KINDS, PASSING_KINDS, Outcome
from support.stored_runs import current_outcomes, unit

STATUSES = ["ok", "failed"] * 4 + ["ok", TOMBSTONE]


def random_outcomes(outcome, seed: int, count: int, statuses=STATUSES) -> list[Outcome]:
    rng = random.Random(seed)
    created = []
    for _ in range(count):
        changes = {"status": rng.choice(statuses), "text": "x" * rng.randrange(80)}
        if changes["status"] == "failed":
            changes["error_kind"] = rng.choice(ERROR_KINDS)
        unit = {"answer": rng.randrange(2), "stage": rng.choice(["draft", "judge"])}
        created.append(outcome(rng.randrange(count // 3), **unit, **changes))
    return created


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "policy",
    [
        ResumePolicy(),
        ResumePolicy(ended=True),
        ResumePolicy(skip_failed=True),
        ResumePolicy(retry=frozenset({"auth"})),
    ],
)
def test_the_index_equals_a_plain_reading_of_the_journal(store, outcome, seed, policy):
    outcomes = random_outcomes(outcome, seed, 400)
    store.write(*outcomes, segment_bytes=4000)
    current = current_outcomes(outcomes)
    index = store.finished(policy)
    finished = {u for u, o in current.items() if policy.is_finished(o.status, o.error_kind)}
    assert {u for u in current if index.has(u)} == finished
    assert len(index) == len(finished)
    assert not any(index.has(random.Random(seed).getrandbits(64)) for _ in range(100))
    good = sum(o.status == "ok" for o in current.values())
    assert (index.codes[OK_CODE], index.codes.total()) == (good, len(current))


@pytest.mark.parametrize("seed", range(3))
def test_current_lines_equal_a_plain_reading(store, outcome, seed):
    outcomes = random_outcomes(outcome, seed, 300)
    places = dict(zip(store.write(*outcomes, segment_bytes=3000), outcomes, strict=True))
    current = {id(o) for o in current_outcomes(outcomes).values()}
    with JournalReader(store.path, store.reports.append) as lines:
        written = [places[lines.location(location)] for location in lines.written()]
        ordered = [places[lines.location(location)] for location in lines.ordered()]
        good = [places[lines.location(p)] for p in lines.ordered(Selection(codes=frozenset({0})))]
    assert {id(o) for o in written} == current
    assert written == [o for o in outcomes if id(o) in current]
    stages = list(dict.fromkeys(o.stage for o in outcomes))
    by_input = sorted(written, key=lambda o: (stages.index(o.stage), o.row, o.answer))
    assert ordered == by_input
    assert good == [o for o in by_input if o.status == "ok"]


@pytest.mark.parametrize("kind", ERROR_KINDS)
def test_only_what_may_come_out_otherwise_is_sent_again(store, failure, kind):
    item = failure(1, kind)
    store.write(item)
    assert store.finished().has(unit(item)) == (kind not in PASSING_KINDS)
    resent = PASSING_KINDS | EXTERNAL_KINDS
    assert store.finished(ResumePolicy(ended=True)).has(unit(item)) == (kind not in resent)
    varied = ResumePolicy(ended=True, again=EXTERNAL_KINDS | {"schema"})
    assert store.finished(varied).has(unit(item)) == (kind not in resent | {"schema"})
    assert store.finished(ResumePolicy(ended=True, skip_failed=True)).has(unit(item))


def test_retry_with_an_unknown_word_says_what_was_meant():
    with pytest.raises(JobError, match=r"timeuot.*did you mean timeout"):
        ResumePolicy.parse("schema, timeuot")
    with pytest.raises(JobError, match="--skip-failed sends no failed row again, and --retry"):
        ResumePolicy.parse("schema", skip_failed=True)


def test_a_part_sees_what_other_divisions_finished_and_not_its_siblings(store, outcome):
    names = ["all", "1-of-2", "2-of-2", "1-of-3"]
    for number, part in enumerate(names):
        store.write(outcome(number), part=part)

    def seen(part):
        result = load_index(
            store.path, None, ResumePolicy(), report=store.reports.append, seen_by=part
        )
        return [name for n, name in enumerate(names) if result.has(unit(outcome(n)))]

    assert seen("1-of-2") == ["all", "1-of-2", "1-of-3"]
    assert seen("3-of-4") == names
    assert seen("all") == names


@pytest.mark.parametrize("damage", ["missing", "cut", "garbage", "other segment"])
def test_a_sidecar_that_does_not_fit_is_made_anew(store, outcome, damage):
    store.write(*(outcome(n) for n in range(60)), segment_bytes=3000)
    sidecar = store.segment(2).with_suffix(".idx")
    good = sidecar.read_bytes()
    if damage == "missing":
        sidecar.unlink()
    elif damage == "other segment":
        sidecar.write_bytes(store.segment(1).with_suffix(".idx").read_bytes())
    else:
        sidecar.write_bytes(good[:-9] if damage == "cut" else b"\xff" * 300)
    assert len(store.finished()) == 60
    assert sidecar.read_bytes() == good


def test_lines_behind_a_sidecar_are_read_from_the_segment(store, outcome):
    store.write(outcome(0))
    with store.segment().open("ab") as file:
        store2 = store.segment().read_bytes().replace(b"r0", b"r5").replace(b'"row":0', b'"row":5')
        file.write(store2.replace(b"0000000000000000", b"00000000000000ff") + b'{"torn')
    index = open_index(Segment("all", 1, store.segment()), store.reports.append)
    assert list(index.column("rows")) == [0, 5]
    assert len(store.finished()) == 2


def test_an_index_is_not_written_where_it_cannot_be(store, outcome):
    store.write(outcome(0), outcome(1))
    for path in (store.path / "journal").glob("*.idx"):
        path.unlink()
        path.mkdir()
    assert len(store.finished()) == 2


def test_numbers_that_come_after_others_were_looked_for_are_found():
    members = UnitSet(4)
    for numbers in ([9, 3], [7, 3, 1]):
        members.add_all(numbers)
        members.settle()
        assert all(map(members.has, numbers))
    assert len(members) == 4


def test_units_that_were_taken_back_are_not_finished_for_many_at_once(store, outcome):
    taken = outcome(11, status=TOMBSTONE)
    store.write(*(outcome(n) for n in range(40)), taken, segment_bytes=3000)
    index = store.finished()
    for start in range(0, 40, 10):
        units = [unit(outcome(n)) for n in range(start, start + 10)]
        assert index.has_all(units) is (start != 10)


def test_many_units_at_once_are_finished_if_each_is(store, outcome, failure):
    numbers = [n for n in range(90) if n != 17]
    store.write(*(failure(n, "timeout") if n == 59 else outcome(n) for n in numbers))
    for policy, missing in (
        (ResumePolicy(skip_failed=True), {17}),
        (ResumePolicy(ended=True), {17, 59}),
    ):
        index = store.finished(policy)
        for start in range(0, 90, 30):
            near = range(start, start + 30)
            units = [unit(outcome(n)) for n in near]
            assert index.has_all(units) is missing.isdisjoint(near)


ROWS = 900
AT_ONCE = 30


def written(rng: random.Random, order: str, outcome, failure) -> list[Outcome]:
    """Lines of most rows: some failed, some twice, some of rows that are gone from the input."""
    numbers = list(range(ROWS + 300)) if order == "with rows that are gone" else list(range(ROWS))
    if order == "shuffled":
        rng.shuffle(numbers)
    elif order == "in flight":
        numbers.sort(key=lambda n: n + rng.randrange(64))
    elif order == "backwards":
        numbers.reverse()
    created = []
    for number in numbers:
        if rng.random() < 0.03:
            continue
        if rng.random() < 0.1:
            created.append(failure(number, rng.choice(["timeout", "auth"])))
        if rng.random() < 0.9:
            created.append(outcome(number))
            if rng.random() < 0.05:
                created.append(outcome(number))
    return created


@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize(
    "order", ["in order", "in flight", "shuffled", "backwards", "with rows that are gone"]
)
def test_the_answer_is_that_of_each_unit_whatever_the_order(store, outcome, failure, order, chunk):
    rng = random.Random(f"{order} {chunk}")
    store.write(*written(rng, order, outcome, failure), segment_bytes=20_000)
    indexes = store.indexes()
    done = done_index(indexes, ResumePolicy())
    near = SequentialLookup(indexes, (), done.has, chunk)
    answers = []
    for start in range(0, ROWS, AT_ONCE):
        units = [unit(outcome(n)) for n in range(start, start + AT_ONCE)]
        missing = {item for item in units if not done.has(item)}
        assert near.has_all(units) is not bool(missing)
        answers.append(near.has_all([item for item in units if item not in missing]))
    assert all(answers)


@pytest.mark.parametrize("kind", [list, lambda keys: array("Q", keys)])
def test_units_of_many_keys_are_those_of_each(kind):
    rng = random.Random(1)
    keys = [rng.getrandbits(64) for _ in range(50)] + [0, 2**64 - 1]
    assert list(units_of(kind(keys), "main", 2)) == [unit_of(key, "main", 2) for key in keys]
    assert list(units_of(kind([]), "main", 0)) == []


@pytest.mark.parametrize("small", [-1, segment_index.SMALL])
@pytest.mark.parametrize("bits", [0, 1, 4])
@pytest.mark.parametrize("kinds", [["ok"], ["ok", "failed"], ["ok", "ok", "failed", TOMBSTONE]])
def test_every_unit_is_in_its_range_once(store, outcome, monkeypatch, bits, kinds, small):
    monkeypatch.setattr(segment_index, "SMALL", small)
    created = random_outcomes(outcome, bits, 300, kinds)
    store.write(*created, segment_bytes=3000)
    result = {}
    ranges = list(OutcomeRanges(store.indexes(), bits).ranges())
    assert len(ranges) == 1 << bits
    for number, (ok, bad) in enumerate(ranges):
        assert all(item >> (64 - bits) == number for item in (*ok, *bad))
        assert len(set(ok)) == len(ok)
        result |= dict.fromkeys(ok, 0) | bad
    current = current_outcomes(created)
    assert result == {u: code_of(o.status, o.error_kind) for u, o in current.items()}


@pytest.fixture
def unread(monkeypatch):
    """Leave columns in the index file until they are used, as those of many lines are."""
    monkeypatch.setattr(segment_index, "SMALL", -1)


@pytest.mark.usefixtures("unread")
def test_an_index_goes_on_when_its_writer_puts_a_longer_file_in_its_place(store, outcome, failure):
    journal = store.open()
    first = [outcome(n) for n in range(9)]
    for item in first:
        journal.write(item)
    journal.save_index()
    (index,) = store.indexes()
    for number in range(200, 340):
        journal.write(failure(number, stage="another stage"))
    journal.close()
    assert list(index.column("units")) == list(map(unit, first))
    assert list(index.column("rows")) == list(range(9))
    assert list(index.column("codes")) == [0] * 9
    assert list(index.ok_units()) == sorted(map(unit, first))


@pytest.mark.usefixtures("unread")
def test_a_file_that_covers_less_than_before_is_refused(store, outcome):
    store.write(outcome(0), outcome(1))
    sidecar = store.segment().with_suffix(".idx")
    other = type(store)(store.path / "other")
    other.write(outcome(0))
    (index,) = store.indexes()
    other.segment().with_suffix(".idx").replace(sidecar)
    with pytest.raises(EOFError):
        index.column("rows")
