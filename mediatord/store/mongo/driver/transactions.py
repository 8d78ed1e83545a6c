"""
Server sessions, in which transactions are numbered.

Several statements that are done together or not at all.

Transactions that are begun again until they are done or time is up, and those that nobody knows the end of.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from random import uniform
from typing import TypeVar

from bson import Binary, Int64
from bson.binary import UUID_SUBTYPE
from twisted.internet.defer import CancelledError, Deferred, DeferredSemaphore, fail
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger

from mediatord.store.mongo.driver.commands import (
    Document,
    MongoCommand,
    build_deletes,
    build_find,
    build_heartbeat_write,
    build_inserts,
    build_updates,
    read_cursor,
)
from mediatord.store.mongo.driver.connection_pool import ConnectionPartition, PrimaryConnectionPool
from mediatord.store.mongo.driver.errors import (
    CommitWithError,
    MongoCommandError,
    OperationErrorLog,
    ServerUnreachable,
    check_reply,
)
from mediatord.store.mongo.ledger_entries import LedgerPage

# Seconds until whatever was going on in a session has ended.
_QUARANTINE_SECONDS = 5.0
# Numbers begin with the time, in such parts of a second that no session has a transaction in each: so they are higher
# than those that it had before.
_NUMBERS_PER_SECOND = 1_000_000
_MAX_NAMED_SESSIONS = 256
_MAX_SINGLE_USE_SESSIONS = 1_000
_SESSION_NAMESPACE = uuid.UUID("6f4ad6f2-02f5-4f2e-9d7e-3a6d1c3f6b0a")


@dataclass(eq=False, slots=True)
class ServerSession:
    """
    Used for one transaction after another. A later number ends what an earlier one left open.

    :param id: as it is sent.
    :param owner: of the process.
    :param named: whether its id is made from that of the owner.
    :param page: of the ledger, where its transactions note what they do.
    """

    id: Document
    owner: str
    is_named: bool
    page: LedgerPage
    number: int
    usable_at: float = 0.0

    def begin(self) -> Document:
        """What the statements of the next transaction carry."""
        self.number += 1
        return {"lsid": self.id, "txnNumber": Int64(self.number), "autocommit": False}


class ServerSessionPool:
    """
    Sessions that can be used again, the latest first, so that they stay few; for as long as anybody likes, since a
    server that has forgotten one, which it does after half an hour, takes it for a new one.

    Their ids are made from that of the process: when it has died, another can make the same and end what is left.
    While very many are in use, more are made, each to be used once.

    :ivar owner: what their ids are made from.
    :ivar made: ids of all that there have been, of those for once only the latest in which something may go on.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self.owner = uuid.uuid4().hex
        self._numbers = count()
        self._free: list[ServerSession] = []
        self._quarantined: deque[ServerSession] = deque()
        self._named: list[Document] = []
        self._for_once: deque[Document] = deque(maxlen=_MAX_SINGLE_USE_SESSIONS)

    @property
    def made(self) -> list[Document]:
        return [*self._named, *self._for_once]

    def set_session_owner(self, owner: str) -> None:
        """Sessions from now on are those of a process of this id."""
        if owner != self.owner:
            self.owner, self._numbers = owner, count()
            self._free.clear()
            self._quarantined.clear()

    def take(self) -> ServerSession:
        now = self._clock.seconds()
        if self._free:
            return self._free.pop()
        if self._quarantined and self._quarantined[0].usable_at <= now:
            return self._quarantined.popleft()
        return self._make(now)

    def return_session(self, session: ServerSession) -> None:
        """Its transaction is over, or is to be ended by the next."""
        if session.is_named and session.owner == self.owner:
            self._free.append(session)

    def quarantine_session(self, session: ServerSession) -> None:
        """The server may still be at it, and would let another transaction wait."""
        if not session.is_named:
            self._for_once.append(session.id)
        elif session.owner == self.owner:
            session.usable_at = self._clock.seconds() + _QUARANTINE_SECONDS
            self._quarantined.append(session)

    def _make(self, now: float) -> ServerSession:
        number = next(self._numbers)
        is_named = number < _MAX_NAMED_SESSIONS
        id = _make_session_id(_make_session_uuid(self.owner, number) if is_named else uuid.uuid4())
        if is_named:
            self._named.append(id)
        # Those for once share pages: rather that they run into each other than that pages become ever more.
        page = LedgerPage(self.owner, number % _MAX_NAMED_SESSIONS)
        return ServerSession(id, self.owner, is_named, page, int(now * _NUMBERS_PER_SECOND))


def list_session_ids(owner: str) -> list[Document]:
    """Ids of the sessions that a process may have had, but for those that it had very many at a time of."""
    return [_make_session_id(_make_session_uuid(owner, number)) for number in range(_MAX_NAMED_SESSIONS)]


def _make_session_uuid(owner: str, number: int) -> uuid.UUID:
    return uuid.uuid5(_SESSION_NAMESPACE, f"{owner}:{number}")


def _make_session_id(made: uuid.UUID) -> Document:
    return {"id": Binary(made.bytes, UUID_SUBTYPE)}


# Seconds that something that may succeed in a moment is given for it.
MIN_RETRY_DELAY, MAX_RETRY_DELAY = 0.005, 0.03


class UncertainCommit(Exception):
    """Time is up, and nobody knows whether it was committed."""


async def wait_before_retry(clock: IReactorTime, attempt: int = 0) -> None:
    """A moment, longer with every attempt, and never the same for two."""
    scale = min(2**attempt, 16)
    await deferLater(clock, uniform(MIN_RETRY_DELAY, MAX_RETRY_DELAY) * scale)  # nosec B311 # no secret


class Transaction:
    """
    One attempt at a transaction. It sees what was there when it began, and what it wrote itself.

    What :meth:`later` was given is sent at once, right before the commit: a transaction that reads first and leaves
    all its writing to the end is in nobody's way while this process does something else, and hardly ever when it has
    died. The commit waits until everything was said to be done: a server carries it out after a statement that it
    never began with, too.
    """

    def __init__(
        self,
        partition: ConnectionPartition,
        clock: IReactorTime,
        database: str,
        session: ServerSession,
        deadline: float,
    ) -> None:
        self._partition = partition
        self._clock = clock
        self._database = database
        self._deadline = deadline
        self._session = session
        self._fields = session.begin()
        self._later: list[MongoCommand] = []
        self._begun = False
        self.wrote = False
        self.committed = False

    @property
    def page(self) -> LedgerPage:
        """Where it notes what becomes of messages; see :func:`~.ledger.entering`."""
        return self._session.page

    @property
    def open(self) -> bool:
        """Whether the server keeps it open."""
        return self._begun and not self.committed

    async def find(
        self,
        collection: str,
        filter: Document,
        *,
        sort: Document | None = None,
        limit: int = 0,
        skip: int = 0,
        projection: Document | None = None,
        hint: str | None = None,
    ) -> list[Document]:
        """:param limit: 0 for all."""
        request = build_find(collection, filter, sort=sort, limit=limit, skip=skip, projection=projection, hint=hint)
        return await self.query(request)

    async def query(self, question: MongoCommand) -> list[Document]:
        """What one of `finding` and `aggregating` finds."""
        (found,) = await self.ask(question)
        return found

    async def ask(self, *questions: MongoCommand) -> list[list[Document]]:
        """What several of `finding` and `aggregating` find, asked at once."""
        replies = await self._send_checked(questions)
        return [
            await read_cursor(self._run, next(iter(question.body.values())), reply)
            for question, reply in zip(questions, replies, strict=True)
        ]

    async def insert(self, collection: str, documents: Iterable[Document]) -> None:
        """
        :raise Duplicate: one of them is there already, and the transaction is over.
        :raise PayloadTooLarge: one of them could not be stored.
        """
        await self._write(build_inserts(collection, documents))

    async def update(self, collection: str, *updates: Document) -> list[Document]:
        """
        :param updates: `q`, `u` and perhaps `upsert`, `multi`, `hint`, `arrayFilters` each.
        :return: replies, mostly one, with `n`, `nModified` and `upserted`.
        """
        return await self._write(build_updates(collection, updates))

    async def delete(self, collection: str, *filters: Document) -> int:
        """Delete all that match one of the filters; how many those were."""
        return sum(reply["n"] for reply in await self._write(build_deletes(collection, *filters)))

    def write_at_end(self, requests: Iterable[MongoCommand]) -> None:
        """Write this at the very end, in this order; see `inserting`, `updating` and `deleting`."""
        self._later += requests

    async def commit(self) -> None:
        """
        Durable on a majority when it returns; what only read stays open.

        :raise Doubtful: nobody knows whether it was done.
        :raise Duplicate: a unique index has a value already.
        :raise Refused: nothing was done.
        :raise Unreachable: nothing was done.
        """
        if self._later:
            await self._write(self._later)
        if not self.wrote:
            return
        (reply,) = await self._send([self._build_end_command("commitTransaction", self._deadline)])
        if not self._is_committed(reply):
            await self._commit_again()
        self.committed = True

    async def abort(self, deadline: float) -> bool:
        """Whether the server knows that it is over."""
        try:
            (reply,) = await self._partition.exchange(
                self._database, [self._build_end_command("abortTransaction", deadline)], deadline
            )
        except ServerUnreachable:
            return False
        return reply is not None

    async def _write(self, requests: Iterable[MongoCommand]) -> list[Document]:
        self.wrote = True
        return await self._send_checked(list(requests))

    async def _run(self, request: MongoCommand) -> Document:
        (reply,) = await self._send_checked([request])
        return reply

    async def _send_checked(self, requests: Sequence[MongoCommand]) -> list[Document]:
        """Statements that are sent at once; all of them were done when it returns."""
        if not requests:
            return []
        replies = await self._send([self._statement(request) for request in requests])
        if None in replies:
            raise ServerUnreachable("no answer to a statement")
        return [check_reply(reply or {}) for reply in replies]

    def _statement(self, request: MongoCommand) -> MongoCommand:
        more: Document = {**self._fields, "maxTimeMS": self._milliseconds(self._deadline)}
        if "getMore" in request.body:
            del more["maxTimeMS"]
        if not self._begun:
            self._begun = True
            more |= {"startTransaction": True, "readConcern": {"level": "snapshot"}}
        return request.with_fields(more)

    def _build_end_command(self, name: str, deadline: float) -> MongoCommand:
        left = self._milliseconds(deadline)
        concern = {"w": "majority", "j": True, "wtimeout": left}
        return MongoCommand({name: 1, **self._fields, "maxTimeMS": left, "writeConcern": concern}, database="admin")

    async def _send(self, requests: Sequence[MongoCommand]) -> list[Document | None]:
        if self._clock.seconds() >= self._deadline:
            raise ServerUnreachable("time is up")
        return await self._partition.exchange(self._database, requests, self._deadline)

    def _milliseconds(self, deadline: float) -> int:
        return max(int((deadline - self._clock.seconds()) * 1000), 1)

    async def _commit_again(self) -> None:
        """As often as it takes: one that was done is done again without harm."""
        attempt = 0
        while True:
            attempt += 1
            await wait_before_retry(self._clock, attempt)
            if self._clock.seconds() >= self._deadline:
                raise UncertainCommit
            try:
                (reply,) = await self._send([self._build_end_command("commitTransaction", self._deadline)])
            except ServerUnreachable:
                continue
            if self._is_committed(reply):
                return

    def _is_committed(self, reply: Document | None) -> bool:
        """
        False when nobody knows.

        :raise Refused: it is not, and will not be.
        """
        if reply is None:
            return False
        try:
            check_reply(reply)
        except MongoCommandError as error:
            if error.is_commit_uncertain or "writeConcernError" in reply:
                return False
            raise
        return True


T = TypeVar("T")
TransactionWork = Callable[[Transaction], Awaitable[T]]
UndoCallback = Callable[[], None]
UndoWork = TransactionWork[UndoCallback | None]

# Transactions that are open at a time, of those that write and of those that read only; more would keep the server
# from all of them.
_MAX_OPEN_TRANSACTIONS = 32
_MAX_UNCERTAIN_COMMITS = 1_000
# Seconds that a server is given to end one.
_ABORT_TIMEOUT = 1.0
# The document that all undoing writes, so that none of it is done by a server that is the primary no more.
_UNDO_HEARTBEAT_ID = "undone"

_log = Logger(namespace="mediatord.store")


class TransactionRunner:
    """
    :param on_doubt: called when there is something that :meth:`settle` has to see to.
    """

    def __init__(
        self,
        pool: PrimaryConnectionPool,
        clock: IReactorTime,
        database: str,
        error_log: OperationErrorLog,
        on_uncertain: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._database = database
        self._error_log = error_log
        self._on_uncertain = on_uncertain
        self._writing_slots = DeferredSemaphore(_MAX_OPEN_TRANSACTIONS)
        self._reading_slots = DeferredSemaphore(_MAX_OPEN_TRANSACTIONS)
        self._uncertain: deque[tuple[ServerSession, UndoWork]] = deque()
        self._settling = False
        self.sessions = ServerSessionPool(clock)

    @property
    def has_uncertain_commits(self) -> bool:
        """Whether there is something to settle."""
        return bool(self._uncertain)

    async def transact(
        self,
        work: TransactionWork[T],
        deadline: float,
        undo: UndoWork | None = None,
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
        await self._acquire_slot(slots, deadline)
        run = _TransactionRun(self.sessions.take(), self._pool.reading if reading else self._pool.writing)
        try:
            answer = await self._transact(run, work, deadline, tries)
        except UncertainCommit:
            self._record_uncertain(run.session, undo or _do_nothing)
            raise ServerUnreachable("no answer to a commit") from None
        except BaseException:
            self._release_session(run)
            raise
        finally:
            slots.release()
        self._release_session(run)
        return answer

    def schedule_undo(self, undo: UndoWork) -> None:
        """
        Have something undone once the server answers.

        :param undo: does no harm when it is done twice; what it returns is called when it is durable.
        """
        self._record_uncertain(self.sessions.take(), undo)

    async def undo_uncertain(self, deadline: float) -> None:
        """Undo what nobody knows of whether it was done. What cannot be undone yet is noted behind all else."""
        while self._settling:
            if self._clock.seconds() >= deadline:
                return
            await wait_before_retry(self._clock)
        self._settling = True
        try:
            for _ in range(len(self._uncertain)):
                if self._clock.seconds() >= deadline:
                    return
                await self._undo_one(deadline)
        finally:
            self._settling = False

    async def _acquire_slot(self, slots: DeferredSemaphore, deadline: float) -> None:
        """:raise Unreachable: none was free in time."""
        acquired = slots.acquire()
        if not acquired.called:
            left = max(deadline - self._clock.seconds(), 0.0)
            acquired.addTimeout(left, self._clock, lambda _, __: fail(ServerUnreachable("time is up")))
        await acquired

    async def _undo_one(self, deadline: float) -> None:
        session, undo = self._uncertain[0]
        run = _TransactionRun(session, self._pool.writing)
        try:
            settled = await self._transact(run, lambda transaction: _run_undo(transaction, undo), deadline, None)
        except CancelledError:
            raise
        except Exception as error:
            self._error_log.report("undoing a doubtful write", _redact_error(error))
            self._uncertain.rotate(-1)
            return
        self._uncertain.popleft()
        self._release_session(run)
        if settled is not None:
            settled()

    async def _transact(
        self, run: _TransactionRun, work: TransactionWork[T], deadline: float, tries: int | None
    ) -> T:
        attempt = contended = lost = 0
        while True:
            attempt += 1
            run.last = Transaction(run.partition, self._clock, self._database, run.session, deadline)
            try:
                return await _run_attempt(run.last, work)
            except MongoCommandError as error:
                contended += error.contended
                if not error.is_transient or contended == tries or self._clock.seconds() >= deadline:
                    raise
            except ServerUnreachable as error:
                lost += error.connected
                if lost == tries or self._clock.seconds() >= deadline:
                    raise
            if run.last.wrote:
                await run.last.abort(deadline)
            await wait_before_retry(self._clock, attempt)

    def _release_session(self, run: _TransactionRun) -> None:
        """Its session can be used again when the server has ended what was begun in it. Nobody waits for that."""
        if run.last is None or not run.last.open:
            self.sessions.return_session(run.session)
        else:
            Deferred.fromCoroutine(self._end(run.session, run.last))

    async def _end(self, session: ServerSession, left: Transaction) -> None:
        if await left.abort(self._clock.seconds() + _ABORT_TIMEOUT):
            self.sessions.return_session(session)
        elif left.wrote:
            self._record_uncertain(session, _do_nothing)  # else it would be in the way of others for a minute
        else:
            self.sessions.quarantine_session(session)

    def _record_uncertain(self, session: ServerSession, undo: UndoWork) -> None:
        if len(self._uncertain) < _MAX_UNCERTAIN_COMMITS:
            self._uncertain.append((session, undo))
        else:
            self.sessions.quarantine_session(session)
            _log.error("too many doubtful writes to undo: another one stays as it is")
        self._on_uncertain()


class _TransactionRun:
    """
    :ivar last: the latest attempt.
    """

    def __init__(self, session: ServerSession, partition: ConnectionPartition) -> None:
        self.session = session
        self.partition = partition
        self.last: Transaction | None = None


async def _run_attempt(transaction: Transaction, work: TransactionWork[T]) -> T:
    try:
        answer = await work(transaction)
    except CommitWithError as kept:
        await transaction.commit()
        raise kept.error from None
    await transaction.commit()
    return answer


async def _run_undo(transaction: Transaction, undo: UndoWork) -> UndoCallback | None:
    settled = await undo(transaction)
    transaction.write_at_end(build_heartbeat_write(_UNDO_HEARTBEAT_ID))
    return settled


async def _do_nothing(_transaction: Transaction) -> None:
    """The next transaction of a session ends the one before."""


def _redact_error(error: Exception) -> Exception:
    """One that may be logged: what is not of our making may say what was stored."""
    return error if isinstance(error, (MongoCommandError, ServerUnreachable)) else TypeError(type(error).__name__)
