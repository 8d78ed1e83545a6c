"""`mediatord whois` beside a running daemon, on every durable backend."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from mediatord.app.pseudonym_key_rotation import to_utc_day
from mediatord.observability.pseudonyms import Pseudonymizer, load_pseudonym_key, start_key_epoch
from tests.integration.cluster import make_mongo_storage
from tests.integration.daemon import Daemon
from tests.integration.message_load import enrol_wallet, prepare_daemon
from tests.integration.raw_decentrl_client import DaemonClient, RawDecentrlClient
from tests.mongod_process import mongod_binary

reactor: Any = _reactor


class WhoisTests(TestCase):
    def storage(self) -> dict[str, Any]:
        """Storage settings of the daemon."""
        return {}

    async def test_lists_pseudonyms_of_a_did(self) -> None:
        """Of every epoch, for any spelling of a registered DID, and for DIDs that are not registered."""
        daemon = prepare_daemon({"storage": self.storage(), "log": {"dids": "keyed"}})
        self.addCleanup(daemon.clean)
        await deferToThread(daemon.start)
        bob = await enrol_wallet(daemon, reactor)
        path = daemon.directory / "log.key"
        first = Pseudonymizer("keyed", load_pseudonym_key(path))
        start_key_epoch(path, to_utc_day(0))
        second = Pseudonymizer("keyed", load_pseudonym_key(path))
        for given, did in (
            (bob.did, bob.did),
            (f"{bob.did}#key-1", bob.did),
            ("did:web:Stranger.example", "did:web:stranger.example"),
        ):
            expected = (0, f"1  {first.did(did)}\n2  {second.did(did)}\n")
            self.assertEqual(await deferToThread(self.run_whois, daemon, given), expected)
        status, text = await deferToThread(self.run_whois, daemon, bob.did, "--json")
        pseudonyms = [{"epoch": 1, "pseudonym": first.did(bob.did)}, {"epoch": 2, "pseudonym": second.did(bob.did)}]
        self.assertEqual((status, json.loads(text)), (0, {"did": bob.did, "pseudonyms": pseudonyms}))

    async def test_finds_registered_dids_by_pseudonym(self) -> None:
        """Accounts and identities by their pseudonyms of every epoch; unknown DIDs are not found."""
        daemon = prepare_daemon({"storage": self.storage()})
        self.addCleanup(daemon.clean)
        await deferToThread(daemon.start)
        bob = await enrol_wallet(daemon, reactor)
        carol = await deferToThread(self.register_identity, daemon)
        path = daemon.directory / "log.key"
        first = Pseudonymizer("keyed", load_pseudonym_key(path))
        start_key_epoch(path, to_utc_day(0))
        second = Pseudonymizer("keyed", load_pseudonym_key(path))
        for pseudonym, expected in (
            (first.did(bob.did), (0, f"1  {bob.did}\n")),
            (second.did(bob.did), (0, f"2  {bob.did}\n")),
            (second.did(carol), (0, f"2  {carol}\n")),
            (Pseudonymizer("plain", load_pseudonym_key(path)).did(bob.did), (0, f"1  {bob.did}\n2  {bob.did}\n")),
            (first.did("did:web:stranger.example"), (1, "")),
        ):
            self.assertEqual(await deferToThread(self.run_whois, daemon, pseudonym), expected)
        pseudonym = Pseudonymizer("plain", load_pseudonym_key(path)).did(bob.did)
        status, text = await deferToThread(self.run_whois, daemon, pseudonym, "--json")
        dids = [{"epoch": epoch, "did": bob.did} for epoch in (1, 2)]
        self.assertEqual((status, json.loads(text)), (0, {"pseudonym": pseudonym, "dids": dids}))

    def register_identity(self, daemon: Daemon) -> str:
        """The DID of a registered identity."""
        identity = RawDecentrlClient(DaemonClient(daemon), "carol")
        identity.register()
        return identity.did

    def run_whois(self, daemon: Daemon, pseudonym: str, *options: str) -> tuple[int, str]:
        """Exit status and output."""
        command = [sys.executable, "-m", "mediatord", "whois", pseudonym, *options, "--config", str(daemon.config)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        missing = f"mediatord: no registered DID has the pseudonym {pseudonym}\n"
        self.assertEqual(result.stderr, missing if result.returncode else "")
        return result.returncode, result.stdout


@pytest.mark.exhaustive
class MongoDBWhoisTests(WhoisTests):
    if mongod_binary() is None:
        skip = "there is no MongoDB server"

    def storage(self) -> dict[str, Any]:
        return make_mongo_storage(self)
