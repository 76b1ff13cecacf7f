"""Short tracebacks of errors that the caller caused."""

from __future__ import annotations

from contextlib import ContextDecorator

from bagent.errors import BagentError


class ShortTraceback(ContextDecorator):
    """Leaves the frames of this package out of the traceback of a :class:`BagentError`.

    The message says what is wrong; in a notebook the frames would fill the screen above it. Other
    exceptions keep theirs.

    Args:
        debug: change nothing.
    """

    def __init__(self, *, debug: bool = False) -> None:
        self._debug = debug

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Shorten the traceback of an error that ends the block."""
        if isinstance(error, BagentError) and not self._debug:
            error.__traceback__ = error.__cause__ = None
            error.__suppress_context__ = True
