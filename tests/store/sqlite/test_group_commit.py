"""How the SQLite store groups what it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import MediationNotGranted, ReplayCacheFull, StoreUnavailable, UnknownRecipient
from mediatord.store.interfaces.messages import EnqueueRequest, EnqueueResult
from mediatord.store.interfaces.store import BatchLimits
from mediatord.store.sqlite.connection import StoreConnection
from mediatord.store.sqlite.database_file import open_database
from mediatord.store.sqlite.executor import write_ping
from tests.store.builders import ALICE, BOB, NOON, make_database_path, make_payload
from tests.store.sqlite.commit_test_case import INBOX, CommitTestCase, count_wal_commits


class GroupCommitTests(CommitTestCase):
    """One transaction for all that is there (reference 12)."""

    def test_one_turn_one_commit(self) -> None:
        """What is asked for in one turn of the reactor is committed once, whatever it is."""
        before = count_wal_commits(self.path)
        asked = [self.put(f"m{number}") for number in range(100)]
        granted = self.store.grant(BOB)
        claimed = self.store.claim_nonce(b"key", NOON + 60)
        self.turn()
        for enqueued in asked:
            self.successResultOf(enqueued)
        self.successResultOf(granted)
        self.assertTrue(self.successResultOf(claimed))
        self.assertEqual(count_wal_commits(self.path) - before, 1)
        self.assertEqual(self.stored(), [f"m{number}" for number in range(100)])

    def test_waits_for_running_commit(self) -> None:
        """What is asked for while a transaction is running goes together into the next one."""
        before = count_wal_commits(self.path)
        self.writer.hold()
        first = self.put("first")
        self.turn()
        others = []
        for number in range(50):
            others.append(self.put(f"m{number}"))
            self.turn()
        self.writer.let_go()
        self.turn()
        for enqueued in (first, *others):
            self.successResultOf(enqueued)
        self.assertEqual(count_wal_commits(self.path) - before, 2)
        self.assertEqual(self.observed.count("commit"), 2)

    def test_nothing_before_the_commit(self) -> None:
        """No Deferred fires before what it stands for is committed."""
        self.writer.hold()
        enqueued = self.put("a")
        self.turn()
        self.assertNoResult(enqueued)
        self.assertEqual(self.stored(), [])
        self.writer.let_go()
        self.successResultOf(enqueued)
        self.assertEqual(self.stored(), ["a"])

    def test_reads_go_on(self) -> None:
        """While writing is stuck, reading is not."""
        self.done(self.put("a"))
        self.writer.hold()
        stuck = self.put("b")
        self.turn()
        self.assertEqual(self.done(self.store.find_owner(INBOX)), ALICE)
        self.assertEqual(self.done(self.store.get_queue_status(ALICE, None)).message_count, 1)
        self.assertEqual(self.stored(), ["a"])
        self.assertNoResult(stuck)

    def test_reads_of_one_turn_go_in_one_hop(self) -> None:
        """All lookups of a turn cost one visit to the reading thread."""
        before = self.reader.hops
        asked = [self.store.find_owner(f"did:example:{number}") for number in range(100)]
        asked += [self.store.find_owner(INBOX), self.store.find_owner(INBOX)]
        self.turn()
        self.assertEqual([self.successResultOf(owner) for owner in asked], [None] * 100 + [ALICE] * 2)
        self.assertEqual(self.reader.hops - before, 1)

    def test_owner_is_remembered(self) -> None:
        """Who owns a DID is read once, and again when the registration may have changed."""
        self.done(self.store.find_owner(INBOX))
        before = self.reader.hops
        self.assertEqual(self.successResultOf(self.store.find_owner(INBOX)), ALICE)
        self.assertEqual(self.reader.hops, before)
        self.done(self.store.update_recipients(ALICE, [(INBOX, "remove")], max_recipients=9))
        self.assertIsNone(self.done(self.store.find_owner(INBOX)))

    def test_owner_read_during_a_change(self) -> None:
        """An answer that was on its way while the registration changed is not remembered."""
        self.reader.hold()
        early = self.store.find_owner(INBOX)
        self.turn()
        self.done(self.store.update_recipients(ALICE, [(INBOX, "remove"), (INBOX, "add")], max_recipients=9))
        self.reader.let_go()
        self.assertEqual(self.successResultOf(early), ALICE)
        before = self.reader.hops
        self.done(self.store.find_owner(INBOX))
        self.assertEqual(self.reader.hops - before, 1)

    def test_refusal_is_its_own(self) -> None:
        """A deposit for nobody fails alone, in the same transaction as those that do not."""
        before = count_wal_commits(self.path)
        asked = self.put("a"), self.put("b", to="did:example:nobody"), self.put("c")
        self.turn()
        self.successResultOf(asked[0])
        self.failureResultOf(asked[1], UnknownRecipient)
        self.successResultOf(asked[2])
        self.assertEqual(self.stored(), ["a", "c"])
        self.assertEqual(count_wal_commits(self.path) - before, 1)

    def test_acknowledge_once_is_one_commit(self) -> None:
        """A nonce is claimed, messages are removed and the status is read in one transaction."""
        self.done(self.put("a", "b"))
        commits, reads = count_wal_commits(self.path), self.reader.hops
        done = self.done(self.store.acknowledge_once(ALICE, ["a"], b"key", NOON + 60, with_status=True))
        assert done is not None and done.status is not None
        self.assertEqual((len(done.removed), done.status.message_count), (1, 1))
        self.assertEqual((count_wal_commits(self.path) - commits, self.reader.hops - reads), (1, 0))

    def test_full_replay_memory_is_its_own(self) -> None:
        """A claim for which there is no room does not cost the others of its batch a commit each."""
        before = count_wal_commits(self.path)
        asked = self.put("a"), self.store.claim_nonce(b"key", NOON + 60, share=0.0), self.put("c")
        self.turn()
        self.successResultOf(asked[0])
        self.failureResultOf(asked[1], ReplayCacheFull)
        self.successResultOf(asked[2])
        self.assertEqual(self.stored(), ["a", "c"])
        self.assertEqual(count_wal_commits(self.path) - before, 1)

    def test_one_bad_apple(self) -> None:
        """An operation that the database refuses fails alone, and is undone alone."""
        asked = self.put("a"), self.put("b", "b"), self.put("c")
        self.turn()
        self.successResultOf(asked[0])
        self.failureResultOf(asked[1], StoreUnavailable)
        self.successResultOf(asked[2])
        self.assertEqual(self.stored(), ["a", "c"])

    def test_close_finishes(self) -> None:
        """Closing waits for what was accepted, refuses more, and leaves no write-ahead log."""
        self.writer.hold()
        running = self.put("running")
        self.turn()
        waiting = self.put("waiting")
        closed = self.store.close()
        self.failureResultOf(self.put("late"), StoreUnavailable)
        self.turn()
        self.assertNoResult(closed)
        self.writer.let_go()
        self.turn()
        self.successResultOf(running)
        self.successResultOf(waiting)
        self.successResultOf(closed)
        self.assertEqual([path.name for path in self.path.parent.iterdir()], [self.path.name])

    def test_observed(self) -> None:
        """The observer hears of each operation and of each commit."""
        self.done(self.put("a"))
        self.done(self.store.ping())
        self.assertEqual(self.observed, ["commit", "enqueue", "commit", "ping", "ping"])


class OutcomeTests(SynchronousTestCase):
    """What a work answers."""

    def setUp(self) -> None:
        self.connection = open_database(make_database_path(self))
        self.addCleanup(self.connection.close)

    def ping(self, answer: object) -> Callable[[StoreConnection], object]:
        """A work that writes and has this outcome."""

        def work(connection: StoreConnection) -> object:
            write_ping(connection)
            return answer

        return work

    def test_refusal_that_is_kept(self) -> None:
        """A work that returns its refusal, instead of raising it, keeps what it wrote, and disturbs nobody."""
        refusal = MediationNotGranted()
        outcomes = self.connection.commit_batch([self.ping("first"), self.ping(refusal), self.ping("last")])
        self.assertEqual(outcomes, ["first", refusal, "last"])
        self.assertFalse(self.connection.in_transaction)
        pings = self.connection.execute("SELECT value FROM counter WHERE name = 'pings'").fetchone()
        self.assertEqual(pings, (3,))


class BoundTests(CommitTestCase):
    """How much goes into a batch, and how much may wait."""

    write_limits = BatchLimits(batch=4, batch_bytes=100, waiting=6, waiting_bytes=250)
    read_limits = BatchLimits(batch_bytes=100, waiting_bytes=1 << 40)

    def test_batch_by_number(self) -> None:
        """No more than so many operations share a transaction."""
        before = count_wal_commits(self.path)
        asked = [self.store.claim_nonce(b"%d" % number, NOON + 9) for number in range(6)]
        self.turn()
        self.assertEqual([self.successResultOf(claimed) for claimed in asked], [True] * 6)
        self.assertEqual(count_wal_commits(self.path) - before, 2)

    def test_told_with_its_own_batch(self) -> None:
        """What is deposited together and takes several commits: each deposit is told of with the one it is in."""
        before, told = count_wal_commits(self.path), []
        deposits = [EnqueueRequest(INBOX, (make_payload(id, b"x"),), NOON + 9) for id in "abcdef"]

        def early(outcomes: Sequence[tuple[int, object]]) -> None:
            told.append(([place for place, _ in outcomes], count_wal_commits(self.path) - before, done.called))

        done = self.store.enqueue_each(deposits, early)
        self.turn()
        stored = self.successResultOf(done)
        self.assertEqual([one.messages[0].id for one in stored if isinstance(one, EnqueueResult)], list("abcdef"))
        self.assertEqual(told, [([0, 1, 2, 3], 1, False)])

    def test_who_is_told_fails(self) -> None:
        """The store goes on."""

        def early(outcomes: Sequence[tuple[int, object]]) -> None:
            raise ZeroDivisionError

        done = self.store.enqueue_each(
            [EnqueueRequest(INBOX, (make_payload(id, b"x"),), NOON + 9) for id in "abcdef"], early
        )
        self.turn()
        self.assertEqual(len(self.successResultOf(done)), 6)
        self.done(self.put("g"))

    def test_batch_by_bytes(self) -> None:
        """No more than so many bytes share a transaction, but one operation always goes."""
        before = count_wal_commits(self.path)
        asked = [self.put(id, data=b"x" * size) for id, size in (("a", 60), ("b", 60), ("c", 40), ("d", 10))]
        self.done(asked[-1])
        self.assertEqual(count_wal_commits(self.path) - before, 3)
        self.done(self.put("e", data=b"x" * 200))
        self.assertEqual(self.stored(), ["a", "b", "c", "d", "e"])

    def test_reads_by_bytes(self) -> None:
        """No more is read in one go than so many bytes at most, though any number of reads may wait."""
        self.done(self.put("a", data=b"x" * 30))
        before = self.reader.hops
        asked = [self.store.fetch_messages(ALICE, None, limit=9, max_bytes=50) for _ in range(6)]
        for _ in asked:
            self.turn()
        self.assertEqual([len(self.successResultOf(fetched)) for fetched in asked], [1] * 6)
        self.assertEqual(self.reader.hops - before, 3)

    def test_too_many_waiting(self) -> None:
        """Past a number of waiting operations more fail at once, until some are done (back-pressure)."""
        asked = [self.put(f"m{number}") for number in range(6)]
        self.failureResultOf(self.put("refused"), StoreUnavailable)
        self.turn()
        for enqueued in asked:
            self.successResultOf(enqueued)
        self.done(self.put("next"))
        self.assertNotIn("refused", self.stored())

    def test_too_much_waiting(self) -> None:
        """Past a number of waiting bytes more fail at once, until some are written (back-pressure)."""
        self.put("a", data=b"x" * 200)
        self.failureResultOf(self.put("refused", data=b"x" * 51), StoreUnavailable)
        self.put("b", data=b"x" * 50)
        self.turn()
        self.done(self.put("c", data=b"x" * 250))
        self.assertEqual(self.stored(), ["a", "b", "c"])
