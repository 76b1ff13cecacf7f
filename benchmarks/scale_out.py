"""Several processes on one run: what they gain, what Parsl costs, and bringing many parts together.

    python benchmarks/scale_out.py workers [--rows 50000]     one process, then --workers 2
    python benchmarks/scale_out.py parsl [--rows 200000]      --workers 2, then by Parsl
    python benchmarks/scale_out.py read [--rows 200000]       what a chunk spends on reading, of 16
    python benchmarks/scale_out.py merge [--rows 1000000] [--parts 64]

``workers`` and ``parsl`` send every row to the canned server. ``read`` reads the rows of some of 16
chunks, in turn without and with the notes that the first process makes for all, and sends nothing.
``merge`` writes the journals of all
parts with the code that a run uses, and measures what then reads them: tables, ``results``,
``status``, and one part that goes on. CPU seconds are those of all processes, also of those that
Parsl starts. ``--out FILE`` keeps the numbers as JSON, with the load of the machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from canned_server import CONTENT
from client_cost import start_server, write_rows
from scale import BAGENT, write_job

PR_SET_CHILD_SUBREAPER = 36  # prctl(2): what is orphaned below this process becomes its child
END_SECONDS = 60


def measured(command: list[str], folder: Path) -> dict:
    """Run a command and all it starts to the end: wall and CPU seconds, load of the machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    with (folder / "stderr").open("wb") as errors:
        child = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=errors)
        code = child.wait()
    wall = time.perf_counter() - started
    if code:
        raise SystemExit(f"{command} ended with {code}: {(folder / 'stderr').read_text()[-2000:]}")
    reap(folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "wall_s": round(wall, 2),
        "cpu_s": round(cpu, 2),
        "max_rss_mb": round(after.ru_maxrss / 1024, 1),
        "load": round(os.getloadavg()[0], 1),
    }


def reap(folder: Path) -> None:
    """Wait for orphans that work in ``folder``: theirs is the CPU time that would be missing."""
    end = time.monotonic() + END_SECONDS
    while time.monotonic() < end:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not any(works_in(pid, folder) for pid in Path("/proc").glob("[0-9]*")):
            return
        time.sleep(0.2)


def works_in(process: Path, folder: Path) -> bool:
    with suppress(OSError):
        return (process / "cwd").readlink() == folder and "canned" not in (
            process / "cmdline"
        ).read_text(errors="replace")
    return False


def run_arms(folder: Path, rows: int, arms: dict[str, list[str]], repeats: int) -> list[dict]:
    """Each arm in turn, the order turned round each time, on the same rows."""
    server, url = start_server(folder, 40, sorted(os.sched_getaffinity(0))[-1])
    results = []
    try:
        path = write_rows(folder / "rows.jsonl", rows)
        job = write_job(folder, url, path)
        for repeat in range(repeats):
            order = list(arms.items())[:: 1 if repeat % 2 == 0 else -1]
            for name, arguments in order:
                home = folder / f"{name}-{repeat}"
                home.mkdir()
                command = [*BAGENT, "run", str(job), "-o", str(home / "run"), *arguments]
                numbers = measured([*command, "--progress", "none"], home)
                rate = round(rows / numbers["wall_s"])
                results.append({"arm": name, "rows": rows, "rows_per_s": rate} | numbers)
                results[-1]["us_a_row"] = round(numbers["cpu_s"] / rows * 1e6)
                print(results[-1], flush=True)
    finally:
        server.kill()
    return results


def workers(folder: Path, options: argparse.Namespace) -> list[dict]:
    arms = {"one": [], "two": ["--workers", "2"]}
    return run_arms(folder, options.rows or 50_000, arms, options.repeats)


def parsl(folder: Path, options: argparse.Namespace) -> list[dict]:
    arms = {"workers": ["--workers", "2"], "parsl": ["--workers", "2", "--executor", "parsl"]}
    return run_arms(folder, options.rows or 200_000, arms, options.repeats)


def merge(folder: Path, options: argparse.Namespace) -> list[dict]:
    rows, parts = options.rows or 1_000_000, options.parts
    server, url = start_server(folder, 40, sorted(os.sched_getaffinity(0))[-1])
    try:
        out, job, size = write_parts(folder, url, rows, parts)
        print(f"{size} bytes of journal", flush=True)
        commands = {
            "tables": [sys.executable, "-m", "bagent.store.tables.build", str(out)],
            "results": [*BAGENT, "results", str(out), "--format", "jsonl"],
            "status": [*BAGENT, "status", str(out)],
            "a part that goes on": [
                *(*BAGENT, "run", str(job), "-o", str(out), "--progress", "none"),
                *("--shard", f"1/{parts}"),
            ],
        }
        results = []
        for name, command in commands.items():
            numbers = measured(command, folder)
            results.append({"what": name, "rows": rows, "parts": parts, "bytes": size} | numbers)
            print(results[-1], flush=True)
        return results
    finally:
        server.kill()


def write_parts(folder: Path, url: str, count: int, parts: int) -> tuple[Path, Path, int]:
    """A run directory in which all of ``count`` rows are finished, in ``parts`` journals."""
    from msgspec import Raw

    from bagent.rows import RowsConfig, open_rows
    from bagent.store.journal.journal import Journal
    from bagent.types import Outcome

    rows = write_rows(folder / "rows.jsonl", count)
    few = folder / "few.jsonl"
    with rows.open() as lines:
        few.write_text("".join(line for line, _ in zip(lines, range(10), strict=False)))
    results = {"keep_input": False, "parquet": True, "duckdb": True}
    job = write_job(folder, url, few, results=results | {"parquet": False, "duckdb": False})
    out = folder / "run"
    # The run directory is made by the real command over ten rows, then the rest is written.
    measured([*BAGENT, "run", str(job), "-o", str(out), "--progress", "none"], folder)
    write_job(folder, url, rows, results=results)
    journals = [
        Journal.open(out, f"{n}-of-{parts}", clock=time.monotonic, report=print)
        for n in range(1, parts + 1)
    ]
    source = open_rows(RowsConfig(inputs=(str(rows),), base=folder, fields=("code", "id")))
    output = Raw(json.dumps(json.loads(CONTENT), separators=(",", ":")).encode())
    for batch in source.batches():
        for row in batch:
            if row.index < 10:
                continue
            at = 1.7e9 + row.index / 100
            outcome = Outcome(
                key=f"{row.key:016x}", row=row.index, id=row.id, source=row.source,
                line=row.line, stage="main", status="ok", output=output, text=CONTENT,
                finish_reason="stop", model="canned", endpoint="127.0.0.1:8000", attempts=1,
                turns=1, prompt_tokens=120, completion_tokens=90, queue_ms=0.1,
                latency_ms=12.5, started_at=at, finished_at=at, prompt_sha256="0" * 64,
                output_sha256="1" * 64, first_try_valid=True, group="g",
                request_hash=f"{row.key:016x}",
            )  # fmt: skip
            journals[row.key % parts].write(outcome)
    for journal in journals:
        journal.close()
    source.close()
    return out, job, sum(path.stat().st_size for path in (out / "journal").glob("rows-*.jsonl"))


def read(folder: Path, options: argparse.Namespace) -> list[dict]:
    from bagent.rows import RowsConfig, open_rows

    rows, chunks = options.rows or 200_000, 16
    path = write_rows(folder / "rows.jsonl", rows)
    config = RowsConfig(inputs=(str(path),), base=folder, fields=("code", "id"))
    results = []

    def note(what: str, chunk: int | None, began: float) -> None:
        cpu = time.process_time() - began
        numbers = {"cpu_s": round(cpu, 2), "us_a_row_of_all": round(cpu / rows * 1e6, 2)}
        results.append({"what": what, "chunk": chunk, "rows": rows} | numbers)
        results[-1]["load"] = round(os.getloadavg()[0], 1)
        print(results[-1], flush=True)

    began = time.process_time()
    source = open_rows(config)
    source.remember(folder / "notes", lambda _: True)
    source.note_all()
    note("noting, once", None, began)
    for chunk in (1, 6, 11, 16):
        seen = []
        for what in ("alone", "with notes"):
            began = time.process_time()
            source = open_rows(replace(config, shard=(chunk, chunks)))
            if what == "with notes":
                source.share(folder / "notes")
            source.remember(folder / f"own-{chunk}", None)
            seen.append([(r.index, r.key, r.id, r.line) for b in source.batches() for r in b])
            note(what, chunk, began)
        assert seen[0] == seen[1]
    return results


PARTS = {"workers": workers, "parsl": parsl, "read": read, "merge": merge}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--parts", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory() as name:
        results = PARTS[options.part](Path(name), options)
    if options.out:
        options.out.write_text(json.dumps({"part": options.part, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
