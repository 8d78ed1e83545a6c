"""Events on their way, in MongoDB."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from bson import Timestamp

from mediatord.errors import ContractNotFound, QuotaExceeded
from mediatord.store.interfaces.decentrl import MAX_PAGE_BYTES, DecentrlQuotas, PageRequest, PendingEvent, ResultPage
from mediatord.store.interfaces.messages import ArrivalWindow, MessageArrival, RemovedMessage
from mediatord.store.mongo.decentrl_commands import CommandContext, CommandOutcome
from mediatord.store.mongo.decentrl_parties import (
    DocumentListing,
    PartyReader,
    build_empty_result,
    build_party_changes,
    build_party_documents_query,
    check_slice_size,
    make_party_key,
    sum_utf8_sizes,
)
from mediatord.store.mongo.driver.commands import Document, MongoCommand, build_find, build_window_filters
from mediatord.store.mongo.ledger_entries import build_ledger_entries
from mediatord.store.mongo.schema import (
    CONTRACT_OF_PAIR,
    CONTRACTS,
    PENDING_ARRIVED,
    PENDING_EVENTS,
    PENDING_OF_PAIR,
    PENDING_OF_PARTY,
    PartyCollection,
)


@dataclass(frozen=True, slots=True)
class MongoDeliverCommand:
    """To let an event wait for its recipient."""

    event: PendingEvent
    caps: DecentrlQuotas
    now: float

    @property
    def did(self) -> str:
        return self.event.recipient_did

    @property
    def creates(self) -> tuple[PartyCollection, Sequence[str]]:
        return PENDING_EVENTS, [self.event.id]

    @property
    def size(self) -> int:
        return sum_utf8_sizes(self.event.payload)

    def build_queries(self) -> list[MongoCommand]:
        event = self.event
        pair = {"party": make_party_key(event.recipient_did), "peer": make_party_key(event.sender_did)}
        allowing = {**pair, "until": {"$gt": self.now}}
        return [
            build_find(CONTRACTS.name, allowing, limit=1, projection={"_id": 0, "until": 1}, hint=CONTRACT_OF_PAIR),
        ]

    async def decide(self, context: CommandContext) -> CommandOutcome[None]:
        """
        :raise ContractNotFound: the recipient owns no contract with the sender that has not expired.
        :raise QuotaExceeded: too much waits already.
        """
        (allowing,) = context.found
        if not allowing:
            raise ContractNotFound()
        event, caps, party = self.event, self.caps, context.party
        size = self.size
        if party.pending >= caps.pending or (size and party.pending_bytes + size > caps.pending_bytes):
            raise QuotaExceeded()
        document = {
            "_id": event.id,
            "party": party.key,
            "recipient_did": event.recipient_did,
            "sender": make_party_key(event.sender_did),
            "sender_did": event.sender_did,
            "received_at": float(event.received_at),
            "size": size,
            "payload": event.payload,
            "seq": Timestamp(0, 0),
        }
        noted = build_ledger_entries(context.transaction.page, "decentrl", accepted=1)
        return CommandOutcome([*build_party_changes(PENDING_EVENTS, party, come=[document]), *noted], None)


@dataclass(frozen=True, slots=True)
class MongoAcknowledgeEventsCommand:
    """To remove some of a recipient."""

    did: str
    ids: tuple[str, ...]

    @property
    def creates(self) -> None:
        """Nothing."""

    @property
    def size(self) -> int:
        return 0

    def build_queries(self) -> list[MongoCommand]:
        return [build_party_documents_query(PENDING_EVENTS, self.did, self.ids, {"received_at": 1})]

    async def decide(self, context: CommandContext) -> CommandOutcome[list[RemovedMessage]]:
        """Those that were there, in order of arrival."""
        (found,) = context.found
        gone = [RemovedMessage(one["_id"], self.did, self.did, one["size"], one["received_at"], 0) for one in found]
        noted = build_ledger_entries(context.transaction.page, "decentrl", acknowledged=len(found))
        return CommandOutcome([*build_party_changes(PENDING_EVENTS, context.party, gone=found), *noted], gone)


async def find_pending_events(
    reading: PartyReader, recipient: str, sender: str | None, part: PageRequest
) -> ResultPage[PendingEvent]:
    """:raise PayloadTooLarge: their payloads are more than a slice may have."""
    party = await reading.party(recipient)
    if not party.pending:
        return build_empty_result()
    listing = DocumentListing(PENDING_EVENTS.name, {"party": party.key}, {"seq": 1}, PENDING_OF_PARTY)
    total: int | None = party.pending
    if sender is not None:
        of_one = {**listing.filter, "sender": make_party_key(sender)}
        listing, total = replace(listing, filter=of_one, hint=PENDING_OF_PAIR), None
    if party.pending_bytes > MAX_PAGE_BYTES:
        sizes, total = await reading.page(replace(listing, projection={"size": 1}), part, total)
        check_slice_size(sizes)
    found, total = await reading.page(listing, part, total)
    check_slice_size(found)
    return ResultPage(tuple([_parse_pending_event(one) for one in found]), total)


async def find_pending_by_id(reading: PartyReader, ids: Sequence[str]) -> list[PendingEvent]:
    """In order of arrival, as many as fit, but at least one."""
    found: list[Document] = []
    missing = dict.fromkeys(ids)
    while missing and not _exceeds_slice(found):
        # One batch, which has as much as a slice, or a little less: mostly that is all there is.
        question = build_find(
            PENDING_EVENTS.name, {"_id": {"$in": list(missing)}}, sort={"seq": 1}, limit=len(missing), hint="_id_"
        )
        some = await reading.ask(question.with_fields({"singleBatch": True}))
        if not some:
            break
        found += some
        for one in some:
            del missing[one["_id"]]
    return [_parse_pending_event(one) for one in _take_fitting_events(found)]


async def list_pending_arrivals(
    reading: PartyReader, recipients: Sequence[str], window: ArrivalWindow, limit: int
) -> list[MessageArrival]:
    """Nothing but an index is read."""
    if limit <= 0 or not recipients:
        return []
    dids = {make_party_key(did): did for did in recipients}
    found: list[Document] = []
    for part in build_window_filters("received_at", window):
        if len(found) < limit:
            question = build_find(
                PENDING_EVENTS.name,
                {"party": {"$in": list(dids)}, **part},
                sort={"received_at": 1, "_id": 1},
                limit=limit - len(found),
                projection={"party": 1, "received_at": 1},
                hint=PENDING_ARRIVED,
            )
            found += await reading.ask(question)
    return [MessageArrival(one["_id"], dids[one["party"]], one["received_at"]) for one in found]


def _parse_pending_event(document: Document) -> PendingEvent:
    return PendingEvent(
        id=document["_id"],
        recipient_did=document["recipient_did"],
        sender_did=document["sender_did"],
        payload=document["payload"],
        received_at=document["received_at"],
    )


def _exceeds_slice(documents: Sequence[Document]) -> bool:
    """Whether these are more than a slice may have."""
    size: int = sum([document["size"] for document in documents])
    return size > MAX_PAGE_BYTES


def _take_fitting_events(documents: Sequence[Document]) -> Sequence[Document]:
    """The first that fit in a slice, but at least one."""
    sizes = list(accumulate([document["size"] for document in documents]))
    return documents[: max(1, bisect_right(sizes, MAX_PAGE_BYTES))]
