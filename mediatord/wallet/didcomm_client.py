"""A DIDComm wallet over HTTP, and the discovery of its mediator (reference 7.4, 9)."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from treq.client import HTTPClient
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorCore, IReactorTime
from twisted.web.client import Agent, HTTPConnectionPool
from twisted.web.http_headers import Headers

from mediatord.protocol import encoding
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.didcomm.did_document import DIDDocument, DIDWebLookupRequired, parse_did_document
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE
from mediatord.protocol.didcomm.message import Message
from mediatord.wallet.didcomm_identity import DIDMethod, WalletIdentity
from mediatord.wallet.didcomm_mediation import (
    PROBLEM_REPORT,
    CoordinationVersion,
    DeliveredMessage,
    MediationRequests,
    MediatorProblem,
)
from mediatord.wallet.didcomm_messages import (
    BASIC_MESSAGE,
    DIDDocumentCache,
    OpenedMessage,
    UnreadableMessage,
    authcrypt,
    compose_message,
    find_route,
    open_problem_report,
    unpack_message,
    wrap_in_forwards,
)

INVITATION = "https://didcomm.org/out-of-band/2.0/invitation"


class TreqPoster(Protocol):
    """The part of treq that a wallet with a known mediator needs."""

    def post(self, url: str, /, *, data: bytes, headers: Headers, allow_redirects: bool) -> Awaitable[Any]: ...


class TreqClient(TreqPoster, Protocol):
    """The part of treq that wallets need."""

    def get(self, url: str, /, *, headers: Headers, allow_redirects: bool) -> Awaitable[Any]: ...


def open_http(reactor: IReactorCore) -> TreqClient:
    """An HTTP client without persistent connections."""
    return HTTPClient(Agent(reactor, pool=HTTPConnectionPool(reactor, persistent=False)))


@dataclass(frozen=True, slots=True)
class DIDCommMediator:
    """
    A mediator, as its DID document describes it.

    :param http_uri: for envelopes.
    :param ws_uri: of the WebSocket; None if the document has none.
    """

    did: str
    document: DIDDocument
    http_uri: str
    ws_uri: str | None

    @classmethod
    def from_document(cls, document: DIDDocument) -> DIDCommMediator:
        """
        Read a DID document.

        :raise UnreadableMessage: it has no HTTP endpoint.
        """
        http = document.http_endpoints()
        if not http:
            raise UnreadableMessage("no HTTP endpoint")
        uris = (endpoint.uri for service in document.services for endpoint in service.endpoints)
        return cls(
            document.did, document, http[0].uri, next((u for u in uris if u.startswith(("ws://", "wss://"))), None)
        )

    @classmethod
    def from_did(cls, did: str) -> DIDCommMediator:
        """
        Resolve a DID locally.

        :raise LookupError: it needs the network.
        """
        return cls.from_document(resolve_local(did))


async def fetch_invitation(http: TreqClient, url: str) -> dict[str, Any]:
    """
    Fetch the out-of-band invitation of a mediator.

    :param url: its public URL.
    :raise UnreadableMessage: there is no invitation.
    """
    value = await fetch_json(http, f"{url.rstrip('/')}/invitation")
    if value.get("type") != INVITATION or not isinstance(value.get("from"), str):
        raise UnreadableMessage("not an invitation")
    return value


async def discover_mediator(http: TreqClient, url: str) -> DIDCommMediator:
    """
    Find the mediator at a public URL by its invitation; a did:web is resolved at the same URL.

    :raise UnreadableMessage: there is no invitation, or no valid document.
    """
    did = (await fetch_invitation(http, url))["from"]
    try:
        return DIDCommMediator.from_did(did)
    except DIDWebLookupRequired:
        document = await fetch_json(http, f"{url.rstrip('/')}/.well-known/did.json")
        return DIDCommMediator.from_document(parse_did_document(did, document))


async def fetch_json(http: TreqClient, url: str) -> dict[str, Any]:
    """
    Fetch a JSON object.

    :raise UnreadableMessage: there is none.
    """
    response = await http.get(url, headers=Headers({"Accept": ["application/json"]}), allow_redirects=False)
    body = await response.content()
    if response.code != 200:
        raise UnreadableMessage(f"HTTP {response.code} at {url}")
    try:
        return encoding.loads_object(body)
    except ValueError:
        raise UnreadableMessage(f"no JSON object at {url}") from None


HTTP_TIMEOUT_SECONDS = 30.0


class HTTPResponse(NamedTuple):
    """
    An HTTP response.

    :param headers: by lower-case name; the last one of a name.
    """

    status: int
    headers: dict[str, str]
    body: bytes


class DIDCommWallet(MediationRequests):
    """
    An identity and its account at a mediator; wallets may share an HTTP client and a document cache.

    :param mediator: may also be given to :meth:`enrol`.
    :param clock: for `created_time` and time-outs.
    """

    def __init__(
        self,
        identity: WalletIdentity,
        http: TreqPoster,
        clock: IReactorTime,
        mediator: DIDCommMediator | None = None,
        documents: DIDDocumentCache | None = None,
    ) -> None:
        super().__init__(self.request, identity.did)
        self.identity = identity
        self.clock = clock
        self.documents = documents or DIDDocumentCache()
        self._http = http
        self._mediator = mediator
        if mediator is not None:
            self.documents.add(mediator.document)

    @classmethod
    def generate(
        cls, mediator: DIDCommMediator, http: TreqPoster, clock: IReactorTime, *, method: DIDMethod = "did:peer:2"
    ) -> DIDCommWallet:
        """A wallet with a new identity of this mediator, which is not enrolled yet."""
        endpoint = None if method == "did:key" else mediator.did
        return cls(WalletIdentity.generate(method, endpoint=endpoint), http, clock, mediator)

    @property
    def did(self) -> str:
        """The identity's DID."""
        return self.identity.did

    @property
    def mediator(self) -> DIDCommMediator:
        """
        The wallet's mediator.

        :raise RuntimeError: it has none yet.
        """
        if self._mediator is None:
            raise RuntimeError("the wallet has no mediator yet")
        return self._mediator

    async def enrol(
        self, mediator: DIDCommMediator | None = None, *, version: CoordinationVersion | None = None
    ) -> tuple[str, ...]:
        """
        Request mediation; the routing DIDs. No message is accepted before :meth:`register`.

        :param mediator: replaces the current one.
        :param version: of Coordinate Mediation, from now on.
        :raise UnreadableMessage: the grant names another mediator.
        """
        if mediator is not None:
            self._mediator = mediator
            self.documents.add(mediator.document)
        self.version = version or self.version
        granted = await self.grant()
        if canonicalize_did(self.mediator.did) not in map(canonicalize_did, granted):
            raise UnreadableMessage("a grant of another mediator")
        return granted

    def pack(
        self, type_: str, body: Mapping[str, Any] | None = None, /, **headers: Any
    ) -> tuple[dict[str, Any], bytes]:
        """
        A message to the mediator: plaintext and authcrypt.

        :param headers: override `from`, `to`, `created_time` and `return_route: all`; None removes one.
        """
        defaults = {
            "from": self.did,
            "to": [self.mediator.did],
            "created_time": int(self.clock.seconds()),
            "return_route": "all",
        }
        message = compose_message(type_, body, **{**defaults, **headers})
        return message, authcrypt(message, self.identity, self.mediator.document)

    async def request(self, type_: str, body: Mapping[str, Any] | None = None, /, **headers: Any) -> Message:
        """
        Send a request; the mediator's response, after all checks.

        :raise MediatorProblem: a problem report in any packing, or an HTTP status other than 200.
        :raise UnreadableMessage: the response is not from the mediator, not for us, or in another thread.
        """
        message, envelope = self.pack(type_, body, **headers)
        response = await self.post(envelope)
        if response.headers.get("content-type") != ENCRYPTED_MEDIA_TYPE:
            if response.status != 200:
                raise self._make_problem(response)
            raise UnreadableMessage("a response of another media type")
        opened = self.from_mediator(response.body)
        if opened.message.type.uri == PROBLEM_REPORT:
            raise MediatorProblem(response.status, encoding.loads_object(opened.plaintext))
        if opened.message.thid != message.get("thid", message["id"]):
            raise UnreadableMessage("a response in another thread")
        return opened.message

    async def post(
        self, body: bytes, *, url: str | None = None, content_type: str | None = ENCRYPTED_MEDIA_TYPE
    ) -> HTTPResponse:
        """POST bytes; to the mediator if no URL is given."""
        headers = Headers({} if content_type is None else {"Content-Type": [content_type]})
        sent = self._http.post(url or self.mediator.http_uri, data=body, headers=headers, allow_redirects=False)
        return await read_response(sent, self.clock)

    async def send(self, recipient_did: str, text: str) -> str:
        """
        Send a basic message along the route in the recipient's document; its id.

        :raise MediatorProblem: the mediator rejected it.
        """
        now = int(self.clock.seconds())
        message = compose_message(
            BASIC_MESSAGE, {"content": text}, to=[recipient_did], created_time=now, **{"from": self.did}
        )
        recipient = self.documents.resolve(recipient_did)
        route = find_route(recipient, self.documents.resolve)
        envelope = authcrypt(message, self.identity, recipient)
        response = await self.post(
            wrap_in_forwards(envelope, recipient_did, route.hops, self.documents.resolve), url=route.uri
        )
        if response.status != 202 or response.body:
            raise self._make_problem(response)
        return str(message["id"])

    def open(self, payload: bytes | DeliveredMessage) -> OpenedMessage:
        """
        Decrypt a delivered message.

        :raise UnreadableMessage: a check failed.
        """
        raw = payload.payload if isinstance(payload, DeliveredMessage) else payload
        return unpack_message(raw, self.identity, self.documents.resolve)

    def from_mediator(self, raw: bytes) -> OpenedMessage:
        """
        Decrypt a message of the mediator itself, which must name us in `to`.

        :raise UnreadableMessage: a check failed.
        """
        opened = self.open(raw)
        if opened.sender is None or canonicalize_did(opened.sender) != canonicalize_did(self.mediator.did):
            raise UnreadableMessage("not authenticated as the mediator")
        if not opened.message.to:
            raise UnreadableMessage("addressed to nobody")
        return opened

    def _make_problem(self, response: HTTPResponse) -> MediatorProblem:
        try:
            report = open_problem_report(response.body, self.documents.resolve)
        except UnreadableMessage:
            report = {}
        return MediatorProblem(response.status, report if report.get("type") == PROBLEM_REPORT else {})


async def read_response(sent: Awaitable[Any], clock: IReactorTime) -> HTTPResponse:
    """
    Wait for a response.

    :param sent: treq's response.
    :raise twisted.internet.defer.TimeoutError: there was none within 30 s.
    """

    async def read() -> HTTPResponse:
        response = await sent
        pairs = response.headers.getAllRawHeaders()
        headers = {name.decode("latin-1").lower(): values[-1].decode("latin-1") for name, values in pairs}
        return HTTPResponse(response.code, headers, await response.content())

    answer: Deferred[HTTPResponse] = Deferred.fromCoroutine(read())
    return await answer.addTimeout(HTTP_TIMEOUT_SECONDS, clock)
