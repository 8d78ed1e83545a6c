"""`demo`: a month of logs made up, analysed, and what was planted in it looked up in the results."""

from __future__ import annotations

import shutil
import tempfile
import webbrowser
from pathlib import Path
from time import perf_counter

import click

from analytics import java, session
from analytics.errors import AnalyticsError
from analytics.job import Span
from analytics.sample import generate
from analytics.sample.spec import Spec
from analytics.sample.truth import Truth
from analytics.settings import Settings

_OURS = ".mediatord-analytics-demo"


@click.command()
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="For logs and results; what an earlier demo left there is replaced. Default: a new temporary one.",
)
@click.option("--days", default=30, show_default=True, type=click.IntRange(2, 90))
@click.option("--messages", default=2500, show_default=True, type=click.IntRange(1), help="A day.")
@click.option("--seed", default=1, show_default=True, help="Equal seeds give equal logs.")
@click.option("--open", "show", is_flag=True, help="Open the report in a browser.")
def demo(directory: Path | None, days: int, messages: int, seed: int, show: bool) -> int:
    """Make up a month of logs with incidents in it, analyse it, and tell what was found."""
    java.require_packages()
    java.use(java.find_java())
    place = prepared(directory)
    began = perf_counter()
    truth = generate(place / "logs", Spec(days=days, messages_per_day=messages, seed=seed))
    lines = sum(day.lines for day in truth.days.values())
    _tell(f"made up {days} days, {lines} lines of {len(truth.spec.nodes)} nodes in {perf_counter() - began:.0f} s")
    report, findings = _analysed(place, truth)
    for line in findings:
        click.echo(line)
    click.echo(report)
    if show:
        webbrowser.open(Path(report).absolute().as_uri())
    return 0


def prepared(directory: Path | None) -> Path:
    """
    An empty directory.

    :raise AnalyticsError: there is something in it that no demo has left.
    """
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="mediatord-analytics-demo-"))
    mark = directory / _OURS
    if directory.exists() and any(directory.iterdir()) and not mark.exists():
        raise AnalyticsError(f"{directory} holds something else; name another directory")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    mark.touch()
    return directory


def _analysed(place: Path, truth: Truth) -> tuple[str, list[str]]:
    """All days at once; then the last one again, as late segments have arrived. The report, and what was found."""
    with session.running(session.SessionOptions()) as spark:
        from analytics import nightly
        from analytics.files import Files
        from analytics.sample.findings import find
        from analytics.warehouse import Warehouse

        files, out, last = Files(spark), str(place / "results"), truth.spec.last_day

        def analyse(span: Span) -> nightly.Outcome:
            request = nightly.Request(
                logs=[str(place / "logs")],
                out=out,
                span=span,
                settings=Settings(),
                scratch=tempfile.gettempdir(),
                keys=str(place / "pseudonyms.keys"),
            )
            return nightly.run(spark, files, request, _tell)

        outcome = analyse(Span(truth.spec.first_day, last))
        if truth.late:
            truth.deliver_late()
            _tell("a segment came late: the last day again")
            outcome = analyse(Span(last, last))
        found = find(Warehouse(spark, files, out), truth)
        lines = [f"{one.incident.day} {one.incident.name:<17} {one.text or 'NOT FOUND'}" for one in found]
        return outcome.report_path, lines


def _tell(line: str) -> None:
    click.echo(line, err=True)
