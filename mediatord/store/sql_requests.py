"""Contract requests in SQL; each function runs inside a transaction of the caller."""

from __future__ import annotations

from collections.abc import Sequence
from sqlite3 import Connection

from mediatord.errors import OverQuota
from mediatord.interfaces.decentrl import Caps, ContractRequest, Found, Slice
from mediatord.store.sql_parties import change_holding, enter_party, find_party
from mediatord.store.sql_rows import change_in, gather_in, key_of, limits, nothing

_OF_ONE = "SELECT count(*) FROM contract_request WHERE recipient_id = ? AND sender_key = ?"


def request(connection: Connection, wanted: ContractRequest, caps: Caps) -> None:
    """:raise OverQuota: too many wait already."""
    party, sender_key = find_party(connection, wanted.recipient_did), key_of(wanted.sender_did)
    if party is not None:
        ((of_one,),) = connection.execute(_OF_ONE, (party.id, sender_key)).fetchall()
        if party.requests >= caps.requests or of_one >= caps.requests_of_one:
            raise OverQuota()
    recipient_id = (party or enter_party(connection, wanted.recipient_did)).id
    connection.execute(
        """
        INSERT OR ROLLBACK INTO contract_request (id, recipient_id, sender_key, sender_did, public_key, request)
        VALUES (?, ?, ?, ?, ?, ?)
        """,
        (
            wanted.id,
            recipient_id,
            sender_key,
            wanted.sender_did,
            wanted.requestor_ephemeral_public_key,
            wanted.encrypted_contract_request,
        ),
    )
    change_holding(connection, recipient_id, requests=1)


def requests(connection: Connection, recipient: str, part: Slice) -> Found[ContractRequest]:
    party = find_party(connection, recipient)
    if party is None or not party.requests:
        return nothing()
    rows = connection.execute(
        """
        SELECT id, sender_did, request, public_key FROM contract_request
        WHERE recipient_id = ? ORDER BY seq LIMIT ? OFFSET ?
        """,
        (party.id, *limits(part)),
    )
    found = [ContractRequest(id, sender, recipient, text, key) for id, sender, text, key in rows]
    return Found(tuple(found), party.requests)


def acknowledge(connection: Connection, recipient: str, ids: Sequence[str]) -> None:
    party = find_party(connection, recipient)
    if party is None or not party.requests:
        return
    mine = "FROM contract_request WHERE +recipient_id = ? AND id IN ({})"
    seqs = [seq for (seq,) in gather_in(connection, "seq", mine, list(dict.fromkeys(ids)), party.id)]
    if seqs:
        change_in(connection, "DELETE FROM contract_request WHERE seq IN ({})", seqs)
        change_holding(connection, party.id, requests=-len(seqs))
