"""A report as text for people: 80 columns where the content allows, and no control codes."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator

import msgspec

from bagent.check.report import (
    CheckReport,
    CostReport,
    EndpointReport,
    PromptReport,
    RowReport,
    SchemaReport,
    ShareReport,
    TokenReport,
)
from bagent.check.sample import message_text
from bagent.money.prices import FLEET
from bagent.observe.formatting import counted, money, name_of, visible
from bagent.types import Json, Message

WIDTH = 80
LABEL = 12
MOST_ENDPOINTS = 20
LONGEST_SHOWN = 20_000
"""Characters of one message that are shown; ``--json`` has them all."""

_CONTROL = re.compile(
    r"[^\S\n\t ]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


def report_text(report: CheckReport) -> str:
    """The whole report, ending with a line end."""
    blocks = [
        _lines(_job(report)),
        *([_stages(report.stages)] if report.stages else []),
        *(_prompt(one) for one in report.prompts),
        _lines(_numbers(report)),
        *([_lines(_sharing(report.sharing, report))] if report.sharing else []),
        *([_reorder(report)] if report.reorder else []),
        *([_tools(report)] if report.opened and report.tools else []),
    ]
    return "\n".join(block for block in blocks if block)


def _stages(written: str) -> str:
    return (
        f"the topology written out; the numbers below are of its first stage that asks:\n{written}"
    )


def _lines(pairs: Iterable[tuple[str, str]]) -> str:
    """Labels and values in two columns; long values go on below."""
    found: list[str] = []
    for label, value in pairs:
        lines = textwrap.wrap(
            value,
            WIDTH - LABEL,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in lines or [""]:
            found.append(f"{label:<{LABEL}}{line}".rstrip())
            label = ""
    return "".join(f"{line}\n" for line in found)


def _job(report: CheckReport) -> Iterator[tuple[str, str]]:
    yield "job", f"{visible(report.job)} ({visible(report.file)})"
    yield "backend", visible(report.backend)
    if report.planned:
        yield "", f"not started: {report.planned}"
    for endpoint in report.endpoints[:MOST_ENDPOINTS]:
        yield "", _endpoint(endpoint)
    if len(report.endpoints) > 1:
        alive = sum(endpoint.alive for endpoint in report.endpoints)
        yield "", f"{alive:,} of {counted(len(report.endpoints), 'endpoint')} answer"
    yield "model", f"{_model(report)}, {_context(report.context)}"
    yield "input", ", ".join(visible(one, 200) for one in report.inputs[:10])
    yield "rows", _rows(report)
    yield "answers", f"{report.answers} per row"
    yield "max_tokens", _max_tokens(report)
    if report.schema:
        yield "schema", _schema(report.schema)
    yield "streaming", report.stream
    yield "results", visible(report.results)
    yield from _effects(report)
    label = "request"
    for key, value in report.parameters.items():
        yield label, f"{visible(key)}: {_parameter(key, value)}"
        label = ""


def _effects(report: CheckReport) -> Iterator[tuple[str, str]]:
    """What a run executes and sends."""
    label = "executes"
    for step in report.effects.executes:
        yield label, f"{step.kind}: {visible(step.what, 300)}"
        label = ""
    label = "sends"
    for one in report.effects.sends:
        yield label, f"{visible(one.variable)} to {visible(one.to, 300)}"
        label = ""
    if report.effects.executes or report.effects.sends:
        yield "", "done by this check" if report.opened else "by a run; nothing of it was done here"


def _endpoint(one: EndpointReport) -> str:
    if one.not_asked:
        return f"{one.name}, {one.not_asked} (--open sends it)"
    parts = [one.name, "answers" if one.alive else "no answer"]
    if one.error:
        parts.append(visible(one.error, 300))
    if one.engine or one.version:
        parts.append(visible(" ".join(filter(None, (one.engine, one.version))), 80))
    if one.models:
        more = f" and {len(one.models) - 1:,} more" if len(one.models) > 1 else ""
        parts.append(f"{visible(one.models[0], 200)}{more}")
    if one.context:
        parts.append(f"context {one.context:,}")
    return ", ".join(parts)


def _model(report: CheckReport) -> str:
    if report.model is None:
        return "auto: each line's own or what the endpoint serves" if report.model_auto else "?"
    return visible(report.model, 200) + (" (auto)" if report.model_auto else "")


def _context(context: int | None) -> str:
    return f"context {context:,} tokens" if context else "context unknown"


def _rows(report: CheckReport) -> str:
    how = {"counted": "", "about": "about ", "at least": "at least "}[report.rows_how]
    why = " (estimated by bytes)" if report.rows_how == "about" else ""
    words = f"{how}{counted(report.rows, 'row')}{why}"
    if report.looked_at < report.rows:
        words += f", the first {report.looked_at:,} looked at"
    return words


def _max_tokens(report: CheckReport) -> str:
    limits = report.max_tokens
    if limits.most is None or limits.least is None:
        return "not sent: the server decides"
    span = f"{limits.most:,}"
    if limits.least != limits.most:
        span = f"{limits.least:,} to {span}, by the length of the prompt"
    if limits.automatic:
        span += " (automatic: what the context leaves, at most 4,096)"
    return span


def _schema(schema: SchemaReport) -> str:
    by = "not enforced by the server"
    if schema.native:
        strict = ", strict" if schema.strict else ""
        refuse = " where it takes it" if schema.enforce == "auto" else ""
        by = f"enforced by the server{refuse} (response_format{strict})"
    told = "described in the prompt" if schema.described else "not described in the prompt"
    return f"{visible(schema.source)}: {by}, {told}; every answer is validated"


def _parameter(key: str, value: Json) -> str:
    if key == "response_format" and isinstance(value, dict):
        return f"{visible(str(value.get('type')))} (the output schema)"
    return visible(_json(value), 200)


# --- prompts ------------------------------------------------------------------------------------


def _prompt(one: PromptReport) -> str:
    head = f"prompt of {_row(one.id, one.source, one.line)}"
    if one.tokens is not None:
        about = "" if one.counted else "about "
        head += f", {about}{counted(one.tokens, 'token')}"
    if one.error is not None:
        return f"{head}\n  cannot be sent: {visible(one.error)}\n"
    if one.messages is None:
        return f"{head}\n  (raw)\n{_body(one.prompt or '')}"
    said = [f"  {visible(str(message.get('role')))}\n{_said(message)}" for message in one.messages]
    return f"{head}\n{''.join(said)}"


def _said(message: Message) -> str:
    content = message.get("content")
    text = message_text(message)
    if isinstance(content, list):
        images = [part["image_url"] for part in content if "image_url" in part]
        text += "".join(f"\n[image {_image(image)}]" for image in images)
    return _body(text.removeprefix("\n"))


def _image(image: Json) -> str:
    url = str(image.get("url") if isinstance(image, dict) else image)
    if url.startswith("data:"):
        return f"{visible(url.partition(',')[0])}, {len(url):,} characters"
    return visible(url, 200)


def _body(text: str) -> str:
    """A message as it is, indented; what a terminal would act on is made visible."""
    cut = len(text) - LONGEST_SHOWN
    shown = _CONTROL.sub(
        lambda found: found[0].encode("unicode_escape").decode(), text[:LONGEST_SHOWN]
    )
    lines = "".join((f"    {line}" if line else "") + "\n" for line in shown.split("\n"))
    if cut > 0:
        lines += f"    [{cut:,} more characters; --json shows them]\n"
    return lines


# --- numbers ------------------------------------------------------------------------------------


def _numbers(report: CheckReport) -> Iterator[tuple[str, str]]:
    tokens = report.tokens
    exact = _is_exact(tokens, report)
    if tokens.mean is None:
        yield "tokens", "unknown: no row can be sent"
    else:
        yield "tokens", _how(tokens)
        span = f"min {tokens.least:,}, median {tokens.median:,}, max {tokens.most:,}"
        yield "", f"a prompt: {span}"
        yield "", f"all prompts: {_total(tokens.prompts or 0, exact)}"
        if tokens.answers_at_most is not None:
            yield "", f"all answers: at most {_total(tokens.answers_at_most, exact)}"
        if tokens.images:
            yield "", f"{counted(tokens.images, 'image')} not counted"
    if tokens.repeats:
        once = "sent once" if report.dedupe else "sent each time; dedupe: true sends them once"
        words = f"{tokens.repeats:,} of {counted(tokens.rows, 'request')} equal an earlier one"
        yield "repeats", f"{words} ({once})"
    yield "cost", _cost(report.cost)
    yield from _modes(report.cost)
    yield from _named("will fail", report.failing, report.failing_count)
    yield from _named("too long", report.too_long, report.too_long_count)


def _total(number: int, exact: bool) -> str:
    """An exact number, or an estimate with three digits that mean something."""
    if exact:
        return f"{number:,}"
    step = 10 ** max(0, len(str(number)) - 3)
    return f"about {round(number / step) * step:,}"


def _is_exact(tokens: TokenReport, report: CheckReport) -> bool:
    return report.rows_how == "counted" and tokens.counted == tokens.rows == report.rows


def _how(tokens: TokenReport) -> str:
    if tokens.how == "characters":
        return f"estimated by characters ({tokens.by}): may be off by half"
    if tokens.counted == tokens.rows:
        return f"counted by {tokens.by}"
    return f"counted by {tokens.by} for {tokens.counted:,} of {tokens.rows:,} rows"


def _cost(cost: CostReport) -> str:
    if cost.price_in is None or cost.price_out is None:
        return "unknown (--price IN,OUT in dollars per million tokens)"
    if cost.prompts_usd is None:
        return "unknown"
    words = f"prompts about {money(cost.prompts_usd)}"
    if cost.answers_usd_at_most is None or cost.total_usd_at_most is None:
        return f"{words}, answers unknown"
    words += f", answers at most {money(cost.answers_usd_at_most)}"
    return f"{words}, together at most {money(cost.total_usd_at_most)}"


def _modes(cost: CostReport) -> Iterator[tuple[str, str]]:
    """The ways to send the job, with answers at their longest."""
    if not cost.modes:
        return
    yield "", "by mode, at most:"
    for one in cost.modes:
        words = "unknown" if one.usd is None else money(one.usd)
        if one.mode == FLEET:
            words = "measured by a run on your GPUs (prices: {gpu_hour: ...}, then bagent report)"
        yield "", f"{one.mode:<16}{words}"


def _named(label: str, rows: Iterable[RowReport], count: int) -> Iterator[tuple[str, str]]:
    shown = 0
    for row in rows:
        yield label, f"{_row(row.id, row.source, row.line)}: {visible(row.error, 300)}"
        label = ""
        shown += 1
    if count > shown:
        yield "", f"and {count - shown:,} more of the rows looked at"


def _row(name: Json, source: str, line: int) -> str:
    shown = name_of(name)
    return f"row {shown} ({visible(source)}:{line})" if shown else f"row {visible(source)}:{line}"


# --- what is shared -----------------------------------------------------------------------------


def _sharing(found: ShareReport, report: CheckReport) -> Iterator[tuple[str, str]]:
    how = "by token ids" if found.exact else "by characters"
    yield "shared", f"tokens of a prompt that a prefix cache can reuse, {how},"
    yield "", f"in blocks of {found.block}, over {found.rows:,} rows:"
    for words, number in (
        ("by all rows", found.by_all),
        ("by most (half or more)", found.by_most),
        ("by fewer", found.by_some),
        ("by no other row", found.by_none),
    ):
        share = number / found.prompt if found.prompt else 0.0
        yield "", f"{words:<24}{number:>10,.0f}  {share:>7.0%}"
    if found.kv_tokens:
        fits = f", about {found.kv_rows:,} rows of this job" if found.kv_rows is not None else ""
        yield "", f"an endpoint's KV cache holds {found.kv_tokens:,} tokens{fits}"
    if report.endpoints and not report.planned and "openai.com" in report.endpoints[0].name:
        yield "", "OpenAI reuses prompt beginnings from 1,024 tokens on"
    yield "warming", found.warming.why


def _reorder(report: CheckReport) -> str:
    found = report.reorder
    if found is None:
        return ""
    total = _total(found.gain_total, exact=False)
    gain = f"{counted(found.gain, 'token')} more of each prompt, {total} in all"
    words = [("suggestion", f"with the fixed text first all rows share {gain}:")]
    if found.points_back:
        words.append(("", f'read it once: the moved text says "{found.points_back}"'))
    return _lines(words) + "\n" + _control_free(found.yaml)


def _tools(report: CheckReport) -> str:
    """The definitions of the tools as requests have them, whole."""
    text = msgspec.json.format(msgspec.json.encode(report.tools), indent=2).decode()
    return f"the tools as the model gets them:\n{_control_free(text)}\n"


def _control_free(text: str) -> str:
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _json(value: Json) -> str:
    return msgspec.json.encode(value).decode()
