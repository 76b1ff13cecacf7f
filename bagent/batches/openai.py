"""OpenAI's Batch API through its SDK, and servers that implement it.

Source: OpenAI's API reference for files and batches, 2026. A JSONL file is uploaded with purpose
``batch``, and a batch created from it with a completion window of 24 hours. Answers come in two
files, in any order: successes and errors. An HTTP error is in ``response.body`` with ``error``
null; a request that was never made has ``response`` null. vLLM's batch runner writes an error
beside the status. All of these are read.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from bagent.backends.endpoint import Endpoint
from bagent.backends.failures import failure_from_body, failure_from_status, shorten
from bagent.backends.http.client import BadCertificateFile, proxy_note, trusting_context
from bagent.backends.keys import KeySource
from bagent.backends.openai.chat import BodyWriter
from bagent.backends.openai.raw_request import CHAT, read_by_route
from bagent.backends.openai.responses import PATH as RESPONSES
from bagent.backends.openai.responses import ResponsesWriter, goes_to_responses
from bagent.backends.profile import Form
from bagent.backends.request import Request
from bagent.batches.http import CONNECT_SECONDS, PIECE, QUIET_SECONDS, append_pieces, fetch_all
from bagent.batches.record import BatchError, BatchRecord, BatchStatus, ServiceLimits
from bagent.batches.service import Answer, LearnedForms, created_id, not_a_batch
from bagent.text.json import decode_json, encode_json
from bagent.types import Failure, Json

if TYPE_CHECKING:
    import httpx2
    from openai import AsyncOpenAI


T = TypeVar("T")

LIMITS = ServiceLimits(rows=50_000, bytes=200_000_000)
WINDOW = "24h"
OVER = frozenset({"completed", "expired", "cancelled", "failed"})
LIST_SIZE = 100
CLOCK_SKEW = 600.0
"""Seconds by which the provider's clock may be behind."""

_NEW_LIMIT = re.compile(r"(^|/)(o\d|gpt-[5-9])")
"""Models that accept only ``max_completion_tokens``."""


class OpenAIClient:
    """Sends requests to one endpoint without retries; renews the key after a 401.

    Responses are read as JSON, since servers like OpenAI's fill its objects in their own ways.

    Args:
        endpoint: its headers hold the key; they are sent to no other address.
        keys: where newer keys come from, None where the key does not change.
    """

    def __init__(self, endpoint: Endpoint, keys: KeySource | None = None) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._client: AsyncOpenAI | None = None

    async def upload(self, file: Path) -> Json | Failure:
        """Upload a file for a batch, and return its object."""

        async def send(client: AsyncOpenAI) -> Json:
            with file.open("rb") as stream:
                content = (f"{file.stem}.jsonl", stream, "application/jsonl")
                response = await client.files.with_raw_response.create(
                    file=content, purpose="batch"
                )
                return decode_json(response.content)

        return await self._send(send)

    async def create(self, body: dict[str, Any]) -> Json | Failure:
        """Create a batch with these fields, and return its object."""

        async def send(client: AsyncOpenAI) -> Json:
            response = await client.batches.with_raw_response.create(**body)
            return decode_json(response.content)

        return await self._send(send)

    async def retrieve(self, batch_id: str) -> Json | Failure:
        """Return the object of a batch."""

        async def send(client: AsyncOpenAI) -> Json:
            response = await client.batches.with_raw_response.retrieve(batch_id)
            return decode_json(response.content)

        return await self._send(send)

    async def cancel(self, batch_id: str) -> Json | Failure:
        """Cancel a batch, and return its object."""

        async def send(client: AsyncOpenAI) -> Json:
            response = await client.batches.with_raw_response.cancel(batch_id)
            return decode_json(response.content)

        return await self._send(send)

    async def list(self, limit: int, after: str | None) -> Json | Failure:
        """Return a page of batches, the newest first."""

        async def send(client: AsyncOpenAI) -> Json:
            page = {"limit": limit} if after is None else {"limit": limit, "after": after}
            response = await client.batches.with_raw_response.list(**page)
            return decode_json(response.content)

        return await self._send(send)

    async def fetch(self, path: str, into: Path) -> Failure | None:
        """Append the content of the file with this id to ``into``, ending it with a line break.

        Raises:
            WriteError: the disk refuses.
        """

        async def save(client: AsyncOpenAI) -> None:
            async with client.files.with_streaming_response.content(path) as response:
                await append_pieces(into, response.iter_bytes(PIECE))

        return await self._send(save)

    async def _send(self, send: Callable[[AsyncOpenAI], Awaitable[T]]) -> T | Failure:
        used = self._keys.key if self._keys is not None else ""
        result = await self._send_once(send)
        if not isinstance(result, Failure) or result.status != 401 or self._keys is None:
            return result
        if not await self._keys.renew(used):
            return result
        await self.close()
        return await self._send_once(send)

    async def _send_once(self, send: Callable[[AsyncOpenAI], Awaitable[T]]) -> T | Failure:
        import httpx2
        import openai

        endpoint = self._endpoint if self._keys is None else self._keys.apply(self._endpoint)
        where = endpoint.name + proxy_note(endpoint)
        try:
            return await send(self._open(endpoint))
        except BadCertificateFile as error:
            failure = Failure("connect", f"cannot reach {where}: {error}")
        except openai.APIStatusError as error:
            response = error.response
            failure = failure_from_status(error.status_code, response.text, response.headers)
        except openai.APITimeoutError as error:
            if isinstance(error.__cause__, httpx2.ConnectTimeout):
                failure = Failure("connect", f"no connection to {where}", True)
            else:
                failure = Failure("timeout", f"no whole answer from {where}", True)
        except openai.APIConnectionError as error:
            failure = Failure("connect", f"no connection to {where}: {error.__cause__}", True)
        except (httpx2.HTTPError, OSError) as error:
            failure = Failure("bad_response", f"the answer of {where} broke off: {error}", True)
        except ValueError:
            failure = Failure("bad_response", f"{where}: not JSON", True, 200)
        return msgspec.structs.replace(failure, message=endpoint.without_secrets(failure.message))

    def _open(self, endpoint: Endpoint) -> AsyncOpenAI:
        if self._client is None:
            import httpx2
            from openai import AsyncOpenAI, Omit

            headers = {k: v for k, v in endpoint.headers.items() if k.lower() != "content-type"}
            names = {name.lower() for name in headers}
            # The SDK would take these from the environment.
            from_environment = ("OpenAI-Organization", "OpenAI-Project")
            omitted = {name: Omit() for name in from_environment if name.lower() not in names}
            hooks = [] if "authorization" in names else [_drop_authorization]
            self._client = AsyncOpenAI(
                base_url=endpoint.url,
                api_key="none",  # the endpoint's headers have it
                default_headers={**headers, **omitted, "User-Agent": "bagent"},  # type: ignore[dict-item]
                default_query=dict(endpoint.query) or None,
                max_retries=0,
                http_client=httpx2.AsyncClient(
                    proxy=endpoint.proxy,
                    verify=trusting_context(endpoint.ca_file),
                    trust_env=False,
                    follow_redirects=False,
                    event_hooks={"request": hooks},
                    timeout=httpx2.Timeout(QUIET_SECONDS, connect=CONNECT_SECONDS, pool=None),
                ),
            )
        return self._client

    async def close(self) -> None:
        """Close all connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()


async def _drop_authorization(request: httpx2.Request) -> None:
    """Send no key to a server that has none; the SDK sends one in any case."""
    del request.headers["Authorization"]


class OpenAIBatches(LearnedForms):
    """See :class:`bagent.batches.service.BatchService`.

    Args:
        own: the address is OpenAI's own: it takes ``max_completion_tokens`` for every model.
        api: which API carries calls; see the OpenAI backend.
        enforce: whether the schema is asked for by the API; see the OpenAI backend.
        notice: gets a line for people when something is learned.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        keys: KeySource | None,
        *,
        own: bool,
        api: str = "auto",
        enforce: str,
        notice: Callable[[str], None],
    ) -> None:
        super().__init__(endpoint, LIMITS, enforce, notice)
        self._api = api
        self._client = OpenAIClient(endpoint, keys)
        self._own = own
        self._writers: dict[tuple[str, Form, str], BodyWriter] = {}

    # --- requests ---------------------------------------------------------------------------------

    def group(self, request: Request) -> str:
        """Return route and model: a batch has one of each."""
        return f"/v1{self._path(request)} {self._model(request)}"

    def _path(self, request: Request) -> str:
        by_responses = goes_to_responses(request, self._api, self._model(request))
        return RESPONSES if by_responses else request.path

    def _model(self, request: Request) -> str:
        return str(request.settings.model or (request.body or {}).get("model") or "")

    def form(self, request: Request) -> Form:
        """Return the learned form; newer models use ``max_completion_tokens`` from the start."""
        form = super().form(request)
        newer = self._own or _NEW_LIMIT.search(self._model(request))
        if newer and request.prompt is None and request.path.endswith("/chat/completions"):
            form = msgspec.structs.replace(form, completion_limit="max_completion_tokens")
        return form

    def line(self, request: Request, form: Form, name: str) -> bytes:
        """Return ``{"custom_id", "method", "url", "body"}``."""
        path = self._path(request)
        key = (request.settings.model or "", form, path)
        writer = self._writers.get(key)
        if writer is None:
            by_responses = request.body is None and path == RESPONSES
            make_writer = ResponsesWriter if by_responses else BodyWriter
            writer = self._writers[key] = make_writer(
                key[0],
                native_schema=form.native_schema,
                completion_limit=form.completion_limit,
                without=form.without,
                strict=form.strict,
            )
        payload = "prompt" if request.prompt is not None else None
        body = writer.body(request, key=payload, stream=False)
        head = b'{"custom_id":"%s","method":"POST","url":"/v1%s","body":'
        return head % (name.encode(), path.encode()) + body + b"}"

    # --- batches ----------------------------------------------------------------------------------

    async def find(self, record: BatchRecord) -> str | Failure | None:
        """Search the batches created since for the label or the same file."""
        after: str | None = None
        oldest = (record.sent_at or 0.0) - CLOCK_SKEW
        while True:
            page = await self._client.list(LIST_SIZE, after)
            if isinstance(page, Failure):
                return page
            entries = _entries(page)
            for entry in entries:
                if _is_made_of(entry, record):
                    return str(entry.get("id"))
            created = [float(entry.get("created_at") or 0.0) for entry in entries]
            if not entries or not page.get("has_more") or min(created) < oldest:
                return None
            after = str(entries[-1].get("id"))

    async def upload(self, record: BatchRecord, requests: Path) -> str | Failure:
        """Upload the file with purpose ``batch``."""
        return created_id(await self._client.upload(requests), "a file")

    async def create(self, record: BatchRecord, requests: Path) -> str | Failure:
        """Create a batch from the uploaded file."""
        body = {
            "input_file_id": record.file_id,
            "endpoint": record.route,
            "completion_window": WINDOW,
            "metadata": {"bagent": record.label},
        }
        return created_id(await self._client.create(body), "a batch")

    async def poll(self, record: BatchRecord) -> BatchStatus | Failure:
        """Retrieve the batch."""
        batch = await self._client.retrieve(record.batch_id or "")
        return batch if isinstance(batch, Failure) else read_batch(batch)

    async def cancel(self, record: BatchRecord) -> Failure | None:
        """Cancel the batch."""
        result = await self._client.cancel(record.batch_id or "")
        return result if isinstance(result, Failure) else None

    async def fetch(self, record: BatchRecord, into: Path) -> Failure | None:
        """Download the files of answers and of errors, of which either may be missing."""
        return await fetch_all(self._client, list(record.outputs), into)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    def read(self, line: bytes, record: BatchRecord) -> Answer:
        """Parse one line of either file."""
        return read_line(line, record.route.removeprefix("/v1"))


def read_batch(batch: Json) -> BatchStatus | Failure:
    """Convert a batch object to its status."""
    if not isinstance(batch, dict) or not isinstance(batch.get("status"), str):
        return not_a_batch(batch)
    status = batch["status"]
    counts = batch.get("request_counts")
    counts = counts if isinstance(counts, dict) else {}
    outputs = (batch.get("output_file_id"), batch.get("error_file_id"))
    listed = batch.get("errors")
    errors = listed.get("data") if isinstance(listed, dict) else None
    faults = tuple(
        BatchError(
            str(entry.get("message") or entry.get("code") or "refused"),
            str(entry.get("code") or ""),
              entry.get("line") if isinstance(entry.get("line"), int) else None,
        )
        for entry in (errors if isinstance(errors, list) else ()) if isinstance(entry, dict)
    )  # fmt: skip
    if status == "failed" and not faults:
        faults = (BatchError("the batch failed, and no reason was told"),)
    numbers = [counts.get(name) for name in ("completed", "failed")]
    completed, failed = (number if isinstance(number, int) else 0 for number in numbers)
    ended_at = batch.get(f"{status}_at")
    return BatchStatus(
        word=status,
        over=status in OVER,
        ended=completed + failed,
        failed=failed,
        outputs=tuple(str(entry) for entry in outputs if entry),
        faults=faults if status == "failed" else (),
        ended_at=float(ended_at) if isinstance(ended_at, int | float) else None,
    )


_JSON = {"Content-Type": "application/json"}


class _Response(msgspec.Struct):
    status_code: int = 0
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response | None = None
    error: Any = None


_decode_line = msgspec.json.Decoder(_Line).decode


def read_line(line: bytes, path: str = CHAT) -> Answer:
    """Parse one answer of the route ``path``.

    It is successful only with a 2xx status and no error.
    """
    try:
        parsed = _decode_line(line)
    except (msgspec.DecodeError, UnicodeError):
        parsed = _slowly(line)
    response = parsed.response
    if response is not None and parsed.error in (None, {}) and 200 <= response.status_code < 300:
        return parsed.custom_id, read_by_route(path, bytes(response.body), _JSON)
    if response is not None and response.status_code >= 300:
        text = bytes(response.body)
        if text in (b"null", b""):
            text = encode_json({"error": parsed.error}).encode()
        return parsed.custom_id, failure_from_status(
            response.status_code, text.decode("utf-8", "replace"), {}
        )
    return parsed.custom_id, _no_response(parsed.error)


def _slowly(line: bytes) -> _Line:
    value = decode_json(line)
    if not isinstance(value, dict) or not isinstance(value.get("custom_id"), str):
        raise ValueError("no custom_id")
    raw_response = value.get("response")
    response = None
    if isinstance(raw_response, dict):
        status = raw_response.get("status_code")
        body = msgspec.Raw(encode_json(raw_response.get("body")).encode())
        response = _Response(status if isinstance(status, int) else 0, body)
    return _Line(value["custom_id"], response, value.get("error"))


def _no_response(error: Json) -> Failure:
    """Return the failure of a request that was never made."""
    code = str(error.get("code") or "") if isinstance(error, dict) else ""
    message = str(error.get("message") or code) if isinstance(error, dict) else str(error)
    if "expired" in code:
        return Failure("timeout", f"the batch expired: {shorten(message)}", True)
    if "cancel" in code:
        return Failure("timeout", f"the batch was cancelled: {shorten(message)}", True)
    failure = failure_from_body({"error": error}, {}) if error else None
    return failure or Failure("bad_response", "neither an answer nor an error", True)


def _is_made_of(entry: dict[str, Any], record: BatchRecord) -> bool:
    """Return whether a listed batch is this one, by metadata or by file."""
    metadata = entry.get("metadata")
    if isinstance(metadata, dict) and metadata.get("bagent") == record.label:
        return True
    return record.file_id is not None and entry.get("input_file_id") == record.file_id


def _entries(page: Json) -> list[dict[str, Any]]:
    data = page.get("data") if isinstance(page, dict) else None
    return [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []
