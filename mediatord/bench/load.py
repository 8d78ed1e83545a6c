"""
Keep-alive connections that POST prepared bodies as fast as they may.

Each connection waits for the answer before it sends the next request; at the end all of them wait for theirs, so that
what was accepted can be compared with what was stored.

It has to cost little, because it competes with what it measures for cores: requests are made beforehand, and an
answer that has been seen before, byte by byte, is not taken apart again.
"""

from __future__ import annotations

import select
import socket
import struct
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

ENVELOPE = "application/didcomm-encrypted+json"

_TIMEOUT_SECONDS = 30.0
# A struct timeval. The kernel watches, since a time-out of Python's would cost a system call each time.
_SEND_TIMEOUT = struct.pack("ll", int(_TIMEOUT_SECONDS), 0)
_LENGTH_BYTES = 4
_READ_BYTES = 16_384
# Answers differ by their Date, if they have one, and hardly otherwise.
_MOST_KNOWN = 64


@dataclass(frozen=True, slots=True)
class Job:
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
class Outcome:
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


def request_for(
    port: int,
    path: str,
    body: bytes,
    content_type: str = ENVELOPE,
    *,
    host: str = "127.0.0.1",
    method: str = "POST",
) -> bytes:
    """A request, a POST usually, with the headers that an ordinary client sends."""
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUser-Agent: mediatord-bench\r\nAccept: */*\r\n"
    if method == "POST":
        head += f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}\r\n".encode() + body


def is_complete(response: bytes) -> bool:
    """Whether a whole HTTP response is there."""
    head, mark, body = response.partition(b"\r\n\r\n")
    if not mark:
        return False
    head = head.lower()
    if b"transfer-encoding: chunked" in head:
        return body.endswith(b"0\r\n\r\n")
    _, found, rest = head.partition(b"content-length:")
    return not found or len(body) >= int(rest.partition(b"\r\n")[0])


def loopback(number: int) -> str:
    """One of the addresses of this machine, so that clients need not have the same."""
    return f"127.{1 + number // 62_500}.{number // 250 % 250}.{1 + number % 250}"


def connect(host: str, port: int, source: str = "") -> socket.socket:
    """
    A connection whose calls take one system call each; sending gives up after half a minute.

    :param source: our address, if it matters.
    """
    ours = (source, 0) if source else None
    connection = socket.create_connection((host, port), timeout=_TIMEOUT_SECONDS, source_address=ours)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
    connection.settimeout(None)
    return connection


def requests_of(job: Job) -> Iterator[bytes]:
    """What is posted, in order, and made beforehand."""
    bodies = read_bodies(Path(job.bodies))
    chosen = islice(bodies, job.offset, None, job.every) if job.every else bodies
    where = {"host": job.host, "method": job.method}
    requests = [request_for(job.port, job.path, body, job.content_type, **where) for body in chosen]
    if job.every:
        return islice(requests, job.requests or None)
    return islice(cycle(requests), job.offset, job.offset + job.requests if job.requests else None)


class Line:
    """One connection: when its request was sent, and what has come of the answer."""

    __slots__ = ("begun", "close", "fileno", "partial", "receive", "send")

    def __init__(self, connection: socket.socket) -> None:
        # Bound once, because looking them up costs as much as a tenth of the call.
        self.send, self.receive = connection.sendall, connection.recv
        self.fileno, self.close = connection.fileno, connection.close
        self.begun = 0.0
        self.partial = b""


class Answers:
    """
    Takes answers as they come, and counts them by status.

    :ivar known: an answer as it was received at once, and its status: of those seen lately.
    """

    def __init__(self) -> None:
        self.known: dict[bytes, bytes] = {}
        self.statuses: Counter[bytes] = Counter()

    def take(self, line: Line) -> bool:
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

    def _read(self, line: Line, data: bytes) -> bytes | None:
        if not data:
            raise ConnectionError("the server closed a connection")
        response = line.partial + data
        if not is_complete(response):
            line.partial = response
            return None
        status = response[9:12]
        if not line.partial:
            if len(self.known) >= _MOST_KNOWN:
                self.known.clear()
            self.known[data] = status
        line.partial = b""
        return status


class Posting:
    """Keeps every connection busy until the job is done, or there is nothing left to send."""

    def __init__(self, job: Job, lines: dict[int, Line], requests: Iterator[bytes]) -> None:
        self._job = job
        self._lines = lines
        self._requests = requests

    def run(self) -> Outcome:
        """Until the last answer is there."""
        start, start_cpu = perf_counter(), process_time()
        answers, latencies_us = Answers(), array("I")
        with select.epoll() as epoll:
            for number in self._lines:
                epoll.register(number, select.EPOLLIN)
            busy = sum(self._send(line) for line in self._lines.values())
            # However late it is by now: every connection has sent something.
            deadline = start + self._job.seconds if not self._job.requests else float("inf")
            self._exchange(epoll, answers, latencies_us, busy, deadline)
        seconds, spent = perf_counter() - start, process_time() - start_cpu
        return Outcome(answers.by_name(), seconds, list(latencies_us), 0, spent)

    def _send(self, line: Line) -> bool:
        request = next(self._requests, None)
        if request is None:
            return False
        line.begun = perf_counter()
        line.send(request)
        return True

    def _exchange(
        self, epoll: select.epoll, answers: Answers, latencies_us: array[int], busy: int, deadline: float
    ) -> None:
        lines, take, requests, poll, clock = self._lines, answers.take, self._requests, epoll.poll, perf_counter
        while busy:
            for number, _ in poll(_TIMEOUT_SECONDS) or silence():
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


def silence() -> list[Any]:
    """
    Nothing came for half a minute.

    :raise TimeoutError: always.
    """
    raise TimeoutError("the server stopped answering")
