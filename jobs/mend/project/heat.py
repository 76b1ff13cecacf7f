"""Temperatures."""


def to_celsius(fahrenheit: float) -> float:
    """Degrees Celsius."""
    return fahrenheit - 32 * 5 / 9
