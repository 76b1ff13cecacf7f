"""The page of a load test, and the charts that it shares with the page of a run."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bagent.bench.thresholds import LOAD_NUMBERS
from bagent.report.load_test import MOST_ROWS, page
from bagent.report.svg import Axes, Cell, Series, lines, strip
from support.report_pages import read
from support.simulated_fleets import DEAD, addresses, measure_in, simulated


@pytest.fixture(scope="module")
def measured_once(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with simulated("replicas=2&decode=1000") as sim:
        lines = [*addresses(sim), DEAD]
        folder = tmp_path_factory.mktemp("page")
        return measure_in(folder, lines, concurrency=[1, 2], requests=20, seconds=None)


@pytest.fixture
def measured(measured_once: dict[str, Any]) -> dict[str, Any]:
    """A summary of its own for each test, which may change it."""
    return copy.deepcopy(measured_once)


def test_a_page_stands_alone_and_is_whole(measured: dict[str, Any]) -> None:
    folder: Path = measured["folder"]
    text = (folder / "report.html").read_text()
    tags = read(text).tags
    assert not {name for _, attrs in tags for name in attrs} & {"src", "href"}
    assert not {tag for tag, _ in tags} & {"script", "link", "img", "iframe"}
    assert "http://" not in re.sub(r"cannot connect to [^<]*", "", text)
    assert "url(" not in text and "@import" not in text
    assert "prefers-color-scheme:dark" in text
    for chart in re.findall(r"<svg.*?</svg>", text):
        ElementTree.fromstring(chart)
    assert text.count("<svg") == 4
    assert "Simulated endpoints" in text and DEAD in text and "Connection refused" in text


def test_words_from_servers_are_text_and_no_markup(measured: dict[str, Any]) -> None:
    bad = "<script>alert(1)</script>"
    measured["models"] = [bad]
    measured["endpoints"][0]["reason"] = bad
    measured["endpoints"][0]["endpoint"] = bad
    text = page(measured, [], measured)
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "Compared with" in text


def test_what_is_wrong_stands_before_the_numbers(measured: dict[str, Any]) -> None:
    measured["client_limited"] = {"c=1": ["event loop 50 ms late"]}
    measured["stopped"] = True
    measured["warnings"] = ["a <warning>"]
    before, loads, _ = page(measured, [], None).partition("<h2>Loads</h2>")
    assert loads
    assert "CLIENT-LIMITED, results invalid: c=1: event loop 50 ms late" in before
    assert "Stopped early" in before and "a &lt;warning&gt;" in before
    assert "<h2>Not ok: 1</h2>" in before and "Connection refused" in before
    for one in measured["endpoints"]:
        one["verdict"] = "ok"
    assert "Not ok" not in page(measured, [], None)


def test_points_are_drawn_where_their_values_are() -> None:
    series = Series("a", [(0.0, 0.0), (10.0, 100.0)], ["low", "high"])
    chart = ElementTree.fromstring(
        re.findall("<svg.*</svg>", lines("t", Axes("x", "y"), [series]))[0]
    )
    (left, low), (right, high) = [
        (float(one.attrib["cx"]), float(one.attrib["cy"])) for one in chart.iter("circle")
    ]
    assert left < right and high < low
    assert [one.text for one in chart.iter("title")] == ["low", "high"]
    assert lines("t", Axes("x", "y"), [Series("a", [], [])]) == ""
    same = Series("a", [(5.0, 7.0), (5.0, 7.0)], ["", ""])
    assert "nan" not in lines("t", Axes("x", "y", log=True), [same])


def test_fields_of_the_strip_show_how_slow_and_whether_it_failed() -> None:
    cells = [Cell(0.0, False, "a"), Cell(1.0, False, "b"), Cell(0.0, True, "c")]
    cells.append(Cell(None, False, ""))
    drawn = re.findall(r'<rect class="(\w+)"', strip("t", [("e", cells)], 8.0))
    assert drawn == ["h0", "h4", "failed", "none"]
    assert strip("t", [], 1.0) == ""


def test_every_number_of_a_load_can_be_a_condition(measured: dict[str, Any]) -> None:
    for load in measured["loads"]:
        numbers = {name for name, value in load.items() if not isinstance(value, str | list)}
        assert numbers - LOAD_NUMBERS == {"first_stage"}


def test_of_a_large_fleet_the_page_has_the_bad_ones_and_no_more_than_it_can_bear(
    measured: dict[str, Any],
) -> None:
    good = measured["endpoints"][0]
    measured["endpoints"] = [{**good, "endpoint": f"n{n}:1", "speed": 1.0} for n in range(4000)]
    bad = {2: "slow", 1999: "failing", 3999: "dead"}
    for number, verdict in bad.items():
        measured["endpoints"][number] |= {"verdict": verdict, "reason": f"why {number}"}
    text = page(measured, [], None)
    assert len(text) < 2_000_000
    assert all(f">n{n}:1</td>" in text and f">why {n}<" in text for n in bad)
    assert text.count("<tr>") < 2 * MOST_ROWS
    assert "3,800 more endpoints, all ok: endpoints.csv has every one" in text


def test_a_single_load_has_no_charts_and_the_heat_map_comes_first(
    measured: dict[str, Any],
) -> None:
    measured["loads"] = measured["loads"][:1]
    text = page(measured, [], None)
    (heat,) = re.findall(r"<figure>.*?</figure>", text)
    assert "by endpoint over time" in heat
    assert text.index(heat) < text.index('<section id="loads">')
    assert "<details><summary>what each number means" in text


def test_open_and_closed_loops_are_not_mixed_on_a_line(measured: dict[str, Any]) -> None:
    closed = measured["loads"][0]
    opened = [{**closed, "load": f"rate={n}", "rate": float(n), "rps": float(n)} for n in (1, 2, 3)]
    slower = {**closed, "e2e_p50_ms": 2 * closed["e2e_p50_ms"]}
    measured["loads"] = [closed, slower, *opened]
    charts = re.findall(r"<figure>.*?</figure>", page(measured, [], None))
    _, latency, knee, goodput = charts
    assert "rate=1" in latency and f"{closed['load']}:" not in latency
    assert f"{closed['load']}:" in knee and "rate=" not in knee
    assert goodput.count("rate=3") == 2 and "open loops" in goodput
