"""A run: discover, plan, ingest, all jobs, the verdict, the report, and then all of it published at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from analytics import disk, intake, lock, markers, plan, runs, verdict
from analytics.declared import TableMistake
from analytics.errors import BROKEN, FAILED, FINE, NO_INPUT, AnalyticsError, reason
from analytics.facts import RunFacts
from analytics.files import Files
from analytics.job import Job, Span
from analytics.journal import recover
from analytics.pipeline import Disclose, Pipeline
from analytics.settings import Settings
from analytics.stop import STOP, Stop
from analytics.warehouse import COMPUTED, Warehouse

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from analytics.segments import Discovery, Segment

COMMAND = "python -m analytics nightly"

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Request:
    """
    :param logs: directories of log segments.
    :param out: directory of results.
    :param span: the days asked for.
    :param scratch: where Spark spills to.
    :param keys: file of the keys that pseudonyms are made with.
    :param textfile: file for Prometheus; None: none.
    :param allow_empty: days without any input are fine.
    :param keep_free: bytes that are to stay free on disk.
    :param explain: tell the plan of each table.
    :param jobs_at_a_time: how many jobs run at the same time.
    :param stop: whether a signal came.
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
    jobs_at_a_time: int = 3
    stop: Stop = STOP


@dataclass(frozen=True, slots=True)
class Outcome:
    """
    :param exit_status: of the process.
    :param report_path: of the last day asked for; empty if nothing was written.
    :param broken: what is wrong with the integrity of the logs, as sentences.
    :param warnings: for the operator, as sentences.
    """

    exit_status: int
    run_id: str
    report_path: str = ""
    broken: Sequence[str] = ()
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Steps:
    """
    What a run consists of. The defaults of :func:`run` are the real ones.

    :param report: makes the report of a day in a directory.
    """

    discover: Callable[[Files, Sequence[str]], Discovery]
    ingest: Callable[[SparkSession, Files, Sequence[Segment], str], object]
    jobs: Sequence[Job]
    disclose: Callable[[Request], Disclose]
    report: Callable[[Files, Warehouse, str, date, Settings, RunFacts], str]
    textfile: Callable[[Warehouse, date, str, RunFacts], object]


def real_steps() -> Steps:
    """Those of the installed package."""
    from analytics import ingest, privacy, report, segments, textfile
    from analytics.jobs.catalogue import JOBS

    def disclose(request: Request) -> Disclose:
        pseudonyms = privacy.Pseudonyms(Path(request.keys), request.settings.pseudonym_days)
        return lambda table, frame: privacy.disclose(table, frame, request.settings, pseudonyms)

    return Steps(segments.discover, ingest.ingest, JOBS, disclose, report.write, textfile.write)


def run(
    spark: SparkSession, files: Files, request: Request, progress: Progress, steps: Steps | None = None
) -> Outcome:
    """
    Analyse the days asked for, and those before them that late input changed.

    Until all is done everything published stays as it was, whatever happens; then it is replaced at once.

    :raise AnalyticsError: it failed, or another run is going on.
    :raise Stopped: a signal came, and nothing was published; or all was.
    """
    run_id = runs.new_id(datetime.now(UTC))
    with lock.held(files, request.out, run_id):
        if recover(files, request.out):
            progress("brought an interrupted publication to its end")
        return _Run(spark, files, request, progress, steps or real_steps(), run_id).outcome()


class _Run:
    def __init__(
        self, spark: SparkSession, files: Files, request: Request, progress: Progress, steps: Steps, run_id: str
    ) -> None:
        self._spark = spark
        self._files = files
        self._request = request
        self._progress = progress
        self._steps = steps
        self._warehouse = Warehouse(spark, files, request.out, run_id)
        self._manifest = runs.Manifest(run_id, request.span, request.span, request.settings)
        self._known: Mapping[str, plan.Known] = {}
        self._status = FINE
        self._count = 0
        self._began = perf_counter()

    def outcome(self) -> Outcome:
        request, manifest = self._request, self._manifest
        with self._step("discover"):
            found = self._steps.discover(self._files, request.logs)
            manifest.found, manifest.warnings = dict(found.findings), list(found.warnings)
            # Also if this run fails: from now on daemons know that there is an analysis.
            markers.create_markers(found.segments)
            todo = self._planned(found.segments)
        if not self._has_input(found.segments):
            days = " to ".join(dict.fromkeys([str(request.span.first), str(request.span.last)]))
            manifest.warnings.insert(0, f"no log segments for {days} in {', '.join(request.logs)}")
            self._status = FINE if request.allow_empty else NO_INPUT
            if not todo.batches:
                return Outcome(self._status, manifest.run_id, warnings=manifest.warnings)
            self._ask_for_earlier_days(todo)
            todo = self._planned(found.segments)
        return self._marked(self._made(todo), found.segments)

    def _marked(self, outcome: Outcome, found: Sequence[Segment]) -> Outcome:
        """Tell the daemons which of their segments are in the tables by now."""
        with self._step("marker"):
            read = markers.read_stems(self._planned_segments(found), self._known, self._manifest.inputs)
            warnings = markers.update_markers(found, read)
        return replace(outcome, warnings=[*outcome.warnings, *warnings])

    def _planned_segments(self, found: Sequence[Segment]) -> list[Segment]:
        return [segment for segment in found if segment.batch <= self._request.span.last]

    def _ask_for_earlier_days(self, todo: plan.Plan) -> None:
        """Those up to the last one that late segments of the look-back change, and all that were made since."""
        first, asked = todo.batches[-1], self._request.span
        based = [day for day in self._warehouse.days(COMPUTED) if first < day <= asked.last]
        span = Span(first, max([first, *based]))
        self._request = replace(self._request, span=span)
        self._manifest.asked = self._manifest.span = span

    def _made(self, todo: plan.Plan) -> Outcome:
        request = self._request
        kept_bytes = self._warehouse.event_bytes(batch for batch, stems in todo.kept.items() if stems)
        disk.check(self._files, disk.needs(todo.read, kept_bytes), request.out, request.scratch, request.keep_free)
        try:
            outcome, newest = self._written(todo)
        except BaseException as error:
            self._record(error)
            raise
        if request.textfile is not None and newest:
            # A failure from here on is one of the textfile alone.
            with self._step("textfile"):
                self._steps.textfile(self._warehouse, request.span.last, request.textfile, self._facts())
        return outcome

    def _planned(self, segments: Sequence[Segment]) -> plan.Plan:
        segments = self._planned_segments(segments)
        self._known = plan.known(self._warehouse, {segment.batch for segment in segments})
        return plan.make(self._request.span, self._request.settings.look_back_days, segments, self._known)

    def _has_input(self, segments: Sequence[Segment]) -> bool:
        span = self._request.span
        return any(segment.batch in span for segment in segments) or any(
            day in span for day in self._warehouse.days("events")
        )

    def _written(self, todo: plan.Plan) -> tuple[Outcome, bool]:
        """All that writes to the directory of results; also whether no later day is there."""
        manifest = self._manifest
        affected = self._ingest(todo)
        span = manifest.span = plan.computed(manifest.asked, todo.window, affected)
        plan.check(self._warehouse, span)
        manifest.changes = runs.changes(runs.last(self._files, self._request.out), self._request.settings)
        later = [day for day in self._warehouse.days(COMPUTED) if day > span.last]
        manifest.warnings += plan.warnings(todo, span, affected, later, COMMAND)
        pipeline = Pipeline(
            self._warehouse,
            self._request.settings,
            span,
            self._steps.disclose(self._request),
            self._progress if self._request.explain else None,
        )
        for made in pipeline.run(self._steps.jobs, 1 if self._request.explain else self._request.jobs_at_a_time):
            manifest.jobs.append(made)
            self._tell(made.job, made.seconds)
        self._spark.catalog.clearCache()
        with self._step("verdict"):
            manifest.broken = verdict.broken(self._warehouse, span)
        with self._step("report"):
            reports = self._reports()
        return self._published(reports), not later

    def _ingest(self, todo: plan.Plan) -> set[date]:
        """:return: days that have events of changed batches, before or now."""
        warehouse, manifest = self._warehouse, self._manifest
        if not todo.batches:
            return set()
        with self._step("ingest"):
            warehouse.staged_batches(todo.batches)
            todo, looks = self._staged(todo)
            for batch, stems in todo.kept.items():
                if stems:
                    warehouse.keep(batch, stems, looks)
                    manifest.kept[str(batch)] = len(stems)
            manifest.warnings += intake.warnings([*manifest.inputs, *looks])
            before = warehouse.event_days(todo.batches)
        return before | warehouse.event_days(todo.batches, staged=True)

    def _staged(self, todo: plan.Plan) -> tuple[plan.Plan, list[dict[str, Any]]]:
        """
        Ingest, and once more without the segments that show less than was read of them before. That is rare.

        :return: with those among the kept ones, and as which rows of `inputs` they were found, if they were.
        """
        looks: list[dict[str, Any]] = []
        while todo.read:
            self._steps.ingest(self._spark, self._files, todo.read, self._warehouse.staging)
            rows = self._warehouse.inputs({segment.stem for segment in todo.read})
            shrunk = plan.shrunk(rows, self._known)
            if not shrunk:
                self._manifest.inputs = rows
                break
            looks += [row for row in shrunk if row["state"] != intake.VANISHED]
            self._warehouse.discard()
            todo = todo.keeping({row["stem"] for row in shrunk})
        return todo, looks

    def _reports(self) -> list[str]:
        """Of the last day, and of days before it that have one already."""
        out, span = self._request.out, self._manifest.span
        there = set(self._files.names(f"{out}/report") if self._files.exists(f"{out}/report") else ())
        days = [day for day in span.days if str(day) in there and day != span.last] + [span.last]
        for day in days:
            self._steps.report(
                self._files, self._warehouse, self._warehouse.staging, day, self._request.settings, self._facts()
            )
        return [f"report/{day}" for day in days]

    def _published(self, reports: Sequence[str]) -> Outcome:
        manifest = self._manifest
        status = BROKEN if manifest.broken else self._status
        with self._step("publish"):
            path = runs.path(self._request.out, manifest.run_id)
            self._warehouse.publish(path, manifest.encode(status), reports)
        report = f"{self._request.out}/report/{manifest.asked.last}/index.html"
        return Outcome(status, manifest.run_id, report, manifest.broken, manifest.warnings)

    def _facts(self) -> RunFacts:
        manifest = self._manifest
        return RunFacts(
            version=manifest.code_version,
            span=manifest.span,
            now=datetime.now(UTC),
            final_until=manifest.asked.last - timedelta(manifest.settings.look_back_days),
            duration_s=round(perf_counter() - self._began, 3),
        )

    def _record(self, error: BaseException) -> None:
        """A failed run leaves its manifest, if there is room for it and Java still there, and nothing else."""
        path, stopped = runs.path(self._request.out, self._manifest.run_id), self._request.stop.came
        # What comes on top of the error would only hide it.
        with suppress(Exception):
            self._warehouse.discard()
        with suppress(Exception):
            status, text = (stopped.exit_status, str(stopped)) if stopped else (FAILED, reason(error))
            # One that is there says that all was published.
            if not self._files.exists(path):
                self._files.write(path, self._manifest.encode(status, text))

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        self._request.stop.check()
        began = perf_counter()
        try:
            yield
        except (AnalyticsError, TableMistake):
            raise
        except Exception as error:
            raise AnalyticsError(f"{name}: {reason(error)}") from error
        self._manifest.seconds[name] = round(perf_counter() - began, 3)
        self._tell(name, self._manifest.seconds[name])

    def _tell(self, name: str, seconds: float) -> None:
        self._count += 1
        total = len(self._steps.jobs) + 6 + (self._request.textfile is not None)
        self._progress(f"[{self._count:2}/{total}] {name:<16} {seconds:6.1f} s")
