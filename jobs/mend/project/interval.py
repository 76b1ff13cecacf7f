"""Intervals of numbers."""


def overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether two intervals, ends included, have a number in common."""
    return a[0] <= b[0] <= a[1]
