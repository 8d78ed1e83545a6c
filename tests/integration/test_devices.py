"""One DID on many devices: each gets everything, and none is in the way of another."""

from __future__ import annotations

from typing import Any

from mediatord.protocol import encoding
from mediatord.wallet.didcomm_client import PICKUP, read_delivery
from tests.integration.devices import DeviceWallet, LiveDevice, UnreadDevice, read_metric, read_next_pushes
from tests.integration.message_load import ROOMY
from tests.integration.raw_decentrl_client import RawDecentrlClient, RawWebSocket
from tests.integration.shared_daemon import SharedDaemonTestCase

DEVICES = 10
# So many messages come that neither the kernel nor the outbox of a socket can keep them.
MESSAGES = 200
SIZE = 24_000
OUTBOX = 65_536
# Frames that may wait, and what the daemon's transport takes before it says that it has enough.
_BOUND = OUTBOX + 64 * 1024 + 3 * SIZE
SETTINGS: dict[str, Any] = {**ROOMY, "limits": {"max_outbox_bytes": OUTBOX}}
_OUTBOXES = 'mediator_buffer_bytes{buffer="socket_outboxes"}'


class DIDCommTests(SharedDaemonTestCase):
    """Live delivery on several sockets of one account (Message Pickup 3.0)."""

    settings = SETTINGS

    def setUp(self) -> None:
        self.bob = DeviceWallet(self.daemon_client).enrol()

    def devices(self, number: int) -> list[LiveDevice]:
        """So many that are live."""
        found = [LiveDevice(self.bob) for _ in range(number)]
        for one in found:
            self.addCleanup(one.close)
            one.live()
        return found

    def tell(self, *texts: str) -> None:
        """Each is accepted before the next is sent."""
        for text in texts:
            self.bob.tell(text)

    def test_one_is_stuck(self) -> None:
        """
        The others have got every message, in order, by the time that it has read none; nor does a sender wait for it.

        What it misses waits in the queue, and what is kept for it in memory is bounded.
        """
        others = self.devices(DEVICES - 1)
        change = self.bob.pack(f"{PICKUP}/live-delivery-change", {"live_delivery": True})
        stuck = UnreadDevice(self.daemon_client, "/didcomm", change)
        self.addCleanup(stuck.close)
        for number in range(MESSAGES):
            self.bob.tell(f"{number}", SIZE)
            stuck.stay()
            self.assertEqual(read_next_pushes(others), [f"{number}"] * len(others))
        held = read_metric(self.daemon_client, _OUTBOXES)
        self.assertGreater(held, SIZE, "the stuck one has room for all of them: this test tries nothing")
        self.assertLess(held, _BOUND)
        self.assertEqual(self.bob.waiting(), MESSAGES)
        pushed = [self.bob.open(raw) for raw in stuck.take(3)]
        texts = [self.bob.text(read_delivery(one.message)[0]) for one in pushed]
        self.assertEqual(texts, ["0", "1", "2"])

    def test_live_mode_ends_on_one(self) -> None:
        """The others go on, and it goes on being answered."""
        first, *others = self.devices(DEVICES)
        first.live(on=False)
        self.tell("a", "b")
        self.assertEqual([read_next_pushes(others) for _ in "ab"], [["a"] * len(others), ["b"] * len(others)])
        self.assertTrue(first.silent())
        first.live()
        self.tell("c")
        self.assertEqual(read_next_pushes([first, *others]), ["c"] * DEVICES)

    def test_one_closes(self) -> None:
        """With or without ceremony, the others go on; what was pushed to it is theirs as well."""
        first, second, *others = self.devices(DEVICES)
        self.tell("before")
        self.assertEqual(read_next_pushes([first, second, *others]), ["before"] * DEVICES)
        first.close()
        second.line.say(b"\x03\xe8", 8)
        self.tell("after")
        self.assertEqual(read_next_pushes(others), ["after"] * len(others))
        self.assertEqual(self.bob.texts(), ["before", "after"])

    def test_one_acknowledges(self) -> None:
        """What it has acknowledged is gone for all of them, and nothing else is."""
        devices = self.devices(DEVICES)
        self.tell("a", "b")
        got = [[one.pushed().id for one in devices] for _ in "ab"]
        self.assertEqual([len(set(ids)) for ids in got], [1, 1])
        devices[0].acknowledge(got[0][0])
        self.assertEqual(self.bob.texts(), ["b"])
        devices[-1].acknowledge(got[0][0], got[1][0])
        self.assertEqual(self.bob.texts(), [])
        self.assertTrue(all(one.silent() for one in devices))


class DecentrlTests(SharedDaemonTestCase):
    """Sockets of one DID (DCTRL-0004 section 10)."""

    settings = SETTINGS

    def setUp(self) -> None:
        self.alice, self.bob = (
            RawDecentrlClient(self.daemon_client, "alice"),
            RawDecentrlClient(self.daemon_client, "bob"),
        )
        self.bob.register()
        self.bob.befriend(self.alice)

    def lines(self, number: int) -> list[RawWebSocket]:
        """So many that are authenticated."""
        found = [self.bob.socket() for _ in range(number)]
        for one in found:
            self.addCleanup(one.close)
        return found

    def tell(self, payload: str) -> str:
        """Have an event accepted; its id."""
        answered = self.alice.tell(self.bob, payload)
        self.assertEqual(answered.status, 200, answered.body)
        return str(answered.json["pendingEventId"])

    def heard(self, line: RawWebSocket) -> tuple[str, str]:
        """Id and payload of the next event on a line."""
        (event,) = line.hear()["events"]
        return event["id"], event["payload"]

    def test_one_is_stuck(self) -> None:
        """As of DIDComm."""
        others = self.lines(DEVICES - 1)
        stuck = UnreadDevice(self.daemon_client, "/ws", encoding.dumps(self.bob.greeting()))
        self.addCleanup(stuck.close)
        ids = []
        for number in range(MESSAGES):
            payload = f"{number} {'x' * SIZE}"
            ids.append(self.tell(payload))
            stuck.stay()
            self.assertEqual([self.heard(one) for one in others], [(ids[-1], payload)] * len(others))
        held = read_metric(self.daemon_client, _OUTBOXES)
        self.assertGreater(held, SIZE, "the stuck one has room for all of them: this test tries nothing")
        self.assertLess(held, _BOUND)
        self.assertEqual([one["id"] for one in self.bob.pending()], ids)
        # A PING comes every 30 s.
        frames = [encoding.loads_object(raw) for raw in stuck.take(6)]
        pushes = [frame for frame in frames if frame["type"] != "PING"][:3]
        self.assertEqual([event["id"] for frame in pushes for event in frame["events"]], ids[:3])

    def test_one_closes(self) -> None:
        """The others go on."""
        first, second, *others = self.lines(DEVICES)
        first.close()
        second.say(b"\x03\xe8", 8)
        id_ = self.tell("after")
        self.assertEqual([self.heard(one) for one in others], [(id_, "after")] * len(others))

    def test_one_acknowledges(self) -> None:
        """What is acknowledged, by whichever device, is gone for all of them, and nothing else is."""
        lines = self.lines(DEVICES)
        ids = [self.tell(payload) for payload in "ab"]
        for line in lines:
            self.assertEqual([self.heard(line)[0] for _ in ids], ids)
        self.bob.get("ACKNOWLEDGE_PENDING_EVENTS", event_ids=ids[:1])
        self.assertEqual([one["id"] for one in self.bob.pending()], ids[1:])
