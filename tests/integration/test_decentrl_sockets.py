"""Decentrl sockets of a daemon, over TCP and frame by frame (DCTRL-0004 section 10, reference 11)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mediatord.bench.raw_clients import CLOSE_OPCODE, TEXT_OPCODE
from mediatord.protocol.decentrl.commands import is_didcomm_envelope
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import authcrypt, compose_message, unpack_message
from tests.in_memory_mediator import PING, from_header
from tests.integration.raw_decentrl_client import RawDecentrlClient, RawWebSocket, unix_time
from tests.integration.refusal_test_case import OTHER_MEDIATOR, RefusalDaemonTestCase

BINARY = 2
MAX_MESSAGE_BYTES = 20_000
MAX_SOCKETS = 8


class SocketTests(RefusalDaemonTestCase):
    """
    Alice and Bob, who may send to each other; Carol, who is not registered.

    :cvar silent_socket: sends nothing.
    """

    settings: ClassVar[dict[str, Any]] = {
        "limits": {"max_message_bytes": MAX_MESSAGE_BYTES, "max_connections_per_ip": MAX_SOCKETS}
    }
    silent_socket: ClassVar[RawWebSocket]
    alice: ClassVar[RawDecentrlClient]
    bob: ClassVar[RawDecentrlClient]
    carol: ClassVar[RawDecentrlClient]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.silent_socket = RawWebSocket(cls.daemon_client)
        cls.addClassCleanup(cls.silent_socket.close)
        cls.alice, cls.bob, cls.carol = (
            RawDecentrlClient(cls.daemon_client, alias) for alias in ("alice", "bob", "carol")
        )
        for one in (cls.alice, cls.bob):
            one.register()
        cls.alice.permit_sender(cls.bob)
        cls.bob.permit_sender(cls.alice)

    def setUp(self) -> None:
        super().setUp()
        self.did = self.daemon_client.request("GET", "/did").body.decode()
        self.document = resolve_local(self.did)
        self.wallet = WalletIdentity.generate()

    def open_unauthenticated(self, path: str = "/ws") -> RawWebSocket:
        """A socket without any message."""
        socket = RawWebSocket(self.daemon_client, path)
        self.addCleanup(socket.close)
        return socket

    def open_authenticated(self, identity: RawDecentrlClient) -> RawWebSocket:
        """An authenticated socket."""
        socket = identity.open_socket()
        self.addCleanup(socket.close)
        return socket

    def send_event(self, recipient: RawDecentrlClient, payload: str) -> str:
        """Send an event from the other identity to this one; return its id."""
        sender = self.alice if recipient is not self.alice else self.bob
        response = sender.send_event(recipient, payload)
        self.assertEqual(response.status, 200, response.body)
        return str(response.json["pendingEventId"])

    def assert_refused(  # type: ignore[override]  # a message is refused here, no command
        self, message: Mapping[str, Any] | bytes, code: str, close: int, opcode: int = TEXT_OPCODE
    ) -> None:
        """A socket with this first message is closed so."""
        before = self.daemon_client.read_rows()
        socket = self.open_unauthenticated()
        socket.send(message, opcode)
        self.assert_authentication_failed(socket, code, close)
        self.assertEqual(self.daemon_client.read_rows(), before)

    def test_reports_first_of_several_errors(self) -> None:
        """Every error of a first message, in the order of DCTRL-0004 10.2; nothing is stored."""
        stale = {"timestamp_ms": int(unix_time() * 1000) - 400_000}
        unknown = {"did": OTHER_MEDIATOR, "signing_key_id": "#signing"}
        self.assert_refused({**self.alice.authentication(**stale, **unknown), "nonce": ""}, "INVALID_MESSAGE", 4002)
        self.assert_refused(self.alice.authentication(**stale, **unknown), "TIMESTAMP_OUT_OF_RANGE", 4003)
        self.assert_refused({**self.alice.authentication(**unknown), "signature": ""}, "DID_NOT_FOUND", 4004)
        foreign = self.carol.authentication(signing_key_id="#signing")
        self.assert_refused({**foreign, "signature": ""}, "SIGNING_KEY_NOT_FOUND", 4005)
        self.assert_refused({**self.carol.authentication(), "signature": ""}, "INVALID_SIGNATURE", 4006)
        self.assert_refused(self.carol.authentication(), "NOT_REGISTERED", 4007)

    def test_unauthenticated_socket_is_closed(self) -> None:
        """After ten seconds, most of which other tests may have used."""
        self.assert_authentication_failed(self.silent_socket, "AUTH_TIMEOUT", 4001)

    def test_closes_socket_with_oversized_message(self) -> None:
        """1009 on both paths; `limits.max_message_bytes` itself is accepted, and so by POST."""
        for path in ("/didcomm", "/ws"):
            socket = self.open_unauthenticated(path)
            socket.send(b"x" * (MAX_MESSAGE_BYTES + 1))
            self.assertEqual(socket.read_until_close()[1].code, 1009)
        socket = self.open_unauthenticated("/didcomm")
        socket.send(b"x" * MAX_MESSAGE_BYTES)
        self.assertEqual(socket.receive()["body"]["code"], "e.p.msg")
        for path in ("/didcomm", "/"):
            for excess, status in ((0, 400), (1, 413)):
                response = self.daemon_client.request("POST", path, b"x" * (MAX_MESSAGE_BYTES + excess))
                self.assertEqual(response.status, status, path)

    def test_sockets_are_limited_by_address(self) -> None:
        """On both paths together, with 429."""
        paths = ["/didcomm", "/ws"] * (MAX_SOCKETS // 2)
        for path in paths:
            self.addCleanup(RawWebSocket(self.daemon_client, path, source="127.0.0.2").close)
        for path in set(paths):
            with self.assertRaisesRegex(AssertionError, "HTTP/1.1 429 "):
                RawWebSocket(self.daemon_client, path, source="127.0.0.2")
        self.open_unauthenticated()

    def test_pushes_to_all_sockets(self) -> None:
        """Every socket of a DID gets each event unchanged; the event stays pending until acknowledged."""
        dave = self.register_permitting_alice("dave")
        lines = [self.open_authenticated(dave), self.open_authenticated(dave)]
        payload = 'opaque "\\ é \0 \U0001f600'
        id_ = self.send_event(dave, payload)
        event = {"id": id_, "sender_did": self.alice.did, "payload": payload}
        for socket in lines:
            self.assertEqual(socket.receive(), {"type": "PENDING_EVENTS", "events": [event]})
        self.assertEqual(dave.pending_events(), [{"id": id_, "payload": payload, "sender_did": self.alice.did}])
        lines[0].send({"type": "ACKNOWLEDGE_PENDING_EVENTS", "event_ids": [id_]})
        self.assertEqual(len(dave.pending_events()), 1)
        dave.execute("ACKNOWLEDGE_PENDING_EVENTS", event_ids=[id_])
        self.assertEqual(dave.pending_events(), [])
        lines[0].close()
        second = self.send_event(dave, "second")
        self.assertEqual(lines[1].receive()["events"][0]["id"], second)

    def register_permitting_alice(self, alias: str) -> RawDecentrlClient:
        """A registered identity to which Alice may send."""
        identity = self.register_identity(alias)
        identity.permit_sender(self.alice)
        return identity

    def ping(self) -> tuple[str, bytes]:
        """Id and envelope of a ping that requests a response."""
        message = compose_message(PING, {"response_requested": True}, to=[self.did], **from_header(self.wallet.did))
        return str(message["id"]), authcrypt(message, self.wallet, self.document)

    def test_first_envelope_selects_didcomm(self) -> None:
        """The socket is then served as on /didcomm, and ignores Decentrl messages (contract section 3)."""
        socket = self.open_unauthenticated()
        for _ in range(2):
            id_, envelope = self.ping()
            self.assertTrue(is_didcomm_envelope(envelope))
            socket.send(envelope)
            self.assertEqual(self.thread_id(socket.receive_raw()), id_)
        socket.send(self.alice.authentication())
        self.assertEqual(socket.receive()["body"]["code"], "e.p.msg")
        id_, envelope = self.ping()
        socket.send(envelope, BINARY)
        self.assertEqual(self.thread_id(socket.receive_raw()), id_)
        self.send_event(self.alice, "not for this socket")
        socket.send(b"", CLOSE_OPCODE)
        self.assertEqual(socket.read_until_close()[0], [])

    def thread_id(self, raw: bytes) -> str | None:
        """Id of the message that this one answers."""
        return unpack_message(raw, self.wallet, resolve_local).message.thid
