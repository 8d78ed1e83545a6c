"""Listings and removals for the operator, in SQLite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from twisted.internet.defer import Deferred
from zope.interface import implementer

from mediatord.protocol.canonical_did import canonicalize_did, compute_did_digest
from mediatord.store.interfaces.administration import (
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
from mediatord.store.sqlite import account_queries, decentrl_queries, message_writes
from mediatord.store.sqlite.bulk_sql import hash_did
from mediatord.store.sqlite.executor import SQLExecutor
from mediatord.store.sqlite.queue_accounting import StoreConnection

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
        FROM holding h JOIN party p ON p.id = h.party_id WHERE h.pending > 0
        ORDER BY h.pending DESC, p.did LIMIT ?
    """,
}
_SELECT_TOTALS = {
    "didcomm": "SELECT count(*), coalesce(sum(messages), 0), coalesce(sum(bytes), 0) FROM queue",
    "decentrl": """
        SELECT count(*), coalesce(sum(pending), 0), coalesce(sum(pending_bytes), 0) FROM holding WHERE pending > 0
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
        coalesce(sum(q.bytes), 0)
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


@implementer(IStoreAdministration)
class SQLiteStoreAdministration:
    """
    Reads in the thread for searches, so that nothing of a wallet waits for it.

    :param forget_accounts: called after a change of accounts, which may be cached.
    """

    def __init__(self, file: SQLExecutor, forget_accounts: Callable[[], None]) -> None:
        self._file = file
        self._forget_accounts = forget_accounts
        self.on_late_purge: LatePurgeListener = lambda protocol, removed: None

    def list_queues(self, protocols: Sequence[QueueProtocol], offset: int, limit: int) -> Deferred[list[QueueInfo]]:
        def read(connection: StoreConnection) -> list[QueueInfo]:
            found = [
                QueueInfo(half, did, account, messages, size, None if oldest_at is None else float(oldest_at))
                for half in protocols
                for did, account, messages, size, oldest_at in connection.execute(
                    _SELECT_QUEUES[half], (offset + limit,)
                )
            ]
            return sorted(found, key=lambda queue: -queue.messages)[offset : offset + limit]

        return self._file.search("list_queues", read)

    def sum_queues(self, protocols: Sequence[QueueProtocol]) -> Deferred[QueueListTotals]:
        def read(connection: StoreConnection) -> QueueListTotals:
            rows = [connection.execute(_SELECT_TOTALS[half]).fetchone() for half in protocols]
            return QueueListTotals(*map(sum, zip((0, 0, 0), *rows, strict=True)))

        return self._file.search("sum_queues", read)

    def list_dids(self, after: str, limit: int) -> Deferred[DIDPage]:
        def read(connection: StoreConnection) -> DIDPage:
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

        return self._file.search("list_dids", read)

    def find_did(self, did: str) -> Deferred[str | None]:
        canonical = canonicalize_did(did)
        values = {
            "did": did,
            "digest": compute_did_digest(did),
            "account": hash_did(canonical),
            "canonical": canonical,
        }

        def read(connection: StoreConnection) -> str | None:
            found = connection.execute(_SELECT_MATCHING_DID, values).fetchone()
            return None if found is None else str(found[0])

        return self._file.search("find_did", read)

    def list_entries(self, did: str, protocol: QueueProtocol, after: str, limit: int) -> Deferred[EntryPage]:
        query, parse = (_SELECT_MESSAGES, _parse_message) if protocol == "didcomm" else (_SELECT_EVENTS, _parse_event)
        values = {"did": did, "digest": compute_did_digest(did), "after": int(after or -1), "limit": limit}

        def read(connection: StoreConnection) -> EntryPage:
            rows = connection.execute(query, values).fetchall()
            return EntryPage([parse(did, row[1:]) for row in rows], str(rows[-1][0]) if len(rows) == limit else None)

        return self._file.search("list_entries", read)

    def purge(self, did: str, protocol: QueueProtocol, ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        def remove(connection: StoreConnection) -> list[RemovedMessage]:
            if protocol == "didcomm":
                return message_writes.purge_messages(connection, ids)
            return decentrl_queries.acknowledge_events(connection, did, ids, "removed")

        return self._file.write("purge", remove)

    def list_accounts(self, offset: int, limit: int) -> Deferred[list[AccountSummary]]:
        def read(connection: StoreConnection) -> list[AccountSummary]:
            return [_parse_account(row) for row in connection.execute(_SELECT_NEWEST_ACCOUNTS, (limit, offset))]

        return self._file.search("list_accounts", read)

    def count_accounts(self) -> Deferred[int]:
        def read(connection: StoreConnection) -> int:
            return int(connection.execute("SELECT count(*) FROM account").fetchone()[0])

        return self._file.search("count_accounts", read)

    def find_account(self, did: str) -> Deferred[AccountSummary | None]:
        def read(connection: StoreConnection) -> AccountSummary | None:
            row = connection.execute(_SELECT_ACCOUNT, (hash_did(did),)).fetchone()
            return None if row is None else _parse_account(row)

        return self._file.search("find_account", read)

    def list_queued_dids(self, account: str) -> Deferred[list[str]]:
        def read(connection: StoreConnection) -> list[str]:
            return [did for (did,) in connection.execute(_SELECT_QUEUED_DIDS, (hash_did(account),))]

        return self._file.search("list_queued_dids", read)

    def unregister_recipients(self, account: str) -> Deferred[None]:
        return self._change("unregister_recipients", lambda c: account_queries.unregister_recipients(c, account))

    def remove_account(self, account: str) -> Deferred[bool]:
        return self._change("remove_account", lambda c: account_queries.remove_account(c, account))

    def _change(self, name: str, work: Callable[[StoreConnection], Any]) -> Deferred[Any]:
        def forget(result: Any) -> Any:
            self._forget_accounts()
            return result

        return self._file.write(name, work).addBoth(forget)


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
    did, created_at, seen_at, fresh, recipients, messages, size = row
    return AccountSummary(did, created_at, seen_at, not fresh, recipients, messages, size)
