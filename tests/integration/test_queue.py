"""`mediatord queue` beside a running daemon and after it, on every backend that keeps something."""

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
from tests.integration.cluster import fresh_storage
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

# More than is taken out at a time, and more than that by an odd number.
MANY = 237
ENDS = ("msg.ack", "msg.remove", "msg.expire", "msg.evict")


class QueueTests(TestCase):
    def settings(self) -> dict[str, Any]:
        """Of the daemon, beside those of a large queue."""
        return {}

    async def test_beside_a_daemon(self) -> None:
        """Only what is named goes; what is being delivered stays so, and every message is in the books."""
        # Until they are looked at, messages that were pushed stay so, however long the commands in between take.
        queue = {"queue": {**ROOMY["queue"], "delivered_timeout": "1h"}}
        self.daemon = daemon = prepare_daemon({**queue, **self.settings()})
        self.addCleanup(daemon.clean)
        await deferToThread(daemon.start)
        bob, carol = await enrol_wallet(daemon, reactor), await enrol_wallet(daemon, reactor)
        dave, erin = await deferToThread(self.friends)
        hears = await connect_didcomm_socket(reactor, bob)
        await hears.live()
        await self.post(bob, "pushed", 2)
        await self.post(carol, "kept", MANY)
        pushed = [await hears.pushed.get() for _ in range(2)]
        await deferToThread(self.tell, dave, erin, 3)

        listed = await self.asked("list")
        self.assertEqual(
            [(one["protocol"], one["did"], one["messages"]) for one in listed["queues"]],
            [("didcomm", carol.did, MANY), ("decentrl", erin.did, 3), ("didcomm", bob.did, 2)],
        )
        self.assertEqual(listed["totals"]["messages"], MANY + 5)
        kept = [one["id"] for one in (await self.asked("show", carol.did, "--top", "1000"))["shown"]]
        self.assertEqual(len(kept), MANY)

        ids = [word for id in kept[:5] for word in ("--id", id)]
        planned = await self.asked("purge", carol.did, *ids)
        self.assertEqual((planned["messages"], planned["ids"], planned["dry_run"]), (5, kept[:5], True))
        self.assertEqual((await self.asked("purge", carol.did, *ids, "--yes"))["messages"], 5)
        self.assertEqual((await self.asked("purge", erin.did, "--yes"))["protocols"], {"decentrl": 3})
        self.assertEqual(await deferToThread(erin.pending), [])

        shown = (await self.asked("show", bob.did))["shown"]
        self.assertEqual([(one["status"], one["pushes"]) for one in shown], [("delivered", 1)] * 2)
        await hears.acknowledge(pushed[:1])
        self.assertEqual((await self.asked("purge", bob.did, "--yes"))["messages"], 1)
        await hears.acknowledge(pushed)
        await hears.close()
        self.assertEqual(len(await self.fetched(carol, 10)), 10)
        await self.post(carol, "more", 1)

        await deferToThread(self.check_refusals)
        await deferToThread(daemon.stop)
        left = await self.asked("show", carol.did, "--top", "1000")
        self.assertEqual(left["messages"], MANY - 5 - 10 + 1)
        self.assertEqual((await self.asked("purge", carol.did, "--older-than", "0s", "--yes"))["messages"], 223)
        left = await self.asked("list")
        # The daemon may have ended while a message of its self-test was under way.
        self.assertLessEqual({(one["self_test"], one["messages"]) for one in left["queues"]}, {(True, 1)})
        self.assertEqual(left["totals"]["messages"], len(left["queues"]))
        self.assertEqual(left["totals"]["bytes"], sum(one["bytes"] for one in left["queues"]))
        self.check_books(Counter({"msg.accept": MANY + 6, "msg.ack": 11, "msg.remove": 5 + 3 + 1 + 223}))
        await deferToThread(daemon.start)
        self.assertEqual(await drain_queue(carol), {})

    def friends(self) -> tuple[RawDecentrlClient, RawDecentrlClient]:
        """Two identities of which the first may write to the other."""
        daemon_client = DaemonClient(self.daemon)
        dave, erin = RawDecentrlClient(daemon_client, "dave"), RawDecentrlClient(daemon_client, "erin")
        for one in (dave, erin):
            one.register()
        erin.befriend(dave)
        return dave, erin

    def tell(self, sender: RawDecentrlClient, recipient: RawDecentrlClient, count: int) -> None:
        for _ in range(count):
            self.assertEqual(sender.tell(recipient).status, 200)

    async def post(self, wallet: DIDCommWallet, prefix: str, count: int) -> None:
        """Send letters that are all accepted."""
        senders = LoadSenders(self.daemon.port, prepare_forwards(wallet, prefix, count))
        senders.start()
        await deferToThread(senders.join)
        self.assertEqual(len(senders.markers(202)), count)

    async def fetched(self, wallet: DIDCommWallet, count: int) -> list[Any]:
        """What was fetched, and acknowledged."""
        batch = list(await wallet.fetch(count))
        await wallet.acknowledge(batch)
        return batch

    async def asked(self, *arguments: str) -> Any:
        """What the command prints."""
        return await deferToThread(self.ask, *arguments)

    def ask(self, *arguments: str) -> Any:
        command = [sys.executable, "-m", "mediatord", "queue", *arguments, "--json"]
        done = subprocess.run(
            [*command, "--config", str(self.daemon.config)], capture_output=True, text=True, check=False
        )
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        return json.loads(done.stdout)

    def check_refusals(self) -> None:
        """Nobody's queue is not looked into, and that of the daemon's self-test is not purged."""
        for command in (("show", "did:web:nobody.example"), ("purge", "did:web:nobody.example", "--yes")):
            self.assertEqual(self.refused(*command), "did:web:nobody.example: nobody has registered this DID")
        config = load_config(self.daemon.config, {})
        if config.workers > 1:
            return  # each has a DID of its own
        # It has an account once it has succeeded, which it may not at first where a message takes long.
        with closing(ReadinessClient(self.daemon)) as asking:
            asking.until(200)
        own = ProbeIdentities(read_identity(config).root_secret).identity(config.node_name).did
        self.assertEqual(self.ask("show", own)["self_test"], True)
        self.assertIn("belongs to the daemon's own self-test", self.refused("purge", own, "--yes"))

    def refused(self, *arguments: str) -> str:
        """The one line that the command ends with."""
        command = [sys.executable, "-m", "mediatord", "-c", str(self.daemon.config), "queue", *arguments, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (1, "", 1), done.stderr)
        return done.stderr.removeprefix("mediatord: ").rstrip("\n")

    def check_books(self, expected: Counter[str]) -> None:
        """Each message has one acceptance and one end, whoever wrote them, and all counters agree with the lines."""
        log = self.daemon.log_directory
        lines = [
            line for folder in (log, *sorted(filter(_is_of_worker, log.iterdir()))) for line in read_lines(folder)
        ]
        told = Counter(line["event"] for line in lines if line["event"] in ("msg.accept", *ENDS))
        self.assertEqual(told, expected)
        accepted = [line["msg"] for line in lines if line["event"] == "msg.accept"]
        ended = [line["msg"] for line in lines if line["event"] in ENDS]
        self.assertEqual(sorted(accepted), sorted(ended))
        self.assertEqual(wrong_counter_lines(lines), [])
        self.assertEqual(sorted(path.name for path in log.iterdir() if path.name.startswith(".")), [])


def _is_of_worker(path: Any) -> bool:
    return bool(path.is_dir()) and path.name != MARKER_DIRECTORY


@pytest.mark.parametrize("workers", [1, 2])
def test_no_control_socket(workers: int) -> None:
    """Where its socket cannot be made a daemon runs without one, and commands say what to do about it."""
    with Daemon({"control_socket": "/proc/control.sock", "workers": workers}) as daemon:
        lines = [line for line in daemon.output().splitlines() if "control_socket" in line]
        assert len(lines) == 1, daemon.output()
        assert lines[0].endswith(
            "control_socket: cannot listen on /proc/control.sock: No such file or directory; "
            "commands cannot reach this daemon"
        )
        assert "Traceback" not in daemon.output()
        command = [sys.executable, "-m", "mediatord", "-c", str(daemon.config), "queue", "list"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
        assert done.stderr.startswith(
            f"mediatord: a daemon uses {daemon.directory}/mediator.sqlite3, and none listens "
        )
        daemon.stop()
        daemon.start()


def test_control_socket_of_another_daemon() -> None:
    """It keeps a daemon from starting, and stays as it is."""
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
        self.storage = fresh_storage(self)
        return {"storage": self.storage}

    def check_books(self, expected: Counter[str]) -> None:
        """So do those of the store."""
        super().check_books(expected)
        database = parse_mongo_uri(self.storage["mongodb"]["uri"]).database
        client = shared_replica_set().client
        self.assertEqual(find_miscounts(client, database), [])
        pages = list(client[database]["ledger"].find())
        removed = [
            sum(page.get(protocol, {}).get("removed", 0) for page in pages) for protocol in ("didcomm", "decentrl")
        ]
        self.assertEqual(removed, [expected["msg.remove"] - 3, 3])
