"""Tool calls that a server returns as text, because it has no tool parser for its model.

Each dialect of :data:`DIALECTS` has the mark that its calls begin with, the parser of vLLM
(``--tool-call-parser``) that reads it on the server, and a function that reads it here. The forms
come from the chat templates of the models and from vLLM's documentation of its tool parsers.
:data:`WHOLE_FORMS` are forms without such a mark: they count where they are the whole answer.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from bagent.answers.reasoning import harmony_messages, split_reasoning
from bagent.text.json import decode_json, encode_json
from bagent.types import Json, Reply, ToolCall

Calls = list[tuple[str, str]]
"""Names of tools, each with its arguments as JSON text."""

Schemas = Mapping[str, Json]
"""The schemas of each tool's arguments, by the name of the tool."""

MOST_CODE = 100_000
"""Characters of a call in Python's syntax that are parsed, at most."""


class ToolCallDialect(NamedTuple):
    """How a model family writes calls: ``read`` gets the text from the first mark on.

    It returns what it could read; an empty list or a ValueError means that nothing could be read.
    """

    mark: re.Pattern[str]
    parser: str
    read: Callable[[str, Schemas], Calls]


class UnreadCallError(ValueError):
    """The text has the mark of a call that could not be read.

    Args:
        parser: the server's option that would have read it.
    """

    def __init__(self, parser: str) -> None:
        super().__init__(
            "the server returned a tool call as text, and it cannot be read here (start the"
            f" server with a tool parser; for vLLM: --enable-auto-tool-choice"
            f" --tool-call-parser {parser})"
        )


def parse_text_tool_calls(reply: Reply, definitions: Sequence[Json] = ()) -> Reply:
    """Return ``reply`` with the calls that its text holds, or ``reply`` itself.

    Text before marked calls is kept as the text of the reply. Calls without a mark, or inside a
    code block, count only where the whole text, reasoning apart, is calls of tools in
    ``definitions``.

    Raises:
        UnreadCallError: the text has the mark of a call and cannot be read.
    """
    if reply.tool_calls or reply.blocks is not None or not reply.text:
        return reply
    schemas = {
        tool["function"]["name"]: tool["function"]["parameters"].get("properties") or {}
        for tool in definitions
    }
    split = split_reasoning(reply.text)
    # A model that forgets to close its reasoning still calls.
    text = split.text.strip() if split.closed else split.reasoning or ""
    calls, before = _harmony_calls(reply.text), ""
    if not calls:
        calls, before = _calls_in(text, schemas)
    if not calls:
        return reply
    numbered = [ToolCall(f"call_{i}", name, arguments) for i, (name, arguments) in enumerate(calls)]
    return msgspec.structs.replace(reply, text=before or None, tool_calls=tuple(numbered))


_BLOCK_START = re.compile(r"```\w*")
_FENCE = re.compile(r"^[ \t]*(?:```|~~~)", re.M)
_QUOTES = ("`", '"', "'", "“")
_PROSE = re.compile(
    r"""(?:\s*</[^<>\s]{1,80}>|"?[\w.-]{0,200}"?>)?\s*"""  # the rest of the tag, or its end
    r"(?:[,.;:!?)…]+(?=\s|<|\Z)"
    r"|(?P<word>[\w'’-]{1,200})(?:\s+[\w'’(]|[ \t]+<|[,.;:!?)](?=\s|\Z)|\Z))"
)


def _calls_in(text: str, schemas: Schemas) -> tuple[Calls, str]:
    """Return the calls of an answer without its reasoning, and the text before them."""
    block = _code_block(text)
    content = text if block is None else block
    for read in WHOLE_FORMS:
        calls: Calls = []
        with suppress(ValueError, RecursionError):
            calls = read(content, schemas)
        if calls and _are_offered(calls, schemas):
            return calls, ""
    if block is None:
        return _marked_calls(text, schemas)
    calls, _ = _marked_calls(content, schemas) if ANY_MARK.match(content) else ([], "")
    return (calls, "") if _are_offered(calls, schemas) else ([], "")


def _code_block(text: str) -> str | None:
    """Return the content of a text that is one code block, None for any other text."""
    start = _BLOCK_START.match(text)
    if start is None or not text.endswith("```"):
        return None
    content = text[start.end() : -3].strip()
    return None if _FENCE.search(content) else content


def _are_offered(calls: Calls, schemas: Schemas) -> bool:
    return all(name in schemas for name, _ in calls)


def _marked_calls(text: str, schemas: Schemas) -> tuple[Calls, str]:
    """Return the calls from the first mark on, and the text before it.

    A mark in code, in quotes or amid prose is a mention: the text is about calls.
    """
    fences = offset = 0
    for match in ANY_MARK.finditer(text):
        start = match.start()
        fences += len(_FENCE.findall(text, offset, start))
        offset = start
        if fences % 2 == 0 and not _is_mention(text, match, schemas):
            return _calls_at(text, start, schemas), text[:start].strip()
    return [], ""


def _is_mention(text: str, mark: re.Match[str], schemas: Schemas) -> bool:
    """Return whether a mark is quoted or has prose behind it; never at the start of the text."""
    start = mark.start()
    if start == 0:
        return False
    if text[start - 1] in _QUOTES:
        return True
    prose = _PROSE.match(text, mark.end())
    return prose is not None and prose["word"] not in schemas


def _calls_at(text: str, start: int, schemas: Schemas) -> Calls:
    """Return the calls from the mark at ``start`` on, by the first dialect that can read them."""
    dialects = [dialect for dialect in DIALECTS if dialect.mark.match(text, start)]
    for dialect in dialects:
        calls: Calls = []
        with suppress(ValueError, RecursionError, AttributeError):
            calls = dialect.read(text[start:], schemas)
        if calls:
            return calls
    raise UnreadCallError(dialects[0].parser)


# --- calls whose arguments are JSON -----------------------------------------------------------

_DECODER = json.JSONDecoder(strict=False)  # raw line breaks in strings are read
_BETWEEN = re.compile(r"[\s;,]*")
_ARGUMENT_KEYS = ("arguments", "parameters", "tool_arguments")


def _json_value(text: str, offset: int) -> tuple[Json, int]:
    """Return the JSON value that begins at ``offset``, and where it ends."""
    try:
        value, end = _DECODER.raw_decode(text, offset)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value, end


def _json_after(opening: str, *, by_name: bool = False) -> Callable[[str, Schemas], Calls]:
    """Return a reader of objects, or lists of objects, behind each match of ``opening``.

    With ``by_name`` a call is ``{"NAME": {arguments}}``.
    """
    pattern = re.compile(opening)

    def read(text: str, schemas: Schemas) -> Calls:
        calls: Calls = []
        offset = 0
        while (match := pattern.search(text, offset)) is not None:
            offset = match.end()
            while text[offset : offset + 1] in ("{", "["):
                value, offset = _json_value(text, offset)
                if by_name:
                    value = [
                        {"name": name, "arguments": arguments}
                        for item in _items(value)
                        for name, arguments in item.items()
                    ]
                calls += [_named_call(item) for item in _items(value)]
                between = _BETWEEN.match(text, offset)
                offset = between.end() if between else offset
        return calls

    return read


def _items(value: Json) -> list[Json]:
    """Return the calls of a list, of a message in OpenAI's form, or the one call."""
    if isinstance(value, dict):
        value = value.get("tool_calls") or value.get("function_call") or value
    return value if isinstance(value, list) else [value]


def _named_call(value: Json) -> tuple[str, str]:
    """Return the name and arguments of a call that is an object."""
    if not isinstance(value, dict):
        raise ValueError("no call")
    function = value.get("function")
    call = function if isinstance(function, dict) else value
    name = call.get("name") or call.get("tool_name")
    if not isinstance(name, str) or not name:
        raise ValueError("no name")
    arguments = next((call[key] for key in _ARGUMENT_KEYS if key in call), None)
    if arguments is None:
        return name, "{}"
    return name, arguments if isinstance(arguments, str) else encode_json(arguments)


def _name_before(opening: str) -> Callable[[str, Schemas], Calls]:
    """Return a reader of calls that say their ``name`` before their JSON arguments."""
    pattern = re.compile(opening)

    def read(text: str, schemas: Schemas) -> Calls:
        calls: Calls = []
        offset = 0
        while (match := pattern.search(text, offset)) is not None:
            value, offset = _json_value(text, match.end())
            if not isinstance(value, dict):
                raise ValueError("no arguments")
            calls.append((match["name"], encode_json(value)))
        return calls

    return read


# --- calls whose arguments are elements -------------------------------------------------------


def _elements(call: str, argument: str) -> Callable[[str, Schemas], Calls]:
    """Return a reader of calls with one element for each argument.

    Args:
        call: pattern of a whole call with the groups ``name`` and ``body``.
        argument: pattern of an argument with the groups ``key``, ``value`` and perhaps ``text``,
            which is ``true`` where the value is a text whatever it looks like.
    """
    calls_pattern, arguments_pattern = re.compile(call, re.S), re.compile(argument, re.S)

    def read(text: str, schemas: Schemas) -> Calls:
        calls: Calls = []
        for match in calls_pattern.finditer(text):
            properties = schemas.get(match["name"], {})
            arguments: dict[str, Json] = {}
            for part in arguments_pattern.finditer(match["body"]):
                is_text = part.groupdict().get("text")
                value = part["value"]
                arguments[part["key"]] = (
                    value
                    if is_text == "true"
                    else _typed(value, properties, part["key"], is_text == "false")
                )
            if not arguments and match["body"].strip():
                raise ValueError("arguments in another form")
            calls.append((match["name"], encode_json(arguments)))
        return calls

    return read


def _typed(text: str, schemas: Json, key: str, is_json: bool = False) -> Json:
    """Return the value that ``text`` is by the schema of the argument ``key``."""
    schema = schemas.get(key) if isinstance(schemas, dict) else None
    # Where the schema says nothing about the type, a container is not meant as a text.
    is_container = not schema and text.lstrip().startswith(("{", "["))
    if not is_json and not is_container and _takes_text(schema):
        return text
    with suppress(ValueError, RecursionError):
        return decode_json(text)
    if len(text) <= MOST_CODE:
        with suppress(ValueError):
            return _literal(text.strip())
    return text


def _takes_text(schema: Json) -> bool:
    """Return whether an argument may be a text; True if the schema gives no type."""
    if not isinstance(schema, dict):
        return True
    types = schema.get("type")
    choices = schema.get("anyOf") or schema.get("oneOf")
    if types is None and isinstance(choices, list):
        return any(map(_takes_text, choices))
    if types is None:
        return "$ref" not in schema
    return "string" in (types if isinstance(types, list) else [types])


# --- calls in Python's syntax -----------------------------------------------------------------


def _python_after(opening: str, end: str) -> Callable[[str, Schemas], Calls]:
    """Return a reader of calls in Python's syntax between two marks."""
    pattern = re.compile(rf"{opening}(.*?)(?:{end}|\Z)", re.S)

    def read(text: str, schemas: Schemas) -> Calls:
        return [call for match in pattern.finditer(text) for call in _python_calls(match[1])]

    return read


def _python_calls(text: str) -> Iterator[tuple[str, str]]:
    """Yield the calls of a list, or one a line; raise ValueError where it is anything else."""
    if len(text) > MOST_CODE:
        raise ValueError("too long")
    try:
        body = ast.parse(text.strip()).body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("no code") from error
    for statement in body:
        expression = statement.value if isinstance(statement, ast.Expr) else None
        listed = expression.elts if isinstance(expression, ast.List) else [expression]
        for call in listed:
            if not isinstance(call, ast.Call) or call.args:
                raise ValueError("no call with named arguments")
            name = ast.unparse(call.func)
            yield (
                name,
                encode_json({str(word.arg): _literal(word.value) for word in call.keywords}),
            )


def _literal(code: str | ast.expr) -> Json:
    """Return a Python literal as JSON; raise ValueError where it is none."""
    try:
        return _plain(ast.literal_eval(code))
    except (TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("no literal") from error  # a TypeError is of {{}}, which has no hash


def _plain(value: object) -> Json:
    """Return a Python literal as JSON; raise ValueError where it has no such form."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise ValueError("no JSON value")


# --- other forms ------------------------------------------------------------------------------

_GEMMA_KEY = re.compile(r"(?<=[{,])\s*([A-Za-z_]\w*)\s*:")
_GEMMA_CALL = re.compile(
    r"call:([\w.-]{1,200})(\{.*?\})(?=<tool_call\|>|<end_function_call>|\Z)", re.S
)


def _gemma(text: str, schemas: Schemas) -> Calls:
    """Read ``call:NAME{key:<|"|>text<|"|>,other:3}``."""
    calls = []
    for name, body in _GEMMA_CALL.findall(text.strip().replace("<escape>", '<|"|>')):
        # Odd pieces are texts, even ones are the text around them.
        pieces = body.split('<|"|>')
        for index, piece in enumerate(pieces):
            pieces[index] = encode_json(piece) if index % 2 else _GEMMA_KEY.sub(r'"\1":', piece)
        calls.append((name, encode_json(decode_json("".join(pieces)))))
    return calls


_HARMONY_PLAIN = re.compile(
    r"(?:\A|assistant)(?:commentary|analysis)?\s*to=functions\.(?P<name>[\w.-]{1,200})"
    r"(?:commentary)?\s*(?:json)?\s*(?=\{)"
)


def _harmony_calls(text: str) -> Calls:
    """Read calls of gpt-oss: messages to ``functions.NAME``, also without the special tokens."""
    if "to=functions." not in text:
        return []
    calls: Calls = []
    with suppress(ValueError):
        for message in harmony_messages(text):
            if message.recipient is not None and message.recipient.startswith("functions."):
                value, _ = _json_value(message.content or "{}", 0)
                calls.append((message.recipient.removeprefix("functions."), encode_json(value)))
        return calls or _name_before(_HARMONY_PLAIN.pattern)(text, {})
    raise UnreadCallError("openai")


# --- forms that are the whole answer ----------------------------------------------------------


def _whole_json(text: str, schemas: Schemas) -> Calls:
    """Read calls that are JSON objects or lists of them (Llama 3, xLAM, OpenAI's messages)."""
    if text[:1] not in ("{", "["):
        return []
    calls: Calls = []
    offset = 0
    while offset < len(text):
        value, end = _json_value(text, offset)
        for item in _items(value):
            function = item.get("function", item) if isinstance(item, dict) else None
            if not isinstance(function, dict) or not function.keys() & set(_ARGUMENT_KEYS):
                raise ValueError("no call")
            calls.append(_named_call(item))
        between = _BETWEEN.match(text, end)
        offset = between.end() if between else end
    return calls


_PYTHON_CALLS = re.compile(
    r"(?:<(?P<tag>code|tool)>\s*)?(?P<calls>(?:\[\s*)?[A-Za-z_][\w.]*\(.*\)(?:\s*\])?)"
    r"(?(tag)\s*</(?P=tag)>)",
    re.S,
)


def _whole_python(text: str, schemas: Schemas) -> Calls:
    """Read calls in Python's syntax (pythonic, Gemma 3, smolagents)."""
    match = _PYTHON_CALLS.fullmatch(text)
    return [*_python_calls(match["calls"])] if match is not None else []


def _whole_named(opening: str, end: str) -> Callable[[str, Schemas], Calls]:
    """Return a reader of calls that say their ``name`` before their JSON arguments."""
    opening_pattern, end_pattern = re.compile(opening, re.M | re.S), re.compile(end)

    def read(text: str, schemas: Schemas) -> Calls:
        calls: Calls = []
        offset = 0
        while offset < len(text):
            match = opening_pattern.match(text, offset)
            if match is None:
                return []
            value, offset = _json_value(text, match.end())
            calls.append((match["name"], encode_json(value)))
            after = end_pattern.match(text, offset)
            if after is None:
                return []
            offset = after.end()
        return calls

    return read


_NAME = r"(?P<name>[\w.-]{1,200})"
_PARAMETER = (
    r"<parameter=(?P<key>[^>\n]{1,200})>\n?(?P<value>.*?)\n?"
    r"(?:</parameter>|(?=<parameter=)|\Z)"
)
_FUNCTION = rf"<function={_NAME}>\s*(?P<body>(?!\{{).*?)(?:</function>|</(?:seed:)?tool_call>)"
_INVOKE = (
    r'<(?P<prefix>(?:｜DSML｜|steptml:)?)invoke name="(?P<name>[^"]{1,200})">'
    r"(?P<body>.*?)</(?P=prefix)invoke>"
)
_INVOKE_PARAMETER = (
    r'<(?P<prefix>(?:｜DSML｜|steptml:)?)parameter name="(?P<key>[^"]{1,200})"'
    r'(?: string="(?P<text>true|false)")?>(?P<value>.*?)</(?P=prefix)parameter>'
)
_GLM = rf"<tool_call>\s*{_NAME}\s*(?P<body>(?:<arg_key>.*?)?)\s*</tool_call>"
_GLM_ARGUMENT = (
    r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*<arg_value>\s*(?P<value>.*?)\s*</arg_value>"
)


_REACT = rf"(?:Thought:.*?^)?Action:[ \t]*{_NAME}[ \t]*\n\s*Action Input:\s*(?=\{{)"
_TOOL_USE = rf"<tool_use>\s*<name>\s*{_NAME}\s*</name>\s*<arguments>\s*(?=\{{)"

WHOLE_FORMS: tuple[Callable[[str, Schemas], Calls], ...] = (
    _whole_json,
    _whole_python,
    _whole_named(_REACT, r"\s*(?:Observation:?\s*)?"),
    _whole_named(_TOOL_USE, r"\s*</arguments>\s*</tool_use>\s*"),
)
"""Readers of calls without a mark, which return none where the text is anything else as well."""


def _dialect(mark: str, parser: str, read: Callable[[str, Schemas], Calls]) -> ToolCallDialect:
    return ToolCallDialect(re.compile(mark), parser, read)


DIALECTS = (
    _dialect(r"<tool_call>", "hermes", _json_after(r"<tool_call>\s*")),  # Qwen, Granite 4, xLAM
    _dialect(r"<tool_call>|<function=", "qwen3_coder", _elements(_FUNCTION, _PARAMETER)),
    _dialect(r"<tool_call>\s*[\w.-]+\s*<", "glm45", _elements(_GLM, _GLM_ARGUMENT)),
    _dialect(r"<seed:tool_call>", "seed_oss", _elements(_FUNCTION, _PARAMETER)),
    _dialect(r"<function=", "llama3_json", _name_before(rf"<function={_NAME}>\s*(?=\{{)")),
    _dialect(r"\[TOOL_CALLS\]", "mistral", _json_after(r"\[TOOL_CALLS\]\s*")),
    _dialect(
        r"\[TOOL_CALLS\]",
        "mistral",
        _name_before(
            rf"\[TOOL_CALLS\]\s*{_NAME}(?:\[CALL_ID\][\w-]{{1,200}})?(?:\[ARGS\])?\s*(?=\{{)"
        ),
    ),
    _dialect(r"<\|python_tag\|>", "llama3_json", _json_after(r"<\|python_tag\|>\s*")),
    _dialect(
        r"<\|python_start\|>",
        "llama4_pythonic",
        _python_after(r"<\|python_start\|>", r"<\|python_end\|>"),
    ),
    _dialect(
        r"<\|tool_call_start\|>",
        "lfm2",
        _python_after(r"<\|tool_call_start\|>", r"<\|tool_call_end\|>"),
    ),
    _dialect(
        r"<function_calls>", "olmo3", _python_after(r"<function_calls>", r"</function_calls>")
    ),
    _dialect(r"<function_calls>", "minimax_m2", _elements(_INVOKE, _INVOKE_PARAMETER)),
    _dialect(
        r"<\|tool_calls_section_begin\|>|<\|tool_call_begin\|>",
        "kimi_k2",
        _name_before(
            rf"<\|tool_call_begin\|>\s*(?:functions\.)?{_NAME}(?::\d+)?\s*"
            r"<\|tool_call_argument_begin\|>\s*(?=\{)"
        ),
    ),
    _dialect(
        r"<｜tool▁calls?▁begin｜>",
        "deepseek_v3",
        _name_before(
            rf"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>{_NAME}\s*```json\s*(?=\{{))"
        ),
    ),
    _dialect(
        r"<｜tool▁calls?▁begin｜>",
        "deepseek_v31",
        _name_before(rf"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>\s*(?=\{{)"),
    ),
    _dialect(r"<｜DSML｜", "deepseek_v32", _elements(_INVOKE, _INVOKE_PARAMETER)),
    _dialect(r"<tool_calls>", "jamba", _json_after(r"<tool_calls>\s*")),  # Hunyuan, MiniMax M1
    _dialect(r"<minimax:tool_call>", "minimax_m2", _elements(_INVOKE, _INVOKE_PARAMETER)),
    _dialect(r"<invoke name=", "minimax_m2", _elements(_INVOKE, _INVOKE_PARAMETER)),
    _dialect(r"<\|tool_call\|>", "granite", _json_after(r"<\|tool_call\|>\s*")),
    _dialect(r"<function_call>", "granite-20b-fc", _json_after(r"<function_call>\s*")),
    _dialect(r"<\|action_start\|>", "internlm", _json_after(r"<\|action_start\|>[^{]{0,40}")),
    _dialect(r"\bfunctools\[", "phi4_mini_json", _json_after(r"functools(?=\[)")),
    _dialect(r"<TOOLCALL>", "nemotron_json", _json_after(r"<TOOLCALL>\s*")),
    _dialect(r"<\|START_ACTION\|>", "cohere_command3", _json_after(r"<\|START_ACTION\|>\s*")),
    _dialect(r"<｜tool_calls_begin｜>", "step3", _elements(_INVOKE, _INVOKE_PARAMETER)),
    _dialect(r"<\|tool_call>|<start_function_call>", "gemma4", _gemma),
    _dialect(r"<\|tools_prefix\|>", "apertus", _json_after(r"<\|tools_prefix\|>\s*", by_name=True)),
)
"""Every dialect with a mark; of those that share one, the first that can read the text counts."""

ANY_MARK = re.compile("|".join(dialect.mark.pattern for dialect in DIALECTS))
"""The mark of any dialect: one search is enough for the many answers that have none."""
