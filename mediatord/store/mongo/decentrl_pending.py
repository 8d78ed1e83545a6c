"""Events on their way, in MongoDB."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from bson import Timestamp

from mediatord.errors import ContractNotFound, OverQuota
from mediatord.interfaces import Arrival, Removed, Window
from mediatord.interfaces.decentrl import LARGEST_SLICE, Caps, Found, PendingEvent, Slice
from mediatord.store.mongo.cursors import within
from mediatord.store.mongo.decentrl_commands import Change, Scene
from mediatord.store.mongo.decentrl_keys import key_of, size_of
from mediatord.store.mongo.decentrl_pages import Listing, Reading, check_slice, nothing
from mediatord.store.mongo.decentrl_parties import exchanging, of_party
from mediatord.store.mongo.decentrl_schema import (
    CONTRACT_OF_PAIR,
    CONTRACTS,
    PENDING,
    PENDING_ARRIVED,
    PENDING_OF_PAIR,
    PENDING_OF_PARTY,
    Table,
)
from mediatord.store.mongo.ledger import entering
from mediatord.store.mongo.requests import Document, Request
from mediatord.store.mongo.server import finding


@dataclass(frozen=True, slots=True)
class Delivering:
    """To let an event wait for its recipient."""

    event: PendingEvent
    caps: Caps
    now: float

    @property
    def did(self) -> str:
        return self.event.recipient_did

    @property
    def creates(self) -> tuple[Table, Sequence[str]]:
        return PENDING, [self.event.id]

    @property
    def size(self) -> int:
        return size_of(self.event.payload)

    def asks(self) -> list[Request]:
        event = self.event
        pair = {"party": key_of(event.recipient_did), "peer": key_of(event.sender_did)}
        allowing = {**pair, "until": {"$gt": self.now}}
        return [
            finding(CONTRACTS.name, allowing, limit=1, projection={"_id": 0, "until": 1}, hint=CONTRACT_OF_PAIR),
        ]

    async def decide(self, scene: Scene) -> Change[None]:
        """
        :raise ContractNotFound: the recipient owns no contract with the sender that has not expired.
        :raise OverQuota: too much waits already.
        """
        (allowing,) = scene.found
        if not allowing:
            raise ContractNotFound()
        event, caps, party = self.event, self.caps, scene.party
        size = self.size
        if party.pending >= caps.pending or (size and party.pending_bytes + size > caps.pending_bytes):
            raise OverQuota()
        document = {
            "_id": event.id,
            "party": party.key,
            "recipient_did": event.recipient_did,
            "sender": key_of(event.sender_did),
            "sender_did": event.sender_did,
            "received_at": float(event.received_at),
            "size": size,
            "payload": event.payload,
            "seq": Timestamp(0, 0),
        }
        noted = entering(scene.transaction.page, "decentrl", accepted=1)
        return Change([*exchanging(PENDING, party, come=[document]), *noted], None)


@dataclass(frozen=True, slots=True)
class AcknowledgingEvents:
    """To remove some of a recipient."""

    did: str
    ids: tuple[str, ...]

    @property
    def creates(self) -> None:
        """Nothing."""

    @property
    def size(self) -> int:
        return 0

    def asks(self) -> list[Request]:
        return [of_party(PENDING, self.did, self.ids, {"received_at": 1})]

    async def decide(self, scene: Scene) -> Change[list[Removed]]:
        """Those that were there, in order of arrival."""
        (found,) = scene.found
        gone = [Removed(one["_id"], self.did, self.did, one["size"], one["received_at"], 0) for one in found]
        noted = entering(scene.transaction.page, "decentrl", acknowledged=len(found))
        return Change([*exchanging(PENDING, scene.party, gone=found), *noted], gone)


async def pending_events(reading: Reading, recipient: str, sender: str | None, part: Slice) -> Found[PendingEvent]:
    """:raise TooLarge: their payloads are more than a slice may have."""
    party = await reading.party(recipient)
    if not party.pending:
        return nothing()
    listing = Listing(PENDING.name, {"party": party.key}, {"seq": 1}, PENDING_OF_PARTY)
    total: int | None = party.pending
    if sender is not None:
        of_one = {**listing.filter, "sender": key_of(sender)}
        listing, total = replace(listing, filter=of_one, hint=PENDING_OF_PAIR), None
    if party.pending_bytes > LARGEST_SLICE:
        sizes, total = await reading.page(replace(listing, projection={"size": 1}), part, total)
        check_slice(sizes)
    found, total = await reading.page(listing, part, total)
    check_slice(found)
    return Found(tuple([_event(one) for one in found]), total)


async def find_pending(reading: Reading, ids: Sequence[str]) -> list[PendingEvent]:
    """In order of arrival, as many as fit, but at least one."""
    found: list[Document] = []
    missing = dict.fromkeys(ids)
    while missing and not _is_full(found):
        # One batch, which has as much as a slice, or a little less: mostly that is all there is.
        question = finding(
            PENDING.name, {"_id": {"$in": list(missing)}}, sort={"seq": 1}, limit=len(missing), hint="_id_"
        )
        some = await reading.ask(question.having({"singleBatch": True}))
        if not some:
            break
        found += some
        for one in some:
            del missing[one["_id"]]
    return [_event(one) for one in _fitting(found)]


async def arrived_pending(reading: Reading, recipients: Sequence[str], window: Window, limit: int) -> list[Arrival]:
    """Nothing but an index is read."""
    if limit <= 0 or not recipients:
        return []
    dids = {key_of(did): did for did in recipients}
    found: list[Document] = []
    for part in within("received_at", window):
        if len(found) < limit:
            question = finding(
                PENDING.name,
                {"party": {"$in": list(dids)}, **part},
                sort={"received_at": 1, "_id": 1},
                limit=limit - len(found),
                projection={"party": 1, "received_at": 1},
                hint=PENDING_ARRIVED,
            )
            found += await reading.ask(question)
    return [Arrival(one["_id"], dids[one["party"]], one["received_at"]) for one in found]


def _event(document: Document) -> PendingEvent:
    return PendingEvent(
        id=document["_id"],
        recipient_did=document["recipient_did"],
        sender_did=document["sender_did"],
        payload=document["payload"],
        received_at=document["received_at"],
    )


def _is_full(documents: Sequence[Document]) -> bool:
    """Whether these are more than a slice may have."""
    size: int = sum([document["size"] for document in documents])
    return size > LARGEST_SLICE


def _fitting(documents: Sequence[Document]) -> Sequence[Document]:
    """The first that fit in a slice, but at least one."""
    sizes = list(accumulate([document["size"] for document in documents]))
    return documents[: max(1, bisect_right(sizes, LARGEST_SLICE))]
