"""
Coordinate Mediation 1.0: grants and recipient keys (Aries RFC 0211).

An account is named by the key of its wallet, and a recipient key by its did:key, so both are the same as those of a
v2 wallet with that DID. There is no proof of ownership in v1 but for the key of the connection itself: any other key
belongs to the account that has registered it first, until its owner takes it over with the proof of v2.
"""

from __future__ import annotations

from contextlib import suppress

from mediatord.didcomm.account_registrar import AccountRegistrar
from mediatord.didcomm_v1.context import V1AccountRequestHandler, V1Context, V1Request, V1RequestHandler
from mediatord.errors import AuthcryptRequired, StoreUnavailable
from mediatord.protocol.canonical_did import compute_did_digest
from mediatord.protocol.didcomm.coordinate_mediation import RecipientUpdate, parse_updates
from mediatord.protocol.didcomm_v1.coordinate_mediation import (
    make_denial,
    make_grant,
    make_keylist,
    make_update_response,
    parse_page,
    parse_recipient,
)
from mediatord.protocol.didcomm_v1.keys import find_spelling
from mediatord.protocol.didcomm_v1.message import V1Answer
from mediatord.store.interfaces.store import Account


class V1Mediation:
    """Serves coordination requests, one method for each."""

    def __init__(self, context: V1Context) -> None:
        self._context = context
        self._common = context.common
        self._registrar = AccountRegistrar(context.common, "didcomm_v1")

    def handlers(self) -> dict[str, V1RequestHandler]:
        """Requests of any connected wallet."""
        return {"coordinate-mediation/1.0/mediate-request": self.mediate_request}

    def account_handlers(self) -> dict[str, V1AccountRequestHandler]:
        """Requests of enrolled accounts."""
        return {
            "coordinate-mediation/1.0/keylist-update": self.update,
            "coordinate-mediation/1.0/keylist-query": self.query,
        }

    async def mediate_request(self, request: V1Request) -> V1Answer:
        """
        `mediate-grant`, also when there is a grant already; `mediate-deny` by policy.

        :raise AuthcryptRequired: the sender is not authenticated.
        :raise RegistrationLimitExceeded: it is one account too many; likewise RegistrationCapacityExceeded.
        """
        context, common, sender = self._context, self._common, request.received.sender
        if sender is None:
            raise AuthcryptRequired
        if common.with_proof and request.account is None:
            # As it could not prove that a key is its own, it could register none.
            common.recorder.record_denial(sender, "policy", "didcomm_v1")
            return make_denial()
        if not await self._registrar.grant(sender, request.account, request.origin.peer, len(sender)):
            return make_denial()
        common.recorder.record_grant(sender, "didcomm_v1")
        return make_grant(f"{context.public_url}/didcomm", context.identity().routing_key.did_key)

    async def update(self, request: V1Request, account: Account) -> V1Answer:
        """
        One result an entry, in order; invalid entries are refused without the store.

        :raise InvalidUpdates: there is no list of updates.
        :raise RegistrationLimitExceeded: the address has registered too much; likewise RegistrationCapacityExceeded.
        """
        updates = parse_updates(request.message.members)
        names = [parse_recipient(one.recipient_did) for one in updates]
        # An empty name is no DID, so it is refused.
        wanted = [RecipientUpdate(name or "", one.action) for name, one in zip(names, updates, strict=True)]
        # The envelope proves the wallet's own key, and no other one.
        proven = (compute_did_digest(account.did),)
        results = await self._registrar.update_recipients(account, wanted, request.origin.peer, proven)
        await self._record_spelling(request, [one for name, one in zip(names, updates, strict=True) if name])
        return make_update_response(updates, results)

    async def query(self, request: V1Request, account: Account) -> V1Answer:
        """The account's recipient keys in order of registration, as the wallet spells keys."""
        page = parse_page(request.message.members)
        listing = self._common.store.list_recipients(account.did, offset=page.offset, limit=page.limit)
        names, total = await listing
        return make_keylist(names, request.spelling, page, total)

    async def _record_spelling(self, request: V1Request, updates: list[RecipientUpdate]) -> None:
        """Spell keys as the wallet did last."""
        connection = request.received.connection
        if connection is None or not updates:
            return
        has_base58_keys = find_spelling(updates[-1].recipient_did) == "base58"
        if has_base58_keys != connection.has_base58_keys:
            # The keys are registered, whether this is stored or not.
            with suppress(StoreUnavailable):
                await self._context.connections.change_connection(connection.account, has_base58_keys=has_base58_keys)
