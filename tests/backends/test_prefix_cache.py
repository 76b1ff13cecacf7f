"""Which beginning of a stage's prompts is marked for a provider's cache."""

from __future__ import annotations

from bagent.backends.prefix_cache import MIN_CHARS, Marks, SharedPrefix

LONG = "word " * 1000


def test_a_long_system_text_is_marked_from_the_first_row_on() -> None:
    assert SharedPrefix().look(0, LONG, "row one") == Marks(system=True)


def test_short_prefixes_are_not_worth_a_mark() -> None:
    shared = SharedPrefix()
    shared.look(0, "short", "row one")
    assert shared.look(0, "short", "row two") == Marks()


def test_tools_count_as_part_of_the_prefix() -> None:
    assert SharedPrefix().look(MIN_CHARS, "short", "row").system


def test_system_texts_that_differ_by_row_are_not_written_to_a_cache() -> None:
    shared = SharedPrefix()
    shared.look(0, LONG, "row")
    assert shared.look(0, LONG + "other", "row") == Marks()
    assert shared.look(0, LONG, "row") == Marks()


def test_a_beginning_that_two_user_texts_share_is_marked_where_words_end() -> None:
    shared = SharedPrefix()
    assert shared.look(0, "", f"{LONG}gene TP53") == Marks()
    marks = shared.look(0, "", f"{LONG}gene TP63")
    assert marks == Marks(user=len(LONG) + len("gene "))


def test_the_shared_beginning_only_gets_shorter() -> None:
    shared = SharedPrefix()
    for text in ("tail one", "tail two", "end"):
        marks = shared.look(0, "", LONG + text)
    assert marks.user == len(LONG)
    assert shared.look(0, "", "something else").user == 0


def test_equal_user_texts_leave_something_behind_the_mark() -> None:
    shared = SharedPrefix()
    shared.look(0, "", LONG)
    assert 0 < shared.look(0, "", LONG).user < len(LONG)
