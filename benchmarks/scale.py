"""Memory, tables, resume and start-up of ``bagent run`` at size.

    python benchmarks/scale.py memory  [--rows 50000,1000000]   peak RSS of the run, as rows come
    python benchmarks/scale.py resume  [--rows 1000000]         seconds from start to first request
    python benchmarks/scale.py start                            --help, and runs of 10 rows

``memory`` and ``start`` send every row to the canned server. ``resume`` writes a journal with the
same code that a run uses, of rows as such a run makes them, leaves the last 10 rows to do, and
measures the real command. ``--out FILE`` keeps the numbers as JSON. ``resume --keep FOLDER`` keeps
the run directory that it makes and uses it again; ``--repeats N`` goes on N times with copies of
it. The index of the open segment is left out of a copy, as a killed run leaves none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from canned_server import CONTENT, SCHEMA
from client_cost import start_server, write_rows

PROMPT = {"system": "You review code.", "user": "Review {{ id }}:\n{{ code }}"}


def write_job(folder: Path, url: str, rows: Path, **keys: object) -> Path:
    job = {
        "name": "scale",
        "backend": {"url": url},
        "model": "canned",
        "input": str(rows),
        "prompt": PROMPT,
        "output": {"schema": SCHEMA, "describe": "never"},
        "sampling": {"temperature": 0, "max_tokens": 512},
        "limits": {"concurrency": 64},
        "results": {"duckdb": False, "parquet": False},
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job | keys))
    return path


def timed(
    command: list[str], folder: Path, watch: Callable[[int], None] = lambda _: None
) -> dict[str, float]:
    """Run a command to its end: wall and CPU seconds, peak RSS in MB, exit code.

    ``watch`` is called with the process id every two seconds.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    with (folder / "stderr").open("wb") as errors:
        child = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=errors)
        ended = threading.Event()
        watching = threading.Thread(target=_watch, args=(child.pid, watch, ended))
        watching.start()
        _, status, used = os.wait4(child.pid, 0)
        ended.set()
        watching.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1):
        raise SystemExit(f"{command} ended with {code}: {(folder / 'stderr').read_text()[-2000:]}")
    return {
        "wall_s": round(time.perf_counter() - started, 3),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 3),
        "rss_mb": round(used.ru_maxrss / 1024, 1),
        "code": code,
    }


def _watch(process: int, watch: Callable[[int], None], ended: threading.Event) -> None:
    while not ended.wait(2.0):
        watch(process)


BAGENT = [sys.executable, "-m", "bagent"]


def note_peak(peaks: list[list[float]], out: Path, step: float, process: int) -> None:
    """Add how many rows are finished, about, and the peak RSS in MB so far."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        files = list(out.glob("journal/rows-*.jsonl"))
        size = sum(path.stat().st_size for path in files)
        with files[0].open("rb") as lines:
            rows = int(size / len(lines.readline()))
        status = Path(f"/proc/{process}/status").read_text()
        peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
        if not peaks or rows >= peaks[-1][0] + step:
            peaks.append([rows, round(peak, 1)])


def memory(folder: Path, counts: list[int]) -> list[dict]:
    server, url = start_server(folder, 40, sorted(os.sched_getaffinity(0))[-1])
    results = []
    try:
        for count in counts:
            rows = write_rows(folder / f"rows-{count}.jsonl", count)
            job = write_job(folder, url, rows)
            out = folder / f"run-{count}"
            command = [*BAGENT, "run", str(job), "-o", str(out), "--progress", "plain"]
            peaks: list[list[float]] = []
            look = partial(note_peak, peaks, out, count / 20)
            numbers = timed(command, folder, look)
            results.append({"rows": count} | numbers | {"peak_mb_at_row": peaks})
            print(results[-1], flush=True)
            shutil.rmtree(out)
    finally:
        server.kill()
    return results


def write_finished(folder: Path, count: int, url: str, keys: dict) -> tuple[Path, Path]:
    """A run directory in which all but the last 10 of ``count`` rows are finished."""
    from msgspec import Raw

    from bagent.rows import RowsConfig, open_rows
    from bagent.store.journal.journal import Journal
    from bagent.types import Outcome

    rows = write_rows(folder / "rows.jsonl", count)
    few = folder / "few.jsonl"
    with rows.open() as lines:
        few.write_text("".join(line for line, _ in zip(lines, range(10), strict=False)))
    job = write_job(folder, url, few, **keys)
    out = folder / "run"
    # The run directory is made by the real command over ten rows, then the rest is written.
    timed([*BAGENT, "run", str(job), "-o", str(out), "--progress", "none"], folder)
    write_job(folder, url, rows, **keys)
    journal = Journal.open(out, "all", clock=time.monotonic, report=print)
    config = RowsConfig(inputs=(str(rows),), base=folder, fields=("code", "id"))
    source = open_rows(config)
    source.remember(out / "journal" / "input-all.pieces", None)
    output = Raw(json.dumps(json.loads(CONTENT), separators=(",", ":")).encode())
    for batch in source.batches():
        for row in batch:
            if row.index < 10 or row.index >= count - 10:
                continue
            journal.write(
                Outcome(
                    key=f"{row.key:016x}", row=row.index, id=row.id, source=row.source,
                    line=row.line, stage="main", status="ok", output=output, text=CONTENT,
                    finish_reason="stop", model="canned", endpoint="127.0.0.1:8000", attempts=1,
                    turns=1, prompt_tokens=120, completion_tokens=90, queue_ms=0.1,
                    latency_ms=12.5, started_at=1.7e9 + row.index / 100,
                    finished_at=1.7e9 + row.index / 100, prompt_sha256="0" * 64,
                    output_sha256="1" * 64, first_try_valid=True, group="g",
                    request_hash=f"{row.key:016x}",
                )
            )  # fmt: skip
    journal.close()
    source.close()
    return job, out


def copy_run(made: Path, out: Path) -> None:
    """A copy to go on with: what a run writes to is copied, sealed segments are linked."""
    shutil.rmtree(out, ignore_errors=True)
    last = max(path.name for path in made.glob("journal/rows-*.jsonl"))

    def take(source: str, target: str) -> None:
        name = Path(source).name
        if name == last.replace(".jsonl", ".idx"):
            return
        if name.startswith("rows-") and name.split(".")[0] != last.split(".")[0]:
            os.link(source, target)
        else:
            shutil.copy2(source, target)

    shutil.copytree(made, out, copy_function=take)


def resume(folder: Path, counts: list[int], repeats: int = 1) -> list[dict]:
    server, url = start_server(folder, 40, sorted(os.sched_getaffinity(0))[-1])
    results = []
    try:
        for count in counts:
            home = folder / str(count)
            if not (home / "made").exists():
                home.mkdir()
                write_finished(home, count, url, {})
                (home / "made").touch()
            job, out = write_job(home, url, home / "rows.jsonl"), home / "again"
            for _ in range(repeats):
                copy_run(home / "run", out)
                command = [*BAGENT, "run", str(job), "-o", str(out), "--progress", "none"]
                load = os.getloadavg()[0]
                started = time.time()
                numbers = timed(command, home)
                attempts = sorted(out.glob("journal/attempts-*.jsonl"))[-1].read_text()
                first = min(json.loads(line)["sent"] for line in attempts.splitlines()[-10:])
                seconds = round(first - started, 2)
                numbers |= {"load": round(load, 1)}
                results.append({"rows": count, "to_first_request_s": seconds} | numbers)
                print(results[-1], flush=True)
            shutil.rmtree(out, ignore_errors=True)
    finally:
        server.kill()
        (folder / "port").unlink()
    return results


def start(folder: Path, _: list[int]) -> list[dict]:
    server, url = start_server(folder, 40, sorted(os.sched_getaffinity(0))[-1])
    results = []
    rows = write_rows(folder / "ten.jsonl", 10)
    arms = {"run of 10 rows": {}, "run of 10 rows with tables": {"results": {}}}
    try:
        for repeat in range(7):
            results.append({"what": "--help"} | timed([*BAGENT, "--help"], folder))
            print(results[-1])
            for number, (what, keys) in enumerate(arms.items()):
                job = write_job(folder, url, rows, **keys)
                out = folder / f"ten-{repeat}-{number}"
                command = [*BAGENT, "run", str(job), "-o", str(out), "--progress", "none"]
                results.append({"what": what} | timed(command, folder))
                print(results[-1])
    finally:
        server.kill()
    return results


PARTS = {"memory": (memory, "50000,1000000"), "resume": (resume, "1000000"), "start": (start, "10")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rows")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    function, default = PARTS[options.part]
    counts = [int(n) for n in (options.rows or default).split(",")]
    more = {"repeats": options.repeats} if function is resume else {}
    with tempfile.TemporaryDirectory() as name:
        if options.keep:
            options.keep.mkdir(exist_ok=True)
        results = function(options.keep.resolve() if options.keep else Path(name), counts, **more)
    if options.out:
        options.out.write_text(json.dumps({"part": options.part, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
