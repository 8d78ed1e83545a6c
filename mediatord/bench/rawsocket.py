"""The least a WebSocket client can be, so that a thousand of them cost this process next to nothing (RFC 6455)."""

from __future__ import annotations

import base64
import secrets
import socket
from urllib.parse import urlsplit

TEXT = 1
CLOSE = 8
PING = 9
PONG = 10

_TIMEOUT_SECONDS = 30.0
_SHORT, _MEDIUM = 126, 1 << 16


class RawSocket:
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
        self._socket = socket.create_connection(address, timeout=_TIMEOUT_SECONDS, source_address=ours)
        if kernel_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, kernel_bytes)
        self._received = b""
        self._shake_hands(f"{address[0]}:{address[1]}", target.path or "/")

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def send(self, payload: bytes, opcode: int = TEXT) -> None:
        """Send one message in one frame."""
        self._socket.sendall(frame(payload, opcode))

    def take(self, most: int = 1 << 18) -> list[bytes]:
        """What has come, as whole messages; pings are answered. :param most: bytes to read."""
        data = self._socket.recv(most)
        if not data:
            raise ConnectionError("the server closed a WebSocket")
        self._received += data
        messages = []
        while (parsed := parse(self._received)) is not None:
            opcode, payload, size = parsed
            self._received = self._received[size:]
            if opcode == PING:
                self.send(payload, PONG)
            elif opcode == CLOSE:
                raise ConnectionError("the server closed a WebSocket")
            elif opcode == TEXT:
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


def frame(payload: bytes, opcode: int) -> bytes:
    """A final, masked frame."""
    length = len(payload)
    head = bytes([0x80 | opcode])
    if length < _SHORT:
        head += bytes([0x80 | length])
    elif length < _MEDIUM:
        head += bytes([0x80 | 126]) + length.to_bytes(2, "big")
    else:
        head += bytes([0x80 | 127]) + length.to_bytes(8, "big")
    mask = secrets.token_bytes(4)
    repeated = (mask * (length // 4 + 1))[:length]
    masked = (int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")).to_bytes(length, "big")
    return head + mask + masked


def parse(data: bytes) -> tuple[int, bytes, int] | None:
    """The first unmasked frame: opcode, payload, bytes taken; None while it is incomplete."""
    if len(data) < 2:
        return None
    length, start = data[1] & 0x7F, 2
    if length >= _SHORT:
        start += 2 if length == _SHORT else 8
        if len(data) < start:
            return None
        length = int.from_bytes(data[2:start], "big")
    if len(data) < start + length:
        return None
    return data[0] & 0x0F, data[start : start + length], start + length
