"""
The DIDs of the Decentrl half and how much is kept for them, in SQL; each function runs inside a transaction of the
caller.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from sqlite3 import Connection
from typing import NamedTuple

from mediatord.store.sql_rows import ROWS_AT_A_TIME, change_in, gather, gather_in, numbered_values, pieces

# Number of the owner of registrations.
MEDIATOR = 0

_COLUMNS = """
    p.id, coalesce(h.contracts, 0), coalesce(h.requests, 0), coalesce(h.pending, 0), coalesce(h.pending_bytes, 0),
    coalesce(h.stored, 0), coalesce(h.stored_bytes, 0), coalesce(h.edition, 0)
"""
_PARTY = f"SELECT {_COLUMNS} FROM party p LEFT JOIN holding h ON h.party_id = p.id WHERE p.did = ?"
# CROSS JOIN, because the order of the tables is never to be chosen otherwise.
_PARTIES = """
    FROM (SELECT column1 AS number, column2 AS did FROM (VALUES {})) w
    CROSS JOIN party p ON p.did = w.did LEFT JOIN holding h ON h.party_id = p.id
"""
# Nothing is owned, waited for or kept by it, and no contract is with it.
_UNUSED = """
    FROM party p LEFT JOIN holding h ON h.party_id = p.id
    WHERE p.id IN ({}) AND coalesce(h.contracts + h.requests + h.pending + h.stored, 0) = 0
    AND NOT EXISTS (SELECT 1 FROM contract WHERE peer_id = p.id)
"""


class Party(NamedTuple):
    """A DID by its number, and how much is kept for it."""

    id: int
    contracts: int
    requests: int
    pending: int
    pending_bytes: int
    stored: int
    stored_bytes: int
    edition: int


# Who has no number yet, for whom nothing is kept.
NOBODY = Party(-1, 0, 0, 0, 0, 0, 0, 0)


def find_party(connection: Connection, did: str) -> Party | None:
    row = connection.execute(_PARTY, (did,)).fetchone()
    return None if row is None else Party(*row)


def enter_party(connection: Connection, did: str) -> Party:
    """The one with this DID, from now on if it was not there."""
    party = find_party(connection, did)
    if party is None:
        number = connection.execute("INSERT INTO party (did) VALUES (?)", (did,)).lastrowid
        assert number is not None
        party = NOBODY._replace(id=number)
    return party


def find_parties(connection: Connection, dids: Sequence[str]) -> dict[str, Party]:
    """Those of these DIDs that are known."""
    found: dict[str, Party] = {}
    for some in pieces(dids, ROWS_AT_A_TIME):
        rows = gather(connection, f"w.number, {_COLUMNS}", _PARTIES.format(numbered_values(len(some), 1)), some)
        found |= {some[number]: Party(*party) for number, *party in rows}
    return found


def change_holding(connection: Connection, party_id: int, **differences: int) -> None:
    """
    Count more, or less, for a party.

    :param differences: by column.
    """
    columns = ", ".join(differences)
    sums = ", ".join(f"{column} = {column} + excluded.{column}" for column in differences)
    connection.execute(
        f"""
        INSERT INTO holding (party_id, {columns}) VALUES (?{", ?" * len(differences)})
        ON CONFLICT DO UPDATE SET {sums}
        """,
        (party_id, *differences.values()),
    )


def drop_unused(connection: Connection, party_ids: Collection[int]) -> None:
    """Forget those of these parties for whom nothing is kept, and with whom nobody has a contract."""
    unused = [id for (id,) in gather_in(connection, "p.id", _UNUSED, list(party_ids))]
    change_in(connection, "DELETE FROM holding WHERE party_id IN ({})", unused)
    change_in(connection, "DELETE FROM party WHERE id IN ({})", unused)
