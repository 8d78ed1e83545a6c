"""Undecryptable envelopes are no oracle: responses and work do not depend on what is wrong."""

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

# Operations whose time could be measured: agreement, unwrapping, the tag over the whole ciphertext.
COSTLY_OPERATIONS = ("derive_ephemeral_secret", "derive_static_secret", "aes_key_unwrap", "_compute_mac")

Change = Callable[["EnvelopeParts"], None]


class EnvelopeParts:
    """Envelope to one key of the mediator, in parts that can be changed separately."""

    def __init__(self, raw: bytes) -> None:
        self.envelope: dict[str, Any] = json.loads(raw)
        self.header: dict[str, Any] = json.loads(decode_base64url(self.envelope["protected"]))
        self.entry: dict[str, Any] = self.envelope["recipients"][0]

    def flip_byte(self, name: str, place: int) -> None:
        """Change one byte of a member."""
        of = self.entry if name == "encrypted_key" else self.envelope
        value = bytearray(decode_base64url(of[name]))
        value[place] ^= 1
        of[name] = encode_base64url(bytes(value))

    def rewrite_header(self, **members: Any) -> None:
        """Change the protected header, and so what the tag covers."""
        self.header = {name: value for name, value in {**self.header, **members}.items() if value is not None}
        self.envelope["protected"] = encode_base64url(dumps(self.header))

    def raw(self) -> bytes:
        """The envelope as bytes."""
        return json.dumps(self.envelope).encode()


def flip_byte_of(name: str, place: int) -> Change:
    """Return a change of one byte."""
    return lambda parts: parts.flip_byte(name, place)


def change_header(**members: Any) -> Change:
    """Return a change of the protected header."""
    return lambda parts: parts.rewrite_header(**members)


def replace_epk(parts: EnvelopeParts) -> None:
    """Replace the ephemeral key by another one of the same curve."""
    parts.rewrite_header(epk=PrivateKey.generate(parts.header["epk"]["crv"]).public.jwk())


# Failures with a key id of the mediator: responses and work must be identical.
FAILURES_WITH_KNOWN_KID: dict[str, Change] = {
    "tag, first byte": flip_byte_of("tag", 0),
    "tag, last byte": flip_byte_of("tag", -1),
    "ciphertext, first block": flip_byte_of("ciphertext", 0),
    "ciphertext, last block": flip_byte_of("ciphertext", -1),
    "iv": flip_byte_of("iv", 0),
    "wrapped key, its check": flip_byte_of("encrypted_key", 0),
    "wrapped key, its end": flip_byte_of("encrypted_key", -1),
    "wrapped key of nothing": lambda parts: parts.entry.update(encrypted_key=encode_base64url(bytes(72))),
    "ephemeral key": replace_epk,
    "typ": change_header(typ="application/x"),
}
# Failures that anybody can see.
VISIBLE_FAILURES: dict[str, Change] = {
    "kid of nobody": lambda parts: parts.entry.update(header={"kid": "did:example:nobody#key"}),
    "kid of another key of ours": lambda parts: parts.entry.update(header={"kid": parts.entry["header"]["kid"][:-1]}),
    "nobody": lambda parts: parts.envelope.update(recipients=[]),
    "alg of a shared key": change_header(alg="dir"),
    "alg that is none": change_header(alg="none"),
    "alg of a key wrap": change_header(alg="ECDH-ES"),
    "enc unknown": change_header(enc="A128GCM"),
    "enc of another size": change_header(enc="A256GCM"),
    "apv": change_header(apv=encode_base64url(bytes(32))),
    "crit": change_header(crit=["exp"]),
    "epk of another curve": lambda parts: parts.rewrite_header(epk=PrivateKey.generate("P-384").public.jwk()),
    "epk that is no point": lambda parts: parts.rewrite_header(
        epk={**parts.header["epk"], "x": encode_base64url(bytes(32))}
    ),
    "no epk": change_header(epk=None),
    "short tag": lambda parts: parts.envelope.update(tag="AAAA"),
    "short key": lambda parts: parts.entry.update(encrypted_key="AAAA"),
    "no ciphertext": lambda parts: parts.envelope.update(ciphertext=""),
    "junk in ciphertext": lambda parts: parts.envelope.update(ciphertext="*"),
}


def encrypt_with_invalid_padding(kid: str, key: PublicKey) -> bytes:
    """Encrypt an envelope with a valid tag and invalid padding, which only its sender can do."""
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
    """All failures, for anonymous and authenticated envelopes."""

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, limits={"ip_per_minute": 100_000, "account_per_minute": 100_000})
        self.bob = InMemoryWallet(self.in_memory).enrol()

    def encrypt(self, *, authenticated: bool) -> EnvelopeParts:
        """Encrypt a valid envelope to one key of the mediator."""
        ours = next(
            (item.id, item.key) for item in self.in_memory.document.key_agreement if item.key.curve == "X25519"
        )
        headers: dict[str, Any] = {"from": self.bob.did} if authenticated else {}
        message = compose_message(PING, to=[self.in_memory.did], **headers)
        plaintext, own = json.dumps(message).encode(), self.bob.identity.agreement
        if authenticated:
            return EnvelopeParts(jwe.encrypt_authcrypt(plaintext, (own.kid, own.private), [ours]))
        return EnvelopeParts(jwe.encrypt_anoncrypt(plaintext, [ours]))

    def changed(self, changes: Mapping[str, Change]) -> list[tuple[str, bytes]]:
        """Yield each change of a fresh envelope, so that no cached key agreement is used."""
        made = []
        for authenticated in (False, True):
            for name, change in changes.items():
                parts = self.encrypt(authenticated=authenticated)
                change(parts)
                made.append((name, parts.raw()))
        return made

    def response(self, raw: bytes) -> tuple[int, str, int | None, bytes]:
        """Everything in the response except random parts."""
        reply = self.in_memory.receive(raw)
        report = json.loads(reply.body)
        self.assertRegex(report.pop("id"), r"^[0-9A-Za-z-]{20,64}$")
        return reply.status, reply.media_type, reply.retry_after, json.dumps(report).encode()

    def count_costly_operations(self, raw: bytes) -> Counter[str]:
        """Count costly operations per envelope."""
        done: Counter[str] = Counter()

        def record_call(frame: FrameType, event: str, argument: object) -> None:
            name = frame.f_code.co_name if event == "call" else getattr(argument, "__name__", "")
            if event in ("call", "c_call") and name in COSTLY_OPERATIONS:
                done[name] += 1

        sys.setprofile(record_call)
        try:
            self.in_memory.receive(raw)
        finally:
            sys.setprofile(None)
        return done

    def test_unchanged_envelopes_open(self) -> None:
        """Without a change the envelopes open."""
        for authenticated in (False, True):
            self.assertNotEqual(self.in_memory.receive(self.encrypt(authenticated=authenticated).raw()).status, 400)

    def test_responses_are_identical(self) -> None:
        """Responses are identical byte by byte, whatever is wrong."""
        ours = next(
            (item.id, item.key) for item in self.in_memory.document.key_agreement if item.key.curve == "X25519"
        )
        answers: dict[tuple[int, str, int | None, bytes], list[str]] = {}
        envelopes = [
            *self.changed(FAILURES_WITH_KNOWN_KID),
            *self.changed(VISIBLE_FAILURES),
            ("padding", encrypt_with_invalid_padding(*ours)),
        ]
        for name, raw in envelopes:
            answers.setdefault(self.response(raw), []).append(name)
        self.assertEqual(len(answers), 1, answers)
        ((status, _, _, report),) = answers
        self.assertEqual((status, json.loads(report)["body"]["code"]), (400, "e.p.trust.crypto"))
        rejected = self.in_memory.counter("mediator_rejected_total", reason="undecryptable")
        self.assertEqual(rejected, len(envelopes))

    def test_work_is_constant(self) -> None:
        """With a key id of the mediator, every failure costs the same agreements, unwrappings and tags."""
        for authenticated in (False, True):
            found = {}
            for name, change in FAILURES_WITH_KNOWN_KID.items():
                parts = self.encrypt(authenticated=authenticated)
                change(parts)
                found[name] = self.count_costly_operations(parts.raw())
            self.assertEqual(len({tuple(sorted(item.items())) for item in found.values()}), 1, found)
            self.assertGreaterEqual(found["tag, first byte"]["_compute_mac"], 1)
            self.assertGreaterEqual(found["tag, first byte"]["aes_key_unwrap"], 1)

    def test_unknown_key_id_costs_no_agreement(self) -> None:
        """An unknown key id costs no agreement: key ids are public."""
        for name in ("kid of nobody", "kid of another key of ours", "nobody"):
            parts = self.encrypt(authenticated=False)
            VISIBLE_FAILURES[name](parts)
            self.assertEqual(self.count_costly_operations(parts.raw()), Counter(), name)
