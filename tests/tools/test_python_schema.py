"""Signatures of functions as JSON Schemas, and arguments as their types want them."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import functools
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, NotRequired, Required, TypedDict

import pydantic
import pytest

from bagent.answers.schema.schema import OutputSchema
from bagent.tools.python_schema import (
    ArgumentsFault,
    SignatureFault,
    read_docstring,
    read_signature,
    result_text,
)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Place(TypedDict):
    city: str
    country: NotRequired[str]


class Loose(TypedDict, total=False):
    name: Required[str]
    place: Place


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(min_length=1, description="the name")
    colors: set[Color] = set()


class Tree(pydantic.BaseModel):
    label: str
    kids: list[Tree] = []


LEAF: dict[str, Any] = {"label": "b", "kids": []}


def one(hint: Any, default: Any = dataclasses.MISSING) -> Callable[..., Any]:
    """A function with one parameter ``x``."""

    def function(x: Any) -> Any:
        return x

    function.__annotations__ = {"x": hint}
    if default is not dataclasses.MISSING:
        function.__defaults__ = (default,)
    return function


def of(hint: Any, default: Any = dataclasses.MISSING) -> tuple[Any, OutputSchema, Any]:
    """The schema of ``x``, one that decides, and what makes arguments."""
    signature = read_signature(one(hint, default), {})
    decides = OutputSchema.load(signature.schema, base=typing.cast(Any, __file__))
    return signature.schema["properties"]["x"], decides, signature.bind


@pytest.mark.parametrize(
    ("hint", "given", "value", "refused"),
    [
        (int, 3, 3, ["3", 3.5, True, None]),
        (float, 3, 3.0, ["3", False]),
        (str, "a", "a", [1, None]),
        (bool, True, True, [1, 0, "true"]),
        (int | None, None, None, ["5", True]),
        (int | str, 5, 5, [2.5]),
        (Literal["a", 1], 1, 1, ["b", 2, True]),
        (Color, "red", Color.RED, ["RED", None]),
        (list[int], [1, 2], [1, 2], [[True], ["1"], 1, None]),
        (dict[str, int], {"a": 1}, {"a": 1}, [{"a": "1"}, []]),
        (tuple[int, str], [1, "a"], (1, "a"), [[1], [1, "a", 2], ["a", 1]]),
        (tuple[int, ...], [1, 2, 3], (1, 2, 3), [["a"]]),
        (set[str], ["a", "b"], {"a", "b"}, [["a", "a"], "a"]),
        (datetime.date, "2024-02-29", datetime.date(2024, 2, 29), ["2024-02-30", 5]),
        (decimal.Decimal, "1.5", decimal.Decimal("1.5"), [True, None]),
        (Point, {"x": 1}, Point(1, 0), [{}, {"x": "1"}, {"x": 1, "z": 1}]),
        (Place, {"city": "Rome"}, {"city": "Rome"}, [{}, {"city": 1}]),
        (dict[str, list[Loose]], {"a": [{"name": "n"}]}, {"a": [{"name": "n"}]}, [{"a": [{}]}]),
        (Person, {"name": "Ann"}, Person(name="Ann"), [{"name": ""}, {}]),
        (Tree, {"label": "a", "kids": [LEAF]}, Tree(label="a", kids=[LEAF]), [{"kids": []}]),
        (list[Person | Point], [{"x": 1}], [Point(1)], [[{"z": 1}]]),
        (Any, {"any": [1]}, {"any": [1]}, []),
        (None, None, None, [0]),
        (Annotated[int, pydantic.Field(ge=1, le=5)], 5, 5, [0, 6]),
    ],
    # Not str: how a set is written differs from process to process.
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_a_type_takes_its_json_form_and_nothing_else(
    hint: Any, given: Any, value: Any, refused: list[Any]
) -> None:
    _, decides, bind = of(hint)
    assert decides.accepts({"x": given})
    made = bind({"x": given})[1]["x"]
    assert made == value
    assert type(made) is type(value)
    for wrong in refused:
        assert not decides.accepts({"x": wrong}), wrong
    assert not decides.accepts({})


def test_a_parameter_with_a_default_may_be_left_out_and_the_function_sets_it() -> None:
    schema, decides, bind = of(list[int], [1])
    assert schema["default"] == [1]
    assert decides.accepts({})
    assert bind({}) == ([], {})
    assert "default" not in of(int, object())[0], "it has no JSON form"


@pytest.mark.parametrize("name", ["schema", "_hidden", "self"])
def test_any_name_may_be_a_parameter(name: str) -> None:
    space: dict[str, Any] = {}
    exec(f"def f({name}: int): return {name}", space)
    assert read_signature(space["f"], {}).bind({name: 5}) == ([], {name: 5})


def test_positional_parameters_come_in_their_order_with_their_defaults() -> None:
    def function(a: int, b: str = "b", /, *, c: bool = False) -> None: ...

    bind = read_signature(function, {}).bind
    assert bind({"a": 1}) == ([1, "b"], {})
    assert bind({"c": True, "a": 1, "b": "x"}) == ([1, "x"], {"c": True})


def test_words_come_from_annotations_before_docstrings() -> None:
    def function(
        a: Annotated[int, "of a"], b: Annotated[int, pydantic.Field(description="of b")], c: int
    ) -> None: ...

    words = {"a": "no", "b": "no", "c": "of c"}
    properties = read_signature(function, words).schema["properties"]
    assert [properties[name]["description"] for name in "abc"] == ["of a", "of b", "of c"]


class Callee:
    """An object that is called like a function."""

    def __call__(self, x: int) -> int:
        return x


def test_methods_callable_objects_and_wrapped_functions_are_read() -> None:
    @functools.wraps(one(int))
    def wrapped(*values: Any, **named: Any) -> Any: ...

    for function in (Callee(), Callee().__call__, wrapped):
        assert read_signature(function, {}).schema["required"] == ["x"]


class Plain:
    """A class that has no JSON form."""


def unknown(x: NoSuchType) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x, "its parameter x has no annotation"),
        (lambda *values: values, "named parameters only"),
        (lambda **values: values, "named parameters only"),
        (unknown, "NoSuchType"),
        (one(Plain), "no JSON form"),
        (one(Callable[[int], int]), "no JSON form"),
        (one(int, pydantic.Field(3)), "Annotated"),
    ],
)
def test_what_cannot_be_a_tool_is_told(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(SignatureFault, match=words):
        read_signature(function, {})


def test_arguments_that_only_the_types_refuse_are_told_in_words() -> None:
    def even(value: int) -> int:
        if value % 2:
            raise ValueError("not even")
        return value

    _, decides, bind = of(Annotated[int, pydantic.AfterValidator(even)])
    assert decides.accepts({"x": 3})
    with pytest.raises(ArgumentsFault, match="x: Value error, not even"):
        bind({"x": 3})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (None, "null"),
        (Point(1, 2), '{"x":1,"y":2}'),
        (Person(name="Ann", colors={Color.RED}), '{"name":"Ann","colors":["red"]}'),
        (float("nan"), '"NaN"'),
        (b"bytes", '"bytes"'),
    ],
)
def test_results_are_text_as_they_are_else_json(value: Any, text: str) -> None:
    assert result_text(value) == text
    with pytest.raises(ValueError, match="no JSON form"):
        result_text({"a": object(), "b": value})


GOOGLE = """Look a ship up.

    It may be one of many.

    Args:
        name (str): The name
            of the ship.
        year (int, optional): When. Default: 1912.

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
        (GOOGLE, {"name": "The name of the ship.", "year": "When. Default: 1912."}),
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
        ("Note: this stays.\n\nSo does: this.", "Note: this stays.\n\nSo does: this."),
        ("Text.\n\nRaises:\n    ValueError: never.", "Text."),
        ("Args:\n    x: words", ""),
    ],
)
def test_a_docstring_without_parameters_is_text(docstring: str | None, text: str) -> None:
    assert read_docstring(docstring).text == text
