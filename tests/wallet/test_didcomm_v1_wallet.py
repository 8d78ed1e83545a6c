"""The DIDComm v1 wallet of demo, tests and benchmark: its side of handshakes, and what it accepts from a mediator."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
from treq.client import HTTPClient
from treq.testing import StubTreq
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.resource import Resource
from twisted.web.server import Request

from mediatord.protocol import encoding
from mediatord.protocol.didcomm_v1 import connections, did_exchange
from mediatord.protocol.didcomm_v1.did_document import DIDForm
from mediatord.protocol.didcomm_v1.envelope import ENVELOPE_MEDIA_TYPE, pack_anoncrypt, pack_authcrypt
from mediatord.protocol.didcomm_v1.keys import SigningKey, encode_base58_key
from mediatord.protocol.didcomm_v1.message import DIDCOMM_ORG, OLD_PREFIX, V1Answer, serialize_answer
from mediatord.protocol.didcomm_v1.out_of_band import build_connection_invitation, build_invitation, build_url
from mediatord.wallet.didcomm_client import DeliveredMessage, MediatorProblem
from mediatord.wallet.didcomm_messages import UnreadableMessage
from mediatord.wallet.didcomm_socket import SocketClosedError
from mediatord.wallet.didcomm_v1_client import V1Grant, V1QueueStatus, V1Wallet
from mediatord.wallet.didcomm_v1_messages import (
    HandshakeProtocol,
    OpenedV1Message,
    V1Handshake,
    V1Invitation,
    V1Mediator,
    generate_key,
    unpack_v1_message,
    wrap_in_v1_forwards,
)
from mediatord.wallet.didcomm_v1_socket import V1Socket, connect_v1_socket
from tests.wallet.test_didcomm_wallet import InMemoryConnection

NOW = 1_800_000_000.0
URL = "https://mediator.example"
ENDPOINT = f"{URL}/didcomm"
ENDPOINTS = [ENDPOINT, "wss://mediator.example/didcomm"]
INVITATION_KEY, OWN_KEY = SigningKey.from_seed(b"\1" * 32), SigningKey.from_seed(b"\2" * 32)
INVITATION = V1Invitation.from_json(build_invitation(URL, ENDPOINT, INVITATION_KEY.did_key, "mediatord"))
PROTOCOLS: tuple[tuple[HandshakeProtocol, DIDForm], ...] = (
    ("didexchange/1.1", "did:peer:4"),
    ("didexchange/1.1", "did:peer:2"),
    ("didexchange/1.0", "did:peer:1"),
    ("didexchange/1.0", "nym"),
    ("connections/1.0", "nym"),
)
COORDINATION, PICKUP = "coordinate-mediation/1.0", "messagepickup/2.0"


# Invitations


def test_invitation_urls() -> None:
    """Both forms of the mediator's invitation say the same."""
    for parameter, build in (("oob", build_invitation), ("c_i", build_connection_invitation)):
        value = build(URL, ENDPOINT, INVITATION_KEY.did_key, "mediatord")
        found = V1Invitation.from_url(build_url(f"{URL}/", parameter, value))
        assert (found.id, found.key, found.endpoint) == (value["@id"], INVITATION_KEY.did_key, ENDPOINT)
        assert found.label == "mediatord"
    assert INVITATION.handshakes == ("didexchange/1.1", "didexchange/1.0")


@pytest.mark.parametrize(
    "change",
    [
        *({"@type": f"{DIDCOMM_ORG}out-of-band/2.0/invitation"}, {"services": []}, {"services": [{}, {}]}),
        *({"services": ["did:example:1"]}, {"handshake_protocols": None}, {"services": None}),
    ],
)
def test_refused_invitations(change: dict[str, Any]) -> None:
    """One inline service with one key, as ACA-Py wants it."""
    value = build_invitation(URL, ENDPOINT, INVITATION_KEY.did_key, "mediatord")
    with pytest.raises(UnreadableMessage):
        V1Invitation.from_json({**value, **change})
    for url in (URL, f"{URL}/?oob=", f"{URL}/?oob=e30", f"{URL}/?oob=!"):
        with pytest.raises(UnreadableMessage):
            V1Invitation.from_url(url)


# Handshakes


def respond(handshake: V1Handshake, signer: SigningKey = INVITATION_KEY, *, pthid: str | None = None) -> V1Answer:
    """The mediator's response to a handshake."""
    envelope = pack_authcrypt(encoding.dumps(handshake.make_request()), INVITATION.key, handshake.key)
    message = unpack_v1_message(envelope, {INVITATION.key: INVITATION_KEY}).message
    pthid = pthid or message.pthid
    if handshake.is_connections:
        request = connections.parse_request(message)
        return connections.make_response(OWN_KEY, signer, ENDPOINTS, DIDCOMM_ORG, message.id, pthid, NOW)
    request = did_exchange.parse_request(message)
    return did_exchange.make_response(request, OWN_KEY, signer, ENDPOINTS, message.id, pthid or "")


def pack_response(
    handshake: V1Handshake, answer: V1Answer, *, sender: SigningKey = INVITATION_KEY
) -> OpenedV1Message:
    """A response as the wallet receives it."""
    plaintext = serialize_answer(answer, "response-1", DIDCOMM_ORG, None)
    envelope = pack_authcrypt(plaintext, handshake.key.did_key, sender)
    return unpack_v1_message(envelope, {handshake.key.did_key: handshake.key})


@pytest.mark.parametrize(("protocol", "form"), PROTOCOLS)
@pytest.mark.parametrize("prefix", [DIDCOMM_ORG, OLD_PREFIX])
def test_handshakes(protocol: HandshakeProtocol, form: DIDForm, prefix: str) -> None:
    """Each protocol and form of DID ends with the mediator's key and addresses."""
    handshake = V1Handshake(INVITATION, generate_key(), protocol, form, prefix=prefix)
    mediator = handshake.read_response(pack_response(handshake, respond(handshake)))
    assert (mediator.key, mediator.http_uri, mediator.ws_uri) == (OWN_KEY.did_key, *ENDPOINTS)
    request, complete = handshake.make_request(), handshake.make_complete()
    assert all(message["@type"].startswith(prefix) for message in (request, complete))
    assert request["~transport"] == {"return_route": "all"}
    assert request["~thread"] == {"thid": request["@id"], "pthid": INVITATION.id}
    assert complete["~transport"] == {"return_route": "none"}


@pytest.mark.parametrize(("protocol", "form"), PROTOCOLS)
def test_refused_responses(protocol: HandshakeProtocol, form: DIDForm) -> None:
    """Another sender, signer, protocol, thread or invitation."""
    handshake = V1Handshake(INVITATION, generate_key(), protocol, form)
    answer = respond(handshake)
    other = generate_key()
    refused = [
        pack_response(handshake, answer, sender=other),
        pack_response(handshake, answer, sender=OWN_KEY),
        pack_response(handshake, respond(handshake, other)),
        pack_response(handshake, respond(handshake, OWN_KEY)),
        pack_response(handshake, replace(answer, type="didexchange/1.2/response")),
        pack_response(handshake, replace(answer, type=f"{protocol}/request")),
        pack_response(handshake, replace(answer, thid="other")),
        pack_response(handshake, replace(answer, pthid=None)),
        pack_response(handshake, replace(answer, members={})),
        pack_response(handshake, replace(answer, members={"did": answer.members.get("did")})),
    ]
    for opened in refused:
        with pytest.raises(UnreadableMessage):
            handshake.read_response(opened)
    assert handshake.read_response(pack_response(handshake, answer)).key == OWN_KEY.did_key


def test_rotation_to_another_did_is_refused() -> None:
    """The signature is of the very DID that the response names."""
    handshake = V1Handshake(INVITATION, generate_key())
    answer = respond(handshake)
    stranger = V1Handshake(INVITATION, generate_key()).make_document().did
    with pytest.raises(UnreadableMessage):
        handshake.read_response(
            pack_response(handshake, replace(answer, members={**answer.members, "did": stranger}))
        )


# Forwards


def test_forwards_for_each_routing_key() -> None:
    """The last routing key is the outermost; every layer names the next key, and the envelope stays as it is."""
    first, second, recipient = generate_key(), generate_key(), generate_key()
    payload = pack_anoncrypt(b"{}", recipient.did_key)
    raw = wrap_in_v1_forwards(payload, recipient.did_key, [first.did_key, encode_base58_key(second.did_key)])
    for key, next_ in ((second, first), (first, recipient)):
        opened = unpack_v1_message(raw, {key.did_key: key})
        assert opened.sender is None
        assert opened.message.type.key == ("routing", 1, "forward")
        assert opened.message.members["to"] == encode_base58_key(next_.did_key)
        raw = encoding.dumps(opened.message.members["msg"])
    assert raw == payload


def test_message_for_somebody_else() -> None:
    """A wallet opens what one of its keys is named by, and nothing else."""
    alice, bob = generate_key(), generate_key()
    raw = pack_authcrypt(b'{"@id":"12345678","@type":"a"}', alice.did_key, bob)
    assert unpack_v1_message(raw, {alice.did_key: alice}).sender == bob.did_key
    for keys in ({}, {bob.did_key: bob}, {alice.did_key: bob}):
        with pytest.raises(UnreadableMessage):
            unpack_v1_message(raw, keys)
    with pytest.raises(UnreadableMessage):
        unpack_v1_message(pack_anoncrypt(b"no message", alice.did_key), {alice.did_key: alice})


# Requests

HTTPAnswer = Callable[[OpenedV1Message], tuple[int, str | None, bytes]]


class ScriptedV1Mediator(Resource):
    """
    Mediator that answers every message as the test says.

    :ivar answer: maps the received message to status, media type and body.
    """

    isLeaf = True

    def __init__(self) -> None:
        super().__init__()
        self.received: list[OpenedV1Message] = []
        self.answer: HTTPAnswer = lambda _: (202, None, b"")

    def render_POST(self, request: Request) -> bytes:
        assert request.content is not None
        status, media_type, body = self.answer(self.read(request.content.read()))
        request.setResponseCode(status)
        if media_type is not None:
            request.setHeader("Content-Type", media_type)
        return body

    def read(self, raw: bytes) -> OpenedV1Message:
        """Decrypt a message to the mediator and record it."""
        opened = unpack_v1_message(raw, {key.did_key: key for key in (INVITATION_KEY, OWN_KEY)})
        self.received.append(opened)
        return opened

    def pack(
        self, to: OpenedV1Message, type_: str, members: Mapping[str, Any], *, sender: SigningKey = OWN_KEY
    ) -> bytes:
        """Pack a response as a mediator does, unless `members` say otherwise."""
        assert to.sender is not None
        answer = V1Answer(type_, {"~thread": {"thid": to.message.thread}, **members}, has_thread=False)
        return pack_authcrypt(serialize_answer(answer, "answer-1", DIDCOMM_ORG, None), to.sender, sender)

    def set_reply(self, type_: str, members: Mapping[str, Any], *, status: int = 200, **options: Any) -> None:
        """Answer everything with such a message."""
        self.answer = lambda to: (status, ENVELOPE_MEDIA_TYPE, self.pack(to, type_, members, **options))


class V1WalletTests(SynchronousTestCase):
    """A wallet over HTTP."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        self.resource = ScriptedV1Mediator()
        self.stub = StubTreq(self.resource)
        self.http = cast(HTTPClient, self.stub)
        mediator = V1Mediator("did:peer:4", OWN_KEY.did_key, ENDPOINT, ENDPOINTS[1])
        self.wallet = V1Wallet(generate_key(), mediator, self.http, self.clock)

    def ask(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of a coroutine."""
        return self.successResultOf(self.begin(work))

    def error_of(self, work: Coroutine[Any, Any, Any], kind: type[Exception]) -> Any:
        """Return the error of a coroutine."""
        return self.failureResultOf(self.begin(work), kind).value

    def begin(self, work: Coroutine[Any, Any, Any]) -> Deferred[Any]:
        """Run a coroutine until it waits."""
        deferred: Deferred[Any] = Deferred.fromCoroutine(work)
        self.stub.flush()
        return deferred

    def members(self) -> Mapping[str, Any]:
        """Members of the last received message."""
        return self.resource.received[-1].message.members

    def test_connects(self) -> None:
        """A wallet connects by an invitation, and completes with the key that the response names."""
        for protocol, form in PROTOCOLS:
            key = generate_key()
            self.resource.answer = partial(self.answer_handshake, V1Handshake(INVITATION, key, protocol, form))
            wallet = self.ask(
                V1Wallet.connect(
                    INVITATION, self.http, self.clock, protocol=protocol, spelling="base58", key=key, form=form
                )
            )
            self.assertEqual((wallet.key, wallet.mediator.key, wallet.spelling), (key, OWN_KEY.did_key, "base58"))
            self.assertEqual(self.resource.received[-2].recipient, INVITATION.key)
            self.assertEqual(self.resource.received[-1].recipient, OWN_KEY.did_key)

    def answer_handshake(self, handshake: V1Handshake, to: OpenedV1Message) -> tuple[int, str | None, bytes]:
        """Respond to a request, and to nothing else."""
        if to.message.type.name != "request":
            return 202, None, b""
        answer = respond(replace(handshake, request_id=to.message.id))
        plaintext = serialize_answer(answer, "answer-1", DIDCOMM_ORG, None)
        return 200, ENVELOPE_MEDIA_TYPE, pack_authcrypt(plaintext, handshake.key.did_key, INVITATION_KEY)

    def test_refused_connection(self) -> None:
        """A status without body, and a problem report."""
        for status in (202, 429, 500):
            self.resource.answer = lambda _, status=status: (status, None, b"")  # type: ignore[misc]
            problem = self.error_of(V1Wallet.connect(INVITATION, self.http, self.clock), MediatorProblem)
            self.assertEqual(problem.status, status)
        report = {"description": {"code": "request_not_accepted"}}
        self.resource.set_reply("didexchange/1.1/problem-report", report, sender=INVITATION_KEY)
        problem = self.error_of(V1Wallet.connect(INVITATION, self.http, self.clock), MediatorProblem)
        self.assertEqual(problem.code, "request_not_accepted")

    def test_request(self) -> None:
        """A request is authenticated, asks for its response on this connection, and has the wallet's prefix."""
        self.resource.set_reply("trust_ping/1.0/ping_response", {})
        for prefix in (DIDCOMM_ORG, OLD_PREFIX):
            self.wallet.prefix = prefix
            self.ask(self.wallet.ping())
            self.assertEqual(self.resource.received[-1].sender, self.wallet.key.did_key)
            self.assertEqual(self.members()["@type"], f"{prefix}trust_ping/1.0/ping")
            self.assertEqual(self.members()["~transport"], {"return_route": "all"})

    def test_grant(self) -> None:
        """A grant has an endpoint and routing keys in any spelling."""
        grant = f"{COORDINATION}/mediate-grant"
        for key in (OWN_KEY.did_key, encode_base58_key(OWN_KEY.did_key), f"{OWN_KEY.did_key}#a"):
            self.resource.set_reply(grant, {"endpoint": ENDPOINT, "routing_keys": [key]})
            self.assertEqual(self.ask(self.wallet.enrol()), V1Grant(ENDPOINT, (key,)))
        for members in (
            {"endpoint": ENDPOINT},
            {"routing_keys": [OWN_KEY.did_key]},
            {"endpoint": ENDPOINT, "routing_keys": []},
            {"endpoint": ENDPOINT, "routing_keys": ["did:key:z6LS"]},
        ):
            self.resource.set_reply(grant, members)
            self.error_of(self.wallet.enrol(), UnreadableMessage)
        self.resource.set_reply(f"{COORDINATION}/mediate-deny", {})
        self.error_of(self.wallet.enrol(), UnreadableMessage)

    def test_keylist(self) -> None:
        """Keys are spelled as the wallet does, and echoed so."""
        key = generate_key().did_key
        for spelling, name in (("did:key", key), ("base58", encode_base58_key(key))):
            self.wallet.spelling = spelling  # type: ignore[assignment]
            entry = {"recipient_key": name, "action": "add"}
            response = f"{COORDINATION}/keylist-update-response"
            self.resource.set_reply(response, {"updated": [{**entry, "result": "no_change"}]})
            self.assertEqual(self.ask(self.wallet.register(key)), ["no_change"])
            self.assertEqual(self.members()["updates"], [entry])
            self.error_of(self.wallet.unregister(key), UnreadableMessage)
            self.error_of(self.wallet.add_key(), UnreadableMessage)
        self.resource.set_reply(f"{COORDINATION}/keylist", {"keys": [{"recipient_key": key}]})
        self.assertEqual(self.ask(self.wallet.registered(limit=1, offset=2)), [key])
        self.assertEqual(self.members()["paginate"], {"limit": 1, "offset": 2})

    def test_status(self) -> None:
        """Counts are integers, and flags are booleans; strict clients accept nothing else."""
        self.resource.set_reply(f"{PICKUP}/status", {"message_count": 3, "live_delivery": False})
        self.assertEqual(self.ask(self.wallet.status()), V1QueueStatus(3, live_delivery=False))
        for members in (
            {},
            {"message_count": "3"},
            {"message_count": True},
            {"message_count": 1, "total_bytes": 1.5},
        ):
            self.resource.set_reply(f"{PICKUP}/status", members)
            self.error_of(self.wallet.status(), UnreadableMessage)

    def test_delivery(self) -> None:
        """Attachments have an id and one form of data; with nothing to deliver, there is a status."""
        attachments: list[dict[str, Any]] = [
            {"@id": "1", "data": {"base64": encoding.encode_base64url(b"{}")}},
            {"@id": "2", "data": {"json": {"protected": "e30"}}},
        ]
        self.resource.set_reply(f"{PICKUP}/delivery", {"~attach": attachments})
        found = self.ask(self.wallet.fetch(2, self.wallet.key.did_key))
        self.assertEqual([(one.id, one.payload) for one in found], [("1", b"{}"), ("2", b'{"protected":"e30"}')])
        self.assertEqual((self.members()["limit"], self.members()["recipient_key"]), (2, self.wallet.key.did_key))
        self.resource.set_reply(f"{PICKUP}/status", {"message_count": 0})
        self.assertEqual(self.ask(self.wallet.fetch()), [])
        self.resource.set_reply(f"{PICKUP}/status", {"message_count": 1})
        self.error_of(self.wallet.fetch(), UnreadableMessage)
        attachments = [{"data": {"json": {}}}, {"@id": "1", "data": {}}, {"@id": "1", "data": {"base64": "!"}}]
        for attachment in attachments:
            self.resource.set_reply(f"{PICKUP}/delivery", {"~attach": [attachment]})
            self.error_of(self.wallet.fetch(), UnreadableMessage)
        self.resource.set_reply(f"{PICKUP}/delivery", {"~attach": []})
        self.error_of(self.wallet.fetch(), UnreadableMessage)

    def test_acknowledgement(self) -> None:
        """By ids, or by the deliveries themselves."""
        self.resource.set_reply(f"{PICKUP}/status", {"message_count": 0})
        self.ask(self.wallet.acknowledge([DeliveredMessage("one", b"{}", "json"), "two"]))
        self.assertEqual(self.members()["message_id_list"], ["one", "two"])

    def test_batch(self) -> None:
        """A batch of Pickup 1.0 has each id in both spellings, and may be empty."""
        batch = "messagepickup/1.0/batch"
        self.resource.set_reply(batch, {"messages~attach": [{"@id": "1", "id": "1", "message": {"a": 1}}]})
        self.assertEqual(self.ask(self.wallet.fetch_batch(5)), [DeliveredMessage("1", b'{"a":1}', "json")])
        self.assertEqual(self.members()["batch_size"], 5)
        self.resource.set_reply(batch, {"messages~attach": []})
        self.assertEqual(self.ask(self.wallet.fetch_batch()), [])
        for one in ({"@id": "1", "message": {}}, {"id": "1", "message": {}}, {"@id": "1", "id": "1", "message": "x"}):
            self.resource.set_reply(batch, {"messages~attach": [one]})
            self.error_of(self.wallet.fetch_batch(), UnreadableMessage)

    def test_count(self) -> None:
        """The status of Pickup 1.0 is a number."""
        status = "messagepickup/1.0/status"
        self.resource.set_reply(status, {"message_count": 2})
        self.assertEqual(self.ask(self.wallet.count()), 2)
        for members in ({}, {"message_count": "2"}, {"message_count": False}):
            self.resource.set_reply(status, members)
            self.error_of(self.wallet.count(), UnreadableMessage)

    def test_features_and_devices(self) -> None:
        """Both versions of Discover Features, and registration for push notifications."""
        uri = f"{DIDCOMM_ORG}messagepickup/2.0"
        self.resource.set_reply("discover-features/2.0/disclosures", {"disclosures": [{"id": uri}]})
        self.assertTrue(self.ask(self.wallet.serves(uri)))
        self.assertFalse(self.ask(self.wallet.serves(f"{DIDCOMM_ORG}messagepickup/9.0")))
        self.resource.set_reply("discover-features/1.0/disclose", {"protocols": [{"pid": uri}]})
        self.assertEqual(self.ask(self.wallet.disclose("*")), [uri])
        self.resource.set_reply("notification/1.0/ack", {"status": "OK"})
        self.ask(self.wallet.set_push_device("fcm", {"device_token": "a", "device_platform": "b"}))
        self.assertEqual(self.members()["device_token"], "a")
        values = {"device_token": None, "device_platform": None}
        self.resource.set_reply("push-notifications-fcm/1.0/device-info", values)
        self.assertEqual(self.ask(self.wallet.get_push_device("fcm")), values)

    def test_refused_responses(self) -> None:
        """Another thread, sender, media type or status is no answer; a report is a refusal."""
        status, members = f"{PICKUP}/status", {"message_count": 0}
        self.resource.set_reply(status, {**members, "~thread": {"thid": "other"}})
        self.error_of(self.wallet.status(), UnreadableMessage)
        self.resource.set_reply(status, members, sender=INVITATION_KEY)
        self.error_of(self.wallet.status(), UnreadableMessage)
        self.resource.set_reply(status, members, status=202)
        self.error_of(self.wallet.status(), UnreadableMessage)
        self.resource.answer = lambda to: (200, "text/plain", self.resource.pack(to, status, members))
        self.error_of(self.wallet.status(), UnreadableMessage)
        report = {"description": {"en": "no", "code": "mediation_not_granted"}, "~thread": {"pthid": "cause"}}
        self.resource.set_reply(f"{COORDINATION}/problem-report", report)
        problem = self.error_of(self.wallet.status(), MediatorProblem)
        self.assertEqual((problem.code, problem.comment, problem.pthid), ("mediation_not_granted", "no", "cause"))

    def test_sends_along_a_route(self) -> None:
        """A message is wrapped for the routing key of its recipient; anything but acceptance is a refusal."""
        bob = generate_key()
        route = V1Grant(ENDPOINT, (OWN_KEY.did_key,))
        self.error_of(self.wallet.send(bob.did_key, "hello"), UnreadableMessage)
        self.wallet.granted = route
        self.ask(self.wallet.send(bob.did_key, "hello"))
        payload = encoding.dumps(self.members()["msg"])
        self.assertEqual(unpack_v1_message(payload, {bob.did_key: bob}).text, "hello")
        self.resource.answer = lambda _: (404, None, b"")
        self.assertEqual(self.error_of(self.wallet.send(bob.did_key, "hello", route), MediatorProblem).status, 404)


class V1SocketTests(SynchronousTestCase):
    """A wallet over a WebSocket."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        self.resource = ScriptedV1Mediator()
        mediator = V1Mediator("did:peer:4", OWN_KEY.did_key, ENDPOINT, "ws://mediator.example/didcomm")
        http = cast(HTTPClient, StubTreq(self.resource))
        self.wallet = V1Wallet(generate_key(), mediator, http, self.clock)
        self.pipe = InMemoryConnection()
        opening = Deferred.fromCoroutine(connect_v1_socket(self.clock, self.wallet, endpoint=self.pipe))
        self.pipe.pump.flush()
        self.socket: V1Socket = self.successResultOf(opening)
        assert self.pipe.server.end is not None
        self.end = self.pipe.server.end

    def begin(self, work: Coroutine[Any, Any, Any]) -> Deferred[Any]:
        """Run a coroutine until it waits for the other end, which has received its frames."""
        deferred: Deferred[Any] = Deferred.fromCoroutine(work)
        self.pipe.pump.flush()
        return deferred

    def requests(self) -> list[OpenedV1Message]:
        """Requests that the other end has received."""
        return [self.resource.read(frame) for frame in self.pipe.server.frames]

    def send(self, frame: bytes) -> None:
        """Send a frame from the other end."""
        self.end.sendMessage(frame, False)
        self.pipe.pump.flush()

    def test_matches_responses_by_thread(self) -> None:
        """Responses may arrive in another order than the requests."""
        first, second = self.begin(self.socket.status()), self.begin(self.socket.status())
        one, two = self.requests()
        self.send(self.resource.pack(two, f"{PICKUP}/status", {"message_count": 2}))
        self.assertNoResult(first)
        self.assertEqual(self.successResultOf(second).message_count, 2)
        self.send(self.resource.pack(one, f"{PICKUP}/status", {"message_count": 1}))
        self.assertEqual(self.successResultOf(first).message_count, 1)

    def test_live_delivery(self) -> None:
        """A delivery without a thread is a push."""
        live = self.begin(self.socket.live())
        (request,) = self.requests()
        self.assertIs(request.message.members["live_delivery"], True)
        self.send(self.resource.pack(request, f"{PICKUP}/status", {"message_count": 0, "live_delivery": True}))
        self.assertTrue(self.successResultOf(live).live_delivery)
        attachments = [{"@id": "1", "data": {"base64": "e30"}}]
        self.send(self.resource.pack(request, f"{PICKUP}/delivery", {"~attach": attachments, "~thread": {}}))
        self.assertEqual(self.successResultOf(self.socket.pushed.get()), DeliveredMessage("1", b"{}", "base64"))

    def test_implicit_pickup(self) -> None:
        """A ping asks for bare messages, which are known by their digest."""
        self.socket.start_implicit_pickup()
        self.pipe.pump.flush()
        (request,) = self.requests()
        self.assertIs(request.message.members["response_requested"], False)
        self.assertEqual(request.message.return_route, "all")
        alice, bob = generate_key(), generate_key()
        payload = pack_authcrypt(b"{}", bob.did_key, alice)
        self.send(payload)
        delivered = self.successResultOf(self.socket.pushed.get())
        self.assertEqual((delivered.id, delivered.payload), (hashlib.sha256(payload).hexdigest(), payload))

    def test_problem_reports(self) -> None:
        """A report fails the request that it is about, or is kept."""
        status = self.begin(self.socket.status())
        (request,) = self.requests()
        report = {"description": {"code": "a"}, "~thread": {"pthid": request.message.id}}
        self.send(self.resource.pack(request, "notification/1.0/problem-report", report))
        self.assertEqual(self.failureResultOf(status, MediatorProblem).value.code, "a")
        self.send(self.resource.pack(request, "notification/1.0/problem-report", report))
        self.assertEqual(self.successResultOf(self.socket.problems.get()).code, "a")

    def test_unusable_frames_are_kept_separately(self) -> None:
        """Frames that are not messages, not from the mediator, or of another type."""
        status = self.begin(self.socket.status())
        (request,) = self.requests()
        forged = self.resource.pack(request, f"{PICKUP}/status", {"message_count": 0}, sender=generate_key())
        other = self.resource.pack(request, "trust_ping/1.0/ping", {"~thread": {}})
        frames = [b"nonsense", b"{}", forged, other]
        for frame in frames:
            self.send(frame)
        self.assertEqual(self.socket.unexpected, frames)
        self.assertNoResult(status)

    def test_close_fails_pending_requests(self) -> None:
        """Pending requests fail with the close code."""
        status = self.begin(self.socket.status())
        self.end.sendClose(4000)
        self.pipe.pump.flush()
        self.assertEqual(self.failureResultOf(status, SocketClosedError).value.code, 4000)

    def test_pings_can_be_left_unanswered(self) -> None:
        """A wallet that answers no pings takes bare messages without confirming them."""
        pongs: list[bytes] = []
        self.end.onPong = pongs.append  # type: ignore[assignment,method-assign]
        for answers in (True, False):
            self.socket.answers_pings = answers
            self.end.sendPing(b"1")
            self.pipe.pump.flush()
        self.assertEqual(pongs, [b"1"])
