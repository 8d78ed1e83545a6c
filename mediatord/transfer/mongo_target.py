"""Writing a MongoDB store, in transactions, each of which says how far the import is."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bson import encode
from pymongo import UpdateOne
from pymongo.client_session import ClientSession
from pymongo.errors import BulkWriteError

from mediatord.store.mongo import cluster_schema, decentrl_schema
from mediatord.store.mongo.collections import ACCOUNTS, COLLECTIONS, MESSAGES, RECIPIENTS, RETIRED
from mediatord.store.mongo.decentrl_keys import key_of
from mediatord.store.mongo.ledger import CARRIED, LEDGER
from mediatord.store.mongo.requests import LARGEST_DOCUMENT
from mediatord.store.mongo.versions import IMPORTING
from mediatord.transfer.errors import ArchiveRefused, TransferError
from mediatord.transfer.mongo_link import Document, Mongo, connected, left_behind, refuse_used
from mediatord.transfer.mongo_loading import id_of, load_of, party_change
from mediatord.transfer.mongo_source import OUR_VERSION, READABLE_FROM, MongoSource, check_version
from mediatord.transfer.records import Counts, Record
from mediatord.transfer.stores import refuse_counts

_ALL = (*COLLECTIONS, *decentrl_schema.COLLECTIONS, *cluster_schema.COLLECTIONS)
_SCHEMA = "schema"
_DUPLICATE = 11000
# Records with more than this are made to documents to see how large those are.
_LARGE = 8_000_000
# Bytes around each text, and once more for what it is looked up by.
_EACH = 64


class MongoTarget:
    """
    :param session: in which all is written, so that whoever goes on can end what is left open in it.
    :param known: of the daemons that have left an entry, those who are dead.
    :ivar _owner: this process among those that import the same: the last one to begin.
    """

    def __init__(self, database: Mongo, session: ClientSession, known: frozenset[str]) -> None:
        self._database = database
        self._session = session
        self._known = known
        self._owner = secrets.token_hex(12)

    def accept(self, record: Record) -> None:
        values = [value if isinstance(value, tuple) else (value,) for _, value in record]
        texts = [one for some in values for one in some if isinstance(one, str | bytes)]
        if sum([len(one) * 4 + _EACH for one in texts]) <= _LARGE:  # no character has more bytes
            return
        documents = [one for some in load_of(1, [record]).documents.values() for one in some]
        if any(len(encode(one)) > LARGEST_DOCUMENT for one in documents):
            raise ArchiveRefused(f"a record of kind {record.kind} is larger than MongoDB takes (16 MiB)")

    def begin(self, archive: str) -> int:
        mark = check_version(self._database).get(IMPORTING)
        if mark is not None:
            return self._go_on(mark, archive)
        refuse_used(self._database, self._known)
        self._make_indexes()
        refuse_counts(f"the MongoDB database {self._database.name}", self.counts())
        importing = {"archive": archive, "owner": self._owner, "session": self._session_id, "done": 0}
        change = {"$set": {IMPORTING: importing, "version": OUR_VERSION, "readable_from": READABLE_FROM}}
        unmarked = {"_id": _SCHEMA, IMPORTING: {"$exists": False}}
        # Two that begin at the same time: one finds the document of the other in its way.
        self._database[_SCHEMA].update_one(unmarked, change, upsert=True)
        try:
            # Somebody who had looked before may have begun to write.
            refuse_used(self._database, self._known)
            refuse_counts(f"the MongoDB database {self._database.name}", self.counts())
        except TransferError:
            self._unmark()
            raise
        return 0

    def write(self, first: int, records: Sequence[Record]) -> None:
        load = load_of(first, records)

        def write(session: ClientSession) -> None:
            self._advance(session, first - 1, len(records))
            refuse_used(self._database, self._known)
            for collection, documents in load.documents.items():
                self._insert(session, collection, documents)
            self._database[LEDGER].update_one(
                {"_id": CARRIED}, _accepting(load.documents), session=session, upsert=True
            )
            self._update(session, ACCOUNTS, load.accounts, _registering)
            self._update(session, RECIPIENTS, load.recipients, _queueing)
            parties = [
                UpdateOne({"_id": key_of(did)}, party_change(did, more), upsert=True)
                for did, more in load.parties.items()
            ]
            if parties:
                self._database[decentrl_schema.PARTIES].bulk_write(parties, session=session)

        self._session.with_transaction(write)

    def counts(self) -> Counts:
        return MongoSource(self._database).counts()

    def finish(self) -> None:
        refuse_used(self._database, self._known)
        self._unmark()

    @property
    def _session_id(self) -> Any:
        return self._session.session_id["id"]

    def _go_on(self, mark: Document, archive: str) -> int:
        if mark["archive"] != archive:
            raise TransferError(
                f"an import of another archive into the MongoDB database {self._database.name} was not finished: "
                "run that again, or drop the database to give it up"
            )
        refuse_used(self._database, self._known)
        # It may have been killed inside a transaction, which would be in the way for a minute.
        self._database.command("killSessions", [{"id": mark["session"]}])
        ours = {"$set": {f"{IMPORTING}.owner": self._owner, f"{IMPORTING}.session": self._session_id}}
        found = self._database[_SCHEMA].find_one_and_update(
            {"_id": _SCHEMA, f"{IMPORTING}.archive": archive}, ours, return_document=True
        )
        if found is None:
            raise TransferError("another import of this archive has just finished")
        return int(found[IMPORTING]["done"])

    def _unmark(self) -> None:
        mine = {"_id": _SCHEMA, f"{IMPORTING}.owner": self._owner}
        if not self._database[_SCHEMA].update_one(mine, {"$unset": {IMPORTING: 1}}).matched_count:
            raise TransferError("another process has taken over this import")

    def _advance(self, session: ClientSession, done: int, more: int) -> None:
        """:raise TransferError: another process does what we were about to do."""
        ours = {"_id": _SCHEMA, f"{IMPORTING}.owner": self._owner, f"{IMPORTING}.done": done}
        change = {"$set": {f"{IMPORTING}.done": done + more}}
        if not self._database[_SCHEMA].update_one(ours, change, session=session).matched_count:
            raise TransferError("another process has taken over this import")

    def _update(self, session: ClientSession, collection: str, counted: dict[int, list[int]], change: Any) -> None:
        updates = [UpdateOne({"_id": id_of(number)}, change(more)) for number, more in counted.items()]
        if updates and self._database[collection].bulk_write(updates, session=session).matched_count < len(updates):
            raise TransferError(
                f"the archive contradicts itself: something belongs to one of {collection} that is not there"
            )

    def _insert(self, session: ClientSession, collection: str, documents: list[Document]) -> None:
        """:raise ArchiveRefused: a DID would have two owners."""
        try:
            self._database[collection].insert_many(documents, session=session)
        except BulkWriteError as error:
            codes = {one["code"] for one in (error.details or {}).get("writeErrors", ())}
            if collection == RECIPIENTS and codes == {_DUPLICATE}:
                raise ArchiveRefused("a recipient is another name of a DID that is registered") from None
            if collection in (ACCOUNTS, RETIRED) and codes == {_DUPLICATE}:
                raise ArchiveRefused(f"one of {collection} has another form of a DID that is there") from None
            raise

    def _make_indexes(self) -> None:
        there = set(self._database.list_collection_names())
        for collection in _ALL:
            if collection.name not in there:
                self._database.create_collection(collection.name)
            if collection.indexes:
                indexes = [{**index.definition(), "name": index.name} for index in collection.indexes]
                self._database.command("createIndexes", collection.name, indexes=indexes)


@contextmanager
def writing_mongodb(uri: str, *, stopped: bool) -> Iterator[MongoTarget]:
    """
    An import into a database, which daemons refuse meanwhile.

    :param stopped: no daemon runs, although one seems to have been killed.
    :raise TransferError: it cannot be reached, or does not do what it is asked for.
    """
    with connected(uri) as database, database.client.start_session() as session:
        yield MongoTarget(database, session, left_behind(database) if stopped else frozenset())


def _registering(more: list[int]) -> Document:
    return {"$inc": {"recipients": more[0]}, "$max": {"places": more[1]}}


def _accepting(documents: dict[str, list[Document]]) -> Document:
    """What waits was accepted, as its new store sees it; nobody else keeps the ledger meanwhile."""
    more = {
        "didcomm.accepted": len(documents.get(MESSAGES, ())),
        "decentrl.accepted": len(documents.get(decentrl_schema.PENDING.name, ())),
    }
    return {"$inc": more, "$set": {"settled": True}}


def _queueing(more: list[int]) -> Document:
    return {"$inc": {"messages": more[0], "bytes": more[1]}, "$set": {"waited_for": True}}
