"""Accounts in the backend `mongodb`, read and removed with a client of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pymongo import DESCENDING, MongoClient
from pymongo.client_session import ClientSession
from pymongo.database import Database
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern
from pymongo.write_concern import WriteConcern

from mediatord.cli.account_records import AccountRecord
from mediatord.cli.queues.mongodb import WaitingInMongoDB
from mediatord.service import StartupError
from mediatord.store.mongo.collections import ACCOUNTS, DOCUMENTS, RECIPIENTS
from mediatord.store.recipient_names import RecipientNames, page

T = TypeVar("T")
_Document = dict[str, Any]

_ALL = 1 << 31
_PATIENCE_MS = 5_000


class MongoAccountRecords(WaitingInMongoDB):
    """:param uri: of the database."""

    def accounts(self, top: int) -> tuple[list[AccountRecord], int]:
        """The newest, and how many there are in all."""
        with self._reading() as database:
            total = database[ACCOUNTS].count_documents({})
            newest = database[ACCOUNTS].find().sort([("created_at", DESCENDING), ("_id", DESCENDING)]).limit(top)
            return _records(database, list(newest)), total

    def account_dids(self) -> list[str]:
        """Those of all accounts."""
        with self._reading() as database:
            return [one["did"] for one in database[ACCOUNTS].find({}, {"did": 1})]

    def account(self, did: str) -> AccountRecord | None:
        """The one with this DID."""
        with self._reading() as database:
            return next(iter(_records(database, list(database[ACCOUNTS].find({"did": did})))), None)

    def names(self, did: str) -> list[str]:
        """What an account has registered, in order."""
        found = self._recipients(did, {"registered": {"$exists": True}})
        return page([RecipientNames(one["did"], one["registered"], one.get("names")) for one in found], 0, _ALL)

    def queued_dids(self, did: str) -> list[str]:
        """Recipient DIDs of an account for which something waits, whether they are registered or not."""
        return [one["did"] for one in self._recipients(did, {"messages": {"$gt": 0}})]

    def unregister(self, did: str) -> None:
        """Remove all that an account has registered, so that nothing more comes for it."""

        def unregister(database: Database[_Document], session: ClientSession) -> None:
            account = database[ACCOUNTS].find_one_and_update(
                {"did": did}, {"$set": {"recipients": 0}, "$unset": {"fresh": 1}}, session=session
            )
            if account is not None:
                recipients, mine = database[RECIPIENTS], {"account": account["_id"]}
                recipients.delete_many({**mine, "messages": 0}, session=session)
                recipients.update_many(mine, {"$unset": {"registered": 1, "names": 1}}, session=session)

        self._transact(unregister)

    def remove_account(self, did: str) -> bool:
        """Remove an account for which nothing waits; whether that was done."""

        def remove(database: Database[_Document], session: ClientSession) -> bool:
            account = database[ACCOUNTS].find_one({"did": did}, session=session)
            if account is None:
                return False
            mine = {"account": account["_id"]}
            if database[RECIPIENTS].find_one({**mine, "messages": {"$gt": 0}}, session=session):
                return False
            database[RECIPIENTS].delete_many(mine, session=session)
            database[DOCUMENTS].delete_one({"_id": did}, session=session)
            database[ACCOUNTS].delete_one({"_id": account["_id"]}, session=session)
            return True

        return self._transact(remove)

    def _recipients(self, did: str, condition: _Document) -> list[_Document]:
        with self._reading() as database:
            account = database[ACCOUNTS].find_one({"did": did}, {"_id": 1})
            return (
                [] if account is None else list(database[RECIPIENTS].find({"account": account["_id"], **condition}))
            )

    def _transact(self, work: Callable[[Database[_Document], ClientSession], T]) -> T:
        with self._writing() as (database, session):
            return session.with_transaction(lambda session: work(database, session))

    @contextmanager
    def _writing(self) -> Iterator[tuple[Database[_Document], ClientSession]]:
        """:raise StartupError: whatever is the matter."""
        try:
            client: MongoClient[_Document] = MongoClient(self._uri, serverSelectionTimeoutMS=_PATIENCE_MS)
            with client, client.start_session() as session:
                concerns: _Document = {
                    "read_concern": ReadConcern("snapshot"),
                    "write_concern": WriteConcern("majority", j=True),
                }
                yield client.get_database(self._address.database, **concerns), session
        except PyMongoError:
            raise StartupError(f"MongoDB at {self._address.hosts} cannot be written") from None


def _records(database: Database[_Document], accounts: Iterable[_Document]) -> list[AccountRecord]:
    records = []
    for one in accounts:
        waiting = database[RECIPIENTS].find(
            {"account": one["_id"], "messages": {"$gt": 0}}, {"messages": 1, "bytes": 1}
        )
        queues = [(queue["messages"], queue["bytes"]) for queue in waiting]
        records.append(
            AccountRecord(
                did=one["did"],
                created_at=one["created_at"],
                seen_at=one["seen_at"] if "seen_at" in one else one["created_at"],
                used="fresh" not in one,
                recipients=one["recipients"],
                messages=sum(messages for messages, _ in queues),
                bytes=sum(size for _, size in queues),
            )
        )
    return records
