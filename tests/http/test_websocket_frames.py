"""Frames as bytes (RFC 6455 section 5): the fast path reads what Autobahn would read."""

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
HIGH_LIMITS = {"ip_per_minute": 100_000, "did_per_minute": 100_000, "account_per_minute": 100_000}


class FrameParserTests(SynchronousTestCase):
    def test_parses_plain_frames(self) -> None:
        """Texts, binaries and pongs of every length that fits, at any offset."""
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

    def test_leaves_other_frames(self) -> None:
        """
        Incomplete, fragmented, oversized, unmasked and control frames, and lengths in more bytes than needed, are
        left to Autobahn.
        """
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

    def test_unmasking_implementations_agree(self) -> None:
        """Unmasking in Python and in Autobahn's native code gives the same."""
        payload = random.Random(1).randbytes(3000)
        data = encode_masked_frame(payload)
        frame = find_simple_frame(data, 0, MOST)
        assert frame is not None
        for limit in (0, 1 << 30):
            with mock.patch.object(websocket, "_MAX_INTEGER_XOR", limit):
                self.assertEqual(unmask_payload(data, frame), payload)

    def test_header_encoding(self) -> None:
        """A final unmasked text frame, with the length in the fewest bytes."""
        for length, wanted in ((0, "8100"), (125, "817d"), (126, "817e007e"), (65_535, "817effff")):
            self.assertEqual(build_text_header(length).hex(), wanted)
        self.assertEqual(build_text_header(65_536).hex(), "817f0000000000010000")


class DifferentialTests(SynchronousTestCase):
    """A peer receives the same with and without the fast path, whatever it sends and however it is cut."""

    def setUp(self) -> None:
        self.site_fixture = InMemorySite(self, limits={**HIGH_LIMITS, "max_message_bytes": 4000})
        self.served: list[tuple[bytes, bool]] = []
        served = self.served

        class EchoProtocol:
            """Accepts everything; of DIDComm, the third invalid envelope closes the socket."""

            def __init__(self, socket: Any) -> None:
                self.socket = socket

            def start(self) -> None:
                pass

            def stop(self) -> None:
                pass

            async def handle_message(self, frame: bytes, binary: bool) -> None:
                served.append((frame, binary))
                self.socket._send_queue.put(frame)

        def connect(socket: Any, request: Any) -> None:
            socket._protocol_name, socket._decentrl = "decentrl", EchoProtocol(socket)

        self.patch(MediatorSocket, "onConnect", connect)

    def test_generated_conversations(self) -> None:
        """Two hundred conversations of several frames each, valid and invalid."""
        for seed in range(200):
            chance = random.Random(seed)
            stream, cuts = (
                self.generate_stream(chance),
                [chance.choice((1, 7, 100, 3000, 100_000)) for _ in range(400)],
            )
            with mock.patch.object(websocket, "find_simple_frame", lambda *_: None):
                long = self.exchange(stream, cuts)
            self.assertEqual(self.exchange(stream, cuts), long, seed)

    def test_mutated_frames(self) -> None:
        """Valid frames with flipped bits, lost bytes and inserted bytes."""
        for seed in range(1000, 1300):
            chance = random.Random(seed)
            stream = bytearray(self.generate_stream(chance))
            for _ in range(chance.randrange(1, 4)):
                at = chance.randrange(len(stream))
                stream[at : at + chance.choice((0, 1, 1, 2))] = chance.randbytes(chance.choice((0, 1, 1, 2)))
                at = chance.randrange(min(len(stream), 16) or 1)
                stream[at : at + 1] = bytes([chance.randrange(256)])
            cuts = [chance.choice((1, 2, 7, 100, 100_000)) for _ in range(5000)]
            with mock.patch.object(websocket, "find_simple_frame", lambda *_: None):
                long = self.exchange(bytes(stream), cuts)
            self.assertEqual(self.exchange(bytes(stream), cuts), long, seed)

    def generate_stream(self, chance: random.Random) -> bytes:
        """Generate the bytes that a peer sends."""
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

    def exchange(
        self, stream: bytes, cuts: list[int]
    ) -> tuple[list[tuple[int, bytes]], list[tuple[bytes, bool]], bool]:
        """
        Return what a new peer receives for the stream, which messages are served, and whether it is disconnected.
        """
        self.served.clear()
        websocket_client: InMemoryWebSocketClient = self.site_fixture.websocket_client()
        for cut in cuts:
            piece, stream = stream[:cut], stream[cut:]
            if piece and not websocket_client.transport.lost:
                websocket_client.transport.feed(piece)
        received = websocket_client.frames()
        is_closed = websocket_client.transport.lost
        if not is_closed:
            websocket_client.transport.disconnect()
        return received, self.served.copy(), is_closed
