"""Exceptions of boto3 as failures, and threads for its calls.

Sources: botocore 1.44 (``botocore.exceptions``, ``botocore.eventstream``) and the errors that its
service model lists for Converse. Bedrock sends no Retry-After, but a gateway may.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec

from bagent.backends.http.retry_after import retry_after
from bagent.backends.openai.errors import classify, shorten
from bagent.types import Failure

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
