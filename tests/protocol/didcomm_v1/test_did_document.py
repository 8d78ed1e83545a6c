"""DID documents of DIDComm v1: those of wallets, and the mediator's own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediatord.errors import UnresolvableDID, UnsupportedDIDMethod
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.did_document import MAX_KEYS, MAX_ROUTING_KEYS
from mediatord.protocol.didcomm.did_methods import make_did_peer_4, resolve_local
from mediatord.protocol.didcomm_v1.did_document import (
    DIDForm,
    find_did_form,
    make_own_document,
    parse_wallet_did,
    parse_wallet_document,
)
from mediatord.protocol.didcomm_v1.keys import SigningKey, encode_base58_key, parse_key
from tests.protocol.didcomm_v1.published_requests import (
    CREDO_PEER_2,
    CREDO_PEER_2_KEY,
    CREDO_PEER_2_ROUTING_KEY,
    CREDO_PEER_4,
    CREDO_PEER_4_VERKEY,
    make_peer_document,
)

KEY = SigningKey.from_seed(b"\x01" * 32)
OTHER = SigningKey.from_seed(b"\x02" * 32)
NYM = encoding.encode_base58(KEY.verkey[:16])
ENDPOINTS = ("https://m.example/didcomm", "wss://m.example/didcomm")
FORMS: tuple[DIDForm, ...] = ("did:peer:1", "did:peer:2", "did:peer:4", "nym")


def test_peer_2_of_credo() -> None:
    """Key, endpoint and routing key of a published did:peer:2; the key is named by its number."""
    document = parse_wallet_did(CREDO_PEER_2)
    assert document.keys == (CREDO_PEER_2_KEY,)
    assert document.endpoint == "https://example.com/endpoint"
    assert document.routing_keys == (CREDO_PEER_2_ROUTING_KEY,)


def test_peer_4_of_credo() -> None:
    """A published did:peer:4; its short form says nothing."""
    document = parse_wallet_did(CREDO_PEER_4)
    assert document.keys == (parse_key(CREDO_PEER_4_VERKEY),)
    assert (document.endpoint, document.routing_keys) == ("https://example.com", ())
    with pytest.raises(UnresolvableDID):
        parse_wallet_did(CREDO_PEER_4.rpartition(":")[0])


def test_multikey_of_acapy() -> None:
    """One Multikey serves both relationships, and is Ed25519 in both."""
    document = {
        "verificationMethod": [
            {"id": "#key-0", "type": "Multikey", "publicKeyMultibase": KEY.did_key.removeprefix("did:key:")}
        ],
        "authentication": ["#key-0"],
        "keyAgreement": ["#key-0"],
        "service": [
            {
                "id": "#didcomm-0",
                "type": "did-communication",
                "priority": 0,
                "recipientKeys": ["#key-0"],
                "routingKeys": [],
                "serviceEndpoint": "http://agent.example:8000",
            }
        ],
    }
    found = parse_wallet_did(make_did_peer_4(document))
    assert found.keys == (KEY.did_key,)
    assert found.endpoint == "http://agent.example:8000"


@pytest.mark.parametrize(
    ("did", "form"),
    [
        (NYM, "nym"),
        (f"did:sov:{NYM}", "nym"),
        ("did:peer:1zQmRYBx1pL86DrsxoJ2ZD3w42d7Ng92ErPgFsCSqg8Q1h4i", "did:peer:1"),
        (CREDO_PEER_2, "did:peer:2"),
        (CREDO_PEER_4, "did:peer:4"),
    ],
)
def test_form(did: str, form: DIDForm) -> None:
    """The form of each kind of DID."""
    assert find_did_form(did) == form


@pytest.mark.parametrize("did", ["did:web:a.example", "did:peer:0z6Mk", "did:peer:1zQm", "did:sov:LjgpST2rjs:1"])
def test_method_without_document(did: str) -> None:
    """Documents of other DIDs are not fetched."""
    with pytest.raises(UnsupportedDIDMethod):
        find_did_form(did)


@pytest.mark.parametrize("did", ["", "x", "0OIl" * 5, "did:", "did:peer:2 ", "did:peer:2" + "." * 9000])
def test_malformed_did(did: str) -> None:
    """Text that is no DID."""
    with pytest.raises(UnresolvableDID):
        find_did_form(did)


@pytest.mark.parametrize(
    "endpoint", ["didcomm:transport/queue", "", None, 1, {"uri": "https://a"}, "ws://a", "http://"]
)
def test_no_endpoint(endpoint: Any) -> None:
    """All that is no http(s) URL means that there is no endpoint; its routing keys do not count."""
    document = make_peer_document(KEY)
    document["service"][0] |= {"serviceEndpoint": endpoint, "routingKeys": ["nonsense"]}
    found = parse_wallet_document(NYM, document)
    assert (found.endpoint, found.routing_keys) == (None, ())
    assert found.keys == (KEY.did_key,)


def test_service_with_endpoint_is_chosen() -> None:
    """Of several services, the one of the highest priority that has an endpoint."""
    document = make_peer_document(KEY)
    (service,) = document["service"]
    document["service"] = [
        {**service, "priority": 3, "serviceEndpoint": "https://third"},
        {**service, "priority": 2, "serviceEndpoint": "https://second", "recipientKeys": [OTHER.did_key]},
        {**service, "priority": 1, "serviceEndpoint": "wss://first"},
        {**service, "type": "LinkedDomains", "serviceEndpoint": "https://none"},
    ]
    found = parse_wallet_document(NYM, document)
    assert found.endpoint == "https://second"
    assert found.keys == (OTHER.did_key, KEY.did_key)


@pytest.mark.parametrize("id_", ["did:sov:" + NYM, NYM, None])
def test_document_of_unqualified_did(id_: str | None) -> None:
    """The id of the document has a prefix that the DID lacks, or is absent."""
    document = make_peer_document(KEY) | ({"id": id_} if id_ else {})
    assert parse_wallet_document(NYM, document).keys == (KEY.did_key,)


def test_base58_keys_in_former_service() -> None:
    """An `IndyAgent` has bare keys."""
    service = {"type": "IndyAgent", "recipientKeys": [encode_base58_key(KEY.did_key)], "serviceEndpoint": "http://a"}
    assert parse_wallet_document(NYM, {"service": [service]}).keys == (KEY.did_key,)


@pytest.mark.parametrize(
    "changed",
    [
        {"id": "did:sov:" + NYM[::-1]},
        {"id": 1},
        {"authentication": [], "service": []},
        {"service": [{"type": "did-communication", "recipientKeys": ["nonsense"]}]},
        {"service": [{"type": "did-communication", "recipientKeys": ["#key-9"]}]},
        {"service": [{"type": "did-communication", "recipientKeys": [1]}]},
        {"authentication": [{}] * (MAX_KEYS + 1)},
        {"service": [{}] * 65},
        {
            "service": [
                {
                    "type": "did-communication",
                    "serviceEndpoint": "http://a",
                    "recipientKeys": ["#key-1"],
                    "routingKeys": [KEY.did_key] * (MAX_ROUTING_KEYS + 1),
                }
            ]
        },
    ],
)
def test_unusable_document(changed: dict[str, Any]) -> None:
    """Documents without a usable key, of another DID, or larger than any."""
    with pytest.raises(UnresolvableDID):
        parse_wallet_document(NYM, make_peer_document(KEY) | changed)


def test_service_with_unreadable_key_is_skipped() -> None:
    """A service with a key of another kind does not keep the wallet from using the others."""
    document = make_peer_document(KEY)
    (service,) = document["service"]
    x25519 = "did:key:z6LSbysY2xFMRpGMhb7tFTLMpeuPRaqaWM1yECx2AtzE3KCc"
    document["service"] = [
        {**service, "priority": 0, "serviceEndpoint": "https://first", "recipientKeys": [x25519]},
        {**service, "priority": 1, "serviceEndpoint": "https://second", "routingKeys": ["nonsense"]},
        {**service, "priority": 2, "serviceEndpoint": "https://third"},
    ]
    found = parse_wallet_document(NYM, document)
    assert (found.endpoint, found.keys) == ("https://third", (KEY.did_key,))


@pytest.mark.parametrize(
    ("uri", "endpoint"),
    [
        ("HTTPS://A.example/Path", "https://A.example/Path"),
        ("http://[::1]:80/", "http://[::1]:80/"),
        ("http://", None),
        ("http:///path", None),
        ("http://?query", None),
        ("https://:443/", None),
        ("ftp://a.example", None),
        (["http://a.example"], None),
    ],
)
def test_endpoint(uri: object, endpoint: str | None) -> None:
    """An endpoint is an http(s) URL with a host; its scheme is stored in lower case."""
    document = make_peer_document(KEY)
    document["service"][0]["serviceEndpoint"] = uri
    assert parse_wallet_document(NYM, document).endpoint == endpoint


@pytest.mark.parametrize("form", FORMS)
def test_own_document_reads_back(form: DIDForm) -> None:
    """Each form of our document has our key and the HTTP endpoint first; the same key makes the same DID."""
    own = make_own_document(form, KEY, ENDPOINTS)
    found = parse_wallet_did(own.did) if own.document is None else parse_wallet_document(own.did, own.document)
    assert found.keys == (KEY.did_key,)
    assert found.endpoint == ENDPOINTS[0]
    assert find_did_form(own.did) == form
    assert make_own_document(form, KEY, ENDPOINTS) == own
    assert make_own_document(form, OTHER, ENDPOINTS).did != own.did


@pytest.mark.parametrize("form", ["did:peer:2", "did:peer:4"])
def test_own_did_resolves_as_v2_does(form: DIDForm) -> None:
    """The DID is valid by the rules of its method, with the X25519 key that belongs to the Ed25519 key."""
    document = resolve_local(make_own_document(form, KEY, ENDPOINTS).did)
    assert [method.key.raw for method in document.key_agreement] == [KEY.agreement_public]
    assert [method.key.raw for method in document.authentication] == [KEY.verkey]


def test_own_document_has_both_services() -> None:
    """HTTP first, then WebSocket, with the same key; in the former document the key is bare, and the id qualified."""
    peer = make_own_document("did:peer:1", KEY, ENDPOINTS)
    nym = make_own_document("nym", KEY, ENDPOINTS)
    assert peer.document is not None and nym.document is not None
    for document, key in ((peer.document, "#key-1"), (nym.document, encode_base58_key(KEY.did_key))):
        services = document["service"]
        assert [(one["priority"], one["serviceEndpoint"]) for one in services] == list(enumerate(ENDPOINTS))
        assert [one["recipientKeys"] for one in services] == [[key], [key]]
        assert len({one["id"] for one in services}) == 2
    assert peer.document["id"] == peer.did
    without_id = {name: value for name, value in peer.document.items() if name != "id"}
    assert peer.did == f"did:peer:1{encoding.encode_multihash(encoding.dumps(without_id))}"
    assert (nym.did, nym.document["id"]) == (NYM, f"did:sov:{NYM}")


TEXTS = st.sampled_from(
    [
        *("#key-1", "#", "", "did:peer:1#key-1", KEY.did_key, encode_base58_key(KEY.did_key), "did-communication"),
        *("IndyAgent", "http://a", "Ed25519VerificationKey2018", "Multikey", NYM, "did:key:z6Mk", "\ud800"[:0] + "é"),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXTS,
    lambda values: (
        st.lists(values, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("id", "type", "publicKeyBase58", "publicKeyMultibase", "publicKeyJwk", "publicKey", "priority"),
                    *("authentication", "keyAgreement", "verificationMethod", "service", "recipientKeys"),
                    *("routingKeys", "serviceEndpoint", "x", "crv", "kty"),
                ]
            ),
            values,
            max_size=6,
        )
    ),
    max_leaves=30,
)


@given(st.dictionaries(st.sampled_from(["authentication", "service", "publicKey", "verificationMethod"]), VALUES))
def test_any_document(document: dict[str, Any]) -> None:
    """Whatever JSON a document is, it is read or refused; what is read are keys and an http(s) URL."""
    try:
        found = parse_wallet_document(NYM, document)
    except UnresolvableDID:
        return
    assert found.keys and all(parse_key(key) == key for key in (*found.keys, *found.routing_keys))
    assert found.endpoint is None or found.endpoint.startswith("http")


@given(st.text(max_size=60) | st.text("did:peer24sovzQm.SVE", max_size=40))
def test_any_did(text: str) -> None:
    """Whatever text a DID is, it is read or refused."""
    try:
        parse_wallet_did(text)
    except (UnresolvableDID, UnsupportedDIDMethod):
        return
    raise AssertionError("no such DID has a key")
