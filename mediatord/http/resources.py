"""The resource tree of the public listener: messages, sockets, documents, health and metrics (contract section 3)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast
from urllib.parse import unquote_to_bytes

from autobahn.twisted.resource import WebSocketResource
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.protocols.policies import ProtocolWrapper
from twisted.web.resource import IResource, Resource
from twisted.web.server import Request

from mediatord.decentrl.context import DecentrlReply
from mediatord.delivery.connections import ConnectionManager
from mediatord.didcomm.messages import DIDCommReply
from mediatord.errors import MediatorError, RateLimitExceeded, ShutdownInProgress, StoreUnavailable
from mediatord.http.client_address import AllowedOrigins, ClientAddressResolver, Network, is_in_networks
from mediatord.http.flow_control import MemoryReclaimer, RoundRobinScheduler
from mediatord.http.openapi import OPENAPI_JSON
from mediatord.http.protocol_switch import ReceiveMessage
from mediatord.http.responses import (
    FAULT_RESPONSES,
    JSON_CONTENT_TYPE,
    PREFLIGHT_HEADERS,
    TIMEOUT_RESPONSES,
    UNREAD_LIMIT_RESPONSES,
    ExecuteCommand,
    HTTPResponse,
    build_didcomm_response,
    build_error,
    build_refusal,
    build_retry_after,
    respond_to_command,
    respond_to_message,
    respond_with_deadline,
    select_protocol,
    write_response,
)
from mediatord.identity.invitation import build_invitation, build_invitation_url, render_invitation_page
from mediatord.observability.event_recorder import ProtocolName
from mediatord.observability.metrics import CONTENT_TYPE, Metrics
from mediatord.probe.readiness import ReadinessCheck, ReadinessVerdict
from mediatord.protocol import encoding
from mediatord.protocol.probe_markers import PROBE_HEADER

_DOCUMENT_TEXT = b"text/plain; charset=utf-8"
_DOCUMENT_HTML = b"text/html; charset=utf-8"


class StaticDocuments:
    """
    Public documents, rendered once.

    :param did: the mediator's did:peer:2.
    :param web_document: DID document of its did:web.
    """

    def __init__(self, did: str, web_document: Mapping[str, Any], public_url: str) -> None:
        self._public_url = public_url
        self._openapi = HTTPResponse(200, OPENAPI_JSON, JSON_CONTENT_TYPE)
        self.show(did, web_document)

    def show(self, did: str, web_document: Mapping[str, Any]) -> None:
        """Replace the DID and the document."""
        public_url = self._public_url
        self._invited = (public_url, did)
        self.__dict__.pop("_html", None)
        self._did = HTTPResponse(200, did.encode("ascii"), _DOCUMENT_TEXT)
        self._document = HTTPResponse(200, encoding.dumps(dict(web_document)), JSON_CONTENT_TYPE)
        self._url = HTTPResponse(200, build_invitation_url(public_url, did).encode("ascii"), _DOCUMENT_TEXT)
        self._json = HTTPResponse(200, encoding.dumps(build_invitation(did)), JSON_CONTENT_TYPE, _VARY_ACCEPT)

    @cached_property
    def _html(self) -> HTTPResponse:
        """Rendered on first use: the QR code takes longer than the rest of the start."""
        page = render_invitation_page(*self._invited)
        return HTTPResponse(
            200,
            page.body,
            _DOCUMENT_HTML,
            (
                *_VARY_ACCEPT,
                (b"Content-Security-Policy", page.security_policy.encode("ascii")),
                (b"X-Content-Type-Options", b"nosniff"),
                (b"Referrer-Policy", b"no-referrer"),
            ),
        )

    def did(self, request: Request) -> HTTPResponse:
        """`/did`: the did:peer:2 as text."""
        return self._did

    def did_document(self, request: Request) -> HTTPResponse:
        """`/.well-known/did.json`: the document of the did:web."""
        return self._document

    def root(self, request: Request) -> HTTPResponse:
        """`/`: the same; with `?_oob=` the invitation, opened in a browser."""
        if b"_oob" in (request.args or {}):
            return self.invitation(request)
        return self._document

    def invitation(self, request: Request) -> HTTPResponse:
        """`/invitation`: HTML or JSON, by the Accept header."""
        return self._html if _prefers_html(request) else self._json

    def openapi(self, request: Request) -> HTTPResponse:
        """`/openapi.json`: the OpenAPI document."""
        return self._openapi

    def invitation_url(self, request: Request) -> HTTPResponse:
        """`/invitationOOB`: the invitation's URL as text."""
        return self._url


_VARY_ACCEPT = ((b"Vary", b"Accept"),)


def _prefers_html(request: Request) -> bool:
    """Whether the Accept header names HTML before JSON."""
    accept = (request.getHeader(b"accept") or b"").lower()
    html, json = accept.find(b"text/html"), accept.find(b"json")
    return html >= 0 and (json < 0 or html < json)


TryFastPath = Callable[[bytes, str, Callable[[DIDCommReply], None], Callable[[], None]], bool]


def decline_fast_path(
    _body: bytes, _rate_limit_key: str, _answer: Callable[[DIDCommReply], None], _otherwise: Callable[[], None]
) -> bool:
    """The fast path of a site without one."""
    return False


async def report_no_probe() -> ReadinessVerdict:
    """The readiness of a site without a probe."""
    return ReadinessVerdict("not looked at")


@dataclass(frozen=True, slots=True)
class HTTPContext:
    """
    Collaborators of the resources.

    :param receive: processes a DIDComm message; raises ShutdownInProgress.
    :param command: processes a Decentrl command of a rate limit key; raises ShutdownInProgress.
    :param public: reads a public channel: DID of the path, query, rate limit key; raises ShutdownInProgress.
    :param ping_store: raises StoreUnavailable.
    :param store_trouble: a known problem of the store; empty if there is none.
    :param trouble: another reason why no requests should be sent here; empty if there is none.
    :param statistics: refreshes the metrics of the store.
    :param figures: renders the metrics; raises TimeoutError.
    :param record_early_rejection: records a request that was rejected unread: protocol, address, error.
    :param admits: counts a request of an address; whether it is within its limit.
    :param scheduler: of connections with more received data than is served at once.
    :param memory: told of freed large buffers.
    :param deadline: of a request, in seconds.
    :param forward_fast_path: takes a forward of the common form: body, rate limit key, a callback for the reply, and
        one for a message of another form; False if neither will be called.
    :param ready: whether a message would be stored, pushed and acknowledged.
    """

    clock: IReactorTime
    receive: ReceiveMessage
    command: ExecuteCommand
    public: Callable[[str, Mapping[bytes, Sequence[bytes]], str], Awaitable[DecentrlReply]]
    ping_store: Callable[[], Awaitable[None]]
    store_trouble: Callable[[], str]
    trouble: Callable[[], str]
    statistics: Callable[[], Awaitable[None]]
    figures: Callable[[], Awaitable[bytes]]
    pages: StaticDocuments
    metrics: Metrics
    peers: ClientAddressResolver
    connections: ConnectionManager[Any]
    sockets: WebSocketResource
    record_early_rejection: Callable[[ProtocolName, str, MediatorError], None]
    origins: AllowedOrigins
    memory: MemoryReclaimer
    scheduler: RoundRobinScheduler
    admits: Callable[[str], bool]
    metrics_allow: Callable[[], Sequence[Network]] = tuple
    deadline: float = 10.0
    ready: ReadinessCheck = report_no_probe
    forward_fast_path: TryFastPath = decline_fast_path


class PathResource(Resource):
    """
    The resource at one path.

    :cvar methods: allowed methods.
    :cvar half: protocol whose form errors of the path have.
    """

    isLeaf = True
    methods: tuple[bytes, ...] = (b"GET", b"HEAD", b"OPTIONS")
    half: ProtocolName = "decentrl"

    def __init__(self, front: HTTPContext) -> None:
        super().__init__()
        self._front = front

    def render(self, request: Request) -> int | bytes:
        """Dispatch by method."""
        if request.method == b"OPTIONS":
            return write_response(request, PREFLIGHT_RESPONSE)
        if not self.has(request):
            return write_response(request, NOT_FOUND_RESPONSES[self.half])
        if request.method not in self.methods:
            return self.not_allowed(request)
        if request.method == b"POST":
            return self.post(request)
        return self.get(request)

    def has(self, request: Request) -> bool:
        """Whether the path exists; below a resource only a trailing slash does."""
        return request.postpath in ([], [b""])

    def get(self, request: Request) -> int | bytes:
        """Answer a GET."""
        return self.not_allowed(request)

    def post(self, request: Request) -> int | bytes:
        """Answer a POST."""
        return self.not_allowed(request)

    def take(self, request: Request, half: ProtocolName) -> int:
        """Process a posted message or command."""
        content: Any = request.content
        body, rate_limit_key = content.getvalue(), self.rate_limit_key(request)
        if half == "decentrl":
            return self.later(request, respond_to_command(self._front.command(body, rate_limit_key)), half)
        content_type = request.getHeader(b"content-type") or b""
        return self.later(request, self._respond_to_message(body, rate_limit_key, content_type), half)

    async def _respond_to_message(self, body: bytes, rate_limit_key: str, content_type: bytes) -> HTTPResponse:
        """As :func:`respond_to_message`, by the fast path if the message is a forward of the common form."""
        front = self._front
        replied: Deferred[DIDCommReply | None] = Deferred()
        if front.forward_fast_path(body, rate_limit_key, replied.callback, partial(replied.callback, None)):
            reply = await replied
            if reply is not None:
                return build_didcomm_response(reply)
        return await respond_to_message(front.receive, body, rate_limit_key, content_type)

    def rate_limit_key(self, request: Request) -> str:
        """The rate limit key of the request."""
        rate_limit_key: str = cast(Any, request).rate_limit_key
        return rate_limit_key

    def later(self, request: Request, work: Awaitable[HTTPResponse], half: ProtocolName) -> int:
        """Respond with the result of `work`."""
        return respond_with_deadline(
            request,
            work,
            self._front.clock,
            deadline=self._front.deadline,
            late=TIMEOUT_RESPONSES[half],
            fault=FAULT_RESPONSES[half],
            unread=UNREAD_LIMIT_RESPONSES[half],
        )

    def upgrade(self, request: Request) -> int | bytes:
        """Upgrade to a WebSocket, if the client may open another one."""
        if not self._front.origins.check_and_remove(request.requestHeaders):
            return write_response(request, _FORBIDDEN_ORIGIN_RESPONSES[self.half])
        if self._front.connections.draining:
            self._front.record_early_rejection(self.half, self.rate_limit_key(request), ShutdownInProgress())
            return write_response(request, build_refusal(self.half, ShutdownInProgress()))
        if not self._front.connections.has_room(self.rate_limit_key(request)):
            self._front.record_early_rejection(self.half, self.rate_limit_key(request), RateLimitExceeded())
            return write_response(request, _CONNECTION_LIMIT_RESPONSES[self.half])
        cast(Any, request).site.upgraded(get_addresses(request)[0])
        channel = cast(Any, request.channel)
        transport = channel.transport
        outcome: int | bytes = self._front.sockets.render(request)
        # A client may send its first frames together with the upgrade.
        frames = channel.take_unparsed_bytes()
        if frames and not transport.disconnecting:
            _unwrap_protocol(transport).dataReceived(frames)
        return outcome

    def not_allowed(self, request: Request) -> int:
        """Respond 405 with the allowed methods."""
        allowed = (b"Allow", b", ".join(self.methods))
        if self.half == "didcomm":
            return write_response(request, HTTPResponse(405, headers=(allowed,)))
        return write_response(request, build_error(405, "METHOD_NOT_ALLOWED", allowed))


PREFLIGHT_RESPONSE = HTTPResponse(
    204, headers=tuple((name.encode("ascii"), value.encode("ascii")) for name, value in PREFLIGHT_HEADERS)
)
NOT_FOUND_RESPONSES: dict[ProtocolName, HTTPResponse] = {
    "didcomm": HTTPResponse(404, b'{"status":"error","detail":"not found"}', JSON_CONTENT_TYPE),
    "decentrl": build_error(404, "NOT_FOUND"),
}
_FORBIDDEN_ORIGIN_RESPONSES: dict[ProtocolName, HTTPResponse] = {
    "didcomm": HTTPResponse(403, b"origin not allowed\n", b"text/plain"),
    "decentrl": build_error(403, "ORIGIN_NOT_ALLOWED"),
}
_PROBE_TOKEN_HEADER = PROBE_HEADER.encode("ascii")
_CONNECTION_LIMIT_RESPONSES: dict[ProtocolName, HTTPResponse] = {
    "didcomm": HTTPResponse(429, b"too many connections\n", b"text/plain", build_retry_after(5)),
    "decentrl": build_error(429, "RATE_LIMITED", *build_retry_after(5)),
}


def _unwrap_protocol(transport: Any) -> Any:
    """The protocol behind wrappers such as TLS."""
    wrapper = transport if isinstance(transport, ProtocolWrapper) else transport.protocol
    return wrapper.wrappedProtocol if isinstance(wrapper, ProtocolWrapper) else wrapper


def get_addresses(request: Request) -> tuple[str, str | None]:
    """Address of the TCP peer, and the value of `X-Forwarded-For`."""
    # As bytes: invalid UTF-8 must not raise.
    forwarded = request.requestHeaders.getRawHeaders(b"x-forwarded-for")
    said = b",".join(forwarded).decode("latin-1") if forwarded else None
    return getattr(request.getClientAddress(), "host", "") or "", said


def get_probe_token(request: Request) -> bytes | None:
    """The token that identifies the daemon's own requests."""
    return request.requestHeaders.getRawHeaders(_PROBE_TOKEN_HEADER, [None])[0]


def is_websocket_upgrade(request: Request) -> bool:
    """Whether the request is a WebSocket upgrade."""
    return (request.getHeader(b"upgrade") or b"").strip().lower() == b"websocket"


class DIDCommResource(PathResource):
    """`/didcomm`: messages by POST, a socket by upgrade (reference 3.1, 3.2)."""

    methods = (b"POST", b"OPTIONS")
    half = "didcomm"

    def render(self, request: Request) -> int | bytes:
        """Handle upgrades; other GET requests are not allowed."""
        if request.method == b"GET" and is_websocket_upgrade(request) and self.has(request):
            return self.upgrade(request)
        return super().render(request)

    def post(self, request: Request) -> int | bytes:
        """Process a message, whatever its Content-Type."""
        return self.take(request, "didcomm")


class SocketResource(PathResource):
    """`/ws`: a socket of either protocol."""

    methods = (b"GET", b"OPTIONS")

    def get(self, request: Request) -> int | bytes:
        """Upgrade, or respond 426."""
        if is_websocket_upgrade(request):
            return self.upgrade(request)
        return write_response(request, _UPGRADE_REQUIRED_RESPONSE)


_UPGRADE_REQUIRED_RESPONSE = build_error(
    426, "UPGRADE_REQUIRED", (b"Upgrade", b"websocket"), (b"Connection", b"Upgrade")
)


class PublicChannelResource(PathResource):
    """`/public/:did`: a public channel (DCTRL-0004 3.1, reference 10.3)."""

    def has(self, request: Request) -> bool:
        """Everything below the path is a DID."""
        return True

    def get(self, request: Request) -> int | bytes:
        """Respond with published events."""
        work = self._front.public(_parse_did_path(request.path), request.args or {}, self.rate_limit_key(request))
        return self.later(request, respond_to_command(work), "decentrl")


def _parse_did_path(path: bytes) -> str:
    """
    The DID below a path: plain, with slashes, or percent-encoded.

    :return: empty if it is not UTF-8.
    """
    try:
        return unquote_to_bytes(path[1:].partition(b"/")[2]).decode("utf-8")
    except UnicodeDecodeError:
        return ""


class DocumentResource(PathResource):
    """A public document."""

    def __init__(self, front: HTTPContext, page: Callable[[Request], HTTPResponse]) -> None:
        super().__init__(front)
        self._page = page

    def get(self, request: Request) -> int | bytes:
        """Respond with the document."""
        return write_response(request, self._page(request), UNREAD_LIMIT_RESPONSES[self.half])


class HealthResource(PathResource):
    """`/health`: whether the store responds and the node can serve."""

    def get(self, request: Request) -> int | bytes:
        """Respond 200, or 503 with the problem."""

        async def asked() -> HTTPResponse:
            try:
                await self._front.ping_store()
            except (StoreUnavailable, ShutdownInProgress) as error:
                self._front.metrics.set_storage_up(False)
                stopping = isinstance(error, ShutdownInProgress)
                return _build_unavailable(
                    "stopping" if stopping else self._front.store_trouble() or "store unavailable"
                )
            self._front.metrics.set_storage_up(True)
            trouble = self._front.store_trouble() or self._front.trouble()
            return (
                _build_unavailable(trouble) if trouble else HTTPResponse(200, b'{"status":"ok"}', JSON_CONTENT_TYPE)
            )

        return self.later(request, asked(), "didcomm")


class ReadinessResource(PathResource):
    """`/ready`: whether messages through this listener are stored, pushed and acknowledged."""

    def get(self, request: Request) -> int | bytes:
        """Respond 200, or 503 with the problem, with the age of the last success."""

        async def asked() -> HTTPResponse:
            verdict = await self._front.ready()
            age = {} if verdict.age is None else {"age_ms": round(verdict.age * 1000)}
            if verdict.trouble or verdict.cycle is None:
                return _build_unavailable(verdict.trouble, **age)
            body = {"status": "ok", "cycle_ms": round(verdict.cycle * 1000), **age}
            return HTTPResponse(200, encoding.dumps(body), JSON_CONTENT_TYPE)

        return self.later(request, asked(), "didcomm")


def _build_unavailable(detail: str, **more: int) -> HTTPResponse:
    return HTTPResponse(
        503, encoding.dumps({"status": "error", "detail": detail, **more}), JSON_CONTENT_TYPE, build_retry_after(5)
    )


class MetricsResource(PathResource):
    """`/metrics`: Prometheus text for allowed networks; `?ready=1` also runs the readiness check."""

    def get(self, request: Request) -> int | bytes:
        """Respond with the metrics, or 403."""
        client = self._front.peers.client(*get_addresses(request))
        if not is_in_networks(client, self._front.metrics_allow()):
            return write_response(
                request, HTTPResponse(403, b'{"status":"error","detail":"forbidden"}', JSON_CONTENT_TYPE)
            )

        async def scraped() -> HTTPResponse:
            if b"ready" in request.args:
                await self._front.ready()
            try:
                await self._front.statistics()
            except StoreUnavailable:
                # A ping updates the metric that tells an unavailable store from slow statistics.
                with suppress(StoreUnavailable, ShutdownInProgress):
                    await self._front.ping_store()
            try:
                text = await self._front.figures()
            except TimeoutError:
                return HTTPResponse(
                    503,
                    b'{"status":"error","detail":"workers do not answer"}',
                    JSON_CONTENT_TYPE,
                    build_retry_after(5),
                )
            # Pages in a browser at an allowed address must not read this.
            return HTTPResponse(200, text, CONTENT_TYPE.encode("ascii"), shared=False)

        return self.later(request, scraped(), "didcomm")


class RootResource(PathResource):
    """`/`: the DID document by GET, both protocols by POST, a socket by upgrade; the root of the tree."""

    isLeaf = False
    methods = (b"GET", b"HEAD", b"POST", b"OPTIONS")

    def __init__(self, front: HTTPContext) -> None:
        super().__init__(front)
        pages = front.pages
        well_known = _PathPrefixResource()
        well_known.putChild(b"did.json", DocumentResource(front, pages.did_document))
        children: dict[bytes, IResource] = {
            b"didcomm": DIDCommResource(front),
            b"ws": SocketResource(front),
            b"public": PublicChannelResource(front),
            b"did": DocumentResource(front, pages.did),
            b"invitation": DocumentResource(front, pages.invitation),
            b"invitationOOB": DocumentResource(front, pages.invitation_url),
            b"openapi.json": DocumentResource(front, pages.openapi),
            b"health": HealthResource(front),
            b"ready": ReadinessResource(front),
            b"metrics": MetricsResource(front),
            b".well-known": well_known,
            # The document of a did:web with a path, behind a proxy that strips the path.
            b"did.json": DocumentResource(front, pages.did_document),
        }
        for name, child in children.items():
            self.putChild(name, child)

    def getChild(self, path: bytes, request: Request) -> IResource:
        """The root itself, or 404."""
        return self if path == b"" and not request.postpath else _NotFoundResource()

    def get(self, request: Request) -> int | bytes:
        """Respond with the DID document, or upgrade."""
        if is_websocket_upgrade(request):
            return self.upgrade(request)
        return write_response(request, self._front.pages.root(request))

    def post(self, request: Request) -> int | bytes:
        """Process a command, or a message by its Content-Type."""
        return self.take(request, select_protocol(request.getHeader(b"content-type") or b""))


class _NotFoundResource(Resource):
    isLeaf = True

    def render(self, request: Request) -> int | bytes:
        """Respond 404, or to a preflight."""
        return write_response(
            request, PREFLIGHT_RESPONSE if request.method == b"OPTIONS" else NOT_FOUND_RESPONSES["decentrl"]
        )


class _PathPrefixResource(Resource):
    def getChild(self, path: bytes, request: Request) -> IResource:
        """Respond 404 below unknown names."""
        return _NotFoundResource()

    def render(self, request: Request) -> int | bytes:
        """Respond 404."""
        return _NotFoundResource().render(request)
