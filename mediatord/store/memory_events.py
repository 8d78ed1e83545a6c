"""The pending, stored and public events of the memory store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from mediatord.errors import OverQuota, PublicEventNotFound, TooLarge
from mediatord.interfaces import Arrival, Cohort, Ledger, Removed, Waiting, Window
from mediatord.interfaces.decentrl import (
    LARGEST_SLICE,
    Caps,
    EventFilter,
    Found,
    PendingEvent,
    PublicEvent,
    PublicFilter,
    Slice,
    StoredEvent,
)
from mediatord.store.backlog import completed, grouped
from mediatord.store.memory_messages import LOOKED_AT, first_arrivals
from mediatord.store.memory_timelines import Label, Search, Shelves
from mediatord.store.ranking import Ranking

# What is unprocessed has each of its labels twice, so that to ask for it is no second thing to look for.
_EITHER = "tag", "participant"
_UNPROCESSED = "unprocessed tag", "unprocessed participant"
_ANY_UNPROCESSED: Label = ("unprocessed", "")


@dataclass(eq=False, slots=True)
class _Usage:
    """How much is kept for one DID."""

    items: int = 0
    size: int = 0


class _Room:
    """
    How much is kept for whom, and that it is not more than allowed.

    :ivar total: of all.
    """

    def __init__(self, items: int, size: int) -> None:
        self._items = items
        self._size = size
        self._usage: dict[str, _Usage] = {}
        self.total = _Usage()

    @property
    def users(self) -> int:
        """How many it is kept for."""
        return len(self._usage)

    def size(self, did: str) -> int:
        """Bytes that are kept for one DID."""
        return self._usage[did].size if did in self._usage else 0

    def check(self, did: str, items: int, size: int) -> None:
        """:raise OverQuota: so much more would be too much. What is less than before is never too much."""
        usage = self._usage.get(did, _Usage())
        if items > 0 and usage.items + items > self._items or size > 0 and usage.size + size > self._size:
            raise OverQuota()

    def take(self, did: str, items: int, size: int) -> None:
        """Count so much more, or less."""
        usage = self._usage.setdefault(did, _Usage())
        for one in (usage, self.total):
            one.items += items
            one.size += size
        if not usage.items:
            del self._usage[did]


class Pending:
    """Events on their way, until they are acknowledged."""

    def __init__(self, caps: Caps, ranking: Ranking) -> None:
        self._room = _Room(caps.pending, caps.pending_bytes)
        self._ranking = ranking
        self._shelves: Shelves[PendingEvent] = Shelves()
        self._ledger: Counter[str] = Counter()

    def add(self, event: PendingEvent) -> None:
        """:raise OverQuota: too much waits already."""
        did, size = event.recipient_did, _size(event.payload)
        self._room.check(did, 1, size)
        self._shelves.check_ids([event])
        self._shelves.add(did, event, [("sender", event.sender_did)])
        self._room.take(did, 1, size)
        self._ranking.change(did, 1)
        self._ledger["accepted"] += 1

    def ledger(self) -> Ledger:
        """What became of all of them."""
        return Ledger(**self._ledger, waiting=len(list(self._shelves.newest())))

    def waiting(self) -> Waiting:
        """All of them."""
        oldest = self._shelves.first()
        return Waiting(
            self._room.total.items, self._room.total.size, self._room.users, oldest.received_at if oldest else None
        )

    def cohorts(self, bounds: Sequence[float]) -> list[Cohort]:
        """All of them by the time that they came."""
        found = ((event.received_at, _size(event.payload)) for event in self._shelves.newest())
        total = self._room.total
        return completed(grouped(found, bounds, LOOKED_AT), total.items, total.size)

    def queue(self, did: str) -> tuple[int, float | None]:
        """Bytes that wait for a DID, and since when."""
        oldest = self._shelves.of(did).find(Search(), Slice(0, 1)).items
        return self._room.size(did), oldest[0].received_at if oldest else None

    def find(self, recipient: str, sender: str | None, part: Slice) -> Found[PendingEvent]:
        search = Search() if sender is None else Search(([("sender", sender)],))
        found = self._shelves.of(recipient).find(search, part)
        _check_slice([event.payload for event in found.items])
        return found

    def find_by_id(self, ids: Sequence[str]) -> list[PendingEvent]:
        """Those that wait, in order of arrival."""
        return _fitting(self._shelves.find_all(ids))

    def arrived(self, recipients: Sequence[str], window: Window, limit: int) -> list[Arrival]:
        """What came for these in a time."""
        shelves = [self._shelves.of(did) for did in dict.fromkeys(recipients)]
        found = [
            Arrival(event.id, event.recipient_did, event.received_at)
            for waiting in shelves
            for event in waiting.find(Search(), Slice(0, len(waiting))).items
            if window.has(event.received_at, event.id)
        ]
        return first_arrivals(found, limit)

    def acknowledge(self, recipient: str, ids: Sequence[str]) -> list[Removed]:
        """Those that were there, in order of arrival."""
        removed = [
            Removed(event.id, recipient, recipient, _size(event.payload), event.received_at, 0)
            for event in self._shelves.remove(recipient, ids)
        ]
        for one in removed:
            self._room.take(recipient, -1, -one.size)
            self._ranking.change(recipient, -1)
        self._ledger["acknowledged"] += len(removed)
        return removed


class Archive:
    """What identities keep for themselves and for the public, which share their room."""

    def __init__(self, caps: Caps) -> None:
        self._room = _Room(caps.stored, caps.stored_bytes)
        self._stored: Shelves[StoredEvent] = Shelves()
        self._public: Shelves[PublicEvent] = Shelves()

    def save(self, owner: str, events: Sequence[StoredEvent]) -> None:
        """:raise OverQuota: they would be too much."""
        size = sum(_size(event.payload, *event.tags) for event in events)
        self._room.check(owner, len(events), size)
        self._stored.check_ids(events)
        for event in events:
            self._stored.add(owner, event, _labels(event, processed=event.sender_did == owner), event.timestamp)
        self._room.take(owner, len(events), size)

    def find(self, owner: str, wanted: EventFilter, part: Slice) -> Found[StoredEvent]:
        tag, participant = _UNPROCESSED if wanted.unprocessed_only else _EITHER
        groups: list[list[Label]] = []
        if wanted.tags:
            groups.append([(tag, one) for one in wanted.tags])
        if wanted.participant is not None:
            groups.append([(participant, wanted.participant)])
        if wanted.unprocessed_only and not groups:
            groups.append([_ANY_UNPROCESSED])
        found = self._stored.of(owner).find(Search(tuple(groups), wanted.after, wanted.before), part)
        _check_slice([event.payload for event in found.items])
        return found

    def update_tags(self, owner: str, tags: Sequence[tuple[str, tuple[str, ...]]]) -> None:
        """:raise OverQuota: they would be too much."""
        found = [(self._stored.get(owner, id), new) for id, new in dict(tags).items()]
        mine = [(event, new) for event, new in found if event is not None]
        growth = sum(_size(*new) - _size(*event.tags) for event, new in mine)
        self._room.check(owner, 0, growth)
        for event, new in mine:
            tagged = replace(event, tags=new)
            self._stored.replace(owner, tagged, _labels(tagged, processed=True))
        self._room.take(owner, 0, growth)

    def publish(self, publisher: str, event: PublicEvent) -> None:
        """:raise OverQuota: it would be one too many."""
        size = _size(event.event, *event.tags)
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
        self._room.take(publisher, -1, -_size(removed[0].event, *removed[0].tags))

    def find_public(self, publisher: str, wanted: PublicFilter, part: Slice) -> Found[PublicEvent]:
        groups: list[list[Label]] = []
        if wanted.tags:
            groups.append([("tag", tag) for tag in wanted.tags])
        if wanted.channel_id is not None:
            groups.append([("channel", wanted.channel_id)])
        search = Search(tuple(groups), wanted.after, wanted.before, newest_first=True)
        found = self._public.of(publisher).find(search, part)
        _check_slice([event.event for event in found.items])
        return found


def _labels(event: StoredEvent, *, processed: bool) -> list[Label]:
    """What a stored event is found by."""
    labels = [] if processed else [_ANY_UNPROCESSED]
    for tag, participant in (_EITHER,) if processed else (_EITHER, _UNPROCESSED):
        labels += [(tag, one) for one in event.tags]
        labels += [(participant, event.sender_did), (participant, event.recipient_did)]
    return labels


def _fitting(events: Sequence[PendingEvent]) -> list[PendingEvent]:
    """The first that fit in a slice, but at least one."""
    sizes = accumulate(_size(event.payload) for event in events)
    fit = [event for event, size in zip(events, sizes, strict=True) if size <= LARGEST_SLICE]
    return fit or list(events[:1])


def _check_slice(texts: Sequence[str]) -> None:
    """:raise TooLarge: they are more than a slice may have."""
    if _size(*texts) > LARGEST_SLICE:
        raise TooLarge()


def _size(*texts: str) -> int:
    """Bytes as UTF-8."""
    return sum(len(text.encode()) for text in texts)
