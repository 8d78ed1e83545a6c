"""
What a node does every few seconds so that nothing is left lying: catching up, and ending nodes that are gone.

Reads what waits for a DID when a socket has subscribed to it, so that catching up leaves that out.

Lets other nodes know what recipients have got by pickup, so that it is not pushed to them as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from math import inf
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred, gatherResults
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall, deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.clock import outside_request
from mediatord.cluster.message_authenticator import MAX_TIMESTAMP_SKEW
from mediatord.cluster.notification_receiver import LocalDelivery
from mediatord.delivery.connections import MAX_BACKLOG_IDS_PER_SUBSCRIPTION, ConnectionManager, WebSocketSession
from mediatord.errors import StoreUnavailable
from mediatord.failure_logging import LogThrottle, redact_failure
from mediatord.store.interfaces.cluster import IClusterStore
from mediatord.store.interfaces.messages import ArrivalWindow, MessageArrival

_log = Logger()

ANTI_ENTROPY_INTERVAL = 15.0
SWEEP_INTERVAL = 2.0
# DIDs, and messages, of one question to the store; messages that are told of in one go.
BATCH_SIZE = 500
_BATCH_PAUSE = 0.01
# Seconds: what is younger may just be on its way.
MIN_MESSAGE_AGE = 3.0
# Seconds that a message is in the store later, at most, than its time says here: that is from another clock, and from
# before it was written.
MAX_COMMIT_DELAY = 2.5
MAX_VISIBILITY_DELAY = MAX_TIMESTAMP_SKEW + MAX_COMMIT_DELAY
# Seconds that a round looks back, to before the last but one; the last is for rounds that begin late.
SCAN_WINDOW = MAX_VISIBILITY_DELAY + 2 * ANTI_ENTROPY_INTERVAL + 5.0


class AntiEntropy:
    """
    Finds what arrived for DIDs that sockets are here for and that no hint came for.

    Whatever others have pushed: a socket of theirs may be dead. What the recipient has got by pickup is left out for
    a while, and so is what waited when the socket subscribed.

    :param forget_backlogs: told that no round will look for what waited before a time.
    """

    def __init__(
        self,
        clock: IReactorTime,
        deliveries: Iterable[LocalDelivery[Any]],
        forget_backlogs: Callable[[float], None] = lambda before: None,
    ) -> None:
        self._clock = clock
        self._deliveries = tuple(deliveries)
        self._forget_backlogs = forget_backlogs
        # When the last two that were complete began: by the later one the clock may have been wrong, which is noticed
        # before there is another.
        self._completed: deque[float] = deque(maxlen=2)

    async def round(self) -> None:
        """
        Push what has arrived since the last round but one that was complete, and a little before it.

        :raise StoreUnavailable: the next round looks further back.
        """
        now = self._clock.seconds()
        since = min([now - SCAN_WINDOW, *(started - MAX_VISIBILITY_DELAY for started in self._completed)])
        window = ArrivalWindow(since, now - MIN_MESSAGE_AGE)
        for delivery in self._deliveries:
            dids = delivery.live()
            for start in range(0, len(dids), BATCH_SIZE):
                await self._catch_up(delivery, dids[start : start + BATCH_SIZE], window)
        self._completed.append(now)
        self._forget_backlogs(since - MAX_VISIBILITY_DELAY)

    async def _catch_up(self, delivery: LocalDelivery[Any], dids: Sequence[str], window: ArrivalWindow) -> None:
        while arrived := await delivery.arrived(dids, window, BATCH_SIZE):
            await delivery.catch_up(arrived)
            if len(arrived) < BATCH_SIZE:
                return
            window = window.behind(arrived[-1])


class LapsedNodeSweeper:
    """
    Ends the nodes whose lease is over: what they had pushed and nobody has acknowledged is pending again.

    Of very many, some are told at a time with breaths between them, as each may take a line of the event log.

    :param boot: ours.
    :param mine: whether it is this node's turn.
    :param fell_back: told of so many messages that they are pending again.
    :param name_of: that of a boot, for the operator.
    """

    def __init__(
        self,
        clock: IReactorTime,
        store: IClusterStore,
        boot: str,
        is_leader: Callable[[], Awaitable[bool]],
        fell_back: Callable[[int], None],
        name_of: Callable[[str], str],
    ) -> None:
        self._clock = clock
        self._store = store
        self._boot = boot
        self._is_leader = is_leader
        self._fell_back = fell_back
        self._name_of = name_of

    async def round(self) -> None:
        """:raise StoreUnavailable: somebody does it later."""
        if not await self._is_leader():
            return
        for boot in await self._store.list_lapsed_nodes():
            # Our own lease is for us to take up again.
            if boot != self._boot:
                count = await self._store.drop(boot)
                _log.info(
                    "node {name} (boot {boot}) is gone; {count} messages wait again",
                    name=self._name_of(boot),
                    boot=boot,
                    count=count,
                )
                await self._report_requeued(count)

    async def _report_requeued(self, count: int) -> None:
        for told in range(0, count, BATCH_SIZE):
            if told:
                await deferLater(self._clock, _BATCH_PAUSE, lambda: None)
            self._fell_back(min(BATCH_SIZE, count - told))


class PeriodicClusterTasks(Service):
    """
    Does all that at its time, while this node is a member.

    :param works: what is to be done, and every how many seconds.
    """

    name = "cluster rounds"

    def __init__(
        self,
        clock: IReactorTime,
        is_member: Callable[[], bool],
        tasks: Iterable[tuple[Callable[[], Awaitable[None]], float]],
    ) -> None:
        self._clock = clock
        self._is_member = is_member
        self._tasks = tuple(tasks)
        self._warning = LogThrottle(clock)
        self._loops: list[tuple[LoopingCall, Deferred[LoopingCall]]] = []

    def startService(self) -> None:
        """Begin; the first round of each after its interval."""
        super().startService()
        for task, interval in self._tasks:
            loop = LoopingCall(self._run_once, task)
            loop.clock = self._clock
            self._loops.append((loop, loop.start(interval, now=False)))

    def stopService(self) -> Deferred[list[LoopingCall]]:
        """End; fires when those that are under way are over."""
        super().stopService()
        loops, self._loops = self._loops, []
        for loop, _ in loops:
            if loop.running:
                loop.stop()
        return gatherResults([stopped for _, stopped in loops])

    def _run_once(self, task: Callable[[], Awaitable[None]]) -> Deferred[None]:
        return Deferred.fromCoroutine(self._run_guarded(task))

    async def _run_guarded(self, task: Callable[[], Awaitable[None]]) -> None:
        if not self._is_member():
            return
        try:
            await task()
        except StoreUnavailable:
            if self._warning.count_occurrence():
                _log.warn("the store was not available for a round of the cluster")
        except CancelledError:
            pass
        except Exception:
            _log.failure("a round of the cluster failed", redact_failure())


class BacklogReader:
    """
    Which of two came first, a message or a subscription, is what the store says: clocks of nodes differ.

    A message that is committed after other nodes know of the socket is pushed. One that was there before is part of
    the backlog, which is for the owner of the socket to ask for. Read before the owner is told that the socket is
    live, so what comes in between is found by the owner's first question.

    :param arrived: of the store.
    """

    def __init__(
        self,
        clock: IReactorTime,
        connections: ConnectionManager[object],
        arrived: Callable[[Sequence[str], ArrivalWindow, int], Deferred[list[MessageArrival]]],
    ) -> None:
        self._clock = clock
        self._connections = connections
        self._arrived = arrived

    async def __call__(self, session: WebSocketSession, did: str) -> None:
        """
        Note what waits, unless that is known of this subscription.

        :raise StoreUnavailable: it is not known then, and what came shortly before may be pushed.
        """
        if self._connections.is_backlog_known(session, did):
            return
        # Older than that, it is not looked for.
        window = ArrivalWindow(self._clock.seconds() - MAX_VISIBILITY_DELAY, inf)
        ids: list[str] = []
        while arrived := await self._arrived([did], window, BATCH_SIZE):
            ids += [one.id for one in arrived]
            if len(arrived) < BATCH_SIZE or len(ids) >= MAX_BACKLOG_IDS_PER_SUBSCRIPTION:
                break
            window = window.behind(arrived[-1])
        self._connections.record_backlog(session, did, ids)


class PickupRecorder:
    """
    Waits for nothing and never fails: without a record, a message comes once more.

    :param period: seconds after which what was not acknowledged may be pushed.
    """

    def __init__(self, store: IClusterStore, period: float) -> None:
        self._store = store
        self._period = period

    def __call__(self, ids: Sequence[str]) -> None:
        """These have been handed out."""
        if ids:
            with outside_request():
                self._store.record_pickups(ids, self._period).addErrback(_log_pickup_failure)


def _log_pickup_failure(failure: Failure) -> None:
    if failure.check(StoreUnavailable):
        _log.warn("the store did not take a record of pickups")
    else:
        _log.failure("recording pickups failed", redact_failure(failure))
