"""The answer of ``/v1/embeddings``: one vector for each text of a request.

Form: https://platform.openai.com/docs/api-reference/embeddings (``data[].index``,
``data[].embedding``); served alike by vLLM and SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from bagent.backends.failures import from_body_error
from bagent.types import Failure, Json, Reply, Usage

PATH = "/embeddings"


class _Vector(msgspec.Struct):
    embedding: list[float]
    index: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Body(msgspec.Struct):
    data: list[_Vector]
    model: str | None = None
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Body).decode


def read_vectors(raw: bytes, texts: Json, headers: Mapping[str, str]) -> Reply | Failure:
    """The vectors in the body of an HTTP 200 answer, in the order of the texts.

    Args:
        raw: the body.
        texts: what was sent as ``input``: a text or a list of them.
        headers: those of the answer.
    """
    count = len(texts) if isinstance(texts, list) else 1
    try:
        body = _decode(raw)
    except msgspec.DecodeError as error:
        return _other(raw, str(error), headers)
    places = [number if one.index is None else one.index for number, one in enumerate(body.data)]
    if sorted(places) != list(range(count)):
        return _other(raw, f"{len(body.data)} vectors for {count} texts", headers)
    vectors: list[list[float]] = [[] for _ in range(count)]
    for place, one in zip(places, body.data, strict=True):
        vectors[place] = one.embedding
    if not all(vectors):
        return _other(raw, "an empty vector", headers)
    prompt = body.usage.prompt_tokens if body.usage else None
    return Reply(None, "stop", model=body.model, usage=Usage(prompt=prompt), vectors=vectors)


def _other(raw: bytes, words: str, headers: Mapping[str, str]) -> Failure:
    try:
        failure = from_body_error(msgspec.json.decode(raw), headers)
    except msgspec.DecodeError:
        failure = None
    message = f"no vectors behind HTTP 200: {words}"
    return failure or Failure("bad_response", message, passing=True, status=200)
