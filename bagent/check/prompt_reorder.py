"""The prompt with the text that is the same for every row put first, so that a cache can reuse it.

A suggestion for a person: the words stay the same, their order does not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from jinja2 import TemplateSyntaxError

from bagent.errors import JobError
from bagent.job.source_map import Origin
from bagent.job.spec.job import Job, JobSource
from bagent.job.spec.prompt import PromptSpec, TextSpec
from bagent.job.templates.environment import ENVIRONMENT
from bagent.job.templates.prompt import Prompt
from bagent.job.templates.template import Template, TemplateFailure

Differs = Callable[[str], bool]
"""Tells whether a piece of a template comes out differently for some rows."""

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
    """A template's parts in order of a new template: ``front`` stays first, ``moved`` goes behind
    it, ``rest`` differs by row. Each part is a paragraph without the blank lines around it."""

    front: tuple[str, ...]
    moved: tuple[str, ...]
    rest: tuple[str, ...]

    @property
    def fixed(self) -> str:
        """What is the same for every row."""
        return "\n\n".join((*self.front, *self.moved))

    @property
    def differing(self) -> str:
        """What differs by row."""
        return "\n\n".join(self.rest)

    @property
    def points_back(self) -> str | None:
        """A word of the moved text that says where something stands, which may now be wrong."""
        found = _BACK.search("\n".join(self.moved))
        return found[0] if found else None


class TemplateToken(msgspec.Struct, frozen=True):
    """A stretch of a template that is not cut: plain text up to a line's end, or a tag."""

    text: str
    plain: bool


Line = list[TemplateToken]


def cut(template: str, differs: Differs) -> TemplateSplit | None:
    """The parts of ``template``, None where its tags leave no safe way to cut it."""
    atoms = _atoms(template)
    if atoms is None:
        return None
    lines, cue = _without_cue(list(_lines(atoms)), differs)
    front: list[str] = []
    moved: list[str] = []
    rest: list[str] = []
    held: list[str] = []  # fixed paragraphs that introduce whatever comes next
    for paragraph in _paragraphs(lines):
        text = _joined(paragraph)
        if not _differing(paragraph, differs):
            if rest and _all(paragraph, _CLOSER):
                rest.append(text)
            elif _introduces(paragraph):
                held.append(text)
            else:
                (moved if rest else front).extend((*held, text))
                held = []
            continue
        if not rest:
            opening, paragraph = _split_before(paragraph, differs)
            if opening:
                front.extend((*held, opening))
                held = []
        head, tail = _split_behind(paragraph, differs)
        rest.extend((*held, head))
        held = []
        if tail:
            moved.append(tail)
    (moved if rest else front).extend(held)
    return TemplateSplit(tuple(front), tuple(moved), (*rest, *cue))


def _atoms(template: str) -> list[TemplateToken] | None:
    """Text and tags in order; a block with all that is in it is one atom.

    None for what changes its neighbours: space control, ``set``, macros.
    """
    if _SPACE_CONTROL.search(template):
        return None
    atoms: list[TemplateToken] = []
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
                atoms.append(TemplateToken(value, True))
                block = ""
            elif not depth and kind in ("variable_end", "block_end", "comment_end", "raw_end"):
                atoms.append(TemplateToken(block, False))
                block = ""
    except TemplateSyntaxError:
        return None
    whole = "".join(atom.text for atom in atoms)
    return atoms if whole == template and not block else None


def _lines(atoms: Sequence[TemplateToken]) -> Iterator[Line]:
    line: Line = []
    for atom in atoms:
        pieces = atom.text.splitlines(keepends=True) if atom.plain else [atom.text]
        for piece in pieces:
            line.append(TemplateToken(piece, atom.plain))
            if atom.plain and piece.endswith("\n"):
                yield line
                line = []
    if line:
        yield line


def _without_cue(lines: list[Line], differs: Differs) -> tuple[list[Line], list[str]]:
    """The lines without a last one such as ``Answer:``, which asks to be gone on from; and it."""
    filled = [place for place, line in enumerate(lines) if _joined([line])]
    if not filled or _differing_atoms(lines[filled[-1]], differs):
        return lines, []
    last = _joined([lines[filled[-1]]])
    if not last.endswith(":"):
        return lines, []
    return lines[: filled[-1]], [last]


def _paragraphs(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """Lines up to a blank one that stands outside every tag pair and fence."""
    paragraph: list[Line] = []
    inside = _Inside()
    for line in lines:
        if not _joined([line]).strip() and not inside:
            if paragraph:
                yield paragraph
            paragraph = []
            continue
        inside.pass_over(line)
        paragraph.append(line)
    if paragraph:
        yield paragraph


class _Inside:
    """Which tags and fences are open; true while any is."""

    def __init__(self) -> None:
        self._tags: list[str] = []
        self._fence = ""

    def pass_over(self, line: Line) -> None:
        """Go behind ``line``."""
        text = "".join(atom.text if atom.plain else "\0" for atom in line)
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


def _differing(paragraph: Sequence[Line], differs: Differs) -> list[int]:
    """The places of the lines that differ by row."""
    return [place for place, line in enumerate(paragraph) if _differing_atoms(line, differs)]


def _differing_atoms(line: Line, differs: Differs) -> list[int]:
    return [place for place, atom in enumerate(line) if not atom.plain and differs(atom.text)]


def _split_before(paragraph: list[Line], differs: Differs) -> tuple[str, list[Line]]:
    """The whole sentences that a paragraph opens with, and the rest of it."""
    first = _differing(paragraph, differs)[0]
    inside = _Inside()
    end = 0
    for place, line in enumerate(paragraph[:first]):
        inside.pass_over(line)
        if not inside and _SENTENCE_END.fullmatch(_joined([line])):
            end = place + 1
    if not inside:
        line = paragraph[first]
        atom = line[0]
        ends = [found.end() for found in _SENTENCE.finditer(atom.text)] if atom.plain else []
        if ends:
            opening = [*paragraph[:first], [TemplateToken(atom.text[: ends[-1]], True)]]
            left = [TemplateToken(atom.text[ends[-1] :], True), *line[1:]]
            return _joined(opening), [left, *paragraph[first + 1 :]]
    return _joined(paragraph[:end]), paragraph[end:]


def _split_behind(paragraph: Sequence[Line], differs: Differs) -> tuple[str, str]:
    """A paragraph up to its last field, and the fixed text behind it that can stand elsewhere."""
    last = _differing(paragraph, differs)[-1]
    following = list(paragraph[last + 1 :])
    inside = _Inside()
    for line in paragraph[: last + 1]:
        inside.pass_over(line)
    kept, behind = (paragraph[last], []) if inside else _split_line(paragraph[last], differs)
    head: list[Line] = [*paragraph[:last], kept]
    while following and not behind:
        if not inside and not _CLOSER.fullmatch(_joined([following[0]])):
            break
        inside.pass_over(following[0])
        head.append(following.pop(0))
    return _joined(head), _joined([behind, *following])


def _split_line(line: Line, differs: Differs) -> tuple[Line, Line]:
    """A line up to the end of the sentence of its last field, and what follows."""
    last = _differing_atoms(line, differs)[-1]
    for place in range(last + 1, len(line)):
        atom = line[place]
        found = _SENTENCE.search(atom.text) if atom.plain else None
        if found:
            here = TemplateToken(atom.text[: found.end()], True)
            there = TemplateToken(atom.text[found.end() :], True)
            return [*line[:place], here], [there, *line[place + 1 :]]
    return line, []


def _introduces(paragraph: Sequence[Line]) -> bool:
    """Whether a fixed paragraph is only a heading, or a line that leads to what follows."""
    text = _joined(paragraph)
    return "\n" not in text and bool(_INTRODUCTION.fullmatch(text))


def _all(paragraph: Sequence[Line], pattern: re.Pattern[str]) -> bool:
    return all(pattern.fullmatch(_joined([line])) for line in paragraph)


def _joined(lines: Sequence[Line]) -> str:
    """The text of lines without the blanks and line ends at its end."""
    return "".join(atom.text for line in lines for atom in line).rstrip()


PARTS = ("system", "user")
"""The keys of a prompt that can be reordered. ``messages`` written out are left alone, and ``raw``
too: marks of a chat template may stand in it."""

_MOST_ROWS = 50
"""Rows on which a piece is tried to see whether it differs."""

Data = Mapping[str, Any]
Score = Callable[[Prompt], float]
"""Tokens of each prompt that all rows share, if this were the job's prompt."""


class Suggestion(msgspec.Struct, frozen=True):
    """A reordered prompt. ``texts`` are its parts by key; a key that is missing is left out.

    ``changed`` are the keys whose text is another than the job's. ``gain`` is in tokens a row.
    ``points_back`` is a word such as ``above`` in the moved text, None where there is none.
    """

    texts: dict[str, str]
    changed: tuple[str, ...]
    gain: float
    points_back: str | None = None


def suggest(job: Job, rows: Sequence[Data], score: Score, least: float) -> Suggestion | None:
    """The order of the job's prompt that shares most, None where none gains ``least`` tokens.

    Args:
        rows: data of rows that render.
        score: tells how much a prompt shares.
        least: tokens a row that a change has to gain.
    """
    spec = job.prompt
    if spec is None or spec.user is None or len(rows) < 2:
        return None
    texts = _texts(spec, job.source)
    differs = _Differs(rows)
    cuts = {key: cut(text, differs) for key, text in texts.items()}
    now = score(Prompt(spec, job.source))
    best: Suggestion | None = None
    for candidate in _candidates(texts, cuts):
        prompt = _prompt(candidate, job.source)
        if prompt is None or not _same_words(Prompt(spec, job.source), prompt, rows):
            continue
        gain = score(prompt) - now
        if gain >= max(least, best.gain + least if best else least):
            changed = tuple(key for key in PARTS if candidate.get(key) != texts.get(key))
            words = [one.points_back for key in changed if (one := cuts[key]) is not None]
            best = Suggestion(candidate, changed, gain, next(filter(None, words), None))
    return best


def yaml_of(suggestion: Suggestion, spec: PromptSpec) -> str:
    """The ``prompt:`` key of a job file with the suggested texts; unchanged files stay named."""
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


class _Differs:
    """Renders pieces of templates on some rows and remembers whether they came out alike."""

    def __init__(self, rows: Sequence[Data]) -> None:
        step = max(1, len(rows) // _MOST_ROWS)
        self._rows = rows[::step]
        self._known: dict[str, bool] = {}

    def __call__(self, piece: str) -> bool:
        """Whether some rows differ in ``piece``; also where it cannot be rendered."""
        if piece not in self._known:
            self._known[piece] = self._tried(piece)
        return self._known[piece]

    def _tried(self, piece: str) -> bool:
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
    """Each part in a better order; and the differing text of the system message moved as well."""
    better = {key: _reordered(texts[key], found) for key, found in cuts.items()}
    found = [better]
    system, user = cuts.get("system"), cuts.get("user")
    if system is not None and system.rest and user is not None:
        moved = {"user": _end(texts["user"], (user.fixed, system.differing, user.differing))}
        if system.fixed:
            moved["system"] = _end(texts["system"], (system.fixed,))
        found.append(moved)
    return [candidate for candidate in found if candidate != texts]


def _reordered(text: str, found: TemplateSplit | None) -> str:
    if found is None or not found.moved:
        return text
    return _end(text, (found.fixed, found.differing))


def _end(old: str, parts: Sequence[str]) -> str:
    """The parts with blank lines between, ending as ``old`` does."""
    return "\n\n".join(part for part in parts if part) + ("\n" if old.endswith("\n") else "")


def _prompt(texts: dict[str, str], source: JobSource) -> Prompt | None:
    try:
        return Prompt(PromptSpec.model_validate(texts), source)
    except (JobError, ValueError):  # a file may hold what a job file may not: control characters
        return None


def _same_words(old: Prompt, new: Prompt, rows: Sequence[Data]) -> bool:
    """Whether both say the same words, in whatever order: nothing is lost or doubled."""
    for row in rows[:_MOST_ROWS]:
        try:
            if _words(old, row) != _words(new, row):
                return False
        except TemplateFailure:
            continue
    return True


def _words(prompt: Prompt, row: Data) -> Counter[str]:
    texts = [str(message["content"]) for message in prompt.render(row)]
    return Counter(word for text in texts for word in text.split())


def _scalar(text: str) -> str:
    """``text`` as a YAML block below a key that is indented by two, else quoted."""
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
    return msgspec.json.encode(text).decode()
