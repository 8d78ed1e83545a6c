"""Accounts and recipient DIDs in SQL. Each function runs inside a transaction of the caller."""

from __future__ import annotations

import json
from collections.abc import Sequence

from mediatord.errors import MediationNotGranted
from mediatord.protocol.canonical_did import canonicalize_did, compute_did_digest
from mediatord.store.interfaces.store import (
    FIRST_DAY_SECONDS,
    Account,
    AccountUsage,
    ExpiredAccount,
    ExpiryReason,
    RecipientUpdateAction,
    RecipientUpdateResult,
)
from mediatord.store.registered_spellings import MAX_REGISTERED_SPELLINGS, RegisteredSpellings, slice_spellings
from mediatord.store.sqlite.connection import StoreConnection, hash_did

_NOTHING_WAITS = "NOT EXISTS (SELECT 1 FROM queue WHERE account_id = account.id)"


def get_account(connection: StoreConnection, did: str) -> Account | None:
    query = "SELECT did, created_at, draft03, seen_at FROM account WHERE did_key = ?"
    row = connection.execute(query, (hash_did(did),)).fetchone()
    return None if row is None else Account(row[0], row[1], bool(row[2]), row[3])


def get_account_id(connection: StoreConnection, did: str) -> int | None:
    """The number of an account, which it keeps when its DID changes."""
    number: int | None = connection.select_value("SELECT id FROM account WHERE did_key = ?", (hash_did(did),))
    return number


def grant_account(connection: StoreConnection, did: str, now: float) -> Account:
    """
    The account of a DID, created if there is none.

    :raise MediationNotGranted: the DID is retired.
    """
    if is_retired(connection, did):
        raise MediationNotGranted()
    connection.execute(
        """
        INSERT INTO account (did, did_key, created_at, seen_at, fresh) VALUES (?, ?, ?, ?, 1) ON CONFLICT DO NOTHING
        """,
        (did, hash_did(did), now, now),
    )
    granted = get_account(connection, did)
    assert granted is not None
    return granted


def touch_account(connection: StoreConnection, did: str, now: float) -> None:
    connection.execute(
        """
        UPDATE account SET seen_at = ?, fresh = CASE WHEN ? - created_at >= ? THEN 0 ELSE fresh END
        WHERE did_key = ?
        """,
        (now, now, FIRST_DAY_SECONDS, hash_did(did)),
    )


def get_account_usage(connection: StoreConnection) -> AccountUsage:
    counts = dict(connection.execute("SELECT name, value FROM counter").fetchall())
    return AccountUsage(counts["accounts"], counts["registration_bytes"])


def expire_accounts(
    connection: StoreConnection, rows: int, limit: int, unused_before: float | None, idle_before: float | None
) -> list[ExpiredAccount]:
    """
    As :meth:`~mediatord.store.interfaces.store.IAccountStore.expire_accounts`, at least one.

    :param rows: accounts and registered names to remove at most, unless the first account has more.
    """
    expired: list[ExpiredAccount] = []
    searches: tuple[tuple[ExpiryReason, str, float | None], ...] = (
        ("unused", "fresh = 1 AND created_at <= ? ORDER BY created_at", unused_before),
        ("idle", f"seen_at <= ? AND {_NOTHING_WAITS} ORDER BY seen_at", idle_before),
    )
    for reason, condition, before in searches:
        if before is not None and rows > 0:
            query = f"SELECT id, did, recipients FROM account WHERE {condition} LIMIT ?"
            left = max(0, min(rows, limit - len(expired)))
            for number, did, recipients in connection.execute(query, (before, left)).fetchall():
                rows -= 1 + recipients
                if expired and rows < 0:
                    break
                _delete_account(connection, number, did)
                expired.append(ExpiredAccount(did, recipients, reason))
    if expired:
        connection.clear_cache()
    return expired


def remove_account(connection: StoreConnection, did: str) -> bool:
    """Remove an account and its registrations, unless messages are queued for it; returns whether that was done."""
    query = f"SELECT id FROM account WHERE did_key = ? AND {_NOTHING_WAITS}"
    number = connection.select_value(query, (hash_did(did),))
    if number is None:
        return False
    _delete_account(connection, number, did)
    connection.clear_cache()
    return True


def unregister_recipients(connection: StoreConnection, did: str) -> None:
    """Remove all registrations of an account; queued messages stay."""
    number = get_account_id(connection, did)
    connection.clear_cache()
    connection.execute(
        "UPDATE recipient SET registered = NULL, names = NULL WHERE account_id = ? AND registered IS NOT NULL",
        (number,),
    )
    # The triggers count one name per DID; others have been counted apart.
    connection.execute("UPDATE account SET recipients = 0 WHERE id = ?", (number,))


def _delete_account(connection: StoreConnection, account_number: int, did: str) -> None:
    connection.execute("DELETE FROM recipient WHERE account_id = ?", (account_number,))
    connection.execute("DELETE FROM did_document WHERE short = ?", (did,))
    connection.execute("DELETE FROM account WHERE id = ?", (account_number,))


def mark_draft03(connection: StoreConnection, did: str) -> None:
    connection.execute("UPDATE account SET draft03 = 1 WHERE did_key = ?", (hash_did(did),))


def find_owner(connection: StoreConnection, recipient_did: str) -> str | None:
    owner: str | None = connection.select_value(
        """
        SELECT account.did FROM recipient JOIN account ON account.id = recipient.account_id
        WHERE recipient.did_digest = ? AND recipient.registered IS NOT NULL
        """,
        (compute_did_digest(recipient_did),),
    )
    return owner


def list_spellings(connection: StoreConnection, recipient_did: str) -> list[str]:
    """Names under which a DID is registered, in order of registration."""
    registration = _find_registration(connection, recipient_did)
    return [] if registration is None else [name for _, name in registration[2].spellings]


def update_recipients(
    connection: StoreConnection, did: str, updates: Sequence[tuple[str, RecipientUpdateAction]], max_recipients: int
) -> list[RecipientUpdateResult]:
    """
    Apply updates in order, with one result each.

    :raise MediationNotGranted: there is no such account.
    """
    account_number = get_account_id(connection, did)
    if account_number is None:
        raise MediationNotGranted()
    connection.clear_cache()
    return [
        _add_recipient(connection, account_number, recipient_did, max_recipients)
        if action == "add"
        else _remove_recipient(connection, account_number, recipient_did)
        for recipient_did, action in updates
    ]


def list_recipients(connection: StoreConnection, account: str, offset: int, limit: int) -> tuple[list[str], int]:
    row = connection.execute("SELECT id, recipients FROM account WHERE did_key = ?", (hash_did(account),)).fetchone()
    if row is None:
        return [], 0
    rows = connection.execute(
        """
        SELECT did, registered, names FROM recipient WHERE account_id = ? AND registered IS NOT NULL
        ORDER BY registered LIMIT ?
        """,
        (row[0], offset + limit if limit else 0),
    )
    return slice_spellings([_parse_spellings(*one) for one in rows], offset, limit), row[1]


def move_account(connection: StoreConnection, prior: str, new: str) -> bool:
    if (
        get_account_id(connection, prior) is None
        or get_account_id(connection, new) is not None
        or is_retired(connection, new)
    ):
        return False
    connection.clear_cache()
    connection.execute(
        "UPDATE account SET did = ?, did_key = ? WHERE did_key = ?", (new, hash_did(new), hash_did(prior))
    )
    connection.execute("INSERT INTO retired (did) VALUES (?)", (prior,))
    return True


def remember_did(connection: StoreConnection, short: str, long: str) -> None:
    connection.execute(
        "INSERT INTO did_document VALUES (?, ?) ON CONFLICT DO UPDATE SET long = excluded.long", (short, long)
    )


def recall_did(connection: StoreConnection, short: str) -> str | None:
    long: str | None = connection.select_value("SELECT long FROM did_document WHERE short = ?", (short,))
    return long


def is_retired(connection: StoreConnection, did: str) -> bool:
    return connection.select_value("SELECT 1 FROM retired WHERE did = ?", (did,)) is not None


def _find_registration(connection: StoreConnection, name: str) -> tuple[int, int, RegisteredSpellings] | None:
    """Numbers of account and recipient, and registered spellings of a DID."""
    row = connection.execute(
        """
        SELECT account_id, id, did, registered, names FROM recipient WHERE did_digest = ? AND registered IS NOT NULL
        """,
        (compute_did_digest(name),),
    ).fetchone()
    return None if row is None else (row[0], row[1], _parse_spellings(*row[2:]))


def _add_recipient(
    connection: StoreConnection, account_number: int, name: str, max_recipients: int
) -> RecipientUpdateResult:
    owner, recipient_id, names = _find_registration(connection, name) or (account_number, 0, None)
    if owner != account_number:
        return "client_error"
    if names is not None and name in names:
        return "no_change"
    number, place = _take_place(connection, account_number)
    if number >= max_recipients or (names is not None and len(names) >= MAX_REGISTERED_SPELLINGS):
        return "client_error"
    if names is None:
        _register_recipient(connection, account_number, name, place)
    else:
        names.add(name, place)
        _save_spellings(connection, recipient_id, names)
        _change_name_count(connection, account_number, 1)
    return "success"


def _register_recipient(connection: StoreConnection, account_number: int, name: str, place: int) -> None:
    digest, did = compute_did_digest(name), canonicalize_did(name)
    # Messages left over from an earlier registration belong to the queue again, and count against its limits.
    left_over = connection.execute(
        "SELECT id, did FROM recipient WHERE did_digest = ? AND account_id = ? AND registered IS NULL",
        (digest, account_number),
    ).fetchone()
    names = RegisteredSpellings(did if left_over is None else left_over[1], None)
    names.add(name, place)
    if left_over is not None:
        _save_spellings(connection, left_over[0], names)
        return
    connection.execute(
        "INSERT INTO recipient (account_id, did, did_digest, registered, names) VALUES (?, ?, ?, ?, ?)",
        (account_number, did, digest, place, _serialize_spellings(names)),
    )


def _remove_recipient(connection: StoreConnection, account_number: int, name: str) -> RecipientUpdateResult:
    owner, recipient_id, names = _find_registration(connection, name) or (0, 0, RegisteredSpellings(name, None))
    if owner != account_number or name not in names:
        return "no_change"
    names.remove(name)
    _save_spellings(connection, recipient_id, names)
    if names:
        _change_name_count(connection, account_number, -1)
    return "success"


def _take_place(connection: StoreConnection, account_number: int) -> tuple[int, int]:
    """Number of spellings that an account has registered, and the next place in their order."""
    row: tuple[int, int] = connection.execute(
        "UPDATE account SET places = places + 1 WHERE id = ? RETURNING recipients, places", (account_number,)
    ).fetchone()
    return row


def _save_spellings(connection: StoreConnection, recipient_id: int, names: RegisteredSpellings) -> None:
    """Write the spellings of a recipient; triggers count the first and the last one."""
    connection.execute(
        "UPDATE recipient SET registered = ?, names = ? WHERE id = ?",
        (names.place, _serialize_spellings(names), recipient_id),
    )


def _change_name_count(connection: StoreConnection, account_number: int, difference: int) -> None:
    connection.execute("UPDATE account SET recipients = recipients + ? WHERE id = ?", (difference, account_number))


def _parse_spellings(did: str, place: int | None, stored: str | None) -> RegisteredSpellings:
    return RegisteredSpellings(did, place, None if stored is None else json.loads(stored))


def _serialize_spellings(names: RegisteredSpellings) -> str | None:
    return None if names.stored is None else json.dumps(names.stored)
