"""Forwards of DIDComm v1: what is accepted, for whom, and that it is stored once and byte for byte."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from mediatord.didcomm.messages import MessageOrigin
from mediatord.didcomm_v1.forwarding import MAX_WAITING_PER_PEER
from mediatord.protocol import encoding
from mediatord.protocol.didcomm_v1.envelope import pack_anoncrypt, pack_authcrypt
from mediatord.ratelimit.admission import RequestReply
from mediatord.store.interfaces.messages import StoredMessage
from tests.didcomm_v1.in_memory_wallet import (
    InMemoryV1Wallet,
    compose,
    compose_forward,
    get_identity,
    make_key,
    pack_forward,
)
from tests.in_memory_mediator import PEER, InMemoryMediator, InMemoryWallet
from tests.in_memory_mediator import pack_forward as pack_v2_forward


class ForwardTestCase(SynchronousTestCase):
    """A wallet behind the mediator."""

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self)
        self.wallet = InMemoryV1Wallet(self.in_memory).enrol()
        self.identity = get_identity(self.in_memory)

    def queued(self, wallet: InMemoryV1Wallet | None = None) -> list[StoredMessage]:
        """What waits for the wallet."""
        account = (wallet or self.wallet).key.did_key
        return self.successResultOf(self.in_memory.store.fetch_messages(account, None, limit=100, max_bytes=10**6))

    def begin(self, raw: bytes, peer: str = PEER) -> Deferred[RequestReply]:
        """Begin to process a message."""
        return Deferred.fromCoroutine(self.in_memory.didcomm.receive(raw, MessageOrigin(peer)))


class AcceptedForwardTests(ForwardTestCase):
    """Forwards that are stored."""

    def test_every_spelling_of_the_key(self) -> None:
        """The recipient is named by base58, did:key, or did:key with a fragment."""
        key = self.wallet.recipient.did_key
        for number, spelled in enumerate(
            (self.wallet.recipient_base58, key, f"{key}#{key.removeprefix('did:key:')}")
        ):
            payload = self.wallet.make_payload(f"message {number}")
            reply = self.in_memory.receive(pack_forward(self.in_memory, spelled, payload))
            self.assertEqual((reply.status, reply.body), (202, b""))
        self.assertEqual({message.recipient_did for message in self.queued()}, {key})
        self.assertEqual(len(self.queued()), 3)

    def test_source_text_is_kept(self) -> None:
        """The envelope inside reaches the wallet byte for byte, with its spaces and unknown members."""
        payload = self.wallet.make_payload()
        spaced = payload.replace(b'{"protected":', b'{ "unknown" : 1.50 , "protected" : ', 1)
        plaintext = compose_forward(self.wallet.recipient_base58, payload).replace(payload, spaced, 1)
        self.assertIn(spaced, plaintext)
        self.in_memory.receive(pack_anoncrypt(plaintext, self.identity.routing_key.did_key))
        self.assertEqual([message.payload for message in self.queued()], [spaced])

    def test_text_as_in_old_libraries(self) -> None:
        """An envelope that is a JSON string is the same as an object."""
        payload = self.wallet.make_payload()
        plaintext = compose("routing/1.0/forward", to=self.wallet.recipient_base58, msg=payload.decode())
        self.in_memory.receive(pack_anoncrypt(plaintext, self.identity.routing_key.did_key))
        self.assertEqual([message.payload for message in self.queued()], [payload])

    def test_authcrypt(self) -> None:
        """A forward may have an authenticated sender."""
        plaintext = compose_forward(self.wallet.recipient_base58, self.wallet.make_payload())
        packed = pack_authcrypt(plaintext, self.identity.routing_key.did_key, make_key("sender"))
        self.assertEqual(self.in_memory.receive(packed).status, 202)
        (accepted,) = self.in_memory.events("msg.accept")
        self.assertIn("sender", accepted)
        self.assertEqual(len(self.queued()), 1)

    def test_nested_for_the_mediator(self) -> None:
        """A forward to the routing key is opened again, up to three deep."""
        packed, routing_key = self.wallet.make_payload(), self.identity.routing_key.did_key
        packed = pack_forward(self.in_memory, self.wallet.recipient_base58, packed)
        for _ in range(3):
            packed = pack_forward(self.in_memory, routing_key, packed)
        self.assertEqual(self.in_memory.receive(packed).status, 202)
        self.assertEqual(len(self.queued()), 1)
        self.assertEqual(self.in_memory.receive(pack_forward(self.in_memory, routing_key, packed)).status, 400)

    def test_repeated_while_queued(self) -> None:
        """A repeated forward is accepted, and has no effect until its message has been fetched and removed."""
        packed = pack_forward(self.in_memory, self.wallet.recipient_base58, self.wallet.make_payload())
        for _ in range(3):
            self.assertEqual(self.in_memory.receive(packed).status, 202)
        (message,) = self.queued()
        self.successResultOf(self.in_memory.store.acknowledge(self.wallet.key.did_key, [message.id]))
        self.assertEqual(self.in_memory.receive(packed).status, 202)
        self.assertEqual(len(self.queued()), 1)

    def test_repeated_while_stored(self) -> None:
        """A forward that comes again before the first is durable waits for it, and has no effect."""
        packed = pack_forward(self.in_memory, self.wallet.recipient_base58, self.wallet.make_payload())
        enqueue, gate = self.in_memory.store.enqueue, Deferred[None]()

        def enqueue_later(*arguments: Any, **options: Any) -> Deferred[Any]:
            return gate.addCallback(lambda _: enqueue(*arguments, **options))

        self.in_memory.store.enqueue = enqueue_later  # type: ignore[method-assign]
        begun = [self.begin(packed) for _ in range(3)]
        self.assertEqual([reply.called for reply in begun], [False] * 3)
        gate.callback(None)
        self.assertEqual([self.successResultOf(reply).status for reply in begun], [202] * 3)
        self.assertEqual(len(self.queued()), 1)

    def test_expiry(self) -> None:
        """A message waits until the `expires_time` of its forward; an expired one is refused."""
        for expires_time, status in (("2001-01-01T00:00:00Z", 400), (self.in_memory.clock.seconds() + 60, 202)):
            payload = self.wallet.make_payload(str(status))
            packed = pack_forward(
                self.in_memory, self.wallet.recipient_base58, payload, **{"~timing": {"expires_time": expires_time}}
            )
            self.assertEqual(self.in_memory.receive(packed).status, status)
        (message,) = self.queued()
        self.assertEqual(message.expires_at, self.in_memory.clock.seconds() + 60)


class OneModelTests(ForwardTestCase):
    """Wallets and senders of both versions."""

    def test_v2_forward_for_v1_key(self) -> None:
        """A v2 sender reaches a v1 recipient key, in the same queue."""
        payload = self.wallet.make_payload()
        packed = pack_v2_forward(self.in_memory, self.wallet.recipient.did_key, payload)
        self.assertEqual(self.in_memory.receive(packed).status, 202)
        self.assertEqual([message.payload for message in self.queued()], [payload])

    def test_v1_forward_for_v2_did(self) -> None:
        """A v1 sender reaches a DID that a v2 wallet has registered."""
        v2_wallet = InMemoryWallet(self.in_memory).enrol()
        packed = pack_forward(self.in_memory, v2_wallet.did, v2_wallet.make_payload())
        self.assertEqual(self.in_memory.receive(packed).status, 202)
        self.assertEqual(v2_wallet.count_queued(), 1)

    def test_one_ledger(self) -> None:
        """Messages of both versions are counted by one ledger, and requests by their version."""
        self.in_memory.receive(pack_forward(self.in_memory, self.wallet.recipient_base58, self.wallet.make_payload()))
        self.in_memory.receive(
            pack_v2_forward(self.in_memory, self.wallet.recipient.did_key, self.wallet.make_payload("two"))
        )
        ledger = self.successResultOf(self.in_memory.store.read_ledger()).didcomm
        self.assertEqual((ledger.accepted, ledger.waiting), (2, 2))
        for protocol in ("didcomm", "didcomm_v1"):
            counted = self.in_memory.counter("mediator_requests_total", outcome="accepted", protocol=protocol)
            self.assertEqual(counted, 1, protocol)

    def test_quota_is_shared(self) -> None:
        """A full queue evicts, whichever version fills it."""
        in_memory = InMemoryMediator(self, queue={"max_messages": 2})
        wallet = InMemoryV1Wallet(in_memory).enrol()
        for number in range(4):
            pack = pack_forward if number % 2 else pack_v2_forward
            in_memory.receive(pack(in_memory, wallet.recipient.did_key, wallet.make_payload(str(number))))
        self.assertEqual(self.successResultOf(in_memory.store.read_ledger()).didcomm.evicted, 2)


class RefusedForwardTests(ForwardTestCase):
    """Forwards that change nothing."""

    def test_unknown_key_waits(self) -> None:
        """A key that is registered within a second gets the message; one that is not is refused without a body."""
        late, never = make_key("late"), make_key("never")
        begun = {
            key.did_key: self.begin(pack_forward(self.in_memory, key.did_key, self.wallet.make_payload(key.did_key)))
            for key in (late, never)
        }
        self.in_memory.clock.advance(0.3)
        for reply in begun.values():
            self.assertNoResult(reply)
        self.successResultOf(
            self.in_memory.store.update_recipients(
                self.wallet.key.did_key, [(late.did_key, "add")], max_recipients=10
            )
        )
        self.in_memory.clock.pump([0.3] * 3)
        self.assertEqual(self.successResultOf(begun[late.did_key]).status, 202)
        refused = self.successResultOf(begun[never.did_key])
        self.assertEqual((refused.status, refused.body), (404, b""))
        self.assertEqual(len(self.queued()), 1)

    def test_waiting_is_bounded(self) -> None:
        """Of one address only some wait; further ones are refused at once, those of other addresses wait."""
        packed = [
            pack_forward(self.in_memory, make_key(f"unknown {number}").did_key, self.wallet.make_payload())
            for number in range(MAX_WAITING_PER_PEER + 2)
        ]
        begun = [self.begin(one) for one in packed[:-1]]
        self.assertEqual([reply.called for reply in begun], [False] * MAX_WAITING_PER_PEER + [True])
        self.assertFalse(self.begin(packed[-1], "198.51.100.7").called)
        self.in_memory.clock.pump([0.3] * 4)
        self.assertEqual({self.successResultOf(reply).status for reply in begun}, {404})

    def test_malformed(self) -> None:
        """Members that are missing, of the wrong kind, or nested too deep."""
        payload, to = encoding.loads(self.wallet.make_payload()), self.wallet.recipient_base58
        for members in (
            {"msg": payload},
            {"to": 1, "msg": payload},
            {"to": "", "msg": payload},
            {"to": "x" * 10_000, "msg": payload},
            {"to": "did:key:z6LSbysY2xFMRpGMhb7tFTLMpeuPRaqaWM1yECx2AtzE3KCc", "msg": None},
            {"to": to},
            {"to": to, "msg": []},
            {"to": to, "msg": "no JSON"},
            {"to": to, "msg": {**payload, "tag": 1}},
            {"to": to, "msg": {name: payload[name] for name in ("protected", "iv", "ciphertext")}},
            {"to": to, "msg": encoding.dumps(payload).decode()[:-1] + ',"deep":' + "[" * 300 + "]" * 300 + "}"},
        ):
            packed = pack_anoncrypt(compose("routing/1.0/forward", **members), self.identity.routing_key.did_key)
            reply = self.in_memory.receive(packed)
            self.assertEqual((reply.status, reply.body), (400, b""), members)
        self.assertEqual(self.queued(), [])

    def test_too_large(self) -> None:
        """A message that no queue could keep is refused."""
        in_memory = InMemoryMediator(self, queue={"max_bytes": 1000})
        wallet = InMemoryV1Wallet(in_memory).enrol()
        packed = pack_forward(in_memory, wallet.recipient_base58, wallet.make_payload("x" * 1000))
        self.assertEqual(in_memory.receive(packed).status, 413)

    def test_limit_of_the_address(self) -> None:
        """Forwards are charged to the address as those of v2 are."""
        in_memory = InMemoryMediator(self, limits={"ip_per_minute": 3})
        wallet = InMemoryV1Wallet(in_memory).enrol()
        statuses = []
        for number in range(5):
            packed = pack_forward(in_memory, wallet.recipient_base58, wallet.make_payload(str(number)))
            statuses.append(in_memory.receive(packed).status)
        self.assertEqual(statuses, [202, 202, 202, 429, 429])

    def test_registered_senders_only(self) -> None:
        """The policies for senders hold for v1, too."""
        in_memory = InMemoryMediator(self, didcomm={"require_registered_sender": True})
        wallet = InMemoryV1Wallet(in_memory).enrol()
        routing_key = get_identity(in_memory).routing_key.did_key
        plaintext = compose_forward(wallet.recipient_base58, wallet.make_payload())
        self.assertEqual(in_memory.receive(pack_anoncrypt(plaintext, routing_key)).status, 400)
        stranger = pack_authcrypt(plaintext, routing_key, make_key("stranger"))
        self.assertEqual(in_memory.receive(stranger).status, 400)
        self.assertEqual(in_memory.receive(pack_authcrypt(plaintext, routing_key, wallet.key)).status, 202)


class SwitchedOffTests(SynchronousTestCase):
    """`didcomm_v1.enabled: false`."""

    def test_refused(self) -> None:
        """An envelope of v1 is no envelope."""
        in_memory = InMemoryMediator(self, didcomm_v1={"enabled": False})
        wallet = InMemoryV1Wallet(in_memory).enrol()
        packed = pack_forward(in_memory, wallet.recipient_base58, wallet.make_payload())
        self.assertEqual(in_memory.receive(packed).status, 400)
