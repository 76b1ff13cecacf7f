"""CPU time a row on the client's side: bagent beside what a user would write instead.

    python benchmarks/client_cost.py [--rows 20000] [--repeats 3] [--out benchmarks/results/FILE]
        [--stream | --lists] [--arms bare,bagent,sdk] [--before FOLDER]

Client and canned server have a core each. Every arm runs in a process of its own; the order is
turned round with every repeat. Reported per row: CPU of the whole process, imports included, and
``marginal``, the slope between a tenth of the rows and all of them, which leaves start-up out.
Other work on the machine, and the machine's own host, only ever add to it: the least of several
repeats is the nearest to what it costs. With ``--before`` the arm ``before`` runs bagent as it
stands in that folder (``git archive COMMIT bagent | tar -x -C FOLDER``). Raw numbers of every run
are kept in the result file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
CODE = "for (int i = 0; i <= n; i++) total += values[i];  // sums the values of the list\n" * 3


def write_rows(path: Path, count: int) -> Path:
    with path.open("w") as file:
        for number in range(count):
            file.write(json.dumps({"id": f"r{number}", "code": f"{CODE}// {number}"}) + "\n")
    return path


def start_server(folder: Path, chunks: int, cpu: int) -> tuple[subprocess.Popen, str]:
    port_file = folder / "port"
    command = [sys.executable, str(HERE / "canned_server.py"), "--port-file", str(port_file)]
    server = subprocess.Popen([*command, "--chunks", str(chunks), "--cpu", str(cpu)])
    while not port_file.exists():
        time.sleep(0.02)
    return server, f"http://127.0.0.1:{port_file.read_text()}/v1"


def run_arm(arm: str, url: str, rows: Path, more: list[str], before: Path | None) -> dict:
    script = str(HERE / "client_arms.py")
    command = [sys.executable, script, arm.replace("before", "bagent"), url, str(rows), *more]
    env = {**os.environ, "PYTHONPATH": str(before.resolve())} if arm == "before" else None
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise SystemExit(f"{arm} failed: {done.stderr[-2000:]}")
    for old in rows.parent.glob("run-*"):
        shutil.rmtree(old)
    return json.loads(done.stdout.splitlines()[-1]) | {"arm": arm}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=40)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--lists", action="store_true")
    parser.add_argument("--arms", default="bare,bagent,sdk")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    server_cpu = cores[-1]
    more = ["--cpu", str(cores[0]), *(["--stream"] if options.stream else [])]
    if options.lists:
        more += ["--lists", "--concurrency", "512"]
    load, runs = os.getloadavg()[0], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server, url = start_server(folder, options.chunks, server_cpu)
        try:
            few = write_rows(folder / "few.jsonl", options.rows // 10)
            many = write_rows(folder / "many.jsonl", options.rows)
            for repeat in range(options.repeats):
                arms = options.arms.split(",")
                for arm in arms if repeat % 2 == 0 else reversed(arms):
                    for path in (few, many):
                        result = run_arm(arm, url, path, more, options.before)
                        runs.append(result | {"repeat": repeat})
                        print(json.dumps(runs[-1]), file=sys.stderr)
        finally:
            server.kill()
    summary = {}
    for arm in options.arms.split(","):
        mine = [r for r in runs if r["arm"] == arm]
        total, marginal = [], []
        for repeat in range(options.repeats):
            small, large = sorted(
                (r for r in mine if r["repeat"] == repeat), key=lambda r: r["rows"]
            )
            total.append(large["cpu_s"] / large["rows"] * 1e6)
            marginal.append(
                (large["cpu_s"] - small["cpu_s"]) / (large["rows"] - small["rows"]) * 1e6
            )
        summary[arm] = {
            "cpu_us_per_row": round(statistics.median(total), 1),
            "marginal_us_per_row": round(statistics.median(marginal), 1),
            "least_marginal": round(min(marginal), 1),
            "rss_mb": round(max(r["rss_mb"] for r in mine), 1),
        }
    report = {
        "what": "client CPU a row"
        + (f", streamed in {options.chunks} chunks" if options.stream else "")
        + (", raw prompts in lists of 64" if options.lists else ""),
        "load_before": round(load, 1),
        "rows": options.rows,
        "python": platform.python_version(),
        "summary": summary,
        "runs": runs,
    }
    text = json.dumps(report, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    for arm, numbers in summary.items():
        print(f"{arm:8}", numbers)


if __name__ == "__main__":
    main()
