"""
Finding stored and public events by their labels, in SQL; each function runs inside a transaction of the caller.

What one label is asked for is a range of its entries, and how many those are is known. Several things at once are
looked for among the entries of what is rarest, each of which is probed for the others; that, and what is between two
times, has to be counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from sqlite3 import Connection
from typing import Any

from mediatord.interfaces.decentrl import Slice
from mediatord.protocol.jsontext import loads
from mediatord.store.sql_labels import Label, Shelf, find_shelves
from mediatord.store.sql_parties import Party
from mediatord.store.sql_rows import marks_clause
from mediatord.store.sqlite_bookmarks import Bookmarks, Place, Shelfmarks

# So many sorted ranges are merged as they are read; more are read and then sorted.
_MERGED = 8
# Lists of more labels than this are not worth remembering.
_REMEMBERED = 64
_COUNTED_FIRST = 1_024


@dataclass(frozen=True, slots=True)
class Search:
    """
    What is looked for.

    :param everything: label of all that is searched.
    :param groups: of each of these an event has to have at least one label.
    :param after: inclusive, like `before`.
    """

    everything: Label
    groups: tuple[tuple[Label, ...], ...] = ()
    after: float | None = None
    before: float | None = None
    newest_first: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """
    How a list is read.

    :param patience: how many entries may be counted, more or less; None if it may take as long as it takes.
    """

    part: Slice
    shelfmarks: Shelfmarks
    patience: int | None = None


def find_events(
    connection: Connection, party: Party, search: Search, reading: Reading
) -> tuple[list[int], int] | None:
    """
    The events of a slice by their places in the order of arrival, and how many match in all; None if that takes more
    patience.
    """
    groups = _groups(connection, search)
    if not all(groups):
        return [], 0
    listing = _Listing(groups[0], tuple(groups[1:]), search.after, search.before, search.newest_first)
    small = sum(map(len, groups)) <= _REMEMBERED
    bookmarks = reading.shelfmarks.of((party.id, listing), party.edition) if small else Bookmarks(party.edition)
    if bookmarks.total is None:
        bookmarks.total = listing.count(connection, reading.patience)
        if bookmarks.total is None:
            return None
    return listing.page(connection, reading.part, bookmarks.total, bookmarks), bookmarks.total


_Group = tuple[Shelf, ...]


def _groups(connection: Connection, search: Search) -> list[_Group]:
    """What an event has to have one of each of, the rarest first; an empty one if there is none."""
    labels = [search.everything, *(label for group in search.groups for label in group)]
    shelves = find_shelves(connection, list(dict.fromkeys(labels)))
    everything = shelves.get(search.everything)
    if everything is None:
        return [()]
    found = [tuple([shelves[label] for label in dict.fromkeys(group) if label in shelves]) for group in search.groups]
    # What every event has is nothing to look for.
    telling = [group for group in found if not any(shelf.items == everything.items for shelf in group)]
    return sorted(telling, key=lambda group: sum([shelf.items for shelf in group])) or [(everything,)]


@dataclass(frozen=True, slots=True)
class _Listing:
    """A list of events: those on some shelves that also are on one of each of the others."""

    shelves: _Group
    others: tuple[_Group, ...]
    after: float | None
    before: float | None
    newest_first: bool

    def count(self, connection: Connection, patience: int | None) -> int | None:
        """How long it is; None if that takes more patience."""
        if len(self.shelves) == 1 and not self.others:
            return _count_between(connection, self.shelves[0], (self.after, self.before), patience)
        if patience is not None and sum([shelf.items for shelf in self.shelves]) > patience:
            return None
        source, parameters = self._source(None)
        # With a limit, because without it the order that lets ranges be merged would be left out.
        query = f"SELECT count(*) FROM ({source} ORDER BY 1, 2 LIMIT -1)"
        ((total,),) = connection.execute(query, parameters).fetchall()
        return int(total)

    def page(self, connection: Connection, part: Slice, total: int, bookmarks: Bookmarks) -> list[int]:
        """A slice of it, read from the nearest place that is known."""
        number = min(part.limit, total - part.offset)
        if number <= 0:
            return []
        end = part.offset + number
        known, place = bookmarks.before(part.offset)
        # After a long way the one before the page is read as well: it is where this very page is found again.
        lead = int(part.offset > known)
        if total - end < part.offset - known:
            seqs, first, last = self._read(connection, not self.newest_first, None, number + lead, total - end)
            first, last, seqs = last, first, seqs[::-1]
        else:
            seqs, first, last = self._read(
                connection, self.newest_first, place, number + lead, part.offset - known - lead
            )
        bookmarks.add(end, (last, seqs[-1]))
        if lead:
            bookmarks.add(part.offset, (first, seqs[0]))
        return seqs[lead:]

    def _read(
        self, connection: Connection, newest_first: bool, place: Place | None, limit: int, offset: int
    ) -> tuple[list[int], float, float]:
        """A part of it from one end or the other, with its first and last time."""
        source, parameters = self._source(place)
        order = "1 DESC, 2 DESC" if newest_first else "1, 2"
        query = f"""
            SELECT CAST(json_group_array(seq) AS BLOB), min(timestamp), max(timestamp)
            FROM ({source} ORDER BY {order} LIMIT ? OFFSET ?)
        """
        ((text, earliest, latest),) = connection.execute(query, (*parameters, limit, offset)).fetchall()
        seqs: list[int] = loads(text)
        return (seqs, latest, earliest) if newest_first else (seqs, earliest, latest)

    def _source(self, place: Place | None) -> tuple[str, list[Any]]:
        """A query for times and places of all of it, or of what comes behind a place."""
        window, within = self._window(place)
        for group in self.others:
            window += f"""
                AND EXISTS (
                    SELECT 1 FROM labelled p
                    WHERE p.label_id IN ({marks_clause(len(group))}) AND p.timestamp = d.timestamp AND p.seq = d.seq
                )
            """
            within += [shelf.id for shelf in group]
        ids = [shelf.id for shelf in self.shelves]
        if len(ids) > _MERGED:
            select = (
                f"SELECT DISTINCT d.timestamp, d.seq FROM labelled d WHERE d.label_id IN ({marks_clause(len(ids))})"
            )
            return f"{select} {window}", [*ids, *within]
        select = f"SELECT d.timestamp, d.seq FROM labelled d WHERE d.label_id = ? {window}"
        return " UNION ".join([select] * len(ids)), [value for id in ids for value in (id, *within)]

    def _window(self, place: Place | None) -> tuple[str, list[Any]]:
        """The condition for what is between the bounds, or behind a place that is, where nobody reads to the end."""
        if place is not None:
            return f"AND (d.timestamp, d.seq) {'<' if self.newest_first else '>'} (?, ?)", [*place]
        terms = [("AND d.timestamp >= ?", self.after), ("AND d.timestamp <= ?", self.before)]
        given = [(term, bound) for term, bound in terms if bound is not None]
        return " ".join([term for term, _ in given]), [bound for _, bound in given]


def _count_between(
    connection: Connection, shelf: Shelf, window: tuple[float | None, float | None], patience: int | None
) -> int | None:
    """
    How many entries of a shelf are between times; counted are those, or the others if those are fewer. None if that
    takes more patience.
    """
    after, before = window
    terms = [("timestamp >= ?", "timestamp < ?", after), ("timestamp <= ?", "timestamp > ?", before)]
    given = [term for term in terms if term[2] is not None]
    inside = [(" AND ".join([within for within, _, _ in given]), [bound for _, _, bound in given])]
    outside = [(beyond, [bound]) for _, beyond, bound in given]
    limit = _COUNTED_FIRST
    while given:
        if (number := _count(connection, shelf.id, inside, limit)) < limit:
            return number
        if (number := _count(connection, shelf.id, outside, limit)) < limit:
            return shelf.items - number
        limit *= 4
        if patience is not None and limit > patience:
            return None
    return shelf.items


def _count(
    connection: Connection, label_id: int, ranges: Sequence[tuple[str, Sequence[float | None]]], limit: int
) -> int:
    """How many entries are in these ranges, in each of them so many at most."""
    number = 0
    for condition, parameters in ranges:
        query = f"SELECT count(*) FROM (SELECT 1 FROM labelled WHERE label_id = ? AND {condition} LIMIT ?)"
        ((counted,),) = connection.execute(query, (label_id, *parameters, limit)).fetchall()
        number += counted
    return number
