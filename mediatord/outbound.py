"""
The one way mediatord makes an HTTP request to an address that a stranger named: documents of did:web, answers and
messages for the HTTP endpoints of wallets (reference 3.3, 4.7 and 8.5).

A name is resolved once, every address it resolved to is judged, and the connection is made to one of those very
addresses; nothing is decided by how a host is written. TLS still checks the name. There are no cookies, no proxies,
no connections kept for later, and a limit on everything that is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import hyperlink
from treq.client import HTTPClient
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IConsumer
from twisted.web.client import Agent, BrowserLikePolicyForHTTPS
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgent, IBodyProducer, IResponse
from zope.interface import implementer

from mediatord.addresses import AddressGuard, Network
from mediatord.egress import GuardedEndpoints, OutboundError, OutboundFailed, OutboundRefused, read_body

__all__ = ["Outbound", "OutboundError", "OutboundFailed", "OutboundRefused", "Response"]

_MAX_URL = 8192
_MAX_REDIRECTS = 3
_MAX_ANSWER = 65_536
_TEMPORARY_REDIRECT = 307
_MAX_PORT = 65_535
# Where two readers could take a URL for two places it is none: no user information, be it empty, no IPv4 address in
# brackets, no empty label, no port in any but these digits.
_AUTHORITY = re.compile(r"(?:\[[0-9A-Fa-f]*:[0-9A-Fa-f:.]*\]|[^\[\]:@\\.]+(?:\.[^\[\]:@\\.]+)*\.?)(?::[0-9]{1,5})?")
_BEHIND_AUTHORITY = re.compile(r"[/?#]")


@dataclass(frozen=True, slots=True)
class Response:
    """
    What came back.

    :param content_type: the header as sent; empty without one.
    :param body: of an answer to a POST no more than the first 64 KiB.
    """

    status: int
    content_type: bytes
    body: bytes = field(repr=False)


class Outbound:
    """Requests to the addresses of strangers."""

    def __init__(self, reactor: Any, *, allow_private: Iterable[Network] = (), trust_root: Any = None) -> None:
        """
        :param reactor: an IReactorTCP, IReactorTime and IReactorPluggableNameResolver.
        :param allow_private: networks that may be connected to although they are not public.
        :param trust_root: an IOpenSSLTrustRoot; None for that of the platform.
        """
        self._reactor = reactor
        tls = BrowserLikePolicyForHTTPS() if trust_root is None else BrowserLikePolicyForHTTPS(trust_root)
        self._endpoints = GuardedEndpoints(reactor, AddressGuard(allow_private), tls)

    async def get(self, url: str, *, limit: int, timeout: float) -> Response:
        """
        GET over https; redirects are not followed.

        :param limit: of the body, in bytes; a larger one is a failure.
        :param timeout: seconds for everything, from resolving the name to the end of the body.
        :raise OutboundRefused: not an https URL, or of an address that is off limits; nothing was sent.
        :raise OutboundFailed: anything else.
        """
        target = _target(url, ("https",))
        headers = {b"Accept": [b"application/did+json, application/did+ld+json, application/json"]}
        response, _ = await self._exchange(_Request(b"GET", target, headers, limit), timeout)
        return response

    async def post(self, url: str, body: bytes, content_type: bytes, *, timeout: float) -> Response:
        """
        POST over http or https; at most 3 times a 307 is followed, each time judged anew, never from https to http.

        :param timeout: seconds for everything, redirects included.
        :raise OutboundRefused: not an http(s) URL, or one (or a redirect to one) of an address that is off limits.
        :raise OutboundFailed: anything else.
        """
        deadline = self._reactor.seconds() + timeout
        headers = {b"Content-Type": [content_type]}
        target = _target(url, ("http", "https"))
        for _ in range(1 + _MAX_REDIRECTS):
            request = _Request(b"POST", target, headers, _MAX_ANSWER, body)
            response, location = await self._exchange(request, deadline - self._reactor.seconds())
            if response.status != _TEMPORARY_REDIRECT or location is None:
                return response
            target = _redirected(target, location)
        raise OutboundFailed("TooManyRedirects")

    def close(self) -> Deferred[None]:
        """Cut off what is under way; fires when all connections are gone."""
        return self._endpoints.close()

    async def _exchange(self, request: _Request, timeout: float) -> tuple[Response, bytes | None]:
        talk = Deferred.fromCoroutine(self._talk(request))
        try:
            return await talk.addTimeout(max(0.0, timeout), self._reactor)
        except OutboundError:
            raise
        except Exception as error:  # Whatever a stranger's server can provoke in three libraries is one outcome.
            raise OutboundFailed(type(error).__name__) from None

    async def _talk(self, request: _Request) -> tuple[Response, bytes | None]:
        agent = Agent.usingEndpointFactory(self._reactor, self._endpoints.reading_at_most(request.limit))
        response = await (self._get(agent, request) if request.body is None else self._post(agent, request))
        body, whole = await read_body(response, request.limit)
        if not whole and request.method == b"GET":
            raise OutboundFailed("TooLong")
        answer = Response(response.code, _header(response, b"Content-Type") or b"", body)
        return answer, _header(response, b"Location")

    def _get(self, agent: IAgent, request: _Request) -> Deferred[Any]:
        # A client for each request: no cookie outlives it.
        client = HTTPClient(_PlainAgent(agent))
        try:
            return client.request(
                "GET",
                request.target.to_text(),
                headers=Headers(request.headers),
                allow_redirects=False,
                unbuffered=True,
                reactor=self._reactor,
            )
        except ValueError:  # a host that no name in the DNS can have
            raise OutboundRefused("NotAnAddress") from None

    def _post(self, agent: IAgent, request: _Request) -> Deferred[Any]:
        """Without treq, which has no way to IPv6 addresses and to names with underscores, as endpoints have them."""
        return agent.request(
            b"POST", request.target.to_text().encode("ascii"), Headers(request.headers), _Body(request.body or b"")
        )


@implementer(IAgent)
class _PlainAgent:
    """
    Keeps treq from asking for compressed answers, and from unpacking one that comes all the same.

    A stranger's server must not choose how much memory its answer takes.
    """

    def __init__(self, agent: IAgent) -> None:
        self._agent = agent

    def request(
        self,
        method: bytes,
        uri: bytes,
        headers: Headers | None = None,
        bodyProducer: IBodyProducer | None = None,  # noqa: N803  the interface's name
    ) -> Deferred[IResponse]:
        headers = Headers() if headers is None else headers.copy()
        headers.removeHeader(b"Accept-Encoding")
        return self._agent.request(method, uri, headers, bodyProducer).addCallback(_as_sent)


def _as_sent(response: Any) -> Any:
    response.headers.removeHeader(b"Content-Encoding")
    return response


@dataclass(frozen=True, slots=True)
class _Request:
    method: bytes
    target: hyperlink.URL
    headers: dict[bytes, list[bytes]]
    limit: int
    body: bytes | None = field(default=None, repr=False)


@implementer(IBodyProducer)
class _Body:
    def __init__(self, body: bytes) -> None:
        self._body = body
        self.length = len(body)

    def startProducing(self, consumer: IConsumer) -> Deferred[None]:  # noqa: N802  the interface's name
        consumer.write(self._body)
        return succeed(None)

    def stopProducing(self) -> None:
        """All was written at once."""

    def pauseProducing(self) -> None:
        """As :meth:`stopProducing`."""

    def resumeProducing(self) -> None:
        """As :meth:`stopProducing`."""


def _header(response: IResponse, name: bytes) -> bytes | None:
    values = response.headers.getRawHeaders(name)
    return values[0] if values else None


def _target(url: str, schemes: tuple[str, ...]) -> hyperlink.URL:
    """
    The URL in ASCII and without its fragment.

    :raise OutboundRefused: another scheme, user information, or no URL.
    """
    scheme, separator, rest = url.partition("://")
    if len(url) > _MAX_URL or not url.isprintable() or " " in url:
        raise OutboundRefused("NotAnAddress")
    if not _AUTHORITY.fullmatch(_BEHIND_AUTHORITY.split(rest, maxsplit=1)[0]):
        raise OutboundRefused("NotAnAddress")
    try:
        target = hyperlink.URL.from_text(scheme.lower() + separator + rest)
        # Asked of ASCII too, this would refuse IPv6 addresses and names with underscores.
        target = (target if url.isascii() else target.to_uri()).replace(fragment="")
    except ValueError:
        raise OutboundRefused("NotAnAddress") from None
    if target.scheme not in schemes or target.userinfo or not target.host or not 0 < (target.port or 0) <= _MAX_PORT:
        raise OutboundRefused("NotAnAddress")
    return target


def _redirected(target: hyperlink.URL, location: bytes) -> hyperlink.URL:
    try:
        url = target.click(location.decode("ascii")).to_text()
    except (ValueError, NotImplementedError):  # the latter: `http:` and no slash behind it
        raise OutboundFailed("BadRedirect") from None
    return _target(url, ("https",) if target.scheme == "https" else ("http", "https"))
