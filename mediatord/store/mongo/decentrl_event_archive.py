"""
Stored events of an owner and public events of a publisher.

They have labels, one for each thing that they are found by, all in one index with time and order of arrival, so the
events of a label are a range of that index. A search for several things looks up one of them and filters by the
others. Their long fields are in a collection of their own.

The server skips and counts documents one by one. So a long list is scanned once, in steps that are short, and the
positions of its steps are cached until the list changes; every page is then at most a step away from one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import blake2b
from typing import TypeVar

from bson import Timestamp

from mediatord.errors import PublicEventNotFound, QuotaExceeded, RateLimitExceeded
from mediatord.runtime.request_time import REQUEST_TIME_LIMIT
from mediatord.store.caches import EventPosition, PageCursorCache, PageCursors
from mediatord.store.interfaces.decentrl import (
    CommandGuard,
    DecentrlQuotas,
    EventFilter,
    PageRequest,
    PublicEvent,
    PublicEventFilter,
    ResultPage,
    StoredEvent,
    get_utf8_size,
)
from mediatord.store.mongo.decentrl_commands import CommandContext, DecentrlCommandRunner, Decision
from mediatord.store.mongo.decentrl_parties import (
    EMPTY_PAGE,
    PARTY_KEY_BYTES,
    DocumentListing,
    PartyRecord,
    build_party_changes,
    build_party_documents_query,
    build_party_update,
    check_page_size,
    read_party,
)
from mediatord.store.mongo.driver.collection import Collection, Document
from mediatord.store.mongo.driver.operation import Operation, operation
from mediatord.store.mongo.schema import (
    PUBLIC_EVENTS,
    PUBLIC_PAYLOADS,
    STORED_EVENTS,
    STORED_PAYLOADS,
    PartyCollection,
)

T = TypeVar("T")
E = TypeVar("E", bound=StoredEvent | PublicEvent)
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
# Fields of the documents of payloads.
_PAYLOAD_FIELDS: Mapping[type, tuple[str, ...]] = {
    StoredEvent: ("sender_did", "recipient_did", "contract_id", "payload"),
    PublicEvent: ("event", "event_signature", "channel_id"),
}


class EventLabelKind(Enum):
    """What an event is found by."""

    ALL = b"all"
    TAG = b"tag"
    PARTICIPANT = b"participant"
    CHANNEL = b"channel"


def make_event_label(owner: bytes, kind: EventLabelKind, text: str = "", *, unprocessed: bool = False) -> bytes:
    """
    Digest of something that events of an owner are found by.

    :param owner: its key.
    :param unprocessed: whether only unprocessed events have the label.
    """
    salt = b"unprocessed" if unprocessed else b""
    return blake2b(text.encode(), digest_size=PARTY_KEY_BYTES, key=owner, person=kind.value, salt=salt).digest()


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

    def build_listing(self, table: Collection, *, planned: bool = False) -> DocumentListing:
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
        sort, projection = {"at": order, "seq": order}, {"tags": 1, "at": 1, "size": 1}
        return DocumentListing(table, {"$and": conditions}, sort, "labelled", projection)


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
    Reads the lists of one owner in one state. Each of its queries has the time limit of an operation.

    A position is a time and a number: after it are the events from this time on, except that many.

    :param owner: its key.
    :param held: how many events there are in all.
    :param edition: identifies the state.
    """

    run: Operation
    table: Collection
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
        page_query = listing.slice(_get_skip_count(position) + skipped, min(page.limit, total - offset))
        found = await self._with_own_deadline().query(page_query)
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
                rest = self._build_listing_from(search, position)
                return known + await rest.count(self._with_own_deadline(), _get_skip_count(position))
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
            within = replace(listing, filter={"$and": [*listing.filter["$and"], before]})
            number += await within.count(self._with_own_deadline())
            cursors.add(number, (further[0], 0))
            position = further
        return number + await self._build_listing_from(search, position).count(self._with_own_deadline())

    async def _step(self, search: EventLabelSearch, position: EventPosition | None) -> EventPosition | None:
        """Find the position one step further; None if the end comes first."""
        listing = replace(self._build_listing_from(search, position), projection=_POSITION_PROJECTION)
        last = listing.slice(_get_skip_count(position) + self.position_cache.step - 1, 1)
        found = await self._with_own_deadline().query(last)
        if not found:
            return None
        at, seq = found[0]["at"], found[0]["seq"]
        same = {"at": at, "seq": {"$gte" if search.newest_first else "$lte": seq}}
        simultaneous = replace(listing, filter={"$and": [*listing.filter["$and"], same]})
        return at, await simultaneous.count(self._with_own_deadline())

    def _build_listing_from(self, search: EventLabelSearch, position: EventPosition | None) -> DocumentListing:
        """Build the list from the time of a position on, with the events that its number excepts."""
        return (search if position is None else search.starting_at(position[0])).build_listing(
            self.table, planned=True
        )

    def _with_own_deadline(self) -> Operation:
        return self.run.until(self.run.clock.seconds() + REQUEST_TIME_LIMIT)

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


class MongoEventArchive(DecentrlCommandRunner):
    """Stored and public events in MongoDB; see `IDecentrlStore`."""

    _caps: DecentrlQuotas
    _position_cache: EventPositionCache

    @operation
    async def save_events(self, guard: CommandGuard, owner: str, events: Sequence[StoredEvent]) -> None:
        def build(event: StoredEvent, key: bytes) -> Document:
            return build_stored_event(event, key, event.sender_did == owner)

        await self._insert("save_events", guard, owner, STORED_EVENTS, tuple(events), build)

    @operation
    async def events(self, owner: str, wanted: EventFilter, part: PageRequest) -> ResultPage[StoredEvent]:
        unprocessed = wanted.unprocessed_only

        def build_search(key: bytes) -> EventLabelSearch:
            groups = []
            if wanted.tags:
                groups.append(make_label_group(key, EventLabelKind.TAG, *wanted.tags, unprocessed=unprocessed))
            if (did := wanted.participant) is not None:
                groups.append(make_label_group(key, EventLabelKind.PARTICIPANT, did, unprocessed=unprocessed))
            if unprocessed and not groups:
                groups.append(make_label_group(key, EventLabelKind.ALL, "", unprocessed=True))
            everything = make_event_label(key, EventLabelKind.ALL)
            return EventLabelSearch(everything, tuple(groups), wanted.after, wanted.before)

        return await self._find("events", owner, STORED_EVENTS, build_search, part, StoredEvent)

    @operation
    async def update_tags(self, guard: CommandGuard, owner: str, tags: Sequence[tuple[str, tuple[str, ...]]]) -> None:
        wanted = dict(tags)

        async def update(context: CommandContext) -> Decision[None]:
            """Replace the tags of the events, which are processed then."""
            (found,), party = context.found, context.party
            growth = sum([get_utf8_size(*wanted[one["_id"]]) - one["tags_size"] for one in found])
            if not party.has_room(self._caps, 0, growth):
                raise QuotaExceeded()
            if not found:
                return (), None
            updates = []
            for one in found:
                tags = wanted[one["_id"]]
                labels = [*one["labels"], *make_label_group(party.key, EventLabelKind.TAG, *tags)]
                change = {"labels": labels, "tags": list(tags), "tags_size": get_utf8_size(*tags)}
                updates.append({"q": {"_id": one["_id"]}, "u": {"$set": change}})
            return [*build_party_update(party.resized(growth)), *STORED_EVENTS.update_each(updates)], None

        size = sum([get_utf8_size(*tags) for tags in wanted.values()])
        projection = {"labels": {"$slice": _PERMANENT_LABELS}}
        query = build_party_documents_query(STORED_EVENTS, owner, wanted, projection)
        await self._run("update_tags", guard, owner, update, query, size=size)

    @operation
    async def publish(self, guard: CommandGuard, publisher: str, event: PublicEvent) -> None:
        await self._insert("publish", guard, publisher, PUBLIC_EVENTS, (event,), build_public_event)

    @operation
    async def unpublish(self, guard: CommandGuard, publisher: str, event_id: str) -> None:
        async def delete(context: CommandContext) -> Decision[None]:
            (found,) = context.found
            if not found:
                raise PublicEventNotFound()
            return build_party_changes(PUBLIC_EVENTS, context.party, gone=found), None

        query = build_party_documents_query(PUBLIC_EVENTS, publisher, [event_id])
        await self._run("unpublish", guard, publisher, delete, query)

    @operation
    async def public_events(
        self, publisher: str, wanted: PublicEventFilter, part: PageRequest
    ) -> ResultPage[PublicEvent]:
        def build_search(key: bytes) -> EventLabelSearch:
            groups = []
            if wanted.tags:
                groups.append(make_label_group(key, EventLabelKind.TAG, *wanted.tags))
            if wanted.channel_id is not None:
                groups.append(make_label_group(key, EventLabelKind.CHANNEL, wanted.channel_id))
            everything = make_event_label(key, EventLabelKind.ALL)
            return EventLabelSearch(everything, tuple(groups), wanted.after, wanted.before, newest_first=True)

        return await self._find("public_events", publisher, PUBLIC_EVENTS, build_search, part, PublicEvent)

    async def _insert(
        self,
        name: str,
        guard: CommandGuard,
        owner: str,
        table: PartyCollection,
        events: Sequence[E],
        build: Callable[[E, bytes], Document],
    ) -> None:
        """
        Store events.

        :param build: builds the document of an event for the key of the owner.
        """

        async def insert(context: CommandContext) -> Decision[None]:
            documents = [build(event, context.party.key) for event in events]
            size = sum([document["size"] + document["tags_size"] for document in documents])
            if not context.party.has_room(self._caps, len(documents), size):
                raise QuotaExceeded()
            payloads = _get_payloads(table).insert(map(build_event_payload, events))
            return [*build_party_changes(table, context.party, come=documents), *payloads], None

        made, size = (table, [event.id for event in events]), sum([_get_size(one) for one in events])
        await self._run(name, guard, owner, insert, creates=made, size=size)

    async def _find(
        self,
        name: str,
        owner: str,
        table: PartyCollection,
        build_search: Callable[[bytes], EventLabelSearch],
        page: PageRequest,
        kind: type[E],
    ) -> ResultPage[E]:
        """
        Find events.

        :param build_search: for the key of the owner.
        """
        with self._client.operate(name) as run:
            party = await read_party(run, owner)
            if not getattr(party, table.counter):
                return EMPTY_PAGE
            found, total = await self._read_page(run, table, party, build_search(party.key), page)
            return ResultPage(tuple([_parse_event(kind, one) for one in found]), total)

    async def _read_page(
        self, run: Operation, table: PartyCollection, party: PartyRecord, search: EventLabelSearch, page: PageRequest
    ) -> tuple[list[Document], int]:
        """
        Return the events of a page with their payloads, and how many match in all.

        :raise PayloadTooLarge: the payloads exceed the limit of a page.
        """
        held: int = getattr(party, table.counter)
        if held <= self._position_cache.step:
            total = held if search.is_all else None
            found, total = await search.build_listing(table).read_page(run, page, total)
        else:
            edition = 0 if party.edition is None else int.from_bytes(party.edition.binary)
            events = EventListReader(run, table, self._position_cache, party.key, held, edition)
            found, total = await events.read(search, page)
            run = run.until(run.clock.seconds() + REQUEST_TIME_LIMIT)
        check_page_size(found)
        if not found:
            return [], total
        query = _get_payloads(table).find({"_id": {"$in": [one["_id"] for one in found]}}, hint="_id_")
        payloads = {one["_id"]: one for one in await run.query(query)}
        # Events that were deleted in between have no payload.
        return [one | payloads[one["_id"]] for one in found if one["_id"] in payloads], total


def _get_payloads(table: PartyCollection) -> Collection:
    return STORED_PAYLOADS if table is STORED_EVENTS else PUBLIC_PAYLOADS


def build_stored_event(event: StoredEvent, key: bytes, processed: bool) -> Document:
    """
    Build the document of an event, without its payload.

    :param key: of its owner.
    """
    unprocessed = [] if processed else _build_labels(event, key, unprocessed=True)
    return _build_event(event, key, [*_build_labels(event, key), *unprocessed])


def build_public_event(event: PublicEvent, key: bytes) -> Document:
    """
    Build the document of an event, without its payload.

    :param key: of its publisher.
    """
    channel = [] if event.channel_id is None else [make_event_label(key, EventLabelKind.CHANNEL, event.channel_id)]
    tags = make_label_group(key, EventLabelKind.TAG, *event.tags)
    return _build_event(event, key, [make_event_label(key, EventLabelKind.ALL), *channel, *tags])


def _build_event(event: StoredEvent | PublicEvent, key: bytes, labels: list[bytes]) -> Document:
    tags_size = get_utf8_size(*event.tags)
    return {
        "_id": event.id,
        "party": key,
        "labels": labels,
        "at": float(event.timestamp),
        "tags": list(event.tags),
        "tags_size": tags_size,
        "size": _get_size(event) - tags_size,
        "seq": Timestamp(0, 0),
    }


def build_event_payload(event: StoredEvent | PublicEvent) -> Document:
    """Build the document of the fields that are long or never searched."""
    return {"_id": event.id, **{name: getattr(event, name) for name in _PAYLOAD_FIELDS[type(event)]}}


def _parse_event(kind: type[E], document: Document) -> E:
    """:param document: that of an event, with its payload."""
    payload = {name: document[name] for name in _PAYLOAD_FIELDS[kind]}
    return kind(id=document["_id"], tags=tuple(document["tags"]), timestamp=document["at"], **payload)


def _get_size(event: StoredEvent | PublicEvent) -> int:
    text = event.payload if isinstance(event, StoredEvent) else event.event
    return get_utf8_size(text, *event.tags)


def _build_labels(event: StoredEvent, key: bytes, *, unprocessed: bool = False) -> list[bytes]:
    people = [event.sender_did, event.recipient_did]
    return [
        make_event_label(key, EventLabelKind.ALL, unprocessed=unprocessed),
        *[make_event_label(key, EventLabelKind.PARTICIPANT, did, unprocessed=unprocessed) for did in people],
        *make_label_group(key, EventLabelKind.TAG, *event.tags, unprocessed=unprocessed),
    ]
