"""
Messages that no node must push: those that were queued before a socket subscribed, and those that were picked up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.cluster.anti_entropy import BATCH_SIZE
from mediatord.cluster.peer_notifications import MAX_VISIBILITY_DELAY
from mediatord.delivery.connections import MAX_BACKLOG_IDS_PER_SUBSCRIPTION, ConnectionManager, WebSocketSession
from mediatord.errors import StoreUnavailable
from mediatord.runtime.failure_logging import redact_failure
from mediatord.runtime.request_time import outside_request
from mediatord.store.interfaces.cluster_and_quotas import IClusterStore
from mediatord.store.interfaces.messages import ArrivalWindow, MessageArrival

_log = Logger()


async def record_backlog(
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
        _log.warn("could not record pickups: the store was unavailable")
    else:
        _log.failure("recording pickups failed", redact_failure(failure))
