"""
The load generator, as a process of its own: keep-alive connections that POST prepared bodies as fast as they may.

It speaks by lines: it reads a job as JSON, says `ready` when all connections are open, starts at the next line, and
ends with a JSON result. Each connection waits for the answer before it sends the next request; at the end all of
them wait for theirs, so that what was accepted can be compared with what was stored.
"""

from __future__ import annotations

import json
import select
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter

ENVELOPE = "application/didcomm-encrypted+json"

_TIMEOUT_SECONDS = 30.0
_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class Job:
    """
    :param bodies: file with the bodies, written by :func:`write_bodies`.
    :param offset: which body comes first, so that several processes do not send the same one together.
    :param every: send every so-many-th body and none of them twice; 0 to send all, again and again.
    :param seconds: when to stop; or after so many `requests`, if there are any.
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


@dataclass(slots=True)
class Outcome:
    """
    :param statuses: how often each HTTP status came.
    :param seconds: from the first request to the last answer.
    :param latencies_us: of each request.
    """

    statuses: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    latencies_us: list[int] = field(default_factory=list)


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


def request_for(port: int, path: str, body: bytes, content_type: str = ENVELOPE) -> bytes:
    """A POST with the headers that an ordinary client sends."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUser-Agent: mediatord-bench\r\nAccept: */*\r\n"
        f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


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


def run(job: Job) -> Outcome:
    """Open the connections, wait for the word, and post until the job is done."""
    requests = requests_of(job)
    connections = [
        socket.create_connection(("127.0.0.1", job.port), timeout=_TIMEOUT_SECONDS) for _ in range(job.connections)
    ]
    for connection in connections:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    try:
        return _Posting(job, connections, requests).run()
    finally:
        for connection in connections:
            connection.close()


def requests_of(job: Job) -> Iterator[bytes]:
    """What is posted, in order, and made beforehand."""
    bodies = read_bodies(Path(job.bodies))
    chosen = islice(bodies, job.offset, None, job.every) if job.every else bodies
    requests = [request_for(job.port, job.path, body, job.content_type) for body in chosen]
    return iter(requests) if job.every else islice(cycle(requests), job.offset, None)


class _Line:
    """One connection: when its request was sent, and what has come of the answer."""

    __slots__ = ("begun", "partial", "socket")

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.begun = 0.0
        self.partial = b""


class _Posting:
    """Keeps every connection busy until the job is done, or there is nothing left to send."""

    def __init__(self, job: Job, connections: list[socket.socket], requests: Iterator[bytes]) -> None:
        self._job = job
        self._requests = requests
        self._lines = {connection.fileno(): _Line(connection) for connection in connections}
        self._statuses: Counter[str] = Counter()
        self._latencies_us: list[int] = []
        self._left = job.requests or sys.maxsize
        self._deadline = float("inf")
        self._open = 0

    def run(self) -> Outcome:
        """Until the last answer is there."""
        start = perf_counter()
        with select.epoll() as epoll:
            for number, line in self._lines.items():
                epoll.register(number, select.EPOLLIN)
                self._send(line)
            # However late it is by now: every connection has sent something.
            if not self._job.requests:
                self._deadline = start + self._job.seconds
            while self._open:
                events = epoll.poll(_TIMEOUT_SECONDS)
                if not events:
                    raise TimeoutError("the server stopped answering")
                for number, _ in events:
                    self._receive(self._lines[number])
        return Outcome(dict(self._statuses), perf_counter() - start, self._latencies_us)

    def _send(self, line: _Line) -> None:
        line.begun = perf_counter()
        if line.begun < self._deadline and self._left > 0 and (request := next(self._requests, None)):
            self._left -= 1
            self._open += 1
            line.socket.sendall(request)

    def _receive(self, line: _Line) -> None:
        data = line.socket.recv(65536)
        if not data:
            raise ConnectionError("the server closed a connection")
        response = line.partial + data
        if not is_complete(response):
            line.partial = response
            return
        self._latencies_us.append(int((perf_counter() - line.begun) * 1e6))
        self._statuses[response[9:12].decode("ascii")] += 1
        self._open -= 1
        line.partial = b""
        self._send(line)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(run(Job(**json.loads(sys.stdin.readline()))))) + "\n")
