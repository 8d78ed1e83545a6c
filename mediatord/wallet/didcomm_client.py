"""
The mediator as a wallet sees it: found by its invitation, addressed by its DID document (reference 7.4, 9).

A wallet that speaks to its mediator over HTTP.
"""

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
from mediatord.protocol.didcomm.did_document import (
    DIDDocument,
    DIDWebLookupRequired,
    ServiceEndpoint,
    parse_did_document,
)
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
    """What a wallet that knows its mediator uses of treq."""

    def post(self, url: str, /, *, data: bytes, headers: Headers, allow_redirects: bool) -> Awaitable[Any]: ...


class TreqClient(TreqPoster, Protocol):
    """What is used of treq: its client, or its in-memory double in tests."""

    def get(self, url: str, /, *, headers: Headers, allow_redirects: bool) -> Awaitable[Any]: ...


def open_http(reactor: IReactorCore) -> TreqClient:
    """An HTTP client that leaves no connection behind."""
    return HTTPClient(Agent(reactor, pool=HTTPConnectionPool(reactor, persistent=False)))


@dataclass(frozen=True, slots=True)
class DIDCommMediator:
    """
    :param http_uri: where envelopes are POSTed.
    :param ws_uri: where a socket is opened; None when the document names no such place.
    """

    did: str
    document: DIDDocument
    http_uri: str
    ws_uri: str | None

    @classmethod
    def from_document(cls, document: DIDDocument) -> DIDCommMediator:
        """
        :raise Unreadable: the document has no HTTP endpoint.
        """
        http = document.http_endpoints()
        if not http:
            raise UnreadableMessage("no HTTP endpoint")
        endpoints = (endpoint for service in document.services for endpoint in service.endpoints)
        return cls(
            document.did, document, http[0].uri, next((one.uri for one in endpoints if _is_websocket(one)), None)
        )

    @classmethod
    def from_did(cls, did: str) -> DIDCommMediator:
        """
        The mediator of a DID that resolves by itself.

        :raise LookupError: it does not.
        """
        return cls.from_document(resolve_local(did))


def _is_websocket(endpoint: ServiceEndpoint) -> bool:
    return endpoint.uri.startswith(("ws://", "wss://"))


async def fetch_invitation(http: TreqClient, url: str) -> dict[str, Any]:
    """
    The out-of-band invitation a mediator publishes.

    :param url: its public URL.
    :raise Unreadable: what was found there is no invitation.
    """
    value = await fetch_json(http, f"{url.rstrip('/')}/invitation")
    if value.get("type") != INVITATION or not isinstance(value.get("from"), str):
        raise UnreadableMessage("not an invitation")
    return value


async def discover_mediator(http: TreqClient, url: str) -> DIDCommMediator:
    """
    The mediator at a public URL, by its invitation; a did:web is read from that same place.

    :raise Unreadable: there is no invitation, or no usable document.
    """
    did = (await fetch_invitation(http, url))["from"]
    try:
        return DIDCommMediator.from_did(did)
    except DIDWebLookupRequired:
        document = await fetch_json(http, f"{url.rstrip('/')}/.well-known/did.json")
        return DIDCommMediator.from_document(parse_did_document(did, document))


async def fetch_json(http: TreqClient, url: str) -> dict[str, Any]:
    """
    The JSON object at a URL.

    :raise Unreadable: there is none.
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
    A raw HTTP response.

    :param headers: by lower-case name; of several with one name the last.
    """

    status: int
    headers: dict[str, str]
    body: bytes


class DIDCommWallet(MediationRequests):
    """
    One identity and its account at a mediator; several wallets may share an HTTP client and an address book.

    :param mediator: may also be given to :meth:`enrol`.
    :param clock: for `created_time` and time-outs.
    """

    def __init__(
        self,
        identity: WalletIdentity,
        http: TreqPoster,
        clock: IReactorTime,
        mediator: DIDCommMediator | None = None,
        book: DIDDocumentCache | None = None,
    ) -> None:
        super().__init__(self.request, identity.did)
        self.identity = identity
        self.clock = clock
        self.book = book or DIDDocumentCache()
        self._http = http
        self._mediator = mediator
        if mediator is not None:
            self.book.add(mediator.document)

    @classmethod
    def generate(
        cls, mediator: DIDCommMediator, http: TreqPoster, clock: IReactorTime, *, method: DIDMethod = "did:peer:2"
    ) -> DIDCommWallet:
        """A wallet with a new identity whose messages go to `mediator`; it is not enrolled yet."""
        endpoint = None if method == "did:key" else mediator.did
        return cls(WalletIdentity.generate(method, endpoint=endpoint), http, clock, mediator)

    @property
    def did(self) -> str:
        """The wallet's own."""
        return self.identity.did

    @property
    def mediator(self) -> DIDCommMediator:
        """
        The mediator everything is asked of.

        :raise RuntimeError: none has been named.
        """
        if self._mediator is None:
            raise RuntimeError("the wallet has no mediator yet")
        return self._mediator

    async def enrol(
        self, mediator: DIDCommMediator | None = None, *, version: CoordinationVersion | None = None
    ) -> tuple[str, ...]:
        """
        Ask for mediation; the routing DIDs that are granted. Nothing is routable before :meth:`register`.

        :param mediator: instead of the one given before.
        :param version: of Coordinate Mediation, from now on.
        :raise Unreadable: the grant names somebody else's DID.
        """
        if mediator is not None:
            self._mediator = mediator
            self.book.add(mediator.document)
        self.version = version or self.version
        granted = await self.grant()
        if canonicalize_did(self.mediator.did) not in map(canonicalize_did, granted):
            raise UnreadableMessage("a grant of another mediator")
        return granted

    def pack(
        self, type_: str, body: Mapping[str, Any] | None = None, /, **headers: Any
    ) -> tuple[dict[str, Any], bytes]:
        """
        A message to the mediator, and the same authcrypted.

        :param headers: added to or replacing `from`, `to`, `created_time` and `return_route: all`; None removes one.
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
        Ask the mediator anything; its answer, after all checks.

        :raise Problem: it answered with a problem report, however it is packed, or with another HTTP status.
        :raise Unreadable: the answer is not from the mediator, not for us, or belongs to another thread.
        """
        message, envelope = self.pack(type_, body, **headers)
        response = await self.post(envelope)
        if response.status != 200 and response.headers.get("content-type") != ENCRYPTED_MEDIA_TYPE:
            raise self._refusal(response)
        if response.headers.get("content-type") != ENCRYPTED_MEDIA_TYPE:
            raise UnreadableMessage("an answer of another media type")
        opened = self.from_mediator(response.body)
        if opened.message.type.uri == PROBLEM_REPORT:
            raise MediatorProblem(response.status, encoding.loads_object(opened.plaintext))
        if opened.message.thid != message.get("thid", message["id"]):
            raise UnreadableMessage("an answer in another thread")
        return opened.message

    async def post(
        self, body: bytes, *, url: str | None = None, content_type: str | None = ENCRYPTED_MEDIA_TYPE
    ) -> HTTPResponse:
        """POST bytes as they are, to the mediator if no URL is given."""
        headers = Headers({} if content_type is None else {"Content-Type": [content_type]})
        sent = self._http.post(url or self.mediator.http_uri, data=body, headers=headers, allow_redirects=False)
        return await read_response(sent, self.clock)

    async def send(self, recipient_did: str, text: str) -> str:
        """
        Send a basic message along the route the recipient's document names; the message's id.

        :raise Problem: the mediator did not take it.
        """
        now = int(self.clock.seconds())
        message = compose_message(
            BASIC_MESSAGE, {"content": text}, to=[recipient_did], created_time=now, **{"from": self.did}
        )
        recipient = self.book.resolve(recipient_did)
        route = find_route(recipient, self.book.resolve)
        envelope = authcrypt(message, self.identity, recipient)
        response = await self.post(
            wrap_in_forwards(envelope, recipient_did, route.hops, self.book.resolve), url=route.uri
        )
        if response.status != 202 or response.body:
            raise self._refusal(response)
        return str(message["id"])

    def open(self, payload: bytes | DeliveredMessage) -> OpenedMessage:
        """
        Decrypt a message that was delivered to us.

        :raise Unreadable: a check failed.
        """
        raw = payload.payload if isinstance(payload, DeliveredMessage) else payload
        return unpack_message(raw, self.identity, self.book.resolve)

    def from_mediator(self, raw: bytes) -> OpenedMessage:
        """
        Decrypt what must come from the mediator itself and name us in `to`.

        :raise Unreadable: a check failed.
        """
        opened = self.open(raw)
        if opened.sender is None or canonicalize_did(opened.sender) != canonicalize_did(self.mediator.did):
            raise UnreadableMessage("not authenticated as the mediator")
        if not opened.message.to:
            raise UnreadableMessage("addressed to nobody")
        return opened

    def _refusal(self, response: HTTPResponse) -> MediatorProblem:
        try:
            report = open_problem_report(response.body, self.book.resolve)
        except UnreadableMessage:
            report = {}
        return MediatorProblem(response.status, report if report.get("type") == PROBLEM_REPORT else {})


async def read_response(sent: Awaitable[Any], clock: IReactorTime) -> HTTPResponse:
    """
    What comes back for a request.

    :raise twisted.internet.defer.TimeoutError: nothing did for half a minute.
    """
    answer: Deferred[HTTPResponse] = Deferred.fromCoroutine(_read_whole(sent))
    return await answer.addTimeout(HTTP_TIMEOUT_SECONDS, clock)


async def _read_whole(sent: Awaitable[Any]) -> HTTPResponse:
    response = await sent
    headers = {
        name.decode("latin-1").lower(): values[-1].decode("latin-1") for name, values in _header_pairs(response)
    }
    return HTTPResponse(response.code, headers, await response.content())


def _header_pairs(response: Any) -> list[tuple[bytes, list[bytes]]]:
    return list(response.headers.getAllRawHeaders())
