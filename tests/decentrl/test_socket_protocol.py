"""Decentrl sockets (DCTRL-0004 section 10)."""

from __future__ import annotations

import json
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import StoreUnavailable
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.crypto import sign_json
from tests.in_memory_identities import InMemoryDecentrlSocket, InMemoryIdentity, bad_dids, register_two_identities


class AuthenticationTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory, self.alice, self.bob = register_two_identities(self)

    def refusal_of(self, frame: bytes, *, binary: bool = False) -> tuple[str, int]:
        """Return how a first frame is refused: the error code and the close code."""
        dialogue = InMemoryDecentrlSocket(self.in_memory)
        dialogue.send(frame, binary=binary)
        (outcomes,) = dialogue.take_frames()
        self.assertEqual(set(outcomes), {"type", "code"})
        self.assertEqual(outcomes["type"], "AUTH_FAILED")
        (code,) = dialogue.socket.codes
        return outcomes["code"], code

    def test_success(self) -> None:
        """AUTH_SUCCESS and nothing else; the event log has the identity."""
        self.alice.connect()
        (event,) = self.in_memory.events("conn.auth")
        self.assertEqual(event["proto"], "decentrl")
        self.assertTrue(event["did"].startswith("did:decentrl:"))

    def test_timeout(self) -> None:
        """After ten seconds without authentication the socket is closed; later frames are ignored."""
        dialogue = InMemoryDecentrlSocket(self.in_memory)
        self.in_memory.clock.advance(9.9)
        self.assertEqual(dialogue.take_frames(), [])
        self.in_memory.clock.advance(0.1)
        self.assertEqual(dialogue.take_frames(), [{"type": "AUTH_FAILED", "code": "AUTH_TIMEOUT"}])
        self.assertEqual(dialogue.socket.codes, [4001])
        dialogue.send(self.alice.authentication_frame())
        self.assertEqual(dialogue.take_frames(), [])

    def test_authenticated_socket_stays_open(self) -> None:
        """An authenticated socket is not closed after ten seconds."""
        dialogue = self.alice.connect()
        self.in_memory.clock.advance(11)
        self.assertEqual(dialogue.socket.codes, [])

    def test_invalid_message(self) -> None:
        """Anything but AUTHENTICATE is refused."""
        for frame in (
            b"",
            b"garbage",
            b"[]",
            b"\xff",
            self.alice.authentication_frame(type="PONG"),
            self.alice.authentication_frame(type=None),
            self.alice.authentication_frame(signature=None),
            self.alice.authentication_frame(did=7),
            self.alice.authentication_frame(timestamp="1"),
            self.alice.authentication_frame(timestamp=True),
            self.alice.authentication_frame(nonce="no uuid"),
        ):
            self.assertEqual(self.refusal_of(frame), ("INVALID_MESSAGE", 4002))
        self.assertEqual(self.refusal_of(self.alice.authentication_frame(), binary=True), ("INVALID_MESSAGE", 4002))

    def test_timestamp_out_of_range(self) -> None:
        """The window is that of commands, and checked before the signature."""
        now = int(self.in_memory.clock.seconds() * 1000)
        for off in (-300_001, 300_001):
            frame = self.alice.authentication_frame(timestamp=now + off, signature="AAAA")
            self.assertEqual(self.refusal_of(frame), ("TIMESTAMP_OUT_OF_RANGE", 4003))
        dialogue = InMemoryDecentrlSocket(self.in_memory)
        dialogue.send(self.alice.authentication_frame(timestamp=now - 300_000))
        self.assertEqual(dialogue.take_frames(), [{"type": "AUTH_SUCCESS"}])

    def test_unresolvable_did(self) -> None:
        """A DID that does not resolve."""
        for did in ("did:web:elsewhere.example", "did:decentrl:x", "nobody", *bad_dids(self.alice.did)):
            self.assertEqual(self.refusal_of(self.alice.authentication_frame(did=did)), ("DID_NOT_FOUND", 4004))

    def test_unknown_key(self) -> None:
        """A key that the DID does not have."""
        others = ("#signing", self.alice.did, f"{self.alice.did}#prekey", self.bob.key_id)
        for key_id in (*others, *bad_dids(self.alice.key_id)):
            frame = self.alice.authentication_frame(signing_key_id=key_id)
            self.assertEqual(self.refusal_of(frame), ("SIGNING_KEY_NOT_FOUND", 4005))

    def test_invalid_signature(self) -> None:
        """A signature by another key, of other data, truncated, or none."""
        for change in (
            lambda signed, good: "",
            lambda signed, good: "AAAA",
            lambda signed, good: good[:-4],
            lambda signed, good: "\0" + good,
            lambda signed, good: sign_json(signed, self.bob.seed),
            lambda signed, good: sign_json({**signed, "type": "AUTHENTICATE"}, self.alice.seed),
            lambda signed, good: sign_json({**signed, "timestamp": signed["timestamp"] + 1}, self.alice.seed),
        ):
            members = json.loads(self.alice.authentication_frame())
            signed = {name: members[name] for name in ("did", "signing_key_id", "timestamp", "nonce")}
            frame = encoding.dumps({**members, "signature": change(signed, members["signature"])})
            self.assertEqual(self.refusal_of(frame), ("INVALID_SIGNATURE", 4006))

    def test_not_registered(self) -> None:
        """A valid signature of an identity that is not registered, or no longer."""
        carol = InMemoryIdentity(self.in_memory, "carol")
        self.assertEqual(self.refusal_of(carol.authentication_frame()), ("NOT_REGISTERED", 4007))
        carol.register(expires_at=int(self.in_memory.clock.seconds()) + 5)
        self.in_memory.clock.advance(5)
        self.assertEqual(self.refusal_of(carol.authentication_frame()), ("NOT_REGISTERED", 4007))

    def test_frame_is_accepted_once(self) -> None:
        """A captured frame opens no second socket within the window."""
        frame = self.alice.authentication_frame()
        first = InMemoryDecentrlSocket(self.in_memory)
        first.send(frame)
        self.assertEqual(self.refusal_of(frame), ("INVALID_MESSAGE", 4002))
        first.disconnect()
        self.in_memory.clock.advance(300)
        self.assertEqual(self.refusal_of(frame), ("INVALID_MESSAGE", 4002))

    def test_nonce_is_accepted_once(self) -> None:
        """Another frame with a used nonce is refused."""
        frame = self.alice.authentication_frame()
        InMemoryDecentrlSocket(self.in_memory).send(frame)
        self.in_memory.clock.advance(1)
        other = self.authentication_with(json.loads(frame)["nonce"])
        self.assertNotEqual(other, frame)
        self.assertEqual(self.refusal_of(other), ("INVALID_MESSAGE", 4002))

    def test_nonces_of_commands_are_separate(self) -> None:
        """Commands and sockets may use the same nonce."""
        nonce = json.loads(self.alice.authentication_frame())["nonce"]
        self.in_memory.receive_command(self.alice.command({"type": "QUERY_EVENTS"}, nonce=nonce))
        dialogue = InMemoryDecentrlSocket(self.in_memory)
        dialogue.send(self.authentication_with(nonce))
        self.assertEqual(dialogue.take_frames(), [{"type": "AUTH_SUCCESS"}])

    def authentication_with(self, nonce: str) -> bytes:
        members: dict[str, Any] = json.loads(self.alice.authentication_frame())
        signable = {name: members[name] for name in ("did", "signing_key_id", "timestamp")} | {"nonce": nonce}
        return encoding.dumps({"type": "AUTHENTICATE", **signable, "signature": sign_json(signable, self.alice.seed)})

    def test_store_unavailable(self) -> None:
        """A temporary failure is reported as such."""
        with self.in_memory.failing("check_guard", StoreUnavailable()):
            self.assertEqual(self.refusal_of(self.alice.authentication_frame()), ("UNAVAILABLE", 1013))

    def test_internal_error(self) -> None:
        """An internal error is reported without details."""
        with self.in_memory.failing("check_guard", RuntimeError("details")):
            self.assertEqual(self.refusal_of(self.alice.authentication_frame()), ("INTERNAL_ERROR", 1011))
        self.assertEqual(len(self.flushLoggedErrors()), 1)

    def test_failures_are_rate_limited(self) -> None:
        """An address that fails too often is refused for a while."""
        in_memory, alice, bob = register_two_identities(self, limits={"ip_per_minute": 4, "account_per_minute": 4})
        self.in_memory = in_memory
        codes = [self.refusal_of(alice.authentication_frame(signature="AAAA"))[0] for _ in range(9)]
        self.assertEqual(codes[0], "INVALID_SIGNATURE")
        self.assertEqual(codes[-1], "RATE_LIMITED")
        (limited,) = {code for _, code in [self.refusal_of(bob.authentication_frame())]}
        self.assertEqual(limited, 1013)

    def test_sockets_are_limited_by_identity(self) -> None:
        """An identity may open as many sockets in a minute as it may send commands; other identities may go on."""
        self.in_memory, alice, bob = register_two_identities(self, limits={"account_per_minute": 3})
        self.in_memory.clock.advance(60)
        for _ in range(3):
            alice.connect()
        self.assertEqual(self.refusal_of(alice.authentication_frame()), ("RATE_LIMITED", 1013))
        bob.connect()


class KeepaliveTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory, self.alice, _ = register_two_identities(self)

    def test_pings(self) -> None:
        """Every 30 seconds, with the time in milliseconds, while the socket is open."""
        dialogue = self.alice.connect()
        self.in_memory.clock.advance(29.9)
        self.assertEqual(dialogue.take_frames(), [])
        for _ in range(3):
            self.in_memory.clock.advance(0.1)
            ping = {"type": "PING", "timestamp": int(self.in_memory.clock.seconds() * 1000)}
            self.assertEqual(dialogue.take_frames(), [ping])
            self.in_memory.clock.advance(29.9)
        dialogue.disconnect()
        self.in_memory.clock.advance(100)
        self.assertEqual(dialogue.take_frames(), [])

    def test_ignores_other_frames(self) -> None:
        """PONG, a second AUTHENTICATE and invalid frames are ignored."""
        dialogue = self.alice.connect()
        for frame in (b'{"type":"PONG","timestamp":1}', self.alice.authentication_frame(), b"garbage"):
            dialogue.send(frame)
        dialogue.send(b"\0", binary=True)
        self.assertEqual((dialogue.take_frames(), dialogue.socket.codes), ([], []))

    def test_no_timer_remains(self) -> None:
        """A closed socket leaves no timer."""
        before = len(self.in_memory.clock.getDelayedCalls())
        InMemoryDecentrlSocket(self.in_memory).disconnect()
        self.alice.connect().disconnect()
        failed = InMemoryDecentrlSocket(self.in_memory)
        failed.send(b"garbage")
        failed.disconnect()
        self.assertEqual(len(self.in_memory.clock.getDelayedCalls()), before)
