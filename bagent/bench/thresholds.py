"""``--fail-if`` and ``--compare``: the limits of a load test."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bagent.bench.metrics import COUNTS, LATENCIES, MIN_REQUESTS, PERCENTILES
from bagent.bench.plan import BenchPlan
from bagent.errors import Position, UsageError
from bagent.text.suggest import did_you_mean

SCHEMA_VERSION = 1
"""Version of ``summary.json``; it grows when a field changes its meaning or is removed."""

_RULE = re.compile(
    r"\s*([a-z][a-z0-9_]*)\s*(?:@\s*(.+?))?\s*(<=|>=|==|!=|<|>)\s*([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)\s*(%)?\s*"
)
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
FLEET = ("ok", "slow", "failing", "dead", "best_rate", "sustained_rate")
"""Names of the whole fleet: counts of verdicts, and results of a sweep."""

_LATENCIES = (*LATENCIES, "itl", "icl", "conversation")
_STATISTICS = (*PERCENTILES, "mean", "max")
LOAD_NUMBERS = frozenset(
    {
        *(f"{name}_{statistic}_ms" for name in _LATENCIES for statistic in _STATISTICS),
        *COUNTS,
        *(
            "tokens",
            "tokens_inside",
            "prompt_inside",
            "good_tokens",
            "busy_seconds",
            "input_tokens",
            "output_tokens",
        ),
        *("cached_share", "rps", "calls_s", "output_tok_s", "input_tok_s", "total_tok_s"),
        *("goodput_rps", "good_share", "goodput_tok_s", "ok_share", "in_flight_mean"),
        *("peak_tok_s", "hit_rate", "conversations", "conversations_s", "seconds"),
        *("concurrency", "rate", "endpoints", "repeats"),
        *(f"{name}_median" for name in ("output_tok_s", "rps", "ttft_p50_ms", "e2e_p50_ms")),
    }
)
"""Names of each load; ``ok`` and the other names of :data:`FLEET` mean the whole fleet."""

COMPARED = (
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "e2e_p50_ms",
    "e2e_p99_ms",
    "output_tok_s",
    "rps",
    "goodput_rps",
    "ok_share",
)


_SETTINGS = (
    *("input_tokens", "output_tokens", "as_json", "prefix_tokens", "seconds", "slo"),
    *("ways", "arrival", "turns"),
)
_MAX_LOADS = 8


class Rule(msgspec.Struct, frozen=True):
    """One condition of failure: ``ttft_p99_ms>2000``, ``output_tok_s@c=64<1000``, or, relative
    to an older summary, ``ttft_p99_ms>+10%``."""

    text: str
    name: str
    sign: str
    number: float
    load: str | None = None
    relative: bool = False


def read_rule(text: str) -> Rule:
    """Return a rule from its text.

    Raises:
        UsageError: it is not a rule, or no number has its name.
    """
    match = _RULE.fullmatch(text)
    try:
        number = float(match[4]) if match else math.inf
    except ValueError:
        number = math.inf
    if match is None or not math.isfinite(number):
        raise UsageError(
            f"--fail-if {text}: not a condition",
            hint="NAME>NUMBER, NAME@LOAD<NUMBER or NAME>+10%, such as 'ttft_p99_ms>2000'",
        )
    rule = Rule(text, match[1], match[3], number, match[2], bool(match[5]))
    if rule.relative and match[4][0] not in "+-":
        share = f"{number / 100:g}"
        raise UsageError(
            f"--fail-if {text}: a percentage is a change and needs a sign",
            hint=f"write +{number:g}% or -{number:g}% for a change since --compare OLD,"
            f" {share} for a share",
        )
    if rule.name in FLEET and rule.load is not None:
        raise UsageError(
            f"--fail-if {text}: {rule.name} is of the whole fleet", hint=f"leave @{rule.load} out"
        )
    if rule.name not in LOAD_NUMBERS and rule.name not in FLEET:
        names = [*sorted(LOAD_NUMBERS), *FLEET]
        hint = did_you_mean(rule.name, names) or "see summary.json"
        raise UsageError(f"--fail-if {text}: no number {rule.name}", hint=hint)
    return rule


def check_rules(rules: Sequence[Rule], loads: Sequence[str], *, compared: bool) -> None:
    """Refuse rules that cannot be evaluated, before anything is sent.

    Args:
        loads: names of the loads; empty where they are unknown, as before a sweep.
        compared: whether there is an older summary.

    Raises:
        UsageError: a rule names an unknown load, or needs an older summary.
    """
    for rule in rules:
        if rule.relative and not compared:
            raise UsageError(
                f"--fail-if {rule.text}: there is nothing to compare with",
                hint="give --compare OLD",
            )
        if rule.load is not None and loads and rule.load not in loads:
            hint = did_you_mean(rule.load, loads) or ", ".join(loads[:_MAX_LOADS])
            raise UsageError(f"--fail-if {rule.text}: no load {rule.load}", hint=hint)


def check_rules_known(rules: Sequence[Rule], plan: BenchPlan) -> None:
    """Refuse rules on numbers that this plan never produces, which would always fail the test.

    Raises:
        UsageError: there is such a rule.
    """
    requests = None if plan.requests is None else plan.requests * plan.turns * plan.repeats
    for rule in rules:
        needs = (
            (rule.name in ("best_rate", "sustained_rate") and not plan.sweep, "--sweep"),
            (rule.name.startswith("conversation") and plan.turns == 1, "--turns N"),
            (rule.name.endswith("_median") and plan.repeats == 1, "--repeats N"),
        )
        for missing, option in needs:
            if missing:
                raise UsageError(
                    f"--fail-if {rule.text}: not known without {option}", hint=f"give {option}"
                )
        for percentile, minimum in MIN_REQUESTS.items():
            if f"_{percentile}_" in rule.name and requests is not None and requests < minimum:
                raise UsageError(
                    f"--fail-if {rule.text}: is not measured with fewer than {minimum:,} requests",
                    hint=f"--requests {minimum}, or a p95",
                )


def read_summary(path: Path) -> dict[str, Any]:
    """Return an older ``summary.json``; a folder stands for the one in it.

    Raises:
        UsageError: it cannot be read, is no summary, or has another version.
    """
    file = path / "summary.json" if path.is_dir() else path
    try:
        summary: Any = msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        message = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"--compare: cannot be read: {message}", at=Position(file)) from None
    if not isinstance(summary, dict) or "loads" not in summary or "schema_version" not in summary:
        raise UsageError(
            "--compare: no summary of a load test",
            at=Position(file),
            hint="name the summary.json in the folder of an earlier bench",
        )
    if summary["schema_version"] != SCHEMA_VERSION:
        message = f"--compare: version {summary['schema_version']!r}, not {SCHEMA_VERSION}"
        raise UsageError(message, hint="bench with the same bagent", at=Position(file))
    try:
        msgspec.convert(summary, _OldSummary)
    except msgspec.ValidationError as error:
        raise UsageError(f"--compare: a damaged summary: {error}", at=Position(file)) from None
    return summary


class _OldLoad(msgspec.Struct):
    load: str


class _OldEndpoint(msgspec.Struct):
    endpoint: str
    verdict: str


class _OldSummary(msgspec.Struct):
    """The fields of an older summary that are compared."""

    loads: list[_OldLoad]
    endpoints: list[_OldEndpoint] = []
    plan: dict[str, Any] = {}
    fleet: dict[str, float | None] = {}


def _number(value: Any) -> float | None:
    """Return a number of an older summary; None where it is none."""
    return value if isinstance(value, int | float) else None


def broken_rules(
    rules: Sequence[Rule], summary: Mapping[str, Any], old: Mapping[str, Any] | None
) -> list[str]:
    """Return a message for each rule that holds in any load, so that the test has failed.

    A number that is unknown (a p99 of too few requests) fails the test too.

    Raises:
        UsageError: see :func:`check_rules`.
    """
    check_rules(rules, [row["load"] for row in summary["loads"]], compared=old is not None)
    messages = []
    for rule in rules:
        for load, value, before in _values(rule, summary, old):
            where = f" in {load}" if load else ""
            if value is None or (rule.relative and not before):
                messages.append(f"{rule.text}: {rule.name} is not known{where}")
                continue
            limit = rule.number
            if rule.relative and before:
                limit = before * (1 + rule.number / 100)
            if _COMPARE[rule.sign](value, limit):
                messages.append(f"{rule.text}: {rule.name} is {value:.6g}{where}")
    return messages


_Value = tuple[str | None, float | None, float | None]


def _values(rule: Rule, summary: Mapping[str, Any], old: Mapping[str, Any] | None) -> list[_Value]:
    """Return (load, number, older number) for each load that a rule applies to."""
    before = old or {}
    if rule.name in FLEET:
        return [(None, summary["fleet"].get(rule.name), before.get("fleet", {}).get(rule.name))]
    loads = [row for row in summary["loads"] if rule.load in (None, row["load"])]
    if not loads:  # nothing was sent: that must not pass
        return [(rule.load, None, None)]
    old_loads = {row["load"]: row for row in before.get("loads", [])}
    return [
        (row["load"], row.get(rule.name), _number(old_loads.get(row["load"], {}).get(rule.name)))
        for row in loads
    ]


class Change(msgspec.Struct, frozen=True):
    """One number of one load before and now."""

    load: str
    name: str
    before: float | None
    now: float | None
    change: float | None
    """Relative change: -0.1 is 10 % less."""


def load_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Return the changes of the loads that both summaries have."""
    old_loads = {load["load"]: load for load in old["loads"]}
    changes = []
    for load in new["loads"]:
        if load["load"] not in old_loads:
            continue
        for name in COMPARED:
            before, value = _number(old_loads[load["load"]].get(name)), load.get(name)
            change = value / before - 1 if before and value is not None else None
            changes.append(Change(load["load"], name, before, value, change))
    return changes


def setting_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ, so that two tests can hardly be compared."""
    differences = []
    for name in _SETTINGS:
        if name not in old.get("plan", {}):
            continue  # older versions had fewer settings
        # A summary from a file has lists where a new one has tuples.
        old_value, new_value = (_plain(summary["plan"].get(name)) for summary in (old, new))
        if old_value != new_value:
            differences.append(f"{name} was {old_value}, is {new_value}")
    if old.get("models") != new.get("models"):
        differences.append(f"models were {old.get('models')}, are {new.get('models')}")
    old_count, new_count = _loaded(old), _loaded(new)
    if old_count is not None and old_count != new_count:
        differences.append(f"endpoints with load were {old_count}, are {new_count}")
    return differences


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _loaded(summary: Mapping[str, Any]) -> int | None:
    """Return how many endpoints got load; None where it is unknown."""
    rows = summary.get("endpoints")
    return None if rows is None else sum(bool(row.get("requests")) for row in rows)


def verdict_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the endpoints whose verdict changed, those that are not ok first."""
    before = {row["endpoint"]: row["verdict"] for row in old.get("endpoints", ())}
    changes = [
        (row["verdict"] == "ok", f"{row['endpoint']} was {was}, is {row['verdict']}")
        for row in new["endpoints"]
        if (was := before.get(row["endpoint"])) not in (None, row["verdict"])
    ]
    return [text for _, text in sorted(changes, key=lambda item: item[0])]
