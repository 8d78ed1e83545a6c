"""
What passes between the transports and the use cases of the Decentrl half.

Which DIDs resolve here, and the keys they sign with (reference 2.2).

What every use case of the Decentrl half works with.
"""

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
    What goes back for a command or a query of a public channel.

    :param body: JSON.
    :param retry_after: seconds.
    :param fault: the situation in which it was refused, if it was; a class, as an error's traceback would keep all
        that was received.
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
    A command whose sender is proven, and what it is remembered by.

    :param request: id of the request that it came with, in the log.
    :param key: Ed25519 public key that the command is signed with.
    :param nonce: what stands for the pair of nonce and sender.
    :param until: when the nonce may be forgotten.
    :param peer: who pays, as an address.
    """

    command: DecentrlCommand
    request: str
    key: bytes = field(repr=False)
    nonce: bytes
    until: float
    peer: str = ""

    @property
    def sender(self) -> str:
        """DID of the sender."""
        return self.command.header.sender_did

    def guard(self, *, registered: bool = False, recipient: str | None = None) -> CommandGuard:
        """
        What has to hold for the command.

        :param registered: whether the sender has to be registered.
        :param recipient: DID that has to be registered as well.
        """
        return CommandGuard(self.nonce, self.until, self.sender if registered else None, recipient)


SigningKeyLookup = Callable[[str, str], bytes | None]


class KeyDirectory:
    """
    Resolves `did:decentrl`, which holds its keys itself, and the mediator's own DIDs; nothing else, never over the
    network.

    :param own: the mediator's DIDs, as they are now.
    :param keys: its Ed25519 public keys, as they are now: the current one, and those that were.
    """

    def __init__(self, own: Callable[[], Collection[str]], keys: Callable[[], Sequence[bytes]]) -> None:
        self._own = own
        self._keys = keys

    def owns(self, did: str) -> bool:
        """Whether it is a DID of the mediator."""
        return did in self._own()

    def resolves(self, did: str) -> bool:
        """Whether there is a document of this DID."""
        if self.owns(did):
            return True
        try:
            parse_did(did)
        except ValueError:
            return False
        return True

    def signing_key(self, did: str, key_id: str) -> bytes | None:
        """The Ed25519 public key that has exactly this id in the document of this DID; None where there is none."""
        return self._signing_key(0, did, key_id)

    def signing_key_lookups(self, dids: Collection[str]) -> Iterator[SigningKeyLookup]:
        """
        What says which keys something may have been signed with: as :meth:`signing_key`, and then, if it is signed by
        the mediator, with each key that had the same id before.

        :param dids: of those who signed it.
        """
        ours = any(map(self.owns, dids))
        for number in range(len(self._keys()) if ours else 1):
            yield partial(self._signing_key, number)

    def _signing_key(self, number: int, did: str, key_id: str) -> bytes | None:
        if self.owns(did):
            return self._keys()[number] if key_id == f"{did}#signing" else None
        try:
            found = parse_did(did)
        except ValueError:
            return None
        return found.signing_key if key_id == found.signing_key_id else None


Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class DecentrlContext:
    """
    :param new_id: ids of what is kept: unique, unguessable, in order of time.
    """

    clock: IReactorTime
    store: IDecentrlStore
    key_directory: KeyDirectory
    event_pusher: EventPusher
    recorder: EventRecorder
    new_id: Callable[[], str]

    async def refuse(self, guard: CommandGuard, error: MediatorError) -> NoReturn:
        """Refuse a command for `error`, unless its nonce or a registration is a reason to refuse it before."""
        await self.store.check_guard(guard)
        raise error

    async def require_mediator_recipient(self, command_request: CommandRequest) -> CommandGuard:
        """
        The guard of a command that an identity gives its mediator (DCTRL-0004 6.2, "all other commands").

        :raise UnauthorizedCommand: it is addressed to somebody else.
        """
        if not self.key_directory.owns(command_request.command.header.recipient_did):
            await self.refuse(command_request.guard(), UnauthorizedCommand())
        return command_request.guard(registered=True)


def to_slice(pagination: Pagination) -> PageRequest:
    """Which items a page has (DCTRL-0004 section 9)."""
    return PageRequest(pagination.page * pagination.page_size, pagination.page_size)


def build_page_reply(
    name: str, items: Sequence[Mapping[str, Any]], found: ResultPage[Item], asked: Pagination
) -> dict[str, Any]:
    """The reply to a query."""
    pagination = {"page": asked.page, "page_size": asked.page_size, "total": found.total}
    return {"payload": {name: items, "pagination": pagination}}
