"""Load on a mediator from forked processes, in closed and open loops; and message cycles, with pushes to wallets."""

from __future__ import annotations

import os
import random
import select
import socket
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle, islice, repeat
from time import perf_counter, process_time, sleep
from typing import Any, Protocol

from mediatord.bench.processes import ForkedCall, cpu_seconds
from mediatord.bench.raw_clients import (
    TIMEOUT_SECONDS,
    ClientConnection,
    ResponseCounter,
    encode_request,
    open_socket,
)
from mediatord.bench.results import ALL_PERCENTILES, Figures, LoadResult, latency_figures
from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE

# A request sent later than this counts as late; waking up takes half of it.
_LATE_SECONDS = 0.001
_MAX_PROCESSES = 4
_PUSH_TIMEOUT_SECONDS = 10.0
# After the last push, how long to wait for a duplicate of it.
_SILENCE_SECONDS = 0.2
_FOREVER = float("inf")


def intended_times(rate: float, seconds: float, seed: int, *, even: bool = False) -> Iterator[float]:
    """
    When requests are due, in seconds from the start, all before `seconds`.

    :param rate: per second; the mean of a Poisson process.
    :param even: at fixed intervals instead.
    """
    draw = random.Random(seed).expovariate
    at = 0.0 if even else draw(rate)
    for number in count(1):
        if at >= seconds:
            return
        yield at
        at = number / rate if even else at + draw(rate)


def pace(rate: float, seconds: float) -> Iterator[float]:
    """Wait until each request at fixed intervals is due; yields when it was, by `perf_counter`."""
    start = perf_counter()
    for due in intended_times(rate, seconds, 0, even=True):
        sleep(max(0.0, start + due - perf_counter()))
        yield start + due


class LoadRunner:
    """
    Sends requests over connections of its own, and waits for their responses.

    The closed loop keeps every connection busy. The open loop sends every request when it is due, or as soon
    afterwards as a connection is free. Its latency counts from when a request was due and no request is left out: a
    closed loop sends fewer requests to a server that stalls, and hides the stall ("coordinated omission").

    :param requests: encoded; the run ends when none is left.
    :param seconds: how long requests are sent; every connection sends one at least.
    :param rate: requests per second of the open loop; 0 for the closed loop.
    :param even: the open loop sends at fixed intervals instead of a Poisson process.
    :param sources: local address of each connection, instead of their number.
    :param connect: opens a connection to the host of a URL from a local address.
    """

    def __init__(
        self,
        url: str,
        requests: Iterator[Any],
        connections: int = 1,
        seconds: float = _FOREVER,
        *,
        rate: float = 0.0,
        even: bool = False,
        seed: int = 0,
        sources: Sequence[str] = (),
        connect: Callable[[str, str], socket.socket] = open_socket,
    ) -> None:
        self._epoll = select.epoll()  # before the connections: `select` takes low numbers only
        sources = sources or [""] * connections
        self._idle = deque(ClientConnection(connect(url, source)) for source in sources)
        self._connections = {one.fileno(): one for one in self._idle}
        for number in self._connections:
            self._epoll.register(number, select.EPOLLIN)
        self._requests = requests
        self._seconds = seconds
        self._times = intended_times(rate, seconds, seed, even=even) if rate else None
        self._next: tuple[float, Any] | None = None
        self._responses = ResponseCounter()
        self._patience = TIMEOUT_SECONDS
        self.result = LoadResult()

    def run(self) -> LoadResult:
        """
        Send until the end, and wait for the last response.

        :raise TimeoutError: the server stopped answering.
        """
        start, start_cpu = perf_counter(), process_time()
        self._exchange(start)
        self._finish()
        self.result.seconds, self.result.client_seconds = perf_counter() - start, process_time() - start_cpu
        self.result.statuses = self._responses.by_name()
        return self.result

    def close(self) -> None:
        """Close the connections."""
        self._epoll.close()
        for connection in self._connections.values():
            connection.close()

    def _exchange(self, start: float) -> None:
        schedule = zip(self._due_times(start), self._requests, strict=False)
        self._next = next(schedule, None)
        last_event = start
        while self._send_due(schedule) or self._is_waiting():
            timeout = self._patience
            if self._idle and self._next is not None:
                timeout = max(0.0, self._next[0] - perf_counter())
            select.select([self._epoll], [], [], timeout)  # epoll's own time-out has a resolution of milliseconds
            events, now = self._epoll.poll(0), perf_counter()
            if events:
                last_event = now
            elif now - last_event > self._patience:
                return self._give_up()
            for number, _ in events:
                connection = self._connections.get(number)
                if connection is None:
                    self._read_push(number)
                elif self._responses.take(connection):
                    self._take_response(connection)

    def _due_times(self, start: float) -> Iterator[float]:
        """When requests are due; 0 for at once."""
        if self._times is not None:
            yield from (start + time for time in self._times)
            return
        # Every connection sends a request, even if the time is over by then.
        yield from repeat(0.0, len(self._connections))
        while perf_counter() - start < self._seconds:
            yield 0.0

    def _send_due(self, schedule: Iterator[tuple[float, Any]]) -> bool:
        """Send what is due; whether requests are left."""
        while self._idle and self._next is not None:
            due, request = self._next
            now = perf_counter()
            if due > now:
                break
            self.result.late += bool(due) and now - due > _LATE_SECONDS
            connection = self._idle.popleft()
            connection.started = due or now
            self._send(connection, request)
            self._next = next(schedule, None)
        return self._next is not None

    def _send(self, connection: ClientConnection, request: Any) -> None:
        connection.send(request)

    def _take_response(self, connection: ClientConnection) -> None:
        self.result.latencies_us.append(int((perf_counter() - connection.started) * 1e6))
        self._idle.append(connection)

    def _is_waiting(self) -> bool:
        return len(self._idle) < len(self._connections)

    def _give_up(self) -> None:
        raise TimeoutError("the server stopped answering")

    def _read_push(self, number: int) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        """Called after the last response."""


@dataclass(slots=True)
class CycleResult(LoadResult):
    """
    What became of forwards to wallets in live mode; accepted are those that were pushed.

    :param missing: accepted and never pushed.
    :param repeated: pushed more often than posted.
    :param pushed_us: from when a forward was sent, or was due, to its push.
    :param after_us: from its 202 to its push, which may be negative.
    """

    missing: int = 0
    repeated: int = 0
    pushed_us: array[int] = field(default_factory=lambda: array("I"))
    after_us: array[int] = field(default_factory=lambda: array("l"))

    def figures(self) -> Figures:
        """Rates of messages that were pushed, and latencies."""
        return {
            **self.rates(),
            **latency_figures(self.latencies_us, "202 {}"),
            **latency_figures(self.pushed_us, "push {}", ALL_PERCENTILES),
            "late %": self.late_percent,
        }

    def failures(self) -> Iterator[str]:
        """A sentence for everything that is wrong."""
        refused = {status: count for status, count in self.statuses.items() if not status.startswith("2")}
        if refused:
            yield f"responses other than 202: {refused}"
        if self.missing and not refused:
            yield f"{self.missing} messages were not pushed"
        if self.repeated:
            yield f"{self.repeated} messages were pushed twice"


class _InFlight:
    """A forward that was sent; times in seconds, 0 while unknown."""

    __slots__ = ("accepted", "connection", "posted", "pushed")

    def __init__(self, connection: ClientConnection) -> None:
        self.connection, self.posted, self.accepted, self.pushed = connection, connection.started, 0.0, 0.0


class LiveDeliverySocket(Protocol):
    """A wallet's socket that messages are pushed to, of any version of DIDComm."""

    def fileno(self) -> int:
        """For a selector."""

    def take_deliveries(self, *most: int) -> Iterator[list[tuple[str, str]]]:
        """Read what has arrived: id and envelope's `tag` of each message of each delivery."""

    def acknowledge(self, ids: list[str]) -> None:
        """Acknowledge messages without waiting for a response."""

    def count_queued(self) -> int:
        """Number of messages queued for the wallet."""


class CycleRunner(LoadRunner):
    """
    Posts forwards, receives their pushes and acknowledges them.

    A push is matched to its forward by the tag of the envelope; of several equal ones the oldest counts. In the
    closed loop a connection is busy until the message was pushed.

    :param forwards: encoded requests, with the tag of the envelope in each.
    :param once: no forward is sent twice.
    :param load: as of :class:`LoadRunner`.
    """

    def __init__(
        self,
        url: str,
        forwards: Sequence[tuple[bytes, str]],
        live_sockets: Sequence[LiveDeliverySocket],
        connections: int,
        seconds: float,
        *,
        acknowledge: bool = True,
        once: bool = False,
        **load: Any,
    ) -> None:
        super().__init__(url, iter(forwards) if once else cycle(forwards), connections, seconds, **load)
        self._live_sockets = {live.fileno(): live for live in live_sockets}
        for number in self._live_sockets:
            self._epoll.register(number, select.EPOLLIN)
        self._acknowledge = acknowledge
        self._patience = _PUSH_TIMEOUT_SECONDS
        self._posted: dict[str, deque[_InFlight]] = defaultdict(deque)
        self._by_connection: dict[ClientConnection, _InFlight] = {}
        self._in_flight = 0
        self._last: LiveDeliverySocket | None = None
        self.result: CycleResult = CycleResult()

    def run(self) -> CycleResult:
        """As of :class:`LoadRunner`; what is not pushed for a while is missing."""
        super().run()
        return self.result

    def _send(self, connection: ClientConnection, forward: tuple[bytes, str]) -> None:
        request, tag = forward
        message = self._by_connection[connection] = _InFlight(connection)
        self._posted[tag].append(message)
        self._in_flight += 1
        connection.send(request)

    def _take_response(self, connection: ClientConnection) -> None:
        now, message = perf_counter(), self._by_connection.pop(connection)
        message.accepted = now
        self.result.latencies_us.append(int((now - connection.started) * 1e6))
        if message.pushed or self._times is not None:
            self._idle.append(connection)
        if message.pushed:
            self.result.after_us.append(int((message.pushed - now) * 1e6))

    def _read_push(self, number: int) -> None:
        live = self._last = self._live_sockets[number]
        for delivery in live.take_deliveries():
            now = perf_counter()
            for _, tag in delivery:
                self._take_push(tag, now)
            if self._acknowledge:
                live.acknowledge([id_ for id_, _ in delivery])

    def _take_push(self, tag: str, now: float) -> None:
        if not self._posted[tag]:
            self.result.repeated += 1
            return
        message = self._posted[tag].popleft()
        message.pushed = now
        self._in_flight -= 1
        self.result.accepted += 1
        self.result.pushed_us.append(int((now - message.posted) * 1e6))
        if message.accepted:
            self.result.after_us.append(int((now - message.accepted) * 1e6))
            if self._times is None:
                self._idle.append(message.connection)

    def _is_waiting(self) -> bool:
        return bool(self._in_flight or self._by_connection)

    def _give_up(self) -> None:
        """The rest is missing."""

    def _finish(self) -> None:
        self.result.missing = self._in_flight
        if not self._acknowledge:
            readable, _, _ = select.select(list(self._live_sockets), [], [], _SILENCE_SECONDS)
            for number in readable:
                self._read_push(number)
        elif self._last is not None:
            self._last.count_queued()  # its answer means that the acknowledgements have been read


@dataclass(frozen=True, slots=True)
class TargetServer:
    """
    A server that receives load.

    :param pid: process whose CPU time is measured; 0 if it is remote.
    :param success: HTTP statuses of success.
    """

    url: str
    pid: int
    content_type: str = ENCRYPTED_MEDIA_TYPE
    success: tuple[str, ...] = ("202",)
    method: str = "POST"

    def encode(self, body: bytes) -> bytes:
        """A request."""
        return encode_request(self.url, body, self.content_type, self.method)


class Load:
    """
    Load on servers from several processes, which start at once.

    :param bodies: posted over and over.
    :param connections: in total; each server has an equal share. In an open loop the bound of requests in flight.
    :param seconds: how long requests are sent.
    :param rate: requests per second of an open loop; 0 for a closed loop.
    :param requests: their exact number; 0 for no limit.
    :param once: no body is sent twice.
    """

    def __init__(
        self,
        servers: Sequence[TargetServer],
        bodies: Sequence[bytes],
        connections: int,
        seconds: float = _FOREVER,
        *,
        rate: float = 0.0,
        even: bool = False,
        requests: int = 0,
        once: bool = False,
    ) -> None:
        self._servers = servers
        self._runners = []
        for server in servers:
            encoded = [server.encode(body) for body in bodies]
            shares = _split_evenly(connections // len(servers))
            counts = _split_evenly(requests, len(shares)) if requests else [None] * len(shares)
            for place, (share, number) in enumerate(zip(shares, counts, strict=False)):
                # Different first bodies, so that processes do not post the same ones at the same time.
                chosen = encoded[place :: len(shares)] if once else islice(cycle(encoded), 1000 * place, None)
                load: dict[str, Any] = {"rate": rate * share / connections, "even": even, "seed": place}
                self._runners.append(LoadRunner(server.url, islice(chosen, number), share, seconds, **load))
        self._cpu_before = self._read_cpu_seconds()
        self._calls = [ForkedCall(runner.run) for runner in self._runners]

    @property
    def done(self) -> bool:
        """Whether all processes have ended."""
        return all(call.done for call in self._calls)

    def result(self) -> LoadResult:
        """Wait for the end; the merged results."""
        results = [call.result() for call in self._calls]
        spent = self._read_cpu_seconds() - self._cpu_before
        for runner in self._runners:
            runner.close()
        merged = LoadResult(cpu_seconds=spent)
        for result in results:
            merged.statuses += result.statuses
            merged.seconds = max(merged.seconds, result.seconds)
            merged.latencies_us += result.latencies_us
            merged.late += result.late
            merged.client_seconds += result.client_seconds
        merged.accepted = sum(merged.statuses[status] for status in self._servers[0].success)
        return merged

    def _read_cpu_seconds(self) -> float:
        return sum(cpu_seconds(server.pid) for server in self._servers)


def _split_evenly(number: int, parts: int = _MAX_PROCESSES) -> list[int]:
    parts = min(len(os.sched_getaffinity(0)), parts, number)
    return [number // parts + (place < number % parts) for place in range(parts)]


def post(
    server: TargetServer, bodies: Sequence[bytes], connections: int, seconds: float = _FOREVER, **load: Any
) -> LoadResult:
    """Load on one server, with parameters of :class:`Load`, until it ends."""
    return Load([server], bodies, connections, seconds, **load).result()
