"""The rows to read, as one value that other processes can read again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagent.errors import InputError

Input = str | Mapping[str, str]
"""One entry of the input: an absolute path, a glob, ``-`` for stdin, ``{"files": GLOB}`` for rows
of ``path`` and ``text``, or ``{"sql": QUERY}`` for what DuckDB reads."""


@dataclass(frozen=True, slots=True)
class TableColumns:
    """The columns of a table that are read, in any case.

    Attributes:
        needed: where one of them is missing, all columns are read: messages name the others.
        optional: read where they are there.
    """

    needed: frozenset[str]
    optional: frozenset[str]

    def of(self, names: Sequence[str]) -> list[int]:
        """Return the indexes of the columns to read."""
        folded = [name.lower() for name in names]
        needed = {name.lower() for name in self.needed}
        if not needed <= set(folded):
            return list(range(len(names)))
        selected = needed | {name.lower() for name in self.optional}
        return [index for index, name in enumerate(folded) if name in selected]


@dataclass(frozen=True)
class RowsConfig:
    """Everything needed to read the same rows again, also in another process.

    Attributes:
        inputs: what to read, in this order.
        base: folder that relative paths (and those inside ``sql``) start from.
        id_field: field that names a row; None: ``id``, else ``custom_id``, where present.
        fields: input fields that the job uses; None for all of them. Kept sorted.
        where: a DuckDB SQL condition; rows that it does not hold for are left out.
        sample: deliver only this many rows, drawn evenly from all by ``seed``.
        seed: of ``sample``; the same seed and rows give the same sample.
        limit: deliver at most this many rows.
        shard: ``(i, n)``, i from 1 to n: deliver only the i-th of n disjoint parts.
        stdin_spool: file that keeps what came from stdin; None: it is not kept.
        replace_stdin: what is piped in is the whole input, called ``rows``, and replaces what an
            earlier start kept; else it is added to that.

    Raises:
        InputError: a number is out of its range, or an input has an unknown form.
    """

    inputs: tuple[Input, ...]
    base: Path
    id_field: str | None = None
    fields: tuple[str, ...] | None = None
    where: str | None = None
    sample: int | None = None
    seed: int = 0
    limit: int | None = None
    shard: tuple[int, int] | None = None
    stdin_spool: Path | None = None
    replace_stdin: bool = False

    def __post_init__(self) -> None:
        settle = object.__setattr__  # the way to settle a field of a frozen dataclass
        settle(self, "inputs", tuple(self.inputs))
        settle(self, "base", Path(self.base))
        if self.fields is not None:
            settle(self, "fields", tuple(sorted(set(self.fields))))
        if self.stdin_spool is not None:
            settle(self, "stdin_spool", Path(self.stdin_spool))
        if self.shard is not None:
            settle(self, "shard", tuple(self.shard))
        self._check()

    def to_json(self) -> str:
        """One line of JSON that :meth:`from_json` takes."""
        values = {
            **vars(self),
            "inputs": [item if isinstance(item, str) else dict(item) for item in self.inputs],
            "base": str(self.base),
            "stdin_spool": None if self.stdin_spool is None else str(self.stdin_spool),
        }
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str | bytes) -> RowsConfig:
        """Read what :meth:`to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        return cls(**values)

    def _check(self) -> None:
        if not self.inputs:
            raise InputError("there is no input", hint="name one: input: rows.jsonl, or -i PATH")
        for item in self.inputs:
            if not isinstance(item, str) and (len(item) != 1 or not {"files", "sql"} & set(item)):
                raise InputError(
                    f"unknown form of input: {dict(item)}",
                    hint='a path, a glob, "-", {files: GLOB} or {sql: QUERY}',
                )
        if self.sample is not None and self.sample < 1:
            raise InputError(
                f"sample must be 1 or more, not {self.sample}", hint="write --sample 100"
            )
        if self.limit is not None and self.limit < 0:
            raise InputError(
                f"limit must not be negative, it is {self.limit}", hint="write --limit 100"
            )
        if self.shard is not None and not 1 <= self.shard[0] <= self.shard[1]:
            part, parts = self.shard
            raise InputError(
                f"there is no shard {part} of {parts}", hint=f"shards count from 1 to {parts}"
            )
