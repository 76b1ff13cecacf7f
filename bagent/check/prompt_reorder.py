"""The prompt with the text that is the same for every row put first, so that a cache can reuse it.

It is a suggestion for a person: the words stay the same, their order does not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from jinja2 import TemplateSyntaxError

from bagent.errors import JobError
from bagent.job.spec.job import Job, JobSource
from bagent.job.spec.prompt import PromptSpec, TextSpec
from bagent.job.templates.environment import ENVIRONMENT
from bagent.job.templates.prompt import Prompt
from bagent.job.templates.template import Template, TemplateFailure
from bagent.job.validation import Origin

Varies = Callable[[str], bool]
"""Tells whether a piece of a template renders differently for some rows."""

_MOVABLE_BLOCKS = frozenset({"if", "for", "with", "filter"})
_SPACE_CONTROL = re.compile(r"\{[{%#][-+]|[-+][}%#]\}")
_TAG = re.compile(r"<(/?)([A-Za-z][\w.-]*)(?:\s[^<>]*)?>")
_FENCE = re.compile(r"^[ \t]*(```|\"\"\"|'''|~~~)")
_CLOSER = re.compile(
    r"[ \t]*(</[\w.-]+>|```|\"\"\"|'''|~~~|-{3,}|={3,}|\*{3,}|[\])}\"'.;,]+)[ \t]*"
)
_INTRODUCTION = re.compile(r"[ \t]*(#+ .*|-{3,}|={3,}|\*\*[^*]+\*\*|\[[^\]]*\])[ \t]*|.*:\**[ \t]*")
# Not behind a number ("1. Read"), and only before a capital: "e.g. this" is no end.
_SENTENCE = re.compile(r"(?<!\d)[.!?][)\"']*[ \t]+(?=[\"'(\[]?[A-Z\u00c0-\u00de])")
_SENTENCE_END = re.compile(r".*[.!?][)\"'*]*\s*", re.DOTALL)
_BACK = re.compile(r"\b(above|preceding|previous|earlier|before this|foregoing)\b", re.IGNORECASE)


class TemplateSplit(msgspec.Struct, frozen=True):
    """A template's parts in the order of a new template, each a paragraph without blank lines
    around it."""

    front: tuple[str, ...]
    """Fixed text that stays first."""
    moved: tuple[str, ...]
    """Fixed text that goes behind it."""
    varying: tuple[str, ...]
    """Text that differs by row."""

    @property
    def fixed(self) -> str:
        """Return the text that is the same for every row."""
        return "\n\n".join((*self.front, *self.moved))

    @property
    def differing(self) -> str:
        """Return the text that differs by row."""
        return "\n\n".join(self.varying)

    @property
    def points_back(self) -> str | None:
        """Return a word of the moved text such as ``above``, which may be wrong after the move."""
        match = _BACK.search("\n".join(self.moved))
        return match[0] if match else None


class TemplateToken(msgspec.Struct, frozen=True):
    """A part of a template that is not cut: plain text up to a line's end, or a tag."""

    text: str
    plain: bool


TemplateLine = list[TemplateToken]


def split_template(template: str, differs: Varies) -> TemplateSplit | None:
    """Return the parts of ``template``; None where its tags leave no safe way to cut it."""
    tokens = _tokenize(template)
    if tokens is None:
        return None
    lines, cue = _without_cue(list(_lines(tokens)), differs)
    front: list[str] = []
    moved: list[str] = []
    varying: list[str] = []
    headings: list[str] = []  # fixed paragraphs that introduce the next one
    for paragraph in _paragraphs(lines):
        text = _joined(paragraph)
        if not _differing(paragraph, differs):
            if varying and _all_match(paragraph, _CLOSER):
                varying.append(text)
            elif _introduces(paragraph):
                headings.append(text)
            else:
                (moved if varying else front).extend((*headings, text))
                headings = []
            continue
        if not varying:
            opening, paragraph = _split_before(paragraph, differs)
            if opening:
                front.extend((*headings, opening))
                headings = []
        head, tail = _split_behind(paragraph, differs)
        varying.extend((*headings, head))
        headings = []
        if tail:
            moved.append(tail)
    (moved if varying else front).extend(headings)
    return TemplateSplit(tuple(front), tuple(moved), (*varying, *cue))


def _tokenize(template: str) -> list[TemplateToken] | None:
    """Return text and tags in order; a block with its contents is one token.

    The result is None for tags that change their neighbours: space control, ``set``, macros.
    """
    if _SPACE_CONTROL.search(template):
        return None
    tokens: list[TemplateToken] = []
    depth = 0
    block = ""
    expecting = False
    try:
        for _, kind, value in ENVIRONMENT.lex(template):
            if expecting and kind == "name":
                name = value.removeprefix("end")
                if name not in _MOVABLE_BLOCKS and value not in ("else", "elif"):
                    return None
                depth += 1 if value in _MOVABLE_BLOCKS else -1 if value != name else 0
                expecting = False
            expecting = expecting or kind == "block_begin"
            block += value
            if kind == "data" and not depth and block == value:
                tokens.append(TemplateToken(value, True))
                block = ""
            elif not depth and kind in ("variable_end", "block_end", "comment_end", "raw_end"):
                tokens.append(TemplateToken(block, False))
                block = ""
    except TemplateSyntaxError:
        return None
    joined = "".join(token.text for token in tokens)
    return tokens if joined == template and not block else None


def _lines(tokens: Sequence[TemplateToken]) -> Iterator[TemplateLine]:
    line: TemplateLine = []
    for token in tokens:
        pieces = token.text.splitlines(keepends=True) if token.plain else [token.text]
        for piece in pieces:
            line.append(TemplateToken(piece, token.plain))
            if token.plain and piece.endswith("\n"):
                yield line
                line = []
    if line:
        yield line


def _without_cue(
    lines: list[TemplateLine], differs: Varies
) -> tuple[list[TemplateLine], list[str]]:
    """Split off a last line such as ``Answer:``, which the model continues."""
    filled = [index for index, line in enumerate(lines) if _joined([line])]
    if not filled or _differing_tokens(lines[filled[-1]], differs):
        return lines, []
    last = _joined([lines[filled[-1]]])
    if not last.endswith(":"):
        return lines, []
    return lines[: filled[-1]], [last]


def _paragraphs(lines: Iterable[TemplateLine]) -> Iterator[list[TemplateLine]]:
    """Yield the lines up to a blank one outside every tag pair and fence."""
    paragraph: list[TemplateLine] = []
    inside = _OpenMarkup()
    for line in lines:
        if not _joined([line]).strip() and not inside:
            if paragraph:
                yield paragraph
            paragraph = []
            continue
        inside.read(line)
        paragraph.append(line)
    if paragraph:
        yield paragraph


class _OpenMarkup:
    """The open tags and fences; true while there are any."""

    def __init__(self) -> None:
        self._tags: list[str] = []
        self._fence = ""

    def read(self, line: TemplateLine) -> None:
        """Read ``line``."""
        text = "".join(token.text if token.plain else "\0" for token in line)
        fence = _FENCE.match(text)
        if fence and text.count(fence[1]) % 2:
            self._fence = "" if self._fence == fence[1] else self._fence or fence[1]
            return
        for closing, name in _TAG.findall(text):
            if not closing:
                self._tags.append(name)
            elif name in self._tags:
                del self._tags[len(self._tags) - 1 - self._tags[::-1].index(name) :]

    def __bool__(self) -> bool:
        return bool(self._tags or self._fence)


def _differing(paragraph: Sequence[TemplateLine], differs: Varies) -> list[int]:
    """Return the indexes of the lines that differ by row."""
    return [index for index, line in enumerate(paragraph) if _differing_tokens(line, differs)]


def _differing_tokens(line: TemplateLine, differs: Varies) -> list[int]:
    return [index for index, token in enumerate(line) if not token.plain and differs(token.text)]


def _split_before(paragraph: list[TemplateLine], differs: Varies) -> tuple[str, list[TemplateLine]]:
    """Return the whole sentences that a paragraph opens with, and the remaining lines."""
    first = _differing(paragraph, differs)[0]
    inside = _OpenMarkup()
    end = 0
    for index, line in enumerate(paragraph[:first]):
        inside.read(line)
        if not inside and _SENTENCE_END.fullmatch(_joined([line])):
            end = index + 1
    if not inside:
        line = paragraph[first]
        token = line[0]
        ends = [match.end() for match in _SENTENCE.finditer(token.text)] if token.plain else []
        if ends:
            opening = [*paragraph[:first], [TemplateToken(token.text[: ends[-1]], True)]]
            remaining = [TemplateToken(token.text[ends[-1] :], True), *line[1:]]
            return _joined(opening), [remaining, *paragraph[first + 1 :]]
    return _joined(paragraph[:end]), paragraph[end:]


def _split_behind(paragraph: Sequence[TemplateLine], differs: Varies) -> tuple[str, str]:
    """Return a paragraph up to its last field, and the fixed text behind it that can be moved."""
    last = _differing(paragraph, differs)[-1]
    following = list(paragraph[last + 1 :])
    inside = _OpenMarkup()
    for line in paragraph[: last + 1]:
        inside.read(line)
    last_line, behind = (paragraph[last], []) if inside else _split_line(paragraph[last], differs)
    head: list[TemplateLine] = [*paragraph[:last], last_line]
    while following and not behind:
        if not inside and not _CLOSER.fullmatch(_joined([following[0]])):
            break
        inside.read(following[0])
        head.append(following.pop(0))
    return _joined(head), _joined([behind, *following])


def _split_line(line: TemplateLine, differs: Varies) -> tuple[TemplateLine, TemplateLine]:
    """Return a line up to the end of the sentence of its last field, and what follows."""
    last = _differing_tokens(line, differs)[-1]
    for index in range(last + 1, len(line)):
        token = line[index]
        match = _SENTENCE.search(token.text) if token.plain else None
        if match:
            head = TemplateToken(token.text[: match.end()], True)
            tail = TemplateToken(token.text[match.end() :], True)
            return [*line[:index], head], [tail, *line[index + 1 :]]
    return line, []


def _introduces(paragraph: Sequence[TemplateLine]) -> bool:
    """Return whether a fixed paragraph is only a heading or leads to what follows."""
    text = _joined(paragraph)
    return "\n" not in text and bool(_INTRODUCTION.fullmatch(text))


def _all_match(paragraph: Sequence[TemplateLine], pattern: re.Pattern[str]) -> bool:
    return all(pattern.fullmatch(_joined([line])) for line in paragraph)


def _joined(lines: Sequence[TemplateLine]) -> str:
    """Return the text of lines without trailing white space."""
    return "".join(token.text for line in lines for token in line).rstrip()


PARTS = ("system", "user")
"""Keys of a prompt that can be reordered; ``messages`` and ``raw`` stay, which may hold marks of
a chat template."""

_MAX_RENDERED_ROWS = 50
"""Rows on which a piece is rendered to see whether it differs."""

Data = Mapping[str, Any]
Score = Callable[[Prompt], float]
"""Returns the tokens per prompt that all rows would share with this prompt."""


class Suggestion(msgspec.Struct, frozen=True):
    """A reordered prompt."""

    texts: dict[str, str]
    """Parts by key; a missing key is omitted."""
    changed: tuple[str, ...]
    """Keys whose text differs from the job's."""
    gain: float
    """Tokens per row."""
    points_back: str | None = None
    """A word such as ``above`` in the moved text."""


def suggest(job: Job, rows: Sequence[Data], score: Score, min_gain: float) -> Suggestion | None:
    """Return the order of the job's prompt that shares most; None where none gains enough.

    Args:
        rows: data of rows that render.
        score: returns how much a prompt shares.
        min_gain: tokens per row that a change has to gain.
    """
    spec = job.prompt
    if spec is None or spec.user is None or len(rows) < 2:
        return None
    texts = _texts(spec, job.source)
    differs = _Varies(rows)
    cuts = {key: split_template(text, differs) for key, text in texts.items()}
    current_score = score(Prompt(spec, job.source))
    best: Suggestion | None = None
    for candidate in _candidates(texts, cuts):
        prompt = _prompt(candidate, job.source)
        if prompt is None or not _same_words(Prompt(spec, job.source), prompt, rows):
            continue
        gain = score(prompt) - current_score
        if gain >= max(min_gain, best.gain + min_gain if best else min_gain):
            changed = tuple(key for key in PARTS if candidate.get(key) != texts.get(key))
            back_references = [
                part.points_back for key in changed if (part := cuts[key]) is not None
            ]
            best = Suggestion(candidate, changed, gain, next(filter(None, back_references), None))
    return best


def yaml_of(suggestion: Suggestion, spec: PromptSpec) -> str:
    """Return the ``prompt:`` key of a job file with the suggested texts; unchanged files stay
    files."""
    lines = ["prompt:"]
    for key in PARTS:
        text = suggestion.texts.get(key)
        if text is None:
            continue
        old: TextSpec | None = getattr(spec, key)
        if key not in suggestion.changed and old is not None and old.file is not None:
            lines.append(f"  {key}: {{file: {_quoted(old.file.text)}}}")
        else:
            lines.append(f"  {key}: {_scalar(text)}")
    return "\n".join(lines) + "\n"


class _Varies:
    """Renders pieces of templates on some rows and caches whether the results differ."""

    def __init__(self, rows: Sequence[Data]) -> None:
        step = max(1, len(rows) // _MAX_RENDERED_ROWS)
        self._rows = rows[::step]
        self._cache: dict[str, bool] = {}

    def __call__(self, piece: str) -> bool:
        """Return whether some rows differ in ``piece``, or it cannot be rendered."""
        if piece not in self._cache:
            self._cache[piece] = self._render_differs(piece)
        return self._cache[piece]

    def _render_differs(self, piece: str) -> bool:
        try:
            template = Template(piece, "prompt", Origin("job"))
            first = template.render(self._rows[0])
            return any(template.render(row) != first for row in self._rows[1:])
        except (JobError, TemplateFailure):
            return True


def _texts(spec: PromptSpec, source: JobSource) -> dict[str, str]:
    texts: dict[str, str] = {}
    for key in PARTS:
        part: TextSpec | None = getattr(spec, key)
        if part is not None:
            texts[key] = source.texts.get(part.file.path, "") if part.file else part.text or ""
    return texts


def _candidates(
    texts: dict[str, str], cuts: dict[str, TemplateSplit | None]
) -> list[dict[str, str]]:
    """Return each part in a better order, and also with the varying system text moved to the
    user's."""
    better = {key: _reordered(texts[key], split) for key, split in cuts.items()}
    candidates = [better]
    system, user = cuts.get("system"), cuts.get("user")
    if system is not None and system.varying and user is not None:
        moved = {"user": _end(texts["user"], (user.fixed, system.differing, user.differing))}
        if system.fixed:
            moved["system"] = _end(texts["system"], (system.fixed,))
        candidates.append(moved)
    return [candidate for candidate in candidates if candidate != texts]


def _reordered(text: str, split: TemplateSplit | None) -> str:
    if split is None or not split.moved:
        return text
    return _end(text, (split.fixed, split.differing))


def _end(old: str, parts: Sequence[str]) -> str:
    """Join the parts by blank lines, with the end of ``old``."""
    return "\n\n".join(part for part in parts if part) + ("\n" if old.endswith("\n") else "")


def _prompt(texts: dict[str, str], source: JobSource) -> Prompt | None:
    try:
        return Prompt(PromptSpec.model_validate(texts), source)
    except (JobError, ValueError):  # a file may hold control characters, a job file may not
        return None


def _same_words(old: Prompt, new: Prompt, rows: Sequence[Data]) -> bool:
    """Return whether both prompts have the same words in any order."""
    for row in rows[:_MAX_RENDERED_ROWS]:
        try:
            if _count_words(old, row) != _count_words(new, row):
                return False
        except TemplateFailure:
            continue
    return True


def _count_words(prompt: Prompt, row: Data) -> Counter[str]:
    texts = [str(message["content"]) for message in prompt.render(row)]
    return Counter(word for text in texts for word in text.split())


def _scalar(text: str) -> str:
    """Return ``text`` as a YAML block below a key that is indented by two, else quoted."""
    if not text or "\n" not in text or not _fits_block(text):
        return _quoted(text)
    body = text.rstrip("\n")
    ends = len(text) - len(body)
    mark = {0: "-", 1: ""}.get(ends, "+")
    indent = "2" if body[0] in " \n" else ""
    lines = [f"    {line}" if line else "" for line in body.split("\n")]
    return "\n".join([f"|{indent}{mark}", *lines, *[""] * (ends - 1)])


def _fits_block(text: str) -> bool:
    plain = text.replace("\n", "").replace("\t", "")
    return bool(text.strip("\n")) and plain.isprintable()


def _quoted(text: str) -> str:
    quoted = msgspec.json.encode(text).decode()
    # YAML 1.1 readers take these characters for line breaks.
    return re.sub("[\x85\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", quoted)
