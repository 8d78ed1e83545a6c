"""Starting and stopping in order, and the way in for those who embed the daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from twisted.application import strports
from twisted.application.service import IService, MultiService, Service
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.config import Config
from mediatord.errors import StartupError
from mediatord.listeners import Listener, listening_on, with_backlog, _BACKLOG, _why, _speaks_tls

_log = Logger()

def refuse_unavailable(config: Config) -> None:
    """
    Refuse settings that cannot be had together, or that this version does not have yet.

    :raise StartupError: names the setting.
    """
    if config.cluster.listen is not None and config.storage.backend != "mongodb":
        raise StartupError("cluster.listen needs storage.backend mongodb, which nodes can share")


class OrderedService(MultiService):
    """
    Starts its children first to last, and stops them last to first, each after the one before.

    A MultiService stops all at once, which would close the store under a socket that is still draining.

    :param patience: seconds that stopping may take in all; what is not done by then is left behind.
    :ivar rotate: closes the segments of the event logs.
    :ivar reload: takes what reads the configuration, applies what can be applied, and closes the segments as well.
    """

    def __init__(
        self,
        clock: IReactorTime,
        patience: float,
        rotate: Callable[[], object] = lambda: None,
        reload: Callable[[Callable[[], Config]], None] = lambda read: None,
    ) -> None:
        super().__init__()
        self._clock = clock
        self._patience = patience
        self.rotate = rotate
        self.reload = reload

    def stopService(self) -> Deferred[None]:
        """Fires when everything has stopped, or time is up."""
        Service.stopService(self)
        return Deferred.fromCoroutine(self._stop_each(self._clock.seconds() + self._patience))

    async def _stop_each(self, deadline: float) -> None:
        for child in reversed(list(self)):
            stopping = maybeDeferred(cast(Any, child).stopService)
            try:
                await stopping.addTimeout(max(0.1, deadline - self._clock.seconds()), self._clock)
            except Exception as error:
                # A child may put its cancellation into an error of its own.
                if isinstance(error, DeferredTimeout) or self._clock.seconds() >= deadline:
                    _log.warn("{name} did not stop in time", name=child.name)
                else:
                    _log.failure("{name} did not stop", name=child.name)


def makeService(
    config: Config,
    reactor: Any = None,
    give_up: Callable[[str], None] = lambda line: _log.critical("{line}", line=line),
) -> IService:
    """
    The whole daemon as one service.

    :param reactor: the global one unless given.
    :param give_up: told in one line why there is no point in going on, should that turn out after the start; the
        service is then to be stopped.
    :raise StartupError: keys or identity cannot be used; the text is one line.
    """
    from mediatord.wiring import build

    if reactor is None:
        from twisted.internet import reactor  # noqa: TID251  for embedding, where there is nobody to pass one
    return build(reactor, config, give_up=give_up)
