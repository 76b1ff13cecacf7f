"""What became of each engine: one small file an engine, written by the node it runs on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

State = Literal["starting", "listening", "failed", "stopped"]


@dataclass(slots=True)
class EngineState:
    """One engine: its node and slot (from 0), port, and what it does.

    ``starts`` counts how often it was started; times are Unix seconds, ``listening_at`` is when
    its port first took a connection after the last start. ``exit_code`` is the last one.
    """

    node: str
    slot: int
    port: int
    state: State = "starting"
    starts: int = 0
    started_at: float | None = None
    listening_at: float | None = None
    exit_code: int | None = None

    @property
    def name(self) -> str:
        """``NODE.SLOT``: the name of its files."""
        return f"{self.node}.{self.slot}"

    @property
    def start_seconds(self) -> float | None:
        """From its last start to its first connection; None where that is not known."""
        if self.started_at is None or self.listening_at is None:
            return None
        return self.listening_at - self.started_at


def write_state(folder: Path, state: EngineState) -> None:
    """Write the engine's file, whole or not at all."""
    part = folder / f".{state.name}.{os.getpid()}"
    part.write_text(json.dumps(asdict(state)) + "\n", encoding="utf-8")
    part.replace(folder / f"{state.name}.json")


def read_states(folder: Path) -> Iterator[EngineState]:
    """The engines that have written a file, by name; what cannot be read is left out."""
    for path in sorted(folder.glob("*.json")):
        try:
            yield EngineState(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
