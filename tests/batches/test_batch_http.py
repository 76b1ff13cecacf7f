"""HTTP of batches: keys that are renewed, files that are whole or not there."""

from __future__ import annotations

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

OLD_KEY, NEW_KEY = "old-key-11", "new-key-77"


class Files:
    """Serves and takes files with the new key; the file ``cut`` breaks off in the middle."""

    def __init__(self) -> None:
        self.headers: list[dict[str, str]] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/files", self._post)
        app.router.add_get("/v1/{name}", self._get)
        return app

    def _refusal(self, request: web.Request) -> web.Response | None:
        self.headers.append(dict(request.headers))
        key = request.headers.get("Authorization")
        if key == f"Bearer {NEW_KEY}":
            return None
        return web.json_response({"error": {"message": f"no {key}"}}, status=401)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        if request.match_info["name"] != "cut":
            return web.Response(text=f"line of {request.match_info['name']}")
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"half\n")
        assert request.transport is not None
        request.transport.abort()
        return response

    async def _post(self, request: web.Request) -> web.Response:
        form = await request.post()
        content = form["file"].file.read()  # type: ignore[union-attr]
        refusal = self._refusal(request)
        return refusal or web.json_response({"id": "file-1", "bytes": len(content)})


def endpoint(url: str, key: str = OLD_KEY) -> Endpoint:
    return Endpoint("p", f"{url}/v1", headers={"Authorization": f"Bearer {key}"})


def source() -> KeySource:
    """The old key first, then the new one."""
    return KeySource(OLD_KEY, lambda: NEW_KEY)


def assert_renewed(server: Files, refused: object, *later: str | None) -> None:
    """The key was renewed where there was a source, and the refusal without one shows no key."""
    keys = [sent.get("Authorization") for sent in server.headers]
    assert keys == [f"Bearer {OLD_KEY}", f"Bearer {NEW_KEY}", f"Bearer {OLD_KEY}", *later]
    assert isinstance(refused, Failure)
    assert refused.kind == "auth"
    assert OLD_KEY not in refused.message


async def test_a_refused_key_is_renewed_once_and_never_shown() -> None:
    server = Files()
    async with served(server) as url:
        with_source = BatchHttpClient(endpoint(url), source())
        without = BatchHttpClient(endpoint(url))
        line, refused = await with_source.first_line("/a"), await without.get("/a")
        await with_source.close()
        await without.close()
    assert line == b"line of a"
    assert_renewed(server, refused)


async def test_the_sdk_renews_a_key_and_takes_nothing_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.setenv(name, "http://from-the-environment")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    file = tmp_path / "in.jsonl"
    file.write_text("{}\n")
    server = Files()
    async with served(server) as url:
        with_source = OpenAIClient(endpoint(url), source())
        without = OpenAIClient(endpoint(url))
        keyless = OpenAIClient(msgspec.structs.replace(endpoint(url), headers={}))
        uploaded, refused = await with_source.upload(file), await without.upload(file)
        await keyless.upload(file)
        for client in (with_source, without, keyless):
            await client.close()
    assert uploaded == {"id": "file-1", "bytes": 3}
    assert_renewed(server, refused, None)
    assert "from-the-environment" not in str(server.headers)


async def test_several_files_become_one_which_is_there_only_once_it_is_whole(
    tmp_path: Path,
) -> None:
    into = tmp_path / "answers"
    async with served(Files()) as url:
        client = BatchHttpClient(endpoint(url, NEW_KEY))
        cut = await fetch_all(client, ["/a", "/cut"], into)
        assert not into.exists()
        whole = await fetch_all(client, ["/a", "/b"], into)
        await client.close()
    assert cut is not None
    assert cut.passing
    assert whole is None
    assert into.read_text() == "line of a\nline of b\n"


@pytest.mark.parametrize(
    ("name", "words"),
    [("missing.pem", "No such file or directory"), ("empty.pem", "no certificates in it")],
)
async def test_a_ca_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, words: str):
    (tmp_path / "empty.pem").write_text("nothing here\n")
    here = Endpoint("p", "https://127.0.0.1:1/v1", ca_file=str(tmp_path / name))
    by_sdk, by_http = OpenAIClient(here), BatchHttpClient(here)
    for failure in (await by_sdk.retrieve("b1"), await by_http.get("/b1")):
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.passing) == ("connect", False)
        assert f"p: ca_file {tmp_path / name}: {words}" in failure.message
    await by_http.close()
