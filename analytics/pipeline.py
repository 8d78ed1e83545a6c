"""Running jobs: each as soon as the tables that it reads are staged, several at a time."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import redirect_stdout
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from analytics.declared import TableMistake
from analytics.errors import AnalyticsError, reason
from analytics.job import Job, Span
from analytics.runs import Made
from analytics.settings import Settings
from analytics.tables import TABLES, Table
from analytics.warehouse import Warehouse

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Disclose = Callable[[Table, "DataFrame"], "DataFrame"]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """
    :param disclose: makes pseudonyms of the identifiers in a table.
    :param explained: is told the plan of each table; None: plans are not asked for.
    """

    warehouse: Warehouse
    settings: Settings
    span: Span
    disclose: Disclose
    explained: Callable[[str], None] | None = None

    def run(self, jobs: Sequence[Job], at_a_time: int) -> Iterator[Made]:
        """
        Stage what these jobs make; yields as they end. Jobs come after those whose tables they read.

        :raise AnalyticsError: a job failed; those that were going on have ended.
        :raise TableMistake: a job made what it should not.
        """
        waiting, going = list(jobs), dict[Future[Made], Job]()
        threads = ThreadPoolExecutor(at_a_time, "job")
        try:
            while waiting or going:
                # No more than can begin: one that comes before the rest may be ready by the time that another ends.
                for job in _ready(waiting, list(going.values()))[: at_a_time - len(going)]:
                    waiting.remove(job)
                    going[threads.submit(self._made, job)] = job
                for done in wait(going, return_when=FIRST_COMPLETED).done:
                    del going[done]
                    yield done.result()
        finally:
            threads.shutdown(cancel_futures=True)

    def _made(self, job: Job) -> Made:
        began = perf_counter()
        try:
            made = job.transform(self._frames(job), self.settings, self.span)
            if set(made) != set(job.makes):
                raise TableMistake(f"{job.name}: made {sorted(made)}, declared {sorted(job.makes)}")
            rows = {name: self._stage(job, name, made[name]) for name in job.makes}
        except (AnalyticsError, TableMistake):
            raise
        except Exception as error:
            raise AnalyticsError(f"job {job.name}: {reason(error)}") from error
        return Made(job.name, rows, round(perf_counter() - began, 3))

    def _frames(self, job: Job) -> dict[str, DataFrame]:
        first, last = self.span.first, self.span.last
        spans = {name: self.span for name in job.reads}
        for name, days in job.recalls.items():
            before = Span(first, first).widened(before=days)
            spans[name] = before.widened(after=-1) if name in job.makes else Span(before.first, last)
        return {name: self.warehouse.read(name, span) for name, span in spans.items()}

    def _stage(self, job: Job, name: str, frame: DataFrame) -> int:
        table = TABLES[name]
        if self.explained is not None:
            self.explained(f"{job.name}: {name}\n{_plan(frame)}")
        if table.pseudonyms:
            frame = self.disclose(table, frame)
        return self.warehouse.stage(name, frame, self.span, job.name)


def _ready(waiting: Sequence[Job], going: Sequence[Job]) -> list[Job]:
    """Those that read nothing that is still to be made."""
    ready, unmade = [], {name for job in going for name in job.makes}
    for job in waiting:
        if unmade.isdisjoint({*job.reads, *job.recalls}):
            ready.append(job)
        unmade.update(job.makes)
    return ready


def _plan(frame: DataFrame) -> str:
    with redirect_stdout(io.StringIO()) as said:
        frame.explain("formatted")
    return said.getvalue()
