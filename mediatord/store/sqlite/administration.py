"""Listings and removals for the operator, in SQLite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from twisted.internet.defer import Deferred
from zope.interface import implementer

from mediatord.protocol.canonical_did import canonicalize_did, compute_did_digest
from mediatord.store.interfaces.administration import (
    AccountProtocol,
    AccountSummary,
    DIDPage,
    EntryPage,
    IStoreAdministration,
    LatePurgeListener,
    QueuedMessage,
    QueueInfo,
    QueueListTotals,
    QueueProtocol,
)
from mediatord.store.interfaces.messages import RemovedMessage
from mediatord.store.sqlite import account_queries, decentrl_queries, message_writes, queue_statistics
from mediatord.store.sqlite.connection import StoreConnection, hash_did
from mediatord.store.sqlite.executor import SQLExecutor, sql_method

_SELECT_QUEUES = {
    "didcomm": """
        SELECT r.did, a.did, q.messages, q.bytes,
            (SELECT m.received_at FROM message m WHERE m.recipient_id = q.recipient_id ORDER BY m.seq LIMIT 1)
        FROM queue q JOIN recipient r ON r.id = q.recipient_id JOIN account a ON a.id = q.account_id
        ORDER BY q.messages DESC, r.did LIMIT ?
    """,
    "decentrl": """
        SELECT p.did, p.did, h.pending, h.pending_bytes,
            (SELECT e.received_at FROM pending_event e WHERE e.recipient_id = h.party_id ORDER BY e.seq LIMIT 1)
        FROM party_usage h JOIN party p ON p.id = h.party_id WHERE h.pending > 0
        ORDER BY h.pending DESC, p.did LIMIT ?
    """,
}
_DID_TABLES = ("account", "recipient", "party")
# Registered recipients and those that are left over have an index of their digests each.
_SELECT_MATCHING_DID = """
    SELECT did FROM party WHERE did = :did
    UNION ALL SELECT did FROM recipient WHERE did_digest = :digest AND registered IS NOT NULL
    UNION ALL SELECT did FROM recipient WHERE did_digest = :digest AND registered IS NULL
    UNION ALL SELECT did FROM account WHERE did_key = :account
    UNION ALL SELECT did FROM party WHERE did = :canonical
"""
_SELECT_MESSAGES = """
    SELECT m.seq, m.id, a.did, m.size, m.received_at, m.expires_at, m.delivered, m.pushes, m.due_at
    FROM (
        SELECT id FROM recipient WHERE did_digest = :digest AND registered IS NOT NULL
        UNION ALL SELECT id FROM recipient WHERE did_digest = :digest AND registered IS NULL
    ) r JOIN message m ON m.recipient_id = r.id JOIN account a ON a.id = m.account_id
    WHERE m.seq > :after ORDER BY m.seq LIMIT :limit
"""
_SELECT_EVENTS = """
    SELECT e.seq, e.id, e.size, e.received_at FROM party p JOIN pending_event e ON e.recipient_id = p.id
    WHERE p.did = :did AND e.seq > :after ORDER BY e.seq LIMIT :limit
"""
_SELECT_ACCOUNTS = """
    SELECT a.did, a.created_at, a.seen_at, a.fresh, a.recipients, coalesce(sum(q.messages), 0),
        coalesce(sum(q.bytes), 0), (SELECT created_at FROM v1_connection WHERE account = a.did)
    FROM ({}) a LEFT JOIN queue q ON q.account_id = a.id GROUP BY a.id ORDER BY a.created_at DESC, a.id DESC
"""
_SELECT_NEWEST_ACCOUNTS = _SELECT_ACCOUNTS.format(
    "SELECT * FROM account ORDER BY created_at DESC, id DESC LIMIT ? OFFSET ?"
)
_SELECT_ACCOUNT = _SELECT_ACCOUNTS.format("SELECT * FROM account WHERE did_key = ?")
_SELECT_QUEUED_DIDS = """
    SELECT DISTINCT r.did FROM account a JOIN queue q ON q.account_id = a.id JOIN recipient r ON r.id = q.recipient_id
    WHERE a.did_key = ?
"""


def _list_queues(
    connection: StoreConnection, protocols: Sequence[QueueProtocol], offset: int, limit: int
) -> list[QueueInfo]:
    found = [
        QueueInfo(protocol, did, account, messages, size, None if oldest_at is None else float(oldest_at))
        for protocol in protocols
        for did, account, messages, size, oldest_at in connection.execute(_SELECT_QUEUES[protocol], (offset + limit,))
    ]
    return sorted(found, key=lambda queue: -queue.messages)[offset : offset + limit]


def _sum_queues(connection: StoreConnection, protocols: Sequence[QueueProtocol]) -> QueueListTotals:
    rows = [queue_statistics.read_totals(connection, protocol) for protocol in protocols]
    return QueueListTotals(*map(sum, zip((0, 0, 0), *rows, strict=True)))


def _list_dids(connection: StoreConnection, after: str, limit: int) -> DIDPage:
    table, _, last = (after or f"{_DID_TABLES[0]}:0").partition(":")
    number = _DID_TABLES.index(table)
    rows = connection.execute(
        f"SELECT id, did FROM {table} WHERE id > ? ORDER BY id LIMIT ?",  # nosec B608 # one of ours
        (int(last), limit),
    ).fetchall()
    if len(rows) == limit:
        following: str | None = f"{table}:{rows[-1][0]}"
    else:
        following = f"{_DID_TABLES[number + 1]}:0" if number + 1 < len(_DID_TABLES) else None
    return DIDPage([did for _, did in rows], following)


def _find_did(connection: StoreConnection, did: str) -> str | None:
    canonical = canonicalize_did(did)
    account, digest = hash_did(canonical), compute_did_digest(did)
    found: str | None = connection.select_value(
        _SELECT_MATCHING_DID, {"did": did, "digest": digest, "account": account, "canonical": canonical}
    )
    return found


def _list_entries(
    connection: StoreConnection, did: str, protocol: QueueProtocol, after: int, limit: int
) -> EntryPage:
    query, parse = (_SELECT_MESSAGES, _parse_message) if protocol == "didcomm" else (_SELECT_EVENTS, _parse_event)
    values = {"did": did, "digest": compute_did_digest(did), "after": after, "limit": limit}
    rows = connection.execute(query, values).fetchall()
    return EntryPage([parse(did, row[1:]) for row in rows], str(rows[-1][0]) if len(rows) == limit else None)


def _purge(
    connection: StoreConnection, did: str, protocol: QueueProtocol, ids: Sequence[str]
) -> list[RemovedMessage]:
    if protocol == "didcomm":
        return message_writes.purge_messages(connection, ids)
    return decentrl_queries.acknowledge_events(connection, did, ids, "removed")


def _list_accounts(connection: StoreConnection, offset: int, limit: int) -> list[AccountSummary]:
    return [_parse_account(row) for row in connection.execute(_SELECT_NEWEST_ACCOUNTS, (limit, offset))]


def _count_accounts(connection: StoreConnection) -> int:
    return int(connection.select_value("SELECT count(*) FROM account"))


def _find_account(connection: StoreConnection, did: str) -> AccountSummary | None:
    row = connection.execute(_SELECT_ACCOUNT, (hash_did(did),)).fetchone()
    return None if row is None else _parse_account(row)


def _list_queued_dids(connection: StoreConnection, account: str) -> list[str]:
    return [did for (did,) in connection.execute(_SELECT_QUEUED_DIDS, (hash_did(account),))]


def _parse_message(did: str, row: Sequence[Any]) -> QueuedMessage:
    id_, account, size, received_at, expires_at, delivered, pushes, due_at = row
    status = "delivered" if delivered else "pending"
    # A delayed message that was handed out has a negative time here.
    due = due_at if due_at is not None and due_at > 0 else None
    return QueuedMessage("didcomm", id_, did, account, size, received_at, expires_at, status, pushes, due)


def _parse_event(did: str, row: Sequence[Any]) -> QueuedMessage:
    id_, size, received_at = row
    return QueuedMessage("decentrl", id_, did, did, size, float(received_at))


def _parse_account(row: Sequence[Any]) -> AccountSummary:
    did, created_at, seen_at, fresh, recipients, messages, size, connected_at = row
    protocol: AccountProtocol = "didcomm" if connected_at is None else "didcomm_v1"
    return AccountSummary(did, created_at, seen_at, not fresh, recipients, messages, size, protocol, connected_at)


@implementer(IStoreAdministration)
class SQLiteStoreAdministration:
    """
    Reads in the thread for searches, so that nothing of a wallet waits for it.

    :param forget_accounts: called with the result of a change of accounts, which may be cached; returns it.
    """

    def __init__(self, executor: SQLExecutor, forget_accounts: Callable[[Any], Any]) -> None:
        self._executor = executor
        self._forget_accounts = forget_accounts
        self.on_late_purge: LatePurgeListener = lambda protocol, removed: None

    list_queues = sql_method("search", "list_queues", _list_queues)
    sum_queues = sql_method("search", "sum_queues", _sum_queues)
    list_dids = sql_method("search", "list_dids", _list_dids)
    find_did = sql_method("search", "find_did", _find_did)
    list_accounts = sql_method("search", "list_accounts", _list_accounts)
    count_accounts = sql_method("search", "count_accounts", _count_accounts)
    find_account = sql_method("search", "find_account", _find_account)
    list_queued_dids = sql_method("search", "list_queued_dids", _list_queued_dids)
    purge = sql_method("write", "purge", _purge)

    def list_entries(self, did: str, protocol: QueueProtocol, after: str, limit: int) -> Deferred[EntryPage]:
        return self._executor.search("list_entries", _list_entries, did, protocol, int(after or -1), limit)

    def unregister_recipients(self, account: str) -> Deferred[None]:
        done = self._executor.write("unregister_recipients", account_queries.unregister_recipients, account)
        return done.addBoth(self._forget_accounts)

    def remove_account(self, account: str) -> Deferred[bool]:
        done = self._executor.write("remove_account", account_queries.remove_account, account)
        return done.addBoth(self._forget_accounts)
