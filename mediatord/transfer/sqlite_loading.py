"""
Rows of records, in SQL; each function runs inside a transaction of the caller.

What is derived from rows is made by the triggers and statements that the store makes it with, without its quotas:
what was kept once stays.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from sqlite3 import SQLITE_CONSTRAINT_PRIMARYKEY, SQLITE_CONSTRAINT_UNIQUE, Connection, IntegrityError
from typing import Any

from mediatord.interfaces import decentrl
from mediatord.protocol.canonical_did import canonical_did, did_digest
from mediatord.store import sql_channels, sql_requests
from mediatord.store.recipient_names import names_of_record
from mediatord.store.sql_archive import NewEvent, count_arrivals, insert_arrivals
from mediatord.store.sql_ledger import enter
from mediatord.store.sql_parties import MEDIATOR, change_holding, enter_party
from mediatord.store.sql_queue_counts import count_in
from mediatord.store.sql_rows import key_of, size_of
from mediatord.transfer.errors import ArchiveRefused
from mediatord.transfer.records import (
    Account,
    Contract,
    ContractRequest,
    LongForm,
    Message,
    Nonce,
    PendingEvent,
    PublicEvent,
    Recipient,
    Registration,
    Retired,
    StoredEvent,
    seen_at_of,
)

_ENDLESS = 1 << 62
_NO_CAPS = decentrl.Caps(*[_ENDLESS] * 8)
_MESSAGE = """
    INSERT INTO message (
        id, recipient_id, account_id, form, size, received_at, expires_at, due_at, pushes,
        digest_head, digest, payload
    ) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_ACCOUNT = "INSERT INTO account (id, did, did_key, created_at, draft03, seen_at, fresh) VALUES (?, ?, ?, ?, ?, ?, ?)"
_RETIRED = "INSERT INTO retired (did) VALUES (?)"
_RECIPIENT = """
    INSERT INTO recipient (id, account_id, did, did_digest, registered, names) VALUES (?, ?, ?, ?, ?, ?)
"""
_CONTRACT = "INSERT INTO contract (id, owner_id, peer_id, expires_at, digest, text) VALUES (?, ?, ?, ?, ?, ?)"
_PENDING = """
    INSERT INTO pending_event (id, recipient_id, sender_key, sender_did, received_at, size, payload)
    VALUES (?, ?, ?, ?, ?, ?, ?)
"""


def _accounts(connection: Connection, records: Sequence[Account]) -> None:
    for one in records:
        did, seen_at = canonical_did(one.did), seen_at_of(one)
        row = (one.number, did, key_of(did), one.created_at, one.draft03, seen_at, one.fresh)
        _insert_once(connection, _ACCOUNT, row, f"account {one.number} has another form of a DID that has an account")


def _retired(connection: Connection, records: Sequence[Retired]) -> None:
    for one in records:
        refusal = f"the retired DID {one.did} is another form of one that is there"
        _insert_once(connection, _RETIRED, (canonical_did(one.did),), refusal)


def _insert_once(connection: Connection, statement: str, row: tuple[Any, ...], refusal: str) -> None:
    """:raise ArchiveRefused: there is one of this name."""
    try:
        connection.execute(statement, row)
    except IntegrityError as error:
        if error.sqlite_errorcode in (SQLITE_CONSTRAINT_UNIQUE, SQLITE_CONSTRAINT_PRIMARYKEY):
            raise ArchiveRefused(refusal) from None
        raise


def _recipients(connection: Connection, records: Sequence[Recipient]) -> None:
    for one in records:
        names = names_of_record(one.did, one.place, one.names)
        stored = None if names.stored is None else json.dumps(names.stored)
        row = one.number, one.account, names.did, did_digest(one.did), names.place, stored
        _insert_once(
            connection, _RECIPIENT, row, f"recipient {one.number} is another name of a DID that is registered"
        )
        change = "UPDATE account SET places = max(places, ?), recipients = recipients + ? WHERE id = ?"
        connection.execute(change, (names.last, max(len(names) - 1, 0), one.account))


def _messages(connection: Connection, records: Sequence[Message]) -> None:
    connection.executemany(_MESSAGE, [_message(one) for one in records])
    messages: Counter[tuple[int, int]] = Counter()
    sizes: Counter[tuple[int, int]] = Counter()
    for one in records:
        messages[one.account, one.recipient] += 1
        sizes[one.account, one.recipient] += len(one.payload)
    count_in(connection, [(*queue, number, sizes[queue]) for queue, number in messages.items()])
    enter(connection, "didcomm", "accepted", len(records))


def _message(one: Message) -> tuple[Any, ...]:
    digest = sha256(one.payload).digest()
    return (
        one.id,
        one.recipient,
        one.account,
        one.form,
        len(one.payload),
        one.received_at,
        one.expires_at,
        _due_at(one),
        one.pushes,
        int.from_bytes(digest[:8], "big", signed=True),
        digest,
        one.payload,
    )


def _due_at(one: Message) -> float | None:
    """NULL when it was never delayed; of one that was handed out, minus the time of that."""
    if one.arrived_at is None:
        return one.due_at
    return None if one.arrived_at == one.received_at else -one.arrived_at


def _long_forms(connection: Connection, records: Sequence[LongForm]) -> None:
    connection.executemany(
        "INSERT INTO did_document (short, long) VALUES (?, ?)",
        [(canonical_did(one.short), one.long) for one in records],
    )


def _nonces(connection: Connection, records: Sequence[Nonce]) -> None:
    connection.executemany("INSERT INTO nonce (key, until) VALUES (?, ?)", [(one.key, one.until) for one in records])
    connection.execute("UPDATE tally SET value = value + ? WHERE name = 'nonces'", (len(records),))


def _registrations(connection: Connection, records: Sequence[Registration]) -> None:
    for one in records:
        peer = enter_party(connection, one.did).id
        connection.execute(_CONTRACT, (one.id, MEDIATOR, peer, one.expires_at, one.digest, one.text))


def _contracts(connection: Connection, records: Sequence[Contract]) -> None:
    for one in records:
        owner, peer = enter_party(connection, one.owner).id, enter_party(connection, one.peer).id
        connection.execute(_CONTRACT, (one.id, owner, peer, one.expires_at, one.digest, one.text))
        change_holding(connection, owner, contracts=1)


def _contract_requests(connection: Connection, records: Sequence[ContractRequest]) -> None:
    for one in records:
        wanted = decentrl.ContractRequest(one.id, one.sender, one.recipient, one.request, one.public_key)
        sql_requests.request(connection, wanted, _NO_CAPS)


def _pending_events(connection: Connection, records: Sequence[PendingEvent]) -> None:
    for one in records:
        recipient, size = enter_party(connection, one.recipient).id, size_of(one.payload)
        time = repr(one.received_at)
        row = (one.id, recipient, key_of(one.sender), one.sender, time, size, one.payload)
        connection.execute(_PENDING, row)
        change_holding(connection, recipient, pending=1, pending_bytes=size)
    enter(connection, "decentrl", "accepted", len(records))


def _stored_events(connection: Connection, records: Sequence[StoredEvent]) -> None:
    owners = {did: enter_party(connection, did).id for did in dict.fromkeys([one.owner for one in records])}
    items: Counter[int] = Counter()
    sizes: Counter[int] = Counter()
    for one in records:
        items[owners[one.owner]] += 1
        sizes[owners[one.owner]] += size_of(one.payload, *one.tags)
    insert_arrivals(connection, [NewEvent(_stored(one), owners[one.owner], one.processed) for one in records])
    count_arrivals(connection, [(owner, items[owner], sizes[owner]) for owner in items])


def _stored(one: StoredEvent) -> decentrl.StoredEvent:
    return decentrl.StoredEvent(
        one.id, one.sender, one.recipient, one.payload, one.tags, one.timestamp, one.contract_id
    )


def _public_events(connection: Connection, records: Sequence[PublicEvent]) -> None:
    for one in records:
        event = decentrl.PublicEvent(one.id, one.event, one.tags, one.timestamp, one.signature, one.channel_id)
        sql_channels.publish(connection, one.publisher, event, _NO_CAPS)


# What keeps records of each kind, in their order.
LOADERS: Mapping[str, Callable[[Connection, Sequence[Any]], None]] = {
    "account": _accounts,
    "retired": _retired,
    "recipient": _recipients,
    "message": _messages,
    "long_form": _long_forms,
    "nonce": _nonces,
    "registration": _registrations,
    "contract": _contracts,
    "contract_request": _contract_requests,
    "pending_event": _pending_events,
    "stored_event": _stored_events,
    "public_event": _public_events,
}
