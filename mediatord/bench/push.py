"""How long a message takes to a recipient that is online."""

from __future__ import annotations

import select
import socket
from dataclasses import dataclass, field
from itertools import cycle
from time import perf_counter
from urllib.parse import urlsplit

from mediatord.bench.crowd import forwards, gather
from mediatord.bench.figures import Figures, Table, percentile, size_name
from mediatord.bench.load import is_complete, request_for
from mediatord.bench.plan import DAEMON_SETTINGS, Plan
from mediatord.bench.rawsocket import RawSocket
from mediatord.bench.sockets import go_live, open_socket
from mediatord.wallet.throwaway import throw_away_daemon

_RECIPIENTS = 64
_AT_ONCE = (1, 8)
_TIMEOUT_SECONDS = 30.0
_SILENCE_SECONDS = 0.2
_MESSAGES_PER_RECIPIENT = 4


def measure_push(plan: Plan) -> Table:
    """From the forward leaving its sender, and from its being accepted, to the push being received."""
    size = plan.sizes[0]
    rows: dict[str, Figures] = {}
    pushed = 0
    with throw_away_daemon(DAEMON_SETTINGS) as daemon:
        crowd = gather(daemon.url, _RECIPIENTS)
        target = urlsplit(crowd.mediator.http_uri)
        port, path = target.port or 80, target.path
        bodies = forwards(crowd, size, _RECIPIENTS * _MESSAGES_PER_RECIPIENT)
        requests = [request_for(port, path, body) for body in bodies]
        sockets = [open_socket(crowd) for _ in crowd.wallets]
        try:
            for one, wallet in zip(sockets, crowd.wallets, strict=True):
                go_live(one, wallet, crowd)
            for at_once in _AT_ONCE:
                lanes = lanes_to(port, requests, sockets, at_once)
                exchange = Exchange(lanes, plan.seconds * plan.rounds / len(_AT_ONCE))
                exchange.run()
                rows[f"{size_name(size)}  {at_once} at once"] = exchange.figures()
                pushed += exchange.count
            expect_silence(sockets)
        finally:
            for one in sockets:
                one.close()
    columns = ("msg/s", "sent-202 p50", "sent-push p50", "sent-push p99", "202-push p50", "202-push p99")
    note = (
        f"Milliseconds. {pushed} forwards to {_RECIPIENTS} wallets in live mode, each pushed exactly once; "
        "below zero the push was there before the sender had its 202."
    )
    return Table("Live push", columns, rows, notes=(note,))


def expect_silence(sockets: list[RawSocket]) -> None:
    """Every push has been taken; another one would be a second copy."""
    readable, _, _ = select.select(sockets, [], [], _SILENCE_SECONDS)
    if any(one.take() for one in readable):
        raise RuntimeError("a message was pushed twice")


@dataclass(slots=True)
class Lane:
    """
    One sender with recipients of its own, so that the next push on a recipient's socket is the answer to its forward.

    :param turns: pairs of request and the socket that its message comes out of, for ever.
    """

    connection: socket.socket
    turns: cycle[tuple[bytes, RawSocket]]
    waiting_for: RawSocket | None = None
    sent: float = 0.0
    accepted: float = 0.0
    pushed: float = 0.0
    partial: bytes = field(default=b"", repr=False)


def lanes_to(port: int, requests: list[bytes], sockets: list[RawSocket], at_once: int) -> list[Lane]:
    """
    So many senders, who share the recipients out among themselves.

    :param requests: forwards to the wallets behind `sockets` in turn.
    """
    turns = [(request, sockets[number % len(sockets)]) for number, request in enumerate(requests)]
    lanes = []
    for number in range(at_once):
        connection = socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = [turn for place, turn in enumerate(turns) if place % len(sockets) % at_once == number]
        lanes.append(Lane(connection, cycle(mine)))
    return lanes


class Exchange:
    """Sends on every lane as soon as the forward before was both accepted and pushed."""

    def __init__(self, lanes: list[Lane], seconds: float) -> None:
        self._lanes = lanes
        self._seconds = seconds
        self._by_number: dict[int, Lane] = {}
        self._took = 0.0
        self._times: list[tuple[float, float]] = []

    @property
    def count(self) -> int:
        """How many messages came out."""
        return len(self._times)

    def run(self) -> None:
        """Until the time is up and every message has come."""
        start = perf_counter()
        with select.epoll() as epoll:
            for lane in self._lanes:
                epoll.register(lane.connection.fileno(), select.EPOLLIN)
                self._by_number[lane.connection.fileno()] = lane
                self._send(lane, epoll)
            while any(lane.waiting_for for lane in self._lanes):
                events = epoll.poll(_TIMEOUT_SECONDS)
                if not events:
                    raise TimeoutError("a message was not pushed")
                now = perf_counter()
                for number, _ in events:
                    self._take(self._by_number[number], number, now)
                for lane in self._lanes:
                    if lane.waiting_for and lane.accepted and lane.pushed:
                        self._finish(lane, epoll, more=now - start < self._seconds)
        self._took = perf_counter() - start
        for lane in self._lanes:
            lane.connection.close()

    def figures(self) -> Figures:
        """Latencies in milliseconds."""
        accepted = [accepted * 1000 for accepted, _ in self._times]
        pushed = [pushed * 1000 for _, pushed in self._times]
        after = [pushed - accepted for accepted, pushed in zip(accepted, pushed, strict=True)]
        return {
            "msg/s": len(self._times) / self._took,
            "sent-202 p50": percentile(accepted, 0.5),
            "sent-push p50": percentile(pushed, 0.5),
            "sent-push p99": percentile(pushed, 0.99),
            "202-push p50": percentile(after, 0.5),
            "202-push p99": percentile(after, 0.99),
        }

    def _send(self, lane: Lane, epoll: select.epoll) -> None:
        request, recipient = next(lane.turns)
        lane.waiting_for, lane.accepted, lane.pushed, lane.partial = recipient, 0.0, 0.0, b""
        self._by_number[recipient.fileno()] = lane
        epoll.register(recipient.fileno(), select.EPOLLIN)
        lane.sent = perf_counter()
        lane.connection.sendall(request)

    def _take(self, lane: Lane, number: int, now: float) -> None:
        if number == lane.connection.fileno():
            lane.partial += lane.connection.recv(65536)
            if is_complete(lane.partial):
                if not lane.partial.startswith(b"HTTP/1.1 202"):
                    raise RuntimeError("a forward was refused")
                lane.accepted = now
        elif lane.waiting_for is not None and (messages := lane.waiting_for.take()):
            if lane.pushed or len(messages) > 1:
                raise RuntimeError("a message was pushed twice")
            lane.pushed = now

    def _finish(self, lane: Lane, epoll: select.epoll, *, more: bool) -> None:
        self._times.append((lane.accepted - lane.sent, lane.pushed - lane.sent))
        assert lane.waiting_for is not None
        epoll.unregister(lane.waiting_for.fileno())
        lane.waiting_for = None
        if more:
            self._send(lane, epoll)
