"""
An independent writer of DIDComm v1 envelopes, which can write what is not allowed.

It shares no code with `mediatord`, and computes sealed boxes from their definition, so that they can be repeated.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nacl.bindings import (
    crypto_aead_chacha20poly1305_ietf_encrypt,
    crypto_box,
    crypto_scalarmult_base,
    crypto_sign_ed25519_pk_to_curve25519,
    crypto_sign_ed25519_sk_to_curve25519,
    crypto_sign_seed_keypair,
)

_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"

Change = Callable[[dict[str, Any]], object]


def b64(data: bytes) -> str:
    """Base64url without padding."""
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def unb64(text: str) -> bytes:
    """Inverse of :func:`b64`."""
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def base58(data: bytes) -> str:
    """Base58btc, digit by digit."""
    number, digits = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        digits = _BASE58[digit] + digits
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + digits


@dataclass(frozen=True)
class KeyPair:
    """An Ed25519 key pair."""

    seed: bytes

    @property
    def verkey(self) -> bytes:
        """The public key."""
        return crypto_sign_seed_keypair(self.seed)[0]

    @property
    def name(self) -> str:
        """In base58."""
        return base58(self.verkey)

    @property
    def agreement_public(self) -> bytes:
        """The X25519 public key."""
        return crypto_sign_ed25519_pk_to_curve25519(self.verkey)

    @property
    def agreement_secret(self) -> bytes:
        """The X25519 private key."""
        return crypto_sign_ed25519_sk_to_curve25519(crypto_sign_seed_keypair(self.seed)[1])


def seal(data: bytes, public: bytes, ephemeral: bytes) -> bytes:
    """A sealed box with this ephemeral private key."""
    ephemeral_public = crypto_scalarmult_base(ephemeral)
    nonce = hashlib.blake2b(ephemeral_public + public, digest_size=24).digest()
    return ephemeral_public + crypto_box(data, nonce, public, ephemeral)


@dataclass(frozen=True)
class EnvelopeWriter:
    """
    Writes one envelope after another.

    :param sender: of an authcrypt; None for an anoncrypt.
    :param sender_text: what is sealed as the sender; default: the base58 of its key.
    :param change: edits the protected header before it is encoded.
    :param encode: encodes the protected header, and base64 everywhere.
    """

    sender: KeyPair | None = None
    sender_text: bytes | None = None
    change: Change = lambda header: None
    encode: Callable[[bytes], str] = b64
    dump: Callable[[Any], str] = lambda value: json.dumps(value, separators=(",", ":"))
    cek: bytes = b"\3" * 32
    cek_nonce: bytes = b"\4" * 24
    iv: bytes = b"\5" * 12
    ephemeral: bytes | None = None

    def write(self, plaintext: bytes, *recipients: KeyPair) -> dict[str, Any]:
        """The envelope as a JSON object."""
        header: dict[str, Any] = {"enc": "xchacha20poly1305_ietf", "typ": "JWM/1.0"}
        header["alg"] = "Anoncrypt" if self.sender is None else "Authcrypt"
        header["recipients"] = self._build_entries(recipients)
        self.change(header)
        protected = self.encode(self.dump(header).encode())
        sealed = crypto_aead_chacha20poly1305_ietf_encrypt(plaintext, protected.encode(), self.iv, self.cek)
        return {
            "protected": protected,
            "iv": self.encode(self.iv),
            "ciphertext": self.encode(sealed[:-16]),
            "tag": self.encode(sealed[-16:]),
        }

    def _build_entries(self, recipients: Sequence[KeyPair]) -> list[dict[str, Any]]:
        return [self._build_entry(recipient) for recipient in recipients]

    def _build_entry(self, recipient: KeyPair) -> dict[str, Any]:
        public, ephemeral = recipient.agreement_public, self.ephemeral or os.urandom(32)
        if self.sender is None:
            sealed = self.encode(seal(self.cek, public, ephemeral))
            return {"encrypted_key": sealed, "header": {"kid": recipient.name}}
        text = self.sender.name.encode() if self.sender_text is None else self.sender_text
        return {
            "encrypted_key": self.encode(crypto_box(self.cek, self.cek_nonce, public, self.sender.agreement_secret)),
            "header": {
                "kid": recipient.name,
                "sender": self.encode(seal(text, public, ephemeral)),
                "iv": self.encode(self.cek_nonce),
            },
        }
