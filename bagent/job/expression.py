"""One Jinja expression, such as ``plan.items`` or ``round >= 3``, in the sandbox of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateSyntaxError, meta
from jinja2.runtime import Undefined

from bagent.errors import JobError, Position
from bagent.job.jinja import ENVIRONMENT, HELPERS, MissingField
from bagent.job.names import ROW, names_of
from bagent.job.template import ROW_ERRORS, TemplateFailure
from bagent.job.template_limits import end_budget, start_budget


class Expression:
    """An expression over named values.

    ``names`` are the names that it uses, ``uses`` the dotted chains that have to be there, such as
    ``("plan", "items")``: those that no ``default`` or ``is defined`` guards.

    Args:
        text: the expression, without braces.
        where: its name in messages, such as ``stages[1].items``.
        at: where it stands.

    Raises:
        JobError: it is no expression.
    """

    def __init__(self, text: str, where: str, at: Position | None = None) -> None:
        self.text = text
        self.where = where
        try:
            tree = ENVIRONMENT.parse("{{ " + text + " }}")
            self._evaluate = ENVIRONMENT.compile_expression(text, undefined_to_none=False)
        except TemplateSyntaxError as error:
            words = (error.message or "not an expression").rstrip(".")
            raise JobError(
                f"{where}: {words}: {text}", hint="write it without braces", at=at
            ) from None
        self.names = frozenset(meta.find_undeclared_variables(tree)) - HELPERS.keys()
        found = names_of(tree)
        self.uses = tuple(use.chain for use in found.uses if use.chain[0] in self.names)
        if found.row:  # which only prompts have
            self.uses = ((ROW,), *self.uses)

    def value(self, scope: Mapping[str, Any]) -> Any:
        """Its value for the names in ``scope``.

        Raises:
            TemplateFailure: a name is missing, or the expression fails on these values.
        """
        start_budget()
        try:
            found = self._evaluate({**HELPERS, **scope})
            if isinstance(found, Undefined):
                str(found)
        except MissingField as error:
            raise TemplateFailure(f"{self.where}: there is no {error.name}") from None
        except ROW_ERRORS as error:
            raise TemplateFailure(f"{self.where}: {error}") from None
        finally:
            end_budget()
        return found

    def holds(self, scope: Mapping[str, Any]) -> bool:
        """Whether it is true; a name that is missing counts as false.

        Raises:
            TemplateFailure: the expression fails on these values.
        """
        start_budget()
        try:
            return bool(self._evaluate({**HELPERS, **scope}))
        except MissingField:
            return False
        except ROW_ERRORS as error:
            raise TemplateFailure(f"{self.where}: {error}") from None
        finally:
            end_budget()
