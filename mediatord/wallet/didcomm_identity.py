"""DIDs of a wallet and their private keys (reference 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mediatord.protocol.didcomm.did_document import DIDDocument
from mediatord.protocol.didcomm.did_methods import make_did_key, make_did_peer_2, make_did_peer_4, resolve_local
from mediatord.protocol.didcomm.keys import (
    Curve,
    PrivateKey,
    PublicKey,
    convert_ed25519_to_x25519,
    convert_ed25519_to_x25519_private,
)

DIDMethod = Literal["did:peer:2", "did:peer:4", "did:key"]


@dataclass(frozen=True, slots=True)
class WalletKey:
    """
    A private key.

    :param kid: absolute DID URL, as the current specification spells it.
    """

    kid: str
    private: PrivateKey


@dataclass(frozen=True, slots=True)
class WalletIdentity:
    """
    A DID and its private keys.

    :param did: with did:peer:4, the long form.
    :param agreement: for encryption.
    :param signing: for `from_prior`; the did:key of a NIST curve signs with its one key.
    """

    did: str
    agreement: WalletKey
    signing: WalletKey

    @classmethod
    def generate(
        cls, method: DIDMethod = "did:peer:2", *, endpoint: str | None = None, curve: Curve = "X25519"
    ) -> WalletIdentity:
        """
        A new identity with new keys.

        :param endpoint: the DID of its mediator, or a URL; not for a did:key.
        :param curve: of the encryption key.
        :raise ValueError: a did:key with an endpoint, or an encryption key on a curve for signatures.
        """
        if curve in ("Ed25519", "secp256k1"):
            raise ValueError("not a curve for encryption")
        if method == "did:key":
            if endpoint is not None:
                raise ValueError("a did:key has no service")
            return _generate_did_key(curve)
        agreement, signing = PrivateKey.generate(curve), PrivateKey.generate("Ed25519")
        make = _make_peer_2 if method == "did:peer:2" else _make_peer_4
        did = make(agreement.public, signing.public, _service_entries(endpoint))
        return cls(did, WalletKey(f"{did}#key-1", agreement), WalletKey(f"{did}#key-2", signing))

    @property
    def document(self) -> DIDDocument:
        """The DID document."""
        return resolve_local(self.did)

    def find_agreement_key(self, kid: str) -> PrivateKey | None:
        """The private key of a `kid`, in any of the spellings seen in practice (reference 8.6)."""
        if kid == self.agreement.kid:
            return self.agreement.private
        method = self.document.key_agreement_key(kid)
        if method is None or method.key != self.agreement.private.public:
            return None
        return self.agreement.private


def _generate_did_key(curve: Curve) -> WalletIdentity:
    """For X25519 an Ed25519 did:key, whose document has the derived key as well (reference 8.2)."""
    if curve != "X25519":
        private = PrivateKey.generate(curve)
        key = _self_named_key(private)
        return WalletIdentity(make_did_key(private.public), key, key)
    signing = PrivateKey.generate("Ed25519")
    did = make_did_key(signing.public)
    derived = convert_ed25519_to_x25519(signing.public)
    agreement = WalletKey(f"{did}#{derived.multibase()}", convert_ed25519_to_x25519_private(signing))
    return WalletIdentity(did, agreement, _self_named_key(signing))


def _self_named_key(private: PrivateKey) -> WalletKey:
    return WalletKey(f"{make_did_key(private.public)}#{private.public.multibase()}", private)


def _make_peer_2(agreement: PublicKey, signing: PublicKey, services: list[dict[str, Any]]) -> str:
    return make_did_peer_2([("E", agreement), ("V", signing)], services)


def _make_peer_4(agreement: PublicKey, signing: PublicKey, services: list[dict[str, Any]]) -> str:
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


def _service_entries(endpoint: str | None) -> list[dict[str, Any]]:
    if endpoint is None:
        return []
    return [{"type": "DIDCommMessaging", "serviceEndpoint": {"uri": endpoint, "accept": ["didcomm/v2"]}}]
