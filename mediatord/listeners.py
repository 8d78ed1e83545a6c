"""Listening sockets as services: endpoint strings, TLS certificates, PROXY protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from twisted.application import strports
from twisted.application.service import Service
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.error import CannotListenError
from twisted.logger import Logger

from mediatord.certificates import Certificate
from mediatord.endpoint_strings import PROXIED, take_apart
from mediatord.errors import StartupError
from mediatord.listener_layers import ProxyFactory

_log = Logger()

# Connections that may wait to be accepted, as they do until the store is open; the kernel has a limit of its own.
_BACKLOG = 1024


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


