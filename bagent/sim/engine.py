"""The simulated engine: continuous batching with chunked prefill, on a clock that the caller
provides.

The engine works in steps, as vLLM's V1 scheduler does. A step gives every decoding sequence one
token and spends the rest of its token budget on prefills, first come first served. A request's
first token comes at the end of the step that finishes its prefill:

* a step takes ``p / prefill + (1 + batch_slowdown * (b - 1)) / decode`` seconds with ``p`` prompt
  tokens and ``b`` decoding sequences (without the second term for ``b`` = 0);
* alone, a request of ``P`` uncached tokens that fits one step has TTFT = ``P / prefill`` and
  TPOT = ``1 / decode``;
* with ``b`` decoding all the time, TPOT = ``(1 + batch_slowdown * (b - 1)) / decode``.

The KV cache is numbers of blocks. A block is *private* (not yet full) or *named* by the hash of all
tokens up to its end. Named blocks are shared by sequences with the same beginning and counted by
users. One without users stays cached until its room is needed, the least recently used first, as in
vLLM's block pool. When the cache is full, the sequence admitted last is preempted: it returns to
the queue and is computed again from its prompt and what it had generated.

Equal steps are taken together. Between two events (an arrival, an end, a full cache) only counts
change, so the cost of a sequence does not depend on its length. While a sequence is streamed,
every step is an event.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import msgspec

from bagent.sim.config import BLOCK, EngineConfig
from bagent.sim.metrics import EngineStats


class BlockCache:
    """Counts blocks; it holds no data.

    Args:
        capacity: number of blocks.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._private = 0
        self._users: dict[int, int] = {}
        self._idle: dict[int, None] = {}

    @property
    def available(self) -> int:
        """Return the blocks that can be taken: free ones and cached ones without users."""
        return self.capacity - self._private - len(self._users) + len(self._idle)

    @property
    def usage(self) -> float:
        """Return the share of blocks in use by sequences, from 0 to 1."""
        return 1.0 - self.available / self.capacity

    def match(self, hashes: Seq[int], limit: int) -> int:
        """Return how many leading blocks of ``hashes``, at most ``limit``, are cached."""
        users = self._users
        for i in range(min(len(hashes), limit)):
            if hashes[i] not in users:
                return i
        return min(len(hashes), limit)

    def acquire(self, hashes: Seq[int], private: int, spare: int = 0) -> bool:
        """Take the named blocks ``hashes`` and ``private`` more; return False if they do not fit.

        ``spare`` blocks stay available for others.
        """
        users, idle = self._users, self._idle
        needed = private + spare
        for name in hashes:
            if users.get(name, 0) == 0:
                needed += 1
        if needed > self.available:
            return False
        for name in hashes:
            used = users.get(name)
            if used == 0:
                del idle[name]
            users[name] = (used or 0) + 1
        self._private += private
        self._evict()
        return True

    def grow(self, blocks: int) -> None:
        """Take ``blocks`` more private blocks; the caller has checked :attr:`available`."""
        self._private += blocks
        self._evict()

    def release(self, hashes: Seq[int], private: int, named: Seq[int] = ()) -> None:
        """Free the blocks of a sequence.

        Args:
            hashes: its named blocks.
            private: its private blocks.
            named: names of the private blocks that are full and stay cached.
        """
        users, idle = self._users, self._idle
        self._private -= private
        for name in reversed(named):
            if name not in users:
                users[name] = 0
                idle[name] = None
        for name in reversed(hashes):
            users[name] -= 1
            if not users[name]:
                idle[name] = None

    def _evict(self) -> None:
        excess = self._private + len(self._users) - self.capacity
        for _ in range(excess):
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            del self._users[oldest]


class SimRequest(msgspec.Struct, frozen=True):
    """One sequence to generate.

    Args:
        prompt_tokens: length of the prompt.
        output_tokens: how many tokens it will generate; 0 for an embedding.
        blocks: hashes of the full blocks of prompt and answer (see
            :func:`bagent.sim.tokens.block_hashes`).
        priority: lower is served earlier, where the engine serves by priority.
        stream: report every step, not only the end.
        max_tokens: the caller's limit, for the metrics.
        stopped: whether it ends by itself (``stop``), not at its limit (``length``).
        tag: any value of the caller.
    """

    prompt_tokens: int
    output_tokens: int
    blocks: Seq[int] = ()
    priority: int = 0
    stream: bool = False
    max_tokens: int = 0
    stopped: bool = True
    tag: Any = None


class Sequence:
    """A request in the engine; times are seconds on the engine's clock."""

    __slots__ = (
        "admitted_at",
        "arrived_at",
        "base",
        "cached_tokens",
        "cancelled",
        "finished_at",
        "first_token_at",
        "joined",
        "named_blocks",
        "number",
        "phase",
        "preemptions",
        "prefill_remaining",
        "request",
        "state",
    )

    def __init__(self, request: SimRequest, number: int, now: float) -> None:
        self.request = request
        self.number = number
        self.arrived_at = now
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self.cached_tokens = 0
        self.preemptions = 0
        self.cancelled = False
        self.state = "waiting"
        self.base = 0
        """Tokens generated before it last joined the decode batch."""
        self.joined = 0
        self.phase = 0
        self.prefill_remaining = 0
        self.named_blocks = 0
        """Number of named blocks that it holds."""


@dataclass(slots=True)
class _Step:
    start: float
    seconds: float
    count: int
    chunks: list[tuple[Sequence, int]]

    @property
    def end(self) -> float:
        return self.start + self.seconds * self.count


class SimEngine:
    """A simulated engine; see the module.

    Every method takes ``now``, seconds on a clock that never goes back. Call :meth:`advance` when
    :meth:`next_event` is due; calling it late gives the same times.
    """

    def __init__(self, config: EngineConfig, stats: EngineStats | None = None) -> None:
        self.config = config
        self.stats = stats or EngineStats(config.max_model_len)
        self.kv = BlockCache(config.kv_blocks)
        self._queue: list[tuple[int, int, Sequence]] = []
        self._waiting = 0
        self._prefilling: deque[Sequence] = deque()
        self._decoding: dict[Sequence, None] = {}
        self._streaming: dict[Sequence, None] = {}
        self._ends: list[tuple[int, int, Sequence]] = []
        self._phases = [0] * BLOCK
        self._steps = 0
        self._numbers = 0
        self._step: _Step | None = None
        self._changed: dict[Sequence, None] = {}

    @property
    def waiting(self) -> int:
        """Return the number of requests in the queue."""
        return self._waiting

    @property
    def running(self) -> int:
        """Return the number of requests in the batch: prefilling or decoding."""
        return len(self._prefilling) + len(self._decoding)

    def generated(self, seq: Sequence) -> int:
        """Return the tokens that ``seq`` has generated so far."""
        return seq.base + (self._steps - seq.joined if seq.state == "decoding" else 0)

    def next_event(self) -> float | None:
        """Return when :meth:`advance` is due; None while idle."""
        return self._step.end if self._step else None

    def submit(self, request: SimRequest, now: float) -> Sequence:
        """Queue a request.

        Raises:
            ValueError: prompt and answer are longer than the context.
        """
        if request.prompt_tokens + request.output_tokens > self.config.max_model_len:
            raise ValueError("prompt and answer are longer than the context")
        self._complete_steps(now)
        seq = Sequence(request, self._numbers, now)
        self._numbers += 1
        self._enqueue(seq)
        if self._step is None:
            self._begin_step(now)
        elif self.running < self.config.max_num_seqs:
            self._shorten(now)
        return seq

    def cancel(self, seq: Sequence, now: float) -> None:
        """Remove a sequence from queue or batch and free its blocks."""
        self._complete_steps(now)
        if seq.cancelled or seq.state == "done":
            return
        seq.cancelled = True
        self._changed.pop(seq, None)
        self.stats.aborted += 1
        if seq.state == "waiting":
            self._waiting -= 1
        else:
            self._remove(seq, keep=False)
            if self._step is not None:
                self._step.chunks = [c for c in self._step.chunks if c[0] is not seq]
                self._shorten(now)
        seq.state = "done"
        if self._step and not self._decoding and not self._step.chunks:
            self._step = None
            self._begin_step(now)

    def advance(self, now: float) -> list[Sequence]:
        """Work up to ``now``; return the sequences that ended or, if streamed, have new tokens."""
        self._complete_steps(now)
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def _complete_steps(self, now: float) -> None:
        while self._step is not None and self._step.end <= now:
            step, self._step = self._step, None
            self._complete(step)
            self._begin_step(step.end)

    def _enqueue(self, seq: Sequence) -> None:
        seq.state = "waiting"
        rank = seq.request.priority if self.config.priority else 0
        heapq.heappush(self._queue, (rank, seq.number, seq))
        self._waiting += 1

    def _shorten(self, now: float) -> None:
        """End a run of equal steps with the current one, so that the batch can change."""
        step = self._step
        if step is not None and step.count > 1:
            passed = int((now - step.start) / step.seconds) + 1
            step.count = max(1, min(step.count, passed))

    def _begin_step(self, now: float) -> None:
        """Compose the next step, or stay idle."""
        full = self._make_room()
        decoding = len(self._decoding)
        budget = self.config.max_num_batched_tokens - decoding
        chunks: list[tuple[Sequence, int]] = []
        for seq in self._prefilling:
            if budget <= 0:
                break
            chunks.append((seq, min(seq.prefill_remaining, budget)))
            budget -= chunks[-1][1]
        while not full and budget > 0 and self.running < self.config.max_num_seqs:
            admitted = self._admit(now)
            if admitted is None:
                break
            chunks.append((admitted, min(admitted.prefill_remaining, budget)))
            budget -= chunks[-1][1]
        seconds = 0.0
        if decoding:
            slower = 1.0 + self.config.batch_slowdown * (decoding - 1)
            seconds = slower / self.config.decode
        if chunks:
            seconds += sum(tokens for _, tokens in chunks) / self.config.prefill
            self._step = _Step(now, seconds, 1, chunks)
        elif decoding:
            self._step = _Step(now, seconds, self._equal_steps(), [])

    def _equal_steps(self) -> int:
        """Return how many steps can be taken together: until an end, a streamed token or a full
        cache."""
        if self._streaming:
            return 1
        ends = self._ends
        while ends[0][2].state != "decoding" or self._end_of(ends[0][2]) != ends[0][0]:
            heapq.heappop(ends)
        limit = ends[0][0] - self._steps
        batch = len(self._decoding)
        full_blocks = min(limit // BLOCK, self.kv.available // batch)
        free = self.kv.available - full_blocks * batch
        steps = full_blocks * BLOCK
        while steps < limit and self._growth(self._steps + steps) <= free:
            free -= self._growth(self._steps + steps)
            steps += 1
        return steps

    def _growth(self, step: int) -> int:
        """Return the blocks that the decode batch begins in the step with this number."""
        return self._phases[-step % BLOCK]

    def _end_of(self, seq: Sequence) -> int:
        return seq.joined + seq.request.output_tokens - seq.base

    def _make_room(self) -> bool:
        """Preempt the sequences admitted last until the next decode step fits; return whether
        any was."""
        before = self.stats.preemptions
        while self._decoding and self._growth(self._steps) > self.kv.available:
            victim = self._prefilling[-1] if self._prefilling else next(reversed(self._decoding))
            self._remove(victim, keep=False)
            victim.preemptions += 1
            self.stats.preemptions += 1
            self._enqueue(victim)
        return self.stats.preemptions > before

    def _admit(self, now: float) -> Sequence | None:
        """Move the first request of the queue into the batch if its prompt fits the cache."""
        while self._queue and self._queue[0][2].cancelled:
            heapq.heappop(self._queue)
        if not self._queue:
            return None
        seq = self._queue[0][2]
        length = seq.request.prompt_tokens + seq.base
        full = length // BLOCK if self.config.prefix_cache else 0
        hashes = seq.request.blocks[:full]
        hits = self.kv.match(hashes, (length - 1) // BLOCK)
        growth = self._growth(self._steps) if self._decoding else 0
        if not self.kv.acquire(hashes, -(-length // BLOCK) - len(hashes), growth):
            return None
        heapq.heappop(self._queue)
        self._waiting -= 1
        seq.named_blocks = len(hashes)
        seq.prefill_remaining = length - hits * BLOCK
        seq.state = "prefilling"
        if seq.admitted_at is None:
            seq.admitted_at = now
            seq.cached_tokens = hits * BLOCK
            self.stats.admitted(length, seq.cached_tokens)
        self._prefilling.append(seq)
        return seq

    def _complete(self, step: _Step) -> None:
        """Account for the completed steps and let sequences end or join the decode batch."""
        decoding = len(self._decoding)
        prefilled = 0
        for _, tokens in step.chunks:
            prefilled += tokens
        self.stats.stepped(prefilled + decoding, decoding, step.seconds, step.count)
        if decoding:
            grown = step.count // BLOCK * decoding
            for i in range(step.count % BLOCK):
                grown += self._phases[-(self._steps + i) % BLOCK]
            self.kv.grow(grown)
            self._steps += step.count
            self._changed.update(self._streaming)
            self._end_sequences(step.end)
        for seq, tokens in step.chunks:
            seq.prefill_remaining -= tokens
            if seq.prefill_remaining == 0:
                self._prefilling.remove(seq)
                self._join(seq, step.end)

    def _end_sequences(self, now: float) -> None:
        ends = self._ends
        while ends and ends[0][0] <= self._steps:
            number, _, seq = heapq.heappop(ends)
            if seq.state == "decoding" and self._end_of(seq) == number:
                self._finish(seq, now)

    def _join(self, seq: Sequence, now: float) -> None:
        """Start decoding after the prefill, which gives the first token."""
        request = seq.request
        seq.state = "decoding"
        seq.joined = self._steps
        if request.output_tokens:
            seq.base += 1
            self.stats.generation_tokens += 1
        if seq.first_token_at is None:
            seq.first_token_at = now
            self.stats.ttft.observe(now - seq.arrived_at)
        seq.phase = (request.prompt_tokens + seq.base - 1 - self._steps) % BLOCK
        self._decoding[seq] = None
        self._phases[seq.phase] += 1
        if request.stream:
            self._streaming[seq] = None
            self._changed[seq] = None
        if seq.base >= request.output_tokens:
            self._finish(seq, now)
        else:
            heapq.heappush(self._ends, (self._end_of(seq), seq.number, seq))

    def _finish(self, seq: Sequence, now: float) -> None:
        self._remove(seq, keep=self.config.prefix_cache)
        seq.state = "done"
        seq.finished_at = now
        self.stats.finished(seq)
        self._changed[seq] = None

    def _remove(self, seq: Sequence, *, keep: bool) -> None:
        """Remove a sequence from the batch; ``keep`` leaves its full blocks in the cache."""
        prompt = seq.request.prompt_tokens
        if seq.state == "decoding":
            seq.base = self.generated(seq)
            written = prompt + max(seq.base - 1, 0)
            del self._decoding[seq]
            self._streaming.pop(seq, None)
            self._phases[seq.phase] -= 1
        else:
            written = prompt + seq.base
            self._prefilling.remove(seq)
        private = -(-written // BLOCK) - seq.named_blocks
        named = seq.request.blocks[seq.named_blocks : written // BLOCK] if keep else ()
        self.kv.release(seq.request.blocks[: seq.named_blocks], private, named)
        seq.joined = self._steps
