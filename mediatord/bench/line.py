"""One keep-alive connection on which somebody asks, waits for the answer, and asks again."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from mediatord.bench.load import is_complete, request_for
from mediatord.protocol import jsontext

JSON = "application/json"

_TIMEOUT_SECONDS = 120.0
# Servers close a connection on which nothing is said, but not so soon.
_IDLE_SECONDS = 10.0
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """:param seconds: from the first byte of the request being sent to the last one of this being received."""

    status: int
    seconds: float
    body: bytes = field(repr=False)

    def read(self) -> dict[str, Any]:
        """
        The JSON object that it is.

        :raise RuntimeError: a refusal.
        """
        value: dict[str, Any] = jsontext.loads_object(self.body)
        if self.status != 200:
            raise RuntimeError(f"the daemon answered {self.status} {value.get('code', '')}")
        return value


class Line:
    """A connection to a daemon, made anew when it was idle for long; closed at the end of `with`."""

    def __init__(self, url: str) -> None:
        target = urlsplit(url)
        self._host = target.hostname or ""
        self._port = target.port or 80
        self._path = target.path or "/"
        self._socket = self._connect()
        self._used = perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()

    def post(self, body: bytes) -> Answer:
        """POST JSON to where the URL says."""
        return self._exchange(request_for(self._port, self._path, body, JSON))

    def get(self, path: str) -> Answer:
        """GET something else."""
        headers = f"Host: 127.0.0.1:{self._port}\r\nUser-Agent: mediatord-bench\r\nAccept: */*"
        return self._exchange(f"GET {path} HTTP/1.1\r\n{headers}\r\n\r\n".encode("ascii"))

    def _connect(self) -> socket.socket:
        connection = socket.create_connection((self._host, self._port), timeout=_TIMEOUT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _exchange(self, request: bytes) -> Answer:
        if perf_counter() - self._used > _IDLE_SECONDS:
            self._socket.close()
            self._socket = self._connect()
        begun = perf_counter()
        self._socket.sendall(request)
        response = b""
        while not is_complete(response):
            data = self._socket.recv(_READ_BYTES)
            if not data:
                raise ConnectionError("the server closed a connection")
            response += data
        self._used = perf_counter()
        head, _, body = response.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            raise RuntimeError("an answer without a length")
        return Answer(int(response[9:12]), self._used - begun, body)
