"""Inline thinking of models, as it stands in answer text when a server does not part it.

Known marks: ``<think>`` (DeepSeek, Qwen), ``<thinking>``, ``<thought>``, ``<reasoning>``,
``<seed:think>``, ``[THINK]`` (Mistral), ``◁think▷`` (Kimi) and the analysis channel of the harmony
format (gpt-oss). Chat templates that end with ``<think>`` leave only the closing mark in the text.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_HARMONY_FINAL = (
    r"<\|start\|>assistant<\|channel\|>final\s*(?:<\|constrain\|>\w+)?<\|message\|>"
    r"|<\|channel\|>final\s*(?:<\|constrain\|>\w+)?<\|message\|>"
)

OPEN = (
    r"<(?:think|thinking|thought|reasoning|seed:think)(?:\s[^<>]{0,100})?>"
    r"|\[THINK\]|◁think▷"
    r"|<\|channel\|>\s*(?:analysis|commentary)\b(?:<\|message\|>)?"
)
"""Pattern (case is ignored) of a mark that opens a thinking block."""

STRAY = r"</(?:think|seed:think)\s*>|\[/THINK\]|◁/think▷"
"""Pattern (case is ignored) of a closing mark that may stand without its opening mark."""

_OPEN = re.compile(OPEN, re.IGNORECASE)
_LEADING = re.compile(rf"\s*(?:<\|start\|>assistant)?({OPEN})", re.IGNORECASE)
_STRAY_LINE = re.compile(rf"(?:{STRAY})[ \t]*(?:\r?\n|\Z)", re.IGNORECASE)
_NAME = re.compile(r"[a-z:]+")
_HARMONY_CLOSE = re.compile(rf"<\|end\|>\s*(?:{_HARMONY_FINAL})?|{_HARMONY_FINAL}")
_HARMONY_END = re.compile(r"\s*(?:<\|return\|>|<\|end\|>)\s*\Z")
_BRACKET_CLOSE = re.compile(r"\[/THINK\]", re.IGNORECASE)
_KIMI_CLOSE = re.compile(r"◁/think▷", re.IGNORECASE)
_TAG_CLOSE = {
    name: re.compile(rf"</{name}\s*>", re.IGNORECASE)
    for name in ("think", "thinking", "thought", "reasoning", "seed:think")
}


class Split(NamedTuple):
    """An answer parted into thinking and the rest.

    ``reasoning`` is None where there is no thinking at the start. ``closed`` is False where the
    text ends inside its thinking; ``text`` is empty then.
    """

    reasoning: str | None
    text: str
    closed: bool = True


def closing(mark: str, text: str, start: int) -> re.Match[str] | None:
    """Return where the block that ``mark`` opened ends in ``text`` from ``start``, or None."""
    if mark.startswith(("[", "◁")):
        pattern = _BRACKET_CLOSE if mark.startswith("[") else _KIMI_CLOSE
    elif mark.startswith("<|"):
        pattern = _HARMONY_CLOSE
    else:
        name = _NAME.match(mark[1:].lower())
        pattern = _TAG_CLOSE[name.group() if name else "think"]
    return pattern.search(text, start)


def split_thinking(text: str) -> Split:
    """Part a thinking block at the start of ``text`` from the rest; blanks around both go.

    A closing mark alone at a line's end, with no opening mark before it, ends thinking whose
    opening mark the chat template had. Thinking elsewhere in the text is left where it is.
    """
    leading = _LEADING.match(text)
    if leading is None:
        # Plain substring searches first: the pattern takes a hundred times as long.
        has_mark = "</" in text or "[/" in text or "◁/" in text
        stray = _STRAY_LINE.search(text) if has_mark else None
        if stray is None or _OPEN.search(text, 0, stray.start()):
            return Split(None, text)
        return Split(text[: stray.start()].strip(), text[stray.end() :].strip())
    end = closing(leading.group(1), text, leading.end())
    if end is None:
        return Split(text[leading.end() :].strip(), "", closed=False)
    rest = text[end.end() :].strip()
    if leading.group(1).startswith("<|"):
        rest = _HARMONY_END.sub("", rest)
    return Split(text[leading.end() : end.start()].strip(), rest)
