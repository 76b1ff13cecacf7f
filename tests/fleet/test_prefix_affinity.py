"""Which calls are kin, told from their prompts as they come."""

from __future__ import annotations

from random import Random

import pytest

from bagent.fleet.prefix_affinity import (
    MAX_ENDPOINTS,
    WINDOW,
    PrefixGroup,
    PrefixIndex,
    PrefixRule,
    warming_saves,
)


def text(seed, size):
    return Random(seed).randbytes(size // 2).hex().encode()


SYSTEM = text(0, 3000)


def row(document, question, *, size=4000):
    return SYSTEM + text(1000 + document, size) + text(9_000_000 + document * 1000 + question, 200)


def families(rows, prefixes=None):
    prefixes = prefixes or PrefixIndex()
    return [prefixes.group_of(one) for one in rows]


@pytest.mark.parametrize("order", ["sorted", "mixed"])
def test_rows_of_one_document_are_kin_and_no_others(order):
    pairs = [(d, q) for d in range(20) for q in range(8)]
    if order == "mixed":
        Random(1).shuffle(pairs)
    # Until a second document is seen, the first one may be what all rows share.
    found = families([row(99, 0), row(98, 0), *(row(d, q) for d, q in pairs)])[2:]
    by_document = {}
    for (document, _), family in zip(pairs, found, strict=True):
        by_document.setdefault(document, set()).add(family)
    assert all(len(kin) == 1 for kin in by_document.values())
    assert len(set.union(*by_document.values())) == 20


def test_what_all_rows_share_makes_no_kin():
    found = families([SYSTEM + text(n, 300) for n in range(100)])
    assert len(set(found)) == 100


def test_short_prompts_are_not_looked_at():
    assert families([b"Review this: %d" % n for n in range(10)]) == [None] * 10


def test_looking_ends_where_nothing_is_shared_and_begins_again():
    prefixes = PrefixIndex()
    alone = [text(n, 4000) for n in range(2 * WINDOW)]
    families(alone, prefixes)
    assert prefixes.group_of(text(-1, 4000)) is None
    families([text(10_000 + n, 4000) for n in range(6 * WINDOW - 1)], prefixes)
    kin = families([row(d, q) for d in range(4) for q in range(50)], prefixes)
    assert len(set(kin[-20:])) == 1
    assert None not in kin[-20:]


def test_a_family_has_a_few_homes_and_forgets_the_oldest():
    family = PrefixGroup()
    for number in range(MAX_ENDPOINTS + 2):
        family.add_endpoint(f"e{number}")
    family.add_endpoint("e5")
    assert list(family.cached_on) == ["e2", "e3", "e4", "e5"]


@pytest.mark.parametrize(
    ("shared", "rows", "saved"),
    [(8000, 5, 4 * 2000), (8000, 6, 5 * 2000), (4000, 100, 0), (40_000, 1, 0), (40_000, 2, 10_000)],
    ids=["too few rows", "enough rows", "too short", "one row", "long"],
)
def test_warming_saves_what_the_others_would_compute_again(shared, rows, saved):
    begin = text(1, shared)
    found = warming_saves([begin + b"a", begin + b"b", begin + b"cc"], rows)
    assert found == (saved if saved >= 8192 else 0)


def test_engines_of_ones_own_are_warmed_only_when_asked():
    for mode, own, hosted in (
        ("auto", False, True),
        ("always", True, True),
        ("never", False, False),
    ):
        rule = PrefixRule(mode)
        assert (rule.warms(own=True), rule.warms(own=False)) == (own, hosted)
