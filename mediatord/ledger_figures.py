"""`mediator_ledger_*` of the metrics: what the store's own books say, as they were read last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric


class LedgerFigures:
    """Has no series before the books were read for the first time."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._entries: dict[str, Mapping[str, int | None]] = {}
        self._differences: dict[str, int | None] = {}
        registry.register(self)

    def tell(self, half: str, entries: Mapping[str, int | None], difference: int | None) -> None:
        """
        The books of one half were read.

        :param entries: of what became of so many messages, by one word each; None where that is not known.
        :param difference: what they do not account for; None likewise.
        """
        self._entries[half] = entries
        self._differences[half] = difference

    def collect(self) -> Iterable[Metric]:
        """Called by the registry; what is not known has no series."""
        messages = GaugeMetricFamily(
            "mediator_ledger_messages", "What became of all that the store ever accepted", labels=["half", "entry"]
        )
        differences = GaugeMetricFamily(
            "mediator_ledger_difference", "Messages that the store does not account for", labels=["half"]
        )
        for half, entries in self._entries.items():
            for entry, number in entries.items():
                if number is not None:
                    messages.add_metric([half, entry], number)
        for half, difference in self._differences.items():
            if difference is not None:
                differences.add_metric([half], difference)
        return (messages, differences) if self._entries else ()
