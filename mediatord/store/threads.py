"""Threads for blocking work, each with a database connection of its own."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Protocol, TypeVar

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorFromThreads
from twisted.internet.threads import deferToThreadPool
from twisted.python.threadpool import ThreadPool

T = TypeVar("T")


class Runner(Protocol):
    """Does work one after another, out of the reactor's way; in tests, right away."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def __call__(self, work: Callable[[], T]) -> Deferred[T]: ...


class ThreadRunner:
    """A :class:`Runner` with one thread between start and stop."""

    def __init__(self, reactor: IReactorFromThreads, name: str) -> None:
        self._reactor = reactor
        self._name = name
        self._pool: ThreadPool | None = None

    def start(self) -> None:
        self._pool = ThreadPool(minthreads=1, maxthreads=1, name=self._name)
        self._pool.start()

    def stop(self) -> None:
        """Wait for what is being done, then end the thread."""
        if self._pool is not None:
            self._pool.stop()
            self._pool = None

    def __call__(self, work: Callable[[], T]) -> Deferred[T]:
        if self._pool is None:
            raise RuntimeError("not started")
        return deferToThreadPool(self._reactor, self._pool, work)


class ConnectionThread:
    """A runner and the connection that is used nowhere else."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._connection: sqlite3.Connection | None = None

    def open(self, connect: Callable[[], sqlite3.Connection]) -> Deferred[None]:
        """Start the thread and connect in it; if that fails, the thread is stopped again."""
        self._runner.start()
        opened = self._runner(connect)
        return opened.addCallbacks(self._opened, self._stop)

    def run(self, work: Callable[[sqlite3.Connection], T]) -> Deferred[T]:
        """Do `work` with the connection."""
        connection = self._connection
        if connection is None:
            raise RuntimeError("used before it was opened or after it was closed")
        return self._runner(lambda: work(connection))

    def interrupt(self) -> None:
        """Have the statement that is being executed fail, if there is one; may be called from another thread."""
        if self._connection is not None:
            self._connection.interrupt()

    def close(self) -> Deferred[None]:
        """Close the connection and stop the thread, if they are there."""
        connection, self._connection = self._connection, None
        if connection is None:
            return succeed(None)
        return self._runner(connection.close).addBoth(self._stop)

    def _opened(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def _stop(self, result: T) -> T:
        self._runner.stop()
        return result
