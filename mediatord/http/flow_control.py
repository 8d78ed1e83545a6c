"""
Flow control of connections: immediate writes, round-robin scheduling, and a budget of unread responses.

Twisted buffers what is written until its next iteration and then asks the kernel for readiness: three system calls
for a few bytes. Everything in a receive buffer could be served in one iteration, while other connections wait: a
connection serves a quantum at a time instead. A client may open many connections and read none of its responses:
their bodies are bounded per client and in total.
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
    Write to the socket at once if the transport's buffer is empty.

    What the kernel does not take, and everything on other transports such as TLS, is written as usual. The reactor
    detects broken connections.
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

# Quanta in one iteration of the reactor, and seconds after which no further quantum begins.
MAX_QUANTA = 64
MAX_ITERATION_SECONDS = 0.005


class SchedulableConnection(Protocol):
    """A connection that serves received data in quanta."""

    def run_quantum(self) -> None:
        """Serve some of the received data; add itself again if more is left."""

    def __hash__(self) -> int: ...


class RoundRobinScheduler:
    """
    Runs one quantum of each queued connection in turn.

    :param steady: monotonic clock.
    """

    def __init__(self, clock: IReactorTime, steady: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._steady = steady
        self._waiting: dict[SchedulableConnection, None] = {}
        self._is_due = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, connection: SchedulableConnection) -> None:
        """Queue a connection, unless it is queued."""
        self._waiting.setdefault(connection)
        if not self._is_due:
            self._is_due = True  # also while it runs
            self._clock.callLater(0, self._run)

    def discard(self, connection: SchedulableConnection) -> None:
        """Remove a closed connection."""
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
# What a transport buffers before it pauses its producer; every connection may have that.
SMALL_RESPONSE_BYTES = 65_536


class ResponseBudget:
    """
    Bounds the bytes of responses that clients have not read.

    :param per_client: bytes for one rate limit key.
    :param total_limit: bytes for all clients.
    :param released: called with the size of a response that is no longer buffered.
    :ivar total: current bytes.
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
        """Change the total limit; one client may use an eighth of it."""
        self._total_limit, self._per_client = total_limit, total_limit // 8

    @property
    def held(self) -> tuple[int, int]:
        """Number of clients with unread responses, and the bytes of those."""
        return len(self._waiting), self.total

    def of(self, rate_limit_key: str) -> int:
        """Unread bytes of one client."""
        return self._waiting.get(rate_limit_key, 0)

    def has_room(self, rate_limit_key: str, size: int) -> bool:
        """Whether a response of this size is within the budget; a small one always is."""
        if size <= SMALL_RESPONSE_BYTES:
            return True
        return self.of(rate_limit_key) + size <= self._per_client and self.total + size <= self._total_limit

    def add(self, rate_limit_key: str, size: int) -> None:
        """Count a response that was not read at once."""
        self._waiting[rate_limit_key] = self.of(rate_limit_key) + size
        self.total += size

    def remove(self, rate_limit_key: str, size: int) -> None:
        """Count a response out that was read, or never will be."""
        left = self.of(rate_limit_key) - size
        if left > 0:
            self._waiting[rate_limit_key] = left
        else:
            self._waiting.pop(rate_limit_key, None)
        self.total -= size
        self._released(size)


class ConnectionResponseBudget:
    """The unread responses of one connection."""

    def __init__(self, unread: ResponseBudget) -> None:
        self._unread = unread
        self._answers: list[tuple[str, int]] = []

    def has_room(self, rate_limit_key: str, size: int) -> bool:
        """Whether an answer of so many bytes may be written."""
        return self._unread.has_room(rate_limit_key, size)

    def add(self, rate_limit_key: str, size: int) -> None:
        """Count a response that was written to a full transport."""
        self._answers.append((rate_limit_key, size))
        self._unread.add(rate_limit_key, size)

    def clear(self) -> None:
        """Count all responses out: the client has read them, or closed the connection."""
        answers, self._answers = self._answers, []
        for rate_limit_key, size in answers:
            self._unread.remove(rate_limit_key, size)
