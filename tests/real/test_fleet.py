"""Two real vLLM and a real Dynamo frontend, which can do different things, as one fleet."""

from __future__ import annotations

import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from real.parts import LlmServer
from real.serve_dynamo import DynamoMocker
from real.serve_vllm import VllmServer
from support.cli import Completed, Running, run_bagent
from support.jobs import journal_lines, results_by_id, wait_until, write_job
from support.run_outcomes import NO_TABLES

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

Json = Any
NARROW = ["--max-num-seqs=8", "--max-num-queued-reqs=40", "--max-model-len=3072"]
"""Of the second vLLM: what is more than this many is refused with 503."""
BUSY = ["--load-aware", "--active-decode-blocks-threshold", "0.01"]
BUSY += ["--active-prefill-tokens-threshold", "100"]
"""Of a Dynamo frontend that refuses with 529 what its workers have no room for."""

SLOW = ["--speedup-ratio", "1", "--max-num-seqs", "8"]
"""Of mocked engines: as fast as real ones; of an option given twice the last counts."""


@pytest.fixture(scope="module")
def narrow(logs: Path, request: pytest.FixtureRequest) -> Iterator[VllmServer]:
    """A vLLM of this file's own: it is killed, and it has little room."""
    server = VllmServer("tiny", NARROW, log=logs / "vllm-narrow.log")
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(server.start)
        try:
            request.getfixturevalue("vllm_tiny")  # beside it: each start takes half a minute
            yield starting.result()
        finally:
            starting.result().stop()


@pytest.fixture(scope="module")
def fleet(
    vllm_tiny: VllmServer, narrow: VllmServer, dynamo_tiny: DynamoMocker
) -> tuple[VllmServer, VllmServer, DynamoMocker]:
    """All three, up."""
    return vllm_tiny, narrow, dynamo_tiny


def write_fleet(
    folder: Path, rows: int | list[Json], *servers: LlmServer | str, **keys: Json
) -> Path:
    """A job of ``rows`` (a number: usual ones) over ``servers``; text is an address with tags."""
    lines = [one if isinstance(one, str) else one.address for one in servers]
    (folder / "hosts.txt").write_text("".join(f"{line}\n" for line in lines))
    usual: dict[str, Json] = {
        "backend": "vllm",
        "hostfile": "hosts.txt",
        "model": "tiny",
        "sampling": {"temperature": 0, "max_tokens": 8},
        "results": NO_TABLES,
    }
    return write_job(folder, "vllm://", rows, **usual | keys)


def run(folder: Path, job: Path) -> Completed:
    """Run to the end; answers of the models here end by their limit alone."""
    return run_bagent(["run", job, "--no-canary"], folder, timeout=300)


def attempts(folder: Path) -> list[dict[str, Json]]:
    """Every row's part in every request."""
    return [line for line in journal_lines(folder / "runs/job") if "sent" in line]


def good(folder: Path) -> list[dict[str, Json]]:
    """The attempts that brought an answer."""
    return [one for one in attempts(folder) if "error_kind" not in one]


def served(folder: Path) -> dict[str, set[int]]:
    """The sizes of the groups that each endpoint answered well."""
    sizes: dict[str, set[int]] = {}
    for one in good(folder):
        sizes.setdefault(one["endpoint"], set()).add(one["group_size"])
    return sizes


def all_answered(folder: Path, count: int, done: Completed) -> None:
    """Every row has an answer, cut off at its limit as such models do, or whole."""
    rows = results_by_id(folder)
    assert len(rows) == count, done.err
    assert {row["status"] for row in rows.values()} <= {"ok", "truncated"}, done.err


def tokens(server: VllmServer, text: str) -> int:
    """How many tokens a text has."""
    asked = msgspec.json.encode({"model": "tiny", "prompt": text})
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{server.address}/tokenize", asked, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(msgspec.json.decode(answer.read())["count"])


def test_texts_travel_in_lists_and_each_endpoint_takes_its_share(
    fleet: tuple[VllmServer, VllmServer, DynamoMocker], job_dir: Path
) -> None:
    lists = {"mode": "completions", "size": 16}
    raw = {"raw": "id={{ id }} {{ text }}"}
    job = write_fleet(job_dir, 600, *fleet, prompt=raw, batching=lists)
    done = run(job_dir, job)
    all_answered(job_dir, 600, done)
    sizes = served(job_dir)
    assert set(sizes) == {server.address for server in fleet}
    assert all(max(found) == 16 for found in sizes.values()), sizes


def test_chats_travel_as_each_endpoint_can_carry_them(
    fleet: tuple[VllmServer, VllmServer, DynamoMocker], job_dir: Path
) -> None:
    *engines, router = fleet
    job = write_fleet(job_dir, 400, *fleet, batching={"mode": "chat", "size": 16})
    all_answered(job_dir, 400, run(job_dir, job))
    sizes = served(job_dir)
    # the batch route of chats is vLLM's: Dynamo has none, and gets one call after another
    assert sizes[router.address] == {1}
    assert [max(sizes[engine.address]) for engine in engines] == [16, 16], sizes


@pytest.mark.parametrize("prompt", [{"raw": "id={{ id }} {{ text }}"}, {"user": "{{ text }}"}])
def test_rows_go_where_the_context_holds_them_and_nowhere_if_none_does(
    vllm_tiny: VllmServer, narrow: VllmServer, job_dir: Path, prompt: dict[str, str]
) -> None:
    each = tokens(vllm_tiny, "word " * 1000) / 1000
    wanted = {"short": 20, "fits": 3000, "wide": 3500, "never": 4150, "longest": 20_000}
    texts = {name: "word " * int(count / each) for name, count in wanted.items()}
    rows = [{"id": f"{name} {n}", "text": texts[name]} for n in range(3) for name in texts]
    job = write_fleet(job_dir, rows, vllm_tiny, narrow, prompt=prompt)
    done = run(job_dir, job)
    assert done.code == 1, done.err
    found = results_by_id(job_dir)
    kinds = {name: (row["status"], row["error_kind"]) for name, row in found.items()}
    for name in kinds:
        if name.startswith(("never", "longest")):
            assert kinds[name] == ("failed", "context_overflow"), found[name]
            assert found[name]["attempts"] == 0
            assert "4096" in found[name]["error"]
        else:
            assert kinds[name][0] in ("ok", "truncated"), found[name]
    sent = {(one["id"].split()[0], one["endpoint"]) for one in attempts(job_dir)}
    assert ("wide", vllm_tiny.address) in sent
    assert ("wide", narrow.address) not in sent
    assert {one.get("error_kind") for one in attempts(job_dir)} == {None}


def test_an_endpoint_killed_in_the_middle_and_started_again_costs_no_row(
    narrow: VllmServer, logs: Path, job_dir: Path
) -> None:
    folder = job_dir / "runs" / "job"

    def rows_of(server: LlmServer) -> int:
        lines = journal_lines(folder) if folder.exists() else []
        return sum(line.get("endpoint") == server.address and "status" in line for line in lines)

    with DynamoMocker([], SLOW, log=logs / "dynamo-slow.log") as slow:
        # It goes on one row after another, so that much is left once the killed one is back.
        job = write_fleet(
            job_dir,
            800,
            narrow,
            f"{slow.address} max_concurrency=1",
            batching={"mode": "single"},
            sampling={"temperature": 0, "max_tokens": 40},
            limits={"per_endpoint": 16},
        )
        with Running(["run", job, "--no-canary"], job_dir) as running:
            wait_until(lambda: rows_of(narrow) > 60)
            narrow.kill()
            running.wait_for_err("does not answer", timeout=60.0)
            before, beside = rows_of(narrow), rows_of(slow)
            narrow.start()
            wait_until(lambda: rows_of(narrow) > before + 60)
            assert rows_of(slow) > beside
            done = running.finish(timeout=240)
    all_answered(job_dir, 800, done)
    assert f"{narrow.address} answers again" in done.err


def test_refusals_with_503_and_529_cost_time_and_no_row(
    narrow: VllmServer, logs: Path, job_dir: Path
) -> None:
    with DynamoMocker(BUSY, SLOW, log=logs / "dynamo-busy.log") as busy:
        job = write_fleet(
            job_dir,
            600,
            narrow,
            busy,
            prompt={"user": "id={{ id }} " + "and so on " * 20},
            batching={"mode": "single"},
            limits={"per_endpoint": 160},
            sampling={"temperature": 0, "max_tokens": 30},
        )
        done = run(job_dir, job)
    all_answered(job_dir, 600, done)
    codes = Counter((one["endpoint"], one.get("status_code")) for one in attempts(job_dir))
    assert codes[narrow.address, 503], codes
    assert codes[busy.address, 529], codes
    assert len(good(job_dir)) == 600
