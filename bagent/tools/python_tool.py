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
    """Turns whatever a file raises while it is imported into an error for people."""

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
    """The imported files of one job: each is imported once.

    A file's folder is put at the end of ``sys.path`` while it is imported, so that it may import
    its neighbours, and these cannot hide an installed package.
    """

    def __init__(self) -> None:
        self._modules: dict[Path, ModuleType] = {}

    def load(self, file: Path) -> ModuleType:
        """The module of a file.

        Raises:
            UsageError: it is missing, or importing it fails; with the place in it.
        """
        if file in self._modules:
            return self._modules[file]
        if not file.is_file():
            raise UsageError("no such file", at=Position(file))
        name = f"bagent_tools_{file.stem}_{len(self._modules)}"
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise UsageError("not a Python file", hint="its name ends with .py", at=Position(file))
        module = importlib.util.module_from_spec(spec)
        folder = str(file.parent)
        added = folder not in sys.path
        if added:
            sys.path.append(folder)
        # Where dataclasses and postponed annotations look for the names of their module.
        sys.modules[name] = module
        try:
            with _Import(file):
                spec.loader.exec_module(module)
        finally:
            if added:
                sys.path.remove(folder)
        self._modules[file] = module
        return module

    def function(self, place: PythonFunction) -> Callable[..., Any]:
        """The function of a file.

        Raises:
            UsageError: there is none of that name.
        """
        file = place.file.path
        module = self.load(file)
        found = getattr(module, place.function, None)
        if not callable(found) or inspect.isclass(found):
            names = [
                name
                for name, value in vars(module).items()
                if callable(value) and not name.startswith("_")
            ]
            what = "no function" if found is None else "not a function:"
            raise UsageError(
                f"{what} {place.function}",
                hint=did_you_mean(place.function, names) or f"it has {' '.join(names) or 'none'}",
                at=Position(file),
            )
        return found  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class PythonTool:
    """A function as a tool.

    Attributes:
        function: what is called.
        signature: its parameters.
        description: the text of its docstring.
        batch: the list parameter whose items are gathered from several calls; empty: none.
        unique: in a batch, an item that two calls ask for is asked once.
    """

    function: Callable[..., Any]
    signature: Signature
    description: str
    threads: AbandonableThreads
    loops: EventLoopThread
    batch: str = ""
    unique: bool = True

    async def run(self, arguments: Arguments) -> str:
        """What it returns, as text.

        Raises:
            ToolFault: its types refuse the arguments, or its result has no JSON form.
            whatever it raises.
        """
        text: str = await self._call(arguments, result_text)
        return text

    async def _call(self, arguments: Arguments, made: Callable[[Any], Any]) -> Any:
        """Call it, and make something of its result where it ran."""

        def bound() -> tuple[list[Any], dict[str, Any]]:
            try:
                return self.signature.bind(arguments)
            except ArgumentsFault as fault:
                words = f"the arguments do not fit: {fault}"
                raise ToolFault(words, "bad_arguments") from None

        def call() -> Any:
            places, names = bound()
            result = self.function(*places, **names)
            return result if inspect.iscoroutine(result) else made(result)

        async def call_async() -> Any:
            places, names = bound()
            return made(await self.function(*places, **names))

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
        """The parts of one result that belong to each of several calls.

        The function gets the items of all calls in one list, and gives back a list with a result
        for each item, in their order, or a mapping from item to result.

        Raises:
            as :meth:`run`; ToolFault: the result is neither.
        """
        answers: list[str | ToolFault] = [""] * len(calls)
        for places in _alike(calls, self.batch):
            try:
                parts = await self._call_together([calls[place] for place in places])
            except ToolFault as fault:
                for place in places:
                    answers[place] = fault
            else:
                for place, part in zip(places, parts, strict=True):
                    answers[place] = part
        return answers

    async def _call_together(self, calls: Sequence[Arguments]) -> list[str]:
        """The answers to calls that differ in their lists alone."""
        items: list[Json] = [item for call in calls for item in call[self.batch]]
        if self.unique:
            items = list({_name(item): item for item in items}.values())
        results = await self._call(
            {**calls[0], self.batch: items}, lambda result: _by_item(result, items)
        )
        if not self.unique:
            given = iter(results)
            return [result_text([next(given) for _ in call[self.batch]]) for call in calls]
        known = dict(zip(map(_name, items), results, strict=True))
        return [result_text([known[_name(item)] for item in call[self.batch]]) for call in calls]


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it makes a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 (its kind is asked, not whether it is)
    )


def read_function(
    files: ModuleLoader, place: PythonFunction
) -> tuple[Callable[..., Any], Signature, str]:
    """A function, its parameters and its description.

    Raises:
        UsageError: it is missing, or cannot be a tool; with the place of the function.
    """
    function = files.function(place)
    described = read_docstring(inspect.getdoc(function))
    try:
        signature = read_signature(function, described.parameters)
    except SignatureFault as fault:
        code = getattr(inspect.unwrap(function), "__code__", None)
        at = Position(place.file.path, code.co_firstlineno if code else 0)
        raise UsageError(
            f"{place.function} cannot be a tool: {fault}",
            hint="annotate every parameter with a type that has a JSON form",
            at=at,
        ) from None
    return function, signature, described.text


def _by_item(result: Any, items: list[Json]) -> list[Any]:
    """One result for each item."""
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
    """The places of calls that are equal but for the gathered list."""
    groups: dict[str, list[int]] = {}
    for place, call in enumerate(calls):
        rest = {name: value for name, value in sorted(call.items()) if name != batch}
        groups.setdefault(_name(rest), []).append(place)
    return list(groups.values())


def _name(value: Any) -> str:
    """Equal for equal items, whether they can be hashed or not."""
    return value if isinstance(value, str) else f"\0{result_text(value)}"
