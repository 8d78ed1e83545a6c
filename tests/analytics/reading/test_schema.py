"""The Spark schema and the daemon's declaration of its events are the same thing."""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql.types import StringType, TimestampType

from analytics.schema import (
    CORRUPT_RECORD_COLUMN,
    FREQUENT_EVENTS,
    make_event_columns,
    make_events_struct,
    make_frequent_struct,
    make_line_struct,
)
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
    """What the daemon's JSON Schema allows in a line, the table can hold."""
    types = {column.name: column.type for column in make_event_columns()}
    for line in build_json_schema()["oneOf"]:
        for name, about in line["properties"].items():
            allowed = about.get("type", "string")  # the name of the event is a constant
            assert allowed in JSON_TYPES[types[name]], name


def test_every_column_is_declared() -> None:
    """Beside what ingest adds there is no column that no event has."""
    used = {name for event in EVENTS.values() for name in event.fields}
    assert used == set(FIELDS)
    names = [column.name for column in make_event_columns()]
    assert names == ["dt", "batch", "stem", *ENVELOPE, *FIELDS]
    assert len(set(names)) == len(names)


def test_schemas_of_spark(spark: SparkSession) -> None:
    """A line is parsed with the same columns as are stored, the time as text; damage has a column of its own."""
    stored, parsed = make_events_struct(), make_line_struct()
    assert [field.simpleString() for field in stored.fields[:5]] == [
        "dt:date",
        "batch:date",
        "stem:string",
        "v:int",
        "ts:timestamp",
    ]
    assert parsed.names == [*stored.names[3:], CORRUPT_RECORD_COLUMN]
    assert parsed["ts"].dataType == StringType()
    assert stored["ts"].dataType == TimestampType()
    assert all(parsed[name] == stored[name] for name in parsed.names if name not in ("ts", CORRUPT_RECORD_COLUMN))


def test_fields_of_frequent_events(spark: SparkSession) -> None:
    """Of lines that are read by themselves every field is read that they may have, as of all others."""
    frequent, whole = make_frequent_struct(), make_line_struct()
    for event in FREQUENT_EVENTS:
        assert {*ENVELOPE, *EVENTS[event].fields} <= set(frequent.names)
    assert all(frequent[name] == whole[name] for name in frequent.names)
    assert len(frequent) < len(whole) / 2
