"""Keys and their encodings (reference 8.2, 8.3, 8.6)."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st
from jwcrypto.jwk import JWK

from mediatord.protocol import encoding
from mediatord.protocol.didcomm.keys import (
    Curve,
    PrivateKey,
    PublicKey,
    convert_ed25519_to_x25519,
    convert_ed25519_to_x25519_private,
)

ALL: tuple[Curve, ...] = get_args(Curve)
OKP: tuple[Curve, ...] = ("X25519", "Ed25519")
EC: tuple[Curve, ...] = ("P-256", "P-384", "P-521", "secp256k1")
KEYS = {curve: PrivateKey.generate(curve) for curve in ALL}
X25519 = PrivateKey.from_secret("X25519", b"\x31" * 32)
ED25519 = PrivateKey.from_secret("Ed25519", b"\x32" * 32)
# Points that X25519 maps to zero: those of order 1, 2, 4 and 8, and their encodings above the prime.
LOW_ORDER = [
    "00" * 32,
    "01" + "00" * 31,
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    "ec" + "ff" * 30 + "7f",
    "ed" + "ff" * 30 + "7f",
    "ee" + "ff" * 30 + "7f",
]


def test_known_answers() -> None:
    """The three keys of reference 8.3."""
    assert X25519.public.raw.hex() == "04f5f29162c31a8defa18e6e742224ee806fc1718a278be859ba5620402b8f3a"
    assert X25519.public.multibase() == "z6LSc1YK7J47otkPx5smthWsH492pKyRthNs7XYiXo1GCnpR"
    assert ED25519.public.raw.hex() == "5e212c0980e4b39fc09721134aa02109374edfd260c0d3d03cb501c8d65457a9"
    assert ED25519.public.multibase() == "z6MkknhhwAGsRrcTTthPSsBbQtrNX6CMqt4poro5jdP6uCue"
    derived = convert_ed25519_to_x25519(ED25519.public)
    assert derived.multibase() == "z6LSrSBwAXWz5HV7peV57WE3fau3LBCWtuC1zzJCvK58cvw7"
    assert convert_ed25519_to_x25519_private(ED25519).public == derived


@pytest.mark.parametrize("curve", ALL)
def test_encodings(curve: Curve) -> None:
    """JWK, multibase and base58 decode to the same key; jwcrypto agrees with the JWK."""
    key = KEYS[curve]
    assert PublicKey.from_jwk(key.public.jwk()) == key.public
    assert PublicKey.from_multibase(key.public.multibase()) == key.public
    assert PublicKey.from_base58(curve, encoding.encode_base58(key.public.raw)) == key.public
    assert PrivateKey.from_jwk(key.jwk()) == key
    jwcrypto_key = JWK(**key.jwk()).export_public(as_dict=True)
    assert {name: value for name, value in jwcrypto_key.items() if name != "kid"} == key.public.jwk()


@pytest.mark.parametrize(
    ("curve", "start"),
    [
        ("Ed25519", "z6Mk"),
        ("X25519", "z6LS"),
        ("secp256k1", "zQ3s"),
        ("P-256", "zDn"),
        ("P-384", "z82"),
        ("P-521", "z2J9"),
    ],
)
def test_multibase_prefixes(curve: Curve, start: str) -> None:
    """The prefixes of reference 8.2."""
    assert KEYS[curve].public.multibase().startswith(start)


@pytest.mark.parametrize("curve", EC)
def test_compressed_base58(curve: Curve) -> None:
    """A publicKeyBase58 may hold a compressed point."""
    compressed = encoding.decode_base58(KEYS[curve].public.multibase()[1:])[2:]
    assert PublicKey.from_base58(curve, encoding.encode_base58(compressed)) == KEYS[curve].public


@pytest.mark.parametrize("curve", [curve for curve in ALL if curve != "Ed25519"])
def test_exchange_agrees(curve: Curve) -> None:
    """Both sides derive the same secret, and so does jwcrypto."""
    one, other = KEYS[curve], PrivateKey.generate(curve)
    assert one.exchange(other.public) == other.exchange(one.public)
    own_key: Any = JWK(**one.jwk()).get_op_key("unwrapKey")
    jwcrypto_key: Any = JWK(**other.public.jwk()).get_op_key("wrapKey")
    expected = own_key.exchange(jwcrypto_key) if curve == "X25519" else own_key.exchange(ec.ECDH(), jwcrypto_key)
    assert one.exchange(other.public) == expected


def test_exchange_with_incompatible_key() -> None:
    """Keys of different types, and signing keys, are refused."""
    for one, other in (("X25519", "P-256"), ("P-256", "secp256k1"), ("Ed25519", "Ed25519"), ("X25519", "Ed25519")):
        with pytest.raises(ValueError):
            KEYS[one].exchange(KEYS[other].public)  # type: ignore[index]  # literals in a loop


@pytest.mark.parametrize("point", LOW_ORDER)
def test_exchange_with_low_order_key(point: str) -> None:
    """A public key of low order is refused (reference 1.6 step 10)."""
    with pytest.raises(ValueError):
        X25519.exchange(PublicKey("X25519", bytes.fromhex(point)))


@pytest.mark.parametrize("curve", EC)
def test_points_off_the_curve(curve: Curve) -> None:
    """No encoding accepts such a point, and the exchange checks again."""
    raw = KEYS[curve].public.raw
    half = (len(raw) - 1) // 2
    off = PublicKey(curve, raw[: 1 + half] + raw[1 : 1 + half])
    with pytest.raises(ValueError):
        PublicKey.from_jwk(off.jwk())
    with pytest.raises(ValueError):
        PublicKey.from_base58(curve, encoding.encode_base58(off.raw))
    with pytest.raises(ValueError):
        KEYS[curve].exchange(off)


def test_compressed_points_off_the_curve() -> None:
    """An x without a y."""
    curve, good = ec.SECP256R1(), KEYS["P-256"].public.multibase()
    prefix = encoding.decode_base58(good[1:])[:2]
    refused = 0
    for number in range(1, 30):
        point = b"\2" + number.to_bytes(32, "big")
        try:
            expected = ec.EllipticCurvePublicKey.from_encoded_point(curve, point)
        except ValueError:
            refused += 1
            with pytest.raises(ValueError):
                PublicKey.from_multibase("z" + encoding.encode_base58(prefix + point))
        else:
            found = PublicKey.from_multibase("z" + encoding.encode_base58(prefix + point))
            assert found.raw == expected.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
    assert refused


@pytest.mark.parametrize("curve", ALL)
def test_sizes(curve: Curve) -> None:
    """Keys of other sizes are refused."""
    key = KEYS[curve]
    for raw in (b"", key.public.raw[:-1], key.public.raw + b"\0"):
        with pytest.raises(ValueError):
            PublicKey(curve, raw)
        with pytest.raises(ValueError):
            PublicKey.from_base58(curve, encoding.encode_base58(raw))
    for secret in (b"", key.secret[:-1], key.secret + b"\0"):
        with pytest.raises(ValueError):
            PrivateKey.from_secret(curve, secret)


@pytest.mark.parametrize("curve", EC)
def test_secrets_out_of_range(curve: Curve) -> None:
    """Zero, and numbers beyond the order of the curve."""
    size = len(KEYS[curve].secret)
    for secret in (bytes(size), b"\xff" * size):
        with pytest.raises(ValueError):
            PrivateKey.from_secret(curve, secret)


def test_small_secrets_keep_their_size() -> None:
    """A scalar with leading zeros is written in full size (RFC 7518 section 6.2.2.1)."""
    key = PrivateKey.from_secret("P-521", (5).to_bytes(66, "big"))
    assert len(key.jwk()["d"]) == 88
    assert PrivateKey.from_jwk(key.jwk()) == key


@pytest.mark.parametrize(
    "change",
    [
        {"kty": "EC"},
        {"kty": None},
        {"crv": "X448"},
        {"crv": ["X25519"]},
        {"crv": None},
        {"x": None},
        {"x": 1},
        {"x": "AAAA"},
        {"x": "*"},
    ],
)
def test_malformed_jwk(change: dict[str, object]) -> None:
    """A member that is missing, of another type, or inconsistent with others."""
    jwk = {**X25519.public.jwk(), **change}
    with pytest.raises(ValueError):
        PublicKey.from_jwk({name: value for name, value in jwk.items() if value is not None})


def test_short_coordinates() -> None:
    """Coordinates have full size (RFC 7518 section 6.2.1.2)."""
    jwk = KEYS["P-256"].public.jwk()
    for name in "xy":
        with pytest.raises(ValueError):
            PublicKey.from_jwk({**jwk, name: jwk[name][:-2] + "A"})


def test_private_members_are_ignored() -> None:
    """A JWK with `d` is read as a public key, even if `d` is invalid."""
    assert PublicKey.from_jwk({**KEYS["P-256"].jwk(), "d": 5}) == KEYS["P-256"].public


def test_mismatched_halves() -> None:
    """A private JWK with the public half of another key."""
    with pytest.raises(ValueError):
        PrivateKey.from_jwk({**X25519.jwk(), "x": KEYS["X25519"].public.jwk()["x"]})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "z",
        "f6LSc1YK7",
        "6LSc1YK7J47otkPx5smthWsH492pKyRthNs7XYiXo1GCnpR",
        "z6LSc1YK7J47otkPx5smthWsH492pKyRthNs7XYiXo1GCnp",
        "z6LSc1YK7J47otkPx5smthWsH492pKyRthNs7XYiXo1GCnpRR",
        "z" + "1" * 50,
        "z" + "z" * 100_000,
        "z0OIl",
    ],
)
def test_malformed_multibase(text: str) -> None:
    """Another base, multicodec or size; an overlong text is not decoded."""
    with pytest.raises(ValueError):
        PublicKey.from_multibase(text)


@settings(deadline=None)
@given(st.binary(max_size=70), st.sampled_from(ALL))
def test_arbitrary_multibase(data: bytes, curve: Curve) -> None:
    """Any bytes give a key that encodes the same, or a ValueError."""
    prefix = encoding.decode_base58(KEYS[curve].public.multibase()[1:])[:2]
    text = "z" + encoding.encode_base58(prefix + data)
    try:
        key = PublicKey.from_multibase(text)
    except ValueError:
        return
    assert key.multibase() == text


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["kty", "crv", "x", "y", "d"]), st.sampled_from(["EC", "OKP", *ALL, "AAAA", 1, None, []])
    )
)
def test_arbitrary_jwk(jwk: dict[str, object]) -> None:
    """Any JWK gives a key or a ValueError."""
    for read in (PublicKey.from_jwk, PrivateKey.from_jwk):
        with pytest.raises(ValueError):
            read(jwk)


def test_conversion_of_invalid_keys() -> None:
    """Only Ed25519 keys of the main subgroup are converted."""
    for key in (X25519.public, PublicKey("Ed25519", bytes(32)), PublicKey("Ed25519", b"\xff" * 32)):
        with pytest.raises(ValueError):
            convert_ed25519_to_x25519(key)
    with pytest.raises(ValueError):
        convert_ed25519_to_x25519_private(X25519)


def test_repr_hides_secret() -> None:
    """The representation of a private key has its public half only."""
    for key in KEYS.values():
        assert repr(key.secret) not in repr(key)
        assert "secret" not in repr(key)
