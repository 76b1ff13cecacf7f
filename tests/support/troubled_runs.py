"""Three runs in which something is wrong, and what it is: can a reader find it on the page alone?

As a program, ``python tests/support/troubled_runs.py FOLDER`` leaves ``a.html``, ``b.html``,
``c.html`` and ``truth.txt`` there. All is drawn from a seed; only the ports differ.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

if not __package__:  # started as a program: its neighbours are found from tests/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from support.cli import run_bagent
from support.fake_server import FakeServer
from support.jobs import write_job
from support.replies import Reply, ok, refused, slow, status

Json = Any
WORDS = ["stone", "river", "measure", "light", "early", "sample", "field", "result", "paper"]


class Trouble(msgspec.Struct, frozen=True):
    """A run and its truth: ``expected`` are words that must stand on the page's first screens."""

    folder: Path
    truth: str
    expected: tuple[str, ...]

    @property
    def page(self) -> Path:
        """The report."""
        return self.folder / "runs" / "job" / "report.html"


def words(draw: random.Random, count: int) -> str:
    """Return that many words."""
    return " ".join(draw.choice(WORDS) for _ in range(count))


def answer(text: str, tokens: int, **fields: Any) -> Reply:
    """Build an answer that is counted as ``tokens``."""
    usage = {"prompt_tokens": 120, "completion_tokens": tokens, "total_tokens": 120 + tokens}
    return ok(text, usage=usage, **fields)


def reported(folder: Path) -> None:
    """Run the job in ``folder`` and make its page."""
    done = run_bagent(["run", "job.yaml", "--progress", "none", "--no-canary"], folder)
    assert done.code in (0, 1), done.err
    made = run_bagent(["report", "job"], folder)
    assert made.code == 0, made.err


@contextmanager
def servers(count: int) -> Iterator[list[FakeServer]]:
    """Scripted servers; they know no row yet."""
    with ExitStack() as stack:
        yield [stack.enter_context(FakeServer({"*": [ok()]})) for _ in range(count)]


def one_slow_endpoint(folder: Path) -> Trouble:
    """Four endpoints: one takes three times as long, another often says that it is busy."""
    draw = random.Random(1)
    rows = [{"id": f"r{n}", "text": words(draw, draw.randint(5, 60))} for n in range(400)]
    with servers(4) as fleet:
        for place, server in enumerate(fleet):
            script: dict[str, list[Reply]] = {}
            for row in rows:
                tokens = draw.randint(20, 80)
                delay = (0.02 + 0.001 * tokens) * (3.0 if place == 2 else 1.0)
                reply = slow(delay, answer(words(draw, tokens), tokens))
                busy = [slow(0.02, status(503))] if place == 0 and draw.random() < 0.1 else []
                script[row["id"]] = [*busy, reply]
            server.set_script(script)
        (folder / "hosts").write_text("".join(f"{server.address}\n" for server in fleet))
        limits = {"per_endpoint": 4}
        write_job(
            folder, "vllm", rows, hostfile="hosts", limits=limits, batching={"mode": "single"}
        )
        reported(folder)
        slow_one, busy_one = fleet[2].address, fleet[0].address
    truth = (
        f"{slow_one} takes three times as long as the other three. {busy_one} answers 503 to some"
        " of its first tries (those rows end well). No row fails for good."
    )
    return Trouble(folder, truth, (f"{slow_one} is slow", f"{busy_one} fails"))


def three_percent_invalid(folder: Path) -> Trouble:
    """Six hundred rows; the year of a Latin title is given in Roman numerals, as text."""
    draw = random.Random(2)
    rows, script = [], {}
    for n in range(600):
        lang = draw.choices(["en", "de", "fr", "la"], [80, 10, 6, 4])[0]
        row = {
            "id": f"r{n}",
            "title": words(draw, draw.randint(4, 12)),
            "lang": lang,
            "venue": draw.choice(["journal", "book", "letter"]),
        }
        value: dict[str, Json] = {"year": draw.randint(1700, 2020), "topic": draw.choice(WORDS)}
        if lang == "la" and draw.random() < 0.8:
            value["year"] = draw.choice(["MDCC", "MDCCXL", "MCMXII", "MDCCCLX"])
        rows.append(row)
        text = msgspec.json.encode(value).decode()
        script[row["id"]] = [answer(text, 14), answer(text, 14)]
        if n in (77, 431):
            script[row["id"]] = [refused()]
    bad = sum("MD" in str(r[0].text) or "MC" in str(r[0].text) for r in script.values())
    schema = {
        "type": "object",
        "properties": {"year": {"type": "integer"}, "topic": {"type": "string"}},
        "required": ["year", "topic"],
    }
    prompt = {"user": "id={{ id }} {{ title }} ({{ lang }}, {{ venue }}): year and topic"}
    with servers(2) as fleet:
        for server in fleet:
            server.set_script(script)
        (folder / "hosts").write_text("".join(f"{server.address}\n" for server in fleet))
        write_job(
            folder, "vllm", rows, hostfile="hosts", output={"schema": schema, "retries": 1},
            prompt=prompt, batching={"mode": "single"},
        )  # fmt: skip
        reported(folder)
    truth = (
        f"{bad} of 600 rows ({100 * bad / 600:.3g} %) are invalid: /year is text (Roman numerals),"
        " not an integer; they are rows with lang = la. Two more rows are refused."
    )
    expected = (f"{bad} rows", "/year", 'is not of type "integer"', "lang = la")
    return Trouble(folder, truth, expected)


def a_field_that_makes_answers_long(folder: Path) -> Trouble:
    """Answers grow with ``notes``; the longest are cut off. ``pages`` grows with it by half."""
    draw = random.Random(3)
    rows, script = [], {}
    cut = 0
    for n in range(500):
        size = draw.choice([0, 0, draw.randint(10, 100), draw.randint(50, 400)])
        row: dict[str, Json] = {
            "id": f"r{n}",
            "title": words(draw, draw.randint(3, 30)),
            "audience": draw.choice(["experts", "students", "press"]),
            "pages": draw.randint(1, 20) + size // 20,
        }
        if size:
            row["notes"] = words(draw, size)
        rows.append(row)
        tokens = 30 + round(size * draw.uniform(0.5, 0.8)) + draw.randint(0, 20)
        long = tokens >= 200
        cut += long
        ends = {"finish_reason": "length"} if long else {}
        script[row["id"]] = [answer(words(draw, min(tokens, 200)), min(tokens, 200), **ends)]
    prompt = {
        "user": "id={{ id }} Sum up {{ title }} for {{ audience }} ({{ pages }} pages)."
        "{% if notes is defined %} Take up every one of these notes: {{ notes }}{% endif %}"
    }
    with servers(1) as fleet:
        fleet[0].set_script(script)
        sampling = {"temperature": 0, "max_tokens": 200}
        write_job(
            folder, fleet[0].url, rows, prompt=prompt, sampling=sampling,
            batching={"mode": "single"},
        )  # fmt: skip
        reported(folder)
    truth = (
        f"notes: the longer the notes, the longer the answer; {cut} of 500 answers"
        f" ({100 * cut / 500:.3g} %) are cut off at max_tokens (200), all of rows with long notes."
        " title and audience have nothing to do with it, pages only because it grows with notes."
    )
    return Trouble(
        folder, truth, ("of notes", "the larger notes, the longer the answer", "cut off")
    )


TROUBLES: dict[str, Callable[[Path], Trouble]] = {
    "a": one_slow_endpoint,
    "b": three_percent_invalid,
    "c": a_field_that_makes_answers_long,
}


def main(target: Path) -> None:
    """Leave the pages and the truth in ``target``."""
    target.mkdir(parents=True, exist_ok=True)
    told = []
    for name, make in TROUBLES.items():
        with TemporaryDirectory() as folder:
            trouble = make(Path(folder))
            shutil.copy(trouble.page, target / f"{name}.html")
            told.append(f"{name}.html: {trouble.truth}\n")
    (target / "truth.txt").write_text("".join(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
