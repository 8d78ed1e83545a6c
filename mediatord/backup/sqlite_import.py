"""
Import into a SQLite store: into a draft file beside it, which is renamed when it is complete.

Derived rows are made by the triggers and statements of the store, without its quotas. Functions that insert records
run inside a transaction of the caller.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from sqlite3 import SQLITE_CONSTRAINT_PRIMARYKEY, SQLITE_CONSTRAINT_UNIQUE, DatabaseError, IntegrityError
from typing import Any

from mediatord.backup.archive import chown_to_directory_owner, sync_directory
from mediatord.backup.records import (
    AccountRecord,
    BackupError,
    ContractRecord,
    ContractRequestRecord,
    InvalidArchiveError,
    LongFormRecord,
    MessageRecord,
    NonceRecord,
    PendingEventRecord,
    PublicEventRecord,
    RecipientRecord,
    RecordCounts,
    RegistrationRecord,
    RetiredDIDRecord,
    StoredEventRecord,
    StoreRecord,
    require_empty_counts,
    resolve_seen_at,
)
from mediatord.backup.sqlite_export import SQLiteRecordSource, check_sqlite_schema
from mediatord.protocol.canonical_did import canonicalize_did, compute_did_digest
from mediatord.store.interfaces import decentrl
from mediatord.store.quotas import get_utf8_size
from mediatord.store.recipient_names import import_names
from mediatord.store.sqlite import decentrl_queries, event_queries
from mediatord.store.sqlite.connection import StoreConnection, hash_did
from mediatord.store.sqlite.database_file import (
    APPLICATION_ID,
    DatabaseFileLock,
    DatabaseUnusable,
    StoreInUse,
    connect,
    connect_reader,
    migrate_schema,
    open_database,
    read_schema_steps,
)
from mediatord.store.sqlite.decentrl_queries import MEDIATOR_ID, change_party_usage, get_or_create_party
from mediatord.store.sqlite.event_queries import NewStoredEvent, add_stored_usage, insert_stored_events
from mediatord.store.sqlite.message_writes import add_queue_counts

_UNLIMITED = 1 << 62
_UNLIMITED_CAPS = decentrl.DecentrlQuotas(*[_UNLIMITED] * 8)
_INSERT_MESSAGE = """
    INSERT INTO message (
        id, recipient_id, account_id, form, size, received_at, expires_at, due_at, pushes,
        digest_head, digest, payload
    ) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_INSERT_ACCOUNT = (
    "INSERT INTO account (id, did, did_key, created_at, draft03, seen_at, fresh) VALUES (?, ?, ?, ?, ?, ?, ?)"
)
_INSERT_RETIRED_DID = "INSERT INTO retired (did) VALUES (?)"
_INSERT_RECIPIENT = """
    INSERT INTO recipient (id, account_id, did, did_digest, registered, names) VALUES (?, ?, ?, ?, ?, ?)
"""
_INSERT_CONTRACT = "INSERT INTO contract (id, owner_id, peer_id, expires_at, digest, text) VALUES (?, ?, ?, ?, ?, ?)"
_INSERT_PENDING_EVENT = """
    INSERT INTO pending_event (id, recipient_id, sender_key, sender_did, received_at, size, payload)
    VALUES (?, ?, ?, ?, ?, ?, ?)
"""


def _insert_accounts(connection: StoreConnection, records: Sequence[AccountRecord]) -> None:
    for one in records:
        did, seen_at = canonicalize_did(one.did), resolve_seen_at(one)
        row = (one.number, did, hash_did(did), one.created_at, one.draft03, seen_at, one.fresh)
        _insert_unique(
            connection, _INSERT_ACCOUNT, row, f"account {one.number} has another form of a DID that has an account"
        )


def _insert_retired_dids(connection: StoreConnection, records: Sequence[RetiredDIDRecord]) -> None:
    for one in records:
        refusal = f"the retired DID {one.did} is another form of one that is there"
        _insert_unique(connection, _INSERT_RETIRED_DID, (canonicalize_did(one.did),), refusal)


def _insert_unique(connection: StoreConnection, statement: str, row: tuple[Any, ...], refusal: str) -> None:
    """Insert a row. :raise InvalidArchiveError: a unique column has this value already."""
    try:
        connection.execute(statement, row)
    except IntegrityError as error:
        if error.sqlite_errorcode in (SQLITE_CONSTRAINT_UNIQUE, SQLITE_CONSTRAINT_PRIMARYKEY):
            raise InvalidArchiveError(refusal) from None
        raise


def _insert_recipients(connection: StoreConnection, records: Sequence[RecipientRecord]) -> None:
    for one in records:
        names = import_names(one.did, one.place, one.names)
        stored = None if names.stored is None else json.dumps(names.stored)
        row = one.number, one.account, names.did, compute_did_digest(one.did), names.place, stored
        _insert_unique(
            connection, _INSERT_RECIPIENT, row, f"recipient {one.number} is another name of a DID that is registered"
        )
        change = "UPDATE account SET places = max(places, ?), recipients = recipients + ? WHERE id = ?"
        connection.execute(change, (names.last, max(len(names) - 1, 0), one.account))


def _insert_messages(connection: StoreConnection, records: Sequence[MessageRecord]) -> None:
    connection.executemany(_INSERT_MESSAGE, [_make_message_row(one) for one in records])
    messages: Counter[tuple[int, int]] = Counter()
    sizes: Counter[tuple[int, int]] = Counter()
    for one in records:
        messages[one.account, one.recipient] += 1
        sizes[one.account, one.recipient] += len(one.payload)
    add_queue_counts(connection, [(*queue, number, sizes[queue]) for queue, number in messages.items()])
    connection.add_ledger_entry("didcomm", "accepted", len(records))


def _make_message_row(one: MessageRecord) -> tuple[Any, ...]:
    digest = sha256(one.payload).digest()
    return (
        one.id,
        one.recipient,
        one.account,
        one.form,
        len(one.payload),
        one.received_at,
        one.expires_at,
        _encode_due_at(one),
        one.pushes,
        int.from_bytes(digest[:8], "big", signed=True),
        digest,
        one.payload,
    )


def _encode_due_at(one: MessageRecord) -> float | None:
    """NULL for a message that was never delayed; the negative time of handing it out for one that was."""
    if one.arrived_at is None:
        return one.due_at
    return None if one.arrived_at == one.received_at else -one.arrived_at


def _insert_long_forms(connection: StoreConnection, records: Sequence[LongFormRecord]) -> None:
    connection.executemany(
        "INSERT INTO did_document (short, long) VALUES (?, ?)",
        [(canonicalize_did(one.short), one.long) for one in records],
    )


def _insert_nonces(connection: StoreConnection, records: Sequence[NonceRecord]) -> None:
    connection.executemany("INSERT INTO nonce (key, until) VALUES (?, ?)", [(one.key, one.until) for one in records])
    connection.execute("UPDATE tally SET value = value + ? WHERE name = 'nonces'", (len(records),))


def _insert_registrations(connection: StoreConnection, records: Sequence[RegistrationRecord]) -> None:
    for one in records:
        peer = get_or_create_party(connection, one.did)
        connection.execute(_INSERT_CONTRACT, (one.id, MEDIATOR_ID, peer, one.expires_at, one.digest, one.text))


def _insert_contracts(connection: StoreConnection, records: Sequence[ContractRecord]) -> None:
    for one in records:
        owner, peer = get_or_create_party(connection, one.owner), get_or_create_party(connection, one.peer)
        connection.execute(_INSERT_CONTRACT, (one.id, owner, peer, one.expires_at, one.digest, one.text))
        change_party_usage(connection, owner, contracts=1)


def _insert_contract_requests(connection: StoreConnection, records: Sequence[ContractRequestRecord]) -> None:
    for one in records:
        wanted = decentrl.ContractRequest(one.id, one.sender, one.recipient, one.request, one.public_key)
        decentrl_queries.add_contract_request(connection, wanted, _UNLIMITED_CAPS)


def _insert_pending_events(connection: StoreConnection, records: Sequence[PendingEventRecord]) -> None:
    for one in records:
        recipient, size = get_or_create_party(connection, one.recipient), get_utf8_size(one.payload)
        time = repr(one.received_at)
        row = (one.id, recipient, hash_did(one.sender), one.sender, time, size, one.payload)
        connection.execute(_INSERT_PENDING_EVENT, row)
        change_party_usage(connection, recipient, pending=1, pending_bytes=size)
    connection.add_ledger_entry("decentrl", "accepted", len(records))


def _insert_stored_events(connection: StoreConnection, records: Sequence[StoredEventRecord]) -> None:
    owners = {did: get_or_create_party(connection, did) for did in dict.fromkeys([one.owner for one in records])}
    items: Counter[int] = Counter()
    sizes: Counter[int] = Counter()
    for one in records:
        items[owners[one.owner]] += 1
        sizes[owners[one.owner]] += get_utf8_size(one.payload, *one.tags)
    insert_stored_events(
        connection, [NewStoredEvent(_make_stored_event(one), owners[one.owner], one.processed) for one in records]
    )
    add_stored_usage(connection, [(owner, items[owner], sizes[owner]) for owner in items])


def _make_stored_event(one: StoredEventRecord) -> decentrl.StoredEvent:
    return decentrl.StoredEvent(
        one.id, one.sender, one.recipient, one.payload, one.tags, one.timestamp, one.contract_id
    )


def _insert_public_events(connection: StoreConnection, records: Sequence[PublicEventRecord]) -> None:
    for one in records:
        event = decentrl.PublicEvent(one.id, one.event, one.tags, one.timestamp, one.signature, one.channel_id)
        event_queries.publish_event(connection, one.publisher, event, _UNLIMITED_CAPS)


# Functions that insert records of each kind, in the order of an archive.
RECORD_INSERTERS: Mapping[str, Callable[[StoreConnection, Sequence[Any]], None]] = {
    "account": _insert_accounts,
    "retired": _insert_retired_dids,
    "recipient": _insert_recipients,
    "message": _insert_messages,
    "long_form": _insert_long_forms,
    "nonce": _insert_nonces,
    "registration": _insert_registrations,
    "contract": _insert_contracts,
    "contract_request": _insert_contract_requests,
    "pending_event": _insert_pending_events,
    "stored_event": _insert_stored_events,
    "public_event": _insert_public_events,
}

# SQLite's default limit of a row, minus room for the other columns.
_MAX_PAYLOAD_BYTES = 999_000_000
_CHECKPOINT_PAGES = 16_384
_CREATE_PROGRESS_TABLE = (
    "CREATE TABLE IF NOT EXISTS import_progress (archive TEXT NOT NULL, done INTEGER NOT NULL) STRICT"
)


class SQLiteRecordTarget:
    """
    :param path: of the store.
    :param draft: of the file that is written, until it takes the place of the store.
    """

    def __init__(self, path: Path, draft: Path) -> None:
        self._path = path
        self._draft = draft
        self._open: StoreConnection | None = None

    @property
    def connection(self) -> StoreConnection:
        """StoreConnection to the draft."""
        assert self._open is not None
        return self._open

    def accept(self, record: StoreRecord) -> None:
        if isinstance(record, MessageRecord) and len(record.payload) > _MAX_PAYLOAD_BYTES:
            raise InvalidArchiveError(f"message {record.id} is too large for SQLite")

    def begin(self, archive: str) -> int:
        require_empty_database(self._path)
        self._open = self._prepared()
        chown_to_directory_owner(self._path.parent, self._draft)
        # A power cut may lose the last transactions, together with the progress that they recorded.
        self._open.execute("PRAGMA synchronous = NORMAL")
        self._open.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        self._open.execute(_CREATE_PROGRESS_TABLE)
        found = self._open.execute("SELECT archive, done FROM import_progress").fetchone()
        if found is None:
            self._open.execute("INSERT INTO import_progress VALUES (?, 0)", (archive,))
            return 0
        if found[0] != archive:
            raise BackupError(
                f"an import of another archive into {self._path} was not finished: run that again, "
                f"or delete {self._draft} to give it up"
            )
        return int(found[1])

    def write(self, first: int, records: Sequence[StoreRecord]) -> None:
        connection = self.connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            for kind, batch in groupby(records, key=lambda record: record.kind):
                RECORD_INSERTERS[kind](connection, list(batch))
            done = first + len(records) - 1
            changed = connection.execute("UPDATE import_progress SET done = ? WHERE done = ?", (done, first - 1))
            if not changed.rowcount:
                raise BackupError(f"another import writes to {self._path}")
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def counts(self) -> RecordCounts:
        return SQLiteRecordSource(self.connection).counts()

    def finish(self) -> None:
        emptying = "PRAGMA wal_checkpoint(TRUNCATE)"
        self.connection.execute(emptying)  # if this fails, the progress is still recorded
        self.connection.execute("DROP TABLE import_progress")
        self.connection.execute(emptying)
        self.close()
        install_database(self._draft, self._path)

    def _prepared(self) -> StoreConnection:
        """Open the draft; one that was completed but not renamed has lost its progress and is started again."""
        connection = open_database(self._draft, None)
        if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'import_progress'").fetchone():
            return connection
        complete = any(SQLiteRecordSource(connection).counts().values())
        if not complete:
            return connection
        connection.close()
        for suffix in ("", "-wal", "-shm"):
            self._draft.with_name(self._draft.name + suffix).unlink(missing_ok=True)
        return open_database(self._draft, None)

    def close(self) -> None:
        """Close the draft."""
        if self._open is not None:
            self._open.close()
            self._open = None


@contextmanager
def open_sqlite_target(path: Path) -> Iterator[SQLiteRecordTarget]:
    """
    An import into a database file; daemons are locked out meanwhile.

    :raise BackupError: a daemon uses it, or it cannot be written.
    """
    if not path.parent.is_dir():
        raise BackupError(f"{path.parent} does not exist: create it first")
    with lock_store(path):
        target = SQLiteRecordTarget(path, make_import_path(path))
        try:
            yield target
        except (DatabaseError, DatabaseUnusable) as error:
            raise BackupError(f"{path} cannot be written: {error}") from None
        finally:
            target.close()


def make_import_path(path: Path) -> Path:
    """Path of the draft of an import."""
    return path.with_name(f"{path.name}.import")


@contextmanager
def lock_store(path: Path) -> Iterator[None]:
    """
    Lock daemons out of a store.

    :raise BackupError: a daemon uses it.
    """
    use = DatabaseFileLock(path)
    try:
        use.take()
    except StoreInUse as error:
        raise BackupError(f"{error}; stop it first") from None
    except ValueError as error:
        raise BackupError(str(error)) from None
    try:
        yield
    finally:
        use.release()


def require_empty_database(path: Path) -> None:
    """:raise BackupError: a store is not empty, or cannot be read."""
    if not path.exists() or not path.stat().st_size:
        return
    try:
        with closing(connect_reader(path)) as connection:
            check_sqlite_schema(connection, path)
            require_empty_counts(str(path), SQLiteRecordSource(connection).counts())
    except DatabaseError as error:
        raise BackupError(f"{path} cannot be read: {error}") from None


def migrate_database(draft: Path) -> None:
    """
    Upgrade the schema of a database that no process has open; other files and newer versions are not changed.

    :raise BackupError: it is damaged.
    """
    try:
        with closing(connect(draft)) as connection:
            ((application,),) = connection.execute("PRAGMA application_id").fetchall()
            ((version,),) = connection.execute("PRAGMA user_version").fetchall()
            if application == APPLICATION_ID and version < len(read_schema_steps()):
                migrate_schema(connection, read_schema_steps())
    except DatabaseError as error:
        raise BackupError(f"{draft} is damaged: {error}") from None


def install_database(draft: Path, path: Path) -> None:
    """Durably replace an empty store by a file that no process has open."""
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    draft.rename(path)
    sync_directory(path.parent)
