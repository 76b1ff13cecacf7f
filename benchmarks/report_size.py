"""How long the report of a large run takes, and its first results.

    python benchmarks/report_size.py make FOLDER [--rows 1000000]   a finished run, and its tables
    python benchmarks/report_size.py measure FOLDER [--repeats 3]   report, and results --limit 10

The run was not sent anywhere: its journal is written by the code that a run uses. Rows have four
endpoints of which one is slow, times and tokens that differ, a try each, and 3 % failures of three
kinds. ``--out FILE`` keeps the numbers of ``measure`` as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from msgspec import Raw
from scale import BAGENT, timed

from bagent.rows import RowsConfig, open_rows
from bagent.store.journal.journal import Journal
from bagent.store.run_dir import RunDir, RunInfo, Start
from bagent.types import Attempt, Outcome, Row

WORDS = "The ledger of the harbour lists nine ships, two of them late, and one without a name. "
PROBLEMS = (
    ("timeout", "failed", "no answer within 300 s"),
    ("schema", "invalid", "/score: {} is greater than the maximum of 10"),
    ("rejected", "failed", "HTTP 400: this prompt has {} tokens, which is too long"),
)


def write_input(path: Path, count: int) -> None:
    """Rows of three fields, with texts of different lengths."""
    with path.open("w") as lines:
        for number in range(count):
            row = {
                "id": f"ship-{number}",
                "kind": ("note", "letter", "list")[number % 3],
                "text": WORDS * (1 + number % 4),
            }
            lines.write(json.dumps(row) + "\n")


def outcome_of(row: Row) -> Outcome:
    """What became of a row."""
    number = row.index
    slow = number % 4 == 3
    began = 1.7e9 + number / 300
    latency = (900.0 if slow else 300.0) + number % 997
    result = Outcome(
        key=f"{row.key:016x}", row=number, id=row.id, source=row.source, line=row.line,
        stage="main", status="ok", text=None, finish_reason="stop", model="canned",
        endpoint=f"http://node{number % 4}:8000", attempts=1, turns=1,
        prompt_tokens=60 + 20 * (number % 4), completion_tokens=40 + number % 97, queue_ms=0.5,
        ttft_ms=20.0 + number % 31, latency_ms=latency, started_at=began,
        finished_at=began + latency / 1000, prompt_sha256="0" * 64, output_sha256="1" * 64,
    )  # fmt: skip
    if number % 33:
        result.output = Raw(b'{"score":%d,"why":"two ships are late"}' % (number % 10))
        result.text = bytes(result.output).decode()
        return result
    kind, status, message = PROBLEMS[number // 33 % 3]
    result.error_kind, result.status, result.error = kind, status, message.format(number)  # type: ignore[assignment]
    return result


def make(folder: Path, count: int) -> None:
    """A run of ``count`` rows that has ended, with its tables."""
    folder.mkdir(parents=True)
    write_input(folder / "rows.jsonl", count)
    config = RowsConfig(inputs=(str(folder / "rows.jsonl"),), base=folder, fields=("id", "text"))
    run = RunDir.create(folder / "run")
    journal = Journal.open(run.path, "all", clock=time.monotonic, report=print)
    source = open_rows(config)
    for batch in source.batches():
        for row in batch:
            result = outcome_of(row)
            journal.write(result)
            started = result.started_at or 0.0
            journal.write_attempts([
                Attempt(
                    key=result.key, row=row.index, stage="main", answer=0, turn=1, try_=1,
                    endpoint=result.endpoint or "", group=f"g{row.index}", group_size=1,
                    sent=started,
                    first_byte=started + 0.02, first_token=started + 0.02, done=result.finished_at,
                    status_code=200, error_kind=result.error_kind, error=result.error,
                    prompt_tokens=result.prompt_tokens, completion_tokens=result.completion_tokens,
                    id=row.id,
                )])  # fmt: skip
    journal.close()
    source.close()
    job = {"name": "ships", "prompt": {"user": "Is a ship late? {{ text }}"}}
    info = RunInfo(
        "run", rows=config.to_json(), job=job, answer_columns=[("score", "BIGINT")],
        starts=[Start(at=1.7e9, exit_code=1)],
    )  # fmt: skip
    run.save(info)
    subprocess.run([sys.executable, "-m", "bagent.store.tables.build", str(run.path)], check=True)


def measure(folder: Path, repeats: int) -> list[dict]:
    """Each command in turn: wall and CPU seconds, peak memory, and the size of the page."""
    result = []
    run, page = str(folder / "run"), folder / "run" / "report.html"
    for repeat in range(repeats):
        for what, command in (
            ("report", ["report", run]),
            ("results --limit 10", ["results", run, "--limit", "10"]),
        ):
            timing = {"what": what, "repeat": repeat} | timed([*BAGENT, *command], folder)
            timing["load"] = round(os.getloadavg()[0], 1)
            if what == "report":
                timing["page_kb"] = page.stat().st_size // 1000
            result.append(timing)
            print(json.dumps(timing), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["make", "measure"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.what == "make":
        make(options.folder, options.rows)
        return
    result = measure(options.folder, options.repeats)
    if options.out:
        report = {"what": "report", "rows": options.rows, "runs": result}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
