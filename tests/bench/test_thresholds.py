"""What a load test is held against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from bagent.bench.summary import warnings
from bagent.bench.thresholds import (
    broken_rules,
    check_rules,
    load_changes,
    read_rule,
    read_summary,
    setting_differences,
    verdict_changes,
)
from bagent.errors import UsageError


def summary(**numbers: Any) -> dict[str, Any]:
    first = {"load": "c=1", "ttft_p99_ms": None, "output_tok_s": 100.0, "ok_share": 1.0}
    second = {"load": "c=64", "ttft_p99_ms": 1500.0, "output_tok_s": 3000.0, "ok_share": 1.0}
    fleet = {"ok": 2, "slow": 1, "failing": 0, "dead": 0}
    made = {"schema_version": 1, "loads": [first, {**second, **numbers}], "fleet": fleet}
    return {**made, "plan": {"input_tokens": 256}, "models": ["m"]}


def held(*texts: str, old: dict[str, Any] | None = None, **numbers: Any) -> list[str]:
    return broken_rules([read_rule(text) for text in texts], summary(**numbers), old)


@pytest.mark.parametrize(
    ("rules", "broken"),
    [
        (["output_tok_s<200"], ["output_tok_s is 100 in c=1"]),
        (["output_tok_s<50"], []),
        (["ttft_p99_ms@c=64>2000"], []),
        (["ttft_p99_ms @ c=64 > 1000"], ["ttft_p99_ms is 1500 in c=64"]),
        (["ttft_p99_ms>2000"], ["ttft_p99_ms is not known in c=1"]),
        (["slow>0", "dead>0"], ["slow is 1"]),
    ],
)
def test_a_rule_is_about_any_load_one_load_or_the_fleet(
    rules: list[str], broken: list[str]
) -> None:
    assert held(*rules) == [f"{rules[0]}: {reason}" for reason in broken]
    nothing = {**summary(), "loads": []}
    assert broken_rules([read_rule("ok_share<1")], nothing, None) == [
        "ok_share<1: ok_share is not known"
    ]


@pytest.mark.parametrize(
    ("rule", "now", "fails"),
    [
        ("output_tok_s@c=64<-10%", 2600.0, True),
        ("output_tok_s@c=64<-10%", 2800.0, False),
        ("ttft_p99_ms@c=64>+10%", 1700.0, True),
    ],
)
def test_a_rule_may_be_against_an_older_test(rule: str, now: float, fails: bool) -> None:
    name = rule.partition("@")[0]
    assert bool(held(rule, old=summary(), **{name: now})) == fails


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ttft", "NAME>NUMBER"),
        ("ttft_p99>1", "no number ttft_p99 .did you mean ttft_p99_ms"),
        ("ok_share<95%", "needs a sign .write .95% or -95% for a change since .*, 0.95 for a"),
        ("rps>1e999", "not a condition"),
    ],
)
def test_what_is_no_rule_or_can_never_be_known_is_said_before_anything_is_sent(
    text: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        read_rule(text)


def test_loads_that_will_not_be_are_said_before_anything_is_sent() -> None:
    rules = [read_rule("rps@c=8<1")]
    check_rules(rules, ["c=1", "c=8"], compared=False)
    check_rules(rules, [], compared=False)  # a sweep finds its loads by itself
    with pytest.raises(UsageError, match="no load c=8"):
        check_rules(rules, ["c=1", "rate=2"], compared=False)
    with pytest.raises(UsageError, match="give --compare OLD"):
        check_rules([read_rule("rps<-5%")], [], compared=False)


def test_endpoints_with_another_verdict_are_named_the_bad_ones_first() -> None:
    def fleet(**verdicts: str) -> dict[str, Any]:
        rows = [{"endpoint": name, "verdict": word} for name, word in verdicts.items()]
        return {**summary(), "endpoints": rows}

    old = fleet(a="slow", b="ok", c="ok", gone="ok")
    assert verdict_changes(old, fleet(a="ok", b="dead", c="ok", new="slow")) == [
        "b was ok, is dead",
        "a was slow, is ok",
    ]
    assert verdict_changes(summary(), fleet(a="slow")) == []


def test_other_settings_and_another_fleet_are_said_to_be_unlike() -> None:
    now = {**summary(), "plan": {"input_tokens": 750, "turns": 2, "ways": ("a",)}, "models": ["n"]}
    assert setting_differences(summary(), now) == [  # an older version did not have turns
        "input_tokens was 256, is 750",
        "models were ['m'], are ['n']",
    ]
    old = msgspec.json.decode(msgspec.json.encode(now))
    assert setting_differences(old, now) == []  # just made, and read from its file
    rows = [{"endpoint": str(n), "verdict": "ok", "requests": 5} for n in range(3)]
    now = {**summary(), "endpoints": [*rows, {"endpoint": "x", "verdict": "dead"}]}
    assert setting_differences({**summary(), "endpoints": rows[:1]}, now) == [
        "endpoints with load were 1, are 3"
    ]


def test_changes_are_of_the_loads_that_both_have() -> None:
    now = summary(output_tok_s=3300.0)
    now["loads"][0]["load"] = "c=2"
    found = {one.name: one for one in load_changes(summary(), now)}
    assert {one.load for one in found.values()} == {"c=64"}
    assert found["output_tok_s"].change == pytest.approx(0.1)
    assert found["rps"].change is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "cannot be read"),
        (b'{"loads": []}', "no summary"),
        (b'{"loads": [1], "schema_version": 1}', r"damaged summary: .*loads\[0\]"),
        (b'{"loads": [], "fleet": {"ok": "x"}, "schema_version": 1}', "damaged summary"),
        (b'{"loads": [], "schema_version": 99}', "version 99, not 1"),
    ],
)
def test_what_is_no_summary_is_said(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "summary.json").write_bytes(content)
    with pytest.raises(UsageError, match=words):
        read_summary(tmp_path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_summary(tmp_path / "none.json")


def test_an_older_summary_is_read_from_its_file_or_folder(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    file.write_bytes(msgspec.json.encode(summary()))
    assert read_summary(file) == read_summary(tmp_path) == summary()


def row(endpoint: str, **numbers: float) -> dict[str, Any]:
    counts = {"ok": 100, "estimated": 0, "not_streamed": 0, "usage_incomplete": 0}
    return {"endpoint": endpoint, "output_tokens": 8.0, **counts, **numbers}


MANY = [row(f"n{n}:1", not_streamed=100) for n in range(3)]


@pytest.mark.parametrize(
    ("rows", "requested", "message"),
    [
        ([row("a:1", ok=0), row("b:1", not_streamed=10)], (), None),
        ([row("b:1", output_tokens=1000.0)], (), None),
        ([row("a:1", output_tokens=63.0), row("b:1", ok=0)], (64, 64), None),
        ([row("b:1", estimated=9)], (), "output tokens of 9 requests at b:1 are estimated"),
        (MANY, (), "answers to 300 requests at 3 endpoints (n0:1, n1:1, ...) came in one"),
        ([row("a:1", not_streamed=1, ok=1)], (), "answers to 1 request at a:1"),
        ([row("a:1", usage_incomplete=7)], (), "the usage of 7 requests at a:1 tells fewer"),
        ([row("b:1", output_tokens=99.0)], (8,), "the usage of 100 requests at b:1 tells more"),
        (
            [row("a:1", output_tokens=39.9), row("b:1", ok=0)],
            (64, 64),
            "the answers to 100 requests at a:1 have 39.9 output tokens on average, not the 64",
        ),
    ],
)
def test_what_cannot_be_relied_on_is_said(
    rows: list[dict[str, Any]], requested: tuple[int, ...], message: str | None
) -> None:
    found = warnings(rows, *requested)
    assert len(found) == (message is not None)
    assert message is None or found[0].startswith(message)
