"""Limits, and a failing store: nothing refused is stored, and service resumes afterwards (reference 10.4, 12)."""

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
from tests.integration.refusal_test_case import (
    HTTP_PATH_HEADERS,
    REQUEST,
    RESPOND,
    SAVE,
    SEALED,
    RefusalDaemonTestCase,
)


class LimitTests(RefusalDaemonTestCase):
    """429 RATE_LIMITED: too many requests, or too much stored (reference 10.4)."""

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

    def test_limits_hold_under_concurrency(self) -> None:
        """Not one more is stored when all commands arrive together."""
        alice, bob = self.register_identity("alice"), self.register_identity("bob")
        bob.permit_sender(alice)
        carol = RawDecentrlClient(self.daemon_client, "carol")
        pending = [alice.command("x", to=bob.did, channel=PRIVATE_CHANNEL) for _ in range(12)]
        requests = [carol.command({"type": REQUEST, **SEALED}, to=bob.did) for _ in range(12)]
        stored = [bob.command({"type": "SAVE_EVENTS", "events": [bob.stored_event("x")]}) for _ in range(6)]
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
        responses = self.daemon_client.post_concurrently(mixed + pending[6:] + requests[6:])
        self.assertEqual(sorted(response.status for response in responses), [200] * 9 + [429] * 33)
        for response in responses:
            if response.status != 200:
                self.assert_error(response, 429, "RATE_LIMITED")
        self.assertEqual((len(bob.pending_events()), len(bob.contract_requests())), (3, 2))
        public_events = self.daemon_client.request("GET", f"/public/{bob.did}").json["events"]
        self.assertEqual(len(bob.query("EVENTS", "events")) + len(public_events), 3)
        self.assertEqual(len(bob.query("COMMUNICATION_CONTRACTS", "communication_contracts")), 2)
        another_event = partial(alice.command, "x", to=bob.did, channel=PRIVATE_CHANNEL)
        self.assert_refused(another_event, 429, "RATE_LIMITED")


class StoreTests(RefusalDaemonTestCase):
    """503 UNAVAILABLE, and 500 if the database contains invalid data."""

    def setUp(self) -> None:
        super().setUp()
        self.alice, self.bob = self.register_identity("alice"), self.register_identity("bob")
        self.alice.permit_sender(self.bob)
        self.bob.permit_sender(self.alice)
        # Store one item of each kind, so that queries have to read.
        self.bob.send_event(self.alice)
        self.bob.execute(REQUEST, to=self.alice.did, **SEALED)
        self.alice.execute("SAVE_EVENTS", events=[self.alice.stored_event("sealed", tags=("tag",))])
        self.alice.publish("news")

    @contextlib.contextmanager
    def open_database(self) -> Iterator[sqlite3.Connection]:
        """A connection to the daemon's database."""
        database = self.daemon_client.database
        with contextlib.closing(
            sqlite3.connect(database, isolation_level=None, timeout=PATIENCE_SECONDS)
        ) as connection:
            connection.execute("PRAGMA legacy_alter_table = ON")
            yield connection

    def test_locked_database_refuses_writes_only(self) -> None:
        """
        While another process holds the write lock, writes are refused, nothing is stored and reads succeed;
        afterwards the same command is carried out without a restart (reference 6.1).
        """
        self.bob.publish("news")
        raw = self.alice.command("sealed", to=self.bob.did, channel=PRIVATE_CHANNEL)
        before = self.daemon_client.read_rows()
        with self.open_database() as connection:
            connection.execute("BEGIN EXCLUSIVE")
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(self.daemon_client.post_command, raw)
                public = self.daemon_client.request("GET", f"/public/{self.bob.did}")
                self.assertEqual([one["event"] for one in public.json["events"]], ["news"])
                self.assert_error(waiting.result(), 503, "UNAVAILABLE")
            connection.execute("ROLLBACK")
        self.assertEqual(self.daemon_client.read_rows(), before)
        self.assertEqual(self.daemon_client.post_command(raw).status, 200)
        self.assert_error(self.daemon_client.post_command(raw), 401, "DUPLICATE_NONCE")
        self.assertEqual([one["payload"] for one in self.bob.pending_events()], ["sealed"])

    def writing_commands(self) -> Iterator[tuple[str, bytes]]:
        """Every command that writes, with a table that it needs."""
        alice, bob = self.alice, self.bob
        contract = {"signed_communication_contract": bob.contract_with(alice)}
        acknowledge = "ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS"
        requests = [contract_request["id"] for contract_request in alice.contract_requests()]
        stored = [
            {"event_id": contract_request["id"], "encrypted_tags": ["other"]}
            for contract_request in alice.query("EVENTS", "events")
        ]
        commands: tuple[tuple[str, dict[str, Any], str | None], ...] = (
            ("contract", {"type": REQUEST, **alice.registration_request()}, None),
            ("contract_request", {"type": REQUEST, **SEALED}, bob.did),
            ("contract", {"type": RESPOND, **contract}, bob.did),
            ("contract_request", {"type": acknowledge, "communication_contract_ids": requests}, None),
            ("contract", {"type": SAVE, **contract}, None),
            ("stored_event", {"type": "SAVE_EVENTS", "events": [alice.stored_event("x", tags=("tag",))] * 3}, None),
            ("stored_event", {"type": "UPDATE_EVENT_TAGS", "events": stored}, None),
            (
                "pending_event",
                {
                    "type": "ACKNOWLEDGE_PENDING_EVENTS",
                    "event_ids": [contract_request["id"] for contract_request in alice.pending_events()],
                },
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

    def test_missing_table_refuses_writes(self) -> None:
        """Nothing is stored, not even the nonce; the same command is carried out when the table is back."""
        for table, raw in self.writing_commands():
            before = self.daemon_client.read_rows()
            with self.without_table(table):
                for way in HTTP_PATH_HEADERS:
                    self.assert_error(self.daemon_client.post_command(raw, **way), 503, "UNAVAILABLE")
            self.assertEqual(self.daemon_client.read_rows(), before)
            self.assertEqual(self.daemon_client.post_command(raw).status, 200, raw)
            self.assert_error(self.daemon_client.post_command(raw), 401, "DUPLICATE_NONCE")

    def test_missing_table_refuses_queries(self) -> None:
        """Queries and readers of a public channel, until the table is back."""
        pending = "PENDING_COMMUNICATION_CONTRACT_REQUESTS"
        for table, what, list_ in (
            ("contract_request", pending, pending.lower()),
            ("contract", "COMMUNICATION_CONTRACTS", "communication_contracts"),
            ("pending_event", "PENDING_EVENTS", "pending_events"),
            ("stored_event", "EVENTS", "events"),
        ):
            with self.without_table(table):
                self.assert_refused(partial(self.alice.command, {"type": f"QUERY_{what}"}), 503, "UNAVAILABLE")
            self.assertEqual(len(self.alice.query(what, list_)), 1)
        path = f"/public/{self.alice.did}"
        with self.without_table("public_event"):
            self.assert_error(self.daemon_client.request("GET", path), 503, "UNAVAILABLE")
        self.assertEqual(len(self.daemon_client.request("GET", path).json["events"]), 1)

    def test_missing_nonce_table_refuses_all_commands(self) -> None:
        """None is carried out or answered as if it had been."""
        commands = [raw for _, raw in self.writing_commands()]
        before = self.daemon_client.read_rows()
        with self.without_table("nonce"):
            for raw in commands:
                self.assert_error(self.daemon_client.post_command(raw), 503, "UNAVAILABLE")
        self.assertEqual(self.daemon_client.read_rows(), before)

    def test_missing_table_refuses_sockets(self) -> None:
        """The client is told to retry; then the same message is accepted."""
        greeting = self.alice.authentication()
        for table in ("nonce", "contract"):
            with self.without_table(table):
                line = RawWebSocket(self.daemon_client)
                line.send(greeting if table == "nonce" else self.alice.authentication())
                self.assert_authentication_failed(line, "UNAVAILABLE", 1013)
        line = RawWebSocket(self.daemon_client)
        line.send(greeting)
        self.assertEqual(line.receive(), {"type": "AUTH_SUCCESS"})
        line.close()

    @contextlib.contextmanager
    def without_table(self, table: str) -> Iterator[None]:
        """A table is missing within this context."""
        with self.open_database() as connection:
            connection.execute(f"ALTER TABLE {table} RENAME TO missing")
            try:
                yield
            finally:
                connection.execute(f"ALTER TABLE missing RENAME TO {table}")
