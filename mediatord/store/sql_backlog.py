"""
What waits by age and by queue, in SQL; runs inside a transaction of the caller.

Ids begin with the time that something came, so the index of ids alone says how much came when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from sqlite3 import Connection

from mediatord.interfaces import Backlog, Cohort, LongQueue
from mediatord.store.backlog import completed, earliest, spans, together
from mediatord.store.sql_ledger import ledger
from mediatord.store.sql_queues import queue_sizes

# Of each cohort: keys that are counted, and rows at most whose bytes are added up.
_COUNTED = 100_000
_WEIGHED = 5_000
_TOTALS = {
    "message": "SELECT coalesce(sum(messages), 0), coalesce(sum(bytes), 0) FROM queue",
    "pending_event": """
        SELECT coalesce(sum(pending), 0), coalesce(sum(pending_bytes), 0) FROM holding WHERE pending > 0
    """,
}
# Each half of the recipients is looked up in an index of its own.
_QUEUES = " UNION ALL ".join(
    f"""
    SELECT q.bytes, (SELECT m.received_at FROM message m WHERE m.recipient_id = r.id ORDER BY m.seq LIMIT 1)
    FROM recipient r CROSS JOIN queue q ON q.account_id = r.account_id AND q.recipient_id = r.id
    WHERE r.did_digest = did_digest(:did) AND r.did = :did AND r.registered {half}
    """
    for half in ("IS NOT NULL", "IS NULL")
)
_PENDING = """
    SELECT h.pending_bytes, (
        SELECT e.received_at FROM pending_event e WHERE e.recipient_id = p.id ORDER BY e.seq LIMIT 1
    )
    FROM party p CROSS JOIN holding h ON h.party_id = p.id AND h.pending > 0 WHERE p.did = :did
"""
# No id comes after it.
_LAST = "\U0010ffff"


def backlog(connection: Connection, bounds: Sequence[float], top: int) -> Backlog:
    """As :meth:`~mediatord.interfaces.IMessageStore.backlog`; reads the tables of counters like `queue_sizes`."""
    totals = {table: connection.execute(query).fetchone() for table, query in _TOTALS.items()}
    halves = [completed(_cohorts(connection, table, bounds), *total) for table, total in totals.items()]
    largest, _ = queue_sizes(connection, top)
    found = together(halves, totals.values(), [_queue(connection, did, number) for did, number in largest])
    return replace(found, books=ledger(connection))


def _cohorts(connection: Connection, table: str, bounds: Sequence[float]) -> list[Cohort]:
    return [_cohort(connection, table, first or "", end or _LAST) for first, end in spans(bounds)]


def _cohort(connection: Connection, table: str, first: str, end: str) -> Cohort:
    count = f"SELECT count(*) FROM (SELECT 1 FROM {table} WHERE id >= ? AND id < ? LIMIT {_COUNTED})"
    ((number,),) = connection.execute(count, (first, end)).fetchall()
    if number >= _WEIGHED:
        return Cohort(number, None, number < _COUNTED)
    weigh = f"SELECT coalesce(sum(size), 0) FROM (SELECT size FROM {table} WHERE id >= ? AND id < ?)"
    ((size,),) = connection.execute(weigh, (first, end)).fetchall()
    return Cohort(number, size)


def _queue(connection: Connection, did: str, number: int) -> LongQueue:
    # Not in one statement: the times of the two are of different types.
    rows = [row for query in (_QUEUES, _PENDING) for row in connection.execute(query, {"did": did})]
    times = [None if at is None else float(at) for _, at in rows]
    return LongQueue(did, number, sum([size for size, _ in rows]), earliest(*times))
