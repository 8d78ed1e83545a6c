"""All that the page says, gathered from where it is known."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from twisted.internet.defer import Deferred, DeferredList, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from mediatord.admin import ledger
from mediatord.admin.reports import Report, Reports
from mediatord.admin.traffic import FLOWS, Flow, flows
from mediatord.admin.troubles import Trouble, merged
from mediatord.errors import ShuttingDown, StoreUnavailable
from mediatord.interfaces import Backlog, Cohort

# Ages that are told apart, in seconds; what is older is one more.
AGES = (60, 600, 3_600, 21_600, 86_400)
LARGEST = 10
# Seconds for which nothing is asked again, however many look.
_FRESH = 2.0
# Seconds that the store may take.
_PATIENCE = 5.0
# Counters since the start, by what they are called on the page; those of FLOWS that have one of their own.
_TOTALS = {
    "accepted": "mediator_messages_forwarded_total",
    "delivered": "mediator_messages_delivered_total",
    "refused": 'mediator_requests_total{outcome="rejected"}',
    "failed": 'mediator_requests_total{outcome="failed"}',
    "requests": "mediator_requests_total",
    "stored": "mediator_messages_stored_total",
    "expired": "mediator_messages_expired_total",
    "evicted": "mediator_messages_evicted_total",
}
_GAUGES = {
    "sockets": "mediator_active_connections",
    "nodes": "mediator_cluster_nodes",
    "storage_up": "mediator_storage_up",
    "ready": "mediator_ready",
    "log_dropped": "mediator_log_dropped_total",
}
_READ = {name.partition("{")[0] for name in (*_TOTALS.values(), *_GAUGES.values())}


class Processes(Protocol):
    """Asks the processes of the daemon what they know, each for itself: how many were asked, and what they said."""

    def __call__(self) -> Awaitable[tuple[int, Sequence[Mapping[str, Any]]]]: ...


@dataclass(frozen=True, slots=True)
class Sources:
    """
    Where things are known.

    :param backend: of the store.
    :param processes: raises TimeoutError.
    :param here: what this process knows, should nobody else be there to be asked.
    :param figures: the metrics of all processes as text; raises TimeoutError.
    :param backlog: raises StoreUnavailable, ShuttingDown.
    :param tag: what stands for a DID in the log.
    :param is_own: whether a DID is one that the daemon has to send messages to itself.
    """

    version: str
    node: str
    backend: str
    clustered: bool
    processes: Processes
    here: Callable[[], Mapping[str, Any]]
    figures: Callable[[], Awaitable[bytes]]
    backlog: Callable[[Sequence[float], int], Awaitable[Backlog]]
    tag: Callable[[str], str]
    reports: Reports | None
    is_own: Callable[[str], bool] = lambda did: False


@dataclass(frozen=True, slots=True)
class Process:
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
class Heap:
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
class Overview:
    """
    How the daemon is.

    :param at: when, in seconds since the epoch.
    :param store_at: when the store has said what waits and what its books say, all of one moment; None if it has not.
    :param asked: processes that were, of which `processes` are those that answered.
    :param totals: since the start; None where the processes could not be asked together.
    :param gauges: likewise; only those that there are.
    :param books: the store's own, of the same moment as what waits; empty when that is not known.
    :param waiting: messages and bytes in all; None when the store does not say.
    :param cohorts: what waits, by the ages of :data:`AGES`; None likewise.
    :param reports: None when it is not said where there are any.
    """

    at: float
    store_at: float | None
    version: str
    node: str
    backend: str
    clustered: bool
    asked: int
    processes: tuple[Process, ...]
    totals: Mapping[str, int] | None
    gauges: Mapping[str, float]
    flows: Mapping[str, Flow]
    books: ledger.Books
    waiting: Cohort | None
    cohorts: tuple[Cohort, ...] | None
    largest: tuple[Heap, ...]
    refusals: tuple[Trouble, ...]
    warnings: tuple[Trouble, ...]
    reports: tuple[Report, ...] | None

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
        if not ledger.balance(self.books):
            return ledger.UNACCOUNTED
        return self.processes[0].state if self.gauges.get("ready", 1) else "messages do not get through"

    @property
    def well(self) -> bool:
        """Whether nothing is."""
        return self.state == self.processes[0].state and self.processes[0].well


class Overviews:
    """Makes overviews, no two at a time, and shows one that is fresh to all who ask."""

    def __init__(self, clock: IReactorTime, sources: Sources) -> None:
        self._clock = clock
        self._sources = sources
        self._last: Overview | None = None
        self._waiting: list[Deferred[Overview]] = []
        self._asking: Deferred[Any] | None = None

    def latest(self) -> Deferred[Overview]:
        """Fires with one that is some seconds old at most."""
        last = self._last
        if last is not None and 0.0 <= self._clock.seconds() - last.at < _FRESH:
            return succeed(last)
        answer: Deferred[Overview] = Deferred()
        self._waiting.append(answer)
        if len(self._waiting) == 1:
            Deferred.fromCoroutine(self._gathered()).addCallbacks(self._made, self._failed)
        return answer

    def _made(self, overview: Overview) -> None:
        self._last = overview
        waiting, self._waiting = self._waiting, []
        for answer in waiting:
            answer.callback(overview)

    def _failed(self, failure: Failure) -> None:
        waiting, self._waiting = self._waiting, []
        for answer in waiting:
            answer.errback(failure)

    async def _gathered(self) -> Overview:
        sources = self._sources
        now = self._clock.seconds()
        asked, told = await self._told()
        samples = await self._figures()
        backlog = await self._backlog(now)
        store_at = None if backlog is None else self._clock.seconds()
        processes = tuple(sorted((_process(one) for one in told if "pid" in one), key=lambda one: one.node))
        uptime = max((one.uptime for one in processes), default=0.0)
        troubles = [one["troubles"] for one in told]
        return Overview(
            at=now,
            store_at=store_at,
            version=sources.version,
            # Of several workers none has the name of them all.
            node=next((one["node"] for one in told if "pid" not in one), sources.node),
            backend=sources.backend,
            clustered=sources.clustered,
            asked=asked,
            processes=processes,
            totals=_totals(asked, told, samples),
            gauges={name: samples[key] for name, key in _GAUGES.items() if samples and key in samples},
            flows=flows([one.get("slots", ()) for one in told], now, uptime),
            books=ledger.read(backlog.books) if backlog else {},
            waiting=Cohort(backlog.messages, backlog.bytes) if backlog else None,
            cohorts=backlog.cohorts if backlog else None,
            largest=self._heaps(backlog, now) if backlog else (),
            refusals=tuple(merged(troubles, "request")),
            warnings=tuple(merged(troubles, "output")),
            reports=None if sources.reports is None else tuple(sources.reports.latest()),
        )

    async def _told(self) -> tuple[int, Sequence[Mapping[str, Any]]]:
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
        lines = [line for line in text.splitlines() if line.partition(" ")[0].partition("{")[0] in _READ]
        return _summed(list(text_string_to_metric_families("\n".join([*lines, ""]))))

    async def _backlog(self, now: float) -> Backlog | None:
        """None as well while the store has not answered for long: it is not asked again before it has."""
        if self._asking is not None and not self._asking.called:
            return None
        found: list[Backlog | Failure] = []
        asking = Deferred.fromCoroutine(self._ask_store(now)).addBoth(found.append)
        patience: Deferred[None] = Deferred()
        timer = self._clock.callLater(_PATIENCE, patience.callback, None)
        self._asking = asking
        await DeferredList([asking, patience], fireOnOneCallback=True)
        if timer.active():
            timer.cancel()
        answer = found[0] if found else None
        if isinstance(answer, Failure):
            answer.trap(StoreUnavailable, ShuttingDown)
            return None
        return answer

    async def _ask_store(self, now: float) -> Backlog:
        return await self._sources.backlog([now - age for age in AGES], LARGEST)

    def _heaps(self, backlog: Backlog, now: float) -> tuple[Heap, ...]:
        return tuple(
            Heap(
                self._sources.tag(one.recipient_did),
                one.messages,
                one.bytes,
                None if one.oldest_received_at is None else max(0.0, now - one.oldest_received_at),
                self._sources.is_own(one.recipient_did),
            )
            for one in backlog.largest
        )


def _process(told: Mapping[str, Any]) -> Process:
    return Process(**{name: told[name] for name in ("node", "pid", "state", "well", "uptime", "sockets")})


def _totals(
    asked: int, told: Sequence[Mapping[str, Any]], samples: Mapping[str, float] | None
) -> dict[str, int] | None:
    """Since the start: of a daemon that is one process at the moment of its slots, which are parts of them."""
    if asked == 1 and "totals" in told[0]:
        return {name: told[0]["totals"][name] for name in _TOTALS}
    return None if samples is None else {name: int(samples.get(key, 0)) for name, key in _TOTALS.items()}


def _summed(families: Sequence[Metric]) -> dict[str, float]:
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


assert _TOTALS.keys() == FLOWS.keys()
