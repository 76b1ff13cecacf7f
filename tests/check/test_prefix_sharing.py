"""What a prefix cache can reuse, counted in blocks."""

from __future__ import annotations

import struct

import pytest

from bagent.check.prefix_sharing import BLOCK, PACKED, PromptBytes, count_shares


def prompt(*ids: int) -> PromptBytes:
    return PromptBytes(struct.pack(f"<{len(ids)}I", *ids), len(ids))


def test_blocks_of_a_common_beginning_are_shared_by_all() -> None:
    common = range(40)
    found = count_shares([prompt(*common, *range(n, n + 24)) for n in (100, 200, 300)], PACKED)
    assert found is not None
    # 40 common tokens fill two blocks of 16; the third block holds different tokens already.
    assert found.by_all == 2 * BLOCK
    assert found.prompt == 64
    assert found.by_none == 64 - 2 * BLOCK
    assert found.by_most == found.by_some == 0


def test_equal_text_behind_a_difference_is_not_shared() -> None:
    tail = range(1000, 1000 + 64)
    found = count_shares([prompt(n, *tail) for n in range(4)], PACKED)
    assert found is not None
    assert found.by_all == found.by_most == found.by_some == 0
    assert found.by_none == 65


def test_half_of_the_rows_are_most_and_two_of_five_are_some() -> None:
    block = list(range(BLOCK))
    first = [prompt(*block, *range(50, 66)) for _ in range(3)]
    second = [prompt(*block, *range(80, 96)) for _ in range(2)]
    found = count_shares([*first, *second], PACKED)
    assert found is not None
    assert found.by_all == BLOCK
    assert found.by_most == pytest.approx(3 * BLOCK / 5)
    assert found.by_some == pytest.approx(2 * BLOCK / 5)
    assert found.by_none == 0


def test_the_last_partial_block_is_never_shared() -> None:
    found = count_shares([prompt(*range(20)), prompt(*range(20))], PACKED)
    assert found is not None
    assert (found.by_all, found.by_none) == (BLOCK, 4)


def test_text_is_cut_by_its_bytes_per_token() -> None:
    texts = [("x" * 96 + name).encode() for name in ("a" * 40, "b" * 40)]
    found = count_shares([PromptBytes(text, len(text) / 3) for text in texts], 3.0)
    assert found is not None
    assert found.by_all == 2 * BLOCK  # 96 bytes are 32 tokens


def test_the_four_kinds_add_up_to_the_prompt() -> None:
    prompts = [prompt(*range(16 * (n % 3)), *range(7 * n, 7 * n + 30)) for n in range(9)]
    found = count_shares(prompts, PACKED)
    assert found is not None
    total = found.by_all + found.by_most + found.by_some + found.by_none
    assert total == pytest.approx(found.prompt)


def test_one_prompt_shares_nothing_that_can_be_told() -> None:
    assert count_shares([prompt(1, 2, 3)], PACKED) is None
    assert count_shares([], PACKED) is None
