"""Fresh identities for a wallet: a DID, the keys behind it and where its messages are to be sent (reference 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mediatord.protocol.didcomm.did import DIDDocument
from mediatord.protocol.didcomm.did_key import make_did_key
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.protocol.didcomm.did_peer import make_did_peer_2, make_did_peer_4
from mediatord.protocol.didcomm.keys import (
    Curve,
    PrivateKey,
    PublicKey,
    ed25519_to_x25519,
    ed25519_to_x25519_private,
)

Method = Literal["did:peer:2", "did:peer:4", "did:key"]


@dataclass(frozen=True, slots=True)
class Key:
    """
    A private key and the absolute DID URL it goes by.

    :param kid: in the spelling of the current specification.
    """

    kid: str
    private: PrivateKey


@dataclass(frozen=True, slots=True)
class Identity:
    """
    A DID whose private keys we hold.

    :param did: with did:peer:4, the long form.
    :param agreement: for encryption.
    :param signing: for `from_prior`; the did:key of a NIST curve signs with its one key.
    """

    did: str
    agreement: Key
    signing: Key

    @classmethod
    def fresh(
        cls, method: Method = "did:peer:2", *, endpoint: str | None = None, curve: Curve = "X25519"
    ) -> Identity:
        """
        A new identity with new keys.

        :param endpoint: where its messages go: the DID of its mediator, or a URL. A did:key has no room for it.
        :param curve: of the encryption key.
        :raise ValueError: a did:key with an endpoint, or an encryption key on a curve for signatures.
        """
        if curve in ("Ed25519", "secp256k1"):
            raise ValueError("not a curve for encryption")
        if method == "did:key":
            if endpoint is not None:
                raise ValueError("a did:key has no service")
            return _fresh_did_key(curve)
        agreement, signing = PrivateKey.generate(curve), PrivateKey.generate("Ed25519")
        make = _peer_2 if method == "did:peer:2" else _peer_4
        did = make(agreement.public, signing.public, _services(endpoint))
        return cls(did, Key(f"{did}#key-1", agreement), Key(f"{did}#key-2", signing))

    @property
    def document(self) -> DIDDocument:
        """What others resolve the DID to."""
        return resolve_local(self.did)

    def key_for(self, kid: str) -> PrivateKey | None:
        """Our private key that `kid` denotes, in any of the spellings seen in practice (reference 8.6)."""
        if kid == self.agreement.kid:
            return self.agreement.private
        method = self.document.key_agreement_key(kid)
        if method is None or method.key != self.agreement.private.public:
            return None
        return self.agreement.private


def _fresh_did_key(curve: Curve) -> Identity:
    """On X25519 an Ed25519 did:key, whose document holds the derived key as well (reference 8.2)."""
    if curve != "X25519":
        private = PrivateKey.generate(curve)
        key = _named_after_itself(private)
        return Identity(make_did_key(private.public), key, key)
    signing = PrivateKey.generate("Ed25519")
    did = make_did_key(signing.public)
    derived = ed25519_to_x25519(signing.public)
    agreement = Key(f"{did}#{derived.multibase()}", ed25519_to_x25519_private(signing))
    return Identity(did, agreement, _named_after_itself(signing))


def _named_after_itself(private: PrivateKey) -> Key:
    return Key(f"{make_did_key(private.public)}#{private.public.multibase()}", private)


def _peer_2(agreement: PublicKey, signing: PublicKey, services: list[dict[str, Any]]) -> str:
    return make_did_peer_2([("E", agreement), ("V", signing)], services)


def _peer_4(agreement: PublicKey, signing: PublicKey, services: list[dict[str, Any]]) -> str:
    document: dict[str, Any] = {
        "@context": ["https://www.w3.org/ns/did/v1"],
        "verificationMethod": [
            {"id": id_, "type": "Multikey", "publicKeyMultibase": key.multibase()}
            for id_, key in (("#key-1", agreement), ("#key-2", signing))
        ],
        "keyAgreement": ["#key-1"],
        "authentication": ["#key-2"],
    }
    if services:
        document["service"] = [{"id": "#service", **services[0]}]
    return make_did_peer_4(document)[0]


def _services(endpoint: str | None) -> list[dict[str, Any]]:
    if endpoint is None:
        return []
    return [{"type": "DIDCommMessaging", "serviceEndpoint": {"uri": endpoint, "accept": ["didcomm/v2"]}}]
