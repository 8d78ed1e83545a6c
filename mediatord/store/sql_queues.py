"""
Reading what waits, in SQL; each function runs inside a transaction of the caller.

A message is visible from when it is due until it expires. Counters of all that waits are kept by those who change it;
what is not visible is counted apart and taken off, so nothing here grows with the length of a queue.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from sqlite3 import Connection
from typing import Any

from mediatord.interfaces import QueueStatus, StoredMessage, StoreStatistics, Waiting
from mediatord.protocol.canonical_did import did_digest
from mediatord.store.sql_accounts import account_id
from mediatord.store.sql_ledger import ledger
from mediatord.store.sql_rows import VALUES_AT_A_TIME, marks_clause, pieces
from mediatord.store.texts import is_storable
from mediatord.store.waiting import both

# Of each of several recipients of an account, when their messages are brought into one order.
_MERGED_AT_A_TIME = 32

# CROSS JOIN, because the order of the tables is never to be chosen otherwise.
_MESSAGE = """
    SELECT m.id, r.did, a.did, m.payload, m.form, m.received_at, m.expires_at, m.delivered, m.due_at, m.seq
    FROM message m CROSS JOIN recipient r ON r.id = m.recipient_id CROSS JOIN account a ON a.id = m.account_id
"""
# The plus keeps a term from being looked up in an index: here the order of arrival is what to go by.
_VISIBLE = "+m.expires_at > :now AND (+m.due_at IS NULL OR +m.due_at <= :now)"
# Not negative: then it was handed out.
_STILL_DUE = "m.due_at > 0 AND m.due_at < m.expires_at AND +m.expires_at > :now"

# A DID can have several queues, having changed hands, and events of the other half: candidates are those that have
# most of one kind, and all that have more than one. Recipients are looked up in two indexes.
_SIZES = """
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
# From whichever side is the smaller one.
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
class _Scope:
    """
    The messages of an account, or of one of its recipients.

    :param recipients: numbers of those whose queue is not empty.
    :param part: the condition that finds them in an index, or in the queue table, that begins with the account.
    """

    recipients: Sequence[int]
    part: str
    parameters: dict[str, Any]


def fetch(
    connection: Connection, account: str, recipient_did: str | None, now: float, limit: int, max_bytes: int
) -> list[StoredMessage]:
    """The oldest visible ones that fit, but at least one."""
    scope = _scope(connection, account, recipient_did, now)
    if scope is None:
        return []
    found: list[StoredMessage] = []
    size = 0
    with closing(_visible_rows(connection, scope.recipients, now, max(limit, 0))) as rows:
        for row in rows:
            size += len(row[3])
            if found and size > max_bytes:
                break
            found.append(_stored(row))
    return found


def _visible_rows(
    connection: Connection, recipients: Sequence[int], now: float, limit: int
) -> Generator[tuple[Any, ...], None, None]:
    """The first visible messages of some recipients in order of arrival."""
    if len(recipients) == 1:
        (recipient,) = recipients
        query = f"{_MESSAGE} WHERE m.recipient_id = :recipient AND {_VISIBLE} ORDER BY m.seq LIMIT :limit"
        with closing(connection.execute(query, {"recipient": recipient, "now": now, "limit": limit})) as rows:
            yield from rows
        return
    with ExitStack() as stack:
        lanes = [stack.enter_context(closing(_visible_seqs(connection, one, now, limit))) for one in recipients]
        for seq in islice(merge(*lanes), limit):
            yield connection.execute(f"{_MESSAGE} WHERE m.seq = ?", (seq,)).fetchone()


def _visible_seqs(connection: Connection, recipient: int, now: float, limit: int) -> Generator[int, None, None]:
    """A few at a time, since those of another recipient may be older."""
    after = -1
    query = f"""
        SELECT m.seq FROM message m WHERE m.recipient_id = :recipient AND m.seq > :after AND {_VISIBLE}
        ORDER BY m.seq LIMIT :some
    """
    while limit > 0:
        some = min(limit, _MERGED_AT_A_TIME)
        parameters = {"recipient": recipient, "after": after, "now": now, "some": some}
        seqs = [seq for (seq,) in connection.execute(query, parameters)]
        yield from seqs
        if len(seqs) < some:
            return
        after = seqs[-1]
        limit -= some


def read_messages(connection: Connection, seqs: Sequence[int]) -> list[StoredMessage]:
    """Messages by their places in the order of arrival, in that order."""
    found: list[StoredMessage] = []
    for some in pieces(sorted(seqs), VALUES_AT_A_TIME):
        rows = connection.execute(f"{_MESSAGE} WHERE m.seq IN ({marks_clause(len(some))}) ORDER BY m.seq", some)
        found += [_stored(row) for row in rows]
    return found


def status(connection: Connection, account: str, recipient_did: str | None, now: float) -> QueueStatus:
    scope = _scope(connection, account, recipient_did, now)
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
    oldest, newest = (_received_at(connection, seq) for seq in ask(ends))
    return QueueStatus(all_messages - expired - held, all_bytes - expired_bytes - held_bytes, oldest, newest)


def _received_at(connection: Connection, seq: int) -> float:
    ((time,),) = connection.execute("SELECT received_at FROM message WHERE seq = ?", (seq,)).fetchall()
    return float(time)


def next_due(connection: Connection, now: float) -> float | None:
    row = connection.execute(
        f"SELECT m.due_at FROM message m WHERE {_STILL_DUE} ORDER BY m.due_at LIMIT 1", {"now": now}
    ).fetchone()
    return None if row is None else row[0]


def take_due(connection: Connection, now: float, limit: int) -> list[StoredMessage]:
    rows = connection.execute(
        f"{_MESSAGE} WHERE {_STILL_DUE} AND m.due_at <= :now ORDER BY m.due_at, m.seq LIMIT :limit",
        {"now": now, "limit": max(limit, 0)},
    ).fetchall()
    connection.executemany("UPDATE message SET due_at = ? WHERE seq = ?", [(-now, row[9]) for row in rows])
    return [_stored(row) for row in rows]


def queue_sizes(connection: Connection, top: int) -> tuple[list[tuple[str, int]], int]:
    """
    Messages and pending events together. Reads the tables of counters from end to end, which have a short row for
    each DID.
    """
    queues, messages = connection.execute("SELECT count(*), coalesce(sum(messages), 0) FROM queue").fetchone()
    holdings, pending = connection.execute(
        "SELECT count(*), coalesce(sum(pending), 0) FROM holding WHERE pending > 0"
    ).fetchone()
    in_both = _IN_BOTH_BY_QUEUE if queues < holdings else _IN_BOTH_BY_HOLDING
    largest = connection.execute(_SIZES.format(in_both=in_both), {"top": max(top, 0)}).fetchall()
    return largest, messages + pending - sum(number for _, number in largest)


def statistics(connection: Connection, top: int) -> StoreStatistics:
    largest, other = queue_sizes(connection, top)
    return StoreStatistics(tuple(largest), other, ledger(connection))


def waiting(connection: Connection) -> Waiting:
    """Reads the same tables of counters from end to end, and of what waits the first."""
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
    events = Waiting(messages, size, recipients, None if received_at is None else float(received_at))
    return both(Waiting(*queues), events)


def _scope(connection: Connection, account: str, recipient_did: str | None, now: float) -> _Scope | None:
    if not is_storable(account) or not is_storable(recipient_did or ""):
        return None
    account_number = account_id(connection, account)
    if account_number is None:
        return None
    if recipient_did is None:
        rows = connection.execute("SELECT recipient_id FROM queue WHERE account_id = ?", (account_number,))
        return _Scope([id for (id,) in rows], "m.account_id = :account", {"account": account_number, "now": now})
    # Each half has an index of its own; at most one of them finds something.
    row = connection.execute(
        """
        SELECT id FROM recipient WHERE did_digest = :digest AND account_id = :account AND registered IS NOT NULL
        UNION ALL SELECT id FROM recipient WHERE did_digest = :digest AND account_id = :account AND registered IS NULL
        """,
        {"digest": did_digest(recipient_did), "account": account_number},
    ).fetchone()
    if row is None:
        return None
    return _Scope(
        [row[0]],
        "m.account_id = :account AND m.recipient_id = :recipient",
        {"account": account_number, "recipient": row[0], "now": now},
    )


def _stored(row: tuple[Any, ...]) -> StoredMessage:
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
