"""What a run asks of a provider's batch service."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from bagent.backends.forms import Form
from bagent.backends.request import Request
from bagent.batches.record import BatchRecord, Limits, Look
from bagent.types import Failure, Reply

Answer = tuple[str, Reply | Failure]
"""The name of a request, and what came of it."""


class BatchService(Protocol):
    """One provider's batches.

    No method raises for what a server or the network does: that is a
    :class:`~bagent.types.Failure`.
    """

    name: str
    limits: Limits

    def group(self, request: Request) -> str:
        """What requests must share to be in one batch: ``ROUTE MODEL``."""
        ...

    def form(self, request: Request) -> Form:
        """The form in which a request like this one is written now."""
        ...

    def learn(self, request: Request, failure: Failure, form: Form) -> bool:
        """Whether the refusal of a request in ``form`` taught to write it better."""
        ...

    def line(self, request: Request, form: Form, name: str) -> bytes:
        """The line of the batch's file for a request.

        Raises:
            ValueError: the service has no way to say what the request holds.
        """
        ...

    def request_name(self, label: str, number: int) -> str:
        """The name of request ``number`` of a batch; :func:`number_of` reads it."""
        ...

    async def find(self, record: BatchRecord) -> str | Failure | None:
        """The id of the batch where it was made already and nobody noted it; None: it was not.

        Sets ``record.doubtful`` where only its size says that it is this one.
        """
        ...

    async def upload(self, record: BatchRecord, requests: Path) -> str | Failure:
        """Bring the file to the provider; its id there, empty where that is no step of its own."""
        ...

    async def create(self, record: BatchRecord, requests: Path) -> str | Failure:
        """Make the batch; its id."""
        ...

    async def look(self, record: BatchRecord) -> Look | Failure:
        """How the batch stands."""
        ...

    async def fetch(self, record: BatchRecord, into: Path) -> Failure | None:
        """Bring what came of it into a file, a line for each answer, whole or not at all."""
        ...

    def read(self, line: bytes, record: BatchRecord) -> Answer:
        """One line of what was fetched.

        Raises:
            ValueError: it is no such line.
        """
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


def number_of(name: str, label: str) -> int | None:
    """The number in the name of a request; None where it is of another batch.

    Names are ``LABEL-NUMBER``, or the number alone.
    """
    before, _, number = name.rpartition("-")
    if before not in ("", label) or not number.isascii() or not number.isdigit():
        return None
    return int(number)
