"""
Connections to strangers: guarded when they are made, metered while they last, and cut off when they linger.

:mod:`mediatord.outbound` speaks HTTP over them.
"""

from __future__ import annotations

import re
from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP6ClientEndpoint, wrapClientTLS
from twisted.internet.error import ConnectError
from twisted.internet.interfaces import (
    IAddress,
    IDelayedCall,
    IHostResolution,
    IProtocol,
    IProtocolFactory,
    IResolutionReceiver,
    IStreamClientEndpoint,
)
from twisted.internet.protocol import Protocol, connectionDone
from twisted.protocols.policies import ProtocolWrapper, WrappingFactory
from twisted.python.failure import Failure
from twisted.web.client import URI, BrowserLikePolicyForHTTPS, ResponseDone
from twisted.web.http import PotentialDataLoss
from twisted.web.iweb import IAgentEndpointFactory, IResponse
from zope.interface import implementer

from mediatord.addresses import AddressGuard

# Status line, headers and chunk sizes: what is read beyond the body.
_OVERHEAD = 65_536
_MAX_ATTEMPTS = 4
_ATTEMPT_SECONDS = 2.0
# How long a peer has to answer that we hang up; over TLS it could otherwise keep the socket for ever.
_HANG_UP_SECONDS = 2.0

_MAX_NAME = 253
# What the platform's resolver takes without complaint, addresses in any notation included.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?|[0-9A-Fa-f:]+(?:[0-9.]+)?")


class OutboundError(Exception):
    """
    A request that had no response.

    :param reason: one word of our own; nothing that came from outside.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class OutboundRefused(OutboundError):
    """The address is off limits, or no address at all: there is no use in trying again."""


class OutboundFailed(OutboundError):
    """It could not be reached, or did not answer in a way that can be used."""


class GuardedEndpoints:
    """Makes connections to addresses that the guard permits, and knows which of them are open."""

    def __init__(self, reactor: Any, guard: AddressGuard, tls: BrowserLikePolicyForHTTPS) -> None:
        """:param reactor: an IReactorTCP, IReactorTime and IReactorPluggableNameResolver."""
        self.reactor = reactor
        self.guard = guard
        self.tls = tls
        self._open: set[_Line] = set()
        self._closed: list[Deferred[None]] = []

    def reading_at_most(self, limit: int) -> _EndpointFactory:
        """An IAgentEndpointFactory whose connections are cut off after `limit` bytes and a margin for headers."""
        return _EndpointFactory(self, limit + _OVERHEAD)

    def opened(self, line: _Line) -> None:
        """Called by a connection that was made."""
        self._open.add(line)

    def closed(self, line: _Line) -> None:
        """Called by a connection that is gone."""
        self._open.discard(line)
        if not self._open:
            waiting, self._closed = self._closed, []
            for done in waiting:
                done.callback(None)

    def close(self) -> Deferred[None]:
        """Cut off all connections; fires when they are gone."""
        done: Deferred[None] = Deferred()
        if not self._open:
            done.callback(None)
            return done
        self._closed.append(done)
        for line in list(self._open):
            line.abortConnection()
        return done


@implementer(IAgentEndpointFactory)
class _EndpointFactory:
    def __init__(self, endpoints: GuardedEndpoints, allowance: int) -> None:
        self._endpoints = endpoints
        self._allowance = allowance

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:  # noqa: N802  the interface's name
        return _GuardedEndpoint(self._endpoints, uri, self._allowance)


@implementer(IStreamClientEndpoint)
class _GuardedEndpoint:
    """Resolves once, judges every address, and connects to those addresses and no others."""

    def __init__(self, endpoints: GuardedEndpoints, uri: URI, allowance: int) -> None:
        self._endpoints = endpoints
        self._uri = uri
        self._allowance = allowance

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:  # noqa: N803  the interface's name
        return Deferred.fromCoroutine(self._connect(protocolFactory))

    async def _connect(self, factory: IProtocolFactory) -> IProtocol:
        addresses = await self._resolve()
        if not all(self._endpoints.guard.permits(address.host) for address in addresses):
            raise OutboundRefused("AddressOffLimits")
        metered = _LineFactory(factory, self._endpoints, self._allowance)
        failure: Exception = OutboundFailed("NameUnknown")
        for address in addresses[:_MAX_ATTEMPTS]:
            try:
                line = await self._endpoint_at(address).connect(metered)
            except ConnectError as error:
                failure = error
            else:
                # The Agent talks to its own kind of protocol, not to what it is wrapped in.
                return cast(_Line, line).wrappedProtocol
        try:
            raise failure
        finally:
            del failure  # or the traceback would lead back to itself

    async def _resolve(self) -> list[Any]:
        """IPv4Address and IPv6Address values of twisted.internet.address."""
        name = self._uri.host.decode("ascii")
        if len(name) > _MAX_NAME or not _NAME.fullmatch(name):
            raise OutboundRefused("NotAHost")
        found = _Found()
        self._endpoints.reactor.nameResolver.resolveHostName(found, name, portNumber=self._uri.port)
        return await found.complete

    def _endpoint_at(self, address: Any) -> IStreamClientEndpoint:
        kind = TCP6ClientEndpoint if ":" in address.host else TCP4ClientEndpoint
        endpoint = kind(self._endpoints.reactor, address.host, self._uri.port, timeout=_ATTEMPT_SECONDS)
        if self._uri.scheme != b"https":
            return endpoint
        return wrapClientTLS(self._endpoints.tls.creatorForNetloc(self._uri.host, self._uri.port), endpoint)


@implementer(IResolutionReceiver)
class _Found:
    def __init__(self) -> None:
        self.complete: Deferred[list[Any]] = Deferred()
        self._addresses: list[Any] = []

    def resolutionBegan(self, resolutionInProgress: IHostResolution) -> None:  # noqa: N802, N803
        """Nothing to prepare; the platform's resolution cannot be cancelled."""

    def addressResolved(self, address: IAddress) -> None:  # noqa: N802
        self._addresses.append(address)

    def resolutionComplete(self) -> None:  # noqa: N802
        self.complete.callback(self._addresses)


class _Line(ProtocolWrapper):
    """A connection that is cut off when it brings too much, or does not end when we have hung up."""

    factory: _LineFactory

    def __init__(self, factory: _LineFactory, wrapped: IProtocol) -> None:
        super().__init__(factory, wrapped)
        self._left = factory.allowance
        self._patience: IDelayedCall | None = None

    def connectionMade(self) -> None:
        self.factory.endpoints.opened(self)

    def dataReceived(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            self.abortConnection()
        else:
            super().dataReceived(data)

    def loseConnection(self) -> None:
        super().loseConnection()
        if self._patience is None:
            self._patience = self.factory.endpoints.reactor.callLater(_HANG_UP_SECONDS, self.abortConnection)

    def abortConnection(self) -> None:  # noqa: N802  the transport's name
        cast(Any, self.transport).abortConnection()  # TCP and TLS both have it, ITransport has not

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self._patience is not None and self._patience.active():
            self._patience.cancel()
        super().connectionLost(reason)
        self.factory.endpoints.closed(self)


class _LineFactory(WrappingFactory[_Line]):
    protocol = _Line
    noisy = False

    def __init__(self, wrapped: IProtocolFactory, endpoints: GuardedEndpoints, allowance: int) -> None:
        super().__init__(wrapped)
        self.endpoints = endpoints
        self.allowance = allowance


def read_body(response: IResponse, limit: int) -> Deferred[tuple[bytes, bool]]:
    """The first `limit` bytes of a body, and whether that was all of it; the rest is not waited for."""
    reader = _Reader(limit)
    response.deliverBody(reader)
    return reader.finished


class _Reader(Protocol):
    def __init__(self, limit: int) -> None:
        self.finished: Deferred[tuple[bytes, bool]] = Deferred(lambda _: self._hang_up())
        self._limit = limit
        self._body = bytearray()

    def dataReceived(self, data: bytes) -> None:
        if self.finished.called:
            return
        self._body += data[: self._limit + 1 - len(self._body)]
        if len(self._body) > self._limit:
            self.finished.callback((bytes(self._body[: self._limit]), False))
            self._hang_up()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self.finished.called:
            return
        # Without a length, the end of the connection is the end of the body.
        if reason.check(ResponseDone, PotentialDataLoss):
            self.finished.callback((bytes(self._body), True))
        else:
            self.finished.errback(reason)

    def _hang_up(self) -> None:
        if self.transport is not None:
            self.transport.loseConnection()
