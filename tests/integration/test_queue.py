"""`mediatord queue` beside a running daemon and on its stopped store, for every durable backend."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from contextlib import closing
from typing import Any

import pytest
from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from mediatord.cli.keys import read_identity
from mediatord.config.file import load_config
from mediatord.observability.segments import MARKER_DIRECTORY
from mediatord.probe.identities_and_recognition import ProbeIdentities
from mediatord.store.mongo.driver.uri import parse_mongo_uri
from mediatord.wallet.didcomm_client import DIDCommWallet
from mediatord.wallet.didcomm_socket import connect_didcomm_socket
from tests.integration.cluster import make_mongo_storage
from tests.integration.daemon import Daemon
from tests.integration.database_counters import find_miscounts
from tests.integration.message_load import (
    ROOMY,
    LoadSenders,
    drain_queue,
    enrol_wallet,
    prepare_daemon,
    prepare_forwards,
)
from tests.integration.raw_decentrl_client import DaemonClient, RawDecentrlClient
from tests.integration.test_readiness import ReadinessClient
from tests.mongod import shared_replica_set
from tests.mongod_process import mongod_binary
from tests.observability.counter_oracle import read_lines, wrong_counter_lines

reactor: Any = _reactor

# More than one batch, and not a multiple of it.
QUEUE_SIZE = 237
ENDS = ("msg.ack", "msg.remove", "msg.expire", "msg.evict")


class QueueTests(TestCase):
    def settings(self) -> dict[str, Any]:
        """Settings of the daemon, besides large queues."""
        return {}

    async def test_lists_shows_and_purges_queues(self) -> None:
        """Only named messages are purged; pushed ones stay marked, and the ledger counts every message."""
        # Pushed messages must stay marked until they are checked, however slow the commands are.
        queue = {"queue": {**ROOMY["queue"], "delivered_timeout": "1h"}}
        self.daemon = daemon = prepare_daemon({**queue, **self.settings()})
        self.addCleanup(daemon.clean)
        await deferToThread(daemon.start)
        bob, carol = await enrol_wallet(daemon, reactor), await enrol_wallet(daemon, reactor)
        dave, erin = await deferToThread(self.register_identities)
        socket = await connect_didcomm_socket(reactor, bob)
        await socket.live()
        await self.post_forwards(bob, "pushed", 2)
        await self.post_forwards(carol, "kept", QUEUE_SIZE)
        pushed = [await socket.pushed.get() for _ in range(2)]
        await deferToThread(self.send_events, dave, erin, 3)

        listing = await self.run_command("list")
        self.assertEqual(
            [(entry["protocol"], entry["did"], entry["messages"]) for entry in listing["queues"]],
            [("didcomm", carol.did, QUEUE_SIZE), ("decentrl", erin.did, 3), ("didcomm", bob.did, 2)],
        )
        self.assertEqual(listing["totals"]["messages"], QUEUE_SIZE + 5)
        ids_of_carol = [
            entry["id"] for entry in (await self.run_command("show", carol.did, "--top", "1000"))["shown"]
        ]
        self.assertEqual(len(ids_of_carol), QUEUE_SIZE)

        ids = [word for id in ids_of_carol[:5] for word in ("--id", id)]
        dry_run = await self.run_command("purge", carol.did, *ids)
        self.assertEqual((dry_run["messages"], dry_run["ids"], dry_run["dry_run"]), (5, ids_of_carol[:5], True))
        self.assertEqual((await self.run_command("purge", carol.did, *ids, "--yes"))["messages"], 5)
        self.assertEqual((await self.run_command("purge", erin.did, "--yes"))["protocols"], {"decentrl": 3})
        self.assertEqual(await deferToThread(erin.pending_events), [])

        shown = await self.run_command("show", bob.did)
        self.assertTrue(shown["live"])
        self.assertFalse((await self.run_command("show", carol.did))["live"])
        entries = shown["shown"]
        self.assertEqual([(entry["status"], entry["pushes"]) for entry in entries], [("delivered", 1)] * 2)
        await socket.acknowledge(pushed[:1])
        self.assertEqual((await self.run_command("purge", bob.did, "--yes"))["messages"], 1)
        await socket.acknowledge(pushed)
        await socket.close()
        self.assertEqual(len(await self.fetch_and_acknowledge(carol, 10)), 10)
        await self.post_forwards(carol, "more", 1)

        await deferToThread(self.assert_refusals)
        await deferToThread(daemon.stop)
        remaining = await self.run_command("show", carol.did, "--top", "1000")
        self.assertEqual(remaining["messages"], QUEUE_SIZE - 5 - 10 + 1)
        self.assertEqual((await self.run_command("purge", carol.did, "--older-than", "0s", "--yes"))["messages"], 223)
        remaining = await self.run_command("list")
        # The daemon may have ended during a probe.
        self.assertLessEqual({(entry["self_test"], entry["messages"]) for entry in remaining["queues"]}, {(True, 1)})
        self.assertEqual(remaining["totals"]["messages"], len(remaining["queues"]))
        self.assertEqual(remaining["totals"]["bytes"], sum(entry["bytes"] for entry in remaining["queues"]))
        self.assert_ledger_matches_log(
            Counter({"msg.accept": QUEUE_SIZE + 6, "msg.ack": 11, "msg.remove": 5 + 3 + 1 + 223})
        )
        await deferToThread(daemon.start)
        self.assertEqual(await drain_queue(carol), {})

    def register_identities(self) -> tuple[RawDecentrlClient, RawDecentrlClient]:
        """Two identities of which the first may send to the other."""
        daemon_client = DaemonClient(self.daemon)
        dave, erin = RawDecentrlClient(daemon_client, "dave"), RawDecentrlClient(daemon_client, "erin")
        for identity in (dave, erin):
            identity.register()
        erin.permit_sender(dave)
        return dave, erin

    def send_events(self, sender: RawDecentrlClient, recipient: RawDecentrlClient, count: int) -> None:
        for _ in range(count):
            self.assertEqual(sender.send_event(recipient).status, 200)

    async def post_forwards(self, wallet: DIDCommWallet, prefix: str, count: int) -> None:
        """Post forwards, which must all be accepted."""
        senders = LoadSenders(self.daemon.port, prepare_forwards(wallet, prefix, count))
        senders.start()
        await deferToThread(senders.join)
        self.assertEqual(len(senders.markers(202)), count)

    async def fetch_and_acknowledge(self, wallet: DIDCommWallet, count: int) -> list[Any]:
        """Fetch and acknowledge messages."""
        batch = list(await wallet.fetch(count))
        await wallet.acknowledge(batch)
        return batch

    async def run_command(self, *arguments: str) -> Any:
        """JSON output of the command."""
        return await deferToThread(self.run_command_blocking, *arguments)

    def run_command_blocking(self, *arguments: str) -> Any:
        command = [sys.executable, "-m", "mediatord", "queue", *arguments, "--json"]
        result = subprocess.run(
            [*command, "--config", str(self.daemon.config)], capture_output=True, text=True, check=False
        )
        self.assertEqual((result.returncode, result.stderr), (0, ""), result.stdout)
        return json.loads(result.stdout)

    def assert_refusals(self) -> None:
        """The queue of an unknown DID cannot be shown, nor that of the probe purged."""
        for command in (("show", "did:web:nobody.example"), ("purge", "did:web:nobody.example", "--yes")):
            self.assertEqual(self.run_refused(*command), "did:web:nobody.example is not a registered DID")
        config = load_config(self.daemon.config, {})
        if config.workers > 1:
            return  # each worker has its own probe DID
        # It has an account after its first success, which may take a while on a slow store.
        with closing(ReadinessClient(self.daemon)) as client:
            client.await_verdict(200)
        probe_did = ProbeIdentities(read_identity(config).root_secret).identity(config.node_name).did
        self.assertEqual(self.run_command_blocking("show", probe_did)["self_test"], True)
        self.assertIn("belongs to the daemon's self-test", self.run_refused("purge", probe_did, "--yes"))

    def run_refused(self, *arguments: str) -> str:
        """The line with which the command fails."""
        command = [sys.executable, "-m", "mediatord", "-c", str(self.daemon.config), "queue", *arguments, "--json"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual((result.returncode, result.stdout, result.stderr.count("\n")), (1, "", 1), result.stderr)
        return result.stderr.removeprefix("mediatord: ").rstrip("\n")

    def assert_ledger_matches_log(self, expected: Counter[str]) -> None:
        """Each message has one acceptance and one end, and counters agree with the event log."""
        log = self.daemon.log_directory
        lines = [
            line
            for directory in (log, *sorted(filter(_is_of_worker, log.iterdir())))
            for line in read_lines(directory)
        ]
        counters = Counter(line["event"] for line in lines if line["event"] in ("msg.accept", *ENDS))
        self.assertEqual(counters, expected)
        accepted = [line["msg"] for line in lines if line["event"] == "msg.accept"]
        ends = [line["msg"] for line in lines if line["event"] in ENDS]
        self.assertEqual(sorted(accepted), sorted(ends))
        self.assertEqual(wrong_counter_lines(lines), [])
        self.assertEqual(sorted(path.name for path in log.iterdir() if path.name.startswith(".")), [])


def _is_of_worker(path: Any) -> bool:
    return bool(path.is_dir()) and path.name != MARKER_DIRECTORY


@pytest.mark.parametrize("workers", [1, 2])
def test_runs_without_control_socket(workers: int) -> None:
    """If it cannot be created; commands say what to do."""
    with Daemon({"control_socket": "/proc/control.sock", "workers": workers}) as daemon:
        lines = [line for line in daemon.output().splitlines() if "control_socket" in line]
        assert len(lines) == 1, daemon.output()
        assert lines[0].endswith(
            "control_socket: cannot listen on /proc/control.sock: No such file or directory; "
            "commands cannot connect to this daemon"
        )
        assert "Traceback" not in daemon.output()
        command = [sys.executable, "-m", "mediatord", "-c", str(daemon.config), "queue", "list"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1), result.stderr
        assert result.stderr.startswith(
            f"mediatord: a daemon uses {daemon.directory}/mediator.sqlite3; no daemon listens "
        )
        daemon.stop()
        daemon.start()


def test_refuses_start_if_control_socket_is_in_use() -> None:
    """The socket is left as it is."""
    with Daemon() as daemon:
        path = daemon.directory / "control.sock"
        other = prepare_daemon({"control_socket": str(path)})
        with pytest.raises(AssertionError, match=f"control_socket: another daemon listens on {path}"):
            other.start()
        other.clean()
        command = [sys.executable, "-m", "mediatord", "-c", str(daemon.config), "queue", "list"]
        assert subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout


@pytest.mark.exhaustive
class WorkersQueueTests(QueueTests):
    def settings(self) -> dict[str, Any]:
        return {"workers": 2}


@pytest.mark.exhaustive
class MongoDBQueueTests(QueueTests):
    if mongod_binary() is None:
        skip = "there is no MongoDB server"

    def settings(self) -> dict[str, Any]:
        self.storage = make_mongo_storage(self)
        return {"storage": self.storage}

    def assert_ledger_matches_log(self, expected: Counter[str]) -> None:
        """The stored ledger agrees too."""
        super().assert_ledger_matches_log(expected)
        database = parse_mongo_uri(self.storage["mongodb"]["uri"]).database
        client = shared_replica_set().client
        self.assertEqual(find_miscounts(client, database), [])
        pages = list(client[database]["ledger"].find())
        removed = [
            sum(page.get(protocol, {}).get("removed", 0) for page in pages) for protocol in ("didcomm", "decentrl")
        ]
        self.assertEqual(removed, [expected["msg.remove"] - 3, 3])
