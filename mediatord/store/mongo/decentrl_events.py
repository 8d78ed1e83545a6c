"""
Decentrl events: pending ones on their way to a recipient, stored ones of an owner, and public ones of a publisher.

Stored and public events have labels, one for each thing that they are found by, all in one index with time and order
of arrival, so the events of a label are a range of that index. A search for several things looks up one of them and
filters by the others. Their long fields are in a collection of their own.

The server skips and counts documents one by one. So a long list is scanned once, in steps that are short, and the
positions of its steps are cached until the list changes; every page is then at most a step away from one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TypeVar

from bson import Timestamp

from mediatord.errors import ContractNotFound, PublicEventNotFound, QuotaExceeded, RateLimitExceeded
from mediatord.store.caches import EventPosition, PageCursorCache, PageCursors
from mediatord.store.interfaces.decentrl import (
    MAX_PAGE_BYTES,
    DecentrlQuotas,
    EventFilter,
    PageRequest,
    PendingEvent,
    PublicEvent,
    PublicEventFilter,
    ResultPage,
    StoredEvent,
)
from mediatord.store.interfaces.messages import ArrivalWindow, MessageArrival, RemovedMessage
from mediatord.store.mongo.decentrl_commands import CommandContext, CommandOutcome, MongoStoreCommand
from mediatord.store.mongo.decentrl_parties import (
    EMPTY_PAGE,
    DocumentListing,
    EventLabelKind,
    PartyReader,
    PartyRecord,
    build_party_changes,
    build_party_documents_query,
    build_party_update,
    check_page_size,
    make_event_label,
    make_party_key,
    sum_utf8_sizes,
)
from mediatord.store.mongo.driver.commands import Document, MongoCommand, build_find, build_inserts, build_updates
from mediatord.store.mongo.ledger import build_ledger_entries
from mediatord.store.mongo.schema import (
    CONTRACTS,
    PENDING_EVENTS,
    PUBLIC_EVENTS,
    STORED_EVENTS,
    PartyCollection,
    build_window_filters,
)

T = TypeVar("T")
LabelGroup = tuple[bytes, ...]

# Events that are skipped or counted at a time.
EVENTS_PER_STEP = 8_192
# Scans of one owner's lists at a time.
_MAX_SCANS_PER_OWNER = 4
# Searches for more labels than this are not cached.
_MAX_REMEMBERED_LABELS = 64
_MAX_POSITION = 1 << 62
_POSITION_PROJECTION = {"_id": 0, "at": 1, "seq": 1}
# The first labels of a stored event, those of all, of its sender and of its recipient, do not depend on its tags.
_PERMANENT_LABELS = 3


@dataclass(frozen=True, slots=True)
class MongoDeliverCommand(MongoStoreCommand[None]):
    """
    Stores an event as pending.

    :param did: its recipient.
    """

    did: str
    event: PendingEvent
    caps: DecentrlQuotas
    now: float

    @property
    def creates(self) -> tuple[PartyCollection, Sequence[str]]:
        return PENDING_EVENTS, [self.event.id]

    @property
    def size(self) -> int:
        return sum_utf8_sizes(self.event.payload)

    def build_queries(self) -> list[MongoCommand]:
        pair = {"party": make_party_key(self.did), "peer": make_party_key(self.event.sender_did)}
        valid = {**pair, "until": {"$gt": self.now}}
        return [
            build_find(CONTRACTS.name, valid, limit=1, projection={"_id": 0, "until": 1}, hint="contract_of_pair")
        ]

    async def decide(self, context: CommandContext) -> CommandOutcome[None]:
        """
        Store the event if its recipient allows it.

        :raise ContractNotFound: the recipient has no valid contract with the sender.
        :raise QuotaExceeded: too much is pending.
        """
        (contracts,) = context.found
        if not contracts:
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
        entries = build_ledger_entries(context.transaction.slot, "decentrl", accepted=1)
        return CommandOutcome([*build_party_changes(PENDING_EVENTS, party, come=[document]), *entries], None)


@dataclass(frozen=True, slots=True)
class MongoAcknowledgeEventsCommand(MongoStoreCommand[list[RemovedMessage]]):
    """Deletes pending events of a recipient, and returns those that existed in order of arrival."""

    did: str
    ids: tuple[str, ...]

    def build_queries(self) -> list[MongoCommand]:
        return [build_party_documents_query(PENDING_EVENTS, self.did, self.ids, {"received_at": 1})]

    async def decide(self, context: CommandContext) -> CommandOutcome[list[RemovedMessage]]:
        (found,) = context.found
        gone = [RemovedMessage(one["_id"], self.did, self.did, one["size"], one["received_at"], 0) for one in found]
        entries = build_ledger_entries(context.transaction.slot, "decentrl", acknowledged=len(found))
        return CommandOutcome([*build_party_changes(PENDING_EVENTS, context.party, gone=found), *entries], gone)


async def find_pending_events(
    reader: PartyReader, recipient: str, sender: str | None, page: PageRequest
) -> ResultPage[PendingEvent]:
    """:raise PayloadTooLarge: the payloads exceed the limit of a page."""
    party = await reader.read_party(recipient)
    if not party.pending:
        return EMPTY_PAGE
    listing = DocumentListing(PENDING_EVENTS.name, {"party": party.key}, {"seq": 1}, "pending_of_party")
    total: int | None = party.pending
    if sender is not None:
        of_pair = {**listing.filter, "sender": make_party_key(sender)}
        listing, total = replace(listing, filter=of_pair, hint="pending_of_pair"), None
    if party.pending_bytes > MAX_PAGE_BYTES:
        sizes, total = await reader.read_page(replace(listing, projection={"size": 1}), page, total)
        check_page_size(sizes)
    found, total = await reader.read_page(listing, page, total)
    check_page_size(found)
    return ResultPage(tuple([_parse_pending_event(one) for one in found]), total)


async def find_pending_by_id(reader: PartyReader, ids: Sequence[str]) -> list[PendingEvent]:
    """Return the first events that fit in a page, but at least one, in order of arrival."""
    found: list[Document] = []
    missing = dict.fromkeys(ids)
    while missing and sum([document["size"] for document in found]) <= MAX_PAGE_BYTES:
        # One batch has about as much as a page: mostly it is all there is.
        query = build_find(
            PENDING_EVENTS.name, {"_id": {"$in": list(missing)}}, sort={"seq": 1}, limit=len(missing), hint="_id_"
        )
        some = await reader.query(query.with_fields({"singleBatch": True}))
        if not some:
            break
        found += some
        for one in some:
            del missing[one["_id"]]
    sizes = list(accumulate([document["size"] for document in found]))
    return [_parse_pending_event(one) for one in found[: max(1, bisect_right(sizes, MAX_PAGE_BYTES))]]


async def list_pending_arrivals(
    reader: PartyReader, recipients: Sequence[str], window: ArrivalWindow, limit: int
) -> list[MessageArrival]:
    """List events that arrived in a window of time, by a covered query."""
    if limit <= 0 or not recipients:
        return []
    dids = {make_party_key(did): did for did in recipients}
    found: list[Document] = []
    for part in build_window_filters("received_at", window):
        if len(found) < limit:
            query = build_find(
                PENDING_EVENTS.name,
                {"party": {"$in": list(dids)}, **part},
                sort={"received_at": 1, "_id": 1},
                limit=limit - len(found),
                projection={"party": 1, "received_at": 1},
                hint="pending_arrived",
            )
            found += await reader.query(query)
    return [MessageArrival(one["_id"], dids[one["party"]], one["received_at"]) for one in found]


def _parse_pending_event(document: Document) -> PendingEvent:
    return PendingEvent(
        id=document["_id"],
        recipient_did=document["recipient_did"],
        sender_did=document["sender_did"],
        payload=document["payload"],
        received_at=document["received_at"],
    )


@dataclass(frozen=True, slots=True)
class EventLabelSearch:
    """
    A search for events by labels.

    :param everything: label of all events of the owner.
    :param groups: an event has to have at least one label of each.
    :param after: inclusive, as is `before`.
    """

    everything: bytes
    groups: tuple[LabelGroup, ...] = ()
    after: float | None = None
    before: float | None = None
    newest_first: bool = False

    @property
    def is_all(self) -> bool:
        """Whether it finds all events of the owner."""
        return not self.groups and self.after is None and self.before is None

    def starting_at(self, time: float) -> EventLabelSearch:
        """Return the search from this time on, in its own order."""
        return replace(self, before=time) if self.newest_first else replace(self, after=time)

    def build_listing(self, table: PartyCollection, *, planned: bool = False) -> DocumentListing:
        """:param planned: whether to look up the first group; else the server chooses one."""
        first, *others = self.groups or ((self.everything,),)
        conditions: list[Document] = [{"labels": _match_any(first)}]
        if planned:
            conditions += [{"$nor": [{"labels": {"$nin": list(group)}}]} for group in others]
        else:
            conditions += [{"labels": _match_any(group)} for group in others]
        bounds = {"$gte": self.after, "$lte": self.before}
        given = {operator: float(bound) for operator, bound in bounds.items() if bound is not None}
        if given:
            conditions.append({"at": given})
        order = -1 if self.newest_first else 1
        return DocumentListing(
            collection=table.name,
            filter={"$and": conditions},
            sort={"at": order, "seq": order},
            hint="labelled",
            projection={"tags": 1, "at": 1, "size": 1},
        )


def make_label_group(owner: bytes, kind: EventLabelKind, *texts: str, unprocessed: bool = False) -> LabelGroup:
    return tuple([make_event_label(owner, kind, text, unprocessed=unprocessed) for text in dict.fromkeys(texts)])


def _match_any(group: LabelGroup) -> bytes | Document:
    return group[0] if len(group) == 1 else {"$in": list(group)}


@dataclass(frozen=True, slots=True)
class EventPositionCache:
    """Positions in lists that a process has scanned, and the scans in progress, by owner."""

    step: int = EVENTS_PER_STEP
    cursors: PageCursorCache = field(default_factory=PageCursorCache)
    scans: Counter[bytes] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class EventListReader:
    """
    Reads the lists of one owner in one state.

    A position is a time and a number: after it are the events from this time on, except that many.

    :param owner: its key.
    :param held: how many events there are in all.
    :param edition: identifies the state.
    """

    reader: PartyReader
    table: PartyCollection
    position_cache: EventPositionCache
    owner: bytes
    held: int
    edition: int

    async def read(self, search: EventLabelSearch, page: PageRequest) -> tuple[list[Document], int]:
        """Return a page of a list, and the length of the list."""
        if len(search.groups) > 1:  # the rarest first
            lone = [replace(search, groups=(group,)) for group in search.groups]
            numbers = [(await self._count(one, self._get_cursors(one)), one.groups[0]) for one in lone]
            search = replace(search, groups=tuple([group for _, group in sorted(numbers)]))
        cursors = self._get_cursors(search)
        total = await self._count(search, cursors)
        offset = max(page.offset, 0)
        if not page.limit or offset >= total:
            return [], total
        known, position = cursors.before(offset)
        if offset - known > self.position_cache.step and len(search.groups) < 2:
            await self._limit_scans(lambda: self._scan(search, cursors, offset - self.position_cache.step))
            known, position = cursors.before(offset)
        skipped = offset - known
        listing = self._build_listing_from(search, position)
        found = await self.reader.query(
            listing.slice(_get_skip_count(position) + skipped, min(page.limit, total - offset))
        )
        end = _find_end_position(found, position, skipped)
        if end is not None:
            cursors.add(offset + len(found), end)
        return found, total

    async def _count(self, search: EventLabelSearch, cursors: PageCursors) -> int:
        if cursors.total is None:
            if search.is_all:
                cursors.total = self.held
            elif len(search.groups) < 2:
                cursors.total = await self._limit_scans(lambda: self._scan(search, cursors))
            else:
                cursors.total = await self._limit_scans(lambda: self._scan_intersection(search, cursors))
        return cursors.total

    async def _scan(self, search: EventLabelSearch, cursors: PageCursors, until: int = _MAX_POSITION) -> int:
        """Scan from the last known position to the end, or to a number of events; return the number before it."""
        known, position = cursors.before(until)
        while known < until:
            further = await self._step(search, position)
            if further is None:
                return known + await self.reader.count(
                    self._build_listing_from(search, position), _get_skip_count(position)
                )
            known, position = known + self.position_cache.step, further
            cursors.add(known, position)
        return known

    async def _scan_intersection(self, search: EventLabelSearch, cursors: PageCursors) -> int:
        """Count the events of all groups, step by step along the list of the first group."""
        leading = replace(search, groups=search.groups[:1])
        number, position = 0, None
        while (further := await self._step(leading, position)) is not None:
            before = {"at": {"$gt" if search.newest_first else "$lt": further[0]}}
            listing = self._build_listing_from(search, position)
            within = {"$and": [*listing.filter["$and"], before]}
            number += await self.reader.count(replace(listing, filter=within))
            cursors.add(number, (further[0], 0))
            position = further
        return number + await self.reader.count(self._build_listing_from(search, position))

    async def _step(self, search: EventLabelSearch, position: EventPosition | None) -> EventPosition | None:
        """Find the position one step further; None if the end comes first."""
        listing = replace(self._build_listing_from(search, position), projection=_POSITION_PROJECTION)
        found = await self.reader.query(listing.slice(_get_skip_count(position) + self.position_cache.step - 1, 1))
        if not found:
            return None
        at, seq = found[0]["at"], found[0]["seq"]
        same = {"at": at, "seq": {"$gte" if search.newest_first else "$lte": seq}}
        return at, await self.reader.count(replace(listing, filter={"$and": [*listing.filter["$and"], same]}))

    def _build_listing_from(self, search: EventLabelSearch, position: EventPosition | None) -> DocumentListing:
        """Build the list from the time of a position on, with the events that its number excepts."""
        return (search if position is None else search.starting_at(position[0])).build_listing(
            self.table, planned=True
        )

    def _get_cursors(self, search: EventLabelSearch) -> PageCursors:
        if sum(map(len, search.groups)) > _MAX_REMEMBERED_LABELS:
            return PageCursors(self.edition)
        return self.position_cache.cursors.of((self.owner, self.table.name, search), self.edition)

    async def _limit_scans(self, scan: Callable[[], Awaitable[T]]) -> T:
        """:raise RateLimitExceeded: too many scans are in progress for this owner."""
        scans = self.position_cache.scans
        if scans[self.owner] >= _MAX_SCANS_PER_OWNER:
            raise RateLimitExceeded(retry_after=1)
        scans[self.owner] += 1
        try:
            return await scan()
        finally:
            scans[self.owner] -= 1
            if not scans[self.owner]:
                del scans[self.owner]


def _get_skip_count(position: EventPosition | None) -> int:
    return 0 if position is None else position[1]


def _find_end_position(found: list[Document], position: EventPosition | None, skipped: int) -> EventPosition | None:
    """
    Find the position after a page, if the page suffices to tell.

    :param skipped: events between the position and the page.
    """
    if not found:
        return None
    last = found[-1]["at"]
    same = sum([one["at"] == last for one in found])
    if same < len(found) or (position is None and not skipped):
        return last, same
    if position is not None and position[0] == last:
        return last, position[1] + skipped + same
    return None


async def _read_event_page(
    reader: PartyReader,
    position_cache: EventPositionCache,
    table: PartyCollection,
    party: PartyRecord,
    search: EventLabelSearch,
    page: PageRequest,
) -> tuple[list[Document], int]:
    """
    Return the events of a page with their payloads, and how many match in all.

    :raise PayloadTooLarge: the payloads exceed the limit of a page.
    """
    held: int = getattr(party, table.counter)
    if held <= position_cache.step:
        found, total = await reader.read_page(search.build_listing(table), page, held if search.is_all else None)
    else:
        edition = 0 if party.edition is None else int.from_bytes(party.edition.binary)
        reader = replace(reader, has_own_deadlines=True)
        events = EventListReader(reader, table, position_cache, party.key, held, edition)
        found, total = await events.read(search, page)
    check_page_size(found)
    if not found:
        return [], total
    ids = [one["_id"] for one in found]
    payloads = {
        one["_id"]: one for one in await reader.query(build_find(table.payloads, {"_id": {"$in": ids}}, hint="_id_"))
    }
    # Events that were deleted in between have no payload.
    return [one | payloads[one["_id"]] for one in found if one["_id"] in payloads], total


@dataclass(frozen=True, slots=True)
class MongoSaveEventsCommand(MongoStoreCommand[None]):
    """Stores events for their owner."""

    did: str
    events: tuple[StoredEvent, ...]
    caps: DecentrlQuotas

    @property
    def creates(self) -> tuple[PartyCollection, Sequence[str]]:
        return STORED_EVENTS, [event.id for event in self.events]

    @property
    def size(self) -> int:
        return sum([sum_utf8_sizes(event.payload, *event.tags) for event in self.events])

    async def decide(self, context: CommandContext) -> CommandOutcome[None]:
        """:raise QuotaExceeded: they exceed a quota."""
        party = context.party
        documents = [
            build_stored_event(event, party.key, processed=event.sender_did == self.did) for event in self.events
        ]
        size = sum([document["size"] + document["tags_size"] for document in documents])
        if not party.has_room(self.caps, len(documents), size):
            raise QuotaExceeded()
        payloads = build_inserts(STORED_EVENTS.payloads, [build_stored_payload(event) for event in self.events])
        return CommandOutcome([*build_party_changes(STORED_EVENTS, party, come=documents), *payloads], None)


def build_stored_event(event: StoredEvent, key: bytes, *, processed: bool) -> Document:
    """
    Build the document of an event, without its payload.

    :param key: of its owner.
    """
    return {
        "_id": event.id,
        "party": key,
        "labels": [
            *_build_labels(event, key),
            *([] if processed else _build_labels(event, key, unprocessed=True)),
        ],
        "at": float(event.timestamp),
        "tags": list(event.tags),
        "tags_size": sum_utf8_sizes(*event.tags),
        "size": sum_utf8_sizes(event.payload),
        "seq": Timestamp(0, 0),
    }


def build_stored_payload(event: StoredEvent) -> Document:
    """Build the document of the fields that are long or never searched."""
    return {
        "_id": event.id,
        "sender_did": event.sender_did,
        "recipient_did": event.recipient_did,
        "contract_id": event.contract_id,
        "payload": event.payload,
    }


def _build_labels(event: StoredEvent, key: bytes, *, unprocessed: bool = False) -> list[bytes]:
    people = [event.sender_did, event.recipient_did]
    return [
        make_event_label(key, EventLabelKind.ALL, unprocessed=unprocessed),
        *[make_event_label(key, EventLabelKind.PARTICIPANT, did, unprocessed=unprocessed) for did in people],
        *make_label_group(key, EventLabelKind.TAG, *event.tags, unprocessed=unprocessed),
    ]


@dataclass(frozen=True, slots=True)
class MongoUpdateTagsCommand(MongoStoreCommand[None]):
    """Replaces tags of stored events, which are processed then."""

    did: str
    tags: dict[str, tuple[str, ...]]
    caps: DecentrlQuotas

    @property
    def size(self) -> int:
        return sum([sum_utf8_sizes(*tags) for tags in self.tags.values()])

    def build_queries(self) -> list[MongoCommand]:
        projection = {"labels": {"$slice": _PERMANENT_LABELS}}
        return [build_party_documents_query(STORED_EVENTS, self.did, self.tags, projection)]

    async def decide(self, context: CommandContext) -> CommandOutcome[None]:
        """:raise QuotaExceeded: they exceed a quota."""
        (found,) = context.found
        party = context.party
        growth = sum([sum_utf8_sizes(*self.tags[one["_id"]]) - one["tags_size"] for one in found])
        if not party.has_room(self.caps, 0, growth):
            raise QuotaExceeded()
        if not found:
            return CommandOutcome((), None)
        updates = [{"q": {"_id": one["_id"]}, "u": {"$set": self._build_change(one, party.key)}} for one in found]
        return CommandOutcome(
            [*build_party_update(party, party.resized(growth)), *build_updates(STORED_EVENTS.name, updates)], None
        )

    def _build_change(self, document: Document, key: bytes) -> Document:
        tags = self.tags[document["_id"]]
        return {
            "labels": [*document["labels"], *make_label_group(key, EventLabelKind.TAG, *tags)],
            "tags": list(tags),
            "tags_size": sum_utf8_sizes(*tags),
        }


async def find_stored_events(
    reader: PartyReader, position_cache: EventPositionCache, owner: str, wanted: EventFilter, page: PageRequest
) -> ResultPage[StoredEvent]:
    """:raise PayloadTooLarge: the payloads exceed the limit of a page."""
    party = await reader.read_party(owner)
    if not party.stored:
        return EMPTY_PAGE
    key, unprocessed = party.key, wanted.unprocessed_only
    groups = []
    if wanted.tags:
        groups.append(make_label_group(key, EventLabelKind.TAG, *wanted.tags, unprocessed=unprocessed))
    if wanted.participant is not None:
        groups.append(make_label_group(key, EventLabelKind.PARTICIPANT, wanted.participant, unprocessed=unprocessed))
    if unprocessed and not groups:
        groups.append(make_label_group(key, EventLabelKind.ALL, "", unprocessed=True))
    search = EventLabelSearch(make_event_label(key, EventLabelKind.ALL), tuple(groups), wanted.after, wanted.before)
    found, total = await _read_event_page(reader, position_cache, STORED_EVENTS, party, search, page)
    items = [
        StoredEvent(
            id=one["_id"],
            sender_did=one["sender_did"],
            recipient_did=one["recipient_did"],
            payload=one["payload"],
            tags=tuple(one["tags"]),
            timestamp=one["at"],
            contract_id=one["contract_id"],
        )
        for one in found
    ]
    return ResultPage(tuple(items), total)


@dataclass(frozen=True, slots=True)
class MongoPublishCommand(MongoStoreCommand[None]):
    """Stores a public event of a publisher."""

    did: str
    event: PublicEvent
    caps: DecentrlQuotas

    @property
    def creates(self) -> tuple[PartyCollection, Sequence[str]]:
        return PUBLIC_EVENTS, [self.event.id]

    @property
    def size(self) -> int:
        return sum_utf8_sizes(self.event.event, *self.event.tags)

    async def decide(self, context: CommandContext) -> CommandOutcome[None]:
        """:raise QuotaExceeded: it exceeds a quota."""
        party = context.party
        document = build_public_event(self.event, party.key)
        if not party.has_room(self.caps, 1, document["size"] + document["tags_size"]):
            raise QuotaExceeded()
        payload = build_inserts(PUBLIC_EVENTS.payloads, [build_public_payload(self.event)])
        return CommandOutcome([*build_party_changes(PUBLIC_EVENTS, party, come=[document]), *payload], None)


def build_public_event(event: PublicEvent, key: bytes) -> Document:
    """
    Build the document of an event, without its payload.

    :param key: of its publisher.
    """
    channel = [] if event.channel_id is None else [make_event_label(key, EventLabelKind.CHANNEL, event.channel_id)]
    return {
        "_id": event.id,
        "party": key,
        "labels": [
            make_event_label(key, EventLabelKind.ALL),
            *channel,
            *make_label_group(key, EventLabelKind.TAG, *event.tags),
        ],
        "at": float(event.timestamp),
        "tags": list(event.tags),
        "tags_size": sum_utf8_sizes(*event.tags),
        "size": sum_utf8_sizes(event.event),
        "seq": Timestamp(0, 0),
    }


def build_public_payload(event: PublicEvent) -> Document:
    """Build the document of the fields that are long or never searched."""
    return {
        "_id": event.id,
        "event": event.event,
        "signature": event.event_signature,
        "channel": event.channel_id,
    }


@dataclass(frozen=True, slots=True)
class MongoUnpublishCommand(MongoStoreCommand[None]):
    """Deletes a public event of a publisher."""

    did: str
    event_id: str

    def build_queries(self) -> list[MongoCommand]:
        return [build_party_documents_query(PUBLIC_EVENTS, self.did, [self.event_id])]

    async def decide(self, context: CommandContext) -> CommandOutcome[None]:
        """:raise PublicEventNotFound: the publisher has none with this id."""
        (found,) = context.found
        if not found:
            raise PublicEventNotFound()
        return CommandOutcome(build_party_changes(PUBLIC_EVENTS, context.party, gone=found), None)


async def find_public_events(
    reader: PartyReader,
    position_cache: EventPositionCache,
    publisher: str,
    wanted: PublicEventFilter,
    page: PageRequest,
) -> ResultPage[PublicEvent]:
    """:raise PayloadTooLarge: the payloads exceed the limit of a page."""
    party = await reader.read_party(publisher)
    if not party.published:
        return EMPTY_PAGE
    groups = []
    if wanted.tags:
        groups.append(make_label_group(party.key, EventLabelKind.TAG, *wanted.tags))
    if wanted.channel_id is not None:
        groups.append(make_label_group(party.key, EventLabelKind.CHANNEL, wanted.channel_id))
    everything = make_event_label(party.key, EventLabelKind.ALL)
    search = EventLabelSearch(everything, tuple(groups), wanted.after, wanted.before, newest_first=True)
    found, total = await _read_event_page(reader, position_cache, PUBLIC_EVENTS, party, search, page)
    items = [
        PublicEvent(
            id=one["_id"],
            event=one["event"],
            tags=tuple(one["tags"]),
            timestamp=one["at"],
            event_signature=one["signature"],
            channel_id=one["channel"],
        )
        for one in found
    ]
    return ResultPage(tuple(items), total)
