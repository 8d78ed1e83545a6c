"""Events that an identity keeps here for itself, encrypted (DCTRL-0004 8.9 to 8.11)."""

from __future__ import annotations

from typing import Any

from mediatord.decentrl.desk import Desk, page, slice_of
from mediatord.decentrl.exchange import Order
from mediatord.interfaces.decentrl import EventFilter, StoredEvent
from mediatord.protocol.decentrl.canonical import plain_number
from mediatord.protocol.decentrl.shapes import QueryEvents, SaveEvents, UpdateEventTags


class Archive:
    """Stored events."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def save(self, order: Order, save: SaveEvents) -> dict[str, Any]:
        """SAVE_EVENTS: all of them or none."""
        guard = await self._desk.own(order)
        events = [
            StoredEvent(
                id=self._desk.new_id(),
                sender_did=event.sender_did,
                recipient_did=event.recipient_did,
                payload=event.payload,
                tags=tuple(event.encrypted_tags),
                timestamp=float(event.timestamp),
                contract_id=event.contract_id,
            )
            for event in save.events
        ]
        await self._desk.store.save_events(guard, order.sender, events)
        return {}

    async def query(self, order: Order, query: QueryEvents) -> dict[str, Any]:
        """QUERY_EVENTS."""
        await self._desk.store.admit(await self._desk.own(order))
        asked = query.filter
        wanted = EventFilter(
            tags=tuple(asked.encrypted_tags or ()),
            participant=asked.participant_did,
            after=asked.after_timestamp,
            before=asked.before_timestamp,
            unprocessed_only=bool(asked.unprocessed_only),
        )
        found = await self._desk.store.events(order.sender, wanted, slice_of(query.pagination))
        items = [
            {
                "id": one.id,
                "payload": one.payload,
                "encrypted_tags": one.tags,
                "timestamp": plain_number(one.timestamp),
            }
            for one in found.items
        ]
        return page("events", items, found, query.pagination)

    async def update_tags(self, order: Order, update: UpdateEventTags) -> dict[str, Any]:
        """UPDATE_EVENT_TAGS."""
        guard = await self._desk.own(order)
        tags = [(event.event_id, tuple(event.encrypted_tags)) for event in update.events]
        await self._desk.store.update_tags(guard, order.sender, tags)
        return {}
