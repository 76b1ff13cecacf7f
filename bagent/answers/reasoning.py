"""Reasoning of a model inside its answer text, where the server has no reasoning parser.

The marks come from the chat templates of the models and from vLLM's reasoning parsers. Chat
templates that end with an opening mark leave only the closing mark in the text.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class ReasoningFormat(NamedTuple):
    """The marks of a model family, as patterns that ignore case.

    ``stray`` says whether the closing mark may occur without its opening mark.
    """

    opening: str
    closing: str
    stray: bool = False


FAMILIES = (
    ReasoningFormat(
        r"<think(?:\s[^<>]{0,100})?>", r"</think\s*>", stray=True
    ),  # DeepSeek, Qwen, GLM
    ReasoningFormat(r"<thinking(?:\s[^<>]{0,100})?>", r"</thinking\s*>"),
    ReasoningFormat(r"<thought(?:\s[^<>]{0,100})?>", r"</thought\s*>"),
    ReasoningFormat(r"<reasoning(?:\s[^<>]{0,100})?>", r"</reasoning\s*>"),
    ReasoningFormat(r"<seed:think(?:\s[^<>]{0,100})?>", r"</seed:think\s*>", stray=True),
    ReasoningFormat(r"\[THINK\]", r"\[/THINK\]", stray=True),  # Mistral
    ReasoningFormat(r"◁think▷", r"◁/think▷", stray=True),  # Kimi
    ReasoningFormat(r"<\|open\|>think<\|sep\|>", r"<\|close\|>think<\|sep\|>"),  # Kimi
    ReasoningFormat(r"<\|channel>thought\b", r"<channel\|>"),  # Gemma
    ReasoningFormat(r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),  # Cohere
    ReasoningFormat(r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),  # Apertus
    ReasoningFormat(r"\[unused16\]", r"\[unused17\]"),  # Pangu
    ReasoningFormat(
        r"<\|channel\|>\s*(?:analysis|commentary)\b(?:<\|message\|>)?",
        r"<\|end\|>(?:\s*<\|start\|>assistant)?(?:\s*<\|channel\|>final[^<]{0,40}"
        r"(?:<\|constrain\|>\w+)?<\|message\|>)?"
        r"|<\|channel\|>final[^<]{0,40}(?:<\|constrain\|>\w+)?<\|message\|>",
    ),  # gpt-oss (harmony)
)

OPEN = "|".join(family.opening for family in FAMILIES)
"""Pattern (case is ignored) of a mark that opens reasoning."""

STRAY = "|".join(family.closing for family in FAMILIES if family.stray)
"""Pattern (case is ignored) of a closing mark that may occur without its opening mark."""

_PAIRS = [
    (re.compile(family.opening, re.I), re.compile(family.closing, re.I)) for family in FAMILIES
]
_OPEN = re.compile(OPEN, re.IGNORECASE)
_LEADING = re.compile(rf"\s*({OPEN})", re.IGNORECASE)
_STRAY_AT_LINE_END = re.compile(rf"(?:{STRAY})[ \t]*(?:\r?\n|\Z)", re.IGNORECASE)
# Inside a line, a mark in quotes or between blanks is a word of the text.
_STRAY_IN_LINE = re.compile(rf"(?<![`'\"])(?:(?<!\s)(?:{STRAY})|(?:{STRAY})(?!\s))", re.IGNORECASE)
_LAST_BLOCK = re.compile(r"\n\s*(<think>(?:(?!</?think>).)*</think>)\s*\Z", re.I | re.S)

_BRACKET_MARK = re.compile(r"\[(?:/?THINK|unused1)", re.IGNORECASE)

_SPECIAL_WRAPPERS = (  # special tokens: never part of an answer
    re.compile(r"<\|START_RESPONSE\|>(.*?)(?:<\|END_RESPONSE\|>|\Z)", re.S),
    re.compile(r"<\|open\|>response<\|sep\|>(.*?)(?:<\|close\|>response<\|sep\|>|\Z)", re.S),
)
_TAG_WRAPPERS = (  # words that a prompt may ask for: removed only behind reasoning
    re.compile(r"<answer>(.*)</answer>", re.I | re.S),
    re.compile(r"<response>(.*)</response>", re.I | re.S),
)
_GRANITE = re.compile(
    r"\s*Here(?: is|'s) my thought process:(.*?)Here(?: is|'s) my response:(.*)", re.S
)

_HARMONY_MESSAGE = re.compile(
    r"(?:<\|start\|>(?P<role>[^<]{0,200}))?(?:<\|channel\|>(?P<channel>[^<]{0,200}))?"
    r"(?:<\|constrain\|>[^<]{0,40})?<\|message\|>"
    r"(?P<content>.*?)"
    r"(?P<end><\|end\|>|<\|return\|>|<\|call\|>|(?=<\|start\|>)|(?=<\|channel\|>)|\Z)\s*",
    re.S,
)
_HARMONY_PLAIN = re.compile(
    r"\s*analysis(?P<reasoning>.+?)assistantfinal(?P<text>.*)", re.S
)  # a server that dropped the special tokens


class ReasoningSplit(NamedTuple):
    """An answer divided into reasoning and the rest.

    ``reasoning`` is None where the text has none. ``closed`` is False where the text ends inside
    its reasoning; ``text`` is empty then.
    """

    reasoning: str | None
    text: str
    closed: bool = True


class HarmonyMessage(NamedTuple):
    """A message of the harmony format (gpt-oss); ``recipient`` is set for a tool call."""

    channel: str
    recipient: str | None
    content: str
    ended: bool


def closing(mark: str, text: str, start: int) -> re.Match[str] | None:
    """Return where the block that ``mark`` opened ends in ``text`` from ``start``, or None."""
    pattern = next(close for opening, close in _PAIRS if opening.match(mark))
    return pattern.search(text, start)


def harmony_messages(text: str) -> list[HarmonyMessage]:
    """Return the messages of a text in the harmony format; empty where it has another form.

    Format: https://cookbook.openai.com/articles/openai-harmony
    """
    if "<|message|>" not in text:
        return []
    messages = []
    offset = len(text) - len(text.lstrip())
    while offset < len(text):
        match = _HARMONY_MESSAGE.match(text, offset)
        if match is None:
            return []
        header = f"{match['role'] or ''} {match['channel'] or ''}"
        recipient = re.search(r"\bto=(\S+)", header)
        channel = (match["channel"] or "").split()
        messages.append(
            HarmonyMessage(
                channel[0] if channel else "final",
                recipient[1] if recipient else None,
                match["content"].strip(),
                bool(match["end"]),
            )
        )
        offset = match.end()
    return messages


def split_reasoning(text: str) -> ReasoningSplit:
    """Divide ``text`` into its reasoning and the answer; blanks around both are removed.

    Reasoning is at the start: one or more blocks, or all before a closing mark whose opening mark
    the chat template had. A block at the very end counts as well. Marks elsewhere stay.
    """
    if not may_have_reasoning(text):
        return ReasoningSplit(None, text)
    messages = harmony_messages(text)
    if messages:
        return _split_harmony(messages)
    for pattern in (_HARMONY_PLAIN, _GRANITE):
        match = pattern.fullmatch(text)
        if match is not None:
            return ReasoningSplit(match[1].strip(), match[2].strip())
    blocks: list[str] = []
    split = _first_block(text)
    while split.reasoning is not None:
        blocks.append(split.reasoning)
        if not split.closed:
            return ReasoningSplit("\n".join(filter(None, blocks)), "", closed=False)
        if not _LEADING.match(split.text):
            break
        split = _first_block(split.text)
    last = _LAST_BLOCK.search(split.text) if split.text.endswith(">") else None
    answer = split.text
    if last is not None:
        blocks.append(re.sub(r"\A<think>|</think>\Z", "", last[1], flags=re.I).strip())
        answer = answer[: last.start()].strip()
    answer = _without_wrapper(answer, tags=bool(blocks))
    return ReasoningSplit("\n".join(filter(None, blocks)) if blocks else None, answer)


def may_have_reasoning(text: str) -> bool:
    """Return whether a text has what begins a mark, or begins as a format without marks does.

    The searches take much less time than the patterns.
    """
    return (
        "<" in text
        or "◁" in text
        or ("[" in text and _BRACKET_MARK.search(text) is not None)
        or text.lstrip().startswith(("analysis", "Here"))
    )


def _split_harmony(messages: list[HarmonyMessage]) -> ReasoningSplit:
    final = [message.content for message in messages if message.channel == "final"]
    reasoning = [message.content for message in messages if message.channel != "final"]
    closed = bool(final) or messages[-1].ended
    return ReasoningSplit("\n".join(reasoning) if reasoning else None, "\n".join(final), closed)


def _first_block(text: str) -> ReasoningSplit:
    """Divide the first block of reasoning from the rest."""
    leading = _LEADING.match(text)
    if leading is not None:
        end = closing(leading.group(1), text, leading.end())
        if end is None:
            return ReasoningSplit(text[leading.end() :].strip(), "", closed=False)
        return ReasoningSplit(text[leading.end() : end.start()].strip(), text[end.end() :].strip())
    # Plain substring searches first: the pattern takes a hundred times as long.
    has_mark = "</" in text or "[/" in text or "◁/" in text
    if not has_mark or "think" not in text.lower():
        return ReasoningSplit(None, text)
    stray = _STRAY_AT_LINE_END.search(text) or _STRAY_IN_LINE.search(text)
    if stray is None or _OPEN.search(text, 0, stray.start()):
        return ReasoningSplit(None, text)
    return ReasoningSplit(text[: stray.start()].strip(), text[stray.end() :].strip())


def _without_wrapper(text: str, *, tags: bool) -> str:
    """Remove what wraps the whole answer; ``tags`` says whether words in tags count."""
    if not text.lstrip().startswith("<"):
        return text
    for pattern in _SPECIAL_WRAPPERS + (_TAG_WRAPPERS if tags else ()):
        match = pattern.fullmatch(text.strip())
        if match is not None:
            return match[1].strip()
    return text
