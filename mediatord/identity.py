"""
Who the mediator is: its DIDs, their documents, and the private key behind every name of a key (reference section 9).

The did:peer:2 is the first identity: it holds keys and endpoints itself, and every wallet resolves it. The did:web
says the same and offers more curves. Former DIDs stay accepted for as long as the configuration lists them, since
wallets carry the mediator's DID inside their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from mediatord.errors import MediatorError
from mediatord.keyfile import KeySet
from mediatord.protocol.didcomm.did import DIDDocument, NeedsNetwork, NeedsRecall, VerificationMethod, canonical
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.protocol.didcomm.did_peer import make_did_peer_2
from mediatord.protocol.didcomm.keys import Curve, PrivateKey, PublicKey, ed25519_to_x25519_private

_ACCEPT = ["didcomm/v2"]
_AGREEMENT: tuple[Curve, ...] = ("X25519", "P-256", "P-384", "P-521")
_SIGNATURE: tuple[Curve, ...] = ("Ed25519", "P-256")
_CONTEXT = ["https://www.w3.org/ns/did/v1", "https://w3id.org/security/suites/jws-2020/v1"]
_SHORT_KID = 8


class IdentityError(Exception):
    """The DIDs and the keys do not fit together; the text is one line for the operator."""


class Identity:
    """
    The mediator's DIDs and keys.

    :param public_url: root of its public addresses, without a slash at its end.
    :param former_dids: earlier DIDs of this mediator.
    :raise IdentityError: a former DID has no key agreement key of `keys`.
    :ivar did: the did:peer:2.
    :ivar web_did: the did:web.
    :ivar web_document: its document, to be served as JSON.
    """

    def __init__(self, keys: KeySet, public_url: str, former_dids: Iterable[str] = ()) -> None:
        self._keys = keys
        self._secrets = _secrets(keys)
        self._by_kid: dict[str, PrivateKey] = {}
        self._own: set[str] = set()
        services = _services(public_url)
        self.did = make_did_peer_2(
            [("E", self._current("X25519")), ("V", self._current("Ed25519"))],
            [{"t": "dm", "s": {"uri": uri, "a": _ACCEPT}} for _, uri in services],
        )
        self.web_did = _web_did(public_url)
        self.web_document = _web_document(self.web_did, keys, self.did, services)
        self._add(resolve_local(self.did))
        self._add_web(self.web_did)
        for did in former_dids:
            self._add_former(did)

    def owns(self, did: str) -> bool:
        """Whether this is a DID of ours, in any of its forms."""
        return did in self._own or canonical(did) in self._own

    def key_for(self, kid: str) -> PrivateKey | None:
        """The key agreement key that a DID URL names, in any spelling of reference 8.6, of any DID of ours."""
        return self._by_kid.get(kid)

    def _current(self, curve: Curve) -> PublicKey:
        found = self._keys.first(curve)
        if found is None:
            raise IdentityError(f"the key set lacks an {curve} key")
        return found[1].public

    def _add_former(self, did: str) -> None:
        try:
            found = self._add(resolve_local(did))
        except NeedsNetwork:
            # The document was ours: its key ids are those of the key set.
            found = self._add_web(did)
        except NeedsRecall:
            raise IdentityError(f"former DID {did}: expected the long form of this did:peer:4") from None
        except MediatorError:
            raise IdentityError(f"former DID {_shown(did)} does not resolve") from None
        if not found:
            raise IdentityError(f"former DID {_shown(did)} has no key agreement key of the key set")

    def _add_web(self, did: str) -> bool:
        methods = [
            VerificationMethod(f"{did}#{kid}", key.public) for kid, key in self._keys if key.curve in _AGREEMENT
        ]
        return self._add(DIDDocument(did, tuple(methods), ()))

    def _add(self, document: DIDDocument) -> bool:
        """Know this DID by all its names; whether any of its keys is ours."""
        ours = [method for method in document.key_agreement if method.key in self._secrets]
        if not ours:
            return False
        for did in (document.did, *document.also_known_as):
            self._own.add(did)
            for fragment, key in _spellings(ours):
                self._by_kid.setdefault(f"{did}#{fragment}", self._secrets[key])
        return True


def _secrets(keys: KeySet) -> dict[PublicKey, PrivateKey]:
    """Every key by its public half, and the X25519 keys that a did:key derives from Ed25519 ones."""
    found = {}
    for _, key in keys:
        found[key.public] = key
        if key.curve == "Ed25519":
            derived = ed25519_to_x25519_private(key)
            found[derived.public] = derived
    return found


def _spellings(methods: list[VerificationMethod]) -> Iterator[tuple[str, PublicKey]]:
    """All fragments that name these keys, exact ones first; 8 characters only if they are not ambiguous."""
    for method in methods:
        yield method.id.partition("#")[2], method.key
    values = {method.key: method.key.multibase() for method in methods}
    for key, multibase in values.items():
        yield multibase, key
        yield multibase[1:], key
    beginnings = [multibase[1 : 1 + _SHORT_KID] for multibase in values.values()]
    for key, beginning in zip(values, beginnings, strict=True):
        if beginnings.count(beginning) == 1:
            yield beginning, key


def _services(public_url: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Fragment and URI of the two endpoints, HTTP first: some wallets look no further (reference section 9)."""
    web_socket = "ws" + public_url.removeprefix("http")
    return ("didcomm", f"{public_url}/didcomm"), ("didcomm-ws", f"{web_socket}/didcomm")


def _web_did(public_url: str) -> str:
    parts = urlsplit(public_url)
    segments = [quote(unquote(segment), safe="") for segment in parts.path.split("/") if segment]
    return ":".join(["did:web", quote(parts.netloc, safe=""), *segments])


def _web_document(did: str, keys: KeySet, peer_did: str, services: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """With absolute ids throughout; former keys of a curve are left out."""
    curves: tuple[Curve, ...] = (*_AGREEMENT, "Ed25519")
    current = [found for curve in curves if (found := keys.first(curve))]
    return {
        "@context": _CONTEXT,
        "id": did,
        "alsoKnownAs": [peer_did],
        "verificationMethod": [
            {
                "id": f"{did}#{kid}",
                "type": "JsonWebKey2020",
                "controller": did,
                "publicKeyJwk": key.public.jwk(),
            }
            for kid, key in current
        ],
        "authentication": [f"{did}#{kid}" for kid, key in current if key.curve in _SIGNATURE],
        "keyAgreement": [f"{did}#{kid}" for kid, key in current if key.curve in _AGREEMENT],
        "service": [
            {
                "id": f"{did}#{name}",
                "type": "DIDCommMessaging",
                "serviceEndpoint": {"uri": uri, "accept": _ACCEPT},
            }
            for name, uri in services
        ],
    }


def _shown(did: str) -> str:
    return did if len(did) <= 80 else f"{did[:60]}…"
