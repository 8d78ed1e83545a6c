"""Contract for opening, closing and pinging a store."""

from __future__ import annotations

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.messages import ArrivalWindow
from mediatord.store.interfaces.store import IStore
from tests.store.builders import ALICE, NOON, make_payload
from tests.store.contract.base import INBOX, StoreContract


class LifecycleContract(StoreContract):
    """
    Contract of `IStore`.

    :cvar sizes_are_exact: whether a backend knows how large each of its tables is.
    """

    sizes_are_exact = False

    async def test_open_store_answers_ping(self) -> None:
        """An open store answers a ping."""
        await self.store.ping()

    async def test_reports_table_sizes(self) -> None:
        """Table sizes are in bytes, with that of the messages, or absent."""
        await self.store.grant(ALICE)
        await self.store.update_recipients(ALICE, [(INBOX, "add")], max_recipients=9)
        await self.store.enqueue(INBOX, [make_payload("a")], expires_at=NOON + 60)
        sizes = await self.store.table_sizes()
        self.assertTrue(all(size >= 0 for size in sizes.values()))
        if self.sizes_are_exact:
            self.assertGreater(sizes["message"], sizes["account"])
        self.assertEqual(self.store.fault_description, "")

    async def test_fails_after_close(self) -> None:
        """All operations fail after close; closing twice is allowed."""
        await self.store.close()
        await self.assert_every_call_fails(self.store)
        await self.store.close()

    async def test_fails_before_open(self) -> None:
        """All operations fail before open."""
        await self.assert_every_call_fails(self.make_test_store())

    async def test_close_finishes_pending_operations(self) -> None:
        """Operations begun before close complete."""
        enqueued = self.store.enqueue(INBOX, [make_payload("a")], expires_at=NOON + 60)
        await self.store.close()
        self.assertEqual([message.id for message in self.successResultOf(enqueued).messages], ["a"])

    async def assert_every_call_fails(self, store: IStore) -> None:
        for deferred in (
            store.ping(),
            store.table_sizes(),
            store.enqueue(INBOX, [make_payload("a")], expires_at=NOON),
            store.fetch_messages(ALICE, None, limit=1, max_bytes=1),
            store.get_queue_status(ALICE, None),
            store.find_messages(["a"]),
            store.find_arrivals([ALICE], ArrivalWindow(0, NOON), limit=1),
            store.mark_delivered(["a"]),
            store.mark_pending(["a"]),
            store.acknowledge(ALICE, ["a"]),
            store.expire_messages(1),
            store.find_next_due(),
            store.take_due_messages(1),
            store.queue_sizes(1),
            store.read_ledger(),
            store.read_backlog([NOON], 1),
            store.get_account(ALICE),
            store.grant(ALICE),
            store.mark_draft03(ALICE),
            store.find_owner(INBOX),
            store.update_recipients(ALICE, [], max_recipients=1),
            store.list_recipients(ALICE, offset=0, limit=1),
            store.move_account(ALICE, "did:example:carol"),
            store.remember_did("a", "b"),
            store.recall_did("a"),
            store.is_retired(ALICE),
            store.claim_nonce(b"a", NOON),
            store.release_nonce(b"a"),
            store.prune_nonces(),
        ):
            with self.assertRaises(StoreUnavailable):
                await deferred
