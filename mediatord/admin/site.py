"""The listener of the page: every path wants the token, and says nothing without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import IO, Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IPushProducer, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.resource import IResource, Resource
from twisted.web.server import NOT_DONE_YET, Request, Site
from zope.interface import implementer

from mediatord.admin.access import Door
from mediatord.admin.document import status_json
from mediatord.admin.overview import Overview, Overviews
from mediatord.admin.page import page, security_policy
from mediatord.admin.reports import INDEX, ReportFile, Reports
from mediatord.faults import without_text
from mediatord.memory import MemoryReclaimer
from mediatord.web.peers import Peers
from mediatord.web.resources import addresses
from mediatord.web.round_robin import RoundRobinScheduler
from mediatord.web.site import PatientChannel
from mediatord.web.unread import Unread

_log = Logger()

# Connections of all clients together, and bytes of a body, which nothing here has a use for.
_CONNECTIONS = 64
_LARGEST_BODY = 65_536
# Bytes of a file that are read at a time.
_PIECE = 65_536
_HTML = b"text/html; charset=utf-8"
_TEXT = b"text/plain; charset=utf-8"
_NOTHING = b"default-src 'none'; frame-ancestors 'none'"
# As the reports have it in themselves: their style is in each, and pictures are part of the page.
_REPORT = (
    b"default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_ALWAYS = (
    (b"Server", b"mediatord"),
    (b"Cache-Control", b"no-store"),
    (b"X-Content-Type-Options", b"nosniff"),
    (b"X-Frame-Options", b"DENY"),
    (b"Referrer-Policy", b"no-referrer"),
    (b"Cross-Origin-Resource-Policy", b"same-origin"),
    (b"Cross-Origin-Opener-Policy", b"same-origin"),
)
_CHALLENGE = b'Basic realm="status", charset="UTF-8"'


@dataclass(frozen=True, slots=True)
class Office:
    """What the resources work with. :param reports: None where there are none to be shown."""

    clock: IReactorTime
    door: Door
    peers: Peers
    overviews: Overviews
    reports: Reports | None


class _Leaf(Resource):
    isLeaf = True

    def __init__(self, office: Office) -> None:
        super().__init__()
        self._office = office

    def render(self, request: Request) -> int:
        """Let nobody in without the token, whatever is asked for, and have nothing changed."""
        payer = self._office.peers.payer(*addresses(request))
        turned = self._office.door.knock(payer, request.getHeader(b"authorization"))
        if turned is not None and turned.wait:
            request.setHeader(b"Retry-After", b"%d" % turned.wait)
            return finish(request, 429, b"too many attempts\n")
        if turned is not None:
            request.setHeader(b"WWW-Authenticate", _CHALLENGE)
            return finish(request, 401, b"unauthorized\n")
        if request.method not in (b"GET", b"HEAD"):
            request.setHeader(b"Allow", b"GET, HEAD")
            return finish(request, 405, b"method not allowed\n")
        return self.show(request)

    def show(self, request: Request) -> int:
        """Answer somebody who may see it."""
        return finish(request, 404, b"not found\n")


class _Elsewhere(_Leaf):
    def show(self, request: Request) -> int:
        """The page is at one address, relative to which its links are."""
        request.setHeader(b"Location", b"../admin" if request.path == b"/admin/" else b"admin")
        return finish(request, 302, b"")


class _Overview(_Leaf):
    """
    Something that is made from an overview.

    :param made: its bytes; told whether the page is to be asked for again by itself, and the time.
    """

    def __init__(self, office: Office, content_type: bytes, made: Callable[[Overview, bool, float], bytes]) -> None:
        super().__init__(office)
        self._content_type = content_type
        self._made = made

    def show(self, request: Request) -> int:
        gone: list[Failure] = []
        request.notifyFinish().addErrback(gone.append)
        refreshing = (request.args or {}).get(b"refresh") != [b"0"]

        async def answer() -> None:
            try:
                overview = await self._office.overviews.latest()
                made = self._made(overview, refreshing, self._office.clock.seconds())
                status, content_type = 200, self._content_type
            except Exception:
                _log.failure("making the status page failed", without_text())
                status, made, content_type = 500, b"internal error\n", _TEXT
            if not gone:
                policy = security_policy() if content_type == _HTML else _NOTHING
                finish(request, status, made, content_type, policy)

        Deferred.fromCoroutine(answer())
        return NOT_DONE_YET


def _shown(overview: Overview, refreshing: bool, now: float) -> bytes:
    return page(overview, refreshing=refreshing, now=now)


class _Report(_Leaf):
    def show(self, request: Request) -> int:
        """A file of the report of a day; the page itself at the address of the day, too."""
        reports = self._office.reports
        named = [part.decode("latin-1") for part in cast("list[bytes]", request.postpath)]
        if len(named) != 2 or reports is None:
            return finish(request, 404, b"not found\n")
        found = reports.open(named[0], named[1] or INDEX)
        return finish(request, 404, b"not found\n") if found is None else _send(request, found)


def _send(request: Request, found: ReportFile) -> int:
    """As fast as the client reads it."""
    _put_head(request, 200, found.content_type, _REPORT)
    request.setHeader(b"Content-Length", b"%d" % found.size)
    if request.method == b"HEAD":
        found.file.close()
        request.finish()
        return NOT_DONE_YET
    _Sending(request, found.file).start()
    return NOT_DONE_YET


@implementer(IPushProducer)
class _Sending:
    """A file on its way. One of Twisted's own would be read by the global reactor."""

    def __init__(self, request: Request, file: IO[bytes]) -> None:
        self._request = request
        self._file = file
        self._paused = False

    def start(self) -> None:
        """Begin; the file is closed at the end, and the response finished."""
        self._request.registerProducer(self, True)
        self.resumeProducing()

    def pauseProducing(self) -> None:  # noqa: N802  Twisted's name
        """The client does not read so fast."""
        self._paused = True

    def resumeProducing(self) -> None:  # noqa: N802  Twisted's name
        """There is room again."""
        self._paused = False
        while not (self._paused or self._file.closed):
            piece = self._file.read(_PIECE)
            if piece:
                self._request.write(piece)
            else:
                self._file.close()
                self._request.unregisterProducer()
                self._request.finish()

    def stopProducing(self) -> None:  # noqa: N802  Twisted's name
        """The client is gone."""
        self._file.close()


def finish(request: Request, status: int, body: bytes, content_type: bytes = _TEXT, policy: bytes = _NOTHING) -> int:
    """Send a whole response."""
    _put_head(request, status, content_type, policy)
    request.setHeader(b"Content-Length", b"%d" % len(body))
    if request.method != b"HEAD":
        request.write(body)
    request.finish()
    return NOT_DONE_YET


def _put_head(request: Request, status: int, content_type: bytes, policy: bytes) -> None:
    request.setResponseCode(status, {429: b"Too Many Requests"}.get(status))
    for name, value in _ALWAYS:
        request.setHeader(name, value)
    request.setHeader(b"Content-Type", content_type)
    request.setHeader(b"Content-Security-Policy", policy)


class _Root(_Leaf):
    """The whole tree; what is not in it wants the token all the same."""

    isLeaf = False

    def __init__(self, office: Office) -> None:
        super().__init__(office)
        self._page = _Overview(office, _HTML, _shown)
        self._json = _Overview(office, b"application/json", lambda overview, _, now: status_json(overview, now))
        self._report = _Report(office)
        self._elsewhere = _Elsewhere(office)
        self._nothing = _Leaf(office)

    def getChild(self, path: bytes, request: Request) -> IResource:
        """By the whole path at once."""
        whole = [path, *cast("list[bytes]", request.postpath)]
        if whole[:2] == [b"admin", b"report"]:
            request.postpath = whole[2:]
            return self._report
        places: dict[tuple[bytes, ...], IResource] = {
            (b"",): self._elsewhere,
            (b"admin",): self._page,
            (b"admin", b""): self._elsewhere,
            (b"admin", b"status.json"): self._json,
        }
        return places.get(tuple(whole), self._nothing)


class _Channel(PatientChannel):
    def _respondToBadRequestAndDisconnect(self) -> None:  # noqa: N802  Twisted's name
        """Called when what came is no HTTP: say nothing more than that."""
        cast(Any, self.transport).write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        self.loseConnection()

    def connectionLost(self, reason: Failure) -> None:  # type: ignore[override]  # it always has one
        """The client is gone."""
        cast(Any, self).site.left()
        super().connectionLost(reason)


class _Request(Request):
    """A request whose body is not kept."""

    _received = 0

    def gotLength(self, length: int | None) -> None:
        """Called once the headers are there."""
        self.content = BytesIO()

    def handleContentChunk(self, data: bytes) -> None:
        """Called with every piece of the body."""
        self._received += len(data)
        if self._received > _LARGEST_BODY:
            cast(Any, self.channel).transport.abortConnection()

    def process(self) -> None:
        """Called with a whole request. Twisted answers those about the server itself, without asking anybody."""
        if self.path == b"*":
            self.path = b"/*"
        super().process()


class AdminSite(Site):
    """A site without an access log, for a few clients at a time."""

    protocol = _Channel  # type: ignore[assignment]  # instead of a proxy that could speak HTTP/2
    requestFactory = _Request
    noisy = False

    def __init__(self, office: Office) -> None:
        super().__init__(_Root(office), reactor=office.clock, parsePOSTFormSubmission=False)
        self.clock = office.clock
        self.memory = MemoryReclaimer(self.clock)
        self.scheduler = RoundRobinScheduler(self.clock)
        self.unread = Unread(released=self.memory.released)
        self._open = 0

    def buildProtocol(self, addr: object) -> Any:
        """None when there are too many connections."""
        if self._open >= _CONNECTIONS:
            return None
        self._open += 1
        return super().buildProtocol(cast(Any, addr))

    def left(self) -> None:
        """A connection is gone."""
        self._open -= 1

    def log(self, request: object) -> None:
        """Nothing: the token may be in a line that somebody keeps."""
