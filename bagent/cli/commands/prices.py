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
        str | None, typer.Argument(help="Only models with this in their name.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, one entry a line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="As CSV.")] = False,
) -> None:
    """Print the known prices in dollars per million tokens, each with its source and date.

    A model that is not listed costs an unknown sum, not none: cost_usd is then null. Give your own
    prices in the job: prices: {input: 0.15, output: 0.60}.

    Example: bagent prices opus
    """
    from bagent.cli.render.tables import write_rows
    from bagent.money.prices import known_prices

    matching = [price for price in known_prices() if match is None or match in price.model]
    rows = [[getattr(price, name) for name in COLUMNS] for price in matching]
    write_rows(COLUMNS, rows, "jsonl" if as_json else "csv" if as_csv else "table")
