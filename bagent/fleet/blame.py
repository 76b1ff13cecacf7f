"""Whose fault a failure is: the row's, the server's, the account's, or only a lack of room."""

from __future__ import annotations

import re
from enum import Enum

from bagent.types import Failure

ROW_STATUS = frozenset({400, 413, 422})
"""HTTP answers to a request that speak of the request, not of the server."""

_SERVER_WORDS = re.compile(
    r"\bmodels?\b[^.\n]{0,160}?\b(not (be )?found|(does|do) not exist|not exist|unknown|no longer"
    r"|not (currently )?(available|served|loaded|supported|deployed)|isn't (available|served)"
    r"|is (invalid|unavailable)|has been (deprecated|removed|shut ?down|retired))\b"
    r"|\b(no such|unknown|invalid|unsupported|unrecognized|could not find( the)?) model\b"
    r"|\bmodel_?not_?found|\bapi[ _-]?key\b[^.\n]{0,40}\b(not valid|invalid|expired|missing)\b"
    r"|\b(invalid|incorrect|expired|missing|no) api[ _-]?key\b",
    re.IGNORECASE,
)
"""Words by which a refused request (400, 422) speaks of the model or the key after all. The message
may repeat the row's own text, so a request of our own decides in the end."""


class Blame(Enum):
    """Whom a failure speaks of.

    ``ROW``: the request itself, wherever it is sent. ``SERVER``: the endpoint, which is down, sick,
    without the model, or refuses the key. ``ACCOUNT``: money or quota is spent. ``BUSY``: there is
    no room now.
    """

    ROW = "row"
    SERVER = "server"
    ACCOUNT = "account"
    BUSY = "busy"


def blame_of(failure: Failure) -> Blame:
    """Return whom ``failure`` speaks of, by its kind, its status and its words."""
    if failure.kind == "budget":
        # Without a status it is the budget of the run itself.
        return Blame.ROW if failure.status is None else Blame.ACCOUNT
    if failure.busy or failure.kind == "rate_limited":
        return Blame.BUSY
    if failure.passing or failure.kind in ("auth", "connect"):
        return Blame.SERVER
    if failure.kind != "rejected":
        return Blame.ROW
    if failure.status in ROW_STATUS:
        return Blame.SERVER if _SERVER_WORDS.search(failure.message) else Blame.ROW
    return Blame.SERVER
