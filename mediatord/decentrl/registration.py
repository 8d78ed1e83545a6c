"""Contracts between an identity and the mediator itself (DCTRL-0004 8.1, reference 7.6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mediatord.admission import AccessList, RegistrationQuota
from mediatord.decentrl.desk import Desk
from mediatord.decentrl.exchange import Order
from mediatord.errors import InvalidCommand, InvalidContractSignatures, MediatorError, UnauthorizedCommand
from mediatord.interfaces.decentrl import Contract
from mediatord.protocol import jsontext
from mediatord.protocol.decentrl.contracts import (
    RegistrationRequest,
    contract_digest,
    countersign,
    countersigned_text,
    read_registration,
    request_signature_holds,
)
from mediatord.protocol.decentrl.did import parse_did
from mediatord.protocol.decentrl.sealing import decode_public_key, new_pair, open_sealed, shared_secret
from mediatord.protocol.decentrl.shapes import RequestCommunicationContract
from mediatord.stopwatch import timed

_new_pair, _countersign = timed(new_pair), timed(countersign)
_signature_holds = timed(request_signature_holds)


@dataclass(frozen=True, slots=True)
class RegistrationSettings:
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


class Registration:
    """Accepts identities. The only requests for a contract that are decrypted are those addressed to the mediator."""

    def __init__(self, desk: Desk, settings: RegistrationSettings, quota: RegistrationQuota) -> None:
        self._desk = desk
        self._settings = settings
        self._quota = quota

    async def register(self, order: Order, request: RequestCommunicationContract) -> dict[str, Any]:
        """REQUEST_COMMUNICATION_CONTRACT to the mediator."""
        try:
            registration = self._read(order, request)
        except MediatorError as error:
            if isinstance(error, UnauthorizedCommand):
                self._desk.journal.denied(order.sender, "policy", "decentrl")
            await self._desk.refuse(order.guard(), error)
        now = self._desk.clock.seconds()
        _, encryption_key = _new_pair()  # no event is ever exchanged under it, so the private half is not kept
        signed = _countersign(
            registration,
            mediator_did=order.command.recipient_did,
            encryption_key=encryption_key,
            seed=self._settings.seed(),
        )
        text = countersigned_text(registration, signed)
        contract = Contract(
            id=self._desk.new_id(),
            owner_did=None,
            peer_did=order.sender,
            expires_at=min(float(registration.contract["expires_at"]), now + self._settings.lifetime),
            digest=contract_digest(signed),
            text=text,
        )
        await self._quota.enrol(order.peer, len(text))
        try:
            await self._desk.store.save_contract(order.guard(), contract)
        except MediatorError:
            self._quota.give_back(order.peer, len(text), 1)
            raise
        self._desk.journal.granted(order.sender, "decentrl")
        return {
            "code": "MEDIATOR_REGISTRATION_SUCCESS",
            "payload": {"signed_communication_contract": jsontext.verbatim(text)},
        }

    def _read(self, order: Order, request: RequestCommunicationContract) -> RegistrationRequest:
        """
        :raise InvalidCommand: it does not open, or its terms are not those of a registration of the sender here.
        :raise InvalidContractSignatures: the sender did not sign it.
        :raise UnauthorizedCommand: it is not one whom this mediator serves.
        """
        registration = read_registration(self._open(request))
        contract = registration.contract
        mediator = order.command.recipient_did
        if (contract.get("requestor_did"), contract.get("recipient_did")) != (order.sender, mediator):
            raise InvalidCommand
        if contract.get("recipient_signing_key_id", f"{mediator}#signing") != f"{mediator}#signing":
            raise InvalidCommand
        if not contract["expires_at"] > self._desk.clock.seconds():
            raise InvalidCommand
        key = self._desk.directory.signing_key(order.sender, contract["requestor_signing_key_id"])
        if key is None or not _signature_holds(registration, key):
            raise InvalidContractSignatures
        if not self._serves(order.sender):
            raise UnauthorizedCommand
        return registration

    def _open(self, request: RequestCommunicationContract) -> bytes:
        try:
            public = decode_public_key(request.requestor_ephemeral_public_key)
        except ValueError:
            raise InvalidCommand from None
        for private in self._settings.prekeys():
            try:
                return _open(request.encrypted_contract_request, private, public)
            except ValueError:
                continue
        raise InvalidCommand

    def _serves(self, did: str) -> bool:
        if not self._settings.access.allows(did):
            return False
        return not self._settings.own_only() or self._desk.directory.owns(parse_did(did).mediator_did)


@timed
def _open(sealed: str, private: bytes, public: bytes) -> bytes:
    """:raise ValueError: it was not sealed for this key."""
    return open_sealed(sealed, shared_secret(private, public))
