"""Dispatcher of Decentrl commands: bytes in, reply out (DCTRL-0004, reference section 6)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from mediatord.decentrl import contracts_and_registration as contracts
from mediatord.decentrl import events
from mediatord.decentrl.authentication import CommandAuthenticator, CommandRequest
from mediatord.decentrl.context import DecentrlContext, DecentrlReply, ReplyBody, build_error_reply
from mediatord.errors import (
    DuplicateNonce,
    MediatorError,
    RateLimitExceeded,
    StoreUnavailable,
    UnauthorizedCommand,
)
from mediatord.observability.event_recorder import RequestRecord
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.commands import DecentrlCommand, parse_command
from mediatord.ratelimit.admission import RequestAdmission
from mediatord.ratelimit.rate_limiter import RateLimiter, compute_request_cost
from mediatord.store.interfaces.decentrl import CommandGuard

CommandFunction = Callable[[DecentrlContext, CommandRequest, Any], Awaitable[ReplyBody]]

PUBLIC_QUERY = "GET_PUBLIC"
# Commands that reach identities other than the sender, which need not be registered.
_OUTGOING_COMMANDS: dict[str, CommandFunction] = {
    "TWO_WAY_PRIVATE": events.deliver,
    "REQUEST_COMMUNICATION_CONTRACT": contracts.request_contract,
    "COMMUNICATION_CONTRACT_RESPONSE": contracts.respond,
}
# The others are addressed to the mediator, by registered identities (DCTRL-0004 6.2).
_QUERIES: dict[str, CommandFunction] = {
    "QUERY_PENDING_COMMUNICATION_CONTRACT_REQUESTS": contracts.query_requests,
    "QUERY_COMMUNICATION_CONTRACTS": contracts.query,
    "QUERY_PENDING_EVENTS": events.query_pending,
    "QUERY_EVENTS": events.query_stored,
}
_COMMANDS: dict[str, CommandFunction] = {
    **_OUTGOING_COMMANDS,
    **_QUERIES,
    "ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS": contracts.acknowledge_requests,
    "SAVE_COMMUNICATION_CONTRACT": contracts.save,
    "ACKNOWLEDGE_PENDING_EVENTS": events.acknowledge,
    "SAVE_EVENTS": events.save,
    "UPDATE_EVENT_TAGS": events.update_tags,
    "PUBLISH_PUBLIC_EVENT": events.publish,
    "DELETE_PUBLIC_EVENT": events.delete_public,
}


class DecentrlDispatcher:
    """Reads, authenticates, charges and carries out commands."""

    def __init__(
        self,
        context: DecentrlContext,
        requests: RequestAdmission,
        rate_limiter: RateLimiter,
        authenticator: CommandAuthenticator,
    ) -> None:
        self._context = context
        self._requests = requests
        self._rate_limiter = rate_limiter
        self._authenticator = authenticator

    def receive(self, raw: bytes, peer: str) -> Coroutine[Any, Any, DecentrlReply]:
        """
        Serve one command. With a reply of success, its effect is durable.

        :param peer: rate limit key.
        :raise ShutdownInProgress: the daemon is stopping; nothing else is raised.
        """
        return self._requests.serve("decentrl", peer, len(raw), partial(self._serve, raw), build_error_reply)

    def public(
        self, did: str, arguments: Mapping[bytes, Sequence[bytes]], peer: str
    ) -> Coroutine[Any, Any, DecentrlReply]:
        """`GET /public/:did`. :raise ShutdownInProgress: as :meth:`receive`."""

        async def read(record: RequestRecord) -> DecentrlReply:
            record.kind = PUBLIC_QUERY
            await self._rate_limiter.charge_public_read(peer)
            return DecentrlReply(200, encoding.dumps(await events.read_public(self._context, did, arguments)))

        return self._requests.serve("decentrl", peer, 0, read, build_error_reply)

    async def _serve(self, raw: bytes, record: RequestRecord) -> DecentrlReply:
        limiter, peer, size = self._rate_limiter, record.peer, len(raw)
        await limiter.check_before_read(peer, size)
        await limiter.charge_command(peer, size)
        try:
            command = parse_command(raw)
        except MediatorError:
            limiter.charge_failure(peer, size)
            raise
        record.kind = command.name
        request = await self._authenticate(command, record)
        record.sender = request.sender
        return DecentrlReply(200, encoding.dumps({"type": "SUCCESS", **await self._carry_out(request, record)}))

    async def _authenticate(self, command: DecentrlCommand, record: RequestRecord) -> CommandRequest:
        context = self._context
        try:
            request = await self._authenticator.authenticate(command, record.request, record.peer)
            if context.access.denies(request.sender):
                if command.name == "REQUEST_COMMUNICATION_CONTRACT":
                    context.recorder.record_denial(request.sender, "policy", "decentrl")
                await context.refuse(request.guard, UnauthorizedCommand())
            return request
        except (StoreUnavailable, RateLimitExceeded):
            raise
        except MediatorError as error:
            if isinstance(error, DuplicateNonce):
                # The command is forged, so its sender is unknown.
                context.recorder.record_replay("decentrl", None, error)
            self._rate_limiter.charge_failure(record.peer, record.size)
            raise

    async def _carry_out(self, request: CommandRequest, record: RequestRecord) -> ReplyBody:
        """Charge, then execute. A replay is charged to the peer that sends it, not to the author of the command."""
        name, sender, peer, size, limiter = record.kind, request.sender, record.peer, record.size, self._rate_limiter
        assert name is not None
        outgoing, cost = name in _OUTGOING_COMMANDS, compute_request_cost(size)
        await self._charge(sender, peer, size, cost, outgoing)
        try:
            if not outgoing:
                if not self._context.key_directory.owns(request.recipient):
                    await self._context.refuse(request.guard, UnauthorizedCommand())
                request.guard = CommandGuard(request.nonce, request.expires_at, sender)
                if name in _QUERIES:
                    await self._context.store.check_guard(request.guard)
            return await _COMMANDS[name](self._context, request, request.command.payload)
        except (StoreUnavailable, RateLimitExceeded):
            raise
        except MediatorError as error:
            if isinstance(error, DuplicateNonce):
                limiter.refund(sender, peer, outgoing=outgoing, cost=1 if outgoing else cost)
                self._context.recorder.record_replay("decentrl", sender, error)
            if not outgoing:
                limiter.charge_failure(peer, size)
            raise

    async def _charge(self, sender: str, peer: str, size: int, cost: int, outgoing: bool) -> None:
        """
        :raise RateLimitExceeded: the address or the sender is over its limit; the address has paid for the attempt.
        """
        limiter = self._rate_limiter
        if outgoing:
            await limiter.charge_anonymous(peer, cost)
            await limiter.charge_sender(sender, None, peer)
            return
        try:
            await limiter.charge_account(sender, peer, cost)
        except RateLimitExceeded:
            # The peer pays for reading and verifying; it need not be the identity itself.
            limiter.charge_failure(peer, size)
            raise
