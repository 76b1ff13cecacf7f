"""The loader of built-in tools."""

from __future__ import annotations

import glob
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bagent.errors import UsageError
from bagent.job.spec.agent import RUNS_CODE, ToolSpec
from bagent.job.spec.paths import ResolvedPath
from bagent.tools.builtin import code, http_get, read_file, web_search
from bagent.tools.builtin.code import Code
from bagent.tools.builtin.host_allowlist import HostAllowlist
from bagent.tools.builtin.http_get import HttpGet
from bagent.tools.builtin.read_file import ReadFile
from bagent.tools.builtin.sql import DESCRIPTION, Sql, SqlConfig, table_name
from bagent.tools.builtin.web_search import WebSearch, search_config
from bagent.tools.factory import ToolContext, load_schema, make_tool, tool_environment
from bagent.tools.threads import AbandonableThreads
from bagent.tools.types import Tool


def open_builtin(spec: ToolSpec, context: ToolContext) -> Tool:
    """Open a built-in tool.

    Raises:
        UsageError: something that it needs is not set, or does not exist.
    """
    assert spec.builtin is not None
    opener = _OPENERS.get(spec.builtin)
    if opener is None:
        names = " ".join(_OPENERS)
        raise UsageError(f"there is no built-in tool {spec.builtin}", hint=f"there are {names}")
    if spec.builtin in RUNS_CODE and not context.allow_code:
        raise UsageError(
            f"{spec.builtin} runs code that a model wrote",
            hint="write allow_code: true under agent: if you want that",
        )
    return opener(spec, context)


def _http_get(spec: ToolSpec, context: ToolContext) -> Tool:
    if not spec.allow_hosts:
        raise UsageError("http_get needs allow_hosts", hint='hosts, or "*" for every public one')
    try:
        hosts = HostAllowlist.read(spec.allow_hosts)
    except ValueError as error:
        raise UsageError(
            f"http_get: allow_hosts: {error} is no host",
            hint="example.org, *.example.org, 10.0.0.0/8, localhost:8080",
        ) from None
    threads = _threads("http_get", context)
    tool = HttpGet(hosts, threads)
    context.stack.push_async_callback(tool.close)
    schema = load_schema(http_get.SCHEMA, context.base, "http_get")
    description = f"{http_get.DESCRIPTION} Hosts that may be asked: {hosts}."
    name = spec.name or "http_get"
    return make_tool(spec, name, description, schema, tool.run, side_effects=False, keeps=True)


def _read_file(spec: ToolSpec, context: ToolContext) -> Tool:
    if spec.root is None:
        raise UsageError("read_file needs root", hint="write root: FOLDER")
    _check_folder(spec.root, "read_file")
    threads = _threads("read_file", context)
    tool = ReadFile(spec.root.path, threads)
    schema = load_schema(read_file.SCHEMA, context.base, "read_file")
    name = spec.name or "read_file"
    return make_tool(spec, name, read_file.DESCRIPTION, schema, tool.run, side_effects=False)


def _web_search(spec: ToolSpec, context: ToolContext) -> Tool:
    tool = WebSearch(search_config(spec.url, spec.api_key_env, context.env))
    context.stack.push_async_callback(tool.close)
    schema = load_schema(web_search.SCHEMA, context.base, "web_search")
    name = spec.name or "web_search"
    description = web_search.DESCRIPTION
    return make_tool(spec, name, description, schema, tool.run, side_effects=False, keeps=True)


def _sql(spec: ToolSpec, context: ToolContext) -> Tool:
    if (spec.database is None) == (not spec.files):
        raise UsageError(
            "sql needs either database or files",
            hint="write database: FILE.duckdb, or files: [FILE]",
        )
    if spec.database is not None and not spec.database.path.is_file():
        raise UsageError(f"sql: no such file: {spec.database}", hint="check database: in the job")
    if spec.batch and not spec.query:
        raise UsageError("sql: batch needs a query", hint=f"query: SELECT ... IN ${spec.batch}")
    threads = _threads("sql", context)
    config = SqlConfig(
        spec.database.path if spec.database else None,
        _tables(spec),
        spec.query or "",
        spec.batch or "",
    )
    tool = Sql(config, threads)
    context.stack.callback(tool.close)
    schema, name = load_schema(tool.schema, context.base, "sql"), spec.name or "sql"
    opened = make_tool(spec, name, DESCRIPTION, schema, tool.run, side_effects=False, keeps=True)
    run_many = tool.run_many if spec.batch else None
    return replace(opened, run_many=run_many, abandoned=lambda: threads.abandoned)


def _tables(spec: ToolSpec) -> dict[str, list[Path]]:
    tables: dict[str, list[Path]] = {}
    for source in spec.files:
        matches = [source.path]
        if source.is_glob:
            matches = sorted(glob.glob(source.path, recursive=True))  # noqa: PTH207
        paths = [Path(path) for path in matches if Path(path).is_file()]
        if not paths:
            raise UsageError(f"sql: no such file: {source.text}", hint="check files: in the job")
        name = table_name(source.text if source.is_glob else source.path)
        if name in tables:
            raise UsageError(f"sql: two tables would be named {name}", hint="use one glob for both")
        tables[name] = paths
    return tables


def _code(
    argument: str, schema: dict[str, object], description: str
) -> Callable[[ToolSpec, ToolContext], Tool]:
    def opened(spec: ToolSpec, context: ToolContext) -> Tool:
        name = spec.name or spec.builtin or argument
        if spec.root is not None:
            _check_folder(spec.root, name)
        env = tool_environment(context.env, {})
        for own in ("HOME", "TMPDIR"):
            env.pop(own, None)
        root = spec.root.path if spec.root else None
        tool = Code(argument, root, context.scratch, {**env, **spec.env})
        return make_tool(spec, name, description, load_schema(schema, context.base, name), tool.run)

    return opened


def _threads(name: str, context: ToolContext) -> AbandonableThreads:
    threads = AbandonableThreads(name)
    context.stack.callback(threads.close)
    return threads


def _check_folder(root: ResolvedPath, name: str) -> None:
    if not root.path.is_dir():
        raise UsageError(
            f"{name}: root: no such folder: {root}", hint="write root: with an existing folder"
        )


_OPENERS: dict[str, Callable[[ToolSpec, ToolContext], Tool]] = {
    "http_get": _http_get,
    "read_file": _read_file,
    "web_search": _web_search,
    "sql": _sql,
    "python_eval": _code("code", code.PYTHON_SCHEMA, code.PYTHON_DESCRIPTION),
    "shell": _code("command", code.SHELL_SCHEMA, code.SHELL_DESCRIPTION),
}
