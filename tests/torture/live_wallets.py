"""Thousands of wallets with live sockets: they acknowledge what they get, and reconnect."""

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

_HANDSHAKE = (
    "GET /didcomm HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: bWVkaWF0b3JkLWJlbmNoIQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
# Limit of a delivery.
_MAX_DELIVERY = 100
# Delay before a refused wallet reconnects, and longest time between checks.
_RECONNECT_SECONDS, _POLL_SECONDS = 0.2, 0.1
_ABORTED = struct.pack("ii", 1, 0)


class ReceivedMessages:
    """
    Deliveries to all wallets.

    :ivar ids: by the tag of the envelope, which identifies a message.
    :ivar times: number of deliveries of each id.
    """

    def __init__(self) -> None:
        self.ids: dict[str, set[str]] = {}
        self.times: Counter[str] = Counter()

    def record(self, id_: str, tag: str) -> None:
        """Record a delivery."""
        self.ids.setdefault(tag, set()).add(id_)
        self.times[id_] += 1

    @property
    def repeated(self) -> int:
        """Deliveries of messages delivered before."""
        return self.times.total() - len(self.times)


class LiveWallet:
    """One wallet. :ivar live: whether live delivery is on."""

    def __init__(self, wallet: DIDCommWallet, port: int, arrivals: ReceivedMessages) -> None:
        self._wallet = wallet
        self._port = port
        self._received_messages = arrivals
        self.live = False
        self._reset()

    def _reset(self) -> None:
        self.live = self._open = False
        self._received = b""
        self.socket = socket.socket()
        self.socket.setblocking(False)

    def connect(self) -> None:
        """
        Begin to connect.

        :raise OSError: the connection is refused.
        """
        self._reset()
        if (error := self.socket.connect_ex(("127.0.0.1", self._port))) not in (0, errno.EINPROGRESS):
            raise OSError(error, "no connection")

    def send_handshake(self) -> None:
        """Send the handshake once connected. :raise OSError: connecting failed."""
        self._send(_HANDSHAKE.format(port=self._port).encode())

    def abort(self) -> None:
        """Reset the connection without a close frame."""
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORTED)
        self.socket.close()
        self.live = False

    def receive(self) -> None:
        """
        Read what has arrived.

        :raise OSError: the connection has ended.
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
            self._request("live-delivery-change", {"live_delivery": True})
        while (parsed := parse_frame(self._received)) is not None:
            opcode, payload, size = parsed
            self._received = self._received[size:]
            if opcode == TEXT_OPCODE:
                self._process(self._wallet.from_mediator(payload).message)
            elif opcode == PING_OPCODE:
                self._send(encode_frame(payload, PONG_OPCODE))

    def _process(self, message: Message) -> None:
        kind = message.type.uri.rpartition("/")[2]
        if kind == "status":
            self.live = True
            if (message.body or {})["message_count"]:
                self._request("delivery-request", {"limit": _MAX_DELIVERY})
        elif kind == "delivery":
            messages = read_delivery(message)
            for delivered in messages:
                self._received_messages.record(delivered.id, encoding.loads_object(delivered.payload)["tag"])
            self._request(
                "messages-received", {"message_id_list": [delivered.id for delivered in messages]}, route="none"
            )
            if len(messages) == _MAX_DELIVERY:
                self._request("delivery-request", {"limit": _MAX_DELIVERY})
        else:
            raise UnreadableMessage(f"a {kind}")

    def _request(self, name: str, body: dict[str, object], route: str = "all") -> None:
        self._send(encode_frame(self._wallet.pack(f"{PICKUP}/{name}", body, return_route=route)[1], TEXT_OPCODE))

    def _send(self, data: bytes) -> None:
        if self.socket.send(data) != len(data):
            raise ConnectionError("the other side does not read")


class LiveWalletPool:
    """All wallets."""

    def __init__(self, wallets: Sequence[DIDCommWallet], port: int) -> None:
        self.received = ReceivedMessages()
        self._wallets = [LiveWallet(wallet, port, self.received) for wallet in wallets]
        self._by_number: dict[int, LiveWallet] = {}
        self._reconnects: list[tuple[float, int]] = [(0.0, number) for number in range(len(self._wallets))]
        self._epoll = select.epoll()

    @property
    def live(self) -> int:
        """Number of wallets with live delivery."""
        return sum(wallet.live for wallet in self._wallets)

    def disconnect_all(self) -> None:
        """Reset all connections; the wallets reconnect only in a storm."""
        for wallet in self._wallets:
            wallet.abort()
        self._by_number, self._reconnects = {}, []

    def reconnect_all(self) -> None:
        """Reset all connections, and reconnect all at once."""
        self.disconnect_all()
        self._reconnects = [(0.0, number) for number in range(len(self._wallets))]

    def run(self, condition: Callable[[], bool]) -> None:
        """Run until the condition holds."""
        while not condition():
            self._reconnect()
            for number, event in self._epoll.poll(_POLL_SECONDS):
                self._serve(number, event)

    def close(self) -> None:
        """Close all sockets."""
        for wallet in self._wallets:
            wallet.abort()
        self._epoll.close()

    def _serve(self, number: int, event: int) -> None:
        wallet = self._by_number.get(number)
        if wallet is None:
            return
        try:
            if event & select.EPOLLOUT and not event & (select.EPOLLERR | select.EPOLLHUP):
                wallet.send_handshake()
                self._epoll.modify(number, select.EPOLLIN)
            else:
                wallet.receive()
        except OSError:
            del self._by_number[number]
            wallet.abort()
            heapq.heappush(self._reconnects, (time.monotonic() + _RECONNECT_SECONDS, self._wallets.index(wallet)))

    def _reconnect(self) -> None:
        for place in list(self._due()):
            wallet = self._wallets[place]
            try:
                wallet.connect()
            except OSError:
                wallet.abort()
                heapq.heappush(self._reconnects, (time.monotonic() + _RECONNECT_SECONDS, place))
                continue
            number = wallet.socket.fileno()
            self._by_number[number] = wallet
            self._epoll.register(number, select.EPOLLOUT)

    def _due(self) -> Iterator[int]:
        now = time.monotonic()
        while self._reconnects and self._reconnects[0][0] <= now:
            yield heapq.heappop(self._reconnects)[1]
