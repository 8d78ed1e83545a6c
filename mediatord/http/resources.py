"""The resource tree of the public listener: messages, sockets, documents, health and metrics (contract section 3)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal
from urllib.parse import unquote_to_bytes

from twisted.internet.interfaces import IReactorTime
from twisted.protocols.policies import ProtocolWrapper
from twisted.web.resource import IResource, Resource
from twisted.web.server import NOT_DONE_YET, Request

from mediatord.delivery.connections import ConnectionManager, WebSocketSession
from mediatord.didcomm.messages import MessageOrigin, UnpackedMessage
from mediatord.errors import RateLimitExceeded, ShutdownInProgress, StoreUnavailable
from mediatord.http.channel import MediatorRequest
from mediatord.http.client_address import (
    AllowedOrigins,
    ClientAddressResolver,
    Network,
    get_addresses,
    is_in_networks,
)
from mediatord.http.flow_control import RoundRobinScheduler
from mediatord.http.openapi import OPENAPI_JSON
from mediatord.http.responses import (
    JSON_CONTENT_TYPE,
    UNREAD_LIMIT_RESPONSES,
    HTTPResponse,
    ProtocolReply,
    build_error,
    build_refusal,
    build_retry_after,
    select_protocol,
)
from mediatord.http.websocket import DecentrlSocketHandler
from mediatord.identity.invitation import (
    V1Invitation,
    build_invitation,
    build_invitation_url,
    derive_invitation_id,
    render_invitation_page,
)
from mediatord.observability.event_recorder import EventRecorder, ProtocolName
from mediatord.observability.metrics import CONTENT_TYPE
from mediatord.probe.readiness import ReadinessCheck, ReadinessVerdict
from mediatord.protocol import encoding
from mediatord.protocol.didcomm_v1.out_of_band import CONNECTION_PARAMETER, OOB_PARAMETER
from mediatord.ratelimit.admission import RequestReply
from mediatord.runtime.memory_reclaimer import MemoryReclaimer

_TEXT_TYPE = b"text/plain; charset=utf-8"
_HTML_TYPE = b"text/html; charset=utf-8"
_UNKNOWN_INVITATION_RESPONSE = HTTPResponse(
    404, b'{"status":"error","detail":"unknown or missing _oobid"}', JSON_CONTENT_TYPE
)


_V1_PARAMETERS = frozenset({OOB_PARAMETER.encode("ascii"), CONNECTION_PARAMETER.encode("ascii")})


class StaticDocuments:
    """
    Public documents.

    :param v1: the invitation of DIDComm v1; None if that is not served.
    :ivar did: `/did`: the did:peer:2 as text.
    :ivar did_document: `/.well-known/did.json`: the document of the did:web.
    :ivar openapi: `/openapi.json`.
    :ivar invitation_url: `/invitationOOB`: the invitation's URL as text.
    """

    def __init__(
        self, did: str, web_document: Mapping[str, Any], public_url: str, v1: V1Invitation | None = None
    ) -> None:
        self._public_url = public_url
        self._invitation_id = derive_invitation_id(public_url).encode("ascii")
        self.openapi = HTTPResponse(200, OPENAPI_JSON, JSON_CONTENT_TYPE)
        self.set_identity(did, web_document, v1)

    def set_identity(self, did: str, web_document: Mapping[str, Any], v1: V1Invitation | None = None) -> None:
        """Replace the mediator's did:peer:2, the DID document of its did:web, and the invitation of DIDComm v1."""
        self._did = did
        self._v1 = v1
        self.__dict__.pop("_invitation_page", None)
        url = build_invitation_url(self._public_url, did)
        self.did = HTTPResponse(200, did.encode("ascii"), _TEXT_TYPE)
        self.did_document = HTTPResponse(200, encoding.dumps(dict(web_document)), JSON_CONTENT_TYPE)
        self.invitation_url = HTTPResponse(200, url.encode("ascii"), _TEXT_TYPE)
        vary = (b"Vary", b"Accept")
        self._invitation = HTTPResponse(
            200, encoding.dumps(build_invitation(self._public_url, did)), JSON_CONTENT_TYPE, (vary,)
        )
        if v1 is not None:
            self._v1_invitation = HTTPResponse(200, encoding.dumps(v1.message), JSON_CONTENT_TYPE, (vary,))

    @property
    def has_v1(self) -> bool:
        """Whether there is an invitation of DIDComm v1."""
        return self._v1 is not None

    @cached_property
    def _invitation_page(self) -> HTTPResponse:
        """Rendered on first use: the QR code takes longer than the rest of the start."""
        page = render_invitation_page(self._public_url, self._did, self._v1)
        headers = (
            *self._invitation.headers,
            (b"Content-Security-Policy", page.security_policy.encode("ascii")),
            (b"X-Content-Type-Options", b"nosniff"),
            (b"Referrer-Policy", b"no-referrer"),
        )
        return HTTPResponse(200, page.body, _HTML_TYPE, headers)

    def get_invitation(self, request: Request) -> HTTPResponse:
        """`/invitation`: HTML if the Accept header names it before JSON, else JSON."""
        return self._invitation_page if _prefers_html(request) else self._invitation

    def get_v1_invitation(self, request: Request) -> HTTPResponse:
        """`/invitation/v1`: likewise, with the JSON of the invitation of DIDComm v1, which there is."""
        return self._invitation_page if _prefers_html(request) else self._v1_invitation

    def get_short_invitation(self, request: Request) -> HTTPResponse:
        """`/oob`: what `/invitation` has, if `_oobid` is the id of the invitation; else 404."""
        if (request.args or {}).get(b"_oobid") != [self._invitation_id]:
            return _UNKNOWN_INVITATION_RESPONSE
        return self.get_invitation(request)

    def get_root(self, request: Request) -> HTTPResponse:
        """`/`: the DID document; with `?_oob=` the invitation, opened in a browser; likewise of DIDComm v1."""
        args = request.args or {}
        if b"_oob" in args:
            return self.get_invitation(request)
        return self.get_v1_invitation(request) if self.has_v1 and _V1_PARAMETERS & args.keys() else self.did_document


def _prefers_html(request: Request) -> bool:
    accept = (request.getHeader(b"accept") or b"").lower()
    html, json = accept.find(b"text/html"), accept.find(b"json")
    return html >= 0 and (json < 0 or html < json)


@dataclass(frozen=True, slots=True)
class HTTPContext:
    """
    Collaborators of the resources.

    :param receive: processes a DIDComm message, which may have been opened; raises ShutdownInProgress.
    :param command: processes a Decentrl command of a rate limit key; raises ShutdownInProgress.
    :param public: reads a public channel: DID of the path, query, rate limit key; raises ShutdownInProgress.
    :param check_store: raises StoreUnavailable, or ShutdownInProgress.
    :param find_store_problem: a known problem of the store; empty if there is none.
    :param find_node_problem: another reason why no requests should be sent here; empty if there is none.
    :param refresh_store_metrics: refreshes the metrics of the store.
    :param render_metrics: raises TimeoutError.
    :param open_decentrl_socket: makes the Decentrl protocol of a socket.
    :param admits: counts a request of an address, or frames; whether it is within its limit.
    :param scheduler: of connections with more received data than is served at once.
    :param memory: notified of freed large buffers.
    :param deadline: of a request, in seconds.
    :param forward_fast_path: takes a forward of the common form: body, rate limit key, a callback for the reply, and
        one for a message of another form; False if neither will be called.
    :param acknowledgement_fast_path: likewise takes an acknowledgement, which came on a socket; a message of another
        form is passed on if it has been opened.
    :param check_readiness: whether a message would be stored, pushed and acknowledged.
    """

    clock: IReactorTime
    receive: Callable[[bytes, MessageOrigin, UnpackedMessage | None], Awaitable[RequestReply]]
    command: Callable[[bytes, str], Awaitable[RequestReply]]
    public: Callable[[str, Mapping[bytes, Sequence[bytes]], str], Awaitable[RequestReply]]
    check_store: Callable[[], Awaitable[None]]
    find_store_problem: Callable[[], str]
    find_node_problem: Callable[[], str]
    refresh_store_metrics: Callable[[], Awaitable[None]]
    render_metrics: Callable[[], Awaitable[bytes]]
    documents: StaticDocuments
    recorder: EventRecorder
    client_addresses: ClientAddressResolver
    connections: ConnectionManager[Any]
    open_decentrl_socket: Callable[[WebSocketSession], DecentrlSocketHandler]
    origins: AllowedOrigins
    memory: MemoryReclaimer
    scheduler: RoundRobinScheduler
    admits: Callable[..., bool]
    metrics_allow: Callable[[], Sequence[Network]]
    check_readiness: ReadinessCheck
    forward_fast_path: Callable[[bytes, str, Callable[[RequestReply], None], Callable[[], None]], bool]
    acknowledgement_fast_path: Callable[
        [bytes, MessageOrigin, Callable[[RequestReply], None], Callable[[UnpackedMessage | None], None]], bool
    ]
    deadline: float = 10.0


async def report_no_probe() -> ReadinessVerdict:
    """The readiness of a site without a probe."""
    return ReadinessVerdict("no probe")


_PREFLIGHT_RESPONSE = HTTPResponse(
    204,
    headers=(
        (b"Access-Control-Allow-Methods", b"GET, POST, OPTIONS"),
        (b"Access-Control-Allow-Headers", b"Content-Type"),
        (b"Access-Control-Max-Age", b"86400"),
    ),
)
_NOT_FOUND_RESPONSES: dict[ProtocolName, HTTPResponse] = {
    "didcomm": HTTPResponse(404, b'{"status":"error","detail":"not found"}', JSON_CONTENT_TYPE),
    "decentrl": build_error(404, "NOT_FOUND"),
}
_FORBIDDEN_ORIGIN_RESPONSES: dict[ProtocolName, HTTPResponse] = {
    "didcomm": HTTPResponse(403, b"origin not allowed\n", b"text/plain"),
    "decentrl": build_error(403, "ORIGIN_NOT_ALLOWED"),
}
_CONNECTION_LIMIT_RESPONSES: dict[ProtocolName, HTTPResponse] = {
    "didcomm": HTTPResponse(429, b"too many connections\n", b"text/plain", build_retry_after(5)),
    "decentrl": build_error(429, "RATE_LIMITED", *build_retry_after(5)),
}
_UPGRADE_REQUIRED_RESPONSE = build_error(
    426, "UPGRADE_REQUIRED", (b"Upgrade", b"websocket"), (b"Connection", b"Upgrade")
)
_FORBIDDEN_METRICS_RESPONSE = HTTPResponse(
    403, b'{"status":"error","detail":"address not in metrics.allow"}', JSON_CONTENT_TYPE
)

GetHandler = Callable[[MediatorRequest], HTTPResponse | Awaitable[ProtocolReply]]


class PathResource(Resource):
    """
    The resource at one path.

    :param get: answers GET and HEAD; at a path of sockets only, GET without an upgrade.
    :param post: what may be posted: DIDComm messages, or also Decentrl commands.
    :param protocol: whose form errors of the path have.
    :param answer_protocol: whose form errors have once the handler was called, if another.
    :param has_sockets: whether GET may upgrade to a WebSocket.
    :param is_prefix: whether everything below the path belongs to it; else only a trailing slash does.
    """

    isLeaf = True

    def __init__(
        self,
        context: HTTPContext,
        get: GetHandler | None = None,
        *,
        post: Literal["didcomm", "both"] | None = None,
        protocol: ProtocolName = "decentrl",
        answer_protocol: ProtocolName | None = None,
        has_sockets: bool = False,
        is_prefix: bool = False,
    ) -> None:
        super().__init__()
        self._context = context
        self._get = get
        self._post = post
        self._protocol = protocol
        self._answer_protocol = answer_protocol or protocol
        self._has_sockets = has_sockets
        self._is_prefix = is_prefix
        gets = () if get is None else (b"GET",) if has_sockets and not post else (b"GET", b"HEAD")
        self._allowed = (*gets, *((b"POST",) if post else ()), b"OPTIONS")

    def render(self, request: MediatorRequest) -> int | bytes:
        """Dispatch by method."""
        method = request.method
        if method == b"OPTIONS":
            return request.respond(_PREFLIGHT_RESPONSE)
        if request.postpath not in ([], [b""]) and not self._is_prefix:
            return request.respond(_NOT_FOUND_RESPONSES[self._protocol])
        if method == b"POST" and self._post:
            content: Any = request.content
            content_type = request.getHeader(b"content-type") or b""
            protocol = "didcomm" if self._post == "didcomm" else select_protocol(content_type)
            request.channel.serve(protocol, request.rate_limit_key, content.getvalue(), content_type, request)
            return NOT_DONE_YET
        if method == b"GET" and self._has_sockets:
            if (request.getHeader(b"upgrade") or b"").strip().lower() == b"websocket":
                return self._upgrade(request)
        if method in self._allowed and self._get is not None:
            return self._respond(request, self._get(request))
        return self._refuse_method(request)

    def _respond(self, request: MediatorRequest, answer: HTTPResponse | Awaitable[ProtocolReply]) -> int:
        if isinstance(answer, HTTPResponse):
            return request.respond(answer, UNREAD_LIMIT_RESPONSES[self._answer_protocol])
        request.channel.respond_later(self._answer_protocol, request.rate_limit_key, request, answer)
        return NOT_DONE_YET

    def _refuse_method(self, request: MediatorRequest) -> int:
        """Respond 405 with the allowed methods."""
        allowed = (b"Allow", b", ".join(self._allowed))
        if self._protocol == "didcomm":
            return request.respond(HTTPResponse(405, headers=(allowed,)))
        return request.respond(build_error(405, "METHOD_NOT_ALLOWED", allowed))

    def _upgrade(self, request: MediatorRequest) -> int | bytes:
        """Upgrade to a WebSocket, if the client may open another one."""
        context, rate_limit_key = self._context, request.rate_limit_key
        if not context.origins.check_and_remove(request.requestHeaders):
            return request.respond(_FORBIDDEN_ORIGIN_RESPONSES[self._protocol])
        if context.connections.draining:
            context.recorder.record_early_rejection(self._protocol, rate_limit_key, 0, ShutdownInProgress())
            return request.respond(build_refusal(self._protocol, ShutdownInProgress()))
        if not context.connections.has_room(rate_limit_key):
            context.recorder.record_early_rejection(self._protocol, rate_limit_key, 0, RateLimitExceeded())
            return request.respond(_CONNECTION_LIMIT_RESPONSES[self._protocol])
        channel = request.channel
        transport = channel.transport
        outcome: int | bytes = request.channel.site.sockets.render(request)
        if channel.transport is None:  # taken over; channel and request would stay in a reference cycle
            channel.requests.clear()
        # A client may send its first frames together with the upgrade.
        frames = channel.take_unparsed_bytes()
        if frames and not transport.disconnecting:
            # Behind wrappers such as TLS.
            wrapper = transport if isinstance(transport, ProtocolWrapper) else transport.protocol
            (wrapper.wrappedProtocol if isinstance(wrapper, ProtocolWrapper) else wrapper).dataReceived(frames)
        return outcome


class _PathPrefixResource(Resource):
    """A path at which nothing is, but below it."""

    def getChild(self, path: bytes, request: Request) -> IResource:
        """Unknown paths."""
        return _PathPrefixResource()

    def render(self, request: MediatorRequest) -> int:
        """Respond 404, or to a preflight."""
        is_preflight = request.method == b"OPTIONS"
        return request.respond(_PREFLIGHT_RESPONSE if is_preflight else _NOT_FOUND_RESPONSES["decentrl"])


class _ParentPathResource(PathResource):
    """A path below which there are others."""

    isLeaf = False

    def getChild(self, path: bytes, request: Request) -> IResource:
        """The path itself, or 404."""
        return self if path == b"" and not request.postpath else _PathPrefixResource()


class RootResource(_ParentPathResource):
    """`/`: the DID document by GET, both protocols by POST, a socket by upgrade; the root of the tree."""

    def __init__(self, context: HTTPContext) -> None:
        documents = context.documents
        super().__init__(
            context,
            documents.get_root,
            post="both",
            has_sockets=True,
        )
        # The document of a did:web with a path is also here, behind a proxy that strips the path.
        well_known = _PathPrefixResource()
        for parent, name, document in (
            (self, b"did", lambda request: documents.did),
            (self, b"did.json", lambda request: documents.did_document),
            (well_known, b"did.json", lambda request: documents.did_document),
            (self, b"oob", documents.get_short_invitation),
            (self, b"invitationOOB", lambda request: documents.invitation_url),
            (self, b"openapi.json", lambda request: documents.openapi),
        ):
            parent.putChild(name, PathResource(context, document))
        self.putChild(b".well-known", well_known)
        invitation = _ParentPathResource(context, documents.get_invitation)
        if documents.has_v1:
            invitation.putChild(b"v1", PathResource(context, documents.get_v1_invitation))
        self.putChild(b"invitation", invitation)
        didcomm = PathResource(context, post="didcomm", protocol="didcomm", has_sockets=True)
        self.putChild(b"didcomm", didcomm)
        self.putChild(b"ws", PathResource(context, lambda request: _UPGRADE_REQUIRED_RESPONSE, has_sockets=True))
        self.putChild(b"public", PathResource(context, self._get_public_channel, is_prefix=True))
        for name, handler in ((b"health", self._get_health), (b"ready", self._get_readiness)):
            self.putChild(name, PathResource(context, handler, answer_protocol="didcomm"))
        self.putChild(b"metrics", PathResource(context, self._get_metrics, answer_protocol="didcomm"))

    def _get_public_channel(self, request: MediatorRequest) -> Awaitable[RequestReply]:
        """`/public/:did`: published events; the DID is plain, with slashes, or percent-encoded (reference 10.3)."""
        try:
            did = unquote_to_bytes(request.path[1:].partition(b"/")[2]).decode("utf-8")
        except UnicodeDecodeError:
            did = ""
        return self._context.public(did, request.args or {}, request.rate_limit_key)

    async def _get_health(self, request: MediatorRequest) -> HTTPResponse:
        """`/health`: 200, or 503 with the problem, if the store does not respond or the node cannot serve."""
        context = self._context
        try:
            await context.check_store()
        except ShutdownInProgress:
            problem = "stopping"
        except StoreUnavailable:
            problem = context.find_store_problem() or "store unavailable"
        else:
            context.recorder.metrics.set_storage_up(True)
            problem = context.find_store_problem() or context.find_node_problem()
            return _build_unavailable(problem) if problem else _build_json({"status": "ok"})
        context.recorder.metrics.set_storage_up(False)
        return _build_unavailable(problem)

    async def _get_readiness(self, request: MediatorRequest) -> HTTPResponse:
        """`/ready`: 200, or 503 with the problem, with the age of the last success."""
        verdict = await self._context.check_readiness()
        age = {} if verdict.age is None else {"age_ms": round(verdict.age * 1000)}
        if verdict.trouble or verdict.cycle is None:
            return _build_unavailable(verdict.trouble, **age)
        return _build_json({"status": "ok", "cycle_ms": round(verdict.cycle * 1000), **age})

    def _get_metrics(self, request: MediatorRequest) -> HTTPResponse | Awaitable[HTTPResponse]:
        """`/metrics`: Prometheus text for allowed networks; `?ready=1` also runs the readiness check."""
        client = self._context.client_addresses.client(*get_addresses(request))
        if not is_in_networks(client, self._context.metrics_allow()):
            return _FORBIDDEN_METRICS_RESPONSE
        return self._collect_metrics(b"ready" in request.args)

    async def _collect_metrics(self, is_readiness_checked: bool) -> HTTPResponse:
        context = self._context
        if is_readiness_checked:
            await context.check_readiness()
        try:
            await context.refresh_store_metrics()
        except StoreUnavailable:
            # A ping updates the metric that tells an unavailable store from slow statistics.
            with suppress(StoreUnavailable, ShutdownInProgress):
                await context.check_store()
        try:
            text = await context.render_metrics()
        except TimeoutError:
            return _build_unavailable("workers do not respond")
        # Pages in a browser at an allowed address must not read this.
        return HTTPResponse(200, text, CONTENT_TYPE.encode("ascii"), shared=False)


def _build_json(body: dict[str, Any]) -> HTTPResponse:
    return HTTPResponse(200, encoding.dumps(body), JSON_CONTENT_TYPE)


def _build_unavailable(detail: str, **more: int) -> HTTPResponse:
    body = encoding.dumps({"status": "error", "detail": detail, **more})
    return HTTPResponse(503, body, JSON_CONTENT_TYPE, build_retry_after(5))
