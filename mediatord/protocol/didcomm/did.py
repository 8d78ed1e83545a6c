"""
DIDs: their syntax, and the part of a DID document that a mediator reads (reference section 8).

A document is reduced to the keys usable for key agreement and for signatures, and to its DIDComm services. How one is
made from a DID is in the siblings of this module: `did_key`, `did_peer`, `did_web`, all reached by `did_methods`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from mediatord.protocol.canonical_did import canonical_did
from mediatord.protocol.didcomm.keys import PublicKey

MAX_DID_LENGTH = 8192

# Possessive, so that a long string that fails at its end costs one pass.
_DID = re.compile(r"did:[a-z0-9]+:(?:[A-Za-z0-9._:-]++|%[0-9A-Fa-f]{2})++")
# Old generators pad the base64url of their services (reference 8.3), which W3C's grammar does not allow.
_PADDED_PEER_2 = re.compile(r"did:peer:2[A-Za-z0-9._=-]++")
_URL_PART = re.compile(r"[/?#]")
_SHORT_KID = 8
_USUAL_LENGTH = 2048


class NeedsNetwork(LookupError):
    """A did:web: its document has to be fetched."""


class NeedsRecall(LookupError):
    """The short form of a did:peer:4: it resolves only through the long form, if that was ever seen."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """
    One place where a service takes messages.

    :param uri: http(s), ws(s), a DID, or `didcomm:transport/queue`; unchecked.
    :param accept: envelope profiles; empty when not given.
    :param routing_keys: key ids or DIDs to wrap for, as written; empty when not given.
    """

    uri: str
    accept: tuple[str, ...] = ()
    routing_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Service:
    """
    A service of type DIDCommMessaging; others are not kept.

    :param id: absolute DID URL.
    """

    id: str
    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True)
class VerificationMethod:
    """
    A key and its name.

    :param id: absolute DID URL, in the spelling of the current specification.
    """

    id: str
    key: PublicKey


@dataclass(frozen=True, slots=True)
class DIDDocument:
    """
    What a DID resolved to.

    :param did: the DID in the form that was asked for.
    :param key_agreement: keys to encrypt for; none of them an Ed25519 or secp256k1 key.
    :param authentication: keys that sign; none of them an X25519 key.
    :param also_known_as: other forms of this very DID that follow from its method. What a document merely claims
        about itself is not kept.
    """

    did: str
    key_agreement: tuple[VerificationMethod, ...]
    authentication: tuple[VerificationMethod, ...]
    services: tuple[Service, ...] = ()
    also_known_as: tuple[str, ...] = ()

    def key_agreement_key(self, kid: str) -> VerificationMethod | None:
        """The key agreement key that `kid` names in any of the spellings seen in practice (reference 8.6)."""
        return self._find(kid, self.key_agreement)

    def authentication_key(self, kid: str) -> VerificationMethod | None:
        """The authentication key that `kid` names in any of the spellings seen in practice (reference 8.6)."""
        return self._find(kid, self.authentication)

    def http_endpoints(self) -> tuple[Endpoint, ...]:
        """Endpoints that a DIDComm v2 message can be POSTed to; a queue or a DID is none (reference 3.4)."""
        return tuple(
            endpoint
            for service in self.services
            for endpoint in service.endpoints
            if endpoint.uri.lower().startswith(("http://", "https://"))
            and (not endpoint.accept or any(profile.startswith("didcomm/v2") for profile in endpoint.accept))
        )

    def _find(self, kid: str, methods: Iterable[VerificationMethod]) -> VerificationMethod | None:
        did, mark, fragment = kid.partition("#")
        if not mark or not fragment or (did != self.did and canonical_did(did) != canonical_did(self.did)):
            return None
        for method in methods:
            if method.id.partition("#")[2] == fragment:
                return method
        return _spelt_by_value(fragment, methods)


def _spelt_by_value(fragment: str, methods: Iterable[VerificationMethod]) -> VerificationMethod | None:
    """The method whose multibase key the fragment is: whole, without its `z`, or the 8 characters after it."""
    beginnings = []
    for method in methods:
        multibase = method.key.multibase()
        if fragment in (multibase, multibase[1:]):
            return method
        if len(fragment) == _SHORT_KID and multibase[1:].startswith(fragment):
            beginnings.append(method)
    different = {method.key for method in beginnings}
    return beginnings[0] if len(different) == 1 else None


def did_of(did_url: str) -> str:
    """The DID of a DID URL: path, query and fragment stripped."""
    if "#" not in did_url and "/" not in did_url and "?" not in did_url:
        return did_url
    return _URL_PART.split(did_url, maxsplit=1)[0]


def is_did(text: str) -> bool:
    """Whether this is a DID of any method, by W3C's grammar, at most 8192 characters; `=` passes in a did:peer:2."""
    if len(text) > MAX_DID_LENGTH or text.endswith(":"):
        return False
    return _is_usual(text) if len(text) <= _USUAL_LENGTH else _is_did(text)


def _is_did(text: str) -> bool:
    return _DID.fullmatch(text) is not None or _PADDED_PEER_2.fullmatch(text) is not None


# Who writes to us does so again and again. What is remembered is bounded in number and in size.
_is_usual = lru_cache(maxsize=1024)(_is_did)
