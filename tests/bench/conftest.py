"""Whole load tests, from a hostfile's lines to the summary."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from support.simulated_fleets import Measure, measure_in


@pytest.fixture
def measure(tmp_path: Path) -> Measure:
    """A whole load test of the hostfile ``lines``; returns its summary."""
    return partial(measure_in, tmp_path)
