"""What a socket at `/ws` is: Decentrl's, unless its first message is an envelope (DCTRL-0004 10, contract 3)."""

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
from tests.http.test_websocket import GARBAGE, PLENTY
from tests.in_memory_mediator import PING, InMemoryWallet, pack_forward

LOCAL = "127.0.0.1"
HELLO = b'{"type":"AUTHENTICATE"}'
FAILED = b'{"type":"AUTH_FAILED","code":"NOT_REGISTERED"}'


def said(session: WebSocketSession, frame: bytes) -> Deferred[None]:
    """Say something."""
    session.send(frame)
    return succeed(None)


def refused(session: WebSocketSession) -> Deferred[None]:
    """Say no, and goodbye."""
    session.send(FAILED)
    session.close(4007, "NOT_REGISTERED")
    return succeed(None)


class DecentrlSocketTestCase(SynchronousTestCase):
    """A mediator whose Decentrl part is in the test's hand, and Bob who has a DIDComm account there."""

    settings: ClassVar[dict[str, Any]] = {}

    def setUp(self) -> None:
        self.decentrl = FakeDecentrl()
        self.site_fixture = InMemorySite(self, fake_decentrl=self.decentrl, **{"limits": PLENTY, **self.settings})
        self.bob = InMemoryWallet(self.site_fixture).enrol()

    def websocket_client(self, path: str = "/ws") -> tuple[InMemoryWebSocketClient, FakeDecentrlSocketProtocol]:
        """An open socket and our side of it."""
        websocket_client = self.site_fixture.websocket_client(path)
        return websocket_client, self.decentrl.sockets[-1]

    def ping(self, thread: str = "t") -> bytes:
        """A message of Bob's that is answered."""
        return self.bob.pack(PING, id=thread)

    def threads(self, frames: list[bytes]) -> list[str | None]:
        """The threads of answers to Bob."""
        return [self.bob.open(frame).message.thid for frame in frames]


class FirstMessageTests(DecentrlSocketTestCase):
    def test_messages_are_handed_on(self) -> None:
        """From the opening on, each message as it came, text or binary, whole (DCTRL-0004 10.2)."""
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

    def test_spellings_of_the_path(self) -> None:
        """A closing slash, a query or an encoded letter make no difference."""
        for path in ("/ws/", "/ws?a=b", "/%77s"):
            self.websocket_client(path)[0].send(HELLO)
            self.assertEqual(self.decentrl.sockets[-1].calls, ["begin", (HELLO, False)])
        self.assertEqual(len(self.decentrl.sockets), 3)

    def test_an_envelope_first(self) -> None:
        """The socket is DIDComm's from then on, whatever follows (contract section 3)."""
        websocket_client, socket = self.websocket_client()
        websocket_client.send(self.ping("one"), BINARY)
        self.assertEqual(socket.calls, ["begin", "end"])
        self.assertEqual(self.threads(websocket_client.texts()), ["one"])
        websocket_client.send(self.ping("two"))
        self.assertEqual(self.threads(websocket_client.texts()), ["two"])
        websocket_client.send(HELLO)
        (report,) = websocket_client.texts()
        self.assertEqual(json.loads(report)["body"]["code"], "e.p.msg")
        websocket_client.line.hang_up()
        self.assertEqual(socket.calls, ["begin", "end"])

    def test_an_envelope_that_does_not_open(self) -> None:
        """It is one by its look."""
        websocket_client, socket = self.websocket_client()
        websocket_client.send(GARBAGE)
        (report,) = websocket_client.texts()
        self.assertEqual(json.loads(report)["body"]["code"], "e.p.trust.crypto")
        self.assertEqual(socket.calls, ["begin", "end"])

    def test_an_envelope_later(self) -> None:
        """Only the first message decides."""
        websocket_client, socket = self.websocket_client()
        websocket_client.send(b"hello")
        raw = self.ping()
        websocket_client.send(raw)
        self.assertEqual(socket.calls, ["begin", (b"hello", False), (raw, False)])
        self.assertEqual(websocket_client.frames(), [])

    def test_other_addresses(self) -> None:
        """At `/didcomm` and `/` there is nobody who speaks Decentrl."""
        for path in ("/didcomm", "/didcomm/", "/"):
            websocket_client = self.site_fixture.websocket_client(path)
            websocket_client.send(HELLO)
            (report,) = websocket_client.texts()
            self.assertEqual(json.loads(report)["body"]["code"], "e.p.msg")
        self.assertEqual(self.decentrl.sockets, [])

    def test_handshakes_that_are_none(self) -> None:
        """Nothing begins with them, so there is nothing to end."""
        for headers in ({"Sec-WebSocket-Version": "99"}, {"Sec-WebSocket-Key": "short"}):
            _, response, _ = self.site_fixture.upgrade("/ws", **headers)
            self.assertEqual(response.status, 400)
        self.assertEqual([socket.calls for socket in self.decentrl.sockets], [])

    def test_the_log_names_the_protocol(self) -> None:
        """What a socket spoke; who said nothing at `/ws` would have spoken Decentrl."""
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
            websocket_client.line.hang_up()
            self.assertEqual(self.site_fixture.events("conn.close")[-1]["proto"], protocol)


class AnswerTests(DecentrlSocketTestCase):
    def test_a_refusal_and_a_goodbye(self) -> None:
        """What is said in the same turn as the closing comes first, and nothing comes after (DCTRL-0004 10.2)."""
        websocket_client, socket = self.websocket_client()
        self.assertTrue(socket.session.send(FAILED))
        socket.session.close(4007, "NOT_REGISTERED")
        self.assertFalse(socket.session.send(b"too late"))
        (refusal, goodbye) = websocket_client.frames()
        self.assertEqual(refusal, (TEXT, FAILED))
        self.assertEqual(goodbye, (CLOSE, (4007).to_bytes(2, "big") + b"NOT_REGISTERED"))
        websocket_client.send((4007).to_bytes(2, "big"), CLOSE)
        self.site_fixture.settle()
        self.assertTrue(websocket_client.line.lost)
        self.assertEqual(socket.calls, ["begin", "end"])
        (closed,) = self.site_fixture.events("conn.close")
        self.assertEqual((closed["ws_code"], closed["reason"], closed["n_out"]), (4007, "us", 1))

    def test_every_close_code(self) -> None:
        """Those of DCTRL-0004 10.3 and those for faults of ours."""
        for code in (*range(4001, 4008), 1011, 1013):
            websocket_client, socket = self.websocket_client()
            socket.session.send(FAILED)
            socket.session.close(code, "X")
            self.assertEqual(websocket_client.close_code(), code)

    def test_a_peer_that_does_not_say_goodbye(self) -> None:
        """It is cut off, and then the conversation is over."""
        websocket_client, socket = self.websocket_client()
        socket.session.close(4001, "AUTH_TIMEOUT")
        self.assertEqual(socket.calls, ["begin"])
        self.site_fixture.clock.pump([1] * 4)
        self.site_fixture.settle()
        self.assertTrue(websocket_client.line.lost)
        self.assertEqual(socket.calls, ["begin", "end"])

    def test_one_after_the_other(self) -> None:
        """A message is heard when the one before it has been served."""
        websocket_client, socket = self.websocket_client()
        first: Deferred[None] = Deferred()
        socket.answer = lambda frame: first if frame == b"one" else said(socket.session, frame)
        websocket_client.line.feed(
            encode_masked_frame(b"one") + encode_masked_frame(b"two") + encode_masked_frame(b"three")
        )
        self.assertEqual(socket.calls, ["begin", (b"one", False)])
        self.assertEqual(websocket_client.frames(), [])
        first.callback(None)
        self.assertEqual(websocket_client.texts(), [b"two", b"three"])

    def test_what_waits_behind_a_goodbye(self) -> None:
        """It is not heard, whether it came with the last message or later."""
        websocket_client, socket = self.websocket_client()
        first: Deferred[None] = Deferred()
        socket.answer = lambda frame: first
        websocket_client.line.feed(
            encode_masked_frame(HELLO) + encode_masked_frame(b"two") + encode_masked_frame(b"three")
        )
        socket.session.close(4002, "INVALID_MESSAGE")
        first.callback(None)
        websocket_client.send(b"four")
        self.assertEqual(socket.calls, ["begin", (HELLO, False)])
        self.assertEqual(websocket_client.close_code(), 4002)

    def test_a_peer_that_leaves(self) -> None:
        """What it said last is not heard any more: nobody is there to be told anything."""
        websocket_client, socket = self.websocket_client()
        first: Deferred[None] = Deferred()
        socket.answer = lambda frame: first
        websocket_client.line.feed(
            encode_masked_frame(HELLO) + encode_masked_frame(b"two") + encode_masked_frame(b"\x03\xe8", CLOSE)
        )
        self.site_fixture.settle()
        self.assertEqual(socket.calls, ["begin", (HELLO, False), "end"])
        first.callback(None)
        self.assertFalse(socket.session.send(b"gone"))
        self.assertEqual(socket.calls, ["begin", (HELLO, False), "end"])

    def test_envelopes_of_a_peer_that_leaves(self) -> None:
        """They are taken: a sender of forwards may say what it has to, close and leave."""
        websocket_client, _ = self.websocket_client()
        forwards = [
            encode_masked_frame(pack_forward(self.site_fixture, self.bob.did, self.bob.letter())) for _ in range(3)
        ]
        websocket_client.line.feed(b"".join(forwards) + encode_masked_frame(b"\x03\xe8", CLOSE))
        websocket_client.line.hang_up()
        self.assertEqual(self.bob.waiting(), 3)

    def test_a_fault_of_ours(self) -> None:
        """The socket stays as it is, and the next message is heard."""
        websocket_client, socket = self.websocket_client()
        socket.answer = lambda frame: fail(ZeroDivisionError("secret"))
        websocket_client.send(HELLO)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        socket.answer = lambda frame: said(socket.session, frame)
        websocket_client.send(b"again")
        self.assertEqual(websocket_client.texts(), [b"again"])


class LifeTests(DecentrlSocketTestCase):
    settings: ClassVar[dict[str, Any]] = {"limits": {**PLENTY, "max_connections_per_ip": 1}}

    def test_draining(self) -> None:
        """A socket that has not authenticated is closed with 1001 like all others."""
        websocket_client, socket = self.websocket_client()
        stopped = self.site_fixture.base.connections.stopService()
        self.assertNoResult(stopped)
        self.assertEqual(websocket_client.frames(), [(CLOSE, (1001).to_bytes(2, "big") + b"going away")])
        websocket_client.send((1001).to_bytes(2, "big"), CLOSE)
        self.site_fixture.settle()
        self.successResultOf(stopped)
        self.assertEqual(socket.calls, ["begin", "end"])

    def test_a_message_while_the_daemon_stops(self) -> None:
        """Who is not served is told to go away."""
        websocket_client, socket = self.websocket_client()
        socket.answer = lambda frame: fail(ShutdownInProgress())
        websocket_client.line.feed(encode_masked_frame(HELLO) + encode_masked_frame(b"two"))
        self.assertEqual(websocket_client.close_code(), 1001)
        self.assertEqual(socket.calls, ["begin", (HELLO, False)])

    def test_one_socket_too_many(self) -> None:
        """429 in the form of the address; the log tells whose it was."""
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
            told = self.site_fixture.events("req.done")[-1]
            self.assertEqual((told["proto"], told["code"]), (protocol, code))

    def test_one_socket_too_late(self) -> None:
        """503 while the daemon stops."""
        self.site_fixture.base.connections.stopService()
        _, response, _ = self.site_fixture.upgrade("/ws")
        self.assertEqual((response.status, response.json), (503, {"type": "ERROR", "code": "UNAVAILABLE"}))
        self.assertEqual(response.headers["retry-after"], "5")
        told = self.site_fixture.events("req.done")[-1]
        self.assertEqual((told["proto"], told["code"]), ("decentrl", "UNAVAILABLE"))

    def test_a_flood(self) -> None:
        """While a message is served, only so many are read ahead."""
        websocket_client, socket = self.websocket_client()
        first: Deferred[None] = Deferred()
        socket.answer = lambda frame: first
        for number in range(30):
            websocket_client.send(b"%d" % number)
        self.assertEqual(websocket_client.line.producerState, "paused")
        self.assertGreaterEqual(
            websocket_client.line.unread, (30 - 1 - MAX_QUEUED_MESSAGES) * len(encode_masked_frame(b"1"))
        )
        first.callback(None)
        self.site_fixture.settle()
        self.assertEqual([frame for frame, _ in socket.calls[1:]], [b"%d" % number for number in range(30)])

    def test_a_socket_that_left_is_forgotten(self) -> None:
        """Neither the conversation nor anything else keeps it."""
        websocket_client, socket = self.websocket_client()
        session = weakref.ref(websocket_client.line.protocol)
        websocket_client.send(HELLO)
        websocket_client.line.hang_up()
        self.decentrl.sockets.clear()
        del websocket_client, socket
        # Autobahn keeps an hour-glass for each socket, which runs out.
        self.site_fixture.clock.advance(3600)
        gc.collect()
        self.assertIsNone(session())


class RealTests(SynchronousTestCase):
    """The same with the real half behind it."""

    def setUp(self) -> None:
        self.site_fixture = InMemorySite(self, limits=PLENTY)

    def refused(self, websocket_client: InMemoryWebSocketClient, code: int, name: str) -> None:
        """The socket was told why, and closed."""
        refusal, goodbye = websocket_client.frames()
        self.assertEqual((refusal[0], json.loads(refusal[1])), (TEXT, {"type": "AUTH_FAILED", "code": name}))
        self.assertEqual((goodbye[0], goodbye[1][:2]), (CLOSE, code.to_bytes(2, "big")))
        self.assertEqual(self.site_fixture.events("conn.auth")[-1]["code"], name)

    def test_nothing_in_ten_seconds(self) -> None:
        """Too late, exactly then."""
        websocket_client = self.site_fixture.websocket_client("/ws")
        self.site_fixture.clock.advance(9.9)
        self.assertEqual(websocket_client.frames(), [])
        self.site_fixture.clock.advance(0.1)
        self.refused(websocket_client, 4001, "AUTH_TIMEOUT")

    def test_what_is_no_authentication(self) -> None:
        """Text that is none, and bytes."""
        for frame, opcode in ((b"hello", TEXT), (b"{}", TEXT), (b"{}", BINARY), (b"\xff", TEXT), (b"", TEXT)):
            websocket_client = self.site_fixture.websocket_client("/ws")
            websocket_client.send(frame, opcode)
            self.refused(websocket_client, 4002, "INVALID_MESSAGE")

    def test_an_envelope(self) -> None:
        """It is answered, and nobody asks for an authentication any more."""
        bob = InMemoryWallet(self.site_fixture).enrol()
        websocket_client = self.site_fixture.websocket_client("/ws")
        websocket_client.send(bob.pack(PING, id="t"))
        self.assertEqual([bob.open(frame).message.thid for frame in websocket_client.texts()], ["t"])
        self.site_fixture.clock.advance(11)
        self.assertEqual(websocket_client.frames(), [])
        self.assertFalse(websocket_client.line.lost)


class Client(WebSocketClientProtocol):
    """Autobahn's client, noting what it sees."""

    def __init__(self, first: bytes | None) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.over: Deferred[list[Any]] = Deferred()
        self._first = first

    def onOpen(self) -> None:
        """Say what there is to say."""
        if self._first is not None:
            self.sendMessage(self._first)

    def onMessage(self, payload: bytes, isBinary: bool) -> None:  # noqa: N803
        """Note."""
        self.seen.append((payload, isBinary))

    def onClose(self, wasClean: bool, code: int | None, reason: str | None) -> None:  # noqa: N803
        """Note, and be done."""
        self.seen.append((wasClean, code, reason))
        self.over.callback(self.seen)


class ClientTests(TestCase):
    """What a client by other people sees, over TCP."""

    def setUp(self) -> None:
        self.decentrl = FakeDecentrl()
        self.site_fixture = InMemorySite(self, fake_decentrl=self.decentrl, limits=PLENTY)
        reactor: Any = _reactor
        self.port = reactor.listenTCP(0, self.site_fixture.site, interface=LOCAL)
        self.addCleanup(self.port.stopListening)
        self.gone: Deferred[None] = Deferred()
        self.site_fixture.base.connections.on_close(lambda session: self.gone.callback(None))

    async def client(self, first: bytes | None = None) -> Client:
        """A client that has connected and says this as soon as it may."""
        number = self.port.getHost().port
        factory = WebSocketClientFactory(f"ws://{LOCAL}:{number}/ws", reactor=_reactor)
        factory.noisy = False
        # By default it gives up after a second, which a busy machine may take.
        factory.setProtocolOptions(openHandshakeTimeout=0, closeHandshakeTimeout=0, serverConnectionDropTimeout=0)
        client = Client(first)
        client.factory = factory
        await connectProtocol(TCP4ClientEndpoint(_reactor, LOCAL, number), client)
        return client

    async def test_a_refusal_arrives(self) -> None:
        """The failure message, then the code, though both are sent in one turn (DCTRL-0004 10.2)."""

        def opened(socket: FakeDecentrlSocketProtocol) -> None:
            socket.answer = lambda frame: refused(socket.session)

        self.decentrl.opened = opened
        client = await self.client(HELLO)
        self.assertEqual(await client.over, [(FAILED, False), (True, 4007, "NOT_REGISTERED")])
        await self.gone

    async def test_going_away(self) -> None:
        """A client that has said nothing yet is told when the daemon stops."""
        opened: Deferred[FakeDecentrlSocketProtocol] = Deferred()
        self.decentrl.opened = opened.callback
        client = await self.client()
        await opened
        stopped = self.site_fixture.base.connections.stopService()
        self.assertEqual(await client.over, [(True, 1001, "going away")])
        await stopped
