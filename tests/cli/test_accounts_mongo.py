"""`mediatord accounts` on a real MongoDB, beside a store that is in use."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from mediatord.cli.mongodb_access import MongoAccountAccess, MongoQueueAccess
from mediatord.cli.store_access import AccountSummary
from tests.mongod import shared_replica_set
from tests.store.builders import ALICE, BOB, NOON
from tests.store.contract.base import INBOX, OTHER, StoreContract
from tests.store.mongo.test_contract import MakesMongo


class RecordsTests(MakesMongo, StoreContract, TestCase):
    async def test_all(self) -> None:
        """Accounts are listed and found with what waits for them, unregistered, and removed once nothing waits."""
        records = MongoAccountAccess(shared_replica_set().uri(self.database))
        await self.register(ALICE, OTHER, f"{OTHER}#key-1")
        await self.put("a", data=b"12345")
        await self.put("b", to=OTHER, data=b"12345")
        await self.change(ALICE, (INBOX, "remove"))
        alice = AccountSummary(ALICE, NOON, NOON, True, 2, 2, 10)
        found, total = records.accounts(9)
        self.assertEqual({one.did: one for one in found}[ALICE], alice)
        self.assertEqual((total, set(records.account_dids())), (2, {ALICE, BOB}))
        self.assertEqual(records.account(ALICE), alice)
        self.assertEqual(records.account(BOB), AccountSummary(BOB, NOON, NOON, False, 0, 0, 0))
        self.assertIsNone(records.account(OTHER))
        self.assertEqual(records.names(ALICE), [OTHER, f"{OTHER}#key-1"])
        self.assertEqual(set(records.queued_dids(ALICE)), {INBOX, OTHER})
        records.unregister(ALICE)
        self.assertEqual(records.names(ALICE), [])
        self.assertFalse(records.remove_account(ALICE))
        self.assertEqual(await self.waiting(ALICE), ["a", "b"])
        await self.store.remove_messages(["a", "b"])
        self.assertTrue(records.remove_account(ALICE))
        self.assertFalse(records.remove_account(ALICE))
        self.assertIsNone(await self.store.get_account(ALICE))
        await self.register(BOB, OTHER)

    async def test_queues_by_any_form(self) -> None:
        """Recipients, accounts and identities are found by all forms of their DIDs."""
        waiting = MongoQueueAccess(shared_replica_set().uri(self.database))
        await self.store.grant("did:web:bob.example")
        await self.register(ALICE, f"{OTHER}#key-1")
        for given, kept in ((f"{OTHER}#key-2", OTHER), ("did:web:Bob.example%3A443#k1", "did:web:bob.example")):
            self.assertEqual(waiting.kept(given), kept)
        self.assertIsNone(waiting.kept("did:example:nobody"))
