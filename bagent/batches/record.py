"""What is known of one batch, and what a provider tells of it: plain values."""

from __future__ import annotations

from typing import Literal

import msgspec

from bagent.backends.forms import Form

State = Literal["sealed", "sending", "waiting", "ended", "done"]
"""``sealed``: on disk, to be sent. ``sending``: about to be made, or made without a word of it
having come back. ``waiting``: with the provider. ``ended``: over there, to be read. ``done``:
every row of it is finished or stands in a later batch."""

LIVE: frozenset[str] = frozenset({"sealed", "sending", "waiting", "ended"})
OUT: frozenset[str] = frozenset({"sending", "waiting"})
"""States in which a batch may take of the account's quota."""


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a provider would not have a batch; ``line`` counts from 1, None where it is the whole."""

    message: str
    code: str = ""
    line: int | None = None


class BatchRecord(msgspec.Struct, omit_defaults=True):
    """One batch, as a line of the ledger holds it; a later line for the same number counts.

    ``label`` names it for the provider. ``group`` is what all its rows share: route and model.
    ``tokens`` are those of its prompts, estimated; ``most_usd`` and ``cost_usd`` what it may cost
    and what it did. ``word`` is the provider's own word for its state; ``ended`` and ``failed``
    are rows there. ``doubtful``: found by its size, not by its name; ``not_ours`` were found so and
    belong to somebody else. ``faults`` say why it was refused as a whole. Times are Unix seconds.
    """

    number: int
    label: str
    part: str
    group: str
    rows: int
    bytes: int
    tokens: int
    form: Form
    state: State = "sealed"
    file_id: str | None = None
    batch_id: str | None = None
    sent_at: float | None = None
    looked_at: float | None = None
    ended_at: float | None = None
    word: str = ""
    ended: int = 0
    failed: int = 0
    outputs: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    doubtful: bool = False
    not_ours: tuple[str, ...] = ()
    most_usd: float | None = None
    cost_usd: float | None = None

    @property
    def route(self) -> str:
        """The route of all its requests, such as ``/v1/chat/completions``."""
        return self.group.partition(" ")[0]

    @property
    def model(self) -> str:
        """The model of all its requests; empty where requests name none."""
        return self.group.partition(" ")[2]


class Look(msgspec.Struct, frozen=True):
    """A batch as its provider tells of it.

    ``over`` says that nothing more will come; ``outputs`` then name what is to be read, and
    ``faults`` say why it was refused as a whole.
    """

    word: str
    over: bool = False
    ended: int = 0
    failed: int = 0
    outputs: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    ended_at: float | None = None


class Limits(msgspec.Struct, frozen=True):
    """What one batch may hold: rows, and bytes of its file. Fewer rows than ``least`` make none."""

    rows: int
    bytes: int
    least: int = 1
