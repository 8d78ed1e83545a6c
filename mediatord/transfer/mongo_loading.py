"""
Documents of records, and what has to be counted for them.

Accounts and recipients get ids that are made from their numbers: no driver makes such, as those begin with the time.
Likewise the place in the order of arrival is made from that in the archive, and comes before those that servers give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from bson import ObjectId, Timestamp

from mediatord.interfaces import decentrl
from mediatord.protocol.canonical_did import canonical_did, did_digest
from mediatord.store.mongo import decentrl_schema as schema
from mediatord.store.mongo.collections import ACCOUNTS, DOCUMENTS, MESSAGES, NONCES, RECIPIENTS, RETIRED
from mediatord.store.mongo.decentrl_archive import document_of as stored_document
from mediatord.store.mongo.decentrl_archive import payload_of as stored_payload
from mediatord.store.mongo.decentrl_channels import document_of as public_document
from mediatord.store.mongo.decentrl_channels import payload_of as public_payload
from mediatord.store.mongo.decentrl_keys import key_of, size_of
from mediatord.store.recipient_names import names_of_record
from mediatord.transfer.mongo_link import Document
from mediatord.transfer.records import (
    Account,
    Contract,
    ContractRequest,
    LongForm,
    Message,
    Nonce,
    PendingEvent,
    PublicEvent,
    Recipient,
    Record,
    Registration,
    Retired,
    StoredEvent,
    seen_at_of,
)

# Whose claims these were is not known.
_TOKEN = bytes(12)
_COUNTERS = ("contracts", "requests", "pending", "pending_bytes", "stored", "published", "archive_bytes")
_NOTHING = ("contracts", "requests", "pending", "stored", "published")


@dataclass(eq=False, slots=True)
class Load:
    """
    What some records come to.

    :ivar documents: to be inserted, by collection.
    :ivar accounts: by number: how many recipients more, and the last place.
    :ivar recipients: by number: how many messages and bytes more.
    :ivar parties: by DID: how much more of what is counted, and `registered_until`.
    """

    documents: dict[str, list[Document]] = field(default_factory=dict)
    accounts: dict[int, list[int]] = field(default_factory=dict)
    recipients: dict[int, list[int]] = field(default_factory=dict)
    parties: dict[str, dict[str, Any]] = field(default_factory=dict)

    def insert(self, collection: str, document: Document) -> None:
        self.documents.setdefault(collection, []).append(document)

    def count(self, did: str, **more: int) -> None:
        """More of what is kept for a party."""
        party = self.parties.setdefault(did, {})
        for name, number in more.items():
            party[name] = party.get(name, 0) + number

    def register(self, did: str, until: float) -> None:
        """A party is registered, for this long at least."""
        party = self.parties.setdefault(did, {})
        party["registered_until"] = max(party.get("registered_until", 0.0), until)


def load_of(first: int, records: Sequence[Record]) -> Load:
    """:param first: place of the first one in the archive, from 1."""
    load = Load()
    for place, record in enumerate(records, first):
        add: Callable[[Load, Any, Timestamp], None] = _ADDING[record.kind]
        add(load, record, Timestamp(1, place))
    return load


def id_of(number: int) -> ObjectId:
    """That of an account or a recipient."""
    return ObjectId(number.to_bytes(12, "big"))


def party_change(did: str, more: Mapping[str, Any]) -> list[Document]:
    """The pipeline that counts more for a party, which may not be there yet; see `decentrl_parties.Party.values`."""
    values: Document = {name: {"$add": [{"$ifNull": [f"${name}", 0]}, more.get(name, 0)]} for name in _COUNTERS}
    until = {"$max": [{"$ifNull": ["$registered_until", 0.0]}, more.get("registered_until", 0.0)]}
    edition = ObjectId() if "archive_bytes" in more or "registered_until" in more else None
    values |= {
        "did": {"$literal": did},
        "registered_until": until,
        "edition": edition or {"$ifNull": ["$edition", None]},
    }
    empty = {"$eq": [{"$add": [f"${name}" for name in _NOTHING]}, 0]}
    marks = {
        "waited_for": {"$cond": [{"$gt": ["$pending", 0]}, True, "$$REMOVE"]},
        "unused": {"$cond": [empty, True, "$$REMOVE"]},
    }
    return [{"$set": values}, {"$set": marks}]


def _account(load: Load, one: Account, place: Timestamp) -> None:
    did = canonical_did(one.did)
    document = {"did": did, "created_at": one.created_at, "draft03": one.draft03, "recipients": 0, "places": 0}
    document["seen_at"] = seen_at_of(one)
    if one.fresh:
        document["fresh"] = True
    load.insert(ACCOUNTS, {"_id": id_of(one.number), **document})


def _retired(load: Load, one: Retired, place: Timestamp) -> None:
    load.insert(RETIRED, {"_id": canonical_did(one.did)})


def _recipient(load: Load, one: Recipient, place: Timestamp) -> None:
    names = names_of_record(one.did, one.place, one.names)
    document: Document = {"_id": id_of(one.number), "account": id_of(one.account), "did": names.did}
    document |= {"did_digest": did_digest(names.did), "messages": 0, "bytes": 0}
    if names:
        document |= {name: value for name, value in (("registered", names.place), ("names", names.stored)) if value}
        counted = load.accounts.setdefault(one.account, [0, 0])
        counted[0] += len(names)
        counted[1] = max(counted[1], names.last)
    load.insert(RECIPIENTS, document)


def _message(load: Load, one: Message, place: Timestamp) -> None:
    document: Document = {
        "_id": one.id,
        "recipient": id_of(one.recipient),
        "account": id_of(one.account),
        "seq": place,
        "form": one.form,
        "size": len(one.payload),
        "received_at": one.received_at,
        "expires_at": one.expires_at,
        "pushes": one.pushes,
        "digest": sha256(one.payload).digest(),
        "payload": one.payload,
    }
    if one.arrived_at is not None:
        document["arrived_at"] = one.arrived_at
    elif one.due_at is not None:
        document["due_at"] = one.due_at
        if one.due_at < one.expires_at:
            document["wakes_at"] = one.due_at
    load.insert(MESSAGES, document)
    counted = load.recipients.setdefault(one.recipient, [0, 0])
    counted[0] += 1
    counted[1] += len(one.payload)


def _long_form(load: Load, one: LongForm, place: Timestamp) -> None:
    load.insert(DOCUMENTS, {"_id": canonical_did(one.short), "long": one.long})


def _nonce(load: Load, one: Nonce, place: Timestamp) -> None:
    load.insert(NONCES, {"_id": one.key, "seq": place, "until": one.until, "token": _TOKEN})


def _registration(load: Load, one: Registration, place: Timestamp) -> None:
    document = {"_id": one.id, "party": key_of(one.did), "until": one.expires_at}
    load.insert(schema.REGISTRATIONS, {**document, "digest": one.digest, "text": one.text})
    load.register(one.did, one.expires_at)


def _contract(load: Load, one: Contract, place: Timestamp) -> None:
    document = {
        "_id": one.id,
        "party": key_of(one.owner),
        "peer": key_of(one.peer),
        "peer_did": one.peer,
        "until": one.expires_at,
        "digest": one.digest,
        "text": one.text,
        "seq": place,
    }
    load.insert(schema.CONTRACTS.name, document)
    load.count(one.owner, contracts=1)


def _contract_request(load: Load, one: ContractRequest, place: Timestamp) -> None:
    document = {
        "_id": one.id,
        "party": key_of(one.recipient),
        "sender": key_of(one.sender),
        "sender_did": one.sender,
        "text": one.request,
        "public_key": one.public_key,
        "seq": place,
    }
    load.insert(schema.REQUESTS.name, document)
    load.count(one.recipient, requests=1)


def _pending_event(load: Load, one: PendingEvent, place: Timestamp) -> None:
    size = size_of(one.payload)
    document = {
        "_id": one.id,
        "party": key_of(one.recipient),
        "recipient_did": one.recipient,
        "sender": key_of(one.sender),
        "sender_did": one.sender,
        "received_at": one.received_at,
        "size": size,
        "payload": one.payload,
        "seq": place,
    }
    load.insert(schema.PENDING.name, document)
    load.count(one.recipient, pending=1, pending_bytes=size)


def _stored_event(load: Load, one: StoredEvent, place: Timestamp) -> None:
    event = decentrl.StoredEvent(
        one.id, one.sender, one.recipient, one.payload, one.tags, one.timestamp, one.contract_id
    )
    document = stored_document(event, key_of(one.owner), processed=one.processed) | {"seq": place}
    load.insert(schema.STORED.name, document)
    load.insert(schema.STORED.payloads, stored_payload(event))
    load.count(one.owner, stored=1, archive_bytes=document["size"] + document["tags_size"])


def _public_event(load: Load, one: PublicEvent, place: Timestamp) -> None:
    event = decentrl.PublicEvent(one.id, one.event, one.tags, one.timestamp, one.signature, one.channel_id)
    document = public_document(event, key_of(one.publisher)) | {"seq": place}
    load.insert(schema.PUBLIC.name, document)
    load.insert(schema.PUBLIC.payloads, public_payload(event))
    load.count(one.publisher, published=1, archive_bytes=document["size"] + document["tags_size"])


_ADDING: Mapping[str, Callable[[Load, Any, Timestamp], None]] = {
    "account": _account,
    "retired": _retired,
    "recipient": _recipient,
    "message": _message,
    "long_form": _long_form,
    "nonce": _nonce,
    "registration": _registration,
    "contract": _contract,
    "contract_request": _contract_request,
    "pending_event": _pending_event,
    "stored_event": _stored_event,
    "public_event": _public_event,
}
