"""Uncompressed JSON Lines files, read in pieces that a resume can skip."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import pack
from typing import BinaryIO

from bagent.errors import InputError, Position
from bagent.rows.discovery import FileSource, Source
from bagent.rows.filter import shard_positions
from bagent.rows.formats.chunks import CancelToken, ReadProgress
from bagent.rows.formats.compression import BLOCK, unreadable, without_mark
from bagent.rows.formats.json import LONGEST, ROWS, Chunk, Item, chunk_of, decode_lines, too_long
from bagent.rows.resume_cache import InputPiece, ResumeCache, digest_of
from bagent.rows.row_keys import RowKeyer
from bagent.types import Row


def is_plain(source: Source) -> bool:
    """Return whether this is a JSON Lines file that is not packed."""
    return isinstance(source, FileSource) and source.format == "jsonl" and not source.packing


class PlainJsonlReader:
    """Reads one plain JSON Lines file.

    Args:
        source: the file; :func:`is_plain` holds for it.
        keyer: numbers the rows, skipped ones included.
        cache: what is known of the file from an earlier start.
        shard: rows of other parts need not be finished to be passed over.

    ``passed`` counts the rows (of the shard) that were passed over.
    """

    def __init__(
        self,
        source: FileSource,
        keyer: RowKeyer,
        cache: ResumeCache,
        shard: tuple[int, int] | None,
    ) -> None:
        self._source = source
        self._keyer = keyer
        self._cache = cache
        self._shard = shard
        self._line = 1
        self._offset = 0
        self.passed = 0

    def batches(self, progress: ReadProgress, cancel: CancelToken) -> Iterator[list[Row]]:
        """Yield the rows that are not passed over, and an empty list for each piece that is.

        Raises:
            InputError: the file cannot be read.
        """
        try:
            with self._source.path.open("rb") as file:
                while not cancel.is_set:
                    data, noted = self._piece(file)
                    if not data:
                        break
                    offset = self._offset
                    own = None if noted is None else self._skip(data, noted)
                    if own is None:
                        yield from self._read(data, progress, cancel)
                    else:
                        for start in range(0, max(1, len(own)), ROWS):
                            fraction = min(1.0, (start + ROWS) / max(1, len(own)))
                            progress.at(offset + round(len(data) * fraction))
                            yield own[start : start + ROWS]
        except OSError as error:
            raise unreadable(self._source.path, error) from error
        progress.finish(self._source.size)

    def _piece(self, file: BinaryIO) -> tuple[bytes, InputPiece | None]:
        """Return the next piece: as it was noted, else whole lines of about one block."""
        noted = self._cache.at(self._source.name, self._offset)
        if noted is not None:
            data = file.read(noted.size)
            if noted.is_of(data):
                return data, noted
            file.seek(self._offset)
        parts: list[bytes] = []
        size = 0
        while block := file.read(BLOCK):
            end = block.rfind(b"\n") + 1
            if end:
                parts.append(block[:end])
                file.seek(end - len(block), 1)
                break
            parts.append(block)
            size += len(block)
            if size > LONGEST:
                raise too_long(self._source.path, self._line)
        return b"".join(parts), None

    def _skip(self, data: bytes, piece: InputPiece) -> list[Row] | None:
        """Skip a recorded piece; return those rows of the shard in it that are not finished.

        None: the piece has to be read, also since an id in it may have come before.
        """
        keys = piece.key_list()
        positions = shard_positions(keys, self._shard)
        shard_keys = keys if self._shard is None else [keys[at] for at in positions]
        finished = self._cache.is_finished(shard_keys)
        own = [] if finished else self._own(data, len(keys), positions, shard_keys)
        if own is None or not self._keyer.skip(
            piece, _PieceReader(self._source, piece, self._line)
        ):
            return None
        self._cache.note(piece)
        if finished:
            self.passed += len(shard_keys)
        self._advance(len(data), piece.lines)
        return own

    def _own(
        self, data: bytes, rows: int, positions: Sequence[int], keys: Sequence[int]
    ) -> list[Row] | None:
        """Return the rows at some places among all ``rows`` of a piece; no others are decoded."""
        raws = _split(self._source, data, self._offset)
        lines: Sequence[int] = range(len(raws))
        if len(raws) != rows:
            lines = [at for at, raw in enumerate(raws) if raw and not raw.isspace()]
            if len(lines) != rows:
                return None
        own = [raws[lines[at]] for at in positions]
        items: list[Item] = [item for item in decode_lines(own) if item is not None]
        if len(items) != len(own):
            return None
        numbers = [self._line + lines[at] for at in positions]
        return self._keyer.rows_at(Chunk(self._source.name, numbers, items, own), positions, keys)

    def _read(
        self, data: bytes, progress: ReadProgress, cancel: CancelToken
    ) -> Iterator[list[Row]]:
        line, offset, mark = self._line, self._offset, self._keyer.mark
        feeds = data.count(b"\n")
        self._advance(len(data), feeds)
        keys: list[int] = []
        ids: list[object] = []
        last = line
        for chunk in _chunks(self._source, data, line, offset):
            if cancel.is_set:
                return
            rows = self._keyer.rows(chunk)
            if rows:
                fraction = min(1.0, (rows[-1].line + 1 - line) / max(1, feeds))
                progress.at(offset + round(len(data) * fraction))
                keys += [row.key for row in rows]
                ids += [rows[0].id, rows[-1].id]
                last = rows[-1].line
                yield rows
        if not self._keyer.ascends:
            self._cache.stop()
        if not self._cache.noting or not keys or not data.endswith(b"\n"):
            return
        first, final = ids[0], ids[-1]
        assert isinstance(first, int | str) and isinstance(final, int | str)
        piece = InputPiece(
            self._source.name, offset, len(data), digest_of(data),
            feeds, last, first, final, pack(f">{len(keys)}Q", *keys),
        )  # fmt: skip
        self._cache.note(piece)
        self._keyer.replace_since(mark, _PieceReader(self._source, piece, line))

    def _advance(self, size: int, lines: int) -> None:
        self._offset += size
        self._line += lines


class _PieceReader:
    """Reads the rows of a piece once more."""

    __slots__ = ("_digest", "_line", "_offset", "_size", "_source")

    def __init__(self, source: FileSource, piece: InputPiece, line: int) -> None:
        self._source = source
        self._offset, self._size, self._digest = piece.offset, piece.size, piece.digest
        self._line = line

    def __call__(self) -> Iterator[Chunk]:
        """Yield the chunks of the piece.

        Raises:
            InputError: the file has changed meanwhile.
        """
        path = self._source.path
        try:
            with path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(self._size)
        except OSError as error:
            raise unreadable(path, error) from error
        if digest_of(data) != self._digest:
            raise InputError(
                "the file was changed while it was read",
                hint="give the same command again",
                at=Position(path, self._line),
            )
        yield from _chunks(self._source, data, self._line, self._offset)


def _chunks(source: FileSource, data: bytes, line: int, offset: int) -> Iterator[Chunk]:
    raws = _split(source, data, offset)
    for start in range(0, len(raws), ROWS):
        yield chunk_of(source.name, raws[start : start + ROWS], line + start)


def _split(source: FileSource, data: bytes, offset: int) -> list[bytes]:
    """Return the lines of a piece."""
    raws = (data if offset else without_mark(data, source.path)).split(b"\n")
    if not raws[-1]:
        raws.pop()
    return raws
