"""The other nodes as those that hints are sent to, each with a queue of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from math import inf
from typing import Literal, Protocol

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger

from mediatord.cluster.calling import AT_ONCE, CallFailed, Replaced, Turned
from mediatord.cluster.hint import ENVELOPE_BYTES, HINTS_PATH, MAX_BODY, Hint, read_pushed, write_hints
from mediatord.cluster.membership import LEASE
from mediatord.faults import Rarely, without_text
from mediatord.interfaces import Node

_log = Logger()

# What may wait for one node: hints, and bytes of the messages that they are about, which are in memory meanwhile.
MAX_WAITING = 1000
MAX_WAITING_BYTES = 33_554_432
# Of one request.
BATCH = 100
BATCH_BYTES = 4_194_304
# Seconds before the second and the third attempt.
PAUSES = (0.1, 0.5)
# Nodes that seem to be gone are remembered for so many seconds, unless the store knows earlier: it may have been
# their address that led elsewhere for a moment.
GONE = LEASE
MAX_GONE = 256

Outcome = Literal["pushed", "no_session", "failed", "dropped"]


class Told(Protocol):
    """What counts the hints."""

    def cluster_push(self, outcome: Outcome) -> None:
        """A hint came to this end."""

    def hint_took(self, seconds: float) -> None:
        """A hint was answered so long after it was to be sent."""


Ask = Callable[[Node, str, bytes], Awaitable[bytes]]


@dataclass(eq=False, slots=True)
class _Waiting:
    hint: Hint
    since: float
    answered: Deferred[bool | None] = field(default_factory=Deferred)


class Peer:
    """
    One other node: hints to it wait in a queue that is bounded, and go in batches, each of them tried three times.

    A DID has hints in one batch at a time, so that what is pushed to its sockets comes in order.

    :param ask: sends a request.
    :param gone: told when the node turns out not to be there any more.
    """

    def __init__(self, clock: IReactorTime, node: Node, ask: Ask, told: Told, gone: Callable[[Node], None]) -> None:
        self._clock = clock
        self._node = node
        self._ask = ask
        self._told = told
        self._gone = gone
        self._queue: deque[_Waiting] = deque()
        self._bytes = 0
        self._under_way: set[Deferred[None]] = set()
        self._busy: set[str] = set()
        self._begin: IDelayedCall | None = None
        self._warning = Rarely(clock)
        self._lost = self._over = False

    @property
    def held(self) -> tuple[int, int]:
        """Hints that wait, and their bytes."""
        return len(self._queue), self._bytes

    def put(self, hint: Hint) -> Deferred[bool | None]:
        """Send a hint; fires with whether a socket took what it is about, None if that is not known; never fails."""
        if len(self._queue) >= MAX_WAITING or (self._queue and self._bytes + hint.weight > MAX_WAITING_BYTES):
            self._told.cluster_push("dropped")
            return succeed(None)
        waiting = _Waiting(hint, self._clock.seconds())
        self._queue.append(waiting)
        self._bytes += hint.weight
        # In the next turn: what comes in this one goes along.
        if self._begin is None and len(self._under_way) < AT_ONCE:
            self._begin = self._clock.callLater(0, self._send)
        return waiting.answered

    def end(self) -> None:
        """Give up whatever has not been answered, for good."""
        self._over = True
        if self._begin is not None:
            self._begin.cancel()
            self._begin = None
        queue, self._queue, self._bytes = self._queue, deque(), 0
        for batch in tuple(self._under_way):
            batch.cancel()
        self._settle(queue, None)

    def _send(self) -> None:
        self._begin = None
        while len(self._under_way) < AT_ONCE and (batch := self._batch()):
            lanes = {one.hint.lane for one in batch}
            self._busy |= lanes
            sent = Deferred.fromCoroutine(self._deliver(batch))
            if not sent.called:
                self._under_way.add(sent)
            sent.addErrback(lambda failure: _log.failure("sending hints failed", without_text(failure)))
            sent.addCallback(self._sent, sent, lanes)

    def _sent(self, _: object, sent: Deferred[None], lanes: set[str]) -> None:
        self._under_way.discard(sent)
        self._busy -= lanes
        if self._lost:
            self._gone(self._node)
        elif self._queue and self._begin is None:
            self._begin = self._clock.callLater(0, self._send)

    def _batch(self) -> list[_Waiting]:
        """The oldest that may go now; empty when all have to wait for others of their DIDs."""
        batch: list[_Waiting] = []
        held: list[_Waiting] = []
        size, weight = ENVELOPE_BYTES, 0
        while self._queue and len(batch) < BATCH:
            one = self._queue.popleft()
            if one.hint.lane in self._busy:
                held.append(one)
                continue
            size += one.hint.size
            weight += one.hint.weight
            if batch and (size > MAX_BODY or weight > BATCH_BYTES):
                held.append(one)
                break
            batch.append(one)
            self._bytes -= one.hint.weight
        self._queue.extendleft(reversed(held))
        return batch

    async def _deliver(self, batch: list[_Waiting]) -> None:
        pushed: Collection[tuple[str, str]] | None = None
        try:
            pushed = await self._try(write_hints(one.hint for one in batch))
        except CancelledError:
            pass
        finally:
            self._settle(batch, pushed)

    async def _try(self, body: bytes) -> Collection[tuple[str, str]] | None:
        """What was pushed; None when that is not known."""
        for pause in (*PAUSES, None):
            try:
                return read_pushed(await self._ask(self._node, HINTS_PATH, body))
            except Replaced:
                self._lost = True
                return None
            except Turned:
                self._complain("does not take us for a node: its cluster.secret_file differs, or its clock")
                return None
            except (CallFailed, ValueError):
                if pause is None or self._over:
                    break
            await deferLater(self._clock, pause, lambda: None)
        self._complain("does not answer")
        return None

    def _complain(self, why: str) -> None:
        count = 0 if self._over else self._warning.count()
        if count:
            _log.warn(
                "node {name} at {address} {why}; times since this was last said: {count}",
                name=self._node.name,
                address=self._node.address,
                why=why,
                count=count,
            )

    def _settle(self, batch: Collection[_Waiting], pushed: Collection[tuple[str, str]] | None) -> None:
        """:param pushed: None when it is not known."""
        now = self._clock.seconds()
        for one in batch:
            there = None if pushed is None else (one.hint.kind, one.hint.name) in pushed
            self._told.cluster_push("failed" if there is None else "pushed" if there else "no_session")
            if there is not None:
                self._told.hint_took(now - one.since)
            one.answered.callback(there)


class Peers:
    """
    All other nodes that there was something for.

    :param ask: as for :class:`Peer`.
    """

    def __init__(self, clock: IReactorTime, ask: Ask, told: Told) -> None:
        self._clock = clock
        self._ask = ask
        self._told = told
        self._peers: dict[str, Peer] = {}
        self._missed: set[str] = set()
        self._gone: dict[str, float] = {}
        self._over = False

    @property
    def held(self) -> tuple[int, int]:
        """Hints that wait for other nodes, and their bytes."""
        waiting = [peer.held for peer in self._peers.values()]
        return sum(entries for entries, _ in waiting), sum(size for _, size in waiting)

    def __len__(self) -> int:
        return len(self._peers)

    def put(self, node: Node, hint: Hint) -> Deferred[bool | None]:
        """As :meth:`Peer.put`; at once for a node that is known to be gone, or when this has ended."""
        if self._over or self._is_left_out(node.boot):
            self._told.cluster_push("failed")
            return succeed(None)
        peer = self._peers.get(node.boot)
        if peer is None:
            peer = self._peers[node.boot] = Peer(self._clock, node, self._ask, self._told, self._is_gone)
        return peer.put(hint)

    def keep(self, live: Collection[str]) -> None:
        """
        Forget nodes that are not among the live ones any more.

        :param live: boots, as the store said; who has joined since then may be missing once.
        """
        missing = self._peers.keys() - live
        for boot in missing & self._missed:
            self._forget(boot)
        self._missed = set(missing)
        self._gone = {boot: at for boot, at in self._gone.items() if boot in live and self._is_left_out(boot)}

    def end(self) -> None:
        """Give up everything, for good."""
        self._over = True
        for boot in tuple(self._peers):
            self._forget(boot)

    def _is_left_out(self, boot: str) -> bool:
        """For no longer than that, even if the clock is set back."""
        return 0.0 <= self._clock.seconds() - self._gone.get(boot, -inf) < GONE

    def _is_gone(self, node: Node) -> None:
        self._gone[node.boot] = self._clock.seconds()
        if len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]
        self._forget(node.boot)

    def _forget(self, boot: str) -> None:
        peer = self._peers.pop(boot, None)
        if peer is not None:
            peer.end()
