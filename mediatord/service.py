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

from mediatord.certificates import Certificate
from mediatord.config import Config
from mediatord.endpoint_strings import PROXIED, take_apart
from mediatord.listener_layers import ProxyFactory

_log = Logger()

# Connections that may wait to be accepted, as they do until the store is open; the kernel has a limit of its own.
_BACKLOG = 1024


class StartupError(Exception):
    """The daemon cannot start; the text is one line for the operator."""


def refuse_unavailable(config: Config) -> None:
    """
    Refuse settings that cannot be had together, or that this version does not have yet.

    :raise StartupError: names the setting.
    """
    if config.cluster.listen is not None and config.storage.backend != "mongodb":
        raise StartupError("cluster.listen needs storage.backend mongodb, which nodes can share")


@contextmanager
def listening_on(endpoint: str) -> Iterator[None]:
    """
    Put what goes wrong with an endpoint into one line.

    :raise StartupError: its address is taken or not ours, or its certificate cannot be used.
    """
    try:
        yield
    except StartupError:
        raise
    except Exception as error:
        raise StartupError(f"cannot listen on {endpoint}: {_why(endpoint, error)}") from None


def _why(endpoint: str, error: Exception) -> str:
    """Each kind of endpoint raises what it likes; the texts of OpenSSL are lists of its functions."""
    if isinstance(error, CannotListenError | OSError):
        reason = getattr(error, "socketError", error)
        file = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        return f"{file}{getattr(reason, 'strerror', None) or reason}"
    if endpoint.startswith("systemd:") and isinstance(error, IndexError | KeyError):
        return "systemd has handed over no such socket; is mediatord.socket enabled, with an address for it?"
    what = "its key or certificate" if _speaks_tls(endpoint) else "it"
    return f"{what} cannot be used"


def _speaks_tls(endpoint: str) -> bool:
    return endpoint.removeprefix(PROXIED).startswith("ssl:")


def with_backlog(endpoint: str) -> str:
    """An endpoint string that says how many connections may wait to be accepted, where that is its business."""
    kind, given, named = take_apart(endpoint.removeprefix(PROXIED))
    # Arguments without a name may be it, according to their place.
    is_open = kind in ("tcp", "tcp6", "ssl", "unix") and len(given) < 2 and "backlog" not in named
    return f"{endpoint}:backlog={_BACKLOG}" if is_open else endpoint


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


class Listener(Service):
    """
    One endpoint that the site is served on.

    :param endpoint: a Twisted endpoint string.
    :param factory: an IProtocolFactory.
    :param reactor: may as well be one that listens on sockets it was given, whatever it is asked for.
    :raise StartupError: the certificate of an `ssl:` endpoint cannot be used.
    :ivar certificate: None unless it is one, perhaps behind `haproxy:`.
    """

    def __init__(self, endpoint: str, factory: Any, reactor: Any) -> None:
        self._endpoint = endpoint
        self.certificate: Certificate | None = None
        with listening_on(endpoint):
            if self.speaks_tls:
                reactor = self.certificate = Certificate(endpoint, reactor)
            if self.is_proxied:
                factory = ProxyFactory(factory)
            plain = with_backlog(endpoint).removeprefix(PROXIED)
            self._service = strports.service(plain, factory, reactor=reactor)
        self.name = f"listener {endpoint}"

    def privilegedStartService(self) -> None:
        """
        Bind.

        :raise StartupError: the address is taken or not ours.
        """
        super().privilegedStartService()
        with listening_on(self._endpoint):
            self._service.privilegedStartService()

    def startService(self) -> None:
        """Bind, if that was not done yet."""
        super().startService()
        self._service.startService()

    def hold(self) -> None:
        """Take no connections for now: those that come to an address that is bound wait in its backlog."""
        self._switch("stopReading")

    def let_in(self) -> None:
        """Take those that waited, and all others."""
        self._switch("startReading")

    def _switch(self, what: str) -> None:
        # Ports in memory can be told nothing.
        getattr(self._port, what, lambda: None)()

    @property
    def _port(self) -> Any:
        # There is no public way to the port of such a service.
        return getattr(self._service._waitingForPort, "result", None)

    @property
    def address(self) -> Any:
        """Where it listens, as its port says; None while it does not."""
        try:
            return self._port.getHost()
        except (AttributeError, OSError):  # there is none, or its socket is gone
            return None

    @property
    def speaks_tls(self) -> bool:
        """Whether clients have to."""
        return _speaks_tls(self._endpoint)

    @property
    def is_proxied(self) -> bool:
        """Whether the first line is that of a proxy, about its client."""
        return self._endpoint.startswith(PROXIED)

    def renew(self) -> bool:
        """
        Read the certificate again, if there is one, and tell how long it is good.

        :return: whether it could be read; where not, the one of before stays.
        """
        if self.certificate is None:
            return True
        name = self.certificate.name
        try:
            is_new = self.certificate.read()
        except Exception as error:
            _log.error("the certificate of {name} stays the same: {why}", name=name, why=_why(self._endpoint, error))
            return False
        _log.info(
            "the certificate of {name} is {what}, good until {expiry:%Y-%m-%d %H:%M} UTC",
            name=name,
            what="a new one" if is_new else "the same",
            expiry=self.certificate.expiry,
        )
        return True

    def stopService(self) -> Deferred[None]:
        """Take no more connections."""
        super().stopService()
        return maybeDeferred(self._service.stopService)


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
