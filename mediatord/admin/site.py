"""The listener of the status page: authentication by a token, the page, its JSON, and the analysis reports."""

from __future__ import annotations

import binascii
import hmac
from base64 import b64decode
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import IO, Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IPushProducer, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Request, Site
from zope.interface import implementer

from mediatord.admin.page import build_security_policy, render_status_page
from mediatord.admin.status import DaemonStatus, StatusCollector, render_status_json
from mediatord.admin.status_sources import REPORT_INDEX, AnalysisReportFile, ReportDirectory
from mediatord.http.channel import BackpressureHTTPChannel
from mediatord.http.client_address import ClientAddressResolver, get_addresses
from mediatord.http.flow_control import ResponseBudget, RoundRobinScheduler
from mediatord.ratelimit.rate_limiter import SlidingWindowLimiter
from mediatord.runtime.failure_logging import redact_failure
from mediatord.runtime.memory_reclaimer import MemoryReclaimer
from mediatord.runtime.secret_files import SecretFileError, read_secret_file

MIN_TOKEN_LENGTH = 32
# Failed attempts of one address per minute, and number of addresses that are tracked.
_MAX_FAILED_ATTEMPTS = 10
_MAX_TRACKED_ADDRESSES = 1_000


def read_admin_token(path: Path) -> bytes:
    """
    Read a token from a file, without surrounding white space.

    :raise SecretFileError: it cannot be read, is accessible to others, too short, or not a line of ASCII.
    """
    secret = read_secret_file(path).strip()
    if len(secret) < MIN_TOKEN_LENGTH:
        raise SecretFileError(
            f"{path} is shorter than {MIN_TOKEN_LENGTH} characters; run: openssl rand -hex 32 > {path}"
        )
    if not (secret.isascii() and secret.decode("ascii").isprintable()) or b" " in secret:
        raise SecretFileError(
            f"{path}: expected one line of printable ASCII without spaces; run: openssl rand -hex 32 > {path}"
        )
    return secret


def _extract_secret(authorization: bytes) -> bytes:
    """The secret in an `Authorization` header; empty if there is none."""
    scheme, _, value = authorization.strip().partition(b" ")
    value = value.strip()
    match scheme.lower():
        case b"bearer":
            return value
        case b"basic":
            with suppress(binascii.Error):
                return b64decode(value, validate=True).partition(b":")[2]
    return b""


class AdminAuthenticator:
    """Checks tokens, and locks an address out for a while after too many wrong ones."""

    def __init__(self, clock: IReactorTime, token: bytes) -> None:
        self._clock = clock
        self.use(token)
        self._wrong = SlidingWindowLimiter(_MAX_FAILED_ATTEMPTS, max_keys=_MAX_TRACKED_ADDRESSES)

    def use(self, token: bytes) -> None:
        """Replace the token."""
        # Hashed, so that the time of a comparison does not depend on the length.
        self._digest = sha256(token).digest()

    def authenticate(self, rate_limit_key: str, authorization: bytes | None) -> int | None:
        """
        Authenticate a client; None on success, else seconds until it may try again.

        :param rate_limit_key: address whose attempts are counted.
        :param authorization: value of the header; None without one, which is no failed attempt.
        """
        now = self._clock.seconds()
        wait = self._wrong.wait(rate_limit_key, now)
        if wait or authorization is None:
            return wait
        if hmac.compare_digest(sha256(_extract_secret(authorization)).digest(), self._digest):
            return None
        self._wrong.admit(rate_limit_key, now)
        return 0


_log = Logger()

# Connections of all clients, and bytes of a request body, which is discarded.
_MAX_CONNECTIONS = 64
_MAX_BODY_BYTES = 65_536
_FILE_CHUNK_BYTES = 65_536
_HTML_TYPE = b"text/html; charset=utf-8"
_TEXT_TYPE = b"text/plain; charset=utf-8"
_DENY_ALL_POLICY = b"default-src 'none'; frame-ancestors 'none'"
# Reports contain their own style, and pictures as data URLs.
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


class AdminResource(Resource):
    """
    All pages; unknown paths require authentication, too.

    :param reports: None if no directory is configured.
    """

    isLeaf = True

    def __init__(
        self,
        collector: StatusCollector,
        authenticator: AdminAuthenticator,
        client_addresses: ClientAddressResolver,
        reports: ReportDirectory | None,
    ) -> None:
        super().__init__()
        self._collector = collector
        self._authenticator = authenticator
        self._client_addresses = client_addresses
        self._reports = reports

    def render(self, request: Request) -> int:
        """Authenticate every request, and allow GET and HEAD only."""
        rate_limit_key = self._client_addresses.rate_limit_key(*get_addresses(request))
        wait = self._authenticator.authenticate(rate_limit_key, request.getHeader(b"authorization"))
        if wait:
            request.setHeader(b"Retry-After", b"%d" % wait)
            return send_admin_response(request, 429, b"too many attempts\n")
        if wait is not None:
            request.setHeader(b"WWW-Authenticate", _CHALLENGE)
            return send_admin_response(request, 401, b"unauthorized\n")
        if request.method not in (b"GET", b"HEAD"):
            request.setHeader(b"Allow", b"GET, HEAD")
            return send_admin_response(request, 405, b"method not allowed\n")
        return self._get(request)

    def _get(self, request: Request) -> int:
        """Respond to an authenticated request."""
        match request.postpath:
            case [b"admin"]:
                is_refreshing = (request.args or {}).get(b"refresh") != [b"0"]
                return self._send_status(request, _HTML_TYPE, partial(render_status_page, refreshing=is_refreshing))
            case [b"admin", b"status.json"]:
                return self._send_status(request, b"application/json", render_status_json)
            case [b""] | [b"admin", b""]:  # the page has one URL, to which its links are relative
                request.setHeader(b"Location", b"../admin" if len(request.postpath) > 1 else b"admin")
                return send_admin_response(request, 302, b"")
            case [b"admin", b"report", day, name] if self._reports is not None:
                report = self._reports.open(day.decode("latin-1"), name.decode("latin-1") or REPORT_INDEX)
                if report is not None:
                    return _send_file(request, report)
        return send_admin_response(request, 404, b"not found\n")

    def _send_status(
        self, request: Request, content_type: bytes, render_status: Callable[[DaemonStatus, float], bytes]
    ) -> int:
        """Send a document that is rendered from the status. :param render_status: given it and the current time."""
        gone: list[Failure] = []
        request.notifyFinish().addErrback(gone.append)

        async def answer() -> None:
            try:
                status = await self._collector.latest()
                body = render_status(status, self._collector.clock.seconds())
                code, type_ = 200, content_type
            except Exception:
                _log.failure("rendering the status page failed", redact_failure())
                code, body, type_ = 500, b"internal error\n", _TEXT_TYPE
            if not gone:
                policy = build_security_policy() if type_ == _HTML_TYPE else _DENY_ALL_POLICY
                send_admin_response(request, code, body, type_, policy)

        Deferred.fromCoroutine(answer())
        return NOT_DONE_YET


def _send_file(request: Request, found: AnalysisReportFile) -> int:
    """Send a file with backpressure."""
    _set_admin_head(request, 200, found.content_type, _REPORT_POLICY, found.size)
    if request.method == b"HEAD":
        found.file.close()
        request.finish()
    else:
        _FileProducer(request, found.file).start()
    return NOT_DONE_YET


@implementer(IPushProducer)
class _FileProducer:
    """Produces a file. Twisted's own producers use the global reactor."""

    def __init__(self, request: Request, file: IO[bytes]) -> None:
        self._request = request
        self._file = file
        self._paused = False

    def start(self) -> None:
        """Start; the file is closed and the response finished at the end."""
        self._request.registerProducer(self, True)
        self.resumeProducing()

    def pauseProducing(self) -> None:  # noqa: N802  Twisted's name
        """Pause."""
        self._paused = True

    def resumeProducing(self) -> None:  # noqa: N802  Twisted's name
        """Write until paused."""
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
        """Close the file."""
        self._file.close()


def send_admin_response(
    request: Request, status: int, body: bytes, content_type: bytes = _TEXT_TYPE, policy: bytes = _DENY_ALL_POLICY
) -> int:
    """Send a complete response."""
    _set_admin_head(request, status, content_type, policy, len(body))
    if request.method != b"HEAD":
        request.write(body)
    request.finish()
    return NOT_DONE_YET


def _set_admin_head(request: Request, status: int, content_type: bytes, policy: bytes, size: int) -> None:
    request.setResponseCode(status, {429: b"Too Many Requests"}.get(status))
    for name, value in _COMMON_HEADERS:
        request.setHeader(name, value)
    request.setHeader(b"Content-Type", content_type)
    request.setHeader(b"Content-Security-Policy", policy)
    request.setHeader(b"Content-Length", b"%d" % size)


class _AdminChannel(BackpressureHTTPChannel):
    def _respondToBadRequestAndDisconnect(self) -> None:  # noqa: N802  Twisted's name
        """Answer what is not HTTP."""
        cast(Any, self.transport).write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        self.loseConnection()

    def connectionLost(self, reason: Failure) -> None:  # type: ignore[override]  # it always has one
        """Count the connection out."""
        cast(Any, self).site.connection_closed()
        super().connectionLost(reason)


class _AdminRequest(Request):
    """A request whose body is discarded."""

    _received = 0

    def gotLength(self, length: int | None) -> None:
        """Called after the headers."""
        self.content = BytesIO()

    def handleContentChunk(self, data: bytes) -> None:
        """Called with a part of the body."""
        self._received += len(data)
        if self._received > _MAX_BODY_BYTES:
            cast(Any, self.channel).transport.abortConnection()

    def process(self) -> None:
        """Called with a complete request. Twisted would answer `*` without authentication."""
        if self.path == b"*":
            self.path = b"/*"
        super().process()


class AdminSite(Site):
    """A site without an access log and with few connections."""

    protocol = _AdminChannel  # type: ignore[assignment]  # instead of a proxy that could speak HTTP/2
    requestFactory = _AdminRequest
    noisy = False

    def __init__(self, clock: IReactorTime, resource: AdminResource) -> None:
        super().__init__(resource, reactor=clock, parsePOSTFormSubmission=False)
        self.clock = clock
        self.memory = MemoryReclaimer(self.clock)
        self.scheduler = RoundRobinScheduler(self.clock)
        self.unread = ResponseBudget(released=self.memory.released)
        self._open = 0

    def buildProtocol(self, addr: object) -> Any:
        """None if there are too many connections."""
        if self._open >= _MAX_CONNECTIONS:
            return None
        self._open += 1
        return super().buildProtocol(cast(Any, addr))

    def connection_closed(self) -> None:
        """Count a connection out."""
        self._open -= 1

    def log(self, request: object) -> None:
        """Log nothing: a line could contain the token."""
