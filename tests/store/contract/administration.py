"""Contract for listings and removals by the operator."""

from __future__ import annotations

from zope.interface.verify import verifyObject

from mediatord.store.interfaces.administration import (
    QUEUE_PROTOCOLS,
    AccountSummary,
    IStoreAdministration,
    QueueInfo,
    QueueListTotals,
    QueueProtocol,
)
from mediatord.store.interfaces.decentrl import PendingEvent
from mediatord.store.interfaces.messages import MessageLedger, StoreLedger
from mediatord.store.interfaces.v1_connections import V1Connection
from tests.store.builders import ALICE, BOB, HOUR, NOON
from tests.store.contract.base import INBOX, OTHER
from tests.store.contract.decentrl_base import DecentrlContract, make_contract

CAROL, DAVE = "did:decentrl:carol", "did:decentrl:dave"


class AdministrationContract(DecentrlContract):
    """Contract of `IStoreAdministration`."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        self.administration = self.store.administration
        verifyObject(IStoreAdministration, self.administration)

    async def deliver_events(self, *ids: str) -> None:  # type: ignore[override]  # always between the same two
        """Deliver events of DAVE, who is registered, to CAROL, six bytes each."""
        await self.register_dids(DAVE)
        await self.decentrl.save_contract(self.make_guard(), make_contract("c", CAROL, DAVE, until=NOON + HOUR))
        for id in ids:
            event = PendingEvent(id, CAROL, DAVE, "secret", self.clock.seconds())
            await self.decentrl.enqueue_event(self.make_guard(), event)

    async def list_ids(self, did: str, protocol: QueueProtocol, limit: int = 100) -> list[str]:
        """Ids of all entries of a queue, read page by page."""
        found: list[str] = []
        after: str | None = ""
        while after is not None:
            page = await self.administration.list_entries(did, protocol, after, limit)
            self.assertLessEqual(len(page.entries), limit)
            found += [entry.id for entry in page.entries]
            after = page.after
        return found

    async def test_lists_queues_longest_first(self) -> None:
        """Queues are listed longest first, in pages, with totals."""
        self.assertEqual(await self.administration.list_queues(QUEUE_PROTOCOLS, 0, 10), [])
        self.assertEqual(await self.administration.sum_queues(QUEUE_PROTOCOLS), QueueListTotals(0, 0, 0))
        await self.register(BOB, OTHER)
        await self.enqueue_ids("a", "b", "c", data=b"12345")
        await self.enqueue_ids("d", to=OTHER, data=b"1")
        self.clock.advance(5)
        await self.deliver_events("e", "f")
        queues = [
            QueueInfo("didcomm", INBOX, ALICE, 3, 15, NOON),
            QueueInfo("decentrl", CAROL, CAROL, 2, 12, NOON + 5),
            QueueInfo("didcomm", OTHER, BOB, 1, 1, NOON),
        ]
        self.assertEqual(await self.administration.list_queues(QUEUE_PROTOCOLS, 0, 10), queues)
        self.assertEqual(await self.administration.list_queues(QUEUE_PROTOCOLS, 1, 1), queues[1:2])
        self.assertEqual(await self.administration.list_queues(("decentrl",), 0, 10), queues[1:2])
        self.assertEqual(await self.administration.sum_queues(QUEUE_PROTOCOLS), QueueListTotals(3, 6, 28))
        self.assertEqual(await self.administration.sum_queues(("didcomm",)), QueueListTotals(2, 4, 16))

    async def test_lists_entries_in_order_of_arrival(self) -> None:
        """Entries are listed in order of arrival, in pages, with all that is stored except payloads."""
        await self.enqueue_ids("a", data=b"12345")
        await self.enqueue_ids("b", delay=60)
        await self.enqueue_ids("c")
        await self.store.mark_delivered(["a"])
        await self.deliver_events("e", "f", "g")
        page = await self.administration.list_entries(INBOX, "didcomm", "", 10)
        first, second, third = page.entries
        self.assertIsNone(page.after)
        self.assertEqual((first.id, first.did, first.account, first.size), ("a", INBOX, ALICE, 5))
        self.assertEqual((first.received_at, first.expires_at), (NOON, NOON + HOUR))
        self.assertEqual((first.status, first.pushes, first.due_at), ("delivered", 1, None))
        self.assertEqual((second.status, second.pushes, second.due_at), ("pending", 0, NOON + 60))
        self.assertEqual(third.id, "c")
        for limit in (1, 2, 3, 4):
            self.assertEqual(await self.list_ids(INBOX, "didcomm", limit), ["a", "b", "c"])
            self.assertEqual(await self.list_ids(CAROL, "decentrl", limit), ["e", "f", "g"])
        (event, *_) = (await self.administration.list_entries(CAROL, "decentrl", "", 10)).entries
        self.assertEqual((event.did, event.account, event.size, event.expires_at), (CAROL, CAROL, 6, None))
        self.assertEqual(await self.list_ids(CAROL, "didcomm"), [])
        self.assertEqual(await self.list_ids("did:example:nobody", "decentrl"), [])

    async def test_purge_removes_and_counts_entries(self) -> None:
        """Purged entries are removed and counted; entries removed before are not returned."""
        await self.enqueue_ids("a", "b", data=b"12345")
        await self.deliver_events("e", "f")
        (removed,) = await self.administration.purge(INBOX, "didcomm", ["a", "z"])
        self.assertEqual((removed.id, removed.recipient_did, removed.account, removed.size), ("a", INBOX, ALICE, 5))
        self.assertEqual((removed.received_at, removed.pushes, removed.reason), (NOON, 0, None))
        self.assertEqual(await self.administration.purge(INBOX, "didcomm", ["a"]), [])
        (event,) = await self.administration.purge(CAROL, "decentrl", ["e", "z"])
        self.assertEqual((event.id, event.recipient_did, event.size, event.received_at), ("e", CAROL, 6, NOON))
        self.assertEqual(await self.administration.purge(DAVE, "decentrl", ["f"]), [])
        self.assertEqual(
            (await self.list_ids(INBOX, "didcomm"), await self.list_ids(CAROL, "decentrl")), (["b"], ["f"])
        )
        self.assertEqual(
            await self.store.read_ledger(),
            StoreLedger(
                MessageLedger(accepted=2, removed=1, waiting=1), MessageLedger(accepted=2, removed=1, waiting=1)
            ),
        )
        self.assertEqual(await self.administration.sum_queues(QUEUE_PROTOCOLS), QueueListTotals(2, 2, 11))

    async def test_lists_all_dids_in_pages(self) -> None:
        """Each page continues where the one before ended; no DID is omitted."""
        await self.register(ALICE, OTHER)
        await self.enqueue_ids("a")
        await self.update_recipients(ALICE, (INBOX, "remove"))
        await self.deliver_events("e")
        for limit in (1, 2, 3, 100):
            found: set[str] = set()
            after: str | None = ""
            while after is not None:
                page = await self.administration.list_dids(after, limit)
                found |= set(page.dids)
                after = page.after
            self.assertLessEqual({ALICE, BOB, INBOX, OTHER, CAROL, DAVE}, found)

    async def test_finds_by_any_form_of_did(self) -> None:
        """Recipients, accounts and identities are found by all forms of their DIDs."""
        await self.store.grant("did:web:bob.example")
        await self.register(ALICE, f"{OTHER}#key-1")
        await self.enqueue_ids("a")
        await self.update_recipients(ALICE, (INBOX, "remove"))
        await self.deliver_events("e")
        for given, stored in (
            (f"{OTHER}#key-2", OTHER),
            ("did:web:Bob.example%3A443#k1", "did:web:bob.example"),
            (f"{INBOX}#key", INBOX),
            (CAROL, CAROL),
            (f"{CAROL}#k1", CAROL),
            (DAVE, DAVE),
        ):
            self.assertEqual(await self.administration.find_did(given), stored)
        for given in ("did:example:nobody", "", "*"):
            self.assertIsNone(await self.administration.find_did(given))

    async def test_shows_protocol_of_accounts(self) -> None:
        """An account shows whether its wallet has connected with DIDComm v1, and when."""
        wallet = "did:key:z6MkWallet"
        connection = V1Connection(wallet, "did:key:z6MkOwn", "request")
        await self.store.v1_connections.put_connection(connection, max_pending=1)
        self.clock.advance(5.0)
        await self.store.grant(wallet)
        admin = self.store.administration
        found = {one.did: (one.protocol, one.connected_at) for one in await admin.list_accounts(0, 10)}
        expected = {ALICE: ("didcomm", None), BOB: ("didcomm", None), wallet: ("didcomm_v1", NOON)}
        self.assertEqual({did: found[did] for did in expected}, expected)
        one = await admin.find_account(wallet)
        self.assertTrue(one is not None and (one.protocol, one.connected_at) == ("didcomm_v1", NOON))

    async def test_removes_accounts_with_empty_queues(self) -> None:
        """Accounts are listed and found with their queues, unregistered, and removed once those are empty."""
        await self.register(ALICE, OTHER, f"{OTHER}#key-1")
        await self.enqueue_ids("a", data=b"12345")
        await self.enqueue_ids("b", to=OTHER, data=b"12345")
        await self.update_recipients(ALICE, (INBOX, "remove"))
        self.clock.advance(5)
        await self.store.grant(CAROL)
        alice = AccountSummary(ALICE, NOON, NOON, True, 2, 2, 10)
        carol = AccountSummary(CAROL, NOON + 5, NOON + 5, False, 0, 0, 0)
        listed = await self.administration.list_accounts(0, 9)
        self.assertEqual((listed[0], {one.did: one for one in listed}[ALICE]), (carol, alice))
        self.assertEqual(await self.administration.list_accounts(1, 1), listed[1:2])
        self.assertEqual(await self.administration.count_accounts(), 3)
        self.assertEqual(await self.administration.find_account(ALICE), alice)
        self.assertIsNone(await self.administration.find_account(OTHER))
        self.assertEqual(set(await self.administration.list_queued_dids(ALICE)), {INBOX, OTHER})
        self.assertEqual(await self.administration.list_queued_dids(DAVE), [])
        await self.administration.unregister_recipients(ALICE)
        await self.administration.unregister_recipients(DAVE)
        self.assertEqual(await self.store.list_recipients(ALICE, offset=0, limit=9), ([], 0))
        self.assertIsNone(await self.store.find_owner(OTHER))
        self.assertFalse(await self.administration.remove_account(ALICE))
        self.assertEqual(await self.list_waiting(ALICE), ["a", "b"])
        await self.administration.purge(INBOX, "didcomm", ["a", "b"])
        self.assertTrue(await self.administration.remove_account(ALICE))
        self.assertFalse(await self.administration.remove_account(ALICE))
        self.assertIsNone(await self.store.get_account(ALICE))
        await self.register(BOB, OTHER)
