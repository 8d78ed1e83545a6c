"""HTTP servers on loopback that answer as a test says, misbehave as it says, and keep what they received."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson
from twisted.internet import ssl
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Request, Site

LOOPBACK = "127.0.0.1"
# More than any client may read.
OVERSIZED_BYTES = 1_000_000


@dataclass(frozen=True)
class Answer:
    """
    A response, or what happens instead.

    :param behaviour: `respond`; `hang`, nothing is sent; `reset`, the connection is aborted; `stall`, it stops within
        the body; `oversize`, the body is much too long; `close`, the connection ends after the response.
    """

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    behaviour: Literal["respond", "hang", "reset", "stall", "oversize", "close"] = "respond"

    @classmethod
    def of_json(cls, status: int, value: object, **headers: str) -> Answer:
        """A response with JSON; underscores in names of headers stand for hyphens."""
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        return cls(status, orjson.dumps(value), {"Content-Type": "application/json", **named})


@dataclass(frozen=True)
class ReceivedRequest:
    """:param headers: by lower-case name."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body."""
        return orjson.loads(self.body)


class ScriptedServer(Resource):
    """
    A server. Subclasses answer as the service would, in :meth:`answer`.

    :param certificate: PEM file with certificate and key for 127.0.0.1; None for plain HTTP.
    :ivar received: the requests that were received, in their order.
    :ivar script: answers for the next requests, in place of those of the service; the first is taken off each time.
    :ivar always: answer for all others; None for that of the service.
    """

    isLeaf = True

    def __init__(self, certificate: Path | None = None) -> None:
        super().__init__()
        self._certificate = certificate
        self._port: Any = None
        self._channels: set[Any] = set()
        self.received: list[ReceivedRequest] = []
        self.script: deque[Answer] = deque()
        self.always: Answer | None = None
        self.on_request: Callable[[], None] = lambda: None

    def start(self, reactor: Any, port: int = 0) -> None:
        """Listen; on a free port by default."""
        site = _QuietSite(self)
        if self._certificate is None:
            self._port = reactor.listenTCP(port, site, interface=LOOPBACK)
        else:
            pem = self._certificate.read_bytes()
            options = ssl.PrivateCertificate.loadPEM(pem).options()
            self._port = reactor.listenSSL(port, site, options, interface=LOOPBACK)

    async def stop(self) -> None:
        """Stop listening, and abort all connections."""
        stopped = self._port.stopListening()
        self.abort_connections()
        await stopped

    @property
    def url(self) -> str:
        """Base URL."""
        scheme = "http" if self._certificate is None else "https"
        return f"{scheme}://{LOOPBACK}:{self._port.getHost().port}"

    @property
    def connections(self) -> int:
        """Number of connections with requests."""
        return len(self._channels)

    def abort_connections(self) -> None:
        """Abort all connections, such as those that were kept or never answered."""
        for channel in self._channels:
            if channel.transport is not None and not channel.transport.disconnected:
                channel.transport.abortConnection()

    def answer(self, request: ReceivedRequest) -> Answer:
        """What the service answers."""
        return Answer()

    def render(self, request: Request) -> int:
        """Called for each request."""
        self._channels.add(request.channel)
        headers = request.requestHeaders.getAllRawHeaders()
        received = ReceivedRequest(
            request.method.decode(),
            request.uri.decode(),
            {name.decode().lower(): values[-1].decode() for name, values in headers},
            request.content.read() if request.content is not None else b"",
        )
        self.received.append(received)
        answer = self.script.popleft() if self.script else self.always or self.answer(received)
        self._send(request, answer)
        self.on_request()
        return NOT_DONE_YET

    def _send(self, request: Request, answer: Answer) -> None:
        if answer.behaviour == "hang":
            return
        if answer.behaviour == "reset":
            channel: Any = request.channel
            channel.transport.abortConnection()
            return
        request.setResponseCode(answer.status)
        for name, value in answer.headers.items():
            request.setHeader(name, value)
        if answer.behaviour == "stall":
            request.setHeader("Content-Length", str(len(answer.body) + 100))
            request.write(answer.body or b"{")
            return
        if answer.behaviour == "close":
            request.setHeader("Connection", "close")
        request.write(answer.body if answer.behaviour != "oversize" else bytes(OVERSIZED_BYTES))
        if not request._disconnected:
            request.finish()


class _QuietSite(Site):
    noisy = False

    def log(self, request: Any) -> None:
        """No access log."""
