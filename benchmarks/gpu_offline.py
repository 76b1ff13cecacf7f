"""The ceiling: vLLM's own offline engine, kept warm and asked again and again.

    python benchmarks/gpu_offline.py llm MODEL_FOLDER --port 8010 [--kv-bytes N] [--dummy]
    python benchmarks/gpu_offline.py batch MODEL_FOLDER --port 8011

``llm`` is ``LLM.generate`` for raw texts and ``LLM.chat`` for chats; ``batch`` is what
``vllm run-batch`` does with a file, reading and writing it included, without the start of the
engine that the command pays each time. ``POST /run`` with ``{"rows": FILE, "shape": SHAPE}`` is
answered with seconds, tokens and texts, on a prefix cache emptied before. Shapes, prompts and
settings are those of ``gpu_modes.py``; the engine has the batch sizes of ``vllm serve`` on
an H100, so that the two differ in their front ends alone. Needs vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_modes import ASKED, SHAPES, SYSTEM

ENGINE = {"max_model_len": 8192, "max_num_batched_tokens": 8192, "max_num_seqs": 1024}
GRAMMARS = {"backend": "xgrammar", "disable_any_whitespace": True}


def texts_of(rows: str) -> list[str]:
    with Path(rows).open() as file:
        return [json.loads(line)["text"] for line in file]


def messages_of(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASKED + text}]


class Offline:
    """``LLM.generate`` and ``LLM.chat``."""

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm import LLM

        arguments: dict[str, Any] = {**ENGINE, "structured_outputs_config": GRAMMARS}
        if args.kv_bytes:
            arguments["kv_cache_memory_bytes"] = args.kv_bytes
        if args.dummy:
            arguments["load_format"] = "dummy"
        if args.small:
            arguments |= {"max_model_len": 2048, "max_num_seqs": 64, "enforce_eager": True}
            arguments |= {"max_num_batched_tokens": 2048, "block_size": 32}
        self.engine = LLM(args.model, gpu_memory_utilization=args.memory, **arguments)

    async def run(self, rows: str, shape: str) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        texts = texts_of(rows)
        self.engine.reset_prefix_cache()
        most = SHAPES[shape]["max_tokens"]
        began = time.monotonic()
        if "schema" in SHAPES[shape]:
            structured = StructuredOutputsParams(json=SHAPES[shape]["schema"])
            settings = SamplingParams(temperature=0, max_tokens=most, structured_outputs=structured)
            requests = [messages_of(text) for text in texts]
            done = self.engine.chat(requests, settings, use_tqdm=False)
        else:
            settings = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
            prompts = [ASKED + text for text in texts]
            done = self.engine.generate(prompts, settings, use_tqdm=False)
        seconds = time.monotonic() - began
        return {
            "seconds": seconds,
            "completion_tokens": sum(len(row.outputs[0].token_ids) for row in done),
            "texts": [row.outputs[0].text for row in done],
        }


class Batch:
    """What ``vllm run-batch`` does once its engine runs; chats alone."""

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm.entrypoints.openai.run_batch import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        arguments = ["-i", "-", "-o", "-", "--model", args.model, "--served-model-name", "small"]
        arguments += ["--gpu-memory-utilization", str(args.memory)]
        arguments += ["--structured-outputs-config", json.dumps(GRAMMARS)]
        engine = dict(ENGINE)
        if args.kv_bytes:
            arguments += ["--kv-cache-memory-bytes", str(args.kv_bytes)]
        if args.dummy:
            arguments += ["--load-format", "dummy"]
        if args.small:
            engine |= {"max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
            arguments += ["--enforce-eager", "--block-size", "32"]
        if args.replicas > 1:
            arguments += ["--data-parallel-size", str(args.replicas)]
        for name, value in engine.items():
            arguments += [f"--{name.replace('_', '-')}", str(value)]
        self.args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
        self.engine: Any = None
        self.served: Any = None

    async def run(self, rows: str, shape: str) -> dict[str, Any]:
        from vllm.entrypoints.openai import run_batch as program

        if "schema" not in SHAPES[shape]:
            raise ValueError("run-batch takes no text completions")
        if self.served is None:
            served = await program.build_endpoint_registry(self.engine, self.args)

            async def known(*, engine_client: Any, args: Any) -> Any:
                return served

            self.served = program.build_endpoint_registry = known  # made once, like the engine
        await self.engine.reset_prefix_cache()
        body = {"model": "small", "temperature": 0, "max_tokens": SHAPES[shape]["max_tokens"]}
        schema = {"name": "answer", "schema": SHAPES[shape]["schema"], "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
        with tempfile.TemporaryDirectory() as name:
            self.args.input_file = f"{name}/in.jsonl"
            self.args.output_file = f"{name}/out.jsonl"
            with Path(self.args.input_file).open("w") as file:
                for number, text in enumerate(texts_of(rows)):
                    row = {"custom_id": str(number), "method": "POST"}
                    row |= {"url": "/v1/chat/completions"}
                    row |= {"body": body | {"messages": messages_of(text)}}
                    file.write(json.dumps(row) + "\n")
            began = time.monotonic()
            await program.run_batch(self.engine, self.args)
            seconds = time.monotonic() - began
            with Path(self.args.output_file).open() as file:
                lines = [json.loads(line) for line in file]
        lines.sort(key=lambda line: int(line["custom_id"]))
        bodies = [line["response"]["body"] for line in lines]
        return {
            "seconds": seconds,
            "completion_tokens": sum(row["usage"]["completion_tokens"] for row in bodies),
            "texts": [row["choices"][0]["message"]["content"] for row in bodies],
        }


async def serve(kind: Offline | Batch, port: int) -> None:
    from aiohttp import web

    async def run(request: web.Request) -> web.Response:
        requests = await request.json()
        return web.json_response(await kind.run(requests["rows"], requests["shape"]))

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/run", run)
    app.router.add_get("/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


async def serve_batch(kind: Batch, port: int) -> None:
    from vllm.entrypoints.openai.api_server import build_async_engine_client
    from vllm.usage.usage_lib import UsageContext

    opened = build_async_engine_client(kind.args, usage_context=UsageContext.OPENAI_BATCH_RUNNER)
    async with opened as kind.engine:
        await serve(kind, port)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["llm", "batch"])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kv-bytes", type=int)
    parser.add_argument("--memory", type=float, default=0.1, help="share of the card's memory")
    parser.add_argument("--replicas", type=int, default=1, help="data_parallel_size of ``batch``")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--small", action="store_true", help="an engine for a try on a CPU")
    args = parser.parse_args()
    if args.kind == "llm":
        asyncio.run(serve(Offline(args), args.port))
    else:
        asyncio.run(serve_batch(Batch(args), args.port))


if __name__ == "__main__":
    main()
