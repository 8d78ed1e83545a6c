"""
Reads of queued messages in SQL: fetching, status, arrivals, digests, totals and backlog. Each function runs inside a
transaction of the caller.

A message is visible from its due time until it expires. Counters of all queued messages are maintained by writes;
invisible ones are counted apart and subtracted, so that no cost grows with the length of a queue.

Arrivals of the last seconds are at the end of the order of arrival: their start is found by binary search, and from
there the indexes by recipient are read. Since clocks of processes may differ, the search starts somewhat earlier; a
message that arrived while they differed by more may be missed, and stays queued.

Ids begin with the time of arrival, so the index of ids alone tells the number of messages by age.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from heapq import merge
from itertools import islice
from sqlite3 import Connection
from typing import Any, NamedTuple

from mediatord.protocol.canonical_did import compute_did_digest
from mediatord.store.interfaces.decentrl import MAX_PAGE_BYTES, PendingEvent
from mediatord.store.interfaces.messages import (
    AgeBucket,
    ArrivalWindow,
    LargeQueue,
    MessageArrival,
    QueueBacklog,
    QueueStatus,
    QueueTotals,
    StoredMessage,
    StoreStatistics,
)
from mediatord.store.message_operations import (
    add_queue_totals,
    build_backlog,
    complete_buckets,
    find_earliest,
    get_id_ranges,
)
from mediatord.store.recipient_names import is_valid_unicode
from mediatord.store.sqlite.account_queries import get_account_id
from mediatord.store.sqlite.bulk_sql import (
    VALUES_PER_STATEMENT,
    format_placeholders,
    get_digest_head,
    hash_did,
    read_texts,
    select_exact_in,
    select_rows_in,
    split_chunks,
)
from mediatord.store.sqlite.queue_accounting import read_ledger

# Sequence numbers that are read at a time of each recipient when several are merged.
_SEQS_PER_READ = 32

# CROSS JOIN, so that the query planner keeps the order of the tables.
_SELECT_MESSAGES = """
    SELECT m.id, r.did, a.did, m.payload, m.form, m.received_at, m.expires_at, m.delivered, m.due_at, m.seq
    FROM message m CROSS JOIN recipient r ON r.id = m.recipient_id CROSS JOIN account a ON a.id = m.account_id
"""
# The plus keeps SQLite from using an index for a term: rows are read in order of arrival.
_VISIBLE = "+m.expires_at > :now AND (+m.due_at IS NULL OR +m.due_at <= :now)"
# Negative when it was returned by `take_due_messages`.
_STILL_DUE = "m.due_at > 0 AND m.due_at < m.expires_at AND +m.expires_at > :now"

# A DID can have several queues, having changed hands, and events of the other half: candidates are those that have
# most of one kind, and all that have more than one. Recipients are looked up in two indexes.
_SELECT_LARGEST = """
    WITH longest AS (SELECT recipient_id FROM queue ORDER BY messages DESC LIMIT :top),
    fullest AS (SELECT party_id FROM holding WHERE pending > 0 ORDER BY pending DESC LIMIT :top),
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
            CROSS JOIN holding h ON h.party_id = p.id AND h.pending > 0
    )
    SELECT did, sum(number) AS total FROM amount GROUP BY did ORDER BY total DESC LIMIT :top
"""
# Starting from the smaller side.
_IN_BOTH_BY_QUEUE = """
    SELECT r.did, r.did_digest FROM queue q CROSS JOIN recipient r ON r.id = q.recipient_id
    CROSS JOIN party p ON p.did = r.did
"""
_IN_BOTH_BY_HOLDING = """
    SELECT p.did, did_digest(p.did) FROM holding h CROSS JOIN party p ON p.id = h.party_id
    WHERE h.pending > 0 AND EXISTS (
        SELECT 1 FROM recipient r
        WHERE r.did_digest = did_digest(p.did) AND r.did = p.did AND r.registered IS NOT NULL
    )
"""


@dataclass(frozen=True, slots=True)
class _QueueRows:
    """
    The messages of an account, or of one of its recipients.

    :param recipients: numbers of those whose queue is not empty.
    :param part: condition that selects them in the queue table, or in an index, that begins with the account.
    """

    recipients: Sequence[int]
    part: str
    parameters: dict[str, Any]


def fetch_messages(
    connection: Connection, account: str, recipient_did: str | None, now: float, limit: int, max_bytes: int
) -> list[StoredMessage]:
    """The oldest visible messages that fit, but at least one."""
    scope = _find_scope(connection, account, recipient_did, now)
    if scope is None:
        return []
    found: list[StoredMessage] = []
    size = 0
    with closing(_iterate_visible_rows(connection, scope.recipients, now, max(limit, 0))) as rows:
        for row in rows:
            size += len(row[3])
            if found and size > max_bytes:
                break
            found.append(_parse_message(row))
    return found


def _iterate_visible_rows(
    connection: Connection, recipients: Sequence[int], now: float, limit: int
) -> Generator[tuple[Any, ...], None, None]:
    """The first visible messages of some recipients in order of arrival."""
    if len(recipients) == 1:
        (recipient,) = recipients
        query = f"{_SELECT_MESSAGES} WHERE m.recipient_id = :recipient AND {_VISIBLE} ORDER BY m.seq LIMIT :limit"
        with closing(connection.execute(query, {"recipient": recipient, "now": now, "limit": limit})) as rows:
            yield from rows
        return
    with ExitStack() as stack:
        lanes = [
            stack.enter_context(closing(_iterate_visible_seqs(connection, one, now, limit))) for one in recipients
        ]
        for seq in islice(merge(*lanes), limit):
            yield connection.execute(f"{_SELECT_MESSAGES} WHERE m.seq = ?", (seq,)).fetchone()


def _iterate_visible_seqs(
    connection: Connection, recipient: int, now: float, limit: int
) -> Generator[int, None, None]:
    """Sequence numbers of visible messages, read in small slices, since those of another recipient may be older."""
    after = -1
    query = f"""
        SELECT m.seq FROM message m WHERE m.recipient_id = :recipient AND m.seq > :after AND {_VISIBLE}
        ORDER BY m.seq LIMIT :some
    """
    while limit > 0:
        some = min(limit, _SEQS_PER_READ)
        parameters = {"recipient": recipient, "after": after, "now": now, "some": some}
        seqs = [seq for (seq,) in connection.execute(query, parameters)]
        yield from seqs
        if len(seqs) < some:
            return
        after = seqs[-1]
        limit -= some


def read_messages(connection: Connection, seqs: Sequence[int]) -> list[StoredMessage]:
    """Messages by their sequence numbers, in that order."""
    found: list[StoredMessage] = []
    for some in split_chunks(sorted(seqs), VALUES_PER_STATEMENT):
        rows = connection.execute(
            f"{_SELECT_MESSAGES} WHERE m.seq IN ({format_placeholders(len(some))}) ORDER BY m.seq", some
        )
        found += [_parse_message(row) for row in rows]
    return found


def get_queue_status(connection: Connection, account: str, recipient_did: str | None, now: float) -> QueueStatus:
    scope = _find_scope(connection, account, recipient_did, now)
    if scope is None:
        return QueueStatus(0, 0)

    def ask(query: str) -> Any:
        return connection.execute(query, scope.parameters).fetchone()

    counted = "SELECT count(*), coalesce(sum(m.size), 0) FROM message m"
    all_messages, all_bytes = ask(
        f"SELECT coalesce(sum(messages), 0), coalesce(sum(bytes), 0) FROM queue m WHERE {scope.part}"
    )
    expired, expired_bytes = ask(f"{counted} INDEXED BY message_expiry WHERE m.expires_at <= :now AND {scope.part}")
    held, held_bytes = ask(
        f"{counted} INDEXED BY message_delayed WHERE m.due_at > :now AND m.expires_at > :now AND {scope.part}"
    )
    if all_messages == expired + held:
        return QueueStatus(0, 0)
    end = f"SELECT m.seq FROM message m WHERE m.recipient_id = q.recipient_id AND {_VISIBLE} ORDER BY m.seq"
    ends = (
        f"SELECT min(({end} LIMIT 1)), max(({end} DESC LIMIT 1)) FROM queue q WHERE {scope.part.replace('m.', 'q.')}"
    )
    oldest, newest = (_get_received_at(connection, seq) for seq in ask(ends))
    return QueueStatus(all_messages - expired - held, all_bytes - expired_bytes - held_bytes, oldest, newest)


def _get_received_at(connection: Connection, seq: int) -> float:
    ((time,),) = connection.execute("SELECT received_at FROM message WHERE seq = ?", (seq,)).fetchall()
    return float(time)


def find_next_due(connection: Connection, now: float) -> float | None:
    row = connection.execute(
        f"SELECT m.due_at FROM message m WHERE {_STILL_DUE} ORDER BY m.due_at LIMIT 1", {"now": now}
    ).fetchone()
    return None if row is None else row[0]


def take_due_messages(connection: Connection, now: float, limit: int) -> list[StoredMessage]:
    rows = connection.execute(
        f"{_SELECT_MESSAGES} WHERE {_STILL_DUE} AND m.due_at <= :now ORDER BY m.due_at, m.seq LIMIT :limit",
        {"now": now, "limit": max(limit, 0)},
    ).fetchall()
    connection.executemany("UPDATE message SET due_at = ? WHERE seq = ?", [(-now, row[9]) for row in rows])
    return [_parse_message(row) for row in rows]


def find_largest_queues(connection: Connection, top: int) -> tuple[list[tuple[str, int]], int]:
    """
    The largest queues of messages and pending events together, and the sum of the others. Scans the tables of
    counters, which have a short row for each DID.
    """
    queues, messages = connection.execute("SELECT count(*), coalesce(sum(messages), 0) FROM queue").fetchone()
    holdings, pending = connection.execute(
        "SELECT count(*), coalesce(sum(pending), 0) FROM holding WHERE pending > 0"
    ).fetchone()
    in_both = _IN_BOTH_BY_QUEUE if queues < holdings else _IN_BOTH_BY_HOLDING
    largest = connection.execute(_SELECT_LARGEST.format(in_both=in_both), {"top": max(top, 0)}).fetchall()
    return largest, messages + pending - sum(number for _, number in largest)


def collect_statistics(connection: Connection, top: int) -> StoreStatistics:
    largest, other = find_largest_queues(connection, top)
    return StoreStatistics(tuple(largest), other, read_ledger(connection))


def sum_queues(connection: Connection) -> QueueTotals:
    """Totals of both halves. Scans the same tables of counters."""
    queues = connection.execute(
        """
        SELECT coalesce(sum(messages), 0), coalesce(sum(bytes), 0), count(*),
            (SELECT received_at FROM message WHERE seq = (SELECT min(seq) FROM message)) FROM queue
        """
    ).fetchone()
    messages, size, recipients, received_at = connection.execute(
        """
        SELECT coalesce(sum(pending), 0), coalesce(sum(pending_bytes), 0), count(*),
            (SELECT received_at FROM pending_event WHERE seq = (SELECT min(seq) FROM pending_event))
            FROM holding WHERE pending > 0
        """
    ).fetchone()
    events = QueueTotals(messages, size, recipients, None if received_at is None else float(received_at))
    return add_queue_totals(QueueTotals(*queues), events)


def _find_scope(connection: Connection, account: str, recipient_did: str | None, now: float) -> _QueueRows | None:
    if not is_valid_unicode(account) or not is_valid_unicode(recipient_did or ""):
        return None
    account_number = get_account_id(connection, account)
    if account_number is None:
        return None
    if recipient_did is None:
        rows = connection.execute("SELECT recipient_id FROM queue WHERE account_id = ?", (account_number,))
        return _QueueRows([id for (id,) in rows], "m.account_id = :account", {"account": account_number, "now": now})
    # Each half has an index of its own; at most one of them finds something.
    row = connection.execute(
        """
        SELECT id FROM recipient WHERE did_digest = :digest AND account_id = :account AND registered IS NOT NULL
        UNION ALL SELECT id FROM recipient WHERE did_digest = :digest AND account_id = :account AND registered IS NULL
        """,
        {"digest": compute_did_digest(recipient_did), "account": account_number},
    ).fetchone()
    if row is None:
        return None
    return _QueueRows(
        [row[0]],
        "m.account_id = :account AND m.recipient_id = :recipient",
        {"account": account_number, "recipient": row[0], "now": now},
    )


def _parse_message(row: tuple[Any, ...]) -> StoredMessage:
    return StoredMessage(
        id=row[0],
        recipient_did=row[1],
        account=row[2],
        payload=row[3],
        form=row[4],
        received_at=row[5],
        expires_at=row[6],
        status="delivered" if row[7] else "pending",
        due_at=row[8] if row[8] is not None and row[8] > 0 else None,
    )


ARRIVAL_CLOCK_SKEW = 60.0

# The plus keeps SQLite from using an index for a term.
_SHOWN = "+m.expires_at > ? AND (+m.due_at IS NULL OR +m.due_at <= ?)"
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


def find_messages(connection: Connection, ids: Sequence[str], now: float) -> list[StoredMessage]:
    rows = select_rows_in(connection, "m.seq, m.size", _FIND_VISIBLE, list(dict.fromkeys(ids)), now, now)
    return read_messages(connection, [row[0] for row in _take_fitting(rows)])


def find_arrivals(
    connection: Connection, accounts: Sequence[str], window: ArrivalWindow, limit: int
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
        rows += select_exact_in(connection, query.format(limit=limit), keys, *parameters)
    return _sort_arrivals([MessageArrival(*row) for row in rows], limit)


def find_pending_events(connection: Connection, ids: Sequence[str]) -> list[PendingEvent]:
    rows = select_rows_in(connection, _PENDING_COLUMNS, _FIND_PENDING, list(dict.fromkeys(ids)))
    return _read_pending_events(connection, _take_fitting(rows))


def find_pending_arrivals(
    connection: Connection, recipients: Sequence[str], window: ArrivalWindow, limit: int
) -> list[MessageArrival]:
    first = _find_first_seq(connection, "pending_event", window.since - ARRIVAL_CLOCK_SKEW)
    dids = list(dict.fromkeys(recipients))
    rows = select_rows_in(connection, "e.id, r.did, e.received_at", _ARRIVED_PENDING, dids, first)
    arrivals = [MessageArrival(id, did, float(time)) for id, did, time in rows]
    return _sort_arrivals([one for one in arrivals if window.has(one.at, one.id)], max(limit, 0))


def _sort_arrivals(arrivals: Sequence[MessageArrival], limit: int) -> list[MessageArrival]:
    return sorted(arrivals, key=lambda one: (one.at, one.id))[:limit]


def _find_first_seq(connection: Connection, table: str, time: float) -> int:
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


def _read_pending_events(connection: Connection, rows: Sequence[list[Any]]) -> list[PendingEvent]:
    sizes = {row[0]: row[1] for row in rows}
    payloads = read_texts(connection, "pending_event", "payload", sizes, largest=sum(sizes.values()))
    return [
        PendingEvent(id, recipient, sender, payloads[seq], float(received_at))
        for seq, _, id, recipient, sender, received_at in rows
    ]


# Messages whose digests are compared in one read; those of one recipient are compared together.
COMPARED_AT_A_TIME = 20_000

_DIGEST_PATTERN = re.compile("[0-9a-f]{64}")
_QUEUES_OF_ACCOUNT = (
    "SELECT recipient_id, messages FROM queue WHERE account_id = ? AND recipient_id > ? ORDER BY recipient_id"
)
_FIND_BY_DIGEST = "SELECT m.id, m.digest FROM message m WHERE m.recipient_id = ? AND m.digest_head IN ({})"


class DigestMatches(NamedTuple):
    """
    Messages that were found by digest.

    :param ids: of the messages.
    :param after: number of the last recipient that was searched; None when it was the last of all.
    """

    ids: list[str]
    after: int | None


def parse_digests(ids: Iterable[str]) -> list[bytes]:
    """Those of the ids that are a SHA-256 in lower-case hexadecimal."""
    digests = []
    for id_ in ids:
        if len(id_) == 64 and _DIGEST_PATTERN.fullmatch(id_):
            digests.append(bytes.fromhex(id_))
    return digests


def find_by_digest(connection: Connection, account: str, wanted: Sequence[bytes], after: int) -> DigestMatches:
    """Messages whose payload has one of these digests, of recipients with greater numbers."""
    number = get_account_id(connection, account)
    if number is None:
        return DigestMatches([], None)
    heads, known = [get_digest_head(digest) for digest in wanted], set(wanted)
    ids: list[str] = []
    left = COMPARED_AT_A_TIME
    for recipient, messages in _list_queues(connection, number, after):
        if left <= 0:
            return DigestMatches(ids, after)
        rows = select_exact_in(connection, _FIND_BY_DIGEST, heads, recipient)
        ids += [id for id, digest in rows if digest in known]
        after = recipient
        left -= messages
    return DigestMatches(ids, None)


def _list_queues(connection: Connection, number: int, after: int) -> Iterator[tuple[int, int]]:
    yield from connection.execute(_QUEUES_OF_ACCOUNT, (number, after))


# Per age bucket: keys that are counted, and rows whose bytes are summed, at most.
_COHORT_COUNT_LIMIT = 100_000
_COHORT_SIZE_LIMIT = 5_000
_TOTALS = {
    "message": "SELECT coalesce(sum(messages), 0), coalesce(sum(bytes), 0) FROM queue",
    "pending_event": """
        SELECT coalesce(sum(pending), 0), coalesce(sum(pending_bytes), 0) FROM holding WHERE pending > 0
    """,
}
# Registered and left-over recipients have an index each.
_QUEUE_SIZE_AND_AGE = " UNION ALL ".join(
    f"""
    SELECT q.bytes, (SELECT m.received_at FROM message m WHERE m.recipient_id = r.id ORDER BY m.seq LIMIT 1)
    FROM recipient r CROSS JOIN queue q ON q.account_id = r.account_id AND q.recipient_id = r.id
    WHERE r.did_digest = did_digest(:did) AND r.did = :did AND r.registered {half}
    """
    for half in ("IS NOT NULL", "IS NULL")
)
_PENDING_SIZE_AND_AGE = """
    SELECT h.pending_bytes, (
        SELECT e.received_at FROM pending_event e WHERE e.recipient_id = p.id ORDER BY e.seq LIMIT 1
    )
    FROM party p CROSS JOIN holding h ON h.party_id = p.id AND h.pending > 0 WHERE p.did = :did
"""
# Greater than any id.
_LAST_ID = "\U0010ffff"


def collect_backlog(connection: Connection, bounds: Sequence[float], top: int) -> QueueBacklog:
    """
    As :meth:`~mediatord.store.interfaces.messages.IMessageStore.read_backlog`; reads the tables of counters as
    :func:`find_largest_queues` does.
    """
    totals = {table: connection.execute(query).fetchone() for table, query in _TOTALS.items()}
    halves = [complete_buckets(_count_buckets(connection, table, bounds), *total) for table, total in totals.items()]
    largest, _ = find_largest_queues(connection, top)
    found = build_backlog(
        halves, totals.values(), [_describe_queue(connection, did, number) for did, number in largest]
    )
    return replace(found, books=read_ledger(connection))


def _count_buckets(connection: Connection, table: str, bounds: Sequence[float]) -> list[AgeBucket]:
    return [_count_bucket(connection, table, first or "", end or _LAST_ID) for first, end in get_id_ranges(bounds)]


def _count_bucket(connection: Connection, table: str, first: str, end: str) -> AgeBucket:
    count = f"SELECT count(*) FROM (SELECT 1 FROM {table} WHERE id >= ? AND id < ? LIMIT {_COHORT_COUNT_LIMIT})"
    ((number,),) = connection.execute(count, (first, end)).fetchall()
    if number >= _COHORT_SIZE_LIMIT:
        return AgeBucket(number, None, number < _COHORT_COUNT_LIMIT)
    weigh = f"SELECT coalesce(sum(size), 0) FROM (SELECT size FROM {table} WHERE id >= ? AND id < ?)"
    ((size,),) = connection.execute(weigh, (first, end)).fetchall()
    return AgeBucket(number, size)


def _describe_queue(connection: Connection, did: str, number: int) -> LargeQueue:
    # Not in one statement: the types of the times differ.
    rows = [
        row
        for query in (_QUEUE_SIZE_AND_AGE, _PENDING_SIZE_AND_AGE)
        for row in connection.execute(query, {"did": did})
    ]
    times = [None if at is None else float(at) for _, at in rows]
    return LargeQueue(did, number, sum([size for size, _ in rows]), find_earliest(*times))
