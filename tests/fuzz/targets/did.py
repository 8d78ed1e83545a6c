"""DIDs of every method, documents in every form, and key ids in them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable

from mediatord.errors import UnresolvableDID, UnsupportedDIDMethod
from mediatord.protocol import encoding
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.didcomm.did_document import (
    MAX_DID_LENGTH,
    MAX_ENDPOINTS,
    MAX_KEYS,
    MAX_ROUTING_KEYS,
    MAX_SERVICES,
    DIDDocument,
    is_did,
    parse_did_document,
    strip_did_url,
)
from mediatord.protocol.didcomm.did_methods import (
    DIDPeer4LongFormRequired,
    DIDWebLookupRequired,
    locate_did_web,
    parse_did_web_document,
    resolve_local,
    resolve_short_did_peer_4,
)
from tests.did_factories import make_did_peer_4

_DECLARED = (UnresolvableDID, UnsupportedDIDMethod, DIDWebLookupRequired, DIDPeer4LongFormRequired)
_KEYS = ".Ez6LSqaU49Tn4sboPj9gbrxmcJ7sHF5gu6bzAASfJnh9meXK6.Vz6Mkon3Necd6NkkyfoGoHxid2znGc59LU3K7mubaRcFbLfLX"
_DIDS = (
    "did:key:z6Mkon3Necd6NkkyfoGoHxid2znGc59LU3K7mubaRcFbLfLX",
    "did:key:z6LSqaU49Tn4sboPj9gbrxmcJ7sHF5gu6bzAASfJnh9meXK6",
    "did:peer:0z6Mkon3Necd6NkkyfoGoHxid2znGc59LU3K7mubaRcFbLfLX",
    f"did:peer:2{_KEYS}.SeyJ0IjoiZG0iLCJzIjp7InVyaSI6Imh0dHA6Ly9hIn19",
    "did:peer:4zQm" + "1" * 44,
    "did:web:a.example%3A8443:b:c",
    "did:web:127.0.0.1",
    "did:web:a..b:..:%2e%2E",
    "did:decentrl:a:b:c:d",
    "did:peer:3zQm",
    "did:key:zDnaerDaTF5BXEavCrfRZEk316dpbLsfPDZ3WJ5hRTPFU2169",
    "did:key:zQ3shokFTS3brHcDQrn82RUDfCZESWL1ZdCEJwekUDPQiYBme",
)
_SERVICE = {"t": "dm", "s": {"uri": "http://a", "r": ["did:key:z6Mk#a"], "a": ["didcomm/v2"]}, "id": "#s"}
_DOCUMENT = {
    "@context": ["https://www.w3.org/ns/did/v1"],
    "verificationMethod": [
        {"id": "#1", "type": "Multikey", "publicKeyMultibase": "z6LSqaU49Tn4sboPj9gbrxmcJ7sHF5gu6bzAASfJnh9meXK6"},
        {
            "id": "#2",
            "type": "JsonWebKey2020",
            "publicKeyJwk": {"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"},
        },
        {
            "id": "@DID@#3",
            "type": "X25519KeyAgreementKey2019",
            "publicKeyBase58": "JhNWeSVLMYccCk7iopQW4guaSJTojqpMEELgSLhKwRr",
        },
    ],
    "keyAgreement": ["#1", "@DID@#3", {"id": "#4", "type": "Multikey", "publicKeyMultibase": "z"}],
    "authentication": ["#2"],
    "service": [
        {
            "id": "#s",
            "type": "DIDCommMessaging",
            "serviceEndpoint": [{"uri": "http://a", "routingKeys": ["did:a:b"]}],
        },
        {"id": "#t", "type": ["DIDCommMessaging"], "serviceEndpoint": "http://b", "accept": ["didcomm/v2"]},
    ],
}


class DIDTarget:
    """Modes: `t` a DID, `d` a document, `w` a fetched one, `2` services of a did:peer:2, `4` a did:peer:4."""

    words = (
        *(did.encode() for did in _DIDS),
        b"#key-1",
        b".S",
        b".E",
        b"%00",
        b"%",
        b'"routingKeys"',
        b"did:",
        b"==",
    )
    longest = 10_000
    most_calls = (3_000, 40)
    most_memory = (1_000_000, 400)

    def close(self) -> None:
        """No-op."""

    def run(self, data: bytes) -> None:
        """Resolve the DID, and check the document."""
        way, rest = data[:1], data[1:].replace(b"@DID@", b"did:web:a")
        with contextlib.suppress(*_DECLARED):
            if way == b"w":
                self._check(parse_did_web_document("did:web:a", rest))
            elif way in (b"d", b"2", b"4"):
                self._from_json(way, rest)
            else:
                self._text(rest.decode("utf-8", "surrogateescape"))

    def _from_json(self, way: bytes, rest: bytes) -> None:
        try:
            value = encoding.loads_object(rest)
        except ValueError:
            return
        if way == b"d":
            self._check(parse_did_document("did:web:a", value))
        elif way == b"2":
            encoded = encoding.encode_base64url(rest)
            self._text(f"did:peer:2{_KEYS}.S{encoded}")
        else:
            try:
                long, short = make_did_peer_4(value)
            except ValueError:
                return
            self._check(resolve_short_did_peer_4(short, long))
            self._text(long)

    def _text(self, text: str) -> None:
        short = canonicalize_did(text)
        assert canonicalize_did(short) == short
        assert strip_did_url(strip_did_url(text)) == strip_did_url(text)
        if text.startswith("did:web:") and is_did(text):
            location = locate_did_web(text)
            assert location.url.startswith("https://") and location.url.endswith("/did.json")
            assert location.url.removeprefix("https://").startswith(location.host)
            assert "/../" not in location.url and "/./" not in location.url and "//" not in location.url[8:]
        document = resolve_local(text)
        assert is_did(text) and len(text) <= MAX_DID_LENGTH
        self._check(document)

    def _check(self, document: DIDDocument) -> None:
        """The document is within its limits, and each key is found by its id."""
        assert len(document.key_agreement) <= MAX_KEYS and len(document.authentication) <= MAX_KEYS
        assert len(document.endpoints) <= MAX_SERVICES * MAX_ENDPOINTS
        for method in document.key_agreement:
            assert method.key.curve not in ("Ed25519", "secp256k1")
            found = document.key_agreement_key(method.id)
            assert found is not None and found.id.partition("#")[2] == method.id.partition("#")[2]
        assert all(len(endpoint.routing_keys) <= MAX_ROUTING_KEYS for endpoint in document.endpoints)
        document.http_endpoints()

    def seeds(self) -> Iterable[bytes]:
        """Each method, and documents with everything that is read."""
        for did in _DIDS:
            yield b"t" + did.encode()
        document = json.dumps(_DOCUMENT).encode()
        yield b"d" + document
        yield b"4" + document
        yield b"w" + json.dumps({"id": "did:web:a", **_DOCUMENT}).encode()
        yield b"2" + json.dumps(_SERVICE).encode()
        yield b"2" + json.dumps({**_SERVICE, "s": "http://a", "a": ["didcomm/v2"]}).encode()


def make() -> DIDTarget:
    """Create the target."""
    return DIDTarget()
