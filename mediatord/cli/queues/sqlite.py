"""Queues in the file of the backend `sqlite`."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from mediatord.cli.queues.course import Course
from mediatord.cli.queues.values import Entry, Half, Queue, Scope, Totals
from mediatord.protocol.canonical_did import canonical_did, did_digest
from mediatord.service import StartupError
from mediatord.store import sql_messages, sql_pending
from mediatord.store.database import APPLICATION_ID, connect, schema_steps
from mediatord.store.locking import PATIENCE_SECONDS, begin, patiently
from mediatord.store.sql_rows import key_of, pieces

# In one transaction: the daemon cannot write meanwhile.
_AT_A_TIME = 50

_MESSAGE_QUEUES = """
    SELECT r.did, a.did, q.messages, q.bytes,
        (SELECT m.received_at FROM message m WHERE m.recipient_id = q.recipient_id ORDER BY m.seq LIMIT 1)
    FROM queue q JOIN recipient r ON r.id = q.recipient_id JOIN account a ON a.id = q.account_id
    ORDER BY q.messages DESC, r.did LIMIT ?
"""
_EVENT_QUEUES = """
    SELECT p.did, p.did, h.pending, h.pending_bytes,
        (SELECT e.received_at FROM pending_event e WHERE e.recipient_id = h.party_id ORDER BY e.seq LIMIT 1)
    FROM holding h JOIN party p ON p.id = h.party_id WHERE h.pending > 0
    ORDER BY h.pending DESC, p.did LIMIT ?
"""
_QUEUES = {"didcomm": _MESSAGE_QUEUES, "decentrl": _EVENT_QUEUES}
_TOTALS = {
    "didcomm": "SELECT count(*), coalesce(sum(messages), 0), coalesce(sum(bytes), 0) FROM queue",
    "decentrl": """
        SELECT count(*), coalesce(sum(pending), 0), coalesce(sum(pending_bytes), 0) FROM holding WHERE pending > 0
    """,
}
_RECIPIENTS = """
    SELECT r.did FROM queue q JOIN recipient r ON r.id = q.recipient_id
    UNION ALL SELECT p.did FROM holding h JOIN party p ON p.id = h.party_id WHERE h.pending > 0
"""
_REGISTERED = "SELECT did FROM recipient UNION SELECT did FROM account UNION SELECT did FROM party"
# Of those of recipients each half has an index of its own.
# Of recipients, those that are registered and those that are left over have an index of their digests each.
_KEPT = """
    SELECT did FROM party WHERE did = :did
    UNION ALL SELECT did FROM recipient WHERE did_digest = :digest AND registered IS NOT NULL
    UNION ALL SELECT did FROM recipient WHERE did_digest = :digest AND registered IS NULL
    UNION ALL SELECT did FROM account WHERE did_key = :account
    UNION ALL SELECT did FROM party WHERE did = :canonical
"""
_MESSAGES = """
    SELECT m.id, a.did, m.size, m.received_at, m.expires_at, m.delivered, m.pushes, m.due_at
    FROM (
        SELECT id FROM recipient WHERE did_digest = :digest AND registered IS NOT NULL
        UNION ALL SELECT id FROM recipient WHERE did_digest = :digest AND registered IS NULL
    ) r JOIN message m ON m.recipient_id = r.id JOIN account a ON a.id = m.account_id
    ORDER BY m.seq
"""
_EVENTS = """
    SELECT e.id, e.size, e.received_at FROM party p JOIN pending_event e ON e.recipient_id = p.id
    WHERE p.did = ? ORDER BY e.seq
"""
_THERE = {"didcomm": "SELECT 1 FROM message WHERE id = ?", "decentrl": "SELECT 1 FROM pending_event WHERE id = ?"}


class WaitingInFile:
    """:param path: of the database."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def queues(self, halves: Sequence[Half], top: int) -> tuple[list[Queue], Totals]:
        """The longest queues, and all of them added up."""
        found: list[Queue] = []
        sums = [0, 0, 0]
        with self._reading() as connection:
            for half in halves:
                found += [_queue(half, row) for row in connection.execute(_QUEUES[half], (top,))]
                totals = connection.execute(_TOTALS[half]).fetchone()
                sums = [one + more for one, more in zip(sums, totals, strict=True)]
        return sorted(found, key=lambda queue: -queue.messages)[:top], Totals(*sums)

    def recipients(self) -> list[str]:
        """The DIDs that something waits for."""
        with self._reading() as connection:
            return [did for (did,) in connection.execute(_RECIPIENTS)]

    def registered(self) -> list[str]:
        """Accounts, recipients and Decentrl identities."""
        with self._reading() as connection:
            return [did for (did,) in connection.execute(_REGISTERED)]

    def kept(self, did: str) -> str | None:
        """The one of those that this is a form of, or a DID URL of, as it is kept."""
        canonical = canonical_did(did)
        asked = {"did": did, "digest": did_digest(did), "account": key_of(canonical), "canonical": canonical}
        with self._reading() as connection:
            found = connection.execute(_KEPT, asked).fetchone()
        return None if found is None else str(found[0])

    def entries(self, scope: Scope) -> list[Entry]:
        """What waits for a recipient."""
        found: list[Entry] = []
        with self._reading() as connection:
            if "didcomm" in scope.halves:
                found += [
                    _message(scope.did, row)
                    for row in connection.execute(_MESSAGES, {"digest": did_digest(scope.did)})
                ]
            if "decentrl" in scope.halves:
                found += [_event(scope.did, row) for row in connection.execute(_EVENTS, (scope.did,))]
        return [entry for entry in found if scope.has(entry)]

    def missing(self, entries: Sequence[Entry]) -> list[Entry]:
        """Those that are not there any more."""
        with self._reading() as connection:
            return [one for one in entries if not connection.execute(_THERE[one.half], (one.id,)).fetchone()]

    def remove(self, entries: Sequence[Entry], course: Course) -> None:
        """By the daemon's own statements, a few at a time; in between it has as much time as each took."""
        with self._complaining(), closing(connect(self._path)) as connection:
            self._check(connection)
            connection.execute("PRAGMA busy_timeout = 0")  # it is waited for in another way
            for some in pieces(list(entries), _AT_A_TIME):
                course.begin(some)
                begin(connection, PATIENCE_SECONDS)
                begun = monotonic()
                gone = _take_out(connection, some)
                patiently(lambda: connection.execute("COMMIT"), PATIENCE_SECONDS)
                took = monotonic() - begun
                course.end([one for one in some if (one.half, one.id) in gone])
                sleep(took)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._complaining():
            address = f"{self._path.absolute().as_uri()}?mode=ro"
            with closing(sqlite3.connect(address, uri=True, isolation_level=None)) as connection:
                connection.execute("BEGIN")  # so that all of it is of the same moment
                self._check(connection)
                yield connection

    @contextmanager
    def _complaining(self) -> Iterator[None]:
        """:raise StartupError: for whatever SQLite says."""
        if not self._path.exists():
            raise StartupError(f"{self._path} is not there: no daemon has kept anything yet")
        try:
            yield
        except sqlite3.Error as error:
            raise StartupError(f"{self._path} cannot be used: {error}") from None

    def _check(self, connection: sqlite3.Connection) -> None:
        """:raise StartupError: it is not ours, or of another version."""
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION_ID:
            raise StartupError(f"{self._path} is not a database of mediatord")
        if version != len(schema_steps()):
            raise StartupError(
                f"{self._path} has version {version} of the schema, and this is for {len(schema_steps())}: "
                "the daemon brings it up to date when it starts"
            )


def _take_out(connection: sqlite3.Connection, entries: Sequence[Entry]) -> set[tuple[Half, str]]:
    """Which were still there."""
    messages = sql_messages.purge(connection, [one.id for one in entries if one.half == "didcomm"])
    gone: set[tuple[Half, str]] = {("didcomm", one.id) for one in messages}
    for did in {one.did for one in entries if one.half == "decentrl"}:
        ids = [one.id for one in entries if one.half == "decentrl" and one.did == did]
        gone |= {("decentrl", one.id) for one in sql_pending.acknowledge(connection, did, ids, "removed")}
    return gone


def _queue(half: Half, row: Sequence[Any]) -> Queue:
    did, account, messages, size, oldest_at = row
    return Queue(half, did, account, messages, size, None if oldest_at is None else float(oldest_at))


def _message(did: str, row: Sequence[Any]) -> Entry:
    id_, account, size, received_at, expires_at, delivered, pushes, due_at = row
    status = "delivered" if delivered else "pending"
    # One below zero is of a message that was handed out when it was due.
    due = due_at if due_at is not None and due_at > 0 else None
    return Entry("didcomm", id_, did, account, size, received_at, expires_at, status, pushes, due)


def _event(did: str, row: Sequence[Any]) -> Entry:
    id_, size, received_at = row
    return Entry("decentrl", id_, did, did, size, float(received_at))
