"""Coordinate Mediation 2.0 and 3.0: who is mediated for, and under which DIDs (reference section 5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from mediatord.didcomm.exchange import Answer, Correspondent, Origin, Received
from mediatord.errors import NotEnrolled, StoreUnavailable
from mediatord.interfaces import Account, Action, IStore
from mediatord.journal import Journal
from mediatord.protocol.didcomm.did import canonical, did_of, is_did
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


@dataclass(frozen=True, slots=True)
class Registration:
    """
    Who may have mediation, and how much.

    :param allowed: DIDs that get a grant; None for everybody.
    :param max_recipients: recipient DIDs of one account.
    :param is_own: whether a DID is one of the daemon's own, which get a grant whoever else does.
    """

    allowed: frozenset[str] | None = None
    max_recipients: int = 1000
    is_own: Callable[[str], bool] = lambda did: False


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

    def __init__(self, store: IStore, names: OwnNames, registration: Registration, journal: Journal) -> None:
        self._store = store
        self._names = names
        self._registration = registration
        self._journal = journal

    async def mediate_request(self, received: Received, correspondent: Correspondent) -> Answer:
        """`mediate-grant`, also when there is a grant already; `mediate-deny` by policy (reference 5.3)."""
        wording = WORDING[received.message.type.major]
        if not self._may_have_it(correspondent.did):
            self._journal.denied(correspondent.did, "policy", "didcomm")
            return Answer(wording.type("mediate-deny"), {})
        try:
            await self._store.grant(correspondent.did)
        except NotEnrolled:
            self._journal.denied(correspondent.did, "rotated", "didcomm")
            return Answer(wording.type("mediate-deny"), {})
        if correspondent.draft03:
            await self._store.mark_draft03(correspondent.did)
        self._journal.granted(correspondent.did, "didcomm")
        routing_did = self._names.routing_did(did_of(correspondent.own_kid))
        return Answer(wording.type("mediate-grant"), grant_body(wording, routing_did))

    async def update(self, received: Received, account: Account, origin: Origin) -> Answer:
        """One result an entry, in order; what does not concern the store is refused here."""
        wording = WORDING[received.message.type.major]
        updates = read_updates(received.message.object())
        wanted = [(self._registrable(one.recipient_did), one.action) for one in updates if self._is_sane(one)]
        try:
            outcome = iter(
                await self._store.update(
                    account.did,
                    [(did, cast(Action, action)) for did, action in wanted],
                    max_recipients=self._registration.max_recipients,
                )
                if wanted
                else []
            )
            results = [next(outcome) if self._is_sane(one) else "client_error" for one in updates]
        except StoreUnavailable:
            results = ["server_error" if self._is_sane(one) else "client_error" for one in updates]
        done = [one.action for one, result in zip(updates, results, strict=True) if result == "success"]
        self._journal.registered(account.did, done.count("add"), done.count("remove"))
        return Answer(wording.type(wording.update_response), updated_body(updates, results))

    async def query(self, received: Received, account: Account, origin: Origin) -> Answer:
        """The account's recipient DIDs in order of registration."""
        wording: Wording = WORDING[received.message.type.major]
        page = read_page(received.message.object())
        dids, total = await self._store.recipients(account.did, offset=page.offset, limit=page.limit)
        return Answer(wording.type(wording.query_answer), page_body(wording, dids, page, total))

    def _may_have_it(self, did: str) -> bool:
        allowed = self._registration.allowed
        return allowed is None or did in allowed or self._registration.is_own(did)

    def _is_sane(self, update: Update) -> bool:
        if update.action not in ("add", "remove"):
            return False
        did, hash_, fragment = update.recipient_did.partition("#")
        if not is_did(did) or (hash_ and not 0 < len(fragment) <= 256):
            return False
        return not (update.action == "add" and self._names.owns(did))

    def _registrable(self, recipient_did: str) -> str:
        """Under which name a recipient DID is kept: as it came, but a did:peer:4 short (reference 4.3)."""
        did, hash_, fragment = recipient_did.partition("#")
        return canonical(did) + hash_ + fragment
