"""Contracts between identities, and requests for them (DCTRL-0004 8.1 to 8.6, reference section 7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mediatord.decentrl.desk import Desk, page, slice_of
from mediatord.decentrl.exchange import Order
from mediatord.errors import InvalidCommand, InvalidContractSignatures
from mediatord.interfaces.decentrl import Contract, ContractFilter, ContractRequest, Guard
from mediatord.protocol import jsontext
from mediatord.protocol.decentrl.contracts import contract_digest, signatures_hold
from mediatord.protocol.decentrl.shapes import (
    LONGEST_CONTRACT,
    AcknowledgePendingCommunicationContractRequests,
    CommunicationContractResponse,
    QueryCommunicationContracts,
    QueryPendingCommunicationContractRequests,
    RequestCommunicationContract,
    SaveCommunicationContract,
)
from mediatord.stopwatch import timed

_signatures_hold = timed(signatures_hold)


class Contracts:
    """Keeps contracts for those who own them, and requests for those they are encrypted to; opens neither."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def request(self, order: Order, request: RequestCommunicationContract) -> dict[str, Any]:
        """REQUEST_COMMUNICATION_CONTRACT to another identity; anybody with a DID may."""
        recipient = order.command.recipient_did
        kept = ContractRequest(
            id=self._desk.new_id(),
            sender_did=order.sender,
            recipient_did=recipient,
            encrypted_contract_request=request.encrypted_contract_request,
            requestor_ephemeral_public_key=request.requestor_ephemeral_public_key,
        )
        await self._desk.store.request_contract(order.guard(recipient=recipient), kept)
        self._desk.pushing.contracts_updated(recipient)
        return {"code": "REQUESTED"}

    async def respond(self, order: Order, response: CommunicationContractResponse) -> dict[str, Any]:
        """COMMUNICATION_CONTRACT_RESPONSE: the contract becomes that of the other participant."""
        addressed = order.command.recipient_did
        guard = order.guard(recipient=None if self._desk.directory.owns(addressed) else addressed)
        other = _peer(response, order.sender)
        # Who is addressed, unless it is the mediator, has to be the one it is for (reference section 8).
        if other is None or guard.recipient not in (None, other):
            await self._desk.refuse(guard, InvalidCommand())
        guard = order.guard(recipient=other)
        await self._keep(order, guard, owner=other, peer=order.sender)
        self._desk.pushing.contracts_updated(other)
        return {}

    async def save(self, order: Order, save: SaveCommunicationContract) -> dict[str, Any]:
        """SAVE_COMMUNICATION_CONTRACT: the contract becomes that of the sender."""
        guard = await self._desk.own(order)
        peer = _peer(save, order.sender)
        if peer is None:
            await self._desk.refuse(guard, InvalidCommand())
        await self._keep(order, guard, owner=order.sender, peer=peer)
        self._desk.pushing.contracts_updated(order.sender)
        return {}

    async def query(self, order: Order, query: QueryCommunicationContracts) -> dict[str, Any]:
        """QUERY_COMMUNICATION_CONTRACTS."""
        await self._desk.store.admit(await self._desk.own(order))
        asked = query.filter
        wanted = ContractFilter(asked.did, asked.expires_at_before, asked.expires_at_after)
        found = await self._desk.store.contracts(order.sender, wanted, slice_of(query.pagination))
        items = [{"id": one.id, "signed_communication_contract": jsontext.verbatim(one.text)} for one in found.items]
        return page("communication_contracts", items, found, query.pagination)

    async def query_requests(self, order: Order, query: QueryPendingCommunicationContractRequests) -> dict[str, Any]:
        """QUERY_PENDING_COMMUNICATION_CONTRACT_REQUESTS."""
        await self._desk.store.admit(await self._desk.own(order))
        found = await self._desk.store.contract_requests(order.sender, slice_of(query.pagination))
        items = [
            {
                "id": one.id,
                "sender_did": one.sender_did,
                "encrypted_contract_request": one.encrypted_contract_request,
                "requestor_ephemeral_public_key": one.requestor_ephemeral_public_key,
            }
            for one in found.items
        ]
        return page("pending_communication_contract_requests", items, found, query.pagination)

    async def acknowledge_requests(
        self, order: Order, acknowledgement: AcknowledgePendingCommunicationContractRequests
    ) -> dict[str, Any]:
        """ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS, whose ids are those of requests."""
        guard = await self._desk.own(order)
        ids = acknowledgement.communication_contract_ids
        await self._desk.store.acknowledge_requests(guard, order.sender, ids)
        return {}

    async def _keep(self, order: Order, guard: Guard, *, owner: str, peer: str) -> None:
        """
        :raise InvalidContractSignatures: a participant did not sign it.
        :raise InvalidCommand: it is longer than any contract.
        """
        signed: Mapping[str, Any] = order.command.document["signed_communication_contract"]
        if not any(_signatures_hold(signed, one) for one in self._desk.directory.lookups((owner, peer))):
            await self._desk.refuse(guard, InvalidContractSignatures())
        try:
            text = order.command.text("signed_communication_contract")
        except InvalidCommand as error:
            await self._desk.refuse(guard, error)
        if len(text) > LONGEST_CONTRACT:
            await self._desk.refuse(guard, InvalidCommand())
        contract = Contract(
            id=self._desk.new_id(),
            owner_did=owner,
            peer_did=peer,
            expires_at=float(signed["communication_contract"]["expires_at"]),
            digest=contract_digest(signed),
            text=text,
        )
        await self._desk.store.save_contract(guard, contract)


def _peer(given: CommunicationContractResponse | SaveCommunicationContract, sender: str) -> str | None:
    """The other participant of a contract; None when the sender is none itself."""
    contract = given.signed_communication_contract.communication_contract
    participants = [contract.requestor_did, contract.recipient_did]
    if sender not in participants:
        return None
    participants.remove(sender)
    return participants[0]
