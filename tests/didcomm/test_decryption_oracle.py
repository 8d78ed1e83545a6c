"""Whoever sends envelopes that do not open learns nothing from the answers, nor from the work that they cause."""

from __future__ import annotations

import hmac
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CBC
from cryptography.hazmat.primitives.keywrap import aes_key_wrap
from twisted.trial.unittest import SynchronousTestCase

from mediatord.protocol.didcomm import jwe
from mediatord.protocol.didcomm.jwe import (
    ANONCRYPT,
    build_other_info,
    compute_apv,
    derive_ephemeral_secret,
    derive_kek,
)
from mediatord.protocol.didcomm.keys import PrivateKey, PublicKey
from mediatord.protocol.encoding import decode_base64url, dumps, encode_base64url
from mediatord.wallet.didcomm_messages import compose_message
from tests.in_memory_mediator import PING, InMemoryMediator, InMemoryWallet

# What takes time that could be measured: agreements, unwrapping, and the tag over the whole ciphertext.
WORK = ("derive_ephemeral_secret", "derive_static_secret", "aes_key_unwrap", "_compute_mac")

Change = Callable[["EnvelopeParts"], None]


class EnvelopeParts:
    """An envelope in parts that can be changed by themselves, sealed to one key of the mediator."""

    def __init__(self, raw: bytes) -> None:
        self.envelope: dict[str, Any] = json.loads(raw)
        self.header: dict[str, Any] = json.loads(decode_base64url(self.envelope["protected"]))
        self.entry: dict[str, Any] = self.envelope["recipients"][0]

    def flip(self, name: str, place: int) -> None:
        """Change one byte of a member."""
        of = self.entry if name == "encrypted_key" else self.envelope
        value = bytearray(decode_base64url(of[name]))
        value[place] ^= 1
        of[name] = encode_base64url(bytes(value))

    def rewrite(self, **members: Any) -> None:
        """Change the protected header, and with it what the tag covers."""
        self.header = {name: value for name, value in {**self.header, **members}.items() if value is not None}
        self.envelope["protected"] = encode_base64url(dumps(self.header))

    def raw(self) -> bytes:
        """As bytes."""
        return json.dumps(self.envelope).encode()


def flipped(name: str, place: int) -> Change:
    """One byte is another."""
    return lambda parts: parts.flip(name, place)


def rewritten(**members: Any) -> Change:
    """The protected header says something else."""
    return lambda parts: parts.rewrite(**members)


def another_epk(parts: EnvelopeParts) -> None:
    """An ephemeral key of somebody else's, of the same curve."""
    parts.rewrite(epk=PrivateKey.generate(parts.header["epk"]["crv"]).public.jwk())


# Wrong behind a kid of ours: all of them have to be one thing, by answer and by work.
BEHIND_THE_KID: dict[str, Change] = {
    "tag, first byte": flipped("tag", 0),
    "tag, last byte": flipped("tag", -1),
    "ciphertext, first block": flipped("ciphertext", 0),
    "ciphertext, last block": flipped("ciphertext", -1),
    "iv": flipped("iv", 0),
    "wrapped key, its check": flipped("encrypted_key", 0),
    "wrapped key, its end": flipped("encrypted_key", -1),
    "wrapped key of nothing": lambda parts: parts.entry.update(encrypted_key=encode_base64url(bytes(72))),
    "ephemeral key": another_epk,
    "typ": rewritten(typ="application/x"),
}
# Wrong by what everybody can see.
IN_THE_OPEN: dict[str, Change] = {
    "kid of nobody": lambda parts: parts.entry.update(header={"kid": "did:example:nobody#key"}),
    "kid of another key of ours": lambda parts: parts.entry.update(header={"kid": parts.entry["header"]["kid"][:-1]}),
    "nobody": lambda parts: parts.envelope.update(recipients=[]),
    "alg of a shared key": rewritten(alg="dir"),
    "alg that is none": rewritten(alg="none"),
    "alg of a key wrap": rewritten(alg="ECDH-ES"),
    "enc unknown": rewritten(enc="A128GCM"),
    "enc of another size": rewritten(enc="A256GCM"),
    "apv": rewritten(apv=encode_base64url(bytes(32))),
    "crit": rewritten(crit=["exp"]),
    "epk of another curve": lambda parts: parts.rewrite(epk=PrivateKey.generate("P-384").public.jwk()),
    "epk that is no point": lambda parts: parts.rewrite(
        epk={**parts.header["epk"], "x": encode_base64url(bytes(32))}
    ),
    "no epk": rewritten(epk=None),
    "short tag": lambda parts: parts.envelope.update(tag="AAAA"),
    "short key": lambda parts: parts.entry.update(encrypted_key="AAAA"),
    "no ciphertext": lambda parts: parts.envelope.update(ciphertext=""),
    "junk in ciphertext": lambda parts: parts.envelope.update(ciphertext="*"),
}


def padded_wrongly(kid: str, key: PublicKey) -> bytes:
    """An envelope whose tag is right, and whose last block is no padding: nobody but who seals can make one."""
    ephemeral = PrivateKey.generate(key.curve)
    apv = compute_apv((kid,))
    header = {"typ": jwe.ENCRYPTED_MEDIA_TYPE, "alg": ANONCRYPT, "enc": "A256CBC-HS512", "apv": encode_base64url(apv)}
    protected = encode_base64url(dumps({**header, "epk": ephemeral.public.jwk()}))
    cek, iv = bytes(range(64)), bytes(16)
    encryptor = Cipher(AES(cek[32:]), CBC(iv)).encryptor()
    data = encryptor.update(b"no padding at all, in two blocks" + bytes(16)) + encryptor.finalize()
    covered = protected.encode() + iv + data + (8 * len(protected)).to_bytes(8, "big")
    tag = hmac.digest(cek[:32], covered, "sha512")[:32]
    wrapped = aes_key_wrap(
        derive_kek(derive_ephemeral_secret(ephemeral, key.jwk()), build_other_info(ANONCRYPT, b"", apv), None), cek
    )
    return json.dumps(
        {
            "protected": protected,
            "recipients": [{"header": {"kid": kid}, "encrypted_key": encode_base64url(wrapped)}],
            **{name: encode_base64url(value) for name, value in (("iv", iv), ("ciphertext", data), ("tag", tag))},
        }
    ).encode()


class OracleTests(SynchronousTestCase):
    """Each way to fail, for envelopes of strangers and of accounts."""

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, limits={"ip_per_minute": 100_000, "account_per_minute": 100_000})
        self.bob = InMemoryWallet(self.in_memory).enrol()

    def sealed(self, *, authenticated: bool) -> EnvelopeParts:
        """A good envelope, to one key of the mediator."""
        ours = next((one.id, one.key) for one in self.in_memory.document.key_agreement if one.key.curve == "X25519")
        headers: dict[str, Any] = {"from": self.bob.did} if authenticated else {}
        message = compose_message(PING, to=[self.in_memory.did], **headers)
        plaintext, own = json.dumps(message).encode(), self.bob.identity.agreement
        if authenticated:
            return EnvelopeParts(jwe.encrypt_authcrypt(plaintext, (own.kid, own.private), [ours]))
        return EnvelopeParts(jwe.encrypt_anoncrypt(plaintext, [ours]))

    def broken(self, changes: Mapping[str, Change]) -> list[tuple[str, bytes]]:
        """Each of them, of a fresh envelope each time: what was agreed before is not agreed again."""
        made = []
        for authenticated in (False, True):
            for name, change in changes.items():
                parts = self.sealed(authenticated=authenticated)
                change(parts)
                made.append((name, parts.raw()))
        return made

    def answer(self, raw: bytes) -> tuple[int, str, int | None, bytes]:
        """All of it but what is drawn at random."""
        reply = self.in_memory.receive(raw)
        report = json.loads(reply.body)
        self.assertRegex(report.pop("id"), r"^[0-9A-Za-z-]{20,64}$")
        return reply.status, reply.media_type, reply.retry_after, json.dumps(report).encode()

    def work(self, raw: bytes) -> Counter[str]:
        """How often each costly operation was done for it."""
        done: Counter[str] = Counter()

        def note(frame: FrameType, event: str, argument: object) -> None:
            name = frame.f_code.co_name if event == "call" else getattr(argument, "__name__", "")
            if event in ("call", "c_call") and name in WORK:
                done[name] += 1

        sys.setprofile(note)
        try:
            self.in_memory.receive(raw)
        finally:
            sys.setprofile(None)
        return done

    def test_good_ones_open(self) -> None:
        """What is changed below opens as it is."""
        for authenticated in (False, True):
            self.assertNotEqual(self.in_memory.receive(self.sealed(authenticated=authenticated).raw()).status, 400)

    def test_one_answer(self) -> None:
        """Byte by byte the same, whatever is wrong: no text, status, type or header tells why."""
        ours = next((one.id, one.key) for one in self.in_memory.document.key_agreement if one.key.curve == "X25519")
        answers: dict[tuple[int, str, int | None, bytes], list[str]] = {}
        envelopes = [*self.broken(BEHIND_THE_KID), *self.broken(IN_THE_OPEN), ("padding", padded_wrongly(*ours))]
        for name, raw in envelopes:
            answers.setdefault(self.answer(raw), []).append(name)
        self.assertEqual(len(answers), 1, answers)
        ((status, _, _, report),) = answers
        self.assertEqual((status, json.loads(report)["body"]["code"]), (400, "e.p.trust.crypto"))
        rejected = self.in_memory.counter("mediator_rejected_total", reason="undecryptable")
        self.assertEqual(rejected, len(envelopes))

    def test_one_amount_of_work(self) -> None:
        """Behind a kid of ours, everything that is wrong costs as many agreements, unwrappings and tags."""
        for authenticated in (False, True):
            found = {}
            for name, change in BEHIND_THE_KID.items():
                parts = self.sealed(authenticated=authenticated)
                change(parts)
                found[name] = self.work(parts.raw())
            self.assertEqual(len({tuple(sorted(one.items())) for one in found.values()}), 1, found)
            self.assertGreaterEqual(found["tag, first byte"]["_compute_mac"], 1)
            self.assertGreaterEqual(found["tag, first byte"]["aes_key_unwrap"], 1)

    def test_order(self) -> None:
        """A kid that is not ours costs no agreement: which kids there are is public."""
        for name in ("kid of nobody", "kid of another key of ours", "nobody"):
            parts = self.sealed(authenticated=False)
            IN_THE_OPEN[name](parts)
            self.assertEqual(self.work(parts.raw()), Counter(), name)
