"""
J0: segments into the tables `events`, `quarantine` and `inputs`.

Everything is parsed and written to Parquet as it comes, damaged lines beside events; all counting is done there,
as counts from raw JSON depend on the columns that a query selects. That a file is unreadable, or needs the careful
way of :mod:`analytics.parsing`, is known only then: it is marked, and the pass is repeated. That is rare.

The row of a segment in `inputs` accounts for every line: `lines` is events, `corrupt`, `unfinished` and `doubled`.
What is found about a segment without being a line, a second file that differs say, stands there in `remarks`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from analytics import doubles, parsing
from analytics.files import Files
from analytics.intake import Reading, prepare, rechecked
from analytics.parquet import append
from analytics.schema import events_struct
from analytics.segments import Segment
from analytics.stop import STOP
from analytics.tables import TABLES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_SETTINGS = {
    # Rows go where they belong without being sorted first: a task has a writer for each partition it meets.
    "spark.sql.maxConcurrentOutputFileWriters": "16",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # A task takes many small segments: each one writes a file for every day that it meets.
    "spark.sql.files.openCostInBytes": "131072",
}


@dataclass(frozen=True, slots=True)
class Ingested:
    """
    :param states: segments by state.
    :param lines: in all segments: the sum of the others.
    """

    states: Counter[str]
    lines: int
    events: int
    corrupt: int
    unfinished: int
    doubled: int


def ingest(spark: SparkSession, files: Files, segments: Sequence[Segment], staging: str) -> Ingested:
    """
    Write the rows of these segments to `staging/<table>/dt=.../`, `events` further by `batch=.../`.

    A table without rows gets no directory.
    """
    ingestion = _Ingestion(spark, files, segments, staging)
    with _set(spark, _SETTINGS):
        ingestion.run()
    readings = ingestion.readings
    return Ingested(
        Counter(reading.final_state() for reading in readings),
        sum(reading.lines for reading in readings),
        sum(reading.events for reading in readings),
        sum(reading.corrupt for reading in readings),
        sum(reading.unfinished for reading in readings),
        sum(reading.doubled for reading in readings),
    )


class _Ingestion:
    def __init__(self, spark: SparkSession, files: Files, segments: Sequence[Segment], staging: str) -> None:
        self._spark, self._files, self._staging = spark, files, staging
        self._parsed = f"{staging}/parsed"
        self._marks: DataFrame | None = None
        self.readings = [prepare(files, segment, f"{staging}/growing") for segment in segments]

    def run(self) -> None:
        """Write the three tables."""
        while not self._is_parsed():
            pass
        self._write_events()
        if rows := self._others():
            frame = parsing.quarantined(rows[0]).coalesce(1)
            append(frame, f"{self._staging}/quarantine", "dt")
        inputs = self._spark.createDataFrame([one.row() for one in self.readings], TABLES["inputs"].struct())
        append(inputs.coalesce(1), f"{self._staging}/inputs", "dt")
        for name in ("parsed", "growing"):
            self._files.delete(f"{self._staging}/{name}")

    def _is_parsed(self) -> bool:
        """Parse all; whether nothing has to be read in another way."""
        from py4j.protocol import Py4JJavaError
        from pyspark.errors import PySparkException

        self._files.delete(self._parsed)
        try:
            self._parse()
        except (PySparkException, Py4JJavaError):
            STOP.check()
            again = [rechecked(self._spark, self._files, reading) for reading in self.readings]
            if again == self.readings:
                raise
            self.readings = again
            return False
        self._count()
        doubtful = [reading for reading in self.readings if reading.doubtful]
        for reading in doubtful:
            reading.careful = True
        return not doubtful

    def _parse(self) -> None:
        """Frequent events go to files of their own, which have the columns of those only."""
        narrow: list[DataFrame] = []
        wide: list[DataFrame] = []
        for (careful, partial), readings in self._ways().items():
            paths = [path for reading in readings for path in reading.paths]
            batches = {reading.segment.batch for reading in readings}
            # Not one query for each: Spark would compile them all.
            batch = batches.pop() if len(batches) == 1 else None
            ways = ((wide, parsing.careful),) if careful else ((narrow, parsing.frequent), (wide, parsing.others))
            for frames, read in ways:
                frames.append(parsing.shaped(read(self._spark, paths, damaged=partial), batch))
        for frames in filter(None, (narrow, wide)):
            append(reduce(_union, frames), self._parsed, "fate", "dt", "batch")

    def _ways(self) -> Mapping[tuple[bool, bool], list[Reading]]:
        """What there is to read by whether carefully, and whether damaged."""
        ways: defaultdict[tuple[bool, bool], list[Reading]] = defaultdict(list)
        for reading in self.readings:
            if reading.paths:
                ways[reading.careful, reading.partial].append(reading)
        return ways

    def _count(self) -> None:
        """What each segment holds."""
        from pyspark.sql import functions as F

        for reading in self.readings:
            reading.events = reading.doubled = reading.corrupt = 0
        by_stem = {reading.segment.stem: reading for reading in self.readings}
        for rows in self._others():
            separators = F.col("reason").startswith("\x1e") & (F.col("fate") == parsing.DAMAGED)
            counts = rows.groupBy("stem").agg(
                F.count(F.lit(1)).alias("n"), F.count_if(separators).alias("separators")
            )
            for row in counts.toLocalIterator():
                by_stem[row.stem].corrupt = row.n
                by_stem[row.stem].separators |= row.separators > 0
        if self._marks is not None:
            self._marks.unpersist()
            self._marks = None
        for events in self._events():
            self._marks = doubles.marks(events).persist()
            self._count_events(self._marks, by_stem)

    @staticmethod
    def _count_events(marks: DataFrame, by_stem: Mapping[str, Reading]) -> None:
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
        """Each number of a start once."""
        if self._marks is None:
            return
        blocks = doubles.doubled(self._marks)
        if blocks.isEmpty():
            self._files.move(f"{self._parsed}/fate={parsing.EVENT}", f"{self._staging}/events")
        else:
            self._write_once(blocks)
        self._marks.unpersist()

    def _write_once(self, blocks: DataFrame) -> None:
        from pyspark.sql import functions as F

        for events in self._events():
            rows = doubles.told_apart(events, blocks)
            again = {row.stem: row.n for row in rows.where("again").groupBy("stem").agg(_n()).toLocalIterator()}
            for reading in self.readings:
                reading.doubled = again.get(reading.segment.stem, 0)
                reading.events -= reading.doubled
            once = rows.where(~F.col("again")).drop("again")
            frame = doubles.untouched(events, blocks).unionByName(once)
            append(frame, f"{self._staging}/events", "dt", "batch")

    def _events(self) -> Iterator[DataFrame]:
        """The events that were parsed, if there are any."""
        path = f"{self._parsed}/fate={parsing.EVENT}"
        if self._files.exists(path):
            yield self._spark.read.schema(events_struct()).parquet(path)

    def _others(self) -> list[DataFrame]:
        """What was parsed and is no event, if there is anything."""
        names = self._files.names(self._parsed) if self._files.exists(self._parsed) else ()
        paths = [f"{self._parsed}/{name}" for name in names if name not in ("", f"fate={parsing.EVENT}")]
        if not paths:
            return []
        struct = events_struct().add("fate", "string")
        return [self._spark.read.schema(struct).option("basePath", self._parsed).parquet(*paths)]


def _n() -> Column:
    from pyspark.sql import functions as F

    return F.count(F.lit(1)).alias("n")


def _union(one: DataFrame, other: DataFrame) -> DataFrame:
    return one.unionByName(other)


@contextmanager
def _set(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Settings of the session that hold for a while."""
    before = {name: str(spark.conf.get(name)) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)
