"""
Many wallets that connect at the same moment, as they do when a mediator or a network comes back.

Run by the process that holds the wallets (:mod:`mediatord.bench.wallets`).
"""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter, process_time
from urllib.parse import urlsplit

from mediatord.bench.courier import PICKUP, Courier
from mediatord.bench.load import silence
from mediatord.bench.rawsocket import TEXT, frame, parse

_KEY = "bWVkaWF0b3JkLWJlbmNoIQ=="
_TIMEOUT_SECONDS = 30.0


@dataclass(slots=True)
class Stormed:
    """
    :param sockets: that are open and in live mode.
    :param refused: connections that were closed instead.
    :param seconds: until the last one was.
    :param opened_us: from the beginning to each socket being open.
    :param live_us: likewise, to live delivery being confirmed.
    """

    sockets: int = 0
    refused: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    opened_us: list[int] = field(default_factory=list)
    live_us: list[int] = field(default_factory=list)


class _Arriving:
    """One connection: at first it waits to be connected, then for the handshake, then for its status."""

    __slots__ = ("hello", "open", "received", "socket", "wish")

    def __init__(self, courier: Courier, address: tuple[str, int], hello: bytes) -> None:
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.hello = hello
        self.open = False
        self.received = b""
        wish = courier.request(f"{PICKUP}/live-delivery-change", {"live_delivery": True})
        self.wish = frame(wish, TEXT)
        if self.socket.connect_ex(address) not in (0, errno.EINPROGRESS):
            raise ConnectionError("no connection")

    def hear(self) -> None:
        """
        Read what has come.

        :raise ConnectionError: the other side closed.
        """
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionError("the server closed a WebSocket")
        self.received += data

    def has_opened(self) -> bool:
        """Whether the handshake is through."""
        head, mark, rest = self.received.partition(b"\r\n\r\n")
        if not mark:
            return False
        if not head.startswith(b"HTTP/1.1 101"):
            raise ConnectionError("the server did not open a WebSocket")
        self.received, self.open = rest, True
        return True


class Storm:
    """
    So many sockets at once.

    :param url: of the mediator's WebSocket endpoint.
    :param couriers: of the wallets that come; more sockets than wallets make several sockets of one.
    """

    def __init__(self, url: str, couriers: Sequence[Courier], sockets: int) -> None:
        target = urlsplit(url)
        self._address = (target.hostname or "", target.port or 80)
        self._hello = (
            f"GET {target.path or '/'} HTTP/1.1\r\nHost: {self._address[0]}:{self._address[1]}\r\n"
            f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {_KEY}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n"
        ).encode()
        self._couriers = couriers
        self._count = sockets
        self._found = Stormed()
        self._start = 0.0

    def run(self) -> Stormed:
        """Until everybody is there, or was refused; the sockets are closed then."""
        start_cpu = process_time()
        self._start = perf_counter()
        with select.epoll() as epoll:
            arriving: dict[int, _Arriving] = {}
            for number in range(self._count):
                one = _Arriving(self._couriers[number % len(self._couriers)], self._address, self._hello)
                arriving[one.socket.fileno()] = one
                epoll.register(one.socket.fileno(), select.EPOLLOUT)
            try:
                self._welcome(epoll, arriving)
            finally:
                for one in arriving.values():
                    one.socket.close()
        found = self._found
        found.seconds, found.cpu_seconds = perf_counter() - self._start, process_time() - start_cpu
        return found

    def _welcome(self, epoll: select.epoll, arriving: dict[int, _Arriving]) -> None:
        left = len(arriving)
        while left:
            for number, event in epoll.poll(_TIMEOUT_SECONDS) or silence():
                try:
                    arrived = self._step(arriving[number], event, epoll)
                except OSError:
                    self._found.refused += 1
                    arrived = True
                if arrived:
                    epoll.unregister(number)
                    left -= 1

    def _step(self, one: _Arriving, event: int, epoll: select.epoll) -> bool:
        """Whether this one is where it wanted to be."""
        if event & select.EPOLLOUT and not event & (select.EPOLLERR | select.EPOLLHUP):
            one.socket.send(one.hello)
            epoll.modify(one.socket.fileno(), select.EPOLLIN)
            return False
        one.hear()
        if not one.open and one.has_opened():
            self._found.opened_us.append(self._elapsed())
            one.socket.send(one.wish)
        if one.open and parse(one.received) is not None:
            self._found.live_us.append(self._elapsed())
            self._found.sockets += 1
            return True
        return False

    def _elapsed(self) -> int:
        return int((perf_counter() - self._start) * 1e6)
