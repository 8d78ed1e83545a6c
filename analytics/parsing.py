"""
From lines of text to rows: what is an event and what is not, without a look at any file but by Spark.

Two ways lead there. The quick one is Spark's JSON reader, which cannot do everything: of two whole objects glued into
one line it sees only the first, of an array it makes several rows, and a record separator before a line makes the
line unreadable. The careful one takes lines as text and sees each of them; it costs nearly twice the time, so only
segments that need it go that way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date, timedelta
from typing import TYPE_CHECKING

from analytics.schema import CORRUPT, line_struct
from mediatord.eventlog.events import ENVELOPE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

# What a row is, also the partition of the intermediate Parquet that it goes to.
EVENT, DAMAGED, MISSING, TIME, TYPE = "event", "damaged", "missing", "time", "type"

CAUSES = {
    "torn": "lines of which the beginning or the end is missing: a crash, a full disk",
    "glued": "lines with the beginning of another line in them: a line was torn and writing went on",
    "nul": "lines with zero bytes: a power failure",
    "utf8": "lines that are not UTF-8",
    "separator": "lines that begin with a record separator (0x1E) and are unreadable even without it",
    "not_json": "lines that are no JSON object for any other reason",
    TYPE: "lines with a value of another type than declared, or out of range",
    MISSING: "lines without a field that every line has, or with null there",
    TIME: "lines whose time is not RFC 3339 in UTC with microseconds",
}

LINE = 4096
_SEPARATOR = "\x1e"
_TIME_LENGTH = len("2026-11-20T00:00:00.000000Z")
_OPTIONS = {"columnNameOfCorruptRecord": CORRUPT, "mode": "PERMISSIVE", "allowSingleQuotes": "false"}


def quick(spark: SparkSession, paths: Sequence[str], *, damaged: bool = False) -> DataFrame:
    """
    Columns of :func:`analytics.schema.line_struct` and `stem`. Blank lines are no lines.

    :param damaged: read what can be read, as far as it goes.
    """
    reader = spark.read.schema(line_struct()).options(**_OPTIONS, lineSep="\n", ignoreCorruptFiles=damaged)
    return reader.json(_escaped(paths)).select("*", _stem())


def careful(spark: SparkSession, paths: Sequence[str], *, damaged: bool = False) -> DataFrame:
    """The same, one row for every line that is not blank; record separators do not matter."""
    from pyspark.sql import functions as F

    reader = spark.read.options(lineSep="\n", ignoreCorruptFiles=damaged)
    text = reader.text(_escaped(paths)).select(F.btrim("value", F.lit(f"{_SEPARATOR} \t\r")).alias("line"), _stem())
    parsed = text.where("line <> ''").select(
        "line", "stem", F.from_json("line", line_struct(), _OPTIONS).alias("parsed")
    )
    line = F.col("line")
    whole = line.startswith("{") & line.endswith("}") & ~line.contains('}{"v":') & F.is_valid_utf8(line)
    parts = [F.col("parsed")[name].alias(name) for name in line_struct().names if name != CORRUPT]
    # What is no object at all may come back as null instead of as a damaged row.
    damage = F.when(~whole | F.col("parsed").isNull(), line).otherwise(F.col("parsed")[CORRUPT])
    return parsed.select(*parts, damage.alias(CORRUPT), "stem")


def shaped(frame: DataFrame, batch: date) -> DataFrame:
    """
    The columns of `events`, and `fate`: :data:`EVENT`, or what a line is instead.

    So that one pass makes both, a line that is no event is a row as well, with its text in `reason` if it is
    :data:`DAMAGED`, the text of its time there if that is the fault.

    :param batch: of all rows.
    """
    from pyspark.sql import functions as F

    own = F.lit(batch)
    time = F.when(F.length("ts") == _TIME_LENGTH, F.col("ts").try_cast("timestamp"))
    framed = frame.withColumns({"at": time, "fate": _fate(frame, time)})
    day = F.to_date("at")
    near = day.between(F.lit(batch - timedelta(1)), F.lit(batch + timedelta(1)))
    reason = (
        F.when(F.col("fate") == DAMAGED, F.col(CORRUPT))
        .when(F.col("fate") == TIME, F.col("ts"))
        .otherwise(F.col("reason"))
    )
    columns = {"reason": reason, "ts": F.col("at"), "batch": own, "dt": F.when(near, day).otherwise(own)}
    return framed.withColumns(columns).drop("at", CORRUPT)


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

    return F.substring_index("_metadata.file_name", ".jsonl", 1).alias("stem")


def _escaped(paths: Sequence[str]) -> list[str]:
    """Spark takes paths for patterns."""
    return [re.sub(r"([\\*?\[\]{}])", r"\\\1", path) for path in paths]
