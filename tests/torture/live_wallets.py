"""Wallets by the thousand, each on a live socket: they acknowledge what they get, and come back if they lose it."""

from __future__ import annotations

import contextlib
import errno
import heapq
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from mediatord.bench.raw_clients import PING_OPCODE, PONG_OPCODE, TEXT_OPCODE, encode_frame, parse_frame
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.message import Message
from mediatord.wallet.didcomm_client import PICKUP, DIDCommWallet, read_delivery
from mediatord.wallet.didcomm_messages import UnreadableMessage

_HELLO = (
    "GET /didcomm HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: bWVkaWF0b3JkLWJlbmNoIQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
# In one delivery.
_MANY = 100
# Before somebody who was refused tries again, and at most between two looks at the time.
_AGAIN_SECONDS, _LOOK_SECONDS = 0.2, 0.1
_ABORTED = struct.pack("ii", 1, 0)


class ReceivedMessages:
    """
    What has come to all of them.

    :ivar ids: by the tag of the envelope, by which a message is known.
    :ivar times: how often each id was delivered.
    """

    def __init__(self) -> None:
        self.ids: dict[str, set[str]] = {}
        self.times: Counter[str] = Counter()

    def enter(self, id_: str, tag: str) -> None:
        """One was delivered."""
        self.ids.setdefault(tag, set()).add(id_)
        self.times[id_] += 1

    @property
    def repeated(self) -> int:
        """Deliveries of what had been delivered before."""
        return self.times.total() - len(self.times)


class LiveWallet:
    """One wallet. :ivar live: whether it is where it wants to be."""

    def __init__(self, wallet: DIDCommWallet, port: int, arrivals: ReceivedMessages) -> None:
        self._wallet = wallet
        self._port = port
        self._arrivals = arrivals
        self.live = False
        self._begin()

    def _begin(self) -> None:
        self.live = self._open = False
        self._received = b""
        self.socket = socket.socket()
        self.socket.setblocking(False)

    def connect(self) -> None:
        """
        Begin to.

        :raise OSError: there is nobody.
        """
        self._begin()
        if (error := self.socket.connect_ex(("127.0.0.1", self._port))) not in (0, errno.EINPROGRESS):
            raise OSError(error, "no connection")

    def greet(self) -> None:
        """It is connected. :raise OSError: it is not."""
        self._send(_HELLO.format(port=self._port).encode())

    def vanish(self) -> None:
        """As if the network was gone: nobody says goodbye."""
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORTED)
        self.socket.close()
        self.live = False

    def hear(self) -> None:
        """
        Take what has come.

        :raise OSError: the connection is gone.
        """
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("closed")
        self._received += data
        if not self._open:
            head, mark, rest = self._received.partition(b"\r\n\r\n")
            if not mark:
                return
            if not head.startswith(b"HTTP/1.1 101"):
                raise ConnectionError("no WebSocket")
            self._open, self._received = True, rest
            self._ask("live-delivery-change", {"live_delivery": True})
        while (parsed := parse_frame(self._received)) is not None:
            opcode, payload, size = parsed
            self._received = self._received[size:]
            if opcode == TEXT_OPCODE:
                self._take(self._wallet.from_mediator(payload).message)
            elif opcode == PING_OPCODE:
                self._send(encode_frame(payload, PONG_OPCODE))

    def _take(self, message: Message) -> None:
        kind = message.type.uri.rpartition("/")[2]
        if kind == "status":
            self.live = True
            if (message.body or {})["message_count"]:
                self._ask("delivery-request", {"limit": _MANY})
        elif kind == "delivery":
            found = read_delivery(message)
            for one in found:
                self._arrivals.enter(one.id, encoding.loads_object(one.payload)["tag"])
            self._ask("messages-received", {"message_id_list": [one.id for one in found]}, route="none")
            if len(found) == _MANY:
                self._ask("delivery-request", {"limit": _MANY})
        else:
            raise UnreadableMessage(f"a {kind}")

    def _ask(self, name: str, body: dict[str, object], route: str = "all") -> None:
        self._send(encode_frame(self._wallet.pack(f"{PICKUP}/{name}", body, return_route=route)[1], TEXT_OPCODE))

    def _send(self, data: bytes) -> None:
        if self.socket.send(data) != len(data):
            raise ConnectionError("the other side does not read")


class LiveWalletPool:
    """All of them."""

    def __init__(self, wallets: Sequence[DIDCommWallet], port: int) -> None:
        self.arrivals = ReceivedMessages()
        self._guests = [LiveWallet(wallet, port, self.arrivals) for wallet in wallets]
        self._by_number: dict[int, LiveWallet] = {}
        self._later: list[tuple[float, int]] = [(0.0, number) for number in range(len(self._guests))]
        self._epoll = select.epoll()

    @property
    def live(self) -> int:
        """How many are where they want to be."""
        return sum(guest.live for guest in self._guests)

    def leave(self) -> None:
        """All lose their connection at once, and do not come back before a storm."""
        for guest in self._guests:
            guest.vanish()
        self._by_number, self._later = {}, []

    def storm(self) -> None:
        """All lose their connection at once, and come back at once."""
        self.leave()
        self._later = [(0.0, number) for number in range(len(self._guests))]

    def run(self, until: Callable[[], bool]) -> None:
        """Returns when that holds."""
        while not until():
            self._come_back()
            for number, event in self._epoll.poll(_LOOK_SECONDS):
                self._serve(number, event)

    def close(self) -> None:
        """Everybody leaves."""
        for guest in self._guests:
            guest.vanish()
        self._epoll.close()

    def _serve(self, number: int, event: int) -> None:
        guest = self._by_number.get(number)
        if guest is None:
            return
        try:
            if event & select.EPOLLOUT and not event & (select.EPOLLERR | select.EPOLLHUP):
                guest.greet()
                self._epoll.modify(number, select.EPOLLIN)
            else:
                guest.hear()
        except OSError:
            del self._by_number[number]
            guest.vanish()
            heapq.heappush(self._later, (time.monotonic() + _AGAIN_SECONDS, self._guests.index(guest)))

    def _come_back(self) -> None:
        for place in list(self._due()):
            guest = self._guests[place]
            try:
                guest.connect()
            except OSError:
                guest.vanish()
                heapq.heappush(self._later, (time.monotonic() + _AGAIN_SECONDS, place))
                continue
            number = guest.socket.fileno()
            self._by_number[number] = guest
            self._epoll.register(number, select.EPOLLOUT)

    def _due(self) -> Iterator[int]:
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            yield heapq.heappop(self._later)[1]
