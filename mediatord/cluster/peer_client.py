"""Authenticated requests to other nodes, over persistent connections, with limits on the responses."""

from __future__ import annotations

import errno
from functools import lru_cache
from typing import Any

from treq.client import HTTPClient
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import clientFromString
from twisted.internet.error import ConnectError
from twisted.internet.error import ConnectionRefusedError as Refused
from twisted.internet.interfaces import IProtocol, IStreamClientEndpoint
from twisted.web.client import URI, Agent, HTTPConnectionPool
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgent, IAgentEndpointFactory, IBodyProducer, IResponse
from zope.interface import implementer

from mediatord.cluster.peer_protocol import (
    MAX_BODY_BYTES,
    PROBE_PATH,
    MessageAuthenticationError,
    MessageAuthenticator,
    extract_authentication_headers,
)
from mediatord.net.outbound_http import read_body
from mediatord.store.interfaces.cluster import ClusterNode

CALL_TIMEOUT = 2.0
# Concurrent requests to one node.
MAX_CALLS_PER_PEER = 2
# Seconds; less than the other side keeps an idle connection.
IDLE_TIMEOUT = 30

_OK, _UNAUTHORIZED, _GONE = 200, 401, 410
# Host names in URLs are made from boots, so that the pool keeps connections by boot.
_HOST_SUFFIX = ".node"
_MAX_HTTP_CLIENTS = 256


class PeerCallFailed(Exception):
    """A request failed: no connection, no response in time, or none from a node."""


class PeerUnreachable(PeerCallFailed):
    """Nothing listens at the address."""


class PeerReplaced(PeerUnreachable):
    """
    Another node listens at the address by now.

    :ivar boot: of that node.
    """

    def __init__(self, boot: str) -> None:
        super().__init__(boot)
        self.boot = boot


class PeerCallRejected(PeerCallFailed):
    """The other node did not accept the authentication: its secret or its clock differs."""


class PeerClient:
    """
    Sends requests to other nodes.

    :param boot: of this node.
    """

    def __init__(
        self, reactor: Any, boot: str, authenticator: MessageAuthenticator, *, timeout: float = CALL_TIMEOUT
    ) -> None:
        self._reactor = reactor
        self._boot = boot
        self._authenticator = authenticator
        self._timeout = timeout
        self._pool = HTTPConnectionPool(reactor)
        self._pool.maxPersistentPerHost = MAX_CALLS_PER_PEER
        self._pool.cachedConnectionTimeout = IDLE_TIMEOUT
        self._pool.retryAutomatically = False
        self._client_of = lru_cache(_MAX_HTTP_CLIENTS)(self._make_client)
        self._in_flight: set[Deferred[bytes]] = set()
        self._is_closed = False

    async def call(self, node: ClusterNode, path: str, body: bytes) -> bytes:
        """
        POST to a node and return the body of its response.

        :raise PeerUnreachable: nothing listens at its address.
        :raise PeerReplaced: another node does.
        :raise PeerCallRejected: it did not accept the authentication.
        :raise PeerCallFailed: anything else.
        """
        if self._is_closed:
            raise PeerCallFailed
        pending = Deferred.fromCoroutine(self._send(node, path, body))
        self._in_flight.add(pending)
        try:
            return await pending.addTimeout(self._timeout, self._reactor)
        except PeerCallFailed:
            raise
        except CancelledError:
            if self._is_closed:
                raise PeerCallFailed from None
            raise
        except ConnectError as error:
            if isinstance(error, Refused) or error.osError == errno.ENOENT:
                raise PeerUnreachable from None
            raise PeerCallFailed from None
        except Exception:  # Three libraries raise errors of their own; they are one outcome.
            raise PeerCallFailed from None
        finally:
            self._in_flight.discard(pending)

    async def probe(self, node: ClusterNode) -> str | None:
        """
        The boot of the node that answers at a node's address; None if no node does.

        :raise CancelledError: it was cancelled.
        """
        try:
            await self.call(node, PROBE_PATH, b"{}")
        except PeerReplaced as other:
            return other.boot
        except PeerCallFailed:
            return None
        return node.boot

    def close(self) -> Deferred[None]:
        """Cancel requests, refuse new ones, and close idle connections; fires when they are closed."""
        self._is_closed = True
        for pending in tuple(self._in_flight):
            pending.cancel()
        closed: Deferred[None] = self._pool.closeCachedConnections()
        return closed

    def _make_client(self, node: ClusterNode) -> HTTPClient:
        endpoint = _PeerEndpoint(clientFromString(self._reactor, node.address))
        return HTTPClient(_PlainResponseAgent(Agent.usingEndpointFactory(self._reactor, endpoint, self._pool)))

    async def _send(self, node: ClusterNode, path: str, body: bytes) -> bytes:
        request_id = self._authenticator.new_request_id(self._boot, node.boot)
        headers = self._authenticator.authenticate_request(request_id, "POST", path, body)
        response = await self._client_of(node).request(
            "POST",
            f"http://{node.boot.lower()}{_HOST_SUFFIX}{path}",
            headers=Headers({name: [value] for name, value in headers.items()}),
            data=body,
            allow_redirects=False,
            unbuffered=True,
            reactor=self._reactor,
        )
        answer, is_whole = await read_body(response, MAX_BODY_BYTES)
        if response.code == _UNAUTHORIZED:
            raise PeerCallRejected
        try:
            boot = self._authenticator.verify_response(
                request_id, extract_authentication_headers(response.headers), response.code, answer
            )
        except MessageAuthenticationError:
            raise PeerCallFailed from None
        if response.code == _GONE and boot != node.boot:
            raise PeerReplaced(boot)
        if response.code != _OK or boot != node.boot or not is_whole:
            raise PeerCallFailed
        return answer


@implementer(IAgentEndpointFactory, IStreamClientEndpoint)
class _PeerEndpoint:
    """Connects to one node, whatever the URL says, without logging each connection."""

    def __init__(self, endpoint: IStreamClientEndpoint) -> None:
        self._endpoint = endpoint

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:  # noqa: N802  the interface's name
        return self

    def connect(self, protocolFactory: Any) -> Deferred[IProtocol]:  # noqa: N803  the interface's name
        protocolFactory.noisy = False
        return self._endpoint.connect(protocolFactory)


@implementer(IAgent)
class _PlainResponseAgent:
    """Keeps treq from decompressing responses and from storing cookies."""

    def __init__(self, agent: IAgent) -> None:
        self._agent = agent

    def request(
        self,
        method: bytes,
        uri: bytes,
        headers: Headers | None = None,
        bodyProducer: IBodyProducer | None = None,  # noqa: N803  the interface's name
    ) -> Deferred[IResponse]:
        return self._agent.request(method, uri, headers, bodyProducer).addCallback(_strip_response_headers)


def _strip_response_headers(response: Any) -> Any:
    for name in (b"Content-Encoding", b"Set-Cookie"):
        response.headers.removeHeader(name)
    return response
