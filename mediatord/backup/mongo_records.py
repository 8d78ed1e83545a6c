"""
Records of a MongoDB store, through pymongo: export from a snapshot while nodes write, or offline; and import in
transactions that also record the progress.

Ids of accounts and recipients are made from their numbers; drivers make no such ids, as theirs begin with the time.
Likewise the order of arrival is made from the position in the archive, and precedes those that servers assign.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple, TypeAlias

from bson import ObjectId, Timestamp, encode
from bson.errors import BSONError
from pymongo import MongoClient, UpdateOne
from pymongo.client_session import ClientSession
from pymongo.database import Database
from pymongo.errors import BulkWriteError, ConnectionFailure, OperationFailure, PyMongoError

from mediatord.backup.records import (
    RECORD_FIELDS,
    AccountRecord,
    BackupError,
    DeviceRecord,
    InvalidArchiveError,
    MessageRecord,
    PendingEventRecord,
    PublicEventRecord,
    RecipientRecord,
    RecordCounts,
    RecordSource,
    RegistrationRecord,
    StoredEventRecord,
    StoreRecord,
    WakeupRecord,
    batch_by_size,
    require_empty_counts,
    resolve_seen_at,
)
from mediatord.protocol.canonical_did import compute_did_digest
from mediatord.store.interfaces.decentrl import get_utf8_size
from mediatord.store.mongo import schema
from mediatord.store.mongo.decentrl_event_archive import (
    EventLabelKind,
    build_event_payload,
    build_public_event,
    build_stored_event,
    make_event_label,
)
from mediatord.store.mongo.decentrl_parties import make_party_key
from mediatord.store.mongo.driver.collection import MAX_DOCUMENT_BYTES, Collection
from mediatord.store.mongo.driver.uri import parse_mongo_uri
from mediatord.store.mongo.schema import (
    ACCOUNTS,
    IMPORT_MARKER,
    MESSAGES,
    PARTIES,
    RECIPIENTS,
    RETIRED_DIDS,
    V1_CONNECTIONS,
    PartyCollection,
)
from mediatord.store.registered_spellings import import_spellings

MongoDocument: TypeAlias = dict[str, Any]
MongoDatabase: TypeAlias = Database[MongoDocument]

_SERVER_SELECTION_TIMEOUT_MS, _SOCKET_TIMEOUT_MS = 10_000, 900_000
_SNAPSHOT_ERRORS = {239, 246}
_DUPLICATE_KEY_ERROR = 11_000
_LIVE_NODE_FILTER: MongoDocument = {"$expr": {"$gt": ["$until", "$$NOW"]}}
_SCHEMA_COLLECTION = "schema"
_SCHEMA = schema.MongoSchema((), schema.MIGRATIONS)


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


def _describe_failure(error: Exception) -> str:
    """Text for an error, without content of documents."""
    match error:
        case OperationFailure() if _DUPLICATE_KEY_ERROR in (error.code, *_get_write_errors(error)):
            return "already contains one of the records"
        case OperationFailure(code=code) if code in _SNAPSHOT_ERRORS:
            return (
                "no longer has the snapshot that was read: raise minSnapshotHistoryWindowInSeconds on the server, "
                "or stop all nodes and use --offline"
            )
        case OperationFailure(code=code, details=details):
            return f"returned an error: {(details or {}).get('codeName') or f'error {code}'}"
        case ConnectionFailure():
            return "does not respond; run the same command again when it does"
        case BSONError():
            return "cannot store one of the records"
    return f"failed: {type(error).__name__}"


def _get_write_errors(error: OperationFailure) -> set[int]:
    return {one["code"] for one in (error.details or {}).get("writeErrors", ())}


def _require_unused(database: MongoDatabase, dead: frozenset[str] = frozenset()) -> None:
    """
    Check that no daemon uses a database.

    :param dead: session owners that are known to be dead.
    :raise BackupError: a daemon uses it, or left its entry when it was killed.
    """
    names = [one["name"] for one in database[schema.NODES.name].find(_LIVE_NODE_FILTER, {"name": 1}).sort("name", 1)]
    if names:
        raise BackupError(f"nodes use the MongoDB database: {', '.join(names)}; stop them first")
    entries = [one for one in database[schema.SESSION_OWNERS.name].find({}, {"since": 1}) if one["_id"] not in dead]
    if entries:
        since = entries[0].get("since")
        when = f" since {since:%Y-%m-%d %H:%M} UTC" if since else ""
        raise BackupError(
            f"a daemon uses the MongoDB database{when}, or was killed while it did; stop it, or use --stopped if "
            "none is running"
        )


def _find_session_owners(database: MongoDatabase) -> frozenset[str]:
    """Ids of all session owners, dead or alive."""
    return frozenset(one["_id"] for one in database[schema.SESSION_OWNERS.name].find({}, {"_id": 1}))


def _read_schema_document(database: MongoDatabase) -> MongoDocument:
    """:raise BackupError: the schema is of another version."""
    found = database[_SCHEMA_COLLECTION].find_one({"_id": _SCHEMA_COLLECTION}) or {}
    ours = _SCHEMA.version
    if found.get("readable_from", 1) > ours or found.get("version", ours) != ours:
        raise BackupError(f"the MongoDB database has schema version {found.get('version')}, expected {ours}")
    return found


class _CollectionMapping(NamedTuple):
    """
    How a kind of records is stored.

    :param renamed: fields of documents that have the values of fields of records of other names, by these.
    :param keys: fields with the key of a party, and the fields of records with its DID. Documents that belong to
        `party` have its DID only if that is renamed.
    :param order: `seq`, the order of arrival, or `_id`.
    :param constants: further fields.
    :param owner: field with the id of an account or the key of a party, one of which the record belongs to.
    """

    collection: Collection
    renamed: dict[str, str] = {}
    keys: dict[str, str] = {}
    order: str = "seq"
    constants: MongoDocument = {}
    owner: str = ""


_RECIPIENT_KEYS = {"party": "recipient", "sender": "sender"}
_MAPPINGS = {
    "account": _CollectionMapping(ACCOUNTS, {"number": "_id"}, order="_id", constants={"recipients": 0, "places": 0}),
    "retired": _CollectionMapping(RETIRED_DIDS, {"did": "_id"}, order="_id"),
    "recipient": _CollectionMapping(
        RECIPIENTS, {"number": "_id", "place": "registered"}, order="_id", constants={"messages": 0, "bytes": 0}
    ),
    "message": _CollectionMapping(MESSAGES),
    "long_form": _CollectionMapping(schema.LONG_FORM_DIDS, {"short": "_id"}, order="_id"),
    # The token of the claim, which says who made it, is not exported.
    "nonce": _CollectionMapping(schema.NONCES, {"key": "_id"}, constants={"token": bytes(12)}),
    "registration": _CollectionMapping(schema.REGISTRATIONS, {"expires_at": "until"}, {"party": "did"}, order="_id"),
    "contract": _CollectionMapping(
        schema.CONTRACTS, {"peer": "peer_did", "expires_at": "until"}, {"party": "owner", "peer": "peer"}
    ),
    "contract_request": _CollectionMapping(
        schema.CONTRACT_REQUESTS, {"sender": "sender_did", "request": "text"}, _RECIPIENT_KEYS
    ),
    "pending_event": _CollectionMapping(
        schema.PENDING_EVENTS, {"recipient": "recipient_did", "sender": "sender_did"}, _RECIPIENT_KEYS
    ),
    "stored_event": _CollectionMapping(
        schema.STORED_EVENTS,
        {"sender": "sender_did", "recipient": "recipient_did", "timestamp": "at"},
        {"party": "owner"},
    ),
    "public_event": _CollectionMapping(
        schema.PUBLIC_EVENTS, {"timestamp": "at", "signature": "event_signature"}, {"party": "publisher"}
    ),
    "device": _CollectionMapping(schema.DEVICES, owner="owner"),
    "wakeup": _CollectionMapping(
        schema.WAKEUPS, {"polled_at": "polled", "woken_at": "woken"}, order="_id", owner="_id"
    ),
    "v1_connection": _CollectionMapping(V1_CONNECTIONS, {"wallet": "_id"}, order="_id"),
}
# Fields of documents of WAKEUPS with times, as dates.
_WAKEUP_TIMES = ("polled", "woken")


def _map_fields(kind: str) -> dict[str, str]:
    mapping = _MAPPINGS[kind]
    names = {"id": "_id"} | mapping.renamed
    party = mapping.keys.get("party")
    found = [field for field in RECORD_FIELDS[kind] if field in names or field != party]
    return {field: names.get(field, field) for field in found}


# Fields of documents by those of records.
_DOCUMENT_FIELDS = {kind: _map_fields(kind) for kind in _MAPPINGS}

# Documents in memory at a time.
_BATCH_DOCUMENTS, _BATCH_BYTES = 500, 8_388_608


class MongoRecordSource(RecordSource):
    """
    :param session: of a snapshot; None when nobody writes.
    :param check: called now and then, to find out whether that is so.
    """

    backend = "mongodb"

    def __init__(
        self, database: MongoDatabase, session: ClientSession | None = None, check: Callable[[], None] = lambda: None
    ) -> None:
        self._database = database
        self._session = session
        self._check = check
        # Consecutive documents mostly have the same party.
        self._find_did = lru_cache(_BATCH_DOCUMENTS)(self._find_party_did)

    def count(self, kind: str) -> int:
        mapping = _MAPPINGS[kind]
        collection = self._database[mapping.collection.name]
        if mapping.owner:
            steps = [*_build_owned_stages(mapping), {"$count": "number"}]
            return sum([one["number"] for one in collection.aggregate(steps, session=self._session)])
        return collection.count_documents({}, session=self._session, hint="_id_")

    def read(self, kind: str) -> Iterator[dict[str, Any]]:
        mapping = _MAPPINGS[kind]
        party = mapping.keys.get("party")
        self._check()
        for one in self._read_documents(mapping):
            values = {field: one.get(name) for field, name in _DOCUMENT_FIELDS[kind].items()}
            fields = {
                field: value.binary if isinstance(value, ObjectId) else value for field, value in values.items()
            }
            if party is not None and party not in fields:
                fields[party] = self._find_did(one["party"])
            match kind:
                case "account":
                    fields["fresh"] = "fresh" in one
                case "message" if "due_at" not in one:
                    fields["arrived_at"] = one.get("arrived_at", one["received_at"])
                case "stored_event":
                    unprocessed = make_event_label(one["party"], EventLabelKind.ALL, unprocessed=True)
                    fields["processed"] = unprocessed not in one["labels"]
            yield fields
        self._check()

    def _read_documents(self, mapping: _CollectionMapping) -> Iterator[MongoDocument]:
        collection = mapping.collection
        if mapping.owner:
            return self._read_owned(mapping)
        if mapping.order == "seq":
            payloads = collection.payloads if isinstance(collection, PartyCollection) else None
            return self._read_in_order(collection.name, payloads.name if payloads else "")
        return self._database[collection.name].find({}, session=self._session).sort("_id", 1)

    def _read_owned(self, mapping: _CollectionMapping) -> Iterator[MongoDocument]:
        """Documents in order of arrival, or of their accounts, and then of the DIDs of their parties."""
        order = {"seq": 1} if mapping.order == "seq" else {"identity": 1, mapping.owner: 1}
        steps = [*_build_owned_stages(mapping), {"$sort": order}]
        yield from self._database[mapping.collection.name].aggregate(steps, session=self._session, allowDiskUse=True)

    def _read_in_order(self, collection: str, payloads: str) -> Iterator[MongoDocument]:
        """
        All documents in order of arrival, for which there is no index: the server sorts their ids, and so many as fit
        in memory are read by them.
        """
        size: MongoDocument = {"$bsonSize": "$$ROOT"}
        bytes = {"$add": [size, "$size"]} if payloads else size
        steps: list[MongoDocument] = [{"$project": {"seq": 1, "bytes": bytes}}, {"$sort": {"seq": 1}}]
        outlines = self._database[collection].aggregate(steps, session=self._session, allowDiskUse=True)
        for ids in batch_by_size(((one["_id"], one["bytes"]) for one in outlines), _BATCH_DOCUMENTS, _BATCH_BYTES):
            self._check()
            found = self._read_by_id(collection, ids)
            more = self._read_by_id(payloads, ids) if payloads else {}
            for id in ids:
                yield {**found[id], **more.get(id, {})}

    def _read_by_id(self, collection: str, ids: list[str]) -> dict[str, MongoDocument]:
        found = self._database[collection].find({"_id": {"$in": ids}}, session=self._session)
        return {one["_id"]: one for one in found}

    def _find_party_did(self, key: bytes) -> str:
        """The DID of a key. :raise BackupError: there is no such party."""
        found = self._database[PARTIES.name].find_one({"_id": key}, {"did": 1}, session=self._session)
        if found is None:
            raise BackupError("the MongoDB database is damaged: a document refers to a party that does not exist")
        return str(found["did"])


def _build_owned_stages(mapping: _CollectionMapping) -> list[MongoDocument]:
    """
    Build the stages that find documents with an owner that exists, and for those of parties their DID as `identity`.
    Others are left behind by a process that was killed, or by a former version.
    """
    owner: MongoDocument = {"localField": mapping.owner, "foreignField": "_id"}
    account = {**owner, "from": ACCOUNTS.name, "pipeline": [{"$project": {"_id": 1}}], "as": "accounts"}
    party = {**owner, "from": PARTIES.name, "pipeline": [{"$project": {"did": 1}}], "as": "parties"}
    stages: list[MongoDocument] = []
    if mapping.collection is schema.WAKEUPS:
        stages.append({"$match": {"$or": [{name: {"$exists": True}} for name in _WAKEUP_TIMES]}})
    stages += [
        {"$lookup": account},
        {"$lookup": party},
        {"$match": {"$or": [{"accounts": {"$ne": []}}, {"parties": {"$ne": []}}]}},
        {"$set": {"account": {"$first": "$accounts._id"}, "identity": {"$first": "$parties.did"}}},
        {"$project": {"accounts": 0, "parties": 0}},
    ]
    if mapping.collection is schema.WAKEUPS:
        seconds = {name: {"$divide": [{"$toLong": f"${name}"}, 1000]} for name in _WAKEUP_TIMES}
        stages.append({"$set": seconds})
    return stages


@contextmanager
def open_mongodb_source(uri: str, *, offline: bool, stopped: bool) -> Iterator[MongoRecordSource]:
    """
    The records of a database.

    :param offline: read without a snapshot, while no daemon runs; the server keeps a snapshot for some minutes.
    :param stopped: ignore entries of daemons that were killed.
    :raise BackupError: it cannot be read, a daemon runs, or the snapshot expired.
    """
    with connect_to_mongodb(uri) as database:
        if IMPORT_MARKER in _read_schema_document(database):
            raise BackupError("an import into the MongoDB database is incomplete; run it again first")
        if offline:
            dead = _find_session_owners(database) if stopped else frozenset()
            _require_unused(database, dead)
            yield MongoRecordSource(database, None, lambda: _require_unused(database, dead))
        else:
            with database.client.start_session(snapshot=True) as session:
                yield MongoRecordSource(database, session)


_PARTY_COUNTERS = ("contracts", "requests", "pending", "pending_bytes", "stored", "published", "archive_bytes")
# Of these the largest value counts instead of the sum.
_MAXIMA = ("places", "registered_until")


class ImportBatch:
    """
    Documents and counters of a batch of records.

    :param first: position of the first record in the archive, from 1.
    :ivar documents: to be inserted, by collection.
    :ivar counters: of accounts and recipients by their ids, and of parties by their DIDs, by collection; likewise the
        times of wake-ups by owner.
    """

    def __init__(self, first: int, records: Sequence[StoreRecord]) -> None:
        self.documents: defaultdict[str, list[MongoDocument]] = defaultdict(list)
        self.counters: defaultdict[str, dict[Any, dict[str, Any]]] = defaultdict(dict)
        for place, record in enumerate(records, first):
            self._add(record, Timestamp(1, place))

    def _add(self, record: StoreRecord, place: Timestamp) -> None:
        mapping = _MAPPINGS[record.kind]
        if isinstance(record, DeviceRecord | WakeupRecord):
            self._add_owned(record, place)
            return
        document = {name: getattr(record, field) for field, name in _DOCUMENT_FIELDS[record.kind].items()}
        document |= mapping.constants
        document |= {name: make_party_key(getattr(record, field)) for name, field in mapping.keys.items()}
        document = self._complete(record, document)
        if mapping.order == "seq":
            document["seq"] = place
        if isinstance(counted := mapping.collection, PartyCollection):
            sizes = {counted.bytes: document["size"] + document.get("tags_size", 0)} if counted.bytes else {}
            self._count(PARTIES, getattr(record, mapping.keys["party"]), **{counted.counter: 1}, **sizes)
        self.documents[mapping.collection.name].append(
            {name: value for name, value in document.items() if value is not None}
        )

    def _complete(self, one: StoreRecord, document: MongoDocument) -> MongoDocument:
        """Add what is derived from several fields, and count; None for fields that are left out."""
        match one:
            case AccountRecord():
                fresh = one.fresh or None
                document |= {"_id": _make_object_id(one.number), "seen_at": resolve_seen_at(one), "fresh": fresh}
            case RecipientRecord():
                names, account = import_spellings(one.did, one.place, one.names), _make_object_id(one.account)
                document |= {"_id": _make_object_id(one.number), "account": account, "did": names.did}
                document |= {"did_digest": compute_did_digest(names.did), "registered": names.place}
                document["names"] = names.stored
                self._count(ACCOUNTS, account, recipients=len(names), places=names.last)
            case MessageRecord():
                recipient, size = _make_object_id(one.recipient), len(one.payload)
                due_at = one.due_at if one.arrived_at is None else None
                wakes_at = due_at if due_at is not None and due_at < one.expires_at else None
                document |= {"recipient": recipient, "account": _make_object_id(one.account), "size": size}
                document |= {"digest": sha256(one.payload).digest(), "due_at": due_at, "wakes_at": wakes_at}
                self._count(RECIPIENTS, recipient, messages=1, bytes=size)
            case RegistrationRecord():
                self._count(PARTIES, one.did, registered_until=one.expires_at)
            case PendingEventRecord():
                document["size"] = get_utf8_size(one.payload)
            case StoredEventRecord():
                self.documents[schema.STORED_PAYLOADS.name].append(build_event_payload(one.to_event()))
                return build_stored_event(one.to_event(), document["party"], one.processed)
            case PublicEventRecord():
                self.documents[schema.PUBLIC_PAYLOADS.name].append(build_event_payload(one.to_event()))
                return build_public_event(one.to_event(), document["party"])
        return document

    def _add_owned(self, record: DeviceRecord | WakeupRecord, place: Timestamp) -> None:
        """Add a device or a wake-up. Polls are recorded in a document that everyone with a device has."""
        if record.account is not None:
            owner: Any = _make_object_id(record.account)
        else:
            identity = record.identity or ""
            owner = make_party_key(identity)
            self._count(PARTIES, identity)
        times = self.counters[schema.WAKEUPS.name].setdefault(owner, {})
        if isinstance(record, WakeupRecord):
            found = {"polled": record.polled_at, "woken": record.woken_at}
            times |= {name: datetime.fromtimestamp(time, UTC) for name, time in found.items() if time is not None}
            return
        document = {"_id": record.id, "owner": owner, "service": record.service, "sealed": record.sealed}
        if record.expires_at is not None:
            document["expires_at"] = record.expires_at
        self.documents[schema.DEVICES.name].append({**document, "seq": place})

    def _count(self, collection: Collection, key: Any, **more: Any) -> None:
        counters = self.counters[collection.name].setdefault(key, {})
        for name, value in more.items():
            before = counters.get(name, 0)
            counters[name] = max(before, value) if name in _MAXIMA else before + value


def _make_object_id(number: int) -> ObjectId:
    """Id of an account or recipient."""
    return ObjectId(number.to_bytes(12, "big"))


def _make_counter_update(collection: str, key: Any, counters: Mapping[str, Any]) -> UpdateOne:
    """:param key: as in :attr:`ImportBatch.counters`; a party or wake-up may not exist yet."""
    if collection == schema.WAKEUPS.name:
        return UpdateOne({"_id": key}, [{"$set": {**counters, "changed": "$$NOW"}}], upsert=True)
    sums = {name: value for name, value in counters.items() if name not in _MAXIMA}
    if collection == ACCOUNTS.name:
        return UpdateOne({"_id": key}, {"$inc": sums, "$max": {"places": counters["places"]}})
    if collection == RECIPIENTS.name:
        return UpdateOne({"_id": key}, {"$inc": sums, "$set": {"waited_for": True}})
    update: dict[str, MongoDocument] = {
        "$set": {"did": key, **({"waited_for": True} if "pending" in sums else {})},
        "$inc": dict.fromkeys(_PARTY_COUNTERS, 0) | sums,
        "$max": {"registered_until": counters.get("registered_until", 0.0)},
        "$setOnInsert": {},
        "$unset": {},
    }
    changes_edition = "archive_bytes" in sums or "registered_until" in counters
    update["$set" if changes_edition else "$setOnInsert"]["edition"] = ObjectId() if changes_edition else None
    update["$unset" if sums else "$setOnInsert"]["unused"] = True
    return UpdateOne(
        {"_id": make_party_key(key)}, {name: values for name, values in update.items() if values}, upsert=True
    )


# Larger records are converted to documents to measure those.
_SIZE_CHECK_BYTES = 8_000_000
# Overhead of each text, and of its index entries.
_TEXT_OVERHEAD_BYTES = 64
_CONTRADICTION = "the archive is inconsistent: a record refers to a missing one of {}"
# Collections whose documents of `ImportBatch.counters` are created where they are missing.
_UPSERTED = (PARTIES.name, schema.WAKEUPS.name)
_REFUSALS = {
    RECIPIENTS.name: "a recipient DID is registered twice in different forms",
    ACCOUNTS.name: f"a DID of {ACCOUNTS.name} occurs twice in different forms",
    RETIRED_DIDS.name: f"a DID of {RETIRED_DIDS.name} occurs twice in different forms",
    V1_CONNECTIONS.name: "a DIDComm v1 connection has a key that another connection has",
}


class MongoRecordTarget:
    """
    :param session: in which all is written, so that whoever goes on can end what is left open in it.
    :param dead: of the daemons that have left an entry, those who are dead.
    :ivar _owner: this process among those that import the same: the last one to begin.
    """

    def __init__(self, database: MongoDatabase, session: ClientSession, dead: frozenset[str]) -> None:
        self._database = database
        self._session = session
        self._dead = dead
        self._owner = secrets.token_hex(12)

    def accept(self, record: StoreRecord) -> None:
        values = [value if isinstance(value, tuple) else (value,) for _, value in record]
        texts = [one for some in values for one in some if isinstance(one, str | bytes)]
        # No character has more bytes.
        if sum([len(one) * 4 + _TEXT_OVERHEAD_BYTES for one in texts]) <= _SIZE_CHECK_BYTES:
            return
        documents = [one for some in ImportBatch(1, [record]).documents.values() for one in some]
        if any(len(encode(one)) > MAX_DOCUMENT_BYTES for one in documents):
            raise InvalidArchiveError(f"a record of kind {record.kind} exceeds MongoDB's limit of 16 MiB")

    def begin(self, archive: str) -> int:
        marker = _read_schema_document(self._database).get(IMPORT_MARKER)
        if marker is not None:
            return self._continue(marker, archive)
        _require_unused(self._database, self._dead)
        self._create_indexes()
        self._require_empty()
        importing = {"archive": archive, "owner": self._owner, "session": self._session_id, "done": 0}
        change = {IMPORT_MARKER: importing, "version": _SCHEMA.version, "readable_from": _SCHEMA.readable_from}
        unmarked = {"_id": _SCHEMA_COLLECTION, IMPORT_MARKER: {"$exists": False}}
        # Of two imports that begin at the same time, one fails on the document of the other.
        self._database[_SCHEMA_COLLECTION].update_one(unmarked, {"$set": change}, upsert=True)
        try:
            # A daemon that checked before may have begun to write.
            _require_unused(self._database, self._dead)
            self._require_empty()
        except BackupError:
            self._change_marker({"$unset": {IMPORT_MARKER: 1}})
            raise
        return 0

    def write(self, first: int, records: Sequence[StoreRecord]) -> None:
        batch = ImportBatch(first, records)

        def write(session: ClientSession) -> None:
            done = {f"{IMPORT_MARKER}.done": first - 1}
            self._change_marker({"$inc": {f"{IMPORT_MARKER}.done": len(records)}}, session, **done)
            _require_unused(self._database, self._dead)
            for collection, documents in batch.documents.items():
                self._insert(session, collection, documents)
            if connections := batch.documents.get(V1_CONNECTIONS.name):
                self._mark_pending(session, connections)
            accepted = {
                "didcomm.accepted": len(batch.documents.get(MESSAGES.name, ())),
                "decentrl.accepted": len(batch.documents.get(schema.PENDING_EVENTS.name, ())),
            }
            self._database[schema.LEDGER.name].update_one(
                {"_id": schema.CARRIED_FORWARD_ID}, {"$inc": accepted}, session=session, upsert=True
            )
            for collection, counters in batch.counters.items():
                updates = [_make_counter_update(collection, key, more) for key, more in counters.items()]
                matched = self._database[collection].bulk_write(updates, session=session).matched_count
                if collection not in _UPSERTED and matched < len(updates):
                    raise BackupError(_CONTRADICTION.format(collection))

        self._session.with_transaction(write)

    def counts(self) -> RecordCounts:
        return MongoRecordSource(self._database).counts()

    def finish(self) -> None:
        _require_unused(self._database, self._dead)
        self._change_marker({"$unset": {IMPORT_MARKER: 1}})

    @property
    def _session_id(self) -> Any:
        return self._session.session_id["id"]

    def _continue(self, marker: MongoDocument, archive: str) -> int:
        if marker["archive"] != archive:
            raise BackupError(
                f"an import of another archive into the MongoDB database {self._database.name} is incomplete; "
                "run it again, or drop the database"
            )
        _require_unused(self._database, self._dead)
        # A killed import may have left an open transaction, which would block for a minute.
        self._database.command("killSessions", [{"id": marker["session"]}])
        ours = {"$set": {f"{IMPORT_MARKER}.owner": self._owner, f"{IMPORT_MARKER}.session": self._session_id}}
        found = self._database[_SCHEMA_COLLECTION].find_one_and_update(
            {"_id": _SCHEMA_COLLECTION, f"{IMPORT_MARKER}.archive": archive}, ours, return_document=True
        )
        if found is None:
            raise BackupError("another import of this archive has just finished")
        return int(found[IMPORT_MARKER]["done"])

    def _change_marker(self, change: MongoDocument, session: ClientSession | None = None, **expected: Any) -> None:
        """:raise BackupError: another import writes to the database."""
        ours = {"_id": _SCHEMA_COLLECTION, f"{IMPORT_MARKER}.owner": self._owner, **expected}
        if not self._database[_SCHEMA_COLLECTION].update_one(ours, change, session=session).matched_count:
            raise BackupError("another process has taken over this import")

    def _require_empty(self) -> None:
        require_empty_counts(f"the MongoDB database {self._database.name}", self.counts())

    def _insert(self, session: ClientSession, collection: str, documents: list[MongoDocument]) -> None:
        """:raise InvalidArchiveError: a DID would have two owners."""
        try:
            self._database[collection].insert_many(documents, session=session)
        except BulkWriteError as error:
            if collection in _REFUSALS and _get_write_errors(error) == {_DUPLICATE_KEY_ERROR}:
                raise InvalidArchiveError(_REFUSALS[collection]) from None
            raise

    def _mark_pending(self, session: ClientSession, connections: list[MongoDocument]) -> None:
        """Record which of the connections that were written have no account."""
        keys = [one["_id"] for one in connections]
        accounts = self._database[ACCOUNTS.name].find({"did": {"$in": keys}}, {"did": 1}, session=session)
        pending = {"_id": {"$in": keys, "$nin": [one["did"] for one in accounts]}}
        change = [{"$set": {"pending_since": "$created_at"}}]
        self._database[V1_CONNECTIONS.name].update_many(pending, change, session=session)

    def _create_indexes(self) -> None:
        there = set(self._database.list_collection_names())
        for collection in schema.ALL_COLLECTIONS:
            if collection.name not in there:
                self._database.create_collection(collection.name)
            if collection.indexes:
                indexes = [{**index, "name": name} for name, index in collection.indexes.items()]
                self._database.command("createIndexes", collection.name, indexes=indexes)


@contextmanager
def open_mongodb_target(uri: str, *, stopped: bool) -> Iterator[MongoRecordTarget]:
    """
    An import into a database, which daemons refuse meanwhile.

    :param stopped: no daemon runs; ignore the lease of one that was killed.
    :raise BackupError: it cannot be reached, or does not do what it is asked for.
    """
    with connect_to_mongodb(uri) as database, database.client.start_session() as session:
        yield MongoRecordTarget(database, session, _find_session_owners(database) if stopped else frozenset())
