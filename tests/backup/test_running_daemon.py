"""Backups and exports of a daemon that is busy: whatever was promised before they began is in them."""

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

LETTERS, BEFORE = 400, 100


class LiveTests(TestCase):
    """With SQLite."""

    def setUp(self) -> None:
        self.folder = Path(mkdtemp(prefix="mediatord-live-"))
        self.addCleanup(rmtree, self.folder)
        self.daemon = prepare_daemon({**ROOMY, **self.storage()})
        self.addCleanup(self.daemon.clean)

    def storage(self) -> dict[str, Any]:
        """Where the daemon keeps what it keeps."""
        return {}

    async def test_a_backup_under_load(self) -> None:
        """Restored elsewhere, it has every letter that was accepted before; those acknowledged since come again."""
        self.daemon.start()
        bob = await enrol_wallet(self.daemon, reactor)
        senders = LoadSenders(self.daemon.port, prepare_forwards(bob, "letter", LETTERS))
        senders.start()
        await deferToThread(senders.wait_for_answers, BEFORE)
        promised = set(senders.markers(202))
        self.assertGreaterEqual(len(promised), BEFORE)
        backup, archive = self.folder / "b.tar", self.folder / "a.gz"
        told = await self.run_("backup", "--config", str(self.daemon.config), "--to", str(backup), "--json")
        await self.run_("export", "--config", str(self.daemon.config), "--to", str(archive), "--json")
        await deferToThread(senders.join)
        self.assertEqual(len(senders.markers(202)), LETTERS)
        read = verify_archive(archive)
        waiting = [record for record, _ in read.records() if isinstance(record, MessageRecord)]
        self.assertTrue(len(promised) <= told["records"]["message"] <= len(waiting) <= LETTERS)
        self.assertEqual(set(await drain_queue(bob)), set(senders.markers(202)))
        self.daemon.stop()
        self.make_room()
        with self.restored(backup) as daemon:
            found = await drain_queue(bob)
            self.assertLessEqual(promised, set(found))
            self.assertEqual(len(found), told["records"]["message"])
            self.assertEqual([ids for ids in found.values() if len(ids) > 1], [])
            self.check(daemon)

    def make_room(self) -> None:
        """The store of the daemon is lost."""

    def check(self, daemon: Daemon) -> None:
        """The file is sound."""
        with closing(sqlite3.connect(daemon.directory / "mediator.sqlite3")) as connection:
            self.assertEqual(connection.execute("PRAGMA integrity_check").fetchall(), [("ok",)])
            self.assertEqual(connection.execute("SELECT count(*) FROM queue").fetchall(), [(0,)])

    def restored(self, backup: Path) -> Daemon:
        """A daemon at the same address, made of nothing but the backup."""
        daemon = Daemon()
        self.addCleanup(daemon.clean)
        subprocess.run(
            [sys.executable, "-m", "mediatord", "restore", "--from", str(backup), "--dir", str(daemon.directory)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        daemon.port, daemon.url = self.daemon.port, self.daemon.url
        return daemon

    async def run_(self, *arguments: str) -> dict[str, Any]:
        """What a command says, while the daemon goes on."""
        ended = await deferToThread(
            subprocess.run, [sys.executable, "-m", "mediatord", *arguments], capture_output=True, check=False
        )
        self.assertEqual((ended.returncode, ended.stderr), (0, b""))
        return dict(json.loads(ended.stdout))


@pytest.mark.exhaustive
class MongoDBLiveTests(LiveTests):
    """With MongoDB, where a backup has the state of one time as well."""

    def storage(self) -> dict[str, Any]:
        self.section = make_mongo_storage(self)
        return {"storage": self.section}

    def make_room(self) -> None:
        name = self.section["mongodb"]["uri"].rpartition("/")[2].partition("?")[0]
        shared_replica_set().client.drop_database(name)

    def check(self, daemon: Daemon) -> None:
        """Nothing waits according to any counter."""
        name = self.section["mongodb"]["uri"].rpartition("/")[2].partition("?")[0]
        found = shared_replica_set().client[name]["recipients"].find()
        self.assertEqual([(one["messages"], one["bytes"]) for one in found], [(0, 0)])
