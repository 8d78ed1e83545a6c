"""Failing rollbacks: the connection is usable again with the next batch."""

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


def make_grant(did: str) -> Callable[[StoreConnection], Any]:
    """An operation that creates an account."""
    return lambda connection: grant_account(connection, did, NOON)


class FailingRollback:
    """Makes SQLite deny a number of ROLLBACKs on a connection."""

    def __init__(self, times: int) -> None:
        self.remaining = times

    def __call__(self, connection: StoreConnection) -> None:
        """Operation that writes and fails."""
        connection.set_authorizer(self._authorise)
        connection.execute("CREATE TABLE half_done (x)")
        raise ZeroDivisionError

    def read(self, connection: StoreConnection) -> None:
        """Operation that reads."""
        connection.set_authorizer(self._authorise)

    def _authorise(self, action: int, what: str | None, *_: Any) -> int:
        if action == sqlite3.SQLITE_TRANSACTION and what == "ROLLBACK" and self.remaining:
            self.remaining -= 1
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK


class RollbackTests(SynchronousTestCase):
    """A ROLLBACK that fails once, a few times, always."""

    def setUp(self) -> None:
        self.file = SQLiteExecutor(make_database_path(self), ImmediateClock(), lambda kind: InlineRunner())
        self.successResultOf(self.file.open())
        self.addCleanup(lambda: self.successResultOf(self.file.close()))

    def list_accounts(self, did: str) -> bool:
        return self.successResultOf(self.file.read("read", lambda c: get_account(c, did))) is not None

    def test_next_batch_is_written(self) -> None:
        """The next batch is written and the failed one is not, however often the ROLLBACK fails."""
        for times in (1, 2, 3, 1_000_000):
            did = f"did:example:{times}"
            self.failureResultOf(self.file.write("write", FailingRollback(times)), StoreUnavailable)
            self.successResultOf(self.file.write("write", make_grant(did)))
            self.assertTrue(self.list_accounts(did))
            tables = self.successResultOf(
                self.file.read("read", lambda c: c.execute("SELECT name FROM sqlite_schema").fetchall())
            )
            self.assertNotIn(("half_done",), tables)

    def test_other_works_of_batch_are_retried(self) -> None:
        """Other works of the batch run singly once the ROLLBACK succeeds."""
        works: list[Callable[[StoreConnection], Any]] = [make_grant(ALICE), FailingRollback(1), make_grant(BOB)]
        outcomes = self.successResultOf(self.file.write_each("write", [(work, 0) for work in works]))
        self.assertEqual([isinstance(outcome, Account) for outcome in outcomes], [True, False, True])
        self.assertTrue(self.list_accounts(ALICE) and self.list_accounts(BOB))

    def test_reader_leaves_transaction(self) -> None:
        """A reading connection is not stuck in its transaction, in which it would see no changes."""
        for times in (1, 2, 1_000_000):
            self.successResultOf(self.file.read("read", FailingRollback(times).read))
            did = f"did:example:{times}"
            self.successResultOf(self.file.write("write", make_grant(did)))
            self.assertTrue(self.list_accounts(did))
