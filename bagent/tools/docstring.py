"""What a docstring says of a function and of its parameters: Google, NumPy and Sphinx styles."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field

_GOOGLE = re.compile(r"(?:Args|Arguments|Parameters|Params|Keyword Args|Keyword Arguments):\s*")
_OTHER = re.compile(
    r"(?:Returns?|Yields?|Raises|Examples?|Notes?|Warnings?|Warns|See Also|References|Attributes"
    r"|Todo|Side Effects):?\s*"
)
_NAMED = re.compile(r"(?P<name>\*{0,2}\w+)\s*(?:\([^)]*\))?\s*:\s*(?P<words>.*)")
_NUMPY = re.compile(r"(?P<names>\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?")
_SPHINX = re.compile(r":(?:param|parameter|arg|argument|key|keyword)\s+(?P<names>[^:]+):\s*")
_SPHINX_ANY = re.compile(r":\w+[^:]*:")
_RULE = re.compile(r"-{3,}\s*")


@dataclass(slots=True)
class Described:
    """``text`` before the sections, and ``parameters`` by name."""

    text: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


def read_docstring(docstring: str | None) -> Described:
    """Read a docstring; one of no known style is all text."""
    described = Described()
    lines = inspect.cleandoc(docstring or "").split("\n")
    text: list[str] = []
    place = 0
    in_text = True
    while place < len(lines):
        line = lines[place]
        ruled = place + 1 < len(lines) and _RULE.fullmatch(lines[place + 1].strip()) is not None
        if _SPHINX_ANY.match(line):
            place, in_text = _sphinx(lines, place, described), False
        elif ruled and line.strip():
            is_parameters = line.strip() in ("Parameters", "Other Parameters")
            place = _numpy(lines, place + 2, described if is_parameters else Described())
            in_text = False
        elif _GOOGLE.fullmatch(line):
            place, in_text = _google(lines, place + 1, described), False
        else:
            in_text = in_text and not _OTHER.fullmatch(line)
            if in_text:
                text.append(line)
            place += 1
    described.text = "\n".join(text).strip()
    return described


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _google(lines: list[str], place: int, into: Described) -> int:
    """Read ``name (type): words``, deeper lines go on; the section ends where the indent does."""
    depth, name = 0, ""
    while place < len(lines):
        line = lines[place]
        if line.strip():
            if not _indent(line):
                break
            depth = depth or _indent(line)
            found = _NAMED.fullmatch(line.strip()) if _indent(line) == depth else None
            if found:
                name = found["name"].lstrip("*")
                into.parameters[name] = found["words"].strip()
            elif name:
                into.parameters[name] = f"{into.parameters[name]} {line.strip()}".strip()
        place += 1
    return place


def _numpy(lines: list[str], place: int, into: Described) -> int:
    """Read ``name : type`` with its words indented below; the next ruled line ends it."""
    names: list[str] = []
    while place < len(lines):
        line = lines[place]
        following = lines[place + 1].strip() if place + 1 < len(lines) else ""
        if line.strip() and _RULE.fullmatch(following):
            break
        if line.strip() and not _indent(line):
            found = _NUMPY.fullmatch(line.strip())
            names = (
                [name.strip().lstrip("*") for name in found["names"].split(",")] if found else []
            )
            into.parameters.update(dict.fromkeys(names, ""))
        else:
            for name in names:
                into.parameters[name] = f"{into.parameters[name]} {line.strip()}".strip()
        place += 1
    return place


def _sphinx(lines: list[str], place: int, into: Described) -> int:
    """Read one ``:param type name: words``; deeper lines go on."""
    found = _SPHINX.match(lines[place])
    words = [lines[place][found.end() :].strip()] if found else []
    place += 1
    while place < len(lines) and lines[place].strip() and _indent(lines[place]):
        words.append(lines[place].strip())
        place += 1
    if found:
        into.parameters[found["names"].split()[-1].lstrip("*")] = " ".join(words).strip()
    return place
