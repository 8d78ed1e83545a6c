"""
Signed messages (JWS) and `from_prior` tokens (reference 1.7 and 2.3).

jwcrypto verifies signatures, and makes those that are not Ed25519. It never receives a JWS as it arrived, only a
normalised one: one signature, an algorithm that fits the key, no duplicate header names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jwcrypto.common import JWException
from jwcrypto.jwk import JWK
from jwcrypto.jws import JWS
from nacl import bindings

from mediatord.errors import DecryptionError
from mediatord.protocol.didcomm.jwe import ABSOLUTE_KID
from mediatord.protocol.didcomm.keys import PrivateKey, PublicKey
from mediatord.protocol.encoding import decode_base64url, dumps, encode_base64url, loads_object, loads_unique_members

SIGNED_MEDIA_TYPE = "application/didcomm-signed+json"

_CURVE_OF_ALG = {"EdDSA": "Ed25519", "ES256": "P-256", "ES256K": "secp256k1"}
_ALG_OF_CURVE = {curve: alg for alg, curve in _CURVE_OF_ALG.items()}
_MAX_SIGNATURES = 100


def is_jws(value: Mapping[str, Any]) -> bool:
    """Whether a JSON object has the members of a JWS (reference 1.1)."""
    return "payload" in value and "ciphertext" not in value


@dataclass(frozen=True, slots=True)
class Signature:
    """
    One signature and what it covers, as well-formed base64url.

    :param kid: key id that it claims, absolute.
    """

    kid: str
    alg: str
    protected: str
    payload: str
    signature: str

    def verify(self, key: PublicKey) -> bytes:
        """
        The payload, if the signature is of this key: Ed25519, P-256 or secp256k1.

        :raise DecryptionError: it is not.
        """
        if _CURVE_OF_ALG.get(self.alg) != key.curve:
            raise DecryptionError
        token = JWS()
        token.allowed_algs = list(_CURVE_OF_ALG)
        try:
            token.deserialize(f"{self.protected}.{self.payload}.{self.signature}", JWK(**key.jwk()))
        except (JWException, ValueError):
            raise DecryptionError from None
        return decode_base64url(self.payload)


def parse_jws(jws: Mapping[str, Any]) -> Signature:
    """
    The first signature, whose kid is in either header; others have to be well-formed. Nothing is verified.

    :raise DecryptionError: no such id, contradicting headers, or not a JWS.
    """
    try:
        entries = jws.get("signatures", [jws])
        if not isinstance(entries, list) or not 1 <= len(entries) <= _MAX_SIGNATURES:
            raise ValueError("no list of signatures, or too long a one")
        return [_parse_signature(jws.get("payload"), entry) for entry in entries][0]
    except ValueError:
        raise DecryptionError from None


def sign(payload: bytes, kid: str, key: PrivateKey) -> bytes:
    """
    A JWS in General form. The kid is in the unprotected header, the only one that most clients read.

    :raise ValueError: not a signature curve.
    """
    if key.curve not in _ALG_OF_CURVE:
        raise ValueError("not a curve for signatures")
    header = dumps({"typ": SIGNED_MEDIA_TYPE, "alg": _ALG_OF_CURVE[key.curve]})
    if key.curve == "Ed25519":
        # Ten times faster than jwcrypto: unauthenticated requests can trigger it.
        protected, encoded = encode_base64url(header), encode_base64url(payload)
        _, secret = bindings.crypto_sign_seed_keypair(key.secret)
        signed = bindings.crypto_sign(f"{protected}.{encoded}".encode(), secret)
        signature = encode_base64url(signed[: bindings.crypto_sign_BYTES])
    else:
        token = JWS(payload)
        token.add_signature(JWK(**key.jwk()), protected=header.decode())
        protected, encoded, signature = token.serialize(compact=True).split(".")
    entry = {"protected": protected, "signature": signature, "header": {"kid": kid}}
    return dumps({"payload": encoded, "signatures": [entry]})


@dataclass(frozen=True, slots=True)
class FromPrior:
    """
    Claims of a `from_prior` token: DID `iss` continues as `sub`.

    :param sub: None ends the relationship.
    :param signature: by a key in `authentication` of `iss`, if the token is valid.
    """

    iss: str
    sub: str | None
    signature: Signature


def parse_from_prior(token: str) -> FromPrior:
    """
    Read a token without verifying it.

    :raise DecryptionError: malformed.
    """
    parts = token.split(".")
    try:
        if len(parts) != 3:
            raise ValueError("not three parts")
        signature = _parse_parts(parts[0], parts[1], parts[2], {})
        claims = loads_object(decode_base64url(signature.payload))
        sub, iat = claims.get("sub"), claims.get("iat")
        if isinstance(iat, bool) or not isinstance(iat, int | float | None):
            raise ValueError("a time that is no number")
        return FromPrior(_require_text(claims.get("iss")), None if sub is None else _require_text(sub), signature)
    except ValueError:
        raise DecryptionError from None


def _parse_signature(payload: object, entry: object) -> Signature:
    if not isinstance(entry, dict):
        raise ValueError("a signature that is not an object")
    header = {} if entry.get("header") is None else entry["header"]
    if not isinstance(header, dict):
        raise ValueError("a header that is not an object")
    return _parse_parts(
        _require_text(entry.get("protected")), _require_text(payload), _require_text(entry.get("signature")), header
    )


def _parse_parts(protected: str, payload: str, signature: str, unprotected: dict[str, Any]) -> Signature:
    header = loads_unique_members(decode_base64url(protected))
    # RFC 7515 forbids duplicate names, but some clients write the kid into both headers.
    doubled = header.keys() & unprotected.keys()
    if doubled - {"kid"} or any(header[name] != unprotected[name] for name in doubled):
        raise ValueError("two headers that contradict each other")
    if "crit" in header or "crit" in unprotected:
        raise ValueError("an extension")
    kid = _require_text({**unprotected, **header}.get("kid"))
    if not ABSOLUTE_KID.fullmatch(kid):
        raise ValueError("a signer that is not an absolute DID URL with a fragment")
    decode_base64url(payload)
    decode_base64url(signature)
    # The compact form used for verification has no unprotected header; signatures do not cover that header anyway.
    return Signature(
        kid, _require_text(header.get("alg")), protected.rstrip("="), payload.rstrip("="), signature.rstrip("=")
    )


def _require_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("a member is missing or no text")
    return value
