"""The stages of a topology as YAML that can be pasted into the job file in its place."""

from __future__ import annotations

from typing import Any

import yaml

from bagent.job.mask import mask_text
from bagent.job.spec import Job
from bagent.stages.topologies import Laid
from bagent.types import Json

TAKES_THE_PLACE = ("topology", "prompt", "agent", "answers", "output")
"""Keys of a job that its stages written out take the place of."""


def written_out(laid: Laid, job: Job) -> str:
    """``stages:`` with everything that the topology's short name stands for; secrets masked.

    Keys of the job beside :data:`TAKES_THE_PLACE` stay as they are. Paths are absolute.
    """
    stages = [_shown(at.spec, job) for at in laid.stages]
    return yaml.dump(
        {"stages": stages}, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
    )


def _shown(spec: Any, job: Job) -> dict[str, Json]:
    dumped = spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    first = {key: dumped[key] for key in ("kind", "name") if key in dumped}
    kept: dict[str, Json] = _kept({**first, **dumped}, job)
    return kept


def _kept(value: Any, job: Job) -> Any:
    """A value less what says nothing: nulls and empty collections."""
    if isinstance(value, dict):
        kept = {name: _kept(one, job) for name, one in value.items()}
        kept = {name: one for name, one in kept.items() if one is not None and one != []}
        # The short form of a text.
        return kept["text"] if list(kept) == ["text"] else kept
    if isinstance(value, list):
        return [_kept(one, job) for one in value]
    return mask_text(value, job.source.secrets) if isinstance(value, str) else value


class _Dumper(yaml.SafeDumper):
    """Long texts as blocks, as people write them."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = (
        "|" if "\n" in text and not any(line.endswith(" ") for line in text.split("\n")) else None
    )
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
