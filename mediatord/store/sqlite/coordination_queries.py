"""
State that processes share, in SQL: nodes, presence, leader leases, pickups, quotas and nonces. Each function runs
inside a transaction of the caller.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from mediatord.errors import ReplayCacheFull
from mediatord.store.interfaces.cluster_and_quotas import (
    QUOTA_WINDOW_SLOTS,
    ClusterNode,
    ClusterSecretMismatch,
    NodeNameTaken,
    PresenceRecord,
    QuotaUse,
    get_quota_wait,
)
from mediatord.store.interfaces.messages import filter_valid_ids
from mediatord.store.interfaces.store import NONCE_GRACE_SECONDS
from mediatord.store.sqlite.connection import BatchOperation, StoreConnection

# Stands for a node in a message that was delivered by no node.
NO_NODE_ID = 1

_SELECT_NODES = "SELECT name, boot, address, seal FROM node"
_SELECT_NODE_ID = "SELECT id FROM node WHERE boot = ?"
_SELECT_LEASE_END = "SELECT until FROM node WHERE boot = ?"
_UPSERT_NODE = """
    INSERT INTO node (name, boot, address, seal, until) VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (boot) DO UPDATE SET
        name = excluded.name, address = excluded.address, seal = excluded.seal, until = excluded.until
"""
_ACQUIRE_LEASE = """
    INSERT INTO lease (name, boot, until) VALUES (?, ?, ?)
    ON CONFLICT DO UPDATE SET boot = excluded.boot, until = excluded.until
    WHERE lease.boot = excluded.boot OR lease.until <= ?
"""


def join_node(connection: StoreConnection, now: float, node: ClusterNode, lease: float) -> Any:
    """Add a live node, or renew it; returns the :class:`ClusterJoinError` if it is refused."""
    others = [other for other in list_nodes(connection, now) if other.boot != node.boot]
    if any(other.seal != node.seal for other in others):
        return ClusterSecretMismatch()
    for other in others:
        if other.name == node.name:
            return NodeNameTaken(other, connection.select_value(_SELECT_LEASE_END, (other.boot,)))
    connection.execute(_UPSERT_NODE, (node.name, node.boot, node.address, node.seal, now + lease))
    return None


def renew_node(connection: StoreConnection, now: float, boot: str, lease: float) -> bool:
    renewed = connection.execute("UPDATE node SET until = ? WHERE boot = ? AND until > ?", (now + lease, boot, now))
    return renewed.rowcount > 0


def drop_node(connection: StoreConnection, now: float, boot: str, *, until: float = 0.0) -> int:
    """
    Remove a node; returns the number of its deliveries that are pending again.

    :param until: nothing is done for a node whose lease ends later, and after now.
    """
    lease_end = connection.select_value(_SELECT_LEASE_END, (boot,))
    if lease_end is not None and lease_end > max(until, now):
        return 0
    connection.execute("DELETE FROM lease WHERE boot = ?", (boot,))
    rows = connection.execute("DELETE FROM node WHERE boot = ? RETURNING id", (boot,)).fetchall()
    connection.executemany("DELETE FROM presence WHERE node_id = ?", rows)
    released = "UPDATE message SET delivered = 0 WHERE delivered > 0 AND delivered = ?"
    return sum([connection.execute(released, row).rowcount for row in rows])


def release_lost_deliveries(connection: StoreConnection, now: float) -> None:
    """Make deliveries of nodes that are not live pending again."""
    connection.execute(
        """
        UPDATE message SET delivered = 0
        WHERE delivered > 0 AND delivered NOT IN (SELECT id FROM node WHERE until > ?)
        """,
        (now,),
    )


def list_nodes(connection: StoreConnection, now: float) -> list[ClusterNode]:
    return [ClusterNode(*row) for row in connection.execute(f"{_SELECT_NODES} WHERE until > ? ORDER BY name", (now,))]


def list_lapsed_nodes(connection: StoreConnection, now: float) -> list[str]:
    return [boot for (boot,) in connection.execute("SELECT boot FROM node WHERE until <= ? ORDER BY boot", (now,))]


def get_or_create_node(connection: StoreConnection, boot: str) -> int:
    """The number of a node, assigned if it has none."""
    number = connection.select_value(_SELECT_NODE_ID, (boot,))
    return int(number or connection.insert_numbered_rows("INSERT INTO node (boot)", [(boot,)])[0])


def add_presence(connection: StoreConnection, boot: str, dids: Sequence[str]) -> None:
    if dids:
        number = get_or_create_node(connection, boot)
        connection.insert_rows("INSERT OR IGNORE INTO presence (did, node_id)", [(did, number) for did in dids])


def remove_presence(connection: StoreConnection, boot: str, dids: Sequence[str]) -> None:
    number = connection.select_value(_SELECT_NODE_ID, (boot,))
    connection.execute_in("DELETE FROM presence WHERE node_id = ? AND did IN ({})", dids, number)


def find_presence(connection: StoreConnection, now: float, dids: Sequence[str]) -> list[PresenceRecord]:
    source = "FROM presence p CROSS JOIN node n ON n.id = p.node_id WHERE p.did IN ({})"
    found = connection.select_rows_in("p.did, n.boot", source, list(dict.fromkeys(dids)))
    live = {node.boot: node for node in list_nodes(connection, now)} if found else {}
    return [PresenceRecord(did, boot, live.get(boot)) for did, boot in found]


def acquire_lease(connection: StoreConnection, now: float, lease_name: str, boot: str, lease: float) -> bool:
    return connection.execute(_ACQUIRE_LEASE, (lease_name, boot, now + lease, now)).rowcount > 0


def record_pickups(connection: StoreConnection, now: float, ids: Sequence[str], period: float) -> None:
    connection.execute("DELETE FROM pickup WHERE until <= ?", (now,))
    rows = [(id_, now + period) for id_ in filter_valid_ids(ids)]
    connection.insert_rows("INSERT INTO pickup (id, until)", rows, "ON CONFLICT DO UPDATE SET until = excluded.until")


def find_picked_up(connection: StoreConnection, now: float, ids: Sequence[str]) -> frozenset[str]:
    source = "FROM pickup WHERE +until > ? AND id IN ({})"
    return frozenset([id_ for (id_,) in connection.select_rows_in("id", source, filter_valid_ids(ids), now)])


_UPSERT_QUOTA = """
    INSERT INTO quota (key, until, lots) VALUES (?, ?, ?)
    ON CONFLICT DO UPDATE SET until = excluded.until, lots = excluded.lots
"""


def drop_expired_uses(lots: Sequence[QuotaUse], period: float, now: float) -> list[QuotaUse]:
    """Uses within the last period."""
    return [lot for lot in lots if lot[0] > now - period]


def add_quota_use(lots: Sequence[QuotaUse], amount: int, *, period: float, now: float) -> list[QuotaUse]:
    """Uses with one more."""
    slot = period / QUOTA_WINDOW_SLOTS
    at = ceil(now / slot) * slot
    if lots and lots[-1][0] >= at:
        return [*lots[:-1], (lots[-1][0], lots[-1][1] + amount)]
    return [*lots, (at, amount)]


def remove_latest_use(lots: Sequence[QuotaUse], amount: int) -> list[QuotaUse]:
    """Uses without the latest ones, of this amount in total."""
    left = list(lots)
    while left and amount > 0:
        at, taken = left.pop()
        if taken > amount:
            left.append((at, taken - amount))
        amount -= taken
    return left


def take_quota(
    connection: StoreConnection, now: float, key: bytes, amount: int, *, limit: int, period: float
) -> float:
    """Take from a quota; returns the seconds to wait for it, 0.0 when it was taken."""
    lots = drop_expired_uses(_load_uses(connection, key), period, now)
    wait = get_quota_wait(lots, amount, limit=limit, period=period, now=now)
    if not wait and amount:
        lots = add_quota_use(lots, amount, period=period, now=now)
        connection.execute(_UPSERT_QUOTA, (key, lots[-1][0] + period, json.dumps(lots)))
    return wait


def return_quota(connection: StoreConnection, key: bytes, amount: int) -> None:
    before = _load_uses(connection, key)
    lots = remove_latest_use(before, amount)
    if lots != before:
        connection.execute("UPDATE quota SET lots = ? WHERE key = ?", (json.dumps(lots), key))


def _load_uses(connection: StoreConnection, key: bytes) -> list[QuotaUse]:
    lots = connection.select_value("SELECT lots FROM quota WHERE key = ?", (key,))
    return [(at, taken) for at, taken in json.loads(lots or "[]")]


# Nonces that exist are skipped; the others get the last places.
_INSERT_NONCES = "INSERT OR IGNORE INTO nonce (key, until)"
_CHANGE_NONCE_COUNT = "UPDATE counter SET value = value + ? WHERE name = 'nonces'"


# Whether it was new, or the error if it is, but the cache is full.
ClaimOutcome = bool | ReplayCacheFull


@dataclass(frozen=True, slots=True)
class NonceClaim(BatchOperation):
    """
    A nonce to be claimed at `now` until a time, as an operation of a batch, which returns whether it was new.

    :param share: share of the capacity that may be in use already.
    :param capacity: number of nonces that are kept; the same for all claims.
    """

    key: bytes
    until: float
    now: float
    share: float = 1.0
    capacity: int = 1_000_000

    @staticmethod
    def run_batch(connection: StoreConnection, operations: Sequence[NonceClaim]) -> list[ClaimOutcome]:
        return claim_nonces(connection, operations)


def claim_nonces(connection: StoreConnection, claims: Sequence[NonceClaim]) -> list[ClaimOutcome]:
    """Outcome of each claim, as if they were made one after the other."""
    if not claims:
        return []
    capacity = claims[0].capacity
    rows: list[tuple[bytes, float]] = []
    room = capacity
    for claim in claims:
        rows.append((claim.key, claim.until))
        room = min(room, int(claim.share * capacity))
    inserted = connection.insert_rows(_INSERT_NONCES, rows)
    if inserted == len(claims):
        if _change_nonce_count(connection, inserted) <= room:
            return [True] * inserted
        _change_nonce_count(connection, -inserted)
    # Some exist, perhaps expired, or are too many: the inserted ones are deleted, and claimed one by one.
    newest = "SELECT place FROM nonce ORDER BY place DESC LIMIT ?"
    connection.execute(f"DELETE FROM nonce WHERE place IN ({newest})", (inserted,))
    return [_claim_nonce(connection, claim) for claim in claims]


def release_nonce(connection: StoreConnection, key: bytes) -> None:
    gone = connection.execute("DELETE FROM nonce WHERE key = ?", (key,)).rowcount
    connection.execute(_CHANGE_NONCE_COUNT, (-gone,))


# Reading a row costs a small part of deleting one.
_READ_PER_PRUNED = 8


def prune_quotas(connection: StoreConnection, rows: int, now: float, after: bytes) -> bytes | None:
    """
    Delete expired quotas among the next ones.

    :param rows: number that is deleted at most.
    :param after: key to begin behind.
    :return: the last key that was checked; None when it was the last of all.
    """
    last: bytes | None = _prune_rows(connection, rows, "quota", "key", after, now)[1]
    return last


def prune_nonces(connection: StoreConnection, rows: int, now: float, after: int) -> tuple[int, int | None]:
    """
    Delete nonces whose grace period is over among the next ones.

    :param rows: number that is deleted at most.
    :param after: place to begin behind.
    :return: their number, and the last place that was checked; None when it was the last of all.
    """
    gone, last = _prune_rows(connection, rows, "nonce", "place", after, now - NONCE_GRACE_SECONDS)
    if gone:  # a transaction without changes does not wait for the disk
        connection.execute(_CHANGE_NONCE_COUNT, (-gone,))
    return gone, last


def _prune_rows(
    connection: StoreConnection, rows: int, table: str, key: str, after: Any, until: float
) -> tuple[int, Any]:
    """Delete at most `rows` rows that have expired, among several times as many."""
    next_key = f"SELECT {key} FROM {table} WHERE {key} > ? {{}} ORDER BY {key} LIMIT 1 OFFSET ?"
    last = connection.select_value(next_key.format(""), (after, rows * _READ_PER_PRUNED - 1))
    within, keys = ("", [after]) if last is None else (f"AND {key} <= ?", [after, last])
    expired = f"{within} AND until <= ?"
    last_expired = connection.select_value(next_key.format(expired), (*keys, until, rows - 1))
    if last_expired is not None:
        expired, keys, last = f"AND {key} <= ? AND until <= ?", [after, last_expired], last_expired
    return connection.execute(f"DELETE FROM {table} WHERE {key} > ? {expired}", (*keys, until)).rowcount, last


def _claim_nonce(connection: StoreConnection, claim: NonceClaim) -> ClaimOutcome:
    held = connection.select_value("SELECT until FROM nonce WHERE key = ?", (claim.key,))
    if held is not None:
        if held > claim.now:
            return False
        release_nonce(connection, claim.key)
    elif _change_nonce_count(connection, 0) >= int(claim.share * claim.capacity):
        return ReplayCacheFull()
    _change_nonce_count(connection, connection.insert_rows(_INSERT_NONCES, [(claim.key, claim.until)]))
    return True


def _change_nonce_count(connection: StoreConnection, more: int) -> int:
    """Change the number of nonces; returns the new one."""
    ((number,),) = connection.execute(f"{_CHANGE_NONCE_COUNT} RETURNING value", (more,)).fetchall()
    return int(number)
