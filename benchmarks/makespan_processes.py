"""Time to the end of a run on unequal fleets of SIMULATED engines, beside the ideal.

    python benchmarks/makespan.py [--rows 3000] [--repeats 2] [--out FILE]

The engines are simulated (``bagent sim``), so nothing here says how fast an engine is: only how
well the work is shared out. Ideal: all rows over the sum of the speeds, where one engine's speed is
what it reaches alone on its share of the rows. ``modulo`` is what is easily written instead: row i
goes to endpoint i % n, each endpoint's rows in one loop that keeps as many in flight; rows of an
endpoint that died go to the next one when it is noticed. Fleets: 16 equal; two of 16 at a tenth of
the speed; three of 16 dying after a tenth of the rows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BAGENT = [sys.executable, "-m", "bagent"]
SEATS = 8
ENGINE = [
    *("--max-num-seqs", str(SEATS), "--decode", "100", "--output-tokens", "50"),
    *("--output-spread", "geometric", "--no-prefix-cache"),
]
FLEETS = {
    "equal": [(16, [])],
    "two slow": [(14, []), (2, ["--slow", "10"])],
    "three dying": [(13, []), (3, ["--dead-after", "20"])],
}


def start(folder: Path, parts: list, port: int) -> tuple[list[subprocess.Popen], list[str]]:
    """The engines of a fleet, and their addresses."""
    processes, hosts = [], []
    for number, (count, more) in enumerate(parts):
        file = folder / f"hosts-{port}-{number}"
        command = [*BAGENT, "sim", "--replicas", str(count), "--port", str(port), *ENGINE, *more]
        processes.append(
            subprocess.Popen([*command, "--write-hostfile", str(file)], stdout=subprocess.DEVNULL)
        )
        while not file.exists():
            time.sleep(0.05)
        hosts += [line for line in file.read_text().splitlines() if line[:1] not in ("#", "")]
        port += count
    return processes, hosts


def bagent(folder: Path, hosts: list[str], rows: list[dict]) -> float:
    (folder / "hosts.txt").write_text("\n".join(hosts) + "\n")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = {
        "name": "makespan",
        "backend": "vllm",
        "hostfile": str(folder / "hosts.txt"),
        "model": "simulated-8b",
        "input": str(folder / "rows.jsonl"),
        "prompt": {"user": "{{ text }}"},
        "sampling": {"temperature": 0, "max_tokens": 400},
        "dedupe": False,
        "results": {"parquet": False, "duckdb": False},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    out = folder / f"run-{time.time_ns()}"
    command = [*BAGENT, "run", str(folder / "job.yaml"), "-o", str(out), "--progress", "none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(x) for p in (out / "journal").glob("rows-*.jsonl") for x in p.open()]
    good = [line for line in lines if line["status"] in ("ok", "truncated")]
    if len({line["id"] for line in good}) != len(rows):
        raise SystemExit(f"{len(good)} of {len(rows)} rows answered: {done.stderr[-600:]}")
    return max(x["finished_at"] for x in good) - min(x["started_at"] for x in good)


async def modulo(hosts: list[str], rows: list[dict]) -> float:
    import aiohttp

    parts = {host: rows[i :: len(hosts)] for i, host in enumerate(hosts)}
    began = time.monotonic()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(host: str, row: dict) -> bool:
            body = {
                "model": "simulated-8b",
                "messages": [{"role": "user", "content": row["text"]}],
                "temperature": 0,
                "max_tokens": 400,
            }
            try:
                async with session.post(f"http://{host}/v1/chat/completions", json=body) as answer:
                    await answer.read()
                    return answer.status == 200
            except aiohttp.ClientError:
                return False

        async def batch(host: str, mine: list[dict]) -> list[dict]:
            left, lost = iter(mine), []

            async def seat() -> None:
                for row in left:
                    lost.extend([] if await ask(host, row) else [row])

            await asyncio.gather(*(seat() for _ in range(2 * SEATS)))
            return lost

        alive = list(hosts)
        todo = parts
        while todo:
            lost = await asyncio.gather(*(batch(host, mine) for host, mine in todo.items()))
            alive = [h for h, rows_lost in zip(todo, lost, strict=True) if not rows_lost] or alive
            again = [row for some in lost for row in some]
            todo = {h: again[i :: len(alive)] for i, h in enumerate(alive)} if again else {}
            todo = {h: mine for h, mine in todo.items() if mine}
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [{"id": f"r{i}", "text": f"Tell of number {i}."} for i in range(options.rows)]
    runs, port = [], 18000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes, hosts = start(folder, [(1, [])], port)
        share = rows[::8]
        alone = len(share) / bagent(folder, hosts, share)
        for process in processes:
            process.kill()
        speeds = {"equal": 16.0, "two slow": 14.2, "three dying": 13.0}
        for fleet, parts in FLEETS.items():
            for repeat in range(options.repeats):
                arms = ["bagent", "modulo"]
                for arm in arms if repeat % 2 == 0 else reversed(arms):
                    port += 40
                    processes, hosts = start(folder, parts, port)
                    if arm == "bagent":
                        seconds = bagent(folder, hosts, rows)
                    else:
                        seconds = asyncio.run(modulo(hosts, rows))
                    for process in processes:
                        process.kill()
                    ideal = options.rows / (alone * speeds[fleet])
                    found = {"fleet": fleet, "arm": arm, "repeat": repeat}
                    runs.append(found | {"seconds": round(seconds, 2), "ideal": round(ideal, 2)})
                    print(json.dumps(runs[-1]), flush=True)
    for fleet in FLEETS:
        for arm in ("bagent", "modulo"):
            times = [
                r["seconds"] / r["ideal"] for r in runs if (r["fleet"], r["arm"]) == (fleet, arm)
            ]
            print(f"{fleet:12} {arm:7} {statistics.median(times):.2f} times the ideal")
    if options.out:
        report = {"simulated": True, "alone_rows_per_s": round(alone, 2), "runs": runs}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
