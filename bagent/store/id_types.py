"""The JSON types of ids, which tables hold as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bagent.duck import literal
from bagent.store.results import iter_results
from bagent.store.run_dir import RunDir
from bagent.store.tables.schema import pointer

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_NUMBERS: dict[type, str] = {int: "BIGINT", float: "DOUBLE"}


def number_type(
    connection: DuckDBPyConnection, runs: Sequence[RunDir], tables: Sequence[str] = ("results",)
) -> str | None:
    """Return the SQL type of ids that all are numbers; None where some are texts.

    The journals say whether the first id of each run is a number; another one is taken for a number
    where it is written as DuckDB writes numbers.
    """
    kinds = set()
    for run in runs:
        first = next(iter(iter_results(run.path, report=lambda _: None)), None)
        if first is not None:
            kinds.add(_NUMBERS.get(type(first["id"])))
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None:
        return None
    text = f"id is not null and try_cast(id as {kind})::varchar is distinct from id"
    for table in tables:
        # An unfinished result would refuse relations over this connection.
        if connection.execute(f"select 1 from {table} where {text} limit 1").fetchall():
            return None
    return kind


def id_as_json(connection: DuckDBPyConnection, runs: Sequence[RunDir]) -> str:
    """Return SQL over ``results`` for ids as JSON, each of the type that it has in its row.

    An id of a row whose input is not stored is a number only where all ids are.
    """
    infos = [run.load_or_report(lambda _: None) for run in runs]
    fields = {"id", "custom_id", *(str(info.job.get("id") or "id") for info in infos if info)}
    all_have_input = all(info and info.keep_input and len(info.stages) < 2 for info in infos)
    cases = " ".join(
        f"when input ->> {path} = id then input -> {path}"
        for path in (literal(pointer(name)) for name in sorted(fields))
    )
    kind = None if all_have_input else number_type(connection, runs)
    other = "to_json(id)" if kind is None else f"to_json(try_cast(id as {kind}))"
    return f"case {cases} else {other} end"
