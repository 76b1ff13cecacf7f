"""Help texts: options in groups, commands in groups, and plain placeholders."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import typer
from typer.core import TyperCommand

from bagent.cli.options import GENERAL, Debug

ORDER = {"Arguments": -1, "Options": 0, GENERAL: 2}
"""Groups that do not stand in the order of their first option."""

_LEFT_OUT = re.compile(r"^(?:\S+<=?)?x(?:[<>]=?\S+)?$|required$")
"""Ranges of numbers, and what the brackets of a placeholder say."""

_EXTRAS = re.compile(r"(?:^|  )\[([^\[\]]*)\]$")
_CHOICES = re.compile(r"<([^<>]*)>")


class Command(TyperCommand):
    """A command whose help shows options in groups; every command has ``--debug``."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if not any("--debug" in param.opts for param in self.params):
            self.params.append(_debug_option())

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the placeholders of the line of usage."""
        arguments = [param for param in self.params if param.param_type_name == "argument"]
        return ["[OPTIONS]", *(argument.metavar or "" for argument in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options in their groups."""
        groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for param in self.get_params(ctx):
            record = help_record(param, ctx)
            if record is None:
                continue
            groups[_group(param)].append(record)
        for name in sorted(groups, key=lambda name: ORDER.get(name, 1)):
            with formatter.section(name):
                formatter.write_dl(groups[name])


def _group(param: Any) -> str:
    if param.param_type_name == "argument":
        return "Arguments"
    if "--help" in param.opts:
        return GENERAL
    return getattr(param, "rich_help_panel", None) or "Options"


def _debug_option() -> Any:
    """Make the option ``--debug``, which the command itself does not receive."""
    app = typer.Typer(add_completion=False)

    @app.command()
    def with_debug(debug: Debug = False) -> None: ...

    (option,) = (p for p in typer.main.get_command(app).params if "--debug" in p.opts)
    option.expose_value = False
    return option


def help_record(param: Any, ctx: Any) -> tuple[str, str] | None:
    """Return the flags and the help of a parameter, with choices and defaults in plain words."""
    record = param.get_help_record(ctx)
    if record is None:
        return None
    usage, text = record
    if param.param_type_name == "argument":
        usage = param.metavar
    extras = _EXTRAS.search(text)
    if extras:
        items = [item for item in extras[1].split("; ") if not _LEFT_OUT.match(item)]
        text = text[: extras.start()] + (f"  [{'; '.join(items)}]" if items else "")
    return _CHOICES.sub(r"\1", usage), text
