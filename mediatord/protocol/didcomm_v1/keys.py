"""
Ed25519 verification keys of DIDComm v1 and their spellings (RFC 0360), signatures, and the X25519 keys of envelopes.

Everywhere but in cryptography and on the wire, a key is named by its did:key without a fragment. Each key has one
such name, so names can be compared and stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import nacl.exceptions
from nacl import bindings

from mediatord.protocol.encoding import decode_base58, encode_base58

KeySpelling = Literal["did:key", "base58"]

KEY_SIZE = 32
SIGNATURE_SIZE = 64

_DID_KEY_PREFIX = "did:key:z"
_ED25519_MULTICODEC = b"\xed\x01"
# 32 zero bytes have the shortest base58: one digit for each byte.
MIN_BASE58_KEY, MAX_BASE58_KEY = 32, 44
# A did:key and the same key once more as its fragment.
_MAX_KEY_TEXT = 128
# About 300 bytes each.
_MAX_CACHED_KEYS = 4096


class InvalidKey(ValueError):
    """Not an Ed25519 key in a spelling of RFC 0360, or none to which a message can be encrypted."""


def parse_key(text: object) -> str:
    """
    The did:key of a key in any spelling: base58, did:key, or did:key with a fragment, which is ignored.

    :raise InvalidKey: anything else, or a key of another kind.
    """
    if not isinstance(text, str) or len(text) > _MAX_KEY_TEXT:
        raise InvalidKey("not the text of a key")
    return _parse_cached_key(text)


@lru_cache(maxsize=_MAX_CACHED_KEYS)
def _parse_cached_key(text: str) -> str:
    if not text.startswith("did:"):
        return encode_did_key(decode_base58_key(text))
    did_key = text.partition("#")[0]
    decode_key(did_key)
    return did_key


def decode_key(did_key: str) -> bytes:
    """
    The 32 bytes of a key.

    :param did_key: without a fragment.
    :raise InvalidKey: not the did:key of an Ed25519 key.
    """
    if not did_key.startswith(_DID_KEY_PREFIX) or len(did_key) > _MAX_KEY_TEXT:
        raise InvalidKey("not a did:key")
    try:
        data = decode_base58(did_key[len(_DID_KEY_PREFIX) :])
    except ValueError:
        raise InvalidKey("not base58") from None
    if data[:2] != _ED25519_MULTICODEC or len(data) != 2 + KEY_SIZE:
        raise InvalidKey("not an Ed25519 key")
    return data[2:]


def decode_base58_key(text: str) -> bytes:
    """
    The 32 bytes of a key in base58.

    :raise InvalidKey: anything else.
    """
    if not MIN_BASE58_KEY <= len(text) <= MAX_BASE58_KEY:
        raise InvalidKey("too short or too long for a key")
    try:
        data = decode_base58(text)
    except ValueError:
        raise InvalidKey("not base58") from None
    if len(data) != KEY_SIZE:
        raise InvalidKey("not 32 bytes")
    return data


def encode_did_key(verkey: bytes) -> str:
    """The did:key of an Ed25519 key of 32 bytes."""
    return _DID_KEY_PREFIX + encode_base58(_ED25519_MULTICODEC + verkey)


def encode_base58_key(did_key: str) -> str:
    """
    The base58 spelling of a key.

    :raise InvalidKey: as :func:`decode_key`.
    """
    return encode_base58(decode_key(did_key))


def spell_key(did_key: str, spelling: KeySpelling) -> str:
    """
    A key as a peer spells keys.

    :raise InvalidKey: as :func:`decode_key`.
    """
    return did_key if spelling == "did:key" else encode_base58_key(did_key)


def find_spelling(text: str) -> KeySpelling:
    """How a key that :func:`parse_key` reads is spelled."""
    return "did:key" if text.startswith("did:") else "base58"


@lru_cache(maxsize=_MAX_CACHED_KEYS)
def derive_agreement_key(did_key: str) -> bytes:
    """
    The X25519 public key of an Ed25519 key. Cached: it costs as much as opening an envelope.

    :raise InvalidKey: as :func:`decode_key`, or not a point of the main subgroup.
    """
    try:
        return bindings.crypto_sign_ed25519_pk_to_curve25519(decode_key(did_key))
    except nacl.exceptions.CryptoError:
        raise InvalidKey("not a point of the main subgroup") from None


def verify_signature(did_key: str, data: bytes, signature: bytes) -> bool:
    """Whether an Ed25519 signature over `data` is of this key."""
    try:
        bindings.crypto_sign_open(signature + data, decode_key(did_key))
    except (InvalidKey, nacl.exceptions.CryptoError):
        return False
    return len(signature) == SIGNATURE_SIZE


@dataclass(frozen=True, slots=True)
class SigningKey:
    """
    An Ed25519 key pair and the X25519 key pair derived from it.

    :param secret: seed and public key.
    :param agreement_secret: X25519 private key; `agreement_public` is its public key.
    """

    did_key: str
    verkey: bytes
    secret: bytes = field(repr=False)
    agreement_secret: bytes = field(repr=False)
    agreement_public: bytes

    @classmethod
    def from_seed(cls, seed: bytes) -> SigningKey:
        """
        The key pair of a seed of 32 bytes.

        :raise ValueError: a seed of another size.
        """
        if len(seed) != KEY_SIZE:
            raise ValueError("a seed of the wrong size")
        verkey, secret = bindings.crypto_sign_seed_keypair(seed)
        agreement_secret = bindings.crypto_sign_ed25519_sk_to_curve25519(secret)
        agreement_public = bindings.crypto_scalarmult_base(agreement_secret)
        return cls(encode_did_key(verkey), verkey, secret, agreement_secret, agreement_public)

    def sign(self, data: bytes) -> bytes:
        """Sign with Ed25519: 64 bytes."""
        return bindings.crypto_sign(data, self.secret)[:SIGNATURE_SIZE]
