"""How often each tool was called in a run, and how often that failed: counted from the journal."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bagent.store.segments import list_segments, whole_lines


class ToolCount(msgspec.Struct):
    """Calls of one tool, those of them that failed, and the error of the last failed one."""

    calls: int = 0
    failed: int = 0
    error: str | None = None


class _Call(msgspec.Struct):
    name: str
    error: str | None = None


_decode = msgspec.json.Decoder(_Call).decode


def count_tools(run_dir: Path, part: str | None = None) -> dict[str, ToolCount]:
    """Return the counts of each tool that was called, by name.

    Args:
        run_dir: the run directory.
        part: one part's journal, or None for those of all parts.
    """
    counts: dict[str, ToolCount] = {}
    for segment in list_segments(run_dir / "journal", "tools", part):
        with segment.path.open("rb") as handle:
            for _, line in whole_lines(handle, 0, segment.path.stat().st_size):
                try:
                    call = _decode(line)
                except msgspec.DecodeError:
                    continue
                count = counts.setdefault(call.name, ToolCount())
                count.calls += 1
                if call.error is not None:
                    count.failed += 1
                    count.error = call.error
    return counts
