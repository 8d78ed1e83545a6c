"""What a real daemon leaves on the disk: nothing that others can read, and keys encrypted if that is wanted."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cli.commands import _run_command
from mediatord.identity.encrypted_file import is_encrypted, make_passphrase_source
from mediatord.identity.key_file import load_keys
from mediatord.runtime.secret_files import create_secret_file
from tests.integration.daemon import Daemon
from tests.integration.test_rotation import await_true, did_of, rotated
from tests.integration.test_workers import await_workers

PASSPHRASE = "correct horse battery staple"


def command(*words: str, umask: int) -> None:
    """Run a command of the console script in a process of its own, with this umask."""
    subprocess.run(
        [sys.executable, "-m", "mediatord", *words], check=True, umask=umask, capture_output=True, timeout=120
    )


class Case(SynchronousTestCase):
    def a_daemon(self, settings: dict[str, Any] | None = None) -> Daemon:
        """One whose files are there; not started."""
        daemon = Daemon(settings)
        self.addCleanup(daemon.clean)
        return daemon

    def open_to_others(self, root: Path) -> list[str]:
        """Files below a directory that somebody else may read or write, and directories that he may write to."""
        found = []
        for path in root.rglob("*"):
            mode = stat.S_IMODE(path.lstat().st_mode)
            if (path.is_file() and mode & 0o007) or mode & 0o002:
                found.append(f"{path.relative_to(root)} {mode:04o}")
        return found


class ModeTests(Case):
    """A umask that forbids nothing, as a careless script or container has it."""

    def test_nothing_is_open_to_others(self) -> None:
        """Of all that init, run, keys, log-keys and backup write, others may read nothing; the group only logs."""
        daemon = self.a_daemon()
        root = daemon.directory.parent
        root.chmod(0o755)
        config = ("--config", str(daemon.config))
        before = os.umask(0)
        self.addCleanup(os.umask, before)
        daemon.initialise()
        self.assertEqual(self.open_to_others(daemon.directory), [])
        server = subprocess.Popen(
            [sys.executable, "-m", "mediatord", "run", *config],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            umask=0,
        )
        self.addCleanup(server.wait)
        self.addCleanup(server.kill)
        await_true(lambda: daemon._health() == 200, lambda: "it does not serve")
        command("keys", "rotate", *config, umask=0)
        command("keys", "rotate", "--prepare", *config, umask=0)
        command("log-keys", "rotate", *config, umask=0)
        command("backup", "--to", str(daemon.directory / "backup"), *config, umask=0)
        server.terminate()
        self.assertEqual(server.wait(60), 0)
        secret = {"keys.jwks", "log.key", "backup"}
        there = {path.name for path in daemon.directory.rglob("*")}
        self.assertLessEqual({*secret, "mediator.sqlite3", "mediator.yaml"}, there)
        self.assertEqual(self.open_to_others(daemon.directory), [])
        for path in daemon.directory.rglob("*"):
            if path.name in secret or path.name.startswith("mediator.sqlite3"):
                self.assertEqual(stat.S_IMODE(path.stat().st_mode) & 0o077, 0, path.name)


class EncryptedTests(Case):
    """Keys that are encrypted by a passphrase in a file."""

    @pytest.mark.exhaustive
    def test_workers(self) -> None:
        """Started, rotated by SIGHUP, backed up and restored; no process shows the passphrase to others."""
        daemon = self.a_daemon({"workers": 2, "identity": {"passphrase_file": "passphrase"}})
        daemon.initialise()
        create_secret_file(daemon.directory / "passphrase", PASSPHRASE.encode() + b"\n")
        config, keys = ("--config", str(daemon.config)), daemon.directory / "keys.jwks"
        self.assertEqual(_run_command(["keys", "encrypt", *config]), 0)
        before = keys.read_bytes()
        daemon.start()
        await_workers(daemon, 2)
        first = did_of(daemon)
        self.assertNotEqual(rotated(daemon), first)
        self.assertNotEqual(keys.read_bytes(), before)
        self.assertTrue(is_encrypted(keys.read_bytes()))
        self.look_at_processes(daemon.pid)
        second, backup = did_of(daemon), daemon.directory.parent / "backup"
        self.assertEqual(_run_command(["backup", "--to", str(backup), *config]), 0)
        daemon.stop()
        self.assertNotIn(PASSPHRASE, daemon.output())
        self.assertNotIn(PASSPHRASE.encode(), backup.read_bytes())
        there = daemon.directory.parent / "there"
        there.mkdir()
        create_secret_file(there / "passphrase", PASSPHRASE.encode())
        self.assertEqual(_run_command(["restore", "--from", str(backup), "--dir", str(there)]), 0)
        again = load_keys(there / "keys.jwks", make_passphrase_source(there / "passphrase"))
        self.assertEqual(again, load_keys(keys, make_passphrase_source(there / "passphrase")))
        self.assertTrue(second.startswith("did:peer:2."))

    def look_at_processes(self, parent: int) -> None:
        """No passphrase among arguments and environment of a process or its children."""
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        self.assertGreaterEqual(len(children), 2)
        for process in (str(parent), *children):
            for name in ("cmdline", "environ"):
                self.assertNotIn(PASSPHRASE.encode(), Path(f"/proc/{process}/{name}").read_bytes())

    def test_wrong_passphrase_at_reload(self) -> None:
        """A passphrase that does not fit when the files are read again changes nothing, and is told in a line."""
        daemon = self.a_daemon({"identity": {"passphrase_file": "passphrase"}})
        daemon.initialise()
        passphrase = daemon.directory / "passphrase"
        create_secret_file(passphrase, PASSPHRASE.encode())
        self.assertEqual(_run_command(["keys", "encrypt", "--config", str(daemon.config)]), 0)
        daemon.start()
        first = did_of(daemon)
        passphrase.write_text("something else entirely")
        os.kill(daemon.pid, signal.SIGHUP)
        daemon.await_output("the passphrase is wrong, or the file was changed")
        self.assertEqual(did_of(daemon), first)
        passphrase.write_text(PASSPHRASE)
        self.assertNotEqual(rotated(daemon), first)
        daemon.stop()
