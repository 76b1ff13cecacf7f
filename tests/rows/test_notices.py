from bagent.rows.warnings import RowWarnings


def test_each_kind_is_said_once_with_its_first_example_and_the_count():
    notices = RowWarnings()
    kind = "strange rows: {count}; first {example}"
    assert notices.is_new(kind)
    for line in range(1, 2001):
        notices.add(kind, f"a.jsonl:{line}")
    notices.add("other: {example}", "{braces} stay")
    assert not notices.is_new(kind)
    assert notices.lines == ["strange rows: 2,000; first a.jsonl:1", "other: {braces} stay"]
