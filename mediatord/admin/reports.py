"""The reports of the nightly analysis, as files: one directory a day, with a page and its tables."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import IO

from mediatord.protocol import jsontext

INDEX = "index.html"
_SUMMARY = "summary.json"
# Days that are listed, and bytes of a summary that are read.
_LISTED = 14
_LARGEST_SUMMARY = 262_144
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}(\.[a-z]{3,4})")
_TYPES = {".html": b"text/html; charset=utf-8", ".csv": b"text/csv; charset=utf-8", ".json": b"application/json"}
_STATES = ("good", "warn", "bad")
# A FIFO would be waited for, and a link may lead anywhere.
_PLAINLY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Report:
    """
    :param day: as in its path.
    :param written_at: seconds since the epoch.
    :param state: `good`, `warn` or `bad`; empty if it does not say.
    :param verdict: a sentence; empty likewise.
    """

    day: str
    written_at: float
    state: str = ""
    verdict: str = ""


@dataclass(frozen=True, slots=True)
class ReportFile:
    """:param file: open, to be closed by whoever has it."""

    file: IO[bytes]
    size: int
    content_type: bytes


class Reports:
    """:param directory: what is below is served, but for what is neither a plain file nor of a type that is known."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def latest(self) -> list[Report]:
        """The last ones that there are, latest first; none if the directory cannot be read."""
        days: list[str] = []
        with suppress(OSError), os.scandir(self._directory) as entries:
            days = sorted((entry.name for entry in entries if _is_day(entry.name)), reverse=True)
        found = (self._report(day) for day in days[: 2 * _LISTED])
        return [report for report in found if report is not None][:_LISTED]

    def open(self, day: str, name: str) -> ReportFile | None:
        """A file of the report of a day; None if there is none that may be seen."""
        named = _NAME.fullmatch(name)
        if not _is_day(day) or named is None or named[1] not in _TYPES:
            return None
        try:
            with _directory(self._directory) as base, _directory(day, os.O_NOFOLLOW, base) as folder:
                descriptor = os.open(name, _PLAINLY, dir_fd=folder)
        except OSError:
            return None
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            return None
        return ReportFile(os.fdopen(descriptor, "rb"), status.st_size, _TYPES[named[1]])

    def _report(self, day: str) -> Report | None:
        page = self.open(day, INDEX)
        if page is None:
            return None
        with page.file:
            written_at = os.fstat(page.file.fileno()).st_mtime
        return Report(day, written_at, *self._verdict(day))

    def _verdict(self, day: str) -> tuple[str, str]:
        summary = self.open(day, _SUMMARY)
        if summary is None:
            return "", ""
        with summary.file:
            raw = summary.file.read(_LARGEST_SUMMARY)
        try:
            said = jsontext.loads_object(raw)
        except ValueError:
            return "", ""
        state, verdict = said.get("state"), said.get("verdict")
        return (state if state in _STATES else "", verdict[:500] if isinstance(verdict, str) else "")


def _is_day(name: str) -> bool:
    if not _DAY.fullmatch(name):
        return False
    try:
        date.fromisoformat(name)
    except ValueError:
        return False
    return True


@contextmanager
def _directory(name: Path | str, flags: int = 0, inside: int | None = None) -> Iterator[int]:
    """:raise OSError: it is none, or cannot be opened."""
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags, dir_fd=inside)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
