"""
Finding stored and public events by their labels.

An event has a label for each thing that it is found by, all of them in one index with time and order of arrival; so
what one label is asked for is a range of that index. Of several things at once one is looked up, and the events are
looked at for the others.

Long lists of events.

The server skips and counts events one by one. So a long list is walked once, in steps that do not take long, and
where they end is remembered as long as the list does not change: whatever is asked for then is a step away.

Slices of stored or public events, with what is long in them.

Events that identities keep for themselves, in MongoDB.

Public events in MongoDB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from bson import Timestamp

from mediatord.errors import PublicEventNotFound, QuotaExceeded, RateLimitExceeded
from mediatord.store.caches import EventPosition, PageCursorCache, PageCursors
from mediatord.store.interfaces.decentrl import (
    DecentrlQuotas,
    EventFilter,
    PageRequest,
    PublicEvent,
    PublicEventFilter,
    ResultPage,
    StoredEvent,
)
from mediatord.store.mongo.decentrl_commands import CommandContext, CommandOutcome
from mediatord.store.mongo.decentrl_parties import (
    DocumentListing,
    EventLabelKind,
    PartyReader,
    PartyRecord,
    build_empty_result,
    build_party_changes,
    build_party_documents_query,
    build_party_update,
    check_slice_size,
    make_event_label,
    sum_utf8_sizes,
)
from mediatord.store.mongo.driver.commands import Document, MongoCommand, build_find, build_inserts, build_updates
from mediatord.store.mongo.schema import EVENT_LABEL_INDEX, PUBLIC_EVENTS, STORED_EVENTS, PartyCollection

LabelGroup = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class EventLabelSearch:
    """
    What is looked for.

    :param everything: the label of all that is searched.
    :param groups: of each of these an event has to have at least one label.
    :param after: inclusive, like `before`.
    """

    everything: bytes
    groups: tuple[LabelGroup, ...] = ()
    after: float | None = None
    before: float | None = None
    newest_first: bool = False

    @property
    def is_all(self) -> bool:
        """Whether nothing is left out."""
        return not self.groups and self.after is None and self.before is None

    def one_by_one(self) -> list[EventLabelSearch]:
        """A search for each of the groups alone."""
        return [replace(self, groups=(group,)) for group in self.groups]

    def beginning_at(self, time: float) -> EventLabelSearch:
        """The same from this time on, in the order of the search."""
        return replace(self, before=time) if self.newest_first else replace(self, after=time)

    def listing(self, table: PartyCollection, *, planned: bool = False) -> DocumentListing:
        """
        What it finds.

        :param planned: the first group is looked up; else that is the server's choice.
        """
        order = -1 if self.newest_first else 1
        return DocumentListing(
            collection=table.name,
            filter={"$and": [*self._labels(planned), *self._bounds()]},
            sort={"at": order, "seq": order},
            hint=EVENT_LABEL_INDEX,
            projection={"tags": 1, "at": 1, "size": 1},
        )

    def _labels(self, planned: bool) -> list[Document]:
        first, *others = self.groups or ((self.everything,),)
        if planned:
            return [
                {"labels": _match_any(first)},
                *[{"$nor": [{"labels": {"$nin": list(group)}}]} for group in others],
            ]
        return [{"labels": _match_any(group)} for group in (first, *others)]

    def _bounds(self) -> list[Document]:
        bounds = {"$gte": self.after, "$lte": self.before}
        given = {operator: float(bound) for operator, bound in bounds.items() if bound is not None}
        return [{"at": given}] if given else []


def make_label_group(owner: bytes, kind: EventLabelKind, *texts: str, unprocessed: bool = False) -> LabelGroup:
    """Labels, each once."""
    return tuple([make_event_label(owner, kind, text, unprocessed=unprocessed) for text in dict.fromkeys(texts)])


def _match_any(group: LabelGroup) -> bytes | Document:
    return group[0] if len(group) == 1 else {"$in": list(group)}


T = TypeVar("T")

# Events that are skipped or counted at a time.
EVENTS_PER_STEP = 8_192
# Walks along lists of one owner that may be waited for.
_MAX_SCANS_PER_OWNER = 4
# Lists of more labels than this are not worth remembering.
_MAX_REMEMBERED_LABELS = 64
_MAX_POSITION = 1 << 62
_POSITION_PROJECTION = {"_id": 0, "at": 1, "seq": 1}


@dataclass(frozen=True, slots=True)
class EventPositionCache:
    """What a process knows of lists, and how many it walks along, by owner."""

    step: int = EVENTS_PER_STEP
    shelfmarks: PageCursorCache = field(default_factory=PageCursorCache)
    scans: Counter[bytes] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class EventListReader:
    """
    The lists of one owner in one state.

    A place in a list is a time and a number: what comes behind it are the events from this time on, except so many
    of them.

    :param owner: its key.
    :param held: how many events there are in all.
    :param edition: what no other state has.
    """

    reading: PartyReader
    table: PartyCollection
    position_cache: EventPositionCache
    owner: bytes
    held: int
    edition: int

    async def read(self, search: EventLabelSearch, part: PageRequest) -> tuple[list[Document], int]:
        """A slice of a list, and how long that is."""
        search = await self._rarest_first(search)
        marks = self._marks(search)
        total = await self._total(search, marks)
        offset = max(part.offset, 0)
        if not part.limit or offset >= total:
            return [], total
        known, position = await self._seek(search, marks, offset)
        skipped = offset - known
        listing = self._build_listing_from(search, position)
        found = await self.reading.ask(
            listing.slice(_get_skip_count(position) + skipped, min(part.limit, total - offset))
        )
        end = _find_end_position(found, position, skipped)
        if end is not None:
            marks.add(offset + len(found), end)
        return found, total

    async def _rarest_first(self, search: EventLabelSearch) -> EventLabelSearch:
        if len(search.groups) < 2:
            return search
        numbers = [(await self._total(one, self._marks(one)), one.groups[0]) for one in search.one_by_one()]
        return replace(search, groups=tuple([group for _, group in sorted(numbers)]))

    async def _total(self, search: EventLabelSearch, marks: PageCursors) -> int:
        if marks.total is None:
            if search.is_all:
                marks.total = self.held
            elif len(search.groups) < 2:
                marks.total = await self._limit_scans(lambda: self._scan(search, marks))
            else:
                marks.total = await self._limit_scans(lambda: self._scan_intersection(search, marks))
        return marks.total

    async def _seek(
        self, search: EventLabelSearch, marks: PageCursors, offset: int
    ) -> tuple[int, EventPosition | None]:
        """A place at most a step before an offset, and how many events are before it."""
        known, _ = marks.before(offset)
        if offset - known > self.position_cache.step and len(search.groups) < 2:
            await self._limit_scans(lambda: self._scan(search, marks, offset - self.position_cache.step))
        return marks.before(offset)

    async def _scan(self, search: EventLabelSearch, marks: PageCursors, until: int = _MAX_POSITION) -> int:
        """Go on from the last place that is known to the end, or until so many are before it; how many those are."""
        known, position = marks.before(until)
        while known < until:
            further = await self._step(search, position)
            if further is None:
                return known + await self.reading.count(
                    self._build_listing_from(search, position), _get_skip_count(position)
                )
            known, position = known + self.position_cache.step, further
            marks.add(known, position)
        return known

    async def _scan_intersection(self, search: EventLabelSearch, marks: PageCursors) -> int:
        """Count step by step what is found along the list of the first group."""
        leading = replace(search, groups=search.groups[:1])
        number, position = 0, None
        while (further := await self._step(leading, position)) is not None:
            before = {"at": {"$gt" if search.newest_first else "$lt": further[0]}}
            listing = self._build_listing_from(search, position)
            within = {"$and": [*listing.filter["$and"], before]}
            number += await self.reading.count(replace(listing, filter=within))
            marks.add(number, (further[0], 0))
            position = further
        return number + await self.reading.count(self._build_listing_from(search, position))

    async def _step(self, search: EventLabelSearch, position: EventPosition | None) -> EventPosition | None:
        """The place a step further; None if the end comes first."""
        listing = replace(self._build_listing_from(search, position), projection=_POSITION_PROJECTION)
        found = await self.reading.ask(listing.slice(_get_skip_count(position) + self.position_cache.step - 1, 1))
        if not found:
            return None
        at, seq = found[0]["at"], found[0]["seq"]
        same = {"at": at, "seq": {"$gte" if search.newest_first else "$lte": seq}}
        return at, await self.reading.count(replace(listing, filter={"$and": [*listing.filter["$and"], same]}))

    def _build_listing_from(self, search: EventLabelSearch, position: EventPosition | None) -> DocumentListing:
        """Not without those that the number of the place says."""
        return (search if position is None else search.beginning_at(position[0])).listing(self.table, planned=True)

    def _marks(self, search: EventLabelSearch) -> PageCursors:
        if sum(map(len, search.groups)) > _MAX_REMEMBERED_LABELS:
            return PageCursors(self.edition)
        return self.position_cache.shelfmarks.of((self.owner, self.table.name, search), self.edition)

    async def _limit_scans(self, scan: Callable[[], Awaitable[T]]) -> T:
        """:raise RateLimitExceeded: too many are on the way for this owner."""
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
    The place behind what was found, as far as that says.

    :param skipped: events between the place and what was found.
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


async def read_event_slice(
    reading: PartyReader,
    position_cache: EventPositionCache,
    table: PartyCollection,
    party: PartyRecord,
    search: EventLabelSearch,
    part: PageRequest,
) -> tuple[list[Document], int]:
    """
    The events of a slice, and how many match in all.

    :raise PayloadTooLarge: their payloads are more than a slice may have.
    """
    held: int = getattr(party, table.counter)
    if held <= position_cache.step:
        found, total = await reading.page(search.listing(table), part, held if search.is_all else None)
    else:
        edition = 0 if party.edition is None else int.from_bytes(party.edition.binary)
        reading = reading.with_own_deadlines()
        found, total = await EventListReader(reading, table, position_cache, party.key, held, edition).read(
            search, part
        )
    check_slice_size(found)
    if not found:
        return [], total
    ids = [one["_id"] for one in found]
    payloads = await reading.ask(build_find(table.payloads, {"_id": {"$in": ids}}, hint="_id_"))
    by_id = {one["_id"]: one for one in payloads}
    # What was taken back in between is not there.
    return [one | by_id[one["_id"]] for one in found if one["_id"] in by_id], total


# Labels that an event keeps, processed or not, come first: of all, of its sender and of its recipient.
_PERMANENT_LABELS = 3


@dataclass(frozen=True, slots=True)
class MongoSaveEventsCommand:
    """To keep events for their owner."""

    did: str
    events: tuple[StoredEvent, ...]
    caps: DecentrlQuotas

    @property
    def creates(self) -> tuple[PartyCollection, Sequence[str]]:
        return STORED_EVENTS, [event.id for event in self.events]

    @property
    def size(self) -> int:
        return sum([sum_utf8_sizes(event.payload, *event.tags) for event in self.events])

    def build_queries(self) -> list[MongoCommand]:
        return []

    async def decide(self, context: CommandContext) -> CommandOutcome[None]:
        """:raise QuotaExceeded: they would be too much."""
        party = context.party
        documents = [
            build_stored_event(event, party.key, processed=event.sender_did == self.did) for event in self.events
        ]
        size = sum([document["size"] + document["tags_size"] for document in documents])
        if not party.has_room(self.caps, len(documents), size):
            raise QuotaExceeded()
        payloads = [build_stored_payload(event) for event in self.events]
        return CommandOutcome(
            [
                *build_party_changes(STORED_EVENTS, party, come=documents),
                *build_inserts(STORED_EVENTS.payloads, payloads),
            ],
            None,
        )


def build_stored_event(event: StoredEvent, key: bytes, *, processed: bool) -> Document:
    """
    An event without what is long in it, which :func:`payload_of` has.

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
    """What is long in an event, and what nobody looks for."""
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
class MongoUpdateTagsCommand:
    """To give events of an owner new tags."""

    did: str
    tags: dict[str, tuple[str, ...]]
    caps: DecentrlQuotas

    @property
    def creates(self) -> None:
        """Nothing."""

    @property
    def size(self) -> int:
        return sum([sum_utf8_sizes(*tags) for tags in self.tags.values()])

    def build_queries(self) -> list[MongoCommand]:
        return [
            build_party_documents_query(STORED_EVENTS, self.did, self.tags, {"labels": {"$slice": _PERMANENT_LABELS}})
        ]

    async def decide(self, context: CommandContext) -> CommandOutcome[None]:
        """:raise QuotaExceeded: they would be too much."""
        (found,) = context.found
        party = context.party
        growth = sum([sum_utf8_sizes(*self.tags[one["_id"]]) - one["tags_size"] for one in found])
        if not party.has_room(self.caps, 0, growth):
            raise QuotaExceeded()
        if not found:
            return CommandOutcome((), None)
        updates = [{"q": {"_id": one["_id"]}, "u": {"$set": self._changed(one, party.key)}} for one in found]
        return CommandOutcome(
            [*build_party_update(party, party.resized(growth)), *build_updates(STORED_EVENTS.name, updates)], None
        )

    def _changed(self, document: Document, key: bytes) -> Document:
        tags = self.tags[document["_id"]]
        return {
            "labels": [*document["labels"], *make_label_group(key, EventLabelKind.TAG, *tags)],
            "tags": list(tags),
            "tags_size": sum_utf8_sizes(*tags),
        }


async def find_stored_events(
    reading: PartyReader, position_cache: EventPositionCache, owner: str, wanted: EventFilter, part: PageRequest
) -> ResultPage[StoredEvent]:
    """:raise PayloadTooLarge: their payloads are more than a slice may have."""
    party = await reading.party(owner)
    if not party.stored:
        return build_empty_result()
    key, unprocessed = party.key, wanted.unprocessed_only
    groups = []
    if wanted.tags:
        groups.append(make_label_group(key, EventLabelKind.TAG, *wanted.tags, unprocessed=unprocessed))
    if wanted.participant is not None:
        groups.append(make_label_group(key, EventLabelKind.PARTICIPANT, wanted.participant, unprocessed=unprocessed))
    if unprocessed and not groups:
        groups.append(make_label_group(key, EventLabelKind.ALL, "", unprocessed=True))
    search = EventLabelSearch(make_event_label(key, EventLabelKind.ALL), tuple(groups), wanted.after, wanted.before)
    found, total = await read_event_slice(reading, position_cache, STORED_EVENTS, party, search, part)
    return ResultPage(tuple([_parse_stored_event(one) for one in found]), total)


def _parse_stored_event(document: Document) -> StoredEvent:
    return StoredEvent(
        id=document["_id"],
        sender_did=document["sender_did"],
        recipient_did=document["recipient_did"],
        payload=document["payload"],
        tags=tuple(document["tags"]),
        timestamp=document["at"],
        contract_id=document["contract_id"],
    )


@dataclass(frozen=True, slots=True)
class MongoPublishCommand:
    """To keep an event for everybody."""

    did: str
    event: PublicEvent
    caps: DecentrlQuotas

    @property
    def creates(self) -> tuple[PartyCollection, Sequence[str]]:
        return PUBLIC_EVENTS, [self.event.id]

    @property
    def size(self) -> int:
        return sum_utf8_sizes(self.event.event, *self.event.tags)

    def build_queries(self) -> list[MongoCommand]:
        return []

    async def decide(self, context: CommandContext) -> CommandOutcome[None]:
        """:raise QuotaExceeded: it would be one too many."""
        event, party = self.event, context.party
        document = build_public_event(event, party.key)
        if not party.has_room(self.caps, 1, document["size"] + document["tags_size"]):
            raise QuotaExceeded()
        payload = build_public_payload(event)
        return CommandOutcome(
            [
                *build_party_changes(PUBLIC_EVENTS, party, come=[document]),
                *build_inserts(PUBLIC_EVENTS.payloads, [payload]),
            ],
            None,
        )


def build_public_event(event: PublicEvent, key: bytes) -> Document:
    """
    An event without what is long in it, which :func:`payload_of` has.

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
    """What is long in an event, and what nobody looks for."""
    return {
        "_id": event.id,
        "event": event.event,
        "signature": event.event_signature,
        "channel": event.channel_id,
    }


@dataclass(frozen=True, slots=True)
class MongoUnpublishCommand:
    """To take an event back."""

    did: str
    event_id: str

    @property
    def creates(self) -> None:
        """Nothing."""

    @property
    def size(self) -> int:
        return 0

    def build_queries(self) -> list[MongoCommand]:
        return [build_party_documents_query(PUBLIC_EVENTS, self.did, [self.event_id])]

    async def decide(self, context: CommandContext) -> CommandOutcome[None]:
        """:raise PublicEventNotFound: the publisher has none with this id."""
        (found,) = context.found
        if not found:
            raise PublicEventNotFound()
        return CommandOutcome(build_party_changes(PUBLIC_EVENTS, context.party, gone=found), None)


async def find_public_events(
    reading: PartyReader,
    position_cache: EventPositionCache,
    publisher: str,
    wanted: PublicEventFilter,
    part: PageRequest,
) -> ResultPage[PublicEvent]:
    """:raise PayloadTooLarge: they are more than a slice may have."""
    party = await reading.party(publisher)
    if not party.published:
        return build_empty_result()
    groups = []
    if wanted.tags:
        groups.append(make_label_group(party.key, EventLabelKind.TAG, *wanted.tags))
    if wanted.channel_id is not None:
        groups.append(make_label_group(party.key, EventLabelKind.CHANNEL, wanted.channel_id))
    everything = make_event_label(party.key, EventLabelKind.ALL)
    search = EventLabelSearch(everything, tuple(groups), wanted.after, wanted.before, newest_first=True)
    found, total = await read_event_slice(reading, position_cache, PUBLIC_EVENTS, party, search, part)
    return ResultPage(tuple([_parse_public_event(one) for one in found]), total)


def _parse_public_event(document: Document) -> PublicEvent:
    return PublicEvent(
        id=document["_id"],
        event=document["event"],
        tags=tuple(document["tags"]),
        timestamp=document["at"],
        event_signature=document["signature"],
        channel_id=document["channel"],
    )
