"""Public channels (DCTRL-0007, reference section 10)."""

from __future__ import annotations

import json
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from mediatord.protocol.decentrl.crypto import sign_json
from mediatord.ratelimit.admission import RequestReply
from tests.in_memory_identities import PUBLIC, YEAR, InMemoryIdentity, code_of, register_two_identities
from tests.in_memory_mediator import PEER

PUBLISH, DELETE = "PUBLISH_PUBLIC_EVENT", "DELETE_PUBLIC_EVENT"


class ChannelTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory, self.alice, self.bob = register_two_identities(self)

    def sign_event(
        self, new_identity: InMemoryIdentity, event: str, at: float, *tags: str, channel: str | None = None
    ) -> dict[str, Any]:
        signable: dict[str, Any] = {"event": event, "tags": list(tags), "timestamp": at}
        if channel is not None:
            signable["channel_id"] = channel
        return {**signable, "event_signature": sign_json(signable, new_identity.seed)}

    def publish(self, event: str, at: float, *tags: str, channel: str | None = None) -> str:
        members = self.sign_event(self.alice, event, at, *tags, channel=channel)
        reply = self.alice.ask(PUBLISH, channel=PUBLIC, **members)
        body = json.loads(reply.body)
        self.assertEqual((reply.status, set(body)), (200, {"type", "public_event_id"}))
        id_: str = body["public_event_id"]
        return id_

    def read(self, did: str, peer: str = PEER, **arguments: Any) -> RequestReply:
        wanted = {
            name.encode(): [str(item).encode() for item in (value if isinstance(value, list) else [value])]
            for name, value in arguments.items()
        }
        return self.successResultOf(
            Deferred.fromCoroutine(self.in_memory.decentrl.dispatcher.public(did, wanted, peer))
        )

    def page(self, **arguments: Any) -> dict[str, Any]:
        reply = self.read(self.alice.did, **arguments)
        self.assertEqual(reply.status, 200)
        body: dict[str, Any] = json.loads(reply.body)
        return body

    def events(self, **arguments: Any) -> list[str]:
        return [event["event"] for event in self.page(**arguments)["events"]]

    def test_events_with_and_without_channel(self) -> None:
        """With and without a channel; the signed event can be rebuilt from the response."""
        ids = [self.publish("old", 1, "b", "a"), self.publish("new", 2, channel="news")]
        body = self.page()
        self.assertEqual(set(body), {"publisher_did", "events", "pagination"})
        self.assertEqual(body["publisher_did"], self.alice.did)
        self.assertEqual(body["pagination"], {"page": 0, "page_size": 20, "total": 2})
        new, old = body["events"]
        self.assertEqual([old["id"], new["id"]], ids)
        self.assertNotIn("channel_id", old)
        for event in (old, new):
            signed = {name: value for name, value in event.items() if name not in ("id", "event_signature")}
            self.assertEqual(sign_json(signed, self.alice.seed), event["event_signature"])

    def test_signature_of_other_generation(self) -> None:
        """An unsigned channel, and a signed one that is missing, are refused."""
        three, four = self.sign_event(self.alice, "x", 1), self.sign_event(self.alice, "x", 1, channel="news")
        for members in (
            {**three, "channel_id": "news"},
            {name: value for name, value in four.items() if name != "channel_id"},
            {**three, "tags": ["added"]},
            {**three, "timestamp": 2},
            {**three, "event": "y"},
            {**three, "event_signature": ""},
            {**self.sign_event(self.alice, "x", 1, "a", "b"), "tags": ["b", "a"]},
            self.sign_event(self.bob, "x", 1),
        ):
            reply = self.alice.ask(PUBLISH, channel=PUBLIC, **members)
            self.assertEqual(code_of(reply), (401, "INVALID_EVENT_SIGNATURE"))
        self.assertEqual(self.events(), [])

    def test_filters(self) -> None:
        """Newest first; tags joined or repeated, any of them; inclusive bounds; one channel."""
        self.publish("1", 1, "a")
        self.publish("2", 2, "b", channel="news")
        self.publish("3", 3, "c")
        self.assertEqual(self.events(), ["3", "2", "1"])
        self.assertEqual(self.events(tags="a,c"), ["3", "1"])
        self.assertEqual(self.events(tags=["a", "b"]), ["2", "1"])
        self.assertEqual(self.events(after=2), ["3", "2"])
        self.assertEqual(self.events(after=2, before=2), ["2"])
        self.assertEqual(self.events(channel_id="news"), ["2"])
        self.assertEqual(self.page(page=1, page_size=2)["pagination"], {"page": 1, "page_size": 2, "total": 3})

    def test_invalid_queries(self) -> None:
        """Invalid queries and DIDs are refused."""
        for arguments in ({"page": -1}, {"page": "x"}, {"page_size": 0}, {"after": "inf"}, {"page": [1, 2]}):
            self.assertEqual(code_of(self.read(self.alice.did, **arguments)), (400, "INVALID_COMMAND"))
        self.assertEqual(code_of(self.read("alice")), (400, "INVALID_COMMAND"))

    def test_unknown_did(self) -> None:
        """An unknown DID has an empty list, like one that publishes nothing."""
        self.assertEqual(json.loads(self.read("did:example:nobody").body)["events"], [])
        self.assertEqual(json.loads(self.read(self.bob.did).body)["events"], [])

    def test_delete(self) -> None:
        """Deletion works once; missing events and those of others are not found."""
        id_ = self.publish("gone", 1)
        foreign = self.bob.ask(DELETE, channel=PUBLIC, public_event_id=id_)
        self.assertEqual(code_of(foreign), (404, "PUBLIC_EVENT_NOT_FOUND"))
        deleted = self.alice.ask(DELETE, channel=PUBLIC, public_event_id=id_, channel_id="ignored")
        self.assertEqual(json.loads(deleted.body), {"type": "SUCCESS"})
        self.assertEqual(self.events(), [])
        for missing in (id_, "nothing", "", "\0"):
            again = self.alice.ask(DELETE, channel=PUBLIC, public_event_id=missing)
            self.assertEqual(code_of(again), (404, "PUBLIC_EVENT_NOT_FOUND"))

    def test_publishing_needs_registration(self) -> None:
        """So does deleting; published events stay."""
        id_ = self.publish("stays", 1)
        self.in_memory.clock.advance(YEAR)
        members = self.sign_event(self.alice, "x", 2)
        self.assertEqual(code_of(self.alice.ask(PUBLISH, channel=PUBLIC, **members))[1], "UNAUTHORIZED_COMMAND")
        late = self.alice.ask(DELETE, channel=PUBLIC, public_event_id=id_)
        self.assertEqual(code_of(late), (401, "UNAUTHORIZED_COMMAND"))
        self.assertEqual(self.events(), ["stays"])

    def test_command_on_wrong_channel(self) -> None:
        """A public command on another channel is refused, and vice versa."""
        members = self.sign_event(self.alice, "x", 1)
        self.assertEqual(code_of(self.alice.ask(PUBLISH, **members)), (400, "INVALID_COMMAND"))
        self.assertEqual(code_of(self.alice.ask("QUERY_EVENTS", channel=PUBLIC)), (400, "INVALID_COMMAND"))

    def test_addressed_to_other_mediator(self) -> None:
        """Events are published and deleted at the addressed mediator only."""
        id_ = self.publish("stays", 1)
        for to in (self.bob.did, "did:web:elsewhere.example", "nobody"):
            members = self.sign_event(self.alice, "x", 2)
            reply = self.alice.ask(PUBLISH, to=to, channel=PUBLIC, **members)
            self.assertEqual(code_of(reply), (401, "UNAUTHORIZED_COMMAND"))
            reply = self.alice.ask(DELETE, to=to, channel=PUBLIC, public_event_id=id_)
            self.assertEqual(code_of(reply), (401, "UNAUTHORIZED_COMMAND"))
        self.assertEqual(self.events(), ["stays"])

    def test_reads_are_limited_per_address(self) -> None:
        """Each address has its limit of reads per minute."""
        in_memory, alice, _ = register_two_identities(self, limits={"account_per_minute": 5})
        self.in_memory = in_memory
        statuses = [self.read(alice.did, peer="192.0.2.9").status for _ in range(6)]
        self.assertEqual(statuses, [200] * 5 + [429])
        self.assertEqual(self.read(alice.did).status, 200)
