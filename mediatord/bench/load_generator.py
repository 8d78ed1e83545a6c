"""
Load generator for HTTP, with closed and open loop, and plain blocking HTTP and WebSocket clients.

Run as a child process (`python -m mediatord.bench.load_generator`) it reads a :class:`LoadJob` as a line of JSON,
opens the connections, prints `ready`, waits for another line, and prints a :class:`JobResult`.
"""

from __future__ import annotations

import base64
import json
import os
import random
import secrets
import select
import socket
import struct
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter, process_time
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from mediatord.bench.processes import cpu_seconds, print_line, read_line, spawn_module, write_line
from mediatord.bench.scenario import CLIENT_US, PER_CPU_SECOND, PER_SECOND, Figures, latency_figures, safe_ratio
from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE

# A request sent later than this counts as late; waking up takes half of it.
LATE_SECONDS = 0.001

_TIMEOUT_SECONDS = 30.0
_SEND_TIMEOUT = struct.pack("ll", int(_TIMEOUT_SECONDS), 0)
_READ_BYTES = 1 << 18
_RESPONSE_BYTES = 16_384
_LENGTH_BYTES = 4
_MAX_KNOWN_RESPONSES = 64
_CLIENT_TIMEOUT_SECONDS = 120.0
# Servers close idle connections, but not this soon.
_IDLE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class LoadJob:
    """
    The work of one load generator process.

    :param bodies: file of :func:`write_bodies`, posted over and over.
    :param offset: index of the first body; also the seed of a Poisson process.
    :param every: post only every n-th body, each once; 0 to repeat all.
    :param seconds: duration, unless `requests` is given.
    :param requests: number of requests; 0 for no limit.
    :param rate: requests per second of the open loop; 0 for the closed loop.
    :param even: the open loop sends at fixed intervals instead of a Poisson process.
    """

    port: int
    path: str
    content_type: str
    bodies: str
    connections: int
    offset: int = 0
    every: int = 0
    seconds: float = 0.0
    requests: int = 0
    rate: float = 0.0
    even: bool = False
    host: str = "127.0.0.1"
    method: str = "POST"


@dataclass(slots=True)
class JobResult:
    """
    What one load generator process measured.

    :param statuses: number of responses by HTTP status.
    :param seconds: from the first request to the last response.
    :param latencies_us: from when a request was sent, or was due, to its response.
    :param late: requests sent late, because no connection was free or the generator was busy.
    :param cpu_seconds: of the generator.
    """

    statuses: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    latencies_us: list[int] = field(default_factory=list)
    late: int = 0
    cpu_seconds: float = 0.0


def write_bodies(path: Path, bodies: list[bytes]) -> None:
    """Write request bodies to a file, each with its length before it."""
    path.write_bytes(b"".join(len(body).to_bytes(_LENGTH_BYTES, "big") + body for body in bodies))


def read_bodies(path: Path) -> Iterator[bytes]:
    """The inverse of :func:`write_bodies`."""
    data, position = path.read_bytes(), 0
    while position < len(data):
        start = position + _LENGTH_BYTES
        position = start + int.from_bytes(data[position:start], "big")
        yield data[start:position]


def encode_request(
    port: int,
    path: str,
    body: bytes,
    content_type: str = ENCRYPTED_MEDIA_TYPE,
    *,
    host: str = "127.0.0.1",
    method: str = "POST",
) -> bytes:
    """An HTTP request with the headers of an ordinary client."""
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUser-Agent: mediatord-bench\r\nAccept: */*\r\n"
    if method == "POST":
        head += f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}\r\n".encode() + body


def is_complete_response(response: bytes) -> bool:
    """Whether a whole HTTP response is there."""
    head, separator, body = response.partition(b"\r\n\r\n")
    if not separator:
        return False
    head = head.lower()
    if b"transfer-encoding: chunked" in head:
        return body.endswith(b"0\r\n\r\n")
    _, found, rest = head.partition(b"content-length:")
    return not found or len(body) >= int(rest.partition(b"\r\n")[0])


def read_response(response: bytes) -> tuple[int, bytes]:
    """Status and body of a complete HTTP response."""
    head, _, body = response.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        chunks, rest = [], body
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size.partition(b";")[0], 16)
            chunks.append(rest[:length])
            rest = rest[length + 2 :] if length else b""
        body = b"".join(chunks)
    return int(response[9:12]), body


def loopback_address(number: int) -> str:
    """One of the loopback addresses, to give clients addresses of their own."""
    return f"127.{1 + number // 62_500}.{number // 250 % 250}.{1 + number % 250}"


def open_connection(host: str, port: int, source: str = "") -> socket.socket:
    """
    Open a TCP connection in blocking mode, with a time-out for sending.

    :param source: local address; any if empty.
    """
    local = (source, 0) if source else None
    connection = socket.create_connection((host, port), timeout=_TIMEOUT_SECONDS, source_address=local)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
    connection.settimeout(None)
    return connection


def iterate_requests(job: LoadJob) -> Iterator[bytes]:
    """The requests of a job in order, encoded beforehand."""
    bodies = read_bodies(Path(job.bodies))
    chosen = islice(bodies, job.offset, None, job.every) if job.every else bodies
    address = {"host": job.host, "method": job.method}
    requests = [encode_request(job.port, job.path, body, job.content_type, **address) for body in chosen]
    if job.every:
        return islice(requests, job.requests or None)
    return islice(cycle(requests), job.offset, job.offset + job.requests if job.requests else None)


class ClientConnection:
    """
    A connection with at most one request in flight.

    :ivar started: when the request was sent, or was due.
    :ivar partial: what has been received of the response.
    """

    __slots__ = ("close", "fileno", "partial", "receive", "send", "started")

    def __init__(self, connection: socket.socket) -> None:
        # Bound once: looking the methods up costs a tenth of the call.
        self.send, self.receive = connection.sendall, connection.recv
        self.fileno, self.close = connection.fileno, connection.close
        self.started = 0.0
        self.partial = b""

    def receive_response(self) -> bytes | None:
        """
        Read what has arrived; the response once it is complete.

        :raise ConnectionError: the server closed the connection.
        """
        data = self.receive(_READ_BYTES)
        if not data:
            raise ConnectionError("the server closed a connection")
        self.partial += data
        if not is_complete_response(self.partial):
            return None
        response, self.partial = self.partial, b""
        return response


class ResponseCounter:
    """Reads responses and counts them by status; a response equal to an earlier one is not parsed again."""

    def __init__(self) -> None:
        self._known: dict[bytes, bytes] = {}
        self._statuses: Counter[bytes] = Counter()

    def take(self, connection: ClientConnection) -> bool:
        """
        Read what has arrived on a connection; whether the response is complete.

        :raise ConnectionError: the server closed it.
        """
        data = connection.receive(_RESPONSE_BYTES)
        status = None if connection.partial else self._known.get(data)
        if status is None:
            status = self._parse(connection, data)
            if status is None:
                return False
        self._statuses[status] += 1
        return True

    def by_name(self) -> dict[str, int]:
        """Number of responses by status."""
        return {status.decode("ascii"): count for status, count in self._statuses.items()}

    def _parse(self, connection: ClientConnection, data: bytes) -> bytes | None:
        if not data:
            raise ConnectionError("the server closed a connection")
        response = connection.partial + data
        if not is_complete_response(response):
            connection.partial = response
            return None
        status = response[9:12]
        if not connection.partial:
            if len(self._known) >= _MAX_KNOWN_RESPONSES:
                self._known.clear()
            self._known[data] = status
        connection.partial = b""
        return status


class ClosedLoopSender:
    """Keeps every connection busy until the job is done or no request is left."""

    def __init__(self, job: LoadJob, connections: dict[int, ClientConnection], requests: Iterator[bytes]) -> None:
        self._job = job
        self._connections = connections
        self._requests = requests

    def run(self) -> JobResult:
        """Send until the end, and wait for the last response."""
        connections, requests, clock = self._connections, self._requests, perf_counter
        start, start_cpu = clock(), process_time()
        responses, latencies_us = ResponseCounter(), array("I")
        take = responses.take
        with select.epoll() as epoll:
            poll, busy = epoll.poll, 0
            for number, connection in connections.items():
                epoll.register(number, select.EPOLLIN)
                if (request := next(requests, None)) is not None:
                    connection.started = clock()
                    connection.send(request)
                    busy += 1
            # Every connection has sent a request by now, even if the time is over.
            deadline = start + self._job.seconds if not self._job.requests else float("inf")
            while busy:
                for number, _ in poll(_TIMEOUT_SECONDS) or raise_timeout():
                    connection = connections[number]
                    if not take(connection):
                        continue
                    now = clock()
                    latencies_us.append(int((now - connection.started) * 1e6))
                    if now < deadline and (request := next(requests, None)) is not None:
                        connection.started = now
                        connection.send(request)
                    else:
                        busy -= 1
        seconds, spent = clock() - start, process_time() - start_cpu
        return JobResult(responses.by_name(), seconds, list(latencies_us), 0, spent)


def raise_timeout() -> list[Any]:
    """
    The default of an empty list of events.

    :raise TimeoutError: always.
    """
    raise TimeoutError("the server stopped answering")


def intended_times(rate: float, seconds: float, seed: int, *, even: bool = False) -> array[float]:
    """
    When requests are due, in seconds from the start, all before `seconds`.

    :param rate: per second; the mean of a Poisson process.
    :param even: at fixed intervals instead.
    """
    times = array("d")
    if even:
        times.extend(number / rate for number in range(int(rate * seconds)))
        return times
    draw = random.Random(seed).expovariate
    at = draw(rate)
    while at < seconds:
        times.append(at)
        at += draw(rate)
    return times


class OpenLoopSender:
    """
    Sends every request when it is due, or as soon afterwards as a connection is free.

    Latency counts from when a request was due and no request is left out: a closed loop sends fewer requests to a
    server that stalls, and hides the stall ("coordinated omission").
    """

    def __init__(self, job: LoadJob, connections: dict[int, ClientConnection], requests: Iterator[bytes]) -> None:
        self._connections = connections
        self._requests = requests
        self._idle = list(connections.values())
        self._times = intended_times(job.rate, job.seconds, job.offset, even=job.even)
        self._next = self._late = 0

    def run(self) -> JobResult:
        """Send until the end, and wait for the last response."""
        responses, latencies_us = ResponseCounter(), array("I")
        with select.epoll() as epoll:
            for number in self._connections:
                epoll.register(number, select.EPOLLIN)
            start, start_cpu = perf_counter(), process_time()
            while self._send_due(start) or len(self._idle) < len(self._connections):
                timeout = _TIMEOUT_SECONDS
                if self._idle and self._next < len(self._times):
                    timeout = max(0.0, start + self._times[self._next] - perf_counter())
                select.select([epoll], [], [], timeout)  # epoll's own time-out has a resolution of milliseconds
                self._receive(epoll, responses, latencies_us)
        seconds, spent = perf_counter() - start, process_time() - start_cpu
        return JobResult(responses.by_name(), seconds, list(latencies_us), self._late, spent)

    def _send_due(self, start: float) -> bool:
        """Send what is due; whether requests are left."""
        times, idle = self._times, self._idle
        while idle and self._next < len(times):
            due = start + times[self._next]
            lateness = perf_counter() - due
            if lateness < 0:
                break
            connection = idle.pop()
            connection.started = due
            connection.send(next(self._requests))
            self._next += 1
            self._late += lateness > LATE_SECONDS
        return self._next < len(times)

    def _receive(self, epoll: select.epoll, responses: ResponseCounter, latencies_us: array[int]) -> None:
        events = epoll.poll(0)
        if not events and len(self._idle) < len(self._connections):
            oldest = min(one.started for one in self._connections.values() if one not in self._idle)
            if perf_counter() - oldest > _TIMEOUT_SECONDS:
                raise_timeout()
        for number, _ in events:
            connection = self._connections[number]
            if responses.take(connection):
                latencies_us.append(int((perf_counter() - connection.started) * 1e6))
                self._idle.append(connection)


class HTTPResult(NamedTuple):
    """A response. :param seconds: from the first byte sent to the last one received."""

    status: int
    seconds: float
    body: bytes


class KeepAliveClient:
    """Blocking HTTP client with one connection, which is replaced after 10 s without a request; a context manager."""

    def __init__(self, url: str) -> None:
        target = urlsplit(url)
        self._host = target.hostname or ""
        self._port = target.port or 80
        self._path = target.path or "/"
        self._connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._connection.close()

    def post(self, body: bytes, content_type: str = ENCRYPTED_MEDIA_TYPE) -> HTTPResult:
        """POST to the path of the URL."""
        return self._exchange(encode_request(self._port, self._path, body, content_type, host=self._host))

    def get(self, path: str) -> HTTPResult:
        """GET another path."""
        return self._exchange(encode_request(self._port, path, b"", host=self._host, method="GET"))

    def _connect(self) -> None:
        connection = socket.create_connection((self._host, self._port), timeout=_CLIENT_TIMEOUT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = ClientConnection(connection)
        self._used = perf_counter()

    def _exchange(self, request: bytes) -> HTTPResult:
        if perf_counter() - self._used > _IDLE_SECONDS:
            self._connection.close()
            self._connect()
        start = perf_counter()
        self._connection.send(request)
        while (response := self._connection.receive_response()) is None:
            pass
        self._used = perf_counter()
        status, body = read_response(response)
        return HTTPResult(status, self._used - start, body)


TEXT_OPCODE = 1
CLOSE_OPCODE = 8
PING_OPCODE = 9
PONG_OPCODE = 10

_MEDIUM_LENGTH, _LONG_LENGTH = 126, 1 << 16


def build_handshake(url: str) -> bytes:
    """The opening handshake for a `ws://` URL (RFC 6455 4.1)."""
    target = urlsplit(url)
    key = base64.b64encode(secrets.token_bytes(16)).decode()
    return (
        f"GET {target.path or '/'} HTTP/1.1\r\nHost: {target.hostname}:{target.port or 80}\r\n"
        f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ).encode()


def split_handshake(received: bytes) -> bytes | None:
    """
    What follows the response to the handshake; None while that is incomplete.

    :raise ConnectionError: the server did not switch protocols.
    """
    head, separator, rest = received.partition(b"\r\n\r\n")
    if not separator:
        return None
    if not head.startswith(b"HTTP/1.1 101"):
        raise ConnectionError("the server did not open a WebSocket")
    return rest


class WebSocketClient:
    """
    An open WebSocket. Blocking, except :meth:`take` on a socket that is readable.

    :param url: `ws://host:port/path`.
    :param kernel_bytes: size of the kernel's receive buffer; its default if 0.
    :param source: local address; any if empty.
    :raise ConnectionError: the server did not switch protocols.
    """

    def __init__(self, url: str, kernel_bytes: int = 0, source: str = "") -> None:
        target = urlsplit(url)
        address = (target.hostname or "", target.port or 80)
        local = (source, 0) if source else None
        self._socket = socket.create_connection(address, timeout=_TIMEOUT_SECONDS, source_address=local)
        if kernel_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, kernel_bytes)
        self._socket.sendall(build_handshake(url))
        received = b""
        try:
            while (rest := split_handshake(received)) is None:
                data = self._socket.recv(4096)
                if not data:
                    raise ConnectionError("the server did not open a WebSocket")
                received += data
        except OSError:
            self._socket.close()
            raise
        self._received = rest

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def send(self, payload: bytes, opcode: int = TEXT_OPCODE) -> None:
        """Send one message in one frame."""
        self._socket.sendall(encode_frame(payload, opcode))

    def take(self, most: int = _READ_BYTES) -> list[bytes]:
        """Read up to `most` bytes; the messages that are complete. Pings are answered."""
        data = self._socket.recv(most)
        if not data:
            raise ConnectionError("the server closed a WebSocket")
        self._received += data
        messages = []
        while (parsed := parse_frame(self._received)) is not None:
            opcode, payload, size = parsed
            self._received = self._received[size:]
            if opcode == PING_OPCODE:
                self.send(payload, PONG_OPCODE)
            elif opcode == CLOSE_OPCODE:
                raise ConnectionError("the server closed a WebSocket")
            elif opcode == TEXT_OPCODE:
                messages.append(payload)
        return messages

    def receive(self) -> bytes:
        """Wait for one message."""
        while not (messages := self.take()):
            pass
        return messages[0]

    def close(self) -> None:
        """Close the connection without a closing handshake."""
        self._socket.close()


def encode_frame(payload: bytes, opcode: int) -> bytes:
    """A final, masked frame."""
    length = len(payload)
    head = bytes([0x80 | opcode])
    if length < _MEDIUM_LENGTH:
        head += bytes([0x80 | length])
    elif length < _LONG_LENGTH:
        head += bytes([0x80 | 126]) + length.to_bytes(2, "big")
    else:
        head += bytes([0x80 | 127]) + length.to_bytes(8, "big")
    mask = secrets.token_bytes(4)
    repeated = (mask * (length // 4 + 1))[:length]
    masked = (int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")).to_bytes(length, "big")
    return head + mask + masked


def parse_frame(data: bytes) -> tuple[int, bytes, int] | None:
    """Opcode, payload and size of the first unmasked frame; None while it is incomplete."""
    if len(data) < 2:
        return None
    length, start = data[1] & 0x7F, 2
    if length >= _MEDIUM_LENGTH:
        start += 2 if length == _MEDIUM_LENGTH else 8
        if len(data) < start:
            return None
        length = int.from_bytes(data[2:start], "big")
    if len(data) < start + length:
        return None
    return data[0] & 0x0F, data[start : start + length], start + length


_MAX_PROCESSES = 4
# Connections of requests that are sent one after the other, unless a response is late.
_GET_CONNECTIONS = 8


@dataclass(frozen=True, slots=True)
class TargetServer:
    """
    A server that receives load.

    :param pid: process whose CPU time is measured; 0 if it is remote.
    :param success: HTTP statuses of success, separated by blanks.
    """

    pid: int
    port: int
    path: str
    content_type: str = ENCRYPTED_MEDIA_TYPE
    success: str = "202"
    host: str = "127.0.0.1"

    @classmethod
    def from_url(
        cls, url: str, pid: int, content_type: str = ENCRYPTED_MEDIA_TYPE, success: str = "202"
    ) -> TargetServer:
        """The server at a URL."""
        target = urlsplit(url)
        return cls(pid, target.port or 80, target.path or "/", content_type, success, target.hostname or "127.0.0.1")


@dataclass(frozen=True, slots=True)
class LoadResult:
    """
    The merged results of all load generator processes.

    :param accepted: successful requests.
    :param seconds: of the slowest process.
    :param cpu_seconds: of the servers.
    :param late: requests sent late.
    :param client_seconds: CPU time of all processes.
    """

    statuses: dict[str, int]
    accepted: int
    seconds: float
    cpu_seconds: float
    latencies_us: Sequence[int] = field(repr=False)
    late: int = 0
    client_seconds: float = 0.0

    def figures(self) -> Figures:
        """Rates and latencies."""
        return {
            PER_SECOND: safe_ratio(self.accepted, self.seconds),
            PER_CPU_SECOND: safe_ratio(self.accepted, self.cpu_seconds),
            **latency_figures(self.latencies_us, names=("p50", "p99", "p99.9")),
            CLIENT_US: 1e6 * safe_ratio(self.client_seconds, sum(self.statuses.values())),
        }

    @property
    def late_percent(self) -> float:
        """Share of requests sent late."""
        return 100 * safe_ratio(self.late, len(self.latencies_us))


def post_for_seconds(server: TargetServer, bodies: Path, connections: int, seconds: float) -> LoadResult:
    """Closed loop: keep the connections busy for some time."""
    return post_to_servers([server], bodies, connections, seconds)


def post_to_servers(servers: Sequence[TargetServer], bodies: Path, connections: int, seconds: float) -> LoadResult:
    """Closed loop over several servers, with an equal share of the connections each."""
    shares = [share // len(servers) for share in _split_evenly(connections)]
    jobs = [_make_job(server, bodies, share, seconds=seconds) for server in servers for share in shares]
    return _run_generators(servers, _offset_jobs(jobs))


def post_at_rate(
    server: TargetServer, bodies: Path, connections: int, seconds: float, rate: float, *, even: bool = False
) -> LoadResult:
    """
    Open loop: post when requests are due, whether the server keeps up or not.

    :param connections: bound of requests in flight; further ones wait and are late.
    :param rate: requests per second.
    """
    jobs = [
        replace(_make_job(server, bodies, share, seconds=seconds), rate=rate * share / connections, even=even)
        for share in _split_evenly(connections)
    ]
    return _run_generators([server], _offset_jobs(jobs))


def get_at_rate(server: TargetServer, place: Path, seconds: float, rate: float) -> LoadResult:
    """
    Open loop of GET requests at fixed intervals.

    :param place: a directory for a temporary file.
    """
    empty = place / "empty"
    write_bodies(empty, [b""])
    job = _make_job(server, empty, _GET_CONNECTIONS, seconds=seconds)
    return _run_generators([server], [replace(job, method="GET", rate=rate, even=True)])


def post_count(server: TargetServer, bodies: Path, connections: int, requests: int) -> LoadResult:
    """Closed loop of an exact number of requests."""
    parts = zip(_split_evenly(connections), _split_evenly(requests), strict=True)
    jobs = [_make_job(server, bodies, share, requests=count) for share, count in parts]
    return _run_generators([server], _offset_jobs(jobs))


def post_each_once(server: TargetServer, bodies: Path, connections: int, seconds: float = float("inf")) -> LoadResult:
    """Closed loop that posts no body twice, for some time or until all are posted."""
    jobs = [_make_job(server, bodies, share, seconds=seconds) for share in _split_evenly(connections)]
    return _run_generators([server], [replace(job, offset=place, every=len(jobs)) for place, job in enumerate(jobs)])


def _make_job(
    server: TargetServer, bodies: Path, connections: int, *, seconds: float = 0.0, requests: int = 0
) -> LoadJob:
    target = (server.port, server.path, server.content_type)
    return LoadJob(*target, str(bodies), connections, seconds=seconds, requests=requests, host=server.host)


def _offset_jobs(jobs: list[LoadJob]) -> list[LoadJob]:
    """Different first bodies, so that jobs do not post the same ones at the same time."""
    return [replace(job, offset=1000 * place) for place, job in enumerate(jobs)]


def _split_evenly(number: int) -> list[int]:
    processes = min(len(os.sched_getaffinity(0)), _MAX_PROCESSES, number)
    return [number // processes + (place < number % processes) for place in range(processes)]


def _run_generators(servers: Sequence[TargetServer], jobs: list[LoadJob]) -> LoadResult:
    with ExitStack() as stack:
        clients = [stack.enter_context(spawn_module("mediatord.bench.load_generator")) for _ in jobs]
        for client, job in zip(clients, jobs, strict=True):
            write_line(client, json.dumps(asdict(job)))
        for client in clients:
            if read_line(client) != "ready":
                raise RuntimeError("a load generator did not get ready")
        before = sum(cpu_seconds(server.pid) for server in servers if server.pid)
        for client in clients:
            write_line(client, "go")
        results = [JobResult(**json.loads(read_line(client))) for client in clients]
        spent = sum(cpu_seconds(server.pid) for server in servers if server.pid) - before
    statuses: Counter[str] = Counter()
    for result in results:
        statuses.update(result.statuses)
    return LoadResult(
        dict(statuses),
        sum(statuses[status] for status in servers[0].success.split()),
        max(result.seconds for result in results),
        spent,
        [latency for result in results for latency in result.latencies_us],
        sum(result.late for result in results),
        sum(result.cpu_seconds for result in results),
    )


def run_load_job(job: LoadJob) -> JobResult:
    """Open the connections, report readiness, wait for a line, and run the job."""
    requests = iterate_requests(job)
    opened = [ClientConnection(open_connection(job.host, job.port)) for _ in range(job.connections)]
    connections = {one.fileno(): one for one in opened}
    print_line("ready")
    sys.stdin.readline()
    try:
        return (OpenLoopSender if job.rate else ClosedLoopSender)(job, connections, requests).run()
    finally:
        for one in opened:
            one.close()


if __name__ == "__main__":
    print_line(json.dumps(asdict(run_load_job(LoadJob(**json.loads(sys.stdin.readline()))))))
