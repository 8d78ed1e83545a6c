"""A month with everything that can go wrong, analysed as a back-fill: each incident is found, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from analytics.errors import EXIT_INTEGRITY, EXIT_OK
from analytics.job import Span
from analytics.nightly import NightlyOutcome, NightlyRequest, run_nightly
from analytics.reading.files import FileSystem
from analytics.sample import generate_logs
from analytics.sample.ground_truth import (
    INCIDENT_SCHEDULE,
    DayTruth,
    Finding,
    SampleSpec,
    SampleTruth,
    find_incidents,
)
from analytics.settings import Settings
from analytics.writing.warehouse import Warehouse

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

SPEC = SampleSpec(
    wallets=250, messages_per_day=1000, gauge_s=600, segment_hours=6, queue_max_messages=200, compress=False
)
SETTINGS = Settings(queue_max_messages=SPEC.queue_max_messages)
# Days with incidents, and those after them; the wallets that stay away fill queues for four days, then empty them.
LOUD = {day + after for day, _ in INCIDENT_SCHEDULE.values() for after in (0, 1)} | set(range(12, 18))


@dataclass(frozen=True)
class MonthOfLogs:
    """:param before: rows of each table as they were before the late segment came."""

    truth: SampleTruth
    warehouse: Warehouse
    first: NightlyOutcome
    second: NightlyOutcome
    before: Mapping[str, list[Row]]
    found_before: list[Finding]

    def rows(self, table: str, where: str = "true") -> list[Row]:
        """Of the whole month."""
        return read(self.warehouse, table, where)

    def day(self, number: int) -> date:
        return SPEC.first_day + timedelta(number)

    @property
    def quiet(self) -> list[date]:
        """Days on which nothing happens, but for the first, on which everything is new."""
        return [self.day(number) for number in range(1, SPEC.days) if number not in LOUD]


def read(warehouse: Warehouse, table: str, where: str = "true") -> list[Row]:
    return warehouse.read(table, Span(SPEC.first_day, SPEC.last_day)).where(where).collect()


@pytest.fixture(scope="module")
def month(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MonthOfLogs]:
    """Made up and analysed once: all days, and then the last one again as a segment had come late."""
    place = tmp_path_factory.mktemp("month")
    truth = generate_logs(place / "logs", SPEC)
    files, warehouse = FileSystem(spark), Warehouse(spark, FileSystem(spark), str(place / "out"))
    first = _run(spark, place, Span(SPEC.first_day, SPEC.last_day))
    before = {name: read(warehouse, name) for name in ("ledger_daily", "boots_daily", "reconciliation_daily")}
    found = find_incidents(warehouse, truth)
    truth.deliver_late_segments()
    second = _run(spark, place, Span(SPEC.last_day, SPEC.last_day))
    yield MonthOfLogs(truth, Warehouse(spark, files, str(place / "out")), first, second, before, found)


def _run(spark: SparkSession, place: Path, span: Span) -> NightlyOutcome:
    request = NightlyRequest(
        logs=[str(place / "logs")],
        out=str(place / "out"),
        span=span,
        settings=SETTINGS,
        scratch=str(place),
        keys=str(place / "keys"),
    )
    return run_nightly(spark, FileSystem(spark), request, lambda line: None)


# --- everything adds up ---------------------------------------------------------------------------------------------


def test_the_ledger_is_exact_before_and_after_the_late_segment(month: MonthOfLogs) -> None:
    assert _ledger(month.before["ledger_daily"]) == _true_ledger(month.truth.days_before_late)
    assert _ledger(month.rows("ledger_daily")) == _true_ledger(month.truth.days)
    assert not month.rows("ledger_daily", "difference <> 0")


def _ledger(rows: list[Row]) -> dict[date, dict[str, int]]:
    same = ("opening", "accepted", "acked", "expired", "evicted", "removed", "open", "again", "overdue")
    return {
        row.dt: {**{name: row[name] for name in same}, "orphans": row.orphans + row.around_crash + row.before_books}
        for row in rows
    }


def _true_ledger(days: Mapping[date, DayTruth]) -> dict[date, dict[str, int]]:
    return {day: asdict(truth.ledger) for day, truth in days.items()}


def test_missing_lines_are_counted_exactly(month: MonthOfLogs) -> None:
    for rows, days in (
        (month.before["boots_daily"], month.truth.days_before_late),
        (month.rows("boots_daily"), month.truth.days),
    ):
        counted = {(row.dt, row.node, row.boot): (row.n, row.missing, row.doubled) for row in rows}
        true = {
            (day, *name): (boot.lines, boot.missing, 0)
            for day, truth in days.items()
            for name, boot in truth.boots.items()
        }
        assert counted == true


def test_counters_differ_exactly_by_what_was_lost(month: MonthOfLogs) -> None:
    for rows, days in (
        (month.before["reconciliation_daily"], month.truth.days_before_late),
        (month.rows("reconciliation_daily"), month.truth.days),
    ):
        counted: Counter[tuple[date, str]] = Counter()
        for row in rows:
            if row.difference:
                counted[row.dt, row.node] += row.difference
        true: Counter[tuple[date, str]] = Counter()
        for day, truth in days.items():
            for (node, _), drift in truth.drift.items():
                true[day, node] += drift
        assert counted == true


def test_traffic_is_exact(month: MonthOfLogs) -> None:
    counted: Counter[tuple[date, str, str]] = Counter()
    for row in month.rows("traffic_daily"):
        counted[row.dt, row.node, row.event] += row.n
    assert counted == {
        (day, *name): n
        for day, truth in month.truth.days.items()
        for name, n in truth.events.items()
        if name[1].startswith("msg.") or name[1] == "req.done"
    }


def test_bytes_accepted_are_exact(month: MonthOfLogs) -> None:
    rows = month.rows("traffic_daily", "event = 'msg.accept'")
    assert _summed(rows, "bytes") == {day: truth.bytes["msg.accept"] for day, truth in month.truth.days.items()}


def test_losses_refusals_limits_and_replays_are_exact(month: MonthOfLogs) -> None:
    days = month.truth.days
    assert _summed(month.rows("lost_daily"), "n", "reason") == _true(days, "lost")
    assert _summed(month.rows("limits_daily"), "hits", "limit") == _true(days, "limits")
    assert _summed(month.rows("replay_daily"), "n", "code") == _true(days, "replays")
    errors = _summed(month.rows("errors_daily"), "n", "proto", "mtype", "status", "code")
    assert errors == {(day, *name): n for day, truth in days.items() for name, n in truth.errors.items()}


def test_sockets_are_exact(month: MonthOfLogs) -> None:
    counted = {(row.dt, row.node): (row.opened, row.authenticated, row.closed) for row in month.rows("sockets_daily")}
    assert counted == {
        (day, node): (sockets["opened"], sockets["authenticated"], sockets["closed"])
        for day, truth in month.truth.days.items()
        for node, sockets in truth.sockets.items()
    }
    unclosed = {(row.dt, row.node): row.unclosed for row in month.rows("sockets_daily", "unclosed > 0")}
    assert unclosed == {
        (day, node): n for day, truth in month.truth.days.items() for node, n in truth.unclosed.items()
    }


def test_top_senders_are_those_who_sent_most(month: MonthOfLogs) -> None:
    counted: dict[date, list[int]] = {day: [] for day in month.truth.days}
    shown: dict[date, list[int]] = {day: [] for day in month.truth.days}
    for row in sorted(month.rows("top_senders"), key=lambda row: (row.dt, row.rank)):
        counted[row.dt].append(row.n)
        if row.sender != "others":
            shown[row.dt].append(row.n)
    for day, truth in month.truth.days.items():
        most = [n for _, n in truth.senders.most_common(SETTINGS.top)]
        assert sum(counted[day]) == sum(most)
        assert len(shown[day]) > 10
        assert not Counter(shown[day]) - Counter(most)


def test_damaged_lines_are_counted_and_kept(month: MonthOfLogs) -> None:
    true = {day: sum(truth.damaged.values()) for day, truth in month.truth.days.items() if truth.damaged}
    assert _summed(month.rows("inputs", "corrupt > 0"), "corrupt") == true
    assert len(month.rows("quarantine")) == sum(true.values())


def _summed(rows: list[Row], value: str, *by: str) -> dict[Any, int]:
    found: Counter[Any] = Counter()
    for row in rows:
        found[(row.dt, *(row[name] for name in by)) if by else row.dt] += row[value]
    return {key: n for key, n in found.items() if n}


def _true(days: Mapping[date, DayTruth], field: str) -> dict[tuple[date, str], int]:
    return {(day, name): n for day, truth in days.items() for name, n in getattr(truth, field).items()}


# --- incidents ------------------------------------------------------------------------------------------------------


def test_a_run_says_that_lines_are_missing_and_where(month: MonthOfLogs) -> None:
    """The second one, which is about the last days only, finds nothing any more: the late segment has come."""
    assert (month.first.exit_status, month.second.exit_status) == (EXIT_INTEGRITY, EXIT_OK)
    for name in ("crash", "disk_full", "late_segment"):
        day = str(month.truth.incidents[name].day)
        assert any(day in line for line in month.first.integrity_errors), name
    assert not month.second.integrity_errors


def test_every_incident_was_planted(month: MonthOfLogs) -> None:
    assert set(month.truth.incidents) == set(INCIDENT_SCHEDULE)


@pytest.mark.parametrize("name", INCIDENT_SCHEDULE)
def test_an_incident_is_found(month: MonthOfLogs, name: str) -> None:
    found = {one.incident.name: one.text for one in find_incidents(month.warehouse, month.truth)}
    assert found[name], month.truth.incidents[name]


def test_what_is_found_of_an_incident_is_what_was_planted(month: MonthOfLogs) -> None:
    found = {one.incident.name: one.text for one in find_incidents(month.warehouse, month.truth)}
    planted = {name: incident.details for name, incident in month.truth.incidents.items()}
    assert f"{planted['crash']['missing']} lines missing, 2 damaged" in found["crash"]
    assert f"{planted['disk_full']['dropped']} lines dropped" in found["disk_full"]
    assert found["abuse_burst"] == f"{planted['abuse_burst']['hits']} refusals in 1 bursts"
    assert found["replay_attack"] == f"{planted['replay_attack']['n']} replayed, anomalies in 1 hours"
    assert found["vanished_message"].startswith("1 more overdue message")
    assert found["clock_skew"] == f"{planted['clock_skew']['n']} requests 5 to 10 minutes off"
    assert found["new_error"] == f"{planted['new_error']['code']} is new, {planted['new_error']['n']} times"
    assert found["traffic_drop"] == "traffic less than half of the usual in the hours 12, 13"
    late = {one.incident.name: one.text for one in month.found_before}["late_segment"]
    assert "lines missing until the segment arrives" in late
    assert found["late_segment"].endswith("nothing is missing any longer")


# --- quiet days -----------------------------------------------------------------------------------------------------


def test_nothing_of_the_kind_is_found_on_quiet_days(month: MonthOfLogs) -> None:
    quiet = month.quiet
    assert len(quiet) >= 5

    def on_quiet_days(table: str, where: str) -> list[Row]:
        return [row for row in month.rows(table, where) if row.dt in quiet]

    assert not on_quiet_days("boots_daily", "missing > 0 OR doubled > 0 OR stepped_back > 0")
    assert not on_quiet_days("reconciliation_daily", "difference <> 0")
    assert not on_quiet_days("lost_daily", "reason <> 'ttl'")
    assert not on_quiet_days("limits_daily", "hits > 0")
    assert not on_quiet_days("replay_daily", "n > 0")
    assert not on_quiet_days("errors_daily", "is_new")
    assert not on_quiet_days("sockets_daily", "unclosed > 0 OR storm_minutes > 0")
    assert not on_quiet_days("inputs", "corrupt > 0 OR state = 'crashed'")
    assert len(on_quiet_days("node_compare", "flagged")) <= len(on_quiet_days("node_compare", "true")) / 100


def test_false_alarms_are_few(month: MonthOfLogs) -> None:
    alarms = [row for row in month.rows("anomalies") if row.dt in month.quiet]
    looked_at = len([row for row in month.rows("series_hourly") if row.dt in month.quiet])
    assert len(alarms) <= looked_at / 200, [(row.dt, row.hour, row.metric, row.reason) for row in alarms]
