"""The DIDComm wallet of demo, tests and benchmark: identities, packing, and what it accepts from a mediator."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
from autobahn.twisted.websocket import WebSocketServerFactory, WebSocketServerProtocol
from treq.client import HTTPClient
from treq.testing import StubTreq
from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IStreamClientEndpoint
from twisted.internet.task import Clock
from twisted.test import iosim
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.resource import Resource
from twisted.web.server import Request
from zope.interface import implementer

from mediatord.protocol import encoding
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.didcomm.keys import Curve
from mediatord.wallet.didcomm_client import (
    PICKUP,
    PROBLEM_REPORT,
    DeliveredMessage,
    DIDCommMediator,
    DIDCommWallet,
    MediatorProblem,
    QueueStatus,
    discover_mediator,
)
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import (
    DIDDocumentCache,
    OpenedMessage,
    UnreadableMessage,
    anoncrypt,
    authcrypt,
    build_attachment,
    build_forward,
    compose_message,
    find_route,
    unpack_message,
    wrap_in_forwards,
)
from mediatord.wallet.didcomm_socket import DIDCommSocket, SocketClosedError, connect_didcomm_socket
from tests.wallet_identities import DIDMethod, generate_identity

NOW = 1_800_000_000.0
COORDINATION = "https://didcomm.org/coordinate-mediation"
NOTE = "https://didcomm.org/basicmessage/2.0/message"
METHODS: tuple[DIDMethod, ...] = ("did:peer:2", "did:peer:4", "did:key")
CURVES: tuple[Curve, ...] = ("X25519", "P-256", "P-384", "P-521")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("curve", CURVES)
def test_new_identity_resolves_to_its_keys(method: DIDMethod, curve: Curve) -> None:
    """A new DID resolves to the keys of its owner (reference 8.2 to 8.4)."""
    identity = generate_identity(method, curve=curve)
    agreement = identity.document.key_agreement_key(identity.agreement.kid)
    signing = identity.document.authentication_key(identity.signing.kid)
    assert agreement is not None and agreement.key == identity.agreement.private.public
    assert agreement.key.curve == curve
    assert signing is not None and signing.key == identity.signing.private.public


@pytest.mark.parametrize("method", ["did:peer:2", "did:peer:4"])
def test_new_identity_names_its_mediator(method: DIDMethod) -> None:
    """The one service of a wallet's DID is the DID of its mediator (reference 4.8)."""
    document = generate_identity(method, endpoint="did:web:mediator.example").document
    assert [endpoint.uri for endpoint in document.endpoints] == ["did:web:mediator.example"]


def test_own_key_id_spellings() -> None:
    """A kid may be `#key-1` or a prefix of the key (reference 8.6)."""
    identity = WalletIdentity.generate()
    multibase = identity.agreement.private.public.multibase()
    for fragment in ("key-1", multibase, multibase[1:], multibase[1:9]):
        assert identity.find_agreement_key(f"{identity.did}#{fragment}") == identity.agreement.private
    assert identity.find_agreement_key(f"{identity.did}#key-2") is None
    assert identity.find_agreement_key(f"{WalletIdentity.generate().did}#key-1") is None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("curve", CURVES)
def test_authcrypt_round_trip(method: DIDMethod, curve: Curve) -> None:
    """An authcrypted message decrypts for its recipient and authenticates its sender (reference 1.6)."""
    alice, bob = generate_identity(method, curve=curve), generate_identity(method, curve=curve)
    opened = unpack_message(
        authcrypt(basic_message(alice, bob), alice, bob.document), bob, DIDDocumentCache().resolve
    )
    assert (opened.text, opened.sender, opened.recipient_kid) == ("hello", alice.did, bob.agreement.kid)


def test_anoncrypt_authenticates_no_sender() -> None:
    """The `from` of an anonymous message proves nothing (reference 1.6)."""
    alice, bob = WalletIdentity.generate(), WalletIdentity.generate()
    assert (
        unpack_message(anoncrypt(basic_message(alice, bob), bob.document), bob, DIDDocumentCache().resolve).sender
        is None
    )


def test_protected_sender() -> None:
    """anoncrypt(authcrypt) is opened as one message (reference 1.1)."""
    alice, bob = WalletIdentity.generate(), WalletIdentity.generate()
    inner = encoding.loads_object(authcrypt(basic_message(alice, bob), alice, bob.document))
    assert unpack_message(anoncrypt(inner, bob.document), bob, DIDDocumentCache().resolve).sender == alice.did


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"from": "did:key:z6MkknhhwAGsRrcTTthPSsBbQtrNX6CMqt4poro5jdP6uCue"}, "from"),
        ({"from": None}, "from"),
        ({"to": ["did:key:z6MkknhhwAGsRrcTTthPSsBbQtrNX6CMqt4poro5jdP6uCue"]}, "to"),
    ],
)
def test_contradictory_headers_are_refused(changed: dict[str, Any], why: str) -> None:
    """`from` must be the encrypting DID, and `to` the recipient (reference 1.8)."""
    alice, bob = WalletIdentity.generate(), WalletIdentity.generate()
    message = {name: value for name, value in {**basic_message(alice, bob), **changed}.items() if value is not None}
    with pytest.raises(UnreadableMessage, match=why):
        unpack_message(authcrypt(message, alice, bob.document), bob, DIDDocumentCache().resolve)


def test_message_for_other_recipient_is_refused() -> None:
    """Keys are not guessed: a message to other kids is refused (reference 1.6)."""
    alice, bob, carol = WalletIdentity.generate(), WalletIdentity.generate(), WalletIdentity.generate()
    with pytest.raises(UnreadableMessage):
        unpack_message(authcrypt(basic_message(alice, bob), alice, bob.document), carol, DIDDocumentCache().resolve)


def test_short_form_resolves_after_long_form() -> None:
    """The short form of a did:peer:4 does not resolve by itself (reference 8.4)."""
    documents, long = DIDDocumentCache(), generate_identity("did:peer:4").did
    with pytest.raises(LookupError):
        documents.resolve(canonicalize_did(long))
    known = documents.resolve(long)
    assert documents.resolve(canonicalize_did(long)) == known


def test_each_hop_learns_only_the_next() -> None:
    """A message goes to the endpoint's mediator first, then along the routing keys, one layer each (4.8)."""
    outer, inner, alice = (
        WalletIdentity.generate(endpoint="http://outer.example/"),
        WalletIdentity.generate(),
        WalletIdentity.generate(),
    )
    bob = WalletIdentity.generate(endpoint=outer.did)
    resolve = DIDDocumentCache().resolve
    route = find_route(bob.document, resolve)
    assert (route.uri, route.hops) == ("http://outer.example/", (outer.did,))
    message = authcrypt(basic_message(alice, bob), alice, bob.document)
    first = unpack_message(wrap_in_forwards(message, bob.did, (outer.did, inner.did), resolve), outer, resolve)
    assert first.body == {"next": inner.did}
    second = unpack_message(attachments_of(first), inner, resolve)
    assert second.body == {"next": bob.did}
    assert attachments_of(second) == message


def basic_message(alice: WalletIdentity, bob: WalletIdentity) -> dict[str, Any]:
    """A basic message."""
    return compose_message(NOTE, {"content": "hello"}, to=[bob.did], **{"from": alice.did})


def attachments_of(opened: OpenedMessage) -> bytes:
    """The payloads of a forward."""
    assert opened.message.attachments is not None
    (attachment,) = opened.message.attachments
    return encoding.dumps(attachment["data"]["json"])


Answer = Callable[[OpenedMessage], tuple[int, str | None, bytes]]


class ScriptedMediator(Resource):
    """
    Mediator that answers every message as the test says.

    :ivar answer: maps the received message to status, media type and body.
    """

    isLeaf = True

    def __init__(self) -> None:
        super().__init__()
        self.identity = WalletIdentity.generate(endpoint="http://mediator.example/didcomm")
        self.received: list[OpenedMessage] = []
        self.answer: Answer = lambda _: (202, None, b"")

    @property
    def mediator(self) -> DIDCommMediator:
        """The mediator as its wallets know it."""
        document = self.identity.document
        return DIDCommMediator(
            document.did, document, "http://mediator.example/didcomm", "ws://mediator.example/didcomm"
        )

    def render_GET(self, request: Request) -> bytes:
        type_ = "https://didcomm.org/out-of-band/2.0/invitation"
        value = {"type": type_, "id": "1", "from": self.identity.did, "body": {}}
        return encoding.dumps(value if request.path == b"/invitation" else {})

    def render_POST(self, request: Request) -> bytes:
        assert request.content is not None
        opened = self.read(request.content.read())
        status, media_type, body = self.answer(opened)
        request.setResponseCode(status)
        if media_type is not None:
            request.setHeader("Content-Type", media_type)
        return body

    def read(self, raw: bytes) -> OpenedMessage:
        """Decrypt a message to the mediator and record it."""
        opened = unpack_message(raw, self.identity, DIDDocumentCache().resolve)
        self.received.append(opened)
        return opened

    def pack(self, to: OpenedMessage, type_: str, body: dict[str, Any], /, **headers: Any) -> bytes:
        """Pack a response as a mediator does, unless `headers` say otherwise."""
        assert to.sender is not None
        defaults = {"from": self.identity.did, "to": [to.sender], "thid": to.message.thread}
        message = compose_message(type_, body, **{**defaults, **headers})
        return authcrypt(message, self.identity, DIDDocumentCache().resolve(to.sender))

    def set_reply(self, type_: str, body: dict[str, Any], *, status: int = 200, **headers: Any) -> None:
        """Answer everything with such a message."""
        media_type = "application/didcomm-encrypted+json"
        self.answer = lambda opened: (status, media_type, self.pack(opened, type_, body, **headers))


class WalletTests(SynchronousTestCase):
    """A wallet over HTTP."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        self.resource = ScriptedMediator()
        self.stub = StubTreq(self.resource)
        # Its methods are created at run time.
        self.http = cast(HTTPClient, self.stub)
        self.wallet = DIDCommWallet.generate(self.resource.mediator, self.http, self.clock)

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

    def test_discovers_mediator_by_invitation(self) -> None:
        """A mediator is found by the DID in its invitation, and reached where its document says (reference 7.4)."""
        found = self.ask(discover_mediator(self.http, "http://mediator.example/"))
        self.assertEqual((found.did, found.http_uri), (self.resource.identity.did, "http://mediator.example/didcomm"))

    def test_request_headers(self) -> None:
        """A request is authenticated, addressed, dated, and asks for its response on this connection (2.1, 3.3)."""
        self.resource.set_reply("https://didcomm.org/trust-ping/2.0/ping-response", {})
        self.ask(self.wallet.ping())
        (opened,) = self.resource.received
        plaintext = encoding.loads_object(opened.plaintext)
        self.assertEqual(opened.sender, self.wallet.did)
        self.assertEqual(
            (plaintext["to"], plaintext["created_time"], plaintext["return_route"]),
            ([self.resource.identity.did], int(NOW), "all"),
        )

    def test_headers_can_be_replaced_and_omitted(self) -> None:
        """Tests can replace every header of a request."""
        self.resource.set_reply("https://didcomm.org/trust-ping/2.0/ping-response", {}, thid="my-thread")
        self.ask(self.wallet.request("https://didcomm.org/trust-ping/2.0/ping", thid="my-thread", return_route=None))
        plaintext = encoding.loads_object(self.resource.received[0].plaintext)
        self.assertNotIn("return_route", plaintext)
        self.assertEqual(plaintext["thid"], "my-thread")

    def test_grants_of_both_versions(self) -> None:
        """A grant of 3.0 lists routing DIDs, one of 2.0 names one (reference D13)."""
        did = self.resource.identity.did
        self.resource.set_reply(f"{COORDINATION}/3.0/mediate-grant", {"routing_did": [did]})
        self.assertEqual(self.ask(self.wallet.enrol()), (did,))
        self.error_of(self.wallet.enrol(version="2.0"), UnreadableMessage)
        self.resource.set_reply(f"{COORDINATION}/2.0/mediate-grant", {"routing_did": did})
        self.assertEqual(self.ask(self.wallet.enrol(version="2.0")), (did,))
        self.resource.set_reply(f"{COORDINATION}/3.0/mediate-grant", {"routing_did": did})
        self.error_of(self.wallet.enrol(version="3.0"), UnreadableMessage)

    def test_grant_of_other_mediator_is_refused(self) -> None:
        """Publishing a DID that another mediator routes would lose messages."""
        self.resource.set_reply(f"{COORDINATION}/3.0/mediate-grant", {"routing_did": [WalletIdentity.generate().did]})
        self.error_of(self.wallet.enrol(), UnreadableMessage)

    def test_one_result_per_update(self) -> None:
        """Results are in the order of the updates, which are echoed (reference 5.3)."""
        updated = [
            {"recipient_did": "did:example:1", "action": "add", "result": "success"},
            {"recipient_did": "did:example:2", "action": "add", "result": "client_error"},
        ]
        self.resource.set_reply(f"{COORDINATION}/3.0/recipient-update-response", {"updated": updated})
        self.assertEqual(
            self.ask(self.wallet.register("did:example:1", "did:example:2")), ["success", "client_error"]
        )
        self.error_of(self.wallet.register("did:example:2", "did:example:1"), UnreadableMessage)

    def test_disclosed_protocols(self) -> None:
        """A protocol is served if exactly its URI is disclosed."""
        disclose = "https://didcomm.org/discover-features/2.0/disclose"
        other = {"feature-type": "protocol", "id": "urn:example:a/1.1"}
        for disclosures in ([], [other]):
            self.resource.set_reply(disclose, {"disclosures": disclosures})
            self.assertFalse(self.ask(self.wallet.serves("urn:example:a/1.0")))
        self.resource.set_reply(disclose, {"disclosures": [other, {**other, "id": "urn:example:a/1.0"}]})
        self.assertTrue(self.ask(self.wallet.serves("urn:example:a/1.0")))
        body = encoding.loads_object(self.resource.received[-1].plaintext)["body"]
        self.assertEqual(body, {"queries": [{"feature-type": "protocol", "match": "urn:example:a/1.0"}]})
        for invalid in (None, ["urn:example:a/1.0"]):
            self.resource.set_reply(disclose, {"disclosures": invalid})
            self.error_of(self.wallet.serves("urn:example:a/1.0"), UnreadableMessage)

    def test_registers_own_did_by_default(self) -> None:
        """Without a DID a wallet registers its own."""
        self.resource.answer = lambda opened: (202, None, b"")
        self.error_of(self.wallet.register(), MediatorProblem)
        self.assertEqual(
            self.resource.received[0].body, {"updates": [{"recipient_did": self.wallet.did, "action": "add"}]}
        )

    def test_registration_lists_of_both_versions(self) -> None:
        """2.0 calls its list `keys`, 3.0 `dids` (reference 5.2)."""
        entries = [{"recipient_did": "did:example:1"}]
        self.resource.set_reply(f"{COORDINATION}/3.0/recipient", {"dids": entries})
        self.assertEqual(self.ask(self.wallet.registered(limit=1)), ["did:example:1"])
        self.wallet.coordination_version = "2.0"
        self.resource.set_reply(f"{COORDINATION}/2.0/keylist", {"keys": entries})
        self.assertEqual(self.ask(self.wallet.registered()), ["did:example:1"])

    def test_status(self) -> None:
        """Missing members of a status are None (reference 6.1)."""
        self.resource.set_reply(f"{PICKUP}/status", {"message_count": 3, "live_delivery": False})
        self.assertEqual(self.ask(self.wallet.status()), QueueStatus(3, live_delivery=False))

    def test_status_without_integers_is_refused(self) -> None:
        """Counts and times are integers; strict clients accept nothing else (reference 2.1)."""
        for body in ({}, {"message_count": "3"}, {"message_count": 3, "oldest_received_time": 1.5}):
            self.resource.set_reply(f"{PICKUP}/status", body)
            self.error_of(self.wallet.status(), UnreadableMessage)

    def test_fetches_both_forms(self) -> None:
        """An attachment is JSON or base64url, and returned as bytes (reference 6.2)."""
        payload = b'{"ciphertext":"x"}'
        attachments = [build_attachment(payload, "json", "one"), build_attachment(payload, "base64", "two")]
        self.resource.set_reply(f"{PICKUP}/delivery", {}, attachments=attachments)
        self.assertEqual(
            self.ask(self.wallet.fetch(2)),
            [DeliveredMessage("one", payload, "json"), DeliveredMessage("two", payload, "base64")],
        )
        self.assertEqual(self.resource.received[0].body, {"limit": 2})

    def test_fetches_from_empty_queue(self) -> None:
        """With nothing to deliver the response is a status (reference 6.1)."""
        self.resource.set_reply(f"{PICKUP}/status", {"message_count": 0})
        self.assertEqual(self.ask(self.wallet.fetch()), [])

    def test_invalid_attachments_are_refused(self) -> None:
        """Exactly one form of data, and an id to acknowledge it by (reference D10)."""
        both = {"id": "1", "data": {"json": {}, "base64": "e30"}}
        nameless: dict[str, Any] = {"data": {"json": {}}}
        padded = {"id": "1", "data": {"base64": "!"}}
        for attachment in (both, nameless, padded):
            self.resource.set_reply(f"{PICKUP}/delivery", {}, attachments=[attachment])
            self.error_of(self.wallet.fetch(), UnreadableMessage)

    def test_acknowledges_deliveries(self) -> None:
        """By ids, or by the deliveries themselves."""
        self.resource.set_reply(f"{PICKUP}/status", {"message_count": 0})
        self.ask(self.wallet.acknowledge([DeliveredMessage("one", b"{}", "json"), "two"]))
        self.assertEqual(self.resource.received[0].body, {"message_id_list": ["one", "two"]})

    def test_problem_report_is_raised(self) -> None:
        """A packed problem report is a refusal, whatever the HTTP status (reference D5)."""
        report = {"code": "e.p.req.not_enroll", "comment": "no"}
        self.resource.set_reply(PROBLEM_REPORT, report, thid=None, pthid="the-thread")
        problem = self.error_of(self.wallet.status(), MediatorProblem)
        self.assertEqual(
            (problem.status, problem.code, problem.comment, problem.pthid),
            (200, "e.p.req.not_enroll", "no", "the-thread"),
        )

    def test_plaintext_problem_report_is_raised(self) -> None:
        """An unencrypted report is accepted as a refusal only (section 11)."""
        plain = encoding.dumps(compose_message(PROBLEM_REPORT, {"code": "e.m.req.rate-limited", "comment": "slow"}))
        self.resource.answer = lambda _: (429, "application/didcomm-plain+json", plain)
        problem = self.error_of(self.wallet.status(), MediatorProblem)
        self.assertEqual((problem.status, problem.code), (429, "e.m.req.rate-limited"))
        self.resource.answer = lambda _: (200, "application/didcomm-plain+json", plain)
        self.error_of(self.wallet.status(), UnreadableMessage)

    def test_forged_response_is_refused(self) -> None:
        """Only the mediator's own key encrypts its responses (reference 1.8)."""
        impostor = ScriptedMediator()
        self.resource.answer = lambda opened: (
            200,
            "application/didcomm-encrypted+json",
            impostor.pack(opened, f"{PICKUP}/status", {"message_count": 0}),
        )
        self.error_of(self.wallet.status(), UnreadableMessage)

    def test_anonymous_response_is_refused(self) -> None:
        """Anybody could have encrypted it."""
        message = compose_message(f"{PICKUP}/status", {"message_count": 0}, to=[self.wallet.did])
        self.resource.answer = lambda opened: (
            200,
            "application/didcomm-encrypted+json",
            anoncrypt({**message, "thid": opened.message.id}, self.wallet.identity.document),
        )
        self.error_of(self.wallet.status(), UnreadableMessage)

    def test_response_in_other_thread_is_refused(self) -> None:
        """A response belongs to its request."""
        self.resource.set_reply(f"{PICKUP}/status", {"message_count": 0}, thid="another")
        self.error_of(self.wallet.status(), UnreadableMessage)

    def test_response_without_recipient_is_refused(self) -> None:
        """The mediator names its recipient (reference 2.1)."""
        self.resource.set_reply(f"{PICKUP}/status", {"message_count": 0}, to=None)
        self.error_of(self.wallet.status(), UnreadableMessage)

    def test_mediator_sees_only_the_recipient(self) -> None:
        """The mediator decrypts an anonymous forward; only Bob decrypts the rest (UC-021, reference 4)."""
        identity = generate_identity("did:peer:4", endpoint=self.resource.mediator.did)
        bob = DIDCommWallet(identity, self.http, self.clock, self.resource.mediator)
        id_ = self.ask(self.wallet.send(bob.did, "hello"))
        (seen,) = self.resource.received
        self.assertEqual((seen.sender, seen.message.sender, seen.body), (None, None, {"next": bob.did}))
        opened = bob.open(attachments_of(seen))
        self.assertEqual((opened.message.id, opened.text, opened.sender), (id_, "hello", self.wallet.did))

    def test_only_empty_202_accepts_message(self) -> None:
        """Any other response is a problem (reference D4)."""
        for answer in ((400, None, b""), (202, None, b"x"), (200, None, b"")):
            self.resource.answer = lambda _, answer=answer: answer  # type: ignore[misc]  # bound early
            self.assertEqual(
                self.error_of(self.wallet.send(self.wallet.did, "hello"), MediatorProblem).status, answer[0]
            )

    def test_raw_post(self) -> None:
        """Any bytes may be posted, and the response is returned unchecked."""
        self.resource.answer = lambda _: (418, "text/plain", b"short and stout")
        _, packed = self.wallet.pack("https://didcomm.org/empty/1.0/empty")
        status, headers, body = self.ask(self.wallet.post(packed))
        self.assertEqual((status, headers["content-type"], body), (418, "text/plain", b"short and stout"))


class ServerEnd(WebSocketServerProtocol):
    """The mediator's end of a socket, controlled by the test."""

    factory: ServerFactory

    def onConnect(self, request: object) -> None:
        self.factory.end = self

    def onMessage(self, payload: bytes, isBinary: bool) -> None:  # noqa: N803  Autobahn's name
        self.factory.frames.append(payload)


class ServerFactory(WebSocketServerFactory):
    """Keeps its one socket and the received frames."""

    def __init__(self) -> None:
        super().__init__(reactor=Clock())
        self.protocol = ServerEnd
        # Autobahn's timers would use the global reactor.
        self.setProtocolOptions(openHandshakeTimeout=0, closeHandshakeTimeout=0)
        self.frames: list[bytes] = []
        self.end: ServerEnd | None = None


@implementer(IStreamClientEndpoint)
class InMemoryConnection:
    """Connects a client to a :class:`ServerEnd` in memory."""

    def __init__(self) -> None:
        self.server = ServerFactory()

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:  # noqa: N803  the interface's name
        address = IPv4Address("TCP", "127.0.0.1", 1)
        client, server = protocolFactory.buildProtocol(address), self.server.buildProtocol(address)
        assert client is not None
        self.pump = iosim.connect(server, iosim.makeFakeServer(server), client, iosim.makeFakeClient(client))
        return succeed(client)


class SocketTests(SynchronousTestCase):
    """A wallet over a WebSocket."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        self.resource = ScriptedMediator()
        http = cast(HTTPClient, StubTreq(self.resource))
        self.wallet = DIDCommWallet.generate(self.resource.mediator, http, self.clock)
        self.pipe = InMemoryConnection()
        opening = Deferred.fromCoroutine(connect_didcomm_socket(self.clock, self.wallet, endpoint=self.pipe))
        self.pipe.pump.flush()
        self.socket: DIDCommSocket = self.successResultOf(opening)
        assert self.pipe.server.end is not None
        self.end = self.pipe.server.end

    def begin(self, work: Coroutine[Any, Any, Any]) -> Deferred[Any]:
        """Run a coroutine until it waits for the other end, which has received its frames."""
        deferred: Deferred[Any] = Deferred.fromCoroutine(work)
        self.pipe.pump.flush()
        return deferred

    def requests(self) -> list[OpenedMessage]:
        """Requests that the other end has received."""
        return [self.resource.read(frame) for frame in self.pipe.server.frames]

    def send(self, frame: bytes, *, binary: bool = False) -> None:
        """Send a frame from the other end."""
        self.end.sendMessage(frame, binary)
        self.pipe.pump.flush()

    def test_matches_responses_by_thread(self) -> None:
        """Responses may arrive in another order than the requests (reference 3.2)."""
        first, second = self.begin(self.socket.status()), self.begin(self.socket.status())
        one, two = self.requests()
        self.send(self.resource.pack(two, f"{PICKUP}/status", {"message_count": 2}))
        self.assertNoResult(first)
        self.assertEqual(self.successResultOf(second).message_count, 2)
        self.send(self.resource.pack(one, f"{PICKUP}/status", {"message_count": 1}))
        self.assertEqual(self.successResultOf(first).message_count, 1)

    def test_pushed_delivery_is_queued(self) -> None:
        """An unsolicited delivery is a push, one message per attachment (reference 6.3)."""
        live = self.begin(self.socket.live())
        (request,) = self.requests()
        self.assertEqual(request.body, {"live_delivery": True})
        self.send(self.resource.pack(request, f"{PICKUP}/status", {"message_count": 0, "live_delivery": True}))
        self.assertTrue(self.successResultOf(live).live_delivery)
        attachments = [build_attachment(b'{"ciphertext":"x"}', "json", "one")]
        self.send(self.resource.pack(request, f"{PICKUP}/delivery", {}, thid=None, attachments=attachments))
        self.assertEqual(
            self.successResultOf(self.socket.pushed.get()), DeliveredMessage("one", b'{"ciphertext":"x"}', "json")
        )

    def test_raw_push_is_identified_by_digest(self) -> None:
        """In raw mode the frame is the payload, acknowledged by its SHA-256 (6.1)."""
        alice = WalletIdentity.generate()
        payload = authcrypt(basic_message(alice, self.wallet.identity), alice, self.wallet.identity.document)
        self.send(payload)
        delivered = self.successResultOf(self.socket.pushed.get())
        self.assertEqual((delivered.id, delivered.payload), (hashlib.sha256(payload).hexdigest(), payload))

    def test_problem_report_fails_its_request(self) -> None:
        """`pthid` names the thread (reference 7.3)."""
        status = self.begin(self.socket.status())
        (request,) = self.requests()
        report = {"code": "e.p.req.not_enroll", "comment": "no"}
        self.send(self.resource.pack(request, PROBLEM_REPORT, report, thid=None, pthid=request.message.id))
        self.assertEqual(self.failureResultOf(status, MediatorProblem).value.code, "e.p.req.not_enroll")

    def test_problem_report_without_thread_is_kept(self) -> None:
        """An unencrypted report about an undecryptable frame has no thread (section 11, row 7)."""
        self.send(encoding.dumps(compose_message(PROBLEM_REPORT, {"code": "e.p.trust.crypto", "comment": "no"})))
        self.assertEqual(self.successResultOf(self.socket.problems.get()).code, "e.p.trust.crypto")

    def test_invalid_frames_are_kept_separately(self) -> None:
        """Frames that are not messages, undecryptable or binary do no harm."""
        frames = [b"nonsense", b"{}", forged_frame(self.wallet)]
        for frame in frames:
            self.send(frame)
        self.send(b"binary", binary=True)
        self.assertEqual(self.socket.unexpected, [*frames, b"binary"])

    def test_close_fails_pending_requests(self) -> None:
        """Pending requests fail with the close code, and nothing can be sent any more."""
        status, closed = self.begin(self.socket.status()), self.socket.closed()
        self.end.sendClose(4000)
        self.pipe.pump.flush()
        self.assertEqual(self.failureResultOf(status, SocketClosedError).value.code, 4000)
        self.assertEqual(self.successResultOf(closed), 4000)
        self.assertRaises(SocketClosedError, self.socket.send_frame, b"{}")

    def test_closes_with_given_code(self) -> None:
        """Closing from the client's side ends with its code."""
        closed = self.socket.close()
        self.pipe.pump.flush()
        self.assertEqual(self.successResultOf(closed), 1000)
        self.assertEqual(self.successResultOf(self.socket.close()), 1000)


def forged_frame(wallet: DIDCommWallet) -> bytes:
    """A delivery whose `from` is the mediator, encrypted by another key."""
    forger = WalletIdentity.generate()
    message = compose_message(f"{PICKUP}/delivery", {}, to=[wallet.did], **{"from": wallet.mediator.did})
    return authcrypt(message, forger, wallet.identity.document)


def test_forward_variants() -> None:
    """Tests need forwards of several attachments, in either form, with any header (reference 4.4)."""
    message = build_forward("did:example:1", [b"{}", b"{}"], form="base64", delay_milli=5)
    assert [attachment["data"] for attachment in message["attachments"]] == [{"base64": "e30"}, {"base64": "e30"}]
    assert message["delay_milli"] == 5
