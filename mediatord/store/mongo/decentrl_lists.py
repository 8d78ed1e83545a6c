"""
Long lists of events.

The server skips and counts events one by one. So a long list is walked once, in steps that do not take long, and
where they end is remembered as long as the list does not change: whatever is asked for then is a step away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from mediatord.errors import RateLimited
from mediatord.interfaces.decentrl import Slice
from mediatord.store.mongo.decentrl_pages import Listing, Reading
from mediatord.store.mongo.decentrl_schema import Table
from mediatord.store.mongo.decentrl_search import Search
from mediatord.store.mongo.requests import Document
from mediatord.store.sqlite_bookmarks import Bookmarks, Place, Shelfmarks

T = TypeVar("T")

# Events that are skipped or counted at a time.
STEP = 8_192
# Walks along lists of one owner that may be waited for.
_WALKS_OF_ONE = 4
# Lists of more labels than this are not worth remembering.
_REMEMBERED = 64
_FAR = 1 << 62
_PLACE = {"_id": 0, "at": 1, "seq": 1}


@dataclass(frozen=True, slots=True)
class Memory:
    """What a process knows of lists, and how many it walks along, by owner."""

    step: int = STEP
    shelfmarks: Shelfmarks = field(default_factory=Shelfmarks)
    walks: Counter[bytes] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Lists:
    """
    The lists of one owner in one state.

    A place in a list is a time and a number: what comes behind it are the events from this time on, except so many
    of them.

    :param owner: its key.
    :param held: how many events there are in all.
    :param edition: what no other state has.
    """

    reading: Reading
    table: Table
    memory: Memory
    owner: bytes
    held: int
    edition: int

    async def read(self, search: Search, part: Slice) -> tuple[list[Document], int]:
        """A slice of a list, and how long that is."""
        search = await self._rarest_first(search)
        marks = self._marks(search)
        total = await self._total(search, marks)
        offset = max(part.offset, 0)
        if not part.limit or offset >= total:
            return [], total
        known, place = await self._reach(search, marks, offset)
        skipped = offset - known
        listing = self._behind(search, place)
        found = await self.reading.ask(listing.slice(_number(place) + skipped, min(part.limit, total - offset)))
        end = _end(found, place, skipped)
        if end is not None:
            marks.add(offset + len(found), end)
        return found, total

    async def _rarest_first(self, search: Search) -> Search:
        if len(search.groups) < 2:
            return search
        numbers = [(await self._total(one, self._marks(one)), one.groups[0]) for one in search.one_by_one()]
        return replace(search, groups=tuple([group for _, group in sorted(numbers)]))

    async def _total(self, search: Search, marks: Bookmarks) -> int:
        if marks.total is None:
            if search.is_all:
                marks.total = self.held
            elif len(search.groups) < 2:
                marks.total = await self._patiently(lambda: self._walk(search, marks))
            else:
                marks.total = await self._patiently(lambda: self._walk_along(search, marks))
        return marks.total

    async def _reach(self, search: Search, marks: Bookmarks, offset: int) -> tuple[int, Place | None]:
        """A place at most a step before an offset, and how many events are before it."""
        known, _ = marks.before(offset)
        if offset - known > self.memory.step and len(search.groups) < 2:
            await self._patiently(lambda: self._walk(search, marks, offset - self.memory.step))
        return marks.before(offset)

    async def _walk(self, search: Search, marks: Bookmarks, until: int = _FAR) -> int:
        """Go on from the last place that is known to the end, or until so many are before it; how many those are."""
        known, place = marks.before(until)
        while known < until:
            further = await self._step(search, place)
            if further is None:
                return known + await self.reading.count(self._behind(search, place), _number(place))
            known, place = known + self.memory.step, further
            marks.add(known, place)
        return known

    async def _walk_along(self, search: Search, marks: Bookmarks) -> int:
        """Count step by step what is found along the list of the first group."""
        leading = replace(search, groups=search.groups[:1])
        number, place = 0, None
        while (further := await self._step(leading, place)) is not None:
            before = {"at": {"$gt" if search.newest_first else "$lt": further[0]}}
            listing = self._behind(search, place)
            within = {"$and": [*listing.filter["$and"], before]}
            number += await self.reading.count(replace(listing, filter=within))
            marks.add(number, (further[0], 0))
            place = further
        return number + await self.reading.count(self._behind(search, place))

    async def _step(self, search: Search, place: Place | None) -> Place | None:
        """The place a step further; None if the end comes first."""
        listing = replace(self._behind(search, place), projection=_PLACE)
        found = await self.reading.ask(listing.slice(_number(place) + self.memory.step - 1, 1))
        if not found:
            return None
        at, seq = found[0]["at"], found[0]["seq"]
        same = {"at": at, "seq": {"$gte" if search.newest_first else "$lte": seq}}
        return at, await self.reading.count(replace(listing, filter={"$and": [*listing.filter["$and"], same]}))

    def _behind(self, search: Search, place: Place | None) -> Listing:
        """Not without those that the number of the place says."""
        return (search if place is None else search.beginning_at(place[0])).listing(self.table, planned=True)

    def _marks(self, search: Search) -> Bookmarks:
        if sum(map(len, search.groups)) > _REMEMBERED:
            return Bookmarks(self.edition)
        return self.memory.shelfmarks.of((self.owner, self.table.name, search), self.edition)

    async def _patiently(self, walk: Callable[[], Awaitable[T]]) -> T:
        """:raise RateLimited: too many are on the way for this owner."""
        walks = self.memory.walks
        if walks[self.owner] >= _WALKS_OF_ONE:
            raise RateLimited(retry_after=1)
        walks[self.owner] += 1
        try:
            return await walk()
        finally:
            walks[self.owner] -= 1
            if not walks[self.owner]:
                del walks[self.owner]


def _number(place: Place | None) -> int:
    return 0 if place is None else place[1]


def _end(found: list[Document], place: Place | None, skipped: int) -> Place | None:
    """
    The place behind what was found, as far as that says.

    :param skipped: events between the place and what was found.
    """
    if not found:
        return None
    last = found[-1]["at"]
    same = sum([one["at"] == last for one in found])
    if same < len(found) or (place is None and not skipped):
        return last, same
    if place is not None and place[0] == last:
        return last, place[1] + skipped + same
    return None
