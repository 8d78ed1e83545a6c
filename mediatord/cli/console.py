"""Options and output formats that subcommands share."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from mediatord.config.value_syntax import CONFIG_PATH_VARIABLE, DEFAULT_CONFIG_PATH
from mediatord.runtime.option_types import IntegerRange

if TYPE_CHECKING:
    from mediatord.cli.store_access import StoreAccess

# Marks queues and accounts of the daemon's own probes.
PROBE_MARKER = "(self-test)"


def escape_control_characters(text: str) -> str:
    """Untrusted text with escapes for control characters, directions and surrogates, for terminal output."""
    if text.isprintable():
        return text
    return "".join([one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text])


def shorten_did(did: str) -> str:
    """A DID as in an event log with `log.dids: plain`, for terminal output."""
    from mediatord.observability.pseudonyms import Pseudonymizer, PseudonymKey

    return escape_control_characters(Pseudonymizer("plain", PseudonymKey(0, b"")).did(did))


LOCAL_URL = "http://127.0.0.1:8080"

_CommandT = TypeVar("_CommandT", bound=Callable[..., Any])

_CONFIG_META_KEY = "mediatord.cli.config"


def find_given_config(context: click.Context) -> Path | None:
    """The path given with --config anywhere on the command line, if any."""
    path: Path | None = context.meta.get(_CONFIG_META_KEY)
    return path


def _remember_config(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    # Groups are parsed before their commands: the last one on the command line counts.
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


config_option = _make_config_option(help="Configuration file.")
# For a command that writes it, which must not default to the system directory.
target_config_option = _make_config_option(default=None, help="Where to write mediator.yaml.")
# For groups with commands that have it, so that it may stand before them.
group_config_option = _make_config_option(help="Configuration file.", expose_value=False)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def url_option(**options: Any) -> Callable[[_CommandT], _CommandT]:
    """`--url`, without a slash at its end. :param options: those of :func:`click.option`."""
    return click.option("--url", metavar="URL", callback=_check_url, **options)


def _check_url(context: click.Context, parameter: click.Parameter, url: str | None) -> str | None:
    from mediatord.config.value_types import split_url

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
    help="Trust the certificates in FILE (PEM) instead of those of the system.",
)


def top_option(most: int, default: int) -> Callable[[_CommandT], _CommandT]:
    """`--top`, of a listing."""
    return click.option(
        "--top", type=IntegerRange(1, most), default=default, show_default=True, help="Maximum number of rows."
    )


@contextmanager
def open_store(path: Path) -> Iterator[StoreAccess]:
    """
    Queues and accounts of a running daemon, or of the store that no daemon uses.

    :param path: of the configuration.
    """
    # Takes a second.
    from mediatord.cli.store_access import open_store_access
    from mediatord.config.file import load_config

    with open_store_access(load_config(path)) as store:
        yield store


def print_json(value: Any) -> None:
    """Print one line of JSON on standard output."""
    click.echo(json.dumps(value, ensure_ascii=False))


def print_result(as_json: bool, value: Any, text: str) -> None:
    """
    Print the result of a subcommand on standard output.

    :param value: printed as one line of JSON with --json.
    :param text: printed otherwise.
    """
    if as_json:
        print_json(value)
    else:
        click.echo(text)


def format_plural(number: int, what: str) -> str:
    """A number of things, such as `1 message` and `2 messages`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def find_program_name() -> str:
    """How to call this program from a shell: by name, or by path if it is not on the search path."""
    called = Path(sys.argv[0])
    if called.name != "mediatord" or shutil.which("mediatord") == str(called.absolute()):
        return "mediatord"
    return os.path.relpath(called)


_SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_TIME_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """
    Print a table, if it has rows; plain columns unless standard output is a terminal.

    :param columns: titles; columns whose title ends in `#` are right-aligned.
    """
    if not rows:
        return
    rows = [[escape_control_characters(cell) for cell in row] for row in rows]
    titles, right = [column.rstrip(" #") for column in columns], [column.endswith("#") for column in columns]
    if not sys.stdout.isatty():
        print(align_columns([titles, *rows], right))  # noqa: T201  this is a program's output
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title, flush in zip(titles, right, strict=True):
        table.add_column(title, justify="right" if flush else "left", overflow="fold", no_wrap=flush)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False, emoji=False).print(table)  # DIDs contain `:key:`


def align_columns(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """
    Lines with columns two spaces apart.

    :param right: whether each column is right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, right, strict=True)
        lines.append("  ".join(text.rjust(width) if flush else text.ljust(width) for text, width, flush in cells))
    return "\n".join(line.rstrip() for line in lines)


def format_bytes(size: float) -> str:
    """A size in a binary unit, such as `2.9 KiB`."""
    for unit in _SIZE_UNITS[:-1]:
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_SIZE_UNITS[-1]}"


def format_time_span(seconds: float) -> str:
    """A duration in its two largest units, such as `10 h 3 min`."""
    if not isfinite(seconds):
        return "?"
    left = max(0, round(seconds))
    parts: list[str] = []
    for unit, size in _TIME_UNITS:
        if left >= size or (unit == "s" and not parts):
            parts.append(f"{left // size} {unit}")
            left %= size
    return " ".join(parts[:2])


def format_time(seconds: float) -> str:
    """A time since 1970 in UTC; the number if no calendar has it."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError):
        return f"{seconds:g}"
