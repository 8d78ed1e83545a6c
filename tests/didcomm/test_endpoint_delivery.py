"""Delivery by POST to the endpoints of accounts, and wrapping for further keys (reference 4.6 and 4.7)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from mediatord.app.protocol_services import DIDCommServices
from mediatord.config.settings import Config
from mediatord.didcomm.endpoint_delivery import MAX_CONCURRENT_POSTS
from mediatord.net.outbound_http import OutboundAddressError, OutboundRequestError, OutboundResponse
from mediatord.protocol.didcomm.did_methods import make_did_peer_2
from mediatord.protocol.didcomm.keys import PrivateKey
from mediatord.wallet.didcomm_identity import WalletIdentity, WalletKey
from mediatord.wallet.didcomm_messages import DIDDocumentCache, OpenedMessage, unpack_message
from tests.in_memory_mediator import InMemoryMediator, InMemoryWallet, pack_forward
from tests.wallet_identities import generate_identity

PLENTY = {"ip_per_minute": 10_000}
INBOX = "https://wallet.example/inbox"


@dataclass
class PendingPost:
    """A POST that was begun, and waits for its answer."""

    url: str
    body: bytes = field(repr=False)
    content_type: bytes
    timeout: float
    answer: Deferred[OutboundResponse] = field(default_factory=Deferred)


class FakePoster:
    """Takes every POST and answers none before the test says so, in the place of Outbound."""

    def __init__(self) -> None:
        self.posted: list[PendingPost] = []

    async def post(self, url: str, body: bytes, content_type: bytes, *, timeout: float) -> OutboundResponse:
        """Note it, and wait."""
        posted = PendingPost(url, body, content_type, timeout)
        self.posted.append(posted)
        return await posted.answer

    async def get(self, url: str, *, limit: int, timeout: float) -> OutboundResponse:
        """There is nothing to be had."""
        raise OutboundRequestError("ConnectionRefusedError")

    def taken(self) -> list[PendingPost]:
        """What was begun since this was asked last."""
        posted, self.posted = self.posted, []
        return posted

    def one(self) -> PendingPost:
        """The one that was begun since this was asked last."""
        (posted,) = self.taken()
        return posted


def answer(posted: PendingPost, status: int) -> None:
    """Have the peer answer."""
    posted.answer.callback(OutboundResponse(status, b"", b""))


class EndpointMediator(InMemoryMediator):
    """A house whose requests to the outside all end in a post office."""

    def __init__(self, test: SynchronousTestCase, **settings: Any) -> None:
        super().__init__(test, limits=PLENTY, **settings)
        for service in (self.didcomm.due, self.didcomm.housekeeping):
            service.stopService()
        self.office = FakePoster()
        self.base.outbound = cast(Any, self.office)
        self.didcomm = DIDCommServices(self.base, self.config)
        for service in (self.didcomm.due, self.didcomm.housekeeping):
            service.startService()


def with_services(*endpoints: dict[str, Any]) -> WalletIdentity:
    """An identity whose document has these endpoints, in this order."""
    agreement, signing = PrivateKey.generate("X25519"), PrivateKey.generate("Ed25519")
    services = [
        {"type": "DIDCommMessaging", "serviceEndpoint": {"accept": ["didcomm/v2"], **one}} for one in endpoints
    ]
    did = make_did_peer_2([("E", agreement.public), ("V", signing.public)], services)
    return WalletIdentity(did, WalletKey(f"{did}#key-1", agreement), WalletKey(f"{did}#key-2", signing))


def payload_of(opened: OpenedMessage, next_: str) -> bytes:
    """The one payload of a forward to `next_`, compact."""
    assert opened.message.type.key == ("routing", 2, "forward")
    assert opened.body == {"next": next_}
    (attachment,) = json.loads(opened.plaintext)["attachments"]
    assert set(attachment["data"]) == {"json"}
    return json.dumps(attachment["data"]["json"], separators=(",", ":")).encode()


class FailoverTests(SynchronousTestCase):
    def start(self, identity: WalletIdentity | None = None, **didcomm: Any) -> InMemoryWallet:
        """An enrolled wallet; by default its account has the endpoint INBOX, named in the configuration."""
        identity = identity or WalletIdentity.generate()
        settings = {"failover": "configured", "endpoints": {identity.did: INBOX}, **didcomm}
        self.in_memory = EndpointMediator(self, didcomm=settings)
        self.office = self.in_memory.office
        return InMemoryWallet(self.in_memory, identity).enrol()

    def test_of_one_who_is_not_served(self) -> None:
        """Nothing goes there any more; it waits in the queue."""
        bob = self.start()
        values = self.in_memory.config.model_dump()
        new = Config.model_validate({**values, "didcomm": {**values["didcomm"], "deny": [bob.did]}})
        self.in_memory.base.reloader.reload(lambda: new)
        self.assertEqual(self.in_memory.receive(pack_forward(self.in_memory, bob.did, bob.letter())).status, 202)
        self.assertEqual(self.office.taken(), [])
        self.in_memory.base.reloader.reload(lambda: self.in_memory.config)
        self.assertEqual(bob.waiting(), 1)

    def forward(self, next_: str, payload: bytes, **headers: Any) -> bytes:
        """A stranger's forward, which has to be taken."""
        reply = self.in_memory.receive(pack_forward(self.in_memory, next_, payload, **headers))
        self.assertEqual((reply.status, reply.body), (202, b""))
        return payload

    def test_off_by_default(self) -> None:
        """Without `failover` nothing is ever POSTed, whatever else is configured."""
        bob = self.start(failover="none")
        self.forward(bob.did, bob.letter())
        self.assertEqual(self.office.taken(), [])

    def test_a_post_delivers(self) -> None:
        """
        The payload itself is POSTed, with the exact media type and ten seconds of time. It stays queued until the
        2xx; then it is delivered and gone.
        """
        bob = self.start()
        payload = self.forward(bob.did, bob.letter())
        posted = self.office.one()
        self.assertEqual((posted.url, posted.body), (INBOX, payload))
        self.assertEqual((posted.content_type, posted.timeout), (b"application/didcomm-encrypted+json", 10.0))
        self.assertEqual(bob.waiting(), 1)
        self.assertEqual(self.in_memory.counter("mediator_messages_stored_total"), 1)
        answer(posted, 200)
        self.assertEqual(bob.waiting(), 0)
        self.assertEqual(self.in_memory.counter("mediator_messages_delivered_total"), 1)
        (event,) = self.in_memory.events("msg.ack")
        self.assertEqual(event["path"], "http")

    def test_what_counts_as_taken(self) -> None:
        """Every 2xx, and nothing else: Outbound has already followed what may be followed."""
        for status in (200, 202, 204, 299, 301, 307, 400, 404, 500):
            bob = self.start()
            self.forward(bob.did, bob.letter())
            answer(self.office.one(), status)
            self.assertEqual(bob.waiting(), 0 if status < 300 else 1, status)

    def test_a_socket_comes_first(self) -> None:
        """Nothing is POSTed while a live socket takes it; a socket that does not take it is as good as none."""
        bob = self.start()
        socket = bob.go_live()
        self.forward(bob.did, bob.letter())
        self.assertEqual(self.office.taken(), [])
        socket.takes = False
        self.forward(bob.did, bob.letter())
        self.assertEqual(self.office.one().url, INBOX)

    def test_five_tries(self) -> None:
        """After each failure a longer pause, 1 s to 60 s; after the fifth it just waits in the queue."""
        bob = self.start()
        payload = self.forward(bob.did, bob.letter())
        for pause in (1, 4, 16, 60):
            answer(self.office.one(), 503)
            self.in_memory.clock.advance(pause - 0.1)
            self.assertEqual(self.office.taken(), [])
            self.in_memory.clock.advance(0.2)
        answer(self.office.one(), 503)
        self.in_memory.clock.advance(3600)
        self.assertEqual(self.office.taken(), [])
        self.assertEqual([one.payload for one in bob.fetch()], [payload])
        self.assertEqual(self.in_memory.counter("mediator_messages_delivered_total"), 0)

    def test_a_later_try_delivers(self) -> None:
        """One 2xx is enough, and nothing follows it."""
        bob = self.start()
        self.forward(bob.did, bob.letter())
        answer(self.office.one(), 500)
        self.in_memory.clock.advance(1)
        answer(self.office.one(), 202)
        self.assertEqual(bob.waiting(), 0)
        self.in_memory.clock.advance(3600)
        self.assertEqual(self.office.taken(), [])

    def test_failures_of_every_kind(self) -> None:
        """No connection, and an address that is off limits, are failures like any other: no noise, a next try."""
        for failure in (OutboundRequestError("TimeoutError"), OutboundAddressError("PrivateAddress")):
            bob = self.start()
            self.forward(bob.did, bob.letter())
            self.office.one().answer.errback(failure)
            self.in_memory.clock.advance(1)
            answer(self.office.one(), 200)
            self.assertEqual(bob.waiting(), 0)

    def test_a_second_endpoint_before_a_pause(self) -> None:
        """Every endpoint of the account's document is tried in its order, before backing off (reference 4.7)."""
        bob = self.start(
            with_services({"uri": "https://a.example/"}, {"uri": "https://b.example/"}),
            failover="account-did",
            endpoints={},
        )
        self.forward(bob.did, bob.letter())
        for _ in range(2):
            first = self.office.one()
            self.assertEqual(first.url, "https://a.example/")
            answer(first, 500)
            second = self.office.one()
            self.assertEqual(second.url, "https://b.example/")
            answer(second, 500)
            self.assertEqual(self.office.taken(), [])
            self.in_memory.clock.advance(4)
        answer(self.office.one(), 200)
        self.assertEqual(bob.waiting(), 0)

    def test_configured_endpoints_win(self) -> None:
        """What the operator configured is used instead of the document."""
        identity = with_services({"uri": "https://document.example/"})
        bob = self.start(identity, failover="account-did", endpoints={identity.did: INBOX})
        self.forward(bob.did, bob.letter())
        self.assertEqual(self.office.one().url, INBOX)

    def test_the_document_of_next_is_not_asked(self) -> None:
        """Only the account's endpoint counts; the recipient DID's own document points back at us (reference 4.7)."""
        other = with_services({"uri": "https://recipient.example/"})
        bob = self.start(failover="account-did", endpoints={})
        bob.enrol(other.did)
        self.forward(other.did, bob.letter())
        self.assertEqual(self.office.taken(), [])

    def test_never_to_ourselves(self) -> None:
        """Our own URIs and DIDs are skipped, in the configuration and in documents (reference 4.7)."""
        url = "https://mediator.example"
        ours = [url, f"{url}/", f"{url}/didcomm", f"{url}/didcomm/"]
        for uri in ours:
            identity = WalletIdentity.generate()
            self.in_memory = EndpointMediator(
                self, public_url=url, didcomm={"failover": "configured", "endpoints": {identity.did: uri}}
            )
            bob = InMemoryWallet(self.in_memory, identity).enrol()
            self.forward(bob.did, bob.letter())
            self.assertEqual(self.in_memory.office.taken(), [], uri)
        self.in_memory = EndpointMediator(self, public_url=url, didcomm={"failover": "account-did"})
        did, web = self.in_memory.did, self.in_memory.base.identity.now.web_did
        services = [{"uri": uri} for uri in (*ours, did, web, "wss://x.example/ws", "didcomm:transport/queue", INBOX)]
        bob = InMemoryWallet(self.in_memory, with_services(*services)).enrol()
        self.forward(bob.did, bob.letter())
        posted = self.in_memory.office.one()
        self.assertEqual(posted.url, INBOX)
        answer(posted, 500)
        self.assertEqual(self.in_memory.office.taken(), [])

    def test_an_endpoint_that_is_a_did(self) -> None:
        """It is resolved, and the payload wrapped for that mediator's keys, with the recipient as `next`."""
        mediator = with_services({"uri": "https://other.example/didcomm"})
        for source in ("configured", "account-did"):
            bob = self.start(with_services({"uri": mediator.did}), failover=source, endpoints={})
            if source == "configured":
                identity = WalletIdentity.generate()
                bob = self.start(identity, endpoints={identity.did: mediator.did})
            payload = self.forward(bob.did, bob.letter())
            posted = self.office.one()
            self.assertEqual(posted.url, "https://other.example/didcomm")
            opened = unpack_message(posted.body, mediator, DIDDocumentCache().resolve)
            self.assertEqual(opened.message.to, (mediator.did,))
            self.assertIsNone(opened.sender)
            self.assertEqual(payload_of(opened, bob.did), payload)
            answer(posted, 202)
            self.assertEqual(bob.waiting(), 0)

    def test_one_hop_only(self) -> None:
        """A DID that leads to a DID, or nowhere, is no endpoint (Routing 2.0, "Using a DID as an endpoint")."""
        second = with_services({"uri": "https://second.example/"})
        for did in (with_services({"uri": second.did}).did, WalletIdentity.generate().did, "did:example:unknown"):
            bob = self.start(with_services({"uri": did}), failover="account-did", endpoints={})
            self.forward(bob.did, bob.letter())
            self.assertEqual(self.office.taken(), [])
            self.assertEqual(bob.waiting(), 1)

    def test_routing_keys_of_an_endpoint(self) -> None:
        """An endpoint behind routing keys gets what they can unwrap, the first one first."""
        outer, inner = WalletIdentity.generate(), WalletIdentity.generate()
        endpoint = {"uri": INBOX, "routing_keys": [outer.did, inner.did], "routingKeys": [outer.did, inner.did]}
        bob = self.start(with_services(endpoint), failover="account-did", endpoints={})
        payload = self.forward(bob.did, bob.letter())
        book = DIDDocumentCache()
        layer = payload_of(unpack_message(self.office.one().body, outer, book.resolve), inner.did)
        self.assertEqual(payload_of(unpack_message(layer, inner, book.resolve), bob.did), payload)

    def test_a_bounded_number_under_way(self) -> None:
        """Beyond it messages just wait in the queue; when one is done there is room for another."""
        bob = self.start()
        for _ in range(MAX_CONCURRENT_POSTS + 5):
            self.forward(bob.did, bob.letter())
        posted = self.office.taken()
        self.assertEqual(len(posted), MAX_CONCURRENT_POSTS)
        self.assertEqual(bob.waiting(), MAX_CONCURRENT_POSTS + 5)
        answer(posted[0], 200)
        self.forward(bob.did, bob.letter())
        self.assertEqual(len(self.office.taken()), 1)

    def test_a_delayed_message(self) -> None:
        """It is POSTed when it is due, not before (reference 4.5)."""
        bob = self.start()
        self.forward(bob.did, bob.letter(), delay_milli=30_000)
        self.in_memory.clock.advance(29)
        self.assertEqual(self.office.taken(), [])
        self.in_memory.clock.advance(2)
        self.assertEqual(self.office.one().url, INBOX)

    def test_stopping(self) -> None:
        """What is under way is given up without a word, and is still queued; no timer stays behind."""
        bob = self.start()
        self.in_memory.clock.advance(0)
        timers = len(self.in_memory.clock.getDelayedCalls())
        self.forward(bob.did, bob.letter("one"))
        self.forward(bob.did, bob.letter("two"))
        answer(self.office.taken()[0], 500)
        self.in_memory.didcomm.endpoints.stop()
        self.in_memory.clock.advance(0)
        self.assertEqual(len(self.in_memory.clock.getDelayedCalls()), timers)
        self.assertEqual(bob.waiting(), 2)

    def test_stopping_while_it_is_removed(self) -> None:
        """What was taken counts as delivered, as the store removes it all the same; stopping waits for that."""
        bob = self.start()
        self.forward(bob.did, bob.letter())
        remove, removing = self.in_memory.store.remove_messages, Deferred[None]()

        async def slowly(ids: list[str]) -> Any:
            removed = await remove(ids)
            await removing
            return removed

        self.patch(self.in_memory.store, "remove_messages", slowly)
        answer(self.office.one(), 200)
        stopped = self.in_memory.didcomm.endpoints.stop()
        self.assertNoResult(stopped)
        removing.callback(None)
        self.successResultOf(stopped)
        self.assertEqual(len(self.in_memory.events("msg.ack")), 1)
        self.assertEqual(self.in_memory.counter("mediator_messages_delivered_total"), 1)
        self.assertEqual(bob.waiting(), 0)


class WrappingTests(SynchronousTestCase):
    """Extra routing keys, told to the operator out of band, and rewrapping (reference 4.6)."""

    def stored(self, identity: WalletIdentity, **didcomm: Any) -> tuple[bytes, bytes]:
        """What a stranger sent to an identity, and what it fetches."""
        in_memory = InMemoryMediator(self, didcomm=didcomm)
        guest = InMemoryWallet(in_memory, identity).enrol()
        payload = guest.letter("inside")
        self.assertEqual(in_memory.receive(pack_forward(in_memory, guest.did, payload)).status, 202)
        (delivered,) = guest.fetch()
        self.assertEqual(delivered.form, "json")
        return payload, delivered.payload

    def test_one_routing_key(self) -> None:
        """Its holder unwraps what is stored, and finds the recipient as `next`."""
        bob, guard = WalletIdentity.generate(), WalletIdentity.generate()
        for name in (guard.did, guard.agreement.kid):
            payload, stored = self.stored(bob, routing_keys={bob.did: [name]})
            opened = unpack_message(stored, guard, DIDDocumentCache().resolve)
            self.assertEqual(opened.message.to, (guard.did,))
            self.assertEqual(payload_of(opened, bob.did), payload)

    def test_several_routing_keys(self) -> None:
        """The last one is innermost; each further forward names the routing key before as `next`."""
        bob, outer, inner = WalletIdentity.generate(), WalletIdentity.generate(), WalletIdentity.generate()
        payload, stored = self.stored(bob, routing_keys={bob.did: [outer.did, inner.agreement.kid]})
        book = DIDDocumentCache()
        layer = payload_of(unpack_message(stored, outer, book.resolve), inner.agreement.kid)
        self.assertEqual(payload_of(unpack_message(layer, inner, book.resolve), bob.did), payload)

    def test_routing_keys_of_every_curve(self) -> None:
        """A routing key need not be on our own curve."""
        bob, guard = WalletIdentity.generate(), generate_identity(curve="P-384")
        payload, stored = self.stored(bob, routing_keys={bob.did: [guard.did]})
        self.assertEqual(payload_of(unpack_message(stored, guard, DIDDocumentCache().resolve), bob.did), payload)

    def test_routing_keys_are_one_recipients(self) -> None:
        """Somebody else's messages are left alone."""
        payload, stored = self.stored(
            WalletIdentity.generate(), routing_keys={"did:example:other": [WalletIdentity.generate().did]}
        )
        self.assertEqual(stored, payload)

    def test_a_routing_key_that_does_not_resolve(self) -> None:
        """The payload is stored as it came: it is for the recipient anyway."""
        bob, guard = WalletIdentity.generate(), WalletIdentity.generate()
        for names in (["did:example:gone"], [f"{guard.did}#no-such-key"], [guard.did, "did:example:gone"]):
            payload, stored = self.stored(bob, routing_keys={bob.did: names})
            self.assertEqual(stored, payload)

    def test_rewrapping(self) -> None:
        """Every payload is in a fresh forward to its recipient, which the recipient itself unwraps."""
        bob = WalletIdentity.generate()
        payload, stored = self.stored(bob, rewrap=True)
        opened = unpack_message(stored, bob, DIDDocumentCache().resolve)
        self.assertEqual(payload_of(opened, bob.did), payload)

    def test_rewrapping_for_somebody_unknown(self) -> None:
        """A recipient DID that gives no key gets its messages as they came."""
        in_memory = InMemoryMediator(self, didcomm={"rewrap": True})
        guest = InMemoryWallet(in_memory).enrol("did:example:bob")
        payload = guest.letter()
        self.assertEqual(in_memory.receive(pack_forward(in_memory, "did:example:bob", payload)).status, 202)
        self.assertEqual([one.payload for one in guest.fetch()], [payload])

    def test_both(self) -> None:
        """The forward to the recipient is inside the one to the routing key."""
        bob, guard = WalletIdentity.generate(), WalletIdentity.generate()
        payload, stored = self.stored(bob, rewrap=True, routing_keys={bob.did: [guard.did]})
        book = DIDDocumentCache()
        layer = payload_of(unpack_message(stored, guard, book.resolve), bob.did)
        self.assertEqual(payload_of(unpack_message(layer, bob, book.resolve), bob.did), payload)
