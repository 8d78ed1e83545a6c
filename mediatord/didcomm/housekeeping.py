"""Periodic work: delayed messages, expiry of messages and accounts, overdue pushes, gauges."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import deferLater

from mediatord.cluster.leases import LeaderLease
from mediatord.didcomm.pickup import LiveDelivery
from mediatord.errors import StoreUnavailable
from mediatord.observability.event_recorder import EventRecorder
from mediatord.runtime.failure_logging import LogThrottle
from mediatord.runtime.periodic_tasks import PeriodicTasks, run_logging_failures
from mediatord.store.interfaces.messages import StoredMessage
from mediatord.store.interfaces.store import FIRST_DAY_SECONDS, IStore

BATCH_SIZE = 100
# Accounts that are removed in one step.
ACCOUNTS_PER_STEP = 64
RETRY_DELAY = 1.0
# Timers keep their remaining time over a step of the clock, but messages become due by the clock.
MAX_TIMER_DELAY = 60.0
# Seconds between two runs of each task.
PUSHES_INTERVAL = 1.0
DUE_RECOVERY_INTERVAL = 5.0
EXPIRY_INTERVAL = 15.0
GAUGES_INTERVAL = 60.0
NONCES_INTERVAL = 600.0
ACCOUNTS_INTERVAL = 3_600.0
CONNECTIONS_INTERVAL = 60.0


class DelayedMessageScheduler(Service):
    """
    Dispatches delayed messages when they become visible (reference 4.5).

    It keeps one timer and queries the store, at least once a minute while there are any, so that their number is not
    limited. With several nodes, the leader also looks every few seconds for messages that became due on a dead node.

    :param lease: of the leader; None for a single node.
    """

    name = "delayed messages"

    def __init__(
        self,
        clock: IReactorTime,
        store: IStore,
        dispatch: Callable[[Sequence[StoredMessage]], None],
        lease: LeaderLease | None = None,
    ) -> None:
        self._clock = clock
        self._store = store
        self._dispatch = dispatch
        self._timer: IDelayedCall | None = None
        self._round: Deferred[None] | None = None
        self._lease = lease
        self._recovery = PeriodicTasks(
            clock,
            [(self._recover_due_messages, DUE_RECOVERY_INTERVAL)] if lease else [],
            "the search for due messages",
        )
        self._warning = LogThrottle(clock)

    def startService(self) -> None:
        """Find out when the first message is due."""
        super().startService()
        self._run(self._begin())
        self._recovery.startService()

    def stopService(self) -> Deferred[None]:
        """Stop; fires when a running dispatch has ended."""
        super().stopService()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return Deferred.fromCoroutine(self._end(self._round))

    async def _end(self, under_way: Deferred[None] | None) -> None:
        await self._recovery.stopService()
        if under_way is not None:
            await under_way

    async def _recover_due_messages(self) -> None:
        if self._lease is not None and await self._lease.is_leader() and self.running and self._round is None:
            self._run(self._deliver())

    def schedule_wakeup(self, due_at: float) -> None:
        """Wake up at this time, when a stored message becomes visible."""
        if not self.running:
            return
        now = self._clock.seconds()
        left = min(max(0.0, due_at - now), MAX_TIMER_DELAY)
        if self._timer is not None:
            if self._timer.getTime() <= now + left:
                return
            self._timer.cancel()
        self._timer = self._clock.callLater(left, self._due)

    def _due(self) -> None:
        self._timer = None
        if self._round is None:
            self._run(self._deliver())
        else:
            self.schedule_wakeup(self._clock.seconds() + RETRY_DELAY)

    def _run(self, work: Awaitable[None]) -> None:
        self._round = Deferred.fromCoroutine(run_logging_failures(work, "delayed messages", self._warning))
        if not self._round.called:
            self._round.addBoth(lambda _: setattr(self, "_round", None))
        else:
            self._round = None

    async def _deliver(self) -> None:
        try:
            while due := await self._store.take_due_messages(BATCH_SIZE):
                # They were recorded as queued when they were accepted.
                self._dispatch(due)
        except Exception:
            # Retry after a while, whatever failed.
            self.schedule_wakeup(self._clock.seconds() + RETRY_DELAY)
            raise
        await self._arm()

    async def _begin(self) -> None:
        try:
            await self._arm()
        except StoreUnavailable:
            pass  # it is still being opened, as at every start; a retry is scheduled

    async def _arm(self) -> None:
        try:
            first = await self._store.find_next_due()
        except Exception:
            self.schedule_wakeup(self._clock.seconds() + RETRY_DELAY)
            raise
        if first is not None:
            self.schedule_wakeup(first)


class Housekeeping(PeriodicTasks):
    """
    Overdue pushes, expiry, nonces, gauges. A failure is logged, and the task is repeated.

    Accounts for which no message was ever accepted and that had no contact after their first day are removed, and, if
    configured, those without contact for long. Accounts with queued messages are kept.

    :param lease: of the node that removes expired data from the store; None for a single node.
    :param list_live_accounts: returns the DIDs of accounts with an open socket at this process, which counts as
        contact.
    :param unused: seconds after which an unused account is removed; 0 for never.
    :param idle: seconds without contact after which an account is removed; 0 for never.
    :param pending: seconds after which a connection of DIDComm v1 without an account is removed; 0 for never.
    """

    name = "housekeeping"

    def __init__(
        self,
        clock: IReactorTime,
        store: IStore,
        live: LiveDelivery,
        recorder: EventRecorder,
        gauge: Callable[[], Awaitable[None]],
        lease: LeaderLease | None = None,
        *,
        list_live_accounts: Callable[[], Iterable[str]] = lambda: (),
        unused: float = 0.0,
        idle: float = 0.0,
        pending: float = 0.0,
    ) -> None:
        tasks = (
            (self._requeue_late_pushes, PUSHES_INTERVAL),
            (self._expire, EXPIRY_INTERVAL),
            (self._prune, NONCES_INTERVAL),
            (gauge, GAUGES_INTERVAL),
            (self._expire_accounts, ACCOUNTS_INTERVAL),
            (self._expire_connections, CONNECTIONS_INTERVAL),
        )
        super().__init__(clock, tasks, "housekeeping")
        self._store = store
        self._live = live
        self._recorder = recorder
        self._lease = lease
        self._list_live_accounts = list_live_accounts
        self._unused = unused
        self._idle = idle
        self._pending = pending

    async def _holds_lease(self) -> bool:
        return self._lease is None or await self._lease.is_leader()

    async def _requeue_late_pushes(self) -> None:
        self._live.requeue_overdue_pushes()

    async def _expire(self) -> None:
        # In small steps with pauses, so that a mass expiry blocks neither the reactor nor writers.
        while self.running and await self._holds_lease():
            removed = await self._store.expire_messages(BATCH_SIZE)
            for one in removed:
                self._recorder.record_expiry(one)
                self._live.resolve_push(one.id)
            if len(removed) < BATCH_SIZE:
                break
            await deferLater(self._clock, 0.01, lambda: None)

    async def _expire_accounts(self) -> None:
        if not self._unused and not self._idle:
            return
        for did in list(self._list_live_accounts()):
            account = await self._store.get_account(did)
            if account is not None and not 0 <= self._clock.seconds() - account.seen_at < FIRST_DAY_SECONDS:
                await self._store.record_contact(did)
        while self.running and await self._holds_lease():
            now = self._clock.seconds()
            unused, idle = (now - ttl if ttl else None for ttl in (self._unused, self._idle))
            expired = await self._store.expire_accounts(ACCOUNTS_PER_STEP, unused_before=unused, idle_before=idle)
            for one in expired:
                self._recorder.record_account_expired(one)
            if not expired:
                break
            await deferLater(self._clock, 0.01, lambda: None)

    async def _expire_connections(self) -> None:
        while self._pending and self.running and await self._holds_lease():
            created_before = self._clock.seconds() - self._pending
            if not await self._store.v1_connections.expire_connections(created_before, BATCH_SIZE):
                break
            await deferLater(self._clock, 0.01, lambda: None)

    async def _prune(self) -> None:
        if await self._holds_lease():
            await self._store.prune_nonces()
