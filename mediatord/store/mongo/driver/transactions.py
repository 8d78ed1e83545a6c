"""Server sessions, transactions, and undoing of commits whose outcome is unknown."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, count
from random import uniform
from typing import NamedTuple, TypeVar

from bson import Binary, Int64
from bson.binary import UUID_SUBTYPE
from twisted.internet.defer import CancelledError, Deferred, DeferredSemaphore
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.runtime.failure_logging import redact_failure
from mediatord.store.mongo.driver.collection import Document, MongoCommand, build_probe_write, read_cursor
from mediatord.store.mongo.driver.connection_pool import PrimaryConnectionPool
from mediatord.store.mongo.driver.errors import (
    CommitWithError,
    MongoCommandError,
    OperationErrorLog,
    RepeatTransaction,
    ServerUnreachable,
    check_reply,
)

# Seconds after which no command of a session can be running any more.
_QUARANTINE_SECONDS = 5.0
# Transaction numbers start at the time in these fractions of a second, so they exceed all former ones of a session.
_NUMBERS_PER_SECOND = 1_000_000
# Sessions of a process that others can end, and slots.
_MAX_LISTED_SESSIONS = 256
_SESSION_NAMESPACE = uuid.UUID("6f4ad6f2-02f5-4f2e-9d7e-3a6d1c3f6b0a")
# Seconds before a retry, for the first attempt.
MIN_RETRY_DELAY, MAX_RETRY_DELAY = 0.005, 0.03
# Open transactions, of writers and of readers each; more would overload the server.
_MAX_OPEN_TRANSACTIONS = 32
_MAX_UNCERTAIN_COMMITS = 1_000
_ABORT_TIMEOUT = 1.0
# The document that every undo writes, so that none of them is served by a former primary.
_UNDO_PROBE_ID = "undone"

T = TypeVar("T")

_log = Logger(namespace="mediatord.store")


class SessionSlot(NamedTuple):
    """Identifies a session among those of its owner; a document per slot is free of write conflicts."""

    owner: str
    number: int

    @property
    def id(self) -> str:
        # The others share slots: rare conflicts are better than ever more documents.
        return f"{self.owner}:{self.number % _MAX_LISTED_SESSIONS}"


@dataclass(eq=False, slots=True)
class ServerSession:
    """
    Logical session, used for one transaction after another; a higher number aborts the transaction before.

    :param id: the `lsid`.
    :param number: of the latest transaction.
    :param last: the latest transaction.
    """

    id: Document
    slot: SessionSlot
    number: int
    usable_at: float = 0.0
    last: Transaction | None = None

    def begin(self) -> Document:
        """Start the next transaction; return the fields of its commands."""
        self.number += 1
        return {"lsid": self.id, "txnNumber": Int64(self.number), "autocommit": False}


class ServerSessionPool:
    """
    Pool of sessions; those with the lowest numbers are used first. Sessions do not expire: the server creates an
    unknown one anew.

    Session ids derive from the id of the process, so another process can abort what a dead one left open in the first
    :data:`_MAX_LISTED_SESSIONS` sessions.

    :ivar owner: what session ids are derived from.
    :ivar session_ids: of all sessions.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self.owner = uuid.uuid4().hex
        self.session_ids: list[Document] = []
        self._numbers = count()
        self._free: list[tuple[int, ServerSession]] = []
        self._quarantined: deque[ServerSession] = deque()

    def set_session_owner(self, owner: str) -> None:
        """Derive the ids of further sessions from another process id."""
        if owner != self.owner:
            self.owner, self._numbers = owner, count()
            self._free.clear()
            self._quarantined.clear()

    def check_out(self) -> ServerSession:
        now = self._clock.seconds()
        while self._quarantined and self._quarantined[0].usable_at <= now:
            self.return_session(self._quarantined.popleft())
        if self._free:
            return heappop(self._free)[1]
        number = next(self._numbers)
        id = _make_session_id(self.owner, number)
        self.session_ids.append(id)
        return ServerSession(id, SessionSlot(self.owner, number), int(now * _NUMBERS_PER_SECOND))

    def return_session(self, session: ServerSession) -> None:
        """Make a session available whose transaction has ended, or may be aborted by the next one."""
        session.last = None
        if session.slot.owner == self.owner:
            heappush(self._free, (session.slot.number, session))

    def quarantine_session(self, session: ServerSession) -> None:
        """Keep a session in use until no command of it can be running, which would block the next transaction."""
        session.last = None
        if session.slot.owner == self.owner:
            session.usable_at = self._clock.seconds() + _QUARANTINE_SECONDS
            self._quarantined.append(session)


def list_session_ids(owner: str) -> list[Document]:
    """List the ids of the first sessions that a process may have had."""
    return [_make_session_id(owner, number) for number in range(_MAX_LISTED_SESSIONS)]


def _make_session_id(owner: str, number: int) -> Document:
    return {"id": Binary(uuid.uuid5(_SESSION_NAMESPACE, f"{owner}:{number}").bytes, UUID_SUBTYPE)}


class UncertainCommit(Exception):
    """The deadline has passed, and the outcome of the commit is unknown."""


def await_until(deadline: float, clock: IReactorTime, waited: Deferred[T], error: Exception) -> Deferred[T]:
    """Let a Deferred fail with an error unless it fires by the deadline."""
    left = max(deadline - clock.seconds(), 0.0)
    return waited.addTimeout(left, clock, lambda _, __: Failure(error))


async def wait_before_retry(clock: IReactorTime, attempt: int = 0) -> None:
    """Wait with exponential backoff and jitter."""
    scale = min(2**attempt, 16)
    await deferLater(clock, uniform(MIN_RETRY_DELAY, MAX_RETRY_DELAY) * scale)  # nosec B311 # no secret


def get_milliseconds_left(clock: IReactorTime, deadline: float) -> int:
    """Return the time until a deadline, at least 1 ms because the server takes 0 for no limit."""
    return max(int((deadline - clock.seconds()) * 1000), 1)


class Transaction:
    """
    One attempt at a transaction, which reads a snapshot and its own writes.

    Writes given to :meth:`write_at_end` are sent right before the commit: a transaction that reads first and writes
    at the end hardly ever holds locks while this process does something else or has died. The commit is sent only
    after all statements were acknowledged, because a server also commits when a statement never arrived.
    """

    def __init__(
        self,
        pool: PrimaryConnectionPool,
        clock: IReactorTime,
        session: ServerSession,
        deadline: float,
        for_reads: bool,
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._deadline = deadline
        self._for_reads = for_reads
        self._fields = session.begin()
        self._writes_at_end: list[MongoCommand] = []
        self._is_started = False
        self.slot = session.slot
        self.has_written = False
        self.is_committed = False

    @property
    def is_open(self) -> bool:
        """Whether it is open on the server."""
        return self._is_started and not self.is_committed

    async def query(self, query: MongoCommand) -> list[Document]:
        """Return what a `find` or `aggregate` command finds."""
        (found,) = await self.query_many(query)
        return found

    async def query_many(self, *queries: MongoCommand) -> list[list[Document]]:
        """Return what several `find` and `aggregate` commands find, sent at once."""
        replies = await self._run_all(queries)
        return [await read_cursor(self._run, query, reply) for query, reply in zip(queries, replies, strict=True)]

    async def write(self, commands: Iterable[MongoCommand]) -> list[Document]:
        """
        Send writes now, and return their replies; mostly :meth:`write_at_end` is better.

        :raise DuplicateKeyError: a document exists, and the transaction is aborted.
        """
        self.has_written = True
        return await self._run_all(list(commands))

    def write_at_end(self, *commands: Iterable[MongoCommand]) -> None:
        """Send writes right before the commit, in this order."""
        self._writes_at_end += chain(*commands)

    async def commit(self) -> None:
        """
        Commit durably on a majority; a transaction that only read stays open.

        :raise UncertainCommit: the outcome is unknown.
        :raise DuplicateKeyError: a unique index already has a value.
        :raise MongoCommandError: nothing was written.
        :raise ServerUnreachable: nothing was written.
        """
        if self._writes_at_end:
            await self.write(self._writes_at_end)
        if not self.has_written:
            return
        self.is_committed = await self._send_commit()
        attempt = 0
        while not self.is_committed:
            attempt += 1
            await wait_before_retry(self._clock, attempt)
            if self._clock.seconds() >= self._deadline:
                raise UncertainCommit
            with suppress(ServerUnreachable):
                self.is_committed = await self._send_commit()

    async def abort(self, deadline: float) -> bool:
        """Abort the transaction; return whether the server replied."""
        command = self._build_end_command("abortTransaction", deadline)
        try:
            (reply,) = await self._pool.exchange([command], deadline, for_reads=self._for_reads)
        except ServerUnreachable:
            return False
        return reply is not None

    async def _run(self, command: MongoCommand) -> Document:
        (reply,) = await self._run_all([command])
        return reply

    async def _run_all(self, commands: Sequence[MongoCommand]) -> list[Document]:
        """Send statements at once; return their replies when all have succeeded."""
        if not commands:
            return []
        replies = await self._send([self._build_statement(command) for command in commands])
        if None in replies:
            raise ServerUnreachable("no reply to a statement")
        return [check_reply(reply or {}) for reply in replies]

    def _build_statement(self, command: MongoCommand) -> MongoCommand:
        more: Document = {**self._fields, "maxTimeMS": get_milliseconds_left(self._clock, self._deadline)}
        if "getMore" in command.body:
            del more["maxTimeMS"]
        if not self._is_started:
            self._is_started = True
            more |= {"startTransaction": True, "readConcern": {"level": "snapshot"}}
        return command.with_fields(more)

    def _build_end_command(self, name: str, deadline: float) -> MongoCommand:
        left = get_milliseconds_left(self._clock, deadline)
        concern = {"w": "majority", "j": True, "wtimeout": left}
        return MongoCommand({name: 1, **self._fields, "maxTimeMS": left, "writeConcern": concern}, database="admin")

    async def _send(self, commands: Sequence[MongoCommand]) -> list[Document | None]:
        if self._clock.seconds() >= self._deadline:
            raise _deadline_exceeded()
        return await self._pool.exchange(commands, self._deadline, for_reads=self._for_reads)

    async def _send_commit(self) -> bool:
        """
        Commit, which is idempotent; return whether that is known to have succeeded.

        :raise MongoCommandError: it was rejected.
        """
        (reply,) = await self._send([self._build_end_command("commitTransaction", self._deadline)])
        if reply is None:
            return False
        try:
            check_reply(reply)
        except MongoCommandError as error:
            if error.is_commit_uncertain or "writeConcernError" in reply:
                return False
            raise
        return True


def _deadline_exceeded() -> ServerUnreachable:
    return ServerUnreachable("deadline exceeded")


TransactionWork = Callable[[Transaction], Awaitable[T]]
UndoCallback = Callable[[], None]
UndoWork = TransactionWork[UndoCallback | None]


class TransactionRunner:
    """
    Runs transactions with retries, and undoes those whose outcome is unknown.

    :param on_uncertain: called when :meth:`undo_uncertain` has something to do.
    """

    def __init__(
        self,
        pool: PrimaryConnectionPool,
        clock: IReactorTime,
        error_log: OperationErrorLog,
        on_uncertain: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._error_log = error_log
        self._on_uncertain = on_uncertain
        self._writing_slots = DeferredSemaphore(_MAX_OPEN_TRANSACTIONS)
        self._reading_slots = DeferredSemaphore(_MAX_OPEN_TRANSACTIONS)
        self._uncertain: deque[tuple[ServerSession, UndoWork]] = deque()
        self.sessions = ServerSessionPool(clock)

    @property
    def has_uncertain_commits(self) -> bool:
        """Whether commits that were reported as failed may have succeeded and are not undone yet."""
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
        Run `work` in a transaction, again after a transient error.

        :param undo: run later if the outcome of the commit is unknown; see :meth:`schedule_undo`.
        :param tries: give up after this many write conflicts or lost connections; None: at the deadline.
        :param reading: whether it only reads, and may be as slow as other reads.
        :raise DuplicateKeyError: a unique index already has the value.
        :raise MongoCommandError: the server rejected a command.
        :raise ServerUnreachable: the deadline has passed.
        """
        slots = self._reading_slots if reading else self._writing_slots
        acquired = slots.acquire()
        await (acquired if acquired.called else await_until(deadline, self._clock, acquired, _deadline_exceeded()))
        session = self.sessions.check_out()
        try:
            answer = await self._transact(session, work, deadline, tries, reading)
        except UncertainCommit:
            self._record_uncertain(session, undo or _do_nothing)
            raise ServerUnreachable("no reply to a commit") from None
        except BaseException:
            self._release_session(session)
            raise
        finally:
            slots.release()
        self._release_session(session)
        return answer

    def schedule_undo(self, undo: UndoWork) -> None:
        """
        Run a transaction as soon as the server is reachable.

        :param undo: idempotent; what it returns is called when it is durable.
        """
        self._record_uncertain(self.sessions.check_out(), undo)

    async def undo_uncertain(self, deadline: float) -> None:
        """Undo all commits whose outcome is unknown, each once; those that cannot be undone yet move to the end."""
        for _ in range(len(self._uncertain)):
            if self._clock.seconds() >= deadline:
                return
            await self._undo_one(deadline)

    async def _undo_one(self, deadline: float) -> None:
        session, undo = self._uncertain[0]

        async def work(transaction: Transaction) -> UndoCallback | None:
            on_undone = await undo(transaction)
            transaction.write_at_end(build_probe_write(_UNDO_PROBE_ID))
            return on_undone

        try:
            on_undone = await self._transact(session, work, deadline, None, False)
        except CancelledError:
            raise
        except Exception as error:
            is_ours = isinstance(error, (MongoCommandError, ServerUnreachable))  # others may repeat stored data
            self._error_log.report(
                "undo of an uncertain commit", error if is_ours else TypeError(type(error).__name__)
            )
            self._uncertain.rotate(-1)
            return
        self._uncertain.popleft()
        self._release_session(session)
        if on_undone is not None:
            try:
                on_undone()
            except Exception:
                _log.failure("reporting the outcome of a commit failed", redact_failure())

    async def _transact(
        self, session: ServerSession, work: TransactionWork[T], deadline: float, tries: int | None, reading: bool
    ) -> T:
        attempt = conflicts = lost = 0
        while True:
            attempt += 1
            transaction = session.last = Transaction(self._pool, self._clock, session, deadline, reading)
            try:
                return await _run_and_commit(transaction, work)
            except RepeatTransaction:
                continue  # the next transaction of the session aborts this one
            except MongoCommandError as error:
                conflicts += error.is_write_conflict
                if not error.is_transient or conflicts == tries or self._clock.seconds() >= deadline:
                    raise
            except ServerUnreachable as error:
                lost += error.connected
                if lost == tries or self._clock.seconds() >= deadline:
                    raise
            if transaction.has_written:
                await transaction.abort(deadline)
            await wait_before_retry(self._clock, attempt)

    def _release_session(self, session: ServerSession) -> None:
        """Return a session to the pool as soon as its transaction has ended on the server, in the background."""
        if session.last is not None and session.last.is_open:
            Deferred.fromCoroutine(self._abort(session, session.last))
        else:
            self.sessions.return_session(session)

    async def _abort(self, session: ServerSession, transaction: Transaction) -> None:
        if await transaction.abort(self._clock.seconds() + _ABORT_TIMEOUT):
            self.sessions.return_session(session)
        elif transaction.has_written:
            self._record_uncertain(session, _do_nothing)  # else it would hold its locks for a minute
        else:
            self.sessions.quarantine_session(session)

    def _record_uncertain(self, session: ServerSession, undo: UndoWork) -> None:
        if len(self._uncertain) < _MAX_UNCERTAIN_COMMITS:
            self._uncertain.append((session, undo))
        else:
            self.sessions.quarantine_session(session)
            _log.error("too many commits with an unknown outcome: this one stays unresolved")
        self._on_uncertain()


async def _run_and_commit(transaction: Transaction, work: TransactionWork[T]) -> T:
    try:
        answer = await work(transaction)
    except CommitWithError as committing:
        await transaction.commit()
        raise committing.error from None
    await transaction.commit()
    return answer


async def _do_nothing(_transaction: Transaction) -> None:
    """An undo that only aborts: the next transaction of a session aborts the one before."""
