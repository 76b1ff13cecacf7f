"""How many tokens prompts have: by the server's own tokenizer where it serves one.

Sources: vLLM's and SGLang's ``/tokenize`` (``prompt`` or ``messages`` in, ``count`` and ``tokens``
out) and llama.cpp's server (``/apply-template`` turns messages into text, ``/tokenize`` takes it
as ``content`` and answers only ``tokens``). None of these generates anything.
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

MOST_COUNTED = 64
"""Rows whose prompts the server counts; the others are estimated by these."""

LONGEST_COUNTED = 16
"""How many of these are the longest ones: they decide what fits the context."""

BYTES_PER_TOKEN = 4.0
"""Bytes of UTF-8 in a token where nobody counts: English prose has 4 to 4.5."""

_AT_ONCE = 8
_TIMEOUTS = Timeouts(connect=5.0, first_token=None, idle=None, total=30.0)
_NOT_SERVED = frozenset({404, 405, 501})


class Counted(msgspec.Struct, frozen=True):
    """Tokens of one prompt; ``packed`` are their ids, four bytes each, where they were told."""

    tokens: int
    packed: bytes | None = None


class Tokenizer(Protocol):
    """Counts the tokens of prompts."""

    name: str

    async def count(self, one: Sampled) -> Counted | None:
        """The tokens of one prompt, None where they cannot be told."""
        ...


class SimTokenizer:
    """The simulated engine's tokenizer, without the engine."""

    name = "the simulated engine's tokenizer"

    async def count(self, one: Sampled) -> Counted | None:
        """Always known."""
        from bagent.sim import tokens

        messages = one.messages
        packed = tokens.pack(one.prompt or "" if messages is None else tokens.render(messages))
        return Counted(tokens.count(packed), packed)


class ServerTokenizer:
    """The tokenizer that an endpoint serves; found out at the first prompt.

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

    async def count(self, one: Sampled) -> Counted | None:
        """The tokens that the server counts; after a missing route it is not asked again."""
        if not self.served:
            return None
        if not self._llama:
            found = _counted(await self._post("/tokenize", self._question(one)))
            if found is not None or not self.served:
                return found
        return await self._by_content(one)

    def _question(self, one: Sampled) -> dict[str, Json]:
        named: dict[str, Json] = {"model": self._model} if self._model else {}
        messages = one.messages
        if messages is not None:
            return {**named, "messages": messages}
        return {**named, "prompt": one.prompt or ""}

    async def _by_content(self, one: Sampled) -> Counted | None:
        """llama.cpp's way, which answers no ``count``."""
        text = one.prompt
        if text is None:
            applied = await self._post("/apply-template", {"messages": one.messages})
            text = applied.get("prompt") if isinstance(applied, dict) else None
        if not isinstance(text, str):
            return None
        question = {"content": text, "add_special": True, "parse_special": True}
        answer = await self._post("/tokenize", question)
        ids = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(ids, list) or (text and not ids):
            return None
        self._llama = True
        return Counted(len(ids), _packed(ids))

    async def _post(self, path: str, question: Json) -> Json:
        try:
            async with self._transport.post(
                self._endpoint, path, encode_payload(question), _TIMEOUTS
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


def chosen(
    sizes: Sequence[int], most: int = MOST_COUNTED, longest: int = LONGEST_COUNTED
) -> list[int]:
    """Which rows the server counts: all if few, else the longest and others spread evenly.

    Args:
        sizes: bytes of each prompt, in row order.

    Returns:
        Places in ``sizes``, ascending.
    """
    if len(sizes) <= most:
        return list(range(len(sizes)))
    by_size = sorted(range(len(sizes)), key=lambda place: -sizes[place])
    kept = set(by_size[:longest])
    rest = [place for place in range(len(sizes)) if place not in kept]
    wanted = most - longest
    kept.update(rest[number * len(rest) // wanted] for number in range(wanted))
    return sorted(kept)


async def count_some(sample: Sequence[Sampled], tokenizer: Tokenizer) -> dict[int, Counted]:
    """The counts of the :func:`chosen` rows of ``sample`` by place, a few asked for at once.

    The first is asked for alone: it shows whether there is a tokenizer at all.
    """
    places = [place for place, one in enumerate(sample) if one.request is not None]
    picked = [places[at] for at in chosen([sample[place].size for place in places])]
    gate = asyncio.Semaphore(_AT_ONCE)

    async def ask(place: int) -> tuple[int, Counted | None]:
        async with gate:
            return place, await tokenizer.count(sample[place])

    found = [await ask(place) for place in picked[:1]]
    found += await asyncio.gather(*(ask(place) for place in picked[1:]))
    return {place: counted for place, counted in found if counted is not None}
