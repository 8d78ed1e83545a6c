"""Export of a MongoDB store through pymongo: from a snapshot while nodes write, or offline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, TypeAlias

from bson.errors import BSONError, InvalidDocument
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.database import Database
from pymongo.errors import (
    BulkWriteError,
    ConnectionFailure,
    DuplicateKeyError,
    OperationFailure,
    PyMongoError,
)

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
    batch_by_size,
)
from mediatord.store.mongo import schema as decentrl
from mediatord.store.mongo.decentrl_events import EventLabelKind, make_event_label
from mediatord.store.mongo.driver.collection import Collection
from mediatord.store.mongo.driver.uri import parse_mongo_uri
from mediatord.store.mongo.schema import (
    ACCOUNTS,
    IMPORT_MARKER,
    LONG_FORM_DIDS,
    MESSAGES,
    MIGRATIONS,
    NODES,
    NONCES,
    RECIPIENTS,
    RETIRED_DIDS,
    SESSION_OWNERS,
    MongoSchema,
)
from mediatord.store.recipient_names import export_names

MongoDocument: TypeAlias = dict[str, Any]
MongoDatabase: TypeAlias = Database[MongoDocument]

_SERVER_SELECTION_TIMEOUT_MS, _SOCKET_TIMEOUT_MS = 10_000, 900_000
_SNAPSHOT_ERRORS = {239, 246}
_DUPLICATE_KEY_ERROR = 11_000
_LIVE_NODE_FILTER: MongoDocument = {"$expr": {"$gt": ["$until", "$$NOW"]}}


@contextmanager
def connect_to_mongodb(uri: str) -> Iterator[MongoDatabase]:
    """
    The database of a URI.

    :raise BackupError: the URI is not valid, or, at any time, the server fails or refuses a command.
    """
    try:
        address = parse_mongo_uri(uri)
    except ValueError as error:
        raise BackupError(f"storage.mongodb.uri: {error}") from None
    try:
        client: MongoClient[MongoDocument] = MongoClient(
            uri,
            w="majority",
            journal=True,
            serverSelectionTimeoutMS=_SERVER_SELECTION_TIMEOUT_MS,
            socketTimeoutMS=_SOCKET_TIMEOUT_MS,
        )
        with client:
            if "setName" not in client.admin.command("hello"):
                raise BackupError(f"the MongoDB server at {address.hosts} is not a member of a replica set")
            yield client[address.database]
    except (PyMongoError, BSONError) as error:
        raise BackupError(f"MongoDB at {address.hosts} {_describe_failure(error)}") from None


def require_unused_database(database: MongoDatabase, known: frozenset[str] = frozenset()) -> None:
    """
    Check that no daemon uses a database.

    :param known: session owners that are known to be dead.
    :raise BackupError: a daemon uses it, or left its entry when it was killed.
    """
    names = [one["name"] for one in database[NODES.name].find(_LIVE_NODE_FILTER, {"name": 1}).sort("name", 1)]
    if names:
        raise BackupError(f"nodes use the MongoDB database ({', '.join(names)}): stop them first")
    entries = [one for one in database[SESSION_OWNERS.name].find({}, {"since": 1}) if one["_id"] not in known]
    if entries:
        since = entries[0].get("since")
        when = f" since {since:%Y-%m-%d %H:%M} UTC" if since else ""
        raise BackupError(
            f"a daemon uses the MongoDB database{when}, or was killed while it did: stop it, or if none runs "
            "use --stopped"
        )


def find_stale_owners(database: MongoDatabase) -> frozenset[str]:
    """Ids of all session owners, dead or alive."""
    return frozenset(one["_id"] for one in database[SESSION_OWNERS.name].find({}, {"_id": 1}))


def _describe_failure(error: Exception) -> str:
    """Text for an error, without content of documents."""
    if isinstance(error, DuplicateKeyError) or _has_duplicate_key(error):
        return "already has one of the records"
    if isinstance(error, OperationFailure):
        if error.code in _SNAPSHOT_ERRORS:
            return (
                "has forgotten the time that was exported: raise minSnapshotHistoryWindowInSeconds there, "
                "or stop all nodes and use --offline"
            )
        details = error.details or {}
        return f"refused: {details.get('codeName') or f'error {error.code}'}"
    if isinstance(error, ConnectionFailure):
        return "does not answer: run the same command again when it does"
    if isinstance(error, InvalidDocument | BSONError):
        return "cannot hold one of the records"
    return f"cannot be used: {type(error).__name__}"


def _has_duplicate_key(error: Exception) -> bool:
    if not isinstance(error, BulkWriteError):
        return False
    return any(one.get("code") == _DUPLICATE_KEY_ERROR for one in error.details.get("writeErrors", ()))


RECORD_COLLECTIONS: dict[str, Collection] = {
    "account": ACCOUNTS,
    "retired": RETIRED_DIDS,
    "recipient": RECIPIENTS,
    "message": MESSAGES,
    "long_form": LONG_FORM_DIDS,
    "nonce": NONCES,
    "registration": decentrl.REGISTRATIONS,
    "contract": decentrl.CONTRACTS,
    "contract_request": decentrl.CONTRACT_REQUESTS,
    "pending_event": decentrl.PENDING_EVENTS,
    "stored_event": decentrl.STORED_EVENTS,
    "public_event": decentrl.PUBLIC_EVENTS,
}
assert list(RECORD_COLLECTIONS) == list(RECORD_KINDS)
_SCHEMA = MongoSchema((), MIGRATIONS)
SCHEMA_VERSION_WRITTEN, SCHEMA_READABLE_FROM = _SCHEMA.version, _SCHEMA.readable_from

# Documents in memory at a time.
_BATCH_DOCUMENTS, _BATCH_BYTES = 500, 8_388_608


class MongoRecordSource:
    """
    :param session: of a snapshot; None when nobody writes.
    :param look: called now and then, to find out whether that is so.
    """

    backend = "mongodb"

    def __init__(
        self, database: MongoDatabase, session: ClientSession | None = None, look: Callable[[], None] = lambda: None
    ) -> None:
        self._database = database
        self._session = session
        self._look = look

    def counts(self) -> RecordCounts:
        return {kind: self._count(collection.name) for kind, collection in RECORD_COLLECTIONS.items()}

    def records(self) -> Iterator[StoreRecord]:
        yield from self._didcomm()
        yield from self._decentrl()
        self._look()

    def _count(self, collection: str) -> int:
        return self._database[collection].count_documents({}, session=self._session, hint="_id_")

    def _didcomm(self) -> Iterator[StoreRecord]:
        with closing(RecordNumbers()) as accounts, closing(RecordNumbers()) as recipients:
            for one in self._sorted(ACCOUNTS.name, "_id"):
                number = accounts.allocate(one["_id"].binary)
                yield AccountRecord(
                    number=number,
                    **_pick_fields(one, "did created_at draft03"),
                    seen_at=one.get("seen_at"),
                    fresh="fresh" in one,
                )
            for one in self._sorted(RETIRED_DIDS.name, "_id"):
                yield RetiredDIDRecord(did=one["_id"])
            for one in self._sorted(RECIPIENTS.name, "_id"):
                number, account = recipients.allocate(one["_id"].binary), accounts.lookup(one["account"].binary)
                place = one.get("registered")
                names = export_names(one["did"], place, one.get("names"))
                yield RecipientRecord(number=number, account=account, did=one["did"], place=place, names=names)
            for one in self._in_order(MESSAGES.name):
                yield _read_message(
                    one, accounts.lookup(one["account"].binary), recipients.lookup(one["recipient"].binary)
                )
        for one in self._sorted(LONG_FORM_DIDS.name, "_id"):
            yield LongFormRecord(short=one["_id"], long=one["long"])
        for one in self._sorted(NONCES.name, "seq"):
            yield NonceRecord(key=one["_id"], until=one["until"])

    def _decentrl(self) -> Iterator[StoreRecord]:
        with closing(_PartyDIDs(self._database, self._session)) as dids:
            for one in self._sorted(decentrl.REGISTRATIONS.name, "_id"):
                did = dids.of(one["party"])
                yield RegistrationRecord(
                    id=one["_id"], did=did, expires_at=one["until"], **_pick_fields(one, "digest text")
                )
            for one in self._in_order(decentrl.CONTRACTS.name):
                named = {"owner": dids.of(one["party"]), "peer": one["peer_did"], "expires_at": one["until"]}
                yield ContractRecord(id=one["_id"], **named, **_pick_fields(one, "digest text"))
            for one in self._in_order(decentrl.CONTRACT_REQUESTS.name):
                named = {"recipient": dids.of(one["party"]), "sender": one["sender_did"], "request": one["text"]}
                yield ContractRequestRecord(id=one["_id"], public_key=one["public_key"], **named)
            for one in self._in_order(decentrl.PENDING_EVENTS.name):
                named = {"recipient": one["recipient_did"], "sender": one["sender_did"]}
                yield PendingEventRecord(id=one["_id"], **named, **_pick_fields(one, "received_at payload"))
            for one in self._in_order(decentrl.STORED_EVENTS.name, decentrl.STORED_PAYLOADS.name):
                yield _read_stored_event(one, dids.of(one["party"]))
            for one in self._in_order(decentrl.PUBLIC_EVENTS.name, decentrl.PUBLIC_PAYLOADS.name):
                yield _read_public_event(one, dids.of(one["party"]))

    def _sorted(self, collection: str, key: str) -> Iterator[MongoDocument]:
        """Documents of a collection of small documents, along an index."""
        self._look()
        yield from self._database[collection].find({}, session=self._session).sort(key, 1)

    def _in_order(self, collection: str, payloads: str = "") -> Iterator[MongoDocument]:
        """
        All documents in order of arrival, for which there is no index: the server sorts their ids, and so many as fit
        in memory are read by them.
        """
        size: MongoDocument = {"$bsonSize": "$$ROOT"}
        bytes = {"$add": [size, "$size"]} if payloads else size
        steps: list[MongoDocument] = [{"$project": {"seq": 1, "bytes": bytes}}, {"$sort": {"seq": 1}}]
        outlines = self._database[collection].aggregate(steps, session=self._session, allowDiskUse=True)
        sizes = ((one["_id"], one["bytes"]) for one in outlines)
        for ids in batch_by_size(sizes, _BATCH_DOCUMENTS, _BATCH_BYTES):
            self._look()
            found = self._by_id(collection, ids)
            more = self._by_id(payloads, ids) if payloads else {}
            for id in ids:
                yield {**found[id], **more.get(id, {})}

    def _by_id(self, collection: str, ids: list[str]) -> dict[str, MongoDocument]:
        found = self._database[collection].find({"_id": {"$in": ids}}, session=self._session)
        return {one["_id"]: one for one in found}


class _PartyDIDs:
    """DIDs by party keys; caches the latest, as consecutive documents mostly have the same party."""

    def __init__(self, database: MongoDatabase, session: ClientSession | None) -> None:
        self._parties = database[decentrl.PARTIES.name]
        self._session = session
        self._known: dict[bytes, str] = {}

    def of(self, key: bytes) -> str:
        """The DID of a key. :raise BackupError: there is no such party."""
        did = self._known.get(key)
        if did is None:
            found = self._parties.find_one({"_id": key}, {"did": 1}, session=self._session)
            if found is None:
                raise BackupError("the MongoDB database is damaged: a document refers to a party that does not exist")
            if len(self._known) >= _BATCH_DOCUMENTS:
                del self._known[next(iter(self._known))]
            did = self._known[key] = str(found["did"])
        return did

    def close(self) -> None:
        """Empty the cache."""
        self._known.clear()


@contextmanager
def open_mongodb_source(uri: str, *, offline: bool, stopped: bool) -> Iterator[MongoRecordSource]:
    """
    The records of a database.

    :param offline: read without a snapshot, while no daemon runs; the server keeps a snapshot for some minutes.
    :param stopped: ignore entries of daemons that were killed.
    :raise BackupError: it cannot be read, a daemon runs, or the snapshot expired.
    """
    with connect_to_mongodb(uri) as database:
        if IMPORT_MARKER in check_mongodb_schema(database):
            raise BackupError("an import into the MongoDB database is not finished: run it again first")
        if offline:
            dead = find_stale_owners(database) if stopped else frozenset()
            require_unused_database(database, dead)
            yield MongoRecordSource(database, None, lambda: require_unused_database(database, dead))
        else:
            with database.client.start_session(snapshot=True) as session:
                yield MongoRecordSource(database, session)


def check_mongodb_schema(database: MongoDatabase) -> MongoDocument:
    """
    The schema document of a database.

    :raise BackupError: it is of another version.
    """
    found = database["schema"].find_one({"_id": "schema"}) or {}
    if (
        found.get("readable_from", 1) > SCHEMA_VERSION_WRITTEN
        or found.get("version", SCHEMA_VERSION_WRITTEN) != SCHEMA_VERSION_WRITTEN
    ):
        raise BackupError(
            f"the MongoDB database has schema version {found.get('version')}, "
            f"this mediatord wants {SCHEMA_VERSION_WRITTEN}"
        )
    return found


def _read_message(one: MongoDocument, account: int, recipient: int) -> MessageRecord:
    due_at = one.get("due_at")
    return MessageRecord(
        id=one["_id"],
        account=account,
        recipient=recipient,
        due_at=due_at,
        arrived_at=one.get("arrived_at", one["received_at"]) if due_at is None else None,
        **_pick_fields(one, "form received_at expires_at pushes payload"),
    )


def _read_stored_event(one: MongoDocument, owner: str) -> StoredEventRecord:
    return StoredEventRecord(
        id=one["_id"],
        owner=owner,
        sender=one["sender_did"],
        recipient=one["recipient_did"],
        timestamp=one["at"],
        processed=make_event_label(one["party"], EventLabelKind.ALL, unprocessed=True) not in one["labels"],
        tags=tuple(one["tags"]),
        **_pick_fields(one, "contract_id payload"),
    )


def _read_public_event(one: MongoDocument, publisher: str) -> PublicEventRecord:
    return PublicEventRecord(
        id=one["_id"],
        publisher=publisher,
        timestamp=one["at"],
        signature=one["event_signature"],
        tags=tuple(one["tags"]),
        **_pick_fields(one, "channel_id event"),
    )


def _pick_fields(document: MongoDocument, names: str) -> dict[str, Any]:
    return {name: document[name] for name in names.split()}
