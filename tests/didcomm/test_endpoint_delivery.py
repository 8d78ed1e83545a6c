"""Delivery by POST to the endpoints of accounts, and wrapping for routing keys (reference 4.6 and 4.7)."""

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

HIGH_LIMITS = {"ip_per_minute": 10_000}
INBOX = "https://wallet.example/inbox"


@dataclass
class PendingPost:
    """A POST without a response yet."""

    url: str
    body: bytes = field(repr=False)
    content_type: bytes
    timeout: float
    response: Deferred[OutboundResponse] = field(default_factory=Deferred)


class FakePoster:
    """Outbound client that records POSTs; the test answers them."""

    def __init__(self) -> None:
        self.posted: list[PendingPost] = []

    async def post(self, url: str, body: bytes, content_type: bytes, *, timeout: float) -> OutboundResponse:
        """Record the POST."""
        posted = PendingPost(url, body, content_type, timeout)
        self.posted.append(posted)
        return await posted.response

    async def get(self, url: str, *, limit: int, timeout: float) -> OutboundResponse:
        """Fail."""
        raise OutboundRequestError("ConnectionRefusedError")

    def take_posts(self) -> list[PendingPost]:
        """Return the POSTs since the last call."""
        posted, self.posted = self.posted, []
        return posted

    def take_post(self) -> PendingPost:
        """Return the one POST since the last call."""
        (posted,) = self.take_posts()
        return posted


def respond(posted: PendingPost, status: int) -> None:
    """Answer a POST."""
    posted.response.callback(OutboundResponse(status, b"", b""))


class EndpointMediator(InMemoryMediator):
    """Mediator whose outgoing requests end in a fake poster."""

    def __init__(self, test: SynchronousTestCase, **settings: Any) -> None:
        super().__init__(test, limits=HIGH_LIMITS, **settings)
        for service in (self.didcomm.due, self.didcomm.housekeeping):
            service.stopService()
        self.poster = FakePoster()
        self.base.outbound = cast(Any, self.poster)
        self.didcomm = DIDCommServices(self.base, self.config)
        for service in (self.didcomm.due, self.didcomm.housekeeping):
            service.startService()


def identity_with_services(*endpoints: dict[str, Any]) -> WalletIdentity:
    """Create an identity whose document has these endpoints, in this order."""
    agreement, signing = PrivateKey.generate("X25519"), PrivateKey.generate("Ed25519")
    services = [
        {"type": "DIDCommMessaging", "serviceEndpoint": {"accept": ["didcomm/v2"], **item}} for item in endpoints
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
        """Enrol a wallet; by default its account has the configured endpoint INBOX."""
        identity = identity or WalletIdentity.generate()
        settings = {"failover": "configured", "endpoints": {identity.did: INBOX}, **didcomm}
        self.in_memory = EndpointMediator(self, didcomm=settings)
        self.poster = self.in_memory.poster
        return InMemoryWallet(self.in_memory, identity).enrol()

    def test_removed_account_gets_no_posts(self) -> None:
        """Nothing is posted for a removed account; its messages stay queued."""
        bob = self.start()
        values = self.in_memory.config.model_dump()
        new = Config.model_validate({**values, "didcomm": {**values["didcomm"], "deny": [bob.did]}})
        self.in_memory.base.reloader.reload(lambda: new)
        self.assertEqual(
            self.in_memory.receive(pack_forward(self.in_memory, bob.did, bob.make_payload())).status, 202
        )
        self.assertEqual(self.poster.take_posts(), [])
        self.in_memory.base.reloader.reload(lambda: self.in_memory.config)
        self.assertEqual(bob.count_queued(), 1)

    def forward(self, next_: str, payload: bytes, **headers: Any) -> bytes:
        """Send an anonymous forward, which must be accepted."""
        reply = self.in_memory.receive(pack_forward(self.in_memory, next_, payload, **headers))
        self.assertEqual((reply.status, reply.body), (202, b""))
        return payload

    def test_disabled_by_default(self) -> None:
        """Without `failover` nothing is posted, whatever else is configured."""
        bob = self.start(failover="none")
        self.forward(bob.did, bob.make_payload())
        self.assertEqual(self.poster.take_posts(), [])

    def test_posts_nothing_that_would_come_back(self) -> None:
        """
        Nothing is posted to the mediator itself, however its address is spelled, nor wrapped for it: it would be
        queued and posted again, for ever.
        """
        port = {"uri": "HTTPS://mediator.EXAMPLE.:443//x/../%64idcomm?a"}
        for endpoint in (port, {"uri": "http://mediator.example/didcomm"}, {"uri": INBOX, "routingKeys": ["@OWN@"]}):
            self.in_memory = EndpointMediator(
                self, didcomm={"failover": "account-did"}, public_url="https://mediator.example"
            )
            did = self.in_memory.did
            keys = {"routingKeys": [did if key == "@OWN@" else key for key in endpoint.get("routingKeys", ())]}
            bob = InMemoryWallet(self.in_memory, identity_with_services({**endpoint, **keys})).enrol()
            self.forward(bob.did, bob.make_payload())
            self.assertEqual(self.in_memory.poster.take_posts(), [], endpoint)
            self.assertEqual(bob.count_queued(), 1)

    def test_posts_payload_and_removes_it(self) -> None:
        """
        The payload is posted with the exact media type and a time-out of ten seconds. It stays queued until a 2xx;
        then it is delivered and removed.
        """
        bob = self.start()
        payload = self.forward(bob.did, bob.make_payload())
        posted = self.poster.take_post()
        self.assertEqual((posted.url, posted.body), (INBOX, payload))
        self.assertEqual((posted.content_type, posted.timeout), (b"application/didcomm-encrypted+json", 10.0))
        self.assertEqual(bob.count_queued(), 1)
        self.assertEqual(self.in_memory.counter("mediator_messages_stored_total"), 1)
        respond(posted, 200)
        self.assertEqual(bob.count_queued(), 0)
        self.assertEqual(self.in_memory.counter("mediator_messages_delivered_total"), 1)
        (event,) = self.in_memory.events("msg.ack")
        self.assertEqual(event["path"], "http")

    def test_any_2xx_is_delivery(self) -> None:
        """Every 2xx is a delivery, nothing else: the outbound client has followed redirects."""
        for status in (200, 202, 204, 299, 301, 307, 400, 404, 500):
            bob = self.start()
            self.forward(bob.did, bob.make_payload())
            respond(self.poster.take_post(), status)
            self.assertEqual(bob.count_queued(), 0 if status < 300 else 1, status)

    def test_socket_is_preferred(self) -> None:
        """Nothing is posted while a live socket accepts pushes; a socket that does not is ignored."""
        bob = self.start()
        socket = bob.go_live()
        self.forward(bob.did, bob.make_payload())
        self.assertEqual(self.poster.take_posts(), [])
        socket.takes = False
        self.forward(bob.did, bob.make_payload())
        self.assertEqual(self.poster.take_post().url, INBOX)

    def test_five_attempts_with_backoff(self) -> None:
        """Pauses grow from 1 s to 60 s; after the fifth failure the message stays queued."""
        bob = self.start()
        payload = self.forward(bob.did, bob.make_payload())
        for pause in (1, 4, 16, 60):
            respond(self.poster.take_post(), 503)
            self.in_memory.clock.advance(pause - 0.1)
            self.assertEqual(self.poster.take_posts(), [])
            self.in_memory.clock.advance(0.2)
        respond(self.poster.take_post(), 503)
        self.in_memory.clock.advance(3600)
        self.assertEqual(self.poster.take_posts(), [])
        self.assertEqual([delivered.payload for delivered in bob.fetch()], [payload])
        self.assertEqual(self.in_memory.counter("mediator_messages_delivered_total"), 0)

    def test_retry_delivers(self) -> None:
        """One 2xx is enough, and nothing follows it."""
        bob = self.start()
        self.forward(bob.did, bob.make_payload())
        respond(self.poster.take_post(), 500)
        self.in_memory.clock.advance(1)
        respond(self.poster.take_post(), 202)
        self.assertEqual(bob.count_queued(), 0)
        self.in_memory.clock.advance(3600)
        self.assertEqual(self.poster.take_posts(), [])

    def test_all_failures_are_retried(self) -> None:
        """Connection failures and guarded addresses are retried like others, without logged errors."""
        for failure in (OutboundRequestError("TimeoutError"), OutboundAddressError("PrivateAddress")):
            bob = self.start()
            self.forward(bob.did, bob.make_payload())
            self.poster.take_post().response.errback(failure)
            self.in_memory.clock.advance(1)
            respond(self.poster.take_post(), 200)
            self.assertEqual(bob.count_queued(), 0)

    def test_tries_all_endpoints_before_backoff(self) -> None:
        """The endpoints of the account's document are tried in order before backing off (reference 4.7)."""
        bob = self.start(
            identity_with_services({"uri": "https://a.example/"}, {"uri": "https://b.example/"}),
            failover="account-did",
            endpoints={},
        )
        self.forward(bob.did, bob.make_payload())
        for _ in range(2):
            first = self.poster.take_post()
            self.assertEqual(first.url, "https://a.example/")
            respond(first, 500)
            second = self.poster.take_post()
            self.assertEqual(second.url, "https://b.example/")
            respond(second, 500)
            self.assertEqual(self.poster.take_posts(), [])
            self.in_memory.clock.advance(4)
        respond(self.poster.take_post(), 200)
        self.assertEqual(bob.count_queued(), 0)

    def test_configured_endpoints_override_document(self) -> None:
        """Configured endpoints are used in place of those of the document."""
        identity = identity_with_services({"uri": "https://document.example/"})
        bob = self.start(identity, failover="account-did", endpoints={identity.did: INBOX})
        self.forward(bob.did, bob.make_payload())
        self.assertEqual(self.poster.take_post().url, INBOX)

    def test_ignores_document_of_recipient_did(self) -> None:
        """Only the account's endpoint counts; the recipient DID's document points to the mediator (reference 4.7)."""
        other = identity_with_services({"uri": "https://recipient.example/"})
        bob = self.start(failover="account-did", endpoints={})
        bob.enrol(other.did)
        self.forward(other.did, bob.make_payload())
        self.assertEqual(self.poster.take_posts(), [])

    def test_never_posts_to_itself(self) -> None:
        """Own URIs and DIDs are skipped, in configuration and documents (reference 4.7)."""
        url = "https://mediator.example"
        ours = [url, f"{url}/", f"{url}/didcomm", f"{url}/didcomm/"]
        for uri in ours:
            identity = WalletIdentity.generate()
            self.in_memory = EndpointMediator(
                self, public_url=url, didcomm={"failover": "configured", "endpoints": {identity.did: uri}}
            )
            bob = InMemoryWallet(self.in_memory, identity).enrol()
            self.forward(bob.did, bob.make_payload())
            self.assertEqual(self.in_memory.poster.take_posts(), [], uri)
        self.in_memory = EndpointMediator(self, public_url=url, didcomm={"failover": "account-did"})
        did, web = self.in_memory.did, self.in_memory.base.identity.now.web_did
        services = [{"uri": uri} for uri in (*ours, did, web, "wss://x.example/ws", "didcomm:transport/queue", INBOX)]
        bob = InMemoryWallet(self.in_memory, identity_with_services(*services)).enrol()
        self.forward(bob.did, bob.make_payload())
        posted = self.in_memory.poster.take_post()
        self.assertEqual(posted.url, INBOX)
        respond(posted, 500)
        self.assertEqual(self.in_memory.poster.take_posts(), [])

    def test_did_endpoint_is_resolved(self) -> None:
        """
        A DID as endpoint is resolved, and the payload wrapped for that mediator's keys, with the recipient as `next`.
        """
        mediator = identity_with_services({"uri": "https://other.example/didcomm"})
        for source in ("configured", "account-did"):
            bob = self.start(identity_with_services({"uri": mediator.did}), failover=source, endpoints={})
            if source == "configured":
                identity = WalletIdentity.generate()
                bob = self.start(identity, endpoints={identity.did: mediator.did})
            payload = self.forward(bob.did, bob.make_payload())
            posted = self.poster.take_post()
            self.assertEqual(posted.url, "https://other.example/didcomm")
            opened = unpack_message(posted.body, mediator, DIDDocumentCache().resolve)
            self.assertEqual(opened.message.to, (mediator.did,))
            self.assertIsNone(opened.sender)
            self.assertEqual(payload_of(opened, bob.did), payload)
            respond(posted, 202)
            self.assertEqual(bob.count_queued(), 0)

    def test_did_endpoint_takes_one_hop_only(self) -> None:
        """A DID that leads to another DID, or nowhere, is no endpoint (Routing 2.0, "Using a DID as an endpoint")."""
        second = identity_with_services({"uri": "https://second.example/"})
        for did in (
            identity_with_services({"uri": second.did}).did,
            WalletIdentity.generate().did,
            "did:example:unknown",
        ):
            bob = self.start(identity_with_services({"uri": did}), failover="account-did", endpoints={})
            self.forward(bob.did, bob.make_payload())
            self.assertEqual(self.poster.take_posts(), [])
            self.assertEqual(bob.count_queued(), 1)

    def test_endpoint_with_routing_keys(self) -> None:
        """An endpoint behind routing keys gets what they can unwrap, the first one first."""
        outer, inner = WalletIdentity.generate(), WalletIdentity.generate()
        endpoint = {"uri": INBOX, "routing_keys": [outer.did, inner.did], "routingKeys": [outer.did, inner.did]}
        bob = self.start(identity_with_services(endpoint), failover="account-did", endpoints={})
        payload = self.forward(bob.did, bob.make_payload())
        documents = DIDDocumentCache()
        layer = payload_of(unpack_message(self.poster.take_post().body, outer, documents.resolve), inner.did)
        self.assertEqual(payload_of(unpack_message(layer, inner, documents.resolve), bob.did), payload)

    def test_concurrent_posts_are_bounded(self) -> None:
        """Beyond the bound messages stay queued; a finished POST makes room."""
        bob = self.start()
        for _ in range(MAX_CONCURRENT_POSTS + 5):
            self.forward(bob.did, bob.make_payload())
        posted = self.poster.take_posts()
        self.assertEqual(len(posted), MAX_CONCURRENT_POSTS)
        self.assertEqual(bob.count_queued(), MAX_CONCURRENT_POSTS + 5)
        respond(posted[0], 200)
        self.forward(bob.did, bob.make_payload())
        self.assertEqual(len(self.poster.take_posts()), 1)

    def test_delayed_message_is_posted_when_due(self) -> None:
        """A delayed message is posted when it is due, not before (reference 4.5)."""
        bob = self.start()
        self.forward(bob.did, bob.make_payload(), delay_milli=30_000)
        self.in_memory.clock.advance(29)
        self.assertEqual(self.poster.take_posts(), [])
        self.in_memory.clock.advance(2)
        self.assertEqual(self.poster.take_post().url, INBOX)

    def test_stop_abandons_posts(self) -> None:
        """Posts in progress are abandoned without an error, their messages stay queued, no timer remains."""
        bob = self.start()
        self.in_memory.clock.advance(0)
        timers = len(self.in_memory.clock.getDelayedCalls())
        self.forward(bob.did, bob.make_payload("one"))
        self.forward(bob.did, bob.make_payload("two"))
        respond(self.poster.take_posts()[0], 500)
        self.in_memory.didcomm.endpoints.stop()
        self.in_memory.clock.advance(0)
        self.assertEqual(len(self.in_memory.clock.getDelayedCalls()), timers)
        self.assertEqual(bob.count_queued(), 2)

    def test_stop_waits_for_removal(self) -> None:
        """A delivered message is removed by the store; stopping waits for that."""
        bob = self.start()
        self.forward(bob.did, bob.make_payload())
        remove, removing = self.in_memory.store.remove_messages, Deferred[None]()

        async def remove_slowly(ids: list[str]) -> Any:
            removed = await remove(ids)
            await removing
            return removed

        self.patch(self.in_memory.store, "remove_messages", remove_slowly)
        respond(self.poster.take_post(), 200)
        stopped = self.in_memory.didcomm.endpoints.stop()
        self.assertNoResult(stopped)
        removing.callback(None)
        self.successResultOf(stopped)
        self.assertEqual(len(self.in_memory.events("msg.ack")), 1)
        self.assertEqual(self.in_memory.counter("mediator_messages_delivered_total"), 1)
        self.assertEqual(bob.count_queued(), 0)


class WrappingTests(SynchronousTestCase):
    """Routing keys that the operator configures, and rewrapping (reference 4.6)."""

    def fetch_forwarded(self, identity: WalletIdentity, **didcomm: Any) -> tuple[bytes, bytes]:
        """Forward a message to an identity, and fetch it."""
        in_memory = InMemoryMediator(self, didcomm=didcomm)
        guest = InMemoryWallet(in_memory, identity).enrol()
        payload = guest.make_payload("inside")
        self.assertEqual(in_memory.receive(pack_forward(in_memory, guest.did, payload)).status, 202)
        (delivered,) = guest.fetch()
        self.assertEqual(delivered.form, "json")
        return payload, delivered.payload

    def test_one_routing_key(self) -> None:
        """Its holder unwraps the stored payload and finds the recipient as `next`."""
        bob, guard = WalletIdentity.generate(), WalletIdentity.generate()
        for name in (guard.did, guard.agreement.kid):
            payload, stored = self.fetch_forwarded(bob, routing_keys={bob.did: [name]})
            opened = unpack_message(stored, guard, DIDDocumentCache().resolve)
            self.assertEqual(opened.message.to, (guard.did,))
            self.assertEqual(payload_of(opened, bob.did), payload)

    def test_several_routing_keys(self) -> None:
        """The last key is innermost; each further forward names the key before as `next`."""
        bob, outer, inner = WalletIdentity.generate(), WalletIdentity.generate(), WalletIdentity.generate()
        payload, stored = self.fetch_forwarded(bob, routing_keys={bob.did: [outer.did, inner.agreement.kid]})
        documents = DIDDocumentCache()
        layer = payload_of(unpack_message(stored, outer, documents.resolve), inner.agreement.kid)
        self.assertEqual(payload_of(unpack_message(layer, inner, documents.resolve), bob.did), payload)

    def test_routing_keys_of_every_curve(self) -> None:
        """A routing key may be on another curve than the mediator's."""
        bob, guard = WalletIdentity.generate(), generate_identity(curve="P-384")
        payload, stored = self.fetch_forwarded(bob, routing_keys={bob.did: [guard.did]})
        self.assertEqual(payload_of(unpack_message(stored, guard, DIDDocumentCache().resolve), bob.did), payload)

    def test_routing_keys_apply_to_one_recipient(self) -> None:
        """Messages of other recipients are not wrapped."""
        payload, stored = self.fetch_forwarded(
            WalletIdentity.generate(), routing_keys={"did:example:other": [WalletIdentity.generate().did]}
        )
        self.assertEqual(stored, payload)

    def test_unresolvable_routing_key(self) -> None:
        """The payload is stored unchanged; the recipient can read it."""
        bob, guard = WalletIdentity.generate(), WalletIdentity.generate()
        for names in (["did:example:gone"], [f"{guard.did}#no-such-key"], [guard.did, "did:example:gone"]):
            payload, stored = self.fetch_forwarded(bob, routing_keys={bob.did: names})
            self.assertEqual(stored, payload)

    def test_rewrapping(self) -> None:
        """Every payload is wrapped in a fresh forward, which the recipient unwraps."""
        bob = WalletIdentity.generate()
        payload, stored = self.fetch_forwarded(bob, rewrap=True)
        opened = unpack_message(stored, bob, DIDDocumentCache().resolve)
        self.assertEqual(payload_of(opened, bob.did), payload)

    def test_rewrapping_for_recipient_without_key(self) -> None:
        """Messages for a recipient DID without a key are stored unchanged."""
        in_memory = InMemoryMediator(self, didcomm={"rewrap": True})
        guest = InMemoryWallet(in_memory).enrol("did:example:bob")
        payload = guest.make_payload()
        self.assertEqual(in_memory.receive(pack_forward(in_memory, "did:example:bob", payload)).status, 202)
        self.assertEqual([delivered.payload for delivered in guest.fetch()], [payload])

    def test_rewrapping_and_routing_keys(self) -> None:
        """The forward to the recipient is inside the one to the routing key."""
        bob, guard = WalletIdentity.generate(), WalletIdentity.generate()
        payload, stored = self.fetch_forwarded(bob, rewrap=True, routing_keys={bob.did: [guard.did]})
        documents = DIDDocumentCache()
        layer = payload_of(unpack_message(stored, guard, documents.resolve), bob.did)
        self.assertEqual(payload_of(unpack_message(layer, bob, documents.resolve), bob.did), payload)
