"""The queue of processes that write to one database."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing

import pytest
from twisted.trial.unittest import SynchronousTestCase

from mediatord.store.sqlite.connection import WriteTicketLock, connect
from mediatord.store.sqlite.database_file import open_database
from tests.store.builders import make_database_path

PROCESSES = ("a", "b", "c")
# Of each process.
ROWS = 80


@pytest.mark.system
class WriterFairnessTests(SynchronousTestCase):
    """Real processes that write all the time."""

    def test_writer_goes_behind_waiting_ones(self) -> None:
        """A process that has just written goes behind those that were waiting."""
        path = make_database_path(self)
        with closing(open_database(path)) as connection:
            connection.execute("CREATE TABLE written (place INTEGER PRIMARY KEY, name TEXT)")
        command = [sys.executable, "-m", "tests.store.sqlite.fairness_process", str(path)]
        children = [
            subprocess.Popen(
                [*command, name, str(len(PROCESSES)), str(ROWS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in PROCESSES
        ]
        for child in children:
            self.addCleanup(child.kill)
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        for child in children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        for child in children:
            child.communicate(timeout=300)
        self.assertEqual([child.returncode for child in children], [0] * len(children))
        with closing(connect(path)) as connection:
            names = [name for (name,) in connection.execute("SELECT name FROM written ORDER BY place")]
        # The first processes ran alone until the last one began, which may be a while on a busy machine.
        later = names[max(map(names.index, PROCESSES)) :]
        repetitions = sum(before == name for before, name in zip(later, later[1:], strict=False))
        self.assertLess(repetitions, len(later) // 5)


@pytest.mark.system
class WriterQueueTests(SynchronousTestCase):
    """Waiting in the queue, and ways to leave it."""

    def setUp(self) -> None:
        self.path = make_database_path(self)
        self.queue = WriteTicketLock(self.path)
        self.addCleanup(self.queue.close)

    def start_process(self, program: str) -> subprocess.Popen[str]:
        """Another process with its own queue entry, once it has printed a line."""
        started = (
            "import sys; from pathlib import Path; from mediatord.store.sqlite.connection import WriteTicketLock; "
        )
        child = subprocess.Popen(
            [sys.executable, "-c", f"{started}queue = WriteTicketLock(Path(sys.argv[1])); {program}", str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(child.communicate)
        self.addCleanup(child.kill)
        assert child.stdout is not None
        child.stdout.readline()
        return child

    def test_killed_process_leaves_queue(self) -> None:
        """A process killed in the queue or in its transaction blocks nobody."""
        child = self.start_process("queue.enter(60); print(flush=True); input()")
        child.kill()
        child.wait()
        self.assertGreater(self.queue.enter(60), 30)

    def test_tries_database_behind_stuck_process(self) -> None:
        """A process behind a stuck one tries the database after half of its timeout."""
        self.start_process("queue.enter(60); print(flush=True); input()")
        left = self.queue.enter(0.1)
        self.assertLessEqual(left, 0.05)
        self.queue.leave()

    def test_stuck_process_delays_once(self) -> None:
        """A stuck process costs half of the timeout only once; others are waited for as before."""
        self.start_process("queue.enter(60); print(flush=True); input()")
        self.queue.enter(0.1)
        self.queue.leave()
        for _ in range(2):
            self.assertGreater(self.queue.enter(20), 10)
            self.queue.leave()
        self.start_process("queue.enter(0.1); print(flush=True); input()")
        self.assertLessEqual(self.queue.enter(0.1), 0.05)
        self.queue.leave()
        self.assertGreater(self.queue.enter(20), 10)
        self.queue.leave()

    def test_no_queue_without_file(self) -> None:
        """Where the file cannot be created there is no queue."""
        queue = WriteTicketLock(self.path / "deeper" / "database")
        self.assertGreater(queue.enter(9), 0)
        queue.leave()
        queue.close()
