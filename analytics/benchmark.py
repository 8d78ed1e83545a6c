"""
`goals`: measures speed, memory and exactness against targets, as ratios within one run on one machine.

Some measurements need a process of their own: `python -m analytics.benchmark TASK ARGUMENTS`, with JSON arguments
and a JSON result. DuckDB does the same work for comparison and checks what Spark has written.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter
from typing import TYPE_CHECKING, Any

import orjson

from analytics.errors import AnalyticsError
from analytics.sample.bulk_log import BULK_DAY, BulkTruth, generate_bulk_logs
from mediatord.observability.event_schema import ENVELOPE, FIELDS

if TYPE_CHECKING:
    import duckdb
    from pyspark.sql import DataFrame, SparkSession

_DUCKDB_TYPES = {"string": "VARCHAR", "integer": "BIGINT", "number": "DOUBLE", "boolean": "BOOLEAN"}
_DUCKDB_QUERY = """
    SELECT date_trunc('hour', ts) AS hour, node, event, path, count(*), sum(size),
        quantile_cont(latency_ms, [0.5, 0.95, 0.99]), count(DISTINCT rcpt)
    FROM {source} GROUP BY ALL
"""


def connect_duckdb(threads: int) -> duckdb.DuckDBPyConnection:
    """Open a database in memory."""
    import duckdb

    database = duckdb.connect(config={"threads": threads, "memory_limit": "2GB"})
    # It writes to standard output.
    database.execute("SET enable_progress_bar = false")
    return database


def make_raw_table(files: Sequence[str]) -> str:
    """Log segments as a DuckDB table with all declared fields; null where a line is invalid."""
    columns = {name: _DUCKDB_TYPES[kind] for name, (kind, _) in {**ENVELOPE, **FIELDS}.items()} | {"ts": "TIMESTAMP"}
    declared = ", ".join(f"'{name}': '{kind}'" for name, kind in columns.items())
    listed = ", ".join(f"'{file}'" for file in files)
    return f"read_json([{listed}], format='newline_delimited', ignore_errors=true, columns={{{declared}}})"


def time_duckdb(files: Sequence[str], target: str, threads: int) -> dict[str, float]:
    """Time the equivalents of ingest and of the query, on raw lines and on Parquet, in seconds."""
    database, seconds = connect_duckdb(threads), dict[str, float]()

    def timed(name: str, query: str) -> None:
        started = perf_counter()
        database.execute(query).fetchall()
        seconds[name] = perf_counter() - started

    timed(
        "ingest",
        f"COPY (SELECT *, ts::DATE AS dt FROM {make_raw_table(files)} WHERE event IS NOT NULL)"
        f" TO '{target}' (FORMAT parquet, COMPRESSION zstd, PARTITION_BY (dt))",
    )
    timed("query_raw", _DUCKDB_QUERY.format(source=make_raw_table(files)))
    timed("query_parquet", _DUCKDB_QUERY.format(source=f"read_parquet('{target}/**/*.parquet')"))
    return seconds


def digest_tables(tables: Path) -> dict[str, str]:
    """Number of rows and two order-independent checksums of every table."""
    database = connect_duckdb(2)
    found = {}
    for table in sorted(tables.iterdir()):
        if any(table.rglob("*.parquet")):
            rows = database.execute(
                f"SELECT count(*), bit_xor(hash(t)), sum(hash(t)) FROM {_make_parquet_table(table)} t"
            ).fetchone()
            found[table.name] = " ".join(map(str, rows or ()))
    return found


def read_totals(tables: Path) -> Mapping[str, Any]:
    """Totals of the ingested day, with the names of the ground truth."""
    database = connect_duckdb(2)

    def one(table: str, query: str) -> dict[str, Any]:
        found = database.execute(f"SELECT {query} FROM {_make_parquet_table(tables / table)}")
        values = found.fetchone() or ()
        return dict(zip((column[0] for column in found.description or ()), values, strict=True))

    events = database.execute(
        f"SELECT event, count(*) FROM {_make_parquet_table(tables / 'events')} GROUP BY event"
    ).fetchall()
    ledger = one(
        "ledger_daily",
        "accepted, acked, expired, evicted, removed, open, orphans + around_crash + before_books AS orphans,"
        " difference, again",
    )
    drift = database.execute(
        f"SELECT counter, sum(difference)::BIGINT FROM {_make_parquet_table(tables / 'reconciliation_daily')}"
        " GROUP BY counter HAVING sum(difference) <> 0"
    ).fetchall()
    return {
        "events": dict(events),
        "damaged": one("inputs", "sum(corrupt)::BIGINT AS n")["n"],
        "missing": one("boots_daily", "sum(missing)::BIGINT AS n")["n"],
        "drift": dict(drift),
        **ledger,
    }


def _make_parquet_table(table: Path) -> str:
    return f"read_parquet('{table}/**/*.parquet', hive_partitioning=true, union_by_name=true)"


# Ratio of lines of large to small files.
SMALL_DIVISOR = 4
_GIB = 2**30


@dataclass(slots=True)
class Measurements:
    """
    Durations are medians in seconds.

    :ivar lines: log lines of the large files; `size`: their bytes.
    :ivar scan: parsing the large files with orjson in one thread.
    :ivar night: a nightly run over the large files, from start to end of the process.
    :ivar after_ingest: part of `night` after the ingest.
    :ivar cold_ingest: part of `night` for the ingest.
    :ivar peak: maximum resident bytes of all processes of that run.
    :ivar ingest: warm ingest of the large files with two threads; `ingest_small`: of the small files.
    :ivar ingest_alone: warm ingest of the large files with one thread.
    :ivar parse: warm parsing of the large files, without writing.
    :ivar declared: warm query on raw lines with a declared schema; `inferred`: with an inferred one.
    :ivar wrong: differences between tables and ground truth.
    :ivar unequal: tables that differ after a second run.
    :ivar tables: number of compared tables.
    :ivar steps: seconds by step of the nightly run.
    :ivar duck: seconds by operation of DuckDB.
    """

    lines: int = 0
    size: int = 0
    scan: float = 0.0
    night: float = 0.0
    cold_ingest: float = 0.0
    after_ingest: float = 0.0
    peak: int = 0
    ingest: float = 0.0
    ingest_small: float = 0.0
    ingest_alone: float = 0.0
    parse: float = 0.0
    declared: float = 0.0
    inferred: float = 0.0
    wrong: Sequence[str] = ()
    unequal: Sequence[str] = ()
    tables: int = 0
    steps: Mapping[str, float] = field(default_factory=dict)
    duck: Mapping[str, float] = field(default_factory=dict)

    def format_details(self) -> list[str]:
        """Details that are not targets, as lines."""
        slowest = sorted(self.steps.items(), key=lambda step: -step[1])[:8]
        return [
            "",
            f"{self.lines:,} lines, {self.size / 1e6:,.0f} MB; seconds: scan {self.scan:.1f},"
            f" nightly run {self.night:.1f}, ingest cold {self.cold_ingest:.1f} and warm {self.ingest:.1f},"
            f" query on raw lines {self.declared:.1f}",
            "DuckDB, seconds, cold: " + ", ".join(f"{name} {value:.1f}" for name, value in self.duck.items()),
            "slowest steps of the nightly run, seconds: "
            + ", ".join(f"{name} {value:.1f}" for name, value in slowest),
        ]


@dataclass(frozen=True, slots=True)
class TargetResult:
    """:param met: None if not judged."""

    name: str
    about: str
    measured: str
    goal: str
    met: bool | None

    def format_line(self) -> str:
        """Format a line of the table."""
        status = {True: "met", False: "NOT MET", None: "not judged"}[self.met]
        return f"{self.name}  {self.about:<52} {self.measured:>10}  {self.goal:>9}  {status}"


def judge_targets(figures: Measurements, *, timed: bool) -> list[TargetResult]:
    """:param timed: whether there was enough data to judge times."""

    def ratio(name: str, about: str, above: float, below: float, limit: float, least: bool = False) -> TargetResult:
        value = above / below
        sign = ">=" if least else "<="
        met = (value >= limit if least else value <= limit) if timed else None
        return TargetResult(name, about, f"{value:.2f}x", f"{sign} {limit:.1f}x", met)

    def nothing(name: str, about: str, found: Sequence[Any]) -> TargetResult:
        return TargetResult(name, about + "".join(f"; {one}" for one in found), str(len(found)), "0", not found)

    peak = figures.peak / _GIB
    return [
        ratio("G1", "nightly run / scan by one thread", figures.night, figures.scan, 5.0),
        ratio("G2", "ingest of all files / of a quarter, warm", figures.ingest, figures.ingest_small, 4.4),
        ratio("G3", "ingest / parsing only, warm", figures.ingest, figures.parse, 2.6),
        ratio(
            "G4",
            "query with inferred / with declared schema, warm",
            figures.inferred,
            figures.declared,
            1.7,
            least=True,
        ),
        ratio("G5", "steps after the ingest / ingest, cold", figures.after_ingest, figures.cold_ingest, 0.6),
        TargetResult(
            "G6",
            "peak memory of a nightly run, heap of 1 GiB",
            f"{peak:.2f} GiB",
            "<= 2 GiB",
            peak <= 2 if timed else None,
        ),
        ratio(
            "G7", "ingest by one thread / by two threads, warm", figures.ingest_alone, figures.ingest, 1.6, least=True
        ),
        nothing("G8", "figures that differ from the ground truth", figures.wrong),
        nothing("G9", f"tables that differ after a second run, of {figures.tables}", figures.unequal),
    ]


_SAMPLE_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """
    :param seconds: duration.
    :param peak: maximum of resident bytes of all its processes together.
    :param output: standard output.
    :param stderr_lines: lines of standard error, with seconds since the start.
    """

    status: int
    seconds: float
    peak: int
    output: str
    stderr_lines: Sequence[tuple[float, str]]


def run_python(arguments: Sequence[str], fine: Sequence[int] = (0,)) -> ProcessResult:
    """
    Run `python` with these arguments.

    :param fine: accepted exit statuses.
    :raise AnalyticsError: another exit status.
    """
    started = perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            [sys.executable, *arguments], stdout=output, stderr=subprocess.PIPE, text=True, cwd=_ROOT
        )
        watch = _MemorySampler(child.pid)
        watch.start()
        assert child.stderr is not None
        stderr_lines = [(perf_counter() - started, line.rstrip()) for line in child.stderr]
        status = child.wait()
        seconds = perf_counter() - started
        peak = watch.stop()
        output.seek(0)
        printed = output.read()
    if status not in fine:
        last = stderr_lines[-1][1] if stderr_lines else "no output"
        raise AnalyticsError(f"{' '.join(arguments[:3])} exited with status {status}: {last}")
    return ProcessResult(status, seconds, peak, printed, stderr_lines)


def run_task(task: str, **arguments: Any) -> Mapping[str, Any]:
    """
    Run a task in a separate process and return its result.

    :raise AnalyticsError: it failed.
    """
    found: Mapping[str, Any] = json.loads(
        run_python(["-m", "analytics.benchmark", task, json.dumps(arguments)]).output
    )
    return found


_ROOT = Path(__file__).resolve().parents[1]


class _MemorySampler(Thread):
    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._over = Event()
        self._peak = 0

    def run(self) -> None:
        while not self._over.wait(_SAMPLE_INTERVAL_S):
            self._peak = max(self._peak, sum_resident_bytes(self._pid))

    def stop(self) -> int:
        """Stop, and return the peak."""
        self._over.set()
        self.join()
        return self._peak


def sum_resident_bytes(pid: int, parent: tuple[int, ...] = (0, 0)) -> int:
    """
    Resident bytes of a process and its descendants.

    :param parent: total and resident pages of its parent. A process that was just forked shares those pages.
    """
    try:
        size, held = map(int, Path(f"/proc/{pid}/statm").read_text().split()[:2])
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except (OSError, ValueError):  # it has just ended
        return 0
    # The parent goes on meanwhile, and pages of files are mapped lazily.
    is_forked = abs(size - parent[0]) < 0.01 * parent[0] and abs(held - parent[1]) < 0.1 * parent[1]
    own = 0 if is_forked else held * os.sysconf("SC_PAGE_SIZE")
    return own + sum(sum_resident_bytes(child, (size, held)) for child in children)


_HEAP_SIZE = "1g"
# 4: done, but lines are missing, as generated.
_ACCEPTED_STATUSES = (0, 4)


def measure_all(
    work: Path, scale: float, small: float, repeat: int, cpus: Sequence[int], report: Callable[[str], None]
) -> Measurements:
    """
    :param work: directory for log lines, which are kept, and results, which are not.
    :param small: scale of the smaller files.
    :param cpus: for measurements; generating log lines may use all.
    :raise AnalyticsError: a step failed.
    """
    logs, less, master = work / f"logs-{scale:g}", work / f"logs-{small:g}", f"local[{len(cpus)}]"
    for directory, size in ((logs, scale), (less, small)):
        directory.mkdir(parents=True, exist_ok=True)
        report(
            f"log lines: {generate_bulk_logs(directory, size, processes=os.cpu_count() or 1).lines:,} in {directory}"
        )
    truth = generate_bulk_logs(logs, scale)
    os.sched_setaffinity(0, cpus)
    figures = Measurements(lines=truth.lines, size=truth.size)

    scans = [run_task("scan", logs=str(logs)) for _ in range(repeat)]
    figures.scan = median(scan["seconds"] for scan in scans)
    report(f"scan: {figures.scan:.1f} s")
    _measure_nightly_runs(figures, work, logs, master, max(2, repeat), truth, report)

    both = run_task("ingests", master=master, warm=str(less), logs=[str(less), str(logs)], repeat=repeat)
    figures.ingest, figures.ingest_small = median(both[str(logs)]["ingest"]), median(both[str(less)]["ingest"])
    figures.parse = median(both[str(logs)]["parse"])
    report(
        f"ingest: {figures.ingest:.1f} s, of a quarter {figures.ingest_small:.1f} s,"
        f" parsing only {figures.parse:.1f} s"
    )
    alone = run_task("ingests", master="local[1]", warm=str(less), logs=[str(logs)], repeat=repeat)
    figures.ingest_alone = median(alone[str(logs)]["ingest"])
    report(f"ingest by one thread: {figures.ingest_alone:.1f} s")

    schemas = run_task("schemas", master=master, logs=str(logs), repeat=repeat)
    figures.declared, figures.inferred = median(schemas["declared"]), median(schemas["inferred"])
    report(f"query: {figures.declared:.1f} s, with inferred schema {figures.inferred:.1f} s")
    ducks = [run_task("duck", logs=str(logs), threads=len(cpus)) for _ in range(repeat)]
    figures.duck = {name: median(one[name] for one in ducks) for name in ducks[0]}
    return figures


def _measure_nightly_runs(
    figures: Measurements,
    work: Path,
    logs: Path,
    master: str,
    repeat: int,
    truth: BulkTruth,
    report: Callable[[str], None],
) -> None:
    """Whole runs into separate directories, whose results must be equal."""
    seconds, ingests, rests, found = [], [], [], list[Mapping[str, str]]()
    for number in range(repeat):
        out = work / f"results-{number}"
        shutil.rmtree(out, ignore_errors=True)
        ended = run_python(_make_nightly_command(logs, out, master, work / "pseudonyms.keys"), _ACCEPTED_STATUSES)
        ingest, rest = _split_seconds(ended, out)
        report(
            f"nightly run: {ended.seconds:.1f} s, {ended.peak / 2**30:.2f} GiB;"
            f" ingest {ingest:.1f} s, rest {rest:.1f} s"
        )
        seconds.append(ended.seconds)
        ingests.append(ingest)
        rests.append(rest)
        found.append(digest_tables(out / "tables"))
        figures.peak = max(figures.peak, ended.peak)
        figures.steps = _load_step_seconds(out)
        if not number:
            figures.wrong = find_differences(read_totals(out / "tables"), truth)
        shutil.rmtree(out)
    figures.night, figures.cold_ingest, figures.after_ingest = median(seconds), median(ingests), median(rests)
    figures.tables = len(found[0])
    names = {name for one in found for name in one}
    figures.unequal = sorted(name for name in names if len({one.get(name) for one in found}) > 1)


def _make_nightly_command(logs: Path, out: Path, master: str, keys: Path) -> list[str]:
    options = ["--logs", str(logs), "--out", str(out), "--keys", str(keys)]
    return [
        "-m",
        "analytics",
        "nightly",
        *options,
        "--day",
        str(BULK_DAY),
        "--master",
        master,
        "--memory",
        _HEAP_SIZE,
    ]


def _split_seconds(ended: ProcessResult, out: Path) -> tuple[float, float]:
    """Seconds of the ingest, and from its end to the last output."""
    ingested_at = next(at for at, line in ended.stderr_lines if "] ingest " in line)
    return _load_manifest(out)["seconds"]["ingest"], ended.stderr_lines[-1][0] - ingested_at


def _load_step_seconds(out: Path) -> dict[str, float]:
    manifest = _load_manifest(out)
    return {**manifest["seconds"], **{job["job"]: job["seconds"] for job in manifest["jobs"]}}


def _load_manifest(out: Path) -> dict[str, Any]:
    (path,) = (out / "runs").glob("*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def find_differences(totals: Mapping[str, Any], truth: BulkTruth) -> list[str]:
    """Differences between tables and truth, as `name: found, not expected`."""
    true: dict[str, Any] = {
        name: getattr(truth, name) for name in ("damaged", "missing", "accepted", "open", "orphans")
    }
    true |= {"difference": 0, "again": 0}
    true |= {name: truth.ended[name] for name in ("acked", "expired", "evicted", "removed")}
    found = [f"{name}: {totals[name]}, not {value}" for name, value in true.items() if totals[name] != value]
    if totals["events"] != dict(truth.events):
        found.append("events")
    if sorted(totals["drift"].values()) != sorted(value for value in truth.drift.values() if value):
        found.append(f"counters: {totals['drift']}, not {dict(truth.drift)}")
    return found


def scan_lines(logs: str) -> dict[str, Any]:
    """Baseline of all ratios: one thread parses every line with orjson and counts events."""
    started = perf_counter()
    events: Counter[str] = Counter()
    damaged = 0
    for path in _list_segments(logs):
        with open(path, "rb", 1 << 20) as file:
            for line in file:
                try:
                    events[orjson.loads(line)["event"]] += 1
                except (orjson.JSONDecodeError, KeyError):
                    damaged += 1
    return {"seconds": perf_counter() - started, "events": events, "damaged": damaged}


def time_ingest_and_parse(master: str, warm: str, logs: Sequence[str], repeat: int) -> dict[str, Any]:
    """Time ingest, and parsing only, of several directories, warm, in seconds."""
    with _open_local_session(master) as spark:
        _time_ingest(spark, warm)
        _time_parse(spark, warm)
        return {
            directory: {
                "ingest": [_time_ingest(spark, directory) for _ in range(repeat)],
                "parse": [_time_parse(spark, directory) for _ in range(repeat)],
            }
            for directory in logs
        }


def time_schemas(master: str, logs: str, repeat: int) -> dict[str, Any]:
    """Time the query with a declared and with an inferred schema, warm, in seconds."""
    with _open_local_session(master) as spark:
        from pyspark.sql.types import StructType

        from analytics.schema import make_line_struct

        def declared() -> DataFrame:
            return spark.read.schema(StructType(make_line_struct().fields[:-1])).json(_list_segments(logs))

        def inferred() -> DataFrame:
            return spark.read.json(_list_segments(logs))

        _measure_seconds(lambda: _run_query(declared()))
        return {
            "declared": [_measure_seconds(lambda: _run_query(declared())) for _ in range(repeat)],
            "inferred": [_measure_seconds(lambda: _run_query(inferred())) for _ in range(repeat)],
        }


def time_duckdb_task(logs: str, threads: int) -> dict[str, Any]:
    """Time DuckDB, cold, in seconds."""

    with _make_task_directory() as target:
        return dict(time_duckdb(_list_segments(logs), f"{target}/parquet", threads))


def _time_ingest(spark: SparkSession, logs: str) -> float:
    from analytics.reading.files import FileSystem
    from analytics.reading.ingest import ingest_segments
    from analytics.reading.segments import discover_segments

    files = FileSystem(spark)
    segments = discover_segments(files, [logs]).segments
    with _make_task_directory() as staging:
        return _measure_seconds(lambda: ingest_segments(spark, files, segments, staging))


def _time_parse(spark: SparkSession, logs: str) -> float:
    """The column for damaged lines makes Spark read every field."""
    from analytics.schema import CORRUPT_RECORD_COLUMN, make_line_struct

    frame = spark.read.schema(make_line_struct()).option("columnNameOfCorruptRecord", CORRUPT_RECORD_COLUMN)
    return _measure_seconds(lambda: frame.json(_list_segments(logs)).write.format("noop").mode("overwrite").save())


def _run_query(lines: DataFrame) -> None:
    from pyspark.sql import functions as F

    hour = F.substring("ts", 1, 13).alias("hour")
    grouped = lines.groupBy(hour, "node", "event", "path").agg(
        F.count(F.lit(1)),
        F.sum("size"),
        F.percentile_approx("latency_ms", [0.5, 0.95, 0.99], 1000),
        F.countDistinct("rcpt"),
    )
    grouped.write.format("noop").mode("overwrite").save()


def _measure_seconds(use: Callable[[], object]) -> float:
    started = perf_counter()
    use()
    return perf_counter() - started


def _list_segments(logs: str) -> list[str]:
    return [str(path) for path in sorted(Path(logs).rglob("events-*.jsonl"))]


@contextmanager
def _open_local_session(master: str) -> Iterator[SparkSession]:
    from analytics.java import find_java, set_java_home
    from analytics.spark_session import SessionOptions, open_session

    set_java_home(find_java())
    with open_session(SessionOptions(master=master, memory="1g")) as spark:
        yield spark


@contextmanager
def _make_task_directory() -> Iterator[str]:
    directory = tempfile.mkdtemp(prefix="mediatord-analytics-goals-")
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


TASKS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "scan": scan_lines,
    "ingests": time_ingest_and_parse,
    "schemas": time_schemas,
    "duck": time_duckdb_task,
}


_MAX_CPUS = 2
_QUICK_SCALE = 0.1


def run_benchmark(
    directory: Path, scale: float, repeat: int, *, quick: bool, report: Callable[[str], None]
) -> tuple[list[TargetResult], Measurements]:
    """
    Measure and judge all targets.

    :param directory: for log lines, which are kept, and results, which are not.
    :param scale: size of the input, in units of 600 000 lines.
    :param quick: little input, once; speed and memory are not judged.
    :param report: receives a line for each measurement.
    :raise AnalyticsError: a step failed.
    """
    if quick:
        scale, repeat = _QUICK_SCALE, 1
    cpus = sorted(os.sched_getaffinity(0))
    used = f"{min(_MAX_CPUS, len(cpus))} of {len(cpus)} CPUs"
    report(f"{scale * 600_000:,.0f} log lines in {directory}, medians of {repeat}, on {used}")
    try:
        figures = measure_all(directory, scale, scale / SMALL_DIVISOR, repeat, cpus[:_MAX_CPUS], report)
    finally:
        os.sched_setaffinity(0, cpus)
    return judge_targets(figures, timed=not quick), figures


if __name__ == "__main__":
    json.dump(TASKS[sys.argv[1]](**json.loads(sys.argv[2])), sys.stdout)
