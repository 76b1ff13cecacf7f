"""YAML 1.2 with positions: every key and every value knows its line and column.

PyYAML scans and parses; which plain scalars are numbers, booleans or null is decided by
``scalars``. Unlike PyYAML a repeated key is an error, every key is text as written
(``no:`` and ``08:`` too), and what aliases expand to is bounded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.events import AliasEvent
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner, ScannerError

from bagent.errors import JobError, Position
from bagent.job.yaml.scalars import parse_number, resolve_plain
from bagent.text.unicode import join_surrogates
from bagent.types import Json

_BARE_TEMPLATE = re.compile(r"(^|[\s:\[,-])\{[{%]")
_QUOTE_TEMPLATE = "quote a text that begins with {{, or write it after | on lines of its own"


def control_character(text: str, index: int, file: str | Path) -> JobError:
    """Return the error for a control character or lone surrogate at ``index`` of ``text``."""
    line = text.count("\n", 0, index) + 1
    column = index - text.rfind("\n", 0, index)
    letter = text[index] if index < len(text) else "\0"
    return JobError(
        f"the character U+{ord(letter):04X} may not stand in a YAML file",
        hint='take it out, or write it as \\u.... inside "double quotes"',
        at=Position(file, line, column),
    )


def syntax_error(error: yaml.MarkedYAMLError, text: str, file: str | Path) -> JobError:
    """One line for a scanner, parser or composer error."""
    mark = error.problem_mark or error.context_mark
    problem = " ".join((error.problem or error.context or "not YAML").split())
    if mark is None:
        return JobError(problem, at=Position(file))
    at = Position(file, mark.line + 1, mark.column + 1)
    tab = _blank_line_with_tab(text, mark.line)
    if tab is not None:
        return JobError(
            "a blank line holds a tab", hint="take the tab out", at=Position(file, tab + 1, 1)
        )
    message, hint = _explain(problem, _line(text, mark.line), text, mark.index)
    if not hint and error.context and error.context_mark:
        hint = f"{' '.join(error.context.split())} that began on line {error.context_mark.line + 1}"
    return JobError(message, hint=hint, at=at)


def _blank_line_with_tab(text: str, number: int) -> int | None:
    """Return the index of a blank line with a tab just before line ``number``, None without."""
    while number > 0 and not _line(text, number - 1).strip():
        number -= 1
        if "\t" in _line(text, number):
            return number
    return None


def _explain(problem: str, line: str, text: str, index: int) -> tuple[str, str]:
    if problem == "a tab indents this line":
        return problem, "indent with blanks"
    if problem.endswith(("'<block mapping start>'", "'<block sequence start>'")):
        return "this line is indented differently from the lines before it", ""
    if _BARE_TEMPLATE.search(line):
        return f"not YAML: {problem}", _QUOTE_TEMPLATE
    if "${" in line and ("{" in line.replace("${", "") or "[" in line):
        return f"not YAML: {problem}", 'inside { } and [ ] write "${NAME}" with quotes'
    if problem.startswith("mapping values are not allowed"):
        return (
            "a colon and a blank stand inside an unquoted text",
            "quote the text, or correct the indentation of this line",
        )
    if problem.startswith("found character") and "cannot start any token" in problem:
        letter = text[index : index + 1]
        return f"a text may not begin with {letter}", "quote the text"
    if problem.startswith("found unknown escape character"):
        return (
            f"not YAML: {problem}",
            "in \"double quotes\" \\ is special: use 'single quotes', or \\\\",
        )
    if problem.startswith("found unexpected end of stream"):
        return "a quote is never closed", ""
    if problem.startswith("could not find expected ':'"):
        return "a line without a colon stands among KEY: VALUE lines", ""
    if "but got '?'" in problem:
        return "an unquoted text in [ ] or { } holds a question mark", "quote the text"
    if problem.startswith("found undefined alias"):
        return f"{problem.removeprefix('found ')}", "name it earlier with &NAME"
    return f"not YAML: {problem}", ""


def _line(text: str, number: int) -> str:
    lines = re.split(r"\r\n|\r|\n", text)
    return lines[number] if number < len(lines) else ""


MAX_VALUES = 100_000
"""Most keys and values of a file, with aliases expanded."""

_DEEPEST = 200
_PLAIN = "plain"
_TAG = "tag:yaml.org,2002:"
_MERGE = "<<"


@dataclass(frozen=True, slots=True)
class YamlSpot:
    """The position of one value: lines and columns count from 1.

    ``file`` is the file, or the option that gave the value. ``key_line`` and ``key_column`` are
    those of its key (of the value itself in a list). ``start`` and ``end`` bound the value's
    source as offsets into the file's text. ``style`` is how a scalar is written: ``plain``,
    ``'``, ``"``, ``|`` or ``>``; empty for lists and mappings.
    """

    file: str | Path
    line: int = 0
    column: int = 0
    key_line: int = 0
    key_column: int = 0
    start: int = 0
    end: int = 0
    style: str = ""

    @property
    def value_at(self) -> Position:
        """The position of the value."""
        return Position(self.file, self.line, self.column)

    @property
    def key_at(self) -> Position:
        """The position of the key."""
        return Position(self.file, self.key_line, self.key_column)


class YamlMap(dict[str, Json]):
    """A mapping with the :class:`YamlSpot` of each value, by key."""

    def __init__(self) -> None:
        super().__init__()
        self.spots: dict[str, YamlSpot] = {}

    def put(self, key: str, value: Json, spot: YamlSpot) -> None:
        """Set ``key`` to ``value`` standing at ``spot``."""
        self[key] = value
        self.spots[key] = spot


class YamlList(list[Json]):
    """A list with the :class:`YamlSpot` of each value, by index."""

    def __init__(self) -> None:
        super().__init__()
        self.spots: list[YamlSpot] = []

    def put(self, value: Json, spot: YamlSpot) -> None:
        """Append ``value`` standing at ``spot``."""
        self.append(value)
        self.spots.append(spot)


@dataclass(frozen=True, slots=True)
class YamlFile:
    """One read document: its ``data`` (maps and lists with spots), its ``text``, its ``spot``."""

    data: Json
    text: str
    spot: YamlSpot


def decode(content: bytes, file: str | Path) -> str:
    """Return the text of a UTF-8 file, without a byte-order mark.

    Raises:
        JobError: the bytes are UTF-16 or UTF-32, or not UTF-8 (with line and column).
    """
    if content.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\x00" in content[:4]:
        raise JobError(
            "the file is UTF-16 or UTF-32, not UTF-8", hint="save it as UTF-8", at=Position(file)
        )
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line = before.count(b"\n") + 1
        column = len(before[before.rfind(b"\n") + 1 :].decode("utf-8", "replace")) + 1
        raise JobError(
            f"byte 0x{content[error.start]:02x} is not UTF-8",
            hint="save the file as UTF-8",
            at=Position(file, line, column),
        ) from None


def read_yaml(text: str, file: str | Path) -> YamlFile:
    """Read one YAML document.

    Args:
        text: the document; a leading byte-order mark is taken off.
        file: the name that positions carry.

    Raises:
        JobError: a syntax error, a repeated key, an unknown tag, more than one document, nesting
            or expansion without bound; one line, with position.
    """
    text = text.removeprefix("\ufeff")
    try:
        nodes = _compose(text)
    except yaml.reader.ReaderError as error:
        raise control_character(text, error.position, file) from None
    except yaml.MarkedYAMLError as error:
        raise syntax_error(error, text, file) from None
    except RecursionError:
        raise _too_deep(file) from None
    if len(nodes) > 1:
        at = Position(file, nodes[1].start_mark.line + 1, 1)
        raise JobError("a second YAML document begins here", hint="keep one per file", at=at)
    if not nodes:
        return YamlFile(None, text, YamlSpot(file))
    builder = _Builder(file, text)
    try:
        data = builder.build(nodes[0])
    except RecursionError:
        raise _too_deep(file) from None
    return YamlFile(data, text, builder.spot(nodes[0], nodes[0]))


class _Loader(Reader, Scanner, Parser, Composer, BaseResolver):
    """PyYAML up to the node tree, with marked plain scalars and the rules of YAML 1.2.

    These are its rules for tabs, anchors, the tag ``!``, and ``?`` and ``:`` in flow collections.
    """

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        BaseResolver.__init__(self)

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """Mark untagged plain scalars: the only ones that may be other than text."""
        if kind is ScalarNode and implicit[0]:
            return _PLAIN
        return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]

    def scan_to_next_token(self) -> None:
        """Skip blanks, comments and line ends; tabs too, but not where they would indent."""
        if self.flow_level > _DEEPEST:
            # PyYAML's time grows with the square of this depth.
            raise RecursionError
        while True:
            tab = None
            while self.peek() in " \t":
                if self.peek() == "\t" and self._only_blanks_before():
                    tab = tab or self.get_mark()
                self.forward()
            if tab and not self.flow_level and self.peek() not in "#\r\n\0":
                raise ScannerError(None, None, "a tab indents this line", tab)
            if self.peek() == "#":
                while self.peek() not in "\0\r\n":
                    self.forward()
            if not self.scan_line_break():  # type: ignore[no-untyped-call]
                return
            if not self.flow_level:
                self.allow_simple_key = True

    def check_key(self) -> bool:
        """Return whether ``?`` marks a key here: only where a blank follows."""
        if self.flow_level and self.peek(1) not in self._ends():
            # YAML 1.2 reads a text here; PyYAML cannot.
            raise ScannerError(None, None, "but got '?'", self.get_mark())
        return self.peek(1) in self._ends()

    def check_value(self) -> bool:
        """Return whether ``:`` ends a key here: where a blank follows, or behind a JSON key."""
        behind_json = self.flow_level and self.buffer[self.pointer - 1] in "\"']}"
        return bool(behind_json) or self.peek(1) in self._ends()

    def check_plain(self) -> bool:
        """Return whether a plain scalar begins here; in a flow collection also with ``:``."""
        if self.flow_level and self.peek() == ":":
            return self.peek(1) not in self._ends()
        return bool(super().check_plain())

    def _ends(self) -> str:
        return "\0 \t\r\n" + (",[]{}" if self.flow_level else "")

    def scan_anchor(self, kind: Any) -> Any:
        """Read ``&NAME`` or ``*NAME``: a name is everything up to a blank or flow indicator."""
        start = self.get_mark()
        length = 1
        while self.peek(length) not in "\0 \t\r\n,[]{}":
            length += 1
        name = self.prefix(length)[1:]
        self.forward(length)
        if not name:
            raise ScannerError(None, None, "an anchor or alias without a name", start)
        return kind(name, start, self.get_mark())

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Let a later anchor take the name of an earlier one."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        anchor = getattr(event, "anchor", None)
        if anchor is not None and not isinstance(event, AliasEvent):
            self.anchors.pop(anchor, None)
        return super().compose_node(parent, index)

    def compose_scalar_node(self, anchor: Any) -> Any:
        """Make a scalar with the tag ``!`` a text."""
        tag = self.peek_event().tag  # type: ignore[no-untyped-call]
        node = super().compose_scalar_node(anchor)
        if tag == "!":
            node.tag = _TAG + "str"
        return node

    def _only_blanks_before(self) -> bool:
        start = self.pointer - self.column
        return not self.buffer[start : self.pointer].strip(" \t")


def _compose(text: str) -> list[Node]:
    loader = _Loader(text)
    nodes: list[Node] = []
    try:
        while len(nodes) < 2 and loader.check_node():
            node = loader.get_node()
            if node is not None:
                nodes.append(node)
    except (OverflowError, ValueError):  # of an escape such as \UFFFFFFFF, or a long version
        raise ScannerError(None, None, "a number is too large", loader.get_mark()) from None
    return nodes


def _too_deep(file: str | Path) -> JobError:
    return JobError(
        "the file nests lists and mappings too deeply",
        at=Position(file),
        hint="write a flatter file",
    )


class _Builder:
    """Makes values from nodes, counting what aliases expand to."""

    def __init__(self, file: str | Path, text: str) -> None:
        self._file = file
        self._text = text
        self._count = 0
        self._open: set[int] = set()

    def build(self, node: Node) -> Json:
        self._count += 1
        if self._count > MAX_VALUES:
            raise self._error(node, f"the file expands to more than {MAX_VALUES:,} values")
        if isinstance(node, ScalarNode):
            return self._scalar(node)
        if id(node) in self._open:
            raise self._error(node, "an alias stands inside what it names")
        self._open.add(id(node))
        try:
            return self._sequence(node) if isinstance(node, SequenceNode) else self._mapping(node)
        finally:
            self._open.discard(id(node))

    def spot(self, key: Node, value: Node) -> YamlSpot:
        """Return the spot of ``value`` under ``key`` (itself in a list)."""
        style = (value.style or _PLAIN) if isinstance(value, ScalarNode) else ""
        return YamlSpot(
            file=self._file,
            line=value.start_mark.line + 1,
            column=value.start_mark.column + 1,
            key_line=key.start_mark.line + 1,
            key_column=key.start_mark.column + 1,
            start=value.start_mark.index,
            end=value.end_mark.index,
            style=style,
        )

    def _sequence(self, node: SequenceNode) -> YamlList:
        self._check_tag(node, "seq")
        result = YamlList()
        for item in node.value:
            result.put(self.build(item), self.spot(item, item))
        return result

    def _mapping(self, node: Node) -> YamlMap:
        self._check_tag(node, "map")
        merged, own = YamlMap(), YamlMap()
        keys: dict[str, Node] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            if key in keys:
                first = keys[key].start_mark
                raise self._error(
                    key_node,
                    f"key {key} is given twice",
                    f"first on line {first.line + 1}, column {first.column + 1}; keep one",
                )
            keys[key] = key_node
            if key == _MERGE and key_node.tag == _PLAIN:
                self._merge(value_node, merged)
            else:
                own.put(key, self.build(value_node), self.spot(key_node, value_node))
        for key, value in own.items():
            merged.put(key, value, own.spots[key])
        return merged

    def _merge(self, node: Node, into: YamlMap) -> None:
        for source in node.value if isinstance(node, SequenceNode) else [node]:
            if not isinstance(source, MappingNode):
                raise self._error(source, "<< takes a mapping, or a list of mappings")
            values = self.build(source)
            for key, value in values.items():
                if key not in into:
                    into.put(key, value, values.spots[key])

    def _key(self, node: Node) -> str:
        if isinstance(node, ScalarNode):
            if node.tag == _PLAIN and not node.value:
                raise self._error(node, "a key is empty", "write KEY: VALUE")
            return join_surrogates(node.value)
        if self._text.startswith("{{", max(node.start_mark.index - 1, 0)):
            raise self._error(
                node, "a text that begins with {{ must be quoted", 'write "{{ NAME }}"'
            )
        raise self._error(node, "a key must be text, not a list or mapping")

    def _scalar(self, node: ScalarNode) -> Json:
        if node.tag == _PLAIN:
            return resolve_plain(join_surrogates(node.value))
        if node.tag in (_TAG + "str", "!"):
            return join_surrogates(node.value)
        kind = node.tag.removeprefix(_TAG)
        value = resolve_plain(node.value)
        right = {
            "null": value is None,
            "bool": isinstance(value, bool),
            "int": isinstance(value, int) and not isinstance(value, bool),
            "float": parse_number(node.value) is not None,
        }
        if kind not in right:
            raise self._unknown_tag(node)
        if not right[kind]:
            raise self._error(node, f"{node.value} is no !!{kind}")
        return value

    def _check_tag(self, node: Node, kind: str) -> None:
        if node.tag not in (_TAG + kind, "!"):
            raise self._unknown_tag(node)

    def _unknown_tag(self, node: Node) -> JobError:
        tag = node.tag.replace(_TAG, "!!")
        return self._error(node, f"the tag {tag} has no meaning here", "leave it out")

    def _error(self, node: Node, message: str, hint: str = "") -> JobError:
        mark = node.start_mark
        return JobError(message, hint=hint, at=Position(self._file, mark.line + 1, mark.column + 1))


def at_option(value: Json, option: str) -> tuple[Json, YamlSpot]:
    """Return ``value`` with every spot in it naming ``option``, and the spot of itself."""
    spot = YamlSpot(file=option)
    return _renamed(value, spot), spot


def _renamed(value: Json, spot: YamlSpot) -> Json:
    if isinstance(value, dict):
        result = YamlMap()
        for key, item in value.items():
            result.put(str(key), _renamed(item, spot), spot)
        return result
    if isinstance(value, (list, tuple)):
        items = YamlList()
        for item in value:
            items.put(_renamed(item, spot), spot)
        return items
    return value


def find(
    data: Json, path: tuple[str | int, ...], root: YamlSpot
) -> tuple[YamlSpot, tuple[str | int, ...]]:
    """Return the spot of the deepest value on ``path`` that stands in the file, and its path there.

    A path may lead further than the file does, to a default, and it names the keys of the long
    form where the file has a short one: a list may stand for the one key that holds it.
    """
    spot = root
    found_path: tuple[str | int, ...] = ()
    for part in path:
        if isinstance(data, YamlList) and isinstance(part, str):
            continue
        child = child_spot(data, part)
        if child is None:
            break
        spot, data, found_path = child, data[part], (*found_path, part)
    return spot, found_path


def child_spot(data: Json, part: str | int) -> YamlSpot | None:
    """Return the spot of ``data[part]``, None where there is no such value."""
    if isinstance(data, YamlMap) and isinstance(part, str):
        return data.spots.get(part)
    if isinstance(data, YamlList) and isinstance(part, int) and part < len(data):
        return data.spots[part]
    return None
