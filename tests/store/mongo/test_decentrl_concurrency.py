"""Concurrent commands of several nodes on one MongoDB database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from twisted.internet.defer import Deferred, DeferredList

from mediatord.errors import DuplicateNonce, MediatorError, QuotaExceeded
from mediatord.store.interfaces.decentrl import (
    MAX_PAGE_BYTES,
    CommandGuard,
    Contract,
    ContractFilter,
    ContractRequest,
    DecentrlQuotas,
    EventFilter,
    PageRequest,
    PublicEvent,
    PublicEventFilter,
)
from mediatord.store.mongo.decentrl_store import MongoDecentrlStore
from tests.store.builders import ALICE, BOB, HOUR, NOON
from tests.store.mongo.decentrl_test_case import MongoDecentrlTestCase

ALL = PageRequest(0, 1000)
# Commands of each node.
EACH = 8

Write = Callable[[MongoDecentrlStore], Deferred[Any]]


class RaceTests(MongoDecentrlTestCase):
    """Three nodes that do not know of each other."""

    nodes = 3
    caps = DecentrlQuotas(
        requests=7,
        requests_of_one=5,
        contracts=11,
        contracts_with_one=9,
        pending=10,
        pending_bytes=MAX_PAGE_BYTES,
        stored=9,
        stored_bytes=1000,
    )

    async def race(self, *writes: Write) -> Counter[type[MediatorError] | None]:
        """Run works on the nodes in turn, all at once; count the outcomes."""
        begun = [write(self.everywhere[number % self.nodes]) for number, write in enumerate(writes)]
        return _outcomes(await DeferredList(begun, consumeErrors=True))

    async def test_pending(self) -> None:
        """The number of pending events stays within its limit, and accepted ones are stored."""
        await self.agree()
        outcomes = await self.race(
            *[lambda node: node.enqueue_event(self.guard(), self.an_event(payload="12345")) for _ in range(3 * EACH)]
        )
        self.assertEqual(outcomes, {None: 10, QuotaExceeded: 14})
        found = await self.decentrl.pending_events(ALICE, None, ALL)
        self.assertEqual((len(found.items), found.total), (10, 10))
        self.assertEqual(self.miscounted(), [])

    async def test_pending_bytes(self) -> None:
        """So do their bytes."""
        await self.agree()
        payload = "x" * (MAX_PAGE_BYTES // 4)
        outcomes = await self.race(
            *[lambda node: node.enqueue_event(self.guard(), self.an_event(payload=payload)) for _ in range(6)]
        )
        self.assertEqual(outcomes, {None: 4, QuotaExceeded: 2})
        self.assertEqual(self.miscounted(), [])

    async def test_contracts(self) -> None:
        """The number of contracts stays within its limits, with one peer and in all."""
        outcomes = await self.race(
            *[
                lambda node, peer=peer: node.save_contract(self.guard(), self.a_contract(ALICE, peer))
                for peer in [BOB] * 12 + [f"did:example:{number}" for number in range(6)]
            ]
        )
        found = await self.decentrl.contracts(ALICE, ContractFilter(), ALL)
        with_bob = await self.decentrl.contracts(ALICE, ContractFilter(BOB), ALL)
        self.assertEqual((outcomes[None], found.total), (11, 11))
        self.assertLessEqual(with_bob.total, 9)
        self.assertEqual(self.miscounted(), [])

    async def test_same_contract(self) -> None:
        """The same contract that is saved on all nodes is stored once."""

        def save(node: MongoDecentrlStore) -> Deferred[None]:
            id = f"contract {next(self.numbers)}"
            return node.save_contract(self.guard(), Contract(id, ALICE, BOB, NOON + HOUR, b"same", b"{}"))

        self.assertEqual(await self.race(*[save] * 9), {None: 9})
        self.assertEqual((await self.decentrl.contracts(ALICE, ContractFilter(), ALL)).total, 1)
        self.assertEqual(self.miscounted(), [])

    async def test_registrations(self) -> None:
        """The number of registrations of a DID stays within its limit, and the last to expire counts."""

        def register(ttl: int) -> Write:
            return lambda node: node.save_contract(self.guard(), self.a_contract(None, ALICE, NOON + ttl))

        self.assertEqual(await self.race(*[register(ttl) for ttl in range(1, 25)]), {None: 24})
        self.assertEqual(self.documents.registrations.count_documents({}), 9)
        self.assertEqual([await node.registered_until(ALICE) for node in self.everywhere], [NOON + 24] * 3)

    async def test_requests(self) -> None:
        """The number of contract requests stays within its limits, of one sender and in all."""

        def request(sender: str) -> Write:
            return lambda node: node.request_contract(
                self.guard(), ContractRequest(f"request {next(self.numbers)}", sender, ALICE, "", "")
            )

        self.assertEqual(await self.race(*[request(BOB)] * 9), {None: 5, QuotaExceeded: 4})
        outcomes = await self.race(*[request(f"did:example:{number}") for number in range(9)])
        self.assertEqual(outcomes, {None: 2, QuotaExceeded: 7})
        self.assertEqual(self.miscounted(), [])

    async def test_archive(self) -> None:
        """Stored and public events share a limit, and unpublishing makes room once."""

        def publish(node: MongoDecentrlStore) -> Deferred[None]:
            return node.publish(self.guard(), ALICE, PublicEvent(f"p{next(self.numbers)}", "x", ("t",), 1.0, ""))

        def save(node: MongoDecentrlStore) -> Deferred[None]:
            return node.save_events(self.guard(), ALICE, [self.kept_event("t"), self.kept_event()])

        outcomes = await self.race(*[publish, save] * EACH)
        stored = await self.decentrl.events(ALICE, EventFilter(), ALL)
        public = await self.decentrl.public_events(ALICE, PublicEventFilter(), ALL)
        kept = stored.total + public.total
        self.assertIn(kept, (8, 9))
        self.assertEqual(outcomes[None] + outcomes[QuotaExceeded], 2 * EACH)
        self.assertEqual(outcomes[None], stored.total // 2 + public.total)
        self.assertEqual(self.miscounted(), [])
        if public.items:
            id = public.items[0].id
            outcomes = await self.race(*[lambda node: node.unpublish(self.guard(), ALICE, id)] * 6)
            self.assertEqual(outcomes[None], 1)
        self.assertEqual(self.miscounted(), [])

    async def test_tags(self) -> None:
        """Tags that change on all nodes are counted as they are in the end."""
        events = [self.kept_event("x") for _ in range(3)]
        await self.decentrl.save_events(self.guard(), ALICE, events)

        def tag(size: int) -> Write:
            tags = [(event.id, ("y" * size,)) for event in events]
            return lambda node: node.update_tags(self.guard(), ALICE, tags)

        self.assertEqual(await self.race(*[tag(size) for size in range(12)]), {None: 12})
        found = await self.decentrl.events(ALICE, EventFilter(), ALL)
        self.assertEqual(len({event.tags for event in found.items}), 1)
        self.assertEqual(self.miscounted(), [])

    async def test_acknowledged_once(self) -> None:
        """An event that is acknowledged on all nodes is reported as removed once."""
        await self.agree()
        events = [self.an_event() for _ in range(4)]
        for event in events:
            await self.decentrl.enqueue_event(self.guard(), event)
        ids = [event.id for event in events]
        begun = [node.acknowledge_events(self.guard(), ALICE, ids) for node in self.everywhere * 2]
        removed: list[Any] = [gone for done, gone in await DeferredList(begun) if done]
        self.assertEqual([one.id for gone in removed for one in gone], ids)
        self.assertEqual(self.miscounted(), [])

    async def test_one_nonce(self) -> None:
        """Of commands with the same nonce one is run, on whichever node."""
        await self.agree()
        for number in range(5):
            guard = CommandGuard(b"the same %d" % number, NOON + HOUR)
            outcomes = await self.race(
                *[lambda node, guard=guard: node.enqueue_event(guard, self.an_event()) for _ in range(6)]
            )
            self.assertEqual(outcomes, {None: 1, DuplicateNonce: 5})
        self.assertEqual((await self.decentrl.pending_events(ALICE, None, ALL)).total, 5)
        self.assertEqual(self.miscounted(), [])

    async def test_first_comes_first(self) -> None:
        """On one node it is the first."""
        for number in range(5):
            guard = CommandGuard(b"the same %d" % number, NOON + HOUR)
            begun = [self.decentrl.check_guard(guard) for _ in range(12)]
            outcomes = [done for done, _ in await DeferredList(begun, consumeErrors=True)]
            self.assertEqual(outcomes, [True] + [False] * 11)

    async def test_order_of_arrival(self) -> None:
        """All nodes see the same order, and events delivered before a query come first."""
        await self.agree(ALICE, BOB)
        delivered: list[str] = []
        for node in self.everywhere * 3:
            event = self.an_event()
            await node.enqueue_event(self.guard(), event)
            delivered.append(event.id)
        for node in self.everywhere:
            found = await node.pending_events(ALICE, None, ALL)
            self.assertEqual([event.id for event in found.items], delivered)


def _outcomes(results: Sequence[tuple[bool, Any]]) -> Counter[type[MediatorError] | None]:
    return Counter(None if done else result.type for done, result in results)
