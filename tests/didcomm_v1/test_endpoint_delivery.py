"""Delivery by POST to wallets of DIDComm v1 that have an endpoint: replies, mail, and mail that stayed queued."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from twisted.internet.defer import Deferred, fail, succeed
from twisted.trial.unittest import SynchronousTestCase

from mediatord.app.protocol_services import list_own_uris
from mediatord.didcomm.endpoint_delivery import (
    MAX_CONCURRENT_POSTS_PER_V1_ACCOUNT,
    MAX_PENDING_PER_ACCOUNT,
    POST_TIMEOUT,
    EndpointDelivery,
)
from mediatord.didcomm_v1.endpoint_delivery import (
    CONTACT_PAUSE,
    FIRST_RETRY,
    LAST_RETRY,
    MAX_REPLIES_PER_PEER,
    RETRIES_INTERVAL,
    SEARCH_INTERVAL,
    V1EndpointDelivery,
    V1EndpointResolver,
)
from mediatord.errors import StoreUnavailable
from mediatord.net.outbound_http import OutboundAddressError, OutboundRequestError
from mediatord.protocol.didcomm.did_document import MAX_ROUTING_KEYS
from mediatord.protocol.didcomm_v1.envelope import Envelope, open_envelope, pack_anoncrypt, parse_envelope
from mediatord.protocol.didcomm_v1.keys import SigningKey, encode_base58_key
from mediatord.protocol.didcomm_v1.message import parse_message
from mediatord.ratelimit.registration import AccessList
from mediatord.store.interfaces.store import RecipientUpdateAction
from mediatord.store.interfaces.v1_connections import V1Connection
from mediatord.wallet.didcomm_identity import WalletIdentity
from tests.didcomm.test_endpoint_delivery import INBOX, EndpointMediator, respond
from tests.didcomm_v1.in_memory_wallet import get_identity
from tests.in_memory_mediator import PEER, InMemoryWallet, pack_forward

OWN_URL = "https://mediator.example"
# Seconds from the first to the fifth attempt.
ATTEMPTS_SECONDS = 1 + 4 + 16 + 60


def make_key(number: int) -> SigningKey:
    """The key pair of a seed that consists of one byte."""
    return SigningKey.from_seed(bytes([number]) * 32)


WALLET, RECIPIENT, ROUTER, OUTER_ROUTER = (make_key(number) for number in range(1, 5))
CONNECTION = V1Connection(
    account=WALLET.did_key,
    own_key=make_key(9).did_key,
    request_id="request",
    endpoint=INBOX,
)


class FakeConnections:
    """
    Connections in memory.

    :ivar looked_up: accounts whose connection was asked for.
    """

    def __init__(self) -> None:
        self.connections: dict[str, V1Connection] = {}
        self.looked_up: list[str] = []
        self.is_unavailable = False

    def put(self, connection: V1Connection) -> None:
        self.connections[connection.account] = connection

    def get_connection(self, account: str) -> Deferred[V1Connection | None]:
        self.looked_up.append(account)
        return fail(StoreUnavailable()) if self.is_unavailable else succeed(self.connections.get(account))

    def find_connection(self, own_key: str) -> Deferred[V1Connection | None]:
        """None: these connections have no key of the mediator's."""
        return succeed(None)

    def scan_connections(self, after: str, limit: int) -> Deferred[Sequence[V1Connection]]:
        found = sorted(account for account in self.connections if account > after)
        return succeed([self.connections[account] for account in found[:limit]])


def open_forward(packed: bytes, key: SigningKey) -> tuple[str, bytes]:
    """`to` and `msg` of an anonymous forward to a key."""
    envelope: Envelope = parse_envelope(packed)
    (recipient,) = envelope.recipients
    opened = open_envelope(envelope, recipient, key)
    message = parse_message(opened.plaintext)
    assert opened.sender is None
    assert (message.type.family, message.type.major, message.type.name) == ("routing", 1, "forward")
    return message.members["to"], message.source_of("msg") or b""


class V1EndpointTestCase(SynchronousTestCase):
    """A mediator, and one wallet that has connected and whose recipient key is registered."""

    def setUp(self) -> None:
        self.start()

    def start(self, **settings: Any) -> None:
        """A new mediator with an empty store."""
        self.in_memory = EndpointMediator(self, public_url=OWN_URL, **settings)
        self.poster, self.store = self.in_memory.poster, self.in_memory.store
        self.connections = FakeConnections()
        self.access = AccessList()
        self.resolver = V1EndpointResolver(
            cast(Any, self.connections),
            lambda: get_identity(self.in_memory),
            self.access,
            list_own_uris(self.in_memory.config),
            lambda key: get_identity(self.in_memory).find_constant_key(key) is not None,
            lambda: "message-0001",
        )
        self.start_delivery()
        self.enrol(CONNECTION, RECIPIENT)

    def start_delivery(self) -> None:
        """A new process on the same store."""
        self.delivery = V1EndpointDelivery(
            self.in_memory.clock,
            self.store,
            cast(Any, self.connections),
            self.resolver,
            self.in_memory.didcomm.endpoints,
        )
        self.delivery.startService()
        self.addCleanup(self.delivery.stopService)

    def enrol(self, connection: V1Connection, recipient: SigningKey) -> None:
        """An account with one recipient key."""
        self.connections.put(connection)
        self.successResultOf(self.store.grant(connection.account))
        updates: list[tuple[str, RecipientUpdateAction]] = [(recipient.did_key, "add")]
        self.successResultOf(self.store.update_recipients(connection.account, updates, max_recipients=10))

    def forward(self, text: str = "hello", recipient: SigningKey = RECIPIENT) -> bytes:
        """Queue a message for a recipient key; the message."""
        payload = pack_anoncrypt(json.dumps({"@id": "m", "content": text}).encode(), recipient.did_key)
        self.assertEqual(self.in_memory.receive(pack_forward(self.in_memory, recipient.did_key, payload)).status, 202)
        return payload

    def count_queued(self, account: str = WALLET.did_key) -> int:
        """Number of queued messages of an account."""
        return self.successResultOf(self.store.get_queue_status(account, None)).message_count

    def advance(self, seconds: float) -> None:
        """Let time pass, in steps of less than any pause."""
        for _ in range(int(seconds * 4)):
            self.in_memory.clock.advance(0.25)

    def fail_all_attempts(self) -> None:
        """Refuse what is posted, until nothing is tried again for a minute."""
        for _ in range(ATTEMPTS_SECONDS + 2):
            for posted in self.poster.take_posts():
                respond(posted, 503)
            self.advance(1)
        self.assertEqual(self.poster.take_posts(), [])


class DeliveryTests(V1EndpointTestCase):
    def test_posts_to_endpoint_of_connection(self) -> None:
        """The envelope as it was queued; after a 2xx it is removed, and counts as acknowledged by HTTP."""
        payload = self.forward()
        posted = self.poster.take_post()
        self.assertEqual((posted.url, posted.body), (INBOX, payload))
        self.assertEqual(posted.content_type, b"application/didcomm-envelope-enc")
        self.assertEqual(self.count_queued(), 1)
        respond(posted, 202)
        self.assertEqual(self.count_queued(), 0)
        (event,) = self.in_memory.events("msg.ack")
        self.assertEqual(event["path"], "http")
        self.advance(3600)
        self.assertEqual(self.poster.take_posts(), [])

    def test_wraps_for_routing_keys(self) -> None:
        """The last routing key is outermost, and each forward names the key that is inside, in base58 (RFC 0094)."""
        self.connections.put(replace(CONNECTION, routing_keys=(ROUTER.did_key, OUTER_ROUTER.did_key)))
        payload = self.forward()
        posted = self.poster.take_post()
        self.assertEqual(posted.content_type, b"application/didcomm-envelope-enc")
        to, inner = open_forward(posted.body, OUTER_ROUTER)
        self.assertEqual(to, encode_base58_key(ROUTER.did_key))
        to, innermost = open_forward(inner, ROUTER)
        self.assertEqual(to, encode_base58_key(RECIPIENT.did_key))
        self.assertEqual(innermost, payload)

    def test_unusable_routing_keys(self) -> None:
        """With too many, or one that nothing can be encrypted to, nothing is posted, and the message stays queued."""
        for keys in ((ROUTER.did_key,) * (MAX_ROUTING_KEYS + 1), ("did:example:no-key",)):
            self.start()
            self.connections.put(replace(CONNECTION, routing_keys=keys))
            self.forward()
            self.fail_all_attempts()
            self.assertEqual(self.count_queued(), 1)

    def test_envelope_of_v2_keeps_its_media_type(self) -> None:
        """A sender may send a message of DIDComm v2 to a key of a v1 wallet."""
        payload = InMemoryWallet(self.in_memory, WalletIdentity.generate()).make_payload()
        forward = pack_forward(self.in_memory, RECIPIENT.did_key, payload)
        self.assertEqual(self.in_memory.receive(forward).status, 202)
        posted = self.poster.take_post()
        self.assertEqual((posted.body, posted.content_type), (payload, b"application/didcomm-encrypted+json"))

    def test_no_endpoint(self) -> None:
        """Without an endpoint, with one that is ours, or denied, the message just stays queued."""
        for endpoint in (
            None,
            f"{OWN_URL}/didcomm",
            f"{OWN_URL}/didcomm/",
            "HTTPS://Mediator.Example.:443//x/../%64idcomm?a#b",
            "http://mediator.example/didcomm",
        ):
            self.start()
            self.connections.put(replace(CONNECTION, endpoint=endpoint))
            self.forward()
            self.advance(FIRST_RETRY * 2)
            self.assertEqual(self.poster.take_posts(), [], endpoint)
            self.assertEqual((self.count_queued(), self.delivery.remembered), (1, 0))
        self.start()
        self.access.set_lists(None, [WALLET.did_key])
        self.forward()
        self.assertEqual(self.poster.take_posts(), [])

    def test_routing_key_of_the_mediator(self) -> None:
        """What is wrapped for the mediator would come back, to be posted again, for ever."""
        own = get_identity(self.in_memory).routing_key.did_key
        for keys in ((own,), (ROUTER.did_key, own), (own, ROUTER.did_key)):
            self.connections.put(replace(CONNECTION, endpoint="https://alias.example/didcomm", routing_keys=keys))
            self.forward()
            self.assertEqual(self.poster.take_posts(), [])
            self.assertFalse(self.delivery.can_reply(self.connections.connections[WALLET.did_key], PEER))

    def test_accounts_of_v2_are_not_looked_up(self) -> None:
        """A message for a wallet of DIDComm v2 takes no look-up, with failover and without."""
        for failover in ("none", "account-did"):
            self.start(didcomm={"failover": failover})
            bob = InMemoryWallet(self.in_memory, WalletIdentity.generate()).enrol()
            self.in_memory.receive(pack_forward(self.in_memory, bob.did, bob.make_payload()))
            self.assertEqual(bob.count_queued(), 1)
            self.assertEqual(self.connections.looked_up, [])

    def test_switched_off(self) -> None:
        """With `deliver_to_endpoints: false`, mail stays queued."""
        self.start(didcomm_v1={"deliver_to_endpoints": False})
        self.forward()
        self.assertEqual((self.poster.take_posts(), self.connections.looked_up), ([], []))

    def test_endpoint_configured_for_failover(self) -> None:
        """An account that has no v1 endpoint gets its messages as one of DIDComm v2 does."""
        self.start(didcomm={"failover": "configured", "endpoints": {WALLET.did_key: "https://configured.example/"}})
        self.connections.put(replace(CONNECTION, endpoint=None))
        self.forward()
        self.assertEqual(self.poster.take_post().url, "https://configured.example/")

    def test_posts_to_one_account_are_bounded(self) -> None:
        """One wallet whose endpoint is slow does not take the slots of others."""
        other, other_recipient = make_key(11), make_key(12)
        self.enrol(replace(CONNECTION, account=other.did_key, endpoint="https://other.example/"), other_recipient)
        for _ in range(MAX_CONCURRENT_POSTS_PER_V1_ACCOUNT + 3):
            self.forward()
        posted = self.poster.take_posts()
        self.assertEqual(len(posted), MAX_CONCURRENT_POSTS_PER_V1_ACCOUNT)
        self.forward(recipient=other_recipient)
        self.assertEqual(self.poster.take_post().url, "https://other.example/")
        respond(posted[0], 200)
        self.assertEqual(self.poster.take_post().url, INBOX)

    def test_delivery_is_contact(self) -> None:
        """A wallet that only takes messages does not expire; its contact is recorded once a day."""
        seen: list[float] = []
        for hours in (25, 1, 25):
            self.in_memory.clock.advance(hours * 3600)
            self.forward()
            respond(self.poster.take_post(), 200)
            account = self.successResultOf(self.store.get_account(WALLET.did_key))
            assert account is not None
            seen.append(self.in_memory.clock.seconds() - account.seen_at)
        self.assertEqual(seen, [0, 3600, 0])

    def test_picked_up_between_attempts(self) -> None:
        """A message that was removed from the queue meanwhile is not posted again."""
        self.forward()
        respond(self.poster.take_post(), 503)
        (message,) = self.successResultOf(
            self.store.fetch_messages(WALLET.did_key, None, limit=10, max_bytes=1 << 20)
        )
        self.successResultOf(self.store.remove_messages([message.id]))
        self.advance(ATTEMPTS_SECONDS)
        self.assertEqual(self.poster.take_posts(), [])


class BacklogTests(V1EndpointTestCase):
    """Mail that stayed queued while its wallet was away."""

    def test_any_request_has_it_delivered(self) -> None:
        """After five attempts nothing is posted until the wallet shows itself; then all of it is, oldest first."""
        payloads = [self.forward("one"), self.forward("two")]
        self.fail_all_attempts()
        self.delivery.resume(CONNECTION)
        self.assertEqual([posted.body for posted in self.poster.posted], payloads)
        for posted in self.poster.take_posts():
            respond(posted, 200)
        self.assertEqual(self.count_queued(), 0)

    def test_request_ends_pauses(self) -> None:
        """A message that waits for its next attempt is posted at once, and not twice."""
        self.forward()
        for pause in (1, 4):
            respond(self.poster.take_post(), 503)
            self.advance(pause)
        self.poster.take_post().response.errback(OutboundRequestError("ConnectionRefusedError"))
        self.advance(CONTACT_PAUSE)
        self.assertEqual(self.poster.take_posts(), [])
        self.delivery.resume(CONNECTION)
        self.advance(0.25)
        respond(self.poster.take_post(), 200)
        self.advance(FIRST_RETRY)
        self.assertEqual((self.poster.take_posts(), self.count_queued()), ([], 0))

    def test_requests_in_a_row(self) -> None:
        """However many requests the wallet makes, its queue is read once in ten seconds."""
        reads: list[str] = []
        fetch = self.store.fetch_messages

        def count_reads(account: str, *args: Any, **options: Any) -> Any:
            reads.append(account)
            return fetch(account, *args, **options)

        self.patch(self.store, "fetch_messages", count_reads)
        for _ in range(50):
            self.delivery.resume(CONNECTION)
        self.assertEqual(len(reads), 1)
        self.advance(CONTACT_PAUSE + RETRIES_INTERVAL)
        self.assertEqual(len(reads), 2)

    def test_message_that_is_taken_has_the_others_delivered(self) -> None:
        """A wallet that takes a new message is there again."""
        queued = self.forward("while away")
        self.fail_all_attempts()
        self.forward("when back")
        respond(self.poster.take_post(), 200)
        posted = self.poster.take_post()
        self.assertEqual(posted.body, queued)
        respond(posted, 200)
        self.assertEqual(self.count_queued(), 0)

    def test_more_than_may_be_pending(self) -> None:
        """All messages of a long queue are delivered, page by page."""
        number = 2 * MAX_PENDING_PER_ACCOUNT + 5
        for index in range(number):
            self.forward(str(index))
        posted = 0
        while waiting := self.poster.take_posts():
            for one in waiting:
                respond(one, 200)
            posted += len(waiting)
        self.assertEqual((posted, self.count_queued()), (number, 0))

    def test_silent_wallet_is_tried_again(self) -> None:
        """At intervals that double up to an hour, and no longer when nothing is queued."""
        self.forward()
        times: list[float] = []
        for _ in range(12 * 3600):
            for posted in self.poster.take_posts():
                times.append(self.in_memory.clock.seconds())
                respond(posted, 503)
            self.in_memory.clock.advance(1)
        firsts = [times[index] for index in range(0, len(times), 5)]
        gaps = [after - before for before, after in zip(firsts, firsts[1:], strict=False)]
        self.assertLess(gaps[0], ATTEMPTS_SECONDS + FIRST_RETRY + 2 * RETRIES_INTERVAL)
        self.assertEqual(gaps, sorted(gaps))
        self.assertLess(gaps[-1], ATTEMPTS_SECONDS + LAST_RETRY + 2 * RETRIES_INTERVAL)
        self.assertGreaterEqual(gaps[-1], LAST_RETRY)

    def test_restart(self) -> None:
        """A new process finds what former ones have left, soon after its start; once an hour it looks again."""
        self.successResultOf(self.delivery.stopService())
        self.forward()
        respond(self.poster.take_post(), 503)
        self.in_memory.didcomm.endpoints.stop()
        self.start_delivery()
        self.advance(2 * RETRIES_INTERVAL)
        respond(self.poster.take_post(), 200)
        self.assertEqual(self.count_queued(), 0)
        looked_up = len(self.connections.looked_up)
        self.advance(SEARCH_INTERVAL / 2)
        self.assertEqual(len(self.connections.looked_up), looked_up)
        self.advance(SEARCH_INTERVAL / 2 + 2 * RETRIES_INTERVAL)
        self.assertGreater(len(self.connections.looked_up), looked_up)

    def test_unavailable_store(self) -> None:
        """If connections cannot be read when a message arrives, it is tried later."""
        self.connections.is_unavailable = True
        payload = self.forward()
        self.connections.is_unavailable = False
        self.assertEqual(self.poster.take_posts(), [])
        self.advance(FIRST_RETRY + 2 * RETRIES_INTERVAL)
        self.assertEqual(self.poster.take_post().body, payload)

    def test_message_that_stays_queued_while_the_queue_is_read(self) -> None:
        """It is tried later, though the queue was empty when the store read it."""
        self.advance(CONTACT_PAUSE + 2 * RETRIES_INTERVAL)  # after the search at the start
        answer: Deferred[list[Any]] = Deferred()
        fetching = self.patch(self.store, "fetch_messages", lambda *_, **options: answer)
        self.delivery.resume(CONNECTION)
        fetching.restore()
        self.connections.is_unavailable = True
        payload = self.forward()
        self.connections.is_unavailable = False
        answer.callback([])
        self.advance(2 * (FIRST_RETRY + RETRIES_INTERVAL))
        self.assertEqual(self.poster.take_post().body, payload)

    def test_forgets_accounts(self) -> None:
        """Accounts that have nothing queued are not remembered."""
        self.delivery.resume(CONNECTION)
        self.assertEqual(self.delivery.remembered, 1)
        self.advance(CONTACT_PAUSE + 2 * RETRIES_INTERVAL)
        self.assertEqual(self.delivery.remembered, 0)

    def test_no_timer_remains(self) -> None:
        """Stopping while a wallet is away leaves no timer and no error; its messages stay queued."""
        self.in_memory.clock.advance(0)
        self.successResultOf(self.delivery.stopService())
        timers = len(self.in_memory.clock.getDelayedCalls())
        self.start_delivery()
        self.forward("one")
        self.forward("two")
        respond(self.poster.take_posts()[0], 503)
        self.in_memory.didcomm.endpoints.stop()
        self.successResultOf(self.delivery.stopService())
        self.in_memory.clock.advance(0)
        self.assertEqual(len(self.in_memory.clock.getDelayedCalls()), timers)
        self.assertEqual(self.count_queued(), 2)


class ReplyTests(V1EndpointTestCase):
    def test_posts_reply_once(self) -> None:
        """To the endpoint of the connection; a failure is not retried."""
        self.assertTrue(self.delivery.can_reply(CONNECTION, PEER))
        self.delivery.reply(CONNECTION, b"packed", PEER)
        posted = self.poster.take_post()
        self.assertEqual((posted.url, posted.body), (INBOX, b"packed"))
        posted.response.errback(OutboundAddressError("PrivateAddress"))
        self.advance(ATTEMPTS_SECONDS)
        self.assertEqual(self.poster.take_posts(), [])

    def test_wraps_for_routing_keys(self) -> None:
        """With the key of the wallet as recipient."""
        envelope = pack_anoncrypt(b"{}", WALLET.did_key)
        self.delivery.reply(replace(CONNECTION, routing_keys=(ROUTER.did_key,)), envelope, PEER)
        to, inner = open_forward(self.poster.take_post().body, ROUTER)
        self.assertEqual((to, inner), (encode_base58_key(WALLET.did_key), envelope))

    def test_no_endpoint(self) -> None:
        """Then there is no reply by POST."""
        self.assertFalse(self.delivery.can_reply(replace(CONNECTION, endpoint=None), PEER))

    def test_replies_are_bounded(self) -> None:
        """For each address, until one is taken."""
        for _ in range(MAX_REPLIES_PER_PEER):
            self.assertTrue(self.delivery.can_reply(CONNECTION, PEER))
            self.delivery.reply(CONNECTION, b"packed", PEER)
        self.assertFalse(self.delivery.can_reply(CONNECTION, PEER))
        self.assertTrue(self.delivery.can_reply(CONNECTION, "192.0.2.99"))
        respond(self.poster.take_posts()[0], 200)
        self.assertTrue(self.delivery.can_reply(CONNECTION, PEER))


class ProcessTests(V1EndpointTestCase):
    """Several processes on one store."""

    def test_new_mail_is_posted_by_one_process(self) -> None:
        """A request that another process gets has it not post what has just come, but what has stayed queued."""
        first = self.in_memory.didcomm.endpoints
        second = EndpointDelivery(
            self.in_memory.clock, self.store, first._targets, first._http_client, first._recorder
        )
        other = V1EndpointDelivery(
            self.in_memory.clock, self.store, cast(Any, self.connections), self.resolver, second
        )
        other.startService()
        self.addCleanup(other.stopService)
        self.advance(3 * CONTACT_PAUSE)
        self.forward()
        other.resume(CONNECTION)
        self.poster.take_post()
        self.advance(POST_TIMEOUT)
        other.resume(CONNECTION)
        self.assertEqual(len(self.poster.take_posts()), 1)
