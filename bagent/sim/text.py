"""Seeded texts: free ones, and those that match a regular expression or a JSON Schema ``format``.

Expressions are those of JSON Schema's ``pattern`` (ECMA 262) without look-around and
back-references: literals, classes, escapes, groups, alternatives, quantifiers, anchors.
"""

from __future__ import annotations

import functools
import math
import random
import string
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from hashlib import blake2b

from bagent.sim.config import AnswerConfig

_TEXT = """
the a this each every one other new small large early late open simple clear useful
common rare steady quiet bright warm cold deep high low long short first second last
main whole model answer question sample result value reason method field record table
figure source change effect signal pattern measure study group region system process
stage level rate number part point line form case state time day season river mountain
island city garden forest harbour bridge road letter story song colour light water stone
metal paper glass shows gives takes keeps holds finds makes moves turns starts ends
grows falls rises stays follows leads joins leaves meets names counts reads writes asks
tells seems needs allows explains supports suggests depends agrees differs varies
increases decreases improves and or but so while because when where before after under
over between with without from into near across about against during through toward
slowly quickly often seldom always never also only even still again together apart
mostly partly clearly perhaps indeed
"""
_WORDS = tuple(_TEXT.split())
_POOL = 2048
_POOL_SEED = 20_261_127

Draw = Callable[[random.Random, int], str]
"""Makes one text. The number is how many repeats beyond its minimum a quantifier may take; below
0 it takes exactly so many."""

_LETTERS = string.ascii_letters
_VISIBLE = _LETTERS + string.digits + " .,:;-_/()"
_ESCAPES = {
    "d": string.digits,
    "D": _LETTERS,
    "w": _LETTERS + string.digits + "_",
    "W": " .,-",
    "s": " ",
    "S": _LETTERS + string.digits,
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "f": "\f",
    "v": "\v",
    "0": "\0",
}
_EXTRA_REPEATS = (16, 64, 256, 1024)
_ATTEMPTS = 8


@functools.cache
def sentences() -> tuple[str, ...]:
    """Return the fixed pool of ASCII sentences that texts are made of."""
    rng = random.Random(_POOL_SEED)
    pool: list[str] = []
    for _ in range(_POOL):
        sentence = rng.choices(_WORDS, k=rng.randint(5, 14))
        pool.append(" ".join(sentence).capitalize() + ".")
    return tuple(pool)


def seeded(prompt: bytes, *parts: object) -> random.Random:
    """Return a random source that depends on its arguments alone, in every process."""
    digest = blake2b(prompt, digest_size=8, person=b"bagent-sim")
    digest.update(repr(parts).encode("utf-8", "backslashreplace"))
    return random.Random(int.from_bytes(digest.digest(), "little"))


def draw_length(rng: random.Random, config: AnswerConfig) -> int:
    """Return the length of one free answer in tokens, at least 1.

    ``geometric``: a chance of 1/mean at each token to end there. ``normal``: a deviation of a
    quarter of the mean. ``fixed``: the mean.
    """
    mean = config.output_tokens
    if config.output_spread == "fixed" or mean == 1:
        return mean
    if config.output_spread == "normal":
        return max(1, round(rng.gauss(mean, mean / 4)))
    return 1 + int(math.log(1.0 - rng.random()) / math.log(1.0 - 1.0 / mean))


def free_text(rng: random.Random, size: int, *, ended: bool) -> str:
    """Return ASCII sentences of ``size`` characters.

    An ``ended`` text closes with a full stop and may be one character shorter.
    """
    pool = sentences()
    parts: list[str] = []
    length = 0
    while length <= size:
        parts.append(pool[int(rng.random() * _POOL)])
        length += len(parts[-1]) + 1
    text = " ".join(parts)[:size]
    if ended and size > 1:
        text = text[: size - 1].rstrip() + "."
    return text


def random_words(rng: random.Random, number: int) -> str:
    """Return ``number`` words, separated by blanks."""
    return " ".join(rng.choices(_WORDS, k=number))


def unit_vector(rng: random.Random, size: int) -> list[float]:
    """Return a random direction: ``size`` numbers whose squares add up to 1."""
    values = [rng.gauss(0.0, 1.0) for _ in range(size)]
    norm = math.sqrt(sum(v * v for v in values))
    return [v / norm for v in values]


class UnsupportedPattern(ValueError):
    """The expression is broken, or uses syntax that the generator does not support."""


def matching_text(
    rng: random.Random, pattern: str, min_length: int = 0, max_length: int | None = None
) -> str:
    """Return a text that matches ``pattern``, within the length limits where one is found.

    Raises:
        UnsupportedPattern: the expression is broken or not supported.
    """
    draw, open_start, open_end = _compiled(pattern)
    text = ""
    for extra in (4, 0, 1, 2, 8, -min_length, min_length, max_length or 0, *_EXTRA_REPEATS):
        for _ in range(_ATTEMPTS):
            text = draw(rng, extra)
            if len(text) < min_length and open_end:
                text += "".join(rng.choices(string.ascii_lowercase, k=min_length - len(text)))
            elif len(text) < min_length and open_start:
                text = "".join(rng.choices(string.ascii_lowercase, k=min_length - len(text))) + text
            if min_length <= len(text) and (max_length is None or len(text) <= max_length):
                return text
    return text


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> tuple[Draw, bool, bool]:
    parser = _Parser(pattern)
    draw = parser.alternatives()
    if parser.offset < len(pattern):
        raise UnsupportedPattern(f"unmatched ')' in pattern {pattern!r}")
    closed = pattern.endswith("$") and not pattern.endswith("\\$")
    return draw, not pattern.startswith("^"), not closed


class _Parser:
    """A recursive-descent parser that turns an expression into a :data:`Draw`."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.offset = 0

    def _peek(self) -> str:
        return self.pattern[self.offset : self.offset + 1]

    def _next(self) -> str:
        char = self._peek()
        if not char:
            raise UnsupportedPattern(f"pattern {self.pattern!r} ends too early")
        self.offset += 1
        return char

    def _accept(self, text: str) -> bool:
        if self.pattern.startswith(text, self.offset):
            self.offset += len(text)
            return True
        return False

    def alternatives(self) -> Draw:
        branches = [self._sequence()]
        while self._accept("|"):
            branches.append(self._sequence())
        if len(branches) == 1:
            return branches[0]
        return lambda rng, extra: branches[int(rng.random() * len(branches))](rng, extra)

    def _sequence(self) -> Draw:
        parts: list[Draw] = []
        while self._peek() and self._peek() not in "|)":
            if self._peek() in "^$":
                self.offset += 1
                continue
            parts.append(self._quantified(self._atom()))
        return lambda rng, extra: "".join(part(rng, extra) for part in parts)

    def _quantified(self, atom: Draw) -> Draw:
        bounds = self._bounds()
        if bounds is None:
            return atom
        least, most = bounds
        if self._peek() in ("?", "+") and self._peek():
            self.offset += 1

        def draw(rng: random.Random, extra: int) -> str:
            top = least + abs(extra)
            top = top if most is None else max(least, min(most, top))
            times = top if extra < 0 else rng.randint(least, top)
            return "".join(atom(rng, extra) for _ in range(times))

        return draw

    def _bounds(self) -> tuple[int, int | None] | None:
        for mark, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._accept(mark):
                return bounds
        if self._peek() != "{":
            return None
        end = self.pattern.find("}", self.offset)
        low, comma, high = self.pattern[self.offset + 1 : max(end, self.offset)].partition(",")
        if not low.isdigit() or (high and not high.isdigit()):
            return None
        self.offset = end + 1
        if not comma:
            return int(low), int(low)
        return int(low), int(high) if high else None

    def _atom(self) -> Draw:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return _choice(self._char_class())
        if char == ".":
            return _choice(_VISIBLE)
        if char == "\\":
            return self._escape_atom()
        return lambda _rng, _extra: char

    def _group(self) -> Draw:
        if self._accept("?"):
            if self._accept("<") or self._accept("P<"):
                if self._peek() in ("=", "!"):
                    raise UnsupportedPattern("look-behind is not supported")
                self.offset = self.pattern.index(">", self.offset) + 1
            elif not self._accept(":"):
                raise UnsupportedPattern("look-ahead and inline flags are not supported")
        inner = self.alternatives()
        if not self._accept(")"):
            raise UnsupportedPattern(f"missing ')' in pattern {self.pattern!r}")
        return inner

    def _escape_atom(self) -> Draw:
        if self._accept("b") or self._accept("B"):
            return lambda _rng, _extra: ""
        if self._peek().isdigit() and self._peek() != "0":
            raise UnsupportedPattern("back-references are not supported")
        return _choice(self._escaped())

    def _escaped(self) -> str:
        """Return the characters that an escape stands for; the backslash is already read."""
        char = self._next()
        if char in _ESCAPES:
            return _ESCAPES[char]
        if char in "ux":
            size = 4 if char == "u" else 2
            digits = self.pattern[self.offset : self.offset + size]
            self.offset += size
            if len(digits) < size or set(digits) - set(string.hexdigits):
                raise UnsupportedPattern(f"bad escape in pattern {self.pattern!r}")
            return chr(int(digits, 16))
        if char in "pP" and self._peek() == "{":
            name = self.pattern[self.offset : self.pattern.find("}", self.offset) + 1]
            self.offset += len(name)
            return string.digits if "N" in name else _LETTERS
        return char

    def _char_class(self) -> str:
        negated = self._accept("^")
        chars: list[str] = []
        first = True
        while first or self._peek() != "]":
            first = False
            start = self._class_part()
            ranged = len(start) == 1 and not self.pattern.startswith("-]", self.offset)
            if ranged and self._accept("-"):
                stop = self._class_part()
                chars.extend(chr(c) for c in range(ord(start), ord(stop[0]) + 1))
            else:
                chars.extend(start)
        self.offset += 1
        excluded = set(chars)
        if negated:
            chars = [c for c in _VISIBLE if c not in excluded]
        if not chars:
            raise UnsupportedPattern(f"an empty class in pattern {self.pattern!r}")
        return "".join(chars)

    def _class_part(self) -> str:
        char = self._next()
        return self._escaped() if char == "\\" else char


def _choice(chars: str) -> Draw:
    return lambda rng, _extra: chars[int(rng.random() * len(chars))]


def formatted_text(rng: random.Random, name: str) -> str | None:
    """Return a text of a JSON Schema ``format``; None for an unknown format."""
    moment = datetime(2020, 1, 1, tzinfo=UTC) + timedelta(seconds=rng.randrange(200_000_000))
    word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(4, 9)))
    number = rng.getrandbits(128)
    makers: dict[str, Callable[[], str]] = {
        "date": lambda: moment.date().isoformat(),
        "time": lambda: moment.strftime("%H:%M:%SZ"),
        "date-time": lambda: moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "duration": lambda: f"P{number % 30}DT{number % 24}H",
        "email": lambda: f"{word}@example.org",
        "idn-email": lambda: f"{word}@example.org",
        "hostname": lambda: f"{word}.example.org",
        "idn-hostname": lambda: f"{word}.example.org",
        "ipv4": lambda: ".".join(str(number >> shift & 255) for shift in (0, 8, 16, 24)),
        "ipv6": lambda: ":".join(f"{number >> 16 * i & 0xFFFF:x}" for i in range(8)),
        "uri": lambda: f"https://example.org/{word}",
        "iri": lambda: f"https://example.org/{word}",
        "uri-reference": lambda: f"/{word}",
        "iri-reference": lambda: f"/{word}",
        "uri-template": lambda: f"/{word}/{{id}}",
        "json-pointer": lambda: f"/{word}",
        "relative-json-pointer": lambda: f"{number % 3}/{word}",
        "regex": lambda: f"^{word}$",
        "uuid": lambda: _uuid(number),
    }
    maker = makers.get(name)
    return maker() if maker else None


def _uuid(number: int) -> str:
    digits = f"{number & ~(0xF << 76) & ~(0xC << 60) | 4 << 76 | 8 << 60:032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
