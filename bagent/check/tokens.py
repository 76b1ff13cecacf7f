"""Tokens of prompts, by the server's tokenizer where it serves one.

Routes: vLLM's and SGLang's ``/tokenize`` (``prompt`` or ``messages`` in, ``count`` and ``tokens``
out), and llama.cpp's server (``/apply-template`` turns messages into text, ``/tokenize`` takes it
as ``content`` and returns only ``tokens``). None of these generates anything.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import Protocol

import msgspec

from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.http.client import NETWORK_ERRORS, Transport
from bagent.backends.request import encode_payload
from bagent.check.sample import Sampled
from bagent.text.json import decode_json
from bagent.types import Json

MAX_COUNTED = 64
"""Rows whose prompts the server counts; the others are estimated by these."""

LONGEST_COUNTED = 16
"""How many of these are the longest prompts, which decide what fits the context."""

BYTES_PER_TOKEN = 4.0
"""Bytes of UTF-8 per token without a tokenizer: English prose has 4 to 4.5."""

_AT_ONCE = 8
_TIMEOUTS = Timeouts(connect=5.0, first_token=None, idle=None, total=30.0)
_NOT_SERVED = frozenset({404, 405, 501})


class Counted(msgspec.Struct, frozen=True):
    """Tokens of one prompt."""

    tokens: int
    packed: bytes | None = None
    """Token ids, four bytes each, where the server returns them."""


class Tokenizer(Protocol):
    """Counts the tokens of prompts."""

    name: str

    async def count(self, sampled: Sampled) -> Counted | None:
        """Return the tokens of one prompt; None where they are unknown."""
        ...


class SimTokenizer:
    """The simulated engine's tokenizer, without the engine."""

    name = "the simulated engine's tokenizer"

    async def count(self, sampled: Sampled) -> Counted | None:
        """Return the tokens of one prompt."""
        from bagent.sim import tokens

        messages = sampled.messages
        packed = tokens.pack(sampled.prompt or "" if messages is None else tokens.render(messages))
        return Counted(tokens.count(packed), packed)


class ServerTokenizer:
    """The tokenizer of an endpoint, detected at the first prompt.

    Args:
        model: the model to name; None leaves it to the server.
    """

    def __init__(self, transport: Transport, endpoint: Endpoint, model: str | None) -> None:
        self._transport = transport
        self._endpoint = msgspec.structs.replace(endpoint, url=endpoint.root)
        self._model = model
        self.name = f"/tokenize of {endpoint.name}"
        self.served = True
        self._llama = False

    async def count(self, sampled: Sampled) -> Counted | None:
        """Return the tokens that the server counts; after a missing route it is not asked again."""
        if not self.served:
            return None
        if not self._llama:
            counted = _counted(await self._post("/tokenize", self._payload(sampled)))
            if counted is not None or not self.served:
                return counted
        return await self._by_content(sampled)

    def _payload(self, sampled: Sampled) -> dict[str, Json]:
        named: dict[str, Json] = {"model": self._model} if self._model else {}
        messages = sampled.messages
        if messages is not None:
            return {**named, "messages": messages}
        return {**named, "prompt": sampled.prompt or ""}

    async def _by_content(self, sampled: Sampled) -> Counted | None:
        """Count the way of llama.cpp, which returns no ``count``."""
        text = sampled.prompt
        if text is None:
            applied = await self._post("/apply-template", {"messages": sampled.messages})
            text = applied.get("prompt") if isinstance(applied, dict) else None
        if not isinstance(text, str):
            return None
        payload = {"content": text, "add_special": True, "parse_special": True}
        answer = await self._post("/tokenize", payload)
        ids = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(ids, list) or (text and not ids):
            return None
        self._llama = True
        return Counted(len(ids), _packed(ids))

    async def _post(self, path: str, payload: Json) -> Json:
        try:
            async with self._transport.post(
                self._endpoint, path, encode_payload(payload), _TIMEOUTS
            ) as response:
                if response.status != 200:
                    self.served = self.served and response.status not in _NOT_SERVED
                    return None
                return decode_json(await response.read())
        except NETWORK_ERRORS:
            self.served = False
            return None


def _counted(answer: Json) -> Counted | None:
    if not isinstance(answer, dict):
        return None
    count, ids = answer.get("count"), answer.get("tokens")
    if isinstance(count, bool) or not isinstance(count, int):
        return None
    return Counted(count, _packed(ids) if isinstance(ids, list) else None)


def _packed(ids: list[Json]) -> bytes | None:
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error:
        return None


def choose_rows(
    sizes: Sequence[int], limit: int = MAX_COUNTED, longest: int = LONGEST_COUNTED
) -> list[int]:
    """Return the indexes of the rows that the server counts, ascending.

    These are all if few, else the longest and others spread evenly.

    Args:
        sizes: bytes of each prompt, in row order.
    """
    if len(sizes) <= limit:
        return list(range(len(sizes)))
    by_size = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    chosen = set(by_size[:longest])
    others = [index for index in range(len(sizes)) if index not in chosen]
    more = limit - longest
    chosen.update(others[number * len(others) // more] for number in range(more))
    return sorted(chosen)


async def count_sample(sample: Sequence[Sampled], tokenizer: Tokenizer) -> dict[int, Counted]:
    """Return the counts of the chosen rows of ``sample`` by index, a few at once.

    The first is counted alone: it shows whether there is a tokenizer at all.
    """
    indexes = [index for index, sampled in enumerate(sample) if sampled.is_one_text]
    chosen = [
        indexes[position] for position in choose_rows([sample[index].size for index in indexes])
    ]
    gate = asyncio.Semaphore(_AT_ONCE)

    async def ask(index: int) -> tuple[int, Counted | None]:
        async with gate:
            return index, await tokenizer.count(sample[index])

    results = [await ask(index) for index in chosen[:1]]
    results += await asyncio.gather(*(ask(index) for index in chosen[1:]))
    return {index: counted for index, counted in results if counted is not None}
