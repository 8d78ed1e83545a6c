"""What `mediatord status` makes of what a mediator says: figures for programs, rows for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mediatord.cli.scraping import Figures, State, Unreachable, ask_figures, ask_health, ask_ready

_QUEUE = "mediator_message_queue_size"
_COUNTED = ("forwarded", "stored", "delivered", "expired", "evicted")
_STORE_READ = "mediator_store_statistics_timestamp_seconds"
_LEDGER, _DIFFERENCE = "mediator_ledger_messages", "mediator_ledger_difference"
# What became of what was accepted, in the order in which it is told.
_BECAME = ("acknowledged", "waiting", "expired", "evicted", "removed", "withdrawn")
_REASONS_SHOWN = 6
_OTHER = "other"

Row = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Look:
    """
    What a mediator said at one time.

    :param ready: None where it cannot be asked that.
    :param figures: or why there are none.
    """

    health: State
    ready: State | None
    figures: Figures | str


def look(url: str) -> Look:
    """
    Ask for all of it.

    :param url: the mediator's, without a slash at its end.
    :raise Unreachable: there is no mediator.
    """
    return Look(ask_health(url), ask_ready(url), ask_figures(url))


def look_or_fail(url: str) -> Look:
    """The same; where nobody answers, that is its state."""
    try:
        return look(url)
    except Unreachable as error:
        return Look(State(False, f"unreachable: {error}"), None, "not known")


@dataclass(frozen=True, slots=True)
class Report:
    """
    :param now: the last look.
    :param before: an earlier one, for rates.
    """

    now: Look
    before: Look | None = None

    @property
    def healthy(self) -> bool:
        """Whether it is well, and ready if it can be asked that, and its store accounts for all messages."""
        ready, figures = self.now.ready, self.now.figures
        accounted = isinstance(figures, str) or not any(sample.value for sample in figures.of(_DIFFERENCE))
        return self.now.health.well and (ready is None or ready.well) and accounted

    def values(self) -> dict[str, Any]:
        """For programs; what is not known is left out."""
        found: dict[str, Any] = {"status": self.now.health.text, "healthy": self.healthy}
        if self.now.ready is not None:
            found["ready"] = self.now.ready.text
            if self.now.ready.age is not None:
                found["ready_age_seconds"] = self.now.ready.age
        figures = self.now.figures
        if isinstance(figures, str):
            return {**found, "metrics": figures}
        return {**found, **_identity(figures), **_times(figures), **self._amounts(figures)}

    def rows(self) -> list[Row]:
        """For people: what and how much, in this order."""
        return list(self._rows(self.values()))

    def _amounts(self, figures: Figures) -> dict[str, Any]:
        longest = max((one.value for one in figures.of(_QUEUE) if one.labels.get("did") != _OTHER), default=0.0)
        return {
            "storage": "up" if figures.sum("mediator_storage_up") else "down",
            "connections": int(figures.sum("mediator_active_connections")),
            "waiting": {"messages": int(figures.sum(_QUEUE)), "longest_queue": int(longest)},
            **_ledger(figures),
            "messages": {name: self._counter(f"mediator_messages_{name}_total") for name in _COUNTED},
            "requests": self._counter("mediator_requests_total"),
            "refused": {
                **self._counter("mediator_rejected_total"),
                "reasons": {
                    reason: int(number)
                    for reason, number in figures.by("mediator_rejected_total", "reason").items()
                    if number
                },
            },
            "delivery_seconds": _shares(figures, "mediator_delivery_latency_seconds", "method"),
            "request_seconds": _shares(figures, "mediator_request_duration_seconds", "protocol"),
        }

    def _counter(self, name: str) -> dict[str, Any]:
        """The total, and by how much it grew a second between the two looks, where that is known."""
        now, before = self.now.figures, self.before.figures if self.before else ""
        assert isinstance(now, Figures)
        total = now.sum(name)
        if isinstance(before, str) or now.at <= before.at or total < before.sum(name):
            return {"total": int(total)}
        return {"total": int(total), "per_second": round((total - before.sum(name)) / (now.at - before.at), 3)}

    def _rows(self, values: dict[str, Any]) -> Iterator[Row]:
        for name in ("status", "ready", "metrics", "version", "node", "storage", "nodes"):
            if name in values:
                age = values.get(f"{name}_age_seconds")
                yield name, str(values[name]) if age is None else f"{values[name]}, tried {_span(age)} ago"
        if "workers" in values:
            yield "workers", f"{values['workers']['answered']} of {values['workers']['asked']} answer"
        if "figures_at" in values:
            yield "as of", _time_of_day(values["figures_at"])
        if "messages" in values:
            yield from _amounts_shown(values)


def _amounts_shown(values: dict[str, Any]) -> Iterator[Row]:
    yield "connections", str(values["connections"])
    if "store_at" in values:
        yield "store as of", f"{_time_of_day(values['store_at'])}, {values['store_age_seconds']} s ago"
    waiting = values["waiting"]
    yield "waiting", f"{waiting['messages']} messages, {waiting['longest_queue']} in the longest queue"
    for half, entries in values.get("ledger", {}).items():
        yield f"ledger {half}", _balance(entries)
    for name, counter in values["messages"].items():
        yield name, _counted(counter)
    yield "requests", _counted(values["requests"])
    yield "refused", _counted(values["refused"])
    reasons = sorted(values["refused"]["reasons"].items(), key=lambda one: -one[1])
    for reason, number in reasons[:_REASONS_SHOWN]:
        yield f"  {reason}", str(number)
    for way, shares in values["delivery_seconds"].items():
        yield f"delivery {way}", _spans(shares)
    for protocol, shares in values["request_seconds"].items():
        yield f"answer {protocol}", _spans(shares)


def _identity(figures: Figures) -> dict[str, Any]:
    """Which program and processes these are of."""
    info = next(figures.of("mediator_build_info"), None)
    labels = info.labels if info else {}
    found: dict[str, Any] = {"version": labels.get("version", "unknown")}
    if "node" in labels:
        found["node"] = labels["node"]
    if nodes := figures.sum("mediator_cluster_nodes"):
        found["nodes"] = int(nodes)
    if asked := figures.sum("mediator_workers"):
        found["workers"] = {"asked": int(asked), "answered": int(figures.sum("mediator_workers_answered"))}
    return found


def _times(figures: Figures) -> dict[str, Any]:
    """Of when the figures are: all of them, and those of queues and ledger, which are of one moment."""
    now = datetime.now(UTC).timestamp() if figures.date is None else figures.date
    read = next((one.value for one in figures.of(_STORE_READ)), None)
    found: dict[str, Any] = {"figures_at": round(now, 3)}
    if read is not None:
        # A date has whole seconds.
        found |= {"store_at": round(read, 3), "store_age_seconds": max(0, int(now - read))}
    return found


def _time_of_day(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%H:%M:%S} UTC"


def _ledger(figures: Figures) -> dict[str, Any]:
    """The store's own books by half; nothing before they were read."""
    halves: dict[str, dict[str, int | None]] = {}
    for sample in (*figures.of(_LEDGER), *figures.of(_DIFFERENCE)):
        entries = halves.setdefault(sample.labels.get("half", ""), {"waiting": None, "difference": None})
        entries[sample.labels.get("entry", "difference")] = int(sample.value)
    return {"ledger": dict(sorted(halves.items(), reverse=True))} if halves else {}


def _balance(entries: dict[str, int | None]) -> str:
    """As an equation."""
    became = " + ".join(f"{_or_unknown(entries.get(name))} {name}" for name in _BECAME)
    return (
        f"{_or_unknown(entries.get('accepted'))} accepted = {became}, difference {_or_unknown(entries['difference'])}"
    )


def _or_unknown(number: int | None) -> str:
    return "unknown" if number is None else str(number)


def _shares(figures: Figures, name: str, label: str) -> dict[str, dict[str, float]]:
    """Since the daemon's start, by label."""
    found = figures.quantiles(name, label, 0.5, 0.95)
    return {value: {"p50": round(half, 6), "p95": round(most, 6)} for value, (half, most) in found.items()}


def _counted(counter: dict[str, Any]) -> str:
    rate = counter.get("per_second")
    return f"{counter['total']}" if rate is None else f"{counter['total']}, {rate:.1f}/s"


def _spans(shares: dict[str, float]) -> str:
    return f"p50 {_span(shares['p50'])}, p95 {_span(shares['p95'])}"


def _span(seconds: float) -> str:
    for unit, size, most in (("ms", 0.001, 1), ("s", 1, 120), ("min", 60, 7200)):
        if seconds < most:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 3600:.1f} h"
