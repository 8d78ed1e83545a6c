"""
A DIDComm v1 wallet over HTTP, and its requests over any connection: Coordinate Mediation 1.0, Pickup 2.0 and 1.0,
Trust Ping, Discover Features, push notifications (Aries RFC 0211, 0685, 0212, 0048, 0031, 0557, 0734).

It checks what it receives as the strictest library does. Everything that it sends can be had unsent, and changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from treq.client import HTTPClient
from twisted.internet.interfaces import IReactorTime
from twisted.web.http_headers import Headers

from mediatord.protocol import encoding
from mediatord.protocol.didcomm.push_notifications import PUSH_PROTOCOLS, PushServiceName
from mediatord.protocol.didcomm_v1.envelope import ENVELOPE_MEDIA_TYPE, pack_authcrypt
from mediatord.protocol.didcomm_v1.keys import InvalidKey, KeySpelling, SigningKey, parse_key, spell_key
from mediatord.protocol.didcomm_v1.message import DIDCOMM_ORG, V1Message, parse_type
from mediatord.wallet.didcomm_client import (
    DeliveredMessage,
    HTTPResponse,
    MediatorProblem,
    fetch_json,
    read_response,
)
from mediatord.wallet.didcomm_messages import UnreadableMessage
from mediatord.wallet.didcomm_v1_messages import (
    HandshakeProtocol,
    OpenedV1Message,
    V1Handshake,
    V1Invitation,
    V1Mediator,
    compose_v1_message,
    generate_key,
    unpack_v1_message,
    wrap_in_v1_forwards,
)

COORDINATION = "coordinate-mediation/1.0"
PICKUP_2 = "messagepickup/2.0"
PICKUP_1 = "messagepickup/1.0"
PING = "trust_ping/1.0"
BASIC_MESSAGE = "basicmessage/1.0/message"
_ACK = "notification/1.0/ack"

ReturnRoute = Literal["all", "thread", "none"]


@dataclass(frozen=True, slots=True)
class V1Grant:
    """
    What a mediator grants.

    :param routing_keys: as they are spelled, to put into documents.
    """

    endpoint: str
    routing_keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class V1QueueStatus:
    """State of a queue; times as text."""

    message_count: int
    live_delivery: bool | None = None
    total_bytes: int | None = None
    recipient_key: str | None = None
    longest_waited_seconds: int | None = None
    oldest_received_time: str | None = None
    newest_received_time: str | None = None


class V1Requests:
    """
    The requests of one wallet.

    Methods raise :class:`~mediatord.wallet.didcomm_client.MediatorProblem` when the mediator rejects a request, and
    :class:`~mediatord.wallet.didcomm_messages.UnreadableMessage` when its response does not pass the checks.

    :param spelling: of keys in requests.
    """

    def __init__(self, spelling: KeySpelling = "did:key") -> None:
        self.spelling: KeySpelling = spelling

    async def request(self, type_: str, members: Mapping[str, Any] | None = None, /) -> V1Message:
        """Send a request; its response."""
        raise NotImplementedError

    async def grant(self) -> V1Grant:
        """Request mediation."""
        reply = await self.request(f"{COORDINATION}/mediate-request")
        require_type(reply, f"{COORDINATION}/mediate-grant")
        endpoint, keys = reply.members.get("endpoint"), reply.members.get("routing_keys")
        if not isinstance(endpoint, str) or not isinstance(keys, list) or not keys:
            raise UnreadableMessage("a grant without endpoint or routing keys")
        try:
            for key in keys:
                parse_key(key)
        except InvalidKey:
            raise UnreadableMessage("a routing key that is none") from None
        return V1Grant(endpoint, tuple(keys))

    async def register(self, *keys: str) -> list[str]:
        """Register recipient keys, given as did:key; a result for each, such as `success`."""
        return await self.update_keys("add", [self.spell(key) for key in keys])

    async def unregister(self, *keys: str) -> list[str]:
        """Unregister recipient keys, given as did:key."""
        return await self.update_keys("remove", [self.spell(key) for key in keys])

    async def update_keys(self, action: str, names: Iterable[str]) -> list[str]:
        """Send a keylist update with keys as they are spelled; the results."""
        entries = [{"recipient_key": name, "action": action} for name in names]
        reply = await self.request(f"{COORDINATION}/keylist-update", {"updates": entries})
        require_type(reply, f"{COORDINATION}/keylist-update-response")
        updated = _read_objects(reply, "updated")
        echoed = [{"recipient_key": one.get("recipient_key"), "action": one.get("action")} for one in updated]
        if echoed != entries:
            raise UnreadableMessage("results of other updates")
        return [str(one.get("result")) for one in updated]

    async def registered(self, *, limit: int | None = None, offset: int = 0) -> list[str]:
        """The registered keys as the mediator spells them, or a slice of them."""
        members = {} if limit is None else {"paginate": {"limit": limit, "offset": offset}}
        reply = await self.request(f"{COORDINATION}/keylist-query", members)
        require_type(reply, f"{COORDINATION}/keylist")
        return [str(one.get("recipient_key")) for one in _read_objects(reply, "keys")]

    async def status(self, recipient_key: str | None = None) -> V1QueueStatus:
        """State of the queue of one key, or of all."""
        return read_v1_status(await self.request(f"{PICKUP_2}/status-request", self._name(recipient_key)))

    async def fetch(self, limit: int = 10, recipient_key: str | None = None) -> list[DeliveredMessage]:
        """Fetch the oldest messages, which stay queued until they are acknowledged."""
        members = {"limit": limit, **self._name(recipient_key)}
        reply = await self.request(f"{PICKUP_2}/delivery-request", members)
        if reply.type.key == parse_type(f"{DIDCOMM_ORG}{PICKUP_2}/status").key:
            if read_v1_status(reply).message_count:
                raise UnreadableMessage("a count in place of a delivery")
            return []
        return read_v1_delivery(reply)

    async def acknowledge(self, ids: Iterable[str | DeliveredMessage]) -> V1QueueStatus:
        """Remove messages; the state of the queue."""
        names = [one if isinstance(one, str) else one.id for one in ids]
        return read_v1_status(await self.request(f"{PICKUP_2}/messages-received", {"message_id_list": names}))

    async def fetch_batch(self, size: int = 10) -> list[DeliveredMessage]:
        """Fetch the oldest messages by Pickup 1.0, which has no acknowledgement."""
        return read_v1_batch(await self.request(f"{PICKUP_1}/batch-pickup", {"batch_size": size}))

    async def count(self) -> int:
        """Number of messages that wait, by Pickup 1.0."""
        reply = await self.request(f"{PICKUP_1}/status-request")
        require_type(reply, f"{PICKUP_1}/status")
        count = reply.members.get("message_count")
        if type(count) is not int:
            raise UnreadableMessage("a status without a count")
        return count

    async def ping(self) -> None:
        """Ping the mediator and wait for its response."""
        reply = await self.request(f"{PING}/ping", {"response_requested": True})
        require_type(reply, f"{PING}/ping_response")

    async def serves(self, protocol_uri: str) -> bool:
        """Whether the mediator discloses that it serves a protocol, by Discover Features 2.0."""
        query = {"feature-type": "protocol", "match": protocol_uri}
        reply = await self.request("discover-features/2.0/queries", {"queries": [query]})
        require_type(reply, "discover-features/2.0/disclosures")
        return any(one.get("id") == protocol_uri for one in _read_objects(reply, "disclosures"))

    async def disclose(self, query: str) -> list[str]:
        """The protocols that match a query of Discover Features 1.0."""
        reply = await self.request("discover-features/1.0/query", {"query": query})
        require_type(reply, "discover-features/1.0/disclose")
        return [str(one.get("pid")) for one in _read_objects(reply, "protocols")]

    async def set_push_device(self, service: PushServiceName, values: Mapping[str, Any]) -> None:
        """
        Register a device for push notifications, or with null values remove all of the service.

        :param values: `device_token` and, for FCM, `device_platform`.
        """
        require_type(await self.request(PUSH_PROTOCOLS[service].type("set"), values), _ACK)

    async def get_push_device(self, service: PushServiceName) -> dict[str, Any]:
        """The members of the answer to a question for the device that was registered last."""
        reply = await self.request(PUSH_PROTOCOLS[service].type("get"))
        if reply.type.key != parse_type(PUSH_PROTOCOLS[service].type("info")).key:
            raise UnreadableMessage("a response of another type")
        return {name: value for name, value in reply.members.items() if name[0] not in "@~"}

    def spell(self, key: str) -> str:
        """A key, given as did:key, as this wallet spells keys."""
        return spell_key(key, self.spelling)

    def _name(self, recipient_key: str | None) -> dict[str, str]:
        return {} if recipient_key is None else {"recipient_key": self.spell(recipient_key)}


def require_type(message: V1Message, type_: str) -> None:
    """
    Check the type of a response.

    :param type_: without prefix.
    :raise UnreadableMessage: it is another one.
    """
    if message.type.key != parse_type(DIDCOMM_ORG + type_).key:
        raise UnreadableMessage("a response of another type")


def _read_objects(message: V1Message, name: str) -> list[dict[str, Any]]:
    found = message.members.get(name)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise UnreadableMessage(f"{name} is not a list of objects")
    return found


def read_v1_status(message: V1Message) -> V1QueueStatus:
    """
    Read a `status` of Pickup 2.0.

    :raise UnreadableMessage: it does not conform to RFC 0685.
    """
    require_type(message, f"{PICKUP_2}/status")
    members = message.members
    types: dict[str, type] = {
        "message_count": int,
        "live_delivery": bool,
        "total_bytes": int,
        "recipient_key": str,
        "longest_waited_seconds": int,
        "oldest_received_time": str,
        "newest_received_time": str,
    }
    for name, type_ in types.items():
        if name in members and type(members[name]) is not type_:
            raise UnreadableMessage(f"{name} of the wrong type")
    if "message_count" not in members:
        raise UnreadableMessage("a status without a count")
    return V1QueueStatus(**{name: members[name] for name in types if name in members})


def read_v1_delivery(message: V1Message) -> list[DeliveredMessage]:
    """
    Read a `delivery` of Pickup 2.0.

    :raise UnreadableMessage: it does not conform to RFC 0685, or is empty.
    """
    require_type(message, f"{PICKUP_2}/delivery")
    attachments = _read_objects(message, "~attach")
    if not attachments:
        raise UnreadableMessage("an empty delivery")
    return [_read_attachment(one) for one in attachments]


def _read_attachment(attachment: Mapping[str, Any]) -> DeliveredMessage:
    id_, data = attachment.get("@id"), attachment.get("data")
    if not isinstance(id_, str) or not isinstance(data, dict) or len(data) != 1:
        raise UnreadableMessage("an attachment without an id, or not with exactly one form of data")
    try:
        if "json" in data:
            return DeliveredMessage(id_, encoding.dumps(data["json"]), "json")
        return DeliveredMessage(id_, encoding.decode_base64url(data["base64"]), "base64")
    except (KeyError, ValueError):
        raise UnreadableMessage("an invalid attachment") from None


def read_v1_batch(message: V1Message) -> list[DeliveredMessage]:
    """
    Read a `batch` of Pickup 1.0, which may be empty.

    :raise UnreadableMessage: it does not conform to RFC 0212, or an id is not there in both spellings.
    """
    require_type(message, f"{PICKUP_1}/batch")
    found = []
    for one in _read_objects(message, "messages~attach"):
        id_, payload = one.get("id"), one.get("message")
        if not isinstance(id_, str) or one.get("@id") != id_ or not isinstance(payload, dict):
            raise UnreadableMessage("an invalid message of a batch")
        found.append(DeliveredMessage(id_, encoding.dumps(payload), "json"))
    return found


def make_v1_problem(status: int | None, message: V1Message) -> MediatorProblem:
    """The problem that a report is about, of any protocol."""
    description = message.members.get("description")
    texts = description if isinstance(description, dict) else {}
    code = texts.get("code") or message.members.get("problem-code", "")
    return MediatorProblem(
        status, {"body": {"code": code, "comment": texts.get("en", "")}, "pthid": message.pthid or message.thid}
    )


def is_v1_problem(message: V1Message) -> bool:
    """Whether a message is a problem report, of any protocol."""
    return message.type.name == "problem-report"


async def fetch_v1_invitation(http: HTTPClient, url: str) -> V1Invitation:
    """
    Fetch the DIDComm v1 invitation of a mediator.

    :param url: its public URL.
    :raise UnreadableMessage: there is none.
    """
    return V1Invitation.from_json(await fetch_json(http, f"{url.rstrip('/')}/invitation/v1"))


class V1Wallet(V1Requests):
    """
    A wallet and its connection with a mediator.

    :param key: for this connection, which names its account.
    :param clock: for time-outs.
    :param prefix: of the message types that it sends.
    :ivar keys: all its key pairs, by did:key.
    :ivar granted: what the mediator has granted.
    """

    def __init__(
        self,
        key: SigningKey,
        mediator: V1Mediator,
        http: HTTPClient,
        clock: IReactorTime,
        *,
        prefix: str = DIDCOMM_ORG,
        spelling: KeySpelling = "did:key",
        media_type: str = ENVELOPE_MEDIA_TYPE,
    ) -> None:
        super().__init__(spelling)
        self.key = key
        self.keys: dict[str, SigningKey] = {key.did_key: key}
        self.mediator = mediator
        self.granted: V1Grant | None = None
        self.clock = clock
        self.prefix = prefix
        self.media_type = media_type
        self._http = http

    @classmethod
    async def connect(
        cls,
        invitation: V1Invitation,
        http: HTTPClient,
        clock: IReactorTime,
        *,
        protocol: HandshakeProtocol = "didexchange/1.1",
        prefix: str = DIDCOMM_ORG,
        spelling: KeySpelling = "did:key",
        key: SigningKey | None = None,
        **options: Any,
    ) -> V1Wallet:
        """
        Connect a new wallet with the mediator of an invitation.

        :param key: of the wallet for this connection; by default a new one.
        :param options: further ones of :class:`V1Handshake`.
        :raise MediatorProblem: the mediator refused.
        :raise UnreadableMessage: its response does not pass the checks.
        """
        key = key or generate_key()
        handshake = V1Handshake(invitation, key, protocol, prefix=prefix, **options)
        # Until the response, the key and endpoint of the invitation are all that is known of the mediator.
        unconnected = V1Mediator("", invitation.key, invitation.endpoint, None)
        wallet = cls(key, unconnected, http, clock, prefix=prefix, spelling=spelling)
        response = await wallet.exchange(handshake.make_request())
        wallet.mediator = handshake.read_response(response)
        await wallet.notify(handshake.make_complete())
        return wallet

    def pack(
        self, type_: str, members: Mapping[str, Any] | None = None, *, return_route: ReturnRoute | None = "all"
    ) -> tuple[dict[str, Any], bytes]:
        """A message to the mediator: plaintext and authcrypt."""
        message = compose_v1_message(type_, members, prefix=self.prefix, return_route=return_route)
        return message, self.encrypt(message)

    def encrypt(self, message: Mapping[str, Any]) -> bytes:
        """An authcrypt for the mediator."""
        return pack_authcrypt(encoding.dumps(dict(message)), self.mediator.key, self.key)

    async def request(self, type_: str, members: Mapping[str, Any] | None = None, /) -> V1Message:
        """
        Send a request; the mediator's response, after all checks.

        :raise MediatorProblem: a problem report, or a status other than 200 without one.
        :raise UnreadableMessage: the response is not from the mediator, not for us, or in another thread.
        """
        message, _ = self.pack(type_, members)
        return (await self.exchange(message)).message

    async def exchange(self, message: Mapping[str, Any]) -> OpenedV1Message:
        """As :meth:`request`, for a whole message."""
        response = await self.post(self.encrypt(message))
        if not response.body:
            raise MediatorProblem(response.status)
        if response.headers.get("content-type") != self.media_type:
            raise UnreadableMessage("a response of another media type")
        opened = self.from_mediator(response.body)
        if is_v1_problem(opened.message):
            raise make_v1_problem(response.status, opened.message)
        if response.status != 200:
            raise UnreadableMessage("a response with another status")
        if opened.message.thid != (message.get("~thread") or {}).get("thid", message["@id"]):
            raise UnreadableMessage("a response in another thread")
        return opened

    async def notify(self, message: Mapping[str, Any]) -> None:
        """
        Send a message that is not answered.

        :raise MediatorProblem: it was refused.
        :raise UnreadableMessage: it was answered.
        """
        response = await self.post(self.encrypt(message))
        if response.status not in (200, 202):
            raise MediatorProblem(response.status)
        if response.body:
            raise UnreadableMessage("an answer to a message that has none")

    async def post(self, body: bytes, *, url: str | None = None, media_type: str | None = None) -> HTTPResponse:
        """POST bytes; to the mediator if no URL is given."""
        headers = Headers({"Content-Type": [media_type or self.media_type]})
        sent = self._http.post(url or self.mediator.http_uri, data=body, headers=headers, allow_redirects=False)
        return await read_response(sent, self.clock)

    async def enrol(self) -> V1Grant:
        """Request mediation; what was granted is remembered."""
        self.granted = await self.grant()
        return self.granted

    async def add_key(self, key: SigningKey | None = None) -> SigningKey:
        """
        Register a key pair, by default a new one, to receive messages by.

        :raise UnreadableMessage: the mediator did not register it.
        """
        key = key or generate_key()
        results = await self.register(key.did_key)
        if results != ["success"]:
            raise UnreadableMessage(f"not registered: {results}")
        self.keys[key.did_key] = key
        return key

    def make_forward(self, to: str, text: str, route: V1Grant | None = None) -> bytes:
        """
        A basic message to a key of another wallet, encrypted to it and wrapped for the routing keys.

        :param route: of the recipient; by default what our own mediator has granted.
        """
        message = compose_v1_message(BASIC_MESSAGE, {"content": text}, prefix=self.prefix)
        envelope = pack_authcrypt(encoding.dumps(message), to, self.key)
        return self.wrap(to, envelope, route)

    def wrap(self, to: str, envelope: bytes, route: V1Grant | None = None) -> bytes:
        """Wrap an envelope for the routing keys; `to` and `route` as in :meth:`make_forward`."""
        return wrap_in_v1_forwards(envelope, to, self._route(route).routing_keys, prefix=self.prefix)

    async def send(self, to: str, text: str, route: V1Grant | None = None) -> None:
        """
        Send a basic message; the parameters are those of :meth:`make_forward`.

        :raise MediatorProblem: it was not accepted.
        """
        response = await self.post(self.make_forward(to, text, route), url=self._route(route).endpoint)
        if response.status not in (200, 202) or response.body:
            raise MediatorProblem(response.status)

    def _route(self, route: V1Grant | None) -> V1Grant:
        found = route or self.granted
        if found is None:
            raise UnreadableMessage("no mediation was granted")
        return found

    def open(self, payload: bytes | DeliveredMessage) -> OpenedV1Message:
        """
        Decrypt a delivered message.

        :raise UnreadableMessage: a check failed.
        """
        return unpack_v1_message(payload.payload if isinstance(payload, DeliveredMessage) else payload, self.keys)

    def from_mediator(self, raw: bytes) -> OpenedV1Message:
        """
        Decrypt a message of the mediator itself.

        :raise UnreadableMessage: a check failed, or it is not authenticated as the mediator.
        """
        opened = self.open(raw)
        if opened.sender != self.mediator.key or opened.recipient != self.key.did_key:
            raise UnreadableMessage("not from the mediator to this connection")
        return opened
