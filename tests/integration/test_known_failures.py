"""What other mediators are known to have done wrong, each once, at a real daemon."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from typing import Any

from mediatord.protocol import encoding
from mediatord.wallet.didcomm_client import PICKUP
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import anoncrypt, build_forward
from tests.integration.devices import CM3, DeviceWallet, LiveDevice, UnreadDevice, read_metric, read_next_pushes
from tests.integration.message_load import PATIENCE_SECONDS, ROOMY
from tests.integration.raw_decentrl_client import JSON, RawDecentrlClient
from tests.integration.shared_daemon import SharedDaemonTestCase
from tests.integration.sqlite_lock import lock_database
from tests.observability.counter_oracle import read_segments

# The one is the beginning of the other.
PREFIX, LONGER = "did:example:in", "did:example:inbox"
OUTBOX = 65_536
_OUTBOXES = 'mediator_buffer_bytes{buffer="socket_outboxes"}'


class QueueTests(SharedDaemonTestCase):
    """
    Failures of queues and of pickup:

    * acknowledging one message marks others;
    * `limit` is ignored, or zero is no limit;
    * `messages-received` deletes what is somebody else's;
    * a DID that is the beginning of another one reads its queue;
    * the id of a message is taken from the attachment that its sender made;
    * a store that fails is reported as "0 messages".
    """

    settings = ROOMY

    def setUp(self) -> None:
        self.bob = DeviceWallet(self.daemon_client).enrol()

    def test_acknowledging_one_id_marks_others(self) -> None:
        """Of three that were delivered, the second goes; the others are delivered again, in order, on every way."""
        device = LiveDevice(self.bob).live()
        self.addCleanup(device.close)
        for text in "abc":
            self.bob.tell(text)
        first, second, third = (device.pushed().id for _ in "abc")
        device.acknowledge(second)
        self.assertEqual([one.id for one in self.bob.fetch()], [first, third])
        self.assertEqual(self.bob.waiting(), 2)
        self.assertEqual(self.bob.texts(), ["a", "c"])

    def test_limit_ignored_or_zero(self) -> None:
        """It is the most that comes; what is no number above 0 is refused, and nothing comes with that."""
        for text in "abc":
            self.bob.tell(text)
        for limit in (1, 2, 3, 4):
            self.assertEqual(len(self.bob.fetch(limit)), min(limit, 3))
        for body in ({"limit": 0}, {"limit": -1}, {"limit": "2"}, {"limit": True}, {"limit": 1.5}, {}):
            message = self.bob.open(self.bob.ask(f"{PICKUP}/delivery-request", body).body).message
            self.assertTrue(message.type.uri.endswith("problem-report"), message.type.uri)
            self.assertFalse(message.attachments)

    def test_ids_of_another_account(self) -> None:
        """Whoever acknowledges them, by id or by what they hash to, they stay until their own account does."""
        self.bob.tell("mine")
        (delivered,) = self.bob.fetch()
        carol = DeviceWallet(self.daemon_client).enrol()
        carol.tell("hers")
        carol.acknowledge(delivered.id, "unknown", *[one.id for one in carol.fetch()])
        self.assertEqual((carol.waiting(), self.bob.texts()), (0, ["mine"]))
        self.bob.acknowledge(delivered.id)
        self.assertEqual(self.bob.waiting(), 0)

    def test_a_prefix_of_another_did(self) -> None:
        """Neither of two DIDs, of which one is the beginning of the other, has anything of the other's."""
        short, long = DeviceWallet(self.daemon_client).enrol(PREFIX), DeviceWallet(self.daemon_client).enrol(LONGER)
        long.tell("for the long one", to=LONGER)
        self.assertEqual((short.texts(), long.texts()), ([], ["for the long one"]))
        short.tell("for the short one", to=PREFIX)
        self.assertEqual((short.texts(), long.texts()), (["for the short one"], ["for the long one"]))
        for one, did, count in ((short, PREFIX, 1), (long, LONGER, 1)):
            status = one.get(f"{PICKUP}/status-request", {"recipient_did": did})
            self.assertEqual((status.body or {})["message_count"], count)
        for one, did in ((short, LONGER), (long, PREFIX), (long, "did:example:")):
            message = one.open(one.ask(f"{PICKUP}/delivery-request", {"recipient_did": did, "limit": 9}).body).message
            self.assertEqual((message.body or {})["code"], "e.p.req.not_enroll")

    def test_ids_from_the_sender(self) -> None:
        """Two senders who call their attachments the same take nothing from each other."""
        for text in ("one", "other"):
            message = build_forward(self.bob.did, [self.bob.letter(text)])
            message["attachments"][0]["id"] = "0"
            self.assertEqual(self.bob.post(anoncrypt(message, self.bob.mediator)).status, 202)
        one, other = self.bob.fetch()
        self.assertEqual(len({one.id, other.id, "0"}), 3)
        self.bob.acknowledge("0")
        self.assertEqual(self.bob.waiting(), 2)
        self.bob.acknowledge(one.id)
        self.assertEqual(self.bob.texts(), ["other"])

    def test_a_store_failure_is_no_empty_queue(self) -> None:
        """Who asks while the store does not take anything is told so, and finds everything afterwards."""
        self.bob.tell("there")
        with lock_database(self.daemon.directory / "mediator.sqlite3"):
            answered = self.bob.ask(f"{PICKUP}/status-request")
            self.assertEqual(answered.status, 503, answered.body)
            self.assertGreater(int(answered.headers["retry-after"]), 0)
        self.assertEqual((self.bob.waiting(), self.bob.texts()), (1, ["there"]))


class SocketTests(SharedDaemonTestCase):
    """
    Failures of pushes:

    * a crash between a push and its acknowledgement loses the message;
    * a second socket closes the first;
    * a forward is answered only after a time-out of whoever it is for.
    """

    settings = {
        **ROOMY,
        "limits": {"max_outbox_bytes": OUTBOX},
        "outbound": {"allow_private": ["127.0.0.0/8"]},
        "didcomm": {"failover": "account-did"},
    }

    def setUp(self) -> None:
        self.bob = DeviceWallet(self.daemon_client).enrol()

    def device(self, owner: DeviceWallet | None = None) -> LiveDevice:
        """One that is live."""
        device = LiveDevice(owner or self.bob)
        self.addCleanup(device.close)
        return device.live()

    def test_a_crash_between_push_and_acknowledgement(self) -> None:
        """Killed with -9 right behind a push, it has the message when it is back, under the same id."""
        device = self.device()
        self.bob.tell("pushed")
        pushed = device.pushed()
        self.daemon.kill()
        self.daemon.start()
        self.assertEqual([one.id for one in self.bob.fetch()], [pushed.id])
        self.assertEqual(self.bob.texts(), ["pushed"])

    def test_a_second_socket(self) -> None:
        """Both are served, in both protocols."""
        devices = [self.device(), self.device()]
        self.bob.tell("for both")
        self.assertEqual(read_next_pushes(devices), ["for both"] * 2)
        dave, eve = RawDecentrlClient(self.daemon_client, "dave"), RawDecentrlClient(self.daemon_client, "eve")
        dave.register()
        dave.befriend(eve)
        lines = [dave.socket(), dave.socket()]
        for line in lines:
            self.addCleanup(line.close)
        self.assertEqual(eve.tell(dave, "for both").status, 200)
        self.assertEqual([line.hear()["events"][0]["payload"] for line in lines], ["for both"] * 2)

    def test_a_recipient_that_does_not_read(self) -> None:
        """It has neither read nor gone when everything for it was accepted, which is more than there is room for."""
        change = self.bob.pack(f"{PICKUP}/live-delivery-change", {"live_delivery": True})
        stuck = UnreadDevice(self.daemon_client, "/didcomm", change)
        self.addCleanup(stuck.close)
        while read_metric(self.daemon_client, _OUTBOXES) < OUTBOX:
            self.bob.tell("x", 200_000)
        for text in "abc":
            self.bob.tell(text, 200_000)
        self.assertEqual(self.bob.open(stuck.take(1)[0]).message.type.uri, f"{PICKUP}/delivery")

    def test_an_endpoint_that_does_not_answer(self) -> None:
        """A wallet's own server has the message, and has not answered yet, when the sender is told 202."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(PATIENCE_SECONDS)
            url = f"http://127.0.0.1:{server.getsockname()[1]}/"
            carol = DeviceWallet(self.daemon_client, WalletIdentity.generate(endpoint=url)).enrol()
            carol.tell("for an endpoint")
            connection, _ = server.accept()
            with connection:
                connection.settimeout(PATIENCE_SECONDS)
                self.assertEqual(connection.recv(5), b"POST ")
                self.assertEqual(carol.waiting(), 1)
                carol.tell("another one")


class SurfaceTests(SharedDaemonTestCase):
    """
    Failures at the surface:

    * a health check opens something at each call;
    * a Content-Type with parameters is refused;
    * payloads are in the debug log.
    """

    settings = {**ROOMY, "log": {"level": "debug"}}

    def test_a_health_check_that_leaves_something_open(self) -> None:
        """After hundreds of them the daemon has as many descriptors as before, give or take a few."""
        connection = self.daemon_client.connection()
        self.addCleanup(connection.close)

        def ask() -> None:
            for path in ("/health", "/ready"):
                connection.request("GET", path)
                connection.getresponse().read()

        ask()
        before = len(os.listdir(f"/proc/{self.daemon.pid}/fd"))
        for _ in range(200):
            ask()
        self.assertLess(len(os.listdir(f"/proc/{self.daemon.pid}/fd")), before + 10)

    def test_content_types_with_parameters(self) -> None:
        """Whatever stands behind it, and however it is spelled, on the short way and on the long one."""
        bob = DeviceWallet(self.daemon_client).enrol()
        spellings = ("{}; charset=utf-8", "{};charset=UTF-8", '{} ; profile="didcomm/v2"', "{};", "{}; a=b; c=d")
        kinds = [spelling.format("application/didcomm-encrypted+json") for spelling in spellings]
        kinds.append("Application/DIDComm-Encrypted+JSON; Charset=UTF-8")
        for kind in kinds:
            for more in ({}, {"X-Odd": "1"}):
                answered = bob.post(bob.forward(bob.letter(kind)), **{"Content-Type": kind}, **more)
                self.assertEqual((answered.status, answered.body), (202, b""), kind)
        self.assertEqual(bob.waiting(), 2 * len(kinds))
        dave = RawDecentrlClient(self.daemon_client, "dave")
        for spelling in spellings:
            members = {"type": "REQUEST_COMMUNICATION_CONTRACT", **dave.registration()}
            kind = spelling.format(JSON)
            self.assertEqual(
                self.daemon_client.command(dave.command(members), **{"Content-Type": kind}).status, 200, kind
            )

    def test_payloads_in_debug_logs(self) -> None:
        """Nothing of what is said, of the envelopes around it or of a key is in what the daemon writes about it."""
        secret = "a payload that is known when it is seen"
        bob = DeviceWallet(self.daemon_client).enrol()
        device = LiveDevice(bob).live()
        self.addCleanup(device.close)
        letter = bob.letter(secret)
        raw = bob.forward(letter)
        self.assertEqual(bob.post(raw).status, 202)
        request = bob.pack(f"{CM3}/recipient-query", {"note": secret})
        self.assertEqual(bob.post(request).status, 200)
        self.assertEqual(bob.post(request[:-40] + b'"' + b"A" * 38 + b"}").status, 400)
        bob.acknowledge(device.pushed().id)
        dave, eve = RawDecentrlClient(self.daemon_client, "dave"), RawDecentrlClient(self.daemon_client, "eve")
        dave.register()
        dave.befriend(eve)
        self.assertEqual(eve.tell(dave, secret).status, 200)
        dave.get("SAVE_EVENTS", events=[dave.event(secret)])
        self.daemon.restart()
        told = b"".join(line for lines in read_segments(self.daemon.log_directory).values() for line in lines)
        told += self.daemon.output().encode()
        self.assertIn(b'"msg.accept"', told)
        keys = [key["d"] for key in json.loads((self.daemon.directory / "keys.jwks").read_bytes())["keys"]]
        parts = [part for envelope in (letter, raw, request) for part in parts_of(encoding.loads_object(envelope))]
        self.assertGreater(len(parts), 12)
        for text in (secret, *keys, *parts):
            self.assertNotIn(text.encode(), told)


def parts_of(value: Any) -> Iterator[str]:
    """All long texts in an envelope."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for one in inner:
        yield from parts_of(one)
    if isinstance(value, str) and len(value) > 20 and not value.startswith("did:"):
        yield value
