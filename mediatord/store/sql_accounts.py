"""Accounts and recipient DIDs in SQL; each function runs inside a transaction of the caller."""

from __future__ import annotations

from collections.abc import Sequence
from sqlite3 import Connection

from mediatord.errors import NotEnrolled
from mediatord.interfaces import Account, Action, UpdateResult
from mediatord.store.known_queues import forget_queues


def account(connection: Connection, did: str) -> Account | None:
    row = connection.execute("SELECT did, created_at, draft03 FROM account WHERE did = ?", (did,)).fetchone()
    return None if row is None else Account(row[0], row[1], bool(row[2]))


def account_id(connection: Connection, did: str) -> int | None:
    """The number that an account keeps for good, whatever its DID."""
    row = connection.execute("SELECT id FROM account WHERE did = ?", (did,)).fetchone()
    return None if row is None else row[0]


def grant(connection: Connection, did: str, now: float) -> Account:
    """:raise NotEnrolled: the DID was rotated away from."""
    if is_retired(connection, did):
        raise NotEnrolled()
    connection.execute("INSERT INTO account (did, created_at) VALUES (?, ?) ON CONFLICT DO NOTHING", (did, now))
    granted = account(connection, did)
    assert granted is not None
    return granted


def mark_draft03(connection: Connection, did: str) -> None:
    connection.execute("UPDATE account SET draft03 = 1 WHERE did = ?", (did,))


def owner(connection: Connection, recipient_did: str) -> str | None:
    row = connection.execute(
        """
        SELECT account.did FROM recipient JOIN account ON account.id = recipient.account_id
        WHERE recipient.did = ? AND recipient.registered IS NOT NULL
        """,
        (recipient_did,),
    ).fetchone()
    return None if row is None else row[0]


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
    row = connection.execute("SELECT id, recipients FROM account WHERE did = ?", (did,)).fetchone()
    if row is None:
        return [], 0
    dids = connection.execute(
        """
        SELECT did FROM recipient WHERE account_id = ? AND registered IS NOT NULL
        ORDER BY registered LIMIT ? OFFSET ?
        """,
        (row[0], limit, offset),
    )
    return [did for (did,) in dids], row[1]


def move(connection: Connection, prior: str, new: str) -> bool:
    if (
        account_id(connection, prior) is None
        or account_id(connection, new) is not None
        or is_retired(connection, new)
    ):
        return False
    forget_queues(connection)
    connection.execute("UPDATE account SET did = ? WHERE did = ?", (new, prior))
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


def _add(connection: Connection, account_number: int, did: str, max_recipients: int) -> UpdateResult:
    owned = connection.execute(
        "SELECT account_id FROM recipient WHERE did = ? AND registered IS NOT NULL", (did,)
    ).fetchone()
    if owned is not None:
        return "no_change" if owned[0] == account_number else "client_error"
    if (
        connection.execute("SELECT recipients FROM account WHERE id = ?", (account_number,)).fetchone()[0]
        >= max_recipients
    ):
        return "client_error"
    (place,) = connection.execute(
        "SELECT coalesce(max(registered), 0) + 1 FROM recipient WHERE account_id = ?", (account_number,)
    ).fetchone()
    # What was left over from an earlier registration belongs to it again, and counts against its limits.
    returned = connection.execute(
        "UPDATE recipient SET registered = ? WHERE did = ? AND account_id = ? AND registered IS NULL",
        (place, did, account_number),
    )
    if not returned.rowcount:
        connection.execute(
            "INSERT INTO recipient (account_id, did, registered) VALUES (?, ?, ?)", (account_number, did, place)
        )
    return "success"


def _remove(connection: Connection, account_number: int, did: str) -> UpdateResult:
    removed = connection.execute(
        "UPDATE recipient SET registered = NULL WHERE did = ? AND account_id = ? AND registered IS NOT NULL",
        (did, account_number),
    )
    return "success" if removed.rowcount else "no_change"
