"""One process in front of thousands of SIMULATED endpoints: loop lag, memory, rows a second, CPU.

    python benchmarks/many_endpoints.py [--endpoints 4000] [--arms single,lists] [--workers N]
        [--out FILE]

The endpoints are those of ``bagent sim``, some thousand ports in each of a few processes. Arms:
``single``, 3 calls for each endpoint, and ``lists``, 64 rows for each in lists of 64, both by
``bagent run`` with everything on but tables. Lag is how late a timer of 10 ms fires on the run's
own event loop; ``own`` is the CPU time that the loop's thread used since the timer before, less
what fits into 10 ms: it leaves out what other work on the machine took.
With ``--workers`` the rows are shared out among so many processes: CPU is then that of all, memory
that of the largest, and lag is not looked at.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BAGENT = [sys.executable, "-m", "bagent"]
TICK = 0.01
PER_PROCESS = 1000
ARMS = {"single": (3, {"mode": "single"}), "lists": (64, {"mode": "completions", "size": 64})}


def start(folder: Path, count: int, port: int) -> tuple[list[subprocess.Popen], list[str]]:
    """The endpoints, and their addresses."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < 4 * PER_PROCESS:
        raise SystemExit(
            f"only {hard} files may be open (ulimit -Hn): {4 * PER_PROCESS} are needed"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    processes, files = [], []
    for first in range(0, count, PER_PROCESS):
        file = folder / f"hosts-{first}"
        files.append(file)
        command = [
            *BAGENT, "sim", "--replicas", str(min(PER_PROCESS, count - first)),
            "--port", str(port + first), "--decode", "400", "--output-tokens", "8",
            "--output-spread", "fixed", "--prefill", "1000000", "--write-hostfile", str(file),
        ]  # fmt: skip
        processes.append(
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )
    hosts = []
    for file in files:
        while not file.exists():
            time.sleep(0.1)
        hosts += [line for line in file.read_text().splitlines() if line[:1] not in ("#", "")]
    return processes, hosts


async def watch(lags: list[tuple[float, float]]) -> None:
    """Note how late a timer fires, and the CPU time since the one before, in milliseconds."""
    loop, cpu = asyncio.get_running_loop(), time.thread_time()
    while True:
        due = loop.time() + TICK
        await asyncio.sleep(TICK)
        now = time.thread_time()
        lags.append((1000 * (loop.time() - due), 1000 * max(0.0, now - cpu - TICK)))
        cpu = now


def client(job: str, out: str) -> None:
    """The run, in this process, with a look at its event loop."""
    from bagent.cli.app import main
    from bagent.runs.session import RunSession

    lags: list[tuple[float, float]] = []
    run = RunSession.run

    async def watched(session):
        task = asyncio.ensure_future(watch(lags))
        try:
            return await run(session)
        finally:
            task.cancel()

    RunSession.run = watched
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    code = main(["run", job, "-o", out, "--progress", "none"])
    used = resource.getrusage(resource.RUSAGE_SELF)

    def at(which: int, share: float) -> float:
        values = sorted(lag[which] for lag in lags)
        return round(values[min(len(values) - 1, int(share * len(values)))], 1)

    result = {
        "exit_code": code,
        "wall_s": round(time.perf_counter() - began, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime, 2),
        "rss_mb": round(used.ru_maxrss / 1024),
        "lag_ms": {"p50": at(0, 0.5), "p99": at(0, 0.99), "max": at(0, 1.0)},
        "own_ms": {"p50": at(1, 0.5), "p99": at(1, 0.99), "max": at(1, 1.0)},
    }
    print(json.dumps(result))


def several(job: str, out: str, workers: int) -> dict:
    """The run in processes of its own: what all of them took."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [*BAGENT, "run", job, "-o", out, "--progress", "none", "--workers", str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return {
        "workers": workers,
        "wall_s": round(time.perf_counter() - began, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime, 2),
        "largest_rss_mb": round(used.ru_maxrss / 1024),
    }


def alone(job: str, out: str) -> dict:
    """The run in one process, watched."""
    command = [sys.executable, __file__, "--client", job, out]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def measure(arm: str, folder: Path, hosts: list[str], workers: int) -> dict:
    each, batching = ARMS[arm]
    count = each * len(hosts)
    rows, out = folder / f"{arm}.jsonl", folder / f"run-{arm}-{workers}"
    with rows.open("w") as file:
        for number in range(count):
            file.write(f'{{"id":{number},"text":"Tell of number {number}."}}\n')
    (folder / "hosts.txt").write_text("\n".join(hosts) + "\n")
    job = {
        "backend": "vllm",
        "hostfile": str(folder / "hosts.txt"),
        "model": "simulated-8b",
        "input": str(rows),
        "prompt": {"raw": "{{ text }}"},
        "sampling": {"temperature": 0, "max_tokens": 16},
        "batching": batching,
        "dedupe": False,
        "results": {"parquet": False, "duckdb": False},
    }
    path = folder / f"{arm}.yaml"
    path.write_text(json.dumps(job))
    load = os.getloadavg()[0]
    arguments = str(path), str(out)
    result = several(*arguments, workers) if workers > 1 else alone(*arguments)
    per_endpoint: dict[str, int] = {}
    ok, starts, ends = 0, [], []
    for file in (out / "journal").glob("rows-*.jsonl"):
        for line in file.open():
            row = json.loads(line)
            ok += row["status"] in ("ok", "truncated")
            starts.append(row["started_at"])
            ends.append(row["finished_at"])
            per_endpoint[row["endpoint"]] = per_endpoint.get(row["endpoint"], 0) + 1
    seconds = max(ends) - min(starts)
    return {
        "arm": arm,
        "endpoints": len(hosts),
        "rows": count,
        "ok": ok,
        "used_endpoints": len(per_endpoint),
        "most_rows_of_one": max(per_endpoint.values()),
        "rows_per_s": round(count / seconds),
        "cpu_us_per_row": round(result["cpu_s"] / count * 1e6),
        "load_before": round(load, 1),
        **result,
    }


def main_all() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoints", type=int, default=4000)
    parser.add_argument("--arms", default="single,lists")
    parser.add_argument("--port", type=int, default=21000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--client", nargs=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.client:
        client(*options.client)
        return
    runs = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes, hosts = start(folder, options.endpoints, options.port)
        try:
            for arm in options.arms.split(","):
                runs.append(measure(arm, folder, hosts, options.workers))
                print(json.dumps(runs[-1]), flush=True)
        finally:
            for process in processes:
                process.kill()
    if options.out:
        options.out.write_text(json.dumps({"simulated": True, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main_all()
