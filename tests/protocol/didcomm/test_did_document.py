"""DID documents as wallets and web hosts write them (reference 8.3 and 8.6)."""

from __future__ import annotations

from typing import Any

import pytest

from mediatord.errors import UnresolvableDID
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.did_document import ServiceEndpoint, VerificationMethod, parse_did_document
from mediatord.protocol.didcomm.keys import PrivateKey, PublicKey

DID = "did:web:example.com"
X25519 = PrivateKey.from_secret("X25519", b"\x31" * 32).public
ED25519 = PrivateKey.from_secret("Ed25519", b"\x32" * 32).public
P256 = PrivateKey.from_secret("P-256", b"\x33" * 32).public


def build_method(kind: str = "Multikey", name: str = "#k", **material: Any) -> dict[str, Any]:
    """A verification method with the id `#k`."""
    return {"id": name, "type": kind, "controller": DID, **material}


def agreement_keys(document: dict[str, Any]) -> tuple[VerificationMethod, ...]:
    """The key agreement keys of a document."""
    return parse_did_document(DID, document).key_agreement


@pytest.mark.parametrize(
    ("method", "key"),
    [
        (build_method("Multikey", publicKeyMultibase=X25519.multibase()), X25519),
        (build_method("JsonWebKey2020", publicKeyJwk=X25519.jwk()), X25519),
        (build_method("JsonWebKey", publicKeyJwk=P256.jwk()), P256),
        (build_method("X25519KeyAgreementKey2019", publicKeyBase58=encoding.encode_base58(X25519.raw)), X25519),
        (build_method("X25519KeyAgreementKey2020", publicKeyMultibase=X25519.multibase()), X25519),
    ],
)
def test_key_agreement_key_types(method: dict[str, Any], key: PublicKey) -> None:
    """Every type of reference 8.6 is read, by reference and embedded."""
    expected = (VerificationMethod(f"{DID}#k", key),)
    assert agreement_keys({"verificationMethod": [method], "keyAgreement": ["#k"]}) == expected
    assert agreement_keys({"verificationMethod": [method], "keyAgreement": [f"{DID}#k"]}) == expected
    assert agreement_keys({"keyAgreement": [method]}) == expected


@pytest.mark.parametrize(
    "method",
    [
        build_method("Ed25519VerificationKey2018", publicKeyBase58=encoding.encode_base58(ED25519.raw)),
        build_method("Ed25519VerificationKey2020", publicKeyMultibase=ED25519.multibase()),
        build_method("JsonWebKey2020", publicKeyJwk=ED25519.jwk()),
    ],
)
def test_authentication_key_types(method: dict[str, Any]) -> None:
    """Every type of reference 8.6 is read; an Ed25519 key listed for key agreement is dropped."""
    document = parse_did_document(DID, {"authentication": [method], "keyAgreement": [method]})
    assert document.authentication == (VerificationMethod(f"{DID}#k", ED25519),)
    assert document.key_agreement == ()


@pytest.mark.parametrize(
    "entry",
    [
        "#other",
        "k",
        "",
        7,
        None,
        [],
        {},
        f"{DID}:x#k",
        DID,
        build_method("Bls12381G2Key2020", publicKeyMultibase=X25519.multibase()),
        build_method("X25519KeyAgreementKey2020", publicKeyMultibase=ED25519.multibase()),
        build_method("X25519KeyAgreementKey2019", publicKeyMultibase=P256.multibase()),
        build_method("JsonWebKey2020", publicKeyJwk={"kty": "OKP", "crv": "X25519"}),
        build_method("JsonWebKey2020", publicKeyJwk={**P256.jwk(), "y": X25519.jwk()["x"]}),
        build_method("JsonWebKey2020", publicKeyBase58=encoding.encode_base58(X25519.raw)),
        build_method("Multikey", publicKeyMultibase=["z"]),
        build_method("Multikey"),
        {"id": "#k", "type": ["Multikey"], "publicKeyMultibase": X25519.multibase()},
        {"id": ["#k"], "type": "Multikey", "publicKeyMultibase": X25519.multibase()},
        build_method("Multikey", "did:web:other.example#k", publicKeyMultibase=X25519.multibase()),
    ],
)
def test_invalid_entries(entry: object) -> None:
    """Unreadable entries, entries without a key or with an id of another DID are dropped; others stay."""
    good = build_method(publicKeyMultibase=X25519.multibase(), name="#good")
    found = agreement_keys({"verificationMethod": [good], "keyAgreement": [entry, "#good"]})
    assert found == (VerificationMethod(f"{DID}#good", X25519),)


def test_duplicate_ids() -> None:
    """Of methods with the same id the first counts; a key listed twice is returned once."""
    methods = [build_method(publicKeyMultibase=key.multibase()) for key in (X25519, P256)]
    found = agreement_keys({"verificationMethod": methods, "keyAgreement": ["#k", "#k", f"{DID}#k"]})
    assert found == (VerificationMethod(f"{DID}#k", X25519),)


@pytest.mark.parametrize("value", [None, 7, "x", {}, [], {"id": "#k"}])
def test_members_of_wrong_type(value: object) -> None:
    """A document without lists where lists belong has no keys and no services."""
    document = parse_did_document(
        DID, {"verificationMethod": value, "keyAgreement": value, "authentication": value, "service": value}
    )
    assert (document.key_agreement, document.authentication, document.endpoints) == ((), (), ())


@pytest.mark.parametrize("member", ["verificationMethod", "keyAgreement", "authentication", "service"])
def test_too_many_entries(member: str) -> None:
    """More than 64 entries do not resolve."""
    parse_did_document(DID, {member: [{}] * 64})
    with pytest.raises(UnresolvableDID):
        parse_did_document(DID, {member: [{}] * 65})


@pytest.mark.parametrize(
    ("place", "endpoints"),
    [
        ({"uri": "https://a.example"}, (ServiceEndpoint("https://a.example"),)),
        (
            [{"uri": "https://a.example", "accept": ["didcomm/v2"], "routingKeys": ["did:x:y#1"]}, "ws://b.example"],
            (
                ServiceEndpoint("https://a.example", ("didcomm/v2",), ("did:x:y#1",)),
                ServiceEndpoint("ws://b.example"),
            ),
        ),
        ("https://a.example", (ServiceEndpoint("https://a.example"),)),
        (
            {"uri": "https://a.example", "accept": "didcomm/v2", "routingKeys": [1]},
            (ServiceEndpoint("https://a.example"),),
        ),
        ({"uri": 1}, ()),
        (None, ()),
        ([[{"uri": "https://a.example"}]], ()),
    ],
)
def test_service_endpoints(place: object, endpoints: tuple[ServiceEndpoint, ...]) -> None:
    """An object, an array, or a string (reference 4.8); unreadable ones are dropped."""
    document = parse_did_document(
        DID, {"service": [{"id": "#s", "type": "DIDCommMessaging", "serviceEndpoint": place}]}
    )
    assert document.endpoints == endpoints


def test_service_types() -> None:
    """Types may be a list; other services are dropped."""
    document = parse_did_document(
        DID,
        {
            "service": [
                {"id": "#web", "type": "LinkedDomains", "serviceEndpoint": "https://a.example"},
                {"type": ["LinkedDomains", "DIDCommMessaging"], "serviceEndpoint": "https://b.example"},
                {"type": "DIDCommMessaging", "id": f"{DID}#own", "serviceEndpoint": {"uri": "https://c.example"}},
                {"type": {"DIDCommMessaging": 1}, "serviceEndpoint": "https://d.example"},
            ]
        },
    )
    assert [endpoint.uri for endpoint in document.endpoints] == ["https://b.example", "https://c.example"]
