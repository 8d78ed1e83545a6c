"""Reply routing: every row of the table in reference 3.3."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import DIDDocumentCache, unpack_message
from tests.didcomm.test_endpoint_delivery import INBOX, EndpointMediator, identity_with_services, payload_of, respond
from tests.in_memory_mediator import MP, PING, FakeSocket, InMemoryWallet

OTHER = "https://wallet.example/other"

# No http(s) endpoint for a response (reference 3.3 and 3.4).
ENDPOINTLESS: tuple[dict[str, Any], ...] = (
    {"uri": "didcomm:transport/queue"},
    {"uri": "wss://wallet.example/ws"},
    {"uri": "http://127.0.0.1:8080/didcomm"},
    {"uri": "http://127.0.0.1:8080/"},
    {"uri": "did:example:mediator"},
)

ROUTES: tuple[dict[str, Any], ...] = ({}, {"return_route": "none"}, {"return_route": "all"})


class ReplyRoutingTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = EndpointMediator(self)
        self.poster = self.in_memory.poster
        self.bare = InMemoryWallet(self.in_memory, WalletIdentity.generate())
        self.reachable = InMemoryWallet(self.in_memory, identity_with_services({"uri": INBOX}))

    def route_of_ping_response(
        self, guest: InMemoryWallet, *, socket: FakeSocket | None = None, **headers: Any
    ) -> str:
        """Route of the response to a ping: `connection`, `endpoint` or `nowhere`."""
        reply = self.in_memory.receive(guest.pack(PING, id="ping-1", **headers), socket)
        posted = self.poster.take_posts()
        if reply.status == 200:
            self.assertEqual(posted, [])
            raw = reply.body
        else:
            self.assertEqual((reply.status, reply.body), (202, b""))
            if not posted:
                return "nowhere"
            self.assertEqual([post.url for post in posted], [INBOX])
            self.assertEqual(posted[0].content_type, b"application/didcomm-encrypted+json")
            raw = posted[0].body
        opened = guest.open(raw)
        self.assertEqual((opened.sender, opened.message.thid), (self.in_memory.did, "ping-1"))
        self.assertEqual(opened.message.type.key[2], "pingresponse")
        return "connection" if reply.status == 200 else "endpoint"

    def test_http_all(self) -> None:
        """In the response, with or without an endpoint."""
        for guest in (self.bare, self.reachable):
            self.assertEqual(self.route_of_ping_response(guest, return_route="all"), "connection")

    def test_http_thread(self) -> None:
        """The same for this very thread, named or not."""
        for guest in (self.bare, self.reachable):
            self.assertEqual(self.route_of_ping_response(guest, return_route="thread"), "connection")
            self.assertEqual(
                self.route_of_ping_response(guest, return_route="thread", return_route_thread="ping-1"), "connection"
            )
            self.assertEqual(
                self.route_of_ping_response(
                    guest, return_route="thread", thid="ping-1", return_route_thread="ping-1"
                ),
                "connection",
            )

    def test_http_other_thread(self) -> None:
        """For another thread, like `none`."""
        headers: dict[str, Any] = {"return_route": "thread", "return_route_thread": "another"}
        self.assertEqual(self.route_of_ping_response(self.bare, **headers), "nowhere")
        self.assertEqual(self.route_of_ping_response(self.reachable, **headers), "endpoint")

    def test_http_absent(self) -> None:
        """Posted to an endpoint of the sender if there is one, else in the response (decision D14)."""
        self.assertEqual(self.route_of_ping_response(self.reachable), "endpoint")
        self.assertEqual(self.route_of_ping_response(self.bare), "connection")
        self.assertEqual(
            self.route_of_ping_response(InMemoryWallet(self.in_memory, identity_with_services(*ENDPOINTLESS))),
            "connection",
        )

    def test_http_none(self) -> None:
        """Posted to an endpoint of the sender, else dropped and not kept."""
        self.assertEqual(self.route_of_ping_response(self.reachable, return_route="none"), "endpoint")
        self.assertEqual(self.route_of_ping_response(self.bare, return_route="none"), "nowhere")
        self.assertEqual(
            self.route_of_ping_response(
                InMemoryWallet(self.in_memory, identity_with_services(*ENDPOINTLESS)), return_route="none"
            ),
            "nowhere",
        )
        self.assertEqual(self.bare.enrol().count_queued(), 0)

    def test_socket(self) -> None:
        """On the socket, whatever the route but `none`, with or without an endpoint."""
        for guest in (self.bare, self.reachable):
            for headers in ({}, {"return_route": "all"}, {"return_route": "thread"}):
                self.assertEqual(
                    self.route_of_ping_response(guest, socket=self.in_memory.socket(), **headers), "connection"
                )

    def test_socket_none(self) -> None:
        """Nothing on the socket; posted if there is an endpoint."""
        another = {"return_route": "thread", "return_route_thread": "another"}
        for headers in ({"return_route": "none"}, another):
            socket = self.in_memory.socket()
            self.assertEqual(self.route_of_ping_response(self.bare, socket=socket, **headers), "nowhere")
            self.assertEqual(self.route_of_ping_response(self.reachable, socket=socket, **headers), "endpoint")
            self.assertEqual(socket.frames, [])

    def test_request_without_route_is_executed(self) -> None:
        """A request without a route for its response is executed (reference 5.3)."""
        for headers in ROUTES[:2]:
            guest = InMemoryWallet(self.in_memory, identity_with_services({"uri": INBOX}))
            raw = guest.pack("https://didcomm.org/coordinate-mediation/3.0/mediate-request", **headers)
            self.assertEqual(self.in_memory.receive(raw).status, 202)
            self.poster.take_posts()
            self.assertEqual(guest.answer(f"{MP}/status-request").body["message_count"], 0)

    def test_problem_reports_use_the_connection(self) -> None:
        """Always in the response itself, whatever `return_route` says (reference 3.3)."""
        for guest in (self.bare, self.reachable):
            for headers in ROUTES:
                reply = self.in_memory.receive(guest.pack(f"{MP}/status-request", **headers))
                self.assertEqual(reply.status, 200)
                self.assertEqual(guest.open(reply.body).body["code"], "e.p.req.not_enroll")
        self.assertEqual(self.poster.take_posts(), [])

    def test_ping_without_requested_response(self) -> None:
        """A ping that requests no response gets none."""
        for route in ("all", "none"):
            raw = self.reachable.pack(PING, {"response_requested": False}, return_route=route)
            self.assertEqual(self.in_memory.receive(raw).status, 202)
        self.assertEqual(self.poster.take_posts(), [])

    def test_tries_endpoints_once(self) -> None:
        """Each endpoint of the sender is tried once, in order."""
        guest = InMemoryWallet(self.in_memory, identity_with_services({"uri": INBOX}, *ENDPOINTLESS, {"uri": OTHER}))
        self.assertEqual(self.in_memory.receive(guest.pack(PING)).status, 202)
        first = self.poster.take_post()
        self.assertEqual(first.url, INBOX)
        respond(first, 500)
        second = self.poster.take_post()
        self.assertEqual(second.url, OTHER)
        respond(second, 500)
        self.in_memory.clock.advance(3600)
        self.assertEqual(self.poster.take_posts(), [])

    def test_stops_at_first_success(self) -> None:
        """No endpoint is tried after a success."""
        guest = InMemoryWallet(self.in_memory, identity_with_services({"uri": INBOX}, {"uri": OTHER}))
        self.in_memory.receive(guest.pack(PING))
        respond(self.poster.take_post(), 202)
        self.assertEqual(self.poster.take_posts(), [])

    def test_endpoint_with_routing_keys(self) -> None:
        """The response is wrapped for them, with the sender as `next`."""
        guard = WalletIdentity.generate()
        endpoint = {"uri": INBOX, "routing_keys": [guard.did], "routingKeys": [guard.did]}
        guest = InMemoryWallet(self.in_memory, identity_with_services(endpoint))
        self.in_memory.receive(guest.pack(PING))
        inside = payload_of(
            unpack_message(self.poster.take_post().body, guard, DIDDocumentCache().resolve), guest.did
        )
        self.assertEqual(guest.open(inside).message.type.key[2], "pingresponse")
