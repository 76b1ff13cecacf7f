"""From journal to Parquet and ``run.duckdb`` at size, the way a run's end does it.

    python benchmarks/tables_size.py make FOLDER [--rows 1000000] [--answers long]
    python benchmarks/tables_size.py measure FOLDER [--repeats 2] [--out FILE] [--parquet-only]

``make`` writes a run directory with the code that a run uses: outcomes in the order in which rows
finish (shuffled within 300 rows, seeded), each with an attempt, all ok. Texts, numbers, times and
hashes differ from row to row, as those of real runs do. ``long`` answers hold five findings of six
words (470 characters, a line of 1.6 KB), ``short`` ones a label and a score (0.7 KB), ``same`` are
long and equal. ``measure`` runs the command that makes tables, Parquet only and with
``run.duckdb``, in turns: wall and CPU seconds, peak RSS, load average before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from random import Random

from canned_server import CONTENT
from client_cost import start_server, write_rows
from scale import BAGENT, timed, write_job

NEAR = 300
KEYS = {"results": {"keep_input": False, "duckdb": True, "parquet": True}}


def shuffled(count: int, random: Random) -> Iterator[int]:
    """The numbers from 10 to ``count - 10`` in an order in which rows may finish."""
    waiting: list[int] = []
    for number in range(10, count - 10):
        waiting.append(number)
        if len(waiting) > NEAR:
            offset = random.randrange(NEAR)
            waiting[offset], waiting[-1] = waiting[-1], waiting[offset]
            yield waiting.pop()
    yield from waiting


class Answers:
    """Answers of one kind; words are drawn from 4,000."""

    def __init__(self, random: Random, kind: str) -> None:
        self._random = random
        self._kind = kind
        letters = "abcdefghijklmnopqrstuvwxyz"
        self._words = [
            "".join(random.choices(letters, k=random.randint(2, 9))) for _ in range(4000)
        ]

    def next(self) -> dict:
        if self._kind == "short":
            label = self._random.choice(["accept", "reject"])
            return {"verdict": label, "score": self._random.randint(0, 9)}
        results = json.loads(CONTENT)
        if self._kind == "long":
            for finding in results["findings"]:
                finding["line"] = self._random.randint(1, 400)
                finding["message"] = " ".join(self._random.choices(self._words, k=6))
        return results


def make(folder: Path, count: int, kind: str) -> None:
    from msgspec import Raw

    from bagent.store.journal.journal import Journal
    from bagent.types import Attempt, Outcome

    folder.mkdir(parents=True)
    server, url = start_server(folder, 40, sorted(os.sched_getaffinity(0))[-1])
    out = folder / "run"
    try:
        few = write_rows(folder / "few.jsonl", 10)
        job = write_job(folder, url, few, **KEYS)
        timed([*BAGENT, "run", str(job), "-o", str(out), "--progress", "none"], folder)
    finally:
        server.kill()
    random = Random(7)
    answers = Answers(random, kind)
    journal = Journal.open(out, "all", clock=time.monotonic, report=print)
    for number in shuffled(count, random):
        answer = answers.next()
        at = 1.7e9 + number / 100 + random.random()
        key, group, spent = f"{random.getrandbits(64):016x}", f"g{number}", random.random() / 10
        journal.write_attempts([
            Attempt(
                key=key, row=number, stage="main", answer=0, turn=1, try_=1, endpoint="10.0.0.1:80",
                group=group, group_size=1, sent=at, first_byte=at + spent, done=at + spent,
                status_code=200, prompt_tokens=random.randint(100, 140),
                completion_tokens=random.randint(80, 100), id=f"r{number}",
            )])  # fmt: skip
        journal.write(
            Outcome(
                key=key, row=number, id=f"r{number}", source="rows.jsonl", line=number + 1,
                stage="main", status="ok", text=json.dumps(answer),
                output=Raw(json.dumps(answer, separators=(",", ":")).encode()),
                finish_reason="stop", model="canned", endpoint="10.0.0.1:80", attempts=1, turns=1,
                prompt_tokens=random.randint(100, 140), completion_tokens=random.randint(80, 100),
                queue_ms=random.random(), latency_ms=spent * 1000, started_at=at,
                finished_at=at + spent, prompt_sha256=sha256(b"p%d" % number).hexdigest(),
                output_sha256=sha256(b"o%d" % number).hexdigest(), first_try_valid=True,
                group=group, request_hash=f"{random.getrandbits(64):016x}",
            )
        )  # fmt: skip
    journal.close()


def measure(folder: Path, repeats: int, *, parquet_only: bool) -> list[dict]:
    run = folder / "run"
    rows = sum(path.read_bytes().count(b"\n") for path in run.glob("journal/rows-*.jsonl"))
    command = [sys.executable, "-m", "bagent.store.tables.build", str(run)]
    arms = {"Parquet": [*command, "--out", str(folder / "out")]}
    if not parquet_only:
        arms["Parquet and run.duckdb"] = command
    journal = sum(path.stat().st_size for path in run.glob("journal/*.jsonl"))
    results = []
    for repeat in range(repeats):
        for what, argv in list(arms.items())[:: -1 if repeat % 2 else 1]:
            load = os.getloadavg()[0]
            what_ran = {"rows": rows, "journal_mb": journal >> 20, "what": what}
            results.append(what_ran | {"load": round(load, 1)} | timed(argv, folder))
            print(results[-1], flush=True)
            shutil.rmtree(folder / "out", ignore_errors=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["make", "measure"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--answers", choices=["long", "short", "same"], default="long")
    parser.add_argument("--parquet-only", action="store_true")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.part == "make":
        make(options.folder, options.rows, options.answers)
        return
    results = measure(options.folder, options.repeats, parquet_only=options.parquet_only)
    if options.out:
        old = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
        text = json.dumps({"command": "tables_size.py measure", "runs": old + results}, indent=1)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
