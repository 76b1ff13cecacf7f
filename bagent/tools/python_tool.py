"""Tools that are Python functions of the user."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from bagent.errors import Position, UsageError
from bagent.job.spec.paths import PythonFunction
from bagent.text.suggest import did_you_mean
from bagent.tools.python_schema import (
    ArgumentsFault,
    Signature,
    SignatureFault,
    read_docstring,
    read_signature,
    result_text,
)
from bagent.tools.threads import AbandonableThreads, EventLoopThread
from bagent.tools.types import Arguments, ToolFault, error_text
from bagent.types import Json


class _Import:
    """Context that turns any exception of an imported file into a UsageError."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, KeyboardInterrupt):
            return
        if isinstance(error, SyntaxError) and error.filename == str(self._file):
            at = Position(self._file, error.lineno or 0, error.offset or 0)
            raise UsageError(f"not Python: {error.msg}", at=at) from None
        lines = [
            frame.lineno or 0
            for frame in traceback.extract_tb(trace)
            if frame.filename == str(self._file)
        ]
        at = Position(self._file, lines[-1] if lines else 0)
        if isinstance(error, ModuleNotFoundError) and error.name:
            hint = f"pip install {error.name.partition('.')[0]}"
            raise UsageError(f"no module named {error.name}", hint=hint, at=at) from None
        raise UsageError(
            f"importing it fails: {type(error).__name__}: {error_text(error)}", at=at
        ) from None


class ModuleLoader:
    """Imports the Python files of one job, each once.

    A file's folder is at the end of ``sys.path`` while it is imported: it may import its
    neighbours, and these cannot hide an installed package.
    """

    def __init__(self) -> None:
        self._modules: dict[Path, ModuleType] = {}

    def load(self, file: Path) -> ModuleType:
        """Return the module of a file.

        Raises:
            UsageError: it is missing, or importing it fails.
        """
        if file in self._modules:
            return self._modules[file]
        if not file.is_file():
            raise UsageError(
                "no such file",
                at=Position(file),
                hint="write python: FILE.py:FUNCTION, with a path relative to the job",
            )
        name = f"bagent_tools_{file.stem}_{len(self._modules)}"
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise UsageError(
                "not a Python file", hint="name a file that ends with .py", at=Position(file)
            )
        module = importlib.util.module_from_spec(spec)
        folder = str(file.parent)
        added = folder not in sys.path
        if added:
            sys.path.append(folder)
        # Dataclasses and postponed annotations look up their module there.
        sys.modules[name] = module
        try:
            with _Import(file):
                spec.loader.exec_module(module)
        finally:
            if added:
                sys.path.remove(folder)
        self._modules[file] = module
        return module

    def function(self, reference: PythonFunction) -> Callable[..., Any]:
        """Return the function of a file.

        Raises:
            UsageError: there is none of that name.
        """
        file = reference.file.path
        module = self.load(file)
        function = getattr(module, reference.function, None)
        if not callable(function) or inspect.isclass(function):
            names = [
                name
                for name, value in vars(module).items()
                if callable(value) and not name.startswith("_")
            ]
            what = "no function" if function is None else "not a function:"
            raise UsageError(
                f"{what} {reference.function}",
                hint=did_you_mean(reference.function, names)
                or f"it has {' '.join(names) or 'none'}",
                at=Position(file),
            )
        return function  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class PythonTool:
    """A function as a tool.

    Attributes:
        function: what is called.
        signature: its parameters.
        description: the text of its docstring.
        threads: run it where it blocks.
        loops: run it where it is a coroutine function.
        batch: the list parameter whose items are gathered from several calls; empty: none.
        unique: whether an item of two calls in a batch is passed once.
    """

    function: Callable[..., Any]
    signature: Signature
    description: str
    threads: AbandonableThreads
    loops: EventLoopThread
    batch: str = ""
    unique: bool = True

    async def run(self, arguments: Arguments) -> str:
        """Call it and return its result as text, or raise its exception.

        Raises:
            ToolFault: its types refuse the arguments, or its result has no JSON form.
        """
        text: str = await self._call(arguments, result_text)
        return text

    async def _call(self, arguments: Arguments, made: Callable[[Any], Any]) -> Any:
        """Call it, and apply ``made`` to its result in the same thread."""

        def bound() -> tuple[list[Any], dict[str, Any]]:
            try:
                return self.signature.bind(arguments)
            except ArgumentsFault as fault:
                message = f"the arguments do not fit: {fault}"
                raise ToolFault(message, "bad_arguments") from None

        def call() -> Any:
            positional, keywords = bound()
            result = self.function(*positional, **keywords)
            return result if inspect.iscoroutine(result) else made(result)

        async def call_async() -> Any:
            positional, keywords = bound()
            return made(await self.function(*positional, **keywords))

        if is_async(self.function):
            return await self.loops.run(call_async)
        answer = await self.threads.run(call)
        if not inspect.iscoroutine(answer):
            return answer
        # A decorator may hide that what it wraps is a coroutine function.

        async def finished() -> Any:
            return made(await answer)

        return await self.loops.run(finished)

    async def run_many(self, calls: Sequence[Arguments]) -> list[str | ToolFault]:
        """Answer several calls by one.

        The function gets the items of all calls in one list, and returns a list with a result for
        each item, in order, or a mapping from item to result.

        Raises:
            ToolFault: the result is neither, or as :meth:`run`.
        """
        answers: list[str | ToolFault] = [""] * len(calls)
        for indexes in _alike(calls, self.batch):
            try:
                parts = await self._call_together([calls[index] for index in indexes])
            except ToolFault as fault:
                for index in indexes:
                    answers[index] = fault
            else:
                for index, part in zip(indexes, parts, strict=True):
                    answers[index] = part
        return answers

    async def _call_together(self, calls: Sequence[Arguments]) -> list[str]:
        """Return the answers to calls that differ only in their lists."""
        items: list[Json] = [item for call in calls for item in call[self.batch]]
        if self.unique:
            items = list({_name(item): item for item in items}.values())
        results = await self._call(
            {**calls[0], self.batch: items}, lambda result: _by_item(result, items)
        )
        if not self.unique:
            remaining = iter(results)
            return [result_text([next(remaining) for _ in call[self.batch]]) for call in calls]
        by_name = dict(zip(map(_name, items), results, strict=True))
        return [result_text([by_name[_name(item)] for item in call[self.batch]]) for call in calls]


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calling ``function`` makes a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 (its kind matters)
    )


def read_function(
    files: ModuleLoader, reference: PythonFunction
) -> tuple[Callable[..., Any], Signature, str]:
    """Return a function, its parameters and its description.

    Raises:
        UsageError: it is missing, or cannot be a tool.
    """
    function = files.function(reference)
    described = read_docstring(inspect.getdoc(function))
    try:
        signature = read_signature(function, described.parameters)
    except SignatureFault as fault:
        code = getattr(inspect.unwrap(function), "__code__", None)
        at = Position(reference.file.path, code.co_firstlineno if code else 0)
        raise UsageError(
            f"{reference.function} cannot be a tool: {fault}",
            hint="annotate every parameter with a type that has a JSON form",
            at=at,
        ) from None
    return function, signature, described.text


def _by_item(result: Any, items: list[Json]) -> list[Any]:
    """Return one result for each item."""
    if isinstance(result, dict):
        named = {_name(key): value for key, value in result.items()}
        by_text = {str(key): value for key, value in result.items()}
        return [named.get(_name(item), by_text.get(str(item))) for item in items]
    if isinstance(result, list | tuple) and len(result) == len(items):
        return list(result)
    raise ToolFault(
        f"it was given {len(items)} items and must give back as many results in a list, or a"
        " mapping from item to result"
    )


def _alike(calls: Sequence[Arguments], batch: str) -> list[list[int]]:
    """Group the indexes of calls that are equal but for the gathered list."""
    groups: dict[str, list[int]] = {}
    for index, call in enumerate(calls):
        common = {name: value for name, value in sorted(call.items()) if name != batch}
        groups.setdefault(_name(common), []).append(index)
    return list(groups.values())


def _name(value: Any) -> str:
    """Return a text that is equal for equal items, hashable or not."""
    return value if isinstance(value, str) else f"\0{result_text(value)}"
