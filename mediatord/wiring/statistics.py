"""What the metrics say of the store: queues and ledger, always of one moment."""

from __future__ import annotations

from mediatord.wiring.base import Base

# Seconds from which on a look counts as expensive, and how many times as long it is not repeated then.
_EXPENSIVE, _REST = 0.05, 20


async def read_statistics(base: Base) -> None:
    """
    Have the metrics say how the store is now.

    :raise StoreUnavailable: it does not say, and the metrics say how it was.
    """
    found = await base.store.statistics(base.reloading.config.metrics.queue_size_top)
    largest = [one for one in found.largest if not base.own.kin.knows(one[0])]
    # What the daemon sends to itself has no series, but is in the sum as it is in the ledger.
    other = found.other + sum(number for _, number in found.largest) - sum(number for _, number in largest)
    base.journal.metrics.queue_sizes(largest, other)
    base.journal.show_ledger(found.books)
    base.journal.metrics.store_read(base.reactor.seconds(), sum(number for _, number in largest) + other)


class ScrapeRefresh:
    """Reads the statistics for a scrape, less often where that takes long."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self._due = 0.0

    async def __call__(self) -> None:
        """:raise StoreUnavailable: as :func:`read_statistics`."""
        began = self._base.steady()
        if began < self._due:
            return
        await read_statistics(self._base)
        took = self._base.steady() - began
        self._due = began + took * _REST if took > _EXPENSIVE else 0.0
