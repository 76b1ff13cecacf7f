"""``bagent prices``: the known prices of hosted models."""

from __future__ import annotations

from typing import Annotated

import typer

COLUMNS = (
    *("provider", "model", "input", "output", "cached", "cache_write", "batch"),
    *("date", "source"),
)


def prices(
    match: Annotated[
        str | None, typer.Argument(metavar="[TEXT]", help="Only models with this in their name.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one model a line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
) -> None:
    """List known prices of hosted models, in dollars per million tokens.

    Each has its source and date. The cost of other models is unknown, and cost_usd is null. Set
    your own prices in the job: prices: {input: 0.15, output: 0.60}.

    Example: bagent prices opus
    """
    from bagent.cli.render.tables import write_rows
    from bagent.money.prices import known_prices

    matching = [price for price in known_prices() if match is None or match in price.model]
    rows = [[getattr(price, name) for name in COLUMNS] for price in matching]
    write_rows(COLUMNS, rows, "jsonl" if as_json else "csv" if as_csv else "table")
