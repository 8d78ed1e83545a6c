"""`mediatord status`: how a running mediator is, once or again and again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from time import sleep
from typing import TYPE_CHECKING

import click

from mediatord.cli.options import LOCAL_URL, answer, ca_option, json_option, url_option
from mediatord.cli.report import Look, Report, Row, look, look_or_fail
from mediatord.cli.visible import visible

if TYPE_CHECKING:
    from rich.table import Table


class _Seconds(click.FloatRange):
    """An interval, which may be left out behind its option."""

    name = "seconds"


@click.command()
@url_option(default=LOCAL_URL, show_default=True, help="Of the mediator.")
@click.option(
    "--watch",
    metavar="[SECONDS]",
    type=_Seconds(0.1, 3600),
    is_flag=False,
    flag_value=2.0,
    help="Look again and again, every 2 seconds unless said otherwise; Ctrl-C ends it.",
)
@click.option(
    "--over",
    metavar="SECONDS",
    type=_Seconds(0, 3600),
    default=1.0,
    show_default=True,
    help="How long to look for rates; 0: none are shown.",
)
@ca_option
@json_option
def status(url: str, watch: float | None, over: float, as_json: bool) -> int:
    """
    Ask a running mediator how it is. Exits with 1 if it is not well, or its store does not account for every message.

    Rates are those between two looks; counters and the times of deliveries and answers are since the daemon was
    started. What waits and the ledger are of one moment, said with its age; the ledger is since the store was made.
    """
    if watch is not None:
        return _watch(url, watch, as_json)
    first = look(url)
    report = Report(first)
    if over and not isinstance(first.figures, str):
        sleep(over)
        report = Report(look(url), first)
    if as_json or not sys.stdout.isatty():
        answer(as_json, report.values(), _table(report.rows()))
    else:
        from rich.console import Console

        Console().print(_drawn(url, report))
    return 0 if report.healthy else 1


def _watch(url: str, seconds: float, as_json: bool) -> int:
    """Until it is interrupted, which is how it ends."""
    try:
        if as_json or not sys.stdout.isatty():
            for report in _reports(url, seconds):
                answer(as_json, report.values(), _table(report.rows()) + "\n")
                sys.stdout.flush()
        else:
            _draw(url, seconds)
    except KeyboardInterrupt:
        pass
    return 0


def _reports(url: str, seconds: float) -> Iterator[Report]:
    before: Look | None = None
    while True:
        now = look_or_fail(url)
        yield Report(now, before)
        before = now
        sleep(seconds)


def _draw(url: str, seconds: float) -> None:
    """One table that changes in its place."""
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        for report in _reports(url, seconds):
            live.update(_drawn(url, report), refresh=True)


def _drawn(url: str, report: Report) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, title=Text(url, style="bold"), title_justify="left", pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for place, (name, value) in enumerate(report.rows()):
        style = "" if place else "green" if report.healthy else "red"
        table.add_row(Text(visible(name)), Text(visible(value), style=style))
    return table


def _table(rows: list[Row]) -> str:
    """Two columns."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(visible(f"{name:{width}}  {value}") for name, value in rows)
