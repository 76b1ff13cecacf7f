"""``--metrics-port``: the counts of a run for Prometheus.

After the prefix ``bagent_`` metrics have the names of vLLM (``num_requests_running``,
``time_to_first_token_seconds`` ...), so that its panels need another prefix only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bagent.errors import MissingPackage, UsageError
from bagent.observe.live_state import Live
from bagent.observe.progress import Progress
from bagent.observe.snapshot import LogHistogram, Snapshot

if TYPE_CHECKING:
    from prometheus_client.core import Metric

LATENCY_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Upper bounds in seconds, those of vLLM."""


def parse_address(text: str) -> tuple[str, int]:
    """Read ``9400``, ``host:9400`` or ``[::1]:9400``; a port alone is on the loopback address.

    Raises:
        UsageError: it is none of these.
    """
    match = re.fullmatch(r"(?:(?:\[([^\]]+)\]|([^:\s]+)):)?(\d{1,5})", text.strip())
    if match is None or int(match[3]) > 65535:
        raise UsageError(
            f"--metrics-port {text}: no port", hint="9400 for this machine only, or 0.0.0.0:9400"
        )
    return match[1] or match[2] or "127.0.0.1", int(match[3])


class MetricsServer:
    """A display that passes everything on to another, and serves the newest state.

    Args:
        inner: the display for people.
        address: as for :func:`parse_address`; port 0 takes a free one.

    Raises:
        MissingPackage: prometheus-client is not installed.
        UsageError: the address cannot be listened on.
    """

    def __init__(self, inner: Progress, address: str) -> None:
        try:
            from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
        except ImportError:
            raise MissingPackage(
                "--metrics-port needs prometheus-client",
                hint="pip install 'prometheus-client>=0.22,<1'",
            ) from None
        host, port = parse_address(address)
        self._inner = inner
        self._snapshot: Snapshot | None = None
        self._live: Live | None = None
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise UsageError(
                f"--metrics-port {address}: {error.strerror or error}", hint="choose another port"
            ) from None
        self.port: int = self._server.server_port
        bracketed = f"[{host}]" if ":" in host else host
        self.url = f"http://{bracketed}:{self.port}/metrics"

    @property
    def interval_s(self) -> float:
        """That of the inner display, or a second if that is less."""
        return min(self._inner.interval_s, 1.0)

    def start(self, header: str) -> None:
        """Begin, and show the address of the metrics."""
        self._inner.start(header)
        self._inner.note(f"metrics at {self.url}")

    def attach(self, live: Live) -> None:
        """Take the histograms and the endpoints."""
        self._live = live
        self._inner.attach(live)

    def update(self, snapshot: Snapshot) -> None:
        """Take the newest state."""
        self._snapshot = snapshot
        self._inner.update(snapshot)

    def note(self, text: str, *, warning: bool = False) -> None:
        """Pass a message on."""
        self._inner.note(text, warning=warning)

    def stop(self) -> None:
        """Stop serving; a second call does nothing more."""
        self._inner.stop()
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def describe(self) -> list[Metric]:
        """Return nothing: it is called at registration, before there are counts."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the newest state as metrics; called in the server's thread at a scrape."""
        snapshot, live = self._snapshot, self._live
        if snapshot is not None:
            yield from _of_snapshot(snapshot)
        if live is not None:
            tally = live.tally
            yield _histogram("e2e_request_latency_seconds", tally.latency, LATENCY_BOUNDS)
            yield _histogram("time_to_first_token_seconds", tally.ttft, FIRST_TOKEN_BOUNDS)
            yield from _of_endpoints(live)


def _of_snapshot(s: Snapshot) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    def counter(name: str, help_text: str, value: float | None) -> Iterator[Metric]:
        if value is not None:
            yield CounterMetricFamily(f"bagent_{name}", help_text, value=value)

    def gauge(name: str, help_text: str, value: float | None) -> Iterator[Metric]:
        if value is not None:
            yield GaugeMetricFamily(f"bagent_{name}", help_text, value=value)

    for name, help_text, label, counts in (
        ("rows", "Finished rows by status.", "status", s.this_start.by_status),
        ("failed_tries", "Failed tries by error kind.", "error_kind", s.failed_tries),
    ):
        family = CounterMetricFamily(f"bagent_{name}", help_text, labels=[label])
        for value, count in counts.items():
            family.add_metric([value], count)
        yield family
    yield from counter("rows_finished_earlier", "Rows that an earlier start finished.", s.skipped)
    yield from gauge("rows_remaining", "Rows still to finish, about.", s.to_do)
    yield from gauge("eta_seconds", "Seconds until the end, about.", s.eta_s)
    yield from counter("requests", "HTTP requests.", s.requests)
    yield from counter("retries", "Tries after a row's first.", s.retries)
    yield from counter("throttled", "Answers that told to slow down.", s.throttled)
    yield from counter("prompt_tokens", "Prompt tokens, as told.", s.tokens.prompt.total)
    yield from counter("prompt_tokens_cached", "Of them cached.", s.tokens.cached.total)
    yield from counter("generation_tokens", "Answer tokens, as told.", s.tokens.completion.total)
    yield from counter("cost_usd", "Dollars, where prices are known.", s.cost_usd)
    fleet = s.fleet
    yield from gauge("num_requests_running", "Rows in flight.", fleet.in_flight)
    yield from gauge("num_requests_waiting", "Rows ready to be sent.", fleet.ready)
    yield from gauge("num_requests_retrying", "Rows that wait for a try.", fleet.retrying)
    yield from gauge("num_requests_limit", "Rows that may be in flight.", fleet.limit)
    yield from gauge("throttled_seconds", "How long sending still pauses.", fleet.throttled_s)
    yield from gauge("endpoints", "Endpoints.", fleet.endpoints)
    yield from gauge("endpoints_up", "Endpoints that answer.", fleet.endpoints_up)


def _of_endpoints(live: Live) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    lines = live.endpoints()
    for kind, name, help_text, values in (
        (GaugeMetricFamily, "up", "1 where it is well.", [e.health == "ok" for e in lines]),
        (GaugeMetricFamily, "in_flight", "Rows in flight.", [e.in_flight for e in lines]),
        (GaugeMetricFamily, "limit", "Rows that may be.", [e.limit for e in lines]),
        (CounterMetricFamily, "tries", "Tries.", [e.tries for e in lines]),
        (CounterMetricFamily, "failed_tries", "Failed tries.", [e.failed for e in lines]),
    ):
        family: Any = kind(f"bagent_endpoint_{name}", help_text, labels=["endpoint"])
        for line, value in zip(lines, values, strict=True):
            family.add_metric([line.name], float(value))
        yield family


def _histogram(name: str, histogram: LogHistogram, bounds: tuple[float, ...]) -> Metric:
    """Convert to buckets with other bounds, with an error of at most 1 % of a value."""
    from prometheus_client.core import HistogramMetricFamily

    counts = histogram.buckets()
    buckets, remaining, seen = [], iter(counts), 0
    upper, count = next(remaining, (math.inf, 0))
    for bound in bounds:
        while upper <= bound * 1000 * 1.01 and count:
            seen += count
            upper, count = next(remaining, (math.inf, 0))
        buckets.append((f"{bound:g}" if bound % 1 else f"{bound:.1f}", float(seen)))
    buckets.append(("+Inf", float(sum(n for _, n in counts))))
    title = name.replace("_", " ")
    return HistogramMetricFamily(f"bagent_{name}", title, buckets, sum_value=histogram.total / 1000)
