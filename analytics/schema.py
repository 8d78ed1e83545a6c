"""The table `events`, derived from the daemon's own declaration of its log events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analytics.tables import DT, Column, Table
from mediatord.observability.event_schema import ENVELOPE, EVENTS, FIELDS, FieldType

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

# What the JSON reader puts the text of a damaged line into.
CORRUPT = "_corrupt_record"

# Nearly all lines are of these. Only their own fields are read of them: Spark takes its time for every column it is
# asked for, be there a value or not.
FREQUENT = ("req.done", "msg.accept", "msg.push", "msg.ack")

_SQL_TYPES: dict[FieldType, str] = {"string": "string", "integer": "bigint", "number": "double", "boolean": "boolean"}
_NARROWER = {"v": "int", "epoch": "int", "ts": "timestamp"}

_ADDED = (
    DT,
    Column("batch", "date", "day in the name of the segment, UTC"),
    Column("stem", "string", "segment, without suffix"),
)


def event_columns() -> tuple[Column, ...]:
    """`dt`, `batch`, `stem`, then the envelope, then every field that an event may have."""
    declared = {**ENVELOPE, **FIELDS}
    return (*_ADDED, *(Column(name, _sql_type(name, kind), about) for name, (kind, about) in declared.items()))


def events_table() -> Table:
    """`events` as the other tables are declared; partitioned by `dt`, the day of the event, and `batch`."""
    return Table("events", "one row for each line of the log", event_columns(), key=(), private=True)


def events_struct() -> StructType:
    """Schema of the Parquet of `events`, partition columns included."""
    return events_table().struct()


def line_struct() -> StructType:
    """Schema to parse a line with: the time still as text, and last :data:`CORRUPT`."""
    from pyspark.sql.types import StringType, StructField, StructType

    fields = events_struct().fields[len(_ADDED) :]
    texts = {"ts"}
    return StructType(
        [StructField(field.name, StringType()) if field.name in texts else field for field in fields]
        + [StructField(CORRUPT, StringType())]
    )


def frequent_struct() -> StructType:
    """What of :func:`line_struct` a line of the :data:`FREQUENT` events may have."""
    from pyspark.sql.types import StructType

    names = {*ENVELOPE, *(name for event in FREQUENT for name in EVENTS[event].fields), CORRUPT}
    return StructType([field for field in line_struct().fields if field.name in names])


def known_events() -> list[str]:
    """Names of all declared events."""
    return list(EVENTS)


def _sql_type(name: str, kind: FieldType) -> str:
    return _NARROWER.get(name) or _SQL_TYPES[kind]
