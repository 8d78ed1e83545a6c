"""A name that another boot holds: it may be an earlier start of this node, which was killed, or a node that lives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger

from mediatord.errors import StoreUnavailable
from mediatord.interfaces import IClusterStore, Node, NodeNameTaken

_log = Logger()

# Seconds between two looks at a lease, and after which one that was not renewed is nobody's: a second more than a
# node takes to renew it.
LOOK = 1.0
UNRENEWED = 4.0
# In place of a name, of whichever works alone: no node of a cluster can have it. Its own name is said as its address.
ALONE = "(alone)"


@dataclass(frozen=True, slots=True)
class _Look:
    boot: str
    until: float
    at: float


class Naming:
    """
    Finds out whose a name is. Nothing but its lease says that a node lives: that nobody can be reached at its address
    may as well be due to a packet filter, or to our looking for it on a host or in a directory that is not its own.

    :param node: ours.
    :param probe: the boot that answers at the address of a node, if any does.
    :param sole: whether nobody but an earlier process in our place, which is gone, can have our address.
    """

    def __init__(
        self,
        clock: IReactorTime,
        store: IClusterStore,
        node: Node,
        probe: Callable[[Node], Awaitable[str | None]],
        *,
        sole: bool,
    ) -> None:
        self._clock = clock
        self._store = store
        self._node = node
        self._probe = probe
        self._sole = sole
        self._first: _Look | None = None

    def forget(self) -> None:
        """What was seen counts no more: who cannot reach the store renews no lease, but lives."""
        self._first = None

    async def contest(self, taken: NodeNameTaken, asked: float) -> str:
        """
        See to it that the name may be asked for again; else why it is not ours, in a line for the operator.

        :param asked: when the store was asked for the name.
        """
        holder, first = taken.holder, self._first
        if self._sole and holder.address == self._node.address:
            await self._take(taken)
            return ""
        if first is None or first.boot != holder.boot:
            self._first = first = _Look(holder.boot, taken.until, self._clock.seconds())
        elif asked - first.at >= UNRENEWED and taken.until == first.until:
            await self._take(taken)
            return ""
        answering = await self._probe(holder)
        if answering == holder.boot:
            return running(holder)
        if taken.until != first.until:
            return _misled(holder) if answering == self._node.boot else running(holder)
        await deferLater(self._clock, LOOK)
        return ""

    async def _take(self, taken: NodeNameTaken) -> None:
        """End the holder, unless it has renewed its lease."""
        self.forget()
        _log.info("an earlier node {name} is gone; this one takes its place", name=taken.holder.name)
        try:
            await self._store.drop(taken.holder.boot, until=taken.until)
        except StoreUnavailable:
            await deferLater(self._clock, LOOK)


def running(holder: Node) -> str:
    """Why we cannot have the name of a node that lives."""
    return f"node: {holder.name} is running already, at {holder.address}; every node needs a name of its own"


def _misled(holder: Node) -> str:
    return (
        f"node: {holder.name} is running already, said to be at {holder.address}, where this node itself answers; "
        "every node needs a name and an address of its own"
    )


async def names_of(store: IClusterStore) -> str:
    """Of the live nodes, for the operator."""
    try:
        return ", ".join(one.address if one.name == ALONE else one.name for one in await store.nodes())
    except StoreUnavailable:
        return "unknown"
