"""Messages as documents, and what is told of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from bson import ObjectId, Timestamp

from mediatord.interfaces import Deposited, Payload, Reason, Removed, StoredMessage
from mediatord.store.mongo.requests import Document
from mediatord.store.shares import ANONYMOUS, AUTHENTICATED, KNOWN, SENDER, Part

# What is needed of a message that is to go.
OUTLINE = {"recipient": 1, "account": 1, "size": 1, "received_at": 1, "pushes": 1}
# In a queue that is shared.
OUTLINE_OF_PARTY = {**OUTLINE, "network": 1, "sender": 1}
_NETWORK_BITS = 32
_ARRIVES = Timestamp(0, 0)
_ABSENT = {"$exists": False}


class Place(NamedTuple):
    """Where a message waits."""

    recipient: ObjectId
    account: ObjectId


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be queued for whom."""

    recipient_did: str
    payloads: Sequence[Payload]
    now: float
    expires_at: float
    due_at: float | None
    origin: int = 0

    def document(self, payload: Payload, place: Place) -> Document:
        document: Document = {
            "_id": payload.id,
            "recipient": place.recipient,
            "account": place.account,
            "seq": _ARRIVES,
            "form": payload.form,
            "size": len(payload.data),
            "received_at": self.now,
            "expires_at": self.expires_at,
            "pushes": 0,
            "digest": sha256(payload.data).digest(),
            "payload": payload.data,
        }
        if self.due_at is None:
            document["arrived_at"] = self.now
        else:
            document["due_at"] = self.due_at
            if self.due_at < self.expires_at:
                document["wakes_at"] = self.due_at
        return document | halves_of(self.origin)

    def deposited(self, account: str, evicted: Sequence[Removed]) -> Deposited:
        return Deposited(tuple([self._stored(payload, account) for payload in self.payloads]), tuple(evicted))

    def removed(self, payload: Payload, account: str, reason: Reason) -> Removed:
        """One of ours that had to go again."""
        return Removed(payload.id, self.recipient_did, account, len(payload.data), self.now, 0, reason)

    def _stored(self, payload: Payload, account: str) -> StoredMessage:
        return StoredMessage(
            id=payload.id,
            recipient_did=self.recipient_did,
            account=account,
            payload=payload.data,
            form=payload.form,
            received_at=self.now,
            expires_at=self.expires_at,
            due_at=self.due_at,
        )


def halves_of(origin: int) -> Document:
    """What a message has of its origin: a value each, so that the server can find those of a party."""
    halves = {"network": origin >> _NETWORK_BITS, "sender": origin & SENDER}
    return {name: value for name, value in halves.items() if value}


def origin_of(document: Document) -> int:
    origin: int = document.get("network", 0) << _NETWORK_BITS | document.get("sender", 0)
    return origin


def of_part(part: Part, known: frozenset[int]) -> Document:
    """
    What finds some messages of a queue; see :mod:`mediatord.store.shares`.

    :param known: parties whom the recipient has acknowledged before.
    """
    rank, network, sender = part
    conditions: list[Document] = []
    if sender is not None:
        conditions.append({"sender": sender})
    if network is not None:
        conditions.append({"network": network >> _NETWORK_BITS or _ABSENT})
    senders = sorted(party for party in known if party & SENDER)
    networks = sorted(party >> _NETWORK_BITS for party in known if not party & SENDER)
    if rank == ANONYMOUS:
        conditions.append({"sender": _ABSENT, "network": {"$nin": networks}})
    elif rank == AUTHENTICATED:
        conditions.append({"sender": {"$exists": True, "$nin": senders}})
    elif rank == KNOWN:
        anonymous = {"sender": _ABSENT, "network": {"$in": networks}}
        conditions.append({"$or": [{"sender": {"$in": senders}}, anonymous]})
    return {"$and": conditions} if conditions else {}


def stored(document: Document, recipients: Mapping[ObjectId, str], accounts: Mapping[ObjectId, str]) -> StoredMessage:
    """
    A message as it was deposited.

    :param recipients: DIDs by id, like `accounts`.
    """
    return StoredMessage(
        id=document["_id"],
        recipient_did=recipients[document["recipient"]],
        account=accounts[document["account"]],
        payload=document["payload"],
        form=document["form"],
        received_at=document["received_at"],
        expires_at=document["expires_at"],
        status="delivered" if "delivered" in document else "pending",
        due_at=document.get("due_at"),
    )


def removed(document: Document, recipient_did: str, account: str, reason: Reason | None) -> Removed:
    return Removed(
        id=document["_id"],
        recipient_did=recipient_did,
        account=account,
        size=document["size"],
        received_at=document["received_at"],
        pushes=document["pushes"],
        reason=reason,
    )
