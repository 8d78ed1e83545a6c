"""A Decentrl wallet: events for others, for itself and for everybody (DCTRL-0004 7 and 8.7 to 8.11, DCTRL-0007)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from mediatord.protocol.decentrl.did import parse_did
from mediatord.protocol.decentrl.public import event_signature_holds, sign_event
from mediatord.wallet.decentrl import commands
from mediatord.wallet.decentrl.client import read_object
from mediatord.wallet.decentrl.contracting import MANY, Contracting
from mediatord.wallet.decentrl.contracts import Agreement
from mediatord.wallet.decentrl.envelopes import Event, open_event, seal_event
from mediatord.wallet.decentrl.mediator import Mediator
from mediatord.wallet.decentrl.replies import (
    EVENTS,
    PENDING_EVENTS,
    Page,
    PendingEvent,
    PublicEvent,
    StoredEvent,
    read_page,
)
from mediatord.wallet.packing import Unreadable


@dataclass(frozen=True, slots=True)
class Entry:
    """
    An event of our own history, in the clear.

    :param tags: what we want to find it by.
    :param timestamp: Unix seconds; None for now.
    """

    sender_did: str
    recipient_did: str
    text: str = field(repr=False)
    tags: Sequence[str] = field(default=(), repr=False)
    timestamp: float | None = None
    contract_id: str | None = None


class Wallet(Contracting):
    """
    What comes for one identity, and what it keeps and says.

    Its methods raise as those of :class:`~mediatord.wallet.decentrl.contracting.Contracting`.
    """

    async def send(self, peer_did: str, text: str, agreement: Agreement | None = None) -> str:
        """
        Send an event to somebody, at the mediator that its DID names; the id that it has there.

        :param agreement: the contract to use; if none is named, the one that lasts longest.
        :raise LookupError: there is no contract.
        """
        if agreement is None:
            agreement = next(iter(self.agreements_with(peer_did)), None)
        if agreement is None:
            raise LookupError("no contract")
        at = await self.directory.mediator_of(peer_did)
        payload = seal_event(self.identity, agreement, text, self.now())
        reply = await self.ask(payload, peer_did, commands.PRIVATE, at=at)
        return _id(reply, "pendingEventId")

    async def pending(self, page: int = 0, page_size: int = MANY, **wanted: Any) -> Page[PendingEvent]:
        """
        Events that wait for us.

        :param wanted: `sender_did`.
        """
        return await self.find(PENDING_EVENTS, page, page_size, wanted)

    def open(self, event: PendingEvent) -> Event:
        """
        Decrypt an event and check who wrote it.

        :raise Unreadable: a check failed, or there is no contract with its sender.
        """
        return open_event(event.payload, event.sender_did, self.agreements_with(event.sender_did))

    async def acknowledge(self, events: Iterable[PendingEvent | str]) -> None:
        """Have events removed from those that wait."""
        ids = [one if isinstance(one, str) else one.id for one in events]
        await self.ask({"type": "ACKNOWLEDGE_PENDING_EVENTS", "event_ids": ids})

    async def save_events(self, *entries: Entry) -> None:
        """Have our mediator keep events, encrypted for ourselves."""
        await self.ask({"type": "SAVE_EVENTS", "events": [self._sealed(entry) for entry in entries]})

    async def events(
        self, page: int = 0, page_size: int = MANY, *, tags: Sequence[str] = (), **wanted: Any
    ) -> Page[StoredEvent]:
        """
        Our history, as our mediator keeps it: :meth:`~mediatord.wallet.decentrl.identity.Identity.unseal` reads it.

        :param tags: one of them, in the clear.
        :param wanted: `participant_did`, `after_timestamp`, `before_timestamp`, `unprocessed_only`.
        """
        if tags:
            wanted["encrypted_tags"] = self._tags(tags)
        return await self.find(EVENTS, page, page_size, wanted)

    async def update_tags(self, tags: Mapping[str, Sequence[str]]) -> None:
        """Give events other tags, by their ids, and have them marked as processed."""
        events = [{"event_id": id_, "encrypted_tags": self._tags(given)} for id_, given in tags.items()]
        await self.ask({"type": "UPDATE_EVENT_TAGS", "events": events})

    async def publish(self, event: str, tags: Sequence[str] = (), channel_id: str | None = None) -> str:
        """Say something to everybody; the id that it has at our mediator."""
        now = self.now()
        payload: dict[str, Any] = {
            "type": "PUBLISH_PUBLIC_EVENT",
            "event": event,
            "tags": list(tags),
            "timestamp": now,
            "event_signature": sign_event(event, tags, now, self.identity.seed, channel_id),
        }
        if channel_id is not None:
            payload["channel_id"] = channel_id
        return _id(await self.ask(payload, channel=commands.PUBLIC), "public_event_id")

    async def unpublish(self, event_id: str) -> None:
        """Take back what we published."""
        await self.ask({"type": "DELETE_PUBLIC_EVENT", "public_event_id": event_id}, channel=commands.PUBLIC)

    async def public(
        self, publisher_did: str, *, at: Mediator | None = None, tags: Sequence[str] = (), **wanted: Any
    ) -> Page[PublicEvent]:
        """
        What somebody said to everybody, checked to be theirs.

        :param at: where to look; the mediator that the publisher's DID names.
        :param tags: one of them.
        :param wanted: `after`, `before`, `channel_id`, `page`, `page_size`.
        """
        at = at or await self.directory.mediator_of(publisher_did)
        if tags:
            wanted["tags"] = ",".join(tags)
        response = await self.get(f"{at.public_url(publisher_did)}?{urlencode(wanted)}")
        found = read_page(read_object(response), "events", PublicEvent)
        if not all(_is_genuine(one, publisher_did) for one in found.items):
            raise Unreadable("a public event that its publisher did not sign")
        return found

    def _tags(self, tags: Sequence[str]) -> list[str]:
        return [self.identity.tag(tag) for tag in tags]

    def _sealed(self, entry: Entry) -> dict[str, Any]:
        sealed: dict[str, Any] = {
            "sender_did": entry.sender_did,
            "recipient_did": entry.recipient_did,
            "timestamp": self.now() if entry.timestamp is None else entry.timestamp,
            "payload": self.identity.seal(entry.text),
            "encrypted_tags": self._tags(entry.tags),
        }
        return sealed if entry.contract_id is None else {**sealed, "contract_id": entry.contract_id}


def _id(reply: Mapping[str, Any], name: str) -> str:
    if not isinstance(reply.get(name), str):
        raise Unreadable("a reply without an id")
    return str(reply[name])


def _is_genuine(event: PublicEvent, publisher_did: str) -> bool:
    key = parse_did(publisher_did).signing_key
    timestamp = event.timestamp
    return event_signature_holds(event.event, event.tags, timestamp, event.event_signature, key, event.channel_id)
