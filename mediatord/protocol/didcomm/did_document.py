"""DID documents as JSON, with the liberties that released wallets take (reference 8.3, 8.4 and 8.6)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from mediatord.errors import SenderUnresolvable
from mediatord.protocol.didcomm.did import DIDDocument, Endpoint, Service, VerificationMethod, did_of
from mediatord.protocol.didcomm.keys import Curve, PublicKey

MAX_KEYS = 64
MAX_SERVICES = 64
# A sender wraps once for each routing key, which makes a message a third longer; and may POST to each endpoint.
MAX_ROUTING_KEYS = 3
MAX_ENDPOINTS = 8

DIDCOMM_MESSAGING = "DIDCommMessaging"

AGREEMENT_CURVES: frozenset[Curve] = frozenset(("X25519", "P-256", "P-384", "P-521"))
SIGNATURE_CURVES: frozenset[Curve] = frozenset(("Ed25519", "P-256", "P-384", "P-521", "secp256k1"))

# The curve that a type of verification method fixes; None where the key itself says it.
_CURVE_OF_TYPE: dict[str, Curve | None] = {
    "Multikey": None,
    "JsonWebKey2020": None,
    "JsonWebKey": None,
    "X25519KeyAgreementKey2019": "X25519",
    "X25519KeyAgreementKey2020": "X25519",
    "Ed25519VerificationKey2018": "Ed25519",
    "Ed25519VerificationKey2020": "Ed25519",
}


def parse_document(did: str, document: Mapping[str, Any]) -> DIDDocument:
    """
    What `document` says about `did`; relative ids are made absolute, members that cannot be read are left out.

    A key is dropped when its type is not one of reference 8.6, when it does not suit the purpose it is listed for
    (an Ed25519 key for key agreement is not converted), or when its id belongs to another DID.

    :raise SenderUnresolvable: more than 64 keys, references or services.
    """
    methods: dict[str, Mapping[str, Any]] = {}
    for method in _objects(document.get("verificationMethod"), MAX_KEYS):
        name = _absolute(did, method.get("id"))
        if name is not None:
            methods.setdefault(name, method)
    return DIDDocument(
        did,
        _relationship(did, document.get("keyAgreement"), methods, AGREEMENT_CURVES),
        _relationship(did, document.get("authentication"), methods, SIGNATURE_CURVES),
        parse_services(did, document.get("service")),
    )


def parse_services(did: str, services: object) -> tuple[Service, ...]:
    """
    The DIDComm services among a list of services. Those without an id are called by their place in the list:
    `#service`, `#service-1` and so on (reference 8.3).

    :raise SenderUnresolvable: more than 64.
    """
    found = []
    for place, service in enumerate(_objects(services, MAX_SERVICES)):
        kind = service.get("type")
        if kind != DIDCOMM_MESSAGING and not (isinstance(kind, list) and DIDCOMM_MESSAGING in kind):
            continue
        name = _absolute(did, service.get("id")) or f"{did}#service{f'-{place}' if place else ''}"
        found.append(Service(name, tuple(_endpoints(service))))
    return tuple(found)


def _relationship(
    did: str, listed: object, methods: Mapping[str, Mapping[str, Any]], curves: frozenset[Curve]
) -> tuple[VerificationMethod, ...]:
    """The keys listed for one purpose, by reference or embedded, each id once."""
    found: dict[str, VerificationMethod] = {}
    for entry in _limited(listed, MAX_KEYS):
        embedded = entry if isinstance(entry, dict) else None
        name = _absolute(did, embedded.get("id") if embedded is not None else entry)
        if name is None or name in found:
            continue
        key = _key(embedded if embedded is not None else methods.get(name, {}))
        if key is not None and key.curve in curves:
            found[name] = VerificationMethod(name, key)
    return tuple(found.values())


def _key(method: Mapping[str, Any]) -> PublicKey | None:
    kind = method.get("type")
    if not isinstance(kind, str) or kind not in _CURVE_OF_TYPE:
        return None
    curve = _CURVE_OF_TYPE[kind]
    try:
        key = _material(method, curve)
    except ValueError:
        return None
    return key if key is not None and curve in (None, key.curve) else None


def _material(method: Mapping[str, Any], curve: Curve | None) -> PublicKey | None:
    multibase, jwk, bare = (method.get(f"publicKey{name}") for name in ("Multibase", "Jwk", "Base58"))
    if isinstance(multibase, str):
        return PublicKey.from_multibase(multibase)
    if isinstance(jwk, dict):
        return PublicKey.from_jwk(jwk)
    if isinstance(bare, str) and curve is not None:
        return PublicKey.from_base58(curve, bare)
    return None


def _endpoints(service: Mapping[str, Any]) -> Iterable[Endpoint]:
    """One object, an array of them, or (old style) a string with `routingKeys` and `accept` beside it."""
    place = service.get("serviceEndpoint")
    return islice(_readable_endpoints(service, place), MAX_ENDPOINTS)


def _readable_endpoints(service: Mapping[str, Any], place: object) -> Iterator[Endpoint]:
    for entry in _limited(place if isinstance(place, list) else [place], MAX_SERVICES):
        # Old style: a string, with what belongs to it beside it.
        members = service if isinstance(entry, str) else entry if isinstance(entry, dict) else {}
        uri = entry if isinstance(entry, str) else members.get("uri")
        keys = _strings(members.get("routingKeys"))
        if isinstance(uri, str) and len(keys) <= MAX_ROUTING_KEYS:
            yield Endpoint(uri, _strings(members.get("accept")), keys)


def _absolute(did: str, name: object) -> str | None:
    """The absolute form of an id in the document of `did`; None for what is no id, or one of another DID."""
    if not isinstance(name, str):
        return None
    if name.startswith("#"):
        return did + name
    return name if did_of(name) == did and "#" in name else None


def _objects(value: object, limit: int) -> list[dict[str, Any]]:
    # What is no object keeps its place, so that numbering by place holds.
    return [entry if isinstance(entry, dict) else {} for entry in _limited(value, limit)]


def _strings(value: object) -> tuple[str, ...]:
    return tuple(entry for entry in value if isinstance(entry, str)) if isinstance(value, list) else ()


def _limited(value: object, limit: int) -> list[Any]:
    if not isinstance(value, list):
        return []
    if len(value) > limit:
        raise SenderUnresolvable
    return value
