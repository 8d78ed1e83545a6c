"""Requests to other nodes: sealed, over connections that are kept, with a limit on everything that comes back."""

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

from mediatord.cluster.hint import MAX_BODY, PROBE_PATH
from mediatord.cluster.sealing import NotSealed, Sealing, plain
from mediatord.egress import read_body
from mediatord.interfaces import Node

TIMEOUT = 2.0
# Requests to one node at the same time.
AT_ONCE = 2
# A connection that is not used is closed before the other side would do it.
IDLE_SECONDS = 30

_OK, _UNAUTHORIZED, _GONE = 200, 401, 410
# In URLs nodes go by their boots, which is also what connections are kept by.
_SUFFIX = ".node"
_CLIENTS = 256


class CallFailed(Exception):
    """A request that came to nothing this time: no connection, no answer in time, or one that is no node's."""


class NotThere(CallFailed):
    """Nobody listens at the address."""


class Replaced(NotThere):
    """
    A node listens there, but another one by now.

    :ivar boot: which.
    """

    def __init__(self, boot: str) -> None:
        super().__init__(boot)
        self.boot = boot


class Turned(CallFailed):
    """The other side does not take us for a node: its secret is another one, or its clock."""


class Calling:
    """
    Asks other nodes.

    :param boot: ours.
    """

    def __init__(self, reactor: Any, boot: str, sealing: Sealing, *, timeout: float = TIMEOUT) -> None:
        self._reactor = reactor
        self._boot = boot
        self._sealing = sealing
        self._timeout = timeout
        self._pool = HTTPConnectionPool(reactor)
        self._pool.maxPersistentPerHost = AT_ONCE
        self._pool.cachedConnectionTimeout = IDLE_SECONDS
        self._pool.retryAutomatically = False
        self._client_of = lru_cache(_CLIENTS)(self._make_client)
        self._talks: set[Deferred[bytes]] = set()
        self._over = False

    async def ask(self, node: Node, path: str, body: bytes) -> bytes:
        """
        POST to a node and fire with the body of its answer.

        :raise NotThere: nobody listens there.
        :raise Replaced: another node does.
        :raise Turned: it does not know us for a node.
        :raise CallFailed: anything else.
        """
        if self._over:
            raise CallFailed
        talk = Deferred.fromCoroutine(self._talk(node, path, body))
        self._talks.add(talk)
        try:
            return await talk.addTimeout(self._timeout, self._reactor)
        except CallFailed:
            raise
        except CancelledError:
            if self._over:
                raise CallFailed from None
            raise
        except ConnectError as error:
            if isinstance(error, Refused) or error.osError == errno.ENOENT:
                raise NotThere from None
            raise CallFailed from None
        except Exception:  # Whatever a connection can come to in three libraries is one outcome.
            raise CallFailed from None
        finally:
            self._talks.discard(talk)

    async def probe(self, node: Node) -> str | None:
        """
        The boot that is where a node said it is; None when nobody answers there as a node.

        :raise CancelledError: it was given up.
        """
        try:
            await self.ask(node, PROBE_PATH, b"{}")
        except Replaced as other:
            return other.boot
        except CallFailed:
            return None
        return node.boot

    def close(self) -> Deferred[None]:
        """Give up what is under way, begin nothing more, and let go of idle connections; fires when they are gone."""
        self._over = True
        for talk in tuple(self._talks):
            talk.cancel()
        closed: Deferred[None] = self._pool.closeCachedConnections()
        return closed

    def _make_client(self, node: Node) -> HTTPClient:
        endpoint = _Endpoint(clientFromString(self._reactor, node.address))
        return HTTPClient(_PlainAgent(Agent.usingEndpointFactory(self._reactor, endpoint, self._pool)))

    async def _talk(self, node: Node, path: str, body: bytes) -> bytes:
        stamp = self._sealing.stamp(self._boot, node.boot)
        headers = self._sealing.seal_request(stamp, "POST", path, body)
        response = await self._client_of(node).request(
            "POST",
            f"http://{node.boot.lower()}{_SUFFIX}{path}",
            headers=Headers({name: [value] for name, value in headers.items()}),
            data=body,
            allow_redirects=False,
            unbuffered=True,
            reactor=self._reactor,
        )
        answer, whole = await read_body(response, MAX_BODY)
        if response.code == _UNAUTHORIZED:
            raise Turned
        try:
            boot = self._sealing.open_response(stamp, plain(response.headers), response.code, answer)
        except NotSealed:
            raise CallFailed from None
        if response.code == _GONE and boot != node.boot:
            raise Replaced(boot)
        if response.code != _OK or boot != node.boot or not whole:
            raise CallFailed
        return answer


@implementer(IAgentEndpointFactory, IStreamClientEndpoint)
class _Endpoint:
    """Connects to one node, whatever the URL, without a line in the log each time."""

    def __init__(self, endpoint: IStreamClientEndpoint) -> None:
        self._endpoint = endpoint

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:  # noqa: N802  the interface's name
        return self

    def connect(self, protocolFactory: Any) -> Deferred[IProtocol]:  # noqa: N803  the interface's name
        protocolFactory.noisy = False
        return self._endpoint.connect(protocolFactory)


@implementer(IAgent)
class _PlainAgent:
    """Has treq neither unpack nor keep anything that an answer brings."""

    def __init__(self, agent: IAgent) -> None:
        self._agent = agent

    def request(
        self,
        method: bytes,
        uri: bytes,
        headers: Headers | None = None,
        bodyProducer: IBodyProducer | None = None,  # noqa: N803  the interface's name
    ) -> Deferred[IResponse]:
        return self._agent.request(method, uri, headers, bodyProducer).addCallback(_bare)


def _bare(response: Any) -> Any:
    for name in (b"Content-Encoding", b"Set-Cookie"):
        response.headers.removeHeader(name)
    return response
