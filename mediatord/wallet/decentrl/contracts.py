"""Communication contracts between identities: proposing, accepting, and what both get from it (reference 7)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from mediatord.errors import InvalidCommand
from mediatord.protocol import jsontext
from mediatord.protocol.decentrl.canonical import canonical
from mediatord.protocol.decentrl.contracts import (
    countersign,
    read_registration,
    request_signature_holds,
    sign_request,
    signatures_hold,
)
from mediatord.protocol.decentrl.did import parse_did
from mediatord.protocol.decentrl.sealing import decode_public_key, new_pair, open_sealed, seal, shared_secret
from mediatord.protocol.decentrl.signing import encode_base64
from mediatord.wallet.decentrl.identity import Identity
from mediatord.wallet.decentrl.replies import ContractRequest
from mediatord.wallet.packing import Unreadable

SigningKey = Callable[[str, str], bytes | None]

YEAR_SECONDS = 31_536_000


@dataclass(frozen=True, slots=True)
class Proposal:
    """
    A contract that we have signed and the other side has not.

    :param request: what goes to the other side, encrypted.
    :param private: the X25519 private key that we made for this contract.
    :param public: its public half, as it stands in the contract.
    """

    recipient_did: str
    request: dict[str, Any] = field(repr=False)
    private: bytes = field(repr=False)
    public: str = field(repr=False)

    def payload(self, prekey: bytes) -> dict[str, Any]:
        """
        The payload of REQUEST_COMMUNICATION_CONTRACT.

        :param prekey: the recipient's.
        """
        return {
            "type": "REQUEST_COMMUNICATION_CONTRACT",
            "encrypted_contract_request": seal(jsontext.dumps(self.request), shared_secret(self.private, prekey)),
            "requestor_ephemeral_public_key": self.public,
        }


@dataclass(frozen=True, slots=True)
class Agreement:
    """
    A contract that both have signed, and what only the two of them know.

    :param signed: both signatures and what they are for.
    :param root_secret: the key of all events between them.
    """

    peer_did: str
    signed: dict[str, Any] = field(repr=False)
    root_secret: bytes = field(repr=False)

    @property
    def terms(self) -> dict[str, Any]:
        """The contract itself."""
        terms: dict[str, Any] = self.signed["communication_contract"]
        return terms

    @property
    def id(self) -> str:
        """The same for both (reference 7.4)."""
        return sha256(canonical(self.terms)).hexdigest()

    @property
    def expires_at(self) -> float:
        """Unix seconds."""
        return float(self.terms["expires_at"])


def propose(identity: Identity, recipient_did: str, now: float, lifetime: float = YEAR_SECONDS) -> Proposal:
    """
    A contract for somebody to accept. Our signature cannot cover the key that they have yet to make (reference 7.2).

    :param now: Unix seconds, like all times of contracts.
    """
    private, public = new_pair()
    terms = {
        "requestor_did": identity.did,
        "recipient_did": recipient_did,
        "requestor_signing_key_id": identity.signing_key_id,
        "recipient_signing_key_id": f"{recipient_did}#signing",
        "requestor_encryption_public_key": encode_base64(public),
        "expires_at": int(now + lifetime),
        "timestamp": int(now),
    }
    request = {"communication_contract": terms, "requestor_signature": sign_request(terms, identity.seed)}
    return Proposal(recipient_did, request, private, encode_base64(public))


def accept(request: ContractRequest, identity: Identity, now: float) -> Agreement:
    """
    Sign what somebody proposed.

    :raise Unreadable: it is not for us, not by who it says, or has expired.
    """
    try:
        public = decode_public_key(request.requestor_ephemeral_public_key)
        plaintext = open_sealed(request.encrypted_contract_request, shared_secret(identity.prekey, public))
        proposed = read_registration(plaintext)
        requestor = parse_did(request.sender_did)
    except (ValueError, InvalidCommand):
        raise Unreadable("a request for a contract that does not open") from None
    terms = proposed.contract
    if (terms["requestor_did"], terms["recipient_did"]) != (request.sender_did, identity.did):
        raise Unreadable("a request for a contract between others")
    if terms["requestor_signing_key_id"] != requestor.signing_key_id:
        raise Unreadable("a request for a contract with a key of somebody else")
    if not request_signature_holds(proposed, requestor.signing_key):
        raise Unreadable("a request for a contract that was not signed")
    if not terms["expires_at"] > now:
        raise Unreadable("a request for a contract that has expired")
    private, own = new_pair()
    signed = countersign(proposed, mediator_did=identity.did, encryption_key=own, seed=identity.seed)
    return _agreed(signed, request.sender_did, private, "requestor")


def conclude(proposal: Proposal, signed: dict[str, Any], signing_key: SigningKey) -> Agreement:
    """
    The contract that somebody made of our proposal.

    :raise Unreadable: it is another contract, or somebody did not sign it.
    """
    try:
        terms = signed["communication_contract"]
        ours = proposal.request["communication_contract"]
        same = all(terms[name] == value for name, value in ours.items())
    except (KeyError, TypeError):
        raise Unreadable("not a contract") from None
    if not same:
        raise Unreadable("a contract that is not what was proposed")
    if not signatures_hold(signed, signing_key):
        raise Unreadable("a contract that not both have signed")
    return _agreed(signed, proposal.recipient_did, proposal.private, "recipient")


def _agreed(signed: dict[str, Any], peer_did: str, private: bytes, peer: str) -> Agreement:
    """:param peer: which role the other side has in the contract."""
    try:
        public = decode_public_key(signed["communication_contract"][f"{peer}_encryption_public_key"])
        return Agreement(peer_did, signed, shared_secret(private, public))
    except (KeyError, ValueError):
        raise Unreadable("a contract without a key") from None
