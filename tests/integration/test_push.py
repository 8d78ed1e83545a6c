"""Push notifications end to end: wallets, a daemon, and push services over TLS, all in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.threads import deferToThread

from mediatord.bench.processes import list_children
from mediatord.wallet.decentrl_client import DecentrlWallet, discover_decentrl_mediator
from mediatord.wallet.didcomm_client import DIDCommWallet, open_http
from tests.decentrl_contracts import make_contract
from tests.integration.cluster import DaemonCluster
from tests.integration.daemon import POLL_SECONDS, Daemon
from tests.integration.message_load import (
    PATIENCE_SECONDS,
    LoadSenders,
    drain_queue,
    enrol_wallet,
    prepare_forwards,
)
from tests.integration.push_services import PushServices
from tests.integration.test_lifecycle import DaemonTestCase, send_request
from tests.integration.test_workers import await_workers, pid_of
from tests.mongod import fresh_database, shared_replica_set

reactor: Any = _reactor

PHONE = {"device_token": "phone-token", "device_platform": "android"}
TOKEN, LATER = PHONE["device_token"], "later-token"
# Longer than any test.
ONCE: dict[str, Any] = {"min_interval": "1h"}
# Accounts whose service hangs.
_HANGING = 8


def read_metric(daemon: Daemon, series: str) -> float:
    """Value of a series; 0 if there is none."""
    _, _, body = send_request(daemon.port, "GET", "/metrics")
    lines = body.decode().splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{series} ")), 0.0)


def await_metric(daemon: Daemon, series: str, value: float) -> None:
    """
    Wait until a series has a value; blocks.

    :raise AssertionError: it has not in time.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (found := read_metric(daemon, series)) != value:
        assert time.monotonic() < deadline, found
        time.sleep(POLL_SECONDS)


def find_senders(daemon: Daemon) -> list[int]:
    """Processes that make requests for a daemon."""
    return [pid for pid in list_children(daemon.pid) if b"push-sender" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def await_senders(daemon: Daemon) -> list[int]:
    """
    Wait for such a process; blocks.

    :raise AssertionError: there is none in time.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := find_senders(daemon)):
        assert time.monotonic() < deadline
        time.sleep(POLL_SECONDS)
    return found


class PushTestCase(DaemonTestCase):
    """Push services, and daemons that use them."""

    def setUp(self) -> None:
        self.services = PushServices()
        self.addCleanup(self.services.close)

    def start(self, settings: dict[str, Any] | None = None, **push: Any) -> Daemon:
        """A running daemon."""
        daemon = self.services.prepare_daemon(settings, **push)
        daemon.__enter__()
        self.addCleanup(daemon.__exit__, AssertionError, None, None)
        return daemon

    async def send(self, daemon: Daemon, wallet: DIDCommWallet, prefix: str, count: int = 1) -> None:
        """Send messages to a wallet, all of which are accepted."""
        senders = LoadSenders(daemon.port, prepare_forwards(wallet, prefix, count))
        senders.start()
        await deferToThread(senders.join)
        self.assertEqual(len(senders.markers(202)), count)

    async def await_fcm(self, number: int) -> list[dict[str, Any]]:
        """Wait for messages of FCM; all of them."""
        received = await deferToThread(self.services.await_received, lambda found: len(found["fcm"]) >= number)
        return list(received["fcm"])

    async def list_woken(self, daemon: Daemon, messages: int = 1) -> list[str]:
        """
        Tokens that FCM was told of, in order, the last of which is that of an account that is woken only now.

        :param messages: for that account.
        """
        other = await enrol_wallet(daemon, reactor)
        await other.set_push_device("fcm", {**PHONE, "device_token": LATER})
        await self.send(daemon, other, "other", messages)

        def reached(found: dict[str, Any]) -> bool:
            return any(message["token"] == LATER for message in found["fcm"])

        received = await deferToThread(self.services.await_received, reached)
        return [message["token"] for message in received["fcm"]]


class WakeTests(PushTestCase):
    """A sleeping wallet is woken, and fetches."""

    async def test_fcm(self) -> None:
        """One wake-up for a storm, without anything about the messages; the wallet fetches all of them."""
        daemon = self.start(**ONCE)
        wallet = await enrol_wallet(daemon, reactor)
        await wallet.set_push_device("fcm", PHONE)
        await self.send(daemon, wallet, "storm", 200)
        (message,) = await self.await_fcm(1)
        self.assertEqual(message["token"], "phone-token")
        self.assertEqual(set(message["data"]), {"mediator"})
        self.assertEqual(len(await drain_queue(wallet)), 200)
        self.assertEqual(await self.list_woken(daemon), [TOKEN, LATER])

    async def test_web_push(self) -> None:
        """The subscription of a browser, which decrypts what it is sent."""
        daemon = self.start()
        wallet = await enrol_wallet(daemon, reactor)
        subscription = self.services.subscribe(await wallet.vapid_public_key())
        await wallet.set_push_device("web_push", subscription)
        await self.send(daemon, wallet, "one")

        def reached(found: dict[str, Any]) -> bool:
            return bool(found["web_push"][subscription["endpoint"]])

        received = await deferToThread(self.services.await_received, reached)
        (content,) = received["web_push"][subscription["endpoint"]]
        self.assertEqual(set(json.loads(content)), {"mediator"})

    async def test_live_wallets_are_not_woken(self) -> None:
        """Nothing is sent while a socket takes the messages; once it is closed, a message wakes again."""
        daemon = self.start(**ONCE)
        wallet = await enrol_wallet(daemon, reactor)
        await wallet.set_push_device("fcm", PHONE)
        socket = await self.open_socket(wallet)
        await socket.live()
        await self.send(daemon, wallet, "live", 5)
        await socket.acknowledge([await socket.pushed.get() for _ in range(5)])
        self.assertEqual(await self.list_woken(daemon), [LATER])
        await socket.close()
        await self.send(daemon, wallet, "asleep")
        self.assertEqual([message["token"] for message in await self.await_fcm(2)], [LATER, TOKEN])

    async def test_dead_devices_are_removed(self) -> None:
        """FCM does not know the token any more."""
        daemon = self.start()
        wallet = await enrol_wallet(daemon, reactor)
        await wallet.set_push_device("fcm", PHONE)
        gone = {
            "error": {
                "code": 404,
                "status": "NOT_FOUND",
                "details": [
                    {"@type": "type.googleapis.com/google.firebase.fcm.v1.FcmError", "errorCode": "UNREGISTERED"}
                ],
            }
        }
        self.services.set_answers("fcm", always={"status": 404, "body": json.dumps(gone)})
        await self.send(daemon, wallet, "one")
        forgotten = 'mediator_push_devices_forgotten_total{service="fcm"}'
        await deferToThread(await_metric, daemon, forgotten, 1.0)
        self.assertIsNone(await wallet.get_push_device("fcm"))

    async def test_a_service_that_hangs_delays_nothing(self) -> None:
        """Forwards are accepted, and an account with another service is woken, though it never answers anything."""
        daemon = self.start()
        self.services.set_answers("fcm", always={"status": 200, "behaviour": "hang"})
        sleeping = [await enrol_wallet(daemon, reactor) for _ in range(_HANGING)]
        for number, wallet in enumerate(sleeping):
            await wallet.set_push_device("fcm", {**PHONE, "device_token": f"phone-{number}"})
        for wallet in sleeping:
            await self.send(daemon, wallet, "one")
        await deferToThread(self.services.await_received, lambda found: found["requests"]["fcm"] >= _HANGING)
        wallet = await enrol_wallet(daemon, reactor)
        await wallet.set_push_device("fcm", PHONE)
        subscription = self.services.subscribe(await wallet.vapid_public_key())
        await wallet.set_push_device("web_push", subscription)
        await self.send(daemon, wallet, "one", 100)

        def reached(found: dict[str, Any]) -> bool:
            return bool(found["web_push"][subscription["endpoint"]])

        received = await deferToThread(self.services.await_received, reached)
        self.assertEqual(received["fcm"], [])


class CrashTests(PushTestCase):
    """A daemon that is killed between accepting a message and waking its wallet."""

    async def test_kill_before_the_wakeup(self) -> None:
        """The next start sends it."""
        daemon = self.start()
        wallet = await enrol_wallet(daemon, reactor)
        await wallet.set_push_device("fcm", PHONE)
        self.services.set_answers("fcm", always={"status": 503})
        await self.send(daemon, wallet, "one")
        await deferToThread(self.services.await_received, lambda found: found["requests"]["fcm"] >= 1)
        daemon.kill()
        self.services.set_answers("fcm")
        self.assertEqual(self.services.received()["fcm"], [])
        daemon.start()
        await self.await_fcm(1)


class ProcessTests(PushTestCase):
    """Workers on one database, and nodes on MongoDB."""

    async def test_workers(self) -> None:
        """One wake-up, whichever workers have accepted the messages."""
        daemon = self.start({"workers": 2}, **ONCE)
        await deferToThread(await_workers, daemon, 2)
        wallet = await enrol_wallet(daemon, reactor)
        await wallet.set_push_device("fcm", PHONE)
        await self.send(daemon, wallet, "storm", 200)
        await self.await_fcm(1)
        self.assertEqual(len(await drain_queue(wallet)), 200)
        self.assertEqual(await self.list_woken(daemon, 20), [TOKEN, LATER])

    async def test_killed_workers(self) -> None:
        """Their replacements send what they have not."""
        daemon = self.start({"workers": 2, "node": "n"})
        await deferToThread(await_workers, daemon, 2)
        wallet = await enrol_wallet(daemon, reactor)
        await wallet.set_push_device("fcm", PHONE)
        self.services.set_answers("fcm", always={"status": 503})
        await self.send(daemon, wallet, "one", 20)
        await deferToThread(self.services.await_received, lambda found: found["requests"]["fcm"] >= 1)
        for number in (1, 2):
            os.kill(pid_of(daemon, f"n-{number}"), signal.SIGKILL)
        self.services.set_answers("fcm")
        await self.await_fcm(1)
        self.assertEqual(len(await drain_queue(wallet)), 20)

    async def test_killed_node(self) -> None:
        """Another node sends what a node has not that was killed and does not come back."""
        database = fresh_database()
        name = database.__enter__()
        self.addCleanup(database.__exit__, None, None, None)
        cluster = DaemonCluster(shared_replica_set().uri(name), ("a", "b"), self.services.settings())
        self.addCleanup(cluster.clean)
        for node in cluster.nodes:
            node.environment.update(self.services.environment)
        await deferToThread(cluster.start)
        first, second = cluster.nodes
        wallet = await enrol_wallet(first, reactor)
        await wallet.set_push_device("fcm", PHONE)
        self.services.set_answers("fcm", always={"status": 503})
        await self.send(second, wallet, "one", 20)
        await deferToThread(self.services.await_received, lambda found: found["requests"]["fcm"] >= 1)
        second.kill()
        self.services.set_answers("fcm")
        await self.await_fcm(1)
        self.assertEqual(len(await drain_queue(wallet)), 20)


class SenderProcessTests(PushTestCase):
    """Requests are made in a child process of the daemon."""

    async def test_wake_kill_and_stop(self) -> None:
        """It wakes; a wake-up that it was making when it was killed still comes; a stop leaves no child behind."""
        daemon = self.start(sender_process=True)
        wallet = await enrol_wallet(daemon, reactor)
        await wallet.set_push_device("fcm", PHONE)
        await self.send(daemon, wallet, "one")
        await self.await_fcm(1)
        await deferToThread(await_metric, daemon, 'mediator_push_requests_total{outcome="sent",service="fcm"}', 1.0)
        self.assertEqual(len(await drain_queue(wallet)), 1)
        (first,) = find_senders(daemon)
        self.services.set_answers("fcm", always={"status": 200, "behaviour": "hang"})
        await self.send(daemon, wallet, "two")
        await deferToThread(self.services.await_received, lambda found: found["requests"]["fcm"] >= 2)
        os.kill(first, signal.SIGKILL)
        self.services.set_answers("fcm")
        await self.await_fcm(2)
        (second,) = find_senders(daemon)
        self.assertNotEqual(first, second)
        # As a terminal or a service manager could send them; only the end of its daemon ends it.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            os.kill(second, number)
        self.assertEqual(find_senders(daemon), [second])
        await deferToThread(daemon.stop)
        self.assertFalse(Path(f"/proc/{second}").exists())

    async def test_killed_daemon(self) -> None:
        """Its child ends by itself."""
        daemon = self.start(sender_process=True)
        (child,) = await deferToThread(await_senders, daemon)
        daemon.kill()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
            await deferToThread(time.sleep, POLL_SECONDS)
        self.assertFalse(Path(f"/proc/{child}").exists())


class DecentrlTests(PushTestCase):
    """Decentrl identities, whose commands are switched on."""

    async def test_fcm(self) -> None:
        """An event for an identity without a socket, which fetches it."""
        daemon = self.start(decentrl=True)
        http = open_http(reactor)
        mediator = await discover_decentrl_mediator(http, daemon.url)
        alice, bob = [DecentrlWallet.generate(alias, mediator, http, reactor) for alias in ("alice", "bob")]
        await alice.register()
        await bob.register()
        await make_contract(alice, bob)
        await bob.set_push_device("fcm", PHONE)
        await alice.send(bob.did, "hello")
        (message,) = await self.await_fcm(1)
        self.assertEqual(message["token"], PHONE["device_token"])
        self.assertEqual((await bob.pending()).total, 1)
