"""The wallet of demo, tests and benchmark: its identities, its packing, and what it accepts from a mediator."""

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
def test_fresh_identity_resolves_to_its_own_keys(method: DIDMethod, curve: Curve) -> None:
    """What others resolve a fresh DID to are the keys that its owner holds (reference 8.2 to 8.4)."""
    identity = generate_identity(method, curve=curve)
    agreement = identity.document.key_agreement_key(identity.agreement.kid)
    signing = identity.document.authentication_key(identity.signing.kid)
    assert agreement is not None and agreement.key == identity.agreement.private.public
    assert agreement.key.curve == curve
    assert signing is not None and signing.key == identity.signing.private.public


@pytest.mark.parametrize("method", ["did:peer:2", "did:peer:4"])
def test_fresh_identity_names_its_mediator(method: DIDMethod) -> None:
    """The one service of a wallet's DID is the DID of its mediator (reference 4.8)."""
    document = generate_identity(method, endpoint="did:web:mediator.example").document
    assert [endpoint.uri for endpoint in document.endpoints] == ["did:web:mediator.example"]


def test_own_key_is_found_in_every_spelling() -> None:
    """A kid may be `#key-1` or the beginning of the key itself (reference 8.6)."""
    identity = WalletIdentity.generate()
    multibase = identity.agreement.private.public.multibase()
    for fragment in ("key-1", multibase, multibase[1:], multibase[1:9]):
        assert identity.find_agreement_key(f"{identity.did}#{fragment}") == identity.agreement.private
    assert identity.find_agreement_key(f"{identity.did}#key-2") is None
    assert identity.find_agreement_key(f"{WalletIdentity.generate().did}#key-1") is None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("curve", CURVES)
def test_authcrypt_comes_out_as_it_went_in(method: DIDMethod, curve: Curve) -> None:
    """An authcrypted message opens for its recipient and proves its sender (reference 1.6)."""
    alice, bob = generate_identity(method, curve=curve), generate_identity(method, curve=curve)
    opened = unpack_message(authcrypt(note_from(alice, bob), alice, bob.document), bob, DIDDocumentCache().resolve)
    assert (opened.text, opened.sender, opened.recipient_kid) == ("hello", alice.did, bob.agreement.kid)


def test_anoncrypt_proves_no_sender() -> None:
    """Whatever an anonymous message says in `from` is no proof of it (reference 1.6)."""
    alice, bob = WalletIdentity.generate(), WalletIdentity.generate()
    assert (
        unpack_message(anoncrypt(note_from(alice, bob), bob.document), bob, DIDDocumentCache().resolve).sender is None
    )


def test_protected_sender_is_opened() -> None:
    """anoncrypt(authcrypt) is opened as one message (reference 1.1)."""
    alice, bob = WalletIdentity.generate(), WalletIdentity.generate()
    inner = encoding.loads_object(authcrypt(note_from(alice, bob), alice, bob.document))
    assert unpack_message(anoncrypt(inner, bob.document), bob, DIDDocumentCache().resolve).sender == alice.did


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"from": "did:key:z6MkknhhwAGsRrcTTthPSsBbQtrNX6CMqt4poro5jdP6uCue"}, "from"),
        ({"from": None}, "from"),
        ({"to": ["did:key:z6MkknhhwAGsRrcTTthPSsBbQtrNX6CMqt4poro5jdP6uCue"]}, "to"),
    ],
)
def test_headers_that_contradict_the_encryption_are_refused(changed: dict[str, Any], why: str) -> None:
    """`from` is who encrypted it and `to` is who it was encrypted for, or it is not read (reference 1.8)."""
    alice, bob = WalletIdentity.generate(), WalletIdentity.generate()
    message = {name: value for name, value in {**note_from(alice, bob), **changed}.items() if value is not None}
    with pytest.raises(UnreadableMessage, match=why):
        unpack_message(authcrypt(message, alice, bob.document), bob, DIDDocumentCache().resolve)


def test_message_for_somebody_else_is_refused() -> None:
    """Keys are not tried out: a message to other kids is not ours (reference 1.6)."""
    alice, bob, carol = WalletIdentity.generate(), WalletIdentity.generate(), WalletIdentity.generate()
    with pytest.raises(UnreadableMessage):
        unpack_message(authcrypt(note_from(alice, bob), alice, bob.document), carol, DIDDocumentCache().resolve)


def test_short_form_resolves_once_the_long_one_was_seen() -> None:
    """The short form of a did:peer:4 says nothing by itself (reference 8.4)."""
    book, long = DIDDocumentCache(), generate_identity("did:peer:4").did
    with pytest.raises(LookupError):
        book.resolve(canonicalize_did(long))
    known = book.resolve(long)
    assert book.resolve(canonicalize_did(long)) == known


def test_every_hop_learns_the_next_one_only() -> None:
    """A message goes to the endpoint's mediator first, then along the routing keys, each peeling one layer (4.8)."""
    outer, inner, alice = (
        WalletIdentity.generate(endpoint="http://outer.example/"),
        WalletIdentity.generate(),
        WalletIdentity.generate(),
    )
    bob = WalletIdentity.generate(endpoint=outer.did)
    resolve = DIDDocumentCache().resolve
    route = find_route(bob.document, resolve)
    assert (route.uri, route.hops) == ("http://outer.example/", (outer.did,))
    letter = authcrypt(note_from(alice, bob), alice, bob.document)
    first = unpack_message(wrap_in_forwards(letter, bob.did, (outer.did, inner.did), resolve), outer, resolve)
    assert first.body == {"next": inner.did}
    second = unpack_message(attached_to(first), inner, resolve)
    assert second.body == {"next": bob.did}
    assert attached_to(second) == letter


def note_from(alice: WalletIdentity, bob: WalletIdentity) -> dict[str, Any]:
    """A basic message."""
    return compose_message(NOTE, {"content": "hello"}, to=[bob.did], **{"from": alice.did})


def attached_to(opened: OpenedMessage) -> bytes:
    """What a forward carries."""
    assert opened.message.attachments is not None
    (attachment,) = opened.message.attachments
    return encoding.dumps(attachment["data"]["json"])


Answer = Callable[[OpenedMessage], tuple[int, str | None, bytes]]


class ScriptedMediator(Resource):
    """
    A mediator that answers every message as it is told to.

    :ivar answer: from what it received to status, media type and body.
    """

    isLeaf = True

    def __init__(self) -> None:
        super().__init__()
        self.identity = WalletIdentity.generate(endpoint="http://mediator.example/didcomm")
        self.received: list[OpenedMessage] = []
        self.answer: Answer = lambda _: (202, None, b"")

    @property
    def mediator(self) -> DIDCommMediator:
        """As its wallets know it."""
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
        """Open a message to the mediator and keep it."""
        opened = unpack_message(raw, self.identity, DIDDocumentCache().resolve)
        self.received.append(opened)
        return opened

    def pack(self, to: OpenedMessage, type_: str, body: dict[str, Any], /, **headers: Any) -> bytes:
        """An answer as a mediator writes it, unless `headers` say otherwise."""
        assert to.sender is not None
        defaults = {"from": self.identity.did, "to": [to.sender], "thid": to.message.thread}
        message = compose_message(type_, body, **{**defaults, **headers})
        return authcrypt(message, self.identity, DIDDocumentCache().resolve(to.sender))

    def will_say(self, type_: str, body: dict[str, Any], *, status: int = 200, **headers: Any) -> None:
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
        # Its methods are made at run time.
        self.http = cast(HTTPClient, self.stub)
        self.wallet = DIDCommWallet.generate(self.resource.mediator, self.http, self.clock)

    def ask(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What a coroutine returns."""
        return self.successResultOf(self.begin(work))

    def refused(self, work: Coroutine[Any, Any, Any], kind: type[Exception]) -> Any:
        """What a coroutine raises."""
        return self.failureResultOf(self.begin(work), kind).value

    def begin(self, work: Coroutine[Any, Any, Any]) -> Deferred[Any]:
        """Run a coroutine as far as it goes."""
        deferred: Deferred[Any] = Deferred.fromCoroutine(work)
        self.stub.flush()
        return deferred

    def test_discover_reads_the_invitation(self) -> None:
        """A mediator is found by the DID in its invitation, and reached where its document says (reference 7.4)."""
        found = self.ask(discover_mediator(self.http, "http://mediator.example/"))
        self.assertEqual((found.did, found.http_uri), (self.resource.identity.did, "http://mediator.example/didcomm"))

    def test_request_carries_what_a_request_must(self) -> None:
        """A request is authenticated, addressed, dated, and asks for its answer on this connection (2.1, 3.3)."""
        self.resource.will_say("https://didcomm.org/trust-ping/2.0/ping-response", {})
        self.ask(self.wallet.ping())
        (opened,) = self.resource.received
        plaintext = encoding.loads_object(opened.plaintext)
        self.assertEqual(opened.sender, self.wallet.did)
        self.assertEqual(
            (plaintext["to"], plaintext["created_time"], plaintext["return_route"]),
            ([self.resource.identity.did], int(NOW), "all"),
        )

    def test_headers_can_be_replaced_and_left_out(self) -> None:
        """Every header of a request is in the caller's hands, so that tests can send odd ones."""
        self.resource.will_say("https://didcomm.org/trust-ping/2.0/ping-response", {}, thid="my-thread")
        self.ask(self.wallet.request("https://didcomm.org/trust-ping/2.0/ping", thid="my-thread", return_route=None))
        plaintext = encoding.loads_object(self.resource.received[0].plaintext)
        self.assertNotIn("return_route", plaintext)
        self.assertEqual(plaintext["thid"], "my-thread")

    def test_grant_has_the_form_of_its_version(self) -> None:
        """A grant of 3.0 lists routing DIDs, one of 2.0 names one (reference D13)."""
        did = self.resource.identity.did
        self.resource.will_say(f"{COORDINATION}/3.0/mediate-grant", {"routing_did": [did]})
        self.assertEqual(self.ask(self.wallet.enrol()), (did,))
        self.refused(self.wallet.enrol(version="2.0"), UnreadableMessage)
        self.resource.will_say(f"{COORDINATION}/2.0/mediate-grant", {"routing_did": did})
        self.assertEqual(self.ask(self.wallet.enrol(version="2.0")), (did,))
        self.resource.will_say(f"{COORDINATION}/3.0/mediate-grant", {"routing_did": did})
        self.refused(self.wallet.enrol(version="3.0"), UnreadableMessage)

    def test_grant_of_another_mediator_is_refused(self) -> None:
        """Publishing a DID that somebody else routes would lose messages."""
        self.resource.will_say(f"{COORDINATION}/3.0/mediate-grant", {"routing_did": [WalletIdentity.generate().did]})
        self.refused(self.wallet.enrol(), UnreadableMessage)

    def test_register_reports_one_result_each(self) -> None:
        """Results come in the order of the updates, which are echoed (reference 5.3)."""
        updated = [
            {"recipient_did": "did:example:1", "action": "add", "result": "success"},
            {"recipient_did": "did:example:2", "action": "add", "result": "client_error"},
        ]
        self.resource.will_say(f"{COORDINATION}/3.0/recipient-update-response", {"updated": updated})
        self.assertEqual(
            self.ask(self.wallet.register("did:example:1", "did:example:2")), ["success", "client_error"]
        )
        self.refused(self.wallet.register("did:example:2", "did:example:1"), UnreadableMessage)

    def test_own_did_is_registered_by_default(self) -> None:
        """A wallet that names no DID means its own."""
        self.resource.answer = lambda opened: (202, None, b"")
        self.refused(self.wallet.register(), MediatorProblem)
        self.assertEqual(
            self.resource.received[0].body, {"updates": [{"recipient_did": self.wallet.did, "action": "add"}]}
        )

    def test_registered_reads_the_list_of_its_version(self) -> None:
        """2.0 calls its list `keys`, 3.0 `dids` (reference 5.2)."""
        entries = [{"recipient_did": "did:example:1"}]
        self.resource.will_say(f"{COORDINATION}/3.0/recipient", {"dids": entries})
        self.assertEqual(self.ask(self.wallet.registered(limit=1)), ["did:example:1"])
        self.wallet.coordination_version = "2.0"
        self.resource.will_say(f"{COORDINATION}/2.0/keylist", {"keys": entries})
        self.assertEqual(self.ask(self.wallet.registered()), ["did:example:1"])

    def test_status_is_read(self) -> None:
        """Members that a status has not are None (reference 6.1)."""
        self.resource.will_say(f"{PICKUP}/status", {"message_count": 3, "live_delivery": False})
        self.assertEqual(self.ask(self.wallet.status()), QueueStatus(3, live_delivery=False))

    def test_status_without_integers_is_refused(self) -> None:
        """Counts and times are integers; strict clients read nothing else (reference 2.1)."""
        for body in ({}, {"message_count": "3"}, {"message_count": 3, "oldest_received_time": 1.5}):
            self.resource.will_say(f"{PICKUP}/status", body)
            self.refused(self.wallet.status(), UnreadableMessage)

    def test_fetch_reads_both_forms(self) -> None:
        """An attachment is JSON or base64url, and comes back as the bytes it stands for (reference 6.2)."""
        payload = b'{"ciphertext":"x"}'
        attachments = [build_attachment(payload, "json", "one"), build_attachment(payload, "base64", "two")]
        self.resource.will_say(f"{PICKUP}/delivery", {}, attachments=attachments)
        self.assertEqual(
            self.ask(self.wallet.fetch(2)),
            [DeliveredMessage("one", payload, "json"), DeliveredMessage("two", payload, "base64")],
        )
        self.assertEqual(self.resource.received[0].body, {"limit": 2})

    def test_fetch_of_an_empty_queue(self) -> None:
        """With nothing to deliver the answer is a status (reference 6.1)."""
        self.resource.will_say(f"{PICKUP}/status", {"message_count": 0})
        self.assertEqual(self.ask(self.wallet.fetch()), [])

    def test_odd_attachments_are_refused(self) -> None:
        """Exactly one form of data, and an id to acknowledge it by (reference D10)."""
        both = {"id": "1", "data": {"json": {}, "base64": "e30"}}
        nameless: dict[str, Any] = {"data": {"json": {}}}
        padded = {"id": "1", "data": {"base64": "!"}}
        for attachment in (both, nameless, padded):
            self.resource.will_say(f"{PICKUP}/delivery", {}, attachments=[attachment])
            self.refused(self.wallet.fetch(), UnreadableMessage)

    def test_acknowledge_takes_what_was_delivered(self) -> None:
        """Ids, or the deliveries themselves."""
        self.resource.will_say(f"{PICKUP}/status", {"message_count": 0})
        self.ask(self.wallet.acknowledge([DeliveredMessage("one", b"{}", "json"), "two"]))
        self.assertEqual(self.resource.received[0].body, {"message_id_list": ["one", "two"]})

    def test_problem_report_is_raised(self) -> None:
        """A packed problem report is a refusal, whatever the HTTP status says (reference D5)."""
        report = {"code": "e.p.req.not_enroll", "comment": "no"}
        self.resource.will_say(PROBLEM_REPORT, report, thid=None, pthid="the-thread")
        problem = self.refused(self.wallet.status(), MediatorProblem)
        self.assertEqual(
            (problem.status, problem.code, problem.comment, problem.pthid),
            (200, "e.p.req.not_enroll", "no", "the-thread"),
        )

    def test_problem_in_the_clear_is_raised(self) -> None:
        """A refusal that could not be encrypted is believed as a refusal, not as anything else (section 11)."""
        plain = encoding.dumps(compose_message(PROBLEM_REPORT, {"code": "e.m.req.rate-limited", "comment": "slow"}))
        self.resource.answer = lambda _: (429, "application/didcomm-plain+json", plain)
        problem = self.refused(self.wallet.status(), MediatorProblem)
        self.assertEqual((problem.status, problem.code), (429, "e.m.req.rate-limited"))
        self.resource.answer = lambda _: (200, "application/didcomm-plain+json", plain)
        self.refused(self.wallet.status(), UnreadableMessage)

    def test_answer_of_an_impostor_is_refused(self) -> None:
        """Only the mediator's own key makes its answers (reference 1.8)."""
        impostor = ScriptedMediator()
        self.resource.answer = lambda opened: (
            200,
            "application/didcomm-encrypted+json",
            impostor.pack(opened, f"{PICKUP}/status", {"message_count": 0}),
        )
        self.refused(self.wallet.status(), UnreadableMessage)

    def test_anonymous_answer_is_refused(self) -> None:
        """An answer that anybody could have encrypted proves nothing."""
        message = compose_message(f"{PICKUP}/status", {"message_count": 0}, to=[self.wallet.did])
        self.resource.answer = lambda opened: (
            200,
            "application/didcomm-encrypted+json",
            anoncrypt({**message, "thid": opened.message.id}, self.wallet.identity.document),
        )
        self.refused(self.wallet.status(), UnreadableMessage)

    def test_answer_in_another_thread_is_refused(self) -> None:
        """An answer belongs to its request."""
        self.resource.will_say(f"{PICKUP}/status", {"message_count": 0}, thid="another")
        self.refused(self.wallet.status(), UnreadableMessage)

    def test_answer_to_nobody_is_refused(self) -> None:
        """The mediator names its recipient (reference 2.1)."""
        self.resource.will_say(f"{PICKUP}/status", {"message_count": 0}, to=None)
        self.refused(self.wallet.status(), UnreadableMessage)

    def test_sent_message_shows_the_mediator_only_the_recipient(self) -> None:
        """What the mediator can open is an anonymous forward; only Bob opens the rest (UC-021, reference 4)."""
        identity = generate_identity("did:peer:4", endpoint=self.resource.mediator.did)
        bob = DIDCommWallet(identity, self.http, self.clock, self.resource.mediator)
        id_ = self.ask(self.wallet.send(bob.did, "hello"))
        (seen,) = self.resource.received
        self.assertEqual((seen.sender, seen.message.sender, seen.body), (None, None, {"next": bob.did}))
        opened = bob.open(attached_to(seen))
        self.assertEqual((opened.message.id, opened.text, opened.sender), (id_, "hello", self.wallet.did))

    def test_refused_message_is_a_problem(self) -> None:
        """Only an empty 202 means that a message was taken (reference D4)."""
        for answer in ((400, None, b""), (202, None, b"x"), (200, None, b"")):
            self.resource.answer = lambda _, answer=answer: answer  # type: ignore[misc]  # bound early
            self.assertEqual(
                self.refused(self.wallet.send(self.wallet.did, "hello"), MediatorProblem).status, answer[0]
            )

    def test_raw_post_returns_what_came(self) -> None:
        """Any bytes may be posted, and the answer is not judged."""
        self.resource.answer = lambda _: (418, "text/plain", b"short and stout")
        _, packed = self.wallet.pack("https://didcomm.org/empty/1.0/empty")
        status, headers, body = self.ask(self.wallet.post(packed))
        self.assertEqual((status, headers["content-type"], body), (418, "text/plain", b"short and stout"))


class ServerEnd(WebSocketServerProtocol):
    """The mediator's end of a socket; what it says is up to the test."""

    factory: ServerFactory

    def onConnect(self, request: object) -> None:
        self.factory.end = self

    def onMessage(self, payload: bytes, isBinary: bool) -> None:  # noqa: N803  Autobahn's name
        self.factory.frames.append(payload)


class ServerFactory(WebSocketServerFactory):
    """Remembers its one socket and what came through it."""

    def __init__(self) -> None:
        super().__init__(reactor=Clock())
        self.protocol = ServerEnd
        # Autobahn's timers would run on the global reactor.
        self.setProtocolOptions(openHandshakeTimeout=0, closeHandshakeTimeout=0)
        self.frames: list[bytes] = []
        self.end: ServerEnd | None = None


@implementer(IStreamClientEndpoint)
class Pipe:
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
        self.pipe = Pipe()
        opening = Deferred.fromCoroutine(connect_didcomm_socket(self.clock, self.wallet, endpoint=self.pipe))
        self.pipe.pump.flush()
        self.socket: DIDCommSocket = self.successResultOf(opening)
        assert self.pipe.server.end is not None
        self.end = self.pipe.server.end

    def begin(self, work: Coroutine[Any, Any, Any]) -> Deferred[Any]:
        """Run a coroutine until it waits for the other end, which has then received what was sent."""
        deferred: Deferred[Any] = Deferred.fromCoroutine(work)
        self.pipe.pump.flush()
        return deferred

    def requests(self) -> list[OpenedMessage]:
        """What the other end has received."""
        return [self.resource.read(frame) for frame in self.pipe.server.frames]

    def say(self, frame: bytes, *, binary: bool = False) -> None:
        """Send a frame from the other end."""
        self.end.sendMessage(frame, binary)
        self.pipe.pump.flush()

    def test_answers_find_their_requests(self) -> None:
        """Answers may come in another order than the requests: the thread decides (reference 3.2)."""
        first, second = self.begin(self.socket.status()), self.begin(self.socket.status())
        one, two = self.requests()
        self.say(self.resource.pack(two, f"{PICKUP}/status", {"message_count": 2}))
        self.assertNoResult(first)
        self.assertEqual(self.successResultOf(second).message_count, 2)
        self.say(self.resource.pack(one, f"{PICKUP}/status", {"message_count": 1}))
        self.assertEqual(self.successResultOf(first).message_count, 1)

    def test_pushed_delivery_is_queued(self) -> None:
        """A delivery that nobody asked for is a push, one message an attachment (reference 6.3)."""
        live = self.begin(self.socket.live())
        (request,) = self.requests()
        self.assertEqual(request.body, {"live_delivery": True})
        self.say(self.resource.pack(request, f"{PICKUP}/status", {"message_count": 0, "live_delivery": True}))
        self.assertTrue(self.successResultOf(live).live_delivery)
        attachments = [build_attachment(b'{"ciphertext":"x"}', "json", "one")]
        self.say(self.resource.pack(request, f"{PICKUP}/delivery", {}, thid=None, attachments=attachments))
        self.assertEqual(
            self.successResultOf(self.socket.pushed.get()), DeliveredMessage("one", b'{"ciphertext":"x"}', "json")
        )

    def test_raw_push_is_known_by_its_digest(self) -> None:
        """In raw mode the payload itself is the frame, and its SHA-256 is what it is acknowledged by (6.1)."""
        alice = WalletIdentity.generate()
        payload = authcrypt(note_from(alice, self.wallet.identity), alice, self.wallet.identity.document)
        self.say(payload)
        delivered = self.successResultOf(self.socket.pushed.get())
        self.assertEqual((delivered.id, delivered.payload), (hashlib.sha256(payload).hexdigest(), payload))

    def test_problem_fails_the_request_it_is_about(self) -> None:
        """`pthid` names the thread in trouble (reference 7.3)."""
        status = self.begin(self.socket.status())
        (request,) = self.requests()
        report = {"code": "e.p.req.not_enroll", "comment": "no"}
        self.say(self.resource.pack(request, PROBLEM_REPORT, report, thid=None, pthid=request.message.id))
        self.assertEqual(self.failureResultOf(status, MediatorProblem).value.code, "e.p.req.not_enroll")

    def test_problem_about_nothing_known_is_kept(self) -> None:
        """A report in the clear about a frame that did not open has no thread (section 11, row 7)."""
        self.say(encoding.dumps(compose_message(PROBLEM_REPORT, {"code": "e.p.trust.crypto", "comment": "no"})))
        self.assertEqual(self.successResultOf(self.socket.problems.get()).code, "e.p.trust.crypto")

    def test_nonsense_is_kept_apart(self) -> None:
        """Frames that are not messages, not readable or not text disturb nothing."""
        frames = [b"nonsense", b"{}", forged_frame(self.wallet)]
        for frame in frames:
            self.say(frame)
        self.say(b"binary", binary=True)
        self.assertEqual(self.socket.unexpected, [*frames, b"binary"])

    def test_closing_fails_what_waits(self) -> None:
        """Requests without an answer fail with the close code, and nothing can be sent any more."""
        status, closed = self.begin(self.socket.status()), self.socket.closed()
        self.end.sendClose(4000)
        self.pipe.pump.flush()
        self.assertEqual(self.failureResultOf(status, SocketClosedError).value.code, 4000)
        self.assertEqual(self.successResultOf(closed), 4000)
        self.assertRaises(SocketClosedError, self.socket.send_frame, b"{}")

    def test_close_is_orderly(self) -> None:
        """Closing from our side ends with the code we gave."""
        closed = self.socket.close()
        self.pipe.pump.flush()
        self.assertEqual(self.successResultOf(closed), 1000)
        self.assertEqual(self.successResultOf(self.socket.close()), 1000)


def forged_frame(wallet: DIDCommWallet) -> bytes:
    """A delivery whose `from` is the mediator and whose encryption is somebody else's."""
    forger = WalletIdentity.generate()
    message = compose_message(f"{PICKUP}/delivery", {}, to=[wallet.did], **{"from": wallet.mediator.did})
    return authcrypt(message, forger, wallet.identity.document)


def test_forward_can_take_every_shape() -> None:
    """Tests need forwards of several attachments, in either form, with any header (reference 4.4)."""
    message = build_forward("did:example:1", [b"{}", b"{}"], form="base64", delay_milli=5)
    assert [attachment["data"] for attachment in message["attachments"]] == [{"base64": "e30"}, {"base64": "e30"}]
    assert message["delay_milli"] == 5
