"""The fields that a template uses, from its syntax tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jinja2 import meta, nodes

from bagent.job.templates.environment import HELPERS

ROW = "row"
"""The name that stands for the whole row."""

Chain = tuple[str, ...]

_DEFAULTS = frozenset({"default", "d"})
_TESTS = frozenset({"defined", "undefined"})
_NOT_NAMES = frozenset({"self", "super", "caller", "varargs", "kwargs"})


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a field: ``chain`` is ``("meta", "title")`` for ``meta.title``."""

    chain: Chain
    line: int


@dataclass(frozen=True, slots=True)
class TemplateNames:
    """What a template uses.

    ``fields`` are the fields of the row, None where it uses the row as a whole. ``uses`` are
    the places that need a field to be there; ``helpers`` the helper names in it, ``called`` those
    that it only calls, which are no fields; ``row`` whether it names the row at all. ``chains`` are
    all dotted chains, for messages.
    """

    fields: frozenset[str] | None
    uses: tuple[Use, ...]
    helpers: frozenset[str]
    row: bool
    chains: tuple[Chain, ...]
    called: frozenset[str] = frozenset()
    tested: frozenset[str] = frozenset()
    """Fields on which a condition depends: ``{% if note %}``."""


def names_of(tree: nodes.Template) -> TemplateNames:
    """Return the names that the template ``tree`` uses."""
    free = meta.find_undeclared_variables(tree) - _NOT_NAMES
    walker = _Walker(frozenset(free), _stored(tree))
    walker.visit(tree, called=False)
    called_only = frozenset(free & HELPERS.keys() - walker.plain_names)
    roots = {name for name in free - called_only if name != ROW}
    fields = None if walker.whole_row else frozenset(roots | walker.row_fields)
    uses = tuple(use for use in walker.uses if not _is_guarded(use.chain, walker.guards))
    return TemplateNames(
        fields=fields,
        uses=tuple(use for use in uses if use.chain[0] not in called_only),
        helpers=frozenset(free & HELPERS.keys()),
        called=called_only,
        row=ROW in free,
        chains=tuple(walker.chains),
        tested=frozenset(_tested(tree)),
    )


def _tested(tree: nodes.Template) -> Iterator[str]:
    tests = [branch.test for branch in tree.find_all(nodes.If)]
    tests += [branch.test for branch in tree.find_all(nodes.CondExpr)]
    for test in tests:
        for node in (test, *test.find_all(nodes.Node)):
            chain = _chain(node)
            if chain is not None:
                yield chain[1] if chain[0] == ROW and len(chain) > 1 else chain[0]


def _stored(tree: nodes.Template) -> frozenset[str]:
    """Return the names that the template itself assigns: set, loops, macros and arguments."""
    names = {node.name for node in tree.find_all(nodes.Name) if node.ctx in ("store", "param")}
    names |= {node.name for node in tree.find_all(nodes.Macro)}
    return frozenset(names | {"loop"})


def _is_guarded(chain: Chain, guards: set[Chain]) -> bool:
    return any(chain[: len(guard)] == guard for guard in guards)


class _Walker:
    """Gathers chains, guards and whole uses of the row."""

    def __init__(self, free: frozenset[str], stored: frozenset[str]) -> None:
        self._free = free
        self._stored = stored
        self.uses: list[Use] = []
        self.guards: set[Chain] = set()
        self.chains: list[Chain] = []
        self.row_fields: set[str] = set()
        self.plain_names: set[str] = set()
        self.whole_row = False

    def visit(self, node: nodes.Node, *, called: bool) -> None:
        """Walk ``node``; ``called`` says that it is what a call calls."""
        chain = _chain(node)
        if chain is not None and chain[0] in self._free:
            self._note(chain, node.lineno, called=called)
            return
        self._note_guard(node)
        for child in node.iter_child_nodes():
            self.visit(child, called=isinstance(node, nodes.Call) and child is node.node)

    def _note(self, chain: Chain, line: int, *, called: bool) -> None:
        if called:
            if len(chain) == 1:
                return
            # What is called is a method of the value before the last dot.
            chain = chain[:-1]
        else:
            self.plain_names.add(chain[0])
        if chain[0] == ROW:
            if len(chain) == 1:
                self.whole_row = True
                return
            chain = chain[1:]
            self.row_fields.add(chain[0])
        self.chains.append(chain)
        if chain[0] not in self._stored:
            self.uses.append(Use(chain, line))

    def _note_guard(self, node: nodes.Node) -> None:
        guarded: nodes.Node | None = None
        guards = _DEFAULTS if isinstance(node, nodes.Filter) else _TESTS
        if isinstance(node, (nodes.Filter, nodes.Test)) and node.name in guards:
            guarded = node.node
        elif isinstance(node, nodes.Compare):
            self._note_membership(node)
        chain = _chain(guarded) if guarded is not None else None
        if chain is not None:
            self.guards.add(chain[1:] if chain[0] == ROW and len(chain) > 1 else chain)

    def _note_membership(self, node: nodes.Compare) -> None:
        """``"name" in row`` guards name."""
        if not (isinstance(node.expr, nodes.Const) and isinstance(node.expr.value, str)):
            return
        for operand in node.ops:
            chain = _chain(operand.expr)
            if operand.op in ("in", "notin") and chain is not None:
                inner = chain[1:] if chain[0] == ROW else chain
                self.guards.add((*inner, node.expr.value))


def _chain(node: nodes.Node) -> Chain | None:
    """Return ``("a", "b")`` for ``a.b`` and ``a["b"]``; None for what is no chain of names."""
    parts: list[str] = []
    while True:
        if isinstance(node, nodes.Name):
            return (node.name, *reversed(parts))
        if isinstance(node, nodes.Getattr):
            parts.append(node.attr)
        elif isinstance(node, nodes.Getitem) and _constant_key(node) is not None:
            parts.append(str(_constant_key(node)))
        else:
            return None
        node = node.node


def _constant_key(node: nodes.Getitem) -> str | None:
    if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
        return node.arg.value
    return None


def forbidden(tree: nodes.Template) -> Iterator[nodes.Node]:
    """Tags that would need other templates: include, import, extends."""
    yield from tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends))
