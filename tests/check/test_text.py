"""A report as people read it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bagent.check.report import (
    CheckReport,
    CostReport,
    EndpointReport,
    MaxTokens,
    PromptReport,
    ReorderReport,
    RowReport,
    SchemaReport,
    ShareReport,
    TokenReport,
    WarmReport,
)
from bagent.check.text import MAX_MESSAGE_CHARS, report_text

TOKENS = TokenReport(
    "tokenize", "/tokenize of h:1", 200, 64, 5, 10, 900, 12.5, 12_512_345, 64, 0, 0
)

WARM = WarmReport(96, 16, 1440, False, "no: " + "all of it is said in these words, " * 4)


def report(**changes: Any) -> CheckReport:
    base = CheckReport(
        job="genes",
        file="job.yaml",
        backend="vllm://h:1",
        planned=None,
        endpoints=(
            EndpointReport("h:1", "http://h:1/v1", True, None, ("m",), 99, "1.0", "v", None),
        ),
        model="m",
        model_auto=True,
        context=32_768,
        inputs=("rows.jsonl",),
        rows=1_000_000,
        rows_how="about",
        looked_at=200,
        answers=1,
        max_tokens=MaxTokens(512, 512, False),
        schema=SchemaReport("s.json", "auto", True, True, True),
        dedupe=True,
        stream="never",
        results="runs/genes",
        parameters={"model": "m", "stop": ["\n"]},
        prompts=(),
        tokens=TOKENS,
        cost=CostReport(None, None, None, None, None),
        sharing=None,
        reorder=None,
        failing=(),
        failing_count=0,
        too_long=(),
        too_long_count=0,
        warnings=(),
    )
    return msgspec.structs.replace(base, **changes)


def prompt(text: str, **changes: Any) -> PromptReport:
    messages = [{"role": "user", "content": text}]
    base = PromptReport("r1", "rows.jsonl", 1, 25, True, 512, messages, None, None)
    return msgspec.structs.replace(base, **changes)


def lines(**changes: Any) -> list[str]:
    return report_text(report(**changes)).splitlines()


def test_no_line_of_its_own_is_wider_than_80_columns() -> None:
    long = RowReport("r" * 40, "a/long/path/to/rows.jsonl", 123_456, "words " * 40)
    shown = lines(
        failing=(long,),
        failing_count=1,
        sharing=ShareReport(16, 64, True, 120.0, 96.0, 0.0, 8.0, 16.0, 432_000, 901, WARM),
        reorder=ReorderReport(64, 64_000_000, "above", "prompt:\n  user: x\n"),
        max_tokens=MaxTokens(16, 4096, True),
    )
    assert max(map(len, shown)) <= 80


def test_messages_stand_as_they_are_sent() -> None:
    text = "  indented\n\ttab  \n\nlast, " + "long " * 40
    shown = report_text(report(prompts=(prompt(text),)))
    assert "prompt of row r1 (rows.jsonl:1), 25 tokens\n  user\n" in shown
    body = shown.partition("  user\n")[2].partition("\n\ntokens")[0]
    assert [line.removeprefix("    ") for line in body.split("\n")] == text.split("\n")
    raw = prompt("", messages=None, prompt="Q: a\nA:")
    assert "  (raw)\n    Q: a\n    A:\n" in report_text(report(prompts=(raw,)))
    error = "prompt.user: the row has no field x"
    broken = prompt("", messages=None, tokens=None, error=error)
    assert f"  cannot be sent: {error}" in lines(prompts=(broken,))
    long = report_text(report(prompts=(prompt("x" * (MAX_MESSAGE_CHARS + 7)),)))
    assert "[7 more characters; --json shows them]" in long


def test_control_codes_in_rows_are_made_visible() -> None:
    evil = "a\x1b[31mred\x07\r\x9b2J\u202ebidi"
    shown = report_text(
        report(
            job=f"x{evil}",
            prompts=(prompt(evil, id=evil),),
            failing=(RowReport(evil, evil, 1, evil),),
            failing_count=1,
            parameters={"stop": [evil]},
            reorder=ReorderReport(16, 16, None, f"prompt:\n  user: {evil}\n"),
        )
    )
    assert "\\x1b[31mred" in shown
    assert all(letter.isprintable() or letter == "\n" for letter in shown)


EXACT = msgspec.structs.replace(TOKENS, rows=200, counted=200, prompts=12_345, repeats=3)
DEAD = EndpointReport("h:2", "u", False, "cannot connect", (), None, None, None, None)
TOO_LONG = RowReport("r7", "rows.jsonl", 8, "40 prompt tokens are more than 30")
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "rows        about 1,000,000 rows (estimated by bytes), the first 200 looked at"),
        ({"rows": 200, "rows_how": "counted"}, "rows        200 rows"),
        ({}, "            all prompts: about 12,500,000"),
        ({"tokens": EXACT, "rows": 200, "rows_how": "counted"}, "            all prompts: 12,345"),
        ({"tokens": EXACT}, "of 200 requests equal an earlier one (each is sent once)"),
        ({"tokens": EXACT, "dedupe": False}, "(sent each time without"),
        ({}, "cost        unknown (check --price IN,OUT"),
        ({"cost": CostReport(0.5, 2.0, 1.0, 2.0, 3.0)}, "cost        prompts about $1.00, answers"),
        ({"too_long": (TOO_LONG,), "too_long_count": 5}, "too long    row r7 (rows.jsonl:8): 40"),
        (
            {"too_long": (TOO_LONG,), "too_long_count": 5},
            "            and 4 more of the rows looked",
        ),
        ({"endpoints": [DEAD] * 100}, "            0 of 100 endpoints answer"),
        (
            {"prompts": (prompt("", messages=[{"role": "user", "content": [IMAGE]}]),)},
            "    [image data:image/png;base64, 5,022 characters]",
        ),
    ],
)
def test_the_report_says(changes: dict[str, Any], line: str) -> None:
    text = report_text(report(**changes))
    assert line in text
    assert text.count("h:2") <= 20, "of a large fleet only the first are named"
