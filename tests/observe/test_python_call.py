"""The commands of runs that the library started are told as calls."""

from __future__ import annotations

import pytest

from bagent.observe.next_step import Advice, command_text, next_step

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
def test_a_run_of_the_library_goes_on_by_a_call(command: list[str], text: str) -> None:
    assert command_text(command) == text


@pytest.mark.parametrize(
    ("options", "from_pipe"),
    [("-i -", True), ("--input=-", True), ("-o -", False), ("-i rows.jsonl -o -", False)],
)
def test_advice_asks_for_the_rows_of_a_pipe_only_where_they_came_from_one(options, from_pipe):
    command = ["bagent", "run", "job.yaml", *options.split()]
    lines = dict(next_step(Advice(75, "job", "runs/job", command), {}))
    assert ("standard input" in lines["advice"]) == from_pipe
