"""
Devices and wake-ups in SQL. Each function runs inside a transaction of the caller.

Owners are numbers here: that of an account, or that of a party with a minus. Statements work on all owners of a call
and return JSON, which rounds times to 10 microseconds; an expiry is returned as it was given.

Visible pending messages are looked for among the newest :data:`MAX_EXAMINED` of each queue. If none of those is one,
but there are more, the next one counts as visible and pending.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import itemgetter
from typing import Any

from mediatord.errors import MediationNotGranted, TooManyDevices
from mediatord.protocol.canonical_did import is_decentrl_did
from mediatord.store.interfaces.devices import (
    Device,
    FinishedWakeup,
    WakeupClaim,
    WakeupDecision,
    WakeupPolicy,
    WakeupRequest,
    WakeupState,
)
from mediatord.store.sqlite.connection import StoreConnection, hash_did
from mediatord.store.sqlite.decentrl_queries import get_registration_expiry

MAX_EXAMINED = 64

_UNEXPIRED = "(expires_at IS NULL OR expires_at > ?)"
# Blobs and exact numbers as texts.
_DEVICE_COLUMNS = """
    owner, seq, hex(id), service, hex(sealed), CASE WHEN expires_at IS NOT NULL THEN printf('%!.17g', expires_at) END
"""
_SELECT_DEVICES = f"FROM device WHERE {_UNEXPIRED} AND owner IN ({{}})"
_SELECT_NEXT_DEVICES = "FROM (SELECT * FROM device WHERE id > ? ORDER BY id LIMIT ?)"
_SELECT_DEVICE_OWNERS = f"FROM (SELECT DISTINCT owner FROM device WHERE {_UNEXPIRED} AND owner IN ({{}}))"
_WAKEUP_COLUMNS = "owner, polled_at, woken_at, claimed_until"
_SELECT_WAKEUPS = "FROM wakeup WHERE owner IN ({})"
# The first parameter is the time. The index by name, because its end is read, however long it is.
_IS_VISIBLE_AND_PENDING = "delivered = 0 AND expires_at > ?1 AND (due_at IS NULL OR due_at <= ?1)"
_EXAMINED = """
    FROM message INDEXED BY message_of_recipient WHERE recipient_id = q.recipient_id ORDER BY seq DESC
"""
_NEWEST_OF_QUEUE = f"""
    coalesce(
        (
            SELECT max(received_at, coalesce(abs(due_at), 0))
            FROM (SELECT received_at, due_at, expires_at, delivered {_EXAMINED} LIMIT {MAX_EXAMINED})
            WHERE {_IS_VISIBLE_AND_PENDING} LIMIT 1
        ),
        (SELECT received_at {_EXAMINED} LIMIT 1 OFFSET {MAX_EXAMINED})
    )
"""
# Of those that were delayed; a time at which one was handed out is negative.
_NEWEST_DELAYED = f"""
    coalesce((
        SELECT abs(due_at) FROM (
            SELECT due_at, expires_at, delivered FROM message INDEXED BY message_delayed
            WHERE account_id = owner AND due_at {{range}} ORDER BY due_at {{order}} LIMIT {MAX_EXAMINED}
        )
        WHERE {_IS_VISIBLE_AND_PENDING} LIMIT 1
    ), 0)
"""
# Messages, their bytes, and when the newest visible pending one arrived or became visible; 0 if there is none.
_QUEUED_MESSAGES_COLUMNS = f"""
    owner, messages, bytes, max(
        coalesce(newest, 0),
        {_NEWEST_DELAYED.format(range="< 0", order="")},
        {_NEWEST_DELAYED.format(range="BETWEEN 0 AND ?1", order="DESC")}
    )
"""
_SELECT_QUEUED_MESSAGES = f"""
    FROM (
        SELECT account_id AS owner, sum(messages) AS messages, sum(bytes) AS bytes, max({_NEWEST_OF_QUEUE}) AS newest
        FROM queue q WHERE account_id IN ({{}}) GROUP BY account_id
    )
"""
_QUEUED_EVENTS_COLUMNS = """
    -h.party_id, h.pending, h.pending_bytes, (
        SELECT CAST(received_at AS REAL) FROM pending_event WHERE recipient_id = h.party_id ORDER BY seq DESC LIMIT 1
    )
"""
_SELECT_QUEUED_EVENTS = "FROM party_usage h WHERE h.pending > 0 AND h.party_id IN ({})"
# The second parameter is the number of ids for each queue.
_SELECT_MESSAGE_IDS = f"""
    FROM queue q CROSS JOIN message m ON m.seq IN (
        SELECT seq FROM (SELECT seq, due_at, expires_at, delivered {_EXAMINED} LIMIT {MAX_EXAMINED})
        WHERE {_IS_VISIBLE_AND_PENDING} LIMIT ?2
    )
    WHERE q.account_id IN ({{}})
"""
_SELECT_EVENT_IDS = """
    FROM party_usage h CROSS JOIN pending_event e ON e.seq IN (
        SELECT seq FROM pending_event WHERE recipient_id = h.party_id ORDER BY seq DESC LIMIT ?1
    )
    WHERE h.party_id IN ({})
"""
# A step to the next account for each row, however many queues an account has.
_SELECT_QUEUE_OWNERS = """
    FROM (
        WITH RECURSIVE next (id) AS (
            SELECT min(account_id) FROM queue WHERE account_id > ?
            UNION ALL SELECT (SELECT min(account_id) FROM queue WHERE account_id > next.id) FROM next
            WHERE next.id IS NOT NULL
            LIMIT ?
        )
        SELECT id FROM next WHERE id IS NOT NULL
    )
"""
_SELECT_PARTIES = "FROM (SELECT party_id FROM party_usage WHERE party_id > ? ORDER BY party_id LIMIT ?)"


_NEVER = WakeupState()


@dataclass(frozen=True, slots=True)
class _QueuedMessages:
    """Messages of an owner, and when the newest visible pending one arrived or became visible."""

    messages: int
    bytes: int
    newest_at: float


def set_device(connection: StoreConnection, now: float, owner: str, device: Device, max_devices: int) -> None:
    """
    Add, replace or move a device.

    :raise MediationNotGranted: there is no such owner, or it is not registered.
    :raise TooManyDevices: it has `max_devices` other ones.
    """
    owner_id = _find_owner_ids(connection, [owner]).get(owner)
    if owner_id is None or (owner_id < 0 and get_registration_expiry(connection, now, owner) is None):
        raise MediationNotGranted()
    holder = connection.select_value("SELECT owner FROM device WHERE id = ?", (device.id,))
    values = device.service, device.sealed, device.expires_at
    if holder == owner_id:
        connection.execute(
            "UPDATE device SET service = ?, sealed = ?, expires_at = ? WHERE id = ?", (*values, device.id)
        )
        return
    count = f"SELECT count(*) FROM device WHERE {_UNEXPIRED} AND owner = ?"
    if connection.select_value(count, (now, owner_id)) >= max_devices:
        raise TooManyDevices()
    # Expired ones as well, so that an owner never has more rows than that.
    connection.execute("DELETE FROM device WHERE id = ? OR owner = ? AND expires_at <= ?", (device.id, owner_id, now))
    connection.execute(
        "INSERT INTO device (id, owner, service, sealed, expires_at) VALUES (?, ?, ?, ?, ?)",
        (device.id, owner_id, *values),
    )


def list_devices(connection: StoreConnection, now: float, owner: str, service: str | None = None) -> list[Device]:
    devices = _read_devices(connection, _find_owner_ids(connection, [owner]).values(), now)
    return [device for some in devices.values() for device in some if service in (None, device.service)]


def remove_devices(connection: StoreConnection, owner: str, service: str) -> int:
    owner_id = _find_owner_ids(connection, [owner]).get(owner)
    return connection.execute("DELETE FROM device WHERE owner = ? AND service = ?", (owner_id, service)).rowcount


def forget_devices(connection: StoreConnection, ids: Sequence[bytes]) -> int:
    before = connection.total_changes
    connection.execute_in("DELETE FROM device WHERE id IN ({})", ids)
    return connection.total_changes - before


def expire_devices(connection: StoreConnection, now: float, limit: int) -> int:
    expired = "SELECT seq FROM device WHERE expires_at <= ? ORDER BY expires_at LIMIT ?"
    return connection.execute(f"DELETE FROM device WHERE seq IN ({expired})", (now, max(limit, 0))).rowcount


def count_devices(connection: StoreConnection) -> dict[str, int]:
    """Reads an index with an entry for each device."""
    return dict(
        connection.execute("SELECT service, count(*) FROM device GROUP BY service ORDER BY service").fetchall()
    )


def scan_devices(connection: StoreConnection, after: bytes, limit: int) -> list[Device]:
    rows = connection.select_rows(_DEVICE_COLUMNS, _SELECT_NEXT_DEVICES, (after, max(limit, 0)))
    return [_parse_device(row) for row in rows]


def reseal_devices(connection: StoreConnection, changes: Sequence[tuple[Device, bytes]]) -> None:
    connection.execute_values(
        """
        UPDATE device SET sealed = w.column3 FROM (VALUES {}) w WHERE id = w.column1 AND sealed = w.column2
        """,
        [(device.id, device.sealed, sealed) for device, sealed in changes],
    )


def record_polls(connection: StoreConnection, now: float, ages: Mapping[str, float]) -> None:
    owner_ids = _find_owner_ids(connection, ages)
    some = owner_ids.values()
    known = _find_device_owners(connection, some, now) | _read_wakeups(connection, some).keys()
    connection.insert_rows(
        "INSERT INTO wakeup (owner, polled_at)",
        [(owner_ids[did], now - age) for did, age in ages.items() if owner_ids.get(did) in known],
        """
        ON CONFLICT DO UPDATE SET polled_at = excluded.polled_at
        WHERE polled_at IS NULL OR polled_at < excluded.polled_at
        """,
    )


def claim_wakeups(
    connection: StoreConnection, now: float, requests: Sequence[WakeupRequest], policy: WakeupPolicy
) -> list[WakeupDecision]:
    owner_ids = _find_owner_ids(connection, [request.owner for request in requests])
    some: Collection[int] = owner_ids.values()
    if not policy.without_devices:
        some = _find_device_owners(connection, some, now)
    states = dict.fromkeys(some, _NEVER) | _read_wakeups(connection, some)
    asked = [(owner_ids.get(owner, 0), now - age) for owner, age in requests]
    wanted = {id for id, arrival in asked if id in states and states[id].decide(arrival, now, policy) is not None}
    queued = _read_queued(connection, wanted, now)
    decisions: list[WakeupDecision] = []
    claimed: dict[int, int] = {}
    for place, (id, arrival) in enumerate(asked):
        decision = states[id].decide(arrival, now, policy) if id in queued else None
        if decision == 0:
            states[id] = replace(states[id], claimed_until=now + policy.lease)
            claimed[place] = id
        decisions.append(decision)
    if claimed:
        _write_claims(connection, claimed.values(), now, policy)
        devices = _read_devices(connection, claimed.values(), now)
        ids = _read_newest_ids(connection, claimed.values(), now, policy.max_message_ids)
        for place, id in claimed.items():
            messages = queued[id]
            decisions[place] = WakeupClaim(
                requests[place].owner,
                tuple(devices.get(id, ())),
                messages.messages,
                messages.bytes,
                tuple(ids.get(id, ())),
                now,
            )
    return decisions


def finish_wakeups(connection: StoreConnection, now: float, finished: Sequence[FinishedWakeup]) -> None:
    """The key of a claim is its time."""
    owner_ids = _find_owner_ids(connection, [one.owner for one in finished])
    known = [(owner_ids[owner], claim, wait) for owner, claim, wait in finished if owner in owner_ids]
    sent = [(id, claim) for id, claim, wait in known if wait is None]
    repeated = [(id, claim, now + wait) for id, claim, wait in known if wait is not None]
    connection.execute_values(
        """
        UPDATE wakeup SET woken_at = claimed_at, claimed_at = NULL, claimed_until = NULL FROM (VALUES {}) w
        WHERE owner = w.column1 AND claimed_at = w.column2
        """,
        sent,
    )
    connection.execute_values(
        """
        UPDATE wakeup SET claimed_until = w.column3 FROM (VALUES {}) w
        WHERE owner = w.column1 AND claimed_at = w.column2
        """,
        repeated,
    )


def find_owed_wakeups(
    connection: StoreConnection,
    now: float,
    after: str,
    limit: int,
    policy: WakeupPolicy,
    *,
    repeat_after: float = 0.0,
) -> tuple[list[str], str | None]:
    protocol, _, last = (after or "didcomm:0").partition(":")
    if protocol == "didcomm":
        examined = [id for (id,) in connection.select_rows("id", _SELECT_QUEUE_OWNERS, (int(last), limit))]
    else:
        parties = connection.select_rows("party_id", _SELECT_PARTIES, (int(last), limit))
        examined = [-id for (id,) in parties]
    following = f"{protocol}:{abs(examined[-1])}" if len(examined) == limit else None
    if following is None and protocol == "didcomm":
        following = "decentrl:0"
    some: Collection[int] = examined
    if not policy.without_devices:
        some = _find_device_owners(connection, some, now)
    states = _read_wakeups(connection, some)
    owed = [
        id
        for id, messages in _read_queued(connection, some, now).items()
        if states.get(id, _NEVER).is_owed(messages.newest_at, now, policy, repeat_after)
    ]
    return _read_dids(connection, owed), following


def _find_owner_ids(connection: StoreConnection, owners: Iterable[str]) -> dict[str, int]:
    """The numbers of those that exist."""
    accounts: list[str] = []
    parties: list[str] = []
    for owner in dict.fromkeys(owners):
        (parties if is_decentrl_did(owner) else accounts).append(owner)
    keys = [hash_did(did) for did in accounts]
    rows = connection.select_rows_in("did, id", "FROM account WHERE did_key IN ({})", keys)
    rows += connection.select_rows_in("did, -id", "FROM party WHERE did IN ({})", parties)
    return {did: id for did, id in rows}


def _read_dids(connection: StoreConnection, owner_ids: Iterable[int]) -> list[str]:
    accounts, parties = _split_owner_ids(owner_ids)
    rows = connection.select_rows_in("did", "FROM account WHERE id IN ({})", accounts)
    rows += connection.select_rows_in("did", "FROM party WHERE id IN ({})", parties)
    return [did for (did,) in rows]


def _split_owner_ids(owner_ids: Iterable[int]) -> tuple[list[int], list[int]]:
    """Numbers of accounts and parties."""
    accounts: list[int] = []
    parties: list[int] = []
    for id in owner_ids:
        if id > 0:
            accounts.append(id)
        else:
            parties.append(-id)
    return accounts, parties


def _find_device_owners(connection: StoreConnection, owner_ids: Iterable[int], now: float) -> set[int]:
    """Those that have a device which has not expired."""
    return {id for (id,) in connection.select_rows_in("owner", _SELECT_DEVICE_OWNERS, list(owner_ids), now)}


def _read_devices(connection: StoreConnection, owner_ids: Iterable[int], now: float) -> dict[int, list[Device]]:
    """Devices that have not expired, in order of registration."""
    devices: dict[int, list[Device]] = {}
    rows = connection.select_rows_in(_DEVICE_COLUMNS, _SELECT_DEVICES, list(owner_ids), now)
    for row in sorted(rows, key=itemgetter(1)):
        devices.setdefault(row[0], []).append(_parse_device(row))
    return devices


def _parse_device(row: Sequence[Any]) -> Device:
    """:param row: of _DEVICE_COLUMNS."""
    _, _, id, service, sealed, expires_at = row
    return Device(
        bytes.fromhex(id), service, bytes.fromhex(sealed), None if expires_at is None else float(expires_at)
    )


def _read_wakeups(connection: StoreConnection, owner_ids: Iterable[int]) -> dict[int, WakeupState]:
    rows = connection.select_rows_in(_WAKEUP_COLUMNS, _SELECT_WAKEUPS, list(owner_ids))
    return {id: WakeupState(*[-inf if time is None else time for time in times]) for id, *times in rows}


def _read_queued(connection: StoreConnection, owner_ids: Iterable[int], now: float) -> dict[int, _QueuedMessages]:
    """Of those that have a visible pending message."""
    accounts, parties = _split_owner_ids(owner_ids)
    rows = connection.select_rows_in(_QUEUED_MESSAGES_COLUMNS, _SELECT_QUEUED_MESSAGES, accounts, now)
    rows += connection.select_rows_in(_QUEUED_EVENTS_COLUMNS, _SELECT_QUEUED_EVENTS, parties)
    return {id: _QueuedMessages(*totals) for id, *totals in rows if totals[-1]}


def _read_newest_ids(
    connection: StoreConnection, owner_ids: Iterable[int], now: float, limit: int
) -> dict[int, list[str]]:
    """Ids of the newest visible pending messages, the newest first."""
    if limit <= 0:
        return {}
    accounts, parties = _split_owner_ids(owner_ids)
    rows = connection.select_rows_in("q.account_id, m.seq, m.id", _SELECT_MESSAGE_IDS, accounts, now, limit)
    rows += connection.select_rows_in("-h.party_id, e.seq, e.id", _SELECT_EVENT_IDS, parties, limit)
    ids: dict[int, list[str]] = {}
    for owner_id, _, id in sorted(rows, key=itemgetter(1), reverse=True):
        some = ids.setdefault(owner_id, [])
        if len(some) < limit:
            some.append(id)
    return ids


def _write_claims(connection: StoreConnection, owner_ids: Iterable[int], now: float, policy: WakeupPolicy) -> None:
    connection.insert_rows(
        "INSERT INTO wakeup (owner, claimed_at, claimed_until)",
        [(id, now, now + policy.lease) for id in owner_ids],
        "ON CONFLICT DO UPDATE SET claimed_at = excluded.claimed_at, claimed_until = excluded.claimed_until",
    )
