"""The Decentrl part is open as long as its store."""

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
from tests.store.contract.decentrl_base import DecentrlContract, a_contract, a_public_event, a_request, an_event


class DecentrlLifecycleContract(DecentrlContract):
    """Promises of `IStore.decentrl`."""

    async def test_closed(self) -> None:
        """Nothing works after close."""
        await self.store.close()
        await self.every_call_fails(self.decentrl)

    async def test_not_open(self) -> None:
        """Nothing works before open."""
        await self.every_call_fails(self.a_store().decentrl)

    async def test_open_again(self) -> None:
        """What was closed and is opened again works again."""
        await self.store.close()
        await self.store.open()
        await self.enlist(ALICE)
        await self.agree("contract of another time")
        await self.send("p")
        self.assertEqual((await self.pending())[-1:], ["p"])

    async def test_close_finishes(self) -> None:
        """What was begun before close is done."""
        begun = self.decentrl.save_events(self.guard(ALICE), ALICE, [an_event("a")])
        await self.store.close()
        self.assertIsNone(self.successResultOf(begun))

    async def every_call_fails(self, decentrl: IDecentrlStore) -> None:
        guard, part = self.guard(), PageRequest()
        for asked in (
            decentrl.check_guard(guard),
            decentrl.registered_until(ALICE),
            decentrl.save_contract(guard, a_contract("c", until=NOON)),
            decentrl.contracts(ALICE, ContractFilter(), part),
            decentrl.request_contract(guard, a_request("r")),
            decentrl.contract_requests(ALICE, part),
            decentrl.acknowledge_requests(guard, ALICE, ["r"]),
            decentrl.enqueue_event(guard, PendingEvent("p", ALICE, BOB, "", NOON)),
            decentrl.pending_events(ALICE, None, part),
            decentrl.find_pending(["p"]),
            decentrl.find_pending_arrivals([ALICE], ArrivalWindow(0, NOON), limit=1),
            decentrl.acknowledge_events(guard, ALICE, ["p"]),
            decentrl.save_events(guard, ALICE, [an_event("e")]),
            decentrl.events(ALICE, EventFilter(), part),
            decentrl.update_tags(guard, ALICE, [("e", ())]),
            decentrl.publish(guard, ALICE, a_public_event("x")),
            decentrl.unpublish(guard, ALICE, "x"),
            decentrl.public_events(ALICE, PublicEventFilter(), part),
        ):
            with self.assertRaises(StoreUnavailable):
                await asked
