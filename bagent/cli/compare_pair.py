"""Two runs against known answers, as ``bagent compare`` shows them."""

from __future__ import annotations

from typing import Any

import typer

from bagent.cli.printing import write_rows
from bagent.observe.paired import PairScore


def interval(ends: Any) -> str | None:
    """Write the ends of an interval for people."""
    return None if ends is None else f"{ends[0]:.3f} to {ends[1]:.3f}"


def show_pair(score: PairScore, first: str, second: str) -> None:
    """Print the accuracy of both runs and their difference."""
    n = score.numbers
    typer.echo(f"A is {first}, B is {second}; intervals are of 95 %, p is McNemar's\n")
    write_rows(
        ("field", "A", "A 95 %", "B", "B 95 %", "B - A", "B - A 95 %", "only A", "only B", "p"),
        [
            (
                *(pair.field, pair.accuracy_a, interval(pair.interval_a)),
                *(pair.accuracy_b, interval(pair.interval_b)),
                *(pair.difference, interval(pair.interval)),
                *(pair.only_a, pair.only_b, float(f"{pair.p:.3g}")),
            )
            for pair in score.fields
        ],
        "table",
    )
    typer.echo("")
    for name, side in (("A", score.a.numbers), ("B", score.b.numbers)):
        rows, not_ok, missing = (f"{side[key]:,}" for key in ("rows", "not_ok", "missing"))
        typer.echo(f"{name}: {rows} rows, {not_ok} not ok, {missing} not in the run")
    if n["p"] is not None and n["rows"]:
        sure = "is" if float(str(n["p"])) < 0.05 else "may be chance, it is not"
        typer.echo(f"the difference {sure} significant at 5 %")
