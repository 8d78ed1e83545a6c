"""Decentrl sockets of a daemon, over TCP and frame by frame (DCTRL-0004 section 10, reference 11)."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from mediatord.bench.raw_clients import CLOSE_OPCODE, PONG_OPCODE, TEXT_OPCODE
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.commands import is_didcomm_envelope
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.wallet.decentrl_client import PRIVATE_CHANNEL
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import authcrypt, compose_message, unpack_message
from tests.in_memory_mediator import PING, from_header
from tests.integration.message_load import PATIENCE_SECONDS
from tests.integration.raw_decentrl_client import RawDecentrlClient, RawWebSocket, unix_time
from tests.integration.refusal_test_case import OTHER_MEDIATOR, REQUEST, RESPOND, SAVE, SEALED, RefusalTestCase
from tests.protocol.decentrl.mutations import nested, replaced, to_json, without

BINARY, CONTINUATION = 2, 0
NONCE = "6f1c1d52-6a0b-4e0e-9a37-0d6f3a1b2c{:02x}"
# Longer than registration, contract, socket and event take on a busy machine.
SETUP_SECONDS = 20
# Interval of polling for the expiry of a registration.
POLL_SECONDS = 0.05
UPDATED = {"type": "CONTRACTS_UPDATED"}


class SocketTestCase(RefusalTestCase):
    """Alice and Bob, who may send to each other; Carol, who is not registered."""

    alice: ClassVar[RawDecentrlClient]
    bob: ClassVar[RawDecentrlClient]
    carol: ClassVar[RawDecentrlClient]

    @classmethod
    def start_daemon(cls, settings: Mapping[str, Any] | None = None) -> None:
        """Start a daemon with these identities."""
        super().start_daemon(settings)
        cls.alice, cls.bob, cls.carol = (
            RawDecentrlClient(cls.daemon_client, alias) for alias in ("alice", "bob", "carol")
        )
        for one in (cls.alice, cls.bob):
            one.register()
        cls.alice.permit_sender(cls.bob)
        cls.bob.permit_sender(cls.alice)

    def setUp(self) -> None:
        super().setUp()
        # Keeps the idle socket open: nobody reads it, so it answers no pings.
        IdleSocketTests.authenticated_socket.send(b"", PONG_OPCODE)

    def open_unauthenticated(self, path: str = "/ws") -> RawWebSocket:
        """A socket without any message."""
        socket = RawWebSocket(self.daemon_client, path)
        self.addCleanup(socket.close)
        return socket

    def open_authenticated(self, identity: RawDecentrlClient) -> RawWebSocket:
        """An authenticated socket."""
        socket = identity.open_socket()
        self.addCleanup(socket.close)
        return socket

    def send_event(self, recipient: RawDecentrlClient, payload: str) -> str:
        """Send an event from the other identity to this one; return its id."""
        sender = self.alice if recipient is not self.alice else self.bob
        response = sender.send_event(recipient, payload)
        self.assertEqual(response.status, 200, response.body)
        return str(response.json["pendingEventId"])


class AuthenticationTests(SocketTestCase):
    """Refusals of first messages; nothing is stored."""

    def assert_refused(  # type: ignore[override]  # a message is refused here, no command
        self, message: Mapping[str, Any] | bytes, code: str, close: int, opcode: int = TEXT_OPCODE
    ) -> None:
        """A socket with this first message is closed so."""
        before = self.daemon_client.read_rows()
        socket = self.open_unauthenticated()
        socket.send(message, opcode)
        self.assert_authentication_failed(socket, code, close)
        self.assertEqual(self.daemon_client.read_rows(), before)

    def test_malformed_message(self) -> None:
        """4002: anything but a well-formed AUTHENTICATE in a text frame."""
        good = self.alice.authentication()
        for message in (
            b"",
            b"hello",
            b"[]",
            b"null",
            b"\xff\xfe",
            b"{}",
            b"[" * 100_000,
            {**good, "type": "PONG"},
            {**good, "type": "authenticate"},
            {**good, "timestamp": str(good["timestamp"])},
            {**good, "timestamp": True},
            {**good, "nonce": "1"},
            {**good, "did": None},
            {**good, "signature": 7},
            to_json({**good, "unknown": "\ud800"}),
            to_json({**good, "unknown": nested(70)}),
            to_json(replaced(good, ("timestamp",), 10**400)),
            to_json(good).replace(b'"did"', b'"did":"x","did"'),
            self.alice.command({"type": "QUERY_EVENTS"}),
            *(without(good, (name,)) for name in good),
        ):
            self.assert_refused(message, "INVALID_MESSAGE", 4002)
        self.assert_refused(good, "INVALID_MESSAGE", 4002, BINARY)
        self.open_authenticated(self.alice)

    def test_repeated_message(self) -> None:
        """4002: the same message on another socket, while the first one is open and afterwards."""
        greeting = self.alice.authentication()
        first = self.open_unauthenticated()
        first.send(greeting)
        self.assertEqual(first.receive(), {"type": "AUTH_SUCCESS"})
        self.assert_refused(greeting, "INVALID_MESSAGE", 4002)
        first.close()
        self.assert_refused(greeting, "INVALID_MESSAGE", 4002)
        self.assert_refused(self.alice.authentication(nonce=greeting["nonce"]), "INVALID_MESSAGE", 4002)

    def test_sockets_and_commands_have_separate_nonces(self) -> None:
        """A nonce used by a command is valid on a socket, and the reverse."""
        nonce = NONCE.format(0)
        query = partial(self.alice.command, {"type": "QUERY_EVENTS"})
        self.assertEqual(self.daemon_client.post_command(query(nonce=nonce)).status, 200)
        socket = self.open_unauthenticated()
        socket.send(self.alice.authentication(nonce=nonce))
        self.assertEqual(socket.receive(), {"type": "AUTH_SUCCESS"})
        other = self.open_unauthenticated()
        other.send(self.alice.authentication(nonce=NONCE.format(1)))
        self.assertEqual(other.receive(), {"type": "AUTH_SUCCESS"})
        self.assertEqual(self.daemon_client.post_command(query(nonce=NONCE.format(1))).status, 200)

    def test_timestamp_out_of_range(self) -> None:
        """4003: more than five minutes before or after its arrival."""
        for off in (-301_000, 360_000, -(10**13), 10**13):
            message = self.alice.authentication(timestamp_ms=int(unix_time() * 1000) + off)
            self.assert_refused(message, "TIMESTAMP_OUT_OF_RANGE", 4003)
        for off in (-240_000, 290_000):
            socket = self.open_unauthenticated()
            socket.send(self.alice.authentication(timestamp_ms=int(unix_time() * 1000) + off))
            self.assertEqual(socket.receive(), {"type": "AUTH_SUCCESS"})

    def test_did_not_found(self) -> None:
        """4004: a DID that cannot be resolved locally."""
        for did in (
            OTHER_MEDIATOR,
            "did:decentrl:x",
            "did:key:z6MkhaXg",
            "nobody",
            "did:x: y",
            "did:x:é",
            "d" * 2049,
        ):
            message = self.alice.authentication(did=did, signing_key_id=f"{did}#signing")
            self.assert_refused(message, "DID_NOT_FOUND", 4004)

    def test_signing_key_not_found(self) -> None:
        """4005: anything but the full id of the signing key."""
        alice = self.alice
        for key_id in ("#signing", alice.did, f"{alice.did}#prekey", self.bob.identity.signing_key_id):
            self.assert_refused(alice.authentication(signing_key_id=key_id), "SIGNING_KEY_NOT_FOUND", 4005)

    def test_invalid_signature(self) -> None:
        """4006: of another identity, of other data, of additional data, or none."""
        good = self.alice.authentication()
        signed = {name: good[name] for name in ("did", "signing_key_id", "timestamp", "nonce")}
        for signature in (
            "",
            "AAAA",
            good["signature"][:-4],
            "\0" + good["signature"],
            self.bob.identity.sign(signed),
            self.alice.identity.sign({**signed, "type": "AUTHENTICATE"}),
        ):
            self.assert_refused({**good, "signature": signature}, "INVALID_SIGNATURE", 4006)
        self.assert_refused({**good, "timestamp": good["timestamp"] + 1}, "INVALID_SIGNATURE", 4006)
        socket = self.open_unauthenticated()
        socket.send(good)
        self.assertEqual(socket.receive(), {"type": "AUTH_SUCCESS"})

    def test_not_registered(self) -> None:
        """4007: a valid message without a registration."""
        self.assert_refused(self.carol.authentication(), "NOT_REGISTERED", 4007)

    def test_reports_first_of_several_errors(self) -> None:
        """In the order of DCTRL-0004 10.2."""
        stale = {"timestamp_ms": int(unix_time() * 1000) - 400_000}
        unknown = {"did": OTHER_MEDIATOR, "signing_key_id": "#signing"}
        self.assert_refused({**self.alice.authentication(**stale, **unknown), "nonce": ""}, "INVALID_MESSAGE", 4002)
        self.assert_refused(self.alice.authentication(**stale, **unknown), "TIMESTAMP_OUT_OF_RANGE", 4003)
        self.assert_refused({**self.alice.authentication(**unknown), "signature": ""}, "DID_NOT_FOUND", 4004)
        foreign = self.carol.authentication(signing_key_id="#signing")
        self.assert_refused({**foreign, "signature": ""}, "SIGNING_KEY_NOT_FOUND", 4005)
        self.assert_refused({**self.carol.authentication(), "signature": ""}, "INVALID_SIGNATURE", 4006)

    def test_ignores_messages_after_refusal(self) -> None:
        """Nothing after a refused message is read."""
        socket = self.open_unauthenticated()
        socket.send(self.carol.authentication())
        with contextlib.suppress(OSError):
            socket.send(self.alice.authentication())
        self.assert_authentication_failed(socket, "NOT_REGISTERED", 4007)

    def test_accepts_fragmented_message(self) -> None:
        """A ping between the fragments is answered."""
        socket = self.open_unauthenticated()
        whole = encoding.dumps(self.alice.authentication())
        socket.send_frame(whole[:7], TEXT_OPCODE, final=False)
        socket.send_frame(b"ping", 9)
        socket.send_frame(b"", CONTINUATION, final=False)
        socket.send_frame(whole[7:], CONTINUATION)
        self.assertEqual(socket.receive(), {"type": "AUTH_SUCCESS"})

    def test_message_over_limit_closes_with_1009(self) -> None:
        """It is not read."""
        socket = self.open_unauthenticated()
        with contextlib.suppress(OSError):
            socket.send(b" " * ((1 << 20) + 1))
        heard, end = socket.read_until_close()
        self.assertEqual((heard, end.code), ([], 1009))

    def test_didcomm_path_accepts_no_authentication(self) -> None:
        """A message other than an envelope is refused as in DIDComm."""
        socket = self.open_unauthenticated("/didcomm")
        socket.send(self.alice.authentication())
        self.assertEqual(socket.receive()["body"]["code"], "e.p.msg")


class PushTests(SocketTestCase):
    """What is pushed to authenticated sockets, and what is not."""

    def test_pushes_to_all_sockets(self) -> None:
        """Every socket of a DID gets each event unchanged; the event stays pending until acknowledged."""
        dave = self.register_permitting_alice("dave")
        lines = [self.open_authenticated(dave), self.open_authenticated(dave)]
        payload = 'opaque "\\ é \0 \U0001f600'
        id_ = self.send_event(dave, payload)
        event = {"id": id_, "sender_did": self.alice.did, "payload": payload}
        for socket in lines:
            self.assertEqual(socket.receive(), {"type": "PENDING_EVENTS", "events": [event]})
        self.assertEqual(dave.pending_events(), [{"id": id_, "payload": payload, "sender_did": self.alice.did}])
        lines[0].send({"type": "ACKNOWLEDGE_PENDING_EVENTS", "event_ids": [id_]})
        self.assertEqual(len(dave.pending_events()), 1)
        dave.execute("ACKNOWLEDGE_PENDING_EVENTS", event_ids=[id_])
        self.assertEqual(dave.pending_events(), [])
        lines[0].close()
        second = self.send_event(dave, "second")
        self.assertEqual(lines[1].receive()["events"][0]["id"], second)

    def register_permitting_alice(self, alias: str) -> RawDecentrlClient:
        """A registered identity to which Alice may send."""
        identity = self.register_identity(alias)
        identity.permit_sender(self.alice)
        return identity

    def test_does_not_push_backlog(self) -> None:
        """Clients query pending events first (reference 11)."""
        dave = self.register_permitting_alice("dave")
        self.send_event(dave, "before")
        socket = self.open_authenticated(dave)
        second = self.send_event(dave, "after")
        self.assertEqual([event["id"] for event in socket.receive()["events"]], [second])

    def test_pushes_contract_updates(self) -> None:
        """Requests and responses notify the peer, a saved contract the identity that saves it (DCTRL-0004 10.6)."""
        dave, eve = self.register_identity("dave"), self.register_identity("eve")
        daves, eves = self.open_authenticated(dave), self.open_authenticated(eve)
        contract: dict[str, Any] = {"signed_communication_contract": eve.contract_with(dave)}
        for sender, type_, members, to, heard in (
            (eve, REQUEST, SEALED, dave.did, daves),
            (dave, RESPOND, contract, eve.did, eves),
            (dave, RESPOND, contract, None, eves),
            (dave, SAVE, contract, None, daves),
        ):
            sender.execute(type_, to=to, **members)
            self.assertEqual(heard.receive(), UPDATED)
            self.assert_nothing_pushed(eve if heard is daves else dave, eves if heard is daves else daves)

    def assert_nothing_pushed(self, identity: RawDecentrlClient, socket: RawWebSocket) -> None:
        """Nothing was pushed: an event sent now arrives first."""
        identity.permit_sender(self.alice, timestamp=time.monotonic_ns())
        self.assertEqual(socket.receive(), UPDATED)
        id_ = self.send_event(identity, "silence")
        self.assertEqual([event["id"] for event in socket.receive()["events"]], [id_])

    def test_other_commands_push_nothing(self) -> None:
        """Registrations, queries, acknowledgements, stored and public events, and refused commands."""
        dave = self.register_permitting_alice("dave")
        socket = self.open_authenticated(dave)
        dave.register()
        dave.execute("SAVE_EVENTS", events=[dave.stored_event("mine")])
        dave.execute("QUERY_EVENTS")
        dave.execute("ACKNOWLEDGE_PENDING_EVENTS", event_ids=[])
        dave.publish("news")
        refused: list[Callable[[], int]] = [
            lambda: self.bob.send_event(dave).status,
            lambda: self.alice.request(REQUEST, to=dave.did, **{**SEALED, "encrypted_contract_request": ""}).status,
            lambda: self.alice.request(REQUEST, to=dave.did, **SEALED, extra="x" * (1 << 20)).status,
            lambda: dave.request(SAVE, signed_communication_contract=self.alice.contract_with(self.bob)).status,
            lambda: dave.save_contract(replaced(self.alice.contract_with(dave), ("requestor_signature",), "")).status,
            lambda: self.alice.request(RESPOND, to=dave.did, signed_communication_contract={}).status,
        ]
        self.assertEqual([ask() for ask in refused], [404, 400, 413, 400, 401, 400])
        raw = self.alice.command("once", to=dave.did, channel=PRIVATE_CHANNEL)
        self.assertEqual(self.daemon_client.post_command(raw).status, 200)
        self.assertEqual(socket.receive()["events"][0]["payload"], "once")
        self.assertEqual(self.daemon_client.post_command(raw).status, 401)
        self.assert_nothing_pushed(dave, socket)

    def test_ignores_messages_after_authentication(self) -> None:
        """Even an AUTHENTICATE of another identity."""
        dave, eve = self.register_permitting_alice("dave"), self.register_permitting_alice("eve")
        socket = self.open_authenticated(dave)
        for message in (
            b"hello",
            b"",
            b"[]",
            eve.authentication(),
            dave.authentication(),
            {"type": "PONG", "timestamp": None},
        ):
            socket.send(message)
        socket.send(b"\xff\x00", BINARY)
        socket.send(dave.command({"type": "SAVE_EVENTS", "events": [dave.stored_event("by socket")]}))
        self.send_event(eve, "for eve")
        self.assert_nothing_pushed(dave, socket)
        self.assertEqual(dave.query("EVENTS", "events"), [])

    def test_unread_socket_delays_nobody(self) -> None:
        """It misses pushes; neither senders nor other sockets wait for it (reference 11)."""
        dave = self.register_permitting_alice("dave")
        self.open_authenticated(dave)
        reading_socket = self.open_authenticated(dave)
        for number in range(12):
            self.send_event(dave, f"{number:02}" + "x" * 900_000)
            self.assertEqual(reading_socket.receive()["events"][0]["payload"][:2], f"{number:02}")
        self.assertEqual(
            [event["payload"][:2] for event in dave.pending_events()], [f"{number:02}" for number in range(12)]
        )

    def test_expired_registration_gets_no_pushes(self) -> None:
        """
        No events for the DID, even on open sockets, and no new sockets; after a new registration pushes resume
        (reference 6.5, 11).
        """
        dave = RawDecentrlClient(self.daemon_client, "dave")
        dave.register(expires_at=int(unix_time()) + SETUP_SECONDS)
        dave.permit_sender(self.alice)
        socket = self.open_authenticated(dave)
        id_ = self.send_event(dave, "in time")
        self.assertEqual(socket.receive()["events"][0]["id"], id_)
        self.wait_until_expired(dave)
        before = self.daemon_client.read_rows()
        self.assert_error(self.alice.send_event(dave, "late"), 404, "RECIPIENT_NOT_REGISTERED")
        self.assert_error(self.alice.request(REQUEST, to=dave.did, **SEALED), 404, "RECIPIENT_NOT_REGISTERED")
        contract: dict[str, Any] = {"signed_communication_contract": dave.contract_with(self.alice)}
        self.assert_error(self.alice.request(RESPOND, to=dave.did, **contract), 404, "RECIPIENT_NOT_REGISTERED")
        self.assert_error(dave.request(SAVE, **contract), 401, "UNAUTHORIZED_COMMAND")
        self.assertEqual(self.daemon_client.read_rows(), before)
        late = self.open_unauthenticated()
        late.send(dave.authentication())
        self.assert_authentication_failed(late, "NOT_REGISTERED", 4007)
        dave.register()
        second = self.send_event(dave, "again")
        self.assertEqual([event["id"] for event in socket.receive()["events"]], [second])
        self.assertEqual([one["id"] for one in dave.pending_events()], [id_, second])

    def wait_until_expired(self, identity: RawDecentrlClient) -> None:
        """Poll until the identity is no longer registered."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (response := identity.request("QUERY_PENDING_EVENTS")).status == 200:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(POLL_SECONDS)
        self.assert_error(response, 401, "UNAUTHORIZED_COMMAND")


class EnvelopeTests(SocketTestCase):
    """DIDComm on the same WebSocket path."""

    def setUp(self) -> None:
        super().setUp()
        self.did = self.daemon_client.request("GET", "/did").body.decode()
        self.document = resolve_local(self.did)
        self.wallet = WalletIdentity.generate()

    def ping(self) -> tuple[str, bytes]:
        """Id and envelope of a ping that requests a response."""
        message = compose_message(PING, {"response_requested": True}, to=[self.did], **from_header(self.wallet.did))
        return str(message["id"]), authcrypt(message, self.wallet, self.document)

    def test_first_envelope_selects_didcomm(self) -> None:
        """The socket is then served as on /didcomm, and ignores Decentrl messages (contract section 3)."""
        socket = self.open_unauthenticated()
        for _ in range(2):
            id_, envelope = self.ping()
            self.assertTrue(is_didcomm_envelope(envelope))
            socket.send(envelope)
            self.assertEqual(self.thread_id(socket.receive_raw()), id_)
        socket.send(self.alice.authentication())
        self.assertEqual(socket.receive()["body"]["code"], "e.p.msg")
        id_, envelope = self.ping()
        socket.send(envelope, BINARY)
        self.assertEqual(self.thread_id(socket.receive_raw()), id_)
        self.send_event(self.alice, "not for this socket")
        socket.send(b"", CLOSE_OPCODE)
        self.assertEqual(socket.read_until_close()[0], [])

    def thread_id(self, raw: bytes) -> str | None:
        """Id of the message that this one answers."""
        return unpack_message(raw, self.wallet, resolve_local).message.thid

    def test_ignores_envelope_on_authenticated_socket(self) -> None:
        """As any other message."""
        socket = self.open_authenticated(self.alice)
        socket.send(self.ping()[1])
        id_ = self.send_event(self.alice, "pushed")
        self.assertEqual(socket.receive()["events"][0]["id"], id_)

    def test_sockets_of_both_protocols_are_independent(self) -> None:
        """One socket of each protocol."""
        envelopes, decentrl = self.open_unauthenticated(), self.open_authenticated(self.alice)
        id_, envelope = self.ping()
        envelopes.send(envelope)
        self.send_event(self.alice, "pushed")
        self.assertEqual(self.thread_id(envelopes.receive_raw()), id_)
        self.assertEqual(json.loads(decentrl.receive_raw())["events"][0]["payload"], "pushed")


class IdleSocketTests(SocketTestCase):
    """Sockets that were silent during the other tests."""

    silent_sockets: ClassVar[list[RawWebSocket]]
    authenticated_socket: ClassVar[RawWebSocket]

    @classmethod
    def open_silent_sockets(cls) -> None:
        """Open sockets without a message, with half a message and with an invalid one."""
        cls.silent_sockets = [RawWebSocket(cls.daemon_client) for _ in range(3)]
        cls.silent_sockets[1].send_frame(b"hello?", 9)
        cls.silent_sockets[2].send_frame(encoding.dumps(cls.alice.authentication())[:20], TEXT_OPCODE, final=False)
        cls.authenticated_socket = cls.alice.open_socket()

    def test_closes_unauthenticated_sockets_after_timeout(self) -> None:
        """
        AUTH_TIMEOUT and 4001 for sockets not authenticated within ten seconds; authenticated ones stay (DCTRL-0004
        10.2).
        """
        for socket in self.silent_sockets:
            self.assert_authentication_failed(socket, "AUTH_TIMEOUT", 4001)
        id_ = self.send_event(self.alice, "still there")
        events = [message["events"][0]["id"] for message in self.read_until_event(self.authenticated_socket, id_)]
        self.assertEqual(events[-1], id_)

    def read_until_event(self, socket: RawWebSocket, id_: str) -> Iterator[dict[str, Any]]:
        """Pushes until that of this event."""
        for message in socket.messages():
            if message["type"] == "PENDING_EVENTS":
                yield message
                if message["events"][0]["id"] == id_:
                    break


def setUpModule() -> None:  # noqa: N802  unittest's name
    """One daemon for all tests, so that the ten seconds pass once."""
    SocketTestCase.start_daemon()
    IdleSocketTests.open_silent_sockets()


def tearDownModule() -> None:  # noqa: N802  unittest's name
    """Stop the daemon."""
    IdleSocketTests.authenticated_socket.close()
    SocketTestCase.stop_daemon()
