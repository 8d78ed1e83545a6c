"""What was counted in the last hour, in slots of ten seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from twisted.internet.interfaces import IReactorTime

# Seconds of a slot, and how many are kept: an hour and the slot that is not over yet.
SLOT = 10
_MINUTE, _HOUR = 60 // SLOT, 3600 // SLOT
# What is shown, and which counters it is the sum of (:meth:`~mediatord.metrics.Metrics.totals`).
FLOWS: Mapping[str, tuple[str, ...]] = {
    "accepted": ("forwarded",),
    "delivered": ("delivered",),
    "refused": ("requests_rejected",),
    "failed": ("requests_failed",),
    "requests": ("requests_accepted", "requests_rejected", "requests_failed"),
    "stored": ("stored",),
    "expired": ("expired",),
    "evicted": ("evicted",),
}

# Number of the slot since the epoch, and what was counted in it, in the order of FLOWS.
Slot = list[int]


@dataclass(frozen=True, slots=True)
class Flow:
    """
    How much there was of something.

    :param minute: in the last minute, like `hour`.
    :param per_second: of the last minute and the last hour, or as long as the daemon has been there.
    :param by_minute: of the last hour, oldest first.
    """

    minute: int
    hour: int
    per_second: tuple[float, float]
    by_minute: tuple[int, ...]


class Traffic:
    """
    Notes by how much the counters of this process grow.

    :param totals: the counters as they are.
    """

    def __init__(self, clock: IReactorTime, totals: Callable[[], Mapping[str, int]]) -> None:
        self._clock = clock
        self._totals = totals
        self._last = self._counts()
        self._slots: dict[int, list[int]] = {}

    def sample(self) -> None:
        """Put what was counted since the last time into the present slot."""
        counts, last = self._counts(), self._last
        self._last = counts
        present = int(self._clock.seconds()) // SLOT
        # When the clock was set, what was counted at times that have not come yet is forgotten.
        self._slots = {slot: grown for slot, grown in self._slots.items() if present - _HOUR < slot <= present}
        grown = [now - before for now, before in zip(counts, last, strict=True)]
        if any(grown):
            earlier = self._slots.get(present, [0] * len(grown))
            self._slots[present] = [one + more for one, more in zip(earlier, grown, strict=True)]

    def slots(self) -> list[Slot]:
        """Those in which anything was counted, up to now."""
        self.sample()
        return [[slot, *grown] for slot, grown in self._slots.items()]

    def totals(self) -> dict[str, int]:
        """Since the start of the process, as of the last sample."""
        return dict(zip(FLOWS, self._last, strict=True))

    def _counts(self) -> list[int]:
        totals = self._totals()
        return [sum([totals[name] for name in names]) for names in FLOWS.values()]


def flows(processes: Iterable[Sequence[Slot]], now: float, uptime: float) -> dict[str, Flow]:
    """
    What all processes have counted.

    :param uptime: seconds that the longest of them has been there.
    """
    present = int(now) // SLOT
    sums = [[0] * _HOUR for _ in FLOWS]
    for slot, *grown in [slot for slots in processes for slot in slots]:
        age = present - slot
        if 0 <= age < _HOUR:
            for series, more in zip(sums, grown, strict=True):
                series[_HOUR - 1 - age] += more
    # The present slot has only begun.
    begun = now - present * SLOT
    spans = [max(1.0, min(uptime, (number - 1) * SLOT + begun)) for number in (_MINUTE, _HOUR)]
    return {name: _flow(series, spans) for name, series in zip(FLOWS, sums, strict=True)}


def _flow(series: Sequence[int], spans: Sequence[float]) -> Flow:
    minutes = tuple([sum(series[start : start + _MINUTE]) for start in range(0, _HOUR, _MINUTE)])
    minute, hour = minutes[-1], sum(minutes)
    return Flow(minute, hour, (minute / spans[0], hour / spans[1]), minutes)
