"""A MongoDB as exports and imports use it: through pymongo, which blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from bson.errors import BSONError, InvalidDocument
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import (
    BulkWriteError,
    ConnectionFailure,
    DuplicateKeyError,
    OperationFailure,
    PyMongoError,
)

from mediatord.store.mongo.cluster_schema import NODES
from mediatord.store.mongo.collections import OWNERS
from mediatord.store.mongo.uri import read_uri
from mediatord.transfer.errors import TransferError

Document: TypeAlias = dict[str, Any]
Mongo: TypeAlias = Database[Document]

_SELECTION_MS, _ANSWER_MS = 10_000, 900_000
_SNAPSHOT_GONE = {239, 246}
_DUPLICATE = 11_000
_LIVE: Document = {"$expr": {"$gt": ["$until", "$$NOW"]}}


@contextmanager
def connected(uri: str) -> Iterator[Mongo]:
    """
    The database that a URI names.

    :raise TransferError: the URI cannot be used, or, whenever that is, the server does not do what it is asked for.
    """
    try:
        address = read_uri(uri)
    except ValueError as error:
        raise TransferError(f"storage.mongodb.uri: {error}") from None
    try:
        client: MongoClient[Document] = MongoClient(
            uri, w="majority", journal=True, serverSelectionTimeoutMS=_SELECTION_MS, socketTimeoutMS=_ANSWER_MS
        )
        with client:
            if "setName" not in client.admin.command("hello"):
                raise TransferError(f"the MongoDB server at {address.hosts} is not a member of a replica set")
            yield client[address.database]
    except (PyMongoError, BSONError) as error:
        raise TransferError(f"MongoDB at {address.hosts} {_reason(error)}") from None


def refuse_used(database: Mongo, known: frozenset[str] = frozenset()) -> None:
    """
    Look whether daemons use a database.

    :param known: of those that have left an entry, those who are dead.
    :raise TransferError: one does, or seems to.
    """
    names = [one["name"] for one in database[NODES].find(_LIVE, {"name": 1}).sort("name", 1)]
    if names:
        raise TransferError(f"nodes use the MongoDB database ({', '.join(names)}): stop them first")
    entries = [one for one in database[OWNERS].find({}, {"since": 1}) if one["_id"] not in known]
    if entries:
        since = entries[0].get("since")
        when = f" since {since:%Y-%m-%d %H:%M} UTC" if since else ""
        raise TransferError(
            f"a daemon uses the MongoDB database{when}, or was killed while it did: stop it, or if none runs "
            "say so with --stopped"
        )


def left_behind(database: Mongo) -> frozenset[str]:
    """Who has left an entry, dead or alive, as it is by now."""
    return frozenset(one["_id"] for one in database[OWNERS].find({}, {"_id": 1}))


def _reason(error: Exception) -> str:
    """Without what is in documents."""
    if isinstance(error, DuplicateKeyError) or _has_duplicate(error):
        return "has one of the records already"
    if isinstance(error, OperationFailure):
        if error.code in _SNAPSHOT_GONE:
            return (
                "has forgotten the time that was exported: raise minSnapshotHistoryWindowInSeconds there, "
                "or stop all nodes and use --offline"
            )
        details = error.details or {}
        return f"refused: {details.get('codeName') or f'error {error.code}'}"
    if isinstance(error, ConnectionFailure):
        return "does not answer: when it does, run the same command again"
    if isinstance(error, InvalidDocument | BSONError):
        return "cannot keep one of the records"
    return f"cannot be used: {type(error).__name__}"


def _has_duplicate(error: Exception) -> bool:
    if not isinstance(error, BulkWriteError):
        return False
    return any(one.get("code") == _DUPLICATE for one in error.details.get("writeErrors", ()))
