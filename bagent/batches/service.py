"""Interface of a provider's batch service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bagent.backend_kinds import TRAITS
from bagent.backends.endpoint import Endpoint
from bagent.backends.failures import shorten
from bagent.backends.keys import KeySource
from bagent.backends.profile import EndpointForms, EndpointProfiles, Form
from bagent.backends.request import Request
from bagent.batches.http import BatchHttpClient
from bagent.batches.record import BatchRecord, BatchStatus, ServiceLimits
from bagent.errors import JobError
from bagent.text.json import encode_json
from bagent.types import Failure, Json, Reply

if TYPE_CHECKING:
    from bagent.job.spec.job import Job

Answer = tuple[str, Reply | Failure]
"""The name of a request, and its result."""


class BatchService(Protocol):
    """A provider's batch API.

    Methods do not raise for errors of the server or the network: they return a
    :class:`~bagent.types.Failure`.
    """

    name: str
    limits: ServiceLimits

    def group(self, request: Request) -> str:
        """Return what the requests of a batch must share: ``ROUTE MODEL``."""
        ...

    def form(self, request: Request) -> Form:
        """Return the current form of a request."""
        ...

    def learn(self, request: Request, failure: Failure, form: Form) -> bool:
        """Adapt the form to a refused request; return whether a retry may succeed."""
        ...

    def line(self, request: Request, form: Form, name: str) -> bytes:
        """Return the line of the batch's file for a request.

        Raises:
            ValueError: the service has no way to say what the request holds.
        """
        ...

    def request_name(self, label: str, number: int) -> str:
        """Return the name of request ``number``; :func:`request_number` parses it."""
        ...

    async def find(self, record: BatchRecord) -> str | Failure | None:
        """Return the id of a batch that was created without being recorded, None if it was not.

        Sets ``record.unconfirmed`` if only the size identifies it.
        """
        ...

    async def upload(self, record: BatchRecord, requests: Path) -> str | Failure:
        """Upload the file; return its id, empty if the service has no upload."""
        ...

    async def create(self, record: BatchRecord, requests: Path) -> str | Failure:
        """Create the batch; return its id."""
        ...

    async def poll(self, record: BatchRecord) -> BatchStatus | Failure:
        """Return the status of the batch."""
        ...

    async def cancel(self, record: BatchRecord) -> Failure | None:
        """Let the provider stop the batch; what it has answered can be read once it has ended."""
        ...

    async def fetch(self, record: BatchRecord, into: Path) -> Failure | None:
        """Download the results into a file, a line for each answer, completely or not at all."""
        ...

    def read(self, line: bytes, record: BatchRecord) -> Answer:
        """Parse one line of the results.

        Raises:
            ValueError: it is no such line.
        """
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


def request_number(name: str, label: str) -> int | None:
    """Return the number in a request's name; None if it belongs to another batch.

    Names are ``LABEL-NUMBER``, or the number alone.
    """
    before, _, number = name.rpartition("-")
    if before not in ("", label) or not number.isascii() or not number.isdigit():
        return None
    return int(number)


class LearnedForms:
    """Base of batch services: learned request forms.

    Args:
        limits: what one batch may hold.
        enforce: whether the schema is asked for by the API; see the backend of single calls.
        notice: gets a line for people when something is learned.
    """

    def __init__(
        self, endpoint: Endpoint, limits: ServiceLimits, enforce: str, notice: Callable[[str], None]
    ) -> None:
        self.name = endpoint.name
        self.limits = limits
        self._endpoint = endpoint
        self._forms = EndpointForms(EndpointProfiles(), enforce, notice)

    def form(self, request: Request) -> Form:
        """Return the learned form."""
        return self._forms.of(self._endpoint, request)

    def learn(self, request: Request, failure: Failure, form: Form) -> bool:
        """Learn from a refusal as for single calls."""
        return self._forms.learn(self._endpoint, request, failure, form)

    def request_name(self, label: str, number: int) -> str:
        """Return ``LABEL-NUMBER``."""
        return f"{label}-{number}"


class HttpBatches(LearnedForms):
    """Base of batch services with an HTTP API."""

    def __init__(
        self,
        endpoint: Endpoint,
        keys: KeySource | None,
        limits: ServiceLimits,
        enforce: str,
        notice: Callable[[str], None],
    ) -> None:
        super().__init__(endpoint, limits, enforce, notice)
        self._web = BatchHttpClient(endpoint, keys)

    async def close(self) -> None:
        """Close all connections."""
        await self._web.close()


def created_id(created: Json | Failure, what: str) -> str | Failure:
    """Return the id in the response to a creation, or the failure."""
    if isinstance(created, Failure):
        return created
    object_id = created.get("id") if isinstance(created, dict) else None
    if isinstance(object_id, str) and object_id:
        return object_id
    excerpt = shorten(encode_json(created), 200)
    return Failure("bad_response", f"no id of {what} in the answer: {excerpt}", True, 200)


def not_a_batch(body: Json) -> Failure:
    """Return the failure of a response that is no batch object."""
    return Failure("bad_response", f"no batch: {shorten(encode_json(body), 200)}", True, 200)


def check_batches(job: Job, *, staged: bool) -> None:
    """Refuse jobs that a provider's batch service does not support.

    Args:
        staged: the job has several stages.

    Raises:
        JobError: with what to change in the job.
    """
    kind = job.backend.kind if job.backend is not None else None
    message = hint = ""
    key: tuple[str, ...] = ("batching",)
    if job.hostfile is not None or kind is None or not TRAITS[kind].batch_service:
        message = (
            "only openai, anthropic and bedrock, and servers like theirs, have a batch service"
        )
        hint = "leave batching.mode out"
    elif job.agent is not None:
        message, key = "turns with tools cannot wait for a batch each", ("agent",)
        hint = "leave agent out, or leave batching.mode out"
    elif staged:
        message = "the rows of several stages cannot wait for one another's batches"
        hint = "make each stage a job of its own, or leave batching.mode out"
    elif job.batching.service_tier is not None and job.batching.mode == "provider":
        message = "a batch has a tier of its own, so service_tier says nothing"
        hint = "leave out one of the two"
    elif kind == "bedrock" and (job.batching.s3_uri is None or job.batching.role_arn is None):
        message = "Bedrock's batches are files in S3, which it reads and writes by a role"
        hint = "write batching: {mode: provider, s3_uri: s3://BUCKET/FOLDER, role_arn: arn:...}"
    if message:
        raise JobError(
            f"batching mode {job.batching.mode}: {message}", hint=hint, at=job.source.position(key)
        )
