"""The status of the daemon: collected from its processes and its store, and as JSON for `/admin/status.json`."""

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

LEDGER_DIFFERS = "message ledger does not balance"

LEDGER_ENTRIES = ("accepted", "acknowledged", "waiting", "expired", "evicted", "removed", "withdrawn", "difference")

# By protocol and entry; unknown entries are None.
LedgerEntries = Mapping[str, Mapping[str, int | None]]


def read_ledger(store_ledger: messages.StoreLedger) -> LedgerEntries:
    """Convert the store's ledger."""
    ledgers = {"didcomm": store_ledger.didcomm, "decentrl": store_ledger.decentrl}
    return {
        protocol: {entry: getattr(ledger, entry) for entry in LEDGER_ENTRIES} for protocol, ledger in ledgers.items()
    }


# Upper bounds of the age groups in seconds; older messages are one more group.
AGE_BOUNDS = (60, 600, 3_600, 21_600, 86_400)
LARGEST_QUEUES = 10
# Seconds for which a status is served again.
_CACHE_SECONDS = 2.0
# Time-out of the store in seconds.
_STORE_TIMEOUT = 5.0
# Metrics of the totals since the start, by their names on the page.
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
    """Queries all processes of the daemon: how many were asked, and the replies."""

    def __call__(self) -> Awaitable[tuple[int, Sequence[Mapping[str, Any]]]]: ...


@dataclass(frozen=True, slots=True)
class StatusSources:
    """
    Sources of the status.

    :param processes: raises TimeoutError.
    :param here: reply of this process, used if no process replies.
    :param figures: metrics of all processes as text; raises TimeoutError.
    :param backlog: raises StoreUnavailable, ShutdownInProgress.
    :param tag: pseudonym of a DID, as in the log.
    :param is_own: whether a DID belongs to the daemon's self-test.
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
    A process of the daemon.

    :param state: as in the systemd status.
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

    :param tag: pseudonym of the DID.
    :param age: seconds since its oldest message arrived; None if unknown.
    :param own: whether the DID belongs to the daemon's self-test.
    """

    tag: str
    messages: int
    bytes: int
    age: float | None
    own: bool = False


@dataclass(frozen=True, slots=True)
class DaemonStatus:
    """
    The status of the daemon.

    :param at: Unix seconds.
    :param store_at: time of the store's reply; None if there was none.
    :param asked: number of processes asked; `processes` are those that replied.
    :param totals: since the start; None if not all processes could be asked.
    :param gauges: likewise; missing ones are left out.
    :param ledger: message ledger; empty without a reply of the store.
    :param waiting: queued messages and bytes; None without a reply of the store.
    :param buckets: the same by the ages of :data:`AGE_BOUNDS`.
    :param reports: None if no directory is configured.
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
    ledger: LedgerEntries
    waiting: AgeBucket | None
    buckets: tuple[AgeBucket, ...] | None
    largest: tuple[QueueSummary, ...]
    refusals: tuple[ProblemSummary, ...]
    warnings: tuple[ProblemSummary, ...]
    reports: tuple[AnalysisReport, ...] | None

    @property
    def uptime(self) -> float:
        """Of the oldest process."""
        return max((one.uptime for one in self.processes), default=0.0)

    @property
    def state(self) -> str:
        """The most important problem, or the state of a healthy process."""
        if worst := [one.state for one in self.processes if not one.well]:
            return worst[0]
        if self.buckets is None:
            return "the store does not respond"
        if self.asked > len(self.processes) or self.totals is None:
            return "some workers do not respond"
        if any(entries["difference"] for entries in self.ledger.values()):
            return LEDGER_DIFFERS
        return self.processes[0].state if self.gauges.get("ready", 1) else "end-to-end probe fails"

    @property
    def well(self) -> bool:
        """Whether there is no problem."""
        return self.state == self.processes[0].state and self.processes[0].well


class StatusCollector:
    """Collects the status, once at a time, and caches it for a short time."""

    def __init__(self, clock: IReactorTime, sources: StatusSources) -> None:
        self._clock = clock
        self._sources = sources
        self._last: DaemonStatus | None = None
        self._waiting: list[Deferred[DaemonStatus]] = []
        self._store_query: Deferred[Any] | None = None

    def latest(self) -> Deferred[DaemonStatus]:
        """Fires with a status that is at most some seconds old."""
        last = self._last
        if last is not None and 0.0 <= self._clock.seconds() - last.at < _CACHE_SECONDS:
            return succeed(last)
        answer: Deferred[DaemonStatus] = Deferred()
        self._waiting.append(answer)
        if len(self._waiting) == 1:
            Deferred.fromCoroutine(self._collect()).addBoth(self._answer)
        return answer

    def _answer(self, result: DaemonStatus | Failure) -> None:
        if isinstance(result, DaemonStatus):
            self._last = result
        waiting, self._waiting = self._waiting, []
        for answer in waiting:
            answer.callback(result)

    async def _collect(self) -> DaemonStatus:
        sources = self._sources
        now = self._clock.seconds()
        asked, replies = await self._query_processes()
        samples = await self._figures()
        backlog = await self._backlog(now)
        store_at = None if backlog is None else self._clock.seconds()
        fields = ("node", "pid", "state", "well", "uptime", "sockets")
        found = [ProcessStatus(**{name: one[name] for name in fields}) for one in replies if "pid" in one]
        processes = tuple(sorted(found, key=lambda one: one.node))
        uptime = max((one.uptime for one in processes), default=0.0)
        problems = [one["problems"] for one in replies]
        return DaemonStatus(
            at=now,
            store_at=store_at,
            version=sources.version,
            # The name of the node is known to the supervisor, not to its workers.
            node=next((one["node"] for one in replies if "pid" not in one), sources.node),
            backend=sources.backend,
            clustered=sources.clustered,
            asked=asked,
            processes=processes,
            totals=_sum_totals(asked, replies, samples),
            gauges={name: samples[key] for name, key in _GAUGE_METRICS.items() if samples and key in samples},
            flows=compute_traffic([one.get("slots", ()) for one in replies], now, uptime),
            ledger=read_ledger(backlog.ledger) if backlog else {},
            waiting=AgeBucket(backlog.messages, backlog.bytes) if backlog else None,
            buckets=backlog.buckets if backlog else None,
            largest=self._build_queue_summaries(backlog, now) if backlog else (),
            refusals=tuple(merge_problems(problems, "request")),
            warnings=tuple(merge_problems(problems, "output")),
            reports=None if sources.reports is None else tuple(sources.reports.latest()),
        )

    async def _query_processes(self) -> tuple[int, Sequence[Mapping[str, Any]]]:
        try:
            asked, replies = await self._sources.processes()
        except TimeoutError:
            asked, replies = 0, ()
        # The reply of this process may be late, too.
        return (asked, replies) if any("pid" in one for one in replies) else (max(asked, 2), [self._sources.here()])

    async def _figures(self) -> dict[str, float] | None:
        """Sums over all processes; None on time-out."""
        try:
            text = (await self._sources.figures()).decode("utf-8")
        except TimeoutError:
            return None
        lines = [line for line in text.splitlines() if line.partition(" ")[0].partition("{")[0] in _METRIC_NAMES]
        return _sum_samples(list(text_string_to_metric_families("\n".join([*lines, ""]))))

    async def _backlog(self, now: float) -> QueueBacklog | None:
        """None on time-out; the store is not queried again while a query is pending."""
        if self._store_query is not None and not self._store_query.called:
            return None
        found: list[QueueBacklog | Failure] = []

        async def query() -> QueueBacklog:
            return await self._sources.backlog([now - age for age in AGE_BOUNDS], LARGEST_QUEUES)

        self._store_query = Deferred.fromCoroutine(query()).addBoth(found.append)
        timeout: Deferred[None] = Deferred()
        timer = self._clock.callLater(_STORE_TIMEOUT, timeout.callback, None)
        await DeferredList([self._store_query, timeout], fireOnOneCallback=True)
        if timer.active():
            timer.cancel()
        answer = found[0] if found else None
        if isinstance(answer, Failure):
            answer.trap(StoreUnavailable, ShutdownInProgress)
            return None
        return answer

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


def _sum_totals(
    asked: int, replies: Sequence[Mapping[str, Any]], samples: Mapping[str, float] | None
) -> dict[str, int] | None:
    """Totals since the start; of a single process as of its traffic slots, so that they match."""
    if asked == 1 and "totals" in replies[0]:
        return {name: replies[0]["totals"][name] for name in _TOTAL_METRICS}
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
    Render the status as a JSON object; times are Unix seconds, durations seconds, null is unknown.

    :param now: current time; by default that of the status.
    """
    now = status.at if now is None else now
    return encoding.dumps(
        {
            "at": status.at,
            "age_seconds": _compute_age(status.at, now),
            "version": status.version,
            "node": status.node,
            "ok": status.well,
            "state": status.state,
            "uptime_seconds": status.uptime,
            "store": {
                "backend": status.backend,
                "answers": status.buckets is not None,
                "at": status.store_at,
                "age_seconds": None if status.store_at is None else _compute_age(status.store_at, now),
            },
            "processes": {"asked": status.asked, "answered": [asdict(one) for one in status.processes]},
            "gauges": dict(status.gauges),
            "traffic": _build_traffic_json(status),
            "ledger": status.ledger or None,
            "waiting": _build_waiting_json(status),
            "refusals": [asdict(one) for one in status.refusals],
            "warnings": [asdict(one) for one in status.warnings],
            "reports": None if status.reports is None else [asdict(one) for one in status.reports],
        }
    )


def _compute_age(at: float, now: float) -> float:
    return round(max(0.0, now - at), 3)


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
    bounds: list[int | None] = [*AGE_BOUNDS, None]
    by_age = [
        {"below_seconds": bound, **asdict(bucket)} for bound, bucket in zip(bounds, status.buckets or (), strict=True)
    ]
    largest = [
        {
            "recipient": one.tag,
            "messages": one.messages,
            "bytes": one.bytes,
            "oldest_seconds": one.age,
            "self_test": one.own,
        }
        for one in status.largest
    ]
    waiting = {"messages": status.waiting.messages, "bytes": status.waiting.bytes}
    return {**waiting, "by_age": by_age, "largest": largest}
