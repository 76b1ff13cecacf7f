"""Notes of the input for processes that share its rows: one reads all of it, the others their own.

Without them each of n processes decodes n times the rows it does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from bagent.errors import BagentError
from bagent.rows import RowSource, open_rows
from bagent.runs.prepare import Prepared

FEWEST = 3
"""Parts from which it pays: two read both halves for what the one reading here costs."""


@contextmanager
def noting(prepared: Prepared, parts: int) -> Iterator[str | None]:
    """Note the input beside the block; gives the file for :attr:`RunOptions.notes`, None if there
    is nothing to note or nowhere to.

    Args:
        prepared: the job; its run directory exists.
        parts: how many processes share its rows.

    Raises:
        InputError: as :func:`bagent.rows.open_rows`.
    """
    if parts < FEWEST:
        yield None
        return
    rows = open_rows(replace(prepared.rows_config, shard=None))
    path = prepared.run_dir / "journal" / f"input-{prepared.part}-shared.pieces"
    rows.remember(path, lambda _: True)
    if not rows.notable:
        rows.close()
        yield None
        return
    thread = threading.Thread(target=_note, args=(rows,), name="input", daemon=True)
    thread.start()
    try:
        yield str(path)
    finally:
        rows.close()
        thread.join()


def _note(rows: RowSource) -> None:
    # Who reads the rows to send them tells what is wrong with the input.
    with contextlib.suppress(BagentError, OSError):
        rows.note_all()
