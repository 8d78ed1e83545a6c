"""Accounts in the file of the backend `sqlite`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from sqlite3 import Connection
from typing import Any, TypeVar

from mediatord.cli.account_records import AccountRecord
from mediatord.cli.queues.sqlite import WaitingInFile
from mediatord.store import sql_accounts
from mediatord.store.database import connect
from mediatord.store.locking import PATIENCE_SECONDS, begin, patiently
from mediatord.store.sql_rows import key_of

T = TypeVar("T")

_ACCOUNTS = """
    SELECT a.did, a.created_at, a.seen_at, a.fresh, a.recipients, coalesce(sum(q.messages), 0),
        coalesce(sum(q.bytes), 0)
    FROM ({}) a LEFT JOIN queue q ON q.account_id = a.id GROUP BY a.id ORDER BY a.created_at DESC, a.id DESC
"""
_NEWEST = _ACCOUNTS.format("SELECT * FROM account ORDER BY created_at DESC, id DESC LIMIT ?")
_ONE = _ACCOUNTS.format("SELECT * FROM account WHERE did_key = ?")
_QUEUED = """
    SELECT DISTINCT r.did FROM account a JOIN queue q ON q.account_id = a.id JOIN recipient r ON r.id = q.recipient_id
    WHERE a.did_key = ?
"""
_ALL = 1 << 31


class SQLiteAccountRecords(WaitingInFile):
    """:param path: of the database."""

    def accounts(self, top: int) -> tuple[list[AccountRecord], int]:
        """The newest, and how many there are in all."""
        with self._reading() as connection:
            (total,) = connection.execute("SELECT count(*) FROM account").fetchone()
            return [_record(row) for row in connection.execute(_NEWEST, (top,))], total

    def account_dids(self) -> list[str]:
        """Those of all accounts."""
        with self._reading() as connection:
            return [did for (did,) in connection.execute("SELECT did FROM account")]

    def account(self, did: str) -> AccountRecord | None:
        """The one with this DID."""
        with self._reading() as connection:
            row = connection.execute(_ONE, (key_of(did),)).fetchone()
            return None if row is None else _record(row)

    def names(self, did: str) -> list[str]:
        """What an account has registered, in order."""
        with self._reading() as connection:
            return sql_accounts.recipients(connection, did, 0, _ALL)[0]

    def queued_dids(self, did: str) -> list[str]:
        """Recipient DIDs of an account for which something waits, whether they are registered or not."""
        with self._reading() as connection:
            return [one for (one,) in connection.execute(_QUEUED, (key_of(did),))]

    def unregister(self, did: str) -> None:
        """Remove all that an account has registered, so that nothing more comes for it."""
        self._write(lambda connection: sql_accounts.unregister(connection, did))

    def remove_account(self, did: str) -> bool:
        """Remove an account for which nothing waits; whether that was done."""
        return self._write(lambda connection: sql_accounts.remove_account(connection, did))

    def _write(self, work: Callable[[Connection], T]) -> T:
        with self._complaining(), closing(connect(self._path)) as connection:
            self._check(connection)
            connection.execute("PRAGMA busy_timeout = 0")  # it is waited for in another way
            begin(connection, PATIENCE_SECONDS)
            done = work(connection)
            patiently(lambda: connection.execute("COMMIT"), PATIENCE_SECONDS)
            return done


def _record(row: Sequence[Any]) -> AccountRecord:
    did, created_at, seen_at, fresh, recipients, messages, size = row
    return AccountRecord(did, created_at, seen_at, not fresh, recipients, messages, size)
