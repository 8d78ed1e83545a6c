"""Coordinate Mediation 2.0 and 3.0: who is mediated for, and under which DIDs (reference section 5)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import cast

from mediatord.admission import AccessList, RegistrationQuota
from mediatord.didcomm.exchange import Answer, Correspondent, Origin, Received
from mediatord.didcomm.ownership import Ownership
from mediatord.errors import MediatorError, NotEnrolled, RateLimited, StoreUnavailable
from mediatord.interfaces import Account, Action, IStore
from mediatord.journal import Journal
from mediatord.protocol.canonical_did import did_digest, is_same_did
from mediatord.protocol.didcomm.did import did_of, is_did
from mediatord.protocol.didcomm.mediation import (
    WORDING,
    Update,
    Wording,
    grant_body,
    page_body,
    read_page,
    read_updates,
    updated_body,
)
from mediatord.protocol.didcomm.ownership import registered_as

_NO_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class Registration:
    """
    Who may have mediation, and how much.

    :param access: whose list says who gets a grant.
    :param max_recipients: recipient DIDs of one account.
    :param is_own: whether a DID is one of the daemon's own, which get a grant whoever else does.
    :param with_proof: whether a DID that is not the account's own is added only if it proves that it wants that.
    """

    access: AccessList = field(default_factory=AccessList)
    max_recipients: int = 1000
    is_own: Callable[[str], bool] = lambda did: False
    with_proof: bool = False


@dataclass(frozen=True, slots=True)
class OwnNames:
    """
    Our DIDs.

    :param owns: whether a DID is one of ours, present or former.
    :param routing_did: the DID to hand out to somebody who addressed us as the given one.
    """

    owns: Callable[[str], bool]
    routing_did: Callable[[str], str]


class Coordination:
    """Answers coordination requests: one method for each."""

    def __init__(
        self,
        store: IStore,
        names: OwnNames,
        registration: Registration,
        ownership: Ownership,
        quota: RegistrationQuota,
        journal: Journal,
    ) -> None:
        self._store = store
        self._names = names
        self._registration = registration
        self._ownership = ownership
        self._quota = quota
        self._journal = journal

    async def mediate_request(
        self, received: Received, correspondent: Correspondent, account: Account | None, origin: Origin
    ) -> Answer:
        """`mediate-grant`, also when there is a grant already; `mediate-deny` by policy (reference 5.3)."""
        wording = WORDING[received.message.type.major]
        if not self._may_have_it(correspondent.did):
            self._journal.denied(correspondent.did, "policy", "didcomm")
            return Answer(wording.type("mediate-deny"), {})
        try:
            await self._grant(correspondent, account, origin)
        except NotEnrolled:
            self._journal.denied(correspondent.did, "rotated", "didcomm")
            return Answer(wording.type("mediate-deny"), {})
        if correspondent.draft03:
            await self._store.mark_draft03(correspondent.did)
        self._journal.granted(correspondent.did, "didcomm")
        routing_did = self._names.routing_did(did_of(correspondent.own_kid))
        return Answer(wording.type("mediate-grant"), grant_body(wording, routing_did))

    async def _grant(self, correspondent: Correspondent, account: Account | None, origin: Origin) -> None:
        """
        Make an account, unless it is there, and charge the address for it, unless it was there a short time ago.

        :param account: it may have been removed since the store has read it.
        :raise NotEnrolled: the DID was rotated away from.
        :raise RegistrationLimited: it is one too many; likewise RegistrationsFull.
        """
        if account is not None:
            await self._store.grant(correspondent.did)
            return
        # The long form of a did:peer:4 is kept as well.
        did, long = correspondent.did, correspondent.document.did
        size = len(did) + (len(long) if long != did else 0)
        await self._quota.enrol(origin.peer, size)
        try:
            await self._store.grant(did)
        except MediatorError:
            self._quota.give_back(origin.peer, size, 1)
            raise

    async def update(self, received: Received, account: Account, origin: Origin) -> Answer:
        """One result an entry, in order; what does not concern the store is refused here."""
        wording = WORDING[received.message.type.major]
        updates = read_updates(received.message.object())
        proven = await self._ownership.proven(received, account, origin)
        try:
            allowed = [self._is_sane(one) and await self._may_add(one, account, proven) for one in updates]
            wanted = [
                (registered_as(one.recipient_did), cast(Action, one.action)) for one in compress(updates, allowed)
            ]
            charged = await self._charge(wanted, account, origin)
        except (StoreUnavailable, RateLimited):
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
            self._quota.give_back(origin.peer, max(charged - stored, 0))
        except StoreUnavailable:
            self._quota.give_back(origin.peer, charged)
            results = ["server_error" if fine else "client_error" for fine in allowed]
        except MediatorError:
            self._quota.give_back(origin.peer, charged)
            await self._ownership.forget(proven)
            raise
        done = [one.action for one, result in zip(updates, results, strict=True) if result == "success"]
        self._journal.registered(account.did, done.count("add"), done.count("remove"))
        return Answer(wording.type(wording.update_response), updated_body(updates, results))

    async def _charge(self, wanted: Sequence[tuple[str, Action]], account: Account, origin: Origin) -> int:
        """
        Charge the address for what is to be added, or, if that is too much, for what the account does not have yet.

        :raise RegistrationLimited: it is too much; likewise RegistrationsFull.
        """
        names = [name for name, action in wanted if action == "add"]
        size = sum(map(len, names))
        try:
            await self._quota.register(origin.peer, size)
        except RateLimited:
            size = sum([len(name) for name in names if await self._is_new(name, account)])
            await self._quota.register(origin.peer, size)
        return size

    async def _is_new(self, name: str, account: Account) -> bool:
        """Whether the account would have it, and has not."""
        owner = await self._store.owner(name)
        return owner is None or (owner == account.did and name not in await self._store.spellings(name))

    async def _apply(
        self, account: Account, wanted: Sequence[tuple[str, Action]], proven: Collection[bytes]
    ) -> Sequence[str]:
        if not wanted:
            return []
        taken: dict[bytes, tuple[str, list[str]]] = {}
        if proven:
            claimed = [name for name, action in wanted if action == "add" and did_digest(name) in proven]
            taken = await self._take_over(claimed, account)
        results = await self._store.update(account.did, wanted, max_recipients=self._registration.max_recipients)
        if not taken:
            return results
        done = {did_digest(name) for (name, _), result in zip(wanted, results, strict=True) if result == "success"}
        for digest in taken.keys() - done:
            # There was no room for it: it stays where it was, rather than nowhere.
            owner, names = taken[digest]
            await self._store.update(owner, [(name, "add") for name in names], max_recipients=_NO_LIMIT)
            self._journal.registered(owner, len(names), 0)
        return results

    async def _may_add(self, update: Update, account: Account, proven: Collection[bytes]) -> bool:
        name = update.recipient_did
        if update.action != "add" or not self._registration.with_proof or did_digest(name) in proven:
            return True
        return is_same_did(name, account.did) or await self._store.owner(name) == account.did

    async def _take_over(self, names: Iterable[str], account: Account) -> dict[bytes, tuple[str, list[str]]]:
        """
        What belongs to its holder is taken off whoever else has registered it: by digest, off whom, and the spellings
        under which it was registered.
        """
        taken = {}
        for name in names:
            owner = await self._store.owner(name)
            if owner is not None and owner != account.did:
                spellings = await self._store.spellings(name)
                await self._store.update(owner, [(one, "remove") for one in spellings], max_recipients=0)
                self._journal.registered(owner, 0, len(spellings))
                taken[did_digest(name)] = owner, spellings
        return taken

    async def query(self, received: Received, account: Account, origin: Origin) -> Answer:
        """The account's recipient DIDs in order of registration."""
        wording: Wording = WORDING[received.message.type.major]
        page = read_page(received.message.object())
        dids, total = await self._store.recipients(account.did, offset=page.offset, limit=page.limit)
        return Answer(wording.type(wording.query_answer), page_body(wording, dids, page, total))

    def _may_have_it(self, did: str) -> bool:
        return self._registration.is_own(did) or self._registration.access.allows(did)

    def _is_sane(self, update: Update) -> bool:
        if update.action not in ("add", "remove"):
            return False
        did, hash_, fragment = update.recipient_did.partition("#")
        if not is_did(did) or (hash_ and not 0 < len(fragment) <= 256):
            return False
        return update.action == "remove" or not (self._names.owns(did) or self._is_denied(did))

    def _is_denied(self, did: str) -> bool:
        return self._registration.access.denies(did)
