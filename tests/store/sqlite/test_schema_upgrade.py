"""Databases of earlier versions of the SQLite store."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from hashlib import sha256

from twisted.trial.unittest import SynchronousTestCase

from mediatord.store.interfaces.decentrl import DecentrlQuotas, StoredEvent
from mediatord.store.interfaces.messages import MessageLedger, QueueLimits, StoreLedger
from mediatord.store.sqlite.bulk_sql import hash_did
from mediatord.store.sqlite.database_file import connect, migrate_schema, read_schema_steps
from mediatord.store.sqlite.decentrl_queries import change_party_usage, find_party
from mediatord.store.sqlite.group_commit import commit_batch
from mediatord.store.sqlite.queue_accounting import add_queue_counts
from tests.store.builders import ALICE, BOB, NOON, ImmediateClock, make_database_path, make_payload, make_sqlite_store
from tests.store.sqlite.old_schema import register_in_old_schema
from tests.store.sqlite.operations import SQLiteOperations, find_miscounts, read_all_rows, resolve_results

INBOX = "did:key:z6MkInbox"


def insert_as_before(connection: sqlite3.Connection, *ids: str) -> None:
    """Messages for the only recipient of the only account, as versions before the fourth have inserted them."""
    for payload in map(make_payload, ids):
        digest = sha256(payload.data).digest()
        head = int.from_bytes(digest[:8], "big", signed=True)
        connection.execute(
            """
            INSERT INTO message (
                id, recipient_id, account_id, form, size, received_at, expires_at, due_at,
                digest_head, digest, payload
            ) VALUES (?, 1, 1, 'json', ?, ?, ?, NULL, ?, ?, ?)
            """,
            (payload.id, len(payload.data), NOON, NOON + 60, head, digest, payload.data),
        )


def insert_event_as_before(connection: sqlite3.Connection) -> None:
    """An event for Alice, as versions before the fifth have inserted it."""
    party = find_party(connection, ALICE)
    assert party is not None
    connection.execute(
        """
        INSERT INTO pending_event (id, recipient_id, sender_key, sender_did, received_at, size, payload)
        VALUES ('p', ?, ?, ?, ?, 5, 'event')
        """,
        (party.id, hash_did(BOB), BOB, repr(NOON)),
    )
    change_party_usage(connection, party.id, pending=1, pending_bytes=5)


class UpgradeTests(SynchronousTestCase):
    """What earlier versions have kept is all there."""

    def setUp(self) -> None:
        self.path = make_database_path(self)

    def test_upgrade_from_version_1(self) -> None:
        """What version 1 has kept is all there now: accounts, messages, and nonces that are claimed."""
        self.path.touch()
        with closing(connect(self.path)) as connection:
            migrate_schema(connection, read_schema_steps()[:1])
            register_in_old_schema(connection, ALICE, INBOX)
            insert_as_before(connection, "a")
            connection.execute("INSERT INTO nonce (key, until) VALUES (?, ?), (?, ?)", (b"x", NOON + 9, b"y", NOON))
        store = make_sqlite_store(ImmediateClock(), self.path)
        self.successResultOf(store.open())
        fetched = self.successResultOf(store.fetch(ALICE, None, limit=9, max_bytes=999))
        self.assertEqual([message.id for message in fetched], ["a"])
        self.assertEqual(self.successResultOf(store.status(ALICE, None)).message_count, 1)
        self.assertIs(self.successResultOf(store.claim(b"x", NOON + 60)), False)
        self.assertIs(self.successResultOf(store.claim(b"y", NOON + 60)), True)
        self.successResultOf(store.close())

    def test_upgrade_from_version_2(self) -> None:
        """So is what version 2 has kept; what it had delivered is pending, and can be delivered by a node."""
        self.path.touch()
        orders = SQLiteOperations(DecentrlQuotas())
        with closing(connect(self.path)) as connection:
            migrate_schema(connection, read_schema_steps()[:2])
            register_in_old_schema(connection, ALICE, INBOX)
            insert_as_before(connection, "a", "b")
            connection.execute("UPDATE message SET delivered = 1, pushes = 1 WHERE id = 'a'")
            commands = [*orders.settled(), orders.save(ALICE, [StoredEvent("s", ALICE, ALICE, "kept", ("x",), 1.0)])]
            self.assertEqual({error for _, error in resolve_results(commit_batch(connection, commands))}, {None})
            insert_event_as_before(connection)
            kept = read_all_rows(connection)
        store = make_sqlite_store(ImmediateClock(), self.path)
        self.successResultOf(store.open())
        fetched = self.successResultOf(store.fetch(ALICE, None, limit=9, max_bytes=999))
        self.assertEqual([(message.id, message.status) for message in fetched], [("a", "pending"), ("b", "pending")])
        self.successResultOf(store.mark_delivered(["b"], node="boot"))
        self.assertEqual(self.successResultOf(store.cluster.drop("boot")), 1)
        self.assertEqual([one.pushes for one in self.successResultOf(store.remove(["a", "b"]))], [1, 1])
        self.successResultOf(store.close())
        with closing(connect(self.path)) as connection:
            self.assertEqual((read_all_rows(connection), find_miscounts(connection)), (kept, []))

    def test_upgrade_from_version_3(self) -> None:
        """Messages that were counted by triggers are counted all the same, and found by account and by digest."""
        self.path.touch()
        with closing(connect(self.path)) as connection:
            migrate_schema(connection, read_schema_steps()[:3])
            register_in_old_schema(connection, ALICE, INBOX)
            insert_as_before(connection, *"abc")
        store = make_sqlite_store(ImmediateClock(), self.path)
        self.successResultOf(store.open())
        self.successResultOf(store.enqueue(INBOX, [make_payload("d")], expires_at=NOON + 60))
        digest = sha256(make_payload("b").data).hexdigest()
        removed = self.successResultOf(store.acknowledge(ALICE, ["a", digest]))
        self.assertEqual([one.id for one in removed], ["a", "b"])
        fetched = self.successResultOf(store.fetch(ALICE, None, limit=9, max_bytes=999))
        self.assertEqual([message.id for message in fetched], ["c", "d"])
        self.assertEqual(self.successResultOf(store.status(ALICE, INBOX)).message_count, 2)
        self.assertEqual(self.successResultOf(store.queue_sizes(9)), ([(INBOX, 2)], 0))
        self.successResultOf(store.close())

    def test_upgrade_from_version_4(self) -> None:
        """What waits has been accepted as far as the ledger knows, and is of nobody known."""
        self.path.touch()
        orders = SQLiteOperations(DecentrlQuotas())
        with closing(connect(self.path)) as connection:
            migrate_schema(connection, read_schema_steps()[:4])
            register_in_old_schema(connection, ALICE, INBOX)
            insert_as_before(connection, *"abc")
            add_queue_counts(connection, [(1, 1, 3, 3 * len(make_payload("a").data))])
            self.assertEqual(
                {error for _, error in resolve_results(commit_batch(connection, orders.settled()))}, {None}
            )
            insert_event_as_before(connection)
        store = make_sqlite_store(ImmediateClock(), self.path, QueueLimits(max_messages=4, share=0.5))
        self.successResultOf(store.open())
        books = StoreLedger(MessageLedger(accepted=3, waiting=3), MessageLedger(accepted=1, waiting=1))
        self.assertEqual(self.successResultOf(store.ledger()), books)
        for id in "defg":
            self.successResultOf(store.enqueue(INBOX, [make_payload(id)], expires_at=NOON + 60, origin=0x0001_0001))
        fetched = self.successResultOf(store.fetch(ALICE, None, limit=9, max_bytes=999))
        self.assertEqual([message.id for message in fetched], [*"bcfg"])
        self.successResultOf(store.close())
        with closing(connect(self.path)) as connection:
            self.assertEqual(find_miscounts(connection), [])

    def test_upgrade_from_version_5(self) -> None:
        """Recipients are found by all names of their DIDs, of which each has one owner: who registered one first."""
        self.path.touch()
        with closing(connect(self.path)) as connection:
            migrate_schema(connection, read_schema_steps()[:5])
            register_in_old_schema(connection, ALICE, INBOX, "did:web:A.example#key-1")
            register_in_old_schema(connection, BOB, INBOX + "#key-1", "did:example:bob")
        store = make_sqlite_store(ImmediateClock(), self.path)
        self.successResultOf(store.open())
        for name, owner in (
            (INBOX + "#key-2", ALICE),
            ("did:web:a.example", ALICE),
            ("did:example:bob?x", BOB),
        ):
            self.assertEqual(self.successResultOf(store.owner(name)), owner)
        for account, names in ((ALICE, [INBOX, "did:web:A.example#key-1"]), (BOB, ["did:example:bob"])):
            found = self.successResultOf(store.recipients(account, offset=0, limit=9))
            self.assertEqual(found, (names, len(names)))
            added = self.successResultOf(
                store.update(account, [("did:new:" + account[-3:], "add")], max_recipients=9)
            )
            self.assertEqual(added, ["success"])
        self.successResultOf(store.close())

    def test_other_forms_from_version_5(self) -> None:
        """Accounts are found by the canonical form of their DIDs; of two that are one the first has all."""
        wallet, other = "did:web:wallet.example", "did:web:Other.example"
        self.path.touch()
        with closing(connect(self.path)) as connection:
            migrate_schema(connection, read_schema_steps()[:5])
            register_in_old_schema(connection, "did:web:Wallet.example%3A443", INBOX)
            register_in_old_schema(connection, wallet, "did:example:more")
            register_in_old_schema(connection, other)
            insert_as_before(connection, "a")
            connection.execute("UPDATE message SET account_id = 2, recipient_id = 2")
            add_queue_counts(connection, [(2, 2, 1, len(make_payload("a").data))])
            retired = ("did:web:Gone.example", "did:web:gone.example", "did:web:OTHER.example")
            connection.executemany("INSERT INTO retired VALUES (?)", [(did,) for did in retired])
            connection.execute("INSERT INTO did_document VALUES ('did:web:Gone.example', 'long')")
        store = make_sqlite_store(ImmediateClock(), self.path)
        self.successResultOf(store.open())
        self.assertEqual(self.successResultOf(store.account_usage()).accounts, 2)
        for name in (INBOX, "did:example:more"):
            self.assertEqual(self.successResultOf(store.owner(name)), wallet)
        self.assertEqual(self.successResultOf(store.recipients(wallet, offset=0, limit=9))[1], 2)
        fetched = self.successResultOf(store.fetch(wallet, "did:example:more", limit=9, max_bytes=999))
        self.assertEqual([message.id for message in fetched], ["a"])
        self.assertEqual([one.id for one in self.successResultOf(store.acknowledge(wallet, ["a"]))], ["a"])
        dids = ("did:web:gone.example", "did:web:other.example")
        self.assertEqual([self.successResultOf(store.is_retired(did)) for did in dids], [True, False])
        self.assertIsNotNone(self.successResultOf(store.account("did:web:other.example")))
        self.assertEqual(self.successResultOf(store.recall_did("did:web:gone.example")), "long")
        self.successResultOf(store.close())
