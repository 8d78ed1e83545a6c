"""The Decentrl half as the transports see it: a command in, a reply out (DCTRL-0004, reference section 6)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twisted.logger import Logger

from mediatord.admission import AccessList, Admission, weight
from mediatord.decentrl.archive import Archive
from mediatord.decentrl.authentication import Authentication
from mediatord.decentrl.channels import Channels
from mediatord.decentrl.contracts import Contracts
from mediatord.decentrl.delivery import Delivery
from mediatord.decentrl.desk import Desk
from mediatord.decentrl.exchange import Order, Reply, refusal
from mediatord.decentrl.registration import Registration
from mediatord.errors import (
    DuplicateNonce,
    InternalFault,
    MediatorError,
    RateLimited,
    StoreUnavailable,
    UnauthorizedCommand,
)
from mediatord.faults import release_frames, without_text
from mediatord.journal import Told
from mediatord.protocol import jsontext
from mediatord.protocol.decentrl.commands import Command, parse_command

_log = Logger()

Use = Callable[[Order, Any], Awaitable[dict[str, Any]]]

READ_PUBLIC = "GET_PUBLIC"
# What reaches others than the sender; everything else is a registered identity's own business.
_OUTGOING = frozenset({"TWO_WAY_PRIVATE", "REQUEST_COMMUNICATION_CONTRACT", "COMMUNICATION_CONTRACT_RESPONSE"})


@dataclass(frozen=True, slots=True)
class Uses:
    """The use cases that commands are dispatched to, and the list of those who are not served."""

    registration: Registration
    contracts: Contracts
    delivery: Delivery
    archive: Archive
    channels: Channels
    access: AccessList


class Mediator:
    """Receives commands."""

    def __init__(self, desk: Desk, admission: Admission, authentication: Authentication, uses: Uses) -> None:
        self._desk = desk
        self._admission = admission
        self._authentication = authentication
        self._access = uses.access
        self._channels = uses.channels
        self._registration = uses.registration
        self._contracts = uses.contracts
        self._uses: dict[str, Use] = {
            "TWO_WAY_PRIVATE": uses.delivery.deliver,
            "REQUEST_COMMUNICATION_CONTRACT": self._request_contract,
            "COMMUNICATION_CONTRACT_RESPONSE": uses.contracts.respond,
            "QUERY_PENDING_COMMUNICATION_CONTRACT_REQUESTS": uses.contracts.query_requests,
            "ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS": uses.contracts.acknowledge_requests,
            "SAVE_COMMUNICATION_CONTRACT": uses.contracts.save,
            "QUERY_COMMUNICATION_CONTRACTS": uses.contracts.query,
            "QUERY_PENDING_EVENTS": uses.delivery.query,
            "ACKNOWLEDGE_PENDING_EVENTS": uses.delivery.acknowledge,
            "SAVE_EVENTS": uses.archive.save,
            "QUERY_EVENTS": uses.archive.query,
            "UPDATE_EVENT_TAGS": uses.archive.update_tags,
            "PUBLISH_PUBLIC_EVENT": uses.channels.publish,
            "DELETE_PUBLIC_EVENT": uses.channels.delete,
        }

    async def receive(self, raw: bytes, peer: str) -> Reply:
        """
        Take one command; never raises. A reply of success means that whatever it asked for is durable.

        :param peer: who pays, as an address.
        """
        told = self._desk.journal.begin("decentrl", peer, len(raw))
        order: Order | None = None
        command: Command | None = None
        memory, size = self._admission.memory, len(raw)
        has_memory = memory.take(peer, size)
        try:
            if not has_memory:
                await memory.wait(peer, size)
                has_memory = True
            await self._admission.before_reading(peer, len(raw))
            await self._admission.command(peer, len(raw))
            command = self._parse(raw, peer)
            order = await self._prove(command, told, peer)
            body = {"type": "SUCCESS", **await self._carry_out(order, peer, len(raw))}
            reply = Reply(200, jsontext.dumps(body))
        except MediatorError as error:
            release_frames(error)
            reply = refusal(error)
        except Exception as error:
            _log.failure("serving a command failed", without_text())
            release_frames(error)
            reply = refusal(InternalFault())
        finally:
            if has_memory:
                memory.give_back(peer, size)
        self._tell(told, reply, command.name if command else None, order.sender if order else None)
        return reply

    async def public(self, did: str, arguments: Mapping[bytes, Sequence[bytes]], peer: str) -> Reply:
        """`GET /public/:did`; never raises."""
        told = self._desk.journal.begin("decentrl", peer, 0)
        try:
            await self._admission.reader(peer)
            reply = Reply(200, jsontext.dumps(await self._channels.read(did, arguments)))
        except MediatorError as error:
            release_frames(error)
            reply = refusal(error)
        except Exception as error:
            _log.failure("reading a public channel failed", without_text())
            release_frames(error)
            reply = refusal(InternalFault())
        self._tell(told, reply, READ_PUBLIC, None)
        return reply

    def _parse(self, raw: bytes, peer: str) -> Command:
        try:
            return parse_command(raw)
        except MediatorError:
            self._admission.in_vain(peer, len(raw))
            raise

    async def _prove(self, command: Command, told: Told, peer: str) -> Order:
        try:
            order = await self._authentication.prove(command, told.request, peer)
            if self._access.denies(order.sender):
                await self._deny(order)
            return order
        except (StoreUnavailable, RateLimited):
            raise
        except MediatorError as error:
            if isinstance(error, DuplicateNonce):
                # It is forged: whose it is said to be is not who sent it.
                self._desk.journal.replayed("decentrl", None, error)
            self._admission.in_vain(peer, told.size)
            raise

    async def _deny(self, order: Order) -> None:
        """:raise UnauthorizedCommand: always, or what is to be said before."""
        if order.command.name == "REQUEST_COMMUNICATION_CONTRACT":
            self._desk.journal.denied(order.sender, "policy", "decentrl")
        await self._desk.refuse(order.guard(), UnauthorizedCommand())

    async def _carry_out(self, order: Order, peer: str, size: int) -> dict[str, Any]:
        """Charge, then do it. Who repeats the command of somebody else pays for that, not who wrote it."""
        outgoing = order.command.name in _OUTGOING
        cost = 1 if outgoing else weight(size)
        await self._charge(order, peer, size, cost, outgoing=outgoing)
        try:
            return await self._uses[order.command.name](order, order.command.payload)
        except DuplicateNonce as error:
            self._admission.give_back(order.sender, peer, outgoing=outgoing, cost=cost)
            self._desk.journal.replayed("decentrl", order.sender, error)
            if not outgoing:
                self._admission.in_vain(peer, size)
            raise
        except (StoreUnavailable, RateLimited):
            raise
        except MediatorError:
            if not outgoing:
                self._admission.in_vain(peer, size)
            raise

    async def _charge(self, order: Order, peer: str, size: int, cost: int, *, outgoing: bool) -> None:
        """:raise RateLimited: the address or the sender is over its limit; the address has paid for the attempt."""
        if outgoing:
            await self._admission.stranger(peer, weight(size))
            await self._admission.sender(order.sender, None, peer)
            return
        try:
            await self._admission.account(order.sender, peer, cost)
        except RateLimited:
            # It was read and proven for nothing, and need not be the identity itself that sends it.
            self._admission.in_vain(peer, size)
            raise

    async def _request_contract(self, order: Order, request: Any) -> dict[str, Any]:
        """To the mediator it is a registration."""
        if self._desk.directory.owns(order.command.recipient_did):
            return await self._registration.register(order, request)
        return await self._contracts.request(order, request)

    def _tell(self, told: Told, reply: Reply, kind: str | None, sender: str | None) -> None:
        self._desk.journal.end(told, status=reply.status, fault=reply.fault, kind=kind, sender=sender, session=None)
