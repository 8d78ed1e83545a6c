"""Makes `from_prior` tokens (reference 2.3)."""

from __future__ import annotations

from dataclasses import dataclass

from jwcrypto.jwk import JWK
from jwcrypto.jws import JWS

from mediatord.protocol.didcomm.keys import PrivateKey
from mediatord.protocol.encoding import dumps

_ALGS = {"Ed25519": "EdDSA", "P-256": "ES256", "secp256k1": "ES256K"}


@dataclass(frozen=True, slots=True)
class FromPriorClaims:
    """
    Claims by which DID `iss` continues as `sub`.

    :param kid: the signing key of `iss`.
    """

    kid: str
    iss: str
    sub: str | None
    iat: float | None


def make_from_prior(prior: FromPriorClaims, key: PrivateKey) -> str:
    """A token as a compact JWT."""
    claims = {"iss": prior.iss, "sub": prior.sub, "iat": prior.iat}
    token = JWS(dumps({name: value for name, value in claims.items() if value is not None}))
    header = {"typ": "JWT", "alg": _ALGS[key.curve], "kid": prior.kid}
    token.allowed_algs = list(_ALGS.values())
    token.add_signature(JWK(**key.jwk()), protected=dumps(header).decode())
    compact: str = token.serialize(compact=True)
    return compact
