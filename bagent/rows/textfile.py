"""One text file as one row with the fields ``path`` and ``text``."""

from __future__ import annotations

from bagent.errors import InputError
from bagent.rows.inputs import FileSource
from bagent.rows.lines import LONGEST, too_long
from bagent.rows.streams import ByteStream, check_start
from bagent.rows.values import Chunk, Item, Unreadable


def text_chunk(source: FileSource) -> Chunk:
    """The file as a chunk of one row; not UTF-8: a row that cannot be read.

    Raises:
        InputError: the file cannot be read, or is larger than a row may be.
    """
    stream = ByteStream(source.path, source.packing)
    try:
        raw = bytearray()
        for block in stream.blocks():
            raw += block
            if len(raw) > LONGEST:
                raise too_long(source.path, 1)
    finally:
        stream.close()
    return Chunk(source.name, [1], [_item(source, bytes(raw))])


def _item(source: FileSource, raw: bytes) -> Item:
    try:
        check_start(raw[:8], source.name)
        text = raw.decode().removeprefix("\ufeff")
    except InputError as error:
        return Unreadable(error.message, raw)
    except UnicodeDecodeError as error:
        return Unreadable(f"not UTF-8: byte 0x{raw[error.start]:02x} at {error.start + 1}", raw)
    return {"path": source.name, "text": text}
