"""The Decentrl wallet over HTTP and WebSocket: its requests, and which responses it accepts."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, cast

from treq.client import HTTPClient
from treq.testing import StubTreq
from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.resource import Resource
from twisted.web.server import Request

from mediatord.protocol import encoding
from mediatord.protocol.decentrl.contracts import countersign_contract, parse_registration_request
from mediatord.protocol.decentrl.crypto import (
    decode_public_key,
    decrypt,
    derive_shared_secret,
    generate_key_pair,
    verify_json,
)
from mediatord.protocol.decentrl.did_decentrl import parse_did
from mediatord.wallet import decentrl_client
from mediatord.wallet.decentrl_client import (
    CommandRefused,
    ContractRequest,
    DecentrlMediator,
    DecentrlSocket,
    DecentrlWallet,
    HistoryEntry,
    MediatorDirectory,
    PendingEvent,
    conclude_contract,
    connect_decentrl_socket,
    discover_decentrl_mediator,
    propose_contract,
    read_mediator_document,
    read_pushed_events,
    resolve_decentrl_mediator,
)
from mediatord.wallet.didcomm_messages import UnreadableMessage
from mediatord.wallet.didcomm_socket import SocketClosedError
from tests.wallet.test_decentrl_wallet import MEDIATOR, NOW, URL, bytes_of, document
from tests.wallet.test_didcomm_wallet import InMemoryConnection

# --- over HTTP ----------------------------------------------------------------------------------------------------


COUNT = {"page": 0, "page_size": 100}


class ScriptedMediator(Resource):
    """
    Answers every POST as the test says, or else registers the sender.

    :ivar received: the commands.
    :ivar pages: responses to GET: path -> (status, body).
    """

    isLeaf = True

    def __init__(self) -> None:
        super().__init__()
        self.received: list[dict[str, Any]] = []
        self.pages: dict[str, tuple[int, Any]] = {"/.well-known/did.json": (200, document())}
        self.asked: list[str] = []
        self.answer: Callable[[dict[str, Any]], tuple[int, Any]] = self.registration_reply
        self.content_type = "application/json"

    def render_GET(self, request: Request) -> bytes:
        """Serve a page."""
        self.asked.append(request.uri.decode())
        return self._reply(request, *self.pages.get(request.path.decode(), (404, {"code": "NOT_FOUND"})))

    def render_POST(self, request: Request) -> bytes:
        """Serve a reply."""
        assert request.content is not None
        command = json.loads(request.content.read())
        self.received.append(command)
        return self._reply(request, *self.answer(command))

    def _reply(self, request: Request, status: int, value: Any) -> bytes:
        request.setResponseCode(status)
        request.setHeader("content-type", self.content_type)
        return value if isinstance(value, bytes) else encoding.dumps(value)

    @staticmethod
    def registration_reply(command: dict[str, Any]) -> tuple[int, Any]:
        """The reply to a registration (DCTRL-0004 8.1)."""
        payload = command["payload"]
        public = decode_public_key(payload["requestor_ephemeral_public_key"])
        plaintext = decrypt(payload["encrypted_contract_request"], derive_shared_secret(bytes_of(0x12), public))
        signed = countersign_contract(
            parse_registration_request(plaintext),
            mediator_did=MEDIATOR,
            encryption_key=generate_key_pair()[1],
            seed=bytes_of(0x11),
        )
        code = "MEDIATOR_REGISTRATION_SUCCESS"
        return 200, {"type": "SUCCESS", "code": code, "payload": {"signed_communication_contract": signed}}

    def set_reply(self, status: int = 200, **members: Any) -> None:
        """Answer like this from now on."""
        self.answer = lambda _: (status, {"type": "SUCCESS" if status == 200 else "ERROR", **members})

    def set_page(self, name: str, *items: Mapping[str, Any]) -> None:
        """Answer with a page of these."""
        pagination = {**COUNT, "total": len(items)}
        self.set_reply(payload={name: list(items), "pagination": pagination})


class HTTPTestCase(SynchronousTestCase):
    """A scripted mediator, and a wallet as its client."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        self.resource = ScriptedMediator()
        self.http = cast(HTTPClient, StubTreq(self.resource))
        self.mediator: DecentrlMediator = self.ask(discover_decentrl_mediator(self.http, URL))
        self.wallet = self.build_wallet("alice")

    def build_wallet(self, alias: str) -> DecentrlWallet:
        """Build a wallet with a new identity."""
        return DecentrlWallet.generate(alias, self.mediator, self.http, self.clock)

    def ask(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of a coroutine, which must not wait."""
        return self.successResultOf(Deferred.fromCoroutine(work))

    def error_of(self, work: Coroutine[Any, Any, Any], kind: type[Exception]) -> Any:
        """Return the error of a coroutine."""
        return self.failureResultOf(Deferred.fromCoroutine(work), kind).value

    @property
    def payload(self) -> Any:
        """The payload of the last command."""
        return self.resource.received[-1]["payload"]


class ClientTests(HTTPTestCase):
    """Requests and their responses."""

    def test_signs_and_dates_commands(self) -> None:
        """The envelope is that of DCTRL-0004 section 4, with milliseconds and a fresh nonce."""
        self.resource.set_reply()
        self.ask(self.wallet.acknowledge(["1"]))
        self.ask(self.wallet.acknowledge(["1"]))
        one, two = (command["header"] for command in self.resource.received)
        self.assertEqual(
            {name: value for name, value in one.items() if name != "nonce"},
            {
                "channel": "DIRECT_AUTHENTICATED",
                "sender_did": self.wallet.did,
                "sender_signing_key_id": f"{self.wallet.did}#signing",
                "recipient_did": MEDIATOR,
                "timestamp": NOW * 1000,
            },
        )
        self.assertNotEqual(one["nonce"], two["nonce"])
        signature = self.resource.received[0].pop("signature")
        self.assertTrue(verify_json(self.resource.received[0], signature, self.wallet.identity.signing_key))

    def test_refusal_has_status_and_code(self) -> None:
        """A refusal is raised, also one without details (DCTRL-0004 section 11)."""
        self.resource.set_reply(401, code="DUPLICATE_NONCE")
        refusal = self.error_of(self.wallet.acknowledge([]), CommandRefused)
        self.assertEqual((refusal.status, refusal.code), (401, "DUPLICATE_NONCE"))
        self.resource.answer = lambda _: (502, b"Bad Gateway")
        refusal = self.error_of(self.wallet.acknowledge([]), CommandRefused)
        self.assertEqual((refusal.status, refusal.code), (502, ""))

    def test_invalid_replies(self) -> None:
        """A 200 that is no JSON object, no success, or incomplete is refused."""
        for reply in (b"hello", b"[]", {}, {"type": "ERROR", "code": "X"}):
            self.resource.answer = lambda _, reply=reply: (200, reply)  # type: ignore[misc]  # bound early
            self.error_of(self.wallet.acknowledge([]), UnreadableMessage)
        self.resource.set_reply(payload={"pending_events": [{"id": 1}], "pagination": {}})
        self.error_of(self.wallet.pending(), UnreadableMessage)
        self.resource.set_reply()
        self.error_of(self.wallet.publish("x"), UnreadableMessage)
        self.resource.content_type = "text/html"
        self.error_of(self.wallet.acknowledge([]), UnreadableMessage)

    def test_reply_timeout(self) -> None:
        """A silent mediator costs half a minute."""
        silent = cast(HTTPClient, UnansweredHTTPClient())
        wallet = DecentrlWallet.generate("alice", self.mediator, silent, self.clock)
        asking = Deferred.fromCoroutine(wallet.acknowledge([]))
        self.clock.advance(29)
        self.assertNoResult(asking)
        self.clock.advance(2)
        self.failureResultOf(asking, TimeoutError)

    def test_registration_is_a_contract(self) -> None:
        """The mediator's signature is verified with the key of its document (DCTRL-0004 8.1)."""
        agreement = self.ask(self.wallet.register(lifetime=100))
        self.assertEqual((agreement.peer_did, agreement.expires_at), (MEDIATOR, NOW + 100))
        self.resource.set_reply(payload={})
        self.error_of(self.wallet.register(), UnreadableMessage)

    def test_refuses_forged_registration(self) -> None:
        """Only the mediator's own key signs a registration."""
        impostor = replace(self.mediator, signing_key=self.wallet.identity.signing_key)
        wallet = DecentrlWallet.generate("alice", impostor, self.http, self.clock)
        self.error_of(wallet.register(), UnreadableMessage)

    def test_filters(self) -> None:
        """Tags are encrypted; unused filters are absent, not null (reference section 4)."""
        self.resource.set_page("events")
        self.ask(self.wallet.events(1, 5, tags=["chat"], participant_did="did:x:1", after_timestamp=None))
        tag = self.wallet.identity.tag("chat")
        self.assertEqual(
            self.payload,
            {
                "type": "QUERY_EVENTS",
                "filter": {"encrypted_tags": [tag], "participant_did": "did:x:1"},
                "pagination": {"page": 1, "page_size": 5},
            },
        )
        self.resource.set_page("pending_events")
        self.ask(self.wallet.pending())
        self.assertEqual(self.payload["filter"], {})

    def test_stored_events_are_encrypted(self) -> None:
        """Neither event nor tags are sent in the clear, and they are restored (DCTRL-0004 8.9)."""
        self.resource.set_reply()
        self.ask(
            self.wallet.save_events(
                HistoryEntry(self.wallet.did, "did:x:1", "secret", ("a hidden tag",), contract_id="c")
            )
        )
        (event,) = self.payload["events"]
        self.assertEqual((event["timestamp"], event["contract_id"]), (NOW, "c"))
        self.assertEqual(self.wallet.identity.unseal(event["payload"]), "secret")
        self.assertNotIn("a hidden tag", json.dumps(self.payload))

    def test_updates_tags(self) -> None:
        """By the id of the event (DCTRL-0004 8.11)."""
        self.resource.set_reply()
        self.ask(self.wallet.update_tags({"1": ["a", "b"], "2": []}))
        tags = [self.wallet.identity.tag("a"), self.wallet.identity.tag("b")]
        expected = [{"event_id": "1", "encrypted_tags": tags}, {"event_id": "2", "encrypted_tags": []}]
        self.assertEqual(self.payload, {"type": "UPDATE_EVENT_TAGS", "events": expected})

    def test_verifies_public_events(self) -> None:
        """Public events must be signed by their publisher (DCTRL-0007)."""
        self.resource.set_reply(public_event_id="7")
        self.assertEqual(self.ask(self.wallet.publish("x", ["a", "b"], "blog")), "7")
        command = self.resource.received[-1]
        self.assertEqual(command["header"]["channel"], "ONE_WAY_PUBLIC")
        shown = {name: value for name, value in command["payload"].items() if name != "type"}
        pagination = {"page": 0, "page_size": 20, "total": 1}
        did = self.wallet.did
        self.resource.pages[f"/public/{did}"] = 200, {"events": [{"id": "7", **shown}], "pagination": pagination}
        (read,) = self.ask(self.build_wallet("bob").public(did, tags=["a", "c"], after=1)).items
        self.assertEqual((read.event, read.tags, read.channel_id), ("x", ["a", "b"], "blog"))
        self.assertIn("after=1&tags=a%2Cc", self.resource.asked[-1])
        changed = {"id": "7", **shown, "tags": ["b", "a"]}
        self.resource.pages[f"/public/{did}"] = 200, {"events": [changed], "pagination": pagination}
        self.error_of(self.build_wallet("bob").public(did), UnreadableMessage)


class ContractTests(HTTPTestCase):
    """Contracts with others, through mediators."""

    def test_contract_through_mediators(self) -> None:
        """Requested at the mediator that the DID names, accepted, saved, returned and found (reference 7.5)."""
        alice, bob = self.wallet, self.build_wallet("bob")
        self.resource.set_reply(code="REQUESTED")
        self.ask(alice.request_contract(bob.did))
        header, payload = self.resource.received[-1]["header"], self.payload
        self.assertEqual(header["recipient_did"], bob.did)
        self.resource.set_page(
            "pending_communication_contract_requests", {"id": "1", "sender_did": alice.did, **payload}
        )
        (request,) = self.ask(bob.pending_requests()).items
        self.resource.set_reply()
        accepted = bob.accept(request)
        self.ask(bob.save_contract(accepted))
        self.assertEqual(self.payload["type"], "SAVE_COMMUNICATION_CONTRACT")
        self.ask(bob.respond(accepted))
        self.assertEqual(self.resource.received[-1]["header"]["recipient_did"], alice.did)
        self.ask(bob.acknowledge_requests([request]))
        self.assertEqual(self.payload["communication_contract_ids"], ["1"])
        kept = {"id": "9", "signed_communication_contract": accepted.signed}
        self.resource.set_page("communication_contracts", kept)
        self.assertEqual(len(self.ask(alice.conclude())), 1)
        self.assertEqual(self.ask(alice.conclude()), [])
        self.assertEqual([contract.root_secret for contract in alice.contracts_with(bob.did)], [accepted.root_secret])

    def test_response_beyond_first_page(self) -> None:
        """However many contracts there are with an identity, the response to a proposal is found."""
        alice, bob = self.wallet, self.build_wallet("bob")
        self.resource.set_reply(code="REQUESTED")
        self.ask(alice.request_contract(bob.did))
        accepted = bob.accept(ContractRequest(id="1", sender_did=alice.did, **self.payload))
        others = [propose_contract(alice.identity, bob.did, NOW).request for _ in range(2)]
        kept = [{"id": str(id(item)), "signed_communication_contract": item} for item in (*others, accepted.signed)]

        def page_of(command: dict[str, Any]) -> tuple[int, Any]:
            page = command["payload"]["pagination"]["page"]
            found = {"communication_contracts": kept[page : page + 1]}
            return 200, {"type": "SUCCESS", "payload": {**found, "pagination": {**COUNT, "page": page, "total": 3}}}

        self.resource.answer = page_of
        self.assertEqual([element.id for element in self.ask(alice.conclude())], [accepted.id])
        self.assertEqual(self.payload["filter"], {"did": bob.did})

    def test_message_needs_contract(self) -> None:
        """Without a contract there is no key to encrypt with; an expired one does not count."""
        alice, bob = self.wallet, self.build_wallet("bob")
        self.error_of(alice.send(bob.did, "x"), LookupError)
        self.make_contract(alice, bob, lifetime=10)
        self.resource.set_reply(pendingEventId="5")
        self.assertEqual(self.ask(alice.send(bob.did, "x")), "5")
        pending = PendingEvent(id="5", sender_did=alice.did, payload=self.payload)
        self.assertEqual(bob.open(pending).text, "x")
        self.clock.advance(10)
        self.error_of(alice.send(bob.did, "x"), LookupError)

    def test_uses_longest_contract(self) -> None:
        """The contract that expires last, unless another is named (reference section 14)."""
        alice, bob = self.wallet, self.build_wallet("bob")
        for lifetime in (100, 300, 200):
            self.make_contract(alice, bob, lifetime=lifetime)
        self.assertEqual([contract.expires_at - NOW for contract in alice.contracts_with(bob.did)], [300, 200, 100])
        self.resource.set_reply(pendingEventId="5")
        for agreement, used in ((None, 300), (alice.concluded[0], 100)):
            self.ask(alice.send(bob.did, "x", agreement))
            event = bob.open(PendingEvent(id="5", sender_did=alice.did, payload=self.payload))
            self.assertEqual(event.contract.expires_at - NOW, used)

    def make_contract(self, alice: DecentrlWallet, bob: DecentrlWallet, **changes: Any) -> None:
        """Make a contract without a mediator."""
        proposal = propose_contract(alice.identity, bob.did, alice.now(), **changes)
        payload = proposal.payload(parse_did(bob.did).prekey)
        accepted = bob.accept(ContractRequest(id="1", sender_did=alice.did, **payload))
        alice.concluded.append(conclude_contract(proposal, accepted.signed, alice.directory.signing_key))


class DirectoryTests(HTTPTestCase):
    """Discovery of mediators by DIDs."""

    def test_mediator_of_did(self) -> None:
        """
        The mediator that the DID names, fetched once; on the loopback interface without TLS (reference section 3).
        """
        directory = MediatorDirectory(self.http)
        for _ in range(2):
            self.assertEqual(self.ask(directory.mediator_of(self.wallet.did)), self.mediator)
        self.assertEqual(self.resource.asked, ["/.well-known/did.json"] * 2)  # the first is that of setUp

    def test_undiscoverable_mediators(self) -> None:
        """DIDs of other methods, missing documents, and documents of others."""
        directory = MediatorDirectory(self.http)
        self.error_of(directory.mediator_of("did:x:1"), UnreadableMessage)
        for did in ("did:x:1", "did:web:", "did:web:127.0.0.1%3A9999"):
            self.error_of(resolve_decentrl_mediator(self.http, did), UnreadableMessage)
        self.resource.pages.clear()
        self.error_of(resolve_decentrl_mediator(self.http, MEDIATOR), UnreadableMessage)

    def test_mediator_behind_tls_proxy(self) -> None:
        """On the loopback interface an error page in plain HTTP leads to HTTPS, as a TLS proxy answers with one."""

        async def fetch_from_proxy(http: object, url: str) -> dict[str, Any]:
            if not url.startswith("https:"):
                raise UnreadableMessage(f"HTTP 400 at {url}")
            return document()

        self.patch(decentrl_client, "fetch_json", fetch_from_proxy)
        self.assertEqual(self.ask(resolve_decentrl_mediator(self.http, MEDIATOR)).did, MEDIATOR)

    def test_signing_keys(self) -> None:
        """Of a did:decentrl from itself, of a mediator once it is known, and only by their ids (reference 2.2)."""
        directory = MediatorDirectory(self.http)
        alice = self.wallet.identity
        self.assertEqual(directory.signing_key(alice.did, alice.signing_key_id), alice.signing_key)
        self.assertIsNone(directory.signing_key(alice.did, "#signing"))
        self.assertIsNone(directory.signing_key(MEDIATOR, f"{MEDIATOR}#signing"))
        directory.add(self.mediator)
        self.assertEqual(directory.signing_key(MEDIATOR, f"{MEDIATOR}#signing"), self.mediator.signing_key)


class UnansweredHTTPClient:
    """HTTP client whose requests are never answered."""

    def post(self, url: str, **options: Any) -> Deferred[Any]:
        """Wait forever."""
        return Deferred()


# --- over a socket ------------------------------------------------------------------------------------------------


class SocketTests(SynchronousTestCase):
    """A wallet over a WebSocket."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        http = cast(HTTPClient, StubTreq(ScriptedMediator()))
        self.wallet = DecentrlWallet.generate("alice", read_mediator_document(document()), http, self.clock)
        self.pipe = InMemoryConnection()
        self.connecting = Deferred.fromCoroutine(connect_decentrl_socket(self.clock, self.wallet, endpoint=self.pipe))
        self.pipe.pump.flush()
        assert self.pipe.server.end is not None
        self.end = self.pipe.server.end

    @property
    def frames(self) -> list[dict[str, Any]]:
        """Frames that the mediator's side has received."""
        return [json.loads(frame) for frame in self.pipe.server.frames]

    def send(self, value: object, *, binary: bool = False) -> None:
        """Send a frame from the mediator's side."""
        self.end.sendMessage(value if isinstance(value, bytes) else encoding.dumps(value), binary)
        self.pipe.pump.flush()

    def disconnect(self, code: int) -> None:
        """Close on the mediator's side."""
        self.end.sendClose(code)
        self.pipe.pump.flush()

    def open_socket(self) -> DecentrlSocket:
        """Open and authenticate the socket."""
        self.send({"type": "AUTH_SUCCESS"})
        return self.successResultOf(self.connecting)

    def test_authentication(self) -> None:
        """The signed content is without its type; the socket is open after the mediator's reply (DCTRL-0004 10.2)."""
        (frame,) = self.frames
        self.assertEqual((frame.pop("type"), frame["timestamp"]), ("AUTHENTICATE", NOW * 1000))
        signature = frame.pop("signature")
        self.assertTrue(verify_json(frame, signature, self.wallet.identity.signing_key))
        self.assertNoResult(self.connecting)
        self.open_socket()

    def test_refusal(self) -> None:
        """The error, and its close code (DCTRL-0004 10.3)."""
        self.send({"type": "AUTH_FAILED", "code": "NOT_REGISTERED"})
        self.assertNoResult(self.connecting)
        self.disconnect(4007)
        refusal = self.failureResultOf(self.connecting, CommandRefused).value
        self.assertEqual((refusal.status, refusal.code), (4007, "NOT_REGISTERED"))

    def test_closed_before_reply(self) -> None:
        """A mediator that stops has refused nothing."""
        self.disconnect(4000)
        self.assertEqual(self.failureResultOf(self.connecting, SocketClosedError).value.code, 4000)

    def test_authentication_timeout(self) -> None:
        """A silent mediator is disconnected."""
        self.clock.advance(31)
        self.failureResultOf(self.connecting, TimeoutError)
        self.pipe.pump.flush()
        self.assertEqual(self.end.remoteCloseCode, 1000)

    def test_answers_pings(self) -> None:
        """With their timestamp (DCTRL-0004 10.4); they are no pushes."""
        socket = self.open_socket()
        self.send({"type": "PING", "timestamp": 5})
        self.assertEqual(self.frames[1:], [{"type": "PONG", "timestamp": 5}])
        self.assertEqual((socket.pings, socket.pushed.pending), (1, []))

    def test_pushes_are_queued(self) -> None:
        """Events, and notifications that contracts have changed (DCTRL-0004 10.5)."""
        socket = self.open_socket()
        event = {"id": "1", "sender_did": "did:x:1", "payload": "sealed"}
        self.send({"type": "PENDING_EVENTS", "events": [event]})
        self.send({"type": "CONTRACTS_UPDATED"})
        first, second = (self.successResultOf(socket.pushed.get()) for _ in range(2))
        self.assertEqual(read_pushed_events(first), (PendingEvent(**event),))
        self.assertEqual(read_pushed_events(second), ())

    def test_invalid_pushes(self) -> None:
        """Other frames, and pushes without their members, are not returned."""
        for frame in (
            {},
            {"type": "AUTH_SUCCESS"},
            {"type": "PENDING_EVENTS"},
            {"type": "PENDING_EVENTS", "events": [1]},
        ):
            with self.assertRaises(UnreadableMessage):
                read_pushed_events(frame)

    def test_invalid_frames_are_kept_separately(self) -> None:
        """Frames that are not JSON, unknown or binary do no harm."""
        socket = self.open_socket()
        self.send(b"nonsense")
        self.send({"type": "NEWS"})
        self.send(b"{}", binary=True)
        self.assertEqual(socket.unexpected, [b"nonsense", b'{"type":"NEWS"}', b"{}"])

    def test_closing(self) -> None:
        """Whoever closes it, the code is known, and nothing can be sent any more."""
        socket = self.open_socket()
        closed = socket.closed()
        self.disconnect(4000)
        self.assertEqual(self.successResultOf(closed), 4000)
        self.assertEqual(self.successResultOf(socket.close()), 4000)
        self.assertRaises(SocketClosedError, socket.send, {})

    def test_closes_with_given_code(self) -> None:
        """Closing from the client's side ends with its code."""
        closed = self.open_socket().close()
        self.pipe.pump.flush()
        self.assertEqual(self.successResultOf(closed), 1000)
