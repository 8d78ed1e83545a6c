"""
Reading all that a MongoDB store keeps, as it was at one time: from a snapshot, while nodes write, or with none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from pymongo.client_session import ClientSession

from mediatord.store.mongo import decentrl_schema as decentrl
from mediatord.store.mongo.collections import (
    ACCOUNTS,
    DOCUMENTS,
    MESSAGES,
    MIGRATIONS,
    NONCES,
    RECIPIENTS,
    RETIRED,
)
from mediatord.store.mongo.decentrl_keys import Kind, label_of
from mediatord.store.mongo.schema import Schema
from mediatord.store.mongo.versions import IMPORTING
from mediatord.store.recipient_names import recorded_names
from mediatord.transfer.errors import TransferError
from mediatord.transfer.mongo_link import Document, Mongo, connected, left_behind, refuse_used
from mediatord.transfer.records import (
    KINDS,
    Account,
    Contract,
    ContractRequest,
    Counts,
    LongForm,
    Message,
    Nonce,
    PendingEvent,
    PublicEvent,
    Recipient,
    Record,
    Registration,
    Retired,
    StoredEvent,
)
from mediatord.transfer.stores import Numbers

COLLECTIONS = {
    "account": ACCOUNTS,
    "retired": RETIRED,
    "recipient": RECIPIENTS,
    "message": MESSAGES,
    "long_form": DOCUMENTS,
    "nonce": NONCES,
    "registration": decentrl.REGISTRATIONS,
    "contract": decentrl.CONTRACTS.name,
    "contract_request": decentrl.REQUESTS.name,
    "pending_event": decentrl.PENDING.name,
    "stored_event": decentrl.STORED.name,
    "public_event": decentrl.PUBLIC.name,
}
assert list(COLLECTIONS) == list(KINDS)
OUR_VERSION = Schema((), MIGRATIONS).version
READABLE_FROM = MIGRATIONS[-1].readable_from

# Documents that are in memory at a time.
_DOCUMENTS, _BYTES = 500, 8_388_608


class MongoSource:
    """
    :param session: of a snapshot; None when nobody writes.
    :param look: called now and then, to find out whether that is so.
    """

    backend = "mongodb"

    def __init__(
        self, database: Mongo, session: ClientSession | None = None, look: Callable[[], None] = lambda: None
    ) -> None:
        self._database = database
        self._session = session
        self._look = look

    def counts(self) -> Counts:
        return {kind: self._count(collection) for kind, collection in COLLECTIONS.items()}

    def records(self) -> Iterator[Record]:
        yield from self._didcomm()
        yield from self._decentrl()
        self._look()

    def _count(self, collection: str) -> int:
        return self._database[collection].count_documents({}, session=self._session, hint="_id_")

    def _didcomm(self) -> Iterator[Record]:
        with closing(Numbers()) as accounts, closing(Numbers()) as recipients:
            for one in self._sorted(ACCOUNTS, "_id"):
                number = accounts.give(one["_id"].binary)
                yield Account(
                    number=number,
                    **_some(one, "did created_at draft03"),
                    seen_at=one.get("seen_at"),
                    fresh="fresh" in one,
                )
            for one in self._sorted(RETIRED, "_id"):
                yield Retired(did=one["_id"])
            for one in self._sorted(RECIPIENTS, "_id"):
                number, account = recipients.give(one["_id"].binary), accounts.of(one["account"].binary)
                place = one.get("registered")
                names = recorded_names(one["did"], place, one.get("names"))
                yield Recipient(number=number, account=account, did=one["did"], place=place, names=names)
            for one in self._in_order(MESSAGES):
                yield _message(one, accounts.of(one["account"].binary), recipients.of(one["recipient"].binary))
        for one in self._sorted(DOCUMENTS, "_id"):
            yield LongForm(short=one["_id"], long=one["long"])
        for one in self._sorted(NONCES, "seq"):
            yield Nonce(key=one["_id"], until=one["until"])

    def _decentrl(self) -> Iterator[Record]:
        with closing(_Dids(self._database, self._session)) as dids:
            for one in self._sorted(decentrl.REGISTRATIONS, "_id"):
                did = dids.of(one["party"])
                yield Registration(id=one["_id"], did=did, expires_at=one["until"], **_some(one, "digest text"))
            for one in self._in_order(decentrl.CONTRACTS.name):
                named = {"owner": dids.of(one["party"]), "peer": one["peer_did"], "expires_at": one["until"]}
                yield Contract(id=one["_id"], **named, **_some(one, "digest text"))
            for one in self._in_order(decentrl.REQUESTS.name):
                named = {"recipient": dids.of(one["party"]), "sender": one["sender_did"], "request": one["text"]}
                yield ContractRequest(id=one["_id"], public_key=one["public_key"], **named)
            for one in self._in_order(decentrl.PENDING.name):
                named = {"recipient": one["recipient_did"], "sender": one["sender_did"]}
                yield PendingEvent(id=one["_id"], **named, **_some(one, "received_at payload"))
            for one in self._in_order(decentrl.STORED.name, decentrl.STORED.payloads):
                yield _stored_event(one, dids.of(one["party"]))
            for one in self._in_order(decentrl.PUBLIC.name, decentrl.PUBLIC.payloads):
                yield _public_event(one, dids.of(one["party"]))

    def _sorted(self, collection: str, key: str) -> Iterator[Document]:
        """All documents of one with small ones, along an index."""
        self._look()
        yield from self._database[collection].find({}, session=self._session).sort(key, 1)

    def _in_order(self, collection: str, payloads: str = "") -> Iterator[Document]:
        """
        All documents in order of arrival, for which there is no index: the server sorts their ids, and so many as fit
        in memory are read by them.
        """
        size: Document = {"$bsonSize": "$$ROOT"}
        bytes = {"$add": [size, "$size"]} if payloads else size
        steps: list[Document] = [{"$project": {"seq": 1, "bytes": bytes}}, {"$sort": {"seq": 1}}]
        outlines = self._database[collection].aggregate(steps, session=self._session, allowDiskUse=True)
        for ids in _batches(outlines):
            self._look()
            found = self._by_id(collection, ids)
            more = self._by_id(payloads, ids) if payloads else {}
            for id in ids:
                yield {**found[id], **more.get(id, {})}

    def _by_id(self, collection: str, ids: list[str]) -> dict[str, Document]:
        found = self._database[collection].find({"_id": {"$in": ids}}, session=self._session)
        return {one["_id"]: one for one in found}


class _Dids:
    """The DIDs that keys of parties stand for; the latest are remembered, as neighbours are mostly of the same."""

    def __init__(self, database: Mongo, session: ClientSession | None) -> None:
        self._parties = database[decentrl.PARTIES]
        self._session = session
        self._known: dict[bytes, str] = {}

    def of(self, key: bytes) -> str:
        """:raise TransferError: there is no such party."""
        did = self._known.get(key)
        if did is None:
            found = self._parties.find_one({"_id": key}, {"did": 1}, session=self._session)
            if found is None:
                raise TransferError("the MongoDB database is damaged: somebody has something, but is not there")
            if len(self._known) >= _DOCUMENTS:
                del self._known[next(iter(self._known))]
            did = self._known[key] = str(found["did"])
        return did

    def close(self) -> None:
        """They are forgotten."""
        self._known.clear()


@contextmanager
def reading_mongodb(uri: str, *, offline: bool, stopped: bool) -> Iterator[MongoSource]:
    """
    All that is in a database.

    :param offline: read what is there while no daemon runs; else a snapshot, which the server has for some minutes.
    :param stopped: no daemon runs, although one seems to have been killed.
    :raise TransferError: it cannot be read, a daemon runs, or it took too long.
    """
    with connected(uri) as database:
        if IMPORTING in check_version(database):
            raise TransferError("an import into the MongoDB database is not finished: run it again first")
        if offline:
            dead = left_behind(database) if stopped else frozenset()
            refuse_used(database, dead)
            yield MongoSource(database, None, lambda: refuse_used(database, dead))
        else:
            with database.client.start_session(snapshot=True) as session:
                yield MongoSource(database, session)


def check_version(database: Mongo) -> Document:
    """
    What is recorded of a database.

    :raise TransferError: it is of another version.
    """
    found = database["schema"].find_one({"_id": "schema"}) or {}
    if found.get("readable_from", 1) > OUR_VERSION or found.get("version", OUR_VERSION) != OUR_VERSION:
        raise TransferError(
            f"the MongoDB database has schema version {found.get('version')}, this mediatord wants {OUR_VERSION}"
        )
    return found


def _message(one: Document, account: int, recipient: int) -> Message:
    due_at = one.get("due_at")
    return Message(
        id=one["_id"],
        account=account,
        recipient=recipient,
        due_at=due_at,
        arrived_at=one.get("arrived_at", one["received_at"]) if due_at is None else None,
        **_some(one, "form received_at expires_at pushes payload"),
    )


def _stored_event(one: Document, owner: str) -> StoredEvent:
    return StoredEvent(
        id=one["_id"],
        owner=owner,
        sender=one["sender_did"],
        recipient=one["recipient_did"],
        timestamp=one["at"],
        processed=label_of(one["party"], Kind.ALL, unprocessed=True) not in one["labels"],
        tags=tuple(one["tags"]),
        **_some(one, "contract_id payload"),
    )


def _public_event(one: Document, publisher: str) -> PublicEvent:
    return PublicEvent(
        id=one["_id"],
        publisher=publisher,
        timestamp=one["at"],
        channel_id=one["channel"],
        tags=tuple(one["tags"]),
        **_some(one, "signature event"),
    )


def _some(document: Document, names: str) -> dict[str, Any]:
    return {name: document[name] for name in names.split()}


def _batches(outlines: Iterable[Document]) -> Iterator[list[str]]:
    """Ids of documents, so many at a time as fit in memory, but at least one."""
    batch: list[str] = []
    size = 0
    for one in outlines:
        if batch and (len(batch) == _DOCUMENTS or size + one["bytes"] > _BYTES):
            yield batch
            batch, size = [], 0
        batch.append(one["_id"])
        size += one["bytes"]
    if batch:
        yield batch
