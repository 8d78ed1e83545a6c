"""The schema of events agrees with the daemon's event schema."""

from __future__ import annotations

from analytics.reading.lines import LINE_SCHEMA
from analytics.schema import make_event_columns
from mediatord.observability.event_schema import ENVELOPE, EVENTS, FIELDS, build_json_schema

JSON_TYPES = {
    "string": {"string"},
    "timestamp": {"string"},
    "int": {"integer"},
    "bigint": {"integer"},
    "double": {"number"},
    "boolean": {"boolean"},
}


def test_every_declared_field_has_a_column_of_its_type() -> None:
    types = {column.name: column.type for column in make_event_columns()}
    for line in build_json_schema()["oneOf"]:
        for name, field_schema in line["properties"].items():
            allowed = field_schema.get("type", "string")  # the name of the event is a constant
            assert allowed in JSON_TYPES[types[name]], name


def test_every_column_belongs_to_an_event() -> None:
    """Except those that ingest adds."""
    used = {name for event in EVENTS.values() for name in event.fields}
    assert used == set(FIELDS)
    names = [column.name for column in make_event_columns()]
    assert names == ["dt", "batch", "stem", *ENVELOPE, *FIELDS]
    assert len(set(names)) == len(names)


def test_arrow_types_of_lines_are_those_of_columns() -> None:
    """Times are in UTC."""
    names = {"int32": "int", "int64": "bigint", "double": "double", "string": "string", "bool": "boolean"}
    names["timestamp[us, tz=UTC]"] = "timestamp"
    types = {column.name: column.type for column in make_event_columns()[3:]}
    assert {column.name: names[str(column.type)] for column in LINE_SCHEMA} == types
