"""The prompt with the text that is the same for every row put first, so that a cache can reuse it.

A suggestion for a person: the words stay the same, their order does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from bagent.checks.pieces import Cut, cut
from bagent.errors import JobError
from bagent.job.origin import Origin
from bagent.job.prompt import Prompt
from bagent.job.spec import Job, JobSource
from bagent.job.spec_prompt import PromptSpec, TextSpec
from bagent.job.template import Template, TemplateFailure

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
            lines.append(f"  {key}: {{file: {_quoted(old.file.given)}}}")
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


def _candidates(texts: dict[str, str], cuts: dict[str, Cut | None]) -> list[dict[str, str]]:
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


def _reordered(text: str, found: Cut | None) -> str:
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
