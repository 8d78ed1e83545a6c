"""Signatures, encrypted tags and base64 (reference section 5 and 16)."""

from __future__ import annotations

import base64
import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nacl import bindings

from mediatord.protocol.decentrl.canonical_json import canonicalize
from mediatord.protocol.decentrl.crypto import make_encrypted_tag, sign_json, verify_bytes, verify_json
from mediatord.protocol.encoding import decode_base64, encode_base64
from tests.protocol.decentrl.vectors import VECTORS, secret, signing_key, without

COMMAND = VECTORS["command"]
SIGNED = {"header": COMMAND["header"], "payload": COMMAND["payload"]}
SEEDS = st.binary(min_size=32, max_size=32)
VALUES = st.dictionaries(st.text(), st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text())


@pytest.mark.parametrize(
    ("value", "signature"),
    [
        (SIGNED, COMMAND["signature"]),
        (without(VECTORS["authenticate"], "signature"), VECTORS["authenticate"]["signature"]),
    ],
)
def test_known_answers(value: dict[str, Any], signature: str) -> None:
    """A command and the authentication of a socket (reference section 16)."""
    assert sign_json(value, secret("alice", "signing")) == signature
    assert verify_json(value, signature, signing_key("alice"))
    assert verify_bytes(canonicalize(value), signature, signing_key("alice"))


def test_encrypted_tag() -> None:
    """A tag is the signature of its text, not of its JSON (reference 5.3 and section 16)."""
    seed = secret("alice", "signing")
    assert make_encrypted_tag(VECTORS["tag"]["tag"], seed) == VECTORS["tag"]["encrypted"]
    assert make_encrypted_tag("é", seed) != make_encrypted_tag("e", seed)
    assert verify_bytes("é".encode(), make_encrypted_tag("é", seed), signing_key("alice"))


@settings(deadline=None)
@given(VALUES, SEEDS)
def test_round_trip(value: dict[str, object], seed: bytes) -> None:
    """A signed value verifies in any order of members, and not with an additional one."""
    key, _ = bindings.crypto_sign_seed_keypair(seed)
    signature = sign_json(value, seed)
    assert len(signature) == 88
    assert verify_json(dict(reversed(value.items())), signature, key)
    assert not verify_json({**value, "one more\0": None}, signature, key)


def test_base64_variants() -> None:
    """Either alphabet, padded or not (reference section 5)."""
    signature = COMMAND["signature"]
    url = signature.replace("+", "-").replace("/", "_")
    for spelled in (signature, signature.rstrip("="), url, url.rstrip("=")):
        assert verify_json(SIGNED, spelled, signing_key("alice"))


@pytest.mark.parametrize(
    "signature",
    [
        "",
        "=",
        COMMAND["signature"][:-1],
        COMMAND["signature"][4:],
        COMMAND["signature"] + "AAAA",
        COMMAND["signature"].rstrip("=") + "AA",
        " " + COMMAND["signature"],
        COMMAND["signature"] + "\n",
        COMMAND["signature"].replace("Cg==", "Ch=="),
        COMMAND["signature"].replace("m", "n", 1),
        VECTORS["authenticate"]["signature"],
        "\ud800",
        "é" * 88,
        "A" * 86 + "==",
        "not base64 at all!",
        None,
        5,
        b"A" * 88,
    ],
)
def test_invalid_signatures(signature: Any) -> None:
    """Signatures of other values and malformed ones do not verify, and raise no error."""
    assert not verify_json(SIGNED, signature, signing_key("alice"))
    assert not verify_bytes(b"", signature, signing_key("alice"))


def test_every_bit_counts() -> None:
    """A signature with one flipped bit does not verify."""
    raw = decode_base64(COMMAND["signature"])
    for bit in range(8 * len(raw)):
        turned = bytearray(raw)
        turned[bit // 8] ^= 1 << bit % 8
        assert not verify_json(SIGNED, encode_base64(bytes(turned)), signing_key("alice"))


def test_boundary_between_signature_and_message() -> None:
    """Bytes cannot move between signature and message."""
    raw, message = decode_base64(VECTORS["tag"]["encrypted"]), VECTORS["tag"]["tag"].encode()
    assert verify_bytes(message, encode_base64(raw), signing_key("alice"))
    for both, size in ((raw + message, 63), (raw + message, 0), (raw + message, 65)):
        assert not verify_bytes(both[size:], encode_base64(both[:size]), signing_key("alice"))


@pytest.mark.parametrize("key", [b"", b"1" * 31, b"1" * 33, bytes(32), b"\xff" * 32, b"\1" + bytes(31)])
def test_invalid_keys(key: bytes) -> None:
    """Malformed keys, points off the curve and points of low order verify nothing."""
    assert not verify_json(SIGNED, COMMAND["signature"], key)
    # Under a key of low order this signature would verify for any message.
    assert not verify_bytes(b"anything", encode_base64(b"\1" + bytes(63)), key)


def test_wrong_key() -> None:
    """The key of another DID verifies nothing."""
    assert not verify_json(SIGNED, COMMAND["signature"], signing_key("mediator"))


@pytest.mark.parametrize("value", [math.nan, {"a": b""}, {1: 2}])
def test_values_outside_json(value: object) -> None:
    """Values that JSON cannot express can be neither signed nor verified."""
    with pytest.raises(ValueError):
        sign_json(value, secret("alice", "signing"))
    assert not verify_json(value, COMMAND["signature"], signing_key("alice"))


@settings(deadline=None)
@given(st.binary())
def test_base64_round_trip(data: bytes) -> None:
    """Written in the standard alphabet, padded; read in either, padded or not."""
    text = encode_base64(data)
    assert text == base64.standard_b64encode(data).decode()
    url = base64.urlsafe_b64encode(data).decode()
    assert {decode_base64(spelled) for spelled in (text, url, text.rstrip("="), url.rstrip("="))} == {data}


def test_base64_rejects_stray_characters() -> None:
    """Over all short texts: only what an encoder writes is read, in either alphabet or both."""
    alphabet = "AQgw+/-_= \n*é"
    for size in range(6):
        for characters in itertools.product(alphabet, repeat=size):
            text = "".join(characters)
            try:
                data = decode_base64(text)
            except ValueError as error:
                assert str(error) == "not base64url"
                continue
            written = encode_base64(data)
            assert text.replace("-", "+").replace("_", "/") in (written, written.rstrip("="))


@pytest.mark.parametrize(
    "text", ["A", "AB", "AA=", "A===", "====", "AA==AA==", "AAAA=", "AA AA", "AAAA\n", "ＡＡＡＡ"]
)
def test_invalid_base64(text: str) -> None:
    """Wrong lengths, partial padding, left-over bits, white space and look-alikes."""
    with pytest.raises(ValueError, match="^not base64url$"):
        decode_base64(text)
