"""What happens by itself: delayed messages come due, old ones go, late pushes are queued again, gauges told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred, gatherResults
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import LoopingCall, deferLater
from twisted.logger import Logger

from mediatord.didcomm.account_expiry import AccountExpiry
from mediatord.didcomm.live import Live
from mediatord.errors import StoreUnavailable
from mediatord.faults import Rarely, without_text
from mediatord.interfaces import IStore, StoredMessage
from mediatord.journal import Journal
from mediatord.turns import Turn

_log = Logger()

CHUNK = 100
RETRY = 1.0
# A timer keeps the time that it has left when the clock is set, and what is due then may not wait for that.
LONGEST_WAIT = 60.0


@dataclass(frozen=True, slots=True)
class Rounds:
    """Seconds between two rounds of each kind."""

    pushes: float = 1.0
    expiry: float = 15.0
    nonces: float = 600.0
    gauge: float = 60.0
    accounts: float = 3_600.0
    left_behind: float = 5.0


class _Loops:
    """Rounds that come again and again, whatever becomes of one of them."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._loops: list[tuple[LoopingCall, Deferred[LoopingCall]]] = []

    def begin(self, interval: float, work: Callable[[], Awaitable[None]], what: str) -> None:
        """The first one comes after an interval, in seconds; no other one while one is under way."""
        warning = Rarely(self._clock)
        loop = LoopingCall(lambda: Deferred.fromCoroutine(_patiently(work(), what, warning)))
        loop.clock = self._clock
        self._loops.append((loop, loop.start(interval, now=False)))

    def end(self) -> Deferred[list[LoopingCall]]:
        """No more of them; fires when those that are under way are over."""
        over = []
        for loop, stopped in self._loops:
            if loop.running:
                loop.stop()
            over.append(stopped)
        self._loops = []
        return gatherResults(over)


class DueTimes(Service):
    """
    Wakes up when the next delayed message becomes visible, and hands it over (reference 4.5).

    It keeps one timer and asks the store for everything else, once a minute at least while any wait, so that there
    can be any number of them. Of several nodes, one also looks every few seconds for what came due on a node that is
    gone.

    :param turn: whose it is to look; None when there is one node.
    """

    name = "due times"

    def __init__(
        self,
        clock: IReactorTime,
        store: IStore,
        hand_over: Callable[[StoredMessage], None],
        turn: Turn | None = None,
    ) -> None:
        self._clock = clock
        self._store = store
        self._hand_over = hand_over
        self._timer: IDelayedCall | None = None
        self._round: Deferred[None] | None = None
        self._turn = turn
        self._looks = _Loops(clock)
        self._warning = Rarely(clock)

    def startService(self) -> None:
        """Find out when the first one is due."""
        super().startService()
        self._run(self._begin())
        if self._turn is not None:
            self._looks.begin(Rounds().left_behind, self._look, "a look for delayed messages")

    def stopService(self) -> Deferred[None]:
        """Stop waiting; fires when what is under way is over."""
        super().stopService()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return Deferred.fromCoroutine(self._end(self._round))

    async def _end(self, under_way: Deferred[None] | None) -> None:
        await self._looks.end()
        if under_way is not None:
            await under_way

    async def _look(self) -> None:
        if self._turn is not None and await self._turn.is_mine() and self.running and self._round is None:
            self._run(self._deliver())

    def wait_for(self, due_at: float) -> None:
        """A message was stored that becomes visible then."""
        if not self.running:
            return
        now = self._clock.seconds()
        left = min(max(0.0, due_at - now), LONGEST_WAIT)
        if self._timer is not None:
            if self._timer.getTime() <= now + left:
                return
            self._timer.cancel()
        self._timer = self._clock.callLater(left, self._due)

    def _due(self) -> None:
        self._timer = None
        if self._round is None:
            self._run(self._deliver())
        else:
            self.wait_for(self._clock.seconds() + RETRY)

    def _run(self, work: Awaitable[None]) -> None:
        self._round = Deferred.fromCoroutine(_patiently(work, "delayed messages", self._warning))
        if not self._round.called:
            self._round.addBoth(lambda _: setattr(self, "_round", None))
        else:
            self._round = None

    async def _deliver(self) -> None:
        try:
            while due := await self._store.take_due(CHUNK):
                for message in due:
                    # It was counted as queued when it came.
                    self._hand_over(message)
        except Exception:
            # Whatever it was: not at once again, and not never.
            self.wait_for(self._clock.seconds() + RETRY)
            raise
        await self._arm()

    async def _begin(self) -> None:
        try:
            await self._arm()
        except StoreUnavailable:
            pass  # it is still being opened, as at every start; the next look is arranged

    async def _arm(self) -> None:
        try:
            first = await self._store.next_due()
        except Exception:
            self.wait_for(self._clock.seconds() + RETRY)
            raise
        if first is not None:
            self.wait_for(first)


class Housekeeping(Service):
    """
    Pushes, expiry, nonces, gauges. A round that fails is logged, and the next one comes all the same.

    :param turn: whose it is to rid the store of what is old; None when there is one node.
    :param accounts: removes accounts that nobody uses.
    """

    name = "housekeeping"

    def __init__(
        self,
        clock: IReactorTime,
        store: IStore,
        live: Live,
        journal: Journal,
        gauge: Callable[[], Awaitable[None]],
        turn: Turn | None = None,
        accounts: AccountExpiry | None = None,
    ) -> None:
        self._clock = clock
        self._store = store
        self._live = live
        self._accounts = accounts
        self._journal = journal
        self._gauge = gauge
        self._turn = turn
        self._rounds = _Loops(clock)

    def startService(self) -> None:
        """Begin the rounds; the first of each after its interval."""
        super().startService()
        rounds = Rounds()
        for work, interval in (
            (self._late_pushes, rounds.pushes),
            (self._expire, rounds.expiry),
            (self._prune, rounds.nonces),
            (self._measure, rounds.gauge),
            (self._expire_accounts, rounds.accounts),
        ):
            self._rounds.begin(interval, work, "a round of housekeeping")

    def stopService(self) -> Deferred[list[LoopingCall]]:
        """End the rounds; fires when those that are under way are over."""
        super().stopService()
        return self._rounds.end()

    async def _is_ours(self) -> bool:
        return self._turn is None or await self._turn.is_mine()

    async def _late_pushes(self) -> None:
        self._live.overdue()

    async def _expire(self) -> None:
        # In small steps with breaths between them: neither reactor nor writer is held up by a mass expiry.
        while self.running and await self._is_ours():
            removed = await self._store.expire(CHUNK)
            for one in removed:
                self._journal.expired(one)
            self._live.settle(one.id for one in removed)
            if len(removed) < CHUNK:
                break
            await deferLater(self._clock, 0.01, lambda: None)

    async def _expire_accounts(self) -> None:
        if self._accounts is not None:
            await self._accounts.touch_live()
            while self.running and await self._is_ours() and await self._accounts.expire():
                await deferLater(self._clock, 0.01, lambda: None)

    async def _prune(self) -> None:
        if await self._is_ours():
            await self._store.prune()

    async def _measure(self) -> None:
        await self._gauge()


async def _patiently(work: Awaitable[None], what: str, warning: Rarely) -> None:
    """Do `work`; no failure of it may end the loop it is part of. That the store is away is said now and then."""
    try:
        await work
    except StoreUnavailable:
        if warning.count():
            _log.warn("the store was not available for {what}", what=what)
    except CancelledError:
        pass
    except Exception:
        _log.failure("{what} failed", without_text(), what=what)
