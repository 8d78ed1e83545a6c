"""
Commands about events: pending ones between identities (DCTRL-0004 section 7, 8.7, 8.8), stored ones of an identity
(8.9 to 8.11), and public ones of its channels (DCTRL-0007, reference section 10).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mediatord.clock import measure_time
from mediatord.decentrl.context import CommandRequest, DecentrlContext, build_page_reply, to_slice
from mediatord.errors import InvalidCommand, InvalidEventSignature, RecipientNotFound
from mediatord.protocol.decentrl.canonical_json import normalize_number
from mediatord.protocol.decentrl.commands import (
    MAX_DID_CHARACTERS,
    AcknowledgePendingEvents,
    DeletePublicEvent,
    PublishPublicEvent,
    QueryEvents,
    QueryPendingEvents,
    SaveEvents,
    UpdateEventTags,
    parse_public_query,
)
from mediatord.protocol.decentrl.crypto import verify_event_signature
from mediatord.store.interfaces.decentrl import (
    EventFilter,
    PageRequest,
    PendingEvent,
    PublicEvent,
    PublicEventFilter,
    StoredEvent,
)


class PendingEventHandler:
    """Accepts events for registered identities and returns them until they are acknowledged."""

    def __init__(self, context: DecentrlContext) -> None:
        self._context = context

    async def deliver(self, command_request: CommandRequest, payload: str) -> dict[str, Any]:
        """TWO_WAY_PRIVATE; the sender need not be registered here."""
        context, recipient = self._context, command_request.command.header.recipient_did
        if not context.key_directory.resolves(recipient):
            await context.refuse(command_request.guard(), RecipientNotFound())
        now = context.clock.seconds()
        event = PendingEvent(context.new_id(now), recipient, command_request.sender, payload, now)
        await context.store.enqueue_event(command_request.guard(recipient=recipient), event)
        sender, record_accept = command_request.sender, context.recorder.record_accept
        context.event_pusher.dispatch(
            event, partial(record_accept, command_request.request_id, event, sender, "decentrl")
        )
        return {"pendingEventId": event.id}

    async def query(self, command_request: CommandRequest, query: QueryPendingEvents) -> dict[str, Any]:
        """QUERY_PENDING_EVENTS."""
        await self._context.store.check_guard(await self._context.require_mediator_recipient(command_request))
        found = await self._context.store.pending_events(
            command_request.sender, query.filter.sender_did, to_slice(query.pagination)
        )
        for one in found.items:
            self._context.recorder.record_push(one, [None], "poll", "decentrl")
        self._context.event_pusher.record_pickup([one.id for one in found.items])
        items = [{"id": one.id, "payload": one.payload, "sender_did": one.sender_did} for one in found.items]
        return build_page_reply("pending_events", items, found, query.pagination)

    async def acknowledge(
        self, command_request: CommandRequest, acknowledgement: AcknowledgePendingEvents
    ) -> dict[str, Any]:
        """ACKNOWLEDGE_PENDING_EVENTS."""
        guard = await self._context.require_mediator_recipient(command_request)
        removed = await self._context.store.acknowledge_events(
            guard, command_request.sender, acknowledgement.event_ids
        )
        self._context.event_pusher.resolve_pushes(removed)
        return {}


class StoredEventHandler:
    """Keeps events of identities for themselves, encrypted by them."""

    def __init__(self, context: DecentrlContext) -> None:
        self._context = context

    async def save(self, command_request: CommandRequest, save: SaveEvents) -> dict[str, Any]:
        """SAVE_EVENTS: all of them or none."""
        guard = await self._context.require_mediator_recipient(command_request)
        events = [
            StoredEvent(
                id=self._context.new_id(self._context.clock.seconds()),
                sender_did=event.sender_did,
                recipient_did=event.recipient_did,
                payload=event.payload,
                tags=tuple(event.encrypted_tags),
                timestamp=float(event.timestamp),
                contract_id=event.contract_id,
            )
            for event in save.events
        ]
        await self._context.store.save_events(guard, command_request.sender, events)
        return {}

    async def query(self, command_request: CommandRequest, query: QueryEvents) -> dict[str, Any]:
        """QUERY_EVENTS."""
        await self._context.store.check_guard(await self._context.require_mediator_recipient(command_request))
        asked = query.filter
        wanted = EventFilter(
            tags=tuple(asked.encrypted_tags or ()),
            participant=asked.participant_did,
            after=asked.after_timestamp,
            before=asked.before_timestamp,
            unprocessed_only=bool(asked.unprocessed_only),
        )
        found = await self._context.store.events(command_request.sender, wanted, to_slice(query.pagination))
        items = [
            {
                "id": one.id,
                "payload": one.payload,
                "encrypted_tags": one.tags,
                "timestamp": normalize_number(one.timestamp),
            }
            for one in found.items
        ]
        return build_page_reply("events", items, found, query.pagination)

    async def update_tags(self, command_request: CommandRequest, update: UpdateEventTags) -> dict[str, Any]:
        """UPDATE_EVENT_TAGS."""
        guard = await self._context.require_mediator_recipient(command_request)
        tags = [(event.event_id, tuple(event.encrypted_tags)) for event in update.events]
        await self._context.store.update_tags(guard, command_request.sender, tags)
        return {}


_verify_event_signature = measure_time(verify_event_signature)


class PublicEventHandler:
    """Publishes events of identities."""

    def __init__(self, context: DecentrlContext) -> None:
        self._context = context

    async def publish(self, command_request: CommandRequest, publish: PublishPublicEvent) -> dict[str, Any]:
        """PUBLISH_PUBLIC_EVENT, signed by the key that the command is signed with."""
        context = self._context
        guard = await context.require_mediator_recipient(command_request)
        signed = _verify_event_signature(
            publish.event,
            publish.tags,
            publish.timestamp,
            publish.event_signature,
            command_request.key,
            channel_id=publish.channel_id,
        )
        if not signed:
            await context.refuse(guard, InvalidEventSignature())
        event = PublicEvent(
            id=context.new_id(context.clock.seconds()),
            event=publish.event,
            tags=tuple(publish.tags),
            timestamp=float(publish.timestamp),
            event_signature=publish.event_signature,
            channel_id=publish.channel_id,
        )
        await context.store.publish(guard, command_request.sender, event)
        return {"public_event_id": event.id}

    async def delete(self, command_request: CommandRequest, delete: DeletePublicEvent) -> dict[str, Any]:
        """DELETE_PUBLIC_EVENT; an event of another identity looks like one that does not exist."""
        guard = await self._context.require_mediator_recipient(command_request)
        await self._context.store.unpublish(guard, command_request.sender, delete.public_event_id)
        return {}

    async def read(self, publisher: str, arguments: Mapping[bytes, Sequence[bytes]]) -> dict[str, Any]:
        """
        `GET /public/:did`; an empty list for an unknown DID, so that it does not show who is registered.

        :raise InvalidCommand: not a DID, or invalid arguments.
        """
        if not publisher.startswith("did:") or len(publisher) > MAX_DID_CHARACTERS:
            raise InvalidCommand
        query = parse_public_query(arguments)
        found = await self._context.store.public_events(
            publisher,
            PublicEventFilter(query.tags, query.after, query.before, query.channel_id),
            PageRequest(query.page * query.page_size, query.page_size),
        )
        return {
            "publisher_did": publisher,
            "events": [_format_public_event(event) for event in found.items],
            "pagination": {"page": query.page, "page_size": query.page_size, "total": found.total},
        }


def _format_public_event(event: PublicEvent) -> dict[str, Any]:
    shown = {
        "id": event.id,
        "event": event.event,
        "tags": event.tags,
        "timestamp": normalize_number(event.timestamp),
        "event_signature": event.event_signature,
    }
    # A null would break readers that rebuild the signed document.
    return shown if event.channel_id is None else {**shown, "channel_id": event.channel_id}
