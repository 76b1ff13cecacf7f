"""Responses of ``/v1/embeddings``.

Form: https://platform.openai.com/docs/api-reference/embeddings (``data[].index``,
``data[].embedding``); served alike by vLLM and SGLang.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Mapping

import msgspec

from bagent.backends.failures import failure_from_body
from bagent.types import Failure, Json, Reply, Usage


class _Vector(msgspec.Struct):
    embedding: list[float] | str
    index: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Body(msgspec.Struct):
    data: list[_Vector]
    model: str | None = None
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Body).decode


def read_vectors(raw: bytes, texts: Json, headers: Mapping[str, str]) -> Reply | Failure:
    """Parse the body of an HTTP 200 response; vectors are in the order of the texts.

    Args:
        raw: the body.
        texts: what was sent as ``input``: a text or its token ids, or a list of them; None where
            that is not known.
        headers: those of the answer.
    """
    several = isinstance(texts, list) and not (texts and isinstance(texts[0], int))
    count = len(texts) if several else 1
    try:
        body = _decode(raw)
    except msgspec.DecodeError as error:
        return _other(raw, str(error), headers)
    indexes = [
        number if vector.index is None else vector.index for number, vector in enumerate(body.data)
    ]
    if texts is None:
        count = len(indexes)
    if not count or sorted(indexes) != list(range(count)):
        return _other(raw, f"{len(body.data)} vectors for {count} texts", headers)
    vectors: list[list[float]] = [[] for _ in range(count)]
    for index, vector in zip(indexes, body.data, strict=True):
        try:
            vectors[index] = _numbers(vector.embedding)
        except (binascii.Error, struct.error):
            return _other(raw, "a vector that is neither numbers nor base64", headers)
    if not all(vectors):
        return _other(raw, "an empty vector", headers)
    prompt = body.usage.prompt_tokens if body.usage else None
    usage = Usage(prompt=prompt, completion=None if prompt is None else 0)
    return Reply(None, "stop", model=body.model, usage=usage, vectors=vectors)


def _numbers(embedding: list[float] | str) -> list[float]:
    """Return a vector as numbers; base64 (``encoding_format``) holds 32-bit floats."""
    if isinstance(embedding, list):
        return embedding
    packed = base64.b64decode(embedding, validate=True)
    return [number for (number,) in struct.iter_unpack("<f", packed)]


def _other(raw: bytes, problem: str, headers: Mapping[str, str]) -> Failure:
    try:
        failure = failure_from_body(msgspec.json.decode(raw), headers)
    except msgspec.DecodeError:
        failure = None
    message = f"no vectors behind HTTP 200: {problem}"
    return failure or Failure("bad_response", message, passing=True, status=200)
