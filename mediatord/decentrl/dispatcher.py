"""
Dispatcher of Decentrl commands: bytes in, reply out (DCTRL-0004, reference section 6).

A command is authenticated by its time window, its signature and its nonce (DCTRL-0004 5.4, 6.2, reference 6.1).
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.clock import measure_time
from mediatord.decentrl.context import CommandRequest, DecentrlContext, DecentrlReply, KeyDirectory, build_error_reply
from mediatord.decentrl.contracts import ContractHandler, RegistrationHandler
from mediatord.decentrl.events import PendingEventHandler, PublicEventHandler, StoredEventHandler
from mediatord.errors import (
    DuplicateNonce,
    InternalFault,
    InvalidSignature,
    MediatorError,
    RateLimitExceeded,
    ReplayCacheFull,
    SenderNotFound,
    SenderSigningKeyNotFound,
    StoreUnavailable,
    TimestampOutOfRange,
    UnauthorizedCommand,
)
from mediatord.log_redaction_and_throttle import redact_failure, release_traceback
from mediatord.observability.event_recorder import EventRecorder, RequestRecord
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.commands import DecentrlCommand, parse_command
from mediatord.protocol.decentrl.crypto import verify_bytes
from mediatord.ratelimit.access_control import AccessList
from mediatord.ratelimit.rate_limiter import RateLimiter, compute_request_cost
from mediatord.store.interfaces.decentrl import CommandGuard, IDecentrlStore

_verify = measure_time(verify_bytes)
# Seconds that a nonce is kept after its command has left the time window.
_NONCE_EXPIRY_MARGIN = 1.0
# Share of the nonce capacity that may be in use for the nonce of a forged command to be stored.
_FORGED_NONCE_SHARE = 0.5


class CommandAuthenticator:
    """
    Authenticates senders.

    By the protocol the nonce is claimed before the signature is checked. Only the order of refusals shows outside, so
    the signature is checked first, without waiting, and the nonce is claimed in the transaction that carries out the
    command.

    :param window: seconds that a timestamp may be off, either way.
    """

    def __init__(
        self,
        clock: IReactorTime,
        store: IDecentrlStore,
        key_directory: KeyDirectory,
        recorder: EventRecorder,
        window: float,
    ) -> None:
        self._clock = clock
        self._store = store
        self._key_directory = key_directory
        self._recorder = recorder
        self._window = window

    async def authenticate(self, command: DecentrlCommand, request_id: str, peer: str) -> CommandRequest:
        """
        A command with its proven sender, to be carried out under its guard.

        :param request_id: of the request in the log.
        :param peer: rate limit key.
        :raise TimestampOutOfRange: its timestamp is outside the window.
        :raise DuplicateNonce: it is forged, and was received before.
        :raise SenderNotFound: its sender does not resolve.
        :raise SenderSigningKeyNotFound: its sender has no such key.
        :raise InvalidSignature: it is not what the sender signed.
        """
        header = command.header
        sender, timestamp_ms = header.sender_did, header.timestamp
        self.check_time(timestamp_ms)
        nonce = hash_nonce(b"command", sender, header.nonce)
        expires_at = self.compute_nonce_expiry(timestamp_ms)
        try:
            key = self.check_signature(sender, header.sender_signing_key_id, command.signed, command.signature)
        except MediatorError:
            # Without room for the nonce it may be sent again, and is then found to be forged again.
            with contextlib.suppress(ReplayCacheFull):
                await self._store.check_guard(CommandGuard(nonce, expires_at, share=_FORGED_NONCE_SHARE))
            raise
        return CommandRequest(command, sender, request_id, key, nonce, expires_at, peer)

    def check_time(self, timestamp_ms: float) -> None:
        """:raise TimestampOutOfRange: the timestamp is off by more than the window."""
        now_ms = self._clock.seconds() * 1000
        if abs(now_ms - timestamp_ms) > self._window * 1000:
            # The sender is not authenticated, so it is not logged.
            self._recorder.record_replay("decentrl", None, TimestampOutOfRange(), age_ms=now_ms - timestamp_ms)
            raise TimestampOutOfRange

    def check_signature(self, did: str, key_id: str, signed: bytes, signature: str) -> bytes:
        """
        The key that a message is signed with.

        :raise SenderNotFound: the DID does not resolve.
        :raise SenderSigningKeyNotFound: it has no such key.
        :raise InvalidSignature: the signature does not verify.
        """
        key = self._key_directory.signing_key(did, key_id)
        if key is None:
            raise SenderSigningKeyNotFound if self._key_directory.resolves(did) else SenderNotFound
        if not _verify(signed, signature, key):
            raise InvalidSignature
        return key

    def compute_nonce_expiry(self, timestamp_ms: float) -> float:
        """Until when a nonce is kept: a timestamp ahead stays within the window for longer (reference 6.1)."""
        return max(self._clock.seconds(), timestamp_ms / 1000) + self._window + _NONCE_EXPIRY_MARGIN


def hash_nonce(purpose: bytes, did: str, nonce: str) -> bytes:
    """Digest that a nonce is stored by, distinct by sender and purpose."""
    digest = blake2b(digest_size=16, person=purpose)
    digest.update(b"%d:" % len(did))
    digest.update(f"{did}{nonce}".encode())
    return digest.digest()


_log = Logger()

CommandFunction = Callable[[CommandRequest, Any], Awaitable[dict[str, Any]]]

PUBLIC_QUERY = "GET_PUBLIC"
# Commands that reach identities other than the sender.
_OUTGOING_COMMANDS = frozenset(
    {"TWO_WAY_PRIVATE", "REQUEST_COMMUNICATION_CONTRACT", "COMMUNICATION_CONTRACT_RESPONSE"}
)


@dataclass(frozen=True, slots=True)
class CommandHandlers:
    """The handlers of all commands, and the access list."""

    registration: RegistrationHandler
    contracts: ContractHandler
    delivery: PendingEventHandler
    archive: StoredEventHandler
    channels: PublicEventHandler
    access: AccessList


class DecentrlDispatcher:
    """Reads, authenticates, charges and carries out commands."""

    def __init__(
        self,
        context: DecentrlContext,
        admission: RateLimiter,
        authentication: CommandAuthenticator,
        handlers: CommandHandlers,
    ) -> None:
        self._context = context
        self._admission = admission
        self._authentication = authentication
        self._access = handlers.access
        self._channels = handlers.channels
        self._registration = handlers.registration
        self._contracts = handlers.contracts
        self._handlers: dict[str, CommandFunction] = {
            "TWO_WAY_PRIVATE": handlers.delivery.deliver,
            "REQUEST_COMMUNICATION_CONTRACT": self._request_contract,
            "COMMUNICATION_CONTRACT_RESPONSE": handlers.contracts.respond,
            "QUERY_PENDING_COMMUNICATION_CONTRACT_REQUESTS": handlers.contracts.query_requests,
            "ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS": handlers.contracts.acknowledge_requests,
            "SAVE_COMMUNICATION_CONTRACT": handlers.contracts.save,
            "QUERY_COMMUNICATION_CONTRACTS": handlers.contracts.query,
            "QUERY_PENDING_EVENTS": handlers.delivery.query,
            "ACKNOWLEDGE_PENDING_EVENTS": handlers.delivery.acknowledge,
            "SAVE_EVENTS": handlers.archive.save,
            "QUERY_EVENTS": handlers.archive.query,
            "UPDATE_EVENT_TAGS": handlers.archive.update_tags,
            "PUBLISH_PUBLIC_EVENT": handlers.channels.publish,
            "DELETE_PUBLIC_EVENT": handlers.channels.delete,
        }

    async def receive(self, raw: bytes, peer: str) -> DecentrlReply:
        """
        Serve one command; never raises. With a reply of success, its effect is durable.

        :param peer: rate limit key.
        """
        record = self._context.recorder.begin_request("decentrl", peer, len(raw))
        command_request: CommandRequest | None = None
        command: DecentrlCommand | None = None
        memory, size = self._admission.memory, len(raw)
        has_memory = memory.try_acquire(peer, size)
        try:
            if not has_memory:
                await memory.acquire(peer, size)
                has_memory = True
            await self._admission.check_before_read(peer, len(raw))
            await self._admission.charge_command(peer, len(raw))
            try:
                command = parse_command(raw)
            except MediatorError:
                self._admission.charge_failure(peer, len(raw))
                raise
            command_request = await self._authenticate(command, record, peer)
            body = {"type": "SUCCESS", **await self._carry_out(command_request, peer, len(raw))}
            reply = DecentrlReply(200, encoding.dumps(body))
        except MediatorError as error:
            release_traceback(error)
            reply = build_error_reply(error)
        except Exception as error:
            _log.failure("serving a command failed", redact_failure())
            release_traceback(error)
            reply = build_error_reply(InternalFault())
        finally:
            if has_memory:
                memory.release(peer, size)
        self._finish_record(
            record, reply, command.name if command else None, command_request.sender if command_request else None
        )
        return reply

    async def public(self, did: str, arguments: Mapping[bytes, Sequence[bytes]], peer: str) -> DecentrlReply:
        """`GET /public/:did`; never raises."""
        record = self._context.recorder.begin_request("decentrl", peer, 0)
        try:
            await self._admission.charge_public_read(peer)
            reply = DecentrlReply(200, encoding.dumps(await self._channels.read(did, arguments)))
        except MediatorError as error:
            release_traceback(error)
            reply = build_error_reply(error)
        except Exception as error:
            _log.failure("reading a public channel failed", redact_failure())
            release_traceback(error)
            reply = build_error_reply(InternalFault())
        self._finish_record(record, reply, PUBLIC_QUERY, None)
        return reply

    async def _authenticate(self, command: DecentrlCommand, record: RequestRecord, peer: str) -> CommandRequest:
        try:
            command_request = await self._authentication.authenticate(command, record.request, peer)
            if self._access.denies(command_request.sender):
                await self._deny(command_request)
            return command_request
        except (StoreUnavailable, RateLimitExceeded):
            raise
        except MediatorError as error:
            if isinstance(error, DuplicateNonce):
                # The command is forged, so its sender is unknown.
                self._context.recorder.record_replay("decentrl", None, error)
            self._admission.charge_failure(peer, record.size)
            raise

    async def _deny(self, command_request: CommandRequest) -> None:
        """:raise UnauthorizedCommand: always, unless the guard fails, which comes first."""
        if command_request.command.name == "REQUEST_COMMUNICATION_CONTRACT":
            self._context.recorder.record_denial(command_request.sender, "policy", "decentrl")
        await self._context.refuse(command_request.guard(), UnauthorizedCommand())

    async def _carry_out(self, command_request: CommandRequest, peer: str, size: int) -> dict[str, Any]:
        """Charge, then execute. A replay is charged to the peer that sends it, not to the author of the command."""
        name = command_request.command.name
        outgoing = name in _OUTGOING_COMMANDS
        cost = 1 if outgoing else compute_request_cost(size)
        await self._charge(command_request, peer, size, cost, outgoing=outgoing)
        try:
            return await self._handlers[name](command_request, command_request.command.payload)
        except DuplicateNonce as error:
            self._admission.refund(command_request.sender, peer, outgoing=outgoing, cost=cost)
            self._context.recorder.record_replay("decentrl", command_request.sender, error)
            if not outgoing:
                self._admission.charge_failure(peer, size)
            raise
        except (StoreUnavailable, RateLimitExceeded):
            raise
        except MediatorError:
            if not outgoing:
                self._admission.charge_failure(peer, size)
            raise

    async def _charge(
        self, command_request: CommandRequest, peer: str, size: int, cost: int, *, outgoing: bool
    ) -> None:
        """
        :raise RateLimitExceeded: the address or the sender is over its limit; the address has paid for the attempt.
        """
        if outgoing:
            await self._admission.charge_anonymous(peer, compute_request_cost(size))
            await self._admission.charge_sender(command_request.sender, None, peer)
            return
        try:
            await self._admission.charge_account(command_request.sender, peer, cost)
        except RateLimitExceeded:
            # The peer pays for reading and verifying; it need not be the identity itself.
            self._admission.charge_failure(peer, size)
            raise

    async def _request_contract(self, command_request: CommandRequest, request: Any) -> dict[str, Any]:
        """A request to the mediator itself is a registration."""
        if self._context.key_directory.owns(command_request.command.header.recipient_did):
            return await self._registration.register(command_request, request)
        return await self._contracts.request(command_request, request)

    def _finish_record(
        self, record: RequestRecord, reply: DecentrlReply, kind: str | None, sender: str | None
    ) -> None:
        self._context.recorder.end_request(
            record, status=reply.status, fault=reply.fault, kind=kind, sender=sender, session=None
        )
