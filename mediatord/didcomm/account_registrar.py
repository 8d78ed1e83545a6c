"""
Accounts and their recipients, as all versions of Coordinate Mediation decide about them: whom mediation is granted
to, what that is charged, and which account a recipient belongs to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import compress
from typing import cast

from mediatord.didcomm.context import DIDCommContext
from mediatord.errors import MediationNotGranted, MediatorError, RateLimitExceeded, StoreUnavailable
from mediatord.observability.event_recorder import ProtocolName
from mediatord.protocol.canonical_did import compute_did_digest, is_same_did
from mediatord.protocol.didcomm.coordinate_mediation import RecipientUpdate, display_recipient_did
from mediatord.protocol.didcomm.did_document import is_did, strip_did_url
from mediatord.store.interfaces.store import Account, RecipientUpdateAction, RecipientUpdateResult

_UNLIMITED_RECIPIENTS = 1 << 31
_ED25519_DID_KEY = "did:key:z6Mk"


class AccountRegistrar:
    """
    Grants mediation and updates recipients.

    :param protocol: of the requests that it serves.
    """

    def __init__(self, context: DIDCommContext, protocol: ProtocolName) -> None:
        self._context = context
        self._protocol = protocol
        self._store, self._recorder, self._quota = context.store, context.recorder, context.registrations

    async def grant(self, did: str, account: Account | None, peer: str, size: int) -> bool:
        """
        Make an account, unless it is there; whether mediation is granted. A denial is recorded.

        The address is charged for it, unless it was there a short time ago: it may have been removed since the store
        has read it.

        :param did: proven DID of the wallet, canonical.
        :param account: that it has; None if it has none.
        :param size: bytes that are stored for a new account.
        :raise RegistrationLimitExceeded: it is one too many; likewise RegistrationCapacityExceeded.
        """
        # The daemon's probe always gets a grant.
        if not (self._recorder.is_own(did) or self._context.access.allows(did)):
            self._recorder.record_denial(did, "policy", self._protocol)
            return False
        try:
            if account is not None:
                await self._store.grant(did)
            else:
                await self._make_account(did, peer, size)
        except MediationNotGranted:
            self._recorder.record_denial(did, "rotated", self._protocol)
            return False
        return True

    async def _make_account(self, did: str, peer: str, size: int) -> None:
        await self._quota.charge(peer, size, 1)
        try:
            await self._store.grant(did)
        except MediatorError:
            self._quota.refund(peer, size, 1)
            raise

    async def update_recipients(
        self, account: Account, updates: Sequence[RecipientUpdate], peer: str, proven: Collection[bytes] = ()
    ) -> list[RecipientUpdateResult]:
        """
        Apply the updates: one result an entry, in order; invalid entries are refused without the store.

        :param proven: digests (:func:`compute_did_digest`) of the DIDs that the account has proven to be its own,
            which it takes over from other accounts.
        :raise StoreUnavailable: nothing was done; likewise RateLimitExceeded.
        """
        allowed = [self._is_sane(one) and await self._may_add(one, account, proven) for one in updates]
        wanted = [
            (display_recipient_did(one.recipient_did), cast(RecipientUpdateAction, one.action))
            for one in compress(updates, allowed)
        ]
        charged = await self._charge(wanted, account, peer)
        results: list[RecipientUpdateResult]
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
            raise
        done = [one.action for one, result in zip(updates, results, strict=True) if result == "success"]
        self._record(account.did, done.count("add"), done.count("remove"))
        return results

    def _record(self, did: str, added: int, removed: int) -> None:
        self._recorder.record_recipient_update(did, added, removed, self._protocol)

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
    ) -> Sequence[RecipientUpdateResult]:
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
            self._record(owner, len(names), 0)
        return results

    async def _may_add(self, update: RecipientUpdate, account: Account, proven: Collection[bytes]) -> bool:
        name = update.recipient_did
        if update.action != "add":
            return True
        if await self._is_key_of_connection(name):
            return False
        if not self._context.with_proof or compute_did_digest(name) in proven:
            return True
        return is_same_did(name, account.did) or await self._store.find_owner(name) == account.did

    async def _is_key_of_connection(self, name: str) -> bool:
        """Whether this is the mediator's key for a connection of DIDComm v1."""
        did = strip_did_url(name)
        return did.startswith(_ED25519_DID_KEY) and await self._store.v1_connections.find_connection(did) is not None

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
                self._record(owner, 0, len(spellings))
                taken[compute_did_digest(name)] = owner, spellings
        return taken

    def _is_sane(self, update: RecipientUpdate) -> bool:
        did, hash_, fragment = update.recipient_did.partition("#")
        if update.action not in ("add", "remove") or not is_did(did) or (hash_ and not 0 < len(fragment) <= 256):
            return False
        context = self._context
        return update.action == "remove" or not (
            context.owns(did) or context.owns_v1_key(did) or context.access.denies(did)
        )
