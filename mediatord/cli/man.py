"""
The manual pages, made of what `--help` says: `python -m mediatord.cli.man DIR` writes them into a directory.

`mediatord-analytics.1` is left out where the analysis of the logs is not installed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from textwrap import wrap

import click

from mediatord import __version__

_TableRows = Sequence[tuple[str, str]]

_WIDTH = 72
_ANALYTICS = "mediatord-analytics"
_EXIT_STATUS = (
    ("0", "Done; the daemon: stopped in order."),
    ("1", "Failed; the reason is one line on standard error."),
    ("2", "Wrong usage, or a configuration that cannot be used: one line for each mistake."),
)
_SIGNALS = (
    ("SIGTERM, SIGINT", "The daemon stops in order: it takes nothing new, and lets go of open sockets."),
    ("SIGUSR1", "It closes the segment of the event log and begins the next."),
    ("SIGHUP", "It reads its configuration again, says what of it needs a restart, and begins the next segment."),
)
_ENVIRONMENT = (
    ("MEDIATORD_CONFIG", "The configuration, where --config does not say which; else /etc/mediatord/mediator.yaml."),
    ("MEDIATORD_SECTION__KEY", "Overrides a key of the configuration: MEDIATORD_STORAGE__BACKEND=memory."),
    ("NO_COLOR", "If set, nothing is coloured."),
    ("NOTIFY_SOCKET, WATCHDOG_USEC", "Set by systemd, which is told that the daemon is ready, and that it is well."),
)
_FILES = (
    ("/etc/mediatord/mediator.yaml", "The configuration of the system's daemon, where packages put it."),
    ("keys.jwks", "The mediator's keys, beside the configuration unless identity.keys says otherwise; mode 0600."),
    ("log.key", "The keys of the event log's pseudonyms, beside keys.jwks or where log.key_file says; mode 0600."),
    ("mediator.sqlite3", "Accounts and messages, with storage.backend sqlite."),
    ("log/events.jsonl", "The event log; closed segments lie beside it as events-*.jsonl.gz."),
)
_ANALYTICS_EXIT_STATUS = (
    ("0", "Fine."),
    ("1", "Failed."),
    ("2", "Wrong usage."),
    ("3", "There is no input for these days."),
    ("4", "Done, but the integrity of the logs is broken."),
    ("143, 130", "Stopped by SIGTERM or SIGINT."),
)


@dataclass(frozen=True, slots=True)
class ManualPage:
    """
    What a manual page has beside the help.

    :param tables: sections of terms and what they mean.
    :param replaced: subcommands, by name, that only hand their arguments on, and what to.
    """

    name: str
    tables: Sequence[tuple[str, _TableRows]]
    see_also: str
    replaced: dict[str, click.Command]


def render_manual(command: click.Group, page: ManualPage, day: datetime) -> str:
    """The page as roff. :param day: that it is of."""
    return "\n".join(_render_manual_lines(command, page, day)) + "\n"


def _render_manual_lines(command: click.Group, page: ManualPage, day: datetime) -> Iterator[str]:
    context = click.Context(command, info_name=page.name, **command.context_settings)
    about = " ".join((command.help or "").split())
    yield f'.TH {page.name.upper()} 1 "{day:%Y-%m-%d}" "mediatord {__version__}" "User Commands"'
    yield from (".SH NAME", f"{_escape_roff(page.name)} \\- {_escape_roff(about.rstrip('.'))}")
    yield from (
        ".SH SYNOPSIS",
        f".B {_escape_roff(page.name)}",
        "[\\fIOPTIONS\\fR] \\fICOMMAND\\fR [\\fIARGS\\fR]...",
    )
    yield from (
        ".SH DESCRIPTION",
        *_render_paragraphs(about),
        ".SH OPTIONS",
        *_render_options(command, context),
        ".SH COMMANDS",
    )
    for name in command.list_commands(context):
        found = page.replaced.get(name) or command.get_command(context, name)
        if found is not None and not found.hidden:
            yield from _render_command(found, click.Context(found, info_name=name, parent=context))
    for title, rows in page.tables:
        yield from (f".SH {title}", *_render_table(rows))
    yield from (".SH SEE ALSO", page.see_also)


def _render_command(command: click.Command, context: click.Context) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None and not found.hidden:
                yield from _render_command(found, click.Context(found, info_name=name, parent=context))
        return
    path = context.command_path.split(" ", 1)[1]
    yield f'.SS "{_escape_roff(" ".join([path, *_render_arguments(command, context)]))}"'
    yield from _render_paragraphs(command.help or command.short_help or "")
    yield from _render_options(command, context)


def _render_arguments(command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.get_params(context):
        if isinstance(parameter, click.Argument):
            yield parameter.make_metavar(context)
        elif parameter.required:
            yield f"{parameter.opts[0]} {parameter.make_metavar(context)}"


def _render_options(command: click.Command, context: click.Context) -> Iterator[str]:
    # Said once for all: and by what name a subcommand has it depends on who asked click for it first.
    left_out = None if context.parent is None else command.get_help_option(context)
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context) if isinstance(parameter, click.Option) else None
        if record is not None and parameter is not left_out:
            term, meaning = record
            yield from (".TP", f"\\fB{_escape_roff(term)}\\fR", *_wrap_sentences(meaning or "\\&"))


def _render_table(rows: _TableRows) -> Iterator[str]:
    for term, meaning in rows:
        yield from (".TP", f"\\fB{_escape_roff(term)}\\fR", *_wrap_sentences(meaning))


def _render_paragraphs(help_: str) -> Iterator[str]:
    """Paragraphs; those that begin with a backspace keep their lines."""
    for number, paragraph in enumerate(re.split(r"\n\s*\n", help_.strip())):
        if number:
            yield ".PP"
        if paragraph.lstrip().startswith("\b"):
            yield from (
                ".nf",
                *(_escape_roff(line) for line in paragraph.replace("\b", "").strip().splitlines()),
                ".fi",
            )
        else:
            yield from _wrap_sentences(paragraph)


def _wrap_sentences(text: str) -> Iterator[str]:
    """Sentences on lines of their own, so that the formatter knows where they end."""
    for sentence in re.split(r"(?<=[.:;?!]) ", " ".join(text.split())):
        for line in wrap(sentence, _WIDTH, break_long_words=False, break_on_hyphens=False):
            yield _escape_roff(line)


def _escape_roff(text: str) -> str:
    """As it is, whatever the formatter takes for a request or an escape."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("~", "\\(ti").replace("^", "\\(ha")
    escaped = escaped.replace('"', "\\(dq")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def render_man_pages(day: datetime) -> dict[str, str]:
    """Texts by file name."""
    from mediatord.bench.cli import bench
    from mediatord.cli.commands import cli

    tables = (
        ("EXIT STATUS", _EXIT_STATUS),
        ("SIGNALS", _SIGNALS),
        ("ENVIRONMENT", _ENVIRONMENT),
        ("FILES", _FILES),
    )
    see_also = ".BR mediatord\\-analytics (1),\n.BR twistd (1),\n.BR systemd (1)"
    found = {"mediatord.1": render_manual(cli, ManualPage("mediatord", tables, see_also, {"bench": bench}), day)}
    # Not imported by name: the two programs know nothing of each other.
    analysis = [one.module for one in entry_points(group="console_scripts", name=_ANALYTICS)]
    if not analysis:
        return found
    page = ManualPage(_ANALYTICS, (("EXIT STATUS", _ANALYTICS_EXIT_STATUS),), ".BR mediatord (1)", {})
    return {**found, f"{_ANALYTICS}.1": render_manual(import_module(analysis[0]).cli, page, day)}


def _find_page_date() -> datetime:
    """Of the source where a build says so, since the same source is to give the same page."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    return datetime.fromtimestamp(int(given), UTC) if given else datetime.now(UTC)


def write_man_pages(arguments: Sequence[str]) -> int:
    """Write the pages into the directory that is named."""
    if len(arguments) != 1:
        click.echo("usage: python -m mediatord.cli.man DIR", err=True)
        return 2
    directory = Path(arguments[0])
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in render_man_pages(_find_page_date()).items():
        (directory / name).write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(write_man_pages(sys.argv[1:]))
