"""Engine load from Prometheus metrics: vLLM, SGLang, Dynamo, llama.cpp.

Sources: vLLM ``vllm/v1/metrics/loggers.py`` (0.2x to 0.33, and the names before V1), SGLang
``srt/observability/metrics_collector.py`` (with ``--enable-metrics``), Dynamo's frontend
(``dynamo_frontend_*``), llama.cpp ``tools/server`` (with ``--metrics``). Counters are matched with
and without the ``_total`` that Prometheus clients add.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from bagent.backends.endpoint import Endpoint
from bagent.backends.http.client import NETWORK_ERRORS, Transport
from bagent.clocks import unix

ROUTE = "/metrics"

MISSING_SECONDS = 300.0
"""Seconds until an endpoint without metrics is asked again: a restarted engine may have them."""

_REDIRECTS = (301, 302, 307, 308)
_MISSING = (401, 403, 404, 405, 410, 501)


class EngineLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one server reported of its load at one time; None where it reported nothing.

    Counts are sums over the server's engines (data-parallel ranks), counters (``preemptions``
    and all below but ``capacity``) are since the engine's start and fall when it restarts.
    Cache counters are in prompt tokens: looked up, and found.

    Attributes:
        at: Unix seconds.
        running: requests in the batch.
        waiting: requests that wait for a place in it. Dynamo's frontend counts until the first
            token, so there it is what cannot run at once by ``capacity``; None without that.
        deferred: those of ``waiting`` that wait for something else than room (a grammar, a
            transfer, an adapter).
        kv_usage: share of the KV cache in use, 0 to 1: the maximum over the engines. The fullest
            one preempts first, and a mean would hide it behind idle ones.
        capacity: how many requests may run at once, if reported.
        engine: ``vllm``, ``sglang``, ``dynamo`` or ``llamacpp``.
    """

    at: float
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    preemptions: int | None = None
    cache_hits: int | None = None
    cache_queries: int | None = None
    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    engine: str | None = None
    deferred: int | None = None
    capacity: int | None = None


class _Sample(NamedTuple):
    engine: str
    field: str
    labels: dict[bytes, bytes]
    value: float


_NAMES = {
    "vllm": {
        "vllm:num_requests_running": "running",
        "vllm:num_requests_waiting": "waiting",
        "vllm:num_requests_waiting_by_reason": "by_reason",
        "vllm:kv_cache_usage_perc": "kv_usage",
        "vllm:gpu_cache_usage_perc": "kv_usage",
        "vllm:num_preemptions": "preemptions",
        "vllm:prefix_cache_hits": "cache_hits",
        "vllm:prefix_cache_queries": "cache_queries",
        "vllm:gpu_prefix_cache_hits": "cache_hits",
        "vllm:gpu_prefix_cache_queries": "cache_queries",
        "vllm:prompt_tokens": "prompt_tokens",
        "vllm:generation_tokens": "generation_tokens",
    },
    "sglang": {
        "sglang:num_running_reqs": "running",
        "sglang:num_queue_reqs": "waiting",
        "sglang:token_usage": "kv_usage",
        # Not num_retracted_reqs, which is a gauge of the last batch.
        "sglang:num_retracted_requests": "preemptions",
        "sglang:cached_tokens": "cache_hits",
        "sglang:prompt_tokens": "prompt_tokens",
        "sglang:generation_tokens": "generation_tokens",
        "sglang:max_running_requests": "capacity",
    },
    "dynamo": {
        "dynamo_frontend_inflight_requests": "in_flight",
        "dynamo_frontend_queued_requests": "queued",
        "dynamo_frontend_router_queue_pending_requests": "pending",
        "dynamo_frontend_model_max_num_seqs": "worker_capacity",
        "dynamo_frontend_model_total_kv_blocks": "worker_blocks",
        "dynamo_frontend_worker_active_decode_blocks": "active_blocks",
        "dynamo_frontend_cached_tokens_sum": "cache_hits",
        "dynamo_frontend_input_sequence_tokens_sum": "prompt_tokens",
        "dynamo_frontend_output_tokens": "generation_tokens",
    },
    "llamacpp": {
        "llamacpp:requests_processing": "running",
        "llamacpp:requests_deferred": "waiting",
        "llamacpp:kv_cache_usage_ratio": "kv_usage",
        "llamacpp:prompt_tokens": "prompt_tokens",
        "llamacpp:tokens_predicted": "generation_tokens",
    },
}
_SERIES = {
    f"{name}{end}".encode(): (engine, field)
    for engine, names in _NAMES.items()
    for name, field in names.items()
    for end in ("", "_total")
}
_LABEL = re.compile(rb'[\s,]*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(rb'\\([\\"n])')
_MODEL_LABELS = (b"model_name", b"model")
_RANKS = frozenset((b"tp_rank", b"pp_rank", b"moe_ep_rank", b"pid"))
"""Labels of series that repeat one number: the ranks of an engine run the same batch."""


def parse_load(text: bytes, at: float, model: str | None = None) -> EngineLoad | None:
    """Parse a Prometheus exposition; None if it has no known series.

    Lines that are not samples, and values that are negative or not finite, are ignored.

    Args:
        text: the body of ``/metrics``.
        at: when it was read, Unix seconds.
        model: the model that is asked for. It chooses among several models on one server; if it
            is not among them, no number is reported.
    """
    samples = [sample for sample in _samples(text) if sample.labels.get(b"priority", b"") == b""]
    if not samples:
        return None
    count: dict[str, int] = {}
    for sample in samples:
        count[sample.engine] = count.get(sample.engine, 0) + 1
    # A Dynamo frontend may forward its workers' own series, which are more precise.
    engine = max(count, key=lambda name: (name != "dynamo", count[name]))
    chosen = _of_model([sample for sample in samples if sample.engine == engine], model)
    fields: dict[str, list[_Sample]] = {}
    for sample in chosen:
        fields.setdefault(sample.field, []).append(sample)
    if engine == "dynamo":
        return _dynamo_load(fields, at)
    return _engine_load(fields, at, engine)


def _samples(text: bytes) -> Iterable[_Sample]:
    """Yield the samples of the known series, in order."""
    series_of = _SERIES.get
    for line in text.split(b"\n"):
        if line.startswith(b"#"):
            continue
        name, brace, tail = line.partition(b"{")
        name = name.rstrip()
        if not brace or b" " in name:  # no labels; a brace then belongs to an exemplar
            brace = b""
            name, _, tail = line.replace(b"\t", b" ").partition(b" ")
        series = series_of(name)
        if series is None:
            continue
        labels: dict[bytes, bytes] = {}
        if brace:
            end = 0
            while label := _LABEL.match(tail, end):
                labels[label[1]] = label[2]
                end = label.end()
            tail = tail[end:].lstrip(b" ,\t")
            if tail[:1] != b"}":
                continue
            tail = tail[1:]
        value = _number(tail)
        if value is not None:
            yield _Sample(*series, labels, value)


def _number(tail: bytes) -> float | None:
    """Return the value at the start of ``tail``; a timestamp or an exemplar may follow."""
    fields = tail.split(None, 1)
    try:
        value = float(fields[0]) if fields else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def _of_model(samples: list[_Sample], model: str | None) -> list[_Sample]:
    """Return the samples of ``model`` and those without a model, if there are several models."""
    named = [(_model(sample), sample) for sample in samples]
    models = {name for name, _ in named if name is not None}
    if model is None or len(models) < 2:
        return samples
    if model not in models:  # perhaps an alias: its load is unknown
        return []
    return [sample for name, sample in named if name is None or name == model]


def _model(sample: _Sample) -> str | None:
    for label in _MODEL_LABELS:
        if label in sample.labels:
            plain = _ESCAPE.sub(
                lambda match: b"\n" if match[1] == b"n" else match[1], sample.labels[label]
            )
            return plain.decode("utf-8", "replace")
    return None


def _total(samples: list[_Sample] | None) -> int | None:
    """Return the sum over engines; of the ranks of one engine the maximum."""
    if not samples:
        return None
    engines: dict[frozenset[tuple[bytes, bytes]], float] = {}
    for sample in samples:
        key = frozenset(pair for pair in sample.labels.items() if pair[0] not in _RANKS)
        engines[key] = max(engines.get(key, 0.0), sample.value)
    return round(sum(engines.values()))


def _engine_load(fields: dict[str, list[_Sample]], at: float, engine: str) -> EngineLoad:
    get = fields.get
    deferred = [
        sample for sample in get("by_reason", ()) if sample.labels.get(b"reason") == b"deferred"
    ]
    prompt = _total(get("prompt_tokens"))
    hits = _total(get("cache_hits"))
    queries = _total(get("cache_queries"))
    if engine == "sglang" and hits is not None:
        queries = prompt  # it looks up whole prompts and has no counter for that
    return EngineLoad(
        at=at,
        running=_total(get("running")),
        waiting=_total(get("waiting")),
        kv_usage=max((sample.value for sample in get("kv_usage", ())), default=None),
        preemptions=_total(get("preemptions")),
        cache_hits=hits,
        cache_queries=queries,
        prompt_tokens=prompt,
        generation_tokens=_total(get("generation_tokens")),
        engine=engine,
        deferred=_total(deferred),
        capacity=_total(get("capacity")),
    )


def _dynamo_load(fields: dict[str, list[_Sample]], at: float) -> EngineLoad:
    """Return the load as Dynamo's frontend sees its workers.

    ``queued_requests`` ends with the first token, so it includes requests in prefill: only those
    beyond the workers' slots count as waiting.
    """
    get = fields.get
    active = get("active_blocks", [])
    workers = {
        (sample.labels.get(b"worker_id"), sample.labels.get(b"dp_rank")) for sample in active
    }
    slots = max((sample.value for sample in get("worker_capacity", ())), default=0.0)
    blocks = max((sample.value for sample in get("worker_blocks", ())), default=0.0)
    capacity = round(slots) * len(workers) or None
    in_flight, queued, pending = (_total(get(name)) for name in ("in_flight", "queued", "pending"))
    waiting = pending or None
    if in_flight is not None and queued is not None and capacity is not None:
        waiting = max(pending or 0, min(queued, in_flight - capacity), 0)
    running = None if in_flight is None else max(0, in_flight - (waiting or 0))
    prompt = _total(get("prompt_tokens"))
    hits = _total(get("cache_hits"))
    return EngineLoad(
        at=at,
        running=running,
        waiting=waiting,
        kv_usage=max(sample.value for sample in active) / blocks if active and blocks else None,
        cache_hits=hits,
        cache_queries=None if hits is None else prompt,
        prompt_tokens=prompt,
        generation_tokens=_total(get("generation_tokens")),
        engine="dynamo",
        capacity=capacity,
    )


async def _read(
    transport: Transport,
    endpoint: Endpoint,
    seconds: float,
    model: str | None,
    clock: Callable[[], float],
) -> tuple[EngineLoad | None, bool]:
    """Return the load, and whether the endpoint has no metrics."""
    url = endpoint.root + ROUTE
    try:
        status, raw, _ = await transport.get(endpoint, url, seconds)
        if status in _REDIRECTS:  # a mounted application redirects to its path with "/"
            status, raw, _ = await transport.get(endpoint, url + "/", seconds)
    except NETWORK_ERRORS:
        return None, False
    if status != 200:
        return None, status in _MISSING or status in _REDIRECTS
    load = parse_load(raw, clock(), model)
    return load, load is None


class LoadReader:
    """Reads the load of endpoints and remembers those without metrics.

    Args:
        transport: how they are reached.
        clock: Unix seconds.
    """

    def __init__(self, transport: Transport, clock: Callable[[], float] = unix) -> None:
        self._transport = transport
        self._clock = clock
        self._again_at: dict[str, float] = {}

    def due(self, endpoint: Endpoint) -> bool:
        """Return whether the endpoint should be asked now."""
        return self._clock() >= self._again_at.get(endpoint.name, 0.0)

    async def read(
        self, endpoint: Endpoint, seconds: float, model: str | None = None
    ) -> EngineLoad | None:
        """Return the endpoint's load; None if it has none, usually without a request.

        Args:
            endpoint: where to ask.
            seconds: how long to wait for the answer.
            model: the model that is asked for, see :func:`parse_load`.
        """
        if not self.due(endpoint):
            return None
        load, missing = await _read(self._transport, endpoint, seconds, model, self._clock)
        if missing:
            self._again_at[endpoint.name] = self._clock() + MISSING_SECONDS
        return load
