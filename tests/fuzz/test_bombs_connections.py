"""Endless HTTP requests and WebSocket messages."""

from __future__ import annotations

from tests.fuzz.bombs import BombTestCase
from tests.fuzz.fuzz_mediator import measure_cost
from tests.http.in_memory_site import PING, PONG, TEXT, encode_masked_frame

HEAD = b"POST /didcomm HTTP/1.1\r\nHost: a\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
MANY = 10_000
MEGABYTE = 1_000_000


class RequestTests(BombTestCase):
    """Requests with too much of something."""

    def test_headers(self) -> None:
        """Of ten thousand headers the first 500 are read, of a long one the first 16 KiB."""
        for headers in (
            b"".join(b"X-%d: a\r\n" % number for number in range(MANY)),
            b"Accept: a\r\n" * MANY,
            b"X: a\r\n" + b" b\r\n" * MANY,
            b": \r\n" * MANY,
        ):
            found, line = self.statuses_of(HEAD + headers + b"\r\n", most_calls=60_000, most=1_000_000)
            self.assertEqual((found, line.lost), ([400], True))
        for endless in (HEAD + b"X: " + b"a" * MEGABYTE, b"GET /" + b"a" * MEGABYTE, b"a" * MEGABYTE):
            found, line = self.statuses_of(endless, most_calls=1_000, most=2 * MEGABYTE)
            self.assertEqual((found, line.lost), ([], True))

    def test_blank_lines(self) -> None:
        """One blank line before a request is skipped, no more."""
        found, line = self.statuses_of(b"\r\n" * 100_000, most_calls=1_000, most=MEGABYTE)
        self.assertEqual((found, line.lost), ([400], True))

    def test_lengths(self) -> None:
        """A length that is no number, or has more digits than Python parses, is a client error."""
        for length in (b"9" * 5_000, b"9" * 12_000, b"-1", b"1e3", b"0x10", b"+1", b"1_0", b"\xb2", b"1, 1", b""):
            found, line = self.statuses_of(
                HEAD + b"Content-Length: " + length + b"\r\n\r\n", most_calls=1_000, most=200_000
            )
            self.assertEqual((found, line.lost), ([400], True), length[:20])
        for length in (b"9" * 4_000, b"1048577"):
            found, _ = self.statuses_of(
                HEAD + b"Content-Length: " + length + b"\r\n\r\n", most_calls=3_000, most=200_000
            )
            self.assertEqual(found, [413])

    def test_chunk_extensions(self) -> None:
        """They are skipped, up to a kilobyte each."""
        extended = (b"1;" + b"a" * 1_000 + b"\r\n{\r\n") * 1_000
        found, _ = self.statuses_of(CHUNKED + extended + b"0\r\n\r\n", most_calls=40_000, most=2 * MEGABYTE)
        self.assertEqual(found, [400])
        for start in (b"1;" + b"a" * MANY, b"1;" + b"a" * MEGABYTE, b"f" * 5_000, b"0" * 5_000, b"1" + b" " * 5_000):
            found, line = self.statuses_of(CHUNKED + start + b"\r\n", most_calls=2_000, most=2 * MEGABYTE)
            self.assertEqual((found, line.lost), ([400], True), start[:10])

    def test_small_chunks(self) -> None:
        """Ten thousand chunks of one byte cost a few calls each, and only the body's memory."""
        found, _ = self.statuses_of(CHUNKED + b"1\r\n{\r\n" * MANY + b"0\r\n\r\n", most_calls=300_000, most=MEGABYTE)
        self.assertEqual(found, [400])

    def test_trailers(self) -> None:
        """The same for trailers."""
        ending = b"1\r\n{\r\n0\r\n" + b"A: b\r\n" * MANY + b"\r\n"
        found, _ = self.statuses_of(CHUNKED + ending, most_calls=80_000, most=2 * MEGABYTE)
        self.assertLessEqual(set(found), {400})

    def test_queries(self) -> None:
        """Thousands of parameters, as many as a URL may have."""
        asked = b"GET /public/did:x?" + b"a=b&" * 4_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n"
        found, _ = self.statuses_of(asked, most_calls=90_000, most=2 * MEGABYTE)
        self.assertEqual(found, [200])


class FrameTests(BombTestCase):
    """WebSocket frames."""

    def test_fragments(self) -> None:
        """A message of more than 1024 fragments is refused, empty ones included."""
        for size in (0, 1, 1_000):
            websocket_client = self.site_fixture.websocket_client()
            sent = (
                encode_masked_frame(b"{", TEXT, final=False)
                + encode_masked_frame(b"x" * size, 0, final=False) * 2_000
            )
            # A fragment takes about 95 calls, as each piece waits for its quantum.
            self.assert_cost(measure_cost(websocket_client.transport.feed, sent), 220_000, 2 * len(sent) + MEGABYTE)
            self.assertEqual(websocket_client.close_code(), 1009)
            websocket_client.transport.disconnect()

    def test_lengths(self) -> None:
        """A frame that announces more than a message may have is refused before it arrives."""
        for length in (2**63 - 1, 2**32, 1_048_577):
            websocket_client = self.site_fixture.websocket_client()
            start = b"\x81\xff" + length.to_bytes(8, "big") + b"\0\0\0\0"
            self.assert_cost(measure_cost(websocket_client.transport.feed, start), 1_000, 100_000)
            self.assertEqual(websocket_client.close_code(), 1009)
            websocket_client.transport.disconnect()

    def test_pings_of_stalled_peer(self) -> None:
        """Only the last one is answered, once the peer reads (RFC 6455 section 5.5.3)."""
        websocket_client = self.site_fixture.websocket_client()
        websocket_client.transport.peer_stalled = True
        flood = encode_masked_frame(b"x" * 125, PING) * MANY
        self.assert_cost(
            measure_cost(websocket_client.transport.feed, flood + encode_masked_frame(b"last", PING)),
            600_000,
            5 * MEGABYTE,
        )
        self.assertLess(websocket_client.transport.unsent, 100_000)
        self.assertLess(len(websocket_client.frames()), MANY // 10)
        websocket_client.transport.resume_peer()
        self.assertEqual(websocket_client.frames(), [(PONG, b"last")])
        websocket_client.send(b"again", PING)
        self.assertEqual(websocket_client.frames(), [(PONG, b"again")])

    def test_pings_of_reading_peer(self) -> None:
        """Each is answered."""
        websocket_client = self.site_fixture.websocket_client()
        for number in range(100):
            websocket_client.send(b"%d" % number, PING)
        self.assertEqual(websocket_client.frames(), [(PONG, b"%d" % number) for number in range(100)])

    def test_messages_of_stalled_peer(self) -> None:
        """A socket that does not read its responses is not read from."""
        websocket_client = self.site_fixture.websocket_client()
        websocket_client.transport.peer_stalled = True
        for _ in range(20):
            websocket_client.transport.feed(
                encode_masked_frame(self.authcrypted(self.message(return_route="all"))) * 10
            )
        self.assertLess(websocket_client.transport.unsent, 100_000)
        self.assertGreater(websocket_client.transport.unread, 100_000)

    def test_compressed_frame(self) -> None:
        """No extension is negotiated, so a compressed frame is a protocol error."""
        offered = {"Sec-WebSocket-Extensions": "permessage-deflate; client_max_window_bits"}
        _, response, _ = self.site_fixture.upgrade(**offered)
        self.assertNotIn("sec-websocket-extensions", response.headers)
        websocket_client = self.site_fixture.websocket_client(**offered)
        websocket_client.transport.feed(b"\xc1\x84\0\0\0\0\xf2H\xcd\xc9")
        self.assertEqual(websocket_client.close_code(), 1002)
