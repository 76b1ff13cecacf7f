"""Single-point changes of bagent's source: drawn by a seed, and located again in later code."""

from __future__ import annotations

import ast
import functools
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import NamedTuple

AREAS: dict[str, tuple[int, str]] = {
    "retry and failures": (
        12,
        "backends/http/retry_after backends/failures fleet/fleet fleet/health"
        " fleet/exchanges fleet/retry fleet/tail_latency runs/deadline",
    ),
    "limits and pacing": (
        13,
        "fleet/context_length fleet/limits/account fleet/limits/concurrency"
        " fleet/limits/load_feedback fleet/queue",
    ),
    "scheduling": (
        13,
        "fleet/batch_size fleet/call fleet/endpoint_state fleet/fleet"
        " fleet/health_check fleet/leases fleet/prefix_affinity fleet/queue"
        " fleet/scheduler fleet/state",
    ),
    "journal": (
        16,
        "store/journal/codec store/journal/done_index store/journal/edited_rows"
        " store/journal/journal store/journal/reader store/journal/segment_index"
        " store/journal/segments store/journal/supersession store/lock store/results"
        " store/run_dir",
    ),
    "rows": (
        12,
        "rows/discovery rows/filter rows/formats/csv rows/formats/json"
        " rows/reader rows/resume_cache rows/row_keys rows/stdin",
    ),
    "answers": (
        12,
        "answers/evaluate answers/extract answers/reasoning answers/messages"
        " answers/schema/bundle answers/schema/dialects"
        " answers/schema/schema text/unicode",
    ),
    "exit codes": (
        6,
        "cli/app library/run runs/parallel/parsl runs/parallel/workers runs/shutdown",
    ),
    "hostfile": (6, "files fleet/hostfile servers/host_selection"),
    "resume": (
        10,
        "observe/counters runs/context runs/execute runs/parallel/parsl runs/plan"
        " runs/run_store runs/session servers/startup_probe store/journal/done_index"
        " store/journal/reader store/tables/row_feed",
    ),
}
"""Number of mutants of each area, and the modules that they are made in."""

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: (r"is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: (r"in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
MESSAGES = re.compile(
    r"warn|notice|note_?for|log\b|print|complain|echo|describe|words|told|said|phrase|message|^gc\.",
    re.IGNORECASE,
)
"""Names of calls, functions and variables that are for people only, or for speed."""

ALIKE = 0.6
"""How much two texts must have in common, by difflib's ratio, to be the same lines changed."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Edit(NamedTuple):
    """Bytes ``start`` to ``end`` of a file replaced by ``text``."""

    start: int
    end: int
    text: str
    operator: str


@dataclass(frozen=True)
class Mutant:
    """A change of one function: whole lines, without the indentation that they share."""

    number: int
    area: str
    operator: str
    file: str
    function: str
    before: str
    after: str
    occurrence: int = 0


class Source:
    """A module: its bytes, where its lines start, its tree with parents."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = path.read_bytes()
        self.tree = ast.parse(self.data)
        self.starts = [0]
        for line in self.data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }
        self.functions = dict(self._functions(self.tree, ""))

    def _functions(self, node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "name", None)
            if isinstance(child, Function | ast.ClassDef):
                if isinstance(child, Function):
                    yield prefix + child.name, child
                yield from self._functions(child, f"{prefix}{name}.")
            elif isinstance(child, ast.stmt):
                yield from self._functions(child, prefix)

    def start(self, node: ast.expr | ast.stmt) -> int:
        """Return the offset of a node's first byte."""
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        """Return the offset behind a node's last byte."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def line(self, offset: int) -> int:
        """Return the line, from 0, that an offset lies in."""
        return sum(start <= offset for start in self.starts) - 1

    def text(self, node: ast.expr | ast.stmt) -> str:
        """Return a node's source."""
        return self.data[self.start(node) : self.end(node)].decode()

    def lines(self, function: Function) -> tuple[int, int]:
        """Return the first line of a function, from 0, and the one behind its last."""
        return function.lineno - 1, function.end_lineno or function.lineno


def edits(source: Source, function: Function) -> Iterator[Edit]:
    """Yield every change of a function's body that is worth trying."""
    stack: list[ast.AST] = list(reversed(function.body))
    while stack:
        node = stack.pop()
        if isinstance(node, Function | ast.ClassDef | ast.JoinedStr | ast.Assert | ast.Import):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Call) and MESSAGES.search(ast.unparse(node.func)):
            # A message's arguments may still hold an exit code.
            stack.extend(arg for arg in node.args if isinstance(arg, ast.Name | ast.IfExp))
            continue
        if isinstance(node, ast.Raise):
            yield Edit(source.start(node), source.end(node), "pass", "raise removed")
            continue
        if isinstance(node, ast.stmt):
            yield from _of_statement(source, node)
        elif isinstance(node, ast.expr):
            yield from _of_expression(source, node)
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.AnnAssign):
            children = [child for child in children if child is not node.annotation]
        stack.extend(reversed(children))


def _of_statement(source: Source, node: ast.stmt) -> Iterator[Edit]:
    start, end = source.start(node), source.end(node)
    if isinstance(node, ast.Expr):
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call) and not MESSAGES.search(ast.unparse(call.func)):
            waited = isinstance(node.value, ast.Await)
            yield Edit(start, end, "pass", "await removed" if waited else "call removed")
    elif isinstance(node, ast.AugAssign) and not MESSAGES.search(ast.unparse(node.target)):
        yield Edit(start, end, "pass", "assignment removed")
    elif isinstance(node, ast.Assign):
        if isinstance(node.targets[0], ast.Attribute | ast.Subscript):
            yield Edit(start, end, "pass", "assignment removed")
    elif isinstance(node, ast.Break):
        yield Edit(start, end, "continue", "break to continue")
    elif isinstance(node, ast.Continue):
        yield Edit(start, end, "break", "continue to break")
    elif isinstance(node, ast.If | ast.While):
        negated = f"not ({source.text(node.test)})"
        if not isinstance(node.test, ast.UnaryOp | ast.Compare | ast.Constant):
            yield Edit(source.start(node.test), source.end(node.test), negated, "condition negated")


def _of_expression(source: Source, node: ast.expr) -> Iterator[Edit]:
    start, end = source.start(node), source.end(node)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        old, new = COMPARISONS[type(node.ops[0])]
        yield from _gap(source, node.left, node.comparators[0], old, new, "comparison")
    elif isinstance(node, ast.BoolOp):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from _gap(source, left, right, rf"\b{old}\b", new, "and/or")
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield Edit(start, source.start(node.operand), "", "not removed")
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        if not re.search(r"['\"]|\bb?str\b|words|text", source.text(node)):
            old, new = (r"\+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
            yield from _gap(source, node.left, node.right, old, new, "arithmetic")
    elif isinstance(node, ast.Name) and node.id.startswith("EXIT_"):
        yield Edit(start, end, "76" if node.id == "EXIT_STOPPED" else "75", "exit code")
    elif isinstance(node, ast.Constant):
        yield from _of_constant(source, node)
    elif isinstance(node, ast.Call):
        yield from _of_call(source, node)


def _of_constant(source: Source, node: ast.Constant) -> Iterator[Edit]:
    start, end = source.start(node), source.end(node)
    returned = isinstance(source.parents[node], ast.Return)
    operator = "returned constant" if returned else "constant"
    if isinstance(node.value, bool):
        yield Edit(start, end, str(not node.value), operator)
    elif isinstance(node.value, int | float) and abs(node.value) < 1000:
        yield Edit(start, end, f"{node.value + 1}", operator)


def _of_call(source: Source, node: ast.Call) -> Iterator[Edit]:
    name = ast.unparse(node.func)
    if name in ("min", "max") and len(node.args) > 1:
        other = "max" if name == "min" else "min"
        yield Edit(source.start(node.func), source.end(node.func), other, "min/max")
    elif len(node.args) > 1 and name not in ("isinstance", "getattr", "hasattr", "cast"):
        first, second = node.args[0], node.args[1]
        if all(isinstance(arg, ast.Name | ast.Attribute) for arg in (first, second)):
            texts = source.text(first), source.text(second)
            swapped = f"{texts[1]}, {texts[0]}"
            yield Edit(source.start(first), source.end(second), swapped, "arguments swapped")


def _gap(
    source: Source, left: ast.expr, right: ast.expr, old: str, new: str, operator: str
) -> Iterator[Edit]:
    offset = source.end(left)
    match = re.search(old.encode(), source.data[offset : source.start(right)])
    if match is not None:
        yield Edit(offset + match.start(), offset + match.end(), new, operator)


def make(root: Path, seed: int) -> list[Mutant]:
    """Choose the mutants of every area by ``seed``; at most one of a function."""
    rng = random.Random(seed)
    chosen: list[Mutant] = []
    for area, (quota, modules) in AREAS.items():
        by_operator: dict[str, list[Mutant]] = defaultdict(list)
        for module in modules.split():
            for mutant in _candidates(root, f"bagent/{module}.py", area):
                if (mutant.operator == "exit code") == (area == "exit codes"):
                    by_operator[mutant.operator].append(mutant)
        taken: set[tuple[str, str]] = set()
        files: dict[str, int] = defaultdict(int)
        for candidates in by_operator.values():
            rng.shuffle(candidates)
        operators = sorted(by_operator)
        rng.shuffle(operators)
        while len(taken) < quota:
            for operator in operators:
                free = [m for m in by_operator[operator] if (m.file, m.function) not in taken]
                if free and len(taken) < quota:
                    # The files of an area in turns: a long one must not have all mutants.
                    mutant = min(free, key=lambda m: files[m.file])
                    files[mutant.file] += 1
                    taken.add((mutant.file, mutant.function))
                    chosen.append(mutant)
    return [Mutant(**{**vars(mutant), "number": i}) for i, mutant in enumerate(chosen)]


def _candidates(root: Path, file: str, area: str) -> Iterator[Mutant]:
    source = Source(root / file)
    for name, function in source.functions.items():
        if MESSAGES.search(function.name) or re.match(r"__(?!init)", function.name):
            continue
        returned = ast.unparse(function.returns).split(" | ") if function.returns else []
        if "str" in returned and any(isinstance(n, ast.JoinedStr) for n in ast.walk(function)):
            continue
        for edit in edits(source, function):
            yield _mutant(source, file, name, function, edit, area)


def _mutant(
    source: Source, file: str, name: str, function: Function, edit: Edit, area: str
) -> Mutant:
    first, last = source.line(edit.start), source.line(edit.end - 1) + 1
    start, end = source.starts[first], source.starts[last]
    before = source.data[start:end].decode()
    after = source.data[start : edit.start].decode() + edit.text
    after += source.data[edit.end : end].decode()
    indent = len(before) - len(before.lstrip(" "))
    before, after = _dedented(before, indent), _dedented(after, indent)
    offsets = _offsets(source, function, before)
    occurrence = [offset for offset, _ in offsets].index(start)
    return Mutant(0, area, edit.operator, file, name, before, after, occurrence)


def _dedented(text: str, indent: int) -> str:
    return "\n".join(line.removeprefix(" " * indent) for line in text.splitlines())


def _offsets(source: Source, function: Function, before: str) -> list[tuple[int, int]]:
    """Return where in a function the lines ``before`` stand, and how far they are indented."""
    first, last = source.lines(function)
    lines = [line.decode() for line in source.data.splitlines()[first:last]]
    count = len(before.splitlines())
    offsets = []
    for number in range(len(lines) - count + 1):
        indent = len(lines[number]) - len(lines[number].lstrip(" "))
        if _dedented("\n".join(lines[number : number + count]), indent) == before:
            offsets.append((source.starts[first + number], indent))
    return offsets


class Placed(NamedTuple):
    """Where a mutant goes: the file, its bytes with the change, and the statement's position.

    ``mutant`` is the one that was looked for, or what became of it where its lines changed.
    """

    path: Path
    original: bytes
    mutated: bytes
    line: int
    column: int
    mutant: Mutant


def _source(path: Path) -> Source:
    """Return the parsed file, cached until it changes."""
    return _cached_source(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1024)
def _cached_source(path: Path, _modified: int) -> Source:
    return Source(path)


Hit = tuple[Source, Function, int, int]
"""A function, and the offset and indentation of lines in it."""


def locate(root: Path, mutant: Mutant) -> Placed | None:
    """Locate a mutant: its lines in its function, or in one function of the same name.

    Where these lines changed, the most similar lines in such a function get the same change.

    Returns:
        None where the lines are nowhere, or in several places.
    """
    home = root / mutant.file
    hits: list[Hit] = []
    if home.exists():
        source = _source(home)
        if mutant.function in source.functions:
            function = source.functions[mutant.function]
            hits = _matches(source, [function], mutant)
            if len(hits) > 1:
                hits = hits[mutant.occurrence : mutant.occurrence + 1]
            elif not hits and (changed := _adapted(source, function, mutant)) is not None:
                return locate(root, changed)
    if not hits:
        hits = _locate_elsewhere(root, mutant)
    if not hits:
        return _locate_similar(root, mutant)
    if len({(source.path, offset) for source, _, offset, _ in hits}) != 1:
        return None
    return _apply(*hits[-1], mutant)


def _locate_elsewhere(root: Path, mutant: Mutant) -> list[Hit]:
    sources = [_source(path) for path in sorted((root / "bagent").rglob("*.py"))]
    for last in (mutant.function, mutant.function.rpartition(".")[2], ""):
        hits: list[Hit] = []
        for source in sources:
            alike = [node for name, node in source.functions.items() if name.endswith(last)]
            hits += _matches(source, alike, mutant)
        if hits:
            return hits
    return []


def _locate_similar(root: Path, mutant: Mutant) -> Placed | None:
    """Look for lines much like a mutant's in functions of the same name in other modules."""
    name = mutant.function.rpartition(".")[2]
    adapted = []
    for path in sorted((root / "bagent").rglob("*.py")):
        source = _source(path)
        for qualified, function in source.functions.items():
            if qualified.rpartition(".")[2] == name:
                candidate = replace(
                    mutant, file=str(path.relative_to(root)), function=qualified, occurrence=0
                )
                adapted.append(_adapted(source, function, candidate))
    located = [mutant_ for mutant_ in adapted if mutant_ is not None]
    return locate(root, located[0]) if len(located) == 1 else None


def _adapted(source: Source, function: Function, mutant: Mutant) -> Mutant | None:
    """Return the mutant with the lines of ``function`` that are most like its own."""
    removed = mutant.after == "pass"
    if removed:
        kind = type(ast.parse(mutant.before).body[0])
        statements = [node for node in ast.walk(function) if type(node) is kind]
        texts = [source.text(node) for node in statements if isinstance(node, ast.stmt)]
        texts = [_dedented(text, 0) for text in texts if "\n" not in text]
    else:
        first, last = source.lines(function)
        lines = [line.decode().strip() for line in source.data.splitlines()[first:last]]
        count = len(mutant.before.splitlines())
        texts = ["\n".join(lines[i : i + count]) for i in range(len(lines) - count + 1)]
    before = _tokens(mutant.before)
    ratios = sorted(
        ((SequenceMatcher(None, before, _tokens(text), False).ratio(), text) for text in texts),
        reverse=True,
    )
    if not ratios or ratios[0][0] < ALIKE or (len(ratios) > 1 and ratios[1][0] == ratios[0][0]):
        return None
    text = ratios[0][1]
    after = "pass" if removed else _transferred(before, _tokens(mutant.after), _tokens(text))
    return None if after is None else replace(mutant, before=text, after=after, occurrence=0)


def _tokens(text: str) -> list[str]:
    return re.findall(r"\w+|\s+|[^\w\s]", text)


def _transferred(before: list[str], after: list[str], text: list[str]) -> str | None:
    """Make the change from ``before`` to ``after`` in ``text``; None where it does not fit."""
    offsets = {}
    for block in SequenceMatcher(None, before, text, False).get_matching_blocks():
        offsets |= {block.a + i: block.b + i for i in range(block.size)}
    offsets[len(before)] = len(text)
    edits = SequenceMatcher(None, before, after, False).get_opcodes()
    for operation, a, b, new, new_end in reversed(edits):
        if operation == "equal":
            continue
        if any(i not in offsets for i in range(a, b + 1)):
            return None
        if offsets[b] - offsets[a] != b - a:
            return None
        text = [*text[: offsets[a]], *after[new:new_end], *text[offsets[b] :]]
    return "".join(text)


def _matches(source: Source, functions: list[Function], mutant: Mutant) -> list[Hit]:
    if mutant.before.splitlines()[0].encode() not in source.data:
        return []  # quick: most files
    return [
        (source, function, offset, indent)
        for function in functions
        for offset, indent in _offsets(source, function, mutant.before)
    ]


def _apply(
    source: Source, function: Function, offset: int, indent: int, mutant: Mutant
) -> Placed | None:
    line = source.line(offset)
    end = source.starts[line + len(mutant.before.splitlines())]
    new = "".join(f"{' ' * indent}{text}\n" for text in mutant.after.splitlines())
    mutated = source.data[:offset] + new.encode() + source.data[end:]
    try:
        if ast.dump(ast.parse(mutated)) == ast.dump(source.tree):
            return None
    except SyntaxError:
        return None
    same = next(i for i, (a, b) in enumerate(zip(source.data, mutated, strict=False)) if a != b)
    inside = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.stmt) and source.start(node) <= same < source.end(node)
    ]
    # ast.walk goes by depth: the last is the innermost statement.
    node = inside[-1]
    return Placed(source.path, source.data, mutated, node.lineno, node.col_offset, mutant)
