"""Getting contracts: with a mediator, which is registration, and with other identities (DCTRL-0004 8.1 to 8.6)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from twisted.internet.interfaces import IReactorTime

from mediatord.protocol.decentrl.did import parse_did
from mediatord.wallet.decentrl.client import Client
from mediatord.wallet.decentrl.contracts import (
    YEAR_SECONDS,
    Agreement,
    Proposal,
    accept,
    conclude,
    propose,
)
from mediatord.wallet.decentrl.identity import Identity
from mediatord.wallet.decentrl.mediator import Directory, Mediator
from mediatord.wallet.decentrl.replies import CONTRACTS, PENDING_REQUESTS, ContractRequest, KeptContract, Page
from mediatord.wallet.mediator import HTTP
from mediatord.wallet.packing import Unreadable

MANY = 100


class Contracting(Client):
    """
    A wallet's contracts. Every method that asks a mediator raises :class:`~mediatord.wallet.decentrl.client.Refused`
    when it refuses, and :class:`~mediatord.wallet.packing.Unreadable` when its answer does not pass the checks.

    :ivar agreements: contracts with other identities, as far as they are known.
    :ivar proposals: contracts that the other side has not answered yet.
    """

    def __init__(
        self,
        identity: Identity,
        mediator: Mediator,
        http: HTTP,
        clock: IReactorTime,
        directory: Directory | None = None,
    ) -> None:
        super().__init__(identity, mediator, http, clock, directory)
        self.agreements: list[Agreement] = []
        self.proposals: list[Proposal] = []

    async def register(self, lifetime: float = YEAR_SECONDS) -> Agreement:
        """
        Make a contract with our mediator, and so be registered.

        :param lifetime: seconds.
        """
        proposal = propose(self.identity, self.mediator.did, self.now(), lifetime)
        reply = await self.ask(proposal.payload(self.mediator.prekey))
        try:
            signed = reply["payload"]["signed_communication_contract"]
        except (KeyError, TypeError):
            raise Unreadable("a registration without a contract") from None
        return conclude(proposal, signed, self.directory.signing_key)

    async def request_contract(self, peer_did: str, lifetime: float = YEAR_SECONDS) -> Proposal:
        """Ask another identity for a contract, at the mediator that its DID names."""
        at = await self.directory.mediator_of(peer_did)
        proposal = propose(self.identity, peer_did, self.now(), lifetime)
        await self.ask(proposal.payload(parse_did(peer_did).prekey), peer_did, at=at)
        self.proposals.append(proposal)
        return proposal

    async def pending_requests(self, page: int = 0, page_size: int = MANY) -> Page[ContractRequest]:
        """Requests for a contract with us."""
        return await self.find(PENDING_REQUESTS, page, page_size)

    def accept(self, request: ContractRequest) -> Agreement:
        """
        Sign what somebody proposed; the other side does not know yet.

        :raise Unreadable: a check failed.
        """
        agreement = accept(request, self.identity, self.now())
        self.agreements.append(agreement)
        return agreement

    async def save_contract(self, agreement: Agreement) -> None:
        """Have our mediator keep a contract: from then on the other side may write to us."""
        await self.ask({"type": "SAVE_COMMUNICATION_CONTRACT", "signed_communication_contract": agreement.signed})

    async def respond(self, agreement: Agreement) -> None:
        """Give a contract to the other side, at its own mediator: from then on we may write to it."""
        at = await self.directory.mediator_of(agreement.peer_did)
        payload = {"type": "COMMUNICATION_CONTRACT_RESPONSE", "signed_communication_contract": agreement.signed}
        await self.ask(payload, agreement.peer_did, at=at)

    async def acknowledge_requests(self, requests: Iterable[ContractRequest | str]) -> None:
        """Have requests for a contract removed."""
        ids = [one if isinstance(one, str) else one.id for one in requests]
        await self.ask(
            {"type": "ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS", "communication_contract_ids": ids}
        )

    async def contracts(self, page: int = 0, page_size: int = MANY, **wanted: Any) -> Page[KeptContract]:
        """
        Contracts that our mediator keeps for us.

        :param wanted: `did`, `expires_at_before`, `expires_at_after` (Unix seconds).
        """
        return await self.find(CONTRACTS, page, page_size, wanted)

    async def conclude(self) -> list[Agreement]:
        """
        Look whether the other sides have answered our proposals; the contracts that came of it.

        :raise Unreadable: an answer is not what was proposed.
        """
        found = []
        for peer_did in {one.recipient_did for one in self.proposals}:
            for kept in await self._contracts_with(peer_did):
                if (proposal := self._proposal_of(kept)) is not None:
                    found.append(conclude(proposal, kept.signed_communication_contract, self.directory.signing_key))
                    self.agreements.append(found[-1])
                    self.proposals.remove(proposal)
        return found

    async def _contracts_with(self, peer_did: str) -> list[KeptContract]:
        found = await self.contracts(did=peer_did)
        kept = list(found.items)
        while len(kept) < found.total and found.items:
            found = await self.contracts(found.page + 1, did=peer_did)
            kept.extend(found.items)
        return kept

    def _proposal_of(self, kept: KeptContract) -> Proposal | None:
        terms = kept.signed_communication_contract.get("communication_contract")
        public = terms.get("requestor_encryption_public_key") if isinstance(terms, dict) else None
        return next((one for one in self.proposals if one.public == public), None)

    def agreements_with(self, peer_did: str) -> list[Agreement]:
        """The contracts with somebody that have not expired, those that last longest first."""
        live = [one for one in self.agreements if one.peer_did == peer_did and one.expires_at > self.now()]
        return sorted(live, key=lambda one: one.expires_at, reverse=True)


async def make_contract(
    requestor: Contracting, recipient: Contracting, lifetime: float = YEAR_SECONDS
) -> tuple[Agreement, Agreement]:
    """
    All that two wallets do to get a contract (reference 7.5); how the requestor sees it, and how the recipient does.

    :param lifetime: seconds.
    """
    proposal = await requestor.request_contract(recipient.did, lifetime)
    waiting = (await recipient.pending_requests()).items
    request = next(one for one in waiting if one.requestor_ephemeral_public_key == proposal.public)
    accepted = recipient.accept(request)
    await recipient.save_contract(accepted)
    await recipient.respond(accepted)
    await recipient.acknowledge_requests([request])
    concluded = await requestor.conclude()
    return next(one for one in concluded if one.id == accepted.id), accepted
