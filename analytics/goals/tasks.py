"""What is measured in a process of its own: `python -m analytics.goals.tasks TASK ARGUMENTS`, both sides JSON."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def scan(logs: str) -> dict[str, Any]:
    """The base of all ratios: one thread reads every line with orjson, and counts by event."""
    began = perf_counter()
    events: Counter[str] = Counter()
    damaged = 0
    for path in _segments(logs):
        with open(path, "rb", 1 << 20) as file:
            for line in file:
                try:
                    events[orjson.loads(line)["event"]] += 1
                except (orjson.JSONDecodeError, KeyError):
                    damaged += 1
    return {"seconds": perf_counter() - began, "events": events, "damaged": damaged}


def ingests(master: str, warm: str, logs: Sequence[str], repeat: int) -> dict[str, Any]:
    """Seconds of ingest, and of only parsing the lines, for each of several directories; all warm."""
    with _session(master) as spark:
        _ingest(spark, warm)
        _parse(spark, warm)
        return {
            directory: {
                "ingest": [_ingest(spark, directory) for _ in range(repeat)],
                "parse": [_parse(spark, directory) for _ in range(repeat)],
            }
            for directory in logs
        }


def schemas(master: str, logs: str, repeat: int) -> dict[str, Any]:
    """Seconds of the query with the schema declared, and with one that Spark infers; both warm."""
    with _session(master) as spark:
        from pyspark.sql.types import StructType

        from analytics.schema import line_struct

        def declared() -> DataFrame:
            return spark.read.schema(StructType(line_struct().fields[:-1])).json(_segments(logs))

        def inferred() -> DataFrame:
            return spark.read.json(_segments(logs))

        _seconds(lambda: _query(declared()))
        return {
            "declared": [_seconds(lambda: _query(declared())) for _ in range(repeat)],
            "inferred": [_seconds(lambda: _query(inferred())) for _ in range(repeat)],
        }


def duck(logs: str, threads: int) -> dict[str, Any]:
    """Seconds of DuckDB, cold."""
    from analytics.goals.duck import work

    with _scratch() as target:
        return dict(work(_segments(logs), f"{target}/parquet", threads))


def _ingest(spark: SparkSession, logs: str) -> float:
    from analytics.files import Files
    from analytics.ingest import ingest
    from analytics.segments import discover

    files = Files(spark)
    segments = discover(files, [logs]).segments
    with _scratch() as staging:
        return _seconds(lambda: ingest(spark, files, segments, staging))


def _parse(spark: SparkSession, logs: str) -> float:
    """With the column for damaged lines, which is what makes Spark read every field."""
    from analytics.schema import CORRUPT, line_struct

    frame = spark.read.schema(line_struct()).option("columnNameOfCorruptRecord", CORRUPT)
    return _seconds(lambda: frame.json(_segments(logs)).write.format("noop").mode("overwrite").save())


def _query(lines: DataFrame) -> None:
    from pyspark.sql import functions as F

    hour = F.substring("ts", 1, 13).alias("hour")
    grouped = lines.groupBy(hour, "node", "event", "path").agg(
        F.count(F.lit(1)),
        F.sum("size"),
        F.percentile_approx("latency_ms", [0.5, 0.95, 0.99], 1000),
        F.countDistinct("rcpt"),
    )
    grouped.write.format("noop").mode("overwrite").save()


def _seconds(use: Callable[[], object]) -> float:
    began = perf_counter()
    use()
    return perf_counter() - began


def _segments(logs: str) -> list[str]:
    return [str(path) for path in sorted(Path(logs).rglob("events-*.jsonl"))]


@contextmanager
def _session(master: str) -> Iterator[SparkSession]:
    from analytics import java, session

    java.use(java.find_java())
    with session.running(session.SessionOptions(master=master, memory="1g")) as spark:
        yield spark


@contextmanager
def _scratch() -> Iterator[str]:
    directory = tempfile.mkdtemp(prefix="mediatord-analytics-goals-")
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


TASKS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "scan": scan,
    "ingests": ingests,
    "schemas": schemas,
    "duck": duck,
}

if __name__ == "__main__":
    json.dump(TASKS[sys.argv[1]](**json.loads(sys.argv[2])), sys.stdout)
