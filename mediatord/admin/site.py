"""
Who may see the page: those who know the token.

The listener of the page: every path wants the token, and says nothing without it.
"""

from __future__ import annotations

import binascii
import hmac
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import IO, Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IPushProducer, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.resource import IResource, Resource
from twisted.web.server import NOT_DONE_YET, Request, Site
from zope.interface import implementer

from mediatord.admin.page import build_security_policy, render_status_page
from mediatord.admin.status import DaemonStatus, StatusCollector, render_status_json
from mediatord.admin.status_sources import REPORT_INDEX, AnalysisReportFile, ReportDirectory
from mediatord.failure_logging import redact_failure
from mediatord.http.client_address import ClientAddressResolver
from mediatord.http.flow_control import ResponseBudget, RoundRobinScheduler
from mediatord.http.memory_reclaimer import MemoryReclaimer
from mediatord.http.resources import get_addresses
from mediatord.http.site import BackpressureHTTPChannel
from mediatord.private_file import PrivateFileError, read_private_file
from mediatord.ratelimit.sliding_window import SlidingWindowLimiter

MIN_TOKEN_LENGTH = 32
# Wrong tokens that one address may try in a minute, and addresses that are remembered.
_MAX_FAILED_ATTEMPTS = 10
_MAX_TRACKED_ADDRESSES = 1_000


@dataclass(frozen=True, slots=True)
class AdminToken:
    """:param digest: of the token, so that comparing takes as long for one of any length."""

    digest: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: bytes) -> AdminToken:
        """Of the token itself."""
        return cls(sha256(secret).digest())

    def is_in(self, authorization: bytes) -> bool:
        """Whether the value of an `Authorization` header has it: as Bearer, or as the password of Basic."""
        return hmac.compare_digest(sha256(_extract_secret(authorization)).digest(), self.digest)


def read_admin_token(path: Path) -> AdminToken:
    """
    The token in a file; white space around it does not count.

    :raise PrivateFileError: it cannot be read, is open to others, or too short to be a secret.
    """
    secret = read_private_file(path).strip()
    if len(secret) < MIN_TOKEN_LENGTH:
        raise PrivateFileError(
            f"{path} holds less than {MIN_TOKEN_LENGTH} characters; type: openssl rand -hex 32 > {path}"
        )
    if not (secret.isascii() and secret.decode("ascii").isprintable()) or b" " in secret:
        raise PrivateFileError(
            f"{path} has to hold one line of ASCII without spaces; type: openssl rand -hex 32 > {path}"
        )
    return AdminToken.of(secret)


def _extract_secret(authorization: bytes) -> bytes:
    """Empty where there is none, which no token is."""
    scheme, _, value = authorization.strip().partition(b" ")
    value = value.strip()
    if scheme.lower() == b"bearer":
        return value
    if scheme.lower() != b"basic":
        return b""
    try:
        return b64decode(value, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


@dataclass(frozen=True, slots=True)
class AccessDenial:
    """
    A client that is not let in.

    :param wait: seconds until it may try again; 0 when it may at once.
    """

    wait: int = 0


class AdminAuthenticator:
    """Lets in who shows the token, and has an address that shows wrong ones wait, whatever it shows then."""

    def __init__(self, clock: IReactorTime, token: AdminToken) -> None:
        self._clock = clock
        self._token = token
        self._wrong = SlidingWindowLimiter(_MAX_FAILED_ATTEMPTS, max_keys=_MAX_TRACKED_ADDRESSES)

    def use(self, token: AdminToken) -> None:
        """From now on it is this one."""
        self._token = token

    def authenticate(self, rate_limit_key: str, authorization: bytes | None) -> AccessDenial | None:
        """
        None when the client may come in.

        :param payer: address that tries are counted for.
        :param authorization: value of the header; None without one, which browsers ask their user for then.
        """
        now = self._clock.seconds()
        wait = self._wrong.wait(rate_limit_key, now)
        if wait:
            return AccessDenial(wait)
        if authorization is None:
            return AccessDenial()
        if self._token.is_in(authorization):
            return None
        self._wrong.admit(rate_limit_key, now)
        return AccessDenial()


_log = Logger()

# Connections of all clients together, and bytes of a body, which nothing here has a use for.
_MAX_CONNECTIONS = 64
_MAX_BODY_BYTES = 65_536
# Bytes of a file that are read at a time.
_FILE_CHUNK_BYTES = 65_536
_HTML_TYPE = b"text/html; charset=utf-8"
_TEXT_TYPE = b"text/plain; charset=utf-8"
_DENY_ALL_POLICY = b"default-src 'none'; frame-ancestors 'none'"
# As the reports have it in themselves: their style is in each, and pictures are part of the page.
_REPORT_POLICY = (
    b"default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_COMMON_HEADERS = (
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
class AdminContext:
    """What the resources work with. :param reports: None where there are none to be shown."""

    clock: IReactorTime
    door: AdminAuthenticator
    peers: ClientAddressResolver
    overviews: StatusCollector
    reports: ReportDirectory | None


class _AdminResource(Resource):
    isLeaf = True

    def __init__(self, context: AdminContext) -> None:
        super().__init__()
        self._context = context

    def render(self, request: Request) -> int:
        """Let nobody in without the token, whatever is asked for, and have nothing changed."""
        rate_limit_key = self._context.peers.rate_limit_key(*get_addresses(request))
        denial = self._context.door.authenticate(rate_limit_key, request.getHeader(b"authorization"))
        if denial is not None and denial.wait:
            request.setHeader(b"Retry-After", b"%d" % denial.wait)
            return send_admin_response(request, 429, b"too many attempts\n")
        if denial is not None:
            request.setHeader(b"WWW-Authenticate", _CHALLENGE)
            return send_admin_response(request, 401, b"unauthorized\n")
        if request.method not in (b"GET", b"HEAD"):
            request.setHeader(b"Allow", b"GET, HEAD")
            return send_admin_response(request, 405, b"method not allowed\n")
        return self.show(request)

    def show(self, request: Request) -> int:
        """Answer somebody who may see it."""
        return send_admin_response(request, 404, b"not found\n")


class _PageRedirect(_AdminResource):
    def show(self, request: Request) -> int:
        """The page is at one address, relative to which its links are."""
        request.setHeader(b"Location", b"../admin" if request.path == b"/admin/" else b"admin")
        return send_admin_response(request, 302, b"")


class _StatusResource(_AdminResource):
    """
    Something that is made from an overview.

    :param made: its bytes; told whether the page is to be asked for again by itself, and the time.
    """

    def __init__(
        self, context: AdminContext, content_type: bytes, made: Callable[[DaemonStatus, bool, float], bytes]
    ) -> None:
        super().__init__(context)
        self._content_type = content_type
        self._made = made

    def show(self, request: Request) -> int:
        gone: list[Failure] = []
        request.notifyFinish().addErrback(gone.append)
        refreshing = (request.args or {}).get(b"refresh") != [b"0"]

        async def answer() -> None:
            try:
                overview = await self._context.overviews.latest()
                made = self._made(overview, refreshing, self._context.clock.seconds())
                status, content_type = 200, self._content_type
            except Exception:
                _log.failure("making the status page failed", redact_failure())
                status, made, content_type = 500, b"internal error\n", _TEXT_TYPE
            if not gone:
                policy = build_security_policy() if content_type == _HTML_TYPE else _DENY_ALL_POLICY
                send_admin_response(request, status, made, content_type, policy)

        Deferred.fromCoroutine(answer())
        return NOT_DONE_YET


def _render_status_page(overview: DaemonStatus, refreshing: bool, now: float) -> bytes:
    return render_status_page(overview, refreshing=refreshing, now=now)


class _ReportResource(_AdminResource):
    def show(self, request: Request) -> int:
        """A file of the report of a day; the page itself at the address of the day, too."""
        reports = self._context.reports
        named = [part.decode("latin-1") for part in cast("list[bytes]", request.postpath)]
        if len(named) != 2 or reports is None:
            return send_admin_response(request, 404, b"not found\n")
        found = reports.open(named[0], named[1] or REPORT_INDEX)
        return send_admin_response(request, 404, b"not found\n") if found is None else _send_file(request, found)


def _send_file(request: Request, found: AnalysisReportFile) -> int:
    """As fast as the client reads it."""
    _set_admin_head(request, 200, found.content_type, _REPORT_POLICY)
    request.setHeader(b"Content-Length", b"%d" % found.size)
    if request.method == b"HEAD":
        found.file.close()
        request.finish()
        return NOT_DONE_YET
    _FileProducer(request, found.file).start()
    return NOT_DONE_YET


@implementer(IPushProducer)
class _FileProducer:
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
            piece = self._file.read(_FILE_CHUNK_BYTES)
            if piece:
                self._request.write(piece)
            else:
                self._file.close()
                self._request.unregisterProducer()
                self._request.finish()

    def stopProducing(self) -> None:  # noqa: N802  Twisted's name
        """The client is gone."""
        self._file.close()


def send_admin_response(
    request: Request, status: int, body: bytes, content_type: bytes = _TEXT_TYPE, policy: bytes = _DENY_ALL_POLICY
) -> int:
    """Send a whole response."""
    _set_admin_head(request, status, content_type, policy)
    request.setHeader(b"Content-Length", b"%d" % len(body))
    if request.method != b"HEAD":
        request.write(body)
    request.finish()
    return NOT_DONE_YET


def _set_admin_head(request: Request, status: int, content_type: bytes, policy: bytes) -> None:
    request.setResponseCode(status, {429: b"Too Many Requests"}.get(status))
    for name, value in _COMMON_HEADERS:
        request.setHeader(name, value)
    request.setHeader(b"Content-Type", content_type)
    request.setHeader(b"Content-Security-Policy", policy)


class _AdminRootResource(_AdminResource):
    """The whole tree; what is not in it wants the token all the same."""

    isLeaf = False

    def __init__(self, context: AdminContext) -> None:
        super().__init__(context)
        self._page = _StatusResource(context, _HTML_TYPE, _render_status_page)
        self._json = _StatusResource(
            context, b"application/json", lambda overview, _, now: render_status_json(overview, now)
        )
        self._report = _ReportResource(context)
        self._elsewhere = _PageRedirect(context)
        self._nothing = _AdminResource(context)

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


class _AdminChannel(BackpressureHTTPChannel):
    def _respondToBadRequestAndDisconnect(self) -> None:  # noqa: N802  Twisted's name
        """Called when what came is no HTTP: say nothing more than that."""
        cast(Any, self.transport).write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        self.loseConnection()

    def connectionLost(self, reason: Failure) -> None:  # type: ignore[override]  # it always has one
        """The client is gone."""
        cast(Any, self).site.left()
        super().connectionLost(reason)


class _AdminRequest(Request):
    """A request whose body is not kept."""

    _received = 0

    def gotLength(self, length: int | None) -> None:
        """Called once the headers are there."""
        self.content = BytesIO()

    def handleContentChunk(self, data: bytes) -> None:
        """Called with every piece of the body."""
        self._received += len(data)
        if self._received > _MAX_BODY_BYTES:
            cast(Any, self.channel).transport.abortConnection()

    def process(self) -> None:
        """Called with a whole request. Twisted answers those about the server itself, without asking anybody."""
        if self.path == b"*":
            self.path = b"/*"
        super().process()


class AdminSite(Site):
    """A site without an access log, for a few clients at a time."""

    protocol = _AdminChannel  # type: ignore[assignment]  # instead of a proxy that could speak HTTP/2
    requestFactory = _AdminRequest
    noisy = False

    def __init__(self, context: AdminContext) -> None:
        super().__init__(_AdminRootResource(context), reactor=context.clock, parsePOSTFormSubmission=False)
        self.clock = context.clock
        self.memory = MemoryReclaimer(self.clock)
        self.scheduler = RoundRobinScheduler(self.clock)
        self.unread = ResponseBudget(released=self.memory.released)
        self._open = 0

    def buildProtocol(self, addr: object) -> Any:
        """None when there are too many connections."""
        if self._open >= _MAX_CONNECTIONS:
            return None
        self._open += 1
        return super().buildProtocol(cast(Any, addr))

    def left(self) -> None:
        """A connection is gone."""
        self._open -= 1

    def log(self, request: object) -> None:
        """Nothing: the token may be in a line that somebody keeps."""
