"""What docstrings of the three styles say of parameters."""

from __future__ import annotations

import pytest

from bagent.tools.python_schema import read_docstring

GOOGLE = """Look a ship up.

    It may be one of many.

    Args:
        name (str): The name
            of the ship.
        year (int, optional): When. Default: 1912.
        *rest: More.

            Much more.

    Returns:
        str: what is known.

    Example:
        name: not a parameter
    """
NUMPY = """Look a ship up.

    It may be one of many.

    Parameters
    ----------
    name : str
        The name
        of the ship.
    year, month : int, optional
        When.

    Returns
    -------
    text : str
        What is known.
    """
SPHINX = """Look a ship up.

    It may be one of many.

    :param str name: The name
        of the ship.
    :param year: When.
    :type year: int
    :returns: what is known
    """


@pytest.mark.parametrize(
    ("docstring", "parameters"),
    [
        (
            GOOGLE,
            {
                "name": "The name of the ship.",
                "year": "When. Default: 1912.",
                "rest": "More. Much more.",
            },
        ),
        (NUMPY, {"name": "The name of the ship.", "year": "When.", "month": "When."}),
        (SPHINX, {"name": "The name of the ship.", "year": "When."}),
    ],
)
def test_parameters_are_read_and_the_text_before_them(
    docstring: str, parameters: dict[str, str]
) -> None:
    described = read_docstring(docstring)
    assert described.text == "Look a ship up.\n\nIt may be one of many."
    assert described.parameters == parameters


@pytest.mark.parametrize(
    ("docstring", "text"),
    [
        (None, ""),
        ("One line.", "One line."),
        ("Note: this stays.\n\nSo does: this.", "Note: this stays.\n\nSo does: this."),
        ("Text.\n\nRaises:\n    ValueError: never.", "Text."),
        ("Args:\n    x: words", ""),
    ],
)
def test_a_docstring_without_parameters_is_text(docstring: str | None, text: str) -> None:
    assert read_docstring(docstring).text == text
