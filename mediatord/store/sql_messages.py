"""What changes the messages, in SQL; each function runs inside a transaction of the caller."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from sqlite3 import Connection
from typing import Any, NamedTuple

from mediatord.errors import RecipientUnknown
from mediatord.interfaces import Deposited, Payload, QueueLimits, Reason, Removed, StoredMessage
from mediatord.store.sql_accounts import account_id
from mediatord.store.sql_cluster import NO_NODE, enter_node
from mediatord.store.sql_rows import gather_in

# CROSS JOIN, because the order of the tables is never to be chosen otherwise.
_REMOVED = """
    SELECT m.seq, m.id, r.did, a.did, m.size, m.received_at, m.pushes
    FROM message m CROSS JOIN recipient r ON r.id = m.recipient_id CROSS JOIN account a ON a.id = m.account_id
"""
_DELETE = "DELETE FROM message WHERE seq = ?"
_DIGEST = re.compile("[0-9a-f]{64}")
_DIGESTS_AT_A_TIME = 500
_INSERT = """
    INSERT INTO message (
        id, recipient_id, account_id, form, size, received_at, expires_at, due_at, digest_head, digest, payload
    )
"""
_ROW = "(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_ROWS_AT_A_TIME = 64


@dataclass(frozen=True, slots=True)
class Deposit:
    """What is to be queued for whom."""

    recipient_did: str
    payloads: Sequence[Payload]
    now: float
    expires_at: float
    due_at: float | None

    def stored(self, payload: Payload, account: str) -> StoredMessage:
        return StoredMessage(
            id=payload.id,
            recipient_did=self.recipient_did,
            account=account,
            payload=payload.data,
            form=payload.form,
            received_at=self.now,
            expires_at=self.expires_at,
            due_at=self.due_at,
        )

    def deposited(self, account: str, evicted: Iterable[Removed] = ()) -> Deposited:
        return Deposited(tuple([self.stored(payload, account) for payload in self.payloads]), tuple(evicted))

    def oversize(self, payload: Payload, account: str) -> Removed:
        return Removed(payload.id, self.recipient_did, account, len(payload.data), self.now, 0, "fifo_bytes")


class Queue(NamedTuple):
    """Where a deposit goes, and what waits there."""

    recipient_id: int
    account_id: int
    account: str
    messages: int
    size: int

    def grown(self, payloads: Sequence[Payload]) -> Queue:
        """The same with these in it."""
        size = sum([len(payload.data) for payload in payloads])
        return self._replace(messages=self.messages + len(payloads), size=self.size + size)


def deposit(connection: Connection, limits: QueueLimits, order: Deposit) -> Deposited:
    """
    Append to a queue and make room in it; too large ones are out again at once.

    :raise RecipientUnknown: nobody has registered the DID.
    """
    queue = find_queues(connection, {order.recipient_did}).get(order.recipient_did)
    if queue is None:
        raise RecipientUnknown()
    fitting = [payload for payload in order.payloads if len(payload.data) <= limits.max_bytes]
    _, _, _, messages, size = queue.grown(fitting)
    evicted: list[Removed] = []
    victims: list[tuple[int]] = []
    if messages > limits.max_messages or size > limits.max_bytes:
        for seq, removed in _victims(connection, limits, queue.recipient_id, messages, size):
            victims.append((seq,))
            evicted.append(removed)
    insert_all(connection, [(queue, order, payload) for payload in fitting])
    if victims:
        connection.executemany(_DELETE, victims)
    if len(fitting) < len(order.payloads):
        evicted += [order.oversize(p, queue.account) for p in order.payloads if len(p.data) > limits.max_bytes]
    return order.deposited(queue.account, evicted)


def mark_delivered(connection: Connection, ids: Iterable[str], node: str = "") -> None:
    number = enter_node(connection, node) if node else NO_NODE
    connection.executemany(
        "UPDATE message SET delivered = ?, pushes = pushes + 1 WHERE id = ?",
        [(number, id) for id in dict.fromkeys(ids)],
    )


def mark_pending(connection: Connection, ids: Iterable[str]) -> list[str]:
    pending = "UPDATE message SET delivered = 0 WHERE id = ? AND +delivered > 0"
    return [id for id in dict.fromkeys(ids) if connection.execute(pending, (id,)).rowcount]


def remove(connection: Connection, ids: Iterable[str]) -> list[Removed]:
    """Remove by id, whoever it belongs to."""
    query = f"{_REMOVED} WHERE m.id = ?"
    rows = [connection.execute(query, (id,)).fetchone() for id in dict.fromkeys(ids)]
    return _remove(connection, [row for row in rows if row is not None], None)


def acknowledge(connection: Connection, account: str, ids: Iterable[str]) -> list[Removed]:
    """Remove by id or by digest from one account; what is removed comes in order of arrival."""
    account_number = account_id(connection, account)
    if account_number is None:
        return []
    wanted = list(dict.fromkeys(ids))
    mine = "SELECT seq FROM message WHERE id = ? AND +account_id = ?"
    found = (connection.execute(mine, (id, account_number)).fetchone() for id in wanted)
    seqs = {row[0] for row in found if row is not None}
    seqs |= set(_with_digest(connection, account_number, wanted))
    rows = [connection.execute(f"{_REMOVED} WHERE m.seq = ?", (seq,)).fetchone() for seq in sorted(seqs)]
    return _remove(connection, rows, None)


def expire(connection: Connection, now: float, limit: int) -> list[Removed]:
    query = f"{_REMOVED} WHERE m.expires_at <= ? ORDER BY m.expires_at, m.seq LIMIT ?"
    return _remove(connection, connection.execute(query, (now, max(limit, 0))).fetchall(), "ttl")


def find_queues(connection: Connection, recipient_dids: Collection[str]) -> dict[str, Queue]:
    """The queues of those DIDs that somebody has registered."""
    rows = gather_in(
        connection,
        "r.did, r.id, a.id, a.did, coalesce(q.messages, 0), coalesce(q.bytes, 0)",
        """
        FROM recipient r CROSS JOIN account a ON a.id = r.account_id
        LEFT JOIN queue q ON q.account_id = r.account_id AND q.recipient_id = r.id
        WHERE r.did IN ({}) AND r.registered IS NOT NULL
        """,
        list(recipient_dids),
    )
    return {row[0]: Queue(*row[1:]) for row in rows}


def _victims(
    connection: Connection, limits: QueueLimits, recipient_id: int, messages: int, size: int
) -> Iterator[tuple[int, Removed]]:
    """The oldest with their places, until a queue of so many messages and bytes is within its limits."""
    query = f"{_REMOVED} WHERE m.recipient_id = ? ORDER BY m.seq"
    with closing(connection.execute(query, (recipient_id,))) as rows:
        for row in rows:
            if messages > limits.max_messages:
                yield row[0], _removed(row, "fifo_count")
            elif size > limits.max_bytes:
                yield row[0], _removed(row, "fifo_bytes")
            else:
                return
            messages -= 1
            size -= row[4]


def insert_all(connection: Connection, rows: Sequence[tuple[Queue, Deposit, Payload]]) -> None:
    """Append messages in this order, where there is room for them."""
    for start in range(0, len(rows), _ROWS_AT_A_TIME):
        some = rows[start : start + _ROWS_AT_A_TIME]
        values = ",".join([_ROW] * len(some))
        connection.execute(f"{_INSERT} VALUES {values}", [value for row in some for value in _values(*row)])


def _values(queue: Queue, order: Deposit, payload: Payload) -> tuple[Any, ...]:
    digest = sha256(payload.data).digest()
    return (
        payload.id,
        queue.recipient_id,
        queue.account_id,
        payload.form,
        len(payload.data),
        order.now,
        order.expires_at,
        order.due_at,
        _head(digest),
        digest,
        payload.data,
    )


def _marks(number: int) -> str:
    return ",".join("?" * number)


def _with_digest(connection: Connection, account_number: int, ids: Iterable[str]) -> Iterator[int]:
    """The places of those messages of an account whose payload has one of these digests."""
    digests = (bytes.fromhex(id) for id in ids if _DIGEST.fullmatch(id))
    while some := set(islice(digests, _DIGESTS_AT_A_TIME)):
        marks = _marks(len(some))
        rows = connection.execute(
            f"""
            SELECT seq, digest FROM message
            WHERE account_id = ? AND digest_head IN ({marks})
            """,
            (account_number, *map(_head, some)),
        )
        yield from (seq for seq, digest in rows if digest in some)


def _head(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big", signed=True)


def _remove(connection: Connection, rows: Sequence[tuple[Any, ...]], reason: Reason | None) -> list[Removed]:
    connection.executemany(_DELETE, [(row[0],) for row in rows])
    return [_removed(row, reason) for row in rows]


def _removed(row: tuple[Any, ...], reason: Reason | None) -> Removed:
    return Removed(
        id=row[1],
        recipient_did=row[2],
        account=row[3],
        size=row[4],
        received_at=row[5],
        pushes=row[6],
        reason=reason,
    )
