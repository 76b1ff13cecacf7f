"""Profiles of hypothesis: few examples and the same ones each time, or many new ones.

``make properties EXAMPLES=20000`` looks at so many new examples a test.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.internal.conjecture import providers

EXAMPLES = int(os.environ.get("BAGENT_EXAMPLES", "0"))

if not EXAMPLES:
    # Else the examples would change with the source of the modules that happen to be imported.
    providers._get_local_constants = lambda: providers._local_constants

set_hypothesis_home_dir(Path(__file__).parents[2] / ".cache" / "hypothesis")
settings.register_profile(
    "bagent",
    max_examples=EXAMPLES or 15,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("bagent")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all examples of a module share."""
    return tmp_path_factory.mktemp("properties")
