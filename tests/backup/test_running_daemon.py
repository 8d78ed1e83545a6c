"""Backups and exports of a daemon under load: they have everything that was accepted before they began."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import pytest
from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from mediatord.backup.archive import verify_archive
from mediatord.backup.records import MessageRecord
from tests.integration.cluster import make_mongo_storage
from tests.integration.daemon import Daemon
from tests.integration.message_load import (
    ROOMY,
    LoadSenders,
    drain_queue,
    enrol_wallet,
    prepare_daemon,
    prepare_forwards,
)
from tests.mongod import shared_replica_set

reactor: Any = _reactor

MESSAGES, MESSAGES_BEFORE_BACKUP = 400, 100


class RunningDaemonTests(TestCase):
    """With SQLite."""

    def setUp(self) -> None:
        self.folder = Path(mkdtemp(prefix="mediatord-live-"))
        self.addCleanup(rmtree, self.folder)
        self.daemon = prepare_daemon({**ROOMY, **self.get_storage()})
        self.addCleanup(self.daemon.clean)

    def get_storage(self) -> dict[str, Any]:
        """Storage settings of the daemon."""
        return {}

    async def test_backup_under_load(self) -> None:
        """A restored backup has every message accepted before; those acknowledged since are delivered again."""
        self.daemon.start()
        bob = await enrol_wallet(self.daemon, reactor)
        senders = LoadSenders(self.daemon.port, prepare_forwards(bob, "letter", MESSAGES))
        senders.start()
        await deferToThread(senders.wait_for_answers, MESSAGES_BEFORE_BACKUP)
        promised = set(senders.markers(202))
        self.assertGreaterEqual(len(promised), MESSAGES_BEFORE_BACKUP)
        backup, archive = self.folder / "b.tar", self.folder / "a.gz"
        output = await self.run_command("backup", "--config", str(self.daemon.config), "--to", str(backup), "--json")
        await self.run_command("export", "--config", str(self.daemon.config), "--to", str(archive), "--json")
        await deferToThread(senders.join)
        self.assertEqual(len(senders.markers(202)), MESSAGES)
        read = verify_archive(archive)
        waiting = [record for record, _ in read.records() if isinstance(record, MessageRecord)]
        self.assertTrue(len(promised) <= output["records"]["message"] <= len(waiting) <= MESSAGES)
        self.assertEqual(set(await drain_queue(bob)), set(senders.markers(202)))
        self.daemon.stop()
        self.delete_store()
        with self.restore(backup) as daemon:
            found = await drain_queue(bob)
            self.assertLessEqual(promised, set(found))
            self.assertEqual(len(found), output["records"]["message"])
            self.assertEqual([ids for ids in found.values() if len(ids) > 1], [])
            self.check(daemon)

    def delete_store(self) -> None:
        """Delete the daemon's store."""

    def check(self, daemon: Daemon) -> None:
        """The database file is intact."""
        with closing(sqlite3.connect(daemon.directory / "mediator.sqlite3")) as connection:
            self.assertEqual(connection.execute("PRAGMA integrity_check").fetchall(), [("ok",)])
            self.assertEqual(connection.execute("SELECT count(*) FROM queue").fetchall(), [(0,)])

    def restore(self, backup: Path) -> Daemon:
        """A daemon at the same address, started from the backup only."""
        daemon = Daemon()
        self.addCleanup(daemon.clean)
        subprocess.run(
            [sys.executable, "-m", "mediatord", "restore", "--from", str(backup), "--dir", str(daemon.directory)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        daemon.port, daemon.url = self.daemon.port, self.daemon.url
        return daemon

    async def run_command(self, *arguments: str) -> dict[str, Any]:
        """Output of a command while the daemon runs."""
        ended = await deferToThread(
            subprocess.run, [sys.executable, "-m", "mediatord", *arguments], capture_output=True, check=False
        )
        self.assertEqual((ended.returncode, ended.stderr), (0, b""))
        return dict(json.loads(ended.stdout))


@pytest.mark.exhaustive
class MongoDBRunningDaemonTests(RunningDaemonTests):
    """With MongoDB, where a backup is a snapshot too."""

    def get_storage(self) -> dict[str, Any]:
        self.section = make_mongo_storage(self)
        return {"storage": self.section}

    def delete_store(self) -> None:
        name = self.section["mongodb"]["uri"].rpartition("/")[2].partition("?")[0]
        shared_replica_set().client.drop_database(name)

    def check(self, daemon: Daemon) -> None:
        """No counter has queued messages."""
        name = self.section["mongodb"]["uri"].rpartition("/")[2].partition("?")[0]
        found = shared_replica_set().client[name]["recipients"].find()
        self.assertEqual([(item["messages"], item["bytes"]) for item in found], [(0, 0)])
