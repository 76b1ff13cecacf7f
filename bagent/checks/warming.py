"""Whether one request should go ahead of the others at a cold endpoint: the run's own arithmetic.

A run decides anew at each endpoint, from the rows that stand ready there; here it is told before.
"""

from __future__ import annotations

from bagent.checks.report import WarmReport
from bagent.fleet.prefixes import WARM_SAVES, WARM_TOKENS, PrefixRule
from bagent.job.spec import Job
from bagent.observe.words import counted
from bagent.runs.endpoints import OWN_KINDS, Servers
from bagent.runs.fleets import auto_limits, group_rule


def warming(job: Job, servers: Servers, shared: float, rows: int) -> WarmReport:
    """What a run of ``rows`` calls does about cold caches.

    Args:
        shared: tokens that all prompts begin with.
    """
    burst = first_burst(job, servers, rows)
    tokens = int(shared)
    others = burst - 1
    saves = tokens * others
    rule = PrefixRule(job.batching.prefix)
    pays = tokens >= WARM_TOKENS and saves >= WARM_SAVES
    endpoints = servers.endpoints  # none yet where a run starts the engines itself
    own = endpoints[0].own if endpoints else servers.kind in OWN_KINDS
    warms = pays and rule.warms(own=own)
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
    """How many of ``rows`` calls start together at one endpoint when a run begins."""
    count = max(1, len(servers.endpoints))
    given, concurrency = job.limits.per_endpoint, job.limits.concurrency
    if given != "auto":
        most = int(given)
    elif servers.slots is not None:
        most = servers.slots * 2
    else:
        most = auto_limits(servers, group_rule(job, servers))[0]
    if concurrency != "auto":
        most = min(most, -(-int(concurrency) // count))
    return max(1, min(most, -(-rows // count)))
