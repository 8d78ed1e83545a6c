"""
DID documents of DIDComm v1: what a mediator needs of a wallet's, and its own in each form that wallets read.

Keys are Ed25519 keys, for encryption as well: libraries convert them. Documents are those of did:peer:1, 2 and 4, and
the former ones of unqualified DIDs and did:sov, which are never resolved (Aries RFC 0067, 0793).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mediatord.errors import UnresolvableDID, UnsupportedDIDMethod
from mediatord.protocol.didcomm.did_document import MAX_KEYS, MAX_ROUTING_KEYS, MAX_SERVICES, is_did, parse_method_key
from mediatord.protocol.didcomm.did_methods import (
    DIDPeer4LongFormRequired,
    expand_did_peer,
    make_did_peer_2,
    make_did_peer_4,
)
from mediatord.protocol.didcomm.keys import PublicKey
from mediatord.protocol.didcomm_v1.keys import InvalidKey, SigningKey, encode_base58_key, encode_did_key, parse_key
from mediatord.protocol.encoding import dumps, encode_base58, encode_multihash

# Forms of DIDs that wallets have. `nym` is an unqualified DID, with or without `did:sov:`.
DIDForm = Literal["did:peer:1", "did:peer:2", "did:peer:4", "nym"]

_SOV = "did:sov:"
_NYM = re.compile(r"(?:did:sov:)?[1-9A-HJ-NP-Za-km-z]{20,24}")
_PEER_1 = re.compile(r"did:peer:1zQm[1-9A-HJ-NP-Za-km-z]{44}")
_NYM_BYTES = 16

DID_COMMUNICATION = "did-communication"
_INDY_AGENT = "IndyAgent"
_SERVICE_TYPES = (DID_COMMUNICATION, _INDY_AGENT)
_DEFAULT_PRIORITY = 0
# Absolute, printable, with a host.
_HTTP_URL = re.compile(r"(https?)(://(?![/?#:@])[!-~]{1,2040})", re.IGNORECASE)
_RELATIONSHIPS = ("authentication", "keyAgreement")
_METHODS = ("verificationMethod", "publicKey")


@dataclass(frozen=True, slots=True)
class WalletDocument:
    """
    What a mediator needs of the DID document of a wallet.

    :param keys: all Ed25519 keys by which the wallet may authenticate, those of the service first.
    :param endpoint: http(s) URL that messages are posted to, with a lower-case scheme; None if it has none.
    :param routing_keys: for which these are wrapped, the last one outermost; empty without an endpoint.
    """

    keys: tuple[str, ...]
    endpoint: str | None = field(default=None, repr=False)
    routing_keys: tuple[str, ...] = ()


def find_did_form(did: str) -> DIDForm:
    """
    The form of a wallet's DID.

    :raise UnresolvableDID: malformed.
    :raise UnsupportedDIDMethod: of another method, or another numalgo of did:peer.
    """
    if _NYM.fullmatch(did):
        return "nym"
    if _PEER_1.fullmatch(did):
        return "did:peer:1"
    if not is_did(did):
        raise UnresolvableDID
    if did.startswith("did:peer:2"):
        return "did:peer:2"
    if did.startswith("did:peer:4"):
        return "did:peer:4"
    raise UnsupportedDIDMethod


def parse_wallet_did(did: str) -> WalletDocument:
    """
    The document that a DID contains: did:peer:2, or did:peer:4 in long form.

    :raise UnresolvableDID: malformed, or the short form of a did:peer:4.
    :raise UnsupportedDIDMethod: any other DID.
    """
    if find_did_form(did) not in ("did:peer:2", "did:peer:4"):
        raise UnsupportedDIDMethod
    try:
        return parse_wallet_document(did, expand_did_peer(did))
    except DIDPeer4LongFormRequired:
        raise UnresolvableDID from None


def parse_wallet_document(did: str, document: Mapping[str, Any]) -> WalletDocument:
    """
    Read the document of a wallet's DID.

    :raise UnresolvableDID: the document of another DID, more keys or services than anyone has, no service with
        readable keys although there are some of DIDComm v1, or no key at all.
    """
    if not is_same_peer(document.get("id", did), did):
        raise UnresolvableDID
    methods = _collect_methods(document)
    references = _read_list(document.get("authentication"), MAX_KEYS)
    authentication = [key for one in references if (key := _resolve_method(one, methods)) is not None]
    services = list(_iterate_services(document.get("service"), methods))
    chosen = next((one for one in services if one.endpoint is not None), services[0] if services else None)
    if chosen is None:
        chosen = WalletDocument(())
    keys = tuple(dict.fromkeys((*chosen.keys, *authentication)))
    if not keys:
        raise UnresolvableDID
    return replace(chosen, keys=keys)


def is_same_peer(id_: object, did: str) -> bool:
    """Whether the id of a document is a DID, which may have got or lost the prefix `did:sov:`."""
    return isinstance(id_, str) and id_.removeprefix(_SOV) == did.removeprefix(_SOV)


def _collect_methods(document: Mapping[str, Any]) -> dict[str, str]:
    """Ed25519 keys by the fragment of their ids, referenced or embedded; the first of each id counts."""
    found: dict[str, str] = {}
    for name in (*_METHODS, *_RELATIONSHIPS):
        for entry in _read_list(document.get(name), MAX_KEYS):
            if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
                continue
            key = parse_method_key(entry)
            if key is not None and key.curve == "Ed25519":
                found.setdefault(_get_fragment(entry["id"]), encode_did_key(key.raw))
    return found


def _resolve_method(entry: object, methods: Mapping[str, str]) -> str | None:
    """The key of an entry in `authentication`: a reference, an embedded key, or a reference of former documents."""
    if isinstance(entry, dict):
        entry = entry.get("publicKey", entry.get("id"))
    return methods.get(_get_fragment(entry)) if isinstance(entry, str) else None


def _get_fragment(name: str) -> str:
    return name.rpartition("#")[2]


def _iterate_services(value: object, methods: Mapping[str, str]) -> Iterator[WalletDocument]:
    """
    Services of DIDComm v1 with a recipient key, in order of their priority; their keys are those of recipients.

    :raise UnresolvableDID: those that there are have keys that cannot be read.
    """
    services = [one for one in _read_list(value, MAX_SERVICES) if isinstance(one, dict)]
    usable = [one for one in services if one.get("type") in _SERVICE_TYPES]
    found = unreadable = 0
    for service in sorted(usable, key=_get_priority):
        endpoint = _read_http_url(service.get("serviceEndpoint"))
        try:
            recipients = _read_keys(service.get("recipientKeys"), MAX_KEYS, methods)
            # Without an endpoint, nothing is ever wrapped.
            routing = () if endpoint is None else _read_keys(service.get("routingKeys"), MAX_ROUTING_KEYS, {})
        except InvalidKey:
            unreadable += 1
            continue
        if recipients:
            found += 1
            yield WalletDocument(recipients, endpoint, routing)
    if unreadable and not found:
        raise UnresolvableDID


def _read_http_url(value: object) -> str | None:
    match = _HTTP_URL.fullmatch(value) if isinstance(value, str) else None
    return None if match is None else match[1].lower() + match[2]


def _get_priority(service: Mapping[str, Any]) -> float:
    priority = service.get("priority")
    return priority if isinstance(priority, int | float) else _DEFAULT_PRIORITY


def _read_keys(value: object, limit: int, methods: Mapping[str, str]) -> tuple[str, ...]:
    """
    Keys in any spelling, or references to `methods`.

    :raise InvalidKey: neither.
    """
    found = []
    for entry in _read_list(value, limit):
        key = methods.get(_get_fragment(entry)) if isinstance(entry, str) and "#" in entry else None
        found.append(key or parse_key(entry))
    return tuple(dict.fromkeys(found))


def _read_list(value: object, limit: int) -> list[Any]:
    if not isinstance(value, list):
        return []
    if len(value) > limit:
        raise UnresolvableDID
    return value


@dataclass(frozen=True, slots=True)
class OwnDocument:
    """
    The mediator's DID for one connection, with the document where a peer cannot derive that from the DID.

    :param document: None for a did:peer:2 and 4.
    """

    did: str
    document: dict[str, Any] | None = None


def make_own_document(form: DIDForm, key: SigningKey, endpoints: Sequence[str]) -> OwnDocument:
    """
    The DID and document of one of the mediator's keys.

    :param endpoints: URLs, the one that is preferred first.
    """
    match form:
        case "did:peer:2":
            return OwnDocument(_make_peer_2(key, endpoints))
        case "did:peer:4":
            return OwnDocument(make_did_peer_4(_make_peer_document(key, endpoints)))
        case "did:peer:1":
            document = _make_peer_document(key, endpoints, controller="#id")
            did = f"did:peer:1{encode_multihash(dumps(document))}"
            return OwnDocument(did, {"id": did, **document})
        case "nym":
            return _make_nym_document(key, endpoints)


def _make_peer_2(key: SigningKey, endpoints: Sequence[str]) -> str:
    services = [
        {"t": DID_COMMUNICATION, "priority": priority, "recipientKeys": ["#key-1"], "r": [], "s": endpoint}
        for priority, endpoint in enumerate(endpoints)
    ]
    signing, agreement = PublicKey("Ed25519", key.verkey), PublicKey("X25519", key.agreement_public)
    return make_did_peer_2([("V", signing), ("E", agreement)], services)


def _make_peer_document(key: SigningKey, endpoints: Sequence[str], **controller: str) -> dict[str, Any]:
    """The document without an id. The keys are numbered as those of a did:peer:2 are."""
    signing = {"id": "#key-1", "type": "Ed25519VerificationKey2018", **controller}
    agreement = {"id": "#key-2", "type": "X25519KeyAgreementKey2019", **controller}
    return {
        "@context": ["https://w3id.org/did/v1"],
        "authentication": [{**signing, "publicKeyBase58": encode_base58(key.verkey)}],
        "keyAgreement": [{**agreement, "publicKeyBase58": encode_base58(key.agreement_public)}],
        "service": [
            {
                "id": f"#inline-{priority}",
                "type": DID_COMMUNICATION,
                "priority": priority,
                "recipientKeys": ["#key-1"],
                "routingKeys": [],
                "serviceEndpoint": endpoint,
            }
            for priority, endpoint in enumerate(endpoints)
        ],
    }


def _make_nym_document(key: SigningKey, endpoints: Sequence[str]) -> OwnDocument:
    """An unqualified DID; in its document it is qualified, as ACA-Py expects."""
    nym = encode_base58(key.verkey[:_NYM_BYTES])
    did, verkey = _SOV + nym, encode_base58_key(key.did_key)
    method = {
        "id": f"{did}#1",
        "type": "Ed25519VerificationKey2018",
        "controller": did,
        "publicKeyBase58": verkey,
    }
    document = {
        "@context": "https://w3id.org/did/v1",
        "id": did,
        "publicKey": [method],
        "authentication": [{"type": "Ed25519SignatureAuthentication2018", "publicKey": method["id"]}],
        "service": [
            {
                "id": f"{did};indy" if not priority else f"{did};indy-{priority}",
                "type": _INDY_AGENT,
                "priority": priority,
                "recipientKeys": [verkey],
                "routingKeys": [],
                "serviceEndpoint": endpoint,
            }
            for priority, endpoint in enumerate(endpoints)
        ],
    }
    return OwnDocument(nym, document)
