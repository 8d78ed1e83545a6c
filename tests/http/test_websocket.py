"""WebSocket frames on in-memory connections (reference 3.2 and 6.3)."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any, ClassVar

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from mediatord.http.websocket import MAX_FRAGMENTS, MAX_QUEUED_MESSAGES
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.wallet.didcomm_client import DeliveredMessage, read_delivery, read_status
from mediatord.wallet.didcomm_messages import open_problem_report
from tests.http.fake_protocols import FakeDecentrl
from tests.http.in_memory_site import (
    BINARY,
    CLOSE,
    PONG,
    TEXT,
    InMemorySite,
    InMemoryWebSocketClient,
    encode_masked_frame,
    encode_request,
)
from tests.http.in_memory_site import PING as PING_FRAME
from tests.in_memory_mediator import MP, PING, InMemoryWallet, pack_forward

GARBAGE = b'{"protected":"e30","recipients":[],"iv":"AA","ciphertext":"AA","tag":"AA"}'
OPENING = encode_request(
    "GET",
    "/ws",
    None,
    {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    },
)
PATHS = ("/ws", "/didcomm", "/")
ORIGINS = (
    *(None, "null", "file://", "https://app.example", "https://evil.example:8443", "http://[::1]:3000"),
    *("capacitor://localhost", "moz-extension://0b1c", "app://-", "content://", "https://bad:port", "nonsense"),
)
HIGH_LIMITS = {"ip_per_minute": 100_000, "did_per_minute": 100_000, "account_per_minute": 100_000}


class SocketTestCase(SynchronousTestCase):
    """Mediator, and Bob with an account."""

    settings: ClassVar[dict[str, Any]] = {}

    def setUp(self) -> None:
        self.site_fixture = InMemorySite(self, **{"limits": HIGH_LIMITS, **self.settings})
        self.bob = InMemoryWallet(self.site_fixture).enrol()

    def pings(self, *threads: str) -> list[bytes]:
        """Pack trust pings of Bob's."""
        return [self.bob.pack(PING, id=thread) for thread in threads]

    def threads(self, frames: list[bytes]) -> list[str | None]:
        """Thread ids of responses to Bob."""
        return [self.bob.open(frame).message.thid for frame in frames]

    def go_live(self, websocket_client: InMemoryWebSocketClient, wallet: InMemoryWallet | None = None) -> None:
        """Switch on live delivery on a socket."""
        wallet = wallet or self.bob
        websocket_client.send(wallet.pack(f"{MP}/live-delivery-change", {"live_delivery": True}))
        (response,) = websocket_client.texts()
        self.assertIs(read_status(wallet.open(response).message).live_delivery, True)

    def forward(self, wallet: InMemoryWallet, text: str = "hello") -> None:
        """Forward an anonymous message to a wallet."""
        raw = pack_forward(self.site_fixture, wallet.did, wallet.make_payload(text))
        self.assertEqual(self.site_fixture.receive(raw, peer="203.0.113.7").status, 202)

    def delivered(self, frame: bytes, wallet: InMemoryWallet | None = None) -> DeliveredMessage:
        """Return the one message of a pushed delivery."""
        (one,) = read_delivery((wallet or self.bob).open(frame).message)
        return one


class HandshakeTests(SocketTestCase):
    settings = {"limits": {**HIGH_LIMITS, "max_connections_per_ip": 2}, "trusted_proxies": ["198.51.100.0/24"]}

    def setUp(self) -> None:
        super().setUp()
        self.decentrl = FakeDecentrl()
        self.decentrl_site = InMemorySite(self, fake_decentrl=self.decentrl)

    def test_three_paths(self) -> None:
        """A socket can be opened at /ws, /didcomm and /, and behaves the same (reference 3.2)."""
        for number, path in enumerate(("/ws", "/ws/", "/didcomm", "/didcomm/", "/")):
            websocket_client = self.site_fixture.websocket_client(path, peer=f"192.0.2.{number + 10}")
            websocket_client.send(self.pings(path)[0])
            self.assertEqual(self.threads(websocket_client.texts()), [path])

    def test_accept_key(self) -> None:
        """The handshake is that of RFC 6455 section 1.3."""
        _, response, rest = self.site_fixture.upgrade()
        self.assertEqual(response.headers["sec-websocket-accept"], "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")
        self.assertEqual(rest, b"")

    def test_selects_no_extensions(self) -> None:
        """No subprotocol and no compression is selected, whatever is offered; Origin is ignored (reference 3.2)."""
        _, response, _ = self.site_fixture.upgrade(
            **{
                "Sec-WebSocket-Protocol": "didcomm, chat",
                "Sec-WebSocket-Extensions": "permessage-deflate; client_max_window_bits",
                "Origin": "https://evil.example",
            }
        )
        self.assertEqual(response.status, 101)
        self.assertNotIn("sec-websocket-protocol", response.headers)
        self.assertNotIn("sec-websocket-extensions", response.headers)

    def test_any_origin_is_allowed_by_default(self) -> None:
        """By default any Origin may open a socket, also files and embedded browsers."""
        for origin in ORIGINS:
            self.assertEqual(
                [self.handshake_status(self.site_fixture, path, origin) for path in PATHS], [101] * len(PATHS), origin
            )

    def test_allowed_origins(self) -> None:
        """Configured origins and clients without one are accepted; others get 403 and no socket."""
        allowed = ["https://app.example", "https://*.wallet.example", "http://localhost:*", "null"]
        site_fixture = InMemorySite(self, websocket_origins=allowed)
        found = {
            origin: self.handshake_status(site_fixture, "/ws", origin)
            for origin in (*ORIGINS, "https://APP.example", "https://a.wallet.example", "http://localhost:3000")
        }
        self.assertEqual(
            [origin for origin, status in found.items() if status == 101],
            [
                None,
                "null",
                "https://app.example",
                "https://APP.example",
                "https://a.wallet.example",
                "http://localhost:3000",
            ],
        )
        self.assertEqual(set(found.values()), {101, 403})
        for path in PATHS:
            self.assertEqual(self.handshake_status(site_fixture, path, "https://wallet.example"), 403)
            self.assertEqual(self.handshake_status(site_fixture, path, "https://app.example.evil.example"), 403)
            self.assertEqual(self.handshake_status(site_fixture, path, "https://evil.example/.wallet.example"), 403)
        self.assertEqual(
            self.handshake_status(site_fixture, "/ws", None, **{"Sec-WebSocket-Origin": "https://evil.example"}), 403
        )

    def test_reload_changes_allowed_origins(self) -> None:
        """Origins changed by a reload apply to the next handshake."""
        new = self.site_fixture.config.model_copy(update={"websocket_origins": ("https://app.example",)})
        self.site_fixture.base.reloader.reload(lambda: new)
        self.assertEqual(self.handshake_status(self.site_fixture, "/ws", "null"), 403)
        self.assertEqual(self.handshake_status(self.site_fixture, "/ws", "https://app.example"), 101)

    def handshake_status(self, site_fixture: InMemorySite, path: str, origin: str | None, **headers: str) -> int:
        """Return the status of a handshake."""
        transport, response, _ = site_fixture.upgrade(
            path, **({} if origin is None else {"Origin": origin}), **headers
        )
        transport.disconnect()
        return response.status

    def test_server_does_not_speak_first(self) -> None:
        """The first frame is the response to the first request, however long that takes (reference 3.2)."""
        websocket_client = self.site_fixture.websocket_client()
        self.site_fixture.clock.advance(20)
        self.assertEqual(websocket_client.frames(), [])
        websocket_client.send(self.pings("first")[0])
        self.assertEqual(self.threads(websocket_client.texts()), ["first"])

    def test_frame_behind_handshake(self) -> None:
        """A client need not wait for the handshake's response before its first frame."""
        transport, response, rest = self.site_fixture.upgrade()
        transport.feed(encode_masked_frame(self.pings("early")[0]))
        self.assertEqual(self.threads(InMemoryWebSocketClient(self.site_fixture, transport, rest).texts()), ["early"])

    def test_frames_in_segments_of_handshake(self) -> None:
        """Frames behind an upgrade, and behind requests before it, are served in order wherever TCP cuts them."""
        frames = encode_masked_frame(b"first") + encode_masked_frame(b"second")
        requests = {
            "upgrade": OPENING + frames,
            "behind another request": encode_request("GET", "/health") + OPENING + frames,
            "with a body": OPENING[:-2] + b"Content-Length: 0\r\n\r\n" + frames,
        }
        for name, data in requests.items():
            for cut in range(len(data)):
                with self.subTest(name, cut=cut):
                    self.assertEqual(self.responses_to([data[:cut], data[cut:]]), [b"first", b"second"])
            self.assertEqual(self.responses_to([bytes([item]) for item in data]), [b"first", b"second"], name)

    def responses_to(self, segments: list[bytes]) -> list[bytes]:
        """Return what a Decentrl client receives in response to the segments."""
        transport = self.decentrl_site.connect()
        for segment in segments:
            transport.feed(segment)
        self.decentrl_site.run_due_calls()
        (socket,) = self.decentrl.sockets
        self.decentrl.sockets.clear()
        transport.disconnect()
        return [call[0] for call in socket.calls if isinstance(call, tuple)]

    def test_failed_handshakes(self) -> None:
        """An unknown version or a missing key is refused in HTTP; no socket is counted."""
        for headers in ({"Sec-WebSocket-Version": "99"}, {"Sec-WebSocket-Key": "short"}):
            transport, response, _ = self.site_fixture.upgrade(**headers)
            self.assertEqual(response.status, 400)
            self.assertTrue(transport.lost)
        self.assertEqual(len(self.site_fixture.base.connections), 0)
        self.assertEqual(self.site_fixture.counter("mediator_active_connections"), 0)

    def test_limits_sockets_per_address(self) -> None:
        """Over `max_connections_per_ip` the handshake gets 429; a closed socket makes room."""
        first = self.site_fixture.websocket_client()
        self.site_fixture.websocket_client("/didcomm")
        for path in ("/ws", "/didcomm", "/"):
            _, response, _ = self.site_fixture.upgrade(path)
            self.assertEqual(response.status, 429)
            self.assertGreater(int(response.headers["retry-after"]), 0)
        self.site_fixture.websocket_client(peer="192.0.2.99")
        first.transport.disconnect(cleanly=False)
        self.site_fixture.websocket_client()

    def test_limits_sockets_behind_proxy(self) -> None:
        """The limit applies to the client that a trusted proxy names, not to the proxy (reference 3.5)."""
        for number in range(4):
            self.site_fixture.websocket_client(peer="198.51.100.1", **{"X-Forwarded-For": f"203.0.113.{number}"})
        self.site_fixture.websocket_client(peer="198.51.100.1", **{"X-Forwarded-For": "203.0.113.0"})
        _, response, _ = self.site_fixture.upgrade(peer="198.51.100.1", **{"X-Forwarded-For": "203.0.113.0"})
        self.assertEqual(response.status, 429)

    def test_gauge_counts_open_sockets(self) -> None:
        """`mediator_active_connections` counts open sockets (reference 12)."""
        websocket_client = self.site_fixture.websocket_client()
        self.site_fixture.websocket_client()
        self.assertEqual(self.site_fixture.counter("mediator_active_connections"), 2)
        websocket_client.transport.disconnect()
        self.assertEqual(self.site_fixture.counter("mediator_active_connections"), 1)
        (closed,) = self.site_fixture.events("conn.close")
        self.assertEqual((closed["n_in"], closed["n_out"]), (0, 0))


class ExchangeTests(SocketTestCase):
    def test_responds_in_text_frames(self) -> None:
        """Some wallets send binary frames; responses are text nevertheless (reference 3.2)."""
        websocket_client = self.site_fixture.websocket_client()
        for opcode in (TEXT, BINARY):
            websocket_client.send(self.pings(f"{opcode}")[0], opcode)
            self.assertEqual(self.threads(websocket_client.texts()), [f"{opcode}"])

    def test_fragmented_message(self) -> None:
        """Fragments are joined, also with a ping between them."""
        raw = self.pings("cut")[0]
        websocket_client = self.site_fixture.websocket_client()
        websocket_client.send(raw[:100], final=False)
        websocket_client.send(b"alive?", PING_FRAME)
        websocket_client.send(raw[100:200], 0, final=False)
        websocket_client.send(raw[200:], 0)
        (pong, answer) = websocket_client.frames()
        self.assertEqual(pong, (PONG, b"alive?"))
        self.assertEqual(self.threads([answer[1]]), ["cut"])

    def test_frame_byte_by_byte(self) -> None:
        """A frame may arrive byte by byte."""
        websocket_client = self.site_fixture.websocket_client()
        for byte in encode_masked_frame(self.pings("slow")[0]):
            websocket_client.transport.feed(bytes([byte]))
        self.assertEqual(self.threads(websocket_client.texts()), ["slow"])

    def test_pipelined_requests_are_answered_in_order(self) -> None:
        """Pipelined requests are answered in order, also when the store is slow."""
        names = [f"t{number}" for number in range(25)]
        websocket_client = self.site_fixture.websocket_client()
        with HeldStoreOperation(self.site_fixture, "claim_nonce") as held:
            websocket_client.transport.feed(b"".join(encode_masked_frame(raw) for raw in self.pings(*names)))
            self.assertEqual(websocket_client.frames(), [])
            held.release_all()
            self.assertEqual(self.threads(websocket_client.texts()), names)

    def test_accepted_forward_gets_no_response(self) -> None:
        """Success is silent, an error is a frame (reference 4.2)."""
        websocket_client = self.site_fixture.websocket_client()
        websocket_client.send(pack_forward(self.site_fixture, self.bob.did, self.bob.make_payload()))
        self.assertEqual(websocket_client.frames(), [])
        websocket_client.send(pack_forward(self.site_fixture, "did:example:nobody", self.bob.make_payload()))
        (report,) = websocket_client.texts()
        self.assertEqual(open_problem_report(report, resolve_local)["body"]["code"], "e.p.me.res.not-found")
        self.assertEqual(self.bob.count_queued(), 1)

    def test_forwards_before_close_are_served(self) -> None:
        """A sender may send, close and disconnect; what has arrived is served."""
        websocket_client = self.site_fixture.websocket_client()
        frames = [
            encode_masked_frame(pack_forward(self.site_fixture, self.bob.did, self.bob.make_payload()))
            for _ in range(3)
        ]
        with HeldStoreOperation(self.site_fixture, "enqueue") as held:
            websocket_client.transport.feed(b"".join(frames) + encode_masked_frame(b"\x03\xe8", CLOSE))
            websocket_client.transport.disconnect()
            held.release_all()
        self.assertEqual(self.bob.count_queued(), 3)

    def test_several_wallets_on_one_socket(self) -> None:
        """Each DID that authenticates on a socket gets its own messages there, encrypted to it (reference 3.2)."""
        carol = InMemoryWallet(self.site_fixture).enrol()
        websocket_client = self.site_fixture.websocket_client()
        self.go_live(websocket_client)
        self.go_live(websocket_client, carol)
        self.forward(carol, "to Carol")
        self.forward(self.bob, "to Bob")
        first, second = websocket_client.texts()
        self.assertEqual(carol.open(self.delivered(first, carol).payload).text, "to Carol")
        self.assertEqual(self.bob.open(self.delivered(second).payload).text, "to Bob")

    def test_several_sockets_of_one_wallet(self) -> None:
        """Every live socket gets a message; the first acknowledgement, on any, removes it (reference 6.3)."""
        one, two, silent = (self.site_fixture.websocket_client() for _ in range(3))
        self.go_live(one)
        self.go_live(two)
        self.forward(self.bob)
        (first,), (second,) = one.texts(), two.texts()
        self.assertEqual(self.delivered(first), self.delivered(second))
        self.assertEqual(silent.frames(), [])
        two.send(self.bob.pack(f"{MP}/messages-received", {"message_id_list": [self.delivered(second).id]}))
        self.assertEqual(read_status(self.bob.open(two.texts()[0]).message).message_count, 0)
        self.assertEqual(one.frames(), [])

    def test_push_follows_response_that_enables_it(self) -> None:
        """The response to live-delivery-change precedes the first push."""
        websocket_client = self.site_fixture.websocket_client()
        self.go_live(websocket_client)
        websocket_client.send(self.pings("before")[0])
        self.forward(self.bob)
        websocket_client.send(self.pings("after")[0])
        before, push, after = websocket_client.texts()
        self.assertEqual(self.threads([before, after]), ["before", "after"])
        self.delivered(push)

    def test_reply_larger_than_request_limit(self) -> None:
        """`max_message_bytes` limits requests, not replies."""
        site_fixture = InMemorySite(self, limits={**HIGH_LIMITS, "max_message_bytes": 8000})
        bob = InMemoryWallet(site_fixture).enrol()
        for _ in range(10):
            site_fixture.receive(pack_forward(site_fixture, bob.did, bob.make_payload("x" * 200)))
        websocket_client = site_fixture.websocket_client()
        websocket_client.send(bob.pack(f"{MP}/delivery-request", {"limit": 10}))
        (response,) = websocket_client.texts()
        self.assertGreater(len(response), 8000)
        self.assertEqual(len(read_delivery(bob.open(response).message)), 10)

    def test_all_frame_lengths(self) -> None:
        """Replies below 126 bytes, below 64 KiB and above have different headers (RFC 6455 section 5.2)."""
        websocket_client = self.site_fixture.websocket_client()
        self.go_live(websocket_client)
        sizes = []
        for size in (1, 100_000):
            self.forward(self.bob, "x" * size)
            (frame,) = websocket_client.texts()
            self.assertEqual(len(self.bob.open(self.delivered(frame).payload).text), size)
            sizes.append(len(frame))
        self.assertLess(sizes[0], 65_536)
        self.assertGreater(sizes[1], 65_536)

    def test_closed_socket_is_freed(self) -> None:
        """A request in progress when its socket closes leaves nothing behind."""
        websocket_client = self.site_fixture.websocket_client()
        session = weakref.ref(websocket_client.transport.protocol)
        with HeldStoreOperation(self.site_fixture, "get_account") as held:
            websocket_client.send(self.bob.pack(f"{MP}/live-delivery-change", {"live_delivery": True}))
            websocket_client.transport.disconnect()
            held.release_all()
        del websocket_client
        # Autobahn has a timer for each socket, which refers to it until it fires.
        self.site_fixture.clock.advance(3600)
        gc.collect()
        self.assertIsNone(session())
        self.assertEqual(self.site_fixture.base.connections.subscribers(self.bob.did), [])


class AbuseTests(SocketTestCase):
    settings = {"limits": {**HIGH_LIMITS, "max_message_bytes": 100_000}}

    def assert_closed_with(self, websocket_client: InMemoryWebSocketClient, code: int) -> None:
        """The socket was closed with a code, and is dropped soon even if the peer does not answer."""
        self.assertEqual(websocket_client.close_code(), code)
        self.site_fixture.clock.advance(4)
        self.site_fixture.run_due_calls()
        self.assertTrue(websocket_client.transport.lost)
        self.assertEqual(len(self.site_fixture.base.connections), 0)

    def test_oversized_frame(self) -> None:
        """1009 as soon as the header announces an oversized frame; the exact limit is accepted."""
        websocket_client = self.site_fixture.websocket_client()
        websocket_client.send(b" " * 100_000)
        (report,) = websocket_client.texts()
        self.assertEqual(json.loads(report)["body"]["code"], "e.p.msg")
        websocket_client.transport.feed(encode_masked_frame(b" " * 100_001)[:14])
        self.assert_closed_with(websocket_client, 1009)

    def test_oversized_fragmented_message(self) -> None:
        """1009 as soon as the fragments exceed the limit; they are not kept."""
        websocket_client = self.site_fixture.websocket_client()
        websocket_client.send(b"x" * 1000, final=False)
        for _ in range(99):
            websocket_client.send(b"x" * 1000, 0, final=False)
        self.assertEqual(websocket_client.frames(), [])
        websocket_client.send(b"x", 0, final=False)
        self.assert_closed_with(websocket_client, 1009)

    def test_endless_empty_fragments(self) -> None:
        """Endless empty fragments are 1009 too."""
        websocket_client = self.site_fixture.websocket_client()
        websocket_client.send(b"", final=False)
        websocket_client.transport.feed(encode_masked_frame(b"", 0, final=False) * (MAX_FRAGMENTS - 1))
        self.assertEqual(websocket_client.frames(), [])
        websocket_client.transport.feed(encode_masked_frame(b"", 0, final=False) * 10_000)
        self.assert_closed_with(websocket_client, 1009)

    def test_fragment_count_is_per_message(self) -> None:
        """Many messages of a few fragments each are accepted."""
        websocket_client = self.site_fixture.websocket_client()
        (raw,) = self.pings("again")
        for _ in range(MAX_FRAGMENTS // 2):
            websocket_client.send(b" ", final=False)
            websocket_client.send(b" ", 0, final=False)
            websocket_client.send(raw, 0)
        self.assertEqual(len(websocket_client.texts()), MAX_FRAGMENTS // 2)

    def test_undecryptable_frames(self) -> None:
        """One plain report, then silence, then 1008 at the third (reference 3.2)."""
        for frames in ([GARBAGE] * 3, [b"hello"] * 3, [GARBAGE, b"\xff\xfe", GARBAGE]):
            websocket_client = self.site_fixture.websocket_client()
            websocket_client.send(frames[0])
            (report,) = websocket_client.texts()
            self.assertIn(json.loads(report)["body"]["code"], ("e.p.trust.crypto", "e.p.msg"))
            websocket_client.send(frames[1], BINARY)
            self.assertEqual(websocket_client.frames(), [])
            websocket_client.send(frames[2])
            self.assert_closed_with(websocket_client, 1008)

    def test_bad_frames_count_over_socket_lifetime(self) -> None:
        """Bad frames add up over the life of a socket; good ones are answered until the last."""
        websocket_client = self.site_fixture.websocket_client()
        websocket_client.send(GARBAGE)
        websocket_client.send(GARBAGE)
        websocket_client.send(self.pings("still")[0])
        report, answer = websocket_client.texts()
        self.assertEqual(self.threads([answer]), ["still"])
        websocket_client.send(GARBAGE)
        self.assert_closed_with(websocket_client, 1008)

    def test_nothing_is_served_after_last_bad_frame(self) -> None:
        """Frames after the third bad one are not even counted, whether they came with it or later."""
        websocket_client = self.site_fixture.websocket_client()
        good = encode_masked_frame(pack_forward(self.site_fixture, self.bob.did, self.bob.make_payload()))
        with HeldStoreOperation(self.site_fixture, "claim_nonce") as held:
            websocket_client.transport.feed(
                encode_masked_frame(self.pings("wait")[0]) + encode_masked_frame(GARBAGE) * 3 + good
            )
            held.release_all()
        websocket_client.transport.feed(good)
        self.assert_closed_with(websocket_client, 1008)
        self.assertEqual(self.bob.count_queued(), 0)

    def test_protocol_violations(self) -> None:
        """An unmasked frame, a reserved bit or an unknown opcode: 1002."""
        for raw in (b"\x81\x01x", b"\xc1\x80\0\0\0\0", b"\x83\x80\0\0\0\0"):
            websocket_client = self.site_fixture.websocket_client()
            websocket_client.transport.feed(raw)
            self.assert_closed_with(websocket_client, 1002)
        self.flushWarnings()


class LifeTests(SocketTestCase):
    def test_silent_peer_is_dropped(self) -> None:
        """
        A ping every 30 s; a peer that does not answer within another 30 s is dropped, and its pushes are pending.
        """
        websocket_client = self.site_fixture.websocket_client()
        self.go_live(websocket_client)
        self.forward(self.bob)
        self.assertEqual(len(websocket_client.texts()), 1)
        self.site_fixture.clock.pump([1] * 35)
        self.assertEqual([opcode for opcode, _ in websocket_client.frames()], [PING_FRAME])
        self.assertFalse(websocket_client.transport.lost)
        self.site_fixture.clock.pump([1] * 35)
        self.site_fixture.run_due_calls()
        self.assertTrue(websocket_client.transport.lost)
        self.assertEqual(len(self.site_fixture.base.connections), 0)
        self.assertEqual(self.bob.count_queued(), 1)

    def test_keepalive_survives_clock_step(self) -> None:
        """Setting the clock back causes no early ping and drops no peer."""
        early = self.site_fixture.websocket_client()
        self.site_fixture.clock.advance(25)
        self.site_fixture.clock.step_wall_clock(-25)
        late = self.site_fixture.websocket_client()
        self.site_fixture.clock.pump([1] * 29)
        self.assertEqual([opcode for opcode, _ in early.frames()], [PING_FRAME])
        self.assertEqual(late.frames(), [])
        self.site_fixture.clock.pump([1] * 2)
        self.assertEqual([opcode for opcode, _ in late.frames()], [PING_FRAME])

    def test_responsive_peer_stays(self) -> None:
        """An hour of silence is fine for a peer that answers pings; HTTP's own time-out is off."""
        websocket_client = self.site_fixture.websocket_client()
        pings = 0
        for _ in range(360):
            self.site_fixture.clock.pump([1] * 10)
            for opcode, payload in websocket_client.frames():
                self.assertEqual(opcode, PING_FRAME)
                websocket_client.send(payload, PONG)
                pings += 1
        self.assertGreater(pings, 100)
        websocket_client.send(self.pings("alive")[0])
        self.assertEqual(self.threads(websocket_client.texts()), ["alive"])

    def test_answers_ping_with_its_payload(self) -> None:
        """A pong has the payload of its ping."""
        websocket_client = self.site_fixture.websocket_client()
        websocket_client.send(b"who is there", PING_FRAME)
        self.assertEqual(websocket_client.frames(), [(PONG, b"who is there")])

    def test_echoes_close_code(self) -> None:
        """The code is echoed, then the connection ends."""
        websocket_client = self.site_fixture.websocket_client()
        websocket_client.send((1000).to_bytes(2, "big") + b"bye", CLOSE)
        self.assertEqual(websocket_client.close_code(), 1000)
        self.assertTrue(websocket_client.transport.lost)
        self.assertEqual(self.site_fixture.events("conn.close")[0]["ws_code"], 1000)

    def test_shutdown_closes_sockets(self) -> None:
        """On shutdown every socket is closed with 1001, and shutdown waits for the peers' close frames."""
        one, two = self.site_fixture.websocket_client(), self.site_fixture.websocket_client()
        stopped = self.site_fixture.base.connections.stopService()
        for websocket_client in (one, two):
            self.assertNoResult(stopped)
            self.assertEqual(websocket_client.close_code(), 1001)
            websocket_client.send((1001).to_bytes(2, "big"), CLOSE)
            self.site_fixture.run_due_calls()
            self.assertTrue(websocket_client.transport.lost)
        self.successResultOf(stopped)

    def test_shutdown_drops_unresponsive_peer(self) -> None:
        """A peer that does not answer is disconnected after the closing time-out."""
        self.site_fixture.websocket_client().transport.peer_stalled = True
        stopped = self.site_fixture.base.connections.stopService()
        self.assertNoResult(stopped)
        self.site_fixture.clock.pump([1] * 5)
        self.successResultOf(stopped)

    def test_frame_while_stopping(self) -> None:
        """The frame is not served, and the socket closes with 1001."""
        websocket_client = self.site_fixture.websocket_client()
        self.site_fixture.base.gate.stopService()
        websocket_client.send(pack_forward(self.site_fixture, self.bob.did, self.bob.make_payload()))
        self.assertEqual(websocket_client.close_code(), 1001)
        self.site_fixture.base.gate.startService()
        self.assertEqual(self.bob.count_queued(), 0)

    def test_nothing_follows_close_frame(self) -> None:
        """Queued frames of a slow reader are dropped when the socket closes; the store has them (RFC 6455 5.5.1)."""
        websocket_client = self.site_fixture.websocket_client()
        self.go_live(websocket_client)
        websocket_client.transport.peer_stalled = True
        for _ in range(5):
            self.forward(self.bob, "x" * 60_000)
        self.site_fixture.base.connections.stopService()
        websocket_client.transport.resume_peer()
        opcodes = [opcode for opcode, _ in websocket_client.frames()]
        self.assertEqual(opcodes[-1], CLOSE)
        self.assertNotIn(CLOSE, opcodes[:-1])
        self.assertEqual(self.bob.count_queued(), 5)


class BackPressureTests(SocketTestCase):
    def test_slow_reader_loses_nothing(self) -> None:
        """
        Pushes beyond the send queue stay queued; its frames arrive when the peer reads on, the rest by
        delivery-request; memory is bounded (reference 6.3).
        """
        websocket_client = self.site_fixture.websocket_client()
        self.go_live(websocket_client)
        websocket_client.transport.peer_stalled = True
        for number in range(150):
            self.forward(self.bob, f"{number} " + "x" * 20_000)
        self.assertLess(websocket_client.transport.unsent, 200_000)
        websocket_client.transport.resume_peer()
        self.site_fixture.run_due_calls()
        pushed = [self.bob.open(self.delivered(frame).payload).text for frame in websocket_client.texts()]
        self.assertLess(len(pushed), 60)
        self.assertEqual(pushed, [f"{number} " + "x" * 20_000 for number in range(len(pushed))])
        self.assertEqual(self.bob.count_queued(), 150)
        fetched = set()
        while one := self.bob.count_queued():
            batch = self.bob.fetch(100)
            fetched |= {self.bob.open(delivered.payload).text.split()[0] for delivered in batch}
            self.bob.answer(f"{MP}/messages-received", {"message_id_list": [each.id for each in batch]})
            self.assertLess(self.bob.count_queued(), one)
        self.assertEqual(fetched, {f"{number}" for number in range(150)})

    def test_pushes_continue_when_peer_reads(self) -> None:
        """Once the peer reads again, new messages are pushed."""
        websocket_client = self.site_fixture.websocket_client()
        self.go_live(websocket_client)
        websocket_client.transport.peer_stalled = True
        for _ in range(100):
            self.forward(self.bob, "x" * 30_000)
        websocket_client.transport.resume_peer()
        delivered_count = len(websocket_client.texts())
        self.assertLess(delivered_count, 100)
        self.forward(self.bob, "afterwards")
        (frame,) = websocket_client.texts()
        self.assertEqual(self.bob.open(self.delivered(frame).payload).text, "afterwards")

    def test_slow_socket_spares_others(self) -> None:
        """Another socket of the same wallet gets everything."""
        slow, quick = self.site_fixture.websocket_client(), self.site_fixture.websocket_client()
        self.go_live(slow)
        self.go_live(quick)
        slow.transport.peer_stalled = True
        for _ in range(100):
            self.forward(self.bob, "x" * 30_000)
        self.assertEqual(len(quick.texts()), 100)

    def test_flood_is_read_as_fast_as_served(self) -> None:
        """While requests wait for the store, the socket is not read; all are answered in order in the end."""
        websocket_client = self.site_fixture.websocket_client()
        names = [f"t{number}" for number in range(300)]
        flood = b"".join(encode_masked_frame(raw) for raw in self.pings(*names))
        with HeldStoreOperation(self.site_fixture, "claim_nonce") as held:
            websocket_client.transport.feed(flood)
            self.assertEqual(len(held.waiting), 1)
            self.assertGreater(websocket_client.transport.unread, len(flood) // 2)
            held.release_all()
            self.assertEqual(self.threads(websocket_client.texts()), names)
        self.assertEqual(websocket_client.transport.unread, 0)

    def test_read_ahead_is_bounded(self) -> None:
        """Frames that arrive one by one are read ahead up to a bound."""
        websocket_client = self.site_fixture.websocket_client()
        names = [f"t{number}" for number in range(30)]
        with HeldStoreOperation(self.site_fixture, "claim_nonce") as held:
            for raw in self.pings(*names):
                websocket_client.send(raw)
            read = len(held.waiting) + MAX_QUEUED_MESSAGES
            self.assertEqual(websocket_client.transport.producerState, "paused")
            held.release_all()
            self.assertEqual(self.threads(websocket_client.texts()), names)
        self.assertLess(read, 30)

    def test_unread_responses_pause_serving(self) -> None:
        """
        A peer that does not read is served until its transport is full; no response is lost, and memory is bounded.
        """
        for _ in range(10):
            self.forward(self.bob, "x" * 20_000)
        websocket_client = self.site_fixture.websocket_client()
        websocket_client.transport.peer_stalled = True
        requests = [self.bob.pack(f"{MP}/delivery-request", {"limit": 10}, id=f"t{n}") for n in range(80)]
        for raw in requests:
            websocket_client.send(raw)
        self.assertLess(websocket_client.transport.unsent, 2_000_000)
        self.assertGreater(websocket_client.transport.unread, 0)
        websocket_client.transport.resume_peer()
        responses = [self.bob.open(frame).message for frame in websocket_client.texts()]
        self.assertEqual([answer.thid for answer in responses], [f"t{n}" for n in range(80)])
        self.assertEqual({len(read_delivery(answer)) for answer in responses}, {10})

    def test_response_fits_behind_pushes(self) -> None:
        """Pushes may fill the send queue; a response is sent nevertheless."""
        websocket_client = self.site_fixture.websocket_client()
        self.go_live(websocket_client)
        with HeldStoreOperation(self.site_fixture, "claim_nonce") as held:
            websocket_client.send(self.pings("patience")[0])
            websocket_client.transport.peer_stalled = True
            for size in [40_000] * 3 + [1] * 80:
                self.forward(self.bob, "x" * size)
            held.release_all()
        websocket_client.transport.resume_peer()
        self.assertEqual(self.threads(websocket_client.texts()[-1:]), ["patience"])


class HeldStoreOperation:
    """Context manager in which one operation of the store waits until it is released."""

    def __init__(self, site_fixture: InMemorySite, operation: str) -> None:
        self.waiting: list[Deferred[None]] = []
        self._store: Any = site_fixture.store
        self._operation = operation
        self._site_fixture = site_fixture

    def __enter__(self) -> HeldStoreOperation:
        real = getattr(self._store, self._operation)

        def held(*args: Any, **options: Any) -> Deferred[Any]:
            waiting: Deferred[None] = Deferred()
            self.waiting.append(waiting)
            return waiting.addCallback(lambda _: real(*args, **options))

        setattr(self._store, self._operation, held)
        return self

    def release_all(self) -> None:
        """Release the waiting calls, and those that follow."""
        while self.waiting:
            self.waiting.pop(0).callback(None)
            self._site_fixture.run_due_calls()

    def __exit__(self, *exception: object) -> None:
        delattr(self._store, self._operation)
