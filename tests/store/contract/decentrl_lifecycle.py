"""Contract for opening and closing the Decentrl part of a store."""

from __future__ import annotations

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.decentrl import (
    ContractFilter,
    EventFilter,
    IDecentrlStore,
    PageRequest,
    PendingEvent,
    PublicEventFilter,
)
from mediatord.store.interfaces.messages import ArrivalWindow
from tests.store.builders import ALICE, BOB, NOON
from tests.store.contract.decentrl_base import (
    DecentrlContract,
    make_contract,
    make_event,
    make_public_event,
    make_request,
)


class DecentrlLifecycleContract(DecentrlContract):
    """Contract of `IStore.decentrl`."""

    async def test_fails_after_close(self) -> None:
        """All operations fail after close."""
        await self.store.close()
        await self.assert_every_call_fails(self.decentrl)

    async def test_fails_before_open(self) -> None:
        """All operations fail before open."""
        await self.assert_every_call_fails(self.make_test_store().decentrl)

    async def test_can_be_reopened(self) -> None:
        """A closed store can be opened again."""
        await self.store.close()
        await self.store.open()
        await self.register_dids(ALICE)
        await self.save_contracts("contract of another time")
        await self.deliver_events("p")
        self.assertEqual((await self.list_pending())[-1:], ["p"])

    async def test_close_finishes_pending_operations(self) -> None:
        """Operations begun before close complete."""
        saved = self.decentrl.save_events(self.make_guard(ALICE), ALICE, [make_event("a")])
        await self.store.close()
        self.assertIsNone(self.successResultOf(saved))

    async def assert_every_call_fails(self, decentrl: IDecentrlStore) -> None:
        guard, part = self.make_guard(), PageRequest()
        for deferred in (
            decentrl.check_guard(guard),
            decentrl.registered_until(ALICE),
            decentrl.save_contract(guard, make_contract("c", until=NOON)),
            decentrl.contracts(ALICE, ContractFilter(), part),
            decentrl.request_contract(guard, make_request("r")),
            decentrl.contract_requests(ALICE, part),
            decentrl.acknowledge_requests(guard, ALICE, ["r"]),
            decentrl.enqueue_event(guard, PendingEvent("p", ALICE, BOB, "", NOON)),
            decentrl.pending_events(ALICE, None, part),
            decentrl.find_pending(["p"]),
            decentrl.find_pending_arrivals([ALICE], ArrivalWindow(0, NOON), limit=1),
            decentrl.acknowledge_events(guard, ALICE, ["p"]),
            decentrl.save_events(guard, ALICE, [make_event("e")]),
            decentrl.events(ALICE, EventFilter(), part),
            decentrl.update_tags(guard, ALICE, [("e", ())]),
            decentrl.publish(guard, ALICE, make_public_event("x")),
            decentrl.unpublish(guard, ALICE, "x"),
            decentrl.public_events(ALICE, PublicEventFilter(), part),
        ):
            with self.assertRaises(StoreUnavailable):
                await deferred
