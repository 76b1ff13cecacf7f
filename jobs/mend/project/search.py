"""Search in sorted lists."""


def find(values: list[int], wanted: int) -> int:
    """The place of a value in a sorted list, -1 where it is not there."""
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if values[middle] == wanted:
            return middle
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle - 1
    return -1
