"""
A nightly run: discover segments, plan, ingest, run all jobs, check integrity, write the report, publish atomically.

Jobs run as soon as the tables that they read are staged, several at a time.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

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
from analytics.job import Job, Span
from analytics.reading.files import FileSystem
from analytics.reading.segments import VANISHED, ReadSegment, make_segment_warnings
from analytics.run_plan import (
    RunPlan,
    check_disk_space,
    check_events_exist,
    estimate_disk_needs,
    find_integrity_errors,
    find_shrunk_segments,
    get_computed_span,
    load_read_segments,
    make_backfill_warnings,
    make_plan,
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
from analytics.writing.warehouse import COMPUTED_DAYS_TABLE, TableMismatchError, Warehouse

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from analytics.reading.segments import Discovery, Segment

Pseudonymize = Callable[[Table, "DataFrame"], "DataFrame"]


def _ignore(text: str) -> None:
    """Discard a status."""


@dataclass(frozen=True, slots=True)
class JobRunner:
    """
    :param pseudonymize: replaces identifiers in a table by pseudonyms.
    :param report_plan: receives the query plan of each table; None: plans are not computed.
    :param report_status: receives the names of the running jobs.
    """

    warehouse: Warehouse
    settings: Settings
    span: Span
    pseudonymize: Pseudonymize
    report_plan: Callable[[str], None] | None = None
    report_status: Callable[[str], None] = _ignore

    def run(self, jobs: Sequence[Job], at_a_time: int) -> Iterator[JobResult]:
        """
        Stage the tables of these jobs; yield results as jobs end. Jobs are ordered after those whose tables they
        read.

        :raise AnalyticsError: a job failed; running jobs have ended.
        :raise TableMismatchError: a job returned undeclared tables or columns.
        """
        waiting, running = list(jobs), dict[Future[JobResult], Job]()
        threads = ThreadPoolExecutor(at_a_time, "job")
        try:
            while waiting or running:
                # Submit only as many as can start: an earlier job may become ready before the next one ends.
                for job in _list_ready_jobs(waiting, list(running.values()))[: at_a_time - len(running)]:
                    waiting.remove(job)
                    running[threads.submit(self._run_job, job)] = job
                self.report_status(", ".join(sorted(job.name for job in running.values())))
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    del running[done]
                    yield done.result()
        finally:
            threads.shutdown(cancel_futures=True)

    def _run_job(self, job: Job) -> JobResult:
        started = perf_counter()
        try:
            results = job.transform(self._read_frames(job), self.settings, self.span)
            if set(results) != set(job.writes):
                raise TableMismatchError(f"{job.name}: returned {sorted(results)}, declared {sorted(job.writes)}")
            rows = {name: self._stage_table(job, name, results[name]) for name in job.writes}
        except (AnalyticsError, TableMismatchError):
            raise
        except Exception as error:
            raise AnalyticsError(f"job {job.name}: {find_root_cause(error)}") from error
        return JobResult(job.name, rows, round(perf_counter() - started, 3))

    def _read_frames(self, job: Job) -> dict[str, DataFrame]:
        first, last = self.span.first, self.span.last
        spans = {name: self.span for name in job.reads}
        for name, days in job.history_days.items():
            before = Span(first, first).widen(before=days)
            spans[name] = before.widen(after=-1) if name in job.writes else Span(before.first, last)
        return {name: self.warehouse.read(name, span) for name, span in spans.items()}

    def _stage_table(self, job: Job, name: str, frame: DataFrame) -> int:
        table = TABLES[name]
        if self.report_plan is not None:
            self.report_plan(f"{job.name}: {name}\n{_format_query_plan(frame)}")
        if table.pseudonyms:
            frame = self.pseudonymize(table, frame)
        return self.warehouse.stage(name, frame, self.span, job.name)


def _list_ready_jobs(waiting: Sequence[Job], running: Sequence[Job]) -> list[Job]:
    """Jobs whose input tables are complete."""
    ready, unwritten = [], {name for job in running for name in job.writes}
    for job in waiting:
        if unwritten.isdisjoint({*job.reads, *job.history_days}):
            ready.append(job)
        unwritten.update(job.writes)
    return ready


def _format_query_plan(frame: DataFrame) -> str:
    with redirect_stdout(io.StringIO()) as output:
        frame.explain("formatted")
    return output.getvalue()


BACKFILL_COMMAND = "mediatord-analytics nightly"

ProgressCallback = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class NightlyRequest:
    """
    :param logs: directories of log segments.
    :param out: directory of results.
    :param span: requested days.
    :param scratch: directory that Spark spills to.
    :param keys: pseudonym key file.
    :param textfile: file for Prometheus; None: none.
    :param allow_empty: days without any input are not an error.
    :param keep_free: bytes that must stay free on disk.
    :param explain: report the query plan of each table.
    :param max_parallel_jobs: maximum number of jobs that run at the same time.
    :param stop: tells whether a signal was received.
    """

    logs: Sequence[str]
    out: str
    span: Span
    settings: Settings
    scratch: str
    keys: str
    textfile: str | None = None
    allow_empty: bool = False
    keep_free: int = 0
    explain: bool = False
    max_parallel_jobs: int = 3
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
    ingest: Callable[[SparkSession, FileSystem, Sequence[Segment], str], object]
    jobs: Sequence[Job]
    pseudonymize: Callable[[NightlyRequest], Pseudonymize]
    report: Callable[[FileSystem, Warehouse, str, date, Settings, RunInfo], str]
    textfile: Callable[[Warehouse, date, str, RunInfo], object]


def make_default_steps() -> NightlySteps:
    """The production steps."""
    from analytics.jobs import JOBS
    from analytics.privacy import PseudonymKeyFile, pseudonymize_table
    from analytics.reading.ingest import ingest_segments
    from analytics.reading.segments import discover_segments
    from analytics.report.outputs import write_report, write_textfile

    def pseudonymize(request: NightlyRequest) -> Pseudonymize:
        pseudonyms = PseudonymKeyFile(Path(request.keys), request.settings.pseudonym_days)
        return lambda table, frame: pseudonymize_table(table, frame, request.settings, pseudonyms)

    return NightlySteps(discover_segments, ingest_segments, JOBS, pseudonymize, write_report, write_textfile)


def run_nightly(
    spark: SparkSession,
    files: FileSystem,
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
    with hold_run_lock(files, request.out, run_id):
        if recover_publication(files, request.out):
            progress("completed an interrupted publication")
        return _NightlyRun(
            spark, files, request, progress, report_status, steps or make_default_steps(), run_id
        ).execute()


class _NightlyRun:
    def __init__(
        self,
        spark: SparkSession,
        files: FileSystem,
        request: NightlyRequest,
        progress: ProgressCallback,
        report_status: ProgressCallback,
        steps: NightlySteps,
        run_id: str,
    ) -> None:
        self._spark = spark
        self._files = files
        self._request = request
        self._progress = progress
        self._report_status = report_status
        self._steps = steps
        self._warehouse = Warehouse(spark, files, request.out, run_id)
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
        kept_bytes = self._warehouse.event_bytes(batch for batch, stems in todo.kept.items() if stems)
        check_disk_space(
            self._files, estimate_disk_needs(todo.read, kept_bytes), request.out, request.scratch, request.keep_free
        )
        try:
            outcome, newest = self._write_results(todo)
        except BaseException as error:
            self._record_failure(error)
            raise
        if request.textfile is not None and newest:
            # From here on only the textfile can fail.
            with self._step("textfile"):
                self._steps.textfile(self._warehouse, request.span.last, request.textfile, self._make_run_info())
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
        runner = JobRunner(
            self._warehouse,
            self._request.settings,
            span,
            self._steps.pseudonymize(self._request),
            self._progress if self._request.explain else None,
            lambda names: self._report_status(self._format_step(self._count + 1, names)),
        )
        for results in runner.run(self._steps.jobs, 1 if self._request.explain else self._request.max_parallel_jobs):
            manifest.jobs.append(results)
            self._report_step(results.job, results.seconds)
        self._spark.catalog.clearCache()
        with self._step("verdict"):
            manifest.integrity_errors = find_integrity_errors(self._warehouse, span)
        with self._step("report"):
            reports = self._write_reports()
        return self._publish(reports), not later

    def _ingest(self, todo: RunPlan) -> set[date]:
        """:return: days with events of changed batches, before or after ingest."""
        warehouse, manifest = self._warehouse, self._manifest
        if not todo.batches:
            return set()
        with self._step("ingest"):
            warehouse.mark_batches_staged(todo.batches)
            todo, file_rows = self._stage_segments(todo)
            for batch, stems in todo.kept.items():
                if stems:
                    warehouse.carry_over(batch, stems, file_rows)
                    manifest.kept[str(batch)] = len(stems)
            manifest.warnings += make_segment_warnings([*manifest.inputs, *file_rows])
            before = warehouse.event_days(todo.batches)
        return before | warehouse.event_days(todo.batches, staged=True)

    def _stage_segments(self, todo: RunPlan) -> tuple[RunPlan, list[dict[str, Any]]]:
        """
        Ingest; repeat without segments that have shrunk since they were loaded, which is rare.

        :return: the plan that keeps the earlier content of those segments, and the rows of `inputs` about them.
        """
        file_rows: list[dict[str, Any]] = []
        while todo.read:
            self._steps.ingest(self._spark, self._files, todo.read, self._warehouse.staging)
            rows = self._warehouse.read_inputs({segment.stem for segment in todo.read})
            shrunk = find_shrunk_segments(rows, self._known)
            if not shrunk:
                self._manifest.inputs = rows
                break
            file_rows += [row for row in shrunk if row["state"] != VANISHED]
            self._warehouse.discard_staged()
            todo = todo.keep_earlier({row["stem"] for row in shrunk})
        return todo, file_rows

    def _write_reports(self) -> list[str]:
        """Write reports of the last day and of earlier days that have one."""
        out, span = self._request.out, self._manifest.span
        there = set(self._files.list_names(f"{out}/report") if self._files.exists(f"{out}/report") else ())
        days = [day for day in span.days if str(day) in there and day != span.last] + [span.last]
        for day in days:
            self._steps.report(
                self._files,
                self._warehouse,
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
