"""The tools that come with bagent, opened with what the job allows them."""

from __future__ import annotations

import glob
from collections.abc import Callable
from pathlib import Path

from bagent.errors import UsageError
from bagent.job.spec.agent import RUNS_CODE, ToolSpec
from bagent.job.spec.paths import ResolvedPath
from bagent.tools.builtin import code, http_get, read_file, web_search
from bagent.tools.builtin.code import Code
from bagent.tools.builtin.host_allowlist import HostAllowlist
from bagent.tools.builtin.http_get import HttpGet
from bagent.tools.builtin.read_file import ReadFile
from bagent.tools.builtin.sql import WORDS, Sql, SqlConfig, table_name
from bagent.tools.builtin.web_search import WebSearch, search_config
from bagent.tools.factory import ToolContext, load_schema, make_tool, tool_environment
from bagent.tools.threads import AbandonableThreads
from bagent.tools.types import Tool


def open_builtin(spec: ToolSpec, room: ToolContext) -> Tool:
    """Open a built-in tool.

    Raises:
        UsageError: what it needs is not said, or is not there.
    """
    assert spec.builtin is not None
    opener = _OPENERS.get(spec.builtin)
    if opener is None:
        known = " ".join(_OPENERS)
        raise UsageError(f"there is no built-in tool {spec.builtin}", hint=f"there are {known}")
    if spec.builtin in RUNS_CODE and not room.allow_code:
        raise UsageError(
            f"{spec.builtin} runs code that a model wrote", hint="allow_code: true in agent:"
        )
    return opener(spec, room)


def _http_get(spec: ToolSpec, room: ToolContext) -> Tool:
    if not spec.allow_hosts:
        raise UsageError("http_get needs allow_hosts", hint='hosts, or "*" for every public one')
    try:
        hosts = HostAllowlist.read(spec.allow_hosts)
    except ValueError as error:
        raise UsageError(
            f"http_get: allow_hosts: {error} is no host",
            hint="example.org, *.example.org, 10.0.0.0/8, localhost:8080",
        ) from None
    threads = _threads("http_get", room)
    tool = HttpGet(hosts, threads)
    room.stack.push_async_callback(tool.close)
    schema = load_schema(http_get.SCHEMA, room.base, "http_get")
    words = f"{http_get.WORDS} Hosts that may be asked: {hosts}."
    name = spec.name or "http_get"
    return make_tool(spec, name, words, schema, tool.run, side_effects=False, keeps=True)


def _read_file(spec: ToolSpec, room: ToolContext) -> Tool:
    if spec.root is None:
        raise UsageError("read_file needs root", hint="root: FOLDER")
    _check_folder(spec.root, "read_file")
    threads = _threads("read_file", room)
    tool = ReadFile(spec.root.path, threads)
    schema = load_schema(read_file.SCHEMA, room.base, "read_file")
    name = spec.name or "read_file"
    return make_tool(spec, name, read_file.WORDS, schema, tool.run, side_effects=False)


def _web_search(spec: ToolSpec, room: ToolContext) -> Tool:
    tool = WebSearch(search_config(spec.url, spec.api_key_env, room.env))
    room.stack.push_async_callback(tool.close)
    schema = load_schema(web_search.SCHEMA, room.base, "web_search")
    name = spec.name or "web_search"
    words = web_search.WORDS
    return make_tool(spec, name, words, schema, tool.run, side_effects=False, keeps=True)


def _sql(spec: ToolSpec, room: ToolContext) -> Tool:
    if (spec.database is None) == (not spec.files):
        raise UsageError("sql needs either database or files", hint="database: FILE.duckdb")
    if spec.database is not None and not spec.database.path.is_file():
        raise UsageError(f"sql: no such file: {spec.database}")
    if spec.batch and not spec.query:
        raise UsageError("sql: batch needs a query", hint=f"query: SELECT ... IN ${spec.batch}")
    threads = _threads("sql", room)
    config = SqlConfig(
        spec.database.path if spec.database else None,
        _tables(spec),
        spec.query or "",
        spec.batch or "",
    )
    tool = Sql(config, threads)
    room.stack.callback(tool.close)
    return make_tool(
        spec,
        spec.name or "sql",
        WORDS,
        load_schema(tool.schema, room.base, "sql"),
        tool.run,
        side_effects=False,
        keeps=True,
        run_many=tool.run_many if spec.batch else None,
        abandoned=lambda: threads.abandoned,
    )


def _tables(spec: ToolSpec) -> dict[str, list[Path]]:
    tables: dict[str, list[Path]] = {}
    for place in spec.files:
        found = sorted(glob.glob(place.path, recursive=True)) if place.is_glob else [place.path]  # noqa: PTH207
        paths = [Path(path) for path in found if Path(path).is_file()]
        if not paths:
            raise UsageError(f"sql: no such file: {place.text}")
        name = table_name(place.text if place.is_glob else place.path)
        if name in tables:
            raise UsageError(f"sql: two tables would be named {name}", hint="use one glob for both")
        tables[name] = paths
    return tables


def _code(
    argument: str, schema: dict[str, object], words: str
) -> Callable[[ToolSpec, ToolContext], Tool]:
    def opened(spec: ToolSpec, room: ToolContext) -> Tool:
        name = spec.name or spec.builtin or argument
        if spec.root is not None:
            _check_folder(spec.root, name)
        env = tool_environment(room.env, {})
        for own in ("HOME", "TMPDIR"):
            env.pop(own, None)
        root = spec.root.path if spec.root else None
        tool = Code(argument, root, room.scratch, {**env, **spec.env})
        return make_tool(spec, name, words, load_schema(schema, room.base, name), tool.run)

    return opened


def _threads(name: str, room: ToolContext) -> AbandonableThreads:
    threads = AbandonableThreads(name)
    room.stack.callback(threads.close)
    return threads


def _check_folder(root: ResolvedPath, name: str) -> None:
    if not root.path.is_dir():
        raise UsageError(f"{name}: root: no such folder: {root}")


_OPENERS: dict[str, Callable[[ToolSpec, ToolContext], Tool]] = {
    "http_get": _http_get,
    "read_file": _read_file,
    "web_search": _web_search,
    "sql": _sql,
    "python_eval": _code("code", code.PYTHON_SCHEMA, code.PYTHON_WORDS),
    "shell": _code("command", code.SHELL_SCHEMA, code.SHELL_WORDS),
}
