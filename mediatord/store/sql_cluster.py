"""Nodes, presence and turns in SQL; each function runs inside a transaction of the caller."""

from __future__ import annotations

from collections.abc import Sequence
from sqlite3 import Connection

from mediatord.interfaces import ClusterRefused, ClusterSecretDiffers, Node, NodeNameTaken, Presence
from mediatord.store.sql_rows import change_in, gather_in, insert_rows

# In the place of a node's number with a message that was delivered by no node.
NO_NODE = 1

_NODE = "SELECT name, boot, address, seal FROM node"
_UNTIL = "SELECT until FROM node WHERE boot = ?"
_JOIN = """
    INSERT INTO node (name, boot, address, seal, until) VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (boot) DO UPDATE SET
        name = excluded.name, address = excluded.address, seal = excluded.seal, until = excluded.until
"""
_HOLD = """
    INSERT INTO turn (name, boot, until) VALUES (?, ?, ?)
    ON CONFLICT DO UPDATE SET boot = excluded.boot, until = excluded.until
    WHERE turn.boot = excluded.boot OR turn.until <= ?
"""


def join(connection: Connection, node: Node, until: float, now: float) -> ClusterRefused | None:
    """Why it is not live now, if it is not."""
    others = [other for other in nodes(connection, now) if other.boot != node.boot]
    if any(other.seal != node.seal for other in others):
        return ClusterSecretDiffers()
    for other in others:
        if other.name == node.name:
            return NodeNameTaken(other, *connection.execute(_UNTIL, (other.boot,)).fetchone())
    connection.execute(_JOIN, (node.name, node.boot, node.address, node.seal, until))
    return None


def renew(connection: Connection, boot: str, until: float, now: float) -> bool:
    renewed = connection.execute("UPDATE node SET until = ? WHERE boot = ? AND until > ?", (until, boot, now))
    return renewed.rowcount > 0


def drop(connection: Connection, boot: str, until: float) -> int:
    """
    How many messages that it had delivered are pending again.

    :param until: what is done has its lease over by then.
    """
    lease = connection.execute(_UNTIL, (boot,)).fetchone()
    if lease is not None and lease[0] > until:
        return 0
    connection.execute("DELETE FROM turn WHERE boot = ?", (boot,))
    rows = connection.execute("DELETE FROM node WHERE boot = ? RETURNING id", (boot,)).fetchall()
    connection.executemany("DELETE FROM presence WHERE node_id = ?", rows)
    released = "UPDATE message SET delivered = 0 WHERE delivered > 0 AND delivered = ?"
    return sum([connection.execute(released, row).rowcount for row in rows])


def release_lost(connection: Connection, now: float) -> None:
    """What was delivered by nodes that are not live is pending again."""
    connection.execute(
        """
        UPDATE message SET delivered = 0
        WHERE delivered > 0 AND delivered NOT IN (SELECT id FROM node WHERE until > ?)
        """,
        (now,),
    )


def nodes(connection: Connection, now: float) -> list[Node]:
    return [Node(*row) for row in connection.execute(f"{_NODE} WHERE until > ? ORDER BY name", (now,))]


def lapsed(connection: Connection, now: float) -> list[str]:
    return [boot for (boot,) in connection.execute("SELECT boot FROM node WHERE until <= ? ORDER BY boot", (now,))]


def enter_node(connection: Connection, boot: str) -> int:
    """The number of a node, which it has from now on if it had none."""
    known = _number(connection, boot)
    if known is not None:
        return known
    number = connection.execute("INSERT INTO node (boot) VALUES (?)", (boot,)).lastrowid
    assert number is not None
    return number


def announce(connection: Connection, boot: str, dids: Sequence[str]) -> None:
    if dids:
        number = enter_node(connection, boot)
        insert_rows(connection, "INSERT OR IGNORE INTO presence (did, node_id)", [(did, number) for did in dids])


def withdraw(connection: Connection, boot: str, dids: Sequence[str]) -> None:
    number = _number(connection, boot)
    if number is not None:
        change_in(connection, "DELETE FROM presence WHERE node_id = ? AND did IN ({})", dids, number)


def whereabouts(connection: Connection, dids: Sequence[str], now: float) -> list[Presence]:
    source = "FROM presence p CROSS JOIN node n ON n.id = p.node_id WHERE p.did IN ({})"
    found = gather_in(connection, "p.did, n.boot", source, list(dict.fromkeys(dids)))
    if not found:
        return []
    live = {node.boot: node for node in nodes(connection, now)}
    return [Presence(did, boot, live.get(boot)) for did, boot in found]


def hold(connection: Connection, turn: str, boot: str, until: float, now: float) -> bool:
    return connection.execute(_HOLD, (turn, boot, until, now)).rowcount > 0


def record_pickups(connection: Connection, ids: Sequence[str], until: float, now: float) -> None:
    connection.execute("DELETE FROM pickup WHERE until <= ?", (now,))
    insert_rows(
        connection,
        "INSERT INTO pickup (id, until)",
        [(id_, until) for id_ in dict.fromkeys(ids)],
        " ON CONFLICT DO UPDATE SET until = excluded.until",
    )


def picked_up(connection: Connection, ids: Sequence[str], now: float) -> frozenset[str]:
    rows = gather_in(connection, "id", "FROM pickup WHERE +until > ? AND id IN ({})", list(dict.fromkeys(ids)), now)
    return frozenset(id_ for (id_,) in rows)


def _number(connection: Connection, boot: str) -> int | None:
    row = connection.execute("SELECT id FROM node WHERE boot = ?", (boot,)).fetchone()
    return None if row is None else row[0]
