"""
TLS and the PROXY protocol around the factory of a listener.

Twisted's own factories for them wrap whatever the factory inside returns, also the None by which it refuses a
connection: such a connection would stay open for good, beyond every limit and time-out.

The certificate of an `ssl:` listener, which may be another one while the daemon runs.

Listening sockets as services: endpoint strings, TLS certificates, PROXY protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from cryptography import x509
from OpenSSL import SSL, crypto
from twisted.application import strports
from twisted.application.service import Service
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.endpoints import serverFromString
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import (
    IAddress,
    IDelayedCall,
    IHalfCloseableProtocol,
    IOpenSSLContextFactory,
    IProtocolFactory,
    IReactorTime,
    ISSLTransport,
)
from twisted.internet.protocol import Factory, connectionDone
from twisted.logger import Logger
from twisted.protocols.haproxy._wrapper import HAProxyProtocolWrapper, HAProxyWrappingFactory
from twisted.protocols.policies import WrappingFactory
from twisted.protocols.tls import BufferingTLSTransport, TLSMemoryBIOFactory
from twisted.python.failure import Failure
from zope.interface import implementer, noLongerProvides

from mediatord.config.endpoint_strings import HAPROXY_PREFIX, parse_endpoint_string
from mediatord.errors import StartupError

# Seconds from the connection to the end of its TLS handshake, however steadily the client sends.
TLS_HANDSHAKE_TIMEOUT = 10.0


class _RefusalPassthroughMixin(WrappingFactory[Any]):
    """Refuses what the factory inside refuses, before anything is made for the connection."""

    def buildProtocol(self, addr: IAddress | None) -> Any:
        """None where the factory inside returns None: the port closes the connection at once."""
        protocol = self.wrappedFactory.buildProtocol(addr)
        return None if protocol is None else self.protocol(self, protocol)


@implementer(IHalfCloseableProtocol)
class ProxyProtocolConnection(HAProxyProtocolWrapper):
    """
    A connection whose first line is about its client.

    It does not claim to be the TLS that may be below it: Autobahn would ask it for what only TLS itself can tell.
    """

    def makeConnection(self, transport: Any) -> None:  # noqa: N802  Twisted's name
        """Begin to wait for the first line."""
        super().makeConnection(transport)
        if ISSLTransport.providedBy(self):
            noLongerProvides(self, ISSLTransport)

    def readConnectionLost(self) -> None:  # noqa: N802  Twisted's name
        """The client sends nothing more."""
        if IHalfCloseableProtocol.providedBy(self.wrappedProtocol):
            cast(Any, self.wrappedProtocol).readConnectionLost()
        else:
            cast(Any, self.transport).abortConnection()

    def writeConnectionLost(self) -> None:  # noqa: N802  Twisted's name
        """The client has been told that nothing more will come."""


class ProxyProtocolFactory(_RefusalPassthroughMixin, HAProxyWrappingFactory):
    """The PROXY protocol: the first line of each connection is about its client."""

    protocol: type[Any] = ProxyProtocolConnection


class TLSServerConnection(BufferingTLSTransport):
    """A server's side of TLS, which aborts a connection whose handshake takes too long."""

    _handshake_timer: IDelayedCall | None = None

    def makeConnection(self, transport: Any) -> None:  # noqa: N802  Twisted's name
        """Begin the handshake."""
        self._handshake_timer = cast(Any, self.factory).clock.callLater(TLS_HANDSHAKE_TIMEOUT, self._check_handshake)
        super().makeConnection(transport)

    def _check_handshake(self) -> None:
        self._handshake_timer = None
        # There is no public way to see whether it is done.
        if not self._handshakeDone:
            self.abortConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """The client is gone."""
        timer, self._handshake_timer = self._handshake_timer, None
        if timer is not None:
            timer.cancel()
        super().connectionLost(reason)


class TLSServerFactory(_RefusalPassthroughMixin, TLSMemoryBIOFactory):
    """
    TLS for the connections of another factory.

    :param contexts: gives each connection its certificate.
    """

    protocol = TLSServerConnection

    def __init__(self, contexts: Any, factory: IProtocolFactory, clock: IReactorTime) -> None:
        super().__init__(contexts, False, factory, clock)
        self.clock = clock


# Of TLS 1.2: only suites with forward secrecy and authenticated encryption. Those of TLS 1.3 are all of that kind.
TLS12_CIPHERS = b"ECDHE+AESGCM:ECDHE+CHACHA20:DHE+AESGCM:DHE+CHACHA20:!aNULL:!PSK"

CERTIFICATE_PARAMETERS = ("privateKey", "certKey", "extraCertChain", "dhParameters")


def find_certificate_files(endpoint: str) -> dict[str, Path]:
    """The files that an `ssl:` endpoint names, by the names in :data:`CERTIFICATE_PARAMETERS`."""
    _, given, named = parse_endpoint_string(endpoint.removeprefix(HAPROXY_PREFIX))
    # Without names the port comes first, then key and certificate.
    found = dict(zip(CERTIFICATE_PARAMETERS[:2], given[1:], strict=False)) | named
    return {name: Path(found[name]) for name in CERTIFICATE_PARAMETERS if name in found}


@implementer(IOpenSSLContextFactory)
class ListenerCertificate:
    """
    Stands in for the reactor where the endpoint begins to listen, and says which certificate each connection gets.

    Certificates that follow the first one in its file are shown as well, as every other server does with what ACME
    clients call `fullchain.pem`; Twisted by itself leaves them out, unless `extraCertChain` names a file for them.

    :param endpoint: a Twisted endpoint string that begins with `ssl:`, perhaps after `haproxy:`.
    :param reactor: listens.
    :raise Exception: of whichever kind Twisted and OpenSSL like; the files cannot be used.
    :ivar name: interface and port of the listener, `*:443` for all interfaces.
    :ivar expiry: when the first of the certificates ends that are shown to clients.
    """

    def __init__(self, endpoint: str, reactor: Any) -> None:
        self._endpoint = endpoint
        self._reactor = reactor
        self.name = ""
        self.expiry: datetime
        self._options: Any
        self.read()

    def read(self) -> bool:
        """
        Read the files; connections that are open go on with what they have.

        :return: whether there is another certificate than before.
        :raise Exception: as above; nothing has changed.
        """
        seen = _RecordingReactor()
        serverFromString(seen, self._endpoint).listen(Factory())
        if not seen.options.extraCertChain:
            seen.options.extraCertChain = self._following(seen.options.certificate)
        # What OpenSSL does not take is to be known now, not when somebody connects.
        seen.options.getContext().set_cipher_list(TLS12_CIPHERS)
        shown = [one.to_cryptography() for one in (seen.options.certificate, *(seen.options.extraCertChain or ()))]
        before = getattr(self, "_shown", None)
        self.name, self._options, self._shown = seen.name, seen.options, shown
        self.expiry = min(one.not_valid_after_utc for one in shown)
        return shown != before

    def _following(self, first: crypto.X509) -> list[crypto.X509]:
        """
        What comes after it in its file.

        :raise ValueError: the file begins with another one by now.
        """
        files = find_certificate_files(self._endpoint)
        path = files.get("certKey") or files.get("privateKey")
        found = [] if path is None else x509.load_pem_x509_certificates(path.read_bytes())
        if found and found[0] != first.to_cryptography():
            raise ValueError("changed while it was read")
        return [crypto.X509.from_cryptography(one) for one in found[1:]]

    def getContext(self) -> SSL.Context:  # noqa: N802  Twisted's name
        """Called for every connection."""
        context: SSL.Context = self._options.getContext()
        return context

    def listenSSL(  # noqa: N802  Twisted's name
        self,
        port: int,
        factory: Any,
        contextFactory: Any,  # noqa: N803  Twisted's name
        backlog: int = 50,
        interface: str = "",
    ) -> Any:
        """Called by the endpoint, which has read the files once more."""
        factory = TLSServerFactory(self, factory, self._reactor)
        return self._reactor.listenTCP(port, factory, backlog=backlog, interface=interface)


class _RecordingReactor:
    """What an endpoint would listen with."""

    name = ""
    options: Any = None

    def listenSSL(  # noqa: N802  Twisted's name
        self,
        port: int,
        factory: Any,
        contextFactory: Any,  # noqa: N803  Twisted's name
        backlog: int = 50,
        interface: str = "",
    ) -> None:
        """Called by the endpoint."""
        self.name = f"{interface or '*'}:{port}"
        self.options = contextFactory


_log = Logger()

# Connections that may wait to be accepted, as they do until the store is open; the kernel has a limit of its own.
_LISTEN_BACKLOG = 1024


@contextmanager
def translate_listen_errors(endpoint: str) -> Iterator[None]:
    """
    Put what goes wrong with an endpoint into one line.

    :raise StartupError: its address is taken or not ours, or its certificate cannot be used.
    """
    try:
        yield
    except StartupError:
        raise
    except Exception as error:
        raise StartupError(f"cannot listen on {endpoint}: {_describe_listen_error(endpoint, error)}") from None


def _describe_listen_error(endpoint: str, error: Exception) -> str:
    """Each kind of endpoint raises what it likes; the texts of OpenSSL are lists of its functions."""
    if isinstance(error, CannotListenError | OSError):
        reason = getattr(error, "socketError", error)
        file = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        return f"{file}{getattr(reason, 'strerror', None) or reason}"
    if endpoint.startswith("systemd:") and isinstance(error, IndexError | KeyError):
        return "systemd has handed over no such socket; is mediatord.socket enabled, with an address for it?"
    what = "its key or certificate" if _is_tls_endpoint(endpoint) else "it"
    return f"{what} cannot be used"


def _is_tls_endpoint(endpoint: str) -> bool:
    return endpoint.removeprefix(HAPROXY_PREFIX).startswith("ssl:")


def add_backlog(endpoint: str) -> str:
    """An endpoint string that says how many connections may wait to be accepted, where that is its business."""
    kind, given, named = parse_endpoint_string(endpoint.removeprefix(HAPROXY_PREFIX))
    # Arguments without a name may be it, according to their place.
    is_open = kind in ("tcp", "tcp6", "ssl", "unix") and len(given) < 2 and "backlog" not in named
    return f"{endpoint}:backlog={_LISTEN_BACKLOG}" if is_open else endpoint


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
        self.certificate: ListenerCertificate | None = None
        with translate_listen_errors(endpoint):
            if self.speaks_tls:
                reactor = self.certificate = ListenerCertificate(endpoint, reactor)
            if self.is_proxied:
                factory = ProxyProtocolFactory(factory)
            plain = add_backlog(endpoint).removeprefix(HAPROXY_PREFIX)
            self._service = strports.service(plain, factory, reactor=reactor)
        self.name = f"listener {endpoint}"

    def privilegedStartService(self) -> None:
        """
        Bind.

        :raise StartupError: the address is taken or not ours.
        """
        super().privilegedStartService()
        with translate_listen_errors(self._endpoint):
            self._service.privilegedStartService()

    def startService(self) -> None:
        """Bind, if that was not done yet."""
        super().startService()
        self._service.startService()

    def hold(self) -> None:
        """Take no connections for now: those that come to an address that is bound wait in its backlog."""
        self._switch("stopReading")

    def resume_accepting(self) -> None:
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
        return _is_tls_endpoint(self._endpoint)

    @property
    def is_proxied(self) -> bool:
        """Whether the first line is that of a proxy, about its client."""
        return self._endpoint.startswith(HAPROXY_PREFIX)

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
            _log.error(
                "the certificate of {name} stays the same: {why}",
                name=name,
                why=_describe_listen_error(self._endpoint, error),
            )
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
