"""The Spark schema agrees with the daemon's event schema."""

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


def test_line_schema_has_stored_columns_and_corrupt_record(spark: SparkSession) -> None:
    """The time is parsed as text."""
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


def test_frequent_schema_has_all_fields_of_frequent_events(spark: SparkSession) -> None:
    frequent, full = make_frequent_struct(), make_line_struct()
    for event in FREQUENT_EVENTS:
        assert {*ENVELOPE, *EVENTS[event].fields} <= set(frequent.names)
    assert all(frequent[name] == full[name] for name in frequent.names)
    assert len(frequent) < len(full) / 2
