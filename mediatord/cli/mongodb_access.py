"""
Taking messages and events out of MongoDB, beside the nodes that work on it.

Queues in the backend `mongodb`: read with a client of its own, taken out by the transactions of the store.

Accounts in the backend `mongodb`, read and removed with a client of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from pymongo import ASCENDING, DESCENDING, MongoClient
from pymongo.client_session import ClientSession
from pymongo.database import Database
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern
from pymongo.write_concern import WriteConcern
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from mediatord.cli.store_access import (
    QUEUE_PROTOCOLS,
    AccountSummary,
    MessageFilter,
    PurgeProgress,
    QueuedMessage,
    QueueInfo,
    QueueListTotals,
    QueueProtocol,
)
from mediatord.errors import StartupError, StoreUnavailable
from mediatord.protocol.canonical_did import canonicalize_did, compute_did_digest
from mediatord.store.message_operations import ignore_observation
from mediatord.store.mongo.accounts import RecipientDIDCache
from mediatord.store.mongo.decentrl_parties import (
    build_party_changes,
    build_party_documents_query,
    build_party_query,
    find_party,
    make_party_key,
)
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.errors import UnsupportedServer
from mediatord.store.mongo.driver.executor import retry_on_duplicate_key
from mediatord.store.mongo.driver.transactions import Transaction
from mediatord.store.mongo.driver.uri import MongoConnectionSettings, parse_mongo_uri
from mediatord.store.mongo.ledger import build_ledger_entries
from mediatord.store.mongo.removal import LateCommitReporter, RemovalRequest, RemoveBatchOperation
from mediatord.store.mongo.schema import ACCOUNTS, LONG_FORM_DIDS, MESSAGES, PARTIES, PENDING_EVENTS, RECIPIENTS
from mediatord.store.recipient_names import RecipientNames, slice_names
from mediatord.store.sqlite.bulk_sql import split_chunks

# In one transaction, which is in the way of others for the same recipient.
_BATCH_MESSAGES = 100


def purge_in_mongodb(
    address: MongoConnectionSettings, entries: Sequence[QueuedMessage], progress: PurgeProgress
) -> None:
    """
    Take these out, in a reactor that runs meanwhile; so this can be done once in a process.

    :param course: told before each transaction what it is to take out, and then what it took out.
    :raise StartupError: it cannot be done, or not to the end.
    """
    from twisted.internet import reactor  # noqa: TID251  this is the program

    running: Any = reactor
    ends: list[Failure | None] = []

    def begin() -> None:
        done = Deferred.fromCoroutine(_purge(running, address, entries, progress))
        done.addBoth(ends.append)
        done.addBoth(lambda _: running.stop())

    running.callWhenRunning(begin)
    running.run()
    if not ends:
        raise KeyboardInterrupt  # which the reactor has taken
    (end,) = ends
    if end is not None and end.check(StoreUnavailable, UnsupportedServer):
        raise StartupError(f"MongoDB at {address.hosts} cannot be used{_describe_reason(end)}")
    if end is not None:
        end.raiseException()


def _describe_reason(failure: Failure) -> str:
    reason = failure.getErrorMessage() if failure.check(UnsupportedServer) else ""
    return f": {reason}" if reason else ": it does not answer"


async def _purge(
    reactor: Any, address: MongoConnectionSettings, entries: Sequence[QueuedMessage], progress: PurgeProgress
) -> None:
    client = ReplicaSetClient(address, reactor, observe=ignore_observation, on_up=lambda up: None)
    # What is known late is found by looking what is missing.
    removing = RemoveBatchOperation(RecipientDIDCache(), LateCommitReporter(lambda removed: None), "removed")
    try:
        await client.open()
        for batch in split_chunks([one for one in entries if one.half == "didcomm"], _BATCH_MESSAGES):
            progress.begin(batch)
            removal = RemovalRequest([one.id for one in batch])
            (removed,) = await client.operate("purge", partial(_purge_messages, removing, removal))
            gone = {one.id for one in removed}
            progress.end([one for one in batch if one.id in gone])
        for did in dict.fromkeys(one.did for one in entries if one.half == "decentrl"):
            await _purge_events(
                client, [one for one in entries if one.half == "decentrl" and one.did == did], progress
            )
    finally:
        await client.close()


async def _purge_messages(
    removing: RemoveBatchOperation, removal: RemovalRequest, executor: Any, deadline: float
) -> Sequence[Any]:
    return await removing(executor, [removal], deadline, None)


async def _purge_events(client: ReplicaSetClient, entries: Sequence[QueuedMessage], progress: PurgeProgress) -> None:
    for batch in split_chunks(entries, _BATCH_MESSAGES):
        progress.begin(batch)
        gone = await retry_on_duplicate_key(
            partial(client.transact, "purge", partial(_purge_events_in_transaction, batch))
        )
        progress.end([one for one in batch if one.id in gone])


async def _purge_events_in_transaction(entries: Sequence[QueuedMessage], transaction: Transaction) -> set[str]:
    did = entries[0].did
    parties, found = await transaction.query_many(
        build_party_query(did), build_party_documents_query(PENDING_EVENTS, did, [one.id for one in entries])
    )
    transaction.write_at_end(build_party_changes(PENDING_EVENTS, find_party(parties, did), gone=found))
    transaction.write_at_end(build_ledger_entries(transaction.slot, "decentrl", removed=len(found)))
    return {one["_id"] for one in found}


_QueueDocument = dict[str, Any]

_QUEUE_SELECTION_TIMEOUT_MS = 5_000
_BATCH_IDS = 5_000
_DID_COLLECTIONS = (ACCOUNTS, RECIPIENTS, PARTIES)
_NON_EMPTY_FILTER = {"waited_for": True}
# Of each half: what has the counters and their names, and where what they count is, by what.
_QUEUE_COUNTERS: dict[QueueProtocol, tuple[str, str, str, str, str]] = {
    "didcomm": (RECIPIENTS, "messages", "bytes", MESSAGES, "recipient"),
    "decentrl": (PARTIES, PENDING_EVENTS.counter, PENDING_EVENTS.bytes, PENDING_EVENTS.name, "party"),
}
_MESSAGE_FIELDS = ("account", "size", "received_at", "expires_at", "delivered", "pushes", "due_at")


class MongoQueueAccess:
    """
    :param uri: of the database.
    :raise StartupError: it is none.
    """

    def __init__(self, uri: str) -> None:
        try:
            self._address: MongoConnectionSettings = parse_mongo_uri(uri)
        except ValueError as error:
            raise StartupError(f"storage.mongodb.uri: {error}") from None
        self._uri = uri

    def queues(self, halves: Sequence[QueueProtocol], top: int) -> tuple[list[QueueInfo], QueueListTotals]:
        """The longest queues, and all of them added up."""
        found: list[QueueInfo] = []
        sums = [0, 0, 0]
        with self._reading() as database:
            for half in halves:
                found += _find_longest_queues(database, half, top)
                sums = [one + more for one, more in zip(sums, _sum_queues(database, half), strict=True)]
        return sorted(found, key=lambda queue: -queue.messages)[:top], QueueListTotals(*sums)

    def recipients(self) -> list[str]:
        """The DIDs that something waits for."""
        with self._reading() as database:
            collections = [_QUEUE_COUNTERS[half][0] for half in QUEUE_PROTOCOLS]
            return [one["did"] for name in collections for one in database[name].find(_NON_EMPTY_FILTER, {"did": 1})]

    def registered(self) -> list[str]:
        """Accounts, recipients and Decentrl identities."""
        with self._reading() as database:
            return [one["did"] for name in _DID_COLLECTIONS for one in database[name].find({}, {"did": 1})]

    def kept(self, did: str) -> str | None:
        """The one of those that this is a form of, or a DID URL of, as it is kept."""
        canonical = canonicalize_did(did)
        asked: tuple[tuple[str, _QueueDocument], ...] = (
            (PARTIES, {"_id": make_party_key(did)}),
            (RECIPIENTS, {"did_digest": compute_did_digest(did)}),
            (ACCOUNTS, {"did": canonical}),
            (PARTIES, {"_id": make_party_key(canonical)}),
        )
        with self._reading() as database:
            for name, query in asked:
                found = database[name].find_one(query, {"did": 1})
                if found is not None:
                    return str(found["did"])
        return None

    def entries(self, scope: MessageFilter) -> list[QueuedMessage]:
        """What waits for a recipient."""
        found: list[QueuedMessage] = []
        with self._reading() as database:
            if "didcomm" in scope.halves:
                found += _find_messages(database, scope.did)
            if "decentrl" in scope.halves:
                found += _find_events(database, scope.did)
        return [entry for entry in found if scope.has(entry)]

    def missing(self, entries: Sequence[QueuedMessage]) -> list[QueuedMessage]:
        """Those that are not there any more."""
        there: set[tuple[QueueProtocol, str]] = set()
        with self._reading() as database:
            for half in QUEUE_PROTOCOLS:
                ids = [one.id for one in entries if one.half == half]
                for some in split_chunks(ids, _BATCH_IDS):
                    left = database[_QUEUE_COUNTERS[half][3]].find({"_id": {"$in": list(some)}}, {"_id": 1})
                    there |= {(half, one["_id"]) for one in left}
        return [one for one in entries if (one.half, one.id) not in there]

    def remove(self, entries: Sequence[QueuedMessage], progress: PurgeProgress) -> None:
        """By the store's own transactions, a few at a time."""
        purge_in_mongodb(self._address, entries, progress)

    @contextmanager
    def _reading(self) -> Iterator[Database[_QueueDocument]]:
        """:raise StartupError: whatever is the matter."""
        try:
            client: MongoClient[_QueueDocument] = MongoClient(
                self._uri, serverSelectionTimeoutMS=_QUEUE_SELECTION_TIMEOUT_MS
            )
            with client:
                yield client.get_database(self._address.database, read_concern=ReadConcern("majority"))
        except PyMongoError:
            raise StartupError(f"MongoDB at {self._address.hosts} cannot be read") from None


def _find_longest_queues(database: Database[_QueueDocument], half: QueueProtocol, top: int) -> list[QueueInfo]:
    counters, messages, size, what, by = _QUEUE_COUNTERS[half]
    wanted = {"did": 1, "account": 1, messages: 1, size: 1}
    found = list(database[counters].find(_NON_EMPTY_FILTER, wanted).sort(messages, DESCENDING).limit(top))
    accounts = _find_account_dids(database, found)
    queues = []
    for one in found:
        oldest = database[what].find_one({by: one["_id"]}, {"received_at": 1}, sort=[("seq", ASCENDING)])
        account = accounts[one["account"]] if one.get("account") in accounts else one["did"]
        received_at = oldest["received_at"] if oldest else None
        queues.append(QueueInfo(half, one["did"], account, one[messages], one[size], received_at))
    return queues


def _sum_queues(database: Database[_QueueDocument], half: QueueProtocol) -> tuple[int, int, int]:
    counters, messages, size, _, _ = _QUEUE_COUNTERS[half]
    total = {"_id": None, "n": {"$sum": 1}, "messages": {"$sum": f"${messages}"}, "bytes": {"$sum": f"${size}"}}
    for one in database[counters].aggregate([{"$match": _NON_EMPTY_FILTER}, {"$group": total}]):
        return one["n"], one["messages"], one["bytes"]
    return 0, 0, 0


def _find_messages(database: Database[_QueueDocument], did: str) -> list[QueuedMessage]:
    recipients = [
        one["_id"] for one in database[RECIPIENTS].find({"did_digest": compute_did_digest(did)}, {"_id": 1})
    ]
    cursor = database[MESSAGES].find({"recipient": {"$in": recipients}}, dict.fromkeys(_MESSAGE_FIELDS, 1))
    found = list(cursor.sort("seq", ASCENDING))
    accounts = _find_account_dids(database, found)
    return [
        QueuedMessage(
            half="didcomm",
            id=one["_id"],
            did=did,
            account=accounts.get(one["account"], ""),
            size=one["size"],
            received_at=one["received_at"],
            expires_at=one["expires_at"],
            status="delivered" if "delivered" in one else "pending",
            pushes=one["pushes"],
            due_at=one.get("due_at"),
        )
        for one in found
    ]


def _find_events(database: Database[_QueueDocument], did: str) -> list[QueuedMessage]:
    cursor = database[PENDING_EVENTS.name].find({"party": make_party_key(did)}, {"size": 1, "received_at": 1})
    return [
        QueuedMessage("decentrl", one["_id"], did, did, one["size"], one["received_at"])
        for one in cursor.sort("seq", ASCENDING)
    ]


def _find_account_dids(database: Database[_QueueDocument], documents: Sequence[_QueueDocument]) -> dict[Any, str]:
    """DIDs of the accounts that these name, by their numbers."""
    wanted = list({one["account"] for one in documents if "account" in one})
    if not wanted:
        return {}
    return {one["_id"]: one["did"] for one in database[ACCOUNTS].find({"_id": {"$in": wanted}}, {"did": 1})}


ResultT = TypeVar("ResultT")
_AccountDocument = dict[str, Any]

_NO_LIMIT = 1 << 31
_ACCOUNT_SELECTION_TIMEOUT_MS = 5_000


class MongoAccountAccess(MongoQueueAccess):
    """:param uri: of the database."""

    def accounts(self, top: int) -> tuple[list[AccountSummary], int]:
        """The newest, and how many there are in all."""
        with self._reading() as database:
            total = database[ACCOUNTS].count_documents({})
            newest = database[ACCOUNTS].find().sort([("created_at", DESCENDING), ("_id", DESCENDING)]).limit(top)
            return _make_summaries(database, list(newest)), total

    def account_dids(self) -> list[str]:
        """Those of all accounts."""
        with self._reading() as database:
            return [one["did"] for one in database[ACCOUNTS].find({}, {"did": 1})]

    def account(self, did: str) -> AccountSummary | None:
        """The one with this DID."""
        with self._reading() as database:
            return next(iter(_make_summaries(database, list(database[ACCOUNTS].find({"did": did})))), None)

    def names(self, did: str) -> list[str]:
        """What an account has registered, in order."""
        found = self._recipients(did, {"registered": {"$exists": True}})
        return slice_names(
            [RecipientNames(one["did"], one["registered"], one.get("names")) for one in found], 0, _NO_LIMIT
        )

    def queued_dids(self, did: str) -> list[str]:
        """Recipient DIDs of an account for which something waits, whether they are registered or not."""
        return [one["did"] for one in self._recipients(did, {"messages": {"$gt": 0}})]

    def unregister(self, did: str) -> None:
        """Remove all that an account has registered, so that nothing more comes for it."""

        def unregister(database: Database[_AccountDocument], session: ClientSession) -> None:
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

        def remove(database: Database[_AccountDocument], session: ClientSession) -> bool:
            account = database[ACCOUNTS].find_one({"did": did}, session=session)
            if account is None:
                return False
            mine = {"account": account["_id"]}
            if database[RECIPIENTS].find_one({**mine, "messages": {"$gt": 0}}, session=session):
                return False
            database[RECIPIENTS].delete_many(mine, session=session)
            database[LONG_FORM_DIDS].delete_one({"_id": did}, session=session)
            database[ACCOUNTS].delete_one({"_id": account["_id"]}, session=session)
            return True

        return self._transact(remove)

    def _recipients(self, did: str, condition: _AccountDocument) -> list[_AccountDocument]:
        with self._reading() as database:
            account = database[ACCOUNTS].find_one({"did": did}, {"_id": 1})
            return (
                [] if account is None else list(database[RECIPIENTS].find({"account": account["_id"], **condition}))
            )

    def _transact(self, work: Callable[[Database[_AccountDocument], ClientSession], ResultT]) -> ResultT:
        with self._writing() as (database, session):
            return session.with_transaction(lambda session: work(database, session))

    @contextmanager
    def _writing(self) -> Iterator[tuple[Database[_AccountDocument], ClientSession]]:
        """:raise StartupError: whatever is the matter."""
        try:
            client: MongoClient[_AccountDocument] = MongoClient(
                self._uri, serverSelectionTimeoutMS=_ACCOUNT_SELECTION_TIMEOUT_MS
            )
            with client, client.start_session() as session:
                concerns: _AccountDocument = {
                    "read_concern": ReadConcern("snapshot"),
                    "write_concern": WriteConcern("majority", j=True),
                }
                yield client.get_database(self._address.database, **concerns), session
        except PyMongoError:
            raise StartupError(f"MongoDB at {self._address.hosts} cannot be written") from None


def _make_summaries(
    database: Database[_AccountDocument], accounts: Iterable[_AccountDocument]
) -> list[AccountSummary]:
    records = []
    for one in accounts:
        waiting = database[RECIPIENTS].find(
            {"account": one["_id"], "messages": {"$gt": 0}}, {"messages": 1, "bytes": 1}
        )
        queues = [(queue["messages"], queue["bytes"]) for queue in waiting]
        records.append(
            AccountSummary(
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
