"""Collaborators of Decentrl commands and sockets, authenticated commands, and their replies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from twisted.internet.interfaces import IReactorTime

from mediatord.decentrl.authentication import CommandAuthenticator, KeyDirectory
from mediatord.decentrl.event_push import EventPusher
from mediatord.delivery.connections import ConnectionManager, WebSocketSession
from mediatord.errors import InvalidCommand, MediatorError
from mediatord.observability.event_recorder import EventRecorder, RequestRecord
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.commands import DecentrlCommand, Pagination, PublicQuery
from mediatord.protocol.decentrl.crypto import decode_public_key, decrypt, derive_shared_secret
from mediatord.protocol.error_codes import get_decentrl_error_code
from mediatord.push.registry import DeviceRegistry
from mediatord.ratelimit.admission import RequestGate, RequestReply
from mediatord.ratelimit.rate_limiter import RateLimiter
from mediatord.ratelimit.registration import AccessList, RegistrationQuota
from mediatord.runtime.request_time import measure_time
from mediatord.store.interfaces.decentrl import CommandGuard, IDecentrlStore, PageRequest, ResultPage


def build_error_reply(error: MediatorError) -> RequestReply:
    """The wire form of a refusal (DCTRL-0004 section 11)."""
    wire = get_decentrl_error_code(error)
    retry_after = int(error.retry_after) if error.retry_after is not None else wire.retry_after
    body = encoding.dumps({"type": "ERROR", "code": wire.code})
    return RequestReply(wire.status, body, retry_after=retry_after, fault=type(error))


# Members of the reply to a command that was carried out.
ReplyBody = dict[str, Any]


@dataclass(slots=True)
class CommandRequest:
    """
    A command whose sender is authenticated.

    :param sender: its DID.
    :param recipient: the DID that the command is addressed to.
    :param record: of the request.
    :param key: Ed25519 public key that the command is signed with.
    :param guard: conditions under which the store carries out the command; at first only that it is no replay.
    """

    command: DecentrlCommand
    sender: str
    recipient: str
    record: RequestRecord
    key: bytes = field(repr=False)
    guard: CommandGuard


@dataclass(frozen=True, slots=True)
class DecentrlContext:
    """
    Collaborators of all commands and sockets.

    :param record_backlog: records which messages are queued for a DID when a socket subscribes to it; None where
        there are no other nodes.
    :param record_pickups: tells other nodes which events were queried; None likewise.
    :param new_id: id of something to be stored, for a time: unique, unguessable, in order of time.
    :param get_signing_seed: returns the seed of the mediator's current Ed25519 key.
    :param get_prekeys: returns its X25519 private keys, the current one first.
    :param registration_lifetime: seconds that a registration lasts at most, whatever the contract says.
    :param own_only: returns whether to refuse the registration of DIDs that name another mediator.
    :param devices: None where identities do not register devices for push notifications.
    :param note_poll: called with each DID that is about to be shown all its pending events; None without push
        notifications.
    """

    clock: IReactorTime
    store: IDecentrlStore
    key_directory: KeyDirectory
    authenticator: CommandAuthenticator
    event_pusher: EventPusher
    recorder: EventRecorder
    access: AccessList
    quota: RegistrationQuota
    rate_limiter: RateLimiter
    gate: RequestGate
    connections: ConnectionManager[None]
    record_backlog: Callable[[WebSocketSession, str], Awaitable[None]] | None
    record_pickups: Callable[[Sequence[str]], None] | None
    new_id: Callable[[float], str]
    get_signing_seed: Callable[[], bytes] = field(repr=False)
    get_prekeys: Callable[[], Sequence[bytes]] = field(repr=False)
    registration_lifetime: float
    own_only: Callable[[], bool]
    devices: DeviceRegistry | None = None
    note_poll: Callable[[str], None] | None = None

    async def refuse(self, guard: CommandGuard, error: MediatorError) -> NoReturn:
        """Refuse a command with `error`, unless the guard fails, which comes first."""
        await self.store.check_guard(guard)
        raise error


def decrypt_for_mediator(context: DecentrlContext, text: str, public_key: str) -> bytes:
    """
    Decrypt what was encrypted to one of the mediator's keys.

    :param public_key: ephemeral X25519 key of the sender.
    :raise InvalidCommand: it was not.
    """
    return _decrypt(context.get_prekeys(), text, public_key)


@measure_time
def _decrypt(private_keys: Sequence[bytes], text: str, public_key: str) -> bytes:
    try:
        public = decode_public_key(public_key)
    except ValueError:
        raise InvalidCommand from None
    for private in private_keys:
        try:
            return decrypt(text, derive_shared_secret(private, public))
        except ValueError:
            continue
    raise InvalidCommand


def to_slice(asked: Pagination | PublicQuery) -> PageRequest:
    """Offset and length of a page (DCTRL-0004 section 9)."""
    return PageRequest(asked.page * asked.page_size, asked.page_size)


def build_page(
    name: str, items: Sequence[Mapping[str, Any]], found: ResultPage[Any], asked: Pagination | PublicQuery
) -> ReplyBody:
    """A page of items, as members of a reply."""
    return {name: items, "pagination": {"page": asked.page, "page_size": asked.page_size, "total": found.total}}
