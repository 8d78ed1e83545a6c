"""did:peer 0, 2, 3 and 4: known answers of reference 8.3 and 8.4, and DIDs of released generators."""

from __future__ import annotations

import pytest

from mediatord.errors import UnresolvableDID, UnsupportedDIDMethod
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.did_document import ServiceEndpoint, VerificationMethod
from mediatord.protocol.didcomm.did_methods import (
    DIDPeer4LongFormRequired,
    derive_did_peer_3,
    make_did_peer_2,
    resolve_did_peer,
    resolve_short_did_peer_4,
)
from mediatord.protocol.didcomm.keys import PrivateKey, PublicKey
from tests.did_factories import make_did_peer_0, make_did_peer_4

X25519 = PrivateKey.from_secret("X25519", b"\x31" * 32).public
ED25519 = PrivateKey.from_secret("Ed25519", b"\x32" * 32).public
E = ".Ez6LSc1YK7J47otkPx5smthWsH492pKyRthNs7XYiXo1GCnpR"
V = ".Vz6MkknhhwAGsRrcTTthPSsBbQtrNX6CMqt4poro5jdP6uCue"

PEER_2 = (
    f"did:peer:2{E}{V}"
    ".SeyJ0IjoiZG0iLCJzIjp7InVyaSI6Imh0dHA6Ly8xMjcuMC4wLjE6ODA4MC9kaWRjb21tIiwiYSI6WyJkaWRjb21tL3YyIl19fQ"
    ".SeyJ0IjoiZG0iLCJzIjp7InVyaSI6IndzOi8vMTI3LjAuMC4xOjgwODAvd3MiLCJhIjpbImRpZGNvbW0vdjIiXX19"
)
PEER_3 = "did:peer:3zQmNowBq4niaXgPzwk8jJ99SYc8vCEgD2KbUXyHDBPhKtt3"
HTTP = ServiceEndpoint("http://127.0.0.1:8080/didcomm", ("didcomm/v2",))
WS = ServiceEndpoint("ws://127.0.0.1:8080/ws", ("didcomm/v2",))

PEER_4_INPUT = {
    "@context": ["https://www.w3.org/ns/did/v1"],
    "verificationMethod": [
        {
            "id": "#key-1",
            "type": "Multikey",
            "publicKeyMultibase": "z6LSc1YK7J47otkPx5smthWsH492pKyRthNs7XYiXo1GCnpR",
        },
        {
            "id": "#key-2",
            "type": "Multikey",
            "publicKeyMultibase": "z6MkknhhwAGsRrcTTthPSsBbQtrNX6CMqt4poro5jdP6uCue",
        },
    ],
    "keyAgreement": ["#key-1"],
    "authentication": ["#key-2"],
}
PEER_4_SHORT = "did:peer:4zQmXgCFA4qsZQ1S7je6MqLEY8CLF1KNGahR6qqhekydCbnc"
PEER_4 = (
    PEER_4_SHORT + ":zHWLXRSr3dLUyYGwZUNMhrSijbxmNpqFdPvYCXzjHo3czgGCE52aTFx614nksMLc8yMat2UkaK2nBsTXR7dXMSbSrQMQ6vm"
    "WpmPaf7DC6Bn1cfRQdFqdN1yQa3iFYdeqmrnVw4LaW8shPoL3RGRjEjfbGmrbCmpppR5D2eXXsPabsygm5CBpbLhw6opUNvR7vnN9BpH6dzEmN"
    "iKiBsjwEMMczXBbiXPEWQemEwLtyq3q9e78p9ZzxMotEMhu9VrHCxd8eTLANR4X7vPhUjGPow5YAyygGcMsdoxzhrvmXzodDhh7VNdVhV5yxQn"
    "1GGNUeX9pB8MoH7fdPnAaK3Ld52PHCtMdnzikmHFpmmJr7ezymv7zopcVTxp9JWfR4GQYxrn5pEDcHTt3XZu3idoSFczBKuKDQaK4Gq9FAxez2"
    "TewcqUrtyp4rh6Ss8AG6dfApsTGSMhh2n9r"
)


def with_service(value: object) -> str:
    """A did:peer:2 with one key and one `.S` that holds `value`."""
    return f"did:peer:2{E}.S{encoding.encode_base64url(encoding.dumps(value))}"


def endpoints_of(value: object) -> tuple[ServiceEndpoint, ...]:
    """The endpoints that result from `value` in a `.S`."""
    return resolve_did_peer(with_service(value)).endpoints


def test_keys_of_known_answers() -> None:
    """The public keys belong to the private keys that reference 8.3 names."""
    assert X25519.multibase() == E[2:]
    assert ED25519.multibase() == V[2:]


def test_peer_0() -> None:
    """A did:peer:0 is a did:key with another prefix (reference 8.2)."""
    did = make_did_peer_0(ED25519)
    assert did == f"did:peer:0{ED25519.multibase()}"
    document = resolve_did_peer(did)
    derived = PublicKey.from_multibase("z6LSrSBwAXWz5HV7peV57WE3fau3LBCWtuC1zzJCvK58cvw7")
    assert document.authentication == (VerificationMethod(f"{did}#{ED25519.multibase()}", ED25519),)
    assert document.key_agreement == (VerificationMethod(f"{did}#{derived.multibase()}", derived),)
    assert document.authentication_key(f"{did}#6Mkknhhw") == document.authentication[0]


def test_known_answer_of_peer_2() -> None:
    """Keys, key ids, services and the did:peer:3 alias of the known answer (reference 8.3)."""
    document = resolve_did_peer(PEER_2)
    assert document.did == PEER_2
    assert document.key_agreement == (VerificationMethod(f"{PEER_2}#key-1", X25519),)
    assert document.authentication == (VerificationMethod(f"{PEER_2}#key-2", ED25519),)
    assert document.endpoints == (HTTP, WS)
    assert document.also_known_as == (PEER_3,)


def test_building_known_answer_of_peer_2() -> None:
    """The builder writes the known answer, byte for byte (reference 8.3)."""
    services = [{"t": "dm", "s": {"uri": endpoint.uri, "a": list(endpoint.accept)}} for endpoint in (HTTP, WS)]
    assert make_did_peer_2([("E", X25519), ("V", ED25519)], services) == PEER_2
    assert derive_did_peer_3(PEER_2) == PEER_3


def test_refuses_to_build_invalid_peer_2() -> None:
    """Another purpose is refused, and so is a did:peer:3 of another method."""
    with pytest.raises(ValueError):
        make_did_peer_2([("S", X25519)], [])
    with pytest.raises(ValueError):
        derive_did_peer_3(make_did_peer_0(ED25519))


def test_key_numbering() -> None:
    """V before E (Indicio), services in between, unused purposes, unknown keys: keys count, services do not."""
    service = ".S" + encoding.encode_base64url(b'{"t":"dm","s":"http://a.example"}')
    did = f"did:peer:2{service}{V}.A{V[2:]}{service}.Ez6LSunknown{E}"
    document = resolve_did_peer(did)
    assert document.authentication == (VerificationMethod(f"{did}#key-1", ED25519),)
    assert document.key_agreement == (VerificationMethod(f"{did}#key-4", X25519),)
    assert [found.uri for found in document.endpoints] == ["http://a.example"] * 2


def test_key_with_wrong_purpose() -> None:
    """An Ed25519 key listed for key agreement is not converted (reference 8.6)."""
    assert resolve_did_peer(f"did:peer:2.E{V[2:]}").key_agreement == ()


def test_array_of_services_in_one_element() -> None:
    """One `.S` may hold an array (Identus SDK), or an empty one, `W10` (reference 8.3)."""
    services = [{"t": "dm", "s": {"uri": endpoint.uri, "a": ["didcomm/v2"]}} for endpoint in (HTTP, WS)]
    assert endpoints_of(services) == (HTTP, WS)
    assert resolve_did_peer(f"did:peer:2{E}.SW10").endpoints == ()


def test_old_service_format() -> None:
    """`s` as a string, with `r` and `a` beside it (peerdid, older Identus; reference 8.3)."""
    service = {"t": "dm", "s": "http://a.example/", "r": ["did:key:z6Mk#z6Mk"], "a": ["didcomm/v2"]}
    expected = ServiceEndpoint("http://a.example/", ("didcomm/v2",), ("did:key:z6Mk#z6Mk",))
    assert endpoints_of(service) == (expected,)


def test_padded_service() -> None:
    """The base64url may be padded (old generators; reference 8.3)."""
    unpadded = encoding.encode_base64url(b'{"t":"dm","s":"http://aa.example"}')
    document = resolve_did_peer(f"did:peer:2{E}.S{unpadded}" + "=" * (-len(unpadded) % 4))
    assert document.did.endswith("=")
    assert document.http_endpoints() == (ServiceEndpoint("http://aa.example"),)


def test_mixed_member_names() -> None:
    """Full and abbreviated member names may be mixed (reference 8.3)."""
    service = {"type": "dm", "s": {"uri": "ws://a.example", "accept": ["didcomm/v2"], "r": ["did:x:y"]}}
    expected = ServiceEndpoint("ws://a.example", ("didcomm/v2",), ("did:x:y",))
    assert endpoints_of(service) == (expected,)
    listed: dict[str, object] = {
        "t": "DIDCommMessaging",
        "serviceEndpoint": [{"uri": "ws://a.example", "a": ["didcomm/v2"]}],
    }
    assert endpoints_of(listed) == (ServiceEndpoint("ws://a.example", ("didcomm/v2",)),)


def test_other_service_types() -> None:
    """Services of other types are ignored (reference 8.3)."""
    assert endpoints_of([{"t": "LinkedDomains", "s": "https://a.example"}, 7, None, {"s": {}}]) == ()


@pytest.mark.parametrize(
    "did",
    [
        "did:peer:2",
        "did:peer:2.",
        f"did:peer:2x{E}",
        f"did:peer:2{E}.",
        f"did:peer:2{E}.Xabc",
        f"did:peer:2{E}.S",
        f"did:peer:2{E}.SW10==",
        f"did:peer:2{E}.Seyx",
        "did:peer:2.SW10",
        f"did:peer:2{E * 65}",
        f"did:peer:2{E}{'.SW10' * 65}",
        with_service([{}] * 65),
        "did:peer:0z6Mk",
    ],
)
def test_malformed(did: str) -> None:
    """No key, an unknown purpose, an invalid service, or too many of either does not resolve."""
    with pytest.raises(UnresolvableDID):
        resolve_did_peer(did)


def test_maximum_number_of_elements() -> None:
    """64 keys and 64 services resolve."""
    service = ".S" + encoding.encode_base64url(b'{"t":"dm","s":"x:y"}')
    document = resolve_did_peer(f"did:peer:2{E * 64}{service * 64}")
    assert len(document.key_agreement) == len(document.endpoints) == 64


def test_deeply_nested_service() -> None:
    """A service nested as deep as fits into a DID resolves at normal cost."""
    for deep in ("[" * 3000 + "]" * 3000, '{"s":' * 900 + "1" + "}" * 900):
        did = f"did:peer:2{E}.S{encoding.encode_base64url(deep.encode())}"
        try:
            assert resolve_did_peer(did).endpoints == ()
        except UnresolvableDID:
            pass


def test_known_answer_of_peer_4() -> None:
    """The long form resolves to its document, which names the short form too (reference 8.4)."""
    document = resolve_did_peer(PEER_4)
    assert document.did == PEER_4
    assert document.key_agreement == (VerificationMethod(f"{PEER_4}#key-1", X25519),)
    assert document.authentication == (VerificationMethod(f"{PEER_4}#key-2", ED25519),)
    assert document.also_known_as == (PEER_4_SHORT,)


def test_building_known_answer_of_peer_4() -> None:
    """The builder writes the known answer (reference 8.4)."""
    assert make_did_peer_4(PEER_4_INPUT) == (PEER_4, PEER_4_SHORT)


def test_short_form_of_peer_4() -> None:
    """The short form needs the long one, and is then the subject of the document (reference 8.4)."""
    with pytest.raises(DIDPeer4LongFormRequired):
        resolve_did_peer(PEER_4_SHORT)
    document = resolve_short_did_peer_4(PEER_4_SHORT, PEER_4)
    assert document.did == PEER_4_SHORT
    assert document.key_agreement == (VerificationMethod(f"{PEER_4_SHORT}#key-1", X25519),)
    assert document.also_known_as == (PEER_4,)
    with pytest.raises(UnresolvableDID):
        resolve_short_did_peer_4("did:peer:4zQmOther", PEER_4)


def test_verifies_hash_of_peer_4() -> None:
    """A changed document, or one behind another hash, does not resolve (reference 8.4)."""
    other, _ = make_did_peer_4({**PEER_4_INPUT, "keyAgreement": []})
    for did in (PEER_4[:-1] + "s", f"{PEER_4_SHORT}:{other.rpartition(':')[2]}", f"{PEER_4}:{PEER_4}"):
        with pytest.raises(UnresolvableDID):
            resolve_did_peer(did)


def test_ignores_identity_claims_of_peer_4_document() -> None:
    """Its claims about its own ids and keys of other DIDs are ignored (reference 8.4)."""
    victim = f"{PEER_2}#key-1"
    method = {"id": victim, "type": "Multikey", "publicKeyMultibase": X25519.multibase()}
    long, short = make_did_peer_4(
        {"id": PEER_2, "alsoKnownAs": [PEER_2], "verificationMethod": [method], "keyAgreement": [victim, method]}
    )
    document = resolve_did_peer(long)
    assert document.did == long
    assert document.also_known_as == (short,)
    assert document.key_agreement == ()


@pytest.mark.parametrize(
    "did",
    [
        "did:peer:4",
        "did:peer:4zQm",
        "did:peer:4zQm:",
        f"{PEER_4_SHORT}0",
        make_did_peer_4({})[0].replace(":z", ":x"),
    ],
)
def test_malformed_peer_4(did: str) -> None:
    """No hash, no document, or another encoding does not resolve."""
    with pytest.raises(UnresolvableDID):
        resolve_did_peer(did)


@pytest.mark.parametrize("did", ["did:peer:1zQmabc", PEER_3, "did:peer:5z", "did:peer:z6Mk"])
def test_other_numalgos(did: str) -> None:
    """Numalgo 1 and 3 need information beyond the DID (reference 8.1)."""
    with pytest.raises(UnsupportedDIDMethod):
        resolve_did_peer(did)
