"""
The published Decentrl client against a running daemon (reference section 14).

Alice and Bob have wallets of mediatord's client library, which register and conclude the contract, as the published
package does neither. Events are sent and stored by `@decentrl/event-store` with the same keys, and sometimes by the
library, so that each reads what the other wrote.
"""

from __future__ import annotations

from typing import Any, ClassVar

from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.trial.unittest import TestCase

from mediatord.wallet.decentrl_client import (
    ConcludedContract,
    DecentrlWallet,
    connect_decentrl_socket,
    discover_decentrl_mediator,
)
from mediatord.wallet.didcomm_client import open_http
from tests.decentrl_contracts import make_contract
from tests.foreign.decentrl.stores import ClientFailed, EventStores
from tests.integration.daemon import Daemon
from tests.integration.message_load import PATIENCE_SECONDS, prepare_daemon

reactor: Any = _reactor
# Text that JSON writers serialise differently: non-ASCII, beyond U+FFFF, and JavaScript's former line terminators.
TEXT = 'naïve 😀 \u2028 \x7f \\ "/"'


def event(text: str) -> dict[str, Any]:
    """An event as applications create it."""
    return {"type": "chat.message", "data": {"chatId": "abc", "content": text}}


class EventStoreTests(TestCase):
    """Operations of the published client."""

    stores: ClassVar[EventStores]
    daemon: ClassVar[Daemon]

    @classmethod
    def setUpClass(cls) -> None:
        cls.stores = EventStores()
        cls.addClassCleanup(cls.stores.close)
        cls.daemon = prepare_daemon()
        cls.daemon.__enter__()
        cls.addClassCleanup(cls.daemon.__exit__, None, None, None)

    async def register_wallet(self, alias: str) -> DecentrlWallet:
        """A registered wallet of the client library."""
        http = open_http(reactor)
        wallet = DecentrlWallet.generate(
            alias, await discover_decentrl_mediator(http, self.daemon.url), http, reactor
        )
        await wallet.register()
        return wallet

    async def connect_alice_and_bob(self) -> tuple[DecentrlWallet, DecentrlWallet]:
        """Alice and Bob with a contract, and event stores of these names."""
        alice, bob = await self.register_wallet("alice"), await self.register_wallet("bob")
        await make_contract(alice, bob)
        self.stores.open("alice", alice, alice.concluded)
        self.stores.open("bob", bob, bob.concluded)
        return alice, bob

    def query(self, name: str, **options: Any) -> list[dict[str, Any]]:
        """All events that a query finds."""
        page = self.stores.call(name, "queryEvents", options)
        self.assertEqual(page["pagination"], {"page": 0, "pageSize": 100, "total": len(page["data"])})
        data: list[dict[str, Any]] = page["data"]
        return data

    def call_failing(self, *call: Any) -> ClientFailed:
        """The error of a call that must fail."""
        with self.assertRaises(ClientFailed) as caught:
            self.stores.call(*call)
        failed: ClientFailed = caught.exception
        return failed

    async def test_publishes_event_to_participant(self) -> None:
        """Bob's client fetches, verifies, stores and acknowledges it; both find it in queries."""
        alice, bob = await self.connect_alice_and_bob()
        options = {"recipient": bob.did, "tags": ["chat", "chat.abc", "café"]}
        self.stores.call("alice", "publishEvent", event(TEXT), options)
        self.assertEqual((await bob.pending()).total, 1)
        self.assertEqual(self.stores.call("bob", "processPendingEvents"), [event(TEXT)])
        self.assertEqual(self.stores.call("bob", "processPendingEvents"), [])
        self.assertEqual((await bob.pending()).total, 0)
        self.assertEqual(self.query("alice", tags=["café"]), [event(TEXT)])
        self.assertEqual(self.query("alice", tags=["another"]), [])
        self.assertEqual(self.query("bob", participantDid=alice.did), [event(TEXT)])
        self.assertEqual(self.query("bob", tags=[f"participant.{alice.did}"]), [event(TEXT)])

    async def test_tags_received_events(self) -> None:
        """A received event is unprocessed until Bob replaces its tags."""
        alice, bob = await self.connect_alice_and_bob()
        self.stores.call("alice", "publishEvent", event("hello"), {"recipient": bob.did, "tags": ["chat"]})
        self.stores.call("bob", "processPendingEvents")
        self.assertEqual(self.stores.call("alice", "queryUnprocessedEvents")["data"], [])
        (found,) = self.stores.call("bob", "queryUnprocessedEvents")["data"]
        tagged = {"eventId": found.pop("_mediatorEventId"), "encryptedTags": [bob.identity.tag("mine")]}
        self.assertEqual(found, event("hello"))
        self.stores.call("bob", "updateEventTags", [tagged])
        self.assertEqual(self.stores.call("bob", "queryUnprocessedEvents")["data"], [])
        self.assertEqual(self.query("bob", tags=["mine"]), [event("hello")])
        self.assertEqual(self.query("bob", tags=[f"participant.{alice.did}"]), [])

    async def test_stores_events_without_recipient(self) -> None:
        """Without a contract the client leaves out members that it has signed as undefined."""
        await self.connect_alice_and_bob()
        for text in ("one", "two", "three"):
            self.stores.call("alice", "publishEvent", event(text), {"tags": ["note"]})
        self.stores.call("alice", "publishEvent", event("gone"), {"tags": ["note"], "ephemeral": True})
        self.assertEqual(self.query("alice", tags=["note"]), [event(text) for text in ("one", "two", "three")])
        page = {"tags": ["note"], "pagination": {"page": 1, "pageSize": 2}}
        found = self.stores.call("alice", "queryEvents", page)
        self.assertEqual(found, {"data": [event("three")], "pagination": {"page": 1, "pageSize": 2, "total": 3}})

    async def test_verifies_numbers_in_javascript_form(self) -> None:
        """A number that other writers serialise differently does not break the signature (reference section 4)."""
        await self.connect_alice_and_bob()
        self.stores.call("alice", "publishEvent", event("now"), {"tags": []})
        for after, before, expected in ((1e-7, 1e21, 1), (0.000001, 123456789012345680000, 1), (-0.0, 1.5, 0)):
            found = self.query("alice", afterTimestamp=after, beforeTimestamp=before, unprocessedOnly=False)
            self.assertEqual(len(found), expected)

    async def test_client_library_and_published_client_interoperate(self) -> None:
        """Each reads what the other sends, signs, tags and stores."""
        alice, bob = await self.connect_alice_and_bob()
        self.stores.call("alice", "publishEvent", event("theirs"), {"recipient": bob.did, "tags": ["chat"]})
        (pending,) = (await bob.pending()).items
        self.assertIn("theirs", bob.open(pending).text)
        await bob.acknowledge([pending])
        (kept,) = (await alice.events(tags=["chat"])).items
        self.assertIn("theirs", alice.identity.unseal(kept.payload))
        await alice.send(bob.did, '{"type":"ours"}')
        self.assertEqual(self.stores.call("bob", "processPendingEvents"), [{"type": "ours"}])

    async def test_processes_pushed_events(self) -> None:
        """The client takes a push as it is, and acknowledges it over HTTP (reference 11)."""
        _, bob = await self.connect_alice_and_bob()
        socket = await connect_decentrl_socket(reactor, bob)
        self.addCleanup(socket.close)
        self.stores.call("alice", "publishEvent", event("now"), {"recipient": bob.did, "tags": ["chat"]})
        frame = await socket.pushed.get().addTimeout(PATIENCE_SECONDS, reactor)
        self.assertEqual((await bob.pending()).total, 1)
        self.assertEqual(self.stores.call("bob", "processPreFetchedPendingEvents", frame["events"]), [event("now")])
        self.assertEqual((await bob.pending()).total, 0)

    async def test_uses_newest_contract(self) -> None:
        """The client sends under the contract that expires last, and reads events under older ones."""
        alice, bob = await self.connect_alice_and_bob()
        newer, _ = await make_contract(alice, bob, lifetime=10**9)
        self.stores.open("alice", alice, alice.concluded)
        self.stores.open("bob", bob, bob.concluded)
        self.stores.call("alice", "publishEvent", event("new"), {"recipient": bob.did, "tags": []})
        (pending,) = (await bob.pending()).items
        self.assertEqual(bob.open(pending).contract.id, newer.id)
        await alice.send(bob.did, '{"type":"old"}', alice.concluded[0])
        self.assertEqual(self.stores.call("bob", "processPendingEvents"), [event("new"), {"type": "old"}])

    async def test_leaves_unreadable_events_pending(self) -> None:
        """The client does not acknowledge what it cannot decrypt (reference section 14)."""
        alice, bob = await self.connect_alice_and_bob()
        self.stores.open("bob", bob, await self.contracts_with_carol(bob))
        await alice.send(bob.did, '{"type":"hello"}')
        self.assertEqual(self.stores.call("bob", "processPendingEvents"), [])
        self.assertEqual((await bob.pending()).total, 1)

    async def contracts_with_carol(self, bob: DecentrlWallet) -> list[ConcludedContract]:
        """Contracts of Bob with Carol."""
        carol = await self.register_wallet("carol")
        await make_contract(carol, bob)
        return bob.contracts_with(carol.did)

    async def test_publishes_and_deletes_public_events(self) -> None:
        """Read by tag, time and page, and deleted (reference section 10)."""
        alice, _ = await self.connect_alice_and_bob()
        published = [
            self.stores.call("alice", "publishPublicEvent", TEXT, {"tags": tags})["publicEventId"]
            for tags in (["blog", "é"], ["news"], [])
        ]
        place = {"mediatorEndpoint": alice.mediator.url, "publisherDid": alice.did}
        found = self.stores.call(None, "fetchPublicEvents", place)
        self.assertEqual([one["id"] for one in found["data"]], published[::-1])
        self.assertEqual(found["pagination"], {"page": 0, "pageSize": 20, "total": 3})
        (tagged,) = self.stores.call(None, "fetchPublicEvents", {**place, "tags": ["é", "x"]})["data"]
        self.assertEqual((tagged["id"], tagged["event"], tagged["tags"]), (published[0], TEXT, ["blog", "é"]))
        later = {**place, "afterTimestamp": tagged["timestamp"] + 1000}
        self.assertEqual(self.stores.call(None, "fetchPublicEvents", later)["data"], [])
        paged = {**place, "pagination": {"page": 1, "pageSize": 2}, "beforeTimestamp": tagged["timestamp"] + 1000}
        (oldest,) = self.stores.call(None, "fetchPublicEvents", paged)["data"]
        self.assertEqual(oldest["id"], published[0])
        self.assertEqual((await alice.public(alice.did)).total, 3)  # verifies the signatures
        self.stores.call("alice", "deletePublicEvent", published[1])
        self.assertEqual((await alice.public(alice.did)).total, 2)
        failed = self.call_failing("alice", "deletePublicEvent", published[1])
        self.assertEqual((failed.status, failed.reply), (404, {"type": "ERROR", "code": "PUBLIC_EVENT_NOT_FOUND"}))

    async def test_raises_refusals_with_reply(self) -> None:
        """A refusal is thrown with the reply in its details (reference 15.4)."""
        alice, bob = await self.register_wallet("alice"), await self.register_wallet("bob")
        await alice.request_contract(bob.did)
        (request,) = (await bob.pending_requests()).items
        await bob.respond(bob.accept(request))  # without saving it himself
        self.stores.open("alice", alice, await alice.conclude())
        failed = self.call_failing("alice", "publishEvent", event("hello"), {"recipient": bob.did, "tags": []})
        self.assertEqual(
            (failed.code, failed.status, failed.reply),
            ("PUBLISH_FAILED", 404, {"type": "ERROR", "code": "COMMUNICATION_CONTRACT_NOT_FOUND"}),
        )
