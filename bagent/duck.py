"""DuckDB connections with restricted access, and safe SQL from names, texts, paths and types.

A connection reaches no file, network or extension unless its :class:`Access` allows it. Data
becomes SQL only by :func:`quoted`, :func:`literal`, :func:`file_source`, :func:`file_literal` and
:func:`column_type`.
:func:`single_query` checks the SQL of a job before it is executed.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Setting = str | bool | int
_PATTERN = frozenset("*?[")
_SPILL = count()
_READS = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
"""Nodes of DuckDB's syntax tree that only read, unlike COPY or INSERT inside a WITH."""

_WRITES = re.compile(r"(?i)\b(?:copy|insert|update|delete|merge)\b")
_SCALAR = re.compile(
    r"(?:VARCHAR|BOOLEAN|TINYINT|SMALLINT|INTEGER|BIGINT|HUGEINT|UTINYINT|USMALLINT|UINTEGER"
    r"|UBIGINT|UHUGEINT|BIGNUM|FLOAT|DOUBLE|DATE|TIME|TIMESTAMP|UUID|JSON"
    r"|DECIMAL\(\d{1,2},\s?\d{1,2}\))(?:\[\d{0,6}\]){0,4}",
    re.IGNORECASE,
)


_installs: ContextVar[bool] = ContextVar("installs", default=True)
"""Whether DuckDB may install extensions that SQL of the user needs."""


class SqlError(ValueError):
    """SQL of a job is not one statement that only reads."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Access:
    """What a connection may access on disk.

    ``files`` and ``folders`` may be read and written, following links. ``everything`` is for SQL
    of the user or of the user's job.
    """

    files: Sequence[Path] = ()
    folders: Sequence[Path] = ()
    everything: bool = False


NOTHING = Access()


def connect(
    access: Access,
    *,
    database: Path | None = None,
    read_only: bool = True,
    spill: Path | None = None,
    settings: Mapping[str, Setting] | None = None,
) -> DuckDBPyConnection:
    """Open an in-memory DuckDB, or a DuckDB file, restricted to ``access``.

    Args:
        access: what it may access; settings are locked unless that is everything.
        database: a DuckDB file.
        read_only: open it for reading.
        spill: folder for data beyond the memory limit; None for a private one.
        settings: more settings, by name.
    """
    import duckdb

    config: dict[str, Any] = {
        "temp_directory": str(spill or private_folder() / f"spill-{next(_SPILL)}"),
        "python_enable_replacements": False,
        "allow_community_extensions": False,
    }
    if not access.everything or not _installs.get():
        config["autoinstall_known_extensions"] = False
    if not access.everything:
        config["autoload_known_extensions"] = False
    if database is None:
        connection = duckdb.connect(config=config)
    else:
        connection = duckdb.connect(str(database), read_only=read_only, config=config)
    try:
        for name, value in (settings or {}).items():
            connection.execute(f"SET {quoted(name)} = ?", [value])
        if not access.everything:
            _lock(connection, access)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def without_installs() -> Iterator[None]:
    """Prevent connections opened inside the block from installing extensions."""
    token = _installs.set(False)
    try:
        yield
    finally:
        _installs.reset(token)


def _lock(connection: DuckDBPyConnection, access: Access) -> None:
    """Deny access to all files but those of ``access``, and lock the settings."""
    for name, paths in (("allowed_paths", access.files), ("allowed_directories", access.folders)):
        absolute = [str(path.absolute()) for path in paths]
        # DuckDB compares the path in the SQL first, then its target.
        connection.execute(f"SET {name} = ?", [[*absolute, *map(escape_pattern, absolute)]])
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def private_folder() -> Path:
    """Return this process's temporary folder, private to the user."""
    return Path(_folder_of(os.getpid()).name)


@cache
def _folder_of(process: int) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix=f"bagent-{process}-")


def quoted(name: str) -> str:
    """Return a name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Return text as an SQL string."""
    return "'" + text.replace("'", "''") + "'"


def escape_pattern(path: str) -> str:
    """Return a path that DuckDB does not expand as a pattern."""
    return "".join(f"[{char}]" if char in _PATTERN else char for char in path)


def file_literal(path: Path) -> str:
    """Return the path of a file as an SQL string that names only that file."""
    return literal(escape_pattern(str(path.absolute())))


def file_source(*paths: Path) -> str:
    """Return the first arguments of a function of DuckDB that reads exactly these files.

    They keep their columns whatever their folders are called: by itself DuckDB makes a column
    ``model`` of the folder ``model=x``, also in place of one that the files have.
    """
    return f"[{', '.join(map(file_literal, paths))}], hive_partitioning = false"


def is_plain_scalar(kind: str) -> bool:
    """Return whether a type is a scalar."""
    return not kind.endswith("]") and _SCALAR.fullmatch(kind) is not None


def column_type(kind: str) -> str:
    """Return a scalar type or a list of one unchanged; JSON for anything else."""
    return kind if _SCALAR.fullmatch(kind) else "JSON"


def single_query(connection: DuckDBPyConnection, sql: str) -> str:
    """Return ``sql`` without semicolons around it and final comments, after parsing it.

    Raises:
        SqlError: it is not one statement, or it writes.
        duckdb.Error: it cannot be parsed.
    """
    import duckdb

    statements = connection.extract_statements(sql)
    if not statements:
        raise SqlError("a query is one statement, there is none")
    if len(statements) > 1:
        raise SqlError(
            f"a query is one statement, these are {len(statements)}",
            "join them by WITH name AS (...)",
        )
    kind = statements[0].type
    if kind == duckdb.StatementType.MULTI:  # a PIVOT without listed columns
        if _WRITES.search(sql):
            raise SqlError("a query only reads", "quote a column of such a name")
    elif kind != duckdb.StatementType.SELECT:
        raise SqlError(f"a query is a SELECT, this is {kind.name}")
    else:
        check_reads(syntax_tree(connection, sql))
    return _alone(sql)


def syntax_tree(connection: DuckDBPyConnection, query: str) -> dict[str, Any]:
    """Return the syntax tree of a query: ``statements``, or ``error`` and ``error_message``."""
    answer = connection.execute("SELECT json_serialize_sql(?)", [query]).fetchall()
    tree: dict[str, Any] = json.loads(answer[0][0])
    return tree


def sql_of_tree(connection: DuckDBPyConnection, tree: dict[str, Any]) -> str:
    """Return the SQL of a tree of :func:`syntax_tree`."""
    answer = connection.execute("SELECT json_deserialize_sql(?::JSON)", [json.dumps(tree)])
    return str(answer.fetchall()[0][0])


def check_reads(tree: Any) -> None:
    """Check that no statement inside a query writes, such as ``WITH x AS (COPY ...)``.

    Raises:
        SqlError: one does.
    """
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            kind = node.get("type")
            if isinstance(kind, str) and kind.endswith("_NODE") and kind not in _READS:
                raise SqlError(f"a query only reads, this holds {kind.partition('_')[0]}")
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)


def _alone(sql: str) -> str:
    """Return a statement without the semicolons around it, and the comments behind it."""
    import duckdb

    content = sql.encode()
    tokens = duckdb.tokenize(sql)
    offsets = [*(start for start, _ in tokens), len(content)]  # these count bytes
    own = [
        number
        for number, (start, kind) in enumerate(tokens)
        if kind is not duckdb.token_type.comment
        and content[start : offsets[number + 1]].strip() != b";"
    ]
    first, end = offsets[own[0]], offsets[own[-1] + 1]
    return (content[:first].replace(b";", b" ") + content[first:end]).decode().strip()


Nested = str | list["Nested"] | dict[str, "Nested"]
"""A scalar type, a list of one type, or the fields of a struct."""

_DEEPEST = 8
_LONGEST = 20_000
_TOKEN = re.compile(
    r'\s*(?:("(?:[^"]|"")*")|(\[\])|([(),])|(DECIMAL\(\d{1,2},\s?\d{1,2}\)|[A-Za-z_]\w*))',
    re.IGNORECASE,
)


def parse_type(text: str, *, bare_names: bool = False) -> Nested | None:
    """Parse a type such as ``STRUCT("line" BIGINT, "tags" VARCHAR[])[]``; None if invalid.

    Names are quoted; with ``bare_names`` they need not be, as in DuckDB's descriptions. JSON
    becomes text, since other readers of Parquet treat nested JSON as bytes.
    """
    if len(text) > _LONGEST:
        return None
    tokens: list[str] = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return None
        tokens.append(match[match.lastindex or 0])
        position = match.end()
    try:
        kind, end = _type(tokens, 0, 0, bare_names)
    except (IndexError, ValueError):
        return None
    return kind if end == len(tokens) else None


def type_sql(kind: Nested) -> str:
    """Return a type as SQL."""
    if isinstance(kind, str):
        return kind
    if isinstance(kind, list):
        return f"{type_sql(kind[0])}[]"
    fields = ", ".join(f"{quoted(name)} {type_sql(field)}" for name, field in kind.items())
    return f"STRUCT({fields})"


def is_nested(kind: str) -> bool:
    """Return whether a type is a struct or a list of structs."""
    return kind[:7].upper() == "STRUCT("


def nested_value(value: str, kind: str) -> str:
    """Return SQL for a JSON value as a nested type; missing or mismatched parts become null."""
    structure = json.dumps(parse_type(kind), ensure_ascii=False)
    return f"from_json({value}, {literal(structure)})"


def _type(tokens: list[str], position: int, depth: int, bare: bool) -> tuple[Nested, int]:
    if depth > _DEEPEST:
        raise ValueError
    word = tokens[position].upper()
    position += 1
    kind: Nested
    if word == "STRUCT":
        kind, position = _fields(tokens, position, depth, bare)
    elif is_plain_scalar(word):
        kind = {"JSON": "VARCHAR", "HUGEINT": "DECIMAL(38,0)"}.get(word, word)
    else:
        raise ValueError
    while position < len(tokens) and tokens[position] == "[]":
        kind, position = [kind], position + 1
    return kind, position


def _fields(tokens: list[str], position: int, depth: int, bare: bool) -> tuple[Nested, int]:
    if tokens[position] != "(":
        raise ValueError
    fields: dict[str, Nested] = {}
    while tokens[position] != ")":
        name = tokens[position + 1]
        if name[0] in "()[," or not (bare or name.startswith('"')):
            raise ValueError
        name = name[1:-1].replace('""', '"') if name.startswith('"') else name
        if not name or name.casefold() in map(str.casefold, fields):
            raise ValueError
        fields[name], position = _type(tokens, position + 2, depth + 1, bare)
        if tokens[position] not in (",", ")"):
            raise ValueError
    return fields, position + 1
