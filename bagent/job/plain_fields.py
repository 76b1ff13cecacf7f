"""Templates of nothing but text and names, as most prompts are: filled without Jinja's machinery.

They come out as Jinja makes them, in a fifth of the time; whatever is out of the ordinary (a
missing field, a value that is no text or number) is left to Jinja.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import nodes

from bagent.job.jinja import HELPERS
from bagent.job.names import ROW
from bagent.job.template_limits import MAX_RENDER

_JINJAS_OWN = frozenset({*HELPERS, ROW, "self", "super"})


class PlainFields:
    """The texts around the fields of a template, and the fields, in order."""

    def __init__(self, form: str, names: tuple[str, ...]) -> None:
        self._form = form
        self._names = names

    def fill(self, data: Mapping[str, Any]) -> str | None:
        """The text for one row, None where Jinja has to say what becomes of it."""
        values = []
        for name in self._names:
            value = data.get(name)
            # Text and whole numbers print as they are; of the rest Jinja knows.
            if type(value) is not str and type(value) is not int:
                return None
            values.append(value)
        try:
            text = self._form % tuple(values)
        except ValueError:  # a number of more digits than Python prints
            return None
        return text if len(text) <= MAX_RENDER else None


def plain_fields(tree: nodes.Template) -> PlainFields | None:
    """The template as texts and fields, None where it has anything else in it."""
    form: list[str] = []
    names: list[str] = []
    for output in tree.body:
        if not isinstance(output, nodes.Output):
            return None
        for piece in output.nodes:
            if isinstance(piece, nodes.TemplateData):
                form.append(piece.data.replace("%", "%%"))
            elif isinstance(piece, nodes.Name) and piece.name not in _JINJAS_OWN:
                form.append("%s")
                names.append(piece.name)
            else:
                return None
    return PlainFields("".join(form), tuple(names)) if names else None
