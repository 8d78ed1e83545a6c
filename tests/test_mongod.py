"""The servers that other tests run on: they do what they are told, and nothing of them stays behind."""

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

# Starts a set, says what there is of it, and waits to be killed.
_DOOMED = """
import sys
from tests.mongod import ReplicaSet

servers = ReplicaSet()
servers.open()
directory = servers._directory
print(servers.members[0].pid, directory.sweeper_pid, directory.path, flush=True)
sys.stdin.read()
"""


class ReplicaSetTests(TestCase):
    """One set of one member, shared with other tests."""

    def setUp(self) -> None:
        self.servers = shared_replica_set()
        fresh = fresh_database()
        self.database = self.servers.client[fresh.__enter__()]
        self.addCleanup(fresh.__exit__, None, None, None)

    def test_a_fresh_database_has_no_documents(self) -> None:
        """Whatever the test before left in it."""
        self.database["things"].insert_one({"_id": 1})
        with fresh_database() as other:
            self.assertNotEqual(other, self.database.name)
            self.servers.client[other]["things"].insert_one({"_id": 1})
        with fresh_database() as again:
            self.assertEqual(again, other)
            self.assertEqual(self.servers.client[again]["things"].count_documents({}), 0)

    def test_a_failpoint_is_over_outside(self) -> None:
        """Inside, so many commands fail as was asked for, and no others."""
        with self.servers.failpoint("insert", times=1, errorCode=2):
            self.database["things"].find_one({})
            with self.assertRaises(OperationFailure):
                self.database["things"].insert_one({})
            self.database["things"].insert_one({})
        with self.servers.failpoint("insert", errorCode=2):
            pass
        self.database["things"].insert_one({})

    def test_there_is_a_primary_again_after_a_step_down(self) -> None:
        """With one member it is the same."""
        self.servers.step_down()
        self.assertEqual(self.servers.primary(), 0)
        self.database["things"].insert_one({})

    def test_data_outlive_a_kill(self) -> None:
        """A server that is started again is where it was, with what was acknowledged."""
        self.database["things"].insert_one({"_id": 1})
        self.servers.kill(0)
        self.servers.start(0)
        self.servers.primary()
        self.assertEqual(self.database["things"].count_documents({}), 1)


class SeveralMembersTests(TestCase):
    """Another member takes over."""

    @pytest.mark.exhaustive
    def test_a_frozen_primary_is_replaced(self) -> None:
        """It is none any more when it thaws."""
        with ReplicaSet(3) as servers:
            former = servers.primary()
            servers.freeze(former)
            self.assertNotEqual(servers.primary(), former)
            servers.client["test"]["things"].insert_one({"_id": 1})
            servers.thaw(former)
            self.assertEqual(servers.client["test"]["things"].count_documents({}), 1)


class AuthTests(TestCase):
    """A set that wants credentials."""

    def test_strangers_may_not_read(self) -> None:
        """Only the rig's own client has the credentials."""
        with ReplicaSet(auth=Credentials("root", "pa:ss@word")) as servers:
            servers.client["test"]["things"].insert_one({})
            self.assertIn("root:pa%3Ass%40word@127.0.0.1", servers.uri("test"))
            anybody: MongoClient[dict[str, Any]] = MongoClient(servers.uri("test", credentials=""))
            with contextlib.closing(anybody) as stranger:
                with self.assertRaises(OperationFailure):
                    stranger["test"]["things"].find_one({})


class EndTests(TestCase):
    """What is left when the tests are over."""

    def test_nothing_is_left_of_a_process_that_is_killed(self) -> None:
        """Neither servers nor data."""
        mongod_binary()
        with subprocess.Popen(
            [sys.executable, "-c", _DOOMED],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as doomed:
            assert doomed.stdout is not None
            server, sweeper, directory = doomed.stdout.readline().split()
            self.assertTrue(Path(directory).is_dir())
            ends = [os.pidfd_open(int(pid)) for pid in (server, sweeper)]
            doomed.send_signal(signal.SIGKILL)
        for end in ends:
            with os.fdopen(end, "rb", buffering=0):
                self.assertEqual(select.select([end], [], [], PATIENCE_SECONDS)[0], [end], "it lives on")
        self.assertFalse(Path(directory).exists())

    def test_nothing_is_left_of_a_set_that_is_closed(self) -> None:
        """In whatever state its members are."""
        servers = ReplicaSet()
        servers.open()
        end = os.pidfd_open(servers.members[0].pid)
        servers.freeze(0)
        servers.close()
        with os.fdopen(end, "rb", buffering=0):
            self.assertEqual(select.select([end], [], [], PATIENCE_SECONDS)[0], [end])
        with self.assertRaises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", servers.members[0].port))


def test_a_binary_that_does_not_run_is_a_failure_when_it_was_named(tmp_path: Path) -> None:
    """Whoever sets MONGOD wants that one, and no tests that are skipped."""
    with pytest.raises(AssertionError, match="MONGOD=/nonexistent/mongod does not run: No such file"):
        find_mongod("/nonexistent/mongod", tmp_path)


def test_no_binary_is_a_reason_to_skip(tmp_path: Path) -> None:
    """The reason says what to do about it."""
    with pytest.raises(SkipTest, match="`make .mongod` does that"):
        find_mongod(None, tmp_path)


def test_a_binary_that_does_not_run_here_is_a_reason_to_skip(tmp_path: Path) -> None:
    """The reason names what the machine lacks."""
    binary = tmp_path / "lib/python3.11/site-packages/fiftyone/db/bin/mongod"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\necho libcurl.so.4: no such file >&2; exit 127\n", encoding="ascii")
    binary.chmod(0o755)
    (tmp_path / ".installed").touch()
    with pytest.raises(SkipTest, match="does not run here .libcurl.so.4: no such file"):
        find_mongod(None, tmp_path)
