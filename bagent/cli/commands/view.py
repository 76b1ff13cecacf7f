"""``bagent view``."""

from __future__ import annotations

import asyncio
import html
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from bagent.cli.options import complete_run_names
from bagent.cli.process import log
from bagent.errors import UsageError

REDIRECT = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url={url}">\n'
)


def view(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run directory, or a name under runs; without it, all runs.",
            autocompletion=complete_run_names,
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int,
        typer.Option(
            "--port",
            min=0,
            max=65535,
            metavar="PORT",
            help="Listen on this port; 0 takes a free one.",
        ),
    ] = 0,
    browser: Annotated[
        bool, typer.Option("--browser", help="Open the page in the default browser.")
    ] = False,
) -> None:
    """Look at every row of a run in the browser.

    The page is read-only and served to this machine alone, at an address with a token. It shows
    totals, causes of failure, answers, prompts and transcripts, and follows a run that goes on.
    Ctrl-C ends it.

    Example: bagent view review
    """
    from bagent.store.run_dir import find_run
    from bagent.view.catalog import RunCatalog
    from bagent.view.server import serve

    runs = Path("runs")
    only = None if run is None else find_run(run, runs)

    def announce(url: str) -> None:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        log("serving the page above to this machine alone; Ctrl-C ends")
        if browser:
            _open_browser(url)

    try:
        asyncio.run(serve(RunCatalog(runs, only), port, announce))
    except KeyboardInterrupt:
        return
    except OSError as error:
        raise UsageError(
            f"cannot listen on port {port}: {os.strerror(error.errno or 0).lower()}",
            hint="--port 0 takes a free one",
        ) from None


def _open_browser(url: str) -> None:
    """Open a page by a private file that leads to it.

    Other users see the browser's command line, and the address holds the token.
    """
    import webbrowser

    from bagent.duck import private_folder

    path = private_folder() / "view.html"
    path.write_text(REDIRECT.format(url=html.escape(url)))
    path.chmod(0o600)
    webbrowser.open(path.as_uri())
