"""
Statistics of queues in SQL: the largest queues, totals, the ledger, and the backlog by age. Each function runs inside
a transaction of the caller.

Ids begin with the time of arrival, so the index of ids alone tells the number of messages by age.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mediatord.store.interfaces.administration import QueueProtocol
from mediatord.store.interfaces.messages import (
    LEDGER_ENTRIES,
    AgeBucket,
    LargeQueue,
    MessageLedger,
    QueueBacklog,
    QueueTotals,
    StoreLedger,
    StoreStatistics,
)
from mediatord.store.queue_backlog import (
    add_queue_totals,
    build_backlog,
    complete_buckets,
    find_earliest,
    get_id_ranges,
)
from mediatord.store.sqlite.connection import StoreConnection

_TABLES: Mapping[QueueProtocol, str] = {"didcomm": "message", "decentrl": "pending_event"}
_TOTALS: Mapping[QueueProtocol, str] = {
    "didcomm": "SELECT count(*), coalesce(sum(messages), 0), coalesce(sum(bytes), 0) FROM queue",
    "decentrl": """
        SELECT count(*), coalesce(sum(pending), 0), coalesce(sum(pending_bytes), 0) FROM party_usage WHERE pending > 0
    """,
}
# A DID can have several queues, having changed hands, and events of the other protocol: candidates are those that
# have most of one kind, and all that have more than one. Recipients are looked up in two indexes.
_SELECT_LARGEST = """
    WITH longest AS (SELECT recipient_id FROM queue ORDER BY messages DESC LIMIT :top),
    fullest AS (SELECT party_id FROM party_usage WHERE pending > 0 ORDER BY pending DESC LIMIT :top),
    candidate (did, digest) AS (
        SELECT did, did_digest FROM recipient WHERE id IN longest
        UNION SELECT did, did_digest FROM recipient WHERE registered IS NULL
        UNION SELECT did, did_digest(did) FROM party WHERE id IN fullest
        UNION {in_both}
    ),
    amount (did, number) AS (
        SELECT c.did, q.messages FROM candidate c
            CROSS JOIN recipient r ON r.did_digest = c.digest AND r.did = c.did AND r.registered IS NOT NULL
            CROSS JOIN queue q ON q.account_id = r.account_id AND q.recipient_id = r.id
        UNION ALL
        SELECT c.did, q.messages FROM candidate c
            CROSS JOIN recipient r ON r.did_digest = c.digest AND r.did = c.did AND r.registered IS NULL
            CROSS JOIN queue q ON q.account_id = r.account_id AND q.recipient_id = r.id
        UNION ALL
        SELECT c.did, h.pending FROM candidate c CROSS JOIN party p ON p.did = c.did
            CROSS JOIN party_usage h ON h.party_id = p.id AND h.pending > 0
    )
    SELECT did, sum(number) AS total FROM amount GROUP BY did ORDER BY total DESC LIMIT :top
"""
# Starting from the smaller side.
_IN_BOTH_BY_QUEUE = """
    SELECT r.did, r.did_digest FROM queue q CROSS JOIN recipient r ON r.id = q.recipient_id
    CROSS JOIN party p ON p.did = r.did
"""
_IN_BOTH_BY_HOLDING = """
    SELECT p.did, did_digest(p.did) FROM party_usage h CROSS JOIN party p ON p.id = h.party_id
    WHERE h.pending > 0 AND EXISTS (
        SELECT 1 FROM recipient r
        WHERE r.did_digest = did_digest(p.did) AND r.did = p.did AND r.registered IS NOT NULL
    )
"""


def find_largest_queues(connection: StoreConnection, top: int) -> tuple[list[tuple[str, int]], int]:
    """
    The largest queues of messages and pending events together, and the sum of the others. Scans the tables of
    counters, which have a short row for each DID.
    """
    (queues, messages, _), (holdings, pending, _) = (read_totals(connection, protocol) for protocol in _TOTALS)
    in_both = _IN_BOTH_BY_QUEUE if queues < holdings else _IN_BOTH_BY_HOLDING
    largest = connection.execute(_SELECT_LARGEST.format(in_both=in_both), {"top": max(top, 0)}).fetchall()
    return largest, messages + pending - sum(number for _, number in largest)


def collect_statistics(connection: StoreConnection, top: int) -> StoreStatistics:
    largest, other = find_largest_queues(connection, top)
    return StoreStatistics(tuple(largest), other, read_ledger(connection))


def sum_queues(connection: StoreConnection) -> QueueTotals:
    """Totals of both protocols. Scans the same tables of counters."""
    totals = []
    for protocol, table in _TABLES.items():
        first = f"SELECT received_at FROM {table} WHERE seq = (SELECT min(seq) FROM {table})"
        (queues, messages, size), received_at = read_totals(connection, protocol), connection.select_value(first)
        totals.append(QueueTotals(messages, size, queues, None if received_at is None else float(received_at)))
    return add_queue_totals(*totals)


def read_totals(connection: StoreConnection, protocol: QueueProtocol) -> tuple[int, int, int]:
    """Queues of one protocol that are not empty, their messages, and the bytes of those."""
    totals: tuple[int, int, int] = connection.execute(_TOTALS[protocol]).fetchone()
    return totals


# Rows that are counted one by one: a million take a tenth of a second.
MAX_COUNTED_ROWS = 5_000_000

_SELECT_LEDGER = f"SELECT {', '.join(LEDGER_ENTRIES)} FROM ledger WHERE protocol = ?"
# By the narrowest indexes, and no further than is counted.
_COUNT_ROWS = "SELECT count(*) FROM (SELECT 1 FROM {} LIMIT ?)"
_COUNTED_TABLES: Mapping[QueueProtocol, str] = {
    "didcomm": "message INDEXED BY message_of_recipient",
    "decentrl": "pending_event INDEXED BY pending_event_of_recipient",
}


def read_ledger(connection: StoreConnection, most: int = MAX_COUNTED_ROWS) -> StoreLedger:
    """
    Read the ledger, and count the messages and pending events that are queued.

    :param most: rows that are counted.
    """
    ledgers = []
    for protocol, table in _COUNTED_TABLES.items():
        (entries,) = connection.execute(_SELECT_LEDGER, (protocol,)).fetchall()
        queued = connection.select_value(_COUNT_ROWS.format(table), (most + 1,))
        became = dict(zip(LEDGER_ENTRIES, entries, strict=True))
        ledgers.append(MessageLedger(**became, waiting=queued if queued <= most else None))
    return StoreLedger(*ledgers)


# Per age bucket: keys that are counted, and rows whose bytes are summed, at most.
_BUCKET_COUNT_LIMIT = 100_000
_BUCKET_SIZE_LIMIT = 5_000
# Registered and left-over recipients have an index each.
_QUEUE_SIZE_AND_AGE = " UNION ALL ".join(
    f"""
    SELECT q.bytes, (SELECT m.received_at FROM message m WHERE m.recipient_id = r.id ORDER BY m.seq LIMIT 1)
    FROM recipient r CROSS JOIN queue q ON q.account_id = r.account_id AND q.recipient_id = r.id
    WHERE r.did_digest = did_digest(:did) AND r.did = :did AND r.registered {condition}
    """
    for condition in ("IS NOT NULL", "IS NULL")
)
_PENDING_SIZE_AND_AGE = """
    SELECT h.pending_bytes, (
        SELECT e.received_at FROM pending_event e WHERE e.recipient_id = p.id ORDER BY e.seq LIMIT 1
    )
    FROM party p CROSS JOIN party_usage h ON h.party_id = p.id AND h.pending > 0 WHERE p.did = :did
"""
# Greater than any id.
_LAST_ID = "\U0010ffff"


def collect_backlog(connection: StoreConnection, bounds: Sequence[float], top: int) -> QueueBacklog:
    """
    As :meth:`~mediatord.store.interfaces.messages.IMessageStore.read_backlog`; reads the tables of counters as
    :func:`find_largest_queues` does.
    """
    totals = [read_totals(connection, protocol)[1:] for protocol in _TABLES]
    ranges = [(first or "", end or _LAST_ID) for first, end in get_id_ranges(bounds)]
    buckets = [
        complete_buckets([_count_bucket(connection, table, *ids) for ids in ranges], *total)
        for table, total in zip(_TABLES.values(), totals, strict=True)
    ]
    largest, _ = find_largest_queues(connection, top)
    found = build_backlog(buckets, totals, [_describe_queue(connection, did, number) for did, number in largest])
    return replace(found, ledger=read_ledger(connection))


def _count_bucket(connection: StoreConnection, table: str, first: str, end: str) -> AgeBucket:
    count = f"SELECT count(*) FROM (SELECT 1 FROM {table} WHERE id >= ? AND id < ? LIMIT {_BUCKET_COUNT_LIMIT})"
    number = connection.select_value(count, (first, end))
    if number >= _BUCKET_SIZE_LIMIT:
        return AgeBucket(number, None, number < _BUCKET_COUNT_LIMIT)
    weigh = f"SELECT coalesce(sum(size), 0) FROM (SELECT size FROM {table} WHERE id >= ? AND id < ?)"
    return AgeBucket(number, connection.select_value(weigh, (first, end)))


def _describe_queue(connection: StoreConnection, did: str, number: int) -> LargeQueue:
    # Not in one statement: the types of the times differ.
    rows = [
        row
        for query in (_QUEUE_SIZE_AND_AGE, _PENDING_SIZE_AND_AGE)
        for row in connection.execute(query, {"did": did})
    ]
    times = [None if at is None else float(at) for _, at in rows]
    return LargeQueue(did, number, sum([size for size, _ in rows]), find_earliest(*times))
