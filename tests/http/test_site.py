"""All paths of the public listener over in-memory connections (contract section 3)."""

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
from tests.http.test_websocket import HIGH_LIMITS, HeldStoreOperation
from tests.in_memory_mediator import MP, PING, InMemoryWallet, pack_forward

LOCAL = "127.0.0.1"
MESSAGE_PATHS = ("/didcomm", "/didcomm/", "/")
PAGES = (
    *("/", "/.well-known/did.json", "/did", "/invitation", "/invitationOOB", "/openapi.json", "/health", "/metrics"),
)


class HTTPTestCase(SynchronousTestCase):
    """Mediator, and Bob with an account."""

    settings: ClassVar[dict[str, Any]] = {}

    def setUp(self) -> None:
        self.site_fixture = InMemorySite(self, **{"limits": HIGH_LIMITS, **self.settings})
        self.bob = InMemoryWallet(self.site_fixture).enrol()

    def get(self, path: str, peer: str = LOCAL, **headers: str) -> HTTPResponse:
        """Send a GET and return the response."""
        return self.site_fixture.request("GET", path, None, headers, peer)

    def forward_to_bob(self, text: str = "hello") -> bytes:
        """Pack a forward to Bob."""
        return pack_forward(self.site_fixture, self.bob.did, self.bob.make_payload(text))


class MessageTests(HTTPTestCase):
    def test_accepts_forward_on_all_paths(self) -> None:
        """202 without body and Content-Type, at /didcomm, /didcomm/ and / (reference 3.1, D4)."""
        for path in MESSAGE_PATHS:
            response = self.site_fixture.post(self.forward_to_bob(), path)
            self.assertEqual((response.status, response.body), (202, b""))
            self.assertNotIn("content-type", response.headers)
            self.assertEqual(response.headers["content-length"], "0")
        self.assertEqual(self.bob.count_queued(), 3)

    def test_answers_request(self) -> None:
        """200 with an envelope, and exactly the media type that clients compare with (reference 3.1, D5)."""
        for path in MESSAGE_PATHS:
            response = self.site_fixture.post(self.bob.pack(PING, return_route="all"), path)
            self.assertEqual(response.status, 200)
            self.assertEqual(response.headers["content-type"], "application/didcomm-encrypted+json")
            self.assertEqual(self.bob.open(response.body).message.type.key[2], "pingresponse")

    def test_content_types_of_envelopes(self) -> None:
        """Any Content-Type of an envelope is accepted: with parameters, odd case, others, none (reference 3.1)."""
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
            self.assertEqual(
                self.site_fixture.post(self.forward_to_bob(), **{"Content-Type": label}).status, 202, label
            )
        bare = self.site_fixture.request("POST", "/didcomm", self.forward_to_bob())
        self.assertEqual(bare.status, 202)
        self.assertEqual(self.bob.count_queued(), 11)

    def test_other_bodies(self) -> None:
        """Other bodies are 400, or 415 if the Content-Type is no envelope's either (reference section 11, row 8)."""
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

    def test_problem_report_is_encrypted_to_sender(self) -> None:
        """400 with an encrypted report to an authenticated sender (reference section 11, row 5)."""
        raw = self.bob.pack("https://didcomm.org/routing/2.0/forward", {"next": "did:example:x"}, attachments=[{}])
        response = self.site_fixture.post(raw)
        self.assertEqual((response.status, response.headers["content-type"]), (400, ENCRYPTED.decode()))
        self.assertEqual(self.bob.open(response.body).body["code"], "e.p.me.res.not-found")

    def test_empty_body(self) -> None:
        """An empty body is no envelope."""
        self.assertEqual(self.site_fixture.post(b"").status, 400)
        self.assertEqual(self.site_fixture.request("POST", "/didcomm").status, 400)

    def test_chunked_body(self) -> None:
        """Chunks are joined, wherever they end."""
        transport = self.site_fixture.connect()
        transport.feed(b"POST /didcomm HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        raw = self.forward_to_bob()
        for start in range(0, len(raw), 700):
            piece = raw[start : start + 700]
            transport.feed(b"%x;note=1\r\n%b\r\n" % (len(piece), piece))
        self.assertEqual(transport.take_output(), b"")
        transport.feed(b"0\r\nTrailer: x\r\n\r\n")
        self.assertEqual([response.status for response in parse_responses(transport.take_output())], [202])

    def test_expect_continue(self) -> None:
        """100-continue is answered before the body (RFC 9110 section 10.1.1)."""
        transport = self.site_fixture.connect()
        raw = self.forward_to_bob()
        head = encode_request("POST", "/didcomm", raw, {"Expect": "100-continue"})[: -len(raw)]
        transport.feed(head)
        self.assertEqual(transport.take_output(), b"HTTP/1.1 100 Continue\r\n\r\n")
        transport.feed(raw)
        self.assertEqual([response.status for response in parse_responses(transport.take_output())], [202])

    def test_pipelined_requests(self) -> None:
        """Pipelined requests are answered in order (RFC 9112 section 9.3.2)."""
        transport = self.site_fixture.connect()
        threads = [f"t{number}" for number in range(5)]
        with HeldStoreOperation(self.site_fixture, "claim_nonce") as held:
            for thread in threads:
                transport.feed(encode_request("POST", "/didcomm", self.bob.pack(PING, id=thread, return_route="all")))
            transport.feed(encode_request("GET", "/did"))
            self.assertEqual(transport.take_output(), b"")
            held.release_all()
        *responses, did = parse_responses(transport.take_output())
        self.assertEqual([self.bob.open(answer.body).message.thid for answer in responses], threads)
        self.assertEqual(did.body.decode(), self.site_fixture.did)
        self.assertFalse(transport.lost)

    def test_http_1_0(self) -> None:
        """An HTTP/1.0 client gets its response, and the connection closes."""
        transport = self.site_fixture.connect()
        transport.feed(encode_request("POST", "/didcomm", self.forward_to_bob()).replace(b"HTTP/1.1", b"HTTP/1.0"))
        self.site_fixture.run_due_calls()
        self.assertEqual(
            [
                response.status
                for response in parse_responses(transport.take_output().replace(b"HTTP/1.0", b"HTTP/1.1"))
            ],
            [202],
        )
        self.assertTrue(transport.lost)

    def test_rate_limited(self) -> None:
        """429 with Retry-After (UC-021 AF-2); the limit is per address."""
        site_fixture = InMemorySite(self, limits={"ip_per_minute": 2})
        statuses = [site_fixture.post(pack_forward(site_fixture, "did:x:y", b"{}")) for _ in range(3)]
        self.assertEqual([item.status for item in statuses], [400, 400, 429])
        self.assertEqual(statuses[2].headers["retry-after"], "60")
        self.assertEqual(statuses[2].headers["access-control-expose-headers"], "Retry-After")
        self.assertEqual(statuses[2].json["body"]["code"], "e.m.req.rate-limited")
        other = site_fixture.request(
            "POST", "/didcomm", pack_forward(site_fixture, "did:x:y", b"{}"), {}, "192.0.2.2"
        )
        self.assertEqual(other.status, 400)

    def test_unavailable_store(self) -> None:
        """503 with Retry-After, and no 202 (reference section 11, row 17)."""
        with self.site_fixture.failing("enqueue_each", StoreUnavailable()):
            response = self.site_fixture.post(self.forward_to_bob())
        self.assertEqual((response.status, response.headers["retry-after"]), (503, "5"))
        self.assertEqual(self.bob.count_queued(), 0)

    def test_internal_error(self) -> None:
        """500 with a fixed text; the next request is served."""
        with self.site_fixture.failing("enqueue_each", RuntimeError("boom")):
            response = self.site_fixture.post(self.forward_to_bob())
        self.assertEqual(response.status, 500)
        self.assertNotIn(b"boom", response.body)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        self.assertEqual(self.site_fixture.post(self.forward_to_bob()).status, 202)

    def test_refuses_while_stopping(self) -> None:
        """503 with Retry-After: no new request is accepted (reference section 11, row 33)."""
        self.site_fixture.base.gate.stopService()
        response = self.site_fixture.post(self.forward_to_bob())
        self.assertEqual((response.status, response.headers["retry-after"]), (503, "5"))
        self.site_fixture.base.gate.startService()
        self.assertEqual(self.bob.count_queued(), 0)


class TimeoutTests(HTTPTestCase):
    def test_request_times_out(self) -> None:
        """503 after ten seconds; the work continues (reference 3.1)."""
        transport = self.site_fixture.connect()
        with HeldStoreOperation(self.site_fixture, "enqueue_each") as held:
            transport.feed(encode_request("POST", "/didcomm", self.forward_to_bob()))
            self.site_fixture.clock.advance(9.9)
            self.assertEqual(transport.take_output(), b"")
            self.site_fixture.clock.advance(0.2)
            (response,) = parse_responses(transport.take_output())
            self.assertEqual((response.status, response.headers["retry-after"]), (503, "5"))
            held.release_all()
        self.assertEqual(transport.take_output(), b"")
        self.assertEqual(self.bob.count_queued(), 1)
        transport.feed(encode_request("GET", "/did"))
        self.assertEqual([item.status for item in parse_responses(transport.take_output())], [200])

    def test_client_disconnects(self) -> None:
        """The request is finished, no error is logged, no timer remains."""
        timers = len(self.site_fixture.clock.getDelayedCalls())
        transport = self.site_fixture.connect()
        with HeldStoreOperation(self.site_fixture, "enqueue_each") as held:
            transport.feed(encode_request("POST", "/didcomm", self.forward_to_bob()))
            transport.disconnect(cleanly=False)
            held.release_all()
        self.site_fixture.clock.advance(0)
        self.assertEqual(self.bob.count_queued(), 1)
        self.assertEqual(len(self.site_fixture.clock.getDelayedCalls()), timers)

    def test_client_disconnects_and_store_hangs(self) -> None:
        """The deadline passes without a client."""
        transport = self.site_fixture.connect()
        with HeldStoreOperation(self.site_fixture, "enqueue_each"):
            transport.feed(encode_request("POST", "/didcomm", self.forward_to_bob()))
            transport.disconnect()
            self.site_fixture.clock.advance(11)
        self.assertEqual(transport.take_output(), b"")

    def test_unfinished_body_times_out(self) -> None:
        """An unfinished body is not served; its connection times out."""
        transport = self.site_fixture.connect()
        transport.feed(encode_request("POST", "/didcomm", self.forward_to_bob())[:-5])
        self.site_fixture.clock.pump([1] * 90)
        self.assertTrue(transport.lost)
        self.assertEqual(transport.take_output(), b"")
        self.assertEqual(self.bob.count_queued(), 0)

    def test_pauses_reading_from_client_that_does_not_read(self) -> None:
        """A client that does not read its responses is not read from either."""
        for _ in range(4):
            self.site_fixture.post(self.forward_to_bob("x" * 30_000))
        transport = self.site_fixture.connect()
        transport.peer_stalled = True
        for _ in range(20):
            transport.feed(
                encode_request("POST", "/didcomm", self.bob.pack(f"{MP}/delivery-request", {"limit": 9}, **ROUTE))
            )
        self.assertLess(transport.unsent, 1_000_000)
        self.assertGreater(transport.unread, 0)
        transport.resume_peer()
        self.site_fixture.run_due_calls()
        self.assertEqual([response.status for response in parse_responses(transport.take_output())], [200] * 20)

    def test_unread_responses_are_bounded(self) -> None:
        """Unread responses do not pile up, not even to requests that were read together."""
        transport = self.site_fixture.connect()
        transport.peer_stalled = True
        for _ in range(10):
            transport.feed(encode_request("GET", "/invitation", None, {"Accept": "text/html"}) * 20)
        self.assertLess(transport.unsent, 500_000)
        transport.resume_peer()
        self.site_fixture.run_due_calls()
        self.assertEqual([response.status for response in parse_responses(transport.take_output())], [200] * 200)


ROUTE = {"return_route": "all"}


class SizeTests(HTTPTestCase):
    settings: ClassVar[dict[str, Any]] = {"limits": {**HIGH_LIMITS, "max_message_bytes": 5000}}

    def forward_of_size(self, length: int) -> bytes:
        """Pack a forward to Bob of `length` bytes."""
        raw = self.forward_to_bob()
        self.assertLess(len(raw), length)
        return raw + b" " * (length - len(raw))

    def assert_too_large(self, raw: bytes) -> None:
        """The output is a whole 413, and closes the connection."""
        (response,) = parse_responses(raw)
        self.assertEqual(response.status, 413)
        self.assertEqual(response.json["body"]["code"], "e.p.me.res.storage.message_too_big")
        self.assertEqual(response.headers["connection"], "close")
        self.assertEqual(response.headers["access-control-allow-origin"], "*")
        self.assertEqual(self.site_fixture.counter("mediator_rejected_total", reason="too_large"), 1)
        self.assertEqual(self.bob.count_queued(), 0)

    def test_accepts_body_of_exactly_the_limit(self) -> None:
        """`max_message_bytes` are accepted, by length or in chunks (reference 3.1)."""
        raw = self.forward_of_size(5000)
        self.assertEqual(self.site_fixture.post(raw).status, 202)
        transport = self.site_fixture.connect()
        transport.feed(b"POST /didcomm HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        transport.feed(b"1388\r\n%b\r\n0\r\n\r\n" % raw)
        self.assertEqual([response.status for response in parse_responses(transport.take_output())], [202])

    def test_refuses_by_content_length(self) -> None:
        """413 after the headers, before the body (reference 3.1)."""
        transport = self.site_fixture.connect()
        transport.feed(encode_request("POST", "/didcomm", self.forward_of_size(5001))[:-5001])
        self.assert_too_large(transport.take_output())
        self.site_fixture.run_due_calls()
        self.assertTrue(transport.half_closed)

    def test_refuses_oversized_body_instead_of_continue(self) -> None:
        """An oversized request gets 413 in place of 100-continue."""
        transport = self.site_fixture.connect()
        transport.feed(
            encode_request("POST", "/didcomm", self.forward_of_size(5001), {"Expect": "100-continue"})[:-5001]
        )
        self.assert_too_large(transport.take_output())

    def test_limit_holds_for_all_paths_and_methods(self) -> None:
        """The limit holds for all paths and methods of the listener."""
        for method, path in (("POST", "/"), ("GET", "/health"), ("PUT", "/nowhere")):
            transport = self.site_fixture.connect()
            transport.feed(encode_request(method, path, b"x" * 5001)[:-5001])
            self.assertEqual([response.status for response in parse_responses(transport.take_output())], [413])

    def test_refuses_growing_chunked_body(self) -> None:
        """413 with the first byte above the limit, without a Content-Length."""
        transport = self.site_fixture.connect()
        transport.feed(b"POST /didcomm HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        transport.feed(b"1388\r\n%b\r\n" % self.forward_of_size(5000))
        self.assertEqual(transport.take_output(), b"")
        transport.feed(b"1\r\n \r\n")
        self.assert_too_large(transport.take_output())

    def test_discards_rest_of_refused_body(self) -> None:
        """The rest of the body is read, so that the client reads the response; then the connection closes."""
        transport = self.site_fixture.connect()
        transport.feed(encode_request("POST", "/didcomm", b"x" * 50_000))
        self.assert_too_large(transport.take_output())
        self.site_fixture.run_due_calls()
        self.assertTrue(transport.lost)

    def test_aborts_client_that_keeps_sending(self) -> None:
        """A client that keeps sending is disconnected after five seconds, or a bound on the bytes."""
        slow, fast = self.site_fixture.connect(), self.site_fixture.connect()
        for transport in (slow, fast):
            transport.feed(b"POST /didcomm HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n")
        fast.feed(b"x" * 17_000_000)
        self.site_fixture.run_due_calls()
        self.assertTrue(fast.lost)
        self.assertFalse(slow.lost)
        self.site_fixture.clock.advance(5)
        self.site_fixture.run_due_calls()
        self.assertTrue(slow.lost)

    def test_invalid_content_length(self) -> None:
        """Twisted refuses an invalid Content-Length."""
        for length in ("-1", "5e3", "0x10"):
            transport = self.site_fixture.connect()
            transport.feed(b"POST /didcomm HTTP/1.1\r\nHost: a\r\nContent-Length: %b\r\n\r\n" % length.encode())
            self.assertTrue(transport.take_output().startswith(b"HTTP/1.1 400 "))


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
        """`/did` has the did:peer:2 as text, and nothing else."""
        response = self.get("/did")
        self.assertEqual(response.headers["content-type"], "text/plain; charset=utf-8")
        self.assertEqual(response.body.decode(), self.site_fixture.did)

    def test_invitation_as_json(self) -> None:
        """JSON by default and when JSON is preferred (reference 7.4)."""
        for accept in ("", "application/json", "*/*", "application/json, text/html"):
            response = self.get("/invitation", **({"Accept": accept} if accept else {}))
            self.assertEqual((response.status, response.headers["content-type"]), (200, "application/json"))
            self.assertEqual(response.json["type"], "https://didcomm.org/out-of-band/2.0/invitation")
            self.assertEqual(response.json["from"], self.site_fixture.did)
            self.assertEqual(response.headers["vary"], "Accept")

    def test_invitation_as_page(self) -> None:
        """The HTML page loads nothing from other hosts and sends no referrer."""
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
        """`/oob?_oobid=` has the same as `/invitation`, by Accept; another id is not found."""
        url = f"/oob?_oobid={self.get('/invitation').json['id']}"
        for accept in ("application/json", "text/html,*/*;q=0.8"):
            short, long = self.get(url, Accept=accept), self.get("/invitation", Accept=accept)
            # The second may have changed in between.
            self.assertTrue(short.headers.pop("date") and long.headers.pop("date"))
            self.assertEqual((short.status, short.body, short.headers), (200, long.body, long.headers))
        for unknown in ("/oob", "/oob?_oobid=", "/oob?_oobid=0", f"{url}&_oobid=0", "/oob?_oob=e30"):
            response = self.get(unknown, Accept="text/html")
            self.assertEqual((response.status, response.json["detail"]), (404, "unknown or missing _oobid"))

    def test_v1_invitation(self) -> None:
        """`/invitation/v1` has the invitation of DIDComm v1, or by Accept the page; so has the root with its URL."""
        invitation = self.get("/invitation/v1")
        self.assertEqual((invitation.status, invitation.headers["content-type"]), (200, "application/json"))
        self.assertEqual(invitation.json["@type"], "https://didcomm.org/out-of-band/1.1/invitation")
        self.assertEqual(invitation.json["services"][0]["serviceEndpoint"], "https://mediator.example/didcomm")
        page = self.get("/invitation", Accept="text/html")
        self.assertIn(b"https://mediator.example/invitation/v1", page.body)
        paths = ("/invitation/v1", "/invitation/v1/", "/invitation/v1?oob=e30", "/?oob=e30", "/?c_i=e30")
        for path in paths:
            self.assertEqual(self.get(path, Accept="text/html,*/*;q=0.8").body, page.body)
            self.assertEqual(self.get(path, Accept="application/json").body, invitation.body)
        self.assertEqual(self.get("/invitation/").json["type"], "https://didcomm.org/out-of-band/2.0/invitation")
        for path in ("/invitation/v1/x", "/invitation/v2", "/invitation//v1"):
            self.assertEqual(self.get(path).status, 404)

    def test_head_of_short_invitation_url(self) -> None:
        """HEAD has status and headers of GET, and no body."""
        url = f"/oob?_oobid={self.get('/invitation').json['id']}"
        for path, accept in ((url, "application/json"), (url, "text/html"), ("/oob?_oobid=0", "text/html")):
            got, transport = self.get(path, Accept=accept), self.site_fixture.connect(LOCAL)
            transport.feed(encode_request("HEAD", path, None, {"Accept": accept}))
            self.site_fixture.run_due_calls()
            (head,) = parse_responses(transport.take_output(), head=True)
            # The second may have changed in between.
            self.assertTrue(head.headers.pop("date") and got.headers.pop("date"))
            self.assertEqual((head.status, head.body, head.headers), (got.status, b"", got.headers))

    def test_openapi(self) -> None:
        """`/openapi.json` describes the commands."""
        response = self.get("/openapi.json")
        self.assertEqual((response.status, response.headers["content-type"]), (200, "application/json"))
        self.assertTrue(response.json["openapi"].startswith("3."))

    def test_health(self) -> None:
        """200 while the store answers, else 503 with a reason; `mediator_storage_up` follows."""
        response = self.get("/health")
        self.assertEqual((response.status, response.json), (200, {"status": "ok"}))
        self.assertEqual(self.site_fixture.counter("mediator_storage_up"), 1)
        self.successResultOf(self.site_fixture.store.close())
        response = self.get("/health")
        self.assertEqual(response.status, 503)
        self.assertEqual(response.json, {"status": "error", "detail": "store unavailable"})
        self.assertIn("retry-after", response.headers)
        self.assertEqual(self.site_fixture.counter("mediator_storage_up"), 0)

    def test_health_while_stopping(self) -> None:
        """503, so that load balancers send no more requests."""
        self.site_fixture.base.gate.stopService()
        response = self.get("/health")
        self.assertEqual((response.status, response.json["detail"]), (503, "stopping"))

    def test_health_of_hanging_store(self) -> None:
        """503 after the deadline."""
        transport = self.site_fixture.connect()
        with HeldStoreOperation(self.site_fixture, "ping"):
            transport.feed(encode_request("GET", "/health"))
            self.site_fixture.clock.advance(10)
        self.assertEqual([response.status for response in parse_responses(transport.take_output())], [503])

    def test_head(self) -> None:
        """HEAD has the headers of a GET and no body."""
        for path in PAGES:
            transport = self.site_fixture.connect(LOCAL)
            transport.feed(encode_request("HEAD", path) + encode_request("HEAD", path))
            self.site_fixture.run_due_calls()
            first, second = parse_responses(transport.take_output(), head=True)
            self.assertEqual(first.status, 200)
            self.assertGreater(int(first.headers["content-length"]), 0)
            if path != "/metrics":  # the scrape before counted itself
                self.assertEqual(first.headers["content-length"], str(len(self.get(path).body)))

    def test_options(self) -> None:
        """Browsers get an answer to preflight requests, and can read it even if it is 404."""
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

    def test_cors_headers_on_all_responses(self) -> None:
        """Refusals have CORS headers too, without credentials."""
        for response in (
            self.get("/did"),
            self.get("/nowhere"),
            self.get("/didcomm"),
            self.site_fixture.post(b"x"),
            self.site_fixture.post(self.forward_to_bob()),
            self.get("/metrics", peer="192.0.2.1"),
        ):
            self.assertEqual(response.headers["access-control-allow-origin"], "*")
            self.assertNotIn("access-control-allow-credentials", response.headers)

    def test_allowed_methods(self) -> None:
        """405 names the allowed methods (DIDComm reference section 11, row 32); its body has the form of the path."""
        error = b'{"type":"ERROR","code":"METHOD_NOT_ALLOWED"}'
        page = {"GET", "HEAD", "OPTIONS"}
        for method, path, allowed, body in (
            ("GET", "/didcomm", {"POST", "OPTIONS"}, b""),
            ("HEAD", "/didcomm/", {"POST", "OPTIONS"}, b""),
            ("PUT", "/didcomm", {"POST", "OPTIONS"}, b""),
            ("POST", "/health", page, error),
            ("PATCH", "/metrics", page, error),
            ("PUT", "/", page | {"POST"}, error),
            ("DELETE", "/", page | {"POST"}, error),
            ("PATCH", "/.well-known/did.json", page, error),
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

    def test_not_found(self) -> None:
        """404 for any method, also below a page, except for DIDs."""
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

    def test_socket_path_without_upgrade(self) -> None:
        """426 names the protocol (RFC 9110 section 15.5.22)."""
        for response in (self.get("/ws"), self.get("/ws", Upgrade="h2c", Connection="Upgrade")):
            self.assertEqual((response.status, response.headers["upgrade"]), (426, "websocket"))
            self.assertEqual(response.headers["connection"], "Upgrade")
            self.assertEqual(response.json, {"type": "ERROR", "code": "UPGRADE_REQUIRED"})

    def test_headers_reveal_nothing(self) -> None:
        """No response names software or version, or echoes the request."""
        for path in (*PAGES, "/nowhere-<script>", "/didcomm"):
            response = self.get(path, Cookie="a=<script>")
            self.assertEqual(response.headers["server"], "mediatord")
            self.assertIn("date", response.headers)
            self.assertNotIn("set-cookie", response.headers)
            self.assertNotIn(b"<script>", response.body)


class PagesWithoutV1Tests(HTTPTestCase):
    settings: ClassVar[dict[str, Any]] = {
        "public_url": "https://mediator.example",
        "didcomm_v1": {"enabled": False},
    }

    def test_no_v1_invitation(self) -> None:
        """Without DIDComm v1, nothing is said of it: no path, no parameter, no part of the page."""
        self.assertEqual(self.get("/invitation/v1").status, 404)
        for path in ("/?oob=e30", "/?c_i=e30"):
            self.assertEqual(self.get(path, Accept="text/html").json["id"], "did:web:mediator.example")
        page = self.get("/invitation", Accept="text/html")
        self.assertEqual(page.status, 200)
        self.assertNotIn(b"invitation/v1", page.body)


class MetricsTests(HTTPTestCase):
    settings: ClassVar[dict[str, Any]] = {
        "metrics": {"allow": ["127.0.0.0/8", "::1/128", "203.0.113.7/32"], "queue_size_top": 1},
        "trusted_proxies": ["198.51.100.0/24"],
    }

    def test_allowed_addresses(self) -> None:
        """Allowed addresses may read metrics; only trusted proxies may name them (contract section 3)."""
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
        """One series for each of the largest queues, one for the rest; a series disappears with its queue."""
        carol = InMemoryWallet(self.site_fixture).enrol()
        self.assertNotIn(b"mediator_message_queue_size{", self.get("/metrics").body)
        for wallet, count in ((self.bob, 3), (carol, 2)):
            for _ in range(count):
                self.site_fixture.post(pack_forward(self.site_fixture, wallet.did, wallet.make_payload()))
        response = self.get("/metrics")
        self.assertTrue(response.headers["content-type"].startswith("text/plain; version="))
        bobs, carols = (self.site_fixture.pseudonym(wallet.did) for wallet in (self.bob, carol))
        self.assertIn(f'mediator_message_queue_size{{did="{bobs}"}} 3.0\n'.encode(), response.body)
        self.assertIn(b'mediator_message_queue_size{did="other"} 2.0\n', response.body)
        self.bob.answer(
            f"{MP}/messages-received", {"message_id_list": [delivered.id for delivered in self.bob.fetch()]}
        )
        body = self.get("/metrics").body
        self.assertNotIn(bobs.encode(), body)
        self.assertIn(f'mediator_message_queue_size{{did="{carols}"}} 2.0\n'.encode(), body)

    def series(self, name: str) -> dict[tuple[str, ...], float]:
        """Return the series of a metric in a fresh scrape, by their labels."""
        families = text_string_to_metric_families(self.get("/metrics").body.decode())
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return {tuple(sample.labels.values()): sample.value for sample in samples}

    def test_store_metrics_agree(self) -> None:
        """Queues, backlog and ledger add up in each scrape, probe messages included."""
        own = self.site_fixture.base.probe_credentials.identities.identity("m").did
        self.successResultOf(self.site_fixture.store.grant(own))
        self.successResultOf(self.site_fixture.store.update_recipients(own, [(own, "add")], max_recipients=1))
        payload = Payload("own", b"{}", "json")
        self.successResultOf(self.site_fixture.store.enqueue(own, [payload], expires_at=9e9))
        # Only the largest queue has a series here.
        self.site_fixture.post(pack_forward(self.site_fixture, self.bob.did, self.bob.make_payload()))
        for count in range(2, 5):
            self.site_fixture.post(pack_forward(self.site_fixture, self.bob.did, self.bob.make_payload()))
            sizes = self.series("mediator_message_queue_size")
            self.assertEqual(sizes, {(self.site_fixture.pseudonym(self.bob.did),): count, ("other",): 1})
            entries = self.series("mediator_ledger_messages")
            waiting = [value for labels, value in entries.items() if "waiting" in labels]
            self.assertEqual(waiting, [count + 1, 0])
            self.assertEqual(self.series("mediator_messages_waiting"), {(): count + 1})
            self.site_fixture.clock.advance(7)
            now = self.site_fixture.clock.seconds()
            self.assertEqual(self.series("mediator_store_statistics_timestamp_seconds"), {(): now})
        with self.site_fixture.failing("read_statistics", StoreUnavailable()):
            self.site_fixture.clock.advance(7)
            self.assertEqual(self.series("mediator_store_statistics_timestamp_seconds"), {(): now})

    def test_expensive_query_is_throttled(self) -> None:
        """Queries of a twentieth of a second or longer take at most a twentieth of the time."""
        clock, statistics = self.site_fixture.clock, self.site_fixture.store.read_statistics
        query_calls: list[float] = []

        def slow_query(top: int) -> Any:
            query_calls.append(top)
            clock.advance(0.5)
            return statistics(top)

        self.patch(self.site_fixture.store, "read_statistics", slow_query)
        for _ in range(3):
            self.get("/metrics")
        self.assertEqual(len(query_calls), 1)
        clock.advance(10)
        self.get("/metrics")
        self.assertEqual(len(query_calls), 2)

    def test_metrics_without_store(self) -> None:
        """Metrics are served without the store, and say so."""
        self.successResultOf(self.site_fixture.store.close())
        response = self.get("/metrics")
        self.assertEqual(response.status, 200)
        self.assertIn(b"mediator_storage_up 0.0\n", response.body)

    def test_slow_queue_count_keeps_last_values(self) -> None:
        """A count that times out does not mark the store as down; its last values stay."""
        self.site_fixture.post(pack_forward(self.site_fixture, self.bob.did, self.bob.make_payload()))
        sizes = f'mediator_message_queue_size{{did="{self.site_fixture.pseudonym(self.bob.did)}"}} 1.0\n'.encode()
        self.assertIn(sizes, self.get("/metrics").body)
        with self.site_fixture.failing("read_statistics", StoreUnavailable()):
            response = self.get("/metrics")
        self.assertEqual(response.status, 200)
        self.assertIn(sizes, response.body)
        self.assertIn(b"mediator_storage_up 1.0\n", response.body)

    def test_rate_limit_by_forwarded_address(self) -> None:
        """The rate limit applies to the client behind a trusted proxy."""
        site_fixture = InMemorySite(self, limits={"ip_per_minute": 1}, trusted_proxies=["198.51.100.0/24"])
        for client, status in (("203.0.113.1", 400), ("203.0.113.2", 400), ("203.0.113.1", 429)):
            raw = pack_forward(site_fixture, "did:x:y", b"{}")
            response = site_fixture.request("POST", "/didcomm", raw, {"X-Forwarded-For": client}, "198.51.100.1")
            self.assertEqual(response.status, status)


@implementer(IHalfCloseableProtocol)
class StubbornClient(Protocol):
    """Client that sends everything although the server closes its side, and then disconnects."""

    def __init__(self) -> None:
        self.got = b""
        self.over: Deferred[bytes] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        self.got += data

    def readConnectionLost(self) -> None:  # noqa: N802  the interface's name
        assert self.transport is not None
        self.transport.loseConnection()

    def writeConnectionLost(self) -> None:  # noqa: N802  the interface's name
        """Ignore."""

    def connectionLost(self, reason: Failure | None = None) -> None:
        self.over.callback(self.got)


class SingleConnectionFactory(Factory):
    """Factory of the site for one connection, which reports its end."""

    def __init__(self, site: MediatorSite) -> None:
        self._site = site
        self.over: Deferred[None] = Deferred()

    def buildProtocol(self, addr: IAddress | None) -> Protocol | None:
        protocol: Any = self._site.buildProtocol(addr)
        lost = protocol.connectionLost

        def on_lost(reason: Failure) -> None:
            lost(reason)
            self.over.callback(None)

        protocol.connectionLost = on_lost
        built: Protocol = protocol
        return built


class RealSocketTests(TestCase):
    """Behaviour of real sockets."""

    def setUp(self) -> None:
        reactor: Any = _reactor
        site_fixture = InMemorySite(self, limits={**HIGH_LIMITS, "max_message_bytes": 5000})
        self.server = SingleConnectionFactory(site_fixture.site)
        port = reactor.listenTCP(0, self.server, interface=LOCAL)
        self.addCleanup(port.stopListening)
        self.endpoint = TCP4ClientEndpoint(reactor, LOCAL, port.getHost().port)

    async def refusal_of(self, sent: bytes) -> None:
        """Send bytes and return the 413."""
        client = StubbornClient()
        await connectProtocol(self.endpoint, client)
        assert client.transport is not None
        client.transport.write(sent)
        (response,) = parse_responses(await client.over)
        self.assertEqual(response.status, 413)
        self.assertEqual(response.json["body"]["code"], "e.p.me.res.storage.message_too_big")
        await self.server.over

    async def test_refusal_arrives_without_body(self) -> None:
        """A client that has sent only its headers gets the whole response."""
        await self.refusal_of(encode_request("POST", "/didcomm", b"x" * 5001)[:-5001])

    async def test_refusal_arrives_despite_body(self) -> None:
        """A client that sends megabytes before reading gets the whole response, and no reset."""
        await self.refusal_of(encode_request("POST", "/didcomm", b"x" * 4_000_000))
