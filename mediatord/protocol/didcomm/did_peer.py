"""
did:peer, whose document is its name: numalgo 0 is one key, 2 a list of keys and services, 4 a whole document behind
its hash (reference 8.2, 8.3 and 8.4). Numalgo 3 is only a shorter name for a numalgo 2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from mediatord.errors import SenderUnresolvable, SenderUnsupported
from mediatord.protocol import base58, jsontext
from mediatord.protocol.canonical_did import canonical_did
from mediatord.protocol.didcomm.did import DIDDocument, NeedsRecall, VerificationMethod
from mediatord.protocol.didcomm.did_document import (
    AGREEMENT_CURVES,
    DIDCOMM_MESSAGING,
    MAX_KEYS,
    MAX_SERVICES,
    SIGNATURE_CURVES,
    parse_document,
    parse_services,
)
from mediatord.protocol.didcomm.did_key import single_key_document
from mediatord.protocol.didcomm.keys import PublicKey

_PEER_0 = "did:peer:0"
_PEER_2 = "did:peer:2"
_PEER_3 = "did:peer:3"
_PEER_4 = "did:peer:4"

_SHORT_PEER_4 = re.compile(r"did:peer:4zQm[1-9A-HJ-NP-Za-km-z]{44}")
_SHA2_256 = b"\x12\x20"
_JSON = b"\x80\x04"

# assertionMethod, capabilityInvocation and capabilityDelegation keys are counted, but there is no use for them here.
_KEY_PURPOSES = frozenset("EVAID")
_FULL_NAMES = {"t": "type", "s": "serviceEndpoint", "r": "routingKeys", "a": "accept"}
_SHORT_NAMES = {full: short for short, full in _FULL_NAMES.items()}
_SHORT_DIDCOMM_MESSAGING = "dm"
# A list of services, a service, a list of endpoints, an endpoint: no name that is read lies deeper.
_SERVICE_DEPTH = 4


def make_did_peer_0(key: PublicKey) -> str:
    """The did:peer:0 of a key."""
    return _PEER_0 + key.multibase()


def make_did_peer_2(keys: Sequence[tuple[str, PublicKey]], services: Sequence[Mapping[str, Any]]) -> str:
    """
    The did:peer:2 with these keys, then these services, in this order; the keys are `#key-1`, `#key-2` and so on.

    :param keys: pairs of purpose (`E` key agreement, `V` authentication, or `A`, `I`, `D`) and key.
    :param services: with full member names, or abbreviated already; each becomes an element of its own.
    :raise ValueError: another purpose, or a service that JSON cannot express.
    """
    if any(purpose not in _KEY_PURPOSES for purpose, _ in keys):
        raise ValueError("no such purpose")
    elements = [f".{purpose}{key.multibase()}" for purpose, key in keys]
    elements += [f".S{jsontext.b64url_encode(jsontext.dumps(_abbreviated(service)))}" for service in services]
    return _PEER_2 + "".join(elements)


def did_peer_3_of(did: str) -> str:
    """
    The short name of a did:peer:2.

    :raise ValueError: it is no did:peer:2.
    """
    if not did.startswith(_PEER_2):
        raise ValueError("not a did:peer:2")
    return _PEER_3 + _hash(did.removeprefix(_PEER_2))


def make_did_peer_4(document: Mapping[str, Any]) -> tuple[str, str]:
    """
    The long and the short form of the did:peer:4 of a document.

    :param document: without `id`, all ids in it relative.
    """
    encoded = "z" + base58.encode(_JSON + jsontext.dumps(document))
    short = _PEER_4 + _hash(encoded)
    return f"{short}:{encoded}", short


def resolve_peer(did: str) -> DIDDocument:
    """
    The document of a did:peer of numalgo 0, 2 or 4.

    :raise NeedsRecall: the short form of a numalgo 4.
    :raise SenderUnresolvable: it is malformed.
    :raise SenderUnsupported: another numalgo.
    """
    if did.startswith(_PEER_0):
        return single_key_document(did, did.removeprefix(_PEER_0))
    if did.startswith(_PEER_2):
        return _resolve_2(did)
    if not did.startswith(_PEER_4):
        raise SenderUnsupported
    if _SHORT_PEER_4.fullmatch(did):
        raise NeedsRecall
    return _resolve_4(did, did, canonical_did(did))


def resolve_recalled(short: str, long: str) -> DIDDocument:
    """
    The document of the short form of a did:peer:4 whose long form was seen before.

    :raise SenderUnresolvable: the two do not belong together, or the long form is malformed.
    """
    if canonical_did(long) != short:
        raise SenderUnresolvable
    return _resolve_4(long, short, long)


def _resolve_2(did: str) -> DIDDocument:
    beginning, *elements = did.removeprefix(_PEER_2).split(".")
    keys = [element for element in elements if element[:1] in _KEY_PURPOSES]
    services = [element for element in elements if element[:1] == "S"]
    if beginning or not keys or len(keys) + len(services) != len(elements) or len(keys) > MAX_KEYS:
        raise SenderUnresolvable
    return DIDDocument(
        did,
        _keys_for(did, keys, "E", AGREEMENT_CURVES),
        _keys_for(did, keys, "V", SIGNATURE_CURVES),
        parse_services(did, _listed_services(services)),
        (did_peer_3_of(did),),
    )


def _keys_for(did: str, keys: list[str], purpose: str, curves: frozenset[Any]) -> tuple[VerificationMethod, ...]:
    """The keys of one purpose. One of an unknown kind is left out, but its number is not given to another."""
    found = []
    for number, element in enumerate(keys, 1):
        if element[0] != purpose:
            continue
        try:
            key = PublicKey.from_multibase(element[1:])
        except ValueError:
            continue
        if key.curve in curves:
            found.append(VerificationMethod(f"{did}#key-{number}", key))
    return tuple(found)


def _listed_services(elements: list[str]) -> list[Any]:
    """All services with full member names. An element holds one, or (seen in the wild) an array of any number."""
    if len(elements) > MAX_SERVICES:
        raise SenderUnresolvable
    found: list[Any] = []
    for element in elements:
        try:
            value = jsontext.loads(jsontext.b64url_decode(element[1:]))
        except ValueError:
            raise SenderUnresolvable from None
        found += value if isinstance(value, list) else [value]
    expanded: list[Any] = _expanded(found, _SERVICE_DEPTH)
    return expanded


def _expanded(value: Any, depth: int) -> Any:
    if depth == 0:
        return value
    if isinstance(value, list):
        return [_expanded(entry, depth - 1) for entry in value]
    if not isinstance(value, dict):
        return value
    expanded = {_FULL_NAMES.get(name, name): _expanded(member, depth - 1) for name, member in value.items()}
    if expanded.get("type") == _SHORT_DIDCOMM_MESSAGING:
        expanded["type"] = DIDCOMM_MESSAGING
    return expanded


def _abbreviated(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_abbreviated(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    short = {_SHORT_NAMES.get(name, name): _abbreviated(member) for name, member in value.items()}
    if short.get("t") == DIDCOMM_MESSAGING:
        short["t"] = _SHORT_DIDCOMM_MESSAGING
    return short


def _resolve_4(long: str, asked: str, other: str) -> DIDDocument:
    """:param asked: the form that the document is for; `other` is the other one."""
    hashed, _, encoded = long.removeprefix(_PEER_4).partition(":")
    if not encoded.startswith("z") or hashed != _hash(encoded):
        raise SenderUnresolvable
    try:
        data = base58.decode(encoded[1:])
        if not data.startswith(_JSON):
            raise SenderUnresolvable
        document = parse_document(asked, jsontext.loads_object(data.removeprefix(_JSON)))
    except ValueError:
        raise SenderUnresolvable from None
    return DIDDocument(asked, document.key_agreement, document.authentication, document.services, (other,))


def _hash(text: str) -> str:
    return "z" + base58.encode(_SHA2_256 + sha256(text.encode("ascii")).digest())
