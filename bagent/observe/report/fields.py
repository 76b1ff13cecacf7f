"""Which field of the input goes with long answers, and with rows that fail?

Asked of a sample; fields are the top-level properties of the input rows.
"""

from __future__ import annotations

from typing import Any

from bagent.observe.report.ask import Ask
from bagent.observe.report.html import Html, heading, note, section, table
from bagent.store.columns import literal

SAMPLE = 30_000
SEED = 7
MOST_FIELDS = 40
MOST_VALUES = 40
FEWEST = 20
"""Rows that a value must have to be worth a line."""


class Fields:
    """Statistics of the input fields, over a sample that is made once.

    ``values`` are single values with what their rows are like; ``sizes`` are fields whose size
    (of a text) or value (of a number) goes with the length of answers.
    """

    def __init__(self, ask: Ask) -> None:
        self.values: list[dict[str, Any]] = []
        self.sizes: list[dict[str, Any]] = []
        ask.run(
            "create or replace temp table sampled as select input, status,"
            " coalesce(finish_reason = 'length', false) as cut, completion_tokens as tokens"
            f" from (select * from results where input is not null)"
            f" using sample reservoir({SAMPLE} rows) repeatable ({SEED})"
        )
        whole = ask.row(
            "select count(*) as n, avg(tokens) as tokens,"
            " 100.0 * avg((status <> 'ok')::int) as failed from sampled"
        )
        self.rows, self.tokens, self.failed = whole["n"], whole["tokens"], whole["failed"]
        if not self.rows:
            return
        for row in ask.rows(
            "select distinct unnest(json_keys(input)) as name from sampled"
            f" where json_type(input) = 'OBJECT' order by 1 limit {MOST_FIELDS}"
        ):
            self._look(ask, row["name"])
        self.values.sort(key=lambda row: -(row["answer_tokens"] or 0.0))
        self.sizes.sort(key=lambda row: -abs(row["correlation"]))

    def _look(self, ask: Ask, name: str) -> None:
        pointer = literal("/" + name.replace("~", "~0").replace("/", "~1"))
        value = f"json_extract_string(input, {pointer})"
        size = f"coalesce(try_cast({value} as double), length({value}))"
        found = ask.row(
            f"select approx_count_distinct({value}) as many, corr({size}, tokens) as correlation,"
            f" corr({size}, (status <> 'ok')::int) as with_failures from sampled"
        )
        if found["many"] <= MOST_VALUES:
            self.values += ask.rows(
                f"""select {literal(name)} as field, left({value}, 60) as value, count(*) as "rows",
                           avg(tokens) as answer_tokens, 100.0 * avg(cut::int) as cut_off_percent,
                           100.0 * avg((status <> 'ok')::int) as not_ok_percent
                    from sampled group by 1, 2 having count(*) >= {FEWEST}"""
            )
        if found["many"] > 2 and found["correlation"] is not None:
            self.sizes.append(
                {
                    "field": name,
                    "correlation": found["correlation"],
                    "with_failures": found["with_failures"],
                }
            )

    def findings(self) -> list[str]:
        """What stands out, in words."""
        words = []
        usual = self.tokens or 0.0
        for row in self.values[:3]:
            mean = row["answer_tokens"]
            if mean is not None and usual > 0 and mean > 1.5 * usual:
                words.append(
                    f"rows with {row['field']} = {row['value']} get long answers:"
                    f" {mean:,.0f} tokens on average, all rows {usual:,.0f}"
                )
        for row in sorted(self.values, key=lambda row: -row["not_ok_percent"])[:2]:
            share = row["not_ok_percent"]
            if share > 2 * self.failed + 1:
                words.append(
                    f"of the rows with {row['field']} = {row['value']} {share:.3g} % are not ok,"
                    f" of all rows {self.failed:.3g} %"
                )
        for row in self.sizes[:1]:
            if abs(row["correlation"]) > 0.5:
                grow = "longer" if row["correlation"] > 0 else "shorter"
                words.append(
                    f"the larger {row['field']} is, the {grow} are the answers"
                    f" (correlation {row['correlation']:.2f})"
                )
        return words

    def section(self) -> Html:
        """The part of the page."""
        if not self.values and not self.sizes:
            return Html("")
        worst = sorted(self.values, key=lambda row: -row["not_ok_percent"])
        failing = [row for row in worst if row["not_ok_percent"] > 0][:12]
        return section(
            "Input fields and answers",
            note(
                f"From {self.rows:,} rows with their input, drawn at random where there are more."
            ),
            heading("values with the longest answers") if self.values else "",
            table(self.values[:12]),
            heading("values with most rows not ok") if failing else "",
            table(failing),
            heading("size of a text, or value of a number, and the length of answers")
            if self.sizes
            else "",
            table(self.sizes[:12]),
            name="fields",
        )
