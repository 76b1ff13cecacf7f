"""Charts of measured speed, made from raw files in ``results/``.

``python benchmarks/charts.py`` writes ``charts/modes.svg`` and ``charts/modes-large.svg`` (rows a
second on one H200, by way of sending, with a 0.5B and a 7B model) and ``charts/client.svg`` (CPU
time that the client takes for a row).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
CHARTS = FOLDER / "charts"

WIDTH, LABEL, ROW, TOP = 760, 280, 26, 58
OWN, OTHER = "#2563eb", "#94a3b8"

MODES = {
    "lists-64@api1": "bagent, lists of 64",
    "auto@api1": "bagent, as it chooses itself",
    "offline@offline": "LLM.chat, inside the engine",
    "chat-64@api1": "bagent, chat batches of 64",
    "single-512@api1": "bagent, single calls, 512 in flight",
    "offline@batch": "vllm run-batch",
}
LARGE_MODES = {
    "single-512@api1": "bagent, single calls, 512 in flight",
    "auto@api1": "bagent, as it chooses itself",
    "lists-64@api1": "bagent, lists of 64",
    "offline@llm": "LLM.chat, inside the engine",
    "offline@batch": "vllm run-batch",
    "openai-512@api1": "AsyncOpenAI, 512 in flight",
}
CLIENTS = {
    "bare": "bare aiohttp loop: nothing checked or kept",
    "bagent": "bagent run",
    "sdk": "AsyncOpenAI with gather",
}

Bar = tuple[str, float, bool]
"""Label, value, and whether it is bagent's."""


def bar_chart(title: str, note: str, bars: Sequence[Bar]) -> str:
    """Return an SVG of horizontal bars with their values."""
    height = TOP + ROW * len(bars) + 12
    scale = (WIDTH - LABEL - 80) / max(value for _, value, _ in bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        f' font-family="system-ui, sans-serif" font-size="13"><title>{escape(title)}</title>',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        _text(12, 24, title, 'font-size="15" font-weight="600"'),
        _text(12, 43, note, 'font-size="12"'),
    ]
    for number, (label, value, own) in enumerate(bars):
        y = TOP + ROW * number
        width = max(1.0, value * scale)
        parts += [
            _text(LABEL - 8, y + 16, label, 'text-anchor="end"'),
            f'<rect x="{LABEL}" y="{y + 3}" width="{width:.1f}" height="18" rx="2"'
            f' fill="{OWN if own else OTHER}"/>',
            _text(LABEL + width + 6, y + 16, f"{value:,.0f}", ""),
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="#0f172a" {style}>{escape(text)}</text>'


def modes_chart() -> str:
    """Return the chart of rows a second by way of sending, small model."""
    return _rates(
        "gpu-h200-chat.json",
        MODES,
        "Rows a second: 2,000 chats with a schema, 0.5B model, vLLM on one H200",
        "Medians of 2 to 5 runs; one API process, as vLLM starts by default. More is better.",
    )


def large_modes_chart() -> str:
    """Return the chart of rows a second by way of sending, large model."""
    return _rates(
        "gpu-h200-modes-large.json",
        LARGE_MODES,
        "Rows a second: 1,000 chats with a schema, 7B model, vLLM on one H200",
        "Medians of 2 to 10 runs; one API process, as vLLM starts by default. More is better.",
    )


def _rates(file: str, arms: dict[str, str], title: str, note: str) -> str:
    medians = json.loads((RESULTS / file).read_bytes())["medians"]
    bars = [
        (label, medians[arm]["rows_per_s"], label.startswith("bagent"))
        for arm, label in arms.items()
    ]
    return bar_chart(title, note, sorted(bars, key=lambda bar: -bar[1]))


def client_chart() -> str:
    """Return the chart of the client's CPU time for a row."""
    summary = json.loads((RESULTS / "client-cost-sdk.json").read_bytes())["summary"]
    bars = [
        (label, summary[arm]["marginal_us_per_row"], arm == "bagent")
        for arm, label in CLIENTS.items()
    ]
    return bar_chart(
        "Client CPU for a row, in microseconds: single chats, 64 in flight",
        "1,200 rows once, two shared cores, a server that answers at once. Less is better.",
        bars,
    )


def charts() -> dict[Path, str]:
    """Return the files of all charts with their texts."""
    return {
        CHARTS / "modes.svg": modes_chart(),
        CHARTS / "modes-large.svg": large_modes_chart(),
        CHARTS / "client.svg": client_chart(),
    }


if __name__ == "__main__":
    CHARTS.mkdir(exist_ok=True)
    for path, text in charts().items():
        path.write_text(text, encoding="utf-8")
