"""Accounts and recipient DIDs in SQL; each function runs inside a transaction of the caller."""

from __future__ import annotations

import json
from collections.abc import Sequence
from sqlite3 import Connection

from mediatord.errors import NotEnrolled
from mediatord.interfaces import FIRST_DAY, Account, AccountUsage, Action, ExpiredAccount, ExpiryReason, UpdateResult
from mediatord.protocol.canonical_did import canonical_did, did_digest
from mediatord.store.known_queues import forget_queues
from mediatord.store.recipient_names import MAX_NAMES, RecipientNames, page
from mediatord.store.sql_rows import key_of

_NOTHING_WAITS = "NOT EXISTS (SELECT 1 FROM queue WHERE account_id = account.id)"


def account(connection: Connection, did: str) -> Account | None:
    query = "SELECT did, created_at, draft03, seen_at FROM account WHERE did_key = ?"
    row = connection.execute(query, (key_of(did),)).fetchone()
    return None if row is None else Account(row[0], row[1], bool(row[2]), row[3])


def account_id(connection: Connection, did: str) -> int | None:
    """The number that an account keeps for good, whatever its DID."""
    row = connection.execute("SELECT id FROM account WHERE did_key = ?", (key_of(did),)).fetchone()
    return None if row is None else row[0]


def grant(connection: Connection, did: str, now: float) -> Account:
    """:raise NotEnrolled: the DID was rotated away from."""
    if is_retired(connection, did):
        raise NotEnrolled()
    connection.execute(
        """
        INSERT INTO account (did, did_key, created_at, seen_at, fresh) VALUES (?, ?, ?, ?, 1) ON CONFLICT DO NOTHING
        """,
        (did, key_of(did), now, now),
    )
    granted = account(connection, did)
    assert granted is not None
    return granted


def touch(connection: Connection, did: str, now: float) -> None:
    connection.execute(
        """
        UPDATE account SET seen_at = ?, fresh = CASE WHEN ? - created_at >= ? THEN 0 ELSE fresh END
        WHERE did_key = ?
        """,
        (now, now, FIRST_DAY, key_of(did)),
    )


def usage(connection: Connection) -> AccountUsage:
    counts = dict(connection.execute("SELECT name, value FROM tally").fetchall())
    return AccountUsage(counts["accounts"], counts["registration_bytes"])


def expire_accounts(
    connection: Connection, limit: int, unused_before: float | None, idle_before: float | None
) -> list[ExpiredAccount]:
    expired: list[ExpiredAccount] = []
    searches: tuple[tuple[ExpiryReason, str, float | None], ...] = (
        ("unused", "fresh = 1 AND created_at <= ? ORDER BY created_at", unused_before),
        ("idle", f"seen_at <= ? AND {_NOTHING_WAITS} ORDER BY seen_at", idle_before),
    )
    for reason, condition, before in searches:
        if before is not None and len(expired) < limit:
            query = f"SELECT id, did, recipients FROM account WHERE {condition} LIMIT ?"
            for number, did, recipients in connection.execute(query, (before, limit - len(expired))).fetchall():
                _delete(connection, number, did)
                expired.append(ExpiredAccount(did, recipients, reason))
    if expired:
        forget_queues(connection)
    return expired


def remove_account(connection: Connection, did: str) -> bool:
    """Remove it with all that it has registered, unless something waits for it; whether that was done."""
    query = f"SELECT id FROM account WHERE did_key = ? AND {_NOTHING_WAITS}"
    row = connection.execute(query, (key_of(did),)).fetchone()
    if row is None:
        return False
    _delete(connection, row[0], did)
    forget_queues(connection)
    return True


def unregister(connection: Connection, did: str) -> None:
    """Remove all that an account has registered; what waits for it stays."""
    number = account_id(connection, did)
    forget_queues(connection)
    connection.execute(
        "UPDATE recipient SET registered = NULL, names = NULL WHERE account_id = ? AND registered IS NOT NULL",
        (number,),
    )


def _delete(connection: Connection, account_number: int, did: str) -> None:
    connection.execute("DELETE FROM recipient WHERE account_id = ?", (account_number,))
    connection.execute("DELETE FROM did_document WHERE short = ?", (did,))
    connection.execute("DELETE FROM account WHERE id = ?", (account_number,))


def mark_draft03(connection: Connection, did: str) -> None:
    connection.execute("UPDATE account SET draft03 = 1 WHERE did_key = ?", (key_of(did),))


def owner(connection: Connection, recipient_did: str) -> str | None:
    row = connection.execute(
        """
        SELECT account.did FROM recipient JOIN account ON account.id = recipient.account_id
        WHERE recipient.did_digest = ? AND recipient.registered IS NOT NULL
        """,
        (did_digest(recipient_did),),
    ).fetchone()
    return None if row is None else row[0]


def spellings(connection: Connection, recipient_did: str) -> list[str]:
    """Those under which somebody has registered it, in order of registration."""
    row = connection.execute(
        "SELECT did, registered, names FROM recipient WHERE did_digest = ? AND registered IS NOT NULL",
        (did_digest(recipient_did),),
    ).fetchone()
    return [] if row is None else [name for _, name in _names(*row).spellings]


def update(
    connection: Connection, did: str, updates: Sequence[tuple[str, Action]], max_recipients: int
) -> list[UpdateResult]:
    """:raise NotEnrolled: there is no such account."""
    account_number = account_id(connection, did)
    if account_number is None:
        raise NotEnrolled()
    forget_queues(connection)
    return [
        _add(connection, account_number, recipient_did, max_recipients)
        if action == "add"
        else _remove(connection, account_number, recipient_did)
        for recipient_did, action in updates
    ]


def recipients(connection: Connection, did: str, offset: int, limit: int) -> tuple[list[str], int]:
    row = connection.execute("SELECT id, recipients FROM account WHERE did_key = ?", (key_of(did),)).fetchone()
    if row is None:
        return [], 0
    rows = connection.execute(
        """
        SELECT did, registered, names FROM recipient WHERE account_id = ? AND registered IS NOT NULL
        ORDER BY registered LIMIT ?
        """,
        (row[0], offset + limit if limit else 0),
    )
    return page([_names(*one) for one in rows], offset, limit), row[1]


def move(connection: Connection, prior: str, new: str) -> bool:
    if (
        account_id(connection, prior) is None
        or account_id(connection, new) is not None
        or is_retired(connection, new)
    ):
        return False
    forget_queues(connection)
    connection.execute("UPDATE account SET did = ?, did_key = ? WHERE did_key = ?", (new, key_of(new), key_of(prior)))
    connection.execute("INSERT INTO retired (did) VALUES (?)", (prior,))
    return True


def remember_did(connection: Connection, short: str, long: str) -> None:
    connection.execute(
        "INSERT INTO did_document VALUES (?, ?) ON CONFLICT DO UPDATE SET long = excluded.long", (short, long)
    )


def recall_did(connection: Connection, short: str) -> str | None:
    row = connection.execute("SELECT long FROM did_document WHERE short = ?", (short,)).fetchone()
    return None if row is None else row[0]


def is_retired(connection: Connection, did: str) -> bool:
    return connection.execute("SELECT 1 FROM retired WHERE did = ?", (did,)).fetchone() is not None


def _add(connection: Connection, account_number: int, name: str, max_recipients: int) -> UpdateResult:
    digest = did_digest(name)
    owned = connection.execute(
        """
        SELECT account_id, id, did, registered, names FROM recipient WHERE did_digest = ? AND registered IS NOT NULL
        """,
        (digest,),
    ).fetchone()
    if owned is not None and owned[0] != account_number:
        return "client_error"
    names = None if owned is None else _names(*owned[2:])
    if names is not None and name in names:
        return "no_change"
    number, place = _numbers(connection, account_number)
    if number >= max_recipients or (names is not None and len(names) >= MAX_NAMES):
        return "client_error"
    if names is None:
        _register(connection, account_number, name, place)
    else:
        names.add(name, place)
        _rename(connection, owned[1], names)
        _count(connection, account_number, 1)
    return "success"


def _register(connection: Connection, account_number: int, name: str, place: int) -> None:
    digest, did = did_digest(name), canonical_did(name)
    # What was left over from an earlier registration belongs to it again, and counts against its limits.
    left_over = connection.execute(
        "SELECT id, did FROM recipient WHERE did_digest = ? AND account_id = ? AND registered IS NULL",
        (digest, account_number),
    ).fetchone()
    names = RecipientNames(did if left_over is None else left_over[1], None)
    names.add(name, place)
    if left_over is not None:
        _rename(connection, left_over[0], names)
        return
    connection.execute(
        "INSERT INTO recipient (account_id, did, did_digest, registered, names) VALUES (?, ?, ?, ?, ?)",
        (account_number, did, digest, place, _stored(names)),
    )


def _remove(connection: Connection, account_number: int, name: str) -> UpdateResult:
    owned = connection.execute(
        """
        SELECT id, did, registered, names FROM recipient
        WHERE did_digest = ? AND account_id = ? AND registered IS NOT NULL
        """,
        (did_digest(name), account_number),
    ).fetchone()
    names = None if owned is None else _names(*owned[1:])
    if names is None or name not in names:
        return "no_change"
    names.remove(name)
    _rename(connection, owned[0], names)
    if names:
        _count(connection, account_number, -1)
    return "success"


def _numbers(connection: Connection, account_number: int) -> tuple[int, int]:
    """How many names an account has registered, and the next place in their order."""
    row: tuple[int, int] = connection.execute(
        "UPDATE account SET places = places + 1 WHERE id = ? RETURNING recipients, places", (account_number,)
    ).fetchone()
    return row


def _rename(connection: Connection, recipient_id: int, names: RecipientNames) -> None:
    """Registrations that come and go whole are counted by triggers."""
    connection.execute(
        "UPDATE recipient SET registered = ?, names = ? WHERE id = ?", (names.place, _stored(names), recipient_id)
    )


def _count(connection: Connection, account_number: int, difference: int) -> None:
    connection.execute("UPDATE account SET recipients = recipients + ? WHERE id = ?", (difference, account_number))


def _names(did: str, place: int | None, stored: str | None) -> RecipientNames:
    return RecipientNames(did, place, None if stored is None else json.loads(stored))


def _stored(names: RecipientNames) -> str | None:
    return None if names.stored is None else json.dumps(names.stored)
