"""
Anti-entropy: periodic and per-subscription work that makes live delivery independent of lost notifications.

A node scans the store for items that it was not notified of, sweeps nodes whose lease has expired, reads the backlog
of each new subscription, and records pickups so that other nodes do not push what the recipient already has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.clock import outside_request
from mediatord.cluster.peer_notifications import MAX_VISIBILITY_DELAY, PeerNotificationDelivery
from mediatord.delivery.connections import MAX_BACKLOG_IDS_PER_SUBSCRIPTION, ConnectionManager, WebSocketSession
from mediatord.errors import StoreUnavailable
from mediatord.log_redaction_and_throttle import redact_failure
from mediatord.store.interfaces.cluster import IClusterStore
from mediatord.store.interfaces.messages import ArrivalWindow, MessageArrival

_log = Logger()

ANTI_ENTROPY_INTERVAL = 15.0
SWEEP_INTERVAL = 2.0
# DIDs, and messages, per query; messages per report.
BATCH_SIZE = 500
_BATCH_PAUSE = 0.01
# Seconds: a notification of a younger message may still be on its way.
MIN_MESSAGE_AGE = 3.0
# Seconds that a scan looks back: to before the last but one, and a little more in case scans start late.
SCAN_WINDOW = MAX_VISIBILITY_DELAY + 2 * ANTI_ENTROPY_INTERVAL + 5.0


class AntiEntropy:
    """
    Pushes what arrived for the DIDs with sockets here and was never notified.

    It does not rely on pushes by other nodes, whose sockets may be dead. It leaves out what the recipient has
    recently picked up, and the backlog of each subscription.

    :param forget_backlogs: called with the time before which no scan will look.
    """

    def __init__(
        self,
        clock: IReactorTime,
        deliveries: Iterable[PeerNotificationDelivery[Any]],
        forget_backlogs: Callable[[float], None] = lambda before: None,
    ) -> None:
        self._clock = clock
        self._deliveries = tuple(deliveries)
        self._forget_backlogs = forget_backlogs
        # Start times of the last two complete scans. The clock may have been wrong during the last one, which is
        # noticed before the next.
        self._completed: deque[float] = deque(maxlen=2)

    async def scan(self) -> None:
        """
        Push what has arrived since shortly before the last complete scan but one.

        :raise StoreUnavailable: the next scan looks back further.
        """
        now = self._clock.seconds()
        since = min([now - SCAN_WINDOW, *(started - MAX_VISIBILITY_DELAY for started in self._completed)])
        for delivery in self._deliveries:
            dids = delivery.list_live_dids()
            for start in range(0, len(dids), BATCH_SIZE):
                batch = dids[start : start + BATCH_SIZE]
                window = ArrivalWindow(since, now - MIN_MESSAGE_AGE)
                while arrived := await delivery.list_arrivals(batch, window, limit=BATCH_SIZE):
                    await delivery.push_missed(arrived)
                    if len(arrived) < BATCH_SIZE:
                        break
                    window = window.behind(arrived[-1])
        self._completed.append(now)
        self._forget_backlogs(since - MAX_VISIBILITY_DELAY)


@dataclass(frozen=True, slots=True)
class LapsedNodeSweeper:
    """
    Drops nodes whose lease has expired: what they had pushed without an acknowledgement is pending again.

    :param boot: of this node.
    :param is_leader: whether this node is the one to sweep.
    :param record_requeued: called with numbers of messages that are pending again, in batches with pauses between
        them, as each message may be a line of the event log.
    :param name_of: the name of the node with a boot.
    """

    clock: IReactorTime
    store: IClusterStore
    boot: str
    is_leader: Callable[[], Awaitable[bool]]
    record_requeued: Callable[[int], None]
    name_of: Callable[[str], str]

    async def sweep(self) -> None:
        """:raise StoreUnavailable: a later sweep, or another node, does it."""
        if not await self.is_leader():
            return
        for boot in await self.store.list_lapsed_nodes():
            # This node renews its own lease, or joins again.
            if boot == self.boot:
                continue
            count = await self.store.drop(boot)
            _log.info(
                "node {name} (boot {boot}) is gone; {count} messages requeued",
                name=self.name_of(boot),
                boot=boot,
                count=count,
            )
            for start in range(0, count, BATCH_SIZE):
                if start:
                    await deferLater(self.clock, _BATCH_PAUSE)
                self.record_requeued(min(BATCH_SIZE, count - start))


async def read_backlog(
    clock: IReactorTime,
    connections: ConnectionManager[object],
    list_arrivals: Callable[..., Deferred[list[MessageArrival]]],
    session: WebSocketSession,
    did: str,
) -> None:
    """
    Record which messages were in the store before a socket subscribed, once, so that they are not pushed to it.

    The order of message and subscription has to come from the store, as the clocks of nodes differ. What is committed
    after other nodes can find the socket is pushed; what was there before is for the socket's owner to request. The
    backlog is read before the owner learns that the socket is live, so its first request finds what arrives
    meanwhile.

    :param list_arrivals: of the store.
    :raise StoreUnavailable: the backlog is unknown, and a recent part of it may be pushed.
    """
    if connections.is_backlog_known(session, did):
        return
    # No scan looks for older messages.
    window = ArrivalWindow(clock.seconds() - MAX_VISIBILITY_DELAY, inf)
    ids: list[str] = []
    while arrived := await list_arrivals([did], window, limit=BATCH_SIZE):
        ids += [one.id for one in arrived]
        if len(arrived) < BATCH_SIZE or len(ids) >= MAX_BACKLOG_IDS_PER_SUBSCRIPTION:
            break
        window = window.behind(arrived[-1])
    connections.record_backlog(session, did, ids)


def record_pickups(store: IClusterStore, period: float, ids: Sequence[str]) -> None:
    """
    Record in the store that messages or events were delivered by pickup.

    Nobody waits for it; a lost record means that a message may be delivered twice.

    :param period: seconds after which an unacknowledged message may be pushed again.
    """
    if ids:
        with outside_request():
            store.record_pickups(ids, period).addErrback(_log_pickup_failure)


def _log_pickup_failure(failure: Failure) -> None:
    if failure.check(StoreUnavailable):
        _log.warn("the store was not available for recording pickups")
    else:
        _log.failure("recording pickups failed", redact_failure(failure))
