"""Every error of the program says what is wrong, and what to type."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache

from support.sources import nodes

ERRORS = {
    *("UsageError", "JobError", "InputError", "SchemaError", "HostfileError", "OwnedError"),
    *("ChangedError", "MissingPackage", "WriteError", "StoppedEarly", "NeedsPerson"),
}
OTHERS = re.compile(r"\{[^}]*(error|reason|message|fault|why|last|problem|msg|failure)[^}]*\}")
"""The words of the system, of a server or of another program, which name the cause themselves."""

PRIVATE = re.compile(r"\b(told|untold|mend|a word for|words of|not said|held against|of what\?)\b")
"""Words that only people who know the inside understand."""


@dataclass(frozen=True, slots=True)
class Message:
    """An error where it is raised."""

    place: str
    text: str
    hint: str | None


@cache
def messages() -> list[Message]:
    """Return the messages of all errors that are made in the package."""
    made = []
    for path, inside in nodes().items():
        for node in inside:
            if isinstance(node, ast.Call) and node.args and _name(node.func) in ERRORS:
                hints = [_text(item.value) for item in node.keywords if item.arg == "hint"]
                hint = hints[0] if hints else None
                made.append(Message(f"{path}:{node.lineno}", _text(node.args[0]), hint))
    assert len(made) > 400
    return made


def _name(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{" + ast.unparse(part) + "}"
            for part in node.values
        )
    return "{" + ast.unparse(node) + "}"


def test_every_error_says_what_to_type_or_repeats_the_cause() -> None:
    # Errors of the pages of bagent view are read in a browser, where nothing is typed.
    typed = [m for m in messages() if not m.place.startswith("view/")]
    silent = [m for m in typed if m.hint is None and not OTHERS.search(m.text)]
    assert silent == []


def test_errors_use_words_that_a_new_user_knows() -> None:
    odd = [m for m in messages() if PRIVATE.search(m.text) or PRIVATE.search(m.hint or "")]
    assert odd == []


def test_an_error_is_one_sentence_without_a_full_stop() -> None:
    long = [m for m in messages() if m.text.endswith(".") or ". " in m.text.replace("... ", "")]
    assert long == []
