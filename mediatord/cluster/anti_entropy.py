"""
Anti-entropy: periodic work that makes live delivery independent of lost notifications.

A node scans the store for items that it was not notified of, and sweeps nodes whose lease has expired.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger

from mediatord.cluster.peer_notifications import MAX_VISIBILITY_DELAY, PeerNotificationDelivery
from mediatord.store.interfaces.cluster_and_quotas import IClusterStore
from mediatord.store.interfaces.messages import ArrivalWindow

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
    :param on_dropped: called after a node was dropped.
    """

    clock: IReactorTime
    store: IClusterStore
    boot: str
    is_leader: Callable[[], Awaitable[bool]]
    record_requeued: Callable[[int], None]
    name_of: Callable[[str], str]
    on_dropped: Callable[[], None] = lambda: None

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
                "removed node {name} (boot {boot}), whose lease has expired; requeued {count} messages",
                name=self.name_of(boot),
                boot=boot,
                count=count,
            )
            for start in range(0, count, BATCH_SIZE):
                if start:
                    await deferLater(self.clock, _BATCH_PAUSE)
                self.record_requeued(min(BATCH_SIZE, count - start))
            self.on_dropped()
