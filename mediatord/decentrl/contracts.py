"""
Communication contracts between identities, requests for them (DCTRL-0004 8.1 to 8.6, reference section 7), and the
contract with the mediator that registers an identity (8.1, reference 7.6).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mediatord.clock import measure_time
from mediatord.decentrl.context import CommandRequest, DecentrlContext, build_page_reply, to_slice
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
from mediatord.protocol.decentrl.crypto import decode_public_key, decrypt, derive_shared_secret, generate_key_pair
from mediatord.protocol.decentrl.did_decentrl import parse_did
from mediatord.ratelimit.access_control import AccessList, RegistrationQuota
from mediatord.store.interfaces.decentrl import CommandGuard, Contract, ContractFilter, ContractRequest

_signatures_hold = measure_time(verify_contract_signatures)


class ContractHandler:
    """Stores contracts for their owners, and requests for their recipients; decrypts neither."""

    def __init__(self, context: DecentrlContext) -> None:
        self._context = context

    async def request(self, command_request: CommandRequest, request: RequestCommunicationContract) -> dict[str, Any]:
        """REQUEST_COMMUNICATION_CONTRACT to another identity; the sender need not be registered."""
        recipient = command_request.command.header.recipient_did
        kept = ContractRequest(
            id=self._context.new_id(self._context.clock.seconds()),
            sender_did=command_request.sender,
            recipient_did=recipient,
            encrypted_contract_request=request.encrypted_contract_request,
            requestor_ephemeral_public_key=request.requestor_ephemeral_public_key,
        )
        await self._context.store.request_contract(command_request.guard(recipient=recipient), kept)
        self._context.event_pusher.notify_contracts_updated(recipient)
        return {"code": "REQUESTED"}

    async def respond(
        self, command_request: CommandRequest, response: CommunicationContractResponse
    ) -> dict[str, Any]:
        """COMMUNICATION_CONTRACT_RESPONSE: stores the contract for the other participant."""
        addressed = command_request.command.header.recipient_did
        guard = command_request.guard(recipient=None if self._context.key_directory.owns(addressed) else addressed)
        other = _find_other_participant(response, command_request.sender)
        # A recipient other than the mediator has to be that participant (reference section 8).
        if other is None or guard.recipient not in (None, other):
            await self._context.refuse(guard, InvalidCommand())
        guard = command_request.guard(recipient=other)
        await self._keep(command_request, guard, owner=other, peer=command_request.sender)
        self._context.event_pusher.notify_contracts_updated(other)
        return {}

    async def save(self, command_request: CommandRequest, save: SaveCommunicationContract) -> dict[str, Any]:
        """SAVE_COMMUNICATION_CONTRACT: stores the contract for the sender."""
        guard = await self._context.require_mediator_recipient(command_request)
        peer = _find_other_participant(save, command_request.sender)
        if peer is None:
            await self._context.refuse(guard, InvalidCommand())
        await self._keep(command_request, guard, owner=command_request.sender, peer=peer)
        self._context.event_pusher.notify_contracts_updated(command_request.sender)
        return {}

    async def query(self, command_request: CommandRequest, query: QueryCommunicationContracts) -> dict[str, Any]:
        """QUERY_COMMUNICATION_CONTRACTS."""
        await self._context.store.check_guard(await self._context.require_mediator_recipient(command_request))
        asked = query.filter
        wanted = ContractFilter(asked.did, asked.expires_at_before, asked.expires_at_after)
        found = await self._context.store.contracts(command_request.sender, wanted, to_slice(query.pagination))
        items = [
            {"id": one.id, "signed_communication_contract": encoding.wrap_json_fragment(one.text)}
            for one in found.items
        ]
        return build_page_reply("communication_contracts", items, found, query.pagination)

    async def query_requests(
        self, command_request: CommandRequest, query: QueryPendingCommunicationContractRequests
    ) -> dict[str, Any]:
        """QUERY_PENDING_COMMUNICATION_CONTRACT_REQUESTS."""
        await self._context.store.check_guard(await self._context.require_mediator_recipient(command_request))
        found = await self._context.store.contract_requests(command_request.sender, to_slice(query.pagination))
        items = [
            {
                "id": one.id,
                "sender_did": one.sender_did,
                "encrypted_contract_request": one.encrypted_contract_request,
                "requestor_ephemeral_public_key": one.requestor_ephemeral_public_key,
            }
            for one in found.items
        ]
        return build_page_reply("pending_communication_contract_requests", items, found, query.pagination)

    async def acknowledge_requests(
        self, command_request: CommandRequest, acknowledgement: AcknowledgePendingCommunicationContractRequests
    ) -> dict[str, Any]:
        """ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS; its ids are those of the requests."""
        guard = await self._context.require_mediator_recipient(command_request)
        ids = acknowledgement.communication_contract_ids
        await self._context.store.acknowledge_requests(guard, command_request.sender, ids)
        return {}

    async def _keep(self, command_request: CommandRequest, guard: CommandGuard, *, owner: str, peer: str) -> None:
        """
        :raise InvalidContractSignatures: a participant did not sign it.
        :raise InvalidCommand: it is longer than a contract may be.
        """
        signed: Mapping[str, Any] = command_request.command.document["signed_communication_contract"]
        if not any(
            _signatures_hold(signed, one) for one in self._context.key_directory.signing_key_lookups((owner, peer))
        ):
            await self._context.refuse(guard, InvalidContractSignatures())
        try:
            text = command_request.command.text("signed_communication_contract")
        except InvalidCommand as error:
            await self._context.refuse(guard, error)
        if len(text) > MAX_CONTRACT_BYTES:
            await self._context.refuse(guard, InvalidCommand())
        contract = Contract(
            id=self._context.new_id(self._context.clock.seconds()),
            owner_did=owner,
            peer_did=peer,
            expires_at=float(signed["communication_contract"]["expires_at"]),
            digest=compute_contract_digest(signed),
            text=text,
        )
        await self._context.store.save_contract(guard, contract)


def _find_other_participant(
    given: CommunicationContractResponse | SaveCommunicationContract, sender: str
) -> str | None:
    """The other participant of a contract, or None if the sender is not a participant."""
    contract = given.signed_communication_contract.communication_contract
    participants = [contract.requestor_did, contract.recipient_did]
    if sender not in participants:
        return None
    participants.remove(sender)
    return participants[0]


_new_pair, _countersign = measure_time(generate_key_pair), measure_time(countersign_contract)
_verify_request_signature = measure_time(verify_request_signature)


@dataclass(frozen=True, slots=True)
class DecentrlRegistrationSettings:
    """
    Which identities may register, and for how long.

    :param seed: returns the seed of the mediator's current Ed25519 key.
    :param prekeys: returns its X25519 private keys, the current one first.
    :param lifetime: seconds that a registration lasts at most, whatever the contract says.
    :param own_only: returns whether to refuse DIDs that name another mediator.
    :param access: access list for registrations.
    """

    seed: Callable[[], bytes] = field(repr=False)
    prekeys: Callable[[], Sequence[bytes]] = field(repr=False)
    lifetime: float = 31_536_000.0
    own_only: Callable[[], bool] = lambda: False
    access: AccessList = field(default_factory=AccessList)


class RegistrationHandler:
    """Registers identities. Contract requests addressed to the mediator are the only ones that it decrypts."""

    def __init__(
        self, context: DecentrlContext, settings: DecentrlRegistrationSettings, quota: RegistrationQuota
    ) -> None:
        self._context = context
        self._settings = settings
        self._quota = quota

    async def register(
        self, command_request: CommandRequest, request: RequestCommunicationContract
    ) -> dict[str, Any]:
        """REQUEST_COMMUNICATION_CONTRACT to the mediator."""
        try:
            registration = self._read(command_request, request)
        except MediatorError as error:
            if isinstance(error, UnauthorizedCommand):
                self._context.recorder.record_denial(command_request.sender, "policy", "decentrl")
            await self._context.refuse(command_request.guard(), error)
        now = self._context.clock.seconds()
        _, encryption_key = _new_pair()  # no event is encrypted to it, so the private key is not kept
        signed = _countersign(
            registration,
            mediator_did=command_request.command.header.recipient_did,
            encryption_key=encryption_key,
            seed=self._settings.seed(),
        )
        text = render_countersigned_contract(registration, signed)
        contract = Contract(
            id=self._context.new_id(self._context.clock.seconds()),
            owner_did=None,
            peer_did=command_request.sender,
            expires_at=min(float(registration.contract["expires_at"]), now + self._settings.lifetime),
            digest=compute_contract_digest(signed),
            text=text,
        )
        await self._quota.charge_account(command_request.peer, len(text))
        try:
            await self._context.store.save_contract(command_request.guard(), contract)
        except MediatorError:
            self._quota.refund(command_request.peer, len(text), 1)
            raise
        self._context.recorder.record_grant(command_request.sender, "decentrl")
        return {
            "code": "MEDIATOR_REGISTRATION_SUCCESS",
            "payload": {"signed_communication_contract": encoding.wrap_json_fragment(text)},
        }

    def _read(self, command_request: CommandRequest, request: RequestCommunicationContract) -> RegistrationRequest:
        """
        :raise InvalidCommand: it cannot be decrypted, or is no registration of the sender with this mediator.
        :raise InvalidContractSignatures: the sender did not sign it.
        :raise UnauthorizedCommand: the sender may not register.
        """
        registration = parse_registration_request(self._open(request))
        contract = registration.contract
        mediator = command_request.command.header.recipient_did
        if (contract.get("requestor_did"), contract.get("recipient_did")) != (command_request.sender, mediator):
            raise InvalidCommand
        if contract.get("recipient_signing_key_id", f"{mediator}#signing") != f"{mediator}#signing":
            raise InvalidCommand
        if not contract["expires_at"] > self._context.clock.seconds():
            raise InvalidCommand
        key = self._context.key_directory.signing_key(command_request.sender, contract["requestor_signing_key_id"])
        if key is None or not _verify_request_signature(registration, key):
            raise InvalidContractSignatures
        if not self._serves(command_request.sender):
            raise UnauthorizedCommand
        return registration

    def _open(self, request: RequestCommunicationContract) -> bytes:
        try:
            public = decode_public_key(request.requestor_ephemeral_public_key)
        except ValueError:
            raise InvalidCommand from None
        for private in self._settings.prekeys():
            try:
                return _open_contract_request(request.encrypted_contract_request, private, public)
            except ValueError:
                continue
        raise InvalidCommand

    def _serves(self, did: str) -> bool:
        if not self._settings.access.allows(did):
            return False
        return not self._settings.own_only() or self._context.key_directory.owns(parse_did(did).mediator_did)


@measure_time
def _open_contract_request(sealed: str, private: bytes, public: bytes) -> bytes:
    """:raise ValueError: it was not encrypted to this key."""
    return decrypt(sealed, derive_shared_secret(private, public))
