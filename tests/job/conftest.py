"""Loading jobs from texts in a folder of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from bagent.errors import JobError
from bagent.job.load import JobRequest, load_job
from bagent.job.spec.job import Job

Load = Callable[..., Job]

MINIMAL = "input: rows.jsonl\nprompt: 'Say {{ text }}'\n"


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """``load(TEXT, sets=..., options=..., env=...)``: TEXT is written to job.yaml and loaded."""

    def loading(
        text: str | bytes = MINIMAL,
        *,
        sets: tuple[str, ...] = (),
        options: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        name: str = "job.yaml",
    ) -> Job:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return load_job(
            JobRequest(
                path=Path(name), sets=sets, options=options or {}, env=env or {}, cwd=tmp_path
            )
        )

    return loading


@pytest.fixture
def fault(load: Load) -> Callable[..., str]:
    """Like ``load``, for a job that is wrong: the text of its error."""

    def failing(text: str | bytes = MINIMAL, **keys: Any) -> str:
        with pytest.raises(JobError) as caught:
            load(text, **keys)
        message = str(caught.value)
        assert "\n" not in message
        return message

    return failing


@pytest.fixture
def minimal() -> str:
    """The smallest job: input and prompt."""
    return MINIMAL
