"""Calls of tools: what is run, what is shared, what is kept, what goes back as a fault."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from bagent.tools import CallContext, Tool, ToolExecutor, ToolFault, ToolPolicy, ToolResult
from bagent.types import ToolCall
from support.jumping_loop import on_jumping_clock, run_jumping
from support.tool_pools import ANY, answers, asked, tool

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SHARED = ToolPolicy(coalesce=True)


class Counted:
    """A tool's function that counts its runs and takes a second."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.runs: list[dict[str, Any]] = []
        self.stopped = 0
        self.most = 0
        self._now = 0
        self._seconds = seconds

    async def __call__(self, arguments: dict[str, Any]) -> str:
        self.runs.append(arguments)
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            await asyncio.sleep(self._seconds)
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        finally:
            self._now -= 1
        return json.dumps(arguments, sort_keys=True)


def call_once(one: Tool, arguments: Any, context: CallContext | None = None) -> ToolResult:
    async def main() -> ToolResult:
        return await ToolExecutor([one]).call(asked("t", arguments), context or CallContext())

    return run_jumping(main())


def results_of(one: Tool, *calls: dict[str, Any]) -> list[ToolResult]:
    """The results of calls of one tool that all come at once."""

    async def main() -> list[ToolResult]:
        return await answers(ToolExecutor([one]), "t", list(calls))

    return run_jumping(main())


# --- arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ('{"a":1,"b":2}', {"a": 1, "b": 2}),
        ({"a": 1, "b": 2}, {"a": 1, "b": 2}),
        (json.dumps('{"a":1,"b":2}'), {"a": 1, "b": 2}),
        ('\ufeff{"b":2,"a":1}', {"a": 1, "b": 2}),
        ("", {}),
        ("null", {}),
        (None, {}),
    ],
    ids=["text", "object", "encoded twice", "with a mark", "empty", "null", "none"],
)
@on_jumping_clock
async def test_arguments_are_text_an_object_text_in_text_or_none(
    given: Any, arguments: dict[str, int]
) -> None:
    run = Counted()
    one = tool(run, ADD if arguments else ANY)
    result = await ToolExecutor([one]).call(ToolCall("call-1", "t", given))
    assert result.error is None
    assert run.runs == [arguments]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ('{"a":1,', "not JSON"),
        ('"foo"', "not a JSON object"),
        ('{"a":1}', "required"),
        ("[" * 5000, "not JSON"),
        ('{"a":' + "[" * 300 + "]" * 300 + "}", "deep"),
        ('{"a":1,"b":1e999}', "/b"),
        (json.dumps(json.dumps('{"a":1,"b":2}')), "not a JSON object"),
        ('{"a":1,"b":"' + "x" * 1_100_000 + '"}', "longer than"),
    ],
)
def test_wrong_arguments_go_back_as_the_result_and_the_tool_does_not_run(
    given: str, words: str
) -> None:
    run = Counted()
    result = call_once(tool(run, ADD), given)
    assert result.error == "bad_arguments"
    assert words in result.text
    assert len(result.text) < 2100
    assert run.runs == []


def test_a_tool_that_is_not_listed_never_runs() -> None:
    run = Counted()

    async def main() -> list[ToolResult]:
        pool = ToolExecutor([tool(run)])
        return [
            await ToolExecutor([]).call(asked("t")),
            await pool.call(asked("nope" * 1000)),
            await pool.call(asked("")),
        ]

    results = run_jumping(main())
    assert {result.error for result in results} == {"unknown_tool"}
    empty, long, nameless = [result.text for result in results]
    assert "the tools are: none" in empty
    assert "the tools are: t" in long
    assert len(long) < 300
    assert nameless == "error: the call names no tool; the tools are: t"
    assert run.runs == []


# --- faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ToolFault("no such page"), "error: no such page"),
        (ValueError("bad value"), "error: ValueError: bad value"),
        (KeyError(), "error: KeyError"),
        (TimeoutError("its own"), "error: TimeoutError: its own"),
    ],
)
def test_whatever_a_tool_raises_is_its_result(error: Exception, text: str) -> None:
    async def run(_: dict[str, Any]) -> str:
        raise error

    result = call_once(tool(run), "{}")
    assert (result.text, result.error) == (text, "failed")


def test_a_run_is_stopped_at_its_time_limit() -> None:
    run = Counted(3600)
    result = call_once(tool(run, policy=ToolPolicy(timeout=2)), "{}")
    assert result.error == "timeout"
    assert "longer than 2 s" in result.text
    assert result.latency_ms == pytest.approx(2000, abs=5)
    assert run.stopped == 1


@on_jumping_clock
async def test_a_caller_without_time_gives_up_and_the_run_goes_on_for_the_others() -> None:
    run = Counted(10)
    pool = ToolExecutor([tool(run, policy=SHARED)])
    now = asyncio.get_running_loop().time()
    hurried, patient = await asyncio.gather(
        pool.call(asked("t"), CallContext(deadline=now + 3)), pool.call(asked("t"))
    )
    assert (hurried.error, patient.error) == ("timeout", None)
    assert hurried.latency_ms == pytest.approx(3000, abs=5)
    assert len(run.runs) == 1


# --- sharing ----------------------------------------------------------------------------------


@on_jumping_clock
async def test_equal_calls_in_flight_share_one_run_only_where_the_policy_says_so() -> None:
    texts = ['{"a":1,"b":2}', '{ "b": 2, "a": 1 }', '{"a":1,"b":3}']
    for policy, shared in ((SHARED, [False, True, False]), (ToolPolicy(), [False] * 3)):
        run = Counted()
        pool = ToolExecutor([tool(run, policy=policy)])
        results = await asyncio.gather(*(pool.call(asked("t", text)) for text in texts))
        assert [result.shared for result in results] == shared
        assert results[0].text == results[1].text
        assert len(run.runs) == shared.count(False)
        assert not (await pool.call(asked("t", texts[0]))).cached


@on_jumping_clock
async def test_cancelling_the_first_of_five_callers_still_serves_four() -> None:
    run = Counted()
    pool = ToolExecutor([tool(run, policy=SHARED)])
    tasks = [asyncio.ensure_future(pool.call(asked("t", x=1))) for _ in range(5)]
    await asyncio.sleep(0.5)
    tasks[0].cancel()
    first, *others = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert [result.text for result in others] == ['{"x": 1}'] * 4
    assert (len(run.runs), run.stopped) == (1, 0)


@on_jumping_clock
async def test_a_run_that_nobody_waits_for_is_stopped_and_not_joined() -> None:
    run = Counted()
    pool = ToolExecutor([tool(run, policy=SHARED)])
    tasks = [asyncio.ensure_future(pool.call(asked("t"))) for _ in range(2)]
    await asyncio.sleep(0.5)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    result = await pool.call(asked("t"))
    assert (result.text, result.shared) == ("{}", False)
    assert (len(run.runs), run.stopped) == (2, 1)


# --- keeping ----------------------------------------------------------------------------------


@on_jumping_clock
async def test_an_answer_is_kept_for_its_time_and_a_fault_is_not() -> None:
    runs: list[float] = []

    async def run(_: dict[str, Any]) -> str:
        runs.append(asyncio.get_running_loop().time())
        if len(runs) == 1:
            raise ValueError("down")
        return "up"

    pool = ToolExecutor([tool(run, policy=ToolPolicy(cache_seconds=60))])
    seen = []
    for wait in (0, 0, 59, 2, 0):
        await asyncio.sleep(wait)
        result = await pool.call(asked("t", x=1))
        seen.append((result.error, result.cached))
    assert seen[0] == ("failed", False)
    assert seen[1:] == [(None, False), (None, True), (None, False), (None, True)]


@on_jumping_clock
async def test_the_answer_asked_for_longest_ago_gives_way() -> None:
    run = Counted(0)
    pool = ToolExecutor([tool(run, policy=ToolPolicy(cache_seconds=1e6))])
    for x in range(1024):
        await pool.call(asked("t", x=x))
    await pool.call(asked("t", x=0))
    await pool.call(asked("t", x=5000))
    assert [(await pool.call(asked("t", x=x))).cached for x in (0, 1)] == [True, False]


# --- pace and slots ---------------------------------------------------------------------------


@on_jumping_clock
async def test_runs_start_no_faster_than_the_rate_from_the_first_one_on() -> None:
    starts: list[float] = []

    async def run(_: dict[str, Any]) -> str:
        starts.append(asyncio.get_running_loop().time())
        return ""

    pool = ToolExecutor([tool(run, policy=ToolPolicy(rate_limit=5))])
    await asyncio.sleep(100)
    await answers(pool, "t", [{"x": x} for x in range(11)])
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    assert gaps == pytest.approx([0.2] * 10)


@on_jumping_clock
async def test_a_caller_that_is_cancelled_while_it_waits_for_the_pace_costs_no_turn() -> None:
    run = Counted(0)
    pool = ToolExecutor([tool(run, policy=ToolPolicy(rate_limit=0.1))])
    begin = asyncio.get_running_loop().time()
    tasks = [asyncio.ensure_future(pool.call(asked("t", x=x))) for x in range(5)]
    await asyncio.sleep(1)
    for task in tasks[1:4]:
        task.cancel()
    await tasks[4]
    assert (asyncio.get_running_loop().time() - begin) == pytest.approx(10)
    assert len(run.runs) == 2


@on_jumping_clock
async def test_no_more_runs_at_once_than_the_tool_allows_and_no_slot_is_lost() -> None:
    run = Counted()
    pool = ToolExecutor([tool(run, policy=ToolPolicy(concurrency=3, timeout=2))])
    waiting = [asyncio.ensure_future(pool.call(asked("t", x=x))) for x in range(6)]
    await asyncio.sleep(0.5)
    for task in waiting[:2] + waiting[4:]:
        task.cancel()
    results = await answers(pool, "t", [{"x": x} for x in range(10)])
    # The time limit bounds the run, not the waiting for a slot.
    assert {result.error for result in results} == {None}
    assert run.most == 3


# --- answers ----------------------------------------------------------------------------------


def test_a_long_answer_is_cut_with_a_note_and_a_short_one_is_not() -> None:
    async def run(arguments: dict[str, Any]) -> str:
        return "é" * int(arguments["n"])

    short, long = results_of(tool(run, policy=ToolPolicy(max_tokens=100)), {"n": 150}, {"n": 151})
    assert short.text == "é" * 150
    assert long.text == "é" * 150 + "\n[cut: the first 150 of 151 characters]"


@on_jumping_clock
async def test_closing_stops_runs_and_answers_who_waits() -> None:
    run = Counted(3600)
    pool = ToolExecutor([tool(run)])
    waiting = asyncio.ensure_future(pool.call(asked("t")))
    await asyncio.sleep(1)
    await pool.close()
    assert "stopped" in (await waiting).text
    assert run.stopped == 1


# --- windows ----------------------------------------------------------------------------------


class Batches:
    """Answers many calls at once and notes how many each time."""

    def __init__(self, answer: Any = None) -> None:
        self.sizes: list[int] = []
        self.stopped = 0
        self._answer = answer

    async def one(self, arguments: dict[str, Any]) -> str:
        raise AssertionError("calls come in windows")

    async def many(self, calls: Any) -> Any:
        self.sizes.append(len(calls))
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        if self._answer is not None:
            return self._answer(calls)
        return [str(call["x"]) for call in calls]

    def tool(self, **policy: Any) -> Tool:
        return tool(self.one, policy=ToolPolicy(**policy), run_many=self.many)


@on_jumping_clock
async def test_calls_that_come_within_a_window_share_one_run() -> None:
    batches = Batches()
    pool = ToolExecutor([batches.tool()])
    first = asyncio.ensure_future(answers(pool, "t", [{"x": x} for x in range(5)]))
    await asyncio.sleep(0.004)
    second = asyncio.ensure_future(answers(pool, "t", [{"x": 5}]))
    await asyncio.sleep(0.004)
    late = await answers(pool, "t", [{"x": 6}])
    assert [result.text for result in [*await first, *await second, *late]] == [
        str(x) for x in range(7)
    ]
    assert batches.sizes == [6, 1]


def test_a_window_closes_when_it_is_full() -> None:
    batches = Batches()
    results_of(batches.tool(), *({"x": x} for x in range(250)))
    assert batches.sizes == [100, 100, 50]


@on_jumping_clock
async def test_a_cancelled_call_leaves_its_window_to_the_others() -> None:
    batches = Batches()
    pool = ToolExecutor([batches.tool()])
    tasks = [asyncio.ensure_future(pool.call(asked("t", x=x))) for x in range(4)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0.5)
    tasks[1].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [getattr(result, "text", None) for result in results] == [None, None, "2", "3"]
    assert (batches.sizes, batches.stopped) == ([3], 0)


@on_jumping_clock
async def test_a_batch_that_nobody_waits_for_is_stopped() -> None:
    batches = Batches()
    pool = ToolExecutor([batches.tool()])
    tasks = [asyncio.ensure_future(pool.call(asked("t", x=x))) for x in range(3)]
    await asyncio.sleep(0.5)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await asyncio.sleep(0.1)
    assert batches.stopped == 1


def test_a_batch_with_too_few_answers_answers_nobody_wrongly() -> None:
    batches = Batches(lambda calls: ["only one"])

    results = results_of(batches.tool(), {"x": 0}, {"x": 1})
    assert [result.error for result in results] == ["failed"] * 2
    assert "1 answers for 2 calls" in results[0].text


def test_tools_are_closed_where_the_event_loop_is_gone() -> None:
    """A program may abandon a run; the collector ends its coroutines later, outside a loop."""
    with pytest.raises(StopIteration):
        ToolExecutor([tool(Counted())]).close().send(None)
