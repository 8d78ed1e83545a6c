"""
DID syntax, and the parts of a DID document that a mediator uses (reference section 8).

A document is reduced to its key agreement keys, authentication keys and DIDComm services. Parsing accepts the
deviations of released wallets (reference 8.3, 8.4, 8.6). :mod:`~mediatord.protocol.didcomm.did_methods` produces
documents.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from mediatord.errors import UnresolvableDID
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.didcomm.keys import Curve, PublicKey

MAX_DID_LENGTH = 8192

# Possessive: linear time for any input.
_DID = re.compile(r"did:[a-z0-9]+:(?:[A-Za-z0-9._:-]++|%[0-9A-Fa-f]{2})++")
# Old generators pad the base64url of services (reference 8.3), which the DID grammar does not allow.
_PADDED_PEER_2 = re.compile(r"did:peer:2[A-Za-z0-9._=-]++")
_URL_PART = re.compile(r"[/?#]")
_SHORT_KID_LENGTH = 8
_MAX_CACHED_LENGTH = 2048


@dataclass(frozen=True, slots=True)
class ServiceEndpoint:
    """
    An endpoint of a service.

    :param uri: http(s), ws(s), a DID, or `didcomm:transport/queue`; unchecked.
    :param accept: envelope profiles; empty if absent.
    :param routing_keys: key ids or DIDs to wrap messages for, as written; empty if absent.
    """

    uri: str
    accept: tuple[str, ...] = ()
    routing_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VerificationMethod:
    """
    A public key and its id.

    :param id: absolute DID URL, spelled as in the current specification.
    """

    id: str
    key: PublicKey


@dataclass(frozen=True, slots=True)
class DIDDocument:
    """
    The resolution result of a DID.

    :param did: the DID in the requested form.
    :param key_agreement: encryption keys; never Ed25519 or secp256k1.
    :param authentication: signing keys; never X25519.
    :param endpoints: of its services of type DIDCommMessaging, in order.
    :param also_known_as: other forms of the DID that follow from its method; claims of the document itself are
        dropped.
    """

    did: str
    key_agreement: tuple[VerificationMethod, ...]
    authentication: tuple[VerificationMethod, ...]
    endpoints: tuple[ServiceEndpoint, ...] = ()
    also_known_as: tuple[str, ...] = ()

    def key_agreement_key(self, kid: str) -> VerificationMethod | None:
        """The key agreement key that `kid` denotes in any spelling found in practice (reference 8.6)."""
        return self._find(kid, self.key_agreement)

    def authentication_key(self, kid: str) -> VerificationMethod | None:
        """The authentication key that `kid` denotes in any spelling found in practice (reference 8.6)."""
        return self._find(kid, self.authentication)

    def http_endpoints(self) -> tuple[ServiceEndpoint, ...]:
        """Endpoints that accept DIDComm v2 messages by POST; queues and DIDs are excluded (reference 3.4)."""
        return tuple(
            endpoint
            for endpoint in self.endpoints
            if endpoint.uri.lower().startswith(("http://", "https://"))
            and (not endpoint.accept or any(profile.startswith("didcomm/v2") for profile in endpoint.accept))
        )

    def _find(self, kid: str, methods: Iterable[VerificationMethod]) -> VerificationMethod | None:
        did, mark, fragment = kid.partition("#")
        if not mark or not fragment or (did != self.did and canonicalize_did(did) != canonicalize_did(self.did)):
            return None
        for method in methods:
            if method.id.partition("#")[2] == fragment:
                return method
        return _find_by_key_value(fragment, methods)


def _find_by_key_value(fragment: str, methods: Iterable[VerificationMethod]) -> VerificationMethod | None:
    """
    The method whose multibase key is the fragment: complete, without its `z`, or the first 8 characters after it.
    """
    beginnings = []
    for method in methods:
        multibase = method.key.multibase()
        if fragment in (multibase, multibase[1:]):
            return method
        if len(fragment) == _SHORT_KID_LENGTH and multibase[1:].startswith(fragment):
            beginnings.append(method)
    different = {method.key for method in beginnings}
    return beginnings[0] if len(different) == 1 else None


def strip_did_url(did_url: str) -> str:
    """Remove path, query and fragment of a DID URL."""
    if "#" not in did_url and "/" not in did_url and "?" not in did_url:
        return did_url
    return _URL_PART.split(did_url, maxsplit=1)[0]


def is_did(text: str) -> bool:
    """Whether a text is a DID by the W3C grammar, at most 8192 characters; `=` is accepted in a did:peer:2."""
    if len(text) > MAX_DID_LENGTH or text.endswith(":"):
        return False
    return _is_did_cached(text) if len(text) <= _MAX_CACHED_LENGTH else _is_did(text)


def _is_did(text: str) -> bool:
    return _DID.fullmatch(text) is not None or _PADDED_PEER_2.fullmatch(text) is not None


# Senders recur. The cache is bounded in number and size.
_is_did_cached = lru_cache(maxsize=1024)(_is_did)

MAX_KEYS = 64
MAX_SERVICES = 64
# Each routing key makes a message a third longer; each endpoint may be tried.
MAX_ROUTING_KEYS = 3
MAX_ENDPOINTS = 8

DIDCOMM_MESSAGING = "DIDCommMessaging"

AGREEMENT_CURVES: frozenset[Curve] = frozenset(("X25519", "P-256", "P-384", "P-521"))
SIGNATURE_CURVES: frozenset[Curve] = frozenset(("Ed25519", "P-256", "P-384", "P-521", "secp256k1"))

# Curve implied by a verification method type; None if the key material states it.
_CURVE_OF_TYPE: dict[str, Curve | None] = {
    "Multikey": None,
    "JsonWebKey2020": None,
    "JsonWebKey": None,
    "X25519KeyAgreementKey2019": "X25519",
    "X25519KeyAgreementKey2020": "X25519",
    "Ed25519VerificationKey2018": "Ed25519",
    "Ed25519VerificationKey2020": "Ed25519",
}


def parse_did_document(did: str, document: Mapping[str, Any]) -> DIDDocument:
    """
    Read a DID document; relative ids become absolute, unreadable members are dropped.

    A key is dropped if its type is not in reference 8.6, its curve does not fit the relationship (Ed25519 is not
    converted for key agreement), or its id belongs to another DID.

    :raise UnresolvableDID: more than 64 keys, references or services.
    """
    methods: dict[str, Mapping[str, Any]] = {}
    for method in _list_objects(document.get("verificationMethod"), MAX_KEYS):
        name = _make_absolute(did, method.get("id"))
        if name is not None:
            methods.setdefault(name, method)
    return DIDDocument(
        did,
        _parse_relationship(did, document.get("keyAgreement"), methods, AGREEMENT_CURVES),
        _parse_relationship(did, document.get("authentication"), methods, SIGNATURE_CURVES),
        parse_services(document.get("service")),
    )


def parse_services(services: object) -> tuple[ServiceEndpoint, ...]:
    """
    The endpoints of the DIDComm services in a list of services, at most eight of each. An endpoint is an object or,
    in old style, a string, whose `routingKeys` and `accept` are in the service itself.

    :raise UnresolvableDID: more than 64 services, or entries in `serviceEndpoint`.
    """
    found: list[ServiceEndpoint] = []
    for service in _list_objects(services, MAX_SERVICES):
        kind = service.get("type")
        if kind == DIDCOMM_MESSAGING or (isinstance(kind, list) and DIDCOMM_MESSAGING in kind):
            found += islice(_iterate_endpoints(service), MAX_ENDPOINTS)
    return tuple(found)


def _parse_relationship(
    did: str, listed: object, methods: Mapping[str, Mapping[str, Any]], curves: frozenset[Curve]
) -> tuple[VerificationMethod, ...]:
    """Keys of one verification relationship, referenced or embedded, each id once."""
    found: dict[str, VerificationMethod] = {}
    for entry in _check_list(listed, MAX_KEYS):
        embedded = entry if isinstance(entry, dict) else None
        name = _make_absolute(did, embedded.get("id") if embedded is not None else entry)
        if name is None or name in found:
            continue
        key = parse_method_key(embedded if embedded is not None else methods.get(name, {}))
        if key is not None and key.curve in curves:
            found[name] = VerificationMethod(name, key)
    return tuple(found.values())


def parse_method_key(method: Mapping[str, Any]) -> PublicKey | None:
    """The key of a verification method; None if it is unreadable or of an unknown type."""
    kind = method.get("type")
    if not isinstance(kind, str) or kind not in _CURVE_OF_TYPE:
        return None
    curve = _CURVE_OF_TYPE[kind]
    try:
        key = _parse_key_material(method, curve)
    except ValueError:
        return None
    return key if key is not None and curve in (None, key.curve) else None


def _parse_key_material(method: Mapping[str, Any], curve: Curve | None) -> PublicKey | None:
    multibase, jwk, bare = (method.get(f"publicKey{name}") for name in ("Multibase", "Jwk", "Base58"))
    if isinstance(multibase, str):
        return PublicKey.from_multibase(multibase)
    if isinstance(jwk, dict):
        return PublicKey.from_jwk(jwk)
    if isinstance(bare, str) and curve is not None:
        return PublicKey.from_base58(curve, bare)
    return None


def _iterate_endpoints(service: Mapping[str, Any]) -> Iterator[ServiceEndpoint]:
    place = service.get("serviceEndpoint")
    for entry in _check_list(place if isinstance(place, list) else [place], MAX_SERVICES):
        members = service if isinstance(entry, str) else entry if isinstance(entry, dict) else {}
        uri = entry if isinstance(entry, str) else members.get("uri")
        keys = _list_strings(members.get("routingKeys"))
        if isinstance(uri, str) and len(keys) <= MAX_ROUTING_KEYS:
            yield ServiceEndpoint(uri, _list_strings(members.get("accept")), keys)


def _make_absolute(did: str, name: object) -> str | None:
    """An absolute id in the document of `did`; None if it is no id, or belongs to another DID."""
    if not isinstance(name, str):
        return None
    if name.startswith("#"):
        return did + name
    return name if strip_did_url(name) == did and "#" in name else None


def _list_objects(value: object, limit: int) -> list[dict[str, Any]]:
    # Invalid entries keep their index, which is the basis of numbering.
    return [entry if isinstance(entry, dict) else {} for entry in _check_list(value, limit)]


def _list_strings(value: object) -> tuple[str, ...]:
    return tuple(entry for entry in value if isinstance(entry, str)) if isinstance(value, list) else ()


def _check_list(value: object, limit: int) -> list[Any]:
    if not isinstance(value, list):
        return []
    if len(value) > limit:
        raise UnresolvableDID
    return value
