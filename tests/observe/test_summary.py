from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bagent.observe.counters import RunCounters
from bagent.observe.live_state import EndpointLine, endpoints_in_trouble
from bagent.observe.next_step import MORE_BUDGET, Advice, command_text, next_step
from bagent.observe.summary import EndInfo, summary_lines
from bagent.types import PASSING_KINDS

COMMAND = "bagent run job.yaml"
LOOK = (
    'look        bagent query genes "select id, error_kind, endpoint, attempts, error '
    'from results where error_kind is not null limit 20"'
)


RESUME = [
    "advice      the same command resumes where the run stopped",
    "next        bagent run job.yaml",
]
THIS_ONE = "advice      this command resumes where the run stopped"


def info(exit_code: int, **parts: Any) -> EndInfo:
    names = ("reason", "color", "worked_s")
    ending = {name: parts.pop(name) for name in names if name in parts}
    fields = {"run": "genes", "results": "runs/genes", "command": COMMAND.split()}
    resent = PASSING_KINDS | {"auth"}
    advice = Advice(exit_code=exit_code, **{**fields, "resent": resent, **parts})
    return EndInfo(advice, **ending)


def test_a_whole_run_is_summed_up(tally, make, clock):
    """Other endings are held word for word, without times, by runs/test_endings.py."""
    answer = {"prompt_tokens": 500, "completion_tokens": 100, "latency_ms": 120.0}
    answer |= {"cost_usd": 0.001, "first_try_valid": True}
    for row in range(4):
        told = {"cached_tokens": 400} if row else {"ttft_ms": 40.0}
        tally.outcomes([make.outcome(row, **answer, **told)])
        tally.attempts([make.attempt(f"g{row}")])
    clock.now += 8
    assert summary_lines(make.snapshot(tally), info(0)) == [
        "rows        4 rows: 4 ok, 0 failed",
        "ended       finished",
        "time        8.0s, 0.50 rows/s",
        "latency     p50 120ms, p99 120ms; first token p50 40ms, p99 40ms (1 answer)",
        "tokens      2,000 prompt (1,200 cached; 1 answer did not say), 400 completion, "
        "50.0 completion tokens/s",
        "cache       80 % of 1,500 prompt tokens were known (1 answer did not say)",
        "cost        $0.004000; by mode: bagent report",
        "schema      4 of 4 first answers valid (100 %)",
        "requests    4 sent, 0 retries",
        "results     runs/genes",
        "next        bagent results genes | head",
    ]


def test_attempts_of_rows_add_up_where_a_request_holds_several(tally, make):
    for row, group in enumerate(("g1", "g1", "g2")):
        tally.outcomes([make.outcome(row)])
        tally.attempts([make.attempt(group)])
    tally.attempts([make.attempt("g3", try_=2)])
    lines = summary_lines(make.snapshot(tally), info(0))
    assert "requests    3 sent; 4 row attempts ended, 1 retry of any cause" in lines


def test_three_kinds_of_failure_are_three_groups(tally, make, clock):
    tally.outcomes([make.outcome(0)])
    for row in range(1, 7):
        kind, error = [
            ("timeout", f"127.0.0.1:{8000 + row} timed out after {row}.01 s"),
            ("rejected", "HTTP 400: unknown parameter"),
            ("bad_response", "HTTP 200: <h1>gateway</h1>"),
        ][(row > 3) + (row > 5)]
        endpoint = f"http://127.0.0.1:{8000 + row}"
        tally.outcomes(
            [make.outcome(row, "failed", error_kind=kind, error=error, endpoint=endpoint)]
        )
        tally.attempts([make.attempt(f"g{row}", try_=2, error_kind=kind)])
    tally.attempts([make.attempt("g9", status_code=429, error_kind="rate_limited")])
    clock.now += 10
    resumed = make.snapshot(tally, make.fleet(), make.feed(read=19), {"ok": 10, "schema": 2})
    lines = summary_lines(resumed, info(1))
    start = next(n for n, line in enumerate(lines) if line.startswith("requests"))
    assert lines[start : lines.index("results     runs/genes")] == [
        "requests    7 sent, 6 retries of any cause, 1 throttled answer, "
        "failed attempts: timeout 3, rejected 2, bad_response 1, rate_limited 1 (this start)",
        "errors      3 x timeout, at 3 endpoints",
        "                row r1 (genes.jsonl:2) at http://127.0.0.1:8001: "
        "127.0.0.1:8001 timed out after 1.01 s",
        "            2 x rejected, HTTP 400, at 2 endpoints",
        "                row r4 (genes.jsonl:5) at http://127.0.0.1:8004: "
        "HTTP 400: unknown parameter",
        "            1 x bad_response, HTTP 200, at http://127.0.0.1:8006",
        "                row r6 (genes.jsonl:7): HTTP 200: <h1>gateway</h1>",
    ]
    assert [line.partition(":")[0] for line in lines[-6:]] == [
        "cause       2 rows refused by the server (rejected)",
        "cause       2 rows without an answer that fits the schema (schema)",
        LOOK,
        "retry       bagent run job.yaml --on-change continue --retry rejected,schema",
        "advice      the same command sends again what may come out otherwise",
        "next        bagent run job.yaml",
    ]


def text(tally: RunCounters, make: Any, end: EndInfo, **parts: Any) -> str:
    return "\n".join(summary_lines(make.snapshot(tally, **parts), end))


@pytest.mark.parametrize(
    ("end", "tail"),
    [
        (info(0), ["next        bagent results genes | head"]),
        (info(0, run="my genes"), ["next        bagent results 'my genes' | head"]),
        (
            info(75, command=["bagent", "run", "my job.yaml", "--fresh", "--limit", "3"]),
            [THIS_ONE, "next        bagent run 'my job.yaml' --limit 3"],
        ),
        (info(75, command=[*COMMAND.split(), "--on-change", "fresh"]), [THIS_ONE, RESUME[1]]),
        (info(75, reason="deadline"), RESUME),
        (
            info(76, reason="budget spent", action="raise limits.budget_usd (now 5.00)"),
            ["first       raise limits.budget_usd (now 5.00)", *RESUME],
        ),
        (
            info(76, command=["bagent", "run", "job.yaml", "--budget", "5"], action=MORE_BUDGET),
            [
                "first       write a larger budget in place of MORE",
                THIS_ONE,
                "next        bagent run job.yaml --budget MORE",
            ],
        ),
        (
            info(75, action="start the server, or wait for it with --wait-hosts 10m"),
            [
                "first       start the server, or wait for it with --wait-hosts 10m",
                THIS_ONE,
                "next        bagent run job.yaml --wait-hosts 10m",
            ],
        ),
        (
            info(74, reason="no space left on device"),
            ["first       free space for runs/genes", *RESUME],
        ),
        (info(130), RESUME),
    ],
)
def test_the_last_line_is_the_command_that_comes_next(tally, make, end, tail):
    tally.outcomes([make.outcome(0)])
    lines = summary_lines(make.snapshot(tally), end)
    start = lines.index("results     runs/genes") + 1
    assert lines[start:] == tail
    if end.reason:
        assert lines[1].endswith(f": {end.reason}")


def test_allowed_failures_and_those_without_a_text_are_named(tally, make):
    tally.outcomes([make.outcome(6, "failed", error_kind="auth", id=None)])
    said = text(tally, make, info(0))
    assert "ended       finished, with no more failed rows than allowed" in said
    assert "row 6 (genes.jsonl:7): no error text" in said


@pytest.mark.parametrize(
    ("causes", "rest"),
    [
        (12, "and 2 more kinds of error (2 rows)"),
        (200, "and at least 40 more kinds of error (190 rows)"),
    ],
)
def test_at_most_ten_groups_are_shown_and_the_rest_counted(tally, make, causes, rest):
    for row in range(causes):
        word = "".join(chr(ord("a") + int(digit)) for digit in f"{row:03}")
        tally.outcomes([make.outcome(row, "failed", error_kind="rejected", error=f"cause {word}")])
    lines = summary_lines(make.snapshot(tally), info(1))
    assert len([line for line in lines if " x rejected" in line]) == 10
    assert f"            {rest}" in lines


@pytest.mark.parametrize(
    ("kind", "before", "options"),
    [
        ("bad_input", "", ""),  # nothing is sent for a line that cannot be read until it is mended
        ("template", "--fresh --skip-failed", " --on-change continue --retry template"),
        ("schema", "", " --on-change continue --retry schema"),
        ("max_turns", "", " --set agent.max_turns=12 --on-change continue --retry max_turns"),
        (
            "max_turns",
            "--set agent.max_turns=6",
            " --set agent.max_turns=12 --on-change continue --retry max_turns",
        ),
    ],
)
def test_the_next_command_changes_what_the_cause_names(tally, make, kind, before, options):
    tally.outcomes([make.outcome(1, "failed", error_kind=kind, error="why")])
    command = [*COMMAND.split(), *before.split()]
    lines = summary_lines(make.snapshot(tally), info(1, command=command, max_turns=6))
    assert lines[-1] == f"next        {COMMAND}{options}"


def test_the_speed_of_a_resumed_run_is_that_of_all_its_starts(tally, make, clock):
    tally.outcomes([make.outcome(0)])
    clock.now += 4
    s = make.snapshot(tally, earlier={"ok": 9})
    (time,) = (x for x in summary_lines(s, info(0, worked_s=20.0)) if x.startswith("time"))
    assert time == "time        20s, 0.50 rows/s; 4.0s, 0.25 rows/s (this start)"


def test_endpoints_that_were_down_or_slow_at_the_end_are_named(tally, make):
    def line(name: str, health: str = "ok", p50_s: float | None = 1.0) -> EndpointLine:
        return EndpointLine(name, health, 0, 8, 9, 0, p50_s=p50_s)

    late = [line(f"late{n}", p50_s=2.0 + n) for n in range(5)]
    dead = [line("gone", "down", None), line("mute", "unresponsive", 9.0)]
    fast = [line(f"fast{n}") for n in range(20)]
    trouble = endpoints_in_trouble([*fast, line("new", "starting"), *late, *dead])
    s = msgspec.structs.replace(make.snapshot(tally), trouble=trouble)
    (text,) = (x for x in summary_lines(s, info(1)) if x.startswith("endpoints"))
    assert text == (
        "endpoints   gone was down at the end; mute was unresponsive at the end; "
        "late4 takes 6.0 times the others' median time (p50 6.0s); "
        "late3 takes 5.0 times the others' median time (p50 5.0s); "
        "late2 takes 4.0 times the others' median time (p50 4.0s); 2 more; see bagent report genes"
    )


@pytest.mark.parametrize(
    ("times", "failures", "named"),
    [
        ([1.0, 1.4], [0, 0], ""),
        ([1.0, 1.6], [0, 0], "e1 takes 1.6 times the others' median time"),
        ([1.0, 1.0, 1.0], [1, 1, 63], "e2 failed 63 % of its attempts; see bagent report genes"),
        ([1.0, 1.0], [1, 1], ""),
        ([1.0], [63], ""),
    ],
)
def test_endpoints_are_in_trouble_beside_others_that_are_not(tally, make, times, failures, named):
    lines = [
        EndpointLine(f"e{n}", "ok", 0, 8, 100, failed, p50_s=p50_s)
        for n, (p50_s, failed) in enumerate(zip(times, failures, strict=True))
    ]
    trouble = endpoints_in_trouble(lines)
    s = msgspec.structs.replace(make.snapshot(tally), trouble=trouble)
    said = [line for line in summary_lines(s, info(1)) if line.startswith("endpoints")]
    assert len(said) == bool(named)
    assert not named or f"endpoints   {named}" in said[0]


@pytest.mark.parametrize(
    ("kind", "ok", "options"),
    [
        ("refused", 0, " --on-change continue --retry refused,timeout"),
        ("context_overflow", 0, " --on-change continue --retry context_overflow,timeout"),
        ("refused", 1, ""),  # the others may be served
        ("bad_input", 0, ""),
    ],
)
def test_a_run_of_alike_failures_resumes_with_them(tally, make, kind, ok, options):
    for row, failure in enumerate([kind, kind, "timeout"]):
        tally.outcomes([make.outcome(row, "failed", error_kind=failure, error="why")])
    ending = info(76, none_ok=not ok, max_tokens=64)
    *_, advice, command = summary_lines(make.snapshot(tally), ending)
    assert command == f"next        {COMMAND}{options}"
    assert ("cause " in summary_lines(make.snapshot(tally), ending)[-3]) == bool(options)
    assert advice.endswith(f"and sends {kind} 2 again" if options else "where the run stopped")


def test_the_next_command_says_what_it_sends_beside_lines_that_need_mending(tally, make):
    for row, kind in enumerate(("bad_input", "truncated", "truncated")):
        tally.outcomes([make.outcome(row, "failed", error_kind=kind, error="why")])
    *_, advice, command = summary_lines(make.snapshot(tally), info(1, command=["bagent", "run"]))
    assert "none of these rows again unless their input is mended; this one sends" in advice
    assert advice.endswith("sends truncated 2")
    assert command.endswith("--retry truncated")


@pytest.mark.parametrize(
    ("max_tokens", "completion_tokens", "setting"),
    [
        (None, 4096, " --set sampling.max_tokens=8192"),
        (None, 10, ""),  # the context was full
        (512, 512, " --set sampling.max_tokens=1024"),
        (512, 100, ""),
        (None, None, ""),
        (512, None, " --set sampling.max_tokens=1024"),
    ],
)
def test_a_limit_below_the_one_that_was_sent_is_never_proposed(
    tally, make, max_tokens, completion_tokens, setting
):
    tally.outcomes(
        [make.outcome(0, "truncated", error_kind="truncated", completion_tokens=completion_tokens)]
    )
    s = make.snapshot(tally)
    lines = summary_lines(s, info(1, max_tokens=max_tokens, cut_at=s.cut_at))
    (cause,) = (line for line in lines if line.startswith("cause"))
    by_server = completion_tokens in (10, 100)
    assert ("shorten the prompt, which may fill the context" in cause) == by_server
    assert ("though up to" in cause) == by_server
    change = " --on-change continue" if setting or by_server else ""
    assert lines[-1] == f"next        {COMMAND}{setting}{change} --retry truncated"


@pytest.mark.parametrize(
    ("feed", "earlier", "warning"),
    [
        ({}, 0, "warning     the input has no rows"),
        ({"read": 9}, 0, "warning     none of the input's rows was selected"),
        ({"most": 0}, 0, "warning     --limit 0 selects none of the input's rows"),
        ({"unselected": 9}, 0, "warning     none of the input's rows was selected"),
        ({"read": 9, "skipped": 9}, 9, None),
    ],
)
def test_zero_rows_end_with_a_warning_and_without_what_was_not_sent(
    tally, make, feed, earlier, warning
):
    state = make.snapshot(tally, feed=make.feed(**feed), earlier={"ok": earlier})
    lines = summary_lines(state, info(0))
    assert [line for line in lines if line.startswith("warning")] == ([warning] if warning else [])
    assert not [line for line in lines if line.startswith(("tokens", "cost", "requests"))]


@pytest.mark.parametrize(
    ("valid", "total", "warned"), [(7, 10, True), (8, 10, False), (1, 3, True), (0, 2, False)]
)
def test_few_valid_first_answers_are_warned_of(tally, make, valid, total, warned):
    for row in range(total):
        tally.outcomes([make.outcome(row, first_try_valid=row < valid)])
    said = text(tally, make, info(0))
    assert ("the endpoint may not enforce the schema" in said) == warned
    assert "schema      " in said


def test_what_is_left_is_said_when_a_run_stops_early(tally, make):
    tally.outcomes([make.outcome(0)])
    left = {"fleet": make.fleet(in_flight=4)}
    assert "rows        5 rows: 1 ok, 0 failed, 4 remaining" in text(tally, make, info(75), **left)
    half = make.feed(read=5, position=50, size=100, ended=False)
    said = text(tally, make, info(75), feed=half, **left)
    assert "rows        about 10 rows: 1 ok, 0 failed, about 9 remaining" in said
    unknown = make.feed(size=None, ended=False)
    assert "at least 1 row: 1 ok, 0 failed\n" in text(tally, make, info(75), feed=unknown, **left)


def test_rows_that_nobody_counted_are_not_zero_rows(tally, make):
    unread = make.feed(read=0, ended=False, size=None)
    said = text(tally, make, info(75, reason="no server"), feed=unread)
    assert said.startswith("rows        not counted yet: 0 ok, 0 failed")


def test_colour_codes_are_only_in_lines_for_a_terminal(tally, make):
    tally.outcomes([make.outcome(0, "failed", error_kind="auth", error="\x1b[31mno")])
    end = info(76, reason="HTTP 401: \x1b[2J\nno key", action="set\nthe key \x07")
    lines = summary_lines(make.snapshot(tally), end)
    assert not any("\x1b" in line for line in lines)
    assert any(line.endswith("must act first: HTTP 401: \\x1b[2J no key") for line in lines)
    assert "first       set the key \\x07" in lines
    colored = summary_lines(make.snapshot(tally), info(1, color=True))
    assert colored[-1].startswith("\x1b[1mnext      \x1b[0m  bagent run")


DICT_JOB = [
    *("bagent", "run", ".bagent-dd4c0a1b2c3d4e5f.yaml", "-o", "-"),
    *("-i", "-", "--python", "rows"),
]


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["bagent", "run", "a b.yaml"], "bagent run 'a b.yaml'"),
        (DICT_JOB, "call run(job, rows=rows) again in Python, with the same job and rows"),
        (
            ["bagent", "run", "job.yaml", "-o", "-", "--python", "job", "--ordered"],
            'call run("job.yaml", ordered=True) again in Python, with the same job',
        ),
        (
            [*DICT_JOB, "--name", "x", "--retry", "all", "--progress", "json"],
            'call run(job, rows=rows, name="x", options=["--retry", "all"]) again in Python, with'
            " the same job and rows",
        ),
    ],
)
def test_a_run_of_the_library_goes_on_by_a_call(command, text):
    assert command_text(command) == text


@pytest.mark.parametrize(
    ("options", "from_pipe"),
    [("-i -", True), ("--input=-", True), ("-o -", False), ("-i rows.jsonl -o -", False)],
)
def test_advice_asks_for_the_rows_of_a_pipe_only_where_they_came_from_one(options, from_pipe):
    command = ["bagent", "run", "job.yaml", *options.split()]
    lines = dict(next_step(Advice(75, "job", "runs/job", command), {}))
    assert ("standard input" in lines["advice"]) == from_pipe
