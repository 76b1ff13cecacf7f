"""Sections of a board held against its first round, when nothing stands on it yet."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bagent.errors import JobError
from bagent.job.template import TemplateFailure
from bagent.runs.stagejobs import Asking, PreparedStage
from bagent.stages.boards import Board
from bagent.stages.keys import INPUT
from bagent.types import Row

if TYPE_CHECKING:
    from bagent.job.spec import JobSource

_LACKS = re.compile(r"no field (?:board\.)?(?P<name>\w+)")


def check_boards(stages: Sequence[PreparedStage], sample: Sequence[Row], source: JobSource) -> None:
    """Refuse a section that needs what another one writes, before anything can be written.

    Looked at are sections that begin with an empty board: the first one, and all that write at
    the same time; where they read the input alone, so that their first prompts are known.

    Args:
        sample: the first rows of the input that can be read.

    Raises:
        JobError: the first prompt of a section cannot be rendered for any row.
    """
    for stage in stages:
        if stage.spec.kind != "loop" or stage.sources != (INPUT,):
            continue
        begin = stage.asking if stage.spec.parallel else stage.asking[:1]
        names = {asking.name for asking in stage.asking}
        for number, asking in enumerate(begin):
            missing = _missing(asking, sample)
            if missing in names:
                spec = stage.spec.sections[number]
                own = (*stage.at.path, "sections", number, "prompt")
                guard = f"{{% if board.{missing} is defined %}}...{{% endif %}}"
                raise JobError(
                    f"{asking.name}: in the first round {missing} has not written yet",
                    hint=f"{guard}, or {{{{ board }}}} for all that there is",
                    at=source.position(own if spec.prompt is not None else stage.at.prompt_at),
                )


def _missing(asking: Asking, sample: Sequence[Row]) -> str | None:
    """The name that the first prompt lacks for every row; None where some row has its prompt."""
    if asking.prompt is None:
        return None
    extra = {"board": Board(), "round": 1, "section": asking.name}
    missing = None
    for row in sample:
        try:
            if asking.prompt.raw:
                asking.prompt.render_raw(row.data, extra)
            else:
                asking.prompt.render(row.data, extra)
        except TemplateFailure as failure:
            lacks = _LACKS.search(str(failure))
            if lacks is None:
                return None
            missing = lacks["name"]
        else:
            return None
    return missing
