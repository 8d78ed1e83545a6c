"""HTTP and WebSocket clients on plain sockets, which cost little CPU time: they run beside what they measure."""

from __future__ import annotations

import base64
import http.client
import secrets
import socket
import struct
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from time import perf_counter
from urllib.parse import urlsplit

from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE
from mediatord.wallet.didcomm_client import HTTPResponse

TIMEOUT_SECONDS = 30.0
_SEND_TIMEOUT = struct.pack("ll", int(TIMEOUT_SECONDS), 0)
_READ_BYTES = 1 << 18
_RESPONSE_BYTES = 16_384
_MAX_KNOWN_RESPONSES = 64
_CLIENT_TIMEOUT_SECONDS = 120.0
# Servers close idle connections, Node after five seconds; more than that may pass until a busy one reads a request.
_IDLE_SECONDS = 1.0


def split_url(url: str) -> tuple[str, int, str]:
    """Host, port and path of an `http:` or `ws:` URL."""
    target = urlsplit(url)
    return target.hostname or "", target.port or 80, target.path or "/"


def _encode_headers(headers: Mapping[str, str] | None) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())


def encode_request(
    url: str,
    body: bytes = b"",
    content_type: str = ENCRYPTED_MEDIA_TYPE,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """An HTTP request with the headers of an ordinary client, and further ones."""
    host, port, path = split_url(url)
    query = urlsplit(url).query
    head = (
        f"{method} {path}{'?' if query else ''}{query} HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"User-Agent: mediatord-bench\r\nAccept: */*\r\n{_encode_headers(headers)}"
    )
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


def loopback_address(number: int) -> str:
    """One of the loopback addresses, to give clients addresses of their own."""
    return f"127.{1 + number // 62_500}.{number // 250 % 250}.{1 + number % 250}"


def open_socket(url: str, source: str = "", timeout: float = TIMEOUT_SECONDS) -> socket.socket:
    """
    Connect to the host of a URL.

    :param source: local address; any if empty.
    """
    connection = socket.create_connection(split_url(url)[:2], timeout, (source, 0) if source else None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


class ClientConnection:
    """
    A connection with at most one request in flight; sending blocks, for a limited time.

    :ivar started: when the request was sent, or was due.
    :ivar partial: what has been received of the response.
    """

    __slots__ = ("close", "fileno", "partial", "receive", "send", "started")

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
        connection.settimeout(None)
        # Bound once: looking the methods up costs a tenth of the call.
        self.send, self.receive = connection.sendall, connection.recv
        self.fileno, self.close = connection.fileno, connection.close
        self.started = 0.0
        self.partial = b""


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

    def by_name(self) -> Counter[str]:
        """Number of responses by status."""
        return Counter({status.decode("ascii"): count for status, count in self._statuses.items()})

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


class KeepAliveClient(threading.local):
    """
    Blocking HTTP client with a connection for each thread, which is replaced after 1 s without a request.

    :param url: default of the requests.
    :ivar latencies_us: of all requests of this thread, from the first byte sent to the last one received.
    """

    def __init__(self, url: str) -> None:
        self.latencies_us = array("I")
        self._url = url
        self._socket = open_socket(url, timeout=_CLIENT_TIMEOUT_SECONDS)
        self._used = perf_counter()

    def post(
        self, body: bytes, content_type: str = ENCRYPTED_MEDIA_TYPE, headers: Mapping[str, str] | None = None
    ) -> HTTPResponse:
        """POST to the URL."""
        return self.exchange(encode_request(self._url, body, content_type, headers=headers))

    def exchange(self, request: bytes) -> HTTPResponse:
        """Send an encoded request to the same server, and wait for its response."""
        if perf_counter() - self._used > _IDLE_SECONDS:
            self.close()
            self._socket = open_socket(self._url, timeout=_CLIENT_TIMEOUT_SECONDS)
        start = perf_counter()
        self._socket.sendall(request)
        with http.client.HTTPResponse(self._socket) as response:
            response.begin()
            body = response.read()
        self._used = perf_counter()
        self.latencies_us.append(int((self._used - start) * 1e6))
        return HTTPResponse(response.status, {name.lower(): value for name, value in response.getheaders()}, body)

    def close(self) -> None:
        """Close the connection of this thread."""
        self._socket.close()


TEXT_OPCODE = 1
CLOSE_OPCODE = 8
PING_OPCODE = 9
PONG_OPCODE = 10

# A receive buffer of the kernel that is full soon.
KERNEL_BYTES = 4096
_MEDIUM_LENGTH, _LONG_LENGTH = 126, 1 << 16


def build_handshake(url: str, headers: Mapping[str, str] | None = None) -> bytes:
    """The opening handshake for a `ws://` URL (RFC 6455 4.1), with further headers."""
    host, port, path = split_url(url)
    key = base64.b64encode(secrets.token_bytes(16)).decode()
    return (
        f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n{_encode_headers(headers)}\r\n"
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
    :param headers: of the handshake, in addition to the usual ones.
    :param connect: opens a connection to the host of a URL from a local address.
    :ivar socket: the connection.
    :raise ConnectionError: the server did not switch protocols.
    """

    def __init__(
        self,
        url: str,
        kernel_bytes: int = 0,
        source: str = "",
        headers: Mapping[str, str] | None = None,
        connect: Callable[[str, str], socket.socket] = open_socket,
    ) -> None:
        self.socket = connect(url, source)
        if kernel_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, kernel_bytes)
        self.socket.sendall(build_handshake(url, headers))
        received = b""
        try:
            while (rest := split_handshake(received)) is None:
                received += self._read(4096)
        except OSError:
            self.socket.close()
            raise
        self._received = rest

    def fileno(self) -> int:
        """For a selector."""
        return self.socket.fileno()

    def send(self, payload: bytes, opcode: int = TEXT_OPCODE) -> None:
        """Send one message in one frame."""
        self.socket.sendall(encode_frame(payload, opcode))

    def take(self, most: int = _READ_BYTES) -> list[bytes]:
        """Read up to `most` bytes; the messages that are complete. Pings are answered."""
        self._received += self._read(most)
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
        self.socket.close()

    def _read(self, most: int) -> bytes:
        if data := self.socket.recv(most):
            return data
        raise ConnectionError("the server closed a WebSocket")


def encode_frame(payload: bytes, opcode: int = TEXT_OPCODE) -> bytes:
    """A final, masked frame."""
    length = len(payload)
    if length < _MEDIUM_LENGTH:
        head = bytes([0x80 | opcode, 0x80 | length])
    elif length < _LONG_LENGTH:
        head = bytes([0x80 | opcode, 0x80 | 126]) + length.to_bytes(2, "big")
    else:
        head = bytes([0x80 | opcode, 0x80 | 127]) + length.to_bytes(8, "big")
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
