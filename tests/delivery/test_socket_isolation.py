"""Several sockets of one DID: failures of one do not affect the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.delivery.connections import ConnectionManager
from mediatord.wallet.didcomm_client import read_delivery
from tests.in_memory_identities import register_two_identities
from tests.in_memory_mediator import PEER, FakeSocket, InMemoryMediator, InMemoryWallet, pack_forward


class FailingSocket(FakeSocket):
    """Fails at every send, as a library might."""

    def send(self, frame: bytes) -> bool:
        """Fail."""
        raise RuntimeError("broken")


class UnclosableSocket(FakeSocket):
    """Fails to close."""

    def close(self, code: int, reason: str) -> None:
        """Fail."""
        super().close(code, reason)
        raise RuntimeError("broken")


class DIDCommTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self)
        self.bob = InMemoryWallet(self.in_memory).enrol()

    def open_live_socket(self, make: Callable[[], FakeSocket] = FakeSocket) -> FakeSocket:
        """A socket to which Bob's messages are pushed."""
        socket = make()
        self.in_memory.base.connections.opened(socket)
        self.bob.answer(
            "https://didcomm.org/messagepickup/3.0/live-delivery-change", {"live_delivery": True}, socket=socket
        )
        return socket

    def forward(self) -> None:
        """Forward a message to Bob."""
        self.assertEqual(
            self.in_memory.receive(pack_forward(self.in_memory, self.bob.did, self.bob.make_payload())).status, 202
        )

    def assert_pushed_once(self, socket: FakeSocket) -> None:
        """The message counts as pushed to this socket, and as delivered live once it is acknowledged there."""
        (accepted,) = self.in_memory.events("msg.accept")
        self.assertEqual(accepted["method"], "live")
        (frame,) = socket.frames
        (delivered,) = read_delivery(self.bob.open(frame).message)
        self.assertTrue(self.in_memory.didcomm.live.was_pushed(delivered.id))
        self.bob.answer(
            "https://didcomm.org/messagepickup/3.0/messages-received", {"message_id_list": [delivered.id]}
        )
        (acknowledged,) = self.in_memory.events("msg.ack")
        self.assertEqual(acknowledged["path"], "live")

    def test_failing_socket(self) -> None:
        """It is closed; the push to the others counts, whichever comes first."""
        for order in ((FakeSocket, FailingSocket), (FailingSocket, FakeSocket)):
            self.setUp()
            sockets = [self.open_live_socket(make) for make in order]
            failing, working = sorted(sockets, key=lambda one: isinstance(one, FailingSocket), reverse=True)
            self.forward()
            self.assert_pushed_once(working)
            self.assertEqual((failing.codes, working.codes), ([1011], []))
            self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_failing_encryption(self) -> None:
        """The same if encryption for the reader of one socket fails."""
        working, unreadable = self.open_live_socket(), self.open_live_socket()
        reader = dict(self.in_memory.base.connections.subscribers(self.bob.did))[unreadable]
        pack, packing = self.in_memory.didcomm.live._packer.pack, self.in_memory.didcomm.live._packer

        def fail_for_one(draft: Any, authcrypt_sender: Any) -> bytes:
            if authcrypt_sender is reader:
                raise RuntimeError("no such curve")
            return pack(draft, authcrypt_sender)

        object.__setattr__(packing, "pack", fail_for_one)
        self.forward()
        self.assert_pushed_once(working)
        self.assertEqual((working.codes, unreadable.codes, unreadable.frames), ([], [1011], []))
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_all_sockets_fail(self) -> None:
        """The message stays queued."""
        self.open_live_socket(FailingSocket)
        self.forward()
        self.assertEqual(self.in_memory.events("msg.accept")[0]["method"], "queue")
        self.assertEqual(self.bob.count_queued(), 1)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_socket_of_other_protocol(self) -> None:
        """A Decentrl socket of the same DID gets no DIDComm messages and blocks nothing."""
        other = self.in_memory.socket()
        self.in_memory.base.connections.subscribe(other, self.bob.did, None)
        working = self.open_live_socket()
        self.forward()
        self.assert_pushed_once(working)
        self.assertEqual((other.frames, other.codes), ([], []))


class DecentrlTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory, self.alice, self.bob = register_two_identities(self)
        self.bob.save_contract_with(self.alice)

    def open_live_socket(self, make: Callable[[], FakeSocket] = FakeSocket, reader: Any = None) -> FakeSocket:
        """A socket of Bob's."""
        socket = make()
        self.in_memory.base.connections.opened(socket)
        self.in_memory.base.connections.subscribe(socket, self.bob.did, reader)
        return socket

    def test_failing_socket(self) -> None:
        """As above; the command that brings the event succeeds."""
        working, failing = self.open_live_socket(), self.open_live_socket(FailingSocket)
        reply = self.alice.send_event(self.bob, "hello")
        self.assertEqual(reply.status, 200)
        id_ = json.loads(reply.body)["pendingEventId"]
        self.assertEqual([event["method"] for event in self.in_memory.events("msg.accept")], ["live"])
        self.assertTrue(self.in_memory.decentrl.event_pusher.was_pushed(id_))
        self.assertEqual((len(working.frames), failing.codes), (1, [1011]))
        self.assertTrue(self.in_memory.decentrl.event_pusher.push_contracts_updated(self.bob.did))
        self.assertEqual(len(working.frames), 2)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 2)

    def test_socket_of_other_protocol(self) -> None:
        """A DIDComm socket of the same DID gets no events."""
        other = self.open_live_socket(reader=object())
        self.assertEqual(self.alice.send_event(self.bob, "hello").status, 200)
        self.assertEqual([event["method"] for event in self.in_memory.events("msg.accept")], ["queue"])
        self.assertFalse(self.in_memory.decentrl.event_pusher.push_contracts_updated(self.bob.did))
        self.assertEqual(other.frames, [])


class ConnectionManagerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.connections: ConnectionManager[Any] = ConnectionManager(100)
        self.connections.startService()
        self.immortal, self.plain = UnclosableSocket(PEER), FakeSocket(PEER)
        for socket in (self.immortal, self.plain):
            self.connections.opened(socket)
            self.connections.subscribe(socket, "did:example:bob", "reader")

    def test_stop(self) -> None:
        """A socket that cannot be closed does not keep others open."""
        self.connections.stopService()
        self.assertEqual([self.immortal.codes, self.plain.codes], [[1001], [1001]])
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_denied_did(self) -> None:
        """The same; other DIDs' sockets stay open."""
        other = FakeSocket(PEER)
        self.connections.opened(other)
        self.connections.subscribe(other, "did:example:bob", None)
        self.connections.close_denied(lambda did: True, lambda reader: reader is not None)
        self.assertEqual([one.codes for one in (self.immortal, self.plain, other)], [[1008], [1008], []])
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_failing_listener(self) -> None:
        """All listeners are called for a closed socket, and stopping does not wait for it, if one of them fails."""
        called: list[Any] = []

        def fail(session: Any) -> None:
            raise RuntimeError("broken")

        self.connections.on_close(fail)
        self.connections.on_close(called.append)
        stopped = self.connections.stopService()
        for socket in (self.immortal, self.plain):
            self.connections.closed(socket)
        self.assertEqual(called, [self.immortal, self.plain])
        self.successResultOf(stopped)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 3)
