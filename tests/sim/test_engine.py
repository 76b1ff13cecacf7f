"""The engine on a clock that the test moves: nothing here waits."""

from __future__ import annotations

import random

import pytest

from bagent.sim.config import BLOCK, EngineConfig
from bagent.sim.engine import Sequence, SimEngine, SimRequest
from bagent.sim.tokens import block_hashes, pack

CONFIG = EngineConfig(prefill=1000.0, decode=50.0, batch_slowdown=0.1, max_num_batched_tokens=8192)


def run_until_idle(engine: SimEngine) -> list[Sequence]:
    ended: list[Sequence] = []
    while (due := engine.next_event()) is not None:
        ended += [seq for seq in engine.advance(due) if seq.finished_at is not None]
    return ended


def finish(engine: SimEngine, request: SimRequest, at: float = 0.0) -> Sequence:
    """Submit a request and run it to its end."""
    seq = engine.submit(request, at)
    run_until_idle(engine)
    return seq


def ttft(seq: Sequence) -> float:
    assert seq.first_token_at is not None
    return seq.first_token_at - seq.arrived_at


def tpot(seq: Sequence) -> float:
    assert seq.finished_at is not None
    assert seq.first_token_at is not None
    return (seq.finished_at - seq.first_token_at) / (seq.request.output_tokens - 1)


def text_request(text: str, output: int = 8, salt: str | None = None) -> SimRequest:
    packed = pack(text)
    answer = pack("word" * output)
    blocks = block_hashes(packed + answer, BLOCK, salt)
    return SimRequest(len(packed) // 4, output, blocks)


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_time_per_token_follows_the_batch_formula(batch: int) -> None:
    engine = SimEngine(CONFIG)
    seqs = [engine.submit(SimRequest(10, 101), 0.0) for _ in range(batch)]
    run_until_idle(engine)
    # The first was admitted alone and decoded while the others were prefilled; the last was not.
    assert tpot(seqs[-1]) == pytest.approx((1 + 0.1 * (batch - 1)) / 50, rel=0.02)


@pytest.mark.parametrize("enabled", [True, False])
def test_lower_priority_number_is_served_earlier_where_enabled(enabled: bool) -> None:
    engine = SimEngine(EngineConfig(max_num_seqs=1, priority=enabled))
    first = engine.submit(SimRequest(10, 5), 0.0)
    late = engine.submit(SimRequest(10, 5, priority=5), 0.0)
    soon = engine.submit(SimRequest(10, 5, priority=-1), 0.0)
    assert run_until_idle(engine) == ([first, soon, late] if enabled else [first, late, soon])


def test_prefix_cache_shortens_the_second_prefill() -> None:
    engine = SimEngine(CONFIG)
    shared = "you are a careful reviewer. " * 40
    first = finish(engine, text_request(shared + "row one"))
    second = finish(engine, text_request(shared + "row two"), 10.0)
    common = len(shared) // 4 // BLOCK * BLOCK
    assert first.cached_tokens == 0
    assert second.cached_tokens == common
    assert ttft(second) == pytest.approx(ttft(first) - common / 1000)
    assert engine.stats.prefix_hits == common
    assert engine.stats.prefix_queries == 2 * first.request.prompt_tokens


def test_full_kv_cache_preempts_and_everyone_still_ends() -> None:
    engine = SimEngine(EngineConfig(max_model_len=256, kv_tokens=512, max_num_batched_tokens=4096))
    seqs = [engine.submit(SimRequest(64, 190), 0.0) for _ in range(8)]
    assert len(run_until_idle(engine)) == 8
    assert sum(seq.preemptions for seq in seqs) == engine.stats.preemptions > 0
    assert engine.stats.generation_tokens == 8 * 190


def test_steps_taken_together_give_the_times_of_single_steps() -> None:
    def ends(stream: bool) -> list[float | None]:
        engine = SimEngine(EngineConfig(max_model_len=512, kv_tokens=512, max_num_seqs=6))
        seqs = []
        for i in range(12):
            request = SimRequest(30 + 7 * i, 40 + 13 * i, stream=stream)
            engine.advance(0.1 * i)
            seqs.append(engine.submit(request, 0.1 * i))
        run_until_idle(engine)
        assert engine.stats.preemptions > 0
        return [seq.finished_at for seq in seqs]

    assert ends(stream=False) == pytest.approx(ends(stream=True))


def test_cancelled_requests_free_their_place_and_blocks() -> None:
    engine = SimEngine(EngineConfig(max_num_seqs=1, prefix_cache=False))
    running = engine.submit(SimRequest(100, 500), 0.0)
    queued = engine.submit(SimRequest(100, 5), 0.0)
    waiting = engine.submit(SimRequest(100, 5), 0.0)
    engine.cancel(queued, 0.5)
    assert engine.waiting == 1
    engine.cancel(running, 1.0)
    engine.cancel(running, 1.0)
    assert run_until_idle(engine) == [waiting]
    assert waiting.finished_at is not None
    assert waiting.finished_at < 1.5
    assert (engine.kv.usage, engine.stats.aborted) == (0.0, 2)


@pytest.mark.parametrize("seed", range(5))
def test_any_mix_of_arrivals_and_cancels_ends_with_nothing_held(seed: int) -> None:
    rng = random.Random(seed)
    length = rng.choice([64, 128, 512])
    config = EngineConfig(
        max_model_len=length,
        kv_tokens=length * rng.choice([1, 2, 5]),
        max_num_seqs=rng.choice([1, 3, 8, 40]),
        max_num_batched_tokens=rng.choice([40, 64, 512]),
        prefix_cache=rng.random() < 0.7,
        priority=rng.random() < 0.3,
    )
    engine = SimEngine(config)
    seqs: list[Sequence] = []
    now = 0.0
    for _ in range(150):
        now += rng.random() * rng.choice([0.001, 0.02, 0.3])
        engine.advance(now)
        if rng.random() < 0.7:
            prompt = rng.randint(1, length - 1)
            text = ("abcd" * rng.randint(0, prompt) + f"x{rng.randint(0, 5)}")[: 4 * prompt]
            packed = pack(text.ljust(4 * prompt, "y"))
            output = rng.randint(0, length - prompt)
            blocks = block_hashes(packed + pack("word" * output), BLOCK, None)
            request = SimRequest(prompt, output, blocks, rng.randint(-2, 2), rng.random() < 0.2)
            seqs.append(engine.submit(request, now))
        elif seqs:
            engine.cancel(rng.choice(seqs), now)
        assert 0 <= engine.kv.available <= engine.kv.capacity
        assert engine.running <= config.max_num_seqs
    run_until_idle(engine)
    assert (engine.running, engine.waiting, engine.kv.usage) == (0, 0, 0.0)
    for seq in seqs:
        assert (seq.finished_at is None) == seq.cancelled
        assert seq.cancelled or engine.generated(seq) == seq.request.output_tokens
