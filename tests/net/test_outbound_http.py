"""Requests to addresses named by strangers (reference 3.3, 4.7 and 8.5), byte by byte in memory."""

from __future__ import annotations

import gzip
from ipaddress import ip_network

from twisted.internet.error import ConnectionDone
from twisted.python.failure import Failure

from mediatord.net.outbound_http import (
    OutboundAddressError,
    OutboundError,
    OutboundHTTPClient,
    OutboundRequestError,
    OutboundResponse,
)
from tests.net.outbound_test_case import OK, OTHER_PUBLIC, PUBLIC, OutboundTestCase, redirect


class GuardTests(OutboundTestCase):
    """Allowed destinations."""

    def test_connects_to_checked_address(self) -> None:
        """A name is resolved once, and the connection goes to the checked address (8.5)."""
        self.get("https://a.example:8443/did.json")
        self.assertEqual(self.attempts(), [(PUBLIC, 8443)])
        self.assertEqual(self.names.asked, ["a.example"])

    def test_tries_next_address(self) -> None:
        """If an address does not answer, the next one of the same lookup is tried."""
        asked = self.get("https://b.example/")
        self.refuse()
        self.assertNoResult(asked)
        self.refuse()
        self.assertEqual(self.attempts(), [(OTHER_PUBLIC, 443), (PUBLIC, 443)])
        self.assertEqual(self.failureResultOf(asked, OutboundRequestError).value.reason, "ConnectionRefusedError")
        self.assertEqual(self.names.asked, ["b.example"])

    def test_refuses_names_of_private_addresses(self) -> None:
        """A name with a refused address among others is not connected to (8.5)."""
        for name in ("private.example", "mixed.example", "mapped.example"):
            self.failureResultOf(self.get(f"https://{name}/"), OutboundAddressError)
            self.failureResultOf(self.post(f"http://{name}/"), OutboundAddressError)
        self.assertEqual(self.attempts(), [])

    def test_allowed_networks(self) -> None:
        """An operator can allow private networks; others stay refused (8.5)."""
        self.outbound = OutboundHTTPClient(self.reactor, allow_private=[ip_network("10.0.0.0/8")])
        self.post("http://mixed.example/")
        self.assertEqual(self.attempts(), [(PUBLIC, 80)])
        self.failureResultOf(self.post("http://private.example/"), OutboundAddressError)

    def test_unknown_name(self) -> None:
        """A name without addresses is a temporary failure, not a refusal."""
        self.failureResultOf(self.get("https://nobody.example/"), OutboundRequestError)

    def test_invalid_urls(self) -> None:
        """
        Other schemes, user information, invalid hosts and ports, and malformed URLs are refused without a lookup.
        """
        for url in (
            "",
            "a.example",
            "//a.example/",
            "https:a.example",
            "https://",
            "https:///path",
            "ftp://a.example/",
            "file:///etc/passwd",
            "gopher://a.example/",
            "didcomm:transport/queue",
            "did:web:a.example",
            "https://user@a.example/",
            "https://user:password@a.example/",
            "https://a.example:0/",
            "https://a.example:65536/",
            "https://a.example:x/",
            "https://a example/",
            "https://a.example/\r\nHost: b.example",
            "https://a.example/\x00",
            "https://a%2eexample/",
            "https://a..example/",
            f"https://{'a' * 64}.example/",
            f"https://{'a.' * 130}example/",
            "https://[::1/",
            "https://[::1]x/",
            "https://[fe80::1%25eth0]/",
            "https://a.example/" + "a" * 8192,
        ):
            self.failureResultOf(self.get(url), OutboundAddressError)
            self.failureResultOf(self.post(url), OutboundAddressError)
        self.assertEqual(self.names.asked, [])

    def test_get_is_https_only(self) -> None:
        """did:web has no http (8.5)."""
        self.failureResultOf(self.get("http://a.example/"), OutboundAddressError)

    def test_scheme_in_capitals(self) -> None:
        """The scheme is case-insensitive."""
        self.post("HTTP://a.example")
        self.assertEqual(self.attempts(), [(PUBLIC, 80)])

    def test_internationalized_names(self) -> None:
        """A name beyond ASCII is looked up as DNS has it."""
        self.failureResultOf(self.get("https://bücher.example/ä"), OutboundRequestError)
        self.assertEqual(self.names.asked, ["xn--bcher-kva.example"])


class PostTests(OutboundTestCase):
    """The request that is sent, and its response."""

    def test_request_and_response(self) -> None:
        """The body is sent with its exact media type, without a cookie; status, type and body are returned (4.7)."""
        posted = self.post("http://a.example/inbox?x=1#fragment")
        wire = self.respond(OK.replace(b"200 OK", b"202 Accepted\r\nSet-Cookie: a=b"))
        head, _, body = wire.value().partition(b"\r\n\r\n")
        self.assertTrue(head.startswith(b"POST /inbox?x=1 HTTP/1.1\r\n"))
        self.assertIn(b"\r\nContent-Type: application/x-test", head)
        self.assertIn(b"\r\nHost: a.example", head)
        self.assertEqual(body, b"sealed")
        self.assertEqual(self.successResultOf(posted), OutboundResponse(202, b"application/json", b"{}"))
        self.post()
        self.assertNotIn(b"cookie", self.accept().value().lower())

    def test_long_response(self) -> None:
        """64 KiB of a response are kept; the rest is not awaited."""
        posted = self.post()
        wire = self.respond(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 65_537)
        self.assertEqual(self.successResultOf(posted).body, b"x" * 65_536)
        self.assertTrue(wire.disconnecting)

    def test_response_without_length(self) -> None:
        """A body without length ends with the connection."""
        posted = self.post()
        wire = self.respond(b"HTTP/1.0 200 OK\r\n\r\nfine")
        self.assertNoResult(posted)
        wire.protocol.connectionLost(Failure(ConnectionDone()))
        self.assertEqual(self.successResultOf(posted), OutboundResponse(200, b"", b"fine"))

    def test_follows_307(self) -> None:
        """A 307 is followed, with method, body and type unchanged (4.7)."""
        posted = self.post()
        self.respond(redirect(307, b"https://b.example:8443/other"))
        self.assertEqual(self.attempts(), [(PUBLIC, 80), (OTHER_PUBLIC, 8443)])
        self.assertNoResult(posted)

    def test_relative_redirect(self) -> None:
        """A 307 may be relative; the new location is resolved and checked."""
        posted = self.post()
        self.respond(redirect(307, b"/other"))
        wire = self.respond(OK)
        self.assertTrue(wire.value().startswith(b"POST /other HTTP/1.1\r\n"))
        self.assertTrue(wire.value().endswith(b"\r\n\r\nsealed"))
        self.assertEqual(self.successResultOf(posted).status, 200)
        self.assertEqual(self.names.asked, ["a.example", "a.example"])

    def test_three_redirects(self) -> None:
        """At most three are followed."""
        posted = self.post()
        for _ in range(3):
            self.respond(redirect(307, b"/again"))
            self.assertNoResult(posted)
        self.respond(redirect(307, b"/again"))
        self.failureResultOf(posted, OutboundRequestError)
        self.assertEqual(len(self.attempts()), 4)

    def test_other_redirects(self) -> None:
        """Other redirects are not followed (4.7), nor a 307 without Location."""
        for status in (301, 302, 303, 308):
            posted = self.post()
            self.respond(redirect(status, b"http://b.example/"))
            self.assertEqual(self.successResultOf(posted).status, status)
        posted = self.post()
        self.respond(b"HTTP/1.1 307 There\r\nContent-Length: 0\r\n\r\n")
        self.assertEqual(self.successResultOf(posted).status, 307)
        self.assertEqual(self.names.asked, ["a.example"] * 5)

    def test_redirect_to_private_address(self) -> None:
        """A redirect to a refused address, or another scheme, is refused (8.5)."""
        for location in (b"http://private.example/", b"https://mixed.example/", b"ftp://b.example/", b"http://x@b/"):
            posted = self.post()
            self.respond(redirect(307, location))
            self.failureResultOf(posted, OutboundAddressError)
        self.assertEqual(self.attempts(), [(PUBLIC, 80)] * 4)

    def test_redirect_to_invalid_url(self) -> None:
        """A Location that is no URL is a failure."""
        for location in (b"http://[", b"\xff", b"http://b.example:x/"):
            posted = self.post()
            self.respond(redirect(307, location))
            self.failureResultOf(posted, OutboundError)
        self.assertEqual(self.attempts(), [(PUBLIC, 80)] * 3)


class CompressionTests(OutboundTestCase):
    """Compressed responses."""

    def test_compressed_response_is_not_decompressed(self) -> None:
        """Compression is not requested, and a compressed response is not decompressed."""
        packed = gzip.compress(b"x" * 100_000)
        posted = self.post()
        head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
        wire = self.respond(head + packed)
        self.assertNotIn(b"accept-encoding", wire.value().lower())
        self.assertEqual(self.successResultOf(posted).body, packed)
