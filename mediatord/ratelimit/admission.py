"""
Admission of requests of both protocols: only while the daemon runs, within a memory budget and a deadline. Each is
recorded, and what goes wrong becomes a refusal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from twisted.application.service import Service
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.errors import InternalFault, MediatorError, RateLimitExceeded, ShutdownInProgress
from mediatord.observability.event_recorder import EventRecorder, ProtocolName, RequestRecord
from mediatord.protocol.probe_markers import PROBE_CLIENT
from mediatord.runtime.failure_logging import redact_failure
from mediatord.runtime.memory_reclaimer import release_traceback
from mediatord.runtime.request_time import request_deadline

_log = Logger()

T = TypeVar("T")

MAX_MEMORY_PER_ADDRESS = 67_108_864
MAX_MEMORY_TOTAL = 268_435_456
# Memory of a request: its bytes encrypted and decrypted, and a bounded JSON tree. One byte of JSON made of the
# smallest objects takes about 46 bytes.
_COPIES_OF_REQUEST = 4
_MAX_TREE_BYTES = 12_000_000
_MAX_BYTES_PER_BYTE = 50
# Seconds that a request waits for memory; it would miss its deadline after that.
MEMORY_WAIT_SECONDS = 10.0


def estimate_request_memory(size: int) -> int:
    """Upper bound of the memory that a request of `size` bytes needs until it is answered."""
    return min(_MAX_BYTES_PER_BYTE * size, _COPIES_OF_REQUEST * size + _MAX_TREE_BYTES)


class RequestMemoryBudget:
    """
    Limits the memory of requests in progress, per address and in total; it does not count the daemon's own probes.

    Requests are parsed before the store is asked, and a JSON tree takes many times the size of its text, so slow
    storage would let trees of many connections pile up. An address without other requests is always admitted.
    """

    def __init__(
        self,
        clock: IReactorTime,
        max_bytes_per_address: int = MAX_MEMORY_PER_ADDRESS,
        max_bytes_total: int = MAX_MEMORY_TOTAL,
    ) -> None:
        self._clock = clock
        self._max_bytes_per_address = max_bytes_per_address
        self._max_bytes_total = max_bytes_total
        self._taken: dict[str, int] = {}
        self._requests = 0
        self._total = 0
        self._waiting: dict[str, deque[tuple[int, Deferred[None]]]] = {}

    @property
    def held(self) -> tuple[int, int]:
        """Number of requests, and the bytes reserved for them."""
        return self._requests, self._total

    def try_acquire(self, peer: str, amount: int, *, is_waiting: bool = False) -> bool:
        """
        Reserve memory for a request if available; pair with :meth:`release`.

        :param is_waiting: whether it is the first that waits, and not one that has just come.
        """
        if peer == PROBE_CLIENT:
            return True
        if peer in self._waiting and not is_waiting:
            return False
        taken = self._taken.get(peer, 0)
        if taken and (taken + amount > self._max_bytes_per_address or self._total + amount > self._max_bytes_total):
            return False
        self._taken[peer] = taken + amount
        self._total += amount
        self._requests += 1
        return True

    async def acquire(self, peer: str, amount: int) -> None:
        """
        Wait for memory; pair with :meth:`release`.

        :raise RateLimitExceeded: it takes too long.
        """
        turn: Deferred[None] = Deferred()
        place = (amount, turn)
        self._waiting.setdefault(peer, deque()).append(place)
        timer = self._clock.callLater(MEMORY_WAIT_SECONDS, self._give_up, peer, place)
        try:
            await turn
        finally:
            if timer.active():
                timer.cancel()

    def _give_up(self, peer: str, place: tuple[int, Deferred[None]]) -> None:
        waiting = self._waiting.get(peer, deque())
        if place not in waiting:  # admitted already
            return
        waiting.remove(place)
        if not waiting:
            del self._waiting[peer]
        place[1].errback(RateLimitExceeded(retry_after=5))

    def release(self, peer: str, amount: int) -> None:
        """Return the memory of a request."""
        if peer == PROBE_CLIENT:
            return
        left = self._taken[peer] - amount
        if left:
            self._taken[peer] = left
        else:
            del self._taken[peer]
        self._total -= amount
        self._requests -= 1
        for other in list(self._waiting):
            self._admit(other)

    def _admit(self, peer: str) -> None:
        """Start the waiting requests of an address for which memory is available."""
        while waiting := self._waiting.get(peer):
            amount, turn = waiting[0]
            if not self.try_acquire(peer, amount, is_waiting=True):
                return
            waiting.popleft()
            if not waiting:
                del self._waiting[peer]
            # Called later, so that the releasing request is not delayed by others.
            self._clock.callLater(0, turn.callback, None)


class RequestGate(Service):
    """Service that admits requests while it runs, and stops once they are finished."""

    name = "gate"

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._in_flight = 0
        self._open = False
        self._waiting: list[Deferred[None]] | None = None
        self._drained: Deferred[None] | None = None

    def hold(self) -> None:
        """Make new requests wait, while it is unknown whether this process may use the store."""
        if self._waiting is None:
            self._waiting = []

    def release(self) -> None:
        """Start the waiting requests."""
        waiting, self._waiting = self._waiting or [], None
        for one in waiting:
            one.callback(None)

    @property
    def is_open(self) -> bool:
        """Whether new requests are admitted."""
        return self._open

    async def run_request(self, work: Callable[[], Awaitable[T]]) -> T:
        """
        Run `work` as a request in flight.

        :raise ShutdownInProgress: the daemon is stopping; `work` was not started.
        """
        if not self.enter():
            await self.wait()
        try:
            with request_deadline(self._clock):
                return await work()
        finally:
            self.leave()

    async def wait(self) -> None:
        """
        Enter as soon as that is possible; to be followed by :meth:`leave`.

        :raise ShutdownInProgress: the daemon is stopping.
        """
        if self._open and self._waiting is not None:
            released: Deferred[None] = Deferred()
            self._waiting.append(released)
            await released
        if not self._open:
            raise ShutdownInProgress
        self._in_flight += 1

    def enter(self) -> bool:
        """Admit a request if it can start immediately; pair with :meth:`leave`."""
        if not self._open or self._waiting is not None:
            return False
        self._in_flight += 1
        return True

    def leave(self) -> None:
        """Mark a request as finished."""
        self._in_flight -= 1
        if self._drained is not None and self._in_flight == 0:
            emptied, self._drained = self._drained, None
            emptied.callback(None)

    def startService(self) -> None:
        """Open the gate."""
        super().startService()
        self._open = True

    def stopService(self) -> Deferred[None]:
        """Close the gate; fires when all requests are finished."""
        super().stopService()
        self._open = False
        self.release()
        if self._in_flight == 0:
            return succeed(None)
        self._drained = Deferred()
        return self._drained


@dataclass(frozen=True, slots=True)
class RequestReply:
    """
    The reply to a request of either protocol.

    :param status: for HTTP; a socket sends the body as a frame, or nothing if it is empty.
    :param retry_after: seconds.
    :param fault: class of the error for which the request was refused, if it was; an instance would keep the whole
        request alive by its traceback.
    :param code: sent to the peer, if it is not the code of `fault` in the protocol's table.
    """

    status: int
    body: bytes = field(default=b"", repr=False)
    media_type: str = "application/json"
    retry_after: int | None = None
    fault: type[MediatorError] | None = None
    code: str | None = None


class RequestAdmission:
    """
    Runs requests in flight.

    :ivar memory: budget of requests in progress.
    """

    def __init__(self, clock: IReactorTime, gate: RequestGate, recorder: EventRecorder) -> None:
        self._clock = clock
        self._gate = gate
        self._recorder = recorder
        self.memory = RequestMemoryBudget(clock)

    async def serve(
        self,
        protocol: ProtocolName,
        peer: str,
        size: int,
        work: Callable[[RequestRecord], Awaitable[RequestReply]],
        refuse: Callable[[MediatorError], RequestReply],
        session: str | None = None,
    ) -> RequestReply:
        """
        The reply that `work` returns, or that `refuse` makes of the error that it raises.

        :param peer: rate limit key.
        :param size: in bytes; a request without a body needs no memory.
        :param session: name of the socket that it came on.
        :raise ShutdownInProgress: the daemon is stopping.
        """
        if not self._gate.enter():
            try:
                await self._gate.wait()
            except ShutdownInProgress as error:
                self._recorder.record_early_rejection(protocol, peer, size, error)
                raise
        try:
            with request_deadline(self._clock):
                record = self._recorder.begin_request(protocol, peer, size)
                record.session = session
                memory = estimate_request_memory(size)
                has_memory = not memory or self.memory.try_acquire(peer, memory)
                try:
                    if not has_memory:
                        await self.memory.acquire(peer, memory)
                        has_memory = True
                    reply = await work(record)
                except MediatorError as error:
                    release_traceback(error)
                    reply = refuse(error)
                except Exception as error:
                    _log.failure("serving a request failed", redact_failure())
                    release_traceback(error)
                    reply = refuse(InternalFault())
                finally:
                    if memory and has_memory:
                        self.memory.release(peer, memory)
                self._recorder.end_request(record, status=reply.status, fault=reply.fault, code=reply.code)
                return reply
        finally:
            self._gate.leave()
