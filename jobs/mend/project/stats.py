"""Numbers in short."""


def median(values: list[float]) -> float:
    """The value in the middle."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
