"""Export of a SQLite store, in one read transaction while a daemon writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from sqlite3 import DatabaseError
from typing import Any

from mediatord.backup.records import (
    RECORD_KINDS,
    AccountRecord,
    BackupError,
    ContractRecord,
    ContractRequestRecord,
    LongFormRecord,
    MessageRecord,
    NonceRecord,
    PendingEventRecord,
    PublicEventRecord,
    RecipientRecord,
    RecordCounts,
    RecordNumbers,
    RegistrationRecord,
    RetiredDIDRecord,
    StoredEventRecord,
    StoreRecord,
)
from mediatord.store.recipient_names import export_names
from mediatord.store.sqlite.connection import StoreConnection
from mediatord.store.sqlite.database_file import APPLICATION_ID, connect_reader, read_schema_steps
from mediatord.store.sqlite.decentrl_queries import MEDIATOR_ID
from mediatord.store.sqlite.event_search import parse_tag_ids, read_label_texts

_RECORD_TABLES = {
    "account": "account",
    "retired": "retired",
    "recipient": "recipient",
    "message": "message",
    "long_form": "did_document",
    "nonce": "nonce",
    "registration": f"contract WHERE owner_id = {MEDIATOR_ID}",
    "contract": f"contract WHERE owner_id > {MEDIATOR_ID}",
    "contract_request": "contract_request",
    "pending_event": "pending_event",
    "stored_event": "stored_event",
    "public_event": "public_event",
}
assert list(_RECORD_TABLES) == list(RECORD_KINDS)

_SELECT_ACCOUNTS = "SELECT id, did, created_at, draft03, seen_at, fresh FROM account ORDER BY id"
_SELECT_RECIPIENTS = "SELECT id, account_id, did, registered, names FROM recipient ORDER BY id"
_SELECT_MESSAGES = """
    SELECT id, account_id, recipient_id, form, received_at, expires_at, due_at, pushes, payload
    FROM message ORDER BY seq
"""
# The plus disables an index for a term, so that rows are read in the order of ids.
_SELECT_REGISTRATIONS = """
    SELECT c.id, p.did, c.expires_at, c.digest, c.text
    FROM contract c CROSS JOIN party p ON p.id = c.peer_id WHERE +c.owner_id = 0 ORDER BY c.id
"""
_SELECT_CONTRACTS = """
    SELECT c.id, o.did, p.did, c.expires_at, c.digest, c.text
    FROM contract c CROSS JOIN party o ON o.id = c.owner_id CROSS JOIN party p ON p.id = c.peer_id
    WHERE +c.owner_id > 0 ORDER BY c.seq
"""
_SELECT_CONTRACT_REQUESTS = """
    SELECT e.id, p.did, e.sender_did, e.public_key, e.request
    FROM contract_request e CROSS JOIN party p ON p.id = e.recipient_id ORDER BY e.seq
"""
_SELECT_PENDING_EVENTS = """
    SELECT e.id, p.did, e.sender_did, e.received_at, e.payload
    FROM pending_event e CROSS JOIN party p ON p.id = e.recipient_id ORDER BY e.seq
"""
_SELECT_STORED_EVENTS = """
    SELECT e.id, p.did, s.text, r.text, e.contract_id, e.timestamp, e.processed, e.tags, b.payload
    FROM stored_event e CROSS JOIN party p ON p.id = e.owner_id CROSS JOIN stored_payload b ON b.seq = e.seq
    CROSS JOIN label s ON s.id = e.sender CROSS JOIN label r ON r.id = e.recipient ORDER BY e.seq
"""
_SELECT_PUBLIC_EVENTS = """
    SELECT e.id, p.did, c.text, e.signature, e.timestamp, e.tags, e.event
    FROM public_event e CROSS JOIN party p ON p.id = e.owner_id LEFT JOIN label c ON c.id = e.channel ORDER BY e.seq
"""


class SQLiteRecordSource:
    """:param connection: in a transaction."""

    backend = "sqlite"

    def __init__(self, connection: StoreConnection) -> None:
        self._connection = connection

    def counts(self) -> RecordCounts:
        return {kind: self._count(table) for kind, table in _RECORD_TABLES.items()}

    def records(self) -> Iterator[StoreRecord]:
        yield from self._didcomm()
        yield from self._decentrl()

    def _count(self, table: str) -> int:
        ((number,),) = self._connection.execute(f"SELECT count(*) FROM {table}").fetchall()
        return int(number)

    def _didcomm(self) -> Iterator[StoreRecord]:
        ask = self._connection.execute
        with closing(RecordNumbers()) as accounts, closing(RecordNumbers()) as recipients:
            for id, did, created_at, draft03, seen_at, fresh in ask(_SELECT_ACCOUNTS):
                yield AccountRecord(
                    number=accounts.allocate(id),
                    did=did,
                    created_at=created_at,
                    draft03=bool(draft03),
                    seen_at=seen_at,
                    fresh=bool(fresh),
                )
            for (did,) in ask("SELECT did FROM retired ORDER BY did"):
                yield RetiredDIDRecord(did=did)
            for id, account, did, place, stored in ask(_SELECT_RECIPIENTS):
                yield RecipientRecord(
                    number=recipients.allocate(id),
                    account=accounts.lookup(account),
                    did=did,
                    place=place,
                    names=export_names(did, place, None if stored is None else json.loads(stored)),
                )
            for row in ask(_SELECT_MESSAGES):
                yield _read_message(row, accounts.lookup(row[1]), recipients.lookup(row[2]))
        for short, long in ask("SELECT short, long FROM did_document ORDER BY short"):
            yield LongFormRecord(short=short, long=long)
        for key, until in ask("SELECT key, until FROM nonce ORDER BY place"):
            yield NonceRecord(key=key, until=until)

    def _decentrl(self) -> Iterator[StoreRecord]:
        ask = self._connection.execute
        for row in ask(_SELECT_REGISTRATIONS):
            yield RegistrationRecord(**_name_columns("id did expires_at digest text", row))
        for row in ask(_SELECT_CONTRACTS):
            yield ContractRecord(**_name_columns("id owner peer expires_at digest text", row))
        for row in ask(_SELECT_CONTRACT_REQUESTS):
            yield ContractRequestRecord(**_name_columns("id recipient sender public_key request", row))
        # Times are stored as Python's text of a float: SQLite would round them.
        for *row, received_at, payload in ask(_SELECT_PENDING_EVENTS):
            yield PendingEventRecord(
                **_name_columns("id recipient sender", row), received_at=float(received_at), payload=payload
            )
        for *row, timestamp, processed, tags, payload in ask(_SELECT_STORED_EVENTS):
            yield StoredEventRecord(
                **_name_columns("id owner sender recipient contract_id", row),
                timestamp=float(timestamp),
                processed=bool(processed),
                tags=self._tags(tags),
                payload=payload,
            )
        for *row, timestamp, tags, event in ask(_SELECT_PUBLIC_EVENTS):
            named = _name_columns("id publisher channel_id signature", row)
            yield PublicEventRecord(**named, timestamp=float(timestamp), tags=self._tags(tags), event=event)

    def _tags(self, written: str) -> tuple[str, ...]:
        labels = parse_tag_ids(written)
        texts = read_label_texts(self._connection, set(labels))
        return tuple([texts[label] for label in labels])


@contextmanager
def open_sqlite_source(path: Path) -> Iterator[SQLiteRecordSource]:
    """
    The records of a database file, as of now.

    :raise BackupError: it does not exist, is of another program, or of another schema version.
    """
    if not path.exists():
        raise BackupError(f"{path} does not exist: no daemon has stored anything yet")
    try:
        with closing(connect_reader(path)) as connection:
            connection.execute("BEGIN")
            check_sqlite_schema(connection, path)
            yield SQLiteRecordSource(connection)
    except DatabaseError as error:
        raise BackupError(f"{path} cannot be read: {error}") from None


def check_sqlite_schema(connection: StoreConnection, path: Path) -> None:
    """:raise BackupError: a database is of another program, or of another schema version."""
    ask = connection.execute
    if ask("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise BackupError(f"{path} is not a database of mediatord")
    version, ours = ask("PRAGMA user_version").fetchone()[0], len(read_schema_steps())
    if version != ours:
        hint = "start the daemon once to upgrade it" if version < ours else "use a newer mediatord"
        raise BackupError(f"{path} has schema version {version}, this mediatord wants {ours}: {hint}")


def _read_message(row: tuple[Any, ...], account: int, recipient: int) -> MessageRecord:
    id, _, _, form, received_at, expires_at, due_at, pushes, payload = row
    # A delayed message that was handed out has the negative time of that.
    delayed = due_at is not None and due_at > 0
    return MessageRecord(
        id=id,
        account=account,
        recipient=recipient,
        form=form,
        received_at=received_at,
        expires_at=expires_at,
        due_at=due_at if delayed else None,
        arrived_at=None if delayed else received_at if due_at is None else -due_at,
        pushes=pushes,
        payload=payload,
    )


def _name_columns(names: str, values: Any) -> dict[str, Any]:
    return dict(zip(names.split(), values, strict=True))
