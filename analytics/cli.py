"""
The console script `mediatord-analytics`, also `python -m analytics` and the program for `spark-submit`.

Exit status: 0 success, 1 failure, 2 usage error, 3 no input for these days, 4 done but the logs are incomplete or
inconsistent, 143 and 130 after SIGTERM and SIGINT. Results go to standard output, progress and errors to standard
error. An error is one line, except for a missing Java. Spark is imported only after a Java is found.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import tempfile
import traceback
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from threading import Event, Lock, Thread
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TextIO, TypeVar

import click
from click.shell_completion import CompletionItem

from analytics.database import FORBIDDEN_CHARACTERS, check_directory_name
from analytics.errors import EXIT_FAILED, EXIT_USAGE, STOP_HANDLER, AnalyticsError, StoppedBySignal, find_root_cause
from analytics.files import get_local_path
from analytics.java import JavaNotFound, find_java, require_packages, set_java_home
from analytics.job import Span
from analytics.sample import generate_logs
from analytics.sample.ground_truth import SampleSpec, SampleTruth
from analytics.settings import Settings, load_settings, render_default_settings
from analytics.spark_session import (
    SessionOptions,
    get_default_memory,
    is_local_master,
    is_spark_submit,
    make_scratch_directory,
    open_session,
)
from mediatord import __version__
from mediatord.config.value_syntax import parse_size
from mediatord.runtime.progress_bar import is_terminal

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from analytics.engine import AnalysisSession
    from analytics.nightly import NightlyOutcome
    from analytics.privacy import PseudonymKeyFile
    from analytics.sample.ground_truth import Finding
    from analytics.writing.retention import ExpiredItem

_SIZE_UNITS = {"g": 2**30, "m": 2**20, "k": 2**10}
# Size of plain text below which Java's compiler costs more than it gains; assumed compression ratio.
_SMALL_INPUT_BYTES = 64 * 2**20
_COMPRESSION_RATIO = 10
# Seconds before the status line appears, and between two updates of it.
_STATUS_INTERVAL_S = 1.0
Command = TypeVar("Command", bound=Callable[..., Any])


class ProgressReporter:
    """
    Reports progress on standard error: a line for each completed step and, on a terminal, a status line with the
    running step and its duration.

    :param stream: default: standard error.
    """

    def __init__(self, stream: TextIO | None = None, interval: float = _STATUS_INTERVAL_S) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._interval = interval
        self._is_terminal = is_terminal(self._stream)
        self._lock = Lock()
        self._ended = Event()
        self._thread = Thread(target=self._update, name="progress", daemon=True)
        self._status, self._since = "", perf_counter()

    def __enter__(self) -> Self:
        if self._is_terminal:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_terminal:
            self._ended.set()
            self._thread.join()

    def print(self, line: str) -> None:
        """Print a line above the status line."""
        with self._lock:
            self._clear()
            click.echo(line, file=self._stream, err=True)

    def set_status(self, text: str) -> None:
        """Name the running step; an empty text removes the status line."""
        with self._lock:
            self._clear()
            self._status, self._since = text, perf_counter()

    def _update(self) -> None:
        while not self._ended.wait(self._interval):
            with self._lock:
                if self._status:
                    line = f"{self._status}, {perf_counter() - self._since:.0f} s"
                    self._stream.write(f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K")
                    self._stream.flush()
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        if self._is_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _complete_directory(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete directories where URLs are accepted too."""
    return [CompletionItem(incomplete, type="dir")]


def _complete_file(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


def print_json(content: object) -> None:
    """Print JSON on standard output; dates and paths as text."""
    click.echo(json.dumps(content, indent=2, default=str))


def parse_day(text: str) -> date:
    """Parse a day such as 2026-11-20. :raise BadParameter: it is invalid, or in the future."""
    try:
        found = date.fromisoformat(text) if re.fullmatch(r"\d{4}-\d\d-\d\d", text) else None
    except ValueError:
        found = None
    if found is None:
        raise click.BadParameter(f"{text!r} is not a day; expected a date such as 2026-11-20")
    if found > get_today():
        raise click.BadParameter(f"{found} is in the future")
    return found


def parse_heap_size(text: str) -> str:
    """Parse a heap size, in Java's syntax such as 512m. :raise BadParameter: it is invalid, or below 1 KiB."""
    number = parse_size_bytes(text)
    if number < _SIZE_UNITS["k"]:
        raise click.BadParameter(f"{text!r} is too small; expected a size such as 512m or 4GiB")
    unit, factor = next((one for one in _SIZE_UNITS.items() if number % one[1] == 0), ("k", _SIZE_UNITS["k"]))
    return f"{number // factor}{unit}"


def get_today() -> date:
    """Current day in UTC."""
    return datetime.now(UTC).date()


def parse_size_bytes(text: str) -> int:
    """Parse a size in bytes. :raise BadParameter: it is invalid."""
    try:
        return parse_size(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a size; expected one such as 512m or 4GiB") from None


def make_span(only: date | None, first: date | None, last: date | None) -> Span:
    """
    The requested days; by default yesterday, and until yesterday.

    :raise UsageError: the options contradict each other.
    """
    yesterday = get_today() - timedelta(1)
    if only and (first or last):
        raise click.UsageError("--day cannot be combined with --from or --to")
    if last and not first:
        raise click.UsageError("--to requires --from")
    if not first:
        return Span(only or yesterday, only or yesterday)
    if (last or yesterday) < first:
        raise click.UsageError(f"--to {last or yesterday} is before --from {first}")
    return Span(first, last or yesterday)


def parse_spark_conf(pairs: Sequence[str]) -> Mapping[str, str]:
    """Parse settings of Spark. :raise UsageError: one is not `KEY=VALUE`."""
    split = [pair.partition("=") for pair in pairs]
    for key, equals, _ in split:
        if not (key and equals):
            raise click.UsageError(f"--conf {key}: expected KEY=VALUE")
    return {key.strip(): value for key, _, value in split}


def check_readable_directories(option: str, urls: Sequence[str]) -> None:
    """:raise UsageError: a local path is not a readable directory."""
    for url in urls:
        path = get_local_path(url)
        if path and not path.is_dir():
            raise click.UsageError(f"{option} {url}: no such directory")
        if path and not os.access(path, os.R_OK | os.X_OK):
            raise click.UsageError(f"{option} {url}: not readable")


def is_small_input(urls: Sequence[str], days: Span) -> bool:
    """Whether the segments of these days are small; False if they are not local."""
    raw = 0
    for url in urls:
        path = get_local_path(url)
        if path is None:
            return False
        raw += sum(_estimate_raw_bytes(file, days) for file in path.rglob("events*"))
    return raw < _SMALL_INPUT_BYTES


def _estimate_raw_bytes(file: Path, days: Span) -> int:
    """Size of a segment of these days as plain text; estimated if compressed."""
    stamp = re.match(r"events-(\d{8})T", file.name)
    if stamp and not days.first.strftime("%Y%m%d") <= stamp[1] <= days.last.strftime("%Y%m%d"):
        return 0
    with suppress(OSError):
        return file.stat().st_size * (1 if file.suffix == ".jsonl" else _COMPRESSION_RATIO)
    return 0


def check_writable_directory(option: str, url: str) -> None:
    """
    Create a local directory unless it exists.

    :raise UsageError: it is not writable.
    """
    path = get_local_path(url)
    if path is None:
        return
    if option in ("--out", "--scratch"):
        check_directory_name(str(path.absolute()), FORBIDDEN_CHARACTERS)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise click.UsageError(f"{option} {url}: not writable: {error.strerror}") from None


def add_spark_options(command: Command) -> Command:
    """Add the options of commands that start Spark."""
    for option in reversed(_SPARK_OPTIONS):
        command = option(command)
    return command


_engine_option = click.option(
    "--engine",
    type=click.Choice(["spark", "duckdb"]),
    default="spark",
    show_default=True,
    help="What reads the logs: Spark, on one machine or a cluster, or DuckDB, on one machine without Java.",
)
_SPARK_OPTIONS = (
    _engine_option,
    click.option(
        "--master", metavar="URL", help="Spark master: local[N] or the URL of a cluster. Default: all local CPUs."
    ),
    click.option(
        "--memory",
        metavar="SIZE",
        type=parse_heap_size,
        help="Java heap size, or memory of DuckDB. Default: a quarter of the memory, at most 1g.",
    ),
    click.option(
        "--scratch",
        metavar="DIR",
        shell_complete=_complete_directory,
        help="Directory for temporary files. Default: $TMPDIR or /tmp.",
    ),
    click.option("--ui", is_flag=True, help="Serve Spark's web UI on 127.0.0.1:4040."),
    click.option("--conf", metavar="KEY=VALUE", multiple=True, help="Spark property; may be repeated."),
    click.option("--debug", is_flag=True, help="Show Java's output and full tracebacks."),
)

_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


_DEMO_MARKER = ".mediatord-analytics-demo"


@click.command()
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for logs and results; replaces an earlier demo. Default: a temporary one.",
)
@click.option("--days", default=30, show_default=True, type=click.IntRange(2, 90), help="Days to generate.")
@click.option("--messages", default=2500, show_default=True, type=click.IntRange(1), help="Messages per day.")
@click.option("--seed", default=1, show_default=True, help="Random seed; equal seeds give equal logs.")
@click.option("--open", "show", is_flag=True, help="Open the report in a browser.")
@_engine_option
@_json_option
def demo(directory: Path | None, days: int, messages: int, seed: int, show: bool, engine: str, as_json: bool) -> int:
    """Analyse generated logs with known incidents."""
    directory = prepare_demo_directory(directory)
    started = perf_counter()
    truth = _generate_sample(
        directory / "logs", SampleSpec(days=days, messages_per_day=messages, seed=seed, gauge_s=300, segment_hours=3)
    )
    lines = sum(day.lines for day in truth.days.values())
    with ProgressReporter() as progress:
        progress.print(
            f"generated {days} days, {lines} lines of {len(truth.spec.nodes)} nodes in"
            f" {perf_counter() - started:.0f} s"
        )
        report, findings = _analyze_sample(directory, truth, engine, progress)
    if as_json:
        print_json({"report": report, "incidents": [_describe_finding(one) for one in findings]})
    else:
        for one in findings:
            click.echo(f"{one.incident.day} {one.incident.name:<17} {one.text or 'NOT FOUND'}")
        click.echo(report)
    if show:
        webbrowser.open(Path(report).absolute().as_uri())
    return 0


def _describe_finding(finding: Finding) -> dict[str, Any]:
    return {"day": finding.incident.day, "incident": finding.incident.name, "finding": finding.text or None}


def _generate_sample(directory: Path, spec: SampleSpec) -> SampleTruth:
    """Generate logs, and show the number of days so far on a terminal."""
    with ProgressReporter() as progress:

        def report_days(done: int) -> None:
            progress.set_status(f"generating logs: {done} of {spec.days} days")

        report_days(0)
        return generate_logs(directory, spec, report_days)


def prepare_demo_directory(directory: Path | None) -> Path:
    """
    Return an empty directory.

    :raise AnalyticsError: it has files that are not from a demo.
    """
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="mediatord-analytics-demo-"))
    mark = directory / _DEMO_MARKER
    if directory.exists() and any(directory.iterdir()) and not mark.exists():
        raise AnalyticsError(f"{directory} is not empty and not from a demo; name another directory")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    mark.touch()
    return directory


def _analyze_sample(
    directory: Path, truth: SampleTruth, engine: str, progress: ProgressReporter
) -> tuple[str, list[Finding]]:
    """Analyse all days, then the last one again with late segments; return the report's path and the findings."""
    options = {"engine": engine, "conf": (), "master": None, "memory": None, "scratch": None, "ui": False}
    with _open_analysis({**options, "debug": False}, progress, small=True) as session:
        from analytics.nightly import NightlyRequest, run_nightly
        from analytics.sample.ground_truth import find_incidents
        from analytics.writing.warehouse import Warehouse

        out, last = str(directory / "results"), truth.spec.last_day

        def analyze(span: Span) -> NightlyOutcome:
            request = NightlyRequest(
                logs=[str(directory / "logs")],
                out=out,
                span=span,
                settings=Settings(),
                keys=str(directory / "pseudonyms.keys"),
            )
            return run_nightly(session, request, progress.print, report_status=progress.set_status)

        outcome = analyze(Span(truth.spec.first_day, last))
        if truth.late:
            truth.deliver_late_segments()
            progress.print("a late segment arrived: analysing the last day again")
            outcome = analyze(Span(last, last))
        progress.set_status("looking up the incidents in the tables")
        return outcome.report_path, find_incidents(Warehouse(session.database, session.files, out), truth)


@contextmanager
def _open_analysis(
    options: Mapping[str, Any], progress: ProgressReporter, *, small: bool = False
) -> Iterator[AnalysisSession]:
    """
    Open what a run works with, by the options of a command.

    :raise AnalyticsError: it does not start.
    """
    from analytics.database import Database
    from analytics.engine import AnalysisSession

    threads = len(os.sched_getaffinity(0))
    if options["engine"] == "duckdb":
        from analytics.files import LocalFileSystem

        require_packages(("duckdb", "pyarrow"))
        memory = parse_size(options["memory"] or get_default_memory())
        with make_scratch_directory(options["scratch"]) as scratch, Database(scratch, memory, threads) as database:
            yield AnalysisSession(LocalFileSystem(), database, scratch)
        return
    with _open_spark(options, progress, small=small) as (spark, scratch):
        from analytics.files import FileSystem

        with Database(scratch, threads=threads) as database:
            yield AnalysisSession(FileSystem(spark), database, scratch, spark)


@contextmanager
def _open_spark(
    options: Mapping[str, Any], progress: ProgressReporter, *, small: bool = False
) -> Iterator[tuple[SparkSession, str]]:
    """
    Open a Spark session with the options of a command; also yield its scratch directory.

    :raise AnalyticsError: it does not start.
    """
    settings = parse_spark_conf(options["conf"])
    require_packages()
    if not is_spark_submit():
        found = find_java()
        for warning in found.warnings:
            progress.print(f"warning: skipped Java of {warning}")
        progress.print(f"starting Spark on Java {found.version} ({found.source}) ...")
        set_java_home(found)
    progress.set_status("starting Spark")
    with make_scratch_directory(options["scratch"]) as scratch:
        session_options = SessionOptions(
            master=options["master"],
            memory=options["memory"],
            scratch=scratch,
            ui=options["ui"],
            settings=settings,
            small=small,
            debug=options["debug"],
        )
        with open_session(session_options) as spark:
            progress.set_status("")
            yield spark, scratch


_logs_option = click.option(
    "--logs",
    metavar="DIR",
    multiple=True,
    required=True,
    shell_complete=_complete_directory,
    help="Directory with log segments; may be repeated.",
)
_out_option = click.option(
    "--out", metavar="DIR", required=True, shell_complete=_complete_directory, help="Directory for results."
)
_settings_option = click.option(
    "--settings",
    "settings_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Settings file (YAML); `mediatord-analytics settings` prints one with the defaults.",
)
_keys_option = click.option(
    "--keys",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Pseudonym key file. Default: OUT/pseudonyms.keys.",
)


_key_file_option = click.option(
    "--keys",
    metavar="FILE",
    type=click.Path(path_type=Path),
    required=True,
    help="Pseudonym key file, such as OUT/pseudonyms.keys.",
)


def _get_key_file(keys: Path | None, out: str) -> Path:
    """:raise UsageError: there is no default, because the results are not local."""
    here = get_local_path(out)
    if keys is None and here is None:
        raise click.UsageError("--keys FILE is required, because --out is not a local directory")
    return keys or Path(here or "", "pseudonyms.keys")


@click.command()
@_logs_option
@_out_option
@click.option("--day", "only", metavar="DAY", type=parse_day, help="Day to analyse, in UTC. Default: yesterday.")
@click.option("--from", "first", metavar="DAY", type=parse_day, help="First day of a range, instead of --day.")
@click.option("--to", "last", metavar="DAY", type=parse_day, help="Last day of the range. Default: yesterday.")
@_settings_option
@_keys_option
@click.option(
    "--textfile",
    metavar="FILE",
    shell_complete=_complete_file,
    help="Also write metrics for Prometheus to FILE (*.prom), in the directory of the node exporter's textfile"
    " collector.",
)
@click.option("--allow-empty", is_flag=True, help="Exit with status 0 instead of 3 if there are no log segments.")
@click.option(
    "--keep-free",
    metavar="SIZE",
    type=parse_size_bytes,
    default="1g",
    show_default=True,
    help="Abort if less than SIZE would remain free on disk.",
)
@click.option("--explain", is_flag=True, help="Print the query plan of each scan.")
@click.option("--open", "show", is_flag=True, help="Open the report in a browser.")
@add_spark_options
@_json_option
def nightly(**options: Any) -> int:
    """
    Analyse one or more days and publish tables and a report.

    Repeated runs give the same results. Late segments of earlier days are included (look_back_days).

    Exit status: 0 published; 1 failed, nothing published; 2 usage error; 3 no log segments of these days; 4
    published, but the logs or a ledger are incomplete.
    """
    span = make_span(options["only"], options["first"], options["last"])
    _check_directories(options)
    settings = load_settings(options["settings_path"])
    keys = _get_key_file(options["keys"], options["out"])
    small = is_small_input(options["logs"], span.widen(before=settings.look_back_days))
    with ProgressReporter() as progress, _open_analysis(options, progress, small=small) as session:
        from analytics.nightly import NightlyRequest, run_nightly

        request = NightlyRequest(
            logs=options["logs"],
            out=options["out"].rstrip("/"),
            span=span,
            settings=settings,
            keys=str(keys),
            textfile=options["textfile"],
            allow_empty=options["allow_empty"],
            keep_free=options["keep_free"],
            explain=options["explain"],
        )
        outcome = run_nightly(session, request, progress.print, report_status=progress.set_status)
    return _report_outcome(outcome, options["show"], options["as_json"])


def _check_directories(options: Mapping[str, Any]) -> None:
    """
    Check local paths before Spark starts.

    :raise UsageError: one does not exist, or is not writable.
    """
    if _uses_local_paths(options):
        check_readable_directories("--logs", options["logs"])
        check_writable_directory("--out", options["out"])
    if options["scratch"]:
        check_writable_directory("--scratch", options["scratch"])
    if options["textfile"]:
        check_writable_directory("--textfile: directory", str(Path(options["textfile"]).absolute().parent))


def _uses_local_paths(options: Mapping[str, Any]) -> bool:
    """Whether paths without a scheme are local."""
    return options["engine"] == "duckdb" or (not is_spark_submit() and is_local_master(options["master"] or "local"))


def _report_outcome(outcome: NightlyOutcome, show: bool, as_json: bool) -> int:
    for warning in outcome.warnings:
        click.echo(f"warning: {warning}", err=True)
    for error in outcome.integrity_errors:
        click.echo(f"integrity error: {error}", err=True)
    if as_json:
        print_json(
            {
                "run_id": outcome.run_id,
                "exit_status": outcome.exit_status,
                "report": outcome.report_path or None,
                "integrity_errors": outcome.integrity_errors,
                "warnings": outcome.warnings,
            }
        )
    elif outcome.report_path:
        click.echo(outcome.report_path)
    path = get_local_path(outcome.report_path) if outcome.report_path else None
    if show and path:
        webbrowser.open(path.absolute().as_uri())
    return outcome.exit_status


@click.command()
@_out_option
@click.option(
    "--logs",
    metavar="DIR",
    multiple=True,
    shell_complete=_complete_directory,
    help="Also delete expired log segments in DIR that have been analysed; may be repeated.",
)
@_settings_option
@click.option("--dry-run", is_flag=True, help="Print what would be deleted; delete nothing.")
@add_spark_options
@_json_option
def prune(**options: Any) -> None:
    """Delete expired tables, reports and log segments."""
    settings = load_settings(options["settings_path"])
    if _uses_local_paths(options):
        check_readable_directories("--out", [options["out"]])
        check_readable_directories("--logs", options["logs"])
    if options["scratch"]:
        check_writable_directory("--scratch", options["scratch"])
    items: list[ExpiredItem] = []
    try:
        _find_and_delete(options, settings, items.append)
    except BaseException:
        if items:  # they are gone, whatever stopped the rest
            _print_items(items, options["dry_run"], options["as_json"])
        raise
    _print_items(items, options["dry_run"], options["as_json"])


def _find_and_delete(
    options: Mapping[str, Any], settings: Settings, report_item: Callable[[ExpiredItem], None]
) -> None:
    if _uses_local_paths(options) and all(get_local_path(url) for url in (options["out"], *options["logs"])):
        options = {**options, "engine": "duckdb"}  # nothing of this needs Spark
    with ProgressReporter() as progress, _open_analysis(options, progress) as session:
        from analytics.jobs import JOBS
        from analytics.reading.segments import discover_segments
        from analytics.run_plan import load_read_segments
        from analytics.writing.retention import prune_expired
        from analytics.writing.warehouse import Warehouse

        files, out = session.files, options["out"].rstrip("/")
        warehouse = Warehouse(session.database, files, out, local=f"{session.scratch}/copies")
        progress.set_status("searching expired items")
        found = discover_segments(files, options["logs"]).segments if options["logs"] else []
        known = load_read_segments(warehouse, {segment.batch for segment in found})
        prune_expired(
            warehouse, files, out, settings, JOBS, found, known, options["dry_run"], report_item=report_item
        )


def _print_items(items: Sequence[ExpiredItem], dry_run: bool, as_json: bool) -> None:
    if as_json:
        print_json({"dry_run": dry_run, "items": [asdict(item) for item in items]})
        return
    done = "would delete" if dry_run else "deleted"
    for item in items:
        click.echo(f"{done} {item.what}: {item.path}")
    click.echo(f"{done} {len(items)} item{'s' * (len(items) != 1)}")


@click.command()
@click.option(
    "--dir",
    "directory",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for the logs.",
)
@click.option(
    "--from", "first", metavar="DAY", type=parse_day, help="First day. By default, the last day is yesterday."
)
@click.option("--days", default=7, show_default=True, type=click.IntRange(1, 400), help="Days to generate.")
@click.option("--messages", default=1500, show_default=True, type=click.IntRange(1), help="Messages per day.")
@click.option("--seed", default=1, show_default=True, help="Random seed; equal seeds give equal logs.")
@click.option(
    "--incidents/--no-incidents", default=True, show_default=True, help="Include incidents such as a crash."
)
@_json_option
def sample(
    directory: Path, first: date | None, days: int, messages: int, seed: int, incidents: bool, as_json: bool
) -> None:
    """Generate logs in the daemon's format."""
    check_writable_directory("--dir", str(directory))
    begin = first or get_today() - timedelta(days)
    truth = _generate_sample(directory, SampleSpec(begin, days, seed, messages_per_day=messages, incidents=incidents))
    rows = [
        {"day": day, "lines": facts.lines, "accepted": facts.ledger.accepted, "acknowledged": facts.ledger.acked}
        for day, facts in truth.days.items()
    ]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        click.echo(
            f"{row['day']} {row['lines']} lines, {row['accepted']} messages accepted,"
            f" {row['acknowledged']} acknowledged"
        )


@click.command()
@click.option("--scale", default=16.0, show_default=True, help="Size of the input, in units of 600,000 log lines.")
@click.option(
    "--repeat", default=3, show_default=True, type=click.IntRange(1), help="Repetitions; medians are reported."
)
@click.option(
    "--work",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for generated logs, which later runs reuse. Default: a temporary one.",
)
@click.option("--quick", is_flag=True, help="Run once with little input; speed and memory are not judged.")
@_json_option
def goals(scale: float, repeat: int, work: Path | None, quick: bool, as_json: bool) -> int:
    """
    Benchmark the analysis against its targets.

    Measures speed, memory and exactness. Takes half an hour on an otherwise idle machine.
    """
    require_packages()
    from analytics.benchmark import run_benchmark

    directory = work or Path(tempfile.mkdtemp(prefix="mediatord-analytics-goals-"))
    with ProgressReporter() as progress:
        progress.set_status("measuring")
        results, measurements = run_benchmark(directory, scale, repeat, quick=quick, report=progress.print)
    if as_json:
        print_json(
            {"targets": [asdict(result) for result in results], "measurements": asdict(measurements)},
        )
    else:
        for line in (*(result.format_line() for result in results), *measurements.format_details()):
            click.echo(line)
    return 0 if all(result.met is not False for result in results) else EXIT_FAILED


@click.command()
@_json_option
def settings(as_json: bool) -> None:
    """Print a settings file with the defaults."""
    if as_json:
        print_json(Settings().model_dump())
    else:
        click.echo(render_default_settings(), nl=False)


def _complete_table(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    from analytics.schema import TABLES

    return [name for name in ("events", "line", *TABLES) if name.startswith(incomplete)]


@click.command()
@click.argument("table", default="events", shell_complete=_complete_table)
@_json_option
def schema(table: str, as_json: bool) -> None:
    """
    Print the columns of a table.

    TABLE defaults to events. For `line`, prints the JSON Schema of a log line.
    """
    from analytics.schema import TABLES, make_events_table
    from mediatord.observability.event_schema import build_json_schema

    if table == "line":
        print_json(build_json_schema())
        return
    tables = {"events": make_events_table(), **TABLES}
    if table not in tables:
        raise click.BadParameter(f"no table {table!r}; expected one of line, {', '.join(tables)}", param_hint="TABLE")
    found = tables[table]
    if as_json:
        print_json(
            {
                "table": found.name,
                "meaning": found.meaning,
                "key": found.key,
                "private": found.private,
                "columns": [asdict(column) for column in found.columns],
            }
        )
        return
    for column in found.columns:
        click.echo(f"{column.name:<20} {column.type:<10} {column.meaning}")


@click.group()
def pseudonyms() -> None:
    """Manage pseudonym keys."""


@pseudonyms.command("list")
@_key_file_option
@_json_option
def list_epochs(keys: Path, as_json: bool) -> None:
    """
    List key epochs.

    Prints the number, the first and last day, and whether the key is kept or destroyed.
    """
    rows = [
        {
            "epoch": epoch.number,
            "first_day": epoch.first,
            "last_day": epoch.last,
            "key": "kept" if epoch.secret else "destroyed",
        }
        for epoch in _open_key_file(keys).list_epochs()
    ]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        click.echo(f"{row['epoch']:>6} {row['first_day']} {row['last_day']} {row['key']}")


@pseudonyms.command()
@_key_file_option
@click.argument("epoch", type=int)
def forget(keys: Path, epoch: int) -> None:
    """
    Destroy the key of an epoch.

    Its pseudonyms can no longer be linked to identifiers. EPOCH is a number that `pseudonyms list` prints.
    """
    _open_key_file(keys).destroy_key(epoch)
    click.echo(f"destroyed the key of epoch {epoch}")


def _open_key_file(keys: Path) -> PseudonymKeyFile:
    from analytics.privacy import PseudonymKeyFile

    return PseudonymKeyFile(keys, Settings().pseudonym_days)


COMMANDS = (nightly, prune, demo, goals, sample, pseudonyms, schema, settings)


_PROGRAM_NAME = "mediatord-analytics"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=_PROGRAM_NAME, message="%(prog)s %(version)s")
def cli() -> None:
    """Analyse a mediator's event logs: write tables, a report, and metrics for Prometheus."""


for command in COMMANDS:
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a subcommand and exit. :param arguments: arguments; by default those of the process."""
    sys.exit(_run_command(sys.argv[1:] if arguments is None else list(arguments)))


def _run_command(arguments: list[str]) -> int:
    debug = "--debug" in arguments
    # Libraries log warnings, some about every call that a signal interrupts.
    logging.basicConfig(handlers=[logging.StreamHandler() if debug else logging.NullHandler()])
    try:
        with STOP_HANDLER.handle_signals():
            status = cli.main(arguments, prog_name=_PROGRAM_NAME, standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return EXIT_USAGE
    except click.ClickException as error:
        return _print_error(error.format_message(), error.exit_code)
    except StoppedBySignal as stopped:
        return _print_error(str(stopped), stopped.exit_status)
    except Exception as error:
        return _report_failure(error, debug)


def _report_failure(error: Exception, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    if isinstance(error, JavaNotFound):
        click.echo(f"{_PROGRAM_NAME}: {error}", err=True)
        return error.exit_status
    if isinstance(error, AnalyticsError):
        return _print_error(str(error), error.exit_status)
    if isinstance(error, OSError) and error.filename:
        return _print_error(f"{error.filename}: {error.strerror}", EXIT_FAILED)
    return _print_error(f"{type(error).__name__}: {find_root_cause(error)}", EXIT_FAILED)


def _print_error(text: str, status: int) -> int:
    click.echo(f"{_PROGRAM_NAME}: {' '.join(text.split())}", err=True)
    return status
