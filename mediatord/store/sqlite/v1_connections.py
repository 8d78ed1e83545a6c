"""Connections of DIDComm v1 in SQLite."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from math import inf
from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from zope.interface import implementer

from mediatord.store.caches import OwnerCache
from mediatord.store.interfaces.v1_connections import (
    MAX_REPLACED_CONNECTIONS,
    ImplicitPickup,
    IV1ConnectionStore,
    V1Connection,
)
from mediatord.store.sqlite.account_queries import get_account_id
from mediatord.store.sqlite.connection import StoreConnection
from mediatord.store.sqlite.executor import SliceSize, SQLExecutor, read_cached, sql_method

# Connections of a slice of their expiry, at least and at most.
EXPIRY_SLICE_ROWS = 8, 64

# Columns have the names of the fields.
_FIELDS = [one.name for one in fields(V1Connection)]
_COLUMNS = ", ".join(_FIELDS)
_SELECT_BY_KEY = f"SELECT {_COLUMNS} FROM v1_connection WHERE own_key = ?"
_SELECT_BY_ACCOUNT = f"SELECT {_COLUMNS} FROM v1_connection WHERE account = ?"
_SELECT_NEXT = f"SELECT {_COLUMNS} FROM v1_connection WHERE account > ? ORDER BY account LIMIT ?"
# What a handshake does not change of a connection that exists.
_KEPT = "account", "has_base58_keys", "implicit_pickup", "created_at"
_CHANGES = ", ".join(f"{name} = excluded.{name}" for name in _FIELDS if name not in _KEPT)
_UPSERT = f"""
    INSERT INTO v1_connection ({_COLUMNS}, has_account) VALUES ({", ".join(["?"] * len(_FIELDS))}, ?)
    ON CONFLICT (account) DO UPDATE SET {_CHANGES} RETURNING {_COLUMNS}
"""
_CHANGE = """
    UPDATE v1_connection SET has_base58_keys = coalesce(?, has_base58_keys),
        implicit_pickup = coalesce(?, implicit_pickup)
    WHERE account = ? RETURNING own_key
"""
_SELECT_COUNTS = "SELECT name, value FROM counter WHERE name IN ('v1_connections', 'pending_v1_connections')"
_DELETE_PENDING = """
    DELETE FROM v1_connection WHERE id IN (
        SELECT id FROM v1_connection WHERE has_account = 0 AND created_at < ? ORDER BY created_at LIMIT ?
    )
    RETURNING own_key
"""


def put_connection(
    connection: StoreConnection, now: float, new: V1Connection, max_pending: int
) -> tuple[V1Connection, list[str]]:
    """
    Insert a connection, or replace the one of the same account; as it is stored, and the mediator's keys of what it
    replaces.
    """
    has_account = get_account_id(connection, new.account) is not None
    former = connection.execute("SELECT own_key FROM v1_connection WHERE account = ?", (new.account,))
    replaced = [own_key for (own_key,) in former.fetchall()]
    if not has_account and not replaced:
        _, pending = count_connections(connection)
        if pending >= max_pending:
            replaced = expire_connections(connection, pending - max_pending + 1, inf, MAX_REPLACED_CONNECTIONS)
    values = {name: getattr(new, name) for name in _FIELDS}
    values |= {"routing_keys": json.dumps(new.routing_keys), "created_at": now}
    (row,) = connection.execute(_UPSERT, (*values.values(), has_account)).fetchall()
    return _parse_connection(row), replaced


def change_connection(
    connection: StoreConnection, account: str, has_base58_keys: bool | None, implicit_pickup: ImplicitPickup | None
) -> list[str]:
    """Returns the mediator's key of the connection, if there is one."""
    rows = connection.execute(_CHANGE, (has_base58_keys, implicit_pickup, account))
    return [own_key for (own_key,) in rows.fetchall()]


def find_connection(connection: StoreConnection, own_key: str) -> V1Connection | None:
    row = connection.execute(_SELECT_BY_KEY, (own_key,)).fetchone()
    return None if row is None else _parse_connection(row)


def get_connection(connection: StoreConnection, account: str) -> V1Connection | None:
    row = connection.execute(_SELECT_BY_ACCOUNT, (account,)).fetchone()
    return None if row is None else _parse_connection(row)


def remove_connection(connection: StoreConnection, account: str) -> list[str]:
    """Returns the mediator's key of the connection, if there was one."""
    rows = connection.execute("DELETE FROM v1_connection WHERE account = ? RETURNING own_key", (account,))
    return [own_key for (own_key,) in rows.fetchall()]


def expire_connections(connection: StoreConnection, rows: int, created_before: float, limit: int) -> list[str]:
    """
    The mediator's keys of the connections that were removed.

    :param rows: number that is removed at most.
    """
    expired = connection.execute(_DELETE_PENDING, (created_before, max(min(rows, limit), 0)))
    return [own_key for (own_key,) in expired.fetchall()]


def count_connections(connection: StoreConnection) -> tuple[int, int]:
    counts = dict(connection.execute(_SELECT_COUNTS).fetchall())
    pending = counts["pending_v1_connections"]
    return counts["v1_connections"] - pending, pending


def scan_connections(connection: StoreConnection, after: str, limit: int) -> Sequence[V1Connection]:
    rows = connection.execute(_SELECT_NEXT, (after, max(limit, 0)))
    return [_parse_connection(row) for row in rows]


def _parse_connection(row: Sequence[Any]) -> V1Connection:
    """:param row: of _COLUMNS."""
    values = dict(zip(_FIELDS, row, strict=True))
    values["routing_keys"] = tuple(json.loads(values["routing_keys"]))
    values["has_base58_keys"] = bool(values["has_base58_keys"])
    return V1Connection(**values)


def _measure_connection(connection: V1Connection) -> int:
    """Characters of a cached connection."""
    texts = connection.account, connection.request_id, connection.endpoint or "", *connection.routing_keys
    return sum(map(len, texts))


@implementer(IV1ConnectionStore)
class SQLiteV1ConnectionStore:
    """
    Connections of DIDComm v1.

    :param cache_seconds: for which one that was found by its key is cached.
    """

    def __init__(self, executor: SQLExecutor, clock: IReactorTime, cache_seconds: float) -> None:
        self._executor = executor
        self._clock = clock
        self._expiry_size = SliceSize(*EXPIRY_SLICE_ROWS)
        self._found: OwnerCache[V1Connection] = OwnerCache(
            now=clock.seconds, lifetime=cache_seconds, length=_measure_connection
        )

    get_connection = sql_method("read", "get_v1_connection", get_connection)
    count_connections = sql_method("read", "count_v1_connections", count_connections)
    scan_connections = sql_method("read_in_background", "scan_v1_connections", scan_connections)

    def find_connection(self, own_key: str) -> Deferred[V1Connection | None]:
        return read_cached(self._executor, "find_v1_connection", find_connection, self._found, own_key)

    def put_connection(self, connection: V1Connection, *, max_pending: int) -> Deferred[V1Connection]:
        return Deferred.fromCoroutine(self._put_connection(connection, max_pending))

    async def _put_connection(self, connection: V1Connection, max_pending: int) -> V1Connection:
        arguments = self._clock.seconds(), connection, max_pending
        keys = [connection.own_key]
        try:
            stored, replaced = await self._executor.write("put_v1_connection", put_connection, *arguments)
            keys += replaced
        finally:
            self._found.forget(keys)
        return cast(V1Connection, stored)

    def change_connection(
        self, account: str, *, has_base58_keys: bool | None = None, implicit_pickup: ImplicitPickup | None = None
    ) -> Deferred[bool]:
        arguments = account, has_base58_keys, implicit_pickup
        changed = self._executor.write("change_v1_connection", change_connection, *arguments)
        return changed.addCallback(self._forget).addCallback(bool)

    def remove_connection(self, account: str) -> Deferred[bool]:
        removed = self._executor.write("remove_v1_connection", remove_connection, account)
        return removed.addCallback(self._forget).addCallback(bool)

    def expire_connections(self, created_before: float, limit: int) -> Deferred[int]:
        """One slice, which may remove fewer than the limit although there are more."""
        arguments = created_before, limit
        work = expire_connections
        expired = self._executor.write_slice("expire_v1_connections", self._expiry_size, work, *arguments)
        return expired.addCallback(self._forget).addCallback(len)

    def _forget(self, own_keys: list[str]) -> list[str]:
        self._found.forget(own_keys)
        return own_keys

    def forget_all(self) -> None:
        """Forget what is cached, because accounts may have been removed."""
        self._found.clear()
