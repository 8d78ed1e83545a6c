"""A generated month with every kind of incident, analysed as a back-fill: finds exactly these incidents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from analytics.database import Database, Row
from analytics.engine import AnalysisSession
from analytics.errors import EXIT_INTEGRITY, EXIT_OK
from analytics.files import LocalFileSystem
from analytics.job import Span
from analytics.nightly import NightlyOutcome, NightlyRequest, run_nightly
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

SPEC = SampleSpec(
    wallets=250, messages_per_day=1000, gauge_s=600, segment_hours=6, queue_max_messages=200, compress=False
)
SETTINGS = Settings(queue_max_messages=SPEC.queue_max_messages)
# Days with incidents and the days after them; offline wallets fill queues for four days, then empty them.
INCIDENT_DAYS = {day + after for day, _ in INCIDENT_SCHEDULE.values() for after in (0, 1)} | set(range(12, 18))


@dataclass(frozen=True)
class AnalysedMonth:
    """
    A month of generated logs, and the results of two runs over them.

    :ivar before: rows of each table before the late segment arrived.
    """

    truth: SampleTruth
    warehouse: Warehouse
    first: NightlyOutcome
    second: NightlyOutcome
    before: Mapping[str, list[Row]]
    found_before: list[Finding]

    def rows(self, table: str, where: str = "true") -> list[Row]:
        """Rows of the whole month."""
        return read(self.warehouse, table, where)

    def day(self, number: int) -> date:
        return SPEC.first_day + timedelta(number)

    @property
    def quiet_days(self) -> list[date]:
        """Days without incidents, except the first, on which everything is new."""
        return [self.day(number) for number in range(1, SPEC.days) if number not in INCIDENT_DAYS]


def read(warehouse: Warehouse, table: str, where: str = "true") -> list[Row]:
    return warehouse.rows(table, Span(SPEC.first_day, SPEC.last_day), where=where)


@pytest.fixture(scope="module")
def month(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnalysedMonth]:
    """Analysed once, without Spark: all days, and the last day again after a late segment arrived."""
    directory = tmp_path_factory.mktemp("month")
    truth = generate_logs(directory / "logs", SPEC)
    scratch = directory / "scratch"
    scratch.mkdir()
    with Database(str(scratch)) as database:
        session = AnalysisSession(LocalFileSystem(), database, str(scratch))
        warehouse = Warehouse(database, session.files, str(directory / "out"))
        first = _run(session, directory, Span(SPEC.first_day, SPEC.last_day))
        before = {name: read(warehouse, name) for name in ("ledger_daily", "boots_daily", "reconciliation_daily")}
        found = find_incidents(warehouse, truth)
        truth.deliver_late_segments()
        second = _run(session, directory, Span(SPEC.last_day, SPEC.last_day))
        yield AnalysedMonth(
            truth, Warehouse(database, session.files, str(directory / "out")), first, second, before, found
        )


def _run(session: AnalysisSession, directory: Path, span: Span) -> NightlyOutcome:
    request = NightlyRequest(
        logs=[str(directory / "logs")],
        out=str(directory / "out"),
        span=span,
        settings=SETTINGS,
        keys=str(directory / "keys"),
    )
    return run_nightly(session, request, lambda line: None)


# --- exact counts ---------------------------------------------------------------------------------------------------


def test_ledger_is_exact_before_and_after_late_segment(month: AnalysedMonth) -> None:
    assert _ledger(month.before["ledger_daily"]) == _true_ledger(month.truth.days_before_late)
    assert _ledger(month.rows("ledger_daily")) == _true_ledger(month.truth.days)
    assert not month.rows("ledger_daily", "difference <> 0")


def _ledger(rows: list[Row]) -> dict[date, dict[str, int]]:
    columns = ("opening", "accepted", "acked", "expired", "evicted", "removed", "open", "again", "overdue")
    return {
        row["dt"]: {
            **{name: row[name] for name in columns},
            "orphans": row["orphans"] + row["around_crash"] + row["before_books"],
        }
        for row in rows
    }


def _true_ledger(days: Mapping[date, DayTruth]) -> dict[date, dict[str, int]]:
    return {day: asdict(truth.ledger) for day, truth in days.items()}


def test_counts_missing_lines_exactly(month: AnalysedMonth) -> None:
    for rows, days in (
        (month.before["boots_daily"], month.truth.days_before_late),
        (month.rows("boots_daily"), month.truth.days),
    ):
        counted = {(row["dt"], row["node"], row["boot"]): (row["n"], row["missing"], row["doubled"]) for row in rows}
        expected = {
            (day, *name): (boot.lines, boot.missing, 0)
            for day, truth in days.items()
            for name, boot in truth.boots.items()
        }
        assert counted == expected


def test_counters_differ_exactly_by_lost_lines(month: AnalysedMonth) -> None:
    for rows, days in (
        (month.before["reconciliation_daily"], month.truth.days_before_late),
        (month.rows("reconciliation_daily"), month.truth.days),
    ):
        counted: Counter[tuple[date, str]] = Counter()
        for row in rows:
            if row["difference"]:
                counted[row["dt"], row["node"]] += row["difference"]
        expected: Counter[tuple[date, str]] = Counter()
        for day, truth in days.items():
            for (node, _), drift in truth.drift.items():
                expected[day, node] += drift
        assert counted == expected


def test_traffic_is_exact(month: AnalysedMonth) -> None:
    counted: Counter[tuple[date, str, str]] = Counter()
    for row in month.rows("traffic_daily"):
        counted[row["dt"], row["node"], row["event"]] += row["n"]
    assert counted == {
        (day, *name): n
        for day, truth in month.truth.days.items()
        for name, n in truth.events.items()
        if name[1].startswith("msg.") or name[1] == "req.done"
    }


def test_bytes_accepted_are_exact(month: AnalysedMonth) -> None:
    rows = month.rows("traffic_daily", "event = 'msg.accept'")
    assert _sum_by_day(rows, "bytes") == {day: truth.bytes["msg.accept"] for day, truth in month.truth.days.items()}


def test_losses_refusals_limits_and_replays_are_exact(month: AnalysedMonth) -> None:
    days = month.truth.days
    assert _sum_by_day(month.rows("lost_daily"), "n", "reason") == _get_true_counts(days, "lost")
    assert _sum_by_day(month.rows("limits_daily"), "hits", "limit") == _get_true_counts(days, "limits")
    assert _sum_by_day(month.rows("replay_daily"), "n", "code") == _get_true_counts(days, "replays")
    errors = _sum_by_day(month.rows("errors_daily"), "n", "proto", "mtype", "status", "code")
    assert errors == {(day, *name): n for day, truth in days.items() for name, n in truth.errors.items()}


def test_push_notifications_are_exact(month: AnalysedMonth) -> None:
    days = month.truth.days
    pushes = _sum_by_day(month.rows("push_daily"), "n", "event", "service", "result")
    assert pushes == {(day, *name): n for day, truth in days.items() for name, n in truth.pushes.items()}
    rows = month.rows("wakeups_daily")
    assert _sum_by_day(rows, "n", "service") == _get_true_counts(days, "wakeups")
    assert _sum_by_day(rows, "missed", "service") == _get_true_counts(days, "missed")
    assert {row["service"] for row in rows if row["missed"] < row["n"]} == {"*", "fcm", "apns", "web_push"}
    woken = {row["dt"]: row["n"] for row in rows if row["service"] == "*"}
    assert all(row["n"] <= woken[row["dt"]] for row in month.rows("wakeups_missed_top"))


def test_sockets_are_exact(month: AnalysedMonth) -> None:
    counted = {
        (row["dt"], row["node"]): (row["opened"], row["authenticated"], row["closed"])
        for row in month.rows("sockets_daily")
    }
    assert counted == {
        (day, node): (sockets["opened"], sockets["authenticated"], sockets["closed"])
        for day, truth in month.truth.days.items()
        for node, sockets in truth.sockets.items()
    }
    unclosed = {(row["dt"], row["node"]): row["unclosed"] for row in month.rows("sockets_daily", "unclosed > 0")}
    assert unclosed == {
        (day, node): n for day, truth in month.truth.days.items() for node, n in truth.unclosed.items()
    }


def test_top_senders_sent_most_messages(month: AnalysedMonth) -> None:
    counted: dict[date, list[int]] = {day: [] for day in month.truth.days}
    identified: dict[date, list[int]] = {day: [] for day in month.truth.days}
    for row in sorted(month.rows("top_senders"), key=lambda row: (row["dt"], row["rank"])):
        counted[row["dt"]].append(row["n"])
        if row["sender"] != "others":
            identified[row["dt"]].append(row["n"])
    for day, truth in month.truth.days.items():
        most = [n for _, n in truth.senders.most_common(SETTINGS.top)]
        assert sum(counted[day]) == sum(most)
        assert len(identified[day]) > 10
        assert not Counter(identified[day]) - Counter(most)


def test_quarantines_all_damaged_lines(month: AnalysedMonth) -> None:
    expected = {day: sum(truth.damaged.values()) for day, truth in month.truth.days.items() if truth.damaged}
    assert _sum_by_day(month.rows("inputs", "corrupt > 0"), "corrupt") == expected
    assert len(month.rows("quarantine")) == sum(expected.values())


def _sum_by_day(rows: list[Row], value: str, *by: str) -> dict[Any, int]:
    found: Counter[Any] = Counter()
    for row in rows:
        found[(row["dt"], *(row[name] for name in by)) if by else row["dt"]] += row[value]
    return {key: n for key, n in found.items() if n}


def _get_true_counts(days: Mapping[date, DayTruth], field: str) -> dict[tuple[date, str], int]:
    return {(day, name): n for day, truth in days.items() for name, n in getattr(truth, field).items()}


# --- incidents ------------------------------------------------------------------------------------------------------


def test_run_reports_missing_lines_by_day(month: AnalysedMonth) -> None:
    """After the late segment has arrived, the second run finds none in the last days."""
    assert (month.first.exit_status, month.second.exit_status) == (EXIT_INTEGRITY, EXIT_OK)
    for name in ("crash", "disk_full", "late_segment"):
        day = str(month.truth.incidents[name].day)
        assert any(day in line for line in month.first.integrity_errors), name
    assert not month.second.integrity_errors


def test_sample_contains_every_incident(month: AnalysedMonth) -> None:
    assert set(month.truth.incidents) == set(INCIDENT_SCHEDULE)


@pytest.mark.parametrize("name", INCIDENT_SCHEDULE)
def test_finds_incident(month: AnalysedMonth, name: str) -> None:
    found = {finding.incident.name: finding.text for finding in find_incidents(month.warehouse, month.truth)}
    assert found[name], month.truth.incidents[name]


def test_finding_agrees_with_generated_incident(month: AnalysedMonth) -> None:
    found = {finding.incident.name: finding.text for finding in find_incidents(month.warehouse, month.truth)}
    details = {name: incident.details for name, incident in month.truth.incidents.items()}
    assert f"{details['crash']['missing']} lines missing, 2 damaged" in found["crash"]
    assert f"{details['disk_full']['dropped']} lines dropped" in found["disk_full"]
    assert found["abuse_burst"] == f"{details['abuse_burst']['hits']} refusals in 1 bursts"
    assert found["replay_attack"] == f"{details['replay_attack']['n']} replayed, anomalies in 1 hours"
    assert found["vanished_message"].startswith("1 more overdue message")
    assert found["clock_skew"] == f"{details['clock_skew']['n']} requests 5 to 10 minutes off"
    assert found["new_error"] == f"{details['new_error']['code']} is new, {details['new_error']['n']} times"
    assert found["traffic_drop"] == "traffic less than half of the usual in the hours 12, 13"
    late = {finding.incident.name: finding.text for finding in month.found_before}["late_segment"]
    assert "lines missing until the segment arrives" in late
    assert found["late_segment"].endswith("no lines missing")


# --- quiet days -----------------------------------------------------------------------------------------------------


def test_finds_no_incidents_on_quiet_days(month: AnalysedMonth) -> None:
    quiet_days = month.quiet_days
    assert len(quiet_days) >= 5

    def select_quiet_rows(table: str, where: str) -> list[Row]:
        return [row for row in month.rows(table, where) if row["dt"] in quiet_days]

    assert not select_quiet_rows("boots_daily", "missing > 0 OR doubled > 0 OR stepped_back > 0")
    assert not select_quiet_rows("reconciliation_daily", "difference <> 0")
    assert not select_quiet_rows("lost_daily", "reason <> 'ttl'")
    assert not select_quiet_rows("limits_daily", "hits > 0")
    assert not select_quiet_rows("replay_daily", "n > 0")
    assert not select_quiet_rows("errors_daily", "is_new")
    assert not select_quiet_rows("sockets_daily", "unclosed > 0 OR storm_minutes > 0")
    assert not select_quiet_rows("inputs", "corrupt > 0 OR state = 'crashed'")
    assert len(select_quiet_rows("node_compare", "flagged")) <= len(select_quiet_rows("node_compare", "true")) / 100


def test_few_anomalies_on_quiet_days(month: AnalysedMonth) -> None:
    alarms = [row for row in month.rows("anomalies") if row["dt"] in month.quiet_days]
    checked = len([row for row in month.rows("series_hourly") if row["dt"] in month.quiet_days])
    assert len(alarms) <= checked / 200, [(row["dt"], row["hour"], row["metric"], row["reason"]) for row in alarms]
