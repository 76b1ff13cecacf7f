"""What a prefix cache can reuse, and whether warming it pays."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from bagent.backends.endpoint import Endpoint
from bagent.check.prefix_sharing import BLOCK, PACKED, PromptBytes, count_shares, warming
from bagent.check.report import WarmReport
from bagent.job.load import JobRequest, load_job
from bagent.servers.resolve import Servers


def prompt(*ids: int) -> PromptBytes:
    return PromptBytes(struct.pack(f"<{len(ids)}I", *ids), len(ids))


COMMON, BLOCK_IDS = range(40), range(BLOCK)


@pytest.mark.parametrize(
    ("prompts", "by_all", "by_most", "by_some", "by_none"),
    [
        # 40 common tokens fill two blocks of 16; the third block differs.
        ([prompt(*COMMON, *range(n, n + 24)) for n in (100, 200, 300)], 32, 0, 0, 32),
        ([prompt(n, *range(1000, 1064)) for n in range(4)], 0, 0, 0, 65),
        (
            [prompt(*BLOCK_IDS, *range(50, 66))] * 3 + [prompt(*BLOCK_IDS, *range(80, 96))] * 2,
            *(16, 3 * 16 / 5, 2 * 16 / 5, 0),
        ),
        ([prompt(*range(20))] * 2, 16, 0, 0, 4),
    ],
    ids=["equal beginning", "equal text behind a difference", "some rows", "last partial block"],
)
def test_blocks_are_counted_by_how_many_rows_share_them(
    prompts: list[PromptBytes], by_all: float, by_most: float, by_some: float, by_none: float
) -> None:
    shares = count_shares(prompts, PACKED)
    assert shares is not None
    found = (shares.by_all, shares.by_most, shares.by_some, shares.by_none)
    assert found == pytest.approx((by_all, by_most, by_some, by_none))
    assert sum(found) == pytest.approx(shares.prompt)


def test_text_is_cut_by_its_bytes_per_token() -> None:
    texts = [("x" * 96 + name).encode() for name in ("a" * 40, "b" * 40)]
    found = count_shares([PromptBytes(text, len(text) / 3) for text in texts], 3.0)
    assert found is not None
    assert found.by_all == 2 * BLOCK  # 96 bytes are 32 tokens
    assert count_shares([prompt(1, 2, 3)], PACKED) is None, "one prompt shares nothing"


HOSTED = {"backend": "openai", "model": "gpt-5-nano"}
OWN = {"backend": "vllm://h:1"}


def advice(
    folder: Path, keys: Mapping[str, Any], shared: float, rows: int, endpoints: int = 1
) -> WarmReport:
    text = yaml.safe_dump({"input": "rows.jsonl", "prompt": "{{ x }}", **keys})
    job = load_job(JobRequest(path=folder / "job.yaml", text=text, cwd=folder, env={}))
    own = keys["backend"] != "openai"
    found = [Endpoint(f"h:{n}", f"http://h:{n}/v1", own=own) for n in range(endpoints)]
    if keys["backend"] == "sim":
        return warming(job, Servers([], "sim"), shared, rows)
    servers = Servers(found, "vllm" if own else "openai")
    return warming(job, servers, shared, rows)


def test_it_pays_where_many_start_with_a_long_text_at_a_hosted_cache(tmp_path: Path) -> None:
    found = advice(tmp_path, HOSTED, 2000.0, 500)
    assert (found.warms, found.tokens, found.rows, found.saves) == (True, 2000, 16, 30_000)
    assert "it saves 2,000 tokens for 15 others" in found.why


@pytest.mark.parametrize(
    ("keys", "shared", "rows", "why"),
    [
        (HOSTED, 1000.0, 500, "all prompts begin with 1,000 equal tokens, it takes 1,024"),
        (HOSTED, 2000.0, 3, "one request ahead saves 2,000 tokens for 2 others"),
        (HOSTED | {"limits": {"concurrency": 4}}, 2000.0, 500, "tokens for 3 others that would"),
        (HOSTED | {"batching": {"prefix": "never"}}, 2000.0, 500, "batching.prefix is never"),
        (OWN, 2000.0, 500, "an engine of your own computes a beginning once"),
        ({"backend": "sim"}, 2000.0, 500, "an engine of your own computes a beginning once"),
    ],
    ids=["short", "few rows", "few at once", "never", "own engine", "not started yet"],
)
def test_where_it_does_not_the_sum_or_the_reason_is_said(
    tmp_path: Path, keys: Mapping[str, Any], shared: float, rows: int, why: str
) -> None:
    found = advice(tmp_path, keys, shared, rows)
    assert not found.warms
    assert found.why.startswith("no: ")
    assert why in found.why


def test_rows_are_shared_out_among_the_endpoints_first(tmp_path: Path) -> None:
    keys = OWN | {"batching": {"prefix": "always"}}
    found = advice(tmp_path, keys, 2000.0, 500)
    assert (found.warms, found.rows) == (True, 256), "an own engine where the job says always"
    assert advice(tmp_path, keys, 2000.0, 100, endpoints=20).rows == 5
    assert advice(tmp_path, keys | {"limits": {"per_endpoint": 8}}, 2000.0, 100).rows == 8
