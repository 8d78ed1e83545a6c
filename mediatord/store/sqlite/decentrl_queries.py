"""
Identities, contracts, contract requests and pending events of the Decentrl half, in SQL. Each function runs inside a
transaction of the caller.

Pending events are the most frequent operation: neighbours in a batch share a statement that reads contracts and
counters, one that inserts the events and one that counts them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from sqlite3 import Connection
from typing import Any, NamedTuple

from mediatord.errors import ContractNotFound, QuotaExceeded
from mediatord.store.interfaces.decentrl import (
    Contract,
    ContractFilter,
    ContractRequest,
    DecentrlQuotas,
    PageRequest,
    PendingEvent,
    ResultPage,
)
from mediatord.store.interfaces.messages import RemovedMessage
from mediatord.store.message_operations import LedgerEntry
from mediatord.store.sqlite.bulk_sql import (
    ROWS_PER_STATEMENT,
    execute_in,
    format_numbered_values,
    get_limit_parameters,
    hash_did,
    insert_rows,
    make_empty_page,
    read_texts,
    select_rows,
    select_rows_in,
    split_chunks,
)
from mediatord.store.sqlite.group_commit import OperationOutcome
from mediatord.store.sqlite.queue_accounting import StoreConnection

# Owner number of registrations.
MEDIATOR_ID = 0

_PARTY_COLUMNS = """
    p.id, coalesce(h.contracts, 0), coalesce(h.requests, 0), coalesce(h.pending, 0), coalesce(h.pending_bytes, 0),
    coalesce(h.stored, 0), coalesce(h.stored_bytes, 0), coalesce(h.edition, 0)
"""
_SELECT_PARTY = f"SELECT {_PARTY_COLUMNS} FROM party p LEFT JOIN holding h ON h.party_id = p.id WHERE p.did = ?"
# CROSS JOIN, so that the query planner keeps the order of the tables.
_SELECT_PARTIES = """
    FROM (SELECT column1 AS number, column2 AS did FROM (VALUES {})) w
    CROSS JOIN party p ON p.did = w.did LEFT JOIN holding h ON h.party_id = p.id
"""
# Parties that own nothing, and with which there are no contracts.
_SELECT_UNUSED = """
    FROM party p LEFT JOIN holding h ON h.party_id = p.id
    WHERE p.id IN ({}) AND coalesce(h.contracts + h.requests + h.pending + h.stored, 0) = 0
    AND NOT EXISTS (SELECT 1 FROM contract WHERE peer_id = p.id)
"""


class PartyRow(NamedTuple):
    """A DID by its number, with the counters of its usage."""

    id: int
    contracts: int
    requests: int
    pending: int
    pending_bytes: int
    stored: int
    stored_bytes: int
    edition: int


# Stands for a DID without a party.
UNKNOWN_PARTY = PartyRow(-1, 0, 0, 0, 0, 0, 0, 0)


def find_party(connection: Connection, did: str) -> PartyRow | None:
    row = connection.execute(_SELECT_PARTY, (did,)).fetchone()
    return None if row is None else PartyRow(*row)


def get_or_create_party(connection: Connection, did: str) -> PartyRow:
    """The party of a DID, created if there is none."""
    party = find_party(connection, did)
    if party is None:
        number = connection.execute("INSERT INTO party (did) VALUES (?)", (did,)).lastrowid
        assert number is not None
        party = UNKNOWN_PARTY._replace(id=number)
    return party


def find_parties(connection: Connection, dids: Sequence[str]) -> dict[str, PartyRow]:
    """Parties of those of these DIDs that have one."""
    found: dict[str, PartyRow] = {}
    for some in split_chunks(dids, ROWS_PER_STATEMENT):
        rows = select_rows(
            connection,
            f"w.number, {_PARTY_COLUMNS}",
            _SELECT_PARTIES.format(format_numbered_values(len(some), 1)),
            some,
        )
        found |= {some[number]: PartyRow(*party) for number, *party in rows}
    return found


def change_party_usage(connection: Connection, party_id: int, **differences: int) -> None:
    """
    Change counters of a party.

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


def drop_unused_parties(connection: Connection, party_ids: Collection[int]) -> None:
    """Delete those of these parties that own nothing and have no contracts with others."""
    unused = [id for (id,) in select_rows_in(connection, "p.id", _SELECT_UNUSED, list(party_ids))]
    execute_in(connection, "DELETE FROM holding WHERE party_id IN ({})", unused)
    execute_in(connection, "DELETE FROM party WHERE id IN ({})", unused)


REGISTRATIONS_PER_PRUNE = 1_000

# CROSS JOIN, so that the query planner keeps the order of the tables.
_SELECT_REGISTERED = """
    FROM (SELECT column1 AS number, column2 AS did FROM (VALUES {})) w CROSS JOIN party p ON p.did = w.did
    WHERE (SELECT max(expires_at) FROM contract WHERE peer_id = p.id AND owner_id = 0) > ?
"""
# By name, because SQLite would prefer the index by owner, and all registrations have the same owner.
_SELECT_EXPIRED = """
    FROM (
        SELECT seq, peer_id FROM contract INDEXED BY registration_expiry
        WHERE owner_id = 0 AND expires_at <= ? ORDER BY expires_at LIMIT ?
    )
"""


def find_registered(connection: Connection, dids: Sequence[str], now: float) -> set[str]:
    """Those of these DIDs that are registered at a time."""
    found: set[str] = set()
    for some in split_chunks(dids, ROWS_PER_STATEMENT):
        rows = select_rows(
            connection, "w.number", _SELECT_REGISTERED.format(format_numbered_values(len(some), 1)), (*some, now)
        )
        found |= {some[number] for (number,) in rows}
    return found


def get_registration_expiry(connection: Connection, did: str) -> float | None:
    """When the last registration of a DID expires, or has expired."""
    latest = "SELECT max(expires_at) FROM contract WHERE peer_id = ? AND owner_id = 0"
    party = find_party(connection, did)
    return None if party is None else connection.execute(latest, (party.id,)).fetchone()[0]


def save_contract(connection: Connection, contract: Contract, caps: DecentrlQuotas, now: float) -> None:
    """
    Store a contract or registration.

    :raise QuotaExceeded: there are too many, and none has expired.
    """
    if contract.owner_did is None:
        _save_registration(connection, contract, caps, now)
    else:
        _save_owned_contract(connection, contract, contract.owner_did, caps, now)


def find_contracts(
    connection: Connection, owner: str, wanted: ContractFilter, part: PageRequest
) -> ResultPage[Contract]:
    party = find_party(connection, owner)
    if party is None or not party.contracts:
        return make_empty_page()
    where, parameters = ["c.owner_id > 0 AND c.owner_id = ?"], [float(party.id)]  # the first for the partial index
    if wanted.did is not None and wanted.did != owner:
        peer = find_party(connection, wanted.did)
        if peer is None:
            return make_empty_page()
        where, parameters = ["c.owner_id = ? AND c.peer_id = ?"], [party.id, peer.id]
    for condition, time in (
        ("c.expires_at <= ?", wanted.expires_before),
        ("c.expires_at >= ?", wanted.expires_after),
    ):
        if time is not None:
            where.append(condition)
            parameters.append(time)
    return _select_contract_page(connection, owner, " AND ".join(where), parameters, part)


def drop_expired_registrations(connection: Connection, now: float) -> int:
    """Delete expired registrations, up to a limit; returns their number."""
    expired = select_rows(
        connection,
        "seq, peer_id",
        _SELECT_EXPIRED,
        (now, REGISTRATIONS_PER_PRUNE),
    )
    execute_in(connection, "DELETE FROM contract WHERE seq IN ({})", [seq for seq, _ in expired])
    drop_unused_parties(connection, {peer_id for _, peer_id in expired})
    return len(expired)


def _save_registration(connection: Connection, registration: Contract, caps: DecentrlQuotas, now: float) -> None:
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
            _replace_earliest_registration(connection, registration, party.id)
            return
    _insert_contract(connection, registration, MEDIATOR_ID, get_or_create_party(connection, registration.peer_did).id)


def _replace_earliest_registration(connection: Connection, registration: Contract, peer_id: int) -> None:
    """If there are too many registrations, delete the one that expires first, which may be the new one."""
    seq, expires_at = connection.execute(
        "SELECT seq, expires_at FROM contract WHERE peer_id = ? AND owner_id = 0 ORDER BY expires_at, seq LIMIT 1",
        (peer_id,),
    ).fetchone()
    if expires_at <= registration.expires_at:
        connection.execute("DELETE FROM contract WHERE seq = ?", (seq,))
        _insert_contract(connection, registration, MEDIATOR_ID, peer_id)


def _save_owned_contract(
    connection: Connection, contract: Contract, owner: str, caps: DecentrlQuotas, now: float
) -> None:
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
            gone = _delete_expired_contract(connection, "peer_id = ? AND owner_id = ?", (peer.id, party.id), now)
        elif party.contracts >= caps.contracts:
            gone = _delete_expired_contract(connection, "owner_id > 0 AND owner_id = ?", (party.id,), now)
    owner_id = (party or get_or_create_party(connection, owner)).id
    _insert_contract(connection, contract, owner_id, get_or_create_party(connection, contract.peer_did).id)
    change_party_usage(connection, owner_id, contracts=1 - len(gone))
    drop_unused_parties(connection, gone)


def _delete_expired_contract(
    connection: Connection, where: str, parameters: tuple[int, ...], now: float
) -> list[int]:
    """
    Delete the oldest expired contract; returns its peer.

    :raise QuotaExceeded: none has expired.
    """
    row = connection.execute(
        f"SELECT seq, peer_id FROM contract WHERE {where} AND expires_at <= ? ORDER BY seq LIMIT 1",
        (*parameters, now),
    ).fetchone()
    if row is None:
        raise QuotaExceeded()
    connection.execute("DELETE FROM contract WHERE seq = ?", row[:1])
    return [row[1]]


def _insert_contract(connection: Connection, contract: Contract, owner_id: int, peer_id: int) -> None:
    connection.execute(
        """
        INSERT OR ROLLBACK INTO contract (id, owner_id, peer_id, expires_at, digest, text)
        VALUES (?, ?, ?, ?, ?, ?)
        """,
        (contract.id, owner_id, peer_id, contract.expires_at, contract.digest, contract.text),
    )


def _select_contract_page(
    connection: Connection, owner: str, where: str, parameters: list[Any], part: PageRequest
) -> ResultPage[Contract]:
    ((total,),) = connection.execute(f"SELECT count(*) FROM contract c WHERE {where}", parameters).fetchall()
    rows = connection.execute(
        f"""
        SELECT c.id, (SELECT did FROM party WHERE id = c.peer_id), c.expires_at, c.digest, c.text
        FROM contract c WHERE {where} ORDER BY c.seq LIMIT ? OFFSET ?
        """,
        (*parameters, *get_limit_parameters(part)),
    )
    return ResultPage(tuple([Contract(row[0], owner, *row[1:]) for row in rows]), total)


_COUNT_REQUESTS_OF_SENDER = "SELECT count(*) FROM contract_request WHERE recipient_id = ? AND sender_key = ?"


def add_contract_request(connection: Connection, wanted: ContractRequest, caps: DecentrlQuotas) -> None:
    """
    Queue a contract request.

    :raise QuotaExceeded: too many are queued.
    """
    party, sender_key = find_party(connection, wanted.recipient_did), hash_did(wanted.sender_did)
    if party is not None:
        ((of_one,),) = connection.execute(_COUNT_REQUESTS_OF_SENDER, (party.id, sender_key)).fetchall()
        if party.requests >= caps.requests or of_one >= caps.requests_of_one:
            raise QuotaExceeded()
    recipient_id = (party or get_or_create_party(connection, wanted.recipient_did)).id
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
    change_party_usage(connection, recipient_id, requests=1)


def find_contract_requests(connection: Connection, recipient: str, part: PageRequest) -> ResultPage[ContractRequest]:
    party = find_party(connection, recipient)
    if party is None or not party.requests:
        return make_empty_page()
    rows = connection.execute(
        """
        SELECT id, sender_did, request, public_key FROM contract_request
        WHERE recipient_id = ? ORDER BY seq LIMIT ? OFFSET ?
        """,
        (party.id, *get_limit_parameters(part)),
    )
    found = [ContractRequest(id, sender, recipient, text, key) for id, sender, text, key in rows]
    return ResultPage(tuple(found), party.requests)


def acknowledge_requests(connection: Connection, recipient: str, ids: Sequence[str]) -> None:
    party = find_party(connection, recipient)
    if party is None or not party.requests:
        return
    mine = "FROM contract_request WHERE +recipient_id = ? AND id IN ({})"
    seqs = [seq for (seq,) in select_rows_in(connection, "seq", mine, list(dict.fromkeys(ids)), party.id)]
    if seqs:
        execute_in(connection, "DELETE FROM contract_request WHERE seq IN ({})", seqs)
        change_party_usage(connection, party.id, requests=-len(seqs))


# CROSS JOIN, so that the query planner keeps the order of the tables.
_DELIVERABLE_SOURCE = """
    FROM (SELECT column1 AS number, column2 AS recipient, column3 AS sender FROM (VALUES {})) w
    CROSS JOIN party r ON r.did = w.recipient CROSS JOIN party s ON s.did = w.sender
    LEFT JOIN holding h ON h.party_id = r.id
    WHERE (SELECT max(expires_at) FROM contract WHERE peer_id = s.id AND owner_id = r.id) > ?
"""
_DELIVERABLE_COLUMNS = "w.number, r.id, coalesce(h.pending, 0), coalesce(h.pending_bytes, 0)"
_INSERT_PENDING = """
    INSERT OR ROLLBACK INTO pending_event (id, recipient_id, sender_key, sender_did, received_at, size, payload)
"""
_INSERT_PENDING_USAGE = "INSERT INTO holding (party_id, pending, pending_bytes)"
_ADD_PENDING_USAGE = """
    ON CONFLICT DO UPDATE SET
        pending = pending + excluded.pending, pending_bytes = pending_bytes + excluded.pending_bytes
"""

_RecipientAndSender = tuple[str, str]


@dataclass(eq=False, slots=True)
class _PendingUsage:
    """Queue of a recipient before the batch, and its growth."""

    id: int
    events: int
    bytes: int
    more_events: int = 0
    more_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EnqueueEventOperation:
    """Enqueue of a pending event as an operation of a batch."""

    event: PendingEvent
    size: int
    caps: DecentrlQuotas
    now: float

    @staticmethod
    def run_batch(connection: StoreConnection, operations: Sequence[EnqueueEventOperation]) -> list[OperationOutcome]:
        """Perform neighbouring operations of a batch together."""
        pairs: dict[_RecipientAndSender, None] = {}
        now = 0.0
        for operation in operations:
            pairs[operation.event.recipient_did, operation.event.sender_did] = None
            # A batch waits for a short time only, so one time will do: that of the last.
            now = max(now, operation.now)
        usages = find_deliverable(connection, list(pairs), now)
        rows: list[tuple[Any, ...]] = []
        changed: dict[int, _PendingUsage] = {}
        outcomes: list[OperationOutcome] = []
        for operation in operations:
            event, quotas, size = operation.event, operation.caps, operation.size
            usage = usages.get((event.recipient_did, event.sender_did))
            if usage is None:
                outcomes.append(OperationOutcome(error=ContractNotFound()))
                continue
            if usage.events >= quotas.pending or (size and usage.bytes + size > quotas.pending_bytes):
                outcomes.append(OperationOutcome(error=QuotaExceeded()))
                continue
            usage.events += 1
            usage.more_events += 1
            usage.bytes += size
            usage.more_bytes += size
            changed[usage.id] = usage
            sender, time = event.sender_did, repr(float(event.received_at))
            rows.append((event.id, usage.id, hash_did(sender), sender, time, size, event.payload))
            outcomes.append(OperationOutcome())
        if rows:
            insert_rows(connection, _INSERT_PENDING, rows)
            connection.add_ledger_entry("decentrl", "accepted", len(rows))
            differences = [(usage.id, usage.more_events, usage.more_bytes) for usage in changed.values()]
            insert_rows(connection, _INSERT_PENDING_USAGE, differences, _ADD_PENDING_USAGE)
        return outcomes


def find_deliverable(
    connection: Connection, pairs: Sequence[_RecipientAndSender], now: float
) -> dict[_RecipientAndSender, _PendingUsage]:
    """Usage of the recipients that have a contract with the sender at a time, by recipient and sender."""
    found: dict[_RecipientAndSender, _PendingUsage] = {}
    usages: dict[int, _PendingUsage] = {}
    for some in split_chunks(pairs, ROWS_PER_STATEMENT):
        source = _DELIVERABLE_SOURCE.format(format_numbered_values(len(some), 2))
        for number, *usage in select_rows(connection, _DELIVERABLE_COLUMNS, source, [*chain(*some), now]):
            found[some[number]] = usages.setdefault(usage[0], _PendingUsage(*usage))
    return found


def find_pending_page(
    connection: Connection, recipient: str, sender: str | None, part: PageRequest
) -> ResultPage[PendingEvent]:
    party = find_party(connection, recipient)
    if party is None or not party.pending:
        return make_empty_page()
    where, total = "recipient_id = ?", party.pending
    parameters: list[Any] = [party.id]
    if sender is not None:
        where, parameters = f"{where} AND sender_key = ?", [party.id, hash_did(sender)]
        count = f"SELECT count(*) FROM pending_event WHERE {where}"
        ((total,),) = connection.execute(count, parameters).fetchall()
    rows = select_rows(
        connection,
        "seq, id, sender_did, received_at, size",
        f"""
        FROM (
            SELECT seq, id, sender_did, received_at, size FROM pending_event
            WHERE {where} ORDER BY seq LIMIT ? OFFSET ?
        )
        """,
        [*parameters, *get_limit_parameters(part)],
    )
    payloads = read_texts(connection, "pending_event", "payload", {row[0]: row[4] for row in rows})
    found = [
        PendingEvent(id, recipient, sender_did, payloads[seq], float(received_at))
        for seq, id, sender_did, received_at, _ in rows
    ]
    return ResultPage(tuple(found), total)


def acknowledge_events(
    connection: StoreConnection, recipient: str, ids: Sequence[str], entry: LedgerEntry = "acknowledged"
) -> list[RemovedMessage]:
    """
    Remove queued events; returns those that existed, in order of arrival.

    :param entry: ledger entry that counts them.
    """
    party = find_party(connection, recipient)
    if party is None or not party.pending:
        return []
    mine = "FROM pending_event WHERE +recipient_id = ? AND id IN ({})"
    rows = sorted(select_rows_in(connection, "seq, id, size, received_at", mine, list(dict.fromkeys(ids)), party.id))
    if rows:
        execute_in(connection, "DELETE FROM pending_event WHERE seq IN ({})", [row[0] for row in rows])
        connection.add_ledger_entry("decentrl", entry, len(rows))
        size = sum([row[2] for row in rows])
        change_party_usage(connection, party.id, pending=-len(rows), pending_bytes=-size)
    return [
        RemovedMessage(id, recipient, recipient, size, float(received_at), 0) for _, id, size, received_at in rows
    ]
