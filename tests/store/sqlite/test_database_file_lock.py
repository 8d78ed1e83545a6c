"""The lock by which one daemon has a database."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from twisted.trial.unittest import SynchronousTestCase

from mediatord.store.sqlite.database_file import DatabaseFileLock


class DatabaseFileLockTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)
        self.path = self.directory / "mediator.sqlite3"
        self.first, self.second = DatabaseFileLock(self.path), DatabaseFileLock(self.path)
        self.addCleanup(self.first.release)
        self.addCleanup(self.second.release)

    def read_refusal(self, use: DatabaseFileLock) -> str:
        """The error text."""
        return str(self.assertRaises(ValueError, use.take))

    def test_one_holder_at_a_time(self) -> None:
        """The lock can be taken again once released; only an empty private file remains."""
        self.first.take()
        self.assertEqual(
            self.read_refusal(self.second), f"cannot use the database {self.path}: another daemon uses it"
        )
        self.first.release()
        self.second.take()
        self.second.release()
        (remaining,) = self.directory.iterdir()
        self.assertEqual((remaining.name, remaining.stat().st_size), ("mediator.sqlite3.lock", 0))
        self.assertEqual(remaining.stat().st_mode & 0o777, 0o600)

    def test_locks_by_file_not_name(self) -> None:
        """Another name of the same file is locked too."""
        self.path.touch()
        other = self.directory / "elsewhere" / "other.sqlite3"
        other.parent.mkdir()
        other.symlink_to(self.path)
        self.first.take()
        self.assertIn("another daemon uses it", self.read_refusal(DatabaseFileLock(other)))

    @pytest.mark.system
    def test_killed_holder_leaves_no_lock(self) -> None:
        """A killed holder leaves no lock, and its children do not keep it."""
        program = (
            "import subprocess, sys\n"
            "from pathlib import Path\n"
            "from mediatord.store.sqlite.database_file import DatabaseFileLock\n"
            "use = DatabaseFileLock(Path(sys.argv[1])); use.take()\n"
            "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=0)\n"
            "print('taken', flush=True); child.wait()"
        )
        command = [sys.executable, "-c", program, str(self.path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            self.assertEqual(process.stdout.readline(), b"taken\n")
            self.assertIn("another daemon uses it", self.read_refusal(self.first))
            process.kill()
            process.wait()
            self.first.take()

    def test_missing_directory(self) -> None:
        """The error has the text of the system."""
        missing = DatabaseFileLock(self.directory / "nowhere" / "mediator.sqlite3")
        self.assertIn("mediator.sqlite3: No such file or directory", self.read_refusal(missing))
        os.symlink("/", f"{self.path}.lock")
        self.assertIn("mediator.sqlite3: ", self.read_refusal(self.first))
