"""``--fail-if`` and ``--compare``: what a load test is held against."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bagent.bench.metrics import FEWEST, LATENCIES, PERCENTILES
from bagent.bench.plan import BenchPlan
from bagent.errors import Position, UsageError
from bagent.text.suggest import did_you_mean

SCHEMA_VERSION = 1
"""Of ``summary.json``; it grows where a field changes its meaning or goes."""

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
"""Names that are known for the whole fleet: counts of verdicts, and what a sweep found."""

_LATENCIES = (*LATENCIES, "itl", "icl", "conversation")
_WORDS = (*PERCENTILES, "mean", "max")
LOAD_NUMBERS = frozenset(
    {
        *(f"{name}_{word}_ms" for name in _LATENCIES for word in _WORDS),
        *(
            "requests",
            "ok",
            "failed",
            "censored",
            "estimated",
            "not_streamed",
            "usage_incomplete",
            "opened",
        ),
        "good",
        *("requests_inside", "calls_inside", "good_inside", "tokens", "tokens_inside"),
        *("prompt_inside", "good_tokens", "busy_seconds", "input_tokens", "output_tokens"),
        *("cached_share", "rps", "calls_s", "output_tok_s", "input_tok_s", "total_tok_s"),
        *("goodput_rps", "good_share", "goodput_tok_s", "ok_share", "in_flight_mean"),
        *("peak_tok_s", "hit_rate", "conversations", "conversations_s", "seconds"),
        *("concurrency", "rate", "endpoints", "repeats"),
        *(f"{name}_median" for name in ("output_tok_s", "rps", "ttft_p50_ms", "e2e_p50_ms")),
    }
)
"""Names that are known for each load; ``ok`` and those of :data:`FLEET` mean the whole fleet."""

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
_NAMED = 8


class Rule(msgspec.Struct, frozen=True):
    """One condition of failure: ``ttft_p99_ms>2000``, ``output_tok_s@c=64<1000``, or against an
    older summary ``ttft_p99_ms>+10%``."""

    text: str
    name: str
    sign: str
    number: float
    load: str | None = None
    relative: bool = False


def read_rule(text: str) -> Rule:
    """A rule from its text.

    Raises:
        UsageError: it is no such rule, or no number has its name.
    """
    found = _RULE.fullmatch(text)
    try:
        number = float(found[4]) if found else math.inf
    except ValueError:
        number = math.inf
    if found is None or not math.isfinite(number):
        raise UsageError(
            f"--fail-if {text}: not a condition",
            hint="NAME>NUMBER, NAME@LOAD<NUMBER or NAME>+10%, such as 'ttft_p99_ms>2000'",
        )
    rule = Rule(text, found[1], found[3], number, found[2], bool(found[5]))
    if rule.relative and found[4][0] not in "+-":
        share = f"{number / 100:g}"
        raise UsageError(
            f"--fail-if {text}: of what?",
            hint=f"a share is {share}, a change since --compare OLD +{number:g}% or -{number:g}%",
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
    """Refuse what can never be told, before anything is sent.

    Args:
        loads: names of the loads; empty where they are not known yet, as before a sweep.
        compared: whether an older summary is given.

    Raises:
        UsageError: a rule names a load that is not among them, or needs an older summary.
    """
    for rule in rules:
        if rule.relative and not compared:
            raise UsageError(
                f"--fail-if {rule.text}: compared with what?", hint="give --compare OLD"
            )
        if rule.load is not None and loads and rule.load not in loads:
            hint = did_you_mean(rule.load, loads) or ", ".join(loads[:_NAMED])
            raise UsageError(f"--fail-if {rule.text}: no load {rule.load}", hint=hint)


def check_told(rules: Sequence[Rule], plan: BenchPlan) -> None:
    """Refuse numbers that this plan will never tell: their rules would always fail the test.

    Raises:
        UsageError: there is such a rule.
    """
    asked = None if plan.requests is None else plan.requests * plan.turns * plan.repeats
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
        for word, least in FEWEST.items():
            if f"_{word}_" in rule.name and asked is not None and asked < least:
                raise UsageError(
                    f"--fail-if {rule.text}: not told of fewer than {least:,} requests",
                    hint=f"--requests {least}, or a p95",
                )


def read_summary(path: Path) -> dict[str, Any]:
    """An older ``summary.json``; a folder stands for the one in it.

    Raises:
        UsageError: it cannot be read, or is not one, or of a later version.
    """
    file = path / "summary.json" if path.is_dir() else path
    try:
        found: Any = msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"--compare: cannot be read: {words}", at=Position(file)) from None
    if not isinstance(found, dict) or "loads" not in found or "schema_version" not in found:
        raise UsageError("--compare: no summary of a load test", at=Position(file))
    if found["schema_version"] != SCHEMA_VERSION:
        words = f"--compare: version {found['schema_version']!r}, not {SCHEMA_VERSION}"
        raise UsageError(words, hint="bench with the same bagent", at=Position(file))
    try:
        msgspec.convert(found, _Older)
    except msgspec.ValidationError as error:
        raise UsageError(f"--compare: a damaged summary: {error}", at=Position(file)) from None
    return found


class _OlderLoad(msgspec.Struct):
    load: str


class _OlderEndpoint(msgspec.Struct):
    endpoint: str
    verdict: str


class _Older(msgspec.Struct):
    """What is looked at of an older summary."""

    loads: list[_OlderLoad]
    endpoints: list[_OlderEndpoint] = []
    plan: dict[str, Any] = {}
    fleet: dict[str, float | None] = {}


def _number(value: Any) -> float | None:
    """A number of an older summary; None where it is none."""
    return value if isinstance(value, int | float) else None


def broken_rules(
    rules: Sequence[Rule], summary: Mapping[str, Any], old: Mapping[str, Any] | None
) -> list[str]:
    """The rules that hold, so that the test has failed, with the numbers, in words.

    A rule holds where it does in any load. A number that is not known (a p99 of too few requests)
    fails the test too: what cannot be told must not pass.


    Raises:
        UsageError: see :func:`check_rules`.
    """
    check_rules(rules, [one["load"] for one in summary["loads"]], compared=old is not None)
    found = []
    for rule in rules:
        for load, value, before in _values(rule, summary, old):
            where = f" in {load}" if load else ""
            if value is None or (rule.relative and not before):
                found.append(f"{rule.text}: {rule.name} is not known{where}")
                continue
            limit = rule.number
            if rule.relative and before:
                limit = before * (1 + rule.number / 100)
            if _COMPARE[rule.sign](value, limit):
                found.append(f"{rule.text}: {rule.name} is {value:.6g}{where}")
    return found


_Value = tuple[str | None, float | None, float | None]


def _values(rule: Rule, summary: Mapping[str, Any], old: Mapping[str, Any] | None) -> list[_Value]:
    """(load, number, number of before) for each place where a rule is to be looked at."""
    before = old or {}
    if rule.name in FLEET:
        return [(None, summary["fleet"].get(rule.name), before.get("fleet", {}).get(rule.name))]
    loads = [one for one in summary["loads"] if rule.load in (None, one["load"])]
    if not loads:  # nothing was sent: that must not pass
        return [(rule.load, None, None)]
    older = {one["load"]: one for one in before.get("loads", [])}
    return [
        (one["load"], one.get(rule.name), _number(older.get(one["load"], {}).get(rule.name)))
        for one in loads
    ]


class Change(msgspec.Struct, frozen=True):
    """One number of one load, before and now; ``change`` is the relative one, -0.1 is 10 % less."""

    load: str
    name: str
    before: float | None
    now: float | None
    change: float | None


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The numbers of the loads that both summaries have."""
    older = {one["load"]: one for one in old["loads"]}
    found = []
    for one in new["loads"]:
        if one["load"] not in older:
            continue
        for name in COMPARED:
            before, now = _number(older[one["load"]].get(name)), one.get(name)
            change = now / before - 1 if before and now is not None else None
            found.append(Change(one["load"], name, before, now, change))
    return found


def setting_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Why two tests can hardly be compared: settings that differ, in words."""
    found = []
    for name in _SETTINGS:
        if name not in old.get("plan", {}):
            continue  # older versions had fewer settings
        # What was read from a file has lists where one just made has tuples.
        was, now = (_plain(one["plan"].get(name)) for one in (old, new))
        if was != now:
            found.append(f"{name} was {was}, is {now}")
    if old.get("models") != new.get("models"):
        found.append(f"models were {old.get('models')}, are {new.get('models')}")
    before, count = _loaded(old), _loaded(new)
    if before is not None and before != count:
        found.append(f"endpoints with load were {before}, are {count}")
    return found


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _loaded(summary: Mapping[str, Any]) -> int | None:
    """How many endpoints got load; None where that is not told."""
    rows = summary.get("endpoints")
    return None if rows is None else sum(bool(one.get("requests")) for one in rows)


def verdict_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Endpoints with another verdict than before, those that are not ok now first, in words."""
    before = {one["endpoint"]: one["verdict"] for one in old.get("endpoints", ())}
    found = [
        (one["verdict"] == "ok", f"{one['endpoint']} was {was}, is {one['verdict']}")
        for one in new["endpoints"]
        if (was := before.get(one["endpoint"])) not in (None, one["verdict"])
    ]
    return [words for _, words in sorted(found, key=lambda item: item[0])]
