"""Delivery to the sockets of this node of what other nodes have accepted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any, Generic, Protocol, TypeVar

from twisted.internet.defer import Deferred

from mediatord.cluster.message_authenticator import MAX_TIMESTAMP_SKEW
from mediatord.cluster.peer_protocol import NotificationNames, decode_notifications, encode_push_result
from mediatord.delivery.connections import ConnectionManager
from mediatord.store.interfaces.cluster import IClusterStore
from mediatord.store.interfaces.decentrl import PendingEvent
from mediatord.store.interfaces.messages import ArrivalWindow, MessageArrival, StoredMessage

Item = TypeVar("Item", StoredMessage, PendingEvent)
ContraItem = TypeVar("ContraItem", StoredMessage, PendingEvent, contravariant=True)

# Seconds between the time of a message, taken from another node's clock before it is written, and its commit.
MAX_COMMIT_DELAY = 2.5
# Seconds after its own time, by the clock of this node, at which a message may become visible in the store.
MAX_VISIBILITY_DELAY = MAX_TIMESTAMP_SKEW + MAX_COMMIT_DELAY


class RemotePusher(Protocol[ContraItem]):
    """Pushes items of one protocol that another node has accepted."""

    def push_remote(self, item: ContraItem, /, *, by: float = ...) -> bool:
        """Whether a socket that subscribed by a time took it."""

    def was_pushed(self, id_: str, /) -> bool:
        """Whether it was pushed here, as far as that is remembered."""


class LocalDelivery(Generic[Item]):
    """
    Pushes items of one protocol, accepted by other nodes, to the sockets of this node.

    :param is_wanted: whether a subscription belongs to this protocol.
    :param filter_served: which of several DIDs may still be pushed to.
    """

    def __init__(
        self,
        connections: ConnectionManager[Any],
        pusher: RemotePusher[Item],
        find: Callable[[Sequence[str]], Deferred[list[Item]]],
        list_arrivals: Callable[[Sequence[str], ArrivalWindow, int], Deferred[list[MessageArrival]]],
        store: IClusterStore,
        is_wanted: Callable[[Any], bool],
        filter_served: Callable[[Collection[str]], Awaitable[Collection[str]]] | None = None,
    ) -> None:
        self._connections = connections
        self._pusher: RemotePusher[Item] = pusher
        self._find: Callable[[Sequence[str]], Deferred[list[Item]]] = find
        self.list_arrivals = list_arrivals
        self._store = store
        self._is_wanted = is_wanted
        self._filter_served = filter_served

    def list_live_dids(self) -> list[str]:
        """DIDs that have sockets here."""
        return self._connections.live(self._is_wanted)

    async def filter_served(self, dids: Collection[str]) -> Collection[str]:
        """Those of these DIDs that may still be pushed to."""
        return dids if self._filter_served is None else await self._filter_served(dids)

    async def push_notified(self, ids: Sequence[str]) -> list[str]:
        """
        Push what another node has notified this one of; returns the ids that were pushed, now or before.

        :raise StoreUnavailable: the store did not answer.
        """
        was_pushed = self._pusher.was_pushed
        pushed = [id_ for id_ in ids if was_pushed(id_)]
        async for items in self._find_served([id_ for id_ in ids if id_ not in pushed]):
            # A repeated notification may have been served meanwhile.
            pushed += [item.id for item in items if was_pushed(item.id) or self._pusher.push_remote(item)]
        return pushed

    async def push_missed(self, arrivals: Sequence[MessageArrival]) -> None:
        """
        Push what no notification came for, to the sockets that were open when it arrived.

        :raise StoreUnavailable: the store did not answer.
        """
        missed = {one.id: one.at + MAX_VISIBILITY_DELAY for one in arrivals if self._is_missed(one)}
        if missed:
            for id_ in await self._store.find_picked_up(list(missed)):
                del missed[id_]
        async for items in self._find_served(list(missed)):
            for item in items:
                if not self._pusher.was_pushed(item.id):
                    self._pusher.push_remote(item, by=missed[item.id])

    def _is_missed(self, arrival: MessageArrival) -> bool:
        return not self._pusher.was_pushed(arrival.id) and bool(
            self._connections.subscribers(arrival.did, by=arrival.at + MAX_VISIBILITY_DELAY, message=arrival.id)
        )

    async def _find_served(self, ids: Sequence[str]) -> AsyncIterator[list[Item]]:
        while ids and (found := await self._find(ids)):
            if self._filter_served is None:
                yield found
            else:
                served = await self._filter_served({item.recipient_did for item in found})
                yield [item for item in found if item.recipient_did in served]
            # The others do not exist any more, or exceed what is read at once.
            found_ids = {item.id for item in found}
            ids = [id_ for id_ in ids if id_ not in found_ids]


class NotificationReceiver:
    """
    Handles notifications from other nodes.

    :param push_contracts_updated: notifies the sockets of a DID; False if there are none.
    """

    def __init__(
        self,
        didcomm: LocalDelivery[StoredMessage],
        decentrl: LocalDelivery[PendingEvent],
        push_contracts_updated: Callable[[str], bool],
    ) -> None:
        self._didcomm = didcomm
        self._decentrl = decentrl
        self._push_contracts_updated = push_contracts_updated

    async def receive(self, body: bytes) -> bytes:
        """
        Push what a request names; returns the body of the response.

        :raise ValueError: the request is malformed.
        :raise StoreUnavailable: the sender has to try again later.
        """
        names = decode_notifications(body)
        pushed: NotificationNames = {}
        if names["messages"]:
            pushed["messages"] = await self._didcomm.push_notified(names["messages"])
        if names["events"]:
            pushed["events"] = await self._decentrl.push_notified(names["events"])
        if names["contracts"]:
            served = await self._decentrl.filter_served(names["contracts"])
            pushed["contracts"] = [
                did for did in names["contracts"] if did in served and self._push_contracts_updated(did)
            ]
        return encode_push_result(pushed)


async def answer_probe(body: bytes) -> bytes:
    """Respond to a node that probes whether this one is running."""
    return b"{}"
