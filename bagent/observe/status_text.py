"""Phrases about a snapshot that every progress display uses."""

from __future__ import annotations

from typing import Literal, NamedTuple

from bagent.observe.formatting import counted, duration, kinds, money, percent, rate, visible
from bagent.observe.snapshot import Snapshot

_QUIET_S = 60.0
"""After so long without a finished row the display says so."""

_TOP_KINDS = 3
_TOP_STAGES = 8


class Phrase(NamedTuple):
    """A phrase and its style: ``good``, ``bad``, ``wait`` or none."""

    text: str
    style: Literal["", "good", "bad", "wait"] = ""


def position(s: Snapshot) -> str:
    """How far the run is: ``1,204 of ~5,000 rows (24 %)``, or ``1,204 rows`` without a size.

    A job with several stages counts the ``results`` of all of them.
    """
    if s.to_do is None or s.fraction is None:
        return counted(max(s.totals.rows, s.this_start.done), s.unit)
    if s.total is None:
        finished = s.skipped + s.this_start.done
        return (
            f"{finished:,} of ~{counted(finished + s.to_do, s.speed_unit)} ({percent(s.fraction)})"
        )
    about = "" if s.total_is_exact else "~"
    return f"{s.total - s.to_do:,} of {about}{counted(s.total, s.unit)} ({percent(s.fraction)})"


def arrival(s: Snapshot) -> str:
    """When the run will end: ``ETA 1m20s``, or ``ETA 1m20s to 1m50s`` where the speed changed."""
    if s.eta_range is None:
        return f"ETA {duration(s.eta_s)}"
    low, high = map(duration, s.eta_range)
    return f"ETA {low} to {high}"


def results(s: Snapshot) -> list[Phrase]:
    """What came out so far, over all starts of the run; failures by kind."""
    phrases = [Phrase(f"{s.ok:,} ok", "good")]
    if s.failed:
        phrases.append(Phrase(f"{s.failed:,} failed ({kinds(s.by_kind, _TOP_KINDS)})", "bad"))
    if s.accepted:
        phrases.append(Phrase(f"{s.accepted:,} truncated (accepted)"))
    if s.this_start.copied:
        phrases.append(Phrase(f"{s.this_start.copied:,} copied"))
    if s.resumed:
        phrases.append(Phrase(f"this start: {s.this_start.sent:,} sent"))
    return phrases


def stages(s: Snapshot) -> list[Phrase]:
    """What ended in each stage: ``review 40 ok``; nothing where there is one stage."""
    if len(s.by_stage) < 2:
        return []
    phrases = []
    for name, count in list(s.by_stage.items())[:_TOP_STAGES]:
        failed = f", {count.failed:,} failed" if count.failed else ""
        phrases.append(Phrase(f"{visible(name, 30)} {count.ok:,} ok{failed}"))
    if len(s.by_stage) > _TOP_STAGES:
        phrases.append(Phrase(f"+{len(s.by_stage) - _TOP_STAGES} stages"))
    return phrases


def work(s: Snapshot) -> list[Phrase]:
    """What is in flight now, and what holds it up."""
    fleet = s.fleet
    phrases = [Phrase(f"{fleet.in_flight:,}/{fleet.limit:,} in flight")]
    if fleet.ready:
        phrases.append(Phrase(f"{fleet.ready:,} waiting"))
    if fleet.retrying:
        phrases.append(Phrase(f"{fleet.retrying:,} retrying", "wait"))
    if fleet.throttled_s > 0:
        answers = f" ({counted(s.throttled, 'answer')})" if s.throttled else ""
        phrases.append(Phrase(f"throttled for {duration(fleet.throttled_s)}{answers}", "wait"))
    elif s.throttled:
        phrases.append(Phrase(counted(s.throttled, "throttled answer"), "wait"))
    if fleet.endpoints_up < fleet.endpoints:
        up = f"{fleet.endpoints_up:,} of {counted(fleet.endpoints, 'endpoint')} up"
        phrases.append(Phrase(up, "wait" if fleet.endpoints_up else "bad"))
    if s.quiet_s >= _QUIET_S and s.to_do != 0:
        phrases.append(Phrase(f"nothing finished for {duration(s.quiet_s)}", "wait"))
    return phrases


def speed(s: Snapshot) -> list[Phrase]:
    """How fast it goes, and what it costs where prices are known."""
    rates = s.rates
    phrases = [Phrase(f"{rate(rates.rows_per_s)} {s.speed_unit}s/s")]
    if rates.completion_tokens_per_s is not None:
        phrases.append(Phrase(f"{rate(rates.completion_tokens_per_s)} tok/s"))
    if s.cost_usd is not None:
        phrases.append(Phrase(money(s.cost_usd)))
    if s.cost_at_end is not None:
        low, high = map(money, s.cost_at_end)
        phrases.append(Phrase(f"{low if low == high else f'{low} to {high}'} at the end"))
    return phrases


def one_line(s: Snapshot) -> str:
    """The whole state on one line without control codes; no speed where nothing was to do."""
    groups = [[Phrase(position(s)), *results(s)]]
    if s.to_do != 0 or s.this_start.done:
        groups += [stages(s), work(s), [*speed(s), Phrase(arrival(s))]]
    text = "; ".join(", ".join(phrase.text for phrase in group) for group in groups if group)
    return f"[{duration(s.elapsed_s)}] {text}"
