"""Every address of the public listener over HTTP, byte by byte, on connections in memory (contract section 3)."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode
from typing import Any, ClassVar

from prometheus_client.parser import text_string_to_metric_families
from twisted.internet import reactor as _reactor  # noqa: TID251  what a kernel does with unread bytes is the subject
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, connectProtocol
from twisted.internet.interfaces import IAddress, IHalfCloseableProtocol
from twisted.internet.protocol import Factory, Protocol
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase
from zope.interface import implementer

from mediatord.errors import StoreUnavailable
from mediatord.http.site import MediatorSite
from mediatord.store.interfaces.messages import Payload
from tests.http.in_memory_site import ENCRYPTED, HTTPResponse, InMemorySite, encode_request, parse_responses
from tests.http.test_websocket import PLENTY, HeldStoreOperation
from tests.in_memory_mediator import MP, PING, InMemoryWallet, pack_forward

LOCAL = "127.0.0.1"
MESSAGE_PATHS = ("/didcomm", "/didcomm/", "/")
PAGES = (
    *("/", "/.well-known/did.json", "/did", "/invitation", "/invitationOOB", "/openapi.json", "/health", "/metrics"),
)


class HTTPTestCase(SynchronousTestCase):
    """A mediator, and Bob who has an account there."""

    settings: ClassVar[dict[str, Any]] = {}

    def setUp(self) -> None:
        self.site_fixture = InMemorySite(self, **{"limits": PLENTY, **self.settings})
        self.bob = InMemoryWallet(self.site_fixture).enrol()

    def get(self, path: str, peer: str = LOCAL, **headers: str) -> HTTPResponse:
        """The response to a GET."""
        return self.site_fixture.request("GET", path, None, headers, peer)

    def forwarded(self, text: str = "hello") -> bytes:
        """A forward to Bob."""
        return pack_forward(self.site_fixture, self.bob.did, self.bob.letter(text))


class MessageTests(HTTPTestCase):
    def test_a_forward_is_taken_at_every_address(self) -> None:
        """202, no body and no Content-Type, at /didcomm, /didcomm/ and / (reference 3.1, D4)."""
        for path in MESSAGE_PATHS:
            response = self.site_fixture.post(self.forwarded(), path)
            self.assertEqual((response.status, response.body), (202, b""))
            self.assertNotIn("content-type", response.headers)
            self.assertEqual(response.headers["content-length"], "0")
        self.assertEqual(self.bob.waiting(), 3)

    def test_a_request_is_answered(self) -> None:
        """200, packed, and exactly the media type that clients compare with (reference 3.1, D5)."""
        for path in MESSAGE_PATHS:
            response = self.site_fixture.post(self.bob.pack(PING, return_route="all"), path)
            self.assertEqual(response.status, 200)
            self.assertEqual(response.headers["content-type"], "application/didcomm-encrypted+json")
            self.assertEqual(self.bob.open(response.body).message.type.key[2], "pingresponse")

    def test_content_types_of_envelopes(self) -> None:
        """Whatever an envelope is labelled with: parameters, odd case, other names, nothing (reference 3.1)."""
        for label in (
            "application/didcomm-encrypted+json",
            "application/didcomm-encrypted+json; charset=utf-8",
            "Application/DIDComm-Encrypted+JSON ;v=2",
            "didcomm-encrypted+json",
            "application/didcomm+encrypted",
            "application/json",
            "application/octet-stream",
            "application/x-www-form-urlencoded",
            "image/png",
            "",
        ):
            self.assertEqual(self.site_fixture.post(self.forwarded(), **{"Content-Type": label}).status, 202, label)
        bare = self.site_fixture.request("POST", "/didcomm", self.forwarded())
        self.assertEqual(bare.status, 202)
        self.assertEqual(self.bob.waiting(), 11)

    def test_content_types_of_other_things(self) -> None:
        """What is no envelope is 400, or 415 if it was not even called one (reference section 11, row 8)."""
        for label, status in (
            ("application/didcomm-encrypted+json", 400),
            ("application/json; charset=utf-8", 400),
            ("application/octet-stream", 400),
            ("", 400),
            ("text/html", 415),
            ("multipart/form-data; boundary=x", 415),
            ("application/didcomm-encrypted+jsonx", 415),
        ):
            response = self.site_fixture.post(b"hello", **{"Content-Type": label})
            self.assertEqual((response.status, response.json["body"]["code"]), (status, "e.p.msg"), label)
            self.assertEqual(response.headers["content-type"], "application/didcomm-plain+json")

    def test_a_refusal_is_packed_for_whom_it_concerns(self) -> None:
        """A 400 with an encrypted report to an authenticated sender (reference section 11, row 5)."""
        raw = self.bob.pack("https://didcomm.org/routing/2.0/forward", {"next": "did:example:x"}, attachments=[{}])
        response = self.site_fixture.post(raw)
        self.assertEqual((response.status, response.headers["content-type"]), (400, ENCRYPTED.decode()))
        self.assertEqual(self.bob.open(response.body).body["code"], "e.p.me.res.not-found")

    def test_an_empty_body(self) -> None:
        """No bytes are no envelope."""
        self.assertEqual(self.site_fixture.post(b"").status, 400)
        self.assertEqual(self.site_fixture.request("POST", "/didcomm").status, 400)

    def test_a_chunked_body(self) -> None:
        """Chunks make one body, wherever they end."""
        line = self.site_fixture.line()
        line.feed(b"POST /didcomm HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        raw = self.forwarded()
        for start in range(0, len(raw), 700):
            piece = raw[start : start + 700]
            line.feed(b"%x;note=1\r\n%b\r\n" % (len(piece), piece))
        self.assertEqual(line.taken(), b"")
        line.feed(b"0\r\nTrailer: x\r\n\r\n")
        self.assertEqual([one.status for one in parse_responses(line.taken())], [202])

    def test_go_on(self) -> None:
        """A client that asks before sending its body is told to go on (RFC 9110 section 10.1.1)."""
        line = self.site_fixture.line()
        raw = self.forwarded()
        head = encode_request("POST", "/didcomm", raw, {"Expect": "100-continue"})[: -len(raw)]
        line.feed(head)
        self.assertEqual(line.taken(), b"HTTP/1.1 100 Continue\r\n\r\n")
        line.feed(raw)
        self.assertEqual([one.status for one in parse_responses(line.taken())], [202])

    def test_pipelined_requests(self) -> None:
        """Requests in one go on one connection are answered in order (RFC 9112 section 9.3.2)."""
        line = self.site_fixture.line()
        threads = [f"t{number}" for number in range(5)]
        with HeldStoreOperation(self.site_fixture, "claim_nonce") as held:
            for thread in threads:
                line.feed(encode_request("POST", "/didcomm", self.bob.pack(PING, id=thread, return_route="all")))
            line.feed(encode_request("GET", "/did"))
            self.assertEqual(line.taken(), b"")
            held.release_all()
        *answers, did = parse_responses(line.taken())
        self.assertEqual([self.bob.open(answer.body).message.thid for answer in answers], threads)
        self.assertEqual(did.body.decode(), self.site_fixture.did)
        self.assertFalse(line.lost)

    def test_http_1_0(self) -> None:
        """An old client gets its answer and the end of the connection."""
        line = self.site_fixture.line()
        line.feed(encode_request("POST", "/didcomm", self.forwarded()).replace(b"HTTP/1.1", b"HTTP/1.0"))
        self.site_fixture.settle()
        self.assertEqual(
            [one.status for one in parse_responses(line.taken().replace(b"HTTP/1.0", b"HTTP/1.1"))], [202]
        )
        self.assertTrue(line.lost)

    def test_too_many_requests(self) -> None:
        """429 says when to come again (UC-021 AF-2); the address is the one of a client, not of all."""
        site_fixture = InMemorySite(self, limits={"ip_per_minute": 2})
        statuses = [site_fixture.post(pack_forward(site_fixture, "did:x:y", b"{}")) for _ in range(3)]
        self.assertEqual([one.status for one in statuses], [400, 400, 429])
        self.assertEqual(statuses[2].headers["retry-after"], "60")
        self.assertEqual(statuses[2].headers["access-control-expose-headers"], "Retry-After")
        self.assertEqual(statuses[2].json["body"]["code"], "e.m.req.rate-limited")
        other = site_fixture.request(
            "POST", "/didcomm", pack_forward(site_fixture, "did:x:y", b"{}"), {}, "192.0.2.2"
        )
        self.assertEqual(other.status, 400)

    def test_a_store_that_is_away(self) -> None:
        """503 with Retry-After, and no 202 (reference section 11, row 17)."""
        with self.site_fixture.failing("enqueue_each", StoreUnavailable()):
            response = self.site_fixture.post(self.forwarded())
        self.assertEqual((response.status, response.headers["retry-after"]), (503, "5"))
        self.assertEqual(self.bob.waiting(), 0)

    def test_a_fault_of_ours(self) -> None:
        """500 with a fixed text; the next request is served."""
        with self.site_fixture.failing("enqueue_each", RuntimeError("boom")):
            response = self.site_fixture.post(self.forwarded())
        self.assertEqual(response.status, 500)
        self.assertNotIn(b"boom", response.body)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        self.assertEqual(self.site_fixture.post(self.forwarded()).status, 202)

    def test_while_the_daemon_stops(self) -> None:
        """503 with Retry-After: nothing new is begun (reference section 11, row 33)."""
        self.site_fixture.base.gate.stopService()
        response = self.site_fixture.post(self.forwarded())
        self.assertEqual((response.status, response.headers["retry-after"]), (503, "5"))
        self.site_fixture.base.gate.startService()
        self.assertEqual(self.bob.waiting(), 0)


class TimeoutTests(HTTPTestCase):
    def test_the_deadline(self) -> None:
        """After ten seconds the answer is 503; the work goes on to its end (reference 3.1)."""
        line = self.site_fixture.line()
        with HeldStoreOperation(self.site_fixture, "enqueue_each") as held:
            line.feed(encode_request("POST", "/didcomm", self.forwarded()))
            self.site_fixture.clock.advance(9.9)
            self.assertEqual(line.taken(), b"")
            self.site_fixture.clock.advance(0.2)
            (response,) = parse_responses(line.taken())
            self.assertEqual((response.status, response.headers["retry-after"]), (503, "5"))
            held.release_all()
        self.assertEqual(line.taken(), b"")
        self.assertEqual(self.bob.waiting(), 1)
        line.feed(encode_request("GET", "/did"))
        self.assertEqual([one.status for one in parse_responses(line.taken())], [200])

    def test_a_client_that_hangs_up(self) -> None:
        """What it asked for is done all the same, and nobody is surprised; no timer stays behind."""
        timers = len(self.site_fixture.clock.getDelayedCalls())
        line = self.site_fixture.line()
        with HeldStoreOperation(self.site_fixture, "enqueue_each") as held:
            line.feed(encode_request("POST", "/didcomm", self.forwarded()))
            line.hang_up(cleanly=False)
            held.release_all()
        self.site_fixture.clock.advance(0)
        self.assertEqual(self.bob.waiting(), 1)
        self.assertEqual(len(self.site_fixture.clock.getDelayedCalls()), timers)

    def test_a_client_that_hangs_up_and_a_store_that_never_answers(self) -> None:
        """The deadline passes without anybody to tell it to."""
        line = self.site_fixture.line()
        with HeldStoreOperation(self.site_fixture, "enqueue_each"):
            line.feed(encode_request("POST", "/didcomm", self.forwarded()))
            line.hang_up()
            self.site_fixture.clock.advance(11)
        self.assertEqual(line.taken(), b"")

    def test_half_a_request(self) -> None:
        """A body that never comes whole is nothing; its connection is given up after a while."""
        line = self.site_fixture.line()
        line.feed(encode_request("POST", "/didcomm", self.forwarded())[:-5])
        self.site_fixture.clock.pump([1] * 90)
        self.assertTrue(line.lost)
        self.assertEqual(line.taken(), b"")
        self.assertEqual(self.bob.waiting(), 0)

    def test_an_answer_takes_as_long_as_its_reader(self) -> None:
        """A client that does not read its answers is not read from either."""
        for _ in range(4):
            self.site_fixture.post(self.forwarded("x" * 30_000))
        line = self.site_fixture.line()
        line.stuck = True
        for _ in range(20):
            line.feed(
                encode_request("POST", "/didcomm", self.bob.pack(f"{MP}/delivery-request", {"limit": 9}, **ROUTE))
            )
        self.assertLess(line.unsent, 1_000_000)
        self.assertGreater(line.unread, 0)
        line.unstick()
        self.site_fixture.settle()
        self.assertEqual([one.status for one in parse_responses(line.taken())], [200] * 20)

    def test_many_small_requests_for_large_pages(self) -> None:
        """Answers that nobody reads do not pile up, not even to requests that had been read together."""
        line = self.site_fixture.line()
        line.stuck = True
        for _ in range(10):
            line.feed(encode_request("GET", "/invitation", None, {"Accept": "text/html"}) * 20)
        self.assertLess(line.unsent, 500_000)
        line.unstick()
        self.site_fixture.settle()
        self.assertEqual([one.status for one in parse_responses(line.taken())], [200] * 200)


ROUTE = {"return_route": "all"}


class SizeTests(HTTPTestCase):
    settings: ClassVar[dict[str, Any]] = {"limits": {**PLENTY, "max_message_bytes": 5000}}

    def padded(self, length: int) -> bytes:
        """A forward to Bob of so many bytes."""
        raw = self.forwarded()
        self.assertLess(len(raw), length)
        return raw + b" " * (length - len(raw))

    def refused(self, raw: bytes) -> None:
        """The answer is a whole 413, and that nothing more will be said on this connection."""
        (response,) = parse_responses(raw)
        self.assertEqual(response.status, 413)
        self.assertEqual(response.json["body"]["code"], "e.p.me.res.storage.message_too_big")
        self.assertEqual(response.headers["connection"], "close")
        self.assertEqual(response.headers["access-control-allow-origin"], "*")
        self.assertEqual(self.site_fixture.counter("mediator_rejected_total", reason="too_large"), 1)
        self.assertEqual(self.bob.waiting(), 0)

    def test_exactly_the_limit(self) -> None:
        """`max_message_bytes` themselves are fine, by length or in chunks (reference 3.1)."""
        raw = self.padded(5000)
        self.assertEqual(self.site_fixture.post(raw).status, 202)
        line = self.site_fixture.line()
        line.feed(b"POST /didcomm HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        line.feed(b"1388\r\n%b\r\n0\r\n\r\n" % raw)
        self.assertEqual([one.status for one in parse_responses(line.taken())], [202])

    def test_by_its_length(self) -> None:
        """413 as soon as the headers are there, before any of the body (reference 3.1)."""
        line = self.site_fixture.line()
        line.feed(encode_request("POST", "/didcomm", self.padded(5001))[:-5001])
        self.refused(line.taken())
        self.site_fixture.settle()
        self.assertTrue(line.half_closed)

    def test_a_client_that_asks_first(self) -> None:
        """It is not told to go on."""
        line = self.site_fixture.line()
        line.feed(encode_request("POST", "/didcomm", self.padded(5001), {"Expect": "100-continue"})[:-5001])
        self.refused(line.taken())

    def test_everywhere(self) -> None:
        """The limit is the listener's, whatever the address and the method."""
        for method, path in (("POST", "/"), ("GET", "/health"), ("PUT", "/nowhere")):
            line = self.site_fixture.line()
            line.feed(encode_request(method, path, b"x" * 5001)[:-5001])
            self.assertEqual([one.status for one in parse_responses(line.taken())], [413])

    def test_chunks_that_grow_too_long(self) -> None:
        """413 with the byte that is too much, though nobody said how long it was going to be."""
        line = self.site_fixture.line()
        line.feed(b"POST /didcomm HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        line.feed(b"1388\r\n%b\r\n" % self.padded(5000))
        self.assertEqual(line.taken(), b"")
        line.feed(b"1\r\n \r\n")
        self.refused(line.taken())

    def test_the_rest_is_thrown_away(self) -> None:
        """What still comes is read, so that the client comes to reading the answer, and then it is over."""
        line = self.site_fixture.line()
        line.feed(encode_request("POST", "/didcomm", b"x" * 50_000))
        self.refused(line.taken())
        self.site_fixture.settle()
        self.assertTrue(line.lost)

    def test_a_client_that_goes_on_and_on(self) -> None:
        """It is cut off after five seconds, or after more bytes than anybody would send by mistake."""
        slow, fast = self.site_fixture.line(), self.site_fixture.line()
        for line in (slow, fast):
            line.feed(b"POST /didcomm HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n")
        fast.feed(b"x" * 17_000_000)
        self.site_fixture.settle()
        self.assertTrue(fast.lost)
        self.assertFalse(slow.lost)
        self.site_fixture.clock.advance(5)
        self.site_fixture.settle()
        self.assertTrue(slow.lost)

    def test_a_length_that_is_none(self) -> None:
        """Twisted refuses it before we see it."""
        for length in ("-1", "5e3", "0x10"):
            line = self.site_fixture.line()
            line.feed(b"POST /didcomm HTTP/1.1\r\nHost: a\r\nContent-Length: %b\r\n\r\n" % length.encode())
            self.assertTrue(line.taken().startswith(b"HTTP/1.1 400 "))


class PageTests(HTTPTestCase):
    settings: ClassVar[dict[str, Any]] = {"public_url": "https://mediator.example"}

    def test_did_documents(self) -> None:
        """`/` and `/.well-known/did.json` have the document of the did:web, as JSON (DCTRL-0004 3.1)."""
        for path in ("/", "/.well-known/did.json"):
            response = self.get(path)
            self.assertEqual((response.status, response.headers["content-type"]), (200, "application/json"))
            self.assertEqual(response.json["id"], "did:web:mediator.example")
            self.assertIn(self.site_fixture.did, response.json["alsoKnownAs"])

    def test_did(self) -> None:
        """`/did` has the did:peer:2, as text and nothing else."""
        response = self.get("/did")
        self.assertEqual(response.headers["content-type"], "text/plain; charset=utf-8")
        self.assertEqual(response.body.decode(), self.site_fixture.did)

    def test_invitation_for_programs(self) -> None:
        """JSON by default and when JSON is preferred (reference 7.4)."""
        for accept in ("", "application/json", "*/*", "application/json, text/html"):
            response = self.get("/invitation", **({"Accept": accept} if accept else {}))
            self.assertEqual((response.status, response.headers["content-type"]), (200, "application/json"))
            self.assertEqual(response.json["type"], "https://didcomm.org/out-of-band/2.0/invitation")
            self.assertEqual(response.json["from"], self.site_fixture.did)
            self.assertEqual(response.headers["vary"], "Accept")

    def test_invitation_for_people(self) -> None:
        """A page that loads nothing from anywhere and tells nobody where it was opened."""
        for path in ("/invitation", "/?_oob=eyJ9-reflected", "/invitation?_oob=eyJ9-reflected"):
            response = self.get(path, Accept="text/html,application/xhtml+xml,*/*;q=0.8")
            self.assertEqual((response.status, response.headers["content-type"]), (200, "text/html; charset=utf-8"))
            self.assertIn("default-src 'none'", response.headers["content-security-policy"])
            self.assertEqual(response.headers["x-content-type-options"], "nosniff")
            self.assertEqual(response.headers["referrer-policy"], "no-referrer")
            self.assertIn(b"<svg", response.body)
            self.assertNotIn(b"eyJ9-reflected", response.body)

    def test_invitation_url(self) -> None:
        """`/invitationOOB` has the URL whose `_oob` is the invitation."""
        url, _, oob = self.get("/invitationOOB").body.decode().partition("?_oob=")
        self.assertTrue(url.startswith("https://mediator.example"))
        inside = json.loads(urlsafe_b64decode(oob + "=" * (-len(oob) % 4)))
        self.assertEqual(inside, self.get("/invitation").json)

    def test_short_invitation_url(self) -> None:
        """`/oob?_oobid=` has the same as `/invitation`, by Accept; another id leads nowhere."""
        url = f"/oob?_oobid={self.get('/invitation').json['id']}"
        for accept in ("application/json", "text/html,*/*;q=0.8"):
            short, long = self.get(url, Accept=accept), self.get("/invitation", Accept=accept)
            self.assertEqual((short.status, short.body, short.headers), (200, long.body, long.headers))
        for unknown in ("/oob", "/oob?_oobid=", "/oob?_oobid=0", f"{url}&_oobid=0", "/oob?_oob=e30"):
            response = self.get(unknown, Accept="text/html")
            self.assertEqual((response.status, response.json["detail"]), (404, "unknown invitation"))

    def test_openapi(self) -> None:
        """`/openapi.json` has what programs are told about the commands."""
        response = self.get("/openapi.json")
        self.assertEqual((response.status, response.headers["content-type"]), (200, "application/json"))
        self.assertTrue(response.json["openapi"].startswith("3."))

    def test_health(self) -> None:
        """200 while the store answers, 503 with a reason when it does not; `mediator_storage_up` follows."""
        response = self.get("/health")
        self.assertEqual((response.status, response.json), (200, {"status": "ok"}))
        self.assertEqual(self.site_fixture.counter("mediator_storage_up"), 1)
        self.successResultOf(self.site_fixture.store.close())
        response = self.get("/health")
        self.assertEqual(response.status, 503)
        self.assertEqual(response.json, {"status": "error", "detail": "store unavailable"})
        self.assertIn("retry-after", response.headers)
        self.assertEqual(self.site_fixture.counter("mediator_storage_up"), 0)

    def test_health_while_the_daemon_stops(self) -> None:
        """Not healthy: nobody shall be sent here any more."""
        self.site_fixture.base.gate.stopService()
        response = self.get("/health")
        self.assertEqual((response.status, response.json["detail"]), (503, "stopping"))

    def test_health_of_a_store_that_hangs(self) -> None:
        """503 after the deadline."""
        line = self.site_fixture.line()
        with HeldStoreOperation(self.site_fixture, "ping"):
            line.feed(encode_request("GET", "/health"))
            self.site_fixture.clock.advance(10)
        self.assertEqual([one.status for one in parse_responses(line.taken())], [503])

    def test_head(self) -> None:
        """The headers of a GET and no body, so that a connection stays in step."""
        for path in PAGES:
            line = self.site_fixture.line(LOCAL)
            line.feed(encode_request("HEAD", path) + encode_request("HEAD", path))
            self.site_fixture.settle()
            first, second = parse_responses(line.taken(), head=True)
            self.assertEqual(first.status, 200)
            self.assertGreater(int(first.headers["content-length"]), 0)
            if path != "/metrics":  # which has counted the first one
                self.assertEqual(first.headers["content-length"], str(len(self.get(path).body)))

    def test_options(self) -> None:
        """A browser asks before each body, because of its Content-Type, and reads the answer even if it is 404."""
        public = ("/public/did:example:a", "/public/did:example:a/b", "/public/", "/public")
        for path in (*MESSAGE_PATHS, *PAGES, *public, "/ws", "/nowhere", "/didcomm/nowhere", "/.well-known"):
            preflight = {
                "Origin": "https://wallet.example",
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "content-type",
            }
            response = self.site_fixture.request("OPTIONS", path, None, preflight)
            self.assertEqual((response.status, response.body), (204, b""), path)
            self.assertNotIn("content-length", response.headers)
            self.assertEqual(response.headers["access-control-allow-origin"], "*")
            self.assertEqual(response.headers["access-control-allow-headers"], "Content-Type")
            self.assertEqual(response.headers["access-control-allow-methods"], "GET, POST, OPTIONS")

    def test_cors_everywhere(self) -> None:
        """Also on refusals, or a browser wallet could not read them; without credentials."""
        for response in (
            self.get("/did"),
            self.get("/nowhere"),
            self.get("/didcomm"),
            self.site_fixture.post(b"x"),
            self.site_fixture.post(self.forwarded()),
            self.get("/metrics", peer="192.0.2.1"),
        ):
            self.assertEqual(response.headers["access-control-allow-origin"], "*")
            self.assertNotIn("access-control-allow-credentials", response.headers)

    def test_methods(self) -> None:
        """405 names the methods that are allowed (DIDComm reference section 11, row 32); the body is of the path."""
        error = b'{"type":"ERROR","code":"METHOD_NOT_ALLOWED"}'
        page = {"GET", "HEAD", "OPTIONS"}
        for method, path, allowed, body in (
            ("GET", "/didcomm", {"POST", "OPTIONS"}, b""),
            ("HEAD", "/didcomm/", {"POST", "OPTIONS"}, b""),
            ("PUT", "/didcomm", {"POST", "OPTIONS"}, b""),
            ("POST", "/health", page, error),
            ("PATCH", "/metrics", page, error),
            ("DELETE", "/", page | {"POST"}, error),
            ("POST", "/did", page, error),
            ("POST", "/public/did:example:a", page, error),
            ("POST", "/openapi.json", page, error),
            ("POST", "/ws", {"GET", "OPTIONS"}, error),
            ("BREW", "/invitation", page, error),
        ):
            response = self.site_fixture.request(method, path)
            self.assertEqual((response.status, response.body), (405, body), (method, path))
            self.assertEqual(set(response.headers["allow"].split(", ")), allowed)
            self.assertEqual(response.headers.get("content-type"), "application/json" if body else None)

    def test_nothing_there(self) -> None:
        """404, whatever the method; a path below a page is none, unless it is one of DIDs."""
        below = ("/didcomm/x", "/didcomm//")
        for path in (
            *below,
            "/health/x",
            "/metrics/x",
            "/nowhere",
            "/did/x",
            "/ws/x",
            "/.well-known",
            "/.well-known/x",
            "/a/b/c",
            "//x",
            "//ws",
        ):
            for method in ("GET", "POST", "PUT"):
                response = self.site_fixture.request(method, path, b"" if method == "POST" else None)
                self.assertEqual((response.status, response.headers["content-type"]), (404, "application/json"), path)
                expected = (
                    {"status": "error", "detail": "not found"}
                    if path in below
                    else {"type": "ERROR", "code": "NOT_FOUND"}
                )
                self.assertEqual(response.json, expected)

    def test_a_socket_path_without_an_upgrade(self) -> None:
        """426 says what it is for (RFC 9110 section 15.5.22)."""
        response = self.get("/ws")
        self.assertEqual((response.status, response.headers["upgrade"]), (426, "websocket"))
        self.assertEqual(response.headers["connection"], "Upgrade")
        self.assertEqual(response.json, {"type": "ERROR", "code": "UPGRADE_REQUIRED"})

    def test_harmless_headers(self) -> None:
        """No response tells which software and version serves it, or repeats what was asked."""
        for path in (*PAGES, "/nowhere-<script>", "/didcomm"):
            response = self.get(path, Cookie="a=<script>")
            self.assertEqual(response.headers["server"], "mediatord")
            self.assertIn("date", response.headers)
            self.assertNotIn("set-cookie", response.headers)
            self.assertNotIn(b"<script>", response.body)


class MetricsTests(HTTPTestCase):
    settings: ClassVar[dict[str, Any]] = {
        "metrics": {"allow": ["127.0.0.0/8", "::1/128", "203.0.113.7/32"], "queue_size_top": 1},
        "trusted_proxies": ["198.51.100.0/24"],
    }

    def test_who_may_read_them(self) -> None:
        """Those whose address is allowed; a proxy is believed only if it is trusted (contract section 3)."""
        for peer, forwarded, status in (
            ("127.0.0.1", None, 200),
            ("203.0.113.7", None, 200),
            ("192.0.2.1", None, 403),
            ("192.0.2.1", "127.0.0.1", 403),
            ("198.51.100.1", None, 403),
            ("198.51.100.1", "203.0.113.7", 200),
            ("198.51.100.1", "192.0.2.1", 403),
            ("198.51.100.1", "203.0.113.7, 192.0.2.1", 403),
            ("198.51.100.1", "nonsense", 403),
        ):
            headers = {"X-Forwarded-For": forwarded} if forwarded else {}
            response = self.get("/metrics", peer, **headers)
            self.assertEqual(response.status, status, (peer, forwarded))
            self.assertEqual(b"mediator_" in response.body, status == 200)

    def test_queue_sizes(self) -> None:
        """A series for each of the largest queues, the rest summed up; a series vanishes with its queue."""
        carol = InMemoryWallet(self.site_fixture).enrol()
        self.assertNotIn(b"mediator_message_queue_size{", self.get("/metrics").body)
        for wallet, count in ((self.bob, 3), (carol, 2)):
            for _ in range(count):
                self.site_fixture.post(pack_forward(self.site_fixture, wallet.did, wallet.letter()))
        response = self.get("/metrics")
        self.assertTrue(response.headers["content-type"].startswith("text/plain; version="))
        bobs, carols = (self.site_fixture.tag(wallet.did) for wallet in (self.bob, carol))
        self.assertIn(f'mediator_message_queue_size{{did="{bobs}"}} 3.0\n'.encode(), response.body)
        self.assertIn(b'mediator_message_queue_size{did="other"} 2.0\n', response.body)
        self.bob.answer(f"{MP}/messages-received", {"message_id_list": [one.id for one in self.bob.fetch()]})
        body = self.get("/metrics").body
        self.assertNotIn(bobs.encode(), body)
        self.assertIn(f'mediator_message_queue_size{{did="{carols}"}} 2.0\n'.encode(), body)

    def figure(self, name: str) -> dict[tuple[str, ...], float]:
        """The series of a metric in a fresh scrape, by their labels."""
        families = text_string_to_metric_families(self.get("/metrics").body.decode())
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return {tuple(sample.labels.values()): sample.value for sample in samples}

    def test_figures_of_the_store_agree(self) -> None:
        """Queues, all that waits and the ledger add up in each scrape; what the daemon sends to itself is in them."""
        own = self.site_fixture.base.probe_credentials.identities.identity("m").did
        self.successResultOf(self.site_fixture.store.grant(own))
        self.successResultOf(self.site_fixture.store.update_recipients(own, [(own, "add")], max_recipients=1))
        payload = Payload("own", b"{}", "json")
        self.successResultOf(self.site_fixture.store.enqueue(own, [payload], expires_at=9e9))
        # Only one queue has a series here, and this is the largest.
        self.site_fixture.post(pack_forward(self.site_fixture, self.bob.did, self.bob.letter()))
        for count in range(2, 5):
            self.site_fixture.post(pack_forward(self.site_fixture, self.bob.did, self.bob.letter()))
            sizes = self.figure("mediator_message_queue_size")
            self.assertEqual(sizes, {(self.site_fixture.tag(self.bob.did),): count, ("other",): 1})
            entries = self.figure("mediator_ledger_messages")
            waiting = [value for labels, value in entries.items() if "waiting" in labels]
            self.assertEqual(waiting, [count + 1, 0])
            self.assertEqual(self.figure("mediator_messages_waiting"), {(): count + 1})
            self.site_fixture.clock.advance(7)
            now = self.site_fixture.clock.seconds()
            self.assertEqual(self.figure("mediator_store_statistics_timestamp_seconds"), {(): now})
        with self.site_fixture.failing("read_statistics", StoreUnavailable()):
            self.site_fixture.clock.advance(7)
            self.assertEqual(self.figure("mediator_store_statistics_timestamp_seconds"), {(): now})

    def test_an_expensive_look_is_not_repeated_at_once(self) -> None:
        """What takes a twentieth of a second or longer is done a twentieth of the time at most."""
        clock, statistics = self.site_fixture.clock, self.site_fixture.store.read_statistics
        looks: list[float] = []

        def slow(top: int) -> Any:
            looks.append(top)
            clock.advance(0.5)
            return statistics(top)

        self.patch(self.site_fixture.store, "read_statistics", slow)
        for _ in range(3):
            self.get("/metrics")
        self.assertEqual(len(looks), 1)
        clock.advance(10)
        self.get("/metrics")
        self.assertEqual(len(looks), 2)

    def test_without_the_store(self) -> None:
        """The metrics are there all the same, and say so."""
        self.successResultOf(self.site_fixture.store.close())
        response = self.get("/metrics")
        self.assertEqual(response.status, 200)
        self.assertIn(b"mediator_storage_up 0.0\n", response.body)

    def test_too_many_queues(self) -> None:
        """That they could not be counted in time says nothing of the store; what was known stays."""
        self.site_fixture.post(pack_forward(self.site_fixture, self.bob.did, self.bob.letter()))
        sizes = f'mediator_message_queue_size{{did="{self.site_fixture.tag(self.bob.did)}"}} 1.0\n'.encode()
        self.assertIn(sizes, self.get("/metrics").body)
        with self.site_fixture.failing("read_statistics", StoreUnavailable()):
            response = self.get("/metrics")
        self.assertEqual(response.status, 200)
        self.assertIn(sizes, response.body)
        self.assertIn(b"mediator_storage_up 1.0\n", response.body)

    def test_the_address_of_a_limit(self) -> None:
        """The limit of an address is that of the client behind a trusted proxy."""
        site_fixture = InMemorySite(self, limits={"ip_per_minute": 1}, trusted_proxies=["198.51.100.0/24"])
        for client, status in (("203.0.113.1", 400), ("203.0.113.2", 400), ("203.0.113.1", 429)):
            raw = pack_forward(site_fixture, "did:x:y", b"{}")
            response = site_fixture.request("POST", "/didcomm", raw, {"X-Forwarded-For": client}, "198.51.100.1")
            self.assertEqual(response.status, status)


@implementer(IHalfCloseableProtocol)
class Client(Protocol):
    """Notes what comes, sends all it has to all the same, and then leaves."""

    def __init__(self) -> None:
        self.got = b""
        self.over: Deferred[bytes] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        self.got += data

    def readConnectionLost(self) -> None:  # noqa: N802  the interface's name
        assert self.transport is not None
        self.transport.loseConnection()

    def writeConnectionLost(self) -> None:  # noqa: N802  the interface's name
        """Nothing to do."""

    def connectionLost(self, reason: Failure | None = None) -> None:
        self.over.callback(self.got)


class Server(Factory):
    """The site, for one connection whose end can be waited for."""

    def __init__(self, site: MediatorSite) -> None:
        self._site = site
        self.over: Deferred[None] = Deferred()

    def buildProtocol(self, addr: IAddress | None) -> Protocol | None:
        protocol: Any = self._site.buildProtocol(addr)
        lost = protocol.connectionLost

        def over(reason: Failure) -> None:
            lost(reason)
            self.over.callback(None)

        protocol.connectionLost = over
        built: Protocol = protocol
        return built


class KernelTests(TestCase):
    """What only real sockets show."""

    def setUp(self) -> None:
        reactor: Any = _reactor
        site_fixture = InMemorySite(self, limits={**PLENTY, "max_message_bytes": 5000})
        self.server = Server(site_fixture.site)
        port = reactor.listenTCP(0, self.server, interface=LOCAL)
        self.addCleanup(port.stopListening)
        self.endpoint = TCP4ClientEndpoint(reactor, LOCAL, port.getHost().port)

    async def refusal_of(self, sent: bytes) -> None:
        """A client sends this and gets a whole 413."""
        client = Client()
        await connectProtocol(self.endpoint, client)
        assert client.transport is not None
        client.transport.write(sent)
        (response,) = parse_responses(await client.over)
        self.assertEqual(response.status, 413)
        self.assertEqual(response.json["body"]["code"], "e.p.me.res.storage.message_too_big")
        await self.server.over

    async def test_the_refusal_arrives_without_the_body(self) -> None:
        """A client that has sent only its headers gets the whole answer."""
        await self.refusal_of(encode_request("POST", "/didcomm", b"x" * 5001)[:-5001])

    async def test_the_refusal_arrives_in_spite_of_the_body(self) -> None:
        """A client that sends megabytes without listening finds a whole answer afterwards, and not a reset."""
        await self.refusal_of(encode_request("POST", "/didcomm", b"x" * 4_000_000))
