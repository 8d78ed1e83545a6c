"""
Wallets that come back and fetch what waits for them, over HTTP: delivery-request, messages-received, until nothing is
left (Pickup 3.0).

Run by the process that holds the wallets (:mod:`mediatord.bench.wallets`).
"""

from __future__ import annotations

import select
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter, process_time
from typing import Any

from mediatord.bench.courier import PICKUP, Courier, ids_and_tags
from mediatord.bench.load import Line, connect, is_complete, request_for, silence
from mediatord.wallet.packing import Unreadable

_READ_BYTES = 1 << 18
_TIMEOUT_SECONDS = 30.0

Errand = Generator[bytes, bytes, None]


@dataclass(slots=True)
class Drained:
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


class Draining:
    """
    Everything that waits for some wallets, fetched on several connections at once.

    :param address: host, port and path of the mediator.
    :param limit: messages in one delivery at most.
    """

    def __init__(
        self, address: tuple[str, int, str], couriers: Iterable[Courier], connections: int, limit: int
    ) -> None:
        self._host, self._port, self._path = address
        self._couriers = iter(couriers)
        self._connections = connections
        self._limit = limit
        self.found = Drained()

    def run(self) -> Drained:
        """
        Until nothing waits any more.

        :raise Unreadable: an answer that is neither a delivery nor a status.
        """
        lines = [Line(connect(self._host, self._port)) for _ in range(self._connections)]
        start, start_cpu = perf_counter(), process_time()
        try:
            self._exchange(lines)
        finally:
            for line in lines:
                line.close()
        self.found.seconds, self.found.cpu_seconds = perf_counter() - start, process_time() - start_cpu
        return self.found

    def _exchange(self, lines: list[Line]) -> None:
        errands: dict[int, tuple[Line, Errand]] = {}
        with select.epoll() as epoll:
            for line in lines:
                errand = self._errands(self._couriers)
                if (request := next(errand, None)) is not None:
                    epoll.register(line.fileno(), select.EPOLLIN)
                    errands[line.fileno()] = line, errand
                    self._send(line, request)
            while errands:
                for number, _ in epoll.poll(_TIMEOUT_SECONDS) or silence():
                    if not self._take(*errands[number]):
                        del errands[number]

    def _take(self, line: Line, errand: Errand) -> bool:
        """Read what came on a connection; whether there is more to be said on it."""
        data = line.receive(_READ_BYTES)
        if not data:
            raise ConnectionError("the server closed a connection")
        line.partial += data
        if not is_complete(line.partial):
            return True
        self.found.latencies_us.append(int((perf_counter() - line.begun) * 1e6))
        response, line.partial = line.partial, b""
        if response[9:12] != b"200":
            raise Unreadable(f"the mediator answered {response[9:12].decode('ascii', 'replace')} to a request")
        try:
            request = errand.send(response.partition(b"\r\n\r\n")[2])
        except StopIteration:
            return False
        self._send(line, request)
        return True

    def _send(self, line: Line, packed: bytes) -> None:
        self.found.requests += 1
        line.begun = perf_counter()
        line.send(request_for(self._port, self._path, packed, host=self._host))

    def _errands(self, couriers: Iterator[Courier]) -> Errand:
        """What is asked for on one connection, for one wallet after the other."""
        for courier in couriers:
            left = 1
            while left:
                asked = courier.request(f"{PICKUP}/delivery-request", {"limit": self._limit})
                answer = courier.open((yield asked))
                if answer["type"] != f"{PICKUP}/delivery":
                    _expect_status(answer)
                    break
                ids = [id_ for id_, _ in ids_and_tags(answer)]
                status = courier.open((yield courier.acknowledgement(ids, route="all")))
                _expect_status(status)
                self.found.messages += len(ids)
                left = status["body"]["message_count"]


def _expect_status(answer: Mapping[str, Any]) -> None:
    if answer["type"] != f"{PICKUP}/status":
        raise Unreadable(f"the mediator answered with a {answer['type']}")
