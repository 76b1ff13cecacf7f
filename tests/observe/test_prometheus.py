from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bagent.errors import UsageError
from bagent.observe import Live
from bagent.observe.progress import NoProgress
from bagent.observe.prometheus import MetricsServer, parse_address


class Noted(NoProgress):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes = []

    def note(self, text: str, *, warning: bool = False) -> None:
        self.notes.append(text)


@pytest.fixture
def inner() -> Noted:
    return Noted()


@pytest.fixture
def server(inner: Noted) -> Iterator[MetricsServer]:
    made = MetricsServer(inner, "0")
    yield made
    made.stop()


def scraped(server: MetricsServer) -> dict[tuple[str, ...], float]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(server.url, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }


def test_counts_are_those_of_the_newest_snapshot(server, tally, busy):
    assert ("bagent_rows_total", "ok") not in scraped(server)
    server.update(busy())
    found = scraped(server)
    assert (found["bagent_rows_total", "ok"], found["bagent_rows_total", "failed"]) == (1200, 9)
    assert found["bagent_prompt_tokens_total",] == 120_000
    assert found["bagent_generation_tokens_total",] == 24_000
    assert found["bagent_num_requests_running",] == 64
    assert found["bagent_num_requests_waiting",] == 100
    assert found["bagent_endpoints_up",] == 3


def test_histograms_hold_the_times_in_seconds(server, make, tally):
    for ms in (100.0, 400.0, 30_000.0):
        tally.outcomes([make.outcome(latency_ms=ms, ttft_ms=ms / 10, prompt_tokens=1)])
    make.snapshot(tally)
    server.attach(Live(tally, list))
    found = scraped(server)
    name = "bagent_e2e_request_latency_seconds"
    assert found[f"{name}_bucket", "0.3"] == 1
    assert found[f"{name}_bucket", "0.5"] == 2
    assert found[f"{name}_bucket", "20.0"] == 2
    assert found[f"{name}_bucket", "40.0"] == found[f"{name}_count",] == 3
    assert found[f"{name}_sum",] == pytest.approx(30.5)
    assert found["bagent_time_to_first_token_seconds_bucket", "0.02"] == 1


def test_only_this_machine_may_ask_unless_told(server, inner):
    server.start("a run")
    assert server.url == f"http://127.0.0.1:{server.port}/metrics"
    assert inner.notes == [f"metrics at {server.url}"]
    assert parse_address("0.0.0.0:9400") == ("0.0.0.0", 9400)
    assert parse_address("[::1]:9400") == ("::1", 9400)
    assert parse_address("9400") == ("127.0.0.1", 9400)
    server.stop()
    server.stop()
    with pytest.raises(urllib.error.URLError):
        scraped(server)


@pytest.mark.parametrize("text", ["", "abc", "70000", "host:", "a:b:1"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(UsageError, match="metrics-port"):
        parse_address(text)


def test_a_taken_port_is_told_before_anything_is_sent(inner):
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UsageError, match="in use"),
    ):
        MetricsServer(inner, str(taken.getsockname()[1]))
