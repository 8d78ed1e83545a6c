"""
A nightly run: discover segments, plan, ingest, run all jobs, check integrity, write the report, publish atomically.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from analytics.database import Database, Row
from analytics.engine import AnalysisSession
from analytics.errors import (
    EXIT_FAILED,
    EXIT_INTEGRITY,
    EXIT_NO_INPUT,
    EXIT_OK,
    STOP_HANDLER,
    AnalyticsError,
    StopHandler,
    find_root_cause,
)
from analytics.files import FileSystem
from analytics.job import EVENT_HISTORY_DAYS, Job, JobRun, Span
from analytics.reading.segments import ReadSegment, make_segment_warnings
from analytics.run_plan import (
    RunPlan,
    check_disk_space,
    check_events_exist,
    estimate_disk_needs,
    find_integrity_errors,
    get_computed_span,
    load_read_segments,
    make_backfill_warnings,
    make_plan,
    stage_input,
)
from analytics.schema import TABLES, Table
from analytics.settings import Settings
from analytics.writing.retention import create_read_markers, list_read_stems, update_read_markers
from analytics.writing.runs import (
    JobResult,
    RunInfo,
    RunManifest,
    describe_changes,
    hold_run_lock,
    load_last_manifest,
    make_manifest_path,
    make_run_id,
    recover_publication,
)
from analytics.writing.warehouse import (
    ALL_TABLES,
    COMPUTED_DAYS_TABLE,
    TableMismatchError,
    Warehouse,
    make_table_query,
)

if TYPE_CHECKING:
    from analytics.reading.segments import Discovery, Segment

PseudonymizeRows = Callable[[Table, Sequence[Row]], Sequence[Row]]


def _ignore(text: str) -> None:
    """Discard a status."""


def run_job(warehouse: Warehouse, run: JobRun, job: Job, pseudonymize: PseudonymizeRows) -> JobResult:
    """
    Stage the tables of a job, after those of the jobs whose tables it reads.

    :param pseudonymize: replaces identifiers in the rows of a table by pseudonyms.
    :raise AnalyticsError: the job failed.
    :raise TableMismatchError: the job returned undeclared tables or columns.
    """
    started = perf_counter()
    try:
        made = job.make_tables(run)
        if set(made) != set(job.writes):
            raise TableMismatchError(f"{job.name}: returned {sorted(made)}, declared {sorted(job.writes)}")
        rows = {}
        for name in job.writes:
            table, content = TABLES[name], made[name]
            if table.pseudonyms:
                query = make_table_query(run.database, table, content, job.name)
                content = pseudonymize(table, run.database.rows(query))
            rows[name] = warehouse.stage(name, content, run.span, job.name)
    except (AnalyticsError, TableMismatchError):
        raise
    except Exception as error:
        raise AnalyticsError(f"job {job.name}: {find_root_cause(error)}") from error
    return JobResult(job.name, rows, round(perf_counter() - started, 3))


# Tables that scans read.
_SCANNED_TABLES = ("events", "open")


def widen_by_history(name: str, span: Span, jobs: Sequence[Job]) -> Span:
    """The days of a table that these jobs and the reports of a span read."""
    from analytics.report.content import REPORT_QUERIES

    if name == "events":
        return span.widen(before=EVENT_HISTORY_DAYS)
    query = REPORT_QUERIES.get(name)
    days = [job.history_days.get(name, 0) for job in jobs]
    return span.widen(before=max([*days, query.days_before if query else 0]))


BACKFILL_COMMAND = "mediatord-analytics nightly"

ProgressCallback = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class NightlyRequest:
    """
    :param logs: directories of log segments.
    :param out: directory of results.
    :param span: requested days.
    :param keys: pseudonym key file.
    :param textfile: file for Prometheus; None: none.
    :param allow_empty: days without any input are not an error.
    :param keep_free: bytes that must stay free on disk.
    :param explain: report the query plan of each scan.
    :param stop: tells whether a signal was received.
    """

    logs: Sequence[str]
    out: str
    span: Span
    settings: Settings
    keys: str
    textfile: str | None = None
    allow_empty: bool = False
    keep_free: int = 0
    explain: bool = False
    stop: StopHandler = STOP_HANDLER


@dataclass(frozen=True, slots=True)
class NightlyOutcome:
    """
    :param exit_status: of the process.
    :param report_path: of the last requested day; empty if nothing was written.
    :param integrity_errors: sentences about lost messages and log lines.
    :param warnings: sentences for the operator.
    """

    exit_status: int
    run_id: str
    report_path: str = ""
    integrity_errors: Sequence[str] = ()
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class NightlySteps:
    """
    Steps of a run; tests replace some.

    :param report: writes the report of a day into a directory.
    """

    discover: Callable[[FileSystem, Sequence[str]], Discovery]
    ingest: Callable[[AnalysisSession, Sequence[Segment], str], list[Row]]
    jobs: Sequence[Job]
    pseudonymize: Callable[[NightlyRequest], PseudonymizeRows]
    report: Callable[[FileSystem, Database, str, date, Settings, RunInfo], str]
    textfile: Callable[[Database, date, str, RunInfo], object]


def make_default_steps() -> NightlySteps:
    """The production steps."""
    from analytics.jobs import JOBS
    from analytics.privacy import PseudonymKeyFile, pseudonymize_table
    from analytics.reading.ingest import ingest_segments
    from analytics.reading.segments import discover_segments
    from analytics.report.outputs import write_report, write_textfile

    def pseudonymize(request: NightlyRequest) -> PseudonymizeRows:
        pseudonyms = PseudonymKeyFile(Path(request.keys), request.settings.pseudonym_days)
        return lambda table, rows: pseudonymize_table(table, rows, request.settings, pseudonyms)

    return NightlySteps(discover_segments, ingest_segments, JOBS, pseudonymize, write_report, write_textfile)


def run_nightly(
    session: AnalysisSession,
    request: NightlyRequest,
    progress: ProgressCallback,
    steps: NightlySteps | None = None,
    report_status: ProgressCallback = _ignore,
) -> NightlyOutcome:
    """
    Analyse the requested days, and earlier days that late input changed.

    Published results stay unchanged until everything is done; then they are replaced atomically.

    :param progress: receives a line for each completed step.
    :param report_status: receives the name of each step that starts.
    :raise AnalyticsError: the run failed, or another run is active.
    :raise StoppedBySignal: a signal was received; nothing was published, or everything.
    """
    run_id = make_run_id(datetime.now(UTC))
    with hold_run_lock(session.files, request.out, run_id):
        if recover_publication(session.files, request.out):
            progress("completed an interrupted publication")
        return _NightlyRun(session, request, progress, report_status, steps or make_default_steps(), run_id).execute()


class _NightlyRun:
    def __init__(
        self,
        session: AnalysisSession,
        request: NightlyRequest,
        progress: ProgressCallback,
        report_status: ProgressCallback,
        steps: NightlySteps,
        run_id: str,
    ) -> None:
        self._session = session
        self._files = session.files
        self._request = request
        self._progress = progress
        self._report_status = report_status
        self._steps = steps
        self._warehouse = Warehouse(session.database, session.files, request.out, run_id, f"{session.scratch}/copies")
        self._manifest = RunManifest(run_id, request.span, request.span, request.settings)
        self._known: Mapping[str, ReadSegment] = {}
        self._status = EXIT_OK
        self._count = 0
        self._began = perf_counter()

    def execute(self) -> NightlyOutcome:
        request, manifest = self._request, self._manifest
        with self._step("discover"):
            found = self._steps.discover(self._files, request.logs)
            manifest.found, manifest.warnings = dict(found.findings), list(found.warnings)
            # Also if this run fails: daemons then know that an analysis exists.
            create_read_markers(found.segments)
            todo = self._make_plan(found.segments)
        if not self._has_input(found.segments):
            days = " to ".join(dict.fromkeys([str(request.span.first), str(request.span.last)]))
            manifest.warnings.insert(0, f"no log segments for {days} in {', '.join(request.logs)}")
            self._status = EXIT_OK if request.allow_empty else EXIT_NO_INPUT
            if not todo.batches:
                return NightlyOutcome(self._status, manifest.run_id, warnings=manifest.warnings)
            self._request_earlier_days(todo)
            todo = self._make_plan(found.segments)
        return self._update_markers(self._run_plan(todo), found.segments)

    def _update_markers(self, outcome: NightlyOutcome, found: Sequence[Segment]) -> NightlyOutcome:
        """Record in read markers which segments are loaded."""
        with self._step("marker"):
            read = list_read_stems(self._list_due_segments(found), self._known, self._manifest.inputs)
            warnings = update_read_markers(found, read)
        return replace(outcome, warnings=[*outcome.warnings, *warnings])

    def _list_due_segments(self, found: Sequence[Segment]) -> list[Segment]:
        return [segment for segment in found if segment.batch <= self._request.span.last]

    def _request_earlier_days(self, todo: RunPlan) -> None:
        """
        Extend the request to earlier days with late segments within the look-back, and to all days computed since.
        """
        first, asked = todo.batches[-1], self._request.span
        based = [day for day in self._warehouse.days(COMPUTED_DAYS_TABLE) if first < day <= asked.last]
        span = Span(first, max([first, *based]))
        self._request = replace(self._request, span=span)
        self._manifest.requested_span = self._manifest.span = span

    def _run_plan(self, todo: RunPlan) -> NightlyOutcome:
        request = self._request
        check_disk_space(
            self._files,
            estimate_disk_needs(todo.read),
            request.out,
            self._session.scratch,
            request.keep_free,
        )
        try:
            outcome, newest = self._write_results(todo)
        except BaseException as error:
            self._record_failure(error)
            raise
        if request.textfile is not None and newest:
            # From here on only the textfile can fail.
            with self._step("textfile"):
                self._open_tables(request.span)
                self._steps.textfile(
                    self._session.database, request.span.last, request.textfile, self._make_run_info()
                )
        return outcome

    def _make_plan(self, segments: Sequence[Segment]) -> RunPlan:
        segments = self._list_due_segments(segments)
        self._known = load_read_segments(self._warehouse, {segment.batch for segment in segments})
        return make_plan(self._request.span, self._request.settings.look_back_days, segments, self._known)

    def _has_input(self, segments: Sequence[Segment]) -> bool:
        span = self._request.span
        return any(segment.batch in span for segment in segments) or any(
            day in span for day in self._warehouse.days("events")
        )

    def _write_results(self, todo: RunPlan) -> tuple[NightlyOutcome, bool]:
        """Write all results; also return whether no later day exists."""
        manifest = self._manifest
        affected = self._ingest(todo)
        span = manifest.span = get_computed_span(manifest.requested_span, todo.window, affected)
        check_events_exist(self._warehouse, span)
        manifest.changes = describe_changes(
            load_last_manifest(self._files, self._request.out), self._request.settings
        )
        later = [day for day in self._warehouse.days(COMPUTED_DAYS_TABLE) if day > span.last]
        manifest.warnings += make_backfill_warnings(todo, span, affected, later, BACKFILL_COMMAND)
        self._run_jobs(span)
        with self._step("verdict"):
            manifest.integrity_errors = find_integrity_errors(self._session.database, span)
        with self._step("report"):
            reports = self._write_reports()
        return self._publish(reports), not later

    def _run_jobs(self, span: Span) -> None:
        report_plan = self._progress if self._request.explain else None
        engine = self._session.make_engine(self._warehouse.staging, report_plan)
        days = self._open_tables(span)
        for name in _SCANNED_TABLES:
            engine.read(ALL_TABLES[name], self._warehouse.list_files(name, days[name]))
        run = JobRun(self._session.database, engine, self._request.settings, span)
        pseudonymize = self._steps.pseudonymize(self._request)
        for job in self._steps.jobs:
            self._request.stop.check()
            self._report_status(self._format_step(self._count + 1, job.name))
            result = run_job(self._warehouse, run, job, pseudonymize)
            # Only now: a job reads its own tables of earlier days only.
            for name in job.writes:
                self._warehouse.open_table(name, days[name])
            self._manifest.jobs.append(result)
            self._report_step(result.job, result.seconds)

    def _open_tables(self, span: Span) -> dict[str, Span]:
        """Let the database read all tables. :return: the days of each."""
        days = {name: widen_by_history(name, span, self._steps.jobs) for name in ALL_TABLES}
        for name in days:
            # Scans of Spark read events themselves, wherever they are.
            if name != "events" or self._session.spark is None:
                self._warehouse.open_table(name, days[name])
        return days

    def _ingest(self, todo: RunPlan) -> set[date]:
        """:return: days with events of read segments, before or after ingest."""
        warehouse, manifest = self._warehouse, self._manifest
        if not todo.batches:
            return set()
        with self._step("ingest"):
            staged = stage_input(
                warehouse,
                self._session.database,
                todo,
                self._known,
                lambda segments: self._steps.ingest(self._session, segments, warehouse.staging),
            )
            manifest.inputs = list(staged.read)
            manifest.kept = {str(batch): n for batch, n in staged.kept.items()}
            manifest.warnings += make_segment_warnings([*staged.read, *staged.shrunk])
        return staged.days

    def _write_reports(self) -> list[str]:
        """Write the report of every computed day."""
        days = self._manifest.span.days
        for day in days:
            self._request.stop.check()
            self._report_status(self._format_step(self._count + 1, f"report of {day}"))
            self._steps.report(
                self._files,
                self._session.database,
                self._warehouse.staging,
                day,
                self._request.settings,
                self._make_run_info(),
            )
        return [f"report/{day}" for day in days]

    def _publish(self, reports: Sequence[str]) -> NightlyOutcome:
        manifest = self._manifest
        status = EXIT_INTEGRITY if manifest.integrity_errors else self._status
        with self._step("publish"):
            path = make_manifest_path(self._request.out, manifest.run_id)
            self._warehouse.publish(path, manifest.encode(status), reports)
        report = f"{self._request.out}/report/{manifest.requested_span.last}/index.html"
        return NightlyOutcome(status, manifest.run_id, report, manifest.integrity_errors, manifest.warnings)

    def _make_run_info(self) -> RunInfo:
        manifest = self._manifest
        return RunInfo(
            version=manifest.code_version,
            span=manifest.span,
            now=datetime.now(UTC),
            final_until=manifest.requested_span.last - timedelta(manifest.settings.look_back_days),
            duration_s=round(perf_counter() - self._began, 3),
        )

    def _record_failure(self, error: BaseException) -> None:
        """Write the manifest of a failed run, if there is disk space and Java still runs."""
        path, stopped = make_manifest_path(self._request.out, self._manifest.run_id), self._request.stop.first_signal
        # Further errors would hide the first.
        with suppress(Exception):
            self._warehouse.discard_staged()
        with suppress(Exception):
            status, text = (stopped.exit_status, str(stopped)) if stopped else (EXIT_FAILED, find_root_cause(error))
            # An existing manifest means that everything was published.
            if not self._files.exists(path):
                self._files.write(path, self._manifest.encode(status, text))

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        self._request.stop.check()
        self._report_status(self._format_step(self._count + 1, name))
        started = perf_counter()
        try:
            yield
        except (AnalyticsError, TableMismatchError):
            raise
        except Exception as error:
            raise AnalyticsError(f"{name}: {find_root_cause(error)}") from error
        self._manifest.seconds[name] = round(perf_counter() - started, 3)
        self._report_step(name, self._manifest.seconds[name])

    def _report_step(self, name: str, seconds: float) -> None:
        self._count += 1
        self._progress(f"{self._format_step(self._count, name):<24} {seconds:6.1f} s")

    def _format_step(self, number: int, name: str) -> str:
        total = len(self._steps.jobs) + 6 + (self._request.textfile is not None)
        return f"[{number:2}/{total}] {name}"
