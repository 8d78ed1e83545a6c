"""Which requests and sockets of DIDComm v1 keep a device from being woken; the counterpart of the tests of v2."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.didcomm_v1.in_memory_wallet import InMemoryV1Wallet, pack_forward
from tests.in_memory_mediator import FakeSocket, InMemoryMediator
from tests.push.registries import FCM
from tests.push.test_polls import PollTestCase

MP = "messagepickup/2.0"


class WakeupTests(PollTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.in_memory = InMemoryMediator(self, push_service=self.fcm)
        self.wallet = InMemoryV1Wallet(self.in_memory, implicit_pickup="raw").enrol()
        answer = self.wallet.answer("push-notifications-fcm/1.0/set-device-info", **FCM)
        self.assertEqual(answer.type.name, "ack")
        self.pass_time()

    def deliver(self) -> None:
        """A message for the wallet."""
        forward = pack_forward(self.in_memory, self.wallet.recipient_base58, self.wallet.make_payload())
        self.assertEqual(self.in_memory.receive(forward).status, 202)

    def begin(self, socket: FakeSocket | None = None) -> FakeSocket:
        """Ask for implicit pickup."""
        socket = socket or self.in_memory.socket()
        self.wallet.ask("trust_ping/1.0/ping", response_requested=False, socket=socket)
        return socket

    def test_shown_messages_wake_nobody(self) -> None:
        """Requests that show all that waits."""
        requests: tuple[tuple[str, dict[str, Any]], ...] = (
            (f"{MP}/status-request", {}),
            (f"{MP}/delivery-request", {"limit": 10}),
            (f"{MP}/live-delivery-change", {"live_delivery": False}),
            ("messagepickup/1.0/status-request", {}),
            ("messagepickup/1.0/batch-pickup", {"batch_size": 10}),
        )
        for type_, members in requests:
            self.deliver()
            self.wallet.answer(type_, **members)
            self.assertEqual(self.count_wakeups(), 0, type_)

    def test_others_wake(self) -> None:
        """An acknowledgement shows nothing, a request about one key not the others; there is no live mode by HTTP."""
        requests: tuple[tuple[str, dict[str, Any]], ...] = (
            (f"{MP}/messages-received", {"message_id_list": []}),
            (f"{MP}/status-request", {"recipient_key": self.wallet.recipient_base58}),
            (f"{MP}/live-delivery-change", {"live_delivery": True}),
        )
        for number, (type_, members) in enumerate(requests, 1):
            self.deliver()
            self.wallet.answer(type_, **members)
            self.assertEqual(self.count_wakeups(), number, type_)
            self.wallet.answer(f"{MP}/status-request")
            self.pass_time()

    def test_implicit_pickup(self) -> None:
        """A wallet with an open socket is not woken: neither for what is queued, nor for what comes."""
        self.deliver()
        socket = self.begin()
        self.pass_time()
        self.deliver()
        self.pass_time(10)
        self.assertEqual(len(socket.frames), 2)
        self.assertEqual(self.count_wakeups(), 0)

    def test_full_window(self) -> None:
        """The same for what is not pushed yet, as the wallet has not read the messages before."""
        socket = self.begin()
        for _ in range(100):
            self.deliver()
        self.pass_time(10)
        self.assertLess(len(socket.frames), 100)
        self.assertEqual(len(self.fcm.requests), 0)
        self.in_memory.base.connections.closed(socket)
        self.assertEqual(self.count_wakeups(), 1)

    def test_lost_socket(self) -> None:
        """What the wallet has not read is a reason to wake it."""
        socket = self.begin()
        self.deliver()
        self.pass_time(10)
        self.in_memory.base.connections.closed(socket)
        self.assertEqual(self.count_wakeups(), 1)

    def test_lost_while_reading(self) -> None:
        """The same, if what is queued was still being read, or could not be."""
        for operation in ("find_arrivals", "find_messages"):
            woken = len(self.fcm.requests)
            self.deliver()
            socket = self.begin()
            close = partial(self.in_memory.base.connections.closed, socket)
            with self.arriving_during(self.in_memory.store, operation, close):
                self.pass_time()
            self.assertEqual(self.count_wakeups(), woken + 1, operation)
            self.wallet.answer(f"{MP}/status-request")
            self.pass_time(60)

    def test_replaced_socket(self) -> None:
        """What it has not read comes on its new socket."""
        old = self.begin()
        self.deliver()
        new = self.begin()
        self.pass_time(10)
        self.in_memory.base.connections.closed(old)
        self.assertEqual(len(new.frames), 1)
        new.confirm()
        self.assertEqual(self.count_wakeups(), 0)

    def test_nothing_unread(self) -> None:
        """A socket that ends with nothing unread wakes nobody."""
        socket = self.begin()
        self.deliver()
        self.pass_time()
        socket.confirm()
        self.pass_time()
        self.in_memory.base.connections.closed(socket)
        self.assertEqual(self.count_wakeups(), 0)
