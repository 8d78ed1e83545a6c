"""Decentrl requests and replies, the directory of signing keys, and the collaborators of all command handlers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, TypeVar

from twisted.internet.interfaces import IReactorTime

from mediatord.decentrl.event_push import EventPusher
from mediatord.errors import MediatorError, UnauthorizedCommand
from mediatord.observability.event_recorder import EventRecorder
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.commands import DecentrlCommand, Pagination
from mediatord.protocol.decentrl.did_decentrl import parse_did
from mediatord.protocol.error_codes import get_decentrl_error_code
from mediatord.store.interfaces.decentrl import CommandGuard, IDecentrlStore, PageRequest, ResultPage


@dataclass(frozen=True, slots=True)
class DecentrlReply:
    """
    The reply to a command or to a query of a public channel.

    :param body: JSON.
    :param retry_after: seconds.
    :param fault: class of the error for which it was refused, if it was; an instance would keep the whole request
        alive by its traceback.
    """

    status: int
    body: bytes = field(repr=False)
    retry_after: int | None = None
    fault: type[MediatorError] | None = None


def build_error_reply(error: MediatorError) -> DecentrlReply:
    """The wire form of a refusal (DCTRL-0004 section 11)."""
    wire = get_decentrl_error_code(error)
    retry_after = int(error.retry_after) if error.retry_after is not None else wire.retry_after
    return DecentrlReply(wire.status, encoding.dumps({"type": "ERROR", "code": wire.code}), retry_after, type(error))


@dataclass(frozen=True, slots=True)
class CommandRequest:
    """
    A command whose sender is authenticated.

    :param sender: its DID.
    :param request_id: of the request in the log.
    :param key: Ed25519 public key that the command is signed with.
    :param nonce: digest of nonce and sender.
    :param expires_at: when the nonce may be forgotten, Unix seconds.
    :param peer: rate limit key.
    """

    command: DecentrlCommand
    sender: str
    request_id: str
    key: bytes = field(repr=False)
    nonce: bytes
    expires_at: float
    peer: str

    def guard(self, *, registered: bool = False, recipient: str | None = None) -> CommandGuard:
        """
        The conditions under which the store carries out the command.

        :param registered: whether the sender has to be registered.
        :param recipient: DID that has to be registered as well.
        """
        return CommandGuard(self.nonce, self.expires_at, self.sender if registered else None, recipient)


SigningKeyLookup = Callable[[str, str], bytes | None]


class KeyDirectory:
    """
    Resolves `did:decentrl`, which contains its keys, and the mediator's own DIDs; nothing else, and never over the
    network (reference 2.2).

    :param own_dids: the mediator's DIDs; kept up to date by its owner.
    :param get_own_keys: returns the mediator's current Ed25519 public key and the former ones.
    """

    def __init__(self, own_dids: Collection[str], get_own_keys: Callable[[], Sequence[bytes]]) -> None:
        self._own_dids = own_dids
        self._get_own_keys = get_own_keys

    def owns(self, did: str) -> bool:
        """Whether it is a DID of the mediator."""
        return did in self._own_dids

    def resolves(self, did: str) -> bool:
        """Whether this DID has a document."""
        if did in self._own_dids:
            return True
        try:
            parse_did(did)
        except ValueError:
            return False
        return True

    def signing_key(self, did: str, key_id: str) -> bytes | None:
        """The Ed25519 public key with exactly this id in the document of this DID, or None."""
        return self._signing_key(0, did, key_id)

    def signing_key_lookups(self, dids: Collection[str]) -> Iterator[SigningKeyLookup]:
        """
        Key lookups to verify signatures with: :meth:`signing_key`, and for signatures of the mediator the same with
        each former key.

        :param dids: of the signers.
        """
        is_own = any(map(self.owns, dids))
        for number in range(len(self._get_own_keys()) if is_own else 1):
            yield partial(self._signing_key, number)

    def _signing_key(self, number: int, did: str, key_id: str) -> bytes | None:
        if did in self._own_dids:
            return self._get_own_keys()[number] if key_id == f"{did}#signing" else None
        try:
            found = parse_did(did)
        except ValueError:
            return None
        return found.signing_key if key_id == found.signing_key_id else None


Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class DecentrlContext:
    """
    Collaborators of all command handlers.

    :param new_id: id of something to be stored, for a time: unique, unguessable, in order of time.
    """

    clock: IReactorTime
    store: IDecentrlStore
    key_directory: KeyDirectory
    event_pusher: EventPusher
    recorder: EventRecorder
    new_id: Callable[[float], str]

    async def refuse(self, guard: CommandGuard, error: MediatorError) -> NoReturn:
        """Refuse a command with `error`, unless the guard fails, which comes first."""
        await self.store.check_guard(guard)
        raise error

    async def require_mediator_recipient(self, command_request: CommandRequest) -> CommandGuard:
        """
        The guard of a command to the mediator (DCTRL-0004 6.2, "all other commands").

        :raise UnauthorizedCommand: it is addressed to another DID.
        """
        if not self.key_directory.owns(command_request.command.header.recipient_did):
            await self.refuse(command_request.guard(), UnauthorizedCommand())
        return command_request.guard(registered=True)


def to_slice(pagination: Pagination) -> PageRequest:
    """Offset and length of a page (DCTRL-0004 section 9)."""
    return PageRequest(pagination.page * pagination.page_size, pagination.page_size)


def build_page_reply(
    name: str, items: Sequence[Mapping[str, Any]], found: ResultPage[Item], asked: Pagination
) -> dict[str, Any]:
    """The reply to a query."""
    pagination = {"page": asked.page, "page_size": asked.page_size, "total": found.total}
    return {"payload": {name: items, "pagination": pagination}}
