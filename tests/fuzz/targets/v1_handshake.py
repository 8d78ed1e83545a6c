"""Requests to connect of DIDComm v1, with documents in every form, and signed attachments and fields."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from mediatord.errors import InvalidBody, InvalidPlaintext, UnresolvableDID, UnsupportedDIDMethod
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.did_document import MAX_KEYS, MAX_ROUTING_KEYS
from mediatord.protocol.didcomm.did_methods import make_did_peer_4
from mediatord.protocol.didcomm_v1 import connections, did_exchange
from mediatord.protocol.didcomm_v1.did_document import make_own_document, parse_wallet_did, parse_wallet_document
from mediatord.protocol.didcomm_v1.did_exchange import ConnectionRequest, make_signed_attachment
from mediatord.protocol.didcomm_v1.keys import SigningKey, encode_base58_key, parse_key
from mediatord.protocol.didcomm_v1.message import DIDCOMM_ORG, parse_message
from mediatord.protocol.didcomm_v1.out_of_band import derive_invitation_id
from tests.protocol.didcomm_v1.published_requests import (
    ACAPY_REQUEST,
    CREDO_PEER_2,
    CREDO_PEER_4,
    make_peer_1_request,
    make_peer_document,
)

_DECLARED = (InvalidBody, InvalidPlaintext, UnresolvableDID, UnsupportedDIDMethod)
_WALLET, _OURS, _INVITATION = (SigningKey.from_seed(bytes([number]) * 32) for number in (1, 2, 3))
_NYM = make_own_document("nym", _WALLET, ["http://a"])
_ENDPOINTS = ("https://m/didcomm", "wss://m/didcomm")
_PEER_2_KEY = f"did:peer:2.V{_WALLET.did_key.removeprefix('did:key:')}"
_REQUEST = {"@type": f"{DIDCOMM_ORG}didexchange/1.1/request", "@id": "12345678", "did": CREDO_PEER_4}


class V1HandshakeTarget:
    """
    Modes: `m` a request, `d` a document, `s` a document that is signed and attached, `4` one in a did:peer:4, `2` a
    service in a did:peer:2, `a` an attachment, `f` a signed field.
    """

    words = (
        *(b'"authentication"', b'"publicKey"', b'"verificationMethod"', b'"keyAgreement"', b'"service"', b'"id"'),
        *(b'"recipientKeys"', b'"routingKeys"', b'"serviceEndpoint"', b'"priority"', b'"did-communication"'),
        *(b'"IndyAgent"', b'"Ed25519VerificationKey2018"', b'"Multikey"', b'"publicKeyBase58"', b"#key-1", b"null"),
        *(b'"did_doc~attach"', b'"data"', b'"base64"', b'"jws"', b'"signatures"', b'"protected"', b'"header"'),
        *(b'"connection"', b'"DID"', b'"DIDDoc"', b'"sig_data"', b'"signer"', b"did:sov:", b"did:peer:1zQm", b"=="),
        *(_WALLET.did_key.encode(), encode_base58_key(_WALLET.did_key).encode(), b"didcomm:transport/queue"),
    )
    longest = 10_000
    # Four signatures, or 64 keys in base58.
    most_calls = (8_000, 40)
    most_memory = (1_000_000, 400)

    def close(self) -> None:
        """No-op."""

    def run(self, data: bytes) -> None:
        """Read the input; what is read is within its limits, and can be answered."""
        mode, rest = data[:1], data[1:]
        try:
            if mode == b"m":
                self._read_request(rest)
            elif mode in b"afds24" and mode:
                self._read_part(mode, encoding.loads_object(rest), rest)
        except _DECLARED:
            pass
        except ValueError as error:
            # The input is no JSON, or nests deeper than is written.
            if type(error) is not ValueError:
                raise

    def _read_part(self, mode: bytes, value: dict[str, Any], source: bytes) -> None:
        if mode == b"a":
            _, signers = did_exchange.open_signed_attachment(value)
            assert all(parse_key(key) == key for key in signers)
        elif mode == b"f":
            _, signer = connections.open_signed_field(value)
            assert parse_key(signer) == signer
        elif mode == b"2":
            self._check(parse_wallet_did(f"{_PEER_2_KEY}.S{encoding.encode_base64url(source)}"))
        elif mode == b"4":
            self._check(parse_wallet_did(make_did_peer_4(value)))
        elif mode == b"d":
            self._check(parse_wallet_document(_NYM.did, value))
        else:
            attachment = make_signed_attachment(encoding.dumps(value), "application/json", _WALLET)
            self._read_request(encoding.dumps({**_REQUEST, "did": _NYM.did, "did_doc~attach": attachment}))

    def _read_request(self, raw: bytes) -> None:
        message = parse_message(raw)
        if message.type.family == "connections":
            request = connections.parse_request(message)
        else:
            request = did_exchange.parse_request(message)
        self._check(request.document)
        self._answer(request)

    def _answer(self, request: ConnectionRequest) -> None:
        pthid = derive_invitation_id("https://m")
        answer = did_exchange.make_response(request, _OURS, _INVITATION, _ENDPOINTS, "12345678", pthid)
        ours = make_own_document(request.form, _OURS, _ENDPOINTS)
        assert answer.members["did"] == ours.did

    def _check(self, document: Any) -> None:
        assert 1 <= len(document.keys) <= 2 * MAX_KEYS and len(document.routing_keys) <= MAX_ROUTING_KEYS
        assert all(parse_key(key) == key for key in (*document.keys, *document.routing_keys))
        endpoint = document.endpoint
        assert endpoint is None or (endpoint.startswith(("http://", "https://")) and len(endpoint) <= 2_048)
        assert endpoint is not None or not document.routing_keys

    def seeds(self) -> Iterable[bytes]:
        """Published requests, those of each form, and their parts."""
        connection = {"@type": f"{DIDCOMM_ORG}connections/1.0/request", "@id": "12345678"}
        requests = (
            ACAPY_REQUEST,
            _REQUEST,
            {**_REQUEST, "did": CREDO_PEER_2},
            make_peer_1_request(_WALLET),
            {**connection, "connection": {"DID": _NYM.did, "DIDDoc": _NYM.document}},
        )
        for request in requests:
            yield b"m" + json.dumps(request).encode()
        documents: tuple[dict[str, Any] | None, ...] = (make_peer_document(_WALLET, "http://a"), _NYM.document)
        for document in documents:
            for mode in (b"d", b"s", b"4"):
                yield mode + json.dumps(document).encode()
        service = make_peer_document(_WALLET, "http://a")["service"][0]
        yield b"2" + json.dumps({**service, "routingKeys": [_OURS.did_key]}).encode()
        attachment = make_signed_attachment(b"{}", "text/plain", _WALLET)
        yield b"a" + json.dumps(attachment).encode()
        signatures = {"signatures": [attachment["data"]["jws"]] * 4}
        yield b"a" + json.dumps({"data": {"base64": "e30=", "jws": signatures}}).encode()
        yield b"f" + json.dumps(connections.sign_field({"DID": ""}, _WALLET, 0, DIDCOMM_ORG)).encode()
        yield from (b"", b"m", b"d{}", b"m[]", b"f{}", b"a{}", b"2[]")


def make() -> V1HandshakeTarget:
    """Create the target."""
    return V1HandshakeTarget()
