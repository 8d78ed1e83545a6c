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
COMMANDS_PER_NODE = 8

Write = Callable[[MongoDecentrlStore], Deferred[Any]]


class ConcurrentCommandTests(MongoDecentrlTestCase):
    """Three independent nodes."""

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

    async def run_concurrently(self, *writes: Write) -> Counter[type[MediatorError] | None]:
        """Run works on the nodes in turn, concurrently; count the outcomes."""
        deferreds = [write(self.node_stores[number % self.nodes]) for number, write in enumerate(writes)]
        return _count_outcomes(await DeferredList(deferreds, consumeErrors=True))

    async def test_quota_of_pending_events(self) -> None:
        """The number of pending events stays within its limit, and accepted ones are stored."""
        await self.save_contract()
        outcomes = await self.run_concurrently(
            *[
                lambda node: node.enqueue_event(self.make_guard(), self.make_pending_event(payload="12345"))
                for _ in range(3 * COMMANDS_PER_NODE)
            ]
        )
        self.assertEqual(outcomes, {None: 10, QuotaExceeded: 14})
        found = await self.decentrl.pending_events(ALICE, None, ALL)
        self.assertEqual((len(found.items), found.total), (10, 10))
        self.assertEqual(self.find_miscounted(), [])

    async def test_quota_of_pending_bytes(self) -> None:
        """The bytes of pending events stay within their limit."""
        await self.save_contract()
        payload = "x" * (MAX_PAGE_BYTES // 4)
        outcomes = await self.run_concurrently(
            *[
                lambda node: node.enqueue_event(self.make_guard(), self.make_pending_event(payload=payload))
                for _ in range(6)
            ]
        )
        self.assertEqual(outcomes, {None: 4, QuotaExceeded: 2})
        self.assertEqual(self.find_miscounted(), [])

    async def test_quotas_of_contracts(self) -> None:
        """The number of contracts stays within its limits, with one peer and in all."""
        outcomes = await self.run_concurrently(
            *[
                lambda node, peer=peer: node.save_contract(self.make_guard(), self.make_contract(ALICE, peer))
                for peer in [BOB] * 12 + [f"did:example:{number}" for number in range(6)]
            ]
        )
        found = await self.decentrl.contracts(ALICE, ContractFilter(), ALL)
        with_bob = await self.decentrl.contracts(ALICE, ContractFilter(BOB), ALL)
        self.assertEqual((outcomes[None], found.total), (11, 11))
        self.assertLessEqual(with_bob.total, 9)
        self.assertEqual(self.find_miscounted(), [])

    async def test_same_contract_is_stored_once(self) -> None:
        """The same contract that is saved on all nodes is stored once."""

        def save(node: MongoDecentrlStore) -> Deferred[None]:
            id = f"contract {next(self.numbers)}"
            return node.save_contract(self.make_guard(), Contract(id, ALICE, BOB, NOON + HOUR, b"same", b"{}"))

        self.assertEqual(await self.run_concurrently(*[save] * 9), {None: 9})
        self.assertEqual((await self.decentrl.contracts(ALICE, ContractFilter(), ALL)).total, 1)
        self.assertEqual(self.find_miscounted(), [])

    async def test_quota_of_registrations(self) -> None:
        """The number of registrations of a DID stays within its limit, and the last to expire counts."""

        def register(ttl: int) -> Write:
            return lambda node: node.save_contract(self.make_guard(), self.make_contract(None, ALICE, NOON + ttl))

        self.assertEqual(await self.run_concurrently(*[register(ttl) for ttl in range(1, 25)]), {None: 24})
        self.assertEqual(self.documents.registrations.count_documents({}), 9)
        self.assertEqual([await node.registered_until(ALICE) for node in self.node_stores], [NOON + 24] * 3)

    async def test_quotas_of_requests(self) -> None:
        """The number of contract requests stays within its limits, of one sender and in all."""

        def request(sender: str) -> Write:
            return lambda node: node.request_contract(
                self.make_guard(), ContractRequest(f"request {next(self.numbers)}", sender, ALICE, "", "")
            )

        self.assertEqual(await self.run_concurrently(*[request(BOB)] * 9), {None: 5, QuotaExceeded: 4})
        outcomes = await self.run_concurrently(*[request(f"did:example:{number}") for number in range(9)])
        self.assertEqual(outcomes, {None: 2, QuotaExceeded: 7})
        self.assertEqual(self.find_miscounted(), [])

    async def test_quota_of_archive(self) -> None:
        """Stored and public events share a limit, and unpublishing makes room once."""

        def publish(node: MongoDecentrlStore) -> Deferred[None]:
            return node.publish(self.make_guard(), ALICE, PublicEvent(f"p{next(self.numbers)}", "x", ("t",), 1.0, ""))

        def save(node: MongoDecentrlStore) -> Deferred[None]:
            return node.save_events(self.make_guard(), ALICE, [self.make_stored_event("t"), self.make_stored_event()])

        outcomes = await self.run_concurrently(*[publish, save] * COMMANDS_PER_NODE)
        stored = await self.decentrl.events(ALICE, EventFilter(), ALL)
        public = await self.decentrl.public_events(ALICE, PublicEventFilter(), ALL)
        total = stored.total + public.total
        self.assertIn(total, (8, 9))
        self.assertEqual(outcomes[None] + outcomes[QuotaExceeded], 2 * COMMANDS_PER_NODE)
        self.assertEqual(outcomes[None], stored.total // 2 + public.total)
        self.assertEqual(self.find_miscounted(), [])
        if public.items:
            id = public.items[0].id
            outcomes = await self.run_concurrently(*[lambda node: node.unpublish(self.make_guard(), ALICE, id)] * 6)
            self.assertEqual(outcomes[None], 1)
        self.assertEqual(self.find_miscounted(), [])

    async def test_counts_final_tags(self) -> None:
        """Tags that change on all nodes are counted as they are in the end."""
        events = [self.make_stored_event("x") for _ in range(3)]
        await self.decentrl.save_events(self.make_guard(), ALICE, events)

        def tag(size: int) -> Write:
            tags = [(event.id, ("y" * size,)) for event in events]
            return lambda node: node.update_tags(self.make_guard(), ALICE, tags)

        self.assertEqual(await self.run_concurrently(*[tag(size) for size in range(12)]), {None: 12})
        found = await self.decentrl.events(ALICE, EventFilter(), ALL)
        self.assertEqual(len({event.tags for event in found.items}), 1)
        self.assertEqual(self.find_miscounted(), [])

    async def test_acknowledgement_is_reported_once(self) -> None:
        """An event that is acknowledged on all nodes is reported as removed once."""
        await self.save_contract()
        events = [self.make_pending_event() for _ in range(4)]
        for event in events:
            await self.decentrl.enqueue_event(self.make_guard(), event)
        ids = [event.id for event in events]
        deferreds = [node.acknowledge_events(self.make_guard(), ALICE, ids) for node in self.node_stores * 2]
        removed: list[Any] = [gone for done, gone in await DeferredList(deferreds) if done]
        self.assertEqual([item.id for message in removed for item in message], ids)
        self.assertEqual(self.find_miscounted(), [])

    async def test_nonce_admits_one_command(self) -> None:
        """Of commands with the same nonce one is run, on whichever node."""
        await self.save_contract()
        for number in range(5):
            guard = CommandGuard(b"the same %d" % number, NOON + HOUR)
            outcomes = await self.run_concurrently(
                *[lambda node, guard=guard: node.enqueue_event(guard, self.make_pending_event()) for _ in range(6)]
            )
            self.assertEqual(outcomes, {None: 1, DuplicateNonce: 5})
        self.assertEqual((await self.decentrl.pending_events(ALICE, None, ALL)).total, 5)
        self.assertEqual(self.find_miscounted(), [])

    async def test_first_command_claims_nonce(self) -> None:
        """On one node the first command gets the nonce."""
        for number in range(5):
            guard = CommandGuard(b"the same %d" % number, NOON + HOUR)
            deferreds = [self.decentrl.check_guard(guard) for _ in range(12)]
            outcomes = [done for done, _ in await DeferredList(deferreds, consumeErrors=True)]
            self.assertEqual(outcomes, [True] + [False] * 11)

    async def test_order_of_arrival(self) -> None:
        """All nodes see the same order, and events delivered before a query come first."""
        await self.save_contract(ALICE, BOB)
        delivered: list[str] = []
        for node in self.node_stores * 3:
            event = self.make_pending_event()
            await node.enqueue_event(self.make_guard(), event)
            delivered.append(event.id)
        for node in self.node_stores:
            found = await node.pending_events(ALICE, None, ALL)
            self.assertEqual([event.id for event in found.items], delivered)


def _count_outcomes(results: Sequence[tuple[bool, Any]]) -> Counter[type[MediatorError] | None]:
    return Counter(None if done else result.type for done, result in results)
