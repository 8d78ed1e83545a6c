"""Too much, and a store in trouble: nothing of it is kept, and afterwards all is well (reference 10.4, 12)."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

from mediatord.wallet.decentrl_client import PRIVATE_CHANNEL, PUBLIC_CHANNEL
from tests.integration.message_load import PATIENCE_SECONDS
from tests.integration.raw_decentrl_client import RawDecentrlClient, RawWebSocket
from tests.integration.refusal_test_case import REQUEST, RESPOND, SAVE, SEALED, WAYS, RefusalDaemonTestCase


class LimitTests(RefusalDaemonTestCase):
    """429 RATE_LIMITED: too much at once, or too much in all (reference 10.4)."""

    settings: ClassVar[dict[str, Any]] = {
        "limits": {"did_per_minute": 40, "account_per_minute": 60, "ip_per_minute": 500},
        "decentrl": {
            "max_contract_requests": 3,
            "max_contract_requests_per_sender": 2,
            "max_contracts": 3,
            "max_contracts_per_peer": 2,
            "max_pending_events": 3,
            "max_pending_bytes": 1000,
            "max_stored_events": 3,
            "max_stored_bytes": 1000,
        },
    }

    def test_one_senders_events(self) -> None:
        """An identity sends no more than so much in a minute; its own business goes on, and so do others."""
        alice, bob = self.new_identity("alice"), self.new_identity("bob")
        for _ in range(39):
            self.assertEqual(alice.tell(bob).status, 404)
        make = partial(alice.command, "sealed", to=bob.did, channel=PRIVATE_CHANNEL)
        self.is_refused(make, 429, "RATE_LIMITED")
        self.assertEqual(alice.pending(), [])
        self.assertEqual(bob.tell(alice).status, 404)

    def test_one_accounts_business(self) -> None:
        """An identity asks its mediator for no more than so much in a minute; the nonce stays free."""
        alice, bob = self.new_identity("alice"), self.new_identity("bob")
        for _ in range(60):
            alice.get("QUERY_EVENTS")
        make = partial(alice.command, {"type": "SAVE_EVENTS", "events": [alice.event("x")]})
        self.is_refused(make, 429, "RATE_LIMITED")
        self.assertEqual(bob.pending(), [])

    def test_one_accounts_sockets(self) -> None:
        """Opening sockets counts, too."""
        alice = self.new_identity("alice")
        for _ in range(60):
            alice.socket().close()
        line = RawWebSocket(self.daemon_client)
        line.say(alice.greeting())
        self.is_told(line, "RATE_LIMITED", 1013)

    def test_one_address(self) -> None:
        """An address is refused before anything is read; others are not."""
        source = "127.0.0.9"
        for _ in range(500):
            self.is_error(self.daemon_client.command(b"{", source=source), 400, "INVALID_COMMAND")
        big = b" " * 70_000
        self.is_refused(lambda: big, 429, "RATE_LIMITED", source=source)
        alice = self.new_identity("alice")
        stranger = partial(
            RawDecentrlClient(self.daemon_client, "carol").command, {"type": REQUEST, **alice.registration()}
        )
        self.is_refused(stranger, 429, "RATE_LIMITED", source=source)
        self.assertEqual(
            self.daemon_client.command(alice.command({"type": "QUERY_EVENTS"}), source=source).status, 200
        )
        self.is_error(self.daemon_client.command(b"{"), 400, "INVALID_COMMAND")

    def test_one_reader(self) -> None:
        """Public channels are read no more than so often from one address."""
        source, did = "127.0.0.10", RawDecentrlClient(self.daemon_client, "carol").did
        for _ in range(60):
            self.assertEqual(self.daemon_client.ask("GET", f"/public/{did}", source=source).status, 200)
        self.is_error(self.daemon_client.ask("GET", f"/public/{did}", source=source), 429, "RATE_LIMITED")
        self.assertEqual(self.daemon_client.ask("GET", f"/public/{did}").status, 200)

    def test_contract_requests(self) -> None:
        """So many wait for one DID, and fewer of one sender."""
        alice, bob = self.new_identity("alice"), self.new_identity("bob")
        for _ in range(2):
            alice.get(REQUEST, to=bob.did, **SEALED)
        self.is_refused(partial(alice.command, {"type": REQUEST, **SEALED}, to=bob.did), 429, "RATE_LIMITED")
        carol, dave = RawDecentrlClient(self.daemon_client, "carol"), RawDecentrlClient(self.daemon_client, "dave")
        carol.get(REQUEST, to=bob.did, **SEALED)
        self.is_refused(partial(dave.command, {"type": REQUEST, **SEALED}, to=bob.did), 429, "RATE_LIMITED")
        first = bob.requests()[0]["id"]
        bob.get("ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS", communication_contract_ids=[first])
        dave.get(REQUEST, to=bob.did, **SEALED)
        self.assertEqual(
            [one["sender_did"] for one in bob.requests()][1:], [one["sender_did"] for one in bob.requests()][1:]
        )

    def test_contracts(self) -> None:
        """So many are kept for one DID, and fewer with one peer, saved or responded; the same one again is none."""
        alice, bob, carol, dave = (self.new_identity(alias) for alias in ("alice", "bob", "carol", "dave"))
        signed = bob.contract_with(alice)
        for contract in (signed, bob.contract_with(alice), signed):
            self.assertEqual(alice.save(contract).status, 200)
        third = {"signed_communication_contract": bob.contract_with(alice)}
        self.is_refused(partial(alice.command, {"type": SAVE, **third}), 429, "RATE_LIMITED")
        self.is_refused(partial(bob.command, {"type": RESPOND, **third}, to=alice.did), 429, "RATE_LIMITED")
        alice.befriend(carol)
        fourth = {"signed_communication_contract": dave.contract_with(alice)}
        self.is_refused(partial(alice.command, {"type": SAVE, **fourth}), 429, "RATE_LIMITED")
        self.is_refused(partial(dave.command, {"type": RESPOND, **fourth}, to=alice.did), 429, "RATE_LIMITED")

    def test_registrations(self) -> None:
        """Renewing is never refused, and yet no more registrations are kept of one identity than so many."""
        alice = self.new_identity("alice")
        alice.register()
        before = len(self.daemon_client.kept()["contract"])
        for _ in range(3):
            alice.register()
        self.assertEqual(len(self.daemon_client.kept()["contract"]), before)
        alice.get("QUERY_EVENTS")

    def test_pending_events(self) -> None:
        """So many wait for one DID, and so many bytes; nothing makes room for anything."""
        alice, bob = self.new_identity("alice"), self.new_identity("bob")
        bob.befriend(alice)
        self.assertEqual(alice.tell(bob, "x" * 400).status, 200)
        self.assertEqual(alice.tell(bob, "y" * 400).status, 200)
        make = partial(alice.command, "z" * 201, to=bob.did, channel=PRIVATE_CHANNEL)
        self.is_refused(make, 429, "RATE_LIMITED")
        self.assertEqual(alice.tell(bob, "z").status, 200)
        make = partial(alice.command, "z", to=bob.did, channel=PRIVATE_CHANNEL)
        self.is_refused(make, 429, "RATE_LIMITED")
        waiting = bob.pending()
        self.assertEqual([one["payload"][0] for one in waiting], ["x", "y", "z"])
        bob.get("ACKNOWLEDGE_PENDING_EVENTS", event_ids=[waiting[0]["id"]])
        self.assertEqual(alice.tell(bob, "new").status, 200)

    def test_many_at_once(self) -> None:
        """Not one more is kept when they all arrive together."""
        alice, bob = self.new_identity("alice"), self.new_identity("bob")
        bob.befriend(alice)
        carol = RawDecentrlClient(self.daemon_client, "carol")
        pending = [alice.command("x", to=bob.did, channel=PRIVATE_CHANNEL) for _ in range(12)]
        requests = [carol.command({"type": REQUEST, **SEALED}, to=bob.did) for _ in range(12)]
        stored = [bob.command({"type": "SAVE_EVENTS", "events": [bob.event("x")]}) for _ in range(6)]
        public = [
            bob.command({"type": "PUBLISH_PUBLIC_EVENT", **bob.public_event("x")}, channel=PUBLIC_CHANNEL)
            for _ in range(6)
        ]
        contracts = [
            bob.command({"type": SAVE, "signed_communication_contract": alice.contract_with(bob, timestamp=number)})
            for number in range(6)
        ]
        mixed = [
            one for five in zip(pending[:6], requests[:6], stored, public, contracts, strict=True) for one in five
        ]
        statuses = [answer.status for answer in self.daemon_client.at_once(mixed + pending[6:] + requests[6:])]
        self.assertEqual(sorted(statuses), [200] * 9 + [429] * 33)
        self.assertEqual((len(bob.pending()), len(bob.requests())), (3, 2))
        public_events = self.daemon_client.ask("GET", f"/public/{bob.did}").json["events"]
        self.assertEqual(len(bob.items("EVENTS", "events")) + len(public_events), 3)
        self.assertEqual(len(bob.items("COMMUNICATION_CONTRACTS", "communication_contracts")), 2)

    def test_stored_events(self) -> None:
        """So many are kept for one DID, and so many bytes, with tags and what is public: all of a batch or none."""
        alice = self.new_identity("alice")
        batch = [alice.event("x" * 100, tags=("t" * 10,))] * 2
        alice.get("SAVE_EVENTS", events=batch)
        self.is_refused(lambda: alice.command({"type": "SAVE_EVENTS", "events": batch}), 429, "RATE_LIMITED")
        id_ = alice.publish("p" * 100)
        event = alice.public_event("q")
        make = partial(alice.command, {"type": "PUBLISH_PUBLIC_EVENT", **event}, channel=PUBLIC_CHANNEL)
        self.is_refused(make, 429, "RATE_LIMITED")
        stored = alice.items("EVENTS", "events")
        tags = [{"event_id": one["id"], "encrypted_tags": ["t" * 500]} for one in stored]
        self.is_refused(lambda: alice.command({"type": "UPDATE_EVENT_TAGS", "events": tags}), 429, "RATE_LIMITED")
        alice.get("UPDATE_EVENT_TAGS", events=[{"event_id": stored[0]["id"], "encrypted_tags": []}])
        alice.get("DELETE_PUBLIC_EVENT", channel=PUBLIC_CHANNEL, public_event_id=id_)
        alice.publish("p" * 100)


class StoreTests(RefusalDaemonTestCase):
    """503 UNAVAILABLE, and 500 where the file holds what nobody put there."""

    def setUp(self) -> None:
        super().setUp()
        self.alice, self.bob = self.new_identity("alice"), self.new_identity("bob")
        self.alice.befriend(self.bob)
        self.bob.befriend(self.alice)
        # Of each kind there is something, so that queries have to look.
        self.bob.tell(self.alice)
        self.bob.get(REQUEST, to=self.alice.did, **SEALED)
        self.alice.get("SAVE_EVENTS", events=[self.alice.event("sealed", tags=("tag",))])
        self.alice.publish("news")

    @contextlib.contextmanager
    def behind_its_back(self) -> Iterator[sqlite3.Connection]:
        """The daemon's file."""
        database = self.daemon_client.database
        with contextlib.closing(
            sqlite3.connect(database, isolation_level=None, timeout=PATIENCE_SECONDS)
        ) as connection:
            connection.execute("PRAGMA legacy_alter_table = ON")
            yield connection

    def test_a_locked_file(self) -> None:
        """
        While somebody else holds the file, what is to be kept is refused with nothing kept, and what is only read is
        read; once it is released the very same command is carried out, without a restart (reference 6.1).
        """
        self.bob.publish("news")
        raw = self.alice.command("sealed", to=self.bob.did, channel=PRIVATE_CHANNEL)
        before = self.daemon_client.kept()
        with self.behind_its_back() as connection:
            connection.execute("BEGIN EXCLUSIVE")
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(self.daemon_client.command, raw)
                public = self.daemon_client.ask("GET", f"/public/{self.bob.did}")
                self.assertEqual([one["event"] for one in public.json["events"]], ["news"])
                self.is_error(waiting.result(), 503, "UNAVAILABLE")
            connection.execute("ROLLBACK")
        self.assertEqual(self.daemon_client.kept(), before)
        self.assertEqual(self.daemon_client.command(raw).status, 200)
        self.is_error(self.daemon_client.command(raw), 401, "DUPLICATE_NONCE")
        self.assertEqual([one["payload"] for one in self.bob.pending()], ["sealed"])

    def changes(self) -> Iterator[tuple[str, bytes]]:
        """Every command that changes something, good, with the table that it cannot do without."""
        alice, bob = self.alice, self.bob
        contract = {"signed_communication_contract": bob.contract_with(alice)}
        acknowledge = "ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS"
        requests = [one["id"] for one in alice.requests()]
        stored = [{"event_id": one["id"], "encrypted_tags": ["other"]} for one in alice.items("EVENTS", "events")]
        commands: tuple[tuple[str, dict[str, Any], str | None], ...] = (
            ("contract", {"type": REQUEST, **alice.registration()}, None),
            ("contract_request", {"type": REQUEST, **SEALED}, bob.did),
            ("contract", {"type": RESPOND, **contract}, bob.did),
            ("contract_request", {"type": acknowledge, "communication_contract_ids": requests}, None),
            ("contract", {"type": SAVE, **contract}, None),
            ("stored_event", {"type": "SAVE_EVENTS", "events": [alice.event("x", tags=("tag",))] * 3}, None),
            ("stored_event", {"type": "UPDATE_EVENT_TAGS", "events": stored}, None),
            (
                "pending_event",
                {"type": "ACKNOWLEDGE_PENDING_EVENTS", "event_ids": [one["id"] for one in alice.pending()]},
                None,
            ),
        )
        for table, members, to in commands:
            yield table, alice.command(members, to=to)
        yield "pending_event", alice.command("sealed", to=bob.did, channel=PRIVATE_CHANNEL)
        for members in (
            {"type": "PUBLISH_PUBLIC_EVENT", **alice.public_event("news", tags=("tag",))},
            {"type": "DELETE_PUBLIC_EVENT", "public_event_id": alice.publish("olds")},
        ):
            yield "public_event", alice.command(members, channel=PUBLIC_CHANNEL)

    def test_changes_without_their_table(self) -> None:
        """
        Every command that changes something is refused while what it needs is not there; nothing is kept, the nonce
        neither, and the same command is carried out when it is there again.
        """
        for table, raw in self.changes():
            before = self.daemon_client.kept()
            with self.renamed(table):
                for way in WAYS:
                    self.is_error(self.daemon_client.command(raw, **way), 503, "UNAVAILABLE")
            self.assertEqual(self.daemon_client.kept(), before)
            self.assertEqual(self.daemon_client.command(raw).status, 200, raw)
            self.is_error(self.daemon_client.command(raw), 401, "DUPLICATE_NONCE")

    def test_queries_without_their_table(self) -> None:
        """Every query is refused, and so are the readers of a public channel, until the table is there again."""
        pending = "PENDING_COMMUNICATION_CONTRACT_REQUESTS"
        for table, what, list_ in (
            ("contract_request", pending, pending.lower()),
            ("contract", "COMMUNICATION_CONTRACTS", "communication_contracts"),
            ("pending_event", "PENDING_EVENTS", "pending_events"),
            ("stored_event", "EVENTS", "events"),
        ):
            with self.renamed(table):
                self.is_refused(partial(self.alice.command, {"type": f"QUERY_{what}"}), 503, "UNAVAILABLE")
            self.assertEqual(len(self.alice.items(what, list_)), 1)
        path = f"/public/{self.alice.did}"
        with self.renamed("public_event"):
            self.is_error(self.daemon_client.ask("GET", path), 503, "UNAVAILABLE")
        self.assertEqual(len(self.daemon_client.ask("GET", path).json["events"]), 1)

    def test_nonces_that_cannot_be_kept(self) -> None:
        """Without a memory of nonces nothing is carried out, and nothing is answered as if it had been."""
        commands = [raw for _, raw in self.changes()]
        before = self.daemon_client.kept()
        with self.renamed("nonce"):
            for raw in commands:
                self.is_error(self.daemon_client.command(raw), 503, "UNAVAILABLE")
        self.assertEqual(self.daemon_client.kept(), before)

    def test_sockets_without_a_table(self) -> None:
        """Who cannot be looked up is told to come again later; the same message is good then."""
        greeting = self.alice.greeting()
        for table in ("nonce", "contract"):
            with self.renamed(table):
                line = RawWebSocket(self.daemon_client)
                line.say(greeting if table == "nonce" else self.alice.greeting())
                self.is_told(line, "UNAVAILABLE", 1013)
        line = RawWebSocket(self.daemon_client)
        line.say(greeting)
        self.assertEqual(line.hear(), {"type": "AUTH_SUCCESS"})
        line.close()

    @contextlib.contextmanager
    def renamed(self, table: str) -> Iterator[None]:
        """A table is not there."""
        with self.behind_its_back() as connection:
            connection.execute(f"ALTER TABLE {table} RENAME TO missing")
            try:
                yield
            finally:
                connection.execute(f"ALTER TABLE missing RENAME TO {table}")
