"""
Records of a SQLite store: export in one read transaction while a daemon writes, and import into a draft file beside
it, which is renamed when it is complete.

Derived rows are made by triggers and statements of the store, without its quotas.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from sqlite3 import SQLITE_CONSTRAINT_PRIMARYKEY, SQLITE_CONSTRAINT_UNIQUE, Connection, DatabaseError, IntegrityError
from typing import Any

from mediatord.backup.durable_files import chown_to_owner, require_directory, sync_directory
from mediatord.backup.records import (
    AccountRecord,
    BackupError,
    InvalidArchiveError,
    MessageRecord,
    PublicEventRecord,
    RecipientRecord,
    RecordCounts,
    RecordSource,
    RecordTarget,
    StoredEventRecord,
    StoreRecord,
    require_empty_counts,
    resolve_seen_at,
)
from mediatord.store.interfaces import decentrl
from mediatord.store.quotas import get_utf8_size
from mediatord.store.recipient_names import import_names
from mediatord.store.sqlite import decentrl_queries, event_queries
from mediatord.store.sqlite.bulk_sql import get_digest_head, hash_did
from mediatord.store.sqlite.database_file import (
    APPLICATION_ID,
    DatabaseUnusable,
    ExclusiveStoreLock,
    StoreInUse,
    connect,
    connect_reader,
    migrate_schema,
    prepare_database,
    read_schema_steps,
)
from mediatord.store.sqlite.event_search import parse_tag_ids, read_label_texts
from mediatord.store.sqlite.queue_accounting import StoreConnection

# Where the records of a kind are, unless in a table of that name.
_TABLES = {
    "long_form": "did_document",
    "registration": f"contract WHERE owner_id = {decentrl_queries.MEDIATOR_ID}",
    "contract": f"contract WHERE owner_id > {decentrl_queries.MEDIATOR_ID}",
}
# CROSS JOIN keeps the order of the tables; a plus disables an index for a term, so that rows are read in the order of
# ids. A delayed message that was handed out has the negative time of that.
_SELECTS = {
    "account": "SELECT id AS number, did, created_at, draft03, seen_at, fresh FROM account ORDER BY id",
    "retired": "SELECT did FROM retired ORDER BY did",
    "recipient": """
        SELECT id AS number, account_id AS account, did, registered AS place, names FROM recipient ORDER BY id
    """,
    "message": """
        SELECT id, account_id AS account, recipient_id AS recipient, form, received_at, expires_at, pushes, payload,
            iif(due_at > 0, due_at, NULL) AS due_at,
            CASE WHEN due_at IS NULL THEN received_at WHEN due_at <= 0 THEN -due_at END AS arrived_at
        FROM message ORDER BY seq
    """,
    "long_form": "SELECT short, long FROM did_document ORDER BY short",
    "nonce": "SELECT key, until FROM nonce ORDER BY place",
    "registration": """
        SELECT c.id, p.did, c.expires_at, c.digest, c.text
        FROM contract c CROSS JOIN party p ON p.id = c.peer_id WHERE +c.owner_id = 0 ORDER BY c.id
    """,
    "contract": """
        SELECT c.id, o.did AS owner, p.did AS peer, c.expires_at, c.digest, c.text
        FROM contract c CROSS JOIN party o ON o.id = c.owner_id CROSS JOIN party p ON p.id = c.peer_id
        WHERE +c.owner_id > 0 ORDER BY c.seq
    """,
    "contract_request": """
        SELECT e.id, p.did AS recipient, e.sender_did AS sender, e.public_key, e.request
        FROM contract_request e CROSS JOIN party p ON p.id = e.recipient_id ORDER BY e.seq
    """,
    "pending_event": """
        SELECT e.id, p.did AS recipient, e.sender_did AS sender, e.received_at, e.payload
        FROM pending_event e CROSS JOIN party p ON p.id = e.recipient_id ORDER BY e.seq
    """,
    "stored_event": """
        SELECT e.id, p.did AS owner, s.text AS sender, r.text AS recipient, e.contract_id, e.timestamp, e.processed,
            e.tags, b.payload
        FROM stored_event e CROSS JOIN party p ON p.id = e.owner_id CROSS JOIN stored_payload b ON b.seq = e.seq
        CROSS JOIN label s ON s.id = e.sender CROSS JOIN label r ON r.id = e.recipient ORDER BY e.seq
    """,
    "public_event": """
        SELECT e.id, p.did AS publisher, c.text AS channel_id, e.signature, e.timestamp, e.tags, e.event
        FROM public_event e CROSS JOIN party p ON p.id = e.owner_id LEFT JOIN label c ON c.id = e.channel
        ORDER BY e.seq
    """,
}


class SQLiteRecordSource(RecordSource):
    """:param connection: in a transaction."""

    backend = "sqlite"

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def count(self, kind: str) -> int:
        ((number,),) = self._connection.execute(f"SELECT count(*) FROM {_TABLES.get(kind, kind)}").fetchall()
        return int(number)

    def read(self, kind: str) -> Iterator[dict[str, Any]]:
        rows = self._connection.execute(_SELECTS[kind])
        names = [column for column, *_ in rows.description]
        for row in rows:
            fields = dict(zip(names, row, strict=True))
            if kind == "recipient" and fields["names"] is not None:
                fields["names"] = json.loads(fields["names"])
            elif kind in ("stored_event", "public_event"):
                labels = parse_tag_ids(fields["tags"])
                texts = read_label_texts(self._connection, set(labels))
                fields["tags"] = tuple([texts[label] for label in labels])
            yield fields


@contextmanager
def open_sqlite_source(path: Path) -> Iterator[SQLiteRecordSource]:
    """
    The records of a database file, as of now.

    :raise BackupError: it does not exist, is of another program, or of another schema version.
    """
    _require_file(path)
    try:
        with closing(connect_reader(path)) as connection:
            connection.execute("BEGIN")
            _check_schema(connection, path)
            yield SQLiteRecordSource(connection)
    except DatabaseError as error:
        raise BackupError(f"{path} cannot be read: {error}") from None


def copy_sqlite_store(source: Path, to: Path) -> RecordCounts:
    """
    Copy a database into a new file, as of one moment.

    :raise BackupError: it cannot be read, or the copy is damaged.
    """
    _require_file(source)
    to.touch(mode=0o600)
    try:
        with closing(connect(source)) as connection:
            _check_schema(connection, source)
            connection.execute("VACUUM INTO ?", (str(to),))
        found = source.stat()
        with suppress(PermissionError):
            shutil.chown(to, found.st_uid, found.st_gid)
        return count_records(to)
    except DatabaseError as error:
        raise BackupError(f"{source} cannot be copied to {to.parent}: {error}") from None


def count_records(path: Path) -> RecordCounts:
    """
    Count the records of a database that no process has open, after an integrity check.

    :raise BackupError: it is damaged.
    """
    try:
        # immutable: no file is created beside it.
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            _check_schema(connection, path)
            found = [text for (text,) in connection.execute("PRAGMA integrity_check(1)")]
            if found != ["ok"]:
                raise BackupError(f"{path} is damaged: {found[0]}")
            return SQLiteRecordSource(connection).counts()
    except DatabaseError as error:
        raise BackupError(f"{path} is damaged: {error}") from None


def _require_file(path: Path) -> None:
    if not path.exists():
        raise BackupError(f"{path} does not exist: no daemon has stored anything yet")


def _check_schema(connection: Connection, path: Path) -> None:
    """:raise BackupError: a database is of another program, or of another schema version."""
    ask = connection.execute
    if ask("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise BackupError(f"{path} is not a database of mediatord")
    version, ours = ask("PRAGMA user_version").fetchone()[0], len(read_schema_steps())
    if version != ours:
        hint = "start the daemon once to upgrade it" if version < ours else "use a newer mediatord"
        raise BackupError(f"{path} has schema version {version}, this mediatord wants {ours}: {hint}")


_INSERT_PARTY = "INSERT OR IGNORE INTO party (did) VALUES ({})"
_INSERT_CONTRACT = """
    INSERT INTO contract (id, owner_id, peer_id, expires_at, digest, text)
    VALUES (:id, {}, (SELECT id FROM party WHERE did = {}), :expires_at, :digest, :text)
"""
# Statements with the fields of a record, for each kind but events that are searched. They use the functions that
# _define_functions adds to SQL.
_INSERTS = {
    "account": [
        """
        INSERT INTO account (id, did, did_key, created_at, draft03, seen_at, fresh)
        VALUES (:number, :did, hash_did(:did), :created_at, :draft03, :seen_at, :fresh)
        """
    ],
    "retired": ["INSERT INTO retired (did) VALUES (:did)"],
    "recipient": [
        """
        INSERT INTO recipient (id, account_id, did, did_digest, registered, names)
        VALUES (:number, :account, :did, did_digest(:did), :place, :names)
        """,
        "UPDATE account SET places = max(places, :last), recipients = recipients + :more WHERE id = :account",
    ],
    "message": [
        """
        INSERT INTO message (
            id, recipient_id, account_id, form, size, received_at, expires_at, due_at, pushes,
            digest_head, digest, payload
        ) VALUES (
            :id, :recipient, :account, :form, length(:payload), :received_at, :expires_at,
            CASE WHEN :arrived_at IS NULL THEN :due_at WHEN :arrived_at <> :received_at THEN -:arrived_at END,
            :pushes, digest_head(:payload), sha256(:payload), :payload
        )
        """,
        """
        INSERT INTO queue (account_id, recipient_id, messages, bytes)
        VALUES (:account, :recipient, 1, length(:payload))
        ON CONFLICT DO UPDATE SET messages = messages + 1, bytes = bytes + excluded.bytes
        """,
        "UPDATE ledger SET accepted = accepted + 1 WHERE half = 'didcomm'",
    ],
    "long_form": ["INSERT INTO did_document (short, long) VALUES (:short, :long)"],
    "nonce": [
        "INSERT INTO nonce (key, until) VALUES (:key, :until)",
        "UPDATE tally SET value = value + 1 WHERE name = 'nonces'",
    ],
    "registration": [_INSERT_PARTY.format(":did"), _INSERT_CONTRACT.format(decentrl_queries.MEDIATOR_ID, ":did")],
    "contract": [
        _INSERT_PARTY.format(":owner"),
        _INSERT_PARTY.format(":peer"),
        _INSERT_CONTRACT.format("(SELECT id FROM party WHERE did = :owner)", ":peer"),
        """
        INSERT INTO holding (party_id, contracts) SELECT id, 1 FROM party WHERE did = :owner
        ON CONFLICT DO UPDATE SET contracts = contracts + 1
        """,
    ],
    "contract_request": [
        _INSERT_PARTY.format(":recipient"),
        """
        INSERT INTO contract_request (id, recipient_id, sender_key, sender_did, public_key, request)
        SELECT :id, id, hash_did(:sender), :sender, :public_key, :request FROM party WHERE did = :recipient
        """,
        """
        INSERT INTO holding (party_id, requests) SELECT id, 1 FROM party WHERE did = :recipient
        ON CONFLICT DO UPDATE SET requests = requests + 1
        """,
    ],
    "pending_event": [
        _INSERT_PARTY.format(":recipient"),
        """
        INSERT INTO pending_event (id, recipient_id, sender_key, sender_did, received_at, size, payload)
        SELECT :id, id, hash_did(:sender), :sender, repr(:received_at), length(CAST(:payload AS BLOB)), :payload
        FROM party WHERE did = :recipient
        """,
        """
        INSERT INTO holding (party_id, pending, pending_bytes)
        SELECT id, 1, length(CAST(:payload AS BLOB)) FROM party WHERE did = :recipient
        ON CONFLICT DO UPDATE SET pending = pending + 1, pending_bytes = pending_bytes + excluded.pending_bytes
        """,
        "UPDATE ledger SET accepted = accepted + 1 WHERE half = 'decentrl'",
    ],
}
# What a record says that repeats a unique column.
_REFUSALS = {
    "account": "account {number} has another form of a DID that has an account",
    "retired": "the retired DID {did} is another form of one that is there",
    "recipient": "recipient {number} is another name of a DID that is registered",
}
_UNLIMITED_CAPS = decentrl.DecentrlQuotas(*[1 << 62] * 8)


def _define_functions(connection: Connection) -> None:
    def define(name: str, function: Callable[[Any], str | bytes | int]) -> None:
        connection.create_function(name, 1, function, deterministic=True)

    define("hash_did", hash_did)
    define("repr", repr)
    define("sha256", lambda payload: sha256(payload).digest())
    define("digest_head", lambda payload: get_digest_head(sha256(payload).digest()))


def _insert_record(connection: Connection, one: StoreRecord) -> None:
    """:raise InvalidArchiveError: a unique column has this value already."""
    values = dict(one)
    match one:
        case PublicEventRecord():
            shown = decentrl.PublicEvent(one.id, one.event, one.tags, one.timestamp, one.signature, one.channel_id)
            event_queries.publish_event(connection, one.publisher, shown, _UNLIMITED_CAPS)
            return
        case StoredEventRecord():
            owner = decentrl_queries.get_or_create_party(connection, one.owner).id
            event = decentrl.StoredEvent(
                one.id, one.sender, one.recipient, one.payload, one.tags, one.timestamp, one.contract_id
            )
            event_queries.insert_stored_events(
                connection, [event_queries.NewStoredEvent(event, owner, one.processed)]
            )
            event_queries.add_stored_usage(connection, [(owner, 1, get_utf8_size(one.payload, *one.tags))])
            return
        case AccountRecord():
            values["seen_at"] = resolve_seen_at(one)
        case RecipientRecord():
            names = import_names(one.did, one.place, one.names)
            stored = None if names.stored is None else json.dumps(names.stored)
            # The trigger of the table counts one name.
            more = max(len(names) - 1, 0)
            values |= {"did": names.did, "place": names.place, "names": stored, "last": names.last, "more": more}
    try:
        for statement in _INSERTS[one.kind]:
            connection.execute(statement, values)
    except IntegrityError as error:
        unique = error.sqlite_errorcode in (SQLITE_CONSTRAINT_UNIQUE, SQLITE_CONSTRAINT_PRIMARYKEY)
        if unique and one.kind in _REFUSALS:
            raise InvalidArchiveError(_REFUSALS[one.kind].format(**values)) from None
        raise


# SQLite's default limit of a row, minus room for the other columns.
_MAX_PAYLOAD_BYTES = 999_000_000
_CHECKPOINT_PAGES = 16_384
_CREATE_PROGRESS_TABLE = (
    "CREATE TABLE IF NOT EXISTS import_progress (archive TEXT NOT NULL, done INTEGER NOT NULL) STRICT"
)


class SQLiteRecordTarget(RecordTarget):
    """
    :param path: of the store.
    :ivar connection: to the draft of the file, until that takes the place of the store.
    """

    connection: StoreConnection

    def __init__(self, path: Path) -> None:
        self._path = path
        self._draft = make_import_path(path)

    def accept(self, record: StoreRecord) -> None:
        if isinstance(record, MessageRecord) and len(record.payload) > _MAX_PAYLOAD_BYTES:
            raise InvalidArchiveError(f"message {record.id} is too large for SQLite")

    def begin(self, archive: str) -> int:
        require_empty_database(self._path)
        self._open_draft()
        chown_to_owner(self._draft, self._path)
        # A power cut may lose the last transactions, together with the progress that they recorded.
        self.connection.execute("PRAGMA synchronous = NORMAL")
        self.connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        self.connection.execute(_CREATE_PROGRESS_TABLE)
        found = self.connection.execute("SELECT archive, done FROM import_progress").fetchone()
        if found is None:
            self.connection.execute("INSERT INTO import_progress VALUES (?, 0)", (archive,))
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
            for record in records:
                _insert_record(connection, record)
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

    def _open_draft(self) -> None:
        """Open the draft; one that was completed but not renamed has lost its progress and is started again."""
        self.connection = prepare_database(self._draft)
        unfinished = "SELECT 1 FROM sqlite_schema WHERE name = 'import_progress'"
        if not self.connection.execute(unfinished).fetchone() and any(self.counts().values()):
            self.close()
            for suffix in ("", "-wal", "-shm"):
                self._draft.with_name(self._draft.name + suffix).unlink(missing_ok=True)
            self.connection = prepare_database(self._draft)
        _define_functions(self.connection)

    def close(self) -> None:
        """Close the draft, if it is open."""
        if hasattr(self, "connection"):
            self.connection.close()


@contextmanager
def open_sqlite_target(path: Path) -> Iterator[SQLiteRecordTarget]:
    """
    An import into a database file; daemons are locked out meanwhile.

    :raise BackupError: a daemon uses it, or it cannot be written.
    """
    require_directory(path.parent)
    with lock_store(path):
        target = SQLiteRecordTarget(path)
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
    use = ExclusiveStoreLock(path)
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
            _check_schema(connection, path)
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
