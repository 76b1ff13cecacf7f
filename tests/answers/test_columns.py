from pathlib import Path

import duckdb
import pytest

from bagent.answers.schema.schema import OutputSchema


def columns(spec):
    schema = OutputSchema.load(spec, base=Path())
    assert len(schema.columns) == len(schema.column_properties)
    return schema.columns


FINDING = {
    "type": "object",
    "properties": {
        "line": {"type": "integer"},
        'a"b': {"type": "array", "items": {"type": "string"}},
        "more": {},
    },
}
STRUCT = 'STRUCT("line" BIGINT, "a""b" VARCHAR[], "more" VARCHAR)'


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ({"type": "string"}, "VARCHAR"),
        ({"type": "string", "format": "date-time"}, "VARCHAR"),
        ({"type": "integer"}, "BIGINT"),
        ({"type": "integer", "maximum": 2**63 - 1, "minimum": -(2**63)}, "BIGINT"),
        ({"type": "integer", "maximum": 2**63}, "HUGEINT"),
        ({"type": "integer", "exclusiveMinimum": -(2**64)}, "HUGEINT"),
        ({"type": "integer", "maximum": 2**200}, "DOUBLE"),
        ({"type": "number"}, "DOUBLE"),
        ({"type": "boolean"}, "BOOLEAN"),
        ({"type": "object"}, "JSON"),
        ({"type": "null"}, "JSON"),
        ({"type": ["string", "null"]}, "VARCHAR"),
        ({"type": ["integer", "number"]}, "DOUBLE"),
        ({"type": ["integer", "string"]}, "JSON"),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, "DOUBLE"),
        ({"oneOf": [{"type": "string"}, {"const": None}]}, "VARCHAR"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "JSON"),
        ({"anyOf": [{"type": "string"}, {}]}, "JSON"),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "BIGINT"),
        ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "JSON"),
        ({"enum": ["a", None]}, "VARCHAR"),
        ({"enum": [1, 2]}, "BIGINT"),
        ({"enum": [1, 2.5]}, "DOUBLE"),
        ({"enum": [1, 2**63]}, "HUGEINT"),
        ({"enum": [True, False]}, "BOOLEAN"),
        ({"enum": [True, 1]}, "JSON"),
        ({"enum": ["a", 1]}, "JSON"),
        ({"enum": [["a"]]}, "JSON"),
        ({"const": "x"}, "VARCHAR"),
        ({"type": "array", "items": {"type": "string"}}, "VARCHAR[]"),
        ({"type": ["array", "null"], "items": {"type": ["integer", "null"]}}, "BIGINT[]"),
        ({"type": "array", "items": {"$ref": "#/$defs/s"}, "$defs": {}}, "VARCHAR[]"),
        (FINDING, 'STRUCT("line" BIGINT, "a""b" VARCHAR[], "more" VARCHAR)'),
        ({"type": "array", "items": FINDING}, f"{STRUCT}[]"),
        ({"type": "object", "properties": {"x": FINDING}}, f'STRUCT("x" {STRUCT})'),
        ({"type": ["object", "null"], "properties": {"a": {}, "A": {}}}, "JSON"),
        ({"type": ["object", "string"], "properties": {"a": {}}}, "JSON"),
        ({"type": "array", "items": {"type": "null"}}, "JSON"),
        ({"type": "array", "items": {"type": "array", "items": {"type": "string"}}}, "JSON"),
        ({"type": "array", "prefixItems": [{}], "items": {"type": "string"}}, "JSON"),
        ({}, "JSON"),
        (True, "JSON"),
        ({"not": {"type": "string"}}, "JSON"),
        ({"$ref": "#/$defs/s"}, "VARCHAR"),
        ({"anyOf": [{"$ref": "#/$defs/s"}, {"type": "null"}]}, "VARCHAR"),
        ({"$ref": "#/$defs/self"}, "JSON"),
    ],
)
def test_type_of_a_property(spec, kind):
    loop = {"anyOf": [{"$ref": "#/$defs/self"}, {"$ref": "#/$defs/self"}]}
    document = {"properties": {"x": spec}, "$defs": {"s": {"type": "string"}, "self": loop}}
    assert columns(document) == [("x", kind)]


def test_names_of_the_tables_own_columns_get_a_suffix():
    assert columns({"properties": {"id": {}, "Answer": {}, "stage_2": {}, "stage": {}}}) == [
        ("id_2", "JSON"),
        ("Answer_2", "JSON"),
        ("stage_2", "JSON"),
        ("stage_3", "JSON"),
    ]


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ({"enum": [1, 2]}, "BIGINT"),
        ({"type": "array", "items": {"type": "string"}}, "VARCHAR[]"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, "JSON"),
        ({"anyOf": [{"type": "object", "properties": {"a": {}}}, {"type": "string"}]}, "JSON"),
        (True, "JSON"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "boolean"}}}, "BOOLEAN"),
    ],
)
def test_schema_that_names_no_properties_has_one_column(spec, kind):
    assert columns(spec) == [("value", kind)]
    assert OutputSchema.load(spec, base=Path()).column_properties == [None]


def test_properties_of_referred_combined_and_recursive_schemas_count():
    kids = {"type": "array", "items": {"$ref": "#/$defs/base"}}
    properties = {"a": {"type": "integer"}, "kids": kids}
    spec = {
        "$ref": "#/$defs/base",
        "allOf": [{"properties": {"b": {"type": "string"}}}],
        "properties": {"c": {"type": "boolean"}},
        "$defs": {
            "base": {
                "type": ["object", "null"],
                "properties": properties,
                "anyOf": [{"$ref": "#/$defs/base"}, {"type": "object"}],
            }
        },
    }
    assert sorted(columns(spec)) == [
        ("a", "BIGINT"),
        ("b", "VARCHAR"),
        ("c", "BOOLEAN"),
        ("kids", "JSON"),
    ]


def test_union_of_objects_has_the_columns_of_all():
    spec = {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": "a"}, "n": {"type": "integer"}}},
            {"type": "object", "properties": {"kind": {"const": "b"}, "n": {"type": "number"}}},
            {"type": "object", "properties": {"kind": {"const": "c"}, "n": {"type": "string"}}},
            {"type": "null"},
        ]
    }
    assert columns(spec) == [("kind", "VARCHAR"), ("n", "JSON")]


def test_duckdb_takes_every_column():
    names = ["a b", 'quo"te', "é", "", "select", "x\0y", "Ä", "ä", "1", "ID"]
    kinds = [{"type": "integer", "maximum": 2**64}, {"items": {"type": "number"}, "type": "array"}]
    spec = {"properties": {name: kinds[i % 2] for i, name in enumerate(names)}}
    made = columns(spec)
    body = ", ".join('"' + name.replace('"', '""') + f'" {kind}' for name, kind in made)
    with duckdb.connect() as connection:
        connection.execute(f"create table t (id JSON, stage VARCHAR, answer INTEGER, {body})")
        rows = connection.execute("describe t").fetchall()
    assert [(row[0], row[1]) for row in rows[3:]] == made
