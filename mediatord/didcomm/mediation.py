"""Coordinate Mediation 2.0 and 3.0: grants, recipient DIDs, and proofs of their ownership (reference section 5)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import cast

from twisted.internet.interfaces import IReactorTime

from mediatord.didcomm.messages import (
    AuthcryptSender,
    MessageOrigin,
    MessageUnpacker,
    ResponseContent,
    UnpackedMessage,
)
from mediatord.errors import MediationNotGranted, MediatorError, RateLimitExceeded, StoreUnavailable
from mediatord.observability.event_recorder import EventRecorder
from mediatord.protocol.canonical_did import compute_did_digest, is_same_did
from mediatord.protocol.didcomm import jwe
from mediatord.protocol.didcomm.coordinate_mediation import (
    MAX_PROOF_AGE,
    MEDIATION_VERSIONS,
    MediationVersion,
    RecipientUpdate,
    display_recipient_did,
    make_grant_body,
    make_query_response_body,
    make_update_response_body,
    parse_pagination,
    parse_updates,
    verify_ownership_proof,
)
from mediatord.protocol.didcomm.did_document import is_did, strip_did_url
from mediatord.protocol.didcomm.forward import read_payloads
from mediatord.ratelimit.access_control import AccessList, RegistrationQuota
from mediatord.ratelimit.rate_limiter import RateLimiter
from mediatord.store.interfaces.store import Account, IStore, RecipientUpdateAction

# Seconds that a proof's digest is kept after the proof is no longer accepted.
_PROOF_EXPIRY_MARGIN = 1.0


class OwnershipVerifier:
    """
    Verifies the proofs of ownership attached to updates.

    Each is charged to the account as a request, whatever its result, and is accepted once.

    :param owns: whether a DID is one of the mediator's.
    """

    def __init__(
        self,
        clock: IReactorTime,
        store: IStore,
        admission: RateLimiter,
        unpacker: MessageUnpacker,
        owns: Callable[[str], bool],
    ) -> None:
        self._clock = clock
        self._store = store
        self._admission = admission
        self._unpacker = unpacker
        self._owns = owns

    async def proven(self, received: UnpackedMessage, account: Account, origin: MessageOrigin) -> dict[bytes, bytes]:
        """
        The recipient DIDs of which the update carries a proof that holds, by their digests
        (:func:`compute_did_digest`); with each what its proof is known by.

        :raise InvalidAttachment: an attachment is no envelope; likewise LinkedAttachment.
        :raise RateLimitExceeded: the account is over its limit.
        """
        found: dict[bytes, bytes] = {}
        if not received.message.attachments:
            return found
        try:
            for raw, _ in read_payloads(received.message):
                found.update(await self._proven(raw, account, origin))
        except (StoreUnavailable, RateLimitExceeded):
            await self.forget(found)
            raise
        return found

    async def forget(self, proven: Mapping[bytes, bytes]) -> None:
        """Accept proofs again, as they had no effect."""
        for digest in proven.values():
            await self._store.release_nonce(digest)

    async def _proven(self, raw: bytes, account: Account, origin: MessageOrigin) -> dict[bytes, bytes]:
        await self._admission.charge_account(account.did, origin.peer)
        try:
            proof = await self._unpacker.open(jwe.parse_envelope(raw), origin.peer)
        except (StoreUnavailable, RateLimitExceeded):
            raise
        except MediatorError:
            return {}
        now = self._clock.seconds()
        if proof.sender is None:
            return {}
        did = verify_ownership_proof(proof.message, proof.sender, account.did, now, self._owns)
        # After a rotation, the keys of the former DID may be in other hands.
        if did is None or await self._store.is_retired(proof.sender) or not await self._is_new(proof, now):
            return {}
        return {compute_did_digest(did): proof.digest}

    async def _is_new(self, proof: UnpackedMessage, now: float) -> bool:
        """Whether a proof is no replay, which could move back a DID that was moved to another account meanwhile."""
        made = proof.message.created_time or now
        return bool(
            await self._store.claim_nonce(proof.digest, max(now, made) + MAX_PROOF_AGE + _PROOF_EXPIRY_MARGIN)
        )


_UNLIMITED_RECIPIENTS = 1 << 31


@dataclass(frozen=True, slots=True)
class MediationPolicy:
    """
    Who is granted mediation, and how many recipient DIDs.

    :param access: access list for grants.
    :param max_recipients: recipient DIDs of one account.
    :param is_own: whether a DID belongs to the daemon's probe, which always gets a grant.
    :param with_proof: whether a DID other than the account's own is added only with a proof of ownership.
    """

    access: AccessList = field(default_factory=AccessList)
    max_recipients: int = 1000
    is_own: Callable[[str], bool] = lambda did: False
    with_proof: bool = False


@dataclass(frozen=True, slots=True)
class MediatorDIDs:
    """
    The mediator's DIDs.

    :param owns: whether a DID is one of the mediator's, current or former.
    :param routing_did: returns the DID to grant to a client that addressed the mediator by the given one.
    """

    owns: Callable[[str], bool]
    routing_did: Callable[[str], str]


class MediationCoordinator:
    """Serves coordination requests, one method for each."""

    def __init__(
        self,
        store: IStore,
        names: MediatorDIDs,
        registration: MediationPolicy,
        ownership: OwnershipVerifier,
        quota: RegistrationQuota,
        recorder: EventRecorder,
    ) -> None:
        self._store = store
        self._names = names
        self._registration = registration
        self._ownership = ownership
        self._quota = quota
        self._recorder = recorder

    async def mediate_request(
        self,
        received: UnpackedMessage,
        authcrypt_sender: AuthcryptSender,
        account: Account | None,
        origin: MessageOrigin,
    ) -> ResponseContent:
        """`mediate-grant`, also when there is a grant already; `mediate-deny` by policy (reference 5.3)."""
        mediation_version = MEDIATION_VERSIONS[received.message.type.major]
        if not self._may_have_it(authcrypt_sender.did):
            self._recorder.record_denial(authcrypt_sender.did, "policy", "didcomm")
            return ResponseContent(mediation_version.type("mediate-deny"), {})
        try:
            await self._grant(authcrypt_sender, account, origin)
        except MediationNotGranted:
            self._recorder.record_denial(authcrypt_sender.did, "rotated", "didcomm")
            return ResponseContent(mediation_version.type("mediate-deny"), {})
        if authcrypt_sender.draft03:
            await self._store.mark_draft03(authcrypt_sender.did)
        self._recorder.record_grant(authcrypt_sender.did, "didcomm")
        routing_did = self._names.routing_did(strip_did_url(authcrypt_sender.own_kid))
        return ResponseContent(
            mediation_version.type("mediate-grant"), make_grant_body(mediation_version, routing_did)
        )

    async def _grant(self, authcrypt_sender: AuthcryptSender, account: Account | None, origin: MessageOrigin) -> None:
        """
        Make an account, unless it is there, and charge the address for it, unless it was there a short time ago.

        :param account: it may have been removed since the store has read it.
        :raise MediationNotGranted: the DID was rotated away from.
        :raise RegistrationLimitExceeded: it is one too many; likewise RegistrationCapacityExceeded.
        """
        if account is not None:
            await self._store.grant(authcrypt_sender.did)
            return
        # The long form of a did:peer:4 is kept as well.
        did, long = authcrypt_sender.did, authcrypt_sender.document.did
        size = len(did) + (len(long) if long != did else 0)
        await self._quota.charge_account(origin.peer, size)
        try:
            await self._store.grant(did)
        except MediatorError:
            self._quota.refund(origin.peer, size, 1)
            raise

    async def update(self, received: UnpackedMessage, account: Account, origin: MessageOrigin) -> ResponseContent:
        """One result an entry, in order; invalid entries are refused without the store."""
        mediation_version = MEDIATION_VERSIONS[received.message.type.major]
        updates = parse_updates(received.message.require_body())
        proven = await self._ownership.proven(received, account, origin)
        try:
            allowed = [self._is_sane(one) and await self._may_add(one, account, proven) for one in updates]
            wanted = [
                (display_recipient_did(one.recipient_did), cast(RecipientUpdateAction, one.action))
                for one in compress(updates, allowed)
            ]
            charged = await self._charge(wanted, account, origin)
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
            self._quota.refund(origin.peer, max(charged - stored, 0))
        except StoreUnavailable:
            self._quota.refund(origin.peer, charged)
            results = ["server_error" if fine else "client_error" for fine in allowed]
        except MediatorError:
            self._quota.refund(origin.peer, charged)
            await self._ownership.forget(proven)
            raise
        done = [one.action for one, result in zip(updates, results, strict=True) if result == "success"]
        self._recorder.record_recipient_update(account.did, done.count("add"), done.count("remove"))
        return ResponseContent(
            mediation_version.type(mediation_version.update_response), make_update_response_body(updates, results)
        )

    async def _charge(
        self, wanted: Sequence[tuple[str, RecipientUpdateAction]], account: Account, origin: MessageOrigin
    ) -> int:
        """
        Charge the address for what is to be added, or, if that is too much, for what the account does not have yet.

        :raise RegistrationLimitExceeded: it is too much; likewise RegistrationCapacityExceeded.
        """
        names = [name for name, action in wanted if action == "add"]
        size = sum(map(len, names))
        try:
            await self._quota.charge_registration(origin.peer, size)
        except RateLimitExceeded:
            size = sum([len(name) for name in names if await self._is_new(name, account)])
            await self._quota.charge_registration(origin.peer, size)
        return size

    async def _is_new(self, name: str, account: Account) -> bool:
        """Whether the account would have it, and has not."""
        owner = await self._store.find_owner(name)
        return owner is None or (owner == account.did and name not in await self._store.list_registered_names(name))

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
            account.did, wanted, max_recipients=self._registration.max_recipients
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
        if update.action != "add" or not self._registration.with_proof or compute_did_digest(name) in proven:
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
                spellings = await self._store.list_registered_names(name)
                await self._store.update_recipients(owner, [(one, "remove") for one in spellings], max_recipients=0)
                self._recorder.record_recipient_update(owner, 0, len(spellings))
                taken[compute_did_digest(name)] = owner, spellings
        return taken

    async def query(self, received: UnpackedMessage, account: Account, origin: MessageOrigin) -> ResponseContent:
        """The account's recipient DIDs in order of registration."""
        mediation_version: MediationVersion = MEDIATION_VERSIONS[received.message.type.major]
        page = parse_pagination(received.message.require_body())
        dids, total = await self._store.list_recipients(account.did, offset=page.offset, limit=page.limit)
        return ResponseContent(
            mediation_version.type(mediation_version.query_response),
            make_query_response_body(mediation_version, dids, page, total),
        )

    def _may_have_it(self, did: str) -> bool:
        return self._registration.is_own(did) or self._registration.access.allows(did)

    def _is_sane(self, update: RecipientUpdate) -> bool:
        if update.action not in ("add", "remove"):
            return False
        did, hash_, fragment = update.recipient_did.partition("#")
        if not is_did(did) or (hash_ and not 0 < len(fragment) <= 256):
            return False
        return update.action == "remove" or not (self._names.owns(did) or self._is_denied(did))

    def _is_denied(self, did: str) -> bool:
        return self._registration.access.denies(did)
