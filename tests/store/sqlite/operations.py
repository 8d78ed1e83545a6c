"""Commands as operations of the SQLite store, which tests run separately or in one batch."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from twisted.internet.defer import Deferred

from mediatord.errors import MediatorError
from mediatord.store.interfaces.decentrl import (
    CommandGuard,
    Contract,
    ContractRequest,
    DecentrlQuotas,
    IDecentrlStore,
    PendingEvent,
    PublicEvent,
    StoredEvent,
)
from mediatord.store.sqlite.connection import SQLOperation, StoreConnection
from mediatord.store.sqlite.database_file import migrate_schema, read_schema_steps
from mediatord.store.sqlite.decentrl_store import SQLiteDecentrlStore
from mediatord.store.sqlite.executor import SQLiteExecutor
from tests.store.builders import ALICE, BOB, HOUR, NOON, ImmediateClock

CAROL = "did:example:carol"
PARTY_DIDS = (ALICE, BOB, CAROL)

# Counters, and the queries for their correct values.
COUNTER_QUERIES = {
    "nonces": "SELECT value FROM counter WHERE name = 'nonces' EXCEPT SELECT count(*) FROM nonce",
    "contracts": "SELECT h.contracts FROM party_usage h WHERE h.contracts IS NOT ("
    "SELECT count(*) FROM contract WHERE owner_id = h.party_id)",
    "requests": "SELECT h.requests FROM party_usage h WHERE h.requests IS NOT ("
    "SELECT count(*) FROM contract_request WHERE recipient_id = h.party_id)",
    "pending": "SELECT 1 FROM party_usage h WHERE (h.pending, h.pending_bytes) IS NOT ("
    "SELECT count(*), coalesce(sum(length(CAST(payload AS BLOB))), 0) FROM pending_event"
    " WHERE recipient_id = h.party_id)",
    "stored": "SELECT 1 FROM party_usage h WHERE (h.stored, h.stored_bytes) IS NOT ("
    "SELECT count(*), coalesce(sum(size + tags_size), 0) FROM ("
    "SELECT owner_id, size, tags_size FROM stored_event"
    " UNION ALL SELECT owner_id, size, tags_size FROM public_event) WHERE owner_id = h.party_id)",
    "labels": "SELECT 1 FROM label l WHERE l.items IS NOT (SELECT count(*) FROM labelled WHERE label_id = l.id)",
    "ledger": "SELECT 1 FROM ledger WHERE accepted - acknowledged - expired - evicted - removed - withdrawn IS NOT"
    " CASE protocol WHEN 'didcomm' THEN (SELECT count(*) FROM message) ELSE (SELECT count(*) FROM pending_event) END",
    "v1 connections": "SELECT value FROM counter WHERE name = 'v1_connections' EXCEPT"
    " SELECT count(*) FROM v1_connection",
    "pending v1 connections": "SELECT value FROM counter WHERE name = 'pending_v1_connections' EXCEPT"
    " SELECT count(*) FROM v1_connection WHERE account NOT IN (SELECT did FROM account)",
    "no label": "SELECT 1 FROM labelled WHERE label_id NOT IN (SELECT id FROM label)",
    "empty label": "SELECT 1 FROM label WHERE items < 1",
    "no payload": "SELECT seq FROM stored_event EXCEPT SELECT seq FROM stored_payload",
    "no party": "SELECT 1 FROM contract WHERE peer_id NOT IN (SELECT id FROM party)"
    " UNION SELECT 1 FROM contract WHERE owner_id NOT IN (SELECT id FROM party UNION SELECT 0)"
    " UNION SELECT 1 FROM pending_event WHERE recipient_id NOT IN (SELECT id FROM party)"
    " UNION SELECT 1 FROM contract_request WHERE recipient_id NOT IN (SELECT id FROM party)"
    " UNION SELECT 1 FROM label WHERE owner_id NOT IN (SELECT id FROM party)"
    " UNION SELECT 1 FROM party_usage WHERE party_id NOT IN (SELECT id FROM party)",
}


# All rows, with DIDs and labels in place of their numbers.
ROW_QUERIES = (
    "SELECT key, until FROM nonce ORDER BY place",
    "SELECT p.did, h.contracts, h.requests, h.pending, h.pending_bytes, h.stored, h.stored_bytes"
    " FROM party_usage h JOIN party p ON p.id = h.party_id ORDER BY p.did",
    "SELECT c.id, o.did, p.did, c.expires_at FROM contract c LEFT JOIN party o ON o.id = c.owner_id"
    " JOIN party p ON p.id = c.peer_id ORDER BY o.did, c.seq",
    "SELECT r.id, p.did, r.sender_did FROM contract_request r JOIN party p ON p.id = r.recipient_id ORDER BY r.seq",
    "SELECT e.id, p.did, e.sender_did, e.payload FROM pending_event e JOIN party p ON p.id = e.recipient_id"
    " ORDER BY e.seq",
    "SELECT did FROM party ORDER BY did",
    "SELECT p.did, l.kind, l.text, l.items FROM label l JOIN party p ON p.id = l.owner_id ORDER BY 1, 2, 3",
    "SELECT l.kind, l.text, e.timestamp, s.id FROM labelled e JOIN label l ON l.id = e.label_id"
    " JOIN stored_event s ON s.seq = e.seq WHERE l.kind IN (0, 1, 3, 4) ORDER BY 1, 2, e.timestamp, e.seq",
    "SELECT e.id, p.payload, e.processed FROM stored_event e JOIN stored_payload p USING (seq) ORDER BY e.seq",
    "SELECT id, event, signature FROM public_event ORDER BY seq",
)


class WriteRecorder(SQLiteExecutor):
    """Executor that records writes without running them."""

    def __init__(self) -> None:
        self.works: list[SQLOperation] = []

    def write(
        self, name: str, work: SQLOperation | Callable[..., Any], *args: Any, size: int = 0, shrinking: bool = False
    ) -> Deferred[Any]:
        assert not args
        self.works.append(work)
        return Deferred()


class SQLiteOperations:
    """Makes an operation of each command; the default guard has a new nonce and no other conditions."""

    def __init__(self, caps: DecentrlQuotas, max_nonces: int = 1000) -> None:
        self.recorder = WriteRecorder()
        self.decentrl = SQLiteDecentrlStore(self.recorder, ImmediateClock(), caps, max_nonces)
        self.numbers = count()

    def _record_write(
        self, command: Callable[[IDecentrlStore, CommandGuard], object], guard: CommandGuard | None
    ) -> SQLOperation:
        command(self.decentrl, guard or self.make_guard())
        return self.recorder.works.pop()

    def make_guard(self, sender: str | None = None, recipient: str | None = None, nonce: bytes = b"") -> CommandGuard:
        return CommandGuard(nonce or b"nonce %d" % next(self.numbers), NOON + HOUR, sender, recipient)

    def check_guard(self, guard: CommandGuard) -> SQLOperation:
        return self._record_write(lambda store, guard: store.check_guard(guard), guard)

    def save_contract(self, contract: Contract, guard: CommandGuard | None = None) -> SQLOperation:
        return self._record_write(lambda store, guard: store.save_contract(guard, contract), guard)

    def add_request(self, request: ContractRequest, guard: CommandGuard | None = None) -> SQLOperation:
        return self._record_write(lambda store, guard: store.request_contract(guard, request), guard)

    def acknowledge_requests(self, did: str, ids: Sequence[str], guard: CommandGuard | None = None) -> SQLOperation:
        return self._record_write(lambda store, guard: store.acknowledge_requests(guard, did, ids), guard)

    def deliver_event(self, event: PendingEvent, guard: CommandGuard | None = None) -> SQLOperation:
        return self._record_write(lambda store, guard: store.enqueue_event(guard, event), guard)

    def acknowledge_events(self, did: str, ids: Sequence[str], guard: CommandGuard | None = None) -> SQLOperation:
        return self._record_write(lambda store, guard: store.acknowledge_events(guard, did, ids), guard)

    def save_events(
        self, owner: str, events: Sequence[StoredEvent], guard: CommandGuard | None = None
    ) -> SQLOperation:
        return self._record_write(lambda store, guard: store.save_events(guard, owner, events), guard)

    def update_tags(
        self, owner: str, tags: Sequence[tuple[str, tuple[str, ...]]], guard: CommandGuard | None = None
    ) -> SQLOperation:
        return self._record_write(lambda store, guard: store.update_tags(guard, owner, tags), guard)

    def publish_event(self, publisher: str, event: PublicEvent, guard: CommandGuard | None = None) -> SQLOperation:
        return self._record_write(lambda store, guard: store.publish(guard, publisher, event), guard)

    def unpublish_event(self, publisher: str, id: str, guard: CommandGuard | None = None) -> SQLOperation:
        return self._record_write(lambda store, guard: store.unpublish(guard, publisher, id), guard)

    def prepare_parties(self) -> list[SQLOperation]:
        """Operations that register two of three parties, with contracts with everybody."""
        return [
            *(self.save_contract(make_contract(f"r {did}", None, did)) for did in PARTY_DIDS[:2]),
            *(self.save_contract(make_contract(f"{a} {b}", a, b)) for a in PARTY_DIDS[:2] for b in PARTY_DIDS),
        ]


def make_contract(id: str, owner: str | None, peer: str, until: float = NOON + HOUR) -> Contract:
    return Contract(id, owner, peer, until, id.encode(), b"{}")


def create_memory_database() -> StoreConnection:
    """An in-memory database with all tables."""
    connection = sqlite3.connect(":memory:", isolation_level=None, factory=StoreConnection)
    migrate_schema(connection, read_schema_steps())
    return connection


def resolve_results(outcomes: Iterable[Any]) -> list[Any]:
    """The value of each outcome, or the class of its error."""
    return [type(outcome) if isinstance(outcome, MediatorError) else outcome for outcome in outcomes]


def read_all_rows(connection: sqlite3.Connection) -> list[list[tuple[Any, ...]]]:
    """All rows of all tables, without numbers."""
    return [connection.execute(query).fetchall() for query in ROW_QUERIES]


def find_miscounts(connection: sqlite3.Connection) -> list[str]:
    """Counters that are wrong."""
    return [what for what, query in COUNTER_QUERIES.items() if connection.execute(query).fetchall()]
