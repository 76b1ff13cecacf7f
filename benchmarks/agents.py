"""Agents with one slow tool: bagent against two loops, and what a turn costs.

    python benchmarks/agents.py compare [--url http://HOST:PORT/v1 --model NAME] [--repeats 5]
    python benchmarks/agents.py cost [--rows 1000,4000,16000]

``compare``: 100 agents of two turns behind a shared prompt of about 2,048 tokens, a tool of 800 ms,
at most 32 model calls in flight. The first turn must call the tool, whose one argument has ten
possible values; which one is what the model writes. Arms, in an order that turns round:

``holding``  a loop that keeps its slot while the tool runs
``freeing``  a good loop: a slot for each model call, equal tool calls share one run (a dictionary)
``bagent``   ``bagent run`` with all it does: journal, validation, tables of calls

Without ``--url`` the server is ``bagent sim``: simulated engine, simulated text. Times are from the
first request sent to the last answer; bagent's start-up stands apart.

``cost``: agents of two turns with an instant tool on a backend that answers at once, in one
process: CPU per turn of all but HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

AGENTS = 100
IN_FLIGHT = 32
TOOL_SECONDS = 0.8
TOPICS = [f"topic-{n}" for n in range(10)]
SHARED = "You answer with the help of a library. " + " ".join(
    f"Rule {n}: a shelf numbered {n} holds books about matter {n * 7 % 31}." for n in range(110)
)
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look a topic up.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"topic": {"type": "string", "enum": TOPICS}},
            "required": ["topic"],
            "additionalProperties": False,
        },
    },
}
TOOL_FILE = f'''
import asyncio
from pathlib import Path
from typing import Literal


async def look(topic: Literal[{", ".join(map(repr, TOPICS))}]) -> str:
    """Look a topic up."""
    with (Path(__file__).parent / "runs.txt").open("a") as log:
        log.write(topic + "\\n")
    await asyncio.sleep({TOOL_SECONDS})
    return f"About {{topic}}: nothing new."
'''


def user(row: int) -> str:
    return (
        f"Question {row}: what is new on shelf {row}? Look a topic up, then answer in a sentence."
    )


@contextlib.contextmanager
def simulated(decode: float) -> Iterator[str]:
    """A simulated engine of one endpoint; its address."""
    with tempfile.TemporaryDirectory(prefix="bagent-agents-") as folder:
        hosts = Path(folder) / "hosts.txt"
        argv = [sys.executable, "-m", "bagent", "sim", "--port", "0", "--tool-rate", "0"]
        argv += ["--decode", str(decode), "--write-hostfile", str(hosts)]
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        try:
            while not hosts.exists():
                time.sleep(0.05)
            lines = hosts.read_text().splitlines()
            address = next(line.split()[0] for line in lines if line[:1] not in ("#", ""))
            yield f"{address if '://' in address else 'http://' + address}/v1".replace(
                "/v1/v1", "/v1"
            )
        finally:
            process.terminate()
            process.wait(10)


async def loop_arm(url: str, model: str, *, holding: bool) -> dict[str, Any]:
    """One of the two loops."""
    import aiohttp

    slots, runs = asyncio.Semaphore(IN_FLIGHT), 0
    answers: dict[str, asyncio.Future[str]] = {}
    first = 0.0

    async def look(topic: str) -> str:
        nonlocal runs
        runs += 1
        await asyncio.sleep(TOOL_SECONDS)
        return f"About {topic}: nothing new."

    async def coalesced(topic: str) -> str:
        if topic not in answers:
            answers[topic] = asyncio.ensure_future(look(topic))
        return await asyncio.shield(answers[topic])

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(messages: list[dict[str, Any]], choice: str) -> dict[str, Any]:
            nonlocal first
            first = first or time.monotonic()
            body = {"model": model, "temperature": 0, "max_tokens": 64, "messages": messages}
            body |= {"tools": [TOOL], "tool_choice": choice}
            async with session.post(f"{url}/chat/completions", json=body) as response:
                response.raise_for_status()
                return (await response.json())["choices"][0]["message"]

        async def agent(row: int) -> None:
            messages = [
                {"role": "system", "content": SHARED},
                {"role": "user", "content": user(row)},
            ]
            outer = slots if holding else contextlib.nullcontext()
            inner = contextlib.nullcontext() if holding else slots
            async with outer:
                async with inner:
                    turn = await ask(messages, "required")
                messages.append({**turn, "content": turn.get("content") or ""})
                for call in turn["tool_calls"]:
                    topic = json.loads(call["function"]["arguments"])["topic"]
                    text = await (look(topic) if holding else coalesced(topic))
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
                async with inner:
                    await ask(messages, "auto")

        await asyncio.gather(*(agent(row) for row in range(AGENTS)))
    return {"seconds": time.monotonic() - first, "tool_runs": runs}


def bagent_arm(url: str, model: str) -> dict[str, Any]:
    """``bagent run`` on the same agents."""
    with tempfile.TemporaryDirectory(prefix="bagent-agents-") as name:
        folder = Path(name)
        (folder / "tools.py").write_text(TOOL_FILE)
        (folder / "shared.md").write_text(SHARED)
        rows = "".join(json.dumps({"id": n, "question": user(n)}) + "\n" for n in range(AGENTS))
        (folder / "rows.jsonl").write_text(rows)
        job = {
            "name": "agents",
            "backend": {"url": url},
            "model": model,
            "input": "rows.jsonl",
            "prompt": {"system": {"file": "shared.md"}, "user": "{{ question }}"},
            "agent": {
                "tool_choice": "required",
                "tools": [
                    {
                        "python": "tools.py:look",
                        "coalesce": True,
                        "cache": "10m",
                        "concurrency": 100,
                    }
                ],
            },
            "sampling": {"temperature": 0, "max_tokens": 64},
            "dedupe": False,
            "limits": {"concurrency": IN_FLIGHT},
            "results": {"allow_failures": AGENTS, "parquet": False, "duckdb": False},
        }
        (folder / "job.yaml").write_text(json.dumps(job))
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "bagent", "run", "job.yaml", "--progress", "none"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        whole = time.monotonic() - began
        if done.returncode:
            raise RuntimeError(done.stderr)
        lines = []
        for path in (folder / "runs/agents/journal").glob("attempts-*.jsonl"):
            lines += [json.loads(line) for line in path.read_text().splitlines()]
        ended = [line["done"] for line in lines]
        runs = (folder / "runs.txt").read_text().splitlines()
        kinds: dict[str, int] = {}
        for path in (folder / "runs/agents/journal").glob("rows-*.jsonl"):
            for line in path.read_text().splitlines():
                status = json.loads(line)["status"]
                kinds[status] = kinds.get(status, 0) + 1
        return {
            "seconds": max(ended) - min(line["sent"] for line in lines),
            "tool_runs": len(runs),
            "whole_command": whole,
            "requests": len(lines),
            "statuses": kinds,
        }


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """All arms, their order turned round each time."""
    arms = ["holding", "freeing", "bagent"]
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    opened = contextlib.nullcontext(args.url) if args.url else simulated(args.decode)
    with opened as url:
        asyncio.run(loop_arm(url, args.model, holding=False))  # warms the prefix, counts nothing
        for repeat in range(args.repeats):
            turned = arms[repeat % 3 :] + arms[: repeat % 3]
            for arm in turned if repeat % 2 == 0 else turned[::-1]:
                if arm == "bagent":
                    result = bagent_arm(url, args.model)
                else:
                    result = asyncio.run(loop_arm(url, args.model, holding=arm == "holding"))
                found[arm].append(result | {"repeat": repeat, "load": os.getloadavg()[0]})
                print(repeat, arm, json.dumps(found[arm][-1]), flush=True)
    return {"simulated": not args.url, "decode": args.decode, "arms": found}


def cost(args: argparse.Namespace) -> dict[str, Any]:
    """CPU per turn for each number of rows, each in a process of its own."""
    found = []
    for rows in args.rows.split(","):
        for repeat in range(args.repeats):
            argv = [sys.executable, __file__, "cost-once", "--rows", rows]
            done = subprocess.run(argv, capture_output=True, text=True, check=True)
            found.append(json.loads(done.stdout) | {"repeat": repeat, "load": os.getloadavg()[0]})
            print(json.dumps(found[-1]), flush=True)
    return {"runs": found}


def cost_once(args: argparse.Namespace) -> dict[str, Any]:
    """One run of the engine over a backend that answers at once."""
    from agents_engine import drive

    with tempfile.TemporaryDirectory(prefix="bagent-agents-") as folder:
        before = time.process_time()
        turns = asyncio.run(drive(int(args.rows), Path(folder), Random(1)))
        cpu = time.process_time() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "rows": int(args.rows),
        "turns": turns,
        "cpu_us_a_turn": round(cpu / turns * 1e6, 1),
        "peak_mb": round(peak),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["compare", "cost", "cost-once"])
    parser.add_argument("--url")
    parser.add_argument("--model", default="simulated-8b")
    parser.add_argument("--decode", type=float, default=60, help="simulated tokens a second")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", default="1000,4000,16000")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = {"compare": compare, "cost": cost, "cost-once": cost_once}[args.what](args)
    text = json.dumps(result, indent=1)
    if args.out:
        args.out.write_text(text + "\n")
    else:
        print(text if args.what != "cost-once" else json.dumps(result))


if __name__ == "__main__":
    main()
