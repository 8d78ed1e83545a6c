"""
Import into a MongoDB store, in transactions that also record the progress.

Ids of accounts and recipients are made from their numbers; drivers make no such ids, as theirs begin with the time.
Likewise the order of arrival is made from the position in the archive, and precedes those that servers assign.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from bson import ObjectId, Timestamp, encode
from pymongo import UpdateOne
from pymongo.client_session import ClientSession
from pymongo.errors import BulkWriteError

from mediatord.backup.mongo_export import (
    SCHEMA_READABLE_FROM,
    SCHEMA_VERSION_WRITTEN,
    MongoDatabase,
    MongoDocument,
    MongoRecordSource,
    check_mongodb_schema,
    connect_to_mongodb,
    find_stale_owners,
    require_unused_database,
)
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
from mediatord.protocol.canonical_did import canonicalize_did, compute_did_digest
from mediatord.store.interfaces import decentrl
from mediatord.store.mongo import schema
from mediatord.store.mongo.decentrl_events import build_event_payload, build_public_event, build_stored_event
from mediatord.store.mongo.decentrl_parties import make_party_key, sum_utf8_sizes
from mediatord.store.mongo.driver.collection import MAX_DOCUMENT_BYTES, Collection
from mediatord.store.mongo.schema import (
    ACCOUNTS,
    ALL_COLLECTIONS,
    CARRIED_FORWARD_ID,
    IMPORT_MARKER,
    LEDGER,
    LONG_FORM_DIDS,
    MESSAGES,
    NONCES,
    RECIPIENTS,
    RETIRED_DIDS,
)
from mediatord.store.recipient_names import import_names

# The node that made a claim is not exported.
_EMPTY_CLAIM_TOKEN = bytes(12)
_COUNTERS = ("contracts", "requests", "pending", "pending_bytes", "stored", "published", "archive_bytes")
_EMPTY_COUNTERS = ("contracts", "requests", "pending", "stored", "published")


@dataclass(eq=False, slots=True)
class ImportBatch:
    """
    Documents and counters of a batch of records.

    :ivar documents: to be inserted, by collection.
    :ivar accounts: by number: additional recipients, and the last position.
    :ivar recipients: by number: additional messages and bytes.
    :ivar parties: by DID: increments of counters, and `registered_until`.
    """

    documents: dict[str, list[MongoDocument]] = field(default_factory=dict)
    accounts: dict[int, list[int]] = field(default_factory=dict)
    recipients: dict[int, list[int]] = field(default_factory=dict)
    parties: dict[str, dict[str, Any]] = field(default_factory=dict)

    def insert(self, collection: Collection, document: MongoDocument) -> None:
        self.documents.setdefault(collection.name, []).append(document)

    def count(self, did: str, **more: int) -> None:
        """Increment counters of a party."""
        party = self.parties.setdefault(did, {})
        for name, number in more.items():
            party[name] = party.get(name, 0) + number

    def register(self, did: str, until: float) -> None:
        """Record a registration of a party."""
        party = self.parties.setdefault(did, {})
        party["registered_until"] = max(party.get("registered_until", 0.0), until)


def make_import_batch(first: int, records: Sequence[StoreRecord]) -> ImportBatch:
    """:param first: position of the first record in the archive, from 1."""
    batch = ImportBatch()
    for place, record in enumerate(records, first):
        add: Callable[[ImportBatch, Any, Timestamp], None] = _RECORD_ADDERS[record.kind]
        add(batch, record, Timestamp(1, place))
    return batch


def make_object_id(number: int) -> ObjectId:
    """Id of an account or recipient."""
    return ObjectId(number.to_bytes(12, "big"))


def make_party_update(did: str, more: Mapping[str, Any]) -> list[MongoDocument]:
    """Update pipeline that increments counters of a party, which may not exist yet."""
    values: MongoDocument = {name: {"$add": [{"$ifNull": [f"${name}", 0]}, more.get(name, 0)]} for name in _COUNTERS}
    until = {"$max": [{"$ifNull": ["$registered_until", 0.0]}, more.get("registered_until", 0.0)]}
    edition = ObjectId() if "archive_bytes" in more or "registered_until" in more else None
    values |= {
        "did": {"$literal": did},
        "registered_until": until,
        "edition": edition or {"$ifNull": ["$edition", None]},
    }
    empty = {"$eq": [{"$add": [f"${name}" for name in _EMPTY_COUNTERS]}, 0]}
    marks = {
        "waited_for": {"$cond": [{"$gt": ["$pending", 0]}, True, "$$REMOVE"]},
        "unused": {"$cond": [empty, True, "$$REMOVE"]},
    }
    return [{"$set": values}, {"$set": marks}]


def _add_account(batch: ImportBatch, one: AccountRecord, place: Timestamp) -> None:
    did = canonicalize_did(one.did)
    document = {"did": did, "created_at": one.created_at, "draft03": one.draft03, "recipients": 0, "places": 0}
    document["seen_at"] = resolve_seen_at(one)
    if one.fresh:
        document["fresh"] = True
    batch.insert(ACCOUNTS, {"_id": make_object_id(one.number), **document})


def _add_retired_did(batch: ImportBatch, one: RetiredDIDRecord, place: Timestamp) -> None:
    batch.insert(RETIRED_DIDS, {"_id": canonicalize_did(one.did)})


def _add_recipient(batch: ImportBatch, one: RecipientRecord, place: Timestamp) -> None:
    names = import_names(one.did, one.place, one.names)
    document: MongoDocument = {
        "_id": make_object_id(one.number),
        "account": make_object_id(one.account),
        "did": names.did,
    }
    document |= {"did_digest": compute_did_digest(names.did), "messages": 0, "bytes": 0}
    if names:
        document |= {name: value for name, value in (("registered", names.place), ("names", names.stored)) if value}
        counted = batch.accounts.setdefault(one.account, [0, 0])
        counted[0] += len(names)
        counted[1] = max(counted[1], names.last)
    batch.insert(RECIPIENTS, document)


def _add_message(batch: ImportBatch, one: MessageRecord, place: Timestamp) -> None:
    document: MongoDocument = {
        "_id": one.id,
        "recipient": make_object_id(one.recipient),
        "account": make_object_id(one.account),
        "seq": place,
        "form": one.form,
        "size": len(one.payload),
        "received_at": one.received_at,
        "expires_at": one.expires_at,
        "pushes": one.pushes,
        "digest": sha256(one.payload).digest(),
        "payload": one.payload,
    }
    if one.arrived_at is not None:
        document["arrived_at"] = one.arrived_at
    elif one.due_at is not None:
        document["due_at"] = one.due_at
        if one.due_at < one.expires_at:
            document["wakes_at"] = one.due_at
    batch.insert(MESSAGES, document)
    counted = batch.recipients.setdefault(one.recipient, [0, 0])
    counted[0] += 1
    counted[1] += len(one.payload)


def _add_long_form(batch: ImportBatch, one: LongFormRecord, place: Timestamp) -> None:
    batch.insert(LONG_FORM_DIDS, {"_id": canonicalize_did(one.short), "long": one.long})


def _add_nonce(batch: ImportBatch, one: NonceRecord, place: Timestamp) -> None:
    batch.insert(NONCES, {"_id": one.key, "seq": place, "until": one.until, "token": _EMPTY_CLAIM_TOKEN})


def _add_registration(batch: ImportBatch, one: RegistrationRecord, place: Timestamp) -> None:
    document = {"_id": one.id, "party": make_party_key(one.did), "until": one.expires_at}
    batch.insert(schema.REGISTRATIONS, {**document, "digest": one.digest, "text": one.text})
    batch.register(one.did, one.expires_at)


def _add_contract(batch: ImportBatch, one: ContractRecord, place: Timestamp) -> None:
    document = {
        "_id": one.id,
        "party": make_party_key(one.owner),
        "peer": make_party_key(one.peer),
        "peer_did": one.peer,
        "until": one.expires_at,
        "digest": one.digest,
        "text": one.text,
        "seq": place,
    }
    batch.insert(schema.CONTRACTS, document)
    batch.count(one.owner, contracts=1)


def _add_contract_request(batch: ImportBatch, one: ContractRequestRecord, place: Timestamp) -> None:
    document = {
        "_id": one.id,
        "party": make_party_key(one.recipient),
        "sender": make_party_key(one.sender),
        "sender_did": one.sender,
        "text": one.request,
        "public_key": one.public_key,
        "seq": place,
    }
    batch.insert(schema.CONTRACT_REQUESTS, document)
    batch.count(one.recipient, requests=1)


def _add_pending_event(batch: ImportBatch, one: PendingEventRecord, place: Timestamp) -> None:
    size = sum_utf8_sizes(one.payload)
    document = {
        "_id": one.id,
        "party": make_party_key(one.recipient),
        "recipient_did": one.recipient,
        "sender": make_party_key(one.sender),
        "sender_did": one.sender,
        "received_at": one.received_at,
        "size": size,
        "payload": one.payload,
        "seq": place,
    }
    batch.insert(schema.PENDING_EVENTS, document)
    batch.count(one.recipient, pending=1, pending_bytes=size)


def _add_stored_event(batch: ImportBatch, one: StoredEventRecord, place: Timestamp) -> None:
    event = decentrl.StoredEvent(
        one.id, one.sender, one.recipient, one.payload, one.tags, one.timestamp, one.contract_id
    )
    document = build_stored_event(event, make_party_key(one.owner), one.processed) | {"seq": place}
    batch.insert(schema.STORED_EVENTS, document)
    batch.insert(schema.STORED_PAYLOADS, build_event_payload(event))
    batch.count(one.owner, stored=1, archive_bytes=document["size"] + document["tags_size"])


def _add_public_event(batch: ImportBatch, one: PublicEventRecord, place: Timestamp) -> None:
    event = decentrl.PublicEvent(one.id, one.event, one.tags, one.timestamp, one.signature, one.channel_id)
    document = build_public_event(event, make_party_key(one.publisher)) | {"seq": place}
    batch.insert(schema.PUBLIC_EVENTS, document)
    batch.insert(schema.PUBLIC_PAYLOADS, build_event_payload(event))
    batch.count(one.publisher, published=1, archive_bytes=document["size"] + document["tags_size"])


_RECORD_ADDERS: Mapping[str, Callable[[ImportBatch, Any, Timestamp], None]] = {
    "account": _add_account,
    "retired": _add_retired_did,
    "recipient": _add_recipient,
    "message": _add_message,
    "long_form": _add_long_form,
    "nonce": _add_nonce,
    "registration": _add_registration,
    "contract": _add_contract,
    "contract_request": _add_contract_request,
    "pending_event": _add_pending_event,
    "stored_event": _add_stored_event,
    "public_event": _add_public_event,
}

_SCHEMA_COLLECTION = "schema"
_DUPLICATE_KEY_CODE = 11000
# Larger records are converted to documents to measure those.
_SIZE_CHECK_BYTES = 8_000_000
# Overhead of each text, and of its index entries.
_TEXT_OVERHEAD_BYTES = 64


class MongoRecordTarget:
    """
    :param session: in which all is written, so that whoever goes on can end what is left open in it.
    :param known: of the daemons that have left an entry, those who are dead.
    :ivar _owner: this process among those that import the same: the last one to begin.
    """

    def __init__(self, database: MongoDatabase, session: ClientSession, known: frozenset[str]) -> None:
        self._database = database
        self._session = session
        self._known = known
        self._owner = secrets.token_hex(12)

    def accept(self, record: StoreRecord) -> None:
        values = [value if isinstance(value, tuple) else (value,) for _, value in record]
        texts = [one for some in values for one in some if isinstance(one, str | bytes)]
        if (
            sum([len(one) * 4 + _TEXT_OVERHEAD_BYTES for one in texts]) <= _SIZE_CHECK_BYTES
        ):  # no character has more bytes
            return
        documents = [one for some in make_import_batch(1, [record]).documents.values() for one in some]
        if any(len(encode(one)) > MAX_DOCUMENT_BYTES for one in documents):
            raise InvalidArchiveError(f"a record of kind {record.kind} is larger than MongoDB takes (16 MiB)")

    def begin(self, archive: str) -> int:
        mark = check_mongodb_schema(self._database).get(IMPORT_MARKER)
        if mark is not None:
            return self._go_on(mark, archive)
        require_unused_database(self._database, self._known)
        self._make_indexes()
        require_empty_counts(f"the MongoDB database {self._database.name}", self.counts())
        importing = {"archive": archive, "owner": self._owner, "session": self._session_id, "done": 0}
        change = {
            "$set": {
                IMPORT_MARKER: importing,
                "version": SCHEMA_VERSION_WRITTEN,
                "readable_from": SCHEMA_READABLE_FROM,
            }
        }
        unmarked = {"_id": _SCHEMA_COLLECTION, IMPORT_MARKER: {"$exists": False}}
        # Of two imports that begin at the same time, one fails on the document of the other.
        self._database[_SCHEMA_COLLECTION].update_one(unmarked, change, upsert=True)
        try:
            # A daemon that checked before may have begun to write.
            require_unused_database(self._database, self._known)
            require_empty_counts(f"the MongoDB database {self._database.name}", self.counts())
        except BackupError:
            self._unmark()
            raise
        return 0

    def write(self, first: int, records: Sequence[StoreRecord]) -> None:
        batch = make_import_batch(first, records)

        def write(session: ClientSession) -> None:
            self._advance(session, first - 1, len(records))
            require_unused_database(self._database, self._known)
            for collection, documents in batch.documents.items():
                self._insert(session, collection, documents)
            self._database[LEDGER.name].update_one(
                {"_id": CARRIED_FORWARD_ID}, _make_ledger_update(batch.documents), session=session, upsert=True
            )
            self._update(session, ACCOUNTS.name, batch.accounts, _make_account_update)
            self._update(session, RECIPIENTS.name, batch.recipients, _make_recipient_update)
            parties = [
                UpdateOne({"_id": make_party_key(did)}, make_party_update(did, more), upsert=True)
                for did, more in batch.parties.items()
            ]
            if parties:
                self._database[schema.PARTIES.name].bulk_write(parties, session=session)

        self._session.with_transaction(write)

    def counts(self) -> RecordCounts:
        return MongoRecordSource(self._database).counts()

    def finish(self) -> None:
        require_unused_database(self._database, self._known)
        self._unmark()

    @property
    def _session_id(self) -> Any:
        return self._session.session_id["id"]

    def _go_on(self, mark: MongoDocument, archive: str) -> int:
        if mark["archive"] != archive:
            raise BackupError(
                f"an import of another archive into the MongoDB database {self._database.name} was not finished: "
                "run that again, or drop the database to give it up"
            )
        require_unused_database(self._database, self._known)
        # A killed import may have left an open transaction, which would block for a minute.
        self._database.command("killSessions", [{"id": mark["session"]}])
        ours = {"$set": {f"{IMPORT_MARKER}.owner": self._owner, f"{IMPORT_MARKER}.session": self._session_id}}
        found = self._database[_SCHEMA_COLLECTION].find_one_and_update(
            {"_id": _SCHEMA_COLLECTION, f"{IMPORT_MARKER}.archive": archive}, ours, return_document=True
        )
        if found is None:
            raise BackupError("another import of this archive has just finished")
        return int(found[IMPORT_MARKER]["done"])

    def _unmark(self) -> None:
        mine = {"_id": _SCHEMA_COLLECTION, f"{IMPORT_MARKER}.owner": self._owner}
        if not self._database[_SCHEMA_COLLECTION].update_one(mine, {"$unset": {IMPORT_MARKER: 1}}).matched_count:
            raise BackupError("another process has taken over this import")

    def _advance(self, session: ClientSession, done: int, more: int) -> None:
        """:raise BackupError: another import writes to the database."""
        ours = {"_id": _SCHEMA_COLLECTION, f"{IMPORT_MARKER}.owner": self._owner, f"{IMPORT_MARKER}.done": done}
        change = {"$set": {f"{IMPORT_MARKER}.done": done + more}}
        if not self._database[_SCHEMA_COLLECTION].update_one(ours, change, session=session).matched_count:
            raise BackupError("another process has taken over this import")

    def _update(self, session: ClientSession, collection: str, counted: dict[int, list[int]], change: Any) -> None:
        updates = [UpdateOne({"_id": make_object_id(number)}, change(more)) for number, more in counted.items()]
        if updates and self._database[collection].bulk_write(updates, session=session).matched_count < len(updates):
            raise BackupError(
                f"the archive contradicts itself: something belongs to one of {collection} that is not there"
            )

    def _insert(self, session: ClientSession, collection: str, documents: list[MongoDocument]) -> None:
        """:raise InvalidArchiveError: a DID would have two owners."""
        try:
            self._database[collection].insert_many(documents, session=session)
        except BulkWriteError as error:
            codes = {one["code"] for one in (error.details or {}).get("writeErrors", ())}
            if collection == RECIPIENTS.name and codes == {_DUPLICATE_KEY_CODE}:
                raise InvalidArchiveError("a recipient is another name of a DID that is registered") from None
            if collection in (ACCOUNTS.name, RETIRED_DIDS.name) and codes == {_DUPLICATE_KEY_CODE}:
                raise InvalidArchiveError(f"one of {collection} has another form of a DID that is there") from None
            raise

    def _make_indexes(self) -> None:
        there = set(self._database.list_collection_names())
        for collection in ALL_COLLECTIONS:
            if collection.name not in there:
                self._database.create_collection(collection.name)
            if collection.indexes:
                indexes = [{**index, "name": name} for name, index in collection.indexes.items()]
                self._database.command("createIndexes", collection.name, indexes=indexes)


@contextmanager
def open_mongodb_target(uri: str, *, stopped: bool) -> Iterator[MongoRecordTarget]:
    """
    An import into a database, which daemons refuse meanwhile.

    :param stopped: no daemon runs, although one seems to have been killed.
    :raise BackupError: it cannot be reached, or does not do what it is asked for.
    """
    with connect_to_mongodb(uri) as database, database.client.start_session() as session:
        yield MongoRecordTarget(database, session, find_stale_owners(database) if stopped else frozenset())


def _make_account_update(more: list[int]) -> MongoDocument:
    return {"$inc": {"recipients": more[0]}, "$max": {"places": more[1]}}


def _make_ledger_update(documents: dict[str, list[MongoDocument]]) -> MongoDocument:
    """Enter imported messages into the ledger as accepted."""
    more = {
        "didcomm.accepted": len(documents.get(MESSAGES.name, ())),
        "decentrl.accepted": len(documents.get(schema.PENDING_EVENTS.name, ())),
    }
    return {"$inc": more}


def _make_recipient_update(more: list[int]) -> MongoDocument:
    return {"$inc": {"messages": more[0], "bytes": more[1]}, "$set": {"waited_for": True}}
