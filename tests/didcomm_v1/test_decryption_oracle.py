"""Undecryptable envelopes of DIDComm v1 are no oracle, and co-recipients of an envelope cannot pose as its sender."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from types import FrameType
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.protocol.didcomm_v1.keys import SigningKey
from mediatord.ratelimit.admission import RequestReply
from tests.didcomm_v1.in_memory_wallet import InMemoryV1Wallet, compose, compose_forward, get_identity, make_key
from tests.in_memory_mediator import InMemoryMediator
from tests.protocol.didcomm_v1.foreign_envelope import EnvelopeWriter, KeyPair, b64, base58, unb64

ALL: dict[str, Any] = {"~transport": {"return_route": "all"}}
PLAINTEXT = compose("trust_ping/1.0/ping", **ALL)
SENDER = KeyPair(sha256(b"wallet").digest())
STRANGER = KeyPair(sha256(b"stranger").digest())
NOBODY = KeyPair(sha256(b"nobody").digest())
# Points of low order, and one that is none; all are 32 bytes in base58.
LOW_ORDER = (bytes(32), b"\1" + bytes(31), b"\xec" + b"\xff" * 30 + b"\x7f", b"\2" + bytes(31))
# Operations whose time could be measured.
COSTLY_OPERATIONS = ("crypto_box_seal_open", "crypto_box_open", "crypto_aead_chacha20poly1305_ietf_decrypt")

Make = Callable[[KeyPair], bytes]


def flip(place: int, *path: str, **writing: Any) -> Make:
    """A change of one byte of a member of the envelope, or of the recipient's entry, of a valid envelope."""

    def flip_member(holder: dict[str, Any]) -> None:
        *parents, name = path
        for parent in parents:
            holder = holder["recipients"][0] if parent == "entry" else holder[parent]
        value = bytearray(unb64(holder[name]))
        value[place] ^= 1
        holder[name] = b64(bytes(value))

    def make(ours: KeyPair) -> bytes:
        if path[0] == "entry":
            return dump(EnvelopeWriter(change=flip_member, **writing).write(PLAINTEXT, ours))
        envelope = EnvelopeWriter(**writing).write(PLAINTEXT, ours)
        flip_member(envelope)
        return dump(envelope)

    return make


def write(**writing: Any) -> Make:
    """A valid envelope but for what is given."""
    return lambda ours: dump(EnvelopeWriter(**writing).write(PLAINTEXT, ours))


def change(**members: Any) -> Make:
    """An authcrypt with other members of its protected header."""
    return write(sender=SENDER, change=lambda header: header.update(members))


def dump(envelope: dict[str, Any]) -> bytes:
    """As bytes."""
    return json.dumps(envelope).encode()


def replace_entry(**header: Any) -> Make:
    """An authcrypt whose entry has other members in its header."""
    return write(sender=SENDER, change=lambda protected: protected["recipients"][0]["header"].update(header))


# Failures with a key of the mediator: answers and work must be identical.
FAILURES: dict[str, dict[str, Make]] = {
    "anoncrypt": {
        "tag": flip(0, "tag"),
        "ciphertext": flip(-1, "ciphertext"),
        "nonce": flip(0, "iv"),
        "ephemeral key": flip(0, "entry", "encrypted_key"),
        "content key": flip(-1, "entry", "encrypted_key"),
        "another content key": lambda ours: dump(
            {**EnvelopeWriter(cek=b"\7" * 32).write(PLAINTEXT, ours), "tag": b64(bytes(16))}
        ),
    },
    "authcrypt": {
        "tag": flip(-1, "tag", sender=SENDER),
        "ciphertext": flip(0, "ciphertext", sender=SENDER),
        "content key": flip(0, "entry", "encrypted_key", sender=SENDER),
        "nonce of the content key": flip(0, "entry", "header", "iv", sender=SENDER),
        "ephemeral key of the sender": flip(0, "entry", "header", "sender", sender=SENDER),
        "sender": flip(-1, "entry", "header", "sender", sender=SENDER),
        "key of somebody else": write(sender=SENDER, sender_text=STRANGER.name.encode()),
        "sender that is no key": write(sender=SENDER, sender_text=b"0" * 44),
        **{
            f"sender of low order {number}": write(sender=SENDER, sender_text=base58(point).encode())
            for number, point in enumerate(LOW_ORDER)
        },
    },
}
# Failures that anybody can see; the last ones have a valid entry for the mediator beside another one.
VISIBLE_FAILURES: dict[str, Make] = {
    "kid of nobody": replace_entry(kid=NOBODY.name),
    "no recipients": change(recipients=[]),
    "alg of the other kind": change(alg="Anoncrypt"),
    "enc unknown": change(enc="A256GCM"),
    "typ unknown": change(typ="JWM/2.0"),
    "anoncrypt with a sender": write(change=lambda header: header["recipients"][0]["header"].update(sender="AAAA")),
    "sender of a wrong size": replace_entry(sender="AAAA"),
    "nonce of a wrong size": replace_entry(iv="AAAA"),
    "kid that is a DID": replace_entry(kid=make_key("wallet").did_key),
    "twice the same kid": write(
        sender=SENDER, change=lambda header: header.update(recipients=2 * header["recipients"])
    ),
    "too many": write(sender=SENDER, change=lambda header: header.update(recipients=101 * header["recipients"])),
    "somebody else's message": lambda ours: dump(EnvelopeWriter(sender=SENDER).write(PLAINTEXT, NOBODY)),
}


def find_pair(key: SigningKey) -> KeyPair:
    """The key pair of one of the mediator's keys."""
    return KeyPair(key.secret[:32])


class OracleTests(SynchronousTestCase):
    """Failures at each of the mediator's keys."""

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, limits={"ip_per_minute": 100_000})
        self.wallet = InMemoryV1Wallet(self.in_memory).enrol()
        identity = get_identity(self.in_memory)
        self.keys = [find_pair(key) for key in (identity.routing_key, identity.invitation_key, self.wallet.own_key)]

    def count_costly_operations(self, raw: bytes) -> Counter[str]:
        """Costly operations for an envelope."""
        done: Counter[str] = Counter()

        def record_call(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_name in COSTLY_OPERATIONS:
                done[frame.f_code.co_name] += 1

        sys.setprofile(record_call)
        try:
            self.in_memory.receive(raw)
        finally:
            sys.setprofile(None)
        return done

    def test_answers_are_identical(self) -> None:
        """Whatever is wrong, and whichever key of the mediator it was encrypted to."""
        answers: dict[tuple[int, str, bytes, int | None], list[str]] = {}
        for failures in (*FAILURES.values(), VISIBLE_FAILURES):
            for name, make in failures.items():
                for ours in self.keys:
                    reply: RequestReply = self.in_memory.receive(make(ours))
                    answer = (reply.status, reply.media_type, reply.body, reply.retry_after)
                    answers.setdefault(answer, []).append(name)
        self.assertEqual(set(answers), {(400, "", b"", None)}, answers)

    def test_unchanged_envelopes_open(self) -> None:
        """The same envelopes open without a change."""
        for writing in ({}, {"sender": SENDER}):
            done = self.count_costly_operations(write(**writing)(self.keys[2]))
            self.assertEqual(done["crypto_aead_chacha20poly1305_ietf_decrypt"], 1)
        self.assertEqual(self.in_memory.counter("mediator_rejected_total", reason="undecryptable"), 0)

    def test_work_is_constant(self) -> None:
        """Every failure with a key of the mediator costs the same openings, and that of the content."""
        for kind, failures in FAILURES.items():
            valid = self.count_costly_operations(write(sender=SENDER if kind == "authcrypt" else None)(self.keys[0]))
            found = {name: self.count_costly_operations(make(self.keys[0])) for name, make in failures.items()}
            self.assertEqual([*found.values()], len(found) * [valid], found)

    def test_unknown_key_costs_no_decryption(self) -> None:
        """Key ids are public."""
        for name in ("kid of nobody", "somebody else's message", "no recipients", "twice the same kid", "too many"):
            self.assertEqual(self.count_costly_operations(VISIBLE_FAILURES[name](self.keys[0])), Counter(), name)


class CoRecipientTests(SynchronousTestCase):
    """All recipients of an envelope know the key of its content, and can write another one under its header."""

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, didcomm={"require_registered_sender": True})
        self.wallet = InMemoryV1Wallet(self.in_memory).enrol()

    def write(self, plaintext: bytes, key: SigningKey, *others: KeyPair) -> bytes:
        """An authcrypt of the wallet to one of the mediator's keys, and to others."""
        return dump(EnvelopeWriter(sender=SENDER).write(plaintext, find_pair(key), *others))

    def test_requests(self) -> None:
        """A request to several recipients has no sender: nothing is done, answered or charged to the wallet."""
        updates = [{"recipient_key": self.wallet.recipient_base58, "action": "remove"}]
        for type_, members in (
            ("coordinate-mediation/1.0/keylist-update", {"updates": updates}),
            ("did-rotate/1.0/hangup", {}),
            ("messagepickup/1.0/batch-pickup", {"batch_size": 10}),
        ):
            reply = self.in_memory.receive(
                self.write(compose(type_, **members, **ALL), self.wallet.own_key, STRANGER)
            )
            self.assertEqual((reply.status, reply.body), (400, b""))
        keylist = self.wallet.answer("coordinate-mediation/1.0/keylist-query")
        self.assertEqual([key["recipient_key"] for key in keylist.members["keys"]], [self.wallet.recipient.did_key])
        self.assertNotIn("sender", self.in_memory.events("req.done")[0])

    def test_forwards(self) -> None:
        """A forward to several recipients is anonymous: no policy takes it for one of its sender."""
        key = get_identity(self.in_memory).routing_key
        for number, (others, status) in enumerate((((), 202), ((STRANGER,), 400))):
            payload = self.wallet.make_payload(str(number))
            raw = self.write(compose_forward(self.wallet.recipient_base58, payload), key, *others)
            self.assertEqual(self.in_memory.receive(raw).status, status)

    def test_handshakes(self) -> None:
        """Nobody is connected by a request that others could have written."""
        key = get_identity(self.in_memory).invitation_key
        raw = self.write(compose("didexchange/1.1/request", did="did:peer:2.V", **ALL), key, STRANGER)
        reply = self.in_memory.receive(raw)
        self.assertEqual((reply.status, reply.body), (400, b""))
