"""
Keep-alive connections that POST prepared bodies as fast as they may.

Each connection waits for the answer before it sends the next request; at the end all of them wait for theirs, so that
what was accepted can be compared with what was stored.

It has to cost little, because it competes with what it measures for cores: requests are made beforehand, and an
answer that has been seen before, byte by byte, is not taken apart again.

The least a WebSocket client can be, so that a thousand of them cost this process next to nothing (RFC 6455).

Requests at times that were fixed beforehand, whatever the server does meanwhile.

A client that waits for its answer before it asks again asks a slow server less often, and so hardly notices when it
stalls ("coordinated omission"). Here every request has a time at which it is to be sent, as those of independent
senders have, and latency counts from that time. One that cannot be sent then, because no connection is free, is sent
as soon as one is, and its wait is part of its latency; none is left out.

The load generator, as a process of its own.

It speaks by lines: it reads a job as JSON, says `ready` when all connections are open, starts at the next line, and
ends with a JSON result.

The parent's side of the load generator: start its processes, let them go together, add up what they found.
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
from typing import Any
from urllib.parse import urlsplit

from mediatord.bench.processes import cpu_seconds, read_line, spawn_module, write_line
from mediatord.bench.scenario import Figures, compute_percentile, safe_ratio

ENVELOPE_TYPE = "application/didcomm-encrypted+json"

_LOAD_TIMEOUT_SECONDS = 30.0
# A struct timeval. The kernel watches, since a time-out of Python's would cost a system call each time.
_SEND_TIMEOUT = struct.pack("ll", int(_LOAD_TIMEOUT_SECONDS), 0)
_LENGTH_BYTES = 4
_READ_BYTES = 16_384
# Answers differ by their Date, if they have one, and hardly otherwise.
_MAX_KNOWN_RESPONSES = 64


@dataclass(frozen=True, slots=True)
class LoadJob:
    """
    :param bodies: file with the bodies, written by :func:`write_bodies`.
    :param offset: which body comes first, so that several processes do not send the same one together.
    :param every: send every so-many-th body and none of them twice; 0 to send all, again and again.
    :param seconds: when to stop; or after so many `requests`, if there are any.
    :param rate: requests per second at times fixed beforehand, of which none is left out; 0 for as fast as may be.
    :param even: those times are a beat; otherwise they are a Poisson process.
    :param host: where to connect to.
    :param method: of HTTP.
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
    :param statuses: how often each HTTP status came.
    :param seconds: from the first request to the last answer.
    :param latencies_us: of each request, from when it was sent, or was to be sent, to its answer.
    :param late: how many were sent later than intended, because no connection was free or the generator was busy.
    :param cpu_seconds: of this process.
    """

    statuses: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    latencies_us: list[int] = field(default_factory=list)
    late: int = 0
    cpu_seconds: float = 0.0


def write_bodies(path: Path, bodies: list[bytes]) -> None:
    """Each with its length before it."""
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
    content_type: str = ENVELOPE_TYPE,
    *,
    host: str = "127.0.0.1",
    method: str = "POST",
) -> bytes:
    """A request, a POST usually, with the headers that an ordinary client sends."""
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUser-Agent: mediatord-bench\r\nAccept: */*\r\n"
    if method == "POST":
        head += f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}\r\n".encode() + body


def is_complete_response(response: bytes) -> bool:
    """Whether a whole HTTP response is there."""
    head, mark, body = response.partition(b"\r\n\r\n")
    if not mark:
        return False
    head = head.lower()
    if b"transfer-encoding: chunked" in head:
        return body.endswith(b"0\r\n\r\n")
    _, found, rest = head.partition(b"content-length:")
    return not found or len(body) >= int(rest.partition(b"\r\n")[0])


def loopback_address(number: int) -> str:
    """One of the addresses of this machine, so that clients need not have the same."""
    return f"127.{1 + number // 62_500}.{number // 250 % 250}.{1 + number % 250}"


def open_connection(host: str, port: int, source: str = "") -> socket.socket:
    """
    A connection whose calls take one system call each; sending gives up after half a minute.

    :param source: our address, if it matters.
    """
    ours = (source, 0) if source else None
    connection = socket.create_connection((host, port), timeout=_LOAD_TIMEOUT_SECONDS, source_address=ours)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
    connection.settimeout(None)
    return connection


def iterate_requests(job: LoadJob) -> Iterator[bytes]:
    """What is posted, in order, and made beforehand."""
    bodies = read_bodies(Path(job.bodies))
    chosen = islice(bodies, job.offset, None, job.every) if job.every else bodies
    where = {"host": job.host, "method": job.method}
    requests = [encode_request(job.port, job.path, body, job.content_type, **where) for body in chosen]
    if job.every:
        return islice(requests, job.requests or None)
    return islice(cycle(requests), job.offset, job.offset + job.requests if job.requests else None)


class ClientConnection:
    """One connection: when its request was sent, and what has come of the answer."""

    __slots__ = ("begun", "close", "fileno", "partial", "receive", "send")

    def __init__(self, connection: socket.socket) -> None:
        # Bound once, because looking them up costs as much as a tenth of the call.
        self.send, self.receive = connection.sendall, connection.recv
        self.fileno, self.close = connection.fileno, connection.close
        self.begun = 0.0
        self.partial = b""


class ResponseCounter:
    """
    Takes answers as they come, and counts them by status.

    :ivar known: an answer as it was received at once, and its status: of those seen lately.
    """

    def __init__(self) -> None:
        self.known: dict[bytes, bytes] = {}
        self.statuses: Counter[bytes] = Counter()

    def take(self, line: ClientConnection) -> bool:
        """
        Read what has come on a connection; whether the answer is complete.

        :raise ConnectionError: the server closed it.
        """
        data = line.receive(_READ_BYTES)
        status = None if line.partial else self.known.get(data)
        if status is None:
            status = self._read(line, data)
            if status is None:
                return False
        self.statuses[status] += 1
        return True

    def by_name(self) -> dict[str, int]:
        """How often each status came."""
        return {status.decode("ascii"): count for status, count in self.statuses.items()}

    def _read(self, line: ClientConnection, data: bytes) -> bytes | None:
        if not data:
            raise ConnectionError("the server closed a connection")
        response = line.partial + data
        if not is_complete_response(response):
            line.partial = response
            return None
        status = response[9:12]
        if not line.partial:
            if len(self.known) >= _MAX_KNOWN_RESPONSES:
                self.known.clear()
            self.known[data] = status
        line.partial = b""
        return status


class ClosedLoopSender:
    """Keeps every connection busy until the job is done, or there is nothing left to send."""

    def __init__(self, job: LoadJob, lines: dict[int, ClientConnection], requests: Iterator[bytes]) -> None:
        self._job = job
        self._lines = lines
        self._requests = requests

    def run(self) -> JobResult:
        """Until the last answer is there."""
        start, start_cpu = perf_counter(), process_time()
        answers, latencies_us = ResponseCounter(), array("I")
        with select.epoll() as epoll:
            for number in self._lines:
                epoll.register(number, select.EPOLLIN)
            busy = sum(self._send(line) for line in self._lines.values())
            # However late it is by now: every connection has sent something.
            deadline = start + self._job.seconds if not self._job.requests else float("inf")
            self._exchange(epoll, answers, latencies_us, busy, deadline)
        seconds, spent = perf_counter() - start, process_time() - start_cpu
        return JobResult(answers.by_name(), seconds, list(latencies_us), 0, spent)

    def _send(self, line: ClientConnection) -> bool:
        request = next(self._requests, None)
        if request is None:
            return False
        line.begun = perf_counter()
        line.send(request)
        return True

    def _exchange(
        self, epoll: select.epoll, answers: ResponseCounter, latencies_us: array[int], busy: int, deadline: float
    ) -> None:
        lines, take, requests, poll, clock = self._lines, answers.take, self._requests, epoll.poll, perf_counter
        while busy:
            for number, _ in poll(_LOAD_TIMEOUT_SECONDS) or raise_timeout():
                line = lines[number]
                if not take(line):
                    continue
                now = clock()
                latencies_us.append(int((now - line.begun) * 1e6))
                if now < deadline and (request := next(requests, None)) is not None:
                    line.begun = now
                    line.send(request)
                else:
                    busy -= 1


def raise_timeout() -> list[Any]:
    """
    Nothing came for half a minute.

    :raise TimeoutError: always.
    """
    raise TimeoutError("the server stopped answering")


TEXT_OPCODE = 1
CLOSE_OPCODE = 8
PING_OPCODE = 9
PONG_OPCODE = 10

_WEBSOCKET_TIMEOUT_SECONDS = 30.0
_SHORT_LENGTH, _MEDIUM_LENGTH = 126, 1 << 16


class WebSocketClient:
    """
    An open WebSocket. Blocking, except :meth:`take`, which is for a socket that has something to read.

    :param url: `ws://host:port/path`.
    :param kernel_bytes: what the kernel shall keep for who does not read; as much as it likes by default.
    :param source: our address, if it matters.
    :raise ConnectionError: the server did not switch protocols.
    """

    def __init__(self, url: str, kernel_bytes: int = 0, source: str = "") -> None:
        target = urlsplit(url)
        address = (target.hostname or "", target.port or 80)
        ours = (source, 0) if source else None
        self._socket = socket.create_connection(address, timeout=_WEBSOCKET_TIMEOUT_SECONDS, source_address=ours)
        if kernel_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, kernel_bytes)
        self._received = b""
        self._shake_hands(f"{address[0]}:{address[1]}", target.path or "/")

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def send(self, payload: bytes, opcode: int = TEXT_OPCODE) -> None:
        """Send one message in one frame."""
        self._socket.sendall(encode_frame(payload, opcode))

    def take(self, most: int = 1 << 18) -> list[bytes]:
        """What has come, as whole messages; pings are answered. :param most: bytes to read."""
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
        """Without ceremony."""
        self._socket.close()

    def _shake_hands(self, host: str, path: str) -> None:
        key = base64.b64encode(secrets.token_bytes(16)).decode()
        self._socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        answer = b""
        while b"\r\n\r\n" not in answer:
            data = self._socket.recv(4096)
            if not data:
                break
            answer += data
        head, _, self._received = answer.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 101"):
            self._socket.close()
            raise ConnectionError("the server did not open a WebSocket")


def encode_frame(payload: bytes, opcode: int) -> bytes:
    """A final, masked frame."""
    length = len(payload)
    head = bytes([0x80 | opcode])
    if length < _SHORT_LENGTH:
        head += bytes([0x80 | length])
    elif length < _MEDIUM_LENGTH:
        head += bytes([0x80 | 126]) + length.to_bytes(2, "big")
    else:
        head += bytes([0x80 | 127]) + length.to_bytes(8, "big")
    mask = secrets.token_bytes(4)
    repeated = (mask * (length // 4 + 1))[:length]
    masked = (int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")).to_bytes(length, "big")
    return head + mask + masked


def parse_frame(data: bytes) -> tuple[int, bytes, int] | None:
    """The first unmasked frame: opcode, payload, bytes taken; None while it is incomplete."""
    if len(data) < 2:
        return None
    length, start = data[1] & 0x7F, 2
    if length >= _SHORT_LENGTH:
        start += 2 if length == _SHORT_LENGTH else 8
        if len(data) < start:
            return None
        length = int.from_bytes(data[2:start], "big")
    if len(data) < start + length:
        return None
    return data[0] & 0x0F, data[start : start + length], start + length


# Later than this is late: half of it is what waking up takes.
LATE_SECONDS = 0.001

_RESPONSE_TIMEOUT_SECONDS = 30.0


def intended_times(rate: float, seconds: float, seed: int, *, even: bool = False) -> array[float]:
    """
    When each request is to be sent, in seconds after the start, none at or after `seconds`.

    :param rate: per second; of a Poisson process on average.
    :param seed: another one gives other times of the same process.
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
    """Sends every request at its time, or as soon after it as a connection is free."""

    def __init__(self, job: LoadJob, lines: dict[int, ClientConnection], requests: Iterator[bytes]) -> None:
        self._lines = lines
        self._requests = requests
        self._idle = list(lines.values())
        self._times = intended_times(job.rate, job.seconds, job.offset, even=job.even)
        self._next = self._late = 0

    def run(self) -> JobResult:
        """Until the last answer is there."""
        answers, latencies_us = ResponseCounter(), array("I")
        with select.epoll() as epoll:
            for number in self._lines:
                epoll.register(number, select.EPOLLIN)
            start, start_cpu = perf_counter(), process_time()
            while self._send_due(start) or len(self._idle) < len(self._lines):
                # The clock of epoll ticks in milliseconds.
                select.select([epoll], [], [], self._patience(start))
                self._receive(epoll, answers, latencies_us)
        seconds, spent = perf_counter() - start, process_time() - start_cpu
        return JobResult(answers.by_name(), seconds, list(latencies_us), self._late, spent)

    def _send_due(self, start: float) -> bool:
        """Send what is due; whether there is something left to be sent."""
        times, idle = self._times, self._idle
        while idle and self._next < len(times):
            intended = start + times[self._next]
            lateness = perf_counter() - intended
            if lateness < 0:
                break
            line = idle.pop()
            line.begun = intended
            line.send(next(self._requests))
            self._next += 1
            self._late += lateness > LATE_SECONDS
        return self._next < len(times)

    def _patience(self, start: float) -> float:
        if not self._idle or self._next == len(self._times):
            return _RESPONSE_TIMEOUT_SECONDS
        return max(0.0, start + self._times[self._next] - perf_counter())

    def _receive(self, epoll: select.epoll, answers: ResponseCounter, latencies_us: array[int]) -> None:
        events = epoll.poll(0)
        if not events and len(self._idle) < len(self._lines):
            self._expect_life()
        for number, _ in events:
            line = self._lines[number]
            if answers.take(line):
                latencies_us.append(int((perf_counter() - line.begun) * 1e6))
                self._idle.append(line)

    def _expect_life(self) -> None:
        busy = (line for line in self._lines.values() if line not in self._idle)
        if perf_counter() - min(line.begun for line in busy) > _RESPONSE_TIMEOUT_SECONDS:
            raise_timeout()


def run_load_job(job: LoadJob) -> JobResult:
    """Open the connections, wait for the word, and post until the job is done."""
    requests = iterate_requests(job)
    lines = {
        line.fileno(): line
        for line in (ClientConnection(open_connection(job.host, job.port)) for _ in range(job.connections))
    }
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    try:
        return (OpenLoopSender if job.rate else ClosedLoopSender)(job, lines, requests).run()
    finally:
        for line in lines.values():
            line.close()


ACCEPTED_STATUS = "202"
PER_SECOND = "msg/s"
PER_CPU_SECOND = "msg/CPU-s"
# CPU of the load generator for each request.
CLIENT_US = "client us"

_MAX_PROCESSES = 4
# Connections for what is asked one after the other, unless an answer is late.
_GET_CONNECTIONS = 8


@dataclass(frozen=True, slots=True)
class TargetServer:
    """
    Who is posted to.

    :param pid: whose CPU time counts; 0 of a server that runs elsewhere.
    :param success: the HTTP status that means so; more than one of them, separated by blanks.
    """

    pid: int
    port: int
    path: str
    content_type: str = ENVELOPE_TYPE
    success: str = ACCEPTED_STATUS
    host: str = "127.0.0.1"

    @classmethod
    def at(
        cls, url: str, pid: int, content_type: str = ENVELOPE_TYPE, success: str = ACCEPTED_STATUS
    ) -> TargetServer:
        """One that has a URL."""
        target = urlsplit(url)
        return cls(pid, target.port or 80, target.path or "/", content_type, success, target.hostname or "127.0.0.1")


@dataclass(frozen=True, slots=True)
class LoadResult:
    """
    What the clients saw, all of them together.

    :param accepted: how many requests succeeded.
    :param seconds: of the one that took longest.
    :param cpu_seconds: of the servers.
    :param late: how many requests were sent later than they should have been.
    :param client_seconds: of CPU, of all clients.
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
            "p50 ms": compute_percentile(self.latencies_us, 0.50) / 1000,
            "p99 ms": compute_percentile(self.latencies_us, 0.99) / 1000,
            "p99.9 ms": compute_percentile(self.latencies_us, 0.999) / 1000,
            CLIENT_US: 1e6 * safe_ratio(self.client_seconds, sum(self.statuses.values())),
        }


def post_for_seconds(server: TargetServer, bodies: Path, connections: int, seconds: float) -> LoadResult:
    """Keep so many connections busy for so long."""
    return post_to_servers([server], bodies, connections, seconds)


def post_at_rate(
    server: TargetServer, bodies: Path, connections: int, seconds: float, rate: float, *, even: bool = False
) -> LoadResult:
    """
    Post at times fixed beforehand, whether the server keeps up or not.

    :param connections: at most so many requests are on their way at the same time; others wait, and are late.
    :param rate: requests per second.
    :param even: those times are a beat; otherwise they are a Poisson process.
    """
    shares = _split_evenly(connections)
    jobs = [replace(_make_job(server, bodies, share, seconds=seconds), even=even) for share in shares]
    return _run_generators(
        [server], _offset_jobs([replace(job, rate=rate * job.connections / connections) for job in jobs])
    )


def get_at_rate(server: TargetServer, place: Path, seconds: float, rate: float) -> LoadResult:
    """
    GET the same thing again and again, in a beat.

    :param place: a directory to write a file in.
    """
    nothing = place / "nothing"
    write_bodies(nothing, [b""])
    job = _make_job(server, nothing, _GET_CONNECTIONS, seconds=seconds)
    return _run_generators([server], [replace(job, method="GET", rate=rate, even=True)])


def post_to_servers(servers: Sequence[TargetServer], bodies: Path, connections: int, seconds: float) -> LoadResult:
    """The same over several servers that do one work, each of which gets so many of the connections as the others."""
    shares = [share // len(servers) for share in _split_evenly(connections)]
    jobs = [_make_job(server, bodies, share, seconds=seconds) for server in servers for share in shares]
    return _run_generators(servers, _offset_jobs(jobs))


def post_count(server: TargetServer, bodies: Path, connections: int, requests: int) -> LoadResult:
    """Post an exact number of messages."""
    parts = zip(_split_evenly(connections), _split_evenly(requests), strict=True)
    return _run_generators(
        [server], _offset_jobs([_make_job(server, bodies, share, requests=count) for share, count in parts])
    )


def post_each_once(server: TargetServer, bodies: Path, connections: int, seconds: float = float("inf")) -> LoadResult:
    """Post no body twice, for so long or until all have been posted."""
    jobs = [_make_job(server, bodies, share, seconds=seconds) for share in _split_evenly(connections)]
    return _run_generators([server], [replace(job, offset=place, every=len(jobs)) for place, job in enumerate(jobs)])


def _make_job(
    server: TargetServer, bodies: Path, connections: int, *, seconds: float = 0.0, requests: int = 0
) -> LoadJob:
    target = (server.port, server.path, server.content_type)
    return LoadJob(*target, str(bodies), connections, seconds=seconds, requests=requests, host=server.host)


def _offset_jobs(jobs: list[LoadJob]) -> list[LoadJob]:
    """So that they do not post the same bodies at the same time."""
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
        outcomes = [json.loads(read_line(client)) for client in clients]
        spent = sum(cpu_seconds(server.pid) for server in servers if server.pid) - before
    statuses: Counter[str] = Counter()
    for outcome in outcomes:
        statuses.update(outcome["statuses"])
    latencies = [latency for outcome in outcomes for latency in outcome["latencies_us"]]
    seconds = max(outcome["seconds"] for outcome in outcomes)
    accepted = sum(statuses[status] for status in servers[0].success.split())
    late = sum(outcome["late"] for outcome in outcomes)
    client_seconds = sum(outcome["cpu_seconds"] for outcome in outcomes)
    return LoadResult(dict(statuses), accepted, seconds, spent, latencies, late, client_seconds)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(run_load_job(LoadJob(**json.loads(sys.stdin.readline()))))) + "\n")
