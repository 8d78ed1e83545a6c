"""Several nodes on one MongoDB, and batches of writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import pytest
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater

from mediatord.errors import MediatorError, PayloadTooLarge, StoreUnavailable, UnknownRecipient
from mediatord.store.interfaces.messages import EnqueueResult, QueueLimits
from mediatord.store.interfaces.store import BatchLimits
from mediatord.store.mongo import accounts
from mediatord.store.mongo.driver import client as server_module
from mediatord.store.mongo.driver.operation import Operation
from mediatord.store.mongo.store import MongoStore
from mediatord.store.mongo.transaction_batcher import TransactionBatcher
from tests.replica_set import ReplicaSet
from tests.store.mongo.mongo_test_case import (
    ALICE,
    CLOCK,
    INBOX,
    LOST_REPLY_TIME_LIMIT,
    MAX_OPERATION_SECONDS,
    SILENT_MS,
    TIME_LIMIT,
    MongoTestCase,
    run_coroutine,
    wait_for_recovery,
    wait_until,
)

OTHER = "did:key:z6MkOther"


async def gather_results(*deferreds: Deferred[Any]) -> list[Any]:
    """Results of Deferreds; for an error its class."""
    for deferred in deferreds:
        deferred.addErrback(lambda failure: failure.trap(MediatorError) and type(failure.value))
    return await gatherResults(list(deferreds))


class BatchTests(MongoTestCase):
    """Concurrent works are committed together, with the same results as one by one."""

    def setUp(self) -> None:
        super().setUp()
        self.observed: Counter[str] = Counter()

    def observe(self, operation: str, _seconds: float) -> None:
        self.observed[operation] += 1

    async def test_messages_share_commits(self) -> None:
        """Many messages share few commits, whatever their recipients, and results keep their order."""
        store = await self.open_store(observe=self.observe)
        await self.register(store, OTHER)
        await store.fetch_messages(ALICE, None, limit=1, max_bytes=1)
        deferreds = [
            self.enqueue_ids(store, f"m{number:03}", to=OTHER if number % 3 else INBOX) for number in range(100)
        ]
        before = self.observed["commit"]
        await gatherResults(deferreds)
        self.assertLessEqual(self.observed["commit"] - before, 4)
        self.assertEqual(self.observed["enqueue"], 100)
        for did in (INBOX, OTHER):
            found = await store.fetch_messages(ALICE, did, limit=100, max_bytes=10_000)
            expected = [f"m{number:03}" for number in range(100) if bool(number % 3) == (did == OTHER)]
            self.assertEqual([message.id for message in found], expected)
        self.assertEqual(len(self.list_queued()), 100)

    async def test_rejected_work_does_not_affect_others(self) -> None:
        """A rejected work does not affect the others."""
        store = await self.open_store(QueueLimits(max_messages=4))
        await self.enqueue_ids(store, "used")
        answers = await gather_results(
            self.enqueue_ids(store, "a"),
            self.enqueue_ids(store, "b", to="did:key:unknown"),
            self.enqueue_ids(store, "c", "used"),
            self.enqueue_ids(store, "d", "d"),
            self.enqueue_ids(store, "e\ud800"),
            self.enqueue_ids(store, "f", data=b"x" * 16_777_216),
            self.enqueue_ids(store, "g"),
        )
        self.assertEqual(answers[1:6], [UnknownRecipient, *[StoreUnavailable] * 3, PayloadTooLarge])
        self.assertEqual(self.list_queued(), ["used", "a", "g"])
        self.assertTrue(await store.find_owner(INBOX))

    async def test_batch_evicts_in_order(self) -> None:
        """Each work evicts the oldest message at its turn, also one of the same batch."""
        store = await self.open_store(QueueLimits(max_messages=3, max_bytes=100))
        await gatherResults(
            [self.enqueue_ids(store, "old", data=b"x" * 10), self.enqueue_ids(store, "older", data=b"x" * 10)]
        )
        deferreds = [
            self.enqueue_ids(store, id, data=b"x" * size)
            for id, size in (("a", 10), ("b", 10), ("big", 101), ("c", 85), ("d", 1), ("e", 1), ("f", 1), ("g", 1))
        ]
        evicted = [
            [(message.id, message.reason) for message in result.evicted] for result in await gatherResults(deferreds)
        ]
        count, size = "fifo_count", "fifo_bytes"
        self.assertEqual(
            evicted,
            [
                [],
                [("old", count)],
                [("big", size)],
                [("older", count), ("a", size)],
                [],
                [("b", count)],
                [("c", count)],
                [("d", count)],
            ],
        )
        self.assertEqual(self.list_queued(), ["e", "f", "g"])

    async def test_evicts_many_for_a_large_message(self) -> None:
        """Many small messages are evicted for a large one."""
        store = await self.open_store(QueueLimits(max_messages=1000, max_bytes=1000))
        await self.enqueue_ids(store, *(f"m{number:03}" for number in range(200)), data=b"12345")
        (enqueued,) = await gatherResults([self.enqueue_ids(store, "large", data=b"x" * 998)])
        self.assertEqual([gone.id for gone in enqueued.evicted], [f"m{number:03}" for number in range(200)])
        self.assertEqual(self.list_queued(), ["large"])

    async def test_works_on_one_message_run_in_order(self) -> None:
        """Works on the same message are done in order of submission."""
        store = await self.open_store()
        deferreds: list[Deferred[Any]] = [self.enqueue_ids(store, "a"), self.enqueue_ids(store, "b")]
        await gatherResults(deferreds)
        marked = store.mark_delivered(["a"])
        pending = store.mark_pending(["a", "b"])
        marked_again = store.mark_delivered(["a"])
        removed = store.acknowledge(ALICE, ["a"])
        removed_later = store.remove_messages(["a", "b"])
        await gatherResults([marked, marked_again])
        self.assertEqual(await pending, ["a"])
        self.assertEqual([(message.id, message.pushes) for message in await removed], [("a", 2)])
        self.assertEqual([(item.id, item.pushes) for item in await removed_later], [("b", 0)])
        self.assertEqual(self.list_queued(), [])

    async def test_rejects_works_beyond_limit(self) -> None:
        """Works beyond the limit on waiting ones are rejected; running ones do not count."""
        batcher = TransactionBatcher(
            await self.open_client(), at_once=1, bounds=BatchLimits(batch=2, waiting=3, waiting_bytes=100)
        )
        batcher.start()
        done: list[list[str]] = []

        async def together(run: Operation, works: Sequence[str], tries: int | None) -> list[None]:
            done.append(list(works))
            return [None for _ in works]

        def submit(work: str, size: int = 0) -> Deferred[None]:
            return batcher.submit("test", together, work, (), size)

        deferreds = [submit("a", 99), submit("b"), submit("c", 1)]
        rejected = [submit("d")]
        await deferreds[0]
        rejected += [submit("e", 100)]
        deferreds += [submit("f", 50)]
        await batcher.drain()
        for one in (*rejected, submit("g")):
            self.failureResultOf(one, StoreUnavailable)
        self.assertEqual(done, [["a", "b"], ["c", "f"]])
        await gatherResults(deferreds)


class NodesTests(MongoTestCase):
    """Three nodes that use one database concurrently."""

    LIMIT = 20

    async def open_nodes(self, limits: QueueLimits | None = None) -> list[MongoStore]:
        return [await self.open_store(limits) for _ in range(3)]

    async def test_full_queue_stays_within_limit(self) -> None:
        """A queue that all nodes fill never exceeds its limit; no message is lost or evicted twice."""
        self.patch(server_module, "REQUEST_TIME_LIMIT", 6 * TIME_LIMIT)
        nodes = await self.open_nodes(QueueLimits(max_messages=self.LIMIT))
        evicted: list[str] = []
        most = 0

        def note(enqueued: EnqueueResult) -> None:
            nonlocal most
            evicted.extend(message.id for message in enqueued.evicted)
            most = max(most, self.documents["messages"].count_documents({}))

        deferreds = [self.enqueue_ids(nodes[number % 3], f"m{number:03}").addCallback(note) for number in range(150)]
        await gatherResults(deferreds)
        queued = self.list_queued()
        self.assertEqual((len(queued), most), (self.LIMIT, self.LIMIT))
        self.assertEqual(sorted(queued + evicted), [f"m{number:03}" for number in range(150)])

    async def test_counters_stay_right_in_conflicts(self) -> None:
        """Conflicting messages, acknowledgements and expiry leave the counters right."""
        self.patch(server_module, "REQUEST_TIME_LIMIT", 6 * TIME_LIMIT)
        nodes = await self.open_nodes()
        dids = [f"did:key:{number}" for number in range(6)]
        await self.register(nodes[0], *dids)
        ids = [f"m{number:03}" for number in range(180)]

        async def receive(number: int, id: str) -> None:
            node, other = nodes[number % 3], nodes[(number + 1) % 3]
            await self.enqueue_ids(node, id, to=dids[number % 6])
            if number % 2:
                await other.mark_delivered([id], node="boot")
                await node.acknowledge(ALICE, [id])

        deferreds: list[Deferred[Any]] = [run_coroutine(receive(number, id)) for number, id in enumerate(ids)]
        await gatherResults([*deferreds, *(node.expire_messages(50) for node in nodes)])
        self.assertEqual(sorted(self.list_queued()), ids[::2])

    async def test_did_gets_one_owner(self) -> None:
        """Of several accounts that register a DID at the same time one gets it."""
        nodes = await self.open_nodes()
        accounts = [f"did:example:{number}" for number in range(3)]
        for account in accounts:
            await nodes[0].grant(account)
        results = await gatherResults(
            [
                node.update_recipients(account, [(OTHER, "add")], max_recipients=9)
                for node, account in zip(nodes, accounts, strict=True)
            ]
        )
        self.assertEqual(sorted(results), [["client_error"], ["client_error"], ["success"]])
        owner = await nodes[0].find_owner(OTHER)
        self.assertEqual(results[accounts.index(str(owner))], ["success"])

    async def test_account_is_granted_once(self) -> None:
        """An account that all nodes grant at the same time is one account."""
        nodes = await self.open_nodes()
        granted = await gatherResults([node.grant("did:example:carol") for node in nodes for _ in range(5)])
        self.assertEqual(len(set(granted)), 1)

    async def test_account_moves_once(self) -> None:
        """Of several DIDs that an account is moved to at the same time it gets one."""
        nodes = await self.open_nodes()
        moved = await gatherResults(
            [node.move_account(ALICE, f"did:example:new-{number}") for number, node in enumerate(nodes)]
        )
        self.assertEqual(sorted(moved), [False, False, True])
        await self.enqueue_ids(nodes[0], "a")

    async def test_nonce_is_claimed_once(self) -> None:
        """Of several claims of a nonce on any node one is new."""
        nodes = await self.open_nodes()
        until = CLOCK.seconds() + 60
        answers = await gatherResults(
            [node.claim_nonce(b"%d" % number, until) for number in range(40) for node in nodes for _ in range(2)]
        )
        self.assertEqual([sum(answers[start : start + 6]) for start in range(0, 240, 6)], [1] * 40)

    async def test_sees_registrations_of_other_nodes(self) -> None:
        """Registrations by another node are seen at once, removals soon; nothing is stored in between."""
        first, second, _ = await self.open_nodes()
        self.assertIsNone(await first.find_owner(OTHER))
        await self.register(second, OTHER)
        self.assertEqual(await first.find_owner(OTHER), ALICE)
        await second.update_recipients(ALICE, [(OTHER, "remove")], max_recipients=9)
        with self.assertRaises(UnknownRecipient):
            await self.enqueue_ids(first, "a", to=OTHER)
        self.assertIsNone(await first.find_owner(OTHER))

    async def test_owner_cache_expires(self) -> None:
        """The owner of a DID is cached for a short time."""
        first, second, _ = await self.open_nodes()
        now = 0.0
        self.patch(first._owner_cache, "_now", lambda: now)
        first._owner_cache.clear()
        self.assertEqual(await first.find_owner(INBOX), ALICE)
        await second.update_recipients(ALICE, [(INBOX, "remove")], max_recipients=9)
        self.assertEqual(await first.find_owner(INBOX), ALICE)
        now += accounts._OWNER_LIFETIME
        self.assertIsNone(await first.find_owner(INBOX))

    async def test_owner_lookups_share_a_query(self) -> None:
        """Concurrent lookups of owners share a query."""
        first, second, _ = await self.open_nodes()
        dids = [f"did:key:{number}" for number in range(300)]
        await self.register(second, *dids[::2])
        owners = await gatherResults([first.find_owner(did) for did in [*dids, *dids]])
        self.assertEqual(owners, [ALICE, None] * 300)

    async def test_follows_move_by_other_node(self) -> None:
        """A result names the current DID of the account, and the prior DID has nothing."""
        first, second, _ = await self.open_nodes()
        await self.enqueue_ids(first, "a")
        await second.move_account(ALICE, "did:example:new")
        (message,) = (await self.enqueue_ids(first, "b")).messages
        self.assertEqual(message.account, "did:example:new")
        self.assertEqual(await first.fetch_messages(ALICE, None, limit=9, max_bytes=99), [])
        self.assertEqual(await first.acknowledge(ALICE, ["a", "b"]), [])

    async def test_acknowledges_what_other_node_changed(self) -> None:
        """What a node remembers of a message that it queued is checked: another node may have changed anything."""
        first, second, _ = await self.open_nodes()

        async def acknowledge(id: str, account: str = ALICE) -> list[tuple[str, int]]:
            return [(one.id, one.pushes) for one in await first.acknowledge(account, [id])]

        await self.enqueue_ids(first, "known", "alone", "marked", "removed", "unregistered", "moved")
        self.assertEqual(await acknowledge("known"), [("known", 0)])
        self.assertEqual(await acknowledge("alone"), [("alone", 0)])
        await second.mark_delivered(["marked"], node="boot")
        self.assertEqual(await acknowledge("marked"), [("marked", 1)])
        await second.acknowledge(ALICE, ["removed"])
        self.assertEqual(await acknowledge("removed"), [])
        await second.update_recipients(ALICE, [(INBOX, "remove")], max_recipients=9)
        self.assertEqual(await acknowledge("unregistered"), [("unregistered", 0)])
        await self.register(second, INBOX)
        await second.move_account(ALICE, "did:example:new")
        self.assertEqual(await acknowledge("moved"), [])
        self.assertEqual(self.list_queued(), ["moved"])
        self.assertEqual(await acknowledge("moved", "did:example:new"), [("moved", 0)])
        self.assertEqual(self.list_queued(), [])
        self.assertFalse(list(self.documents["recipients"].find({"waited_for": True})))

    async def test_dead_node_holds_no_locks(self) -> None:
        """A dead node's open transactions hold no locks once another one opens the store."""
        server = self.make_client()
        first = await self.open_store(server=server)
        with self.servers.failpoint("commitTransaction", blockConnection=True, blockTimeMS=SILENT_MS, times=1):
            deferreds = self.enqueue_ids(first, "a")
            await wait_until(
                lambda: any(
                    "commitTransaction" in operation.get("command", {})
                    for operation in self.list_session_operations(server)
                )
            )
            second = await self.open_store()
            begin = CLOCK.seconds()
            await self.enqueue_ids(second, "b")
            self.assertLess(CLOCK.seconds() - begin, MAX_OPERATION_SECONDS)
            await deferreds
        self.assertEqual(sorted(self.list_queued()), ["a", "b"])

    async def test_deletes_records_of_session_owners(self) -> None:
        """Records of session owners are deleted at close, and those of dead processes by others."""
        first, second, _ = await self.open_nodes()
        self.documents["session_owners"].insert_one({"_id": "dead", "user": ""})
        await second.close()
        await second.open()
        self.assertEqual(self.documents["session_owners"].count_documents({"_id": "dead"}), 0)
        for node in (first, second):
            await node.close()
        self.assertLessEqual(self.documents["session_owners"].count_documents({}), 1)

    async def test_delivery_marks_of_live_nodes_stay(self) -> None:
        """Delivery marks of live nodes stay when another opens the store; those of dead ones do not."""
        first, second, third = await self.open_nodes()
        await self.enqueue_ids(first, "a", "b", "c")
        await first.mark_delivered(["a"], node="gone")
        await first.mark_delivered(["b"])
        await third.close()
        await third.open()
        found = await second.find_messages(["a", "b", "c"])
        self.assertEqual({message.status for message in found}, {"pending"})


class UncertainCommitTests(MongoTestCase):
    """A failed enqueue has stored nothing in the end, even if its commit succeeded."""

    @contextmanager
    def lose_commit_replies(self) -> Iterator[None]:
        """Commits succeed, and operations do not learn of it in their time."""
        error = {"code": 64, "errmsg": "no"}
        with (
            self.servers.failpoint("commitTransaction", writeConcernError=error),
            self.with_short_time_limit(LOST_REPLY_TIME_LIMIT),
        ):
            yield

    async def test_uncertain_messages_are_withdrawn(self) -> None:
        """Messages with an uncertain commit are withdrawn."""
        server = self.make_client()
        store = await self.open_store(server=server)
        await self.enqueue_ids(store, "before")
        with self.lose_commit_replies():
            self.assertEqual(
                await gather_results(self.enqueue_ids(store, "a"), self.enqueue_ids(store, "b", "c")),
                [StoreUnavailable, StoreUnavailable],
            )
            self.assertEqual(self.list_queued(), ["before", "a", "b", "c"])
        await wait_for_recovery(server)
        self.assertEqual(self.list_queued(), ["before"])
        await self.enqueue_ids(store, "a")
        self.assertEqual(self.list_queued(), ["before", "a"])

    async def test_withdraws_before_close(self) -> None:
        """They are withdrawn before the store is closed."""
        self.patch(server_module, "_CLOSE_TIMEOUT", TIME_LIMIT)
        store = await self.open_store()
        with self.lose_commit_replies():
            await gather_results(self.enqueue_ids(store, "a"))
        await store.close()
        self.assertEqual(self.list_queued(), [])

    async def test_releases_uncertain_claims(self) -> None:
        """Uncertain claims are released, but not those of others."""
        server = self.make_client()
        store = await self.open_store(server=server)
        later = CLOCK.seconds() + 3600
        await store.claim_nonce(b"other", later)
        with self.lose_commit_replies():
            self.assertEqual(
                await gather_results(store.claim_nonce(b"other", later), store.claim_nonce(b"mine", later)),
                [StoreUnavailable] * 2,
            )
        await wait_for_recovery(server)
        self.assertEqual(self.documents["nonces"].count_documents({}), 1)
        self.assertEqual(
            [await store.claim_nonce(b"other", later), await store.claim_nonce(b"mine", later)], [False, True]
        )

    @pytest.mark.exhaustive
    async def test_retries_partial_enqueue(self) -> None:
        """A partial enqueue is not committed, and is retried."""
        store = await self.open_store()
        for number, command in enumerate(("insert", "update", "commitTransaction")):
            faults: list[dict[str, Any]] = [{"errorCode": 11602}, {"errorCode": 50}, {"closeConnection": True}]
            for fault in faults:
                id = f"{number} {fault}"
                with self.servers.failpoint(command, times=1, **fault):
                    (answer,) = await gather_results(self.enqueue_ids(store, id))
                self.assertEqual(id in self.list_queued(), answer is not StoreUnavailable, id)


@pytest.mark.exhaustive
class FailoverTests(MongoTestCase):
    """A replica set of three with changing primaries."""

    time_limit = None

    def choose_servers(self) -> ReplicaSet:
        servers = ReplicaSet(3, election=1.0)
        servers.open()
        self.addCleanup(servers.close)
        return servers

    async def test_accepted_messages_survive_failovers(self) -> None:
        """Across failovers accepted messages are stored once, and rejected ones are not."""
        server = self.make_client(connections=6)
        store = await self.open_store(server=server)
        self.accepted: list[str] = []
        self.going = True
        workers = [run_coroutine(self._enqueue_on(store, name)) for name in "abcd"]
        primary = self.servers.primary
        for fault in (
            self.servers.step_down,
            lambda: self.servers.freeze(primary()),
            self._unfreeze_all,
            lambda: self.servers.kill(primary()),
        ):
            wanted = len(self.accepted) + 20
            await self.run_in_thread(fault)
            await wait_until(partial(self._accepted, wanted))
        self.going = False
        await gatherResults(workers)
        await wait_for_recovery(server)
        self.assertEqual(sorted(self.list_queued()), sorted(self.accepted))

    def _unfreeze_all(self) -> None:
        for number in range(3):
            self.servers.thaw(number)

    async def _enqueue_on(self, store: MongoStore, name: str) -> None:
        for number in count():
            if not self.going:
                return
            (answer,) = await gather_results(self.enqueue_ids(store, f"{name}{number}"))
            if answer is StoreUnavailable:
                await deferLater(CLOCK, 0.02)
            else:
                self.accepted.append(f"{name}{number}")

    def _accepted(self, number: int) -> bool:
        return len(self.accepted) >= number
