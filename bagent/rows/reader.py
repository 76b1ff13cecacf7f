"""The stream of rows of one run: sources, numbers and keys, filter, sample, limit and shard."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain, islice, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from bagent.errors import InputError
from bagent.rows.discovery import (
    FileSource,
    RowsConfig,
    Source,
    StdinSource,
    TableColumns,
    find_sources,
)
from bagent.rows.filter import FIRST_ROWS, Condition, RowSample, in_shard, limited
from bagent.rows.formats.chunks import CancelToken, ReadProgress, check_source, source_chunks
from bagent.rows.formats.json import Chunk
from bagent.rows.plain_jsonl import PlainJsonlReader, is_plain
from bagent.rows.resume_cache import Finished, ResumeCache, identity_of
from bagent.rows.row_keys import RowKeyer
from bagent.rows.stdin import STDIN, WAITING, Bases, StdinReader, StdinSpool
from bagent.rows.warnings import RowWarnings
from bagent.types import PROGRAM_ROWS, Row


def open_rows(
    config: RowsConfig, *, stdin: BinaryIO | None = None, columns: frozenset[str] | None = None
) -> RowReader:
    """Find and check the input without reading it into memory.

    Args:
        config: what to read.
        stdin: where ``-`` reads from, usually ``sys.stdin.buffer``; None: nothing is piped in.
            It is read through its descriptor, not through its buffer.
        columns: of tables only these and what the configuration names are read; None: all columns.

    Raises:
        InputError: a file is missing, a folder, not UTF-8, of unknown format or a damaged
            archive; a glob matches nothing; stdin is a terminal; ``where`` cannot be parsed or
            names a field that the first rows do not have.
    """
    warnings = RowWarnings()
    sources = find_sources(config, warnings)
    pipe = None
    for source in sources:
        if isinstance(source, StdinSource):
            pipe = _check_stdin(config, stdin)
        else:
            check_source(source, config.base)
    rows = RowReader(config, sources, warnings, pipe, columns)
    rows.take_notes()
    rows.check_where()
    return rows


def read_again(config: RowsConfig) -> Iterator[list[Row]]:
    """Yield the same rows once more, in any process: those of stdin come from its spool.

    Raises:
        InputError: a source has gone or changed so that it cannot be read.
    """
    rows = RowReader(config, find_sources(config, RowWarnings()), RowWarnings(), None)
    rows.check_where()
    try:
        yield from rows.batches()
    finally:
        rows.close()


class RowReader:
    """The rows of one run. Made by :func:`open_rows`.

    :meth:`peek` and :meth:`batches` belong to one thread at a time; :meth:`close`,
    :meth:`progress` and :attr:`warnings` may be used from another meanwhile.
    """

    def __init__(
        self,
        config: RowsConfig,
        sources: list[Source],
        warnings: RowWarnings,
        stdin: BinaryIO | None,
        columns: frozenset[str] | None = None,
    ) -> None:
        self._config = config
        self._sources = sources
        self._warnings = warnings
        self._cancel = CancelToken()
        sizes = [source.size if isinstance(source, FileSource) else None for source in sources]
        self._progress = ReadProgress(None if None in sizes else sum(filter(None, sizes)))
        self._condition = Condition(config.where, config.base) if config.where else None
        self._columns = None if columns is None else self._table_columns(columns)
        self._stdin = stdin
        self._pipe: StdinReader | None = None
        self._spool = None
        if config.stdin_spool is not None:
            name = PROGRAM_ROWS if config.replace_stdin else STDIN
            # A sample is drawn from what the file holds.
            self._spool = StdinSpool(config.stdin_spool, name, hold=config.sample is None)
        self._ahead: list[list[Row]] = []
        self._waits = False  # whether the next batch may be long in coming, as far as peek got
        self._cache: ResumeCache | None = None
        self._shared: Path | None = None
        self._jsonl_readers: list[PlainJsonlReader] = []
        self.unselected = 0
        """Rows that ``where`` left out so far."""
        self._selected = False  # whether it let one through
        self._stream = self._selected_rows()

    @property
    def warnings(self) -> list[str]:
        """What a person should know about the rows read so far, one line for each kind."""
        lines = self._warnings.lines
        if self.unselected and not self._selected:
            lines.append(f"`where` selects none of the {self.unselected:,} rows that were read")
        return lines

    @property
    def passed(self) -> int:
        """How many rows :meth:`batches` left out because :meth:`remember` let it."""
        return sum(lines.passed for lines in list(self._jsonl_readers))

    @property
    def empty_pipe(self) -> bool:
        """Whether standard input ended without a row."""
        return self._pipe is not None and self._pipe.ended_empty

    @property
    def shards(self) -> int:
        """The number of shards; this reader delivers one of them."""
        return self._config.shard[1] if self._config.shard else 1

    def take_notes(self) -> None:
        """Prepare for :meth:`remember`. Call it before reading."""
        config = self._config
        if config.where is None and config.sample is None and config.limit is None:
            self._cache = ResumeCache()

    def remember(self, path: Path, finished: Finished | None) -> None:
        """Skip finished rows that an earlier start recorded.

        The others keep their numbers, ids and keys. Call it before :meth:`batches`. It has no
        effect with ``where``, a sample or a limit, and behind the first source that is not a
        plain JSON Lines file, or the first id that is not above the one before.

        Args:
            path: the file of notes; it is read, and brought up to date.
            finished: whether all rows of these keys are finished, called by who reads; None:
                leave out none.
        """
        if self._cache is None or not self._cache.noting:
            return
        identity = identity_of(self._config)
        if self._shared is not None:
            self._cache.follow(self._shared, identity, finished)
        else:
            self._cache.attach(path, identity, finished)

    def share(self, notes: Path) -> None:
        """Let :meth:`remember` read the cache that :meth:`note_all` writes in another process.

        Rows of other shards are not decoded then, as far as that process has come; nothing else
        changes.
        """
        self._shared = notes

    @property
    def notable(self) -> bool:
        """Whether anything can still be noted of this input, as :meth:`remember` says."""
        cache = self._cache
        return cache is not None and cache.noting and any(map(is_plain, self._sources[:1]))

    def note_all(self) -> None:
        """Read the input only to write the cache of :meth:`remember`.

        Raises:
            InputError: the input cannot be read to its end.
        """
        for _ in self.batches():
            if not self.notable:
                return

    def batches(self) -> Iterator[list[Row]]:
        """Yield the rows, up to 512 at once; from a pipe, those that are there.

        Raises:
            InputError: the input cannot be read to its end, e.g. a cut-off archive.
            WriteError: rows from stdin cannot be kept.
        """
        if self._cache is not None and not self._cache.attached:
            self._cache.stop()
        self.keep_rows()
        for rows in chain(self._peeked(), self._stream):
            if rows:
                yield rows

    def peek(self, n: int, *, wait: bool = False) -> list[Row]:
        """Return up to ``n`` first rows, which :meth:`batches` yields again. Call it first.

        Args:
            n: how many.
            wait: wait for a pipe to bring more than its first row.

        Raises:
            InputError: as :meth:`batches`.
        """
        count = sum(map(len, self._ahead))
        while count < n and (wait or not (count and self._waits)):
            rows = next(self._stream, None)
            if rows is None:
                break
            self._waits = not rows
            if rows:
                self._ahead.append(rows)
                count += len(rows)
        return list(islice(chain.from_iterable(self._ahead), n))

    def keep_rows(self) -> None:
        """Keep the rows from stdin, from those that :meth:`peek` returned on.

        Before, the file of an earlier start stays as it is.

        Raises:
            WriteError: they cannot be kept.
        """
        if self._spool is not None:
            self._spool.release()

    @property
    def most(self) -> int | None:
        """The most rows that the limit and the sample let through; None without either."""
        bounds = [n for n in (self._config.limit, self._config.sample) if n is not None]
        return math.ceil(min(bounds) / self.shards) if bounds else None

    def progress(self) -> tuple[int, int | None]:
        """Return bytes of the input files read, and of how many; None where no one can know."""
        return self._progress.done, self._progress.total

    def close(self) -> None:
        """Stop reading: :meth:`batches` ends soon, also where it waits for a pipe."""
        self._cancel.set()

    def check_where(self) -> None:
        """Check ``where`` against the first rows, unless they come from a pipe.

        Raises:
            InputError: as :func:`open_rows`.
        """
        if self._condition is None:
            return
        first: list[dict[str, Any]] = []
        for chunk in self._chunks(
            self._sources, None, ReadProgress(None), lambda _: (), RowWarnings()
        ):
            first += [item for item in chunk.items if isinstance(item, dict)]
            if len(first) >= FIRST_ROWS:
                break
        piped = any(isinstance(source, StdinSource) for source in self._sources)
        self._condition.check(first[:FIRST_ROWS], strict=not piped)

    def _table_columns(self, optional: frozenset[str]) -> TableColumns | None:
        """Return what to read of tables; None, all columns, where a row as a whole is used."""
        config = self._config
        if not config.fields:  # a row without id is then known by its whole content
            return None
        needed = {*config.fields, *([config.id_field] if config.id_field else ())}
        optional |= {"id", "custom_id"}
        if self._condition is not None:
            needed |= self._condition.needed
            optional |= self._condition.names
        return TableColumns(frozenset(needed), optional)

    def _peeked(self) -> Iterator[list[Row]]:
        while self._ahead:
            yield self._ahead.pop(0)

    def _selected_rows(self) -> Iterator[list[Row]]:
        """Yield the rows to deliver. An empty list says that the next may be long in coming."""
        with ExitStack() as stack:
            sample = None
            if self._config.sample is not None:
                if self._spool is None and self._stdin is not None:
                    folder = stack.enter_context(TemporaryDirectory(prefix="bagent-stdin-"))
                    self._spool = StdinSpool(Path(folder) / "input.jsonl")
                sample = self._draw_sample(self._config.sample)
                self._stdin = None  # all of it is in the spool now
            batches = self._matching_rows(self._warnings, self._progress)
            if sample is not None:
                batches = map(sample.select, batches)
            if self._config.limit is not None:
                batches = limited(batches, self._config.limit)
            shard = self._config.shard
            for rows in batches:
                yield in_shard(rows, shard) if shard else rows

    def _draw_sample(self, size: int) -> RowSample:
        """Return a sample of all rows, which needs the end of stdin."""
        sample = RowSample(size, self._config.seed)
        for rows in self._matching_rows(RowWarnings(), ReadProgress(None)):
            sample.add(rows)
        return sample

    def _matching_rows(self, warnings: RowWarnings, progress: ReadProgress) -> Iterator[list[Row]]:
        """Yield all rows that ``where`` keeps, numbered."""
        keyer = RowKeyer(self._config.id_field, self._config.fields, warnings)
        condition = self._condition
        sources = self._sources
        if self._cache is not None:
            plain = list(takewhile(is_plain, sources))
            sources = sources[len(plain) :]
            yield from self._cached_rows(plain, keyer, progress)
        for chunk in self._chunks(sources, self._stdin, progress, keyer.bases, warnings):
            rows = keyer.rows(chunk)
            if condition is not None:
                if not condition.checked:
                    condition.check([r.data for r in rows if r.error is None], strict=False)
                read, rows = len(rows), condition.filter(rows, warnings)
                if progress is self._progress:
                    self.unselected += read - len(rows)
                    self._selected |= bool(rows)
            if rows or chunk is WAITING:
                yield rows

    def _cached_rows(
        self, sources: list[Source], keyer: RowKeyer, progress: ReadProgress
    ) -> Iterator[list[Row]]:
        assert self._cache is not None
        for source in sources:
            assert isinstance(source, FileSource)
            lines = PlainJsonlReader(source, keyer, self._cache, self._config.shard)
            self._jsonl_readers.append(lines)
            for rows in lines.batches(progress, self._cancel):
                if self._cancel.is_set:
                    break
                yield rows
        self._cache.stop()

    def _chunks(
        self,
        sources: list[Source],
        stdin: BinaryIO | None,
        progress: ReadProgress,
        bases: Bases,
        warnings: RowWarnings,
    ) -> Iterator[Chunk]:
        for source in sources:
            if isinstance(source, StdinSource):
                replace = self._config.replace_stdin
                self._pipe = StdinReader(self._spool, stdin, self._cancel, replace=replace)
                chunks = self._pipe.chunks(bases)
            else:
                chunks = source_chunks(
                    *(source, self._config.base, progress, self._cancel, warnings), self._columns
                )
            try:
                for chunk in chunks:
                    if self._cancel.is_set:
                        return
                    yield chunk
            except InputError:
                if not self._cancel.is_set:  # a query that was interrupted fails as well
                    raise
                return


def _check_stdin(config: RowsConfig, stdin: BinaryIO | None) -> BinaryIO | None:
    """Return what to read ``-`` from; None: only its spool."""
    if stdin is not None and not stdin.isatty():
        return stdin
    if config.stdin_spool is not None and not StdinSpool(config.stdin_spool).empty:
        return None
    raise InputError(
        "nothing is piped in" if stdin is None else "stdin is a terminal",
        hint="pipe rows in, e.g. cat rows.jsonl | bagent run JOB.yaml -i -",
    )
