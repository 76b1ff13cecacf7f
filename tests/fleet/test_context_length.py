"""Rows that are long for a context: counted, sent where they fit, or never sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from bagent.backends.base import TOO_LONG
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.request import CallSettings, Request
from bagent.errors import StoppedEarly
from bagent.fleet.call import Call
from bagent.fleet.retry import RetryPolicy
from bagent.types import Failure
from support.jumping_loop import on_jumping_clock, run_jumping
from support.scripted_fleet import GOOD, REFUSED, Answer, Setup, always, setup, ticking

REFUSED_AS_LONG = Failure("context_overflow", "HTTP 400: too long", status=400)
"""The server's own word."""

REFUSED_KEY = Failure("auth", "HTTP 401: unauthorized", status=401)


def fleet_of(contexts: dict[str, int | None], *, engine: str = "vllm", **config: Any) -> Setup:
    """A fleet of engines with these contexts; a row's number is the tokens that it has."""
    made = setup({name: always() for name in contexts}, **config)
    for state in made.states:
        state.endpoint = Endpoint(state.name, state.endpoint.url, own=True)
    made.fleet.set_capabilities(
        {name: Capabilities(context=known, engine=engine) for name, known in contexts.items()}
    )
    made.backend.counts = {name: lambda row: row for name in contexts}
    return made


def call_of(s: Setup, tokens: int, *, asked: int | None = 100, **fields: Any) -> Call:
    """A call whose prompt has so many tokens, at four bytes each."""
    settings = CallSettings(model="m", sampling={}, extra={}, max_tokens=asked)
    payload = (b"%d" % tokens).ljust(4 * tokens)
    request = Request(settings, payload, prompt="", max_tokens=asked or 16)
    return Call(s.recorder.evaluate, request, f"k{tokens}", tokens, "map", 0, **fields)


async def finish(s: Setup, rows: Sequence[int], **fields: Any) -> Setup:
    """Send rows of so many tokens to their ends, ticking as a session does."""

    ticker = asyncio.ensure_future(ticking(s))
    for tokens in rows:
        s.request(call_of(s, tokens, **fields))
    await s.fleet.wait_idle()
    ticker.cancel()
    return s


def run_fitted(
    contexts: dict[str, int | None],
    rows: Sequence[int],
    prepare: Callable[[Setup], object] = lambda s: None,
    **config: Any,
) -> Setup:
    """Send rows of so many tokens to engines with these contexts, once ``prepare`` is done."""

    async def main() -> Setup:
        s = fleet_of(contexts, **config)
        prepare(s)
        return await finish(s, rows)

    return run_jumping(main())


def test_rows_that_are_short_for_the_context_are_never_counted():
    s = run_fitted({"a": 4096}, [10, 500, 960])
    assert s.backend.counted == []
    assert len(s.recorder.replies) == 3


def test_a_row_that_cannot_fit_ends_as_context_overflow_and_is_never_sent():
    s = run_fitted({"a": 4096}, [3990, 3996, 3997, 5000])
    assert sorted(s.recorder.replies) == [3990, 3996]
    assert {row for _, _, row in s.backend.sent} == {3990, 3996}
    failure, delivery = s.recorder.failures[3997]
    assert (failure.kind, failure.passing, delivery) == ("context_overflow", False, None)
    assert failure.message == (
        "the prompt contains 3997 tokens; with max_tokens: 100 that is more than the context"
        " length of 4096"
    )
    assert s.recorder.failures[5000][0].message == (
        "the prompt contains 5000 tokens that is more than the context length of 4096"
    )
    assert {one.row for one in s.attempts} == {3990, 3996}


@on_jumping_clock
async def test_a_chat_that_is_over_by_less_than_engines_differ_is_left_to_the_server():
    s = fleet_of({"a": 4096})
    for tokens in (4000, 4100):
        call = call_of(s, tokens)
        call.request = msgspec.structs.replace(call.request, prompt=None, messages=[])
        s.request(call)
    await s.fleet.wait_idle()
    assert sorted(s.recorder.replies) == [4000]
    assert sorted(s.recorder.failures) == [4100]


def test_what_an_endpoint_does_not_count_because_it_is_too_long_is_too_long():
    def prepare(s: Setup) -> None:
        for state in s.states:
            context = state.context or 0
            s.backend.counts[state.name] = lambda row, most=context: row if row < most else TOO_LONG

    s = run_fitted({"short": 2048, "long": 8192}, [100, 3000, 8300, 9000], prepare)
    assert sorted(s.recorder.replies) == [100, 3000]
    assert s.recorder.failures[9000][0].message == (
        "the prompt contains at least 8193 tokens that is more than the context length of 8192"
    )
    assert {name for name, _ in s.backend.counted} == {"long"}, "the longest is asked first"


def test_where_nobody_counts_a_row_is_sent_and_the_server_decides():
    def prepare(s: Setup) -> None:
        s.backend.counts, s.backend.count_seconds = {}, 0.1
        s.backend.scripts = {name: lambda row, number: Answer(REFUSED_AS_LONG) for name in "ab"}

    s = run_fitted({"a": 4096, "b": 4096}, [4090, 4100, 9000, 9001], prepare)
    assert len(s.backend.sent) == 4
    assert {failure for failure, _ in s.recorder.failures.values()} == {REFUSED_AS_LONG}
    assert sorted(s.recorder.failures) == [4090, 4100, 9000, 9001]


@on_jumping_clock
async def test_an_endpoint_that_counts_too_slowly_is_left_alone_for_a_while():
    s = fleet_of({"a": 4096})
    s.backend.counts, s.backend.count_seconds = {}, 3.0
    await finish(s, [4000])
    await finish(s, range(4001, 4010))
    assert s.backend.counted == [("a", 4000)]
    assert len(s.recorder.replies) == 10


def test_other_engines_than_vllm_may_take_a_prompt_that_leaves_less_than_max_tokens():
    s = run_fitted({"a": 4096}, [4050, 4095, 4096], engine="sglang")
    assert sorted(s.recorder.replies) == [4050, 4095]
    assert sorted(s.recorder.failures) == [4096]


@on_jumping_clock
async def test_rows_that_do_not_fit_leave_room_for_those_behind_them():
    s = fleet_of({"short": 2048, "long": 8192}, limit=1)
    s = await finish(s, [*range(3000, 3010), *range(50)])
    assert len(s.recorder.replies) == 60
    assert s.backend.shares["short"] > 25


def test_a_row_that_one_endpoint_refuses_as_too_long_goes_to_a_longer_context():
    def prepare(s: Setup) -> None:
        s.backend.counts = {}
        s.backend.scripts["short"] = lambda row, number: Answer(
            GOOD if row < 1950 else REFUSED_AS_LONG
        )

    s = run_fitted(
        {"short": 2048, "long": 8192}, [*range(10, 20), *range(2000, 2010)], prepare, limit=4
    )
    assert sorted(s.recorder.replies) == [*range(10, 20), *range(2000, 2010)]
    tries = {row: [name for _, name, sent in s.backend.sent if sent == row] for row in (2000, 2009)}
    assert all(names[-1] == "long" and len(names) <= 2 for names in tries.values())


@on_jumping_clock
async def test_a_row_without_max_tokens_gets_what_the_context_leaves_where_it_goes():
    s = fleet_of({"short": 2048, "long": 8192}, limit=4)
    calls = {tokens: call_of(s, tokens, asked=None) for tokens in (1500, 2000, 7900, 8190)}
    for call in calls.values():
        s.request(call)
    await s.fleet.wait_idle()
    asked = {tokens: call.request.max_tokens for tokens, call in calls.items()}
    assert asked == {1500: 512, 2000: 4096, 7900: 256, 8190: 2}
    assert {name for _, name, row in s.backend.sent if row >= 2000} == {"long"}


def test_an_endpoint_that_tells_no_context_may_have_what_no_other_can_hold():
    s = run_fitted({"short": 2048, "untold": None}, [1000, 5000])
    assert {row: name for _, name, row in s.backend.sent}[5000] == "untold"


@pytest.mark.parametrize(("context", "kind"), [(8192, None), (2048, "context_overflow")])
def test_a_row_that_waits_for_an_unknown_context_is_judged_once_it_is_known(context, kind):
    def prepare(s: Setup) -> None:
        down = [True, True, True]
        s.backend.scripts["later"] = lambda row, number: Answer(REFUSED if down else GOOD)
        s.backend.probes["later"] = lambda number: (
            down.pop() and REFUSED if down else Capabilities(context=context)
        )

    s = run_fitted(
        {"short": 2048, "later": None}, [100, 3000], prepare, retry=RetryPolicy(retries=9)
    )
    failure = s.recorder.failures.get(3000, [None])[0]
    assert (failure and failure.kind) == kind
    assert (3000 in s.recorder.replies) is (kind is None)


def test_rows_wait_for_the_only_endpoint_with_their_context_at_no_cost():
    down = [True] * 12

    def prepare(s: Setup) -> None:
        s.backend.scripts["long"] = lambda row, number: Answer(REFUSED if down else GOOD)
        s.backend.probes["long"] = lambda number: down.pop() and REFUSED if down else Capabilities()

    s = run_fitted(
        {"short": 2048, "long": 8192}, [100, 200, 3000, 4000], prepare, retry=RetryPolicy(retries=0)
    )
    assert sorted(s.recorder.replies) == [100, 200, 3000, 4000]


@pytest.mark.parametrize("fault", [REFUSED, REFUSED_KEY])
@on_jumping_clock
async def test_a_run_stops_for_rows_whose_only_endpoint_with_their_context_serves_nothing(fault):
    s = fleet_of({"short": 2048, "long": 8192})
    s.backend.scripts["long"] = always(fault, 0.01)
    s.backend.probes["long"] = lambda number: fault
    ending = asyncio.ensure_future(finish(s, [100, 200, 3000, 4000]))
    reason = await s.fleet.stopped
    ending.cancel()
    assert isinstance(reason, StoppedEarly)
    assert "whose context of 8192 tokens this row needs" in str(reason)
    assert sorted(s.recorder.replies) == [100, 200]
    assert s.recorder.failures == {}


@pytest.mark.parametrize("fault", [REFUSED, REFUSED_KEY])
def test_rows_fail_that_only_an_endpoint_of_unknown_context_might_have_served(fault):
    def prepare(s: Setup) -> None:
        s.backend.scripts["later"] = always(fault, 0.01)
        s.backend.probes["later"] = lambda number: fault

    s = run_fitted({"short": 2048, "later": None}, [100, 3000], prepare)
    assert sorted(s.recorder.replies) == [100]
    failure, _ = s.recorder.failures[3000]
    assert (failure.kind, failure.passing) == ("connect", True)


def test_an_endpoint_that_passes_its_check_is_asked_for_its_context():
    refusals = [True] * 5

    def prepare(s: Setup) -> None:
        s.backend.scripts["later"] = lambda row, number: Answer(
            REFUSED_KEY if refusals and refusals.pop() else GOOD, 0.01
        )
        s.backend.probes["later"] = lambda number: Capabilities(context=2048)

    rows = [*range(100, 104), *range(3000, 3030)]
    s = run_fitted({"short": 2048, "long": 8192, "later": None}, rows, prepare, limit=1)
    assert sorted(s.recorder.replies) == rows
    assert not refusals
    assert {name for _, name, row in s.backend.sent if row >= 3000} == {"long"}


@on_jumping_clock
async def test_where_endpoints_have_different_models_nothing_is_counted():
    s = setup({"a": always(), "b": always()})
    for state, model in zip(s.states, ("one", "two"), strict=True):
        state.endpoint = Endpoint(state.name, "http://x/v1", own=True, tags={"model": model})
    s.fleet.set_capabilities({name: Capabilities(context=4096, engine="vllm") for name in "ab"})
    s = await finish(s, [5000])
    assert s.backend.counted == []
    assert len(s.backend.sent) == 1
