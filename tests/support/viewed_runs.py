"""The pages of ``bagent view`` over runs that a test made, read as a person would read them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from bagent.store.run_dir import RunDir
from bagent.view.catalog import RunCatalog
from bagent.view.server import view_app
from support.report_pages import Reader, read

TOKEN = "token-of-the-test"


class Viewer:
    """Asks a server for pages.

    Args:
        client: sends its requests.
        run: the run whose pages :meth:`page` reads.
    """

    def __init__(self, client: TestClient[web.Request, web.Application], run: str) -> None:
        self.client = client
        self.run = run

    async def text(self, path: str, *pairs: tuple[str, str], status: int = 200) -> str:
        """Return the body of an address below the token."""
        query = f"?{urlencode(pairs)}" if pairs else ""
        async with self.client.get(f"/{TOKEN}/{path}{query}") as response:
            assert response.status == status, await response.text()
            return await response.text()

    async def page(self, path: str, *pairs: tuple[str, str]) -> Reader:
        """Return a page of the run; fails where tags do not close in order."""
        return read(await self.text(f"run/{self.run}/{path}", *pairs))

    async def row(self, key: list[Any], *pairs: tuple[str, str]) -> str:
        """Return the text of the page of a row."""
        text = msgspec.json.encode(key).decode()
        return words(await self.page("row", ("key", text), *pairs))


def words(page: Reader) -> str:
    """Return all text of a page with single blanks."""
    return " ".join(" ".join(page.sections.values()).split())


@asynccontextmanager
async def viewing(folder: Path, run: str = "job", *, only: bool = False) -> AsyncIterator[Viewer]:
    """Serve the runs below ``folder``, or one of them alone."""
    catalog = RunCatalog(folder, RunDir(folder / run) if only else None)
    app = view_app(catalog, TOKEN, "127.0.0.1")
    async with TestClient(TestServer(app)) as client:
        yield Viewer(client, run)
