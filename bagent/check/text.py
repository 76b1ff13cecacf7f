"""The report as text for people: 80 columns where the content allows, no control codes."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator

import msgspec

from bagent.check.estimate import round_to_three_digits
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
from bagent.types import Json, Message, row_location

WIDTH = 80
LABEL = 12
MAX_ENDPOINTS = 20
MAX_MESSAGE_CHARS = 20_000
"""Characters of a message that are printed; ``--json`` has all."""

_CONTROL = re.compile(
    r"[^\S\n\t ]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


def report_text(report: CheckReport) -> str:
    """Return the whole report with a final line end."""
    blocks = [
        _lines(_job(report)),
        *([_stages(report.stages)] if report.stages else []),
        *(_prompt(prompt) for prompt in report.prompts),
        _lines(_numbers(report)),
        *([_lines(_sharing(report.sharing, report))] if report.sharing else []),
        *([_reorder(report)] if report.reorder else []),
        *([_tools(report)] if report.opened and report.tools else []),
    ]
    return "\n".join(block for block in blocks if block)


def _stages(yaml: str) -> str:
    return f"the topology written out; the numbers below are of its first stage that asks:\n{yaml}"


def _lines(pairs: Iterable[tuple[str, str]]) -> str:
    """Return labels and values in two columns; long values continue below."""
    lines: list[str] = []
    for label, value in pairs:
        wrapped = textwrap.wrap(
            value, WIDTH - LABEL, break_long_words=False, break_on_hyphens=False
        )
        for line in wrapped or [""]:
            lines.append(f"{label:<{LABEL}}{line}".rstrip())
            label = ""
    return "".join(f"{line}\n" for line in lines)


def _job(report: CheckReport) -> Iterator[tuple[str, str]]:
    yield "job", f"{visible(report.job)} ({visible(report.file)})"
    yield "backend", visible(report.backend)
    if report.planned:
        yield "", f"not started: {report.planned}"
    for endpoint in report.endpoints[:MAX_ENDPOINTS]:
        yield "", _endpoint(endpoint)
    if len(report.endpoints) > 1:
        alive = sum(endpoint.alive for endpoint in report.endpoints)
        yield "", f"{alive:,} of {counted(len(report.endpoints), 'endpoint')} answer"
    yield "model", f"{_model(report)}, {_context(report.context)}"
    yield "input", ", ".join(visible(path, 200) for path in report.inputs[:10])
    yield "rows", _rows(report)
    yield "answers", f"{report.answers} per row"
    yield "max_tokens", _max_tokens(report)
    if report.schema:
        yield "schema", _schema(report.schema)
    yield "streaming", report.stream
    if report.batching:
        yield "batching", visible(report.batching, 300)
    yield "results", visible(report.results)
    yield from _effects(report)
    label = "request"
    for key, value in report.parameters.items():
        yield label, f"{visible(key)}: {_parameter(key, value)}"
        label = ""


def _effects(report: CheckReport) -> Iterator[tuple[str, str]]:
    """Yield what a run executes and sends."""
    label = "executes"
    for step in report.effects.executes:
        yield label, f"{step.kind}: {visible(step.what, 300)}"
        label = ""
    label = "sends"
    for send in report.effects.sends:
        yield label, f"{visible(send.variable)} to {visible(send.to, 300)}"
        label = ""
    if report.effects.executes or report.effects.sends:
        yield "", "done by this check" if report.opened else "by a run; nothing of it was done here"


def _endpoint(endpoint: EndpointReport) -> str:
    if endpoint.not_asked:
        return f"{endpoint.name}, {endpoint.not_asked} (--open sends it)"
    parts = [endpoint.name, "answers" if endpoint.alive else "no answer"]
    if endpoint.error:
        parts.append(visible(endpoint.error, 300))
    if endpoint.engine or endpoint.version:
        parts.append(visible(" ".join(filter(None, (endpoint.engine, endpoint.version))), 80))
    if endpoint.models:
        more = f" and {len(endpoint.models) - 1:,} more" if len(endpoint.models) > 1 else ""
        parts.append(f"{visible(endpoint.models[0], 200)}{more}")
    if endpoint.context:
        parts.append(f"context {endpoint.context:,}")
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
    text = f"{how}{counted(report.rows, 'row')}{why}"
    if report.looked_at < report.rows:
        text += f", the first {report.looked_at:,} looked at"
    if report.without_ids:
        text += ", without ids: an edited row counts as a new one (id: COLUMN)"
    return text


def _max_tokens(report: CheckReport) -> str:
    limits = report.max_tokens
    if limits.most is None or limits.least is None:
        if limits.generating == 0:
            return "not sent: no row looked at asks for text"
        if limits.without == limits.generating:
            return "not sent: the server decides"
        requests = counted(limits.generating, "request")
        return f"not sent with {limits.without:,} of {requests} for text: the server decides"
    span = f"{limits.most:,}"
    if limits.least != limits.most:
        by = "by the length of the prompt" if limits.automatic else "as each line has it"
        span = f"{limits.least:,} to {span}, {by}"
    if limits.automatic:
        span += " (automatic: what the context leaves, at most 4,096)"
    return span


def _schema(schema: SchemaReport) -> str:
    by = "not enforced by the server"
    if schema.native:
        strict = ", strict" if schema.strict else ""
        refuse = " where it takes it" if schema.enforce == "auto" else ""
        by = f"enforced by the server{refuse} (response_format{strict})"
    description = "described in the prompt" if schema.described else "not described in the prompt"
    return f"{visible(schema.source)}: {by}, {description}; every answer is validated"


def _parameter(key: str, value: Json) -> str:
    if key == "response_format" and isinstance(value, dict):
        return f"{visible(str(value.get('type')))} (the output schema)"
    return visible(_json(value), 200)


# --- prompts ------------------------------------------------------------------------------------


def _prompt(prompt: PromptReport) -> str:
    head = f"prompt of {_row(prompt.id, prompt.source, prompt.line)}"
    if prompt.tokens is not None:
        about = "" if prompt.counted else "about "
        head += f", {about}{counted(prompt.tokens, 'token')}"
    if prompt.error is not None:
        return f"{head}\n  cannot be sent: {visible(prompt.error)}\n"
    if prompt.messages is None:
        return f"{head}\n  (raw)\n{_body(prompt.prompt or '')}"
    messages = [
        f"  {visible(str(message.get('role')))}\n{_message(message)}" for message in prompt.messages
    ]
    return f"{head}\n{''.join(messages)}"


def _message(message: Message) -> str:
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
    """Return a message indented, with control codes made visible."""
    cut = len(text) - MAX_MESSAGE_CHARS
    text = _escape_controls(text[:MAX_MESSAGE_CHARS])
    lines = "".join((f"    {line}" if line else "") + "\n" for line in text.split("\n"))
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
        yield "tokens", _counting_method(tokens)
        span = f"min {tokens.least:,}, median {tokens.median:,}, max {tokens.most:,}"
        yield "", f"a prompt: {span}"
        least = "at least " if tokens.grows else ""
        yield "", f"all prompts: {least}{_total(tokens.prompts or 0, exact)}"
        if tokens.answers_at_most:
            yield "", f"all answers: at most {_total(tokens.answers_at_most, exact)}"
        if tokens.images:
            yield "", f"{counted(tokens.images, 'image')} not counted"
    if tokens.repeats:
        once = "each is sent once" if report.dedupe else "sent each time without dedupe: true"
        text = f"{tokens.repeats:,} of {counted(tokens.rows, 'request')} equal an earlier one"
        yield "repeats", f"{text} ({once})"
    yield "cost", _cost(report.cost, grows=tokens.grows)
    if not tokens.grows:
        yield from _modes(report.cost)
    yield from _listed("will fail", report.failing, report.failing_count)
    yield from _listed("too long", report.too_long, report.too_long_count)


def _total(number: int, exact: bool) -> str:
    """Return an exact number, or an estimate with three significant digits."""
    return f"{number:,}" if exact else f"about {round_to_three_digits(number):,}"


def _is_exact(tokens: TokenReport, report: CheckReport) -> bool:
    seen_all = report.rows_how == "counted" and report.looked_at == report.rows
    return seen_all and tokens.counted == tokens.rows


def _counting_method(tokens: TokenReport) -> str:
    if tokens.how == "characters":
        return f"estimated by characters ({tokens.by}): may be off by half"
    if tokens.counted == tokens.rows:
        return f"counted by {tokens.by}"
    return f"counted by {tokens.by} for {tokens.counted:,} of {tokens.rows:,} rows"


def _cost(cost: CostReport, *, grows: bool) -> str:
    if cost.price_in is None or cost.price_out is None:
        return "unknown (check --price IN,OUT, or prices: in the job; dollars per million tokens)"
    if cost.prompts_usd is None:
        return "unknown"
    text = f"prompts {'at least' if grows else 'about'} {money(cost.prompts_usd)}"
    if cost.answers_usd_at_most is None:
        return f"{text}, answers unknown"
    text += f", answers at most {money(cost.answers_usd_at_most)}"
    if cost.total_usd_at_most is None:
        return text
    return f"{text}, together at most {money(cost.total_usd_at_most)}"


def _modes(cost: CostReport) -> Iterator[tuple[str, str]]:
    """Yield the ways to send the job, with answers at their longest."""
    if not cost.modes:
        return
    yield "", "by mode, at most:"
    for mode in cost.modes:
        cost_text = "unknown" if mode.usd is None else money(mode.usd)
        if mode.mode == FLEET:
            cost_text = (
                "measured by a run on your GPUs (prices: {gpu_hour: ...}, then bagent report)"
            )
        yield "", f"{mode.mode:<16}{cost_text}"


def _listed(label: str, rows: Iterable[RowReport], count: int) -> Iterator[tuple[str, str]]:
    count_listed = 0
    for row in rows:
        yield label, f"{_row(row.id, row.source, row.line)}: {visible(row.error, 300)}"
        label = ""
        count_listed += 1
    if count > count_listed:
        yield "", f"and {count - count_listed:,} more of the rows looked at"


def _row(id_: Json, source: str, line: int) -> str:
    name = name_of(id_)
    location = visible(row_location(source, line))
    return f"row {name} ({location})" if name else f"row {location}"


# --- what is shared -----------------------------------------------------------------------------


def _sharing(sharing: ShareReport, report: CheckReport) -> Iterator[tuple[str, str]]:
    how = "by token ids" if sharing.exact else "by characters"
    yield "shared", f"tokens of a prompt that a prefix cache can reuse, {how},"
    yield "", f"in blocks of {sharing.block}, over {sharing.rows:,} rows:"
    for label, number in (
        ("by all rows", sharing.by_all),
        ("by most (half or more)", sharing.by_most),
        ("by fewer", sharing.by_some),
        ("by no other row", sharing.by_none),
    ):
        share = number / sharing.prompt if sharing.prompt else 0.0
        yield "", f"{label:<24}{number:>10,.0f}  {share:>7.0%}"
    if sharing.kv_tokens:
        fits = (
            f", about {sharing.kv_rows:,} rows of this job" if sharing.kv_rows is not None else ""
        )
        yield "", f"an endpoint's KV cache holds {sharing.kv_tokens:,} tokens{fits}"
    if report.endpoints and not report.planned and "openai.com" in report.endpoints[0].name:
        yield "", "OpenAI reuses prompt beginnings from 1,024 tokens on"
    yield "warming", sharing.warming.why


def _reorder(report: CheckReport) -> str:
    reorder = report.reorder
    if reorder is None:
        return ""
    total = _total(reorder.gain_total, exact=False)
    gain = f"{counted(reorder.gain, 'token')} more of each prompt, {total} in all"
    lines = [("suggestion", f"with the fixed text first all rows share {gain}:")]
    if reorder.points_back:
        lines.append(("", f'read it once: the moved text says "{reorder.points_back}"'))
    return _lines(lines) + "\n" + _escape_controls(reorder.yaml)


def _tools(report: CheckReport) -> str:
    """Return the definitions of the tools as requests have them."""
    text = msgspec.json.format(msgspec.json.encode(report.tools), indent=2).decode()
    return f"the tools as the model gets them:\n{_escape_controls(text)}\n"


def _escape_controls(text: str) -> str:
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _json(value: Json) -> str:
    return msgspec.json.encode(value).decode()
