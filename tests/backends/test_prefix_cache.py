"""Which beginning of a stage's prompts is marked for a provider's cache."""

from __future__ import annotations

from bagent.backends.prefix_cache import Marks, SharedPrefix

LONG = "word " * 1000


def test_a_long_system_text_is_marked_from_the_first_row_on() -> None:
    assert SharedPrefix().look(0, LONG, "row one") == Marks(system=True)


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


def test_equal_user_texts_leave_something_behind_the_mark() -> None:
    shared = SharedPrefix()
    shared.look(0, "", LONG)
    assert 0 < shared.look(0, "", LONG).user < len(LONG)
