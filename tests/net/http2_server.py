"""HTTP/2 server over TLS whose answers a test scripts: each, a hang, a reset, GOAWAY, a closed connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_pem_x509_certificate
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, PingReceived, RequestReceived, SettingsAcknowledged, StreamEnded, StreamReset
from h2.exceptions import H2Error
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame
from OpenSSL import crypto
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.ssl import CertificateOptions
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.python.failure import Failure


@dataclass
class ReceivedRequest:
    """A request as the server has received it; whether it was processed is up to the script."""

    connection: ScriptedConnection
    stream_id: int
    headers: dict[str, str]
    body: bytes = b""

    @property
    def path(self) -> str:
        """Its path."""
        return self.headers[":path"]

    def respond(self, status: int = 200, headers: Mapping[str, str] | None = None, body: bytes = b"") -> None:
        """Answer it."""
        self.connection.respond(self.stream_id, status, headers or {}, body)


# What is done about one request.
Action = Callable[[ReceivedRequest], None]


def respond(status: int = 200, headers: Mapping[str, str] | None = None, body: bytes = b"") -> Action:
    """Answer with these."""
    return lambda request: request.respond(status, headers, body)


def hang(request: ReceivedRequest) -> None:
    """Never answer, unless the test does later."""


def write(data: bytes) -> Action:
    """Send any bytes in place of an answer."""
    return lambda request: request.connection.transport.write(data)


def reset(code: ErrorCodes) -> Action:
    """Reset the stream."""
    return lambda request: request.connection.reset(request.stream_id, code)


def refuse(request: ReceivedRequest) -> None:
    """Reset the stream as one that was not processed."""
    request.connection.reset(request.stream_id, ErrorCodes.REFUSED_STREAM)


def go_away_before(request: ReceivedRequest) -> None:
    """GOAWAY: this request was not processed."""
    request.connection.go_away(max(0, request.stream_id - 2))


def go_away_after(request: ReceivedRequest) -> None:
    """GOAWAY: this request was processed; its answer follows."""
    request.connection.go_away(request.stream_id)
    request.respond()


def close_connection(request: ReceivedRequest) -> None:
    """Close the connection without a word."""
    request.connection.abort()


class ScriptedConnection(Protocol):
    """
    One connection.

    :ivar requests: those whose bodies are complete, in order; not those that GOAWAY has told not to be processed.
    :ivar resets: streams that the client has reset.
    :ivar acknowledged: how often the client has acknowledged settings.
    """

    transport: Any
    factory: ScriptedServer

    def __init__(self) -> None:
        self.requests: list[ReceivedRequest] = []
        self.resets: list[int] = []
        self.pings = self.acknowledged = 0
        self._last_stream_id = 2**31 - 1
        self.closed: Deferred[None] = Deferred()
        self._h2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self._open: dict[int, ReceivedRequest] = {}

    def connectionMade(self) -> None:
        self.factory.connections.append(self)
        self._h2.local_settings = Settings(client=False, initial_values=self.factory.settings)
        self._h2.initiate_connection()
        if not self.factory.silent:
            self.flush()
        self.factory.notify()

    def dataReceived(self, data: bytes) -> None:
        if self.factory.silent:
            return
        try:
            events = self._h2.receive_data(data)
        except H2Error:
            self.abort()
            return
        for event in events:
            self._handle(event)
        self.flush()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.factory.notify()
        self.closed.callback(None)

    def respond(self, stream_id: int, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Answer a request."""
        fields = [(":status", str(status)), *headers.items()]
        self._h2.send_headers(stream_id, fields, end_stream=not body)
        frame_size = self._h2.max_outbound_frame_size
        for start in range(0, len(body), frame_size):
            self._h2.send_data(stream_id, body[start : start + frame_size], start + frame_size >= len(body))
        self.flush()

    def reset(self, stream_id: int, code: ErrorCodes) -> None:
        """Reset a stream."""
        self._h2.reset_stream(stream_id, code)
        self.flush()

    def go_away(self, last_stream_id: int) -> None:
        """Send GOAWAY; unlike h2, go on with the streams up to the last one."""
        self.flush()
        self._last_stream_id = last_stream_id
        self.transport.write(GoAwayFrame(0, last_stream_id=last_stream_id, additional_data=b"{}").serialize())

    def update_settings(self, settings: Mapping[SettingCodes | int, int]) -> None:
        """Send SETTINGS."""
        self._h2.update_settings(dict(settings))
        self.flush()

    def write(self, data: bytes) -> None:
        """Send any bytes."""
        self.transport.write(data)

    def abort(self) -> None:
        """Close at once."""
        self.transport.abortConnection()

    def close(self) -> None:
        """Close in order."""
        self.transport.loseConnection()

    def flush(self) -> None:
        """Send what h2 has to send."""
        data = self._h2.data_to_send()
        if data:
            self.transport.write(data)

    def _handle(self, event: object) -> None:
        match event:
            case RequestReceived():
                self._begin(event)
            case DataReceived():
                if self.factory.on_headers is None:
                    self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                self._open[event.stream_id].body += event.data
            case StreamEnded():
                self._end(event)
            case StreamReset():
                self.resets.append(event.stream_id)
            case PingReceived():
                self.pings += 1
            case SettingsAcknowledged():
                self.acknowledged += 1
        self.factory.notify()

    def _begin(self, event: RequestReceived) -> None:
        headers = {str(name): str(value) for name, value in event.headers}
        request = self._open[event.stream_id] = ReceivedRequest(self, event.stream_id, headers)
        if self.factory.on_headers is not None:
            self.factory.on_headers(request)

    def _end(self, event: StreamEnded) -> None:
        request = self._open.pop(event.stream_id)
        if event.stream_id > self._last_stream_id:
            return
        self.requests.append(request)
        self.factory.act(request)


@dataclass
class ScriptedServer(Factory[ScriptedConnection]):
    """
    The server.

    :param default: what is done about requests for which the script has nothing.
    :param silent: whether it accepts connections without saying or hearing anything.
    :param on_headers: done about a request when only its headers are there; its body gets no more room.
    :ivar script: what is done about the next requests, one each.
    """

    default: Action = field(default_factory=respond)
    settings: dict[SettingCodes, int] = field(default_factory=lambda: {SettingCodes.MAX_CONCURRENT_STREAMS: 100})
    silent: bool = False
    on_headers: Action | None = None
    script: deque[Action] = field(default_factory=deque)
    connections: list[ScriptedConnection] = field(default_factory=list)

    protocol = ScriptedConnection
    noisy = False

    def __post_init__(self) -> None:
        self._waiting: list[tuple[Callable[[], bool], Deferred[None]]] = []

    @property
    def requests(self) -> list[ReceivedRequest]:
        """All that were received, by connection."""
        return [request for connection in self.connections for request in connection.requests]

    def act(self, request: ReceivedRequest) -> None:
        """Called with each request."""
        action = self.script.popleft() if self.script else self.default
        action(request)

    def notify(self) -> None:
        """Called whenever something has happened that may be waited for."""
        for condition, done in list(self._waiting):
            if condition():
                self._waiting.remove((condition, done))
                done.callback(None)

    def until(self, condition: Callable[[], bool]) -> Deferred[None]:
        """Fires when a condition holds that requests, resets, pings or lost connections bring about."""
        done: Deferred[None] = Deferred()
        self._waiting.append((condition, done))
        self.notify()
        return done

    def until_requests(self, number: int) -> Deferred[None]:
        """Fires when that many requests were received on all connections."""
        return self.until(lambda: len(self.requests) >= number)

    def until_pings(self, number: int) -> Deferred[None]:
        """Fires when that many pings were received on all connections."""
        return self.until(lambda: sum(connection.pings for connection in self.connections) >= number)

    def listen(
        self, reactor: Any, certificate: Path, *, port: int = 0, protocols: Sequence[bytes] | None = (b"h2",)
    ) -> Any:
        """
        Listen on loopback; returns the IListeningPort.

        :param certificate: PEM file with certificate and private key.
        :param protocols: selected from by ALPN; None for no ALPN.
        """
        return reactor.listenTCP(port, wrap_tls(self, certificate, protocols), interface="127.0.0.1")


def wrap_tls(factory: Any, certificate: Path, protocols: Sequence[bytes] | None) -> Any:
    """Put a factory behind TLS."""
    pem = certificate.read_bytes()
    options = CertificateOptions(
        privateKey=crypto.PKey.from_cryptography_key(load_pem_private_key(pem, None)),  # type: ignore[arg-type]
        certificate=crypto.X509.from_cryptography(load_pem_x509_certificate(pem)),
        acceptableProtocols=None if protocols is None else list(protocols),
    )
    return TLSMemoryBIOFactory(options, False, factory)
