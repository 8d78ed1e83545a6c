"""
Loads segments into the tables `events`, `quarantine` and `inputs`.

Everything is parsed and written to Parquet first, damaged lines beside events, and counted there, because counts from
raw JSON depend on the columns that a query selects. Only then is it known that a file is unreadable or needs slow
parsing: it is flagged, and the pass is repeated. That is rare.

Fast parsing is Spark's JSON reader for lines of frequent events (:func:`read_frequent_events`); other lines
(:func:`read_other_lines`) are parsed from text. The reader has limits: of two objects on one line it sees only the
first, of an array it makes several rows, and a record separator before a line makes the line unreadable. Slow parsing
(:func:`read_all_lines`) sees every line as text and costs three times as much, so only segments that need it use it.

The row of a segment in `inputs` accounts for every line: `lines` is events, `corrupt`, `unfinished` and `doubled`.
Findings that are not lines, such as a second file that differs, are in `remarks`.

Each start of a node numbers its lines, so (node, boot, seq) identifies a line. Finding duplicates among all events
would shuffle all of them. Instead a bitmask marks 64 numbers at a time, and only blocks with more events than bits
are compared line by line.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from analytics.errors import STOP_HANDLER
from analytics.reading.files import FileSystem, append_parquet
from analytics.reading.segments import Segment, SegmentReading, prepare_reading, recheck_reading
from analytics.schema import (
    CORRUPT_RECORD_COLUMN,
    FREQUENT_EVENTS,
    TABLES,
    make_events_struct,
    make_frequent_struct,
    make_line_struct,
)
from mediatord.observability.event_schema import ENVELOPE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_BLOCK_KEY = ("batch", "node", "boot", "block")


def make_block_column() -> Column:
    """Number of the 64-number block of a `seq`."""
    from pyspark.sql import functions as F

    return F.shiftright("seq", 6)


def aggregate_seq_mask() -> Column:
    """Aggregate: bitmask of the `seq` of a block."""
    from pyspark.sql import functions as F

    one = F.lit(1).cast("bigint")
    return F.bit_or(F.call_function("shiftleft", one, F.col("seq").bitwiseAND(63).cast("int")))


def summarize_blocks(events: DataFrame) -> DataFrame:
    """Count, bitmask and log.close of each `batch`, `stem`, `node`, `boot` and `block`."""
    from pyspark.sql import functions as F

    close = F.col("event") == "log.close"
    return events.groupBy("batch", "stem", "node", "boot", make_block_column().alias("block")).agg(
        F.count(F.lit(1)).alias("n"),
        aggregate_seq_mask().alias("mask"),
        F.min("seq").alias("seq_first"),
        F.max("seq").alias("seq_last"),
        F.max(F.when(close, F.col("lines"))).alias("lines_said"),
        F.max(close).alias("closed"),
    )


def find_duplicate_blocks(marks: DataFrame) -> DataFrame:
    """Blocks (`batch`, `node`, `boot`, `block`) in which a number occurs more than once."""
    from pyspark.sql import functions as F

    blocks = marks.groupBy(*_BLOCK_KEY).agg(F.sum("n").alias("n"), F.bit_or("mask").alias("mask"))
    return blocks.where(F.col("n") > F.bit_count("mask")).select(*_BLOCK_KEY)


def flag_duplicates(events: DataFrame, blocks: DataFrame) -> DataFrame:
    """Events of these blocks, with `again`: whether the number occurs in a lower stem or earlier."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    content = [name for name in events.columns if name not in ("batch", "stem", "ts")]
    order = Window.partitionBy("batch", "node", "boot", "seq").orderBy("stem", "ts", F.xxhash64(*content))
    rows = _add_block(events).join(F.broadcast(blocks), list(_BLOCK_KEY), "semi").drop("block")
    return rows.withColumn("again", F.row_number().over(order) > 1)


def select_other_events(events: DataFrame, blocks: DataFrame) -> DataFrame:
    """Events of all other blocks."""
    from pyspark.sql import functions as F

    return _add_block(events).join(F.broadcast(blocks), list(_BLOCK_KEY), "anti").drop("block")


def _add_block(events: DataFrame) -> DataFrame:
    return events.withColumn("block", make_block_column())


# Kinds of rows, also partitions of the intermediate Parquet.
EVENT_ROW, DAMAGED_ROW, MISSING_FIELD, INVALID_TIME, INVALID_TYPE = "event", "damaged", "missing", "time", "type"

QUARANTINE_CAUSES = {
    "torn": "lines without their beginning or end: a crash or a full disk",
    "glued": "lines that contain the beginning of another one",
    "nul": "lines with zero bytes: a power failure",
    "utf8": "lines that are not UTF-8",
    "separator": "lines with a record separator (0x1E) that are invalid without it too",
    "not_json": "lines that are not JSON objects for another reason",
    INVALID_TYPE: "lines with a value of another type than declared, or out of range",
    MISSING_FIELD: "lines without a field that every line has",
    INVALID_TIME: "lines whose time is not RFC 3339 in UTC with microseconds",
}

MAX_QUARANTINED_CHARS = 4096
_RECORD_SEPARATOR = "\x1e"
_TIME_LENGTH = len("2026-11-20T00:00:00.000000Z")
_EVENT_KEY = '"event":'
_JSON_OPTIONS = {
    "columnNameOfCorruptRecord": CORRUPT_RECORD_COLUMN,
    "mode": "PERMISSIVE",
    "allowSingleQuotes": "false",
}


def read_frequent_events(spark: SparkSession, paths: Sequence[str], *, damaged: bool = False) -> DataFrame:
    """
    Read lines of frequent events: columns of :func:`analytics.schema.make_frequent_struct` and `stem`.

    :param damaged: read as far as possible.
    """
    from pyspark.sql import functions as F

    reader = spark.read.schema(make_frequent_struct()).options(
        **_JSON_OPTIONS, lineSep="\n", ignoreCorruptFiles=damaged
    )
    text, event = F.col(CORRUPT_RECORD_COLUMN), F.col("event")
    own = F.when(text.isNull(), event.isin(*FREQUENT_EVENTS)).otherwise(_names_frequent_event(text))
    return reader.json(_escape_paths(paths)).where(own).select("*", _make_stem_column())


def read_other_lines(spark: SparkSession, paths: Sequence[str], *, damaged: bool = False) -> DataFrame:
    """Read all other lines except blank ones: columns of :func:`analytics.schema.make_line_struct` and `stem`."""
    from pyspark.sql import functions as F

    rows = _parse_lines(
        _read_text_lines(spark, paths, damaged).where(~_names_frequent_event(F.col("value"))), " \t\r"
    )
    damage = F.col(CORRUPT_RECORD_COLUMN)
    # The fast reader does not notice damage to a field that no frequent event has.
    narrow = F.from_json(damage, make_frequent_struct(), _JSON_OPTIONS)
    understood = F.when(damage.isNull(), F.col("event")).when(narrow[CORRUPT_RECORD_COLUMN].isNull(), narrow["event"])
    return rows.where(~F.coalesce(understood.isin(*FREQUENT_EVENTS), F.lit(False)))


def read_all_lines(spark: SparkSession, paths: Sequence[str], *, damaged: bool = False) -> DataFrame:
    """Read all lines except blank ones, ignoring record separators; columns as :func:`read_other_lines`."""
    return _parse_lines(_read_text_lines(spark, paths, damaged), f"{_RECORD_SEPARATOR} \t\r")


def _read_text_lines(spark: SparkSession, paths: Sequence[str], damaged: bool) -> DataFrame:
    reader = spark.read.options(lineSep="\n", ignoreCorruptFiles=damaged)
    return reader.text(_escape_paths(paths)).select("value", _make_stem_column())


def _parse_lines(lines: DataFrame, around: str) -> DataFrame:
    """:param around: characters stripped from both ends of a line."""
    from pyspark.sql import functions as F

    whole = lines.select("stem", F.btrim("value", F.lit(around)).alias("line")).where("line <> ''")
    # An array of one element: selecting several fields would otherwise parse the line once for each.
    parsed = F.inline(F.array(F.from_json("line", make_line_struct(), _JSON_OPTIONS)))
    line = F.col("line")
    is_whole = line.startswith("{") & line.endswith("}") & ~line.contains('}{"v":') & F.is_valid_utf8(line)
    damage = F.when(is_whole, F.col(CORRUPT_RECORD_COLUMN)).otherwise(line)
    return whole.select("line", "stem", parsed).withColumn(CORRUPT_RECORD_COLUMN, damage).drop("line")


def _names_frequent_event(line: Column) -> Column:
    """Whether a line names exactly one event, and a frequent one; never null."""
    from pyspark.sql import functions as F

    before, after = (F.substring_index(line, _EVENT_KEY, count) for count in (1, -1))
    is_only = F.octet_length(before) + len(_EVENT_KEY) + F.octet_length(after) == F.octet_length(line)
    names = (after.startswith(f'"{name}"') for name in FREQUENT_EVENTS)
    return is_only & reduce(or_, names)


def shape_rows(frame: DataFrame, batch: date | None) -> DataFrame:
    """
    Add the columns of `events`, and `fate`: :data:`EVENT_ROW`, or the reason why a line is not an event.

    One pass makes both, so a line that is not an event is a row as well: `reason` then has its text if it is
    :data:`DAMAGED_ROW`, or the text of its time if that is invalid.

    :param batch: of all rows; None: taken from the names of their segments.
    """
    from pyspark.sql import functions as F

    own = _get_batch_from_stem() if batch is None else F.lit(batch)
    time = _parse_time(F.col("ts"))
    framed = frame.withColumns({"at": time, "fate": _classify_line(frame, time)})
    day = F.to_date("at")
    near = F.abs(F.date_diff(day, own)) <= 1
    reason = (
        F.when(F.col("fate") == DAMAGED_ROW, F.col(CORRUPT_RECORD_COLUMN))
        .when(F.col("fate") == INVALID_TIME, F.col("ts"))
        .otherwise(F.col("reason") if "reason" in frame.columns else None)
    )
    columns = {"reason": reason, "ts": F.col("at"), "batch": own, "dt": F.when(near, day).otherwise(own)}
    return framed.withColumns(columns).drop("at", CORRUPT_RECORD_COLUMN)


def _get_batch_from_stem() -> Column:
    """Day in the name of a segment."""
    from pyspark.sql import functions as F

    begin = len("events-")
    parts = ((begin + 1, 4), (begin + 5, 2), (begin + 7, 2))
    return F.make_date(*(F.substring("stem", start, size).cast("int") for start, size in parts))


def _parse_time(text: Column) -> Column:
    """Null if invalid. The Z is cut off, because Spark would convert time zones."""
    from pyspark.sql import functions as F

    is_utc = (F.length(text) == _TIME_LENGTH) & text.endswith("Z") & (F.substring(text, 21, 6).try_cast("int") >= 0)
    return F.when(is_utc, F.substring(text, 1, _TIME_LENGTH - 1).try_cast("timestamp"))


def make_quarantine_rows(rows: DataFrame) -> DataFrame:
    """
    `dt`, `stem`, `cause` and `line` of rows of :func:`shape_rows` that are not events.

    Lines that are JSON but invalid are rendered from their parsed fields.
    """
    from pyspark.sql import functions as F

    names = [name for name in make_line_struct().names if name != CORRUPT_RECORD_COLUMN]
    understood = F.to_json(
        F.struct(
            *(
                F.when(F.col("fate") == INVALID_TIME, F.col("reason")).alias("ts") if name == "ts" else F.col(name)
                for name in names
            )
        )
    )
    damaged = F.col("fate") == DAMAGED_ROW
    text = F.when(damaged, F.col("reason")).otherwise(understood)
    cause = F.when(damaged, _classify_damage(F.col("reason"))).otherwise(F.col("fate"))
    line = F.make_valid_utf8(F.substring(text, 1, MAX_QUARANTINED_CHARS))
    return rows.select(F.col("batch").alias("dt"), "stem", cause.alias("cause"), line.alias("line"))


def _classify_line(frame: DataFrame, time: Column) -> Column:
    """Nulls in the envelope are missing fields; NaN is not a number of JSON."""
    from pyspark.sql import functions as F

    missing = F.lit(False)
    for name in ENVELOPE:
        missing = missing | F.col(name).isNull()
    no_number = F.lit(False)
    for name, kind in frame.dtypes:
        if kind == "double":
            no_number = no_number | F.coalesce(F.isnan(name), F.lit(False))
    return (
        F.when(F.col(CORRUPT_RECORD_COLUMN).isNotNull(), DAMAGED_ROW)
        .when(missing, MISSING_FIELD)
        .when(time.isNull(), INVALID_TIME)
        .when(no_number, INVALID_TYPE)
        .otherwise(EVENT_ROW)
    )


def _classify_damage(line: Column) -> Column:
    """Classify a line that the parser rejected."""
    from pyspark.sql import functions as F

    return (
        F.when(line.contains("\0"), "nul")
        .when(~F.is_valid_utf8(line) | line.contains("\N{REPLACEMENT CHARACTER}"), "utf8")
        .when(line.startswith(_RECORD_SEPARATOR), "separator")
        .when(line.rlike(r'(?s)^.+\{"v":'), "glued")
        .when(line.startswith("{") != F.rtrim(line).endswith("}"), "torn")
        .when(line.startswith('{"') & F.json_object_keys(line).isNotNull(), INVALID_TYPE)
        .otherwise("not_json")
    )


def _make_stem_column() -> Column:
    from pyspark.sql import functions as F

    # The column _metadata has the name too, but copies every row.
    name = F.substring_index(F.input_file_name(), "/", -1)
    return F.substring_index(name, ".jsonl", 1).alias("stem")


def _escape_paths(paths: Sequence[str]) -> list[str]:
    """Spark interprets paths as glob patterns."""
    return [re.sub(r"([\\*?\[\]{}])", r"\\\1", path) for path in paths]


_WRITE_CONF = {
    # Write rows unsorted: a task keeps a writer for each partition it meets.
    "spark.sql.maxConcurrentOutputFileWriters": "16",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # A task reads many small segments and writes a file for each day in them.
    "spark.sql.files.openCostInBytes": "131072",
}


@dataclass(frozen=True, slots=True)
class IngestResult:
    """
    :param states: segments by state.
    :param lines: of all segments; the sum of the other counts.
    """

    states: Counter[str]
    lines: int
    events: int
    corrupt: int
    unfinished: int
    doubled: int


def ingest_segments(
    spark: SparkSession, files: FileSystem, segments: Sequence[Segment], staging: str
) -> IngestResult:
    """
    Write the rows of these segments to `staging/<table>/dt=.../`, `events` further by `batch=.../`.

    A table without rows gets no directory.
    """
    ingestion = _Ingestion(spark, files, segments, staging)
    with _temporary_conf(spark, _WRITE_CONF):
        ingestion.run()
    readings = ingestion.readings
    return IngestResult(
        Counter(reading.get_final_state() for reading in readings),
        sum(reading.lines for reading in readings),
        sum(reading.events for reading in readings),
        sum(reading.corrupt for reading in readings),
        sum(reading.unfinished for reading in readings),
        sum(reading.doubled for reading in readings),
    )


class _Ingestion:
    def __init__(self, spark: SparkSession, files: FileSystem, segments: Sequence[Segment], staging: str) -> None:
        self._spark, self._files, self._staging = spark, files, staging
        self._parsed = f"{staging}/parsed"
        self._marks: DataFrame | None = None
        self.readings = [prepare_reading(files, segment, f"{staging}/growing") for segment in segments]

    def run(self) -> None:
        """Write the three tables."""
        while not self._try_parsing():
            pass
        self._write_events()
        if rows := self._read_non_events():
            frame = make_quarantine_rows(rows[0]).coalesce(1)
            append_parquet(frame, f"{self._staging}/quarantine", "dt")
        inputs = self._spark.createDataFrame([one.row() for one in self.readings], TABLES["inputs"].struct())
        append_parquet(inputs.coalesce(1), f"{self._staging}/inputs", "dt")
        for name in ("parsed", "growing"):
            self._files.delete(f"{self._staging}/{name}")

    def _try_parsing(self) -> bool:
        """Parse all segments; return whether none has to be parsed again in another way."""
        from py4j.protocol import Py4JJavaError
        from pyspark.errors import PySparkException

        self._files.delete(self._parsed)
        try:
            self._parse()
        except (PySparkException, Py4JJavaError):
            STOP_HANDLER.check()
            again = [recheck_reading(self._spark, self._files, reading) for reading in self.readings]
            if again == self.readings:
                raise
            self.readings = again
            return False
        self._count()
        doubtful = [reading for reading in self.readings if reading.needs_slow_pass]
        for reading in doubtful:
            reading.needs_slow_parsing = True
        return not doubtful

    def _parse(self) -> None:
        """Write frequent events to separate files with only their columns."""
        narrow: list[DataFrame] = []
        wide: list[DataFrame] = []
        for (careful, partial), readings in self._group_readings().items():
            paths = [path for reading in readings for path in reading.paths]
            batches = {reading.segment.batch for reading in readings}
            # One query for all: Spark would compile each.
            batch = batches.pop() if len(batches) == 1 else None
            groups = (
                ((wide, read_all_lines),) if careful else ((narrow, read_frequent_events), (wide, read_other_lines))
            )
            for frames, read in groups:
                frames.append(shape_rows(read(self._spark, paths, damaged=partial), batch))
        for frames in filter(None, (narrow, wide)):
            append_parquet(reduce(_union_by_name, frames), self._parsed, "fate", "dt", "batch")

    def _group_readings(self) -> Mapping[tuple[bool, bool], list[SegmentReading]]:
        """Group readings by whether they need slow parsing and are damaged."""
        groups: defaultdict[tuple[bool, bool], list[SegmentReading]] = defaultdict(list)
        for reading in self.readings:
            if reading.paths:
                groups[reading.needs_slow_parsing, reading.partial].append(reading)
        return groups

    def _count(self) -> None:
        """Count the rows of each segment."""
        from pyspark.sql import functions as F

        for reading in self.readings:
            reading.events = reading.doubled = reading.corrupt = 0
        by_stem = {reading.segment.stem: reading for reading in self.readings}
        for rows in self._read_non_events():
            separators = F.col("reason").startswith("\x1e") & (F.col("fate") == DAMAGED_ROW)
            counts = rows.groupBy("stem").agg(
                F.count(F.lit(1)).alias("n"), F.count_if(separators).alias("separators")
            )
            for row in counts.toLocalIterator():
                by_stem[row.stem].corrupt = row.n
                by_stem[row.stem].separators |= row.separators > 0
        if self._marks is not None:
            self._marks.unpersist()
            self._marks = None
        for events in self._read_events():
            self._marks = summarize_blocks(events).persist()
            self._count_events(self._marks, by_stem)

    @staticmethod
    def _count_events(marks: DataFrame, by_stem: Mapping[str, SegmentReading]) -> None:
        from pyspark.sql import functions as F

        counts = marks.groupBy("stem").agg(
            F.sum("n").alias("n"),
            F.min("seq_first").alias("seq_first"),
            F.max("seq_last").alias("seq_last"),
            F.max("lines_said").alias("lines_said"),
            F.max("closed").alias("closed"),
        )
        for row in counts.toLocalIterator():
            reading = by_stem[row.stem]
            reading.events = row.n
            reading.seq_first, reading.seq_last = row.seq_first, row.seq_last
            reading.lines_said, reading.closed = row.lines_said, row.closed

    def _write_events(self) -> None:
        """Write events without duplicates."""
        if self._marks is None:
            return
        blocks = find_duplicate_blocks(self._marks)
        if blocks.isEmpty():
            self._files.move(f"{self._parsed}/fate={EVENT_ROW}", f"{self._staging}/events")
        else:
            self._write_without_duplicates(blocks)
        self._marks.unpersist()

    def _write_without_duplicates(self, blocks: DataFrame) -> None:
        from pyspark.sql import functions as F

        for events in self._read_events():
            rows = flag_duplicates(events, blocks)
            again = {
                row.stem: row.n for row in rows.where("again").groupBy("stem").agg(_count_rows()).toLocalIterator()
            }
            for reading in self.readings:
                reading.doubled = again.get(reading.segment.stem, 0)
                reading.events -= reading.doubled
            once = rows.where(~F.col("again")).drop("again")
            frame = select_other_events(events, blocks).unionByName(once)
            append_parquet(frame, f"{self._staging}/events", "dt", "batch")

    def _read_events(self) -> Iterator[DataFrame]:
        """Parsed events, if there are any."""
        path = f"{self._parsed}/fate={EVENT_ROW}"
        if self._files.exists(path):
            yield self._spark.read.schema(make_events_struct()).parquet(path)

    def _read_non_events(self) -> list[DataFrame]:
        """Parsed rows that are not events, if there are any."""
        names = self._files.list_names(self._parsed) if self._files.exists(self._parsed) else ()
        paths = [f"{self._parsed}/{name}" for name in names if name not in ("", f"fate={EVENT_ROW}")]
        if not paths:
            return []
        struct = make_events_struct().add("fate", "string")
        return [self._spark.read.schema(struct).option("basePath", self._parsed).parquet(*paths)]


def _count_rows() -> Column:
    from pyspark.sql import functions as F

    return F.count(F.lit(1)).alias("n")


def _union_by_name(one: DataFrame, other: DataFrame) -> DataFrame:
    return one.unionByName(other)


@contextmanager
def _temporary_conf(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Set session settings for the block."""
    before = {name: str(spark.conf.get(name)) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)
