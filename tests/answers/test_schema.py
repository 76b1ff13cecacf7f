import json
import subprocess
import sys
from pathlib import Path

import pytest

from bagent.answers.schema.schema import FORMATS, OutputSchema
from bagent.errors import SchemaError

DRAFTS = [
    "http://json-schema.org/draft-04/schema#",
    "http://json-schema.org/draft-06/schema#",
    "http://json-schema.org/draft-07/schema#",
    "https://json-schema.org/draft/2019-09/schema",
    "https://json-schema.org/draft/2020-12/schema",
]
HERE = Path()


def load(spec, base=HERE, **options):
    return OutputSchema.load(spec, base=base, **options)


def failing(spec, base=HERE):
    with pytest.raises(SchemaError) as caught:
        load(spec, base)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ({"name": "x", "strict": True, "schema": {"type": "object"}}, 'under "schema"'),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "under its schema"),
        ({"json_schema": {"schema": {}}}, "under its schema"),
        ({"file": "answer.json"}, "by its path alone, schema: answer.json"),
        ({"name": "string", "age": "integer"}, '"properties": {"NAME"'),
        ({"title": "T", "propertys": {"a": {}}}, '"properties": {"NAME"'),
    ],
)
def test_what_would_accept_every_answer_by_mistake_is_no_schema(spec, hint):
    message = failing(spec)
    assert message.startswith("not a JSON Schema: no word in it asks for anything")
    assert hint in message


def test_a_file_that_only_holds_parts_may_be_referred_to(tmp_path):
    (tmp_path / "parts.json").write_text('{"name": {"type": "string"}}')
    schema = load({"$ref": "parts.json#/name"}, tmp_path)
    assert schema.accepts("x") and not schema.accepts(5)


@pytest.mark.parametrize("spec", [{}, True, {"title": "T"}, {"$defs": {"a": {"x-y": 1}}}])
def test_a_schema_may_accept_every_answer_on_purpose(spec):
    assert load(spec).warnings == ()


@pytest.mark.parametrize(
    ("word", "keyword"), [("enums", "enum"), ("maxlength", "maxLength"), ("requierd", "required")]
)
def test_a_word_near_a_keyword_is_an_error_that_names_it(word, keyword):
    spec = {"type": "object", "properties": {"a": {"type": "string", word: ["x"]}}}
    message = f'#/properties/a: "{word}" is no keyword of JSON Schema (did you mean {keyword}?'
    assert message in failing(spec)
    for note in (f"x-{word}", "note", "units", "nullable"):
        load({"type": "object", "properties": {"a": {"type": "string", note: ["x"]}}})


def test_words_that_ask_for_nothing_are_told_once_with_the_keyword_that_is_meant():
    part = {"type": "string", "maxlength": 5, "nullable": True, "x-note": 1, "example": "e"}
    spec = {"type": "object", "properties": {"a": part, "b": part}, "requierd": ["a"]}
    told = "is no keyword of JSON Schema and asks for nothing"
    assert load(spec, allow_misspelled=True).warnings == (
        f'"requierd" {told} (#): did you mean required?',
        f'"maxlength" {told} (#/properties/a): did you mean maxLength?',
        f'"nullable" {told} (#/properties/a): write "type": ["string", "null"]',
    )
    data = {"properties": {"requierd": {"const": {"maxlength": 1}}}, "enum": [{"maxlength": 1}]}
    assert load(data).warnings == ()


def test_file_and_inline_give_the_same_schema(tmp_path):
    spec = {"type": "object", "properties": {"é": {"type": "string"}}}
    text = json.dumps(spec, ensure_ascii=False, indent=1).replace("\n", "\r\n")
    (tmp_path / "s.json").write_bytes(b"\xef\xbb\xbf" + text.encode())
    from_file = load(tmp_path / "s.json", Path("/nowhere"))
    assert from_file.document == load(spec).document == spec
    assert from_file.text == '{"type":"object","properties":{"é":{"type":"string"}}}'.encode()
    assert json.loads(from_file.pretty) == spec and "\n" in from_file.pretty


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{\n  "type": "string",\n}', ":3:1: not JSON"),
        (b"", ": the file is empty"),
        (b'{"minimum": NaN}', ": NaN is not JSON"),
        (b"[1]", ": a schema is an object"),
        (b"[" * 5000 + b"]" * 5000, ": nested deeper"),
        (b'{"not": ' * 300 + b"{}" + b"}" * 300, ": nested deeper"),
        (b'{"minimum": ' + b"9" * 5000 + b"}", ": not JSON"),
        ('{"a": 1}'.encode("utf-16-le"), ": the file is UTF-16 (save it as UTF-8)"),
        (b'{\n"a": "\xe9"}', ":2:7: not UTF-8 (byte 0xe9)"),
    ],
)
def test_broken_files_are_named_with_their_place(tmp_path, content, message):
    (tmp_path / "s.json").write_bytes(content)
    assert failing(Path("s.json"), tmp_path).startswith(f"{tmp_path / 's.json'}{message}")
    assert failing(Path("no.json"), tmp_path).endswith("no.json: the schema file is not there")
    assert "is not a file" in failing(tmp_path)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"type": "strin"}, "#/type: 'strin' is not one of ['array', 'boolean'"),
        ({"properties": {"a": {"type": 5}}}, "#/properties/a/type: 5 is not one of"),
        ({"properties": {"a/b": {"minLength": -1}}}, "#/properties/a~1b/minLength: -1 is less"),
        ({"anyOf": []}, "#/anyOf: [] should be non-empty"),
        ({"pattern": "a("}, '#/pattern: "a(" is not a "regex"'),
        ({"properties": {"a": {"pattern": "["}}}, "#/properties/a/pattern"),
        ({"pattern": r"(?a:x)"}, "regex"),  # of Python only
        ({"$schema": DRAFTS[0], "exclusiveMinimum": 5}, "#/exclusiveMinimum: 5 is not of type"),
    ],
)
def test_wrong_schema_is_one_line_with_the_place_in_it(spec, words):
    assert words in failing(spec)


def test_a_closed_object_that_requires_what_it_does_not_allow_is_refused():
    closed = {"type": "object", "properties": {"categroy": {}}, "additionalProperties": False}
    wrong = {**closed, "required": ["category"]}
    message = 'required names "category", properties has categroy, and additionalProperties is f'
    assert message in failing(wrong)
    # An alternative may be ruled out on purpose, and an open object may have any property.
    load({"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "$defs": {"A": wrong}})
    load({**wrong, "additionalProperties": True})
    spec = {"properties": {"x": {"items": {"$ref": "#/$defs/A"}}}, "$defs": {"A": wrong}}
    assert f"A: no object can be valid: {message}" in failing(spec)


@pytest.mark.parametrize("uri", [DRAFTS[0].replace("04", "03"), "http://127.0.0.1:9/mine", 7])
def test_unknown_draft_is_refused_with_the_known_ones(uri):
    message = failing({"$schema": uri})
    assert "#/$schema: unknown" in message and "2020-12" in message


@pytest.mark.parametrize(
    "uri", [DRAFTS[2].rstrip("#"), DRAFTS[4] + "#", "https://json-schema.org/draft-07/schema#"]
)
def test_drafts_are_known_by_their_usual_spellings(uri):
    schema = load({"$schema": uri, "type": "integer"})
    assert schema.accepts(3) and not schema.accepts("3")
    assert schema.document["$schema"] == uri


def test_drafts_differ_as_they_should():
    pair = {"items": [{"type": "string"}, {"type": "integer"}]}
    assert not load({"$schema": DRAFTS[2], **pair}).accepts(["a", "b"])
    assert "#/items" in failing({"$schema": DRAFTS[4], **pair})
    old = load({"$schema": DRAFTS[0], "minimum": 1, "exclusiveMinimum": True})
    assert not old.accepts(1) and old.accepts(1.5)


def test_inline_schema_must_be_json():
    message = "#/properties/0/x: the key 1 is not text (put it in quotes)"
    assert failing({"properties": [{"x": {1: {}}}]}) == message
    assert "is not JSON" in failing({"const": object()})
    loop = {"properties": {}}
    loop["properties"]["self"] = loop
    assert "nested deeper" in failing(loop)


GOOD_AND_BAD = {
    "date": ("2024-02-29", "2024-02-30"),
    "time": ("10:00:00Z", "25:00:00Z"),
    "date-time": ("2024-01-01T00:00:00Z", "tomorrow"),
    "duration": ("P1DT2H", "1 day"),
    "email": ("a@example.org", "a.example.org"),
    "idn-email": ("é@example.org", "é"),
    "hostname": ("node-1.example.org", "-node"),
    "idn-hostname": ("é.example.org", "-é"),
    "ipv4": ("10.0.0.1", "10.0.0.256"),
    "ipv6": ("fe80::1", "fe80::g"),
    "uri": ("https://example.org/a?b#c", "/relative"),
    "uri-reference": ("/relative", "\\\\host"),
    "iri": ("https://é.example.org/", "é"),
    "iri-reference": ("é", "\\é"),
    "uri-template": ("https://example.org/{id}", "{"),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000", "123e4567"),
    "json-pointer": ("/a/0", "a"),
    "relative-json-pointer": ("0/a", "/a"),
    "regex": ("^a+$", "a("),
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_every_format_is_checked_in_every_draft(draft):
    properties = {name: {"format": name} for name in FORMATS}
    schema = load({"$schema": draft, "type": "object", "properties": properties})
    assert schema.warnings == ()
    for name in FORMATS:
        good, bad = GOOD_AND_BAD[name]
        assert schema.accepts({name: good}), name
        assert schema.accepts({name: 5}), "a format is for strings"
        assert not schema.accepts({name: bad}), name
        assert schema.explain({name: bad})[0].startswith(f"/{name}: ")


def test_unknown_format_is_a_warning_with_its_place():
    schema = load({"$defs": {"unused": {"items": {"format": "Date"}}}})
    warning = 'format "Date" is unknown and not checked (#/$defs/unused/items)'
    assert schema.warnings == (warning,)
    assert schema.accepts("anything")


def test_repeated_key_in_a_file_is_a_warning(tmp_path):
    (tmp_path / "s.json").write_text('{"type": "string", "type": "integer"}')
    schema = load(Path("s.json"), tmp_path)
    assert schema.warnings == (f"{tmp_path / 's.json'}: repeated key type: the last one holds",)
    assert schema.accepts(1)


@pytest.mark.parametrize(
    "value", [2**70, 10**400, float("nan"), 1e308, {"\ud800": ["\udfff"]}, {"a": (1, 2)}, "", None]
)
def test_odd_values_never_raise(value):
    for spec in (True, False, {"type": "integer"}, {"enum": [1, "a"]}, {"type": "object"}):
        schema = load(spec)
        lines = schema.explain(value)
        assert schema.accepts(value) is not bool(lines)
        "".join(lines).encode()


def test_values_that_no_server_should_send_are_refused_at_once():
    recursive = load({"items": {"$ref": "#"}})
    value = []
    for _ in range(100_000):
        value = [value]
    assert not recursive.accepts(value)
    assert recursive.explain(value) == ["/: nested deeper than 200 levels"]
    text = load({"type": "string"})
    assert not text.accepts([-(10**5000)])
    assert text.explain([-(10**5000)]) == ["/: a number of more than 4300 digits"]
    evil = load({"pattern": "^(?=a)(a+)+$"})
    assert not evil.accepts("a" * 50 + "b")
    assert evil.explain("a" * 50 + "b")


def test_explaining_a_huge_answer_is_quick_and_bounded():
    schema = load({"items": {"properties": {"x": {"type": "string"}}}})
    assert schema.explain([{"x": 1}] * 100_000) == ['/0/x: 1 is not of type "string"']


def test_a_run_needs_only_light_imports():
    code = """
import sys
sys.modules["rfc3987_syntax"] = None  # a grammar that jsonschema loads where it is there
def loaded(*names):
    print(*[name for name in names if name in sys.modules] or ["none"])
import bagent.answers.evaluate
loaded("jsonschema_rs")
import bagent.answers.schema.schema as schema, bagent.answers.messages, pathlib
loaded("jsonschema", "referencing", "pydantic", "urllib.request", "duckdb")
schema.OutputSchema.load({"type": "string"}, base=pathlib.Path()).explain(1)
import bagent.backends.engines.metrics, bagent.backends.registry
import bagent.runs.execute, bagent.runs.session
loaded("jsonschema", "aiohttp", "boto3", "openai")  # plain HTTP needs none of them
try: schema.OutputSchema.load({"type": "s"}, base=pathlib.Path())
except Exception: loaded("jsonschema")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["none", "none", "none", "jsonschema"]


@pytest.mark.parametrize("draft", DRAFTS[2:])
def test_a_reference_to_an_official_metaschema_needs_no_network(draft):
    schema = load({"properties": {"schema": {"$ref": draft.rstrip("#")}}})
    assert schema.accepts({"schema": {"properties": {"a": {"type": "string"}}}})
    assert not schema.accepts({"schema": {"properties": {"a": {"type": 5}}}})


@pytest.mark.parametrize(
    ("spec", "value", "valid"),
    [
        # Multiples are exact decimals, patterns those of ECMA-262; jsonschema judges otherwise.
        ({"multipleOf": 0.1}, 0.3, True),
        ({"pattern": "^a$"}, "a\n", False),
        ({"pattern": r"^\d$"}, "٣", False),
        ({"format": "email"}, "a b@example.org", False),
        ({"format": "regex"}, "(?P<x>a)", False),
    ],
)
def test_where_jsonschema_judges_otherwise_it_does_not_decide(spec, value, valid):
    assert load(spec).accepts(value) is valid
    assert bool(load(spec).explain(value)) is not valid
