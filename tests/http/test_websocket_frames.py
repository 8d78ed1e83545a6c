"""Frames as bytes (RFC 6455 section 5): what is read on the fast path, and that it is what Autobahn would read."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

from twisted.trial.unittest import SynchronousTestCase

from mediatord.http import websocket
from mediatord.http.websocket import (
    FrameBounds,
    MediatorSocket,
    build_text_header,
    find_simple_frame,
    unmask_payload,
)
from tests.http.in_memory_site import BINARY, PONG, TEXT, InMemorySite, InMemoryWebSocketClient, encode_masked_frame
from tests.http.in_memory_site import CLOSE as CLOSE_FRAME
from tests.http.in_memory_site import PING as PING_FRAME

MOST = 60_000
PLENTY = {"ip_per_minute": 100_000, "did_per_minute": 100_000, "account_per_minute": 100_000}


class ReadingTests(SynchronousTestCase):
    def test_whole_and_plain(self) -> None:
        """Texts, binaries and pongs of every length that fits, wherever they begin."""
        for opcode, sizes in ((TEXT, (0, 1, 125, 126, 127, 767, 768, 5000, MOST)), (PONG, (0, 4, 125))):
            for size in sizes:
                payload = random.Random(size).randbytes(size)
                data = b"before" + encode_masked_frame(payload, opcode) + b"behind"
                frame = find_simple_frame(data, 6, MOST)
                assert frame is not None
                self.assertEqual((frame.kind & 15, unmask_payload(data, frame)), (opcode, payload))
                self.assertEqual(data[frame.end :], b"behind")
        self.assertEqual(
            find_simple_frame(encode_masked_frame(b"x", BINARY), 0, MOST),
            FrameBounds(websocket.BINARY_FRAME, 6, 7),
        )

    def test_everything_else(self) -> None:
        """Incomplete, a fragment, a control frame, too long, unmasked, a length in more bytes than it needs."""
        whole = encode_masked_frame(b"x" * 200)
        others = [whole[:cut] for cut in range(len(whole))]
        others += [
            encode_masked_frame(b"x", TEXT, final=False),
            encode_masked_frame(b"x", 0),
            encode_masked_frame(b"", CLOSE_FRAME),
            encode_masked_frame(b"", PING_FRAME),
        ]
        others += [
            encode_masked_frame(b"x" * (MOST + 1)),
            encode_masked_frame(b"x" * 70_000),
            b"\x81\x01x" + bytes(10),
        ]
        others += [
            b"\xc1\x81\0\0\0\0x",
            b"\x83\x81\0\0\0\0x",
            b"\x81\xfe\0\x01\0\0\0\0x",
            b"\x8a\xfe\0\x7e" + bytes(140),
        ]
        for data in others:
            self.assertIsNone(find_simple_frame(data, 0, MOST), data[:20])

    def test_unmasking(self) -> None:
        """Both ways, that of the interpreter and that of Autobahn's native code, are the same."""
        payload = random.Random(1).randbytes(3000)
        data = encode_masked_frame(payload)
        frame = find_simple_frame(data, 0, MOST)
        assert frame is not None
        for limit in (0, 1 << 30):
            with mock.patch.object(websocket, "_MAX_INTEGER_XOR", limit):
                self.assertEqual(unmask_payload(data, frame), payload)

    def test_headers(self) -> None:
        """A final text frame, unmasked, with the length in as few bytes as can be."""
        for length, wanted in ((0, "8100"), (125, "817d"), (126, "817e007e"), (65_535, "817effff")):
            self.assertEqual(build_text_header(length).hex(), wanted)
        self.assertEqual(build_text_header(65_536).hex(), "817f0000000000010000")


class DifferentialTests(SynchronousTestCase):
    """Whatever a peer sends and however the network cuts it, it gets what it would get without the fast path."""

    def setUp(self) -> None:
        self.site_fixture = InMemorySite(self, limits={**PLENTY, "max_message_bytes": 4000})
        self.served: list[tuple[bytes, bool]] = []
        served = self.served

        class Echo:
            """Takes everything; of DIDComm, the third that is no envelope would be the last."""

            def __init__(self, socket: Any) -> None:
                self.socket = socket

            def start(self) -> None:
                pass

            def stop(self) -> None:
                pass

            async def handle_message(self, frame: bytes, binary: bool) -> None:
                served.append((frame, binary))
                self.socket._send_queue.put(frame)

        def connected(socket: Any, request: Any) -> None:
            socket._protocol_name, socket._decentrl = "decentrl", Echo(socket)

        self.patch(MediatorSocket, "onConnect", connected)

    def test_alike(self) -> None:
        """Two hundred conversations of several frames each, good and bad."""
        for seed in range(200):
            chance = random.Random(seed)
            stream, cuts = self.stream(chance), [chance.choice((1, 7, 100, 3000, 100_000)) for _ in range(400)]
            with mock.patch.object(websocket, "find_simple_frame", lambda *_: None):
                long = self.heard(stream, cuts)
            self.assertEqual(self.heard(stream, cuts), long, seed)

    def test_any_bytes(self) -> None:
        """Good frames with bits turned, bytes lost and bytes that nobody sent."""
        for seed in range(1000, 1300):
            chance = random.Random(seed)
            stream = bytearray(self.stream(chance))
            for _ in range(chance.randrange(1, 4)):
                at = chance.randrange(len(stream))
                stream[at : at + chance.choice((0, 1, 1, 2))] = chance.randbytes(chance.choice((0, 1, 1, 2)))
                at = chance.randrange(min(len(stream), 16) or 1)
                stream[at : at + 1] = bytes([chance.randrange(256)])
            cuts = [chance.choice((1, 2, 7, 100, 100_000)) for _ in range(5000)]
            with mock.patch.object(websocket, "find_simple_frame", lambda *_: None):
                long = self.heard(bytes(stream), cuts)
            self.assertEqual(self.heard(bytes(stream), cuts), long, seed)

    def stream(self, chance: random.Random) -> bytes:
        """What a peer sends."""
        kinds = {
            "ping": lambda: encode_masked_frame(b"are you there", PING_FRAME),
            "pong": lambda: encode_masked_frame(b"ping", PONG),
            "text": lambda: encode_masked_frame(b'{"what":"ever"}', chance.choice((TEXT, BINARY))),
            "empty": lambda: encode_masked_frame(b""),
            "fragments": lambda: (
                encode_masked_frame(b"{", final=False) + encode_masked_frame(b"", PONG) + encode_masked_frame(b"}", 0)
            ),
            "unmasked": lambda: b"\x81\x01x",
            "reserved": lambda: b"\xc1\x80\0\0\0\0",
            "long": lambda: encode_masked_frame(b" " * 4001),
            "limit": lambda: encode_masked_frame(b" " * 4000),
            "goodbye": lambda: encode_masked_frame(b"\x03\xe8", CLOSE_FRAME),
            "no beginning": lambda: encode_masked_frame(b"x", 0),
            "medium": lambda: encode_masked_frame(chance.randbytes(chance.randrange(120, 900)), BINARY),
            "no UTF-8": lambda: encode_masked_frame(b"\xff\xc0\xaf", TEXT),
            "text within": lambda: encode_masked_frame(b"{", final=False) + encode_masked_frame(b"[]"),
            "control in parts": lambda: encode_masked_frame(b"x", chance.choice((PONG, PING_FRAME)), final=False),
            "long control": lambda: encode_masked_frame(b"x" * 126, chance.choice((PONG, PING_FRAME))),
            "long length": lambda: b"\x81\xff" + (5).to_bytes(8, "big") + bytes(9),
            "negative length": lambda: b"\x81\xff\xff" + bytes(20),
            "longer length": lambda: b"\x81\xfe\0\x05" + bytes(9),
            "bad goodbye": lambda: encode_masked_frame(
                chance.choice((b"\x03", b"\x03\xed", b"\x03\xe8\xff")), CLOSE_FRAME
            ),
            "empty goodbye": lambda: encode_masked_frame(b"", CLOSE_FRAME),
            "unknown": lambda: encode_masked_frame(b"", chance.choice((3, 7, 11, 15))),
        }
        weights = (3, 4, 3, 1, 1, 0.3, 0.3, 0.3, 0.5, 0.3, 0.3, 3, 0.5, *[0.2] * 9)
        names = chance.choices(list(kinds), weights, k=chance.randrange(1, 12))
        return b"".join(kinds[name]() for name in names)

    def heard(self, stream: bytes, cuts: list[int]) -> tuple[list[tuple[int, bytes]], list[tuple[bytes, bool]], bool]:
        """What a new peer hears that sends it, which of its messages are served, and whether it is cut off."""
        self.served.clear()
        websocket_client: InMemoryWebSocketClient = self.site_fixture.websocket_client()
        for cut in cuts:
            piece, stream = stream[:cut], stream[cut:]
            if piece and not websocket_client.line.lost:
                websocket_client.line.feed(piece)
        heard = websocket_client.frames()
        gone = websocket_client.line.lost
        if not gone:
            websocket_client.line.hang_up()
        return heard, self.served.copy(), gone
