"""
Finding what another process has accepted, in SQL; each function runs inside a transaction of the caller.

What came in the last seconds is at the end of the order of arrival: where those seconds begin there is found by
halving, and from there on the indexes by recipient are read. Clocks of processes may differ a little, so it is begun
somewhat earlier; a message that came while they differed by more than that may be overlooked, and waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from sqlite3 import Connection
from typing import Any

from mediatord.interfaces import Arrival, StoredMessage, Window
from mediatord.interfaces.decentrl import LARGEST_SLICE, PendingEvent
from mediatord.store.sql_queues import read_messages
from mediatord.store.sql_rows import gather_in, gather_texts, key_of, select_in

CLOCKS_DIFFER = 60.0

# The plus keeps a term from being looked up in an index.
_SHOWN = "+m.expires_at > ? AND (+m.due_at IS NULL OR +m.due_at <= ?)"
_FIND = f"FROM message m WHERE {_SHOWN} AND m.id IN ({{}})"
# CROSS JOIN, because the order of the tables is never to be chosen otherwise.
_ARRIVED = """
    SELECT m.id, a.did, m.received_at FROM account a CROSS JOIN queue q ON q.account_id = a.id
        CROSS JOIN message m ON m.recipient_id = q.recipient_id AND m.seq >= ?
    WHERE +m.due_at IS NULL AND m.received_at < ? AND (m.received_at > ? OR m.received_at = ? AND +m.id > ?)
        AND a.did_key IN ({{}})
    ORDER BY m.received_at, m.id LIMIT {limit}
"""
# Of a message that was handed out this is minus the time of that, so the latest come first.
_HANDED_OUT = """
    SELECT m.id, a.did, -m.due_at FROM account a CROSS JOIN message m INDEXED BY message_delayed
        ON m.account_id = a.id AND m.due_at > ? AND m.due_at <= ?
    WHERE (+m.due_at < ? OR +m.id > ?) AND a.did_key IN ({{}})
    ORDER BY m.due_at DESC, m.id LIMIT {limit}
"""
_PENDING = "e.seq, e.size, e.id, r.did, e.sender_did, e.received_at"
_FIND_PENDING = "FROM pending_event e CROSS JOIN party r ON r.id = e.recipient_id WHERE e.id IN ({})"
_ARRIVED_PENDING = """
    FROM party r CROSS JOIN pending_event e ON e.recipient_id = r.id AND e.seq >= ? WHERE r.did IN ({})
"""


def find(connection: Connection, ids: Sequence[str], now: float) -> list[StoredMessage]:
    rows = gather_in(connection, "m.seq, m.size", _FIND, list(dict.fromkeys(ids)), now, now)
    return read_messages(connection, [row[0] for row in _fitting(rows)])


def arrived(connection: Connection, accounts: Sequence[str], window: Window, limit: int) -> list[Arrival]:
    since, until, after, limit = window.since, window.until, window.after, max(limit, 0)
    first = _first_after(connection, "message", since - CLOCKS_DIFFER)
    # Not as JSON, which would round the times.
    rows: list[tuple[Any, ...]] = []
    keys = [key_of(did) for did in dict.fromkeys(accounts)]
    for query, parameters in (
        (_ARRIVED, (first, until, since, since, after)),
        (_HANDED_OUT, (-until, min(-since, 0.0), -since, after)),
    ):
        rows += select_in(connection, query.format(limit=limit), keys, *parameters)
    return _first([Arrival(*row) for row in rows], limit)


def find_pending(connection: Connection, ids: Sequence[str]) -> list[PendingEvent]:
    rows = gather_in(connection, _PENDING, _FIND_PENDING, list(dict.fromkeys(ids)))
    return _read_pending(connection, _fitting(rows))


def arrived_pending(connection: Connection, recipients: Sequence[str], window: Window, limit: int) -> list[Arrival]:
    first = _first_after(connection, "pending_event", window.since - CLOCKS_DIFFER)
    dids = list(dict.fromkeys(recipients))
    rows = gather_in(connection, "e.id, r.did, e.received_at", _ARRIVED_PENDING, dids, first)
    arrivals = [Arrival(id, did, float(time)) for id, did, time in rows]
    return _first([one for one in arrivals if window.has(one.at, one.id)], max(limit, 0))


def _first(arrivals: Sequence[Arrival], limit: int) -> list[Arrival]:
    return sorted(arrivals, key=lambda one: (one.at, one.id))[:limit]


def _first_after(connection: Connection, table: str, time: float) -> int:
    """A place in the order of arrival before which everything came earlier, if it came in the order of its times."""
    # Apart, because only the one or the other alone is looked up.
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


def _fitting(rows: Sequence[list[Any]]) -> list[list[Any]]:
    """The first in order of arrival that fit in a slice, but at least one; rows begin with place and size."""
    fitting: list[list[Any]] = []
    size = 0
    for row in sorted(rows):
        size += row[1]
        if fitting and size > LARGEST_SLICE:
            break
        fitting.append(row)
    return fitting


def _read_pending(connection: Connection, rows: Sequence[list[Any]]) -> list[PendingEvent]:
    sizes = {row[0]: row[1] for row in rows}
    payloads = gather_texts(connection, "pending_event", "payload", sizes, largest=sum(sizes.values()))
    return [
        PendingEvent(id, recipient, sender, payloads[seq], float(received_at))
        for seq, _, id, recipient, sender, received_at in rows
    ]
