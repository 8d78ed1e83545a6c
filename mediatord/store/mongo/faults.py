"""What is logged of operations that failed."""

from __future__ import annotations

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

_log = Logger(namespace="mediatord.store")


class Faults:
    """One line a second at most, with nothing in it that a server said or was to store."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._number = 0
        self._quiet_until = 0.0
        self._credentials_quiet_until = 0.0

    def report(self, name: str, error: Exception) -> None:
        self._number += 1
        now = self._clock.seconds()
        if now >= self._quiet_until:
            _log.error(
                "operations failed ({number}), the last one being {name}: {error}",
                event="store.failed",
                number=self._number,
                name=name,
                error=str(error),
            )
            self._number, self._quiet_until = 0, now + 1.0

    def report_credentials(self, hosts: str) -> None:
        now = self._clock.seconds()
        if now >= self._credentials_quiet_until:
            _log.error("MongoDB at {hosts} does not take our credentials, or they do not allow enough", hosts=hosts)
            self._credentials_quiet_until = now + 60.0
