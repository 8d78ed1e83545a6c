"""
Those who do not behave, as a process of its own that makes way for all others.

It speaks by lines. The first one it reads, a :class:`Setup` as JSON, has it make ready what it floods with; then it
says `ready`. Each further line, `{"do": "address", "seconds": 10, "rate": 600}`, is one flood, and is answered with
what was sent and what came back: `address` posts forwards from one address, `did` forwards of one DID from many,
`fresh` forwards of which each is of another DID, from a few; `loris` begins requests and drips them, `deaf` opens
sockets, asks and does not read.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from itertools import cycle
from time import perf_counter, sleep
from typing import Any
from urllib.parse import urlsplit

from mediatord.bench.crowd import Crowd, gather, inner_envelope
from mediatord.bench.load import Answers, Line, connect, loopback, request_for
from mediatord.bench.processes import allow_many_files
from mediatord.bench.rawsocket import TEXT, RawSocket, frame
from mediatord.protocol import jsontext
from mediatord.wallet.identity import Identity
from mediatord.wallet.packing import authcrypt, forward

# Far from the addresses of those who behave.
_FIRST_ADDRESS = 200_000
_MANY, _FEW = 300, 16
_SLOW, _DEAF = 4096, 512
_TICK_SECONDS = 0.005
_MAILBOXES = 4
_BEGUN = b"POST /didcomm HTTP/1.1\r\nHost: a\r\nContent-Length: 10000\r\n\r\n{"
_KERNEL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Setup:
    """
    :param fresh: DIDs that send one forward each.
    :param of_one: forwards of one DID.
    :param size: of the plaintext in an inner envelope, in bytes.
    """

    url: str
    fresh: int
    of_one: int
    size: int


class Floods:
    """All that one process can do."""

    def __init__(self, setup: Setup) -> None:
        crowd = gather(setup.url, _MAILBOXES, short=True)
        target = urlsplit(crowd.mediator.http_uri)
        self._address = (target.hostname or "", target.port or 80)
        self._path = target.path or "/"
        self._url = crowd.mediator.ws_uri or ""
        sender = Identity.fresh()
        self._of_one = self._requests(crowd, [sender] * setup.of_one, setup.size)
        self._of_many = self._requests(crowd, (Identity.fresh() for _ in range(setup.fresh)), setup.size)

    def run(self, do: str, seconds: float, rate: float) -> dict[str, Any]:
        """One flood."""
        if do == "loris":
            return self._drip(seconds, rate)
        if do == "deaf":
            return self._ask_and_not_read(seconds, rate)
        addresses = {"address": 1, "did": _MANY, "fresh": _FEW}[do]
        requests = self._of_many if do == "fresh" else self._of_one
        lines = deque(
            Line(connect(*self._address, loopback(_FIRST_ADDRESS + number % addresses)))
            for number in range(max(addresses, 4 * _FEW))
        )
        try:
            return _post(lines, requests, seconds, rate)
        finally:
            for line in lines:
                line.close()

    def _requests(self, crowd: Crowd, senders: Any, size: int) -> Iterator[bytes]:
        """Forwards for ever, each of the next sender to the next mailbox."""
        mediator, made = crowd.hop, []
        letters = cycle([(wallet.did, inner_envelope(wallet, size)) for wallet in crowd.wallets])
        for sender in senders:
            next_, letter = next(letters)
            message = forward(next_, [letter], to=[mediator.did]) | {"from": sender.did}
            packed = authcrypt(message, sender, mediator.document)
            made.append(request_for(self._address[1], self._path, packed, host=self._address[0]))
        return cycle(made)

    def _drip(self, seconds: float, rate: float) -> dict[str, Any]:
        """Begin requests until there are thousands, and go on with each of them by a byte."""
        open_ones: deque[socket.socket] = deque()
        cut_off = 0
        try:
            for due in _beats(seconds, rate):
                for _ in range(due):
                    if len(open_ones) < _SLOW:
                        open_ones.append(self._begun(len(open_ones)))
                        continue
                    one = open_ones.popleft()
                    try:
                        one.send(b" ")
                        open_ones.append(one)
                    except OSError:
                        cut_off += 1
                        one.close()
            return {"sent": int(seconds * rate), "statuses": {}, "kept": len(open_ones), "cut_off": cut_off}
        finally:
            for one in open_ones:
                one.close()

    def _begun(self, number: int) -> socket.socket:
        connection = connect(*self._address, loopback(_FIRST_ADDRESS + number % _FEW))
        connection.setblocking(False)
        with suppress(OSError):
            connection.send(_BEGUN)
        return connection

    def _ask_and_not_read(self, seconds: float, rate: float) -> dict[str, Any]:
        """On sockets that all are open before the time begins."""
        question = frame(jsontext.dumps({"id": "1", "type": "nothing"}), TEXT)
        sent = stuck = 0
        with ExitStack() as stack:
            sockets = deque(self._deaf(number, stack) for number in range(_DEAF))
            for due in _beats(seconds, rate):
                for _ in range(due):
                    sockets.rotate()
                    try:
                        sent += bool(sockets[0].send(question))
                    except OSError:  # full, or cut off
                        stuck += 1
        return {"sent": sent, "statuses": {}, "stuck": stuck}

    def _deaf(self, number: int, stack: ExitStack) -> socket.socket:
        raw = RawSocket(self._url, _KERNEL_BYTES, loopback(_FIRST_ADDRESS + number % _FEW))
        connection = stack.enter_context(closing(socket.socket(fileno=os.dup(raw.fileno()))))
        raw.close()
        connection.setblocking(False)
        return connection


def _beats(seconds: float, rate: float) -> Iterator[int]:
    """Every few milliseconds, how much is due; what was missed is made up for."""
    start, done = perf_counter(), 0
    while (passed := perf_counter() - start) < seconds:
        due = int(passed * rate) - done
        done += due
        yield due
        sleep(_TICK_SECONDS)


def _post(lines: deque[Line], requests: Iterator[bytes], seconds: float, rate: float) -> dict[str, Any]:
    """As many as are due, on connections that take turns."""
    answers, by_number, idle, sent = Answers(), {line.fileno(): line for line in lines}, deque(lines), 0
    with select.epoll() as epoll:
        for number in by_number:
            epoll.register(number, select.EPOLLIN)
        for due in _beats(seconds, rate):
            for _ in range(min(due, len(idle))):
                idle.popleft().send(next(requests))
                sent += 1
            idle.extend(by_number[number] for number, _ in epoll.poll(0) if answers.take(by_number[number]))
    return {"sent": sent, "statuses": answers.by_name()}


def serve() -> None:
    """Until there is nothing more to read."""
    floods = Floods(Setup(**json.loads(sys.stdin.readline())))
    _say("ready")
    for line in sys.stdin:
        _say(json.dumps(floods.run(**json.loads(line))))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    os.nice(10)
    allow_many_files()
    serve()
