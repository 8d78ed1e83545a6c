"""Queues in the backend `mongodb`: read with a client of its own, taken out by the transactions of the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pymongo import ASCENDING, DESCENDING, MongoClient
from pymongo.database import Database
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern

from mediatord.cli.queues.course import Course
from mediatord.cli.queues.removing import remove_in_mongodb
from mediatord.cli.queues.values import HALVES, Entry, Half, Queue, Scope, Totals
from mediatord.protocol.canonical_did import canonical_did, did_digest
from mediatord.service import StartupError
from mediatord.store.mongo.collections import ACCOUNTS, MESSAGES, RECIPIENTS
from mediatord.store.mongo.decentrl_keys import key_of
from mediatord.store.mongo.decentrl_schema import PARTIES, PENDING
from mediatord.store.mongo.uri import MongoAddress, read_uri
from mediatord.store.sql_rows import pieces

_Document = dict[str, Any]

_PATIENCE_MS = 5_000
_IDS_AT_A_TIME = 5_000
_HOLDERS = (ACCOUNTS, RECIPIENTS, PARTIES)
_WAITED_FOR = {"waited_for": True}
# Of each half: what has the counters and their names, and where what they count is, by what.
_COUNTERS: dict[Half, tuple[str, str, str, str, str]] = {
    "didcomm": (RECIPIENTS, "messages", "bytes", MESSAGES, "recipient"),
    "decentrl": (PARTIES, PENDING.counter, PENDING.bytes, PENDING.name, "party"),
}
_MESSAGE = ("account", "size", "received_at", "expires_at", "delivered", "pushes", "due_at")


class WaitingInMongoDB:
    """
    :param uri: of the database.
    :raise StartupError: it is none.
    """

    def __init__(self, uri: str) -> None:
        try:
            self._address: MongoAddress = read_uri(uri)
        except ValueError as error:
            raise StartupError(f"storage.mongodb.uri: {error}") from None
        self._uri = uri

    def queues(self, halves: Sequence[Half], top: int) -> tuple[list[Queue], Totals]:
        """The longest queues, and all of them added up."""
        found: list[Queue] = []
        sums = [0, 0, 0]
        with self._reading() as database:
            for half in halves:
                found += _longest(database, half, top)
                sums = [one + more for one, more in zip(sums, _totals(database, half), strict=True)]
        return sorted(found, key=lambda queue: -queue.messages)[:top], Totals(*sums)

    def recipients(self) -> list[str]:
        """The DIDs that something waits for."""
        with self._reading() as database:
            collections = [_COUNTERS[half][0] for half in HALVES]
            return [one["did"] for name in collections for one in database[name].find(_WAITED_FOR, {"did": 1})]

    def registered(self) -> list[str]:
        """Accounts, recipients and Decentrl identities."""
        with self._reading() as database:
            return [one["did"] for name in _HOLDERS for one in database[name].find({}, {"did": 1})]

    def kept(self, did: str) -> str | None:
        """The one of those that this is a form of, or a DID URL of, as it is kept."""
        canonical = canonical_did(did)
        asked: tuple[tuple[str, _Document], ...] = (
            (PARTIES, {"_id": key_of(did)}),
            (RECIPIENTS, {"did_digest": did_digest(did)}),
            (ACCOUNTS, {"did": canonical}),
            (PARTIES, {"_id": key_of(canonical)}),
        )
        with self._reading() as database:
            for name, query in asked:
                found = database[name].find_one(query, {"did": 1})
                if found is not None:
                    return str(found["did"])
        return None

    def entries(self, scope: Scope) -> list[Entry]:
        """What waits for a recipient."""
        found: list[Entry] = []
        with self._reading() as database:
            if "didcomm" in scope.halves:
                found += _messages(database, scope.did)
            if "decentrl" in scope.halves:
                found += _events(database, scope.did)
        return [entry for entry in found if scope.has(entry)]

    def missing(self, entries: Sequence[Entry]) -> list[Entry]:
        """Those that are not there any more."""
        there: set[tuple[Half, str]] = set()
        with self._reading() as database:
            for half in HALVES:
                ids = [one.id for one in entries if one.half == half]
                for some in pieces(ids, _IDS_AT_A_TIME):
                    left = database[_COUNTERS[half][3]].find({"_id": {"$in": list(some)}}, {"_id": 1})
                    there |= {(half, one["_id"]) for one in left}
        return [one for one in entries if (one.half, one.id) not in there]

    def remove(self, entries: Sequence[Entry], course: Course) -> None:
        """By the store's own transactions, a few at a time."""
        remove_in_mongodb(self._address, entries, course)

    @contextmanager
    def _reading(self) -> Iterator[Database[_Document]]:
        """:raise StartupError: whatever is the matter."""
        try:
            client: MongoClient[_Document] = MongoClient(self._uri, serverSelectionTimeoutMS=_PATIENCE_MS)
            with client:
                yield client.get_database(self._address.database, read_concern=ReadConcern("majority"))
        except PyMongoError:
            raise StartupError(f"MongoDB at {self._address.hosts} cannot be read") from None


def _longest(database: Database[_Document], half: Half, top: int) -> list[Queue]:
    counters, messages, size, what, by = _COUNTERS[half]
    wanted = {"did": 1, "account": 1, messages: 1, size: 1}
    found = list(database[counters].find(_WAITED_FOR, wanted).sort(messages, DESCENDING).limit(top))
    accounts = _accounts(database, found)
    queues = []
    for one in found:
        oldest = database[what].find_one({by: one["_id"]}, {"received_at": 1}, sort=[("seq", ASCENDING)])
        account = accounts[one["account"]] if one.get("account") in accounts else one["did"]
        received_at = oldest["received_at"] if oldest else None
        queues.append(Queue(half, one["did"], account, one[messages], one[size], received_at))
    return queues


def _totals(database: Database[_Document], half: Half) -> tuple[int, int, int]:
    counters, messages, size, _, _ = _COUNTERS[half]
    total = {"_id": None, "n": {"$sum": 1}, "messages": {"$sum": f"${messages}"}, "bytes": {"$sum": f"${size}"}}
    for one in database[counters].aggregate([{"$match": _WAITED_FOR}, {"$group": total}]):
        return one["n"], one["messages"], one["bytes"]
    return 0, 0, 0


def _messages(database: Database[_Document], did: str) -> list[Entry]:
    recipients = [one["_id"] for one in database[RECIPIENTS].find({"did_digest": did_digest(did)}, {"_id": 1})]
    cursor = database[MESSAGES].find({"recipient": {"$in": recipients}}, dict.fromkeys(_MESSAGE, 1))
    found = list(cursor.sort("seq", ASCENDING))
    accounts = _accounts(database, found)
    return [
        Entry(
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


def _events(database: Database[_Document], did: str) -> list[Entry]:
    cursor = database[PENDING.name].find({"party": key_of(did)}, {"size": 1, "received_at": 1})
    return [
        Entry("decentrl", one["_id"], did, did, one["size"], one["received_at"])
        for one in cursor.sort("seq", ASCENDING)
    ]


def _accounts(database: Database[_Document], documents: Sequence[_Document]) -> dict[Any, str]:
    """DIDs of the accounts that these name, by their numbers."""
    wanted = list({one["account"] for one in documents if "account" in one})
    if not wanted:
        return {}
    return {one["_id"]: one["did"] for one in database[ACCOUNTS].find({"_id": {"$in": wanted}}, {"did": 1})}
