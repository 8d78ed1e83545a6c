"""Signed messages and `from_prior` (reference 1.7 and 2.3)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jwcrypto.jwk import JWK
from jwcrypto.jws import JWS
from nacl.signing import SigningKey

from mediatord.errors import DecryptionError
from mediatord.protocol.didcomm.json_web_signature import is_jws, parse_from_prior, parse_jws, sign
from mediatord.protocol.didcomm.keys import Curve, PrivateKey, PublicKey
from tests.from_prior import FromPriorClaims, make_from_prior
from tests.protocol.didcomm.foreign_jwe import b64, compact, unb64

CURVES: tuple[Curve, ...] = ("Ed25519", "P-256", "secp256k1")
ALGS = {"Ed25519": "EdDSA", "P-256": "ES256", "secp256k1": "ES256K"}
ALICE = "did:example:alice#key-1"
KEYS = {curve: PrivateKey.generate(curve) for curve in CURVES}
OTHERS = {curve: PrivateKey.generate(curve) for curve in CURVES}
KEY = KEYS["Ed25519"]
PAYLOAD = b'{"id":"1","type":"https://example.org/1.0/hello"}'
PRIOR = FromPriorClaims(kid=ALICE, iss="did:example:alice", sub="did:example:alice2", iat=1_516_269_022)


def verify(jws: dict[str, Any], kid: str, key: PublicKey) -> bytes:
    """The payload, if the first signature is by this key under this id."""
    signature = parse_jws(jws)
    if signature.kid != kid:
        raise DecryptionError
    return signature.verify(key)


def sign_without_checks(
    protected: dict[str, Any], header: dict[str, Any] | None, key: PrivateKey = KEY, payload: bytes = PAYLOAD
) -> dict[str, Any]:
    """A flattened JWS with these headers, without any checks."""
    text = b64(compact(protected))
    signature = SigningKey(key.secret).sign(f"{text}.{b64(payload)}".encode()).signature
    jws: dict[str, Any] = {"payload": b64(payload), "protected": text, "signature": b64(signature)}
    return jws if header is None else {**jws, "header": header}


def general(jws: dict[str, Any]) -> dict[str, Any]:
    return {"payload": jws["payload"], "signatures": [{n: v for n, v in jws.items() if n != "payload"}]}


@pytest.mark.parametrize("curve", CURVES)
def test_sign_and_verify(curve: Curve) -> None:
    """A signature verifies with the same key, with no other, and for no other kid."""
    jws = json.loads(sign(PAYLOAD, ALICE, KEYS[curve]))
    assert is_jws(jws)
    assert parse_jws(jws).kid == ALICE
    assert verify(jws, ALICE, KEYS[curve].public) == PAYLOAD
    for kid, key in ((ALICE, OTHERS[curve]), (ALICE + "0", KEYS[curve])):
        with pytest.raises(DecryptionError):
            verify(jws, kid, key.public)


@pytest.mark.parametrize("curve", CURVES)
def test_emitted_layout(curve: Curve) -> None:
    """General form, kid in the unprotected header only (reference 1.7); jwcrypto verifies it."""
    raw = sign(PAYLOAD, ALICE, KEYS[curve])
    jws = json.loads(raw)
    assert set(jws) == {"payload", "signatures"}
    (entry,) = jws["signatures"]
    assert entry["header"] == {"kid": ALICE}
    assert json.loads(unb64(entry["protected"])) == {
        "typ": "application/didcomm-signed+json",
        "alg": ALGS[curve],
    }
    token = JWS()
    token.allowed_algs = list(ALGS.values())
    token.deserialize(raw.decode(), JWK(**KEYS[curve].public.jwk()))
    assert token.payload == PAYLOAD


@pytest.mark.parametrize("curve", ["X25519", "P-384", "P-521"])
def test_curves_that_cannot_sign(curve: Curve) -> None:
    """Only algorithms that clients verify are used."""
    key = PrivateKey.generate(curve)
    with pytest.raises(ValueError):
        sign(PAYLOAD, ALICE, key)


@pytest.mark.parametrize(
    ("protected", "header"),
    [
        ({"alg": "EdDSA"}, {"kid": ALICE}),
        ({"alg": "EdDSA", "kid": ALICE}, None),
        ({"alg": "EdDSA", "kid": ALICE}, {}),
        ({"alg": "EdDSA", "kid": ALICE}, {"kid": ALICE}),
        ({"alg": "EdDSA", "kid": ALICE, "typ": "JWM"}, {"foo": 1}),
    ],
)
def test_position_of_kid(protected: dict[str, Any], header: dict[str, Any] | None) -> None:
    """In the unprotected header, the protected one, or both if they agree; General or flattened (reference 1.7)."""
    jws = sign_without_checks(protected, header)
    for form in (jws, general(jws)):
        assert is_jws(form)
        assert parse_jws(form).kid == ALICE
        assert verify(form, ALICE, KEY.public) == PAYLOAD


@pytest.mark.parametrize(
    ("protected", "header"),
    [
        ({"alg": "EdDSA", "kid": ALICE}, {"kid": ALICE + "0"}),
        ({"alg": "EdDSA"}, None),
        ({"alg": "EdDSA"}, {"kid": 5}),
        ({"alg": "EdDSA"}, {"kid": "#key-1"}),
        ({"alg": "EdDSA"}, {"kid": "did:example:alice"}),
        ({"alg": "EdDSA"}, [ALICE]),
        ({"alg": "EdDSA", "typ": "a"}, {"kid": ALICE, "typ": "b"}),
        ({"alg": "EdDSA", "typ": "a"}, {"kid": ALICE, "typ": "a"}),
        ({"alg": "EdDSA", "crit": ["exp"], "exp": 1}, {"kid": ALICE}),
        ({"alg": "EdDSA", "crit": ["b64"], "b64": False}, {"kid": ALICE}),
        ({"alg": "EdDSA"}, {"kid": ALICE, "crit": ["exp"]}),
        ({"kid": ALICE}, {"alg": "EdDSA"}),
    ],
)
def test_refused_headers(protected: dict[str, Any], header: Any) -> None:
    """Correctly signed, with contradictory headers or extensions."""
    with pytest.raises(DecryptionError):
        verify(sign_without_checks(protected, header), ALICE, KEY.public)


@pytest.mark.parametrize("alg", ["none", "HS256", "ES256", "Ed448", "EdDSA ", None, 5, ["EdDSA"]])
def test_refused_algorithms(alg: Any) -> None:
    """An algorithm of another key type, whatever the signature."""
    with pytest.raises(DecryptionError):
        verify(sign_without_checks({"alg": alg}, {"kid": ALICE}), ALICE, KEY.public)


def test_hmac_with_public_key() -> None:
    """Algorithm confusion: a MAC with the public key as its secret."""
    token = JWS(PAYLOAD)
    secret = JWK(kty="oct", k=b64(KEY.public.raw))
    token.add_signature(
        secret, alg="HS256", protected=json.dumps({"alg": "HS256"}), header=json.dumps({"kid": ALICE})
    )
    with pytest.raises(DecryptionError):
        verify(json.loads(token.serialize()), ALICE, KEY.public)


def test_duplicate_names() -> None:
    """A protected header with a name twice."""
    text = b64(b'{"alg":"EdDSA","alg":"EdDSA"}')
    signature = b64(SigningKey(KEY.secret).sign(f"{text}.{b64(PAYLOAD)}".encode()).signature)
    jws = {"payload": b64(PAYLOAD), "protected": text, "signature": signature, "header": {"kid": ALICE}}
    with pytest.raises(DecryptionError):
        verify(jws, ALICE, KEY.public)


def test_several_signatures() -> None:
    """The first one counts; others must be well-formed."""
    one = general(sign_without_checks({"alg": "EdDSA"}, {"kid": ALICE}))
    other = general(sign_without_checks({"alg": "EdDSA"}, {"kid": "did:example:bob#1"}, OTHERS["Ed25519"]))
    jws = {"payload": one["payload"], "signatures": other["signatures"] + one["signatures"]}
    assert parse_jws(jws).kid == "did:example:bob#1"
    assert parse_jws(jws).verify(OTHERS["Ed25519"].public) == PAYLOAD
    with pytest.raises(DecryptionError):
        parse_jws(jws).verify(KEY.public)
    more: list[Any]
    for more in ([{}], [5], one["signatures"] * 100):
        with pytest.raises(DecryptionError):
            parse_jws({**jws, "signatures": one["signatures"] + more})
    with pytest.raises(DecryptionError):
        parse_jws({"payload": one["payload"], "signatures": one["signatures"] * 101})


@pytest.mark.parametrize("part", ["payload", "protected", "signature"])
def test_every_bit_counts(part: str) -> None:
    """Any flipped bit of the content or the signature is detected."""
    jws = sign_without_checks({"alg": "EdDSA"}, {"kid": ALICE})
    data = unb64(jws[part])
    for position in range(0, len(data) * 8, 7):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(DecryptionError):
            verify({**jws, part: b64(bytes(flipped))}, ALICE, KEY.public)


JSON = st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=2) | st.just({"kid": ALICE})


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(["payload", "signatures", "protected", "signature", "header"]), JSON),
    st.booleans(),
)
def test_arbitrary_changes(members: dict[str, Any], flat: bool) -> None:
    """Any change gives a defined error, and the payload only if nothing signed changed."""
    jws = sign_without_checks({"alg": "EdDSA"}, {"kid": ALICE})
    jws = {**(jws if flat else general(jws)), **members}
    for attempt in (lambda: parse_jws(jws).kid, lambda: verify(jws, ALICE, KEY.public)):
        try:
            assert attempt() in (ALICE, PAYLOAD)
        except DecryptionError as error:
            assert str(error) == ""


def test_unsigned_messages() -> None:
    """Neither a plaintext nor a JWE is a JWS (reference 1.1)."""
    assert not is_jws({"id": "1", "type": "x"})
    assert not is_jws({"ciphertext": "", "payload": ""})


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("prior", [PRIOR, FromPriorClaims(ALICE, "did:example:alice", None, None)])
def test_from_prior_round_trip(curve: Curve, prior: FromPriorClaims) -> None:
    """A token is parsed to its claims, verified or not; `sub` may be missing (reference 2.3)."""
    token = make_from_prior(prior, KEYS[curve])
    found = parse_from_prior(token)
    assert (found.signature.kid, found.iss, found.sub) == (prior.kid, prior.iss, prior.sub)
    assert json.loads(found.signature.verify(KEYS[curve].public))["iss"] == prior.iss
    with pytest.raises(DecryptionError):
        found.signature.verify(OTHERS[curve].public)


@pytest.mark.parametrize("place", range(3))
def test_every_part_of_token_counts(place: int) -> None:
    """No part can be taken from another token."""
    parts, others = make_from_prior(PRIOR, KEY).split("."), make_from_prior(PRIOR, OTHERS["Ed25519"]).split(".")
    parts[place] = [b64(compact({"alg": "EdDSA", "kid": ALICE})), b64(compact({"iss": "did:x:y"})), others[2]][place]
    with pytest.raises(DecryptionError):
        parse_from_prior(".".join(parts)).signature.verify(KEY.public)


@pytest.mark.parametrize(
    "claims",
    [
        b"x",
        b"[]",
        b"{}",
        b'{"iss":1}',
        b'{"iss":"did:example:alice","sub":1}',
        b'{"iss":"did:example:alice","iat":"1"}',
        b'{"iss":"did:example:alice","iat":true}',
    ],
)
def test_malformed_claims(claims: bytes) -> None:
    """Correctly signed, but invalid claims."""
    jws = sign_without_checks({"alg": "EdDSA", "kid": ALICE}, None, payload=claims)
    token = ".".join(jws[part] for part in ("protected", "payload", "signature"))
    with pytest.raises(DecryptionError):
        parse_from_prior(token)


@settings(deadline=None)
@given(st.text() | st.lists(st.text(max_size=8), min_size=3, max_size=3).map(".".join))
def test_arbitrary_tokens(token: str) -> None:
    """Any token gives claims or a defined error."""
    with pytest.raises(DecryptionError):
        parse_from_prior(token)
