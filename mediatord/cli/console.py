"""
Text of others, as it can be shown: it may have been made to do something to a terminal.

Options that several subcommands have, and how they answer.

Tables: drawn on a terminal, and plain columns for whatever else reads them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from mediatord.config.location import CONFIG_PATH_VARIABLE, DEFAULT_CONFIG_PATH


def escape_control_characters(text: str) -> str:
    """With escapes in place of what is no character to be seen: control characters, directions, halves of pairs."""
    if text.isprintable():
        return text
    return "".join([one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text])


LOCAL_URL = "http://127.0.0.1:8080"

_CommandT = TypeVar("_CommandT", bound=Callable[..., Any])

_CONFIG_META_KEY = "mediatord.cli.config"


def find_given_config(context: click.Context) -> Path | None:
    """The configuration that the command line names, wherever in it; None if it names none."""
    path: Path | None = context.meta.get(_CONFIG_META_KEY)
    return path


def _remember_config(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    # Groups are parsed before their commands, so that the last one of the command line counts.
    if path is not None and context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE:
        context.meta[_CONFIG_META_KEY] = path
    return find_given_config(context) or path


def _make_config_option(
    *, default: Path | None = DEFAULT_CONFIG_PATH, **options: Any
) -> Callable[[_CommandT], _CommandT]:
    return click.option(
        "-c",
        "--config",
        "path",
        metavar="PATH",
        type=click.Path(path_type=Path),
        default=default,
        show_default=True,
        envvar=CONFIG_PATH_VARIABLE,
        show_envvar=True,
        callback=_remember_config,
        **options,
    )


config_option = _make_config_option(help="The configuration, mediator.yaml.")
# For a command that writes it: nobody is to fill the directory of the system's daemon by leaving something out.
target_config_option = _make_config_option(default=None, help="Where to write mediator.yaml.")
# For groups with commands that have it, so that it may stand before them.
group_config_option = _make_config_option(help="The configuration, for commands that read it.", expose_value=False)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def url_option(**options: Any) -> Callable[[_CommandT], _CommandT]:
    """`--url`, without a slash at its end. :param options: those of :func:`click.option`."""
    return click.option("--url", metavar="URL", callback=_check_url, **options)


def _check_url(context: click.Context, parameter: click.Parameter, url: str | None) -> str | None:
    from mediatord.config.settings import split_url

    if url is not None and split_url(url) is None:
        raise click.BadParameter("expected an http:// or https:// URL")
    return url and url.rstrip("/")


def _set_trusted_certificates(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    # What OpenSSL itself reads, here and in processes that are begun from here.
    if path is not None:
        os.environ["SSL_CERT_FILE"] = str(path.absolute())


ca_option = click.option(
    "--ca",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    callback=_set_trusted_certificates,
    expose_value=False,
    help="Certificates (PEM) to trust in place of those that the system trusts.",
)


def print_result(as_json: bool, value: Any, text: str) -> None:
    """
    Print what a subcommand has to say, on standard output.

    :param value: for programs: one JSON document, on one line.
    :param text: for people.
    """
    click.echo(json.dumps(value, ensure_ascii=False) if as_json else text)


_SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_TIME_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """:param columns: their titles; one that ends in `#` has numbers, which stand to the right."""
    rows = [[escape_control_characters(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        print(format_plain_table(columns, rows))  # noqa: T201  this is a program's output
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        right = column.endswith("#")
        table.add_column(column.rstrip(" #"), justify="right" if right else "left", overflow="fold", no_wrap=right)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False, emoji=False).print(table)  # there is one for `:key:`


def format_plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns with two blanks between, none of them cut."""
    lines = [[column.rstrip(" #") for column in columns], *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]

    def cell(text: str, place: int) -> str:
        return text.rjust(widths[place]) if columns[place].endswith("#") else text.ljust(widths[place])

    return "\n".join("  ".join(cell(text, place) for place, text in enumerate(line)).rstrip() for line in lines)


def format_bytes(size: float) -> str:
    """Bytes in the unit that fits."""
    for unit in _SIZE_UNITS[:-1]:
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_SIZE_UNITS[-1]}"


def format_time_span(seconds: float) -> str:
    """By its two largest units."""
    if not isfinite(seconds):
        return "?"
    left = max(0, round(seconds))
    parts: list[str] = []
    for unit, size in _TIME_UNITS:
        if left >= size or (unit == "s" and not parts):
            parts.append(f"{left // size} {unit}")
            left %= size
    return " ".join(parts[:2])
