"""The tables in the directory of results: published ones, and those that a run stages until it publishes them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any

from analytics import journal
from analytics.declared import TableMistake, arranged, declared
from analytics.files import Files
from analytics.job import Span
from analytics.journal import STAGING, Move
from analytics.parquet import append
from analytics.schema import events_table
from analytics.tables import TABLES, Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

PUBLISHED = "tables"
# Has a row for every day that was computed.
COMPUTED = "ledger_daily"
# What ingest makes: a batch of segments is replaced as a whole.
BATCHED = ("events", "quarantine", "inputs")
# What a row of `inputs` says about the file; the other columns say what was read of it.
_OF_FILE = ("path", "bytes", "modified", "packed", "state", "remarks")
TABLES_AND_EVENTS: dict[str, Table] = {**TABLES, "events": events_table()}


class Warehouse:
    """
    Reads published tables, overlaid by what this run has staged; stages; publishes.

    A table that was never written, or not for these days, is empty and has its declared schema.

    :param out: directory of results; holds `tables/<name>/dt=<day>/`.
    :param run_id: names the staging directory; needed to stage and to publish only.
    """

    def __init__(self, spark: SparkSession, files: Files, out: str, run_id: str = "") -> None:
        self._spark = spark
        self._files = files
        self._out = out
        self._run_id = run_id
        self._staged: dict[str, Span] = {}
        self._batches: frozenset[date] = frozenset()
        self._names: dict[str, Sequence[str]] = {}

    @property
    def staging(self) -> str:
        """Where ingest writes `<table>/dt=<day>/`, and what else is to be published later."""
        return f"{self._out}/{self._new()}"

    def days(self, table: str) -> list[date]:
        """Days of which a table is published, in order."""
        return _values(self._names_in(_old(table)), "dt")

    def event_days(self, batches: Iterable[date], staged: bool = False) -> set[date]:
        """Days that have events from any of these batches."""
        return {day for days in self.days_by_batch(batches, staged).values() for day in days}

    def days_by_batch(self, batches: Iterable[date], staged: bool = False) -> dict[date, list[date]]:
        """The same for each batch. Events are at most a day from their batch."""
        base = self._new("events") if staged else _old("events")
        found: dict[date, list[date]] = {batch: [] for batch in batches}
        near = {batch + timedelta(n) for batch in found for n in (-1, 0, 1)}
        for day in near.intersection(_values(self._names_in(base), "dt")):
            for batch in found.keys() & _values(self._names_in(f"{base}/dt={day}"), "batch"):
                found[batch].append(day)
        return found

    def has_events(self, day: date) -> bool:
        """Whether there are any, staged or staying."""
        only = Span(day, day)
        return bool(self._fresh("events", only) or self._kept("events", only))

    def event_bytes(self, batches: Iterable[date]) -> int:
        """Bytes of the published events of these batches."""
        partitions = [path for batch in batches for path in self._partitions("events", batch)]
        return sum(file.size for path in partitions for file in self._files.list(f"{self._out}/{path}"))

    def read(self, name: str, span: Span) -> DataFrame:
        """The rows of a span, columns as declared; what this run has staged instead of what is published."""
        from pyspark.sql import functions as F

        struct = TABLES_AND_EVENTS[name].struct()
        frame = None
        for base, partitions in ((_old(name), self._kept(name, span)), (self._new(name), self._fresh(name, span))):
            if partitions:
                # The filter says nothing new; it lets Spark and its plans know.
                part = self._parquet(name, base, partitions)
                part = part.where(F.col("dt").between(F.lit(span.first), F.lit(span.last)))
                frame = part if frame is None else frame.unionAll(part)
        return self._nothing(struct) if frame is None else frame

    def inputs(self, stems: Iterable[str]) -> list[dict[str, Any]]:
        """Rows of staged `inputs` about these segments."""
        from pyspark.sql import functions as F

        frame = self.read("inputs", Span(min(self._batches), max(self._batches)))
        frame = frame.where(F.col("stem").isin(*stems)).orderBy("dt", "stem")
        return [row.asDict() for row in frame.toLocalIterator()]

    def stage(self, name: str, frame: DataFrame, span: Span, job: str = "") -> int:
        """
        Write what a job made of a table for all days of a span; what is published of these days will be gone.

        :return: how many rows.
        :raise TableMistake: columns, types or days that were not to be.
        """
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        table = TABLES[name]
        rows = Observation()
        frame = arranged(declared(frame, table, job), table).observe(rows, F.count(F.lit(1)).alias("n"))
        self._append(frame, name)
        found = _values(self._names_in(self._new(name)), "dt")
        if outside := [str(day) for day in found if day not in span]:
            days = f"{span.first} to {span.last}"
            raise TableMistake(f"{job}: {name}: column dt has {', '.join(outside)}, not of {days}")
        self._staged[name] = span
        return int(rows.get.get("n", 0))

    def staged_batches(self, batches: Iterable[date]) -> None:
        """Ingest has written these batches, all rows of them: what is published of them will be gone."""
        self._batches = frozenset(batches)

    def keep(self, batch: date, stems: Sequence[str], looks: Sequence[Mapping[str, Any]] = ()) -> None:
        """
        Carry over into staging what was read of these segments of a batch before, but for lines that are there: they
        count as doubled.

        :param looks: rows of `inputs`; what they say about the files of their segments is staged instead.
        """
        again = self._keep_events(batch, stems)
        for frame in self._read_of("quarantine", batch, stems):
            self._append(frame, "quarantine")
        for frame in self._read_of("inputs", batch, stems):
            self._append(self._shown(frame, looks, again), "inputs")

    def publish(self, manifest_path: str, manifest: bytes, further: Iterable[str]) -> None:
        """
        Replace what is published by what was staged, all of it or nothing.

        :param further: other directories to be replaced, each by the one of this name in staging.
        """
        moves = [*self._table_moves(), *self._batch_moves(), *((path, self._new(path)) for path in further)]
        journal.commit(self._files, self._out, self._counted(moves), manifest_path, manifest)
        self._names.clear()
        self._staged.clear()
        self._batches = frozenset()

    def discard(self) -> None:
        """Drop what was staged, unless it was decided to publish it."""
        if not journal.stands(self._files, self._out):
            self._files.delete(f"{self._out}/{STAGING}")

    def _new(self, *parts: str) -> str:
        """Where something is staged; all paths from here on are relative to the directory of results."""
        return "/".join((STAGING, self._run_id, *parts))

    def _parquet(self, name: str, base: str, partitions: Sequence[str]) -> DataFrame:
        struct = TABLES_AND_EVENTS[name].struct()
        reader = self._spark.read.schema(struct).option("basePath", f"{self._out}/{base}")
        return reader.parquet(*(f"{self._out}/{path}" for path in partitions)).select(struct.names)

    def _nothing(self, struct: StructType) -> DataFrame:
        """No rows, so that Spark knows: what is joined with them costs nothing."""
        from pyspark.sql import functions as F

        columns = [F.lit(None).cast(field.dataType).alias(field.name) for field in struct.fields]
        return self._spark.range(1).select(columns).where("false")

    def _append(self, frame: DataFrame, name: str) -> None:
        columns = ("dt", "batch") if name == "events" else ("dt",)
        append(frame, f"{self._out}/{self._new(name)}", *columns)

    def _read_of(self, name: str, batch: date, stems: Sequence[str]) -> Iterator[DataFrame]:
        """What is published of these segments, if there is anything of the batch."""
        from pyspark.sql import functions as F

        if partitions := self._partitions(name, batch):
            yield self._parquet(name, _old(name), partitions).where(F.col("stem").isin(*stems))

    def _keep_events(self, batch: date, stems: Sequence[str]) -> dict[str, int]:
        """:return: by segment, how many lines are not kept as they are staged already."""
        again: dict[str, int] = {}
        days = sorted(self.days_by_batch([batch], staged=True)[batch])
        base, line = self._new("events"), ["node", "boot", "seq"]
        for events in self._read_of("events", batch, stems):
            kept = events
            if days:
                staged = self._parquet("events", base, [f"{base}/dt={day}/batch={batch}" for day in days]).select(
                    line
                )
                counts = events.join(staged, line, "left_semi").groupBy("stem").count()
                again = {row["stem"]: row["count"] for row in counts.toLocalIterator()}
                kept = events.join(staged, line, "left_anti")
            self._append(kept, "events")
        return again

    def _shown(self, inputs: DataFrame, looks: Sequence[Mapping[str, Any]], again: Mapping[str, int]) -> DataFrame:
        """These rows with so many more doubled lines, and what is said about files."""
        from pyspark.sql import functions as F
        from pyspark.sql.types import StructType

        struct = TABLES["inputs"].struct()
        names = ("stem", *_OF_FILE)
        of_file = self._spark.createDataFrame(
            [tuple(row[name] for name in names) for row in looks], StructType([struct[name] for name in names])
        )
        counts = self._spark.createDataFrame(list(again.items()), "stem string, again bigint")
        frame = inputs.join(F.broadcast(of_file).alias("now"), "stem", "left")
        frame = frame.join(F.broadcast(counts), "stem", "left")
        columns = {name: F.coalesce(f"now.{name}", inputs[name]) for name in _OF_FILE}
        columns["doubled"] = inputs["doubled"] + F.coalesce("again", F.lit(0))
        return frame.select(*(columns.get(name, inputs[name]).alias(name) for name in struct.names)).coalesce(1)

    def _kept(self, name: str, span: Span) -> list[str]:
        """Published partitions of a span that stay."""
        gone = self._replaced(name)
        days = {day: f"{_old(name)}/dt={day}" for day in self.days(name) if day in span}
        if name != "events":
            return [path for day, path in days.items() if day not in gone]
        return [
            f"{path}/batch={batch}"
            for path in days.values()
            for batch in _values(self._names_in(path), "batch")
            if batch not in gone
        ]

    def _fresh(self, name: str, span: Span) -> list[str]:
        """Staged partitions of a span."""
        if not self._replaced(name):
            return []
        return [
            f"{self._new(name)}/dt={day}" for day in _values(self._names_in(self._new(name)), "dt") if day in span
        ]

    def _replaced(self, name: str) -> frozenset[date]:
        """Days of a table that are staged, with rows or without."""
        if name in BATCHED:
            return self._batches
        return frozenset(self._staged[name].days) if name in self._staged else frozenset()

    def _partitions(self, name: str, batch: date) -> list[str]:
        """Published partitions that hold a batch."""
        if name == "events":
            return [f"{_old(name)}/dt={day}/batch={batch}" for day in sorted(self.days_by_batch([batch])[batch])]
        return [f"{_old(name)}/dt={batch}"] if batch in self.days(name) else []

    def _table_moves(self) -> Iterator[tuple[str, str]]:
        """Published partition and the staged one that replaces it; empty if that has no rows."""
        for name, span in self._staged.items():
            fresh = set(self._fresh(name, span))
            for day in span.days:
                staged = f"{self._new(name)}/dt={day}"
                if staged in fresh:
                    yield f"{_old(name)}/dt={day}", staged
                elif day in self.days(name):
                    yield f"{_old(name)}/dt={day}", ""

    def _batch_moves(self) -> list[tuple[str, str]]:
        moves = {
            path: "" for batch in sorted(self._batches) for name in BATCHED for path in self._partitions(name, batch)
        }
        for name in BATCHED if self._batches else ():
            base = self._new(name)
            days = [f"dt={day}" for day in _values(self._names_in(base), "dt")]
            if name == "events":
                days = [
                    f"{day}/batch={one}" for day in days for one in _values(self._names_in(f"{base}/{day}"), "batch")
                ]
            moves |= {f"{_old(name)}/{partition}": f"{base}/{partition}" for partition in days}
        return list(moves.items())

    def _counted(self, moves: Iterable[tuple[str, str]]) -> list[Move]:
        """With the number of files of each, by one listing."""
        counts: Counter[str] = Counter()
        for file in self._files.list(self.staging):
            folder = self._new() + file.path.partition(self._new())[2]
            while folder := folder.rpartition("/")[0]:
                counts[folder] += 1
        return [Move(target, staged, counts[staged]) for target, staged in moves]

    def _names_in(self, path: str) -> Sequence[str]:
        """Names in a directory that is there or not; remembered of what does not change before it is published."""
        found = self._names.get(path)
        if found is None:
            full = f"{self._out}/{path}"
            found = self._files.names(full) if self._files.exists(full) else []
            if path.startswith(PUBLISHED):
                self._names[path] = found
        return found


def _old(table: str) -> str:
    return f"{PUBLISHED}/{table}"


def _values(names: Iterable[str], column: str) -> list[date]:
    return sorted(date.fromisoformat(name.partition("=")[2]) for name in names if name.startswith(f"{column}="))
