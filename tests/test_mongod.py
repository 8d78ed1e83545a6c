"""The MongoDB test fixtures: failpoints, restarts, elections and clean-up."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import SkipTest, TestCase

import pytest
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from tests.mongod import fresh_database, shared_replica_set
from tests.mongod_process import find_mongod, mongod_binary
from tests.replica_set import Credentials, ReplicaSet

PATIENCE_SECONDS = 60.0

# Starts a set, prints its processes and directory, and waits to be killed.
_KILLED_PROGRAM = """
import sys
from tests.mongod import ReplicaSet

servers = ReplicaSet()
servers.open()
directory = servers._directory
print(servers.members[0].pid, directory.sweeper_pid, directory.path, flush=True)
sys.stdin.read()
"""


class ReplicaSetTests(TestCase):
    """A set of one member, shared with other tests."""

    def setUp(self) -> None:
        self.servers = shared_replica_set()
        fresh = fresh_database()
        self.database = self.servers.client[fresh.__enter__()]
        self.addCleanup(fresh.__exit__, None, None, None)

    def test_fresh_database_has_no_documents(self) -> None:
        """Documents of an earlier test are gone."""
        self.database["things"].insert_one({"_id": 1})
        with fresh_database() as other:
            self.assertNotEqual(other, self.database.name)
            self.servers.client[other]["things"].insert_one({"_id": 1})
        with fresh_database() as again:
            self.assertEqual(again, other)
            self.assertEqual(self.servers.client[again]["things"].count_documents({}), 0)

    def test_failpoint_ends_with_its_context(self) -> None:
        """Within it the given number of commands fails, and no others."""
        with self.servers.failpoint("insert", times=1, errorCode=2):
            self.database["things"].find_one({})
            with self.assertRaises(OperationFailure):
                self.database["things"].insert_one({})
            self.database["things"].insert_one({})
        with self.servers.failpoint("insert", errorCode=2):
            pass
        self.database["things"].insert_one({})

    def test_elects_primary_after_step_down(self) -> None:
        """A set of one member elects the same one again."""
        self.servers.step_down()
        self.assertEqual(self.servers.primary(), 0)
        self.database["things"].insert_one({})

    def test_acknowledged_data_survive_kill(self) -> None:
        """A restarted server has all acknowledged data."""
        self.database["things"].insert_one({"_id": 1})
        self.servers.kill(0)
        self.servers.start(0)
        self.servers.primary()
        self.assertEqual(self.database["things"].count_documents({}), 1)


class SeveralMembersTests(TestCase):
    """Elections among three members."""

    @pytest.mark.exhaustive
    def test_frozen_primary_is_replaced(self) -> None:
        """It is a secondary when it resumes."""
        with ReplicaSet(3) as servers:
            former = servers.primary()
            servers.freeze(former)
            self.assertNotEqual(servers.primary(), former)
            servers.client["test"]["things"].insert_one({"_id": 1})
            servers.thaw(former)
            self.assertEqual(servers.client["test"]["things"].count_documents({}), 1)


class AuthTests(TestCase):
    """A set that requires credentials."""

    def test_reading_requires_credentials(self) -> None:
        """Only the fixture's own client has them."""
        with ReplicaSet(auth=Credentials("root", "pa:ss@word")) as servers:
            servers.client["test"]["things"].insert_one({})
            self.assertIn("root:pa%3Ass%40word@127.0.0.1", servers.uri("test"))
            anybody: MongoClient[dict[str, Any]] = MongoClient(servers.uri("test", credentials=""))
            with contextlib.closing(anybody) as anonymous:
                with self.assertRaises(OperationFailure):
                    anonymous["test"]["things"].find_one({})


class CleanUpTests(TestCase):
    """Nothing is left when the tests end."""

    def test_killed_process_leaves_no_servers_or_data(self) -> None:
        """Servers end and data are deleted."""
        mongod_binary()
        with subprocess.Popen(
            [sys.executable, "-c", _KILLED_PROGRAM],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            server, sweeper, directory = process.stdout.readline().split()
            self.assertTrue(Path(directory).is_dir())
            ends = [os.pidfd_open(int(pid)) for pid in (server, sweeper)]
            process.send_signal(signal.SIGKILL)
        for end in ends:
            with os.fdopen(end, "rb", buffering=0):
                self.assertEqual(select.select([end], [], [], PATIENCE_SECONDS)[0], [end], "it lives on")
        self.assertFalse(Path(directory).exists())

    def test_closed_set_leaves_no_servers_or_data(self) -> None:
        """Whatever the state of its members."""
        servers = ReplicaSet()
        servers.open()
        end = os.pidfd_open(servers.members[0].pid)
        servers.freeze(0)
        servers.close()
        with os.fdopen(end, "rb", buffering=0):
            self.assertEqual(select.select([end], [], [], PATIENCE_SECONDS)[0], [end])
        with self.assertRaises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", servers.members[0].port))


def test_fails_if_named_binary_does_not_run(tmp_path: Path) -> None:
    """Setting MONGOD must not skip tests."""
    with pytest.raises(AssertionError, match="MONGOD=/nonexistent/mongod does not run: No such file"):
        find_mongod("/nonexistent/mongod", tmp_path)


def test_skips_without_binary(tmp_path: Path) -> None:
    """The reason says how to install it."""
    with pytest.raises(SkipTest, match="`make .mongod` does that"):
        find_mongod(None, tmp_path)


def test_skips_if_binary_does_not_run(tmp_path: Path) -> None:
    """The reason names what the machine lacks."""
    binary = tmp_path / "lib/python3.11/site-packages/fiftyone/db/bin/mongod"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\necho libcurl.so.4: no such file >&2; exit 127\n", encoding="ascii")
    binary.chmod(0o755)
    (tmp_path / ".installed").touch()
    with pytest.raises(SkipTest, match="does not run here .libcurl.so.4: no such file"):
        find_mongod(None, tmp_path)
