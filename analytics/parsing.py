"""
From lines of text to rows: what is an event and what is not, without a look at any file but by Spark.

Two ways lead there. The quick one is Spark's JSON reader for lines of the frequent events (:func:`frequent`); the few
other lines (:func:`others`) are taken as text. The reader cannot do everything: of two whole objects glued into one
line it sees only the first, of an array it makes several rows, and a record separator before a line makes the line
unreadable. The careful way (:func:`careful`) takes all lines as text and sees each of them; it costs three times as
much, so only segments that need it go that way.

A line that is JSON belongs to the way of its event, another one to that of the only thing in its text that looks like
the name of an event.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from analytics.schema import CORRUPT, FREQUENT, frequent_struct, line_struct
from mediatord.observability.event_schema import ENVELOPE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

# What a row is, also the partition of the intermediate Parquet that it goes to.
EVENT, DAMAGED, MISSING, TIME, TYPE = "event", "damaged", "missing", "time", "type"

CAUSES = {
    "torn": "lines without their beginning or end: a crash or a full disk",
    "glued": "lines that contain the beginning of another one",
    "nul": "lines with zero bytes: a power failure",
    "utf8": "lines that are not UTF-8",
    "separator": "lines with a record separator (0x1E), unreadable without it too",
    "not_json": "lines that are not JSON objects for another reason",
    TYPE: "lines with a value of another type than declared, or out of range",
    MISSING: "lines without a field that every line has",
    TIME: "lines whose time is not RFC 3339 in UTC with microseconds",
}

LINE = 4096
_SEPARATOR = "\x1e"
_TIME_LENGTH = len("2026-11-20T00:00:00.000000Z")
_EVENT = '"event":'
_OPTIONS = {"columnNameOfCorruptRecord": CORRUPT, "mode": "PERMISSIVE", "allowSingleQuotes": "false"}


def frequent(spark: SparkSession, paths: Sequence[str], *, damaged: bool = False) -> DataFrame:
    """
    Lines of the frequent events: columns of :func:`analytics.schema.frequent_struct` and `stem`.

    :param damaged: read what can be read, as far as it goes.
    """
    from pyspark.sql import functions as F

    reader = spark.read.schema(frequent_struct()).options(**_OPTIONS, lineSep="\n", ignoreCorruptFiles=damaged)
    text, event = F.col(CORRUPT), F.col("event")
    own = F.when(text.isNull(), event.isin(*FREQUENT)).otherwise(_is_frequent(text))
    return reader.json(_escaped(paths)).where(own).select("*", _stem())


def others(spark: SparkSession, paths: Sequence[str], *, damaged: bool = False) -> DataFrame:
    """All other lines but blank ones: columns of :func:`analytics.schema.line_struct` and `stem`."""
    from pyspark.sql import functions as F

    rows = _by_line(_lines(spark, paths, damaged).where(~_is_frequent(F.col("value"))), " \t\r")
    damage = F.col(CORRUPT)
    # Of damage to a field that no frequent event has, the reader knows nothing.
    narrow = F.from_json(damage, frequent_struct(), _OPTIONS)
    understood = F.when(damage.isNull(), F.col("event")).when(narrow[CORRUPT].isNull(), narrow["event"])
    return rows.where(~F.coalesce(understood.isin(*FREQUENT), F.lit(False)))


def careful(spark: SparkSession, paths: Sequence[str], *, damaged: bool = False) -> DataFrame:
    """All lines but blank ones; columns as :func:`others`. Record separators do not matter."""
    return _by_line(_lines(spark, paths, damaged), f"{_SEPARATOR} \t\r")


def _lines(spark: SparkSession, paths: Sequence[str], damaged: bool) -> DataFrame:
    reader = spark.read.options(lineSep="\n", ignoreCorruptFiles=damaged)
    return reader.text(_escaped(paths)).select("value", _stem())


def _by_line(lines: DataFrame, around: str) -> DataFrame:
    """:param around: characters that do not matter before and after a line."""
    from pyspark.sql import functions as F

    whole = lines.select("stem", F.btrim("value", F.lit(around)).alias("line")).where("line <> ''")
    # An array of one: what reads several of its fields would parse the line for each.
    parsed = F.inline(F.array(F.from_json("line", line_struct(), _OPTIONS)))
    line = F.col("line")
    is_whole = line.startswith("{") & line.endswith("}") & ~line.contains('}{"v":') & F.is_valid_utf8(line)
    damage = F.when(is_whole, F.col(CORRUPT)).otherwise(line)
    return whole.select("line", "stem", parsed).withColumn(CORRUPT, damage).drop("line")


def _is_frequent(line: Column) -> Column:
    """Whether the only event that a line names is a frequent one; never null."""
    from pyspark.sql import functions as F

    before, after = (F.substring_index(line, _EVENT, count) for count in (1, -1))
    is_only = F.octet_length(before) + len(_EVENT) + F.octet_length(after) == F.octet_length(line)
    names = (after.startswith(f'"{name}"') for name in FREQUENT)
    return is_only & reduce(or_, names)


def shaped(frame: DataFrame, batch: date | None) -> DataFrame:
    """
    The columns of `events` that lines may have, and `fate`: :data:`EVENT`, or what a line is instead.

    So that one pass makes both, a line that is no event is a row as well, with its text in `reason` if it is
    :data:`DAMAGED`, the text of its time there if that is the fault.

    :param batch: of all rows; None: what the names of their segments say.
    """
    from pyspark.sql import functions as F

    own = _begun() if batch is None else F.lit(batch)
    time = _time(F.col("ts"))
    framed = frame.withColumns({"at": time, "fate": _fate(frame, time)})
    day = F.to_date("at")
    near = F.abs(F.date_diff(day, own)) <= 1
    reason = (
        F.when(F.col("fate") == DAMAGED, F.col(CORRUPT))
        .when(F.col("fate") == TIME, F.col("ts"))
        .otherwise(F.col("reason") if "reason" in frame.columns else None)
    )
    columns = {"reason": reason, "ts": F.col("at"), "batch": own, "dt": F.when(near, day).otherwise(own)}
    return framed.withColumns(columns).drop("at", CORRUPT)


def _begun() -> Column:
    """The day in the name of a segment."""
    from pyspark.sql import functions as F

    begin = len("events-")
    parts = ((begin + 1, 4), (begin + 5, 2), (begin + 7, 2))
    return F.make_date(*(F.substring("stem", start, size).cast("int") for start, size in parts))


def _time(text: Column) -> Column:
    """Null if it is not as it should be. Spark is told nothing of the Z: it would take it for one zone of many."""
    from pyspark.sql import functions as F

    is_utc = (F.length(text) == _TIME_LENGTH) & text.endswith("Z") & (F.substring(text, 21, 6).try_cast("int") >= 0)
    return F.when(is_utc, F.substring(text, 1, _TIME_LENGTH - 1).try_cast("timestamp"))


def quarantined(rows: DataFrame) -> DataFrame:
    """
    `dt`, `stem`, `cause` and `line` of rows of :func:`shaped` that are no events.

    Of lines that are JSON, but lack something, what was understood is shown.
    """
    from pyspark.sql import functions as F

    names = [name for name in line_struct().names if name != CORRUPT]
    understood = F.to_json(
        F.struct(
            *(
                F.when(F.col("fate") == TIME, F.col("reason")).alias("ts") if name == "ts" else F.col(name)
                for name in names
            )
        )
    )
    damaged = F.col("fate") == DAMAGED
    text = F.when(damaged, F.col("reason")).otherwise(understood)
    cause = F.when(damaged, _cause(F.col("reason"))).otherwise(F.col("fate"))
    line = F.make_valid_utf8(F.substring(text, 1, LINE))
    return rows.select(F.col("batch").alias("dt"), "stem", cause.alias("cause"), line.alias("line"))


def _fate(frame: DataFrame, time: Column) -> Column:
    """Nulls of the envelope are missing fields; not a number is none."""
    from pyspark.sql import functions as F

    missing = F.lit(False)
    for name in ENVELOPE:
        missing = missing | F.col(name).isNull()
    no_number = F.lit(False)
    for name, kind in frame.dtypes:
        if kind == "double":
            no_number = no_number | F.coalesce(F.isnan(name), F.lit(False))
    return (
        F.when(F.col(CORRUPT).isNotNull(), DAMAGED)
        .when(missing, MISSING)
        .when(time.isNull(), TIME)
        .when(no_number, TYPE)
        .otherwise(EVENT)
    )


def _cause(line: Column) -> Column:
    """Of a line that the parser did not take."""
    from pyspark.sql import functions as F

    return (
        F.when(line.contains("\0"), "nul")
        .when(~F.is_valid_utf8(line) | line.contains("\N{REPLACEMENT CHARACTER}"), "utf8")
        .when(line.startswith(_SEPARATOR), "separator")
        .when(line.rlike(r'(?s)^.+\{"v":'), "glued")
        .when(line.startswith("{") != F.rtrim(line).endswith("}"), "torn")
        .when(line.startswith('{"') & F.json_object_keys(line).isNotNull(), TYPE)
        .otherwise("not_json")
    )


def _stem() -> Column:
    from pyspark.sql import functions as F

    # The column _metadata has it too, and costs a copy of every row.
    name = F.substring_index(F.input_file_name(), "/", -1)
    return F.substring_index(name, ".jsonl", 1).alias("stem")


def _escaped(paths: Sequence[str]) -> list[str]:
    """Spark takes paths for patterns."""
    return [re.sub(r"([\\*?\[\]{}])", r"\\\1", path) for path in paths]
