"""A loop over ``AsyncOpenAI``, the client that users write first: an arm of ``gpu_compare.py``.

    python benchmarks/gpu_openai_loop.py ROWS.jsonl SHAPE HOST:PORT MODEL OUT.json
        [--concurrency 512]

Rows start in order, with ``--concurrency`` requests in flight, each a chat (shapes with a schema)
or a text completion. ``OUT.json`` has the seconds from the first request to the last answer, and
the texts in the order of the rows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

from gpu_modes import ASKED, SHAPES, SYSTEM
from openai import AsyncOpenAI, DefaultAioHttpClient


async def ask(client: AsyncOpenAI, shape: str, model: str, text: str) -> tuple[str, int]:
    """The answer to one row, and its tokens."""
    numbers = SHAPES[shape]
    common: dict[str, Any] = {
        "model": model,
        "temperature": 0,
        "max_tokens": numbers["max_tokens"],
    }
    if "schema" not in numbers:
        done = await client.completions.create(
            prompt=ASKED + text, extra_body={"ignore_eos": True}, **common
        )
        return done.choices[0].text, done.usage.completion_tokens
    schema = {"name": "answer", "schema": numbers["schema"], "strict": True}
    chat = await client.chat.completions.create(
        messages=[
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": ASKED + text},
        ],
        response_format={"type": "json_schema", "json_schema": schema},
        **common,
    )
    return chat.choices[0].message.content or "", chat.usage.completion_tokens


async def ask_all(options: argparse.Namespace) -> dict[str, Any]:
    texts = [json.loads(line)["text"] for line in options.rows.open()]
    slots = asyncio.Semaphore(options.concurrency)
    url = f"http://{options.address}/v1"
    http = DefaultAioHttpClient() if options.aiohttp else None
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=2, http_client=http) as client:

        async def one(text: str) -> tuple[str, int]:
            async with slots:
                return await ask(client, options.shape, options.model, text)

        began = time.monotonic()
        answers = await asyncio.gather(*(one(text) for text in texts))
        seconds = time.monotonic() - began
    return {
        "seconds": seconds,
        "completion_tokens": sum(tokens for _, tokens in answers),
        "texts": [text for text, _ in answers],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--concurrency", type=int, default=512)
    parser.add_argument("--aiohttp", action="store_true", help="the SDK's faster transport")
    options = parser.parse_args()
    options.out.write_text(json.dumps(asyncio.run(ask_all(options))))


if __name__ == "__main__":
    main()
