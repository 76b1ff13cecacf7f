"""PyYAML's complaints as one clear line each, with the usual mistake named where it is known."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from bagent.errors import JobError, Position

_BARE_TEMPLATE = re.compile(r"(^|[\s:\[,-])\{[{%]")
_QUOTE_TEMPLATE = "quote a text that begins with {{, or write it after | on lines of its own"


def control_character(text: str, index: int, file: str | Path) -> JobError:
    """The error for a control character or lone surrogate at ``index`` of ``text``."""
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
            "quote the text, or mend the indentation of this line",
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
