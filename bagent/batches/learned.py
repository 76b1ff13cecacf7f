"""In which form a provider's batch service is asked, as its refusals taught."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from bagent.backends.endpoint import Endpoint
from bagent.backends.forms import Form, Forms
from bagent.backends.request import Request
from bagent.batches.record import Limits
from bagent.types import Failure


class LearnedForms:
    """The part of a :class:`bagent.batches.service.BatchService` that all services share.

    Args:
        limits: what one batch may hold.
        enforce: whether the schema is asked for by the API; see the backend of single calls.
        notice: gets a line for people when something is learned.
    """

    def __init__(
        self, endpoint: Endpoint, limits: Limits, enforce: str, notice: Callable[[str], None]
    ) -> None:
        self.name = endpoint.name
        self.limits = limits
        self._endpoint = endpoint
        self._forms = Forms(enforce, notice)
        self._enforce = enforce

    def form(self, request: Request) -> Form:
        """As learned."""
        form = self._forms.of(self._endpoint, request)
        if self._enforce == "prompt":
            form = msgspec.structs.replace(form, native_schema=False)
        return form

    def learn(self, request: Request, failure: Failure, form: Form) -> bool:
        """As refusals of single calls teach."""
        return self._forms.learn(self._endpoint, request, failure, form)
