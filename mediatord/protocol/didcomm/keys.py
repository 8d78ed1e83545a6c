"""
Public and private keys as JWK, multibase and base58 (reference 8.2, 8.6), and ECDH (reference 1.4).

Signatures are made and verified by :mod:`mediatord.protocol.didcomm.json_web_signature`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import nacl.exceptions
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from nacl import bindings

from mediatord.protocol import encoding
from mediatord.protocol.encoding import decode_base64url, encode_base64url

Curve = Literal["X25519", "Ed25519", "P-256", "P-384", "P-521", "secp256k1"]

_OKP_SIZE = 32
_EC: dict[str, ec.EllipticCurve] = {
    "P-256": ec.SECP256R1(),
    "P-384": ec.SECP384R1(),
    "P-521": ec.SECP521R1(),
    "secp256k1": ec.SECP256K1(),
}
_EC_SIZE = {"P-256": 32, "P-384": 48, "P-521": 66, "secp256k1": 32}
_KTY: dict[Curve, str] = {curve: "EC" if curve in _EC else "OKP" for curve in get_args(Curve)}
_RAW_SIZE: dict[Curve, int] = {curve: 2 * _EC_SIZE[curve] + 1 if curve in _EC else _OKP_SIZE for curve in _KTY}
_MULTICODEC: dict[Curve, bytes] = {
    "Ed25519": b"\xed\x01",
    "X25519": b"\xec\x01",
    "secp256k1": b"\xe7\x01",
    "P-256": b"\x80\x24",
    "P-384": b"\x81\x24",
    "P-521": b"\x82\x24",
}
_CURVE_OF_MULTICODEC = {prefix: curve for curve, prefix in _MULTICODEC.items()}
# An uncompressed point on P-521 has 182 characters.
_MAX_BASE58 = 182


@dataclass(frozen=True, slots=True)
class PublicKey:
    """
    A public key.

    :param raw: 32 bytes on X25519 and Ed25519; else the uncompressed point, 0x04 and both coordinates.
    :raise ValueError: `raw` has another size. Class methods and :meth:`PrivateKey.exchange` also check that a point
        is on its curve.
    """

    curve: Curve
    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != _RAW_SIZE[self.curve]:
            raise ValueError("a key of the wrong size")
        if self.curve in _EC and self.raw[0] != 4:
            raise ValueError("not an uncompressed point")

    @classmethod
    def from_jwk(cls, jwk: Mapping[str, object]) -> PublicKey:
        """
        Read `kty`, `crv`, `x` and, on EC curves, `y`; other members, such as `d`, are ignored.

        :raise ValueError: a member is missing or malformed, the key type is unknown, or the point is not on the
            curve.
        """
        curve = _read_curve(jwk)
        if _KTY[curve] == "OKP":
            return cls(curve, decode_base64url(jwk.get("x")))
        size = _EC_SIZE[curve]
        # Shorter coordinates than RFC 7518 6.2.1.2 requires: Authlib, and with it SICPA's library, drops leading zero
        # octets.
        x = decode_base64url(jwk.get("x")).rjust(size, b"\0")
        y = decode_base64url(jwk.get("y")).rjust(size, b"\0")
        if len(x) != size or len(y) != size:
            raise ValueError("a coordinate of the wrong size")
        return cls._from_point(curve, b"\x04" + x + y)

    @classmethod
    def from_multibase(cls, text: str) -> PublicKey:
        """
        Read a base58btc multibase value: multicodec prefix and key, EC points compressed (reference 8.2).

        :raise ValueError: anything else, or a point that is not on the curve.
        """
        if not text.startswith("z"):
            raise ValueError("not a base58btc multibase value")
        data = _decode_short_base58(text[1:])
        curve = _CURVE_OF_MULTICODEC.get(data[:2])
        if curve is None:
            raise ValueError("no multicodec of a known kind of key")
        if curve not in _EC:
            return cls(curve, data[2:])
        if len(data) != 2 + 1 + _EC_SIZE[curve]:
            raise ValueError("not a compressed point")
        return cls._from_point(curve, data[2:])

    @classmethod
    def from_base58(cls, curve: Curve, text: str) -> PublicKey:
        """
        Read a `publicKeyBase58`: the bare key; EC points compressed or not.

        :raise ValueError: anything else, or a point that is not on the curve.
        """
        data = _decode_short_base58(text)
        return cls._from_point(curve, data) if curve in _EC else cls(curve, data)

    @classmethod
    def _from_point(cls, curve: Curve, point: bytes) -> PublicKey:
        try:
            loaded = ec.EllipticCurvePublicKey.from_encoded_point(_EC[curve], point)
        except ValueError:
            raise ValueError("not a point on the curve") from None
        return cls(curve, loaded.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint))

    def jwk(self) -> dict[str, str]:
        """`kty`, `crv`, `x` and, on EC curves, `y`."""
        if self.curve not in _EC:
            return {"kty": "OKP", "crv": self.curve, "x": encode_base64url(self.raw)}
        size = _EC_SIZE[self.curve]
        x, y = self.raw[1 : 1 + size], self.raw[1 + size :]
        return {"kty": "EC", "crv": self.curve, "x": encode_base64url(x), "y": encode_base64url(y)}

    def multibase(self) -> str:
        """Inverse of :meth:`from_multibase`."""
        data = self.raw
        if self.curve in _EC:
            size = _EC_SIZE[self.curve]
            data = bytes([2 + (self.raw[-1] & 1)]) + self.raw[1 : 1 + size]
        return "z" + encoding.encode_base58(_MULTICODEC[self.curve] + data)


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """
    A private key.

    :param secret: 32 bytes on X25519 and Ed25519 (there the seed); else the big-endian scalar at full size.
    """

    curve: Curve
    secret: bytes = field(repr=False)
    public: PublicKey

    @classmethod
    def generate(cls, curve: Curve) -> PrivateKey:
        """Generate a key."""
        if curve not in _EC:
            return cls.from_secret(curve, secrets.token_bytes(_OKP_SIZE))
        numbers = ec.generate_private_key(_EC[curve]).private_numbers()
        return cls.from_secret(curve, numbers.private_value.to_bytes(_EC_SIZE[curve], "big"))

    @classmethod
    def from_secret(cls, curve: Curve, secret: bytes) -> PrivateKey:
        """
        The key with this secret; the public key is computed.

        :raise ValueError: wrong size, or not a valid secret.
        """
        if len(secret) != _EC_SIZE.get(curve, _OKP_SIZE):
            raise ValueError("a secret of the wrong size")
        if curve == "X25519":
            return cls(curve, secret, PublicKey(curve, bindings.crypto_scalarmult_base(secret)))
        if curve == "Ed25519":
            return cls(curve, secret, PublicKey(curve, bindings.crypto_sign_seed_keypair(secret)[0]))
        point = (
            _load_ec_private_key(curve, secret)
            .public_key()
            .public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
        )
        return cls(curve, secret, PublicKey(curve, point))

    @classmethod
    def from_jwk(cls, jwk: Mapping[str, object]) -> PrivateKey:
        """
        Read a JWK with `d`.

        :raise ValueError: as :meth:`PublicKey.from_jwk`, or public and private members do not match.
        """
        key = cls.from_secret(_read_curve(jwk), decode_base64url(jwk.get("d")))
        if key.public != PublicKey.from_jwk(jwk):
            raise ValueError("not the public half of this private key")
        return key

    def jwk(self) -> dict[str, str]:
        """The public members and `d`: a secret."""
        return {**self.public.jwk(), "d": encode_base64url(self.secret)}

    def exchange(self, peer: PublicKey) -> bytes:
        """
        The raw shared secret Z (reference 1.4).

        :raise ValueError: different curves, a signature curve, a point off the curve, or an all-zero result.
        """
        if peer.curve != self.curve or self.curve == "Ed25519":
            raise ValueError("keys of different kinds")
        if self.curve == "X25519":
            return compute_x25519(self.secret, peer.raw)
        try:
            point = ec.EllipticCurvePublicKey.from_encoded_point(_EC[peer.curve], peer.raw)
        except ValueError:
            raise ValueError("not a point on the curve") from None
        return _load_ec_private_key(self.curve, self.secret).exchange(ec.ECDH(), point)


def compute_x25519(secret: bytes, public: bytes) -> bytes:
    """
    X25519 of a private and a public key, 32 bytes each.

    :raise ValueError: an all-zero result.
    """
    try:
        return bindings.crypto_scalarmult(secret, public)
    except nacl.exceptions.RuntimeError:
        raise ValueError("a public key of low order") from None


def convert_ed25519_to_x25519(key: PublicKey) -> PublicKey:
    """
    The X25519 key that did:key and did:peer:0 derive from an Ed25519 key.

    :raise ValueError: not an Ed25519 key, or not a point of its main subgroup.
    """
    if key.curve != "Ed25519":
        raise ValueError("not an Ed25519 key")
    try:
        return PublicKey("X25519", bindings.crypto_sign_ed25519_pk_to_curve25519(key.raw))
    except nacl.exceptions.RuntimeError:
        raise ValueError("not a point on the curve") from None


def convert_ed25519_to_x25519_private(key: PrivateKey) -> PrivateKey:
    """
    The private half of :func:`convert_ed25519_to_x25519`.

    :raise ValueError: not an Ed25519 key.
    """
    if key.curve != "Ed25519":
        raise ValueError("not an Ed25519 key")
    return PrivateKey.from_secret(
        "X25519", bindings.crypto_sign_ed25519_sk_to_curve25519(key.secret + key.public.raw)
    )


def _read_curve(jwk: Mapping[str, object]) -> Curve:
    curve: Any = jwk.get("crv")
    if not isinstance(curve, str) or curve not in _KTY or _KTY[curve] != jwk.get("kty"):
        raise ValueError("an unknown kind of key")
    return curve


def _decode_short_base58(text: str) -> bytes:
    if len(text) > _MAX_BASE58:
        raise ValueError("too long for a key")
    return encoding.decode_base58(text)


def _load_ec_private_key(curve: Curve, secret: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        return ec.derive_private_key(int.from_bytes(secret, "big"), _EC[curve])
    except ValueError:
        raise ValueError("not a private key of this curve") from None
