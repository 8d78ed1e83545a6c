"""
Key agreement with keys that come again and again: ours, and those of the wallets we write to (reference 1.4).

:meth:`mediatord.protocol.didcomm.keys.PrivateKey.exchange` is for a key that is used once. What is remembered here is
secret, bounded in number, and never shown.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import lru_cache

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from nacl import bindings

from mediatord.protocol.didcomm.keys import Curve, PrivateKey, PublicKey, scalar_product
from mediatord.protocol.jsontext import b64url_encode

# About 300 bytes each.
MAX_PAIRS = 16_384
MAX_PREPARED = 1024
# Secrets of one key: few, so that nothing is gained by sending the same envelopes in turn, as benchmarks do.
_MAX_LAST = 8
_SIZE = 32

Exchange = Callable[[bytes], bytes]

_prepare, _read_public = X25519PrivateKey.from_private_bytes, X25519PublicKey.from_public_bytes


@lru_cache(maxsize=MAX_PREPARED)
def prepared(secret: bytes) -> Exchange:
    """
    An X25519 key made ready: what agrees a secret with the 32 bytes of a public key.

    It raises ValueError for another size, and for a key of low order. It knows the last secrets, so that an envelope
    that has to be opened once more, in the long way after the short one, does not cost another agreement.
    """
    exchange = _prepare(secret).exchange
    return lru_cache(maxsize=_MAX_LAST)(lambda public: exchange(_read_public(public)))


@lru_cache(maxsize=MAX_PAIRS)
def _between(secret: bytes, public: bytes) -> bytes:
    return prepared(secret)(public)


def agree(key: PrivateKey, peer: PublicKey) -> bytes:
    """
    Z of a lasting key and one that is used once.

    :raise ValueError: as :meth:`PrivateKey.exchange`.
    """
    if key.curve == "X25519" == peer.curve:
        return prepared(key.secret)(peer.raw)
    return key.exchange(peer)


def agree_lasting(key: PrivateKey, peer: PublicKey) -> bytes:
    """
    Z of two lasting keys, which is always the same: computed once for as long as it is remembered.

    :raise ValueError: as :meth:`PrivateKey.exchange`.
    """
    if key.curve == "X25519" == peer.curve:
        return _between(key.secret, peer.raw)
    return key.exchange(peer)


class Ephemeral:
    """
    A fresh key, for one envelope.

    :ivar jwk: its public half.
    """

    __slots__ = ("_key", "_secret", "jwk")

    def __init__(self, curve: Curve) -> None:
        self._key: PrivateKey | None = None
        if curve != "X25519":
            self._key = PrivateKey.generate(curve)
            self.jwk = self._key.public.jwk()
            return
        self._secret = secrets.token_bytes(_SIZE)
        self.jwk = {"kty": "OKP", "crv": curve, "x": b64url_encode(bindings.crypto_scalarmult_base(self._secret))}

    def exchange(self, peer: PublicKey) -> bytes:
        """
        Z of it and a lasting key.

        :raise ValueError: as :meth:`PrivateKey.exchange`.
        """
        if self._key is not None:
            return self._key.exchange(peer)
        if peer.curve != "X25519":
            raise ValueError("keys of different kinds")
        return scalar_product(self._secret, peer.raw)


def forget() -> None:
    """All of it, as when keys are retired."""
    prepared.cache_clear()
    _between.cache_clear()
