"""The SQLite store with real threads, and a killed process."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from threading import Event, current_thread, enumerate
from typing import Any
from unittest.mock import Mock

import pytest
from twisted.internet import reactor  # noqa: TID251  these tests make calls from real threads to it
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.interfaces import IReactorFromThreads, IReactorTime
from twisted.internet.task import Clock, deferLater
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SynchronousTestCase, TestCase

from mediatord.errors import StoreUnavailable
from mediatord.probe.store_health import StoreHealthMonitor
from mediatord.store.factory import build_store
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.interfaces.store import BatchLimits, ignore_observation
from mediatord.store.sqlite.connection import StoreConnection, connect, connect_reader
from mediatord.store.sqlite.executor import OperationBatcher, SQLiteExecutor, ThreadRunner
from mediatord.store.sqlite.sqlite_store import SQLiteStore
from tests.runtime.test_epoll_reactor import ReactorTestCase
from tests.store.builders import ALICE, HOUR, make_database_path, make_payload
from tests.store.sqlite.enqueue_process import INBOX

LINES = 100


def list_store_threads() -> set[str]:
    return {thread.name for thread in enumerate() if thread.name.startswith("mediatord-store")}


class ThreadTests(TestCase):
    """Real threads between open and close."""

    def setUp(self) -> None:
        self.path = make_database_path(self)
        self.clock = IReactorTime(reactor)
        self.observed: Counter[str] = Counter()
        self.store = build_store(
            "sqlite", self.clock, QueueLimits(), path=self.path, observe=lambda name, _: self.observed.update([name])
        )

    async def open_store(self) -> None:
        await self.store.open()
        self.addCleanup(self.store.close)
        await self.store.grant(ALICE)
        await self.store.update_recipients(ALICE, [(INBOX, "add")], max_recipients=9)

    def make_expiry(self) -> float:
        return self.clock.seconds() + HOUR

    async def test_concurrent_enqueues_are_ordered(self) -> None:
        """Hundreds of concurrent enqueues are all stored, in order of submission, in a few commits."""
        await self.open_store()
        before = self.observed["commit"]
        names = [f"m{number}" for number in range(300)]
        await gatherResults(
            [self.store.enqueue(INBOX, [make_payload(id)], expires_at=self.make_expiry()) for id in names]
        )
        found = await self.store.fetch_messages(ALICE, None, limit=1000, max_bytes=1 << 20)
        self.assertEqual([message.id for message in found], names)
        self.assertLessEqual(self.observed["commit"] - before, 3)

    async def test_threads_exist_while_open(self) -> None:
        """Threads exist between open and close only, also if opening fails."""
        self.assertEqual(list_store_threads(), set())
        await self.open_store()
        self.assertEqual(len(list_store_threads()), 4)
        await self.store.close()
        self.assertEqual(list_store_threads(), set())
        unusable_store = build_store("sqlite", self.clock, QueueLimits(), path=self.path / "not a directory")
        with self.assertRaises(StoreUnavailable):
            await unusable_store.open()
        self.assertEqual(list_store_threads(), set())
        await self.store.open()
        self.assertEqual(await self.store.find_owner(INBOX), ALICE)

    async def test_health_does_not_wait_for_the_writer(self) -> None:
        """While the thread that writes is blocked, the health of the store is known without a wait."""
        await self.open_store()
        clock = Clock()
        monitor = StoreHealthMonitor(
            clock, self.store.ping, is_open=lambda: True, failure_count=lambda: 0, steady=clock.seconds
        )
        monitor.startService()
        self.addCleanup(monitor.stopService)
        await monitor.ask()
        assert isinstance(self.store, SQLiteStore) and isinstance(self.store._executor, SQLiteExecutor)
        reached, release = Event(), Event()
        self.addCleanup(release.set)

        def block(_: object) -> None:
            reached.set()
            release.wait()

        blocked = self.store._executor.write("ping", block)
        await deferToThread(reached.wait)
        for _ in range(100):
            self.successResultOf(Deferred.fromCoroutine(monitor.ask()))
        self.assertFalse(blocked.called)
        release.set()
        await blocked

    async def test_runner_uses_one_thread(self) -> None:
        """A runner runs everything in one thread, which is not the reactor's."""
        runner = ThreadRunner(IReactorFromThreads(reactor), "mediatord-store-test")
        runner.start()
        self.addCleanup(runner.stop)
        threads = await gatherResults([runner(current_thread) for _ in range(20)])
        self.assertEqual(len(set(threads)), 1)
        self.assertNotIn(current_thread(), threads)

    async def test_reads_while_locked_out(self) -> None:
        """Reads go on while another process holds the write lock; then the write is done."""
        threads = IReactorFromThreads(reactor)
        executor = SQLiteExecutor(
            self.path, self.clock, lambda kind: ThreadRunner(threads, f"mediatord-store-{kind}"), patience=60.0
        )
        self.store = SQLiteStore(executor, self.clock, QueueLimits())
        await self.open_store()
        with closing(connect(self.path)) as other:
            other.execute("BEGIN IMMEDIATE")
            writing = self.store.enqueue(INBOX, [make_payload("a")], expires_at=self.make_expiry())
            self.assertEqual((await self.store.get_queue_status(ALICE, None)).message_count, 0)
            self.assertEqual((await self.store.list_recipients(ALICE, offset=0, limit=9))[1], 1)
            self.assertNoResult(writing)
            other.execute("ROLLBACK")
        await writing
        self.assertEqual((await self.store.get_queue_status(ALICE, None)).message_count, 1)

    async def test_close_waits_for_all_threads(self) -> None:
        """Close waits for accepted operations in all threads."""
        await self.open_store()
        deferreds = [
            self.store.enqueue(INBOX, [make_payload(f"m{number}")], expires_at=self.make_expiry())
            for number in range(50)
        ]
        owner = self.store.find_owner(INBOX)
        await self.store.close()
        for enqueued in deferreds:
            self.successResultOf(enqueued)
        self.assertEqual(self.successResultOf(owner), ALICE)


class HandOverTests(ReactorTestCase):
    """How often the reactor looks for events, and is woken, between a request and the end of its commit."""

    def setUp(self) -> None:
        super().setUp()
        self.polls = self.wakes = 0
        self.batches: list[int] = []
        self.sleeps = Event()
        poll, wake = self.reactor._poller.poll, self.reactor.waker.wakeUp

        def count_poll(*args: Any) -> Any:
            self.polls += 1
            self.sleeps.set()
            return poll(*args)

        def count_wake() -> None:
            self.wakes += 1
            wake()

        self.reactor._poller = Mock(wraps=self.reactor._poller, poll=count_poll)
        self.patch(self.reactor.waker, "wakeUp", count_wake)
        runner = ThreadRunner(self.reactor, "mediatord-store-test")
        self.batcher = OperationBatcher(
            runner, self.perform, self.reactor, ignore_observation, BatchLimits(), max_delay=60.0
        )
        self.wait_for(self.batcher.open(lambda: connect(None)))
        self.addCleanup(lambda: self.wait_for(self.batcher.close()))
        self.batcher.is_accepting = True

    def wait_for(self, *awaited: Deferred[Any]) -> None:
        """Iterate as the main loop does."""
        results: list[Any] = []
        gatherResults(awaited).addCallback(results.append)
        self.reactor.runUntilCurrent()
        while not results:
            self.reactor.doIteration(self.reactor.timeout())
            self.reactor.runUntilCurrent()

    def perform(self, connection: StoreConnection, works: Sequence[Any]) -> list[Any]:
        self.sleeps.wait()
        self.batches.append(len(works))
        return [None for _ in works]

    def count_for_requests(self, number: int) -> tuple[int, int]:
        """Polls and wakes until requests that arrive together are done, each after another delay-free call."""
        self.polls = self.wakes = 0
        self.sleeps.clear()
        work = [(lambda connection: None, 0)]
        self.wait_for(*[deferLater(self.reactor, 0, self.batcher.submit, "test", work) for _ in range(number)])
        return self.polls, self.wakes

    def test_single_requests(self) -> None:
        """For a request that comes alone the reactor sleeps once, and looks for no events before."""
        self.assertEqual([self.count_for_requests(1) for _ in range(3)], [(1, 1)] * 3)
        self.assertEqual(self.batches, [1, 1, 1])

    def test_requests_of_one_iteration(self) -> None:
        """Requests that arrive together share a commit."""
        self.count_for_requests(3)
        self.assertEqual(self.batches, [3])


@pytest.mark.system
class KillTests(SynchronousTestCase):
    """A process that is killed."""

    def test_accepted_messages_survive_kill(self) -> None:
        """Messages accepted before the kill are stored, and no commit is stored in part."""
        path = make_database_path(self)
        command = [sys.executable, "-m", "tests.store.sqlite.enqueue_process", str(path)]
        child = subprocess.Popen(command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        with child.stdout:
            lines = [child.stdout.readline() for _ in range(LINES)]
            child.kill()
            lines += child.stdout.readlines()
        child.wait()
        accepted = {id for line in lines if line.endswith("\n") for id in line.split()}
        self.assertGreaterEqual(len(accepted), 3 * LINES)
        with closing(connect_reader(path)) as connection:
            stored = [id for (id,) in connection.execute("SELECT id FROM message")]
            counted = connection.execute("SELECT sum(messages) FROM queue").fetchone()
            self.assertEqual(connection.execute("PRAGMA integrity_check").fetchall(), [("ok",)])
        self.assertEqual(accepted - set(stored), set())
        self.assertEqual(set(Counter(id.split("-")[0] for id in stored).values()), {3})
        self.assertEqual(counted, (len(stored),))
