"""Events on their way from one identity to another (DCTRL-0004 section 7, 8.7, 8.8)."""

from __future__ import annotations

from typing import Any

from mediatord.decentrl.desk import Desk, page, slice_of
from mediatord.decentrl.exchange import Order
from mediatord.errors import RecipientNotFound
from mediatord.interfaces.decentrl import PendingEvent
from mediatord.protocol.decentrl.shapes import AcknowledgePendingEvents, QueryPendingEvents


class Delivery:
    """Takes events for registered identities, and hands them out until they are acknowledged."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def deliver(self, order: Order, payload: str) -> dict[str, Any]:
        """TWO_WAY_PRIVATE: whoever the recipient has a contract with may write to it, registered here or not."""
        desk, recipient = self._desk, order.command.recipient_did
        if not desk.directory.resolves(recipient):
            await desk.refuse(order.guard(), RecipientNotFound())
        event = PendingEvent(desk.new_id(), recipient, order.sender, payload, desk.clock.seconds())
        await desk.store.deliver(order.guard(recipient=recipient), event)
        desk.pushing.pending(
            event,
            lambda pushed: desk.journal.accepted(
                order.request, event, order.sender, "live" if pushed else "queue", "decentrl"
            ),
        )
        return {"pendingEventId": event.id}

    async def query(self, order: Order, query: QueryPendingEvents) -> dict[str, Any]:
        """QUERY_PENDING_EVENTS."""
        await self._desk.store.admit(await self._desk.own(order))
        found = await self._desk.store.pending_events(
            order.sender, query.filter.sender_did, slice_of(query.pagination)
        )
        for one in found.items:
            self._desk.journal.pushed(one, [None], "poll", "decentrl")
        self._desk.pushing.handed_out([one.id for one in found.items])
        items = [{"id": one.id, "payload": one.payload, "sender_did": one.sender_did} for one in found.items]
        return page("pending_events", items, found, query.pagination)

    async def acknowledge(self, order: Order, acknowledgement: AcknowledgePendingEvents) -> dict[str, Any]:
        """ACKNOWLEDGE_PENDING_EVENTS."""
        guard = await self._desk.own(order)
        removed = await self._desk.store.acknowledge_events(guard, order.sender, acknowledgement.event_ids)
        self._desk.pushing.settled(removed)
        return {}
