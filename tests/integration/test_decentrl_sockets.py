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
from tests.integration.refusal_test_case import ELSEWHERE, REQUEST, RESPOND, SAVE, SEALED, RefusalTestCase
from tests.protocol.decentrl.mutations import nested, replaced, spelled, without

BINARY, CONTINUATION = 2, 0
NONCE = "6f1c1d52-6a0b-4e0e-9a37-0d6f3a1b2c{:02x}"
# What a registration, a contract, a socket and an event take together, on a machine with other things to do.
IN_TIME_SECONDS = 20
# Asked this often whether a registration has expired at last.
ASK_SECONDS = 0.05
UPDATED = {"type": "CONTRACTS_UPDATED"}


class SocketTestCase(RefusalTestCase):
    """Alice and Bob, who may write to each other; Carol, who is not registered."""

    alice: ClassVar[RawDecentrlClient]
    bob: ClassVar[RawDecentrlClient]
    carol: ClassVar[RawDecentrlClient]

    @classmethod
    def start(cls, settings: Mapping[str, Any] | None = None) -> None:
        """Have a daemon where these three are."""
        super().start(settings)
        cls.alice, cls.bob, cls.carol = (
            RawDecentrlClient(cls.daemon_client, alias) for alias in ("alice", "bob", "carol")
        )
        for one in (cls.alice, cls.bob):
            one.register()
        cls.alice.befriend(cls.bob)
        cls.bob.befriend(cls.alice)

    def setUp(self) -> None:
        super().setUp()
        # Keeps the idle socket open: nobody reads it, so it answers no pings.
        IdleSocketTests.hearing.say(b"", PONG_OPCODE)

    def line(self, path: str = "/ws") -> RawWebSocket:
        """A socket on which nothing has been said."""
        line = RawWebSocket(self.daemon_client, path)
        self.addCleanup(line.close)
        return line

    def socket_of(self, resident: RawDecentrlClient) -> RawWebSocket:
        """One that is authenticated."""
        line = resident.socket()
        self.addCleanup(line.close)
        return line

    def tell(self, recipient: RawDecentrlClient, payload: str) -> str:
        """Have the other of the two write to this one; the id of the event."""
        sender = self.alice if recipient is not self.alice else self.bob
        answered = sender.tell(recipient, payload)
        self.assertEqual(answered.status, 200, answered.body)
        return str(answered.json["pendingEventId"])


class AuthenticationTests(SocketTestCase):
    """How a first message is refused, with nothing kept of it."""

    def is_refused(  # type: ignore[override]  # what is refused here is no command
        self, message: Mapping[str, Any] | bytes, code: str, close: int, opcode: int = TEXT_OPCODE
    ) -> None:
        """A socket on which this is said first ends so."""
        before = self.daemon_client.kept()
        line = self.line()
        line.say(message, opcode)
        self.is_told(line, code, close)
        self.assertEqual(self.daemon_client.kept(), before)

    def test_invalid_message(self) -> None:
        """4002: anything but a well-formed AUTHENTICATE in a text frame."""
        good = self.alice.greeting()
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
            spelled({**good, "unknown": "\ud800"}),
            spelled({**good, "unknown": nested(70)}),
            spelled(replaced(good, ("timestamp",), 10**400)),
            spelled(good).replace(b'"did"', b'"did":"x","did"'),
            self.alice.command({"type": "QUERY_EVENTS"}),
            *(without(good, (name,)) for name in good),
        ):
            self.is_refused(message, "INVALID_MESSAGE", 4002)
        self.is_refused(good, "INVALID_MESSAGE", 4002, BINARY)
        self.socket_of(self.alice)

    def test_a_message_that_was_used(self) -> None:
        """4002: the very same message again, on another socket, while the first one is open and when it is gone."""
        greeting = self.alice.greeting()
        first = self.line()
        first.say(greeting)
        self.assertEqual(first.hear(), {"type": "AUTH_SUCCESS"})
        self.is_refused(greeting, "INVALID_MESSAGE", 4002)
        first.close()
        self.is_refused(greeting, "INVALID_MESSAGE", 4002)
        self.is_refused(self.alice.greeting(nonce=greeting["nonce"]), "INVALID_MESSAGE", 4002)

    def test_nonces_of_commands_are_others(self) -> None:
        """A nonce that a command has used is good for a socket, and the other way round."""
        nonce = NONCE.format(0)
        query = partial(self.alice.command, {"type": "QUERY_EVENTS"})
        self.assertEqual(self.daemon_client.command(query(nonce=nonce)).status, 200)
        line = self.line()
        line.say(self.alice.greeting(nonce=nonce))
        self.assertEqual(line.hear(), {"type": "AUTH_SUCCESS"})
        other = self.line()
        other.say(self.alice.greeting(nonce=NONCE.format(1)))
        self.assertEqual(other.hear(), {"type": "AUTH_SUCCESS"})
        self.assertEqual(self.daemon_client.command(query(nonce=NONCE.format(1))).status, 200)

    def test_timestamp_out_of_range(self) -> None:
        """4003: more than five minutes ago or ahead, also of when it arrives."""
        for off in (-301_000, 360_000, -(10**13), 10**13):
            message = self.alice.greeting(timestamp_ms=int(unix_time() * 1000) + off)
            self.is_refused(message, "TIMESTAMP_OUT_OF_RANGE", 4003)
        for off in (-240_000, 290_000):
            line = self.line()
            line.say(self.alice.greeting(timestamp_ms=int(unix_time() * 1000) + off))
            self.assertEqual(line.hear(), {"type": "AUTH_SUCCESS"})

    def test_did_not_found(self) -> None:
        """4004: a DID that does not resolve here."""
        for did in (ELSEWHERE, "did:decentrl:x", "did:key:z6MkhaXg", "nobody", "did:x: y", "did:x:é", "d" * 2049):
            message = self.alice.greeting(did=did, signing_key_id=f"{did}#signing")
            self.is_refused(message, "DID_NOT_FOUND", 4004)

    def test_signing_key_not_found(self) -> None:
        """4005: anything but the full id of its signing key."""
        alice = self.alice
        for key_id in ("#signing", alice.did, f"{alice.did}#prekey", self.bob.identity.signing_key_id):
            self.is_refused(alice.greeting(signing_key_id=key_id), "SIGNING_KEY_NOT_FOUND", 4005)

    def test_invalid_signature(self) -> None:
        """4006: somebody else's, of something else, of more than is to be signed, or none at all."""
        good = self.alice.greeting()
        signed = {name: good[name] for name in ("did", "signing_key_id", "timestamp", "nonce")}
        for signature in (
            "",
            "AAAA",
            good["signature"][:-4],
            "\0" + good["signature"],
            self.bob.identity.sign(signed),
            self.alice.identity.sign({**signed, "type": "AUTHENTICATE"}),
        ):
            self.is_refused({**good, "signature": signature}, "INVALID_SIGNATURE", 4006)
        self.is_refused({**good, "timestamp": good["timestamp"] + 1}, "INVALID_SIGNATURE", 4006)
        line = self.line()
        line.say(good)
        self.assertEqual(line.hear(), {"type": "AUTH_SUCCESS"})

    def test_not_registered(self) -> None:
        """4007: everything is right, but there is no registration."""
        self.is_refused(self.carol.greeting(), "NOT_REGISTERED", 4007)

    def test_order(self) -> None:
        """Of several reasons the first one of DCTRL-0004 10.2 is told."""
        stale = {"timestamp_ms": int(unix_time() * 1000) - 400_000}
        unknown = {"did": ELSEWHERE, "signing_key_id": "#signing"}
        self.is_refused({**self.alice.greeting(**stale, **unknown), "nonce": ""}, "INVALID_MESSAGE", 4002)
        self.is_refused(self.alice.greeting(**stale, **unknown), "TIMESTAMP_OUT_OF_RANGE", 4003)
        self.is_refused({**self.alice.greeting(**unknown), "signature": ""}, "DID_NOT_FOUND", 4004)
        foreign = self.carol.greeting(signing_key_id="#signing")
        self.is_refused({**foreign, "signature": ""}, "SIGNING_KEY_NOT_FOUND", 4005)
        self.is_refused({**self.carol.greeting(), "signature": ""}, "INVALID_SIGNATURE", 4006)

    def test_what_follows_a_refusal(self) -> None:
        """Nothing that comes behind a message that is refused is heard."""
        line = self.line()
        line.say(self.carol.greeting())
        with contextlib.suppress(OSError):
            line.say(self.alice.greeting())
        self.is_told(line, "NOT_REGISTERED", 4007)

    def test_in_pieces(self) -> None:
        """A message in several frames is one message, and a ping between them is answered."""
        line = self.line()
        whole = encoding.dumps(self.alice.greeting())
        line.say_part(whole[:7], TEXT_OPCODE, final=False)
        line.say_part(b"ping", 9)
        line.say_part(b"", CONTINUATION, final=False)
        line.say_part(whole[7:], CONTINUATION)
        self.assertEqual(line.hear(), {"type": "AUTH_SUCCESS"})

    def test_too_large(self) -> None:
        """1009 for a message over the limit, unread, whatever it was to be."""
        line = self.line()
        with contextlib.suppress(OSError):
            line.say(b" " * ((1 << 20) + 1))
        heard, end = line.rest()
        self.assertEqual((heard, end.code), ([], 1009))

    def test_another_address(self) -> None:
        """At /didcomm nobody authenticates: what is no envelope is refused as DIDComm does."""
        line = self.line("/didcomm")
        line.say(self.alice.greeting())
        self.assertEqual(line.hear()["body"]["code"], "e.p.msg")


class PushTests(SocketTestCase):
    """What authenticated sockets are told, and what they are not."""

    def test_all_sockets(self) -> None:
        """Every socket of a DID gets what comes for it, as it came, and the event waits until it is acknowledged."""
        dave = self.a_friend("dave")
        lines = [self.socket_of(dave), self.socket_of(dave)]
        payload = 'opaque "\\ é \0 \U0001f600'
        id_ = self.tell(dave, payload)
        event = {"id": id_, "sender_did": self.alice.did, "payload": payload}
        for line in lines:
            self.assertEqual(line.hear(), {"type": "PENDING_EVENTS", "events": [event]})
        self.assertEqual(dave.pending(), [{"id": id_, "payload": payload, "sender_did": self.alice.did}])
        lines[0].say({"type": "ACKNOWLEDGE_PENDING_EVENTS", "event_ids": [id_]})
        self.assertEqual(len(dave.pending()), 1)
        dave.get("ACKNOWLEDGE_PENDING_EVENTS", event_ids=[id_])
        self.assertEqual(dave.pending(), [])
        lines[0].close()
        second = self.tell(dave, "second")
        self.assertEqual(lines[1].hear()["events"][0]["id"], second)

    def a_friend(self, alias: str) -> RawDecentrlClient:
        """Somebody registered whom Alice may write to."""
        one = self.new_identity(alias)
        one.befriend(self.alice)
        return one

    def test_no_backlog(self) -> None:
        """What came before is not pushed: clients query first (reference 11)."""
        dave = self.a_friend("dave")
        self.tell(dave, "before")
        line = self.socket_of(dave)
        second = self.tell(dave, "after")
        self.assertEqual([event["id"] for event in line.hear()["events"]], [second])

    def test_contracts_updated(self) -> None:
        """A request and a response tell the other side, a saved contract the one who saves (DCTRL-0004 10.6)."""
        dave, eve = self.new_identity("dave"), self.new_identity("eve")
        daves, eves = self.socket_of(dave), self.socket_of(eve)
        contract: dict[str, Any] = {"signed_communication_contract": eve.contract_with(dave)}
        for sender, type_, members, to, heard in (
            (eve, REQUEST, SEALED, dave.did, daves),
            (dave, RESPOND, contract, eve.did, eves),
            (dave, RESPOND, contract, None, eves),
            (dave, SAVE, contract, None, daves),
        ):
            sender.get(type_, to=to, **members)
            self.assertEqual(heard.hear(), UPDATED)
            self.assert_silent(eve if heard is daves else dave, eves if heard is daves else daves)

    def assert_silent(self, resident: RawDecentrlClient, line: RawWebSocket) -> None:
        """Nothing has come: what is caused now is what comes first."""
        resident.befriend(self.alice, timestamp=time.monotonic_ns())
        self.assertEqual(line.hear(), UPDATED)
        id_ = self.tell(resident, "silence")
        self.assertEqual([event["id"] for event in line.hear()["events"]], [id_])

    def test_what_pushes_nothing(self) -> None:
        """Registrations, queries, acknowledgements, stored and public events, and whatever is refused."""
        dave = self.a_friend("dave")
        line = self.socket_of(dave)
        dave.register()
        dave.get("SAVE_EVENTS", events=[dave.event("mine")])
        dave.get("QUERY_EVENTS")
        dave.get("ACKNOWLEDGE_PENDING_EVENTS", event_ids=[])
        dave.publish("news")
        refused: list[Callable[[], int]] = [
            lambda: self.bob.tell(dave).status,
            lambda: self.alice.ask(REQUEST, to=dave.did, **{**SEALED, "encrypted_contract_request": ""}).status,
            lambda: self.alice.ask(REQUEST, to=dave.did, **SEALED, extra="x" * (1 << 20)).status,
            lambda: dave.ask(SAVE, signed_communication_contract=self.alice.contract_with(self.bob)).status,
            lambda: dave.save(replaced(self.alice.contract_with(dave), ("requestor_signature",), "")).status,
            lambda: self.alice.ask(RESPOND, to=dave.did, signed_communication_contract={}).status,
        ]
        self.assertEqual([ask() for ask in refused], [404, 400, 413, 400, 401, 400])
        raw = self.alice.command("once", to=dave.did, channel=PRIVATE_CHANNEL)
        self.assertEqual(self.daemon_client.command(raw).status, 200)
        self.assertEqual(line.hear()["events"][0]["payload"], "once")
        self.assertEqual(self.daemon_client.command(raw).status, 401)
        self.assert_silent(dave, line)

    def test_chatter(self) -> None:
        """Whatever an authenticated socket says is ignored; so is an AUTHENTICATE for somebody else."""
        dave, eve = self.a_friend("dave"), self.a_friend("eve")
        line = self.socket_of(dave)
        for message in (b"hello", b"", b"[]", eve.greeting(), dave.greeting(), {"type": "PONG", "timestamp": None}):
            line.say(message)
        line.say(b"\xff\x00", BINARY)
        line.say(dave.command({"type": "SAVE_EVENTS", "events": [dave.event("by socket")]}))
        self.tell(eve, "for eve")
        self.assert_silent(dave, line)
        self.assertEqual(dave.items("EVENTS", "events"), [])

    def test_a_socket_that_does_not_read(self) -> None:
        """It misses pushes, and nobody waits for it: not the sender, not another socket (reference 11)."""
        dave = self.a_friend("dave")
        self.socket_of(dave)
        hearing = self.socket_of(dave)
        for number in range(12):
            self.tell(dave, f"{number:02}" + "x" * 900_000)
            self.assertEqual(hearing.hear()["events"][0]["payload"][:2], f"{number:02}")
        self.assertEqual([one["payload"][:2] for one in dave.pending()], [f"{number:02}" for number in range(12)])

    def test_a_registration_that_expires(self) -> None:
        """
        From then on nothing comes for the DID, on a socket that was open before either, and no new one is accepted;
        a new registration is enough for pushes to go on (reference 6.5, 11).
        """
        dave = RawDecentrlClient(self.daemon_client, "dave")
        dave.register(expires_at=int(unix_time()) + IN_TIME_SECONDS)
        dave.befriend(self.alice)
        line = self.socket_of(dave)
        id_ = self.tell(dave, "in time")
        self.assertEqual(line.hear()["events"][0]["id"], id_)
        self.wait_for_the_end(dave)
        before = self.daemon_client.kept()
        self.is_error(self.alice.tell(dave, "late"), 404, "RECIPIENT_NOT_REGISTERED")
        self.is_error(self.alice.ask(REQUEST, to=dave.did, **SEALED), 404, "RECIPIENT_NOT_REGISTERED")
        contract: dict[str, Any] = {"signed_communication_contract": dave.contract_with(self.alice)}
        self.is_error(self.alice.ask(RESPOND, to=dave.did, **contract), 404, "RECIPIENT_NOT_REGISTERED")
        self.is_error(dave.ask(SAVE, **contract), 401, "UNAUTHORIZED_COMMAND")
        self.assertEqual(self.daemon_client.kept(), before)
        late = self.line()
        late.say(dave.greeting())
        self.is_told(late, "NOT_REGISTERED", 4007)
        dave.register()
        second = self.tell(dave, "again")
        self.assertEqual([event["id"] for event in line.hear()["events"]], [second])
        self.assertEqual([one["id"] for one in dave.pending()], [id_, second])

    def wait_for_the_end(self, resident: RawDecentrlClient) -> None:
        """Ask until it is not registered any more."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (answered := resident.ask("QUERY_PENDING_EVENTS")).status == 200:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(ASK_SECONDS)
        self.is_error(answered, 401, "UNAUTHORIZED_COMMAND")


class EnvelopeTests(SocketTestCase):
    """A socket on the same address that speaks DIDComm."""

    def setUp(self) -> None:
        super().setUp()
        self.did = self.daemon_client.ask("GET", "/did").body.decode()
        self.document = resolve_local(self.did)
        self.wallet = WalletIdentity.generate()

    def ping(self) -> tuple[str, bytes]:
        """A ping that asks for an answer; its id, and the envelope."""
        message = compose_message(PING, {"response_requested": True}, to=[self.did], **from_header(self.wallet.did))
        return str(message["id"]), authcrypt(message, self.wallet, self.document)

    def test_an_envelope_first(self) -> None:
        """It is served as on /didcomm from then on, and Decentrl is not heard any more (contract section 3)."""
        line = self.line()
        for _ in range(2):
            id_, envelope = self.ping()
            self.assertTrue(is_didcomm_envelope(envelope))
            line.say(envelope)
            self.assertEqual(self.thread_of(line.hear_raw()), id_)
        line.say(self.alice.greeting())
        self.assertEqual(line.hear()["body"]["code"], "e.p.msg")
        id_, envelope = self.ping()
        line.say(envelope, BINARY)
        self.assertEqual(self.thread_of(line.hear_raw()), id_)
        self.tell(self.alice, "not for this socket")
        line.say(b"", CLOSE_OPCODE)
        self.assertEqual(line.rest()[0], [])

    def thread_of(self, raw: bytes) -> str | None:
        """Which message this answers."""
        return unpack_message(raw, self.wallet, resolve_local).message.thid

    def test_an_envelope_later(self) -> None:
        """On a socket that has authenticated an envelope is as much chatter as anything else."""
        line = self.socket_of(self.alice)
        line.say(self.ping()[1])
        id_ = self.tell(self.alice, "pushed")
        self.assertEqual(line.hear()["events"][0]["id"], id_)

    def test_both_at_once(self) -> None:
        """Sockets of the two kinds do not know of each other."""
        envelopes, decentrl = self.line(), self.socket_of(self.alice)
        id_, envelope = self.ping()
        envelopes.say(envelope)
        self.tell(self.alice, "pushed")
        self.assertEqual(self.thread_of(envelopes.hear_raw()), id_)
        self.assertEqual(json.loads(decentrl.hear_raw())["events"][0]["payload"], "pushed")


class IdleSocketTests(SocketTestCase):
    """Who has said nothing while everything else in here happened."""

    silent: ClassVar[list[RawWebSocket]]
    hearing: ClassVar[RawWebSocket]

    @classmethod
    def fall_silent(cls) -> None:
        """Open sockets, and say nothing, half a message or something that is no message."""
        cls.silent = [RawWebSocket(cls.daemon_client) for _ in range(3)]
        cls.silent[1].say_part(b"hello?", 9)
        cls.silent[2].say_part(encoding.dumps(cls.alice.greeting())[:20], TEXT_OPCODE, final=False)
        cls.hearing = cls.alice.socket()

    def test_auth_timeout(self) -> None:
        """
        AUTH_TIMEOUT and 4001 for each that has not authenticated within ten seconds; who has stays (DCTRL-0004 10.2).
        """
        for line in self.silent:
            self.is_told(line, "AUTH_TIMEOUT", 4001)
        id_ = self.tell(self.alice, "still there")
        events = [message["events"][0]["id"] for message in self.until(self.hearing, id_)]
        self.assertEqual(events[-1], id_)

    def until(self, line: RawWebSocket, id_: str) -> Iterator[dict[str, Any]]:
        """Pushes up to that of this event."""
        for message in line.messages():
            if message["type"] == "PENDING_EVENTS":
                yield message
                if message["events"][0]["id"] == id_:
                    break


def setUpModule() -> None:  # noqa: N802  unittest's name
    """One daemon for all, and ten seconds that pass only once."""
    SocketTestCase.start()
    IdleSocketTests.fall_silent()


def tearDownModule() -> None:  # noqa: N802  unittest's name
    """Its end."""
    IdleSocketTests.hearing.close()
    SocketTestCase.finish()
