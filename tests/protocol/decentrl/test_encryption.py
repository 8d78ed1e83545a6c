"""X25519 and AES-256-GCM (reference 5.1, 5.2 and section 16)."""

from __future__ import annotations

from base64 import b64encode, urlsafe_b64encode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mediatord.protocol.decentrl.crypto import (
    decode_public_key,
    decrypt,
    derive_shared_secret,
    encrypt,
    generate_key_pair,
)
from mediatord.protocol.decentrl.did_decentrl import encode_multibase_key
from mediatord.protocol.encoding import decode_base64, encode_base64
from tests.protocol.decentrl.vectors import VECTORS, agreement_key, secret

SEALED = VECTORS["sealed"]
KEY = bytes.fromhex(SEALED["key"])
KEYS = st.binary(min_size=32, max_size=32)
# Points of low order: the secret is zero for any private key.
LOW_ORDER = [
    bytes(32),
    b"\1" + bytes(31),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    bytes.fromhex("ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
]


def test_known_answer() -> None:
    """Nonce, ciphertext and tag in one base64 string (reference section 16)."""
    plaintext = SEALED["plaintext"].encode()
    assert encrypt(plaintext, KEY, bytes.fromhex(SEALED["nonce"])) == SEALED["text"]
    assert decrypt(SEALED["text"], KEY) == plaintext


def test_shared_secrets() -> None:
    """Both sides derive the X25519 secret (reference section 16)."""
    ephemeral, prekey = secret("alice", "ephemeral"), secret("mediator", "prekey")
    expected = bytes.fromhex(VECTORS["shared_secret"])
    assert derive_shared_secret(ephemeral, agreement_key("mediator", "prekey")) == expected
    assert derive_shared_secret(prekey, agreement_key("alice", "ephemeral")) == expected
    root = derive_shared_secret(ephemeral, agreement_key("mediator", "ephemeral"))
    assert encode_base64(root) == VECTORS["contract"]["root_secret"]


@settings(deadline=None)
@given(st.binary(), KEYS)
def test_round_trip(plaintext: bytes, key: bytes) -> None:
    """A ciphertext decrypts with its key, in any base64 variant."""
    text = encrypt(plaintext, key)
    assert len(decode_base64(text)) == 12 + len(plaintext) + 16
    for spelled in (text, text.rstrip("="), urlsafe_b64encode(decode_base64(text)).decode()):
        assert decrypt(spelled, key) == plaintext


def test_nonces_are_fresh() -> None:
    """The same plaintext has another ciphertext each time."""
    assert len({encrypt(b"x", KEY) for _ in range(100)}) == 100


@pytest.mark.parametrize("place", [0, 11, 12, 20, -16, -1])
def test_tampering(place: int) -> None:
    """One flipped bit of nonce, ciphertext or tag is detected."""
    data = bytearray(decode_base64(SEALED["text"]))
    data[place] ^= 1
    with pytest.raises(ValueError, match="^not sealed with this key$"):
        decrypt(encode_base64(bytes(data)), KEY)


@pytest.mark.parametrize(
    "text", ["", "AAAA", encode_base64(bytes(27)), SEALED["text"] + "!", SEALED["text"][:-4], "é"]
)
def test_malformed_ciphertext(text: str) -> None:
    """Too short, truncated, or not base64."""
    with pytest.raises(ValueError):
        decrypt(text, KEY)


def test_wrong_key() -> None:
    """Another key decrypts nothing; other AES key sizes are refused."""
    with pytest.raises(ValueError):
        decrypt(SEALED["text"], bytes(32))
    for size in (0, 16, 24, 31, 33):
        with pytest.raises(ValueError, match="^a key of the wrong size$"):
            decrypt(SEALED["text"], bytes(size))
        with pytest.raises(ValueError, match="^a key of the wrong size$"):
            encrypt(b"", bytes(size))


@pytest.mark.parametrize("size", [0, 8, 11, 13, 16])
def test_nonce_size(size: int) -> None:
    """Other nonce sizes, which AES-GCM allows, are refused."""
    with pytest.raises(ValueError, match="^a nonce of the wrong size$"):
        encrypt(b"", KEY, bytes(size))


def test_generates_key_pairs() -> None:
    """Pairs are fresh, and their halves match."""
    (mine, my_key), (yours, your_key) = generate_key_pair(), generate_key_pair()
    assert mine != yours
    assert derive_shared_secret(mine, your_key) == derive_shared_secret(yours, my_key)


@pytest.mark.parametrize("public", LOW_ORDER)
def test_low_order_key(public: bytes) -> None:
    """A key of low order is refused (reference 5.2)."""
    with pytest.raises(ValueError, match="^a public key of low order$"):
        derive_shared_secret(secret("mediator", "prekey"), public)


@pytest.mark.parametrize(("private", "public"), [(31, 32), (33, 32), (32, 31), (32, 33), (0, 0)])
def test_key_size(private: int, public: int) -> None:
    """Keys have 32 bytes."""
    with pytest.raises(ValueError, match="^a key of the wrong size$"):
        derive_shared_secret(b"\2" * private, b"\3" * public)


@settings(deadline=None)
@given(KEYS)
def test_public_key_encodings(key: bytes) -> None:
    """All base64 variants, and multibase with its prefix (reference 5.2)."""
    standard, url = b64encode(key).decode(), urlsafe_b64encode(key).decode()
    spelled = [standard, standard.rstrip("="), url, url.rstrip("="), encode_multibase_key(key, "X25519")]
    assert {decode_public_key(text) for text in spelled} == {key}


def test_public_key_without_prefix() -> None:
    """Multibase without the multicodec prefix is accepted."""
    assert decode_public_key(VECTORS["mediator"]["raw_prekey"]) == agreement_key("mediator", "prekey")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "z",
        "AAAA",
        encode_base64(bytes(31)),
        encode_base64(bytes(33)),
        encode_multibase_key(bytes(32), "Ed25519"),
        encode_multibase_key(b"\1" * 32, "X25519")[1:],
        "é",
        "z" * 100_000,
    ],
)
def test_invalid_public_keys(text: str) -> None:
    """Other sizes, another type of key, or neither encoding."""
    with pytest.raises(ValueError):
        decode_public_key(text)
