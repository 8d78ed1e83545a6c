"""The subcommands of `mediatord-analytics`."""

from __future__ import annotations

import json
import tempfile
import webbrowser
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from analytics import arguments, java, session, settings_file
from analytics.demo import demo
from analytics.places import local_path
from analytics.sample import generate
from analytics.sample.spec import Spec
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from analytics.nightly import Outcome
    from analytics.privacy import Pseudonyms


@contextmanager
def _spark(options: Mapping[str, Any], *, small: bool = False) -> Iterator[SparkSession]:
    """
    A session as the options of a command want it.

    :raise AnalyticsError: there can be none.
    """
    settings = arguments.settings_of(options["conf"])
    java.require_packages()
    if not session.submitted():
        found = java.find_java()
        for warning in found.warnings:
            _tell(f"warning: Java of {warning}")
        _tell(f"Spark starts on Java {found.version} of {found.source} ...")
        java.use(found)
    asked = session.SessionOptions(
        master=options["master"],
        memory=options["memory"],
        scratch=options["scratch"],
        ui=options["ui"],
        settings=settings,
        small=small,
        debug=options["debug"],
    )
    with session.running(asked) as spark:
        yield spark


def _tell(line: str) -> None:
    click.echo(line, err=True)


_logs = click.option(
    "--logs", metavar="DIR", multiple=True, required=True, help="With log segments; may be repeated."
)
_out = click.option("--out", metavar="DIR", required=True, help="Where results are, or are to be.")
_settings = click.option(
    "--settings",
    "settings_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="YAML; see the command settings.",
)
_keys = click.option(
    "--keys",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Keys of pseudonyms. Default: OUT/pseudonyms.keys.",
)


_key_file = click.option(
    "--keys", metavar="FILE", type=click.Path(path_type=Path), required=True, help="Such as OUT/pseudonyms.keys."
)


def _keys_of(keys: Path | None, out: str) -> Path:
    """:raise UsageError: there is no default, since the results are elsewhere."""
    here = local_path(out)
    if keys is None and here is None:
        raise click.UsageError("--keys is needed: keys are not kept beside results that are elsewhere")
    return keys or Path(here or "", "pseudonyms.keys")


@click.command()
@_logs
@_out
@click.option("--day", "only", metavar="DAY", type=arguments.day, help="In UTC. Default: yesterday.")
@click.option("--from", "first", metavar="DAY", type=arguments.day, help="The first of several days.")
@click.option("--to", "last", metavar="DAY", type=arguments.day, help="The last of them. Default: yesterday.")
@_settings
@_keys
@click.option("--textfile", metavar="FILE", help="Figures for Prometheus: NAME.prom in the collector's directory.")
@click.option("--allow-empty", is_flag=True, help="Days without any input are fine.")
@click.option(
    "--keep-free",
    metavar="SIZE",
    type=arguments.size_bytes,
    default="1g",
    show_default=True,
    help="To leave on disk.",
)
@click.option("--explain", is_flag=True, help="Show Spark's plan of each table.")
@click.option("--open", "show", is_flag=True, help="Open the report in a browser.")
@arguments.spark_options
def nightly(**options: Any) -> int:
    """Analyse a day, or several, and publish tables and report. Run again, it changes nothing."""
    span = arguments.span_of(options["only"], options["first"], options["last"])
    _check_places(options)
    settings = settings_file.load(options["settings_path"])
    keys = _keys_of(options["keys"], options["out"])
    small = arguments.are_small(options["logs"], span.widened(before=settings.look_back_days))
    with _spark(options, small=small) as spark:
        from analytics import nightly as run
        from analytics.files import Files

        request = run.Request(
            logs=options["logs"],
            out=options["out"].rstrip("/"),
            span=span,
            settings=settings,
            scratch=options["scratch"] or tempfile.gettempdir(),
            keys=str(keys),
            textfile=options["textfile"],
            allow_empty=options["allow_empty"],
            keep_free=options["keep_free"],
            explain=options["explain"],
        )
        outcome = run.run(spark, Files(spark), request, _tell)
    return _reported(outcome, options["show"])


def _check_places(options: Mapping[str, Any]) -> None:
    """
    What is on this machine, before Spark starts.

    :raise UsageError: it is not there, or cannot be written to.
    """
    if _is_here(options):
        arguments.check_readable("--logs", options["logs"])
        arguments.check_writable("--out", options["out"])
    if options["scratch"]:
        arguments.check_writable("--scratch", options["scratch"])
    if options["textfile"]:
        arguments.check_writable("--textfile in", str(Path(options["textfile"]).absolute().parent))


def _is_here(options: Mapping[str, Any]) -> bool:
    """Whether paths without a scheme are those of this machine."""
    return not session.submitted() and session.is_local(options["master"] or "local")


def _reported(outcome: Outcome, show: bool) -> int:
    for warning in outcome.warnings:
        _tell(f"warning: {warning}")
    for broken in outcome.broken:
        _tell(f"broken: {broken}")
    if outcome.report_path:
        click.echo(outcome.report_path)
        path = local_path(outcome.report_path)
        if show and path:
            webbrowser.open(path.absolute().as_uri())
    return outcome.exit_status


@click.command()
@_out
@click.option(
    "--logs", metavar="DIR", multiple=True, help="Delete old segments of these as well, once they were read."
)
@_settings
@click.option("--dry-run", is_flag=True, help="Say what would be deleted, and delete nothing.")
@arguments.spark_options
def prune(**options: Any) -> None:
    """Delete tables, reports and segments that were kept long enough."""
    wanted = settings_file.load(options["settings_path"])
    if _is_here(options):
        arguments.check_readable("--out", [options["out"]])
        arguments.check_readable("--logs", options["logs"])
    if options["scratch"]:
        arguments.check_writable("--scratch", options["scratch"])
    with _spark(options) as spark:
        from analytics import plan, segments
        from analytics import prune as pruning
        from analytics.files import Files
        from analytics.jobs.catalogue import JOBS
        from analytics.warehouse import Warehouse

        files, out = Files(spark), options["out"].rstrip("/")
        warehouse = Warehouse(spark, files, out)
        found = segments.discover(files, options["logs"]).segments if options["logs"] else []
        known = plan.known(warehouse, {segment.batch for segment in found})
        count = pruning.prune(warehouse, files, out, wanted, JOBS, found, known, options["dry_run"], _tell)
    click.echo(f"{count} {'to be deleted' if options['dry_run'] else 'deleted'}")


@click.command()
@click.option("--dir", "directory", required=True, metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--from", "first", metavar="DAY", type=arguments.day, help="The first day. Default: the last is yesterday."
)
@click.option("--days", default=7, show_default=True, type=click.IntRange(1, 400))
@click.option("--messages", default=1500, show_default=True, type=click.IntRange(1), help="A day.")
@click.option("--seed", default=1, show_default=True, help="Equal seeds give equal logs.")
@click.option("--incidents/--no-incidents", default=True, show_default=True, help="Plant those that fit in.")
def sample(directory: Path, first: date | None, days: int, messages: int, seed: int, incidents: bool) -> None:
    """Make up logs in the daemon's own format, for trying things out."""
    arguments.check_writable("--dir", str(directory))
    begin = first or arguments.today() - timedelta(days)
    truth = generate(directory, Spec(begin, days, seed, messages_per_day=messages, incidents=incidents))
    for day, facts in truth.days.items():
        click.echo(
            f"{day} {facts.lines} lines, {facts.ledger.accepted} messages accepted, {facts.ledger.acked} acked"
        )


@click.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("given", nargs=-1, type=click.UNPROCESSED)
def goals(given: tuple[str, ...]) -> Any:
    """Measure speed, memory and exactness against what is promised; needs the extra dev."""
    java.require_packages("duckdb")
    from analytics.goals import goals as command

    return command.main(given, prog_name="mediatord-analytics goals", standalone_mode=False)


@click.command()
def settings() -> None:
    """Print a file for --settings: every key at its default."""
    click.echo(settings_file.render(), nl=False)


@click.command()
@click.argument("table", default="events")
def schema(table: str) -> None:
    """Print the columns of a table, or the JSON Schema of a line of the log if TABLE is `line`."""
    from analytics.schema import events_table
    from analytics.tables import TABLES
    from mediatord.observability.event_schema import build_json_schema

    if table == "line":
        click.echo(json.dumps(build_json_schema(), indent=2))
        return
    tables = {"events": events_table(), **TABLES}
    if table not in tables:
        raise click.BadParameter(f"{table!r} is none of: line, {', '.join(tables)}", param_hint="TABLE")
    for column in tables[table].columns:
        click.echo(f"{column.name:<20} {column.type:<10} {column.meaning}")


@click.group()
def pseudonyms() -> None:
    """Keys that identifiers in reports are made unreadable with."""


@pseudonyms.command("list")
@_key_file
def list_epochs(keys: Path) -> None:
    """Show which days share a key, and which keys were forgotten."""
    for epoch in _pseudonyms(keys).epochs():
        click.echo(f"{epoch.number:>6} {epoch.first} {epoch.last} {'kept' if epoch.secret else 'forgotten'}")


@pseudonyms.command()
@_key_file
@click.argument("epoch", type=int)
def forget(keys: Path, epoch: int) -> None:
    """Destroy the key of EPOCH: nobody can tell any more whom its pseudonyms stand for."""
    _pseudonyms(keys).forget(epoch)


def _pseudonyms(keys: Path) -> Pseudonyms:
    from analytics.privacy import Pseudonyms

    return Pseudonyms(keys, Settings().pseudonym_days)


COMMANDS = (nightly, prune, demo, goals, sample, pseudonyms, schema, settings)
