"""What an endpoint can do beyond the plain form of a request: found out by trying it once.

Two things are tried. A schema for the answer beside tools that may be called: some engines then
bind every word to the schema, so that no tool is ever called, some refuse both together, some do
as one would wish. And a place in the engine's queue for conversations that come back from their
tools, while their context is still in its cache.

Sources: vLLM 0.33 (``priority``, lower is earlier; other than 0 it is refused unless the server was
started with ``--scheduling-policy priority``), SGLang 0.5 (``priority``, higher is earlier by
default), NVIDIA Dynamo 1.6 (``nvext.agent_hints.priority``, higher is earlier; where its router has
no use for it, it is ignored).
"""

from __future__ import annotations

import re

import msgspec

from bagent.backends.base import Exchange
from bagent.backends.endpoint import Endpoint
from bagent.backends.forms import Form
from bagent.backends.request import Request
from bagent.types import Failure, Reply

Hints = dict[str, str]
BY_ENGINE: Hints = {"vllm": "lower", "bagent-sim": "lower", "nvidia": "nvext"}
"""How engines, as ``/models`` names them, take a place in their queue."""

BY_TAG: Hints = {"lower": "lower", "higher": "higher", "nvext": "nvext"}
"""The values of an endpoint's tag ``priority``, for engines that do not tell; others say no."""

REFUSED = frozenset({400, 415, 422, 501})
_OF_HINTS = re.compile(r"priorit|nvext|agent_hints", re.IGNORECASE)

NO_CALL = "it kept to the schema and could call no tool; it is asked again without the schema"

Try = tuple[str, str, str | None]
"""What is tried (``schema`` or ``hints``), the endpoint, the model."""


class Abilities:
    """What is known of the endpoints of one backend. One request at a time tries a thing."""

    def __init__(self) -> None:
        self._known: dict[Try, bool | None] = {}

    def form(
        self, endpoint: Endpoint, request: Request, form: Form, engine: str | None
    ) -> tuple[Form, tuple[Try, ...]]:
        """``form`` with what the endpoint can do, or might, and what the request tries by that."""
        settings = request.settings
        if not (request.returning or settings.apart):
            return form, ()
        tries: list[Try] = []
        if settings.apart and settings.tools and request.tool_choice != "none":
            can = self._may(("schema", endpoint.name, settings.model), tries, request.tool_choice)
            form = form if can else msgspec.structs.replace(form, native_schema=False)
        tag = endpoint.tags.get("priority")
        hints = BY_ENGINE.get(engine or "", "") if tag is None else BY_TAG.get(tag, "")
        own = {"priority", "nvext"} & settings.extra.keys()
        if hints and request.returning and not own and self._may(_hints(endpoint), tries, None):
            form = msgspec.structs.replace(form, hints=hints)
        return form, tuple(tries)

    def _may(self, what: Try, tries: list[Try], forced: object) -> bool:
        """Whether to ask so: it is known to go well, or this request tries it.

        A turn that has to call a tool says nothing of one that may.
        """
        if what in self._known:
            return bool(self._known[what])
        if forced is not None:
            return False
        self._known[what] = None
        tries.append(what)
        return True

    def learn(
        self,
        endpoint: Endpoint,
        form: Form,
        tries: tuple[Try, ...],
        found: Reply | Failure,
        exchange: Exchange,
    ) -> Reply | Failure:
        """Take what came of a request in ``form``; what it comes to for the call.

        Where it is better asked once more in another form, ``exchange.learned`` is set.
        """
        refusal = found if isinstance(found, Failure) and found.status in REFUSED else None
        if refusal and form.hints and _OF_HINTS.search(refusal.message):
            self._known[_hints(endpoint)] = False
            exchange.learned = True
            return found
        for what in tries:
            if what[0] == "hints":
                if isinstance(found, Reply):
                    self._known[what] = True
            elif refusal:
                self._known[what] = False
                exchange.learned = True
            elif isinstance(found, Reply):
                self._known[what] = bool(found.tool_calls)
                if not found.tool_calls:
                    exchange.learned = True
                    return Failure("bad_response", NO_CALL, passing=True, status=200)
        return found

    def leave(self, tries: tuple[Try, ...]) -> None:
        """The request that tried these is over; what it did not find out may be tried again."""
        for what in tries:
            if self._known.get(what, False) is None:
                del self._known[what]

    def forget(self, endpoint: Endpoint) -> None:
        """The endpoint came back, maybe as another."""
        self._known = {what: can for what, can in self._known.items() if what[1] != endpoint.name}


def _hints(endpoint: Endpoint) -> Try:
    return "hints", endpoint.name, None
