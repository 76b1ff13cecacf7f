"""Searches, with services of the two kinds on the loopback interface."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bagent.errors import UsageError
from bagent.tools import ToolResult
from bagent.tools.builtin.web_search import search_config
from support.tool_pools import ENV, asked, once, opened

KEY = "key-123"
BRAVE = {
    "web": {
        "results": [
            {"title": "One", "url": "https://one.org", "description": "first"},
            {"title": "Two", "url": "https://two.org"},
        ]
    }
}
SERPAPI = {"organic_results": [{"title": "One", "link": "https://one.org", "snippet": "first"}]}


@asynccontextmanager
async def service(answer: Any, status: int = 200) -> AsyncIterator[tuple[str, list[web.Request]]]:
    seen: list[web.Request] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(request)
        return web.json_response(answer, status=status)

    application = web.Application()
    application.router.add_get("/search.json", handle)
    application.router.add_get("/brave", handle)
    async with TestServer(application) as server:
        yield str(server.make_url("")).rstrip("/"), seen


def search(
    path: str, answer: Any, status: int = 200, **arguments: Any
) -> tuple[ToolResult, list[web.Request]]:
    async def main() -> tuple[ToolResult, list[web.Request]]:
        async with service(answer, status) as (address, seen):
            entry = {"builtin": "web_search", "url": address + path, "api_key_env": "K"}
            async with opened(Path("/nonexistent"), entry, env={**ENV, "K": KEY}) as pool:
                return await pool.call(asked("web_search", **arguments)), seen

    return asyncio.run(main())


def test_brave_is_asked_with_the_key_in_a_header() -> None:
    result, (request,) = search("/brave", BRAVE, query="a b&c", count=1)
    assert result.text == "1. One\nhttps://one.org\nfirst"
    assert dict(request.query) == {"q": "a b&c", "count": "1"}
    assert request.headers["X-Subscription-Token"] == KEY
    assert search("/brave", BRAVE, query="x")[0].text.endswith("\n\n2. Two\nhttps://two.org")
    for nothing in ({"web": None}, {"web": {"results": []}}):
        result, _ = search("/brave", nothing, query="x")
        assert (result.text, result.error) == ("[nothing found]", None)


def test_serpapi_is_asked_with_the_key_in_the_query() -> None:
    result, (request,) = search("/search.json", SERPAPI, query="x")
    assert result.text == "1. One\nhttps://one.org\nfirst"
    assert dict(request.query) == {"q": "x", "engine": "google", "num": "10", "api_key": KEY}


@pytest.mark.parametrize("path", ["/brave", "/search.json"])
def test_no_fault_of_a_service_shows_the_key(tmp_path: Path, path: str) -> None:
    refused, _ = search(path, {"error": f"bad key {KEY}"}, status=401, query="x")
    entry = {"builtin": "web_search", "url": f"http://127.0.0.1:1{path}", "api_key_env": "K"}
    unreachable = once(tmp_path, entry, {"query": "x"}, env={**ENV, "K": KEY})
    assert "401" in refused.text
    for result in (refused, unreachable):
        assert result.error == "failed"
        assert KEY not in result.text


@pytest.mark.parametrize(
    ("url", "key_env", "env", "service"),
    [
        (None, None, {"BRAVE_API_KEY": "k"}, "brave"),
        (None, None, {"SERPAPI_API_KEY": "k"}, "serpapi"),
        (None, "MY_SERPAPI_KEY", {"MY_SERPAPI_KEY": "k"}, "serpapi"),
        ("https://serpapi.com/search", "K", {"K": "k"}, "serpapi"),
        ("http://127.0.0.1/x", "K", {"K": "k", "SERPAPI_KEY": "k"}, "brave"),
    ],
)
def test_the_service_is_told_by_address_key_name_or_key(
    url: str | None, key_env: str | None, env: dict[str, str], service: str
) -> None:
    config = search_config(url, key_env, env)
    assert (config.service, config.key) == (service, "k")
    assert "key='k'" not in repr(config)


def test_a_missing_key_is_found_before_the_run() -> None:
    with pytest.raises(UsageError, match="BRAVE_API_KEY or SERPAPI_API_KEY is not set"):
        search_config(None, None, {"BRAVE_API_KEY": ""})
    with pytest.raises(UsageError, match="MINE is not set"):
        search_config(None, "MINE", {"BRAVE_API_KEY": "k"})
