"""Pushes to the sockets of this node what other nodes have accepted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from twisted.internet.defer import Deferred

from mediatord.cluster.peer_protocol import NotificationNames, decode_notifications, encode_push_result
from mediatord.store.interfaces.decentrl import PendingEvent
from mediatord.store.interfaces.messages import ArrivalWindow, MessageArrival, StoredMessage

Item = TypeVar("Item", StoredMessage, PendingEvent)


@dataclass(frozen=True, slots=True)
class LocalDelivery(Generic[Item]):
    """
    What one protocol half does with what other nodes have accepted.

    :param live: the DIDs that sockets are here for.
    :param find: what waits in the store, by id; at most as much as is good to have in memory.
    :param arrived: what came for DIDs in a time, at most so many.
    :param push: to the sockets of its recipient; False when none took it.
    :param is_missed: whether it was not pushed here, and there are sockets that were there when it came.
    :param push_late: only to those; given when it came.
    :param was_pushed: whether it was pushed here, as far as that is remembered.
    :param picked_up: which of these their recipients have got by pickup not long ago.
    :param served: which of these DIDs are still to be pushed to.
    """

    live: Callable[[], list[str]]
    find: Callable[[Sequence[str]], Deferred[list[Item]]]
    arrived: Callable[[Sequence[str], ArrivalWindow, int], Deferred[list[MessageArrival]]]
    push: Callable[[Item], bool]
    is_missed: Callable[[MessageArrival], bool]
    push_late: Callable[[Item, float], bool]
    was_pushed: Callable[[str], bool]
    picked_up: Callable[[Sequence[str]], Deferred[frozenset[str]]]
    served: Callable[[Collection[str]], Awaitable[Collection[str]]]

    async def take(self, ids: Sequence[str]) -> list[str]:
        """
        Push what other nodes have hinted at; those of the ids that were pushed, now or before.

        :raise StoreUnavailable: it cannot be looked up.
        """
        pushed = [id_ for id_ in ids if self.was_pushed(id_)]
        async for items in self._find([id_ for id_ in ids if id_ not in pushed]):
            # Meanwhile the same hint may have come once more.
            pushed += [item.id for item in items if self.was_pushed(item.id) or self.push(item)]
        return pushed

    async def catch_up(self, arrivals: Sequence[MessageArrival]) -> None:
        """
        Push what nobody has hinted at.

        :raise StoreUnavailable: it cannot be looked up.
        """
        missed = {one.id: one.at for one in arrivals if self.is_missed(one)}
        if missed:
            for id_ in await self.picked_up(list(missed)):
                del missed[id_]
        async for items in self._find(list(missed)):
            for item in items:
                if not self.was_pushed(item.id):
                    self.push_late(item, missed[item.id])

    async def _find(self, wanted: Sequence[str]) -> AsyncIterator[list[Item]]:
        while wanted and (found := await self.find(wanted)):
            served = await self.served({recipient_of(item) for item in found})
            yield [item for item in found if recipient_of(item) in served]
            there = {item.id for item in found}
            # What is missing does not exist any more, or is too much to be read at once.
            wanted = [id_ for id_ in wanted if id_ not in there]


def recipient_of(item: StoredMessage | PendingEvent) -> str:
    """The DID that it is for."""
    return item.recipient_did


class NotificationReceiver:
    """
    Takes hints.

    :param contracts_updated: tells the sockets of a DID; False when there are none.
    """

    def __init__(
        self,
        didcomm: LocalDelivery[StoredMessage],
        decentrl: LocalDelivery[PendingEvent],
        contracts_updated: Callable[[str], bool],
    ) -> None:
        self._didcomm = didcomm
        self._decentrl = decentrl
        self._contracts_updated = contracts_updated

    async def receive(self, body: bytes) -> bytes:
        """
        The response to a request of another node.

        :raise ValueError: it is no request.
        :raise StoreUnavailable: try again later.
        """
        names = decode_notifications(body)
        pushed: NotificationNames = {
            "messages": await self._didcomm.take(names["messages"]),
            "events": await self._decentrl.take(names["events"]),
            "contracts": await self._push_contract_changes(names["contracts"]),
        }
        return encode_push_result(pushed)

    async def _push_contract_changes(self, dids: Sequence[str]) -> list[str]:
        """Those whose sockets were told. Some are reminded long after the change."""
        if not dids:
            return []
        served = await self._decentrl.served(dids)
        return [did for did in dids if did in served and self._contracts_updated(did)]


async def answer_probe(body: bytes) -> bytes:
    """The response to another node that wants to know whether this one is here."""
    return b"{}"
