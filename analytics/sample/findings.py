"""Where an operator finds each planted incident in the tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any

from analytics.job import Span
from analytics.sample.truth import Incident, Truth
from analytics.warehouse import Warehouse

if TYPE_CHECKING:
    from pyspark.sql import Row


@dataclass(frozen=True, slots=True)
class Finding:
    """:param text: what there is to see; empty if nothing is."""

    incident: Incident
    text: str


def find(warehouse: Warehouse, truth: Truth) -> list[Finding]:
    """What the published tables say about each incident, in order of time."""
    tables = _Tables(warehouse, truth.spec.last_day)
    ordered = sorted(truth.incidents.values(), key=lambda one: one.day)
    return [Finding(incident, _PLACES[incident.name](tables, incident)) for incident in ordered]


class _Tables:
    def __init__(self, warehouse: Warehouse, last_day: date) -> None:
        self._warehouse = warehouse
        self._last_day = last_day

    def rows(self, table: str, incident: Incident, where: str, *, after: int = 0, days: int = 1) -> Sequence[Row]:
        """
        Few rows, in order.

        :param where: in SQL.
        :param after: days from the incident to the first day that is looked at.
        """
        first = min(incident.day + timedelta(after), self._last_day)
        frame = self._warehouse.read(table, Span(first, min(first + timedelta(days - 1), self._last_day)))
        return frame.where(where).orderBy("dt").limit(200).collect()

    def anomalies(self, incident: Incident, metric: str, **days: int) -> Sequence[Row]:
        """Hours in which this metric was unusual."""
        return self.rows("anomalies", incident, f"metric = '{metric}'", **days)


def _crash(tables: _Tables, incident: Incident) -> str:
    node, boot = incident.details["node"], incident.details["boot"]
    boots = tables.rows("boots_daily", incident, f"boot = '{boot}' AND missing > 0")
    sockets = tables.rows("sockets_daily", incident, f"node = '{node}' AND unclosed > 0")
    crashed = tables.rows("inputs", incident, f"state = 'crashed' AND stem LIKE '%{boot}%'")
    if not (boots and sockets and crashed):
        return ""
    return (
        f"{node}: {boots[0].missing} lines missing, {crashed[0].corrupt} damaged,"
        f" {sockets[0].unclosed} sockets never closed"
    )


def _vanished_message(tables: _Tables, incident: Incident) -> str:
    before, *after = tables.rows("ledger_daily", incident, "true", after=2, days=3)
    more = [row for row in after if row.overdue > before.overdue]
    return f"{more[0].overdue - before.overdue} message more overdue from {more[0].dt} on" if more else ""


def _expiry_wave(tables: _Tables, incident: Incident) -> str:
    unusual = tables.anomalies(incident, "messages_lost", after=3, days=2)
    lost = tables.rows("lost_daily", incident, "reason = 'ttl'", after=3, days=2)
    return f"{_sum(lost, 'n')} messages expired, unusual in {len(unusual)} hours" if unusual and lost else ""


def _eviction_storm(tables: _Tables, incident: Incident) -> str:
    lost = tables.rows("lost_daily", incident, "reason = 'fifo_count'")
    full = tables.rows("queue_risk", incident, f"waiting >= {incident.details['waiting']} AND days_to_cap = 0")
    return f"{_sum(lost, 'n')} messages evicted, {len(full)} queue full" if lost and full else ""


def _abuse_burst(tables: _Tables, incident: Incident) -> str:
    rows = tables.rows("limits_daily", incident, f"limit = '{incident.details['limit']}' AND bursts > 0")
    return f"{rows[0].hits} refusals in {rows[0].bursts} bursts" if rows else ""


def _replay_attack(tables: _Tables, incident: Incident) -> str:
    unusual = tables.anomalies(incident, "replays")
    rows = tables.rows("replay_daily", incident, f"code = '{incident.details['code']}'")
    return f"{_sum(rows, 'n')} repeated, unusual in {len(unusual)} hours" if rows and unusual else ""


def _clock_skew(tables: _Tables, incident: Incident) -> str:
    rows = tables.rows("replay_daily", incident, f"code = '{incident.details['code']}' AND age_class = 'skew'")
    return f"{_sum(rows, 'n')} requests 5 to 10 minutes off" if rows else ""


def _slow_node(tables: _Tables, incident: Incident) -> str:
    node = incident.details["node"]
    rows = tables.rows("node_compare", incident, f"node = '{node}' AND flagged AND metric LIKE '%ms'")
    return f"{node}: " + ", ".join(f"{row.metric} {row.ratio:.1f} times the median" for row in rows) if rows else ""


def _new_error(tables: _Tables, incident: Incident) -> str:
    rows = tables.rows("errors_daily", incident, f"is_new AND code = '{incident.details['code']}'")
    return f"{rows[0].code} is new, {_sum(rows, 'n')} times" if rows else ""


def _disk_full(tables: _Tables, incident: Incident) -> str:
    node = incident.details["node"]
    boots = tables.rows("boots_daily", incident, f"node = '{node}' AND missing > 0")
    counters = tables.rows("reconciliation_daily", incident, f"node = '{node}' AND difference <> 0")
    return f"{node}: {boots[0].missing} lines dropped, {len(counters)} counters differ" if boots and counters else ""


def _traffic_drop(tables: _Tables, incident: Incident) -> str:
    rows = [*tables.anomalies(incident, "messages_accepted"), *tables.anomalies(incident, "requests")]
    hours = sorted({row.hour for row in rows if row.value < row.expected / 2})
    return "hardly anything in the hours " + ", ".join(map(str, hours)) if hours else ""


def _late_segment(tables: _Tables, incident: Incident) -> str:
    node = incident.details["node"]
    gone = tables.rows("boots_daily", incident, f"node = '{node}' AND missing > 0")
    return f"{node}: {gone[0].missing} lines not there yet" if gone else f"{node}: nothing is missing any longer"


def _sum(rows: Sequence[Row], column: str) -> int:
    return sum(int(row[column]) for row in rows)


_PLACES: dict[str, Callable[[Any, Incident], str]] = {
    "crash": _crash,
    "vanished_message": _vanished_message,
    "expiry_wave": _expiry_wave,
    "eviction_storm": _eviction_storm,
    "abuse_burst": _abuse_burst,
    "replay_attack": _replay_attack,
    "clock_skew": _clock_skew,
    "slow_node": _slow_node,
    "new_error": _new_error,
    "disk_full": _disk_full,
    "traffic_drop": _traffic_drop,
    "late_segment": _late_segment,
}
