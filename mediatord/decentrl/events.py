"""
Commands about events: pending ones between identities (DCTRL-0004 section 7, 8.7, 8.8), stored ones of an identity,
encrypted by it for itself (8.9 to 8.11), and public ones of its channels (DCTRL-0007, reference section 10).

Each command is a function that returns the members of its reply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mediatord.decentrl.context import CommandRequest, DecentrlContext, ReplyBody, build_page, to_slice
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
from mediatord.runtime.request_time import measure_time
from mediatord.store.interfaces.decentrl import (
    EventFilter,
    PendingEvent,
    PublicEvent,
    PublicEventFilter,
    StoredEvent,
)

_verify_event_signature = measure_time(verify_event_signature)


async def deliver(context: DecentrlContext, request: CommandRequest, payload: str) -> ReplyBody:
    """TWO_WAY_PRIVATE; the sender need not be registered here."""
    recipient, sender = request.recipient, request.sender
    if not context.key_directory.resolves(recipient):
        await context.refuse(request.guard, RecipientNotFound())
    now = context.clock.seconds()
    event = PendingEvent(context.new_id(now), recipient, sender, payload, now)
    await context.store.enqueue_event(replace(request.guard, recipient=recipient), event)
    record_accept = partial(context.recorder.record_accept, request.record.request, event, sender, "decentrl")
    context.event_pusher.dispatch(event, record_accept)
    return {"pendingEventId": event.id}


async def query_pending(context: DecentrlContext, request: CommandRequest, payload: QueryPendingEvents) -> ReplyBody:
    """QUERY_PENDING_EVENTS."""
    sender = payload.filter.sender_did
    if context.note_poll is not None and sender is None:
        context.note_poll(request.sender)  # before the read, as what arrives during it is not shown
    found = await context.store.pending_events(request.sender, sender, to_slice(payload.pagination))
    for one in found.items:
        context.recorder.record_push(one, [None], "poll", "decentrl")
    if context.record_pickups is not None:
        context.record_pickups([one.id for one in found.items])
    items = [{"id": one.id, "payload": one.payload, "sender_did": one.sender_did} for one in found.items]
    return {"payload": build_page("pending_events", items, found, payload.pagination)}


async def acknowledge(
    context: DecentrlContext, request: CommandRequest, payload: AcknowledgePendingEvents
) -> ReplyBody:
    """ACKNOWLEDGE_PENDING_EVENTS."""
    removed = await context.store.acknowledge_events(request.guard, request.sender, payload.event_ids)
    context.event_pusher.resolve_pushes(removed)
    return {}


async def save(context: DecentrlContext, request: CommandRequest, payload: SaveEvents) -> ReplyBody:
    """SAVE_EVENTS: all of them or none."""
    events = [
        StoredEvent(
            id=context.new_id(context.clock.seconds()),
            sender_did=event.sender_did,
            recipient_did=event.recipient_did,
            payload=event.payload,
            tags=event.encrypted_tags,
            timestamp=event.timestamp,
            contract_id=event.contract_id,
        )
        for event in payload.events
    ]
    await context.store.save_events(request.guard, request.sender, events)
    return {}


async def query_stored(context: DecentrlContext, request: CommandRequest, payload: QueryEvents) -> ReplyBody:
    """QUERY_EVENTS."""
    asked = payload.filter
    wanted = EventFilter(
        tags=asked.encrypted_tags,
        participant=asked.participant_did,
        after=asked.after_timestamp,
        before=asked.before_timestamp,
        unprocessed_only=asked.unprocessed_only,
    )
    found = await context.store.events(request.sender, wanted, to_slice(payload.pagination))
    items = [
        {
            "id": one.id,
            "payload": one.payload,
            "encrypted_tags": one.tags,
            "timestamp": normalize_number(one.timestamp),
        }
        for one in found.items
    ]
    return {"payload": build_page("events", items, found, payload.pagination)}


async def update_tags(context: DecentrlContext, request: CommandRequest, payload: UpdateEventTags) -> ReplyBody:
    """UPDATE_EVENT_TAGS."""
    tags = [(event.event_id, event.encrypted_tags) for event in payload.events]
    await context.store.update_tags(request.guard, request.sender, tags)
    return {}


async def publish(context: DecentrlContext, request: CommandRequest, payload: PublishPublicEvent) -> ReplyBody:
    """PUBLISH_PUBLIC_EVENT, signed by the key that the command is signed with."""
    signed = _verify_event_signature(
        payload.event,
        payload.tags,
        payload.timestamp,
        payload.event_signature,
        request.key,
        channel_id=payload.channel_id,
    )
    if not signed:
        await context.refuse(request.guard, InvalidEventSignature())
    event = PublicEvent(
        id=context.new_id(context.clock.seconds()),
        event=payload.event,
        tags=payload.tags,
        timestamp=payload.timestamp,
        event_signature=payload.event_signature,
        channel_id=payload.channel_id,
    )
    await context.store.publish(request.guard, request.sender, event)
    return {"public_event_id": event.id}


async def delete_public(context: DecentrlContext, request: CommandRequest, payload: DeletePublicEvent) -> ReplyBody:
    """DELETE_PUBLIC_EVENT; an event of another identity looks like one that does not exist."""
    await context.store.unpublish(request.guard, request.sender, payload.public_event_id)
    return {}


async def read_public(
    context: DecentrlContext, publisher: str, arguments: Mapping[bytes, Sequence[bytes]]
) -> ReplyBody:
    """
    `GET /public/:did`; an empty list for an unknown DID, so that it does not show who is registered.

    :raise InvalidCommand: not a DID, or invalid arguments.
    """
    if not publisher.startswith("did:") or len(publisher) > MAX_DID_CHARACTERS:
        raise InvalidCommand
    query = parse_public_query(arguments)
    found = await context.store.public_events(
        publisher,
        PublicEventFilter(query.tags, query.after, query.before, query.channel_id),
        to_slice(query),
    )
    items = [_format_public_event(event) for event in found.items]
    return {"publisher_did": publisher, **build_page("events", items, found, query)}


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
