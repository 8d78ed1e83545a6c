"""Files of a real daemon: none is readable by others, and keys are encrypted if configured."""

from __future__ import annotations

import os
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
from tests.integration.test_rotation import read_did, rotate_keys, wait_for
from tests.integration.test_workers import await_workers

PASSPHRASE = "correct horse battery staple"


def command(*arguments: str, umask: int) -> None:
    """Run a console command with this umask."""
    subprocess.run(
        [sys.executable, "-m", "mediatord", *arguments], check=True, umask=umask, capture_output=True, timeout=120
    )


class SecretFilesTestCase(SynchronousTestCase):
    def prepare_daemon(self, settings: dict[str, Any] | None = None) -> Daemon:
        """A daemon, not running, whose files exist."""
        daemon = Daemon(settings)
        self.addCleanup(daemon.clean)
        return daemon

    def accessible_to_others(self, root: Path) -> list[str]:
        """Files below a directory that others may read or write, and directories that they may write to."""
        paths = []
        for path in root.rglob("*"):
            mode = stat.S_IMODE(path.lstat().st_mode)
            if (path.is_file() and mode & 0o007) or mode & 0o002:
                paths.append(f"{path.relative_to(root)} {mode:04o}")
        return paths


class ModeTests(SecretFilesTestCase):
    """With a umask that removes no permissions, as in a careless script or container."""

    def test_files_are_not_accessible_to_others(self) -> None:
        """Files of init, run, keys, log-keys and backup; the group may read only the logs."""
        daemon = self.prepare_daemon()
        root = daemon.directory.parent
        root.chmod(0o755)
        config = ("--config", str(daemon.config))
        before = os.umask(0)
        self.addCleanup(os.umask, before)
        daemon.initialise()
        self.assertEqual(self.accessible_to_others(daemon.directory), [])
        server = subprocess.Popen(
            [sys.executable, "-m", "mediatord", "run", *config],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            umask=0,
        )
        self.addCleanup(server.wait)
        self.addCleanup(server.kill)
        wait_for(lambda: daemon._health() == 200, lambda: "it does not serve")
        command("keys", "rotate", *config, umask=0)
        command("keys", "rotate", "--prepare", *config, umask=0)
        command("log-keys", "rotate", *config, umask=0)
        command("backup", "--to", str(daemon.directory / "backup"), *config, umask=0)
        server.terminate()
        self.assertEqual(server.wait(60), 0)
        secret = {"keys.jwks", "log.key", "backup"}
        restored = {path.name for path in daemon.directory.rglob("*")}
        self.assertLessEqual({*secret, "mediator.sqlite3", "mediator.yaml"}, restored)
        self.assertEqual(self.accessible_to_others(daemon.directory), [])
        for path in daemon.directory.rglob("*"):
            if path.name in secret or path.name.startswith("mediator.sqlite3"):
                self.assertEqual(stat.S_IMODE(path.stat().st_mode) & 0o077, 0, path.name)


class EncryptedTests(SecretFilesTestCase):
    """Keys encrypted with a passphrase from a file."""

    @pytest.mark.exhaustive
    def test_encrypted_keys_with_workers(self) -> None:
        """Start, rotation by SIGHUP, backup and restore; no process exposes the passphrase."""
        daemon = self.prepare_daemon({"workers": 2, "identity": {"passphrase_file": "passphrase"}})
        daemon.initialise()
        create_secret_file(daemon.directory / "passphrase", PASSPHRASE.encode() + b"\n")
        config, keys = ("--config", str(daemon.config)), daemon.directory / "keys.jwks"
        self.assertEqual(_run_command(["keys", "encrypt", *config]), 0)
        before = keys.read_bytes()
        daemon.start()
        await_workers(daemon, 2)
        first = read_did(daemon)
        self.assertNotEqual(rotate_keys(daemon), first)
        self.assertNotEqual(keys.read_bytes(), before)
        self.assertTrue(is_encrypted(keys.read_bytes()))
        self.assert_passphrase_hidden(daemon.pid)
        second, backup = read_did(daemon), daemon.directory.parent / "backup"
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

    def assert_passphrase_hidden(self, parent: int) -> None:
        """It is in no arguments and environment of a process and its children."""
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        self.assertGreaterEqual(len(children), 2)
        for process in (str(parent), *children):
            for name in ("cmdline", "environ"):
                self.assertNotIn(PASSPHRASE.encode(), Path(f"/proc/{process}/{name}").read_bytes())
