"""
Requests of a wallet over any connection: Coordinate Mediation, Pickup, Trust Ping (reference 5 to 7.1), Discover
Features, push notifications.

A DIDComm wallet over HTTP, and the discovery of its mediator (reference 7.4, 9).
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from treq.client import HTTPClient
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorCore, IReactorTime
from twisted.web.client import Agent, HTTPConnectionPool
from twisted.web.http_headers import Headers

from mediatord.protocol import encoding
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.didcomm.did_document import DIDDocument, parse_did_document
from mediatord.protocol.didcomm.did_methods import DIDWebLookupRequired, resolve_local
from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE
from mediatord.protocol.didcomm.message import Message, extract_attachment_json
from mediatord.protocol.didcomm.push_notifications import PUSH_PROTOCOLS, PushServiceName
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import (
    BASIC_MESSAGE,
    AttachmentForm,
    DIDDocumentCache,
    OpenedMessage,
    UnreadableMessage,
    authcrypt,
    build_attachment,
    compose_message,
    find_route,
    open_problem_report,
    unpack_message,
    wrap_in_forwards,
)

CoordinationVersion = Literal["2.0", "3.0"]

PICKUP = "https://didcomm.org/messagepickup/3.0"
PING = "https://didcomm.org/trust-ping/2.0"
DISCOVER_FEATURES = "https://didcomm.org/discover-features/2.0"
PROBLEM_REPORT = "https://didcomm.org/report-problem/2.0/problem-report"

_NOT_REGISTERED = "e.p.req.not-registered-for-push-notifications"
_COORDINATION = "https://didcomm.org/coordinate-mediation"
# By version: update and its response, query and its response, and the name of the list (reference 5.2).
_MESSAGE_NAMES = {
    "2.0": ("keylist-update", "keylist-update-response", "keylist-query", "keylist", "keys"),
    "3.0": ("recipient-update", "recipient-update-response", "recipient-query", "recipient", "dids"),
}


class MediatorProblem(Exception):
    """
    The mediator rejected a request.

    :param status: HTTP status; None on a socket.
    :param report: the problem report; empty if there was none.
    :ivar code: the problem code; empty if there is none, as `comment`, the human-readable text.
    :ivar pthid: the thread that the problem is about.
    """

    def __init__(self, status: int | None, report: Mapping[str, Any] | None = None) -> None:
        self.status = status
        self.report = dict(report or {})
        body, pthid = self.report.get("body"), self.report.get("pthid")
        texts = body if isinstance(body, dict) else {}
        self.code, self.comment = str(texts.get("code", "")), str(texts.get("comment", ""))
        self.pthid = pthid if isinstance(pthid, str) else None
        super().__init__(f"{status or 'socket'} {self.code} {self.comment}".strip())


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """State of a queue (reference 6); times in Unix seconds."""

    message_count: int
    live_delivery: bool | None = None
    total_bytes: int | None = None
    recipient_did: str | None = None
    longest_waited_seconds: int | None = None
    oldest_received_time: int | None = None
    newest_received_time: int | None = None


@dataclass(frozen=True, slots=True)
class DeliveredMessage:
    """
    A message delivered by the mediator.

    :param id: for the acknowledgement.
    :param payload: the encrypted message; compact if it was attached as JSON.
    :param form: of the attachment.
    """

    id: str
    payload: bytes = field(repr=False)
    form: AttachmentForm


class MediationRequests:
    """
    The requests of one wallet.

    Methods raise :class:`MediatorProblem` when the mediator rejects a request, and
    :class:`~mediatord.wallet.didcomm_messages.UnreadableMessage` when its response does not pass the checks.

    :param did: the wallet's DID, the default of :meth:`register`.
    :param version: of Coordinate Mediation.
    """

    def __init__(self, did: str, version: CoordinationVersion = "3.0") -> None:
        self._did = did
        self.coordination_version: CoordinationVersion = version

    async def request(self, type_: str, body: Mapping[str, Any] | None = None, /, **headers: Any) -> Message:
        """Send a request; its response."""
        raise NotImplementedError

    async def grant(self) -> tuple[str, ...]:
        """Request mediation; the routing DIDs that are granted."""
        reply = await self.request(self._coordination("mediate-request"))
        _require_type(reply, self._coordination("mediate-grant"))
        routing_did = (reply.body or {}).get("routing_did")
        # 2.0 has a string, 3.0 a list (reference D13).
        dids = [routing_did] if self.coordination_version == "2.0" else routing_did
        if not (isinstance(dids, list) and dids and all(isinstance(did, str) for did in dids)):
            raise UnreadableMessage("a grant without a routing_did of this version")
        return tuple(dids)

    async def register(self, *dids: str, proofs: Iterable[bytes] = ()) -> list[str]:
        """
        Register recipient DIDs, by default the wallet's own; a result for each, such as `success`.

        :param proofs: of ownership, if the mediator requires them or
            another account has registered the DIDs.
        """
        return await self._update("add", dids or (self._did,), [build_attachment(proof) for proof in proofs])

    async def unregister(self, *dids: str) -> list[str]:
        """Unregister recipient DIDs, by default the wallet's own."""
        return await self._update("remove", dids or (self._did,))

    async def _update(
        self, action: str, dids: Iterable[str], attachments: Sequence[Mapping[str, Any]] = ()
    ) -> list[str]:
        update, answer, *_ = _MESSAGE_NAMES[self.coordination_version]
        entries = [{"recipient_did": did, "action": action} for did in dids]
        more = {"attachments": list(attachments)} if attachments else {}
        reply = await self.request(self._coordination(update), {"updates": entries}, **more)
        _require_type(reply, self._coordination(answer))
        updated = (reply.body or {}).get("updated")
        if not isinstance(updated, list) or not all(isinstance(one, dict) for one in updated):
            raise UnreadableMessage("no list of results")
        results = [str(one.get("result")) for one in updated]
        echoed = [{"recipient_did": one.get("recipient_did"), "action": one.get("action")} for one in updated]
        if echoed != entries:
            raise UnreadableMessage("results of other updates")
        return results

    async def registered(self, *, limit: int | None = None, offset: int = 0) -> list[str]:
        """The registered DIDs, or a slice of them."""
        _, _, query, answer, member = _MESSAGE_NAMES[self.coordination_version]
        body = {} if limit is None else {"paginate": {"limit": limit, "offset": offset}}
        reply = await self.request(self._coordination(query), body)
        _require_type(reply, self._coordination(answer))
        try:
            return [entry["recipient_did"] for entry in (reply.body or {})[member]]
        except (KeyError, TypeError):
            raise UnreadableMessage("no list of DIDs") from None

    async def status(self, recipient_did: str | None = None) -> QueueStatus:
        """State of the queue of one DID, or of all."""
        return read_status(await self.request(f"{PICKUP}/status-request", _add_recipient({}, recipient_did)))

    async def fetch(self, limit: int = 10, recipient_did: str | None = None) -> list[DeliveredMessage]:
        """Fetch the oldest messages, which stay queued until they are acknowledged."""
        reply = await self.request(f"{PICKUP}/delivery-request", _add_recipient({"limit": limit}, recipient_did))
        if reply.type.uri == f"{PICKUP}/status":
            return []
        return read_delivery(reply)

    async def acknowledge(self, ids: Iterable[str | DeliveredMessage]) -> QueueStatus:
        """Remove messages; the state of the queue."""
        names = [one if isinstance(one, str) else one.id for one in ids]
        return read_status(await self.request(f"{PICKUP}/messages-received", {"message_id_list": names}))

    async def ping(self) -> None:
        """Ping the mediator and wait for its response."""
        _require_type(await self.request(f"{PING}/ping", {"response_requested": True}), f"{PING}/ping-response")

    async def serves(self, protocol_uri: str) -> bool:
        """Whether the mediator discloses that it serves a protocol."""
        query = {"feature-type": "protocol", "match": protocol_uri}
        reply = await self.request(f"{DISCOVER_FEATURES}/queries", {"queries": [query]})
        _require_type(reply, f"{DISCOVER_FEATURES}/disclose")
        disclosures = (reply.body or {}).get("disclosures")
        if not isinstance(disclosures, list) or not all(isinstance(one, dict) for one in disclosures):
            raise UnreadableMessage("no list of features")
        return any(one.get("id") == protocol_uri for one in disclosures)

    async def set_push_device(self, service: PushServiceName, values: Mapping[str, Any]) -> None:
        """
        Register a device for push notifications.

        :param values: `device_token` and, for FCM, `device_platform`; for Web Push the subscription as
            `PushSubscription.toJSON()` returns it.
        """
        protocol = PUSH_PROTOCOLS[service]
        body = values if protocol.member is None else {protocol.member: values}
        _require_type(await self.request(protocol.type("set"), body), protocol.type("ack"))

    async def get_push_device(self, service: PushServiceName) -> dict[str, Any] | None:
        """The device that was registered last, as :meth:`set_push_device` takes it; None if there is none."""
        protocol = PUSH_PROTOCOLS[service]
        try:
            body = await self._get_push_info(service)
        except MediatorProblem as problem:
            if problem.code != _NOT_REGISTERED:
                raise
            return None
        values = body if protocol.member is None else body.get(protocol.member)
        if not (values is None or isinstance(values, dict)):
            raise UnreadableMessage("an invalid device")
        return values

    async def remove_push_devices(self, service: PushServiceName) -> None:
        """Remove all devices of one service."""
        names = {"fcm": ("device_token", "device_platform"), "apns": ("device_token",), "web_push": ("subscription",)}
        protocol = PUSH_PROTOCOLS[service]
        reply = await self.request(protocol.type("set"), dict.fromkeys(names[service]))
        _require_type(reply, protocol.type("ack"))

    async def vapid_public_key(self) -> str:
        """The key of the mediator for `PushManager.subscribe()`: 65 bytes, base64url."""
        key = (await self._get_push_info("web_push")).get("vapid_public_key")
        if not isinstance(key, str):
            raise UnreadableMessage("no VAPID key")
        return key

    async def _get_push_info(self, service: PushServiceName) -> dict[str, Any]:
        protocol = PUSH_PROTOCOLS[service]
        reply = await self.request(protocol.type("get"))
        _require_type(reply, protocol.type("info"))
        return reply.body or {}

    def _coordination(self, name: str) -> str:
        return f"{_COORDINATION}/{self.coordination_version}/{name}"


def read_status(message: Message) -> QueueStatus:
    """
    Read a `status`.

    :raise UnreadableMessage: it does not conform to reference 6.
    """
    _require_type(message, f"{PICKUP}/status")
    body = message.body or {}
    numbers = (
        "message_count", "total_bytes", "longest_waited_seconds", "oldest_received_time", "newest_received_time"
    )  # fmt: skip
    known = (*numbers, "live_delivery", "recipient_did")
    for name in numbers:
        if name in body and (not isinstance(body[name], int) or isinstance(body[name], bool)):
            raise UnreadableMessage(f"{name} is no integer")
    if "message_count" not in body or not isinstance(body.get("live_delivery", False), bool):
        raise UnreadableMessage("a status without a count, or with an odd live_delivery")
    return QueueStatus(**{name: body[name] for name in known if name in body})


def read_delivery(message: Message) -> list[DeliveredMessage]:
    """
    Read a `delivery`.

    :raise UnreadableMessage: it does not conform to reference 6.2.
    """
    _require_type(message, f"{PICKUP}/delivery")
    if not message.attachments:
        raise UnreadableMessage("an empty delivery")
    try:
        texts = extract_attachment_json(message)
    except ValueError:
        raise UnreadableMessage("invalid attachments") from None
    return [read_attachment(*one) for one in zip(message.attachments, texts, strict=True)]


def read_attachment(attachment: Mapping[str, Any], text: bytes | None = None) -> DeliveredMessage:
    """
    Read an attachment of a `delivery`.

    :param text: source of its `data.json`, if known.
    :raise UnreadableMessage: no id, or not exactly one of the two forms of data.
    """
    id_, data = attachment.get("id"), attachment.get("data")
    if not isinstance(id_, str) or not isinstance(data, dict) or len(data) != 1:
        raise UnreadableMessage("an attachment without an id, or not with exactly one form of data")
    try:
        if "json" in data:
            return DeliveredMessage(id_, encoding.dumps(data["json"]) if text is None else text, "json")
        return DeliveredMessage(id_, encoding.decode_base64url(data["base64"]), "base64")
    except (KeyError, TypeError, ValueError):
        raise UnreadableMessage("an invalid attachment") from None


def _require_type(message: Message, type_: str) -> None:
    if message.type.uri != type_:
        raise UnreadableMessage("a response of another type")


def _add_recipient(body: dict[str, Any], recipient_did: str | None) -> dict[str, Any]:
    return body if recipient_did is None else {**body, "recipient_did": recipient_did}


INVITATION = "https://didcomm.org/out-of-band/2.0/invitation"


def open_http(reactor: IReactorCore) -> HTTPClient:
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
        uris = (endpoint.uri for endpoint in document.endpoints)
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


async def fetch_invitation(http: HTTPClient, url: str) -> dict[str, Any]:
    """
    Fetch the out-of-band invitation of a mediator.

    :param url: its public URL.
    :raise UnreadableMessage: there is no invitation.
    """
    value = await fetch_json(http, f"{url.rstrip('/')}/invitation")
    if value.get("type") != INVITATION or not isinstance(value.get("from"), str):
        raise UnreadableMessage("not an invitation")
    return value


async def discover_mediator(http: HTTPClient, url: str) -> DIDCommMediator:
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


async def fetch_json(http: HTTPClient, url: str) -> dict[str, Any]:
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

    :param clock: for `created_time` and time-outs.
    """

    def __init__(
        self,
        identity: WalletIdentity,
        http: HTTPClient,
        clock: IReactorTime,
        mediator: DIDCommMediator,
        documents: DIDDocumentCache | None = None,
    ) -> None:
        super().__init__(identity.did)
        self.identity = identity
        self.clock = clock
        self.documents = documents or DIDDocumentCache()
        self.mediator = mediator
        self.documents.add(mediator.document)
        self._http = http

    @classmethod
    def generate(cls, mediator: DIDCommMediator, http: HTTPClient, clock: IReactorTime) -> DIDCommWallet:
        """A wallet with a new identity of this mediator, which is not enrolled yet."""
        return cls(WalletIdentity.generate(endpoint=mediator.did), http, clock, mediator)

    @property
    def did(self) -> str:
        """The identity's DID."""
        return self.identity.did

    async def enrol(self, *, version: CoordinationVersion | None = None) -> tuple[str, ...]:
        """
        Request mediation; the routing DIDs. No message is accepted before :meth:`register`.

        :param version: of Coordinate Mediation, from now on.
        :raise UnreadableMessage: the grant names another mediator.
        """
        self.coordination_version = version or self.coordination_version
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
        return message, self.encrypt(message)

    def encrypt(self, message: Mapping[str, Any]) -> bytes:
        """An authcrypt for the mediator."""
        return authcrypt(message, self.identity, self.mediator.document)

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
