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
        ({"type": "integer"}, "BIGINT"),
        ({"type": "integer", "maximum": 2**63 - 1, "minimum": -(2**63)}, "BIGINT"),
        ({"type": "integer", "maximum": 2**63}, "HUGEINT"),
        ({"type": "integer", "maximum": 2**200}, "DOUBLE"),
        ({"type": "number"}, "DOUBLE"),
        ({"type": "boolean"}, "BOOLEAN"),
        ({"type": "object"}, "JSON"),
        ({"type": ["string", "null"]}, "VARCHAR"),
        ({"type": ["integer", "number"]}, "DOUBLE"),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, "DOUBLE"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "JSON"),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "BIGINT"),
        ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "JSON"),
        ({"enum": ["a", None]}, "VARCHAR"),
        ({"enum": [1, 2]}, "BIGINT"),
        ({"enum": [1, 2.5]}, "DOUBLE"),
        ({"enum": [1, 2**63]}, "HUGEINT"),
        ({"enum": [True, False]}, "BOOLEAN"),
        ({"enum": [True, 1]}, "JSON"),
        ({"const": "x"}, "VARCHAR"),
        ({"type": "array", "items": {"type": "string"}}, "VARCHAR[]"),
        ({"type": ["array", "null"], "items": {"type": ["integer", "null"]}}, "BIGINT[]"),
        (FINDING, STRUCT),
        ({"type": "array", "items": FINDING}, f"{STRUCT}[]"),
        ({"type": ["object", "null"], "properties": {"a": {}, "A": {}}}, "JSON"),
        ({"type": "array", "items": {"type": "array", "items": {"type": "string"}}}, "JSON"),
        ({"type": "array", "prefixItems": [{}], "items": {"type": "string"}}, "JSON"),
        ({}, "JSON"),
        (True, "JSON"),
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
    made = columns({"properties": {"id": {}, "Answer": {}, "stage_2": {}, "stage": {}}})
    assert [name for name, _ in made] == ["id_2", "Answer_2", "stage_2", "stage_3"]


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ({"enum": [1, 2]}, "BIGINT"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, "JSON"),
        ({"anyOf": [{"type": "object", "properties": {"a": {}}}, {"type": "string"}]}, "JSON"),
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
    objects = [
        {"properties": {"kind": {"const": t}, "n": {"type": t}}} for t in ("number", "string")
    ]
    spec = {"oneOf": [*({"type": "object", **part} for part in objects), {"type": "null"}]}
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
