"""Stored events (DCTRL-0004 8.9 to 8.11, section 9)."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.protocol.decentrl.crypto import sign_event
from tests.in_memory_identities import PUBLIC, InMemoryIdentity, code_of, register_two_identities


class StoredEventTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory, self.alice, self.bob = register_two_identities(self)

    def event(self, payload: str, at: float, *tags: str, sender: str | None = None, **more: Any) -> dict[str, Any]:
        own = self.alice.did
        members = {"sender_did": sender or own, "recipient_did": self.bob.did if sender is None else own}
        return {**members, "payload": payload, "timestamp": at, "encrypted_tags": tags, **more}

    def save(self, *events: dict[str, Any]) -> None:
        self.assertEqual(self.alice.answer("SAVE_EVENTS", events=events), {"type": "SUCCESS"})

    def stored_events(self, **filter_: Any) -> list[str]:
        return [event["payload"] for event in self.alice.query("EVENTS", "events", filter=filter_)]

    def test_returned_event(self) -> None:
        """With an id and as sent; numbers as JavaScript writes them; no other members."""
        self.save(self.event("opaque", 1.0, "t1", "t2", contract_id="c"), self.event("half", 1.5))
        first, second = self.alice.query("EVENTS", "events")
        self.assertEqual(set(first), {"id", "payload", "encrypted_tags", "timestamp"})
        self.assertEqual((first["payload"], first["encrypted_tags"]), ("opaque", ["t1", "t2"]))
        self.assertEqual((repr(first["timestamp"]), repr(second["timestamp"])), ("1", "1.5"))

    def test_order(self) -> None:
        """By timestamp, then by arrival."""
        self.save(self.event("b", 2), self.event("c", 2), self.event("a", 1))
        self.assertEqual(self.stored_events(), ["a", "b", "c"])

    def test_filters(self) -> None:
        """Each of them, and all together."""
        self.save(self.event("1", 1, "x"), self.event("2", 2, "x", "y"), self.event("3", 3, sender=self.bob.did))
        self.save(self.event("4", 4, "y", sender="did:example:carol"))
        self.assertEqual(self.stored_events(encrypted_tags=["x"]), ["1", "2"])
        self.assertEqual(self.stored_events(encrypted_tags=["x", "y"]), ["1", "2", "4"])
        self.assertEqual(self.stored_events(encrypted_tags=[]), ["1", "2", "3", "4"])
        self.assertEqual(self.stored_events(after_timestamp=2, before_timestamp=3), ["2", "3"])
        self.assertEqual(self.stored_events(participant_did=self.bob.did), ["1", "2", "3"])
        self.assertEqual(self.stored_events(participant_did=self.alice.did), ["1", "2", "3", "4"])
        self.assertEqual(self.stored_events(unprocessed_only=True), ["3", "4"])
        self.assertEqual(self.stored_events(unprocessed_only=False), ["1", "2", "3", "4"])
        self.assertEqual(
            self.stored_events(encrypted_tags=["y"], participant_did=self.bob.did, before_timestamp=9), ["2"]
        )

    def test_pages(self) -> None:
        """The requested page and size are returned with the total of matches; defaults are 0 and 10."""
        self.save(*[self.event(str(number), number) for number in range(25)])
        pages = {
            (): ([str(n) for n in range(10)], {"page": 0, "page_size": 10, "total": 25}),
            (("page", 2),): (["20", "21", "22", "23", "24"], {"page": 2, "page_size": 10, "total": 25}),
            (("page_size", 3), ("page", 1)): (["3", "4", "5"], {"page": 1, "page_size": 3, "total": 25}),
            (("page", 9),): ([], {"page": 9, "page_size": 10, "total": 25}),
        }
        for asked, (payloads, pagination) in pages.items():
            payload = self.alice.answer("QUERY_EVENTS", pagination=dict(asked))["payload"]
            self.assertEqual([event["payload"] for event in payload["events"]], payloads)
            self.assertEqual(payload["pagination"], pagination)

    def test_invalid_pages(self) -> None:
        """Refused, not clipped."""
        impossible: list[Any] = [
            {"page": -1},
            {"page": 0.5},
            {"page": "0"},
            {"page": True},
            {"page": 2**70},
            {"page_size": 0},
            {"page_size": 1001},
            {"page_size": None},
            [],
        ]
        for pagination in impossible:
            reply = self.alice.ask("QUERY_EVENTS", pagination=pagination)
            self.assertEqual(code_of(reply), (400, "INVALID_COMMAND"), pagination)

    def test_last_possible_page(self) -> None:
        """The last page that can be requested is empty."""
        payload = self.alice.answer("QUERY_EVENTS", pagination={"page": 2**53 - 1, "page_size": 1000})["payload"]
        self.assertEqual(payload["events"], [])

    def test_update_tags(self) -> None:
        """All tags are replaced, the event is processed; repetition changes nothing."""
        self.save(self.event("in", 1, "old", sender=self.bob.did))
        (event,) = self.alice.query("EVENTS", "events", filter={"unprocessed_only": True})
        for _ in range(2):
            update = [{"event_id": event["id"], "encrypted_tags": ["new"]}]
            self.alice.answer("UPDATE_EVENT_TAGS", events=update)
            self.assertEqual(self.stored_events(unprocessed_only=True), [])
            self.assertEqual(self.stored_events(encrypted_tags=["old"]), [])
            self.assertEqual(self.stored_events(encrypted_tags=["new"]), ["in"])

    def test_events_of_others(self) -> None:
        """An identity neither sees nor changes events of others."""
        self.save(self.event("mine", 1, "tag"))
        (event,) = self.alice.query("EVENTS", "events")
        update = [{"event_id": event["id"], "encrypted_tags": []}, {"event_id": "unknown", "encrypted_tags": []}]
        self.bob.answer("UPDATE_EVENT_TAGS", events=update)
        self.assertEqual(self.bob.query("EVENTS", "events"), [])
        self.assertEqual(self.stored_events(encrypted_tags=["tag"]), ["mine"])

    def test_quota(self) -> None:
        """Over the quota nothing of the command is stored."""
        in_memory, alice, _ = register_two_identities(self, decentrl={"max_stored_events": 2})
        events = [self.event(str(number), number) for number in range(3)]
        self.assertEqual(code_of(alice.ask("SAVE_EVENTS", events=events)), (429, "RATE_LIMITED"))
        self.assertEqual(alice.query("EVENTS", "events"), [])

    def test_quota_of_bytes(self) -> None:
        """Saved events, replaced tags and public events count."""
        _, alice, _ = register_two_identities(self, decentrl={"max_stored_bytes": 1000})
        alice.answer("SAVE_EVENTS", events=[self.event("x" * 100, 1, "t" * 10)])
        too_much = alice.ask("SAVE_EVENTS", events=[self.event("x" * 1000, 1)])
        self.assertEqual(code_of(too_much), (429, "RATE_LIMITED"))
        public: dict[str, Any] = {"event": "x" * 1000, "tags": [], "timestamp": 1}
        signed = {**public, "event_signature": sign_event("x" * 1000, [], 1, alice.seed)}
        self.assertEqual(code_of(alice.ask("PUBLISH_PUBLIC_EVENT", channel=PUBLIC, **signed)), (429, "RATE_LIMITED"))
        (stored,) = alice.query("EVENTS", "events")
        update = [{"event_id": stored["id"], "encrypted_tags": ["t" * 1000]}]
        self.assertEqual(code_of(alice.ask("UPDATE_EVENT_TAGS", events=update)), (429, "RATE_LIMITED"))

    def test_addressed_to_other_mediator(self) -> None:
        """A command to another mediator is not executed."""
        for command in (
            {"type": "SAVE_EVENTS", "events": []},
            {"type": "QUERY_EVENTS"},
            {"type": "UPDATE_EVENT_TAGS", "events": []},
            {"type": "QUERY_PENDING_EVENTS"},
            {"type": "ACKNOWLEDGE_PENDING_EVENTS", "event_ids": []},
            {"type": "QUERY_COMMUNICATION_CONTRACTS"},
            {"type": "QUERY_PENDING_COMMUNICATION_CONTRACT_REQUESTS"},
            {"type": "ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS", "communication_contract_ids": []},
            {
                "type": "SAVE_COMMUNICATION_CONTRACT",
                "signed_communication_contract": self.alice.contract_with(self.bob),
            },
        ):
            for to in (self.bob.did, "did:web:elsewhere.example", "nobody"):
                reply = self.in_memory.receive_command(self.alice.command(command, to=to))
                self.assertEqual(code_of(reply), (401, "UNAUTHORIZED_COMMAND"), command["type"])

    def test_not_registered(self) -> None:
        """These commands, and publishing, need a registration."""
        carol = InMemoryIdentity(self.in_memory, "carol")
        commands: dict[str, dict[str, Any]] = {
            "SAVE_EVENTS": {"events": []},
            "QUERY_EVENTS": {},
            "UPDATE_EVENT_TAGS": {"events": []},
            "QUERY_PENDING_EVENTS": {},
            "ACKNOWLEDGE_PENDING_EVENTS": {"event_ids": []},
            "QUERY_COMMUNICATION_CONTRACTS": {},
            "QUERY_PENDING_COMMUNICATION_CONTRACT_REQUESTS": {},
            "ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS": {"communication_contract_ids": []},
            "SAVE_COMMUNICATION_CONTRACT": {"signed_communication_contract": carol.contract_with(self.bob)},
        }
        for type_, members in commands.items():
            self.assertEqual(code_of(carol.ask(type_, **members)), (401, "UNAUTHORIZED_COMMAND"), type_)
