"""What a prefix cache can reuse of a set of prompts, counted in blocks of 16 tokens.

A block is reused only where everything before it is equal too, so a block is identified by a hash
over the prompt up to its end. The last, partly filled block is never reused. This is how vLLM's
automatic prefix caching works; SGLang's radix cache reuses single tokens, so it can only do better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from bagent.backend_kinds import TRAITS
from bagent.check.report import WarmReport
from bagent.fleet.prefix_affinity import WARM_SAVES, WARM_TOKENS, PrefixRule
from bagent.job.spec.job import Job
from bagent.observe.formatting import counted
from bagent.servers.fleet_factory import auto_limits, make_batch_size_rule
from bagent.servers.resolve import Servers

BLOCK = 16
"""Tokens in one block."""

PACKED = 4
"""Bytes per token of a prompt that is known by its token ids."""


class PromptBytes(msgspec.Struct, frozen=True):
    """A prompt as bytes: its token ids (:data:`PACKED` bytes each) or its text in UTF-8."""

    data: bytes
    tokens: float
    """Counted or estimated."""


class Shares(msgspec.Struct, frozen=True):
    """Mean prompt tokens of ``rows`` rows by how many rows share them; the four add up to
    ``prompt``."""

    rows: int
    prompt: float
    by_all: float
    by_most: float
    """By at least half of the rows, not by all."""
    by_some: float
    """By two rows or more, not by half."""
    by_none: float
    """By no other row; includes the last partial block."""


def count_shares(prompts: Sequence[PromptBytes], bytes_per_token: float) -> Shares | None:
    """Return how much of the prompts is shared; None with fewer than two.

    Args:
        bytes_per_token: mean bytes of ``data`` per token; :data:`PACKED` for ids.
    """
    if len(prompts) < 2:
        return None
    size = max(1, round(BLOCK * bytes_per_token))
    chains = [_chain(prompt.data, size) for prompt in prompts]
    owners = Counter(name for chain in chains for name in chain)
    rows = len(prompts)
    blocks = {"all": 0, "most": 0, "some": 0}
    for chain in chains:
        for name in chain:
            count = owners[name]
            if count == rows:
                blocks["all"] += 1
            elif 2 * count >= rows and count > 1:
                blocks["most"] += 1
            elif count > 1:
                blocks["some"] += 1
    by_all, by_most, by_some = (blocks[kind] * BLOCK / rows for kind in ("all", "most", "some"))
    mean_tokens = sum(prompt.tokens for prompt in prompts) / rows
    by_none = max(0.0, mean_tokens - by_all - by_most - by_some)
    return Shares(rows, mean_tokens, by_all, by_most, by_some, by_none)


def _chain(data: bytes, size: int) -> list[int]:
    """Return one number per full block, which stands for everything up to the block's end."""
    last = 0
    chain: list[int] = []
    for end in range(size, len(data) + 1, size):
        last = hash((last, data[end - size : end]))
        chain.append(last)
    return chain


def warming(job: Job, servers: Servers, shared: float, rows: int) -> WarmReport:
    """Return what a run of ``rows`` calls does about cold caches.

    Args:
        shared: tokens that all prompts begin with.
    """
    burst = first_burst(job, servers, rows)
    tokens = int(shared)
    others = burst - 1
    saves = tokens * others
    rule = PrefixRule(job.batching.prefix)
    pays = tokens >= WARM_TOKENS and saves >= WARM_SAVES
    endpoints = servers.endpoints  # empty where the run starts the engines
    own_engine = endpoints[0].own if endpoints else TRAITS[servers.kind].own
    warms = pays and rule.warms(own=own_engine)
    sum_ = f"{tokens:,} tokens for {counted(others, 'other')} that would start with it at once"
    if rule.mode == "never":
        why = "no: batching.prefix is never"
    elif tokens < WARM_TOKENS:
        why = f"no: all prompts begin with {tokens:,} equal tokens, it takes {WARM_TOKENS:,}"
    elif not pays:
        why = f"no: one request ahead saves {sum_}, {saves:,} in all; it takes {WARM_SAVES:,}"
    elif warms:
        why = f"one request goes ahead at each endpoint: it saves {sum_}, {saves:,} in all"
    else:
        why = (
            "no: an engine of your own computes a beginning once, also for rows that start"
            " together (batching: {prefix: always} sends one ahead all the same)"
        )
    return WarmReport(tokens, burst, saves, warms, why)


def first_burst(job: Job, servers: Servers, rows: int) -> int:
    """Return how many of ``rows`` calls start together at one endpoint when a run begins."""
    count = max(1, len(servers.endpoints))
    per_endpoint, concurrency = job.limits.per_endpoint, job.limits.concurrency
    if per_endpoint != "auto":
        slots = int(per_endpoint)
    elif servers.slots is not None:
        slots = servers.slots * 2
    else:
        slots = auto_limits(servers, make_batch_size_rule(job, servers))[0]
    if concurrency != "auto":
        slots = min(slots, -(-int(concurrency) // count))
    return max(1, min(slots, -(-rows // count)))
