"""
Totals three ways: known by construction, counted by DuckDB in the raw lines, and published by nightly runs.

The logs have two nodes, every kind of damage, repeated lines and files, a crash, a full disk, and a segment that
arrives after the first run.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from analytics.errors import EXIT_INTEGRITY
from analytics.sample import generate_logs
from analytics.sample.ground_truth import DayTruth, SampleSpec, SampleTruth
from tests.analytics.raw_log_totals import (
    TOTALS,
    Rows,
    count_published,
    count_raw,
    describe_differences,
    find_latency_errors,
    open_published,
    open_raw_log,
)

SPEC = SampleSpec(
    days=5,
    nodes=("mediator-a", "mediator-b"),
    wallets=60,
    messages_per_day=250,
    queue_max_messages=60,
    ttl_s=86_400,
    gauge_s=600,
    segment_hours=6,
    compress=False,
    schedule={
        "vanished_message": (0, 9),
        "expiry_wave": (1, 6),
        "eviction_storm": (1, 10),
        "crash": (1, 14),
        "slow_node": (2, 0),
        "replay_attack": (2, 11),
        "new_error": (2, 13),
        "abuse_burst": (2, 15),
        "clock_skew": (3, 8),
        "late_segment": (3, 9),
        "disk_full": (3, 16),
    },
)
ENGINES = ("spark", "duckdb")
SETTINGS = f"k_anonymity: 1\nqueue_max_messages: {SPEC.queue_max_messages}\n"
DAY_BEFORE_LATE = date.fromordinal(SPEC.last_day.toordinal() - 1)
REPEATED_LINES = 5

DAMAGES: Mapping[str, Callable[[bytes], bytes]] = {
    "torn": lambda line: line[:60],
    "nul": lambda line: line[:30] + bytes(8) + line[38:],
    "utf8": lambda line: line.replace(b'"gauge"', b'"ga\xffge"'),
    "not_json": lambda line: line.replace(b":", b";", 1),
    "type": lambda line: re.sub(rb'"depth":\d+', b'"depth":"many"', line),
    "missing": lambda line: line.replace(b'"level":"info",', b""),
    "time": lambda line: line.replace(b'Z"', b'+00:00"', 1),
}


@dataclass
class LogFiles:
    """
    The files of generated logs, as they are damaged; `truth` changes accordingly.

    :ivar damaged: day, node and cause to lines.
    :ivar repeated: day, node and boot to lines.
    """

    truth: SampleTruth
    damaged: Counter[tuple[date, str, str]] = field(default_factory=Counter)
    repeated: Counter[tuple[date, str, str]] = field(default_factory=Counter)

    def damage(self) -> None:
        """Damage lines, repeat lines and files, and compress some of the files."""
        crash = self.truth.incidents["crash"]
        self.damaged.update((crash.day, crash.details["node"], cause) for cause in ("nul", "torn"))
        stems = sorted(self.truth.directory.glob("*/events-*.jsonl"), key=lambda path: path.name)
        places = iter(stems[3::3])
        for cause in DAMAGES:
            self._damage_line(next(places), cause)
        self._glue_lines(next(places))
        self._prefix_line(next(places))
        self._repeat_lines(stems)
        self._copy_files(stems)

    def _damage_line(self, path: Path, cause: str) -> None:
        lines = path.read_bytes().splitlines(keepends=True)
        index = self._forget_gauge(path, lines, cause)
        lines[index] = DAMAGES[cause](lines[index].rstrip(b"\n")) + b"\n"
        path.write_bytes(b"".join(lines))

    def _glue_lines(self, path: Path) -> None:
        """Tear a line, and continue with the next one, of counters."""
        lines = path.read_bytes().splitlines(keepends=True)
        index = self._forget_gauge(path, lines, "glued")
        self._forget(json.loads(lines[index + 1]))
        lines[index] = lines[index][:60]
        path.write_bytes(b"".join(lines))

    def _prefix_line(self, path: Path) -> None:
        """Begin a line with a record separator, which changes nothing."""
        lines = path.read_bytes().splitlines(keepends=True)
        lines[len(lines) // 2] = b"\x1e" + lines[len(lines) // 2]
        path.write_bytes(b"".join(lines))

    def _repeat_lines(self, paths: list[Path]) -> None:
        """Repeat lines of a segment in the next one of the same day and process."""
        path, after = next(
            (one, other) for one in paths for other in paths if one < other and _get_origin(one) == _get_origin(other)
        )
        lines, more = path.read_bytes().splitlines(keepends=True), after.read_bytes().splitlines(keepends=True)
        after.write_bytes(b"".join([more[0], *lines[1 : 1 + REPEATED_LINES], *more[1:]]))
        self.repeated[_get_origin(path)] += REPEATED_LINES

    def _copy_files(self, paths: list[Path]) -> None:
        """Compress some files, one of them without deleting the plain one; copy others to another directory."""
        restored = self.truth.directory / "restored"
        restored.mkdir()
        for path in paths[::4]:
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
            if path is not paths[0]:
                path.unlink()
        for path in paths[1::8]:
            shutil.copy(path, restored)

    def _forget_gauge(self, path: Path, lines: list[bytes], cause: str) -> int:
        """Index of the line of a gauge that will not be an event."""
        gauges = [index for index, line in enumerate(lines) if b'"event":"gauge"' in line]
        index = gauges[len(gauges) // 2]
        self._forget(json.loads(lines[index]))
        day, node, _ = _get_origin(path)
        self.damaged[day, node, cause] += 1
        return index

    def _forget(self, event: Mapping[str, Any]) -> None:
        """A line that is lost, although the daemon has written it."""
        for days in (self.truth.days, self.truth.days_before_late):
            day = days[date.fromisoformat(event["ts"][:10])]
            day.events[event["node"], event["event"]] -= 1
            boot = day.boots[event["node"], event["boot"]]
            boot.lines -= 1
            boot.missing += 1


def _get_origin(path: Path) -> tuple[date, str, str]:
    """Day, node and boot of a segment."""
    name = re.match(r"events-(\d{8})T\d{6}Z-(.*)-([0-9a-f]+)-\d+", path.name)
    assert name is not None
    return date.fromisoformat(name[1]), name[2], name[3]


@dataclass(frozen=True)
class Night:
    """
    Totals of all days so far after a night.

    :ivar days: by construction.
    :ivar raw: of the raw lines.
    :ivar published: engine to those of its tables.
    :ivar latency_errors: percentiles that differ too much.
    """

    days: Mapping[date, DayTruth]
    raw: Mapping[str, Rows]
    published: dict[str, Mapping[str, Rows]]
    latency_errors: list[str]


@dataclass(frozen=True)
class Nights:
    """:ivar before: without the late segment. :ivar after: of all days, with it. :ivar out: engine to its results."""

    files: LogFiles
    before: Night
    after: Night
    out: Mapping[str, Path]


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Nights:
    """Two nights of each engine: a back-fill of four days; the fifth day, with the segment that arrived late."""
    directory = tmp_path_factory.mktemp("nights")
    files, out = LogFiles(generate_logs(directory / "logs", SPEC)), {name: directory / name for name in ENGINES}
    files.damage()
    truth = files.truth
    before = _analyze(truth, truth.days_before_late, out, SPEC.first_day, DAY_BEFORE_LATE)
    truth.deliver_late_segments()
    return Nights(files, before, _analyze(truth, truth.days, out, SPEC.last_day, SPEC.last_day), out)


def _analyze(
    truth: SampleTruth, days: Mapping[date, DayTruth], outs: Mapping[str, Path], first: date, last: date
) -> Night:
    """Run a night of each engine over some days."""
    span, raw = (SPEC.first_day, last), open_raw_log(truth.directory)
    night = Night({day: one for day, one in days.items() if day <= last}, count_raw(raw, *span), {}, [])
    for engine, out in outs.items():
        _run_night(engine, truth.directory, out, first, last)
        tables = open_published(out)
        night.published[engine] = count_published(tables, *span)
        night.latency_errors.extend(find_latency_errors(raw, tables, *span))
    return night


def _run_night(engine: str, logs: Path, out: Path, first: date, last: date) -> None:
    settings = out.with_suffix(".yaml")
    settings.write_text(SETTINGS)
    options = ["--engine", engine, "--logs", logs, "--out", out, "--from", first, "--to", last]
    options += ["--settings", settings, "--scratch", out.parent]
    command = [sys.executable, "-m", "analytics", "nightly", *map(str, options)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    # Lines are missing in both nights.
    assert run.returncode == EXIT_INTEGRITY, run.stderr


# --- raw lines and published tables ---------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_published_tables_equal_raw_lines(nights: Nights, engine: str) -> None:
    for night in (nights.before, nights.after):
        assert describe_differences(night.raw, night.published[engine]) == []


def test_engines_publish_equal_rows(nights: Nights) -> None:
    """All tables, to the last digit."""
    one, other = (open_published(nights.out[name]) for name in ENGINES)
    names = [row[0] for row in one.execute("SELECT view_name FROM duckdb_views() WHERE NOT internal").fetchall()]
    assert len(names) > len(TOTALS)
    for name in names:
        rows = [Counter(database.execute(f'SELECT * FROM "{name}"').fetchall()) for database in (one, other)]
        assert rows[0] == rows[1], name


def test_comparison_finds_a_changed_row(nights: Nights) -> None:
    raw, published = nights.after.raw, dict(nights.after.published["duckdb"])
    (day, reason, n, size), *others = published["lost"]
    published["lost"] = [(day, reason, n + 1, size), *others]
    assert describe_differences(raw, published) == [
        f"lost: {(day, reason, n, size)} only in raw lines",
        f"lost: {(day, reason, n + 1, size)} only in published",
    ]


@pytest.mark.parametrize("name", TOTALS)
def test_every_total_has_rows(nights: Nights, name: str) -> None:
    """Otherwise nothing is compared."""
    assert nights.after.raw[name]


def test_percentiles_are_within_error_of_histogram(nights: Nights) -> None:
    assert nights.before.latency_errors == nights.after.latency_errors == []


def test_late_segment_changes_totals(nights: Nights) -> None:
    late = nights.files.truth.incidents["late_segment"].day
    for name in ("events", "ledger", "missing", "traffic", "sockets"):
        of_day = [[row for row in night.raw[name] if row[0] == late] for night in (nights.before, nights.after)]
        assert of_day[0] != of_day[1], name


# --- ground truth and raw lines -------------------------------------------------------------------------------------


def test_damage_is_found_by_cause(nights: Nights) -> None:
    assert {cause for _, _, cause in nights.files.damaged} == {*DAMAGES, "glued"}
    assert _sum_rows(nights.after.raw["damaged"], (0, 1, 2), 3) == nights.files.damaged


def test_repeated_lines_are_found(nights: Nights) -> None:
    assert _sum_rows(nights.after.raw["duplicates"], (0, 1, 2), 3) == nights.files.repeated


def test_dropped_lines_are_found(nights: Nights) -> None:
    full = nights.files.truth.incidents["disk_full"]
    assert nights.after.raw["dropped"] == [(full.day, full.details["node"], full.details["dropped"])]


Counts = Mapping[Any, int]


def _count_traffic(truth: DayTruth) -> Counts:
    return {key: n for key, n in truth.events.items() if key[1] == "req.done" or key[1].startswith("msg.")}


def _count_sockets(kind: str) -> Callable[[DayTruth], Counts]:
    return lambda truth: {node: counts[kind] for node, counts in truth.sockets.items()}


def _rank(members: Counter[str]) -> Counts:
    return {rank: n for rank, (_, n) in enumerate(members.most_common(20), 1)}


# Total, columns of its key and of its value, and the same by construction.
TRUTHS: list[tuple[str, tuple[int, ...], int, Callable[[DayTruth], Counts]]] = [
    ("events", (0, 1), 2, lambda truth: Counter(node for node, _ in truth.events.elements())),
    ("events_by_name", (0, 1, 2), 3, lambda truth: truth.events),
    ("missing", (0, 1, 2), 3, lambda truth: {name: boot.missing for name, boot in truth.boots.items()}),
    ("traffic_by_day", (0, 1, 3), 4, _count_traffic),
    ("ledger", (0, 1), 2, lambda truth: asdict(truth.ledger)),
    ("lost", (0, 1), 2, lambda truth: truth.lost),
    ("refused", (0, 1, 2, 3, 4), 5, lambda truth: truth.errors),
    ("limits", (0, 1), 2, lambda truth: truth.limits),
    ("replays", (0, 1), 2, lambda truth: truth.replays),
    ("sockets", (0, 1), 2, _count_sockets("opened")),
    ("sockets", (0, 1), 3, _count_sockets("authenticated")),
    ("sockets", (0, 1), 4, _count_sockets("closed")),
    ("sockets", (0, 1), 5, lambda truth: truth.unclosed),
    ("sockets", (0, 1), 6, lambda truth: truth.peaks),
    ("top_senders", (0, 1), 3, lambda truth: _rank(truth.senders)),
    ("top_recipients", (0, 1), 3, lambda truth: _rank(truth.recipients)),
    ("pushes", (0, 1, 2, 3), 5, lambda truth: truth.pushes),
    ("wakeups", (0, 1), 2, lambda truth: truth.wakeups),
    ("wakeups", (0, 1), 3, lambda truth: truth.missed),
    ("counters", (0, 1, 2), 5, lambda truth: truth.drift),
]


@pytest.mark.parametrize(("name", "key", "value", "count"), TRUTHS)
def test_raw_lines_equal_truth(
    nights: Nights, name: str, key: tuple[int, ...], value: int, count: Callable[[DayTruth], Counts]
) -> None:
    for night in (nights.before, nights.after):
        expected = {
            (day, *(name if isinstance(name, tuple) else (name,))): n
            for day, truth in night.days.items()
            for name, n in count(truth).items()
            if n
        }
        assert _sum_rows(night.raw[name], key, value) == expected


def _sum_rows(rows: Rows, key: tuple[int, ...], value: int) -> dict[tuple[Any, ...], int]:
    found: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        found[tuple(row[column] for column in key)] += row[value]
    return {name: n for name, n in found.items() if n}
