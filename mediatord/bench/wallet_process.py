"""
The whole way of a message to a wallet that is online: forward, push, acknowledgement.

Run by the process that holds the wallets (:mod:`mediatord.bench.wallet_process`). A forward is known again when it is
pushed, by the tag of the envelope in it; of several that are the same, the oldest is taken to have come first.

Wallets that come back and fetch what waits for them, over HTTP: delivery-request, messages-received, until nothing is
left (Pickup 3.0).

Run by the process that holds the wallets (:mod:`mediatord.bench.wallet_process`).

How soon idle sockets are answered (RFC 6455 5.5.2).

Run by the process that holds the wallets (:mod:`mediatord.bench.wallet_process`).

Many wallets that connect at the same moment, as they do when a mediator or a network comes back.

Run by the process that holds the wallets (:mod:`mediatord.bench.wallet_process`).

Wallets and what they do, as a process of its own.

It speaks by lines. The first one it reads, a :class:`Setup` as JSON, has it make wallets, enrol them, and write
forwards to them into a file for others to post; then it says `ready`. After that it does what each further line asks
for, and answers with one line of JSON. `{"do": "live"}` opens a socket for every wallet and switches live delivery
on, and `close` closes them; `cycle` is a :class:`~mediatord.bench.wallet_process.CycleParameters`; `waiting` asks what is left, and
`drain` fetches and acknowledges it; `storm` has all come at once; `ping` pings the sockets; `leave` takes the DIDs
off the mediator's list.
"""

from __future__ import annotations

import errno
import json
import select
import socket
import sys
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from itertools import cycle
from pathlib import Path
from time import perf_counter, process_time
from typing import Any
from urllib.parse import urlsplit

from mediatord.bench.didcomm_wallets import (
    PICKUP,
    FastMessageCodec,
    build_tagged_forwards,
    enrol_group_at,
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
    encode_frame,
    encode_request,
    intended_times,
    is_complete_response,
    loopback_address,
    open_connection,
    parse_frame,
    raise_timeout,
    write_bodies,
)
from mediatord.bench.processes import raise_file_limit
from mediatord.wallet.didcomm_messages import UnreadableMessage

_PUSH_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class TaggedForward:
    """
    A forward that is ready to be posted.

    :param tag: of the envelope inside, by which it is known.
    """

    request: bytes = field(repr=False)
    tag: str


@dataclass(frozen=True, slots=True)
class CycleParameters:
    """
    :param seconds: for so long forwards are posted.
    :param connections: they are posted on; without a rate, so many messages are on their way at most.
    :param rate: forwards per second at times fixed beforehand; 0 for as many as come through.
    :param seed: of those times.
    :param apart: each connection has an address of its own, and they take turns.
    """

    seconds: float
    connections: int
    rate: float = 0.0
    even: bool = False
    seed: int = 0
    apart: bool = False


@dataclass(slots=True)
class CycleResult:
    """
    :param pushed: how many messages came out and were acknowledged.
    :param missing: how many were accepted and never pushed.
    :param repeated: how many were pushed more often than posted.
    :param seconds: from the first forward to the last acknowledgement being read.
    :param accepted_us: from when a forward was sent, or was to be sent, to its 202.
    :param pushed_us: likewise, to its push.
    :param late: forwards that were sent later than intended.
    :param cpu_seconds: of this process.
    """

    statuses: dict[str, int] = field(default_factory=dict)
    pushed: int = 0
    missing: int = 0
    repeated: int = 0
    seconds: float = 0.0
    accepted_us: list[int] = field(default_factory=list)
    pushed_us: list[int] = field(default_factory=list)
    late: int = 0
    cpu_seconds: float = 0.0


class LiveSocket:
    """A wallet on its socket in live mode. :param source: its address, if it matters."""

    def __init__(self, codec: FastMessageCodec, url: str, source: str = "") -> None:
        self.codec = codec
        self.socket = WebSocketClient(url, source=source)

    def ask(self, packed: bytes) -> dict[str, object]:
        """Send a request, and the answer to it; what is pushed meanwhile is not taken note of."""
        self.socket.send(packed)
        while True:
            for raw in self.socket.take():
                answer = self.codec.open(raw)
                if answer["type"] != f"{PICKUP}/delivery":
                    return answer

    def begin(self) -> None:
        """
        Switch live delivery on.

        :raise Unreadable: it was not confirmed.
        """
        answer = self.ask(self.codec.request(f"{PICKUP}/live-delivery-change", {"live_delivery": True}))
        if answer["type"] != f"{PICKUP}/status":
            raise UnreadableMessage("live delivery was not switched on")

    def waiting(self) -> int:
        """How many messages the mediator still has for the wallet."""
        answer = self.ask(self.codec.request(f"{PICKUP}/status-request", {}))
        body = answer.get("body")
        return int(body["message_count"]) if isinstance(body, dict) else 0


class CycleRunner:
    """One turn."""

    def __init__(
        self,
        address: tuple[str, int],
        letters: Sequence[TaggedForward],
        live_sockets: Sequence[LiveSocket],
        turn: CycleParameters,
    ) -> None:
        self._turn = turn
        self._letters = cycle(letters)
        self._live_sockets = {live.socket.fileno(): live for live in live_sockets}
        sources = [loopback_address(number) if turn.apart else "" for number in range(turn.connections)]
        lines = [ClientConnection(open_connection(*address, source)) for source in sources]
        self._lines = {line.fileno(): line for line in lines}
        self._idle = deque(lines)
        self._posted: dict[str, deque[float]] = {}
        self._under_way = self._next = 0
        self._answers = ResponseCounter()
        self._accepted_us, self._pushed_us = array("I"), array("I")
        self._found = CycleResult()
        self._times = intended_times(turn.rate, turn.seconds, turn.seed, even=turn.even) if turn.rate else None
        self._last: LiveSocket | None = None

    def run(self) -> CycleResult:
        """Until everything that was accepted has been pushed and acknowledged, or is missing."""
        start, start_cpu = perf_counter(), process_time()
        with select.epoll() as epoll:
            for number in (*self._lines, *self._live_sockets):
                epoll.register(number, select.EPOLLIN)
            self._exchange(epoll, start)
        found = self._found
        found.missing = self._under_way
        if self._last is not None:
            self._last.waiting()  # an answer: what was said before has been read
        found.seconds, found.cpu_seconds = perf_counter() - start, process_time() - start_cpu
        found.statuses = self._answers.by_name()
        found.accepted_us, found.pushed_us = list(self._accepted_us), list(self._pushed_us)
        for line in self._lines.values():
            line.close()
        return found

    def _exchange(self, epoll: select.epoll, start: float) -> None:
        heard = start
        while self._send(start) or self._under_way or len(self._idle) < len(self._lines):
            select.select([epoll], [], [], self._patience(start))
            events = epoll.poll(0)
            now = perf_counter()
            if events:
                heard = now
            elif now - heard > _PUSH_TIMEOUT_SECONDS:
                break
            for number, _ in events:
                live = self._live_sockets.get(number)
                if live is not None:
                    self._take_push(live)
                else:
                    self._take_answer(self._lines[number])

    def _send(self, start: float) -> bool:
        """Post what may be posted now; whether there will be more."""
        return self._send_punctually(start) if self._times is not None else self._send_freely(start)

    def _send_freely(self, start: float) -> bool:
        now = perf_counter()
        more = now - start < self._turn.seconds
        while more and self._idle and self._under_way < self._turn.connections:
            self._post(perf_counter())
        return more

    def _send_punctually(self, start: float) -> bool:
        assert self._times is not None
        while self._idle and self._next < len(self._times):
            intended = start + self._times[self._next]
            lateness = perf_counter() - intended
            if lateness < 0:
                break
            self._post(intended)
            self._next += 1
            self._found.late += lateness > LATE_SECONDS
        return self._next < len(self._times)

    def _post(self, intended: float) -> None:
        line = self._idle.popleft() if self._turn.apart else self._idle.pop()
        letter = next(self._letters)
        line.begun = intended
        self._posted.setdefault(letter.tag, deque()).append(intended)
        self._under_way += 1
        line.send(letter.request)

    def _patience(self, start: float) -> float:
        if self._times is None:
            return max(0.001, min(_PUSH_TIMEOUT_SECONDS, start + self._turn.seconds - perf_counter()))
        if not self._idle or self._next == len(self._times):
            return _PUSH_TIMEOUT_SECONDS
        return max(0.0, start + self._times[self._next] - perf_counter())

    def _take_answer(self, line: ClientConnection) -> None:
        if self._answers.take(line):
            self._accepted_us.append(int((perf_counter() - line.begun) * 1e6))
            self._idle.append(line)

    def _take_push(self, live: LiveSocket) -> None:
        for raw in live.socket.take():
            came = perf_counter()
            found = read_delivery_ids(live.codec.open(raw))
            for _, tag in found:
                self._note(tag, came)
            live.socket.send(live.codec.acknowledgement([id_ for id_, _ in found]))
            self._last = live

    def _note(self, tag: str, came: float) -> None:
        posted = self._posted.get(tag)
        if not posted:
            self._found.repeated += 1
            return
        self._under_way -= 1
        self._found.pushed += 1
        self._pushed_us.append(int((came - posted.popleft()) * 1e6))


_READ_BYTES = 1 << 18
_DRAIN_TIMEOUT_SECONDS = 30.0

RequestSequence = Generator[bytes, bytes, None]


@dataclass(slots=True)
class DrainResult:
    """
    :param messages: fetched and acknowledged.
    :param requests: that this took.
    :param latencies_us: of each request.
    """

    messages: int = 0
    requests: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    latencies_us: list[int] = field(default_factory=list)


class DrainRunner:
    """
    Everything that waits for some wallets, fetched on several connections at once.

    :param address: host, port and path of the mediator.
    :param limit: messages in one delivery at most.
    """

    def __init__(
        self, address: tuple[str, int, str], codecs: Iterable[FastMessageCodec], connections: int, limit: int
    ) -> None:
        self._host, self._port, self._path = address
        self._codecs = iter(codecs)
        self._connections = connections
        self._limit = limit
        self.found = DrainResult()

    def run(self) -> DrainResult:
        """
        Until nothing waits any more.

        :raise Unreadable: an answer that is neither a delivery nor a status.
        """
        lines = [ClientConnection(open_connection(self._host, self._port)) for _ in range(self._connections)]
        start, start_cpu = perf_counter(), process_time()
        try:
            self._exchange(lines)
        finally:
            for line in lines:
                line.close()
        self.found.seconds, self.found.cpu_seconds = perf_counter() - start, process_time() - start_cpu
        return self.found

    def _exchange(self, lines: list[ClientConnection]) -> None:
        sequences: dict[int, tuple[ClientConnection, RequestSequence]] = {}
        with select.epoll() as epoll:
            for line in lines:
                sequence = self._request_sequences(self._codecs)
                if (request := next(sequence, None)) is not None:
                    epoll.register(line.fileno(), select.EPOLLIN)
                    sequences[line.fileno()] = line, sequence
                    self._send(line, request)
            while sequences:
                for number, _ in epoll.poll(_DRAIN_TIMEOUT_SECONDS) or raise_timeout():
                    if not self._take(*sequences[number]):
                        del sequences[number]

    def _take(self, line: ClientConnection, sequence: RequestSequence) -> bool:
        """Read what came on a connection; whether there is more to be said on it."""
        data = line.receive(_READ_BYTES)
        if not data:
            raise ConnectionError("the server closed a connection")
        line.partial += data
        if not is_complete_response(line.partial):
            return True
        self.found.latencies_us.append(int((perf_counter() - line.begun) * 1e6))
        response, line.partial = line.partial, b""
        if response[9:12] != b"200":
            raise UnreadableMessage(f"the mediator answered {response[9:12].decode('ascii', 'replace')} to a request")
        try:
            request = sequence.send(response.partition(b"\r\n\r\n")[2])
        except StopIteration:
            return False
        self._send(line, request)
        return True

    def _send(self, line: ClientConnection, packed: bytes) -> None:
        self.found.requests += 1
        line.begun = perf_counter()
        line.send(encode_request(self._port, self._path, packed, host=self._host))

    def _request_sequences(self, codecs: Iterator[FastMessageCodec]) -> RequestSequence:
        """What is asked for on one connection, for one wallet after the other."""
        for codec in codecs:
            left = 1
            while left:
                asked = codec.request(f"{PICKUP}/delivery-request", {"limit": self._limit})
                answer = codec.open((yield asked))
                if answer["type"] != f"{PICKUP}/delivery":
                    _require_status(answer)
                    break
                ids = [id_ for id_, _ in read_delivery_ids(answer)]
                status = codec.open((yield codec.acknowledgement(ids, route="all")))
                _require_status(status)
                self.found.messages += len(ids)
                left = status["body"]["message_count"]


def _require_status(answer: Mapping[str, Any]) -> None:
    if answer["type"] != f"{PICKUP}/status":
        raise UnreadableMessage(f"the mediator answered with a {answer['type']}")


@dataclass(slots=True)
class PingResult:
    """:param latencies_us: from when a ping was to be sent to its pong."""

    latencies_us: list[int] = field(default_factory=list)


def ping_sockets(live_sockets: Sequence[LiveSocket], seconds: float, rate: float) -> PingResult:
    """One socket after the other in a beat, on each of which nothing else is said."""
    found = PingResult()
    turns = cycle(live_sockets)
    start = perf_counter()
    for due in intended_times(rate, seconds, 0, even=True):
        select.select([], [], [], max(0.0, start + due - perf_counter()))
        socket = next(turns).socket
        socket.send(b"", PING_OPCODE)
        if socket.take():
            raise RuntimeError("a message on an idle socket")
        found.latencies_us.append(int((perf_counter() - start - due) * 1e6))
    return found


_WEBSOCKET_KEY = "bWVkaWF0b3JkLWJlbmNoIQ=="
_STORM_TIMEOUT_SECONDS = 30.0


@dataclass(slots=True)
class StormResult:
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


class _ConnectingSocket:
    """One connection: at first it waits to be connected, then for the handshake, then for its status."""

    __slots__ = ("handshake", "open", "received", "socket", "live_request")

    def __init__(self, codec: FastMessageCodec, address: tuple[str, int], handshake: bytes) -> None:
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.handshake = handshake
        self.open = False
        self.received = b""
        live_request = codec.request(f"{PICKUP}/live-delivery-change", {"live_delivery": True})
        self.live_request = encode_frame(live_request, TEXT_OPCODE)
        if self.socket.connect_ex(address) not in (0, errno.EINPROGRESS):
            raise ConnectionError("no connection")

    def receive(self) -> None:
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


class ConnectionStorm:
    """
    So many sockets at once.

    :param url: of the mediator's WebSocket endpoint.
    :param couriers: of the wallets that come; more sockets than wallets make several sockets of one.
    """

    def __init__(self, url: str, codecs: Sequence[FastMessageCodec], sockets: int) -> None:
        target = urlsplit(url)
        self._address = (target.hostname or "", target.port or 80)
        self._handshake = (
            f"GET {target.path or '/'} HTTP/1.1\r\nHost: {self._address[0]}:{self._address[1]}\r\n"
            f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {_WEBSOCKET_KEY}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n"
        ).encode()
        self._codecs = codecs
        self._count = sockets
        self._found = StormResult()
        self._start = 0.0

    def run(self) -> StormResult:
        """Until everybody is there, or was refused; the sockets are closed then."""
        start_cpu = process_time()
        self._start = perf_counter()
        with select.epoll() as epoll:
            connecting: dict[int, _ConnectingSocket] = {}
            for number in range(self._count):
                one = _ConnectingSocket(self._codecs[number % len(self._codecs)], self._address, self._handshake)
                connecting[one.socket.fileno()] = one
                epoll.register(one.socket.fileno(), select.EPOLLOUT)
            try:
                self._await_sockets(epoll, connecting)
            finally:
                for one in connecting.values():
                    one.socket.close()
        found = self._found
        found.seconds, found.cpu_seconds = perf_counter() - self._start, process_time() - start_cpu
        return found

    def _await_sockets(self, epoll: select.epoll, connecting: dict[int, _ConnectingSocket]) -> None:
        left = len(connecting)
        while left:
            for number, event in epoll.poll(_STORM_TIMEOUT_SECONDS) or raise_timeout():
                try:
                    arrived = self._step(connecting[number], event, epoll)
                except OSError:
                    self._found.refused += 1
                    arrived = True
                if arrived:
                    epoll.unregister(number)
                    left -= 1

    def _step(self, one: _ConnectingSocket, event: int, epoll: select.epoll) -> bool:
        """Whether this one is where it wanted to be."""
        if event & select.EPOLLOUT and not event & (select.EPOLLERR | select.EPOLLHUP):
            one.socket.send(one.handshake)
            epoll.modify(one.socket.fileno(), select.EPOLLIN)
            return False
        one.receive()
        if not one.open and one.has_opened():
            self._found.opened_us.append(self._elapsed())
            one.socket.send(one.live_request)
        if one.open and parse_frame(one.received) is not None:
            self._found.live_us.append(self._elapsed())
            self._found.sockets += 1
            return True
        return False

    def _elapsed(self) -> int:
        return int((perf_counter() - self._start) * 1e6)


@dataclass(frozen=True, slots=True)
class WalletSetup:
    """
    :param url: where the mediator is.
    :param did: of the mediator, if it does not say so itself.
    :param wallets: how many.
    :param size: of the plaintext inside the innermost envelope, in bytes.
    :param letters: how many different forwards, to the wallets in turn.
    :param bodies: the file for them.
    """

    url: str
    did: str | None
    wallets: int
    size: int
    letters: int
    bodies: str


class WalletCommands:
    """Those of one process."""

    def __init__(self, setup: WalletSetup) -> None:
        self._mediator = find_mediator(setup.url, setup.did)
        self._group = enrol_group_at(self._mediator, setup.wallets, short=True)
        self._codecs = [FastMessageCodec(wallet, self._mediator) for wallet in self._group.wallets]
        self._live_sockets: list[LiveSocket] = []
        target = urlsplit(self._group.hop.http_uri)
        self._address = (target.hostname or "", target.port or 80)
        own = urlsplit(self._mediator.http_uri)
        self._own = (own.hostname or "", own.port or 80, own.path or "/")
        packed = list(build_tagged_forwards(self._group, setup.size, setup.letters))
        write_bodies(Path(setup.bodies), [body for body, _ in packed])
        self._letters = [
            TaggedForward(encode_request(self._address[1], target.path or "/", body, host=self._address[0]), tag)
            for body, tag in packed
        ]

    def commands(self) -> dict[str, Callable[[dict[str, Any]], object]]:
        """What may be asked for, and what does it."""
        return {
            "live": self._live,
            "cycle": self._cycle,
            "waiting": self._waiting,
            "drain": self._drain,
            "storm": self._storm,
            "ping": self._ping,
            "close": self._close,
            "leave": self._leave,
        }

    def _live(self, wanted: dict[str, Any]) -> object:
        """:param wanted: `apart` for addresses of their own."""
        sources = [loopback_address(number) if wanted.get("apart") else "" for number in range(len(self._codecs))]
        url = self._socket_url()
        self._live_sockets = [
            LiveSocket(codec, url, source) for codec, source in zip(self._codecs, sources, strict=True)
        ]
        for live in self._live_sockets:
            live.begin()
        return {"sockets": len(self._live_sockets)}

    def _cycle(self, wanted: dict[str, Any]) -> object:
        return CycleRunner(self._address, self._letters, self._live_sockets, CycleParameters(**wanted)).run()

    def _waiting(self, _wanted: dict[str, Any]) -> object:
        return {"messages": sum(live.waiting() for live in self._live_sockets)}

    def _drain(self, wanted: dict[str, Any]) -> object:
        return DrainRunner(self._own, self._codecs, **wanted).run()

    def _storm(self, wanted: dict[str, Any]) -> object:
        return ConnectionStorm(self._socket_url(), self._codecs, **wanted).run()

    def _ping(self, wanted: dict[str, Any]) -> object:
        return ping_sockets(self._live_sockets, **wanted)

    def _close(self, _wanted: dict[str, Any]) -> object:
        for live in self._live_sockets:
            live.socket.close()
        self._live_sockets = []
        return {}

    def _leave(self, _wanted: dict[str, Any]) -> object:
        unregister_group(self._group)
        return {}

    def _socket_url(self) -> str:
        if self._mediator.ws_uri is None:
            raise RuntimeError("the mediator's DID document names no WebSocket")
        return self._mediator.ws_uri


def serve_wallets() -> None:
    """Until there is nothing more to read."""
    wallets = WalletCommands(WalletSetup(**json.loads(sys.stdin.readline())))
    commands = wallets.commands()
    _write_output_line("ready")
    for line in sys.stdin:
        wanted = json.loads(line)
        found = commands[wanted.pop("do")](wanted)
        _write_output_line(
            json.dumps(asdict(found) if is_dataclass(found) and not isinstance(found, type) else found)
        )


def _write_output_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise_file_limit()
    serve_wallets()
