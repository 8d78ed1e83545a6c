"""Transactions that are begun again until they are done or time is up, and those that nobody knows the end of."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from twisted.internet.defer import CancelledError, Deferred, DeferredSemaphore, fail
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.store.mongo.faults import Faults
from mediatord.store.mongo.link import Lane, Link
from mediatord.store.mongo.pulse import beating
from mediatord.store.mongo.replies import Kept, Refused, Unreachable
from mediatord.store.mongo.sessions import Session, Sessions
from mediatord.store.mongo.transaction import Doubtful, Transaction, pause

T = TypeVar("T")
Work = Callable[[Transaction], Awaitable[T]]
Settled = Callable[[], None]
Undo = Work[Settled | None]

# Transactions that are open at a time, of those that write and of those that read only; more would keep the server
# from all of them.
_AT_ONCE = 32
_DOUBTS = 1_000
# Seconds that a server is given to end one.
_ENDING = 1.0
# The document that all undoing writes, so that none of it is done by a server that is the primary no more.
_UNDONE = "undone"

_log = Logger(namespace="mediatord.store")


class Transactions:
    """
    :param on_doubt: called when there is something that :meth:`settle` has to see to.
    """

    def __init__(
        self, link: Link, clock: IReactorTime, database: str, faults: Faults, on_doubt: Callable[[], None]
    ) -> None:
        self._link = link
        self._clock = clock
        self._database = database
        self._faults = faults
        self._on_doubt = on_doubt
        self._writing_slots = DeferredSemaphore(_AT_ONCE)
        self._reading_slots = DeferredSemaphore(_AT_ONCE)
        self._doubts: deque[tuple[Session, Undo]] = deque()
        self._settling = False
        self.sessions = Sessions(clock)

    @property
    def doubtful(self) -> bool:
        """Whether there is something to settle."""
        return bool(self._doubts)

    async def transact(
        self,
        work: Work[T],
        deadline: float,
        undo: Undo | None = None,
        *,
        tries: int | None = None,
        reading: bool = False,
    ) -> T:
        """
        Do all of `work` or nothing; it is called again when something was in its way.

        :param undo: for when nobody knows whether it was done; see :meth:`owe`.
        :param tries: give up after another transaction was in its way so many times, or its connection was lost.
        :param reading: it only reads, and need not be done while everything else that reads is slow.
        :raise Duplicate: a unique index has this value already.
        :raise Refused: the server said no.
        :raise Unreachable: time is up.
        """
        slots = self._reading_slots if reading else self._writing_slots
        await self._slot(slots, deadline)
        run = _Run(self.sessions.take(), self._link.reading if reading else self._link.writing)
        try:
            answer = await self._transact(run, work, deadline, tries)
        except Doubtful:
            self._note(run.session, undo or _nothing)
            raise Unreachable("no answer to a commit") from None
        except BaseException:
            self._let_go(run)
            raise
        finally:
            slots.release()
        self._let_go(run)
        return answer

    def owe(self, undo: Undo) -> None:
        """
        Have something undone once the server answers.

        :param undo: does no harm when it is done twice; what it returns is called when it is durable.
        """
        self._note(self.sessions.take(), undo)

    async def settle(self, deadline: float) -> None:
        """Undo what nobody knows of whether it was done. What cannot be undone yet is noted behind all else."""
        while self._settling:
            if self._clock.seconds() >= deadline:
                return
            await pause(self._clock)
        self._settling = True
        try:
            for _ in range(len(self._doubts)):
                if self._clock.seconds() >= deadline:
                    return
                await self._settle_one(deadline)
        finally:
            self._settling = False

    async def _slot(self, slots: DeferredSemaphore, deadline: float) -> None:
        """:raise Unreachable: none was free in time."""
        acquired = slots.acquire()
        if not acquired.called:
            left = max(deadline - self._clock.seconds(), 0.0)
            acquired.addTimeout(left, self._clock, lambda _, __: fail(Unreachable("time is up")))
        await acquired

    async def _settle_one(self, deadline: float) -> None:
        session, undo = self._doubts[0]
        run = _Run(session, self._link.writing)
        try:
            settled = await self._transact(run, lambda transaction: _undo(transaction, undo), deadline, None)
        except CancelledError:
            raise
        except Exception as error:
            self._faults.report("undoing a doubtful write", _named(error))
            self._doubts.rotate(-1)
            return
        self._doubts.popleft()
        self._let_go(run)
        if settled is not None:
            settled()

    async def _transact(self, run: _Run, work: Work[T], deadline: float, tries: int | None) -> T:
        attempt = contended = lost = 0
        while True:
            attempt += 1
            run.last = Transaction(run.lane, self._clock, self._database, run.session, deadline)
            try:
                return await _attempt(run.last, work)
            except Refused as error:
                contended += error.contended
                if not error.transient or contended == tries or self._clock.seconds() >= deadline:
                    raise
            except Unreachable as error:
                lost += error.connected
                if lost == tries or self._clock.seconds() >= deadline:
                    raise
            if run.last.wrote:
                await run.last.abort(deadline)
            await pause(self._clock, attempt)

    def _let_go(self, run: _Run) -> None:
        """Its session can be used again when the server has ended what was begun in it. Nobody waits for that."""
        if run.last is None or not run.last.open:
            self.sessions.give_back(run.session)
        else:
            Deferred.fromCoroutine(self._end(run.session, run.last))

    async def _end(self, session: Session, left: Transaction) -> None:
        if await left.abort(self._clock.seconds() + _ENDING):
            self.sessions.give_back(session)
        elif left.wrote:
            self._note(session, _nothing)  # else it would be in the way of others for a minute
        else:
            self.sessions.lay_aside(session)

    def _note(self, session: Session, undo: Undo) -> None:
        if len(self._doubts) < _DOUBTS:
            self._doubts.append((session, undo))
        else:
            self.sessions.lay_aside(session)
            _log.error("too many doubtful writes to undo: another one stays as it is")
        self._on_doubt()


class _Run:
    """
    :ivar last: the latest attempt.
    """

    def __init__(self, session: Session, lane: Lane) -> None:
        self.session = session
        self.lane = lane
        self.last: Transaction | None = None


async def _attempt(transaction: Transaction, work: Work[T]) -> T:
    try:
        answer = await work(transaction)
    except Kept as kept:
        await transaction.commit()
        raise kept.error from None
    await transaction.commit()
    return answer


async def _undo(transaction: Transaction, undo: Undo) -> Settled | None:
    settled = await undo(transaction)
    transaction.later(beating(_UNDONE))
    return settled


async def _nothing(_transaction: Transaction) -> None:
    """The next transaction of a session ends the one before."""


def _named(error: Exception) -> Exception:
    """One that may be logged: what is not of our making may say what was stored."""
    return error if isinstance(error, (Refused, Unreachable)) else TypeError(type(error).__name__)
