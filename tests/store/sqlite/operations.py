"""Commands as the SQLite store makes operations of them, to be carried out by themselves or together."""

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
PEOPLE = (ALICE, BOB, CAROL)

# What is counted where, and what that has to be.
COUNTED = {
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


# All that is kept, with DIDs and labels instead of their numbers.
KEPT = (
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
    """Keeps what is to be written instead of writing it."""

    def __init__(self) -> None:
        self.works: list[SQLOperation] = []

    def write(
        self, name: str, work: SQLOperation | Callable[..., Any], *args: Any, size: int = 0, shrinking: bool = False
    ) -> Deferred[Any]:
        assert not args
        self.works.append(work)
        return Deferred()


class SQLiteOperations:
    """Makes an operation of each command; its guard, unless one is given, has a new nonce and nothing else."""

    def __init__(self, caps: DecentrlQuotas, max_nonces: int = 1000) -> None:
        self.recorder = WriteRecorder()
        self.decentrl = SQLiteDecentrlStore(self.recorder, ImmediateClock(), caps, max_nonces)
        self.numbers = count()

    def order(
        self, ask: Callable[[IDecentrlStore, CommandGuard], object], guard: CommandGuard | None
    ) -> SQLOperation:
        ask(self.decentrl, guard or self.guard())
        return self.recorder.works.pop()

    def guard(self, sender: str | None = None, recipient: str | None = None, nonce: bytes = b"") -> CommandGuard:
        return CommandGuard(nonce or b"nonce %d" % next(self.numbers), NOON + HOUR, sender, recipient)

    def admit(self, guard: CommandGuard) -> SQLOperation:
        return self.order(lambda store, guard: store.check_guard(guard), guard)

    def contract(self, contract: Contract, guard: CommandGuard | None = None) -> SQLOperation:
        return self.order(lambda store, guard: store.save_contract(guard, contract), guard)

    def request(self, request: ContractRequest, guard: CommandGuard | None = None) -> SQLOperation:
        return self.order(lambda store, guard: store.request_contract(guard, request), guard)

    def acknowledge_requests(self, did: str, ids: Sequence[str], guard: CommandGuard | None = None) -> SQLOperation:
        return self.order(lambda store, guard: store.acknowledge_requests(guard, did, ids), guard)

    def deliver(self, event: PendingEvent, guard: CommandGuard | None = None) -> SQLOperation:
        return self.order(lambda store, guard: store.enqueue_event(guard, event), guard)

    def acknowledge(self, did: str, ids: Sequence[str], guard: CommandGuard | None = None) -> SQLOperation:
        return self.order(lambda store, guard: store.acknowledge_events(guard, did, ids), guard)

    def save(self, owner: str, events: Sequence[StoredEvent], guard: CommandGuard | None = None) -> SQLOperation:
        return self.order(lambda store, guard: store.save_events(guard, owner, events), guard)

    def tag(
        self, owner: str, tags: Sequence[tuple[str, tuple[str, ...]]], guard: CommandGuard | None = None
    ) -> SQLOperation:
        return self.order(lambda store, guard: store.update_tags(guard, owner, tags), guard)

    def publish(self, publisher: str, event: PublicEvent, guard: CommandGuard | None = None) -> SQLOperation:
        return self.order(lambda store, guard: store.publish(guard, publisher, event), guard)

    def unpublish(self, publisher: str, id: str, guard: CommandGuard | None = None) -> SQLOperation:
        return self.order(lambda store, guard: store.unpublish(guard, publisher, id), guard)

    def settled(self) -> list[SQLOperation]:
        """Two of three are registered, and have contracts with everybody."""
        return [
            *(self.contract(make_contract(f"r {did}", None, did)) for did in PEOPLE[:2]),
            *(self.contract(make_contract(f"{a} {b}", a, b)) for a in PEOPLE[:2] for b in PEOPLE),
        ]


def make_contract(id: str, owner: str | None, peer: str, until: float = NOON + HOUR) -> Contract:
    return Contract(id, owner, peer, until, id.encode(), b"{}")


def create_memory_database() -> StoreConnection:
    """A database with all tables that needs no file."""
    connection = sqlite3.connect(":memory:", isolation_level=None, factory=StoreConnection)
    migrate_schema(connection, read_schema_steps())
    return connection


def resolve_results(outcomes: Iterable[Any]) -> list[Any]:
    """The value of each, or the kind of its error."""
    return [type(outcome) if isinstance(outcome, MediatorError) else outcome for outcome in outcomes]


def read_all_rows(connection: sqlite3.Connection) -> list[list[tuple[Any, ...]]]:
    """All that is kept, but for numbers."""
    return [connection.execute(query).fetchall() for query in KEPT]


def find_miscounts(connection: sqlite3.Connection) -> list[str]:
    """What is not as many as it is said to be."""
    return [what for what, query in COUNTED.items() if connection.execute(query).fetchall()]
