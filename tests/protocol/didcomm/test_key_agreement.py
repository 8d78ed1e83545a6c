"""Cached key agreements give the secrets of the plain key agreement."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from nacl import bindings

from mediatord.protocol.didcomm import jwe
from mediatord.protocol.didcomm.forward import FastForwardParser
from mediatord.protocol.didcomm.jwe import (
    clear_key_caches,
    decrypt_envelope,
    derive_ephemeral_secret,
    derive_static_secret,
    encrypt_anoncrypt,
    encrypt_authcrypt,
    load_key_exchange,
    parse_envelope,
)
from mediatord.protocol.didcomm.keys import PrivateKey, PublicKey

# Points of RFC 7748 with which every secret is zero.
LOW_ORDER = (
    "00" * 32,
    "01" + "00" * 31,
    "00" * 31 + "80",
    *(f"{first}{'ff' * 30}7f" for first in ("ec", "ed", "ee")),
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
)
BOB, ALICE = "did:example:bob#1", "did:example:alice#1"


@pytest.fixture(autouse=True)
def empty_caches() -> Iterator[None]:
    clear_key_caches()
    yield
    clear_key_caches()


@pytest.mark.parametrize("curve", ["X25519", "P-256", "P-521"])
def test_same_secret(curve: Any) -> None:
    """On every curve, from both sides, the first time and afterwards."""
    one, other = PrivateKey.generate(curve), PrivateKey.generate(curve)
    secret = one.exchange(other.public)
    for _ in range(2):
        assert derive_ephemeral_secret(other, one.public.jwk()) == derive_static_secret(one, other.public) == secret
        assert derive_static_secret(other, one.public) == secret


@pytest.mark.parametrize("point", LOW_ORDER)
def test_low_order_key(point: str) -> None:
    """Refused as by the plain key agreement, every time."""
    key, peer = PrivateKey.generate("X25519"), PublicKey("X25519", bytes.fromhex(point))
    for agreeing in (
        key.exchange,
        lambda peer: derive_ephemeral_secret(key, peer.jwk()),
        lambda peer: derive_static_secret(key, peer),
    ):
        for _ in range(2):
            with pytest.raises(ValueError):
                agreeing(peer)


def test_incompatible_keys() -> None:
    """Keys on different curves, and signing keys, are refused."""
    x25519, p256, ed25519 = (PrivateKey.generate(curve) for curve in ("X25519", "P-256", "Ed25519"))
    for one, other in ((x25519, p256), (p256, x25519), (x25519, ed25519), (ed25519, x25519), (ed25519, ed25519)):
        with pytest.raises(ValueError):
            derive_ephemeral_secret(one, other.public.jwk())
        with pytest.raises(ValueError):
            derive_static_secret(one, other.public)


class AgreementCounter:
    """Counts key agreements and key generations on X25519."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for module, name in (
            (jwe, "_load_public"),
            (jwe, "_load_private"),
            (bindings, "crypto_scalarmult"),
            (bindings, "crypto_scalarmult_base"),
        ):
            monkeypatch.setattr(module, name, self._counting(getattr(module, name)))

    def _counting(self, function: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            self.count += 1
            return function(*arguments)

        return counted


def test_number_of_agreements(monkeypatch: pytest.MonkeyPatch) -> None:
    """With cached keys: one to decrypt anything, even on both paths; one and a fresh key to encrypt."""
    bob, alice = PrivateKey.generate("X25519"), PrivateKey.generate("X25519")
    to_bob = [(BOB, bob.public)]
    counted = AgreementCounter(monkeypatch)

    def cost_of(work: Any) -> int:
        before = counted.count
        work()
        return counted.count - before

    def encrypt() -> bytes:
        return encrypt_authcrypt(b"x", (ALICE, alice), to_bob)

    def decrypt(raw: bytes) -> bytes:
        sender = alice.public if parse_envelope(raw).sender_kid else None
        return decrypt_envelope(parse_envelope(raw), BOB, bob, sender)

    decrypt(encrypt())
    authcrypt, anoncrypt = encrypt(), encrypt_anoncrypt(b"x", to_bob)
    assert cost_of(lambda: decrypt(authcrypt)) == 1
    assert cost_of(lambda: decrypt(anoncrypt)) == 1
    unusual, usual = encrypt_anoncrypt(b"{}", to_bob), FastForwardParser({BOB: (bob,)})
    assert cost_of(lambda: (usual.read(unusual), decrypt(unusual))) == 1
    assert cost_of(lambda: usual.read(authcrypt)) == 0
    assert cost_of(encrypt) == 2
    assert cost_of(lambda: encrypt_anoncrypt(b"x", to_bob)) == 2


def test_caches_are_bounded() -> None:
    """Caches are bounded and can be cleared."""
    key = PrivateKey.generate("X25519")
    derive_static_secret(key, PrivateKey.generate("X25519").public)
    pairs = jwe._cached_static_secret.cache_info()
    assert (pairs.currsize, pairs.maxsize) == (1, jwe.MAX_CACHED_PAIRS)
    assert load_key_exchange.cache_info().maxsize == jwe.MAX_CACHED_KEYS
    clear_key_caches()
    assert jwe._cached_static_secret.cache_info().currsize == load_key_exchange.cache_info().currsize == 0
