"""The journal: append-only JSON lines, the source of truth of a run."""
