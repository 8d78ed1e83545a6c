"""
Records of a SQLite store: export in one read transaction while a daemon writes, and import into a draft file beside
it, which is renamed when it is complete.

Derived rows are made by triggers and statements of the store, without its quotas.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from sqlite3 import SQLITE_CONSTRAINT_PRIMARYKEY, SQLITE_CONSTRAINT_UNIQUE, DatabaseError, IntegrityError
from typing import Any, NamedTuple

from mediatord.backup.durable_files import chown_to_owner, require_directory
from mediatord.backup.records import (
    RECORD_FIELDS,
    AccountRecord,
    BackupError,
    InvalidArchiveError,
    MessageRecord,
    PublicEventRecord,
    RecipientRecord,
    RecordCounts,
    RecordSource,
    StoredEventRecord,
    StoreRecord,
    V1ConnectionRecord,
    require_empty_counts,
    resolve_seen_at,
)
from mediatord.backup.sqlite_database_files import (
    check_schema,
    connect_immutable,
    install_database,
    lock_store,
    open_checked,
    require_database,
)
from mediatord.store.interfaces import decentrl
from mediatord.store.interfaces.decentrl import get_utf8_size
from mediatord.store.registered_spellings import import_spellings
from mediatord.store.sqlite import decentrl_queries, event_archive_queries
from mediatord.store.sqlite.connection import StoreConnection, connect, connect_reader, hash_did
from mediatord.store.sqlite.database_file import (
    DatabaseUnusable,
    open_database,
)
from mediatord.store.sqlite.event_archive_queries import parse_tag_ids, read_label_texts
from mediatord.store.sqlite.message_queries import get_digest_head

_GET_DID = "(SELECT did FROM party WHERE id = {})"
_GET_LABEL = "(SELECT text FROM label WHERE id = {})"
_GET_PARTY = "(SELECT id FROM party WHERE did = :{})"
# The number of an account, or that of a party with a minus.
_GET_OWNER = {"account": "iif(owner > 0, owner, NULL)", "identity": _GET_DID.format("-owner")}
_OWNER = {"owner": f"coalesce(:account, -{_GET_PARTY.format('identity')})"}
_MEDIATOR = decentrl_queries.MEDIATOR_ID
_UTF8_SIZE = "length(CAST(:payload AS BLOB))"
_DUE_AT = "iif(:arrived_at IS NULL, :due_at, iif(:arrived_at = :received_at, NULL, -:arrived_at))"
_COUNT_IN_QUEUE = """
    INSERT INTO queue (account_id, recipient_id, messages, bytes) VALUES (:account, :recipient, 1, length(:payload))
    ON CONFLICT DO UPDATE SET messages = messages + 1, bytes = bytes + excluded.bytes
"""
_COUNT_NAMES = "UPDATE account SET places = max(places, :last), recipients = recipients + :more WHERE id = :account"
_COUNT_NONCES = "UPDATE counter SET value = value + ? WHERE name = 'nonces'"
_COUNT_ACCEPTED = "UPDATE ledger SET accepted = accepted + ? WHERE protocol = '{}'"


class _TableMapping(NamedTuple):
    """
    How a kind of records is stored.

    :param renamed: columns that have the values of fields of other names, by these.
    :param read: fields that no column has: expressions with columns.
    :param write: further columns: expressions with fields, and with the functions that are added to SQL. Events that
        are searched are inserted by the functions of the store instead.
    :param name: of the table, if it is not that of the kind.
    :param where: a plus disables an index for a term, so that rows are read in their order.
    :param parties: columns with ids of parties, by fields with their DIDs, which are inserted if they are new.
    :param usage: counters of the first of them, and what to add.
    :param also: further statements with fields for each record.
    :param total: a statement that adds a number of records, if they are counted.
    """

    renamed: dict[str, str] = {}
    read: dict[str, str] = {}
    write: dict[str, str] = {}
    name: str = ""
    order: str = "seq"
    where: str = "TRUE"
    parties: dict[str, str] = {}
    usage: dict[str, str] = {}
    also: tuple[str, ...] = ()
    total: str = ""


_TABLES = {
    "account": _TableMapping({"number": "id"}, write={"did_key": "hash_did(:did)"}, order="id"),
    "retired": _TableMapping(order="did"),
    "recipient": _TableMapping(
        {"number": "id", "account": "account_id", "place": "registered"},
        write={"did_digest": "did_digest(:did)"},
        order="id",
        also=(_COUNT_NAMES,),
    ),
    # A delayed message that was handed out has the negative time of that.
    "message": _TableMapping(
        {"account": "account_id", "recipient": "recipient_id"},
        {
            "due_at": "iif(due_at > 0, due_at, NULL)",
            "arrived_at": "CASE WHEN due_at IS NULL THEN received_at WHEN due_at <= 0 THEN -due_at END",
        },
        {"size": "length(:payload)", "due_at": _DUE_AT} | {"digest": ":digest", "digest_head": ":digest_head"},
        also=(_COUNT_IN_QUEUE,),
        total=_COUNT_ACCEPTED.format("didcomm"),
    ),
    "long_form": _TableMapping(name="did_document", order="short"),
    "nonce": _TableMapping(order="place", total=_COUNT_NONCES),
    "registration": _TableMapping(
        write={"owner_id": f"{_MEDIATOR}"},
        name="contract",
        order="id",
        where=f"+owner_id = {_MEDIATOR}",
        parties={"did": "peer_id"},
    ),
    "contract": _TableMapping(
        where=f"+owner_id > {_MEDIATOR}", parties={"owner": "owner_id", "peer": "peer_id"}, usage={"contracts": "1"}
    ),
    "contract_request": _TableMapping(
        {"sender": "sender_did"},
        write={"sender_key": "hash_did(:sender)"},
        parties={"recipient": "recipient_id"},
        usage={"requests": "1"},
    ),
    "pending_event": _TableMapping(
        {"sender": "sender_did"},
        {"received_at": "received_at"},
        {"sender_key": "hash_did(:sender)", "received_at": "repr(:received_at)", "size": _UTF8_SIZE},
        parties={"recipient": "recipient_id"},
        usage={"pending": "1", "pending_bytes": _UTF8_SIZE},
        total=_COUNT_ACCEPTED.format("decentrl"),
    ),
    "stored_event": _TableMapping(
        read={"sender": _GET_LABEL.format("sender"), "recipient": _GET_LABEL.format("recipient")}
        | {"payload": "(SELECT payload FROM stored_payload WHERE seq = stored_event.seq)"},
        parties={"owner": "owner_id"},
    ),
    "public_event": _TableMapping(
        read={"channel_id": _GET_LABEL.format("channel")}, parties={"publisher": "owner_id"}
    ),
    "device": _TableMapping(read=_GET_OWNER, write=_OWNER, parties={"identity": "owner"}),
    # Claims belong to processes.
    "wakeup": _TableMapping(
        read=_GET_OWNER,
        write=_OWNER,
        order=f"owner < 0, max(owner, 0), {_GET_DID.format('-owner')}",
        where="(polled_at IS NOT NULL OR woken_at IS NOT NULL)",
        parties={"identity": "owner"},
    ),
    "v1_connection": _TableMapping(
        {"wallet": "account"},
        write={"has_account": "EXISTS (SELECT 1 FROM account WHERE did_key = hash_did(:wallet))"},
        order="account",
    ),
}


def _map_columns(kind: str) -> dict[str, str]:
    """Columns by the fields whose values they have."""
    table = _TABLES[kind]
    derived = table.read | table.parties
    return {field: table.renamed.get(field, field) for field in RECORD_FIELDS[kind] if field not in derived}


def _build_select(kind: str, columns: Mapping[str, str]) -> str:
    """:param columns: expressions by the names of the result."""
    table = _TABLES[kind]
    shown = ", ".join(f"{expression} AS {name}" for name, expression in columns.items())
    order = f"ORDER BY {table.order}" if len(columns) > 1 else ""
    return f"SELECT {shown} FROM {table.name or kind} WHERE {table.where} {order}"


def _build_inserts(kind: str) -> Iterator[str]:
    table = _TABLES[kind]
    for field in table.parties:
        yield f"INSERT OR IGNORE INTO party (did) VALUES (:{field})"
    values = {column: f":{field}" for field, column in _map_columns(kind).items()}
    values |= {column: _GET_PARTY.format(field) for field, column in table.parties.items()} | table.write
    yield f"INSERT INTO {table.name or kind} ({', '.join(values)}) VALUES ({', '.join(values.values())})"
    if table.usage:
        values = {"party_id": _GET_PARTY.format(next(iter(table.parties)))} | table.usage
        sums = ", ".join(f"{column} = {column} + excluded.{column}" for column in table.usage)
        yield f"""
            INSERT INTO party_usage ({", ".join(values)}) VALUES ({", ".join(values.values())})
            ON CONFLICT DO UPDATE SET {sums}
        """
    yield from table.also


_INSERTS = {kind: list(_build_inserts(kind)) for kind in _TABLES}


class SQLiteRecordSource(RecordSource):
    """:param connection: in a transaction."""

    backend = "sqlite"

    def __init__(self, connection: StoreConnection) -> None:
        self._connection = connection

    def count(self, kind: str) -> int:
        ((number,),) = self._connection.execute(_build_select(kind, {"number": "count(*)"})).fetchall()
        return int(number)

    def read(self, kind: str) -> Iterator[dict[str, Any]]:
        table = _TABLES[kind]
        parties = {field: _GET_DID.format(column) for field, column in table.parties.items()}
        rows = self._connection.execute(_build_select(kind, _map_columns(kind) | parties | table.read))
        names = [column for column, *_ in rows.description]
        for row in rows:
            fields = dict(zip(names, row, strict=True))
            if kind == "recipient" and fields["names"] is not None:
                fields["names"] = json.loads(fields["names"])
            elif kind in ("stored_event", "public_event"):
                labels = parse_tag_ids(fields["tags"])
                texts = read_label_texts(self._connection, set(labels))
                fields["tags"] = tuple([texts[label] for label in labels])
            elif kind == "v1_connection":
                fields["routing_keys"] = json.loads(fields["routing_keys"])
            yield fields


@contextmanager
def open_sqlite_source(path: Path) -> Iterator[SQLiteRecordSource]:
    """
    The records of a database file, as of now.

    :raise BackupError: it does not exist, is of another program, or of another schema version.
    """
    require_database(path)
    with open_checked(path, connect_reader, "cannot be read") as connection:
        connection.execute("BEGIN")
        check_schema(connection, path)  # once more, as of the moment of the export
        yield SQLiteRecordSource(connection)


def copy_sqlite_store(source: Path, to: Path) -> RecordCounts:
    """
    Copy a database into a new file, as of one moment.

    :raise BackupError: it cannot be read, or the copy is damaged.
    """
    require_database(source)
    to.touch(mode=0o600)
    with open_checked(source, connect, f"cannot be copied to {to.parent}") as connection:
        connection.execute("VACUUM INTO ?", (str(to),))
    found = source.stat()
    with suppress(PermissionError):
        shutil.chown(to, found.st_uid, found.st_gid)
    return count_records(to)


def count_records(path: Path) -> RecordCounts:
    """
    Count the records of a database that no process has open, after an integrity check.

    :raise BackupError: it is damaged.
    """
    with open_checked(path, connect_immutable, "is damaged") as connection:
        found = [text for (text,) in connection.execute("PRAGMA integrity_check(1)")]
        if found != ["ok"]:
            raise BackupError(f"{path} is damaged: {found[0]}")
        return SQLiteRecordSource(connection).counts()


# What a record says that repeats a unique column.
_REFUSALS = {
    "account": "account {number} has a DID that another account has in a different form",
    "retired": "the retired DID {did} occurs twice in different forms",
    "recipient": "recipient {number} has a DID that is registered in a different form",
    "v1_connection": "the DIDComm v1 connection of {wallet} has a key that another connection has",
}
_UNLIMITED_CAPS = decentrl.DecentrlQuotas(*[1 << 62] * 8)


def _insert_record(connection: StoreConnection, one: StoreRecord) -> None:
    """:raise InvalidArchiveError: a unique column has this value already."""
    match one:
        case PublicEventRecord():
            event_archive_queries.publish_event(connection, one.publisher, one.to_event(), _UNLIMITED_CAPS)
            return
        case StoredEventRecord():
            owner = decentrl_queries.get_or_create_party(connection, one.owner)
            stored = event_archive_queries.NewStoredEvent(one.to_event(), owner, one.processed)
            event_archive_queries.insert_stored_events(connection, [stored])
            usage = (owner, 1, get_utf8_size(one.payload, *one.tags), 1)
            decentrl_queries.change_party_usage(connection, event_archive_queries.STORED_USAGE, [usage])
            return
    values = _get_values(one)
    try:
        for statement in _INSERTS[one.kind]:
            connection.execute(statement, values)
    except IntegrityError as error:
        unique = error.sqlite_errorcode in (SQLITE_CONSTRAINT_UNIQUE, SQLITE_CONSTRAINT_PRIMARYKEY)
        if unique and one.kind in _REFUSALS:
            raise InvalidArchiveError(_REFUSALS[one.kind].format(**values)) from None
        raise


def _get_values(one: StoreRecord) -> dict[str, Any]:
    """Fields of a record, and further parameters of the statements of its kind."""
    values = vars(one).copy()
    match one:
        case AccountRecord():
            values["seen_at"] = resolve_seen_at(one)
        case MessageRecord():
            values["digest"] = digest = sha256(one.payload).digest()
            values["digest_head"] = get_digest_head(digest)
        case RecipientRecord():
            names = import_spellings(one.did, one.place, one.names)
            spellings = None if names.stored is None else json.dumps(names.stored)
            # The trigger of the table counts one name.
            more = max(len(names) - 1, 0)
            values |= {"did": names.did, "place": names.place, "names": spellings, "last": names.last, "more": more}
        case V1ConnectionRecord():
            values["routing_keys"] = json.dumps(one.routing_keys)
    return values


# SQLite's default limit of a row, minus room for the other columns.
_MAX_PAYLOAD_BYTES = 999_000_000
_CHECKPOINT_PAGES = 16_384
_CREATE_PROGRESS_TABLE = (
    "CREATE TABLE IF NOT EXISTS import_progress (archive TEXT NOT NULL, done INTEGER NOT NULL) STRICT"
)


class SQLiteRecordTarget:
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
                f"an import of another archive into {self._path} is incomplete; run it again, or delete {self._draft}"
            )
        return int(found[1])

    def write(self, first: int, records: Sequence[StoreRecord]) -> None:
        connection = self.connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            for record in records:
                _insert_record(connection, record)
            for kind, number in Counter([record.kind for record in records]).items():
                if _TABLES[kind].total:
                    connection.execute(_TABLES[kind].total, (number,))
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
        self.connection = open_database(self._draft, None)
        unfinished = "SELECT 1 FROM sqlite_schema WHERE name = 'import_progress'"
        if not self.connection.execute(unfinished).fetchone() and any(self.counts().values()):
            self.close()
            for suffix in ("", "-wal", "-shm"):
                self._draft.with_name(self._draft.name + suffix).unlink(missing_ok=True)
            self.connection = open_database(self._draft, None)
        self.connection.create_function("hash_did", 1, hash_did, deterministic=True)
        self.connection.create_function("repr", 1, repr, deterministic=True)

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
            raise BackupError(f"cannot write {path}: {error}") from None
        finally:
            target.close()


def make_import_path(path: Path) -> Path:
    """Path of the draft of an import."""
    return path.with_name(f"{path.name}.import")


def require_empty_database(path: Path) -> None:
    """:raise BackupError: a store is not empty, or cannot be read."""
    if not path.exists() or not path.stat().st_size:
        return
    with open_checked(path, connect_reader, "cannot be read") as connection:
        require_empty_counts(str(path), SQLiteRecordSource(connection).counts())
