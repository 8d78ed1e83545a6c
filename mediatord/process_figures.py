"""`process_*` of the metrics, also where `/proc` shows nothing but processes, as it does under `ProcSubset=pid`."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, ProcessCollector


class ProcessFigures(ProcessCollector):
    """
    Those of prometheus_client, which leaves all of them out where there is no `/proc/stat`.

    :param proc: where that file system is.
    """

    def __init__(self, registry: CollectorRegistry, proc: str = "/proc") -> None:
        super().__init__(proc=proc, registry=registry)

    def _boot_time(self) -> float:
        """When the host was started, in seconds since the epoch, without a file."""
        return time.clock_gettime(time.CLOCK_REALTIME) - time.clock_gettime(time.CLOCK_BOOTTIME)
