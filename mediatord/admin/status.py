"""
The store's own books, as the page has them.

All that the page says, gathered from where it is known.

The same for programs: `/admin/status.json`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from twisted.internet.defer import Deferred, DeferredList, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from mediatord.admin.status_sources import (
    TRAFFIC_COUNTERS,
    AnalysisReport,
    ProblemSummary,
    ReportDirectory,
    TrafficRate,
    compute_traffic,
    merge_problems,
)
from mediatord.errors import ShutdownInProgress, StoreUnavailable
from mediatord.protocol import encoding
from mediatord.store.interfaces import messages
from mediatord.store.interfaces.messages import AgeBucket, QueueBacklog

LEDGER_DIFFERS = "the store does not account for every message"

_DIFFERENCE = "difference"
LEDGER_ENTRIES = ("accepted", "acknowledged", "waiting", "expired", "evicted", "removed", "withdrawn", _DIFFERENCE)

# By half and entry; what is not known is not in it.
LedgerEntries = Mapping[str, Mapping[str, int]]


def read_ledger(books: messages.StoreLedger) -> LedgerEntries:
    """What the store says of them."""
    halves = {"didcomm": books.didcomm, "decentrl": books.decentrl}
    known = {half: {**asdict(one), _DIFFERENCE: one.difference} for half, one in halves.items()}
    return {half: {name: n for name, n in entries.items() if n is not None} for half, entries in known.items()}


def is_ledger_balanced(books: LedgerEntries) -> bool:
    """Whether no half has a difference, as far as is known."""
    return not any(entries.get(_DIFFERENCE) for entries in books.values())


def build_ledger_json(books: LedgerEntries) -> dict[str, dict[str, int | None]]:
    """All entries, null where nobody knows."""
    return {half: {entry: entries.get(entry) for entry in LEDGER_ENTRIES} for half, entries in books.items()}


# Ages that are told apart, in seconds; what is older is one more.
AGE_BOUNDS = (60, 600, 3_600, 21_600, 86_400)
LARGEST_QUEUES = 10
# Seconds for which nothing is asked again, however many look.
_CACHE_SECONDS = 2.0
# Seconds that the store may take.
_STORE_TIMEOUT = 5.0
# Counters since the start, by what they are called on the page; those of FLOWS that have one of their own.
_TOTAL_METRICS = {
    "accepted": "mediator_messages_forwarded_total",
    "delivered": "mediator_messages_delivered_total",
    "refused": 'mediator_requests_total{outcome="rejected"}',
    "failed": 'mediator_requests_total{outcome="failed"}',
    "requests": "mediator_requests_total",
    "stored": "mediator_messages_stored_total",
    "expired": "mediator_messages_expired_total",
    "evicted": "mediator_messages_evicted_total",
}
_GAUGE_METRICS = {
    "sockets": "mediator_active_connections",
    "nodes": "mediator_cluster_nodes",
    "storage_up": "mediator_storage_up",
    "ready": "mediator_ready",
    "log_dropped": "mediator_log_dropped_total",
}
_METRIC_NAMES = {name.partition("{")[0] for name in (*_TOTAL_METRICS.values(), *_GAUGE_METRICS.values())}


class QueryProcesses(Protocol):
    """Asks the processes of the daemon what they know, each for itself: how many were asked, and what they said."""

    def __call__(self) -> Awaitable[tuple[int, Sequence[Mapping[str, Any]]]]: ...


@dataclass(frozen=True, slots=True)
class StatusSources:
    """
    Where things are known.

    :param backend: of the store.
    :param processes: raises TimeoutError.
    :param here: what this process knows, should nobody else be there to be asked.
    :param figures: the metrics of all processes as text; raises TimeoutError.
    :param backlog: raises StoreUnavailable, ShutdownInProgress.
    :param tag: what stands for a DID in the log.
    :param is_own: whether a DID is one that the daemon has to send messages to itself.
    """

    version: str
    node: str
    backend: str
    clustered: bool
    processes: QueryProcesses
    here: Callable[[], Mapping[str, Any]]
    figures: Callable[[], Awaitable[bytes]]
    backlog: Callable[[Sequence[float], int], Awaitable[QueueBacklog]]
    tag: Callable[[str], str]
    reports: ReportDirectory | None
    is_own: Callable[[str], bool] = lambda did: False


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """
    :param state: in a few words, as systemd is told.
    :param uptime: seconds.
    """

    node: str
    pid: int
    state: str
    well: bool
    uptime: float
    sockets: int | None


@dataclass(frozen=True, slots=True)
class QueueSummary:
    """
    A queue.

    :param tag: stands for the DID.
    :param age: seconds since what arrived first in it; None when nobody knows.
    :param own: whether that is a DID of the daemon, for its self-test.
    """

    tag: str
    messages: int
    bytes: int
    age: float | None
    own: bool = False


@dataclass(frozen=True, slots=True)
class DaemonStatus:
    """
    How the daemon is.

    :param at: when, in seconds since the epoch.
    :param store_at: when the store has said what waits and what its books say, all of one moment; None if it has not.
    :param asked: processes that were, of which `processes` are those that answered.
    :param totals: since the start; None where the processes could not be asked together.
    :param gauges: likewise; only those that there are.
    :param books: the store's own, of the same moment as what waits; empty when that is not known.
    :param waiting: messages and bytes in all; None when the store does not say.
    :param cohorts: what waits, by the ages of :data:`AGE_BOUNDS`; None likewise.
    :param reports: None when it is not said where there are any.
    """

    at: float
    store_at: float | None
    version: str
    node: str
    backend: str
    clustered: bool
    asked: int
    processes: tuple[ProcessStatus, ...]
    totals: Mapping[str, int] | None
    gauges: Mapping[str, float]
    flows: Mapping[str, TrafficRate]
    books: LedgerEntries
    waiting: AgeBucket | None
    cohorts: tuple[AgeBucket, ...] | None
    largest: tuple[QueueSummary, ...]
    refusals: tuple[ProblemSummary, ...]
    warnings: tuple[ProblemSummary, ...]
    reports: tuple[AnalysisReport, ...] | None

    @property
    def uptime(self) -> float:
        """Of the process that has been there longest."""
        return max((one.uptime for one in self.processes), default=0.0)

    @property
    def state(self) -> str:
        """What is most in the way, or that it serves."""
        if worst := [one.state for one in self.processes if not one.well]:
            return worst[0]
        if self.cohorts is None:
            return "the store does not answer"
        if self.asked > len(self.processes) or self.totals is None:
            return "not all workers answer"
        if not is_ledger_balanced(self.books):
            return LEDGER_DIFFERS
        return self.processes[0].state if self.gauges.get("ready", 1) else "messages do not get through"

    @property
    def well(self) -> bool:
        """Whether nothing is."""
        return self.state == self.processes[0].state and self.processes[0].well


class StatusCollector:
    """Makes overviews, no two at a time, and shows one that is fresh to all who ask."""

    def __init__(self, clock: IReactorTime, sources: StatusSources) -> None:
        self._clock = clock
        self._sources = sources
        self._last: DaemonStatus | None = None
        self._waiting: list[Deferred[DaemonStatus]] = []
        self._store_query: Deferred[Any] | None = None

    def latest(self) -> Deferred[DaemonStatus]:
        """Fires with one that is some seconds old at most."""
        last = self._last
        if last is not None and 0.0 <= self._clock.seconds() - last.at < _CACHE_SECONDS:
            return succeed(last)
        answer: Deferred[DaemonStatus] = Deferred()
        self._waiting.append(answer)
        if len(self._waiting) == 1:
            Deferred.fromCoroutine(self._collect()).addCallbacks(self._made, self._failed)
        return answer

    def _made(self, overview: DaemonStatus) -> None:
        self._last = overview
        waiting, self._waiting = self._waiting, []
        for answer in waiting:
            answer.callback(overview)

    def _failed(self, failure: Failure) -> None:
        waiting, self._waiting = self._waiting, []
        for answer in waiting:
            answer.errback(failure)

    async def _collect(self) -> DaemonStatus:
        sources = self._sources
        now = self._clock.seconds()
        asked, told = await self._query_processes()
        samples = await self._figures()
        backlog = await self._backlog(now)
        store_at = None if backlog is None else self._clock.seconds()
        processes = tuple(
            sorted((_parse_process_status(one) for one in told if "pid" in one), key=lambda one: one.node)
        )
        uptime = max((one.uptime for one in processes), default=0.0)
        troubles = [one["troubles"] for one in told]
        return DaemonStatus(
            at=now,
            store_at=store_at,
            version=sources.version,
            # Of several workers none has the name of them all.
            node=next((one["node"] for one in told if "pid" not in one), sources.node),
            backend=sources.backend,
            clustered=sources.clustered,
            asked=asked,
            processes=processes,
            totals=_sum_totals(asked, told, samples),
            gauges={name: samples[key] for name, key in _GAUGE_METRICS.items() if samples and key in samples},
            flows=compute_traffic([one.get("slots", ()) for one in told], now, uptime),
            books=read_ledger(backlog.books) if backlog else {},
            waiting=AgeBucket(backlog.messages, backlog.bytes) if backlog else None,
            cohorts=backlog.cohorts if backlog else None,
            largest=self._build_queue_summaries(backlog, now) if backlog else (),
            refusals=tuple(merge_problems(troubles, "request")),
            warnings=tuple(merge_problems(troubles, "output")),
            reports=None if sources.reports is None else tuple(sources.reports.latest()),
        )

    async def _query_processes(self) -> tuple[int, Sequence[Mapping[str, Any]]]:
        try:
            asked, told = await self._sources.processes()
        except TimeoutError:
            asked, told = 0, ()
        # Its own answer may be late like that of any other.
        return (asked, told) if any("pid" in one for one in told) else (max(asked, 2), [self._sources.here()])

    async def _figures(self) -> dict[str, float] | None:
        """Sums; None where they cannot be had."""
        try:
            text = (await self._sources.figures()).decode("utf-8")
        except TimeoutError:
            return None
        lines = [line for line in text.splitlines() if line.partition(" ")[0].partition("{")[0] in _METRIC_NAMES]
        return _sum_samples(list(text_string_to_metric_families("\n".join([*lines, ""]))))

    async def _backlog(self, now: float) -> QueueBacklog | None:
        """None as well while the store has not answered for long: it is not asked again before it has."""
        if self._store_query is not None and not self._store_query.called:
            return None
        found: list[QueueBacklog | Failure] = []
        asking = Deferred.fromCoroutine(self._ask_store(now)).addBoth(found.append)
        patience: Deferred[None] = Deferred()
        timer = self._clock.callLater(_STORE_TIMEOUT, patience.callback, None)
        self._store_query = asking
        await DeferredList([asking, patience], fireOnOneCallback=True)
        if timer.active():
            timer.cancel()
        answer = found[0] if found else None
        if isinstance(answer, Failure):
            answer.trap(StoreUnavailable, ShutdownInProgress)
            return None
        return answer

    async def _ask_store(self, now: float) -> QueueBacklog:
        return await self._sources.backlog([now - age for age in AGE_BOUNDS], LARGEST_QUEUES)

    def _build_queue_summaries(self, backlog: QueueBacklog, now: float) -> tuple[QueueSummary, ...]:
        return tuple(
            QueueSummary(
                self._sources.tag(one.recipient_did),
                one.messages,
                one.bytes,
                None if one.oldest_received_at is None else max(0.0, now - one.oldest_received_at),
                self._sources.is_own(one.recipient_did),
            )
            for one in backlog.largest
        )


def _parse_process_status(told: Mapping[str, Any]) -> ProcessStatus:
    return ProcessStatus(**{name: told[name] for name in ("node", "pid", "state", "well", "uptime", "sockets")})


def _sum_totals(
    asked: int, told: Sequence[Mapping[str, Any]], samples: Mapping[str, float] | None
) -> dict[str, int] | None:
    """Since the start: of a daemon that is one process at the moment of its slots, which are parts of them."""
    if asked == 1 and "totals" in told[0]:
        return {name: told[0]["totals"][name] for name in _TOTAL_METRICS}
    return None if samples is None else {name: int(samples.get(key, 0)) for name, key in _TOTAL_METRICS.items()}


def _sum_samples(families: Sequence[Metric]) -> dict[str, float]:
    """The sum of each metric, and of requests also by outcome."""
    sums: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            names = [sample.name]
            if "outcome" in sample.labels:
                names.append(f'{sample.name}{{outcome="{sample.labels["outcome"]}"}}')
            for name in names:
                sums[name] = sums.get(name, 0.0) + sample.value
    return sums


assert _TOTAL_METRICS.keys() == TRAFFIC_COUNTERS.keys()


def render_status_json(status: DaemonStatus, now: float | None = None) -> bytes:
    """
    An object; times are seconds since the epoch, spans seconds, and null is what nobody knows.

    :param now: when it is shown; by default as soon as it was made.
    """
    return encoding.dumps(
        {
            "at": status.at,
            "age_seconds": _get_age(status.at, now),
            "version": status.version,
            "node": status.node,
            "ok": status.well,
            "state": status.state,
            "uptime_seconds": status.uptime,
            "store": {
                "backend": status.backend,
                "answers": status.cohorts is not None,
                **_build_store_json(status, now),
            },
            "processes": {"asked": status.asked, "answered": [asdict(one) for one in status.processes]},
            "gauges": dict(status.gauges),
            "traffic": _build_traffic_json(status),
            "ledger": build_ledger_json(status.books) if status.books else None,
            "waiting": _build_waiting_json(status),
            "refusals": [asdict(one) for one in status.refusals],
            "warnings": [asdict(one) for one in status.warnings],
            "reports": None if status.reports is None else [asdict(one) for one in status.reports],
        }
    )


def _build_store_json(status: DaemonStatus, now: float | None) -> dict[str, float | None]:
    """Of which time the ledger is, and what waits."""
    at = status.store_at
    return {"at": at, "age_seconds": None if at is None else _get_age(at, now)}


def _get_age(at: float, now: float | None) -> float:
    return 0.0 if now is None else round(max(0.0, now - at), 3)


def _build_traffic_json(status: DaemonStatus) -> dict[str, Any]:
    return {
        name: {
            "total": None if status.totals is None else status.totals[name],
            "last_minute": flow.minute,
            "last_hour": flow.hour,
            "by_minute": list(flow.by_minute),
        }
        for name, flow in status.flows.items()
    }


def _build_waiting_json(status: DaemonStatus) -> dict[str, Any] | None:
    if status.waiting is None:
        return None
    messages, size = status.waiting.messages, status.waiting.bytes
    return {
        "messages": messages,
        "bytes": size,
        "by_age": _build_age_json(status),
        "largest": _build_largest_json(status),
    }


def _build_age_json(status: DaemonStatus) -> list[dict[str, Any]]:
    bounds: list[int | None] = [*AGE_BOUNDS, None]
    return [
        {"below_seconds": bound, **asdict(cohort)} for bound, cohort in zip(bounds, status.cohorts or (), strict=True)
    ]


def _build_largest_json(status: DaemonStatus) -> list[dict[str, Any]]:
    return [
        {
            "recipient": one.tag,
            "messages": one.messages,
            "bytes": one.bytes,
            "oldest_seconds": one.age,
            "self_test": one.own,
        }
        for one in status.largest
    ]
