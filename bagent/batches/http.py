"""HTTP client for batches without an SDK: small JSON calls, streamed uploads and downloads."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.failures import failure_from_status
from bagent.backends.http.client import NETWORK_ERRORS, network_failure, trusting_context
from bagent.backends.keys import KeySource
from bagent.store.journal.segments import write_error
from bagent.text.json import decode_json, encode_json
from bagent.types import Failure, Json

if TYPE_CHECKING:
    import aiohttp

CONNECT_SECONDS = 10.0
QUIET_SECONDS = 120.0
"""Limit of silence on a connection; a file may take hours."""

PIECE = 1 << 20

Body = Callable[[], tuple[Any, dict[str, str]]]
"""Makes a request's body and headers for each attempt."""


async def append_pieces(into: Path, pieces: AsyncIterable[bytes]) -> None:
    """Append a downloaded file to ``into``, ending it with a line break.

    Raises:
        WriteError: the disk refuses.
    """
    last = b"\n"
    try:
        with into.open("ab") as handle:
            async for piece in pieces:
                handle.write(piece)
                last = piece
            if not last.endswith(b"\n"):
                handle.write(b"\n")
            handle.flush()
            os.fsync(handle.fileno())
    except OSError as error:
        if error.filename or error.errno in DISK_ERRORS:
            raise write_error(into, error) from error
        raise


class BatchHttpClient:
    """Sends requests to one endpoint; renews the key after a 401.

    Args:
        endpoint: its headers hold the key; they are sent to no other address.
        keys: where newer keys come from, None where the key does not change.
    """

    def __init__(self, endpoint: Endpoint, keys: KeySource | None = None) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._session: aiohttp.ClientSession | None = None
        self._trusted: ssl.SSLContext | bool = True
        self._timeouts = Timeouts(connect=CONNECT_SECONDS, total=QUIET_SECONDS)

    async def get(self, path: str) -> Json | Failure:
        """GET JSON below the endpoint's address."""
        return await self._json("GET", path, None)

    async def post(self, path: str, body: Json) -> Json | Failure:
        """POST JSON."""
        data = encode_json(body).encode()
        return await self._json("POST", path, lambda: (data, _JSON))

    async def post_pieces(
        self, path: str, pieces: Callable[[], AsyncIterator[bytes]], size: int
    ) -> Json | Failure:
        """POST JSON of ``size`` bytes from an iterator."""
        headers = {**_JSON, "Content-Length": str(size)}
        return await self._json("POST", path, lambda: (pieces(), headers))

    async def fetch(self, path: str, into: Path) -> Failure | None:
        """Append the response of GET to the file ``into``, ending it with a line break.

        Raises:
            WriteError: the disk refuses.
        """

        async def save(response: aiohttp.ClientResponse) -> None:
            await append_pieces(into, response.content.iter_chunked(PIECE))

        return await self._ask("GET", path, None, save)

    async def first_line(self, path: str) -> bytes | Failure:
        """Return the first line of the response of GET."""
        received = bytearray()

        async def read(response: aiohttp.ClientResponse) -> None:
            async for piece in response.content.iter_chunked(PIECE):
                received.extend(piece)
                if b"\n" in piece:
                    return

        failure = await self._ask("GET", path, None, read)
        return failure or bytes(received.partition(b"\n")[0])

    async def _json(self, method: str, path: str, body: Body | None) -> Json | Failure:
        raw = bytearray()

        async def read(response: aiohttp.ClientResponse) -> None:
            raw.extend(await response.read())

        failure = await self._ask(method, path, body, read)
        if failure is not None:
            return failure
        try:
            return decode_json(bytes(raw))
        except ValueError:
            return Failure("bad_response", f"{self._endpoint.name}{path}: not JSON", True, 200)

    async def _ask(
        self, method: str, path: str, body: Body | None, read: Callable[[Any], Any]
    ) -> Failure | None:
        used = self._keys.key if self._keys is not None else ""
        failure = await self._once(method, path, body, read)
        if failure is None or failure.status != 401 or self._keys is None:
            return failure
        if not await self._keys.renew(used):
            return failure
        return await self._once(method, path, body, read)

    async def _once(
        self, method: str, path: str, body: Body | None, read: Callable[[Any], Any]
    ) -> Failure | None:
        from bagent.backends.http.aiohttp_client import TranslatedRequest

        endpoint = self._endpoint if self._keys is None else self._keys.apply(self._endpoint)
        data, more = body() if body is not None else (None, {})
        headers = {k: v for k, v in endpoint.headers.items() if k.lower() != "content-type"}
        try:
            request = self._open().request(
                method,
                endpoint.url + path,
                data=data,
                headers={**headers, **more},
                params=endpoint.query or None,
                proxy=endpoint.proxy,
                ssl=self._trusted,
                allow_redirects=False,
            )
            async with TranslatedRequest(request) as response:
                if 200 <= response.status < 300:
                    await read(response)
                    return None
                text = (await response.read()).decode("utf-8", "replace")
                failure = failure_from_status(response.status, text, response.headers)
        except NETWORK_ERRORS as error:
            failure = network_failure(error, endpoint, self._timeouts)
        message = endpoint.without_secrets(failure.message)
        return msgspec.structs.replace(failure, message=message)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            if self._endpoint.ca_file is not None:
                self._trusted = trusting_context(self._endpoint.ca_file)
            self._session = aiohttp.ClientSession(
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"User-Agent": "bagent"},
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=CONNECT_SECONDS, sock_read=QUIET_SECONDS
                ),
            )
        return self._session

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


_JSON = {"Content-Type": "application/json"}
DISK_ERRORS = (28, 30, 122, 5)
"""Errors of a disk: no space, read-only, over quota, I/O error."""


class FileDownloader(Protocol):
    """A client that can download."""

    async def fetch(self, path: str, into: Path) -> Failure | None:
        """Append the content at ``path`` to the file ``into``."""
        ...


async def fetch_all(web: FileDownloader, paths: list[str], into: Path) -> Failure | None:
    """Fetch several files into one, which appears only when it is complete.

    Raises:
        WriteError: the disk refuses.
    """
    partial = into.with_name(f"{into.name}.part")
    with suppress(FileNotFoundError):
        partial.unlink()
    partial.touch()
    for path in paths:
        failure = await web.fetch(path, partial)
        if failure is not None:
            return failure
    partial.replace(into)
    return None


async def file_pieces(file: Path) -> AsyncIterator[bytes]:
    """The file in pieces."""
    with file.open("rb") as handle:
        while piece := handle.read(PIECE):
            yield piece
