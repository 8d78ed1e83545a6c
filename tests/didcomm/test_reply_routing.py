"""Which way an answer goes: every row of the table in reference 3.3."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import DIDDocumentCache, unpack_message
from tests.didcomm.test_endpoint_delivery import INBOX, EndpointMediator, answer, payload_of, with_services
from tests.in_memory_mediator import MP, PING, FakeSocket, InMemoryWallet

OTHER = "https://wallet.example/other"

# No http(s) endpoint that an answer could be POSTed to (reference 3.3 and 3.4).
ENDPOINTLESS: tuple[dict[str, Any], ...] = (
    {"uri": "didcomm:transport/queue"},
    {"uri": "wss://wallet.example/ws"},
    {"uri": "http://127.0.0.1:8080/didcomm"},
    {"uri": "http://127.0.0.1:8080/"},
    {"uri": "did:example:mediator"},
)

ROUTES: tuple[dict[str, Any], ...] = ({}, {"return_route": "none"}, {"return_route": "all"})


class ReplyingTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = EndpointMediator(self)
        self.office = self.in_memory.office
        self.bare = InMemoryWallet(self.in_memory, WalletIdentity.generate())
        self.reachable = InMemoryWallet(self.in_memory, with_services({"uri": INBOX}))

    def ping(self, guest: InMemoryWallet, *, socket: FakeSocket | None = None, **headers: Any) -> str:
        """Which way the answer to a ping goes: `connection`, `endpoint` or `nowhere`."""
        reply = self.in_memory.receive(guest.pack(PING, id="ping-1", **headers), socket)
        posted = self.office.taken()
        if reply.status == 200:
            self.assertEqual(posted, [])
            raw = reply.body
        else:
            self.assertEqual((reply.status, reply.body), (202, b""))
            if not posted:
                return "nowhere"
            self.assertEqual([one.url for one in posted], [INBOX])
            self.assertEqual(posted[0].content_type, b"application/didcomm-encrypted+json")
            raw = posted[0].body
        opened = guest.open(raw)
        self.assertEqual((opened.sender, opened.message.thid), (self.in_memory.did, "ping-1"))
        self.assertEqual(opened.message.type.key[2], "pingresponse")
        return "connection" if reply.status == 200 else "endpoint"

    def test_http_all(self) -> None:
        """In the response, endpoint or not."""
        for guest in (self.bare, self.reachable):
            self.assertEqual(self.ping(guest, return_route="all"), "connection")

    def test_http_thread(self) -> None:
        """Likewise, for this very thread, whether it is named or not."""
        for guest in (self.bare, self.reachable):
            self.assertEqual(self.ping(guest, return_route="thread"), "connection")
            self.assertEqual(self.ping(guest, return_route="thread", return_route_thread="ping-1"), "connection")
            self.assertEqual(
                self.ping(guest, return_route="thread", thid="ping-1", return_route_thread="ping-1"), "connection"
            )

    def test_http_another_thread(self) -> None:
        """Named for another thread, it says nothing good about this one: as `none`."""
        headers: dict[str, Any] = {"return_route": "thread", "return_route_thread": "another"}
        self.assertEqual(self.ping(self.bare, **headers), "nowhere")
        self.assertEqual(self.ping(self.reachable, **headers), "endpoint")

    def test_http_absent(self) -> None:
        """POSTed to an endpoint of the sender if there is one, else in the response (decision D14)."""
        self.assertEqual(self.ping(self.reachable), "endpoint")
        self.assertEqual(self.ping(self.bare), "connection")
        self.assertEqual(self.ping(InMemoryWallet(self.in_memory, with_services(*ENDPOINTLESS))), "connection")

    def test_http_none(self) -> None:
        """POSTed to an endpoint of the sender, else dropped; nothing of it is kept."""
        self.assertEqual(self.ping(self.reachable, return_route="none"), "endpoint")
        self.assertEqual(self.ping(self.bare, return_route="none"), "nowhere")
        self.assertEqual(
            self.ping(InMemoryWallet(self.in_memory, with_services(*ENDPOINTLESS)), return_route="none"), "nowhere"
        )
        self.assertEqual(self.bare.enrol().waiting(), 0)

    def test_socket(self) -> None:
        """On the socket, whatever was given but an explicit `none`, and endpoint or not."""
        for guest in (self.bare, self.reachable):
            for headers in ({}, {"return_route": "all"}, {"return_route": "thread"}):
                self.assertEqual(self.ping(guest, socket=self.in_memory.socket(), **headers), "connection")

    def test_socket_none(self) -> None:
        """Nothing on the socket; POSTed if there is an endpoint."""
        another = {"return_route": "thread", "return_route_thread": "another"}
        for headers in ({"return_route": "none"}, another):
            socket = self.in_memory.socket()
            self.assertEqual(self.ping(self.bare, socket=socket, **headers), "nowhere")
            self.assertEqual(self.ping(self.reachable, socket=socket, **headers), "endpoint")
            self.assertEqual(socket.frames, [])

    def test_requests_are_served_whichever_way_the_answer_goes(self) -> None:
        """A request with nowhere to answer to is done all the same (reference 5.3)."""
        for headers in ROUTES[:2]:
            guest = InMemoryWallet(self.in_memory, with_services({"uri": INBOX}))
            raw = guest.pack("https://didcomm.org/coordinate-mediation/3.0/mediate-request", **headers)
            self.assertEqual(self.in_memory.receive(raw).status, 202)
            self.office.taken()
            self.assertEqual(guest.answer(f"{MP}/status-request").body["message_count"], 0)

    def test_problem_reports(self) -> None:
        """They always travel in the response itself, whatever `return_route` says (reference 3.3)."""
        for guest in (self.bare, self.reachable):
            for headers in ROUTES:
                reply = self.in_memory.receive(guest.pack(f"{MP}/status-request", **headers))
                self.assertEqual(reply.status, 200)
                self.assertEqual(guest.open(reply.body).body["code"], "e.p.req.not_enroll")
        self.assertEqual(self.office.taken(), [])

    def test_nothing_to_answer(self) -> None:
        """A ping that wants no response gets none, anywhere."""
        for route in ("all", "none"):
            raw = self.reachable.pack(PING, {"response_requested": False}, return_route=route)
            self.assertEqual(self.in_memory.receive(raw).status, 202)
        self.assertEqual(self.office.taken(), [])

    def test_the_next_endpoint(self) -> None:
        """One round over the sender's endpoints: the next one when one fails, and no second round."""
        guest = InMemoryWallet(self.in_memory, with_services({"uri": INBOX}, *ENDPOINTLESS, {"uri": OTHER}))
        self.assertEqual(self.in_memory.receive(guest.pack(PING)).status, 202)
        first = self.office.one()
        self.assertEqual(first.url, INBOX)
        answer(first, 500)
        second = self.office.one()
        self.assertEqual(second.url, OTHER)
        answer(second, 500)
        self.in_memory.clock.advance(3600)
        self.assertEqual(self.office.taken(), [])

    def test_the_first_endpoint_that_takes_it(self) -> None:
        """Is the last one that is tried."""
        guest = InMemoryWallet(self.in_memory, with_services({"uri": INBOX}, {"uri": OTHER}))
        self.in_memory.receive(guest.pack(PING))
        answer(self.office.one(), 202)
        self.assertEqual(self.office.taken(), [])

    def test_an_endpoint_behind_routing_keys(self) -> None:
        """The answer is wrapped for them, with the sender as `next`."""
        guard = WalletIdentity.generate()
        endpoint = {"uri": INBOX, "routing_keys": [guard.did], "routingKeys": [guard.did]}
        guest = InMemoryWallet(self.in_memory, with_services(endpoint))
        self.in_memory.receive(guest.pack(PING))
        inside = payload_of(unpack_message(self.office.one().body, guard, DIDDocumentCache().resolve), guest.did)
        self.assertEqual(guest.open(inside).message.type.key[2], "pingresponse")
