from __future__ import annotations

import pytest

from bagent.errors import JobError
from bagent.sim import OPTIONS, SimConfig, parse_sim_url


def test_url_options_reach_every_group() -> None:
    config = parse_sim_url("sim://?replicas=2&decode=50&output-tokens=7&rate_429=10%25&stall=1m30s")
    assert config.replicas == 2
    assert config.engine.decode == 50.0
    assert config.answers.output_tokens == 7
    assert config.faults.rate_429 == pytest.approx(0.1)
    assert config.faults.stall == 90.0


@pytest.mark.parametrize(
    ("name", "shown"),
    [("llama-8b", "sim-llama-8b"), ("sim-x", "sim-x"), ("a-Simulated-one", "a-Simulated-one")],
)
def test_model_name_always_says_that_it_is_simulated(name: str, shown: str) -> None:
    assert SimConfig(model=name).model == shown


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://x", "not a sim:// URL"),
        ("sim://?decod=5", "did you mean 'decode'"),
        ("sim://?decode=fast", "'decode' is a number, not 'fast'"),
        ("sim://?rate_429=2", "'rate_429' must be between 0 and 1"),
        ("sim://?stall=2days", "'stall' is a duration"),
        ("sim://?priority=maybe", "'priority' is true or false"),
        ("sim://?decode=1&decode=2", "given twice"),
        ("sim://?replicas=0", "'replicas' must be at least 1"),
        ("sim://?port=65535&replicas=2", "low enough"),
        ("sim://?kv_tokens=10", "at least max_model_len"),
        ("sim://?output_spread=odd", "one of geometric, normal, fixed"),
        ("sim://?speedup=0", "'speedup' must be above 0"),
    ],
)
def test_wrong_urls_are_explained(url: str, words: str) -> None:
    with pytest.raises(JobError) as raised:
        parse_sim_url(url)
    assert words in str(raised.value)


def test_every_option_has_help_and_reads_its_own_default() -> None:
    assert len(OPTIONS) > 30
    for option in OPTIONS.values():
        assert option.help.endswith(".")
        text = "none" if option.default is None else str(option.default)
        assert option.read(text) == option.default
