"""
DID methods: did:key, did:peer (0, 2, 3, 4) and the location of did:web documents (reference 8.1 to 8.5).

Pure functions; :mod:`mediatord.net.did_resolver` fetches documents and remembers long forms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from mediatord.errors import UnresolvableDID, UnsupportedDIDMethod
from mediatord.protocol import encoding
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.didcomm.did_document import (
    AGREEMENT_CURVES,
    DIDCOMM_MESSAGING,
    MAX_KEYS,
    MAX_SERVICES,
    SIGNATURE_CURVES,
    DIDDocument,
    VerificationMethod,
    is_did,
    parse_did_document,
)
from mediatord.protocol.didcomm.keys import PublicKey, convert_ed25519_to_x25519


class DIDWebLookupRequired(LookupError):
    """The document of a did:web has to be fetched."""


class DIDPeer4LongFormRequired(LookupError):
    """A did:peer:4 in short form resolves only if its long form was seen before."""


def make_single_key_document(did: str, multibase: str) -> DIDDocument:
    """
    The document of a DID that consists of one multibase key.

    An Ed25519 key also yields an X25519 key for key agreement; a NIST curve serves both purposes; X25519 serves key
    agreement only, secp256k1 signatures only.

    :raise UnresolvableDID: no key of a supported type.
    """
    try:
        key = PublicKey.from_multibase(multibase)
        agreement = convert_ed25519_to_x25519(key) if key.curve == "Ed25519" else key
    except ValueError:
        raise UnresolvableDID from None
    methods = [VerificationMethod(f"{did}#{one.multibase()}", one) for one in (agreement, key)]
    return DIDDocument(
        did,
        tuple(methods[:1]) if agreement.curve in AGREEMENT_CURVES else (),
        tuple(methods[1:]) if key.curve in SIGNATURE_CURVES else (),
    )


_PEER_0 = "did:peer:0"
_PEER_2 = "did:peer:2"
_PEER_3 = "did:peer:3"
_PEER_4 = "did:peer:4"

_SHORT_PEER_4 = re.compile(r"did:peer:4zQm[1-9A-HJ-NP-Za-km-z]{44}")
_JSON_MULTICODEC = b"\x80\x04"

# Keys for assertionMethod, capabilityInvocation and capabilityDelegation count in the numbering, but are unused.
_KEY_PURPOSES = frozenset("EVAID")
_FULL_NAMES = {"t": "type", "s": "serviceEndpoint", "r": "routingKeys", "a": "accept"}
_SHORT_DIDCOMM_MESSAGING = "dm"
# Levels: list of services, service, list of endpoints, endpoint.
_SERVICE_DEPTH = 4


def make_did_peer_2(keys: Sequence[tuple[str, PublicKey]], services: Sequence[Mapping[str, Any]]) -> str:
    """
    The did:peer:2 with these keys, followed by these services; the keys become `#key-1`, `#key-2` and so on.

    :param keys: pairs of purpose (`E` key agreement, `V` authentication, or `A`, `I`, `D`) and key.
    :param services: with abbreviated member names; one element each.
    :raise ValueError: another purpose, or a service that is not serialisable.
    """
    if any(purpose not in _KEY_PURPOSES for purpose, _ in keys):
        raise ValueError("no such purpose")
    elements = [f".{purpose}{key.multibase()}" for purpose, key in keys]
    elements += [f".S{encoding.encode_base64url(encoding.dumps(service))}" for service in services]
    return _PEER_2 + "".join(elements)


def make_did_peer_4(document: Mapping[str, Any]) -> str:
    """
    The long form of the did:peer:4 of a document.

    :param document: with relative ids, and without an id of its own.
    """
    encoded = "z" + encoding.encode_base58(_JSON_MULTICODEC + encoding.dumps(dict(document)))
    return f"{_PEER_4}{encoding.encode_multihash(encoded.encode('ascii'))}:{encoded}"


def derive_did_peer_3(did: str) -> str:
    """
    The did:peer:3 of a did:peer:2.

    :raise ValueError: not a did:peer:2.
    """
    if not did.startswith(_PEER_2):
        raise ValueError("not a did:peer:2")
    return _PEER_3 + encoding.encode_multihash(did.removeprefix(_PEER_2).encode("ascii"))


def resolve_did_peer(did: str) -> DIDDocument:
    """
    The document of a did:peer of numalgo 0, 2 or 4.

    :raise DIDPeer4LongFormRequired: the short form of a numalgo 4.
    :raise UnresolvableDID: malformed.
    :raise UnsupportedDIDMethod: another numalgo.
    """
    if did.startswith(_PEER_0):
        return make_single_key_document(did, did.removeprefix(_PEER_0))
    document = parse_did_document(did, expand_did_peer(did))
    other = derive_did_peer_3(did) if did.startswith(_PEER_2) else canonicalize_did(did)
    return replace(document, also_known_as=(other,))


def resolve_short_did_peer_4(short: str, long: str) -> DIDDocument:
    """
    The document of a short did:peer:4, given its long form.

    :raise UnresolvableDID: the forms do not match, or the long form is malformed.
    """
    if canonicalize_did(long) != short:
        raise UnresolvableDID
    return replace(parse_did_document(short, _expand_peer_4(long)), also_known_as=(long,))


def expand_did_peer(did: str) -> dict[str, Any]:
    """
    The document that a did:peer:2, or a did:peer:4 in long form, contains, as JSON; nothing in it is validated.

    :raise DIDPeer4LongFormRequired: the short form of a did:peer:4.
    :raise UnresolvableDID: malformed.
    :raise UnsupportedDIDMethod: another numalgo.
    """
    if did.startswith(_PEER_2):
        return _expand_peer_2(did)
    if not did.startswith(_PEER_4):
        raise UnsupportedDIDMethod
    if _SHORT_PEER_4.fullmatch(did):
        raise DIDPeer4LongFormRequired
    return _expand_peer_4(did)


def _expand_peer_2(did: str) -> dict[str, Any]:
    """Keys of other purposes than encryption and authentication are dropped, but keep their number."""
    beginning, *elements = did.removeprefix(_PEER_2).split(".")
    keys = [element for element in elements if element[:1] in _KEY_PURPOSES]
    services = [element for element in elements if element[:1] == "S"]
    if beginning or not keys or len(keys) + len(services) != len(elements) or len(keys) > MAX_KEYS:
        raise UnresolvableDID
    methods = [
        (key[0], {"id": f"#key-{number}", "type": "Multikey", "publicKeyMultibase": key[1:]})
        for number, key in enumerate(keys, 1)
    ]
    return {
        "keyAgreement": [method for purpose, method in methods if purpose == "E"],
        "authentication": [method for purpose, method in methods if purpose == "V"],
        "service": _parse_peer_2_services(services),
    }


def _parse_peer_2_services(elements: list[str]) -> list[Any]:
    """All services with full member names. An element holds one service or, in practice, an array of them."""
    if len(elements) > MAX_SERVICES:
        raise UnresolvableDID
    found: list[Any] = []
    for element in elements:
        try:
            value = encoding.loads(encoding.decode_base64url(element[1:]))
        except ValueError:
            raise UnresolvableDID from None
        found += value if isinstance(value, list) else [value]
    expanded: list[Any] = _expand_names(found, _SERVICE_DEPTH)
    return expanded


def _expand_names(value: Any, depth: int) -> Any:
    if depth == 0:
        return value
    if isinstance(value, list):
        return [_expand_names(entry, depth - 1) for entry in value]
    if not isinstance(value, dict):
        return value
    expanded = {_FULL_NAMES.get(name, name): _expand_names(member, depth - 1) for name, member in value.items()}
    if expanded.get("type") == _SHORT_DIDCOMM_MESSAGING:
        expanded["type"] = DIDCOMM_MESSAGING
    return expanded


def _expand_peer_4(long: str) -> dict[str, Any]:
    hashed, _, encoded = long.removeprefix(_PEER_4).partition(":")
    if not encoded.startswith("z") or hashed != encoding.encode_multihash(encoded.encode("ascii")):
        raise UnresolvableDID
    try:
        data = encoding.decode_base58(encoded[1:])
        if not data.startswith(_JSON_MULTICODEC):
            raise UnresolvableDID
        return encoding.loads_object(data.removeprefix(_JSON_MULTICODEC))
    except ValueError:
        raise UnresolvableDID from None


_WEB_PREFIX = "did:web:"
_HOST_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"{_HOST_LABEL}(?:\.{_HOST_LABEL})*")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_MAX_HOST = 253
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class DIDWebLocation:
    """
    Location of the document of a did:web.

    :param host: a name, or an IPv4 address in any notation; never IPv6.
    :param url: https.
    """

    host: str
    url: str


def locate_did_web(did: str) -> DIDWebLocation:
    """
    Location of a did:web document: the identifier is split at colons and each part decoded once; an empty path means
    `.well-known`.

    :param did: a syntactically valid did:web.
    :raise UnresolvableDID: an invalid host or port, or a path that leaves its directory.
    """
    authority, *path = [_percent_decode(part) for part in did.removeprefix(_WEB_PREFIX).split(":")]
    host, colon, port = authority.partition(":")
    if len(host) > _MAX_HOST or not _HOST.fullmatch(host):
        raise UnresolvableDID
    if colon and (not _PORT.fullmatch(port) or int(port) > _MAX_PORT):
        raise UnresolvableDID
    if any(segment in ("", ".", "..") for segment in path):
        raise UnresolvableDID
    # Encoded again, so that an encoded slash does not create another segment.
    segments = "/".join(quote(segment, safe="") for segment in path) or ".well-known"
    return DIDWebLocation(host, f"https://{authority}/{segments}/did.json")


def parse_did_web_document(did: str, raw: bytes) -> DIDDocument:
    """
    The document of a did:web from the response body.

    :raise UnresolvableDID: not a JSON object, or the document of another DID.
    """
    try:
        document = encoding.loads_object(raw)
    except ValueError:
        raise UnresolvableDID from None
    if document.get("id") != did:
        raise UnresolvableDID
    return parse_did_document(did, document)


def _percent_decode(part: str) -> str:
    try:
        return unquote_to_bytes(part).decode("utf-8")
    except UnicodeDecodeError:
        raise UnresolvableDID from None


def resolve_local(did: str) -> DIDDocument:
    """
    Resolve a DID without network or store: did:key and did:peer of numalgo 0, 2 or 4.

    :raise DIDWebLookupRequired: a did:web.
    :raise DIDPeer4LongFormRequired: the short form of a did:peer:4.
    :raise UnresolvableDID: malformed.
    :raise UnsupportedDIDMethod: another method, or another numalgo of did:peer.
    """
    if not is_did(did):
        raise UnresolvableDID
    match did.split(":", 2)[1]:
        case "key":
            return make_single_key_document(did, did.removeprefix("did:key:"))
        case "peer":
            return resolve_did_peer(did)
        case "web":
            raise DIDWebLookupRequired
        case _:
            raise UnsupportedDIDMethod
