"""Coordinate Mediation 2.0 and 3.0: grants, recipient DIDs, and proofs of their ownership (reference section 5)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, cast

from mediatord.didcomm.context import DIDCommContext, MessageRequest
from mediatord.didcomm.messages import AuthcryptSender
from mediatord.errors import MediationNotGranted, MediatorError, RateLimitExceeded, StoreUnavailable
from mediatord.protocol.canonical_did import compute_did_digest, is_same_did
from mediatord.protocol.didcomm import jwe
from mediatord.protocol.didcomm.coordinate_mediation import (
    MEDIATION_VERSIONS,
    RecipientUpdate,
    display_recipient_did,
    make_grant_body,
    make_query_response_body,
    make_update_response_body,
    parse_pagination,
    parse_updates,
)
from mediatord.protocol.didcomm.did_document import is_did, strip_did_url
from mediatord.protocol.didcomm.forward import read_payloads
from mediatord.protocol.didcomm.message import Message, OutgoingMessage
from mediatord.store.interfaces.store import Account, RecipientUpdateAction

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


_UNLIMITED_RECIPIENTS = 1 << 31


class MediationCoordinator:
    """Serves coordination requests, one method for each."""

    def __init__(self, context: DIDCommContext) -> None:
        self._context = context
        self._store, self._recorder, self._quota = context.store, context.recorder, context.registrations
        self._ownership = OwnershipVerifier(context)

    async def mediate_request(self, request: MessageRequest, sender: AuthcryptSender) -> OutgoingMessage:
        """`mediate-grant`, also when there is a grant already; `mediate-deny` by policy (reference 5.3)."""
        context, message = self._context, request.received.message
        version = MEDIATION_VERSIONS[message.type.major]
        denied: str | None = None
        # The daemon's probe always gets a grant.
        if not (self._recorder.is_own(sender.did) or context.access.allows(sender.did)):
            denied = "policy"
        else:
            try:
                await self._grant(sender, request)
            except MediationNotGranted:
                denied = "rotated"
        if denied is not None:
            self._recorder.record_denial(sender.did, denied, "didcomm")
            return context.packer.answer(message, version.type("mediate-deny"), {})
        if sender.draft03:
            await self._store.mark_draft03(sender.did)
        self._recorder.record_grant(sender.did, "didcomm")
        routing_did = context.routing_did(strip_did_url(sender.own_kid))
        return context.packer.answer(message, version.type("mediate-grant"), make_grant_body(version, routing_did))

    async def _grant(self, sender: AuthcryptSender, request: MessageRequest) -> None:
        """
        Make an account, unless it is there, and charge the address for it, unless it was there a short time ago: it
        may have been removed since the store has read it.

        :raise MediationNotGranted: the DID was rotated away from.
        :raise RegistrationLimitExceeded: it is one too many; likewise RegistrationCapacityExceeded.
        """
        if request.account is not None:
            await self._store.grant(sender.did)
            return
        # The long form of a did:peer:4 is kept as well.
        did, long, peer = sender.did, sender.document.did, request.origin.peer
        size = len(did) + (len(long) if long != did else 0)
        await self._quota.charge(peer, size, 1)
        try:
            await self._store.grant(did)
        except MediatorError:
            self._quota.refund(peer, size, 1)
            raise

    async def update(self, request: MessageRequest, account: Account) -> OutgoingMessage:
        """One result an entry, in order; invalid entries are refused without the store."""
        message, peer = request.received.message, request.origin.peer
        version = MEDIATION_VERSIONS[message.type.major]
        updates = parse_updates(message.require_body())
        proven = await self._ownership.proven(request, account)
        try:
            allowed = [self._is_sane(one) and await self._may_add(one, account, proven) for one in updates]
            wanted = [
                (display_recipient_did(one.recipient_did), cast(RecipientUpdateAction, one.action))
                for one in compress(updates, allowed)
            ]
            charged = await self._charge(wanted, account, peer)
        except (StoreUnavailable, RateLimitExceeded):
            await self._ownership.forget(proven)
            raise
        try:
            outcome = iter(await self._apply(account, wanted, proven))
            results = [next(outcome) if fine else "client_error" for fine in allowed]
            stored = sum(
                len(one.recipient_did)
                for one, result in zip(updates, results, strict=True)
                if one.action == "add" and result == "success"
            )
            self._quota.refund(peer, max(charged - stored, 0))
        except StoreUnavailable:
            self._quota.refund(peer, charged)
            results = ["server_error" if fine else "client_error" for fine in allowed]
        except MediatorError:
            self._quota.refund(peer, charged)
            await self._ownership.forget(proven)
            raise
        done = [one.action for one, result in zip(updates, results, strict=True) if result == "success"]
        self._recorder.record_recipient_update(account.did, done.count("add"), done.count("remove"))
        body = make_update_response_body(updates, results)
        return self._context.packer.answer(message, version.type(version.update_response), body)

    async def _charge(self, wanted: Sequence[tuple[str, RecipientUpdateAction]], account: Account, peer: str) -> int:
        """
        Charge the address for what is to be added, or, if that is too much, for what the account does not have yet.

        :raise RegistrationLimitExceeded: it is too much; likewise RegistrationCapacityExceeded.
        """
        names = [name for name, action in wanted if action == "add"]
        size = sum(map(len, names))
        try:
            await self._quota.charge(peer, size)
        except RateLimitExceeded:
            size = sum([len(name) for name in names if await self._is_new(name, account)])
            await self._quota.charge(peer, size)
        return size

    async def _is_new(self, name: str, account: Account) -> bool:
        """Whether the account would have it, and has not."""
        owner = await self._store.find_owner(name)
        return owner is None or (owner == account.did and name not in await self._store.list_spellings(name))

    async def _apply(
        self, account: Account, wanted: Sequence[tuple[str, RecipientUpdateAction]], proven: Collection[bytes]
    ) -> Sequence[str]:
        if not wanted:
            return []
        taken: dict[bytes, tuple[str, list[str]]] = {}
        if proven:
            claimed = [name for name, action in wanted if action == "add" and compute_did_digest(name) in proven]
            taken = await self._take_over(claimed, account)
        results = await self._store.update_recipients(
            account.did, wanted, max_recipients=self._context.max_recipients
        )
        if not taken:
            return results
        done = {
            compute_did_digest(name) for (name, _), result in zip(wanted, results, strict=True) if result == "success"
        }
        for digest in taken.keys() - done:
            # There was no room for it, so it goes back to the former account.
            owner, names = taken[digest]
            await self._store.update_recipients(
                owner, [(name, "add") for name in names], max_recipients=_UNLIMITED_RECIPIENTS
            )
            self._recorder.record_recipient_update(owner, len(names), 0)
        return results

    async def _may_add(self, update: RecipientUpdate, account: Account, proven: Collection[bytes]) -> bool:
        name = update.recipient_did
        if update.action != "add" or not self._context.with_proof or compute_did_digest(name) in proven:
            return True
        return is_same_did(name, account.did) or await self._store.find_owner(name) == account.did

    async def _take_over(self, names: Iterable[str], account: Account) -> dict[bytes, tuple[str, list[str]]]:
        """
        Remove DIDs with a proof of ownership from other accounts. Returns by digest the former account and the
        spellings under which the DID was registered.
        """
        taken = {}
        for name in names:
            owner = await self._store.find_owner(name)
            if owner is not None and owner != account.did:
                spellings = await self._store.list_spellings(name)
                await self._store.update_recipients(owner, [(one, "remove") for one in spellings], max_recipients=0)
                self._recorder.record_recipient_update(owner, 0, len(spellings))
                taken[compute_did_digest(name)] = owner, spellings
        return taken

    async def query(self, request: MessageRequest, account: Account) -> OutgoingMessage:
        """The account's recipient DIDs in order of registration."""
        message = request.received.message
        version = MEDIATION_VERSIONS[message.type.major]
        page = parse_pagination(message.require_body())
        dids, total = await self._store.list_recipients(account.did, offset=page.offset, limit=page.limit)
        body = make_query_response_body(version, dids, page, total)
        return self._context.packer.answer(message, version.type(version.query_response), body)

    def _is_sane(self, update: RecipientUpdate) -> bool:
        did, hash_, fragment = update.recipient_did.partition("#")
        if update.action not in ("add", "remove") or not is_did(did) or (hash_ and not 0 < len(fragment) <= 256):
            return False
        return update.action == "remove" or not (self._context.owns(did) or self._context.access.denies(did))
