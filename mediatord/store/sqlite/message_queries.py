"""
Reads of queued messages in SQL: fetching, status, due times, digests. Each function runs inside a transaction of the
caller.

A message is visible from its due time until it expires. Counters of all queued messages are maintained by writes;
invisible ones are counted apart and subtracted, so that no cost grows with the length of a queue.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice
from typing import Any

from mediatord.protocol.canonical_did import compute_did_digest
from mediatord.store.interfaces.messages import (
    PAYLOAD_DIGEST_LENGTH,
    QueueStatus,
    StoredMessage,
    is_valid_unicode,
)
from mediatord.store.sqlite.connection import StoreConnection, hash_did

# Sequence numbers that are read at a time of each recipient when several are merged.
_SEQS_PER_READ = 32

# CROSS JOIN, so that the query planner keeps the order of the tables.
SELECT_MESSAGES = """
    SELECT m.id, r.did, a.did, m.payload, m.form, m.received_at, m.expires_at, m.delivered, m.due_at, m.seq
    FROM message m CROSS JOIN recipient r ON r.id = m.recipient_id CROSS JOIN account a ON a.id = m.account_id
"""
# The plus keeps SQLite from using an index for a term: rows are read in order of arrival.
_VISIBLE = "+m.expires_at > :now AND (+m.due_at IS NULL OR +m.due_at <= :now)"
# All queued messages, without those that have expired and those that are delayed.
_COUNT_VISIBLE = """
    SELECT sum(messages), sum(bytes) FROM (
        SELECT messages, bytes FROM queue WHERE {scope}
        UNION ALL
        SELECT -1, -m.size FROM message m INDEXED BY message_expiry WHERE m.expires_at <= :now AND {scope}
        UNION ALL
        SELECT -1, -m.size FROM message m INDEXED BY message_delayed
        WHERE m.due_at > :now AND m.expires_at > :now AND {scope}
    ) counted
"""
_SELECT_END = f"SELECT m.seq FROM message m WHERE m.recipient_id = q.recipient_id AND {_VISIBLE} ORDER BY m.seq"
_SELECT_ENDS = f"""
    SELECT oldest.received_at, newest.received_at FROM (
        SELECT min(({_SELECT_END} LIMIT 1)) AS first, max(({_SELECT_END} DESC LIMIT 1)) AS last
        FROM queue q WHERE {{scope}}
    ) ends CROSS JOIN message oldest ON oldest.seq = ends.first CROSS JOIN message newest ON newest.seq = ends.last
"""
_ACCOUNT = "(SELECT id FROM account WHERE did_key = :account)"
# Each half has an index of its own; at most one of them finds something.
_RECIPIENT = f"""(
    SELECT id FROM recipient WHERE did_digest = :digest AND account_id = {_ACCOUNT} AND registered IS NOT NULL
    UNION ALL SELECT id FROM recipient WHERE did_digest = :digest AND account_id = {_ACCOUNT} AND registered IS NULL
)"""
# Negative when it was returned by `take_due_messages`.
_STILL_DUE = "m.due_at > 0 AND m.due_at < m.expires_at AND +m.expires_at > :now"


def fetch_messages(
    connection: StoreConnection, now: float, account: str, recipient_did: str | None, limit: int, max_bytes: int
) -> list[StoredMessage]:
    """The oldest visible messages that fit, but at least one."""
    scope, parameters = _build_scope(now, account, recipient_did)
    recipients = [id for (id,) in connection.execute(f"SELECT recipient_id FROM queue WHERE {scope}", parameters)]
    found: list[StoredMessage] = []
    size = 0
    for row in _iterate_visible_rows(connection, recipients, now, max(limit, 0)):
        size += len(row[3])
        if found and size > max_bytes:
            break
        found.append(parse_message(row))
    return found


def _iterate_visible_rows(
    connection: StoreConnection, recipients: Sequence[int], now: float, limit: int
) -> Iterator[tuple[Any, ...]]:
    """The first visible messages of some recipients in order of arrival."""
    if len(recipients) == 1:
        (recipient,) = recipients
        query = f"{SELECT_MESSAGES} WHERE m.recipient_id = :recipient AND {_VISIBLE} ORDER BY m.seq LIMIT :limit"
        yield from connection.execute(query, {"recipient": recipient, "now": now, "limit": limit})
        return
    seqs = merge(*[_iterate_visible_seqs(connection, one, now, limit) for one in recipients])
    for seq in islice(seqs, limit):
        yield connection.execute(f"{SELECT_MESSAGES} WHERE m.seq = ?", (seq,)).fetchone()


def _iterate_visible_seqs(connection: StoreConnection, recipient: int, now: float, limit: int) -> Iterator[int]:
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


def get_queue_status(connection: StoreConnection, now: float, account: str, recipient_did: str | None) -> QueueStatus:
    scope, parameters = _build_scope(now, account, recipient_did)
    messages, size = connection.execute(_COUNT_VISIBLE.format(scope=scope), parameters).fetchone()
    if not messages:
        return QueueStatus(0, 0)
    ends = connection.execute(_SELECT_ENDS.format(scope=scope), parameters).fetchone()
    return QueueStatus(messages, size, *ends)


def find_next_due(connection: StoreConnection, now: float) -> float | None:
    query = f"SELECT m.due_at FROM message m WHERE {_STILL_DUE} ORDER BY m.due_at LIMIT 1"
    due_at: float | None = connection.select_value(query, {"now": now})
    return due_at


def take_due_messages(connection: StoreConnection, now: float, limit: int) -> list[StoredMessage]:
    rows = connection.execute(
        f"{SELECT_MESSAGES} WHERE {_STILL_DUE} AND m.due_at <= :now ORDER BY m.due_at, m.seq LIMIT :limit",
        {"now": now, "limit": max(limit, 0)},
    ).fetchall()
    connection.executemany("UPDATE message SET due_at = ? WHERE seq = ?", [(-now, row[9]) for row in rows])
    return [parse_message(row) for row in rows]


def _build_scope(now: float, account: str, recipient_did: str | None) -> tuple[str, dict[str, Any]]:
    """
    Condition for rows of the queue table, or of an index that begins with the account, by the account or one of its
    recipients, and its parameters.
    """
    parameters: dict[str, Any] = {"now": now, "account": hash_did(account)}
    if recipient_did is None:
        return f"account_id = {_ACCOUNT}", parameters
    parameters["digest"] = compute_did_digest(recipient_did) if is_valid_unicode(recipient_did) else None
    return f"account_id = {_ACCOUNT} AND recipient_id = {_RECIPIENT}", parameters


def parse_message(row: tuple[Any, ...]) -> StoredMessage:
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


# Messages whose digests are compared in one read; those of one recipient are compared together.
COMPARED_AT_A_TIME = 20_000

_DIGEST_PATTERN = re.compile("[0-9a-f]{64}")
_QUEUES_OF_ACCOUNT = """
    SELECT q.recipient_id, q.messages FROM account a CROSS JOIN queue q ON q.account_id = a.id
    WHERE a.did_key = ? AND q.recipient_id > ? ORDER BY q.recipient_id
"""
_FIND_BY_DIGEST = "SELECT m.id, m.digest FROM message m WHERE m.recipient_id = ? AND m.digest_head IN ({})"


def get_digest_head(digest: bytes) -> int:
    """Integer that stands for the digest of a message in an index."""
    return int.from_bytes(digest[:8], "big", signed=True)


def parse_digests(ids: Iterable[str]) -> list[bytes]:
    """Those of the ids that are a SHA-256 in lower-case hexadecimal."""
    digests = []
    for id_ in ids:
        if len(id_) == PAYLOAD_DIGEST_LENGTH and _DIGEST_PATTERN.fullmatch(id_):
            digests.append(bytes.fromhex(id_))
    return digests


def find_by_digest(
    connection: StoreConnection, account: str, wanted: Sequence[bytes], after: int
) -> tuple[list[str], int | None]:
    """
    Ids of messages whose payload has one of these digests, of recipients with greater numbers, and the number of the
    last recipient that was searched; None when it was the last of all.
    """
    heads, known = [get_digest_head(digest) for digest in wanted], set(wanted)
    ids: list[str] = []
    left = COMPARED_AT_A_TIME
    for recipient, messages in connection.execute(_QUEUES_OF_ACCOUNT, (hash_did(account), after)):
        if left <= 0:
            return ids, after
        rows = connection.select_exact_in(_FIND_BY_DIGEST, heads, recipient)
        ids += [id for id, digest in rows if digest in known]
        after = recipient
        left -= messages
    return ids, None
