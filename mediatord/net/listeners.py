"""
Listening sockets as services: endpoint strings, TLS with certificate reload, PROXY protocol.

Twisted's factories for TLS and PROXY protocol ignore that the wrapped factory refuses a connection by returning None;
it would stay open without limit or timeout. The factories here close it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
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

from mediatord.config.value_syntax import HAPROXY_PREFIX, parse_endpoint_string
from mediatord.errors import StartupError

# Seconds from accept to the end of the TLS handshake.
TLS_HANDSHAKE_TIMEOUT = 10.0


class _RefusalPassthroughMixin(WrappingFactory[Any]):
    """Refuses a connection if the wrapped factory does, before wrapping it."""

    def buildProtocol(self, addr: IAddress | None) -> Any:
        """None if the wrapped factory returns None; the port then closes the connection."""
        protocol = self.wrappedFactory.buildProtocol(addr)
        return None if protocol is None else self.protocol(self, protocol)


@implementer(IHalfCloseableProtocol)
class ProxyProtocolConnection(HAProxyProtocolWrapper):
    """
    A connection that starts with a PROXY header.

    It hides a TLS transport below it, which Autobahn would query for details that only TLS itself provides.
    """

    def makeConnection(self, transport: Any) -> None:  # noqa: N802  Twisted's name
        """Wait for the PROXY header."""
        super().makeConnection(transport)
        if ISSLTransport.providedBy(self):
            noLongerProvides(self, ISSLTransport)

    def readConnectionLost(self) -> None:  # noqa: N802  Twisted's name
        """The client has finished sending."""
        if IHalfCloseableProtocol.providedBy(self.wrappedProtocol):
            cast(Any, self.wrappedProtocol).readConnectionLost()
        else:
            cast(Any, self.transport).abortConnection()

    def writeConnectionLost(self) -> None:  # noqa: N802  Twisted's name
        """The client was notified of the end of our data."""


class ProxyProtocolFactory(_RefusalPassthroughMixin, HAProxyWrappingFactory):
    """Factory for connections that start with a PROXY header."""

    protocol: type[Any] = ProxyProtocolConnection


class TLSServerConnection(BufferingTLSTransport):
    """Server-side TLS that aborts connections whose handshake takes too long."""

    _handshake_timer: IDelayedCall | None = None

    def makeConnection(self, transport: Any) -> None:  # noqa: N802  Twisted's name
        """Start the handshake."""
        self._handshake_timer = cast(Any, self.factory).clock.callLater(TLS_HANDSHAKE_TIMEOUT, self._check_handshake)
        super().makeConnection(transport)

    def _check_handshake(self) -> None:
        self._handshake_timer = None
        # There is no public attribute for it.
        if not self._handshakeDone:
            self.abortConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Stop the timer."""
        timer, self._handshake_timer = self._handshake_timer, None
        if timer is not None:
            timer.cancel()
        super().connectionLost(reason)


class TLSServerFactory(_RefusalPassthroughMixin, TLSMemoryBIOFactory):
    """
    TLS around another factory.

    :param contexts: IOpenSSLContextFactory, asked for each connection.
    """

    protocol = TLSServerConnection

    def __init__(self, contexts: Any, factory: IProtocolFactory, clock: IReactorTime) -> None:
        super().__init__(contexts, False, factory, clock)
        self.clock = clock


# TLS 1.2 suites with forward secrecy and authenticated encryption; those of TLS 1.3 all qualify.
TLS12_CIPHERS = b"ECDHE+AESGCM:ECDHE+CHACHA20:DHE+AESGCM:DHE+CHACHA20:!aNULL:!PSK"

CERTIFICATE_PARAMETERS = ("privateKey", "certKey", "extraCertChain", "dhParameters")


def find_certificate_files(endpoint: str) -> dict[str, Path]:
    """Files named in an `ssl:` endpoint, by :data:`CERTIFICATE_PARAMETERS`."""
    _, given, named = parse_endpoint_string(endpoint.removeprefix(HAPROXY_PREFIX))
    # Positional arguments: port, key, certificate.
    found = dict(zip(CERTIFICATE_PARAMETERS[:2], given[1:], strict=False)) | named
    return {name: Path(found[name]) for name in CERTIFICATE_PARAMETERS if name in found}


@implementer(IOpenSSLContextFactory)
class ListenerCertificate:
    """
    Certificate of an `ssl:` listener, reloadable while connections are open.

    Takes the reactor's place while the endpoint starts to listen. Intermediate certificates in the certificate file
    are sent as well, as other servers do with `fullchain.pem`; Twisted requires `extraCertChain` for that.

    :param endpoint: Twisted endpoint string that begins with `ssl:`, optionally after `haproxy:`.
    :param reactor: the real reactor.
    :raise Exception: of any type of Twisted and OpenSSL, if the files cannot be used.
    :ivar name: interface and port, `*:443` for all interfaces.
    :ivar expiry: earliest expiry of the certificates sent.
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
        Read the files; open connections are not affected.

        :return: whether the certificate has changed.
        :raise Exception: as above; nothing has changed.
        """
        seen: dict[str, Any] = {}

        def record(port: int, factory: Any, **options: Any) -> None:
            seen.update(options, port=port)

        serverFromString(cast(Any, SimpleNamespace(listenSSL=record)), self._endpoint).listen(Factory())
        options = seen["contextFactory"]
        if not options.extraCertChain:
            options.extraCertChain = self._following(options.certificate)
        # Detects what OpenSSL rejects now rather than at the first connection.
        options.getContext().set_cipher_list(TLS12_CIPHERS)
        shown = [one.to_cryptography() for one in (options.certificate, *(options.extraCertChain or ()))]
        before = getattr(self, "_shown", None)
        self.name = f"{seen['interface'] or '*'}:{seen['port']}"
        self._options, self._shown = options, shown
        self.expiry = min(one.not_valid_after_utc for one in shown)
        return shown != before

    def _following(self, first: crypto.X509) -> list[crypto.X509]:
        """
        Certificates that follow the first one in its file.

        :raise ValueError: the file was modified in between.
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

    def listenSSL(self, port: int, factory: Any, contextFactory: Any, **options: Any) -> Any:  # noqa: N802, N803
        """Called by the endpoint, which has read the files again."""
        return self._reactor.listenTCP(port, TLSServerFactory(self, factory, self._reactor), **options)


_log = Logger()

# Backlog of connections, for example until the store is open; the kernel has a limit of its own.
_LISTEN_BACKLOG = 1024


@contextmanager
def translate_listen_errors(endpoint: str) -> Iterator[None]:
    """
    Turn errors of an endpoint into one line for the operator.

    :raise StartupError: the address is in use or not local, or the certificate cannot be used.
    """
    try:
        yield
    except StartupError:
        raise
    except Exception as error:
        raise StartupError(f"cannot listen on {endpoint}: {_describe_listen_error(endpoint, error)}") from None


def _describe_listen_error(endpoint: str, error: Exception) -> str:
    """Endpoint types raise arbitrary exceptions, and OpenSSL's messages list its internal functions."""
    if isinstance(error, CannotListenError | OSError):
        reason = getattr(error, "socketError", error)
        file = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        return f"{file}{getattr(reason, 'strerror', None) or reason}"
    if endpoint.startswith("systemd:") and isinstance(error, IndexError | KeyError):
        return "systemd passed no such socket; enable mediatord.socket, with a ListenStream= for it"
    return "cannot use its key or certificate" if _is_tls_endpoint(endpoint) else "invalid endpoint string"


def _is_tls_endpoint(endpoint: str) -> bool:
    return endpoint.removeprefix(HAPROXY_PREFIX).startswith("ssl:")


def add_backlog(endpoint: str) -> str:
    """Set the backlog of an endpoint string, where its type has that parameter."""
    kind, given, named = parse_endpoint_string(endpoint.removeprefix(HAPROXY_PREFIX))
    # A positional argument may be the backlog.
    is_open = kind in ("tcp", "tcp6", "ssl", "unix") and len(given) < 2 and "backlog" not in named
    return f"{endpoint}:backlog={_LISTEN_BACKLOG}" if is_open else endpoint


class Listener(Service):
    """
    Service for one endpoint of the site.

    :param endpoint: a Twisted endpoint string.
    :param factory: an IProtocolFactory.
    :param reactor: may also be one that listens on inherited sockets.
    :raise StartupError: the certificate of an `ssl:` endpoint cannot be used.
    :ivar certificate: None for endpoints without TLS.
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

        :raise StartupError: the address is in use or not local.
        """
        super().privilegedStartService()
        with translate_listen_errors(self._endpoint):
            self._service.privilegedStartService()

    def startService(self) -> None:
        """Bind, if not done yet."""
        super().startService()
        self._service.startService()

    def hold(self) -> None:
        """Stop accepting connections; they wait in the backlog."""
        self._switch("stopReading")

    def resume_accepting(self) -> None:
        """Accept connections again."""
        self._switch("startReading")

    def _switch(self, what: str) -> None:
        # In-memory ports of tests lack these methods.
        getattr(self._port, what, lambda: None)()

    @property
    def _port(self) -> Any:
        # The service has no public attribute for its port.
        return getattr(self._service._waitingForPort, "result", None)

    @property
    def address(self) -> Any:
        """Address of the port; None while it does not listen."""
        try:
            return self._port.getHost()
        except (AttributeError, OSError):  # no port, or a closed socket
            return None

    @property
    def speaks_tls(self) -> bool:
        """Whether the endpoint uses TLS."""
        return _is_tls_endpoint(self._endpoint)

    @property
    def is_proxied(self) -> bool:
        """Whether connections start with a PROXY header."""
        return self._endpoint.startswith(HAPROXY_PREFIX)

    def renew(self) -> bool:
        """
        Reload the certificate, if any, and log its expiry.

        :return: whether it was readable; if not, the previous one stays in use.
        """
        if self.certificate is None:
            return True
        name = self.certificate.name
        try:
            is_new = self.certificate.read()
        except Exception as error:
            _log.error(
                "keeping the current certificate of {name}: {why}",
                name=name,
                why=_describe_listen_error(self._endpoint, error),
            )
            return False
        _log.info(
            "certificate of {name} {what}, valid until {expiry:%Y-%m-%d %H:%M} UTC",
            name=name,
            what="renewed" if is_new else "unchanged",
            expiry=self.certificate.expiry,
        )
        return True

    def stopService(self) -> Deferred[None]:
        """Stop listening."""
        super().stopService()
        return maybeDeferred(self._service.stopService)
