"""Generates identities of every DID method and curve that wallets use, and ownership proofs."""

from __future__ import annotations

from typing import Any, Literal

from mediatord.didcomm.mediation import OWNERSHIP_PROOF
from mediatord.protocol.didcomm.did_document import DIDDocument
from mediatord.protocol.didcomm.keys import (
    Curve,
    PrivateKey,
    PublicKey,
    convert_ed25519_to_x25519,
    convert_ed25519_to_x25519_private,
)
from mediatord.wallet.didcomm_identity import WalletIdentity, WalletKey
from mediatord.wallet.didcomm_messages import authcrypt, compose_message
from tests.did_factories import make_did_key, make_did_peer_4

DIDMethod = Literal["did:peer:2", "did:peer:4", "did:key"]


def generate_identity(
    method: DIDMethod = "did:peer:2", *, endpoint: str | None = None, curve: Curve = "X25519"
) -> WalletIdentity:
    """
    Generate an identity with new keys.

    :param endpoint: the DID of its mediator, or a URL; not for a did:key.
    :param curve: curve of the encryption key.
    """
    if method == "did:key":
        return _generate_did_key(curve)
    agreement, signing = PrivateKey.generate(curve), PrivateKey.generate("Ed25519")
    if method == "did:peer:2":
        return WalletIdentity.from_keys(agreement, signing, endpoint)
    did = _make_peer_4(agreement.public, signing.public, endpoint)
    return WalletIdentity(did, WalletKey(f"{did}#key-1", agreement), WalletKey(f"{did}#key-2", signing))


def _generate_did_key(curve: Curve) -> WalletIdentity:
    """For X25519 an Ed25519 did:key, whose document contains the derived key as well (reference 8.2)."""
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


def _make_peer_4(agreement: PublicKey, signing: PublicKey, endpoint: str | None) -> str:
    document: dict[str, Any] = {
        "@context": ["https://www.w3.org/ns/did/v1"],
        "verificationMethod": [
            {"id": id_, "type": "Multikey", "publicKeyMultibase": key.multibase()}
            for id_, key in (("#key-1", agreement), ("#key-2", signing))
        ],
        "keyAgreement": ["#key-1"],
        "authentication": ["#key-2"],
    }
    if endpoint is not None:
        service = {"type": "DIDCommMessaging", "serviceEndpoint": {"uri": endpoint, "accept": ["didcomm/v2"]}}
        document["service"] = [{"id": "#service", **service}]
    return make_did_peer_4(document)[0]


def prove_ownership(
    owner: WalletIdentity, recipient_did: str, account: str, mediator: DIDDocument, *, now: float
) -> bytes:
    """
    Ownership proof that lets `account` register a recipient DID, valid for five minutes.

    :param now: Unix seconds.
    """
    headers = {"from": owner.did, "to": [mediator.did], "created_time": int(now)}
    return authcrypt(
        compose_message(OWNERSHIP_PROOF, {"account": account, "recipient_did": recipient_did}, **headers),
        owner,
        mediator,
    )
