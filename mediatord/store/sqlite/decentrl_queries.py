"""
Identities, contracts, contract requests and pending Decentrl events, in SQL. Each function runs inside a
transaction of the caller.

Pending events are the most frequent operation: neighbours in a batch share a statement that reads contracts and
counters, one that inserts the events and one that counts them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, Literal, NamedTuple

from mediatord.errors import (
    ContractNotFound,
    DuplicateNonce,
    QuotaExceeded,
    RecipientNotRegistered,
    UnauthorizedCommand,
)
from mediatord.store.interfaces.decentrl import (
    CommandGuard,
    Contract,
    ContractFilter,
    ContractRequest,
    DecentrlQuotas,
    PageRequest,
    PendingEvent,
    ResultPage,
)
from mediatord.store.interfaces.messages import LedgerEntry, RemovedMessage
from mediatord.store.sqlite.connection import BatchOperation, SQLOperation, StoreConnection, hash_did
from mediatord.store.sqlite.coordination_queries import ClaimOutcome, NonceClaim, claim_nonces

# Owner number of registrations.
MEDIATOR_ID = 0
# The greatest number that SQLite takes.
_MAX_INTEGER = (1 << 63) - 1

# CROSS JOIN, so that the query planner keeps the order of the tables.
_SELECT_PARTIES = "FROM {} w CROSS JOIN party p ON p.did = w.column2 LEFT JOIN party_usage h ON h.party_id = p.id"
# Parties that own nothing, and with which there are no contracts.
_SELECT_UNUSED = """
    FROM party p LEFT JOIN party_usage h ON h.party_id = p.id
    WHERE p.id IN ({}) AND coalesce(h.contracts + h.requests + h.pending + h.stored, 0) = 0
    AND NOT EXISTS (SELECT 1 FROM contract WHERE peer_id = p.id)
"""


class PartyRow(NamedTuple):
    """A DID by its number, with the counters of its usage; -1 stands for a DID without a number."""

    id: int = -1
    contracts: int = 0
    requests: int = 0
    pending: int = 0
    pending_bytes: int = 0
    stored: int = 0
    stored_bytes: int = 0
    edition: int = 0


_PARTY_COLUMNS = "p.id, " + ", ".join(f"coalesce(h.{counter}, 0)" for counter in PartyRow._fields[1:])


def find_party(connection: StoreConnection, did: str) -> PartyRow:
    return find_parties(connection, [did])[did]


def find_parties(connection: StoreConnection, dids: Sequence[str]) -> dict[str, PartyRow]:
    """The party of each of these DIDs."""
    rows = connection.select_matching_rows(_PARTY_COLUMNS, _SELECT_PARTIES, [(did,) for did in dids])
    return dict.fromkeys(dids, PartyRow()) | {dids[number]: PartyRow(*row) for number, row in rows}


def get_or_create_party(connection: StoreConnection, did: str) -> int:
    """The number of a DID, assigned if it has none."""
    number = connection.select_value("SELECT id FROM party WHERE did = ?", (did,))
    return int(number or connection.insert_numbered_rows("INSERT INTO party (did)", [(did,)])[0])


def change_party_usage(
    connection: StoreConnection, columns: tuple[str, ...], changes: Sequence[tuple[int, ...]]
) -> None:
    """
    Change counters of parties.

    :param changes: the number of each party, and what is added to the columns.
    """
    into, then = _format_usage_change(columns)
    connection.insert_rows(into, changes, then)


@lru_cache
def _format_usage_change(columns: tuple[str, ...]) -> tuple[str, str]:
    sums = ", ".join(f"{column} = {column} + excluded.{column}" for column in columns)
    return f"INSERT INTO party_usage (party_id, {', '.join(columns)})", f"ON CONFLICT DO UPDATE SET {sums}"


def drop_unused_parties(connection: StoreConnection, party_ids: Collection[int]) -> None:
    """Delete those of these parties that own nothing and have no contracts with others."""
    unused = [id for (id,) in connection.select_rows_in("p.id", _SELECT_UNUSED, list(party_ids))]
    connection.execute_in("DELETE FROM party_usage WHERE party_id IN ({})", unused)
    connection.execute_in("DELETE FROM party WHERE id IN ({})", unused)


def _get_limit(part: PageRequest) -> tuple[int, int]:
    """Parameters for `LIMIT ? OFFSET ?`, reduced to what SQLite takes."""
    return min(part.limit, _MAX_INTEGER), min(part.offset, _MAX_INTEGER)


# A registration is in several tables and indexes: so much more than a row elsewhere.
_ROWS_PER_REGISTRATION = 8

_SELECT_REGISTERED = """
    FROM party p
    WHERE (SELECT max(expires_at) FROM contract WHERE peer_id = p.id AND owner_id = 0) > ? AND p.did IN ({})
"""
# By name, because SQLite would prefer the index by owner, and all registrations have the same owner.
_SELECT_EXPIRED = """
    FROM (
        SELECT seq, peer_id FROM contract INDEXED BY registration_expiry
        WHERE owner_id = 0 AND expires_at <= ? ORDER BY expires_at LIMIT ?
    )
"""


def find_registered(connection: StoreConnection, dids: Collection[str], now: float) -> set[str]:
    """Those of these DIDs that are registered at a time."""
    return set(chain(*connection.select_rows_in("p.did", _SELECT_REGISTERED, list(dids), now)))


def get_registration_expiry(connection: StoreConnection, now: float, did: str) -> float | None:
    """When the last registration of a DID expires; None when it is not registered at a time."""
    latest = "SELECT max(expires_at) FROM contract WHERE peer_id = ? AND owner_id = 0"
    until: float | None = connection.select_value(latest, (find_party(connection, did).id,))
    return until if until is not None and until > now else None


# What a command reads and changes: contracts decide what may be delivered, and registrations who may do anything.
ConflictClass = Literal["none", "registration", "mail", "requests", "archive"]


@dataclass(slots=True)
class GuardedCommand(BatchOperation):
    """
    A command with its guard, as an operation of a batch.

    :param command: refuses, if it does, before its first write.
    :param claim: of its nonce, when it was given.
    :param conflict_class: names what it reads and changes; commands of other classes do not affect it.
    """

    guard: CommandGuard
    command: SQLOperation
    claim: NonceClaim
    conflict_class: ConflictClass

    @staticmethod
    def run_batch(connection: StoreConnection, operations: Sequence[GuardedCommand]) -> list[Any]:
        """
        Claim all nonces, then check the guards of commands and execute those that pass. A command that may change who
        is registered ends a run of operations that are checked together.
        """
        claimed = claim_nonces(connection, [one.claim for one in operations])
        outcomes: list[Any] = []
        start = 0
        for end, one in enumerate(operations, 1):
            if end == len(operations) or one.conflict_class == "registration":
                outcomes += _execute_run(connection, operations[start:end], claimed[start:end])
                start = end
        return outcomes


def _execute_run(
    connection: StoreConnection, commands: Sequence[GuardedCommand], claimed: Sequence[ClaimOutcome]
) -> list[Any]:
    """
    Check guards and execute commands during which nobody is registered, sorted by conflict class, so that commands of
    a kind are neighbours.
    """
    dids = {did for one in commands for did in (one.guard.sender, one.guard.recipient) if did is not None}
    # A batch waits for a short time only, so one time will do: that of the last.
    registered = {None, *find_registered(connection, dids, commands[-1].claim.now)}
    outcomes: list[Any] = []
    passing: list[tuple[str, int]] = []
    for place, (one, is_new) in enumerate(zip(commands, claimed, strict=True)):
        refusal: Exception | None = None
        if is_new is not True:
            refusal = is_new or DuplicateNonce()
        elif one.guard.sender not in registered:
            refusal = UnauthorizedCommand()
        elif one.guard.recipient not in registered:
            refusal = RecipientNotRegistered()
        else:
            passing.append((one.conflict_class, place))
        outcomes.append(refusal)
    passing.sort()
    done = connection.run_operations([commands[place].command for _, place in passing])
    for (_, place), outcome in zip(passing, done, strict=True):
        outcomes[place] = outcome
    return outcomes


def save_contract(connection: StoreConnection, contract: Contract, caps: DecentrlQuotas, now: float) -> None:
    """
    Store a contract or registration.

    :raise QuotaExceeded: there are too many, and none has expired.
    """
    if contract.owner_did is None:
        _save_registration(connection, contract, caps, now)
    else:
        _save_owned_contract(connection, contract, contract.owner_did, caps, now)


def find_contracts(
    connection: StoreConnection, owner: str, wanted: ContractFilter, part: PageRequest
) -> ResultPage[Contract]:
    party = find_party(connection, owner)
    if not party.contracts:
        return ResultPage((), 0)
    where, parameters = "c.owner_id > 0 AND c.owner_id = ?", [float(party.id)]  # the first for the partial index
    if wanted.did is not None and wanted.did != owner:
        where, parameters = "c.owner_id = ? AND c.peer_id = ?", [party.id, find_party(connection, wanted.did).id]
    for condition, time in ("c.expires_at <= ?", wanted.expires_before), ("c.expires_at >= ?", wanted.expires_after):
        if time is not None:
            where, parameters = f"{where} AND {condition}", [*parameters, time]
    total = connection.select_value(f"SELECT count(*) FROM contract c WHERE {where}", parameters)
    rows = connection.execute(
        f"""
        SELECT c.id, (SELECT did FROM party WHERE id = c.peer_id), c.expires_at, c.digest, c.text
        FROM contract c WHERE {where} ORDER BY c.seq LIMIT ? OFFSET ?
        """,
        (*parameters, *_get_limit(part)),
    )
    return ResultPage(tuple([Contract(id, owner, *rest) for id, *rest in rows]), total)


def drop_expired_registrations(connection: StoreConnection, rows: int, now: float) -> int:
    """Delete some expired registrations; returns their number."""
    expired = connection.select_rows("seq, peer_id", _SELECT_EXPIRED, (now, -(-rows // _ROWS_PER_REGISTRATION)))
    connection.execute_in("DELETE FROM contract WHERE seq IN ({})", [seq for seq, _ in expired])
    drop_unused_parties(connection, {peer_id for _, peer_id in expired})
    return len(expired)


def _save_registration(connection: StoreConnection, registration: Contract, caps: DecentrlQuotas, now: float) -> None:
    peer_id = get_or_create_party(connection, registration.peer_did)
    kept = connection.execute(
        "SELECT seq, digest, expires_at FROM contract WHERE peer_id = ? AND owner_id = 0 ORDER BY expires_at, seq",
        (peer_id,),
    ).fetchall()
    live = [row for row in kept if row[2] > now]
    if any(digest == registration.digest for _, digest, _ in live):
        return
    gone = [seq for seq, _, expires_at in kept if expires_at <= now]
    is_full = len(live) >= caps.contracts_with_one
    is_kept = not is_full or live[0][2] <= registration.expires_at
    if is_full and is_kept:
        gone.append(live[0][0])  # the one that expires first makes room
    # The new one first, because devices go with the last one; but the same one, expired, is replaced.
    same = [seq for seq, digest, _ in kept if digest == registration.digest]
    connection.execute_in("DELETE FROM contract WHERE seq IN ({})", same)
    if is_kept:
        _insert_contract(connection, registration, MEDIATOR_ID, peer_id)
    connection.execute_in("DELETE FROM contract WHERE seq IN ({})", gone)


def _save_owned_contract(
    connection: StoreConnection, contract: Contract, owner: str, caps: DecentrlQuotas, now: float
) -> None:
    party, peer = find_party(connection, owner), find_party(connection, contract.peer_did)
    same = "SELECT 1 FROM contract WHERE owner_id = ? AND digest = ?"
    if connection.select_value(same, (party.id, contract.digest)):
        return
    pair = "SELECT count(*) FROM contract WHERE peer_id = ? AND owner_id = ?"
    gone: list[int] = []
    if connection.select_value(pair, (peer.id, party.id)) >= caps.contracts_with_one:
        gone = _delete_expired_contract(connection, "peer_id = ? AND owner_id = ?", (peer.id, party.id), now)
    elif party.contracts >= caps.contracts:
        gone = _delete_expired_contract(connection, "owner_id > 0 AND owner_id = ?", (party.id,), now)
    owner_id, peer_id = (get_or_create_party(connection, did) for did in (owner, contract.peer_did))
    _insert_contract(connection, contract, owner_id, peer_id)
    change_party_usage(connection, ("contracts",), [(owner_id, 1 - len(gone))])
    drop_unused_parties(connection, gone)


def _delete_expired_contract(
    connection: StoreConnection, where: str, parameters: tuple[int, ...], now: float
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


def _insert_contract(connection: StoreConnection, contract: Contract, owner_id: int, peer_id: int) -> None:
    connection.insert_rows(
        "INSERT OR ROLLBACK INTO contract (id, owner_id, peer_id, expires_at, digest, text)",
        [(contract.id, owner_id, peer_id, contract.expires_at, contract.digest, contract.text)],
    )


def add_contract_request(connection: StoreConnection, wanted: ContractRequest, caps: DecentrlQuotas) -> None:
    """
    Queue a contract request.

    :raise QuotaExceeded: too many are queued.
    """
    party, sender_key = find_party(connection, wanted.recipient_did), hash_did(wanted.sender_did)
    of_sender = "SELECT count(*) FROM contract_request WHERE recipient_id = ? AND sender_key = ?"
    if (
        party.requests >= caps.requests
        or connection.select_value(of_sender, (party.id, sender_key)) >= caps.requests_of_one
    ):
        raise QuotaExceeded()
    recipient_id = get_or_create_party(connection, wanted.recipient_did)
    text, public_key = wanted.encrypted_contract_request, wanted.requestor_ephemeral_public_key
    connection.insert_rows(
        """
        INSERT OR ROLLBACK INTO contract_request (id, recipient_id, sender_key, sender_did, public_key, request)
        """,
        [(wanted.id, recipient_id, sender_key, wanted.sender_did, public_key, text)],
    )
    change_party_usage(connection, ("requests",), [(recipient_id, 1)])


def find_contract_requests(
    connection: StoreConnection, recipient: str, part: PageRequest
) -> ResultPage[ContractRequest]:
    party = find_party(connection, recipient)
    rows = connection.execute(
        """
        SELECT id, sender_did, request, public_key FROM contract_request
        WHERE recipient_id = ? ORDER BY seq LIMIT ? OFFSET ?
        """,
        (party.id, *_get_limit(part)),
    )
    found = [ContractRequest(id, sender, recipient, text, key) for id, sender, text, key in rows]
    return ResultPage(tuple(found), party.requests)


def acknowledge_requests(connection: StoreConnection, recipient: str, ids: Sequence[str]) -> None:
    party = find_party(connection, recipient)
    if not party.requests:
        return
    mine = "FROM contract_request WHERE +recipient_id = ? AND id IN ({})"
    seqs = [seq for (seq,) in connection.select_rows_in("seq", mine, list(dict.fromkeys(ids)), party.id)]
    if seqs:
        connection.execute_in("DELETE FROM contract_request WHERE seq IN ({})", seqs)
        change_party_usage(connection, ("requests",), [(party.id, -len(seqs))])


# CROSS JOIN, so that the query planner keeps the order of the tables.
_SELECT_DELIVERABLE = """
    FROM {} w CROSS JOIN party r ON r.did = w.column2 CROSS JOIN party s ON s.did = w.column3
    LEFT JOIN party_usage h ON h.party_id = r.id
    WHERE (SELECT max(expires_at) FROM contract WHERE peer_id = s.id AND owner_id = r.id) > ?
"""
_DELIVERABLE_COLUMNS = "r.id, coalesce(h.pending, 0), coalesce(h.pending_bytes, 0)"
_INSERT_PENDING = """
    INSERT OR ROLLBACK INTO pending_event (id, recipient_id, sender_key, sender_did, received_at, size, payload)
"""
_PENDING_USAGE = ("pending", "pending_bytes")


@dataclass(frozen=True, slots=True)
class EnqueueEventOperation(BatchOperation):
    """Enqueue of a pending event as an operation of a batch."""

    event: PendingEvent
    size: int
    caps: DecentrlQuotas
    now: float

    @staticmethod
    def run_batch(connection: StoreConnection, operations: Sequence[EnqueueEventOperation]) -> list[Any]:
        pairs: dict[tuple[str, str], int | None] = {}
        for operation in operations:
            pairs[operation.event.recipient_did, operation.event.sender_did] = None
        keys = list(pairs)
        # A batch waits for a short time only, so one time will do: that of the last.
        now = operations[-1].now
        queued: dict[int, tuple[int, int]] = {}
        found = connection.select_matching_rows(_DELIVERABLE_COLUMNS, _SELECT_DELIVERABLE, keys, now)
        for number, (party_id, events, size) in found:
            pairs[keys[number]] = party_id
            queued[party_id] = events, size
        growth: dict[int, tuple[int, int, int]] = {}
        rows: list[tuple[Any, ...]] = []
        outcomes: list[Any] = []
        for operation in operations:
            event, quotas, size = operation.event, operation.caps, operation.size
            party_id = pairs[event.recipient_did, event.sender_did]
            if party_id is None:
                outcomes.append(ContractNotFound())
                continue
            before, before_bytes = queued[party_id]
            _, more, more_bytes = growth.get(party_id, (party_id, 0, 0))
            total_bytes = before_bytes + more_bytes + size
            if before + more >= quotas.pending or (size and total_bytes > quotas.pending_bytes):
                outcomes.append(QuotaExceeded())
                continue
            growth[party_id] = party_id, more + 1, more_bytes + size
            sender, time = event.sender_did, repr(float(event.received_at))
            rows.append((event.id, party_id, hash_did(sender), sender, time, size, event.payload))
            outcomes.append(None)
        if rows:
            connection.insert_rows(_INSERT_PENDING, rows)
            connection.add_ledger_entry("decentrl", "accepted", len(rows))
            change_party_usage(connection, _PENDING_USAGE, list(growth.values()))
        return outcomes


def find_pending_page(
    connection: StoreConnection, recipient: str, sender: str | None, part: PageRequest
) -> ResultPage[PendingEvent]:
    party = find_party(connection, recipient)
    where, total = "recipient_id = ?", party.pending
    parameters: list[Any] = [party.id]
    if sender is not None:
        where, parameters = f"{where} AND sender_key = ?", [party.id, hash_did(sender)]
        total = connection.select_value(f"SELECT count(*) FROM pending_event WHERE {where}", parameters)
    columns = "seq, size, id, sender_did, received_at"
    page = f"SELECT {columns} FROM pending_event WHERE {where} ORDER BY seq LIMIT ? OFFSET ?"
    rows = connection.select_rows(columns, f"FROM ({page})", [*parameters, *_get_limit(part)])
    payloads = connection.read_texts("pending_event", "payload", {row[0]: row[1] for row in rows})
    found = [PendingEvent(id, recipient, by, payloads[seq], float(time)) for seq, _, id, by, time in rows]
    return ResultPage(tuple(found), total)


def acknowledge_events(
    connection: StoreConnection, recipient: str, ids: Sequence[str], entry: LedgerEntry = "acknowledged"
) -> list[RemovedMessage]:
    """
    Remove queued events; returns those that existed, in order of arrival.

    :param entry: ledger entry that counts them.
    """
    party = find_party(connection, recipient)
    if not party.pending:
        return []
    mine = "FROM pending_event WHERE +recipient_id = ? AND id IN ({})"
    columns = "seq, id, size, received_at"
    rows = sorted(connection.select_rows_in(columns, mine, list(dict.fromkeys(ids)), party.id))
    if rows:
        connection.execute_in("DELETE FROM pending_event WHERE seq IN ({})", [row[0] for row in rows])
        connection.add_ledger_entry("decentrl", entry, len(rows))
        size = sum([row[2] for row in rows])
        change_party_usage(connection, _PENDING_USAGE, [(party.id, -len(rows), -size)])
    return [RemovedMessage(id, recipient, recipient, size, float(time), 0) for _, id, size, time in rows]
