"""What a node does every few seconds so that nothing is left lying: catching up, and ending nodes that are gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred, gatherResults
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall, deferLater
from twisted.logger import Logger

from mediatord.cluster.inbox import Half
from mediatord.cluster.sealing import WINDOW as MAX_TIMESTAMP_SKEW
from mediatord.errors import StoreUnavailable
from mediatord.faults import Rarely, without_text
from mediatord.interfaces import IClusterStore, Window

_log = Logger()

CATCH_UP = 15.0
SWEEP = 2.0
# DIDs, and messages, of one question to the store; messages that are told of in one go.
CHUNK = 500
_BREATH = 0.01
# Seconds: what is younger may just be on its way.
YOUNG = 3.0
# Seconds that a message is in the store later, at most, than its time says here: that is from another clock, and from
# before it was written.
COMMIT = 2.5
LATE = MAX_TIMESTAMP_SKEW + COMMIT
# Seconds that a round looks back, to before the last but one; the last is for rounds that begin late.
WINDOW = LATE + 2 * CATCH_UP + 5.0


class CatchUp:
    """
    Finds what arrived for DIDs that sockets are here for and that no hint came for.

    Whatever others have pushed: a socket of theirs may be dead. What the recipient has got by pickup is left out for
    a while, and so is what waited when the socket subscribed.

    :param forget_backlogs: told that no round will look for what waited before a time.
    """

    def __init__(
        self,
        clock: IReactorTime,
        halves: Iterable[Half[Any]],
        forget_backlogs: Callable[[float], None] = lambda before: None,
    ) -> None:
        self._clock = clock
        self._halves = tuple(halves)
        self._forget_backlogs = forget_backlogs
        # When the last two that were complete began: by the later one the clock may have been wrong, which is noticed
        # before there is another.
        self._rounds: deque[float] = deque(maxlen=2)

    async def round(self) -> None:
        """
        Push what has arrived since the last round but one that was complete, and a little before it.

        :raise StoreUnavailable: the next round looks further back.
        """
        now = self._clock.seconds()
        since = min([now - WINDOW, *(began - LATE for began in self._rounds)])
        window = Window(since, now - YOUNG)
        for half in self._halves:
            dids = half.live()
            for start in range(0, len(dids), CHUNK):
                await self._catch_up(half, dids[start : start + CHUNK], window)
        self._rounds.append(now)
        self._forget_backlogs(since - LATE)

    async def _catch_up(self, half: Half[Any], dids: Sequence[str], window: Window) -> None:
        while arrived := await half.arrived(dids, window, CHUNK):
            await half.catch_up(arrived)
            if len(arrived) < CHUNK:
                return
            window = window.behind(arrived[-1])


class Sweep:
    """
    Ends the nodes whose lease is over: what they had pushed and nobody has acknowledged is pending again.

    Of very many, some are told at a time with breaths between them, as each may take a line of the event log.

    :param boot: ours.
    :param mine: whether it is this node's turn.
    :param fell_back: told of so many messages that they are pending again.
    :param name_of: that of a boot, for the operator.
    """

    def __init__(
        self,
        clock: IReactorTime,
        store: IClusterStore,
        boot: str,
        mine: Callable[[], Awaitable[bool]],
        fell_back: Callable[[int], None],
        name_of: Callable[[str], str],
    ) -> None:
        self._clock = clock
        self._store = store
        self._boot = boot
        self._mine = mine
        self._fell_back = fell_back
        self._name_of = name_of

    async def round(self) -> None:
        """:raise StoreUnavailable: somebody does it later."""
        if not await self._mine():
            return
        for boot in await self._store.lapsed():
            # Our own lease is for us to take up again.
            if boot != self._boot:
                count = await self._store.drop(boot)
                _log.info(
                    "node {name} (boot {boot}) is gone; {count} messages wait again",
                    name=self._name_of(boot),
                    boot=boot,
                    count=count,
                )
                await self._tell(count)

    async def _tell(self, count: int) -> None:
        for told in range(0, count, CHUNK):
            if told:
                await deferLater(self._clock, _BREATH, lambda: None)
            self._fell_back(min(CHUNK, count - told))


class Rounds(Service):
    """
    Does all that at its time, while this node is a member.

    :param works: what is to be done, and every how many seconds.
    """

    name = "cluster rounds"

    def __init__(
        self,
        clock: IReactorTime,
        is_member: Callable[[], bool],
        works: Iterable[tuple[Callable[[], Awaitable[None]], float]],
    ) -> None:
        self._clock = clock
        self._is_member = is_member
        self._works = tuple(works)
        self._warning = Rarely(clock)
        self._loops: list[tuple[LoopingCall, Deferred[LoopingCall]]] = []

    def startService(self) -> None:
        """Begin; the first round of each after its interval."""
        super().startService()
        for work, interval in self._works:
            loop = LoopingCall(self._once, work)
            loop.clock = self._clock
            self._loops.append((loop, loop.start(interval, now=False)))

    def stopService(self) -> Deferred[list[LoopingCall]]:
        """End; fires when those that are under way are over."""
        super().stopService()
        loops, self._loops = self._loops, []
        for loop, _ in loops:
            if loop.running:
                loop.stop()
        return gatherResults([stopped for _, stopped in loops])

    def _once(self, work: Callable[[], Awaitable[None]]) -> Deferred[None]:
        return Deferred.fromCoroutine(self._patiently(work))

    async def _patiently(self, work: Callable[[], Awaitable[None]]) -> None:
        if not self._is_member():
            return
        try:
            await work()
        except StoreUnavailable:
            if self._warning.count():
                _log.warn("the store was not available for a round of the cluster")
        except CancelledError:
            pass
        except Exception:
            _log.failure("a round of the cluster failed", without_text())
