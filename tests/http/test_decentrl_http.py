"""What a Decentrl client meets over HTTP, around the commands themselves (DCTRL-0004 3 and 11, reference 10.3)."""

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
from tests.http.test_websocket import PLENTY
from tests.in_memory_mediator import PEER

# A header that no library sends takes a request past the fast path, to twisted.web.
DETOUR = {"X-Odd": "1"}
BOTH_WAYS: tuple[dict[str, str], ...] = ({}, DETOUR)
DID = "did:decentrl:YQ:z6Mk:z6LS:ZGlk"


class DecentrlTestCase(SynchronousTestCase):
    """The web layer, and the Decentrl protocol in the test's hand."""

    settings: ClassVar[dict[str, Any]] = {}

    def setUp(self) -> None:
        self.decentrl = FakeDecentrl()
        self.site_fixture = InMemorySite(self, fake_decentrl=self.decentrl, **{"limits": PLENTY, **self.settings})

    def command(self, body: bytes = b"{}", /, **headers: str) -> HTTPResponse:
        """The response to a command."""
        return self.site_fixture.request("POST", "/", body, {"Content-Type": "application/json", **headers})

    def replying(self, reply: RequestReply) -> None:
        """Have every command answered like this."""
        self.decentrl.answer = lambda body: succeed(reply)

    def hanging(self) -> Deferred[RequestReply]:
        """Have the next command answered when this fires."""
        late: Deferred[RequestReply] = Deferred()
        self.decentrl.answer = lambda body: late
        return late

    def get(self, path: str, method: str = "GET") -> HTTPResponse:
        """The response to a GET."""
        return self.site_fixture.request(method, path)

    def is_error(self, response: HTTPResponse, status: int, code: str) -> None:
        """It is a refusal as DCTRL-0004 11.1 has it, which a page of any origin may read."""
        self.assertEqual((response.status, response.json), (status, {"type": "ERROR", "code": code}))
        self.assertEqual(response.headers["content-type"], "application/json")
        self.assertEqual(response.headers["access-control-allow-origin"], "*")

    def turned_away(self) -> list[tuple[str, str]]:
        """Protocols and codes of the requests that the event log tells of."""
        return [(event["proto"], event["code"]) for event in self.site_fixture.events("req.done")]


class CommandTests(DecentrlTestCase):
    settings: ClassVar[dict[str, Any]] = {"trusted_proxies": ["198.51.100.0/24"]}

    def test_any_label(self) -> None:
        """A body at `/` is a command, whatever it is labelled with, and is handed on byte for byte (reference 12)."""
        body = b' {"a":\xc3\xa9} \xff'
        for label in ("application/json", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "x", ""):
            for way in BOTH_WAYS:
                self.decentrl.received = []
                self.assertEqual(self.command(body, **{"Content-Type": label}, **way).status, 200)
                self.assertEqual(self.decentrl.received, [(body, PEER)], label)
        self.decentrl.received = []
        self.assertEqual(self.site_fixture.request("POST", "/", body).status, 200)
        self.assertEqual(len(self.decentrl.received), 1)

    def test_envelopes(self) -> None:
        """A media type that names DIDComm selects the other protocol; a mere parameter does not (contract 3)."""
        for way in BOTH_WAYS:
            for label in (ENCRYPTED.decode(), "APPLICATION/DIDCOMM+ENCRYPTED", "didcomm-encrypted+json ;a=b"):
                response = self.command(b"hello", **{"Content-Type": label}, **way)
                self.assertEqual((response.status, response.json["body"]["code"]), (400, "e.p.msg"))
                self.assertEqual(self.decentrl.received, [])
            self.command(b"hello", **{"Content-Type": "application/json; for=didcomm"}, **way)
            self.assertEqual(len(self.decentrl.received), 1)
            self.decentrl.received = []

    def test_not_at_the_other_address(self) -> None:
        """`/didcomm` never takes commands."""
        response = self.site_fixture.request("POST", "/didcomm", b"{}", {"Content-Type": "application/json"})
        self.assertEqual(response.json["body"]["code"], "e.p.msg")
        self.assertEqual(self.decentrl.received, [])

    def test_replies(self) -> None:
        """Status and body are the protocol's, as JSON; pages can read when a client may come again."""
        for reply in (
            RequestReply(200, b'{"type":"SUCCESS"}'),
            build_error_reply(InvalidSignature()),
            build_error_reply(QuotaExceeded()),
        ):
            self.replying(reply)
            for way in BOTH_WAYS:
                response = self.command(**way)
                self.assertEqual((response.status, response.body), (reply.status, reply.body))
                self.assertEqual(response.headers["content-type"], "application/json")
                self.assertEqual(response.headers["access-control-allow-origin"], "*")
                again = None if reply.retry_after is None else str(reply.retry_after)
                self.assertEqual(response.headers.get("retry-after"), again)
                self.assertEqual("access-control-expose-headers" in response.headers, again is not None)

    def test_who_pays(self) -> None:
        """The client behind a trusted proxy; of an IPv6 address the host it belongs to."""
        for way in BOTH_WAYS:
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

    def test_a_chunked_body(self) -> None:
        """Chunks make one command."""
        line = self.site_fixture.line()
        line.feed(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{\n\r\n1\r\n}\r\n0\r\n\r\n")
        self.assertEqual([one.json for one in parse_responses(line.taken())], [{"n": 3}])
        self.assertEqual([raw for raw, _ in self.decentrl.received], [b"{\n}"])

    def test_the_deadline(self) -> None:
        """After ten seconds the answer is 503; the connection serves the next, and the late reply goes nowhere."""
        for way in BOTH_WAYS:
            late = self.hanging()
            line = self.site_fixture.line()
            line.feed(encode_request("POST", "/", b"{}", way))
            self.site_fixture.clock.advance(10)
            (response,) = parse_responses(line.taken())
            self.is_error(response, 503, "UNAVAILABLE")
            self.assertEqual(response.headers["retry-after"], "5")
            late.callback(RequestReply(200, b"{}"))
            self.assertEqual(line.taken(), b"")
            line.feed(encode_request("GET", "/did"))
            self.assertEqual([one.status for one in parse_responses(line.taken())], [200])

    def test_a_fault_of_ours(self) -> None:
        """500 with nothing of what went wrong."""
        self.decentrl.answer = lambda body: fail(RuntimeError("boom"))
        self.decentrl.page = lambda did: fail(RuntimeError("boom"))
        for response in (self.command(), self.command(**DETOUR), self.get(f"/public/{DID}")):
            self.is_error(response, 500, "INTERNAL_ERROR")
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 3)

    def test_while_the_daemon_stops(self) -> None:
        """503 with Retry-After, told as Decentrl's."""
        self.site_fixture = InMemorySite(self, limits=PLENTY)
        self.site_fixture.base.gate.stopService()
        for response in (self.command(), self.command(**DETOUR), self.get(f"/public/{DID}")):
            self.is_error(response, 503, "UNAVAILABLE")
            self.assertEqual(response.headers["retry-after"], "5")
        self.assertEqual(self.turned_away(), [("decentrl", "UNAVAILABLE")] * 3)


class PublicTests(DecentrlTestCase):
    def asked(self, path: str) -> tuple[str, Any]:
        """The DID and the arguments that the half is asked for."""
        self.assertEqual(self.get(path).status, 200)
        did, arguments, _ = self.decentrl.queried.pop()
        return did, dict(arguments)

    def test_spellings(self) -> None:
        """A DID stands in the path as it is, colons, slashes and all, or encoded (reference 10.3)."""
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
            self.assertEqual(self.asked(f"/public/{path}"), (did, {}))

    def test_what_is_no_text(self) -> None:
        """Bytes that are no UTF-8, or nothing at all, name nobody."""
        for path in ("/public/did:%ff", "/public/did:%C3", "/public/", "/public"):
            self.assertEqual(self.asked(path), ("", {}))

    def test_arguments(self) -> None:
        """The query is handed on decoded, repeated names and empty values included."""
        did, arguments = self.asked(f"/public/{DID}?tags=a%2Cb&tags=c+d&after=1&page=&x=%C3%A9?&flag")
        self.assertEqual(did, DID)
        self.assertEqual(
            arguments, {b"tags": [b"a,b", b"c d"], b"after": [b"1"], b"page": [b""], b"x": ["é?".encode()]}
        )

    def test_replies(self) -> None:
        """As for commands; HEAD has the headers alone."""
        self.decentrl.page = lambda did: succeed(RequestReply(429, b'{"type":"ERROR"}', retry_after=7))
        for method, body in (("GET", b'{"type":"ERROR"}'), ("HEAD", b"")):
            response = self.get(f"/public/{DID}", method)
            self.assertEqual((response.status, response.body), (429, body))
            self.assertEqual(response.headers["content-type"], "application/json")
            self.assertEqual(response.headers["content-length"], "16")
            self.assertEqual(response.headers["retry-after"], "7")
            self.assertEqual(response.headers["access-control-allow-origin"], "*")

    def test_the_deadline(self) -> None:
        """A store that hangs is 503."""
        self.decentrl.page = lambda did: Deferred()
        line = self.site_fixture.line()
        line.feed(encode_request("GET", f"/public/{DID}"))
        self.site_fixture.clock.advance(10)
        (response,) = parse_responses(line.taken())
        self.is_error(response, 503, "UNAVAILABLE")


class SizeTests(DecentrlTestCase):
    settings: ClassVar[dict[str, Any]] = {"limits": {**PLENTY, "max_message_bytes": 5000}}

    def refused(self, path: str, label: str | None, *, method: str = "POST") -> HTTPResponse:
        """The answer to a body that is announced too long."""
        line = self.site_fixture.line()
        headers = {"Content-Length": "5001", **({"Content-Type": label} if label is not None else {})}
        line.feed(encode_request(method, path, None, headers))
        (response,) = parse_responses(line.taken())
        self.assertEqual((response.status, response.headers["connection"]), (413, "close"))
        self.assertEqual(response.headers["access-control-allow-origin"], "*")
        return response

    def test_commands(self) -> None:
        """PAYLOAD_TOO_LARGE, at every address but one and whatever the label (reference 12)."""
        for path in ("/", "/?a=/didcomm", "/nowhere", "/didcommand", "/public/did:a"):
            for label in ("application/json", "text/plain; x=didcomm", None):
                self.is_error(self.refused(path, label), 413, "PAYLOAD_TOO_LARGE")
        self.is_error(self.refused("/health", None, method="GET"), 413, "PAYLOAD_TOO_LARGE")
        self.assertEqual(set(self.turned_away()), {("decentrl", "PAYLOAD_TOO_LARGE")})

    def test_envelopes(self) -> None:
        """At `/didcomm`, and with a label of DIDComm's, it is DIDComm's report (DIDComm reference section 11)."""
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
        self.assertEqual(set(self.turned_away()), {("didcomm", "e.p.me.res.storage.message_too_big")})

    def test_chunks(self) -> None:
        """The form is the same when it turns out only later."""
        line = self.site_fixture.line()
        line.feed(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        line.feed(b"1388\r\n%b\r\n" % (b" " * 5000))
        self.assertEqual(line.taken(), b"")
        line.feed(b"1\r\n \r\n")
        (response,) = parse_responses(line.taken())
        self.is_error(response, 413, "PAYLOAD_TOO_LARGE")
        self.assertEqual(self.decentrl.received, [])

    def test_exactly_the_limit(self) -> None:
        """`max_message_bytes` themselves are fine."""
        for way in BOTH_WAYS:
            self.assertEqual(self.command(b" " * 5000, **way).status, 200)


class RealTests(SynchronousTestCase):
    """The same addresses with the real half behind them."""

    def setUp(self) -> None:
        self.site_fixture = InMemorySite(self, limits=PLENTY)

    def test_what_is_no_command(self) -> None:
        """400, whichever way it came."""
        for way in BOTH_WAYS:
            response = self.site_fixture.request("POST", "/", b"hello", {"Content-Type": "application/json", **way})
            self.assertEqual((response.status, response.json), (400, {"type": "ERROR", "code": "INVALID_COMMAND"}))

    def test_what_is_no_did(self) -> None:
        """400 for a path without one, or with bytes that are none (reference 10.3)."""
        for path in ("/public", "/public/", "/public/x", "/public/did:decentrl:%ff", "/public/%20did:a:b"):
            response = self.site_fixture.request("GET", path)
            self.assertEqual((response.status, response.json), (400, {"type": "ERROR", "code": "INVALID_COMMAND"}))

    def test_nobody_we_know(self) -> None:
        """200 without events: who is registered is nobody's business (reference 10.3)."""
        response = self.site_fixture.request("GET", "/public/did:example:a")
        self.assertEqual((response.status, response.json["publisher_did"]), (200, "did:example:a"))
        self.assertEqual(response.json["events"], [])
