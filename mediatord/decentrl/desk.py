"""What every use case of the Decentrl half works with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from twisted.internet.interfaces import IReactorTime

from mediatord.decentrl.directory import Directory
from mediatord.decentrl.exchange import Order
from mediatord.decentrl.pushing import Pushing
from mediatord.errors import MediatorError, UnauthorizedCommand
from mediatord.interfaces.decentrl import Found, Guard, IDecentrlStore, Slice
from mediatord.journal import Journal
from mediatord.protocol.decentrl.shapes import Pagination

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Desk:
    """
    :param new_id: ids of what is kept: unique, unguessable, in order of time.
    """

    clock: IReactorTime
    store: IDecentrlStore
    directory: Directory
    pushing: Pushing
    journal: Journal
    new_id: Callable[[], str]

    async def refuse(self, guard: Guard, error: MediatorError) -> NoReturn:
        """Refuse a command for `error`, unless its nonce or a registration is a reason to refuse it before."""
        await self.store.admit(guard)
        raise error

    async def own(self, order: Order) -> Guard:
        """
        The guard of a command that an identity gives its mediator (DCTRL-0004 6.2, "all other commands").

        :raise UnauthorizedCommand: it is addressed to somebody else.
        """
        if not self.directory.owns(order.command.recipient_did):
            await self.refuse(order.guard(), UnauthorizedCommand())
        return order.guard(registered=True)


def slice_of(pagination: Pagination) -> Slice:
    """Which items a page has (DCTRL-0004 section 9)."""
    return Slice(pagination.page * pagination.page_size, pagination.page_size)


def page(name: str, items: Sequence[Mapping[str, Any]], found: Found[Item], asked: Pagination) -> dict[str, Any]:
    """The reply to a query."""
    pagination = {"page": asked.page, "page_size": asked.page_size, "total": found.total}
    return {"payload": {name: items, "pagination": pagination}}
