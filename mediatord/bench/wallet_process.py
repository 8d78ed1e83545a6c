"""
Enrolled wallets in a child process, and what they do: message cycles, draining of queues, connection storms, pings.

The process reads a :class:`WalletSetup` as a line of JSON, enrols the wallets, writes forwards to them into a file,
and prints `ready`. Each further line is a command with its parameters, answered by a line of JSON: `{"do": "live"}`
opens a socket with live delivery for every wallet and `close` closes them; `cycle` takes :class:`CycleParameters`;
`waiting` counts queued messages; `drain` fetches and acknowledges them; `storm` opens many sockets at once; `ping`
pings the sockets; `leave` unregisters the wallets.
"""

from __future__ import annotations

import errno
import json
import select
import socket
import sys
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from itertools import cycle
from pathlib import Path
from time import perf_counter, process_time
from typing import Any
from urllib.parse import urlsplit

from mediatord.bench.didcomm_wallets import (
    FastMessageCodec,
    LiveSocket,
    build_tagged_forwards,
    enrol_group,
    find_mediator,
    read_delivery_ids,
    unregister_group,
)
from mediatord.bench.load_generator import (
    LATE_SECONDS,
    PING_OPCODE,
    TEXT_OPCODE,
    ClientConnection,
    ResponseCounter,
    WebSocketClient,
    build_handshake,
    encode_frame,
    encode_request,
    intended_times,
    loopback_address,
    open_connection,
    parse_frame,
    raise_timeout,
    read_response,
    split_handshake,
    write_bodies,
)
from mediatord.bench.processes import print_line, raise_file_limit
from mediatord.wallet.didcomm_mediation import PICKUP
from mediatord.wallet.didcomm_messages import UnreadableMessage

_PUSH_TIMEOUT_SECONDS = 10.0
_RESPONSE_TIMEOUT_SECONDS = 30.0
# After the last push, how long to wait for a duplicate of it.
_SILENCE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class WalletSetup:
    """
    Parameters of a wallet process.

    :param did: of the mediator, if it does not publish it.
    :param size: of the innermost plaintext, in bytes.
    :param forwards: number of different forwards, to the wallets in turn.
    :param bodies: file to write the forwards to.
    :param short: wallet DIDs without a service.
    :param socket_url: of the WebSockets, if not as the mediator's document says.
    """

    url: str
    did: str | None
    wallets: int
    size: int
    forwards: int
    bodies: str
    short: bool = True
    socket_url: str | None = None


@dataclass(frozen=True, slots=True)
class CycleParameters:
    """
    Parameters of message cycles.

    :param seconds: how long forwards are posted.
    :param connections: for posting; without a rate also the bound of messages in flight.
    :param rate: forwards per second of an open loop; 0 for a closed loop.
    :param even: at fixed intervals instead of a Poisson process.
    :param apart: each connection has its own source address, and they are used in turn.
    :param acknowledge: acknowledge what is pushed.
    """

    seconds: float
    connections: int
    rate: float = 0.0
    even: bool = False
    seed: int = 0
    apart: bool = False
    acknowledge: bool = True


@dataclass(slots=True)
class CycleResult:
    """
    What became of the forwards.

    :param missing: accepted and never pushed.
    :param repeated: pushed more often than posted.
    :param seconds: from the first forward until the last acknowledgement has been read.
    :param accepted_us: from when a forward was sent, or was due, to its 202.
    :param pushed_us: likewise, to its push.
    :param after_us: from its 202 to its push, which may be negative.
    :param late: forwards sent late.
    :param cpu_seconds: of this process.
    """

    statuses: dict[str, int] = field(default_factory=dict)
    pushed: int = 0
    missing: int = 0
    repeated: int = 0
    seconds: float = 0.0
    accepted_us: list[int] = field(default_factory=list)
    pushed_us: list[int] = field(default_factory=list)
    after_us: list[int] = field(default_factory=list)
    late: int = 0
    cpu_seconds: float = 0.0


class _InFlight:
    """A forward that has been posted; times in seconds, 0 while unknown."""

    __slots__ = ("accepted", "posted", "pushed")

    def __init__(self, posted: float) -> None:
        self.posted, self.accepted, self.pushed = posted, 0.0, 0.0


class CycleRunner:
    """
    Posts forwards, receives their pushes and acknowledges them.

    A push is matched to its forward by the tag of the envelope; of several equal ones the oldest counts.

    :param forwards: encoded requests, with the tag of the envelope in each.
    """

    def __init__(
        self,
        address: tuple[str, int],
        forwards: Sequence[tuple[bytes, str]],
        live_sockets: Sequence[LiveSocket],
        parameters: CycleParameters,
    ) -> None:
        self._parameters = parameters
        self._forwards = cycle(forwards)
        self._live_sockets = {live.socket.fileno(): live for live in live_sockets}
        sources = [loopback_address(number) if parameters.apart else "" for number in range(parameters.connections)]
        self._idle = deque(ClientConnection(open_connection(*address, source)) for source in sources)
        self._connections = {connection.fileno(): connection for connection in self._idle}
        self._posted: dict[str, deque[_InFlight]] = {}
        self._by_connection: dict[ClientConnection, _InFlight] = {}
        self._in_flight = self._next = 0
        self._responses = ResponseCounter()
        self._accepted_us, self._pushed_us, self._after_us = array("I"), array("I"), array("l")
        self._result = CycleResult()
        self._times: array[float] | None = None
        if parameters.rate:
            self._times = intended_times(parameters.rate, parameters.seconds, parameters.seed, even=parameters.even)
        self._last: LiveSocket | None = None

    def run(self) -> CycleResult:
        """Run until everything accepted has been pushed, or is missing."""
        start, start_cpu = perf_counter(), process_time()
        with select.epoll() as epoll:
            for number in (*self._connections, *self._live_sockets):
                epoll.register(number, select.EPOLLIN)
            self._exchange(epoll, start)
        result = self._result
        result.missing = self._in_flight
        if self._last is not None and self._parameters.acknowledge:
            self._last.count_queued()  # its answer means that the acknowledgements have been read
        result.seconds, result.cpu_seconds = perf_counter() - start, process_time() - start_cpu
        if not self._parameters.acknowledge:
            readable, _, _ = select.select(list(self._live_sockets), [], [], _SILENCE_SECONDS)
            for number in readable:
                self._take_push(self._live_sockets[number])
        result.statuses = self._responses.by_name()
        result.accepted_us, result.pushed_us = list(self._accepted_us), list(self._pushed_us)
        result.after_us = list(self._after_us)
        for connection in self._connections.values():
            connection.close()
        return result

    def _exchange(self, epoll: select.epoll, start: float) -> None:
        last_event = start
        while self._post_due(start) or self._in_flight or len(self._idle) < len(self._connections):
            select.select([epoll], [], [], self._next_timeout(start))
            events = epoll.poll(0)
            now = perf_counter()
            if events:
                last_event = now
            elif now - last_event > _PUSH_TIMEOUT_SECONDS:
                break
            for number, _ in events:
                live = self._live_sockets.get(number)
                if live is not None:
                    self._take_push(live)
                else:
                    self._take_response(self._connections[number])

    def _post_due(self, start: float) -> bool:
        """Post what may be posted now; whether there will be more."""
        if self._times is None:
            more = perf_counter() - start < self._parameters.seconds
            while more and self._idle and self._in_flight < self._parameters.connections:
                self._post(perf_counter())
            return more
        while self._idle and self._next < len(self._times):
            due = start + self._times[self._next]
            lateness = perf_counter() - due
            if lateness < 0:
                break
            self._post(due)
            self._next += 1
            self._result.late += lateness > LATE_SECONDS
        return self._next < len(self._times)

    def _next_timeout(self, start: float) -> float:
        if self._times is None:
            return max(0.001, min(_PUSH_TIMEOUT_SECONDS, start + self._parameters.seconds - perf_counter()))
        if not self._idle or self._next == len(self._times):
            return _PUSH_TIMEOUT_SECONDS
        return max(0.0, start + self._times[self._next] - perf_counter())

    def _post(self, due: float) -> None:
        connection = self._idle.popleft() if self._parameters.apart else self._idle.pop()
        request, tag = next(self._forwards)
        message = _InFlight(due)
        self._by_connection[connection] = message
        self._posted.setdefault(tag, deque()).append(message)
        self._in_flight += 1
        connection.send(request)

    def _take_response(self, connection: ClientConnection) -> None:
        if self._responses.take(connection):
            message = self._by_connection[connection]
            message.accepted = perf_counter()
            self._accepted_us.append(int((message.accepted - message.posted) * 1e6))
            self._idle.append(connection)
            if message.pushed:
                self._after_us.append(int((message.pushed - message.accepted) * 1e6))

    def _take_push(self, live: LiveSocket) -> None:
        for raw in live.socket.take():
            now = perf_counter()
            delivered = read_delivery_ids(live.codec.open(raw))
            for _, tag in delivered:
                self._match(tag, now)
            if self._parameters.acknowledge:
                live.socket.send(live.codec.acknowledgement([id_ for id_, _ in delivered]))
            self._last = live

    def _match(self, tag: str, now: float) -> None:
        posted = self._posted.get(tag)
        if not posted:
            self._result.repeated += 1
            return
        message = posted.popleft()
        message.pushed = now
        self._in_flight -= 1
        self._result.pushed += 1
        self._pushed_us.append(int((now - message.posted) * 1e6))
        if message.accepted:
            self._after_us.append(int((now - message.accepted) * 1e6))


@dataclass(slots=True)
class DrainResult:
    """
    What was fetched and acknowledged.

    :param latencies_us: of each request.
    """

    messages: int = 0
    requests: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    latencies_us: list[int] = field(default_factory=list)


class DrainRunner:
    """
    Fetches and acknowledges everything queued for some wallets (Pickup 3.0), over several HTTP connections.

    :param url: of the mediator.
    :param limit: messages in one delivery at most.
    """

    def __init__(self, url: str, codecs: Sequence[FastMessageCodec], connections: int, limit: int) -> None:
        target = urlsplit(url)
        self._host, self._port, self._path = target.hostname or "", target.port or 80, target.path or "/"
        self._codecs = iter(codecs)
        self._count = connections
        self._limit = limit
        self._result = DrainResult()

    def run(self) -> DrainResult:
        """
        Run until all queues are empty.

        :raise UnreadableMessage: a response that is neither a delivery nor a status.
        """
        connections = [ClientConnection(open_connection(self._host, self._port)) for _ in range(self._count)]
        start, start_cpu = perf_counter(), process_time()
        busy: dict[int, tuple[ClientConnection, Generator[bytes, bytes]]] = {}
        try:
            with select.epoll() as epoll:
                for connection in connections:
                    dialogue = self._dialogue(self._codecs)
                    if (request := next(dialogue, None)) is not None:
                        epoll.register(connection.fileno(), select.EPOLLIN)
                        busy[connection.fileno()] = connection, dialogue
                        self._send(connection, request)
                while busy:
                    for number, _ in epoll.poll(_RESPONSE_TIMEOUT_SECONDS) or raise_timeout():
                        connection, dialogue = busy[number]
                        response = connection.receive_response()
                        if response is not None and not self._continue(connection, dialogue, response):
                            del busy[number]
        finally:
            for connection in connections:
                connection.close()
        result = self._result
        result.seconds, result.cpu_seconds = perf_counter() - start, process_time() - start_cpu
        return result

    def _continue(self, connection: ClientConnection, dialogue: Generator[bytes, bytes], response: bytes) -> bool:
        """Take a response and send the next request; whether there is one."""
        self._result.latencies_us.append(int((perf_counter() - connection.started) * 1e6))
        status, body = read_response(response)
        if status != 200:
            raise UnreadableMessage(f"the mediator answered {status} to a request")
        try:
            self._send(connection, dialogue.send(body))
        except StopIteration:
            return False
        return True

    def _send(self, connection: ClientConnection, packed: bytes) -> None:
        self._result.requests += 1
        connection.started = perf_counter()
        connection.send(encode_request(self._port, self._path, packed, host=self._host))

    def _dialogue(self, codecs: Iterator[FastMessageCodec]) -> Generator[bytes, bytes]:
        """The requests on one connection, for one wallet after the other."""
        for codec in codecs:
            left = 1
            while left:
                answer = codec.open((yield codec.request(f"{PICKUP}/delivery-request", {"limit": self._limit})))
                if answer["type"] != f"{PICKUP}/delivery":
                    _require_status(answer)
                    break
                ids = [id_ for id_, _ in read_delivery_ids(answer)]
                status = codec.open((yield codec.acknowledgement(ids, route="all")))
                _require_status(status)
                self._result.messages += len(ids)
                left = status["body"]["message_count"]


def _require_status(answer: Mapping[str, Any]) -> None:
    if answer["type"] != f"{PICKUP}/status":
        raise UnreadableMessage(f"the mediator answered with a {answer['type']}")


def ping_sockets(live_sockets: Sequence[LiveSocket], seconds: float, rate: float) -> list[int]:
    """Ping idle sockets in turn at fixed intervals; microseconds from when each ping was due to its pong."""
    latencies_us = []
    sockets = cycle(live_sockets)
    start = perf_counter()
    for due in intended_times(rate, seconds, 0, even=True):
        select.select([], [], [], max(0.0, start + due - perf_counter()))
        client = next(sockets).socket
        client.send(b"", PING_OPCODE)
        if client.take():
            raise RuntimeError("a message on an idle socket")
        latencies_us.append(int((perf_counter() - start - due) * 1e6))
    return latencies_us


@dataclass(slots=True)
class StormResult:
    """
    What became of the sockets.

    :param sockets: open and in live mode.
    :param refused: closed by the server instead.
    :param opened_us: from the start until each socket was open.
    :param live_us: likewise, until live delivery was confirmed.
    """

    sockets: int = 0
    refused: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    opened_us: list[int] = field(default_factory=list)
    live_us: list[int] = field(default_factory=list)


class _ConnectingSocket:
    """A socket that is connecting, then waits for its handshake, then for the status of live delivery."""

    __slots__ = ("is_open", "live_request", "received", "socket")

    def __init__(self, codec: FastMessageCodec, address: tuple[str, int]) -> None:
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.is_open = False
        self.received = b""
        request = codec.request(f"{PICKUP}/live-delivery-change", {"live_delivery": True})
        self.live_request = encode_frame(request, TEXT_OPCODE)
        if self.socket.connect_ex(address) not in (0, errno.EINPROGRESS):
            raise ConnectionError("no connection")


class ConnectionStorm:
    """
    Opens many sockets at once, as wallets do after a network outage.

    :param url: the mediator's WebSocket endpoint.
    :param codecs: of the wallets; with more sockets than wallets several sockets belong to one.
    """

    def __init__(self, url: str, codecs: Sequence[FastMessageCodec], sockets: int) -> None:
        target = urlsplit(url)
        self._address = (target.hostname or "", target.port or 80)
        self._handshake = build_handshake(url)
        self._codecs = codecs
        self._count = sockets
        self._result = StormResult()
        self._start = 0.0

    def run(self) -> StormResult:
        """Run until every socket is in live mode or was refused, and close them."""
        start_cpu = process_time()
        self._start = perf_counter()
        result, connecting = self._result, dict[int, _ConnectingSocket]()
        try:
            with select.epoll() as epoll:
                for number in range(self._count):
                    one = _ConnectingSocket(self._codecs[number % len(self._codecs)], self._address)
                    connecting[one.socket.fileno()] = one
                    epoll.register(one.socket.fileno(), select.EPOLLOUT)
                left = len(connecting)
                while left:
                    for number, event in epoll.poll(_RESPONSE_TIMEOUT_SECONDS) or raise_timeout():
                        try:
                            done = self._advance(connecting[number], event, epoll)
                        except OSError:
                            result.refused += 1
                            done = True
                        if done:
                            epoll.unregister(number)
                            left -= 1
        finally:
            for one in connecting.values():
                one.socket.close()
        result.seconds, result.cpu_seconds = perf_counter() - self._start, process_time() - start_cpu
        return result

    def _advance(self, one: _ConnectingSocket, event: int, epoll: select.epoll) -> bool:
        """Take one step; whether the socket is in live mode."""
        if event & select.EPOLLOUT and not event & (select.EPOLLERR | select.EPOLLHUP):
            one.socket.send(self._handshake)
            epoll.modify(one.socket.fileno(), select.EPOLLIN)
            return False
        data = one.socket.recv(65536)
        if not data:
            raise ConnectionError("the server closed a WebSocket")
        one.received += data
        if not one.is_open and (rest := split_handshake(one.received)) is not None:
            one.received, one.is_open = rest, True
            self._result.opened_us.append(self._elapsed_us())
            one.socket.send(one.live_request)
        if one.is_open and parse_frame(one.received) is not None:
            self._result.live_us.append(self._elapsed_us())
            self._result.sockets += 1
            return True
        return False

    def _elapsed_us(self) -> int:
        return int((perf_counter() - self._start) * 1e6)


class WalletCommands:
    """The commands of a wallet process."""

    def __init__(self, setup: WalletSetup) -> None:
        mediator = find_mediator(setup.url, setup.did)
        self._group = enrol_group(mediator, setup.wallets, short=setup.short)
        self._codecs = self._group.make_codecs()
        self._live_sockets: list[LiveSocket] = []
        self._socket_url = setup.socket_url or mediator.ws_uri
        hop = urlsplit(self._group.hop.http_uri)
        self._address = (hop.hostname or "", hop.port or 80)
        packed = list(build_tagged_forwards(self._group, setup.size, setup.forwards))
        write_bodies(Path(setup.bodies), [body for body, _ in packed])
        self._forwards = [
            (encode_request(self._address[1], hop.path or "/", body, host=self._address[0]), tag)
            for body, tag in packed
        ]

    def commands(self) -> dict[str, Callable[..., object]]:
        """The commands by name; their parameters are keyword arguments."""
        return {
            "live": self._open_sockets,
            "cycle": lambda **parameters: CycleRunner(
                self._address, self._forwards, self._live_sockets, CycleParameters(**parameters)
            ).run(),
            "waiting": lambda: {"messages": sum(live.count_queued() for live in self._live_sockets)},
            "drain": lambda **parameters: DrainRunner(
                self._group.mediator.http_uri, self._codecs, **parameters
            ).run(),
            "storm": lambda sockets: ConnectionStorm(self._require_socket_url(), self._codecs, sockets).run(),
            "ping": lambda **parameters: {"latencies_us": ping_sockets(self._live_sockets, **parameters)},
            "close": self._close_sockets,
            "leave": lambda: unregister_group(self._group),
        }

    def _open_sockets(self, apart: bool = False) -> object:
        """:param apart: each socket has its own source address."""
        url = self._require_socket_url()
        self._live_sockets = []
        for number, codec in enumerate(self._codecs):
            source = loopback_address(number) if apart else ""
            self._live_sockets.append(LiveSocket(codec, WebSocketClient(url, source=source)))
        for live in self._live_sockets:
            live.enable_live_delivery()
        return {"sockets": len(self._live_sockets)}

    def _close_sockets(self) -> None:
        for live in self._live_sockets:
            live.socket.close()
        self._live_sockets = []

    def _require_socket_url(self) -> str:
        if self._socket_url is None:
            raise RuntimeError("the mediator's DID document names no WebSocket")
        return self._socket_url


def serve_wallets() -> None:
    """Run the commands from standard input until its end."""
    commands = WalletCommands(WalletSetup(**json.loads(sys.stdin.readline()))).commands()
    print_line("ready")
    for line in sys.stdin:
        parameters = json.loads(line)
        result = commands[parameters.pop("do")](**parameters)
        print_line(json.dumps(asdict(result) if is_dataclass(result) and not isinstance(result, type) else result))


if __name__ == "__main__":
    raise_file_limit()
    serve_wallets()
