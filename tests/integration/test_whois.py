"""`mediatord whois` beside a running daemon, on every backend that keeps something."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from mediatord.tag_keys import begin_epoch, load_tag_key
from mediatord.tags import Tags
from mediatord.wiring.epochs import day_of
from tests.integration.cluster import fresh_storage
from tests.integration.daemon import Daemon
from tests.integration.residents import Door, Resident
from tests.integration.traffic import enrolled, prepared
from tests.mongod import mongod_binary

reactor: Any = _reactor


class WhoisTests(TestCase):
    def storage(self) -> dict[str, Any]:
        """Where the daemon keeps everything."""
        return {}

    async def test_registered(self) -> None:
        """Accounts and identities are found by their pseudonyms of every epoch, strangers are not."""
        daemon = prepared({"storage": self.storage()})
        self.addCleanup(daemon.clean)
        await deferToThread(daemon.start)
        bob = await enrolled(daemon, reactor)
        carol = await deferToThread(self.citizen, daemon)
        path = daemon.directory / "log.key"
        first = Tags("keyed", load_tag_key(path))
        begin_epoch(path, day_of(0))
        second = Tags("keyed", load_tag_key(path))
        for pseudonym, expected in (
            (first.did(bob.did), (0, f"1  {bob.did}\n")),
            (second.did(bob.did), (0, f"2  {bob.did}\n")),
            (second.did(carol), (0, f"2  {carol}\n")),
            (Tags("plain", load_tag_key(path)).did(bob.did), (0, f"1  {bob.did}\n2  {bob.did}\n")),
            (first.did("did:web:stranger.example"), (1, "")),
        ):
            self.assertEqual(await deferToThread(self.ask, daemon, pseudonym), expected)

    def citizen(self, daemon: Daemon) -> str:
        """The DID of a registered identity."""
        resident = Resident(Door(daemon), "carol")
        resident.register()
        return resident.did

    def ask(self, daemon: Daemon, pseudonym: str) -> tuple[int, str]:
        """Exit status and output."""
        command = [sys.executable, "-m", "mediatord", "whois", pseudonym, "--config", str(daemon.config)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        missing = f"mediatord: {pseudonym} stands for no registered DID\n"
        self.assertEqual(done.stderr, missing if done.returncode else "")
        return done.returncode, done.stdout


@pytest.mark.exhaustive
class MongoDBWhoisTests(WhoisTests):
    if mongod_binary() is None:
        skip = "there is no MongoDB server"

    def storage(self) -> dict[str, Any]:
        return fresh_storage(self)
