"""GPU time shared out over rows, on clocks that only the tests move."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from bagent.backends.base import Exchange, Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.request import CallSettings, Request
from bagent.money.gpu_time import GpuTimeBackend, SharedTime
from bagent.money.prices import gpu_pricer
from bagent.types import Failure, Reply, Usage
from support.scripted_fleet import ScriptedBackend

REQUEST = Request(CallSettings("m", {}, {}), b"0")
LIMITS = Timeouts()


def test_a_row_alone_has_the_whole_time_and_two_have_half_of_it_each() -> None:
    shared = SharedTime()
    first = shared.change(0.0, 1)
    second = shared.change(10.0, 1)
    assert shared.change(14.0, -1) - first == pytest.approx(10 + 2)
    assert shared.change(20.0, -1) - second == pytest.approx(2 + 6)


def test_all_shares_together_are_the_time_in_which_anything_was_in_flight() -> None:
    random, shared = Random(3), SharedTime()
    now, busy, total = 0.0, 0.0, 0.0
    flying: list[tuple[float, int]] = []
    for _ in range(2000):
        step = random.expovariate(1.0)
        now += step
        busy += step if flying else 0.0
        if flying and random.random() < 0.55:
            began, size = flying.pop(random.randrange(len(flying)))
            total += size * (shared.change(now, -size) - began)
        else:
            size = random.randrange(1, 5)
            flying.append((shared.change(now, size), size))
    for began, size in flying:
        total += size * (shared.change(now, -size) - began)
    assert total == pytest.approx(busy)


class Clocked(ScriptedBackend):
    """Answers in a moment; the clock is moved by what a request takes."""

    now = 0.0
    result: Reply | Failure = Reply(text="x", finish_reason="stop", usage=Usage(prompt=3))

    async def send(
        self, endpoint: Endpoint, group: Sequence[Request], timeouts: Timeouts
    ) -> Exchange:
        self.now += 8.0
        return Exchange([self.result] * len(group), sent=0.0)


async def test_an_endpoint_of_many_gpus_costs_them_all_and_a_group_shares_them() -> None:
    inner = Clocked({})
    backend = GpuTimeBackend(inner, lambda: inner.now)
    endpoint = Endpoint("a", "http://a/v1", tags={"gpus": "8"})
    replies = (await backend.send(endpoint, [REQUEST] * 4, LIMITS)).results
    assert [reply.usage for reply in replies] == [Usage(prompt=3, gpu_seconds=16.0)] * 4


async def test_a_failure_stays_as_it_is_and_no_longer_counts_as_in_flight() -> None:
    inner = Clocked({})
    inner.result = gone = Failure("connect", "gone", passing=True)
    backend = GpuTimeBackend(inner, lambda: inner.now)
    endpoint = Endpoint("a", "http://a/v1")
    assert (await backend.send(endpoint, [REQUEST], LIMITS)).results == [gone]
    inner.result = Reply(text="x", finish_reason="stop")
    (reply,) = (await backend.send(endpoint, [REQUEST], LIMITS)).results
    assert reply.usage.gpu_seconds == pytest.approx(8.0)


def test_an_hour_costs_what_the_user_says() -> None:
    cost = gpu_pricer(2.5)
    assert cost(None, Usage(gpu_seconds=3600.0)) == pytest.approx(2.5)
    assert cost(None, Usage(prompt=10, completion=10)) is None
