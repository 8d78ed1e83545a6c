"""Frames as :data:`analytics.tables.TABLES` declares them, before they are written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analytics.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

_WIDER = {
    "bigint": {"tinyint", "smallint", "int"},
    "int": {"tinyint", "smallint"},
    "double": {"tinyint", "smallint", "int", "float"},
}


class TableMistake(TypeError):
    """What a job made is not as declared: a mistake in the program."""


def declared(frame: DataFrame, table: Table, job: str) -> DataFrame:
    """
    The declared columns in their order, narrow numbers widened.

    :raise TableMistake: anything else is not as declared.
    """
    from pyspark.sql import functions as F

    struct = table.struct()
    there = {field.name: field.dataType for field in frame.schema.fields}
    for what, names in (("no", set(struct.names) - set(there)), ("undeclared", set(there) - set(struct.names))):
        if names:
            raise TableMistake(f"{job}: {table.name}: {what} column {', '.join(sorted(names))}")
    for field in struct.fields:
        if not _fits(there[field.name], field.dataType):
            found, wanted = there[field.name].simpleString(), field.dataType.simpleString()
            raise TableMistake(f"{job}: {table.name}: column {field.name} is {found}, declared as {wanted}")
    return frame.select(*(F.col(field.name).cast(field.dataType) for field in struct.fields))


def _fits(found: DataType, wanted: DataType) -> bool:
    name = found.simpleString()
    return name in {wanted.simpleString(), "void"} or name in _WIDER.get(wanted.simpleString(), ())


def arranged(frame: DataFrame, table: Table) -> DataFrame:
    """
    In the order of the key, so that the same rows make the same files.

    Tables of figures are small: one file a day. Those with a row for each message or recipient may be large: as many
    files as it takes, but no more.
    """
    from pyspark.sql import functions as F

    frame = frame.hint("rebalance", F.col("dt")) if table.private else frame.coalesce(1)
    return frame.sortWithinPartitions(*table.key)
