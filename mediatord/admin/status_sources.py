"""Sources of the status page: recent traffic, recent problems, and the reports of the nightly analysis."""

from __future__ import annotations

import os
import re
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from twisted.internet.interfaces import IReactorTime
from twisted.logger import ILogObserver, LogEvent, LogLevel, formatEvent
from zope.interface import implementer

from mediatord.protocol import encoding

# Seconds of a slot; slots of the last hour are kept.
SLOT_SECONDS = 10
_SLOTS_PER_MINUTE, _SLOTS_PER_HOUR = 60 // SLOT_SECONDS, 3600 // SLOT_SECONDS


class TrafficKind(NamedTuple):
    """
    What is counted on the page under one name.

    :param counters: summed up (:meth:`~mediatord.observability.metrics.Metrics.totals`).
    :param metric: of the total of all processes.
    """

    counters: tuple[str, ...]
    metric: str
    description: str


_REQUESTS = "mediator_requests_total"
TRAFFIC_KINDS: Mapping[str, TrafficKind] = {
    "accepted": TrafficKind(("forwarded",), "mediator_messages_forwarded_total", "messages for a recipient"),
    "delivered": TrafficKind(("delivered",), "mediator_messages_delivered_total", "acknowledged by the wallet"),
    "refused": TrafficKind(
        ("requests_rejected",), f'{_REQUESTS}{{outcome="rejected"}}', "requests rejected (client errors)"
    ),
    "failed": TrafficKind(
        ("requests_failed",), f'{_REQUESTS}{{outcome="failed"}}', "requests failed (server errors)"
    ),
    "requests": TrafficKind(
        ("requests_accepted", "requests_rejected", "requests_failed"), _REQUESTS, "and WebSocket messages, total"
    ),
    "stored": TrafficKind(("stored",), "mediator_messages_stored_total", "queued, because not pushed at once"),
    "expired": TrafficKind(("expired",), "mediator_messages_expired_total", "not fetched within queue.ttl"),
    "evicted": TrafficKind(("evicted",), "mediator_messages_evicted_total", "removed from full queues"),
}

# Number of the slot since the epoch, and its counts in the order of TRAFFIC_KINDS.
TrafficSlot = list[int]


class TrafficHistory:
    """
    Records the growth of this process's counters in slots.

    :param totals: current values.
    """

    def __init__(self, clock: IReactorTime, totals: Callable[[], Mapping[str, int]]) -> None:
        self._clock = clock
        self._totals = totals
        self._last = self._counts()
        self._slots: dict[int, list[int]] = {}

    def sample(self) -> None:
        """Add the growth since the last call to the current slot."""
        counts, last = self._counts(), self._last
        self._last = counts
        present = int(self._clock.seconds()) // SLOT_SECONDS
        # Slots of the future, from before a clock was set back, are dropped.
        self._slots = {
            slot: grown for slot, grown in self._slots.items() if present - _SLOTS_PER_HOUR < slot <= present
        }
        grown = [now - before for now, before in zip(counts, last, strict=True)]
        if any(grown):
            earlier = self._slots.get(present, [0] * len(grown))
            self._slots[present] = [one + more for one, more in zip(earlier, grown, strict=True)]

    def slots(self) -> list[TrafficSlot]:
        """Slots with counts, up to now."""
        self.sample()
        return [[slot, *grown] for slot, grown in self._slots.items()]

    def totals(self) -> dict[str, int]:
        """Totals since the start of the process, as of the last sample."""
        return dict(zip(TRAFFIC_KINDS, self._last, strict=True))

    def _counts(self) -> list[int]:
        totals = self._totals()
        return [sum([totals[name] for name in kind.counters]) for kind in TRAFFIC_KINDS.values()]


def count_by_minute(processes: Iterable[Sequence[TrafficSlot]], now: float) -> dict[str, tuple[int, ...]]:
    """Sums of the slots of all processes by minute of the last hour, oldest first, for each kind of traffic."""
    present = int(now) // SLOT_SECONDS
    sums = [[0] * _SLOTS_PER_HOUR for _ in TRAFFIC_KINDS]
    for slot, *grown in [slot for slots in processes for slot in slots]:
        age = present - slot
        if 0 <= age < _SLOTS_PER_HOUR:
            for series, more in zip(sums, grown, strict=True):
                series[_SLOTS_PER_HOUR - 1 - age] += more
    starts = range(0, _SLOTS_PER_HOUR, _SLOTS_PER_MINUTE)
    minutes = [tuple([sum(series[start : start + _SLOTS_PER_MINUTE]) for start in starts]) for series in sums]
    return dict(zip(TRAFFIC_KINDS, minutes, strict=True))


def measure_traffic_spans(now: float, uptime: float) -> tuple[float, float]:
    """
    Seconds that the counts of the last minute and of the last hour cover.

    :param uptime: of the oldest process.
    """
    incomplete_slot = now % SLOT_SECONDS
    minute, hour = [
        max(1.0, min(uptime, (number - 1) * SLOT_SECONDS + incomplete_slot))
        for number in (_SLOTS_PER_MINUTE, _SLOTS_PER_HOUR)
    ]
    return minute, hour


ProblemSource = Literal["request", "output"]

# Most recent kinds of problems that are kept of each source.
MAX_PROBLEMS = 50
# Characters.
_MAX_LINE_LENGTH = 300
_OWN_NAMESPACE = "mediatord"
_REPORTED_LEVELS = (LogLevel.warn, LogLevel.error, LogLevel.critical)


@dataclass(frozen=True, slots=True)
class ProblemSummary:
    """
    A kind of problem and its occurrences.

    :param kind: name of the situation, or log level.
    :param where: `didcomm`, `didcomm_v1` or `decentrl`, or the module that logged.
    :param text: error code, or the last log line.
    :param count: occurrences since `first`.
    """

    source: ProblemSource
    kind: str
    where: str
    text: str
    count: int
    first: float
    last: float


@implementer(ILogObserver)
class RecentProblems:
    """Keeps recent problems: rejected requests and logged warnings; no text of peers."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._kept: dict[ProblemSource, OrderedDict[tuple[str, ...], ProblemSummary]] = {
            "request": OrderedDict(),
            "output": OrderedDict(),
        }

    def refused(self, protocol: str, situation: str, code: str) -> None:
        """Record a rejected or failed request; a callback of the event recorder."""
        self._note((protocol, situation, code), "request", situation, protocol, code)

    def __call__(self, event: LogEvent) -> None:
        """Record a log event. Texts of other packages are not kept."""
        level = event.get("log_level")
        if level not in _REPORTED_LEVELS:
            return
        namespace = str(event.get("log_namespace", ""))
        # Output of a worker, which records its own problems.
        if "worker" in event and event.get("log_format") == "{worker}: {text}":
            return
        if namespace.partition(".")[0] != _OWN_NAMESPACE or event.get("log_format") is None:
            self._note((level.name, namespace), "output", level.name, namespace, "see the standard output")
            return
        text = formatEvent(event)[:_MAX_LINE_LENGTH]
        where = namespace.partition(".")[2] or namespace
        self._note((level.name, namespace, str(event["log_format"])), "output", level.name, where, text)

    def list_problems(self) -> list[dict[str, Any]]:
        """All problems as plain values, for :func:`merge_problems`."""
        return [asdict(one) for kept in self._kept.values() for one in kept.values()]

    def _note(self, key: tuple[str, ...], source: ProblemSource, kind: str, where: str, text: str) -> None:
        now, kept = self._clock.seconds(), self._kept[source]
        before = kept.pop(key, None)
        first, count = (now, 0) if before is None else (before.first, before.count)
        kept[key] = ProblemSummary(source, kind, where, text, count + 1, first, now)
        if len(kept) > MAX_PROBLEMS:
            kept.popitem(last=False)


def merge_problems(processes: Iterable[Iterable[Mapping[str, Any]]], source: ProblemSource) -> list[ProblemSummary]:
    """
    Merge the problems of several processes, the most recent first.

    :param processes: results of :meth:`RecentProblems.list_problems`.
    """
    found: dict[tuple[str, str, str], ProblemSummary] = {}
    for one in [ProblemSummary(**values) for problems in processes for values in problems]:
        if one.source != source:
            continue
        key = one.kind, one.where, one.text
        other = found.get(key, one)
        count = one.count if other is one else one.count + other.count
        first, last = min(one.first, other.first), max(one.last, other.last)
        found[key] = replace(one, count=count, first=first, last=last)
    return sorted(found.values(), key=lambda one: one.last, reverse=True)[:MAX_PROBLEMS]


REPORT_INDEX = "index.html"
_SUMMARY_FILE = "summary.json"
# Days, and bytes.
_MAX_LISTED_REPORTS = 14
_MAX_SUMMARY_BYTES = 262_144
_DAY_PATTERN = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_FILE_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}(\.[a-z]{3,4})")
_CONTENT_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".csv": b"text/csv; charset=utf-8",
    ".json": b"application/json",
}
_REPORT_STATES = ("good", "warn", "bad")
# Opening a FIFO must not block, and links are not followed.
_SAFE_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class AnalysisReport:
    """
    A report of the nightly analysis.

    :param day: as in its path.
    :param written_at: Unix seconds.
    :param state: `good`, `warn` or `bad`; empty if unknown.
    :param verdict: a sentence; empty if unknown.
    """

    day: str
    written_at: float
    state: str = ""
    verdict: str = ""


@dataclass(frozen=True, slots=True)
class AnalysisReportFile:
    """A file of a report. :param file: to be closed by the caller."""

    file: IO[bytes]
    size: int
    content_type: bytes


class ReportDirectory:
    """Serves regular files of known types below a directory, which has a subdirectory for each day."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def latest(self) -> list[AnalysisReport]:
        """The latest reports, newest first; empty if the directory cannot be read."""
        days: list[str] = []
        with suppress(OSError), os.scandir(self._directory) as entries:
            days = sorted((entry.name for entry in entries if _is_day(entry.name)), reverse=True)
        found = (self._report(day) for day in days[: 2 * _MAX_LISTED_REPORTS])
        return [report for report in found if report is not None][:_MAX_LISTED_REPORTS]

    def open(self, day: str, name: str) -> AnalysisReportFile | None:
        """Open a file of the report of a day; None if there is none."""
        named = _FILE_NAME_PATTERN.fullmatch(name)
        if not _is_day(day) or named is None or named[1] not in _CONTENT_TYPES:
            return None
        try:
            with _open_directory(self._directory) as base, _open_directory(day, os.O_NOFOLLOW, base) as folder:
                descriptor = os.open(name, _SAFE_OPEN_FLAGS, dir_fd=folder)
        except OSError:
            return None
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            return None
        return AnalysisReportFile(os.fdopen(descriptor, "rb"), status.st_size, _CONTENT_TYPES[named[1]])

    def _report(self, day: str) -> AnalysisReport | None:
        page = self.open(day, REPORT_INDEX)
        if page is None:
            return None
        with page.file:
            written_at = os.fstat(page.file.fileno()).st_mtime
        return AnalysisReport(day, written_at, *self._verdict(day))

    def _verdict(self, day: str) -> tuple[str, str]:
        summary = self.open(day, _SUMMARY_FILE)
        if summary is None:
            return "", ""
        with summary.file:
            raw = summary.file.read(_MAX_SUMMARY_BYTES)
        try:
            said = encoding.loads_object(raw)
        except ValueError:
            return "", ""
        state, verdict = said.get("state"), said.get("verdict")
        return (state if state in _REPORT_STATES else "", verdict[:500] if isinstance(verdict, str) else "")


def _is_day(name: str) -> bool:
    with suppress(ValueError):
        return bool(_DAY_PATTERN.fullmatch(name) and date.fromisoformat(name))
    return False


@contextmanager
def _open_directory(name: Path | str, flags: int = 0, inside: int | None = None) -> Iterator[int]:
    """Open a directory. :raise OSError: it cannot be opened."""
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags, dir_fd=inside)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
