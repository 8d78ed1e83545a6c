"""Coordinate Mediation 2.0 and 3.0: grants, recipient DIDs, and proofs of their ownership (reference section 5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mediatord.didcomm.account_registrar import AccountRegistrar
from mediatord.didcomm.context import DIDCommContext, MessageRequest
from mediatord.didcomm.messages import AuthcryptSender
from mediatord.errors import MediatorError, RateLimitExceeded, StoreUnavailable
from mediatord.protocol.canonical_did import compute_did_digest, is_same_did
from mediatord.protocol.didcomm import jwe
from mediatord.protocol.didcomm.coordinate_mediation import (
    MEDIATION_VERSIONS,
    make_grant_body,
    make_query_response_body,
    make_update_response_body,
    parse_pagination,
    parse_updates,
)
from mediatord.protocol.didcomm.did_document import strip_did_url
from mediatord.protocol.didcomm.forward import read_payloads
from mediatord.protocol.didcomm.message import Message, OutgoingMessage
from mediatord.store.interfaces.store import Account

OWNERSHIP_PROOF = "urn:mediatord:recipient-ownership/1.0/proof"
# Maximum difference to the creation time of a proof, in either direction, in seconds.
MAX_PROOF_AGE = 300.0
# Seconds that a proof's digest is kept after the proof is no longer accepted.
_PROOF_EXPIRY_MARGIN = 1.0


class OwnershipVerifier:
    """
    Verifies the proofs of ownership attached to updates: messages, of mediatord's own type, by which a recipient DID
    confirms that it belongs to an account (docs/reference/protocols.md, "Ownership of recipient DIDs").

    Each is charged to the account as a request, whatever its result, and is accepted once.
    """

    def __init__(self, context: DIDCommContext) -> None:
        self._context = context

    async def proven(self, request: MessageRequest, account: Account) -> dict[bytes, bytes]:
        """
        The recipient DIDs of which the update carries a proof that holds, by their digests
        (:func:`compute_did_digest`); with each what its proof is known by.

        :raise InvalidAttachment: an attachment is no envelope; likewise LinkedAttachment.
        :raise RateLimitExceeded: the account is over its limit.
        """
        found: dict[bytes, bytes] = {}
        message, peer = request.received.message, request.origin.peer
        if not message.attachments:
            return found
        try:
            for raw, _ in read_payloads(message):
                found.update(await self._proven(raw, account, peer))
        except (StoreUnavailable, RateLimitExceeded):
            await self.forget(found)
            raise
        return found

    async def forget(self, proven: Mapping[bytes, bytes]) -> None:
        """Accept proofs again, as they had no effect."""
        for digest in proven.values():
            await self._context.store.release_nonce(digest)

    async def _proven(self, raw: bytes, account: Account, peer: str) -> dict[bytes, bytes]:
        context = self._context
        await context.rate_limiter.charge_account(account.did, peer)
        try:
            proof = await context.unpacker.open(jwe.parse_envelope(raw), peer)
        except (StoreUnavailable, RateLimitExceeded):
            raise
        except MediatorError:
            return {}
        now = context.clock.seconds()
        if proof.sender is None:
            return {}
        did = verify_ownership_proof(proof.message, proof.sender, account.did, now, context.owns)
        # After a rotation, the keys of the former DID may be in other hands.
        if did is None or await context.store.is_retired(proof.sender):
            return {}
        # A replay could move back a DID that was moved to another account meanwhile.
        expires_at = max(now, proof.message.created_time or now) + MAX_PROOF_AGE + _PROOF_EXPIRY_MARGIN
        if not await context.store.claim_nonce(proof.digest, expires_at):
            return {}
        return {compute_did_digest(did): proof.digest}


def verify_ownership_proof(
    message: Message, sender: str, account: str, now: float, owns: Callable[[str], bool]
) -> str | None:
    """
    The recipient DID that a proof is valid for; None if it is invalid.

    :param sender: authenticated DID of the sender.
    :param account: DID of the account that requests the update; did:peer:4 in short form.
    :param owns: whether a DID is one of the mediator's.
    """
    body: Mapping[str, Any] = message.body if isinstance(message.body, dict) else {}
    recipient, holder, made = body.get("recipient_did"), body.get("account"), message.created_time
    if message.type.uri != OWNERSHIP_PROOF or not (isinstance(recipient, str) and isinstance(holder, str)):
        return None
    if not is_same_did(holder, account) or not is_same_did(recipient, sender):
        return None
    if not any(owns(strip_did_url(one)) for one in message.to):
        return None
    if made is None or abs(now - made) > MAX_PROOF_AGE or (message.expires_time or now + 1) <= now:
        return None
    return recipient


class MediationCoordinator:
    """Serves coordination requests, one method for each."""

    def __init__(self, context: DIDCommContext) -> None:
        self._context = context
        self._store, self._recorder = context.store, context.recorder
        self._registrar = AccountRegistrar(context, "didcomm")
        self._ownership = OwnershipVerifier(context)

    async def mediate_request(self, request: MessageRequest, sender: AuthcryptSender) -> OutgoingMessage:
        """`mediate-grant`, also when there is a grant already; `mediate-deny` by policy (reference 5.3)."""
        context, message = self._context, request.received.message
        version = MEDIATION_VERSIONS[message.type.major]
        # The long form of a did:peer:4 is kept as well.
        did, long = sender.did, sender.document.did
        size = len(did) + (len(long) if long != did else 0)
        if not await self._registrar.grant(did, request.account, request.origin.peer, size):
            return context.packer.answer(message, version.type("mediate-deny"), {})
        if sender.draft03:
            await self._store.mark_draft03(did)
        self._recorder.record_grant(did, "didcomm")
        routing_did = context.routing_did(strip_did_url(sender.own_kid))
        return context.packer.answer(message, version.type("mediate-grant"), make_grant_body(version, routing_did))

    async def update(self, request: MessageRequest, account: Account) -> OutgoingMessage:
        """One result an entry, in order; invalid entries are refused without the store."""
        message = request.received.message
        version = MEDIATION_VERSIONS[message.type.major]
        updates = parse_updates(message.require_body())
        proven = await self._ownership.proven(request, account)
        try:
            results = await self._registrar.update_recipients(account, updates, request.origin.peer, proven)
        except MediatorError:
            await self._ownership.forget(proven)
            raise
        body = make_update_response_body(updates, results)
        return self._context.packer.answer(message, version.type(version.update_response), body)

    async def query(self, request: MessageRequest, account: Account) -> OutgoingMessage:
        """The account's recipient DIDs in order of registration."""
        message = request.received.message
        version = MEDIATION_VERSIONS[message.type.major]
        page = parse_pagination(message.require_body())
        dids, total = await self._store.list_recipients(account.did, offset=page.offset, limit=page.limit)
        body = make_query_response_body(version, dids, page, total)
        return self._context.packer.answer(message, version.type(version.query_response), body)
