"""Templates: checked at load, rendered once per row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from jinja2 import Template as JinjaTemplate
from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.runtime import Undefined

from bagent.errors import JobError, Position
from bagent.job.templates.environment import (
    ENVIRONMENT,
    HELPERS,
    MAX_RENDER,
    MissingField,
    TooLarge,
    end_budget,
    prepare,
    start_budget,
)
from bagent.job.templates.variables import ROW, Chain, TemplateNames, Use, forbidden, names_of
from bagent.job.validation import Origin
from bagent.text.suggest import did_you_mean, nearest_name
from bagent.types import ErrorKind

_JINJAS_OWN = frozenset({*HELPERS, ROW, "self", "super"})


class PlainFields:
    """The texts around the fields of a template, and the fields, in order."""

    def __init__(self, form: str, names: tuple[str, ...]) -> None:
        self._form = form
        self._names = names

    def fill(self, data: Mapping[str, Any]) -> str | None:
        """Return the text for one row, or None where Jinja has to render it."""
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
    """Return the template as texts and fields; None where it has other nodes."""
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


_TAG = re.compile(r"\{\{|\{%|\{#")
_SPACED_NAME = re.compile(r"\{\{-?\s*(?:row\.)?([^\W\d]\w*(?:[ ]+\w+)+)\s*-?\}\}")
_SINGLE = re.compile(r"(?<![{$\\])\{ *([A-Za-z_]\w*) *\}(?!\})")
_UNCLOSED = re.compile(r"\{\{-?\s*([A-Za-z_][^{}:]*?)\s*\}(?!\})")
_TAGS = re.compile(
    r"\{%-?\s*raw\s*-?%\}.*?\{%-?\s*endraw\s*-?%\}|\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}", re.DOTALL
)
ROW_ERRORS = (
    TemplateError,
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    AssertionError,
    RecursionError,
    MemoryError,
    RuntimeError,
    re.error,
)
"""What templates raise on odd data: each is that row's failure, not the run's."""


class TemplateFailure(Exception):
    """One row cannot be rendered; the text says which field or what is wrong."""

    kind: ErrorKind = "template"


class Template:
    """One text with Jinja tags.

    Args:
        text: the template.
        where: its name in messages, such as ``prompt.user``.
        origin: position of the text in its file.

    Raises:
        JobError: the template is not Jinja, uses an unknown filter or test, or a tag that would
            need other templates; with file, line and column.
    """

    def __init__(self, text: str, where: str, origin: Origin) -> None:
        self.text = text
        self.where = where
        self._origin = origin
        self.constant: str | None = text if _TAG.search(text) is None else None
        self._plain: PlainFields | None = None
        self.names = TemplateNames(frozenset(), (), frozenset(), False, ())
        if self.constant is None:
            self._compile()

    @property
    def fields(self) -> frozenset[str] | None:
        """The fields of the row that the text uses; None where it uses the row as a whole."""
        return self.names.fields

    def render(self, data: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> str:
        """Return the text for one row.

        Args:
            data: the row's fields.
            extra: further names; they come before fields.

        Raises:
            TemplateFailure: a field is missing, the template fails on this row, the text would
                be larger than 64 MB, or its loops take more than 2 s.
        """
        if self.constant is not None:
            return self.constant
        if self._plain is not None and not extra:
            text = self._plain.fill(data)
            if text is not None:
                return text
        try:
            context = self._context(ENVIRONMENT, self._scope(data, extra), None, {}, None)
            start_budget()
            if self._loops:
                return self._bounded(self._root(context))
            text = "".join(self._root(context))
        except ROW_ERRORS as error:
            raise self._failure(error, data, extra) from None
        finally:
            end_budget()
        if len(text) > MAX_RENDER:
            raise TemplateFailure(f"{self.where} renders to more than 64 MB")
        return text

    def check(
        self, sample: Sequence[Mapping[str, Any]], extra: Mapping[str, frozenset[str] | None]
    ) -> None:
        """See that every name is in some row of ``sample``, is guarded, or is in ``extra``.

        Args:
            sample: the first rows.
            extra: further names, each with the properties that it may have; None: any.

        Raises:
            JobError: at the name, with the field that was probably meant.
        """
        for use in self.names.uses:
            if use.chain[0] in extra:
                lacks = missing_property_hint(use.chain, extra[use.chain[0]])
                if lacks is not None:
                    name = ".".join(use.chain[:2])
                    raise self._error(f"there is no {name}", use.line, lacks, use.chain[0])
            elif sample and _is_missing(use.chain, sample):
                raise self._unknown(use, sample, set(extra))

    def single_braces(self, sample: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the fields that the text has as ``{field}``, which Jinja does not replace."""
        return sorted(self.in_braces & {name for row in sample for name in row})

    @property
    def in_braces(self) -> frozenset[str]:
        """The names in single braces."""
        return frozenset(_SINGLE.findall(_TAGS.sub("", self.text)))

    def _compile(self) -> None:
        try:
            tree = ENVIRONMENT.parse(self.text)
            self._check_tree(tree)
            self.names = names_of(tree)
            prepare(tree)
            code = ENVIRONMENT.compile(tree, self.where)
        except TemplateSyntaxError as error:
            message = error.message or "not a template"
            hint = _with_blanks(self.text, error.lineno) or _literal(message)
            if unclosed := _unclosed(self.text, error.lineno):
                message, hint = unclosed
            raise self._error(message, error.lineno, hint) from None
        except RecursionError:
            raise self._error("the template nests too deeply", 1, "") from None
        except SyntaxError as error:  # of the Python code that Jinja made
            raise self._error(error.msg, 1, "") from None
        except ValueError:  # of Python's limit on the digits of a whole number
            raise self._error("a number has too many digits", 1, "") from None
        compiled = JinjaTemplate.from_code(ENVIRONMENT, code, {})
        self._root = compiled.root_render_func
        self._context = ENVIRONMENT.context_class
        self._loops = next(tree.find_all((nodes.For, nodes.Macro)), None) is not None
        self._helpers = {name: HELPERS[name] for name in self.names.helpers}
        self._called = {name: HELPERS[name] for name in self.names.called}
        self._plain = plain_fields(tree)
        if _only_text(tree):
            self.constant = "".join(self._root(self._context(ENVIRONMENT, {}, None, {}, None)))

    def _check_tree(self, tree: nodes.Template) -> None:
        for node in forbidden(tree):
            kind = type(node).__name__.lower()
            raise self._error(f"{kind} needs other templates", node.lineno, "use {file: PATH}")
        for node in tree.find_all(nodes.Block):
            raise self._error("block has no use here", node.lineno, "leave the block tags out")
        for use in tree.find_all((nodes.Filter, nodes.Test)):
            kind = type(use).__name__.lower()
            registry = ENVIRONMENT.filters if kind == "filter" else ENVIRONMENT.tests
            if use.name not in registry:
                meant = nearest_name(use.name, registry)
                hint = f"did you mean {meant}?" if meant else ""
                raise self._error(f"there is no {kind} {use.name}", use.lineno, hint, use.name)

    def _error(self, message: str, line: int, hint: str, word: str = "") -> JobError:
        at = self._origin.position(self.text, line, word)
        return JobError(f"{self.where}: {message.rstrip('.')}", hint=hint, at=at)

    def _scope(self, data: Mapping[str, Any], extra: Mapping[str, Any] | None) -> dict[str, Any]:
        if not (self._helpers or extra or self.names.row) and isinstance(data, dict):
            # The row itself: nothing in a template can change it.
            return data
        scope = {**self._helpers, **data, **self._called}
        if self.names.row:
            scope[ROW] = data
        if extra:
            scope.update(extra)
        return scope

    def _bounded(self, pieces: Iterator[str]) -> str:
        parts, size = [], 0
        for piece in pieces:
            size += len(piece)
            if size > MAX_RENDER:
                raise TooLarge("more than 64 MB")
            parts.append(piece)
        return "".join(parts)

    def _failure(
        self, error: BaseException, data: Mapping[str, Any], extra: Mapping[str, Any] | None
    ) -> TemplateFailure:
        if isinstance(error, MissingField):
            name = self._dotted(error.name, {**data, **(extra or {})})
            return TemplateFailure(f"{self.where}: the row has no field {name}")
        if isinstance(error, TooLarge):
            return TemplateFailure(f"{self.where} renders to more than 64 MB")
        if isinstance(error, MemoryError):
            return TemplateFailure(f"{self.where} needs too much memory")
        message = " ".join(str(error).split()) or type(error).__name__
        return TemplateFailure(f"{self.where}: {message[:300]}")

    def _dotted(self, name: str, data: Mapping[str, Any]) -> str:
        """Return the template's full chain for the missing ``name``."""
        tail = tuple(name.split("."))
        ending = [chain for chain in self.names.chains if _ends(chain, tail)]
        for chain in ending:
            if not _has(data, chain):
                return ".".join(chain)
        return ".".join(ending[0]) if ending else name

    def _unknown(
        self, use: Use, sample: Sequence[Mapping[str, Any]], extra_names: set[str]
    ) -> JobError:
        name = ".".join(use.chain)
        meant = _meant(use.chain, sample, extra_names)
        guard = f'guard it: {{{{ {name} | default("") }}}}'
        several = len(sample) > 1
        rows = f"in none of the first {len(sample)} rows" if several else "not in the first row"
        message = f"{name} is {rows}"
        names = _usable_names(sample, extra_names)
        hint = guard
        if meant:
            hint = f"did you mean {meant}? or {guard}"
        elif names and use.chain[0] not in names:
            hint = f"{'they have' if several else 'it has'} {', '.join(names)}; or {guard}"
        return self._error(message, use.line, hint, use.chain[0])


def _usable_names(sample: Iterable[Mapping[str, Any]], extra_names: Iterable[str]) -> list[str]:
    """Return the first names that a prompt may use, for a message; none where they are long."""
    fields = (name for row in sample for name in row)
    names = list(islice(dict.fromkeys([*sorted(extra_names), *fields]), 8))
    return [] if len("".join(names)) > 120 else names


def missing_property_hint(chain: Chain, properties: frozenset[str] | None) -> str | None:
    """Return a hint where the second name of a chain is none of ``properties``, else None.

    Args:
        chain: such as ``("plan", "items")``.
        properties: what the first name may have; None or none: that is not known.
    """
    if not properties or len(chain) < 2 or chain[1] in properties or hasattr(dict, chain[1]):
        return None
    return did_you_mean(chain[1], properties) or f"it has {', '.join(sorted(properties))}"


def _with_blanks(text: str, line: int) -> str | None:
    """Return a hint for a line that uses a field name with blanks like any other name."""
    lines = text.splitlines()
    if not 0 < line <= len(lines):
        return None
    match = _SPACED_NAME.search(lines[line - 1])
    return match and f"a name with blanks is written {{{{ row['{match[1]}'] }}}}"


def _unclosed(text: str, line: int) -> tuple[str, str] | None:
    """Return a message and a hint where a field of a line ends with one brace of two."""
    lines = text.splitlines()
    match = _UNCLOSED.search(lines[line - 1]) if 0 < line <= len(lines) else None
    return match and (f"a }} is missing after {match[1]}", f"write {{{{ {match[1]} }}}}")


def _literal(message: str) -> str:
    """Return a hint for writing the tag that Jinja rejects as plain text."""
    if "comment" in message:
        tag = "{#"
    else:
        tag = "{%" if "tag" in message or "statement block" in message else "{{"
    return f"write a literal {tag} as {{% raw %}}{tag}{{% endraw %}}"


def _only_text(tree: nodes.Template) -> bool:
    """True if the template holds no expression and no statement: comments and raw text only."""
    return all(
        isinstance(node, nodes.Output)
        and all(isinstance(piece, nodes.TemplateData) for piece in node.nodes)
        for node in tree.body
    )


def _ends(chain: Chain, tail: Chain) -> bool:
    return any(chain[:end][-len(tail) :] == tail for end in range(len(tail), len(chain) + 1))


def _has(row: Any, chain: Chain) -> bool | None:
    """Return whether ``row`` has the field ``chain``; None if a parent is no mapping."""
    for part in chain:
        if not isinstance(row, Mapping):
            return None
        if part not in row:
            return False
        row = row[part]
    return True


def _is_missing(chain: Chain, sample: Sequence[Mapping[str, Any]]) -> bool:
    """True if no row of ``sample`` has the field at ``chain``, and some row could have it."""
    presence = {_has(row, chain) for row in sample}
    return True not in presence and False in presence


def _meant(chain: Chain, sample: Sequence[Mapping[str, Any]], extra_names: set[str]) -> str | None:
    """Return the chain with the first missing name replaced by the nearest field name."""
    for depth, part in enumerate(chain):
        levels = [level for row in sample if (level := _level(row, chain[:depth])) is not None]
        names = {str(name) for level in levels for name in level} | (
            set() if depth else extra_names
        )
        if part not in names:
            nearest = nearest_name(part, names)
            return _reference((*chain[:depth], nearest)) if nearest else None
    return None


def _reference(chain: Chain) -> str:
    """Return a chain as a template names it: ``plan.items``, ``{{ row['gene name'] }}``."""
    if all(name.isidentifier() for name in chain):
        return ".".join(chain)
    first = chain[0] if chain[0].isidentifier() else f"{ROW}[{chain[0]!r}]"
    return "".join(
        ("{{ ", first, *(f".{n}" if n.isidentifier() else f"[{n!r}]" for n in chain[1:]), " }}")
    )


def _level(row: Any, chain: Chain) -> Mapping[str, Any] | None:
    for part in chain:
        row = row.get(part) if isinstance(row, Mapping) else None
    return row if isinstance(row, Mapping) else None


class Expression:
    """An expression over named values.

    ``names`` are the names that it uses, ``uses`` the dotted chains that have to be there, such as
    ``("plan", "items")``: those that no ``default`` or ``is defined`` guards.

    Args:
        text: the expression, without braces.
        where: its name in messages, such as ``stages[1].items``.
        at: its position.

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
            message = (error.message or "not an expression").rstrip(".")
            raise JobError(
                f"{where}: {message}: {text}", hint="write it without braces", at=at
            ) from None
        self.names = frozenset(meta.find_undeclared_variables(tree)) - HELPERS.keys()
        names = names_of(tree)
        self.uses = tuple(use.chain for use in names.uses if use.chain[0] in self.names)
        if names.row:  # which only prompts have
            self.uses = ((ROW,), *self.uses)

    def value(self, scope: Mapping[str, Any]) -> Any:
        """Its value for the names in ``scope``.

        Raises:
            TemplateFailure: a name is missing, or the expression fails on these values.
        """
        start_budget()
        try:
            result = self._evaluate({**HELPERS, **scope})
            if isinstance(result, Undefined):
                str(result)
        except MissingField as error:
            raise TemplateFailure(f"{self.where}: there is no {error.name}") from None
        except ROW_ERRORS as error:
            raise TemplateFailure(f"{self.where}: {error}") from None
        finally:
            end_budget()
        return result

    def holds(self, scope: Mapping[str, Any]) -> bool:
        """Return whether it is true; a name that is missing counts as false.

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
