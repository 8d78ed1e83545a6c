"""A bucket's part in what several processes admit together."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.admission.allowances import Allowances, Unanswered
from mediatord.deadline import on_its_own, time_left
from mediatord.faults import without_text
from mediatord.protocol.limits import Lot, short_key

_log = Logger()


@dataclass(slots=True)
class _Line:
    """
    What this process holds of one key's allowance, and who stands in line for more.

    :param key: its name in the store.
    :param limit: how much all processes together may have of it.
    :param waiting: what each of them needs, and where it is told how long it has to wait, or 0; None for nobody, as
        most lines are most of the time, and an empty deque is larger than all the rest.
    """

    key: bytes
    lot: Lot
    limit: int
    waiting: deque[tuple[int, Deferred[float]]] | None = None
    asking: bool = False

    def join(self, cost: int, answer: Deferred[float]) -> None:
        """One more stands in line."""
        if self.waiting is None:
            self.waiting = deque()
        self.waiting.append((cost, answer))

    def wanted(self, now: float) -> int:
        """What would do for all of them, and for what is owed."""
        return sum([cost for cost, _ in self.waiting or ()]) - self.lot.left(now)

    def needed(self, now: float) -> int:
        """What would do for the first, and for what is owed."""
        return (self.waiting[0][0] if self.waiting else 0) - self.lot.left(now)

    def unfinished(self, now: float) -> bool:
        """Whether anybody still waits, or something is owed that may be had."""
        self.serve(now)
        return bool(self.waiting) or (self.lot.left(now) < 0 and not self.lot.wait(0, now))

    def serve(self, now: float) -> None:
        """Let all go on for whom there is enough, in the order in which they came."""
        while self.waiting and self.lot.use(self.waiting[0][0], now):
            self.waiting.popleft()[1].callback(0.0)
        if not self.waiting:
            self.waiting = None

    def refuse(self, now: float) -> None:
        """Send away all who need as much as was refused."""
        staying: deque[tuple[int, Deferred[float]]] = deque()
        refused = []
        for cost, answer in self.waiting or ():
            wait = self.lot.wait(cost, now)
            if wait:
                refused.append((wait, answer))
            else:
                staying.append((cost, answer))
        self.waiting = staying or None
        for wait, answer in refused:
            answer.callback(wait)

    def release(self, wait: Callable[[], float]) -> None:
        """Let all go on, or away: each is asked about after what became of the one before."""
        waiting, self.waiting = self.waiting, None
        for _, answer in waiting or ():
            answer.callback(wait())


def _freely(who: str, cost: int) -> float:
    return 0.0


class Share:
    """
    Takes from the allowances of one bucket, in lots that are used up here.

    What is refused is remembered, and asked for again when its time is over. While the store does not answer, what is
    known still holds, and beyond that this process decides alone. Beyond `max_keys`, what is known of the one asked
    about longest ago is put back and forgotten: the store knows the rest, and is asked again.

    :param alone: seconds that somebody has to wait for so much more than was charged here already, if this process
        decides alone.
    """

    def __init__(
        self,
        clock: IReactorTime,
        allowances: Allowances,
        bucket: str,
        limit: int,
        *,
        alone: Callable[[str, int], float] = _freely,
        period: float = 60.0,
        max_keys: int = 20_000,
    ) -> None:
        self._clock = clock
        self._alone = alone
        self._allowances = allowances
        self._bucket = bucket
        self._limit = limit
        self._larger: Mapping[str, int] = {}
        self._period = period
        self._max_keys = max_keys
        self._lines: OrderedDict[str | bytes, _Line] = OrderedDict()

    def change(self, limit: int, larger: Mapping[str, int]) -> None:
        """
        Go by another limit, also for those who were refused before.

        :param larger: those of some keys, which are short.
        """
        self._limit = limit
        self._larger = larger
        for who, line in self._lines.items():
            line.limit = larger.get(who, limit) if isinstance(who, str) else limit
            line.lot.ask_again()

    def wait(self, who: str, cost: int = 1) -> float:
        """Seconds for which `who` is known to have no more; 0.0 may be too good to be true."""
        line, now = self._lines.get(short_key(who)), self._clock.seconds()
        wait = 0.0 if line is None else line.lot.wait(cost, now)
        if wait or not self._allowances.resting() or (line is not None and line.lot.left(now) >= cost):
            return wait
        return self._alone(who, cost)

    def take_at_once(self, who: str, cost: int) -> bool:
        """As :meth:`take`, if there is enough here and nobody stands in line; otherwise nothing is used."""
        line, now = self._lines.get(short_key(who)), self._clock.seconds()
        return line is not None and not line.waiting and line.lot.use(cost, now)

    async def take(self, who: str, cost: int) -> float:
        """
        Use so much of `who`'s allowance and return 0.0, or nothing and return the seconds it has to wait.

        :param cost: charged here already; 0 to pay only what is owed.
        """
        line, now = self._line(who), self._clock.seconds()
        self._trim(line, now)
        if not line.waiting and line.lot.use(cost, now):
            return 0.0
        wait = line.lot.wait(cost, now)
        if wait or self._allowances.resting():
            return wait or self._alone(who, 0)
        answer: Deferred[float] = Deferred()
        line.join(cost, answer)
        # One who has no more time decides without an answer, like one who gets none.
        answer.addTimeout(time_left(self._clock), self._clock, lambda *_: self._alone(who, 0))
        self._begin_to_ask(who, line)
        return await answer

    def owe(self, who: str, cost: int) -> float:
        """
        Use so much of it in any case, and take it afterwards; unless it is known that there is no more, which costs
        nothing and returns the seconds to wait.

        :param cost: charged here already.
        """
        line, now = self._line(who), self._clock.seconds()
        self._trim(line, now)
        wait = line.lot.wait(cost, now)
        if wait:
            return wait
        if line.lot.use(cost, now):
            return 0.0
        if self._allowances.resting():
            return self._alone(who, 0)
        line.lot.owe(cost, now)
        self._begin_to_ask(who, line)
        return 0.0

    def owes(self, who: str) -> bool:
        """Whether something was used that is not taken yet."""
        line = self._lines.get(short_key(who))
        return line is not None and line.lot.left(self._clock.seconds()) < 0

    def give_back(self, who: str, cost: int) -> None:
        """Undo a taking, as far as there was one."""
        line = self._lines.get(short_key(who))
        if line is None:
            return
        now = self._clock.seconds()
        line.lot.return_(cost, now)
        excess = self._trim(line, now)
        if excess:
            self._allowances.put_back(line.key, excess)
        line.lot.ask_again()

    def _trim(self, line: _Line, now: float) -> int:
        """
        Let go of what nobody waits for, and say how much that was: no process holds a whole lot unused, so that all
        together are over the limit by less than their lots.
        """
        return 0 if line.waiting else line.lot.keep(self._allowances.lot(line.limit) - 1, now)

    def _begin_to_ask(self, who: str, line: _Line) -> None:
        if not line.asking:
            line.asking = True
            with on_its_own():
                Deferred.fromCoroutine(self._ask(who, line))

    async def _ask(self, who: str, line: _Line) -> None:
        """Ask for everybody who waits, until nobody does."""
        try:
            while line.unfinished(self._clock.seconds()):
                await self._round(line)
        except Unanswered:
            pass
        except Exception:
            _log.failure("asking for an allowance failed", without_text())
        line.asking = False
        line.release(lambda: self._alone(who, 0))

    async def _round(self, line: _Line) -> None:
        """
        Ask for what would do for all, or for a lot, then for what the first needs.

        :raise Unanswered: the store does not answer.
        """
        now = self._clock.seconds()
        needed = line.needed(now)
        wanted = max(line.wanted(now), self._allowances.lot(line.limit))
        most = line.lot.worth_asking(wanted, needed, now)
        taken = await self._taken(line, most) or (most > needed and await self._taken(line, needed))
        if not taken:
            line.refuse(self._clock.seconds())

    async def _taken(self, line: _Line, amount: int) -> bool:
        asked_at = self._clock.seconds()
        wait = await self._allowances.take(line.key, amount, limit=line.limit, period=self._period)
        now = self._clock.seconds()
        if wait:
            line.lot.refused(amount, wait, now)
            return False
        line.lot.took(amount, asked_at, now)
        line.serve(now)
        self._trim(line, now)
        return True

    def _line(self, who: str) -> _Line:
        short = short_key(who)
        line = self._lines.get(short)
        if line is None:
            self._forget()
            limit = self._larger.get(who, self._limit)
            line = self._lines[short] = _Line(self._allowances.key(self._bucket, who), Lot(self._period), limit)
        else:
            self._lines.move_to_end(short)
        return line

    def _forget(self) -> None:
        """Make room for one more; two old ones at a time, so that no call is slow and all of them go."""
        now = self._clock.seconds()
        for _ in range(2):
            if not self._lines:
                return
            oldest = next(iter(self._lines.values()))
            if len(self._lines) < self._max_keys and (oldest.asking or not oldest.lot.over(now)):
                return
            self._lines.popitem(last=False)
            # Who stands in its line still must not use that as well.
            if left := oldest.lot.keep(0, now):
                self._allowances.put_back(oldest.key, left)
