"""Dispatcher of Decentrl commands: bytes in, reply out (DCTRL-0004, reference section 6)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from mediatord.decentrl import contracts_and_registration as contracts
from mediatord.decentrl import events, push_devices
from mediatord.decentrl.context import CommandRequest, DecentrlContext, ReplyBody, build_error_reply
from mediatord.errors import (
    DuplicateNonce,
    InvalidCommand,
    MediatorError,
    RateLimitExceeded,
    ReplayCacheFull,
    StoreUnavailable,
    UnauthorizedCommand,
)
from mediatord.observability.event_recorder import RequestRecord
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.commands import DecentrlCommand, parse_command
from mediatord.ratelimit.admission import RequestAdmission, RequestReply
from mediatord.ratelimit.rate_limiter import compute_request_cost

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
# Commands of our own, unknown where no devices are registered. The store of devices knows no guards.
_DEVICE_COMMANDS: dict[str, CommandFunction] = {
    "SET_PUSH_DEVICE": push_devices.set_device,
    "QUERY_PUSH_DEVICES": push_devices.query,
    "REMOVE_PUSH_DEVICES": push_devices.remove,
}
_COMMANDS: dict[str, CommandFunction] = {
    **_OUTGOING_COMMANDS,
    **_QUERIES,
    **_DEVICE_COMMANDS,
    "ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS": contracts.acknowledge_requests,
    "SAVE_COMMUNICATION_CONTRACT": contracts.save,
    "ACKNOWLEDGE_PENDING_EVENTS": events.acknowledge,
    "SAVE_EVENTS": events.save,
    "UPDATE_EVENT_TAGS": events.update_tags,
    "PUBLISH_PUBLIC_EVENT": events.publish,
    "DELETE_PUBLIC_EVENT": events.delete_public,
}


# Share of the nonce capacity that may be in use for the nonce of a forged command to be stored.
_FORGED_NONCE_SHARE = 0.5


class DecentrlDispatcher:
    """Reads, authenticates, charges and carries out commands."""

    def __init__(self, context: DecentrlContext, requests: RequestAdmission) -> None:
        self._context = context
        self._requests = requests

    def receive(self, raw: bytes, peer: str) -> Coroutine[Any, Any, RequestReply]:
        """
        Serve one command. With a reply of success, its effect is durable.

        :param peer: rate limit key.
        :raise ShutdownInProgress: the daemon is stopping; nothing else is raised.
        """
        return self._requests.serve("decentrl", peer, len(raw), partial(self._serve, raw), build_error_reply)

    def public(
        self, did: str, arguments: Mapping[bytes, Sequence[bytes]], peer: str
    ) -> Coroutine[Any, Any, RequestReply]:
        """`GET /public/:did`. :raise ShutdownInProgress: as :meth:`receive`."""

        async def read(record: RequestRecord) -> RequestReply:
            record.kind = PUBLIC_QUERY
            await self._context.rate_limiter.charge_public_read(peer)
            return RequestReply(200, encoding.dumps(await events.read_public(self._context, did, arguments)))

        return self._requests.serve("decentrl", peer, 0, read, build_error_reply)

    async def _serve(self, raw: bytes, record: RequestRecord) -> RequestReply:
        context, peer, size = self._context, record.peer, record.size
        limiter = context.rate_limiter
        try:
            await limiter.check_before_read(peer, size)
            await limiter.charge_command(peer, size)
            command = parse_command(raw)
            if command.name in _DEVICE_COMMANDS and context.devices is None:
                raise InvalidCommand
            record.kind = command.name
            request = await self._authenticate(command, record)
            record.sender = request.sender
            cost = compute_request_cost(size)
            if command.name in _OUTGOING_COMMANDS:
                await limiter.charge_anonymous(peer, cost)
                await limiter.charge_sender(request.sender, None, peer)
            else:
                try:
                    await limiter.charge_account(request.sender, peer, cost)
                except RateLimitExceeded:
                    # The peer pays for reading and verifying; it need not be the identity itself.
                    limiter.charge_failure(peer, size)
                    raise
                if not context.key_directory.owns(request.recipient):
                    await context.refuse(request.guard, UnauthorizedCommand())
                request.guard = replace(request.guard, sender=request.sender)
                if command.name in _QUERIES or command.name in _DEVICE_COMMANDS:
                    await context.store.check_guard(request.guard)
            members = await _COMMANDS[command.name](context, request, command.payload)
        except (StoreUnavailable, RateLimitExceeded):
            raise
        except MediatorError as error:
            self._charge_refusal(record, error)
            raise
        return RequestReply(200, encoding.dumps({"type": "SUCCESS", **members}))

    def _charge_refusal(self, record: RequestRecord, error: MediatorError) -> None:
        """Charge a refused command to its peer, unless that has paid for reaching another identity."""
        limiter, peer, sender = self._context.rate_limiter, record.peer, record.sender
        outgoing = sender is not None and record.kind in _OUTGOING_COMMANDS
        if isinstance(error, DuplicateNonce):
            # Without a sender the command is forged. A replay is not charged to the author of the command.
            if sender is not None:
                cost = 1 if outgoing else compute_request_cost(record.size)
                limiter.refund(sender, peer, outgoing=outgoing, cost=cost)
            self._context.recorder.record_replay("decentrl", sender, error)
        if not outgoing:
            limiter.charge_failure(peer, record.size)

    async def _authenticate(self, command: DecentrlCommand, record: RequestRecord) -> CommandRequest:
        """
        A command with its proven sender, to be carried out under its guard.

        :raise TimestampOutOfRange: its timestamp is outside the window.
        :raise DuplicateNonce: it is forged or its sender is denied, and it was received before.
        :raise SenderNotFound: its sender does not resolve.
        :raise SenderSigningKeyNotFound: its sender has no such key.
        :raise InvalidSignature: it is not what the sender signed.
        :raise UnauthorizedCommand: its sender is denied.
        """
        context, header = self._context, command.header
        sender, authenticator = header.sender_did, context.authenticator
        guard = authenticator.make_guard(b"command", sender, header.nonce, header.timestamp)
        try:
            key = authenticator.verify_signature(
                sender, header.sender_signing_key_id, command.signed, command.signature
            )
        except MediatorError:
            # Without room for the nonce it may be sent again, and is then found to be forged again.
            with suppress(ReplayCacheFull):
                await context.store.check_guard(replace(guard, share=_FORGED_NONCE_SHARE))
            raise
        if context.access.denies(sender):
            if command.name == "REQUEST_COMMUNICATION_CONTRACT":
                context.recorder.record_denial(sender, "policy", "decentrl")
            await context.refuse(guard, UnauthorizedCommand())
        return CommandRequest(command, sender, header.recipient_did, record, key, guard)
