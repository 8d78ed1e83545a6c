"""Timestamps, nonces, and the order of checks of a command (DCTRL-0004 section 5, reference 6.1)."""

from __future__ import annotations

import json
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import StoreUnavailable
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.crypto import sign_event, sign_json
from tests.in_memory_identities import PRIVATE, PUBLIC, InMemoryIdentity, bad_dids, code_of, register_two_identities
from tests.in_memory_mediator import PEER
from tests.protocol.decentrl.mutations import replaced, to_json

NONCE = "6F1C1D52-6a0b-1e0e-9a37-0d6f3a1b2c3d"
ELSEWHERE = "198.51.100.7"


class TimeTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory, self.alice, self.bob = register_two_identities(self)
        self.now = int(self.in_memory.clock.seconds() * 1000)

    def query_at(self, timestamp: Any) -> bytes:
        return self.alice.command({"type": "QUERY_EVENTS"}, timestamp=timestamp)

    def test_window(self) -> None:
        """Five minutes in either direction, inclusive."""
        for off in (-300_000, 300_000, 299_999.5):
            self.assertEqual(self.in_memory.receive_command(self.query_at(self.now + off)).status, 200)
        for off in (-300_001, 300_001, 300_000.5, 10**15, -(10**300)):
            self.assertEqual(
                code_of(self.in_memory.receive_command(self.query_at(self.now + off))),
                (401, "TIMESTAMP_OUT_OF_RANGE"),
            )
        self.assertEqual(
            {event["code"] for event in self.in_memory.events("replay.drop")}, {"TIMESTAMP_OUT_OF_RANGE"}
        )

    def test_window_is_configurable(self) -> None:
        """The window is a setting."""
        in_memory, alice, _ = register_two_identities(self, decentrl={"timestamp_window": "10s"})
        late = alice.command({"type": "QUERY_EVENTS"}, timestamp=self.now - 10_001)
        self.assertEqual(code_of(in_memory.receive_command(late)), (401, "TIMESTAMP_OUT_OF_RANGE"))

    def test_refused_timestamp_keeps_nonce(self) -> None:
        """A command outside the window leaves its nonce unused."""
        payload = {"type": "QUERY_EVENTS"}
        self.in_memory.receive_command(self.alice.command(payload, nonce=NONCE, timestamp=self.now - 300_001))
        self.assertEqual(self.in_memory.receive_command(self.alice.command(payload, nonce=NONCE)).status, 200)

    def test_timestamp_in_future(self) -> None:
        """A command dated ahead cannot be repeated while it is within the window (reference 6.1)."""
        command = self.query_at(self.now + 300_000)
        self.assertEqual(self.in_memory.receive_command(command).status, 200)
        for seconds in (299, 1, 299.75, 0.25):
            self.in_memory.clock.advance(seconds)
            self.successResultOf(self.in_memory.store.prune_nonces())
            self.assertEqual(code_of(self.in_memory.receive_command(command, ELSEWHERE)), (401, "DUPLICATE_NONCE"))
        self.in_memory.clock.advance(0.001)
        self.assertEqual(code_of(self.in_memory.receive_command(command)), (401, "TIMESTAMP_OUT_OF_RANGE"))


class NonceTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory, self.alice, self.bob = register_two_identities(self)
        self.bob.save_contract_with(self.alice)
        self.carol = InMemoryIdentity(self.in_memory, "carol")

    def query(self, new_identity: InMemoryIdentity | None = None, **changes: Any) -> bytes:
        return (new_identity or self.alice).command({"type": "QUERY_EVENTS"}, nonce=NONCE, **changes)

    def uses_nonce(self, command: bytes) -> bool:
        """Whether this command of Alice's uses its nonce."""
        self.in_memory.receive_command(command, ELSEWHERE)
        reply = self.in_memory.receive_command(self.query())
        return reply.status == 401 and code_of(reply)[1] == "DUPLICATE_NONCE"

    def test_nonce_is_used_once(self) -> None:
        """The same command, and any other with its nonce, is refused."""
        command = self.alice.command("hello", to=self.bob.did, channel=PRIVATE, nonce=NONCE)
        self.assertEqual(self.in_memory.receive_command(command).status, 200)
        self.assertEqual(code_of(self.in_memory.receive_command(command)), (401, "DUPLICATE_NONCE"))
        self.assertEqual(code_of(self.in_memory.receive_command(self.query())), (401, "DUPLICATE_NONCE"))
        self.assertEqual(len(self.bob.pending()), 1)
        self.assertEqual([event["code"] for event in self.in_memory.events("replay.drop")], ["DUPLICATE_NONCE"] * 2)

    def test_nonces_are_per_sender(self) -> None:
        """Another sender may use the same nonce; nonces are compared as spelled."""
        self.assertEqual(self.in_memory.receive_command(self.query()).status, 200)
        elise = InMemoryIdentity(self.in_memory, "elise")
        elise.register()
        self.assertEqual(len(elise.did), len(self.alice.did))
        for sender in (elise, self.bob):
            self.assertEqual(self.in_memory.receive_command(self.query(sender)).status, 200)
        other = self.alice.command({"type": "QUERY_EVENTS"}, nonce=NONCE.lower())
        self.assertEqual(self.in_memory.receive_command(other).status, 200)

    def test_nonce_is_forgotten(self) -> None:
        """Once its command is outside the window the nonce may be used again."""
        self.assertEqual(self.in_memory.receive_command(self.query()).status, 200)
        self.in_memory.clock.advance(302)
        self.assertEqual(self.in_memory.receive_command(self.query()).status, 200)

    def test_schema_error_keeps_nonce(self) -> None:
        """An invalid command leaves its nonce unused."""
        for payload in ({"type": "UNKNOWN"}, {"type": "QUERY_EVENTS", "pagination": {"page": -1}}, 7, "text"):
            wrong = {**json.loads(self.query()), "payload": payload}
            self.assertFalse(self.uses_nonce(encoding.dumps(wrong)))
            self.in_memory.clock.advance(302)

    def test_store_failure_keeps_nonce(self) -> None:
        """A command that could not be stored may be repeated."""
        command = self.alice.command("hello", to=self.bob.did, channel=PRIVATE, nonce=NONCE)
        with self.in_memory.failing("enqueue_event", StoreUnavailable()):
            reply = self.in_memory.receive_command(command)
        self.assertEqual((code_of(reply), reply.retry_after), ((503, "UNAVAILABLE"), 5))
        self.assertEqual(self.in_memory.receive_command(command).status, 200)

    def test_rate_limit_keeps_nonce(self) -> None:
        """A rate limited command may be repeated."""
        in_memory, alice, bob = register_two_identities(self, limits={"did_per_minute": 2})
        bob.save_contract_with(alice)
        for _ in range(2):
            alice.send_event(bob)  # the first minute already has one registration
        command = alice.command("late", to=bob.did, channel=PRIVATE)
        reply = in_memory.receive_command(command)
        self.assertEqual(code_of(reply), (429, "RATE_LIMITED"))
        in_memory.clock.advance(61)
        self.assertEqual(in_memory.receive_command(command).status, 200)

    def test_later_refusals_use_nonce(self) -> None:
        """Unknown key, wrong signature, wrong addressee, unknown recipient, no contract: each uses the nonce."""
        for make in (
            lambda: encoding.dumps({**json.loads(self.query()), "payload": {"type": "QUERY_EVENTS", "extra": 1}}),
            lambda: encoding.dumps({**json.loads(self.query()), "signature": "AAAA"}),
            lambda: self.query(sender_signing_key_id=f"{self.alice.did}#prekey"),
            lambda: self.query(to=self.bob.did),
            lambda: self.alice.command("x", to="did:web:x", channel=PRIVATE, nonce=NONCE),
            lambda: self.alice.command("x", to=self.carol.did, channel=PRIVATE, nonce=NONCE),
            lambda: self.alice.command(self.contract_of_others(), nonce=NONCE),
        ):
            self.assertTrue(self.uses_nonce(make()))
            self.in_memory.clock.advance(302)

    def contract_of_others(self) -> dict[str, Any]:
        signed = self.bob.contract_with(self.carol)
        return {"type": "SAVE_COMMUNICATION_CONTRACT", "signed_communication_contract": signed}

    def test_order_of_checks(self) -> None:
        """Of several reasons to refuse, the first in the standard is reported."""
        self.in_memory.receive_command(self.query())
        now = int(self.in_memory.clock.seconds() * 1000)
        stale = self.query(timestamp=now - 400_000)
        self.assertEqual(code_of(self.in_memory.receive_command(stale)), (401, "TIMESTAMP_OUT_OF_RANGE"))
        forged = encoding.dumps({**json.loads(self.query()), "signature": "AAAA"})
        self.assertEqual(code_of(self.in_memory.receive_command(forged)), (401, "DUPLICATE_NONCE"))
        unknown_key = self.query(sender_signing_key_id="#signing")
        self.assertEqual(code_of(self.in_memory.receive_command(unknown_key)), (401, "DUPLICATE_NONCE"))
        elsewhere = self.query(to=self.bob.did)
        self.assertEqual(code_of(self.in_memory.receive_command(elsewhere)), (401, "DUPLICATE_NONCE"))
        stranger = self.carol.command(
            {"type": "SAVE_COMMUNICATION_CONTRACT", "signed_communication_contract": self.unsigned()}
        )
        self.assertEqual(code_of(self.in_memory.receive_command(stranger)), (401, "UNAUTHORIZED_COMMAND"))

    def unsigned(self) -> dict[str, Any]:
        return {**self.carol.contract_with(self.bob), "requestor_signature": "AAAA"}

    def test_unknown_sender(self) -> None:
        """A DID that does not resolve, and a key id that is not exactly the DID's."""
        parts = self.alice.did.split(":")
        broken = (":".join(parts[:5]), ":".join([*parts, "x"]), self.alice.did.replace(":z6Mk", ":z6LS", 1), "nobody")
        others = ("did:web:elsewhere.example", "did:decentrl:x", "did:key:z6Mk")
        for did in (*others, *broken, *bad_dids(self.alice.did)):
            reply = self.in_memory.receive_command(self.alice.command({"type": "QUERY_EVENTS"}, sender_did=did))
            self.assertEqual(code_of(reply), (404, "SENDER_NOT_FOUND"))
        key_ids = ["#signing", f"{self.alice.did}#prekey", self.bob.key_id, self.alice.did]
        for key_id in (*key_ids, *bad_dids(self.alice.key_id)):
            reply = self.in_memory.receive_command(
                self.alice.command({"type": "QUERY_EVENTS"}, sender_signing_key_id=key_id)
            )
            self.assertEqual(code_of(reply), (404, "SENDER_SIGNING_KEY_NOT_FOUND"))
        reply = self.in_memory.receive_command(
            self.alice.command({"type": "QUERY_EVENTS"}, sender_did=self.alice.mediator)
        )
        self.assertEqual(code_of(reply), (404, "SENDER_SIGNING_KEY_NOT_FOUND"))


class SignatureTests(SynchronousTestCase):
    def test_altered_commands(self) -> None:
        """Another key, another text, a truncated signature or none; in every channel (DCTRL-0004 6.2)."""
        in_memory, alice, bob = register_two_identities(self)
        public = {"event": "news", "tags": [], "timestamp": 1}
        published = {**public, "event_signature": sign_event("news", [], 1, alice.seed)}
        for make in (
            lambda: alice.command({"type": "SAVE_EVENTS", "events": []}),
            lambda: alice.command("sealed", to=bob.did, channel=PRIVATE),
            lambda: alice.command({"type": "PUBLISH_PUBLIC_EVENT", **published}, channel=PUBLIC),
            lambda: alice.command({"type": "REQUEST_COMMUNICATION_CONTRACT", **alice.registration_request()}),
        ):
            for change in (
                lambda good: {**good, "signature": ""},
                lambda good: {**good, "signature": "AAAA"},
                lambda good: {**good, "signature": good["signature"][:-4]},
                lambda good: {**good, "signature": good["signature"] + "!"},
                lambda good: {**good, "signature": "\0" + good["signature"]},
                lambda good: {**good, "signature": sign_json({k: good[k] for k in ("header", "payload")}, bob.seed)},
                lambda good: {**good, "signature": sign_json(good["payload"], alice.seed)},
                lambda good: replaced(good, ("header", "timestamp"), good["header"]["timestamp"] + 1),
                lambda good: replaced(good, ("header", "extra"), 1),
                lambda good: replaced(good, ("header", "recipient_did"), "did:web:elsewhere.example"),
                lambda good: (
                    {**good, "payload": good["payload"] + "x"}
                    if isinstance(good["payload"], str)
                    else replaced(good, ("payload", "extra"), None)
                ),
            ):
                reply = in_memory.receive_command(to_json(change(json.loads(make()))))
                self.assertEqual(code_of(reply), (401, "INVALID_SIGNATURE"))


class ChargeTests(SynchronousTestCase):
    """Rate limit keys that are charged (reference 10.4)."""

    def test_replay_is_charged_to_address(self) -> None:
        """Replays of others' commands are charged to the address only."""
        in_memory, alice, bob = register_two_identities(self, limits={"did_per_minute": 5, "ip_per_minute": 20})
        bob.save_contract_with(alice)
        in_memory.clock.advance(61)
        command = alice.command("hello", to=bob.did, channel=PRIVATE)
        self.assertEqual(in_memory.receive_command(command).status, 200)
        codes = [code_of(in_memory.receive_command(command, ELSEWHERE))[1] for _ in range(25)]
        self.assertEqual(codes, ["DUPLICATE_NONCE"] * 20 + ["RATE_LIMITED"] * 5)
        self.assertEqual([alice.send_event(bob).status for _ in range(5)], [200] * 4 + [429])

    def test_forgery_is_charged_to_address(self) -> None:
        """A forged sender DID is not charged."""
        in_memory, alice, bob = register_two_identities(self, limits={"did_per_minute": 5, "ip_per_minute": 10})
        bob.save_contract_with(alice)
        in_memory.clock.advance(61)
        forged = {"header": alice.header(PRIVATE, bob.did), "payload": "x", "signature": "AAAA"}
        for _ in range(30):
            in_memory.receive_command(encoding.dumps(forged), ELSEWHERE)
        self.assertEqual(alice.send_event(bob).status, 200)

    def test_own_commands_pass_flooded_address(self) -> None:
        """An identity at an address over its limit may fetch its events, and gets Retry-After."""
        in_memory, alice, bob = register_two_identities(self, limits={"ip_per_minute": 5})
        for _ in range(6):
            in_memory.receive_command(b"garbage")
        alice.answer("QUERY_PENDING_EVENTS")
        reply = alice.send_event(bob)
        self.assertEqual(code_of(reply), (429, "RATE_LIMITED"))
        self.assertIsNotNone(reply.retry_after)

    def test_identity_limit(self) -> None:
        """An identity's own commands have their own limit."""
        in_memory, alice, bob = register_two_identities(self, limits={"account_per_minute": 3})
        statuses = [alice.ask("QUERY_EVENTS").status for _ in range(4)]
        self.assertEqual(statuses, [200, 200, 200, 429])
        self.assertEqual(bob.ask("QUERY_EVENTS").status, 200)


class RecordedEventTests(SynchronousTestCase):
    def test_request_events(self) -> None:
        """Each command is one event and one count: type, outcome, and the sender once verified."""
        in_memory, alice, bob = register_two_identities(self)
        begun = len(in_memory.events("req.done"))
        alice.answer("QUERY_EVENTS")
        in_memory.receive_command(b"garbage")
        in_memory.receive_command(alice.command({"type": "QUERY_EVENTS"}, sender_signing_key_id=bob.key_id))
        done = in_memory.events("req.done")[begun:]
        self.assertEqual([event["status"] for event in done], [200, 400, 404])
        self.assertEqual([event.get("mtype") for event in done], ["QUERY_EVENTS", None, "QUERY_EVENTS"])
        codes = [event.get("code") for event in done]
        self.assertEqual(codes, [None, "INVALID_COMMAND", "SENDER_SIGNING_KEY_NOT_FOUND"])
        self.assertEqual({event["proto"] for event in done}, {"decentrl"})
        self.assertEqual(["sender" in event for event in done], [True, False, False])
        self.assertEqual(in_memory.counter("mediator_rejected_total", reason="invalid_command"), 1)

    def test_internal_error(self) -> None:
        """An internal error is a 500 without details; the log has nothing of the command."""
        in_memory, alice, _ = register_two_identities(self)
        with in_memory.failing("events", RuntimeError("details")):
            reply = alice.ask("QUERY_EVENTS")
        self.assertEqual(code_of(reply), (500, "INTERNAL_ERROR"))
        (failure,) = self.flushLoggedErrors()
        self.assertNotIn("details", str(failure))

    def test_addresses_are_pseudonymous(self) -> None:
        """No log line has an address."""
        in_memory, alice, _ = register_two_identities(self)
        alice.answer("QUERY_EVENTS")
        self.assertNotIn(PEER, json.dumps(in_memory.events("req.done")))
