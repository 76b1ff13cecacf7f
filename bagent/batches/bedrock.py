"""Amazon Bedrock's batch inference: files in S3, jobs created through boto3.

Source: the ``bedrock`` service model of botocore 1.44 (``CreateModelInvocationJob`` with the
invocation type ``Converse``) and AWS's documentation of batch inference. The input is JSONL with
``recordId`` and ``modelInput``. The output address holds a ``.out`` file for each input, with
``modelOutput`` or ``error`` in every line. A job has at least 100 records. Its token keeps the same
job from being created twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bagent.backends.bedrock.backend import (
    BedrockConfig,
    WorkerThreads,
    failure_from_exception,
    make_client,
    require_model,
)
from bagent.backends.bedrock.wire import IGNORED_SAMPLING, converse_arguments, read_answer
from bagent.backends.endpoint import Endpoint
from bagent.backends.failures import failure_from_status, shorten
from bagent.backends.openai.raw_request import ChatRequests
from bagent.backends.prefix_cache import Marks, SharedPrefix
from bagent.backends.profile import Form
from bagent.backends.request import Request, encode_payload
from bagent.batches.record import BatchError, BatchRecord, BatchStatus, ServiceLimits
from bagent.batches.service import Answer, LearnedForms
from bagent.store.journal.segments import write_error
from bagent.text.json import decode_json, encode_json
from bagent.types import Failure, Json, Reply

LIMITS = ServiceLimits(rows=50_000, bytes=1_000_000_000, least=100)
HOURS = 24
OVER = frozenset({"Completed", "PartiallyCompleted", "Stopped", "Expired", "Failed"})
PIECE = 1 << 20
_STATUS = {"ThrottlingException": 429, "ValidationException": 400, "AccessDeniedException": 403}

_T = TypeVar("_T")


class S3Location(msgspec.Struct, frozen=True):
    """A folder for files, ``s3://BUCKET/FOLDER``, and the role by which Bedrock accesses it."""

    s3_uri: str
    role_arn: str

    @property
    def bucket(self) -> str:
        """The bucket's name."""
        return self.s3_uri.removeprefix("s3://").partition("/")[0]

    def key(self, name: str) -> str:
        """Return the key of an object in the folder."""
        folder = self.s3_uri.removeprefix("s3://").partition("/")[2].strip("/")
        return f"{folder}/{name}" if folder else name

    def address(self, name: str) -> str:
        """Return the address of an object in the folder."""
        return f"s3://{self.bucket}/{self.key(name)}"


class _NoMarks(SharedPrefix):
    """Places no cache marks: batch inference has no prompt caching."""

    def look(self, fixed: int, system: str, user: str) -> Marks:
        """No marks."""
        return Marks()


class BedrockBatches(LearnedForms):
    """See :class:`bagent.batches.service.BatchService`.

    Args:
        config: how AWS is reached; its ``endpoint_url`` is that of single calls and not used.
        enforce: whether the schema is asked for by the API; see the Bedrock backend.
        notice: gets a line for people when something is learned or left out.
        session: boto3's, where there is one already.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        config: BedrockConfig,
        location: S3Location,
        *,
        enforce: str,
        notice: Callable[[str], None],
        session: Any = None,
    ) -> None:
        super().__init__(endpoint, LIMITS, enforce, notice)
        self._config = config
        self._place = location
        self._chats = ChatRequests("Bedrock's Converse", IGNORED_SAMPLING, notice)
        self._session = session
        self._threads = WorkerThreads(1, "batches")
        self._clients: dict[str, Any] = {}

    # --- requests ---------------------------------------------------------------------------------

    def group(self, request: Request) -> str:
        """Return the model: a job has one."""
        return f"converse {request.settings.model or (request.body or {}).get('model') or ''}"

    def line(self, request: Request, form: Form, name: str) -> bytes:
        """Return ``{"recordId", "modelInput"}``, the input as for Converse."""
        chat = self._chats.unpack(request)
        arguments = converse_arguments(chat, require_model(chat), form, _NoMarks())
        del arguments["modelId"]
        return b'{"recordId":"%s","modelInput":' % name.encode() + encode_payload(arguments) + b"}"

    def request_name(self, label: str, number: int) -> str:
        """Return the number in 11 digits, the length of record ids."""
        return f"{number:011d}"

    # --- jobs -------------------------------------------------------------------------------------

    async def find(self, record: BatchRecord) -> str | Failure | None:
        """Search for a job of this name."""
        listed = await self._ask(
            "bedrock", "list_model_invocation_jobs", {"nameContains": record.label}
        )
        if isinstance(listed, Failure):
            return listed
        for job in listed.get("invocationJobSummaries") or []:
            if job.get("jobName") == record.label:
                return str(job["jobArn"])
        return None

    async def upload(self, record: BatchRecord, requests: Path) -> str | Failure:
        """Upload the file to the folder; a repeated upload replaces it."""
        key = self._place.key(f"{record.label}.jsonl")

        def put(client: Any) -> str:
            with requests.open("rb") as body:
                client.put_object(Bucket=self._place.bucket, Key=key, Body=body)
            return key

        return await self._run("s3", put)

    async def create(self, record: BatchRecord, requests: Path) -> str | Failure:
        """Call ``CreateModelInvocationJob`` with the label as its token."""
        location = self._place
        source = {"s3Uri": location.address(f"{record.label}.jsonl"), "s3InputFormat": "JSONL"}
        created = await self._ask(
            "bedrock",
            "create_model_invocation_job",
            {
                "jobName": record.label,
                "clientRequestToken": record.label,
                "roleArn": location.role_arn,
                "modelId": record.model,
                "modelInvocationType": "Converse",
                "inputDataConfig": {"s3InputDataConfig": source},
                "outputDataConfig": {
                    "s3OutputDataConfig": {"s3Uri": location.address(record.label) + "/"}
                },
                "timeoutDurationInHours": HOURS,
            },
        )
        return created if isinstance(created, Failure) else str(created["jobArn"])

    async def poll(self, record: BatchRecord) -> BatchStatus | Failure:
        """Call ``GetModelInvocationJob``; list the outputs of a job that has ended."""
        job = await self._ask(
            "bedrock", "get_model_invocation_job", {"jobIdentifier": record.batch_id}
        )
        if isinstance(job, Failure):
            return job
        status = read_job(job)
        if not status.over or status.faults:
            return status
        folder = self._place.key(f"{record.label}/")
        listed = await self._ask(
            "s3", "list_objects_v2", {"Bucket": self._place.bucket, "Prefix": folder}
        )
        if isinstance(listed, Failure):
            return listed
        keys = [str(entry["Key"]) for entry in listed.get("Contents") or []]
        outputs = tuple(key for key in keys if key.endswith(".jsonl.out"))
        return msgspec.structs.replace(status, outputs=outputs)

    async def cancel(self, record: BatchRecord) -> Failure | None:
        """Cancel the batch."""
        result = await self._ask(
            "bedrock", "stop_model_invocation_job", {"jobIdentifier": record.batch_id}
        )
        return result if isinstance(result, Failure) else None

    async def fetch(self, record: BatchRecord, into: Path) -> Failure | None:
        """Download the output files into one."""
        partial_file = into.with_name(f"{into.name}.part")

        def get(client: Any) -> None:
            with partial_file.open("wb") as out:
                for key in record.outputs:
                    answer = client.get_object(Bucket=self._place.bucket, Key=key)
                    for piece in answer["Body"].iter_chunks(PIECE):
                        out.write(piece)
                    out.write(b"\n")
                out.flush()
                os.fsync(out.fileno())
            partial_file.replace(into)

        result = await self._run("s3", get)
        return result if isinstance(result, Failure) else None

    def read(self, line: bytes, record: BatchRecord) -> Answer:
        """Parse one line of an output file."""
        return read_line(line, record.model)

    async def close(self) -> None:
        """Close all connections."""
        self._threads.close()
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    # --- in threads -------------------------------------------------------------------------------

    async def _ask(self, service: str, method: str, arguments: Mapping[str, Any]) -> Any | Failure:
        return await self._run(service, lambda client: getattr(client, method)(**arguments))

    async def _run(self, service: str, work: Callable[[Any], _T]) -> _T | Failure:
        try:
            return await self._threads.run(partial(self._with_client, service, work))
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            return self._failed(error, service)

    def _with_client(self, service: str, work: Callable[[Any], _T]) -> _T | Failure:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return work(self._client(service))
        except (BotoCoreError, ClientError) as error:
            return self._failed(error, service)

    def _failed(self, error: BaseException, service: str) -> Failure:
        if isinstance(error, OSError) and error.filename:
            raise write_error(Path(str(error.filename)), error)
        failure = failure_from_exception(error, f"AWS {service}")
        if failure is None:
            raise error
        message = self._endpoint.without_secrets(failure.message)
        return msgspec.structs.replace(failure, message=message)

    def _client(self, service: str) -> Any:
        client = self._clients.get(service)
        if client is None:
            import boto3

            if self._session is None:
                self._session = boto3.session.Session(profile_name=self._config.profile)
            client = self._clients[service] = make_client(
                self._config,
                self._session,
                service,
                None,
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            )
        return client


def read_job(job: Mapping[str, Any]) -> BatchStatus:
    """Convert a job to its status."""
    status = str(job.get("status") or "")
    ended_at = job.get("endTime")
    message = str(job.get("message") or "the job failed, and no reason was told")
    return BatchStatus(
        word=status,
        over=status in OVER,
        ended=int(job.get("processedRecordCount") or 0),
        failed=int(job.get("errorRecordCount") or 0),
        faults=(BatchError(message),) if status == "Failed" else (),
        ended_at=ended_at.timestamp() if ended_at is not None else None,
    )


def read_line(line: bytes, model: str) -> Answer:
    """Parse one answer."""
    value = decode_json(line)
    if not isinstance(value, dict) or not isinstance(value.get("recordId"), str):
        raise ValueError("no recordId")
    return value["recordId"], _result(value, model)


def _result(value: dict[str, Any], model: str) -> Reply | Failure:
    output, error = value.get("modelOutput"), value.get("error")
    if error:
        return _error(error)
    if isinstance(output, dict) and isinstance(output.get("output"), dict):
        return read_answer(output, model)
    excerpt = shorten(encode_json(output), 200)
    return Failure("bad_response", f"neither an answer nor an error: {excerpt}", True, 200)


def _error(error: Json) -> Failure:
    code = error.get("errorCode") if isinstance(error, dict) else None
    message = str(error.get("errorMessage") or code) if isinstance(error, dict) else str(error)
    status = _STATUS.get(str(code), 500)
    with suppress(ValueError):
        status = int(str(code))
    if "expired" in message.lower() or "stopped" in message.lower():
        return Failure("timeout", f"the batch ended before this row: {shorten(message)}", True)
    return failure_from_status(status, encode_json({"error": {"message": message}}), {})
