"""A MongoDB server, or rather a replica set of them, as the rest of the store knows it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from mediatord.deadline import PATIENCE, request_began
from mediatord.errors import StoreUnavailable
from mediatord.store.batches import Observer
from mediatord.store.mongo.asking import Asking
from mediatord.store.mongo.availability import Availability
from mediatord.store.mongo.cursors import aggregating, finding
from mediatord.store.mongo.faults import Faults
from mediatord.store.mongo.inspection import Inspection
from mediatord.store.mongo.link import Link
from mediatord.store.mongo.operations import Operations
from mediatord.store.mongo.pulse import beating
from mediatord.store.mongo.replies import UNSTORABLE, Duplicate, Kept, Refused, Unreachable
from mediatord.store.mongo.requests import deleting, inserting, modifying, updating
from mediatord.store.mongo.ticking import Ticking
from mediatord.store.mongo.transaction import Transaction
from mediatord.store.mongo.transactions import Undo

if TYPE_CHECKING:
    from mediatord.store.mongo.uri import MongoAddress

__all__ = [
    "Duplicate",
    "Kept",
    "Server",
    "Transaction",
    "aggregating",
    "deleting",
    "finding",
    "inserting",
    "modifying",
    "updating",
]

T = TypeVar("T")

# Of the time that an operation may take, what has to be left of it.
_LEAST = 0.1
# Seconds for leaving nothing behind when it is closed, and between attempts to undo something.
_FINISHING = 1.0
_SETTLING = 0.1
_CONNECTIONS = 10


class Server(Asking):
    """
    Operations end within :data:`PATIENCE` and a moment, whatever the server does, and at once while it is known not
    to answer; those for one request do so all together.

    :param wall: a reactor: what it is told to call later must be called without anybody's help. Somebody may set its
        time.
    :param observe: told what each operation took, in seconds, by its name.
    :param on_up: told whether the server answers, at every change.
    :ivar clock: what deadlines are times of; it goes on when that of the host is set back.
    """

    def __init__(
        self,
        address: MongoAddress,
        wall: IReactorTime,
        *,
        observe: Observer,
        on_up: Callable[[bool], None],
        connections: int = _CONNECTIONS,
    ) -> None:
        self.wall = wall
        self.clock = clock = Ticking(wall)
        self.observe = observe
        self._address = address
        self._link = Link(address, clock, size=connections)
        self._faults = Faults(clock)
        self._operations = Operations(self._link, clock, address.database, self._faults, self._doubt)
        self._availability = Availability(clock, self._probe, on_up)
        self._accepting = False
        self._settling = False
        self._locked_out = False
        self._running = 0
        self._idle: Deferred[None] | None = None
        self._inspection = Inspection(address.hosts)

    def open(self, prepare: Callable[[Operations], Awaitable[None]] | None = None) -> Deferred[None]:
        """
        Connect and look whether it can be used.

        :param prepare: to be done before anything else.
        :raise StoreUnavailable: it does not answer, or does not take our credentials. It may be opened again.
        :raise StoreRefused: it must not be used.
        """
        return Deferred.fromCoroutine(self._counted(self._open(prepare)))

    def close(self) -> Deferred[None]:
        """Finish what was begun, and let go."""
        return Deferred.fromCoroutine(self._close())

    @property
    def answers(self) -> bool:
        """Whether it makes sense to ask."""
        return self._accepting and self._availability.up

    @property
    def patience(self) -> float:
        """Seconds that an operation may take in all."""
        return PATIENCE

    @property
    def began(self) -> float:
        """When the request began that is being worked on; now if there is none."""
        now = self.wall.seconds()
        return self.clock.seconds() - (now - request_began(now))

    @property
    def doubtful(self) -> bool:
        """Whether something may have been done that was said to have failed, and is yet to be undone."""
        return self._operations.transactions.doubtful

    def owe(self, undo: Undo) -> None:
        """Have something undone, or done after all, once the server answers; see :meth:`~.Transactions.owe`."""
        self._operations.transactions.owe(undo)

    async def operate(
        self,
        name: str,
        work: Callable[[Operations, float], Awaitable[T]],
        *,
        since: float | None = None,
        until: float | None = None,
    ) -> T:
        """What would hardly be done in the time that is left is not begun, so that nobody has to undo it."""
        now = self.clock.seconds()
        since = now if since is None else since
        until = min(self.began, since) + PATIENCE if until is None else until
        if not self.answers or until - now < _LEAST * PATIENCE:
            raise StoreUnavailable
        return await self._counted(self._operate(name, work, since, until))

    def failed(self, name: str, error: Unreachable | Refused) -> None:
        """Something could not be done: say so, and find out whether anything can."""
        if isinstance(error, Unreachable):
            self._faults.report(name, error)
            if self._accepting:
                self._availability.doubt(connected=error.connected)
        elif error.unauthenticated:
            self._faults.report_credentials(self._address.hosts)
            if self._accepting:
                self._availability.doubt(connected=not error.unknown)
            else:
                self._link.drop()  # credentials are shown when connecting only
        else:
            self._faults.report(name, error)

    @property
    def owner(self) -> str:
        """Whose our sessions are."""
        return self._operations.transactions.sessions.owner

    def belong_to(self, owner: str) -> None:
        """Begin transactions from now on in sessions of this owner, which :meth:`end_sessions` can end."""
        self._operations.transactions.sessions.belong_to(owner)

    async def _operate(
        self, name: str, work: Callable[[Operations, float], Awaitable[T]], since: float, until: float
    ) -> T:
        try:
            return await work(self._operations, until)
        except (Unreachable, Refused) as error:
            self.failed(name, error)
            raise StoreUnavailable from None
        except UNSTORABLE as error:
            self._faults.report(name, TypeError(type(error).__name__))
            raise StoreUnavailable from None
        finally:
            self.observe(name, self.clock.seconds() - since)

    async def _open(self, prepare: Callable[[Operations], Awaitable[None]] | None) -> None:
        self._link.start()
        try:
            await self._inspection.look(self._operations, self.clock.seconds() + PATIENCE)
            if prepare is not None:
                await prepare(self._operations)
        except (Unreachable, Refused) as error:
            self._availability.set(False)
            self.failed(f"opening {self._address.hosts}", error)
            raise StoreUnavailable from None
        self._accepting = True
        self._availability.set(True)
        if self.doubtful:
            self._doubt()

    async def _close(self) -> None:
        self._accepting, was_up = False, self._availability.up
        self._availability.stop()
        if not self._link.connected:
            await self._link.stop()
        if self._running:
            self._idle = Deferred()
            # But for preparing a large database, which may take longer, everything has ended by then.
            self._idle.addTimeout(PATIENCE + _FINISHING, self.clock, onTimeoutCancel=lambda *_: None)
            await self._idle
        if was_up:
            await self._operations.finish(self.clock.seconds() + _FINISHING)
        await self._link.stop()

    async def _probe(self, deadline: float) -> None:
        try:
            await self._operations.write(beating(), deadline)
        except Unreachable:
            self._link.drop()  # nor will the other connections be answered: somebody else may be the primary
            raise
        except Refused as error:
            if error.unauthenticated:
                self._faults.report_credentials(self._address.hosts)
                self._locked_out = True
            raise
        if self._locked_out:
            self._locked_out = False
            self._link.drop()  # credentials are shown when connecting only, and not all have done so since
        if not self._availability.up:
            await self._operations.transactions.settle(deadline)  # before anybody can come again with the same

    def _doubt(self) -> None:
        """There is something to settle: the first thing to be done as soon as anything can."""
        if self._accepting and not self._settling:
            self._settling = True
            Deferred.fromCoroutine(self._counted(self._settle()))

    async def _settle(self) -> None:
        try:
            while self._accepting and self.doubtful:
                if self._availability.up:
                    await self._operations.transactions.settle(self.clock.seconds() + PATIENCE)
                if self.doubtful:
                    await deferLater(self.clock, _SETTLING)
        finally:
            self._settling = False

    async def _counted(self, work: Coroutine[Any, Any, T] | Awaitable[T]) -> T:
        self._running += 1
        try:
            return await work
        finally:
            self._running -= 1
            if not self._running and self._idle is not None:
                idle, self._idle = self._idle, None
                idle.callback(None)
