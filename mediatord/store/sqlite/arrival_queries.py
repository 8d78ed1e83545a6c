"""
Reads in SQL of messages and pending events that have arrived lately, and of both by their ids. Each function runs
inside a transaction of the caller.

Arrivals of the last seconds are at the end of the order of arrival: their start is found by binary search, and from
there the indexes by recipient are read. Since clocks of processes may differ, the search starts somewhat earlier; a
message that arrived while they differed by more may be missed, and stays queued.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mediatord.store.interfaces.decentrl import MAX_PAGE_BYTES, PendingEvent
from mediatord.store.interfaces.messages import ArrivalWindow, MessageArrival, StoredMessage, filter_valid_ids
from mediatord.store.sqlite.connection import StoreConnection, hash_did
from mediatord.store.sqlite.message_queries import SELECT_MESSAGES, parse_message

ARRIVAL_CLOCK_SKEW = 60.0

# The plus keeps SQLite from using an index for a term.
_SHOWN = "+m.expires_at > ? AND (+m.due_at IS NULL OR +m.due_at <= ?)"
_FIND_BY_SEQ = f"{SELECT_MESSAGES} WHERE m.seq IN ({{}}) ORDER BY m.seq"
_FIND_VISIBLE = f"FROM message m WHERE {_SHOWN} AND m.id IN ({{}})"
# CROSS JOIN, so that the query planner keeps the order of the tables.
_ARRIVED = """
    SELECT m.id, a.did, m.received_at FROM account a CROSS JOIN queue q ON q.account_id = a.id
        CROSS JOIN message m ON m.recipient_id = q.recipient_id AND m.seq >= ?
    WHERE +m.due_at IS NULL AND m.received_at < ? AND (m.received_at > ? OR m.received_at = ? AND +m.id > ?)
        AND a.did_key IN ({{}})
    ORDER BY m.received_at, m.id LIMIT {limit}
"""
# After `take_due_messages` this is the negative time of that, so the latest come first.
_HANDED_OUT = """
    SELECT m.id, a.did, -m.due_at FROM account a CROSS JOIN message m INDEXED BY message_delayed
        ON m.account_id = a.id AND m.due_at > ? AND m.due_at <= ?
    WHERE (+m.due_at < ? OR +m.id > ?) AND a.did_key IN ({{}})
    ORDER BY m.due_at DESC, m.id LIMIT {limit}
"""
_PENDING_COLUMNS = "e.seq, e.size, e.id, r.did, e.sender_did, e.received_at"
_FIND_PENDING = "FROM pending_event e CROSS JOIN party r ON r.id = e.recipient_id WHERE e.id IN ({})"
_ARRIVED_PENDING = """
    FROM party r CROSS JOIN pending_event e ON e.recipient_id = r.id AND e.seq >= ? WHERE r.did IN ({})
"""


def find_messages(connection: StoreConnection, now: float, ids: Iterable[str]) -> list[StoredMessage]:
    rows = connection.select_rows_in("m.seq, m.size", _FIND_VISIBLE, filter_valid_ids(ids), now, now)
    found = connection.select_exact_in(_FIND_BY_SEQ, [row[0] for row in _take_fitting(rows)])
    return [parse_message(row) for row in found]


def find_arrivals(
    connection: StoreConnection, accounts: Sequence[str], window: ArrivalWindow, limit: int
) -> list[MessageArrival]:
    since, until, after, limit = window.since, window.until, window.after, max(limit, 0)
    first = _find_first_seq(connection, "message", since - ARRIVAL_CLOCK_SKEW)
    # Not as JSON, which would round the times.
    rows: list[tuple[Any, ...]] = []
    keys = [hash_did(did) for did in dict.fromkeys(accounts)]
    for query, parameters in (
        (_ARRIVED, (first, until, since, since, after)),
        (_HANDED_OUT, (-until, min(-since, 0.0), -since, after)),
    ):
        rows += connection.select_exact_in(query.format(limit=limit), keys, *parameters)
    return _sort_arrivals([MessageArrival(*row) for row in rows], limit)


def find_pending_events(connection: StoreConnection, ids: Iterable[str]) -> list[PendingEvent]:
    rows = _take_fitting(connection.select_rows_in(_PENDING_COLUMNS, _FIND_PENDING, list(dict.fromkeys(ids))))
    sizes = {row[0]: row[1] for row in rows}
    payloads = connection.read_texts("pending_event", "payload", sizes, largest=sum(sizes.values()))
    return [
        PendingEvent(id, recipient, sender, payloads[seq], float(received_at))
        for seq, _, id, recipient, sender, received_at in rows
    ]


def find_pending_arrivals(
    connection: StoreConnection, recipients: Sequence[str], window: ArrivalWindow, limit: int
) -> list[MessageArrival]:
    first = _find_first_seq(connection, "pending_event", window.since - ARRIVAL_CLOCK_SKEW)
    dids = list(dict.fromkeys(recipients))
    rows = connection.select_rows_in("e.id, r.did, e.received_at", _ARRIVED_PENDING, dids, first)
    arrivals = [MessageArrival(id, did, float(time)) for id, did, time in rows]
    return _sort_arrivals([one for one in arrivals if window.has(one.at, one.id)], max(limit, 0))


def _sort_arrivals(arrivals: Sequence[MessageArrival], limit: int) -> list[MessageArrival]:
    return sorted(arrivals, key=lambda one: (one.at, one.id))[:limit]


def _find_first_seq(connection: StoreConnection, table: str, time: float) -> int:
    """A sequence number before which every arrival is earlier, if the order of arrival is that of times."""
    # In two subqueries, because SQLite uses the index for a single minimum or maximum only.
    ends = f"SELECT (SELECT min(seq) FROM {table}), (SELECT max(seq) + 1 FROM {table})"
    low, high = connection.execute(ends).fetchone()
    if low is None:
        return 0
    query = f"SELECT seq, CAST(received_at AS REAL) FROM {table} WHERE seq >= ? ORDER BY seq LIMIT 1"
    while low < high:
        middle = (low + high) // 2
        seq, received_at = connection.execute(query, (middle,)).fetchone()
        if received_at < time:
            low = seq + 1
        else:
            high = middle
    return int(low)


def _take_fitting(rows: Sequence[list[Any]]) -> list[list[Any]]:
    """
    The first rows in order of arrival that fit in a page, but at least one; rows begin with sequence number and size.
    """
    fitting: list[list[Any]] = []
    size = 0
    for row in sorted(rows):
        size += row[1]
        if fitting and size > MAX_PAGE_BYTES:
            break
        fitting.append(row)
    return fitting
