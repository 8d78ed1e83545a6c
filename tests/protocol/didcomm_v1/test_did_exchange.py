"""DID Exchange 1.0 and 1.1: requests with signed documents, and responses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediatord.errors import InvalidBody, MediatorError, UnresolvableDID, UnsupportedDIDMethod
from mediatord.protocol import encoding
from mediatord.protocol.didcomm_v1.did_document import parse_wallet_did, parse_wallet_document
from mediatord.protocol.didcomm_v1.did_exchange import (
    make_response,
    make_signed_attachment,
    open_signed_attachment,
    parse_request,
)
from mediatord.protocol.didcomm_v1.keys import SigningKey, parse_key
from tests.protocol.didcomm_v1.published_requests import (
    ACAPY_REQUEST,
    ACAPY_VERKEY,
    CREDO_PEER_2,
    CREDO_PEER_4,
    make_peer_1_request,
    parse,
)

WALLET = SigningKey.from_seed(b"\x01" * 32)
OTHER = SigningKey.from_seed(b"\x02" * 32)
INVITATION = SigningKey.from_seed(b"\x03" * 32)
OURS = SigningKey.from_seed(b"\x04" * 32)
ENDPOINTS = ("https://m.example/didcomm", "wss://m.example/didcomm")
EMBEDDED = {"@type": "https://didcomm.org/didexchange/1.1/request", "@id": "request-0002", "did": CREDO_PEER_4}


def test_published_request_of_acapy() -> None:
    """An unqualified DID, its qualified document, and the signature of ACA-Py verify."""
    request = parse_request(parse(ACAPY_REQUEST))
    assert (request.protocol, request.form) == ("didexchange/1.0", "nym")
    assert request.document.keys == (parse_key(ACAPY_VERKEY),)
    assert request.document.endpoint == "http://robert:3000"


@pytest.mark.parametrize("did", [CREDO_PEER_2, CREDO_PEER_4])
def test_did_with_document_inside(did: str) -> None:
    """No attachment is needed, and none is read."""
    request = parse_request(parse({**EMBEDDED, "did": did, "did_doc~attach": "nonsense"}))
    assert request.protocol == "didexchange/1.1"
    assert request.document == parse_wallet_did(did)


def test_did_peer_1() -> None:
    """The document is attached, and signed by its key."""
    request = parse_request(parse(make_peer_1_request(WALLET)))
    assert (request.form, request.document.keys) == ("did:peer:1", (WALLET.did_key,))


def with_jws(**changed: Any) -> dict[str, Any]:
    """A request with another JWS; a member that is None is left out."""
    request = make_peer_1_request(WALLET)
    jws = request["did_doc~attach"]["data"]["jws"] | changed
    request["did_doc~attach"]["data"]["jws"] = {name: value for name, value in jws.items() if value is not None}
    return request


def test_several_signatures() -> None:
    """Of several, one is enough, in any place; there may be four."""
    jws = make_peer_1_request(WALLET)["did_doc~attach"]["data"]["jws"]
    bad = {**jws, "signature": "AA"}
    assert parse_request(parse(with_jws(signatures=[bad, 1, {}, jws]))).document.keys == (WALLET.did_key,)
    with pytest.raises(UnresolvableDID):
        parse_request(parse(with_jws(signatures=[bad])))
    for signatures in ([], [jws] * 5, "x", None):
        with pytest.raises(InvalidBody):
            open_signed_attachment({"data": {"base64": "e30", "jws": {"signatures": signatures}}})


def test_signer_by_kid_only() -> None:
    """Without a JWK, the key is named in either header."""
    content = make_peer_1_request(WALLET)["did_doc~attach"]["data"]["base64"]
    for header, unprotected in (({}, {"kid": WALLET.did_key}), ({"kid": f"{WALLET.did_key}#x"}, None)):
        protected = encoding.encode_base64url(encoding.dumps({"alg": "EdDSA", **header}))
        signature = encoding.encode_base64url(WALLET.sign(f"{protected}.{content}".encode()))
        request = with_jws(protected=protected, signature=signature, header=unprotected)
        assert parse_request(parse(request)).document.keys == (WALLET.did_key,)


def test_standard_base64_in_attachment() -> None:
    """Either alphabet, with or without padding; the signature covers base64url."""
    attachment = make_signed_attachment(b"\xfb\xff\xfe?>", "text/plain", WALLET)
    for text in ("-__-Pz4", "-__-Pz4=", "+//+Pz4="):
        attachment["data"]["base64"] = text
        assert open_signed_attachment(attachment) == (b"\xfb\xff\xfe?>", [WALLET.did_key])


@pytest.mark.parametrize(
    "request_",
    [
        make_peer_1_request(WALLET, OTHER),
        with_jws(signature="A" * 86),
        with_jws(signature=""),
        with_jws(protected=encoding.encode_base64url(b'{"alg":"none"}')),
        with_jws(protected="nonsense!"),
        with_jws(protected=None),
        {**EMBEDDED, "did": "did:peer:2.Vz6Mk"},
        {**EMBEDDED, "did": CREDO_PEER_4.rpartition(":")[0]},
        {**EMBEDDED, "did": CREDO_PEER_4[:-1]},
        {**make_peer_1_request(WALLET), "did": "did:peer:1zQmRYBx1pL86DrsxoJ2ZD3w42d7Ng92ErPgFsCSqg8Q1h4i"},
    ],
)
def test_unproven_document(request_: dict[str, Any]) -> None:
    """A signature by another key, or none that verifies; a DID that its document does not fit."""
    with pytest.raises(UnresolvableDID):
        parse_request(parse(request_))


def test_public_did() -> None:
    """Nothing is fetched for an unknown wallet."""
    with pytest.raises(UnsupportedDIDMethod):
        parse_request(parse({**EMBEDDED, "did": "did:web:a.example"}))


@pytest.mark.parametrize(
    "changed",
    [
        {"did": None},
        {"did": 5},
        {"did_doc~attach": None},
        {"did_doc~attach": {}},
        {"did_doc~attach": {"data": {"base64": "e30"}}},
        {"did_doc~attach": {"data": {"base64": 5, "jws": {}}}},
        {"did_doc~attach": {"data": {"base64": "e", "jws": {}}}},
        {"label": "x" * 33_000},
        {"did_doc~attach": make_signed_attachment(b"[]", "application/json", WALLET)},
        {"did_doc~attach": make_signed_attachment(b"{", "application/json", WALLET)},
        {"did_doc~attach": make_signed_attachment(b'"' + b"x" * 20_000 + b'"', "application/json", WALLET)},
    ],
)
def test_unreadable_request(changed: dict[str, Any]) -> None:
    """No DID, or no document where one is needed."""
    with pytest.raises(InvalidBody):
        parse_request(parse(make_peer_1_request(WALLET) | changed))


@pytest.mark.parametrize("request_", [EMBEDDED, {**EMBEDDED, "did": CREDO_PEER_2}])
def test_response_with_rotation(request_: dict[str, Any]) -> None:
    """The wallet's form of DID, the same text signed by the invitation key, and the thread of the request."""
    request = parse_request(parse(request_))
    answer = make_response(request, OURS, INVITATION, ENDPOINTS, "request-0002", "invitation-0001")
    assert (answer.type, answer.thid, answer.pthid) == (
        "didexchange/1.1/response",
        "request-0002",
        "invitation-0001",
    )
    did = answer.members["did"]
    assert did[:10] == request_["did"][:10]
    assert parse_wallet_did(did).keys == (OURS.did_key,)
    assert open_signed_attachment(answer.members["did_rotate~attach"]) == (did.encode(), [INVITATION.did_key])
    assert "did_doc~attach" not in answer.members


@pytest.mark.parametrize("request_", [ACAPY_REQUEST, make_peer_1_request(WALLET)])
def test_response_with_document(request_: dict[str, Any]) -> None:
    """The document of our DID, signed by the invitation key, in the version of the request."""
    request = parse_request(parse(request_))
    answer = make_response(request, OURS, INVITATION, ENDPOINTS, "request-0001", "invitation-0001")
    assert answer.type == f"{request.protocol}/response"
    content, signers = open_signed_attachment(answer.members["did_doc~attach"])
    assert signers == [INVITATION.did_key]
    document = parse_wallet_document(answer.members["did"], encoding.loads_object(content))
    assert document.keys == (OURS.did_key,)
    assert "did_rotate~attach" not in answer.members


def test_signature_names_its_key_for_all_libraries() -> None:
    """`header.kid` for Credo, `jwk` and its `kid` for ACA-Py, without padding anywhere."""
    data = make_signed_attachment(b"x", "text/string", INVITATION)["data"]
    header = encoding.loads_object(encoding.decode_base64url(data["jws"]["protected"]))
    assert data["jws"]["header"] == {"kid": INVITATION.did_key}
    assert header == {
        "alg": "EdDSA",
        "jwk": {
            "kty": "OKP",
            "crv": "Ed25519",
            "x": encoding.encode_base64url(INVITATION.verkey),
            "kid": INVITATION.did_key,
        },
    }
    assert "=" not in data["base64"] + data["jws"]["protected"] + data["jws"]["signature"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "e30", "EdDSA", "==", WALLET.did_key, "é"]),
    lambda values: (
        st.lists(values, max_size=3)
        | st.dictionaries(
            st.sampled_from(["data", "base64", "jws", "signatures", "protected", "signature", "header", "kid"]),
            values,
        )
    ),
    max_leaves=12,
)


@given(st.sampled_from(["did", "did_doc~attach"]), JSON)
def test_any_member(name: str, value: Any) -> None:
    """Whatever a member is, the request is refused with one clear error."""
    request = copy.deepcopy(make_peer_1_request(WALLET))
    request[name] = value
    with pytest.raises(MediatorError):
        parse_request(parse(request))


@given(st.lists(st.sampled_from(["data", "jws", "base64", "protected", "signature", "header"])), JSON)
def test_any_part_of_attachment(path: list[str], value: Any) -> None:
    """Whatever a part of the attachment is, the request is refused, or the part did not matter."""
    request = copy.deepcopy(make_peer_1_request(WALLET))
    part: Any = request["did_doc~attach"]
    for name in path[:-1]:
        part = part.get(name, part) if isinstance(part.get(name), dict) else part
    part[path[-1] if path else "data"] = value
    try:
        assert parse_request(parse(request)).document.keys == (WALLET.did_key,)
    except (InvalidBody, UnresolvableDID):
        pass
