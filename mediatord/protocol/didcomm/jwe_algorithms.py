"""
JOSE algorithms of DIDComm envelopes: key derivation, cached key agreement, and content encryption (reference 1.2 to
1.5).

Cached secrets are bounded in number and never shown. :meth:`mediatord.protocol.didcomm.keys.PrivateKey.exchange` is
the uncached key agreement.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import nacl.exceptions
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CBC
from nacl import bindings

from mediatord.protocol.didcomm.keys import Curve, PrivateKey, PublicKey, compute_x25519
from mediatord.protocol.encoding import encode_base64url

JWEAlg = Literal["ECDH-ES+A256KW", "ECDH-1PU+A256KW"]

ANONCRYPT: JWEAlg = "ECDH-ES+A256KW"
AUTHCRYPT: JWEAlg = "ECDH-1PU+A256KW"

_KDF_FIRST_ROUND = b"\0\0\0\1"
_KEY_BITS = (256).to_bytes(4, "big")
_ALG_INFO = {alg: len(alg).to_bytes(4, "big") + alg.encode() for alg in (ANONCRYPT, AUTHCRYPT)}


def build_other_info(alg: JWEAlg, apu: bytes, apv: bytes) -> bytes:
    """
    OtherInfo of the Concat KDF, without the tag.

    :param apu: decoded, as received; empty if absent. Likewise `apv`.
    """
    return b"".join((_ALG_INFO[alg], len(apu).to_bytes(4, "big"), apu, len(apv).to_bytes(4, "big"), apv, _KEY_BITS))


def derive_kek(secret: bytes, info: bytes, tag: bytes | None = None) -> bytes:
    """
    Derive the 32-byte key-encryption key: one round of the Concat KDF with SHA-256.

    :param secret: Z, or Ze followed by Zs.
    :param info: from :func:`build_other_info`.
    :param tag: content tag for ECDH-1PU; None for ECDH-ES and for draft 03 of ECDH-1PU (reference 1.10).
    """
    private = b"" if tag is None else len(tag).to_bytes(4, "big") + tag
    return hashlib.sha256(_KDF_FIRST_ROUND + secret + info + private).digest()


def compute_apv(kids: Iterable[str]) -> bytes:
    """`apv` of an envelope: SHA-256 of the recipients' kids, sorted by code point (reference 1.3)."""
    return hashlib.sha256(".".join(sorted(kids)).encode()).digest()


# About 300 bytes each.
MAX_CACHED_PAIRS = 16_384
MAX_CACHED_KEYS = 1024
# Cached secrets per key. Few, so that replaying a set of envelopes, as benchmarks do, gains nothing.
_MAX_CACHED_SECRETS = 8
_X25519_KEY_SIZE = 32

KeyExchange = Callable[[bytes], bytes]

_load_private, _load_public = X25519PrivateKey.from_private_bytes, X25519PublicKey.from_public_bytes


@lru_cache(maxsize=MAX_CACHED_KEYS)
def load_key_exchange(secret: bytes) -> KeyExchange:
    """
    Load an X25519 private key; returns a function from public key (32 bytes) to shared secret, with a small cache.

    The cache spares the general path the agreement that the fast path has already computed. The function raises
    ValueError for a wrong size or a key of low order.
    """
    exchange = _load_private(secret).exchange
    return lru_cache(maxsize=_MAX_CACHED_SECRETS)(lambda public: exchange(_load_public(public)))


@lru_cache(maxsize=MAX_CACHED_PAIRS)
def _cached_static_secret(secret: bytes, public: bytes) -> bytes:
    return load_key_exchange(secret)(public)


def derive_ephemeral_secret(key: PrivateKey, peer: PublicKey) -> bytes:
    """
    Z of a static and an ephemeral key.

    :raise ValueError: as :meth:`PrivateKey.exchange`.
    """
    if key.curve == "X25519" == peer.curve:
        return load_key_exchange(key.secret)(peer.raw)
    return key.exchange(peer)


def derive_static_secret(key: PrivateKey, peer: PublicKey) -> bytes:
    """
    Z of two static keys, cached because it never changes.

    :raise ValueError: as :meth:`PrivateKey.exchange`.
    """
    if key.curve == "X25519" == peer.curve:
        return _cached_static_secret(key.secret, peer.raw)
    return key.exchange(peer)


class EphemeralKey:
    """
    A fresh key pair for one envelope.

    :ivar jwk: the public key.
    """

    __slots__ = ("_key", "_secret", "jwk")

    def __init__(self, curve: Curve) -> None:
        self._key: PrivateKey | None = None
        if curve != "X25519":
            self._key = PrivateKey.generate(curve)
            self.jwk = self._key.public.jwk()
            return
        self._secret = secrets.token_bytes(_X25519_KEY_SIZE)
        self.jwk = {"kty": "OKP", "crv": curve, "x": encode_base64url(bindings.crypto_scalarmult_base(self._secret))}

    def exchange(self, peer: PublicKey) -> bytes:
        """
        Z of this key and a static key.

        :raise ValueError: as :meth:`PrivateKey.exchange`.
        """
        if self._key is not None:
            return self._key.exchange(peer)
        if peer.curve != "X25519":
            raise ValueError("keys of different kinds")
        return compute_x25519(self._secret, peer.raw)


def clear_key_caches() -> None:
    """Drop all cached keys and secrets, for example after keys were retired."""
    load_key_exchange.cache_clear()
    _cached_static_secret.cache_clear()


Enc = Literal["A256CBC-HS512", "A256GCM", "XC20P"]
# (key, iv, ciphertext, tag, aad) -> plaintext
DecryptFunction = Callable[[bytes, bytes, bytes, bytes, bytes], bytes]

_BLOCK_SIZE = 16
_HALF_KEY = 32
_PADDINGS = tuple(bytes([count]) * count for count in range(_BLOCK_SIZE + 1))


@dataclass(frozen=True, slots=True)
class ContentCipher:
    """
    A content encryption algorithm (`enc`); sizes in bytes.

    :param key_size: size of the content-encryption key.
    :param encrypt_raw: (key, iv, plaintext, aad) -> (ciphertext, tag).
    :param decrypt_raw: for members of valid size; raises ValueError if authentication fails.
    """

    key_size: int
    iv_size: int
    tag_size: int
    encrypt_raw: Callable[[bytes, bytes, bytes, bytes], tuple[bytes, bytes]]
    decrypt_raw: DecryptFunction

    def encrypt(self, key: bytes, plaintext: bytes, aad: bytes) -> tuple[bytes, bytes, bytes]:
        """Encrypt with a fresh IV; returns IV, ciphertext and tag."""
        iv = secrets.token_bytes(self.iv_size)
        return iv, *self.encrypt_raw(key, iv, plaintext, aad)

    def decrypt(self, key: bytes, iv: bytes, data: bytes, tag: bytes, aad: bytes) -> bytes:
        """
        Authenticate and decrypt.

        :raise ValueError: a member of the wrong size, or authentication fails.
        """
        if len(key) != self.key_size or len(iv) != self.iv_size or len(tag) != self.tag_size:
            raise ValueError("a part of the wrong size")
        return self.decrypt_raw(key, iv, data, tag, aad)


class _UncheckedCipher(Cipher[CBC]):
    """AES-CBC without the size checks of `Cipher`, which cost as much as encrypting a short message."""

    def __init__(self, key: bytes, iv: bytes) -> None:
        self.algorithm = AES(key)
        self.mode = CBC(iv)


def _compute_mac(key: bytes, iv: bytes, data: bytes, aad: bytes) -> bytes:
    message = b"".join((aad, iv, data, (8 * len(aad)).to_bytes(8, "big")))
    return hmac.digest(key[:_HALF_KEY], message, "sha512")[:32]


def _encrypt_cbc(key: bytes, iv: bytes, plaintext: bytes, aad: bytes) -> tuple[bytes, bytes]:
    count = _BLOCK_SIZE - len(plaintext) % _BLOCK_SIZE
    data = _UncheckedCipher(key[_HALF_KEY:], iv).encryptor().update(plaintext + _PADDINGS[count])
    return data, _compute_mac(key, iv, data, aad)


def _decrypt_cbc(key: bytes, iv: bytes, data: bytes, tag: bytes, aad: bytes) -> bytes:
    if not hmac.compare_digest(_compute_mac(key, iv, data, aad), tag):
        raise ValueError("not authentic")
    # The holder of the key wrote the rest, so errors below reveal nothing.
    if not data or len(data) % _BLOCK_SIZE:
        raise ValueError("not whole blocks")
    padded = _UncheckedCipher(key[_HALF_KEY:], iv).decryptor().update(data)  # whole blocks are output immediately
    count = padded[-1]
    if not 1 <= count <= _BLOCK_SIZE or not padded.endswith(_PADDINGS[count]):
        raise ValueError("not padded")
    return padded[:-count]


def _encrypt_gcm(key: bytes, iv: bytes, plaintext: bytes, aad: bytes) -> tuple[bytes, bytes]:
    return _split_tag(AESGCM(key).encrypt(iv, plaintext, aad))


def _decrypt_gcm(key: bytes, iv: bytes, data: bytes, tag: bytes, aad: bytes) -> bytes:
    try:
        return AESGCM(key).decrypt(iv, data + tag, aad)
    except InvalidTag:
        raise ValueError("not authentic") from None


def _encrypt_xchacha(key: bytes, iv: bytes, plaintext: bytes, aad: bytes) -> tuple[bytes, bytes]:
    return _split_tag(bindings.crypto_aead_xchacha20poly1305_ietf_encrypt(plaintext, aad, iv, key))


def _decrypt_xchacha(key: bytes, iv: bytes, data: bytes, tag: bytes, aad: bytes) -> bytes:
    try:
        return bindings.crypto_aead_xchacha20poly1305_ietf_decrypt(data + tag, aad, iv, key)
    except nacl.exceptions.CryptoError:
        raise ValueError("not authentic") from None


def _split_tag(sealed: bytes) -> tuple[bytes, bytes]:
    return sealed[:-16], sealed[-16:]


CONTENT_CIPHERS: dict[Enc, ContentCipher] = {
    "A256CBC-HS512": ContentCipher(64, 16, 32, _encrypt_cbc, _decrypt_cbc),
    "A256GCM": ContentCipher(32, 12, 16, _encrypt_gcm, _decrypt_gcm),
    "XC20P": ContentCipher(32, 24, 16, _encrypt_xchacha, _decrypt_xchacha),
}
