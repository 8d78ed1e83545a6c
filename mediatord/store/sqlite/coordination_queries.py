"""
State that processes share, in SQL: nodes, presence, leader leases, pickups, quotas and nonces. Each function runs
inside a transaction of the caller.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from sqlite3 import Connection

from mediatord.errors import ReplayCacheFull
from mediatord.store.interfaces.cluster import (
    ClusterJoinError,
    ClusterNode,
    ClusterSecretMismatch,
    NodeNameTaken,
    PresenceRecord,
)
from mediatord.store.interfaces.store import NONCE_GRACE_SECONDS
from mediatord.store.quotas import QuotaUse, add_quota_use, drop_expired_uses, get_quota_wait, remove_latest_use
from mediatord.store.sqlite.bulk_sql import execute_in, insert_rows, select_rows_in
from mediatord.store.sqlite.group_commit import OperationOutcome

# Stands for a node in a message that was delivered by no node.
NO_NODE_ID = 1

_SELECT_NODES = "SELECT name, boot, address, seal FROM node"
_SELECT_LEASE_END = "SELECT until FROM node WHERE boot = ?"
_UPSERT_NODE = """
    INSERT INTO node (name, boot, address, seal, until) VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (boot) DO UPDATE SET
        name = excluded.name, address = excluded.address, seal = excluded.seal, until = excluded.until
"""
_ACQUIRE_LEASE = """
    INSERT INTO turn (name, boot, until) VALUES (?, ?, ?)
    ON CONFLICT DO UPDATE SET boot = excluded.boot, until = excluded.until
    WHERE turn.boot = excluded.boot OR turn.until <= ?
"""


def join_node(connection: Connection, node: ClusterNode, until: float, now: float) -> ClusterJoinError | None:
    """Add a live node, or renew it; returns the reason if it was refused."""
    others = [other for other in list_nodes(connection, now) if other.boot != node.boot]
    if any(other.seal != node.seal for other in others):
        return ClusterSecretMismatch()
    for other in others:
        if other.name == node.name:
            return NodeNameTaken(other, *connection.execute(_SELECT_LEASE_END, (other.boot,)).fetchone())
    connection.execute(_UPSERT_NODE, (node.name, node.boot, node.address, node.seal, until))
    return None


def renew_node(connection: Connection, boot: str, until: float, now: float) -> bool:
    renewed = connection.execute("UPDATE node SET until = ? WHERE boot = ? AND until > ?", (until, boot, now))
    return renewed.rowcount > 0


def drop_node(connection: Connection, boot: str, until: float) -> int:
    """
    Remove a node; returns the number of its deliveries that are pending again.

    :param until: nothing is done for a node whose lease ends later.
    """
    lease = connection.execute(_SELECT_LEASE_END, (boot,)).fetchone()
    if lease is not None and lease[0] > until:
        return 0
    connection.execute("DELETE FROM turn WHERE boot = ?", (boot,))
    rows = connection.execute("DELETE FROM node WHERE boot = ? RETURNING id", (boot,)).fetchall()
    connection.executemany("DELETE FROM presence WHERE node_id = ?", rows)
    released = "UPDATE message SET delivered = 0 WHERE delivered > 0 AND delivered = ?"
    return sum([connection.execute(released, row).rowcount for row in rows])


def release_lost_deliveries(connection: Connection, now: float) -> None:
    """Make deliveries of nodes that are not live pending again."""
    connection.execute(
        """
        UPDATE message SET delivered = 0
        WHERE delivered > 0 AND delivered NOT IN (SELECT id FROM node WHERE until > ?)
        """,
        (now,),
    )


def list_nodes(connection: Connection, now: float) -> list[ClusterNode]:
    return [ClusterNode(*row) for row in connection.execute(f"{_SELECT_NODES} WHERE until > ? ORDER BY name", (now,))]


def list_lapsed_nodes(connection: Connection, now: float) -> list[str]:
    return [boot for (boot,) in connection.execute("SELECT boot FROM node WHERE until <= ? ORDER BY boot", (now,))]


def get_or_create_node(connection: Connection, boot: str) -> int:
    """The number of a node, assigned if it has none."""
    known = _get_node_id(connection, boot)
    if known is not None:
        return known
    number = connection.execute("INSERT INTO node (boot) VALUES (?)", (boot,)).lastrowid
    assert number is not None
    return number


def add_presence(connection: Connection, boot: str, dids: Sequence[str]) -> None:
    if dids:
        number = get_or_create_node(connection, boot)
        insert_rows(connection, "INSERT OR IGNORE INTO presence (did, node_id)", [(did, number) for did in dids])


def remove_presence(connection: Connection, boot: str, dids: Sequence[str]) -> None:
    number = _get_node_id(connection, boot)
    if number is not None:
        execute_in(connection, "DELETE FROM presence WHERE node_id = ? AND did IN ({})", dids, number)


def find_presence(connection: Connection, dids: Sequence[str], now: float) -> list[PresenceRecord]:
    source = "FROM presence p CROSS JOIN node n ON n.id = p.node_id WHERE p.did IN ({})"
    found = select_rows_in(connection, "p.did, n.boot", source, list(dict.fromkeys(dids)))
    if not found:
        return []
    live = {node.boot: node for node in list_nodes(connection, now)}
    return [PresenceRecord(did, boot, live.get(boot)) for did, boot in found]


def acquire_lease(connection: Connection, lease_name: str, boot: str, until: float, now: float) -> bool:
    return connection.execute(_ACQUIRE_LEASE, (lease_name, boot, until, now)).rowcount > 0


def record_pickups(connection: Connection, ids: Sequence[str], until: float, now: float) -> None:
    connection.execute("DELETE FROM pickup WHERE until <= ?", (now,))
    insert_rows(
        connection,
        "INSERT INTO pickup (id, until)",
        [(id_, until) for id_ in dict.fromkeys(ids)],
        " ON CONFLICT DO UPDATE SET until = excluded.until",
    )


def find_picked_up(connection: Connection, ids: Sequence[str], now: float) -> frozenset[str]:
    rows = select_rows_in(
        connection, "id", "FROM pickup WHERE +until > ? AND id IN ({})", list(dict.fromkeys(ids)), now
    )
    return frozenset(id_ for (id_,) in rows)


def _get_node_id(connection: Connection, boot: str) -> int | None:
    row = connection.execute("SELECT id FROM node WHERE boot = ?", (boot,)).fetchone()
    return None if row is None else row[0]


QUOTAS_PER_PRUNE = 5_000

_UPSERT_QUOTA = """
    INSERT INTO allowance (key, until, lots) VALUES (?, ?, ?)
    ON CONFLICT DO UPDATE SET until = excluded.until, lots = excluded.lots
"""


def take_quota(connection: Connection, key: bytes, amount: int, limit: int, period: float, now: float) -> float:
    """Take from a quota; returns the seconds to wait for it, 0.0 when it was taken."""
    lots = drop_expired_uses(_load_uses(connection, key), period, now)
    wait = get_quota_wait(lots, amount, limit=limit, period=period, now=now)
    if not wait and amount:
        lots = add_quota_use(lots, amount, period=period, now=now)
        connection.execute(_UPSERT_QUOTA, (key, lots[-1][0] + period, json.dumps(lots)))
    return wait


def return_quota(connection: Connection, key: bytes, amount: int) -> None:
    before = _load_uses(connection, key)
    lots = remove_latest_use(before, amount)
    if lots != before:
        connection.execute("UPDATE allowance SET lots = ? WHERE key = ?", (json.dumps(lots), key))


def prune_quotas(connection: Connection, now: float, after: bytes | None) -> bytes | None:
    """
    Delete expired quotas among the next few thousand.

    :param after: key to begin behind; None to begin with the first.
    :return: the last key that was checked; None when it was the last of all.
    """
    behind, start = ("key >= ?", b"") if after is None else ("key > ?", after)
    row = connection.execute(
        f"SELECT key FROM allowance WHERE {behind} ORDER BY key LIMIT 1 OFFSET ?", (start, QUOTAS_PER_PRUNE - 1)
    ).fetchone()
    last: bytes | None = None if row is None else row[0]
    within, keys = (behind, [start]) if last is None else (f"{behind} AND key <= ?", [start, last])
    connection.execute(f"DELETE FROM allowance WHERE {within} AND until <= ?", (*keys, now))
    return last


def _load_uses(connection: Connection, key: bytes) -> list[QuotaUse]:
    row = connection.execute("SELECT lots FROM allowance WHERE key = ?", (key,)).fetchone()
    return [] if row is None else [(at, taken) for at, taken in json.loads(row[0])]


NONCES_PER_PRUNE = 5_000

# Nonces that exist are skipped; the others get the last places.
_INSERT_NONCES = "INSERT OR IGNORE INTO nonce (key, until)"
_CHANGE_NONCE_COUNT = "UPDATE tally SET value = value + ? WHERE name = 'nonces'"


@dataclass(frozen=True, slots=True)
class NonceClaim:
    """
    A nonce to be claimed at `now` until a time.

    :param share: share of the capacity that may be in use already.
    """

    key: bytes
    until: float
    now: float
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class NonceClaimOperation:
    """A claim as an operation of a batch, which returns whether the nonce was new."""

    claim: NonceClaim
    capacity: int

    @staticmethod
    def run_batch(connection: Connection, operations: Sequence[NonceClaimOperation]) -> list[OperationOutcome]:
        """Perform neighbouring operations of a batch together."""
        claims = [operation.claim for operation in operations]
        return [
            OperationOutcome(error=claimed) if isinstance(claimed, ReplayCacheFull) else OperationOutcome(claimed)
            for claimed in claim_nonces(connection, claims, operations[0].capacity)
        ]


# Whether it was new, or the error if it is, but the cache is full.
ClaimOutcome = bool | ReplayCacheFull


def claim_nonces(connection: Connection, claims: Sequence[NonceClaim], capacity: int) -> list[ClaimOutcome]:
    """Outcome of each claim, as if they were made one after the other."""
    rows: list[tuple[bytes, float]] = []
    room = capacity
    for claim in claims:
        rows.append((claim.key, claim.until))
        room = min(room, int(claim.share * capacity))
    inserted = insert_rows(connection, _INSERT_NONCES, rows)
    if inserted == len(claims):
        if _change_nonce_count(connection, inserted) <= room:
            return [True] * inserted
        _change_nonce_count(connection, -inserted)
    # Some exist, perhaps expired, or are too many: the inserted ones are deleted, and claimed one by one.
    newest = "SELECT place FROM nonce ORDER BY place DESC LIMIT ?"
    connection.execute(f"DELETE FROM nonce WHERE place IN ({newest})", (inserted,))
    return [_claim_nonce(connection, claim, capacity) for claim in claims]


def release_nonce(connection: Connection, key: bytes) -> None:
    gone = connection.execute("DELETE FROM nonce WHERE key = ?", (key,)).rowcount
    connection.execute(_CHANGE_NONCE_COUNT, (-gone,))


def prune_nonces(connection: Connection, now: float, after: int) -> tuple[int, int | None]:
    """
    Delete nonces whose grace period is over among the next few thousand.

    :param after: place to begin behind.
    :return: their number, and the last place that was checked; None when it was the last of all.
    """
    row = connection.execute(
        "SELECT place FROM nonce WHERE place > ? ORDER BY place LIMIT 1 OFFSET ?", (after, NONCES_PER_PRUNE - 1)
    ).fetchone()
    last = None if row is None else row[0]
    within = "place > ?" if last is None else "place > ? AND place <= ?"
    over = now - NONCE_GRACE_SECONDS
    places = (after,) if last is None else (after, last)
    gone = connection.execute(f"DELETE FROM nonce WHERE {within} AND until <= ?", (*places, over)).rowcount
    connection.execute(_CHANGE_NONCE_COUNT, (-gone,))
    return gone, last


def _claim_nonce(connection: Connection, claim: NonceClaim, capacity: int) -> ClaimOutcome:
    held = connection.execute("SELECT until FROM nonce WHERE key = ?", (claim.key,)).fetchone()
    if held is not None:
        if held[0] > claim.now:
            return False
        release_nonce(connection, claim.key)
    elif _change_nonce_count(connection, 0) >= int(claim.share * capacity):
        return ReplayCacheFull()
    _change_nonce_count(connection, insert_rows(connection, _INSERT_NONCES, [(claim.key, claim.until)]))
    return True


def _change_nonce_count(connection: Connection, more: int) -> int:
    """Change the number of nonces; returns the new one."""
    ((number,),) = connection.execute(f"{_CHANGE_NONCE_COUNT} RETURNING value", (more,)).fetchall()
    return int(number)
