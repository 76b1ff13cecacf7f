"""Shares of a path."""


def extension(name: str) -> str:
    """What stands behind the last dot of a file's name, without the dot; empty without one."""
    return name.split(".")[1]
