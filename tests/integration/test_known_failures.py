"""Known failures of other mediators, each tested against a real daemon."""

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
from tests.integration.devices import CM3, DeviceWallet, LiveDevice
from tests.integration.message_load import PATIENCE_SECONDS, ROOMY
from tests.integration.raw_decentrl_client import RawDecentrlClient
from tests.integration.shared_daemon import SharedDaemonTestCase
from tests.integration.sqlite_lock import lock_database
from tests.observability.counter_oracle import read_segments

OUTBOX = 65_536


class QueueTests(SharedDaemonTestCase):
    """
    Failures of queues and pickup:

    * the message id is taken from the sender's attachment;
    * a store failure is reported as "0 messages".
    """

    settings = ROOMY

    def setUp(self) -> None:
        self.bob = DeviceWallet(self.daemon_client).enrol()

    def test_attachment_ids_of_senders_do_not_collide(self) -> None:
        """Two senders use the same attachment id."""
        for text in ("one", "other"):
            message = build_forward(self.bob.did, [self.bob.pack_message(text)])
            message["attachments"][0]["id"] = "0"
            self.assertEqual(self.bob.post(anoncrypt(message, self.bob.mediator)).status, 202)
        one, other = self.bob.fetch()
        self.assertEqual(len({one.id, other.id, "0"}), 3)
        self.bob.acknowledge("0")
        self.assertEqual(self.bob.queued_count(), 2)
        self.bob.acknowledge(one.id)
        self.assertEqual(self.bob.queued_texts(), ["other"])

    def test_locked_database_is_not_reported_as_empty_queue(self) -> None:
        """While nothing can be written the queue is read as it is, and an acknowledgement is refused."""
        self.bob.send_text("there")
        with lock_database(self.daemon.directory / "mediator.sqlite3"):
            self.assertEqual((self.bob.queued_count(), self.bob.queued_texts()), (1, ["there"]))
            response = self.bob.request(f"{PICKUP}/messages-received", {"message_id_list": ["unknown"]})
            self.assertEqual(response.status, 503, response.body)
            self.assertGreater(int(response.headers["retry-after"]), 0)
        self.assertEqual((self.bob.queued_count(), self.bob.queued_texts()), (1, ["there"]))


class SocketTests(SharedDaemonTestCase):
    """
    Failures of pushes:

    * a crash between push and acknowledgement loses the message;
    * a forward is answered only after a time-out of its recipient.
    """

    settings = {
        **ROOMY,
        "limits": {"max_outbox_bytes": OUTBOX},
        "outbound": {"allow_private": ["127.0.0.0/8"]},
        "didcomm": {"failover": "account-did"},
    }

    def setUp(self) -> None:
        self.bob = DeviceWallet(self.daemon_client).enrol()

    def open_live_device(self, owner: DeviceWallet | None = None) -> LiveDevice:
        """A device with live delivery."""
        device = LiveDevice(owner or self.bob)
        self.addCleanup(device.close)
        return device.set_live()

    def test_kill_between_push_and_acknowledgement_keeps_message(self) -> None:
        """Killed with SIGKILL right after a push, the daemon has the message after its restart, under the same id."""
        device = self.open_live_device()
        self.bob.send_text("pushed")
        pushed = device.next_push()
        self.daemon.kill()
        self.daemon.start()
        self.assertEqual([one.id for one in self.bob.fetch()], [pushed.id])
        self.assertEqual(self.bob.queued_texts(), ["pushed"])

    def test_silent_endpoint_does_not_delay_senders(self) -> None:
        """The sender gets 202 before the wallet's endpoint has answered."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(PATIENCE_SECONDS)
            url = f"http://127.0.0.1:{server.getsockname()[1]}/"
            carol = DeviceWallet(self.daemon_client, WalletIdentity.generate(endpoint=url)).enrol()
            carol.send_text("for an endpoint")
            connection, _ = server.accept()
            with connection:
                connection.settimeout(PATIENCE_SECONDS)
                self.assertEqual(connection.recv(5), b"POST ")
                self.assertEqual(carol.queued_count(), 1)
                carol.send_text("another one")


class SurfaceTests(SharedDaemonTestCase):
    """
    Other failures:

    * each health check leaks a resource;
    * payloads are in the debug log.
    """

    settings = {**ROOMY, "log": {"level": "debug"}}

    def test_health_checks_leak_no_descriptors(self) -> None:
        """After hundreds of them the number of descriptors is about the same."""
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

    def test_debug_log_contains_no_payloads(self) -> None:
        """Nor envelopes or keys."""
        secret = "a payload that is known when it is seen"
        bob = DeviceWallet(self.daemon_client).enrol()
        device = LiveDevice(bob).set_live()
        self.addCleanup(device.close)
        payload = bob.pack_message(secret)
        raw = bob.pack_forward(payload)
        self.assertEqual(bob.post(raw).status, 202)
        request = bob.pack(f"{CM3}/recipient-query", {"note": secret})
        self.assertEqual(bob.post(request).status, 200)
        self.assertEqual(bob.post(request[:-40] + b'"' + b"A" * 38 + b"}").status, 400)
        bob.acknowledge(device.next_push().id)
        dave, eve = RawDecentrlClient(self.daemon_client, "dave"), RawDecentrlClient(self.daemon_client, "eve")
        dave.register()
        dave.permit_sender(eve)
        self.assertEqual(eve.send_event(dave, secret).status, 200)
        dave.execute("SAVE_EVENTS", events=[dave.stored_event(secret)])
        self.daemon.restart()
        log_text = b"".join(line for lines in read_segments(self.daemon.log_directory).values() for line in lines)
        log_text += self.daemon.output().encode()
        self.assertIn(b'"msg.accept"', log_text)
        keys = [key["d"] for key in json.loads((self.daemon.directory / "keys.jwks").read_bytes())["keys"]]
        parts = [part for envelope in (payload, raw, request) for part in long_texts(encoding.loads_object(envelope))]
        self.assertGreater(len(parts), 12)
        for text in (secret, *keys, *parts):
            self.assertNotIn(text.encode(), log_text)


def long_texts(value: Any) -> Iterator[str]:
    """All long texts in an envelope."""
    member = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for text in member:
        yield from long_texts(text)
    if isinstance(value, str) and len(value) > 20 and not value.startswith("did:"):
        yield value
