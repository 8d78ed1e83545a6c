"""HTTP around Decentrl commands (DCTRL-0004 3 and 11, reference 10.3)."""

from __future__ import annotations

from typing import Any, ClassVar

from twisted.internet.defer import Deferred, fail, succeed
from twisted.trial.unittest import SynchronousTestCase

from mediatord.decentrl.context import build_error_reply
from mediatord.errors import InvalidSignature, QuotaExceeded
from mediatord.protocol.didcomm.message import PLAINTEXT_MEDIA_TYPE
from mediatord.ratelimit.admission import RequestReply
from tests.http.fake_protocols import FakeDecentrl
from tests.http.in_memory_site import ENCRYPTED, HTTPResponse, InMemorySite, encode_request, parse_responses
from tests.http.test_websocket import HIGH_LIMITS
from tests.in_memory_mediator import PEER

# A header that no library sends makes a request take the general path.
GENERAL_PATH_HEADERS = {"X-Odd": "1"}
PATH_HEADERS: tuple[dict[str, str], ...] = ({}, GENERAL_PATH_HEADERS)
DID = "did:decentrl:YQ:z6Mk:z6LS:ZGlk"


class DecentrlTestCase(SynchronousTestCase):
    """The web layer with a fake Decentrl protocol."""

    settings: ClassVar[dict[str, Any]] = {}

    def setUp(self) -> None:
        self.decentrl = FakeDecentrl()
        self.site_fixture = InMemorySite(
            self, fake_decentrl=self.decentrl, **{"limits": HIGH_LIMITS, **self.settings}
        )

    def command(self, body: bytes = b"{}", /, **headers: str) -> HTTPResponse:
        """Post a command and return the response."""
        return self.site_fixture.request("POST", "/", body, {"Content-Type": "application/json", **headers})

    def set_reply(self, reply: RequestReply) -> None:
        """Have every command answered with `reply`."""
        self.decentrl.answer = lambda body: succeed(reply)

    def delay_reply(self) -> Deferred[RequestReply]:
        """Have the next command answered when the returned Deferred fires."""
        pending_reply: Deferred[RequestReply] = Deferred()
        self.decentrl.answer = lambda body: pending_reply
        return pending_reply

    def get(self, path: str, method: str = "GET") -> HTTPResponse:
        """Send a GET and return the response."""
        return self.site_fixture.request(method, path)

    def assert_error_response(self, response: HTTPResponse, status: int, code: str) -> None:
        """The response is an error as in DCTRL-0004 11.1, readable by pages of any origin."""
        self.assertEqual((response.status, response.json), (status, {"type": "ERROR", "code": code}))
        self.assertEqual(response.headers["content-type"], "application/json")
        self.assertEqual(response.headers["access-control-allow-origin"], "*")

    def refused_requests(self) -> list[tuple[str, str]]:
        """Protocols and codes of refused requests in the event log."""
        return [(event["proto"], event["code"]) for event in self.site_fixture.events("req.done")]


class CommandTests(DecentrlTestCase):
    settings: ClassVar[dict[str, Any]] = {"trusted_proxies": ["198.51.100.0/24"]}

    def test_body_is_command_whatever_content_type(self) -> None:
        """A body at `/` is a command, whatever its Content-Type, and is passed on unchanged (reference 12)."""
        body = b' {"a":\xc3\xa9} \xff'
        for label in ("application/json", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "x", ""):
            for way in PATH_HEADERS:
                self.decentrl.received = []
                self.assertEqual(self.command(body, **{"Content-Type": label}, **way).status, 200)
                self.assertEqual(self.decentrl.received, [(body, PEER)], label)
        self.decentrl.received = []
        self.assertEqual(self.site_fixture.request("POST", "/", body).status, 200)
        self.assertEqual(len(self.decentrl.received), 1)

    def test_content_type_selects_didcomm(self) -> None:
        """A DIDComm media type selects DIDComm; a mere parameter does not (contract 3)."""
        for way in PATH_HEADERS:
            for label in (ENCRYPTED.decode(), "APPLICATION/DIDCOMM+ENCRYPTED", "didcomm-encrypted+json ;a=b"):
                response = self.command(b"hello", **{"Content-Type": label}, **way)
                self.assertEqual((response.status, response.json["body"]["code"]), (400, "e.p.msg"))
                self.assertEqual(self.decentrl.received, [])
            self.command(b"hello", **{"Content-Type": "application/json; for=didcomm"}, **way)
            self.assertEqual(len(self.decentrl.received), 1)
            self.decentrl.received = []

    def test_didcomm_path_takes_no_commands(self) -> None:
        """`/didcomm` never takes commands."""
        response = self.site_fixture.request("POST", "/didcomm", b"{}", {"Content-Type": "application/json"})
        self.assertEqual(response.json["body"]["code"], "e.p.msg")
        self.assertEqual(self.decentrl.received, [])

    def test_reply_status_and_body(self) -> None:
        """Status and body are the protocol's, as JSON; pages can read Retry-After."""
        for reply in (
            RequestReply(200, b'{"type":"SUCCESS"}'),
            build_error_reply(InvalidSignature()),
            build_error_reply(QuotaExceeded()),
        ):
            self.set_reply(reply)
            for way in PATH_HEADERS:
                response = self.command(**way)
                self.assertEqual((response.status, response.body), (reply.status, reply.body))
                self.assertEqual(response.headers["content-type"], "application/json")
                self.assertEqual(response.headers["access-control-allow-origin"], "*")
                again = None if reply.retry_after is None else str(reply.retry_after)
                self.assertEqual(response.headers.get("retry-after"), again)
                self.assertEqual("access-control-expose-headers" in response.headers, again is not None)

    def test_charges_client_behind_proxy(self) -> None:
        """The client behind a trusted proxy is charged; of an IPv6 address, its /64."""
        for way in PATH_HEADERS:
            for peer, forwarded, rate_limit_key in (
                ("192.0.2.9", None, "192.0.2.9"),
                ("192.0.2.9", "203.0.113.1", "192.0.2.9"),
                ("198.51.100.1", "203.0.113.1", "203.0.113.1"),
                ("198.51.100.1", "\xff", "198.51.100.1"),
                ("198.51.100.1", "\xff, 203.0.113.1", "203.0.113.1"),
                ("2001:db8::1:2", None, "2001:db8::"),
            ):
                headers = {**way, **({"X-Forwarded-For": forwarded} if forwarded else {})}
                self.site_fixture.request("POST", "/", b"{}", headers, peer)
                self.site_fixture.request("GET", f"/public/{DID}", None, headers, peer)
                self.assertEqual(self.decentrl.received.pop()[1], rate_limit_key)
                self.assertEqual(self.decentrl.queried.pop()[2], rate_limit_key)

    def test_chunked_body(self) -> None:
        """Chunks are joined into one command."""
        transport = self.site_fixture.connect()
        transport.feed(
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{\n\r\n1\r\n}\r\n0\r\n\r\n"
        )
        self.assertEqual([response.json for response in parse_responses(transport.take_output())], [{"n": 3}])
        self.assertEqual([raw for raw, _ in self.decentrl.received], [b"{\n}"])

    def test_command_times_out(self) -> None:
        """503 after ten seconds; the connection serves the next request, the late reply is discarded."""
        for way in PATH_HEADERS:
            late = self.delay_reply()
            transport = self.site_fixture.connect()
            transport.feed(encode_request("POST", "/", b"{}", way))
            self.site_fixture.clock.advance(10)
            (response,) = parse_responses(transport.take_output())
            self.assert_error_response(response, 503, "UNAVAILABLE")
            self.assertEqual(response.headers["retry-after"], "5")
            late.callback(RequestReply(200, b"{}"))
            self.assertEqual(transport.take_output(), b"")
            transport.feed(encode_request("GET", "/did"))
            self.assertEqual([item.status for item in parse_responses(transport.take_output())], [200])

    def test_internal_error(self) -> None:
        """500 without details."""
        self.decentrl.answer = lambda body: fail(RuntimeError("boom"))
        self.decentrl.page = lambda did: fail(RuntimeError("boom"))
        for response in (self.command(), self.command(**GENERAL_PATH_HEADERS), self.get(f"/public/{DID}")):
            self.assert_error_response(response, 500, "INTERNAL_ERROR")
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 3)

    def test_refuses_while_stopping(self) -> None:
        """503 with Retry-After, logged as Decentrl."""
        self.site_fixture = InMemorySite(self, limits=HIGH_LIMITS)
        self.site_fixture.base.gate.stopService()
        for response in (self.command(), self.command(**GENERAL_PATH_HEADERS), self.get(f"/public/{DID}")):
            self.assert_error_response(response, 503, "UNAVAILABLE")
            self.assertEqual(response.headers["retry-after"], "5")
        self.assertEqual(self.refused_requests(), [("decentrl", "UNAVAILABLE")] * 3)


class PublicTests(DecentrlTestCase):
    def query_of(self, path: str) -> tuple[str, Any]:
        """The DID and the arguments that the protocol receives."""
        self.assertEqual(self.get(path).status, 200)
        did, arguments, _ = self.decentrl.queried.pop()
        return did, dict(arguments)

    def test_did_in_path_literal_or_encoded(self) -> None:
        """A DID in the path may be literal, with colons and slashes, or encoded (reference 10.3)."""
        slashed = "did:decentrl:YQ/+=:z6Mk:z6LS:ZGlk"
        for path, did in (
            (DID, DID),
            (DID.replace(":", "%3A"), DID),
            (DID.replace("d", "%64"), DID),
            (slashed, slashed),
            (slashed.replace("/", "%2F").replace("+", "%2b"), slashed),
            ("did:a//b/", "did:a//b/"),
            ("did:a/../../metrics", "did:a/../../metrics"),
            ("did:%C3%A9", "did:é"),
            ("did:a%", "did:a%"),
            ("nonsense", "nonsense"),
        ):
            self.assertEqual(self.query_of(f"/public/{path}"), (did, {}))

    def test_invalid_utf8_or_empty_did(self) -> None:
        """Invalid UTF-8 and an empty path name no DID."""
        for path in ("/public/did:%ff", "/public/did:%C3", "/public/", "/public"):
            self.assertEqual(self.query_of(path), ("", {}))

    def test_query_arguments(self) -> None:
        """The query is passed on decoded, with repeated names and empty values."""
        did, arguments = self.query_of(f"/public/{DID}?tags=a%2Cb&tags=c+d&after=1&page=&x=%C3%A9?&flag")
        self.assertEqual(did, DID)
        self.assertEqual(
            arguments, {b"tags": [b"a,b", b"c d"], b"after": [b"1"], b"page": [b""], b"x": ["é?".encode()]}
        )

    def test_reply_status_and_body(self) -> None:
        """As for commands; HEAD has only the headers."""
        self.decentrl.page = lambda did: succeed(RequestReply(429, b'{"type":"ERROR"}', retry_after=7))
        for method, body in (("GET", b'{"type":"ERROR"}'), ("HEAD", b"")):
            response = self.get(f"/public/{DID}", method)
            self.assertEqual((response.status, response.body), (429, body))
            self.assertEqual(response.headers["content-type"], "application/json")
            self.assertEqual(response.headers["content-length"], "16")
            self.assertEqual(response.headers["retry-after"], "7")
            self.assertEqual(response.headers["access-control-allow-origin"], "*")

    def test_query_times_out(self) -> None:
        """503 if the store hangs."""
        self.decentrl.page = lambda did: Deferred()
        transport = self.site_fixture.connect()
        transport.feed(encode_request("GET", f"/public/{DID}"))
        self.site_fixture.clock.advance(10)
        (response,) = parse_responses(transport.take_output())
        self.assert_error_response(response, 503, "UNAVAILABLE")


class SizeTests(DecentrlTestCase):
    settings: ClassVar[dict[str, Any]] = {"limits": {**HIGH_LIMITS, "max_message_bytes": 5000}}

    def refused(self, path: str, label: str | None, *, method: str = "POST") -> HTTPResponse:
        """The response to a body announced as too long."""
        transport = self.site_fixture.connect()
        headers = {"Content-Length": "5001", **({"Content-Type": label} if label is not None else {})}
        transport.feed(encode_request(method, path, None, headers))
        (response,) = parse_responses(transport.take_output())
        self.assertEqual((response.status, response.headers["connection"]), (413, "close"))
        self.assertEqual(response.headers["access-control-allow-origin"], "*")
        return response

    def test_oversized_command(self) -> None:
        """PAYLOAD_TOO_LARGE at every address but one, whatever the Content-Type (reference 12)."""
        for path in ("/", "/?a=/didcomm", "/nowhere", "/didcommand", "/public/did:a"):
            for label in ("application/json", "text/plain; x=didcomm", None):
                self.assert_error_response(self.refused(path, label), 413, "PAYLOAD_TOO_LARGE")
        self.assert_error_response(self.refused("/health", None, method="GET"), 413, "PAYLOAD_TOO_LARGE")
        self.assertEqual(set(self.refused_requests()), {("decentrl", "PAYLOAD_TOO_LARGE")})

    def test_oversized_envelope(self) -> None:
        """
        At `/didcomm`, and with a DIDComm Content-Type, the error is a problem report (DIDComm reference section 11).
        """
        for path, label in (
            ("/didcomm", "application/json"),
            ("/didcomm", None),
            ("/didcomm/", ""),
            ("/didcomm?a=b", None),
            ("/", ENCRYPTED.decode()),
            ("/", "Application/DIDComm+Encrypted; a=b"),
        ):
            response = self.refused(path, label)
            self.assertEqual(response.headers["content-type"], PLAINTEXT_MEDIA_TYPE)
            self.assertEqual(response.json["body"]["code"], "e.p.me.res.storage.message_too_big")
        self.assertEqual(set(self.refused_requests()), {("didcomm", "e.p.me.res.storage.message_too_big")})

    def test_oversized_chunked_body(self) -> None:
        """The error has the same form when chunks exceed the limit."""
        transport = self.site_fixture.connect()
        transport.feed(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        transport.feed(b"1388\r\n%b\r\n" % (b" " * 5000))
        self.assertEqual(transport.take_output(), b"")
        transport.feed(b"1\r\n \r\n")
        (response,) = parse_responses(transport.take_output())
        self.assert_error_response(response, 413, "PAYLOAD_TOO_LARGE")
        self.assertEqual(self.decentrl.received, [])

    def test_accepts_body_of_exactly_the_limit(self) -> None:
        """A body of exactly `max_message_bytes` is accepted."""
        for way in PATH_HEADERS:
            self.assertEqual(self.command(b" " * 5000, **way).status, 200)


class DecentrlProtocolTests(SynchronousTestCase):
    """The same addresses with the real Decentrl protocol."""

    def setUp(self) -> None:
        self.site_fixture = InMemorySite(self, limits=HIGH_LIMITS)

    def test_invalid_command(self) -> None:
        """400 on either path."""
        for way in PATH_HEADERS:
            response = self.site_fixture.request("POST", "/", b"hello", {"Content-Type": "application/json", **way})
            self.assertEqual((response.status, response.json), (400, {"type": "ERROR", "code": "INVALID_COMMAND"}))

    def test_invalid_did(self) -> None:
        """400 for a path without a DID, or with invalid bytes (reference 10.3)."""
        for path in ("/public", "/public/", "/public/x", "/public/did:decentrl:%ff", "/public/%20did:a:b"):
            response = self.site_fixture.request("GET", path)
            self.assertEqual((response.status, response.json), (400, {"type": "ERROR", "code": "INVALID_COMMAND"}))

    def test_unknown_did_has_no_events(self) -> None:
        """200 without events: the response does not reveal who is registered (reference 10.3)."""
        response = self.site_fixture.request("GET", "/public/did:example:a")
        self.assertEqual((response.status, response.json["publisher_did"]), (200, "did:example:a"))
        self.assertEqual(response.json["events"], [])
