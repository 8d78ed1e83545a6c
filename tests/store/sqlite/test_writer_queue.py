"""Processes that write to one database take turns."""

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
# Of each of them.
ROWS = 80


@pytest.mark.system
class FairnessTests(SynchronousTestCase):
    """Real processes, each of which wants to write all the time."""

    def test_nobody_is_overtaken(self) -> None:
        """A process that has just written does not write again before those which were waiting."""
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
        # The first ones were alone until the last one began, which may be a while on a busy machine.
        later = names[max(map(names.index, PROCESSES)) :]
        again = sum(before == name for before, name in zip(later, later[1:], strict=False))
        self.assertLess(again, len(later) // 5)


@pytest.mark.system
class LineTests(SynchronousTestCase):
    """Waiting in line, and what ends it."""

    def setUp(self) -> None:
        self.path = make_database_path(self)
        self.queue = WriteTicketLock(self.path)
        self.addCleanup(self.queue.close)

    def another(self, program: str) -> subprocess.Popen[str]:
        """Another process with a queue of its own, once it has printed a line."""
        begun = (
            "import sys; from pathlib import Path; from mediatord.store.sqlite.connection import WriteTicketLock; "
        )
        child = subprocess.Popen(
            [sys.executable, "-c", f"{begun}queue = WriteTicketLock(Path(sys.argv[1])); {program}", str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(child.communicate)
        self.addCleanup(child.kill)
        assert child.stdout is not None
        child.stdout.readline()
        return child

    def test_killed(self) -> None:
        """Whoever is killed in line, or in its transaction, holds nobody up."""
        child = self.another("queue.enter(60); print(flush=True); input()")
        child.kill()
        child.wait()
        self.assertGreater(self.queue.enter(60), 30)

    def test_stuck(self) -> None:
        """Whoever waits behind a process that does not go on tries for the database after half of its time."""
        self.another("queue.enter(60); print(flush=True); input()")
        left = self.queue.enter(0.1)
        self.assertLessEqual(left, 0.05)
        self.queue.leave()

    def test_stuck_once(self) -> None:
        """That one costs half of the time once only; others are waited for as before."""
        self.another("queue.enter(60); print(flush=True); input()")
        self.queue.enter(0.1)
        self.queue.leave()
        for _ in range(2):
            self.assertGreater(self.queue.enter(20), 10)
            self.queue.leave()
        self.another("queue.enter(0.1); print(flush=True); input()")
        self.assertLessEqual(self.queue.enter(0.1), 0.05)
        self.queue.leave()
        self.assertGreater(self.queue.enter(20), 10)
        self.queue.leave()

    def test_no_file(self) -> None:
        """Where there can be no file nobody waits in line."""
        queue = WriteTicketLock(self.path / "deeper" / "database")
        self.assertGreater(queue.enter(9), 0)
        queue.leave()
        queue.close()
