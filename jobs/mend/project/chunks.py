"""Lists in pieces."""


def chunks(values: list[int], size: int) -> list[list[int]]:
    """The list in pieces of ``size``; the last one may be shorter."""
    return [values[i * size : (i + 1) * size] for i in range(len(values) // size)]
