"""OpenAI's files and batches by its SDK, against OpenAI and servers like it."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from bagent.backends.endpoint import Endpoint
from bagent.backends.http.client import proxy_note
from bagent.backends.keys import KeySource
from bagent.backends.openai.errors import failure_from_status
from bagent.batches.http import CONNECT_SECONDS, PIECE, QUIET_SECONDS, append_pieces
from bagent.text.json import decode_json
from bagent.types import Failure, Json

if TYPE_CHECKING:
    import httpx2
    from openai import AsyncOpenAI

T = TypeVar("T")


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

            trusted: ssl.SSLContext | bool = True
            if endpoint.ca_file is not None:
                trusted = ssl.create_default_context(cafile=endpoint.ca_file)
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
                    verify=trusted,
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
