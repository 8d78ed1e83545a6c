"""
The node-to-node listener: stock Twisted, with limits on all that a stranger could send there.

Whoever does not show a sealed request soon is cut off; nobody is told more than 401.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from io import BytesIO
from typing import Any, cast

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IAddress, IDelayedCall, IReactorTime
from twisted.internet.protocol import connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.http import HTTPChannel
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Request, Site

from mediatord.cluster.hint import MAX_BODY
from mediatord.cluster.places import Places, origin_of
from mediatord.cluster.sealing import plain
from mediatord.cluster.serving import Answer
from mediatord.faults import without_text

_log = Logger()

# Bytes of a request line with all headers.
MAX_HEAD = 4096
MAX_HEADERS = 32
# A stranger's connection lasts no longer, and no request may take longer to arrive.
PATIENCE = 10.0
# More than a node keeps an idle connection.
IDLE_SECONDS = 60.0

Serve = Callable[[str, str, dict[str, str], bytes, Callable[[], None]], Awaitable[Answer]]


class NodeChannel(HTTPChannel):
    """A connection of another node, or of a stranger until it has shown to be one."""

    MAX_LENGTH = MAX_HEAD
    totalHeadersSize = MAX_HEAD
    maxHeaders = MAX_HEADERS

    _deadline: IDelayedCall | None = None

    def connectionMade(self) -> None:
        """Somebody is there."""
        super().connectionMade()
        self.wait()

    def wait(self) -> None:
        """Whatever is to come has to be there soon."""
        self.heard()
        self._deadline = self._site.clock.callLater(PATIENCE, self._too_late)

    def known(self) -> None:
        """It has shown to be a node's, once more."""
        self.heard()
        self._site.places.known(self)

    def heard(self) -> None:
        """What was waited for has come, or nothing will."""
        if self._deadline is not None and self._deadline.active():
            self._deadline.cancel()
        self._deadline = None

    @property
    def silent(self) -> bool:
        """Whether no whole request is waiting for an answer."""
        return not self._handlingRequest

    def end(self) -> None:
        """Cut it off."""
        if self.transport is not None:
            cast(Any, self.transport).abortConnection()

    def dataReceived(self, data: bytes) -> None:
        """Called with what comes."""
        if self._deadline is None and self.silent:
            self.wait()
        super().dataReceived(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """They are gone."""
        self.heard()
        self._site.places.leave(self)
        super().connectionLost(reason)

    def _too_late(self) -> None:
        self._deadline = None
        self.end()

    @property
    def _site(self) -> NodeSite:
        site: NodeSite = cast(Any, self).site
        return site


class NodeRequest(Request):
    """A request whose body is never longer than any that a node makes."""

    _received = 0

    def gotLength(self, length: int | None) -> None:
        """Called once the headers are there."""
        self.content = BytesIO()
        if length is not None and length > MAX_BODY:
            self._refuse()

    def handleContentChunk(self, data: bytes) -> None:
        """Called with every piece of the body."""
        self._received += len(data)
        if self._received > MAX_BODY:
            self._refuse()
        else:
            super().handleContentChunk(data)

    def _refuse(self) -> None:
        cast(Any, self.channel).transport.abortConnection()


class NodeSite(Site):
    """
    What the node-to-node listener serves.

    :param serve: answers a request, given its method, path, headers that concern seals, body, and what is to be
        called as soon as it has shown to be a node's.
    :ivar places: the connections that are open.
    """

    protocol = NodeChannel  # type: ignore[assignment]  # instead of a proxy that could speak HTTP/2
    requestFactory = NodeRequest
    noisy = False

    def __init__(self, clock: IReactorTime, serve: Serve) -> None:
        super().__init__(_Door(serve), reactor=clock, timeout=IDLE_SECONDS, parsePOSTFormSubmission=False)
        self.clock = clock
        self.serve = serve
        self.places = Places()

    def buildProtocol(self, addr: IAddress | None) -> Any:
        """A connection, unless there are too many."""
        origin = origin_of(getattr(addr, "host", "") or "")
        if not self.places.make_room(origin):
            return None
        channel: Any = super().buildProtocol(cast(Any, addr))
        self.places.enter(channel, origin)
        return channel

    def stopFactory(self) -> None:
        """Nobody listens any more: end what is still open."""
        super().stopFactory()
        for channel in self.places:
            channel.end()

    def log(self, request: object) -> None:
        """Nothing: there is one for every few messages."""


class _Door(Resource):
    isLeaf = True

    def __init__(self, serve: Serve) -> None:
        super().__init__()
        self._serve = serve

    def render(self, request: Any) -> int:
        """Every method and path: what is served is said in the answer."""
        answered = Deferred.fromCoroutine(self._answer(request))
        request.notifyFinish().addErrback(lambda _: answered.cancel())
        answered.addCallback(lambda answer: _write(request, answer))
        answered.addErrback(lambda failure: failure.trap(CancelledError))
        answered.addErrback(lambda failure: _fail(request, failure))
        return NOT_DONE_YET

    async def _answer(self, request: Any) -> Answer:
        method, path = request.method.decode("latin-1"), request.uri.decode("latin-1")
        body = request.content.read()
        return await self._serve(method, path, plain(request.requestHeaders), body, request.channel.known)


def _write(request: Any, answer: Answer) -> None:
    request.setResponseCode(answer.status)
    request.responseHeaders.removeHeader("Server")
    for name, value in answer.headers.items():
        request.setHeader(name, value)
    request.setHeader("Content-Type", "application/json")
    request.setHeader("Content-Length", str(len(answer.body)))
    if not answer.known:
        request.channel.persistent = False
        request.setHeader("Connection", "close")
    request.write(answer.body)
    request.finish()


def _fail(request: Any, failure: Failure) -> None:
    _log.failure("serving another node failed", without_text(failure))
    request.channel.transport.abortConnection()
