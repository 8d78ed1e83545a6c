"""Connections 1.0: requests of older wallets, and signed responses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediatord.errors import InvalidBody, UnresolvableDID
from mediatord.protocol import encoding
from mediatord.protocol.didcomm_v1.connections import make_response, open_signed_field, parse_request, sign_field
from mediatord.protocol.didcomm_v1.did_document import make_own_document, parse_wallet_document
from mediatord.protocol.didcomm_v1.keys import SigningKey, encode_base58_key
from mediatord.protocol.didcomm_v1.message import DIDCOMM_ORG, OLD_PREFIX
from tests.protocol.didcomm_v1.published_requests import parse

WALLET = SigningKey.from_seed(b"\x01" * 32)
INVITATION = SigningKey.from_seed(b"\x03" * 32)
OURS = SigningKey.from_seed(b"\x04" * 32)
ENDPOINTS = ("https://m.example/didcomm", "wss://m.example/didcomm")

# A test of Credo, packages/didcomm/src/decorators/signature/SignatureDecoratorUtils.test.ts: the time is 0.
CREDO_SEED = b"00000000000000000000000000000My1"
CREDO_VALUE = {
    "did": "did",
    "did_doc": {
        "@context": "https://w3id.org/did/v1",
        "service": [
            {
                "id": "did:example:123456789abcdefghi#did-communication",
                "type": "did-communication",
                "priority": 0,
                "recipientKeys": ["someVerkey"],
                "routingKeys": [],
                "serviceEndpoint": "https://agent.example.com/",
            }
        ],
    },
}
CREDO_FIELD = {
    "@type": "https://didcomm.org/signature/1.0/ed25519Sha512_single",
    "signature": "zOSmKNCHKqOJGDJ6OlfUXTPJiirEAXrFn1kPiFDZfvG5hNTBKhsSzqAvlg44apgWBu7O57vGWZsXBF2BWZ5JAw",
    "sig_data": (
        "AAAAAAAAAAB7ImRpZCI6ImRpZCIsImRpZF9kb2MiOnsiQGNvbnRleHQiOiJodHRwczovL3czaWQub3JnL2RpZC92MSIsInNlcnZpY2UiOlt7Im"
        "lkIjoiZGlkOmV4YW1wbGU6MTIzNDU2Nzg5YWJjZGVmZ2hpI2RpZC1jb21tdW5pY2F0aW9uIiwidHlwZSI6ImRpZC1jb21tdW5pY2F0aW9uIiwi"
        "cHJpb3JpdHkiOjAsInJlY2lwaWVudEtleXMiOlsic29tZVZlcmtleSJdLCJyb3V0aW5nS2V5cyI6W10sInNlcnZpY2VFbmRwb2ludCI6Imh0dH"
        "BzOi8vYWdlbnQuZXhhbXBsZS5jb20vIn1dfX0"
    ),
    "signer": "GjZWsBLgZCR18aL468JAT7w9CZRiBnpxUPPgyQxh4voa",
}


def make_request(**changed: Any) -> dict[str, Any]:
    """A request of a wallet. :param changed: members of `connection`."""
    own = make_own_document("nym", WALLET, ["http://wallet.example"])
    return {
        "@type": f"{OLD_PREFIX}connections/1.0/request",
        "@id": "request-0001",
        "label": "Bob",
        "connection": {"DID": own.did, "DIDDoc": own.document, **changed},
    }


def test_published_signature() -> None:
    """A field signed by Credo, byte by byte, and read again."""
    assert sign_field(CREDO_VALUE, SigningKey.from_seed(CREDO_SEED), 0, DIDCOMM_ORG) == CREDO_FIELD
    assert open_signed_field(CREDO_FIELD) == (CREDO_VALUE, SigningKey.from_seed(CREDO_SEED).did_key)


@pytest.mark.parametrize(
    "changed",
    [
        # Of the same test: a signature of something else.
        {"signature": "6sblL1+OMlTFB3KhIQ8HKKZga8te7NAJAmBVPg2WzNYjMHVjfm+LJP6ZS1GUc2FRtfczRyLEfXrXb86SnzBmBA=="},
        {"signature": None},
        {"signature": ""},
        {"signer": encode_base58_key(WALLET.did_key)},
        {"signer": None},
        {"signer": "nonsense"},
        {"sig_data": "AAAAAAAAAAB7fQ"},
        {"sig_data": ""},
        {"sig_data": 5},
        {"sig_data": "A" * 40_000},
    ],
)
def test_wrong_signature(changed: dict[str, Any]) -> None:
    """Anything but the signature of this key over these bytes is refused."""
    with pytest.raises(InvalidBody):
        open_signed_field(CREDO_FIELD | changed)


def test_signature_in_any_base64() -> None:
    """Libraries pad, and use either alphabet."""
    padded = {**CREDO_FIELD, "sig_data": CREDO_FIELD["sig_data"] + "==="[: -len(CREDO_FIELD["sig_data"]) % 4]}
    padded["signature"] = encoding.encode_base64(encoding.decode_base64url(CREDO_FIELD["signature"]))
    assert open_signed_field(padded)[0] == CREDO_VALUE


def test_request() -> None:
    """DID, key and endpoint; members in the spelling of the RFC, or in that of some libraries."""
    message = make_request()
    other = {
        **message,
        "connection": {"did": message["connection"]["DID"], "did_doc": message["connection"]["DIDDoc"]},
    }
    for one in (message, other):
        request = parse_request(parse(one))
        assert request.protocol == "connections/1.0"
        assert request.document.keys == (WALLET.did_key,)
        assert request.document.endpoint == "http://wallet.example"


@pytest.mark.parametrize(
    "changed", [{"DID": None}, {"DID": ""}, {"DID": "x" * 513}, {"DID": "a b"}, {"DIDDoc": None}, {"DIDDoc": []}]
)
def test_unreadable_request(changed: dict[str, Any]) -> None:
    """No DID, or no document."""
    with pytest.raises(InvalidBody):
        parse_request(parse(make_request(**changed)))


@pytest.mark.parametrize("changed", [{"DIDDoc": {}}, {"DID": "somebody-else"}])
def test_unusable_document(changed: dict[str, Any]) -> None:
    """No key, or the document of another DID."""
    with pytest.raises(UnresolvableDID):
        parse_request(parse(make_request(**changed)))


def test_size_of_request() -> None:
    """A request that is larger than any is refused before its keys are decoded."""
    document = make_request()["connection"]["DIDDoc"]
    (service,) = document["service"]
    keys = [encode_base58_key(SigningKey.from_seed(bytes([number]) * 32).did_key) for number in range(60)]
    many = {**document, "service": [{**service, "recipientKeys": keys}] * 5}
    assert len(parse_request(parse(make_request(DIDDoc=many))).document.keys) == 60
    with pytest.raises(InvalidBody):
        parse_request(parse(make_request(DIDDoc={**many, "service": many["service"] * 4})))


def test_request_without_connection() -> None:
    """The member is missing, or no object."""
    values: tuple[Any, ...] = (None, [], "x")
    for value in values:
        with pytest.raises(InvalidBody):
            parse_request(parse({**make_request(), "connection": value}))


@pytest.mark.parametrize("prefix", [DIDCOMM_ORG, OLD_PREFIX])
def test_response(prefix: str) -> None:
    """The mediator's DID and document, signed by the key of the invitation; the types have the wallet's prefix."""
    answer = make_response(OURS, INVITATION, ENDPOINTS, prefix, "request-0001", None, 1_700_000_000.5)
    assert (answer.type, answer.thid, answer.pthid) == ("connections/1.0/response", "request-0001", None)
    field = answer.members["connection~sig"]
    assert field["@type"] == f"{prefix}signature/1.0/ed25519Sha512_single"
    assert field["signer"] == encode_base58_key(INVITATION.did_key)
    value, signer = open_signed_field(field)
    assert signer == INVITATION.did_key
    found = parse_wallet_document(value["DID"], value["DIDDoc"])
    assert (found.keys, found.endpoint) == ((OURS.did_key,), ENDPOINTS[0])
    assert int.from_bytes(encoding.decode_base64url(field["sig_data"])[:8], "big") == 1_700_000_000


@given(
    st.dictionaries(st.sampled_from(list(CREDO_FIELD)), st.none() | st.integers() | st.text() | st.lists(st.text()))
)
def test_any_field(changed: dict[str, Any]) -> None:
    """Whatever the field is, it is refused or the signature holds."""
    changed.pop("@type", None)
    try:
        assert open_signed_field(CREDO_FIELD | changed)[0] == CREDO_VALUE
    except InvalidBody:
        assert changed
