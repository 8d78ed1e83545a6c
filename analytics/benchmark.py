"""
`goals`: measures speed, memory and exactness of nightly runs with both engines, and compares them with targets.

The unit of time is one thread that parses the same lines with orjson, in the same run on the same machine.
`python -m analytics.benchmark COMMAND` runs a command and prints, as JSON, what it and its descendants used.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, median_low
from threading import Event, Thread
from time import perf_counter, thread_time
from typing import Any

import orjson

from analytics.errors import EXIT_INTEGRITY, EXIT_OK, AnalyticsError
from analytics.sample.bulk_log import BASE_LINES, BULK_DAY, BulkTruth, generate_bulk_logs

ENGINES = ("spark", "duckdb")
# Lines of the logs besides the large one, whose size is an option.
_LOG_LINES = {"medium": 885_000, "small": 73_000, "sixteenfold": 16 * 73_000, "skewed": 885_000}
# Share of one account in the skewed log.
_SKEW = 0.5
_GIB = 2**30
_MAX_CPUS = 2
_QUICK_SCALE = 0.1
_QUICK_DIVISOR = 20
_SAMPLE_INTERVAL_S = 0.1
_PR_SET_CHILD_SUBREAPER = 36
_KCMP_NUMBERS = {"x86_64": 312, "aarch64": 272}
_KCMP_VM = 1
_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Usage:
    """
    What a command used, with all its descendants.

    :param cpu: processor seconds.
    :param peak: maximum of proportional bytes (PSS), sampled.
    """

    seconds: float
    cpu: float
    peak: int = 0

    def __str__(self) -> str:
        peak = f", {self.peak / _GIB:.2f} GiB" if self.peak else ""
        return f"{self.seconds:.1f} s, {self.cpu:.1f} s of CPU{peak}"


@dataclass(frozen=True, slots=True)
class SparkWork:
    """
    What Spark did in a run, by its event log.

    :param skew: longest task / median task (of two: the shorter one), of the stage whose tasks, at least two, took
        longest together.
    """

    executions: int
    stages: int
    tasks: int
    shuffled_bytes: int
    skew: float


@dataclass(slots=True)
class Measurements:
    """
    Usage is the median of all repetitions; peaks are maxima.

    :ivar lines: log to its number of lines.
    :ivar scans: log to the usage of one thread that parses it.
    :ivar nights: engine to log to usage of a nightly run.
    :ivar skewed: work of Spark on the skewed log.
    :ivar wrong: figures that differ from the ground truth.
    :ivar unequal: files of tables that differ between runs over the same log.
    :ivar compared: number of compared files.
    """

    lines: dict[str, int] = field(default_factory=dict)
    scans: dict[str, Usage] = field(default_factory=dict)
    nights: dict[str, dict[str, Usage]] = field(default_factory=lambda: {engine: {} for engine in ENGINES})
    skewed: SparkWork = SparkWork(0, 0, 0, 0, 0.0)
    wrong: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    compared: int = 0

    def format_details(self) -> list[str]:
        """Details that are not targets, as lines."""
        found = [""]
        for log, lines in self.lines.items():
            used = {"scan": self.scans.get(log)} | {engine: nights.get(log) for engine, nights in self.nights.items()}
            found += [f"{log}, {lines:,} lines, {name}: {usage}" for name, usage in used.items() if usage]
        work = self.skewed
        found.append(
            f"Spark on the skewed log: {work.executions} executions, {work.stages} stages, {work.tasks} tasks,"
            f" {work.shuffled_bytes / 1e6:,.1f} MB shuffled"
        )
        return found


@dataclass(frozen=True, slots=True)
class TargetResult:
    """
    :param engine: measured engine, or `both`.
    :param met: None if not judged.
    """

    engine: str
    about: str
    measured: str
    goal: str
    met: bool | None

    def format_line(self) -> str:
        """Format a line of the table."""
        status = {True: "met", False: "NOT MET", None: "not judged"}[self.met]
        return f"{self.engine:<6}  {self.about:<60} {self.measured:>10}  {self.goal:>9}  {status}"


def judge_targets(figures: Measurements, *, timed: bool) -> list[TargetResult]:
    """:param timed: whether there was enough data to judge times and memory."""

    def limit(engine: str, about: str, value: float, most: float, unit: str) -> TargetResult:
        return TargetResult(
            engine, about, f"{value:.2f} {unit}", f"<= {most:g} {unit}", value <= most if timed else None
        )

    def none(about: str, found: Sequence[str]) -> TargetResult:
        return TargetResult("both", about + "".join(f"; {one}" for one in found), str(len(found)), "0", not found)

    results = []
    for engine, nights in figures.nights.items():
        large, medium, small = nights["large"], nights["medium"], nights["small"]
        scans, lines = figures.scans, figures.lines
        sizes = {log: f"night of {count:,} lines" for log, count in lines.items()}
        results += [
            limit(engine, f"{sizes['large']}, time / scan", large.seconds / scans["large"].seconds, 5, "x"),
            limit(engine, f"{sizes['medium']}, CPU / scan", medium.cpu / scans["medium"].cpu, 15, "x"),
            limit(engine, f"{sizes['medium']}, peak memory", medium.peak / _GIB, 2, "GiB"),
            limit(engine, f"{sizes['small']}, CPU", small.cpu, 30, "s"),
            limit(engine, f"{sizes['small']}, time", small.seconds, 40, "s"),
            limit(
                engine,
                f"{sizes['sixteenfold']}, time / of a sixteenth",
                nights["sixteenfold"].seconds / small.seconds,
                17,
                "x",
            ),
        ]
    return [
        *results,
        limit("spark", "one account with half of all events, longest / median task", figures.skewed.skew, 2, "x"),
        none("figures that differ from the ground truth", figures.wrong),
        none(f"files that differ between runs or engines, of {figures.compared}", figures.unequal),
    ]


def scan_lines(logs: Path) -> tuple[Usage, Counter[str], int]:
    """Unit of all ratios: parse every line with orjson in this thread; also events and damaged lines."""
    started, cpu = perf_counter(), thread_time()
    events: Counter[str] = Counter()
    damaged = 0
    for path in sorted(logs.rglob("events-*.jsonl")):
        with path.open("rb", 1 << 20) as file:
            for line in file:
                try:
                    events[orjson.loads(line)["event"]] += 1
                except (orjson.JSONDecodeError, KeyError):
                    damaged += 1
    return Usage(perf_counter() - started, thread_time() - cpu), events, damaged


def measure_command(command: Sequence[str]) -> Usage:
    """
    Run a command.

    :raise AnalyticsError: it failed.
    """
    measured = [sys.executable, "-m", "analytics.benchmark", *command]
    completed = subprocess.run(measured, capture_output=True, text=True, cwd=_ROOT, check=False)
    if completed.returncode not in (EXIT_OK, EXIT_INTEGRITY):
        last = ["no output", *completed.stderr.splitlines()][-1]
        raise AnalyticsError(f"{' '.join(command[:4])} exited with status {completed.returncode}: {last}")
    return Usage(**json.loads(completed.stdout))


def _measure_in_this_process(command: Sequence[str]) -> int:
    """Run a command as the only one of this process, and print its usage."""
    # Orphans become children of this process, so their CPU counts.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ended, peak, started = Event(), 0, perf_counter()

    def sample_memory() -> None:
        nonlocal peak
        while not ended.wait(_SAMPLE_INTERVAL_S):
            peak = max(peak, sum(map(read_proportional_bytes, list_descendants(os.getpid()))))

    sampler = Thread(target=sample_memory)
    sampler.start()
    status = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    seconds = perf_counter() - started
    try:
        while True:
            os.wait()
    except ChildProcessError:
        ended.set()
    sampler.join()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    json.dump({"seconds": seconds, "cpu": used.ru_utime + used.ru_stime, "peak": peak}, sys.stdout)
    return status


def list_descendants(pid: int) -> Iterator[int]:
    """Descendants of a process that have memory of their own: Java's start of a program shares all of Java's."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found = children.read_text().split()
        except OSError:  # the thread has just ended
            continue
        for child in map(int, found):
            if not shares_memory(pid, child):
                yield child
            yield from list_descendants(child)


def shares_memory(pid: int, other: int) -> bool:
    """Whether two processes have the same memory, as after vfork; false where kcmp(2) is not available."""
    number = _KCMP_NUMBERS.get(os.uname().machine)
    return number is not None and ctypes.CDLL(None).syscall(number, pid, other, _KCMP_VM, 0, 0) == 0


def read_proportional_bytes(pid: int) -> int:
    """Resident bytes of a process, of which those shared by N processes count as 1/N."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has just ended
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def read_spark_work(event_log: Path) -> SparkWork:
    """Read the uncompressed event log of an application."""
    tasks = defaultdict[int, list[int]](list)
    executions, shuffled = 0, 0
    with event_log.open("rb") as file:
        for event in map(orjson.loads, file):
            kind = event["Event"]
            executions += kind.endswith("SparkListenerSQLExecutionStart")
            if kind == "SparkListenerTaskEnd":
                about, metrics = event["Task Info"], event.get("Task Metrics", {})
                tasks[event["Stage ID"]].append(about["Finish Time"] - about["Launch Time"])
                shuffled += metrics.get("Shuffle Write Metrics", {}).get("Shuffle Bytes Written", 0)
    heaviest = max((times for times in tasks.values() if len(times) > 1), key=sum, default=[1])
    counted = sum(map(len, tasks.values()))
    return SparkWork(executions, len(tasks), counted, shuffled, max(heaviest) / max(median_low(heaviest), 1))


def digest_files(directory: Path) -> dict[str, str]:
    """Path to digest of all files."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


def read_totals(tables: Path) -> Mapping[str, Any]:
    """Totals of the day, with the names of the ground truth."""
    import duckdb

    database = duckdb.connect()

    def rows(query: str, table: str, rest: str = "") -> list[dict[str, Any]]:
        found = database.execute(f"SELECT {query} FROM read_parquet('{tables / table}/**/*.parquet') {rest}")
        names = [column[0] for column in found.description or ()]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

    (ledger,) = rows(
        "accepted, acked, expired, evicted, removed, open, orphans + around_crash + before_books AS orphans,"
        " difference, again",
        "ledger_daily",
    )
    drift = "GROUP BY counter HAVING sum(difference) <> 0"
    events = rows("event, count(*) AS n", "events", "GROUP BY event")
    return {
        "events": {row["event"]: row["n"] for row in events},
        "damaged": rows("sum(corrupt)::BIGINT AS n", "inputs")[0]["n"],
        "missing": rows("sum(missing)::BIGINT AS n", "boots_daily")[0]["n"],
        "drift": {
            row["counter"]: row["n"]
            for row in rows("counter, sum(difference)::BIGINT AS n", "reconciliation_daily", drift)
        },
        **ledger,
    }


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


class _Benchmark:
    """
    :ivar figures: what was measured.

    :param work: directory for logs, which are kept, and results, which are not.
    :param lines: log to its number of lines.
    """

    def __init__(self, work: Path, lines: Mapping[str, int], repeat: int, report: Callable[[str], None]) -> None:
        self.figures = Measurements()
        self._repeat, self._report = repeat, report
        self._logs = {log: work / f"logs-{log}-{count}" for log, count in lines.items()}
        self._truths = {log: self._generate(log, count) for log, count in lines.items()}
        self._results, self._event_logs = work / "results", work / "spark-events"
        self._keys = work / "pseudonyms.keys"

    def _generate(self, log: str, lines: int) -> BulkTruth:
        # Half a line more, because the scale is rounded.
        scale, skew = (lines + 0.5) / BASE_LINES, _SKEW if log == "skewed" else 0.0
        truth = generate_bulk_logs(self._logs[log], scale, skew=skew, processes=os.cpu_count() or 1)
        self.figures.lines[log] = truth.lines
        return truth

    def measure(self) -> Measurements:
        """:raise AnalyticsError: a run failed."""
        for log in ("large", "medium"):
            used = _summarize([scan_lines(self._logs[log])[0] for _ in range(self._repeat)])
            self.figures.scans[log] = used
            self._report(f"scan, {log}: {used}")
        for log in ("small", "medium", "sixteenfold", "large"):
            self._compare_engines(log)
        self._measure_skewed()
        return self.figures

    def _compare_engines(self, log: str) -> None:
        """Runs over one log, whose results must be equal."""
        digests: list[Mapping[str, str]] = []
        for engine in ENGINES:
            # At least two of the smallest, to compare them.
            repeat = max(2, self._repeat) if log == "small" else self._repeat
            runs = []
            for _ in range(repeat):
                runs.append(self._run_nightly(engine, log))
                digests.append(digest_files(self._results / "tables"))
            self.figures.nights[engine][log] = _summarize(runs)
        names = sorted({name for one in digests for name in one})
        self.figures.compared += len(names)
        self.figures.unequal += [f"{log}: {name}" for name in names if len({one.get(name) for one in digests}) > 1]

    def _measure_skewed(self) -> None:
        shutil.rmtree(self._event_logs, ignore_errors=True)
        self._event_logs.mkdir()
        names = {"enabled": "true", "dir": self._event_logs.as_uri(), "compress": "false", "rolling.enabled": "false"}
        options = [word for name, value in names.items() for word in ("--conf", f"spark.eventLog.{name}={value}")]
        self.figures.nights["spark"]["skewed"] = self._run_nightly("spark", "skewed", *options)
        (event_log,) = self._event_logs.iterdir()
        self.figures.skewed = read_spark_work(event_log)
        shutil.rmtree(self._event_logs)

    def _run_nightly(self, engine: str, log: str, *options: str) -> Usage:
        """Replace the results, and compare them with the truth."""
        shutil.rmtree(self._results, ignore_errors=True)
        command = [sys.executable, "-m", "analytics", "nightly", "--engine", engine, "--day", str(BULK_DAY)]
        paths = {"--logs": self._logs[log], "--out": self._results, "--keys": self._keys}
        used = measure_command([*command, *(str(word) for pair in paths.items() for word in pair), *options])
        self._report(f"{engine}, {log}: {used}")
        wrong = find_differences(read_totals(self._results / "tables"), self._truths[log])
        self.figures.wrong += [f"{engine}, {log}: {one}" for one in wrong]
        return used


def _summarize(runs: Sequence[Usage]) -> Usage:
    return Usage(median(one.seconds for one in runs), median(one.cpu for one in runs), max(one.peak for one in runs))


def run_benchmark(
    directory: Path, scale: float, repeat: int, *, quick: bool, report: Callable[[str], None]
) -> tuple[list[TargetResult], Measurements]:
    """
    Measure and judge all targets.

    :param directory: for log lines, which are kept, and results, which are not.
    :param scale: size of the large log, in units of 600 000 lines.
    :param quick: little input, once; speed and memory are not judged.
    :param report: receives a line for each measurement.
    :raise AnalyticsError: a run failed.
    """
    lines = {"large": int(scale * BASE_LINES), **_LOG_LINES}
    if quick:
        lines = {log: count // _QUICK_DIVISOR for log, count in lines.items()}
        lines["large"], repeat = int(_QUICK_SCALE * BASE_LINES), 1
    cpus = sorted(os.sched_getaffinity(0))
    used = f"{min(_MAX_CPUS, len(cpus))} of {len(cpus)} CPUs"
    report(f"{lines['large']:,} log lines in {directory}, medians of {repeat}, on {used}")
    benchmark = _Benchmark(directory, lines, repeat, report)
    try:
        os.sched_setaffinity(0, cpus[:_MAX_CPUS])
        figures = benchmark.measure()
    finally:
        os.sched_setaffinity(0, cpus)
    return judge_targets(figures, timed=not quick), figures


if __name__ == "__main__":
    sys.exit(_measure_in_this_process(sys.argv[1:]))
