"""Several devices of one DID: each gets every message, and none delays another."""

from __future__ import annotations

from typing import Any

from mediatord.protocol import encoding
from mediatord.wallet.didcomm_client import PICKUP, read_delivery
from tests.integration.devices import DeviceWallet, LiveDevice, UnreadDevice, read_metric, read_next_pushes
from tests.integration.message_load import ROOMY
from tests.integration.raw_decentrl_client import RawDecentrlClient, RawWebSocket
from tests.integration.shared_daemon import SharedDaemonTestCase

DEVICES = 10
# More messages than the kernel's buffers and a send queue hold.
MESSAGES = 200
SIZE = 24_000
SEND_QUEUE_BYTES = 65_536
# Limit of queued frames, and the transport's buffer.
_BOUND = SEND_QUEUE_BYTES + 64 * 1024 + 3 * SIZE
SETTINGS: dict[str, Any] = {**ROOMY, "limits": {"max_outbox_bytes": SEND_QUEUE_BYTES}}
_SEND_QUEUE_METRIC = 'mediator_buffer_bytes{buffer="socket_outboxes"}'


class DIDCommTests(SharedDaemonTestCase):
    """Live delivery on several sockets of an account (Message Pickup 3.0)."""

    settings = SETTINGS

    def setUp(self) -> None:
        self.bob = DeviceWallet(self.daemon_client).enrol()

    def open_live_devices(self, number: int) -> list[LiveDevice]:
        """Devices with live delivery."""
        devices = [LiveDevice(self.bob) for _ in range(number)]
        for device in devices:
            self.addCleanup(device.close)
            device.set_live()
        return devices

    def send_texts(self, *texts: str) -> None:
        """Send messages, each accepted before the next is sent."""
        for text in texts:
            self.bob.send_text(text)

    def test_unread_device_delays_nobody(self) -> None:
        """
        The others get every message in order before it reads any; senders do not wait. What it misses stays queued,
        and its send queue is bounded.
        """
        others = self.open_live_devices(DEVICES - 1)
        change = self.bob.pack(f"{PICKUP}/live-delivery-change", {"live_delivery": True})
        unread = UnreadDevice(self.daemon_client, "/didcomm", change)
        self.addCleanup(unread.close)
        for number in range(MESSAGES):
            self.bob.send_text(f"{number}", SIZE)
            unread.keep_alive()
            self.assertEqual(read_next_pushes(others), [f"{number}"] * len(others))
        send_queue_bytes = read_metric(self.daemon_client, _SEND_QUEUE_METRIC)
        self.assertGreater(send_queue_bytes, SIZE, "the unread socket has room for all: nothing is tested")
        self.assertLess(send_queue_bytes, _BOUND)
        self.assertEqual(self.bob.queued_count(), MESSAGES)
        pushed = [self.bob.open(raw) for raw in unread.receive(3)]
        texts = [self.bob.read_text(read_delivery(one.message)[0]) for one in pushed]
        self.assertEqual(texts, ["0", "1", "2"])

    def test_acknowledgement_on_one_device_removes_for_all(self) -> None:
        """And removes nothing else."""
        devices = self.open_live_devices(DEVICES)
        self.send_texts("a", "b")
        delivered = [[device.next_push().id for device in devices] for _ in "ab"]
        self.assertEqual([len(set(ids)) for ids in delivered], [1, 1])
        devices[0].acknowledge(delivered[0][0])
        self.assertEqual(self.bob.queued_texts(), ["b"])
        devices[-1].acknowledge(delivered[0][0], delivered[1][0])
        self.assertEqual(self.bob.queued_texts(), [])
        self.assertTrue(all(device.has_no_push() for device in devices))


class DecentrlTests(SharedDaemonTestCase):
    """Sockets of one DID (DCTRL-0004 section 10)."""

    settings = SETTINGS

    def setUp(self) -> None:
        self.alice, self.bob = (
            RawDecentrlClient(self.daemon_client, "alice"),
            RawDecentrlClient(self.daemon_client, "bob"),
        )
        self.bob.register()
        self.bob.permit_sender(self.alice)

    def open_sockets(self, number: int) -> list[RawWebSocket]:
        """Authenticated sockets."""
        sockets = [self.bob.open_socket() for _ in range(number)]
        for socket in sockets:
            self.addCleanup(socket.close)
        return sockets

    def send_event(self, payload: str) -> str:
        """Send an event, which must be accepted; return its id."""
        response = self.alice.send_event(self.bob, payload)
        self.assertEqual(response.status, 200, response.body)
        return str(response.json["pendingEventId"])

    def next_event(self, socket: RawWebSocket) -> tuple[str, str]:
        """Id and payload of the next pushed event."""
        (event,) = socket.receive()["events"]
        return event["id"], event["payload"]

    def test_unread_socket_delays_nobody(self) -> None:
        """As for DIDComm."""
        others = self.open_sockets(DEVICES - 1)
        unread = UnreadDevice(self.daemon_client, "/ws", encoding.dumps(self.bob.authentication()))
        self.addCleanup(unread.close)
        ids = []
        for number in range(MESSAGES):
            payload = f"{number} {'x' * SIZE}"
            ids.append(self.send_event(payload))
            unread.keep_alive()
            self.assertEqual([self.next_event(socket) for socket in others], [(ids[-1], payload)] * len(others))
        send_queue_bytes = read_metric(self.daemon_client, _SEND_QUEUE_METRIC)
        self.assertGreater(send_queue_bytes, SIZE, "the unread socket has room for all: nothing is tested")
        self.assertLess(send_queue_bytes, _BOUND)
        self.assertEqual([event["id"] for event in self.bob.pending_events()], ids)
        # A PING comes every 30 s.
        frames = [encoding.loads_object(raw) for raw in unread.receive(6)]
        pushes = [frame for frame in frames if frame["type"] != "PING"][:3]
        self.assertEqual([event["id"] for frame in pushes for event in frame["events"]], ids[:3])
