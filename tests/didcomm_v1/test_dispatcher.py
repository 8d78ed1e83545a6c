"""The dispatcher of DIDComm v1: who may ask, replays, where replies go, and how refusals look."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from mediatord.didcomm.messages import MessageOrigin
from mediatord.errors import StoreUnavailable
from mediatord.protocol.didcomm_v1.envelope import pack_anoncrypt, pack_authcrypt, parse_envelope
from mediatord.protocol.didcomm_v1.message import OLD_PREFIX
from mediatord.ratelimit.admission import RequestReply
from tests.didcomm_v1.in_memory_wallet import InMemoryV1Wallet, compose, get_identity, make_key
from tests.in_memory_mediator import PEER, InMemoryMediator

PING = "trust_ping/1.0/ping"
STATUS_REQUEST = "messagepickup/2.0/status-request"
KEYLIST_UPDATE = "coordinate-mediation/1.0/keylist-update"
ALL: dict[str, Any] = {"~transport": {"return_route": "all"}}


class DispatcherTestCase(SynchronousTestCase):
    """A connected wallet with an account."""

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self)
        self.wallet = InMemoryV1Wallet(self.in_memory).enrol()

    def post(self, raw: bytes, content_type: bytes = b"") -> RequestReply:
        """Process a message that came by POST."""
        origin = MessageOrigin(PEER, content_type=content_type)
        return self.successResultOf(Deferred.fromCoroutine(self.in_memory.didcomm.receive(raw, origin)))


class SenderTests(DispatcherTestCase):
    """Requests are served only for the wallet that the key of the mediator was made for."""

    def assert_refused(self, raw: bytes, status: int = 400) -> None:
        """A message is refused without a body, which only the sender of an envelope could use."""
        reply = self.in_memory.receive(raw)
        self.assertEqual((reply.status, reply.body), (status, b""))

    def test_anonymous(self) -> None:
        """A request under anoncrypt."""
        self.assert_refused(pack_anoncrypt(compose(STATUS_REQUEST, **ALL), self.wallet.own_key.did_key))

    def test_key_of_another_wallet(self) -> None:
        """A wallet cannot use the key that was made for another one."""
        other = InMemoryV1Wallet(self.in_memory, "other").enrol()
        self.assert_refused(pack_authcrypt(compose(STATUS_REQUEST, **ALL), self.wallet.own_key.did_key, other.key))
        (rejected,) = self.in_memory.events("req.done")
        self.assertEqual(rejected["code"], "e.p.trust.sender-mismatch")

    def test_constant_keys(self) -> None:
        """The keys of invitation and routing serve no requests of accounts."""
        identity = get_identity(self.in_memory)
        for key in (identity.invitation_key, identity.routing_key):
            self.assert_refused(pack_authcrypt(compose(STATUS_REQUEST, **ALL), key.did_key, self.wallet.key))

    def test_unknown_key(self) -> None:
        """An envelope for nobody here cannot be opened, and is charged as such."""
        for _ in range(3):
            self.assert_refused(pack_authcrypt(compose(PING), make_key("nobody").did_key, self.wallet.key))
        rejected = self.in_memory.counter("mediator_rejected_total", reason="undecryptable")
        self.assertEqual(rejected, 3)

    def test_not_granted(self) -> None:
        """A connected wallet without an account gets a problem report, packed."""
        wallet = InMemoryV1Wallet(self.in_memory, "new")
        report = wallet.answer(STATUS_REQUEST)
        self.assertEqual(report.type.name, "problem-report")
        self.assertEqual(report.members["description"]["code"], "mediation_not_granted")
        self.assertIsNotNone(report.pthid)

    def test_denied(self) -> None:
        """A wallet on the list of denied DIDs is as one without an account."""
        in_memory = InMemoryMediator(self, didcomm={"deny": [self.wallet.key.did_key]})
        wallet = InMemoryV1Wallet(in_memory).enrol()
        self.assertEqual(wallet.answer(STATUS_REQUEST).type.name, "problem-report")


class ReplayTests(DispatcherTestCase):
    """A recorded message has no second effect."""

    def test_request(self) -> None:
        """A replayed request is refused, on another connection and after any time that it is kept."""
        for type_, members in ((PING, ALL), (KEYLIST_UPDATE, {"updates": [], **ALL}), (STATUS_REQUEST, ALL)):
            packed = self.wallet.pack(compose(type_, **members))
            self.assertEqual(self.in_memory.receive(packed).status, 200, type_)
            for replay in (packed, packed):
                report = self.wallet.open(self.in_memory.receive(replay).body)
                self.assertEqual(report.type.name, "problem-report", type_)
        self.assertEqual(len(self.in_memory.events("replay.drop")), 6)

    def test_lasting_changes_for_a_month(self) -> None:
        """What changes something, or could bind a socket, is remembered for 30 days; others for an hour."""
        in_memory = InMemoryMediator(self, didcomm={"unused_account_ttl": 0})
        wallet = InMemoryV1Wallet(in_memory).enrol()
        packed = {
            type_: wallet.pack(compose(type_, **members))
            for type_, members in (
                (KEYLIST_UPDATE, {"updates": [], **ALL}),
                (PING, {"response_requested": False, **ALL}),
                ("discover-features/1.0/query", {"query": "*", **ALL}),
            )
        }
        for raw in packed.values():
            in_memory.receive(raw)
        in_memory.clock.advance(29 * 86_400.0)
        self.successResultOf(in_memory.store.prune_nonces())
        before = len(in_memory.events("replay.drop"))
        for raw in packed.values():
            in_memory.receive(raw)
        self.assertEqual(len(in_memory.events("replay.drop")) - before, 2)

    def test_refused_messages_are_not_kept(self) -> None:
        """What is refused for its sender takes no place among the digests, whatever its type."""
        for raw in (
            pack_anoncrypt(compose(KEYLIST_UPDATE, updates=[]), get_identity(self.in_memory).routing_key.did_key),
            InMemoryV1Wallet(self.in_memory, "without account").pack(compose(KEYLIST_UPDATE, updates=[])),
            self.wallet.pack(compose("nonsense/1.0/set-device-info")),
        ):
            self.assertEqual((self.in_memory.receive(raw).status), 400)
            until = self.in_memory.clock.seconds() + 60
            self.assertTrue(
                self.successResultOf(self.in_memory.store.claim_nonce(parse_envelope(raw).digest, until, 1.0))
            )

    def test_polls_take_no_long_retention(self) -> None:
        """A wallet that polls by Message Pickup 1.0 for a day, or pings, has its digests dropped after an hour."""
        in_memory = InMemoryMediator(self, didcomm={"unused_account_ttl": 0})
        wallet = InMemoryV1Wallet(in_memory).enrol()
        kept = []
        for type_, size in (("messagepickup/1.0/batch-pickup", 1), (PING, None)):
            raw = wallet.pack(compose(type_, batch_size=size, **ALL))
            self.assertEqual(in_memory.receive(raw).status, 200)
            kept.append(parse_envelope(raw).digest)
        in_memory.clock.advance(3601.0)
        until = in_memory.clock.seconds() + 60
        for digest in kept:
            self.assertTrue(self.successResultOf(in_memory.store.claim_nonce(digest, until, 1.0)))

    def test_not_served(self) -> None:
        """A request that the store failed to serve may be sent again."""
        packed = self.wallet.pack(compose("coordinate-mediation/1.0/keylist-query", **ALL))
        with self.in_memory.failing("list_recipients", StoreUnavailable()):
            self.assertEqual(self.in_memory.receive(packed).status, 503)
        answer = self.wallet.open(self.in_memory.receive(packed).body)
        self.assertEqual(answer.type.name, "keylist")


class ReplyTests(DispatcherTestCase):
    """Where a reply goes, and as what."""

    def test_on_the_connection(self) -> None:
        """With `all`, or a wallet without an endpoint, the reply is in the response."""
        for route in ("all", "none", None):
            self.assertEqual(self.wallet.answer(PING, route=route).type.name, "ping-response", route)

    def test_prefix(self) -> None:
        """Answers have the prefix of the request."""
        plaintext = compose(PING, OLD_PREFIX, response_requested=True, **ALL)
        answer = self.wallet.open(self.in_memory.receive(self.wallet.pack(plaintext)).body)
        self.assertEqual(answer.type.prefix, OLD_PREFIX)

    def test_media_type(self) -> None:
        """That of the request, if it is one of the two that libraries know; without parameters."""
        for sent, expected in (
            (b"application/ssi-agent-wire; charset=utf-8", "application/ssi-agent-wire"),
            (b"application/didcomm-envelope-enc", "application/didcomm-envelope-enc"),
            (b"application/json", "application/didcomm-envelope-enc"),
            (b"", "application/didcomm-envelope-enc"),
        ):
            reply = self.post(self.wallet.pack(compose(PING, **ALL)), sent)
            self.assertEqual((reply.status, reply.media_type), (200, expected))

    def test_on_a_socket(self) -> None:
        """A reply comes on the socket of its request; a refusal is packed, too. Events name the version."""
        socket, recorder = self.in_memory.socket(), self.in_memory.base.recorder
        recorder.record_connection_opened(socket.name, socket.client)
        self.assertEqual(self.wallet.answer(PING, socket=socket).type.name, "ping-response")
        report = self.wallet.answer("basicmessage/1.0/message", socket=socket)
        self.assertEqual(report.members["description"]["code"], "e.p.msg.unsupported")
        (authenticated,) = self.in_memory.events("conn.auth")
        recorder.record_connection_closed(socket.name, "didcomm", 1000, "peer", (2, 0), (2, 0))
        (closed,) = self.in_memory.events("conn.close")
        self.assertEqual([authenticated["proto"], closed["proto"]], ["didcomm_v1", "didcomm_v1"])

    def test_no_report_about_a_report(self) -> None:
        """A problem report of any protocol gets no answer."""
        for type_ in ("notification/1.0/problem-report", "report-problem/1.0/problem-report"):
            self.assertEqual(self.wallet.ask(type_).body, b"")

    def test_garbage_on_a_socket(self) -> None:
        """An unreadable envelope of v1 has no answer on a socket, as wallets read nothing but envelopes."""
        raw = self.wallet.pack(compose(PING))
        reply = self.in_memory.receive(raw[:-4] + b'A"}', self.in_memory.socket())
        self.assertEqual((reply.status, reply.body), (400, b""))
