"""A socket at `/ws` speaks Decentrl, unless its first message is an envelope (DCTRL-0004 10, contract 3)."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any, ClassVar

from autobahn.twisted.websocket import WebSocketClientFactory, WebSocketClientProtocol
from twisted.internet import reactor as _reactor  # noqa: TID251  what a real client sees is the subject
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.endpoints import TCP4ClientEndpoint, connectProtocol
from twisted.trial.unittest import SynchronousTestCase, TestCase

from mediatord.delivery.connections import WebSocketSession
from mediatord.errors import ShutdownInProgress
from mediatord.http.websocket import MAX_QUEUED_MESSAGES
from tests.http.fake_protocols import FakeDecentrl, FakeDecentrlSocketProtocol
from tests.http.in_memory_site import BINARY, CLOSE, TEXT, InMemorySite, InMemoryWebSocketClient, encode_masked_frame
from tests.http.in_memory_site import PING as PING_FRAME
from tests.http.test_websocket import GARBAGE, HIGH_LIMITS
from tests.in_memory_mediator import PING, InMemoryWallet, pack_forward

LOCAL = "127.0.0.1"
HELLO = b'{"type":"AUTHENTICATE"}'
FAILED = b'{"type":"AUTH_FAILED","code":"NOT_REGISTERED"}'


def send_reply(session: WebSocketSession, frame: bytes) -> Deferred[None]:
    """Send a frame on a session."""
    session.send(frame)
    return succeed(None)


def refuse(session: WebSocketSession) -> Deferred[None]:
    """Send an error and close."""
    session.send(FAILED)
    session.close(4007, "NOT_REGISTERED")
    return succeed(None)


class DecentrlSocketTestCase(SynchronousTestCase):
    """Mediator with a fake Decentrl protocol, and Bob with a DIDComm account."""

    settings: ClassVar[dict[str, Any]] = {}

    def setUp(self) -> None:
        self.decentrl = FakeDecentrl()
        self.site_fixture = InMemorySite(
            self, fake_decentrl=self.decentrl, **{"limits": HIGH_LIMITS, **self.settings}
        )
        self.bob = InMemoryWallet(self.site_fixture).enrol()

    def websocket_client(self, path: str = "/ws") -> tuple[InMemoryWebSocketClient, FakeDecentrlSocketProtocol]:
        """Open a socket; return the client and the protocol."""
        websocket_client = self.site_fixture.websocket_client(path)
        return websocket_client, self.decentrl.sockets[-1]

    def ping(self, thread: str = "t") -> bytes:
        """Pack a trust ping of Bob's."""
        return self.bob.pack(PING, id=thread)

    def threads(self, frames: list[bytes]) -> list[str | None]:
        """Thread ids of responses to Bob."""
        return [self.bob.open(frame).message.thid for frame in frames]


class FirstMessageTests(DecentrlSocketTestCase):
    def test_passes_messages_on_unchanged(self) -> None:
        """Every message is passed on whole, text or binary, from the start (DCTRL-0004 10.2)."""
        websocket_client, socket = self.websocket_client()
        self.assertEqual(socket.calls, ["begin"])
        websocket_client.send(HELLO)
        websocket_client.send(b"\xff\x00", BINARY)
        websocket_client.send(b"", TEXT)
        websocket_client.send(b'{"type":', final=False)
        websocket_client.send(b"alive?", PING_FRAME)
        websocket_client.send(b'"PONG"}', 0)
        expected = [(HELLO, False), (b"\xff\x00", True), (b"", False), (b'{"type":"PONG"}', False)]
        self.assertEqual(socket.calls, ["begin", *expected])
        self.assertEqual([opcode for opcode, _ in websocket_client.frames()], [10])

    def test_path_spellings(self) -> None:
        """A trailing slash, a query or a percent-encoded letter make no difference."""
        for path in ("/ws/", "/ws?a=b", "/%77s"):
            self.websocket_client(path)[0].send(HELLO)
            self.assertEqual(self.decentrl.sockets[-1].calls, ["begin", (HELLO, False)])
        self.assertEqual(len(self.decentrl.sockets), 3)

    def test_first_envelope_selects_didcomm(self) -> None:
        """After a first envelope the socket speaks DIDComm, whatever follows (contract section 3)."""
        websocket_client, socket = self.websocket_client()
        websocket_client.send(self.ping("one"), BINARY)
        self.assertEqual(socket.calls, ["begin", "end"])
        self.assertEqual(self.threads(websocket_client.texts()), ["one"])
        websocket_client.send(self.ping("two"))
        self.assertEqual(self.threads(websocket_client.texts()), ["two"])
        websocket_client.send(HELLO)
        (report,) = websocket_client.texts()
        self.assertEqual(json.loads(report)["body"]["code"], "e.p.msg")
        websocket_client.transport.disconnect()
        self.assertEqual(socket.calls, ["begin", "end"])

    def test_undecryptable_first_envelope_selects_didcomm(self) -> None:
        """An envelope is recognised without decryption."""
        websocket_client, socket = self.websocket_client()
        websocket_client.send(GARBAGE)
        (report,) = websocket_client.texts()
        self.assertEqual(json.loads(report)["body"]["code"], "e.p.trust.crypto")
        self.assertEqual(socket.calls, ["begin", "end"])

    def test_later_envelope_stays_decentrl(self) -> None:
        """Only the first message selects the protocol."""
        websocket_client, socket = self.websocket_client()
        websocket_client.send(b"hello")
        raw = self.ping()
        websocket_client.send(raw)
        self.assertEqual(socket.calls, ["begin", (b"hello", False), (raw, False)])
        self.assertEqual(websocket_client.frames(), [])

    def test_other_paths_speak_didcomm_only(self) -> None:
        """`/didcomm` and `/` do not speak Decentrl."""
        for path in ("/didcomm", "/didcomm/", "/"):
            websocket_client = self.site_fixture.websocket_client(path)
            websocket_client.send(HELLO)
            (report,) = websocket_client.texts()
            self.assertEqual(json.loads(report)["body"]["code"], "e.p.msg")
        self.assertEqual(self.decentrl.sockets, [])

    def test_failed_handshake_opens_no_protocol(self) -> None:
        """A failed handshake starts no protocol."""
        for headers in ({"Sec-WebSocket-Version": "99"}, {"Sec-WebSocket-Key": "short"}):
            _, response, _ = self.site_fixture.upgrade("/ws", **headers)
            self.assertEqual(response.status, 400)
        self.assertEqual([socket.calls for socket in self.decentrl.sockets], [])

    def test_log_names_protocol(self) -> None:
        """The log names the protocol of a socket; a silent one at `/ws` counts as Decentrl."""
        for path, frame, protocol in (
            ("/ws", None, "decentrl"),
            ("/ws", HELLO, "decentrl"),
            ("/ws", self.ping(), "didcomm"),
            ("/didcomm", None, "didcomm"),
            ("/didcomm", HELLO, "didcomm"),
        ):
            websocket_client = self.site_fixture.websocket_client(path)
            if frame is not None:
                websocket_client.send(frame)
            websocket_client.transport.disconnect()
            self.assertEqual(self.site_fixture.events("conn.close")[-1]["proto"], protocol)


class AnswerTests(DecentrlSocketTestCase):
    def test_error_is_sent_before_close(self) -> None:
        """A frame sent in the same iteration as the close comes first, and nothing follows (DCTRL-0004 10.2)."""
        websocket_client, socket = self.websocket_client()
        self.assertTrue(socket.session.send(FAILED))
        socket.session.close(4007, "NOT_REGISTERED")
        self.assertFalse(socket.session.send(b"too late"))
        (refusal, close_frame) = websocket_client.frames()
        self.assertEqual(refusal, (TEXT, FAILED))
        self.assertEqual(close_frame, (CLOSE, (4007).to_bytes(2, "big") + b"NOT_REGISTERED"))
        websocket_client.send((4007).to_bytes(2, "big"), CLOSE)
        self.site_fixture.run_due_calls()
        self.assertTrue(websocket_client.transport.lost)
        self.assertEqual(socket.calls, ["begin", "end"])
        (closed,) = self.site_fixture.events("conn.close")
        self.assertEqual((closed["ws_code"], closed["reason"], closed["n_out"]), (4007, "us", 1))

    def test_close_codes(self) -> None:
        """The codes of DCTRL-0004 10.3 and those of internal errors."""
        for code in (*range(4001, 4008), 1011, 1013):
            websocket_client, socket = self.websocket_client()
            socket.session.send(FAILED)
            socket.session.close(code, "X")
            self.assertEqual(websocket_client.close_code(), code)

    def test_unanswered_close_is_aborted(self) -> None:
        """A peer that does not answer the close frame is disconnected, and the protocol stops."""
        websocket_client, socket = self.websocket_client()
        socket.session.close(4001, "AUTH_TIMEOUT")
        self.assertEqual(socket.calls, ["begin"])
        self.site_fixture.clock.pump([1] * 4)
        self.site_fixture.run_due_calls()
        self.assertTrue(websocket_client.transport.lost)
        self.assertEqual(socket.calls, ["begin", "end"])

    def test_messages_are_served_in_order(self) -> None:
        """A message is served after the one before it."""
        websocket_client, socket = self.websocket_client()
        first: Deferred[None] = Deferred()
        socket.answer = lambda frame: first if frame == b"one" else send_reply(socket.session, frame)
        websocket_client.transport.feed(
            encode_masked_frame(b"one") + encode_masked_frame(b"two") + encode_masked_frame(b"three")
        )
        self.assertEqual(socket.calls, ["begin", (b"one", False)])
        self.assertEqual(websocket_client.frames(), [])
        first.callback(None)
        self.assertEqual(websocket_client.texts(), [b"two", b"three"])

    def test_messages_after_close_are_dropped(self) -> None:
        """Messages after a close are dropped, whether they came with the last message or later."""
        websocket_client, socket = self.websocket_client()
        first: Deferred[None] = Deferred()
        socket.answer = lambda frame: first
        websocket_client.transport.feed(
            encode_masked_frame(HELLO) + encode_masked_frame(b"two") + encode_masked_frame(b"three")
        )
        socket.session.close(4002, "INVALID_MESSAGE")
        first.callback(None)
        websocket_client.send(b"four")
        self.assertEqual(socket.calls, ["begin", (HELLO, False)])
        self.assertEqual(websocket_client.close_code(), 4002)

    def test_messages_of_disconnected_peer_are_dropped(self) -> None:
        """Unserved messages of a disconnected peer are dropped, as no response can reach it."""
        websocket_client, socket = self.websocket_client()
        first: Deferred[None] = Deferred()
        socket.answer = lambda frame: first
        websocket_client.transport.feed(
            encode_masked_frame(HELLO) + encode_masked_frame(b"two") + encode_masked_frame(b"\x03\xe8", CLOSE)
        )
        self.site_fixture.run_due_calls()
        self.assertEqual(socket.calls, ["begin", (HELLO, False), "end"])
        first.callback(None)
        self.assertFalse(socket.session.send(b"gone"))
        self.assertEqual(socket.calls, ["begin", (HELLO, False), "end"])

    def test_envelopes_of_disconnected_peer_are_served(self) -> None:
        """A sender of forwards may send, close and leave."""
        websocket_client, _ = self.websocket_client()
        forwards = [
            encode_masked_frame(pack_forward(self.site_fixture, self.bob.did, self.bob.make_payload()))
            for _ in range(3)
        ]
        websocket_client.transport.feed(b"".join(forwards) + encode_masked_frame(b"\x03\xe8", CLOSE))
        websocket_client.transport.disconnect()
        self.assertEqual(self.bob.count_queued(), 3)

    def test_internal_error_keeps_socket(self) -> None:
        """After an internal error the next message is served."""
        websocket_client, socket = self.websocket_client()
        socket.answer = lambda frame: fail(ZeroDivisionError("secret"))
        websocket_client.send(HELLO)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        socket.answer = lambda frame: send_reply(socket.session, frame)
        websocket_client.send(b"again")
        self.assertEqual(websocket_client.texts(), [b"again"])


class LifeTests(DecentrlSocketTestCase):
    settings: ClassVar[dict[str, Any]] = {"limits": {**HIGH_LIMITS, "max_connections_per_ip": 1}}

    def test_unauthenticated_socket_is_drained(self) -> None:
        """A socket that has not authenticated is closed with 1001, like all others."""
        websocket_client, socket = self.websocket_client()
        stopped = self.site_fixture.base.connections.stopService()
        self.assertNoResult(stopped)
        self.assertEqual(websocket_client.frames(), [(CLOSE, (1001).to_bytes(2, "big") + b"going away")])
        websocket_client.send((1001).to_bytes(2, "big"), CLOSE)
        self.site_fixture.run_due_calls()
        self.successResultOf(stopped)
        self.assertEqual(socket.calls, ["begin", "end"])

    def test_message_while_stopping_closes_socket(self) -> None:
        """A message that is not served closes the socket."""
        websocket_client, socket = self.websocket_client()
        socket.answer = lambda frame: fail(ShutdownInProgress())
        websocket_client.transport.feed(encode_masked_frame(HELLO) + encode_masked_frame(b"two"))
        self.assertEqual(websocket_client.close_code(), 1001)
        self.assertEqual(socket.calls, ["begin", (HELLO, False)])

    def test_refuses_socket_over_limit(self) -> None:
        """429 in the form of the address; the log names the protocol."""
        self.websocket_client()
        for path, protocol, code in (
            ("/ws", "decentrl", "RATE_LIMITED"),
            ("/", "decentrl", "RATE_LIMITED"),
            ("/didcomm", "didcomm", "e.m.req.rate-limited"),
        ):
            _, response, _ = self.site_fixture.upgrade(path)
            self.assertEqual((response.status, response.headers["retry-after"]), (429, "5"))
            self.assertEqual(response.headers["access-control-allow-origin"], "*")
            if protocol == "decentrl":
                self.assertEqual(response.json, {"type": "ERROR", "code": "RATE_LIMITED"})
            event = self.site_fixture.events("req.done")[-1]
            self.assertEqual((event["proto"], event["code"]), (protocol, code))

    def test_refuses_socket_while_stopping(self) -> None:
        """503 while the daemon stops."""
        self.site_fixture.base.connections.stopService()
        _, response, _ = self.site_fixture.upgrade("/ws")
        self.assertEqual((response.status, response.json), (503, {"type": "ERROR", "code": "UNAVAILABLE"}))
        self.assertEqual(response.headers["retry-after"], "5")
        event = self.site_fixture.events("req.done")[-1]
        self.assertEqual((event["proto"], event["code"]), ("decentrl", "UNAVAILABLE"))

    def test_read_ahead_is_bounded(self) -> None:
        """While a message is served, read-ahead is bounded."""
        websocket_client, socket = self.websocket_client()
        first: Deferred[None] = Deferred()
        socket.answer = lambda frame: first
        for number in range(30):
            websocket_client.send(b"%d" % number)
        self.assertEqual(websocket_client.transport.producerState, "paused")
        self.assertGreaterEqual(
            websocket_client.transport.unread, (30 - 1 - MAX_QUEUED_MESSAGES) * len(encode_masked_frame(b"1"))
        )
        first.callback(None)
        self.site_fixture.run_due_calls()
        self.assertEqual([frame for frame, _ in socket.calls[1:]], [b"%d" % number for number in range(30)])

    def test_closed_socket_is_freed(self) -> None:
        """Nothing refers to a closed socket."""
        websocket_client, socket = self.websocket_client()
        session = weakref.ref(websocket_client.transport.protocol)
        websocket_client.send(HELLO)
        websocket_client.transport.disconnect()
        self.decentrl.sockets.clear()
        del websocket_client, socket
        # Autobahn has a timer for each socket, which refers to it until it fires.
        self.site_fixture.clock.advance(3600)
        gc.collect()
        self.assertIsNone(session())


class DecentrlProtocolTests(SynchronousTestCase):
    """The same with the real Decentrl protocol."""

    def setUp(self) -> None:
        self.site_fixture = InMemorySite(self, limits=HIGH_LIMITS)

    def assert_refused(self, websocket_client: InMemoryWebSocketClient, code: int, name: str) -> None:
        """The socket got an error with this code, and was closed."""
        refusal, close_frame = websocket_client.frames()
        self.assertEqual((refusal[0], json.loads(refusal[1])), (TEXT, {"type": "AUTH_FAILED", "code": name}))
        self.assertEqual((close_frame[0], close_frame[1][:2]), (CLOSE, code.to_bytes(2, "big")))
        self.assertEqual(self.site_fixture.events("conn.auth")[-1]["code"], name)

    def test_authentication_times_out(self) -> None:
        """Authentication times out after exactly ten seconds."""
        websocket_client = self.site_fixture.websocket_client("/ws")
        self.site_fixture.clock.advance(9.9)
        self.assertEqual(websocket_client.frames(), [])
        self.site_fixture.clock.advance(0.1)
        self.assert_refused(websocket_client, 4001, "AUTH_TIMEOUT")

    def test_incomplete_messages_do_not_delay_timeout(self) -> None:
        """Neither a ping nor the beginning of a message extends the ten seconds."""
        pinging, unfinished = (self.site_fixture.websocket_client("/ws") for _ in range(2))
        self.site_fixture.clock.advance(9.9)
        pinging.send(b"hello?", PING_FRAME)
        unfinished.send(HELLO[:5], final=False)
        self.assertEqual([opcode for opcode, _ in pinging.frames()], [10])
        self.site_fixture.clock.advance(0.1)
        for websocket_client in (pinging, unfinished):
            self.assert_refused(websocket_client, 4001, "AUTH_TIMEOUT")

    def test_invalid_authentication(self) -> None:
        """Invalid text and binary messages are refused."""
        for frame, opcode in ((b"hello", TEXT), (b"{}", TEXT), (b"{}", BINARY), (b"\xff", TEXT), (b"", TEXT)):
            websocket_client = self.site_fixture.websocket_client("/ws")
            websocket_client.send(frame, opcode)
            self.assert_refused(websocket_client, 4002, "INVALID_MESSAGE")

    def test_envelope_needs_no_authentication(self) -> None:
        """An envelope is answered, and authentication is no longer required."""
        bob = InMemoryWallet(self.site_fixture).enrol()
        websocket_client = self.site_fixture.websocket_client("/ws")
        websocket_client.send(bob.pack(PING, id="t"))
        self.assertEqual([bob.open(frame).message.thid for frame in websocket_client.texts()], ["t"])
        self.site_fixture.clock.advance(11)
        self.assertEqual(websocket_client.frames(), [])
        self.assertFalse(websocket_client.transport.lost)


class RecordingWebSocketClient(WebSocketClientProtocol):
    """Autobahn client that records what it receives."""

    def __init__(self, first: bytes | None) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.over: Deferred[list[Any]] = Deferred()
        self._first = first

    def onOpen(self) -> None:
        """Send the first message, if any."""
        if self._first is not None:
            self.sendMessage(self._first)

    def onMessage(self, payload: bytes, isBinary: bool) -> None:  # noqa: N803
        """Record the message."""
        self.seen.append((payload, isBinary))

    def onClose(self, wasClean: bool, code: int | None, reason: str | None) -> None:  # noqa: N803
        """Record the close."""
        self.seen.append((wasClean, code, reason))
        self.over.callback(self.seen)


class ThirdPartyClientTests(TestCase):
    """What a third-party client sees over TCP."""

    def setUp(self) -> None:
        self.decentrl = FakeDecentrl()
        self.site_fixture = InMemorySite(self, fake_decentrl=self.decentrl, limits=HIGH_LIMITS)
        reactor: Any = _reactor
        self.port = reactor.listenTCP(0, self.site_fixture.site, interface=LOCAL)
        self.addCleanup(self.port.stopListening)
        self.gone: Deferred[None] = Deferred()
        self.site_fixture.base.connections.on_close(lambda session: self.gone.callback(None))

    async def client(self, first: bytes | None = None) -> RecordingWebSocketClient:
        """Connect a client that sends `first` once it is open."""
        number = self.port.getHost().port
        factory = WebSocketClientFactory(f"ws://{LOCAL}:{number}/ws", reactor=_reactor)
        factory.noisy = False
        # The default is one second, too short for a busy machine.
        factory.setProtocolOptions(openHandshakeTimeout=0, closeHandshakeTimeout=0, serverConnectionDropTimeout=0)
        client = RecordingWebSocketClient(first)
        client.factory = factory
        await connectProtocol(TCP4ClientEndpoint(_reactor, LOCAL, number), client)
        return client

    async def test_error_arrives_before_close(self) -> None:
        """The error arrives before the close code, although both are sent in one iteration (DCTRL-0004 10.2)."""

        def on_open(socket: FakeDecentrlSocketProtocol) -> None:
            socket.answer = lambda frame: refuse(socket.session)

        self.decentrl.opened = on_open
        client = await self.client(HELLO)
        self.assertEqual(await client.over, [(FAILED, False), (True, 4007, "NOT_REGISTERED")])
        await self.gone

    async def test_shutdown_closes_idle_client(self) -> None:
        """A client that has sent nothing is closed when the daemon stops."""
        opened: Deferred[FakeDecentrlSocketProtocol] = Deferred()
        self.decentrl.opened = opened.callback
        client = await self.client()
        await opened
        stopped = self.site_fixture.base.connections.stopService()
        self.assertEqual(await client.over, [(True, 1001, "going away")])
        await stopped
