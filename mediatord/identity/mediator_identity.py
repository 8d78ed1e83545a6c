"""
The mediator's DIDs, their documents, and the private key of every key id (reference section 9).

The did:peer:2 is the primary DIDComm identity: it contains keys and endpoints and resolves everywhere. The did:web
offers more curves and is the identity for Decentrl. Wallets embed the mediator's DID, so former DIDs stay accepted:
those of former keys while they are in the key file, those of other public URLs while they are configured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from mediatord.errors import MediatorError, OperatorError
from mediatord.identity.key_file import KeyGeneration, KeySet, NamedKey
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.decentrl.did_decentrl import encode_multibase_key
from mediatord.protocol.didcomm.did_document import DIDDocument, VerificationMethod
from mediatord.protocol.didcomm.did_methods import (
    DIDPeer4LongFormRequired,
    DIDWebLookupRequired,
    derive_did_peer_3,
    make_did_peer_2,
    resolve_local,
)
from mediatord.protocol.didcomm.keys import Curve, PrivateKey, PublicKey, convert_ed25519_to_x25519_private

_ACCEPTED_PROFILES = ["didcomm/v2"]
_NIST_CURVES: tuple[Curve, ...] = ("P-256", "P-384", "P-521")
_AGREEMENT_CURVES: tuple[Curve, ...] = ("X25519", *_NIST_CURVES)
# Decentrl's ids of the current X25519 and Ed25519 key, whatever their kid in the key file (DCTRL-0004 3.2).
_PREKEY_NAME, _SIGNING_NAME = "prekey", "signing"
_SHORT_KID_LENGTH = 8


class IdentityError(OperatorError):
    """DIDs and keys do not match; the message is one line for the operator."""


class MediatorIdentity:
    """
    The mediator's DIDs and keys.

    :param public_url: root of all public addresses, without trailing slash.
    :param former_dids: earlier DIDs of this mediator.
    :param raw_keys: omit multicodec prefixes in the did:web document, as some Decentrl clients expect.
    :raise IdentityError: a former DID has no key agreement key in `keys`.
    :ivar did: did:peer:2 of the current keys.
    :ivar former_peer_dids: those of former keys, latest first.
    :ivar prepared_dids: those of prepared keys: accepted, but not published.
    :ivar web_did: the did:web.
    :ivar web_document: its document, as JSON.
    :ivar decentrl_dids: the did:web and former ones.
    :ivar agreement_keys: key agreement keys that a DID URL may denote, the likeliest first, in any spelling of
        reference 8.6. After a rotation, a did:web key id denotes several keys.
    """

    def __init__(
        self, keys: KeySet, public_url: str, former_dids: Iterable[str] = (), *, raw_keys: bool = False
    ) -> None:
        self._keys = keys
        self._raw_keys = raw_keys
        self._secrets = _index_private_keys(keys)
        self.agreement_keys: dict[str, tuple[PrivateKey, ...]] = {}
        self._signing_key_by_did: dict[str, NamedKey] = {}
        self.own_dids: set[str] = set()
        self.did, *former = _make_peer_dids(keys.generations, public_url)
        self.former_peer_dids = tuple(former)
        self.prepared_dids = tuple(_make_peer_dids(keys.prepared_generations, public_url))
        self.web_did = _make_web_did(public_url)
        self.web_document = self._document(public_url)
        for did in (self.did, *former, *self.prepared_dids):
            self._add(resolve_local(did))
        self._add_web(self.web_did)
        root = keys.root
        self._root_did = make_mediator_peer_did(root.agreement, root.signing, public_url)
        self.former_dids = tuple(former_dids)
        webs = [did for did in self.former_dids if self._add_former(did)]
        self.decentrl_dids = frozenset((self.web_did, *webs))

    @property
    def fingerprint(self) -> bytes:
        """Identifies the mediator across key rotation: a hash of its oldest keys and its public URL."""
        return sha256(f"{self._root_did} {self.web_did}".encode()).digest()

    @property
    def root_secret(self) -> bytes:
        """32 secret bytes that stay the same across rotation and retirement of keys."""
        return self._keys.root_secret

    @property
    def signing_key(self) -> bytes:
        """Current public Ed25519 key."""
        return self._current("Ed25519").public.raw

    @property
    def former_signing_keys(self) -> tuple[bytes, ...]:
        """Former public Ed25519 keys, latest first, to verify existing signatures."""
        current = self.signing_key
        return tuple(
            key.public.raw for _, key in self._keys.keys if key.curve == "Ed25519" and key.public.raw != current
        )

    @property
    def signing_seed(self) -> bytes:
        """Seed of the current Ed25519 key: a secret."""
        return self._current("Ed25519").secret

    @property
    def prekey_public(self) -> bytes:
        """Current public X25519 key."""
        return self._current("X25519").public.raw

    @property
    def prekeys_private(self) -> tuple[bytes, ...]:
        """All X25519 keys, the current one first; requests may be encrypted to former ones. Secrets."""
        return tuple(key.secret for _, key in self._keys if key.curve == "X25519")

    @property
    def sealing_secrets(self) -> tuple[bytes, ...]:
        """What the store's secrets are encrypted with: current key first, and last what changes least. Secrets."""
        return (*self.prekeys_private, self.root_secret)

    def owns(self, did: str) -> bool:
        """Whether a DID is one of the mediator's, in any form."""
        return did in self.own_dids or canonicalize_did(did) in self.own_dids

    def routing_did(self, addressed: str) -> str:
        """
        Routing DID to grant to a client that addressed one of the mediator's DIDs: the did:web and prepared DIDs as
        they are, else the current DID.
        """
        known = {form: did for did in self.prepared_dids for form in (did, derive_did_peer_3(did))}
        return self.web_did if addressed == self.web_did else known.get(addressed, self.did)

    def find_agreement_key(self, kid: str) -> PrivateKey | None:
        """The likeliest key agreement key that a DID URL denotes."""
        return next(iter(self.agreement_keys.get(kid, ())), None)

    def find_signing_key(self, kid: str) -> NamedKey | None:
        """
        The Ed25519 key that authenticates the DID of a key agreement key, with its absolute id; None if that DID has
        none. The id of a did:peer is spelled like `kid` (reference 8.6); other DIDs have one spelling.
        """
        did, _, fragment = kid.partition("#")
        agreement, found = self.find_agreement_key(kid), self._signing_key_by_did.get(did)
        if agreement is None or found is None:
            return None
        name, key = found
        spelled, addressed = key.public.multibase(), agreement.public.multibase()
        for part in (slice(None), slice(1, None), slice(1, 1 + _SHORT_KID_LENGTH)):
            if fragment == addressed[part] and did.startswith("did:peer:"):
                name = spelled[part]
        return f"{did}#{name}", key

    @property
    def keys(self) -> KeySet:
        """All keys: secrets."""
        return self._keys

    def is_successor_of(self, before: MediatorIdentity) -> bool:
        """Whether this can be a later state of another identity: they share keys."""
        return self.fingerprint == before.fingerprint or any(key in before.keys for key in self._keys)

    def find_missing_dids(self, before: MediatorIdentity) -> list[str]:
        """DIDs that an earlier identity accepted and this one does not."""
        names = (before.did, *before.former_peer_dids, *before.prepared_dids, *before.former_dids)
        return [did for did in names if not self.owns(did)]

    def _current(self, curve: Curve) -> PrivateKey:
        found = self._keys.current_key(curve)
        if found is None:
            raise IdentityError(f"the key set has no {curve} key")
        return found[1]

    def _document(self, public_url: str) -> dict[str, Any]:
        """
        The document of DCTRL-0004 3.2, followed by what DIDComm needs.

        Former signing keys are listed without a relationship, to verify existing signatures. Former key agreement
        keys are omitted, so that senders stop using them.
        """
        did = self.web_did
        document = make_mediator_document(did, self.signing_key, self.prekey_public, public_url, raw=self._raw_keys)
        former = [found for found in self._keys.keys if found[1].curve == "Ed25519"][1:]
        document["verificationMethod"] += [self._signing_method(kid, key.public) for kid, key in former]
        others = [found for curve in _NIST_CURVES if (found := self._keys.current_key(curve))]
        document["keyAgreement"] += [_make_json_web_key(did, kid, key.public) for kid, key in others]
        document["service"] += [
            {
                "id": f"{did}#{name}",
                "type": "DIDCommMessaging",
                "serviceEndpoint": {"uri": uri, "accept": _ACCEPTED_PROFILES},
            }
            for name, uri in list_services(public_url)
        ]
        return {**document, "alsoKnownAs": [self.did, *self.former_peer_dids]}

    def _signing_method(self, kid: str, key: PublicKey) -> dict[str, str]:
        return {
            "id": _make_method_id(self.web_did, kid, key),
            "type": "Ed25519VerificationKey2020",
            "controller": self.web_did,
            "publicKeyMultibase": encode_multibase_key(key.raw, "Ed25519", self._raw_keys),
        }

    def _add_former(self, did: str) -> bool:
        """Accept a former DID; returns whether it is a did:web."""
        web = False
        try:
            found = self._add(resolve_local(did))
        except DIDWebLookupRequired:
            # Its document was the mediator's own, so its key ids are those of the key set.
            web = found = self._add_web(did)
        except DIDPeer4LongFormRequired:
            raise IdentityError(f"former DID {did}: expected the long form of this did:peer:4") from None
        except MediatorError:
            raise IdentityError(f"former DID {abbreviate_did(did)} does not resolve") from None
        if not found:
            raise IdentityError(f"former DID {abbreviate_did(did)} shares no key agreement key with the key set")
        return web

    def _add_web(self, did: str) -> bool:
        """
        Register a did:web under the key ids of its documents, past and present, and under those of the key file.
        """
        prekeys = [(_PREKEY_NAME, key) for _, key in self._keys if key.curve == "X25519"]
        named = [*prekeys, *(one for one in self._keys if one[1].curve in _AGREEMENT_CURVES)]
        methods = [VerificationMethod(f"{did}#{name}", key.public) for name, key in named]
        signing = VerificationMethod(f"{did}#{_SIGNING_NAME}", self._current("Ed25519").public)
        return self._add(DIDDocument(did, tuple(methods), (signing,)))

    def _add(self, document: DIDDocument) -> bool:
        """Register a DID with all its key ids; returns whether any key is the mediator's."""
        ours = [method for method in document.key_agreement if method.key in self._secrets]
        if not ours:
            return False
        signing = [
            method
            for method in document.authentication
            if method.key.curve == "Ed25519" and method.key in self._secrets
        ]
        for did in (document.did, *document.also_known_as):
            self.own_dids |= {did, canonicalize_did(did)}
            for method in signing[:1]:
                self._signing_key_by_did[did] = method.id.partition("#")[2], self._secrets[method.key]
            for fragment, key in _list_spellings(ours):
                kid, secret = f"{did}#{fragment}", self._secrets[key]
                there = self.agreement_keys.get(kid, ())
                if secret not in there:
                    self.agreement_keys[kid] = (*there, secret)
        return True


def _index_private_keys(keys: KeySet) -> dict[PublicKey, PrivateKey]:
    """Private keys by public key, including X25519 keys derived from Ed25519 keys as did:key does."""
    found = {}
    for _, key in keys:
        found[key.public] = key
        if key.curve == "Ed25519":
            derived = convert_ed25519_to_x25519_private(key)
            found[derived.public] = derived
    return found


def _list_spellings(methods: list[VerificationMethod]) -> Iterator[tuple[str, PublicKey]]:
    """All fragments that denote these keys, exact ones first; 8-character prefixes only if unambiguous."""
    for method in methods:
        yield method.id.partition("#")[2], method.key
    values = {method.key: method.key.multibase() for method in methods}
    for key, multibase in values.items():
        yield multibase, key
        yield multibase[1:], key
    beginnings = [multibase[1 : 1 + _SHORT_KID_LENGTH] for multibase in values.values()]
    for key, beginning in zip(values, beginnings, strict=True):
        if beginnings.count(beginning) == 1:
            yield beginning, key


def list_services(public_url: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Fragment and URI of both endpoints, HTTP first: some wallets read only one (reference section 9)."""
    web_socket = "ws" + public_url.removeprefix("http")
    return ("didcomm", f"{public_url}/didcomm"), ("didcomm-ws", f"{web_socket}/didcomm")


def _make_web_did(public_url: str) -> str:
    parts = urlsplit(public_url)
    segments = [quote(unquote(segment), safe="") for segment in parts.path.split("/") if segment]
    return ":".join(["did:web", quote(parts.netloc, safe=""), *segments])


def _make_json_web_key(did: str, kid: str, key: PublicKey) -> dict[str, Any]:
    """A key under its id in the key file, unless Decentrl assigns that id to another key."""
    return {
        "id": _make_method_id(did, kid, key),
        "type": "JsonWebKey2020",
        "controller": did,
        "publicKeyJwk": key.jwk(),
    }


def _make_method_id(did: str, kid: str, key: PublicKey) -> str:
    return f"{did}#{kid if kid not in (_PREKEY_NAME, _SIGNING_NAME) else key.multibase()}"


def _make_peer_dids(generations: Iterable[KeyGeneration], public_url: str) -> list[str]:
    pairs = [(one.key("X25519"), one.key("Ed25519")) for one in generations]
    return [make_mediator_peer_did(one.public, other.public, public_url) for one, other in pairs if one and other]


def make_mediator_peer_did(agreement: PublicKey, signing: PublicKey, public_url: str) -> str:
    """The did:peer:2 of an X25519 and an Ed25519 key at a public URL."""
    services = [{"t": "dm", "s": {"uri": uri, "a": _ACCEPTED_PROFILES}} for _, uri in list_services(public_url)]
    return make_did_peer_2([("E", agreement), ("V", signing)], services)


def abbreviate_did(did: str) -> str:
    """The beginning of a DID, for humans."""
    return did if len(did) <= 80 else f"{did[:60]}…"


_DECENTRL_CONTEXT = ["https://www.w3.org/ns/did/v1", "https://w3id.org/security/suites/jws-2020/v1"]


def make_mediator_document(
    did: str, signing_key: bytes, prekey: bytes, endpoint: str, *, raw: bool = False
) -> dict[str, Any]:
    """
    DID document of a mediator (DCTRL-0004 3.2).

    :param signing_key: public Ed25519 key.
    :param prekey: public X25519 key.
    :param endpoint: URL for commands.
    :param raw: as for :func:`encode_multibase_key`.
    :raise ValueError: invalid keys.
    """
    return {
        "@context": list(_DECENTRL_CONTEXT),
        "id": did,
        "controller": did,
        "verificationMethod": [
            {
                "id": f"{did}#signing",
                "type": "Ed25519VerificationKey2020",
                "controller": did,
                "publicKeyMultibase": encode_multibase_key(signing_key, "Ed25519", raw),
            }
        ],
        "keyAgreement": [
            {
                "id": f"{did}#prekey",
                "type": "X25519KeyAgreementKey2020",
                "controller": did,
                "publicKeyMultibase": encode_multibase_key(prekey, "X25519", raw),
            }
        ],
        "authentication": [f"{did}#signing"],
        "service": [
            {
                "id": "#mediator-service",
                "type": "DecentrlMediator",
                "serviceEndpoint": {"uri": endpoint},
            }
        ],
    }
