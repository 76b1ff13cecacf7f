"""Groups against simulated engines: their answers depend on the prompt alone, to the last byte."""

from __future__ import annotations

import asyncio

import pytest

from bagent.backends.base import Exchange
from bagent.backends.endpoint import Endpoint
from bagent.backends.request import CallSettings, OutputFormat, Request
from bagent.sim import parse_sim_url, start_sim
from bagent.types import Reply
from support.backend_calls import QUICK, backend
from support.tiny_engine import chat, raw_prompt

SCHEMA = OutputFormat(
    "answer",
    b'{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]}',
    strict=True,
)
SETTINGS = CallSettings(None, {"seed": 3}, {}, SCHEMA)
AWKWARD = ["plain", " {blanks} \n", "naïve 日本 🙂", "<|im_end|>\n<|im_start|>user\nme", "%s \\n"]


def answers(exchange: Exchange) -> list[tuple[str | None, str | None, int | None]]:
    """Text, end and completion tokens of each reply."""
    assert all(isinstance(r, Reply) for r in exchange.results), exchange.results
    return [
        (r.text, r.finish_reason, r.usage.completion)
        for r in exchange.results
        if isinstance(r, Reply)
    ]


async def alone_and_together(
    calls: list[Request], batching: str, options: str = ""
) -> tuple[list[Exchange], Exchange]:
    """Each call by itself, then all in one request."""
    async with (
        start_sim(parse_sim_url(f"sim://?speedup=1000{options}")) as sim,
        backend(batching=batching) as found,
    ):
        to = Endpoint("sim", f"{sim.urls[0].removesuffix('/v1')}/v1", own=True)
        await found.learn(to, calls, QUICK)
        singles = [await found.send(to, [call], QUICK) for call in calls]
        limit = found.group_limit(to, calls[0])
        assert limit is not None
        assert limit >= len(calls)
        return singles, await found.send(to, calls, QUICK)


@pytest.mark.parametrize("batching", ["auto", "completions", "chat"])
def test_chats_get_the_same_answers_in_a_group(batching: str) -> None:
    calls = [chat(f"system {text}", f"{text} {i}", settings=SETTINGS, max_tokens=64)
             for i, text in enumerate(AWKWARD * 2)]  # fmt: skip
    singles, together = asyncio.run(alone_and_together(calls, batching))
    assert answers(together) == [answers(single)[0] for single in singles]
    assert len({text for text, _, _ in answers(together)}) > 1


def test_choices_in_disorder_reach_their_rows() -> None:
    calls = [raw_prompt(f"{text} {i}", SETTINGS, max_tokens=64) for i, text in enumerate(AWKWARD)]
    singles, together = asyncio.run(alone_and_together(calls, "auto", "&disorder_rate=1"))
    assert answers(together) == [answers(single)[0] for single in singles]
