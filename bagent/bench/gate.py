"""``--fail-if`` and ``--compare``: what a load test is held against."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bagent.errors import Position, UsageError
from bagent.job.words import did_you_mean

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
        UsageError: it is no such rule.
    """
    found = _RULE.fullmatch(text)
    try:
        number = float(found[4]) if found else 0.0
    except ValueError:
        found = None
    if found is None:
        raise UsageError(
            f"--fail-if {text}: not a condition",
            hint="NAME>NUMBER, NAME@LOAD<NUMBER or NAME>+10%, such as 'ttft_p99_ms>2000'",
        )
    return Rule(text, found[1], found[3], number, found[2], bool(found[5]))


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
    if not isinstance(found, dict) or not isinstance(found.get("loads"), list):
        raise UsageError("--compare: no summary of a load test", at=Position(file))
    if found.get("schema_version") != SCHEMA_VERSION:
        words = f"--compare: version {found.get('schema_version')}, not {SCHEMA_VERSION}"
        raise UsageError(words, hint="bench with the same bagent", at=Position(file))
    return found


def broken_rules(
    rules: Sequence[Rule], summary: Mapping[str, Any], old: Mapping[str, Any] | None
) -> list[str]:
    """The rules that hold, so that the test has failed, with the numbers, in words.

    A rule holds where it does in any load. A number that is not known (a p99 of too few requests)
    fails the test too: what cannot be told must not pass.

    Raises:
        UsageError: a rule names what no load has, or needs an older summary.
    """
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
    if rule.relative and old is None:
        raise UsageError(f"--fail-if {rule.text}: compared with what?", hint="give --compare OLD")
    before = old or {}
    if rule.name in FLEET:
        return [(None, summary["fleet"].get(rule.name), before.get("fleet", {}).get(rule.name))]
    loads = [one for one in summary["loads"] if rule.load in (None, one["load"])]
    if not loads:
        names = [one["load"] for one in summary["loads"]]
        words = f"--fail-if {rule.text}: no load {rule.load}" if rule.load else "nothing measured"
        raise UsageError(words, hint=did_you_mean(rule.load or "", names) or ", ".join(names))
    older = {one["load"]: one for one in before.get("loads", [])}
    known = {name for one in loads for name in one}
    if rule.name not in known:
        numbers = sorted(k for k, v in loads[0].items() if not isinstance(v, str))
        hint = did_you_mean(rule.name, [*numbers, *FLEET]) or "see summary.json"
        raise UsageError(f"--fail-if {rule.text}: no number {rule.name}", hint=hint)
    return [
        (one["load"], one.get(rule.name), older.get(one["load"], {}).get(rule.name))
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
            before, now = older[one["load"]].get(name), one.get(name)
            known = before and now is not None
            change = now / before - 1 if known else None
            found.append(Change(one["load"], name, before, now, change))
    return found


def unlike(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Why two tests can hardly be compared: settings that differ, in words."""
    found = []
    for name in ("input_tokens", "output_tokens", "as_json", "prefix_tokens", "seconds", "slo"):
        before, now = old.get("plan", {}).get(name), new.get("plan", {}).get(name)
        if before != now:
            found.append(f"{name} was {before}, is {now}")
    if old.get("models") != new.get("models"):
        found.append(f"models were {old.get('models')}, are {new.get('models')}")
    return found
