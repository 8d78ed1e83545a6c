"""Several sockets of one DID: what goes wrong with one of them is no matter of the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.delivery.connections import ConnectionManager
from mediatord.wallet.didcomm_client import read_delivery
from tests.in_memory_identities import register_two_identities
from tests.in_memory_mediator import PEER, FakeSocket, InMemoryMediator, InMemoryWallet, pack_forward


class BrokenSocket(FakeSocket):
    """Fails at whatever is asked of it, as a library below it might."""

    def send(self, frame: bytes) -> bool:
        """Fail."""
        raise RuntimeError("broken")


class ImmortalSocket(FakeSocket):
    """Cannot be closed."""

    def close(self, code: int, reason: str) -> None:
        """Fail."""
        super().close(code, reason)
        raise RuntimeError("broken")


class DIDCommTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self)
        self.bob = InMemoryWallet(self.in_memory).enrol()

    def live(self, make: Callable[[], FakeSocket] = FakeSocket) -> FakeSocket:
        """A socket that Bob's messages are pushed to."""
        socket = make()
        self.in_memory.base.connections.opened(socket)
        self.bob.answer(
            "https://didcomm.org/messagepickup/3.0/live-delivery-change", {"live_delivery": True}, socket=socket
        )
        return socket

    def forward(self) -> None:
        """Something comes for Bob."""
        self.assertEqual(
            self.in_memory.receive(pack_forward(self.in_memory, self.bob.did, self.bob.letter())).status, 202
        )

    def assert_pushed_once(self, socket: FakeSocket) -> None:
        """It counts as pushed, to this one, and as delivered live once it is acknowledged there."""
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

    def test_socket_that_fails(self) -> None:
        """It is closed; the push to the others counts, whichever comes first."""
        for order in ((FakeSocket, BrokenSocket), (BrokenSocket, FakeSocket)):
            self.setUp()
            sockets = [self.live(make) for make in order]
            broken, whole = sorted(sockets, key=lambda one: isinstance(one, BrokenSocket), reverse=True)
            self.forward()
            self.assert_pushed_once(whole)
            self.assertEqual((broken.codes, whole.codes), ([1011], []))
            self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_packing_that_fails(self) -> None:
        """Likewise, where it is impossible to write for the reader of one socket."""
        whole, unreadable = self.live(), self.live()
        reader = dict(self.in_memory.base.connections.subscribers(self.bob.did))[unreadable]
        pack, packing = self.in_memory.didcomm.live._packer.pack, self.in_memory.didcomm.live._packer

        def fail_for_one(draft: Any, authcrypt_sender: Any) -> bytes:
            if authcrypt_sender is reader:
                raise RuntimeError("no such curve")
            return pack(draft, authcrypt_sender)

        object.__setattr__(packing, "pack", fail_for_one)
        self.forward()
        self.assert_pushed_once(whole)
        self.assertEqual((whole.codes, unreadable.codes, unreadable.frames), ([], [1011], []))
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_all_fail(self) -> None:
        """It stays in the queue."""
        self.live(BrokenSocket)
        self.forward()
        self.assertEqual(self.in_memory.events("msg.accept")[0]["method"], "queue")
        self.assertEqual(self.bob.waiting(), 1)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_socket_of_the_other_protocol(self) -> None:
        """A socket that speaks Decentrl for the same DID gets nothing of DIDComm's, and is in nobody's way."""
        other = self.in_memory.socket()
        self.in_memory.base.connections.subscribe(other, self.bob.did, None)
        whole = self.live()
        self.forward()
        self.assert_pushed_once(whole)
        self.assertEqual((other.frames, other.codes), ([], []))


class DecentrlTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory, self.alice, self.bob = register_two_identities(self)
        self.bob.befriend(self.alice)

    def live(self, make: Callable[[], FakeSocket] = FakeSocket, reader: Any = None) -> FakeSocket:
        """A socket for Bob."""
        socket = make()
        self.in_memory.base.connections.opened(socket)
        self.in_memory.base.connections.subscribe(socket, self.bob.did, reader)
        return socket

    def test_socket_that_fails(self) -> None:
        """As above; the command that brings the event succeeds."""
        whole, broken = self.live(), self.live(BrokenSocket)
        reply = self.alice.tell(self.bob, "hello")
        self.assertEqual(reply.status, 200)
        id_ = json.loads(reply.body)["pendingEventId"]
        self.assertEqual([event["method"] for event in self.in_memory.events("msg.accept")], ["live"])
        self.assertTrue(self.in_memory.decentrl.event_pusher.was_pushed(id_))
        self.assertEqual((len(whole.frames), broken.codes), (1, [1011]))
        self.assertTrue(self.in_memory.decentrl.event_pusher.push_contracts_updated(self.bob.did))
        self.assertEqual(len(whole.frames), 2)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 2)

    def test_socket_of_the_other_protocol(self) -> None:
        """One that speaks DIDComm for the same DID gets no events."""
        other = self.live(reader=object())
        self.assertEqual(self.alice.tell(self.bob, "hello").status, 200)
        self.assertEqual([event["method"] for event in self.in_memory.events("msg.accept")], ["queue"])
        self.assertFalse(self.in_memory.decentrl.event_pusher.push_contracts_updated(self.bob.did))
        self.assertEqual(other.frames, [])


class ConnectionsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.connections: ConnectionManager[Any] = ConnectionManager(100)
        self.connections.startService()
        self.immortal, self.plain = ImmortalSocket(PEER), FakeSocket(PEER)
        for socket in (self.immortal, self.plain):
            self.connections.opened(socket)
            self.connections.subscribe(socket, "did:example:bob", "reader")

    def test_stop(self) -> None:
        """One that cannot be closed keeps none of the others open."""
        self.connections.stopService()
        self.assertEqual([self.immortal.codes, self.plain.codes], [[1001], [1001]])
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_denied(self) -> None:
        """Likewise; sockets of the same DID that are not asked about stay."""
        other = FakeSocket(PEER)
        self.connections.opened(other)
        self.connections.subscribe(other, "did:example:bob", None)
        self.connections.close_denied(lambda did: True, lambda reader: reader is not None)
        self.assertEqual([one.codes for one in (self.immortal, self.plain, other)], [[1008], [1008], []])
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_who_is_told_of_the_end(self) -> None:
        """All are told of a socket that is gone, and the daemon does not wait for it, if one of them fails."""
        told: list[Any] = []

        def fail(session: Any) -> None:
            raise RuntimeError("broken")

        self.connections.on_close(fail)
        self.connections.on_close(told.append)
        stopped = self.connections.stopService()
        for socket in (self.immortal, self.plain):
            self.connections.closed(socket)
        self.assertEqual(told, [self.immortal, self.plain])
        self.successResultOf(stopped)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 3)
