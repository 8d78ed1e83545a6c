"""
The manual pages, made of what `--help` says: `python -m mediatord.cli.man DIR` writes them into a directory.

`mediatord-analytics.1` is left out where the analysis of the logs is not installed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from textwrap import wrap

import click

from mediatord import __version__
from mediatord.cli.commands import cli

_TableRows = Sequence[tuple[str, str]]

_WIDTH = 72
_ANALYTICS = "mediatord-analytics"
_EXIT_STATUS = (
    ("0", "Success; the daemon has stopped in order."),
    ("1", "Failure; the reason is one line on standard error."),
    ("2", "Wrong usage, or an invalid configuration: one line for each problem."),
)
SIGNALS = (
    ("SIGTERM, SIGINT", "Stop: refuse new requests, drain open connections for up to drain_timeout, and exit."),
    ("SIGHUP", "Reload configuration, keys, certificates and token files, and start a new segment of the event log."),
    ("SIGUSR1", "Start a new segment of the event log."),
)
ENVIRONMENT = (
    ("MEDIATORD_CONFIG", "Configuration file, unless --config names it. Default: /etc/mediatord/mediator.yaml."),
    ("MEDIATORD_SECTION__KEY", "Overrides a key of the configuration, as in MEDIATORD_STORAGE__BACKEND=memory."),
    ("NO_COLOR", "Disables colours if set."),
    ("NOTIFY_SOCKET, WATCHDOG_USEC", "Set by systemd for readiness and watchdog notifications."),
)
FILES = (
    ("/etc/mediatord/mediator.yaml", "Default configuration file."),
    ("keys.jwks", "Private keys of the mediator (identity.keys), mode 0600."),
    ("log.key", "Pseudonym keys of the event log (log.key_file), mode 0600; the daemon adds keys."),
    (
        "mediator.sqlite3",
        "Accounts and messages (storage.sqlite.path), mode 0600; with -wal, -shm and .lock beside it.",
    ),
    ("control.sock", "Socket for commands to the running daemon (control_socket), mode 0600."),
    ("log/events.jsonl", "Open segment of the event log (log.directory), mode 0640."),
    ("log/events-*.jsonl, log/events-*.jsonl.gz", "Closed segments, which never change."),
    ("log/analysis/read-segments.json", "Read marker: segments that the nightly analysis has read."),
    ("log/analysis-seen", "Remembers that a read marker existed."),
)
_ANALYTICS_EXIT_STATUS = (
    ("0", "Success."),
    ("1", "Failure."),
    ("2", "Wrong usage."),
    ("3", "No input for these days."),
    ("4", "Success, but the logs are incomplete or inconsistent."),
    ("143, 130", "Stopped by SIGTERM or SIGINT."),
)


def walk_commands(context: click.Context) -> Iterator[click.Context]:
    """The context of a command, and of all below it that are shown."""
    yield context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            found = context.command.get_command(context, name)
            if found is not None and not found.hidden:
                yield from walk_commands(
                    click.Context(found, info_name=name, parent=context, **found.context_settings)
                )


def render_manual(
    command: click.Group, name: str, tables: Mapping[str, _TableRows], see_also: str, day: datetime
) -> str:
    """
    The page as roff.

    :param tables: terms and what they mean, by the title of the section.
    :param day: that it is of.
    """
    context = click.Context(command, info_name=name, **command.context_settings)
    about = " ".join((command.help or "").split())
    lines = [
        f'.TH {name.upper()} 1 "{day:%Y-%m-%d}" "mediatord {__version__}" "User Commands"',
        *(".SH NAME", f"{_escape_roff(name)} \\- {_escape_roff(about.rstrip('.'))}"),
        *(".SH SYNOPSIS", f".B {_escape_roff(name)}", "[\\fIOPTIONS\\fR] \\fICOMMAND\\fR [\\fIARGS\\fR]..."),
        *(".SH DESCRIPTION", *_render_paragraphs(about)),
        *(".SH OPTIONS", *_render_options(context)),
        ".SH COMMANDS",
    ]
    for one in walk_commands(context):
        if not isinstance(one.command, click.Group):
            typed = " ".join([one.command_path.split(" ", 1)[1], *_render_arguments(one)])
            lines += [
                f'.SS "{_escape_roff(typed)}"',
                *_render_paragraphs(one.command.help or one.command.short_help or ""),
                *_render_options(one),
            ]
    for title, rows in tables.items():
        lines += [f".SH {title}", *(line for term, meaning in rows for line in _render_term(term, meaning))]
    return "\n".join([*lines, ".SH SEE ALSO", see_also]) + "\n"


def _render_arguments(context: click.Context) -> Iterator[str]:
    for parameter in context.command.get_params(context):
        if isinstance(parameter, click.Argument):
            yield parameter.make_metavar(context)
        elif parameter.required:
            yield f"{parameter.opts[0]} {parameter.make_metavar(context)}"


def _render_options(context: click.Context) -> Iterator[str]:
    # Said once for all: and by what name a subcommand has it depends on who asked click for it first.
    left_out = None if context.parent is None else context.command.get_help_option(context)
    for parameter in context.command.get_params(context):
        record = parameter.get_help_record(context) if isinstance(parameter, click.Option) else None
        if record is not None and parameter is not left_out:
            yield from _render_term(record[0], record[1] or "\\&")


def _render_term(term: str, meaning: str) -> Iterator[str]:
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
    see_also = ".BR mediatord\\-analytics (1),\n.BR twistd (1),\n.BR systemd (1)"
    tables = {"EXIT STATUS": _EXIT_STATUS, "SIGNALS": SIGNALS, "ENVIRONMENT": ENVIRONMENT, "FILES": FILES}
    pages = {"mediatord.1": render_manual(cli, "mediatord", tables, see_also, day)}
    # Not imported by name: the two programs know nothing of each other.
    for one in entry_points(group="console_scripts", name=_ANALYTICS):
        command = import_module(one.module).cli
        tables = {"EXIT STATUS": _ANALYTICS_EXIT_STATUS}
        pages[f"{_ANALYTICS}.1"] = render_manual(command, _ANALYTICS, tables, ".BR mediatord (1)", day)
    return pages


def write_man_pages(arguments: Sequence[str]) -> int:
    """Write the pages into the directory that is named."""
    if len(arguments) != 1:
        click.echo("usage: python -m mediatord.cli.man DIR", err=True)
        return 2
    directory = Path(arguments[0])
    directory.mkdir(parents=True, exist_ok=True)
    # Of the source where a build says so, since the same source is to give the same page.
    given = os.environ.get("SOURCE_DATE_EPOCH")
    day = datetime.fromtimestamp(int(given), UTC) if given else datetime.now(UTC)
    for name, text in render_man_pages(day).items():
        (directory / name).write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(write_man_pages(sys.argv[1:]))
