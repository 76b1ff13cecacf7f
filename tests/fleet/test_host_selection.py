"""Choosing endpoints by tag, place, slice and sample."""

from __future__ import annotations

from typing import Any

import pytest

from bagent.errors import UsageError
from bagent.fleet.hostfile import parse_hostfile
from bagent.servers.host_selection import select_hosts

HOSTS = parse_hostfile(
    "n[0-3] role=worker gpus=4\nn[4-5] role=critic gpus=4\nn[6-7] role=critic gpus=8\nn8\n"
)


def names(selection: dict[str, Any] | None) -> str:
    return " ".join(host.name.split(":")[0] for host in select_hosts(HOSTS, selection))


@pytest.mark.parametrize(
    ("selection", "found"),
    [
        (None, "n0 n1 n2 n3 n4 n5 n6 n7 n8"),
        ({"role": "critic"}, "n4 n5 n6 n7"),
        ({"role": ["critic", "worker"], "gpus": 4}, "n0 n1 n2 n3 n4 n5"),
        ({"index": [-1, 2, 2]}, "n2 n8"),
        ({"slice": "::4"}, "n0 n4 n8"),
        ({"slice": "-2:"}, "n7 n8"),
        ({"role": "critic", "slice": ":2"}, "n4 n5"),
    ],
)
def test_tags_go_first_and_places_count_what_is_left(selection: Any, found: str) -> None:
    assert names(selection) == found


def test_a_sample_is_the_same_each_time_and_another_with_another_seed() -> None:
    first = names({"sample": 4})
    assert len(first.split()) == 4
    assert names({"sample": 4, "seed": 0}) == first
    assert len({names({"sample": 4, "seed": seed}) for seed in range(8)}) > 1


def test_a_sample_loses_at_most_one_endpoint_when_one_joins() -> None:
    more = [*parse_hostfile("new"), *HOSTS]
    before = {host.url for host in select_hosts(HOSTS, {"sample": 4})}
    after = {host.url for host in select_hosts(more, {"sample": 4})}
    assert len(before & after) >= 3


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        ({"rol": "critic"}, "no endpoint has the tag rol (did you mean role?)"),
        ({"zone": "a"}, "no endpoint has the tag zone (tags there: role, gpus)"),
        ({"role": "judge"}, "no endpoint has role=judge (role there: worker, critic)"),
        ({"role": "worker", "gpus": 8}, "no endpoint has gpus=8 and the other tags"),
        ({"role": {"a": 1}}, "role: expected a tag's value"),
        ({"index": 9}, "there is no endpoint 9 of 9 endpoints"),
        ({"index": "1"}, "index: expected a whole number"),
        ({"slice": "4"}, "slice: expected first:last"),
        ({"slice": "a:b"}, "slice: expected first:last"),
        ({"slice": "::-1"}, "slice: expected first:last"),
        ({"slice": "20:"}, "no endpoint is left"),
        ({"sample": 0}, "sample: expected a whole number of at least 1"),
        ({"sample": 10}, "sample: 10 wanted, 9 there"),
        ({"sample": 1, "seed": "x"}, "seed: expected a whole number"),
        ({"seed": 1}, "seed stands without sample"),
    ],
)
def test_what_cannot_be_selected_is_said(selection: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        select_hosts(HOSTS, selection)
    assert str(caught.value).startswith("select: ")
    assert words in str(caught.value)
