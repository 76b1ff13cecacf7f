"""Amazon Bedrock backend: Converse and ConverseStream through boto3.

boto3 provides credentials, signatures and event streams, but blocks. Its calls run in a bounded
pool of threads, one for each call in flight. Its retries are off, because the fleet retries. Only
jobs that use Bedrock import it.

Sources of its exceptions: botocore 1.44 (``botocore.exceptions``, ``botocore.eventstream``) and the
errors that its service model lists for Converse. Bedrock sends no Retry-After, but a gateway
may.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec

from bagent.backends.base import Exchange, Timeouts
from bagent.backends.bedrock.wire import (
    IGNORED_SAMPLING,
    BedrockStream,
    converse_arguments,
    read_answer,
)
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.failures import classify, shorten
from bagent.backends.http.retry_after import retry_after
from bagent.backends.openai.raw_request import ChatRequests
from bagent.backends.prefix_cache import SharedPrefix
from bagent.backends.request import CallSettings, Request
from bagent.backends.wrappers import SingleRequestBackend
from bagent.clocks import unix
from bagent.types import Failure, Reply, ToolCall

_STATUS = {
    "throttlingexception": 429,
    "modelnotreadyexception": 429,
    "modeltimeoutexception": 408,
    "internalserverexception": 500,
    "serviceunavailableexception": 503,
    "modelerrorexception": 424,
    "modelstreamerrorexception": 424,
    "validationexception": 400,
    "accessdeniedexception": 403,
    "resourcenotfoundexception": 404,
    "servicequotaexceededexception": 429,
}
"""HTTP status of errors inside a stream, whose own status is 200."""

_THROTTLED = re.compile(
    r"throttl|toomanyrequests|requestlimitexceeded|throughputexceeded|slowdown|limitexceeded"
)
"""Codes that AWS's own clients treat as throttling (botocore's ``_retry.json``)."""

_AUTH = re.compile(
    r"unrecognizedclient|invalidsignature|expiredtoken|invalidclienttoken|missingauth"
)
_PER_DAY = re.compile(r"tokens? per day|requests? per day|daily", re.IGNORECASE)

MAX_CLIENTS = 16


def failure_from_exception(error: BaseException, endpoint_name: str) -> Failure | None:
    """Convert an exception of a Bedrock call; None if it is a bug of this program."""
    from botocore import exceptions as aws
    from botocore.eventstream import ParserError
    from urllib3.exceptions import HTTPError

    if isinstance(error, aws.ClientError):
        return _refused(error.response)
    message = shorten(f"{endpoint_name}: {error}")
    if isinstance(error, aws.ParamValidationError):
        return Failure("rejected", f"no request to {message}")
    if isinstance(error, aws.SSLError):
        return Failure("connect", message, True)
    if isinstance(error, aws.ConnectTimeoutError | aws.EndpointConnectionError):
        return Failure("connect", message, True)
    if isinstance(error, aws.ProxyConnectionError | aws.ConnectionClosedError):
        return Failure("connect", message, True)
    if isinstance(error, aws.ReadTimeoutError):
        return Failure("timeout", message, True)
    if isinstance(error, aws.HTTPClientError):
        return Failure("connect", message, True)
    if isinstance(error, aws.BotoCoreError):
        return _setup(error, message)
    if isinstance(error, ParserError):
        return Failure("bad_response", f"a broken event from {message}", True, 200)
    if isinstance(error, HTTPError | OSError):
        return Failure("bad_response", f"the answer broke off: {message}", True, 200)
    return None


def _setup(error: BaseException, message: str) -> Failure:
    """Convert errors of credentials, regions and profiles."""
    name = type(error).__name__
    if "Cred" in name or "Token" in name or "Auth" in name:
        hint = "set AWS_PROFILE, AWS_ACCESS_KEY_ID or AWS_BEARER_TOKEN_BEDROCK, or log in"
        return Failure("auth", f"{message} ({hint})")
    return Failure("rejected", message)


def _refused(answer: dict[str, Any]) -> Failure:
    """Convert an error response, or an error inside a stream."""
    error = answer.get("Error") or {}
    code, message = str(error.get("Code") or ""), str(error.get("Message") or "")
    key = code.lower()
    http_status = (answer.get("ResponseMetadata") or {}).get("HTTPStatusCode")
    code_status = _STATUS.get(key) or (429 if _THROTTLED.search(key) else None)
    status = code_status or 502
    if isinstance(http_status, int) and http_status != 200:
        status = http_status
    summary = f"{code}: {shorten(message) or 'no text'}"
    if _AUTH.search(key):
        return Failure("auth", f"HTTP {status}: {summary}", status=status)
    if code_status == 429 and _PER_DAY.search(message):
        return Failure("budget", f"HTTP {status}: {summary}", status=status)
    if code_status == 424:
        return Failure("overloaded", f"HTTP 424: {summary}", True, 424)
    headers = (answer.get("ResponseMetadata") or {}).get("HTTPHeaders") or {}
    failure = classify(code_status or status, summary, message, retry_after(headers, time.time()))
    if key == "serviceunavailableexception":
        return msgspec.structs.replace(failure, busy=True)
    return failure


_T = TypeVar("_T")

_Job = tuple["Future[Any]", Callable[[], Any]]


class WorkerThreads:
    """A pool of at most ``most`` daemon threads, started on demand.

    Unlike the threads of ``concurrent.futures``, one that hangs does not keep the process from
    ending.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._free = threading.Semaphore(0)
        self._count = 0

    @property
    def count(self) -> int:
        """How many threads there are."""
        return self._count

    async def run(self, call: Callable[[], _T]) -> _T:
        """Run ``call`` in a thread, waiting for a free one; return or raise what it does.

        A cancelled call that has begun continues in its thread and its result is dropped.
        """
        job: Future[_T] = Future()
        self._jobs.put((job, call))
        if not self._free.acquire(blocking=False) and self._count < self._most:
            self._count += 1
            name = f"{self._name}-{self._count}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        """End the threads as they become free."""
        for _ in range(self._count):
            self._jobs.put(None)

    def _work(self) -> None:
        while True:
            work = self._jobs.get()
            if work is None:
                return
            job, call = work
            if job.set_running_or_notify_cancel():
                _run(job, call)
            del work, job, call  # do not keep objects alive until the next call
            self._free.release()


def _run(job: Future[Any], call: Callable[[], Any]) -> None:
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - it is raised where the call is awaited
        job.set_exception(error)
    else:
        job.set_result(result)


class BedrockConfig(msgspec.Struct, frozen=True):
    """Connection settings of Bedrock. None means boto3's default, from the environment and AWS's
    files."""

    threads: int
    """Concurrent calls; each blocks a thread."""
    region: str | None = None
    profile: str | None = None
    endpoint_url: str | None = None
    proxy: str | None = None
    """A URL, or ``none``."""
    ca_file: str | None = None


class BedrockBackend(SingleRequestBackend):
    """Sends one call per request: Converse, or ConverseStream for streamed calls.

    The endpoint's headers are sent along. With an ``Authorization`` header nothing is signed.

    Args:
        enforce: ``auto`` asks for the schema by ``outputConfig`` until the model refuses it,
            ``native`` asks always, ``prompt`` never.
        clock: Unix seconds.
        notice: called with a line for people when something is learned or left out.
    """

    def __init__(
        self,
        config: BedrockConfig,
        *,
        enforce: str = "auto",
        clock: Callable[[], float] = unix,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(enforce, clock, notice)
        self._config = config
        self._chats = ChatRequests("Bedrock's Converse", IGNORED_SAMPLING, notice)
        self._threads = WorkerThreads(config.threads, "bedrock")
        self._lock = threading.Lock()
        self._session: Any = None
        self._clients: dict[Hashable, Any] = {}
        self._shared: dict[int, tuple[CallSettings, SharedPrefix]] = {}

    async def _send(
        self, endpoint: Endpoint, request: Request, timeouts: Timeouts, exchange: Exchange
    ) -> Reply | Failure:
        try:
            chat = self._chats.unpack(request)
            model = require_model(chat)
            form = self._forms.of(endpoint, chat)
            arguments = converse_arguments(chat, model, form, self._prefix(chat.settings))
        except ValueError as error:
            return Failure("rejected", f"not sent to {endpoint.name}: {error}")
        client = partial(self._client, endpoint.headers, timeouts)
        reader = None
        call: Callable[[], Reply | Failure]
        if chat.stream and form.stream:
            reader = BedrockStream(
                exchange.sent, self._clock, model, _on_loop(chat), _pieces_on_loop(chat)
            )
            call = partial(self._stream, client, arguments, reader, exchange)
        else:
            call = partial(self._whole, client, arguments, model, exchange)
        result = await self._run(call, reader, endpoint, timeouts)
        if isinstance(result, Failure):
            exchange.status = result.status or exchange.status
            exchange.connected = result.kind != "connect"
            exchange.learned = self._forms.learn(endpoint, chat, result, form)
            message = endpoint.without_secrets(result.message)
            result = msgspec.structs.replace(result, message=message)
        exchange.first_token = reader.first_token if reader is not None else None
        return result

    async def _run(
        self,
        call: Callable[[], _T],
        reader: BedrockStream | None,
        endpoint: Endpoint,
        timeouts: Timeouts,
    ) -> _T | Reply | Failure:
        """Run ``call`` in a thread within its limits."""
        running = asyncio.ensure_future(self._threads.run(call))
        try:
            async with asyncio.timeout(timeouts.total):
                if reader is None:
                    await asyncio.wait({running})
                elif message := await self._watch(running, reader, timeouts):
                    return Failure("timeout", f"{endpoint.name} {message}", True)
        except TimeoutError:
            message = f"no whole answer from {endpoint.name} within {timeouts.total or 0:g} s"
            return Failure("timeout", message, True)
        finally:
            if reader is not None and not running.done():
                reader.abandoned = True
            running.cancel()
        error = running.exception()
        if error is None:
            return running.result()
        failure = failure_from_exception(error, endpoint.name)
        if failure is None:
            raise error
        if reader is None:
            return failure
        return reader.result() if reader.whole else _with_text(failure, reader.text)

    async def _watch(
        self, running: asyncio.Future[Any], reader: BedrockStream, timeouts: Timeouts
    ) -> str:
        """Wait for the stream to end; return which limit it exceeded, empty if none."""
        while True:
            begun = reader.first_token is not None
            limit = timeouts.idle if begun else timeouts.first_token
            remaining = None if limit is None else reader.heard + limit - self._clock()
            if remaining is not None and remaining <= 0:
                event = "sent nothing more" if begun else "sent no first token"
                return f"{event} within {limit:g} s"
            if not begun and timeouts.idle is not None:  # it may begin and stall before that
                remaining = timeouts.idle if remaining is None else min(remaining, timeouts.idle)
            done, _ = await asyncio.wait({running}, timeout=remaining)
            if done:
                return ""

    def _prefix(self, settings: CallSettings) -> SharedPrefix:
        cached = self._shared.get(id(settings))
        if cached is None:
            if len(self._shared) >= MAX_CLIENTS:
                self._shared.clear()
            cached = self._shared[id(settings)] = settings, SharedPrefix()
        return cached[1]

    # --- in threads -----------------------------------------------------------------------------

    @staticmethod
    def _whole(
        client: Callable[[], Any], arguments: dict[str, Any], model: str, exchange: Exchange
    ) -> Reply:
        answer = client().converse(**arguments)
        _note(exchange, answer)
        return read_answer(answer, model)

    def _stream(
        self,
        client: Callable[[], Any],
        arguments: dict[str, Any],
        reader: BedrockStream,
        exchange: Exchange,
    ) -> Reply | Failure:
        answer = client().converse_stream(**arguments)
        _note(exchange, answer)
        exchange.first_byte = self._clock()
        stream = answer["stream"]
        try:
            for event in stream:
                reader.take(event)
                if reader.abandoned:
                    break
        finally:
            stream.close()
        return reader.result()

    def _client(self, headers: Mapping[str, str], timeouts: Timeouts) -> Any:
        """Return the cached client for these headers and limits; making one takes 0.3 s."""
        longest = max(
            (s for s in (timeouts.total, timeouts.first_token, timeouts.idle) if s), default=None
        )
        key = timeouts.connect, longest, tuple(sorted(headers.items()))
        with self._lock:
            client = self._clients.get(key)
            if client is None:
                if len(self._clients) >= MAX_CLIENTS:
                    self._clients.clear()
                client = self._clients[key] = self._make_client(headers, timeouts.connect, longest)
        return client

    def _make_client(
        self, headers: Mapping[str, str], connect: float | None, read: float | None
    ) -> Any:
        from botocore import UNSIGNED

        config = self._config
        sent_headers = {k: v for k, v in headers.items() if k.lower() != "content-type"}
        options: dict[str, Any] = {
            "max_pool_connections": config.threads,
            "connect_timeout": connect,
            "read_timeout": read,
        }
        if any(name.lower() == "authorization" for name in sent_headers):
            options["signature_version"] = UNSIGNED
        session, url = self._open_session(), config.endpoint_url
        client = make_client(config, session, "bedrock-runtime", url, **options)

        def add_headers(request: Any, **_: Any) -> None:
            for name, value in sent_headers.items():
                request.headers[name] = value

        client.meta.events.register("before-send.bedrock-runtime", add_headers)
        return client

    def _open_session(self) -> Any:
        import boto3

        if self._session is None:
            self._session = boto3.session.Session(profile_name=self._config.profile)
        return self._session

    async def probe(self, endpoint: Endpoint, seconds: float) -> Capabilities | Failure:
        """Check that there are credentials and a region. Nothing is sent to Bedrock."""
        limits = Timeouts(connect=seconds, total=seconds)
        signed = not any(name.lower() == "authorization" for name in endpoint.headers)
        check = partial(self._check_credentials, endpoint.headers, limits, signed)
        result = await self._run(check, None, endpoint, limits)
        return result if isinstance(result, Failure) else Capabilities(engine="bedrock")

    def _check_credentials(
        self, headers: Mapping[str, str], limits: Timeouts, signed: bool
    ) -> None:
        from botocore.exceptions import NoCredentialsError

        self._client(headers, limits)  # raises without a region
        if signed and not os.environ.get("AWS_BEARER_TOKEN_BEDROCK"):
            with self._lock:
                credentials = self._open_session().get_credentials()
            if credentials is None:
                raise NoCredentialsError

    async def close(self) -> None:
        """Close all connections. Threads end when their calls do."""
        self._threads.close()
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()


def require_model(request: Request) -> str:
    """Return the model of ``request``; raises ValueError if it names none."""
    if not request.settings.model:
        raise ValueError("Bedrock needs a model's id or ARN: write model: NAME")
    return request.settings.model


def make_client(
    config: BedrockConfig, session: Any, service: str, endpoint_url: str | None, **options: Any
) -> Any:
    """Return boto3's client of an AWS service, without retries and through the job's proxy."""
    from botocore.config import Config

    options = {
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "user_agent_extra": "bagent",
        **options,
    }
    if config.proxy is not None:
        direct = config.proxy == "none"
        options["proxies"] = {} if direct else {"http": config.proxy, "https": config.proxy}
    return session.client(
        service,
        region_name=config.region,
        endpoint_url=endpoint_url,
        verify=config.ca_file,
        config=Config(**options),
    )


def _on_loop(request: Request) -> Callable[[ToolCall], None] | None:
    """Return a callback for tool calls that may be called from the reading thread."""
    if request.watch is None:
        return None
    loop, on_call = asyncio.get_running_loop(), request.watch()

    def notify(call: ToolCall) -> None:
        loop.call_soon_threadsafe(on_call, call)

    return notify


def _pieces_on_loop(request: Request) -> Callable[[str, str], None] | None:
    """Return a callback for the pieces of an answer that may be called from the reading thread."""
    heard, began = request.heard, request.began
    if heard is None and began is None:
        return None
    loop = asyncio.get_running_loop()

    def notify(kind: str, text: str) -> None:
        if kind != "first":
            if heard is not None:
                loop.call_soon_threadsafe(heard, kind, text)
        elif began is not None:
            loop.call_soon_threadsafe(began)

    return notify


def _note(exchange: Exchange, answer: dict[str, Any]) -> None:
    metadata = answer.get("ResponseMetadata") or {}
    exchange.status = metadata.get("HTTPStatusCode")
    exchange.request_id = metadata.get("RequestId")


def _with_text(failure: Failure, text: str) -> Failure:
    return msgspec.structs.replace(failure, text=text) if text else failure
