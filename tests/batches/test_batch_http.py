"""HTTP of batches: keys that are renewed, files that are whole or not there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from bagent.backends.endpoint import Endpoint
from bagent.backends.keys import KeySource
from bagent.batches.http import BatchHttpClient, fetch_all
from bagent.batches.openai import OpenAIClient
from bagent.types import Failure
from support.batch_runs import served


class Files:
    """Serves files to who has the key; ``cut`` breaks off in the middle."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.asked: list[str] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/{name}", self._get)
        return app

    async def _get(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.headers["Authorization"])
        if request.headers["Authorization"] != f"Bearer {self.key}":
            told = {"error": {"message": f"no {request.headers['Authorization']}"}}
            return web.json_response(told, status=401)
        if request.match_info["name"] != "cut":
            return web.Response(text=f"line of {request.match_info['name']}")
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"half\n")
        assert request.transport is not None
        request.transport.abort()
        return response


def test_a_refused_key_is_renewed_once_and_never_shown() -> None:
    async def main() -> tuple[object, object, list[str]]:
        server = Files("new-key-77")
        async with served(server) as url:
            endpoint = Endpoint("p", f"{url}/v1", headers={"Authorization": "Bearer old-key-11"})
            with_source = BatchHttpClient(endpoint, KeySource("old-key-11", lambda: "new-key-77"))
            without = BatchHttpClient(endpoint)
            try:
                return await with_source.first_line("/a"), await without.get("/a"), server.asked
            finally:
                await with_source.close()
                await without.close()

    line, refused, asked = asyncio.run(main())
    assert line == b"line of a"
    assert asked == ["Bearer old-key-11", "Bearer new-key-77", "Bearer old-key-11"]
    assert isinstance(refused, Failure)
    assert refused.kind == "auth"
    assert "old-key-11" not in refused.message


def test_several_files_become_one_which_is_there_only_once_it_is_whole(tmp_path: Path) -> None:
    into = tmp_path / "answers"

    async def main() -> tuple[Failure | None, bool, Failure | None]:
        async with served(Files("k")) as url:
            client = BatchHttpClient(
                Endpoint("p", f"{url}/v1", headers={"Authorization": "Bearer k"})
            )
            try:
                cut = await fetch_all(client, ["/a", "/cut"], into)
                there = into.exists()
                return cut, there, await fetch_all(client, ["/a", "/b"], into)
            finally:
                await client.close()

    cut, there, whole = asyncio.run(main())
    assert cut is not None
    assert cut.passing
    assert not there
    assert whole is None
    assert into.read_text() == "line of a\nline of b\n"


class Uploads:
    """Takes files with the key ``new-key-77``; remembers the headers of each request."""

    def __init__(self) -> None:
        self.headers: list[dict[str, str]] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/files", self._post)
        return app

    async def _post(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        form = await request.post()
        content = form["file"].file.read()  # type: ignore[union-attr]
        key = request.headers.get("Authorization")
        if key != "Bearer new-key-77":
            return web.json_response({"error": {"message": f"no {key}"}}, status=401)
        return web.json_response({"id": "file-1", "bytes": len(content)})


def test_the_sdk_renews_a_key_and_takes_nothing_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.setenv(name, "http://from-the-environment")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    file = tmp_path / "in.jsonl"
    file.write_text("{}\n")

    async def main() -> tuple[object, object, list[dict[str, str]]]:
        server = Uploads()
        async with served(server) as url:
            endpoint = Endpoint("p", f"{url}/v1", headers={"Authorization": "Bearer old-key-11"})
            with_source = OpenAIClient(endpoint, KeySource("old-key-11", lambda: "new-key-77"))
            without = OpenAIClient(endpoint)
            keyless = OpenAIClient(msgspec.structs.replace(endpoint, headers={}))
            try:
                results = await with_source.upload(file), await without.upload(file)
                await keyless.upload(file)
                return *results, server.headers
            finally:
                for client in (with_source, without, keyless):
                    await client.close()

    uploaded, refused, headers = asyncio.run(main())
    assert uploaded == {"id": "file-1", "bytes": 3}
    keys = [sent.get("Authorization") for sent in headers]
    assert keys == ["Bearer old-key-11", "Bearer new-key-77", "Bearer old-key-11", None]
    assert isinstance(refused, Failure)
    assert refused.kind == "auth"
    assert "old-key-11" not in refused.message
    assert "from-the-environment" not in str(headers)


@pytest.mark.parametrize(
    ("name", "words"),
    [("missing.pem", "No such file or directory"), ("empty.pem", "no certificates in it")],
)
async def test_a_ca_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, words: str):
    (tmp_path / "empty.pem").write_text("nothing here\n")
    endpoint = Endpoint("p", "https://127.0.0.1:1/v1", ca_file=str(tmp_path / name))
    by_sdk, by_http = OpenAIClient(endpoint), BatchHttpClient(endpoint)
    for failure in (await by_sdk.retrieve("b1"), await by_http.get("/b1")):
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.passing) == ("connect", False)
        assert f"p: ca_file {tmp_path / name}: {words}" in failure.message
    await by_http.close()
