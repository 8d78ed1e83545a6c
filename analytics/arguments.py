"""What the command line understands: days, sizes, directories; every mistake is one line."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import click

from analytics.job import Span
from analytics.places import local_path
from mediatord.config.value_syntax import parse_size

_JAVA_UNITS = {"g": 2**30, "m": 2**20, "k": 2**10}
# Bytes of plain text up to which Java is better not asked to compile; how many times smaller packed ones are.
_SMALL = 64 * 2**20
_PACKED = 10
Command = TypeVar("Command", bound=Callable[..., Any])


def day(text: str) -> date:
    """A day as in 2026-11-20. :raise BadParameter: it is none, or in the future."""
    try:
        found = date.fromisoformat(text) if re.fullmatch(r"\d{4}-\d\d-\d\d", text) else None
    except ValueError:
        found = None
    if found is None:
        raise click.BadParameter(f"{text!r} is no day; write one as 2026-11-20")
    if found > today():
        raise click.BadParameter(f"{found} is in the future")
    return found


def size(text: str) -> str:
    """A size of the heap as Java writes it, such as 512m. :raise BadParameter: it is none, or below 1 KiB."""
    number = size_bytes(text)
    if number < _JAVA_UNITS["k"]:
        raise click.BadParameter(f"{text!r} is too small; write one as 512m or 4GiB")
    unit, factor = next((one for one in _JAVA_UNITS.items() if number % one[1] == 0), ("k", _JAVA_UNITS["k"]))
    return f"{number // factor}{unit}"


def today() -> date:
    """In UTC."""
    return datetime.now(UTC).date()


def size_bytes(text: str) -> int:
    """Bytes. :raise BadParameter: it is no size."""
    try:
        return parse_size(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no size; write one as 512m or 4GiB") from None


def span_of(only: date | None, first: date | None, last: date | None) -> Span:
    """
    The days asked for; yesterday if none are, and to yesterday if there is no last one.

    :raise UsageError: they contradict each other.
    """
    yesterday = today() - timedelta(1)
    if only and (first or last):
        raise click.UsageError("--day does not go with --from and --to")
    if last and not first:
        raise click.UsageError("--to needs --from")
    if not first:
        return Span(only or yesterday, only or yesterday)
    if (last or yesterday) < first:
        raise click.UsageError(f"--to {last or yesterday} is before --from {first}")
    return Span(first, last or yesterday)


def settings_of(pairs: Sequence[str]) -> Mapping[str, str]:
    """Settings of Spark. :raise UsageError: one is not `KEY=VALUE`."""
    split = [pair.partition("=") for pair in pairs]
    for key, equals, _ in split:
        if not (key and equals):
            raise click.UsageError(f"--conf {key}: write KEY=VALUE")
    return {key.strip(): value for key, _, value in split}


def check_readable(option: str, urls: Sequence[str]) -> None:
    """:raise UsageError: one on this machine is no directory that can be read."""
    for url in urls:
        path = local_path(url)
        if path and not path.is_dir():
            raise click.UsageError(f"{option} {url}: no such directory")
        if path and not os.access(path, os.R_OK | os.X_OK):
            raise click.UsageError(f"{option} {url}: cannot be read")


def are_small(urls: Sequence[str], days: Span) -> bool:
    """Whether the segments of these days are few bytes; False for those that are not on this machine."""
    raw = 0
    for url in urls:
        path = local_path(url)
        if path is None:
            return False
        raw += sum(_raw_bytes(file, days) for file in path.rglob("events*"))
    return raw < _SMALL


def _raw_bytes(file: Path, days: Span) -> int:
    """Bytes of a segment of these days, as plain text; roughly if it is packed."""
    stamp = re.match(r"events-(\d{8})T", file.name)
    if stamp and not days.first.strftime("%Y%m%d") <= stamp[1] <= days.last.strftime("%Y%m%d"):
        return 0
    with suppress(OSError):
        return file.stat().st_size * (1 if file.suffix == ".jsonl" else _PACKED)
    return 0


def check_writable(option: str, url: str) -> None:
    """
    Make the directory if it is on this machine and not there.

    :raise UsageError: it cannot be written to.
    """
    path = local_path(url)
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise click.UsageError(f"{option} {url}: cannot be written: {error.strerror}") from None


def spark_options(command: Command) -> Command:
    """Options of every command that starts Spark."""
    for option in reversed(_SPARK_OPTIONS):
        command = option(command)
    return command


_SPARK_OPTIONS = (
    click.option("--master", metavar="URL", help="Cluster to run on, or local[N]. Default: this machine."),
    click.option("--memory", metavar="SIZE", type=size, help="Of Java. Default: half of what there is, at most 4g."),
    click.option("--scratch", metavar="DIR", help="For temporary files. Default: that of the system."),
    click.option("--ui", is_flag=True, help="Serve Spark's pages on 127.0.0.1:4040."),
    click.option("--conf", metavar="KEY=VALUE", multiple=True, help="A setting of Spark; may be repeated."),
    click.option("--debug", is_flag=True, help="Show what Java says, and full traces of errors."),
)
