"""The loader of a job's tools: built-in ones, Python functions, programs and MCP servers."""

from __future__ import annotations

import asyncio
import glob
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from bagent.errors import Position, UsageError
from bagent.job.spec.agent import RUNS_CODE, ToolSpec
from bagent.job.spec.paths import ResolvedPath
from bagent.redaction import NO_SECRETS, Redactor
from bagent.tools.builtin import code, http_get, read_file, web_search
from bagent.tools.builtin.code import Code
from bagent.tools.builtin.http_get import HostAllowlist, HttpGet
from bagent.tools.builtin.read_file import ReadFile
from bagent.tools.builtin.sql import DESCRIPTION, Sql, SqlConfig, table_name
from bagent.tools.builtin.web_search import WebSearch, search_config
from bagent.tools.command_tool import (
    CLAUDE_CODE,
    CLAUDE_CODE_ARGV,
    CLAUDE_CODE_DESCRIPTION,
    CLAUDE_CODE_SCHEMA,
    CommandTool,
    places_schema,
)
from bagent.tools.executor import ToolExecutor
from bagent.tools.mcp import McpConfig, McpServer, McpTool
from bagent.tools.python_tool import ModuleLoader, PythonTool, read_function
from bagent.tools.threads import AbandonableThreads, EventLoopThread
from bagent.tools.types import (
    Arguments,
    Tool,
    ToolContext,
    load_schema,
    make_policy,
    make_tool,
    tool_environment,
)

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

_CHOOSE = "name those to be offered: mcp: {command: [...], tools: [...]}, or url: for command:"
"""The hint for tools of an MCP server, where ``name:`` is only a prefix."""


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


@asynccontextmanager
async def open_tools(
    specs: Sequence[ToolSpec],
    base: Path,
    env: Mapping[str, str],
    *,
    allow_code: bool = False,
    places: Sequence[Position] = (),
    redact: Redactor = NO_SECRETS,
) -> AsyncIterator[ToolExecutor]:
    """Check and open the tools of a job; on exit they are closed and their processes ended.

    Args:
        specs: the tools.
        base: the job's folder, where commands run and relative paths start.
        env: the environment of the run; tools get its ordinary variables, and what they name.
        allow_code: whether ``python_eval`` and ``shell`` are allowed.
        places: the position of each of ``specs`` in the job file, for messages.
        redact: masks secrets in the errors of tools.

    Raises:
        UsageError: a tool cannot be opened, or two have one name; nothing stays open.
        MissingPackage: a tool needs a package that is not installed.
    """
    async with AsyncExitStack() as stack:
        scratch = Path(tempfile.mkdtemp(prefix="bagent-tools-"))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        context = ToolContext(base, env, scratch, stack, allow_code)
        opener = _Opener(context)
        # Servers start in parallel: each may take a second or more.
        positions: Sequence[Position | None] = places or [None] * len(specs)
        opened = await _all_opened(opener, specs, positions)
        pool = ToolExecutor(_distinct(opened, specs, positions), redact=redact)
        stack.push_async_callback(pool.close)
        yield pool


async def _all_opened(
    opener: _Opener, specs: Sequence[ToolSpec], places: Sequence[Position | None]
) -> list[list[Tool]]:
    works = [_opened(opener, spec, at) for spec, at in zip(specs, places, strict=True)]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _opened(opener: _Opener, spec: ToolSpec, at: Position | None) -> list[Tool]:
    try:
        return await opener.open(spec)
    except UsageError as error:
        if error.at is None:
            error.at = at
        raise


def _distinct(
    opened: list[list[Tool]], specs: Sequence[ToolSpec], places: Sequence[Position | None]
) -> list[Tool]:
    """Return all tools; their names must be valid and unique."""
    tools_by_name: dict[str, Tool] = {}
    for tools, spec, at in zip(opened, specs, places, strict=True):
        own: set[str] = set()
        for tool in tools:
            if not _NAME.fullmatch(tool.name):
                raise UsageError(
                    f"tool name {tool.name!r}: servers take letters, digits, _ and -, at most 64",
                    hint=_CHOOSE if spec.mcp is not None else "give it another name:",
                    at=at,
                )
            if tool.name in tools_by_name:
                message = f"two tools are named {tool.name}"
                hint = _CHOOSE if tool.name in own else "give one another name:"
                raise UsageError(message, hint=hint, at=at)
            tools_by_name[tool.name] = tool
            own.add(tool.name)
    return list(tools_by_name.values())


@dataclass
class _Opener:
    """Opens tools; each file of functions is imported once."""

    context: ToolContext
    files: ModuleLoader = field(default_factory=ModuleLoader)
    loops: dict[Path, EventLoopThread] = field(default_factory=dict)

    async def open(self, spec: ToolSpec) -> list[Tool]:
        """Open the tools of one entry: several of an MCP server, else one."""
        if spec.mcp is not None:
            return await self._mcp(spec)
        if spec.builtin is not None:
            return [open_builtin(spec, self.context)]
        if spec.python is not None:
            return [self._python(spec)]
        return [self._command(spec)]

    def _python(self, spec: ToolSpec) -> Tool:
        assert spec.python is not None
        function, signature, description = read_function(self.files, spec.python)
        name = spec.name or spec.python.function
        if spec.batch and spec.batch not in signature.lists:
            raise UsageError(
                f"{name}: batch: {spec.batch} is no parameter of {spec.python} that is a list",
                hint=f"its lists: {' '.join(sorted(signature.lists)) or 'none'}",
            )
        threads = AbandonableThreads(name)
        self.context.stack.callback(threads.close)
        loops = self._loops_of(spec.python.file.path)
        policy = make_policy(spec, side_effects=True)
        run = PythonTool(
            function, signature, description, threads, loops, spec.batch or "", policy.coalesce
        )
        schema = load_schema(signature.schema, self.context.base, name)
        return replace(
            make_tool(spec, name, description, schema, run.run),
            run_many=run.run_many if spec.batch else None,
            abandoned=lambda: threads.abandoned + loops.abandoned,
        )

    def _loops_of(self, file: Path) -> EventLoopThread:
        """Return the event loop of one file's functions, which may share clients and locks."""
        if file not in self.loops:
            self.loops[file] = EventLoopThread(file.stem)
            self.context.stack.callback(self.loops[file].close)
        return self.loops[file]

    def _command(self, spec: ToolSpec) -> Tool:
        preset = spec.command == CLAUDE_CODE
        argv = CLAUDE_CODE_ARGV if preset else spec.command
        name = spec.name or argv[0]
        if preset:
            name = spec.name or CLAUDE_CODE[0]
        base = self.context.base
        environment = tool_environment(self.context.env, spec.env)
        parameters = spec.parameters
        if parameters is None:
            parameters = CLAUDE_CODE_SCHEMA if preset else places_schema(argv)
        schema = load_schema(parameters, base, name)
        program = find_program(argv[0], base, environment)
        command = CommandTool(
            (program, *argv[1:]),
            frozenset(schema.document.get("properties", {})),
            base,
            environment,
            prompt="prompt" if preset and spec.parameters is None else "",
            strip_preamble=spec.strip_preamble,
        )
        description = CLAUDE_CODE_DESCRIPTION if preset else ""
        return make_tool(spec, name, description, schema, command.run)

    async def _mcp(self, spec: ToolSpec) -> list[Tool]:
        assert spec.mcp is not None
        mcp, base = spec.mcp, self.context.base
        environment = tool_environment(self.context.env, {**spec.env, **mcp.env})
        command = mcp.command
        if command:
            command = (find_program(command[0], base, environment), *command[1:])
        server = McpServer(McpConfig(mcp.url, mcp.headers, command, environment, base))
        self.context.stack.push_async_callback(server.close)
        listed = await server.open()
        if mcp.tools is not None:
            names = {tool.name for tool in listed}
            missing = [name for name in mcp.tools if name not in names]
            if missing:
                raise UsageError(
                    f"mcp: {server.config.label} has no tool {missing[0]}",
                    hint=f"it has {' '.join(sorted(names))}",
                )
            listed = [tool for tool in listed if tool.name in mcp.tools]
        return [self._mcp_tool(spec, server, tool) for tool in listed]

    def _mcp_tool(self, spec: ToolSpec, server: McpServer, tool: McpTool) -> Tool:
        async def run(arguments: Arguments) -> str:
            return await server.call(tool.name, arguments, again=tool.reads_only)

        # Names of MCP tools may hold dots and slashes; names of functions may not.
        name = re.sub(r"[^A-Za-z0-9_-]", "_", tool.name)
        if spec.name:
            name = f"{spec.name}_{name}"
        # A schema from a server must not refer to files of the job.
        try:
            schema = load_schema(tool.parameters, self.context.scratch, name)
        except UsageError as error:
            error.hint = _CHOOSE
            raise
        return make_tool(
            spec, name, tool.description, schema, run, side_effects=not tool.reads_only
        )


def find_program(word: str, base: Path, env: Mapping[str, str]) -> str:
    """Find the program that ``word`` names: a path relative to ``base``, or a name in ``PATH``.

    Raises:
        UsageError: there is none that can be run.
    """
    path = str(base / word) if "/" in word else word
    program = shutil.which(path, path=env.get("PATH", ""))
    if program is None:
        is_there = "/" in word and Path(path).exists()
        hint = f"chmod +x {word}" if is_there else "is it installed and in PATH?"
        raise UsageError(f"cannot run {word}: {'no' if is_there else 'no such'} program", hint=hint)
    return program
