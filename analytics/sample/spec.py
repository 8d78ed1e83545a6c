"""What is to be made up: days, nodes, wallets, volume, incidents."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

DAY = 86_400
HOUR = 3_600

# Name of the incident to the day it is planted on, counted from 0, and the hour in UTC.
SCHEDULE: dict[str, tuple[int, int]] = {
    "crash": (8, 14),
    "vanished_message": (11, 9),
    "expiry_wave": (12, 6),
    "eviction_storm": (17, 10),
    "abuse_burst": (18, 15),
    "replay_attack": (19, 11),
    "clock_skew": (20, 8),
    "slow_node": (21, 0),
    "new_error": (22, 13),
    "disk_full": (25, 16),
    "traffic_drop": (26, 12),
    "late_segment": (28, 9),
}


@dataclass(frozen=True, slots=True)
class Spec:
    """
    The same declaration gives the same bytes.

    :param nodes: names of the nodes; all work on one store.
    :param workers: processes of each node; above 1 each is a node of its own to readers, as the daemon has it.
    :param messages_per_day: accepted on a weekday of the first week, all nodes together.
    :param growth: by how much more there is each day, 0.01 is 1 %.
    :param incidents: True for all of :data:`SCHEDULE` that fall into the days, or their names.
    :param queue_max_messages: as the setting of the daemon.
    :param ttl_s: seconds that a DIDComm message waits; Decentrl events wait for ever.
    :param gauge_s: seconds between gauges, and between counters.
    :param segment_hours: hours that a segment is written to.
    :param compress: whether closed segments are gzip.
    """

    first_day: date = date(2026, 10, 22)
    days: int = 30
    seed: int = 1
    nodes: tuple[str, ...] = ("mediator-a", "mediator-b", "mediator-c")
    workers: int = 1
    wallets: int = 400
    messages_per_day: int = 1500
    growth: float = 0.006
    incidents: bool | frozenset[str] = True
    queue_max_messages: int = 1000
    ttl_s: int = 259_200
    gauge_s: int = 60
    segment_hours: int = 1
    compress: bool = True

    @property
    def begin(self) -> float:
        """The first moment, in seconds since the epoch."""
        return datetime(self.first_day.year, self.first_day.month, self.first_day.day, tzinfo=UTC).timestamp()

    @property
    def end(self) -> float:
        """The moment after the last, in seconds since the epoch."""
        return self.begin + self.days * DAY

    @property
    def last_day(self) -> date:
        """The last one, part of the month."""
        return self.first_day + timedelta(self.days - 1)

    @property
    def processes(self) -> tuple[str, ...]:
        """What writes logs, as the daemon names it."""
        if self.workers == 1:
            return self.nodes
        return tuple(f"{node}-{number}" for node in self.nodes for number in range(1, self.workers + 1))

    def planted(self) -> dict[str, float]:
        """Incidents to the moment at which they begin, seconds since the epoch, in order."""
        wanted = SCHEDULE if self.incidents is True else self.incidents or ()
        begins = {name: self.begin + SCHEDULE[name][0] * DAY + SCHEDULE[name][1] * HOUR for name in wanted}
        return dict(sorted(((name, at) for name, at in begins.items() if at < self.end), key=lambda one: one[1]))
