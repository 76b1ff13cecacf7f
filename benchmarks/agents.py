"""Agents with one slow tool: bagent against two loops, and what a turn costs.

    python benchmarks/agents.py compare [HOST:PORT MODEL] [--repeats 5] [--seconds 150] [--out FILE]
    python benchmarks/agents.py cost [--rows 1000,4000,16000]

``compare``: 100 agents of two turns behind a shared prompt of about 2,048 tokens (``--rules`` sets
its length, the result tells it), a tool of 800 ms, at most 32 model calls in flight. The first turn
must call the tool, whose one argument has ten possible values; which one is what the model writes,
at a temperature of 1, so that one of random weights writes all of them. An agent whose first turn
ends without a whole call ends there, in each arm.
Arms, in an order that turns round:

``holding``  a loop that keeps its slot while the tool runs
``freeing``  a good loop: a slot for each model call, equal tool calls share one run (a dictionary)
``nearest``  the same, but who comes back from a tool goes before new ones; only with ``--nearest``
``bagent``   ``bagent run`` with all it does: journal, validation, tables of calls
``stream``   the same with ``stream: true``; only with ``--stream``

Without a server it is ``bagent sim``: simulated engine, simulated text. Times are from the first
request sent to the last answer; bagent's start-up stands apart. No repeat is begun that would end
after ``--seconds``. Besides Python it needs aiohttp and bagent with the packages that it requires,
and of those neither DuckDB nor a tokenizer. Random weights fill their tokens (64, or
``--tokens``): such rows count as truncated, and the run's guard against rows that all fail alike is
off.

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
from statistics import median, median_low
from typing import Any

AGENTS = 100
IN_FLIGHT = 32
TOOL_SECONDS = 0.8
TOPICS = [f"topic-{n}" for n in range(10)]
ONE_CALL = {"parallel_tool_calls": False}
CHOICES: dict[str, Any] = {
    "required": "required",
    "look": {"type": "function", "function": {"name": "look"}},
}
"""What the first turn must do: call a tool, or this one, whose arguments are then all it writes."""
RULES = 110
ARM_SECONDS = 120.0
"""After so long an arm is given up: a server that hangs must not hold the others back."""

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


def shared(rules: int) -> str:
    """The system prompt of all agents."""
    return "You answer with the help of a library. " + " ".join(
        f"Rule {n}: a shelf numbered {n} holds books about matter {n * 7 % 31}."
        for n in range(rules)
    )


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


class Loop:
    """One of the two loops: ``holding`` keeps its slot while the tool runs, else equal calls share.

    ``first`` is when the first request went out, ``without`` counts turns that called no tool.
    """

    def __init__(self, session: Any, args: argparse.Namespace, url: str, arm: str) -> None:
        self.session, self.args, self.url = session, args, url
        self.holding, self.by_turn = arm == "holding", None
        if arm == "nearest":
            from agents_help import SlotsByTurn

            self.by_turn = SlotsByTurn(IN_FLIGHT)
        self.slots = asyncio.Semaphore(IN_FLIGHT)
        self.answers: dict[str, asyncio.Future[str]] = {}
        self.system = shared(args.rules)
        self.first = 0.0
        self.runs = self.without = 0
        self.prompt_tokens = 0
        self.took: dict[int, list[float]] = {1: [], 2: []}

    async def look(self, topic: str) -> str:
        self.runs += 1
        await asyncio.sleep(TOOL_SECONDS)
        return f"About {topic}: nothing new."

    async def coalesced(self, topic: str) -> str:
        if topic not in self.answers:
            self.answers[topic] = asyncio.ensure_future(self.look(topic))
        return await asyncio.shield(self.answers[topic])

    async def ask(self, messages: list[dict[str, Any]], number: int) -> dict[str, Any]:
        self.first = self.first or time.monotonic()
        body = {"model": self.args.model, "temperature": 1, "messages": messages}
        body["max_tokens"] = self.args.tokens
        choice = CHOICES[self.args.choice] if number == 1 else "auto"
        body |= {"tools": [TOOL], "tool_choice": choice, **ONE_CALL}
        began = time.monotonic()
        async with self.session.post(f"{self.url}/chat/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {await response.text()}")
            answer = await response.json()
        self.took[number].append(time.monotonic() - began)
        self.prompt_tokens = self.prompt_tokens or answer["usage"]["prompt_tokens"]
        return answer["choices"][0]["message"]

    def slot(self, turn: int) -> Any:
        if self.holding:
            return contextlib.nullcontext()
        return self.by_turn.at(turn) if self.by_turn else self.slots

    async def agent(self, row: int) -> None:
        messages = [
            {"role": "system", "content": self.system},
            {"role": "user", "content": user(row)},
        ]
        async with self.slots if self.holding else contextlib.nullcontext():
            async with self.slot(1):
                turn = await self.ask(messages, 1)
            calls = turn.get("tool_calls") or []
            self.without += not calls
            if not calls:  # cut before the call was whole: over, as it is for bagent
                return
            messages.append({**turn, "content": turn.get("content") or ""})
            for call in calls:
                topic = json.loads(call["function"]["arguments"])["topic"]
                text = await (self.look(topic) if self.holding else self.coalesced(topic))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
            async with self.slot(2):
                await self.ask(messages, 2)


async def loop_arm(args: argparse.Namespace, url: str, arm: str) -> dict[str, Any]:
    """All agents by one of the loops."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
    timeout = aiohttp.ClientTimeout(total=ARM_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        loop = Loop(session, args, url, arm)
        await asyncio.gather(*(loop.agent(row) for row in range(args.agents)))
    return {
        "seconds": time.monotonic() - loop.first,
        "tool_runs": loop.runs,
        "without_call": loop.without,
        "turn_seconds": [round(median(seconds), 2) for seconds in loop.took.values()],
        "prompt_tokens": loop.prompt_tokens,
    }


def write_job(folder: Path, args: argparse.Namespace, url: str, *, stream: bool) -> None:
    """The same agents as a job of bagent."""
    (folder / "tools.py").write_text(TOOL_FILE)
    (folder / "runs.txt").touch()
    (folder / "shared.md").write_text(shared(args.rules))
    rows = "".join(json.dumps({"id": n, "question": user(n)}) + "\n" for n in range(args.agents))
    (folder / "rows.jsonl").write_text(rows)
    tool = {"python": "tools.py:look", "coalesce": True, "cache": "10m", "concurrency": 100}
    job = {
        "name": "agents",
        "backend": f"vllm://{args.server}" if args.server else {"url": url},
        "model": args.model,
        "input": "rows.jsonl",
        "prompt": {"system": {"file": "shared.md"}, "user": "{{ question }}"},
        "agent": {"tool_choice": args.choice, "tools": [tool]},
        "sampling": {"temperature": 1, "max_tokens": args.tokens, "extra": ONE_CALL},
        "stream": True if stream else "auto",
        "dedupe": False,
        "limits": {"concurrency": IN_FLIGHT},
        "results": {"allow_failures": args.agents, "parquet": False, "duckdb": False},
    }
    (folder / "job.yaml").write_text(json.dumps(job))


def lines_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The records of one kind in the run's journal."""
    paths = (folder / "runs/agents/journal").glob(f"{kind}-*.jsonl")
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def bagent_arm(args: argparse.Namespace, url: str, *, stream: bool) -> dict[str, Any]:
    """``bagent run`` on the same agents."""
    with tempfile.TemporaryDirectory(prefix="bagent-agents-") as name:
        folder = Path(name)
        write_job(folder, args, url, stream=stream)
        began = time.monotonic()
        command = "-m bagent run job.yaml --progress none --no-canary"
        done = subprocess.run(
            [sys.executable, *command.split()],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=ARM_SECONDS,
        )
        total = time.monotonic() - began
        if done.returncode:
            raise RuntimeError(done.stderr)
        attempts = lines_of(folder, "attempts")
        kinds: dict[str, int] = {}
        for line in lines_of(folder, "rows"):
            kinds[line["status"]] = kinds.get(line["status"], 0) + 1
        second = [line for line in attempts if line["turn"] == 2]
        return {
            "seconds": max(line["done"] for line in attempts)
            - min(line["sent"] for line in attempts),
            "tool_runs": len((folder / "runs.txt").read_text().splitlines()),
            "whole_command": total,
            "requests": len(attempts),
            "streamed": sum(record.get("first_token") is not None for record in attempts),
            "turn_seconds": [
                round(
                    median(
                        record["done"] - record["sent"]
                        for record in attempts
                        if record["turn"] == turn
                    ),
                    2,
                )
                for turn in (1, 2)
            ],
            "statuses": kinds,
            "cached_tokens_turn_2": median_low(line.get("cached_tokens") or 0 for line in second)
            if second
            else None,
        }


def cpu_so_far(pid: int | None) -> dict[str, Any]:
    """CPU seconds: the client's (of bagent all of its process), and those of a server's parts."""
    own = [
        resource.getrusage(target) for target in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    results = {"client_cpu_s": sum(record.ru_utime + record.ru_stime for record in own)}
    if pid is not None:
        from agents_help import cpu_seconds

        results |= {f"cpu_s of {name}": value for name, value in cpu_seconds(pid).items()}
    return results


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """All arms, their order turned round each time."""
    arms = ["holding", "freeing", *["nearest"] * args.nearest, "bagent", *["stream"] * args.stream]
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    result = {"simulated": not args.server, "agents": args.agents, "model": args.model}
    result |= {"rules": args.rules, "tokens": args.tokens, "choice": args.choice}
    result |= {"device": os.environ.get("DEVICE", "")}
    result["arms"] = results
    if not args.server:
        result["decode"] = args.decode
    from agents_help import engine

    begun, longest = time.monotonic(), 0.0
    opened = simulated(args.decode)
    if args.server:
        opened = contextlib.nullcontext(f"http://{args.server}/v1")
    with opened as url:
        asyncio.run(loop_arm(args, url, "freeing"))  # warms the prefixes, counts nothing
        bagent_arm(args, url, stream=False)
        for repeat in range(args.repeats):
            at = time.monotonic()
            if repeat and at + longest > begun + args.seconds:
                break
            turned = arms[repeat % len(arms) :] + arms[: repeat % len(arms)]
            for arm in turned if repeat % 2 == 0 else turned[::-1]:
                before, cpu = engine(url), cpu_so_far(args.pid)
                if arm in ("bagent", "stream"):
                    record = bagent_arm(args, url, stream=arm == "stream")
                else:
                    record = asyncio.run(loop_arm(args, url, arm))
                after = cpu_so_far(args.pid)
                record |= {name: round(after[name] - cpu.get(name, 0.0), 2) for name in after}
                record |= {name: round(value - before[name]) for name, value in engine(url).items()}
                results[arm].append(record | {"repeat": repeat, "load": os.getloadavg()[0]})
                print(repeat, arm, json.dumps(results[arm][-1]), flush=True)
            result["median_seconds"] = {
                arm: round(median(record["seconds"] for record in runs), 2)
                for arm, runs in results.items()
                if runs
            }
            if args.out:  # what was measured is kept, whatever comes next
                args.out.write_text(json.dumps(result, indent=1) + "\n")
            longest = max(longest, time.monotonic() - at)
    return result


def cost(args: argparse.Namespace) -> dict[str, Any]:
    """CPU per turn for each number of rows, each in a process of its own."""
    results = []
    for rows in args.rows.split(","):
        for repeat in range(args.repeats):
            argv = [sys.executable, __file__, "cost-once", "--rows", rows]
            done = subprocess.run(argv, capture_output=True, text=True, check=True)
            results.append(json.loads(done.stdout) | {"repeat": repeat, "load": os.getloadavg()[0]})
            print(json.dumps(results[-1]), flush=True)
    return {"runs": results}


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
    parser.add_argument("server", nargs="?", metavar="HOST:PORT", help="compare: the engine")
    parser.add_argument("model", nargs="?", metavar="MODEL", default="simulated-8b")
    parser.add_argument("--agents", type=int, default=AGENTS)
    parser.add_argument("--rules", type=int, default=RULES, help="length of the shared prompt")
    parser.add_argument("--choice", choices=list(CHOICES), default="required", help="first turn")
    parser.add_argument("--tokens", type=int, default=64, help="of each turn at most")
    parser.add_argument("--seconds", type=float, default=150, help="of all repeats together")
    parser.add_argument("--stream", action="store_true", help="compare: bagent streamed as well")
    parser.add_argument("--nearest", action="store_true", help="compare: the loop in that order")
    parser.add_argument("--pid", type=int, help="compare: process of a server on this machine")
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
