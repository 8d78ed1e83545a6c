"""WebSocket frames as bytes, to either protocol."""

from __future__ import annotations

from collections.abc import Iterable

from tests.fuzz.fuzz_mediator import FuzzMediator
from tests.fuzz.targets import replace_words
from tests.http.in_memory_site import CLOSE, PONG, TEXT, InMemorySite, InMemoryWebSocketClient

# Close codes of RFC 6455 section 7.4 and of DCTRL-0004.
CODES = {1000, 1001, 1002, 1003, 1007, 1008, 1009, 1011, 1013, *range(3000, 5000)}
_STILL = b"\0\0\0\0"
# Each piece takes a reactor iteration.
_MOST_PIECES = 300


class WebSocketTarget:
    """
    A socket that gets an input whole, and another one in pieces.

    The mode is the size of the pieces; its highest bit selects `/ws` or `/didcomm`.
    """

    words = (
        *(
            b"\x81\x80" + _STILL,
            b"\x01\x80" + _STILL,
            b"\x80\x80" + _STILL,
            b"\x88\x82" + _STILL,
            b"\x89\x80" + _STILL,
        ),
        *(b"\x8a\x80" + _STILL, b"\x81\xfe", b"\x81\xff", b"\xc1\x80", b"\x81\x01", b"\x82\xfe\x00\x05", b"\x88\x80"),
        *(b'{"protected"', b'{"type":"AUTHENTICATE"', b"\x00\x80" + _STILL, b"\x0b\x80" + _STILL),
    )
    longest = 2_048
    most_calls = (40_000, 500)
    most_memory = (4_000_000, 300)

    def __init__(self) -> None:
        self._mediator = FuzzMediator(lambda site_fixture: site_fixture.run_due_calls(), listen=["tcp:0"])

    def close(self) -> None:
        """Stop the mediator."""
        self._mediator.close()

    def run(self, data: bytes) -> None:
        """Send the input, and compare responses and close codes."""
        site_fixture = self._mediator.enter()
        way = data[0] if data else 0
        path, step = ("/ws" if way & 0x80 else "/didcomm"), way & 0x7F
        rest = replace_words(data[1:], {b"@MEDIATOR@": site_fixture.did})
        whole = self._exchange(site_fixture, path, [rest])
        pieces = [rest[start : start + step] for start in range(0, len(rest), step)] if step else [rest]
        if len(pieces) <= _MOST_PIECES:
            other = self._exchange(site_fixture, path, pieces)
            assert _sort(other) == _sort(whole), f"{whole} at once, {other} in pieces of {step}"

    def _exchange(self, site_fixture: InMemorySite, path: str, pieces: list[bytes]) -> tuple[list[int], int | None]:
        """The opcodes of the responses, and the close code; the socket must leave nothing behind."""
        websocket_client: InMemoryWebSocketClient = site_fixture.websocket_client(path)
        for piece in pieces:
            websocket_client.transport.feed(piece)
        frames = websocket_client.frames()
        assert {opcode for opcode, _ in frames} <= {TEXT, CLOSE, PONG}, frames
        code = None
        for opcode, payload in frames:
            assert code is None, "something after a close frame"
            if opcode == CLOSE:
                code = int.from_bytes(payload[:2], "big") if payload else 1000
                assert code in CODES, code
        websocket_client.transport.disconnect()
        site_fixture.run_due_calls()
        self._mediator.assert_no_failures()
        assert not site_fixture.site._per_host, "a connection that is still counted"
        return [opcode for opcode, _ in frames], code

    def seeds(self) -> Iterable[bytes]:
        """Frames of every kind, with a zero mask so that their content is readable."""
        texts = (b"{}", b'{"ciphertext":"AAAA","protected":"e30"}', b'{"type":"AUTHENTICATE","did":"did:decentrl:a"}')
        for way in b"\x05\x85":
            for text in (*texts, b"x" * 200):
                yield bytes([way]) + frame(0x81, text)
            yield bytes([way]) + frame(0x82, b"\xff\0") + frame(0x89, b"ping") + frame(0x8A, b"")
            yield bytes([way]) + frame(0x01, b"{") + frame(0x00, b"") + frame(0x89, b"") + frame(0x80, b"}")
            yield bytes([way]) + frame(0x88, b"\x03\xe8bye") + frame(0x81, b"{}")
            yield bytes([way]) + frame(0x88, b"\x03") + frame(0x88, b"")
            yield bytes([way]) + frame(0x81, b"r") * 12
            for first in (0xC1, 0x83, 0x09, 0x00, 0x8B, 0x91):
                yield bytes([way]) + frame(first, b"a")
            yield bytes([way]) + b"\x81\x02{}"
            yield bytes([way]) + b"\x81\xff\x7f\xff\xff\xff\xff\xff\xff\xff" + _STILL
            yield bytes([way]) + b"\x81\xfe\x00\x05" + _STILL + b"short"


def frame(first: int, payload: bytes) -> bytes:
    """A frame with a zero mask."""
    length = len(payload)
    size = bytes([0x80 | length]) if length < 126 else b"\xfe" + length.to_bytes(2, "big")
    return bytes([first]) + size + _STILL + payload


def make() -> WebSocketTarget:
    """Create the target."""
    return WebSocketTarget()


def _sort(responses: tuple[list[int], int | None]) -> tuple[list[int], int | None]:
    """
    Responses without what depends on the time: a message is answered later than a control frame behind it, and no
    longer when the socket is closed.
    """
    opcodes, code = responses
    return sorted(opcode for opcode in opcodes if code is None or opcode != TEXT), code
