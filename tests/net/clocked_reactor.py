"""The real reactor's sockets with a clock and names of the test."""

from __future__ import annotations

from typing import Any

from twisted.internet.task import Clock

from tests.net.outbound_test_case import FakeResolver


class ClockedReactor:
    """
    :param reactor: of the sockets and their own time-outs.
    :ivar clock: of all other timers; starts at the real time.
    """

    def __init__(self, reactor: Any, names: FakeResolver) -> None:
        self._reactor = reactor
        self.nameResolver = names
        self.clock = Clock()
        self.clock.rightNow = reactor.seconds()
        self.seconds = self.clock.seconds
        self.callLater = self.clock.callLater

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reactor, name)
