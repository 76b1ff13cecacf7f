"""Hosted backends against llmock: faults of every kind, quotas, and a judge of how they are met."""

from __future__ import annotations

import itertools
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from real.serve_llmock import Llmock
from support.cli import Completed
from support.jobs import parquet, results, write_job

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

Bagent = Callable[..., Completed]
FAULTS = [
    "--response-style=echo",
    *("--error-rate", "429=0.2", "--error-rate", "529=0.1"),
    *("--stream-fault", "truncate=0.2", "--stream-fault", "disconnect=0.1"),
]
KEY = "key-5up3rs3cret"
ENV = {"ANTHROPIC_API_KEY": KEY, "OPENAI_API_KEY": KEY}
MODEL = {"anthropic": "claude-sonnet-4-5", "openai": "gpt-4o"}
PATH = {"anthropic": "anthropic", "openai": "v1"}
RUN = ["run", "job.yaml", "--progress", "plain"]


@pytest.mark.parametrize(("kind", "rows"), [("anthropic", 2000), ("openai", 200)])
def test_every_row_is_whole_whatever_breaks_on_the_way(
    kind: str, rows: int, job_dir: Path, logs: Path, bagent: Bagent
) -> None:
    """The judge holds nothing against the client, and every row is ok.

    51 % of streamed tries fail, each by a draw of its own: 30 % are refused, 21 % break. Asked for
    streams alone, 2,000 * 0.51 ** 10 = 2.4 rows would need an eleventh try, which the judge calls
    a storm. A row that failed four times is asked whole once it is refused: then 0.0054 rows do.
    """
    with Llmock(FAULTS, log=logs / f"llmock-{kind}.log") as server:
        url = f"{kind}+http://{server.address}/{PATH[kind]}"
        limits = {"concurrency": 64, "retries": 40}
        # Long enough that no stream of OpenAI's is cut between its finish reason and its counts,
        # where the answer is whole, and taken.
        prompt = {"user": "what is echoed has seven words at least: id={{ id }} {{ text }}"}
        keys = {"model": MODEL[kind], "stream": True, "limits": limits, "prompt": prompt}
        write_job(job_dir, url, rows, **keys)
        done = bagent(RUN, env=ENV, timeout=550)
        verdict, asked = server.verdict, server.requests
    assert done.code == 0, done.err
    found = results(job_dir)
    assert len(found) == rows
    for row in found:
        assert row["status"] == "ok"
        assert row["text"].endswith(f"id={row['id']} text number {row['id'][1:]}")
    assert verdict["faults_injected"] > 0.8 * rows
    # Not even a warning: of a list of models that was refused, of pauses that were alike. The judge
    # counts a pause until it gets to the request: where this machine is so busy that pauses look
    # alike to it, they grew all the same.
    attempts = parquet(job_dir / "runs" / "job", "attempts")
    bodies = {one["seq"]: msgspec.json.encode(one["body"]).decode() for one in asked}
    for one in verdict["findings"]:
        assert one["code"] == "no_backoff", one
        name = bodies[one["requests"][0]].partition(" id=r")[2].partition(" ")[0]
        assert grew([try_ for try_ in attempts if try_["row"] == int(name) - 1]), one
    assert verdict["passed"] is True
    for file in job_dir.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes()
    assert KEY not in done.out + done.err


def grew(tries: list[dict[str, Any]]) -> bool:
    """Whether the pauses of a row after failures for which nobody named a time grew."""
    ordered = sorted(tries, key=lambda one: one["sent"])
    pauses = [
        after["sent"] - one["done"]
        for one, after in itertools.pairwise(ordered)
        if one["error_kind"] == "bad_response"
    ]
    return any(after > 1.3 * before for before, after in itertools.pairwise(pauses))


@pytest.mark.parametrize("kind", ["anthropic", "openai"])
def test_a_quota_that_answers_tell_of_is_kept_without_a_refusal(
    kind: str, job_dir: Path, logs: Path, bagent: Bagent
) -> None:
    per_minute, left, rows = 360, 60, 120
    with Llmock(["--rpm", str(per_minute)], log=logs / f"llmock-rpm-{kind}.log") as server:
        base = f"{server.address}/{PATH[kind]}"
        for _ in range(per_minute - left):  # others use the same account
            spend(kind, f"http://{base}", MODEL[kind])
        # Without a word of the quota all rows would be sent at once, and half of them refused.
        limits = {"concurrency": 16}
        write_job(job_dir, f"{kind}+http://{base}", rows, model=MODEL[kind], limits=limits)
        done = bagent(RUN, env=ENV, timeout=300)
        verdict = server.verdict
    assert done.code == 0, done.err
    assert f"allows {per_minute} requests a minute" in done.err
    assert verdict["findings"] == []
    attempts = parquet(job_dir / "runs" / "job", "attempts")
    assert [one["status_code"] for one in attempts] == [200] * rows


def spend(kind: str, base: str, model: str) -> None:
    """One call with the same key."""
    path = "/v1/messages" if kind == "anthropic" else "/chat/completions"
    body = {"model": model, "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    headers = {"x-api-key": KEY, "Authorization": f"Bearer {KEY}"}
    headers |= {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
    request = urllib.request.Request(base + path, msgspec.json.encode(body), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.read()
