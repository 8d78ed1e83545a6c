"""
The Decentrl half of the memory store: nonces, contracts, contract requests, and pending, stored and public events.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, count
from math import inf
from typing import Generic, Protocol, TypeVar

from twisted.internet.defer import Deferred
from zope.interface import implementer

from mediatord.errors import (
    ContractNotFound,
    DuplicateNonce,
    MediatorError,
    PayloadTooLarge,
    PublicEventNotFound,
    QuotaExceeded,
    RecipientNotRegistered,
    ReplayCacheFull,
    StoreUnavailable,
    UnauthorizedCommand,
)
from mediatord.store.interfaces.decentrl import (
    MAX_PAGE_BYTES,
    CommandGuard,
    Contract,
    ContractFilter,
    ContractRequest,
    DecentrlQuotas,
    EventFilter,
    IDecentrlStore,
    PageRequest,
    PendingEvent,
    PublicEvent,
    PublicEventFilter,
    ResultPage,
    StoredEvent,
)
from mediatord.store.interfaces.messages import (
    AgeBucket,
    ArrivalWindow,
    MessageArrival,
    MessageLedger,
    QueueTotals,
    RemovedMessage,
)
from mediatord.store.interfaces.store import NONCE_GRACE_SECONDS
from mediatord.store.memory.messages import LOOKED_AT, DeadlineHeap, QueueRanking, sort_arrivals
from mediatord.store.message_operations import LedgerEntry, complete_buckets, group_by_age
from mediatord.store.quotas import get_utf8_size


class MemoryNonces:
    """A bounded cache of nonces."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._claims: dict[bytes, float] = {}
        self._deadlines: DeadlineHeap[bytes] = DeadlineHeap()

    def holds(self, key: bytes, now: float) -> bool:
        """Whether a nonce is claimed now."""
        return self._claims.get(key, now) > now

    def claim(self, key: bytes, until: float, now: float, share: float = 1.0) -> bool:
        """
        Claim a nonce; returns whether it was new.

        :raise ReplayCacheFull: there is no room for it.
        """
        if self.holds(key, now):
            return False
        self.refuse_full(key, share)
        self.release(key)
        self._claims[key] = until
        self._deadlines.add(key, until)
        return True

    def refuse_full(self, key: bytes, share: float = 1.0) -> None:
        """
        Check that a nonce that is not claimed would have room.

        :raise ReplayCacheFull: it would not.
        """
        if key not in self._claims and len(self._claims) >= int(share * self._capacity):
            raise ReplayCacheFull

    def release(self, key: bytes) -> None:
        self._claims.pop(key, None)
        self._deadlines.discard(key)

    def prune(self, now: float) -> int:
        pruned = 0
        while (key := self._deadlines.take(now - NONCE_GRACE_SECONDS)) is not None:
            del self._claims[key]
            pruned += 1
        return pruned


ItemLabel = tuple[str, str]
ItemLabels = frozenset[ItemLabel]
TimelinePosition = tuple[float, int]

_ANY_LABEL: ItemLabel = ("any", "")


class HasID(Protocol):
    """An item with an id."""

    @property
    def id(self) -> str:
        """Unique among its kind."""


Item = TypeVar("Item", bound=HasID)


@dataclass(frozen=True, slots=True)
class TimelineSearch:
    """
    Conditions of a search.

    :param labels: an item has to have at least one label of each of these collections.
    :param after: inclusive, like `before`.
    """

    labels: tuple[Collection[ItemLabel], ...] = ()
    after: float | None = None
    before: float | None = None
    newest_first: bool = False


@dataclass(eq=False, slots=True)
class _TimelineEntry(Generic[Item]):
    item: Item
    labels: ItemLabels


class Timeline(Generic[Item]):
    """
    Items by time, then in order of arrival.

    Each label has a sorted list of positions, so that the cost of a page of one label is that of finding its
    beginning. A search for several labels reads the items of the rarest.

    :param arrivals: numbers items in order of arrival; by default the timeline has its own.
    """

    def __init__(self, arrivals: Iterator[int] | None = None) -> None:
        self._arrivals = count() if arrivals is None else arrivals
        self._entries: dict[TimelinePosition, _TimelineEntry[Item]] = {}
        self._places: dict[ItemLabel, list[TimelinePosition]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, place: TimelinePosition) -> Item:
        return self._entries[place].item

    def add(self, item: Item, labels: Iterable[ItemLabel], at: float) -> TimelinePosition:
        """Insert an item; returns its position."""
        place = (at, next(self._arrivals))
        self._entries[place] = _TimelineEntry(item, frozenset(labels))
        for label in (_ANY_LABEL, *self._entries[place].labels):
            insort(self._places.setdefault(label, []), place)
        return place

    def replace(self, place: TimelinePosition, item: Item, labels: Iterable[ItemLabel]) -> None:
        """Replace the item at a position by one with other labels."""
        entry = self._entries[place]
        before, entry.item, entry.labels = entry.labels, item, frozenset(labels)
        self._unlabel(place, before - entry.labels)
        for label in entry.labels - before:
            insort(self._places.setdefault(label, []), place)

    def remove(self, place: TimelinePosition) -> Item:
        entry = self._entries.pop(place)
        self._unlabel(place, (_ANY_LABEL, *entry.labels))
        return entry.item

    def count(self, label: ItemLabel) -> int:
        """Number of items with a label."""
        return len(self._places.get(label, ()))

    def find(self, search: TimelineSearch, part: PageRequest) -> ResultPage[Item]:
        """A page of matching items."""
        places, first, end = self._matching(search)
        total = end - first
        if search.newest_first:
            end = max(first, end - part.offset)
            found = places[max(first, end - part.limit) : end][::-1]
        else:
            first = min(end, first + part.offset)
            found = places[first : min(end, first + part.limit)]
        return ResultPage(tuple(self._entries[place].item for place in found), total)

    def _matching(self, search: TimelineSearch) -> tuple[Sequence[TimelinePosition], int, int]:
        """A sorted list, and the part of it that matches."""
        groups = sorted((frozenset(group) for group in search.labels or ([_ANY_LABEL],)), key=self._rarity)
        windows = [self._window(label, search) for label in groups[0]]
        if len(groups) == 1 and len(windows) == 1:
            return windows[0]
        matching: Iterable[TimelinePosition] = chain.from_iterable(
            places[first:end] for places, first, end in windows
        )
        for group in groups[1:]:
            matching = [place for place in matching if not group.isdisjoint(self._entries[place].labels)]
        found = sorted(set(matching))
        return found, 0, len(found)

    def _rarity(self, group: ItemLabels) -> int:
        return sum(self.count(label) for label in group)

    def _window(self, label: ItemLabel, search: TimelineSearch) -> tuple[Sequence[TimelinePosition], int, int]:
        """Positions of a label, and those between the bounds."""
        places = self._places.get(label, [])
        first = 0 if search.after is None else bisect_left(places, (search.after, -1))
        end = len(places) if search.before is None else bisect_left(places, (search.before, inf))
        return places, first, max(first, end)

    def _unlabel(self, place: TimelinePosition, labels: Iterable[ItemLabel]) -> None:
        for label in labels:
            places = self._places[label]
            del places[bisect_left(places, place)]
            if not places:
                del self._places[label]


@dataclass(eq=False, slots=True)
class OwnerTimelines(Generic[Item]):
    """Items of one kind: a timeline for each owner, and all items by id."""

    _arrivals: Iterator[int] = field(default_factory=count)
    _timelines: dict[str, Timeline[Item]] = field(default_factory=dict)
    _places: dict[str, tuple[str, TimelinePosition]] = field(default_factory=dict)

    def of(self, owner: str) -> Timeline[Item]:
        """The timeline of an owner, for reading; an empty one if there is none."""
        return self._timelines.get(owner) or Timeline(self._arrivals)

    def check_ids(self, items: Sequence[Item]) -> None:
        """:raise StoreUnavailable: an id exists, or occurs twice."""
        ids = {item.id for item in items}
        if len(ids) < len(items) or not self._places.keys().isdisjoint(ids):
            raise StoreUnavailable()

    def add(self, owner: str, item: Item, labels: Iterable[ItemLabel], at: float = 0.0) -> None:
        """
        Add an item.

        :param at: time to order by; by default items are in order of arrival.
        """
        timeline = self._timelines.setdefault(owner, Timeline(self._arrivals))
        self._places[item.id] = owner, timeline.add(item, labels, at)

    def get(self, owner: str, id: str) -> Item | None:
        """The item of an owner with this id."""
        holder, place = self._places.get(id, (None, None))
        return None if place is None or holder != owner else self._timelines[owner][place]

    def first(self) -> Item | None:
        """The first arrival of all items."""
        owner, place = next(iter(self._places.values()), (None, None))
        return None if owner is None or place is None else self._timelines[owner][place]

    def newest(self) -> Iterator[Item]:
        """All items, last arrival first."""
        return (self._timelines[owner][place] for owner, place in reversed(self._places.values()))

    def find_all(self, ids: Iterable[str]) -> list[Item]:
        """Items with these ids, of any owner, in order of arrival."""
        known = [self._places[id] for id in dict.fromkeys(ids) if id in self._places]
        return [self._timelines[owner][place] for owner, place in sorted(known, key=lambda one: one[1][1])]

    def replace(self, owner: str, item: Item, labels: Iterable[ItemLabel]) -> None:
        """Replace the item with the same id."""
        _, place = self._places[item.id]
        self._timelines[owner].replace(place, item, labels)

    def remove(self, owner: str, ids: Iterable[str]) -> list[Item]:
        """Remove items of an owner by id; returns them in their order."""
        mine = sorted(self._places[id][1] for id in set(ids) if self.get(owner, id) is not None)
        removed = [self._timelines[owner].remove(place) for place in mine]
        for item in removed:
            del self._places[item.id]
        if removed and not self._timelines[owner]:
            del self._timelines[owner]
        return removed


class MemoryRegistrations:
    """Contracts that the mediator owns: by registered DID, then by digest."""

    def __init__(self, caps: DecentrlQuotas) -> None:
        self._most = caps.contracts_with_one
        self._kept: dict[str, dict[bytes, Contract]] = {}

    def save(self, registration: Contract, now: float) -> None:
        """Store a registration; expired ones are removed, and if there are too many the one that expires first."""
        did = registration.peer_did
        live = {digest: one for digest, one in self._kept.get(did, {}).items() if one.expires_at > now}
        if registration.digest in live:
            return
        kept = {**live, registration.digest: registration}
        while len(kept) > self._most:
            del kept[min(kept, key=lambda digest: kept[digest].expires_at)]
        self._kept[did] = kept

    def dids(self) -> list[str]:
        """Registered identities."""
        return list(self._kept)

    def size(self, now: float) -> int:
        """Bytes of all that have not expired."""
        return sum(len(one.text) for kept in self._kept.values() for one in kept.values() if one.expires_at > now)

    def until(self, did: str, now: float) -> float | None:
        """When the last registration of a DID expires; None when it is not registered."""
        latest = max((one.expires_at for one in self._kept.get(did, {}).values()), default=now)
        return latest if latest > now else None


class MemoryContracts:
    """Contracts that identities own."""

    def __init__(self, caps: DecentrlQuotas) -> None:
        self._caps = caps
        self._timelines_by_owner: OwnerTimelines[Contract] = OwnerTimelines()
        self._digests: set[tuple[str, bytes]] = set()
        self._until: dict[tuple[str, str], float] = {}

    def save(self, owner: str, contract: Contract, now: float) -> None:
        """
        Store a contract.

        :raise QuotaExceeded: there are too many, and none has expired.
        """
        if (owner, contract.digest) in self._digests:
            return
        mine, peer = self._timelines_by_owner.of(owner), _peer_label(contract.peer_did)
        self._timelines_by_owner.check_ids([contract])
        if mine.count(peer) >= self._caps.contracts_with_one:
            self._make_room(owner, TimelineSearch(([peer],)), now)
        elif len(mine) >= self._caps.contracts:
            self._make_room(owner, TimelineSearch(), now)
        self._timelines_by_owner.add(owner, contract, [peer])
        self._digests.add((owner, contract.digest))
        pair = owner, contract.peer_did
        self._until[pair] = max(contract.expires_at, self._until.get(pair, contract.expires_at))

    def _make_room(self, owner: str, search: TimelineSearch, now: float) -> None:
        mine = self._timelines_by_owner.of(owner)
        kept = mine.find(search, PageRequest(0, len(mine))).items
        oldest = next((one for one in kept if one.expires_at <= now), None)
        if oldest is None:
            raise QuotaExceeded()
        self._timelines_by_owner.remove(owner, [oldest.id])
        self._digests.discard((owner, oldest.digest))

    def dids(self) -> list[str]:
        """Owners of contracts, and their peers."""
        return [did for pair in self._until for did in pair]

    def allow(self, owner: str, peer: str, now: float) -> bool:
        """Whether the owner has a contract with the peer that has not expired."""
        return self._until.get((owner, peer), now) > now

    def find(self, owner: str, wanted: ContractFilter, part: PageRequest) -> ResultPage[Contract]:
        mine = self._timelines_by_owner.of(owner)
        search = (
            TimelineSearch() if wanted.did in (None, owner) else TimelineSearch(([_peer_label(wanted.did or "")],))
        )
        if wanted.expires_after is None and wanted.expires_before is None:
            return mine.find(search, part)
        items = [one for one in mine.find(search, PageRequest(0, len(mine))).items if _matches_expiry(one, wanted)]
        return ResultPage(tuple(items[part.offset : part.offset + part.limit]), len(items))


class MemoryContractRequests:
    """Contract requests, queued until they are acknowledged."""

    def __init__(self, caps: DecentrlQuotas) -> None:
        self._caps = caps
        self._timelines_by_owner: OwnerTimelines[ContractRequest] = OwnerTimelines()

    def add(self, request: ContractRequest) -> None:
        """
        Queue a request.

        :raise QuotaExceeded: too many are queued.
        """
        waiting, sender = self._timelines_by_owner.of(request.recipient_did), ("sender", request.sender_did)
        if len(waiting) >= self._caps.requests or waiting.count(sender) >= self._caps.requests_of_one:
            raise QuotaExceeded()
        self._timelines_by_owner.check_ids([request])
        self._timelines_by_owner.add(request.recipient_did, request, [sender])

    def find(self, recipient: str, part: PageRequest) -> ResultPage[ContractRequest]:
        return self._timelines_by_owner.of(recipient).find(TimelineSearch(), part)

    def acknowledge(self, recipient: str, ids: Sequence[str]) -> None:
        self._timelines_by_owner.remove(recipient, ids)


def _peer_label(did: str) -> ItemLabel:
    return "peer", did


def _matches_expiry(contract: Contract, wanted: ContractFilter) -> bool:
    """Whether a contract expires between the bounds."""
    after, before = wanted.expires_after, wanted.expires_before
    return (after is None or contract.expires_at >= after) and (before is None or contract.expires_at <= before)


# Unprocessed events have each label twice, so that a search for them needs no further condition.
_LABEL_KINDS = "tag", "participant"
_UNPROCESSED_LABEL_KINDS = "unprocessed tag", "unprocessed participant"
_ANY_UNPROCESSED: ItemLabel = ("unprocessed", "")


@dataclass(eq=False, slots=True)
class _OwnerUsage:
    """Items and bytes of one DID."""

    items: int = 0
    size: int = 0


class _OwnerQuota:
    """
    Usage by DID, and its limits.

    :ivar total: usage of all.
    """

    def __init__(self, items: int, size: int) -> None:
        self._items = items
        self._size = size
        self._usage: dict[str, _OwnerUsage] = {}
        self.total = _OwnerUsage()

    @property
    def users(self) -> int:
        """Number of DIDs with any usage."""
        return len(self._usage)

    def size(self, did: str) -> int:
        """Bytes of one DID."""
        return self._usage[did].size if did in self._usage else 0

    def check(self, did: str, items: int, size: int) -> None:
        """
        Check an increase; a reduction always passes.

        :raise QuotaExceeded: it would exceed the quota.
        """
        usage = self._usage.get(did, _OwnerUsage())
        if items > 0 and usage.items + items > self._items or size > 0 and usage.size + size > self._size:
            raise QuotaExceeded()

    def take(self, did: str, items: int, size: int) -> None:
        """Change the usage."""
        usage = self._usage.setdefault(did, _OwnerUsage())
        for one in (usage, self.total):
            one.items += items
            one.size += size
        if not usage.items:
            del self._usage[did]


class MemoryPendingEvents:
    """Pending events, queued until they are acknowledged."""

    def __init__(self, caps: DecentrlQuotas, ranking: QueueRanking) -> None:
        self._room = _OwnerQuota(caps.pending, caps.pending_bytes)
        self._ranking = ranking
        self._timelines_by_owner: OwnerTimelines[PendingEvent] = OwnerTimelines()
        self._ledger: Counter[str] = Counter()

    def add(self, event: PendingEvent) -> None:
        """
        Queue an event.

        :raise QuotaExceeded: too much is queued.
        """
        did, size = event.recipient_did, get_utf8_size(event.payload)
        self._room.check(did, 1, size)
        self._timelines_by_owner.check_ids([event])
        self._timelines_by_owner.add(did, event, [("sender", event.sender_did)])
        self._room.take(did, 1, size)
        self._ranking.change(did, 1)
        self._ledger["accepted"] += 1

    def ledger(self) -> MessageLedger:
        """Ledger of the events."""
        return MessageLedger(**self._ledger, waiting=len(list(self._timelines_by_owner.newest())))

    def waiting(self) -> QueueTotals:
        """Totals of all queues."""
        oldest = self._timelines_by_owner.first()
        return QueueTotals(
            self._room.total.items, self._room.total.size, self._room.users, oldest.received_at if oldest else None
        )

    def cohorts(self, bounds: Sequence[float]) -> list[AgeBucket]:
        """All events by age."""
        found = ((event.received_at, get_utf8_size(event.payload)) for event in self._timelines_by_owner.newest())
        total = self._room.total
        return complete_buckets(group_by_age(found, bounds, LOOKED_AT), total.items, total.size)

    def queue(self, did: str) -> tuple[int, float | None]:
        """Bytes that are queued for a DID, and the time of the first arrival."""
        oldest = self._timelines_by_owner.of(did).find(TimelineSearch(), PageRequest(0, 1)).items
        return self._room.size(did), oldest[0].received_at if oldest else None

    def find(self, recipient: str, sender: str | None, part: PageRequest) -> ResultPage[PendingEvent]:
        search = TimelineSearch() if sender is None else TimelineSearch(([("sender", sender)],))
        found = self._timelines_by_owner.of(recipient).find(search, part)
        _check_page_size([event.payload for event in found.items])
        return found

    def find_by_id(self, ids: Sequence[str]) -> list[PendingEvent]:
        """Queued events by id, in order of arrival."""
        return _take_fitting(self._timelines_by_owner.find_all(ids))

    def arrived(self, recipients: Sequence[str], window: ArrivalWindow, limit: int) -> list[MessageArrival]:
        """Events for these DIDs that arrived in a window."""
        shelves = [self._timelines_by_owner.of(did) for did in dict.fromkeys(recipients)]
        found = [
            MessageArrival(event.id, event.recipient_did, event.received_at)
            for waiting in shelves
            for event in waiting.find(TimelineSearch(), PageRequest(0, len(waiting))).items
            if window.has(event.received_at, event.id)
        ]
        return sort_arrivals(found, limit)

    def queues(self) -> list[tuple[str, list[PendingEvent]]]:
        """Recipients with their events, in order of arrival."""
        found: dict[str, list[PendingEvent]] = {}
        for event in reversed(list(self._timelines_by_owner.newest())):
            found.setdefault(event.recipient_did, []).append(event)
        return list(found.items())

    def acknowledge(
        self, recipient: str, ids: Sequence[str], ledger_entry: LedgerEntry = "acknowledged"
    ) -> list[RemovedMessage]:
        """Remove events; returns those that existed, in order of arrival."""
        removed = [
            RemovedMessage(event.id, recipient, recipient, get_utf8_size(event.payload), event.received_at, 0)
            for event in self._timelines_by_owner.remove(recipient, ids)
        ]
        for one in removed:
            self._room.take(recipient, -1, -one.size)
            self._ranking.change(recipient, -1)
        self._ledger[ledger_entry] += len(removed)
        return removed


class MemoryEventArchive:
    """Stored and public events, which share a quota."""

    def __init__(self, caps: DecentrlQuotas) -> None:
        self._room = _OwnerQuota(caps.stored, caps.stored_bytes)
        self._stored: OwnerTimelines[StoredEvent] = OwnerTimelines()
        self._public: OwnerTimelines[PublicEvent] = OwnerTimelines()

    def save(self, owner: str, events: Sequence[StoredEvent]) -> None:
        """:raise QuotaExceeded: they would exceed the quota."""
        size = sum(get_utf8_size(event.payload, *event.tags) for event in events)
        self._room.check(owner, len(events), size)
        self._stored.check_ids(events)
        for event in events:
            self._stored.add(owner, event, _get_labels(event, processed=event.sender_did == owner), event.timestamp)
        self._room.take(owner, len(events), size)

    def find(self, owner: str, wanted: EventFilter, part: PageRequest) -> ResultPage[StoredEvent]:
        tag, participant = _UNPROCESSED_LABEL_KINDS if wanted.unprocessed_only else _LABEL_KINDS
        groups: list[list[ItemLabel]] = []
        if wanted.tags:
            groups.append([(tag, one) for one in wanted.tags])
        if wanted.participant is not None:
            groups.append([(participant, wanted.participant)])
        if wanted.unprocessed_only and not groups:
            groups.append([_ANY_UNPROCESSED])
        found = self._stored.of(owner).find(TimelineSearch(tuple(groups), wanted.after, wanted.before), part)
        _check_page_size([event.payload for event in found.items])
        return found

    def update_tags(self, owner: str, tags: Sequence[tuple[str, tuple[str, ...]]]) -> None:
        """:raise QuotaExceeded: they would exceed the quota."""
        found = [(self._stored.get(owner, id), new) for id, new in dict(tags).items()]
        mine = [(event, new) for event, new in found if event is not None]
        growth = sum(get_utf8_size(*new) - get_utf8_size(*event.tags) for event, new in mine)
        self._room.check(owner, 0, growth)
        for event, new in mine:
            tagged = replace(event, tags=new)
            self._stored.replace(owner, tagged, _get_labels(tagged, processed=True))
        self._room.take(owner, 0, growth)

    def publish(self, publisher: str, event: PublicEvent) -> None:
        """:raise QuotaExceeded: it would exceed the quota."""
        size = get_utf8_size(event.event, *event.tags)
        self._room.check(publisher, 1, size)
        self._public.check_ids([event])
        labels = [("tag", tag) for tag in event.tags]
        if event.channel_id is not None:
            labels.append(("channel", event.channel_id))
        self._public.add(publisher, event, labels, event.timestamp)
        self._room.take(publisher, 1, size)

    def unpublish(self, publisher: str, event_id: str) -> None:
        """:raise PublicEventNotFound: the publisher has none with this id."""
        removed = self._public.remove(publisher, [event_id])
        if not removed:
            raise PublicEventNotFound()
        self._room.take(publisher, -1, -get_utf8_size(removed[0].event, *removed[0].tags))

    def find_public(self, publisher: str, wanted: PublicEventFilter, part: PageRequest) -> ResultPage[PublicEvent]:
        groups: list[list[ItemLabel]] = []
        if wanted.tags:
            groups.append([("tag", tag) for tag in wanted.tags])
        if wanted.channel_id is not None:
            groups.append([("channel", wanted.channel_id)])
        search = TimelineSearch(tuple(groups), wanted.after, wanted.before, newest_first=True)
        found = self._public.of(publisher).find(search, part)
        _check_page_size([event.event for event in found.items])
        return found


def _get_labels(event: StoredEvent, *, processed: bool) -> list[ItemLabel]:
    """Labels by which a stored event is found."""
    labels = [] if processed else [_ANY_UNPROCESSED]
    for tag, participant in (_LABEL_KINDS,) if processed else (_LABEL_KINDS, _UNPROCESSED_LABEL_KINDS):
        labels += [(tag, one) for one in event.tags]
        labels += [(participant, event.sender_did), (participant, event.recipient_did)]
    return labels


def _take_fitting(events: Sequence[PendingEvent]) -> list[PendingEvent]:
    """The first events that fit in a page, but at least one."""
    sizes = accumulate(get_utf8_size(event.payload) for event in events)
    fit = [event for event, size in zip(events, sizes, strict=True) if size <= MAX_PAGE_BYTES]
    return fit or list(events[:1])


def _check_page_size(texts: Sequence[str]) -> None:
    """:raise PayloadTooLarge: the texts exceed the limit of a page."""
    if get_utf8_size(*texts) > MAX_PAGE_BYTES:
        raise PayloadTooLarge()


T = TypeVar("T")


class MemoryDecentrlState:
    """
    State of the Decentrl half between open and close.

    :param nonces: of the whole store, like the ranking.
    """

    def __init__(self, caps: DecentrlQuotas, nonces: MemoryNonces, ranking: QueueRanking) -> None:
        self._nonces = nonces
        self.registrations = MemoryRegistrations(caps)
        self.contracts = MemoryContracts(caps)
        self.requests = MemoryContractRequests(caps)
        self.pending = MemoryPendingEvents(caps, ranking)
        self.archive = MemoryEventArchive(caps)

    def dids(self) -> list[str]:
        """All identities for which something is stored."""
        pending = (did for did, _ in self.pending.queues())
        return list(dict.fromkeys([*self.registrations.dids(), *self.contracts.dids(), *pending]))

    def guarded(self, guard: CommandGuard, work: Callable[[], T], now: float) -> T:
        """
        Check a guard and do the work. The nonce stays claimed unless the store failed.

        :raise MediatorError: a condition of the guard does not hold, or the work was refused.
        """
        if self._nonces.holds(guard.nonce, now):
            raise DuplicateNonce()
        self._nonces.refuse_full(guard.nonce, guard.share)
        try:
            self._check(guard, now)
            done = work()
        except StoreUnavailable:
            raise
        except MediatorError:
            self._nonces.claim(guard.nonce, guard.until, now)
            raise
        self._nonces.claim(guard.nonce, guard.until, now)
        return done

    def save_contract(self, contract: Contract, now: float) -> None:
        """:raise QuotaExceeded: there are too many, and none has expired."""
        if contract.owner_did is None:
            self.registrations.save(contract, now)
        else:
            self.contracts.save(contract.owner_did, contract, now)

    def deliver(self, event: PendingEvent, now: float) -> None:
        """
        Queue an event.

        :raise ContractNotFound: the recipient owns no contract with the sender that has not expired.
        :raise QuotaExceeded: too much is queued.
        """
        if not self.contracts.allow(event.recipient_did, event.sender_did, now):
            raise ContractNotFound()
        self.pending.add(event)

    def _check(self, guard: CommandGuard, now: float) -> None:
        if guard.sender is not None and self.registrations.until(guard.sender, now) is None:
            raise UnauthorizedCommand()
        if guard.recipient is not None and self.registrations.until(guard.recipient, now) is None:
            raise RecipientNotRegistered()


class DecentrlStateAccess(Protocol):
    """Runs work on the state; the Deferred has its result or exception, or fails because the store is not open."""

    def __call__(self, work: Callable[[MemoryDecentrlState, float], T]) -> Deferred[T]:
        """Run it at once."""


@implementer(IDecentrlStore)
class MemoryDecentrlStore:
    """The Decentrl half of the memory store."""

    def __init__(self, answer: DecentrlStateAccess) -> None:
        self._answer = answer

    def check_guard(self, guard: CommandGuard) -> Deferred[None]:
        return self._guarded(guard, lambda kept, now: None)

    def registered_until(self, did: str) -> Deferred[float | None]:
        return self._answer(lambda kept, now: kept.registrations.until(did, now))

    def save_contract(self, guard: CommandGuard, contract: Contract) -> Deferred[None]:
        return self._guarded(guard, lambda kept, now: kept.save_contract(contract, now))

    def contracts(self, owner: str, wanted: ContractFilter, part: PageRequest) -> Deferred[ResultPage[Contract]]:
        return self._answer(lambda kept, now: kept.contracts.find(owner, wanted, part))

    def request_contract(self, guard: CommandGuard, request: ContractRequest) -> Deferred[None]:
        return self._guarded(guard, lambda kept, now: kept.requests.add(request))

    def contract_requests(self, recipient: str, part: PageRequest) -> Deferred[ResultPage[ContractRequest]]:
        return self._answer(lambda kept, now: kept.requests.find(recipient, part))

    def acknowledge_requests(self, guard: CommandGuard, recipient: str, ids: Sequence[str]) -> Deferred[None]:
        return self._guarded(guard, lambda kept, now: kept.requests.acknowledge(recipient, ids))

    def enqueue_event(self, guard: CommandGuard, event: PendingEvent) -> Deferred[None]:
        return self._guarded(guard, lambda kept, now: kept.deliver(event, now))

    def pending_events(
        self, recipient: str, sender: str | None, part: PageRequest
    ) -> Deferred[ResultPage[PendingEvent]]:
        return self._answer(lambda kept, now: kept.pending.find(recipient, sender, part))

    def find_pending(self, ids: Sequence[str]) -> Deferred[list[PendingEvent]]:
        return self._answer(lambda kept, now: kept.pending.find_by_id(ids))

    def find_pending_arrivals(
        self, recipients: Sequence[str], window: ArrivalWindow, *, limit: int
    ) -> Deferred[list[MessageArrival]]:
        return self._answer(lambda kept, now: kept.pending.arrived(recipients, window, limit))

    def acknowledge_events(
        self, guard: CommandGuard, recipient: str, ids: Sequence[str]
    ) -> Deferred[list[RemovedMessage]]:
        return self._guarded(guard, lambda kept, now: kept.pending.acknowledge(recipient, ids))

    def save_events(self, guard: CommandGuard, owner: str, events: Sequence[StoredEvent]) -> Deferred[None]:
        return self._guarded(guard, lambda kept, now: kept.archive.save(owner, events))

    def events(self, owner: str, wanted: EventFilter, part: PageRequest) -> Deferred[ResultPage[StoredEvent]]:
        return self._answer(lambda kept, now: kept.archive.find(owner, wanted, part))

    def update_tags(
        self, guard: CommandGuard, owner: str, tags: Sequence[tuple[str, tuple[str, ...]]]
    ) -> Deferred[None]:
        return self._guarded(guard, lambda kept, now: kept.archive.update_tags(owner, tags))

    def publish(self, guard: CommandGuard, publisher: str, event: PublicEvent) -> Deferred[None]:
        return self._guarded(guard, lambda kept, now: kept.archive.publish(publisher, event))

    def unpublish(self, guard: CommandGuard, publisher: str, event_id: str) -> Deferred[None]:
        return self._guarded(guard, lambda kept, now: kept.archive.unpublish(publisher, event_id))

    def public_events(
        self, publisher: str, wanted: PublicEventFilter, part: PageRequest
    ) -> Deferred[ResultPage[PublicEvent]]:
        return self._answer(lambda kept, now: kept.archive.find_public(publisher, wanted, part))

    def _guarded(self, guard: CommandGuard, work: Callable[[MemoryDecentrlState, float], T]) -> Deferred[T]:
        return self._answer(lambda kept, now: kept.guarded(guard, lambda: work(kept, now), now))
