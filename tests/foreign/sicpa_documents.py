"""
Keys and DID documents for the PyPI package `didcomm` (SICPA), resolved by `peerdid` (SICPA) and `did-peer-2`.

The library requires its own form of documents: key types of 2019 and 2020 or JWK, absolute ids, no embedded keys,
only DIDComm services, with `routingKeys` beside the URI. :func:`dialect` converts what the resolvers return, as
applications have to.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import base58
import did_peer_2
from authlib.jose import ECKey, OKPKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from didcomm.did_doc.did_doc import DIDDoc
from peerdid.dids import create_peer_did_numalgo_2, resolve_peer_did
from peerdid.keys import Ed25519VerificationKey, X25519KeyAgreementKey

Document = dict[str, Any]
JWK = dict[str, str]
Resolve = Callable[[str], Document]

CODECS = {
    "X25519": b"\xec\x01",
    "Ed25519": b"\xed\x01",
    "P-256": b"\x80\x24",
    "P-384": b"\x81\x24",
    "P-521": b"\x82\x24",
}
KEY_TYPES = {"z6LS": "X25519KeyAgreementKey2020", "z6Mk": "Ed25519VerificationKey2020"}

spec_key_ids: Resolve = did_peer_2.resolve


def old_key_ids(did: str) -> Document:
    """
    A did:peer:2 document by `peerdid`, whose key ids are the first eight characters of the key.

    It refuses DIDs with several services, so only the keys are passed to it.
    """
    keys = ".".join(element for element in did.split(".") if not element.startswith("S"))
    document = resolve_peer_did(keys).serialize()
    services = did_peer_2.resolve(did).get("service", [])
    return {**json.loads(json.dumps(document).replace(keys, did)), "service": services}


def generate(curve: str) -> JWK:
    """A private JWK of Authlib, which the library uses."""
    kind = OKPKey if curve in ("X25519", "Ed25519") else ECKey
    return dict(kind.generate_key(curve, is_private=True).as_dict(is_private=True))


def public(jwk: JWK) -> JWK:
    return {name: jwk[name] for name in ("kty", "crv", "x", "y") if name in jwk}


def multikey(jwk: JWK) -> str:
    """The public key as written in did:peer."""
    if jwk["kty"] == "OKP":
        raw = OKPKey.import_key(jwk).get_public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    else:
        raw = ECKey.import_key(jwk).get_public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
    return "z" + base58.b58encode(CODECS[jwk["crv"]] + raw).decode()


def peer_did(agreement: str, authentication: str, mediator: str) -> tuple[str, list[str]]:
    """A did:peer:2 by `did-peer-2` with the mediator as endpoint, and the fragments of its two key ids."""
    keys = [did_peer_2.KeySpec.key_agreement(agreement), did_peer_2.KeySpec.authentication(authentication)]
    endpoint = {"uri": mediator, "accept": ["didcomm/v2"]}
    did = did_peer_2.generate(keys, [{"type": "DIDCommMessaging", "serviceEndpoint": endpoint}])
    return did, ["key-1", "key-2"]


def old_peer_did(agreement: str, authentication: str, mediator: str) -> tuple[str, list[str]]:
    """The same by `peerdid`: a string as endpoint, and key ids of eight characters."""
    service = {"type": "DIDCommMessaging", "serviceEndpoint": mediator, "accept": ["didcomm/v2"]}
    keys = X25519KeyAgreementKey.from_multibase(agreement), Ed25519VerificationKey.from_multibase(authentication)
    did = create_peer_did_numalgo_2([keys[0]], [keys[1]], service)
    return str(did), [agreement[1:9], authentication[1:9]]


def dialect(document: Document, jwks: dict[str, JWK], routing_key: Callable[[str], str]) -> DIDDoc:
    """
    `document` in the library's form.

    :param jwks: public JWKs of keys that the library supports in no other form, by multikey.
    :param routing_key: the key id for a mediator's DID used as endpoint.
    """
    did = document["id"]
    relationships = {name: document.get(name, []) for name in ("authentication", "keyAgreement")}
    embedded = [entry for listed in relationships.values() for entry in listed if isinstance(entry, dict)]
    services = [service for service in document.get("service", []) if service["type"] == "DIDCommMessaging"]
    return DIDDoc.deserialize(
        {
            "id": did,
            "verificationMethod": [
                _method(did, method, jwks) for method in [*document["verificationMethod"], *embedded]
            ],
            **{name: [_absolute(did, _name(entry)) for entry in listed] for name, listed in relationships.items()},
            "service": [_flat(did, service, routing_key) for service in services],
        }
    )


def _name(entry: str | Document) -> str:
    return entry if isinstance(entry, str) else entry["id"]


def _absolute(did: str, reference: str) -> str:
    return reference if reference.startswith("did:") else did + reference


def _method(did: str, method: Document, jwks: dict[str, JWK]) -> Document:
    key = method.get("publicKeyMultibase", "")
    same = {"id": _absolute(did, method["id"]), "controller": did}
    if key in jwks:
        return {**same, "type": "JsonWebKey2020", "publicKeyJwk": jwks[key]}
    if method["type"] == "Multikey":
        return {**same, "type": KEY_TYPES[key[:4]], "publicKeyMultibase": key}
    return {**method, **same}


def _flat(did: str, service: Document, routing_key: Callable[[str], str]) -> Document:
    """A service in the form that the library's forward supports: the mediator as a routing key."""
    endpoint = service["serviceEndpoint"]
    uri = endpoint if isinstance(endpoint, str) else endpoint["uri"]
    hops = [routing_key(uri)] if uri.startswith("did:") else []
    return {
        "id": _absolute(did, service["id"]),
        "type": "DIDCommMessaging",
        # The application knows the mediator's URL, and posts there itself.
        "serviceEndpoint": "http://mediator.invalid" if hops else uri,
        "recipientKeys": [],
        "routingKeys": hops,
        "accept": ["didcomm/v2"],
    }
