"""Replies to Decentrl requests, paging, and the collaborators of all command handlers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from twisted.internet.interfaces import IReactorTime

from mediatord.decentrl.authentication import KeyDirectory
from mediatord.decentrl.event_push import EventPusher
from mediatord.errors import MediatorError
from mediatord.observability.event_recorder import EventRecorder
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.commands import Pagination
from mediatord.protocol.error_codes import get_decentrl_error_code
from mediatord.ratelimit.registration import AccessList, RegistrationQuota
from mediatord.store.interfaces.decentrl import CommandGuard, IDecentrlStore, PageRequest, ResultPage


@dataclass(frozen=True, slots=True)
class DecentrlReply:
    """
    The reply to a command or to a query of a public channel.

    :param body: JSON.
    :param retry_after: seconds.
    :param fault: class of the error for which it was refused, if it was; an instance would keep the whole request
        alive by its traceback.
    :param code: always that of the protocol's table.
    """

    status: int
    body: bytes = field(repr=False)
    retry_after: int | None = None
    fault: type[MediatorError] | None = None
    code: None = None


def build_error_reply(error: MediatorError) -> DecentrlReply:
    """The wire form of a refusal (DCTRL-0004 section 11)."""
    wire = get_decentrl_error_code(error)
    retry_after = int(error.retry_after) if error.retry_after is not None else wire.retry_after
    return DecentrlReply(wire.status, encoding.dumps({"type": "ERROR", "code": wire.code}), retry_after, type(error))


# Members of the reply to a command that was carried out.
ReplyBody = dict[str, Any]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class DecentrlContext:
    """
    Collaborators of all command handlers.

    :param new_id: id of something to be stored, for a time: unique, unguessable, in order of time.
    :param get_signing_seed: returns the seed of the mediator's current Ed25519 key.
    :param get_prekeys: returns its X25519 private keys, the current one first.
    :param registration_lifetime: seconds that a registration lasts at most, whatever the contract says.
    :param own_only: returns whether to refuse the registration of DIDs that name another mediator.
    """

    clock: IReactorTime
    store: IDecentrlStore
    key_directory: KeyDirectory
    event_pusher: EventPusher
    recorder: EventRecorder
    access: AccessList
    quota: RegistrationQuota
    new_id: Callable[[float], str]
    get_signing_seed: Callable[[], bytes] = field(repr=False)
    get_prekeys: Callable[[], Sequence[bytes]] = field(repr=False)
    registration_lifetime: float
    own_only: Callable[[], bool]

    async def refuse(self, guard: CommandGuard, error: MediatorError) -> NoReturn:
        """Refuse a command with `error`, unless the guard fails, which comes first."""
        await self.store.check_guard(guard)
        raise error


def to_slice(pagination: Pagination) -> PageRequest:
    """Offset and length of a page (DCTRL-0004 section 9)."""
    return PageRequest(pagination.page * pagination.page_size, pagination.page_size)


def build_page_reply(
    name: str, items: Sequence[Mapping[str, Any]], found: ResultPage[Item], asked: Pagination
) -> ReplyBody:
    """The reply to a query."""
    pagination = {"page": asked.page, "page_size": asked.page_size, "total": found.total}
    return {"payload": {name: items, "pagination": pagination}}
