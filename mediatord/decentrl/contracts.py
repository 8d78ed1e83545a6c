"""
Contracts between identities, and requests for them (DCTRL-0004 8.1 to 8.6, reference section 7).

Contracts between an identity and the mediator itself (DCTRL-0004 8.1, reference 7.6).
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
    """Keeps contracts for those who own them, and requests for those they are encrypted to; opens neither."""

    def __init__(self, context: DecentrlContext) -> None:
        self._context = context

    async def request(self, command_request: CommandRequest, request: RequestCommunicationContract) -> dict[str, Any]:
        """REQUEST_COMMUNICATION_CONTRACT to another identity; anybody with a DID may."""
        recipient = command_request.command.header.recipient_did
        kept = ContractRequest(
            id=self._context.new_id(),
            sender_did=command_request.sender,
            recipient_did=recipient,
            encrypted_contract_request=request.encrypted_contract_request,
            requestor_ephemeral_public_key=request.requestor_ephemeral_public_key,
        )
        await self._context.store.request_contract(command_request.guard(recipient=recipient), kept)
        self._context.event_pusher.contracts_updated(recipient)
        return {"code": "REQUESTED"}

    async def respond(
        self, command_request: CommandRequest, response: CommunicationContractResponse
    ) -> dict[str, Any]:
        """COMMUNICATION_CONTRACT_RESPONSE: the contract becomes that of the other participant."""
        addressed = command_request.command.header.recipient_did
        guard = command_request.guard(recipient=None if self._context.key_directory.owns(addressed) else addressed)
        other = _find_other_participant(response, command_request.sender)
        # Who is addressed, unless it is the mediator, has to be the one it is for (reference section 8).
        if other is None or guard.recipient not in (None, other):
            await self._context.refuse(guard, InvalidCommand())
        guard = command_request.guard(recipient=other)
        await self._keep(command_request, guard, owner=other, peer=command_request.sender)
        self._context.event_pusher.contracts_updated(other)
        return {}

    async def save(self, command_request: CommandRequest, save: SaveCommunicationContract) -> dict[str, Any]:
        """SAVE_COMMUNICATION_CONTRACT: the contract becomes that of the sender."""
        guard = await self._context.require_mediator_recipient(command_request)
        peer = _find_other_participant(save, command_request.sender)
        if peer is None:
            await self._context.refuse(guard, InvalidCommand())
        await self._keep(command_request, guard, owner=command_request.sender, peer=peer)
        self._context.event_pusher.contracts_updated(command_request.sender)
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
        """ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS, whose ids are those of requests."""
        guard = await self._context.require_mediator_recipient(command_request)
        ids = acknowledgement.communication_contract_ids
        await self._context.store.acknowledge_requests(guard, command_request.sender, ids)
        return {}

    async def _keep(self, command_request: CommandRequest, guard: CommandGuard, *, owner: str, peer: str) -> None:
        """
        :raise InvalidContractSignatures: a participant did not sign it.
        :raise InvalidCommand: it is longer than any contract.
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
            id=self._context.new_id(),
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
    """The other participant of a contract; None when the sender is none itself."""
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
    Whom the mediator serves, and for how long.

    :param seed: of its Ed25519 key, as it is now.
    :param prekeys: its X25519 private keys as they are now, the current one first.
    :param lifetime: seconds that a registration counts at most, whatever the contract says.
    :param own_only: whether to refuse DIDs that name another mediator, as it is now.
    :param access: whose list says who may register.
    """

    seed: Callable[[], bytes] = field(repr=False)
    prekeys: Callable[[], Sequence[bytes]] = field(repr=False)
    lifetime: float = 31_536_000.0
    own_only: Callable[[], bool] = lambda: False
    access: AccessList = field(default_factory=AccessList)


class RegistrationHandler:
    """Accepts identities. The only requests for a contract that are decrypted are those addressed to the mediator."""

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
                self._context.recorder.denied(command_request.sender, "policy", "decentrl")
            await self._context.refuse(command_request.guard(), error)
        now = self._context.clock.seconds()
        _, encryption_key = _new_pair()  # no event is ever exchanged under it, so the private half is not kept
        signed = _countersign(
            registration,
            mediator_did=command_request.command.header.recipient_did,
            encryption_key=encryption_key,
            seed=self._settings.seed(),
        )
        text = render_countersigned_contract(registration, signed)
        contract = Contract(
            id=self._context.new_id(),
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
        self._context.recorder.granted(command_request.sender, "decentrl")
        return {
            "code": "MEDIATOR_REGISTRATION_SUCCESS",
            "payload": {"signed_communication_contract": encoding.wrap_json_fragment(text)},
        }

    def _read(self, command_request: CommandRequest, request: RequestCommunicationContract) -> RegistrationRequest:
        """
        :raise InvalidCommand: it does not open, or its terms are not those of a registration of the sender here.
        :raise InvalidContractSignatures: the sender did not sign it.
        :raise UnauthorizedCommand: it is not one whom this mediator serves.
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
    """:raise ValueError: it was not sealed for this key."""
    return decrypt(sealed, derive_shared_secret(private, public))
