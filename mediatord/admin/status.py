"""The status of the daemon: collected from its processes and its store, and as JSON for `/admin/status.json`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from mediatord.admin.status_sources import (
    TRAFFIC_KINDS,
    AnalysisReport,
    ProblemSummary,
    ReportDirectory,
    count_by_minute,
    measure_traffic_spans,
    merge_problems,
)
from mediatord.errors import ShutdownInProgress, StoreUnavailable
from mediatord.observability.push_statistics import PUSH_METRICS, PushStatistics, read_push_statistics
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
_GAUGE_METRICS = {
    "sockets": "mediator_active_connections",
    "nodes": "mediator_cluster_nodes",
    "storage_up": "mediator_storage_up",
    "ready": "mediator_ready",
    "log_dropped": "mediator_log_dropped_total",
}
_METRIC_NAMES = {
    *(kind.metric.partition("{")[0] for kind in TRAFFIC_KINDS.values()),
    *_GAUGE_METRICS.values(),
    *PUSH_METRICS,
}


# How many processes were asked, and the replies.
ProcessStates = tuple[int, Sequence[Mapping[str, Any]]]


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
class ProcessReplies:
    """:param asked: number of processes; `answered` are those that replied."""

    asked: int
    answered: tuple[ProcessStatus, ...]


@dataclass(frozen=True, slots=True)
class StoreState:
    """:param at: time of the store's reply; None if there was none."""

    backend: str
    at: float | None


@dataclass(frozen=True, slots=True)
class TrafficCounts:
    """
    Counts of one kind of traffic.

    :param total: since the start; None if not all processes could be asked.
    :param by_minute: of the last hour, oldest first.
    """

    total: int | None
    last_minute: int
    last_hour: int
    by_minute: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class QueueSummary:
    """
    A queue.

    :param recipient: pseudonym of the DID.
    :param oldest_seconds: since its oldest message arrived; None if unknown.
    :param self_test: whether the DID belongs to the daemon's self-test.
    """

    recipient: str
    messages: int
    bytes: int
    oldest_seconds: float | None
    self_test: bool


@dataclass(frozen=True, slots=True)
class QueuedMessages:
    """
    All queued messages.

    :param by_age: by the ages of :data:`AGE_BOUNDS`.
    """

    messages: int
    bytes: int | None
    by_age: tuple[AgeBucket, ...]
    largest: tuple[QueueSummary, ...]


@dataclass(frozen=True, slots=True)
class DaemonStatus:
    """
    The status of the daemon. The fields, except `clustered`, are those of the JSON document.

    :param at: Unix seconds.
    :param gauges: those of all processes; missing ones are left out.
    :param ledger: message ledger; None without a reply of the store, `waiting` likewise.
    :param push: configured push services; None if not all processes could be asked.
    :param reports: None if no directory is configured.
    """

    at: float
    version: str
    node: str
    clustered: bool
    store: StoreState
    processes: ProcessReplies
    gauges: Mapping[str, float]
    traffic: Mapping[str, TrafficCounts]
    ledger: LedgerEntries | None
    waiting: QueuedMessages | None
    refusals: tuple[ProblemSummary, ...]
    warnings: tuple[ProblemSummary, ...]
    push: tuple[PushStatistics, ...] | None
    reports: tuple[AnalysisReport, ...] | None

    @property
    def uptime(self) -> float:
        """Of the oldest process."""
        return max((one.uptime for one in self.processes.answered), default=0.0)

    @property
    def traffic_spans(self) -> tuple[float, float]:
        """Seconds that the counts of the last minute and of the last hour cover."""
        return measure_traffic_spans(self.at, self.uptime)

    @property
    def state(self) -> str:
        """The most important problem, or the state of a healthy process."""
        answered = self.processes.answered
        if worst := [one.state for one in answered if not one.well]:
            return worst[0]
        if self.waiting is None:
            return "the store does not respond"
        is_total_unknown = any(counts.total is None for counts in self.traffic.values())
        if self.processes.asked > len(answered) or is_total_unknown:
            return "some workers do not respond"
        if any(entries["difference"] for entries in (self.ledger or {}).values()):
            return LEDGER_DIFFERS
        return answered[0].state if self.gauges.get("ready", 1) else "end-to-end probe fails"

    @property
    def well(self) -> bool:
        """Whether there is no problem."""
        first = self.processes.answered[0]
        return self.state == first.state and first.well


@dataclass(kw_only=True, eq=False)
class StatusCollector:
    """
    Collects the status, once at a time, and caches it for a short time.

    :param query_processes: queries all processes of the daemon; raises TimeoutError.
    :param report_process: reply of this process, used if no process replies.
    :param render_metrics: metrics of all processes as text; raises TimeoutError.
    :param read_backlog: raises StoreUnavailable, ShutdownInProgress.
    :param pseudonymize: makes the pseudonym of a DID, as in the log.
    :param is_own: whether a DID belongs to the daemon's self-test.
    """

    clock: IReactorTime
    version: str
    node: str
    backend: str
    clustered: bool
    query_processes: Callable[[], Awaitable[ProcessStates]]
    report_process: Callable[[], Mapping[str, Any]]
    render_metrics: Callable[[], Awaitable[bytes]]
    read_backlog: Callable[[Sequence[float], int], Coroutine[Deferred[Any], Any, QueueBacklog]]
    pseudonymize: Callable[[str], str]
    is_own: Callable[[str], bool]
    reports: ReportDirectory | None
    _last: DaemonStatus | None = field(default=None, init=False)
    _waiting: list[Deferred[DaemonStatus]] = field(default_factory=list, init=False)
    _store_query: Deferred[Any] | None = field(default=None, init=False)

    def latest(self) -> Deferred[DaemonStatus]:
        """Fires with a status that is at most some seconds old."""
        last = self._last
        if last is not None and 0.0 <= self.clock.seconds() - last.at < _CACHE_SECONDS:
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
        now = self.clock.seconds()
        asked, replies = await self._query_processes()
        families = await self._read_metrics()
        samples = None if families is None else _sum_samples(families)
        backlog = await self._backlog(now)
        store_at = None if backlog is None else self.clock.seconds()
        fields = ("node", "pid", "state", "well", "uptime", "sockets")
        found = [ProcessStatus(**{name: one[name] for name in fields}) for one in replies if "pid" in one]
        problems = [one["problems"] for one in replies]
        return DaemonStatus(
            at=now,
            version=self.version,
            # The name of the node is known to the supervisor, not to its workers.
            node=next((one["node"] for one in replies if "pid" not in one), self.node),
            clustered=self.clustered,
            store=StoreState(self.backend, store_at),
            processes=ProcessReplies(asked, tuple(sorted(found, key=lambda one: one.node))),
            gauges={name: samples[key] for name, key in _GAUGE_METRICS.items() if samples and key in samples},
            traffic=_count_traffic(asked, replies, samples, now),
            ledger=read_ledger(backlog.ledger) if backlog else None,
            waiting=self._summarize_queues(backlog, now) if backlog else None,
            refusals=tuple(merge_problems(problems, "request")),
            warnings=tuple(merge_problems(problems, "output")),
            push=None if families is None else _read_push(families),
            reports=None if self.reports is None else tuple(self.reports.latest()),
        )

    async def _query_processes(self) -> tuple[int, Sequence[Mapping[str, Any]]]:
        try:
            asked, replies = await self.query_processes()
        except TimeoutError:
            asked, replies = 0, ()
        # The reply of this process may be late, too.
        return (asked, replies) if any("pid" in one for one in replies) else (max(asked, 2), [self.report_process()])

    async def _read_metrics(self) -> list[Metric] | None:
        """Those of :data:`_METRIC_NAMES`, of all processes; None on time-out."""
        try:
            text = (await self.render_metrics()).decode("utf-8")
        except TimeoutError:
            return None
        lines = [line for line in text.splitlines() if line.partition(" ")[0].partition("{")[0] in _METRIC_NAMES]
        return list(text_string_to_metric_families("\n".join([*lines, ""])))

    async def _backlog(self, now: float) -> QueueBacklog | None:
        """None on time-out; the store is not queried again while a query is pending."""
        if self._store_query is not None and not self._store_query.called:
            return None
        answer: Deferred[QueueBacklog | None] = Deferred()
        query = self.read_backlog([now - age for age in AGE_BOUNDS], LARGEST_QUEUES)
        self._store_query = Deferred.fromCoroutine(query).addBoth(answer.callback)
        try:
            return await answer.addTimeout(_STORE_TIMEOUT, self.clock, lambda *_: None)
        except (StoreUnavailable, ShutdownInProgress):
            return None

    def _summarize_queues(self, backlog: QueueBacklog, now: float) -> QueuedMessages:
        largest = tuple(
            QueueSummary(
                self.pseudonymize(one.recipient_did),
                one.messages,
                one.bytes,
                None if one.oldest_received_at is None else max(0.0, now - one.oldest_received_at),
                self.is_own(one.recipient_did),
            )
            for one in backlog.largest
        )
        return QueuedMessages(backlog.messages, backlog.bytes, backlog.buckets, largest)


def _count_traffic(
    asked: int, replies: Sequence[Mapping[str, Any]], samples: Mapping[str, float] | None, now: float
) -> dict[str, TrafficCounts]:
    """
    Totals of a daemon of one process are as of its traffic slots, so that they match.

    A worker that is alone for a while has counted only a part; the supervisor's reply beside its own tells.
    """
    totals: Mapping[str, int | None] = dict.fromkeys(TRAFFIC_KINDS)
    if asked == len(replies) == 1 and "totals" in replies[0]:
        totals = replies[0]["totals"]
    elif samples is not None:
        totals = {name: int(samples.get(kind.metric, 0)) for name, kind in TRAFFIC_KINDS.items()}
    return {
        name: TrafficCounts(totals[name], minutes[-1], sum(minutes), minutes)
        for name, minutes in count_by_minute([one.get("slots", ()) for one in replies], now).items()
    }


def _sum_samples(families: Iterable[Metric]) -> dict[str, float]:
    """The sum of each metric, and of requests also by outcome."""
    sums: defaultdict[str, float] = defaultdict(float)
    for sample in [sample for family in families for sample in family.samples]:
        sums[sample.name] += sample.value
        if "outcome" in sample.labels:
            sums[f'{sample.name}{{outcome="{sample.labels["outcome"]}"}}'] += sample.value
    return sums


def _read_push(families: Iterable[Metric]) -> tuple[PushStatistics, ...]:
    return tuple(read_push_statistics(sample for family in families for sample in family.samples))


def render_status_json(status: DaemonStatus, now: float) -> bytes:
    """
    Render the status as a JSON object; times are Unix seconds, durations seconds, null is unknown.

    :param now: current time.
    """
    document = asdict(status)
    del document["clustered"]
    document |= {"age_seconds": _compute_age(status.at, now), "ok": status.well, "state": status.state}
    document["uptime_seconds"] = status.uptime
    store_at = status.store.at
    store_age = None if store_at is None else _compute_age(store_at, now)
    document["store"] |= {"answers": store_at is not None, "age_seconds": store_age}
    if status.waiting is not None:
        for bound, group in zip((*AGE_BOUNDS, None), document["waiting"]["by_age"], strict=True):
            group["below_seconds"] = bound
    return encoding.dumps(document)


def _compute_age(at: float, now: float) -> float:
    return round(max(0.0, now - at), 3)
