"""Questions about documents over two real vLLM: where they go, and what the caches knew of them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from real.serve_vllm import VllmServer
from support.cli import Completed, run_bagent
from support.jobs import parquet, results_by_id, write_job

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

Json = Any
WORDS = ["gene", "cell", "river", "stone", "light", "market", "paper", "house", "green", "north"]
DOCUMENTS, QUESTIONS = 15, 5
QUIET = ["--no-enable-prompt-tokens-details"]
BAND = 0.02
"""Between what is told and what the engines counted: a request beside the rows, to learn from."""


@pytest.fixture(scope="module")
def pair(logs: Path) -> Iterator[list[VllmServer]]:
    """Two vLLM of this file's own, each on a core of its own."""
    servers = [
        VllmServer("tiny", log=logs / f"vllm-cache-{core}.log", core=core) for core in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        starting = [pool.submit(server.start) for server in servers]
        try:
            yield [one.result() for one in starting]
        finally:
            for server in servers:
                server.stop()


@pytest.fixture(scope="module")
def quiet(logs: Path) -> Iterator[VllmServer]:
    """A vLLM whose answers do not tell what was cached."""
    with VllmServer("tiny", QUIET, log=logs / "vllm-quiet.log", core=1) as server:
        yield server


def questions(seed: str, documents: int = DOCUMENTS, each: int = QUESTIONS) -> list[Json]:
    """Rows that no server has seen: the first question of each document, then the second."""
    random = Random(seed)
    texts = [" ".join(random.choices(WORDS, k=260)) for _ in range(documents)]
    return [
        {"id": f"{number} {place}", "document": text, "text": f"{place}: {WORDS[place]}?"}
        for place in range(each)
        for number, text in enumerate(texts)
    ]


class Counted:
    """What the engines counted from here on: prompt tokens looked up, and found, of each."""

    def __init__(self, *servers: VllmServer) -> None:
        self._servers = servers
        self._before = self._now()

    def _now(self) -> list[tuple[float, float]]:
        return [
            (one.metric(f"{name}_queries_total"), one.metric(f"{name}_hits_total"))
            for one in self._servers
            for name in ["vllm:prefix_cache"]
        ]

    def shares(self) -> list[float]:
        """Found of looked up, at each server."""
        grown = [(q - p, h - g) for (q, h), (p, g) in zip(self._now(), self._before, strict=True)]
        self.queries, self.hits = (sum(column) for column in zip(*grown, strict=True))
        return [hits / queries for queries, hits in grown]

    @property
    def share(self) -> float:
        """Found of looked up, at all."""
        self.shares()
        return self.hits / self.queries


def ask(folder: Path, rows: list[Json], *servers: VllmServer, **keys: Json) -> Completed:
    """Run a job of ``rows`` over ``servers``; each answer is one of two words."""
    (folder / "hosts.txt").write_text("".join(f"{one.address}\n" for one in servers))
    usual: dict[str, Json] = {
        "backend": "vllm",
        "hostfile": "hosts.txt",
        "model": "tiny",
        "prompt": {"system": "Answer.", "user": "{{ document }}\n{{ text }}"},
        "sampling": {
            "temperature": 0,
            "max_tokens": 8,
            "extra": {"structured_outputs": {"choice": ["yes", "no"]}},
        },
        "batching": {"mode": "single"},
    }
    job = write_job(folder, "vllm://", rows, **usual | keys)
    done = run_bagent(["run", job], folder, timeout=600)
    assert done.code == 0, done.err
    assert {
        row["status"] for row in results_by_id(folder, f"runs/{keys.get('name', 'job')}").values()
    } == {"ok"}
    return done


def cache_line(done: Completed) -> str:
    """The summary's word on caches."""
    found = re.search(r"^cache +(.*)$", done.err, re.MULTILINE)
    assert found, done.err
    return found[1]


def share_told(done: Completed) -> float:
    """The share that the summary tells, 0 to 1: by the answers, else by counters."""
    return float(cache_line(done).partition("%")[0]) / 100


@pytest.mark.parametrize("mode", ["single", "auto"])
def test_summary_tables_and_engines_tell_the_same_hit_rate(
    pair: list[VllmServer], job_dir: Path, mode: str
) -> None:
    counted = Counted(*pair)
    rows = questions(f"same {mode}")
    done = ask(job_dir, rows, *pair, batching={"mode": mode})
    engines = dict(zip([one.address for one in pair], counted.shares(), strict=True))
    assert share_told(done) == pytest.approx(counted.share, abs=BAND)
    samples: dict[str, list[Json]] = defaultdict(list)
    for one in parquet(job_dir / "runs/job", "endpoints"):
        if one["cache_queries"] is not None:
            samples[one["endpoint"]].append((one["cache_queries"], one["cache_hits"]))
    for name, found in samples.items():
        (first_queries, first_hits), (queries, hits) = min(found), max(found)
        share = (hits - first_hits) / (queries - first_queries)
        assert share == pytest.approx(engines[name], abs=BAND)
    attempts = parquet(job_dir / "runs/job", "attempts")
    cached = sum(one["cached_tokens"] for one in attempts)
    prompt = sum(one["prompt_tokens"] for one in attempts)
    assert cached / prompt == pytest.approx(counted.share, abs=BAND)


def test_documents_are_read_nearly_once_and_by_both_endpoints(
    pair: list[VllmServer], job_dir: Path
) -> None:
    rows = questions("once", 25, 6)  # more than the 64 rows that each endpoint begins with
    counted = Counted(*pair)
    ask(job_dir, rows, *pair, batching={"mode": "auto"})
    attempts = parquet(job_dir / "runs/job", "attempts")
    # At best five sixths, less a part of a block for each row. Who has room first decides
    # where the last questions go, so tokens are counted, and not the documents that never moved.
    assert counted.share > 0.75
    rows_of = Counter(one["endpoint"] for one in attempts)
    assert min(rows_of.values()) >= 45, rows_of


def test_care_for_caches_finds_more_than_none(pair: list[VllmServer], job_dir: Path) -> None:
    shares = {}
    for mode in ("never", "auto"):
        counted = Counted(*pair)
        # an odd number of documents: an even one meets the same endpoint in turn, by chance
        batching = {"mode": "single", "prefix": mode}
        ask(job_dir, questions(mode), *pair, batching=batching, name=mode)
        shares[mode] = counted.share
    assert shares["auto"] > shares["never"] + 0.1


def test_where_answers_do_not_tell_counters_do(quiet: VllmServer, job_dir: Path) -> None:
    counted = Counted(quiet)
    done = ask(job_dir, questions("quiet"), quiet)
    assert "by the counters of 1 endpoint" in cache_line(done)
    assert share_told(done) == pytest.approx(counted.share, abs=BAND)
    attempts = parquet(job_dir / "runs/job", "attempts")
    assert {one["cached_tokens"] for one in attempts} == {None}
