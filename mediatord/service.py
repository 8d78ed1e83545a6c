"""Starting and stopping in order, and the way in for those who embed the daemon."""

from __future__ import annotations

from typing import Any, cast

from twisted.application import strports
from twisted.application.service import IService, MultiService, Service
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.config import Config

_log = Logger()


class StartupError(Exception):
    """The daemon cannot start; the text is one line for the operator."""


def refuse_unavailable(config: Config) -> None:
    """
    Refuse settings whose implementation this version does not have yet.

    :raise StartupError: names the setting.
    """
    if config.workers > 1:
        raise StartupError("workers: more than 1 is not available in this version")
    if config.cluster.listen is not None:
        raise StartupError("cluster.listen is not available in this version")
    if config.storage.backend == "mongodb":
        raise StartupError("storage.backend mongodb is not available in this version")


class OrderedService(MultiService):
    """
    Starts its children first to last, and stops them last to first, each after the one before.

    A MultiService stops all at once, which would close the store under a socket that is still draining.

    :param patience: seconds that stopping may take in all; what is not done by then is left behind.
    """

    def __init__(self, clock: IReactorTime, patience: float) -> None:
        super().__init__()
        self._clock = clock
        self._patience = patience

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


class Listener(Service):
    """
    One endpoint that the site is served on.

    :param endpoint: a Twisted endpoint string.
    :param factory: an IProtocolFactory.
    """

    def __init__(self, endpoint: str, factory: Any, reactor: Any) -> None:
        self._endpoint = endpoint
        self._service = strports.service(endpoint, factory, reactor=reactor)
        self.name = f"listener {endpoint}"

    def privilegedStartService(self) -> None:
        """
        Bind.

        :raise StartupError: the address is taken or not ours.
        """
        super().privilegedStartService()
        try:
            self._service.privilegedStartService()
        except (CannotListenError, OSError) as error:
            reason = getattr(error, "socketError", error)
            raise StartupError(f"cannot listen on {self._endpoint}: {getattr(reason, 'strerror', reason)}") from None

    def startService(self) -> None:
        """Bind, if that was not done yet."""
        super().startService()
        self._service.startService()

    def stopService(self) -> Deferred[None]:
        """Take no more connections."""
        super().stopService()
        return maybeDeferred(self._service.stopService)


def makeService(config: Config, reactor: Any = None) -> IService:
    """
    The whole daemon as one service.

    :param reactor: the global one unless given.
    :raise StartupError: keys or identity cannot be used; the text is one line.
    """
    from mediatord.wiring import build

    if reactor is None:
        from twisted.internet import reactor  # noqa: TID251  for embedding, where there is nobody to pass one
    return build(reactor, config)
