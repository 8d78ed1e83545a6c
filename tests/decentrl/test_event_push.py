"""Events between identities (DCTRL-0004 section 7, 8.7, 8.8)."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

from twisted.trial.unittest import SynchronousTestCase

from mediatord.protocol.decentrl.crypto import sign_event
from mediatord.store.interfaces.decentrl import PendingEvent
from mediatord.store.interfaces.messages import RemovedMessage
from tests.in_memory_identities import PRIVATE, PUBLIC, InMemoryIdentity, bad_dids, code_of, register_two_identities
from tests.in_memory_mediator import NOW, FakeSocket


class DeliveryTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory, self.alice, self.bob = register_two_identities(self)

    def test_event_is_queued(self) -> None:
        """An event is queued, in order of arrival, until it is acknowledged."""
        self.bob.save_contract_with(self.alice)
        ids = [json.loads(self.alice.send_event(self.bob, text).body)["pendingEventId"] for text in ("one", "two")]
        expected = [
            {"id": id_, "payload": text, "sender_did": self.alice.did}
            for id_, text in zip(ids, ("one", "two"), strict=True)
        ]
        self.assertEqual(self.bob.pending(), expected)
        self.bob.answer("ACKNOWLEDGE_PENDING_EVENTS", event_ids=[ids[0]])
        self.bob.answer("ACKNOWLEDGE_PENDING_EVENTS", event_ids=[ids[0], "unknown"])
        self.assertEqual(self.bob.pending(), expected[1:])

    def test_reply(self) -> None:
        """SUCCESS and the id, in camel case, nothing else."""
        self.bob.save_contract_with(self.alice)
        body = json.loads(self.alice.send_event(self.bob).body)
        self.assertEqual(set(body), {"type", "pendingEventId"})

    def test_sender_need_not_be_registered(self) -> None:
        """Only the recipient must be, so that two mediators can cooperate."""
        carol = InMemoryIdentity(self.in_memory, "carol", mediator_did="did:web:elsewhere.example")
        self.bob.save_contract_with(carol)
        self.assertEqual(carol.send_event(self.bob).status, 200)

    def test_recipient_checks(self) -> None:
        """Not a DID, not registered, no contract: in this order."""
        carol = InMemoryIdentity(self.in_memory, "carol")
        for did in ("did:web:elsewhere.example", "did:decentrl:a:b:c:d", "nobody", *bad_dids(self.bob.did)):
            reply = self.in_memory.receive_command(self.alice.command("x", to=did, channel=PRIVATE))
            self.assertEqual(code_of(reply), (404, "RECIPIENT_NOT_FOUND"))
        self.assertEqual(code_of(self.alice.send_event(carol)), (404, "RECIPIENT_NOT_REGISTERED"))
        to_us = self.in_memory.receive_command(self.alice.command("x", to=self.alice.mediator, channel=PRIVATE))
        self.assertEqual(code_of(to_us), (404, "RECIPIENT_NOT_REGISTERED"))
        self.assertEqual(code_of(self.alice.send_event(self.bob)), (404, "COMMUNICATION_CONTRACT_NOT_FOUND"))

    def test_contract_of_sender_does_not_count(self) -> None:
        """The contract must be the recipient's, with the sender."""
        self.alice.save_contract_with(self.bob)
        self.bob.save_contract_with(InMemoryIdentity(self.in_memory, "carol"))
        self.assertEqual(code_of(self.alice.send_event(self.bob)), (404, "COMMUNICATION_CONTRACT_NOT_FOUND"))
        self.assertEqual(self.bob.send_event(self.alice).status, 200)

    def test_either_role_permits(self) -> None:
        """Either participant may have requested the contract."""
        self.bob.save(self.bob.contract_with(self.alice))
        self.assertEqual(self.alice.send_event(self.bob).status, 200)

    def test_several_contracts(self) -> None:
        """Any unexpired contract permits."""
        now = int(self.in_memory.clock.seconds())
        self.bob.save_contract_with(self.alice, expires_at=now + 100)
        self.bob.save_contract_with(self.alice, expires_at=now + 200)
        self.in_memory.clock.advance(150)
        self.assertEqual(self.alice.send_event(self.bob).status, 200)
        self.in_memory.clock.advance(50)
        self.assertEqual(code_of(self.alice.send_event(self.bob)), (404, "COMMUNICATION_CONTRACT_NOT_FOUND"))

    def test_filter_by_sender(self) -> None:
        """Only events of one sender, with their total."""
        carol = InMemoryIdentity(self.in_memory, "carol")
        self.bob.save_contract_with(self.alice)
        self.bob.save_contract_with(carol)
        self.alice.send_event(self.bob, "a")
        carol.send_event(self.bob, "c")
        found = self.bob.query("PENDING_EVENTS", "pending_events", filter={"sender_did": carol.did})
        self.assertEqual([event["payload"] for event in found], ["c"])
        self.assertEqual(len(self.bob.query("PENDING_EVENTS", "pending_events", filter={})), 2)

    def test_events_of_others(self) -> None:
        """An identity neither sees nor acknowledges events of others."""
        self.bob.save_contract_with(self.alice)
        id_ = json.loads(self.alice.send_event(self.bob).body)["pendingEventId"]
        self.assertEqual(self.alice.pending(), [])
        self.alice.answer("ACKNOWLEDGE_PENDING_EVENTS", event_ids=[id_])
        self.assertEqual(len(self.bob.pending()), 1)

    def test_quota(self) -> None:
        """A full queue refuses and loses nothing."""
        in_memory, alice, bob = register_two_identities(self, decentrl={"max_pending_events": 2})
        bob.save_contract_with(alice)
        replies = [alice.send_event(bob, text) for text in ("1", "2", "3")]
        self.assertEqual(code_of(replies[2]), (429, "RATE_LIMITED"))
        self.assertEqual([event["payload"] for event in bob.pending()], ["1", "2"])

    def test_quota_of_bytes(self) -> None:
        """The bytes of pending events are limited as well; acknowledged ones make room."""
        _, alice, bob = register_two_identities(self, decentrl={"max_pending_bytes": 1000})
        bob.save_contract_with(alice)
        replies = [alice.send_event(bob, text) for text in ("x" * 400, "y" * 400, "z" * 201)]
        self.assertEqual([reply.status for reply in replies], [200, 200, 429])
        waiting = bob.pending()
        self.assertEqual([event["payload"][0] for event in waiting], ["x", "y"])
        bob.answer("ACKNOWLEDGE_PENDING_EVENTS", event_ids=[waiting[0]["id"]])
        self.assertEqual(alice.send_event(bob, "z" * 201).status, 200)

    def test_counters_and_log_events(self) -> None:
        """Counters and log events record an event like any message, with its protocol."""
        self.bob.save_contract_with(self.alice)
        socket = self.bob.connect()
        pushed = json.loads(self.alice.send_event(self.bob, "pushed").body)["pendingEventId"]
        socket.disconnect()
        queued = json.loads(self.alice.send_event(self.bob, "queued").body)["pendingEventId"]
        self.bob.answer("ACKNOWLEDGE_PENDING_EVENTS", event_ids=[pushed, queued])
        self.assertEqual([event["method"] for event in self.in_memory.events("msg.accept")], ["live", "queue"])
        self.assertEqual([event["path"] for event in self.in_memory.events("msg.ack")], ["live", "poll"])
        self.assertEqual(self.in_memory.counter("mediator_messages_forwarded_total"), 2)
        self.assertEqual(self.in_memory.counter("mediator_messages_stored_total"), 1)
        self.assertEqual(self.in_memory.counter("mediator_messages_delivered_total"), 2)

    def test_late_acknowledgements_are_recorded(self) -> None:
        """Acknowledgements that the store reports late are recorded like others, and forgotten."""
        self.bob.save_contract_with(self.alice)
        queued = json.loads(self.alice.send_event(self.bob, "queued").body)["pendingEventId"]
        self.bob.connect()
        pushed = json.loads(self.alice.send_event(self.bob, "pushed").body)["pendingEventId"]
        did = self.bob.did
        self.in_memory.base.late_removals.resolve_events(
            [RemovedMessage(id_, did, did, 6, NOW, 0) for id_ in (pushed, queued)]
        )
        self.assertEqual([event["path"] for event in self.in_memory.events("msg.ack")], ["live", "poll"])
        self.assertFalse(self.in_memory.decentrl.event_pusher.was_pushed(pushed))


class PushTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory, self.alice, self.bob = register_two_identities(self)
        self.bob.save_contract_with(self.alice)

    def test_pushes_to_all_sockets(self) -> None:
        """Every socket of the recipient gets the event, no other one; it stays queued."""
        sockets = [self.bob.connect(), self.bob.connect()]
        other = self.alice.connect()
        self.alice.send_event(self.bob, "hello")
        waiting = self.bob.pending()
        for socket in sockets:
            self.assertEqual(socket.take_frames(), [{"type": "PENDING_EVENTS", "events": waiting}])
        self.assertEqual(other.take_frames(), [])

    def test_backlog_is_not_pushed(self) -> None:
        """Clients query pending events first (reference 11)."""
        self.alice.send_event(self.bob, "before")
        socket = self.bob.connect()
        self.alice.send_event(self.bob, "after")
        (push,) = socket.take_frames()
        self.assertEqual([event["payload"] for event in push["events"]], ["after"])

    def test_other_commands_push_nothing(self) -> None:
        """Registrations, queries, acknowledgements, stored and public events, and refused commands."""
        socket, own = self.bob.connect(), self.bob.did
        self.bob.register()
        event = {"sender_did": own, "recipient_did": own, "payload": "x", "timestamp": 1, "encrypted_tags": []}
        self.bob.answer("SAVE_EVENTS", events=[event])
        public: dict[str, Any] = {"event": "news", "tags": [], "timestamp": 1}
        signature = sign_event("news", [], 1, self.bob.seed)
        self.bob.answer("PUBLISH_PUBLIC_EVENT", channel=PUBLIC, **public, event_signature=signature)
        self.bob.answer("QUERY_EVENTS")
        self.bob.answer("ACKNOWLEDGE_PENDING_EVENTS", event_ids=[])
        request, respond = "REQUEST_COMMUNICATION_CONTRACT", "COMMUNICATION_CONTRACT_RESPONSE"
        carol = InMemoryIdentity(self.in_memory, "carol")
        unsigned = {**self.alice.contract_with(self.bob), "requestor_signature": ""}
        replies = (
            carol.send_event(self.bob),
            self.alice.ask(request, to=own, encrypted_contract_request="", requestor_ephemeral_public_key="y"),
            self.bob.ask(
                "SAVE_COMMUNICATION_CONTRACT", signed_communication_contract=self.alice.contract_with(carol)
            ),
            self.bob.ask("SAVE_COMMUNICATION_CONTRACT", signed_communication_contract=unsigned),
            self.alice.ask(respond, to=own, signed_communication_contract={}),
        )
        self.assertEqual([reply.status for reply in replies], [404, 400, 400, 401, 400])
        once = self.alice.command("once", to=own, channel=PRIVATE)
        self.assertEqual([self.in_memory.receive_command(once).status for _ in range(2)], [200, 401])
        (push,) = socket.take_frames()
        self.assertEqual([event["payload"] for event in push["events"]], ["once"])

    def test_no_push_before_commit(self) -> None:
        """An event that the store refused is not pushed."""
        from mediatord.errors import StoreUnavailable

        socket = self.bob.connect()
        with self.in_memory.failing("enqueue_event", StoreUnavailable()):
            self.assertEqual(code_of(self.alice.send_event(self.bob)), (503, "UNAVAILABLE"))
        self.assertEqual(socket.take_frames(), [])
        self.assertEqual(self.bob.pending(), [])

    def test_stalled_socket(self) -> None:
        """A stalled socket delays no other; the event stays queued."""
        socket = self.bob.connect()
        socket.socket.takes = False
        self.assertEqual(self.alice.send_event(self.bob).status, 200)
        self.assertEqual(len(self.bob.pending()), 1)
        self.assertEqual(self.in_memory.counter("mediator_messages_stored_total"), 1)

    def test_push_failure(self) -> None:
        """If a push fails, the event is accepted and stays queued; a push for another process fails for nobody."""
        socket = self.bob.connect()
        pusher, failing = self.in_memory.decentrl.event_pusher, mock.Mock(side_effect=ZeroDivisionError)
        event = PendingEvent("id", self.bob.did, self.alice.did, "x", NOW)
        with mock.patch.object(self.in_memory.base.connections, "subscribers", failing):
            self.assertEqual(self.alice.send_event(self.bob).status, 200)
            self.assertNotIn("id", pusher.push_remote([event]))
        self.assertEqual((len(self.bob.pending()), socket.take_frames()), (1, []))
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 2)

    def test_expired_registration(self) -> None:
        """
        A socket outlives the registration. Until it is renewed, what others send is refused, and neither stored nor
        pushed.
        """
        now = int(self.in_memory.clock.seconds())
        carol = InMemoryIdentity(self.in_memory, "carol")
        carol.register(expires_at=now + 20)
        carol.save_contract_with(self.alice)
        socket = carol.connect()
        self.in_memory.clock.advance(20)
        request, respond = "REQUEST_COMMUNICATION_CONTRACT", "COMMUNICATION_CONTRACT_RESPONSE"
        signed = carol.contract_with(self.alice)
        for reply in (
            self.alice.send_event(carol),
            self.alice.ask(request, to=carol.did, encrypted_contract_request="x", requestor_ephemeral_public_key="y"),
            self.alice.ask(respond, to=carol.did, signed_communication_contract=signed),
        ):
            self.assertEqual(code_of(reply), (404, "RECIPIENT_NOT_REGISTERED"))
        self.assertEqual(socket.take_frames(), [])
        carol.register()
        requests = carol.query("PENDING_COMMUNICATION_CONTRACT_REQUESTS", "pending_communication_contract_requests")
        contracts = carol.query("COMMUNICATION_CONTRACTS", "communication_contracts", filter={})
        self.assertEqual((carol.pending(), requests, len(contracts)), ([], [], 1))
        self.alice.send_event(carol)
        self.assertEqual([frame["type"] for frame in socket.take_frames()], ["PENDING_EVENTS"])

    def test_unauthenticated_socket(self) -> None:
        """A socket that never authenticated gets nothing."""
        silent: FakeSocket = self.in_memory.socket()
        self.alice.send_event(self.bob)
        self.assertEqual(silent.frames, [])
