"""Which rows are listed, in which order: from a query string to SQL with parameters, and back."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlencode

import msgspec
from multidict import MultiMapping

from bagent.duck import SqlError, quoted, single_query
from bagent.errors import UsageError
from bagent.store.tables.export_sql import status_condition, typed_condition
from bagent.store.tables.schema import pointer

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Operation = Literal["is", "blank", "between", "length", "items", "missing"]
Source = Literal["answer", "input", "text"]

SORTABLE = (
    *("row", "id", "stage", "status", "error_kind", "endpoint", "latency_ms", "queue_ms"),
    *("prompt_tokens", "completion_tokens", "cost_usd", "attempts", "turns", "finished_at"),
)
"""Columns of ``results`` by which rows can be sorted."""

TEXT_LENGTH = "length"
"""The name under which rows are sorted by the length of their answer."""

NUMBER_SORT, TEXT_SORT = "n:", "t:"
"""Prefixes of a property by which rows are sorted as numbers or as text."""

MOST_TESTS = 12
LONGEST = 2000
"""Characters of a search or an SQL condition."""

Condition = tuple[str, list[Any]]


class FieldTest(msgspec.Struct, frozen=True, array_like=True):
    """A condition on one property of the answer, one field of the input, or the text."""

    source: Source
    name: str | None
    """The property; None is the whole answer."""

    operation: Operation
    value: str | None = None
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        ranges = self.operation in ("between", "length", "items")
        if ranges and (self.low is None or self.high is None):
            raise ValueError(f"{self.operation} needs two bounds")

    @property
    def label(self) -> str:
        """The condition for people."""
        name = "the text" if self.source == "text" else (self.name or "the answer")
        if self.operation == "is":
            return f"{name} = {self.value}"
        if self.operation in ("blank", "missing"):
            return f"{'no' if self.operation == 'missing' else 'blank'} {name}"
        unit = {"length": " characters", "items": " items"}.get(self.operation, "")
        low, high = float(self.low or 0), float(self.high or 0)
        last = high - 1 if unit and high.is_integer() else math.nextafter(high, -math.inf)
        if len(repr(last)) <= len(repr(high)):
            return f"{name} from {_plain(low)} to {_plain(last)}{unit}"
        return f"{name} from {_plain(low)} to below {_plain(high)}{unit}"

    @property
    def text(self) -> str:
        """The condition as in a query string."""
        return msgspec.json.encode(self).decode()

    def sql(self) -> Condition:
        """Return SQL over ``results`` and its parameters."""
        if self.source == "text":
            value, parameters = "text", []
        else:
            column = "output" if self.source == "answer" else "input"
            value, parameters = f"json_extract_string({column}, ?)", [pointer(self.name)]
        answered = "" if self.source == "input" else "status = 'ok' and "
        if self.operation == "missing":
            return f"({answered}{value} is null)", parameters
        if self.operation == "blank":
            return f"({answered}trim({value}) = '')", parameters
        if self.operation == "is":
            return f"({answered}{value} = ?)", [*parameters, self.value]
        if self.operation == "length":
            value = f"length({value})"
        elif self.operation == "items":
            value = f"len(try_cast({value} as json[]))"
        else:
            value = f"try_cast({value} as double)"
        return (
            f"({answered}{value} >= ? and {value} < ?)",
            [*parameters, self.low, *parameters, self.high],
        )


def _plain(number: float) -> str:
    return f"{number:,.0f}" if number.is_integer() else f"{number:,.6g}"


class RowFilter(msgspec.Struct, frozen=True):
    """The rows to list and their order."""

    stages: tuple[str, ...] = ()
    statuses: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    tests: tuple[FieldTest, ...] = ()
    search: str = ""
    sql: str = ""
    sort: str = ""
    """A column of :data:`SORTABLE`, :data:`TEXT_LENGTH`, or a property after its prefix."""

    descending: bool = False

    @classmethod
    def parse(cls, query: MultiMapping[str]) -> RowFilter:
        """Return the filter of a query string.

        Raises:
            UsageError: a value is wrong.
        """
        try:
            texts = query.getall("f", ())
            tests = tuple(msgspec.json.decode(text, type=FieldTest) for text in texts)
        except (msgspec.DecodeError, UnicodeEncodeError):
            raise UsageError("a filter in the address is damaged") from None
        if len(tests) > MOST_TESTS:
            raise UsageError(f"{len(tests)} filters of fields; at most {MOST_TESTS} are possible")
        sort = query.get("sort", "")
        if sort not in ("", TEXT_LENGTH, *SORTABLE) and sort[:2] not in (NUMBER_SORT, TEXT_SORT):
            raise UsageError(f"rows cannot be sorted by {sort}", hint=", ".join(SORTABLE))
        return cls(
            stages=tuple(query.getall("stage", ())),
            statuses=tuple(query.getall("status", ())),
            causes=tuple(query.getall("cause", ())),
            endpoints=tuple(query.getall("endpoint", ())),
            tests=tests,
            search=_limited(query, "q", "search"),
            sql=_limited(query, "sql", "SQL condition"),
            sort=sort,
            descending=query.get("desc", "") == "1",
        )

    def pairs(self) -> list[tuple[str, str]]:
        """Return the names and values of its query string."""
        lists = (
            ("stage", self.stages),
            ("status", self.statuses),
            ("cause", self.causes),
            ("endpoint", self.endpoints),
        )
        pairs = [(name, value) for name, values in lists for value in values]
        pairs += [("f", test.text) for test in self.tests]
        singles = (("q", self.search), ("sql", self.sql), ("sort", self.sort))
        pairs += [(name, value) for name, value in singles if value]
        return [*pairs, ("desc", "1")] if self.descending else pairs

    def url(self, *more: tuple[str, str]) -> str:
        """Return its query string with its question mark; ``more`` is added."""
        text = urlencode([*self.pairs(), *more], errors="surrogatepass")
        return f"?{text}" if text else "?"

    def chips(self) -> list[tuple[str, str]]:
        """Return each condition for people with the query string without it."""
        chips = []
        pairs = self.pairs()
        for index, (name, value) in enumerate(pairs):
            if name in ("sort", "desc"):
                continue
            label = {"q": "contains", "cause": "cause"}.get(name, name)
            text = f"{label} {value}"
            if name == "f":
                text = msgspec.json.decode(value, type=FieldTest).label
            rest = urlencode(pairs[:index] + pairs[index + 1 :], errors="surrogatepass")
            chips.append((text, f"?{rest}"))
        return chips

    def where(self, connection: DuckDBPyConnection) -> Condition:
        """Return SQL over ``results`` and its parameters; ``true`` selects all.

        Raises:
            UsageError: the typed SQL is no single condition that only reads, or names a column
                that is not there.
        """
        parts: list[str] = []
        parameters: list[Any] = []
        columns = (
            ("stage", self.stages),
            ("error_kind", self.causes),
            ("endpoint", self.endpoints),
        )
        for column, values in columns:
            if values:
                parts.append(f"{column} in ({', '.join('?' * len(values))})")
                parameters += values
        if self.statuses:
            parts.append(status_condition(self.statuses))
        for test in self.tests:
            sql, values_of_test = test.sql()
            parts.append(sql)
            parameters += values_of_test
        if self.search:
            sql, values_of_search = search_condition(self.search)
            parts.append(sql)
            parameters += values_of_search
        if self.sql:
            sql = checked_condition(connection, self.sql)
            parts.append(typed_condition(connection, sql, "SQL"))
        return " and ".join(parts) or "true", parameters

    def order(self) -> tuple[str | None, list[Any]]:
        """Return SQL of the value to sort by and its parameters; None is the order of the input."""
        if self.sort in ("", "row"):
            return None, []
        if self.sort == TEXT_LENGTH:
            return "strlen(coalesce(text, output::varchar))", []
        prefix, name = self.sort[:2], self.sort[2:]
        if prefix == NUMBER_SORT:
            return "try_cast(json_extract_string(output, ?) as double)", [pointer(name)]
        if prefix == TEXT_SORT:
            return "json_extract_string(output, ?)", [pointer(name)]
        return quoted(self.sort), []


def _limited(query: MultiMapping[str], name: str, label: str) -> str:
    """Return a text of the query string.

    Raises:
        UsageError: it is longer than :data:`LONGEST`.
    """
    text = query.get(name, "").strip()
    if len(text) > LONGEST:
        raise UsageError(
            f"the {label} has {len(text):,} characters; at most {LONGEST:,} are possible"
        )
    return text


def search_condition(text: str) -> Condition:
    """Return SQL for rows that contain a text, and its parameters.

    It finds the text as typed, in lower and upper case, and with a capital first letter:
    folding the case of every text of a million rows takes several seconds.
    """
    forms = dict.fromkeys([text, text.lower(), text.upper(), text[:1].upper() + text[1:].lower()])
    columns = ("id", "coalesce(text, output::varchar)", "error", "input::varchar")
    parts = [f"contains({column}, ?)" for column in columns for _ in forms]
    return f"({' or '.join(parts)})", [*forms] * len(columns)


def checked_condition(connection: DuckDBPyConnection, sql: str) -> str:
    """Return a typed condition if it is one expression that only reads.

    Raises:
        UsageError: it is not.
    """
    import duckdb

    try:
        # As an element of a list it cannot close the parenthesis of a query around it.
        connection.extract_statements(f"select [{sql}\n]")
        single_query(connection, f"select 1 from results where ({sql}\n)")
    except (SqlError, duckdb.Error) as error:
        raise UsageError(f"SQL: {str(error).splitlines()[0]}") from None
    return sql
