"""
MongoDB replica sets for tests, on loopback ports; nothing is left of them when this process ends.

::

    with ReplicaSet(3) as servers:
        connect_to(servers.uri("mediatord"))
        servers.kill(servers.primary())
        with servers.failpoint("commitTransaction", closeConnection=True, times=1):
            ...
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from pymongo import MongoClient
from pymongo.errors import AutoReconnect

from tests.mongod_process import mongod_binary
from tests.replica_set import Credentials, ReplicaSet, TLSFiles

__all__ = ["Credentials", "ReplicaSet", "TLSFiles", "fresh_database", "mongod_binary", "shared_replica_set"]


@functools.cache
def shared_replica_set() -> ReplicaSet:
    """
    A replica set of one member for all tests of this process, started on first use.

    :raise SkipTest: there is no MongoDB server.
    """
    shared = ReplicaSet()
    shared.open()
    atexit.register(shared.close)
    return shared


_free: list[str] = []
_numbers = itertools.count()


@contextlib.contextmanager
def fresh_database(servers: ReplicaSet | None = None) -> Iterator[str]:
    """
    Name of a database without documents; it may have collections and indexes of an earlier test.

    :param servers: replica set on which to create a new one, dropped afterwards; the shared set unless given.
    """
    if servers is not None:
        name = f"test-{next(_numbers)}"
        try:
            yield name
        finally:
            try:
                servers.client.drop_database(name)
            except AutoReconnect:  # the first use of a connection to a killed server fails
                servers.client.drop_database(name)
        return
    shared = shared_replica_set()
    name = _free.pop() if _free else f"shared-{next(_numbers)}"
    yield name
    _empty(shared.client, name)
    _free.append(name)


def _empty(client: MongoClient[dict[str, Any]], name: str) -> None:
    database = client[name]
    wanted: Mapping[str, Any] = {"type": "collection", "name": {"$not": {"$regex": "^system[.]"}}}
    for collection in database.list_collection_names(filter=dict(wanted)):
        database[collection].delete_many({})
