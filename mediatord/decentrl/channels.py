"""Public channels (DCTRL-0007, reference section 10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mediatord.decentrl.desk import Desk
from mediatord.decentrl.exchange import Order
from mediatord.errors import InvalidCommand, InvalidEventSignature
from mediatord.interfaces.decentrl import PublicEvent, PublicFilter, Slice
from mediatord.protocol.decentrl.canonical import plain_number
from mediatord.protocol.decentrl.public import event_signature_holds
from mediatord.protocol.decentrl.queries import read_public_query
from mediatord.protocol.decentrl.shapes import LONGEST_DID, DeletePublicEvent, PublishPublicEvent
from mediatord.stopwatch import timed

_signature_holds = timed(event_signature_holds)


class Channels:
    """What identities say to everybody."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def publish(self, order: Order, publish: PublishPublicEvent) -> dict[str, Any]:
        """PUBLISH_PUBLIC_EVENT, signed by the key that the command is signed with."""
        desk = self._desk
        guard = await desk.own(order)
        signed = _signature_holds(
            publish.event,
            publish.tags,
            publish.timestamp,
            publish.event_signature,
            order.key,
            channel_id=publish.channel_id,
        )
        if not signed:
            await desk.refuse(guard, InvalidEventSignature())
        event = PublicEvent(
            id=desk.new_id(),
            event=publish.event,
            tags=tuple(publish.tags),
            timestamp=float(publish.timestamp),
            event_signature=publish.event_signature,
            channel_id=publish.channel_id,
        )
        await desk.store.publish(guard, order.sender, event)
        return {"public_event_id": event.id}

    async def delete(self, order: Order, delete: DeletePublicEvent) -> dict[str, Any]:
        """DELETE_PUBLIC_EVENT; what is somebody else's is not there (no oracle)."""
        guard = await self._desk.own(order)
        await self._desk.store.unpublish(guard, order.sender, delete.public_event_id)
        return {}

    async def read(self, publisher: str, arguments: Mapping[bytes, Sequence[bytes]]) -> dict[str, Any]:
        """
        `GET /public/:did`. Of who is not known here there is an empty list: registration is nobody else's business.

        :raise InvalidCommand: not a DID, or arguments that make no sense.
        """
        if not publisher.startswith("did:") or len(publisher) > LONGEST_DID:
            raise InvalidCommand
        query = read_public_query(arguments)
        found = await self._desk.store.public_events(
            publisher,
            PublicFilter(query.tags, query.after, query.before, query.channel_id),
            Slice(query.page * query.page_size, query.page_size),
        )
        return {
            "publisher_did": publisher,
            "events": [_shown(event) for event in found.items],
            "pagination": {"page": query.page, "page_size": query.page_size, "total": found.total},
        }


def _shown(event: PublicEvent) -> dict[str, Any]:
    shown = {
        "id": event.id,
        "event": event.event,
        "tags": event.tags,
        "timestamp": plain_number(event.timestamp),
        "event_signature": event.event_signature,
    }
    # A null would break readers that rebuild what was signed.
    return shown if event.channel_id is None else {**shown, "channel_id": event.channel_id}
