"""The clients that are compared: each sends all rows once and prints its own CPU seconds.

    python benchmarks/client_arms.py ARM URL ROWS.jsonl [--concurrency N] [--stream] [--lists]

ARM: ``bare`` (aiohttp and orjson, nothing kept), ``sdk`` (AsyncOpenAI, gather, a semaphore),
``bagent`` (``bagent run`` with everything on: template, schema, journal, metrics). With ``--lists``
the prompts are raw text without a schema and go as lists of 64 to ``/completions``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

SYSTEM = "You review code. Answer with a JSON object: verdict and findings."


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def bare(url: str, rows: list[dict], schema: dict, concurrency: int, stream: bool) -> int:
    """The least a Python client can do: send, parse, check nothing, keep nothing."""
    import aiohttp
    import orjson

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
    output = {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}
    done = 0
    async with aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20) as session:
        pending = iter(rows)

        async def worker() -> None:
            nonlocal done
            for row in pending:
                body = {
                    "model": "canned",
                    "temperature": 0,
                    "max_tokens": 512,
                    "response_format": output,
                    "messages": [
                        {"role": "system", "content": SYSTEM},
                        {"role": "user", "content": f"Review {row['id']}:\n{row['code']}"},
                    ],
                }
                if stream:
                    body |= {"stream": True, "stream_options": {"include_usage": True}}
                async with session.post(
                    f"{url}/chat/completions",
                    data=orjson.dumps(body),
                    headers={"Content-Type": "application/json"},
                ) as response:
                    if stream:
                        text = []
                        async for line in response.content:
                            if line.startswith(b"data: {"):
                                choices = orjson.loads(line[6:])["choices"]
                                if choices:
                                    text.append(choices[0]["delta"].get("content") or "")
                        answer = "".join(text)
                    else:
                        reply = orjson.loads(await response.read())
                        answer = reply["choices"][0]["message"]["content"]
                orjson.loads(answer)
                done += 1

        await asyncio.gather(*(worker() for _ in range(concurrency)))
    return done


LIST = 64


async def bare_lists(url: str, rows: list[dict], concurrency: int) -> int:
    """The same with lists of prompts: each answer is found by its index, nothing is kept."""
    import aiohttp
    import orjson

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
    done = 0
    async with aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20) as session:
        pending = iter([rows[i : i + LIST] for i in range(0, len(rows), LIST)])

        async def worker() -> None:
            nonlocal done
            for part in pending:
                body = {
                    "model": "canned",
                    "temperature": 0,
                    "max_tokens": 512,
                    "prompt": [f"Review {row['id']}:\n{row['code']}" for row in part],
                }
                async with session.post(
                    f"{url}/completions",
                    data=orjson.dumps(body),
                    headers={"Content-Type": "application/json"},
                ) as response:
                    reply = orjson.loads(await response.read())
                answers = {choice["index"]: choice["text"] for choice in reply["choices"]}
                done += sum(1 for index in range(len(part)) if answers[index])

        await asyncio.gather(*(worker() for _ in range(max(1, concurrency // LIST))))
    return done


async def sdk(url: str, rows: list[dict], schema: dict, concurrency: int, stream: bool) -> int:
    """What people write first: the SDK, gather, a semaphore."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    gate = asyncio.Semaphore(concurrency)
    output = {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}
    done = 0

    async def one(row: dict) -> None:
        nonlocal done
        async with gate:
            made = await client.chat.completions.create(
                model="canned",
                temperature=0,
                max_tokens=512,
                response_format=output,
                stream=stream,
                messages=[
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": f"Review {row['id']}:\n{row['code']}"},
                ],
            )
            if stream:
                text = [c.choices[0].delta.content or "" async for c in made if c.choices]
                json.loads("".join(text))
            else:
                json.loads(made.choices[0].message.content)
            done += 1

    await asyncio.gather(*(one(row) for row in rows))
    return done


class TimedDisplay:
    """A display of a run that counts the CPU seconds spent in it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.cpu_s = 0.0
        self.updates = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def update(self, snapshot: Any) -> None:
        """Draw, and count."""
        began = time.thread_time()
        self.inner.update(snapshot)
        self.cpu_s += time.thread_time() - began
        self.updates += 1


def timed_display() -> list[TimedDisplay]:
    """Has the run that follows count what its display costs; the display will be in the list."""
    from bagent.runs import execute

    results, make = [], execute.make_display

    def display(options: Any) -> Any:
        results.append(TimedDisplay(make(options)))
        return results[-1]

    execute.make_display = display
    return results


def bagent_run(url: str, path: Path, schema: dict, options: argparse.Namespace) -> int:
    """``bagent run`` in this process, as its console script does it."""
    from bagent.cli.app import main

    folder, stream, concurrency = path.parent, options.stream, options.concurrency
    job = {
        "name": "bench",
        "backend": {"url": url},
        "model": "canned",
        "input": str(path),
        "prompt": {"system": SYSTEM, "user": "Review {{ id }}:\n{{ code }}"},
        "output": {"schema": schema, "describe": "never"},
        "sampling": {"temperature": 0, "max_tokens": 512},
        "dedupe": False,
        "stream": stream if stream else "auto",
        "limits": {"concurrency": concurrency},
        "results": {"duckdb": False, "parquet": False},
    }
    if options.lists:
        del job["output"]
        job |= {
            "backend": {"url": url.replace("http://", "vllm://")},
            "prompt": {"raw": "Review {{ id }}:\n{{ code }}"},
            "batching": {"mode": "completions", "size": LIST},
        }
    (folder / "job.yaml").write_text(json.dumps(job))
    out = folder / f"run-{os.getpid()}"
    code = main(["run", str(folder / "job.yaml"), "-o", str(out), "--progress", options.progress])
    if code:
        raise SystemExit(code)
    return sum(1 for p in out.glob("journal/rows-*.jsonl") for _ in p.open())


def main_arm() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("arm", choices=["bare", "sdk", "bagent"])
    parser.add_argument("url")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--lists", action="store_true")
    parser.add_argument("--progress", default="plain")
    parser.add_argument("--time-display", action="store_true")
    parser.add_argument("--cpu", type=int)
    options = parser.parse_args()
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    from canned_server import SCHEMA

    started = time.perf_counter()
    displays = timed_display() if options.time_display else []
    args = (SCHEMA, options.concurrency, options.stream)
    if options.arm == "bagent":
        done = bagent_run(options.url, options.rows, SCHEMA, options)
    else:
        import uvloop

        rows = rows_of(options.rows)
        if options.lists:
            work = bare_lists(options.url, rows, options.concurrency)
        else:
            work = (bare if options.arm == "bare" else sdk)(options.url, rows, *args)
        done = uvloop.run(work)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(
        json.dumps(
            {
                "arm": options.arm,
                "rows": done,
                "cpu_s": used.ru_utime + used.ru_stime,
                "wall_s": time.perf_counter() - started,
                "rss_mb": used.ru_maxrss / 1024,
            }
            | ({"display_s": displays[0].cpu_s, "updates": displays[0].updates} if displays else {})
        )
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main_arm()
