"""A fleet of two servers, one on each card of a host: speed, prefix caches, a kill, a slow card.

    python benchmarks/gpu_two_cards.py FOLDER --model NAME --at HOST:PORT --at HOST:PORT
        --pid-file FILE --restart COMMAND --tenant COMMAND
        [--replicated HOST:PORT] [--offline HOST:PORT] [--scale 1] [--seconds 460]

``benchmarks/gpu_two_cards.sh`` starts the servers and this script on a machine with two GPUs.

- Speed: the same rows on both servers and on the first alone, alternated; one server with
  ``--data-parallel-size 2`` (``--replicated``), ``vllm run-batch`` on two cards (``--offline``, a
  ``gpu_offline.py``), and an AsyncOpenAI loop that takes the two addresses in turn.
- Prefix caches: documents with several questions each, in random order, with and without prefix
  affinity; the engines' own counters.
- A kill: the process group of the second server, whose leader is in ``--pid-file``, gets SIGKILL
  and ``--restart`` starts it again. In another run the client gets SIGKILL twice.
- A slow card: ``--tenant`` puts other load on the second card.

``two-cards.json`` in FOLDER is written after each measurement. ``--seconds`` is the time for all: a
measurement that would end later is left out. The rates of part 1 give the ideals of parts 3 and 4.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from gpu_compare import run_offline
from gpu_fleet import WATCH_SECONDS
from gpu_modes import (
    ASKED,
    SHAPES,
    SYSTEM,
    TOKENS_PER_WORD,
    WORDS,
    empty_cache,
    job_of,
    lines_of,
    request_of,
    run_job,
    write_rows,
)

ROWS = {"review": 1600, "short": 5000, "killed": 5200, "client killed": 5000, "slow card": 5000}
DOCUMENTS, QUESTIONS, DOCUMENT_TOKENS = 100, 16, 3000
REPEATS = 3
CALLS_IN_FLIGHT = 256
"""Of the AsyncOpenAI loop, for each address."""
KILLS_AT = (0.25, 0.6)
"""Shares of the rows at which the client is killed."""
SERVER_KILL_AT = 0.15
"""Share of the rows at which the server is killed, so that it can come back before the end."""
SHARE_SECONDS = 2.0
"""Time over which the share of a server that came back is counted."""
FULL_SHARE = 0.45
BENCH_SECONDS = 12
COUNTERS = (
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prompt_tokens_total",
    "vllm:request_success_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)


def read_counters(address: str) -> Counter[str]:
    """Return the engine's counters, summed over labels."""
    totals: Counter[str] = Counter()
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        for line in answer.read().decode().splitlines():
            name, _, rest = line.partition("{")
            if name in COUNTERS:
                totals[name.removeprefix("vllm:")] += int(float(rest.rpartition(" ")[2]))
    return totals


def is_up(address: str) -> bool:
    try:
        urllib.request.urlopen(f"http://{address}/health", timeout=1).read()
    except OSError:
        return False
    return True


def ended_rows(folder: Path) -> int:
    """Return how many rows are in the journals of the runs in ``folder``."""
    count = 0
    for file in folder.glob("run-*/journal/rows-*.jsonl"):
        with file.open("rb") as lines:
            count += sum(1 for _ in lines)
    return count


class Study:
    """The servers, the time that is left, and the results so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.at: list[str] = options.at
        self.folder = Path(tempfile.mkdtemp())
        self.began = time.monotonic()
        self.results: dict[str, Any] = {"device": os.environ.get("DEVICE", ""), "at": options.at}

    def rows(self, kind: str, shape: str) -> tuple[Path, int]:
        count = max(20, int(ROWS[kind] * self.options.scale))
        path = self.folder / f"{shape}-{count}.jsonl"
        if not path.exists():
            write_rows(path, count, SHAPES[shape]["words"])
        return path, count

    def job(self, shape: str, rows: Path, addresses: list[str]) -> dict:
        job = job_of(shape, "", self.options.model, rows, {})
        return job | {"backend": "vllm", "hostfile": str(self.hostfile(addresses))}

    def hostfile(self, addresses: list[str]) -> Path:
        path = self.folder / f"hosts-{len(addresses)}-{addresses[0].rpartition(':')[2]}.txt"
        path.write_text("\n".join(addresses) + "\n")
        return path

    def add(self, part: str, result: dict) -> dict:
        """Add a result and write all."""
        result["at_s"] = round(time.monotonic() - self.began, 1)
        self.results.setdefault(part, []).append(result)
        print(part, json.dumps(result)[:700], flush=True)
        path = self.options.folder / "two-cards.json"
        path.write_text(json.dumps(self.results, indent=1) + "\n")
        return result

    def has_time(self, name: str, seconds: float) -> bool:
        enough = time.monotonic() - self.began + seconds * self.options.scale < self.options.seconds
        if not enough:
            self.add("left out", {"measurement": name})
        return enough

    def run(self, job: dict) -> tuple[dict, list[dict], list[dict]]:
        """Run a job; return its summary, its rows and its attempts."""
        for address in self.at:
            if is_up(address):
                empty_cache(address)
        result, out = run_job(Path(tempfile.mkdtemp(dir=self.folder)), job)
        if "error" in result:
            return result, [], []
        rows = sorted(lines_of(out, "rows"), key=lambda row: row["row"])
        attempts = lines_of(out, "attempts")
        return summarize(rows, attempts) | {"cpu_s": result["cpu_s"]}, rows, attempts

    def rate(self, shape: str, arm: str) -> float:
        """Return the median rows per second of an arm of part 1; 0 if it was not measured."""
        runs = self.results.get("speed", [])
        rates = [
            run["rows_per_s"]
            for run in runs
            if run["shape"] == shape and run["arm"] == arm and "error" not in run
        ]
        return median(rates) if rates else 0.0


def summarize(rows: list[dict], attempts: list[dict]) -> dict:
    """Return counts, seconds from the first request to the last answer, and the load by server."""
    began = min(attempt["sent"] for attempt in attempts)
    seconds = max(attempt["done"] for attempt in attempts) - began
    requests = Counter(
        endpoint for endpoint, _ in {(row["endpoint"], request_of(row)) for row in attempts}
    )
    failures = Counter(
        f"{row['endpoint']} {row['error_kind']}" for row in attempts if row.get("error_kind")
    )
    return {
        "rows": len(rows),
        "statuses": Counter(row["status"] for row in rows),
        "seconds": round(seconds, 3),
        "rows_per_s": round(len(rows) / seconds, 1),
        "completion_tokens": sum(row.get("completion_tokens") or 0 for row in rows),
        "answered_by": Counter(row["endpoint"] for row in rows),
        "requests": requests,
        "failed_attempts": failures,
    }


# --- part 1: speed -------------------------------------------------------------------------------


def measure_speed(study: Study) -> None:
    arms = {"both": study.at, "first alone": study.at[:1]}
    for shape in ("review", "short"):
        rows, _ = study.rows(shape, shape)
        few = study.folder / "few.jsonl"
        few.write_text("".join(rows.open().readlines()[:200]))
        study.run(study.job(shape, few, study.at))  # what the first requests compile
        for repeat in range(REPEATS):
            for arm in list(arms) if repeat % 2 == 0 else list(arms)[::-1]:
                if study.has_time(f"{shape}, {arm}", 14 if arm == "both" else 27):
                    result, _, _ = study.run(study.job(shape, rows, arms[arm]))
                    study.add("speed", {"shape": shape, "arm": arm, "repeat": repeat} | result)


def measure_others(study: Study) -> None:
    """Measure the other ways to use two cards."""
    rows, _ = study.rows("review", "review")
    if study.has_time("AsyncOpenAI loop", 30):
        result = asyncio.run(openai_loop(study, rows))
        study.add("speed", {"shape": "review", "arm": "AsyncOpenAI, addresses in turn"} | result)
    replicated = study.options.replicated
    if replicated and is_up(replicated):
        for shape in ("review", "short"):
            path, _ = study.rows(shape, shape)
            few = study.folder / "few.jsonl"
            few.write_text("".join(path.open().readlines()[:200]))
            study.run(study.job(shape, few, [replicated]))
            for repeat in range(2):
                if study.has_time(f"{shape}, --data-parallel-size 2", 14):
                    result, _, _ = study.run(study.job(shape, path, [replicated]))
                    arm = {"shape": shape, "arm": "one server, data parallel", "repeat": repeat}
                    study.add("speed", arm | result)
    offline = study.options.offline
    if offline and is_up(offline):
        few = study.folder / "few.jsonl"
        few.write_text("".join(rows.open().readlines()[:200]))
        run_offline(offline, "review", few)
        for repeat in range(2):
            if study.has_time("run-batch", 16):
                result, _ = run_offline(offline, "review", rows)
                arm = {"shape": "review", "arm": "run-batch, data parallel", "repeat": repeat}
                study.add("speed", arm | result)


async def openai_loop(study: Study, path: Path) -> dict:
    """Send chats to the addresses in turn, as many at once as in a usual script."""
    from openai import AsyncOpenAI

    clients = [
        AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0)
        for address in study.at
    ]
    limit = asyncio.Semaphore(CALLS_IN_FLIGHT * len(clients))
    numbers = SHAPES["review"]
    schema = {"name": "answer", "schema": numbers["schema"], "strict": True}
    texts = [json.loads(line)["text"] for line in path.open()]
    failed = 0

    async def ask(number: int, text: str) -> None:
        nonlocal failed
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": ASKED + text},
        ]
        async with limit:
            try:
                answer = await clients[number % len(clients)].chat.completions.create(
                    model=study.options.model,
                    messages=messages,  # type: ignore[arg-type]
                    temperature=0,
                    max_tokens=numbers["max_tokens"],
                    response_format={"type": "json_schema", "json_schema": schema},  # type: ignore[misc]
                )
                json.loads(answer.choices[0].message.content or "")
            except Exception as error:
                failed += 1
                if failed == 1:
                    print("AsyncOpenAI:", repr(error)[:300], flush=True)

    for address in study.at:
        empty_cache(address)
    began, cpu = time.monotonic(), time.process_time()
    await asyncio.gather(*(ask(number, text) for number, text in enumerate(texts)))
    seconds = time.monotonic() - began
    return {
        "rows": len(texts),
        "failed": failed,
        "seconds": round(seconds, 3),
        "rows_per_s": round(len(texts) / seconds, 1),
        "cpu_s": round(time.process_time() - cpu, 3),
    }


# --- part 2: prefix caches -----------------------------------------------------------------------


def measure_prefixes(study: Study) -> None:
    random = Random(11)
    documents = [
        " ".join(random.choice(WORDS) for _ in range(int(DOCUMENT_TOKENS / TOKENS_PER_WORD)))
        for _ in range(max(2, int(DOCUMENTS * study.options.scale)))
    ]
    rows = [
        {"id": f"d{document}q{question}", "document": text, "question": f"{question} "}
        for document, text in enumerate(documents)
        for question in range(QUESTIONS)
    ]
    random.shuffle(rows)
    path = study.folder / "documents.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = study.job("short", path, study.at)
    job["prompt"] = {"raw": "{{ document }} Question {{ question }}:"}
    job["sampling"] |= {"max_tokens": 16}
    for affinity in ("auto", "never", "auto"):
        if not study.has_time(f"documents, prefix: {affinity}", 30):
            continue
        before = [read_counters(address) for address in study.at]
        result, _, _ = study.run(job | {"batching": {"prefix": affinity}})
        after = [read_counters(address) for address in study.at]
        result["engines"] = [
            {name: count for name, count in (new - old).items() if "num_requests" not in name}
            for new, old in zip(after, before, strict=True)
        ]
        hits, queries = "prefix_cache_hits_total", "prefix_cache_queries_total"
        result["cached"] = [
            round(engine.get(hits, 0) / max(1, engine.get(queries, 0)), 4)
            for engine in result["engines"]
        ]
        study.add("prefixes", {"prefix": affinity} | result)


# --- part 3: kills -------------------------------------------------------------------------------


class ServerKill(threading.Thread):
    """Kills a server once so many rows have ended, starts it again and waits until it is up."""

    def __init__(self, study: Study, folder: Path, after: int) -> None:
        super().__init__(daemon=True)
        self.study, self.folder, self.after = study, folder, after
        self.killed_at = self.up_at = 0.0
        self.over = threading.Event()

    def run(self) -> None:
        options = self.study.options
        while ended_rows(self.folder) < self.after:
            if self.over.wait(WATCH_SECONDS):
                return
        pid = int(Path(options.pid_file).read_text())
        os.killpg(os.getpgid(pid), signal.SIGKILL)
        self.killed_at = time.time()
        time.sleep(0.5)
        subprocess.Popen(shlex.split(options.restart), start_new_session=True)
        while not is_up(self.study.at[1]):
            if self.over.wait(0.2):
                return
        self.up_at = time.time()


def rows_by_second(attempts: list[dict], began: float) -> dict[str, dict[int, int]]:
    """Return the rows that each server answered in each second."""
    counts: dict[str, Counter[int]] = {}
    for attempt in attempts:
        if not attempt.get("error_kind"):
            second = int(attempt["done"] - began)
            counts.setdefault(attempt["endpoint"], Counter())[second] += 1
    return {name: dict(sorted(seconds.items())) for name, seconds in counts.items()}


def time_of_full_share(attempts: list[dict], address: str, start: float) -> float | None:
    """Return when a server first had its share of the answers again, None if never."""
    answers = sorted((a["done"], a["endpoint"]) for a in attempts if not a.get("error_kind"))
    late = [(done, endpoint) for done, endpoint in answers if done >= start]
    for done, endpoint in late:
        if endpoint != address:
            continue
        window = [name for at, name in late if done <= at < done + SHARE_SECONDS]
        if window.count(address) >= FULL_SHARE * len(window):
            return done
    return None


def measure_server_kill(study: Study) -> None:
    if not study.has_time("a server killed", 95):
        return
    path, count = study.rows("killed", "review")
    folder = Path(tempfile.mkdtemp(dir=study.folder))
    kill = ServerKill(study, folder, int(SERVER_KILL_AT * count))
    kill.start()
    for address in study.at:
        empty_cache(address)
    result, out = run_job(folder, study.job("review", path, study.at))
    kill.over.set()
    if "error" in result or not kill.killed_at:
        study.add("server killed", result)
        return
    rows, attempts = lines_of(out, "rows"), lines_of(out, "attempts")
    began = min(attempt["sent"] for attempt in attempts)
    summary = summarize(rows, attempts)
    full = time_of_full_share(attempts, study.at[1], kill.up_at) if kill.up_at else None
    first = min(
        (a["sent"] for a in attempts if a["endpoint"] == study.at[1] and a["sent"] > kill.up_at),
        default=None,
    )
    both, alone = study.rate("review", "both"), study.rate("review", "first alone")
    end = began + summary["seconds"]
    down = max(0.0, (kill.up_at or end) - kill.killed_at)
    ideal = None
    if both and alone:
        before = kill.killed_at - began
        ideal = before + down + max(0.0, count - both * before - alone * down) / both
    study.add(
        "server killed",
        summary
        | {
            "killed_at_s": round(kill.killed_at - began, 2),
            "up_at_s": round(kill.up_at - began, 2) if kill.up_at else None,
            "first_request_after_up_s": round(first - kill.up_at, 2) if first else None,
            "full_share_after_up_s": round(full - kill.up_at, 2) if full else None,
            "ideal_s": round(ideal, 2) if ideal else None,
            "ratio": round(summary["seconds"] / ideal, 3) if ideal else None,
            "rows_by_second": rows_by_second(attempts, began),
        },
    )


def measure_client_kills(study: Study) -> None:
    if not study.has_time("the client killed", 45):
        return
    path, count = study.rows("client killed", "short")
    job = study.job("short", path, study.at)
    undisturbed, texts = undisturbed_run(study, job)
    folder = Path(tempfile.mkdtemp(dir=study.folder))
    (folder / "job.yaml").write_text(json.dumps(job))
    out = folder / "run-killed"
    command = [sys.executable, "-m", "bagent", "run", "job.yaml", "-o", str(out)]
    for address in study.at:
        empty_cache(address)
    before = sum((read_counters(address) for address in study.at), Counter())
    in_flight = []
    for share in (*KILLS_AT, None):
        with (folder / "stderr.txt").open("a") as errors:
            client = subprocess.Popen(
                [*command, "--no-canary", "--progress", "none"], cwd=folder, stderr=errors
            )
        while share is not None and client.poll() is None:
            if ended_rows(folder) >= share * count:
                loads = [read_counters(address) for address in study.at]
                client.kill()
                names = "num_requests_running", "num_requests_waiting"
                in_flight.append(sum(load[name] for load in loads for name in names))
                break
            time.sleep(0.02)
        client.wait()
    after = sum((read_counters(address) for address in study.at), Counter())
    rows = sorted(lines_of(out, "rows"), key=lambda row: row["row"])
    asked = after["request_success_total"] - before["request_success_total"]
    study.add(
        "client killed",
        {
            "rows": len(rows),
            "different_rows": len({row["row"] for row in rows}),
            "statuses": Counter(row["status"] for row in rows),
            "exit_code": client.returncode,
            "in_flight_at_kills": in_flight,
            "asked_by_engines": asked,
            "asked_twice": asked - count,
            "equal_to_undisturbed": sum(row.get("text") == texts.get(row["row"]) for row in rows),
            "undisturbed": undisturbed,
        },
    )


def undisturbed_run(study: Study, job: dict) -> tuple[dict, dict[int, str]]:
    before = sum((read_counters(address) for address in study.at), Counter())
    summary, rows, _ = study.run(job)
    after = sum((read_counters(address) for address in study.at), Counter())
    summary["asked_by_engines"] = after["request_success_total"] - before["request_success_total"]
    return summary, {row["row"]: row.get("text") or "" for row in rows}


# --- part 4: a slow card -------------------------------------------------------------------------


def measure_slow_card(study: Study) -> None:
    if not study.options.tenant or not study.has_time("a slow card", 80):
        return
    tenant = subprocess.Popen(shlex.split(study.options.tenant), start_new_session=True)
    try:
        time.sleep(6.0 if study.options.scale >= 0.5 else 1.0)
        for shape in ("short", "review"):
            path, count = study.rows("slow card" if shape == "short" else "review", shape)
            if not study.has_time(f"a slow card, {shape}", 45):
                continue
            few = study.folder / "few.jsonl"
            few.write_text("".join(path.open().readlines()[: count // 3]))
            alone, _, _ = study.run(study.job(shape, few, study.at[1:]))
            study.add("slow card", {"shape": shape, "arm": "second alone"} | alone)
            both, _, _ = study.run(study.job(shape, path, study.at))
            rates = study.rate(shape, "first alone"), alone.get("rows_per_s", 0.0)
            if all(rates) and "seconds" in both:
                ideal = count / sum(rates)
                both |= {"ideal_s": round(ideal, 2), "ratio": round(both["seconds"] / ideal, 3)}
            study.add("slow card", {"shape": shape, "arm": "both"} | both)
        if study.has_time("bench of a slow card", BENCH_SECONDS + 15):
            bench(study)
    finally:
        os.killpg(tenant.pid, signal.SIGKILL)


def bench(study: Study) -> None:
    """Send a load test to both servers, to be summed up where DuckDB is."""
    command = [sys.executable, str(Path(__file__).with_name("gpu_bench.py")), "send"]
    folder = study.options.folder / "bench"
    options = ["--preset", "quick", "--seconds", str(BENCH_SECONDS // 2), "--workers", "2"]
    done = subprocess.run(
        [*command, "\n".join(study.at), str(folder), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    study.add("slow card", {"arm": "bench", "code": done.returncode, "end": done.stderr[-500:]})
    archive = study.options.folder / "bench.tar.gz"
    subprocess.run(
        ["tar", "-C", str(study.options.folder), "-czf", str(archive), "bench"], check=False
    )


PARTS: dict[str, Callable[[Study], None]] = {
    "speed": measure_speed,
    "prefixes": measure_prefixes,
    "slow-card": measure_slow_card,
    "client-kills": measure_client_kills,
    "server-kill": measure_server_kill,
    "others": measure_others,
}
"""In the order in which they run: the start of a killed server disturbs nothing before it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--at", action="append", default=[], metavar="HOST:PORT", required=True)
    parser.add_argument("--pid-file", help="process id of the second server")
    parser.add_argument("--restart", default="", help="command that starts the second server")
    parser.add_argument("--tenant", default="", help="command that loads the second card")
    parser.add_argument("--replicated", metavar="HOST:PORT")
    parser.add_argument("--offline", metavar="HOST:PORT")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the rows")
    parser.add_argument("--seconds", type=float, default=460)
    parser.add_argument("--parts", default=",".join(PARTS))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    study = Study(options)
    for name in options.parts.split(","):
        try:
            PARTS[name](study)
        except Exception as error:  # the other parts are still worth their time
            study.add("errors", {"part": name, "error": repr(error)})
    print(json.dumps({"seconds": round(time.monotonic() - study.began, 1)}))


if __name__ == "__main__":
    main()
