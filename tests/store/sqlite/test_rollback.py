"""Transactions that cannot be rolled back: the connection is usable again with the next batch."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.store import Account
from mediatord.store.sqlite.account_queries import get_account, grant_account
from mediatord.store.sqlite.connection import StoreConnection
from mediatord.store.sqlite.executor import SQLiteExecutor
from tests.store.builders import ALICE, BOB, NOON, ImmediateClock, InlineRunner, make_database_path


def granting(did: str) -> Callable[[StoreConnection], Any]:
    """An operation that gives an account to a DID."""
    return lambda connection: grant_account(connection, did, NOON)


class RefusedRollback:
    """SQLite refuses so many ROLLBACKs of a connection."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self, connection: StoreConnection) -> None:
        """As an operation: it has written, and fails."""
        connection.set_authorizer(self._authorise)
        connection.execute("CREATE TABLE half_done (x)")
        raise ZeroDivisionError

    def read(self, connection: StoreConnection) -> None:
        """As an operation that reads."""
        connection.set_authorizer(self._authorise)

    def _authorise(self, action: int, what: str | None, *_: Any) -> int:
        if action == sqlite3.SQLITE_TRANSACTION and what == "ROLLBACK" and self.left:
            self.left -= 1
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK


class RollbackTests(SynchronousTestCase):
    """A ROLLBACK that fails once, a few times, always."""

    def setUp(self) -> None:
        self.file = SQLiteExecutor(make_database_path(self), ImmediateClock(), lambda kind: InlineRunner())
        self.successResultOf(self.file.open())
        self.addCleanup(lambda: self.successResultOf(self.file.close()))

    def granted(self, did: str) -> bool:
        return self.successResultOf(self.file.read("read", lambda c: get_account(c, did))) is not None

    def test_write(self) -> None:
        """What comes next is written, what was half done is not, however often the ROLLBACK fails."""
        for times in (1, 2, 3, 1_000_000):
            did = f"did:example:{times}"
            self.failureResultOf(self.file.write("write", RefusedRollback(times)), StoreUnavailable)
            self.successResultOf(self.file.write("write", granting(did)))
            self.assertTrue(self.granted(did))
            tables = self.successResultOf(
                self.file.read("read", lambda c: c.execute("SELECT name FROM sqlite_schema").fetchall())
            )
            self.assertNotIn(("half_done",), tables)

    def test_neighbours(self) -> None:
        """Those in the same batch are done once the ROLLBACK goes through, each on its own."""
        works: list[Callable[[StoreConnection], Any]] = [granting(ALICE), RefusedRollback(1), granting(BOB)]
        outcomes = self.successResultOf(self.file.write_each("write", [(work, 0) for work in works]))
        self.assertEqual([isinstance(outcome, Account) for outcome in outcomes], [True, False, True])
        self.assertTrue(self.granted(ALICE) and self.granted(BOB))

    def test_read(self) -> None:
        """A connection that reads is not stuck in its transaction, in which it would see nothing new."""
        for times in (1, 2, 1_000_000):
            self.successResultOf(self.file.read("read", RefusedRollback(times).read))
            did = f"did:example:{times}"
            self.successResultOf(self.file.write("write", granting(did)))
            self.assertTrue(self.granted(did))
