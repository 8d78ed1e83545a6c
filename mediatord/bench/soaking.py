"""
Wallets of three kinds for a soak: nearly all read and acknowledge at once, some read slowly, a few never.

Whoever is shed comes back. Forwards to all of them are posted in a beat; one that is not answered in time holds up
those behind it, since the soak is about what stays, not about speed.
"""

from __future__ import annotations

import select
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import cycle
from time import perf_counter
from typing import Literal

from mediatord.bench.courier import PICKUP, Courier, ids_and_tags
from mediatord.bench.load import connect, is_complete
from mediatord.bench.rawsocket import RawSocket

Kind = Literal["prompt", "slow", "never"]

# Of those that are slow: so much once in so many seconds.
_SIP_BYTES = 2048
_SIP_SECONDS = 1.0
# Of who reads slowly or never, the kernel keeps little, so that it is up to the daemon.
_KERNEL_BYTES = 4096
_BREATH_SECONDS = 0.02


class Drinker:
    """
    A wallet and its socket in live mode, for as long as it has one.

    :ivar acknowledged: ids of messages that it has said to have received.
    :ivar shed: how often its socket was closed by the other side.
    """

    def __init__(self, courier: Courier, kind: Kind) -> None:
        self.kind = kind
        self.acknowledged: set[str] = set()
        self.shed = 0
        self._courier = courier
        self._socket = self._open()

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def drink(self) -> None:
        """
        Read what there is, or a sip of it, and acknowledge what is whole.

        :raise OSError: the socket is closed, or stuck.
        """
        for raw in self._socket.take(*([_SIP_BYTES] if self.kind == "slow" else [])):
            message = self._courier.open(raw)
            if message["type"] == f"{PICKUP}/delivery":
                ids = [id_ for id_, _ in ids_and_tags(message)]
                self._socket.send(self._courier.acknowledgement(ids))
                self.acknowledged.update(ids)

    def come_back(self) -> None:
        """After it was shed."""
        self.shed += 1
        self._socket.close()
        self._socket = self._open()

    def settle(self) -> None:
        """Until the daemon has served all that was said; what is pushed meanwhile is acknowledged as well."""
        self._socket.send(self._courier.request(f"{PICKUP}/status-request", {}))
        while True:
            for raw in self._socket.take():
                message = self._courier.open(raw)
                if message["type"] == f"{PICKUP}/status":
                    return
                ids = [id_ for id_, _ in ids_and_tags(message)]
                self._socket.send(self._courier.acknowledgement(ids))
                self.acknowledged.update(ids)
                self._socket.send(self._courier.request(f"{PICKUP}/status-request", {}))

    def close(self) -> None:
        """For good."""
        self._socket.close()

    def _open(self) -> RawSocket:
        kernel = 0 if self.kind == "prompt" else _KERNEL_BYTES
        socket = RawSocket(self._courier.mediator.ws_uri or "", kernel)
        socket.send(self._courier.request(f"{PICKUP}/live-delivery-change", {"live_delivery": True}))
        return socket


class Soaking:
    """
    A soak.

    :param requests: forwards, to be posted again and again.
    :param rate: of them, per second.
    :param sample: called once in `every` seconds.
    :ivar statuses: how often each HTTP status came.
    """

    def __init__(
        self,
        address: tuple[str, int],
        requests: Sequence[bytes],
        drinkers: Sequence[Drinker],
        rate: float,
        sample: Callable[[], None],
        every: float,
    ) -> None:
        self.statuses: Counter[str] = Counter()
        self._requests = cycle(requests)
        self._drinkers = drinkers
        self._beat = 1 / rate
        self._sample = sample
        self._every = every
        self._line = connect(*address)
        self._poll = select.epoll()
        self._by_number: dict[int, Drinker] = {}

    def run(self, seconds: float, jam: Sequence[bytes] = ()) -> None:
        """
        For so long, and then until everything is settled that can be.

        :param jam: what is posted before that, as fast as may be, so that the sockets that are not read are full.
        """
        for drinker in self._drinkers:
            self._watch(drinker)
        for request in jam:
            self._post(request)
            self._serve(0)
        self._soak(perf_counter() + seconds)
        for drinker in self._drinkers:
            if drinker.kind == "prompt":
                drinker.settle()
        self._poll.close()
        self._line.close()

    def _soak(self, end: float) -> None:
        beat = sip = sampled = perf_counter()
        while (now := perf_counter()) < end:
            self._serve()
            if now >= sip:
                sip = now + _SIP_SECONDS
                self._sip()
            if now >= sampled:
                sampled += self._every
                self._sample()
            while beat <= now:
                beat += self._beat
                self._post(next(self._requests))

    def _watch(self, drinker: Drinker) -> None:
        # That it was closed is told of in any case.
        events = select.EPOLLIN if drinker.kind == "prompt" else 0
        self._by_number[drinker.fileno()] = drinker
        self._poll.register(drinker.fileno(), events)

    def _serve(self, patience: float = _BREATH_SECONDS) -> None:
        for number, events in self._poll.poll(patience):
            drinker = self._by_number[number]
            if drinker.kind == "prompt":
                self._drink(drinker)
            elif events & (select.EPOLLHUP | select.EPOLLERR):
                self._back(drinker)

    def _sip(self) -> None:
        readable, _, _ = select.select([one for one in self._drinkers if one.kind == "slow"], [], [], 0)
        for drinker in readable:
            self._drink(drinker)

    def _drink(self, drinker: Drinker) -> None:
        try:
            drinker.drink()
        except OSError:
            self._back(drinker)

    def _back(self, drinker: Drinker) -> None:
        self._poll.unregister(drinker.fileno())
        del self._by_number[drinker.fileno()]
        drinker.come_back()
        self._watch(drinker)

    def _post(self, request: bytes) -> None:
        self._line.sendall(request)
        answer = b""
        while not is_complete(answer):
            data = self._line.recv(65_536)
            if not data:
                raise ConnectionError("the daemon closed a connection")
            answer += data
        self.statuses[answer[9:12].decode("ascii")] += 1
