"""The ledger of the SQLite store: reads, writes, and killed processes."""

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


class LedgerReadTests(CommitTestCase):
    """Reads, which happen every minute."""

    def test_read_does_not_block(self) -> None:
        """The ledger is read in the background and waits neither for a commit nor for a page read."""
        self.finish(self.enqueue_ids("a", "b"))
        self.writer.hold()
        self.reader.hold()
        self.assertEqual(self.finish(self.store.read_ledger()).didcomm, MessageLedger(accepted=2, waiting=2))
        self.reader.release()

    def test_too_many_messages_are_not_counted(self) -> None:
        """Beyond the limit the number waiting is unknown, and so is the balance; up to it they are counted."""
        self.finish(self.enqueue_ids("a", "b", "c"))
        with closing(open_database(self.path)) as connection:
            ledgers = queue_statistics.read_ledger(connection, most=2)
            self.assertEqual(ledgers.didcomm, MessageLedger(accepted=3, waiting=None))
            self.assertIsNone(ledgers.didcomm.difference)
            self.assertEqual(ledgers.decentrl, MessageLedger())
            self.assertEqual(queue_statistics.read_ledger(connection, most=3).didcomm.difference, 0)

    def test_lost_or_unaccepted_rows_are_a_difference(self) -> None:
        """Rows that are missing, or were never accepted, show as a difference."""
        self.finish(self.enqueue_ids("a", "b", "c"))
        with closing(open_database(self.path)) as connection:
            connection.execute("DELETE FROM message WHERE id = 'b'")
        self.assertEqual(self.finish(self.store.read_ledger()).didcomm.difference, 1)


class LedgerWriteTests(CommitTestCase):
    """The ledger changes in the same transaction as the messages."""

    limits = QueueLimits(max_messages=4, when_full="refuse", share=0.5)

    def test_retried_operations_count_once(self) -> None:
        """Operations of a batch that was rolled back and retried singly count once."""

        def fail(_connection: Connection) -> None:
            raise RuntimeError

        with closing(open_database(self.path)) as connection:
            works: list[SQLOperation] = [self.make_work("a"), fail, self.make_work("b"), self.make_work("a")]
            outcomes = connection.commit_batch(works)
            self.assertEqual([isinstance(outcome, EnqueueResult) for outcome in outcomes], [True, False, True, False])
            self.assertEqual(queue_statistics.read_ledger(connection).didcomm, MessageLedger(accepted=2, waiting=2))

    def test_manual_transaction_writes_ledger(self) -> None:
        """A transaction outside of a batch writes the ledger at once, whatever ran before on the connection."""
        with closing(open_database(self.path)) as connection:
            connection.commit_batch([self.make_work("a"), self.make_work("b")])
            connection.execute("BEGIN IMMEDIATE")
            message_writes.purge_messages(connection, ["a"])
            connection.execute("COMMIT")
            self.assertEqual(
                queue_statistics.read_ledger(connection).didcomm, MessageLedger(accepted=2, removed=1, waiting=1)
            )

    def make_work(self, id: str) -> EnqueueOperation:
        payload = make_payload(id)
        return EnqueueOperation(EnqueueRequest(INBOX, (payload,), NOON + 60), self.limits, NOON, len(payload.data))

    def test_refusal_does_not_undo_batch(self) -> None:
        """Refused works, alone or with others, do not undo the batch."""
        self.finish(self.enqueue_ids("a", "b"))
        before = count_wal_commits(self.path)
        one = EnqueueRequest(INBOX, (make_payload("c"),), NOON + 60, origin=SENDER)
        more = [EnqueueRequest(INBOX, (make_payload(id),), NOON + 60, origin=SENDER) for id in "defg"]
        refused_requests = self.store.enqueue_all(more)
        stored = self.store.enqueue_each([one])
        also_refused = self.store.enqueue_all(more[:3])
        alone = self.enqueue_ids("h", "i", "j")
        self.run_iterations()
        self.assertEqual(count_wal_commits(self.path) - before, 1)
        self.failureResultOf(refused_requests, QueueFull)
        self.failureResultOf(also_refused, QueueFull)
        self.failureResultOf(alone, QueueFull)
        self.successResultOf(stored)
        self.assertEqual(self.list_stored(), ["a", "b", "c"])
        ledgers = self.finish(self.store.read_ledger())
        self.assertEqual(ledgers, StoreLedger(MessageLedger(accepted=3, waiting=3)))


@pytest.mark.system
class KillTests(SynchronousTestCase):
    """Processes killed at random moments."""

    def test_ledger_balances_after_kills(self) -> None:
        """After every kill the ledger balances and has all reported outcomes, and reported connections are stored."""
        self.path, seed = make_database_path(self), SystemRandom().randrange(1 << 32)
        reported: Counter[tuple[str, str]] = Counter()
        random = Random(seed)
        for death in range(DEATHS):
            for line in self.run_and_kill(f"{seed}-{death}", random.randrange(100, 400)):
                protocol, entry, number = line.split()
                reported[protocol, entry] += int(number)
            with closing(open_database(self.path)) as connection:
                self.assertEqual(find_miscounts(connection), [], f"seed {seed}")
                ledgers = queue_statistics.read_ledger(connection)
                ((connections,),) = connection.execute("SELECT count(*) FROM v1_connection").fetchall()
            self.assertGreaterEqual(connections, reported["v1", "connected"], f"seed {seed}")
            self.reconcile("didcomm", ledgers.didcomm, reported, seed)
            self.reconcile("decentrl", ledgers.decentrl, reported, seed)
        for protocol, ledger in (("didcomm", ledgers.didcomm), ("decentrl", ledgers.decentrl)):
            self.assertGreater(ledger.acknowledged, 0, f"{protocol}, seed {seed}")

    def reconcile(self, protocol: str, ledger: MessageLedger, reported: Counter[tuple[str, str]], seed: int) -> None:
        self.assertEqual(ledger.difference, 0, f"{protocol}, seed {seed}")
        for entry in LEDGER_ENTRIES:
            self.assertGreaterEqual(
                getattr(ledger, entry), reported[protocol, entry], f"{protocol} {entry}, seed {seed}"
            )

    def run_and_kill(self, seed: str, lines: int) -> list[str]:
        """Outcomes reported by a process until it was killed after so many lines."""
        command = [sys.executable, "-m", "tests.store.sqlite.churn_process", str(self.path), seed]
        child = subprocess.Popen(command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        with child.stdout:
            reported = [child.stdout.readline() for _ in range(lines)]
            child.kill()
            reported += child.stdout.readlines()
        child.wait()
        return [line for line in reported if line.endswith("\n")]
