"""The ledger of the SQLite store: how it is written and read, and that no death of a process makes it wrong."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from random import Random, SystemRandom
from sqlite3 import Connection

import pytest
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import QueueFull
from mediatord.store.interfaces.messages import (
    LEDGER_ENTRIES,
    EnqueueRequest,
    EnqueueResult,
    MessageLedger,
    QueueLimits,
    StoreLedger,
)
from mediatord.store.sqlite import message_writes, queue_statistics
from mediatord.store.sqlite.connection import SQLOperation
from mediatord.store.sqlite.database_file import open_database
from mediatord.store.sqlite.message_writes import EnqueueOperation
from tests.store.builders import NOON, make_database_path, make_payload
from tests.store.sqlite.commit_test_case import INBOX, CommitTestCase, count_wal_commits
from tests.store.sqlite.operations import find_miscounts

DEATHS = 4
SENDER = 0x0001_0001


class ReadingTests(CommitTestCase):
    """What is asked every minute."""

    def test_holds_nobody_up(self) -> None:
        """It is counted where nobody waits, and does not wait for a commit or a page that is read."""
        self.done(self.put("a", "b"))
        self.writer.hold()
        self.reader.hold()
        self.assertEqual(self.done(self.store.read_ledger()).didcomm, MessageLedger(accepted=2, waiting=2))
        self.reader.let_go()

    def test_too_many_to_be_counted(self) -> None:
        """Then it is not known what waits, nor that all is well; exactly so many are counted."""
        self.done(self.put("a", "b", "c"))
        with closing(open_database(self.path)) as connection:
            books = queue_statistics.read_ledger(connection, most=2)
            self.assertEqual(books.didcomm, MessageLedger(accepted=3, waiting=None))
            self.assertIsNone(books.didcomm.difference)
            self.assertEqual(books.decentrl, MessageLedger())
            self.assertEqual(queue_statistics.read_ledger(connection, most=3).didcomm.difference, 0)

    def test_rows_are_counted(self) -> None:
        """What is missing, or there and was never accepted, shows as a difference."""
        self.done(self.put("a", "b", "c"))
        with closing(open_database(self.path)) as connection:
            connection.execute("DELETE FROM message WHERE id = 'b'")
        self.assertEqual(self.done(self.store.read_ledger()).didcomm.difference, 1)


class WritingTests(CommitTestCase):
    """It changes with the messages or not at all."""

    limits = QueueLimits(max_messages=4, when_full="refuse", share=0.5)

    def test_undone_and_done_again(self) -> None:
        """Operations of a batch that was undone, and are tried by themselves, count once."""

        def fail(_connection: Connection) -> None:
            raise RuntimeError

        with closing(open_database(self.path)) as connection:
            works: list[SQLOperation] = [self.a_work("a"), fail, self.a_work("b"), self.a_work("a")]
            outcomes = connection.commit_batch(works)
            self.assertEqual([isinstance(outcome, EnqueueResult) for outcome in outcomes], [True, False, True, False])
            self.assertEqual(queue_statistics.read_ledger(connection).didcomm, MessageLedger(accepted=2, waiting=2))

    def test_outside_of_batches(self) -> None:
        """A transaction that was begun by hand writes it at once, whatever the connection has done before."""
        with closing(open_database(self.path)) as connection:
            connection.commit_batch([self.a_work("a"), self.a_work("b")])
            connection.execute("BEGIN IMMEDIATE")
            message_writes.purge_messages(connection, ["a"])
            connection.execute("COMMIT")
            self.assertEqual(
                queue_statistics.read_ledger(connection).didcomm, MessageLedger(accepted=2, removed=1, waiting=1)
            )

    def a_work(self, id: str) -> EnqueueOperation:
        payload = make_payload(id)
        return EnqueueOperation(EnqueueRequest(INBOX, (payload,), NOON + 60), self.limits, NOON, len(payload.data))

    def test_refusals_disturb_nobody(self) -> None:
        """What is refused in a batch, alone or with others, does not undo it."""
        self.done(self.put("a", "b"))
        before = count_wal_commits(self.path)
        one = EnqueueRequest(INBOX, (make_payload("c"),), NOON + 60, origin=SENDER)
        more = [EnqueueRequest(INBOX, (make_payload(id),), NOON + 60, origin=SENDER) for id in "defg"]
        refused = self.store.enqueue_all(more)
        stored = self.store.enqueue_each([one])
        also_refused = self.store.enqueue_all(more[:3])
        alone = self.put("h", "i", "j")
        self.turn()
        self.assertEqual(count_wal_commits(self.path) - before, 1)
        self.failureResultOf(refused, QueueFull)
        self.failureResultOf(also_refused, QueueFull)
        self.failureResultOf(alone, QueueFull)
        self.successResultOf(stored)
        self.assertEqual(self.stored(), ["a", "b", "c"])
        books = self.done(self.store.read_ledger())
        self.assertEqual(books, StoreLedger(MessageLedger(accepted=3, waiting=3)))


@pytest.mark.system
class KillTests(SynchronousTestCase):
    """Deaths in the middle of it."""

    def test_killed_again_and_again(self) -> None:
        """Nothing is unaccounted for after any of them, and what was told has happened."""
        self.path, seed = make_database_path(self), SystemRandom().randrange(1 << 32)
        told: Counter[tuple[str, str]] = Counter()
        random = Random(seed)
        for death in range(DEATHS):
            for line in self.churn(f"{seed}-{death}", random.randrange(100, 400)):
                protocol, entry, number = line.split()
                told[protocol, entry] += int(number)
            with closing(open_database(self.path)) as connection:
                self.assertEqual(find_miscounts(connection), [], f"seed {seed}")
                books = queue_statistics.read_ledger(connection)
            self.reconcile("didcomm", books.didcomm, told, seed)
            self.reconcile("decentrl", books.decentrl, told, seed)
        for protocol, ledger in (("didcomm", books.didcomm), ("decentrl", books.decentrl)):
            self.assertGreater(ledger.acknowledged, 0, f"{protocol}, seed {seed}")

    def reconcile(self, protocol: str, ledger: MessageLedger, told: Counter[tuple[str, str]], seed: int) -> None:
        self.assertEqual(ledger.difference, 0, f"{protocol}, seed {seed}")
        for entry in LEDGER_ENTRIES:
            self.assertGreaterEqual(getattr(ledger, entry), told[protocol, entry], f"{protocol} {entry}, seed {seed}")

    def churn(self, seed: str, lines: int) -> list[str]:
        """What a process has told until it was killed, after so many lines."""
        command = [sys.executable, "-m", "tests.store.sqlite.churn_process", str(self.path), seed]
        child = subprocess.Popen(command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        with child.stdout:
            told = [child.stdout.readline() for _ in range(lines)]
            child.kill()
            told += child.stdout.readlines()
        child.wait()
        return [line for line in told if line.endswith("\n")]
