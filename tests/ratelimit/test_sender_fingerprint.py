"""Sender fingerprints: they hide the sender, and are the same on every path."""

from __future__ import annotations

from typing import Any

import pytest
from twisted.trial.unittest import SynchronousTestCase

from mediatord.didcomm.forward_router import SenderFingerprint
from mediatord.didcomm.messages import MessageOrigin
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.did_methods import derive_did_peer_3
from mediatord.protocol.didcomm.forward import FORWARD
from mediatord.protocol.probe_markers import PROBE_CLIENT
from mediatord.store.interfaces.messages import EnqueueRequest, Payload
from mediatord.wallet.didcomm_messages import authcrypt, build_forward, compose_message
from tests.in_memory_mediator import PEER, InMemoryMediator, InMemoryWallet, pack_forward

SEED = b"a secret of the mediator"
BOB, ALICE, MALLORY = "did:example:bob", "did:example:alice", "did:example:mallory"
OTHER_PEER = "192.0.2.2"
BITS = 32
SENDER = (1 << BITS) - 1
MANY = 10_000
LONG_FORM = "did:peer:2.Ez6LSbysY2xFMRpGMhb7tFTLMpeuPRaqaWM1yECx2AtzE3KCc.SeyJ0IjoiZG0ifQ"
SHORT_FORM = derive_did_peer_3(LONG_FORM)


def test_halves() -> None:
    """The upper half depends on the network alone, the lower one on the sender alone; 0 means unknown."""
    origins = SenderFingerprint(SEED)
    both = origins.compute(BOB, PEER, ALICE)
    assert 0 < both < 1 << 2 * BITS - 1
    assert origins.compute(BOB, PEER, None) == both & ~SENDER
    assert origins.compute(BOB, "", ALICE) == both & SENDER
    assert origins.compute(BOB, "", None) == 0
    assert origins.compute(BOB, OTHER_PEER, ALICE) & SENDER == both & SENDER
    assert origins.compute(BOB, PEER, MALLORY) >> BITS == both >> BITS
    assert origins.compute(BOB, PEER, MALLORY) != both != origins.compute(BOB, OTHER_PEER, ALICE)


def test_depends_on_queue_and_secret() -> None:
    """It is the same after a restart, different in another queue, and needs the secret."""
    origin = SenderFingerprint(SEED).compute(BOB, PEER, ALICE)
    assert SenderFingerprint(SEED).compute(BOB, PEER, ALICE) == origin
    for other in (
        SenderFingerprint(SEED).compute(MALLORY, PEER, ALICE),
        SenderFingerprint(b"another").compute(BOB, PEER, ALICE),
    ):
        assert other >> BITS != origin >> BITS
        assert other & SENDER != origin & SENDER


@pytest.mark.parametrize("spelling", [SHORT_FORM, f"{LONG_FORM}=", f"{LONG_FORM}=="])
def test_spellings_of_a_recipient(spelling: str) -> None:
    """Other forms of recipient or sender give the same fingerprint."""
    origins = SenderFingerprint(SEED)
    assert origins.compute(BOB, PEER, spelling) == origins.compute(BOB, PEER, LONG_FORM)
    assert origins.compute(spelling, PEER, ALICE) == origins.compute(LONG_FORM, PEER, ALICE)
    assert origins.compute(derive_did_peer_3(f"{LONG_FORM}x"), PEER, ALICE) != origins.compute(LONG_FORM, PEER, ALICE)


@pytest.mark.parametrize(
    "recipient",
    ["did:peer:3", "did:peer:3z", "did:peer:3zQm", "did:peer:3z0", "did:peer:3\ud800", "did:peer:2\ud800"],
)
def test_broken_recipient(recipient: str) -> None:
    """A malformed did:peer has a fingerprint of its own."""
    origins = SenderFingerprint(SEED)
    assert origins.compute(recipient, PEER, ALICE)
    assert origins.compute(f"{recipient}x", PEER, ALICE) != origins.compute(recipient, PEER, ALICE)


def test_sender_and_recipient_are_separated() -> None:
    """The end of a sender and the beginning of a recipient are not interchangeable."""
    origins = SenderFingerprint(SEED)
    assert origins.compute("ob", "", "b") != origins.compute("b", "", "bo")
    assert origins.compute("b", "", PEER) != origins.compute("b", PEER, None) >> BITS


def test_collisions_and_range() -> None:
    """Collisions are rare, and values fit into a database integer. A lone surrogate is a valid name."""
    origins = SenderFingerprint(SEED)
    networks = {origins.compute(BOB, f"{number}", None) >> BITS for number in range(MANY)}
    senders = {origins.compute(BOB, "", f"{number}") for number in range(MANY)}
    assert min(len(networks), len(senders)) > MANY - 3
    assert (1 << BITS - 2) < max(networks) < (1 << BITS - 1) < max(senders) < (1 << BITS)
    assert origins.compute("did:example:\ud800", "\ud800", "\ud800")


def test_known_value_is_never_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash of 0, which means unknown, is replaced."""
    for digest in (bytes(4), b"\x80\0\0\0"):
        monkeypatch.setattr("mediatord.didcomm.forward_router.blake2b", lambda *_, d=digest, **__: FakeDigest(d))
        origin = SenderFingerprint(SEED).compute(BOB, PEER, ALICE)
        assert 0 < origin >> BITS < (1 << BITS - 1)
        assert origin & SENDER


class FakeDigest:
    """Hash with a value set by the test."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def digest(self) -> bytes:
        """The value."""
        return self._digest


def test_daemon_itself() -> None:
    """Messages of the daemon to itself have no origin."""
    assert SenderFingerprint(SEED).compute(BOB, PROBE_CLIENT, ALICE) == 0


class EntryPointTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self)
        self.bob, self.alice = InMemoryWallet(self.in_memory).enrol(), InMemoryWallet(self.in_memory)
        self.found: list[int] = []
        store: Any = self.in_memory.store
        each, all_, one = store.enqueue_each, store.enqueue_all, store.enqueue

        def enqueue_each(deposits: list[EnqueueRequest], early: Any) -> Any:
            self.found += [enqueue.origin for enqueue in deposits]
            return each(deposits, early)

        def enqueue_all(deposits: list[EnqueueRequest]) -> Any:
            self.found += [enqueue.origin for enqueue in deposits]
            return all_(deposits)

        def enqueue(did: str, payloads: list[Payload], **options: Any) -> Any:
            self.found.append(options.get("origin", 0))
            return one(did, payloads, **options)

        self.patch(store, "enqueue_each", enqueue_each)
        self.patch(store, "enqueue_all", enqueue_all)
        self.patch(store, "enqueue", enqueue)

    def origin_of(self, raw: bytes, peer: str = PEER) -> int:
        """Origin that the store gets, the same for all enqueued payloads."""
        self.found.clear()
        self.assertEqual(self.in_memory.receive(raw, peer=peer).status, 202)
        (origin,) = set(self.found)
        return origin

    def make_authenticated_forward(self, **headers: Any) -> bytes:
        """A forward authenticated by Alice."""
        return authcrypt(
            compose_message(
                FORWARD,
                {"next": self.bob.did},
                **{"from": self.alice.did, "to": [self.in_memory.did], **headers},
                attachments=[{"data": {"base64": encoding.encode_base64url(self.bob.make_payload())}}],
            ),
            self.alice.identity,
            self.in_memory.document,
        )

    def test_same_origin_on_every_path(self) -> None:
        """Fast path, general path and nested forwards give the origin of the charged address."""
        origins = self.in_memory.base.sender_fingerprints
        network = origins.compute(self.bob.did, PEER, None)
        self.assertEqual(network & SENDER, 0)
        make_forward = self.bob.make_payload
        short = pack_forward(self.in_memory, self.bob.did, make_forward())
        long = pack_forward(self.in_memory, self.bob.did, make_forward(), make_forward())
        delayed = pack_forward(self.in_memory, self.bob.did, make_forward(), delay_milli=5_000)
        inner = pack_forward(self.in_memory, self.in_memory.did, short)
        several = pack_forward(
            self.in_memory, self.in_memory.did, short, pack_forward(self.in_memory, self.bob.did, make_forward())
        )
        for raw in (short, long, delayed, inner, several):
            self.assertEqual(self.origin_of(raw), network)
        self.assertEqual(self.origin_of(short, OTHER_PEER), origins.compute(self.bob.did, OTHER_PEER, None))

    def test_proven_sender_counts_beside_address(self) -> None:
        """For nested forwards it is the sender of the outermost envelope, who is charged too."""
        both = self.in_memory.base.sender_fingerprints.compute(self.bob.did, PEER, self.alice.did)
        self.assertGreater(both & SENDER, 0)
        self.assertEqual(self.origin_of(self.make_authenticated_forward()), both)
        wrapped = build_forward(
            self.in_memory.did, [pack_forward(self.in_memory, self.bob.did, self.bob.make_payload())]
        )
        wrapped |= {"from": self.alice.did, "to": [self.in_memory.did]}
        self.assertEqual(self.origin_of(authcrypt(wrapped, self.alice.identity, self.in_memory.document)), both)
        anonymous = self.in_memory.base.sender_fingerprints.compute(self.bob.did, PEER, None)
        self.assertEqual(
            self.origin_of(pack_forward(self.in_memory, self.in_memory.did, self.make_authenticated_forward())),
            anonymous,
        )

    def test_replayed_forward_has_origin_of_its_sender(self) -> None:
        """Replaying another sender's forward evicts none of that sender's messages."""
        raw = self.make_authenticated_forward()
        self.origin_of(raw)
        recomputed = self.in_memory.base.sender_fingerprints.compute(self.bob.did, OTHER_PEER, None)
        self.assertEqual(self.origin_of(raw, OTHER_PEER), recomputed)

    def test_daemon_itself(self) -> None:
        """Messages of the daemon to itself have no origin on either path."""
        raw = pack_forward(self.in_memory, self.bob.did, self.bob.make_payload())
        self.assertEqual(self.origin_of(raw, PROBE_CLIENT), 0)
        self.found.clear()
        self.in_memory.run(self.in_memory.didcomm.dispatcher.receive(raw, MessageOrigin(PROBE_CLIENT)))
        self.assertEqual(set(self.found), {0})
