"""Threads for blocking work, each with a database connection of its own."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol, TypeVar

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorFromThreads
from twisted.python.failure import Failure

T = TypeVar("T")

_Job = tuple[Callable[[], Any], Deferred[Any]]


class Runner(Protocol):
    """Does work one after another, out of the reactor's way; in tests, right away."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def __call__(self, work: Callable[[], T]) -> Deferred[T]: ...


class ThreadRunner:
    """
    A :class:`Runner` with one thread between start and stop.

    Twisted's pool does the same for any number of threads, at several times what it costs to hand over work to one.
    """

    def __init__(self, reactor: IReactorFromThreads, name: str) -> None:
        self._reactor = reactor
        self._name = name
        self._thread: Thread | None = None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()

    def start(self) -> None:
        """A runner that was stopped can be started again."""
        self._thread = Thread(target=self._serve, name=self._name)
        self._thread.start()

    def stop(self) -> None:
        """Wait for what is being done, then end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def __call__(self, work: Callable[[], T]) -> Deferred[T]:
        if self._thread is None:
            raise RuntimeError("not started")
        done: Deferred[T] = Deferred()
        self._jobs.put((work, done))
        return done

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, done = job
            fire: Callable[[Any], None] = done.callback
            try:
                result = work()
            except BaseException:
                result, fire = Failure(), done.errback
            self._reactor.callFromThread(fire, result)
            del job, work, done, fire, result  # nothing of it is held on to until there is more to do


class ConnectionThread:
    """
    A runner and the connection that is used nowhere else.

    A connection that a job leaves inside a transaction, because it could not be rolled back, is replaced: every later
    `BEGIN` on it would fail.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._connection: sqlite3.Connection | None = None
        self._connect: Callable[[], sqlite3.Connection] | None = None

    def open(
        self, connect: Callable[[], sqlite3.Connection], reconnect: Callable[[], sqlite3.Connection] | None = None
    ) -> Deferred[None]:
        """
        Start the thread and connect in it; if that fails, the thread is stopped again.

        :param reconnect: makes the connection that takes the place of one that cannot be used any longer.
        """
        self._connect = reconnect or connect
        self._runner.start()
        opened = self._runner(connect)
        return opened.addCallbacks(self._opened, self._stop)

    def run(self, work: Callable[[sqlite3.Connection], T]) -> Deferred[T]:
        """Do `work` with the connection."""
        if self._connect is None:
            raise RuntimeError("used before it was opened or after it was closed")
        return self._runner(lambda: self._perform(work))

    def interrupt(self) -> None:
        """Have the statement that is being executed fail, if there is one; may be called from another thread."""
        if self._connection is not None:
            self._connection.interrupt()

    def close(self) -> Deferred[None]:
        """Close the connection and stop the thread, if they are there."""
        if self._connect is None:
            return succeed(None)
        self._connect = None
        return self._runner(self._disconnect).addBoth(self._stop)

    def _perform(self, work: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._connection
        if connection is None:
            assert self._connect is not None
            connection = self._connection = self._connect()
        try:
            return work(connection)
        finally:
            if connection.in_transaction:
                self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _opened(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def _stop(self, result: T) -> T:
        self._connect = None
        self._runner.stop()
        return result
