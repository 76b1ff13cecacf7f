import asyncio
import json
import socket
from pathlib import Path

import jsonschema_rs
import pytest

from bagent.answers.schema.dialects import walk
from bagent.answers.schema.schema import OutputSchema
from bagent.errors import SchemaError
from support.routes_server import routes_server


@pytest.fixture
def folder(tmp_path):
    """A folder of schema files; call it with a dict of them to fill it."""

    def write(files):
        for name, value in files.items():
            path = tmp_path / "schemas" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(value if isinstance(value, str) else json.dumps(value))
        return tmp_path / "schemas"

    return write


def load(base, name="root.json"):
    schema = OutputSchema.load(Path(name), base=base)
    for _, part in walk(schema.document):
        if "$ref" in part:
            assert part["$ref"].startswith("#"), "what is sent must need nothing else"
    jsonschema_rs.validator_for(json.loads(schema.text), offline=True)
    return schema


def failing(base):
    with pytest.raises(SchemaError) as caught:
        OutputSchema.load(Path("root.json"), base=base)
    return str(caught.value)


STRING = {"type": "string"}


def test_files_that_refer_to_each_other_and_back(folder):
    base = folder(
        {
            "root.json": {
                "properties": {"node": {"$ref": "parts/node.json"}, "name": {"$ref": "#/$defs/s"}},
                "$defs": {"s": STRING},
            },
            "parts/node.json": {
                "$id": "https://example.org/node",
                "properties": {
                    "next": {"$ref": "#"},
                    "name": {"$ref": "../root.json#/$defs/s"},
                    "label": {"$ref": "../names.json#label"},
                },
            },
            "names.json": {"$defs": {"x": {"$anchor": "label", "maxLength": 2}}},
        }
    )
    schema = load(base)
    assert schema.accepts({"node": {"next": {"next": {"name": "n", "label": "ab"}}}})
    assert not schema.accepts({"node": {"next": {"next": {"name": 1}}}})
    assert not schema.accepts({"node": {"next": {"label": "abc"}}})
    assert set(schema.document["$defs"]) == {"s", "node", "x"}


def test_names_of_bundled_parts_never_clash(folder):
    base = folder(
        {
            "root.json": {
                "items": {"anyOf": [{"$ref": "a.json#/$defs/p"}, {"$ref": "b.json#/$defs/p"}]},
                "$defs": {"p": {"const": 3}},
                "contains": {"$ref": "#/$defs/p"},
            },
            "a.json": {"$defs": {"p": {"const": 1}}},
            "b.json": {"$defs": {"p": {"const": 2}}},
        }
    )
    schema = load(base)
    assert schema.accepts([1, 2, 3]) is False, "3 is in neither file"
    assert schema.document["$defs"] == {
        "p": {"const": 3},
        "p_2": {"const": 1},
        "p_3": {"const": 2},
    }


def test_definitions_of_older_drafts_go_under_their_name(folder):
    draft = {"$schema": "http://json-schema.org/draft-07/schema#"}
    base = folder(
        {
            "root.json": {**draft, "properties": {"a": {"$ref": "c.json#/definitions/p"}}},
            "c.json": {**draft, "definitions": {"p": STRING}},
            "new.json": {"$ref": "c.json#/definitions/p"},
        }
    )
    schema = load(base)
    assert schema.document["definitions"] == {"p": STRING}
    assert not schema.accepts({"a": 1})
    mixed = load(base, "new.json")
    assert len(mixed.warnings) == 1 and "2020-12" in mixed.warnings[0]
    assert not mixed.accepts(1)


def test_percent_encoded_and_odd_pointers(folder):
    base = folder(
        {
            "root.json": {
                "properties": {
                    "a": {"$ref": "#/$defs/x%20y"},
                    "b": {"$ref": "#/$defs/p~1q"},
                    "c": {"$ref": "my%20file.json#/$defs/%C3%A9"},
                    "d": {"$ref": "#/components/schemas/D"},
                    "e": {"$ref": "#/allOf/0"},
                },
                "allOf": [{"minProperties": 1}],
                "$defs": {"x y": STRING, "p/q": STRING},
                "components": {"schemas": {"D": {"$ref": "#/components/schemas/E"}, "E": STRING}},
            },
            "my file.json": {"$defs": {"é": STRING}},
        }
    )
    schema = load(base)
    for name in "abcd":
        assert not schema.accepts({name: 1})
        assert schema.accepts({name: "x"})
    assert not schema.accepts({"e": {}})


def test_embedded_ids_and_anchors_become_pointers(folder):
    line = {"$anchor": "street", "type": "string"}
    address = {
        "$id": "address",
        "required": ["street"],
        "properties": {"street": {"$ref": "#/$defs/line"}, "id": {"type": "integer"}},
        "$defs": {"line": line},
    }
    root = {
        "$id": "https://example.org/root",
        "properties": {
            "a": {"$ref": "https://example.org/address"},
            "b": {"$ref": "address#street"},
            "c": {"$ref": "#here"},
            "d": {"$ref": "https://example.org/root#/$defs/here"},
        },
        "$defs": {"address": address, "here": {"$anchor": "here", "type": "string"}},
    }
    schema = load(folder({"root.json": root}))
    assert schema.accepts({"a": {"street": "x", "id": 1}, "b": "x", "c": "x", "d": "x"})
    wrong = [{}, {"street": 1}, {"street": "x", "id": "y"}]
    for bad in (*({"a": value} for value in wrong), {"b": 1}, {"c": 1}, {"d": 1}):
        assert not schema.accepts(bad), bad
    refs = {part["$ref"] for _, part in walk(schema.document) if "$ref" in part}
    assert refs == {"#/$defs/address", "#/$defs/address/$defs/line", "#/$defs/here"}


def test_ids_of_draft_4_and_anchors_of_draft_7(folder):
    properties = {"id": {"$ref": "other"}, "x": {"$ref": "#y"}}
    four = {"o": {"id": "other", "type": "integer"}, "y": {"id": "#y", "type": "string"}}
    seven = {"o": {"$id": "other", "type": "integer"}, "y": {"$id": "#y", "type": "string"}}
    for number, definitions in ((4, four), (7, seven)):
        draft = f"http://json-schema.org/draft-0{number}/schema#"
        spec = {"$schema": draft, "properties": properties, "definitions": definitions}
        schema = load(folder({"root.json": spec}))
        assert schema.accepts({"id": 1, "x": "s"}), draft
        assert not schema.accepts({"id": "1"}), draft
        assert not schema.accepts({"x": 1}), draft


def test_true_dynamic_references_keep_their_meaning():
    spec = {
        "$id": "https://example.org/strict-tree",
        "$dynamicAnchor": "node",
        "$ref": "tree",
        "unevaluatedProperties": False,
        "$defs": {
            "tree": {
                "$id": "tree",
                "$dynamicAnchor": "node",
                "type": "object",
                "properties": {"data": True, "kids": {"items": {"$dynamicRef": "#node"}}},
            }
        },
    }
    schema = OutputSchema.load(spec, base=Path())
    assert schema.document == spec
    assert schema.accepts({"kids": [{"data": 1}]})
    assert not schema.accepts({"kids": [{"daat": 1}]})


@pytest.mark.parametrize(
    "spec",
    [
        {"$dynamicAnchor": "node", "additionalProperties": {"$dynamicRef": "#node"}},
        {
            "$schema": "https://json-schema.org/draft/2019-09/schema",
            "additionalProperties": {"$recursiveRef": "#"},
        },
    ],
)
def test_a_single_dynamic_anchor_is_a_plain_reference(spec):
    schema = OutputSchema.load({"type": "object", **spec}, base=Path())
    assert schema.document["additionalProperties"] == {"$ref": "#"}
    assert schema.accepts({"a": {"b": {}}}) and not schema.accepts({"a": {"b": 1}})


def test_a_dynamic_reference_beside_a_reference_is_kept():
    parts = {"a": {"minimum": 1}, "b": {"$dynamicAnchor": "b", "maximum": 5}}
    spec = {"$ref": "#/$defs/a", "$dynamicRef": "#b", "$defs": parts}
    schema = OutputSchema.load(spec, base=Path())
    assert [schema.accepts(n) for n in (0, 3, 6)] == [False, True, False]


def test_dynamic_anchors_in_several_files_are_refused(folder):
    part = {"$dynamicAnchor": "n", "items": {"$dynamicRef": "#n"}}
    base = folder({"root.json": {**part, "contains": {"$ref": "b.json"}}, "b.json": part})
    assert "one file" in failing(base)


def test_text_that_looks_like_a_reference_in_data_is_data():
    spec = {
        "enum": [{"$ref": "http://127.0.0.1:9/x"}, {"$id": "x"}],
        "default": {"$ref": "#/nope"},
        "properties": {"$ref": {"type": "string"}, "$id": {"type": "string"}},
        "examples": [{"$ref": "../x"}],
    }
    assert OutputSchema.load(spec, base=Path()).document == spec


@pytest.mark.parametrize(
    "spec",
    [
        {"$ref": "#/$defs/nope"},
        {"$ref": "#nope"},
        {"$ref": "#/items/0", "items": {}},
        {"$ref": "#/required", "required": ["a"]},
        {"$defs": {"unused": {"$ref": "#/$defs/nope"}}, "type": "string"},
        {"anyOf": [STRING, {"properties": {"a": {"not": {"$ref": "#/$defs/nope"}}}}]},
        {"$dynamicRef": "#nope"},
        {"$ref": "missing.json"},
        {"$ref": "empty.json#/$defs/p"},
        {"$ref": "sub"},
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"allOf": [{"$ref": "http://[broken"}]},
    ],
)
def test_reference_that_leads_nowhere_is_an_error_at_load(folder, spec):
    base = folder({"root.json": spec, "empty.json": {}, "sub/x.json": {}})
    message = failing(base)
    assert message.startswith(f"{base / 'root.json'}: ") and "\n" not in message


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "strin"}, ": not a JSON Schema: #/type"),
        ("{\n,", ":2:1: not JSON"),
        ({"items": {"$ref": "#/$defs/nope"}}, ": #/items/$ref: '#/$defs/nope' leads nowhere"),
    ],
)
def test_errors_in_a_referenced_file_name_that_file(folder, part, message):
    base = folder(
        {"root.json": {"properties": {"a": {"$ref": "parts/b.json"}}}, "parts/b.json": part}
    )
    assert failing(base).startswith(f"{base / 'parts/b.json'}{message}")


OUTSIDE = """
../secret.json sub/../../secret.json ..%2Fsecret.json %2e%2e/secret.json C:\\secret.json ..
/etc/hostname file:///etc/hostname ftp://127.0.0.1/x data:application/json,{} root.json?x
x\x00.json link.json away/secret.json
"""


@pytest.mark.parametrize("reference", OUTSIDE.split())
def test_nothing_outside_the_folder_is_read(folder, tmp_path, reference):
    base = folder({"root.json": {"properties": {"a": {"$ref": reference}}}})
    (tmp_path / "secret.json").write_text("not json: this would be told if it were read")
    (base / "link.json").symlink_to(tmp_path / "secret.json")
    (base / "away").symlink_to(tmp_path)
    message = failing(base)
    assert "#/properties/a/$ref" in message
    assert "not JSON" not in message and "not there" not in message


def test_links_inside_the_folder_and_of_the_user_are_followed(folder, tmp_path):
    base = folder({"real.json": STRING})
    (base / "link.json").symlink_to(base / "real.json")
    (tmp_path / "elsewhere.json").write_text('{"$ref": "link.json"}')
    (base / "root.json").symlink_to(tmp_path / "elsewhere.json")
    assert not load(base).accepts(1)


@pytest.mark.parametrize("name", ["loop.json", "x" * 300 + ".json", "root.json/x", "locked"])
def test_unreadable_files_are_one_line_errors(folder, name):
    base = folder({"root.json": {"$ref": name}})
    (base / "loop.json").symlink_to(base / "loop.json")
    (base / "locked").mkdir()
    assert "#/$ref" in failing(base)


@pytest.mark.parametrize("key", ["$ref", "$dynamicRef", "$schema", "$id"])
def test_the_network_is_never_asked(folder, key):
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/s.json"
    with listener:
        for spec in ({key: url}, {"properties": {"a": {key: url, "$ref": "x.json"}}}):
            base = folder({"root.json": spec, "x.json": {"type": "string"}})
            try:
                schema = OutputSchema.load(Path("root.json"), base=base)
                schema.accepts({"a": 1})
                schema.explain({"a": 1})
            except SchemaError:
                pass
            with pytest.raises(BlockingIOError):
                listener.accept()


async def test_remote_references_are_fetched_only_where_allowed(folder):
    routes = {
        "GET /v1/a.json": {"properties": {"b": {"$ref": "b.json#/$defs/x"}}},
        "GET /v1/b.json": {"$defs": {"x": STRING}},
    }

    def fetch(url):
        return OutputSchema.load({"$ref": url}, base=Path(), allow_remote=True)

    async with routes_server(routes) as (address, requests):
        spec = {"$ref": f"{address}/a.json"}
        assert "network" in await asyncio.to_thread(failing, folder({"root.json": spec}))
        assert requests == []
        schema = await asyncio.to_thread(fetch, spec["$ref"])
        with pytest.raises(SchemaError, match="404"):
            await asyncio.to_thread(fetch, f"{address}/no.json")
    assert requests == ["GET /v1/a.json", "GET /v1/b.json", "GET /v1/no.json"]
    assert schema.document["$defs"] == {
        "a": {"properties": {"b": {"$ref": "#/$defs/x"}}},
        "x": STRING,
    }
    assert not schema.accepts({"b": 1})
