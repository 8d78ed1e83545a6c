"""`goals`: measures what was promised about speed, memory and exactness, in ratios of one run on one machine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

from analytics import java
from analytics.errors import AnalyticsError
from analytics.goals.judging import SMALL, judged

_CPUS = 2
_QUICK_SCALE = 0.1


@click.command()
@click.option("--scale", default=16.0, show_default=True, help="Times 600 000 lines.")
@click.option("--repeat", default=3, show_default=True, type=click.IntRange(1), help="Medians of so many.")
@click.option(
    "--work",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where log lines are made up once, and kept. Default: a new temporary directory.",
)
@click.option("--quick", is_flag=True, help="Little data, once: shows that it works, and says nothing about speed.")
def goals(scale: float, repeat: int, work: Path | None, quick: bool) -> int:
    """Measure all goals, and print them as a table. Takes half an hour; the machine should do nothing else."""
    java.require_packages()
    try:
        from analytics.goals.measuring import measure
    except ModuleNotFoundError as error:
        raise AnalyticsError(f"{error.name} is not installed: pip install 'mediatord[dev]'") from None
    if quick:
        scale, repeat = _QUICK_SCALE, 1
    cpus = sorted(os.sched_getaffinity(0))
    place = work or Path(tempfile.mkdtemp(prefix="mediatord-analytics-goals-"))
    _tell(
        f"{scale:g} times 600 000 lines in {place}, medians of {repeat}, {min(_CPUS, len(cpus))} of {len(cpus)} CPUs"
    )
    try:
        figures = measure(place, scale, scale / SMALL, repeat, cpus[:_CPUS], _tell)
    finally:
        os.sched_setaffinity(0, cpus)
    results = judged(figures, timed=not quick)
    for result in results:
        click.echo(result.line())
    for line in figures.beside():
        click.echo(line)
    return 0 if all(result.met is not False for result in results) else 1


def _tell(line: str) -> None:
    click.echo(line, err=True)
