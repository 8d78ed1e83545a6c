"""
Search of stored and public events by labels, in SQL. Each function runs inside a transaction of the caller.

A label is a text of some kind that events of an owner have in common. An event has an entry under each of its labels,
in display order, and each label has the number of its entries.

A search for one label is a range of its entries, whose number is known. A search for several reads the entries of the
rarest, and probes each for the others; that, and bounds of time, require counting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mediatord.protocol.encoding import loads
from mediatord.store.caches import EventPosition, PageCursorCache, PageCursors
from mediatord.store.interfaces.decentrl import PageRequest
from mediatord.store.sqlite.connection import StoreConnection, format_placeholders
from mediatord.store.sqlite.decentrl_queries import PartyRow

# Kinds of labels as stored. An owner has one label of each of the first three, without a text.
STORED_LABEL, UNPROCESSED_LABEL, PUBLIC_LABEL, TAG_LABEL, PARTICIPANT_LABEL, PUBLIC_TAG_LABEL, CHANNEL_LABEL = range(
    7
)

# CROSS JOIN, so that the query planner keeps the order of the tables.
_SELECT_LABELS = """
    FROM {} w CROSS JOIN label l ON l.owner_id = w.column2 AND l.kind = w.column3 AND l.text = w.column4
"""
# By name, because otherwise the index would not be used.
_DELETE_ENTRIES = """
    WITH gone (label_id, timestamp, seq) AS (VALUES {})
    DELETE FROM labelled WHERE (label_id, timestamp, seq) IN gone
"""
_INSERT_LABELS = "INSERT OR ROLLBACK INTO label (owner_id, kind, text, items)"


class EventLabel(NamedTuple):
    """A property that events of one owner may have in common."""

    owner_id: int
    kind: int
    text: str = ""


class LabelRecord(NamedTuple):
    """A label by its number, with the number of its events."""

    id: int
    items: int


class LabelEntry(NamedTuple):
    """Position of an event under a label."""

    label_id: int
    timestamp: float
    seq: int


def find_labels(connection: StoreConnection, labels: Sequence[EventLabel]) -> dict[EventLabel, LabelRecord]:
    """Those of the labels that exist."""
    rows = connection.select_matching_rows("l.id, l.items", _SELECT_LABELS, labels)
    return {labels[number]: LabelRecord(*row) for number, row in rows}


def intern_labels(connection: StoreConnection, events: Mapping[EventLabel, int]) -> dict[EventLabel, int]:
    """Numbers of labels, each with events to be added to it; labels are created as needed."""
    ids = {label: label_record.id for label, label_record in find_labels(connection, list(events)).items()}
    _change_label_counts(
        connection,
        "UPDATE label SET items = items + ? WHERE id IN ({})",
        {ids[label]: events[label] for label in ids},
    )
    new = [label for label in events if label not in ids]
    numbers = connection.insert_numbered_rows(_INSERT_LABELS, [(*label, events[label]) for label in new])
    return ids | dict(zip(new, numbers, strict=True))


def release_labels(connection: StoreConnection, label_ids: Iterable[int]) -> None:
    """Remove one event from each of these labels; a label without events is deleted."""
    fewer = Counter(label_ids)
    _change_label_counts(connection, "UPDATE label SET items = items - ? WHERE id IN ({})", fewer)
    connection.execute_in("DELETE FROM label WHERE items = 0 AND id IN ({})", list(fewer))


def insert_label_entries(connection: StoreConnection, entries: Collection[LabelEntry]) -> None:
    # In the order of the table, so that neighbours are inserted one after another.
    connection.insert_rows("INSERT OR ROLLBACK INTO labelled (label_id, timestamp, seq)", sorted(entries))


def delete_label_entries(connection: StoreConnection, entries: Collection[LabelEntry]) -> None:
    connection.execute_values(_DELETE_ENTRIES, sorted(entries))


def read_label_texts(connection: StoreConnection, label_ids: Collection[int]) -> dict[int, str]:
    """Texts of labels, by their numbers."""
    return dict(connection.select_rows_in("id, text", "FROM label WHERE id IN ({})", list(label_ids)))


def format_tag_ids(label_ids: Iterable[int]) -> str:
    """Tags of an event by number, in order, as they are stored."""
    return " ".join(map(str, label_ids))


def parse_tag_ids(written: str) -> list[int]:
    """Numbers from the result of :func:`format_tag_ids`."""
    return [int(id) for id in written.split()]


def _change_label_counts(connection: StoreConnection, statement: str, numbers: Mapping[int, int]) -> None:
    """Change the counters of labels, together for those that change by the same number."""
    alike: dict[int, list[int]] = {}
    for id, number in numbers.items():
        alike.setdefault(number, []).append(id)
    for number, ids in alike.items():
        connection.execute_in(statement, ids, number)


# Up to this number sorted ranges are merged as they are read; more are read and then sorted.
_MAX_MERGED_RANGES = 8
# Cursors of lists of more labels than this are not cached.
_MAX_CACHED_LABELS = 64
_FIRST_COUNT_LIMIT = 1_024


@dataclass(frozen=True, slots=True)
class EventSearch:
    """
    Conditions of a search.

    :param everything: label of all events that are searched.
    :param groups: an event has to have at least one label of each group.
    :param after: inclusive, like `before`.
    """

    everything: EventLabel
    groups: tuple[tuple[EventLabel, ...], ...] = ()
    after: float | None = None
    before: float | None = None
    newest_first: bool = False


@dataclass(frozen=True, slots=True)
class PageReadOptions:
    """
    How a page is read.

    :param patience: approximate number of entries that may be counted; None for any number.
    """

    part: PageRequest
    page_cursors: PageCursorCache
    patience: int | None = None


def find_events(
    connection: StoreConnection, party: PartyRow, search: EventSearch, reading: PageReadOptions
) -> tuple[list[int], int] | None:
    """Sequence numbers of the events of a page, and the number of all matches; None if that needs more patience."""
    groups = _find_groups(connection, search)
    if not all(groups):
        return [], 0
    listing = _EventList(groups[0], tuple(groups[1:]), search.after, search.before, search.newest_first)
    small = sum(map(len, groups)) <= _MAX_CACHED_LABELS
    cursors = reading.page_cursors.of((party.id, listing), party.edition) if small else PageCursors(party.edition)
    if cursors.total is None:
        cursors.total = listing.count(connection, reading.patience)
        if cursors.total is None:
            return None
    return listing.page(connection, reading.part, cursors.total, cursors), cursors.total


_LabelGroup = tuple[LabelRecord, ...]


def _find_groups(connection: StoreConnection, search: EventSearch) -> list[_LabelGroup]:
    """
    Groups of labels of which an event has to have one each, the rarest group first; an empty one if nothing matches.
    """
    labels = [search.everything, *(label for group in search.groups for label in group)]
    label_records = find_labels(connection, list(dict.fromkeys(labels)))
    everything = label_records.get(search.everything)
    if everything is None:
        return [()]
    found = [
        tuple([label_records[label] for label in dict.fromkeys(group) if label in label_records])
        for group in search.groups
    ]
    # A label that every event has is no condition.
    telling = [group for group in found if not any(label_record.items == everything.items for label_record in group)]
    return sorted(telling, key=lambda group: sum([label_record.items for label_record in group])) or [(everything,)]


@dataclass(frozen=True, slots=True)
class _EventList:
    """A list of events: those under some labels that are also under one of each of the other groups."""

    label_records: _LabelGroup
    others: tuple[_LabelGroup, ...]
    after: float | None
    before: float | None
    newest_first: bool

    def count(self, connection: StoreConnection, patience: int | None) -> int | None:
        """Its length; None if that needs more patience."""
        if len(self.label_records) == 1 and not self.others:
            return _count_in_time_range(connection, self.label_records[0], (self.after, self.before), patience)
        if patience is not None and sum([label_record.items for label_record in self.label_records]) > patience:
            return None
        source, parameters = self._source(None)
        # With a limit, because without it SQLite would drop the order, which merging needs.
        query = f"SELECT count(*) FROM ({source} ORDER BY 1, 2 LIMIT -1)"
        ((total,),) = connection.execute(query, parameters).fetchall()
        return int(total)

    def page(self, connection: StoreConnection, part: PageRequest, total: int, cursors: PageCursors) -> list[int]:
        """A slice of it, read from the nearest known position."""
        number = min(part.limit, total - part.offset)
        if number <= 0:
            return []
        end = part.offset + number
        known, place = cursors.before(part.offset)
        # After a long scan the event before the page is read as well, as the cursor for the same page.
        lead = int(part.offset > known)
        if total - end < part.offset - known:
            seqs, first, last = self._read(connection, not self.newest_first, None, number + lead, total - end)
            first, last, seqs = last, first, seqs[::-1]
        else:
            seqs, first, last = self._read(
                connection, self.newest_first, place, number + lead, part.offset - known - lead
            )
        cursors.add(end, (last, seqs[-1]))
        if lead:
            cursors.add(part.offset, (first, seqs[0]))
        return seqs[lead:]

    def _read(
        self, connection: StoreConnection, newest_first: bool, place: EventPosition | None, limit: int, offset: int
    ) -> tuple[list[int], float, float]:
        """A part of it from either end, with its first and last position."""
        source, parameters = self._source(place)
        order = "1 DESC, 2 DESC" if newest_first else "1, 2"
        query = f"""
            SELECT CAST(json_group_array(seq) AS BLOB), min(timestamp), max(timestamp)
            FROM ({source} ORDER BY {order} LIMIT ? OFFSET ?)
        """
        ((text, earliest, latest),) = connection.execute(query, (*parameters, limit, offset)).fetchall()
        seqs: list[int] = loads(text)
        return (seqs, latest, earliest) if newest_first else (seqs, earliest, latest)

    def _source(self, place: EventPosition | None) -> tuple[str, list[Any]]:
        """Query for times and sequence numbers of all of it, or of the part behind a position."""
        window, within = self._window(place)
        for group in self.others:
            window += f"""
                AND EXISTS (
                    SELECT 1 FROM labelled p
                    WHERE p.label_id IN ({format_placeholders(len(group))})
                    AND p.timestamp = d.timestamp AND p.seq = d.seq
                )
            """
            within += [label_record.id for label_record in group]
        ids = [label_record.id for label_record in self.label_records]
        if len(ids) > _MAX_MERGED_RANGES:
            marks = format_placeholders(len(ids))
            select = f"SELECT DISTINCT d.timestamp, d.seq FROM labelled d WHERE d.label_id IN ({marks})"
            return f"{select} {window}", [*ids, *within]
        select = f"SELECT d.timestamp, d.seq FROM labelled d WHERE d.label_id = ? {window}"
        return " UNION ".join([select] * len(ids)), [value for id in ids for value in (id, *within)]

    def _window(self, place: EventPosition | None) -> tuple[str, list[Any]]:
        """Condition for events between the bounds, or behind a position if they are read to the end."""
        if place is not None:
            return f"AND (d.timestamp, d.seq) {'<' if self.newest_first else '>'} (?, ?)", [*place]
        terms = [("AND d.timestamp >= ?", self.after), ("AND d.timestamp <= ?", self.before)]
        given = [(term, bound) for term, bound in terms if bound is not None]
        return " ".join([term for term, _ in given]), [bound for _, bound in given]


def _count_in_time_range(
    connection: StoreConnection,
    label_record: LabelRecord,
    window: tuple[float | None, float | None],
    patience: int | None,
) -> int | None:
    """
    Number of entries of a label between two times, counted inside or outside of them, whichever are fewer; None if
    that needs more patience.
    """
    after, before = window
    terms = [("timestamp >= ?", "timestamp < ?", after), ("timestamp <= ?", "timestamp > ?", before)]
    given = [term for term in terms if term[2] is not None]
    inside = [(" AND ".join([within for within, _, _ in given]), [bound for _, _, bound in given])]
    outside = [(beyond, [bound]) for _, beyond, bound in given]
    limit = _FIRST_COUNT_LIMIT
    while given:
        if (number := _count_entries(connection, label_record.id, inside, limit)) < limit:
            return number
        if (number := _count_entries(connection, label_record.id, outside, limit)) < limit:
            return label_record.items - number
        limit *= 4
        if patience is not None and limit > patience:
            return None
    return label_record.items


def _count_entries(
    connection: StoreConnection, label_id: int, ranges: Sequence[tuple[str, Sequence[float | None]]], limit: int
) -> int:
    """Number of entries in these ranges, with a maximum for each."""
    number = 0
    for condition, parameters in ranges:
        query = f"SELECT count(*) FROM (SELECT 1 FROM labelled WHERE label_id = ? AND {condition} LIMIT ?)"
        ((counted,),) = connection.execute(query, (label_id, *parameters, limit)).fetchall()
        number += counted
    return number
