"""Contracts and registrations in SQL; each function runs inside a transaction of the caller."""

from __future__ import annotations

from collections.abc import Sequence
from sqlite3 import Connection
from typing import Any

from mediatord.errors import OverQuota
from mediatord.interfaces.decentrl import Caps, Contract, ContractFilter, Found, Slice
from mediatord.store.sql_parties import MEDIATOR, change_holding, drop_unused, enter_party, find_party
from mediatord.store.sql_rows import ROWS_AT_A_TIME, change_in, gather, limits, nothing, numbered_values, pieces

EXPIRED_AT_A_TIME = 1_000

# CROSS JOIN, because the order of the tables is never to be chosen otherwise.
_REGISTERED = """
    FROM (SELECT column1 AS number, column2 AS did FROM (VALUES {})) w CROSS JOIN party p ON p.did = w.did
    WHERE (SELECT max(expires_at) FROM contract WHERE peer_id = p.id AND owner_id = 0) > ?
"""
# By name, because the index of a single owner would be preferred, and all registrations are of that one.
_EXPIRED = """
    FROM (
        SELECT seq, peer_id FROM contract INDEXED BY registration_expiry
        WHERE owner_id = 0 AND expires_at <= ? ORDER BY expires_at LIMIT ?
    )
"""


def registered(connection: Connection, dids: Sequence[str], now: float) -> set[str]:
    """Those of these DIDs that are registered at a time."""
    found: set[str] = set()
    for some in pieces(dids, ROWS_AT_A_TIME):
        rows = gather(connection, "w.number", _REGISTERED.format(numbered_values(len(some), 1)), (*some, now))
        found |= {some[number] for (number,) in rows}
    return found


def registered_until(connection: Connection, did: str) -> float | None:
    """When the last registration of a DID expires, or has expired."""
    latest = "SELECT max(expires_at) FROM contract WHERE peer_id = ? AND owner_id = 0"
    party = find_party(connection, did)
    return None if party is None else connection.execute(latest, (party.id,)).fetchone()[0]


def save(connection: Connection, contract: Contract, caps: Caps, now: float) -> None:
    """:raise OverQuota: it would be one too many, and none has expired that could make room."""
    if contract.owner_did is None:
        _register(connection, contract, caps, now)
    else:
        _keep(connection, contract, contract.owner_did, caps, now)


def contracts(connection: Connection, owner: str, wanted: ContractFilter, part: Slice) -> Found[Contract]:
    party = find_party(connection, owner)
    if party is None or not party.contracts:
        return nothing()
    where, parameters = ["c.owner_id > 0 AND c.owner_id = ?"], [float(party.id)]  # the first for the partial index
    if wanted.did is not None and wanted.did != owner:
        peer = find_party(connection, wanted.did)
        if peer is None:
            return nothing()
        where, parameters = ["c.owner_id = ? AND c.peer_id = ?"], [party.id, peer.id]
    for condition, time in (
        ("c.expires_at <= ?", wanted.expires_before),
        ("c.expires_at >= ?", wanted.expires_after),
    ):
        if time is not None:
            where.append(condition)
            parameters.append(time)
    return _found(connection, owner, " AND ".join(where), parameters, part)


def drop_expired_registrations(connection: Connection, now: float) -> int:
    """Forget registrations that nobody can ask for any more, at most a thousand; fires with how many those were."""
    expired = gather(
        connection,
        "seq, peer_id",
        _EXPIRED,
        (now, EXPIRED_AT_A_TIME),
    )
    change_in(connection, "DELETE FROM contract WHERE seq IN ({})", [seq for seq, _ in expired])
    drop_unused(connection, {peer_id for _, peer_id in expired})
    return len(expired)


def _register(connection: Connection, registration: Contract, caps: Caps, now: float) -> None:
    party = find_party(connection, registration.peer_did)
    if party is not None:
        kept = connection.execute(
            "SELECT digest, expires_at FROM contract WHERE peer_id = ? AND owner_id = 0", (party.id,)
        ).fetchall()
        live = [digest for digest, expires_at in kept if expires_at > now]
        if registration.digest in live:
            return
        if len(live) < len(kept):
            connection.execute(
                "DELETE FROM contract WHERE peer_id = ? AND owner_id = 0 AND expires_at <= ?", (party.id, now)
            )
        if len(live) >= caps.contracts_with_one:
            _replace_earliest(connection, registration, party.id)
            return
    _insert(connection, registration, MEDIATOR, enter_party(connection, registration.peer_did).id)


def _replace_earliest(connection: Connection, registration: Contract, peer_id: int) -> None:
    """Of more than enough registrations the one that expires first goes, be it the new one."""
    seq, expires_at = connection.execute(
        "SELECT seq, expires_at FROM contract WHERE peer_id = ? AND owner_id = 0 ORDER BY expires_at, seq LIMIT 1",
        (peer_id,),
    ).fetchone()
    if expires_at <= registration.expires_at:
        connection.execute("DELETE FROM contract WHERE seq = ?", (seq,))
        _insert(connection, registration, MEDIATOR, peer_id)


def _keep(connection: Connection, contract: Contract, owner: str, caps: Caps, now: float) -> None:
    party, peer = find_party(connection, owner), find_party(connection, contract.peer_did)
    gone: list[int] = []
    if party is not None:
        same = "SELECT 1 FROM contract WHERE owner_id = ? AND digest = ?"
        if connection.execute(same, (party.id, contract.digest)).fetchone() is not None:
            return
        with_one = 0
        if peer is not None:
            ((with_one,),) = connection.execute(
                "SELECT count(*) FROM contract WHERE peer_id = ? AND owner_id = ?", (peer.id, party.id)
            ).fetchall()
        if peer is not None and with_one >= caps.contracts_with_one:
            gone = _make_room(connection, "peer_id = ? AND owner_id = ?", (peer.id, party.id), now)
        elif party.contracts >= caps.contracts:
            gone = _make_room(connection, "owner_id > 0 AND owner_id = ?", (party.id,), now)
    owner_id = (party or enter_party(connection, owner)).id
    _insert(connection, contract, owner_id, enter_party(connection, contract.peer_did).id)
    change_holding(connection, owner_id, contracts=1 - len(gone))
    drop_unused(connection, gone)


def _make_room(connection: Connection, where: str, parameters: tuple[int, ...], now: float) -> list[int]:
    """
    The oldest of these that has expired goes; its peer.

    :raise OverQuota: none has.
    """
    row = connection.execute(
        f"SELECT seq, peer_id FROM contract WHERE {where} AND expires_at <= ? ORDER BY seq LIMIT 1",
        (*parameters, now),
    ).fetchone()
    if row is None:
        raise OverQuota()
    connection.execute("DELETE FROM contract WHERE seq = ?", row[:1])
    return [row[1]]


def _insert(connection: Connection, contract: Contract, owner_id: int, peer_id: int) -> None:
    connection.execute(
        """
        INSERT OR ROLLBACK INTO contract (id, owner_id, peer_id, expires_at, digest, text)
        VALUES (?, ?, ?, ?, ?, ?)
        """,
        (contract.id, owner_id, peer_id, contract.expires_at, contract.digest, contract.text),
    )


def _found(connection: Connection, owner: str, where: str, parameters: list[Any], part: Slice) -> Found[Contract]:
    ((total,),) = connection.execute(f"SELECT count(*) FROM contract c WHERE {where}", parameters).fetchall()
    rows = connection.execute(
        f"""
        SELECT c.id, (SELECT did FROM party WHERE id = c.peer_id), c.expires_at, c.digest, c.text
        FROM contract c WHERE {where} ORDER BY c.seq LIMIT ? OFFSET ?
        """,
        (*parameters, *limits(part)),
    )
    return Found(tuple([Contract(row[0], owner, *row[1:]) for row in rows]), total)
