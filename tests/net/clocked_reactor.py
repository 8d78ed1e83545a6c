"""The real reactor's sockets with a clock and names of the test."""

from __future__ import annotations

from typing import Any

from twisted.internet.task import Clock

from tests.net.outbound_test_case import FakeResolver

_PATIENCE_SECONDS = 600.0


class ClockedReactor:
    """
    A reactor.

    :param reactor: of the sockets.
    :ivar clock: of all timers; starts at the real time.
    """

    def __init__(self, reactor: Any, names: FakeResolver) -> None:
        self._reactor = reactor
        self.nameResolver = names
        self.clock = Clock()
        self.clock.rightNow = reactor.seconds()
        self.seconds = self.clock.seconds
        self.callLater = self.clock.callLater

    def connectTCP(  # noqa: N802  the interface's name
        self,
        host: str,
        port: int,
        factory: Any,
        timeout: float,
        bindAddress: Any,  # noqa: N803
    ) -> Any:
        """Connect, without a time-out in real time, for busy machines."""
        return self._reactor.connectTCP(host, port, factory, _PATIENCE_SECONDS, bindAddress)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reactor, name)
