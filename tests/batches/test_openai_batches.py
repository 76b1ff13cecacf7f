"""Rows through OpenAI's batches, in every state that a batch can take."""

from __future__ import annotations

import asyncio
from pathlib import Path

from batches.support_runs import Options, row, run_rows, served
from batches.support_services import OpenAIServer


def go(folder: Path, server: OpenAIServer, count: int, options: Options | None = None):
    async def main():
        async with served(server) as url:
            return await run_rows(folder, url, [row(n) for n in range(count)], options)

    return asyncio.run(main())


def test_rows_go_in_one_file_and_come_back_judged(tmp_path: Path) -> None:
    server = OpenAIServer()
    run = go(tmp_path, server, 5)
    assert run.error is None, run.error
    assert {line["status"] for line in run.lines} == {"ok"}
    assert server.complaints == []
