"""
Writing to a socket at once.

Twisted keeps what is written until the reactor's next turn, asks the kernel whether there is room for it, writes it,
and takes the question back: three system calls and a turn for a few bytes that there is always room for.

Round-robin scheduling of connections that have received more than is served at once.

Whatever lies in a buffer could be served in one iteration of the reactor, and everybody else would wait for it. A
connection serves a little of it and queues up for a quantum; reading from it is paused until nothing is left.

What clients have asked for and do not read.

An answer stays in memory until its client has taken it. One connection gets no second answer before that, but a
client may open many connections and ask on each for as much as there is.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

from twisted.internet.interfaces import IReactorTime
from twisted.internet.tcp import Connection
from twisted.logger import Logger

from mediatord.failure_logging import redact_failure


def write_immediately(transport: Any, data: bytes) -> None:
    """
    Write, right away where nothing waits to be written before it.

    What the kernel does not take, and everything on a transport that is more than a socket, such as one with TLS, is
    written as usual. A connection that turns out to be broken is left to be found so by the reactor.
    """
    if (
        isinstance(transport, Connection)
        and transport.connected
        and not (transport.dataBuffer or transport._tempDataBuffer or transport.disconnecting or transport.TLS)
        and not (transport._aborting or transport._writeDisconnecting)
    ):
        try:
            sent = transport.socket.send(data)
        except OSError:
            sent = 0
        if sent == len(data):
            return
        data = data[sent:]
    transport.write(data)


_log = Logger()

# In one iteration of the reactor: quanta of all connections, and seconds after which no further one begins.
MAX_QUANTA = 64
MAX_ITERATION_SECONDS = 0.005


class SchedulableConnection(Protocol):
    """A connection."""

    def run_quantum(self) -> None:
        """Serve a little of what was received; queue up again if more is left."""

    def __hash__(self) -> int: ...


class RoundRobinScheduler:
    """
    Gives each connection that queues up one quantum after the other, in turn.

    :param steady: seconds since any time, by a clock that nobody sets.
    """

    def __init__(self, clock: IReactorTime, steady: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._steady = steady
        self._waiting: dict[SchedulableConnection, None] = {}
        self._is_due = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, connection: SchedulableConnection) -> None:
        """Queue it up, unless it is in the queue."""
        self._waiting.setdefault(connection)
        if not self._is_due:
            self._is_due = True  # also while it runs
            self._clock.callLater(0, self._run)

    def discard(self, connection: SchedulableConnection) -> None:
        """It is gone."""
        self._waiting.pop(connection, None)

    def _run(self) -> None:
        until = self._steady() + MAX_ITERATION_SECONDS
        for _ in range(MAX_QUANTA):
            if not self._waiting:
                break
            connection = next(iter(self._waiting))
            del self._waiting[connection]
            try:
                connection.run_quantum()
            except Exception:
                _log.failure("serving a connection failed", redact_failure())
            if self._steady() >= until:
                break
        self._is_due = bool(self._waiting)
        if self._is_due:
            self._clock.callLater(0, self._run)


MAX_UNREAD_PER_CLIENT = 33_554_432
MAX_UNREAD_TOTAL = 268_435_456
# As much as a transport holds before it calls itself full: every connection may have that.
SMALL_RESPONSE_BYTES = 65_536


class ResponseBudget:
    """
    The bodies of all answers that were written and not taken at once.

    :param per_payer: bytes that may wait for one payer.
    :param in_all: bytes that may wait for all of them.
    :param released: told how many bytes of an answer wait no longer.
    :ivar total: bytes that wait now.
    """

    def __init__(
        self,
        per_client: int = MAX_UNREAD_PER_CLIENT,
        total_limit: int = MAX_UNREAD_TOTAL,
        released: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._released = released
        self._per_client = per_client
        self._total_limit = total_limit
        self._waiting: dict[str, int] = {}
        self.total = 0

    def limit(self, total_limit: int) -> None:
        """Let so many bytes wait from now on, and an eighth of them for one payer."""
        self._total_limit, self._per_client = total_limit, total_limit // 8

    @property
    def held(self) -> tuple[int, int]:
        """Payers with answers that wait, and the bytes of those."""
        return len(self._waiting), self.total

    def of(self, rate_limit_key: str) -> int:
        """How many bytes wait for one payer."""
        return self._waiting.get(rate_limit_key, 0)

    def has_room(self, rate_limit_key: str, size: int) -> bool:
        """Whether an answer of so many bytes may be written; a small one always may."""
        if size <= SMALL_RESPONSE_BYTES:
            return True
        return self.of(rate_limit_key) + size <= self._per_client and self.total + size <= self._total_limit

    def add(self, rate_limit_key: str, size: int) -> None:
        """An answer waits to be read."""
        self._waiting[rate_limit_key] = self.of(rate_limit_key) + size
        self.total += size

    def remove(self, rate_limit_key: str, size: int) -> None:
        """An answer was read, or will never be."""
        left = self.of(rate_limit_key) - size
        if left > 0:
            self._waiting[rate_limit_key] = left
        else:
            self._waiting.pop(rate_limit_key, None)
        self.total -= size
        self._released(size)


class ConnectionResponseBudget:
    """What one connection has of it: the answers since its client has taken all there was."""

    def __init__(self, unread: ResponseBudget) -> None:
        self._unread = unread
        self._answers: list[tuple[str, int]] = []

    def has_room(self, rate_limit_key: str, size: int) -> bool:
        """Whether an answer of so many bytes may be written."""
        return self._unread.has_room(rate_limit_key, size)

    def add(self, rate_limit_key: str, size: int) -> None:
        """An answer was written, and the transport is full."""
        self._answers.append((rate_limit_key, size))
        self._unread.add(rate_limit_key, size)

    def clear(self) -> None:
        """The client has taken everything, or is gone."""
        answers, self._answers = self._answers, []
        for rate_limit_key, size in answers:
            self._unread.remove(rate_limit_key, size)
