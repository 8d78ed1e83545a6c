"""
That a recipient DID belongs to the holder of an account: a message of ours, for which there is no standard.

It is made by the recipient DID, for the mediator, and goes as an attachment of the `recipient-update` that adds it
(docs/protocols.md, "Ownership of recipient DIDs").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mediatord.protocol.canonical_did import canonical_did, is_same_did
from mediatord.protocol.didcomm.did import did_of
from mediatord.protocol.didcomm.message import Message

PROOF = "urn:mediatord:recipient-ownership/1.0/proof"
# Seconds from when it says it was made, either way, for which it is taken.
FRESH = 300.0


def proof_body(account: str, recipient_did: str) -> dict[str, Any]:
    """Body of a proof. :param recipient_did: as in the update, with a key if it has one there."""
    return {"account": account, "recipient_did": recipient_did}


def proven_by(message: Message, sender: str, account: str, now: float, owns: Callable[[str], bool]) -> str | None:
    """
    The recipient DID that a proof is for; None if it proves nothing.

    :param sender: the DID that is proven to have sent it.
    :param account: who asks for the update, did:peer:4 in its short form.
    :param owns: whether a DID is one of ours.
    """
    body: Mapping[str, Any] = message.body if isinstance(message.body, dict) else {}
    recipient, holder, made = body.get("recipient_did"), body.get("account"), message.created_time
    if message.type.uri != PROOF or not (isinstance(recipient, str) and isinstance(holder, str)):
        return None
    if not is_same_did(holder, account) or not is_same_did(recipient, sender):
        return None
    if not any(owns(did_of(one)) for one in message.to):
        return None
    if made is None or abs(now - made) > FRESH or (message.expires_time or now + 1) <= now:
        return None
    return recipient


def registered_as(recipient_did: str) -> str:
    """
    The spelling in which a recipient DID is shown to its account: as it came, but a did:peer:4 short (reference 4.3).

    Whose it is goes by :func:`~mediatord.protocol.canonical_did.canonical_did`.
    """
    did, hash_, fragment = recipient_did.partition("#")
    return (canonical_did(did) if did.startswith("did:peer:4") else did) + hash_ + fragment
