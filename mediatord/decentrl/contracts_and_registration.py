"""
Commands about communication contracts between identities, requests for them (DCTRL-0004 8.1 to 8.6, reference section
7), and the contract with the mediator that registers an identity (8.1, reference 7.6). Only requests for the last are
decrypted. Each command is a function that returns the members of its reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mediatord.decentrl.context import (
    CommandRequest,
    DecentrlContext,
    ReplyBody,
    build_page,
    decrypt_for_mediator,
    to_slice,
)
from mediatord.errors import InvalidCommand, InvalidContractSignatures, MediatorError, UnauthorizedCommand
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.commands import (
    MAX_CONTRACT_BYTES,
    AcknowledgePendingCommunicationContractRequests,
    CommunicationContractResponse,
    QueryCommunicationContracts,
    QueryPendingCommunicationContractRequests,
    RequestCommunicationContract,
    SaveCommunicationContract,
)
from mediatord.protocol.decentrl.contracts import (
    RegistrationRequest,
    compute_contract_digest,
    countersign_contract,
    parse_registration_request,
    render_countersigned_contract,
    verify_contract_signatures,
    verify_request_signature,
)
from mediatord.protocol.decentrl.crypto import generate_key_pair
from mediatord.protocol.decentrl.did_decentrl import parse_did
from mediatord.runtime.request_time import measure_time
from mediatord.store.interfaces.decentrl import CommandGuard, Contract, ContractFilter, ContractRequest

_signatures_hold = measure_time(verify_contract_signatures)
_verify_request_signature = measure_time(verify_request_signature)
_new_pair, _countersign = measure_time(generate_key_pair), measure_time(countersign_contract)


async def request_contract(
    context: DecentrlContext, request: CommandRequest, payload: RequestCommunicationContract
) -> ReplyBody:
    """REQUEST_COMMUNICATION_CONTRACT: registers with the mediator; queued for another identity."""
    recipient = request.recipient
    if context.key_directory.owns(recipient):
        return await _register(context, request, payload)
    kept = ContractRequest(
        id=context.new_id(context.clock.seconds()),
        sender_did=request.sender,
        recipient_did=recipient,
        encrypted_contract_request=payload.encrypted_contract_request,
        requestor_ephemeral_public_key=payload.requestor_ephemeral_public_key,
    )
    await context.store.request_contract(replace(request.guard, recipient=recipient), kept)
    context.event_pusher.notify_contracts_updated(recipient)
    return {"code": "REQUESTED"}


async def respond(
    context: DecentrlContext, request: CommandRequest, payload: CommunicationContractResponse
) -> ReplyBody:
    """COMMUNICATION_CONTRACT_RESPONSE: stores the contract for the other participant."""
    addressed, guard = request.recipient, request.guard
    other = _find_other_participant(payload, request.sender)
    is_own = context.key_directory.owns(addressed)
    # A recipient other than the mediator has to be that participant (reference section 8).
    if other is None or not (is_own or addressed == other):
        await context.refuse(guard if is_own else replace(guard, recipient=addressed), InvalidCommand())
    await _keep(context, request, replace(guard, recipient=other), owner=other, peer=request.sender)
    return {}


async def save(context: DecentrlContext, request: CommandRequest, payload: SaveCommunicationContract) -> ReplyBody:
    """SAVE_COMMUNICATION_CONTRACT: stores the contract for the sender."""
    peer = _find_other_participant(payload, request.sender)
    if peer is None:
        await context.refuse(request.guard, InvalidCommand())
    await _keep(context, request, request.guard, owner=request.sender, peer=peer)
    return {}


async def query(context: DecentrlContext, request: CommandRequest, payload: QueryCommunicationContracts) -> ReplyBody:
    """QUERY_COMMUNICATION_CONTRACTS."""
    asked = payload.filter
    wanted = ContractFilter(asked.did, asked.expires_at_before, asked.expires_at_after)
    found = await context.store.contracts(request.sender, wanted, to_slice(payload.pagination))
    items = [
        {"id": one.id, "signed_communication_contract": encoding.wrap_json_fragment(one.text)} for one in found.items
    ]
    return {"payload": build_page("communication_contracts", items, found, payload.pagination)}


async def query_requests(
    context: DecentrlContext, request: CommandRequest, payload: QueryPendingCommunicationContractRequests
) -> ReplyBody:
    """QUERY_PENDING_COMMUNICATION_CONTRACT_REQUESTS."""
    found = await context.store.contract_requests(request.sender, to_slice(payload.pagination))
    items = [
        {
            "id": one.id,
            "sender_did": one.sender_did,
            "encrypted_contract_request": one.encrypted_contract_request,
            "requestor_ephemeral_public_key": one.requestor_ephemeral_public_key,
        }
        for one in found.items
    ]
    return {"payload": build_page("pending_communication_contract_requests", items, found, payload.pagination)}


async def acknowledge_requests(
    context: DecentrlContext, request: CommandRequest, payload: AcknowledgePendingCommunicationContractRequests
) -> ReplyBody:
    """ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS; its ids are those of the requests."""
    await context.store.acknowledge_requests(request.guard, request.sender, payload.communication_contract_ids)
    return {}


def _find_other_participant(
    given: CommunicationContractResponse | SaveCommunicationContract, sender: str
) -> str | None:
    """The other participant of a contract, or None if the sender is not a participant."""
    contract = given.signed_communication_contract.communication_contract
    others = {contract.requestor_did: contract.recipient_did, contract.recipient_did: contract.requestor_did}
    return others.get(sender)


async def _keep(
    context: DecentrlContext, request: CommandRequest, guard: CommandGuard, *, owner: str, peer: str
) -> None:
    """
    Store a contract and notify its owner.

    :raise InvalidContractSignatures: a participant did not sign it.
    :raise InvalidCommand: it is longer than a contract may be.
    """
    signed: Mapping[str, Any] = request.command.document["signed_communication_contract"]
    if not any(_signatures_hold(signed, one) for one in context.key_directory.signing_key_lookups((owner, peer))):
        await context.refuse(guard, InvalidContractSignatures())
    try:
        text = request.command.text("signed_communication_contract")
        if len(text) > MAX_CONTRACT_BYTES:
            raise InvalidCommand
    except InvalidCommand as error:
        await context.refuse(guard, error)
    contract = Contract(
        id=context.new_id(context.clock.seconds()),
        owner_did=owner,
        peer_did=peer,
        expires_at=float(signed["communication_contract"]["expires_at"]),
        digest=compute_contract_digest(signed),
        text=text,
    )
    await context.store.save_contract(guard, contract)
    context.event_pusher.notify_contracts_updated(owner)


async def _register(
    context: DecentrlContext, request: CommandRequest, payload: RequestCommunicationContract
) -> ReplyBody:
    try:
        registration = _read_registration(context, request, payload)
    except MediatorError as error:
        if isinstance(error, UnauthorizedCommand):
            context.recorder.record_denial(request.sender, "policy", "decentrl")
        await context.refuse(request.guard, error)
    now = context.clock.seconds()
    _, encryption_key = _new_pair()  # no event is encrypted to it, so the private key is not kept
    signed = _countersign(
        registration,
        mediator_did=request.recipient,
        encryption_key=encryption_key,
        seed=context.get_signing_seed(),
    )
    text = render_countersigned_contract(registration, signed)
    contract = Contract(
        id=context.new_id(now),
        owner_did=None,
        peer_did=request.sender,
        expires_at=min(float(registration.contract["expires_at"]), now + context.registration_lifetime),
        digest=compute_contract_digest(signed),
        text=text,
    )
    await context.quota.charge(request.record.peer, len(text), 1)
    try:
        await context.store.save_contract(request.guard, contract)
    except MediatorError:
        context.quota.refund(request.record.peer, len(text), 1)
        raise
    context.recorder.record_grant(request.sender, "decentrl")
    return {
        "code": "MEDIATOR_REGISTRATION_SUCCESS",
        "payload": {"signed_communication_contract": encoding.wrap_json_fragment(text)},
    }


def _read_registration(
    context: DecentrlContext, request: CommandRequest, payload: RequestCommunicationContract
) -> RegistrationRequest:
    """
    :raise InvalidCommand: it cannot be decrypted, or is no registration of the sender with this mediator.
    :raise InvalidContractSignatures: the sender did not sign it.
    :raise UnauthorizedCommand: the sender may not register.
    """
    plaintext = decrypt_for_mediator(
        context, payload.encrypted_contract_request, payload.requestor_ephemeral_public_key
    )
    registration = parse_registration_request(plaintext)
    contract = registration.contract
    sender, mediator = request.sender, request.recipient
    if (contract.get("requestor_did"), contract.get("recipient_did")) != (sender, mediator):
        raise InvalidCommand
    if contract.get("recipient_signing_key_id", f"{mediator}#signing") != f"{mediator}#signing":
        raise InvalidCommand
    if not contract["expires_at"] > context.clock.seconds():
        raise InvalidCommand
    key = context.key_directory.signing_key(sender, contract["requestor_signing_key_id"])
    if key is None or not _verify_request_signature(registration, key):
        raise InvalidContractSignatures
    if not context.access.allows(sender):
        raise UnauthorizedCommand
    if context.own_only() and not context.key_directory.owns(parse_did(sender).mediator_did):
        raise UnauthorizedCommand
    return registration
