"""Agent jobs over a scripted server, with a Python tool that notes each of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from support.jobs import write_job
from support.replies import Reply, ok_tools, tool_call

Json = Any

TOOLS = '''
"""Tools that note each run: its words and when it began and ended."""

import json
import time
from pathlib import Path

LOG = Path(__file__).parent / "ran.jsonl"


def note(words: str, began: float) -> None:
    with LOG.open("a") as log:
        log.write(json.dumps({"words": words, "began": began, "ended": time.time()}) + "\\n")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    note(f"{a}+{b}", time.time())
    return a + b


def wait(seconds: float) -> str:
    """Wait a while."""
    began = time.time()
    (Path(__file__).parent / "began").write_text("yes")
    time.sleep(seconds)
    note(f"waited {seconds:g}", began)
    return f"waited {seconds:g}"


def wait_for_gate() -> str:
    """Wait for a file."""
    while not (Path(__file__).parent / "gate").exists():
        time.sleep(0.01)
    return "passed"


def tell(size: int) -> str:
    """Tell a long story."""
    note(f"told {size}", time.time())
    return ("once upon a time " * size)[:size]


def fail(why: str) -> str:
    """Fail."""
    note(f"failed {why}", time.time())
    raise ValueError(why)
'''


def agent_job(folder: Path, url: str, rows: int | Sequence[Json] = 1, **keys: Json) -> Path:
    """Write an agent job with the tools above into ``folder``; ``keys`` replace those of the job.

    ``agent`` keys are joined with the usual tools.
    """
    (folder / "tools.py").write_text(TOOLS)
    names = keys.pop("tools", ("add", "wait", "tell", "fail"))
    agent = {"tools": [{"python": f"tools.py:{name}"} for name in names]}
    agent |= keys.pop("agent", {})
    return write_job(folder, url, rows, agent=agent, **keys)


def ran(folder: Path) -> list[str]:
    """What ran to its end so far, in the order of ending."""
    return [line["words"] for line in runs_of(folder)]


def runs_of(folder: Path) -> list[dict[str, Json]]:
    """The runs so far: ``words``, ``began`` and ``ended`` (Unix seconds)."""
    path = folder / "ran.jsonl"
    if not path.exists():
        return []
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def calls(*names_and_arguments: tuple[str, Json], **fields: Any) -> Reply:
    """A reply that asks for these calls, with ids of their own."""
    entries = [
        tool_call(name, arguments, f"c{number}")
        for number, (name, arguments) in enumerate(names_and_arguments)
    ]
    return ok_tools(*entries, **fields)


def answers_in(body: dict[str, Json]) -> list[str]:
    """The texts of the tool messages in a request."""
    return [one["content"] for one in body["messages"] if one["role"] == "tool"]


def check_pairs(body: dict[str, Json]) -> None:
    """Fail where a call in a request lacks its one answer, or an answer its call."""
    asked: list[str] = []
    for message in body["messages"]:
        if message["role"] == "tool":
            asked.remove(message["tool_call_id"])
            continue
        assert not asked, f"no answers to {asked}"
        asked = [call["id"] for call in message.get("tool_calls") or ()]
    assert not asked, f"no answers to {asked}"
