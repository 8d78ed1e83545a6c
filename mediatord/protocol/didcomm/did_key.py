"""did:key, whose key is its name (reference 8.2). did:peer:0 is the same with another beginning."""

from __future__ import annotations

from mediatord.errors import SenderUnresolvable
from mediatord.protocol.didcomm.did import DIDDocument, VerificationMethod
from mediatord.protocol.didcomm.did_document import AGREEMENT_CURVES, SIGNATURE_CURVES
from mediatord.protocol.didcomm.keys import PublicKey, ed25519_to_x25519

_PREFIX = "did:key:"


def make_did_key(key: PublicKey) -> str:
    """The did:key of a key."""
    return _PREFIX + key.multibase()


def resolve_key(did: str) -> DIDDocument:
    """
    The document of a did:key.

    :raise SenderUnresolvable: it holds no key of a kind that is read here.
    """
    return single_key_document(did, did.removeprefix(_PREFIX))


def single_key_document(did: str, multibase: str) -> DIDDocument:
    """
    The document that one multibase key makes: an Ed25519 key also gives an X25519 one for key agreement, a key on a
    NIST curve serves both purposes, an X25519 key agreement alone, secp256k1 signatures alone.

    :raise SenderUnresolvable: no key of a kind that is read here.
    """
    try:
        key = PublicKey.from_multibase(multibase)
        agreement = ed25519_to_x25519(key) if key.curve == "Ed25519" else key
    except ValueError:
        raise SenderUnresolvable from None
    return DIDDocument(
        did,
        (_method(did, agreement),) if agreement.curve in AGREEMENT_CURVES else (),
        (_method(did, key),) if key.curve in SIGNATURE_CURVES else (),
    )


def _method(did: str, key: PublicKey) -> VerificationMethod:
    return VerificationMethod(f"{did}#{key.multibase()}", key)
