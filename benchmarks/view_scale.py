"""How quick ``bagent view`` is over a large run, and how much memory its server takes.

    python benchmarks/view_scale.py make FOLDER [--rows 1000000]    a finished run, and its tables
    python benchmarks/view_scale.py measure FOLDER [--repeats 3]    pages and filters of a server
    python benchmarks/view_scale.py all FOLDER [--rows N]           both

The run was not sent anywhere: its journal is written by the code that a run uses. Rows have eight
endpoints of which one is slow, four fields of the answer, and 3 % failures of three kinds. The
server is the real command, started anew for each repeat. Each request is measured by wall seconds,
and by the CPU seconds that the server took for it; names that end in ``again`` are a second request
for the same page. ``--out FILE`` keeps the numbers as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from msgspec import Raw
from scale import BAGENT

from bagent.rows import RowsConfig, open_rows
from bagent.store.journal.journal import Journal
from bagent.store.run_dir import RunDir, RunInfo, Start
from bagent.types import Attempt, EndpointSample, Outcome, Row

TOPICS = ("astronomy", "genomics", "chemistry", "history", "economics", "law")
LABELS = ("positive", "negative", "neutral", "mixed")
TEXT = "the quick brown fox reads long papers about genes and proteins while servers answer slowly"
WORDS = TEXT.split()
PROBLEMS = (
    ("schema", "invalid", 'not what the schema asks for: /label: "hgih" is not one of the four'),
    ("timeout", "failed", "no answer in 30 s"),
    ("truncated", "truncated", "cut off at 64 tokens"),
)
COLUMNS = [
    *(("label", "VARCHAR"), ("certain", "BOOLEAN")),
    *(("score", "BIGINT"), ("reason", "VARCHAR")),
]
ENDPOINTS = [f"http://node{number:02d}:8000" for number in range(8)]
BEGAN = 1.7e9
A_SECOND = 400
"""Rows that end in a second of the made run."""


def field(name: str, test: str, *values: object) -> str:
    """Return the query of a filter by a field of the answer."""
    return "f=" + quote(json.dumps(["answer", name, test, *values], separators=(",", ":")))


REQUESTS = {
    "run page": "",
    "its causes and endpoints": "overview",
    "run page again": "",
    "causes and endpoints again": "overview",
    "answers": "answers",
    "what rows share": "findings",
    "rows": "rows",
    "rows again": "rows",
    "status = invalid": "rows?status=invalid",
    "count of status = invalid": "count?status=invalid",
    "label = mixed": "rows?" + field("label", "is", "mixed"),
    "count of label = mixed": "count?" + field("label", "is", "mixed"),
    "count of score 10 to 12": "count?" + field("score", "between", None, 10, 12),
    "search for an id": "rows?q=r999",
    "count of a search without a hit": "count?q=nosuchword",
    "longest time first": "rows?sort=latency_ms&desc=1",
    "longest answer first": "rows?sort=length&desc=1",
    "endpoint and cause": f"rows?endpoint={quote(ENDPOINTS[5])}&cause=timeout",
    "SQL": "count?sql=" + quote("attempts > 1"),
}


def write_input(path: Path, count: int) -> None:
    """Write rows whose texts differ in length."""
    rng = random.Random(3)
    with path.open("w") as lines:
        for number in range(count):
            size = 25 + 60 * (number % 6 == 1)
            row = {"id": f"r{number}", "topic": TOPICS[number % 6], "year": 1990 + number % 35}
            lines.write(json.dumps(row | {"abstract": " ".join(rng.choices(WORDS, k=size))}) + "\n")


def outcome_of(row: Row, rng: random.Random) -> Outcome:
    """Return what became of a row."""
    number, began = row.index, BEGAN + row.index / A_SECOND
    latency = (3800 if number % 8 == 5 else 900) * rng.uniform(0.6, 1.6)
    answer = {
        "label": LABELS[min(3, int(rng.expovariate(1)))],
        "certain": rng.random() < 0.8,
        "score": round(rng.gauss(60, 18)),
    }
    if number % 7:
        answer["reason"] = " ".join(rng.choices(WORDS, k=12 + 40 * (number % 6 == 1)))
    raw = json.dumps(answer)
    outcome = Outcome(
        key=f"{row.key:016x}", row=number, id=row.id, source=row.source, line=row.line,
        stage="main", status="ok", output=Raw(raw.encode()), text=raw, finish_reason="stop",
        endpoint=ENDPOINTS[number % 8], model="canned", attempts=1, turns=1, prompt_tokens=120,
        completion_tokens=len(raw) // 4, queue_ms=3.0, latency_ms=latency, started_at=began,
        finished_at=began + latency / 1000, cost_usd=0.00002,
    )  # fmt: skip
    if number % 33 == 17:
        outcome.error_kind, outcome.status, outcome.error = PROBLEMS[number // 33 % 3]
        outcome.output = None
    return outcome


def make(folder: Path, count: int) -> None:
    """Write the input, the run and its tables."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "rows.jsonl"
    write_input(source, count)
    config = RowsConfig(
        inputs=(str(source.resolve()),), base=folder.resolve(), fields=("abstract",)
    )
    run = RunDir.create(folder / "run")
    journal = Journal.open(run.path, "all", clock=time.monotonic, report=print)
    rng = random.Random(5)
    reader = open_rows(config)
    for row in (row for batch in reader.batches() for row in batch):
        outcome = outcome_of(row, rng)
        journal.write(outcome)
        journal.write_attempts([
            Attempt(
                key=outcome.key, row=row.index, id=row.id, stage="main", answer=0, turn=1, try_=1,
                endpoint=str(outcome.endpoint), sent=outcome.started_at or 0.0,
                done=outcome.finished_at, status_code=200, group=f"g{row.index}", group_size=1,
                prompt_tokens=120, completion_tokens=outcome.completion_tokens,
            )])  # fmt: skip
        if row.index % 4000 == 0:
            at = outcome.started_at or 0.0
            for name in ENDPOINTS:
                sample = EndpointSample(endpoint=name, at=at, healthy=True, in_flight=16, limit=32)
                journal.write_sample(sample)
    journal.close()
    reader.close()
    ended = BEGAN + count / A_SECOND
    start = Start(at=BEGAN, ended_at=ended, exit_code=1, command=["bagent", "run", "job.yaml"])
    job = {"name": "large", "prompt": {"user": "Judge this: {{ abstract }}"}}
    run.save(RunInfo("run", rows=config.to_json(), job=job, answer_columns=COLUMNS, starts=[start]))
    subprocess.run([sys.executable, "-m", "bagent.store.tables.build", str(run.path)], check=True)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int, name: str) -> int:
    """Return ``VmRSS`` or ``VmHWM`` of a process in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) // 1024
    return 0


def fetch(address: str) -> bytes:
    """Return a page."""
    with urllib.request.urlopen(address) as answer:
        return bytes(answer.read())


def measure(folder: Path, repeats: int) -> Iterator[dict[str, object]]:
    """Yield the numbers of each request to a server that begins anew in each repeat."""
    for repeat in range(repeats):
        command = [*BAGENT, "view", str((folder / "run").resolve())]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            base = server.stdout.readline().strip()
            for what, path in REQUESTS.items():
                cpu, began = cpu_seconds(server.pid), time.perf_counter()
                page = fetch(f"{base}run/run/{path}")
                yield {
                    "what": what,
                    "repeat": repeat,
                    "wall_s": round(time.perf_counter() - began, 3),
                    "cpu_s": round(cpu_seconds(server.pid) - cpu, 3),
                    "bytes": len(page),
                    "rss_mb": memory_mb(server.pid, "VmRSS"),
                    "load": round(os.getloadavg()[0], 1),
                }
            yield {"what": "memory", "repeat": repeat, "peak_mb": memory_mb(server.pid, "VmHWM")}
        finally:
            server.terminate()
            server.wait()


def main() -> None:
    """Run the command of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["make", "measure", "all"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.what != "measure" and not (options.folder / "run").exists():
        make(options.folder, options.rows)
    if options.what == "make":
        return
    result = []
    for numbers in measure(options.folder, options.repeats):
        print(json.dumps(numbers), flush=True)
        result.append(numbers)
    if options.out:
        report = {"what": "view", "rows": options.rows, "requests": result}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
