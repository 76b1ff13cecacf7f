"""Counters and histograms of one simulated engine, as Prometheus text.

Names, types, labels and bucket bounds are those of vLLM's V1 engine
(``vllm/v1/metrics/loggers.py``), so that readers of a vLLM server read this one too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import TYPE_CHECKING

from bagent.sim.config import BLOCK

if TYPE_CHECKING:
    from bagent.sim.engine import Sequence, SimEngine

_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_PER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip
_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_STEP_TOKENS = tuple(float(2**i) for i in (0, *range(3, 15)))
_PREEMPTIONS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


def _one_two_five(limit: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, ... up to ``limit``."""
    bounds: list[float] = []
    scale = 1
    while scale <= limit:
        bounds.extend(float(scale * m) for m in (1, 2, 5) if scale * m <= limit)
        scale *= 10
    return tuple(bounds)


class Histogram:
    """Counts of values by upper bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value`` ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def lines(self, name: str, labels: str) -> list[str]:
        """Return the Prometheus lines of this histogram."""
        lines: list[str] = []
        below = 0
        for bound, counted in zip((*self.bounds, float("inf")), self.counts, strict=True):
            below += counted
            limit = "+Inf" if bound == float("inf") else str(bound)
            lines.append(f'{name}_bucket{{{labels},le="{limit}"}} {float(below)}')
        lines.append(f"{name}_count{{{labels}}} {float(below)}")
        lines.append(f"{name}_sum{{{labels}}} {self.total}")
        return lines


class EngineStats:
    """Counters of one engine since its start; times in seconds, lengths in tokens."""

    def __init__(self, max_model_len: int) -> None:
        lengths = _one_two_five(max_model_len)
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.rejected = 0
        self.aborted = 0
        self.success = {"stop": 0, "length": 0}
        self.ttft = Histogram(_TTFT)
        self.itl = Histogram(_PER_TOKEN)
        self.step_tokens = Histogram(_STEP_TOKENS)
        self.tpot = Histogram(_PER_TOKEN)
        self.e2e = Histogram(_LATENCY)
        self.queue = Histogram(_LATENCY)
        self.prefill = Histogram(_LATENCY)
        self.decode = Histogram(_LATENCY)
        self.inference = Histogram(_LATENCY)
        self.request_preemptions = Histogram(_PREEMPTIONS)
        self.request_prompt = Histogram(lengths)
        self.request_generation = Histogram(lengths)
        self.request_max_tokens = Histogram(lengths)

    def admitted(self, tokens: int, cached: int) -> None:
        """Count a request of ``tokens`` prompt tokens, ``cached`` of them reused."""
        self.prefix_queries += tokens
        self.prefix_hits += cached
        self.prompt_tokens += tokens
        self.cached_tokens += cached

    def stepped(self, tokens: int, decoded: int, seconds: float, times: int) -> None:
        """Count ``times`` equal steps of ``tokens`` tokens, ``decoded`` of them new ones."""
        self.step_tokens.observe(tokens, times)
        if decoded:
            self.itl.observe(seconds, decoded * times)
            self.generation_tokens += decoded * times

    def finished(self, seq: Sequence) -> None:
        """Count the end of a sequence."""
        request = seq.request
        if seq.admitted_at is None or seq.first_token_at is None or seq.finished_at is None:
            raise ValueError("the sequence has not finished")
        self.success["stop" if request.stopped else "length"] += 1
        decode = seq.finished_at - seq.first_token_at
        self.e2e.observe(seq.finished_at - seq.arrived_at)
        self.queue.observe(seq.admitted_at - seq.arrived_at)
        self.prefill.observe(seq.first_token_at - seq.admitted_at)
        self.decode.observe(decode)
        self.inference.observe(seq.finished_at - seq.admitted_at)
        self.request_preemptions.observe(seq.preemptions)
        self.request_prompt.observe(request.prompt_tokens)
        self.request_generation.observe(request.output_tokens)
        if request.max_tokens:
            self.request_max_tokens.observe(request.max_tokens)
        if request.output_tokens > 1:
            self.tpot.observe(decode / (request.output_tokens - 1))


def render_metrics(engine: SimEngine, model: str, faults: Mapping[str, int]) -> str:
    """Return the text of ``/metrics``: vLLM's series and ``bagent_sim_faults_total`` by kind."""
    stats = engine.stats
    labels = f'engine="0",model_name="{_escaped(model)}"'
    lines: list[str] = []

    def series(name: str, kind: str, text: str, values: Mapping[str, float]) -> None:
        full_name = f"{name}_total" if kind == "counter" else name
        lines.append(f"# HELP {full_name} {text}")
        lines.append(f"# TYPE {full_name} {kind}")
        lines.extend(f"{full_name}{{{tags}}} {float(value)}" for tags, value in values.items())

    for name, text, value in _gauges(engine):
        series(f"vllm:{name}", "gauge", text, {labels: value})
    for name, text, value in _counters(stats):
        series(f"vllm:{name}", "counter", text, {labels: value})
    series(
        "vllm:num_requests_waiting_by_reason",
        "gauge",
        "Number of waiting requests by reason.",
        {f'{labels},reason="capacity"': engine.waiting, f'{labels},reason="deferred"': 0},
    )
    reasons = {**stats.success, "abort": stats.aborted}
    series(
        "vllm:request_success",
        "counter",
        "Count of successfully processed requests.",
        {f'{labels},finished_reason="{reason}"': n for reason, n in reasons.items()},
    )
    series(
        "vllm:admission_rejections",
        "counter",
        "Number of requests refused because the queue was full.",
        {f'{labels},reason="num_queued_reqs"': stats.rejected},
    )
    cache = f'block_size="{BLOCK}",engine="0",num_gpu_blocks="{engine.kv.capacity}"'
    caching = str(engine.config.prefix_cache)
    series(
        "vllm:cache_config_info",
        "gauge",
        "Information of the LLMEngine CacheConfig",
        {f'{cache},enable_prefix_caching="{caching}"': 1},
    )
    for name, text, histogram in _histograms(stats):
        lines += [f"# HELP vllm:{name} {text}", f"# TYPE vllm:{name} histogram"]
        lines += histogram.lines(f"vllm:{name}", labels)
    series(
        "bagent_sim_faults",
        "counter",
        "Faults made on purpose.",
        {f'kind="{kind}"': n for kind, n in faults.items()},
    )
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _gauges(engine: SimEngine) -> list[tuple[str, str, float]]:
    return [
        ("num_requests_running", "Number of requests in model execution batches.", engine.running),
        ("num_requests_waiting", "Number of requests waiting to be processed.", engine.waiting),
        ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", engine.kv.usage),
    ]


def _counters(stats: EngineStats) -> list[tuple[str, str, float]]:
    return [
        (
            "prefix_cache_queries",
            "Prefix cache queries, in terms of number of queried tokens.",
            stats.prefix_queries,
        ),
        (
            "prefix_cache_hits",
            "Prefix cache hits, in terms of number of cached tokens.",
            stats.prefix_hits,
        ),
        ("num_preemptions", "Cumulative number of preemption from the engine.", stats.preemptions),
        ("prompt_tokens", "Number of prefill tokens processed.", stats.prompt_tokens),
        ("prompt_tokens_cached", "Number of cached prompt tokens.", stats.cached_tokens),
        ("generation_tokens", "Number of generation tokens processed.", stats.generation_tokens),
    ]


def _histograms(stats: EngineStats) -> list[tuple[str, str, Histogram]]:
    return [
        ("time_to_first_token_seconds", "Time to first token in seconds.", stats.ttft),
        ("inter_token_latency_seconds", "Inter-token latency in seconds.", stats.itl),
        (
            "request_time_per_output_token_seconds",
            "Time per output token per request, in seconds.",
            stats.tpot,
        ),
        ("e2e_request_latency_seconds", "E2E request latency in seconds.", stats.e2e),
        ("request_queue_time_seconds", "Time spent in WAITING phase.", stats.queue),
        ("request_prefill_time_seconds", "Time spent in PREFILL phase.", stats.prefill),
        ("request_decode_time_seconds", "Time spent in DECODE phase.", stats.decode),
        ("request_inference_time_seconds", "Time spent in RUNNING phase.", stats.inference),
        ("iteration_tokens_total", "Number of tokens per engine_step.", stats.step_tokens),
        ("request_num_preemptions", "Preemptions per request.", stats.request_preemptions),
        ("request_prompt_tokens", "Number of prefill tokens processed.", stats.request_prompt),
        (
            "request_generation_tokens",
            "Number of generation tokens processed.",
            stats.request_generation,
        ),
        (
            "request_params_max_tokens",
            "Histogram of the max_tokens request parameter.",
            stats.request_max_tokens,
        ),
    ]
